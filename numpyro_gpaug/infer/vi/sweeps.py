# SPDX-License-Identifier: Apache-2.0
"""One pass of closed-form updates over all Gaussian blocks."""

from __future__ import annotations

from collections.abc import Callable
from functools import partial
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
from jax import Array, lax

from numpyro_gpaug.infer.vi.latent_gaussian import Evaluation, LatentGaussian, Natural
from numpyro_gpaug.infer.vi.schedules import Schedule
from numpyro_gpaug.math.affine import Marginals, scatter, selected
from numpyro_gpaug.model.structure import Structure

MAX_HALVINGS = 12


def backtracked_sweep(
    problem: LatentGaussian,
    natural: Natural,
    evaluation: Evaluation,
    steps: dict[str, Array],
    largest_step: float,
    augmented: Array | None,
    fresh: Array,
) -> tuple[Natural, Evaluation, dict[str, Array]]:
    """Moves every block once, one at a time: blocks that share a predictor overshoot
    when they move together. So do coupled latents of one block.

    :param problem: the problem.
    :param natural: natural parameters of all blocks.
    :param evaluation: the evaluation there.
    :param steps: the first step size tried, by block.
    :param largest_step: bound of the step sizes tried next time.
    :param augmented: whether factors are those of the augmented bound; ``None`` if
        never.
    :param fresh: whether ``evaluation`` is an
        :meth:`~LatentGaussian.unevaluated` one.
    :return: natural parameters, the evaluation there, and next step sizes.
    """
    natural, steps = dict(natural), dict(steps)

    def move(name: str, index: Array | None, carry: Any) -> Any:
        natural, evaluation, step, fresh = carry
        moved = backtracked_update(
            problem, natural, evaluation, name, augmented, step, largest_step, fresh,
            index,
        )  # fmt: skip
        return *moved, jnp.array(False)

    for name in natural:
        move_block = _for_each_latent if name in problem.coupled else _at_once
        natural, evaluation, steps[name], fresh = move_block(
            partial(move, name), len(natural[name].potential),
            (natural, evaluation, steps[name], fresh),
        )  # fmt: skip
    return natural, evaluation, steps


def damped_sweep(
    problem: LatentGaussian,
    natural: Natural,
    schedule: Schedule,
    schedules: dict[str, Any],
    step: Array,
    augmented: Array | None,
) -> tuple[Natural, dict[str, Any], Evaluation, Array, Array]:
    """Moves every block once by the step size of a schedule, for bounds that are noisy.

    :param problem: the problem.
    :param natural: natural parameters of all blocks.
    :param schedule: the schedule.
    :param schedules: its state, by block.
    :param step: steps taken before.
    :param augmented: as for :func:`backtracked_sweep`.
    :return: natural parameters, states of the schedule, the evaluation there, the bound
        before, and the largest step size.
    """
    evaluation = problem.evaluate(natural)
    before = evaluation.bound
    natural, schedules = dict(natural), dict(schedules)
    sizes = []

    def target(name: str, evaluation: Evaluation, index: Array | None) -> Any:
        slopes = slopes_at(problem, evaluation, name, augmented)
        at = evaluation.moments[name], evaluation.marginals[name], slopes
        q, at, slopes = selected(at, index)
        return problem.of_latent(name, index).target(
            name, q, at, slopes, least_precision=0.0
        )

    def move(name: str, size: Array, index: Array, carry: Any) -> Any:
        natural, evaluation = carry
        old = selected(natural, index)
        new = mix(old, target(name, evaluation, index), size)
        evaluation = problem.reevaluate(evaluation, name, new, index)
        return scatter(natural, index, new), evaluation

    for name, old in natural.items():
        whole = target(name, evaluation, None)
        direction = jax.tree.map(jnp.subtract, whole, old)
        size, schedules[name] = schedule.next(schedules[name], step, direction)
        sizes.append(size)
        if name in problem.coupled:
            natural[name], evaluation = _for_each_latent(
                partial(move, name, size), len(old.potential), (old, evaluation)
            )
        else:
            natural[name] = mix(old, whole, size)
            evaluation = problem.reevaluate(evaluation, name, natural[name])
    return natural, schedules, evaluation, before, jnp.stack(sizes).max()


def _at_once(move: Callable[[Array | None, Any], Any], count: int, start: Any) -> Any:
    return move(None, start)


def _for_each_latent(move: Callable[[Array, Any], Any], count: int, start: Any) -> Any:
    return lax.fori_loop(0, count, lambda p, carry: move(p[None], carry), start)


