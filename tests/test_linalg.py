# SPDX-License-Identifier: Apache-2.0
"""Jitter, factors and natural parameters."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from numpyro_gpaug import kernels
from numpyro_gpaug.math.linalg import (
    NaturalGaussian,
    cholesky_jitter,
    default_jitter,
    kl_to_diagonal,
    moments,
)


def _crowded(size: int, dim: int, dtype: type):
    inputs = np.random.default_rng(size + dim).normal(size=(size, dim))
    return jnp.asarray(inputs, dtype)


@pytest.mark.parametrize("size", [20, 100, 500])
def test_default_jitter_factorises_crowded_inputs(size: int) -> None:
    for dim in (1, 5):
        inputs = _crowded(size, dim, jnp.float32)
        for kernel in (kernels.SquaredExponential, kernels.Matern52):
            for lengthscale in (0.3, 3.0, 100.0):
                gram = kernel(lengthscale)(inputs, inputs)
                factor = cholesky_jitter(gram, default_jitter(size, gram.dtype))
                assert jnp.isfinite(factor).all(), (dim, kernel, lengthscale)


def test_default_jitter_float64(x64) -> None:
    inputs = _crowded(300, 1, jnp.float64)
    gram = kernels.SquaredExponential(3.0)(inputs, inputs)
    assert jnp.isnan(cholesky_jitter(gram, 0.0)).any()
    assert jnp.isfinite(cholesky_jitter(gram, default_jitter(300, gram.dtype))).all()


def test_jitter_is_relative_to_the_diagonal() -> None:
    factor = cholesky_jitter(1e6 * jnp.eye(3), 1e-2)
    np.testing.assert_allclose(factor, np.sqrt(1.01e6) * np.eye(3), rtol=1e-6)


def test_moments_and_kl_against_dense_algebra(x64) -> None:
    rng = np.random.default_rng(0)
    root = rng.normal(size=(2, 4, 4))
    precision = root @ root.swapaxes(-1, -2) + np.eye(4)
    potential = rng.normal(size=(2, 4))
    q = moments(NaturalGaussian(jnp.asarray(potential), jnp.asarray(precision)))
    covariance = np.linalg.inv(precision)
    mean = np.einsum("cij,cj->ci", covariance, potential)
    np.testing.assert_allclose(q.mean, mean, rtol=1e-10)
    rebuilt = jnp.swapaxes(q.whitener, -1, -2) @ q.whitener
    np.testing.assert_allclose(rebuilt, covariance, rtol=1e-10)
    np.testing.assert_allclose(q.log_det, np.linalg.slogdet(covariance)[1], rtol=1e-10)

    loc, scale = rng.normal(size=(2, 4)), rng.uniform(0.5, 2, size=(2, 4))
    expected = 0.0
    for c in range(2):
        inverse = np.diag(1 / scale[c] ** 2)
        gap = mean[c] - loc[c]
        expected += 0.5 * (
            np.trace(inverse @ covariance[c]) + gap @ inverse @ gap - 4
            + 2 * np.log(scale[c]).sum() - np.linalg.slogdet(covariance[c])[1]
        )  # fmt: skip
    np.testing.assert_allclose(
        kl_to_diagonal(q, loc, scale).sum(), expected, rtol=1e-12
    )


def test_kl_of_a_gaussian_with_itself_is_zero() -> None:
    q = moments(
        NaturalGaussian(jnp.array([[2.0, -1.0]]), jnp.diag(jnp.array([4.0, 9.0]))[None])
    )
    loc, scale = jnp.array([[0.5, -1 / 9]]), jnp.array([[0.5, 1 / 3]])
    np.testing.assert_allclose(kl_to_diagonal(q, loc, scale).sum(), 0.0, atol=1e-6)


def test_gradients_reach_the_natural_parameters() -> None:
    def divergence(precision):
        q = moments(NaturalGaussian(jnp.zeros((1, 3)), precision))
        return kl_to_diagonal(q, jnp.zeros((1, 3)), jnp.ones((1, 3))).sum()

    gradient = jax.grad(divergence)(jnp.eye(3)[None])
    np.testing.assert_allclose(gradient, np.zeros((1, 3, 3)), atol=1e-6)
