# SPDX-License-Identifier: Apache-2.0
"""Augmented likelihoods: the contract, the registry, and one module per likelihood."""

from numpyro_gpaug.augmentation import bernoulli, normal
from numpyro_gpaug.augmentation.base import (
    Augmentation,
    lookup_augmentation,
    register_augmentation,
)

__all__ = [
    "Augmentation",
    "bernoulli",
    "lookup_augmentation",
    "normal",
    "register_augmentation",
]
