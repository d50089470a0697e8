# SPDX-License-Identifier: Apache-2.0
"""Latent Gaussian models, Gaussian processes included, as ordinary NumPyro models with
any likelihood."""

from importlib import import_module
from typing import Any

from numpyro_gpaug import (
    diagnostics,
    distributions,
    inducing,
    infer,
    kernels,
    multilabel,
    plots,
    spatial,
    testing,
)
from numpyro_gpaug.distributions import (
    BYM2,
    GMRF,
    ICAR,
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
    PCRange,
    PCScale,
    PiecewiseBernoulli,
    PiecewiseHeteroscedasticNormal,
    PiecewiseNormal,
    PolyaGamma,
    RandomWalk2,
    RobustMax,
    SampledLogisticSoftmax,
    SpaceTime,
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
from numpyro_gpaug.guides import AutoFunctionSpaceGP, AutoLatentGaussian, AutoSparseGP
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
from numpyro_gpaug.predict import (
    Averages,
    FunctionValues,
    Posterior,
    Posteriors,
    average,
)
from numpyro_gpaug.spatial import SPDE

__version__ = "0.2.0"

__all__ = [
    "ArchiveError",
    "ArrowRows",
    "Augmentation",
    "AugmentedGaussian",
    "AutoFunctionSpaceGP",
    "AutoLatentGaussian",
    "AutoSparseGP",
    "Averages",
    "BYM2",
    "Batches",
    "BayesianSVM",
    "Blocks",
    "CholeskyError",
    "CollapsedGaussian",
    "CollapsedModel",
    "ConjugateSVI",
    "EllipticalSlice",
    "FunctionValues",
    "GMRF",
    "GaussianProcess",
    "GeneralizedInverseGaussian",
    "HeteroscedasticNormal",
    "ICAR",
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
    "PCRange",
    "PCScale",
    "PiecewiseBernoulli",
    "PiecewiseHeteroscedasticNormal",
    "PiecewiseLink",
    "PiecewiseNormal",
    "PolyaGamma",
    "Posterior",
    "Posteriors",
    "RandomWalk2",
    "SpaceTime",
    "RobustMax",
    "SPDE",
    "SampledLogisticSoftmax",
    "Route",
    "Stream",
    "TraceAnalytic_ELBO",
    "TraceWasserstein_ELBO",
    "UnknownLikelihoodError",
    "average",
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
    "spatial",
    "squared_wasserstein",
    "testing",
    "with_residual",
]


def __getattr__(name: str) -> Any:
    # scikit-learn, which this module imports, takes longer than the rest.
    if name == "tables":
        return import_module("numpyro_gpaug.tables")
    raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
