# SPDX-License-Identifier: Apache-2.0
"""Normal observations with a latent log-variance: the exact expectation."""

from __future__ import annotations

import jax.numpy as jnp
import numpyro.distributions as dist
from jax import Array

from numpyro_gpaug.distributions.heteroscedastic_normal import LogVarianceNormal
from numpyro_gpaug.distributions.mixtures import NoiseMixture
from numpyro_gpaug.math.normal import LOG_2PI

from .contract import register


def _expected_log_prob(d, y, m: Array, v: Array, mg: Array, vg: Array) -> Array:
    square = (jnp.square(y - m) + v) * jnp.exp(0.5 * vg - mg)
    return -0.5 * (mg + square + LOG_2PI)


class _Predictive(NoiseMixture):
    def log_noise(self, latent: Array, other: Array) -> Array:
        return latent

    @property
    def variance(self) -> Array:
        _, v, mg, vg, _ = self._arrays()
        return v + jnp.exp(mg + 0.5 * vg)


def _predictive(d, m: Array, v: Array, mg: Array, vg: Array) -> dist.Distribution:
    return _Predictive(m, v, mg, vg, jnp.zeros_like(m))


register(LogVarianceNormal, ("loc", "log_variance"), _expected_log_prob, _predictive)
