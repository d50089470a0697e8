# SPDX-License-Identifier: Apache-2.0
"""The step of a search after evaluating the collapsed bound at the proposed point."""

from __future__ import annotations

from typing import Any, NamedTuple

import jax.numpy as jnp
from jax import Array, lax

from numpyro_gpaug.infer.vi import quasi_newton
from numpyro_gpaug.infer.vi.evaluation import relative_rounding
from numpyro_gpaug.infer.vi.hyper import Hyper
from numpyro_gpaug.infer.vi.latent_gaussian import Natural
from numpyro_gpaug.infer.vi.state import ConjugateState, flagged, unknown_bound
from numpyro_gpaug.math.compiling import few

# The part of a bound by which two of one fit, at the same hyperparameters, may differ.
LARGEST_NOISE = 0.01


class Collapsed(NamedTuple):
    """The Gaussian blocks at their optimum for some hyperparameters.

    :param natural: natural parameters.
    :param step_sizes: step sizes to try next, by block.
    :param bound: the bound there.
    :param rounding: the largest decrease that rounding alone may cause.
    :param unresolved: see :class:`~numpyro_gpaug.infer.vi.quasi_newton.Search`.
    :param unreached: see :class:`~numpyro_gpaug.infer.vi.state.ConjugateState`.
    """

    natural: Natural
    step_sizes: dict[str, Array]
    bound: Array
    rounding: Array
    unresolved: Array
    unreached: dict[str, Array]


@few
def goes_on(state: ConjugateState, at: Collapsed) -> Array:
    """Return whether the search continues from the end of the pending update: the bound
    has risen enough, or is the first, or the first-order phase is not over.

    :param state: the state before the pending update.
    :param at: the optimum at its end.
    """
    enough = quasi_newton.accepts(
        state.hyper, state.bound, at.bound, at.rounding, at.unresolved
    )
    ascends = quasi_newton.ascends(state.hyper) & jnp.isfinite(at.bound)
    return _is_first(state) | ascends | enough


@few
def searched(
    state: ConjugateState,
    values: dict[str, Any],
    at: Collapsed,
    further: Array,
    ascent: dict[str, Any],
    closed: dict[str, Any],
) -> ConjugateState:
    """Return the state after a step of a search.

    :param state: the state before the pending update.
    :param values: unconstrained params at its end.
    :param at: the optimum there.
    :param further: from :func:`goes_on`.
    :param ascent: the gradient of the bound there, if the search continues.
    :param closed: updates of params that are set in closed form, likewise.
    """
    best, bound, rounding = state.bound, at.bound, at.rounding

    def on() -> Hyper:
        hyper = quasi_newton.accepted(
            state.hyper, values, ascent, _is_first(state), state.stalled
        )
        return hyper._replace(update=hyper.update | closed)

    def back() -> Hyper:
        largest = LARGEST_NOISE / relative_rounding(bound.dtype) * rounding
        return quasi_newton.refused(state.hyper, best, bound, rounding, largest)

    hyper = lax.cond(further, on, back)

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


def _is_first(state: ConjugateState) -> Array:
    return state.bound <= unknown_bound(state.bound.dtype)
