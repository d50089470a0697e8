# SPDX-License-Identifier: Apache-2.0
"""Augmented likelihoods: the contract, the registry, and one module per likelihood."""

from numpyro_gpaug.augmentation import (
    bayesian_svm,
    bernoulli,
    binomial,
    heteroscedastic,
    laplace,
    multiclass,
    negative_binomial,
    normal,
    normalizer,
    poisson,
    robust_max,
    student_t,
)
from numpyro_gpaug.augmentation.base import (
    Augmentation,
    lookup_augmentation,
    register_augmentation,
)

__all__ = [
    "Augmentation",
    "bayesian_svm",
    "bernoulli",
    "binomial",
    "heteroscedastic",
    "laplace",
    "multiclass",
    "lookup_augmentation",
    "negative_binomial",
    "normal",
    "normalizer",
    "poisson",
    "register_augmentation",
    "robust_max",
    "student_t",
]
