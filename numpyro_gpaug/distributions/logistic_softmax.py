# SPDX-License-Identifier: Apache-2.0
"""Categorical observations whose probabilities are normalised logistic functions."""

from __future__ import annotations

from typing import Any

import jax
import jax.numpy as jnp
from jax import Array, random
from jax.scipy.special import logsumexp
from numpyro.distributions import Distribution, constraints
from numpyro.distributions.util import validate_sample


class LogisticSoftmax(Distribution):
    r"""Classes ``0 .. C-1`` with ``p(k) = sigmoid(f_k) / sum_c sigmoid(f_c)``.

    Like the softmax it orders the classes by their latents, but a latent saturates:
    classes far above zero share the probability equally. It is the multi-class
    likelihood of Galy-Fajou, Wenzel, Donner and Opper (2020), "Multi-class Gaussian
    process classification made conjugate", whose augmentation makes it Gaussian in the
    latents. ``LogisticSoftmax(f)`` equals ``Categorical(logits=log_sigmoid(f))``.

    :param logits: latents, (..., C) with C >= 2.
    :raises ValueError: if ``logits`` has no class axis, or fewer than two classes.

    **Example**

    >>> import jax.numpy as jnp
    >>> print(LogisticSoftmax(jnp.array([0.0, 2.0, -2.0])).probs.round(3))
    [0.333 0.587 0.079]
    """

    arg_constraints = {"logits": constraints.real_vector}
    has_enumerate_support = True

    def __init__(self, logits: Array, *, validate_args: bool | None = None) -> None:
        shape = jnp.shape(logits)
        if not shape or shape[-1] < 2:
            raise ValueError(
                f"logits has shape {shape}: the last axis runs over classes, at least "
                "two of them (num_latents=C of the Gaussian process)"
            )
        self.logits = logits
        super().__init__(batch_shape=shape[:-1], validate_args=validate_args)

    @constraints.dependent_property(is_discrete=True, event_dim=0)
    def support(self) -> Any:
        return constraints.integer_interval(0, jnp.shape(self.logits)[-1] - 1)

    @property
    def log_probs(self) -> Array:
        """Log-probabilities of the classes, (..., C)."""
        log_g = jax.nn.log_sigmoid(self.logits)
        return log_g - logsumexp(log_g, -1, keepdims=True)

    @property
    def probs(self) -> Array:
        """Probabilities of the classes, (..., C)."""
        return jnp.exp(self.log_probs)

    def sample(self, key: Array, sample_shape: tuple[int, ...] = ()) -> Array:
        shape = sample_shape + self.batch_shape
        return random.categorical(key, jax.nn.log_sigmoid(self.logits), shape=shape)

    @validate_sample
    def log_prob(self, value: Array) -> Array:
        return chosen_class(self.log_probs, value)

    @property
    def mean(self) -> Array:
        """NaN, as NumPyro's ``Categorical``: classes have no order."""
        return jnp.full(self.batch_shape, jnp.nan, jnp.result_type(self.logits))

    @property
    def variance(self) -> Array:
        """NaN, as NumPyro's ``Categorical``: classes have no order."""
        return self.mean

    def enumerate_support(self, expand: bool = True) -> Array:  # noqa: FBT002
        values = jnp.arange(jnp.shape(self.logits)[-1])
        values = values.reshape((-1,) + (1,) * len(self.batch_shape))
        if expand:
            values = jnp.broadcast_to(values, values.shape[:1] + self.batch_shape)
        return values


class LogisticSoftmaxMeanField(LogisticSoftmax):
    r"""The same likelihood with the published mean-field bound as its augmented bound.

    The augmented bound of :class:`LogisticSoftmax` integrates the Gamma variable out;
    this one keeps it as a factor of its own, as Galy-Fajou et al. (2020) do, which is
    never tighter. For comparison with the paper; its exact expectation, predictions and
    Gibbs conditionals are those of :class:`LogisticSoftmax`.

    :param logits: latents, (..., C) with C >= 2.

    **Example**

    >>> import jax.numpy as jnp
    >>> print(LogisticSoftmaxMeanField(jnp.zeros(4)).probs)
    [0.25 0.25 0.25 0.25]
    """


def chosen_class(per_class: Array, y: Array) -> Array:
    """Entries of (..., C) at classes y, broadcast against each other.

    :param per_class: values by class.
    :param y: classes, 0 .. C-1.
    """
    shape = jnp.broadcast_shapes(jnp.shape(y), per_class.shape[:-1])
    per_class = jnp.broadcast_to(per_class, shape + per_class.shape[-1:])
    index = jnp.broadcast_to(jnp.asarray(y, jnp.int32), shape)
    return jnp.take_along_axis(per_class, index[..., None], -1)[..., 0]
