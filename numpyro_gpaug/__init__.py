# SPDX-License-Identifier: Apache-2.0
"""Latent Gaussian models, Gaussian processes included, as ordinary NumPyro models with
any likelihood."""

from numpyro_gpaug import (
    diagnostics,
    distributions,
    inducing,
    infer,
    kernels,
    multilabel,
    plots,
    testing,
)
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
    SampledLogisticSoftmax,
)
from numpyro_gpaug.distributions.links import PiecewiseLink, learned_link, link_penalty
from numpyro_gpaug.errors import (
    ArchiveError,
    CholeskyError,
    ModelChangedError,
    NotConjugateError,
    UnknownLikelihoodError,
)
from numpyro_gpaug.gp import GaussianProcess, with_residual
from numpyro_gpaug.guides import (
    AutoFunctionSpaceGP,
    AutoLatentGaussian,
    AutoSparseGP,
)
from numpyro_gpaug.infer import (
    ArrowRows,
    AugmentedGaussian,
    Batches,
    Blocks,
    CollapsedGaussian,
    CollapsedModel,
    ConjugateSVI,
    EllipticalSlice,
    NestedVI,
    Stream,
    TraceAnalytic_ELBO,
    TraceWasserstein_ELBO,
    collapse,
    squared_wasserstein,
)
from numpyro_gpaug.likelihoods import Augmentation, register_augmentation
from numpyro_gpaug.likelihoods.expectations import (
    Route,
    expected_log_prob,
    register_expectation,
)
from numpyro_gpaug.multilabel import ranking
from numpyro_gpaug.predict import FunctionValues, Posterior

__version__ = "0.1.0"

__all__ = [
    "ArchiveError",
    "ArrowRows",
    "Augmentation",
    "AugmentedGaussian",
    "AutoFunctionSpaceGP",
    "AutoLatentGaussian",
    "AutoSparseGP",
    "Batches",
    "BayesianSVM",
    "Blocks",
    "CholeskyError",
    "CollapsedGaussian",
    "CollapsedModel",
    "ConjugateSVI",
    "EllipticalSlice",
    "FunctionValues",
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
    "ModelChangedError",
    "NestedVI",
    "NotConjugateError",
    "PiecewiseBernoulli",
    "PiecewiseHeteroscedasticNormal",
    "PiecewiseLink",
    "PiecewiseNormal",
    "PolyaGamma",
    "Posterior",
    "RobustMax",
    "SampledLogisticSoftmax",
    "Route",
    "Stream",
    "TraceAnalytic_ELBO",
    "TraceWasserstein_ELBO",
    "UnknownLikelihoodError",
    "collapse",
    "diagnostics",
    "distributions",
    "expected_log_prob",
    "inducing",
    "infer",
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
