# SPDX-License-Identifier: Apache-2.0
"""Hyperparameters integrated over, with the Gaussian latents collapsed."""

from numpyro_gpaug.infer.nested.collapse import collapse

__all__ = ["collapse"]
