# SPDX-License-Identifier: Apache-2.0
"""Exact expectations ``E_{N(f | m, v)} log p(y | f)`` and predictive distributions.

Closed forms are registered per distribution class. A likelihood without a closed form
uses Gauss-Hermite quadrature if its log-density depends elementwise on one latent, and
Monte Carlo otherwise. The route is always reported (:class:`Route`).
"""

from __future__ import annotations

import enum
from collections.abc import Callable
from typing import Any, NamedTuple

import jax.numpy as jnp
import numpyro.distributions as dist
from jax import Array
from numpyro.distributions import Distribution

from numpyro_gpaug.distributions.densities import DENSITIES, log_density
from numpyro_gpaug.errors import UnknownLikelihoodError

Parameters = dict[str, Array]


class Route(enum.Enum):
    """The way to compute the expected log-likelihood of a site."""

    CLOSED_FORM = "closed form"
    EXPONENTIAL = "closed form of exponentials"
    GAUSS_HERMITE = "Gauss-Hermite quadrature"
    CORRELATED = "quasi-random nodes"
    MONTE_CARLO = "Monte Carlo"
    CONSTANT = "no dependence on latents"


class Expectation(NamedTuple):
    """A registered exact expectation.

    :param latents: names of the distribution's parameters that depend on latents.
    :param expected_log_prob: ``(d, y, means, variances) -> batch``.
    :param predictive: ``(d, means, variances) -> Distribution`` of a new observation.
    :param log_concave: whether the likelihood is log-concave in its latents.
    :param competing: whether it is a softmax of its last axis.
    """

    latents: tuple[str, ...]
    expected_log_prob: Callable[[Any, Array, Parameters, Parameters], Array]
    predictive: Callable[[Any, Parameters, Parameters], Distribution]
    log_concave: bool
    competing: bool = False


_REGISTRY: dict[type[Distribution], Expectation] = {}


def register_expectation(
    cls: type[Distribution],
    latents: tuple[str, ...],
    expected_log_prob: Callable[[Any, Array, Parameters, Parameters], Array],
    predictive: Callable[[Any, Parameters, Parameters], Distribution],
    *,
    log_concave: bool = False,
    competing: bool = False,
) -> None:
    """Register the exact expectation of a likelihood, for it and its subclasses.

    :param cls: the NumPyro distribution class of the observation.
    :param latents: names of the parameters that depend on latents, e.g.
        ``("logits",)``.
    :param expected_log_prob: function of ``(d, y, means, variances)``; ``means`` and
        ``variances`` map each name in ``latents`` to an array shaped like the
        parameter; every other parameter is read from ``d``. Returns the expectation,
        of ``d``'s batch shape. Gaussian factors are derived from it by autodiff.
    :param predictive: function of ``(d, means, variances)`` that returns the
        distribution of a new observation with the latent integrated out.
    :param log_concave: whether the likelihood is known to be log-concave in its
        latents. Its factors then always have positive precisions, and
        :class:`~numpyro_gpaug.ConjugateSVI` does not need to start with an augmented
        step.
    :param competing: whether the likelihood depends on its one latent parameter through
        the softmax of the last axis. Updates then take the competition of classes into
        account.

    **Example**

    >>> import jax.numpy as jnp
    >>> import numpyro.distributions as dist
    >>> class UnitNormal(dist.Normal):
    ...     pass
    >>> register_expectation(
    ...     UnitNormal, ("loc",),
    ...     lambda d, y, m, v: dist.Normal(m["loc"]).log_prob(y) - v["loc"] / 2,
    ...     lambda d, m, v: dist.Normal(m["loc"], jnp.sqrt(1 + v["loc"])),
    ... )
    """
    _REGISTRY[cls] = Expectation(
        tuple(latents), expected_log_prob, predictive, log_concave, competing
    )


def lookup_expectation(cls: type[Distribution]) -> Expectation | None:
    """Return the registered expectation of a class or its nearest base, or ``None``."""
    return next((_REGISTRY[base] for base in cls.__mro__ if base in _REGISTRY), None)


class CorrelatedExpectation(NamedTuple):
    """A registered expectation under correlated latents of one observation.

    :param latent: name of the parameter whose last axis runs over them.
    :param expected_log_prob: ``(d, y, mean, variance, covariance, num) -> batch``, with
        covariances of pairs as in
        :func:`~numpyro_gpaug.math.correlated_softmax.pair_places`, and with ``num``
        nodes.
    :param predictive: ``(d, mean, variance, covariance) -> Distribution`` of a new
        observation.
    """

    latent: str
    expected_log_prob: Callable[[Any, Array, Array, Array, Array, int], Array]
    predictive: Callable[[Any, Array, Array, Array], Distribution]


_CORRELATED: dict[type[Distribution], CorrelatedExpectation] = {}


