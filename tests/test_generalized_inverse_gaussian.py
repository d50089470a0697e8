# SPDX-License-Identifier: Apache-2.0
"""Tests of the generalised inverse Gaussian and inverse Gaussian distributions."""

import json
from pathlib import Path

import jax
import numpy as np
import pytest
from jax import random
from numpyro.distributions.kl import kl_divergence
from scipy.stats import invgauss

from numpyro_gpaug import GeneralizedInverseGaussian as GIG
from numpyro_gpaug import InverseGaussian
from numpyro_gpaug.distributions import (
    _gig_sampler,
)
from numpyro_gpaug.math.bessel import log_peak_integral, peak
from tests.conftest import slow, slow_in_double

GOLDEN = json.loads((Path(__file__).parent / "golden" / "gig_logk.json").read_text())


def tol(dtype: str, single: float, double: float) -> float:
    return single if dtype == "float32" else double


def column(name: str) -> np.ndarray:
    return np.array([row[name] for row in GOLDEN["moments"]], np.float64)


def golden_distribution(dtype: str) -> GIG:
    return GIG(*(column(name).astype(dtype) for name in "pab"))


@jax.jit
def log_prob(x, p, a, b):
    return GIG(p, a, b).log_prob(x)


@jax.jit
def density(distribution, x):
    return distribution.log_prob(x)


@jax.jit
def summary(distribution):
    names = ("mean", "variance", "mean_reciprocal", "mode", "mean_log")
    found = {name: getattr(distribution, name) for name in names}
    return {**found, "entropy": distribution.entropy()}


@jax.jit
def divergence(q, r):
    return kl_divergence(q, r)


def test_golden_moments(dtype):
    rtol = tol(dtype, 3e-6, 1e-12)
    ours = summary(golden_distribution(dtype))
    assert {got.dtype for got in ours.values()} == {np.dtype(dtype)}
    for key, name in (
        ("mean", "mean"),
        ("variance", "var"),
        ("mean_reciprocal", "Einv"),
        ("mode", "mode"),
    ):
        np.testing.assert_allclose(ours[key], column(name), rtol=rtol, err_msg=name)
    for key, name in (("mean_log", "Elog"), ("entropy", "entropy")):
        np.testing.assert_allclose(ours[key], column(name), rtol=rtol, atol=rtol)


def test_golden_log_density(dtype):
    rows = [row["logpdf"] for row in GOLDEN["moments"]]
    x = np.array([[point["x"] for point in row] for row in rows]).T
    want = np.array([[point["logpdf"] for point in row] for row in rows]).T
    got = density(golden_distribution(dtype), x.astype(dtype))
    assert got.dtype == dtype
    rtol = tol(dtype, 3e-6, 1e-12)
    np.testing.assert_allclose(got, want, rtol=rtol, atol=rtol)


@pytest.mark.parametrize(
    "dtype",
    [slow("float32"), "float64"],
    indirect=True,
)
def test_golden_divergence(dtype):
    size = len(column("p"))
    # As many as the golden moments: one program computes both.
    parts = {
        k: np.resize(np.array([row[k] for row in GOLDEN["kl"]], dtype), (size, 3)).T
        for k in "qp"
    }
    got = divergence(GIG(*parts["q"]), GIG(*parts["p"]))
    assert got.dtype == dtype
    want = np.resize([row["kl"] for row in GOLDEN["kl"]], size)
    np.testing.assert_allclose(got, want, rtol=tol(dtype, 1e-5, 1e-12))
    d = golden_distribution(dtype)
    np.testing.assert_allclose(divergence(d, d), 0.0, atol=tol(dtype, 1e-6, 1e-14))


@slow_in_double
def test_score_identities(dtype):
    """The slopes of log_prob are the statistics minus their means, as in every
    exponential family.
    """
    d = golden_distribution(dtype)
    p, a, b = (column(name) for name in "pab")
    x = np.asarray(0.8 * column("mean"), dtype)
    by_x, by_p, by_a, by_b = jax.jit(
        jax.grad(lambda *args: log_prob(*args).sum(), argnums=(0, 1, 2, 3))
    )(x, d.p, d.a, d.b)
    z = x.astype(np.float64)
    atol = tol(dtype, 5e-6, 1e-11)
    np.testing.assert_allclose(
        by_x, (p - 1) / z - a / 2 + b / (2 * z**2), rtol=tol(dtype, 2e-5, 1e-11)
    )
    np.testing.assert_allclose(by_p, np.log(z) - column("Elog"), rtol=atol, atol=atol)
    np.testing.assert_allclose(by_a, (column("mean") - z) / 2, rtol=atol, atol=atol)
    np.testing.assert_allclose(by_b, (column("Einv") - 1 / z) / 2, rtol=atol, atol=atol)


