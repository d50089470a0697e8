# SPDX-License-Identifier: Apache-2.0
r"""Regularised incomplete gamma and beta functions, right in float32 for large shapes.

There JAX exponentiates differences of large logarithms: the probability of at most
100,000 events, of 100,000 expected, is off by .04, and of a million it is negative. For
large shapes, the functions here are :math:`\Phi(z) + \varphi(z) (1/z - 1/q)` [1], where
:math:`q` is the standardised argument and :math:`z^2 / 2` the deviance.

**References**

[1] R. Lugannani and S. Rice (1980), *Saddle point approximation for the distribution of
the sum of independent random variables*. For these functions it is the first order of
the uniform expansions of N. M. Temme (DLMF 8.12 and 8.18).

[2] M. E. Wise (1950), *The incomplete beta function as a contour integral and a quickly
converging series for its inverse*.
"""

from __future__ import annotations

import jax.numpy as jnp
from jax import Array
from jax.scipy import special

from numpyro_gpaug.math.normal import density
from numpyro_gpaug.math.special import horner


def gammaincc(a: Array, x: Array) -> Array:
    """Return the regularised upper incomplete gamma function ``Q(a, x)``.

    :param a: the shape, > 0.
    :param x: the start of the integral, >= 0.
    """
    if jnp.result_type(a, x) == jnp.float64:
        return special.gammaincc(a, x)
    large = a >= 100
    small = special.gammaincc(*(jnp.where(large, 1.0, v) for v in (a, x)))
    a, x = (jnp.where(large, v, 1.0) for v in (a, x))
    scale = 1 / jnp.sqrt(a)
    u = (x - a) / a
    return jnp.where(large, 1 - _below(u / scale, _bend(u), scale), small)


def betainc(a: Array, b: Array, x: Array, rest: Array) -> Array:
    """Return the regularised incomplete beta function ``I_x(a, b)``.

    :param a: the first shape, > 0.
    :param b: the second shape, > 0.
    :param x: the end of the integral, in [0, 1].
    :param rest: ``1 - x``, which may be smaller than a rounding error of ``x``.
    """
    if jnp.result_type(a, b, x, rest) == jnp.float64:
        return special.betainc(a, b, x)
    turned = x > rest
    a, b = jnp.where(turned, b, a), jnp.where(turned, a, b)
    x = jnp.where(turned, rest, x)
    large = jnp.maximum(a, b) >= 300
    few, many = large & (a < 8), large & (a >= 8)
    small = special.betainc(*(jnp.where(large, 0.5, v) for v in (a, b, x)))
    # With a small first shape, x is nearly a gamma variable [2].
    rate = -(b + (a - 1) / 2) * jnp.log1p(-x)
    gamma = special.gammainc(*(jnp.where(few, v, 1.0) for v in (a, rate)))
    a, b = (jnp.where(many, v, 1.0) for v in (a, b))
    mean, other = a / (a + b), b / (a + b)
    scale = jnp.sqrt(mean * other / (a + b))
    bend = other * _bend((x - mean) / mean) + mean * _bend((mean - x) / other)
    beta = _below((x - mean) / scale, bend, (other - mean) / (scale * (a + b)))
    found = jnp.where(many, beta, jnp.where(few, gamma, small))
    return jnp.where(turned, 1 - found, found)


def log_beta(a: Array, b: Array) -> Array:
    """Return ``log B(a, b)``, to the accuracy of the dtype.

    :param a: first argument, any shape, > 0.
    :param b: second argument, of that shape, > 0.
    """
    # In float64, betaln is wrong by up to 1e-6; in float32, the log-gammas cancel.
    if jnp.result_type(a, b) == jnp.float64:
        return special.gammaln(a) + special.gammaln(b) - special.gammaln(a + b)
    return special.betaln(a, b)


def _below(q: Array, bend: Array, skewness: Array) -> Array:
    """Return the probability below a standardised number.

    :param q: the number.
    :param bend: twice the deviance over ``q ** 2``, nearly ``1 - 2 / 3 skewness q``.
    :param skewness: half the skewness of the distribution.
    """
    root, near = jnp.sqrt(bend), jnp.abs(q) < 0.01
    correction = jnp.where(near, skewness / 3, (1 / root - 1) / jnp.where(near, 1, q))
    z = q * root
    return jnp.clip(special.ndtr(z) + density(z) * correction, 0, 1)


def _bend(u: Array) -> Array:
    """Return ``2 (u - log(1 + u)) / u^2``, which is one at zero."""
    # Beyond these bounds probabilities of large shapes are 0 and 1.
    u = jnp.clip(u, -0.9999, 1e3)
    near = jnp.abs(u) < 0.03
    series = horner([2 * (-1.0) ** k / (k + 2) for k in range(5)], u)
    u = jnp.where(near, 1, u)
    return jnp.where(near, series, 2 * (u - jnp.log1p(u)) / jnp.square(u))
