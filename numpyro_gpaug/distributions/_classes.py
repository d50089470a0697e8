# SPDX-License-Identifier: Apache-2.0
"""The base class of distributions over classes."""

from __future__ import annotations

from typing import Any, ClassVar

import jax.numpy as jnp
from jax import Array
from numpyro.distributions import CategoricalLogits, Distribution, constraints
from numpyro.distributions.util import validate_sample


class Classes(Distribution):
    """Classes ``0 .. C-1`` given by their log-probabilities.

    :cvar latent: name of the parameter whose last axis runs over classes.
    """

    latent: ClassVar[str]
    has_enumerate_support = True

    @constraints.dependent_property(is_discrete=True, event_dim=0)
    def support(self) -> Any:
        return constraints.integer_interval(0, self._num_classes - 1)

    @property
    def _num_classes(self) -> int:
        return jnp.shape(getattr(self, self.latent))[-1]

    @property
    def log_probs(self) -> Array:
        """Log-probabilities of the classes, (..., C)."""
        raise NotImplementedError

    @property
    def probs(self) -> Array:
        """Probabilities of the classes, (..., C)."""
        return jnp.exp(self.log_probs)

    def sample(self, key: Array, sample_shape: tuple[int, ...] = ()) -> Array:
        classes = CategoricalLogits(self.log_probs, validate_args=False)
        return classes.sample(key, tuple(sample_shape))

    @validate_sample
    def log_prob(self, value: Array) -> Array:
        return chosen_class(self.log_probs, value)

    @property
    def mean(self) -> Array:
        """NaN, as for NumPyro's ``Categorical``: classes have no order."""
        dtype = jnp.result_type(getattr(self, self.latent), 0.0)
        return jnp.full(self.batch_shape, jnp.nan, dtype)

    variance = mean

    def enumerate_support(self, expand: bool = True) -> Array:  # noqa: FBT002
        values = jnp.arange(self._num_classes)
        values = values.reshape((-1,) + (1,) * len(self.batch_shape))
        if expand:
            values = jnp.broadcast_to(values, values.shape[:1] + self.batch_shape)
        return values


def class_shape(name: str, latents: Any) -> tuple[int, ...]:
    """Return the batch shape of latents whose last axis runs over classes.

    :param name: the name of the parameter, for the error.
    :param latents: its value, (..., C).
    :raises ValueError: without a class axis, or with fewer than two classes.
    """
    shape = jnp.shape(latents)
    if not shape or shape[-1] < 2:
        raise ValueError(
            f"{name} has shape {shape}: the last axis runs over classes, at least two "
            "of them (num_latents=C of the Gaussian process)"
        )
    return shape[:-1]


def chosen_class(per_class: Array, y: Array) -> Array:
    """Return the entries of (..., C) at classes y, broadcast against each other.

    :param per_class: values by class.
    :param y: classes, 0 .. C-1.
    """
    shape = jnp.broadcast_shapes(jnp.shape(y), per_class.shape[:-1])
    per_class = jnp.broadcast_to(per_class, shape + per_class.shape[-1:])
    index = jnp.broadcast_to(jnp.asarray(y, jnp.int32), shape)
    return jnp.take_along_axis(per_class, index[..., None], -1)[..., 0]