# Draws, densities and slopes in the order stay finite over all of these.
SCALES = {
    "float32": [1e-30, 1e-15, 1e-6, 1.0, 1e6, 1e15],
    "float64": [1e-300, 1e-150, 1e-8, 1.0, 1e8, 1e150],
}


@slow_in_double
def test_extreme_parameters(dtype):
    orders = [-1e4, -30.0, -2.5, -0.3, 0.0, 1e-5, 1.0, 50.0, 1e4]
    scales = SCALES[dtype]
    p, a, b = (v.ravel().astype(dtype) for v in np.meshgrid(orders, scales, scales))
    d = GIG(p, a, b, validate_args=True)
    x = d.sample(random.key(0), (50,))
    assert np.all(np.asarray(x) > 0)
    assert np.isfinite(x).all()
    assert np.isfinite(density(d, x)).all()


@pytest.mark.slow
def test_extreme_moments_and_slopes(dtype):
    orders = [-1e4, -30.0, -2.5, -0.3, 0.0, 1e-5, 1.0, 50.0, 1e4]
    scales = SCALES[dtype]
    p, a, b = (v.ravel().astype(dtype) for v in np.meshgrid(orders, scales, scales))
    d = GIG(p, a, b)
    x = d.sample(random.key(0), (50,))
    ours = summary(d)
    assert np.isfinite(ours["mean_log"]).all()
    assert np.isfinite(ours["entropy"]).all()
    by_p = jax.jit(jax.grad(lambda p: log_prob(x, p, a, b).sum()))(p)
    assert np.isfinite(by_p).all()


@slow_in_double
def test_rejection_constant_is_bounded(dtype):
    """The area under the hat against the integral, not against draws."""
    low = tol(dtype, -36.0, -200.0)
    lam, omega = np.meshgrid(
        [0.0, 1e-6, 0.01, 0.1, 0.3, 0.5, 1.0, 2.0, 10.0, 1e3, 1e6],
        10.0 ** np.linspace(low, 6, 60),
    )

    @jax.jit
    def areas(lam, omega):
        big, log_q = peak(lam, omega, jax.numpy.log(omega))
        hat = _gig_sampler.make_hat(big, log_q)
        return log_peak_integral(big, log_q), hat.area

    log_integral, area = areas(*(v.ravel().astype(dtype) for v in (lam, omega)))
    accept = np.exp(np.asarray(log_integral)) / area
    assert np.all(accept > 1 - np.exp(-1))
    assert np.all(accept < 1)


# Sampler.  Keys are fixed, all cells of one test share a level of 1e-4: with m cells
# sqrt(n) KS has the two-sided tail 2 exp(-2 t^2) = 1e-4 / m.

NUM_DRAWS = 40_000
CELLS = np.array(
    [
        (-20.0, 3.0, 0.5),
        (-0.7, 1e-4, 1e-4),
        (-0.5, 2.0, 1.0),
        (0.0, 1e-6, 1e-6),
        (0.0, 1e-30, 1e-30),
        (0.3, 1e-3, 1e-3),
        (0.5, 2.0, 1.0),
        (1.0, 2.0, 3.0),
        (2.2, 0.3, 1.1),
        (3.0, 4.0, 1e-12),
        (100.0, 5.0, 500.0),
        (1e4, 1.0, 1.0),
        (1.0, 1e4, 1e4),
    ]
)


def numeric_cdf(p: float, a: float, b: float) -> tuple[np.ndarray, np.ndarray]:
    """The log of x on a grid and the distribution function, by a cumulative sum of the
    unnormalised density."""

    def energy(t):
        return p * t - (a * np.exp(t) + b * np.exp(-t)) / 2

    root = np.sqrt(p * p + a * b)
    centre = np.log((p + root) / a) if p > 0 else np.log(b / (root - p))
    wide = centre + np.linspace(-160, 160, 400_001)
    with np.errstate(over="ignore"):
        inside = wide[energy(wide) > energy(centre) - 45]
    t = np.linspace(inside[0], inside[-1], 40_001)
    density = np.exp(energy(t) - energy(centre))
    cdf = np.concatenate([[0.0], np.cumsum(density[1:] + density[:-1])])
    return t, cdf / cdf[-1]


def kolmogorov(x: np.ndarray, t: np.ndarray, cdf: np.ndarray) -> float:
    n = len(x)
    value = np.interp(np.log(np.sort(x)), t, cdf)
    rank = np.arange(1, n + 1) / n
    distance = max(np.max(rank - value), np.max(value - rank + 1 / n))
    return float(np.sqrt(n) * distance)


def draw_cells(dtype: str, num: int) -> np.ndarray:
    p, a, b = CELLS.T.astype(dtype)
    return np.asarray(GIG(p, a, b).sample(random.key(2014), (num,)), np.float64)


