# SPDX-License-Identifier: Apache-2.0
"""The first-order phase of a search over hundreds of params without a natural scale.

Second-order steps change stiff directions first. If a network is learnt, these are the
scales: the noise absorbs everything that the network does not yet explain, gradients of
weights vanish, and the search ends in an optimum hundreds of nats too low. Adam changes
all numbers at one rate, so the weights change before the noise has grown. L-BFGS
continues from the result.

Reference: Kingma and Ba (2015), Adam: a method for stochastic optimization.
"""

from __future__ import annotations

from typing import Any, NamedTuple

import jax.numpy as jnp
from jax import Array

# The number of learnt values without a natural scale from which on there is a
# first-order phase, and its learning rate, in unconstrained units.
MANY, RATE = 50, 0.01
# The largest number of steps of the phase, and the largest part of a run (one in
# three). With fewer steps, deep kernels ended in the basin that the phase should avoid.
# With more, inducing inputs that L-BFGS alone learns in 300 evaluations took two or
# three times as many.
STEPS, PART = 300, 3
# The number of steps without an increase that end the phase: it started at an optimum.
PATIENCE = 20


class Ascent(NamedTuple):
    """State of the phase.

    :param left: remaining steps; at 0 the search begins at the highest bound, and at -1
        the phase is over.
    :param moments: the state of optax.
    """

    left: Array
    moments: Any

    @classmethod
    def start(cls, flat: Array, free: int) -> Ascent | tuple[()]:
        """Return the state before the first step; empty if there is no such phase.

        :param flat: unconstrained params.
        :param free: the number of them without a natural scale.
        """
        return cls(jnp.int32(STEPS), _adam().init(flat)) if free >= MANY else ()

    def within(self, num_steps: int) -> Ascent:
        """Return the state for a run of a number of steps."""
        return self._replace(left=jnp.minimum(self.left, num_steps // PART))

    def next(self, gradient: Array, stalled: Array) -> tuple[Array, Ascent]:
        """Return the next update, and the state after it.

        :param gradient: the gradient of the bound, flat.
        :param stalled: steps without a rise.
        """
        update, moments = _adam().update(-gradient, self.moments)
        left = jnp.maximum(self.left - 1, jnp.where(self.left > 0, 0, -1))
        left = jnp.where((stalled >= PATIENCE) & (left > 0), 0, left)
        return update, Ascent(left, moments)

    def ended(self) -> Ascent:
        """Return the state after a step to a point without a finite bound."""
        return self._replace(left=jnp.minimum(self.left, 0))


def _adam() -> Any:
    # Imported here, because fits with fixed hyperparameters do not need it.
    import optax

    return optax.adam(RATE)
