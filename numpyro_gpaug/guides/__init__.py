# SPDX-License-Identifier: Apache-2.0
"""Guides: the variational families of Gaussian latents."""

from numpyro_gpaug.guides.base import ConjugateGuide
from numpyro_gpaug.guides.function_space import AutoFunctionSpaceGP
from numpyro_gpaug.guides.latent_gaussian import AutoLatentGaussian
from numpyro_gpaug.guides.sparse_gp import AutoSparseGP

__all__ = [
    "AutoFunctionSpaceGP", "AutoLatentGaussian", "AutoSparseGP", "ConjugateGuide",
]  # fmt: skip
