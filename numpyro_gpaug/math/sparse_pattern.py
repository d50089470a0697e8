# SPDX-License-Identifier: Apache-2.0
"""Places of the entries of sparse symmetric matrices, and how to eliminate their
nodes."""

from __future__ import annotations

from dataclasses import dataclass
from functools import cached_property, lru_cache
from typing import NamedTuple

import jax.numpy as jnp
import numpy as np
from jax import Array
from jax.typing import ArrayLike

from numpyro_gpaug.math.fingerprints import ByContents

_Indices = np.ndarray
# The largest size of a part of the graph that is not cut.
_PART = 8
# The largest number of neighbours of a node that is eliminated first; and the largest
# number of nodes for each such node.
_NEAR, _SHARE = 4, 16
# Times in nanoseconds on one core of a CPU: for an operation of a matrix product, for
# the cube of the number of pivots, for an entry of a border that is passed on, for an
# entry of a front that is copied, for a front, and for a group of fronts. The last is
# mostly compilation, divided by some hundred runs.
_PRODUCT, _FACTORISED, _PASSED, _COPIED, _FRONT, _GROUP = 0.025, 0.25, 10, 1.5, 1e3, 1e6


@dataclass(frozen=True, eq=False)
class Pattern(ByContents):
    """The places of the entries of a sparse symmetric matrix: those of the lower
    triangle, with the whole diagonal.

    Patterns are equal if their entries are, and have a hash, so that a pattern can be a
    static argument of a compiled function.

    :param size: the number of rows.
    :param rows: the row of each entry, (nnz,), int32, sorted by row and column.
    :param columns: the column of each entry, at most the row.
    """

    size: int
    rows: _Indices
    columns: _Indices
    _contents = "size", "rows", "columns"

    @classmethod
    def of(cls, size: int, rows: ArrayLike, columns: ArrayLike) -> Pattern:
        """Return the pattern that contains given entries and the diagonal.

        :param size: the number of rows.
        :param rows: row of each entry, in any order and either triangle. Entries may
            repeat.
        :param columns: the columns.
        :raises ValueError: for an index outside of the matrix.
        """
        every = np.arange(size)
        given = [np.asarray(x, np.int64).reshape(-1) for x in (rows, columns)]
        for x in given:
            if len(x) and not 0 <= x.min() <= x.max() < size:
                raise ValueError(
                    f"indices of a matrix of {size} rows must be from 0 to {size - 1}, "
                    f"got {x.min()} to {x.max()}"
                )
        ends = [np.concatenate([x, every]) for x in given]
        keys = np.unique(np.maximum(*ends) * size + np.minimum(*ends))
        return cls(size, *(x.astype(np.int32) for x in np.divmod(keys, max(size, 1))))

    def places(self, rows: ArrayLike, columns: ArrayLike) -> Array:
        """Return the place of each entry in an array of values, by binary search.

        :param rows: integers, in either triangle; they may be traced.
        :param columns: integers; the shapes broadcast.
        :return: int32, the number of entries where the pattern does not have the entry.
        """
        i, j = jnp.broadcast_arrays(
            *(jnp.asarray(x, jnp.int32) for x in (rows, columns))
        )
        row, column = jnp.maximum(i, j), jnp.minimum(i, j)
        inside = (column >= 0) & (row < self.size)
        row = jnp.clip(row, 0, self.size - 1)
        starts = jnp.asarray(self.starts)
        low, high = _at(starts, row), _at(starts, row + 1)
        # The last entry of a row is on the diagonal, so no row is empty.
        for _ in range(int(np.diff(self.starts).max()).bit_length()):
            middle = (low + high) // 2
            right = _at(jnp.asarray(self.columns), middle) <= column
            proceed = high - low > 1
            low = jnp.where(proceed & right, middle, low)
            high = jnp.where(proceed & ~right, middle, high)
        found = inside & (_at(jnp.asarray(self.columns), low) == column)
        return jnp.where(found, low, len(self.rows))

    @cached_property
    def starts(self) -> _Indices:
        """The place of the first entry of each row, and the number of entries."""
        counts = np.bincount(self.rows, minlength=self.size)
        return np.append(0, np.cumsum(counts)).astype(np.int32)

    def find(self, rows: _Indices, columns: _Indices) -> _Indices:
        """Return the place of each entry in an array of values, as :meth:`places`, on
        the host."""
        high, low = np.maximum(rows, columns), np.minimum(rows, columns)
        wanted = high.astype(np.int64) * self.size + low
        keys = self.rows.astype(np.int64) * self.size + self.columns
        found = np.minimum(np.searchsorted(keys, wanted), len(keys) - 1)
        return np.where(keys[found] == wanted, found, len(keys))

    @property
    def diagonal(self) -> _Indices:
        """The places of the diagonal, (size,): each is the last entry of its row."""
        return self.starts[1:] - 1

    @property
    def multiplicity(self) -> _Indices:
        """The number of times that each entry is in the matrix, (nnz,): once on the
        diagonal, and twice elsewhere."""
        return 2 - (self.rows == self.columns)

    @cached_property
    def components(self) -> _Indices:
        """The connected component of each node, (size,)."""
        from scipy.sparse import coo_array, csgraph  # slow to import

        edges = np.ones(len(self.rows)), (self.rows, self.columns)
        graph = coo_array(edges, shape=(self.size,) * 2)
        return csgraph.connected_components(graph, directed=False)[1]

    @cached_property
    def colours(self) -> _Indices:
        """A colour of each node, (size,), such that neighbours have different ones."""
        rows, columns = _both_directions(self)
        starts = np.searchsorted(rows, np.arange(self.size + 1))
        found = np.full(self.size, -1)
        for node in range(self.size):
            near = found[columns[starts[node] : starts[node + 1]]]
            free = np.ones(len(near) + 1, bool)
            free[near[(near >= 0) & (near < len(free))]] = False
            found[node] = free.argmax()
        return found

    @cached_property
    def outer(self) -> _Indices:
        """The nodes that are eliminated before all others, sorted. No two of them are
        neighbours, and all neighbours of such a node are neighbours of one another, so
        that no entries are filled in. Empty if they are few, or all nodes."""
        rows, columns = _both_directions(self)
        starts = np.searchsorted(rows, np.arange(self.size + 1))
        degrees = np.diff(starts)
        found = degrees <= _NEAR
        for degree in range(2, _NEAR + 1):
            nodes = np.flatnonzero(degrees == degree)
            near = columns[starts[nodes][:, None] + np.arange(degree)]
            i, j = near[:, :, None], near[:, None]
            found[nodes] = (self.find(i, j) < len(self.rows)).all((1, 2))
        # The first of two neighbours.
        earlier = found[rows] & found[columns] & (columns < rows)
        found[rows[earlier]] = False
        enough = self.size <= _SHARE * found.sum() and not found.all()
        return np.flatnonzero(found & enough)

    @property
    def elimination(self) -> Elimination:
        """The order of elimination. It is cached."""
        return _eliminated(self)


