# SPDX-License-Identifier: Apache-2.0
"""Gaussian processes with non-Gaussian likelihoods, as ordinary NumPyro models."""

from numpyro_gpaug import (
    diagnostics,
    inducing,
    kernels,
    multilabel,
    plots,
    ranking,
    testing,
)
from numpyro_gpaug.augmentation import Augmentation, register_augmentation
from numpyro_gpaug.distributions import (
    BayesianSVM,
    GeneralizedInverseGaussian,
    HeteroscedasticNormal,
    InverseGaussian,
    Linked,
    LogisticNormalizer,
    LogisticPoisson,
    LogisticSoftmax,
    LogisticSoftmaxMeanField,
    LogVarianceNormal,
    PiecewiseBernoulli,
    PiecewiseHeteroscedasticNormal,
    PiecewiseNormal,
    PolyaGamma,
    RobustMax,
)
from numpyro_gpaug.errors import (
    CholeskyError,
    NotConjugateError,
    UnknownLikelihoodError,
)
from numpyro_gpaug.expectations import Route, expected_log_prob, register_expectation
from numpyro_gpaug.function_space import AutoFunctionSpaceGP
from numpyro_gpaug.guides import AutoSparseGP
from numpyro_gpaug.infer import (
    AugmentedGaussian,
    CollapsedGaussian,
    ConjugateSVI,
    EllipticalSlice,
    Posterior,
    TraceAnalytic_ELBO,
    TraceWasserstein_ELBO,
    squared_wasserstein,
)
from numpyro_gpaug.links import PiecewiseLink, learned_link, link_penalty
from numpyro_gpaug.process import GaussianProcess, with_residual

__version__ = "0.1.0"

__all__ = [
    "Augmentation",
    "AugmentedGaussian",
    "AutoFunctionSpaceGP",
    "AutoSparseGP",
    "BayesianSVM",
    "CholeskyError",
    "CollapsedGaussian",
    "ConjugateSVI",
    "EllipticalSlice",
    "GaussianProcess",
    "GeneralizedInverseGaussian",
    "HeteroscedasticNormal",
    "InverseGaussian",
    "Linked",
    "LogVarianceNormal",
    "LogisticNormalizer",
    "LogisticPoisson",
    "LogisticSoftmax",
    "LogisticSoftmaxMeanField",
    "NotConjugateError",
    "PiecewiseBernoulli",
    "PiecewiseHeteroscedasticNormal",
    "PiecewiseLink",
    "PiecewiseNormal",
    "PolyaGamma",
    "Posterior",
    "RobustMax",
    "Route",
    "TraceAnalytic_ELBO",
    "TraceWasserstein_ELBO",
    "UnknownLikelihoodError",
    "diagnostics",
    "expected_log_prob",
    "inducing",
    "kernels",
    "learned_link",
    "link_penalty",
    "multilabel",
    "plots",
    "ranking",
    "register_augmentation",
    "register_expectation",
    "squared_wasserstein",
    "testing",
    "with_residual",
]
