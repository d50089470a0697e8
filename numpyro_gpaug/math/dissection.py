# SPDX-License-Identifier: Apache-2.0
"""Nested dissection of a graph, on the host.

A separator cuts each part of a graph in two, and the parts of one depth are cut all at
once, with a few calls of SciPy. The nodes of a part are sorted in a direction and cut
at the middle, so that all parts of a depth have about equal sizes. The separator is the
smallest set of nodes that covers the edges across (Koenig's theorem). The best of four
directions counts: two shortest paths between distant nodes, and their diagonals.

George (1973), Nested dissection of a regular finite element mesh.
"""

from __future__ import annotations

import numpy as np
from scipy import sparse
from scipy.sparse import csgraph

_Indices = np.ndarray
# The number of averages of neighbours' positions, which straighten the cuts of
# irregular meshes.
_AVERAGES = 60
# The largest relative difference of the sides of a cut between components, which needs
# no separator.
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
        # Only edges inside the new parts remain.
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
    parts = int(part.max()) + 1
    least = np.full(parts, len(part) + 1)
    right, cut = np.empty(len(part), bool), np.empty(len(part), bool)
    for position in _positions(graph, component, count).T:
        if least.max() <= 1:
            break
        order = np.lexsort((position, component, part))
        trial = np.empty(len(part), bool)
        trial[order] = _second_half(part[order], component[order])
        cover = _cover(trial, rows, columns)
        needed = np.bincount(part[cover], minlength=parts)
        better = (needed < least)[part]
        least = np.minimum(needed, least)
        right[better], cut[better] = trial[better], cover[better]
    return right, cut


def _positions(graph: sparse.csr_array, component: _Indices, count: int) -> np.ndarray:
    """Return the positions of each node in four directions, (size, 4): between two
    pairs of distant nodes of its component, such as the opposite corners of a square,
    and diagonally to both, which is along the sides of a square."""
    ends = np.empty(count, np.int64)
    ends[component[::-1]] = np.arange(len(component))[::-1]
    near = _levels(graph, ends)
    corners: list[np.ndarray] = []
    for k in range(4):
        if k == 2:
            # A node that is far from both ends of the first pair.
            near = np.minimum(*corners)
        ends = _last(near, component)
        near = _levels(graph, ends)
        corners.append(near)
    along, across = corners[0] - corners[1], corners[2] - corners[3]
    position = np.stack([along + across, along - across, along, across], 1)
    degree = np.diff(graph.indptr)
    shares = np.repeat(0.5 / np.maximum(degree, 1), degree).astype(np.float32)
    own = np.where(degree > 0, 0.5, 1).astype(np.float32)
    averages = sparse.csr_array((shares, graph.indices, graph.indptr), graph.shape)
    averages = (averages + sparse.diags_array(own)).tocsr()
    position = position.astype(np.float32)
    for _ in range(_AVERAGES):
        position = averages @ position
    return position


def _last(level: _Indices, component: _Indices) -> _Indices:
    """Return the node of the highest level in each component."""
    order = np.lexsort((level, component))
    return order[np.flatnonzero(np.diff(component[order], append=-1))]


def _levels(graph: sparse.csr_array, starts: _Indices) -> _Indices:
    """Return the distance of each node from the start in its component."""
    size = graph.shape[0]
    # An additional node that is joined to all starts makes this a single search.
    indptr = np.append(graph.indptr, graph.indptr[-1] + len(starts))
    indices = np.append(graph.indices, starts).astype(np.int32)
    joined = sparse.csr_array((np.ones(len(indices)), indices, indptr), (size + 1,) * 2)
    _, before = csgraph.breadth_first_order(joined, size)
    before[size] = size
    level = (before != size).astype(np.int64)
    while (step := level[before]).any():
        level, before = level + step, before[before]
    return level[:size]


def _second_half(part: _Indices, component: _Indices) -> _Indices:
    """Return whether each node is in the second half of its part, for nodes sorted by
    part and component. If a component ends near the middle, the part is cut there."""
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
    # Alternating paths start at unmatched nodes on the left. They follow any edge to
    # the right, and an edge of the matching back.
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