def _at(values: Array, places: Array) -> Array:
    return values.at[places].get(mode="clip", wrap_negative_indices=False)


class Group(NamedTuple):
    """Fronts that are eliminated together: m dense matrices with P pivots and B border
    nodes each, R = P + B. Fronts with fewer are padded.

    :param pivots: the nodes that a front eliminates, (m, P); the size of the matrix for
        padding.
    :param border: the places of the border nodes among the pivots of all groups,
        counted from one, (m, B); 0 for padding.
    :param parent: the front of the group above that each front passes its border to,
        (m,).
    :param up: the places of the border nodes in the parent's front, (m, B); -1 for
        padding.
    """

    pivots: _Indices
    border: _Indices
    parent: _Indices
    up: _Indices

    @property
    def width(self) -> int:
        """The number of nodes of a front, R."""
        return self.pivots.shape[1] + self.up.shape[1]


class Elimination(NamedTuple):
    """The order in which nodes are eliminated.

    Fronts are stored as the columns of their pivots, (m, R, P), one group after the
    other.

    :param groups: the last to be eliminated first.
    :param nodes: the place of each node among the pivots of all groups, (size,).
    :param places: the place of each entry of the matrix in the fronts, (nnz,).
    :param entries: the places in the fronts of all numbers that a matrix sets, sorted:
        its entries, in both triangles of the pivots, and ones on the diagonal of
        padding.
    :param sources: the places of their values; the number of values for a one.
    :param diagonal: the places of the diagonal entries of all (m, P, P) blocks of
        pivots, one group after the other.
    """

    groups: tuple[Group, ...]
    nodes: _Indices
    places: _Indices
    entries: _Indices
    sources: _Indices
    diagonal: _Indices


