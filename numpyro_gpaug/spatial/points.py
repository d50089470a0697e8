# SPDX-License-Identifier: Apache-2.0
"""Point processes as counts at the nodes of a mesh."""

from __future__ import annotations

from typing import NamedTuple

import numpy as np
from jax.typing import ArrayLike

from numpyro_gpaug.spatial import polygons
from numpyro_gpaug.spatial.mesh import Mesh
from numpyro_gpaug.spatial.triangulation import doubled_areas


class PointProcess(NamedTuple):
    """The data of a point process at the nodes of a mesh near its window.

    :param X: the nodes, (m, 2).
    :param exposure: the integrals over the window of the piecewise linear functions of
        the nodes, (m,). They sum to the area of the window.
    :param counts: the sums of these functions over the points, (m,). They sum to the
        number of points, and are not integers.
    """

    X: np.ndarray
    exposure: np.ndarray
    counts: np.ndarray


def point_process(points: ArrayLike, mesh: Mesh, window: ArrayLike) -> PointProcess:
    r"""Return the data that determine the likelihood of a log-Gaussian Cox process.

    The log-likelihood of points :math:`x_i` in a window W, with the log intensity f, is
    :math:`\sum_i f(x_i) - \int_W e^{f(x)} dx`. For an f that is linear on triangles,
    the sum is :math:`\sum_j c_j f_j` over the nodes, with the counts :math:`c_j`. The
    integral is replaced by :math:`\sum_j w_j e^{f_j}`, with the exposure :math:`w_j`
    (Simpson et al., 2016, equation 6), which is larger: between nodes from which f
    changes steeply, the intensity is therefore too low. Covariates in f are
    interpolated between nodes, too. The likelihood is a :func:`numpyro.factor`, because
    the counts are not integers, which a Poisson distribution would need.

    :param points: (N, 2), inside the window.
    :param mesh: a mesh that covers the window.
    :param window: the polygon in which points were observed, vertices (k, 2) in order.
        It need not be convex.
    :raises ValueError: for other shapes, points outside of the window, and a window
        that the mesh does not cover.

    **Example**

    >>> import jax.numpy as jnp, numpy as np, numpyro, numpyro.distributions as dist
    >>> import numpyro_gpaug as gpaug
    >>> points = np.random.default_rng(0).random((40, 2))
    >>> square = np.array([[0.0, 0.0], [1.0, 0.0], [1.0, 1.0], [0.0, 1.0]])
    >>> mesh = gpaug.spatial.Mesh.around(square, max_edge=(0.1, 0.3), offset=0.5)
    >>> data = gpaug.spatial.point_process(points, mesh, window=square)
    >>> float(data.exposure.sum().round(6)), float(data.counts.sum().round(4))
    (1.0, 40.0)
    >>> def model(X, exposure, counts):
    ...     level = numpyro.sample("level", dist.Normal(0.0, 5.0))
    ...     s = gpaug.SPDE("s", mesh, range=0.5, scale=1.0)
    ...     f = level + s(X)
    ...     numpyro.factor("points", (counts * f - exposure * jnp.exp(f)).sum())
    """
    points, window = np.asarray(points, float), np.asarray(window, float)
    for name, given in (("points", points), ("window", window)):
        if given.ndim != 2 or given.shape[1] != 2:
            raise ValueError(f"{name} has shape {given.shape}; expected (rows, 2)")
    outside = ~polygons.contains(window, points)
    if outside.any():
        first = np.flatnonzero(outside)[0]
        raise ValueError(
            f"{outside.sum()} of {len(points)} points are outside of the window, the "
            f"first in row {first}: {points[first].tolist()}"
        )
    exposure = _exposure(mesh, window)
    area = abs(polygons.moments(window)[0])
    if not np.isclose(exposure.sum(), area, rtol=1e-6):
        raise ValueError(
            f"the mesh covers an area of {exposure.sum():.6g} of the window's "
            f"{area:.6g}. Make the mesh around the vertices of the window"
        )
    nodes, weights = (np.asarray(x) for x in mesh.project(points))
    counts = np.bincount(nodes.ravel(), weights.ravel(), mesh.size)
    near = (exposure > 0) | (counts > 0)
    return PointProcess(mesh.nodes[near], exposure[near], counts[near])


def _exposure(mesh: Mesh, window: np.ndarray) -> np.ndarray:
    """Return the integrals of the functions of nodes over a window, (n,)."""
    if polygons.moments(window)[0] < 0:
        window = window[::-1]
    corners = mesh.nodes[mesh.triangles]
    cut = _near_edges(corners, window)
    inside = ~cut & polygons.contains(window, corners[:, 0])
    shares = np.zeros((len(corners), 3))
    shares[inside] = doubled_areas(mesh.nodes, mesh.triangles[inside])[:, None] / 6
    for k in np.flatnonzero(cut):
        (a, b, c), (area, first) = (
            corners[k], polygons.moments(polygons.clipped(window, corners[k]))
        )  # fmt: skip
        two = np.linalg.solve(np.stack([b - a, c - a], -1), first - area * a)
        shares[k] = area - two.sum(), *two
    return np.bincount(mesh.triangles.ravel(), shares.ravel(), mesh.size)


def _near_edges(corners: np.ndarray, window: np.ndarray) -> np.ndarray:
    """Whether the bounding boxes of triangles meet the one of an edge of the window."""
    found = np.zeros(len(corners), bool)
    low, high = corners.min(1), corners.max(1)
    for start, stop in zip(window, np.roll(window, -1, 0), strict=True):
        below, above = np.minimum(start, stop), np.maximum(start, stop)
        found |= ((low <= above) & (high >= below)).all(1)
    return found
