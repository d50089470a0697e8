# SPDX-License-Identifier: Apache-2.0
"""Parameters of a likelihood at quadrature nodes, interpolated between these.

A likelihood that is narrow beside the distance of two nodes (a large count, a precise
measurement) is stepped over by a fixed rule. Its parameters are smooth functions of the
predictors, so they are interpolated, on the scale on which they are unconstrained. (A
rate that is the exponential of a predictor is then exact.)
"""

from __future__ import annotations

from collections.abc import Callable
from functools import partial, reduce
from itertools import product
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax import Array, lax

from numpyro_gpaug.distributions.mixtures import bounds
from numpyro_gpaug.math.expectation import NODES
from numpyro_gpaug.math.quadrature import gaussian_nodes, shifted_nodes

# The number of nodes of a polynomial.
_POINTS = 6
# The number of Newton steps to a peak, from the highest node.
_STEPS = 12

# The largest share of one node in a sum that is accurate, by the number of predictors.
# A normal likelihood has it if its standard deviation is .6 of that of the predictor,
# or 2.2 with the fewer nodes of each of two predictors, where errors are larger.
_COARSE = {1: 0.4, 2: 0.35}

Density = Callable[[list[Array], list[Array]], Array]


def stepped_over(log_terms: Array, dimensions: int) -> Array:
    """Whether few nodes have most of a sum along a predictor, by data.

    :param log_terms: the logarithms of its terms, (members * nodes, ...).
    :param dimensions: the number of predictors.
    """
    axes = [NODES[dimensions]] * dimensions
    terms = log_terms.reshape(-1, *axes, *log_terms.shape[1:])
    largest = []
    # Not the largest normalised weights: reductions of arrays of 32 million numbers or
    # more, divided by sums, crash jaxlib 0.10.0 and 0.10.1.
    for axis in range(dimensions):
        # The other predictor is summed out, and members keep their shares.
        others = tuple(1 + k for k in range(dimensions) if k != axis)
        along = jax.nn.logsumexp(terms, others) if others else terms
        largest.append(jax.nn.logsumexp(along.max(1), 0))
    share = jnp.stack(largest).max(0) - jax.nn.logsumexp(log_terms, 0)
    return share > np.log(_COARSE[dimensions])


