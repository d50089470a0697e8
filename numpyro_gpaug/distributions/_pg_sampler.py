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

from collections.abc import Callable
from functools import partial
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax import Array, lax, random

from numpyro_gpaug.distributions._pg_rho import log_gap, tangent

# Up to this shape the rounding of a plain difference of the table, in single
# precision, costs no more than the table's own error.
PLAIN_MAX = 32.0
_QUEUE_FROM = 4096
_SLOTS = 64


def _propose(
    key: Array, h: Array, z: Array, shape: tuple[int, ...], divided: bool
) -> Array:
    """Return one inverse-Gaussian proposal per lane, with a minus sign if it is
    rejected."""
    dtype = h.dtype
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
    # A second, Boolean result would take the compiler several times longer to fill.
    return jnp.where(level <= jnp.exp(log_gap(x, at, divided=divided)), x, -x)


def _running_count(flags: Array, halvings: int = 4) -> Array:
    """Return the cumulative sum of integers, mostly in passes that vectorise."""
    if halvings == 0:
        return jnp.cumsum(flags)
    odd = jnp.pad(flags, (0, len(flags) % 2))[1::2]
    pairs = flags[::2] + odd
    ends = _running_count(pairs, halvings - 1)
    return jnp.stack([ends - odd, ends], axis=1).reshape(-1)[: len(flags)]


@partial(jax.jit, static_argnames=("num", "divided"))
def _sample(key: Array, h: Array, z: Array, *, num: int, divided: bool) -> Array:
    batch = z.shape[0]
    total = num * batch

    def propose(count: Array | int, index: Array | np.ndarray) -> Array:
        own = h if h.size == 1 else h[index % batch], z[index % batch]
        return _propose(random.fold_in(key, count), *own, (len(index),), divided)

    if total <= _QUEUE_FROM:

        def redraw(state):
            count, x = state
            return count + 1, jnp.where(x < 0, propose(count, np.arange(total)), x)

        start = (0, jnp.full(total, -1, z.dtype))
        _, x = lax.while_loop(_any_rejected, redraw, start)
    else:
        x = _propose(random.fold_in(key, 0), h, z, (num, batch), divided).reshape(-1)
        _, x = lax.while_loop(_any_rejected, partial(_by_queue, propose), (1, x))
    return x.reshape(num, batch)


def _any_rejected(state: tuple[Any, Array]) -> Array:
    return jnp.any(state[1] < 0)


def _by_queue(
    propose: Callable[..., Array], state: tuple[Any, Array]
) -> tuple[Any, Array]:
    """Draw rejected lanes again until they are accepted, with a queue.

    At most 19% of the lanes are rejected on average. Looping over all of them until the
    last is accepted would waste most of the work. They form a queue instead, and a slot
    whose lane was accepted takes the next one.
    """
    count, x = state
    total = len(x)
    slots, room = total // _SLOTS, total // 4
    rank = _running_count(jnp.where(x < 0, 1, 0).astype(jnp.int32))
    place = jnp.where((x < 0) & (rank <= room), rank - 1, room + slots)
    queue = jnp.full(room + slots, total, jnp.int32)
    queue = queue.at[place].set(jnp.arange(total, dtype=jnp.int32), mode="drop")

    def serve(state):
        count, cursor, lane, x = state
        new = propose(count, lane)
        x = x.at[jnp.where(new < 0, total, lane)].set(new, mode="drop")
        rank = _running_count(jnp.where(new < 0, 0, 1).astype(jnp.int32))
        # Past its end the queue holds no lane, and neither does its last entry.
        following = queue.at[cursor + rank - 1].get(mode="clip")
        lane = jnp.where(new < 0, lane, following)
        return count + 1, cursor + rank[-1], lane, x

    first = (count, jnp.int32(slots), queue[:slots], x)
    count, _, _, x = lax.while_loop(
        lambda state: jnp.any(state[2] < total), serve, first
    )
    return count, x


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
    divided = jnp.finfo(h.dtype).bits <= 32
    if concrete_h is not None and concrete_h.size:
        divided = divided and bool(concrete_h.max() > PLAIN_MAX)
        if np.all(concrete_h == concrete_h[0]):
            h = h[:1]
    # A shape of zero is a point mass; any stand-in keeps the arithmetic finite.
    positive = h > 0
    stand_in = jnp.where(positive, h, 1.0)
    draws = _sample(key, stand_in, z, num=num, divided=divided)
    return jnp.where(positive, draws, 0.0)
