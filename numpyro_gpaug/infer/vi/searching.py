# SPDX-License-Identifier: Apache-2.0
"""What a search makes of the collapsed bound where it was proposed to go."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, NamedTuple

import jax.numpy as jnp
from jax import Array, lax
from jax.flatten_util import ravel_pytree

from numpyro_gpaug.infer.vi import quasi_newton
from numpyro_gpaug.infer.vi.evaluation import relative_rounding
from numpyro_gpaug.infer.vi.hyper import Hyper
from numpyro_gpaug.infer.vi.latent_gaussian import Natural
from numpyro_gpaug.infer.vi.putting_back import HIGHER
from numpyro_gpaug.infer.vi.state import ConjugateState, flagged, unknown_bound

# The part of a bound by which two of one fit, at the same hyperparameters, may differ.
LARGEST_NOISE = 0.01


class Collapsed(NamedTuple):
    """The Gaussian blocks at their optimum for some hyperparameters.

    :param natural: natural parameters.
    :param step_sizes: to be tried next, by block.
    :param bound: there.
    :param rounding: how far it may seem to fall by rounding alone.
    :param unresolved: see :class:`~numpyro_gpaug.infer.vi.quasi_newton.Search`.
    :param unreached: see :class:`~numpyro_gpaug.infer.vi.state.ConjugateState`.
    """

    natural: Natural
    step_sizes: dict[str, Array]
    bound: Array
    rounding: Array
    unresolved: Array
    unreached: dict[str, Array]


def goes_on(state: ConjugateState, at: Collapsed) -> Array:
    """Whether the search goes on from there: the bound has risen enough, is the
    first, or that of the best number put back.

    :param state: before the pending update.
    :param at: its end.
    """
    enough = quasi_newton.accepts(
        state.hyper, state.bound, at.bound, at.rounding, at.unresolved
    )
    back = state.hyper.optim_state.back
    return _is_first(state) | back.leads | (enough & ~back.tries)


def searched(
    state: ConjugateState,
    values: dict[str, Any],
    at: Collapsed,
    gradient: Callable[[], dict[str, Any]],
    closed: Callable[[dict[str, Any]], dict[str, Any]],
) -> ConjugateState:
    """The state after a step of a search.

    :param state: before the pending update.
    :param values: unconstrained params at its end.
    :param at: the end.
    :param gradient: of the bound there; not asked for where the bound did not rise.
    :param closed: from the gradient, updates of params that are set in closed form.
    """
    best, bound, rounding = state.bound, at.bound, at.rounding

    def on() -> Hyper:
        ascent = gradient()
        hyper = quasi_newton.accepted(state.hyper, values, ascent, _is_first(state))
        return hyper._replace(update=hyper.update | closed(ascent))

    def tried() -> Hyper:
        search = state.hyper.optim_state
        back = search.back.after(bound - rounding - at.unresolved)
        return state.hyper._replace(optim_state=search._replace(back=back))

    def back() -> Hyper:
        largest = LARGEST_NOISE / relative_rounding(bound.dtype) * rounding
        return quasi_newton.refused(state.hyper, best, bound, rounding, largest)

    further = goes_on(state, at)
    tries = state.hyper.optim_state.back.tries
    hyper = lax.cond(further, on, lambda: lax.cond(tries, tried, back))

    def better() -> ConjugateState:
        return state._replace(
            hyper=quasi_newton.improved(hyper, values, at.unresolved),
            natural=at.natural, step_sizes=at.step_sizes, bound=bound,
            unreached=at.unreached,
        )  # fmt: skip

    # A first bound of NaN is shown.
    rose = further & ~(bound < best)
    new = lax.cond(rose, better, lambda: state._replace(hyper=hyper))
    return flagged(new, hyper)


def at_end(state: ConjugateState, tol: Any, scales: Any) -> ConjugateState:
    """A state after a step, which knows whether the search is over; numbers are to be
    put back where it is at an end that has not been looked at.

    :param state: after a step.
    :param tol: in nats, see :func:`~numpyro_gpaug.infer.vi.loop.run_chunk`.
    :param scales: which numbers are on a scale, flat.
    """
    search = state.hyper.optim_state
    best, _ = ravel_pytree(state.hyper.values)
    rests = state.stalled >= quasi_newton.patience(state.hyper, tol)
    unknown = jnp.maximum(search.noise, search.unresolved)
    clear = jnp.maximum(HIGHER, tol) + unknown
    back = search.back.at_end(best, scales, state.bound, clear, (tol > 0) & rests)
    search = search._replace(back=back)
    return state._replace(hyper=state.hyper._replace(optim_state=search))


def _is_first(state: ConjugateState) -> Array:
    return state.bound <= unknown_bound(state.bound.dtype)
