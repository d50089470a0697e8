# SPDX-License-Identifier: Apache-2.0
"""Binomial with logits: Polya-Gamma augmentation and exact expectation.

Polson, Scott and Windle (2013), Bayesian inference for logistic models using
Polya-Gamma latent variables.
"""

from __future__ import annotations

from typing import Any

import jax.numpy as jnp
import numpyro.distributions as dist
from jax import Array
from jax.nn import log_sigmoid, sigmoid

from numpyro_gpaug.distributions.densities import near, remainder
from numpyro_gpaug.distributions.mixtures import CountMixture
from numpyro_gpaug.math.incomplete import betainc, log_beta

from ._logistic import LogOdds, PolyaGammaOrZero, sigmoid_moments
from .contract import Conditionals, Parameters, register


class BinomialLogits(LogOdds):
    r"""``omega | f ~ PG(n, f)`` for ``n`` trials, with potential ``y - n / 2`` and
    precision ``omega``.

    With ``c = sqrt(m^2 + v)``, the bound is
    ``log C(n, y) + (y - n / 2) m - n log(2 cosh(c / 2))``.
    """

    def counts(self, d: Any, y: Array, like: Array) -> tuple[Array, Array]:
        y = jnp.asarray(y, like.dtype)
        return y, jnp.asarray(d.total_count, like.dtype) - y

    def log_coefficient(self, ups: Array, downs: Array) -> Array:
        return -log_beta(ups + 1, downs + 1) - jnp.log1p(ups + downs)

    def conditional(self, d, y, f: Parameters) -> Conditionals:
        trials = jnp.asarray(d.total_count, f["logits"].dtype)
        return {"omega": PolyaGammaOrZero(trials, f["logits"])}


_AUGMENTATION = BinomialLogits()


class BinomialMixture(CountMixture):
    """The predictive distribution; ``other`` is the number of trials, above which
    counts have probability zero."""

    def likelihood(self, other: Array, logits: Array) -> dist.Distribution:
        # NumPyro's sampler uses numbers of trials as indices of a table.
        return dist.BinomialLogits(logits, other.astype(jnp.result_type(int)))

    def turn(self, other: Array, y: Array) -> tuple[Array, Array, Array]:
        possible = y <= other
        y = jnp.minimum(y, other)
        constant = remainder(other) - remainder(y) - remainder(other - y)
        ups, downs = y + 0.5, other - y + 0.5
        width = jnp.sqrt(1 / ups + 1 / downs)
        return jnp.log(ups / downs), width, jnp.where(possible, constant, -jnp.inf)

    def exponent(self, other: Array, y: Array, logits: Array) -> Array:
        downs = jnp.maximum(other - y, 0)
        # Relative to the largest density, which is a small number for large counts.
        log_total = jnp.log(jnp.maximum(other, 1))
        ups, downs = (
            near(k, other * sigmoid(f), log_total + log_sigmoid(f))
            for k, f in ((y, logits), (downs, -logits))
        )
        return ups + downs

    def at_most(self, other: Array, y: Array, logits: Array) -> Array:
        downs = jnp.maximum(other - y, 1)
        below = betainc(downs, y + 1, sigmoid(-logits), sigmoid(logits))
        return jnp.where(y < other, below, 1)


def _predictive(d, m: Array, v: Array) -> dist.Distribution:
    n = jnp.asarray(d.total_count, m.dtype)
    p, spread = sigmoid_moments(m, v)
    variance = n * p * (1 - p) + n * (n - 1) * spread
    return BinomialMixture(n, m, v, n * p, variance)


register(
    dist.BinomialLogits, ("logits",), _AUGMENTATION.expected_log_prob, _predictive,
    _AUGMENTATION, log_concave=True,
)  # fmt: skip
