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

    def over_members(self, weights: Array) -> PredictorMixture:
        """A mixture of several that are stacked: one over the nodes of all.

        :param weights: of the members, which are the leading axis of all arrays.
        """
        nodes = self.weights.shape[1]
        leaves = tuple(
            x.reshape(-1, *x.shape[2:]) if v else jnp.repeat(x, nodes, 0)
            for x, v in zip(self.leaves, self.varies, strict=True)
        )
        return PredictorMixture(
            leaves, (weights[:, None] * self.weights).ravel(), self.treedef,
            (True,) * len(leaves), self.batch_shape, self.event_shape,
        )  # fmt: skip

    @property
    def _moving(self) -> list[Array]:
        return [x for x, v in zip(self.leaves, self.varies, strict=True) if v]

    def _with(self, moving: list[Array]) -> Any:
        """The component of which these leaves are those that vary."""
        given = iter(moving)
        leaves = [
            next(given) if v else x
            for x, v in zip(self.leaves, self.varies, strict=True)
        ]
        return jax.tree.unflatten(self.treedef, leaves)

    def _each(self, function: Callable[[Any], Array]) -> Array:
        """A function of every component, nodes first."""
        return jax.vmap(lambda moving: function(self._with(moving)))(self._moving)

    def _average(self, values: Array) -> Array:
        return jnp.tensordot(self.weights, values, 1)

    @property
    def _component(self) -> Any:
        return self._with([x[0] for x in self._moving])

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
        except NotImplementedError as error:
            name = type(self._component).__name__
            said = f"{name} has no icdf in NumPyro: take quantiles of draws, "
            said += "numpy.quantile(predicted.sample(key, (1000,)), q, axis=0)"
            raise NotImplementedError(str(error) or said) from None
        found = bisected_icdf(self.cdf, q, quantiles.min(0), quantiles.max(0))
        return jnp.ceil(found) if self.is_discrete else found

    def sample(self, key: Array, sample_shape: tuple[int, ...] = ()) -> Array:
        node_key, key = random.split(key)
        shape = sample_shape + self.batch_shape
        # Not categorical, which draws a number for every node.
        chosen = random.choice(node_key, len(self.weights), shape, p=self.weights)
        if not self._elementwise:
            # A parameter may be one for several data, which are at different nodes.
            chosen = chosen.reshape(shape + (1,) * self.event_dim)
            draws = self._each(lambda d: d.sample(key, sample_shape))
            return jnp.take_along_axis(draws, chosen[None], 0)[0]

        def draw(key: Array, chosen: Array) -> Array:
            at = [jnp.take_along_axis(x, chosen[None], 0)[0] for x in self._moving]
            return self._with(at).sample(key)

        flat = chosen.reshape(-1, *self.batch_shape)
        draws = jax.vmap(draw)(random.split(key, len(flat)), flat)
        return draws.reshape(shape)

    @property
    def _elementwise(self) -> bool:
        """Whether parameters are numbers, and those that vary one for each datum."""
        component = self._component
        given = component.arg_constraints
        names = [name for name in given if name in vars(component)]
        return (
            len(names) == len(self.leaves)
            and not any(given[name].event_dim for name in names)
            and all(x.shape[1:] == self.batch_shape for x in self._moving)
        )
