# SPDX-License-Identifier: Apache-2.0
"""Probability integral transforms."""

from __future__ import annotations

from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import numpyro.distributions as dist
from jax import Array, lax, random
from jax.typing import ArrayLike
from numpyro.distributions import Distribution

from numpyro_gpaug.distributions.predictor_mixture import CENSORED, at_most, uncensored
from numpyro_gpaug.likelihoods.expectations import base_distribution

# The number of draws whose ranks replace a cdf.
_NUM_DRAWS = 1000


def pit(predictive: Distribution | ArrayLike, y: ArrayLike, key: Array) -> np.ndarray:
    r"""Return the position of each observation in its prediction, which is uniform if
    the prediction is right.

    For real observations it is :math:`F_n(y_n)`, with :math:`F_n` the predictive
    cumulative distribution function. For labels and counts it is drawn uniformly
    between :math:`P_n(y < y_n)` and :math:`P_n(y \le y_n)`, which makes it uniform,
    too. A histogram with a hump means that predictions are too wide; high ends mean
    that they are too narrow; a slope means that they are too low or too high.

    The position of a censored observation is drawn uniformly from the positions that
    its uncensored value may have. Pass the indicator to the prediction for that,
    ``predict_y(X, censored=...)``.

    :param predictive: ``posterior.predict_y(X)``, a distribution of batch shape (N,);
        or draws, (num_draws, N), such as replicates of
        :class:`numpyro.infer.Predictive`. If the distribution has no ``cdf``, counts
        and labels sum probabilities up to ``y``, in time proportional to the largest,
        and real observations use ranks among 1000 draws.
    :param y: the observations, (N,).
    :param key: random key for the draws.
    :return: positions in [0, 1], (N,). Ranks among S draws are uniform over
        ``(0, 1)``, too: ``(draws below + u (ties + 1)) / (S + 1)`` with ``u`` uniform.
    :raises ValueError: if the shapes do not match.

    **Example**

    >>> import jax, numpyro.distributions as dist
    >>> key = jax.random.key(0)
    >>> pit(dist.Normal(0.0, 1.0).expand([2]), [0.0, -10.0], key).round(2)
    array([0.5, 0. ])
    >>> labels = pit(dist.Bernoulli(probs=jax.numpy.array([0.9, 0.9])), [1, 0], key)
    >>> bool(labels[0] > 0.1), bool(labels[1] < 0.1)
    (True, True)

    Reference: Czado, Gneiting and Held (2009), Predictive model assessment for count
    data.
    """
    if not isinstance(predictive, Distribution):
        draws = np.asarray(predictive)
        _check("one draw of shape", draws.shape[1:], y)
        return ranks(draws, y, random.uniform(key, draws.shape[1:]))
    if predictive.event_shape:
        raise ValueError(
            f"an observation has shape {predictive.event_shape}; expected one number"
        )
    shape = predictive.batch_shape
    _check("batch shape", shape, y)
    value, base = jnp.asarray(y), base_distribution(predictive)
    component = base_distribution(getattr(base, "component", base))
    steps = None
    if isinstance(component, CENSORED):
        steps = _censored_steps(uncensored(base), component, value)
    elif predictive.support.is_discrete:
        steps = _steps(base, value.astype(int))
    if steps is not None:
        below, equal = (np.asarray(p, float) for p in steps)
        return np.clip(below + np.asarray(random.uniform(key, shape)) * equal, 0, 1)
    try:
        return np.broadcast_to(np.asarray(base.cdf(value), float), shape)
    except NotImplementedError:
        rank_key, key = random.split(key)
        draws = np.asarray(predictive.sample(key, (_NUM_DRAWS,)))
        return ranks(draws, y, random.uniform(rank_key, shape))


def _check(what: str, shape: tuple[int, ...], y: ArrayLike) -> None:
    if len(shape) != 1 or np.shape(y) != shape:
        raise ValueError(
            f"predictive has {what} {shape} and y has shape {np.shape(y)}; expected "
            "(N,) and (N,), one number per observation"
        )


def ranks(draws: np.ndarray, y: ArrayLike, uniform: ArrayLike) -> np.ndarray:
    """Return ranks of observations among draws, divided by the number of ranks.

    :param draws: (draws, ...).
    :param y: observations, (...).
    :param uniform: uniform numbers, (...), which choose a place among equal draws.
    """
    y = np.asarray(y)
    below, ties = (draws < y).sum(0), (draws == y).sum(0)
    return (below + np.asarray(uniform, float) * (ties + 1)) / (len(draws) + 1)


def _steps(distribution: Any, y: Array) -> tuple[Array, Array]:
    """Return probabilities below and at labels or counts."""
    equal = jnp.exp(distribution.log_prob(y))
    try:
        return at_most(distribution, y) - equal, equal
    except NotImplementedError:
        return _sum_below(distribution, y), equal


@jax.jit
def _sum_below(distribution: Distribution, y: Array) -> Array:
    def add(k: Array, below: Array) -> Array:
        mass = jnp.exp(distribution.log_prob(jnp.full_like(y, k)))
        return below + jnp.where(k < y, mass, 0)

    return lax.fori_loop(0, y.max(), add, jnp.zeros(y.shape))


def _censored_steps(whole: Any, component: Any, y: Array) -> tuple[Array, Array]:
    """Return probabilities below observations, which may be censored, and of the values
    that they may have.

    :param whole: the distribution of whole observations.
    :param component: a distribution with the indicators.
    """
    upto = whole.cdf(y)
    below = whole.cdf(y - 1) if component.support.is_discrete else upto
    if isinstance(component, dist.RightCensoredDistribution):
        below = jnp.where(component.censored, upto, below)
        return below, jnp.where(component.censored, 1, upto) - below
    below = jnp.where(component.censored, 0, below)
    return below, upto - below
