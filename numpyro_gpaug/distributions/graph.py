# SPDX-License-Identifier: Apache-2.0
"""Graphs of neighbours and the intrinsic Gaussian Markov random fields on them,
analysed on the host in double precision."""

from __future__ import annotations

from functools import cached_property, lru_cache
from typing import Any, NamedTuple

import jax
import numpy as np
from jax.experimental.sparse import BCOO
from scipy import sparse

from numpyro_gpaug.math.fingerprints import ByContents
from numpyro_gpaug.math.sparse_pattern import Pattern
from numpyro_gpaug.math.threads import threads_for


class Graph(ByContents):
    """An undirected graph with positive weights; static metadata of a pytree.

    Equal graphs are one object (:func:`graph_of`), which caches its analysis.

    :param size: number of nodes n.
    :param rows: a node of each edge, sorted.
    :param columns: the other node of each edge, ``columns < rows``.
    :param weights: positive weights of the edges, float64.
    """

    _contents = "size", "rows", "columns", "weights"

    def __init__(
        self, size: int, rows: np.ndarray, columns: np.ndarray, weights: np.ndarray
    ) -> None:
        self.size, self.rows, self.columns, self.weights = size, rows, columns, weights

    def __repr__(self) -> str:
        return f"Graph({self.size} nodes, {len(self.rows)} edges)"

    @cached_property
    def components(self) -> Components:
        """The connected components."""
        labels = self.pattern.components
        sizes = np.bincount(labels)
        # Components with edges come first; all islands share one label.
        connected = np.flatnonzero(sizes > 1)
        renamed = np.full(len(sizes), len(connected))
        renamed[connected] = np.arange(len(connected))
        labels = renamed[labels].astype(np.int32)
        last = np.zeros(len(connected) + 1, np.int32)
        last[labels] = np.arange(self.size)
        return Components(labels, sizes[connected], last[:-1])

    @property
    def rank(self) -> int:
        """The rank of the precision: nodes minus components with edges."""
        return self.size - len(self.components.sizes)

    @cached_property
    def pattern(self) -> Pattern:
        """The places of the entries of the precision."""
        return Pattern.of(self.size, self.rows, self.columns)

    @cached_property
    def precision(self) -> np.ndarray:
        """The entries of the scaled precision on :attr:`pattern`, float64."""
        parts = self.components
        scaling = np.append(self.intrinsic.scaling, 1)[parts.labels]
        weights = self.weights * scaling[self.rows]
        diagonal = _degrees(self, weights) + (parts.labels == len(parts.sizes))
        return entries(self.pattern, _symmetric(self, weights, diagonal))

    @cached_property
    def grounded(self) -> np.ndarray:
        """The entries of :attr:`precision` with the diagonal doubled at one node of
        every component.

        The matrix is positive definite. A draw with this precision is a draw of the
        intrinsic field plus an independent level of each component: the field depends
        on differences only, and the added term on the level given the differences.
        """
        found = self.precision.copy()
        found[self.pattern.diagonal[self.components.last]] *= 2
        return found

    @cached_property
    def intrinsic(self) -> Intrinsic:
        """The scaled field that the precision defines."""
        labels, sizes, last = self.components
        degrees = _degrees(self, self.weights)
        diagonal = np.where(labels == len(sizes), 1, degrees)
        level = diagonal[last]
        diagonal[last] *= 2
        grounded = _symmetric(self, self.weights, diagonal)
        variances, log_det, sums = _inverted(grounded)
        # The generalised inverse is centred: V_ii - 2 mean_j V_ij + mean_jk V_jk.
        totals = np.bincount(labels, sums, len(sizes) + 1)[:-1]
        centre = np.append(1 / sizes, 0)[labels]
        mean = np.append(totals / sizes**2, 0)[labels]
        variances = variances - 2 * centre * sums + mean
        logs = np.bincount(labels, np.log(variances), len(sizes) + 1)[:-1]
        scaling = np.exp(logs / sizes)
        # Matrix-tree theorem: the product of the nonzero eigenvalues of a Laplacian is
        # n times the determinant without one row and column.
        log_det += np.log(sizes / level).sum() + ((sizes - 1) * np.log(scaling)).sum()
        variances = variances / np.append(scaling, 1)[labels]
        return Intrinsic(variances, scaling, log_det)


