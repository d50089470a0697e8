# SPDX-License-Identifier: Apache-2.0
"""Polygons of the plane, (k, 2): their vertices in order, the first not repeated."""

from __future__ import annotations

import numpy as np

# The number of corners of a circle.
_CORNERS = 32


def hull(points: np.ndarray) -> np.ndarray:
    """Return the vertices of the convex hull of points (n, 2), counterclockwise."""
    from scipy.spatial import ConvexHull

    return points[ConvexHull(points).vertices]


def around(points: np.ndarray, distance: float) -> np.ndarray:
    """Return a convex polygon at a distance from points, with rounded corners.

    :param points: (n, 2); one is enough, and they may lie on a line.
    :param distance: a positive number.
    """
    angles = 2 * np.pi * np.arange(_CORNERS) / _CORNERS
    circle = distance * np.stack([np.cos(angles), np.sin(angles)], -1)
    return hull((points[:, None] + circle).reshape(-1, 2))


def divided(polygon: np.ndarray, length: float, shift: float) -> np.ndarray:
    """Return points at equal distances along a polygon, at most ``length`` apart.

    :param polygon: the vertices.
    :param length: the largest distance.
    :param shift: the first point, in units of the distance between points.
    """
    closed = np.concatenate([polygon, polygon[:1]])
    along = np.linalg.norm(np.diff(closed, axis=0), axis=1).cumsum()
    along = np.append(0, along)
    count = max(int(np.ceil(along[-1] / length)), 6)
    places = (np.arange(count) + shift) / count * along[-1]
    return np.stack([np.interp(places, along, axis) for axis in closed.T], -1)


def depth(polygon: np.ndarray, points: np.ndarray) -> np.ndarray:
    """Return how far inside a convex counterclockwise polygon points (n, 2) are;
    negative outside, where it is a lower bound of the distance."""
    edges = np.roll(polygon, -1, 0) - polygon
    normals = np.stack([-edges[:, 1], edges[:, 0]], -1)
    normals /= np.linalg.norm(normals, axis=1, keepdims=True)
    return (points @ normals.T - (normals * polygon).sum(1)).min(1)


def contains(polygon: np.ndarray, points: np.ndarray) -> np.ndarray:
    """Whether a polygon, which need not be convex, contains points (n, 2). A ray from a
    point inside crosses the border an odd number of times. Points on it are inside."""
    inside, border = np.zeros((2, len(points)), bool)
    rounding = 1e-9 * np.ptp(polygon, axis=0).max()
    x, y = points.T
    for start, stop in zip(polygon, np.roll(polygon, -1, 0), strict=True):
        (dx, dy), offset = stop - start, points - start
        share = offset @ (stop - start) / max(dx**2 + dy**2, np.finfo(float).tiny)
        nearest = np.clip(share, 0, 1)[:, None] * (stop - start)
        border |= np.linalg.norm(offset - nearest, axis=1) <= rounding
        if dy:
            crossing = start[0] + (y - start[1]) / dy * dx
            inside ^= ((start[1] > y) != (stop[1] > y)) & (x < crossing)
    return inside | border


def clipped(polygon: np.ndarray, triangle: np.ndarray) -> np.ndarray:
    """Return the intersection of a polygon and a counterclockwise triangle, (m, 2).

    The algorithm is of Sutherland and Hodgman (1974). Parts of the intersection may be
    joined by edges that are traversed twice; they do not change areas and moments.

    :param polygon: the vertices; it need not be convex.
    :param triangle: (3, 2).
    """
    for start, stop in zip(triangle, np.roll(triangle, -1, 0), strict=True):
        if not len(polygon):
            break
        (dx, dy), offset = stop - start, polygon - start
        side = dx * offset[:, 1] - dy * offset[:, 0]
        after, following = np.roll(polygon, -1, 0), np.roll(side, -1)
        cut = (side >= 0) != (following >= 0)
        share = np.where(cut, side, 0) / np.where(cut, side - following, 1)
        crossings = polygon + share[:, None] * (after - polygon)
        kept = np.stack([side >= 0, cut], -1).ravel()
        polygon = np.stack([polygon, crossings], 1).reshape(-1, 2)[kept]
    return polygon


def moments(polygon: np.ndarray) -> tuple[float, np.ndarray]:
    """Return the signed area of a polygon, and the integral of the position over it."""
    if len(polygon) < 3:
        return 0.0, np.zeros(2)
    # Relative to a vertex, because areas may be much smaller than coordinates.
    relative = polygon - polygon[0]
    after = np.roll(relative, -1, 0)
    cross = relative[:, 0] * after[:, 1] - relative[:, 1] * after[:, 0]
    area = float(cross.sum() / 2)
    first = ((relative + after) * cross[:, None]).sum(0) / 6
    return area, first + area * polygon[0]
