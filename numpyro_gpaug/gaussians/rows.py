# SPDX-License-Identifier: Apache-2.0
"""Predictors that depend on the latents of one group each, and on latents that all of
them may depend on."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, field, replace
from functools import partial
from typing import Any, NamedTuple, Self

import jax
import jax.numpy as jnp
from jax import Array, lax

from numpyro_gpaug.gaussians.base import GaussianFactors, Layout, Marginals
from numpyro_gpaug.math.arrays import STATIC
from numpyro_gpaug.math.blocks import cut_rows, over_blocks
from numpyro_gpaug.math.sharding import shards


class Rows(NamedTuple):
    """The dependence of predictors on latents, one row each.

    :param own: coefficients of the latents of their group, (n, R); for steps of chains
        perhaps also of the next step, (n, 2 R).
    :param group: the group, (n,).
    :param dense: coefficients of the first F latents outside groups, (n, F).
    :param value: coefficients of single further latents outside groups, (n, s).
    :param place: places of these, (n, s), counted from F.
    """

    own: Array
    group: Array
    dense: Array
    value: Array
    place: Array

    def at(self, rows: Array) -> Rows:
        """Return some of the rows."""
        return Rows(*(x[rows] for x in self))


def shifts(rows: Rows, layout: Layout, z: Array) -> Array:
    """Return the change of predictors for latents (size,), (n,)."""
    groups, others = layout.split(z)
    own, group, dense, value, place = rows
    width = dense.shape[-1]
    moved = (own * groups[group]).sum(-1) + dense @ others[:width]
    return moved + (value * others[width:][place]).sum(-1)


class Order(NamedTuple):
    """An order of n rows; copies of the last may fill a block.

    If a million rows are in random order, each reads its group from a different place
    in memory: for its mean, for its variance, and to add to the group's sums. In the
    order of groups, consecutive rows use the same memory, which stays in the
    processor's cache. A row then takes as long as in small data.

    :param rows: the row at each place, (m,), m >= n.
    :param places: the place of each row, (n,).
    """

    rows: Array
    places: Array

    @classmethod
    def by_group(cls, group: Array, groups: int, size: int) -> Order:
        """Return an order in which rows of the same group, or of near ones, follow each
        other.

        One integer per row is sorted. It has the row in its low bits, and the leading
        bits of the group in the others, which takes a fifth of the time of sorting
        pairs.

        :param group: the group of every row, (n,).
        :param groups: the number of groups.
        :param size: the size of the blocks that are filled.
        """
        number = len(group)
        low = (number - 1).bit_length()
        dropped = max(0, (groups - 1).bit_length() - (32 - low))
        near = lax.stop_gradient(group).astype(jnp.uint32) >> dropped
        keys = jnp.sort((near << low) | jnp.arange(number, dtype=jnp.uint32))
        rows = (keys & jnp.uint32(2**low - 1)).astype(jnp.int32)
        here = jnp.arange(number, dtype=jnp.int32)
        places = jnp.zeros_like(rows).at[rows].set(here, mode="promise_in_bounds")
        return cls(jnp.pad(rows, (0, -number % size), "edge"), places)

    def taken(self, values: Array) -> Array:
        """Return rows (n, ...) in this order, (m, ...)."""
        return values.at[self.rows].get(mode="promise_in_bounds")

    def weights(self, values: Array) -> Array:
        """Return weights (n,) in this order, (m,); copies have weight zero."""
        own = jnp.arange(len(self.rows)) < len(self.places)
        return jnp.where(own, self.taken(values), 0)

    def back(self, values: Array) -> Array:
        """Return rows (m, ...) in their original order, (n, ...)."""
        return values.at[self.places].get(mode="promise_in_bounds")


@jax.tree_util.register_dataclass
@dataclass(frozen=True)
class RowMap:
    """Predictors ``offset + A' z`` (plus a residual), A' of :class:`Rows`.

    The structure has ``shifts(rows, z)``; ``information(rows, potential, precision)``
    and ``coupling(left, right, cross)``, the information of factors about the latents;
    the variances ``variances(q, rows, over_rows)`` and the covariances of pairs
    ``crossed(q, left, right)`` under moments q; and ``rows_of_block(number, dtype)``.
    Its moments have ``covariance(rows)``.

    :param offset: predictors at latents of zero, (1, n).
    :param rows: the rows of A'.
    :param residual: variance of the predictors given the latents, (1, n).
    :param structure: the structure of the latents.
    :param order: the order of the rows; ``None`` where it is that of the predictors.
        See :meth:`in_order`.
    """

    offset: Array
    rows: Rows
    residual: Array
    structure: Any = field(metadata=STATIC)
    order: Order | None = None

    def in_order(self) -> Self:
        """Return the same map with its rows in the order of groups, in complete blocks
        if they are many. Blocks are then read without a copy."""
        structure, dtype = self.structure, self.offset.dtype
        size = structure.rows_of_block(self.offset.shape[-1], dtype)
        # If rows are on several devices, none of them moves.
        if size is None or shards() > 1 or jax.default_backend() != "cpu":
            return self
        order = Order.by_group(self.rows.group, structure.layout.groups, size)
        # Otherwise the compiler would gather rows from columns, one value at a time.
        rows = lax.optimization_barrier(self.rows)
        return replace(self, rows=jax.tree.map(order.taken, rows), order=order)

    @property
    def _in_place(self) -> Rows:
        """The rows, in the order of the predictors."""
        return jax.tree.map(self._put_back, self.rows)

    def _weights(self, rows: Array) -> Array:
        return rows if self.order is None else self.order.weights(rows)

    def _put_back(self, rows: Array) -> Array:
        return rows if self.order is None else self.order.back(rows)

    def __call__(self, z: Array) -> Array:
        """Return means of the predictors given latents (1, size), (1, n)."""
        moved = self.structure.shifts(self.rows, z[0])
        return self.offset + self._put_back(moved)

    def given(self, z: Array) -> Marginals:
        """Return marginals of the predictors given latents (1, size)."""
        return Marginals(self(z), self.residual)

    def marginals(self, q: Any) -> Marginals:
        """Return marginals of the predictors; variances are sums of squares."""
        spreads = self.structure.variances(q, self.rows, self._over_rows)
        variance = self._put_back(spreads)
        return Marginals(self(q.mean), self.residual + variance)

    def covariances(self, q: Any, left: Array, right: Array) -> Array:
        """Return covariances of pairs of predictors. Both predictors of a pair depend
        on the same group, or one of them depends on none.

        :param q: moments of the latents.
        :param left: one predictor of each pair, (P,).
        :param right: the other.
        """
        given, crossed = self._in_place, partial(self.structure.crossed, q)
        pairs = given.at(left), given.at(right)
        return self._over_rows(lambda rows: crossed(*rows), pairs)[None]

    def covariance(self, q: Any) -> Array:
        """Return the covariance of all predictors, (1, n, n), without the residual."""
        return q.covariance(self._in_place)[None]

    def information(self, factors: GaussianFactors, about: Array | None = None) -> Any:
        """Return the information of factors on the predictors about the latents, to be
        added to the prior's.

        :param factors: factors of the predictors.
        :param about: as in :meth:`numpyro_gpaug.gaussians.dense.AffineMap.information`.
        """
        about = self.offset if about is None else about
        centred = self._weights((factors.potential - factors.precision * about)[0])
        precision = self._weights(factors.precision[0])
        return self.structure.information(self.rows, centred, precision)

    def coupling(self, cross: Array, left: Array, right: Array) -> Any:
        """Return the information about the latents of factors on products of two
        predictors. Both predictors of a pair depend on the same group, or one of them
        depends on none.

        :param cross: cross precisions of the pairs, (1, P).
        :param left: one predictor of each pair, (P,).
        :param right: the other.
        """
        given = self._in_place
        return self.structure.coupling(given.at(left), given.at(right), cross[0])

    def certain(self) -> RowMap:
        """Return the same map without the residual."""
        return replace(self, residual=jnp.zeros_like(self.residual))

    def _over_rows(self, function: Callable[[Any], Array], rows: Any) -> Array:
        """Apply a function to the rows, in blocks if they are many."""
        number = len(jax.tree.leaves(rows)[0])
        size = self.structure.rows_of_block(number, self.offset.dtype)
        if size is None:
            return function(rows)
        cut = jax.tree.map(lambda x: cut_rows(x, size), rows)
        return over_blocks(function, cut, number)
