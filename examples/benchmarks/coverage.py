# SPDX-License-Identifier: Apache-2.0
r"""Coverage of 90% intervals of a function on simulated data: hyperparameters at point
estimates, and integrated.

Every set draws hyperparameters from their priors, inputs, a function from the Gaussian
process and observations from the likelihood; ``covered`` is how many of the
function's values at the inputs lie within their intervals, averaged over all sets, and
``error`` its standard error (sets are independent, values of one are not). Intervals
of a calibrated posterior cover 90%, however little the data say::

    python examples/benchmarks/coverage.py --sets 200 --json coverage.json

``ConjugateSVI`` has L-BFGS's hyperparameters and a Gaussian; ``NestedVI`` has quantiles
of its weighted draws, ``mixture`` the mean and variance of ``nested.posterior()``.
``width`` is the mean width of intervals over that of ``NestedVI``, ``certified`` the
share of runs whose k-hat is at most 0.7, ``cold`` the seconds of the first set,
``seconds`` the median of the others. In double precision unless ``--float32``. Seconds
are of one process.

``--part dense`` has 100 inputs in one dimension and all of their function values as
latents; ``--part markov`` has the same data, and the process as a chain of states.
``--part sparse`` has ``--rows`` inputs in ``--columns`` dimensions, a lengthscale for
each, and a process with ``--inducing`` inducing inputs; the function is drawn from the
whole process, so that too few inducing inputs show. Draws of ``NestedVI`` are of the
model as written, where function values follow from the inducing ones; ``ConjugateSVI``
and ``mixture`` have what these leave open::

    python examples/benchmarks/coverage.py --part sparse --sets 10 --columns 8 \
        --rows 5000 --inducing 100
"""

from __future__ import annotations

import argparse
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
from common import print_table, write_report

import numpyro_gpaug as gpaug
from numpyro_gpaug.inducing import kmeans
from numpyro_gpaug.math.importance import weighted_quantiles

NUM, JITTER, VARIANCE = 100, 1e-6, 2.0
TAIL = 1.6448536
COLUMNS = {"likelihood": "", "method": "", "sets": "d", "covered": ".3f"}
COLUMNS |= {"error": ".3f", "width": ".3f", "certified": ".2f"}
COLUMNS |= {"cold": ".1f", "seconds": ".2f"}


def normal(f: Any) -> dist.Distribution:
    return dist.Normal(f, numpyro.sample("noise", dist.LogNormal(-1.0, 0.5)))


def student_t(f: Any) -> dist.Distribution:
    scale = numpyro.sample("noise", dist.LogNormal(-1.0, 0.5))
    return dist.StudentT(4.0, f, scale)


def bernoulli(f: Any) -> dist.Distribution:
    return dist.Bernoulli(logits=f)


LIKELIHOODS = {"normal": normal, "bernoulli": bernoulli, "student_t": student_t}


def dense(X: Any, y: Any = None, *, likelihood: Any) -> None:
    """A process at all inputs."""
    kernel = matern()
    at_inputs(kernel(X, X), kernel.variance, y, likelihood)


def matern() -> Any:
    lengthscale = numpyro.sample("lengthscale", dist.LogNormal(-0.7, 0.7))
    variance = numpyro.sample("variance", dist.LogNormal(0.5, 1.0))
    return gpaug.kernels.Matern52(lengthscale, variance)


def markov(X: Any, y: Any = None, *, likelihood: Any) -> None:
    """A process as a chain of states."""
    f = gpaug.GaussianProcess("f", matern(), markov=True)(X)
    observed = likelihood(f)
    with numpyro.plate("data", len(X)):
        numpyro.sample("y", observed, obs=y)


def at_inputs(K: Any, variance: Any, y: Any, likelihood: Any) -> None:
    num = len(K)
    K = K + JITTER * variance * jnp.eye(num)
    f = numpyro.sample("f", dist.MultivariateNormal(jnp.zeros(num), K))
    observed = likelihood(f)
    with numpyro.plate("data", num):
        numpyro.sample("y", observed, obs=y)


def ard(columns: int) -> Any:
    """A kernel with a lengthscale for each column, of half to twice their root."""
    prior = dist.LogNormal(0.5 * jnp.log(columns), 0.5).expand([columns])
    lengthscales = numpyro.sample("lengthscales", prior.to_event(1))
    return gpaug.kernels.Matern52(lengthscales, VARIANCE)


