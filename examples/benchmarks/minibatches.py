# SPDX-License-Identifier: Apache-2.0
r"""Hyperparameters learnt on minibatches: how far each rule for their updates has come
after so many steps, beside L-BFGS on all data.

By default an update is cut to half the step size of the posterior; ``hyper_every=1``
takes it whole, ``hyper_every=5`` takes one after every five steps of the posterior,
whole. Numbers are minus the mean log predictive density of a third of the rows, which
no fit has seen, the mean over ``--seeds``; ``back`` counts runs that the guard took
back to an earlier state, or that ended in an error::

    python examples/benchmarks/minibatches.py --json minibatches.json
    python examples/benchmarks/minibatches.py --sets friedman digits --rates .3

Sets other than scikit-learn's and those that are drawn are read from the folder
``GPAUG_DATA``. Starts of ``far`` sets are ten times too short, of a noise ten times too
large; those of ``learnt places`` learn inducing inputs, too.
"""

from __future__ import annotations

import argparse
import json
import math
import sys
import time
import warnings
from pathlib import Path
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
import numpyro
import numpyro.distributions as dist
import optax
from common import data_folder, print_table, write_report

import numpyro_gpaug as gpaug

RULES = {"default": None, "every 1": 1, "every 5": 5}
DRAWN = "friedman", "friedman far", "friedman learnt places", "counts", "outliers"
READ = "hl_energy", "seitz_boston", "seitz_banana", "ratsch_waveform", "segment"
SHARED_ABOVE = 30


class Task(NamedTuple):
    """Rows to learn from and to be judged on, inputs standardised.

    :param kind: of the likelihood: ``"normal"``, ``"student"``, ``"poisson"``,
        ``"bernoulli"`` or ``"softmax"``.
    :param batch: rows of a minibatch.
    :param start: of the positive params.
    :param places: whether inducing inputs are learnt.
    """

    kind: str
    X: np.ndarray
    y: np.ndarray
    X_test: np.ndarray
    y_test: np.ndarray
    Z: np.ndarray
    batch: int
    start: dict[str, np.ndarray]
    places: bool


def rows_of(name: str) -> tuple[str, np.ndarray, np.ndarray]:
    """The kind of likelihood, inputs and observations of a set."""
    from sklearn import datasets

    rng = np.random.default_rng(0)
    if name == "digits":
        return "softmax", *datasets.load_digits(return_X_y=True)
    if name in READ:
        folder = data_folder()
        assert folder is not None, "set GPAUG_DATA to the data folder"
        with np.load(folder / f"{name}.npz") as file:
            X, y = file["X"], file["y"].ravel()
        if name == "seitz_boston":
            return "student", X, y
        classes = len(np.unique(y))
        if classes > 20:
            return "normal", X, y
        return ("bernoulli" if classes == 2 else "softmax"), X, y
    X, y = datasets.make_friedman1(6000, noise=1.0, random_state=0)
    if name == "counts":
        return "poisson", X, rng.poisson(np.exp(y / 5))
    if name == "outliers":
        return (
            "student",
            X,
            y + 30 * rng.standard_cauchy(len(y)) * (rng.random(len(y)) < 0.05),
        )
    return "normal", X, y


def load(name: str, inducing: int) -> Task:
    """A set, a third of its rows at random kept back."""
    kind, X, y = rows_of(name.split(" ")[0])
    order = np.random.default_rng(1).permutation(len(X))
    kept = len(X) // 3
    test, train = order[:kept], order[kept:]
    spread = X[train].std(0)
    X = (X - X[train].mean(0)) / np.where(spread > 0, spread, 1)
    if kind in ("normal", "student"):
        y = (
            (y - np.median(y[train]))
            / np.subtract(*np.percentile(y[train], [84, 16]))
            * 2
        )
    elif kind in ("bernoulli", "softmax"):
        y = np.searchsorted(np.unique(y), y)
    columns = X.shape[1]
    shape = columns if columns <= SHARED_ABOVE else ()
    start = {
        "lengthscale": np.full(shape, math.sqrt(columns)),
        "variance": np.array(1.0),
    }
    if kind in ("normal", "student"):
        start["noise"] = np.array(0.3)
    if kind == "student":
        start["df"] = np.array(4.0)
    if name.endswith("far"):
        start |= {"lengthscale": start["lengthscale"] / 10, "noise": np.array(3.0)}
    Z = np.asarray(gpaug.inducing.kmeans(X[train], inducing))
    batch = 100 if len(train) < 1500 else 200
    places = name.endswith("places")
    return Task(kind, X[train], y[train], X[test], y[test], Z, batch, start, places)


def model_of(task: Task) -> Any:
    """The model of a task; of all rows without ``batch``."""
    positive = dist.constraints.positive

    def likelihood(f: Any, params: dict[str, Any]) -> Any:
        if task.kind == "normal":
            return dist.Normal(f, params["noise"])
        if task.kind == "student":
            return dist.StudentT(params["df"], f, params["noise"])
        if task.kind == "poisson":
            return dist.Poisson(jnp.exp(f))
        of_logits = dist.Bernoulli if task.kind == "bernoulli" else dist.Categorical
        return of_logits(logits=f)

    def model(
        X: Any, y: Any = None, *, inducing: Any, batch: int | None = None
    ) -> None:
        params = {
            name: numpyro.param(name, jnp.asarray(value, X.dtype), constraint=positive)
            for name, value in task.start.items()
        }
        kernel = gpaug.kernels.SquaredExponential(
            params["lengthscale"], params["variance"]
        )
        Z = numpyro.param("places", inducing) if task.places else inducing
        if task.kind == "softmax":
            classes = int(task.y.max()) + 1
            gp = gpaug.GaussianProcess("f", kernel, Z, num_latents=classes)
        else:
            mean = numpyro.param("mean", jnp.zeros((), X.dtype))
            gp = gpaug.GaussianProcess("f", kernel, Z, mean=mean)
        with numpyro.plate("data", X.shape[0], subsample_size=batch) as i:
            obs = None if y is None else y[i]
            numpyro.sample("y", likelihood(gp(X[i]), params), obs=obs)

    return model


