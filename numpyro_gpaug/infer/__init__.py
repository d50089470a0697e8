# SPDX-License-Identifier: Apache-2.0
"""Inference: closed-form updates, analytic bounds, and exact samplers."""

from numpyro_gpaug.infer.mcmc import (
    AugmentedGaussian,
    CollapsedGaussian,
    EllipticalSlice,
)
from numpyro_gpaug.infer.vi import (
    Adaptive,
    ConjugateResult,
    ConjugateState,
    ConjugateSVI,
    Constant,
    RobbinsMonro,
    TraceAnalytic_ELBO,
    TraceWasserstein_ELBO,
    squared_wasserstein,
)

__all__ = [
    "Adaptive",
    "AugmentedGaussian",
    "CollapsedGaussian",
    "ConjugateResult",
    "ConjugateSVI",
    "ConjugateState",
    "Constant",
    "EllipticalSlice",
    "RobbinsMonro",
    "TraceAnalytic_ELBO",
    "TraceWasserstein_ELBO",
    "squared_wasserstein",
]