def whole(X: Any, *, likelihood: Any) -> None:
    """The model that data of :func:`sparse` are simulated from."""
    at_inputs(ard(X.shape[1])(X, X), VARIANCE, None, likelihood)


def sparse(X: Any, y: Any = None, *, likelihood: Any, inducing: Any) -> None:
    """A process that follows from its values at inducing inputs."""
    f = gpaug.GaussianProcess("f", ard(X.shape[1]), inducing=inducing)(X)
    observed = likelihood(f)
    with numpyro.plate("data", len(X)):
        numpyro.sample("y", observed, obs=y)


PARTS = {"dense": dense, "markov": markov, "sparse": sparse}


def simulated(model: Any, shape: tuple[int, int], key: Any) -> tuple[Any, Any, Any]:
    """Inputs, observations, and the function there."""
    key, inputs = jax.random.split(key)
    X = jax.random.uniform(inputs, shape, maxval=3.0)
    seeded = numpyro.handlers.trace(numpyro.handlers.seed(model, key))
    trace = seeded.get_trace(X)
    return X, trace["y"]["value"], trace["f"]["value"]


class Intervals:
    """All methods on a model, set up once: sets of one shape share programs.

    :param model: the model.
    :param guide: of the fit with points for hyperparameters.
    :param points: hyperparameters that ``NestedVI`` draws.
    """

    def __init__(self, model: Any, guide: Any, points: int) -> None:
        self._svi = gpaug.ConjugateSVI(model, guide)
        self._nested = gpaug.NestedVI(model, num_points=points, progress_bar=False)

    def point(self, X: Any, y: Any, **inducing: Any) -> Any:
        fit = self._svi.run(
            jax.random.key(0), 100, X, y, **inducing, progress_bar=False
        )
        return around(self._svi.posterior(fit).predict_f(X, site="f"))

    def nested(self, X: Any, y: Any, **inducing: Any) -> Any:
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")  # the table has the share of these
            self._nested.run(jax.random.key(1), X, y, **inducing)
        draws = np.asarray(self._nested.get_samples(weighted=True)["f"])
        weights = np.exp(self._nested.get_extra_fields()["log_weights"])
        return weighted_quantiles(draws, weights, (0.05, 0.95))

    def mixture(self, X: Any, y: Any, **inducing: Any) -> Any:
        """Return intervals by the mixture's mean and variance, after :meth:`nested`."""
        return around(self._nested.posterior().predict_f(X, site="f"))

    @property
    def certified(self) -> bool:
        return self._nested.certified


def around(f: Any) -> Any:
    mean, deviation = np.asarray(f.mean), np.sqrt(np.asarray(f.variance))
    return mean - TAIL * deviation, mean + TAIL * deviation


def rows_of(name: str, args: argparse.Namespace) -> list[dict[str, Any]]:
    likelihood, is_sparse = LIKELIHOODS[name], args.part == "sparse"
    here = partial(PARTS[args.part], likelihood=likelihood)
    truth = partial(whole if is_sparse else dense, likelihood=likelihood)
    shape = (args.rows, args.columns) if is_sparse else (NUM, 1)
    kind = gpaug.AutoSparseGP if is_sparse else gpaug.AutoLatentGaussian
    draw = jax.jit(partial(simulated, truth, shape))
    methods = Intervals(here, kind(here), args.points)
    ways = {"ConjugateSVI": methods.point, "NestedVI": methods.nested}
    ways["mixture"] = methods.mixture
    covered: dict[str, list[float]] = {k: [] for k in ways}
    widths: dict[str, list[float]] = {k: [] for k in ways}
    seconds: dict[str, list[float]] = {k: [] for k in ways}
    certified = []
    for i in range(args.sets):
        X, y, f = draw(jax.random.fold_in(jax.random.key(args.seed), i))
        X, y, f = map(np.asarray, (X, y, f))
        Z = {"inducing": np.asarray(kmeans(X, args.inducing))} if is_sparse else {}
        for way, interval in ways.items():
            start = time.perf_counter()
            low, high = interval(X, y, **Z)
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
            "cold": seconds[way][0],
            "seconds": float(np.median(seconds[way][1:])),
            "each": covered[way],
        }
        for way in ways
    ]


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--part", choices=[*PARTS], default="dense")
    parser.add_argument("--rows", type=int, default=1000)
    parser.add_argument("--columns", type=int, default=4)
    parser.add_argument("--inducing", type=int, default=50)
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
        write_report(args.json, rows)


if __name__ == "__main__":
    main()
