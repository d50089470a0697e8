# SPDX-License-Identifier: Apache-2.0
"""Likelihoods: their contract, the registries, and one module per likelihood."""

from numpyro_gpaug.likelihoods import (  # noqa: F401
    bayesian_svm,
    bernoulli,
    binomial,
    heteroscedastic,
    laplace,
    log_variance,
    multiclass,
    negative_binomial,
    normal,
    normalizer,
    piecewise,
    poisson,
    robust_max,
    student_t,
)
from numpyro_gpaug.likelihoods.contract import (
    Augmentation,
    lookup_augmentation,
    register_augmentation,
)

# The modules of likelihoods register themselves.
__all__ = ["Augmentation", "lookup_augmentation", "register_augmentation"]
