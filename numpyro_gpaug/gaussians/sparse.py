# SPDX-License-Identifier: Apache-2.0
r"""Gaussians with a sparse precision: areas, meshes, and effects that cross.

The latents are ``z = (x, u)``: N nodes, whose precision M has a fixed sparse pattern,
and K numbers that any datum may depend on. A predictor depends on a few nodes, which
are neighbours in the pattern, and on ``u``. With the border B (N, K) and the corner C
(K, K) of the precision, ``M = L L'`` (in an order of elimination) and ``F = L^{-1} B``,
the Schur complement of the corner is ``S = C - F' F``. With ``S^{-1} = V' V`` and ``Y =
L^{-T} F V'``,

.. math:: u = m + V^\top \epsilon, \quad x = m + L^{-T} e - Y \epsilon.

The nodes of an intrinsic prior add up to zero in each connected component: ``a_k' x =
0``. Its precision Q is singular along these orthonormal vectors. Given the constraints,
``e`` is orthogonal to ``U = L^{-1} (a_1, ..., a_c)``: reflections turn ``e`` such that
the number of one node of each component is zero, and everything above holds for the
others. ``M`` then contains a small multiple of its diagonal, without which it would be
singular where there are no data; the prior's density does not contain it.

References: Rue and Held (2005), Gaussian Markov random fields, chapters 2 and 3; Rue
and Martino (2007), Approximate Bayesian inference for hierarchical Gaussian Markov
random field models, section 2.1, on constraints.
"""

from __future__ import annotations

from base64 import b64decode, b64encode
from dataclasses import dataclass, field, replace
from functools import cached_property
from itertools import combinations
from typing import Any, ClassVar, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
from jax import Array

from numpyro_gpaug.gaussians.base import Layout, Structure
from numpyro_gpaug.gaussians.bordered import Bordered
from numpyro_gpaug.gaussians.rows import RowMap, Rows
from numpyro_gpaug.math import linalg, sparse_cholesky
from numpyro_gpaug.math.arrays import STATIC
from numpyro_gpaug.math.sparse_pattern import Pattern

# The multiple of each diagonal entry that is added to it in a singular precision. More
# would shrink the slow variation of a long path or a wide map with few data; with less,
# rounding might let a factorisation fail where there are none.
_RIDGE = {"float32": 2e-6, "float64": 1e-10}


class NodeMoments(Bordered):
    """The moments of nodes and of a border.

    :param entries: the precision of the nodes, as in natural parameters, (1, nnz).
    :param structure: the structure of the latents.
    :ivar neighbours: the covariances of neighbours, given the border, (nnz,).
    """

    entries: Any
    structure: Any
    neighbours: Any

    @property
    def rank(self) -> int:
        return int(self.structure.rank)

    @property
    def variances(self) -> Array:
        """Variances of the latents, (1, N + K)."""
        own = jnp.maximum(self.neighbours[self.structure.pattern.diagonal], 0)
        own += jnp.square(self.cross[0]).sum(-1)
        corner = jnp.square(self.whitener[0]).sum(-2)
        return jnp.concatenate([own, corner])[None]

    def of_border(self, rows: Rows) -> Array:
        """Return rows (n, K) whose squares sum to the variances that predictors have
        from the border."""
        moved = (rows.value[..., None] * self.cross[0][rows.place]).sum(1)
        return rows.dense @ self.whitener[0].T - moved

    def covariance(self, rows: Rows) -> Array:
        """Return the covariances of predictors, (n, n)."""
        own = self.given_border.half(nodes_of(rows, self.structure))
        border = self.of_border(rows)
        return own.T @ own + border @ border.T

    def extended(self, prior: Any, places: np.ndarray) -> Any:
        """Return the moments of latents of another prior; see
        :mod:`numpyro_gpaug.gaussians.base`. New nodes are standard normal."""
        return Extended(self, prior.structure, places.astype(np.int64).tobytes())


