# SPDX-License-Identifier: Apache-2.0
"""One pass of closed-form updates over all Gaussian blocks."""

from __future__ import annotations

from collections.abc import Callable
from functools import partial
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
from jax import Array, lax

from numpyro_gpaug.infer.vi.schedules import Schedule
from numpyro_gpaug.infer.vi.sites import Evaluation, Natural, Sites, put_rows, rows_of
from numpyro_gpaug.math.linalg import NaturalGaussian

MAX_HALVINGS = 12


def backtracked_sweep(
    sites: Sites,
    natural: Natural,
    evaluation: Evaluation,
    steps: dict[str, Array],
    largest_step: float,
    augmented: Array | None,
    fresh: Array,
) -> tuple[Natural, Evaluation, dict[str, Array]]:
    """Moves every block once, one at a time: blocks that share a predictor overshoot
    when they move together. So do coupled latents of one block.

    :param sites: the problem.
    :param natural: natural parameters of all blocks.
    :param evaluation: the evaluation there.
    :param steps: the first step size tried, by block.
    :param largest_step: bound of the step sizes tried next time.
    :param augmented: whether sites are those of the augmented bound; ``None`` if never.
    :param fresh: whether ``evaluation`` is still to be computed; then a first pass
        over the blocks moves nothing.
    :return: natural parameters, the evaluation there, and next step sizes.
    """

    def move(name: str, only_evaluate: Array, row: Array | None, carry: Any) -> Any:
        natural, evaluation, step = carry
        gradients = partial(site_gradients, sites, evaluation, name, augmented)
        return backtracked_update(
            sites, natural, evaluation, name, gradients, step, largest_step,
            only_evaluate, row,
        )  # fmt: skip

    def sweep(carry: Any) -> Any:
        passes, natural, evaluation, steps = carry
        natural, steps = dict(natural), dict(steps)
        for name in natural:
            move_block = _for_each_latent if name in sites.coupled else _at_once
            natural, evaluation, steps[name] = move_block(
                partial(move, name, passes == 0), len(natural[name].potential),
                (natural, evaluation, steps[name]),
            )  # fmt: skip
        return passes + 1, natural, evaluation, steps

    if sites.coupled:
        # A pass would evaluate everything once per latent.
        evaluation = lax.cond(
            fresh, lambda: sites.evaluate(natural), lambda: evaluation
        )
        fresh = jnp.array(False)
    start = jnp.where(fresh, 0, 1), dict(natural), evaluation, dict(steps)
    return lax.while_loop(lambda carry: carry[0] < 2, sweep, start)[1:]


def damped_sweep(
    sites: Sites,
    natural: Natural,
    schedule: Schedule,
    schedules: dict[str, Any],
    step: Array,
    augmented: Array | None,
) -> tuple[Natural, dict[str, Any], Array]:
    """Moves every block once by the step size of a schedule, for bounds that are noisy.

    :param sites: the problem.
    :param natural: natural parameters of all blocks.
    :param schedule: the schedule.
    :param schedules: its state, by block.
    :param step: steps taken before.
    :param augmented: as for :func:`backtracked_sweep`.
    :return: natural parameters, states of the schedule, and the bound before.
    """
    evaluation = before = sites.evaluate(natural)
    natural, schedules = dict(natural), dict(schedules)

    def target(name: str, evaluation: Evaluation, row: Array | None) -> NaturalGaussian:
        gradients = site_gradients(sites, evaluation, name, augmented)
        at, slopes = rows_of((evaluation.marginals[name], gradients), row)
        return sites.of_row(name, row).target(name, at, slopes, least_precision=0.0)

    def move(name: str, size: Array, row: Array, carry: Any) -> Any:
        natural, evaluation = carry
        old = rows_of(natural, row)
        new = mix(old, target(name, evaluation, row), size)
        evaluation = sites.reevaluate(evaluation, name, new, row)
        return put_rows(natural, row, new), evaluation

    for name, old in natural.items():
        whole = target(name, evaluation, None)
        direction = jax.tree.map(jnp.subtract, whole, old)
        size, schedules[name] = schedule.next(schedules[name], step, direction)
        if name in sites.coupled:
            natural[name], evaluation = _for_each_latent(
                partial(move, name, size), len(old.potential), (old, evaluation)
            )
        else:
            natural[name] = mix(old, whole, size)
            evaluation = sites.reevaluate(evaluation, name, natural[name])
    return natural, schedules, before.bound


