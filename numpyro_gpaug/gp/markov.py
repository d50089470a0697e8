# SPDX-License-Identifier: Apache-2.0
"""Processes of one input without inducing inputs, as chains of states."""

from __future__ import annotations

from functools import cached_property
from typing import Any

import jax.numpy as jnp
import numpy as np
import numpyro
import numpyro.distributions as dist
from jax import Array

from numpyro_gpaug._numpyro import outside_plates
from numpyro_gpaug.gp.chain import Chain, Weights
from numpyro_gpaug.gp.conditional import Conditional
from numpyro_gpaug.math.linalg import precise, safe_sqrt

# Names of the sites of a process: standard normal variables behind its states, weights
# of waves, times.
_STATES, _WAVES, _TIMES = ".v", ".waves", ".times"


def times_of(name: str) -> str:
    """Return the name of the site of the times of a process."""
    return f"{name}{_TIMES}"


def numbers_of(name: str) -> tuple[str, str]:
    """Return the names of the sites of the numbers behind a process."""
    return name + _STATES, name + _WAVES


def is_times(name: str) -> bool:
    """Whether a site may be the times of a process, by its name."""
    return name.endswith(_TIMES)


class MarkovConditional(Conditional):
    """Function values at times given the states at the times of a chain; everything is
    computed lazily.

    :param gp: the :class:`~numpyro_gpaug.GaussianProcess`.
    :param X: times, (N,) or (N, 1).
    :param chain: the chain.
    :param own: whether the times are those of the chain.
    """

    def __init__(self, gp: Any, X: Array, chain: Chain, own: bool) -> None:
        super().__init__(gp, X, None)
        self.chain, self._own = chain, own
        self._white = self._constants = None
        if chain.width:
            self._white = _standard(gp, _STATES, (len(chain.given), chain.width), X)
        if chain.num_fixed:
            site = _WAVES if chain.width else _STATES
            self._constants = _standard(gp, site, (chain.num_fixed,), X)

    @property
    def inducing(self) -> Array:
        """The times of the chain."""
        return self.chain.given

    @cached_property
    def states(self) -> Array | None:
        """The states at the times of the chain, (T, R); ``None`` if all its waves have
        constant weights."""
        return None if self._white is None else self.chain.states(self._white)

    @property
    def _times(self) -> Array:
        return jnp.reshape(self.X, -1)

    @cached_property
    def _weights(self) -> Weights:
        return self.chain.own() if self._own else self.chain.at(self._times)

    @property
    def dtype(self) -> np.dtype:
        return self.X.dtype

    @property
    def projection(self) -> Array:
        """The weights of the two states next to each time, (1, 2 R, N)."""
        weights = self._weights
        return jnp.concatenate([weights.of_left, weights.of_right], -1).T[None]

    @cached_property
    def residual(self) -> Array:
        """The variance of f given the states, (1, N)."""
        return self._weights.residual[None]

    @property
    def residual_covariance(self) -> Array:
        """The covariance of f given the states, (1, N, N)."""
        if self._own:
            return jnp.zeros((1, len(self.X), len(self.X)), self.dtype)
        return self.chain.residual_covariance(self._times)[None]

    @property
    def unreached(self) -> Array:
        """Whether each function value is far from all inducing inputs: false."""
        return jnp.zeros((1, len(self.X)), bool)

    @precise
    def values(self, v: Any, eps: Array | None = None) -> Array:
        """Compute function values from the states and residual noise.

        :param v: ignored: the sites of the process are made with this object.
        :param eps: standard normal numbers, (N,), or ``None`` for no residual.
        """
        # NaN if times are not finite, because these have no order.
        values = self.mean[0] + 0 * self._times
        if self.states is not None:
            values = values + self._weights(self.states)
        if self._constants is not None:
            waves = self.chain.waves(self._times)
            values = values + (waves * self._constants).sum(-1)
        if eps is not None and not self._own:
            values = values + safe_sqrt(self.residual[0]) * eps
        return values


def conditional(gp: Any, X: Array) -> MarkovConditional:
    """Return the function values at times, and make the sites of the process.

    The times of the chain are the inducing inputs of the process, if it has any, and
    otherwise the times of the call, in a deterministic site. A posterior keeps its
    value, and gives it to the site in predictions.

    :param gp: the :class:`~numpyro_gpaug.GaussianProcess`.
    :param X: times, (N,) or (N, 1).
    """
    # The variables behind the states join the other latents, so they need the same
    # precision.
    X = jnp.asarray(X, jnp.promote_types(X.dtype, jnp.result_type(float)))
    given = gp.inducing
    if given is None:
        own = jnp.reshape(X, -1)
        times = numpyro.deterministic(times_of(gp.name), own)
    else:
        own, times = None, jnp.reshape(jnp.asarray(given, X.dtype), -1)
    times = jnp.asarray(times)
    return MarkovConditional(gp, X, Chain(gp.kernel, times), times is own)


def _standard(gp: Any, site: str, shape: tuple[int, ...], X: Array) -> Array:
    """Sample standard normal numbers of a process."""
    standard = dist.Normal(jnp.zeros(shape, X.dtype), 1).to_event(len(shape))
    with outside_plates(gp.around) as plates:
        if plates.subsampled and gp.inducing is None:
            raise ValueError(
                f'GaussianProcess("{gp.name}", markov=True) is called in the plate '
                f"{plates.subsampled[0]!r}, which draws some of its members, and the "
                "chain of its states needs all times. Pass all times as inducing="
            )
        numbers = numpyro.sample(gp.name + site, standard, infer={"process": gp.name})
    if jnp.shape(numbers) != shape:
        raise ValueError(
            f'GaussianProcess("{gp.name}"): its states have shape '
            f"{jnp.shape(numbers)}, and the times call for {shape}. For other times "
            "than those of the fit use a posterior, or pass the times of the fit as "
            "inducing="
        )
    return jnp.asarray(numbers, X.dtype)
