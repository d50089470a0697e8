# SPDX-License-Identifier: Apache-2.0
"""Coverage of 90% intervals of a function on simulated data: hyperparameters at point
estimates, and integrated.

Every set draws hyperparameters from their priors, 100 inputs, a function from the
Gaussian process and observations from the likelihood; ``covered`` is how many of the
function's values at the inputs lie within their intervals, averaged over all sets, and
``error`` its standard error (sets are independent, values of one are not). Intervals
of a calibrated posterior cover 90%, however little the data say::

    python examples/benchmarks/coverage.py --sets 200 --json coverage.json

``ConjugateSVI`` has L-BFGS's hyperparameters and a Gaussian; ``NestedVI`` has quantiles
of its weighted draws, ``mixture`` the mean and variance of ``nested.posterior()``.
``width`` is the mean width of intervals over that of ``NestedVI``, ``certified`` the
share of runs whose k-hat is at most 0.7, ``seconds`` those of a set after the first.
In double precision unless ``--float32``. Seconds are of one process.
"""

from __future__ import annotations

import argparse
import json
import time
import warnings
from functools import partial
from pathlib import Path
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import numpyro
import numpyro.distributions as dist
from common import machine, print_table, versions

import numpyro_gpaug as gpaug

NUM, JITTER = 100, 1e-6
TAIL = 1.6448536
COLUMNS = {"likelihood": "", "method": "", "sets": "d", "covered": ".3f"}
COLUMNS |= {"error": ".3f", "width": ".3f", "certified": ".2f", "seconds": ".2f"}


def normal(f: Any) -> dist.Distribution:
    return dist.Normal(f, numpyro.sample("noise", dist.LogNormal(-1.0, 0.5)))


def student_t(f: Any) -> dist.Distribution:
    scale = numpyro.sample("noise", dist.LogNormal(-1.0, 0.5))
    return dist.StudentT(4.0, f, scale)


def bernoulli(f: Any) -> dist.Distribution:
    return dist.Bernoulli(logits=f)


LIKELIHOODS = {"normal": normal, "bernoulli": bernoulli, "student_t": student_t}


def model(X: Any, y: Any = None, *, likelihood: Any) -> None:
    lengthscale = numpyro.sample("lengthscale", dist.LogNormal(-0.7, 0.7))
    variance = numpyro.sample("variance", dist.LogNormal(0.5, 1.0))
    K = gpaug.kernels.Matern52(lengthscale, variance)(X, X)
    K = K + JITTER * variance * jnp.eye(NUM)
    f = numpyro.sample("f", dist.MultivariateNormal(jnp.zeros(NUM), K))
    law = likelihood(f)
    with numpyro.plate("data", NUM):
        numpyro.sample("y", law, obs=y)


def simulated(model: Any, key: Any) -> tuple[Any, Any, Any]:
    """Inputs, observations, and the function there."""
    key, inputs = jax.random.split(key)
    X = jax.random.uniform(inputs, (NUM, 1), maxval=3.0)
    seeded = numpyro.handlers.trace(numpyro.handlers.seed(model, key))
    trace = seeded.get_trace(X)
    return X, trace["y"]["value"], trace["f"]["value"]


class Intervals:
    """All methods on a model, set up once: sets of one shape share programs.

    :param model: the model.
    :param points: hyperparameters that ``NestedVI`` draws.
    """

    def __init__(self, model: Any, points: int) -> None:
        self._svi = gpaug.ConjugateSVI(model, gpaug.AutoLatentGaussian(model))
        self._nested = gpaug.NestedVI(model, num_points=points, progress_bar=False)

    def point(self, X: Any, y: Any) -> Any:
        fit = self._svi.run(jax.random.key(0), 100, X, y, progress_bar=False)
        f = self._svi.posterior(fit)["f"]
        return around(f.mean, f.variance)

    def nested(self, X: Any, y: Any) -> Any:
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")  # the table tells the share of those
            self._nested.run(jax.random.key(1), X, y)
        row = self._nested.summary().filter(regex=r"^f\[", axis=0)
        return np.asarray(row["5%"]), np.asarray(row["95%"])

    def mixture(self, X: Any, y: Any) -> Any:
        """After :meth:`nested`."""
        f = self._nested.posterior()["f"]
        return around(f.mean, f.variance)

    @property
    def certified(self) -> bool:
        return self._nested.certified


def around(mean: Any, variance: Any) -> Any:
    deviation = np.sqrt(np.asarray(variance))
    return mean - TAIL * deviation, mean + TAIL * deviation


def rows_of(name: str, args: argparse.Namespace) -> list[dict[str, Any]]:
    here = partial(model, likelihood=LIKELIHOODS[name])
    draw, methods = jax.jit(partial(simulated, here)), Intervals(here, args.points)
    ways = {"ConjugateSVI": methods.point, "NestedVI": methods.nested}
    ways["mixture"] = methods.mixture
    covered: dict[str, list[float]] = {k: [] for k in ways}
    widths: dict[str, list[float]] = {k: [] for k in ways}
    seconds: dict[str, list[float]] = {k: [] for k in ways}
    certified = []
    for i in range(args.sets):
        X, y, f = draw(jax.random.fold_in(jax.random.key(args.seed), i))
        f = np.asarray(f)
        for way, interval in ways.items():
            start = time.perf_counter()
            low, high = interval(np.asarray(X), np.asarray(y))
            seconds[way].append(time.perf_counter() - start)
            covered[way].append(float(np.mean((low <= f) & (f <= high))))
            widths[way].append(float(np.mean(high - low)))
        certified.append(methods.certified)
    scale = np.mean(widths["NestedVI"])
    return [
        {
            "likelihood": name,
            "method": way,
            "sets": args.sets,
            "covered": float(np.mean(covered[way])),
            "error": float(np.std(covered[way], ddof=1) / np.sqrt(args.sets)),
            "width": float(np.mean(widths[way]) / scale),
            "certified": float(np.mean(certified)) if way == "NestedVI" else None,
            "seconds": float(np.median(seconds[way][1:])),
            "each": covered[way],
        }
        for way in ways
    ]


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--sets", type=int, default=200)
    parser.add_argument("--likelihoods", nargs="+", default=[*LIKELIHOODS])
    parser.add_argument("--points", type=int, default=256)
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--float32", action="store_true")
    parser.add_argument("--json", type=Path)
    args = parser.parse_args()
    jax.config.update("jax_enable_x64", not args.float32)
    rows = []
    for name in args.likelihoods:
        rows += rows_of(name, args)
        print_table(rows[-3:], COLUMNS)
        if args.json:
            found = versions("jax", "numpyro")
            report = {"machine": machine(), "versions": found, "rows": rows}
            args.json.write_text(json.dumps(report, indent=1))


if __name__ == "__main__":
    main()
