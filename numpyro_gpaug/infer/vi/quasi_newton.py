# SPDX-License-Identifier: Apache-2.0
"""Learning without a learning rate: L-BFGS on the collapsed bound.

The collapsed bound is the bound at its optimum over the Gaussian blocks, a function of
the hyperparameters alone. By the envelope theorem its gradient is the gradient of the
bound with fixed blocks, except for means, which follow their optimum. One step of a fit
is one evaluation, at the end of the pending update:

- The bound has not risen enough (Armijo): take less of the update, by a parabola
  through the known values.
- The bound rises as steeply as before (Wolfe): continue, twice as far.
- Otherwise: take the next direction, with the curvature between these two points. It is
  positive, so the direction ascends.

If hundreds of numbers without a natural scale are learnt, a first-order phase comes
first (:mod:`~numpyro_gpaug.infer.vi.first_order`).

Rounding makes bounds noisy, and the search continues if the bound fell by no more than
the noise. The current point is therefore not always the best one. A fit keeps the best
point, and measures decreases from the highest bound, because they would add up
otherwise. Of two points whose bounds differ by rounding, the slopes between them show
which one is better.

References: Nocedal and Wright (2006), Numerical Optimization, sections 3.1, 3.5, 7.2;
Xie, Byrd and Nocedal (2020), Analysis of the BFGS method with errors.
"""

from __future__ import annotations

import warnings
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
from jax import Array, lax

from numpyro_gpaug.infer.vi.differentiation import raveled
from numpyro_gpaug.infer.vi.first_order import Ascent
from numpyro_gpaug.infer.vi.latent_gaussian import relative_rounding
from numpyro_gpaug.infer.vi.lbfgs import Memory
from numpyro_gpaug.infer.vi.state import ConjugateState, Hyper, flagged, unknown_bound
from numpyro_gpaug.math.compiling import jit_for_few_runs
from numpyro_gpaug.model.arguments import Values
from numpyro_gpaug.model.latents import Structure

# The largest numbers of pairs of points that define the curvature, in float64 and in
# float32, and the number of pairs per learnt value. With 20 pairs, the curvature of a
# dozen lengthscales is forgotten: fits took 6 to 14% more evaluations. In float32, old
# pairs contain rounding errors, and with more of them bounds ended nats lower.
MOST_PAIRS, ROUNDED_PAIRS, EACH = 60, 20, 3
# The least part of the predicted increase that a step must achieve (Armijo), and the
# largest ratio of slopes at its end and start (Wolfe).
SUFFICIENT, CURVATURE = 1e-4, 0.9
# The part of an update that shows the noise of the bound: the smallest one that changes
# anything.
PROBE = 1e-6
# The largest change of a coordinate in a new direction (e-folds of a positive param).
# Larger changes lead into another basin: steps of two e-folds cost bounds up to six
# nats, because early lengthscales did not come back, and saved few evaluations.
# Repeated updates double.
LARGEST = 0.5
# The largest change of a coordinate in one update after doubling. Otherwise, where the
# bound is almost flat, a value would reach the end of its dtype's range after a dozen
# updates.
FURTHEST = 16.0
# The noise in nats that users are told of.
NOISY = 0.5
# The increase in nats that a gradient may promise where no step raises the bound.
MISSED = 1.0
# The number of steps without an increase that ends a search; the larger number for
# noisy bounds; and the error in nats from which on bounds are noisy.
PATIENCE, LONG_PATIENCE, RESOLVED = 5, 15, 0.1
# With known curvature in all directions: the number of steps without an increase that
# ends a search if they promise less than the tolerance. A single one ends it if it
# promises less than this part of the tolerance.
FEW, PROMISED = 2, 0.01
# The largest relative difference of two bounds of one fit at the same hyperparameters.
LARGEST_NOISE = 0.01


class Search(NamedTuple):
    """State of the search. It belongs to the best values so far.

    :param memory: the points from which a direction was computed.
    :param here: the current point, flat; the pending update starts there.
    :param gradient: the gradient of the bound there, flat.
    :param steepest: whether the pending update is along the gradient.
    :param noise: the noise of the bound: the largest decrease that was due to rounding.
    :param unresolved: the error of the best bound due to rounding of matrices.
    :param exhausted: whether no update makes the bound rise any more.
    :param fresh: whether no direction has failed yet.
    :param gained: the increase of the bound since the best values, by the slopes at
        both ends of each update.
    :param ascent: the first-order phase before the search; empty if there is none.
    """

    memory: Memory
    here: Array
    gradient: Array
    steepest: Array
    noise: Array
    unresolved: Array
    exhausted: Array
    fresh: Array
    gained: Array
    ascent: Ascent | tuple[()]


