# SPDX-License-Identifier: Apache-2.0
"""Initial values of hyperparameters."""

from __future__ import annotations

import math
from typing import Any

import jax
import jax.numpy as jnp
from jax import Array
from jax.scipy.special import ndtr
from numpyro.distributions import (
    Distribution,
    Normal,
    TransformedDistribution,
    biject_to,
)
from numpyro.distributions.transforms import ComposeTransform
from numpyro.infer.initialization import init_to_median

from numpyro_gpaug.likelihoods.expectations import base_distribution

_DEVIATION = 0.1
_POOL = 64


class MedianStart:
    """Initial values near the prior's median: the quantile at a normal draw with a
    standard deviation of a tenth. For a prior without quantiles it is NumPyro's
    ``init_to_median``, the median of 15 draws.

    That median has a standard deviation of a third, and one start in a hundred is .8 of
    a standard deviation away: for a wide prior, in the basin of another optimum. The
    exact median would not do: hyperparameters with the same prior would start alike,
    and a sum of two kernels would never separate. The draws are one call for all sites,
    since every call is a program that takes a twentieth of a second to compile.

    :param key: random key.
    """

    def __init__(self, key: Array) -> None:
        self._key, self._taken = key, 0
        self._pool = _draws(key, _POOL)

    def __call__(self, site: dict[str, Any]) -> Any:
        """Return the initial value of a site, as a ``substitute_fn`` of NumPyro's
        handler.

        :param site: a site of a model's trace.
        :return: its value, or ``None`` where NumPyro's function has none.
        """
        latent = site["type"] == "sample" and not site["is_observed"]
        if not latent or site["value"] is not None or site["fn"].support.is_discrete:
            return init_to_median(site)
        return _in_range(site["fn"].support, self._median(site))

    def _median(self, site: dict[str, Any]) -> Any:
        shape = tuple(site["kwargs"].get("sample_shape", ())) + site["fn"].shape()
        try:
            return _quantile(site["fn"], self._normals(shape))
        except (NotImplementedError, ImportError):
            return init_to_median(site)

    def _normals(self, shape: tuple[int, ...]) -> Array:
        num, start = math.prod(shape), self._taken
        self._taken = start + num
        if self._taken > _POOL:
            # Not kept, because a site may be in a loop whose values must not leave it.
            return _draws(jax.random.fold_in(self._key, start), num).reshape(shape)
        return self._pool[start : self._taken].reshape(shape)


def _in_range(support: Any, value: Any) -> Any:
    """Return a start, with zero on the unconstrained scale in place of values that
    overflow there: the median of ``Gamma(0.001, 0.001)`` underflows.

    :param support: the support of the prior.
    :param value: its median.
    """
    transform, value = biject_to(support), jnp.asarray(value)
    free = transform.inv(value)
    if free.shape != value.shape:
        return value
    return jnp.where(jnp.isfinite(free), value, transform(jnp.zeros_like(free)))


def _draws(key: Array, num: int) -> Array:
    return _DEVIATION * jax.random.normal(key, (num,))


def _quantile(prior: Distribution, normal: Array) -> Array:
    """Return the value below which a distribution has as much mass as a standard
    normal.

    :param prior: the distribution, of independent scalars.
    :param normal: values of the standard normal, in the shape of the distribution's
        draws.
    :raises NotImplementedError: if it has no quantiles.
    """
    prior = base_distribution(prior)
    if prior.event_shape:
        raise NotImplementedError
    if isinstance(prior, Normal):
        return prior.loc + prior.scale * normal
    if isinstance(prior, TransformedDistribution):
        # The direction of a transform does not matter: the distribution of a start is
        # symmetric.
        transform = ComposeTransform(prior.transforms)
        return transform(_quantile(prior.base_dist, normal))
    return prior.icdf(ndtr(normal))
