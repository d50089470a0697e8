# SPDX-License-Identifier: Apache-2.0
r"""Cholesky factors of sparse symmetric matrices with a fixed pattern.

Nested dissection orders the nodes such that they are eliminated in a few groups of
dense matrices of one size, the *fronts* (:mod:`numpyro_gpaug.math.sparse_pattern`). A
front has pivots P, which it eliminates, and a border B of nodes that are eliminated
later. With the sums of the front's entries and of the updates of its children,

.. math:: F_{PP} = L L^\top, \quad G = F_{BP} F_{PP}^{-1}, \quad
          U = F_{BB} - F_{BP} F_{PP}^{-1} F_{PB},

it passes the update U on to its parent. The inverse of L is stored, so that everything
else consists of gathers and batched products of matrices. Entries of the inverse
:math:`\Sigma` are computed from the last front to the first, as sums of positive terms:

.. math:: \Sigma_{BP} = -\Sigma_{BB} G, \quad
          \Sigma_{PP} = F_{PP}^{-1} + G^\top \Sigma_{BB} G.

Duff and Reid (1983), The multifrontal solution of indefinite sparse symmetric linear
equations; Takahashi, Fagan and Chin (1973), Formation of a sparse bus impedance matrix.
"""

from __future__ import annotations

from dataclasses import dataclass
from functools import partial
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
from jax import Array, lax

from numpyro_gpaug.math import linalg
from numpyro_gpaug.math.linalg import precise
from numpyro_gpaug.math.sparse_pattern import Group, Pattern


class Fronts(NamedTuple):
    """The factors of a group of fronts.

    :param lower: L, (m, P, P).
    :param inverse: its inverse, (m, P, P).
    :param gain: G, (m, B, P).
    """

    lower: Array
    inverse: Array
    gain: Array


@partial(
    jax.tree_util.register_dataclass,
    data_fields=("fronts", "log_det"),
    meta_fields=("pattern",),
)
@dataclass(frozen=True)
class SparseFactor:
    """The factor L of a matrix ``P Q P' = L L'``, in the order P of elimination.

    Vectors are in the order of the matrix everywhere: the whitened number of a node is
    at the place of the node.

    :param pattern: the places of the entries of Q.
    :param fronts: by group, the last to be eliminated first.
    :param log_det: the logarithm of the determinant of Q.
    """

    pattern: Pattern
    fronts: tuple[Fronts, ...]
    log_det: Array

    @jax.jit
    def solve(self, b: Array) -> Array:
        """Return ``Q^-1 b``.

        :param b: (size,) or (size, k).
        """
        return self.half_solve_transposed(self.half_solve(b))

    @jax.jit
    @precise
    def half_solve(self, b: Array) -> Array:
        """Return ``P' L^-1 P b``. Its squares sum to ``b' Q^-1 b``.

        :param b: (size,) or (size, k).
        """
        pivots, white = self._pivots_of(b), []
        update: Array | None = None
        for own, fronts, group in self._upwards(pivots):
            if update is not None:
                passed = _passed_vectors(group, update)
                own, passed = own + passed[:, : own.shape[1]], passed[:, own.shape[1] :]
            white.append(fronts.inverse @ own)
            update = -fronts.gain @ own
            if group.children.shape[1]:
                update = update + passed
        return self._in_order(white[::-1], b)

    @jax.jit
    @precise
    def half_solve_transposed(self, e: Array) -> Array:
        """Return ``P' L^-T P e``. A vector of standard normal numbers becomes a draw of
        ``N(0, Q^-1)``.

        :param e: (size,) or (size, k).
        """
        found: list[Array] = []
        above: Array | None = None
        for own, fronts, group in self._downwards(self._pivots_of(e)):
            border = _border_vectors(group, above, own)
            solved = fronts.inverse.mT @ own - fronts.gain.mT @ border
            found.append(solved)
            above = jnp.concatenate([solved, border], 1)
        return self._in_order(found, e)

    @jax.jit
    @precise
    def half_product(self, x: Array) -> Array:
        """Return ``P' L' P x``, the inverse of :meth:`half_solve_transposed`.

        :param x: (size,) or (size, k).
        """
        white: list[Array] = []
        above: Array | None = None
        for own, fronts, group in self._downwards(self._pivots_of(x)):
            border = _border_vectors(group, above, own)
            white.append(fronts.lower.mT @ (own + fronts.gain.mT @ border))
            above = jnp.concatenate([own, border], 1)
        return self._in_order(white, x)

    @jax.jit
    @precise
    def selected_inverse(self) -> Array:
        """Return the entries of ``Q^-1`` at the places of the pattern, (nnz,)."""
        elimination = self.pattern.elimination
        found = []
        above: Array | None = None
        steps = zip(elimination.groups, self.fronts, elimination.selected, strict=True)
        for group, fronts, places in steps:
            border = _border_matrix(group, above, fronts.gain)
            across = -border @ fronts.gain
            own = fronts.inverse.mT @ fronts.inverse - fronts.gain.mT @ across
            columns = jnp.concatenate([own, across], 1)
            found.append(_at(columns.reshape(-1), places))
            if group is not elimination.groups[-1]:
                rest = jnp.concatenate([across.mT, border], 1)
                above = jnp.concatenate([columns, rest], 2)
        return _at(jnp.concatenate(found), elimination.order)

    @jax.jit
    def forms(self, nodes: Array, coefficients: Array) -> Array:
        """Return the variances ``a' Q^-1 a`` of sparse combinations of the nodes. They
        are sums of squares, and so at least zero.

        :param nodes: (n, s) integers. The pattern must have an entry for each pair of
            nodes of a row that both have a coefficient other than zero.
        :param coefficients: a, (n, s).
        :return: (n,); NaN for a row whose nodes have no entry in the pattern.
        """
        inverse = self.selected_inverse()
        coefficients = jnp.asarray(coefficients, inverse.dtype)
        places = self.pattern.places(nodes[:, :, None], nodes[:, None, :])
        used = coefficients != 0
        needed = used[:, :, None] & used[:, None, :]
        known = jnp.where(
            places < len(self.pattern.rows),
            inverse.at[places].get(mode="clip", wrap_negative_indices=False),
            jnp.nan,
        )
        return _form(jnp.where(needed, known, 0), coefficients)

    def _pivots_of(self, b: Array) -> list[Array]:
        """Return the rows of the pivots of each group, (m, P, k), and zero for
        padding."""
        columns = b.reshape(self.pattern.size, -1)
        padded = jnp.pad(columns, ((0, 1), (0, 0)))
        groups = self.pattern.elimination.groups
        return [_rows(padded, group.pivots) for group in groups]

    def _in_order(self, found: list[Array], like: Array) -> Array:
        """Return rows of pivots in the order of the matrix."""
        flat = jnp.concatenate([x.reshape(-1, x.shape[-1]) for x in found])
        return _rows(flat, self.pattern.elimination.nodes).reshape(like.shape)

    def _downwards(self, pivots: list[Array]) -> Any:
        groups = self.pattern.elimination.groups
        return zip(pivots, self.fronts, groups, strict=True)

    def _upwards(self, pivots: list[Array]) -> Any:
        return reversed(list(self._downwards(pivots)))


