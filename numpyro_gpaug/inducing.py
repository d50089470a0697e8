# SPDX-License-Identifier: Apache-2.0
"""Choosing inducing inputs: the public name of :mod:`numpyro_gpaug.gp.inducing`."""

from numpyro_gpaug.gp import inducing as _room
from numpyro_gpaug.gp.inducing import *  # noqa: F403

__all__ = _room.__all__
__doc__ = _room.__doc__
