# SPDX-License-Identifier: Apache-2.0
"""Random problems in float32, against the same in float64::

    python -m tests.random_problems --number 10000

Inputs, hyperparameters and noise vary over orders of magnitude; shapes hardly do, so
that problems share programs. By likelihood, the table counts fits that raise an error,
that are not finite, and that are ``off``, which predict otherwise than in float64: by
more than .01, of a probability or of a standard deviation predicted. They are listed,
with how far the prediction of float64 itself moves, by which two columns count them
again, where it is by more than .01:

``inputs``
    if all inputs, observations and hyperparameters are rounded as float32 would round
    them: such problems are ill posed, and no float32 fit of measured data means more.
``kernel``
    if the diagonal of the kernel matrix is rounded: a float32 fit that computes with
    the kernel matrix, as this package does, cannot agree, but others might.

What is in neither is lost elsewhere. Errors are printed.
"""

from __future__ import annotations

import argparse
import json
import os
import sys
import time
import warnings
from collections.abc import Callable
from dataclasses import asdict, dataclass
from functools import cache, partial
from pathlib import Path
from typing import Any, NamedTuple

if __name__ == "__main__":
    # Optimised programs pay here, with thousands of fits, unlike in other tests.
    os.environ.setdefault("XLA_FLAGS", "--xla_cpu_multi_thread_eigen=false")

import jax
import jax.numpy as jnp
import numpy as np
import numpyro
import numpyro.distributions as dist

import numpyro_gpaug as gpaug
from numpyro_gpaug.distributions.mixtures import CountMixture
from tests.conftest import enable_x64

# Rows, columns, inducing inputs.
Shape = tuple[int, int, int]
SHAPES: tuple[Shape, ...] = ((24, 2, 12), (3, 1, 3), (50, 4, 20))
# Among the first problems, all of one likelihood have one shape.
FIRST = 1200
CLASSES = 3
OFF = 0.01
STEPS, TOL = 200, 1e-5
# The jitter in float64, and half a unit in the last place in float32.
JITTER, ROUNDING = 1e-10, 2.0**-24
LINK = gpaug.PiecewiseLink.from_function(jax.nn.sigmoid, 20, -5.0, 5.0)


class Problem(NamedTuple):
    """Data and hyperparameters, in single precision.

    :param X: inputs, (N, D).
    :param y: observations, (N,).
    :param inducing: (M, D).
    :param new: inputs of predictions, (8, D).
    :param lengthscale: a number.
    :param variance: of the prior, a number.
    :param other: of the likelihood, a number: a noise scale, a rate, a number of
        trials or of stops, or the probability of a wrong label.
    """

    X: np.ndarray
    y: np.ndarray
    inducing: np.ndarray
    new: np.ndarray
    lengthscale: np.ndarray
    variance: np.ndarray
    other: np.ndarray


class Likelihood(NamedTuple):
    """One of the likelihoods.

    :param make: from function values, (N,) or (N, latents), and Problem.other.
    :param draw: observations and Problem.other, from a generator and values (N, 3).
    :param latents: number of latents; ``None`` for one without an axis.
    :param processes: number of processes.
    """

    make: Callable[..., dist.Distribution]
    draw: Callable[[np.random.Generator, np.ndarray], tuple[np.ndarray, float]]
    latents: int | None = None
    processes: int = 1


# -- observations ----------------------------------------------------------------------


def logistic(f: np.ndarray) -> np.ndarray:
    return np.exp(-np.logaddexp(0, -f))


def labels(rng: np.random.Generator, f: np.ndarray) -> tuple[np.ndarray, float]:
    """Return labels: of the latent without noise, of one class except for one datum, or
    by coins.
    """
    f = f[:, 0]
    one = (np.arange(len(f)) == 0) * 1.0
    p = [logistic(f), f > 0, one, np.full_like(f, 0.5)][rng.integers(4)]
    return (rng.uniform(size=len(f)) < p).astype(int), 0.0


def classes(rng: np.random.Generator, f: np.ndarray) -> tuple[np.ndarray, float]:
    """Return classes (of the largest latent, the first except for one datum, or random)
    and a probability of wrong labels.
    """
    one = (np.arange(len(f)) == 0) * 1
    y = [f.argmax(1), one, rng.integers(0, CLASSES, len(f))][rng.integers(3)]
    return y, 10 ** rng.uniform(-4, -0.5)


