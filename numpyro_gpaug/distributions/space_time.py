# SPDX-License-Identifier: Apache-2.0
"""Fields that evolve in time: an autoregression whose innovations are correlated
between neighbours."""

from __future__ import annotations

from functools import lru_cache
from typing import Any, NamedTuple

import jax.numpy as jnp
import numpy as np
from jax import Array, lax
from jax.typing import ArrayLike
from numpyro.distributions import constraints
from numpyro.distributions.util import validate_sample

from numpyro_gpaug.distributions.graph import Graph, graph_of
from numpyro_gpaug.distributions.sparse_prior import Field, SparsePrior
from numpyro_gpaug.math import sparse_cholesky
from numpyro_gpaug.math.arrays import numbers
from numpyro_gpaug.math.linalg import precise
from numpyro_gpaug.math.normal import LOG_2PI
from numpyro_gpaug.math.sparse_pattern import Pattern
from numpyro_gpaug.math.sparse_terms import by_columns


class SpaceTime(Field):
    r"""A stationary autoregression in time of conditional autoregressions in space:
    values of areas at equally spaced times, (steps, areas).

    With Q the precision of a :class:`~numpyro.distributions.CAR` with mean zero,
    :math:`Q = (D - \text{correlation}\, W) / \text{scale}^2`, every step has the
    distribution :math:`N(0, Q^{-1})`, and

    .. math:: x_t = \text{persistence}\; x_{t-1} + \sqrt{1 - \text{persistence}^2}\;
        e_t, \quad e_t \sim N(0, Q^{-1}).

    The precision of all values is the Kronecker product of the precision of the
    autoregression and Q (Rue and Held, 2005, section 3.4.3). It is sparse.

    :param adjacency: weights of neighbours, (n, n), as for
        :class:`~numpyro_gpaug.ICAR`. An area needs a neighbour.
    :param num_steps: the number of steps, at least two.
    :param scale: a positive number.
    :param correlation: between 0 and 1; near one, neighbours are alike.
    :param persistence: between -1 and 1.
    :raises TypeError: for a traced adjacency.
    :raises ValueError: for an adjacency that :class:`~numpyro_gpaug.ICAR` refuses, for
        areas without neighbours, fewer than two steps, and a ``scale``, ``correlation``
        or ``persistence`` that is not a number.

    **Example**

    >>> import numpy as np
    >>> road = np.diag(np.ones(3), 1) + np.diag(np.ones(3), -1)
    >>> field = SpaceTime(road, 5, scale=1.0, correlation=0.5, persistence=0.9)
    >>> field.event_shape
    (5, 4)
    >>> round(float(field.log_prob(np.zeros((5, 4)))), 2)
    -2.51
    """

    arg_constraints = {
        "scale": constraints.positive,
        "correlation": constraints.open_interval(0, 1),
        "persistence": constraints.open_interval(-1, 1),
    }
    support = constraints.real_matrix
    reparametrized_params = ["scale", "correlation", "persistence"]
    pytree_aux_fields = ("graph",)

    def __init__(
        self,
        adjacency: Any,
        num_steps: int,
        scale: ArrayLike,
        correlation: ArrayLike,
        persistence: ArrayLike,
        *,
        validate_args: bool | None = None,
    ) -> None:
        self.graph = graph_of(adjacency)
        labels, sizes, _ = self.graph.components
        if (alone := np.flatnonzero(labels == len(sizes))).size:
            raise ValueError(
                f"areas {alone[:5].tolist()} have no neighbours, and so no precision. "
                "Leave them out, or give each a neighbour"
            )
        if num_steps < 2:
            raise ValueError(f"num_steps must be at least 2, got {num_steps}")
        self.scale, self.correlation, self.persistence = numbers(
            scale=scale, correlation=correlation, persistence=persistence
        )
        shape = num_steps, self.graph.size
        super().__init__((), shape, validate_args=validate_args)

    @precise
    def sample(self, key: Array, sample_shape: tuple[int, ...] = ()) -> Array:
        noise = self.white(key, sample_shape)
        factor = sparse_cholesky.factor(self.graph.pattern, self._of_areas)
        along = jnp.moveaxis(by_columns(factor.half_solve_transposed, noise), -2, 0)

        def step(before: Array, each: Array) -> tuple[Array, Array]:
            new = self.persistence * before + self._innovation * each
            return new, new

        _, later = lax.scan(step, along[0], along[1:])
        found = jnp.concatenate([along[:1], later])
        return self.scale * jnp.moveaxis(found, 0, -2)

    @validate_sample
    @precise
    def log_prob(self, value: Array) -> Array:
        x = jnp.asarray(value, self.scale.dtype) / self.scale
        later = (x[..., 1:, :] - self.persistence * x[..., :-1, :]) / self._innovation
        steps = jnp.concatenate([x[..., :1, :], later], -2)
        pattern = self.graph.pattern
        entries = sparse_cholesky.with_sums(pattern, self._of_areas)
        quadratic = sparse_cholesky.quadratic(pattern, entries, steps).sum(-1)
        size = self.event_shape[0] * self.event_shape[1]
        constant = size * (jnp.asarray(LOG_2PI, x.dtype) + 2 * jnp.log(self.scale))
        return 0.5 * (self._log_det() - constant - quadratic)

    @property
    @precise
    def variance(self) -> Array:
        pattern = self.graph.pattern
        inverse = sparse_cholesky.factor(pattern, self._of_areas).selected_inverse()
        variances = jnp.square(self.scale) * inverse[pattern.diagonal]
        return jnp.broadcast_to(variances, self.event_shape)

    @property
    def _innovation(self) -> Array:
        """The standard deviation of innovations, relative to the standard deviation of
        values."""
        return jnp.sqrt((1 - self.persistence) * (1 + self.persistence))

    @property
    def _of_areas(self) -> Array:
        """The entries of the precision of one step at unit scale."""
        both = _entries_of(self.graph)
        diagonal, neighbours = (jnp.asarray(x, self.dtype) for x in both)
        return diagonal - self.correlation * neighbours

    def _log_det(self) -> Array:
        """The log-determinant of the precision at unit scale."""
        steps, size = self.event_shape
        of_areas = sparse_cholesky.log_det(self.graph.pattern, self._of_areas)
        return steps * of_areas - 2 * (steps - 1) * size * jnp.log(self._innovation)

    def _sparse_precision(self) -> SparsePrior:
        product, pattern = _product(self.graph, self.event_shape[0]), self.graph.pattern
        square = jnp.square(self.persistence)
        of_steps = jnp.stack([jnp.ones_like(square), 1 + square, -self.persistence])
        values = of_steps[product.kind] * self._of_areas[product.place]
        values = values / jnp.square(self._innovation)
        sums = (1 - self.correlation) * _entries_of(self.graph)[0][pattern.diagonal]
        inner = jnp.ones(self.event_shape[0], square.dtype).at[1:-1].set(
            1 - self.persistence
        ) / (1 + self.persistence)
        return SparsePrior(
            product.pattern, values, None, jnp.zeros((), self.scale.dtype),
            (self.scale[None],), self._log_det, self.event_shape,
            sums=(inner[:, None] * sums).ravel(),
        )  # fmt: skip


