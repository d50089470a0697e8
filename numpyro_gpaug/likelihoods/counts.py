# SPDX-License-Identifier: Apache-2.0
"""Log-densities of large counts.

A density of counts has logarithms of factorials, whose difference is far smaller than
they are: of a million counts, float32 loses a nat, and noise of that size makes weights
of draws uneven. The distance from expected counts, and the remainders of Stirling's
formula, are small numbers.

Reference: Loader (2000), Fast and accurate computation of binomial probabilities.
"""

from __future__ import annotations

from typing import Any

import jax
import jax.numpy as jnp
import numpyro.distributions as dist
from jax import Array
from jax.scipy.special import gammaln, xlogy
from numpyro.distributions import (
    BinomialLogits,
    BinomialProbs,
    Distribution,
    MultinomialLogits,
    MultinomialProbs,
)
from numpyro.distributions.util import clamp_probs

from numpyro_gpaug.likelihoods.expectations import base_distribution, through_wrappers

# From this number on, the three terms of the remainder are exact to 1e-8.
LARGE = 16.0


def stable_log_prob(fn: Distribution, value: Any) -> Array:
    """Return the log-density of observations, accurate for large counts.

    :param fn: the likelihood.
    :param value: the observations.
    """
    base = base_distribution(fn)
    if type(base) not in _DENSITIES:
        return fn.log_prob(value)
    y = jnp.asarray(value, jnp.result_type(float))
    return through_wrappers(fn, lambda d: _DENSITIES[type(d)](d, y))


def _poisson(d: Any, y: Array) -> Array:
    rate = jnp.asarray(d.rate, y.dtype)
    return _near(y, rate, _log(rate)) - _remainder(y)


def _binomial(d: Any, y: Array) -> Array:
    if isinstance(d, BinomialLogits):
        log = jax.nn.log_sigmoid(d.logits)
        logs = log, log - d.logits
        shares: Any = jnp.exp(logs[0]), jnp.exp(logs[1])
    else:
        probs = clamp_probs(d.probs)
        shares, logs = (probs, 1 - probs), (jnp.log(probs), jnp.log1p(-probs))
    total = jnp.asarray(d.total_count, y.dtype)
    return _shared(total, (y, total - y), shares, logs)


def _multinomial(d: Any, y: Array) -> Array:
    if isinstance(d, MultinomialLogits):
        logs = jax.nn.log_softmax(d.logits)
        shares = jnp.exp(logs)
    else:
        shares, logs = d.probs, _log(d.probs)
    total = jnp.asarray(d.total_count, y.dtype)
    return _shared(total, *(jnp.moveaxis(x, -1, 0) for x in (y, shares, logs)))


def _shared(total: Array, counts: Any, shares: Any, logs: Any) -> Array:
    """Return the log-density of counts with a given total, by category."""
    parts = [
        _near(k, total * share, jnp.log(jnp.maximum(total, 1)) + log) - _remainder(k)
        for k, share, log in zip(counts, shares, logs, strict=True)
    ]
    return _remainder(total) + sum(parts[1:], parts[0])


def _log(x: Array) -> Array:
    """Return a logarithm whose derivative at zero is zero, as data are zero there."""
    return jnp.where(x > 0, jnp.log(jnp.where(x > 0, x, 1)), -jnp.inf)


def _near(count: Array, mean: Array, log_mean: Array) -> Array:
    """Return ``count log(mean / count) - (mean - count)``, without cancellation where
    both are close."""
    known = jnp.maximum(count, 1)
    change = (mean - known) / known
    close = jnp.abs(change) < 0.5
    log = jnp.log1p(jnp.where(close, change, 0))
    log = jnp.where(close, log, log_mean - jnp.log(known))
    return jnp.where(count > 0, known * (log - change), -mean)


def _remainder(count: Array) -> Array:
    """Return ``log(count!) - count log(count) + count``."""
    few = jnp.minimum(count, LARGE)
    many = jnp.maximum(count, LARGE)
    terms = 1 / (12 * many) - 1 / (360 * many**3)
    return jnp.where(
        count < LARGE,
        gammaln(few + 1) - xlogy(few, few) + few,
        0.5 * jnp.log(2 * jnp.pi * many) + terms,
    )


_DENSITIES = {
    dist.Poisson: _poisson,
    BinomialLogits: _binomial,
    BinomialProbs: _binomial,
    MultinomialLogits: _multinomial,
    MultinomialProbs: _multinomial,
}
