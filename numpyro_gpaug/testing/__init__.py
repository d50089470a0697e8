# SPDX-License-Identifier: Apache-2.0
"""Conformance checks for likelihoods, and for structures of Gaussians."""

from numpyro_gpaug.testing.augmentations import check_augmentation
from numpyro_gpaug.testing.structures import check_structure

__all__ = ["check_augmentation", "check_structure"]
