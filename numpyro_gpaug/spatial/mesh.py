# SPDX-License-Identifier: Apache-2.0
"""Triangulated regions of the plane, and piecewise linear functions on them."""

from __future__ import annotations

from functools import cached_property, partial
from typing import Any, NamedTuple, NoReturn

import jax
import jax.numpy as jnp
import numpy as np
from jax import Array, lax
from jax.typing import ArrayLike
from scipy import sparse

from numpyro_gpaug._display import Displayed, Rows
from numpyro_gpaug.math.fingerprints import ByContents
from numpyro_gpaug.spatial.polygons import contains
from numpyro_gpaug.spatial.triangulation import doubled_areas, graded, smallest_angle

# A point outside of all triangles by less than this share of one counts as inside.
_TOLERANCE = 1e-3
# The largest number of triangles in a cell of the search grid; and the largest number
# of cells per triangle.
_CANDIDATES, _CELLS = 24, 8


class Elements(NamedTuple):
    """Finite elements of the piecewise linear functions on a mesh (Lindgren, Rue and
    Lindstrom, 2011, Appendix A).

    :param mass: the integral of the function of each node, (n,): the diagonal of the
        lumped mass matrix C.
    :param stiffness: G, the integrals of products of gradients, (n, n), SciPy sparse.
    """

    mass: np.ndarray
    stiffness: Any


