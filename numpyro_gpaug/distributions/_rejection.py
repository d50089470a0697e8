# SPDX-License-Identifier: Apache-2.0
"""Rejection sampling of many variables at once, the lanes."""

from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax import Array, lax, random

# Takes the place of a proposal that is rejected. A second, Boolean result would take
# the compiler several times longer to fill.
REJECTED = -jnp.inf
_QUEUE_FROM = 4096
_SLOTS = 64

# Proposals of some lanes, given the number of the attempt and the lanes.
Propose = Callable[[Any, Any], Array]


def accepted(
    key: Array, propose: Callable[[Array, Any, Any], Array], given: Any, num: int
) -> Array:
    """Return the first proposals that are accepted, (num, batch).

    :param key: random key.
    :param propose: returns proposals of a given shape, from a key and parameters.
    :param given: parameters, a tree of arrays (batch,), or (1,) if all are equal.
    :param num: the number of draws for each.
    """
    batch, dtype = max((x.size, x.dtype) for x in jax.tree.leaves(given))
    lanes = np.arange(num * batch)

    def again(count: Any, lanes: Any) -> Array:
        own = jax.tree.map(lambda x: x if len(x) == 1 else x[lanes % batch], given)
        return propose(random.fold_in(key, count), own, (len(lanes),))

    def redraw(state: Any) -> Any:
        count, x = state
        if len(lanes) > _QUEUE_FROM:
            return _by_queue(again, count, x)
        return count + 1, jnp.where(x == REJECTED, again(count, lanes), x)

    start = 0, jnp.full(len(lanes), REJECTED, dtype)
    if len(lanes) > _QUEUE_FROM:
        start = 1, propose(random.fold_in(key, 0), given, (num, batch)).reshape(-1)
    return lax.while_loop(_any_rejected, redraw, start)[1].reshape(num, batch)


def _any_rejected(state: Any) -> Array:
    return jnp.any(state[1] == REJECTED)


def _by_queue(propose: Propose, count: Any, x: Array) -> tuple[Any, Array]:
    """Draw rejected lanes again until they are accepted, with a queue.

    Looping over all lanes until the last is accepted would waste most of the work. The
    rejected ones form a queue instead, and a slot whose lane was accepted takes the
    next one. If more than a quarter of the lanes are rejected, some remain.
    """
    total = len(x)
    slots, room = total // _SLOTS, total // 4
    rejected = x == REJECTED
    rank = jnp.cumsum(rejected, dtype=jnp.int32)
    place = jnp.where(rejected & (rank <= room), rank - 1, room + slots)
    queue = jnp.full(room + slots, total, jnp.int32)
    queue = queue.at[place].set(jnp.arange(total, dtype=jnp.int32), mode="drop")

    def serve(state: Any) -> Any:
        count, cursor, lane, x = state
        new = propose(count, lane)
        again = new == REJECTED
        x = x.at[jnp.where(again, total, lane)].set(new, mode="drop")
        rank = jnp.cumsum(~again, dtype=jnp.int32)
        # Past its end the queue holds no lane, and neither does its last entry.
        following = queue.at[cursor + rank - 1].get(mode="clip")
        return count + 1, cursor + rank[-1], jnp.where(again, lane, following), x

    first = (count, jnp.int32(slots), queue[:slots], x)
    count, _, _, x = lax.while_loop(
        lambda state: jnp.any(state[2] < total), serve, first
    )
    return count, x
