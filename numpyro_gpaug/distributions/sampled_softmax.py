# SPDX-License-Identifier: Apache-2.0
"""The logistic-softmax from a sample of its classes."""

from __future__ import annotations

from typing import Any

import jax
import jax.numpy as jnp
from jax import Array, lax
from numpyro.distributions import Distribution, constraints
from numpyro.distributions.util import validate_sample


class SampledLogisticSoftmax(Distribution):
    r"""A bound of the logistic-softmax that, averaged over the classes drawn, is a
    lower bound.

    The sample of the C classes has the class k of the observation and K - 1 others.
    With ``S = sum_c sigmoid(f_c)``, ``-log S >= 1 - log zeta - S / zeta`` for any
    ``zeta > 0``. The term of each other class c in S / zeta may use, as zeta, the
    estimate of S without that class, which is independent of the class:

    .. math::
        \zeta_c = \sigma(f_k) + \frac{C - 1}{K - 2} \sum_{j \ne k, c} \sigma(f_j),
        \qquad \log \sigma(f_k) + \frac{1}{K - 1} \sum_{c \ne k} \Bigl[1 - \log \zeta_c
        - \frac{\sigma(f_k) + (C - 1) \sigma(f_c)}{\zeta_c}\Bigr].

    No ``zeta`` has to be learnt for each observation, unlike in
    :class:`~numpyro_gpaug.LogisticNormalizer`. With all classes, ``zeta = S``.

    The value is the position of the observation's class among the drawn classes.
    :class:`numpyro_gpaug.multilabel.ClassMembers` draws classes and data. Predict the
    latents of all classes with :class:`~numpyro_gpaug.LogisticSoftmax`, which explains
    why their process needs a mean below zero.

    :param logits: latents of the drawn classes, (..., K).
    :param num_classes: the number C of all classes.
    :raises ValueError: if K exceeds C, or is less than three although there are three
        classes.

    **Example**

    >>> import jax.numpy as jnp
    >>> d = SampledLogisticSoftmax(jnp.zeros(10), 1000)
    >>> print(f"{d.log_prob(0):.3f} {-jnp.log(1000.0):.3f}")
    -6.908 -6.908
    """

    arg_constraints = {"logits": constraints.real_vector}
    pytree_data_fields = ("logits",)
    pytree_aux_fields = ("num_classes",)

    def __init__(
        self, logits: Array, num_classes: int, *, validate_args: bool | None = None
    ) -> None:
        shape = jnp.shape(logits)
        if not shape or not min(3, num_classes) <= shape[-1] <= num_classes:
            raise ValueError(
                f"logits has shape {shape}. Its last axis must run over 3 or more "
                f"classes drawn from num_classes={num_classes}"
            )
        self.logits, self.num_classes = logits, num_classes
        super().__init__(shape[:-1], validate_args=validate_args)

    @constraints.dependent_property(is_discrete=True, event_dim=0)
    def support(self) -> Any:
        return constraints.integer_interval(0, jnp.shape(self.logits)[-1] - 1)

    @validate_sample
    def log_prob(self, value: Array) -> Array:
        log_g = jax.nn.log_sigmoid(self.logits)
        return self.bound(log_g, jnp.exp(log_g), value)

    def bound(self, log_g: Array, g: Array, value: Array) -> Array:
        """Return the bound from ``log sigmoid(f)`` and ``sigmoid(f)``, or from their
        expectations."""
        classes, drawn = self.num_classes, g.shape[-1]
        label = jax.nn.one_hot(value, drawn, dtype=g.dtype)
        log_own = (log_g * label).sum(-1)
        if drawn == classes:
            return log_own - jnp.log(g.sum(-1))
        own = (g * label).sum(-1, keepdims=True)
        rest = g * (1 - label)
        left = (rest.sum(-1, keepdims=True) - rest) * ((classes - 1) / (drawn - 2))
        tiny = jnp.finfo(g.dtype).tiny
        zeta = lax.stop_gradient(jnp.maximum(own + left, tiny))
        terms = 1 - jnp.log(zeta) - (own + (classes - 1) * rest) / zeta
        return log_own + (terms * (1 - label)).sum(-1) / (drawn - 1)

    def sample(self, key: Array, sample_shape: tuple[int, ...] = ()) -> Array:
        raise NotImplementedError(
            "SampledLogisticSoftmax is a bound, and cannot be sampled. Predict "
            "with LogisticSoftmax on the latents of all classes"
        )
