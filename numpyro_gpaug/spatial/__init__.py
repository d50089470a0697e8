# SPDX-License-Identifier: Apache-2.0
"""Matern fields on triangulated regions of the plane: meshes, finite elements, point
processes."""

from numpyro_gpaug.spatial.mesh import Mesh
from numpyro_gpaug.spatial.points import PointProcess, point_process
from numpyro_gpaug.spatial.spde import SPDE

__all__ = ["SPDE", "Mesh", "PointProcess", "point_process"]
