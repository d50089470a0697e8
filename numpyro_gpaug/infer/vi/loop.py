# SPDX-License-Identifier: Apache-2.0
"""Compiled loops of steps, as pure functions of state and data."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Any

import jax
import jax.numpy as jnp
from jax import Array, lax, random

from numpyro_gpaug.infer.vi.epochs import drawn_batch
from numpyro_gpaug.infer.vi.plan import CHUNK, Plan
from numpyro_gpaug.infer.vi.resolution import lost
from numpyro_gpaug.infer.vi.start import read_params
from numpyro_gpaug.infer.vi.state import ConjugateState, unknown_bound
from numpyro_gpaug.infer.vi.stepper import Stepper
from numpyro_gpaug.infer.vi.stopping import counted, patience
from numpyro_gpaug.math.arrays import STATIC
from numpyro_gpaug.math.sharding import latents_apart
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
        evaluation = () if problem is None else problem.unevaluated(state.natural)
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
        new = new._replace(natural=latents_apart(new.natural))
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
        return self.arguments._replace(arrays=arrays)


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
        new = new._replace(step=state.step + 1, natural=latents_apart(new.natural))
        fine = all_valid(plan.model, plan.structure, here)
        return new, losses.at[i].set(-new.bound), valid.at[i].set(fine)

    start = state, jnp.zeros((CHUNK,), state.bound.dtype), jnp.ones((CHUNK,), bool)
    return lax.fori_loop(0, num_steps, body, start)


def evaluate(state: ConjugateState, arguments: Arguments, plan: Plan) -> Array:
    """Return the loss of a state on the data in the arguments."""
    stepper = Stepper(plan, arguments)
    return -stepper.evaluate(state, stepper.key(state), {}).bound


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