class _SparseMoments(NamedTuple):
    mean: Array
    factor: Any
    inverse: Array
    reflections: Array
    constrained: Array
    entries: Array
    cross: Array
    whitener: Array
    structure: Sparse


class SparseMoments(_SparseMoments, NodeMoments):
    """Moments of a Gaussian with a sparse precision that is factorised.

    :param factor: the factor L of the precision of the nodes.
    :param inverse: entries of the inverse of this precision, (1, nnz): bounds and their
        derivatives need them again.
    :param reflections: vectors v of the reflections ``I - 2 v v'``, (1, c, N).
    :param constrained: ``log det U' U``, (1,).
    """

    @property
    def log_det(self) -> Array:
        """The log-determinant of the covariance, of latents that fulfil the
        constraints, (1,)."""
        corner = jnp.log(jnp.abs(linalg.diagonal(self.whitener))).sum(-1)
        return 2 * corner - self.factor.log_det - self.constrained

    @property
    def given_border(self) -> _Nodes:
        normals = jnp.asarray(self.structure.constraints, self.mean.dtype)
        factor = jax.tree.map(lambda x: x[0], self.factor)
        return _Nodes(factor, self.reflections[0], normals, self.structure.first)

    @property
    def _drawn(self) -> Array:
        """Columns W (N, c): the constraints subtract ``W W'`` from the inverse of the
        nodes' precision."""
        return self.given_border.removed()

    @property
    def neighbours(self) -> Array:
        pattern, drawn = self.structure.pattern, self._drawn
        taken = (drawn[pattern.rows] * drawn[pattern.columns]).sum(-1)
        return self.inverse[0] - taken

    def spreads(self, rows: Rows) -> Array:
        """Return the variances of predictors whose nodes are neighbours, (n,)."""
        found = sparse_cholesky.forms(
            self.structure.pattern, self.inverse[0], rows.place, rows.value
        )
        removed = (rows.value[..., None] * self._drawn[rows.place]).sum(1)
        own = jnp.maximum(found - jnp.square(removed).sum(-1), 0)
        return own + jnp.square(self.of_border(rows)).sum(-1)


class _Nodes(NamedTuple):
    """Half solves with a precision under constraints.

    :param factor: the factor of the precision.
    :param reflections: (c, N).
    :param normals: orthonormal vectors to which deviations are orthogonal, (N, c).
    :param first: the node of each component whose noise is zero, (c,).
    """

    factor: Any
    reflections: Array
    normals: Array
    first: np.ndarray

    def half(self, b: Array) -> Array:
        """Return rows (N - c, n) whose squares sum to variances, of columns (N, n)."""
        return self._turned(self.factor.half_solve(b))

    def noise_of(self, x: Array) -> Array:
        """Return the noise (N - c, n) of deviations (N, n)."""
        return self._turned(self.factor.half_product(x))

    def drawn(self, noise: Array) -> Array:
        """Return deviations (N, n) of noise (N - c, n)."""
        found = self.factor.half_solve_transposed(self._back(noise))
        # The reflections have rounding errors, which a nearly singular precision
        # enlarges. Without this correction, sums would differ from zero by more than
        # the site's constraint allows.
        return found - self.normals @ (self.normals.T @ found)

    def removed(self) -> Array:
        """Return the columns W (N, c), see :class:`SparseMoments`."""
        units = jnp.zeros_like(self.normals)
        if not len(self.first):
            return units
        units = units.at[self.first, np.arange(len(self.first))].set(1)
        return self.factor.half_solve_transposed(_reflected(self.reflections, units))

    def _turned(self, e: Array) -> Array:
        return jnp.delete(_reflected(self.reflections[::-1], e), self.first, 0)

    def _back(self, noise: Array) -> Array:
        if not len(self.first):
            return noise
        source = np.arange(len(self.normals))
        source -= np.searchsorted(np.sort(self.first), source)
        source[self.first] = len(noise)
        return _reflected(self.reflections, jnp.pad(noise, [(0, 1), (0, 0)])[source])


