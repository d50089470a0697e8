# SPDX-License-Identifier: Apache-2.0
"""Exact samplers of Gaussian latents, as NumPyro kernels."""

from numpyro_gpaug.infer.mcmc.elliptical import EllipticalSlice
from numpyro_gpaug.infer.mcmc.gibbs import AugmentedGaussian, CollapsedGaussian

__all__ = ["AugmentedGaussian", "CollapsedGaussian", "EllipticalSlice"]
