# SPDX-License-Identifier: Apache-2.0
"""Log-densities of large counts, and of gamma and beta variables with large shapes.

A density of counts has logarithms of factorials, whose difference is far smaller than
they are: of a million counts, float32 loses a nat, and noise of that size makes weights
of draws uneven. The distance from expected counts, and the remainders of Stirling's
formula, are small numbers. Shapes are like counts.

Reference: Loader (2000), Fast and accurate computation of binomial probabilities.
"""

from __future__ import annotations

from typing import Any

import jax
import jax.numpy as jnp
import numpyro.distributions as dist
from jax import Array
from jax.scipy.special import gammaln, xlogy
from numpyro.distributions.util import clamp_probs

from numpyro_gpaug.math.incomplete import log_beta

# From this number on, the three terms of the remainder are exact to 1e-8.
LARGE = 16.0


def log_density(d: Any, value: Any) -> Any:
    """Return the log-density of observations, accurate for large counts.

    :param d: their distribution, without wrappers.
    :param value: the observations.
    """
    if type(d) not in DENSITIES:
        return d.log_prob(value)
    return DENSITIES[type(d)](d, jnp.asarray(value, jnp.result_type(float)))


def _poisson(d: Any, y: Array) -> Array:
    return near_rate(y, jnp.asarray(d.rate, y.dtype)) - remainder(y)


@jax.custom_jvp
def near_rate(count: Array, rate: Array) -> Array:
    """Return :func:`near` of a count that is known. It has a derivative of its own, and
    so remains one operation in the program of a model."""
    return near(count, rate, safe_log(rate))


def _with_rate(moved: Array, _: Array, count: Array, rate: Array) -> Array:
    ratio = jnp.where(rate > 0, count / jnp.where(rate > 0, rate, 1), 0)
    return (ratio - 1) * moved


near_rate.defjvps(None, _with_rate)


def _binomial(d: Any, y: Array) -> Array:
    if isinstance(d, dist.BinomialLogits):
        log = jax.nn.log_sigmoid(d.logits)
        logs = log, log - d.logits
        shares: Any = jnp.exp(logs[0]), jnp.exp(logs[1])
    else:
        probs = clamp_probs(d.probs)
        shares, logs = (probs, 1 - probs), (jnp.log(probs), jnp.log1p(-probs))
    total = jnp.asarray(d.total_count, y.dtype)
    return _shared(total, (y, total - y), shares, logs)


def _negative_binomial(d: Any, y: Array) -> Array:
    total = jnp.asarray(d.total_count, y.dtype)
    each = y * jax.nn.log_sigmoid(d.logits) + total * jax.nn.log_sigmoid(-d.logits)
    return each - log_beta(total, y + 1) - jnp.log(total + y)


def _multinomial(d: Any, y: Array) -> Array:
    if isinstance(d, dist.MultinomialLogits):
        logs = jax.nn.log_softmax(d.logits)
        shares = jnp.exp(logs)
    else:
        shares, logs = d.probs, safe_log(d.probs)
    total = jnp.asarray(d.total_count, y.dtype)
    return _shared(total, *(jnp.moveaxis(x, -1, 0) for x in (y, shares, logs)))


def _gamma(d: Any, y: Array) -> Array:
    shape, scaled = jnp.asarray(d.concentration, y.dtype), d.rate * y
    found = near(shape, scaled, safe_log(scaled)) - _shape(shape) - safe_log(y)
    return jnp.where(shape < LARGE, d.log_prob(y), found)


def _beta(d: Any, y: Array) -> Array:
    shapes = d.concentration1, d.concentration0
    total = shapes[0] + shapes[1]
    found = _shape(total)
    for shape, share in zip(shapes, (y, 1 - y), strict=True):
        found += near(shape, total * share, safe_log(total * share))
        found -= _shape(shape) + safe_log(share)
    return jnp.where(jnp.minimum(*shapes) < LARGE, d.log_prob(y), found)


def _shape(shape: Array) -> Array:
    """Return ``log Gamma(shape) - shape log(shape) + shape``."""
    return remainder(shape) - jnp.log(shape)


def _zero_inflated(d: Any, y: Array) -> Array:
    found = jnp.log1p(-d.gate) + log_density(d.base_dist, y)
    return jnp.where(y == 0, jnp.logaddexp(safe_log(d.gate), found), found)


def _shared(total: Array, counts: Any, shares: Any, logs: Any) -> Array:
    """Return the log-density of counts with a given total, by category."""
    parts = [
        near(k, total * share, jnp.log(jnp.maximum(total, 1)) + log) - remainder(k)
        for k, share, log in zip(counts, shares, logs, strict=True)
    ]
    return remainder(total) + sum(parts[1:], parts[0])


def safe_log(x: Array) -> Array:
    """Return a logarithm whose derivative at zero is zero, as data are zero there."""
    return jnp.where(x > 0, jnp.log(jnp.where(x > 0, x, 1)), -jnp.inf)


def near(count: Array, mean: Array, log_mean: Array) -> Array:
    """Return ``count log(mean / count) - (mean - count)``, without cancellation where
    both are close."""
    known = jnp.maximum(count, 1)
    change = (mean - known) / known
    close = jnp.abs(change) < 0.5
    log = jnp.log1p(jnp.where(close, change, 0))
    log = jnp.where(close, log, log_mean - jnp.log(known))
    return jnp.where(count > 0, known * (log - change), -mean)


def remainder(count: Array) -> Array:
    """Return ``log(count!) - count log(count) + count``."""
    few = jnp.minimum(count, LARGE)
    many = jnp.maximum(count, LARGE)
    terms = 1 / (12 * many) - 1 / (360 * many**3)
    return jnp.where(
        count < LARGE,
        gammaln(few + 1) - xlogy(few, few) + few,
        0.5 * jnp.log(2 * jnp.pi * many) + terms,
    )


DENSITIES = {
    dist.Poisson: _poisson,
    dist.BinomialLogits: _binomial,
    dist.BinomialProbs: _binomial,
    dist.MultinomialLogits: _multinomial,
    dist.MultinomialProbs: _multinomial,
    dist.NegativeBinomialLogits: _negative_binomial,
    dist.Gamma: _gamma,
    dist.Beta: _beta,
    dist.BetaProportion: _beta,
    dist.ZeroInflatedPoisson: _zero_inflated,
}
