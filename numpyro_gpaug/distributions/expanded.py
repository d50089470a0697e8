# SPDX-License-Identifier: Apache-2.0
"""A distribution that is expanded to the size of a plate."""

from __future__ import annotations

from typing import Any

import jax.numpy as jnp
import numpyro.distributions as dist
from jax import Array
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
