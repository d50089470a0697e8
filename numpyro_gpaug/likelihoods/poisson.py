# SPDX-License-Identifier: Apache-2.0
"""Poisson counts whose rate is a scaled logistic: Poisson and Polya-Gamma augmentation.

Donner and Opper (2018), Efficient Bayesian inference of sigmoidal Gaussian Cox
processes; the second auxiliary is that of Polson, Scott and Windle (2013).
"""

from __future__ import annotations

import jax
import jax.numpy as jnp
import numpyro.distributions as dist
from jax import Array
from jax.scipy.special import gammaln

from numpyro_gpaug.distributions.logistic_poisson import LogisticPoisson as Likelihood
from numpyro_gpaug.distributions.mixtures import CountMixture
from numpyro_gpaug.likelihoods._logistic import PolyaGammaOrZero, log_tilt
from numpyro_gpaug.likelihoods.augmentation import (
    Augmentation,
    Conditionals,
    Parameters,
    register_augmentation,
)
from numpyro_gpaug.likelihoods.expectations import register_expectation
from numpyro_gpaug.likelihoods.maximisers import MStep, power_maximiser, register_m_step
from numpyro_gpaug.math.logistic import expected_log_sigmoid, expected_sigmoid
from numpyro_gpaug.math.quadrature import gaussian_nodes


def _constant(d, y: Array, like: Array) -> tuple[Array, Array, Array]:
    """The counts, the largest rate, and the part of the log-density without f."""
    y, rate = (jnp.asarray(x, like.dtype) for x in (y, d.max_rate))
    return y, rate, y * jnp.log(rate) - gammaln(y + 1)


class LogisticPoisson(Augmentation):
    r"""``exp(-L sigmoid(f)) = sum_n Poisson(n | L) sigmoid(-f)^n``, ``L = max_rate``:
    ``n`` is the number of events that were thinned out.

    ``n | f ~ Poisson(L sigmoid(-f))``, then ``omega | n, f ~ PG(y + n, f)``, with
    potential ``(y - n) / 2`` and precision ``omega``. With ``c = sqrt(m^2 + v)``,
    ``log T(m) = m / 2 - log(2 cosh(c / 2))``, the bound is
    ``y log L - log y! + y log T(m) - L (1 - T(-m))``, differentiable in ``L``.
    """

    latents = ("logits",)

    def bound(self, d, y, means: Parameters, variances: Parameters) -> Array:
        m, v = means["logits"], variances["logits"]
        y, rate, constant = _constant(d, y, m)
        return constant + y * log_tilt(m, v) + rate * jnp.expm1(log_tilt(-m, v))

    def conditional(self, d, y, f: Parameters) -> Conditionals:
        logits = f["logits"]
        y = jnp.asarray(y, logits.dtype)

        def omega(aux: dict[str, Array]) -> dist.Distribution:
            return PolyaGammaOrZero(y + jnp.asarray(aux["n"], y.dtype), logits)

        return {"n": dist.Poisson(d.max_rate * jax.nn.sigmoid(-logits)), "omega": omega}

    def natural(self, d, y, aux, f: Parameters) -> dict[str, tuple[Array, Array]]:
        omega = aux["omega"]
        y, n = (jnp.asarray(x, omega.dtype) for x in (y, aux["n"]))
        return {"logits": (0.5 * (y - n), omega)}


def _expected_log_prob(d, y, means: Parameters, variances: Parameters) -> Array:
    m, v = means["logits"], variances["logits"]
    y, rate, constant = _constant(d, y, m)
    return constant + y * expected_log_sigmoid(m, v) - rate * expected_sigmoid(m, v)


class LogisticPoissonMixture(CountMixture):
    """The predictive distribution; ``parameter`` is the largest rate."""

    def likelihood(self, parameter: Array, logits: Array) -> dist.Distribution:
        return Likelihood(logits, parameter)

    def turn(self, parameter: Array, y: Array) -> tuple[Array, Array, Array]:
        # The number of thinned events plays the failures of a binomial.
        ups, downs = y + 0.5, jnp.maximum(parameter - y, 0) + 0.5
        constant = y * jnp.log(parameter) - gammaln(y + 1)
        return jnp.log(ups / downs), jnp.sqrt(1 / ups + 1 / downs), constant

    def exponent(self, parameter: Array, y: Array, logits: Array) -> Array:
        return y * jax.nn.log_sigmoid(logits) - parameter * jax.nn.sigmoid(logits)


def _predictive(d, means: Parameters, variances: Parameters) -> dist.Distribution:
    m, v = means["logits"], variances["logits"]
    rate = jnp.asarray(d.max_rate, m.dtype)
    nodes, log_weights = gaussian_nodes(m, v)
    kept = expected_sigmoid(m, v)
    # The variance of the rate has no closed form.
    weights = jnp.exp(log_weights)
    spread = (weights * jnp.square(jax.nn.sigmoid(nodes) - kept[..., None])).sum(-1)
    variance = rate * kept + jnp.square(rate) * spread
    return LogisticPoissonMixture(rate, m, v, rate * kept, variance)


register_augmentation(Likelihood, LogisticPoisson())
register_expectation(Likelihood, ("logits",), _expected_log_prob, _predictive)


def _counts(d, y: Array, means: Parameters, variances: Parameters) -> Array:
    return -jnp.asarray(y, means["logits"].dtype)


register_m_step(Likelihood, "max_rate", MStep(_counts, power_maximiser(-1)))