@pytest.mark.parametrize(
    ("dtype", "num"),
    [
        ("float32", NUM_DRAWS),
        slow("float64", NUM_DRAWS),
        slow("float32", 1_000_000),
        slow("float64", 1_000_000),
    ],
    indirect=["dtype"],
)
def test_sampler_distribution(dtype, num):
    x = draw_cells(dtype, num)
    limit = np.sqrt(np.log(2 * len(CELLS) / 1e-4) / 2)
    assert np.all(x > 0)
    for j, cell in enumerate(CELLS):
        t, cdf = numeric_cdf(*cell)
        assert kolmogorov(x[:, j], t, cdf) < limit, cell
        # The check detects a bias of a twentieth of the standard deviation of the logs.
        biased = x[:, j] * np.exp(0.05 * np.std(np.log(x[:, j])))
        assert kolmogorov(biased, t, cdf) > limit, cell


@slow_in_double
def test_inverse_gaussian_against_scipy(dtype):
    loc, concentration = np.array([0.3, 1.0, 20.0]), np.array([2.0, 0.5, 300.0])
    distribution = InverseGaussian(loc.astype(dtype), concentration.astype(dtype))
    want = invgauss(loc / concentration, scale=concentration)
    x = np.asarray([[0.1], [1.0], [15.0]]) * loc
    rtol = tol(dtype, 2e-5, 1e-12)

    @jax.jit
    def everything(d, x, key):
        return summary(d), d.log_prob(x), d.sample(key, (NUM_DRAWS,))

    ours, got, draws = everything(distribution, x.astype(dtype), random.key(3))
    assert got.dtype == ours["mean"].dtype == ours["entropy"].dtype == dtype
    np.testing.assert_allclose(got, want.logpdf(x), rtol=rtol, atol=rtol)
    np.testing.assert_allclose(ours["mean"], want.mean(), rtol=rtol)
    np.testing.assert_allclose(ours["variance"], want.var(), rtol=rtol)
    draws = np.asarray(draws, np.float64)
    limit = np.sqrt(np.log(2 * 3 / 1e-4) / 2)
    for j in range(3):
        cdf = invgauss.cdf(
            np.sort(draws[:, j]), loc[j] / concentration[j], scale=concentration[j]
        )
        rank = np.arange(1, NUM_DRAWS + 1) / NUM_DRAWS
        assert np.sqrt(NUM_DRAWS) * np.max(np.abs(rank - cdf)) < limit


@slow_in_double
def test_inverse_gaussian_extremes(dtype):
    scales = SCALES[dtype]
    loc, concentration = (v.ravel().astype(dtype) for v in np.meshgrid(scales, scales))
    distribution = InverseGaussian(loc, concentration, validate_args=True)

    @jax.jit
    def draw_and_density(distribution, key):
        x = distribution.sample(key, (50,))
        return x, distribution.log_prob(x)

    x, value = draw_and_density(distribution, random.key(0))
    assert np.all(np.asarray(x) > 0)
    assert np.isfinite(x).all()
    assert not np.isnan(value).any()


# NumPyro's requirements for every distribution.


def single(*values: float) -> np.ndarray:
    return np.array(values, np.float32)


DISTRIBUTIONS = {
    GIG: ((single(-1.0, 0.5, 3.0), 2.0, single(0.1, 1.0, 5.0)), "pab"),
    InverseGaussian: (
        (single(0.5, 1.0, 4.0), single(2.0, 1.0, 0.3)),
        ("loc", "concentration"),
    ),
}


@pytest.mark.parametrize("kind", DISTRIBUTIONS)
def test_support_and_refusals(kind):
    args, names = DISTRIBUTIONS[kind]
    d = kind(*args, validate_args=True)
    off = np.asarray(density(d, single(-1.0, 0.0, 1.0)))
    assert np.isneginf(off[:2]).all()
    assert np.isfinite(off[2])
    with pytest.warns(UserWarning, match="[Oo]ut-of-support"):
        d.log_prob(-single(1, 1, 1))
    for i, name in enumerate(names):
        if name == "p":
            continue
        for value in (0.0, -1.0, np.nan):
            bad = [*args]
            bad[i] = value
            with pytest.raises(ValueError, match=f"invalid {name}"):
                kind(*bad, validate_args=True)


def test_bad_parameters_do_not_hang():
    ones = single(1, 1, 1)
    d = GIG(single(np.nan, 1.0, -3.0), -ones, ones, validate_args=False)
    assert np.isnan(d.sample(random.key(0))).all()
    assert np.isnan(density(d, ones)).all()
    zeros = single(1, 0, 1), single(0, 1, 0)
    assert np.isnan(density(GIG(ones, *zeros, validate_args=False), ones)).all()


@pytest.mark.parametrize("kind", DISTRIBUTIONS)
def test_draws_carry_no_gradient(kind):
    args, _ = DISTRIBUTIONS[kind]
    total = jax.jit(jax.grad(lambda a: kind(a, *args[1:]).sample(random.key(0)).sum()))
    np.testing.assert_array_equal(total(args[0]), 0.0)
