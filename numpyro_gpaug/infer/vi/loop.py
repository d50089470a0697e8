# SPDX-License-Identifier: Apache-2.0
"""Compiled loops of steps, as pure functions of state and data."""

from __future__ import annotations

from typing import Any

import jax.numpy as jnp
from jax import Array, lax

from numpyro_gpaug.infer.vi.plan import Plan, Settings, fingerprint
from numpyro_gpaug.infer.vi.stepper import Carry, ConjugateState, Stepper
from numpyro_gpaug.model.structure import Arguments

# Steps of one compiled loop.
CHUNK = 100


def run_chunk(
    settings: Settings,
    state: ConjugateState,
    num_steps: Array,
    tol: Array,
    arrays: tuple[Array, ...],
    plan: Plan,
    static: Any,
) -> tuple[ConjugateState, Array, Array]:
    """Up to ``num_steps`` (at most ``CHUNK``) steps in one compiled loop."""
    stepper = Stepper(plan, settings, Arguments(arrays, static))
    losses = jnp.full((CHUNK,), jnp.nan, state.bound.dtype)
    data = fingerprint(arrays)
    bound = jnp.where(state.data == data, state.bound, -jnp.inf)
    state = state._replace(stalled=jnp.int32(0), bound=bound, data=data)
    first = stepper.start(state)
    # The bound rests between two updates of the hyperparameters.
    patience = 3 * settings.hyper_every if stepper.learns else 3

    def going(carry: Any) -> Array:
        i, state, _, _ = carry
        return (i < num_steps) & ((tol <= 0) | (state.stalled < patience))

    def body(carry: Any) -> Any:
        i, state, evaluation, losses = carry
        new, evaluation = stepper.step(state, Carry(first.problem, evaluation))
        # A refused update leaves the bound where it is: no sign of an optimum.
        accepted = new.hyper.scale >= state.hyper.scale
        still = accepted & (jnp.abs(new.bound - state.bound) < tol)
        stalled = jnp.where(still, state.stalled + 1, 0)
        new = new._replace(stalled=stalled, step=state.step + 1)
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
    return -Stepper(plan, settings, Arguments(arrays, static)).evaluate(state).bound
