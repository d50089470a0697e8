# SPDX-License-Identifier: Apache-2.0
r"""Learning hyperparameters from their default start: how near to the best optimum that
is known, in how many evaluations, in how many seconds.

One squared-exponential kernel with a lengthscale for each column (one for all above 30
columns), a variance and a constant mean; regression with Normal noise, two classes
through the logit, several through softmax; at most 100 k-means inducing inputs. The
best known is the best of ``--restarts`` starts, drawn around the default one, by each
method::

    python examples/benchmarks/learning.py --json learning.json \
        --peers gpflow=/path/to/python

With ``--priors`` lengthscales, variance and noise have weak priors, log-normal around
the default start, a factor e either way. Without, the evidence has many optima: other
columns are irrelevant, their lengthscales infinite, and nothing calls them back. Which
of them a start finds is chance.

``left`` is what a run ten times as long, which does not stop, finds beyond. Two causes
of a gap are told apart: ``near`` is the share of the starts that end within .1 nat of
the best (few, where there are many optima), ``unresolved`` by how much rounding makes
the bound at the end uncertain, as the fit says. Seconds are
of a second run, without compilation. Sets other than scikit-learn's are
read from the folder ``GPAUG_DATA``.
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
from pathlib import Path
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
import numpyro
import numpyro.distributions as dist
import optax
from common import data_folder, machine, print_table, versions

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
ADAM_STEPS, EVALUATIONS = 500, 60
SHARED_ABOVE = 30


class Task(NamedTuple):
    """A data set, standardised.

    :param kind: ``"regression"``, ``"binary"`` or ``"classes"``.
    """

    kind: str
    X: np.ndarray
    y: np.ndarray
    Z: np.ndarray

    @property
    def start(self) -> dict[str, np.ndarray]:
        """The default start of the positive params."""
        columns = self.X.shape[1]
        shape = columns if columns <= SHARED_ABOVE else ()
        params = {
            "lengthscale": np.full(shape, math.sqrt(columns)),
            "variance": np.array(1.0),
        }
        return params | ({"noise": np.array(0.3)} if self.kind == "regression" else {})


def load(name: str, rows: int, inducing: int) -> Task:
    """Reads a data set; at most ``rows`` of its rows, at random."""
    from sklearn import datasets

    if name == "friedman":
        X, y = datasets.make_friedman1(500, noise=0.5, random_state=0)
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


def ours(task: Task, restarts: int, priors: bool) -> dict[str, dict[str, Any]]:
    """By optimiser: losses of every restart, and the seconds of the default start."""
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
        svi = gpaug.ConjugateSVI(model, gpaug.AutoSparseGP(model), optim)
        steps = 300 if name == "lbfgs" else ADAM_STEPS
        losses: list[np.ndarray] = []
        seconds = math.nan
        for start in begun if name == "lbfgs" else begun[:1]:
            for _ in range(1 if losses else 2):
                began = time.perf_counter()
                result = svi.run(
                    jax.random.key(0), steps, X, y, inducing=Z, progress_bar=False,
                    init_params=start,
                )  # fmt: skip
                took = time.perf_counter() - began
            if not losses:
                seconds, search = took, result.state.hyper.optim_state
            losses.append(np.asarray(result.losses, float))
        found[name] = {"losses": losses, "seconds": seconds}
        if name == "lbfgs":
            longer = svi.run(
                jax.random.key(0), 10 * len(losses[0]), X, y, inducing=Z, tol=0.0,
                progress_bar=False, init_params=begun[0],
            )  # fmt: skip
            found[name]["unresolved"] = uncertainty(search)
            found[name]["left"] = float(losses[0][-1] - longer.losses[-1])
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
    """What is shown of one data set."""
    found = ours(task, args.restarts, args.priors)
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
    near = np.flatnonzero(first <= out["best"] + 0.1)
    out["to .1 nat"] = int(near[0]) + 1 if near.size else None
    if "gpflow loss" in out:
        out["gpflow gap"] = out.pop("gpflow loss") - out["best"]
    return out


def main() -> None:
    """Runs the comparison."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    there = data_folder() is not None
    parser.add_argument("--sets", nargs="+", default=SHIPPED + OTHERS * there)
    parser.add_argument("--restarts", type=int, default=10)
    parser.add_argument("--rows", type=int, default=1500)
    parser.add_argument("--inducing", type=int, default=100)
    parser.add_argument("--priors", action="store_true", help="weak ones")
    parser.add_argument("--peers", default="", help="gpflow=/path/to/python")
    parser.add_argument("--json")
    args = parser.parse_args()
    args.gpflow = dict(x.split("=") for x in args.peers.split(",") if x).get("gpflow")
    if args.gpflow and args.priors:
        parser.error("GPflow's model here has no priors")
    rows = []
    for name in args.sets:
        task = load(name, args.rows, args.inducing)
        rows.append(row(name, task, args))
        print(json.dumps(rows[-1]), file=sys.stderr, flush=True)
    columns = dict.fromkeys(("set", "rows", "columns"), "") | {"best": ".2f"}
    columns |= {"gap in 60": ".3f", "to .1 nat": "", "left": ".3f"}
    columns |= {"near": ".0%", "unresolved": ".2f"}
    for optimiser in (*OPTIMISERS, *(["gpflow"] if args.gpflow else [])):
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
