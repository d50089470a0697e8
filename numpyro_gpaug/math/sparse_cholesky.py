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

from dataclasses import dataclass, field
from functools import partial
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
from jax import Array, lax
from jax.typing import ArrayLike

from numpyro_gpaug.math import linalg, small
from numpyro_gpaug.math.arrays import STATIC
from numpyro_gpaug.math.linalg import precise
from numpyro_gpaug.math.sparse_pattern import Group, Pattern


class Fronts(NamedTuple):
    """The factors of a group of fronts.

    :param factor: L, (m, P, P).
    :param inverse: its inverse, (m, P, P).
    :param gain: ``-G``, (m, B, P).
    """

    factor: Array
    inverse: Array
    gain: Array


@jax.tree_util.register_dataclass
@dataclass(frozen=True, eq=False)
class SparseFactor:
    """The factor L of a matrix ``P Q P' = L L'``, in the order P of elimination.

    Vectors are in the order of the matrix everywhere: the whitened number of a node is
    at the place of the node.

    :param pattern: the places of the entries of Q.
    :param fronts: by group, the last to be eliminated first.
    :param log_det: the logarithm of the determinant of Q.
    """

    pattern: Pattern = field(metadata=STATIC)
    fronts: tuple[Fronts, ...]
    log_det: Array

    @jax.jit
    def solve(self, b: Array) -> Array:
        """Return ``Q^-1 b``.

        :param b: (size,) or (size, k).
        """
        return self._in_order(self._down(self._up(self._by_group(b))), b)

    @jax.jit
    def half_solve(self, b: Array) -> Array:
        """Return ``P' L^-1 P b``. Its squares sum to ``b' Q^-1 b``.

        :param b: (size,) or (size, k).
        """
        return self._in_order(self._up(self._by_group(b)), b)

    @jax.jit
    def half_solve_transposed(self, e: Array) -> Array:
        """Return ``P' L^-T P e``. A vector of standard normal numbers becomes a draw of
        ``N(0, Q^-1)``.

        :param e: (size,) or (size, k).
        """
        return self._in_order(self._down(self._by_group(e)), e)

    @jax.jit
    @precise
    def half_product(self, x: Array) -> Array:
        """Return ``P' L' P x``, the inverse of :meth:`half_solve_transposed`.

        :param x: (size,) or (size, k).
        """
        white, given = [], self._by_group(x)
        known = jnp.zeros((1, given[0].shape[-1]), x.dtype)
        steps = zip(given, self.fronts, self._groups, strict=True)
        for own, front, group in steps:
            innovation = own - front.gain.mT @ _at(known, group.border)
            white.append(front.factor.mT @ innovation)
            known = jnp.concatenate([known, own.reshape(-1, own.shape[-1])])
        return self._in_order(white, x)

    @jax.jit
    @precise
    def selected_inverse(self) -> Array:
        """Return the entries of ``Q^-1`` at the places of the pattern, (nnz,)."""
        found: list[Array] = []
        whole = jnp.zeros((1, 0, 0), self.log_det.dtype)
        for front, group in zip(self.fronts, self._groups, strict=True):
            border = _border(group, whole) if found else whole
            across = border @ front.gain
            own = front.inverse.mT @ front.inverse + front.gain.mT @ across
            found.append(jnp.concatenate([own, across], 1))
            beside = jnp.concatenate([across.mT, border], 1)
            whole = jnp.concatenate([found[-1], beside], 2)
        flat = jnp.concatenate([x.reshape(-1) for x in found])
        return _at(flat, self.pattern.elimination.places)

    @property
    def _groups(self) -> tuple[Group, ...]:
        return self.pattern.elimination.groups

    def _by_group(self, x: Array) -> list[Array]:
        """Return the rows of the pivots of each group, (m, P, k), and zero for
        padding."""
        columns = jnp.pad(x.reshape(self.pattern.size, -1), ((0, 1), (0, 0)))
        pivots = [group.pivots for group in self._groups]
        flat = _at(columns, np.concatenate([x.reshape(-1) for x in pivots]))
        cuts = np.cumsum([x.size for x in pivots])[:-1]
        split = jnp.split(flat, cuts)
        return [x.reshape(*p.shape, -1) for x, p in zip(split, pivots, strict=True)]

    def _in_order(self, found: list[Array], like: Array) -> Array:
        """Return rows of pivots in the order of the matrix."""
        flat = jnp.concatenate([x.reshape(-1, x.shape[-1]) for x in found])
        return _at(flat, self.pattern.elimination.nodes).reshape(like.shape)

    @precise
    def _up(self, given: list[Array]) -> list[Array]:
        """Return ``L^-1 b``."""
        white: list[Array] = []
        passed: Array | None = None
        steps = list(zip(given, self.fronts, self._groups, strict=True))
        for k, (own, front, group) in reversed([*enumerate(steps)]):
            p = own.shape[1]
            rest = jnp.zeros((), own.dtype)
            if passed is not None:
                own, rest = own + passed[:, :p], passed[:, p:]
            white.append(front.inverse @ own)
            if k:
                above = self._groups[k - 1]
                passed = _passed_vectors(group, above, rest + front.gain @ own)
        return white[::-1]

    @precise
    def _down(self, white: list[Array]) -> list[Array]:
        """Return ``L^-T e``."""
        found = []
        known = jnp.zeros((1, white[0].shape[-1]), white[0].dtype)
        for own, front, group in zip(white, self.fronts, self._groups, strict=True):
            moved = front.gain.mT @ _at(known, group.border)
            found.append(front.inverse.mT @ own + moved)
            known = jnp.concatenate([known, found[-1].reshape(-1, own.shape[-1])])
        return found