def _reflected(vectors: Array, x: Array) -> Array:
    """Apply reflections to columns (N, n), the last vector first."""
    for v in vectors[::-1]:
        x = x - 2 * v[:, None] * (v @ x)
    return x


def _reflections(columns: Array, first: np.ndarray) -> tuple[Array, Array]:
    """Return unit vectors (c, N) of reflections, which turn columns (N, c) into columns
    that are zero but for c rows, and the log-determinant of the columns' products.

    The determinant of the products themselves would have no digits left in float32 for
    two fields whose sum is observed: their levels may be moved against each other.

    :param first: these rows.
    """
    found: list[Array] = []
    log_det = jnp.zeros((), columns.dtype)
    rest = columns
    for k, row in enumerate(first):
        x = rest[:, k].at[first[:k]].set(0)
        size = jnp.linalg.norm(x)
        v = x.at[row].add(jnp.where(x[row] < 0, -size, size))
        v = v / jnp.linalg.norm(v)
        rest = _reflected(v[None], rest)
        found.append(v)
        log_det += 2 * jnp.log(size)
    vectors = jnp.stack(found) if found else jnp.zeros((0, len(columns)), columns.dtype)
    return vectors, log_det


class SparseNatural(NamedTuple):
    """Natural parameters.

    :param potential: (1, N + K).
    :param entries: M, in the places of the pattern, with the sums of rows in place of
        the diagonal (:func:`~numpyro_gpaug.math.sparse_cholesky.with_sums`), (1, nnz).
    :param border: B, (1, N, K).
    :param corner: C, (1, K, K).
    :param structure: the structure of the latents.
    """

    potential: Array
    entries: Array
    border: Array
    corner: Array
    structure: Sparse

    @property
    def centre(self) -> None:
        """Always ``None``: the potential is that of the latents."""

    def moments(self) -> Any:
        """Return mean and covariance, as the structure represents it."""
        return self.structure.moments(self)

    def moved(self, z: Array) -> SparseNatural:
        """Return the natural parameters of latents, given the natural parameters of
        their deviations from ``z``, (1, N + K); see
        :meth:`~numpyro_gpaug.gaussians.dense.NaturalGaussian.moved`."""
        own, corner = self.structure.columns(z[0][:, None])
        border = self.border[0]
        rows = self.structure.product(self.entries[0], own) + border @ corner
        rest = linalg.sum_of_products(border, own) + self.corner[0] @ corner
        moved = jnp.concatenate([rows, rest])[:, 0]
        return self._replace(potential=self.potential + moved)

    @property
    def diagonal(self) -> Array:
        """The diagonal of the precision, (1, N + K)."""
        values = self.structure.values(self.entries[0])
        own = values[None, self.structure.pattern.diagonal]
        return jnp.concatenate([own, linalg.diagonal(self.corner)], -1)