@jax.tree_util.register_static
class Mesh(ByContents, Displayed):
    """A triangulated region of the plane.

    :meth:`around` makes one from data, if needed of a region with a coast. The
    constructor takes any triangulation.

    Meshes are static: equal meshes share compiled programs. In float32, subtract a
    centre from large coordinates (eastings in metres) first.

    :param nodes: coordinates, (n, 2).
    :param triangles: three nodes each, (t, 3), in any orientation.
    :raises ValueError: for other shapes, nodes that are not finite, occur twice or are
        in no triangle, indices of nodes that do not exist, and triangles without area.

    **Example**

    >>> import numpy as np
    >>> square = np.array([[0.0, 0.0], [1.0, 0.0], [1.0, 1.0], [0.0, 1.0]])
    >>> mesh = Mesh(square, [[0, 1, 2], [0, 2, 3]])
    >>> nodes, weights = mesh.project(np.array([[0.5, 0.25]]))
    >>> nodes.tolist(), weights.tolist()
    ([[0, 1, 2]], [[0.5, 0.25, 0.25]])
    """

    _contents = "nodes", "triangles"

    def __init__(self, nodes: ArrayLike, triangles: ArrayLike) -> None:
        self.nodes = np.array(nodes, float)
        self.triangles = np.array(triangles, np.int32)
        _check(self.nodes, self.triangles)
        turned = doubled_areas(self.nodes, self.triangles) < 0
        self.triangles[turned] = self.triangles[turned][:, [0, 2, 1]]
        self.nodes.flags.writeable = self.triangles.flags.writeable = False

    @classmethod
    def around(
        cls,
        points: ArrayLike,
        max_edge: float | tuple[float, float],
        offset: float | None = None,
        boundary: Any = None,
    ) -> Mesh:
        """Return a mesh of well-shaped triangles around points.

        The nodes form a triangular lattice inside the convex hull of the points, and
        rings with growing distances outside. Points need not be nodes, and may repeat.
        Angles are at least 25 degrees in all cases that were tested, unless the
        ``offset`` is shorter than an edge.

        :param points: (n, 2). One is enough.
        :param max_edge: the longest edge inside and outside of the hull, or a number
            for both. Inside, a tenth of the range of the field keeps covariances
            within about 0.02 of the Matern correlation, a fifth within 0.08. Outside,
            half of the range is enough.
        :param offset: the distance of the boundary from the hull. The default is half
            of the extent of the points, or five outer edges if that is more. The
            boundary makes the variance too large by about 3% at a distance of a range,
            and by a third at half a range.
        :param boundary: the region, a polygon (k, 2) or a list of several, such as a
            coast with lakes and islands: a place belongs to the region if an odd number
            of them contain it. The mesh has only triangles whose centre does, or that
            contain a point. The correlation of a field then goes around what is left
            out. Without it, correlation crosses concave coasts. Edges should be shorter
            than the straits and headlands that matter. The variance along a coast is
            too large, as at any boundary.
        :raises ValueError: for points of another shape or that are not finite, edges
            or an offset that are not positive, an outer edge that is shorter than the
            inner one, and a boundary that is no polygon or contains no triangle.

        **Example**

        >>> import numpy as np
        >>> points = np.random.default_rng(0).random((100, 2))
        >>> Mesh.around(points, max_edge=(0.1, 0.3), offset=0.5)
        Mesh
          nodes           518
          triangles       1001
          smallest angle  33 degrees
        """
        points = np.asarray(points, float)
        if points.ndim != 2 or points.shape[1] != 2 or not len(points):
            raise ValueError(f"points has shape {points.shape}; expected (n, 2)")
        if not np.isfinite(points).all():
            raise ValueError(f"points[{_first(~np.isfinite(points))}] is not finite")
        inner, outer = np.broadcast_to(np.asarray(max_edge, float), 2).tolist()
        if offset is None:
            offset = max(np.ptp(points, axis=0).max() / 2, 5 * outer)
        if not 0 < inner <= outer or not offset > 0:
            raise ValueError(
                f"max_edge is {max_edge} and offset {offset}. Both must be positive, "
                "and the outer edge not shorter than the inner one"
            )
        # Qhull squares coordinates, such as northings in metres.
        origin = points.mean(0)
        nodes, triangles = graded(points - origin, inner, outer, float(offset))
        whole = cls(nodes + origin, triangles)
        return whole if boundary is None else whole._inside(_rings(boundary), points)

    def _inside(self, rings: list[np.ndarray], points: np.ndarray) -> Mesh:
        """Return the part of the mesh in a region; see :meth:`around`."""
        centres = self.nodes[self.triangles].mean(1)
        kept = np.sum([contains(ring, centres) for ring in rings], 0) % 2 == 1
        if not kept.any():
            raise ValueError(
                "boundary contains no triangle of the mesh. Use the coordinates of the "
                "points, or shorter edges (max_edge)"
            )
        corners = np.sort(np.asarray(self.project(points)[0]), 1)
        both = np.concatenate([corners, np.sort(self.triangles, 1)])
        _, number = np.unique(both, axis=0, return_inverse=True)
        own, of_points = number[len(corners) :], number[: len(corners)]
        triangles = self.triangles[kept | np.isin(own, of_points)]
        used, places = np.unique(triangles, return_inverse=True)
        return Mesh(self.nodes[used], places.reshape(-1, 3))

    @property
    def size(self) -> int:
        """The number of nodes n."""
        return len(self.nodes)

    @cached_property
    def elements(self) -> Elements:
        """The finite elements."""
        nodes, triangles, size = self.nodes, self.triangles, self.size
        doubled = doubled_areas(nodes, triangles)
        mass = np.bincount(triangles.ravel(), np.repeat(doubled / 6, 3), size)
        corners = nodes[triangles]
        # The edge opposite to each corner.
        edges = np.roll(corners, -2, 1) - np.roll(corners, -1, 1)
        blocks = edges @ np.swapaxes(edges, 1, 2) / (2 * doubled[:, None, None])
        rows = np.repeat(triangles, 3, axis=1).ravel()
        columns = np.tile(triangles, (1, 3)).ravel()
        entries = sparse.coo_array((blocks.ravel(), (rows, columns)), shape=(size,) * 2)
        return Elements(mass, entries.tocsr())

    def project(self, X: ArrayLike) -> tuple[Array, Array]:
        """Return the nodes of the triangle around each point, and the weights with
        which a piecewise linear function interpolates their values.

        :param X: points, (N, 2). They may be traced.
        :return: nodes (N, 3), integers, and weights (N, 3), which sum to one. They are
            NaN for traced points outside of the mesh.
        :raises ValueError: for points of another shape, and for points outside of the
            mesh if they are not traced; it states the farthest.
        """
        X = jnp.asarray(X)
        X = X.astype(jnp.result_type(X, float))
        if X.ndim != 2 or X.shape[1] != 2:
            raise ValueError(f"points have shape {X.shape}; expected (N, 2)")
        if isinstance(X, jax.core.Tracer):
            return _located(self, X)
        with jax.ensure_compile_time_eval():
            found = _located(self, X)
            outside = np.isnan(found[1]).any(1)
        if outside.any():
            self._refuse(np.asarray(X, float), np.flatnonzero(outside))
        return found

    def _refuse(self, X: np.ndarray, outside: np.ndarray) -> NoReturn:
        """Raise for points outside of the mesh.

        :param X: all points, (N, 2).
        :param outside: rows of the points.
        """
        if not np.isfinite(X).all():
            row = _first(~np.isfinite(X))
            raise ValueError(f"the point in row {row} is {X[row].tolist()}")
        distances = self._distances(X[outside])
        far = np.argmax(distances)
        row, distance = outside[far], distances[far]
        raise ValueError(
            f"{len(outside)} of {len(X)} points are outside of the mesh. The farthest, "
            f"in row {row}, is {X[row].tolist()}, which is {distance:.3g} from the "
            "mesh. Make the mesh around these points, too, or with an offset that is "
            f"larger by {distance:.2g} or more (Mesh.around(points, max_edge, offset=))"
        )

    def _distances(self, X: np.ndarray) -> np.ndarray:
        """Return the distances of points from the boundary, (N,)."""
        ends = np.sort(self.triangles[:, [[0, 1], [1, 2], [2, 0]]].reshape(-1, 2), 1)
        sides, counts = np.unique(ends, axis=0, return_counts=True)
        found = np.full(len(X), np.inf)
        for start, stop in self.nodes[sides[counts == 1]]:
            side = stop - start
            share = np.clip((X - start) @ side / (side @ side), 0, 1)
            away = X - start - share[:, None] * side
            found = np.minimum(found, np.linalg.norm(away, axis=1))
        return found

    @cached_property
    def _grid(self) -> _Grid:
        corners = self.nodes[self.triangles]
        low, high = self.nodes.min(0), self.nodes.max(0)
        count = len(self.triangles)
        cell = np.sqrt(np.prod(high - low) / count)
        while True:
            columns, rows = shape = np.ceil((high - low) / cell).astype(int)
            candidates = _candidates(corners - low, cell, shape)
            if len(candidates) <= _CANDIDATES or 4 * columns * rows > _CELLS * count:
                break
            cell /= 2
        sides = np.swapaxes(corners[:, 1:] - corners[:, :1], 1, 2)
        shape = int(columns), int(rows)
        return _Grid(low, cell, shape, candidates, np.linalg.inv(sides))

    def _display(self) -> tuple[str, Rows]:
        angle = smallest_angle(self.nodes, self.triangles)
        return "Mesh", [
            ("nodes", str(self.size)),
            ("triangles", str(len(self.triangles))),
            ("smallest angle", f"{angle:.0f} degrees"),
        ]


