# SPDX-License-Identifier: Apache-2.0
"""Distributions, each a full NumPyro citizen."""

from numpyro_gpaug.distributions.gaussian import BlockGaussian
from numpyro_gpaug.distributions.polya_gamma import PolyaGamma

__all__ = ["BlockGaussian", "PolyaGamma"]