@partial(jax.jit, static_argnums=0)
@precise
def factor(pattern: Pattern, values: Array) -> SparseFactor:
    """Return the Cholesky factor of a sparse matrix.

    :param pattern: the places of the entries.
    :param values: the entries, (nnz,).
    :return: the factor; its numbers are NaN where the matrix is not positive definite.
    """
    elimination = pattern.elimination
    groups, fronts = elimination.groups, list[Fronts]()
    passed: Array | None = None
    for k, columns in reversed([*enumerate(_columns(pattern, values))]):
        p = columns.shape[2]
        own, across = columns[:, :p], -columns[:, p:]
        rest = jnp.zeros((), values.dtype)
        if passed is not None:
            own, across = own + passed[:, :p, :p], across - passed[:, p:, :p]
            rest = passed[:, p:, p:]
        lower, inverse = small.cholesky_and_inverse(own)
        half = across @ inverse.mT
        fronts.append(Fronts(lower, inverse, half @ inverse))
        if k:
            update = rest - half @ half.mT
            passed = _passed_matrix(groups[k], groups[k - 1], update)
    flat = jnp.concatenate([x.inverse.reshape(-1) for x in fronts[::-1]])
    log_det = -2 * jnp.log(_at(flat, elimination.diagonal)).sum()
    return SparseFactor(pattern, tuple(fronts[::-1]), log_det)


@partial(jax.jit, static_argnums=0)
def forms(pattern: Pattern, inverse: Array, nodes: Array, coefficients: Array) -> Array:
    """Return the variances ``a' Q^-1 a`` of sparse combinations of the nodes. They are
    sums of squares, and so at least zero. Their rounding errors are relative to the
    variances of the nodes.

    :param pattern: the places of the entries of Q.
    :param inverse: from :meth:`SparseFactor.selected_inverse`, (nnz,).
    :param nodes: (n, s) integers. The pattern must have an entry for each pair of
        nodes of a row that both have a coefficient other than zero.
    :param coefficients: a, (n, s).
    :return: (n,); NaN for a row whose nodes have no entry in the pattern.
    """
    coefficients = jnp.asarray(coefficients, inverse.dtype)
    places = pattern.places(nodes[:, :, None], nodes[:, None, :])
    used = coefficients != 0
    needed = used[:, :, None] & used[:, None, :]
    known = inverse.at[places].get(mode="fill", fill_value=jnp.nan)
    return _form(jnp.where(needed, known, 0), coefficients)


def _columns(pattern: Pattern, values: Array) -> list[Array]:
    """Return the entries of the matrix in the fronts of each group, (m, R, P)."""
    elimination = pattern.elimination
    shapes = [(*x.pivots.shape, x.up.shape[1]) for x in elimination.groups]
    cuts = np.cumsum([m * (p + b) * p for m, p, b in shapes])
    flat = jnp.zeros(int(cuts[-1]), values.dtype)
    with_one = jnp.append(values, jnp.ones(1, values.dtype))
    flat = flat.at[elimination.entries].set(
        _at(with_one, elimination.sources),
        mode="promise_in_bounds", unique_indices=True, indices_are_sorted=True,
    )  # fmt: skip
    split = jnp.split(flat, cuts[:-1])
    return [x.reshape(m, p + b, p) for x, (m, p, b) in zip(split, shapes, strict=True)]


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
    inverse = pattern.multiplicity * factored.selected_inverse()
    return factored.log_det, (inverse * tangents[0]).sum()


