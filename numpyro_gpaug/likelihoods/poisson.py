# SPDX-License-Identifier: Apache-2.0
"""Poisson counts whose rate is a scaled logistic: Poisson and Polya-Gamma augmentation.

Donner and Opper (2018), Efficient Bayesian inference of sigmoidal Gaussian Cox
processes; the second auxiliary is from Polson, Scott and Windle (2013).
"""

from __future__ import annotations

import jax
import jax.numpy as jnp
import numpyro.distributions as dist
from jax import Array
from jax.scipy.special import gammaln

from numpyro_gpaug.distributions.logistic_poisson import LogisticPoisson as Likelihood
from numpyro_gpaug.distributions.mixtures import CountMixture
from numpyro_gpaug.math.incomplete import gammaincc
from numpyro_gpaug.math.logistic import expected_log_sigmoid, expected_sigmoid

from ._logistic import PolyaGammaOrZero, log_tilt, sigmoid_moments
from .contract import Augmentation, Conditionals, Parameters, power, register


def _constant(d, y: Array, like: Array) -> tuple[Array, Array, Array]:
    """Return the counts, the largest rate, and the part of the log-density without
    f."""
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


def _expected_log_prob(d, y, m: Array, v: Array) -> Array:
    y, rate, constant = _constant(d, y, m)
    return constant + y * expected_log_sigmoid(m, v) - rate * expected_sigmoid(m, v)


class LogisticPoissonMixture(CountMixture):
    """The predictive distribution; ``other`` is the largest rate."""

    def likelihood(self, other: Array, logits: Array) -> dist.Distribution:
        return Likelihood(logits, other)

    def turn(self, other: Array, y: Array) -> tuple[Array, Array, Array]:
        # The number of thinned events is the number of failures of a binomial.
        ups, downs = y + 0.5, jnp.maximum(other - y, 0) + 0.5
        constant = y * jnp.log(other) - gammaln(y + 1)
        return jnp.log(ups / downs), jnp.sqrt(1 / ups + 1 / downs), constant

    def exponent(self, other: Array, y: Array, logits: Array) -> Array:
        return y * jax.nn.log_sigmoid(logits) - other * jax.nn.sigmoid(logits)

    def at_most(self, other: Array, y: Array, logits: Array) -> Array:
        return gammaincc(y + 1, other * jax.nn.sigmoid(logits))


def _predictive(d, m: Array, v: Array) -> dist.Distribution:
    rate = jnp.asarray(d.max_rate, m.dtype)
    kept, spread = sigmoid_moments(m, v)
    variance = rate * kept + jnp.square(rate) * spread
    return LogisticPoissonMixture(rate, m, v, rate * kept, variance)


def _counts(d, y: Array, means: Parameters, variances: Parameters) -> Array:
    return -jnp.asarray(y, means["logits"].dtype)


register(
    Likelihood, ("logits",), _expected_log_prob, _predictive, LogisticPoisson(),
    m_steps={"max_rate": power(-1, _counts)},
)  # fmt: skip