@jax.tree_util.register_dataclass
@dataclass(frozen=True)
class NodePrior:
    """The prior of nodes with a sparse precision Q, and of standard normal numbers.

    :param loc: zeros (1, N + K).
    :param entries: Q, as in natural parameters, (nnz,).
    :param log_det: the log-determinant of Q; of its restriction to latents that fulfil
        the constraints if there are any.
    :param structure: the structure of the latents.
    """

    loc: Array
    entries: Array
    log_det: Array
    structure: Sparse = field(metadata=STATIC)

    @property
    def natural(self) -> SparseNatural:
        """The potential and precision."""
        standard = self.structure.standard(self.loc.dtype)
        entries = self.entries
        if self.structure.labels is not None:
            places = self.structure.pattern.diagonal
            values = self.structure.values(entries)
            ridge = _RIDGE[str(entries.dtype)] * values[places]
            entries = entries.at[places].add(ridge * self.structure.is_constrained)
        return standard._replace(entries=entries[None])

    def divergence(self, q: SparseMoments) -> Array:
        """Return KL(q || prior), (1,).

        The trace of ``Q M^-1`` is the number of nodes plus the trace of ``(Q - M)
        M^-1``: that is as small as the information about them, and does not contain the
        large entries of Q that cancel each other.
        """
        structure = self.structure
        own, corner = structure.columns(q.mean[0][:, None])
        columns = jnp.concatenate([own, q.cross[0]], -1)
        moved = structure.product_of_prior(self.entries, columns)
        lacking = structure.values(self.entries - q.entries[0])
        trace = (structure.pattern.multiplicity * lacking * q.neighbours).sum()
        squares = jnp.square(corner).sum() + jnp.square(q.whitener).sum()
        squares += (columns * moved).sum()
        known = trace + squares - q.whitener.shape[-1]
        return 0.5 * (known - self.log_det - q.log_det)

    def pull(self, mean: Array) -> Array:
        """Return the gradient of :meth:`divergence` in the means, (1, N + K).

        :param mean: the means, (1, N + K).
        """
        return self._moved(mean[0])[None]

    def _moved(self, z: Array) -> Array:
        own, corner = self.structure.columns(z[:, None])
        moved = self.structure.product_of_prior(self.entries, own)
        return jnp.concatenate([moved, corner])[:, 0]

    def terms(self, z: Array) -> Array:
        """Return numbers whose sum is the log-density at latents (N + K,), without its
        constant and half of :attr:`log_det`."""
        return -0.5 * z * self._moved(z)

    def terms_by_group(self, groups: Array, others: Array) -> tuple[Array, Array]:
        """See :class:`~numpyro_gpaug.gaussians.base.StructurePrior`."""
        structure = self.structure
        z = structure.join_groups(jnp.zeros_like(groups[0]), others)
        pulled, moved = structure.split_groups(self._moved(z))
        own = structure.values(self.entries)[structure.pattern.diagonal]
        border = jnp.ones(structure.layout.others, own.dtype)
        diagonal, _ = structure.split_groups(jnp.concatenate([own, border]))
        return -groups * (pulled + 0.5 * diagonal * groups), -0.5 * others * moved


@jax.tree_util.register_dataclass
@dataclass(frozen=True)
class Extended:
    """Moments of latents, some of which have a known Gaussian; all others are standard
    normal.

    :param known: moments of the known latents.
    :param structure: the structure of the requested latents.
    :param places: places of the requested latents among the known ones, -1 for new
        ones; as bytes of int64.
    """

    known: Any
    structure: Sparse = field(metadata=STATIC)
    places: bytes = field(metadata=STATIC)

    @property
    def rank(self) -> int:
        """The number of standard normal numbers that :meth:`unwhiten` takes."""
        return self.known.rank + int(self._new.sum())

    @property
    def _new(self) -> np.ndarray:
        return np.frombuffer(self.places, np.int64) < 0

    @property
    def _places(self) -> np.ndarray:
        return np.maximum(np.frombuffer(self.places, np.int64), 0)

    @property
    def mean(self) -> Array:
        """Means, (1, N + K)."""
        return jnp.where(self._new, 0, self.known.mean[:, self._places])

    @property
    def variances(self) -> Array:
        """Variances, (1, N + K)."""
        return jnp.where(self._new, 1, self.known.variances[:, self._places])

    def unwhiten(self, noise: Array) -> Array:
        """Return deviations from the mean.

        :param noise: standard normal, (..., rank).
        """
        old, new = jnp.split(noise, [self.known.rank], -1)
        found = self.known.unwhiten(old)[..., self._places]
        return found.at[..., np.flatnonzero(self._new)].set(new)

    def push_forward(self, projection: Array) -> tuple[Array, tuple[Array, ...]]:
        """See :meth:`SparseMoments.push_forward`."""
        shift, parts = self.known.push_forward(self._of_known(projection))
        return shift, (*parts, projection[:, np.flatnonzero(self._new)])

    def _of_known(self, projection: Array) -> Array:
        old = np.flatnonzero(~self._new)
        shape = 1, self.known.structure.size, projection.shape[-1]
        found = jnp.zeros(shape, projection.dtype)
        return found.at[:, self._places[old]].set(projection[:, old])

    def _projection(self, rows: Rows) -> Array:
        nodes = nodes_of(rows, self.structure)
        return jnp.concatenate([nodes, rows.dense.T])[None]

    def spreads(self, rows: Rows) -> Array:
        """Return the variances of predictors, (n,)."""
        nodes, new = self.structure.nodes, jnp.asarray(self._new)
        whole = self._of_known(self._projection(rows))[0]
        old = rows._replace(
            dense=whole[self.known.structure.nodes :].T,
            value=jnp.where(new[rows.place], 0, rows.value),
            place=jnp.asarray(self._places)[rows.place],
        )
        own = jnp.where(new[rows.place], rows.value, 0)
        rest = jnp.where(new[nodes:], rows.dense, 0)
        fresh = jnp.square(own).sum(-1) + jnp.square(rest).sum(-1)
        return self.known.spreads(old) + fresh

    def covariance(self, rows: Rows) -> Array:
        """Return the covariances of predictors, (n, n)."""
        _, parts = self.push_forward(self._projection(rows))
        root = jnp.concatenate(parts, 1)[0]
        return root.T @ root


