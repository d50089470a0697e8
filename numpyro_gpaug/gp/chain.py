# SPDX-License-Identifier: Apache-2.0
r"""A process of one input as a chain of states, in work linear in the number of times.

Step t of the chain is the state of the process at the t-th distinct time, in units of
the standard deviations of its noise, :math:`s_t = D_t x_t` with :math:`Q_t = D_t R_t
D_t`:

.. math:: x_t = A_t x_{t-1} + e_t, \qquad A_t = D_t^{-1} \Phi_t D_{t-1}, \qquad
    e_t \sim N(0, R_t).

In these units a chain of very short steps is as well conditioned as one of long steps.
(In units in which R is the identity it is not. After a short step that follows a long
one, smooth numbers are known far better than rough ones, in units of the noise. Units
that mix them lose the difference.)
Times that are exactly equal share a step. The number of steps is nevertheless the
number of times, which a traced program knows. Steps that are left over follow the
others, and are independent standard normal numbers that no datum depends on.

Between two steps the state depends on both, and after the last step, or before the
first, on one. The weights and the remaining variance are computed from the noise of the
two parts of the step, without differences of covariances.
"""

from __future__ import annotations

from functools import cached_property, partial
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
from jax import Array, lax

from numpyro_gpaug.gp.kernels._state_space import Term, block_diagonal, terms_of
from numpyro_gpaug.math import small
from numpyro_gpaug.math.recurrences import linked_along, step_before


class Weights(NamedTuple):
    """Function values given the chain, N rows.

    :param left: the step before each row, or at it, (N,).
    :param of_left: its weights, (N, R).
    :param right: the step after each row, (N,).
    :param of_right: its weights, (N, R).
    :param residual: the remaining variance, (N,).
    """

    left: Array
    of_left: Array
    right: Array
    of_right: Array
    residual: Array

    def __call__(self, x: Array) -> Array:
        """Return function values (N,) without the residual.

        :param x: the numbers of the chain, (steps, R).
        """
        # Not sums of products: without fusion emitters, XLA computes the sum of two
        # such sums under vmap over x from the first x alone.
        dot = partial(jnp.einsum, "nr,nr->n")
        return dot(self.of_left, x[self.left]) + dot(self.of_right, x[self.right])


class _Steps(NamedTuple):
    """The steps of one term of a kernel.

    :param scale: standard deviations of the noise, (steps, d), without derivatives.
    :param lower: the lower factor of its correlations, (steps, d, d).
    :param links: transition matrices, (steps, d, d).
    """

    scale: Array
    lower: Array
    links: Array

    @property
    def value(self) -> Array:
        """The weights of a function value, the last number of its state, (steps, d)."""
        return jnp.zeros_like(self.scale).at[:, -1].set(self.scale[:, -1])


class _Between(NamedTuple):
    """The rows of one term of a kernel, between two steps.

    :param of_left: weights of the step before, (N, d).
    :param of_right: weights of the step after, (N, d).
    :param seen: the weights of the white noise of the step after, (N, d).
    :param since: the covariance of the value with the state given the step before, (N,
        d).
    :param residual: the remaining variance of the value, (N,).
    """

    of_left: Array
    of_right: Array
    seen: Array
    since: Array
    residual: Array