class _Held(NamedTuple):
    """A matrix Q whose sums of rows s are known better than its entries, with the level
    of every connected component held.

    If neighbours are alike, rounding of the diagonal decides how small the eigenvalue
    of a constant is. In ``H = Q + sum_k c_k e_k e_k'`` (k the last node of each
    component) it is not small. Since ``Q 1 = s``, ``|Q| = |H| prod_k h_k``, where h
    solves ``H h = s``.

    :param values: the entries of H, (nnz,).
    :param labels: the component of each node, (size,).
    :param last: the nodes k, by component.
    :param left: ``h_k``, by component.
    """

    values: Array
    labels: np.ndarray
    last: np.ndarray
    left: Array


def _held(pattern: Pattern, values: Array, sums: ArrayLike) -> _Held:
    labels = pattern.components
    last = np.zeros(labels.max(initial=-1) + 1, int)
    last[labels] = np.arange(pattern.size)
    raised = values.at[pattern.diagonal[last]].multiply(2)
    h = solve(pattern, raised, jnp.asarray(sums, values.dtype))
    return _Held(raised, labels, last, h[last])


def log_det_with_sums(pattern: Pattern, values: Array, sums: Any) -> Array:
    """Return the logarithm of the determinant, as :func:`log_det`.

    :param pattern: the places of the entries.
    :param values: the entries, (nnz,).
    :param sums: the sums of rows, (size,), if they are known better than the entries.
    """
    if sums is None:
        return log_det(pattern, values)
    held = _held(pattern, values, sums)
    return log_det(pattern, held.values) + jnp.log(held.left).sum()


@precise
def variances_with_sums(pattern: Pattern, values: Array, sums: Any) -> Array:
    """Return the diagonal of ``Q^-1``, (size,): that of ``H^-1`` and, with its column p
    of k, of ``c_k p p' / h_k`` in every component.

    :param pattern: the places of the entries.
    :param values: the entries, (nnz,).
    :param sums: the sums of rows, (size,), if they are known better than the entries.
    """
    if sums is None:
        return factor(pattern, values).selected_inverse()[pattern.diagonal]
    held = _held(pattern, values, sums)
    factored = factor(pattern, held.values)
    column = factored.solve(jnp.zeros(pattern.size, values.dtype).at[held.last].set(1))
    level = values[pattern.diagonal[held.last]] / held.left
    inner = factored.selected_inverse()[pattern.diagonal]
    return inner + level[held.labels] * jnp.square(column)


@precise
def half_solve_with_sums(pattern: Pattern, values: Array, sums: Any, e: Array) -> Array:
    """Return ``B e``, where ``B B' = Q^-1``: draws, of standard normal numbers.

    With ``H = L L'`` and ``q = L^-1 e_k``, ``Q^-1`` is ``L^-T (I + (1 / h_k - 1) q q' /
    q'q) L^-1`` in every component.

    :param pattern: the places of the entries.
    :param values: the entries, (nnz,).
    :param sums: the sums of rows, (size,), if they are known better than the entries.
    :param e: (size, k).
    """
    if sums is None:
        return factor(pattern, values).half_solve_transposed(e)
    held = _held(pattern, values, sums)
    factored = factor(pattern, held.values)
    q = factored.half_solve(jnp.zeros(pattern.size, e.dtype).at[held.last].set(1))

    def by_component(x: Array) -> Array:
        return jax.ops.segment_sum(x, held.labels, len(held.last))

    longer = (held.left**-0.5 - 1) / by_component(q * q)
    along = longer[:, None] * by_component(q[:, None] * e)
    return factored.half_solve_transposed(e + q[:, None] * along[held.labels])


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
    columns = x.reshape(pattern.size, -1)
    return product(pattern, with_sums(pattern, values), columns).reshape(x.shape)


def with_sums(pattern: Pattern, values: Array, sums: Any = None) -> Array:
    """Return the entries of a matrix with the sums of its rows in the places of the
    diagonal.

    Where a precision says that neighbours are alike, the entries of a row cancel each
    other: rounding of its diagonal may exceed their sum, and by as much at all nodes of
    a regular mesh. With sums that are known, :func:`product` has no such error.

    :param pattern: the places of the entries.
    :param values: the entries, (nnz,).
    :param sums: the sums, (size,), if they are known better than the entries.
    """
    if sums is None:
        sums = values[pattern.diagonal] + _beside(pattern, values)
    return values.at[pattern.diagonal].set(jnp.asarray(sums, values.dtype))


