# SPDX-License-Identifier: Apache-2.0
"""Categorical observations whose probabilities are normalised logistic functions."""

from __future__ import annotations

import jax
from jax import Array
from jax.scipy.special import logsumexp
from numpyro.distributions import constraints

from numpyro_gpaug.distributions._classes import Classes, class_shape


class LogisticSoftmax(Classes):
    r"""Classes ``0 .. C-1`` with ``p(k) = sigmoid(f_k) / sum_c sigmoid(f_c)``.

    Like the softmax it orders the classes by their latents, but the effect of a latent
    saturates: classes with latents far above zero share the probability equally. It is
    the multi-class likelihood of Galy-Fajou, Wenzel, Donner and Opper (2020),
    "Multi-class Gaussian process classification made conjugate", whose augmentation
    makes it Gaussian in the latents. ``LogisticSoftmax(f)`` equals
    ``Categorical(logits=log_sigmoid(f))``.

    The numerator is at most one. Among many latents around zero no probability is much
    above ``2 / C``. Give the process of very many classes a mean of ``-log(C) -
    variance / 2`` or less: the sum over classes is then about one in the prior. Far
    below that the distribution is a softmax. Bounds compare means.

    :param logits: latents, (..., C) with C >= 2.
    :raises ValueError: if ``logits`` has no class axis, or fewer than two classes.

    **Example**

    >>> import jax.numpy as jnp
    >>> print(LogisticSoftmax(jnp.array([0.0, 2.0, -2.0])).probs.round(3))
    [0.333 0.587 0.079]
    """

    arg_constraints = {"logits": constraints.real_vector}
    latent = "logits"

    def __init__(self, logits: Array, *, validate_args: bool | None = None) -> None:
        self.logits = logits
        batch_shape = class_shape("logits", logits)
        super().__init__(batch_shape=batch_shape, validate_args=validate_args)

    @property
    def log_probs(self) -> Array:
        log_g = jax.nn.log_sigmoid(self.logits)
        return log_g - logsumexp(log_g, -1, keepdims=True)


class LogisticSoftmaxMeanField(LogisticSoftmax):
    r"""The same likelihood with the published mean-field bound as its augmented bound.

    The augmented bound of :class:`LogisticSoftmax` integrates the Gamma variable out.
    This class keeps an independent factor for it, as in Galy-Fajou et al. (2020), which
    is never tighter. It is meant for comparisons with the paper: its exact expectation,
    predictions and Gibbs conditionals equal those of :class:`LogisticSoftmax`.

    :param logits: latents, (..., C) with C >= 2.

    **Example**

    >>> import jax.numpy as jnp
    >>> print(LogisticSoftmaxMeanField(jnp.zeros(4)).probs)
    [0.25 0.25 0.25 0.25]
    """
