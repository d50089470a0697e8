# SPDX-License-Identifier: Apache-2.0
"""Latent Gaussian models in NumPyro, with any likelihood.

A model is an ordinary NumPyro function. :class:`AutoLatentGaussian` puts one Gaussian
on its Gaussian latents (random effects, walks, fields, weights, processes), and
:class:`ConjugateSVI` fits it. :class:`NestedVI` also integrates the hyperparameters.
:class:`GaussianProcess` adds processes to a model, and :class:`AutoSparseGP` fits them
to large data. :class:`EllipticalSlice` and :class:`AugmentedGaussian` sample exactly.
"""

from importlib import import_module
from typing import Any

from numpyro_gpaug import (
    diagnostics,
    distributions,
    gp,
    inducing,
    infer,
    kernels,
    multilabel,
    plots,
    predict,
    spatial,
    testing,
)
from numpyro_gpaug.distributions import *  # noqa: F403
from numpyro_gpaug.distributions import links
from numpyro_gpaug.distributions.links import *  # noqa: F403
from numpyro_gpaug.errors import (
    ArchiveError,
    CholeskyError,
    ModelChangedError,
    NotConjugateError,
    UnknownLikelihoodError,
)
from numpyro_gpaug.gp import *  # noqa: F403
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
from numpyro_gpaug.predict import *  # noqa: F403
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
    "Batches",
    "Blocks",
    "CholeskyError",
    "CollapsedGaussian",
    "CollapsedModel",
    "ConjugateSVI",
    "EllipticalSlice",
    "ModelChangedError",
    "NestedVI",
    "NotConjugateError",
    "SPDE",
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
    "multilabel",
    "plots",
    "ranking",
    "register_augmentation",
    "register_expectation",
    "spatial",
    "squared_wasserstein",
    "testing",
]
__all__ += distributions.__all__
__all__ += gp.__all__
__all__ += links.__all__
__all__ += predict.__all__


def __getattr__(name: str) -> Any:
    # scikit-learn, which this module imports, takes longer than the rest.
    if name == "tables":
        return import_module("numpyro_gpaug.tables")
    raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
