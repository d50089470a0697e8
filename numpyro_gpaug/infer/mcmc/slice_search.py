# SPDX-License-Identifier: Apache-2.0
"""The search for an angle at which an ellipse is inside the slice."""

from __future__ import annotations

from collections.abc import Callable
from typing import NamedTuple

import jax.numpy as jnp
import numpy as np
from jax import Array, lax, random

MAX_SHRINKS = 60


class Found(NamedTuple):
    """The point that a slice sampler moves to.

    :param angle: the angle; 0 if it does not move.
    :param log_ratio: the log-ratio there.
    :param evaluations: the number of evaluations.
    """

    angle: Array
    log_ratio: Array
    evaluations: Array


class _Bracket(NamedTuple):
    angle: Array
    low: Array
    high: Array
    value: Array
    evaluations: Array


def angle_in_slice(
    key: Array, log_ratio: Array, evaluate: Callable[[Array], Array]
) -> Found:
    """Find an angle whose log-ratio is above a random height, by shrinking a bracket.

    :param key: random key.
    :param log_ratio: the log-ratio at angle 0, the current state.
    :param evaluate: returns the log-ratio at an angle.
    """
    # The bracket is the whole ellipse, cut at a random angle, so the first proposal is
    # uniform on it. All uniform numbers are drawn at once, because in the loop each
    # would take longer than an evaluation.
    uniform = random.uniform(key, (MAX_SHRINKS + 2,), log_ratio.dtype)
    height = log_ratio + jnp.log1p(-uniform[0])
    low = -2 * np.pi * uniform[1]
    zero, never = jnp.zeros_like(low), jnp.full_like(low, -jnp.inf)
    first = _Bracket(zero, low, low + 2 * np.pi, never, jnp.int32(0))

    def outside(at: _Bracket) -> Array:
        return ~(at.value >= height) & (at.evaluations < MAX_SHRINKS)

    def shrink(at: _Bracket) -> _Bracket:
        angle = at.low + (at.high - at.low) * uniform[at.evaluations + 2]
        low = jnp.where(angle < 0, angle, at.low)
        high = jnp.where(angle < 0, at.high, angle)
        return _Bracket(angle, low, high, evaluate(angle), at.evaluations + 1)

    last = lax.while_loop(outside, shrink, first)
    # If even the smallest move leaves the slice, the cause is rounding, and the state
    # stays.
    accepted = last.value >= height
    ratio = jnp.where(accepted, last.value, log_ratio)
    return Found(jnp.where(accepted, last.angle, 0), ratio, last.evaluations)
