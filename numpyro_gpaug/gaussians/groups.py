# SPDX-License-Identifier: Apache-2.0
r"""Gaussians of very many latents in groups: the precision matrix is block diagonal
with a border.

The latents are ``z = (z_1, ..., z_G, u)``: R numbers of each of G groups (a random
intercept and slope of every subject), and K numbers that any datum may depend on (fixed
effects, inducing values, the effects of other groupings). A predictor depends on one
group and on ``u``. So the precision matrix has blocks ``D_g`` (R, R) along its
diagonal, a border ``B_g`` (R, K) and a corner ``C`` (K, K). Groups are eliminated one
by one, and the Schur complement of the corner is dense,

.. math:: S = C - \sum_g B_g^\top D_g^{-1} B_g,

so that the total cost is ``G R K^2 + K^3``, and no array has a side of G squared. With
``D_g^{-1} = L_g^\top L_g``, ``S^{-1} = V^\top V`` and ``Y_g = D_g^{-1} B_g V^\top``,

.. math:: u = m + V^\top \epsilon, \quad
    z_g = m_g + L_g^\top \epsilon_g - Y_g \epsilon,

and the variance of a predictor ``a' z_g + c' u`` is ``|L_g a|^2 + |V c - Y_g' a|^2``, a
sum of squares.

Reference: Bates, Maechler, Bolker and Walker (2015), Fitting linear mixed-effects
models using lme4, section 3, which describes this factorisation.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, field
from functools import partial
from typing import Any, ClassVar, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
from jax import Array, lax

from numpyro_gpaug.gaussians.base import Change, Layout, Structure
from numpyro_gpaug.gaussians.bordered import Bordered
from numpyro_gpaug.gaussians.dense import Moments
from numpyro_gpaug.gaussians.rows import RowMap, Rows, shifts
from numpyro_gpaug.math import linalg, small
from numpyro_gpaug.math.arrays import STATIC
from numpyro_gpaug.math.blocks import cut_rows, rows_of_blocks, summed_blocks
from numpyro_gpaug.math.sharding import shards

# Squares for each covariance, at least, for variances from covariances; and how much
# larger than variances their terms may be.
_FEW, _CANCELLED = 8, 100


@dataclass(frozen=True)
class Blocks:
    """Groups of latents that are independent, given the border.

    :param inverse: L, lower, with covariances ``L' L``, (G, R, R).
    """

    inverse: Array

    def half(self, b: Array) -> Array:
        """See :class:`~numpyro_gpaug.gaussians.bordered.Bordered`."""
        return self._times(self.inverse, b)

    def drawn(self, e: Array) -> Array:
        """See :class:`~numpyro_gpaug.gaussians.bordered.Bordered`."""
        return self._times(self.inverse.mT, e)

    def noise_of(self, x: Array) -> Array:
        """See :class:`~numpyro_gpaug.gaussians.bordered.Bordered`."""
        return self._times(small.inverse_lower(self.inverse).mT, x)

    def _times(self, matrices: Array, x: Array) -> Array:
        by_group = x.reshape(*self.inverse.shape[:2], -1)
        return small.product(matrices, by_group).reshape(x.shape)


class GroupedMoments(Bordered):
    """The moments of groups of latents, or of steps, and of a border.

    :param inverse: L, lower, of groups given the border, or of steps given the next
        step and the border, (1, G, R, R).
    :param cross: Y, the cross gain from the noise of the border, (1, G, R, E).
    """

    inverse: Any

    @property
    def layout(self) -> Layout:
        """The layout of the latents."""
        _, groups, each, _ = self.inverse.shape
        return Layout(groups, each, self.whitener.shape[-1])

    @property
    def log_det(self) -> Array:
        """The log-determinant of the covariance, (1,)."""
        roots = linalg.diagonal(self.inverse), linalg.diagonal(self.whitener)
        return 2 * jnp.log(jnp.abs(self.layout.joined(*roots))).sum(-1)

    def border_of(self, places: np.ndarray) -> tuple[Moments, int]:
        """Return the moments of latents of a border, and how many of them are new. New
        ones are standard normal.

        :param places: places of these latents among the known ones; -1 for new ones.
        """
        begin = self.layout.groups * self.layout.each
        border = Moments(self.mean[:, begin:], self.whitener)
        found = border.extended(None, np.where(places >= 0, places - begin, -1))
        return found, found.rank - border.rank


class _GroupMoments(NamedTuple):
    mean: Array
    inverse: Array
    cross: Array
    whitener: Array


class GroupMoments(_GroupMoments, GroupedMoments):
    """Moments of a Gaussian whose precision is block diagonal with a border."""

    @property
    def given_border(self) -> Blocks:
        return Blocks(self.inverse[0])

    @property
    def variances(self) -> Array:
        """Variances of the latents, (1, G R + K)."""
        groups = jnp.square(self.inverse).sum(-2) + jnp.square(self.cross).sum(-1)
        return self.layout.joined(groups, jnp.square(self.whitener).sum(-2))

    def half(self, rows: Rows) -> tuple[Array, Array]:
        """Return ``L a`` (n, R) and ``V c - Y' a`` (n, E) of rows: their squares sum to
        the variances of the predictors."""
        own, group, dense, value, place = rows
        columns, width = self.whitener[0].T, dense.shape[-1]
        ahead = jnp.einsum("nij,nj->ni", self.inverse[0][group], own)
        rest = dense @ columns[:width]
        for s in range(value.shape[-1]):
            rest = rest + value[:, s, None] * columns[width:][place[:, s]]
        for r in range(own.shape[-1]):
            rest = rest - own[:, r, None] * self.cross[0, :, r][group]
        return ahead, rest

    def covariance(self, rows: Rows) -> Array:
        """Return the covariances of predictors, (n, n)."""
        (own, rest), group = self.half(rows), rows.group
        same = group[:, None] == group
        return rest @ rest.T + jnp.where(same, own @ own.T, 0)

    def extended(self, prior: GroupPrior, places: np.ndarray) -> GroupMoments:
        """Return moments with new groups, and new latents in the border, at a standard
        normal prior.

        :param prior: the prior of the requested latents.
        :param places: places of the requested latents among the known ones, -1 for
            new ones.
        """
        layout = prior.structure.layout
        groups, corner = layout.split(places)
        # A group is known completely or not at all.
        group, old = groups[:, 0] // self.layout.each, groups[:, 0] >= 0
        border, fresh = self.border_of(corner)
        means, _ = self.layout.split(self.mean)
        means = jnp.where(old[:, None], means[:, group], 0)
        eye = jnp.eye(layout.each, dtype=means.dtype)
        inverse = jnp.where(old[:, None, None], self.inverse[:, group], eye)
        cross = jnp.where(old[:, None, None], self.cross[:, group], 0)
        return GroupMoments(
            layout.joined(means, border.mean),
            inverse,
            jnp.pad(cross, [(0, 0)] * 3 + [(0, fresh)]),
            border.whitener,
        )


class GroupNatural(NamedTuple):
    """Natural parameters of deviations from a centre.

    :param potential: (1, G R + K).
    :param groups: D, (1, G, R, R).
    :param border: B, (1, G, R, K).
    :param corner: C, (1, K, K).
    :param centre: (1, G R + K).
    """

    potential: Array
    groups: Array
    border: Array
    corner: Array
    centre: Array

    @property
    def layout(self) -> Layout:
        """The layout of the latents."""
        groups, each, corner = self.border.shape[1:]
        return Layout(groups, each, corner)

    @linalg.precise
    def changed(self, change: Change) -> GroupNatural:
        """Return information about latents there as information about latents here."""
        potential, corner = self.layout.split(self.potential)
        own, others = change.groups.reshape(potential.shape), change.others
        return self._replace(
            potential=self.layout.joined(
                own * potential, linalg.vecmat(corner, others)
            ),
            groups=own[..., :, None] * self.groups * own[..., None, :],
            border=own[..., :, None] * self.border @ others[:, None],
            corner=others.mT @ self.corner @ others,
        )

    def moments(self) -> GroupMoments:
        """Return mean and factors of the covariance; NaN where the precision is not
        positive definite.

        ``S`` is a difference, but its eigenvalues are at least those of the prior's
        precision. The relative loss to rounding is at most the ratio of the groups'
        information to the prior's, times the precision of the dtype.
        """
        groups, each, size = self.border.shape[1:]
        inverse = small.inverse_cholesky(self.groups)
        half = small.product(inverse, self.border)
        flat = half.reshape(1, groups * each, size)
        schur = self.corner - linalg.sum_of_products(flat[0], flat[0])
        whitener = linalg.inverse_cholesky(schur)
        own, corner = self.layout.split(self.potential)
        white = small.product(inverse, own[..., None])[..., 0]
        corner = corner - linalg.sum_of_products(white.reshape(-1, 1), flat[0])
        corner = jnp.vecmat(jnp.matvec(whitener, corner), whitener)
        white = white - jnp.matvec(flat, corner).reshape(white.shape)
        mean = small.product(inverse.mT, white[..., None])[..., 0]
        cross = small.product(inverse.mT, (flat @ whitener.mT).reshape(half.shape))
        mean = self.centre + self.layout.joined(mean, corner)
        return GroupMoments(mean, inverse, cross, whitener)

    def centred(self, mean: Array) -> GroupNatural:
        """Return the same with its centre at the means."""
        return self._replace(potential=jnp.zeros_like(mean), centre=mean)

    def times(self, z: Array) -> Array:
        """Return the product of the precision with latents (1, G R + K)."""
        groups, corner = self.layout.split(z)
        own = jnp.einsum("zgrs,zgs->zgr", self.groups, groups)
        own = own + jnp.einsum("zgrk,zk->zgr", self.border, corner)
        border = self.border.reshape(groups.size, corner.size)
        rest = linalg.sum_of_products(groups.reshape(-1, 1), border)
        return self.layout.joined(own, rest + jnp.matvec(self.corner, corner))

    @property
    def diagonal(self) -> Array:
        """The diagonal of the precision, (1, G R + K)."""
        groups, corner = linalg.diagonal(self.groups), linalg.diagonal(self.corner)
        return self.layout.joined(groups, corner)


@jax.tree_util.register_dataclass
@dataclass(frozen=True)
class GroupPrior:
    """The prior of independent standard normal latents.

    :param loc: zeros (1, G R + K).
    :param structure: the structure of the latents.
    """

    loc: Array
    structure: Groups = field(metadata=STATIC)

    log_det: ClassVar[float] = 0.0

    @property
    def natural(self) -> GroupNatural:
        """The potential and precision."""
        return self.structure.standard(self.loc.dtype)

    def divergence(self, q: GroupMoments) -> Array:
        """Return KL(q || prior), (1,)."""
        parts = q.mean, q.inverse, q.cross, q.whitener
        squares = sum(jnp.square(x).reshape(1, -1).sum(-1) for x in parts)
        return 0.5 * (squares - self.structure.size - q.log_det)

    def pull(self, mean: Array) -> Array:
        """Return the gradient of :meth:`divergence` in the means, (1, G R + K).

        :param mean: the means, (1, G R + K).
        """
        return mean

    def terms(self, z: Array) -> Array:
        """See :class:`~numpyro_gpaug.gaussians.base.StructurePrior`."""
        return -0.5 * jnp.square(z)

    def terms_by_group(self, groups: Array, others: Array) -> tuple[Array, Array]:
        """See :class:`~numpyro_gpaug.gaussians.base.StructurePrior`."""
        return self.terms(groups), self.terms(others)


@dataclass(frozen=True)
class Groups(Structure):
    """Groups of latents, and latents that any predictor may depend on."""

    natural: ClassVar[Any] = GroupNatural

    @property
    def independent(self) -> Layout:
        return self.layout

    def cost(self, rows: int, width: int) -> float:
        groups, each, corner, _ = self.layout
        border = float(groups) * each * (corner**2 + each**2) + 2 * float(corner) ** 3
        seen = float(rows) * ((each + width) ** 2 + 10 * corner)
        return border + seen

    def describe(self, names: str, block: int) -> str:
        groups, each, corner, _ = self.layout
        return f"{groups} groups of {each} ({names}), {corner} others dense"

    def standard(self, dtype: Any) -> Any:
        groups, each, corner, _ = self.layout
        blocks = jnp.broadcast_to(jnp.eye(each, dtype=dtype), (1, groups, each, each))
        border = jnp.zeros((1, groups, each, corner), dtype)
        loc, eye = jnp.zeros((1, self.size), dtype), jnp.eye(corner, dtype=dtype)[None]
        return GroupNatural(loc, blocks, border, eye, loc)

    def prior(self, dtype: Any, links: Array | None = None) -> Any:
        return GroupPrior(jnp.zeros((1, self.size), dtype), self)

    def map(self, predictors: Any) -> RowMap:
        offset, residual = predictors.offset[None], predictors.residual[None]
        return RowMap(offset, predictors.rows, residual, self)

    def spreads(self, q: Any, rows: Rows) -> Array:
        """Return the variances of predictors, (n,), as sums of squares."""
        own, rest = q.half(rows)
        return jnp.square(own).sum(-1) + jnp.square(rest).sum(-1)

    def variances(self, q: Any, rows: Rows, over_rows: Callable[..., Array]) -> Array:
        """Return the variances of predictors, (n,).

        They are sums of K squares. Where rows depend on few of the K latents, sums of
        few covariances take much less time, but these may cancel each other: then the
        squares are computed after all.

        :param q: the moments.
        :param rows: all rows.
        :param over_rows: applies a function to the rows, in blocks if they are many.
        """
        squares = partial(over_rows, partial(self.spreads, q), rows)
        single, dense = rows.own.shape[-1] + rows.value.shape[-1], rows.dense.shape[-1]
        few = _FEW * single * (single + dense) < self.layout.others < len(rows.dense)
        many = self.rows_of_block(len(rows.dense), q.mean.dtype) is not None
        if not (few and many) or shards() > 1:
            return squares()
        terms = jnp.stack(_terms(q, rows))
        found, size = terms.sum(0), jnp.abs(terms).sum(0)
        exact = (size <= _CANCELLED * found).all()
        return lax.cond(exact, lambda: found, squares)

    def crossed(self, q: Any, left: Rows, right: Rows) -> Array:
        """Return the covariances of pairs of predictors, (P,). Rows of one group covary
        through both factors of :meth:`GroupMoments.half`, and rows of different groups
        through the second alone."""
        own, rest = zip(q.half(left), q.half(right), strict=True)
        same = left.group == right.group
        found = jnp.where(same, (own[0] * own[1]).sum(-1), 0)
        return found + (rest[0] * rest[1]).sum(-1)

    def shifts(self, rows: Rows, z: Array) -> Array:
        """Return the change of predictors for latents (size,), (n,)."""
        return shifts(rows, self.layout, z)

    def information(self, rows: Rows, potential: Array, precision: Array) -> Any:
        """Return the information of factors ``exp(h p - w p^2 / 2)`` on predictors.

        :param potential: h, (n,).
        :param precision: w, (n,).
        """
        own, group, dense, value, place = rows
        layout = self.layout
        groups = jnp.zeros((layout.groups, layout.each), own.dtype)
        groups = linalg.added_at(groups, (group,), potential[:, None] * own)
        others = jnp.zeros(layout.others - dense.shape[-1], own.dtype)
        others = linalg.added_at(others, (place,), potential[:, None] * value)
        border = linalg.sum_of_products(potential[:, None], dense)[0]
        corner = jnp.concatenate([border, others])
        products = self._products(rows, rows, precision)
        return self._added(layout.joined(groups, corner)[None], *products)

    def coupling(self, left: Rows, right: Rows, cross: Array) -> Any:
        """Return the information of factors ``exp(-c p q)`` on pairs of predictors.
        Both predictors of a pair depend on the same group, or one of them depends on
        none.

        :param cross: c, (n,).
        """
        # A predictor without a group can take any group.
        group = jnp.where((left.own != 0).any(-1), left.group, right.group)
        left, right = (rows._replace(group=group) for rows in (left, right))
        there = self._products(left, right, cross)
        back = self._products(right, left, cross)
        total = jax.tree.map(jnp.add, there, back)
        return self._added(jnp.zeros((1, self.size), total[0].dtype), *total)

    def _added(
        self, potential: Array, groups: Array, border: Array, corner: Array
    ) -> Any:
        """Return natural parameters to be added to the prior's."""
        zeros = jnp.zeros_like(potential)
        return GroupNatural(potential, groups, border, corner, zeros)

    def rows_of_block(self, number: int, dtype: Any) -> int | None:
        """Return the number of rows in a block; ``None`` if one block takes all rows.

        :param number: the total number of rows.
        """
        # A sum needs a little more than K values for each row.
        each = (2 + self.layout.each) * (1 + self.layout.others)
        return rows_of_blocks(number, each, dtype, least=64)

    def _products(
        self, left: Rows, right: Rows, weights: Array
    ) -> tuple[Array, Array, Array]:
        """Return sums over rows of ``w l r'``: blocks of groups, border and corner.
        They are symmetric once the sums of ``w r l'`` are added. Rows are taken in
        blocks if they are many."""
        number, width = left.dense.shape
        groups, each, corner, _ = self.layout
        # Counted without the border, because a loop copies the sums with every block.
        numbers = (each + left.value.shape[-1]) * (each + width)
        size = rows_of_blocks(number, numbers, weights.dtype)
        others, lead = corner - width, (groups, each)
        shapes = _Sums(
            (*lead, each), (*lead, width), (*lead, others),
            (width, width), (others, width), (others, others),
        )  # fmt: skip
        sums = _Sums(*(jnp.zeros(shape, weights.dtype) for shape in shapes))
        if size is None:
            sums = _with_rows(sums, (left, right, weights))
        else:
            parts = jax.tree.map(lambda x: cut_rows(x, size), (left, right))
            # Rows that fill up the last block have weight zero.
            cut = cut_rows(weights, size, "constant")
            sums = summed_blocks(_with_rows, sums, (*parts, cut))
        blocks = [[sums.dense, sums.mixed.T], [sums.mixed, sums.single]]
        border = jnp.concatenate([sums.border, sums.across], -1)
        return sums.groups[None], border[None], jnp.block(blocks)[None]