@partial(jax.jit, static_argnums=0)
@precise
def factor(pattern: Pattern, values: Array) -> SparseFactor:
    """Return the Cholesky factor of a sparse matrix.

    :param pattern: the places of the entries.
    :param values: the entries, (nnz,).
    :return: the factor; its numbers are NaN where the matrix is not positive definite.
    """
    padded = jnp.append(values, jnp.ones(1, values.dtype))
    found: list[Fronts] = []
    log_det = jnp.zeros((), values.dtype)
    update: Array | None = None
    for group in reversed(pattern.elimination.groups):
        (m, p), b = group.pivots.shape, group.up.shape[1]
        columns = jnp.zeros(m * (p + b) * p, values.dtype)
        columns = columns.at[group.entries].set(
            _at(padded, group.sources),
            mode="promise_in_bounds", unique_indices=True, indices_are_sorted=True,
        ).reshape(m, p + b, p)  # fmt: skip
        rest = jnp.zeros((), values.dtype)
        if update is not None:
            passed = _passed_matrix(group, update)
            columns, rest = columns + passed[:, :, :p], passed[:, p:, p:]
        lower, inverse = linalg.cholesky_and_inverse(columns[:, :p])
        half = columns[:, p:] @ inverse.mT
        found.append(Fronts(lower, inverse, half @ inverse))
        update = rest - half @ half.mT
        log_det = log_det + 2 * jnp.log(linalg.diagonal(lower)).sum()
    return SparseFactor(pattern, tuple(found[::-1]), log_det)


@partial(jax.custom_jvp, nondiff_argnums=(0,))
def log_det(pattern: Pattern, values: Array) -> Array:
    """Return the logarithm of the determinant of a sparse matrix.

    Its derivative is the selected inverse.

    :param pattern: the places of the entries.
    :param values: the entries, (nnz,).
    :return: NaN where the matrix is not positive definite.
    """
    return factor(pattern, values).log_det


@log_det.defjvp
def _log_det_jvp(pattern: Pattern, primals: Any, tangents: Any) -> tuple[Array, Array]:
    factored = factor(pattern, *primals)
    twice = np.where(pattern.rows == pattern.columns, 1, 2)
    inverse = twice * factored.selected_inverse()
    return factored.log_det, (inverse * tangents[0]).sum()


