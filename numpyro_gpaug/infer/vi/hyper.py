# SPDX-License-Identifier: Apache-2.0
"""Hyperparameters of a fit: a pending update, and a fraction of it if the bound
fell."""

from __future__ import annotations

from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
from jax import Array

LEAST_SCALE = 0.1
# Of the step size of the posterior, by how much hyperparameters may move meanwhile.
LARGEST_PART = 0.5


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


def moved(hyper: Hyper) -> dict[str, Any]:
    """Return hyperparameters after their pending update."""

    def after(value: Array, update: Array) -> Array:
        return value + jnp.asarray(hyper.scale * update, value.dtype)

    return jax.tree.map(after, hyper.values, hyper.update)


def limited(hyper: Hyper, size: Array) -> Hyper:
    """Clip every entry of a pending update to half the step size of the posterior. A
    step of size ``s`` takes the posterior a fraction ``s`` of its way, so it lags
    behind by about ``1 / s`` steps. In these, no hyperparameter then changes by more
    than a half in unconstrained units (a factor of 1.6 for a positive one). Stochastic
    approximation of two quantities needs two such time scales to converge (Borkar,
    1997, Stochastic approximation with two time scales).

    :param hyper: hyperparameters with an update from any optax transformation.
    :param size: the size of the last step of the posterior.
    """

    def cut(update: Array) -> Array:
        most = jnp.asarray(LARGEST_PART * size, update.dtype)
        return jnp.clip(update, -most, most)

    return hyper._replace(update=jax.tree.map(cut, hyper.update))


def refused(hyper: Hyper) -> Hyper:
    """Halve a pending update that made the bound fall. If less than a tenth is left, it
    is replaced by an update from a new gradient: an update with momentum need not
    ascend, however small it is.

    :param hyper: hyperparameters before the update.
    """
    dropped = hyper.scale < 2 * LEAST_SCALE
    update = jax.tree.map(
        lambda u: jnp.where(dropped, jnp.zeros_like(u), u), hyper.update
    )
    scale = jnp.where(dropped, 1, hyper.scale / 2)
    return hyper._replace(update=update, scale=scale)