@dataclass(frozen=True)
class Sparse(Structure):
    """Nodes with a sparse precision, and latents that any predictor may depend on.

    :param layout: one node is one group of the layout.
    :param pattern: the places of the entries of the nodes' precision.
    :param labels: the component of each node, as bytes of int32, if nodes of components
        add up to zero; -1 for a node without a constraint.
    """

    pattern: Pattern
    labels: bytes | None = None

    natural: ClassVar[Any] = SparseNatural
    all_groupings: ClassVar[bool] = True
    #: Whether moments have covariances of any two nodes, or only of neighbours.
    any_pairs: ClassVar[bool] = False
    solves: ClassVar[bool] = True
    changes: ClassVar[bool] = False
    #: Whether precisions store sums of rows instead of the diagonal.
    sums: ClassVar[bool] = True

    @property
    def record(self) -> tuple[str, ...]:
        arrays = self.pattern.rows, self.pattern.columns
        parts = str(self.nodes), *(_text(x.tobytes()) for x in arrays)
        return parts if self.labels is None else (*parts, _text(self.labels))

    @classmethod
    def of_record(cls, record: tuple[str, ...]) -> Sparse:
        size, *arrays = record
        rows, columns, *labels = map(b64decode, arrays)
        pattern = Pattern.of(
            int(size), *(np.frombuffer(x, np.int32) for x in (rows, columns))
        )
        return cls(Layout(int(size), 1, 0), pattern, *labels)

    @property
    def nodes(self) -> int:
        """The number of nodes."""
        return self.layout.groups

    @property
    def rank(self) -> int:
        return self.size - self.constraints.shape[-1]

    @cached_property
    def constraints(self) -> np.ndarray:
        """Orthonormal vectors to which the nodes are orthogonal, (N, c)."""
        if self.labels is None:
            return np.zeros((self.nodes, 0))
        labels = np.frombuffer(self.labels, np.int32)
        found = np.equal.outer(labels, np.arange(labels.max() + 1)).astype(float)
        return found / np.linalg.norm(found, axis=0)

    @cached_property
    def first(self) -> np.ndarray:
        """The first node of each component that adds up to zero, (c,)."""
        return self.constraints.astype(bool).argmax(0)

    @cached_property
    def _apart(self) -> np.ndarray:
        """The nodes that are independent given all others, (G,): they are eliminated
        first, and are in no component that adds up to zero."""
        outer = self.pattern.outer
        return outer[~self.is_constrained[outer]]

    @cached_property
    def _rest(self) -> np.ndarray:
        """All other latents, (N + K - G,)."""
        return np.delete(np.arange(self.size), self._apart)

    @property
    def independent(self) -> Layout:
        groups = len(self._apart)
        return Layout(groups, 1, self.rank - groups)

    def split_groups(self, z: Any) -> tuple[Any, Any]:
        return z[..., self._apart, None], z[..., self._rest]

    def join_groups(self, groups: Array, others: Array) -> Array:
        order = np.argsort(np.append(self._apart, self._rest))
        return jnp.concatenate([groups[..., 0], others], -1)[..., order]

    def join_noise(self, groups: Array, others: Array) -> Array:
        kept = np.delete(np.arange(self.size), self.first)
        after = np.isin(kept, self._apart, invert=True)
        order = np.argsort(np.argsort(after, kind="stable"))
        return jnp.concatenate([groups[..., 0], others], -1)[..., order]

    @property
    def is_constrained(self) -> np.ndarray:
        """Whether each node is in a component that adds up to zero, (N,)."""
        return np.asarray(self.constraints.any(-1))

    def resized(self, layout: Layout) -> Sparse:
        if layout.groups == self.nodes:
            return replace(self, layout=layout)
        # For any pattern of the prior, this is the pattern given the other latents.
        every = np.arange(layout.groups)
        return Sparse(layout, Pattern.of(layout.groups, every, every))

    def joined(self, parts: list[tuple[int, Pattern, Array]], dtype: Any) -> Array:
        """Return the entries of the precision of independent parts of the nodes, as in
        natural parameters, (nnz,). Nodes of no part are standard normal.

        :param parts: the first node of each part, its pattern, and its entries,
            likewise.
        :param dtype: a float dtype.
        """
        entries, ones = jnp.zeros(len(self.pattern.rows), dtype), np.ones(self.nodes)
        for first, own, values in parts:
            ones[first : first + own.size] = 0
            places = self.pattern.find(own.rows + first, own.columns + first)
            entries = entries.at[places].set(values, mode="drop")
        return entries.at[self.pattern.diagonal].add(jnp.asarray(ones, dtype))

    def columns(self, flat: Array) -> tuple[Array, Array]:
        """Split columns (N + K, n) into rows of nodes and of the border."""
        return flat[: self.nodes], flat[self.nodes :]

    def cost(self, rows: int, width: int) -> float:
        groups = self.pattern.elimination.groups
        sizes = [(*x.pivots.shape, x.up.shape[1]) for x in groups]
        own = sum(m * (p + b) ** 2 * p for m, p, b in sizes)
        return (
            10.0 * own
            + float(rows) * (30 + width) ** 2
            + float(self.layout.others) ** 3
        )

    def describe(self, names: str, block: int) -> str:
        edges = len(self.pattern.rows) - self.nodes
        return (
            f"a sparse precision of {self.nodes} nodes ({names}) with {edges} edges, "
            f"{self.layout.others} others dense"
        )

    def standard(self, dtype: Any) -> SparseNatural:
        nodes, others = self.nodes, self.layout.others
        entries = np.zeros((1, len(self.pattern.rows)), dtype)
        entries[:, self.pattern.diagonal] = 1
        zeros, eye = jnp.zeros((1, self.size), dtype), jnp.eye(others, dtype=dtype)
        border = jnp.zeros((1, nodes, others), dtype)
        return SparseNatural(zeros, jnp.asarray(entries), border, eye[None], self)

    def moments(self, natural: SparseNatural) -> Any:
        """Return mean and factors of the covariance; NaN where the precision is not
        positive definite.

        ``S`` is a difference of large numbers where a field can imitate a number of the
        border, such as a level. With ``Y = M^-1 B`` and ``R = B - M Y`` it is ``C - B'
        Y - Y' R``, whose error is of second order in the rounding errors of Y; those of
        ``F' F`` are of first order. Eigenvalues are at least those of the prior's
        precision; see :meth:`numpyro_gpaug.gaussians.groups.GroupNatural.moments`.
        """
        entries, border = natural.entries[0], natural.border[0]
        factor = sparse_cholesky.factor(self.pattern, self.values(entries))
        normals = jnp.asarray(self.constraints, entries.dtype)
        free = factor.half_solve(normals) if normals.shape[-1] else normals
        first = self.first
        reflections, constrained = _reflections(free, first)
        nodes = _Nodes(factor, reflections, normals, first)
        own, corner = self.columns(natural.potential[0][:, None])
        solved = nodes.drawn(nodes.half(jnp.concatenate([own, border], -1)))
        mean, gain = solved[:, 0], solved[:, 1:]
        rest = border - self.product(entries, gain)
        explained = linalg.sum_of_products(border, gain)
        explained += linalg.sum_of_products(gain, rest)
        explained = (explained + explained.T) / 2
        whitener = linalg.inverse_cholesky(natural.corner - explained)
        corner -= linalg.sum_of_products(gain, own)
        corner = whitener[0] @ corner[:, 0]
        cross = gain @ whitener[0].T
        mean = jnp.concatenate([mean - cross @ corner, corner @ whitener[0]])
        leading = jax.tree.map(lambda x: x[None], factor)
        return SparseMoments(
            mean[None], leading, factor.selected_inverse()[None],
            nodes.reflections[None], constrained[None], natural.entries, cross[None],
            whitener, self,
        )  # fmt: skip

    def values(self, entries: Array) -> Array:
        """Return the entries of a precision with its diagonal, (nnz,)."""
        return sparse_cholesky.with_diagonal(self.pattern, entries)

    def product(self, entries: Array, x: Array) -> Array:
        """Return the product of a precision of the nodes with columns (N, n)."""
        return sparse_cholesky.product(self.pattern, entries, x)

    def product_of_prior(self, entries: Array, x: Array) -> Array:
        """Return :meth:`product` with the precision of the prior."""
        return self.product(entries, x)

    def prior(self, dtype: Any, links: Any = None) -> NodePrior:
        """Return the prior.

        :param links: the entries of the precision of the nodes, as in natural
            parameters, (nnz,), or a tuple of them and the log-determinant of the
            precision; ``None`` for standard normal nodes.
        """
        zeros = jnp.zeros((1, self.size), dtype)
        if links is None:
            links = self.standard(dtype).entries[0], jnp.zeros((), dtype)
        if not isinstance(links, tuple):
            links = links, sparse_cholesky.log_det(self.pattern, self.values(links))
        entries, log_det = links
        return NodePrior(zeros, entries, log_det, self)

    def map(self, predictors: Any) -> RowMap:
        offset, residual = predictors.offset[None], predictors.residual[None]
        return RowMap(offset, predictors.rows, residual, self)

    def spreads(self, q: Any, rows: Rows) -> Array:
        """Return the variances of predictors, (n,)."""
        return q.spreads(rows)

    def crossed(self, q: Any, left: Rows, right: Rows) -> Array:
        """Return the covariances of pairs of predictors, (P,). The nodes of both are
        neighbours."""
        both, difference = (_added(left, right, sign) for sign in (1, -1))
        return (q.spreads(both) - q.spreads(difference)) / 4

    def shifts(self, rows: Rows, z: Array) -> Array:
        """Return the change of predictors for latents (size,), (n,)."""
        nodes, corner = z[: self.nodes], z[self.nodes :]
        return rows.dense @ corner + (rows.value * nodes[rows.place]).sum(-1)

    def missing(self, left: Rows, right: Rows) -> Array:
        """Whether predictors depend on nodes that are no neighbours."""
        there = self.pattern.places(left.place[:, :, None], right.place[:, None])
        both = (left.value[:, :, None] != 0) & (right.value[:, None] != 0)
        return (both & (there == len(self.pattern.rows))).any()

    def information(self, rows: Rows, potential: Array, precision: Array) -> Any:
        """Return the information of factors ``exp(h p - w p^2 / 2)`` on predictors.

        :param potential: h, (n,).
        :param precision: w, (n,).
        """
        pattern, dtype, (value, place) = self.pattern, potential.dtype, rows[-2:]
        own = jnp.zeros(self.nodes, dtype)
        own = linalg.added_at(own, (place,), potential[:, None] * value)
        border = linalg.sum_of_products(potential[:, None], rows.dense)[0]
        whole = jnp.concatenate([own, border])[None]
        weighted = precision[:, None] * value
        entries = jnp.zeros(len(pattern.rows), dtype)
        own = weighted * (value.sum(-1, keepdims=True) if self.sums else value)
        diagonal = jnp.asarray(pattern.diagonal)[place]
        entries = linalg.added_at(entries, (diagonal,), own)
        for s, t in combinations(range(value.shape[-1]), 2):
            one, other = place[:, s], place[:, t]
            again = jnp.where(one == other, 0 if self.sums else 2, 1)
            product = weighted[:, s] * value[:, t] * again
            there = pattern.places(one, other)
            entries = linalg.added_at(entries, (there,), product)
        border = jnp.zeros((self.nodes, self.layout.others), dtype)
        outer = weighted[..., None] * rows.dense[:, None]
        border = linalg.added_at(border, (place,), outer)
        corner = linalg.sum_of_products(precision[:, None] * rows.dense, rows.dense)
        return SparseNatural(whole, entries[None], border[None], corner[None], self)

    def coupling(self, left: Rows, right: Rows, cross: Array) -> Any:
        """Return the information of factors ``exp(-c p q)`` on pairs of predictors, all
        of whose nodes are neighbours: the precision ``sum c (l r' + r l')``.

        :param cross: c, (n,).
        """
        pattern, dtype = self.pattern, cross.dtype
        entries = jnp.zeros(len(pattern.rows), dtype)
        border = jnp.zeros((self.nodes, self.layout.others), dtype)
        for one, other in ((left, right), (right, left)):
            weighted = cross[:, None] * one.value
            outer = weighted[..., None] * other.dense[:, None]
            border = border.at[one.place].add(outer)
            if self.sums:
                sums = weighted * other.value.sum(-1, keepdims=True)
                there = jnp.asarray(pattern.diagonal)[one.place]
                entries = entries.at[there].add(sums)
        row, column = left.place[:, :, None], right.place[:, None]
        product = (cross[:, None] * left.value)[..., None] * right.value[:, None]
        own = 0 if self.sums else 2 * product
        product = jnp.where(row == column, own, product)
        entries = entries.at[pattern.places(row, column)].add(product, mode="drop")
        half = linalg.sum_of_products(cross[:, None] * left.dense, right.dense)
        zeros = jnp.zeros((1, self.size), dtype)
        corner = (half + half.T)[None]
        return SparseNatural(zeros, entries[None], border[None], corner, self)

    def rows_of_block(self, number: int, dtype: Any) -> int | None:
        """Return ``None``: all rows are one block."""
        return None


def _text(numbers: bytes) -> str:
    return b64encode(numbers).decode()


def nodes_of(rows: Rows, structure: Sparse) -> Array:
    """Return the dependence of predictors on nodes as a matrix, (N, n)."""
    number = len(rows.dense)
    found = jnp.zeros((structure.nodes, number), rows.dense.dtype)
    return found.at[rows.place, jnp.arange(number)[:, None]].add(rows.value)


def _added(left: Rows, right: Rows, sign: float) -> Rows:
    """Return the rows of sums of predictors, or of differences."""
    return left._replace(
        dense=left.dense + sign * right.dense,
        value=jnp.concatenate([left.value, sign * right.value], -1),
        place=jnp.concatenate([left.place, right.place], -1),
    )


# Natural parameters and moments contain their structure, which has no arrays.
jax.tree_util.register_static(Sparse)
