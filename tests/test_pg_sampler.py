# SPDX-License-Identifier: Apache-2.0
"""Draws of the Polya-Gamma distribution against an oracle.

Keys are fixed.  All Kolmogorov-Smirnov and Laplace-transform statistics of this file
together reject a perfect sampler with probability 1%.
"""

from functools import cache

import jax
import mpmath
import numpy as np
import pytest
from jax import random
from scipy.special import ndtri

from numpyro_gpaug.distributions import PolyaGamma
from numpyro_gpaug.distributions._pg_rho import log_gap, tangent
from numpyro_gpaug.distributions._pg_sampler import _propose
from tests.conftest import slow, slow_in_double
from tests.pg_oracle import Reference, laplace, moments, series_cdf, tails

SHAPES = (0.05, 0.3, 1.0, 1.5, 4.0, 10.0, 30.0, 1000.0)
TILTS = (0.0, 0.5, 4.0, 50.0, 1000.0)
GRID = [(b, c) for b in SHAPES for c in TILTS]
POINTS = (0.3, 1.0, 3.0)
# Tests: for each cell a distance and the transform at every point, in two precisions,
# for three ways to draw.
LEVEL = 0.01 / (len(GRID) * (1 + len(POINTS)) * 2 * 3)
FEWER, FEW, MANY = 20_000, 100_000, 1_000_000
# A bias that must be detected; with few draws, one as many times their Monte Carlo
# error.
BIAS = {FEWER: 1.025, FEW: 1.01, MANY: 1.01}


@cache
def reference(b: float, c: float) -> Reference:
    return Reference(b, c)


def kolmogorov(x: np.ndarray, b: float, c: float) -> float:
    """The distance to the oracle as a multiple of its critical value; ``x`` sorted."""
    n = len(x)
    value = reference(b, c).cdf(x)
    rank = np.arange(1, n + 1) / n
    distance = max(np.max(rank - value), np.max(value - rank) + 1 / n)
    return np.sqrt(n) * distance / np.sqrt(-0.5 * np.log(LEVEL / 2))


def transform(x: np.ndarray, b: float, c: float) -> float:
    """The largest standardised deviation of the Laplace transform, likewise."""
    scores = []
    for point in POINTS / reference(b, c).quantile(np.array(0.5)):
        first, second = laplace(point, b, c), laplace(2 * point, b, c)
        deviation = np.exp(-point * x).mean() - first
        scores.append(abs(deviation) / np.sqrt((second - first**2) / len(x)))
    return max(scores) / -ndtri(LEVEL / 2)


def excess(x: np.ndarray, b: float, c: float) -> float:
    """Above one if the draws are rejected."""
    return max(kolmogorov(x, b, c), transform(x, b, c))


