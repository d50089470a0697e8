# SPDX-License-Identifier: Apache-2.0
"""The Bayesian support vector machine: inverse-Gaussian augmentation.

Polson and Scott (2011), Data augmentation for support vector machines; Wenzel,
Galy-Fajou, Deutsch and Kloft (2017), Bayesian nonlinear support vector machines for big
data.
"""

from __future__ import annotations

import jax.numpy as jnp
import numpyro.distributions as dist
from jax import Array

from numpyro_gpaug.distributions.bayesian_svm import BayesianSVM as Likelihood
from numpyro_gpaug.distributions.bayesian_svm import expected_ratio, probit
from numpyro_gpaug.distributions.generalized_inverse_gaussian import InverseGaussian
from numpyro_gpaug.math.normal import expected_ramp

from .contract import Augmentation, Conditionals, Parameters, label_sign, register


class BayesianSVM(Augmentation):
    r"""The hinge loss as a mixture over variances ``l``:
    ``exp(-2 max(1 - s f, 0)) = int N(1 + l; s f, l) dl``, with ``s = 2 y - 1`` and no
    further constant.

    The auxiliary is the inverse variance ``w = 1 / l``, which enters the natural
    parameters linearly, ``potential = s (1 + w)`` and ``precision = w``:
    ``w | f ~ InverseGaussian(1 / |1 - s f|, 1)``, that is, ``l`` is generalised
    inverse-Gaussian, ``GIG(1/2, 1, (1 - s f)^2)``. On the margin the conditional has no
    mean, so ``|1 - s f|`` is bounded below by the rounding error. The bound is
    ``-(1 - s m) - sqrt((1 - s m)^2 + v)``. The likelihood is not normalised over
    labels, so it bounds a pseudo-evidence.
    """

    latents = ("f",)

    def bound(self, d, y, means: Parameters, variances: Parameters) -> Array:
        m, v = means["f"], variances["f"]
        slack = 1 - label_sign(y, m) * m
        # Not sqrt(slack^2 + v), whose slope at zero is infinite.
        size = jnp.sqrt(slack * slack + v + jnp.finfo(m.dtype).eps ** 2)
        # -slack - size without the cancellation for data beyond the margin.
        beyond = slack < 0
        total = jnp.where(beyond, size - slack, 1.0)
        return -jnp.where(beyond, v / total, slack + size)

    def conditional(self, d, y, f: Parameters) -> Conditionals:
        value = f["f"]
        slack = jnp.abs(1 - label_sign(y, value) * value)
        slack = jnp.maximum(slack, jnp.finfo(value.dtype).eps)
        return {"precision": InverseGaussian(1 / slack, jnp.ones_like(value))}

    def natural(self, d, y, aux, f: Parameters) -> dict[str, tuple[Array, Array]]:
        w = aux["precision"]
        return {"f": (label_sign(y, w) * (1 + w), w)}


def _expected_log_prob(d, y, m: Array, v: Array) -> Array:
    return -2 * expected_ramp(1 - label_sign(y, m) * m, v)


def _predictive(d, m: Array, v: Array) -> dist.Distribution:
    rule = probit if d.predictive == "probit" else expected_ratio
    return dist.BernoulliProbs(rule(m, v))


register(
    Likelihood, ("f",), _expected_log_prob, _predictive, BayesianSVM(), log_concave=True
)