class Chain:
    """The states of a process at times.

    :param kernel: the kernel; see :func:`~numpyro_gpaug.gp.kernels._state_space.
        terms_of`.
    :param times: times in any order, possibly equal, (T,).
    """

    def __init__(self, kernel: Any, times: Array) -> None:
        self.given = times
        terms = terms_of(kernel, times.dtype)
        self._moving = [term for term in terms if term.factors]
        self._fixed = [term for term in terms if not term.factors]
        # This call runs the kernel's own checks of its hyperparameters.
        kernel(times[:1])

    @property
    def num_fixed(self) -> int:
        """The number of waves with constant weights."""
        return sum(2 ** len(term.periods) for term in self._fixed)

    @property
    def width(self) -> int:
        """The numbers of a step, R."""
        return sum(term.size * 2 ** len(term.periods) for term in self._moving)

    def waves(self, t: Array) -> Array:
        """Return the waves with constant weights at times (N,), (N, waves)."""
        none = jnp.zeros((len(t), 0), t.dtype)
        return jnp.concatenate([none, *(term.waves(t) for term in self._fixed)], -1)

    @cached_property
    def _order(self) -> tuple[Array, Array]:
        """Distinct times in order, and infinity after them, (T,), and the step of every
        given time."""
        order = jnp.argsort(self.given)
        ordered = self.given[order]
        new = jnp.concatenate([jnp.zeros(1, bool), ordered[1:] > ordered[:-1]])
        step = jnp.cumsum(new)
        after = jnp.full_like(ordered, jnp.inf)
        place = jnp.zeros_like(step).at[order].set(step)
        return after.at[step].set(ordered), place

    @cached_property
    def _starts(self) -> Array:
        """Whether a step is the first, or left over."""
        first = jnp.arange(len(self.given)) == 0
        return first | ~jnp.isfinite(self._order[0])

    @cached_property
    def _steps(self) -> list[_Steps]:
        times = self._finite(self._order[0])
        dt = jnp.where(self._starts, 1, times - step_before(times[None])[0])
        return [self._steps_of(term, dt) for term in self._moving]

    def _finite(self, times: Array) -> Array:
        return jnp.where(jnp.isfinite(times), times, 0)

    def _steps_of(self, term: Term, dt: Array) -> _Steps:
        scale, lower = term.root(dt, self._starts)
        # Any units are possible. With constant units, function values do not move with
        # hyperparameters, and derivatives at fixed states have no large terms.
        units = lax.stop_gradient(scale)
        lower, scale = lower * (scale / units)[..., None], units
        before = step_before(scale[None])[0]
        links = term.transition(dt) * (before[..., None, :] / scale[..., None])
        return _Steps(scale, lower, jnp.where(self._starts[..., None, None], 0, links))

    @cached_property
    def links(self) -> Array:
        """The transition matrices of all numbers of a step, the whiteners of their
        noise, and their units, (T, R, 2 R + 1)."""
        blocks = [
            (steps.links, small.inverse_lower(steps.lower), steps.scale)
            for term, steps in zip(self._moving, self._steps, strict=True)
            for _ in range(2 ** len(term.periods))
        ]
        links, whiteners, units = zip(*blocks, strict=True)
        both = map(block_diagonal, (links, whiteners))
        return jnp.concatenate([*both, jnp.concatenate(units, -1)[..., None]], -1)

    def states(self, white: Array) -> Array:
        """Return the states that standard normal numbers make, both (T, R)."""
        return linked_along(self.links[None], white[None, ..., None])[0, ..., 0]

    def own(self) -> Weights:
        """Return the function values at the given times."""
        _, place = self._order
        parts: list[Any] = []
        for term, steps in zip(self._moving, self._steps, strict=True):
            parts.append(_spread(term.waves(self.given), steps.value[place]))
        weights = jnp.concatenate(parts or [self.given[:, None][:, :0]], -1)
        none = jnp.zeros_like(weights)
        return Weights(place, weights, place, none, jnp.zeros_like(self.given))

    def at(self, t: Array) -> Weights:
        """Return the function values at times (N,)."""
        left, right = self._neighbours(t)
        weights, residual = list[Any](), jnp.zeros_like(t)
        for term, between in zip(self._moving, self._between(t), strict=True):
            waves = term.waves(t)
            both = between.of_left, between.of_right
            weights.append([_spread(waves, x) for x in both])
            residual += between.residual * jnp.square(waves).sum(-1)
        pairs = zip(*weights or [2 * [t[:, None][:, :0]]], strict=True)
        of_left, of_right = (jnp.concatenate(x, -1) for x in pairs)
        last = len(self.given) - 1
        return Weights(
            jnp.maximum(left, 0), of_left, jnp.minimum(right, last), of_right, residual
        )

    def _neighbours(self, t: Array) -> tuple[Array, Array]:
        """Return the steps before and after times; -1 before the first."""
        after = jnp.searchsorted(self._order[0], t, side="right")
        return after - 1, after

    def _between(self, t: Array) -> list[_Between]:
        times, last = self._order[0], len(self.given) - 1
        left, right = self._neighbours(t)
        begun, begin = left >= 0, times[jnp.maximum(left, 0)]
        right = jnp.minimum(right, last)
        ends = (left < last) & jnp.isfinite(times[right])
        end = self._finite(times[right])
        since = jnp.where(begun, t - begin, 1), begun
        until = jnp.where(ends, end - t, 1), ends
        found = []
        for term, steps in zip(self._moving, self._steps, strict=True):
            before, after = (
                jax.tree.map(lambda x, k=k: x[k], steps)
                for k in (jnp.maximum(left, 0), right)
            )
            found.append(_between(term, since, until, before, after))
        return found

    def residual_covariance(self, t: Array) -> Array:
        """Return the covariance of function values at times (N,) given the chain, (N,
        N)."""
        left, _ = self._neighbours(t)
        total = jnp.zeros((len(t), len(t)), t.dtype)
        for term, between in zip(self._moving, self._between(t), strict=True):
            waves = term.waves(t)

            def row(i: Array, term: Term = term, own: _Between = between) -> Array:
                """Return the covariances with all rows from this one on."""
                after = jnp.maximum(t - t[i], 0)
                ahead = term.transition(after)[..., -1, :] @ own.since[i]
                known = own.seen @ own.seen[i]
                return jnp.where((t >= t[i]) & (left == left[i]), ahead - known, 0)

            rows = lax.map(row, jnp.arange(len(t)))
            later = t[None] > t[:, None]
            both = jnp.where(later, rows, rows.T)
            same = t[None] == t[:, None]
            both = jnp.where(same, between.residual[:, None], both)
            there = between.residual > 0
            both = jnp.where(there[:, None] & there, both, 0)
            total += both * (waves @ waves.T)
        return total


