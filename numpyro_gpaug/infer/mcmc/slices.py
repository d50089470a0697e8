# SPDX-License-Identifier: Apache-2.0
"""Elliptical slices around Gaussians of any kind."""

from __future__ import annotations

from abc import abstractmethod
from collections.abc import Callable
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
from jax import Array, random

from numpyro_gpaug.infer.mcmc.ellipses import White, minus_log_density
from numpyro_gpaug.infer.mcmc.gaussian_kernel import GaussianKernel
from numpyro_gpaug.infer.mcmc.groups import Values
from numpyro_gpaug.infer.mcmc.slice_search import angle_in_slice
from numpyro_gpaug.model.closures import Version

# The scale of a Gaussian is learnt as if this many draws had confirmed that it is 1.
PRIOR_DRAWS = 10

AtAngle = Callable[[Array], tuple[White, Values, Values]]
Ratio = Callable[[White, Values, Values, Array], Array]


class EllipticalState(NamedTuple):
    """State of :class:`~numpyro_gpaug.EllipticalSlice`.

    :param z: latents and deterministic sites.
    :param white: the latents, whitened by the Gaussian of their part.
    :param scale: factors of the Gaussians' standard deviations, by part.
    :param step: steps so far.
    :param log_ratio: log-ratio of the posterior to the Gaussians, up to a constant.
    :param evaluations: evaluations of the likelihood in the last step.
    :param ellipses: the Gaussians, and quantities computed from them.
    :param rng_key: random key.
    :param version: the version of everything the model reads besides its arguments.
    """

    z: Values
    white: White
    scale: Array
    step: Array
    log_ratio: Array
    evaluations: Array
    ellipses: Any
    rng_key: Array
    version: Version | None = None


class Slices(GaussianKernel):
    """Slice sampling on ellipses through draws of Gaussians.

    :param model: a NumPyro model.
    """

    _num_warmup = 0

    @property
    def _name(self) -> str:
        return "EllipticalSlice"

    # What the Gaussians are on.

    @property
    @abstractmethod
    def _num_parts(self) -> int:
        """Return the number of Gaussians."""

    @abstractmethod
    def _ellipses(self, view: Any, maps: Any) -> Any:
        """Return the Gaussians."""

    @abstractmethod
    def _noise(self, key: Array, ellipses: Any, scale: Array) -> White:
        """Draw white noise for every part, times its scale."""

    @abstractmethod
    def _start(self, noise: White, ellipses: Any, values: Values, view: Any) -> Values:
        """Return the initial latents: the given ``values``; others are drawn."""

    @abstractmethod
    def _latents(self, state: EllipticalState, view: Any) -> Values:
        """Return the latents at the values of a state's sites."""

    @abstractmethod
    def _placed(
        self, x: Values, ellipses: Any, maps: Any, view: Any
    ) -> tuple[White, Values]:
        """Return the whitened coordinates of the Gaussians, and the inputs of the
        model."""

    @abstractmethod
    def _on_ellipses(self, key: Array, state: EllipticalState, view: Any) -> AtAngle:
        """Return the ellipses through the state and a draw: functions of the angle that
        give the whitened coordinates of the Gaussians, the latents, and the inputs of
        the model."""

    @abstractmethod
    def _ratio(self, view: Any) -> Ratio:
        """Return the log-ratio of the posterior to the Gaussians, up to a constant,
        from the whitened coordinates, the latents, the inputs of the model, and
        scales."""

    # A sampler.

    def init(self, *args: Any, **kwargs: Any) -> EllipticalState:
        state = super().init(*args, **kwargs)
        ratio = state.log_ratio
        if not isinstance(ratio, jax.core.Tracer) and not np.isfinite(ratio).all():
            raise FloatingPointError(
                "the density at the first draw is not finite. Are there data that "
                "no value of the latents makes possible (counts at zero exposure), "
                "or is a prior far too wide?"
            )
        return state

    def _first(self, key: Array, values: Values, view: Any) -> EllipticalState:
        key, noise_key = random.split(key)
        maps = self._maps(view)
        ellipses = self._ellipses(view, maps)
        scale, step = jnp.ones(self._num_parts), jnp.int32(0)
        noise = self._noise(noise_key, ellipses, scale)
        x = self._start(noise, ellipses, values, view)
        return self._evaluated(key, x, scale, step, ellipses, maps, view)

    def _warm_up(self, num_warmup: int) -> None:
        self._num_warmup = num_warmup

    def _renewed(self, state: EllipticalState, view: Any) -> EllipticalState:
        maps = self._maps(view)
        ellipses, x = self._ellipses(view, maps), self._latents(state, view)
        new = self._evaluated(
            state.rng_key, x, state.scale, state.step, ellipses, maps, view
        )
        return new._replace(evaluations=state.evaluations)

    def _evaluated(
        self,
        key: Array,
        x: Values,
        scale: Array,
        step: Array,
        ellipses: Any,
        maps: Any,
        view: Any,
    ) -> EllipticalState:
        white, at = self._placed(x, ellipses, maps, view)
        ratio = self._ratio(view)(white, x, at, scale)
        z = self._sampled(x, at, view)
        none = jnp.int32(0)
        return EllipticalState(z, white, scale, step, ratio, none, ellipses, key)

    def _next(self, state: EllipticalState, view: Any) -> EllipticalState:
        key, noise_key, uniform_key = random.split(state.rng_key, 3)
        at_angle = self._on_ellipses(noise_key, state, view)
        ratio = self._ratio(view)

        def evaluate(angle: Array) -> Array:
            return ratio(*at_angle(angle), state.scale)

        found = angle_in_slice(uniform_key, state.log_ratio, evaluate)
        white, x, at = at_angle(found.angle)
        scale = self._adapted(state, white)
        gained = minus_log_density(white, scale) - minus_log_density(white, state.scale)
        return EllipticalState(
            self._sampled(x, at, view), white, scale, state.step + 1,
            found.log_ratio + gained, found.evaluations, state.ellipses, key,
        )  # fmt: skip

    def _adapted(self, state: EllipticalState, white: White) -> Array:
        """Return the scales after a step: in warm-up, root mean squares of the whitened
        coordinates."""
        squares = jnp.stack([jnp.square(u).mean() for u in white])
        mean = jnp.square(state.scale)
        mean += (squares.astype(mean.dtype) - mean) / (PRIOR_DRAWS + 1 + state.step)
        return jnp.where(state.step < self._num_warmup, jnp.sqrt(mean), state.scale)

    def get_diagnostics_str(self, state: EllipticalState) -> str:
        return f"{state.evaluations} evaluations"
