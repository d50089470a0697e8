# SPDX-License-Identifier: Apache-2.0
"""Nested dissection of a graph, on the host.

A separator cuts each part of a graph in two, and the parts of one depth are cut all at
once, with a few calls of SciPy. The nodes of a part are sorted along its longest
shortest path and cut at the middle. The separator is the smallest set of nodes that
covers the edges across (Koenig's theorem), so that it is small and both sides have
about equal sizes: all parts of a depth are alike.

George (1973), Nested dissection of a regular finite element mesh.
"""

from __future__ import annotations

import numpy as np
from scipy import sparse
from scipy.sparse import csgraph

_Indices = np.ndarray
# Averages of neighbours' positions straighten the cuts of irregular meshes.
_AVERAGES = 10
# A cut between components needs no separator. The sides may differ by this share.
_UNEVEN = 0.1


def dissect(
    size: int, rows: _Indices, columns: _Indices, leaf: int
) -> tuple[_Indices, _Indices]:
    """Return the depth of the separator or leaf that each node belongs to, and its
    place in the binary tree.

    :param size: the number of nodes.
    :param rows: one end of each edge, in both directions and without loops, sorted.
    :param columns: the other end.
    :param leaf: parts are cut until all have at most this many nodes.
    :return: ``(depth, code)``, each (size,). A node of code c at depth d is in the tree
        below the code ``c >> k`` at depth ``d - k``.
    """
    depth, code = np.zeros(size, np.int64), np.zeros(size, np.int64)
    nodes = np.arange(size)
    while True:
        _, part = np.unique(code[nodes], return_inverse=True)
        if not len(nodes) or np.bincount(part).max() <= leaf:
            return depth, code
        graph = _graph(len(nodes), rows, columns)
        right, cut = _bisected(graph, part, rows, columns)
        rest = ~cut
        nodes, right = nodes[rest], right[rest]
        depth[nodes] += 1
        code[nodes] = 2 * code[nodes] + right
        # Only edges inside of the new parts are left.
        new = np.cumsum(rest) - 1
        kept = rest[rows] & rest[columns]
        rows, columns = new[rows[kept]], new[columns[kept]]
        kept = right[rows] == right[columns]
        rows, columns = rows[kept], columns[kept]


def _graph(size: int, rows: _Indices, columns: _Indices) -> sparse.csr_array:
    """Return the adjacency matrix of sorted edges."""
    starts = np.append(0, np.cumsum(np.bincount(rows, minlength=size)))
    return sparse.csr_array((np.ones(len(rows)), columns, starts), (size, size))


def _bisected(
    graph: sparse.csr_array, part: _Indices, rows: _Indices, columns: _Indices
) -> tuple[_Indices, _Indices]:
    """Return whether each node is on the second side of its part, and whether it is in
    the separator."""
    count, component = csgraph.connected_components(graph, directed=False)
    position = _positions(graph, component, count)
    order = np.lexsort((position, component, part))
    right = np.empty(len(part), bool)
    right[order] = _second_half(part[order], component[order])
    return right, _cover(right, rows, columns)


def _positions(graph: sparse.csr_array, component: _Indices, count: int) -> np.ndarray:
    """Return the position of each node between the ends of its component."""
    ends = np.empty(count, np.int64)
    ends[component[::-1]] = np.arange(len(component))[::-1]
    levels = []
    for _ in range(3):
        level, order = _levels(graph, ends)
        levels.append(level)
        # The last node that the search reaches in each component.
        ends[component[order]] = order
    position = (levels[1] - levels[2]).astype(float)
    degree = np.maximum(np.diff(graph.indptr), 1)
    for _ in range(_AVERAGES):
        position = (position + (graph @ position) / degree) / 2
    return position


def _levels(graph: sparse.csr_array, starts: _Indices) -> tuple[_Indices, _Indices]:
    """Return the distance of each node from the start in its component, and the nodes
    in the order of a breadth-first search."""
    size = graph.shape[0]
    # A node that is joined to all starts makes this one search.
    indptr = np.append(graph.indptr, graph.indptr[-1] + len(starts))
    indices = np.append(graph.indices, starts).astype(np.int32)
    joined = sparse.csr_array((np.ones(len(indices)), indices, indptr), (size + 1,) * 2)
    order, before = csgraph.breadth_first_order(joined, size)
    before[size] = size
    level = (before != size).astype(np.int64)
    while (step := level[before]).any():
        level, before = level + step, before[before]
    return level[:size], order[1:]


def _second_half(part: _Indices, component: _Indices) -> _Indices:
    """Return whether each node is in the second half of its part, for nodes sorted by
    part and component. Halves end between components where there is one near."""
    begins = np.flatnonzero(np.diff(part, prepend=-1))
    sizes = np.diff(np.append(begins, len(part)))
    middle = begins + (sizes + 1) // 2
    first = np.flatnonzero(np.diff(component, prepend=-1))
    here = part[first]
    distance = np.abs(first - middle[here])
    nearest = first[
        np.lexsort((distance, here))[np.searchsorted(here, np.arange(len(begins)))]
    ]
    near = np.abs(nearest - middle) <= _UNEVEN * sizes
    near &= nearest > begins
    return np.arange(len(part)) >= np.where(near, nearest, middle)[part]


def _cover(right: _Indices, rows: _Indices, columns: _Indices) -> _Indices:
    """Return the smallest set of nodes that covers all edges between the sides."""
    size = len(right)
    across = ~right[rows] & right[columns]
    left_ends, right_ends = rows[across], columns[across]
    shape = (size, size)
    between = sparse.csr_array(
        (np.ones(len(left_ends)), (left_ends, right_ends)), shape
    )
    match = csgraph.maximum_bipartite_matching(between, perm_type="column")
    matched = np.flatnonzero(match >= 0)
    # Alternating paths start at unmatched nodes on the left. They go right along any
    # edge, and back along edges of the matching.
    ends = np.zeros(size, bool)
    ends[left_ends] = True
    starts = np.flatnonzero(ends & (match < 0))
    tails = np.concatenate([left_ends, match[matched], np.full(len(starts), size)])
    heads = np.concatenate([right_ends, matched, starts])
    shape = (size + 1, size + 1)
    paths = sparse.csr_array((np.ones(len(tails)), (tails, heads)), shape)
    reached = np.zeros(size + 1, bool)
    reached[csgraph.breadth_first_order(paths, size, return_predecessors=False)] = True
    reached = reached[:size]
    return (ends & ~reached) | (right & reached)
