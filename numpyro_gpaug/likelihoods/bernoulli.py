# SPDX-License-Identifier: Apache-2.0
"""Bernoulli with logits: Polya-Gamma augmentation and exact expectation.

Polson, Scott and Windle (2013), Bayesian inference for logistic models using
Polya-Gamma latent variables. The augmented bound equals the bound of Jaakkola and
Jordan (2000) at its optimum.
"""

from __future__ import annotations

import jax.numpy as jnp
import numpyro.distributions as dist
from jax import Array

from numpyro_gpaug.distributions.polya_gamma import PolyaGamma
from numpyro_gpaug.math.logistic import expected_log_sigmoid, expected_sigmoid
from numpyro_gpaug.math.special import log2cosh_half

from .contract import Augmentation, Conditionals, Parameters, label_sign, register


class BernoulliLogits(Augmentation):
    r"""``omega | f ~ PG(1, f)`` makes the likelihood ``exp(s f / 2 - omega f^2 / 2)``.

    With ``s = 2 y - 1`` and ``c = sqrt(m^2 + v)``, the bound is
    ``s m / 2 - log(2 cosh(c / 2))``.
    """

    latents = ("logits",)

    def bound(self, d, y, means: Parameters, variances: Parameters) -> Array:
        m, v = means["logits"], variances["logits"]
        return 0.5 * label_sign(y, m) * m - log2cosh_half(m * m + v)

    def conditional(self, d, y, f: Parameters) -> Conditionals:
        return {"omega": PolyaGamma(jnp.ones_like(f["logits"]), f["logits"])}

    def natural(self, d, y, aux, f: Parameters) -> dict[str, tuple[Array, Array]]:
        omega = aux["omega"]
        return {"logits": (0.5 * label_sign(y, omega), omega)}


def _expected_log_prob(d, y, m: Array, v: Array) -> Array:
    return expected_log_sigmoid(label_sign(y, m) * m, v)


def _predictive(d, m: Array, v: Array) -> dist.Distribution:
    return dist.BernoulliProbs(expected_sigmoid(m, v))


register(
    dist.BernoulliLogits, ("logits",), _expected_log_prob, _predictive,
    BernoulliLogits(), log_concave=True,
)  # fmt: skip