def start(values: Values, free: int = 0) -> Search:
    """Return the state before the first evaluation.

    :param values: unconstrained params.
    :param free: how many of their numbers have no natural scale.
    """
    flat, _ = raveled(values)
    most = MOST_PAIRS if flat.dtype == jnp.float64 else ROUNDED_PAIRS
    memory = Memory.empty(flat, min(most, EACH * max(flat.size, 1)))
    zero, no = jnp.zeros((), flat.dtype), jnp.array(False)
    ascent = Ascent.start(flat, free)
    return Search(memory, flat, memory.point, no, zero, zero, no, ~no, zero, ascent)


def within(state: Any, num_steps: Any) -> Any:
    """Return the first state of a run with a maximum number of steps.

    :param state: the first state, of any optimiser.
    :param num_steps: the maximum number of steps.
    """
    search = state.hyper.optim_state
    if not (isinstance(search, Search) and isinstance(search.ascent, Ascent)):
        return state
    search = search._replace(ascent=search.ascent.within(num_steps))
    return state._replace(hyper=state.hyper._replace(optim_state=search))


def is_first_order(hyper: Hyper) -> Array | bool:
    """Return whether the pending update belongs to the first-order phase, or leads from
    its end to the best values, where the search begins.

    :param hyper: hyperparameters before the update.
    """
    ascent = hyper.optim_state.ascent
    return isinstance(ascent, Ascent) and ascent.left >= 0


def begins(hyper: Hyper) -> Array | bool:
    """Return whether the first-order phase has ended, and the search begins.

    :param hyper: hyperparameters before the update.
    """
    ascent = hyper.optim_state.ascent
    return isinstance(ascent, Ascent) and ascent.left == 0


@jit_for_few_runs
def moved(hyper: Hyper) -> Values:
    """Return hyperparameters after the pending update.

    :param hyper: hyperparameters before it.
    """
    search: Search = hyper.optim_state
    best, unravel = raveled(hyper.values)
    update = hyper.scale * raveled(hyper.update)[0]
    ahead = search.here + jnp.asarray(update, search.here.dtype)
    return unravel(jnp.where(begins(hyper), best, ahead))


def accepts(
    hyper: Hyper, best: Array, bound: Array, rounding: Array, unresolved: Array | float
) -> Array:
    """Whether the pending update has raised the bound enough, up to known errors.

    :param hyper: hyperparameters before the update.
    :param best: the highest bound so far.
    :param bound: the bound after the update.
    :param rounding: the rounding error of the sum over data.
    :param unresolved: see :class:`Search`; for the bound after the update. A value
        above that of the best bound does not increase the tolerance: otherwise a search
        that moves to less accurate bounds would accept ever larger decreases.
    """
    search: Search = hyper.optim_state
    known = search.unresolved
    matrices = known + jnp.minimum(known, unresolved)
    least = SUFFICIENT * hyper.scale * jnp.maximum(_slope(hyper), 0)
    allowed = jnp.maximum(rounding + matrices, search.noise)
    return (bound - best >= least - allowed) & (hyper.scale > PROBE)


def accepted(
    hyper: Hyper, values: Values, ascent: Values, first: Array, stalled: Array
) -> Hyper:
    """Return the next update.

    :param hyper: hyperparameters before the accepted update.
    :param values: unconstrained params after it.
    :param ascent: the gradient of the bound there.
    :param first: whether nothing in memory concerns these data.
    :param stalled: steps without a rise.
    """
    (here, unravel), (gradient, _) = raveled(values), raveled(ascent)
    known: Search = hyper.optim_state
    anew = jnp.asarray(first | begins(hyper))
    memory = known.memory.forgotten(anew)
    last = jnp.asarray(hyper.scale * raveled(hyper.update)[0], here.dtype)
    rises = (last @ gradient) > CURVATURE * (last @ memory.gradient)
    steepest = memory.number == 0
    further = ~steepest & rises
    added = memory.added(here, gradient)
    longer = last * jnp.minimum(2, FURTHEST / _size(last))
    update, memory = _either(
        further, (longer, memory), (_limited(added.direction()), added)
    )
    gained = known.gained + 0.5 * (last @ (known.gradient + gradient))
    zero = jnp.zeros_like(known.noise)
    noise, unresolved, gained = _either(
        anew, (zero, zero, zero), (known.noise, known.unresolved, gained)
    )
    search = Search(
        memory, here, gradient, steepest, noise, unresolved,
        exhausted=jnp.array(False), fresh=known.fresh | anew, gained=gained,
        ascent=known.ascent,
    )  # fmt: skip
    if isinstance(known.ascent, Ascent):
        up, after = known.ascent.next(gradient, stalled)
        update = jnp.where(known.ascent.left > 0, up, update)
        search = search._replace(ascent=after)
    scale = jnp.ones_like(hyper.scale)
    return Hyper(hyper.values, unravel(update), scale, search)


