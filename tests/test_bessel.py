# SPDX-License-Identifier: Apache-2.0
"""Tests of the logarithm of the modified Bessel function of the second kind."""

import json
from pathlib import Path

import jax
import jax.numpy as jnp
import mpmath as mp
import numpy as np
import pytest
from scipy.special import kv

from numpyro_gpaug.math.bessel import averages, e2, log_bessel_k, peak
from tests.conftest import slow_in_double

GOLDEN = json.loads((Path(__file__).parent / "golden" / "gig_logk.json").read_text())

value = jax.jit(log_bessel_k)
slopes = jax.jit(jax.grad(lambda nu, x: value(nu, x).sum(), argnums=(0, 1)))
hessian = jax.jit(jax.vmap(jax.hessian(log_bessel_k, argnums=(0, 1))))


def tol(dtype: str, single: float, double: float) -> float:
    return single if dtype == "float32" else double


def golden(*names: str) -> list[np.ndarray]:
    return [np.array([row[n] for row in GOLDEN["logK"]], np.float64) for n in names]


def test_golden_values_and_slopes(dtype):
    nu, x, log_k, by_nu, by_x = golden("nu", "x", "logK", "dlogK_dnu", "dlogK_dx")
    nu, x = nu.astype(dtype), x.astype(dtype)
    out = value(nu, x)
    assert out.dtype == dtype
    # Relative to max(1, |log K|); the slopes relative to themselves.
    np.testing.assert_allclose(
        out, log_k, rtol=tol(dtype, 2e-6, 1e-13), atol=tol(dtype, 2e-6, 1e-13)
    )
    got_nu, got_x = slopes(nu, x)
    np.testing.assert_allclose(got_nu, by_nu, rtol=tol(dtype, 5e-6, 1e-12))
    np.testing.assert_allclose(got_x, by_x, rtol=tol(dtype, 5e-6, 1e-12))
    np.testing.assert_array_equal(value(-nu, x), out)
    np.testing.assert_array_equal(slopes(-nu, x)[0], -got_nu)


POINTS = [
    (1e-3, 1e-8),
    (0.25, 1e-8),
    (0.7, 1e-30),
    (1.0, 1e-4),
    (3.3, 2.0),
    (-7.3, 0.5),
    (20.3, 0.1),
    (50.0, 30.0),
    (0.3, 1e3),
]


def test_derivatives_against_mpmath(x64):
    """Derivatives to second order, at orders that are not half-integers, down to a tiny
    argument.
    """
    with mp.workdps(50):
        nu, x = (np.array(column) for column in zip(*POINTS, strict=True))
        out, first, second = value(nu, x), slopes(nu, x), hessian(nu, x)

        def log_k(a, b):
            return mp.log(mp.besselk(a, b))

        step = mp.mpf(10) ** -15
        for i, (n, z) in enumerate(POINTS):
            n, z = mp.mpf(n), mp.mpf(z)
            h = step * z
            grid = {
                (j, k): log_k(n + j * step, z + k * h)
                for j in (-1, 0, 1)
                for k in (-1, 0, 1)
            }
            mid = grid[0, 0]
            expected = {
                "value": (out[i], mid),
                "nu": (first[0][i], (grid[1, 0] - grid[-1, 0]) / (2 * step)),
                "x": (first[1][i], (grid[0, 1] - grid[0, -1]) / (2 * h)),
                "nu nu": (
                    second[0][0][i],
                    (grid[1, 0] - 2 * mid + grid[-1, 0]) / step**2,
                ),
                "nu x": (
                    second[0][1][i],
                    (grid[1, 1] - grid[1, -1] - grid[-1, 1] + grid[-1, -1])
                    / (4 * step * h),
                ),
                "x x": (second[1][1][i], (grid[0, 1] - 2 * mid + grid[0, -1]) / h**2),
            }
            for name, (got, want) in expected.items():
                np.testing.assert_allclose(
                    got, float(want), rtol=1e-10, err_msg=f"{name} at {n}, {z}"
                )


