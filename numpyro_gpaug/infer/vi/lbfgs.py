# SPDX-License-Identifier: Apache-2.0
"""L-BFGS: the last points of a search as a model of the curvature.

The compact form takes two triangular solves, and no loops over pairs of points: it is a
few operations to compile.

In directions of which nothing is known, the curvature is that of the last step, times a
scale for each coordinate. Gradients of parameters on logarithmic scales are about as
large as their curvatures. A coordinate whose gradient has been a thousand times smaller
than that of another one would otherwise move a thousand times less: the scale of a few
effects would stay where it is until that of the noise of very many data is known.

Reference: Byrd, Nocedal and Schnabel (1994), Representations of quasi-Newton matrices
and their use in limited memory methods, theorem 2.2.
"""

from __future__ import annotations

from typing import NamedTuple

import jax.numpy as jnp
from jax import Array, lax

from numpyro_gpaug.math import linalg

# A coordinate may move so many times less than another one where no curvature is known.
# Gradients of less than one nat do not count as small.
LESS = 10


class Memory(NamedTuple):
    """Points of a search for a maximum. The newest pair is the last row.

    :param number: the number of points; of more pairs only the last ones are kept.
    :param point: the last point, (n,).
    :param gradient: the gradient there.
    :param steps: differences between successive points, (pairs, n).
    :param falls: by how much the gradient fell in each step, (pairs, n).
    :param largest: the largest size of each entry of the gradients, (n,).
    """

    number: Array
    point: Array
    gradient: Array
    steps: Array
    falls: Array
    largest: Array

    @classmethod
    def empty(cls, flat: Array, pairs: int) -> Memory:
        """Return a memory without points.

        :param flat: any point.
        :param pairs: the number of pairs to keep.
        """
        zeros = jnp.zeros((pairs, flat.size), flat.dtype)
        zero = jnp.zeros_like(flat)
        return cls(jnp.int32(0), zero, zero, zeros, zeros, zero)

    def forgotten(self, which: Array) -> Memory:
        """Return a memory without points, where ``which`` is true."""
        return self._replace(number=lax.select(which, jnp.int32(0), self.number))

    def added(self, point: Array, gradient: Array) -> Memory:
        """Return the memory with another point, and the gradient there."""

        def shifted(rows: Array, new: Array) -> Array:
            return jnp.concatenate([rows[1:], new[None]])

        steps = shifted(self.steps, point - self.point)
        falls = shifted(self.falls, self.gradient - gradient)
        before = jnp.where(self.number == 0, 0, self.largest)
        largest = jnp.maximum(before, jnp.abs(gradient))
        return Memory(self.number + 1, point, gradient, steps, falls, largest)

    @linalg.precise
    def direction(self) -> Array:
        """Return the gradient times the inverse curvature. The first direction is the
        gradient itself, at most of length one, with small entries enlarged."""
        pairs = len(self.steps)
        used = jnp.arange(pairs) > pairs - self.number
        used &= (self.steps * self.falls).sum(-1) != 0
        steps, falls = (
            jnp.where(used[:, None], x, 0) for x in (self.steps, self.falls)
        )
        products = falls @ steps.T
        diagonal = linalg.diagonal(products)
        lower = jnp.tril(products) + jnp.diag(jnp.asarray(~used, products.dtype))
        # The curvature along the last step is used for all other directions.
        largest = jnp.maximum(self.largest, 1)
        scales = jnp.maximum(largest.max() / (LESS * largest), 1)
        square = falls[-1] @ (scales * falls[-1])
        length = jnp.sqrt(self.gradient @ self.gradient)
        scales *= lax.select(
            used[-1], diagonal[-1] / square, 1 / jnp.maximum(length, 1)
        )  # fmt: skip

        def solved(vector: Array, *, transpose: bool) -> Array:
            columns = vector[:, None]
            return linalg.solve_lower(lower, columns, transpose=transpose)[:, 0]

        shares = solved(steps @ self.gradient, transpose=True)
        rest = scales * (self.gradient - shares @ falls)
        return rest + solved(diagonal * shares - falls @ rest, transpose=False) @ steps
