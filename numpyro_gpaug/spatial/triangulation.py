# SPDX-License-Identifier: Apache-2.0
"""Nodes of a mesh that is fine around data and coarse outside, and their triangles."""

from __future__ import annotations

import numpy as np

from numpyro_gpaug.spatial import polygons

# The spacing of nodes, relative to the longest edge. Edges at the seam between lattice
# and rings are up to 1.38 times as long as the spacing.
_SHORTER = 0.72
# The relative growth of the spacing with the distance from the inner region. Larger
# values give triangles with angles below 28 degrees.
_GROWTH = 0.35
# The distance of the lattice from the first ring, in spacings.
_GAP = 0.6
# The number of rounds in which points between the lattice and the rings move to the
# mean of their triangles.
_ROUNDS = 10


def graded(
    points: np.ndarray, inner: float, outer: float, offset: float
) -> tuple[np.ndarray, np.ndarray]:
    """Return nodes and triangles of a mesh around points.

    The points of a triangular lattice fill the hull of the data. Rings at growing
    distances surround it. A few rounds of smoothing then move the nodes near the seam
    and in the rings to the centroids of their neighbourhoods.

    :param points: (n, 2).
    :param inner: the largest edge inside.
    :param outer: the largest edge outside.
    :param offset: the distance of the boundary from the hull of the points.
    """
    spacing, coarse = _SHORTER * inner, _SHORTER * outer
    corners = points if len(np.unique(points, axis=0)) < 3 else _corners(points)
    start = min(inner, offset)
    distances = _distances(spacing, coarse, start, offset)
    spacings = np.minimum(spacing + _GROWTH * (distances - start), coarse)
    rings = [
        polygons.divided(polygons.around(corners, distance), length, 0.5 * (k % 2))
        for k, (distance, length) in enumerate(zip(distances, spacings, strict=True))
    ]
    border = polygons.around(corners, start)
    nodes = np.concatenate([_lattice(border, spacing), *rings])
    boundary = len(nodes) - len(rings[-1])
    moving = polygons.depth(border, nodes) < 3 * spacing
    moving[boundary:] = False
    for _ in range(_ROUNDS):
        moved = _centroids(nodes, border, spacing, coarse)
        nodes = np.where(moving[:, None], moved, nodes)
    return nodes, _triangles(nodes, boundary)


def smallest_angle(nodes: np.ndarray, triangles: np.ndarray) -> float:
    """Return the smallest angle of all triangles, in degrees."""
    return float(np.degrees(_angles(nodes, triangles).min()))


def _corners(points: np.ndarray) -> np.ndarray:
    """Return the corners of the hull of points, which may lie on a line."""
    extent = np.ptp(points, axis=0)
    spread = np.linalg.svd(points - points.mean(0), compute_uv=False)
    if spread[-1] < 1e-9 * spread[0]:
        order = np.argsort(points[:, np.argmax(extent)])
        return points[order[[0, -1]]]
    return polygons.hull(points)


def _distances(
    spacing: float, coarse: float, start: float, offset: float
) -> np.ndarray:
    """Return the distances of the rings: rows of about equilateral triangles."""
    found = [start]
    while found[-1] < offset:
        length = min(spacing + _GROWTH * (found[-1] - start), coarse)
        found.append(found[-1] + length * np.sqrt(0.75))
    distances = np.array(found)
    if len(found) > 1:
        distances = start + (distances - start) * (offset - start) / (found[-1] - start)
    return distances


def _lattice(border: np.ndarray, spacing: float) -> np.ndarray:
    """Return the points of a triangular lattice inside a convex polygon."""
    low, high = border.min(0), border.max(0)
    step = spacing * np.array([1, np.sqrt(0.75)])
    columns, rows = np.ceil((high - low) / step).astype(int) + 1
    j, i = np.mgrid[:rows, :columns]
    places = np.stack([i + 0.5 * (j % 2), j], -1).reshape(-1, 2) * step
    # Centred, so that symmetric data have a symmetric mesh.
    places += (low + high) / 2 - places.mean(0)
    return places[polygons.depth(border, places) > _GAP * spacing]


def _centroids(
    nodes: np.ndarray, border: np.ndarray, spacing: float, coarse: float
) -> np.ndarray:
    """Return for each node the mean of the centroids of its triangles, weighted by
    their areas relative to the spacing there."""
    from scipy.spatial import Delaunay

    triangles = Delaunay(nodes).simplices
    centres = nodes[triangles].mean(1)
    outside = np.maximum(-polygons.depth(border, centres), 0)
    size = np.minimum(spacing + _GROWTH * outside, coarse)
    weights = abs(doubled_areas(nodes, triangles)) / size**2
    corners, weights = triangles.ravel(), np.repeat(weights, 3)
    total = np.bincount(corners, weights, len(nodes))
    sums = [
        np.bincount(corners, weights * np.repeat(axis, 3), len(nodes))
        for axis in centres.T
    ]
    return np.stack(sums, -1) / total[:, None]


def _triangles(nodes: np.ndarray, boundary: int) -> np.ndarray:
    """Return the Delaunay triangles, without flat ones between nodes of a straight
    boundary.

    :param nodes: (m, 2).
    :param boundary: the first node on the boundary.
    """
    from scipy.spatial import Delaunay

    triangles = Delaunay(nodes).simplices
    flat = _angles(nodes, triangles).min(1) < np.radians(10)
    return triangles[~(flat & (triangles >= boundary).all(1))]


def doubled_areas(nodes: np.ndarray, triangles: np.ndarray) -> np.ndarray:
    """Return twice the signed areas of triangles."""
    first, second, third = np.moveaxis(nodes[triangles], 1, 0)
    (x, y), (u, v) = (second - first).T, (third - first).T
    return x * v - y * u


def _angles(nodes: np.ndarray, triangles: np.ndarray) -> np.ndarray:
    corners = nodes[triangles]
    one, other = (np.roll(corners, -k, 1) - corners for k in (1, 2))
    cross = one[..., 0] * other[..., 1] - one[..., 1] * other[..., 0]
    return np.arctan2(abs(cross), (one * other).sum(-1))
