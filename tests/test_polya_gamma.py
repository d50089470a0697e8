# SPDX-License-Identifier: Apache-2.0
"""Tests of the Polya-Gamma distribution."""

import json
from pathlib import Path

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax import random
from numpyro.distributions.kl import kl_divergence

from numpyro_gpaug.distributions import PolyaGamma
from numpyro_gpaug.math.special import log2cosh_half, pg_mean_unit
from tests.conftest import slow_in_double

GOLDEN = json.loads((Path(__file__).parent / "golden" / "polya_gamma.json").read_text())

# b, c, x and the log-density of PG(b, c) at x, from a contour integral in 30-digit
# arithmetic (mpmath).  b and x are float32 numbers, so that both precisions are
# asked for the same thing.
EXTREME = np.array(GOLDEN["extreme"])


@pytest.fixture(params=["float32", "float64"])
def dtype(request: pytest.FixtureRequest) -> np.dtype:
    if request.param == "float64":
        request.getfixturevalue("x64")
    return np.dtype(request.param)


def tol(dtype: np.dtype, single: float, double: float) -> float:
    return single if dtype == np.float32 else double


def columns(rows: list[dict], *names: str) -> list[np.ndarray]:
    return [np.array([row[name] for row in rows], np.float64) for name in names]


def scaled_error(value: jax.Array, reference: np.ndarray) -> float:
    difference = np.asarray(value, np.float64) - reference
    return float(np.max(np.abs(difference) / np.maximum(1.0, np.abs(reference))))


@jax.jit
def _log_prob(x, b, c):
    return PolyaGamma(b, c).log_prob(x)


def log_prob(x, b, c):
    """Return the log-density, in blocks of one size: it takes seconds to compile for
    each shape.
    """
    arrays = np.broadcast_arrays(*(np.asarray(a) for a in (x, b, c)))
    shape, size = arrays[0].shape, arrays[0].size
    dtype = jnp.result_type(*arrays, 0.0)
    block = 512
    flat = [
        np.pad(a.ravel().astype(dtype), (0, -size % block), constant_values=1)
        for a in arrays
    ]
    starts = range(0, len(flat[0]), block)
    rows = [_log_prob(*(a[i : i + block] for a in flat)) for i in starts]
    return np.concatenate(rows)[:size].reshape(shape)


@jax.jit
def moments(d):
    return d.mean, d.variance


def test_golden_log_density(dtype):
    b, c, x, reference = columns(GOLDEN["logpdf"], "b", "c", "x", "logpdf")
    value = log_prob(*(a.astype(dtype) for a in (x, b, c)))
    assert value.dtype == dtype
    assert scaled_error(value, reference) < tol(dtype, 5e-6, 1e-12)
    mirrored = log_prob(*(a.astype(dtype) for a in (x, b, -c)))
    np.testing.assert_array_equal(value, mirrored)


def test_extreme_log_density(dtype):
    b, c, x, reference = EXTREME.T
    value = log_prob(*(a.astype(dtype) for a in (x, b, c)))
    assert scaled_error(value, reference) < tol(dtype, 5e-6, 1e-11)


@pytest.mark.slow
def test_log_density_with_concrete_shape(dtype):
    """Regimes left out because the shape is known give the same numbers."""
    shapes = np.array([1.0, 5.0, 40.0, 2000.0], dtype)
    x = shapes[:, None] * np.asarray([0.1, 0.4, 3.0], dtype)

    @jax.jit
    def with_known(x):
        distributions = [PolyaGamma(float(b), 0.5) for b in shapes]
        return [d.log_prob(row) for d, row in zip(distributions, x, strict=True)]

    traced = log_prob(x, shapes[:, None], np.asarray(0.5, dtype))
    for known, row in zip(with_known(x), traced, strict=True):
        assert known.dtype == dtype
        np.testing.assert_allclose(known, row, rtol=tol(dtype, 3e-6, 1e-13))


def test_off_support():
    value = log_prob(np.array([-1.0, 0.0, 0.2], np.float32), 1.0, 0.5)
    assert np.isneginf(value[:2]).all()
    assert np.isfinite(value[2])
    with pytest.raises(ValueError, match="invalid b"):
        PolyaGamma(-1.0, 0.0, validate_args=True)


