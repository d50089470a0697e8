# SPDX-License-Identifier: Apache-2.0
"""Mixtures of predictions at several values of the hyperparameters."""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping
from functools import reduce
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpyro.distributions as dist
from jax import Array, lax, random
from jax.scipy.special import ndtri
from numpyro.distributions import Distribution

from numpyro_gpaug._numpyro import Ordered
from numpyro_gpaug.distributions.predictor_mixture import NEGLIGIBLE, PredictorMixture
from numpyro_gpaug.gaussians.dense import Moments
from numpyro_gpaug.gp.markov import is_times
from numpyro_gpaug.guides.base import ProcessGuide
from numpyro_gpaug.math.blocks import summed
from numpyro_gpaug.model.arguments import Values, is_array

# The number of draws of latents that another autoguide owns.
MEMBERS = 64
# The number of members that count, at least, where data are left out.
LEAST_MEMBERS = 5


class FunctionValues(NamedTuple):
    """Posterior of function values. Quantiles are those of normal distributions with
    its moments.

    :param mean: the mean, (N,) or (N, C).
    :param variance: the variance, of the same shape; or the covariance: (N, N), (C, N,
        N) for C independent functions, or (N C, N C) for a table of jointly Gaussian
        values, counted row by row.
    """

    mean: Array
    variance: Array

    @property
    def sd(self) -> Array:
        """The standard deviations, in the shape of the means."""
        mean, variance = self
        if variance.shape != mean.shape:
            variance = jnp.diagonal(variance, 0, -2, -1).T.reshape(mean.shape)
        return jnp.sqrt(variance)

    def quantile(self, level: float) -> Array:
        """Return a quantile of each function value.

        :param level: between 0 and 1.
        """
        return self.mean + ndtri(level) * self.sd

    def interval(self, prob: float = 0.9) -> tuple[Array, Array]:
        """Return the lower and the upper ends of intervals.

        :param prob: the probability of each interval; by default the ends are the 5 and
            95% quantiles.
        """
        return self.quantile((1 - prob) / 2), self.quantile((1 + prob) / 2)


class WithoutData(NamedTuple):
    """Observations that are predicted from others.

    :param distribution: their predictive distribution.
    :param worth: for a member of a mixture, the log density of each datum, or of its
        group, given the others; for the mixture, the effective number of members.
    """

    distribution: Distribution
    worth: Array


class Members(NamedTuple):
    """Values of hyperparameters, and Gaussians given each; members first.

    :param log_weights: normalised log-weights of the members, (members,).
    :param values: values of the latents that differ between members, by name.
    :param own: moments of the Gaussian blocks that differ, by block name.
    """

    log_weights: Array
    values: Values
    own: Values


class Fitted(NamedTuple):
    """The fitted quantities.

    :param values: params and point values of other latents, by name.
    :param own: params of the Gaussian blocks, by block name, or their moments.
    :param members: for a mixture, the values of its members, which replace these.
    """

    values: Values
    own: Mapping[str, dict[str, Array] | Moments]
    members: Members | None = None

    @classmethod
    def of_guide(cls, guide: ProcessGuide, params: Values) -> Fitted:
        """Collect the fit of a guide: a mixture if another autoguide draws latents.

        :param guide: the guide of the model, set up.
        :param params: params of both.
        """
        values, own = guide.split_params(params)
        members = None
        if guide.random_others:
            draws = guide.other_draws(random.key(0), params, MEMBERS)
            even = jnp.full(MEMBERS, -math.log(MEMBERS))
            members = Members(even, draws, {})
        return cls({**values, **guide.other_median(params)}, own, members)

    @property
    def points(self) -> Values:
        """Latents and params that are fixed at a value."""
        drawn = set() if self.members is None else set(self.members.values)
        return {
            k: v
            for k, v in self.values.items()
            if is_array(v)
            and not (k.endswith("_auto_loc") or k in drawn or is_times(k))
        }

    @property
    def size(self) -> int | None:
        """The number of members; ``None`` if this is not a mixture."""
        return None if self.members is None else len(self.members.log_weights)

    @property
    def first(self) -> Fitted:
        """The first member, or the fit itself if it is not a mixture."""
        if self.members is None:
            return self
        return self.at(jax.tree.map(lambda x: x[0], self.members))

    def at(self, member: Members) -> Fitted:
        """Return a member.

        :param member: one of ``members``, without their axis.
        """
        return Fitted({**self.values, **member.values}, {**self.own, **member.own})


def over_members(
    function: Callable[[Fitted, Any, Any], Any], fitted: Fitted, prepared: Any
) -> Any:
    """Apply a function to every member, one after the other; members first. If the fit
    is not a mixture, return the function's value.

    :param function: a function of the fitted quantities, of the quantities prepared
        for them, and of the number of the member.
    :param fitted: the fitted quantities.
    :param prepared: quantities prepared for each member.
    """
    if fitted.members is None:
        return function(fitted, prepared, 0)

    def one(each: tuple[Members, Any, Array]) -> Any:
        member, ready, number = each
        return function(fitted.at(member), ready, number)

    return lax.map(one, (fitted.members, prepared, jnp.arange(fitted.size)))


