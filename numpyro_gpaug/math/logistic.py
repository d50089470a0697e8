# SPDX-License-Identifier: Apache-2.0
r"""Gaussian expectations of the logistic function, in closed form.

The standard logistic distribution is a scale mixture of normals whose scale is twice a
Kolmogorov variable [1]_. The mixing density is analytic and decays doubly exponentially
on both sides of the log-scale, so the trapezoid rule in the log-scale converges
geometrically, and a handful of normals *is* the logistic to rounding:
``sigma(f) = sum_k w_k Phi(f / tau_k)`` to 1e-15 with 28 terms. Every Gaussian
expectation then follows term by term, at every variance, with no quadrature over ``f``:
smoothing by a Gaussian can only shrink the error. All weights are positive, so the
expectation of log-sigmoid is concave in the mean and its site precision positive.

.. [1] Andrews and Mallows (1974), Scale mixtures of normal distributions. Stefanski
   (1991), A normal scale mixture representation of the logistic distribution.
"""

from __future__ import annotations

from functools import cache, partial

import jax
import jax.numpy as jnp
import numpy as np
from jax import Array

from numpyro_gpaug.math import normal
from numpyro_gpaug.math.blocks import by_elements


@cache
def _mixture(spacing: float) -> tuple[np.ndarray, np.ndarray]:
    """Return scales and weights of the normals, from the trapezoid rule in the
    log-scale."""
    log_k = np.arange(-2.1, 1.5, spacing)
    k = np.exp(log_k)
    n = np.arange(1, 60)[:, None]
    upper = 8 * k * np.sum((-1.0) ** (n + 1) * n**2 * np.exp(-2 * n**2 * k**2), 0)
    square = ((2 * n - 1) * np.pi) ** 2
    lower = np.sqrt(2 * np.pi) * np.sum(
        np.exp(-square / (8 * k**2)) * (square / (4 * k**4) - 1 / k**2), 0
    )
    density = np.where(k < 0.8, lower, upper)
    weights = spacing * k * density
    kept = weights > 1e-17
    return 2 * k[kept], weights[kept] / weights[kept].sum()


def logistic_mixture(dtype: np.dtype | type) -> tuple[Array, Array]:
    """Return the normals whose mixture is the logistic distribution.

    :param dtype: float32 (error 2e-8 in log-sigmoid) or float64 (3e-15).
    :return: scales ``tau`` (K,) and weights (K,) summing to one.

    **Example**

    >>> import jax.numpy as jnp
    >>> from jax.scipy.stats import norm
    >>> scales, weights = logistic_mixture(jnp.float32)
    >>> print(f"{(weights * norm.cdf(1.0 / scales)).sum():.4f}")  # sigmoid(1)
    0.7311
    """
    spacing = 0.12 if jnp.dtype(dtype) == jnp.float64 else 0.22
    scales, weights = _mixture(spacing)
    return jnp.asarray(scales, dtype), jnp.asarray(weights, dtype)


@jax.custom_jvp
def expected_log_sigmoid(mean: Array, variance: Array) -> Array:
    r"""Return ``E log sigmoid(f)`` for ``f ~ N(mean, variance)``, at every variance.

    Absolute error below 3e-15 (float64) or 2e-8 (float32) relative to
    ``max(1, |value|)``, rounding apart, uniformly in both arguments.

    :param mean: any shape.
    :param variance: broadcastable to it, >= 0.
    :return: the expectation, at most 0; its derivatives are closed-form too:
        ``d/dmean = E sigmoid(-f)``, ``d/dvariance = -E sigmoid'(f) / 2``.

    **Example**

    >>> import jax.numpy as jnp
    >>> print(f"{expected_log_sigmoid(jnp.array(0.0), jnp.array(1e-6)):.4f}")
    -0.6931
    """
    return _terms(mean, variance)[0]


@expected_log_sigmoid.defjvp
def _expected_log_sigmoid_jvp(primals, tangents):
    value, slope, curvature = _terms(*primals)
    mean_dot, variance_dot = tangents
    return value, slope * mean_dot - 0.5 * curvature * variance_dot


def _terms(mean: Array, variance: Array) -> tuple[Array, Array, Array]:
    """Return E log sigmoid(f), E sigmoid(-f) and E sigmoid'(f)."""
    dtype = jnp.result_type(mean, variance)
    tau, weights = logistic_mixture(dtype)
    terms = partial(_terms_of, tau, weights)
    return by_elements(terms, mean, variance, each=len(tau), dtype=dtype)


def _terms_of(
    tau: Array, weights: Array, mean: Array, variance: Array
) -> tuple[Array, Array, Array]:
    # The mixture is the leading axis, so that the data axis is contiguous.
    tau, weights = (x.reshape(x.shape + (1,) * jnp.ndim(mean)) for x in (tau, weights))
    scale_inv = jax.lax.rsqrt(variance + tau * tau)
    z = mean * scale_inv
    density = weights * normal.density(z)
    slope = (weights * normal.cdf(-z)).sum(0)
    value = mean * slope - (density / scale_inv).sum(0)
    return value, slope, (density * scale_inv).sum(0)


def expected_sigmoid(mean: Array, variance: Array) -> Array:
    """Return the predictive probability ``E sigmoid(f)``, ``f ~ N(mean, variance)``.

    :param mean: any shape.
    :param variance: broadcastable to it, >= 0.
    :return: values in [0, 1], with the accuracy of :func:`expected_log_sigmoid`.

    **Example**

    >>> import jax.numpy as jnp
    >>> print(f"{expected_sigmoid(jnp.array(2.0), jnp.array(3.0)):.4f}")
    0.7935
    """
    return _terms(-jnp.asarray(mean), jnp.asarray(variance))[1]