@lru_cache(maxsize=16)
def _eliminated(pattern: Pattern) -> Elimination:
    # SciPy's graph functions are slow to import.
    from numpyro_gpaug.math.dissection import dissect

    rows, columns = _both_directions(pattern)
    inner = np.ones(pattern.size, bool)
    inner[pattern.outer] = False
    new, kept = np.cumsum(inner) - 1, inner[rows] & inner[columns]
    depth, code = np.zeros((2, pattern.size), np.int64)
    depth[inner], code[inner] = dissect(
        int(inner.sum()), new[rows[kept]], new[columns[kept]], _PART
    )
    if len(pattern.outer):
        _attach(pattern.outer, (rows, columns), depth, code)
    borders = _borders(pattern.size, rows, columns, depth, code)
    tops = _groups(depth, code, borders, apart=len(pattern.outer) > 0)
    return _Builder(pattern, depth, code, borders, tops).build()


def _attach(
    outer: _Indices, ends: tuple[_Indices, _Indices], depth: _Indices, code: _Indices
) -> None:
    """Add outer nodes to the tree. Each becomes a leaf below the deepest of its
    neighbours, in a part whose border already contains this neighbour. All leaves have
    the same depth.

    :param outer: the nodes.
    :param ends: the ends of each edge, in both directions, sorted.
    :param depth: the depth of each node, which is set here for outer nodes.
    :param code: its place in the tree, likewise.
    """
    size, (rows, columns) = len(depth), ends
    inner = np.ones(size, bool)
    inner[outer] = False
    deepest = int(depth[inner].max(initial=0))
    near, below = np.full(size, -1), np.arange(size)
    # If there are several edges, the last one counts.
    order = np.argsort(depth[columns], kind="stable")
    rows, columns = rows[order], columns[order]
    hung = ~inner[rows]
    near[rows[hung]] = columns[hung]
    lower = inner[rows] & inner[columns] & (depth[columns] > depth[rows])
    below[rows[lower]] = columns[lower]
    at = below[near]
    # Nodes without neighbours are distributed evenly.
    under = np.arange(size) % (1 << deepest)
    under = np.where(near < 0, under, code[at] << (deepest - depth[at]))[outer]
    parents, parent = np.unique(under, return_inverse=True)
    rank, counts = _ranks(parent, len(parents))
    bits = int(counts.max()).bit_length()
    depth[outer], code[outer] = deepest + 1 + bits, (under << (1 + bits)) + rank


def _both_directions(pattern: Pattern) -> tuple[_Indices, _Indices]:
    """Return the edges of the graph, sorted, in both directions and without loops."""
    apart = pattern.rows != pattern.columns
    i, j = (x[apart].astype(np.int64) for x in (pattern.rows, pattern.columns))
    keys = np.sort(np.concatenate([i * pattern.size + j, j * pattern.size + i]))
    rows, columns = np.divmod(keys, max(pattern.size, 1))
    return rows, columns


def _borders(
    size: int, rows: _Indices, columns: _Indices, depth: _Indices, code: _Indices
) -> list[_Indices]:
    """Return, for each depth, the borders of the parts of the tree: sorted keys
    ``code * size + node`` of the nodes above that are neighbours of the part."""
    above = depth[columns] < depth[rows]
    keys, at = code[rows[above]] * size + columns[above], depth[rows[above]]
    order = np.argsort(at, kind="stable")
    cuts = np.searchsorted(at[order], np.arange(1, depth.max(initial=0) + 1))
    by_depth = np.split(keys[order], cuts)
    borders = []
    passed = np.zeros(0, np.int64)
    for d in range(len(by_depth) - 1, -1, -1):
        border = np.unique(np.concatenate([by_depth[d], passed]))
        borders.append(border)
        part, node = np.divmod(border, size)
        higher = depth[node] < d - 1
        passed = (part[higher] >> 1) * size + node[higher]
    return borders[::-1]


