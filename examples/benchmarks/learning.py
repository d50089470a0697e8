# SPDX-License-Identifier: Apache-2.0
r"""Learning hyperparameters from their default start: the distance from the best known
optimum, the number of evaluations, and the seconds.

One squared-exponential kernel with a lengthscale for each column (one for all above 30
columns), a variance and a constant mean; regression with Normal noise, two classes with
logits, several with softmax; at most 100 k-means inducing inputs. The best known
optimum is the best of ``--restarts`` starts, drawn around the default one, by each
method::

    python examples/benchmarks/learning.py --json learning.json \
        --peers gpflow=/path/to/python

With ``--priors`` lengthscales, variance and noise have weak priors: log-normal around
the default start, a factor e either way. Without priors the evidence has many optima,
in which other columns are irrelevant (infinite lengthscales). Which of them a start
finds is chance. At the ends of all starts, ``lost`` counts the columns without which
the bound is the same. ``called back`` counts those among them for which the bound rises
in ``1 / l**2``: that gradient does not vanish at an infinite lengthscale, as the
gradient in ``log l`` does; where it is negative, no local step brings the column back.
``swapped`` counts the columns that are lost at one of two ends (the default start's,
the best) and kept at the other. ``--shorter 2`` starts at half the lengthscales.

``--moves`` tries to leave a local optimum: from the default start's end each kept
column in turn is removed, each lost one put back, and everything is learnt again.
``moved gap`` is the best result, ``moved steps`` its evaluations, ``restart steps``
those of all restarts.

``left`` is the gain of a run ten times as long that does not stop. Two columns tell the
causes of a gap apart: ``near`` is the share of starts that end within .1 nat of the
best (a small share where there are many optima), ``unresolved`` the uncertainty of the
final bound by rounding, as the fit reports it. Seconds are of a second run, without
compilation. Sets other than scikit-learn's are read from the folder ``GPAUG_DATA``.
"""

from __future__ import annotations

import argparse
import json
import math
import os
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
import numpyro
import numpyro.distributions as dist
import optax
from common import data_folder, machine, print_table, versions
from jax.flatten_util import ravel_pytree

import numpyro_gpaug as gpaug
from numpyro_gpaug.infer.vi.quasi_newton import uncertainty

HERE = Path(__file__).resolve()
SHIPPED = ("diabetes", "friedman", "breast_cancer", "iris", "wine", "digits")
OTHERS = (
    "hl_yacht", "hl_energy", "seitz_boston", "ratsch_breast_cancer", "ratsch_diabetis",
    "ratsch_heart", "seitz_heart", "ratsch_waveform", "seitz_banana", "usps_3v5",
    "glass", "vehicle", "segment", "usps",
)  # fmt: skip
OPTIMISERS = {
    "lbfgs": "lbfgs",
    "adam .05": optax.adam(0.05),
    "adam .3": optax.adam(0.3),
}
STEPS, ADAM_STEPS, EVALUATIONS = 300, 500, 60
SHARED_ABOVE = 30
# A lengthscale this many times longer is infinite; bounds closer than this are equal.
FAR, SAME = 1e4, 0.01


class Task(NamedTuple):
    """A data set, standardised.

    :param kind: ``"regression"``, ``"binary"`` or ``"classes"``.
    :param shorter: what lengthscales start shorter by than the distances of rows.
    """

    kind: str
    X: np.ndarray
    y: np.ndarray
    Z: np.ndarray
    shorter: float = 1.0

    @property
    def start(self) -> dict[str, np.ndarray]:
        """The default start of the positive params."""
        columns = self.X.shape[1]
        shape = columns if columns <= SHARED_ABOVE else ()
        params = {
            "lengthscale": np.full(shape, math.sqrt(columns) / self.shorter),
            "variance": np.array(1.0),
        }
        return params | ({"noise": np.array(0.3)} if self.kind == "regression" else {})


def waves(seed: int) -> tuple[np.ndarray, np.ndarray]:
    """A sine, a product and a line of eight columns, and noise."""
    rng = np.random.default_rng(seed)
    X = rng.normal(size=(300, 8))
    f = np.sin(2 * X[:, 0]) + X[:, 1] * X[:, 2] + 0.5 * X[:, 3]
    return X, f + 0.3 * rng.normal(size=300)


