# SPDX-License-Identifier: Apache-2.0
r"""The best means of a Gaussian with a fixed covariance.

Where a factorisation takes much longer than a solve, updates that change means and
covariance at once are wasteful: most of them are needed by the means. Here these are
found first, by conjugate gradients with the known covariance S as preconditioner. The
gradient ``g`` of the bound promises the increase ``g' S g / 2``. What is left is the
change of the covariance.

Polak and Ribiere (1969), Note sur la convergence de methodes de directions conjuguees;
Nocedal and Wright (2006), Numerical optimization, section 5.2.
"""

from __future__ import annotations

from collections.abc import Callable
from functools import partial
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
from jax import Array, lax

from numpyro_gpaug.gaussians.base import GaussianFactors, centre_of
from numpyro_gpaug.gaussians.pairs import slope_changes
from numpyro_gpaug.infer.vi.latent_gaussian import Evaluation, LatentGaussian, Natural

# The largest numbers of directions and of attempts along each, and the part of the
# slope that may remain at the end of a line search.
MOST, TRIES, LEFT = 40, 14, 0.2
# The number of directions without half of the promise that ends the search.
PATIENCE = 4
# The search ends when the means promise less than this part of what the covariance
# promises.
SHARE = 0.01
# The largest number of updates of predictors as if they were independent, the largest
# move in one of them, in standard deviations of the prior, and the largest one that
# ends them, in standard deviations.
ALONE, FAR, NEAR = 12, 1.5, 0.2


class _Point(NamedTuple):
    """Means, and the derivatives there.

    :param mean: means of the latents, (1, size).
    :param rows: means of the predictors, (1, n).
    :param slopes: derivatives of the expected log-likelihood in the marginals.
    """

    mean: Array
    rows: Array
    slopes: Any


class _Search(NamedTuple):
    """The state of conjugate gradients.

    :param taken: directions so far.
    :param point: the current means.
    :param ascent: the gradient of the bound, (1, size).
    :param step: S times the gradient.
    :param direction: the last direction, (1, size).
    :param promise: half of their product.
    :param least: the smallest promise so far.
    :param idle: directions since it has halved.
    """

    taken: Array
    point: _Point
    ascent: Array
    step: Array
    direction: Array
    promise: Array
    least: Array
    idle: Array


