# SPDX-License-Identifier: Apache-2.0
"""Normal observations with a latent log-variance: the exact expectation."""

from __future__ import annotations

import jax.numpy as jnp
import numpyro.distributions as dist
from jax import Array

from numpyro_gpaug.distributions.log_variance_normal import LogVarianceNormal
from numpyro_gpaug.distributions.mixtures import NoiseMixture
from numpyro_gpaug.math.normal import LOG_2PI

from .contract import Parameters, moments, register

LATENTS = ("loc", "log_variance")


def _expected_log_prob(d, y, means: Parameters, variances: Parameters) -> Array:
    m, v, mg, vg = moments(LATENTS, means, variances)
    square = (jnp.square(y - m) + v) * jnp.exp(0.5 * vg - mg)
    return -0.5 * (mg + square + LOG_2PI)


def _predictive(d, means: Parameters, variances: Parameters) -> dist.Distribution:
    m, v, mg, vg = moments(LATENTS, means, variances)
    latent = tuple(jnp.broadcast_arrays(m, v, mg, vg, jnp.zeros_like(m)))
    return NoiseMixture(_log_noise, latent, m, v + jnp.exp(mg + 0.5 * vg))


def _log_noise(log_variance: Array, _: Array) -> Array:
    return log_variance


register(LogVarianceNormal, LATENTS, _expected_log_prob, _predictive)