def slopes_at(
    problem: LatentGaussian,
    evaluation: Evaluation,
    name: str,
    augmented: Array | None,
) -> Marginals:
    """Derivatives of the expected log-likelihood that define a block's factors.

    :param problem: the problem.
    :param evaluation: where.
    :param name: the block.
    :param augmented: as for :func:`backtracked_sweep`.
    """
    exact = evaluation.slopes[name]
    if augmented is None:
        return exact
    return lax.cond(
        augmented,
        lambda: problem.augmented_slopes(evaluation.marginals)[name],
        lambda: exact,
    )


def mix(old: Any, target: Any, step: Array) -> Any:
    """The convex combination of natural parameters a step of size ``step`` takes."""
    return jax.tree.map(
        lambda a, b: jnp.asarray((1 - step) * a + step * b, a.dtype), old, target
    )


def starts_augmented(structure: Structure) -> bool:
    """Whether a first step from far away is safe by the augmented bound alone: it has
    one, and the exact factors may have negative precisions.

    :param structure: of the model.
    """
    sites = [site for site in structure.observed if site.latents]
    return all(site.augmented for site in sites) and not all(
        site.log_concave for site in sites
    )


def slack(evaluation: Any) -> Array:
    """How far the bound may seem to fall by rounding alone.

    :param evaluation: with its ``bound`` and ``magnitude``.
    """
    return 32 * jnp.finfo(evaluation.bound.dtype).eps * evaluation.magnitude


def next_step(step: Array, tries: Array, largest_step: float) -> Array:
    """The step size to try next time: twice this one if it was the first tried, else
    that of the last attempt.

    :param step: the first tried.
    :param tries: how many.
    :param largest_step: bound of it.
    """
    halvings = jnp.where(tries == 1, 0, tries)
    grown = 2 * step * jnp.exp2(jnp.asarray(-halvings, step.dtype))
    return jnp.clip(grown, 2.0**-MAX_HALVINGS, largest_step)


def backtracked_update(
    problem: LatentGaussian,
    natural: Natural,
    evaluation: Evaluation,
    name: str,
    augmented: Array | None,
    step: Array,
    largest_step: float,
    fresh: Array,
    index: Array | None = None,
) -> tuple[Natural, Evaluation, Array]:
    """Moves one block towards its target, halving the step while the bound falls.

    :param problem: the problem.
    :param natural: natural parameters of all blocks.
    :param evaluation: the evaluation there.
    :param name: the block to move.
    :param augmented: as for :func:`backtracked_sweep`.
    :param step: the first step size tried.
    :param largest_step: bound of the step size tried next time.
    :param fresh: whether ``evaluation`` is still to be computed: a first attempt then
        moves nothing. (The same code does both: compiling the bound twice would double
        the compile time.)
    :param index: the one latent to move, (1,); ``None`` for all.
    :return: natural parameters and evaluation after the move (unchanged if no step
        raised the bound), and the step size to try next time.
    """
    old = selected(natural[name], index)

    def towards(evaluation: Evaluation) -> tuple[Any, Array]:
        slopes = slopes_at(problem, evaluation, name, augmented)
        at = evaluation.moments[name], evaluation.marginals[name], slopes
        target = problem.of_latent(name, index).target(name, *selected(at, index))
        return target, evaluation.bound - slack(evaluation)

    def refused(search: _Search) -> Array:
        return ~search.accepted

    def attempt(search: _Search) -> _Search:
        tries, latest = search.tries, search.evaluation
        target, floor = lax.cond(
            tries == 0, lambda: towards(latest), lambda: (search.target, search.floor)
        )
        # The last attempt is no step at all, and is accepted; nothing rises above NaN.
        last = (tries == MAX_HALVINGS) | ((tries == 0) & jnp.isnan(floor))
        size = jnp.where((tries < 0) | last, 0, step * halved(tries))
        candidate = mix(old, target, size)
        # A precision that is not positive definite has a bound of NaN: refused.
        outcome = problem.reevaluate(latest, name, candidate, index)
        accepted = last | ((tries >= 0) & (outcome.bound >= floor))
        return _Search(tries + 1, accepted, target, floor, candidate, outcome)

    def halved(tries: Array) -> Array:
        return jnp.exp2(jnp.asarray(-tries, step.dtype))

    tries = jnp.where(fresh, jnp.int32(-1), jnp.int32(0))
    start = _Search(tries, jnp.array(False), old, evaluation.bound, old, evaluation)
    found = lax.while_loop(refused, attempt, start)
    moved = scatter(natural[name], index, found.natural)
    size = next_step(step, found.tries, largest_step)
    rise = found.evaluation.bound - found.floor - slack(found.evaluation)
    return {**natural, name: moved}, found.evaluation._replace(rise=rise), size


class _Search(NamedTuple):
    tries: Array
    accepted: Array
    target: Any
    floor: Array
    natural: Any
    evaluation: Evaluation
