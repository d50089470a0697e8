# SPDX-License-Identifier: Apache-2.0
"""Learning without a learning rate: L-BFGS on the collapsed bound.

The collapsed bound is the bound at its optimum over the Gaussian blocks, a function of
the hyperparameters alone. By the envelope theorem its gradient is that of the bound
with the blocks held fixed (in whitened coordinates). Directions are optax's; one step
of a fit is one evaluation, at the end of the pending update:

- the bound has not risen enough (Armijo): less of the update, by a parabola through
  what is known;
- it rises as steeply as before (Wolfe): on, twice as far;
- else: the next direction, from this pair of points too. Its curvature is positive, so
  that the direction ascends.

Reference: Nocedal and Wright (2006), Numerical Optimization, sections 3.1, 3.5, 7.2.
"""

from __future__ import annotations

from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
from jax import Array
from jax.flatten_util import ravel_pytree

from numpyro_gpaug.infer.vi.hyper import Hyper

MEMORY = 20
# Of the rise that the slope promises: what must be had, and how much steeper than the
# end of a step its start must have been.
SUFFICIENT, CURVATURE = 1e-4, 0.9
# A direction of which less is left is given up.
LEAST = 1e-5
# No coordinate is moved further by one new direction (e-folds of a positive param):
# beyond lies another basin, or nothing. Repeated, updates double.
LARGEST = 2.0


class Search(NamedTuple):
    """State of the search.

    :param memory: optax's, which holds the last point that a direction was taken from,
        and minus the gradient there.
    :param gradient: of the bound at the present values, flat.
    :param steepest: whether the pending update is along it.
    :param exhausted: whether no update makes the bound rise any more.
    """

    memory: Any
    gradient: Array
    steepest: Array
    exhausted: Array


def start(values: dict[str, Any]) -> Search:
    """The state before anything is known.

    :param values: unconstrained params.
    """
    flat, _ = ravel_pytree(values)
    memory, no = _lbfgs().init(flat), jnp.array(False)
    return Search(memory, jnp.zeros_like(flat), no, no)


def required(hyper: Hyper) -> Array:
    """The least rise at which the pending update is accepted."""
    return SUFFICIENT * hyper.scale * jnp.maximum(_slope(hyper), 0)


def accepted(
    hyper: Hyper, values: dict[str, Any], ascent: dict[str, Any], first: Array
) -> Hyper:
    """The next update.

    :param hyper: before the update that is accepted.
    :param values: unconstrained params after it.
    :param ascent: the gradient there.
    :param first: whether nothing that is remembered concerns these data.
    """
    (here, unravel), (gradient, _) = ravel_pytree(values), ravel_pytree(ascent)
    memory = jax.tree.map(
        lambda new, old: jnp.where(first, new, old),
        _lbfgs().init(here), hyper.optim_state.memory,
    )  # fmt: skip
    last = hyper.scale * ravel_pytree(hyper.update)[0]
    rises = (last @ gradient) > CURVATURE * -(last @ memory.updates)
    steepest = memory.count == 0
    further = ~steepest & rises
    direction, next_memory = _direction(gradient, memory, here)
    update, memory = jax.tree.map(
        lambda a, b: jnp.where(further, a, b),
        (2 * last, memory), (direction, next_memory),
    )  # fmt: skip
    search = Search(memory, gradient, steepest, jnp.array(False))
    return Hyper(values, unravel(update), jnp.ones_like(hyper.scale), search)


def refused(hyper: Hyper, rise: Array, noise: Array) -> tuple[Hyper, Array]:
    """Less of an update that did not make the bound rise enough; steepest ascent, once
    too little of it is left; then nothing.

    :param hyper: before the update.
    :param rise: of the bound, NaN or minus infinity if there is none.
    :param noise: rounding of the bound. A promise of less is none.
    :return: hyperparameters, and whether the present direction was given up: the bound
        just seen is then that of the present values as much as the one it was compared
        with.
    """
    search: Search = hyper.optim_state
    slope = hyper.scale * _slope(hyper)
    best = slope / (2 * (slope - rise))
    factor = jnp.where(best > 0.1, jnp.minimum(best, 0.5), 0.1)
    scale = jnp.asarray(hyper.scale * factor, hyper.scale.dtype)
    here, unravel = ravel_pytree(hyper.values)
    steepest, again = _direction(search.gradient, _lbfgs().init(here), here)
    over = (scale < LEAST) | (slope * factor < noise)
    none = over & search.steepest
    update = jnp.where(over, steepest, ravel_pytree(hyper.update)[0])
    memory = jax.tree.map(
        lambda new, old: jnp.where(over, new, old), again, search.memory
    )
    less = Hyper(
        hyper.values,
        unravel(jnp.where(none, 0, update)),
        jnp.where(over, 1, scale),
        Search(memory, search.gradient, search.steepest | over, none),
    )
    return less, over


def _direction(gradient: Array, memory: Any, here: Array) -> tuple[Array, Any]:
    """Where to go, and the memory with this point."""
    descent, memory = _lbfgs().update(-gradient, memory, here)
    size = jnp.max(jnp.abs(descent), initial=jnp.finfo(here.dtype).tiny)
    return -descent * jnp.minimum(1, LARGEST / size), memory


def _slope(hyper: Hyper) -> Array:
    return hyper.optim_state.gradient @ ravel_pytree(hyper.update)[0]


def _lbfgs() -> Any:
    # Imported here: whoever keeps hyperparameters fixed need not wait for it.
    import optax

    return optax.scale_by_lbfgs(memory_size=MEMORY)
