# SPDX-License-Identifier: Apache-2.0
r"""Multi-class likelihoods: the softmax and the logistic-softmax.

The logistic-softmax is augmented with a Gamma variable for its normaliser, a count per
class and a Polya-Gamma variable per class (Galy-Fajou, Wenzel, Donner and Opper, 2020,
Multi-class Gaussian process classification made conjugate). Both have exact
expectations by a one-dimensional integral (``numpyro_gpaug.math.log_sum``); the softmax
has no augmentation.
"""

from __future__ import annotations

from typing import Any

import jax
import jax.numpy as jnp
import numpyro.distributions as dist
from jax import Array, lax
from jax.scipy.special import digamma, gammaln, polygamma

from numpyro_gpaug import distributions
from numpyro_gpaug._numpyro import Ordered
from numpyro_gpaug.distributions._classes import chosen_class
from numpyro_gpaug.distributions.class_counts import traceable
from numpyro_gpaug.distributions.predictor_mixture import PredictorMixture
from numpyro_gpaug.math.correlated_softmax import (
    expected_log_sum_exp,
    expected_softmax,
    nodes_of,
    pair_places,
)
from numpyro_gpaug.math.log_sum import (
    EXPONENTIAL,
    LOGISTIC,
    expected_log_sum,
    expected_shares,
)
from numpyro_gpaug.math.logistic import expected_log_sigmoid

from ._logistic import PolyaGammaOrZero, log_tilt
from .contract import Augmentation, Conditionals, Parameters, register
from .expectations import CorrelatedExpectation, register_correlated

NEWTON_STEPS = 4


class LogisticSoftmax(Augmentation):
    r"""``1 / S = int exp(-lambda S) dlambda`` with ``S = sum_c sigmoid(f_c)``, then
    ``exp(-lambda sigmoid(f)) = sum_n Poisson(n | lambda) sigmoid(-f)^n``.

    In the order of the draws: ``lambda | f ~ Exponential(S)``,
    ``n_c | lambda, f ~ Poisson(lambda sigmoid(-f_c))``,
    ``omega_c | n, f ~ PG(Y_c + n_c, f_c)`` with Y the one-hot label; potential
    ``(Y_c - n_c) / 2``, precision ``omega_c``.

    The bound integrates lambda out: the counts are then negative multinomial, and with
    ``log T(m) = m / 2 - log(2 cosh(c / 2))``, ``c = sqrt(m^2 + v)``, the bound is
    ``log T(m_y) - log sum_c (1 - T(-m_c))``. It is tight as ``v -> 0`` and never below
    the mean-field bound of the paper (:class:`LogisticSoftmaxMeanField`).
    """

    latents = ("logits",)
    latent_axis = -1

    def bound(self, d, y, means: Parameters, variances: Parameters) -> Array:
        m, v = means["logits"], variances["logits"]
        total = -jnp.expm1(log_tilt(-m, v)).sum(-1)
        return chosen_class(log_tilt(m, v), y) - jnp.log(total)

    def conditional(self, d, y, f: Parameters) -> Conditionals:
        logits = f["logits"]
        label = _one_hot(y, logits)

        def counts(aux: dict[str, Array]) -> dist.Distribution:
            return dist.Poisson(aux["rate"][..., None] * jax.nn.sigmoid(-logits))

        def omega(aux: dict[str, Array]) -> dist.Distribution:
            shape = label + jnp.asarray(aux["counts"], logits.dtype)
            return PolyaGammaOrZero(shape, logits)

        rate = dist.Exponential(jax.nn.sigmoid(logits).sum(-1))
        return {"rate": rate, "counts": counts, "omega": omega}

    def natural(self, d, y, aux, f: Parameters) -> dict[str, tuple[Array, Array]]:
        omega = aux["omega"]
        counts = jnp.asarray(aux["counts"], omega.dtype)
        return {"logits": (0.5 * (_one_hot(y, omega) - counts), omega)}


class LogisticSoftmaxMeanField(LogisticSoftmax):
    r"""The published bound: independent factors ``Gamma(alpha, C)`` for lambda and
    ``Poisson(gamma_c) PG(Y_c + n_c, c_c)`` for counts and Polya-Gamma variables.

    ``gamma_c = exp(psi(alpha)) T(-m_c) / C`` (equation 12 of the paper's appendix
    prints a denominator half as large, with which the iteration can diverge) and
    ``alpha = 1 + sum_c gamma_c`` are solved by Newton's method. The paper uses five
    plain iterations, which converge slowly if ``mean_c T(-m_c)`` is near one. The bound
    is not tight as ``v -> 0``.
    """

    def bound(self, d, y, means: Parameters, variances: Parameters) -> Array:
        m, v = means["logits"], variances["logits"]
        num_classes = m.shape[-1]
        log_rho = log_tilt(-m, v)
        alpha = _alpha(lax.stop_gradient(-jnp.expm1(log_rho).mean(-1)))
        log_gamma = digamma(alpha)[..., None] - jnp.log(num_classes) + log_rho
        # At the optimum of the auxiliaries, the bound depends only on log T.
        gamma = lax.stop_gradient(jnp.exp(log_gamma))
        moves = (gamma * (log_rho - lax.stop_gradient(log_rho))).sum(-1)
        entropy = (alpha - 1) * (1 - digamma(alpha)) + gammaln(alpha)
        return chosen_class(log_tilt(m, v), y) + moves + entropy - jnp.log(num_classes)


