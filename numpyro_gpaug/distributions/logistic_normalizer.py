# SPDX-License-Identifier: Apache-2.0
"""The normaliser of the logistic-softmax, as a factor that may be sampled by class."""

from __future__ import annotations

from typing import Any

import jax
import jax.numpy as jnp
from jax import Array
from numpyro.distributions import Distribution, constraints
from numpyro.distributions.util import promote_shapes, validate_sample


class LogisticNormalizer(Distribution):
    r"""A lower bound of ``-log sum_c sigmoid(f_c)`` that is linear in the classes.

    The logistic-softmax is ``log p(k) = log sigmoid(f_k) - log S`` with
    ``S = sum_c sigmoid(f_c)``. For any ``zeta > 0``,

    .. math::
        -\log S \ge 1 - \log\zeta - S / \zeta,

    with equality at ``zeta = S``; and S, a plain sum, is estimated without bias from K
    of the C classes by ``C / K`` times their sum (a plug-in of that estimate into the
    logarithm is biased). A model with very many classes therefore needs only the drawn
    classes: this factor for the normaliser, and ``Bernoulli(logits=f_k)``, observed to
    be 1, for the class of each observation. One ``zeta`` per observation is learnt like
    any other param, with the same bound; a good start is ``C / 2``, which is S at
    latents of zero.

    It is a factor, not a distribution of the observations: it cannot be sampled, and
    ignores observations (pass zeros).

    :param logits: latents of the drawn classes, (..., K).
    :param num_classes: the number C of all classes.
    :param zeta: positive numbers of the batch shape.
    :raises ValueError: if fewer classes exist than were drawn.

    Class subsampling follows Galy-Fajou, Wenzel, Donner and Opper (2020), Multi-class
    Gaussian process classification made conjugate, who use the plug-in estimate.

    **Example**

    >>> import jax.numpy as jnp
    >>> d = LogisticNormalizer(jnp.zeros(10), 1000, zeta=500.0)
    >>> print(f"{d.log_prob(0.0):.4f} {-jnp.log(500.0):.4f}")
    -6.2146 -6.2146
    """

    arg_constraints = {"logits": constraints.real_vector, "zeta": constraints.positive}
    support = constraints.real
    pytree_aux_fields = ("num_classes",)

    def __init__(
        self,
        logits: Array,
        num_classes: int,
        zeta: Array,
        *,
        validate_args: bool | None = None,
    ) -> None:
        shape = jnp.shape(logits)
        if not shape or shape[-1] > num_classes:
            raise ValueError(
                f"logits has shape {shape}. Its last axis must run over classes "
                f"drawn from num_classes={num_classes}"
            )
        batch_shape = jnp.broadcast_shapes(shape[:-1], jnp.shape(zeta))
        self.logits = logits
        self.num_classes = num_classes
        (self.zeta,) = promote_shapes(zeta, shape=batch_shape)
        super().__init__(batch_shape=batch_shape, validate_args=validate_args)

    @property
    def rate(self) -> Array:
        """The factor ``(C / K) / zeta`` of each drawn class."""
        return self.num_classes / jnp.shape(self.logits)[-1] / self.zeta

    @property
    def constant(self) -> Array:
        """The part that does not depend on latents."""
        return 1 - jnp.log(self.zeta)

    @validate_sample
    def log_prob(self, value: Any) -> Array:
        total = self.rate * jax.nn.sigmoid(self.logits).sum(-1)
        shape = jnp.broadcast_shapes(self.batch_shape, jnp.shape(value))
        return jnp.broadcast_to(self.constant - total, shape)

    def sample(self, key: Array, sample_shape: tuple[int, ...] = ()) -> Array:
        raise NotImplementedError(
            "LogisticNormalizer is a factor of a density, and cannot be sampled. "
            "Predict with LogisticSoftmax on the latents of all classes"
        )