def guide_of(task: Task, model: Any) -> Any:
    """The guide: quadrature for counts, which have no closed form."""
    if task.kind == "poisson":
        return gpaug.AutoLatentGaussian(model)
    return gpaug.AutoSparseGP(model)


class Data(NamedTuple):
    """A task on the device."""

    X: jax.Array
    y: jax.Array
    X_test: jax.Array
    y_test: jax.Array
    Z: jax.Array

    @classmethod
    def of(cls, task: Task) -> Data:
        dtype = jnp.result_type(float)
        of_y = dtype if task.kind in ("normal", "student") else int
        return cls(
            jnp.asarray(task.X, dtype), jnp.asarray(task.y, of_y),
            jnp.asarray(task.X_test, dtype), jnp.asarray(task.y_test, of_y),
            jnp.asarray(task.Z, dtype),
        )  # fmt: skip


def nll(svi: Any, params: dict[str, Any], data: Data) -> float:
    """Minus the mean log predictive density."""
    posterior = svi.posterior(params, data.X, data.y, inducing=data.Z)
    return -float(jnp.mean(posterior.log_prob(data.X_test, data.y_test)))


def on_batches(
    task: Task, rule: str, rate: float, points: list[int], seeds: int
) -> dict[str, Any]:
    """One rule: the score at every point, and where hyperparameters ended."""
    data, model = Data.of(task), model_of(task)
    scores, ends, back = [], [], 0
    guide = guide_of(task, model)
    svi = gpaug.ConjugateSVI(model, guide, optax.adam(rate), hyper_every=RULES[rule])
    began = time.perf_counter()
    for seed in range(seeds):
        seen = dict.fromkeys(points, math.nan)

        def look(state: Any, losses: Any, seen: Any = seen) -> None:
            if len(losses) in seen:
                seen[len(losses)] = nll(svi, svi.get_params(state), data)

        try:
            result = svi.run(
                jax.random.key(seed), points[-1], data.X, data.y, inducing=data.Z,
                batch=task.batch, progress_bar=False, callback=look,
            )  # fmt: skip
            back += bool(result.restored)
            ends.append(
                {
                    k: result.params[k]
                    for k in (*task.start, "mean")
                    if k in result.params
                }
            )
        except gpaug.CholeskyError:
            back += 1
        scores.append(list(seen.values()))
    means = np.mean(scores, 0)
    row = {str(point): float(x) for point, x in zip(points, means, strict=True)}
    last = (
        {k: np.mean([np.mean(end[k]) for end in ends]).item() for k in ends[0]}
        if ends
        else {}
    )
    spread = float(np.std([each[-1] for each in scores]))
    return row | {
        "back": back,
        "spread": spread,
        "end": last,
        "seconds": time.perf_counter() - began,
    }


def on_all(task: Task) -> dict[str, Any]:
    """L-BFGS on all rows."""
    data, model = Data.of(task), model_of(task)
    svi = gpaug.ConjugateSVI(model, guide_of(task, model))
    result = svi.run(
        jax.random.key(0), 300, data.X, data.y, inducing=data.Z, progress_bar=False
    )
    end = {
        k: np.mean(result.params[k]).item()
        for k in (*task.start, "mean")
        if k in result.params
    }
    return {"score": nll(svi, result.params, data), "end": end}


def main() -> None:
    """Run the comparison."""
    parser = argparse.ArgumentParser(description=__doc__.split("\n")[0])
    there = data_folder() is not None
    parser.add_argument("--sets", nargs="+", default=DRAWN + READ * there)
    parser.add_argument("--rates", nargs="+", type=float, default=[0.05, 0.01])
    parser.add_argument("--rules", nargs="+", choices=RULES, default=list(RULES))
    parser.add_argument("--points", nargs="+", type=int, default=[100, 300, 1000, 2000])
    parser.add_argument("--inducing", type=int, default=50)
    parser.add_argument("--seeds", type=int, default=2)
    parser.add_argument("--json", type=Path)
    args = parser.parse_args()
    warnings.filterwarnings("ignore", message="learning on minibatches made the bound")
    rows = []
    for name in args.sets:
        task = load(name, args.inducing)
        best = on_all(task)
        print(json.dumps({"set": name, "rows": len(task.X), **best}), file=sys.stderr)
        for rate in args.rates:
            for rule in args.rules:
                found = on_batches(task, rule, rate, args.points, args.seeds)
                row = {"set": name, "rate": rate, "rule": rule, "lbfgs": best["score"]}
                rows.append(row | found)
                print(json.dumps(rows[-1]), file=sys.stderr, flush=True)
    columns = {"set": "", "rate": "", "rule": ""}
    columns |= {str(point): ".3f" for point in args.points}
    print_table(rows, columns | {"lbfgs": ".3f", "back": "d"})
    write_report(args.json, rows, "optax")


if __name__ == "__main__":
    main()
