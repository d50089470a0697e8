# SPDX-License-Identifier: Apache-2.0
"""Formulas of five papers as printed, as they should be, and by brute force.

Each line takes one entry of ``docs/theory/errata.md`` to numbers small enough for
quadrature, a numerical maximum or finite differences (``checked``), in double
precision, without the package::

    python examples/benchmarks/errata.py
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from typing import Any, NamedTuple

import numpy as np
from common import print_table
from scipy import integrate, optimize, special, stats

STEP = 1e-5


class Line(NamedTuple):
    """A formula, and its value as printed, corrected and checked."""

    paper: str
    where: str
    what: str
    printed: float
    right: float
    checked: float


def slope(function: Callable[[float], float], at: float) -> float:
    return (function(at + STEP) - function(at - STEP)) / (2 * STEP)


def integral(function: Callable[[float], float], low: float, high: float) -> float:
    return integrate.quad(function, low, high, epsabs=1e-12, limit=200)[0]


def average(function: Callable[[float], float], m: float, v: float) -> float:
    """Return the expectation of a function of a normal variable."""
    likelihood, reach = stats.norm(m, np.sqrt(v)), 12 * np.sqrt(v)
    return integral(lambda f: likelihood.pdf(f) * function(f), m - reach, m + reach)


# -- Galy-Fajou, Wenzel, Donner and Opper ----------------------------------------------


def mean_field_bound(g: np.ndarray, alpha: float, m: np.ndarray, v: np.ndarray) -> Any:
    """Return the bound of one datum of the first class: counts of means g, a rate ~
    Gamma(alpha, C).
    """
    half = np.logaddexp(0, np.sqrt(m**2 + v)) - np.sqrt(m**2 + v) / 2
    digamma, size = special.digamma(alpha), len(m)
    counts = g * (1 - m / 2 - half + digamma - np.log(size) - np.log(g))
    rate = special.gammaln(alpha) + (1 - alpha) * digamma - np.log(size)
    return m[0] / 2 - half[0] + counts.sum() + rate


def logistic_softmax() -> Iterator[Line]:
    paper, m, v = "logistic-softmax", np.full(3, 1.0), np.full(3, 1.0)
    rho = np.exp(-m / 2) / (2 * np.cosh(np.sqrt(m**2 + v) / 2))

    def at_fixed_point(factor: float) -> float:
        alpha = 2.0
        for _ in range(2000):
            g = factor * rho * np.exp(special.digamma(alpha)) / 3
            alpha = 1 + g.sum()
        return mean_field_bound(g, alpha, m, v)

    def loss(x: np.ndarray) -> float:
        return -mean_field_bound(np.exp(x[:3]), np.exp(x[3]), m, v)

    best = -optimize.minimize(loss, np.zeros(4), tol=1e-10).fun
    what = "bound at the fixed point, m = v = 1"
    yield Line(paper, "(12)", what, at_fixed_point(2.0), at_fixed_point(1.0), best)
    ratio = np.exp(1.0) / (2 * np.cosh(np.sqrt(4 + 1e-6) / 2))
    what = "exp(-m/2) / (2 cosh(c/2)), m = -2"
    yield Line(paper, "after (16)", what, *special.expit([-2.0, 2.0]), ratio)


# -- Wild, Hu and Sejdinovic; Panos, Dellaportas and Titsias ---------------------------


def functions_and_subspaces() -> Iterator[Line]:
    wrong = 0.01
    sums = (1 - wrong + 3 * e for e in (wrong, wrong / 3))
    what = "sum over 4 labels, epsilon = .01"
    yield Line("function space", "robust-max", what, *sums, 1.0)
    prior, noise, y = 2.0, 0.5, 0.3
    best = 1 / (1 / prior + 1 / noise)
    mean = best * y / noise

    def elbo(s: float) -> float:
        fit = -((y - mean) ** 2 + s) / (2 * noise)
        return fit - 0.5 * (s / prior + mean**2 / prior - np.log(s))

    printed = -0.5 / noise - 0.5 * (1 / prior - best)
    right = -0.5 / noise - 0.5 * (1 / prior - 1 / best)
    what = "slope in the variance at the optimum"
    yield Line("subspace", "A.5", what, printed, right, slope(elbo, best))


# -- Seitz -----------------------------------------------------------------------------


def piecewise_links() -> Iterator[Line]:
    paper, x, noise = "piecewise links", np.array([0.0, 0.7, 1.5]), 0.3
    K = np.exp(-0.5 * (x[:, None] - x) ** 2)
    noisy = K[:2, :2] + noise * np.eye(2)
    L = K[2, :2] @ np.linalg.inv(noisy)
    joint = K + np.diag([noise, noise, 0.0])
    variances = [K[2, 2] - L @ inner @ L for inner in (np.linalg.inv(noisy), noisy)]
    conditional = 1 / np.linalg.inv(joint)[2, 2]
    yield Line(paper, "(4)", "variance of a prediction", *variances, conditional)
    low, high, m = -0.5, 1.2, 0.3
    distribution = stats.norm(m, 1)
    mass, rise = (f(high) - f(low) for f in (distribution.cdf, distribution.pdf))
    found = integral(lambda f: f * distribution.pdf(f), low, high)
    what = "mean of N(.3, 1) between -.5 and 1.2"
    yield Line(paper, "Lemma 1", what, m * mass + rise, m * mass - rise, found)
    y, noise = 3.0, 0.4

    def printed(x: np.ndarray) -> float:
        m, v = x[0], np.exp(x[1])
        kl = 0.5 * (v + m**2 - 1 - x[1])
        distribution = stats.norm(m, np.sqrt(noise + v))
        return distribution.logpdf(y) - 0.5 * v / noise - kl

    highest = -optimize.minimize(lambda x: -printed(x), np.zeros(2)).fun
    evidence = stats.norm(0, np.sqrt(1 + noise)).logpdf(y)
    likelihood = average(stats.norm(y, np.sqrt(noise)).pdf, 0.0, 1.0)
    what = "highest bound, below the log evidence"
    yield Line(paper, "(24)", what, highest, evidence, np.log(likelihood))


# -- Wenzel, Galy-Fajou, Deutsch and Kloft ---------------------------------------------


def svm() -> Iterator[Line]:
    paper, m, v = "Bayesian SVM", 0.8, 1.5
    rules = special.ndtr([m / (v + 1), m / np.sqrt(v + 1)])
    what = "E Phi(f), m = .8, v = 1.5"
    yield Line(paper, "(13)", what, *rules, average(special.ndtr, m, v))
    alpha = (1 - m) ** 2 + v

    def bound(a: float, order: float, power: float) -> float:
        normaliser = np.log(special.kv(order, np.sqrt(a))) + power * np.log(a)
        return 0.5 * (a - alpha) / np.sqrt(a) + normaliser

    def auxiliary(a: float) -> Any:
        return stats.geninvgauss(0.5, np.sqrt(a), scale=np.sqrt(a))

    def by_quadrature(a: float) -> float:
        distribution = auxiliary(a)

        def term(t: float) -> float:
            joint = -0.5 * np.log(t) - 0.5 * (t + alpha / t)
            return distribution.pdf(t) * (joint - distribution.logpdf(t))

        return integral(term, 1e-9, 10) + integral(term, 10, 80)

    # Twice the terms in alpha of the bound at either side of the stated optimum.
    slopes = [
        slope(lambda a, o=o: bound(a, *o), alpha) for o in ((0.25, 0.5), (0.5, 0.25))
    ]
    step = 1e-2
    checked = (by_quadrature(alpha + step) - by_quadrature(alpha - step)) / (2 * step)
    yield Line(paper, "(8), A.1", "slope in alpha at its optimum", *slopes, checked)
    distribution, prior = auxiliary(alpha), 1.0
    shrunk = distribution.expect(lambda t: 1 / (1 / t + 1 / prior))
    precision = 1 / np.sqrt(alpha) + 1 / prior

    def loss(z: float) -> float:
        return precision * z - np.log(z)

    best = optimize.minimize_scalar(loss, (0.1, 1.0)).x
    what = "variance of f, K = 1"
    yield Line(paper, "4.1", what, shrunk, 1 / precision, best)


def lines() -> list[Line]:
    """All of them, paper by paper."""
    parts = logistic_softmax, functions_and_subspaces, piecewise_links, svm
    return [line for part in parts for line in part()]


def main() -> None:
    """Print the table."""
    columns = dict.fromkeys(("paper", "where", "what"), "")
    columns |= dict.fromkeys(("printed", "right", "checked"), ".4f")
    print("float64")
    print_table([line._asdict() for line in lines()], columns)


if __name__ == "__main__":
    main()