def _between(
    term: Term,
    since: tuple[Array, Array],
    until: tuple[Array, Array],
    before: _Steps,
    after: _Steps,
) -> _Between:
    """Return the rows of a term between two steps.

    :param since: the times since the steps before, and whether there are any.
    :param until: the times until the steps after, and whether there are any.
    :param before: the steps before.
    :param after: the steps after.
    """
    (past, begun), (future, ends) = since, until
    # At a step nothing remains, and its state moves the value, so that derivatives by
    # time are right.
    off = ~begun | (past > 0)
    scale, lower = term.root(past, ~begun)
    ahead = small.product(term.transition(future) * scale[..., None, :], lower)
    # The noise up to here, in units of the whole noise of the next step.
    share = small.product(
        small.inverse_lower(after.lower), ahead / after.scale[..., None]
    )
    value = jnp.where(off[..., None], scale[..., -1:] * lower[..., -1, :], 0)
    seen = jnp.where(ends[..., None], _row(value, share.mT), 0)
    of_right = _row(seen, small.inverse_lower(after.lower))
    rest_scale, rest_lower = term.root(future)
    # The precision of the state in units of its noise: from the noise before it, and
    # from the noise after it.
    ratio = term.transition(future) * scale[..., None, :] / rest_scale[..., None]
    ratio = small.product(small.inverse_lower(rest_lower), ratio)
    own = small.inverse_lower(lower)
    stiff = small.product(own.mT, own) + small.product(ratio.mT, ratio)
    left_over = scale[..., -1:] * small.inverse_cholesky(stiff)[..., -1]
    left_over = jnp.where((ends & off)[..., None], left_over, value)
    residual = jnp.square(left_over).sum(-1)
    moved = term.transition(past)[..., -1, :] * before.scale
    moved = jnp.where(begun[..., None], moved, 0)
    of_left = moved - _row(of_right, after.links)
    covered = scale * _row(value, lower.mT)
    return _Between(of_left, of_right, seen, covered, residual)


def _row(row: Array, matrix: Array) -> Array:
    """Return products of rows (..., d) and matrices (..., d, d)."""
    return small.product(row[..., None, :], matrix)[..., 0, :]


def _spread(waves: Array, weights: Array) -> Array:
    """Return weights (N, d) of all functions of a term, (N, waves d)."""
    whole = waves[..., :, None] * weights[..., None, :]
    return whole.reshape(*whole.shape[:-2], -1)
