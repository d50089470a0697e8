# SPDX-License-Identifier: Apache-2.0
"""Guides: families of posteriors of the Gaussian latents of a model."""

from numpyro_gpaug.guides.function_space import AutoFunctionSpaceGP
from numpyro_gpaug.guides.sparse_gp import AutoSparseGP

__all__ = ["AutoFunctionSpaceGP", "AutoSparseGP"]