class _Grid(NamedTuple):
    """A grid of square cells over a mesh.

    :param origin: the lower left corner, (2,).
    :param cell: the length of a cell.
    :param shape: the numbers of columns and rows.
    :param candidates: triangles that a cell may intersect, (K, cells).
    :param slopes: the derivatives of the weights of the second and third corner of
        each triangle with respect to the position, (t, 2, 2).
    """

    origin: np.ndarray
    cell: float
    shape: tuple[int, int]
    candidates: np.ndarray
    slopes: np.ndarray


@partial(jax.jit, static_argnums=0)
def _located(mesh: Mesh, X: Array) -> tuple[Array, Array]:
    """Return nodes and weights of points (N, 2); NaN weights outside of the mesh."""
    grid = mesh._grid
    origin, first, slopes = (
        jnp.asarray(x, X.dtype)
        for x in (grid.origin, mesh.nodes[mesh.triangles[:, 0]], grid.slopes)
    )
    columns, rows = grid.shape
    place = ((X - origin) / jnp.asarray(grid.cell, X.dtype)).astype(jnp.int32)
    column, row = place.T
    cells = jnp.clip(row, 0, rows - 1) * columns + jnp.clip(column, 0, columns - 1)
    table = jnp.asarray(grid.candidates)

    def weights_of(triangle: Array, X: Array) -> Array:
        two = jnp.einsum("nij,nj->ni", slopes[triangle], X - first[triangle])
        return jnp.concatenate([1 - two.sum(1, keepdims=True), two], 1)

    def better(k: Array, best: tuple[Array, Array]) -> tuple[Array, Array]:
        smallest, found = best
        inside = weights_of(table[k, cells], lax.stop_gradient(X)).min(1)
        improved = inside > smallest
        found = jnp.where(improved, table[k, cells], found)
        return jnp.where(improved, inside, smallest), found

    start = jnp.full(len(X), -jnp.inf, X.dtype), table[0, cells]
    smallest, found = lax.fori_loop(0, len(table), better, start)
    weights = jnp.maximum(weights_of(found, X), 0)
    weights = weights / weights.sum(1, keepdims=True)
    weights = jnp.where(smallest[:, None] >= -_TOLERANCE, weights, jnp.nan)
    return jnp.asarray(mesh.triangles)[found], weights