def is_lower(hyper: Hyper, best: Array, bound: Array, rounding: Array) -> Array:
    """Return whether the last accepted point is below the best one. If their bounds
    differ by no more than rounding, the slopes decide: near an optimum the largest of
    rounded bounds may belong to any point.

    :param hyper: hyperparameters after the accepted update.
    :param best: the highest bound so far.
    :param bound: the bound after the update.
    :param rounding: the rounding error of bounds.
    """
    change = bound - best
    gained = hyper.optim_state.gained
    return jnp.where(jnp.abs(change) <= rounding, gained < 0, change < 0)


def improved(hyper: Hyper, values: Values, unresolved: Array) -> Hyper:
    """Return hyperparameters with the best values so far.

    :param hyper: any hyperparameters.
    :param values: unconstrained params.
    :param unresolved: see :class:`Search`.
    """
    search: Search = hyper.optim_state
    known = jnp.asarray(unresolved, search.unresolved.dtype)
    search = search._replace(unresolved=known, gained=jnp.zeros_like(search.gained))
    return hyper._replace(values=values, optim_state=search)


def refused(
    hyper: Hyper, best: Array, bound: Array, rounding: Array, largest_noise: Array
) -> Hyper:
    """Shorten an update that did not raise the bound enough; try steepest ascent once
    too little of it is left; then stop.

    In float32 an ill-conditioned kernel may make a bound noisier than its estimate.
    When a shorter update can gain nothing, a tiny fraction of it is tried: the change
    of the bound there is noise, and is added to the tolerance from then on.

    :param hyper: hyperparameters before the update.
    :param best: the highest bound so far.
    :param bound: the bound after the update, NaN or minus infinity if there is none.
    :param rounding: the rounding error of the bound; a smaller gain does not count.
    :param largest_noise: a larger decrease is not treated as noise.
    """
    search: Search = hyper.optim_state
    rise = bound - best
    probing = hyper.scale <= PROBE
    slope = hyper.scale * _slope(hyper)
    part = slope / (2 * (slope - rise))
    factor = jnp.where(part > 0.1, jnp.minimum(part, 0.5), 0.1)
    less = hyper.scale * factor
    # Along a first gradient, a step may gain almost nothing although other steps gain
    # much. A gradient step within rounding shows which is the case.
    first = search.steepest & search.fresh
    hopeless = (slope * factor / 2 < rounding) & ~first
    change = jnp.abs(rise)
    noisy = probing & (change > jnp.maximum(rounding, search.noise))
    noisy = noisy & (change < largest_noise)
    over = probing & ~noisy
    none = over & search.steepest
    again = search.memory.forgotten(over).added(search.here, search.gradient)
    flat, unravel = raveled(hyper.update)
    steepest = search.gradient / jnp.maximum(jnp.linalg.norm(search.gradient), 1)
    update = jnp.where(none, 0, jnp.where(over, _limited(steepest), flat))
    scale = jnp.where(hopeless | (less < PROBE), PROBE, less)
    search = search._replace(
        memory=_either(over, again, search.memory),
        steepest=search.steepest | over,
        noise=jnp.asarray(jnp.where(noisy, change, search.noise), search.noise.dtype),
        exhausted=none,
        fresh=search.fresh & ~over,
        ascent=search.ascent and search.ascent.ended(),
    )
    scale = jnp.asarray(jnp.where(probing, 1, scale), hyper.scale.dtype)
    return Hyper(hyper.values, unravel(update), scale, search)


@jit_for_few_runs
def patience(hyper: Hyper, tol: Any) -> Array:
    """Return the number of steps without a rise by ``tol`` that end a search.

    :param hyper: the state of the search.
    :param tol: the tolerance in nats.
    """
    search: Search = hyper.optim_state
    noisy = (search.noise > tol) | (search.unresolved > RESOLVED)
    most = jnp.where(noisy, LONG_PATIENCE, PATIENCE)
    # For new directions only, not for a part of one.
    known = (search.memory.number > search.here.size) & (hyper.scale == 1)
    known = known & ~search.steepest & ~noisy
    promise = _slope(hyper)
    most = jnp.where(known & (promise < tol), FEW, most)
    most = jnp.where(known & (promise < PROMISED * tol), 1, most)
    most = jnp.where(search.exhausted, 0, most)
    return jnp.where(is_first_order(hyper), jnp.iinfo(jnp.int32).max, most)


@jit_for_few_runs
def search_continues(
    state: ConjugateState, bound: Array, rounding: Array, unresolved: Array
) -> Array:
    """Return whether the search continues from the end of the pending update: the bound
    has risen enough, or is the first, or the first-order phase is not over.

    :param state: the state before the pending update.
    :param bound: the bound at its end.
    :param rounding: the largest decrease that rounding alone may cause.
    :param unresolved: see :class:`Search`.
    """
    enough = accepts(state.hyper, state.bound, bound, rounding, unresolved)
    first_order = is_first_order(state.hyper) & jnp.isfinite(bound)
    return _is_first(state) | first_order | enough


