# SPDX-License-Identifier: Apache-2.0
"""Negative binomial with logits: Polya-Gamma augmentation and exact expectation.

Polson, Scott and Windle (2013), Bayesian inference for logistic models using
Polya-Gamma latent variables.
"""

from __future__ import annotations

import jax.numpy as jnp
import numpyro.distributions as dist
from jax import Array
from jax.nn import log_sigmoid

from numpyro_gpaug.distributions.mixtures import CountMixture
from numpyro_gpaug.distributions.polya_gamma import PolyaGamma
from numpyro_gpaug.likelihoods._logistic import (
    expected_log_odds,
    log_beta,
    tilted_log_odds,
)
from numpyro_gpaug.likelihoods.augmentation import (
    Augmentation,
    Conditionals,
    Parameters,
    register_augmentation,
)
from numpyro_gpaug.likelihoods.expectations import register_expectation


def _counts(d, y: Array, like: Array) -> tuple[Array, Array]:
    """What is counted, and the number of stops."""
    return jnp.asarray(y, like.dtype), jnp.asarray(d.total_count, like.dtype)


def _log_coefficient(y: Array, total: Array) -> Array:
    return -log_beta(total, y + 1) - jnp.log(y + total)


class NegativeBinomialLogits(Augmentation):
    r"""``omega | f ~ PG(y + r, f)`` for ``r = total_count``, with potential
    ``(y - r) / 2`` and precision ``omega``.

    With ``c = sqrt(m^2 + v)``, the bound is ``log Gamma(y + r) - log y! - log Gamma(r)
    + (y - r) m / 2 - (y + r) log(2 cosh(c / 2))``, differentiable in ``r``.
    """

    latents = ("logits",)

    def bound(self, d, y, means: Parameters, variances: Parameters) -> Array:
        m, v = means["logits"], variances["logits"]
        counts = _counts(d, y, m)
        return _log_coefficient(*counts) + tilted_log_odds(m, v, *counts)

    def conditional(self, d, y, f: Parameters) -> Conditionals:
        return {"omega": PolyaGamma(sum(_counts(d, y, f["logits"])), f["logits"])}

    def natural(self, d, y, aux, f: Parameters) -> dict[str, tuple[Array, Array]]:
        y, total = _counts(d, y, aux["omega"])
        return {"logits": (0.5 * (y - total), aux["omega"])}


def _expected_log_prob(d, y, means: Parameters, variances: Parameters) -> Array:
    m, v = means["logits"], variances["logits"]
    counts = _counts(d, y, m)
    return _log_coefficient(*counts) + expected_log_odds(m, v, *counts)


class NegativeBinomialMixture(CountMixture):
    """The predictive distribution; ``parameter`` is the number of stops."""

    def likelihood(self, parameter: Array, logits: Array) -> dist.Distribution:
        return dist.NegativeBinomialLogits(parameter, logits)

    def turn(self, parameter: Array, y: Array) -> tuple[Array, Array, Array]:
        width = jnp.sqrt(1 / (y + 0.5) + 1 / parameter)
        return jnp.log((y + 0.5) / parameter), width, _log_coefficient(y, parameter)

    def exponent(self, parameter: Array, y: Array, logits: Array) -> Array:
        return y * log_sigmoid(logits) + parameter * log_sigmoid(-logits)


def _predictive(d, means: Parameters, variances: Parameters) -> dist.Distribution:
    m, v = means["logits"], variances["logits"]
    total = jnp.asarray(d.total_count, m.dtype)
    # The rate is log-normal.
    odds = jnp.exp(m + 0.5 * v)
    rates = jnp.square(odds) * jnp.exp(v)
    variance = total * (odds + rates) + jnp.square(total * odds) * jnp.expm1(v)
    return NegativeBinomialMixture(total, m, v, total * odds, variance)


register_augmentation(dist.NegativeBinomialLogits, NegativeBinomialLogits())
register_expectation(
    dist.NegativeBinomialLogits,
    ("logits",),
    _expected_log_prob,
    _predictive,
    log_concave=True,
)
