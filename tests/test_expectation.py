# SPDX-License-Identifier: Apache-2.0
"""Expectations by Gauss-Hermite rules: values against integrals, and derivatives
against those of the rule itself.
"""

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from scipy import integrate

from numpyro_gpaug.math import expectation
from numpyro_gpaug.math.expectation import (
    PredictorMoments,
    expected_sum,
    nodes,
    placed,
    rule_differences,
)


def logistic(numbers, predictors):
    (y,) = numbers
    (f,) = predictors
    return jax.nn.log_sigmoid((2 * y - 1) * f).sum()


def exponential(numbers, predictors):
    (y,) = numbers
    (f,) = predictors
    return (y * f - jnp.exp(f)).sum()


@pytest.mark.parametrize("deviation", [0.01, 0.5, 2.0, 4.0])
@pytest.mark.parametrize("total", [logistic, exponential])
def test_one_predictor_against_an_integral(x64, total, deviation):
    mean = 0.7

    def integrand(z):
        f = mean + deviation * z
        value = -np.logaddexp(0, -f) if total is logistic else f - np.exp(f)
        return value * np.exp(-0.5 * z * z) / np.sqrt(2 * np.pi)

    exact = integrate.quad(integrand, -12, 12, limit=400, epsabs=1e-12)[0]
    at = PredictorMoments((jnp.array([mean]),), (jnp.array([deviation**2]),))
    found = jax.jit(lambda at: expected_sum(total, (jnp.array([1.0]),), at))(at)
    # The logarithm of the logistic function turns within a standard deviation of 4.
    turns = total is logistic and deviation > 2
    np.testing.assert_allclose(found, exact, rtol=1e-4 if turns else 1e-6)


def test_constants_need_no_derivative():
    def total(shape, predictors):
        return jax.scipy.special.betainc(shape, 1.0, jax.nn.sigmoid(*predictors)).sum()

    def average(mean):
        at = PredictorMoments((mean,), (jnp.ones(2),))
        return expected_sum(total, jnp.array(2.0), at)

    assert np.all(np.asarray(jax.jit(jax.grad(average))(np.ones(2, "f"))) > 0)


def test_a_derivative_has_the_dtype_of_its_argument(x64):
    y = jnp.ones(1, jnp.float32)
    at = PredictorMoments((jnp.zeros(1),), (jnp.ones(1),))
    found = jax.jit(jax.grad(lambda y: expected_sum(logistic, (y,), at)))(y)
    assert found.dtype == y.dtype


def normal(numbers, predictors):
    """The log-density of a normal with a location and the logarithm of a scale."""
    y, shift = numbers
    f, g = predictors[::-1] if predictors[0].shape != y.shape else predictors
    return (-g - 0.5 * jnp.square((y - f - shift) * jnp.exp(-g))).sum()


@pytest.mark.parametrize("shared", [False, True])
def test_two_predictors_against_their_closed_form(x64, shared):
    """``E (y - f)^2 exp(-2 g)`` under a correlated pair is known."""
    y = jnp.array([0.3, -1.0, 2.0])
    f, vf = jnp.array([0.1, 0.2, 0.9]), jnp.array([0.5, 0.2, 0.4])
    g, vg = (jnp.array([0.3]), jnp.array([0.2])) if shared else (
        jnp.array([0.3, -0.1, 0.2]), jnp.array([0.2, 0.3, 0.1])
    )  # fmt: skip
    c = jnp.array([0.1, -0.2, 0.15])
    pair = ((g, f), (vg, vf)) if shared else ((f, g), (vf, vg))
    at = PredictorMoments(*pair, c)
    found = jax.jit(lambda at: expected_sum(normal, (y, jnp.zeros(())), at))(at)
    moved = y - f + 2 * c
    exact = (-g - 0.5 * jnp.exp(-2 * g + 2 * vg) * (jnp.square(moved) + vf)).sum()
    np.testing.assert_allclose(found, exact, rtol=1e-8)


@pytest.mark.parametrize("shared", [False, True])
def test_derivatives_are_those_of_the_rule(x64, shared):
    rng = np.random.default_rng(0)
    y = rng.normal(size=4)
    g = rng.normal(size=1 if shared else 4)
    vg = rng.uniform(0.1, 0.4, size=g.shape)
    f, vf = rng.normal(size=4), rng.uniform(0.1, 0.4, 4)
    c = 0.3 * np.sqrt(vg * vf)
    pair = ((g, f), (vg, vf)) if shared else ((f, g), (vf, vg))
    at, numbers = PredictorMoments(*pair, c), (y, np.array(0.2))

    def direct(numbers, at):
        x, weights = nodes(2, jnp.float64)
        values = jax.vmap(lambda node: normal(numbers, placed(at, node)))(x)
        return (weights * values).sum()

    @jax.jit
    def slopes(*given):
        of_ours = jax.grad(lambda *a: expected_sum(normal, *a), (0, 1))
        return of_ours(*given), jax.grad(direct, (0, 1))(*given)

    ours, theirs = slopes(numbers, at)
    jax.tree.map(lambda a, b: np.testing.assert_allclose(a, b, rtol=1e-7), ours, theirs)