def test_golden_moments(dtype):
    rows = [row for row in GOLDEN["moments"] if row["b"] > 0]
    b, c, mean, var, kl = columns(rows, "b", "c", "mean", "var", "kl_to_c0")
    b, c = b.astype(dtype), c.astype(dtype)
    ours = (*moments(PolyaGamma(b, c)), divergence(b, c, np.zeros_like(c)))
    assert {x.dtype for x in ours} == {dtype}
    rtol = tol(dtype, 3e-6, 1e-12)
    np.testing.assert_allclose(ours[0], mean, rtol=rtol)
    np.testing.assert_allclose(ours[1], var, rtol=rtol)
    np.testing.assert_allclose(ours[2], kl, rtol=rtol, atol=1e-30)


@jax.jit
def divergence(b, first, second):
    return kl_divergence(PolyaGamma(b, first), PolyaGamma(b, second))


def test_golden_general_divergence(dtype):
    rows = GOLDEN["kl_general"]
    b, c1, c2, kl = columns(rows, "b", "c1", "c2", "kl")
    value = divergence(*(a.astype(dtype) for a in (b, c1, c2)))
    np.testing.assert_allclose(value, kl, rtol=tol(dtype, 3e-6, 1e-12))


def test_divergence_rules(x64):
    def kl(c):
        return kl_divergence(PolyaGamma(2.0, c[0]), PolyaGamma(2.0, c[1]))

    @jax.jit
    def to_second_order(c):
        wide = [PolyaGamma(2.0, x).expand((3,)) for x in c]
        return kl(c), jax.grad(kl)(c), jax.hessian(kl)(c), kl_divergence(*wide)

    _, gradient, hessian, _ = to_second_order(np.zeros(2))
    np.testing.assert_array_equal(gradient, 0.0)
    assert np.isfinite(hessian).all()
    at = np.array([1.3, -0.4])
    numeric = [
        (to_second_order(at + step)[0] - to_second_order(at - step)[0]) / 2e-6
        for step in 1e-6 * np.eye(2)
    ]
    np.testing.assert_allclose(to_second_order(at)[1], numeric, rtol=1e-8)
    one, *_, expanded = to_second_order(np.array([1.0, 0.0]))
    np.testing.assert_allclose(expanded, np.full(3, one))
    with pytest.raises(NotImplementedError, match="share the shape"):
        kl_divergence(PolyaGamma(1.0, 0.0), PolyaGamma(2.0, 0.0))


def test_special_functions(dtype):
    c = np.array([0.0, 1e-4, 1e-2, 0.3, 0.99, 1.01, 2.0, 10.0, 500.0])
    q = np.asarray(c**2, dtype)

    @jax.jit
    def everything(q, c):
        by_q, twice = jax.grad(pg_mean_unit), jax.grad(jax.grad(pg_mean_unit))
        each = (jax.grad(log2cosh_half), by_q, twice)
        variance = PolyaGamma(jnp.ones((), dtype), c).variance
        slopes = [jax.vmap(f)(q) for f in each]
        return log2cosh_half(q), pg_mean_unit(q), variance, *slopes

    log2cosh, mean, variance, by_log, slope, curvature = (
        np.asarray(x) for x in everything(q, np.asarray(c, dtype))
    )
    rtol = tol(dtype, 5e-7, 2e-15)
    np.testing.assert_allclose(log2cosh, np.logaddexp(c / 2, -c / 2), rtol=rtol)
    unit = np.append(0.25, np.tanh(c[1:] / 2) / (2 * c[1:]))
    np.testing.assert_allclose(mean, unit, rtol=rtol)
    np.testing.assert_allclose(by_log, unit / 2, rtol=2 * rtol)
    np.testing.assert_allclose(slope[0], -1 / 48, rtol=rtol)
    # d mean / d(c^2) is minus half the variance.
    np.testing.assert_allclose(slope, -variance / 2, rtol=tol(dtype, 2e-5, 1e-12))
    np.testing.assert_allclose(curvature[0], 1 / 240, rtol=rtol)
    assert np.isfinite(curvature).all()