def reals(rng: np.random.Generator, f: np.ndarray) -> tuple[np.ndarray, float]:
    """Return real observations with noise of any scale, and perhaps an outlier."""
    scale = f.std() * 10 ** rng.uniform(-2, 1) + 1e-4
    y = f[:, 0] + scale * rng.normal(size=len(f))
    if rng.uniform() < 0.2:
        y[0] += scale * 10 ** rng.uniform(0, 3)
    return y, scale


def counts(
    rng: np.random.Generator, f: np.ndarray, kind: str
) -> tuple[np.ndarray, float]:
    f, size = np.clip(f[:, 0], -30, 30), 10 ** rng.uniform(0, 4)
    if kind == "binomial":
        size = np.floor(size)
        return rng.binomial(int(size), logistic(f)), size
    if kind == "poisson":
        return rng.poisson(size * logistic(f)), size
    stops = 10 ** rng.uniform(-1, 3)
    rate = np.exp(np.minimum(f, 10)) * rng.gamma(stops, size=len(f))
    return rng.poisson(np.minimum(rate, 1e5)), stops


LIKELIHOODS = {
    "Bernoulli": Likelihood(lambda f, _: dist.Bernoulli(logits=f), labels),
    "Bayesian SVM": Likelihood(lambda f, _: gpaug.BayesianSVM(f), labels),
    "piecewise Bernoulli": Likelihood(
        lambda f, _: gpaug.PiecewiseBernoulli(f, LINK), labels
    ),
    "binomial": Likelihood(
        lambda f, n: dist.Binomial(n, logits=f), partial(counts, kind="binomial")
    ),
    "negative binomial": Likelihood(
        lambda f, r: dist.NegativeBinomialLogits(r, f), partial(counts, kind="")
    ),
    "logistic Poisson": Likelihood(
        gpaug.LogisticPoisson, partial(counts, kind="poisson")
    ),
    "normal": Likelihood(dist.Normal, reals),
    "Student-t": Likelihood(lambda f, s: dist.StudentT(4.0, f, s), reals),
    "Laplace": Likelihood(dist.Laplace, reals),
    "heteroscedastic": Likelihood(
        lambda f, g, s: gpaug.HeteroscedasticNormal(f, g, 1 / s**2), reals, processes=2
    ),
    "softmax": Likelihood(lambda f, _: dist.Categorical(logits=f), classes, CLASSES),
    "logistic-softmax": Likelihood(
        lambda f, _: gpaug.LogisticSoftmax(f), classes, CLASSES
    ),
    "robust-max": Likelihood(gpaug.RobustMax, classes, CLASSES),
}


# -- problems --------------------------------------------------------------------------


