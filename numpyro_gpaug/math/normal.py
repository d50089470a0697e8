# SPDX-License-Identifier: Apache-2.0
"""The standard normal distribution, and Gaussian expectations of piecewise linear
functions."""

from __future__ import annotations

import math
from typing import Any

import jax
import jax.numpy as jnp
from jax import Array, random
from jax.scipy.special import erfc


@jax.custom_jvp
def expected_ramp(mean: Array, variance: Array) -> Array:
    r"""Return ``E max(x, 0)`` for ``x ~ N(mean, variance)``.

    The value is ``m Phi(m / s) + s phi(m / s)``.

    :param mean: any shape.
    :param variance: of that shape, >= 0.
    :return: the expectation; its derivatives, ``Phi(m / s)`` and
        ``phi(m / s) / (2 s)``, are those of the ramp itself where the variance is zero
        and the mean is not.

    **Example**

    >>> import jax.numpy as jnp
    >>> mean, variance = jnp.array([0.0, 2.0]), jnp.array([1.0, 0.0])
    >>> [f"{x:.3f}" for x in expected_ramp(mean, variance)]
    ['0.399', '2.000']
    """
    return _terms(mean, variance)[0]


@expected_ramp.defjvp
def _expected_ramp_jvp(primals: Any, tangents: Any) -> tuple[Array, Array]:
    value, above, density = _terms(*primals)
    return value, above * tangents[0] + 0.5 * density * tangents[1]


def expected_absolute(mean: Array, variance: Array) -> Array:
    """Return ``E |x|`` for ``x ~ N(mean, variance)``, the mean of a folded normal.

    :param mean: any shape.
    :param variance: of that shape, >= 0.

    **Example**

    >>> import jax.numpy as jnp
    >>> print(expected_absolute(jnp.array(-3.0), jnp.array(0.0)))
    3.0
    """
    size = jnp.abs(mean)
    return size + 2 * expected_ramp(-size, variance)


def _terms(mean: Array, variance: Array) -> tuple[Array, Array, Array]:
    """Return the expectation, the probability of x > 0, and the density of x at 0."""
    dtype = jnp.result_type(mean, variance)
    # Far below rounding, but its third power is still a positive number.
    floor = jnp.asarray(jnp.finfo(dtype).eps ** 3, dtype)
    scale_inv = jax.lax.rsqrt(jnp.maximum(variance, floor))
    z = mean * scale_inv
    above, at_zero = cdf(z), scale_inv * density(z)
    return mean * above + variance * at_zero, above, at_zero


def drawn(
    key: Array, sample_shape: tuple[int, ...], mean: Array, variance: Array
) -> Array:
    """Draw normal numbers, in the dtype of their means.

    :param sample_shape: the shape before that of the means. (The batch shape of a
        distribution still has the old axes under vmap.)
    """
    noise = random.normal(key, (*sample_shape, *mean.shape), mean.dtype)
    return mean + jnp.sqrt(variance) * noise


LOG_2PI = math.log(2 * math.pi)


def density(z: Array) -> Array:
    """Return the density at z."""
    return jnp.exp(-0.5 * z * z) * (1 / math.sqrt(2 * math.pi))


def cdf(z: Array) -> Array:
    """Return the probability below z, to relative precision where it is small."""
    return 0.5 * erfc(z * -math.sqrt(0.5))
