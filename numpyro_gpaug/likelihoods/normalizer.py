# SPDX-License-Identifier: Apache-2.0
"""The logistic-softmax with sampled classes, and its normaliser as a factor."""

from __future__ import annotations

import jax
import jax.numpy as jnp
import numpyro.distributions as dist
from jax import Array

from numpyro_gpaug.distributions import LogisticNormalizer as Likelihood
from numpyro_gpaug.distributions import SampledLogisticSoftmax
from numpyro_gpaug.math.logistic import expected_log_sigmoid, expected_sigmoid

from ._logistic import PolyaGammaOrZero, log_tilt
from .contract import Augmentation, Conditionals, Parameters, register


class LogisticNormalizer(Augmentation):
    r"""``exp(-r sigmoid(f)) = sum_n Poisson(n | r) sigmoid(-f)^n`` for each class.

    ``n | f ~ Poisson(r sigmoid(-f))`` with ``r = C / (K zeta)``, then
    ``omega | n, f ~ PG(n, f)``; potential ``-n / 2``, precision ``omega``. The bound
    replaces ``E sigmoid(f)`` by ``1 - T(-m)``, where
    ``log T(m) = m / 2 - log(2 cosh(c / 2))`` with ``c = sqrt(m^2 + v)``.
    """

    latents = ("logits",)
    latent_axis = -1

    def bound(self, d, y, means: Parameters, variances: Parameters) -> Array:
        m, v = means["logits"], variances["logits"]
        return d.constant + d.rate * jnp.expm1(log_tilt(-m, v)).sum(-1)

    def conditional(self, d, y, f: Parameters) -> Conditionals:
        logits = f["logits"]

        def omega(aux: dict[str, Array]) -> dist.Distribution:
            return PolyaGammaOrZero(jnp.asarray(aux["n"], logits.dtype), logits)

        rate = d.rate[..., None] * jax.nn.sigmoid(-logits)
        return {"n": dist.Poisson(rate), "omega": omega}

    def natural(self, d, y, aux, f: Parameters) -> dict[str, tuple[Array, Array]]:
        omega = aux["omega"]
        return {"logits": (-0.5 * jnp.asarray(aux["n"], omega.dtype), omega)}


def _expected_log_prob(d, y, m: Array, v: Array) -> Array:
    return d.constant - d.rate * expected_sigmoid(m, v).sum(-1)


def _predictive(d, m: Array, v: Array):
    raise NotImplementedError(
        f"{type(d).__name__} has no observations to predict: predict the latents "
        "and pass them to LogisticSoftmax"
    )


def _sampled(d, y, m: Array, v: Array) -> Array:
    return d.bound(expected_log_sigmoid(m, v), expected_sigmoid(m, v), y)


register(SampledLogisticSoftmax, ("logits",), _sampled, _predictive)
register(Likelihood, ("logits",), _expected_log_prob, _predictive, LogisticNormalizer())
