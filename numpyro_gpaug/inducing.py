# SPDX-License-Identifier: Apache-2.0
"""Choosing inducing inputs: the public name of :mod:`numpyro_gpaug.gp.inducing`."""

from numpyro_gpaug.gp import inducing as _room
from numpyro_gpaug.gp.inducing import Subspace, gmm, greedy, kmeans, random

__all__ = [
    "Subspace",
    "gmm",
    "greedy",
    "kmeans",
    "random",
]
__doc__ = _room.__doc__
