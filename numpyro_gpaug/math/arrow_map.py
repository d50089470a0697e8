# SPDX-License-Identifier: Apache-2.0
"""Affine maps to predictors that each depend on one group of latents, and on a border
that all share (:mod:`numpyro_gpaug.math.arrow`)."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, replace
from functools import partial
from typing import Any, NamedTuple, Self

import jax
import jax.numpy as jnp
from jax import Array, lax

from numpyro_gpaug.math.affine import GaussianFactors, Marginals, gaussian_factors
from numpyro_gpaug.math.arrow import ArrowNatural, ArrowSizes
from numpyro_gpaug.math.blocks import (
    cut_rows,
    over_blocks,
    rows_of_blocks,
    summed_blocks,
)
from numpyro_gpaug.math.ordering import Order
from numpyro_gpaug.math.sharding import shards


class Loadings(NamedTuple):
    """The dependence of predictors on latents, one row each.

    :param own: on the numbers of their group, (n, R).
    :param group: which, (n,).
    :param dense: on the first F numbers of the corner, (n, F).
    :param value: on single others of it, (n, s).
    :param place: which, (n, s), counted from F.
    """

    own: Array
    group: Array
    dense: Array
    value: Array
    place: Array

    def at(self, rows: Array) -> Loadings:
        """Select some rows."""
        return Loadings(*(x[rows] for x in self))


@partial(
    jax.tree_util.register_dataclass,
    data_fields=("offset", "loadings", "residual", "order"), meta_fields=("sizes",),
)  # fmt: skip
@dataclass(frozen=True)
class ArrowMap:
    """Predictors ``offset + a' z_group + c' u`` (plus a residual), in the place of an
    :class:`~numpyro_gpaug.math.affine.AffineMap`.

    :param offset: predictors at latents of zero, (1, n).
    :param loadings: rows of a and c.
    :param residual: variance of the predictors given the latents, (1, n).
    :param sizes: of the latents. Their moments are
        :class:`~numpyro_gpaug.math.arrow.ArrowMoments`, or of a like kind.
    :param order: that of the loadings' rows; ``None`` where it is the predictors'. See
        :meth:`in_order`.
    """

    offset: Array
    loadings: Loadings
    residual: Array
    sizes: ArrowSizes
    order: Order | None = None

    def in_order(self) -> Self:
        """The same map, its loadings in the order of groups and filling whole blocks if
        they are many: they are then looked at without a copy."""
        size = _rows_of_blocks(self.offset.shape[-1], self.sizes, self.offset.dtype)
        # Of rows on several devices none has to move.
        if size is None or shards() > 1 or jax.default_backend() != "cpu":
            return self
        order = Order.by_group(self.loadings.group, self.sizes.groups, size)
        # The compiler would take rows from columns, one number at a time.
        loadings = lax.optimization_barrier(self.loadings)
        return replace(self, loadings=jax.tree.map(order.taken, loadings), order=order)

    @property
    def _rows(self) -> Loadings:
        """The loadings as the predictors are."""
        return jax.tree.map(self._put_back, self.loadings)

    def _weights(self, rows: Array) -> Array:
        return rows if self.order is None else self.order.weights(rows)

    def _put_back(self, rows: Array) -> Array:
        return rows if self.order is None else self.order.back(rows)

    def __call__(self, z: Array) -> Array:
        """Means of the predictors given latents (1, G R + K), (1, n)."""
        groups, corner = self.sizes.split(z[0])
        own, group, dense, value, place = self.loadings
        width = dense.shape[-1]
        moved = (own * groups[group]).sum(-1) + dense @ corner[:width]
        moved = moved + (value * corner[width:][place]).sum(-1)
        return self.offset + self._put_back(moved)

    def given(self, z: Array) -> Marginals:
        """Marginals of the predictors given latents (1, G R + K)."""
        return Marginals(self(z), self.residual)

    def marginals(self, q: Any) -> Marginals:
        """Marginals of the predictors: variances are sums of squares."""

        def squares(rows: Loadings) -> Array:
            own, rest = _spread(q, rows)
            return jnp.square(own).sum(-1) + jnp.square(rest).sum(-1)

        variance = self._put_back(_over_rows(squares, self.loadings, q))
        return Marginals(self(q.mean), self.residual + variance)

    def covariances(self, q: Any, left: Array, right: Array) -> Array:
        """Covariances of pairs of predictors.

        :param q: moments of the latents.
        :param left: one predictor of each pair, (P,).
        :param right: the other.
        """

        def products(rows: Any) -> Array:
            first, second = rows
            own, rest = zip(*(_spread(q, each) for each in rows), strict=True)
            same = first.group == second.group
            found = jnp.where(same, (own[0] * own[1]).sum(-1), 0)
            return found + (rest[0] * rest[1]).sum(-1)

        given = self._rows
        return _over_rows(products, (given.at(left), given.at(right)), q)[None]

    def covariance(self, q: Any) -> Array:
        """The covariance of all predictors, (1, n, n), without the residual."""
        rows = self._rows
        (own, rest), group = _spread(q, rows), rows.group
        same = group[:, None] == group
        return (rest @ rest.T + jnp.where(same, own @ own.T, 0))[None]

    def factors(
        self, at: Marginals, slopes: Marginals, least_precision: float = -jnp.inf
    ) -> GaussianFactors:
        """:func:`~numpyro_gpaug.math.affine.gaussian_factors`."""
        return gaussian_factors(at, slopes, least_precision)

    def information(self, factors: GaussianFactors, about: Array | None = None) -> Any:
        """The information of factors on the predictors about the latents, to be added
        to the prior's.

        :param factors: of the predictors.
        :param about: as in :meth:`numpyro_gpaug.math.affine.AffineMap.information`.
        :return: an :class:`~numpyro_gpaug.math.arrow.ArrowNatural`.
        """
        sizes = self.sizes
        about = self.offset if about is None else about
        centred = self._weights((factors.potential - factors.precision * about)[0])
        own, group, dense, value, place = self.loadings
        groups = jnp.zeros((sizes.groups, sizes.each), own.dtype)
        groups = groups.at[group].add(centred[:, None] * own)
        others = jnp.zeros(sizes.corner - dense.shape[-1], own.dtype)
        others = others.at[place].add(centred[:, None] * value)
        corner = jnp.concatenate([centred @ dense, others])
        precision = self._weights(factors.precision[0])
        products = _products(self.loadings, self.loadings, precision, sizes)
        return ArrowNatural(sizes.joined(groups, corner)[None], *products)

    def coupling(self, cross: Array, left: Array, right: Array) -> Any:
        """The information about the latents of factors on products of two predictors,
        which depend on the same group, or of which one depends on none.

        :param cross: of the pairs, (1, P).
        :param left: one predictor of each, (P,).
        :param right: the other.
        :return: an :class:`~numpyro_gpaug.math.arrow.ArrowNatural`.
        """
        sizes = self.sizes
        given = self._rows
        first, second = given.at(left), given.at(right)
        # One that looks at no group has any for its own.
        seen = (first.own != 0).any(-1)
        group = jnp.where(seen, first.group, second.group)
        first, second = (rows._replace(group=group) for rows in (first, second))
        there = _products(first, second, cross[0], sizes)
        back = _products(second, first, cross[0], sizes)
        total = jax.tree.map(jnp.add, there, back)
        return ArrowNatural(jnp.zeros((1, sizes.total), total[0].dtype), *total)

    def select(self, latents: Array | None) -> ArrowMap:
        """Itself: there is one set of latents."""
        return self

    def keep(self) -> ArrowMap:
        """Itself; see :meth:`~numpyro_gpaug.math.affine.AffineMap.keep`."""
        return self

    def afresh(self) -> ArrowMap:
        """Itself, which has derivatives."""
        return self


def _spread(q: Any, rows: Loadings) -> tuple[Array, Array]:
    """``L a`` (n, R) and ``V c - Y' a`` (n, E) of every row."""
    own, group, dense, value, place = rows
    columns, width = q.whitener[0].T, dense.shape[-1]
    ahead = jnp.einsum("nij,nj->ni", q.roots[0][group], own)
    rest = dense @ columns[:width]
    for s in range(value.shape[-1]):
        rest = rest + value[:, s, None] * columns[width:][place[:, s]]
    for r in range(own.shape[-1]):
        rest = rest - own[:, r, None] * q.shrunk[0, :, r][group]
    return ahead, rest


