# SPDX-License-Identifier: Apache-2.0
"""One pass of closed-form updates over all Gaussian blocks."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from functools import partial
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
from jax import Array, lax

from numpyro_gpaug.gaussians.base import centred, scatter, selected
from numpyro_gpaug.infer.vi.latent_gaussian import (
    Evaluation,
    LatentGaussian,
    Natural,
    Place,
)
from numpyro_gpaug.infer.vi.schedules import Schedule
from numpyro_gpaug.math.compiling import jit_for_few_runs
from numpyro_gpaug.model.arguments import Values
from numpyro_gpaug.model.latents import Structure

MAX_HALVINGS = 12
# Slopes resolve an increase this much better than bounds do.
FINER = 1 / 256
# A parabola is as high at the end of a step as at its start if it falls there as
# steeply as it rose here. A whole step is kept if it falls by at most this part.
FALLING = 0.8
# The rounding of bounds is estimated from the log-densities of data. Those of large
# counts are small differences of large terms, and may be rounded this much more.
# Derivatives alone then judge steps whose increase is below the estimate.
UNSEEN = 64


def backtracked_sweep(
    problem: Any,
    natural: Natural,
    evaluation: Evaluation,
    steps: dict[str, Array],
    largest_step: float,
    augmented: Array | None,
) -> tuple[Natural, Evaluation, dict[str, Array]]:
    """Update every block once, one at a time: joint updates of blocks that share a
    predictor overshoot. So do joint updates of coupled latents of one block.

    :param problem: the problem, a :class:`LatentGaussian` or its sum over blocks of
        rows, :class:`~numpyro_gpaug.infer.vi.passes.InBlocks`.
    :param natural: natural parameters of all blocks.
    :param evaluation: the evaluation there, or an
        :meth:`~LatentGaussian.unevaluated` one.
    :param steps: the first step size to try, by block.
    :param largest_step: upper limit of the next step sizes.
    :param augmented: whether factors come from the augmented bound; ``None`` if they
        never do.
    :return: natural parameters, the evaluation there, and next step sizes.
    """
    natural, steps = dict(natural), dict(steps)
    for name in natural:
        move = partial(backtracked_update, problem, name, augmented, largest_step)
        move_block = _for_each_latent if name in problem.coupled else _at_once
        start = natural, evaluation, steps[name]
        count = len(natural[name].potential)
        natural, evaluation, steps[name] = move_block(move, count, start)
    return natural, evaluation, steps


def damped_sweep(
    problem: LatentGaussian,
    natural: Natural,
    schedule: Schedule,
    schedules: dict[str, Any],
    step: Array,
    augmented: Array | None,
) -> tuple[Natural, dict[str, Any], Array, Array]:
    """Update every block once by the step size of a schedule, for noisy bounds.

    A step is halved while the bound of its own rows falls. Noise is not the reason for
    such a fall: a step lowers the bound that it was computed from only if it
    overshoots. With a rate ``exp(f)``, later steps could not recover from that.

    :param problem: the problem.
    :param natural: natural parameters of all blocks.
    :param schedule: the schedule.
    :param schedules: its state, by block.
    :param step: steps taken before.
    :param augmented: as for :func:`backtracked_sweep`.
    :return: natural parameters, states of the schedule, the bound before, and the
        largest step size taken.
    """
    problem = replace(problem, least_precision=0.0)
    evaluation = problem.evaluate(natural)
    before = evaluation.bound
    natural, schedules = dict(natural), dict(schedules)
    sizes = []

    def move(name: str, size: Array, index: Array, carry: Any) -> Any:
        natural, evaluation, largest = carry
        old = selected(natural, index)
        goal = problem.target(name, evaluation, augmented, index)
        new, evaluation, taken = _rising(
            problem, name, old, goal, size, evaluation, index
        )
        largest = jnp.maximum(largest, taken)
        return scatter(natural, index, new), evaluation, largest

    for name, known in natural.items():
        whole = problem.target(name, evaluation, augmented)
        old = centred(known, whole)
        direction = jax.tree.map(jnp.subtract, whole, old)
        size, schedules[name] = schedule.next(schedules[name], step, direction)
        if name in problem.coupled:
            natural[name], evaluation, taken = _for_each_latent(
                partial(move, name, size), len(old.potential),
                (old, evaluation, jnp.zeros_like(size)),
            )  # fmt: skip
        else:
            natural[name], evaluation, taken = _rising(
                problem, name, old, whole, size, evaluation
            )
        sizes.append(taken)
    return natural, schedules, before, jnp.stack(sizes).max()


def _rising(
    problem: LatentGaussian,
    name: str,
    old: Any,
    target: Any,
    size: Array,
    evaluation: Evaluation,
    index: Array | None = None,
) -> tuple[Any, Evaluation, Array]:
    """Take a step of one block, halved while the bound falls.

    :param problem: the problem.
    :param name: the name of the block.
    :param old: its natural parameters.
    :param target: the result of a whole step.
    :param size: the size of the first attempt.
    :param evaluation: the evaluation before.
    :param index: the one latent to update, (1,); ``None`` for all.
    :return: natural parameters, the evaluation there, and the size of the step; 0 if
        none raised the bound.
    """
    floor = evaluation.bound - evaluation.rounding

    def falls(search: Any) -> Array:
        tries, _, _, outcome = search
        return (tries <= MAX_HALVINGS) & ~(outcome.bound >= floor)

    def attempt(search: Any) -> Any:
        tries = search[0]
        halved = size * jnp.exp2(jnp.asarray(-tries, size.dtype))
        taken = jnp.where(tries == MAX_HALVINGS, 0, halved)
        candidate = mix(old, target, taken)
        outcome = problem.reevaluate(evaluation, name, candidate, index)
        return tries + 1, taken, candidate, outcome

    unknown = evaluation._replace(bound=jnp.full_like(evaluation.bound, jnp.nan))
    start = jnp.int32(0), size, old, unknown
    _, taken, new, outcome = lax.while_loop(falls, attempt, start)
    return new, outcome, taken


def _at_once(move: Callable[[Array | None, Any], Any], count: int, start: Any) -> Any:
    return move(None, start)


def _for_each_latent(move: Callable[[Array, Any], Any], count: int, start: Any) -> Any:
    return lax.fori_loop(0, count, lambda p, carry: move(p[None], carry), start)


@jit_for_few_runs
def mix(old: Any, target: Any, step: Array) -> Any:
    """Return the convex combination of natural parameters for a step of size
    ``step``."""
    return jax.tree.map(
        lambda a, b: jnp.asarray((1 - step) * a + step * b, a.dtype), old, target
    )


def starts_augmented(structure: Structure) -> bool:
    """Whether only the augmented bound makes a first step from far away safe: the model
    has one, and the exact factors may have negative precisions.

    :param structure: the structure of the model.
    """
    sites = [site for site in structure.observed if site.latents]
    return all(site.augmented for site in sites) and not all(
        site.log_concave for site in sites
    )


@jit_for_few_runs
def next_step(
    step: Array,
    tries: Array,
    largest_step: float,
    before: Array,
    after: Array,
    rounding: Array,
) -> Array:
    """Return the step size to try next. If the step was shortened, it is the size
    taken. Otherwise it is the size at which the derivative along the step would have
    vanished, between half and twice the size taken. A rising bound does not exclude
    overshooting: a step of almost twice the optimal size raises the bound by next to
    nothing, and so would the next one.

    :param step: the first size that was tried.
    :param tries: the number of attempts.
    :param largest_step: upper limit of the size.
    :param before: derivative of the bound along the step, at its start.
    :param after: the derivative at its end.
    :param rounding: the rounding error of bounds. Derivatives within that of slopes do
        not shorten the next step.
    """
    after = after + FINER * rounding
    halvings = jnp.where(tries == 1, 0, tries)
    falls = (before > 0) & (after < before)
    best = before / jnp.where(falls, before - after, 1)
    doublings = jnp.clip(jnp.rint(jnp.log2(jnp.maximum(best, 0.1))), -1, 1)
    factor = jnp.where((tries == 1) & falls, jnp.exp2(doublings), 2)
    grown = factor * step * jnp.exp2(jnp.asarray(-halvings, step.dtype))
    return jnp.clip(grown.astype(step.dtype), 2.0**-MAX_HALVINGS, largest_step)


def took_whole_step(before: Values, after: dict[str, Array]) -> Array:
    """Whether every block took a whole step at the first attempt.

    :param before: the first step sizes that were tried.
    :param after: from :func:`next_step`.
    """
    sizes = jnp.stack([*before.values(), *after.values()])
    return (sizes == 1).all()


def backtracked_update(
    problem: Any,
    name: str,
    augmented: Array | None,
    largest_step: float,
    index: Array | None,
    place: tuple[Natural, Evaluation, Array],
) -> tuple[Natural, Evaluation, Array]:
    """Move one block towards its target, and halve the step while the bound falls.

    :param problem: the problem.
    :param name: the block to move.
    :param augmented: as for :func:`backtracked_sweep`.
    :param largest_step: upper limit of the next step size.
    :param index: the one latent to update, (1,); ``None`` for all.
    :param place: natural parameters of all blocks, the evaluation there, and the first
        step size to try. If the evaluation is still to be computed, the first attempt
        changes nothing. (The same code does both, because compiling the bound twice
        would double the compile time.)
    :return: natural parameters and evaluation after the step (unchanged if no step
        raised the bound), and the next step size to try.
    """
    natural, evaluation, step = place

    def towards(search: _Search) -> tuple[Any, Any, Array, Place]:
        evaluation = search.evaluation
        target = problem.target(name, evaluation, augmented, index)
        floor = evaluation.bound - evaluation.slack
        origin = problem.place(name, evaluation)
        return centred(search.old, target), target, floor, origin

    def refused(search: _Search) -> Array:
        return ~search.accepted

    def attempt(search: _Search) -> _Search:
        tries, latest = search.tries, search.evaluation
        old, target, floor, origin = problem.loops.cond(
            tries == 0, lambda: towards(search),
            lambda: (search.old, search.target, search.floor, search.origin),
        )  # fmt: skip
        # The last attempt has size zero, and is accepted, because no bound exceeds NaN.
        last = (tries == MAX_HALVINGS) | ((tries == 0) & jnp.isnan(floor))
        size = jnp.where((tries < 0) | last, 0, step * halved(tries))
        candidate = mix(old, target, size)
        # If a precision is not positive definite, the bound is NaN and the step is
        # refused.
        outcome = problem.reevaluate(latest, name, candidate, index)
        slopes = problem.slopes_between(name, origin, problem.place(name, outcome))
        accepted = last | ((tries >= 0) & _rises(outcome, floor, *slopes))
        return _Search(
            tries + 1, accepted, old, target, floor, origin, slopes, candidate, outcome
        )

    def halved(tries: Array) -> Array:
        return jnp.exp2(jnp.asarray(-tries, step.dtype))

    bound, origin = evaluation.bound, problem.place(name, evaluation)
    tries = jnp.where(jnp.isneginf(bound), jnp.int32(-1), jnp.int32(0))
    old = selected(natural[name], index)
    flat = jnp.zeros_like(bound)
    start = _Search(
        tries, jnp.array(False), old, old, bound, origin, (flat, flat), old, evaluation
    )
    found = problem.loops.while_loop(refused, attempt, start)
    moved = scatter(natural[name], index, found.natural)
    rounding = found.evaluation.rounding
    size = next_step(step, found.tries, largest_step, *found.slopes, rounding)
    rise = found.evaluation.bound - found.floor - found.evaluation.slack
    return {**natural, name: moved}, found.evaluation._replace(rise=rise), size


def _rises(outcome: Evaluation, floor: Array, before: Array, after: Array) -> Array:
    """Whether a step has raised the bound. A decrease that may be rounding is judged by
    derivatives, which are much more accurate: the approximate Wolfe condition of Hager
    and Zhang (2005), A new conjugate gradient method with guaranteed descent and an
    efficient line search, equation 4.1.

    :param outcome: the evaluation at its end.
    :param floor: the smallest acceptable bound there, up to rounding.
    :param before: derivative of the bound along the step, at its start.
    :param after: the derivative at its end.
    """
    rounding = jnp.where(before < outcome.rounding, UNSEEN, 1) * outcome.rounding
    lowest = floor - (rounding - outcome.slack)
    steep = (before > 0) & (after >= -FALLING * before)
    return (outcome.bound >= floor) | (steep & (outcome.bound >= lowest))


class _Search(NamedTuple):
    tries: Array
    accepted: Array
    old: Any
    target: Any
    floor: Array
    origin: Place
    slopes: tuple[Array, Array]
    natural: Any
    evaluation: Evaluation
