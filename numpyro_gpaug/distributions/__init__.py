# SPDX-License-Identifier: Apache-2.0
"""Distributions with the full interface of NumPyro."""

from numpyro_gpaug.distributions.bayesian_svm import BayesianSVM
from numpyro_gpaug.distributions.fields import BYM2, GMRF, ICAR
from numpyro_gpaug.distributions.gaussian import BlockGaussian
from numpyro_gpaug.distributions.generalized_inverse_gaussian import (
    GeneralizedInverseGaussian,
    InverseGaussian,
)
from numpyro_gpaug.distributions.heteroscedastic_normal import (
    HeteroscedasticNormal,
    LogVarianceNormal,
)
from numpyro_gpaug.distributions.linked import (
    Linked,
    PiecewiseBernoulli,
    PiecewiseHeteroscedasticNormal,
    PiecewiseNormal,
)
from numpyro_gpaug.distributions.logistic_normalizer import LogisticNormalizer
from numpyro_gpaug.distributions.logistic_poisson import LogisticPoisson
from numpyro_gpaug.distributions.logistic_softmax import (
    LogisticSoftmax,
    LogisticSoftmaxMeanField,
)
from numpyro_gpaug.distributions.penalised_complexity import PCRange, PCScale
from numpyro_gpaug.distributions.polya_gamma import PolyaGamma
from numpyro_gpaug.distributions.random_walk import RandomWalk2
from numpyro_gpaug.distributions.robust_max import RobustMax
from numpyro_gpaug.distributions.sampled_softmax import SampledLogisticSoftmax
from numpyro_gpaug.distributions.space_time import SpaceTime

__all__ = [
    "BYM2",
    "BayesianSVM",
    "BlockGaussian",
    "GeneralizedInverseGaussian",
    "GMRF",
    "HeteroscedasticNormal",
    "ICAR",
    "InverseGaussian",
    "Linked",
    "LogVarianceNormal",
    "LogisticNormalizer",
    "LogisticPoisson",
    "LogisticSoftmax",
    "LogisticSoftmaxMeanField",
    "PCRange",
    "PCScale",
    "PiecewiseBernoulli",
    "PiecewiseHeteroscedasticNormal",
    "PiecewiseNormal",
    "PolyaGamma",
    "RandomWalk2",
    "RobustMax",
    "SampledLogisticSoftmax",
    "SpaceTime",
]