class Means:
    """The problem of one block with a fixed covariance.

    :param problem: the problem, with one block.
    :param name: the block.
    :param evaluation: an evaluation whose moments have the covariance.
    """

    def __init__(
        self, problem: LatentGaussian, name: str, evaluation: Evaluation
    ) -> None:
        self.problem, self.name, self.evaluation = problem, name, evaluation
        self._rows = partial(problem.rows, name)
        self._at: Any = evaluation.marginals[name]

    def best(
        self, tolerance: Array, rest: Callable[[Any], Array]
    ) -> tuple[Array, Array, Array]:
        """Return the best means, the increase in nats that a further step promises, and
        the increase that the first one promised.

        :param tolerance: the promise that ends the search.
        :param rest: the promise of the covariance, given derivatives of the expected
            log-likelihood: the search ends at a small part of it.
        """
        mean = self.evaluation.moments[self.name].mean
        start = self._point(mean, self._at.mean)
        ascent, step, promise = self._promised(start)
        first = _Search(
            jnp.int32(0), start, ascent, step, step, promise, promise, jnp.int32(0)
        )

        def going(search: _Search) -> Array:
            least = jnp.maximum(tolerance, SHARE * rest(search.point.slopes))
            enough = search.promise <= least
            tired = (search.taken >= MOST) | (search.idle >= PATIENCE)
            return ~(enough | tired | jnp.isnan(search.promise))

        found = lax.while_loop(going, self._next, first)
        return found.point.mean, found.promise, promise

    def moved(self, mean: Array) -> tuple[Evaluation, Array]:
        """Return the evaluation at other means, and whether the bound has not fallen;
        if it has, the evaluation is the old one."""
        old, name = self.evaluation, self.name
        q, problem = old.moments[name], self.problem
        pulled = problem.pull(name, mean) + problem.pull(name, q.mean)
        change = 0.5 * (pulled * (mean - q.mean)).sum(-1)
        at = self._at._replace(mean=problem.rows(name, mean))
        kl = {name: old.divergences[name] + change}
        new = problem._evaluation({name: q}, {name: at}, kl)
        better = new.bound >= old.bound - old.rounding
        # The factor of the covariance is left out, because it does not change.
        chosen = jax.tree.map(
            lambda a, b: jnp.where(better, a, b),
            new._replace(moments={}), old._replace(moments={}),
        )  # fmt: skip
        q = q._replace(mean=jnp.where(better, mean, q.mean))
        return chosen._replace(moments={name: q}), better

    def _point(self, mean: Array, rows: Array) -> _Point:
        at = {self.name: self._at._replace(mean=rows)}
        slopes = jax.grad(lambda at: self.problem.likelihood(at))(at)
        return _Point(mean, rows, slopes[self.name])

    def _promised(self, point: _Point) -> tuple[Array, Array, Array]:
        """Return the gradient of the bound, the step, and half of their product."""
        ascent = jax.vjp(self._rows, point.mean)[1](point.slopes.mean)[0]
        ascent = ascent - self.problem.pull(self.name, point.mean)
        step = self.problem.newton(self.evaluation, {self.name: ascent})[self.name]
        return ascent, step, 0.5 * (ascent * step).sum()

    def _next(self, search: _Search) -> _Search:
        """Take a step along one direction."""
        rising = (search.ascent * search.direction).sum() > 0
        direction = jnp.where(rising, search.direction, search.step)
        point = self._along(search.point, search.ascent, direction)
        ascent, step, promise = self._promised(point)
        turned = (ascent * (step - search.step)).sum()
        share = jnp.maximum(turned, 0) / (2 * search.promise)
        better = promise <= 0.5 * search.least
        return _Search(
            search.taken + 1, point, ascent, step, step + share * direction, promise,
            jnp.where(better, promise, search.least),
            jnp.where(better, 0, search.idle + 1),
        )  # fmt: skip

    def _along(self, point: _Point, ascent: Array, direction: Array) -> _Point:
        """Return the point along a direction where the slope of the bound has almost
        vanished."""
        name, problem = self.name, self.problem
        _, rows = jax.jvp(self._rows, (point.mean,), (direction,))
        pull = problem.pull(name, direction) - problem.pull(name, 0 * direction)
        pull = (pull * direction).sum()
        first = (ascent * direction).sum()

        def curvature(slopes: Any) -> Array:
            return pull - (rows * slope_changes(problem.maps[name], slopes, rows)).sum()

        def attempt(carry: Any) -> Any:
            tries, size, low, high, _, kept = carry
            at = point.rows + size * rows
            now = self._point(point.mean + size * direction, at)
            moved = (now.slopes.mean - point.slopes.mean) * rows
            slope = first + moved.sum() - size * pull
            done = jnp.abs(slope) <= LEFT * first
            rises = slope > 0
            low, high = jnp.where(rises, size, low), jnp.where(rises, high, size)
            kept = jax.tree.map(lambda a, b: jnp.where(rises | done, a, b), now, kept)
            # Newton's step, or half of the interval if the step leaves it or starts
            # where the bound falls steeply.
            next_ = size + slope / curvature(now.slopes)
            inside = (next_ > low) & (next_ < high) & (slope > -first)
            half = jnp.where(jnp.isinf(high), 4 * size, low + 0.25 * (high - low))
            return tries + 1, jnp.where(inside, next_, half), low, high, done, kept

        def going(carry: Any) -> Array:
            tries, _, _, _, done, _ = carry
            return (tries < TRIES) & ~done

        bend = curvature(point.slopes)
        size = first / jnp.where(bend > 0, bend, pull)
        zero, infinite = jnp.zeros_like(size), jnp.full_like(size, jnp.inf)
        start = jnp.int32(0), size, zero, infinite, jnp.array(False), point
        return lax.while_loop(going, attempt, start)[-1]