def test_a_predictor_without_variance_has_finite_derivatives():
    at = PredictorMoments((jnp.array([0.5, 1.0]),), (jnp.array([0.0, 1.0]),))
    value, slopes = jax.jit(
        jax.value_and_grad(
            lambda at: expected_sum(logistic, (jnp.array([1.0, 0.0]),), at)
        )
    )(at)
    assert np.isfinite(value)
    assert all(np.isfinite(x).all() for x in jax.tree.leaves(slopes))


def test_densities_may_overflow_far_out():
    """For a truncated normal, beyond thirteen standard deviations the distribution
    function is zero in float32, and minus its logarithm infinite.
    """

    def truncated(numbers, predictors, log_cdf):
        (f,) = predictors
        return (-0.5 * jnp.square(f - numbers[0]) - log_cdf(f)).sum()

    def naive(numbers, predictors):
        return truncated(
            numbers, predictors, lambda f: jnp.log(jax.scipy.stats.norm.cdf(f))
        )

    def stable(numbers, predictors):
        return truncated(numbers, predictors, jax.scipy.stats.norm.logcdf)

    at = PredictorMoments((jnp.array([-3.0, 1.0]),), (jnp.array([1.3, 0.2]),))
    numbers = (jnp.array([0.5, 0.1]),)

    @jax.jit
    def both(numbers, at):
        values = [
            jax.value_and_grad(lambda *a, t=total: expected_sum(t, *a), (0, 1))
            for total in (naive, stable)
        ]
        at_node = naive(numbers, placed(at, nodes(1, jnp.float32)[0][0]))
        off = rule_differences(lambda f: [naive(numbers, f)], at)
        return [v(numbers, at) for v in values], at_node, off

    (found, exact), at_node, off = both(numbers, at)
    assert not np.isfinite(at_node)
    jax.tree.map(lambda a, b: np.testing.assert_allclose(a, b, rtol=1e-4), found, exact)
    assert np.isfinite(off[0])


def test_rules_differ_by_what_they_are_off(x64):
    """Sums of NumPy's: of a polynomial by nothing, of a kink by what is known."""
    at = PredictorMoments((jnp.array([0.2, 0.0]),), (jnp.array([0.5, 2.0]),))
    found = rule_differences(lambda f: [f[0] ** 4, jnp.abs(f[0])], at)
    np.testing.assert_allclose(found[0], 0, atol=1e-12)
    absolute = []
    for number in (32, 48):
        x, weights = np.polynomial.hermite_e.hermegauss(number)
        f = np.array([0.2, 0.0]) + np.sqrt([0.5, 2.0]) * x[:, None]
        absolute.append(weights @ np.abs(f) / weights.sum())
    np.testing.assert_allclose(found[1], absolute[0] - absolute[1], atol=1e-12)
    off = absolute[0][1] - 2 / np.sqrt(np.pi)
    np.testing.assert_allclose(found[1][1] / off, 1 / 3, rtol=0.1)


@pytest.mark.parametrize(("deviation", "numbers"), [(0.1, (15, 52)), (3.0, (47, 358))])
def test_narrow_gaussians_take_fewer_nodes(monkeypatch, deviation, numbers):
    """With many data, smaller rules are used where they are accurate enough."""
    rng, num, seen = np.random.default_rng(1), 40, []
    y = jnp.asarray(rng.normal(size=num), jnp.float32)
    spread = jnp.full(num, deviation**2, jnp.float32)
    means = tuple(jnp.asarray(rng.normal(size=(2, num)), jnp.float32))
    pair = PredictorMoments(means, (spread, spread), 0.5 * spread)
    one = PredictorMoments(means[:1], (spread,))

    def counted(numbers, predictors):
        jax.debug.callback(lambda _: seen.append(len(predictors)), predictors[0][0])
        return (normal if len(predictors) > 1 else logistic)(numbers, predictors)

    def slopes():
        def of(at, *numbers):
            value = jax.value_and_grad(lambda at: expected_sum(counted, numbers, at))
            return value(at)

        found = jax.jit(lambda: (of(one, y), of(pair, y, y[0])))()
        jax.effects_barrier()
        return found

    exact = slopes()
    assert (seen.count(1), seen.count(2)) == (32, 225)
    monkeypatch.setattr(expectation, "AT_ONCE", 1)
    seen.clear()
    found = slopes()
    assert (seen.count(1), seen.count(2)) == numbers
    jax.tree.map(
        lambda a, b: np.testing.assert_allclose(a, b, rtol=1e-3, atol=1e-4),
        found, exact,
    )  # fmt: skip