@jit_for_few_runs
def searched(
    state: ConjugateState,
    new: ConjugateState,
    values: Values,
    rounding: Array,
    unresolved: Array,
    further: Array,
    ascent: Values,
    closed: Values,
) -> ConjugateState:
    """Return the state after a step of a search.

    :param state: the state before the pending update.
    :param new: the same with the optimal Gaussian blocks at its end.
    :param values: unconstrained params there.
    :param rounding: see :func:`search_continues`.
    :param unresolved: see :class:`Search`.
    :param further: from :func:`search_continues`.
    :param ascent: the gradient of the bound there, if the search continues.
    :param closed: updates of params that are set in closed form, likewise.
    """
    best, bound = state.bound, new.bound

    def on() -> Hyper:
        hyper = accepted(state.hyper, values, ascent, _is_first(state), state.stalled)
        return hyper._replace(update=hyper.update | closed)

    def back() -> Hyper:
        largest = LARGEST_NOISE / relative_rounding(bound.dtype) * rounding
        return refused(state.hyper, best, bound, rounding, largest)

    hyper = lax.cond(further, on, back)

    def better() -> ConjugateState:
        known = improved(hyper, values, unresolved)
        return new._replace(hyper=known, bound=jnp.maximum(best, bound))

    # A first bound of NaN is reported.
    rose = further & ~is_lower(hyper, best, bound, rounding)
    return flagged(lax.cond(rose, better, lambda: state._replace(hyper=hyper)))


def _is_first(state: ConjugateState) -> Array:
    return state.bound <= unknown_bound(state.bound.dtype)


def uncertainty(search: Search) -> float:
    """Return the uncertainty of the best bound, in nats."""
    return max(float(search.noise), float(search.unresolved))


def promised_increase(search: Search, *, ended: bool) -> float:
    """Return the increase in nats that the gradient promises at the end of a search;
    zero if the search has not ended.

    :param search: the state of the search.
    :param ended: whether the last steps did not raise the bound.
    """
    # NumPy compiles nothing. Squares of float32 do not overflow in float64.
    memory = search.memory
    steps, falls, gradient = (
        np.asarray(x, np.float64) for x in (memory.steps, memory.falls, search.gradient)
    )
    products = (steps * falls).sum(-1)
    known = products > 0
    steepest = np.max(np.square(falls[known]).sum(-1) / products[known], initial=0.0)
    length = float(np.linalg.norm(gradient))
    # The largest known curvature, or the longest step.
    size = length / max(steepest, length / LARGEST, 1e-30)
    return 0.5 * length * size if ended or bool(search.exhausted) else 0.0


def warn_of_noise(search: Search, structure: Structure, *, ended: bool) -> None:
    """Warn if differences of a nat are not resolved: near an optimum, L-BFGS then
    cannot find a direction.

    :param search: the state of the search.
    :param structure: the structure of the model.
    :param ended: whether the last steps did not raise the bound.
    """
    if (missed := promised_increase(search, ended=ended)) > MISSED:
        warnings.warn(
            f"learning stopped although the gradient promises about {missed:.2g} nats, "
            "because its last steps did not raise the bound: rounding hides the rise "
            "(data determine sums of latents far better than their priors do), or the "
            "bound has a kink. Use float64, jax.config.update('jax_enable_x64', True), "
            "centre the responses, or start from other values, init_params=",
            stacklevel=6,
        )
    noise = uncertainty(search)
    if noise > NOISY:
        cause, cure = "very many data, wide priors, an ill-conditioned covariance", ""
        if structure.functions:
            cause = "an ill-conditioned kernel matrix: smooth functions, little noise"
            cure = ", or a rougher kernel"
        warnings.warn(
            f"rounding makes the bound uncertain by up to {noise:.2g} nats "
            f"({cause}), and learning may have ended that far below the optimum. "
            f"Use float64, jax.config.update('jax_enable_x64', True){cure}",
            stacklevel=6,
        )


def _limited(direction: Array) -> Array:
    """Return a direction, shortened if it moves a coordinate too far."""
    return direction * jnp.minimum(1, LARGEST / _size(direction))


def _size(update: Array) -> Array:
    return jnp.max(jnp.abs(update), initial=jnp.finfo(update.dtype).tiny)


def _either(which: Array, one: Any, other: Any) -> Any:
    return jax.tree.map(lambda a, b: lax.select(which, a, b), one, other)


def _slope(hyper: Hyper) -> Array:
    return hyper.optim_state.gradient @ raveled(hyper.update)[0]