def load(name: str, rows: int, inducing: int) -> Task:
    """Read a data set; at most ``rows`` of its rows, at random."""
    from sklearn import datasets

    if name == "friedman":
        X, y = datasets.make_friedman1(500, noise=0.5, random_state=0)
    elif name.startswith("waves"):
        X, y = waves(int(name.removeprefix("waves")))
    elif name in SHIPPED:
        X, y = getattr(datasets, f"load_{name}")(return_X_y=True)
    else:
        folder = data_folder()
        assert folder is not None
        with np.load(folder / f"{name}.npz") as file:
            part = "" if "X" in file else "_train"
            X, y = file[f"X{part}"], file[f"y{part}"].ravel()
    chosen = np.random.default_rng(0).permutation(len(X))[:rows]
    X, y = X[chosen].astype(float), y[chosen]
    X = (X - X.mean(0)) / np.where(X.std(0) > 0, X.std(0), 1)
    values = np.unique(y)
    if len(values) > 20:
        kind, y = "regression", (y - y.mean()) / y.std()
    else:
        kind, y = (
            "binary" if len(values) == 2 else "classes",
            np.searchsorted(values, y),
        )
    Z = gpaug.inducing.kmeans(X, min(inducing, len(X) // 2))
    return Task(kind, X, y, np.asarray(Z))


def positive(name: str, start: Any, priors: bool) -> Any:
    """A positive hyperparameter, with a weak prior around its start or without one."""
    if not priors:
        return numpyro.param(name, start, constraint=dist.constraints.positive)
    return numpyro.sample(name, dist.LogNormal(jnp.log(start), 1).to_event(start.ndim))


def model_of(task: Task, priors: bool) -> Any:
    """The model of a data set."""

    def model(X: Any, y: Any = None, *, inducing: Any) -> None:
        params = {
            name: positive(name, jnp.asarray(value, X.dtype), priors)
            for name, value in task.start.items()
        }
        kernel = gpaug.kernels.SquaredExponential(
            params["lengthscale"], params["variance"]
        )
        if task.kind == "classes":
            latents = int(task.y.max()) + 1
            gp = gpaug.GaussianProcess("f", kernel, inducing, num_latents=latents)
        else:
            mean = numpyro.param("mean", jnp.zeros((), X.dtype))
            gp = gpaug.GaussianProcess("f", kernel, inducing, mean=mean)
        with numpyro.plate("data", X.shape[0]):
            f = gp(X)
            if task.kind == "regression":
                numpyro.sample("y", dist.Normal(f, params["noise"]), obs=y)
            elif task.kind == "binary":
                numpyro.sample("y", dist.Bernoulli(logits=f), obs=y)
            else:
                numpyro.sample("y", dist.Categorical(logits=f), obs=y)

    return model


def starts(task: Task, number: int) -> list[dict[str, np.ndarray]]:
    """The default start, and others drawn around it, about a factor 3 away."""
    rng = np.random.default_rng(1)
    drawn = [
        {k: v * np.exp(rng.normal(size=v.shape)) for k, v in task.start.items()}
        for _ in range(number - 1)
    ]
    return [task.start, *drawn]


def put(end: dict[str, Any], column: int, value: Any) -> dict[str, Any]:
    """Params with another lengthscale of a column."""
    return end | {"lengthscale": end["lengthscale"].at[column].set(value)}


def columns_lost(run: Callable, end: dict[str, Any]) -> tuple[set[int], set[int]]:
    """Return the columns without which the bound is the same, and those among them
    along which the bound rises.

    :param run: learns, from given params, for so many steps.
    :param end: where learning has ended.
    """
    here = run(end, 1)
    hyper = here.state.hyper
    _, unravel = ravel_pytree(hyper.values)
    slopes = unravel(hyper.optim_state.gradient)["lengthscale"]
    lost = set()
    for column, value in enumerate(end["lengthscale"]):
        without = run(put(end, column, FAR * value), 1)
        if abs(without.losses[0] - here.losses[0]) < SAME:
            lost.add(column)
    return lost, {column for column in lost if slopes[column] < 0}


def moved(run: Callable, end: dict[str, Any], lost: set[int]) -> tuple[float, int]:
    """The lowest loss after one column is taken out, or put back, and all is learnt
    again; and the evaluations of all these runs.

    :param run: learns, from given params, for so many steps.
    :param end: where learning has ended.
    :param lost: its lost columns.
    """
    scales = end["lengthscale"]
    kept = [float(s) for column, s in enumerate(scales) if column not in lost]
    typical = math.exp(np.mean(np.log(kept))) if kept else 1.0
    losses = [
        run(put(end, j, typical if j in lost else FAR * scale), STEPS).losses
        for j, scale in enumerate(scales)
    ]
    return min(float(each[-1]) for each in losses), sum(map(len, losses))


def ways_on(ends: list[Any], run: Callable, moves: bool) -> dict[str, Any]:
    """Return the number of columns that a kernel with a lengthscale for each has lost,
    and what moving them gains.

    :param ends: results of L-BFGS, that of the default start first.
    :param run: learns, from given params, for so many steps.
    :param moves: whether to try what moves of columns find.
    """
    lost, back = zip(*(columns_lost(run, end.params) for end in ends), strict=True)
    best = int(np.argmin([end.losses[-1] for end in ends]))
    out = {"lost": sum(map(len, lost)), "called back": sum(map(len, back))}
    out["swapped"] = len(lost[0] ^ lost[best])
    if moves:
        out["moved"], out["moved steps"] = moved(run, ends[0].params, lost[0])
    return out


def ours(
    task: Task, restarts: int, priors: bool, moves: bool, methods: Sequence[str]
) -> dict[str, dict[str, Any]]:
    """Return, by optimiser, the losses of every restart and the seconds of the default
    start.
    """
    dtype = jnp.result_type(float)
    X, Z = jnp.asarray(task.X, dtype), jnp.asarray(task.Z, dtype)
    y = jnp.asarray(task.y, dtype if task.kind == "regression" else int)
    model = model_of(task, priors)
    suffix = "_auto_loc" if priors else ""
    begun = [
        {f"{k}{suffix}": jnp.asarray(v, dtype) for k, v in start.items()}
        for start in starts(task, restarts)
    ]
    found: dict[str, dict[str, Any]] = {}
    for name, optim in OPTIMISERS.items():
        if name not in methods:
            continue
        svi = gpaug.ConjugateSVI(model, gpaug.AutoSparseGP(model), optim)
        steps = STEPS if name == "lbfgs" else ADAM_STEPS

        def run(start: Any, steps: int, svi: Any = svi, **options: Any) -> Any:
            return svi.run(
                jax.random.key(0), steps, X, y, inducing=Z, progress_bar=False,
                init_params=start, **options,
            )  # fmt: skip

        run(begun[0], steps)
        began = time.perf_counter()
        ends = [run(begun[0], steps)]
        seconds = time.perf_counter() - began
        if name == "lbfgs":
            ends += [run(start, steps) for start in begun[1:]]
        losses = [np.asarray(end.losses, float) for end in ends]
        found[name] = {"losses": losses, "seconds": seconds}
        if name == "lbfgs":
            longer = run(begun[0], 10 * len(losses[0]), tol=0.0)
            search = ends[0].state.hyper.optim_state
            found[name]["unresolved"] = uncertainty(search)
            found[name]["left"] = float(losses[0][-1] - longer.losses[-1])
            if task.start["lengthscale"].shape and not priors:
                found[name]["columns"] = ways_on(ends, run, moves)
    return found


def gpflow(task: Task, python: str) -> dict[str, Any]:
    """L-BFGS on all params together, in another interpreter, float64."""
    with tempfile.TemporaryDirectory() as folder:
        path = str(Path(folder) / "task.npz")
        np.savez(path, **task._asdict(), **task.start)
        done = subprocess.run(
            [python, str(HERE.parent / "peers_learning.py"), path],
            capture_output=True, text=True, check=False,
            env={**os.environ, "TF_CPP_MIN_LOG_LEVEL": "3"},
        )  # fmt: skip
    if done.returncode:
        return {"failed": done.stderr.strip().splitlines()[-1]}
    return json.loads(done.stdout.strip().splitlines()[-1])


def row(name: str, task: Task, args: argparse.Namespace) -> dict[str, Any]:
    """Return the row of the table for one data set."""
    found = ours(task, args.restarts, args.priors, args.moves, args.methods)
    ends = [losses[-1] for f in found.values() for losses in f["losses"]]
    out: dict[str, Any] = {
        "set": name, "rows": len(task.X), "columns": task.X.shape[1], "best": min(ends)
    }  # fmt: skip
    if args.gpflow is not None:
        rival = gpflow(task, args.gpflow)
        out |= {f"gpflow {k}": v for k, v in rival.items()}
    for optimiser, f in found.items():
        losses = f["losses"][0]
        out[f"{optimiser} gap"] = float(losses[-1] - out["best"])
        out[f"{optimiser} steps"] = len(losses)
        out[f"{optimiser} s"] = f["seconds"]
    first = found["lbfgs"]["losses"][0][:EVALUATIONS]
    out["gap in 60"] = float(first[-1] - out["best"])
    out |= {k: found["lbfgs"][k] for k in ("left", "unresolved")}
    of_starts = np.array([losses[-1] for losses in found["lbfgs"]["losses"]])
    out["near"] = float(np.mean(of_starts <= out["best"] + 0.1))
    out |= found["lbfgs"].get("columns", {})
    if "moved" in out:
        out["moved gap"] = out.pop("moved") - out["best"]
        out["restart steps"] = sum(map(len, found["lbfgs"]["losses"]))
    near = np.flatnonzero(first <= out["best"] + 0.1)
    out["to .1 nat"] = int(near[0]) + 1 if near.size else None
    if "gpflow loss" in out:
        out["gpflow gap"] = out.pop("gpflow loss") - out["best"]
    return out


def main() -> None:
    """Run the comparison."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    there = data_folder() is not None
    parser.add_argument("--sets", nargs="+", default=SHIPPED + OTHERS * there)
    parser.add_argument("--restarts", type=int, default=10)
    parser.add_argument("--rows", type=int, default=1500)
    parser.add_argument("--inducing", type=int, default=100)
    parser.add_argument("--priors", action="store_true", help="weak ones")
    parser.add_argument(
        "--methods", nargs="+", default=list(OPTIMISERS), choices=OPTIMISERS,
        help="lbfgs, and others beside it, which take most of the time",
    )  # fmt: skip
    parser.add_argument("--shorter", type=float, default=1.0, help="starts")
    parser.add_argument("--moves", action="store_true", help="take columns out, too")
    parser.add_argument("--peers", default="", help="gpflow=/path/to/python")
    parser.add_argument("--json")
    args = parser.parse_args()
    args.gpflow = dict(x.split("=") for x in args.peers.split(",") if x).get("gpflow")
    if args.gpflow and args.priors:
        parser.error("GPflow's model here has no priors")
    if "lbfgs" not in args.methods:
        parser.error("the others are compared with lbfgs")
    if args.moves and args.priors:
        parser.error("with priors no column is lost")
    rows = []
    for name in args.sets:
        task = load(name, args.rows, args.inducing)._replace(shorter=args.shorter)
        rows.append(row(name, task, args))
        print(json.dumps(rows[-1]), file=sys.stderr, flush=True)
    columns = dict.fromkeys(("set", "rows", "columns"), "") | {"best": ".2f"}
    columns |= {"gap in 60": ".3f", "to .1 nat": "", "left": ".3f"}
    columns |= {"near": ".0%", "unresolved": ".2f"}
    if not args.priors:
        columns |= dict.fromkeys(("lost", "called back", "swapped"), "")
    if args.moves:
        columns |= {"moved gap": ".3f", "moved steps": "", "restart steps": ""}
    for optimiser in (*args.methods, *(["gpflow"] if args.gpflow else [])):
        columns |= {f"{optimiser} gap": ".3f", f"{optimiser} steps": ""}
        columns |= {f"{optimiser} s": ".2f"}
    print_table(rows, columns)
    within = sum(r["gap in 60"] <= 0.1 for r in rows)
    print(f"within .1 nat in {EVALUATIONS} evaluations: {within} of {len(rows)}")
    stopped = sum(r["left"] <= 0.1 for r in rows)
    print(f"within .1 nat of a run ten times as long: {stopped} of {len(rows)}")
    if args.json:
        info = {"machine": machine(), "versions": versions("jax", "numpyro", "optax")}
        info |= {"dtype": str(jnp.result_type(float)), "rows": rows}
        Path(args.json).write_text(json.dumps(info, indent=1))


if __name__ == "__main__":
    main()