def with_diagonal(pattern: Pattern, entries: Array) -> Array:
    """Invert :func:`with_sums`."""
    own = entries[pattern.diagonal] - _beside(pattern, entries)
    return entries.at[pattern.diagonal].set(own)


def _beside(pattern: Pattern, values: Array) -> Array:
    """Return the sums of rows without the diagonal."""
    i, j, apart = _apart(pattern)
    found = jnp.zeros(pattern.size, values.dtype)
    found = found.at[i].add(values[apart], mode="promise_in_bounds")
    return found.at[j].add(values[apart], mode="promise_in_bounds")


def product(pattern: Pattern, entries: Array, x: Array) -> Array:
    """Return the product of a sparse matrix with vectors, from differences between
    neighbours.

    :param pattern: the places of the entries.
    :param entries: from :func:`with_sums`.
    :param x: (size, k).
    """
    i, j, apart = _apart(pattern)
    moved = entries[apart, None] * (_at(x, j) - _at(x, i))
    found = entries[pattern.diagonal, None] * x
    found = found.at[i].add(moved, mode="promise_in_bounds", indices_are_sorted=True)
    return found.at[j].add(-moved, mode="promise_in_bounds")


def quadratic(pattern: Pattern, entries: Array, x: Array) -> Array:
    """Return ``x' Q x``, (...), from squared differences between neighbours.

    :param pattern: the places of the entries of Q.
    :param entries: from :func:`with_sums`.
    :param x: (..., size).
    """
    i, j, apart = _apart(pattern)
    between = entries[apart] * jnp.square(x[..., i] - x[..., j])
    own = entries[pattern.diagonal] * jnp.square(x)
    return own.sum(-1) - between.sum(-1)


def _apart(pattern: Pattern) -> tuple[np.ndarray, np.ndarray, np.ndarray]:
    """Return rows, columns and places of the entries beside the diagonal."""
    apart = np.flatnonzero(pattern.rows != pattern.columns)
    return pattern.rows[apart], pattern.columns[apart], apart


def _at(values: Array, places: Any) -> Array:
    return values.at[places].get(mode="promise_in_bounds", wrap_negative_indices=False)


def _passed_matrix(group: Group, above: Group, update: Array) -> Array:
    """Return the sums of the updates of children, (m, R, R). Padding of a border is
    zero, whatever it is added to."""
    r, (m, b) = above.width, group.up.shape
    # Columns first, such that whole rows are added.
    source = np.full((m, 1, r), b)
    front, row = np.nonzero(group.up >= 0)
    source[front, 0, group.up[front, row]] = row
    wide = jnp.pad(update, ((0, 0), (0, 0), (0, 1)))
    wide = jnp.take_along_axis(wide, source, 2, mode="promise_in_bounds")
    return _passed_vectors(group, above, wide)


def _passed_vectors(group: Group, above: Group, update: Array) -> Array:
    """Return the sums of the updates of children, (m, R, k)."""
    r, k = above.width, update.shape[-1]
    found = jnp.zeros((len(above.pivots) * r, k), update.dtype)
    found = found.at[_rows_above(group, r)].add(update, mode="promise_in_bounds")
    return found.reshape(-1, r, k)


def _rows_above(group: Group, r: int) -> np.ndarray:
    """Return the place of each border node among the rows of all fronts above."""
    return group.parent[:, None] * r + np.maximum(group.up, 0)


def _border(group: Group, above: Array) -> Array:
    """Return the inverse at the borders of fronts, (m, B, B). Padding is any number:
    gains are zero there.

    :param above: the inverse at the fronts above, (m', R, R).
    """
    r, (m, b) = above.shape[-1], group.up.shape
    rows = _at(above.reshape(-1, r), _rows_above(group, r))
    # Whole rows are copied twice. The places of single entries would be as many numbers
    # as the entries, which a loop would keep in memory.
    columns = np.arange(m)[:, None] * r + np.maximum(group.up, 0)
    return _at(rows.mT.reshape(m * r, b), columns)


@jax.custom_jvp
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


@_form.defjvp
def _form_jvp(primals: Any, tangents: Any) -> tuple[Array, Array]:
    (matrix, a), (moved, b) = primals, tangents
    pulled = 2 * jnp.matvec(matrix, b) + jnp.matvec(moved, a)
    return _form(matrix, a), jnp.vecdot(a, pulled)
