# SPDX-License-Identifier: Apache-2.0
"""Binomial with logits: Polya-Gamma augmentation and exact expectation.

Polson, Scott and Windle (2013), Bayesian inference for logistic models using
Polya-Gamma latent variables.
"""

from __future__ import annotations

import jax
import jax.numpy as jnp
import numpyro.distributions as dist
from jax import Array
from jax.nn import log_sigmoid

from numpyro_gpaug.distributions.mixtures import CountMixture
from numpyro_gpaug.likelihoods._logistic import (
    PolyaGammaOrZero,
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
from numpyro_gpaug.math.logistic import expected_sigmoid
from numpyro_gpaug.math.quadrature import gaussian_nodes


def _counts(d, y: Array, like: Array) -> tuple[Array, Array]:
    """Successes and failures."""
    y = jnp.asarray(y, like.dtype)
    return y, jnp.asarray(d.total_count, like.dtype) - y


def _log_coefficient(ups: Array, downs: Array) -> Array:
    return -log_beta(ups + 1, downs + 1) - jnp.log1p(ups + downs)


class BinomialLogits(Augmentation):
    r"""``omega | f ~ PG(n, f)`` for ``n`` trials, with potential ``y - n / 2`` and
    precision ``omega``.

    With ``c = sqrt(m^2 + v)``, the bound is
    ``log C(n, y) + (y - n / 2) m - n log(2 cosh(c / 2))``.
    """

    latents = ("logits",)

    def bound(self, d, y, means: Parameters, variances: Parameters) -> Array:
        m, v = means["logits"], variances["logits"]
        counts = _counts(d, y, m)
        return _log_coefficient(*counts) + tilted_log_odds(m, v, *counts)

    def conditional(self, d, y, f: Parameters) -> Conditionals:
        trials = jnp.asarray(d.total_count, f["logits"].dtype)
        return {"omega": PolyaGammaOrZero(trials, f["logits"])}

    def natural(self, d, y, aux, f: Parameters) -> dict[str, tuple[Array, Array]]:
        ups, downs = _counts(d, y, aux["omega"])
        return {"logits": (0.5 * (ups - downs), aux["omega"])}


def _expected_log_prob(d, y, means: Parameters, variances: Parameters) -> Array:
    m, v = means["logits"], variances["logits"]
    counts = _counts(d, y, m)
    return _log_coefficient(*counts) + expected_log_odds(m, v, *counts)


class BinomialMixture(CountMixture):
    """The predictive distribution; ``parameter`` is the number of trials, above which
    counts have probability zero."""

    def likelihood(self, parameter: Array, logits: Array) -> dist.Distribution:
        # NumPyro's sampler looks numbers of trials up in a table.
        return dist.BinomialLogits(logits, parameter.astype(jnp.result_type(int)))

    def turn(self, parameter: Array, y: Array) -> tuple[Array, Array, Array]:
        possible = y <= parameter
        y = jnp.minimum(y, parameter)
        constant = _log_coefficient(y, parameter - y)
        ups, downs = y + 0.5, parameter - y + 0.5
        width = jnp.sqrt(1 / ups + 1 / downs)
        return jnp.log(ups / downs), width, jnp.where(possible, constant, -jnp.inf)

    def exponent(self, parameter: Array, y: Array, logits: Array) -> Array:
        downs = jnp.maximum(parameter - y, 0)
        return y * log_sigmoid(logits) + downs * log_sigmoid(-logits)


def _predictive(d, means: Parameters, variances: Parameters) -> dist.Distribution:
    m, v = means["logits"], variances["logits"]
    n = jnp.asarray(d.total_count, m.dtype)
    nodes, log_weights = gaussian_nodes(m, v)
    p = expected_sigmoid(m, v)
    # The variance of the probability has no closed form.
    weights = jnp.exp(log_weights)
    spread = (weights * jnp.square(jax.nn.sigmoid(nodes) - p[..., None])).sum(-1)
    variance = n * p * (1 - p) + n * (n - 1) * spread
    return BinomialMixture(n, m, v, n * p, variance)


register_augmentation(dist.BinomialLogits, BinomialLogits())
register_expectation(
    dist.BinomialLogits, ("logits",), _expected_log_prob, _predictive, log_concave=True
)
