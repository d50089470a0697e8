# SPDX-License-Identifier: Apache-2.0
"""Directions of L-BFGS: the two loops over pairs of points that are remembered, of as
many rounds as there are pairs, which are few when a search of few params ends.

Reference: Nocedal and Wright (2006), Numerical Optimization, algorithm 7.4.
"""

from __future__ import annotations

from typing import Any, NamedTuple, Self

import jax.numpy as jnp
from jax import Array, lax


class Memory(NamedTuple):
    """What curvature is known from, in a ring.

    :param number: of the points seen.
    :param point: the last, (n,).
    :param descent: the gradient there of what is to fall, (n,).
    :param moves: from point to point, (pairs, n).
    :param changes: of the gradient with them, (pairs, n).
    :param weights: one over the products of the two, (pairs,); 0 where there is none.
    """

    number: Array
    point: Array
    descent: Array
    moves: Array
    changes: Array
    weights: Array

    @classmethod
    def empty(cls, point: Array, pairs: int) -> Self:
        """That of no point.

        :param point: any, (n,).
        :param pairs: how many are remembered.
        """
        none, rows = jnp.zeros_like(point), jnp.zeros((pairs, point.size), point.dtype)
        return cls(jnp.int32(0), none, none, rows, rows, rows[:, 0])

    def step(self, descent: Array, point: Array) -> tuple[Array, Self]:
        """The inverse of the approximate Hessian times the gradient, and the memory
        with this point.

        :param descent: the gradient at the point, (n,).
        :param point: the point, (n,).
        """
        first = self.number == 0
        move = jnp.where(first, 0, point - self.point)
        change = jnp.where(first, 0, descent - self.descent)
        product, size = move @ change, change @ change
        weight = jnp.where(product == 0, 0, 1 / jnp.where(product == 0, 1, product))
        slot = (self.number - 1) % len(self.weights)
        new = self._replace(
            number=self.number + 1, point=point, descent=descent,
            moves=self.moves.at[slot].set(move),
            changes=self.changes.at[slot].set(change),
            weights=self.weights.at[slot].set(weight),
        )  # fmt: skip
        known = product / jnp.where(size > 0, size, 1)
        # A first step is no longer than one.
        unknown = 1 / jnp.maximum(1, jnp.linalg.norm(descent))
        scale = jnp.where(first, unknown, jnp.where(size > 0, known, 1))
        return new._solved(descent, scale), new

    def _solved(self, vector: Array, scale: Array) -> Array:
        """:param scale: of the identity that the approximation begins as."""
        pairs = len(self.weights)
        number = jnp.minimum(self.number - 1, pairs)

        def pair(back: Array) -> tuple[Array, Array, Array, Array]:
            slot = (self.number - 2 - back) % pairs
            return slot, self.moves[slot], self.changes[slot], self.weights[slot]

        def newest_first(back: Array, carry: Any) -> Any:
            vector, shares = carry
            slot, move, change, weight = pair(back)
            share = weight * (move @ vector)
            return vector - share * change, shares.at[slot].set(share)

        def oldest_first(i: Array, carry: Any) -> Any:
            vector, shares = carry
            slot, move, change, weight = pair(number - 1 - i)
            share = shares[slot] - weight * (change @ vector)
            return vector + share * move, shares

        carry = vector, jnp.zeros_like(self.weights)
        vector, shares = lax.fori_loop(0, number, newest_first, carry)
        return lax.fori_loop(0, number, oldest_first, (scale * vector, shares))[0]