def solved(problem: LatentGaussian, natural: Natural) -> tuple[Natural, Evaluation]:
    """Return the optimum of a problem that is quadratic, and the evaluation there.

    Factors do not depend on the means, so that those at the prior's means define the
    optimum. It is factorised once: rounding errors of its means, which are those of
    their distance from the prior, are removed by a Newton step with the same factor.
    Without such steps (:meth:`LatentGaussian.corrections`) the means start at the old
    ones.

    :param problem: the problem.
    :param natural: any natural parameters.
    """
    ((name, old),) = natural.items()
    prior = problem.priors[name]
    if problem.correlated:
        q = old.moments()
        start, centre = q.mean, centre_of(prior, q)
    else:
        start = centre = prior.loc
    at = problem.given(name, start)
    slopes = jax.grad(lambda at: problem.likelihood({name: at}))(at)
    found = problem.aim(name, centre, at, slopes)
    evaluation = problem.evaluate({name: found})
    for step in problem.corrections(evaluation).values():
        before = evaluation.moments[name].mean
        evaluation, _ = Means(problem, name, evaluation).moved(before + step)
        q = evaluation.moments[name]
        has_centre = found.centre is not None
        at = centre_of(prior, q) if has_centre else q.mean - before
        found = found.centred(at) if has_centre else found.moved(at)
    return {name: found}, evaluation


def remaining_increase(at: Any, slopes: Any, precision: Array) -> Array:
    r"""Return an upper bound of the increase in nats that the covariance promises.

    To second order an update of factors with the relative changes D of their precisions
    w promises ``tr(D B D B) / 4`` with ``B = w^(1/2) S w^(1/2)`` for the covariance S
    of the predictors. This is at most ``sum D^2 w v / 4``, as no eigenvalue of B
    exceeds one.

    :param at: marginals of the predictors.
    :param slopes: derivatives of the expected log-likelihood there.
    :param precision: the precisions of the factors behind the covariance.
    """
    new = -2 * slopes.variance
    most = jnp.maximum(jnp.abs(new), jnp.abs(precision))
    most = jnp.maximum(most, jnp.finfo(most.dtype).tiny)
    return 0.25 * (at.variance * jnp.square(new - precision) / most).sum()


def resolved(at: Any, slopes: Any) -> Array:
    """Return what :func:`remaining_increase` is for changes of precisions that move
    gradients by little more than rounding.

    :param at: marginals of the predictors.
    :param slopes: derivatives of the expected log-likelihood there.
    """
    relative = 0.01 * float(jnp.finfo(at.mean.dtype).eps)
    return 0.25 * relative * (at.variance * 2 * jnp.abs(slopes.variance)).sum()


def by_rows(problem: LatentGaussian, name: str) -> GaussianFactors:
    """Return the factors of predictors as if these were independent, each with its mean
    as a prior and a variance of one: where a search starts without any others.

    :param problem: the problem.
    :param name: the block.
    """
    map_: Any = problem.maps[name]

    def slopes_at(mean: Array, variance: Array) -> Any:
        at = {name: map_.given(problem.priors[name].loc)}
        at[name] = at[name]._replace(mean=mean, variance=map_.residual + variance)
        return jax.grad(lambda at: problem.likelihood(at))(at)[name]

    def update(carry: Any) -> Any:
        number, mean, before, _ = carry
        slopes = slopes_at(mean, before)
        variance = 1 / (1 + jnp.maximum(-2 * slopes.variance, 0))
        step = variance * (slopes.mean - (mean - map_.offset))
        step = jnp.clip(step, -FAR, FAR)
        good = jnp.isfinite(step) & jnp.isfinite(variance)
        step, variance = jnp.where(good, step, 0), jnp.where(good, variance, before)
        return number + 1, mean + step, variance, jnp.square(step) > NEAR**2 * variance

    def going(carry: Any) -> Array:
        number, _, _, moves = carry
        return (number < ALONE) & moves.any()

    ones = jnp.ones_like(map_.offset)
    start = jnp.int32(0), map_.offset, ones, ones > 0
    _, mean, variance, moves = lax.while_loop(going, update, start)
    slopes = slopes_at(mean, variance)
    precision = jnp.maximum(-2 * slopes.variance, 0)
    found = slopes.mean + precision * mean, precision
    # A convex term has no optimum alone, such as a factor for entries at a later time.
    good = jnp.isfinite(found[0]) & jnp.isfinite(precision)
    good &= ~(moves & (slopes.variance > 0))
    return GaussianFactors(
        jnp.where(good, found[0], map_.offset), jnp.where(good, precision, 1)
    )
