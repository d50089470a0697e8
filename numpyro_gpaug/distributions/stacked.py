# SPDX-License-Identifier: Apache-2.0
"""Distributions of one kind side by side, and expanded to the size of a plate."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp
import numpyro.distributions as dist
from jax import Array, random
from numpyro.distributions import Distribution


class Expanded(dist.ExpandedDistribution):
    """An expanded distribution with the attributes of the base distribution (``probs``,
    ``loc``) in the expanded shapes, and with ``cdf`` and ``icdf``, which NumPyro's
    expanded distribution lacks."""

    def cdf(self, value: Array) -> Array:
        return self._whole(self.base_dist.cdf(value))

    def icdf(self, q: Array) -> Array:
        return self._whole(self.base_dist.icdf(q))

    def _whole(self, values: Array) -> Array:
        shape = jnp.broadcast_shapes(jnp.shape(values), self.batch_shape)
        return jnp.broadcast_to(values, shape)

    def __getattr__(self, name: str) -> Any:
        if name.startswith("_") or "base_dist" not in vars(self):
            raise AttributeError(name)
        return getattr(self.base_dist, name)


def expanded(fn: Distribution, shape: tuple[int, ...]) -> Distribution:
    """Return a distribution of data of a given shape, with one entry for data that
    share it.

    :param fn: the distribution of all data.
    :param shape: the shape of the data, with axes of an event last.
    """
    batch_shape = shape[: len(shape) - len(fn.event_shape)]
    return fn if fn.batch_shape == batch_shape else Expanded(fn, batch_shape)


class Stacked(Distribution):
    """Many distributions of one kind, along a new first axis of the batch. It has their
    methods and attributes (``mean``, ``probs``, ``icdf``), each with this axis.

    :param each: the distributions, as ``jax.vmap`` returns them: one distribution whose
        arrays have the new axis.
    """

    pytree_data_fields = ("each",)
    arg_constraints: dict[str, Any] = {}

    def __init__(self, each: Any) -> None:
        self.each = each
        number = len(jax.tree.leaves(each)[0])
        super().__init__(
            (number, *each.batch_shape), each.event_shape, validate_args=False
        )

    def _all(self, function: Callable[..., Any], *args: Any) -> Any:
        return jax.vmap(function)(self.each, *args)

    def _at(self, function: Callable[..., Any], value: Any, shape: Any) -> Array:
        """Apply a function of a distribution and of values, whose last axes have a
        given shape, to values of any number of leading axes."""
        value = jnp.asarray(value)
        lead = value.shape[: max(value.ndim - len(shape), 0)]
        value = jnp.broadcast_to(value, lead + shape)
        axis = len(lead)
        return jax.vmap(function, (0, axis), axis)(self.each, value)

    @property
    def support(self) -> Any:
        return self.each.support

    @property
    def mean(self) -> Array:
        return self._all(lambda d: d.mean)

    @property
    def variance(self) -> Array:
        return self._all(lambda d: d.variance)

    def sample(self, key: Array, sample_shape: tuple[int, ...] = ()) -> Array:
        keys = random.split(key, self.batch_shape[0])
        drawn = self._all(lambda d, key: d.sample(key, sample_shape), keys)
        return jnp.moveaxis(drawn, 0, len(sample_shape))

    def log_prob(self, value: Array) -> Array:
        shape = self.batch_shape + self.event_shape
        return self._at(lambda d, x: d.log_prob(x), value, shape)

    def cdf(self, value: Array) -> Array:
        return self._at(lambda d, x: d.cdf(x), value, self.batch_shape)

    def icdf(self, q: Array) -> Array:
        return self._at(lambda d, x: d.icdf(x), q, self.batch_shape)

    def __getattr__(self, name: str) -> Any:
        if name.startswith("_") or "each" not in vars(self):
            raise AttributeError(name)
        return self._all(lambda d: getattr(d, name))
