# SPDX-License-Identifier: Apache-2.0
"""The optimum of the Gaussian blocks at given hyperparameters.

Coordinate passes alone are slow with several latents. Each latent is updated as if the
others were fixed: by too much if the likelihood couples them (softmax: two classes that
compete), and by too little in directions on which the likelihood does not depend (the
sum of all). Anderson acceleration, a mixture of the last targets, corrects both and
costs one evaluation. If it would make the bound fall, a coordinate pass is taken
instead.

Where classes compete the targets contain Newton steps of all means together, with the
curvature of the softmax. Mixing would only disturb them.

Where a factorisation costs much more than a solve, each update finds the best means
first (:mod:`~numpyro_gpaug.infer.vi.means`), and the search ends where derivatives
promise no further increase, without another factorisation to see that there is none.

Reference: Walker and Ni (2011), Anderson acceleration for fixed-point iterations.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
from jax import Array
from jax.flatten_util import ravel_pytree

from numpyro_gpaug.infer.vi.latent_gaussian import Natural
from numpyro_gpaug.infer.vi.means import Means, remaining_increase, resolved
from numpyro_gpaug.infer.vi.sweeps import (
    FINER,
    MAX_HALVINGS,
    backtracked_sweep,
    mix,
    took_whole_step,
)
from numpyro_gpaug.math.compiling import jit_for_few_runs
from numpyro_gpaug.model.arguments import Values

# The largest number of updates of the blocks, and the increase in nats that ends those
# of a fit.
MAX_MOVES, SETTLED = 50, 1e-4
# The number of targets that are mixed, and the part of the residuals' norm that may be
# rounding.
MEMORY, RIDGE = 6, 1e-5

# Natural parameters, the evaluation there, and the next step sizes.
Place = tuple[Natural, Any, dict[str, Array]]


def settled(
    problem: Any,
    natural: Natural,
    steps: dict[str, Array],
    largest_step: float,
    augmented: Callable[[Array], Array | None],
    tolerance: float,
    precision: Array | None = None,
) -> Place:
    """Update the blocks until the bound no longer rises.

    :param problem: see :func:`~numpyro_gpaug.infer.vi.sweeps.backtracked_sweep`.
    :param natural: natural parameters of all blocks.
    :param steps: the first step size that a pass tries, by block.
    :param largest_step: upper limit of the next step sizes.
    :param augmented: given the number of updates before, as for
        :func:`~numpyro_gpaug.infer.vi.sweeps.backtracked_sweep`.
    :param tolerance: stop after a rise of less than this, in nats, unless rounding is
        larger.
    :param precision: the precisions of the factors in ``natural``, if it is the prior
        times factors, (1, n).
    :return: natural parameters, the evaluation there, whose ``rise`` is the total over
        all updates, and next step sizes.
    """
    if problem.solves and largest_step == 1:
        found = _settled_by_means(problem, natural, augmented, tolerance, precision)
        return *found, steps
    # Targets are mixed only if there are several latents, whose targets are computed
    # independently.
    several = sum(len(block.potential) for block in natural.values()) > 1

    def sweep(place: Place, moves: Array) -> Place:
        return backtracked_sweep(problem, *place, largest_step, augmented(moves))

    def going(carry: Any) -> Array:
        moves, (_, evaluation, _), rise, _, _ = carry
        largest = _least_seen if several else jnp.maximum
        least = largest(evaluation.rounding, tolerance)
        return (moves < MAX_MOVES) & (rise > least)

    def move(carry: Any) -> Any:
        moves, place, _, total, memory = carry
        first, before = moves == 0, place[1]
        if several:
            place, rise, memory = _mixed_or_swept(
                problem, place, memory, moves, sweep, augmented, tolerance
            )
            change = place[1].bound - before.bound
            total += jnp.where(first, 0, change)
            rise = jnp.where(first, change, rise)
        else:
            # The first update also evaluates its start, so a start near the optimum
            # takes one update.
            steps, place = place[2], sweep(place, moves)
            rise = place[1].rise
            total += rise
            # If no step was short enough, the next one is shorter.
            rise = jnp.where(_shrank(steps, place[2]), jnp.inf, rise)
            if problem.quadratic:
                rise = jnp.where(took_whole_step(steps, place[2]), 0, rise)
        return moves + 1, place, rise, total, memory

    unevaluated = problem.unevaluated(natural)
    bound = unevaluated.bound
    start = (
        jnp.int32(0), (natural, unevaluated, steps),
        jnp.full_like(bound, jnp.inf), jnp.zeros_like(bound),
        _Memory.empty(natural) if several and not problem.competes else (),
    )  # fmt: skip
    loop = problem.loops.while_loop
    _, (natural, evaluation, steps), _, total, _ = loop(going, move, start)
    return natural, evaluation._replace(rise=total), steps


class _Move(NamedTuple):
    """The state of :func:`_settled_by_means`.

    :param moves: evaluations so far.
    :param proposal: natural parameters to evaluate next.
    :param size: the size of the step from ``natural`` to ``target`` that they are.
    :param natural: the best natural parameters so far.
    :param evaluation: the evaluation there.
    :param target: the result of a whole step.
    :param precisions: precisions of the factors behind ``natural`` and ``target``.
    :param promise: the increase of the bound that a whole step promises.
    :param before: the promise before the last step.
    :param origin: the bound at the start.
    :param gained: the sum of all promises.
    """

    moves: Array
    proposal: Any
    size: Array
    natural: Any
    evaluation: Any
    target: Any
    precisions: tuple[Array, Array]
    promise: Array
    before: Array
    origin: Array
    gained: Array


def _settled_by_means(
    problem: Any,
    natural: Natural,
    augmented: Callable[[Array], Array | None],
    tolerance: float,
    precision: Array | None,
) -> tuple[Natural, Any]:
    """Update a single block, with the best means before each step; parameters as for
    :func:`settled`."""
    ((name, first),) = natural.items()
    unevaluated = problem.unevaluated(natural)
    unknown = jnp.full_like(unevaluated.marginals[name].mean, jnp.inf)
    given = unknown if precision is None else precision
    bound = unevaluated.bound
    infinite = jnp.full_like(bound, jnp.inf)

    def move(state: _Move) -> _Move:
        outcome = problem.evaluate({name: state.proposal})
        old = state.evaluation
        rose = outcome.bound >= old.bound - old.rounding
        precision, aim = state.precisions
        partial_ = (1 - state.size) * precision + state.size * aim
        precision = jnp.where(state.size == 1, aim, partial_)

        def accepted() -> _Move:
            means, at = Means(problem, name, outcome), outcome.marginals[name]
            # Infinite if the precisions are unknown.
            mean, left, promised = means.best(
                jnp.maximum(resolved(at, outcome.slopes[name]), tolerance),
                lambda slopes: jnp.nan_to_num(
                    remaining_increase(at, slopes, precision), nan=0.0, posinf=0.0
                ),
            )
            evaluation, better = means.moved(mean)
            step = evaluation.moments[name].mean - outcome.moments[name].mean
            kind = augmented(state.moves)
            slopes = problem.slopes_at(name, evaluation, kind)
            target, aim = problem.target(name, evaluation, kind), -2 * slopes.variance
            rest = remaining_increase(at, slopes, precision)
            rest = jnp.where(jnp.isnan(rest), jnp.inf, rest)
            whole = jnp.ones_like(state.size)
            origin = jnp.where(state.moves == 0, outcome.bound, state.origin)
            seen = state.gained + jnp.where(jnp.isinf(state.promise), 0, state.promise)
            return _Move(
                state.moves + 1, target, whole, state.proposal.moved(step), evaluation,
                target, (precision, aim), jnp.where(better, left, 0) + rest,
                state.promise, origin, seen + promised,
            )  # fmt: skip

        def refused() -> _Move:
            size = 0.5 * state.size
            return state._replace(
                moves=state.moves + 1, size=size,
                proposal=mix(state.natural, state.target, size),
            )  # fmt: skip

        return problem.loops.cond((state.moves == 0) | rose, accepted, refused)

    def going(state: _Move) -> Array:
        evaluation, promise = state.evaluation, state.promise
        at, slopes = evaluation.marginals[name], evaluation.slopes[name]
        least = jnp.maximum(resolved(at, slopes), tolerance)
        # A promise that does not fall is rounding.
        stays = (promise > 0.5 * state.before) & (promise < evaluation.rounding)
        short = state.size < 2.0**-MAX_HALVINGS
        return (state.moves < MAX_MOVES) & (promise > least) & ~(stays | short)

    one = jnp.ones_like(bound)
    start = _Move(
        jnp.int32(0), first, one, first, unevaluated, first, (given, given), infinite,
        infinite, bound, jnp.zeros_like(bound),
    )  # fmt: skip
    found = problem.loops.while_loop(going, move, start)
    evaluation = found.evaluation
    change = evaluation.bound - found.origin
    rise = jnp.where(change > evaluation.rounding, change, found.gained)
    return {name: found.natural}, evaluation._replace(rise=rise)


def _shrank(before: Values, after: dict[str, Array]) -> Array:
    """Whether some step size has reached the shortest one, where it stays."""
    # Between two powers of two, because exp2 rounds.
    least = 1.5 * 2.0**-MAX_HALVINGS
    pairs = [(before[name] > least) & (after[name] <= least) for name in after]
    return jnp.stack(pairs).any()


def _seen(problem: Any, before: Any, after: Any, names: Iterable[str]) -> Array:
    """Return the increase of the bound in an update, as accurately as it is known: a
    change within rounding is taken from the mean of the derivatives at both ends, times
    the length of the update, which equals it to second order.

    :param problem: the problem.
    :param before: the evaluation before the update.
    :param after: the evaluation after it.
    :param names: the names of all blocks.
    """
    along = jnp.zeros_like(after.bound)
    for name in names:
        ends = problem.place(name, before), problem.place(name, after)
        along += 0.5 * sum(problem.slopes_between(name, *ends))
    change = after.bound - before.bound
    return jnp.where(change > after.rounding, change, along)


def _least_seen(rounding: Array, tolerance: float) -> Array:
    """Return the rise that ends the updates, and the decrease that rejects an Anderson
    step. Mixing ends with many updates that each gain or lose little. In float32,
    bounds do not resolve these, and updates ended after a small decrease, nats below
    the optimum.

    :param rounding: the rounding error of bounds.
    :param tolerance: the tolerance in nats.
    """
    return jnp.maximum(FINER * rounding, tolerance)


class _Memory(NamedTuple):
    """The last targets of Anderson acceleration, in a ring buffer.

    :param targets: of all blocks, with a leading axis (MEMORY,).
    :param residuals: differences between targets and potentials, (MEMORY, numbers).
    :param known: the entries that are filled, (MEMORY,).
    """

    targets: Natural
    residuals: Array
    known: Array

    @classmethod
    def empty(cls, natural: Natural) -> _Memory:
        """Return an empty memory.

        :param natural: natural parameters of the same shapes.
        """
        targets = jax.tree.map(
            lambda x: jnp.zeros((MEMORY, *x.shape), x.dtype), natural
        )
        residual = _potentials(natural)
        residuals = jnp.zeros((MEMORY, *residual.shape), residual.dtype)
        return cls(targets, residuals, jnp.zeros(MEMORY, bool))


def _mixed_or_swept(
    problem: Any,
    place: Place,
    memory: Any,
    moves: Array,
    sweep: Callable[..., Place],
    augmented: Callable[[Array], Array | None],
    tolerance: float,
) -> tuple[Place, Array, Any]:
    """Take one update, and return its rise. The first one only evaluates, and has
    none."""
    natural, evaluation, steps = place
    before = jnp.maximum(moves - 1, 0)

    def mix() -> tuple[Natural, Any]:
        targets = problem.targets(evaluation, augmented(before))
        if problem.competes:
            return targets, memory
        return _mixed(memory, moves, targets, natural)

    cond = problem.loops.cond
    proposal, memory = cond(moves == 0, lambda: (natural, memory), mix)
    outcome = problem.evaluate(proposal)
    # This is false for a bound of NaN.
    rose = outcome.bound >= evaluation.bound - evaluation.rounding
    rise = _seen(problem, evaluation, outcome, natural)
    rose &= (moves == 0) | (rise >= -_least_seen(evaluation.rounding, tolerance))

    def swept() -> tuple[Place, Array]:
        place = sweep((natural, evaluation, steps), before)
        return place, _seen(problem, evaluation, place[1], natural)

    place, rise = cond(rose, lambda: ((proposal, outcome, steps), rise), swept)
    return place, rise, memory


@jit_for_few_runs
def _mixed(
    memory: _Memory, moves: Array, targets: Natural, natural: Natural
) -> tuple[Natural, _Memory]:
    """Return the combination of targets with the smallest combined residual, and the
    memory with the current target.

    :param memory: the memory of earlier targets.
    :param moves: the number of the update.
    :param targets: targets of all blocks.
    :param natural: natural parameters at which they were computed.
    """
    slot = moves % MEMORY
    residual = _potentials(jax.tree.map(jnp.subtract, targets, natural))
    changes = memory.residuals - residual
    sizes = jnp.linalg.norm(changes, axis=-1)
    used = memory.known & (sizes > 0)
    unit = jnp.where(used[:, None], changes / jnp.where(used, sizes, 1)[:, None], 0)
    gram = unit @ unit.T + jnp.diag(jnp.where(used, RIDGE, 1))
    weights = -jnp.linalg.solve(gram, unit @ residual) / jnp.where(used, sizes, 1)

    def combined(kept: Array, target: Array) -> Array:
        shares = jnp.asarray(weights, target.dtype)
        return target + jnp.tensordot(shares, kept - target, 1)

    mixture = jax.tree.map(combined, memory.targets, targets)
    kept = jax.tree.map(lambda k, t: k.at[slot].set(t), memory.targets, targets)
    residuals = memory.residuals.at[slot].set(residual)
    return mixture, _Memory(kept, residuals, memory.known.at[slot].set(True))


def _potentials(natural: Natural) -> Array:
    """Return the potentials, flat. Precisions are left out: they have many more
    numbers, and their residuals vanish together with those of the potentials."""
    return ravel_pytree([block.potential for block in natural.values()])[0]
