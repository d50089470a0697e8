# SPDX-License-Identifier: Apache-2.0
r"""Rejection sampler for the Polya-Gamma family, one envelope for every shape.

In the notation of :mod:`._pg_density`, the density of :math:`X=4x` is that of an
inverse Gaussian times :math:`\rho_h(X)`, the probability that a Brownian excursion
survives, which is decreasing and log-concave.  A tangent to :math:`\log\rho_h` at
:math:`x_0` only changes the drift of the inverse Gaussian, so the proposal is inverse
Gaussian again, and the acceptance probability is at least 0.81 for every shape and
tilt. It can be shown that :math:`\rho_h` is a probability. Its log-concavity was
checked numerically for all shapes and values, but not proved.
"""

from functools import partial

import jax
import jax.numpy as jnp
import numpy as np
from jax import Array, lax, random

from numpyro_gpaug.distributions._pg_rho import log_gap, tangent
from numpyro_gpaug.distributions._rejection import REJECTED, accepted


def _propose(key: Array, given: tuple[Array, Array], shape: tuple[int, ...]) -> Array:
    """Return one inverse-Gaussian proposal per lane."""
    (h, z), dtype = given, given[0].dtype
    # One call to the generator: each call adds its own copy of the cipher to the
    # program, which takes longest to compile.
    low = float(np.nextafter(np.array(-1, dtype), np.array(0, dtype)))
    u = random.uniform(key, (2, *shape), dtype, low, 1.0)

    # Below h = 1 a tangent at the mean is so flat that the proposal keeps the heavy
    # tail of a first-passage time.
    z_safe = jnp.maximum(z, 1e-3)
    mean = h * jnp.tanh(z_safe) / z_safe
    at = tangent(h, jnp.where(h < 1, jnp.maximum(mean, 0.6), mean))
    drift = jnp.sqrt(jnp.square(z) + 2 * at.slope)

    spread = jnp.square(lax.erf_inv(u[0])) / (h * drift)
    root = 1 + spread + jnp.sqrt(spread) * jnp.sqrt(spread + 2)
    inverse = 1 / root
    # The uniform that chooses between the two roots is, given the choice, uniform
    # again.
    level = 0.5 * (1 + u[1]) * (1 + inverse)
    lower = level <= 1
    x = h / drift * jnp.where(lower, inverse, root)
    # A quarter of it is the draw of the Polya-Gamma distribution, and must not
    # underflow.
    x = jnp.maximum(x, 4 * jnp.finfo(dtype).tiny)
    level = jnp.where(lower, level, (level - 1) * root)
    rejected = level > jnp.exp(log_gap(x, at))
    # Parameters that are not numbers end the loop, with such a draw.
    return jnp.where(rejected, REJECTED, x)


@partial(jax.jit, static_argnames="num")
def _sample(key: Array, h: Array, z: Array, *, num: int) -> Array:
    return accepted(key, _propose, (h, z), num)


def sample(
    key: Array, h: Array, z: Array, num: int, concrete_h: np.ndarray | None
) -> Array:
    """Return ``num`` draws of ``X`` for each entry of the flat ``h >= 0``, ``z >= 0``.

    :param key: random key.
    :param h: shapes, as many as ``z`` or a single one.
    :param z: tilts.
    :param num: number of draws.
    :param concrete_h: the values of ``h``, if they are known.
    :return: an array of shape ``(num, len(z))``.
    """
    if concrete_h is not None and concrete_h.size:
        if np.all(concrete_h == concrete_h[0]):
            h = h[:1]
    # A shape of zero is a point mass; any stand-in keeps the arithmetic finite.
    positive = h > 0
    stand_in = jnp.where(positive, h, 1.0)
    draws = _sample(key, stand_in, z, num=num)
    return jnp.where(positive, draws, 0.0)
