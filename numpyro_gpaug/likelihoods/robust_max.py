# SPDX-License-Identifier: Apache-2.0
r"""Robust-max: no augmentation, but an exact expectation.

With S(y) the probability that latent y is the largest, ``E log p(y | f) =
S(y) log(1 - epsilon) + (1 - S(y)) log(epsilon / (J - 1))`` (Hernandez-Lobato,
Hernandez-Lobato and Dupont, 2011, Robust multi-class Gaussian process classification).
"""

from __future__ import annotations

import jax.numpy as jnp
import numpyro.distributions as dist
from jax import Array

from numpyro_gpaug.distributions.robust_max import RobustMax
from numpyro_gpaug.math.argmax import argmax_probabilities, argmax_probability

from .contract import register


def _expected_log_prob(d, y, m: Array, v: Array) -> Array:
    right, wrong = d.log_right_wrong
    return wrong + (right - wrong) * argmax_probability(m, v, y)


def _predictive(d, m: Array, v: Array) -> dist.Distribution:
    right, wrong = (jnp.exp(x)[..., None] for x in d.log_right_wrong)
    return dist.CategoricalProbs(wrong + (right - wrong) * argmax_probabilities(m, v))


register(RobustMax, ("f",), _expected_log_prob, _predictive)
