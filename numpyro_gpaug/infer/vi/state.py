# SPDX-License-Identifier: Apache-2.0
"""The state that one step passes to the next."""

from __future__ import annotations

from functools import cache
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
from jax import Array

from numpyro_gpaug.infer.vi.latent_gaussian import Natural


class Hyper(NamedTuple):
    """Hyperparameters and their optimiser.

    :param values: unconstrained params of the model and of the other guide.
    :param update: the pending update, applied at the start of the next step.
    :param scale: fraction of it to apply; reduced when it made the bound fall.
    :param optim_state: the optax state, or a
        :class:`~numpyro_gpaug.infer.vi.quasi_newton.Search`.
    """

    values: dict[str, Any]
    update: dict[str, Any]
    scale: Array
    optim_state: Any


class ConjugateState(NamedTuple):
    """State of :class:`~numpyro_gpaug.ConjugateSVI`, a pytree of arrays.

    :param hyper: hyperparameters.
    :param natural: natural parameters of every Gaussian block, latent axis first.
    :param step_sizes: next step size to try, by block (full data).
    :param schedule: state of the step-size schedule (minibatches).
    :param epochs: by subsampled plate, a permutation and the position in it.
    :param bound: the bound at this state (full data), or of the last batch before it.
    :param data: fingerprint of the data of the bound.
    :param mark: the bound when it last rose by ``tol``.
    :param stalled: steps since then.
    :param unreached: by process, the share of function values that depend on at most
        one inducing value (``infer/vi/reach.py``).
    :param lost: error of the bound due to rounding, in nats
        (``infer/vi/resolution.py``); for the last state of a loop on full data.
    :param basis: a fingerprint of the basis of the latents, 0 for none.
    :param step: steps taken.
    :param rng_key: random key.
    """

    hyper: Hyper
    natural: Natural
    step_sizes: dict[str, Array]
    schedule: Any
    epochs: dict[str, tuple[Array, Array]]
    bound: Array
    data: Array
    mark: Array
    stalled: Array
    unreached: dict[str, Array]
    lost: Array
    basis: Array
    step: Array
    rng_key: Array


@cache
def unknown_bound(dtype: Any) -> Any:
    """Return the value that stands for an unknown bound, smaller than any bound. It is
    finite, because ``jax_debug_infs`` checks the outputs of compiled functions."""
    return jnp.finfo(dtype).min


def flagged(state: ConjugateState, hyper: Hyper) -> ConjugateState:
    """Return a bound of NaN if the gradient is not finite. Otherwise every later step
    would be rejected, and the fit would seem to have converged."""
    finite = [jnp.isfinite(x).all() for x in jax.tree.leaves(hyper.update)]
    if not finite:
        return state
    good = jnp.stack(finite).all()
    return state._replace(bound=jnp.where(good, state.bound, jnp.nan))