@jax.jit
def slopes(x, b, c):
    return jax.grad(lambda *a: _log_prob(*a).sum(), argnums=(0, 1, 2))(x, b, c)


def gradient_points() -> tuple[np.ndarray, ...]:
    grid = np.meshgrid(
        [0.05, 0.7, 1.0, 3.3, 40.0, 1500.0], [0.0, 0.4, 6.0], [0.1, 0.6, 1.0, 1.8, 7.0]
    )
    b, c, factor = (a.ravel() for a in grid)
    mean = b * np.where(c > 0, np.tanh(c / 2) / (2 * np.maximum(c, 0.1)), 0.25)
    return mean * factor, b, c


def test_gradients_match_finite_differences(x64):
    point = gradient_points()
    value = log_prob
    exact = slopes(*point)
    for i in range(3):
        step = 2e-6 * np.maximum(point[i], 1e-3 if i == 2 else 0.0)
        up, down = list(point), list(point)
        up[i], down[i] = point[i] + step, point[i] - step
        numeric = (value(*up) - value(*down)) / (up[i] - down[i])
        scale = np.maximum(np.abs(numeric), np.maximum(1.0, 1 / point[1]))
        # The rounding error of the difference.
        noise = 4e-14 * np.maximum(1.0, np.abs(value(*point))) / step
        assert np.all(np.abs(exact[i] - numeric) < 3e-8 * scale + noise)


@pytest.mark.slow
@pytest.mark.parametrize("b", [0.7, 40.0, 1500.0])
def test_second_derivatives(x64, b):
    """Through the tilt at zero, and through the value in every regime."""
    x = np.array([0.02, 0.25, 1.0]) * b

    @jax.jit
    @jax.vmap
    def to_second_order(x):
        value = PolyaGamma(b, 1.0).log_prob
        tilted = jax.grad(jax.grad(lambda c: PolyaGamma(b, c).log_prob(x)))
        return jax.grad(value)(x), jax.grad(jax.grad(value))(x), tilted(0.0)

    _, curvature, tilted = to_second_order(x)
    np.testing.assert_allclose(tilted, b / 4 - x, rtol=1e-9, atol=1e-9)
    step = 1e-4 * x
    up, down = (np.asarray(to_second_order(y)[0]) for y in (x + step, x - step))
    numeric = (up - down) / (2 * step)
    np.testing.assert_allclose(curvature, numeric, rtol=1e-6)


def test_gradients_are_finite_everywhere():
    b, c, x, _ = EXTREME.T.astype(np.float32)
    for part in slopes(x, b, c):
        assert np.isfinite(part).all()


@slow_in_double
def test_sampler_is_deterministic_and_follows_shapes(dtype):
    b = np.asarray([[1.0], [2.0]], dtype)
    c = np.asarray([0.0, -1.0, 1000.0], dtype)
    d = PolyaGamma(b, c)
    assert d.batch_shape == (2, 3)
    draws, again, others = (
        np.asarray(d.sample(random.key(seed), (4,))) for seed in (0, 0, 1)
    )
    assert draws.shape == (4, 2, 3)
    assert draws.dtype == dtype
    np.testing.assert_array_equal(draws, again)
    assert np.all(draws != others)
    assert jax.eval_shape(d.log_prob, draws).shape == (4, 2, 3)
    assert np.isfinite(log_prob(draws, b, c)).all()
    # At c = 1e3 draws are never rejected, and concentrate at b / (2c).
    np.testing.assert_allclose(draws[..., 2] * 1000, [[0.5, 1.0]] * 4, rtol=0.2)


def test_zero_shape_is_a_point_mass():
    d = PolyaGamma(
        np.array([0.0, 1.0, 0.0], np.float32),
        np.array([0.0, 1.0, 5.0], np.float32),
        validate_args=False,
    )
    draws = np.asarray(d.sample(random.key(0), (50,)))
    assert np.all(draws[:, [0, 2]] == 0)
    assert np.all(draws[:, 1] > 0)
    np.testing.assert_array_equal(moments(d)[0][::2], 0.0)