def averaged(function: Callable[[Fitted], Any], fitted: Fitted) -> Any:
    """Return the average of a function over the members, without storing all values
    together. If the fit is not a mixture, return the function's value.

    :param function: a function of a member, which returns a tree of arrays.
    :param fitted: the fitted quantities.
    """
    if fitted.members is None:
        return function(fitted)

    def weighed(each: tuple[Members, Array]) -> Any:
        member, weight = each
        return jax.tree.map(lambda x: weight * x, function(fitted.at(member)))

    return summed(weighed, (fitted.members, jnp.exp(fitted.members.log_weights)))


def _function_values(answers: FunctionValues, log_weights: Array) -> FunctionValues:
    weights, (means, spreads) = jnp.exp(log_weights), answers
    mean = jnp.tensordot(weights, means, 1)
    apart = means - mean
    if spreads.shape == means.shape:
        between = jnp.square(apart)
    else:
        independent = spreads.ndim == 4  # functions one by one
        apart = jnp.moveaxis(apart, -1, 1) if independent else apart
        apart = apart.reshape(*spreads.shape[:-1])
        between = apart[..., :, None] * apart[..., None, :]
    return FunctionValues(mean, jnp.tensordot(weights, spreads + between, 1))


def _observations(answers: Distribution, log_weights: Array) -> Distribution:
    weights = jnp.exp(log_weights)
    # A mixture of distributions of labels has the same class.
    if isinstance(answers, dist.BernoulliProbs):
        each = _aligned(weights, answers.probs)
        return dist.Bernoulli(probs=(each * answers.probs).sum(0))
    if isinstance(answers, dist.BernoulliLogits):
        yes, no = (
            _density(jax.nn.log_sigmoid(x), log_weights)
            for x in (answers.logits, -answers.logits)
        )
        return dist.Bernoulli(logits=yes - no)
    if isinstance(answers, dist.CategoricalLogits):
        logits = jax.nn.log_softmax(answers.logits, -1)
        return dist.Categorical(logits=_density(logits, log_weights))
    if isinstance(answers, PredictorMixture):
        return answers.over_members(weights)
    leaves, treedef = jax.tree.flatten(Ordered(answers))
    return PredictorMixture(
        tuple(leaves), weights, treedef, (True,) * len(leaves),
        answers.batch_shape, answers.event_shape,
    )  # fmt: skip


def _aligned(weights: Array, values: Array) -> Array:
    """Return weights with the axes that values have after them.

    :param weights: (members, ...).
    :param values: (members, ..., ...).
    """
    return weights.reshape(*weights.shape, *[1] * (values.ndim - weights.ndim))


def _density(answers: Array, log_weights: Array, **how: Any) -> Array:
    return jax.nn.logsumexp(_aligned(log_weights, answers) + answers, 0)


def _draws(
    answers: tuple[Array, Array], log_weights: Array, *, key: Array, num: int, **_: Any
) -> tuple[Array, Array]:
    draws, factorised = answers
    chosen = random.categorical(random.fold_in(key, 1), log_weights, shape=(num,))
    return draws[chosen, jnp.arange(num)], factorised.all()


def _left_out(answers: WithoutData, log_weights: Array, **how: Any) -> WithoutData:
    """Weigh the members by the posterior of the hyperparameters given the other data:
    it is that given all data, divided by the density of what is left out.

    In the far tails the Gaussian of a member may not allow to leave a datum out (NaN),
    or only just, and the density is then much too low. Members of a negligible share
    are dropped where they are NaN. Where few members would count, members of a
    negligible share with the lowest densities take the lowest density of the others.
    """
    worth, shares = answers.worth, jnp.exp(_aligned(log_weights, answers.worth))
    rows = worth.shape[1:]

    def unknown(x: Array) -> Array:
        each = rows if x.shape[x.ndim - len(rows) :] == rows else [1] * len(rows)
        return jnp.isnan(x).reshape(len(x), -1, *each).any(1)

    broken = reduce(jnp.logical_or, map(unknown, jax.tree.leaves(answers)))
    few = jnp.where(broken, shares, 0).sum(0) < NEGLIGIBLE
    worth = jnp.where(broken, jnp.where(few, jnp.inf, jnp.nan), worth)
    each = jax.nn.log_softmax(_aligned(log_weights, worth) - worth, 0)
    size = 1 / jnp.exp(2 * each).sum(0)
    order = jnp.argsort(worth, 0)
    below = jnp.cumsum(jnp.take_along_axis(shares, order, 0), 0) < NEGLIGIBLE
    first = jnp.take_along_axis(order, below.sum(0, keepdims=True), 0)
    lowest = jnp.take_along_axis(worth, first, 0)
    bounded = _aligned(log_weights, worth) - jnp.maximum(worth, lowest)
    each = jnp.where(size < LEAST_MEMBERS, jax.nn.log_softmax(bounded, 0), each)
    distribution = jax.tree.map(
        lambda x: jnp.where(jnp.isnan(x), jnp.nanmax(x, 0), x), answers.distribution
    )
    return WithoutData(_observations(distribution, each), size)


def _averages(answers: Array, log_weights: Array, **how: Any) -> Array:
    # The caller applies the weights: draws of the first member come first.
    return answers.reshape(-1, *answers.shape[2:])


# By kind of prediction, see :class:`~numpyro_gpaug.predict.predictor.Predictor`: the
# prediction of a mixture, from those of its members (members first), the normalised
# log-weights, and further arguments of the prediction.
MIXED: dict[str, Callable[..., Any]] = {
    "f": _function_values, "joint": _function_values, "y": _observations,
    "log_prob": _density, "draws": _draws, "average": _averages, "left_out": _left_out,
}  # fmt: skip
