# SPDX-License-Identifier: Apache-2.0
"""Moves of standard normal noise towards a posterior, by Hamiltonian Monte Carlo.

The posterior is the standard normal density times ``exp(w)``, with a log-weight w. The
normal part of the motion is a rotation of noise and momentum. Kicks by the slope of w
come between rotations, so that long paths have small errors where the normal density
approximates the posterior.

References: Neal (2001), Annealed importance sampling; Shahbaba, Lan, Johnson and Neal
(2014), Split Hamiltonian Monte Carlo.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
from jax import Array, lax, random

# Rotations of a path, and the angle of each. A quarter turn in all forgets the start.
ROTATIONS, ANGLE = 4, np.pi / 8


class State(NamedTuple):
    """Noise and its log-weight.

    :param noise: (..., rank).
    :param total: the log-weight w, (...).
    :param lost: its rounding error.
    :param slope: its gradient in the noise, (..., rank).
    :param white: whitened latents, (..., size).
    """

    noise: Array
    total: Array
    lost: Array
    slope: Array
    white: Array

    def rise_from(self, other: State) -> Array:
        """Return the difference of two log-weights, (...)."""
        return (self.total - other.total) + (self.lost - other.lost)


def hamiltonian(
    key: Array, power: Array, at: State, weigh: Callable[[Array], State]
) -> State:
    """Move noise such that its standard normal density times ``exp(power w)`` is left
    unchanged.

    :param key: random key.
    :param power: a number from 0 to 1.
    :param at: the state, of one draw.
    :param weigh: returns the state of noise (rank,).
    """
    keys = random.split(key)
    momentum = random.normal(keys[0], at.noise.shape, at.noise.dtype)
    cos, sin, kick = np.cos(ANGLE), np.sin(ANGLE), ANGLE * power

    def rotated(state: State, momentum: Array) -> tuple[State, Array]:
        momentum = momentum + 0.5 * kick * state.slope
        new = weigh(cos * state.noise + sin * momentum)
        momentum = cos * momentum - sin * state.noise
        return new, momentum + 0.5 * kick * new.slope

    path = at, momentum
    new, last = lax.fori_loop(0, ROTATIONS, lambda _, path: rotated(*path), path)
    fall = jnp.square(at.noise) - jnp.square(new.noise)
    fall += jnp.square(momentum) - jnp.square(last)
    rise = power * new.rise_from(at) + 0.5 * fall.sum()
    # False for a rise of NaN.
    moves = jnp.log(random.uniform(keys[1], (), rise.dtype)) < rise
    return jax.tree.map(lambda a, b: jnp.where(moves, a, b), new, at)
