# SPDX-License-Identifier: Apache-2.0
"""Exact expectations of the augmented likelihoods: at every variance, at a point mass,
and their gradients in the likelihoods' own parameters."""

from functools import cache

import jax
import jax.numpy as jnp
import numpy as np
import numpyro
import numpyro.distributions as dist
import pytest

import numpyro_gpaug as gpaug
from numpyro_gpaug.likelihoods import lookup_augmentation
from tests.augmented import normal_rule
from tests.conftest import slow
from tests.test_augmentations import NAMES, at, latents_of, likelihood, moments

SINGLE = NAMES[:-1]

MEANS = [-9.0, -0.5, 0.0, 0.5, 3.0, 30.0]
VARIANCES = [0.0, 1e-8, 1e-4, 0.3, 10.0, 1e3, 1e6]
GRID = np.array([(m, v) for m in MEANS for v in VARIANCES])
# The reference divides by them.
DEVIATIONS = np.sqrt(np.maximum(GRID[:, 1], 1e-24))
# The points at which some density above has a kink or turns.
TURNS = [-1.2, -1.0, 0.0, 0.1, 0.3, 1.0, 2.5]


def one_datum(name, i, zeros):
    d, y = likelihood(name, jnp.zeros(5, zeros.dtype))
    given = {
        k: jnp.broadcast_to(getattr(d, k)[i], zeros.shape)
        for k in d.arg_constraints
        if k in vars(d)
    }
    return type(d)(**given), jnp.broadcast_to(y[i], zeros.shape)


@cache
def reference(name, i):
    """``E log p`` and its derivatives in the mean and the variance, by quadrature."""
    with numpyro.validation_enabled(False):
        z, weights = normal_rule(GRID[:, 0], DEVIATIONS, TURNS)
        d, y = one_datum(name, i, jnp.zeros((len(GRID), 1)))
        (latent,) = latents_of(d)
        f = GRID[:, :1] + DEVIATIONS[:, None] * z

        @jax.jit
        def density_and_slope(f):
            log_prob = lambda f: at(d, {latent: f}).log_prob(y)  # noqa: E731
            return jax.jvp(log_prob, (f,), (jnp.ones_like(f),))

        value, slope = (np.asarray(x) for x in density_and_slope(f))
    by_variance = (weights * slope * z).sum(1) / (2 * DEVIATIONS)
    return (weights * value).sum(1), (weights * slope).sum(1), by_variance


def computed(name, i, dtype):
    m, v = GRID.astype(dtype).T

    @jax.jit
    def run(m, v):
        d, y = one_datum(name, i, m)
        (latent,) = latents_of(d)

        def total(m, v):
            value = gpaug.expected_log_prob(d, y, {latent: m}, {latent: v})
            return value.sum(), value

        (_, value), slopes = jax.value_and_grad(total, (0, 1), has_aux=True)(m, v)
        bound = lookup_augmentation(type(d)).bound(d, y, {latent: m}, {latent: v})
        return value, *slopes, bound

    return [np.asarray(x, float) for x in run(m, v)]


@pytest.mark.parametrize("name", SINGLE)
@pytest.mark.parametrize("i", [2, slow(3)])
def test_expectations_at_every_variance(x64, name, i) -> None:
    value, by_mean, by_variance = reference(name, i)
    for dtype, tolerance in (("float64", 1e-10), ("float32", 1e-5)):
        ours, *slopes, bound = computed(name, i, dtype)
        scale = np.maximum(1, np.abs(value))
        assert (np.abs(ours - value) / scale).max() < tolerance
        assert ((bound - ours) / scale).max() < tolerance / 10
        for slope, exact in zip(slopes, (by_mean, by_variance), strict=True):
            rounding = 1e-9 + 1e-14 * scale / DEVIATIONS
            error = np.abs(slope - exact) - rounding
            assert (error / np.maximum(1, np.abs(exact))).max() < tolerance


def test_margins_and_residuals_of_zero_are_finite(dtype) -> None:
    """The point is the kink itself, with zero variance."""
    one, zero = np.ones(1, dtype), np.zeros(1, dtype)

    @jax.jit
    def everything(m, v):
        found = []
        for d, y, name in (
            (gpaug.BayesianSVM(zero), np.ones(1, int), "f"),
            (dist.Laplace(zero, one), one, "loc"),
        ):
            augmentation = lookup_augmentation(type(d))

            def bound(m, v, d=d, y=y, name=name, augmentation=augmentation):
                return augmentation.bound(d, y, {name: m}, {name: v}).sum()

            distribution = augmentation.conditional(d, y, {name: m})["precision"]
            found += [distribution.mean, *jax.grad(bound, (0, 1))(m, v)]
        return found

    assert all(np.isfinite(x).all() for x in everything(one, zero))


PARAMETERS = [
    ("normal", "scale"),
    ("negative_binomial", "total_count"),
    ("student_t", "df"),
    ("student_t", "scale"),
    ("laplace", "scale"),
    ("poisson", "max_rate"),
    ("heteroscedastic", "max_precision"),
]


@pytest.mark.parametrize(("name", "parameter"), PARAMETERS)
def test_gradients_of_parameters(x64, name, parameter) -> None:
    d, y = likelihood(name, jnp.zeros(5))
    m, v = np.linspace(-2, 2, 5), np.array([0.1, 1.0, 4.0, 0.0, 30.0])
    mv = moments(latents_of(d), m, v)
    augmentation = lookup_augmentation(type(d))

    @jax.jit
    def both(x):
        moved = at(d, {parameter: x})
        exact = gpaug.expected_log_prob(moved, y, *mv)
        return jnp.stack([exact, augmentation.bound(moved, y, *mv)])

    x = getattr(d, parameter)
    with numpyro.validation_enabled(False):
        slope = jax.jvp(both, (x,), (x,))[1]
        differences = (both(x * (1 + 1e-5)) - both(x * (1 - 1e-5))) / 2e-5
    np.testing.assert_allclose(slope, differences, rtol=1e-7, atol=1e-7)