def register_correlated(
    cls: type[Distribution], expectation: CorrelatedExpectation
) -> None:
    """Register the expectation of a log-concave likelihood under correlated latents.

    :param cls: its class.
    :param expectation: its expectation.
    """
    _CORRELATED[cls] = expectation


def lookup_correlated(cls: type[Distribution]) -> CorrelatedExpectation | None:
    """Return the registered expectation under correlated latents, or ``None``."""
    return next((_CORRELATED[b] for b in cls.__mro__ if b in _CORRELATED), None)


def expected_log_prob(
    d: Distribution, y: Array, means: Parameters, variances: Parameters
) -> Array:
    r"""Return :math:`E \log p(y \mid f)` under independent normals on the latents of
    ``d``.

    :param d: the likelihood; its parameters that depend on latents are ignored.
        ``mask``, ``to_event`` and ``expand`` wrappers are applied.
    :param y: the observations.
    :param means: means for each parameter that depends on latents, shaped like it.
    :param variances: variances likewise, >= 0.
    :return: array of ``d.batch_shape``.
    :raises UnknownLikelihoodError: if no expectation is registered for ``type(d)``.

    **Example**

    >>> import jax.numpy as jnp
    >>> import numpyro.distributions as dist
    >>> d = dist.Bernoulli(logits=jnp.zeros(2))
    >>> y = jnp.array([1, 0])
    >>> ones = {"logits": jnp.ones(2)}
    >>> print(expected_log_prob(d, y, means=ones, variances=ones).round(2))
    [-0.41 -1.41]
    """
    entry = _require(base_distribution(d))
    y = feasible(d, y)
    return through_wrappers(
        d, lambda base: entry.expected_log_prob(base, y, means, variances)
    )


def predictive(
    d: Distribution, means: Parameters, variances: Parameters
) -> Distribution:
    """Return the distribution of a new observation with its latents integrated out.

    :param d: the likelihood at the new inputs; see :func:`expected_log_prob`.
    :param means: means for each parameter that depends on latents.
    :param variances: variances likewise, >= 0.
    :return: a NumPyro distribution.
    :raises UnknownLikelihoodError: if no expectation is registered for ``type(d)``.
    """
    base = base_distribution(d)
    return _require(base).predictive(base, means, variances)


def _require(base: Distribution) -> Expectation:
    entry = lookup_expectation(type(base))
    if entry is None:
        raise UnknownLikelihoodError(type(base))
    return entry


def base_distribution(d: Distribution) -> Distribution:
    """Return ``d`` without its ``mask``, ``to_event`` and ``expand`` wrappers."""
    while isinstance(
        d, dist.MaskedDistribution | dist.Independent | dist.ExpandedDistribution
    ):
        d = d.base_dist
    return d


def is_masked(d: Distribution) -> bool:
    """Whether there is a ``mask`` among the wrappers of ``d``."""
    if isinstance(d, dist.Independent | dist.ExpandedDistribution):
        return is_masked(d.base_dist)
    return isinstance(d, dist.MaskedDistribution)


def is_pseudo(d: Distribution) -> bool:
    """Whether ``log_prob`` is a pseudo-likelihood, which is not normalised over
    observations; the distribution then also has a ``normalized_log_prob``."""
    return hasattr(base_distribution(d), "normalized_log_prob")


def feasible(d: Distribution, y: Array) -> Array:
    """Return ``y`` with masked entries replaced by values in the support: a masked
    value (such as NaN) must not reach a gradient."""
    if isinstance(d, dist.MaskedDistribution):
        mask = jnp.asarray(d._mask)
        mask = mask.reshape(mask.shape + (1,) * d.event_dim)
        return jnp.where(mask, y, d.base_dist.support.feasible_like(y))
    if isinstance(d, dist.Independent | dist.ExpandedDistribution):
        return feasible(d.base_dist, y)
    return y


def through_wrappers(d: Distribution, value: Callable[[Any], Array]) -> Array:
    """Apply the effect of the wrappers of ``d`` on a log-density to ``value(base)``."""
    if isinstance(d, dist.MaskedDistribution):
        inner = through_wrappers(d.base_dist, value)
        # Not a product, because a masked datum may be NaN.
        return jnp.where(d._mask, inner, jnp.zeros_like(inner))
    if isinstance(d, dist.Independent):
        inner = through_wrappers(d.base_dist, value)
        axes = tuple(range(-d.reinterpreted_batch_ndims, 0))
        return inner.sum(axes) if axes else inner
    if isinstance(d, dist.ExpandedDistribution):
        inner = through_wrappers(d.base_dist, value)
        return jnp.broadcast_to(inner, d.batch_shape)
    return value(d)


def stable_log_prob(fn: Distribution, value: Any) -> Array:
    """Return the log-density of observations, accurate for large counts.

    :param fn: the likelihood.
    :param value: the observations.
    """
    if type(base_distribution(fn)) not in DENSITIES:
        return fn.log_prob(value)
    value = feasible(fn, value)
    return through_wrappers(fn, lambda d: log_density(d, value))
