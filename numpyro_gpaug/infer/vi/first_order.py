# SPDX-License-Identifier: Apache-2.0
"""The first-order phase of a search in hundreds of numbers that are no scales.

Second-order steps take stiff directions first. Where a network is learnt these are the
scales: the noise takes all that the network does not yet explain for noise, gradients
of weights vanish, and the search ends in an optimum hundreds of nats low. Adam moves
all numbers at one rate, weights before the noise has run off; from where that leads
L-BFGS goes on.

Reference: Kingma and Ba (2015), Adam: a method for stochastic optimization.
"""

from __future__ import annotations

from typing import Any, NamedTuple

import jax.numpy as jnp
from jax import Array

# Numbers on no scale from which on there is a phase; its rate, in unconstrained units.
MANY, RATE = 50, 0.01
# Its steps, at most and as a part of a run: with fewer, deep kernels ended in the basin
# that the phase is to avoid, with more, inducing inputs that L-BFGS learns alone in 300
# evaluations took two and three times as many.
STEPS, PART = 300, 3
# Steps without a rise that end it: it began at an optimum.
PATIENCE = 20


class Ascent(NamedTuple):
    """State of the phase.

    :param left: steps that it still has; at 0 the search begins, where the bound is
        highest, and at -1 it is over.
    :param moments: optax's.
    """

    left: Array
    moments: Any

    @classmethod
    def start(cls, flat: Array, free: int) -> Ascent | tuple[()]:
        """Return the state before the first step; empty where there is no phase.

        :param flat: unconstrained params.
        :param free: how many of them are on no scale.
        """
        return cls(jnp.int32(STEPS), _adam().init(flat)) if free >= MANY else ()

    def within(self, num_steps: int) -> Ascent:
        """Return the state for a run of a number of steps."""
        return self._replace(left=jnp.minimum(self.left, num_steps // PART))

    def next(self, gradient: Array, stalled: Array) -> tuple[Array, Ascent]:
        """Return the next update, and the state after it.

        :param gradient: of the bound, flat.
        :param stalled: steps without a rise.
        """
        update, moments = _adam().update(-gradient, self.moments)
        left = jnp.maximum(self.left - 1, jnp.where(self.left > 0, 0, -1))
        left = jnp.where((stalled >= PATIENCE) & (left > 0), 0, left)
        return update, Ascent(left, moments)

    def ended(self) -> Ascent:
        """Return the state after a step to where there is no bound."""
        return self._replace(left=jnp.minimum(self.left, 0))


def _adam() -> Any:
    # Imported here: whoever keeps hyperparameters fixed need not wait for it.
    import optax

    return optax.adam(RATE)