@slow_in_double
def test_closed_forms_and_recurrence(dtype):
    x = np.asarray(10.0 ** np.arange(-6, 5), dtype)
    z = x.astype(float)
    half = 0.5 * np.log(np.pi / (2 * z)) - z
    factor = tol(dtype, 3e-6, 1e-13)
    orders = np.array([[0.5], [1.5], [1.3], [2.3], [3.3]], dtype)
    first, second, low, mid, high = np.asarray(value(orders, x), np.float64)
    np.testing.assert_allclose(first, half, rtol=factor, atol=factor)
    np.testing.assert_allclose(second, half + np.log1p(1 / z), rtol=factor, atol=factor)
    both = np.logaddexp(low, np.log(2 * 2.3 / z) + mid)
    np.testing.assert_allclose(high, both, rtol=factor, atol=2 * factor)


@pytest.mark.slow
def test_even_and_smooth_in_the_order_at_zero(x64):
    first = slopes(jnp.array([0.0, 1e-12]), jnp.array([0.5, 0.5]))[0]
    curvature = float(hessian(jnp.zeros(1), jnp.array([0.5]))[0][0][0])
    np.testing.assert_allclose(first, [0.0, 1e-12 * curvature], rtol=1e-10)
    with mp.workdps(30):
        exact = mp.diff(lambda n: mp.log(mp.besselk(n, 0.5)), 0, 2)
    np.testing.assert_allclose(curvature, float(exact), rtol=1e-10)


def test_finite_over_the_range_of_float32():
    nu, x = np.meshgrid([0.0, 1e-3, 0.5, 3.0, 50.0, 1e4], 10.0 ** np.arange(-37, 5.0))
    nu, x = nu.astype("float32"), x.astype("float32")
    out = value(nu, x)
    assert out.dtype == jnp.float32
    assert np.isfinite(out).all()
    assert np.isfinite(slopes(nu, x)[0]).all()


def test_outside_the_domain():
    nu, x = np.array([[1, 1, 1, np.nan], [0, -1, np.nan, 1]], np.float32)
    assert np.isnan(value(nu, x)).all()


def test_shapes_and_types():
    out = value(np.arange(3)[:, None], np.array([1, 2]))
    assert out.shape == (3, 2)
    assert out.dtype == jnp.float32
    row = jax.vmap(lambda n: log_bessel_k(n, np.array([1.0, 2.0], np.float32)))
    rows = jax.jit(row)(np.arange(3, dtype="float32"))
    np.testing.assert_allclose(rows, out, rtol=1e-6)
    np.testing.assert_allclose(out, np.log(kv(np.arange(3)[:, None], [1, 2])), 1e-5)


@pytest.mark.slow
def test_tiny_arguments_agree_with_many_more_nodes(x64):
    """The documented accuracy, at arguments far below those of the golden file."""
    lam, x = (
        jnp.asarray(a.ravel())
        for a in np.meshgrid(
            [0.0, 1e-6, 0.1, 0.3, 0.5, 1.0, 2.2, 50.0, 1e4],
            10.0 ** np.arange(-200, 1, 8),
        )
    )
    _, big, log_q = peak(lam, x)

    def terms(u, right, left, big, log_q):
        weight = jnp.exp(-right - left)
        return weight * (1 + u * u), weight * right, weight * left

    coarse, fine = averages(terms, big, log_q), averages(terms, big, log_q, num=1000)
    for got, want in zip(coarse, fine, strict=True):
        np.testing.assert_allclose(got, want, rtol=3e-8, atol=1e-10)
    assert np.max(np.abs(coarse[0] - fine[0])) < 2e-10
    poor = averages(terms, big, log_q, num=24)
    assert np.max(np.abs(poor[0] - fine[0])) > 1e-6


def test_e2(dtype):
    u = np.array([-50.0, -2.0, -0.51, -0.49, -1e-3, 1e-6, 0.0, 0.3, 0.49, 0.51, 3.0])
    u = np.asarray(u, dtype)
    with mp.workdps(40):
        exact = [float(mp.exp(v) - 1 - v) for v in map(mp.mpf, u.astype(float))]
    ours = jax.jit(e2)(u)
    np.testing.assert_allclose(ours, exact, rtol=tol(dtype, 2e-6, 4e-15))