class Components(NamedTuple):
    """The connected components of a graph, with single nodes ("islands") apart.

    :param labels: the component of each node, (n,); islands have label c.
    :param sizes: numbers of nodes of the c components that have edges, (c,).
    :param last: the last node of each of these components, (c,).
    """

    labels: np.ndarray
    sizes: np.ndarray
    last: np.ndarray


class Intrinsic(NamedTuple):
    """The intrinsic field of a graph.

    :param variances: marginal variances of the scaled field, (n,): their geometric mean
        over each component with edges is one, and islands have variance one.
    :param scaling: the factor of the precision of each component.
    :param log_det: the logarithm of the product of the nonzero eigenvalues of the
        scaled precision.
    """

    variances: np.ndarray
    scaling: np.ndarray
    log_det: float


def graph_of(adjacency: Any) -> Graph:
    """Return the graph of an adjacency matrix.

    :param adjacency: symmetric (n, n) without negative entries and with a zero
        diagonal: a SciPy sparse matrix, a BCOO of JAX, or an array. It must be known
        when the model is traced.
    :raises TypeError: for a traced matrix.
    :raises ValueError: for a matrix that is not square, or has entries that are
        negative, not finite, on the diagonal, or not symmetric.
    """
    matrix = _as_csr(adjacency)
    lower = sparse.tril(matrix, -1).tocsr()
    lower.sort_indices()
    coo = lower.tocoo()
    rows, columns = (x.astype(np.int32) for x in (coo.row, coo.col))
    return _interned(Graph(matrix.shape[0], rows, columns, coo.data))


@lru_cache(maxsize=64)
def _interned(graph: Graph) -> Graph:
    """Return the first graph that was equal, which has its analysis cached."""
    return graph


def _as_csr(adjacency: Any) -> Any:
    entries = adjacency.data if isinstance(adjacency, BCOO) else adjacency
    if isinstance(entries, jax.core.Tracer):
        raise TypeError(
            "adjacency is traced, and a graph must be known when the model is traced. "
            "Pass a NumPy array or a SciPy sparse matrix that is not an argument of "
            "the model, but a global that it reads"
        )
    if isinstance(adjacency, BCOO):
        places = np.asarray(adjacency.indices)
        # JAX pads with places outside of the matrix.
        inside = (places < adjacency.shape).all(1)
        found = np.asarray(entries)[inside], places[inside].T
        adjacency = sparse.coo_array(found, shape=adjacency.shape)
    if not sparse.issparse(adjacency):
        adjacency = np.asarray(adjacency, float)
    shape = adjacency.shape
    if len(shape) != 2 or shape[0] != shape[1] or not shape[0]:
        raise ValueError(f"adjacency has shape {shape}; expected (n, n)")
    matrix = sparse.csr_array(adjacency, dtype=float, copy=True)
    matrix.sum_duplicates()
    matrix.eliminate_zeros()
    coo = matrix.tocoo()
    for faulty, fault in (
        (~np.isfinite(coo.data), "is {}"),
        (coo.row == coo.col, "is {}: a node is no neighbour of its own"),
        (coo.data < 0, "is {}: weights must be positive"),
    ):
        if faulty.any():
            first = np.argmax(faulty)
            place, value = (coo.row[first], coo.col[first]), coo.data[first]
            raise ValueError(_at(place) + " " + fault.format(value))
    if (difference := abs(matrix - matrix.T).tocoo()).data.any():
        first = np.argmax(difference.data)
        i, j = difference.row[first], difference.col[first]
        raise ValueError(
            f"{_at((i, j))} is {matrix[i, j]}, but {_at((j, i))} is {matrix[j, i]}. "
            "Neighbours are mutual: pass a symmetric matrix"
        )
    return matrix