def draws_of_grid(dtype: str, num: int) -> np.ndarray:
    """A shape per draw, traced: one column for each cell of the grid."""
    b, c = np.array(GRID, dtype).T
    draw = jax.jit(lambda key, b, c: PolyaGamma(b, c).sample(key, (num // 10,)))
    keys = random.split(random.key(2013), 10)
    draws = np.concatenate([draw(key, b, c) for key in keys])
    assert draws.dtype == dtype
    return np.sort(draws.astype(float), axis=0)


def draws_in_common(dtype: str, num: int) -> np.ndarray:
    """A shape for all draws of a call, not traced."""
    columns = []
    c = np.asarray(TILTS, dtype)
    for i, b in enumerate(SHAPES):
        columns.append(PolyaGamma(b, c).sample(random.key(100 + i), (num,)))
        assert columns[-1].dtype == dtype
    return np.sort(np.concatenate(columns, axis=1).astype(float), axis=0)


@pytest.mark.parametrize(
    ("dtype", "draws", "num"),
    [
        ("float32", draws_of_grid, FEWER),
        slow("float64", draws_of_grid, FEWER),
        *(
            slow(dtype, draws, num)
            for dtype in ("float32", "float64")
            for draws, num in (
                (draws_of_grid, FEW), (draws_of_grid, MANY), (draws_in_common, MANY),
            )
        ),
    ],
    indirect=["dtype"],
)  # fmt: skip
def test_draws_follow_the_distribution(dtype, draws, num):
    x = draws(dtype, num)
    score = [excess(x[:, i], *cell) for i, cell in enumerate(GRID)]
    assert max(score) < 1, sorted(zip(score, GRID, strict=True))[-3:]
    # The bias is detected in all cells where so many draws suffice.
    biased = [excess(BIAS[num] * x[:, i], *cell) for i, cell in enumerate(GRID)]
    missed = [cell for s, cell in zip(biased, GRID, strict=True) if s < 1]
    allowed = () if num == MANY else (0.05, 0.3, 1.0, 1.5, 4.0)
    assert not [cell for cell in missed if cell[0] not in allowed], missed
    assert len(missed) <= len(GRID) / 3


@pytest.mark.parametrize(
    ("b", "c"), [(0.05, 0.0), (0.3, 4.0), (1.0, 0.5), (2.5, 20.0), (10.0, 2.0)]
)
def test_oracle_against_series(b, c):
    x = reference(b, c).quantile(np.array([1e-6, 1e-3, 0.2, 0.5, 0.8, 0.999, 1 - 1e-6]))
    below, above = tails(x, b, c)
    for i, value in enumerate(x):
        exact = [float(tail) for tail in series_cdf(value, b, c)]
        side = int(exact[1] < exact[0])
        np.testing.assert_allclose((below, above)[side][i], exact[side], rtol=1e-9)
        np.testing.assert_allclose(reference(b, c).cdf(value), exact[0], atol=1e-6)


def log_rho(x: float, h: float) -> mpmath.mpf:
    """Return the logarithm of rho in 120-digit arithmetic."""
    total, binomial, n = mpmath.mpf(0), mpmath.mpf(1), 0
    while True:
        size = binomial * (2 * n + h) / h * mpmath.exp(-2 * n * (n + h) / x)
        total += (-1) ** n * size
        if n > h + x and size < mpmath.mpf(10) ** -90:
            return mpmath.log(total)
        n += 1
        binomial *= (n + h - 1) / n


@cache
def exact_gaps(dtype: str) -> tuple[np.ndarray, ...]:
    """Shapes, tangent points and values over what proposals reach, the logarithm of the
    acceptance probability there, and the slope of the tangent."""
    cells = []
    for h in (0.01, 0.3, 0.9, 1.0, 2.5, 8.0, 30.0):
        for x0 in {max(h, 0.6) if h < 1 else h, 0.4 * h if h > 1 else 0.6}:
            for factor in np.exp(np.linspace(-2.0, 1.5, 8) / np.sqrt(max(h, 0.7))):
                cells.append((h, x0, x0 * factor))
    cells = np.array(cells, dtype)
    found = []
    with mpmath.workdps(120):
        for cell in cells:
            a, b, y = (mpmath.mpf(float(p)) for p in cell)
            step = b * mpmath.mpf(10) ** -20
            rise = (log_rho(b + step, a) - log_rho(b - step, a)) / (2 * step)
            gap = log_rho(y, a) - log_rho(b, a) - rise * (y - b)
            found.append((float(gap), float(rise)))
    return *cells.T, *np.array(found).T


@slow_in_double
def test_table_against_series(dtype):
    h, x0, x, exact, rise = exact_gaps(dtype)

    @jax.jit
    def gap(h, x0, x):
        at = tangent(h, x0)
        return log_gap(x, at), at.slope

    value, slope = (np.asarray(a) for a in gap(h, x0, x))
    assert value.dtype == dtype
    atol = 5e-6 if dtype == "float32" else 2e-9
    np.testing.assert_allclose(value, exact, atol=atol, rtol=atol)
    np.testing.assert_allclose(-slope, rise, rtol=1e-7, atol=4 * atol)


@pytest.mark.parametrize("size", [1, slow(len(GRID))])
def test_acceptance(size):
    b, c = np.array(GRID, np.float32).T
    propose = jax.jit(_propose, static_argnums=2)
    for h in [np.full(1, v, np.float32) for v in SHAPES] if size == 1 else [b]:
        x = propose(random.key(1), (h, c / 2), (4000, len(c)))
        assert np.all(np.mean(np.asarray(x) > 0, axis=0) > 0.81 - 0.02)


@pytest.mark.parametrize("size", [slow(1000), 5000])
def test_paths_agree(size):
    """The same key: in common, known or not, and per draw; few draws and many."""
    c, shapes = np.linspace(0.0, 9.0, size, dtype="float32"), np.full(size, 2.5)
    key = random.key(5)
    reference = PolyaGamma(2.5, c).sample(key)
    known = PolyaGamma(shapes.astype("float32"), c).sample(key)
    np.testing.assert_array_equal(known, reference)
    traced = jax.jit(lambda b, c: PolyaGamma(b, c).sample(key))
    other = traced(shapes.astype("float32"), c)
    # Rounding may change an acceptance.
    assert np.mean(np.isclose(other, reference, rtol=1e-5)) > 0.998


@slow_in_double
def test_extreme_shapes(dtype):
    b = np.asarray([1e-20, 1e-6, 1e-3, 1e5, 1e7], dtype)
    for c in (0.0, 3.0, 1e6):
        draws = np.asarray(PolyaGamma(b, c).sample(random.key(0), (800,)), float)
        assert np.all((draws > 0) & np.isfinite(draws))
        for x, shape in zip(draws.T[3:], (1e5, 1e7), strict=True):
            mean, sd = moments(shape, c)
            rounding = 2e-7 if dtype == "float32" else 0.0
            assert abs(x.mean() - mean) < 5 * sd / np.sqrt(800) + rounding * mean
            assert abs(x.std() / sd - 1) < 0.15 + rounding * mean / sd


def test_small_shapes_are_first_passages():
    """For small shapes ``P(omega > x)`` is of order ``b``, and the limit is the Levy
    distribution of a first passage.
    """
    b = 1e-3
    x = np.asarray(PolyaGamma(b, 0.0).sample(random.key(0), (4000,)), float)
    median = (b / ndtri(0.75)) ** 2 / 4
    assert abs(np.mean(x < median) - 0.5) < 0.04
    mean, sd = moments(b, 0.0)
    assert abs(x.mean() - mean) < 5 * sd / np.sqrt(len(x))
