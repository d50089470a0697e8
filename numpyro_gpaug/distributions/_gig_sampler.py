# SPDX-License-Identifier: Apache-2.0
r"""Rejection sampler for the generalised inverse Gaussian, and the inverse Gaussian.

In the notation of :mod:`numpyro_gpaug.math.bessel`, :math:`V`, the logarithm of the
draw minus the mode of that logarithm, has the density :math:`e^{-\varphi(v)}` up to a
constant, where :math:`\varphi(v) = \frac P2 e_2(v) + \frac Q2 e_2(-v)` is convex with
its minimum, zero, at zero.  As in Devroye (2014), the hat is constant between two
exponential tails, each a tangent.  Tangents at the points :math:`-s`, :math:`t` where
:math:`\varphi = 1` enclose an area of :math:`s + t`.  Convexity gives
:math:`\varphi(v) \le v/t` on :math:`[0, t]` and the same on the left, so that the area
under the density is at least :math:`(1 - 1/e)(s + t)`: at least 63% of the proposals
are accepted, for all parameters.

L. Devroye (2014), *Random variate generation for the generalized inverse Gaussian
distribution*, Statistics and Computing 24, 239-246.
"""

from functools import partial
from typing import NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
from jax import Array, lax, random

from numpyro_gpaug.distributions._rejection import REJECTED, accepted
from numpyro_gpaug.math.bessel import energies, log_edge


class Hat(NamedTuple):
    """The parameters of the density, and its hat: constant on ``[-left, right]``, with
    exponential tails of these scales."""

    big: Array
    log_q: Array
    left: Array
    left_scale: Array
    right: Array
    right_scale: Array

    @property
    def area(self) -> Array:
        return self.left + self.left_scale + self.right + self.right_scale


def make_hat(big: Array, log_q: Array) -> Hat:
    """Return the hat for ``P = big`` and ``log Q = log_q``."""
    q = 2 / big
    left = jnp.minimum(1 + q, q + jnp.sqrt(2 * q))
    left = -jnp.minimum(left, log_edge(log_q, 1.0))
    right = log_edge(jnp.log(big), 1.0)

    def tangent(v):
        near, far = energies(v, big, log_q)
        slope = near - far + (big + jnp.exp(log_q)) / 2 * v
        return near + far, slope

    def edge(v):
        # Newton from outside the root of a convex function stays outside it.
        for _ in range(4):
            height, slope = tangent(v)
            v = v - (height - 1) / slope
        height, slope = tangent(v)
        return v - height / slope, 1 / slope

    (left, left_scale), (right, right_scale) = edge(left), edge(right)
    return Hat(big, log_q, -left, -left_scale, right, right_scale)


def _propose(key: Array, hat: Hat, shape: tuple[int, ...]) -> Array:
    """Return one proposal of ``V`` per lane."""
    dtype = hat.big.dtype
    tiny = float(jnp.finfo(dtype).tiny)
    u = random.uniform(key, (2, *shape), dtype, tiny, 1.0)
    z = u[0] * hat.area
    in_left = z < hat.left_scale
    rest = (1 - u[0]) * hat.area
    in_right = rest < hat.right_scale
    left_log = jnp.log(jnp.where(in_left, z / hat.left_scale, 1.0))
    right_log = jnp.log(jnp.where(in_right, rest / hat.right_scale, 1.0))
    v = z - hat.left_scale - hat.left
    v = jnp.where(in_left, hat.left_scale * left_log - hat.left, v)
    v = jnp.where(in_right, hat.right - hat.right_scale * right_log, v)
    near, far = energies(v, hat.big, hat.log_q)
    rejected = jnp.log(u[1]) + left_log + right_log > -(near + far)
    # Parameters that are not numbers end the loop, with such a draw.
    return jnp.where(rejected, REJECTED, v)


@partial(jax.jit, static_argnames="num")
def sample_log(key: Array, big: Array, log_q: Array, *, num: int) -> Array:
    """Draw ``num`` values of ``V`` for each entry of the flat ``big`` and ``log_q``.

    :return: An array of shape ``(num, batch)``.
    """
    return accepted(key, _propose, make_hat(big, log_q), num)


def within_range(x: Array) -> Array:
    """Replace a draw beyond the range of its dtype by the nearest number within it."""
    info = jnp.finfo(x.dtype)
    return jnp.clip(x, float(info.tiny), float(info.max))


@partial(jax.jit, static_argnames="shape")
def sample_inverse_gaussian(
    key: Array, mean: Array, shape_parameter: Array, *, shape: tuple[int, ...]
) -> Array:
    """Draw inverse Gaussian values by the transformation of Michael, Schucany and Haas.

    J. R. Michael, W. R. Schucany and R. W. Haas (1976), *Generating random variates
    using transformations with multiple roots*, The American Statistician 30(2).

    :param mean: Means, broadcast to ``shape``.
    :param shape_parameter: Shapes, positive, broadcast to ``shape``.
    """
    dtype = mean.dtype
    low = float(np.nextafter(np.array(-1, dtype), np.array(0, dtype)))
    u = random.uniform(key, (2, *shape), dtype, low, 1.0)
    # Half a squared normal, times mean / shape.
    normal = jnp.square(lax.erf_inv(u[0]))
    spread = jnp.minimum(normal * (mean / shape_parameter), jnp.finfo(dtype).max / 4)
    # The two roots are mean / root and mean * root: no difference is taken.
    root = 1 + spread + jnp.sqrt(spread) * jnp.sqrt(spread + 2)
    lower = 0.5 * (1 + u[1]) * (1 + 1 / root) <= 1
    return within_range(jnp.where(lower, mean / root, mean * root))
