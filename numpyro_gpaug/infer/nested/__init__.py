# SPDX-License-Identifier: Apache-2.0
"""Hyperparameters integrated over, with the Gaussian latents collapsed."""

from numpyro_gpaug.infer.nested.collapse import CollapsedModel, collapse
from numpyro_gpaug.infer.nested.many import NestedRuns
from numpyro_gpaug.infer.nested.nested import NestedVI

__all__ = ["CollapsedModel", "NestedRuns", "NestedVI", "collapse"]
