# SPDX-License-Identifier: Apache-2.0
"""Compiled loops of steps, as pure functions of state and data."""

from __future__ import annotations

from typing import Any

import jax
import jax.numpy as jnp
from jax import Array, lax, random

from numpyro_gpaug.infer.vi.epochs import first_epochs, next_batch
from numpyro_gpaug.infer.vi.plan import Plan, Settings
from numpyro_gpaug.infer.vi.state import ConjugateState, unknown_bound
from numpyro_gpaug.infer.vi.stepper import Carry, Stepper
from numpyro_gpaug.model.structure import Arguments

# Steps of one compiled loop.
CHUNK = 100
# Minibatches on which two states are compared.
BATCHES = 16


def copied(tree: Any) -> Any:
    """A copy, for whoever keeps a state: steps overwrite what they start from."""
    return jax.tree.map(jnp.copy, tree)


def run_chunk(
    settings: Settings,
    state: ConjugateState,
    num_steps: Array,
    tol: Array,
    data: Array,
    arrays: tuple[Array, ...],
    plan: Plan,
    static: Any,
) -> tuple[ConjugateState, Array, Array]:
    """Up to ``num_steps`` (at most ``CHUNK``) steps in one compiled loop.

    :param settings: options of the fit.
    :param state: where to start.
    :param num_steps: number of steps.
    :param tol: stop once the bound has not risen by as much for some steps; 0 for
        never.
    :param data: fingerprint of the data.
    :param arrays: array arguments of the model.
    :param plan: of the fit.
    :param static: the model's other arguments.
    :return: the state, losses (CHUNK,) and the number of steps taken.
    """
    stepper = Stepper(plan, settings, Arguments(arrays, static))
    losses = jnp.zeros((CHUNK,), state.bound.dtype)
    unknown = unknown_bound(state.bound.dtype)
    bound = jnp.where(state.data == data, state.bound, unknown)
    state = state._replace(bound=bound, data=data)
    first = stepper.start(state)

    def going(carry: Any) -> Array:
        i, state, _, _ = carry
        patience: Any = 3
        if stepper.searches:
            search = state.hyper.optim_state
            patience = jnp.where(search.noise > tol, 15, 5)
            patience = jnp.where(search.exhausted & (i > 0), 0, patience)
        elif stepper.learns:
            patience = jnp.maximum(40 * stepper.every, state.step // 5)
        return (i < num_steps) & ((tol <= 0) | (state.stalled < patience))

    def body(carry: Any) -> Any:
        i, state, evaluation, losses = carry
        new, evaluation = stepper.step(state, Carry(first.problem, evaluation))
        rose = new.bound >= state.mark + tol
        # A refused update says nothing: less of it follows, or another.
        tried = jnp.int32(new.hyper.scale >= state.hyper.scale)
        new = new._replace(
            mark=jnp.where(rose, new.bound, state.mark),
            stalled=jnp.where(rose, 0, state.stalled + tried), step=state.step + 1,
        )  # fmt: skip
        return i + 1, new, evaluation, losses.at[i].set(-new.bound)

    start = jnp.int32(0), state, first.evaluation, losses
    taken, state, _, losses = lax.while_loop(going, body, start)
    return state, losses, taken


def evaluate(
    settings: Settings,
    state: ConjugateState,
    arrays: tuple[Array, ...],
    plan: Plan,
    static: Any,
) -> Array:
    """The loss of a state on the data in ``arrays``."""
    stepper = Stepper(plan, settings, Arguments(arrays, static))
    return -stepper.evaluate(state, stepper.key(state), {}).bound


def bounds_of_batches(
    settings: Settings,
    state: ConjugateState,
    arrays: tuple[Array, ...],
    plan: Plan,
    static: Any,
) -> Array:
    """The bound of a state on minibatches that are the same for every state, with the
    same draws of other latents, (BATCHES,)."""
    stepper = Stepper(plan, settings, Arguments(arrays, static))

    def one(epochs: Any, key: Array) -> tuple[Any, Array]:
        indices, epochs = next_batch(plan.structure, epochs, key)
        return epochs, stepper.evaluate(state, key, indices).bound

    keys = random.split(random.key(0), BATCHES)
    return lax.scan(one, first_epochs(plan.structure), keys)[1]
