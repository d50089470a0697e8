# SPDX-License-Identifier: Apache-2.0
"""Data that grow by a row: rounds of Bayesian optimisation, beside scikit-learn.

Every round fits one process to all inputs so far, predicts it at 200 candidates, and
takes the gradient of the acquisition at the best of them (scikit-learn has no
gradients; it only predicts there). One guide (with a new ``ConjugateSVI`` in every
round) or one ``NestedVI``, and inducing inputs on a grid serve all rounds, so that
programs are compiled in the first two. Times are processor seconds, by round: the
first, the second, and the median and the largest of all others::

    python examples/benchmarks/growing.py --rounds 40 --json found.json
"""

from __future__ import annotations

import argparse
import os
import time
import warnings
from collections.abc import Callable
from pathlib import Path
from typing import Any

# One thread, since processor times are compared; set before jax starts.
# Idle threads of XLA spin while they wait: NPROC is how many it starts.
os.environ.setdefault("NPROC", "1")
os.environ.setdefault("XLA_FLAGS", "--xla_cpu_multi_thread_eigen=false")
os.environ.setdefault("OPENBLAS_NUM_THREADS", "1")

import jax
import jax.numpy as jnp
import numpy as np
import numpyro
import numpyro.distributions as dist
from common import print_table, write_report
from sklearn.gaussian_process import GaussianProcessRegressor
from sklearn.gaussian_process.kernels import ConstantKernel, Matern, WhiteKernel

import numpyro_gpaug as gpaug

COLUMNS = {
    "method": "", "rounds": "d", "first": ".2f", "second": ".2f", "median": ".3f",
    "largest": ".3f", "best": ".2f",
}  # fmt: skip
KEY = jax.random.key(0)
SIDE = np.linspace(0, 1, 4, dtype=np.float32)
GRID = np.stack(np.meshgrid(SIDE, SIDE), -1).reshape(-1, 2)
# Means and variances at inputs.
Predict = Callable[[Any], tuple[Any, Any]]


def model(X, y=None, *, inducing):
    lengthscale = numpyro.sample("lengthscale", dist.LogNormal(-1.0, 0.7))
    variance = numpyro.sample("variance", dist.LogNormal(0.0, 0.7))
    noise = numpyro.sample("noise", dist.LogNormal(-2.0, 0.7))
    kernel = gpaug.kernels.Matern52(lengthscale, variance)
    f = gpaug.GaussianProcess("f", kernel, inducing)(X)
    with numpyro.plate("data", len(X)):
        numpyro.sample("y", dist.Normal(f, noise), obs=y)


def by_guide(guide: Any) -> Callable[..., Predict]:
    def fit(X: np.ndarray, y: np.ndarray) -> Predict:
        svi = gpaug.ConjugateSVI(model, guide)
        result = svi.run(KEY, 100, X, y, inducing=GRID, progress_bar=False)
        return svi.posterior(result).predict_f

    return fit


def by_nested() -> Callable[..., Predict]:
    nested = gpaug.NestedVI(model, progress_bar=False)

    def fit(X: np.ndarray, y: np.ndarray) -> Predict:
        with warnings.catch_warnings():
            # The draws of one round need no certificate.
            warnings.simplefilter("ignore")
            nested.run(KEY, X, y, inducing=GRID)
        return nested.posterior().predict_f

    return fit


def by_sklearn() -> Callable[..., Predict]:
    kernel = ConstantKernel(1.0) * Matern(0.4, nu=2.5) + WhiteKernel(0.02)

    def fit(X: np.ndarray, y: np.ndarray) -> Predict:
        fitted = GaussianProcessRegressor(kernel).fit(X, y)

        def predict(x: np.ndarray) -> tuple[np.ndarray, np.ndarray]:
            mean, deviation = fitted.predict(x, return_std=True)
            return mean, deviation**2

        return predict

    return fit


METHODS = {
    "AutoSparseGP": lambda: by_guide(gpaug.AutoSparseGP(model)),
    "AutoLatentGaussian": lambda: by_guide(gpaug.AutoLatentGaussian(model)),
    "NestedVI": by_nested,
    "scikit-learn": by_sklearn,
}


def measure(x: np.ndarray, rng: np.random.Generator) -> np.ndarray:
    values = np.sin(6 * x[:, 0]) * np.cos(4 * x[:, 1])
    return np.float32(values + 0.05 * rng.normal(size=len(x)))


def row(name: str, rounds: int) -> dict[str, Any]:
    """Run the rounds of one method."""
    rng = np.random.default_rng(0)
    fit, seconds = METHODS[name](), []
    X = np.float32(rng.uniform(size=(6, 2)))
    y = measure(X, rng)
    with warnings.catch_warnings():
        warnings.filterwarnings("ignore", module="sklearn")
        for _ in range(rounds):
            candidates = np.float32(rng.uniform(size=(200, 2)))
            start = time.process_time()
            predict = fit(X, y)
            new = chosen(predict, candidates, gradient=name != "scikit-learn")
            seconds.append(time.process_time() - start)
            X = np.concatenate([X, new[None]])
            y = np.concatenate([y, measure(new[None], rng)])
    first, second, *others = seconds
    return {
        "method": name, "rounds": rounds, "first": first, "second": second,
        "median": float(np.median(others)), "largest": max(others),
        "best": float(y.max()),
    }  # fmt: skip


def chosen(predict: Predict, candidates: np.ndarray, *, gradient: bool) -> np.ndarray:
    """The best candidate by an upper confidence bound, moved along its gradient."""
    mean, variance = (np.asarray(x) for x in predict(candidates))
    best = candidates[np.argmax(mean + 2 * np.sqrt(variance))]
    if not gradient:
        return best

    def upper(x: Any) -> Any:
        mean, variance = predict(x[None])
        return (mean + 2 * jnp.sqrt(variance)).sum()

    slope = np.asarray(jax.grad(upper)(jnp.asarray(best)))
    return np.clip(best + 0.01 * slope, 0, 1)


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--methods", nargs="+", default=[*METHODS], choices=METHODS)
    parser.add_argument("--rounds", type=int, default=40)
    parser.add_argument("--json", type=Path)
    args = parser.parse_args()
    rows = [row(name, args.rounds) for name in args.methods]
    write_report(args.json, rows)
    print_table(rows, COLUMNS)


if __name__ == "__main__":
    main()
