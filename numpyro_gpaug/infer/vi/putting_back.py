# SPDX-License-Identifier: Apache-2.0
"""Whether an end of a search is left by single numbers that go back to their start.

What a hyperparameter on a scale does far from its start is seen no more from there: of
a lengthscale that has grown until a trend is all that is left of a sine, no gradient
leads back. So at its end a search evaluates the bound with each number that has moved
far put back to where it began, and goes on from the best of these if the bound is
higher there. One evaluation each, without a gradient, tells what a search from another
start would.
"""

from __future__ import annotations

from typing import Any, NamedTuple

import jax.numpy as jnp
from jax import Array

# How far a number must have moved, in unconstrained units (e-folds of a positive one),
# and by how many nats the bound must be higher, whatever is tolerated.
FAR, HIGHER = 1.0, 0.1
# Numbers that are put back at one end, at most: those that have moved furthest.
MOST = 64


class PuttingBack(NamedTuple):
    """Which numbers a search has put back, and will.

    :param begun: where the search began, flat.
    :param left: what is still to be put back at the present end, by number.
    :param trial: the number that the next evaluation puts back, -1 for none.
    :param best: of those of this end the one with the highest bound, -1 for none that
        is high enough.
    :param highest: that bound, or what it must exceed; the next end must, too.
    :param leads: whether the search is to go on from the next evaluation.
    :param times: how often it has gone on from each number put back.
    :param over: whether it is at an end from which none leads away.
    """

    begun: Array
    left: Array
    trial: Array
    best: Array
    highest: Array
    leads: Array
    times: Array
    over: Array

    @classmethod
    def start(cls, flat: Array) -> PuttingBack:
        """Before the first end.

        :param flat: unconstrained params.
        """
        lowest = jnp.full((), jnp.finfo(flat.dtype).min, flat.dtype)
        none, no = jnp.int32(-1), jnp.array(False)
        left, times = jnp.zeros(flat.shape, bool), jnp.zeros(flat.shape, jnp.int32)
        return cls(flat, left, none, none, lowest, no, times, no)

    @property
    def tries(self) -> Array:
        """Whether the next evaluation puts a number back."""
        return self.trial >= 0

    def values(self, best: Array, ahead: Array) -> Array:
        """Where the next evaluation is, flat.

        :param best: the best values seen.
        :param ahead: where the search goes otherwise.
        """
        here = jnp.arange(best.size) == self.trial
        return jnp.where(self.tries, jnp.where(here, self.begun, best), ahead)

    def at_end(
        self, best: Array, scales: Any, bound: Array, clear: Array, ended: Array
    ) -> PuttingBack:
        """Which numbers are to be put back, at an end that is higher than the last.

        :param best: the best values seen, flat.
        :param scales: which numbers are on a scale, where far is the same everywhere.
        :param bound: there.
        :param clear: what a higher one must have more.
        :param ended: whether it is an end.
        """
        distance = jnp.where(scales, jnp.abs(best - self.begun), 0)
        if best.size > MOST:
            least = jnp.sort(distance)[-MOST]
            distance = jnp.where(distance >= least, distance, 0)
        bound = jnp.asarray(bound, self.highest.dtype)
        ended = ended & ~self.tries
        due = ended & (bound > self.highest)
        left = distance > FAR
        new = self._replace(
            left=jnp.where(due, left, self.left),
            trial=jnp.where(due, _first(left), self.trial),
            best=jnp.where(due, -1, self.best),
            highest=jnp.where(due, bound + clear.astype(bound.dtype), self.highest),
        )
        return new._replace(over=ended & ~new.tries)

    def after(self, bound: Array) -> PuttingBack:
        """After a number was put back: the next; after the last, the best once more,
        from where the search goes on.

        :param bound: with it.
        """
        bound = jnp.asarray(bound, self.highest.dtype)
        higher = bound > self.highest
        best = jnp.where(higher, self.trial, self.best)
        left = self.left & (jnp.arange(self.left.size) != self.trial)
        any_left = left.any()
        return self._replace(
            left=left, trial=jnp.where(any_left, _first(left), best), best=best,
            highest=jnp.where(higher, bound, self.highest),
            leads=~any_left & (best >= 0),
        )  # fmt: skip

    def led(self, flat: Array, first: Array) -> PuttingBack:
        """After a search has gone on, from the best number put back if that leads.

        :param flat: where it is.
        :param first: whether it begins there.
        """
        new = self.start(jnp.where(first, flat, self.begun))
        here = jnp.arange(flat.size) == self.trial  # none, unless it leads
        return new._replace(
            highest=jnp.where(first | self.leads, new.highest, self.highest),
            times=jnp.where(first, 0, self.times + here),
        )


def _first(left: Array) -> Array:
    """The first number of those that are left; -1 if none is."""
    return jnp.where(left.any(), jnp.argmax(left), -1).astype(jnp.int32)