def _terms(q: GroupMoments, rows: Rows) -> list[Array]:
    """Return the terms, (n,), whose sums are the variances of predictors."""
    own, group, dense, value, place = rows
    width, (inverse, cross, whitener) = dense.shape[-1], (x[0] for x in q[1:])
    within = inverse.mT @ inverse + cross @ cross.mT
    across = -cross @ whitener
    corner = whitener.T @ whitener
    own_terms = jnp.einsum("ni,nij,nj->n", own, within[group], own)
    mixed = jnp.einsum("nr,nrf,nf->n", own, across[..., :width][group], dense)
    terms = [own_terms, 2 * mixed, ((dense @ corner[:width, :width]) * dense).sum(-1)]
    for s in range(value.shape[-1]):
        at = width + place[:, s]
        rest = (corner[:, :width][at] * dense).sum(-1)
        for r in range(own.shape[-1]):
            rest = rest + own[:, r] * across[group, r, at]
        terms += [2 * value[:, s] * rest]
        for t in range(s + 1):
            pair = corner[at, width + place[:, t]]
            terms += [(1 + (s != t)) * value[:, s] * value[:, t] * pair]
    return terms


class _Sums(NamedTuple):
    groups: Any
    border: Any
    across: Any
    dense: Any
    mixed: Any
    single: Any


def _with_rows(sums: _Sums, part: tuple[Rows, Rows, Array]) -> _Sums:
    left, right, weights = part
    own, group = left.own * weights[:, None], left.group
    value = left.value * weights[:, None]
    outer, added = own[:, :, None], linalg.added_at
    across, mixed, single = sums.across, sums.mixed, sums.single
    for s in range(value.shape[-1]):
        here = left.place[:, s]
        mixed = added(mixed, (here,), value[:, s, None] * right.dense)
        for t in range(value.shape[-1]):
            entry = value[:, s] * right.value[:, t]
            single = added(single, (here, right.place[:, t]), entry)
        for r in range(own.shape[-1]):
            entry = own[:, r] * right.value[:, s]
            across = across.at[:, r].set(
                added(across[:, r], (group, right.place[:, s]), entry)
            )
    dense = linalg.sum_of_products(left.dense * weights[:, None], right.dense)
    return _Sums(
        added(sums.groups, (group,), outer * right.own[:, None]),
        added(sums.border, (group,), outer * right.dense[:, None]),
        across,
        sums.dense + dense,
        mixed,
        single,
    )