@lru_cache(maxsize=16)
def _entries_of(graph: Graph) -> tuple[np.ndarray, np.ndarray]:
    """Return the entries of D and of W."""
    ends, pattern = np.append(graph.rows, graph.columns), graph.pattern
    degrees, neighbours = np.zeros((2, len(pattern.rows)))
    degrees[pattern.diagonal] = np.bincount(ends, np.tile(graph.weights, 2))
    neighbours[pattern.find(graph.rows, graph.columns)] = graph.weights
    return degrees, neighbours


class _Product(NamedTuple):
    """The Kronecker product of two precisions.

    :param pattern: the places of its entries.
    :param kind: for each entry: 0 for the first and last step, 1 for a step between
        them, 2 for a step and the next; (nnz,).
    :param place: the place of the entry of the areas' precision, (nnz,).
    """

    pattern: Pattern
    kind: np.ndarray
    place: np.ndarray


@lru_cache(maxsize=16)
def _product(graph: Graph, steps: int) -> _Product:
    own, size = graph.pattern, graph.size
    apart = np.flatnonzero(own.rows != own.columns)
    both = np.append(np.arange(len(own.rows)), apart)
    rows = np.append(own.rows, own.columns[apart]).astype(np.int64)
    columns = np.append(own.columns, own.rows[apart]).astype(np.int64)
    same, later = np.arange(steps)[:, None] * size, np.arange(1, steps)[:, None] * size
    inside = np.full(steps, 1)
    inside[[0, -1]] = 0
    parts = [
        (same + own.rows, same + own.columns, np.arange(len(own.rows)), inside),
        (later + rows, later - size + columns, both, np.full(steps - 1, 2)),
    ]
    found = [
        (i.ravel(), j.ravel(), np.tile(place, len(kind)), np.repeat(kind, len(place)))
        for i, j, place, kind in parts
    ]
    i, j, place, kind = (np.concatenate(x) for x in zip(*found, strict=True))
    order = np.lexsort((j, i))
    pattern = Pattern.of(steps * size, i, j)
    # As 32-bit integers, which JAX keeps by default.
    return _Product(pattern, *(x[order].astype(np.int32) for x in (kind, place)))
