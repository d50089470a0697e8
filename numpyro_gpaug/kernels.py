# SPDX-License-Identifier: Apache-2.0
"""Covariance functions: the public name of :mod:`numpyro_gpaug.gp.kernels`."""

from numpyro_gpaug.gp import kernels as _room
from numpyro_gpaug.gp.kernels import (
    Constant,
    Kernel,
    Linear,
    Matern12,
    Matern32,
    Matern52,
    Periodic,
    Product,
    RationalQuadratic,
    SquaredExponential,
    Sum,
    as_kernel,
    from_function,
)

__all__ = [
    "Constant",
    "Kernel",
    "Linear",
    "Matern12",
    "Matern32",
    "Matern52",
    "Periodic",
    "Product",
    "RationalQuadratic",
    "SquaredExponential",
    "Sum",
    "as_kernel",
    "from_function",
]
__doc__ = _room.__doc__
