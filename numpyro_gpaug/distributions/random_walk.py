# SPDX-License-Identifier: Apache-2.0
"""The random walk of order two at irregular points."""

from __future__ import annotations

from collections.abc import Callable
from typing import NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
from jax import Array, lax
from jax.typing import ArrayLike
from numpyro.distributions import constraints
from numpyro.distributions.util import validate_sample
from scipy import sparse

from numpyro_gpaug.distributions.sparse_prior import Field, SparsePrior
from numpyro_gpaug.math import small
from numpyro_gpaug.math.arrays import numbers
from numpyro_gpaug.math.recurrences import linked_along, step_before
from numpyro_gpaug.math.sparse_terms import sum_of_terms

# The largest rounding error of a transition, in standard deviations of its noise, and
# the largest error of the bound, in nats, of a sparse precision.
_MOVED, _LOST = 0.005, 0.02


class _Steps(NamedTuple):
    """Distances between the points of a walk, as hashable numbers.

    :param between: distances of successive points, n - 1 numbers.
    """

    between: tuple[float, ...]

    @property
    def around(self) -> np.ndarray:
        """Half of the distance of the two neighbours of each inner point, (n - 2,)."""
        between = np.asarray(self.between)
        return (between[1:] + between[:-1]) / 2

    @property
    def pairs(self) -> _Pairs:
        """Pairs of points, the steps of a chain. The last point of an odd number is
        paired with one that no datum depends on."""
        spare = len(self.between) % 2 == 0
        between = np.pad(self.between, (1, spare), mode="edge").reshape(-1, 2)
        before, after = between.T
        # The first pair has none: its numbers make the level and the first slope.
        changes = np.pad(np.sqrt(self.around), (2, 0), constant_values=1)
        changes = np.pad(changes, (0, between.size - len(changes)), mode="edge")
        one, two = changes.reshape(-1, 2).T
        first = np.arange(len(one)) == 0
        flipped = (two < one) & ~first
        back = np.where(flipped, before, 0)
        along = np.append(0, (after + back)[:-1]) + before - back
        risen = np.where(flipped, two, one) * before
        ratios = (along * np.hypot(one, two) / risen)[1:]
        return _Pairs(
            after, first, back, along, risen, np.where(flipped, -two, one),
            np.where(flipped, one, two), float(ratios.max(initial=0)),
        )  # fmt: skip


class _Pairs(NamedTuple):
    """Pairs of points: numbers (steps,) of the transitions between them.

    :param after: the distance from the first point of a pair to the second.
    :param first: whether a pair is the first.
    :param back: the distance from the point whose value is in the state to the first.
    :param along: the distance from this point of the pair before.
    :param risen: the standard deviation of the noise of the value, at scale one.
    :param shared: the coefficient of the same number in the slope.
    :param own: the standard deviation of the rest of the noise of the slope.
    :param condition: what the slope adds to the value on the way to a pair, over the
        noise of the value. Rounding errors grow by this factor.
    """

    after: np.ndarray
    first: np.ndarray
    back: np.ndarray
    along: np.ndarray
    risen: np.ndarray
    shared: np.ndarray
    own: np.ndarray
    condition: float


class Chained(NamedTuple):
    """A Gaussian as a function of the states of a chain.

    :param links: the transitions, (steps, R, 2 R + 1), see
        :func:`~numpyro_gpaug.math.recurrences.split`.
    :param value: returns the value of the states, (steps, R).
    :param numbers: returns the standard normal numbers of a value, (steps, R).
    """

    links: Array
    value: Callable[[Array], Array]
    numbers: Callable[[Array], Array]

    def states(self, white: Array) -> Array:
        """Return the states of standard normal numbers, both (steps, R)."""
        return linked_along(self.links[None], white[None, ..., None])[0, ..., 0]