def _at_once(move: Callable[[Array | None, Any], Any], count: int, start: Any) -> Any:
    return move(None, start)


def _for_each_latent(move: Callable[[Array, Any], Any], count: int, start: Any) -> Any:
    return lax.fori_loop(0, count, lambda p, carry: move(p[None], carry), start)


def site_gradients(
    sites: Sites, evaluation: Evaluation, name: str, augmented: Array | None
) -> Any:
    """Derivatives of the expected log-likelihood that define a block's sites.

    :param sites: the problem.
    :param evaluation: where.
    :param name: the block.
    :param augmented: as for :func:`backtracked_sweep`.
    """
    exact = evaluation.gradients[name]
    if augmented is None:
        return exact
    other = jax.grad(lambda at: sites.log_likelihood(at, bound="augmented"))
    return lax.cond(augmented, lambda: other(evaluation.marginals)[name], lambda: exact)


def mix(old: NaturalGaussian, target: NaturalGaussian, step: Array) -> NaturalGaussian:
    """The convex combination of natural parameters a step of size ``step`` takes."""
    return jax.tree.map(
        lambda a, b: jnp.asarray((1 - step) * a + step * b, a.dtype), old, target
    )


def slack(evaluation: Evaluation) -> Array:
    """How far the bound may seem to fall by rounding alone."""
    return 32 * jnp.finfo(evaluation.bound.dtype).eps * evaluation.magnitude


def backtracked_update(
    sites: Sites,
    natural: Natural,
    evaluation: Evaluation,
    name: str,
    gradients: Callable[[], Any],
    step: Array,
    largest_step: float,
    only_evaluate: Array,
    row: Array | None = None,
) -> tuple[Natural, Evaluation, Array]:
    """Moves one block towards its target, halving the step while the bound falls.

    :param sites: the problem.
    :param natural: natural parameters of all blocks.
    :param evaluation: the evaluation there.
    :param name: the block to move.
    :param gradients: gives the site gradients of this block that define the target.
    :param step: the first step size tried.
    :param largest_step: bound of the step size tried next time.
    :param only_evaluate: take no step, but evaluate the block where it is. (The same
        code does both: compiling the bound twice would double the compile time.)
    :param row: the one latent to move, (1,); ``None`` for all.
    :return: natural parameters and evaluation after the move (unchanged if no step
        raised the bound), and the step size to try next time.
    """
    old = rows_of(natural[name], row)
    target = lax.cond(
        only_evaluate,
        lambda: old,
        lambda: sites.of_row(name, row).target(
            name, *rows_of((evaluation.marginals[name], gradients()), row)
        ),
    )
    floor = evaluation.bound - slack(evaluation)

    def refused(search: _Search) -> Array:
        return ~search.accepted

    def attempt(search: _Search) -> _Search:
        # The last attempt is no step at all, and is accepted.
        last = only_evaluate | (search.tries == MAX_HALVINGS)
        step = jnp.where(last, 0, search.step / 2)
        candidate = mix(old, target, step)
        # A precision that is not positive definite has a bound of NaN: refused.
        outcome = sites.reevaluate(evaluation, name, candidate, row)
        accepted = last | (outcome.bound >= floor)
        return _Search(step, search.tries + 1, accepted, candidate, outcome)

    start = _Search(2 * step, jnp.int32(0), jnp.array(False), old, evaluation)
    found = lax.while_loop(refused, attempt, start)
    grown = jnp.where(found.tries == 1, 2 * found.step, found.step)
    next_step = jnp.clip(grown, 2.0**-MAX_HALVINGS, largest_step)
    next_step = jnp.where(only_evaluate, step, next_step)
    moved = put_rows(natural[name], row, found.natural)
    return {**natural, name: moved}, found.evaluation, next_step


class _Search(NamedTuple):
    step: Array
    tries: Array
    accepted: Array
    natural: NaturalGaussian
    evaluation: Evaluation
