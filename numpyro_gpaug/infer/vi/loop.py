# SPDX-License-Identifier: Apache-2.0
"""Compiled loops of steps, as pure functions of state and data, and when they stop: the
bound has not risen by the tolerance for some steps, or on minibatches, the mean loss
has not changed by it from one epoch to the next."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax import Array, lax, random

from numpyro_gpaug.infer.vi import quasi_newton
from numpyro_gpaug.infer.vi.epochs import drawn_batch, epoch_length
from numpyro_gpaug.infer.vi.latent_gaussian import Evaluation
from numpyro_gpaug.infer.vi.plan import CHUNK, Plan
from numpyro_gpaug.infer.vi.quasi_newton import Search
from numpyro_gpaug.infer.vi.resolution import lost
from numpyro_gpaug.infer.vi.start import read_params
from numpyro_gpaug.infer.vi.state import ConjugateState, unknown_bound
from numpyro_gpaug.infer.vi.stepper import Stepper
from numpyro_gpaug.infer.vi.sweeps import took_whole_step
from numpyro_gpaug.math.arrays import STATIC
from numpyro_gpaug.math.sharding import latents_on_devices
from numpyro_gpaug.model.arguments import Arguments
from numpyro_gpaug.model.observations import all_valid

# The number of minibatches on which two states are compared.
BATCHES = 16


def copied(tree: Any) -> Any:
    """Return a copy of a state that is to be kept: steps overwrite the state that they
    start from."""
    return jax.tree.map(jnp.copy, tree)


def run_chunk(
    state: ConjugateState,
    num_steps: Array,
    tol: Array,
    data: Array,
    arguments: Arguments,
    plan: Plan,
) -> tuple[ConjugateState, Array, Array, dict[str, Any]]:
    """Take up to ``num_steps`` (at most ``CHUNK``) steps in one compiled loop.

    :param state: the state to start from.
    :param num_steps: number of steps.
    :param tol: stop once the bound has not risen by ``tol`` for some steps; 0 for
        never.
    :param data: fingerprint of the data.
    :param arguments: the model's arguments.
    :param plan: the plan of the fit.
    :return: the state, losses (CHUNK,), the number of steps taken, and constrained
        params.
    """
    stepper = Stepper(plan, arguments)
    state, losses, taken, *_ = stepped(stepper, state, num_steps, tol, data)
    params = read_params(plan.guide, state.hyper.values, state.natural)
    return state, losses, taken, params


def stepped(
    stepper: Stepper,
    state: ConjugateState,
    num_steps: Any,
    tol: Any,
    data: Any,
    problem: Any = None,
    evaluation: Any = None,
) -> tuple[ConjugateState, Array, Array, Any, Any]:
    """Take steps until they are taken, or the bound no longer rises. Parameters are
    those of :func:`run_chunk`.

    :param stepper: takes the steps.
    :param problem: the problem of all steps, if it is fixed and known.
    :param evaluation: the evaluation of it at the state.
    :return: the state, the last losses (CHUNK,), the number of steps taken, and the
        last two.
    """
    bound = jnp.full_like(state.bound, unknown_bound(state.bound.dtype))
    if stepper.plan.learns:  # otherwise no step depends on the last bound
        known = (state.data == data) & ~jnp.isnan(state.bound)
        bound = jnp.where(known, state.bound, bound)
    state = state._replace(bound=bound, data=jnp.asarray(data))
    if problem is None:
        problem = stepper.fixed(state)
        evaluation = ()
        if problem is not None:
            state = state._replace(natural=problem.rebased(state.natural))
            evaluation = problem.unevaluated(state.natural)
    exact = problem is not None and problem.quadratic

    def going(carry: Any) -> Array:
        i, state, _, _ = carry
        rises = (tol <= 0) | (state.stalled < patience(stepper.plan, state, tol))
        # After a bound of NaN no step is accepted.
        return (i < num_steps) & rises & ~jnp.isnan(state.bound)

    def body(carry: Any) -> Any:
        i, state, before, losses = carry
        new, evaluation = stepper.step(state, problem, before)
        new = counted(state, new, tol, before, evaluation, exact=exact)
        new = new._replace(natural=latents_on_devices(new.natural))
        noted = losses.at[i % CHUNK].set(
            -new.bound, mode="promise_in_bounds", wrap_negative_indices=False
        )
        return i + 1, new, evaluation, noted

    losses = jnp.zeros((CHUNK,), state.bound.dtype)
    start = jnp.int32(0), state, evaluation, losses
    loop = stepper.loops.while_loop
    taken, state, evaluation, losses = loop(going, body, start)
    if problem is not None:
        state = state._replace(unreached=problem.shares_unreached)
    if not (stepper.plan.noisy or stepper.knows_lost):
        state = state._replace(lost=lost(state.natural))
    return state, losses, taken, problem, evaluation


@jax.tree_util.register_dataclass
@dataclass(frozen=True)
class Stacked:
    """Arguments with several batches.

    :param arguments: the model's arguments; arrays of batches have a leading axis over
        the batches.
    :param which: the arrays that belong to batches.
    """

    arguments: Arguments
    which: tuple[bool, ...] = field(metadata=STATIC)

    def one(self, i: Any) -> Arguments:
        """Return the arguments with one of the batches, by its number."""
        pairs = zip(self.arguments.arrays, self.which, strict=True)
        arrays = tuple(x[i] if of else x for x, of in pairs)
        return Arguments(arrays, self.arguments.static)


def run_batches(
    state: ConjugateState, num_steps: Array, data: Array, batches: Stacked, plan: Plan
) -> tuple[ConjugateState, Array, Array]:
    """Take one step on each of the batches that are passed in, in one compiled loop.

    :param state: the state to start from.
    :param num_steps: number of steps, and of valid entries in the stack of batches.
    :param data: fingerprint of the data.
    :param batches: the batches.
    :param plan: the plan of the fit at one batch.
    :return: the state, losses, and whether each batch is valid; the first ``num_steps``
        entries count.
    """
    state = state._replace(data=data)

    def body(i: Array, carry: Any) -> Any:
        state, losses, valid = carry
        here = batches.one(i)
        new, _ = Stepper(plan, here).step(state)
        new = new._replace(step=state.step + 1, natural=latents_on_devices(new.natural))
        fine = all_valid(plan.model, plan.structure, here)
        return new, losses.at[i].set(-new.bound), valid.at[i].set(fine)

    start = state, jnp.zeros((CHUNK,), state.bound.dtype), jnp.ones((CHUNK,), bool)
    return lax.fori_loop(0, num_steps, body, start)


def evaluate(state: ConjugateState, arguments: Arguments, plan: Plan) -> Array:
    """Return the loss of a state on the data in the arguments."""
    stepper = Stepper(plan, arguments)
    return -stepper.evaluate(state, stepper.key(state), {}).bound


def bound_ahead(state: ConjugateState, arguments: Arguments, plan: Plan) -> Array:
    """Return the bound a whole step after a state."""
    stepper = Stepper(plan, arguments)
    problem = stepper.problem(state.hyper.values, stepper.key(state), {})
    here = problem.evaluate(problem.rebased(state.natural))
    return problem.evaluate(problem.targets(here, None)).bound


def bounds_of_batches(
    state: ConjugateState, given: Arguments | Stacked, plan: Plan
) -> Array:
    """Return the bounds of a state on fixed minibatches, with fixed draws of other
    latents, (BATCHES,).

    :param given: the model's arguments, or batches that are passed in.
    """

    def one(each: tuple[Array, Array]) -> Array:
        i, key = each
        here = given.one(i) if isinstance(given, Stacked) else given
        indices = drawn_batch(plan.structure, key, plan.passed)
        return Stepper(plan, here).evaluate(state, key, indices).bound

    each = jnp.arange(BATCHES), random.split(random.key(0), BATCHES)
    return lax.map(one, each)


# The increase of the bound in nats below which a search ends if no tol is given.
LEAST_RISE = 1e-3
# A step whose increase is below the tolerance has several points, and this sum of
# points ends a run with fixed hyperparameters. After a larger increase, one whole step
# ends the run if its increase is below this part of the previous one, because the
# increases shrink at least geometrically.
PATIENCE, POINTS, SHORT = 12, 4, 0.25
# An increase counts from this number of units in the last place of the bound on. If the
# tolerance is smaller, steps that still move marginals have only one point.
SHOWN = 2


class Stop:
    """The tolerance of a run.

    :param plan: the plan of the fit.
    :param tol: see :meth:`numpyro_gpaug.ConjugateSVI.run`.
    :ivar tol: the tolerance of single steps in nats; 0 if their bounds are noisy, and
        for a run that does not stop.
    """

    def __init__(self, plan: Plan, tol: float | None) -> None:
        if tol is None and plan.searches:
            tol = LEAST_RISE
        self._noisy_tol = tol if plan.noisy else None
        self.tol = np.asarray(0 if tol is None or plan.noisy else tol, plan.dtype)
        # Without minibatches, losses are noisy only if samples are drawn.
        batches = bool(plan.structure.subsampled)
        self._epoch = epoch_length(plan.structure) if batches else CHUNK

    def settled(self, losses: list[np.ndarray]) -> bool:
        """Whether the mean of noisy losses over the last whole epoch has changed by
        less than the tolerance.

        :param losses: losses of all steps.
        """
        taken, epoch = np.concatenate(losses), self._epoch
        if self._noisy_tol is None or len(taken) < 2 * epoch or len(taken) % CHUNK:
            return False
        last, before = taken[-epoch:].mean(), taken[-2 * epoch : -epoch].mean()
        return bool(abs(last - before) < self._noisy_tol)


def patience(plan: Plan, state: ConjugateState, tol: Any) -> Any:
    """Return the number of stalled steps, or of their points, that end a run.

    :param plan: the plan of the fit.
    :param state: the state after a step.
    :param tol: see :class:`Stop`.
    """
    if plan.searches:
        return quasi_newton.patience(state.hyper, tol)
    if plan.learns:
        return jnp.maximum(40 * plan.settings.every, state.step // 5)
    return PATIENCE


def counted(
    state: ConjugateState,
    new: ConjugateState,
    tol: Any,
    before: Any,
    after: Any,
    *,
    exact: bool,
) -> ConjugateState:
    """Return the state after a step, with its counters, and whether the bound has risen
    by ``tol``.

    :param state: the state before.
    :param new: the state after.
    :param tol: see :class:`Stop`.
    :param before: the evaluation before, if hyperparameters are fixed.
    :param after: the evaluation after, likewise.
    :param exact: whether a whole step, at fixed hyperparameters, leads to the optimum.
    """
    # Not ``mark + tol``, which may equal the mark if the bound is large.
    rose = new.bound - state.mark >= tol
    if isinstance(state.hyper.optim_state, Search):
        rose |= quasi_newton.begins(state.hyper)
    # A refused update gives no information: a part of it follows, or another one.
    rests = new.hyper is state.hyper
    tried: Any = jnp.int32(new.hyper.scale >= state.hyper.scale)
    if rests:
        # An increase within rounding does not count, but then marginals show more. They
        # also detect a step from one side of the maximum to the other.
        shown = SHOWN * jnp.finfo(new.bound.dtype).eps * jnp.abs(new.bound)
        moves = _moves(before, after, tol)
        unseen = moves & (SHORT * tol < shown)
        short = new.bound - state.bound < jnp.maximum(SHORT * tol, shown)
        whole = took_whole_step(state.step_sizes, new.step_sizes)
        ends = short & (state.stalled == 0) & whole & jnp.logical_not(moves)
        tried = jnp.where(ends, PATIENCE, jnp.where(unseen, 1, POINTS))
    stalled = jnp.where(rose, 0, state.stalled + tried)
    if rests and exact:
        stalled = jnp.where(whole, PATIENCE, stalled)
    mark = jnp.where(rose, new.bound, state.mark)
    return new._replace(mark=mark, stalled=stalled, step=state.step + 1)


def _moves(before: Any, after: Any, tol: Array) -> Any:
    """Whether a step has changed any marginal by ``tol`` nats, from evaluations; False
    if they do not keep numbers by row."""
    if not isinstance(after, Evaluation):
        return False

    def moves(old: Any, new: Any, slopes: Any) -> Array:
        # Rows with weight zero do not count.
        seen = (slopes.mean != 0) | (slopes.variance != 0)
        far = jnp.square(new.mean - old.mean) > 2 * tol * new.variance
        return (far & seen).any()

    at, slopes = after.marginals, after.slopes
    return jnp.stack([moves(before.marginals[k], at[k], slopes[k]) for k in at]).any()