class RandomWalk2(Field):
    r"""A random walk of order two at irregular points: a smooth curve that is linear
    where there are no data.

    The slopes between successive points change by independent normal numbers with
    variance :math:`\text{scale}^2 (d_{i-1} + d_i) / 2`, where :math:`d_i` is the
    distance between points i and i + 1. This is the Galerkin approximation of the
    integrated Wiener process, whose precision has five bands (Lindgren and Rue, 2008,
    section 3). It hardly changes if points are added, for example those at which the
    curve is predicted. The value and the slope at the first point are normal with
    standard deviations ``level`` and ``slope``; large ones leave the line free.

    A long curve is a chain of pairs of points, in work linear in n. If its distances
    differ more than a thousandfold in float32, it is part of a dense matrix instead,
    which has at most 5000 rows.

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
        shape = (len(self.steps.between) + 1,)
        super().__init__((), shape, validate_args=validate_args)

    def sample(self, key: Array, sample_shape: tuple[int, ...] = ()) -> Array:
        return self.walked(self.white(key, sample_shape))

    def walked(self, noise: Array) -> Array:
        """Return the curve of independent standard normal numbers, (..., n)."""
        first, changes = noise[..., :1] * self.level, noise[..., 1:] * self._deviations
        rises = changes.cumsum(-1) * self._between
        return first + jnp.concatenate([0 * first, rises.cumsum(-1)], -1)

    def chain(self) -> Chained | None:
        """Return the curve as a chain; ``None`` if the dtype does not resolve its
        transitions, because distances are too uneven.

        A step is a pair of points: these have as many changes of slope as a state has
        numbers. Its state is the slope after the second change, and the value of this
        line at one of the points of the changes, such that their noises have a
        correlation of at most .71.
        """
        size, dtype = self.event_shape[0], self.scale.dtype
        if not self._is_chain:
            return None
        after, first, back, along, risen, shared, own, _ = self.steps.pairs

        def scaled(x: np.ndarray) -> Array:
            return self.scale * jnp.asarray(x, dtype)

        rise = jnp.where(first, self.level, scaled(risen))
        shift = jnp.where(first, 0, scaled(shared))
        slope = jnp.where(first, self.slope, scaled(own))
        units = lax.stop_gradient(jnp.stack([rise, jnp.hypot(shift, slope)], -1))
        ratio, zero, eye = 1 / units, jnp.zeros_like(rise), jnp.ones_like(rise)
        moved = [[eye, jnp.asarray(along, dtype)], [zero, eye]]
        noise = [[rise, zero], [shift, slope]]
        links, lower = (
            jnp.stack([jnp.stack(row, -1) for row in rows], -2) * ratio[..., None]
            for rows in (moved, noise)
        )
        links = links * step_before(units[None])[0][:, None]
        whitener = small.inverse_lower(lower)
        ends = jnp.asarray(np.stack([back, back + after], -1), dtype)

        def curve(states: Array) -> Array:
            value, slope = jnp.split(states * units, 2, -1)
            return (value + ends * slope).reshape(-1)[:size]

        def numbers(x: Array) -> Array:
            found = jnp.pad(self.noise(x), (0, size % 2)).reshape(-1, 2)
            turned = found[:, ::-1] * jnp.asarray([-1, 1], dtype)
            return jnp.where(back[:, None] > 0, turned, found)

        links = jnp.concatenate([links, whitener, units[..., None]], -1)
        return Chained(links, curve, numbers)

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
    def variance(self) -> Array:
        # The value at point i is the first value plus reaches[j, i] times change j.
        ends = jnp.append(0, self._between.cumsum())
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
            lambda: -2 * jnp.log(self._spreads).sum(), resolved=self._resolved,
            chained=self._is_chain,
        )  # fmt: skip

    @property
    def _is_chain(self) -> bool:
        eps = float(jnp.finfo(self.scale.dtype).eps)
        return self.steps.pairs.condition * eps < _MOVED

    @property
    def _resolved(self) -> bool:
        """Whether rounding of the precision changes bounds by little.

        A curve that is smooth over a length s multiplies the variance of a value, given
        all others, by the cube of s over the distance. Here s is a tenth of the range.
        """
        between = np.asarray(self.steps.between)
        inflation = np.linalg.norm((between.sum() / 10 / between) ** 3)
        is_double = self.scale.dtype == np.float64
        return is_double and bool(inflation * np.finfo(float).eps < _LOST)


def _steps(points: ArrayLike) -> _Steps:
    if isinstance(points, jax.core.Tracer):
        raise TypeError(
            "points are traced, and must be known when the model is traced. Pass a "
            "NumPy array that is not an argument of the model, but a global that it "
            "reads"
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