def _at(place: tuple[Any, ...]) -> str:
    return f"adjacency[{', '.join(map(str, map(int, place)))}]"


def _degrees(graph: Graph, weights: np.ndarray) -> np.ndarray:
    ends = np.append(graph.rows, graph.columns)
    return np.bincount(ends, np.tile(weights, 2), graph.size).astype(float)


def _symmetric(graph: Graph, weights: np.ndarray, diagonal: np.ndarray) -> Any:
    """Return the matrix with a given diagonal and ``-weights`` at the edges."""
    shape = (graph.size,) * 2
    lower = sparse.coo_array((-weights, (graph.rows, graph.columns)), shape=shape)
    return (lower + lower.T + sparse.diags_array(diagonal)).tocsc()


def entries(pattern: Pattern, matrix: Any) -> np.ndarray:
    """Return the entries of a SciPy sparse matrix at the places of a pattern, (nnz,).

    :param pattern: the places.
    :param matrix: symmetric (n, n).
    """
    return np.asarray(matrix.tocsr()[pattern.rows, pattern.columns]).ravel()


def _inverted(matrix: Any) -> tuple[np.ndarray, float, np.ndarray]:
    """Return the diagonal of the inverse of a matrix, its log-determinant, and the row
    sums of the inverse.

    :param matrix: positive definite without positive entries off the diagonal, CSC.
    """
    from scipy.sparse.linalg import splu

    decomposition = splu(
        matrix, "MMD_AT_PLUS_A", diag_pivot_thresh=0, options={"SymmetricMode": True}
    )
    # No entry of the factor cancels, because entries off the diagonal stay negative.
    # Zero entries are padding.
    lower = sparse.csc_array(decomposition.L)
    lower.eliminate_zeros()
    lower.sort_indices()
    pivots = decomposition.U.diagonal()
    # With one thread, because threads of BLAS would wait for each other in many small
    # products.
    with threads_for(1):
        diagonal = _inverse_diagonal(lower, pivots)
    sums = decomposition.solve(np.ones(matrix.shape[0]))
    return diagonal[decomposition.perm_c], float(np.log(pivots).sum()), sums


def _inverse_diagonal(lower: Any, pivots: np.ndarray) -> np.ndarray:
    """Return the diagonal of the inverse of ``L D L'``.

    The recursion of Takahashi et al. (1973) goes through the columns, from the last to
    the first. The parent of a column is its first row below the diagonal, and the
    parent's rows contain all rows of the column below that. So the inverse at these
    rows is part of the inverse at the rows of the parent.

    :param lower: L, with a unit diagonal; CSC.
    :param pivots: the diagonal of D.
    """
    starts, rows, counts = lower.indptr, lower.indices, np.diff(lower.indptr)
    parents = np.append(rows, 0)[starts[:-1] + 1]
    waiting = np.bincount(parents[counts > 1], minlength=len(pivots))
    inverses: dict[int, np.ndarray] = {}
    diagonal = np.empty(len(pivots))
    for k in range(len(pivots) - 1, -1, -1):
        inverse = np.full((counts[k],) * 2, 1 / pivots[k])
        if counts[k] > 1:
            below, parent = slice(starts[k] + 1, starts[k + 1]), parents[k]
            known = rows[starts[parent] : starts[parent + 1]]
            places = np.searchsorted(known, rows[below])
            border = inverses[parent][places[:, None], places]
            cross = -border @ lower.data[below]
            inverse[1:, 1:] = border
            inverse[1:, 0] = inverse[0, 1:] = cross
            inverse[0, 0] -= cross @ lower.data[below]
            waiting[parent] -= 1
            if not waiting[parent]:
                del inverses[parent]
        if waiting[k]:
            inverses[k] = inverse
        diagonal[k] = inverse[0, 0]
    return diagonal