def random_inputs(rng: np.random.Generator, num: int, dim: int) -> np.ndarray:
    """Normal, of heavy tails, a grid, with duplicates, constant columns or far from
    zero; of a typical distance of one."""
    X = [rng.normal, partial(rng.standard_t, 2)][rng.integers(2)](size=(num, dim))
    kind = rng.integers(5)
    if kind == 0:
        X = np.round(X)
    elif kind == 1:
        X[num // 2 :] = X[: num - num // 2]
    elif kind == 2 and dim > 1:
        X[:, 0] = rng.normal()
    elif kind == 3:
        X += 10 ** rng.uniform(0, 3)
    return X


def random_problem(
    rng: np.random.Generator, likelihood: Likelihood, shape: Shape
) -> Problem:
    num, dim, num_inducing = shape
    points = random_inputs(rng, num + 4, dim)
    lengthscale, variance = 10 ** rng.uniform(-1, 1.5), 10 ** rng.uniform(-3, 3)
    frequencies = rng.normal(size=(dim, CLASSES)) / lengthscale
    phases = rng.uniform(0, 2 * np.pi, CLASSES)
    f = np.sqrt(2 * variance) * np.cos(points @ frequencies + phases)
    y, other = likelihood.draw(rng, f[:num])
    scale = 10 ** rng.uniform(-3, 3)
    points = (scale * points).astype("float32")
    X, new = points[:num], np.concatenate([points[:num][-4:], points[num:]])[-8:]
    chosen = rng.permutation(num)[:num_inducing]
    if y.dtype.kind == "f":
        y = y.astype("float32")
    numbers = np.array([scale * lengthscale, variance, other], "float32")
    return Problem(X, y, X[chosen], new, *numbers)


def in_precision(problem: Problem, dtype: str) -> Problem:
    """The same numbers, floats in another dtype."""
    return Problem(
        *(x if x.dtype.kind == "i" else np.asarray(x, dtype) for x in problem)
    )


def rounded(problem: Problem, seed: int) -> Problem:
    """Return numbers in double precision, each moved up or down by half a unit in the
    last place of single precision. Equal numbers move equally, whole ones do not.
    """
    rng = np.random.default_rng(seed)
    points = (problem.X, problem.inducing, problem.new)
    values = np.unique(np.concatenate([x.ravel() for x in points]))
    signs = rng.choice([-1, 1], values.size)

    def moved(x: np.ndarray, signs: np.ndarray) -> np.ndarray:
        return np.where(
            x == np.rint(x), x, np.asarray(x, float) * (1 + ROUNDING * signs)
        )

    inputs = (moved(x, signs[np.searchsorted(values, x)]) for x in points)
    found = problem._replace(**dict(zip(("X", "inducing", "new"), inputs, strict=True)))
    others = {
        k: moved(np.asarray(x), rng.choice([-1, 1], np.shape(x)))
        for k, x in problem._asdict().items()
        if k not in ("X", "inducing", "new") and x.dtype.kind == "f"
    }
    return found._replace(**others)


# -- fits ------------------------------------------------------------------------------


class Outcome(NamedTuple):
    """The outcome of a fit.

    :param finite: whether losses and params are.
    :param mean: predicted probabilities, or means.
    :param scale: what an error of means is measured by: 1, or the standard deviation
        predicted, of counts at least 1.
    """

    finite: bool
    mean: np.ndarray
    scale: np.ndarray


@cache
def fitter(name: str, shape: Shape, dtype: str) -> gpaug.ConjugateSVI:
    """One per program: a guide has one number of inducing inputs."""
    likelihood = LIKELIHOODS[name]

    def model(X, y=None, *, inducing, lengthscale, variance, other, jitter=None):
        kernel = gpaug.kernels.SquaredExponential(lengthscale, variance)
        processes = [
            gpaug.GaussianProcess(
                f, kernel, inducing, num_latents=likelihood.latents, jitter=jitter
            )
            for f in ("f", "g")[: likelihood.processes]
        ]
        with numpyro.plate("data", X.shape[0]):
            d = likelihood.make(*(gp(X) for gp in processes), other)
            numpyro.sample("y", d, obs=y)

    return gpaug.ConjugateSVI(model, gpaug.AutoSparseGP(model))


@jax.jit
def moments(d: dist.Distribution) -> tuple[Any, Any]:
    if (
        d.support.is_discrete
        and hasattr(d, "probs")
        and not isinstance(d, CountMixture)
    ):
        return d.probs, jnp.ones_like(d.probs)
    variance = d.variance
    if d.support.is_discrete:
        variance = jnp.maximum(variance, 1)
    return d.mean, jnp.sqrt(variance)


def fit(
    name: str, shape: Shape, problem: Problem, dtype: str, jitter: float | None = None
) -> Outcome:
    """The fit and its predictions, in a dtype."""
    with enable_x64(dtype == "float64"):
        svi = fitter(name, shape, dtype)
        arrays = in_precision(problem, dtype)
        options = arrays._asdict()
        X, y, new = (options.pop(k) for k in ("X", "y", "new"))
        if jitter is not None:
            options["jitter"] = np.asarray(jitter, dtype)
        result = svi.run(
            jax.random.key(0), STEPS, X, y, tol=TOL, progress_bar=False, **options
        )
        finite = all(np.isfinite(x).all() for x in jax.tree.leaves(result.params))
        finite &= bool(np.isfinite(result.losses).all())
        found = moments(svi.posterior(result).predict_y(new))
        return Outcome(finite, *(np.asarray(x, float).ravel() for x in found))


# -- many of them ----------------------------------------------------------------------


@dataclass
class Tally:
    """Counts of the outcomes of problems."""

    number: int = 0
    errors: int = 0
    not_finite: int = 0
    off: int = 0
    inputs: int = 0
    kernel: int = 0

    def __add__(self, other: Tally) -> Tally:
        theirs = asdict(other)
        return Tally(**{k: v + theirs[k] for k, v in asdict(self).items()})


def difference(single: Outcome, double: Outcome) -> float:
    """The largest of predictions; infinite where one is not finite. Those of which
    float32 has no squares do not count."""
    told = (np.abs(double.mean) < 1e18) & (double.scale < 1e18)
    error = np.abs(single.mean[told] - double.mean[told]) / double.scale[told]
    return float(np.max(np.where(np.isfinite(error), error, np.inf), initial=0))


def the_case(case: int, seed: int) -> tuple[str, Shape, Problem]:
    """A problem by its number: its likelihood, shape and data."""
    names = list(LIKELIHOODS)
    which = case % len(names)
    shape = SHAPES[(case // FIRST + which) % len(SHAPES)]
    rng = np.random.default_rng([seed, case])
    return names[which], shape, random_problem(rng, LIKELIHOODS[names[which]], shape)


def in_double(name: str, shape: Shape, problem: Problem) -> Outcome:
    """Return the outcome of a problem in float64."""
    return fit(name, shape, problem, "float64", JITTER)


def tally(
    name: str, shape: Shape, problem: Problem, reference: Callable[[], Outcome]
) -> tuple[Tally, float]:
    """Return the tally of one problem, and the error of its prediction.

    :param reference: what float64 says of it, computed where it is asked for.
    """
    try:
        with warnings.catch_warnings():
            # Some lengthscales are drawn far too short, and a warning says so.
            warnings.filterwarnings("ignore", r".* of its function values the inducing")
            single, double = fit(name, shape, problem, "float32"), reference()
    except Exception as error:
        print(f"{name}, {shape}: {error!r}", file=sys.stderr)
        return Tally(1, errors=1), np.inf
    error = difference(single, double)
    if not single.finite or error == np.inf:
        return Tally(1, not_finite=1), error
    return Tally(1, off=int(error > OFF)), error


def sensitivities(name: str, shape: Shape, problem: Problem) -> tuple[float, float]:
    """Return the changes of float64's prediction when the inputs are rounded (the
    largest of three ways) and when the kernel matrix is.
    """
    double = in_double(name, shape, problem)
    inputs = (in_double(name, shape, rounded(problem, seed)) for seed in range(3))
    kernel = fit(name, shape, problem, "float64", JITTER + ROUNDING)
    return max(difference(x, double) for x in inputs), difference(kernel, double)


def run(number: int, seed: int, first: int = 0) -> dict[str, Tally]:
    """Tally of all problems, by likelihood; both precisions. Prints what is off."""
    found = {name: Tally() for name in LIKELIHOODS}
    for case in range(first, first + number):
        name, shape, problem = the_case(case, seed)
        counts, error = tally(
            name, shape, problem, partial(in_double, name, shape, problem)
        )
        if counts.off:
            inputs, kernel = sensitivities(name, shape, problem)
            counts += Tally(inputs=int(inputs > OFF), kernel=int(kernel > OFF))
            print(
                f"{case}: {name}, {shape}, off by {error:.4f}; float64 moves by "
                f"{inputs:.4f} with its inputs, {kernel:.4f} with its kernel matrix",
                flush=True,
            )
        found[name] += counts
    return found


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.split("\n")[0])
    parser.add_argument("--number", type=int, default=1000)
    parser.add_argument("--first", type=int, default=0, help="number of the first")
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--json", type=Path, help="write the tallies here")
    options = parser.parse_args()
    start = time.perf_counter()
    found = run(options.number, options.seed, options.first)
    found["all"] = sum(found.values(), Tally())
    names = list(asdict(Tally()))
    print(f"{'':20s}", *(f"{k:>10s}" for k in names))
    for name, counts in found.items():
        print(f"{name:20s}", *(f"{asdict(counts)[k]:10d}" for k in names))
    print(f"{time.perf_counter() - start:.0f} s")
    if options.json:
        tallies = {name: asdict(counts) for name, counts in found.items()}
        options.json.write_text(json.dumps(tallies, indent=1))


if __name__ == "__main__":
    main()