class Grid:
    """Arrays at the nodes of :func:`.expectation.nodes`, of one or more members.

    :param dimensions: the number of predictors.
    :param arrays: (members * nodes, ...).
    :param kinds: the constraints of the arrays.
    :param batch_shape: the shape of the data.
    """

    def __init__(
        self,
        dimensions: int,
        arrays: list[Array],
        kinds: list[Any],
        batch_shape: tuple[int, ...],
    ) -> None:
        self.dimensions, self.kinds, self.batch_shape = dimensions, kinds, batch_shape
        if dimensions:
            x, weights = np.polynomial.hermite_e.hermegauss(NODES[dimensions])
            self.x, self.log_weights = x, np.log(weights / weights.sum())
            self.size = len(x) ** dimensions
        self.arrays = []
        for array, kind in zip(arrays, kinds, strict=True):
            shape = batch_shape + array.shape[array.ndim - kind.event_dim :]
            fill = partial(jnp.broadcast_to, shape=shape)
            self.arrays.append(jax.vmap(fill)(array))

    def at_nodes(self, index: Array) -> list[Array]:
        """Return the arrays at nodes.

        :param index: an index for each datum, (1, batch).
        """
        return [x[0] for x in self._rows(self.arrays, index)]

    def _rows(self, arrays: list[Array], index: Array) -> list[Array]:
        return [
            jnp.take_along_axis(x, _beside(index, c), 0)
            for x, c in zip(arrays, self.kinds, strict=True)
        ]

    def between(self, z: Array, member: Array | int) -> list[Array]:
        """Return the arrays anywhere.

        :param z: standard normal numbers, (dimensions, batch).
        :param member: the member of each datum, or of all.
        """
        places, weights = zip(*map(self._polynomial, z), strict=True)
        num = len(self.x)
        index, share = [], []
        for each in product(range(_POINTS), repeat=self.dimensions):
            at = jnp.asarray(member)
            for place, k in zip(places, each, strict=True):
                at = at * num + place + k
            index.append(jnp.broadcast_to(at, self.batch_shape))
            factors = [w[k] for w, k in zip(weights, each, strict=True)]
            share.append(jnp.prod(jnp.stack(factors), 0))
        free = [_free(x, c) for x, c in zip(self.arrays, self.kinds, strict=True)]
        return self._combined(free, jnp.stack(index), jnp.stack(share))

    def _combined(self, free: list[Array], index: Array, weights: Array) -> list[Array]:
        """Return sums of rows of arrays without bounds, with their bounds.

        :param index: rows for each datum, (terms, batch).
        :param weights: their weights, in the same shape.
        """
        # Integers and flags (numbers of trials, censoring) have no values in between.
        return [
            _constrained((_beside(weights, c) * x).sum(0), c)
            if jnp.issubdtype(x.dtype, jnp.floating)
            else x[0]
            for x, c in zip(self._rows(free, index), self.kinds, strict=True)
        ]

    def _polynomial(self, z: Array) -> tuple[Array, Array]:
        """Return the first node of a polynomial, and the weights of its nodes."""
        x = jnp.asarray(self.x, z.dtype)
        z = jnp.clip(z, x[0], x[-1])
        first = (x.reshape(-1, *[1] * z.ndim) <= lax.stop_gradient(z)).sum(0)
        first = jnp.clip(first - _POINTS // 2, 0, len(x) - _POINTS)
        centres, rules = _interpolation(self.x)
        t = z - jnp.asarray(centres, z.dtype)[first]
        # Powers, highest first, and nodes.
        rule = jnp.moveaxis(jnp.asarray(rules, z.dtype)[first], (-2, -1), (0, 1))
        return first, reduce(lambda sum_, c: sum_ * t + c, rule)

    def log_average(
        self,
        density: Density,
        function: Density | None,
        densities: Array,
        weights: Array,
        fixed: list[Array],
        wanted: Array,
    ) -> Array:
        """Return the logarithm of an average over members and predictors, by nodes
        around the peaks of the density along one predictor, and the nodes of the grid
        along the other.

        :param density: the log-density of data, given the arrays, and all else that
            belongs to the data.
        :param function: the logarithm of what is averaged, if it is not the density: a
            function that turns at the peak.
        :param densities: log-densities at the nodes, (members * nodes, batch).
        :param weights: weights of the nodes, of this shape.
        :param fixed: what belongs to the data, whatever the node, (batch, ...).
        :param wanted: the data whose average is needed, (batch,).
        """
        num, batch = len(self.x), self.batch_shape
        axes, size = [num] * self.dimensions, wanted.size
        # The lines of wanted data take the places of all data.
        order = jnp.argsort(~wanted.ravel())

        def lines(x: Array, axis: int) -> Array:
            """Order nodes by lines along an axis: (lines, nodes, data, ...)."""
            table = x.reshape(-1, *axes, size, *x.shape[1 + len(batch) :])
            table = jnp.moveaxis(table, 1 + axis, self.dimensions)
            return table.reshape(-1, num, *table.shape[1 + self.dimensions :])

        def along_all(x: list[Array]) -> list[Array]:
            """Return what :func:`along` does, for all lines, (lines, batch)."""
            count = len(x[0])

            def some(first: Array) -> list[Array]:
                task = first + jnp.arange(size)
                data, line = order[task // count], task % count
                there = [jnp.moveaxis(each[line, :, data], 1, 0) for each in x]
                kept = [each.reshape(size, -1)[data] for each in fixed]
                *arrays, dense = (
                    each.reshape(num, *batch, *each.shape[2:]) for each in there
                )
                pairs = zip(kept, fixed, strict=True)
                return along(arrays, dense, [a.reshape(b.shape) for a, b in pairs])

            def turn(first: Array) -> list[Array]:
                none = [jnp.zeros(batch, densities.dtype)] * 2
                needed = first < count * wanted.sum()
                return lax.cond(needed, some, lambda _: none, first)

            found = lax.map(turn, size * jnp.arange(count))
            back = jnp.argsort(order)
            return [y.reshape(size, count)[back].T.reshape(-1, *batch) for y in found]

        def along(arrays: list[Array], dense: Array, fixed: list[Array]) -> list[Array]:
            def of(z: Array) -> list[Array]:
                first, weights = self._polynomial(z)
                index = first + jnp.arange(_POINTS).reshape(-1, *[1] * len(batch))
                return self._combined(arrays, index, weights)

            at, log_weights = self._nodes(
                lambda z: density(of(z), fixed), dense, shifted
            )
            both = jax.vmap(lambda z: jnp.stack([f(of(z), fixed) for f in functions]))
            terms = both(at)
            terms = jnp.where(jnp.isnan(terms), -jnp.inf, terms)
            one, *others = jax.nn.logsumexp(log_weights[:, None] + terms, 0)
            return [one, (others or [one])[0]]

        functions = [density, *([] if function is None else [function])]
        shifted = function is None
        free = [_free(x, c) for x, c in zip(self.arrays, self.kinds, strict=True)]
        members = weights.reshape(-1, self.size, *weights.shape[1:]).sum(1)
        found, shares = [], []
        for axis in range(self.dimensions):
            given = [lines(x, axis) for x in (*free, densities)]
            each, average = (
                x.reshape(len(members), -1, *batch) for x in along_all(given)
            )
            if self.dimensions == 1:
                return jax.nn.logsumexp(jnp.log(members) + average[:, 0], 0)
            outer = jnp.asarray(self.log_weights, each.dtype)
            outer = outer.reshape(-1, *(1,) * len(batch))
            shares.append(jax.nn.softmax(outer + each, 1).max(1))
            found.append(jax.nn.logsumexp(outer + average, 1))
        # The nodes of the grid must not step over the peak of what is left.
        best = jnp.where(shares[0] <= shares[1], found[0], found[1])
        return jax.nn.logsumexp(jnp.log(members) + best, 0)

    def _nodes(
        self, density: Callable[[Array], Array], densities: Array, shifted: bool
    ) -> tuple[Array, Array]:
        """Return nodes of one predictor around the peak of a density, and their
        log-weights, nodes first.

        :param density: the log-density, elementwise.
        :param densities: the log-densities at the nodes of the grid, nodes first.
        :param shifted: whether a peak far away is all that matters.
        """
        x = jnp.asarray(self.x, densities.dtype)
        heights = densities - 0.5 * jnp.square(x).reshape(
            -1, *[1] * len(self.batch_shape)
        )
        top = jnp.argmax(jnp.where(jnp.isnan(heights), -jnp.inf, heights), 0)
        low, high = x[jnp.maximum(top - 1, 0)], x[jnp.minimum(top + 1, len(x) - 1)]

        def slope(z: Array) -> Array:
            along = jax.jvp(density, (z,), (jnp.ones_like(z),))[1]
            return along - z

        def step(_: int, at: tuple[Array, Array]) -> tuple[Array, Array]:
            z = at[0]
            rise, curvature = jax.jvp(slope, (z,), (jnp.ones_like(z),))
            # The curvature of the prior, where the likelihood has none.
            curvature = jnp.where(curvature < -1, -curvature, 1)
            moved = jnp.clip(z + rise / curvature, low, high)
            return jnp.where(jnp.isnan(moved), z, moved), lax.rsqrt(curvature)

        start = x[top], jnp.ones_like(low)
        peak, width = lax.stop_gradient(lax.fori_loop(0, _STEPS, step, start))
        zero = jnp.zeros_like(peak)
        if shifted:
            at, log_weights = shifted_nodes(zero, zero + 1, peak, peak, width)
        else:
            at, log_weights = gaussian_nodes(zero, zero + 1, peak, width)
        return jnp.moveaxis(at, -1, 0), jnp.moveaxis(log_weights, -1, 0)


def _interpolation(x: np.ndarray) -> tuple[np.ndarray, np.ndarray]:
    """Return the centre of each run of neighbouring nodes, and the polynomials about it
    that are one at one of them and zero at the others: (runs, powers, nodes)."""
    near = np.lib.stride_tricks.sliding_window_view(x, _POINTS)
    centres = near.mean(1)
    return centres, np.linalg.inv([np.vander(each) for each in near - centres[:, None]])


def _beside(x: Array, kind: Any) -> Array:
    """Return an array with the trailing axes that a parameter has."""
    return x.reshape(x.shape + (1,) * kind.event_dim)


def _ends(kind: Any) -> tuple[bool, bool]:
    """Whether a constraint is bounded by zero below, and by one above."""
    low, high = bounds(kind)
    zero = isinstance(low, int | float) and low == 0
    return zero, zero and isinstance(high, int | float) and high == 1


def _free(x: Array, kind: Any) -> Array:
    """Return an array on a scale without bounds, if its bounds are 0 and 1."""
    positive, share = _ends(kind)
    if not positive or not jnp.issubdtype(x.dtype, jnp.floating):
        return x
    tiny, eps = jnp.finfo(x.dtype).tiny, jnp.finfo(x.dtype).eps
    inside = jnp.clip(x, tiny, 1 - eps / 2 if share else None)
    return jnp.log(inside) - (jnp.log1p(-inside) if share else 0)


def _constrained(x: Array, kind: Any) -> Array:
    positive, share = _ends(kind)
    if share:
        return jax.nn.sigmoid(x)
    return jnp.exp(x) if positive else x
