# SPDX-License-Identifier: Apache-2.0
"""Inference: the analytic bound, closed-form updates, and the posterior."""

from numpyro_gpaug.infer.collapsed import CollapsedGaussian
from numpyro_gpaug.infer.conjugate import ConjugateSVI
from numpyro_gpaug.infer.elbo import TraceAnalytic_ELBO
from numpyro_gpaug.infer.elliptical import EllipticalSlice
from numpyro_gpaug.infer.gibbs import AugmentedGaussian
from numpyro_gpaug.infer.posterior import Posterior
from numpyro_gpaug.infer.predictor import FunctionValues
from numpyro_gpaug.infer.schedules import Adaptive, Constant, RobbinsMonro
from numpyro_gpaug.infer.stepper import ConjugateState
from numpyro_gpaug.infer.wasserstein import TraceWasserstein_ELBO, squared_wasserstein

__all__ = [
    "Adaptive",
    "AugmentedGaussian",
    "CollapsedGaussian",
    "ConjugateSVI",
    "ConjugateState",
    "Constant",
    "EllipticalSlice",
    "FunctionValues",
    "Posterior",
    "RobbinsMonro",
    "TraceAnalytic_ELBO",
    "TraceWasserstein_ELBO",
    "squared_wasserstein",
]