def _alpha(complement: Array) -> Array:
    """Solve ``alpha = 1 + R exp(psi(alpha))``, given ``1 - R`` in (0, 1)."""
    ratio = 1 - complement
    alpha = (1 - 0.5 * ratio) / complement
    for _ in range(NEWTON_STEPS):
        exponential = ratio * jnp.exp(digamma(alpha))
        slope = 1 - exponential * polygamma(1, alpha)
        alpha = alpha - (alpha - 1 - exponential) / slope
    return alpha


def _one_hot(y: Array, like: Array) -> Array:
    return jax.nn.one_hot(y, like.shape[-1], dtype=like.dtype)


def _classes(shares: Array, least: Array) -> dist.Distribution:
    """Return a distribution of classes with given probabilities. Where a probability is
    below rounding, its logarithm is at least the lower bound ``least``, from Jensen's
    inequality."""
    tiny = jnp.finfo(shares.dtype).tiny
    return dist.CategoricalLogits(
        jnp.maximum(jnp.log(jnp.maximum(shares, tiny)), least)
    )


def _logistic_expectation(d, y, m: Array, v: Array) -> Array:
    own = expected_log_sigmoid(chosen_class(m, y), chosen_class(v, y))
    return own - expected_log_sum(LOGISTIC, m, v)


def _logistic_predictive(d, m: Array, v: Array) -> dist.Distribution:
    most = jnp.minimum(m + 0.5 * v, 0)
    least = expected_log_sigmoid(m, v) - jax.nn.logsumexp(most, -1, keepdims=True)
    return _classes(expected_shares(LOGISTIC, m, v), least)


def _label_density(d, y, mean: Array, normaliser: Array) -> Array:
    return chosen_class(mean, y) - normaliser


def _label_predictive(d, *at: Any) -> dist.Distribution:
    least = at[0] - jax.nn.logsumexp(at[0] + 0.5 * at[1], -1, keepdims=True)
    independent = len(at) == 2
    shares = expected_shares(EXPONENTIAL, *at) if independent else expected_softmax(*at)
    return _classes(shares, least)


def _count_density(d, y, mean: Array, normaliser: Array) -> Array:
    counts, total = (jnp.asarray(x, mean.dtype) for x in (y, d.total_count))
    ways = gammaln(total + 1) - gammaln(counts + 1).sum(-1)
    return (counts * mean).sum(-1) - total * normaliser + ways


def _count_predictive(d, mean: Array, variance: Array, *covariance: Array):
    if not covariance:
        pairs = len(pair_places(mean.shape[-1])[0])
        d = traceable(d)
        covariance = (jnp.zeros((*mean.shape[:-1], pairs), mean.dtype),)
    logits = nodes_of(mean, variance, *covariance)
    weights = jnp.full(len(logits), 1 / len(logits), mean.dtype)
    leaves, treedef = jax.tree.flatten(Ordered(d))
    varies = tuple(x is d.logits for x in leaves)
    leaves = [logits if v else x for x, v in zip(leaves, varies, strict=True)]
    return PredictorMixture(
        tuple(leaves), weights, treedef, varies, d.batch_shape, d.event_shape
    )


def _register_softmax(likelihood: Any, density: Any, predictive: Any) -> None:
    """Register a likelihood that depends on the normaliser of a softmax.

    :param likelihood: its class.
    :param density: a function of ``(d, y, mean, E log sum exp)``.
    :param predictive: a function of ``d`` and the mean and variance, or the mean,
        variance and covariances.
    """

    def independent(d, y, m: Array, v: Array) -> Array:
        return density(d, y, m, expected_log_sum(EXPONENTIAL, m, v))

    def correlated(d, y, mean: Array, *others: Any) -> Array:
        return density(d, y, mean, expected_log_sum_exp(mean, *others))

    expectation = CorrelatedExpectation("logits", correlated, predictive)
    register_correlated(likelihood, expectation)
    register(likelihood, ("logits",), independent, predictive, competing=True)


_register_softmax(dist.MultinomialLogits, _count_density, _count_predictive)
_register_softmax(dist.CategoricalLogits, _label_density, _label_predictive)
for likelihood, augmentation in (
    (distributions.LogisticSoftmax, LogisticSoftmax()),
    (distributions.LogisticSoftmaxMeanField, LogisticSoftmaxMeanField()),
):
    register(
        likelihood, ("logits",), _logistic_expectation, _logistic_predictive,
        augmentation,
    )  # fmt: skip
