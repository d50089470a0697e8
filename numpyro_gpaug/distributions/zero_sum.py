# SPDX-License-Identifier: Apache-2.0
"""The constraint of an intrinsic field: a zero sum over every component of a graph."""

from __future__ import annotations

from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax import Array
from numpyro.distributions import biject_to, constraints
from numpyro.distributions.transforms import Transform

from numpyro_gpaug.distributions.graph import Graph


class _OfGraph:
    """A constraint or transform that is equal for equal graphs."""

    def __init__(self, graph: Graph) -> None:
        self.graph = graph

    def eq(self, other: object, *, static: bool = False) -> bool:
        """Whether ``other`` is of the same kind, and its graph equal."""
        return isinstance(other, type(self)) and self.graph == other.graph

    def tree_flatten(self) -> tuple[tuple[()], Any]:
        """Return no leaves."""
        return (), ((), {"graph": self.graph})


class ZeroSumByComponent(_OfGraph, constraints.Constraint):
    """Vectors over the nodes of a graph that sum to zero over each component with
    edges. Islands are free.

    :param graph: the graph.
    """

    event_dim = 1

    def __call__(self, x: Array) -> Array:
        """Whether ``x`` sums to zero, up to rounding."""
        x = jnp.asarray(x)
        sizes = self.graph.components.sizes
        if not len(sizes):
            return jnp.isfinite(x).all(-1)
        largest = jnp.maximum(jnp.abs(x).max(-1, keepdims=True), 1)
        tolerance = 10 * jnp.finfo(x.dtype).eps * largest * jnp.asarray(sizes, x.dtype)
        return (jnp.abs(sums(self.graph, x)[..., :-1]) <= tolerance).all(-1)

    def __repr__(self) -> str:
        return f"{type(self).__name__}({self.graph})"

    def feasible_like(self, prototype: Array) -> Array:
        return jnp.zeros_like(prototype)


class ZeroSumByComponentTransform(_OfGraph, Transform):
    """NumPyro's ``ZeroSumTransform`` on each component of a graph: an isometry from the
    entries of all nodes but the last of each component, in their order.

    :param graph: the graph.
    """

    domain = constraints.real_vector

    @property
    def codomain(self) -> constraints.Constraint:
        return ZeroSumByComponent(self.graph)

    def __call__(self, x: Array) -> Array:
        """Return the zero-sum vector, (..., n)."""
        x = jnp.asarray(x)
        labels, sizes, last = self.graph.components
        free = _free(self.graph)
        if not len(sizes):
            return x
        total = _summed(x, labels[free], len(sizes))
        root = jnp.asarray(np.sqrt(sizes), x.dtype)
        shift = jnp.append(root + root**2, jnp.inf)
        body = x - (total / shift)[..., labels[free]]
        whole = jnp.concatenate([body, -total[..., :-1] / root], -1)
        return whole[..., np.argsort(np.append(free, last))]

    def _inverse(self, y: Array) -> Array:
        y = jnp.asarray(y)
        labels, sizes, last = self.graph.components
        free = _free(self.graph)
        root = jnp.asarray(np.sqrt(sizes), y.dtype)
        shift = -y[..., last] / (1 + root)
        shift = jnp.append(shift, jnp.zeros_like(y[..., :1]), -1)
        return y[..., free] + shift[..., labels[free]]

    def log_abs_det_jacobian(
        self, x: Array, y: Array, intermediates: Any = None
    ) -> Array:
        return jnp.zeros_like(x, shape=jnp.shape(x)[:-1])

    def forward_shape(self, shape: tuple[int, ...]) -> tuple[int, ...]:
        return (*shape[:-1], self.graph.size)

    def inverse_shape(self, shape: tuple[int, ...]) -> tuple[int, ...]:
        return (*shape[:-1], self.graph.rank)


@biject_to.register(ZeroSumByComponent)
def _to_zero_sum(constraint: ZeroSumByComponent) -> ZeroSumByComponentTransform:
    return ZeroSumByComponentTransform(constraint.graph)


def sums(graph: Graph, x: Array) -> Array:
    """Return the sums over components of numbers at the nodes, (..., c + 1). The last
    sum is over the islands.

    :param graph: the graph.
    :param x: (..., n).
    """
    return _summed(x, graph.components.labels, len(graph.components.sizes))


def centred(graph: Graph, x: Array) -> Array:
    """Return numbers at the nodes, (..., n), minus their means over components. Islands
    keep theirs."""
    labels, sizes, _ = graph.components
    divisors = jnp.asarray(np.append(sizes, np.inf), x.dtype)
    return x - (sums(graph, x) / divisors)[..., labels]


def _free(graph: Graph) -> np.ndarray:
    return np.delete(np.arange(graph.size), graph.components.last)


def _summed(x: Array, labels: np.ndarray, components: int) -> Array:
    if components == 1 and not labels.any():
        total = x.sum(-1, keepdims=True)
        return jnp.append(total, jnp.zeros_like(total), -1)
    by_node = jnp.moveaxis(x, -1, 0)
    total = jax.ops.segment_sum(by_node, labels, components + 1)
    return jnp.moveaxis(total, 0, -1)
