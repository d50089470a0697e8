# SPDX-License-Identifier: Apache-2.0
"""Covariance functions: the public name of :mod:`numpyro_gpaug.gp.kernels`."""

from numpyro_gpaug.gp import kernels as _room
from numpyro_gpaug.gp.kernels import *  # noqa: F403

__all__ = _room.__all__
__doc__ = _room.__doc__