def _rows_of_blocks(number: int, sizes: ArrowSizes, dtype: Any) -> int | None:
    """How many rows a block has, if they are many: of each there are K numbers and more
    on the way to a sum."""
    each = (2 + sizes.each) * (1 + sizes.corner)
    return rows_of_blocks(number, each, dtype, least=64)


def _over_rows(function: Callable[[Any], Array], rows: Any, q: Any) -> Array:
    """A function of rows, in blocks if they are many."""
    number = len(jax.tree.leaves(rows)[0])
    size = _rows_of_blocks(number, q.sizes, q.mean.dtype)
    if size is None:
        return function(rows)
    cut = jax.tree.map(lambda x: cut_rows(x, size), rows)
    return over_blocks(function, cut, number)


def _products(
    left: Loadings, right: Loadings, weights: Array, sizes: ArrowSizes
) -> tuple[Array, Array, Array]:
    """Sums over rows of ``w l r'``, symmetric but for what ``w r l'`` adds to it:
    blocks of groups, border and corner; in blocks of rows if they are many."""
    number, width = left.dense.shape
    size = _rows_of_blocks(number, sizes, weights.dtype)
    others = sizes.corner - width
    lead = sizes.groups, sizes.each
    shapes = _Sums(
        (*lead, sizes.each), (*lead, sizes.corner),
        (width, width), (others, width), (others, others),
    )  # fmt: skip
    sums = _Sums(*(jnp.zeros(shape, weights.dtype) for shape in shapes))
    if size is None:
        sums = _added(sums, (left, right, weights))
    else:
        parts = jax.tree.map(lambda x: cut_rows(x, size), (left, right))
        # Rows that fill the last block weigh nothing.
        cut = cut_rows(weights, size, "constant")
        sums = summed_blocks(_added, sums, (*parts, cut))
    corner = jnp.block([[sums.dense, sums.mixed.T], [sums.mixed, sums.single]])
    return sums.groups[None], sums.border[None], corner[None]


class _Sums(NamedTuple):
    groups: Any
    border: Any
    dense: Any
    mixed: Any
    single: Any


def _added(sums: _Sums, part: tuple[Loadings, Loadings, Array]) -> _Sums:
    left, right, weights = part
    own, group = left.own * weights[:, None], left.group
    value = left.value * weights[:, None]
    width, outer = left.dense.shape[-1], own[:, :, None]
    border = sums.border.at[group, :, :width].add(outer * right.dense[:, None])
    mixed, single = sums.mixed, sums.single
    for s in range(value.shape[-1]):
        here = left.place[:, s]
        mixed = mixed.at[here].add(value[:, s, None] * right.dense)
        for t in range(value.shape[-1]):
            entry = value[:, s] * right.value[:, t]
            single = single.at[here, right.place[:, t]].add(entry)
        for r in range(own.shape[-1]):
            entry = own[:, r] * right.value[:, s]
            border = border.at[group, r, width + right.place[:, s]].add(entry)
    return _Sums(
        sums.groups.at[group].add(outer * right.own[:, None]),
        border,
        sums.dense + (left.dense * weights[:, None]).T @ right.dense,
        mixed,
        single,
    )