@partial(jax.jit, static_argnums=0)
def solve(pattern: Pattern, values: Array, b: Array) -> Array:
    """Return ``Q^-1 b``. Derivatives are by further solves with the same factor.

    :param pattern: the places of the entries.
    :param values: the entries, (nnz,).
    :param b: (size,) or (size, k).
    """
    factored = factor(pattern, lax.stop_gradient(values))
    return lax.custom_linear_solve(
        partial(matvec, pattern, values),
        b,
        lambda _, x: factored.solve(x),
        symmetric=True,
    )


@partial(jax.jit, static_argnums=0)
def matvec(pattern: Pattern, values: Array, x: Array) -> Array:
    """Return the product of a sparse matrix with vectors.

    :param pattern: the places of the entries.
    :param values: the entries, (nnz,).
    :param x: (size,) or (size, k).
    """
    i, j = pattern.rows, pattern.columns
    apart = np.flatnonzero(i != j)
    each = values.reshape(-1, *(1,) * (x.ndim - 1))
    product = jnp.zeros_like(x, shape=x.shape, dtype=jnp.result_type(values, x))
    product = product.at[i].add(
        each * _at(x, j), mode="promise_in_bounds", indices_are_sorted=True
    )
    mirrored = _at(each, apart) * _at(x, i[apart])
    return product.at[j[apart]].add(mirrored, mode="promise_in_bounds")


def _at(values: Array, places: Any) -> Array:
    return values.at[places].get(mode="promise_in_bounds", wrap_negative_indices=False)


_rows = _at


def _passed_matrix(group: Group, update: Array) -> Array:
    """Return the sums of the updates of children, (m, R, R)."""
    b = update.shape[-1]
    down = group.down
    row = jnp.asarray(group.children[:, :, None] * b + np.maximum(down, 0)) * b
    places = row[..., None] + np.maximum(down, 0)[:, :, None, :]
    there = jnp.asarray(down >= 0)
    both = there[..., None] & there[:, :, None, :]
    return jnp.where(both, _at(update.reshape(-1), places), 0).sum(1)


def _passed_vectors(group: Group, update: Array) -> Array:
    """Return the sums of the updates of children, (m, R, k)."""
    m, b, k = update.shape
    places = group.children[:, :, None] * b + np.maximum(group.down, 0)
    rows = _rows(update.reshape(m * b, k), places)
    return jnp.where((group.down >= 0)[..., None], rows, 0).sum(1)


def _border_matrix(group: Group, above: Array | None, like: Array) -> Array:
    """Return the inverse at the borders of fronts, (m, B, B), from the fronts above."""
    b = like.shape[1]
    if above is None:
        return jnp.zeros((len(like), b, b), like.dtype)
    r, up = above.shape[1], np.maximum(group.up, 0)
    row = jnp.asarray((group.parent[:, None] * r + up) * r)
    places = row[:, :, None] + up[:, None, :]
    there = jnp.asarray(group.up >= 0)
    both = there[:, :, None] & there[:, None, :]
    return jnp.where(both, _at(above.reshape(-1), places), 0)


def _border_vectors(group: Group, above: Array | None, like: Array) -> Array:
    """Return rows of the borders of fronts, (m, B, k), from the fronts above."""
    if above is None:
        return jnp.zeros((len(like), group.up.shape[1], like.shape[2]), like.dtype)
    count, r, k = above.shape
    places = group.parent[:, None] * r + np.maximum(group.up, 0)
    rows = _rows(above.reshape(count * r, k), places)
    return jnp.where((group.up >= 0)[..., None], rows, 0)


def _form(matrix: Array, a: Array) -> Array:
    """Return ``a' M a`` for small positive semi-definite matrices (n, s, s), as a sum
    of squares by ``L D L'``. Rounding errors of pivots and of covariances are cut off
    at zero and at the largest possible values."""
    total = jnp.zeros(len(a), a.dtype)
    for k in range(a.shape[1]):
        variances = jnp.maximum(linalg.diagonal(matrix), 0)
        pivot = variances[:, k]
        bound = jnp.sqrt(pivot[:, None] * variances)
        column = jnp.clip(matrix[:, :, k], -bound, bound)
        column = jnp.where(np.arange(a.shape[1]) == k, pivot[:, None], column)
        column = jnp.where(np.arange(a.shape[1]) < k, 0, column)
        slopes = jnp.where(pivot > 0, 1 / jnp.where(pivot > 0, pivot, 1), 0)[:, None]
        loading = column * slopes
        total = total + pivot * jnp.square((loading * a).sum(-1))
        matrix = matrix - column[:, :, None] * loading[:, None, :]
    return total
