# SPDX-License-Identifier: Apache-2.0
"""Symmetric sparse matrices as weighted sums of matrices with known places, and their
functions of vectors."""

from __future__ import annotations

from collections.abc import Callable, Iterable
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
from jax import Array
from jax.experimental.sparse import BCOO
from scipy import sparse

from numpyro_gpaug.math.sparse_pattern import Pattern

# The relative resolution of a diagonal entry in float32.
_RESOLVED = 1e-7


class _Entries(NamedTuple):
    """Entries of a sparse matrix: known places, and values that may be traced."""

    size: int
    rows: np.ndarray
    columns: np.ndarray
    values: Any


def sum_of_terms(terms: Iterable[Any], name: str) -> tuple[Pattern, Array]:
    """Return the pattern and the entries (nnz,) of ``sum of coefficient * matrix``.

    :param terms: pairs of a number and a symmetric matrix, SciPy sparse or BCOO.
    :param name: the name of the sum in error messages.
    :raises TypeError: for terms that are no pairs, matrices of other types, and BCOO
        with traced indices.
    :raises ValueError: unless all matrices are square, symmetric, and of one size.
    """
    terms = list(terms)
    if not all(isinstance(term, list | tuple) and len(term) == 2 for term in terms):
        raise TypeError(
            f"{name} has a term that is not a pair. Pass a list of pairs of a number "
            "and a sparse matrix, also for one: [(2.0, A)]"
        )
    found = [_entries(matrix, name) for _, matrix in terms]
    sizes = {entries.size for entries in found}
    if len(sizes) != 1:
        raise ValueError(
            f"{name} is a sum of matrices whose sizes differ: {sorted(sizes)}"
        )
    (size,) = sizes
    rows = np.concatenate([entries.rows for entries in found])
    columns = np.concatenate([entries.columns for entries in found])
    pattern = Pattern.of(size, rows, columns)
    total: Any = 0
    for (coefficient, _), entries in zip(terms, found, strict=True):
        places = pattern.find(entries.rows, entries.columns)
        # An entry and its mirror image are stored in one place.
        halves = np.where(entries.rows == entries.columns, 1, 0.5)
        values = jnp.asarray(entries.values)
        halved = values * halves.astype(values.dtype)
        summed = jax.ops.segment_sum(halved, places, len(pattern.rows))
        total = total + coefficient * summed
    return pattern, total


def sums_of_rows(terms: Iterable[Any]) -> Array | None:
    """Return the sums of rows, (size,), of ``sum of coefficient * matrix``, without the
    rounding of its entries; ``None`` if a matrix is a BCOO, which may be traced.

    :param terms: as for :func:`sum_of_terms`.
    """
    total: Any = 0
    for coefficient, matrix in terms:
        if not sparse.issparse(matrix):
            return None
        total = total + coefficient * jnp.asarray(row_sums(matrix), float)
    return total


def row_sums(matrix: Any) -> np.ndarray:
    """Return the sums of the rows of a SciPy matrix: zero, if they are of the size of
    rounding."""
    matrix = sparse.coo_array(matrix)
    eps = np.finfo(np.result_type(matrix.dtype, np.float32)).eps
    sums = np.asarray(matrix.sum(1), float)
    return np.where(abs(sums) <= 8 * eps * abs(matrix).sum(1), 0, sums)


def indefinite_node(pattern: Pattern, values: np.ndarray) -> tuple[int, float] | None:
    """Return a node at which a matrix stops being positive definite, and the precision
    that is left of it after others are eliminated; ``None`` if float32 factorises the
    matrix.

    :param pattern: the places of the entries.
    :param values: the entries, (nnz,), finite.
    """
    from scipy.sparse.linalg import splu

    diagonal = values[pattern.diagonal]
    if (diagonal <= 0).any():
        node = int(np.argmin(diagonal))
        return node, float(diagonal[node])
    shape = (pattern.size,) * 2
    lower = sparse.coo_array((values, (pattern.rows, pattern.columns)), shape=shape)
    # Slightly positive, because splu refuses exactly singular matrices.
    shift = sparse.diags_array(1e-14 * diagonal)
    matrix = (lower + sparse.tril(lower, -1).T + shift).tocsc()
    decomposition = splu(
        matrix, "MMD_AT_PLUS_A", diag_pivot_thresh=0, options={"SymmetricMode": True}
    )
    left = decomposition.U.diagonal()[decomposition.perm_c]
    node = int(np.argmin(left / diagonal))
    if left[node] > _RESOLVED * diagonal[node]:
        return None
    return node, float(left[node])


def by_columns(function: Callable[[Array], Array], x: Array) -> Array:
    """Apply a function of columns (n, k) to the vectors of an array (..., n)."""
    columns = x.reshape(-1, x.shape[-1]).T
    return function(columns).T.reshape(x.shape)


def _entries(matrix: Any, name: str) -> _Entries:
    if sparse.issparse(matrix):
        coo = sparse.coo_array(matrix)
        coo.sum_duplicates()
        places, values = np.stack(coo.coords, -1), coo.data
        if values.dtype.kind != "f":
            values = values.astype(float)
    elif isinstance(matrix, BCOO):
        places, values = _places(matrix, name), matrix.data
    else:
        raise TypeError(
            f"{name} is a {type(matrix).__name__}. Pass a SciPy sparse matrix, a "
            "jax.experimental.sparse.BCOO, or pairs of a number and such a matrix; for "
            "a dense matrix use dist.MultivariateNormal"
        )
    if len(matrix.shape) != 2 or matrix.shape[0] != matrix.shape[1]:
        raise ValueError(f"{name} has shape {matrix.shape}; expected (n, n)")
    size = matrix.shape[0]
    # The padding of a BCOO lies outside of the matrix.
    inside = np.flatnonzero((places < size).all(-1))
    if len(inside) < len(places):
        places, values = places[inside], values[inside]
    rows, columns = places.T.astype(np.int32)
    _check_entries(size, rows, columns, values, name)
    return _Entries(size, rows, columns, values)


def _places(matrix: BCOO, name: str) -> np.ndarray:
    if matrix.n_batch or matrix.n_dense:
        raise ValueError(f"{name} is a BCOO with batch or dense axes; expected none")
    if isinstance(matrix.indices, jax.core.Tracer):
        raise TypeError(
            f"{name} is a BCOO whose indices are traced. Make the indices outside of "
            "the model, as a JAX array, or pass pairs of a number and a SciPy sparse "
            "matrix"
        )
    return np.asarray(matrix.indices)


def _check_entries(
    size: int, rows: np.ndarray, columns: np.ndarray, values: Any, name: str
) -> None:
    stored = sparse.coo_array((np.ones(len(rows)), (rows, columns)), shape=(size,) * 2)
    matrix, tolerance = stored.tocsr(), 0.0
    if isinstance(values, jax.core.Tracer):
        matrix.data[:] = 1
    else:
        numbers = np.asarray(values, float)
        if not np.isfinite(numbers).all():
            first = np.argmin(np.isfinite(numbers))
            raise ValueError(
                f"{name}[{rows[first]}, {columns[first]}] is {numbers[first]}"
            )
        matrix = sparse.csr_array((numbers, (rows, columns)), shape=(size,) * 2)
        tolerance = 1e-5 * abs(numbers).max(initial=0)
    differences = abs(matrix - matrix.T).tocoo()
    if (differences.data > tolerance).any():
        first = np.argmax(differences.data)
        i, j = int(differences.row[first]), int(differences.col[first])
        raise ValueError(
            f"{name} is not symmetric: entries [{i}, {j}] and [{j}, {i}] differ. Store "
            "both triangles"
        )