def _groups(
    depth: _Indices, code: _Indices, borders: list[_Indices], *, apart: bool
) -> list[int]:
    """Return the depths at which groups of fronts begin. A group joins the separators
    of consecutive depths where that costs less than to eliminate them one after
    another; but the deepest are a group of their own if they are to be ``apart``."""
    deepest = int(depth.max(initial=0))
    size = len(depth)
    best = np.full(deepest + 2, np.inf)
    best[deepest + 1], ends = 0.0, np.zeros(deepest + 1, np.int64)
    for top in range(deepest, -1, -1):
        below = depth >= top
        over = depth[below] - top
        part = np.unique(code[below] >> over, return_inverse=True)[1]
        count = int(part.max(initial=-1)) + 1
        _, sizes = np.unique(borders[top] // max(size, 1), return_counts=True)
        border = int(sizes.max(initial=0))
        pivots = np.zeros(count, np.int64)
        last = deepest - (apart and top < deepest)
        for end in range(top, last + 1):
            pivots += np.bincount(part[over == end - top], minlength=count)
            here = _cost(count, int(pivots.max(initial=0)), border)
            if here + best[end + 1] < best[top]:
                best[top], ends[top] = here + best[end + 1], end + 1
    tops = [0]
    while ends[tops[-1]] <= deepest:
        tops.append(int(ends[tops[-1]]))
    return tops


def _cost(count: int, p: int, b: int) -> float:
    """Return the cost of a group of fronts with p pivots and b border nodes."""
    products = _PRODUCT * (6 * b * p**2 + 4 * p * b**2) + _FACTORISED * p**3
    moved = _PASSED * b**2 + _COPIED * (p + b) ** 2
    return count * (products + moved + _FRONT) + _GROUP


class _Builder:
    """The index arrays of an elimination."""

    def __init__(
        self,
        pattern: Pattern,
        depth: _Indices,
        code: _Indices,
        borders: list[_Indices],
        tops: list[int],
    ) -> None:
        self.pattern, self.size = pattern, pattern.size
        self.group = np.searchsorted(tops, depth, side="right") - 1
        begins = np.array(tops)
        self.codes, self.borders, self.counts = [], [], []
        self.front = np.zeros(self.size, np.int64)
        self.place = np.zeros(self.size, np.int64)
        for g, top in enumerate(tops):
            inside = self.group >= g
            codes = np.unique(code[inside] >> (depth[inside] - top))
            mine = np.flatnonzero(self.group == g)
            self.front[mine] = np.searchsorted(
                codes, code[mine] >> (depth[mine] - begins[g])
            )
            self.place[mine], counts = _ranks(self.front[mine], len(codes))
            part, node = np.divmod(borders[top], max(self.size, 1))
            # Keys are numbered by front, not by code.
            self.borders.append(np.searchsorted(codes, part) * self.size + node)
            self.codes.append(codes)
            # A cut between components has no separator, so its front is padding.
            self.counts.append(int(counts.max(initial=1)))
        self.tops = tops
        sizes = [m * (p + b) * p for m, p, b in map(self._widths, range(len(tops)))]
        self.offsets = np.append(0, np.cumsum(sizes))

    def build(self) -> Elimination:
        slots = self._slots()
        places, mirrors = self._entries()
        both = np.flatnonzero(mirrors >= 0)
        groups = tuple(self._group(g, slots) for g in range(len(self.tops)))
        ones, diagonal, start = [], [], 0
        for g, group in enumerate(groups):
            m, p, b = self._widths(g)
            front, place = np.arange(m)[:, None], np.arange(p)
            diagonal.append(start + front * p * p + place * (p + 1))
            start += m * p * p
            corner = self.offsets[g] + front * (p + b) * p + place * (p + 1)
            ones.append(corner[group.pivots == self.size])
        padding = np.concatenate(ones)
        entries = np.concatenate([places, mirrors[both], padding])
        none = np.full(len(padding), len(places))
        sources = np.concatenate([np.arange(len(places)), both, none])
        order = np.argsort(entries)
        arrays = (
            slots, places, entries[order], sources[order],
            np.concatenate([x.reshape(-1) for x in diagonal]),
        )  # fmt: skip
        return Elimination(groups, *(x.astype(np.int32) for x in arrays))

    def _slots(self) -> _Indices:
        """Return the place of each node among the pivots of all groups."""
        widths = [len(x) * p for x, p in zip(self.codes, self.counts, strict=True)]
        first = np.append(0, np.cumsum(widths))[self.group]
        counts = np.array(self.counts)[self.group]
        return first + self.front * counts + self.place

    def _locate(self, g: int, front: _Indices, node: _Indices) -> _Indices:
        """Return the places of nodes in fronts of a group, as pivots or in the
        border."""
        border = self.borders[g]
        firsts = np.searchsorted(border, front * self.size)
        rank = np.searchsorted(border, front * self.size + node) - firsts
        own = (self.group[node] == g) & (self.front[node] == front)
        return np.where(own, self.place[node], self.counts[g] + rank)

    def _widths(self, g: int) -> tuple[int, int, int]:
        """Return the numbers of fronts, pivots and border nodes."""
        front = self.borders[g] // max(self.size, 1)
        most = int(np.bincount(front, minlength=1).max(initial=0))
        return len(self.codes[g]), self.counts[g], most

    def _entries(self) -> tuple[_Indices, _Indices]:
        """Return the place of each entry of the matrix in the fronts, and the place of
        its mirror image in the block of pivots; -1 for none."""
        i, j = self.pattern.rows.astype(np.int64), self.pattern.columns.astype(np.int64)
        swap = self.group[i] > self.group[j]
        first, other = np.where(swap, i, j), np.where(swap, j, i)
        holder = self.group[first]
        places, mirrors = np.empty(len(i), np.int64), np.full(len(i), -1)
        for g in range(len(self.tops)):
            here = np.flatnonzero(holder == g)
            m, p, b = self._widths(g)
            front, u, v = self.front[first[here]], first[here], other[here]
            row, column = self._locate(g, front, v), self.place[u]
            corner = self.offsets[g] + front * (p + b) * p
            places[here] = corner + row * p + column
            twin = (row < p) & (row != column)
            mirrors[here[twin]] = (corner + column * p + row)[twin]
        return places, mirrors

    def _group(self, g: int, slots: _Indices) -> Group:
        m, p, b = self._widths(g)
        pivots = np.full((m, p), self.size)
        mine = np.flatnonzero(self.group == g)
        pivots[self.front[mine], self.place[mine]] = mine
        front, node = np.divmod(self.borders[g], max(self.size, 1))
        place = front, _ranks(front, m)[0]
        border, parent = np.zeros((m, b), np.int64), np.zeros(m, np.int64)
        border[place] = 1 + slots[node]
        up = np.full((m, b), -1)
        if g:
            shift = self.tops[g] - self.tops[g - 1]
            parent = np.searchsorted(self.codes[g - 1], self.codes[g] >> shift)
            up[place] = self._locate(g - 1, parent[front], node)
        return Group(*(x.astype(np.int32) for x in (pivots, border, parent, up)))


def _ranks(keys: _Indices, count: int) -> tuple[_Indices, _Indices]:
    """Return the rank of each element among the elements of its key, and the number of
    elements of each key."""
    counts = np.bincount(keys, minlength=count)
    order = np.argsort(keys, kind="stable")
    starts = np.append(0, np.cumsum(counts))[:-1]
    ranks = np.empty(len(keys), np.int64)
    ranks[order] = np.arange(len(keys)) - starts[keys[order]]
    return ranks, counts
