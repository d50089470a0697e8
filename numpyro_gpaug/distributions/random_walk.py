# SPDX-License-Identifier: Apache-2.0
"""The random walk of order two at irregular points."""

from __future__ import annotations

from typing import NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
import numpyro.distributions as dist
from jax import Array, random
from jax.typing import ArrayLike
from numpyro.distributions import constraints
from numpyro.distributions.util import validate_sample
from scipy import sparse

from numpyro_gpaug.distributions.sparse_prior import SparsePrior
from numpyro_gpaug.math.arrays import numbers
from numpyro_gpaug.math.sparse_terms import sum_of_terms


class _Steps(NamedTuple):
    """Distances between the points of a walk, as hashable numbers.

    :param between: distances of successive points, n - 1 numbers.
    """

    between: tuple[float, ...]

    @property
    def around(self) -> np.ndarray:
        """Half of the distance of the two neighbours of each inner point, (n - 2,)."""
        return np.convolve(self.between, [0.5, 0.5], "valid")


class RandomWalk2(dist.Distribution):
    r"""A random walk of order two at irregular points: a smooth curve that is linear
    where there are no data.

    The slopes between successive points change by independent normal numbers with
    variance :math:`\text{scale}^2 (d_{i-1} + d_i) / 2`, where :math:`d_i` is the
    distance between points i and i + 1. This is the Galerkin approximation of the
    integrated Wiener process, whose precision has five bands (Lindgren and Rue, 2008,
    section 3). It hardly changes if points are added, for example those at which the
    curve is predicted. The value and the slope at the first point are normal with
    standard deviations ``level`` and ``slope``; large ones leave the line free.

    Fits of more than 270 points need float64: a smooth curve has a small quadratic form
    that is a sum of large terms, and float32 does not resolve it. Fits warn.

    :param points: increasing numbers, (n,), n > 1. They must be known when the model is
        traced.
    :param scale: the standard deviation of the change of the slope over a unit of
        distance.
    :param level: the standard deviation of the first value.
    :param slope: the standard deviation of the first slope.
    :raises TypeError: for traced points.
    :raises ValueError: for points that do not increase, and for a ``scale``, ``level``
        or ``slope`` that is not a number.

    **Example**

    >>> import numpy as np
    >>> walk = RandomWalk2(np.array([0.0, 1.0, 1.5, 4.0]), 1.0, level=3.0, slope=0.5)
    >>> print(np.asarray(walk.variance).round(2))
    [ 9.    9.25  9.75 29.12]
    """

    arg_constraints = {
        "scale": constraints.positive,
        "level": constraints.positive,
        "slope": constraints.positive,
    }
    support = constraints.real_vector
    reparametrized_params = ["scale", "level", "slope"]
    pytree_aux_fields = ("steps",)

    def __init__(
        self,
        points: ArrayLike,
        scale: ArrayLike,
        level: ArrayLike,
        slope: ArrayLike,
        *,
        validate_args: bool | None = None,
    ) -> None:
        self.steps = _steps(points)
        found = numbers(scale=scale, level=level, slope=slope)
        self.scale, self.level, self.slope = found
        size = len(self.steps.between) + 1
        super().__init__((), (size,), validate_args=validate_args)

    def sample(self, key: Array, sample_shape: tuple[int, ...] = ()) -> Array:
        shape = (*sample_shape, *self.event_shape)
        return self.walked(random.normal(key, shape, self.scale.dtype))

    def walked(self, noise: Array) -> Array:
        """Return the curve of independent standard normal numbers, (..., n)."""
        first, changes = noise[..., :1] * self.level, noise[..., 1:] * self._deviations
        rises = changes.cumsum(-1) * self._between
        return first + jnp.concatenate([0 * first, rises.cumsum(-1)], -1)

    def noise(self, value: Array) -> Array:
        """Return the numbers of a curve; the inverse of :meth:`walked`."""
        slopes = jnp.diff(value) / self._between
        changes = jnp.diff(slopes, prepend=jnp.zeros_like(slopes[..., :1]))
        first = value[..., :1] / self.level
        return jnp.concatenate([first, changes / self._deviations], -1)

    @validate_sample
    def log_prob(self, value: Array) -> Array:
        white = self.noise(jnp.asarray(value, self.scale.dtype))
        constant = jnp.asarray(white.shape[-1] * np.log(2 * np.pi), white.dtype)
        squares = jnp.square(white).sum(-1)
        return -0.5 * (squares + constant) - jnp.log(self._spreads).sum()

    @property
    def mean(self) -> Array:
        return jnp.zeros(self.event_shape, self.scale.dtype)

    @property
    def variance(self) -> Array:
        between = jnp.asarray(self.steps.between, self.scale.dtype)
        # The value at point i is the first value plus reaches[j, i] times change j.
        ends = jnp.append(0, between.cumsum())
        reaches = jnp.maximum(ends - ends[:-1, None], 0)
        changes = jnp.square(self._deviations) @ jnp.square(reaches)
        return jnp.square(self.level) + changes

    @property
    def _between(self) -> Array:
        return jnp.asarray(self.steps.between, self.scale.dtype)

    @property
    def _deviations(self) -> Array:
        """Standard deviations of the first slope and of its changes, (n - 1,)."""
        changes = self.scale * jnp.asarray(np.sqrt(self.steps.around), self.scale.dtype)
        return jnp.append(self.slope, changes)

    @property
    def _spreads(self) -> Array:
        """Standard deviations of the first value and of the next given the earlier."""
        return jnp.append(self.level, self._deviations * self._between)

    def _sparse_precision(self) -> SparsePrior:
        size, around = self.event_shape[0], self.steps.around
        inverse = 1 / np.asarray(self.steps.between)
        shape = (size - 1, size)
        rises = sparse.diags_array([-inverse, inverse], offsets=[0, 1], shape=shape)
        ends = sparse.csr_array(np.eye(1, size)), rises.tocsr()[[0]]
        changes = (rises.tocsr()[1:] - rises.tocsr()[:-1]).tocsr()
        weighted = changes.T @ sparse.diags_array(1 / around) @ changes
        level, slope = (end.T @ end for end in ends)
        scales = self.level, self.slope, self.scale
        terms = zip((n**-2 for n in scales), (level, slope, weighted), strict=True)
        pattern, values = sum_of_terms(terms, "precision")
        one = jnp.ones((), self.scale.dtype)
        return SparsePrior(
            pattern, values, None, 0 * one, (one,),
            lambda: -2 * jnp.log(self._spreads).sum(), needs_float64=True,
        )  # fmt: skip


def _steps(points: ArrayLike) -> _Steps:
    if isinstance(points, jax.core.Tracer):
        raise TypeError(
            "points are traced, and must be known when the model is traced. Pass a "
            "NumPy array that is not an argument of the compiled function"
        )
    points = np.asarray(points, float)
    if points.ndim != 1 or len(points) < 2:
        raise ValueError(f"points has shape {points.shape}; expected (n,), n > 1")
    between = np.diff(points)
    if not (between > 0).all():
        first = int(np.argmin(between > 0))
        raise ValueError(
            f"points[{first}] is {points[first]} and points[{first + 1}] is "
            f"{points[first + 1]}. Points must increase: sort them, make them unique, "
            "and index the curve by the inverse (numpy.unique(x, return_inverse=True))"
        )
    return _Steps(tuple(between.tolist()))
