# SPDX-License-Identifier: Apache-2.0
"""Negative binomial with logits: Polya-Gamma augmentation and exact expectation.

Polson, Scott and Windle (2013), Bayesian inference for logistic models using
Polya-Gamma latent variables.
"""

from __future__ import annotations

from typing import Any

import jax.numpy as jnp
import numpyro.distributions as dist
from jax import Array
from jax.nn import log_sigmoid, sigmoid

from numpyro_gpaug.distributions.mixtures import CountMixture
from numpyro_gpaug.distributions.polya_gamma import PolyaGamma
from numpyro_gpaug.math.incomplete import betainc, log_beta

from ._logistic import LogOdds
from .contract import Conditionals, Parameters, register


class NegativeBinomialLogits(LogOdds):
    r"""``omega | f ~ PG(y + r, f)`` for ``r = total_count``, with potential
    ``(y - r) / 2`` and precision ``omega``.

    With ``c = sqrt(m^2 + v)``, the bound is ``log Gamma(y + r) - log y! - log Gamma(r)
    + (y - r) m / 2 - (y + r) log(2 cosh(c / 2))``, differentiable in ``r``.
    """

    def counts(self, d: Any, y: Array, like: Array) -> tuple[Array, Array]:
        return jnp.asarray(y, like.dtype), jnp.asarray(d.total_count, like.dtype)

    def log_coefficient(self, ups: Array, downs: Array) -> Array:
        return -log_beta(downs, ups + 1) - jnp.log(ups + downs)

    def conditional(self, d, y, f: Parameters) -> Conditionals:
        return {"omega": PolyaGamma(sum(self.counts(d, y, f["logits"])), f["logits"])}


_AUGMENTATION = NegativeBinomialLogits()


class NegativeBinomialMixture(CountMixture):
    """The predictive distribution; ``other`` is the number of stops."""

    def likelihood(self, other: Array, logits: Array) -> dist.Distribution:
        return dist.NegativeBinomialLogits(other, logits)

    def turn(self, other: Array, y: Array) -> tuple[Array, Array, Array]:
        width = jnp.sqrt(1 / (y + 0.5) + 1 / other)
        constant = _AUGMENTATION.log_coefficient(y, other)
        return jnp.log((y + 0.5) / other), width, constant

    def exponent(self, other: Array, y: Array, logits: Array) -> Array:
        return y * log_sigmoid(logits) + other * log_sigmoid(-logits)

    def at_most(self, other: Array, y: Array, logits: Array) -> Array:
        return betainc(other, y + 1, sigmoid(-logits), sigmoid(logits))


def _predictive(d, m: Array, v: Array) -> dist.Distribution:
    total = jnp.asarray(d.total_count, m.dtype)
    # The rate is log-normal.
    odds = jnp.exp(m + 0.5 * v)
    rates = jnp.square(odds) * jnp.exp(v)
    variance = total * (odds + rates) + jnp.square(total * odds) * jnp.expm1(v)
    return NegativeBinomialMixture(total, m, v, total * odds, variance)


register(
    dist.NegativeBinomialLogits, ("logits",), _AUGMENTATION.expected_log_prob,
    _predictive, _AUGMENTATION, log_concave=True,
)  # fmt: skip