def _candidates(corners: np.ndarray, cell: float, shape: np.ndarray) -> np.ndarray:
    """Return for every cell the triangles whose bounding boxes touch it, (K, cells); a
    row repeats its last triangle, and a cell outside of the mesh has triangle 0."""
    margin = 1e-3 * cell
    low, high = (
        np.clip(np.floor(bound / cell).astype(int), 0, shape - 1)
        for bound in (corners.min(1) - margin, corners.max(1) + margin)
    )
    spans = high - low + 1
    counts = spans.prod(1)
    triangle = np.repeat(np.arange(len(corners)), counts)
    within = np.arange(len(triangle)) - np.repeat(counts.cumsum() - counts, counts)
    i = low[triangle, 0] + within % spans[triangle, 0]
    j = low[triangle, 1] + within // spans[triangle, 0]
    cells = j * shape[0] + i
    order = np.argsort(cells, kind="stable")
    triangle, cells = triangle[order], cells[order]
    per_cell = np.bincount(cells, minlength=shape.prod())
    rank = np.arange(len(cells)) - np.repeat(per_cell.cumsum() - per_cell, per_cell)
    table = np.zeros((per_cell.max(), len(per_cell)), np.int32)
    table[rank, cells] = triangle
    return table


def _rings(boundary: Any) -> list[np.ndarray]:
    """Return the polygons of a boundary."""
    several = isinstance(boundary, list | tuple) and np.ndim(boundary[0]) == 2
    rings = [np.asarray(x, float) for x in (boundary if several else [boundary])]
    for ring in rings:
        if ring.ndim != 2 or ring.shape[1] != 2 or len(ring) < 3:
            raise ValueError(
                f"boundary has a polygon of shape {ring.shape}; expected (k, 2) with "
                "at least three corners"
            )
        if not np.isfinite(ring).all():
            raise ValueError(f"corner {_first(~np.isfinite(ring))} is not finite")
    return rings


def _first(faulty: np.ndarray) -> int:
    return int(np.flatnonzero(faulty.reshape(len(faulty), -1).any(1))[0])


def _check(nodes: np.ndarray, triangles: np.ndarray) -> None:
    if nodes.ndim != 2 or nodes.shape[1:] != (2,):
        raise ValueError(f"nodes has shape {nodes.shape}; expected (n, 2)")
    if triangles.ndim != 2 or triangles.shape[1:] != (3,) or not len(triangles):
        raise ValueError(f"triangles has shape {triangles.shape}; expected (t, 3)")
    if not np.isfinite(nodes).all():
        raise ValueError(f"node {_first(~np.isfinite(nodes))} is not finite")
    if triangles.min() < 0 or triangles.max() >= len(nodes):
        raise ValueError(
            f"triangles has nodes {triangles.min()} to {triangles.max()}, and there "
            f"are nodes 0 to {len(nodes) - 1}"
        )
    _, where, counts = np.unique(nodes, axis=0, return_index=True, return_counts=True)
    if len(where) < len(nodes):
        twice = nodes[where[np.argmax(counts)]]
        i, j = np.flatnonzero((nodes == twice).all(1))[:2]
        raise ValueError(f"nodes {i} and {j} are both at {twice.tolist()}")
    used = np.bincount(triangles.ravel(), minlength=len(nodes))
    if not used.all():
        raise ValueError(f"node {np.argmin(used)} is in no triangle")
    extent = np.ptp(nodes[triangles], axis=1).max(1)
    flat = abs(doubled_areas(nodes, triangles)) <= 1e-12 * extent**2
    if flat.any():
        raise ValueError(f"triangle {np.argmax(flat)} has no area")
