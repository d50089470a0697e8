# SPDX-License-Identifier: Apache-2.0
"""Rejection sampling of many variables at once, the lanes."""

from collections.abc import Callable
from typing import Any

import jax.numpy as jnp
import numpy as np
from jax import Array, lax

# Takes the place of a proposal that is rejected. A second, Boolean result would take
# the compiler several times longer to fill.
REJECTED = -jnp.inf
_QUEUE_FROM = 4096
_SLOTS = 64

# Proposals of some lanes, given the number of the attempt and the lanes.
Propose = Callable[[Any, Any], Array]


def accepted(
    total: int, dtype: Any, first: Callable[[], Array], propose: Propose
) -> Array:
    """Return a draw of every lane, flat: the first proposal that is accepted.

    :param total: the number of lanes.
    :param dtype: the dtype of the draws.
    :param first: returns the first proposals of all lanes, if these are many.
    :param propose: returns new proposals.
    """
    if total > _QUEUE_FROM:
        start = 1, first().reshape(-1)
        return lax.while_loop(_any_rejected, lambda s: _by_queue(propose, *s), start)[1]
    lanes = np.arange(total)

    def redraw(state: Any) -> Any:
        count, x = state
        return count + 1, jnp.where(x == REJECTED, propose(count, lanes), x)

    start = 0, jnp.full(total, REJECTED, dtype)
    return lax.while_loop(_any_rejected, redraw, start)[1]


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
