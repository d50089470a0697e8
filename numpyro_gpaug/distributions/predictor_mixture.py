# SPDX-License-Identifier: Apache-2.0
"""A law whose predictors are Gaussian, integrated over them by nodes."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp
from jax import Array, random
from numpyro.distributions import Distribution, constraints

from numpyro_gpaug.distributions.mixtures import bisected_icdf


class PredictorMixture(Distribution):
    """The mixture of any distribution over quadrature nodes of its parameters.

    Posteriors make it, as ``predict_y`` of likelihoods whose predictive distribution
    has no closed form. ``cdf`` and ``icdf`` exist where those of the components do.

    :param leaves: of the component, in the order of ``treedef``; those that ``varies``
        marks have a leading axis over nodes.
    :param weights: of the nodes, summing to one.
    :param treedef: structure of the component.
    :param varies: which leaves vary.
    :param batch_shape: of a component.
    :param event_shape: of a component.
    """

    pytree_data_fields = ("leaves", "weights")
    pytree_aux_fields = ("treedef", "varies")
    arg_constraints: dict[str, Any] = {}

    def __init__(
        self,
        leaves: tuple[Array, ...],
        weights: Array,
        treedef: Any,
        varies: tuple[bool, ...],
        batch_shape: tuple[int, ...],
        event_shape: tuple[int, ...],
    ) -> None:
        self.leaves, self.weights = tuple(leaves), weights
        self.treedef, self.varies = treedef, varies
        super().__init__(batch_shape, event_shape, validate_args=False)

    def _each(self, function: Callable[[Any], Array]) -> Array:
        """A function of every component, nodes first."""
        moving = [x for x, v in zip(self.leaves, self.varies, strict=True) if v]

        def of_node(moving: list[Array]) -> Array:
            given = iter(moving)
            leaves = [
                next(given) if v else x
                for x, v in zip(self.leaves, self.varies, strict=True)
            ]
            return function(jax.tree.unflatten(self.treedef, leaves))

        return jax.vmap(of_node)(moving)

    def _average(self, values: Array) -> Array:
        return jnp.tensordot(self.weights, values, 1)

    @property
    def _component(self) -> Any:
        leaves = [
            x[0] if v else x for x, v in zip(self.leaves, self.varies, strict=True)
        ]
        return jax.tree.unflatten(self.treedef, leaves)

    @constraints.dependent_property
    def support(self) -> Any:
        return self._component.support

    @property
    def mean(self) -> Array:
        return self._average(self._each(lambda d: d.mean))

    @property
    def variance(self) -> Array:
        means = self._each(lambda d: d.mean)
        within = self._average(self._each(lambda d: d.variance))
        return within + self._average(jnp.square(means - self._average(means)))

    def log_prob(self, value: Array) -> Array:
        densities = self._each(lambda d: d.log_prob(value))
        shape = (-1,) + (1,) * (densities.ndim - 1)
        weights = jnp.log(self.weights).reshape(shape)
        return jax.nn.logsumexp(weights + densities, 0)

    def cdf(self, value: Array) -> Array:
        return self._average(self._each(lambda d: d.cdf(value)))

    def icdf(self, q: Array) -> Array:
        try:
            quantiles = self._each(lambda d: d.icdf(q))
        except NotImplementedError:
            name = type(self._component).__name__
            raise NotImplementedError(
                f"{name} has no icdf in NumPyro: take quantiles of draws, "
                "numpy.quantile(predicted.sample(key, (1000,)), q, axis=0)"
            ) from None
        found = bisected_icdf(self.cdf, q, quantiles.min(0), quantiles.max(0))
        return jnp.ceil(found) if self.is_discrete else found

    def sample(self, key: Array, sample_shape: tuple[int, ...] = ()) -> Array:
        node_key, key = random.split(key)
        shape = sample_shape + self.batch_shape
        chosen = random.categorical(node_key, jnp.log(self.weights), shape=shape)
        chosen = chosen.reshape(shape + (1,) * self.event_dim)
        draws = self._each(lambda d: d.sample(key, sample_shape))
        return jnp.take_along_axis(draws, chosen[None], 0)[0]
