# SPDX-License-Identifier: Apache-2.0
"""Elliptical slices around Gaussians on the latents of a model."""

from __future__ import annotations

from abc import abstractmethod
from collections.abc import Callable, Sequence
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
from jax import Array, random

from numpyro_gpaug.infer.mcmc.gaussian_kernel import GaussianKernel
from numpyro_gpaug.infer.mcmc.parts import Geometry, Values
from numpyro_gpaug.infer.mcmc.slice_search import angle_in_slice
from numpyro_gpaug.model.arguments import Arguments
from numpyro_gpaug.model.closures import Version
from numpyro_gpaug.model.joint import JointView, function_values

# The scale of a Gaussian is learnt as if this many draws had confirmed a scale of 1.
PRIOR_DRAWS = 10

Parted = tuple[Array, ...]


class Point(NamedTuple):
    """A point on the ellipses. All of it is affine in the whitened coordinates.

    :param white: coordinates that are white under the Gaussians, by part.
    :param latents: the latents of each part.
    :param functions: function values by process.
    :param predictors: the predictors of the density, (n,).
    """

    white: Parted
    latents: Parted
    functions: Values
    predictors: Array


class Ellipses(NamedTuple):
    """The Gaussians around which slices move.

    :param moments: Gaussians on the latents of each part.
    :param geometry: priors of the parts, and maps to predictors. There is one map to
        all predictors of the density if there is one part; otherwise these are computed
        from function values and numbers.
    :param scales: NumPyro's scales of the priors.
    :param centre: the means.
    """

    moments: tuple[Any, ...]
    geometry: tuple[Geometry, ...]
    scales: Parted
    centre: Point


class EllipticalState(NamedTuple):
    """State of :class:`~numpyro_gpaug.EllipticalSlice`.

    :param z: latents and deterministic sites.
    :param point: the latents, whitened and not, and what the density depends on.
    :param scale: factors of the Gaussians' standard deviations, by part.
    :param step: steps so far.
    :param log_ratio: log-ratio of the posterior to the Gaussians, up to a constant.
    :param evaluations: evaluations of the likelihood in the last step.
    :param ellipses: the Gaussians, and quantities computed from them.
    :param rng_key: random key.
    :param version: the version of everything the model reads besides its arguments.
    """

    z: Values
    point: Point
    scale: Array
    step: Array
    log_ratio: Array
    evaluations: Array
    ellipses: Ellipses
    rng_key: Array
    version: Version | None = None


class Slices(GaussianKernel):
    """Slice sampling on ellipses through draws of Gaussians.

    :param model: a NumPyro model.
    """

    _num_warmup = 0

    @abstractmethod
    def _gaussians(
        self, view: JointView
    ) -> tuple[tuple[Any, ...], tuple[Geometry, ...], Parted]:
        """Return the Gaussians, the geometry and the scale of the prior of each
        part."""

    def _refuse_broken(self, state: Any, arguments: Arguments) -> None:
        super()._refuse_broken(state, arguments)
        ratio = state.log_ratio
        if not isinstance(ratio, jax.core.Tracer) and not np.isfinite(ratio).all():
            raise FloatingPointError(
                "the density at the first draw is not finite. Are there data that "
                "no value of the latents makes possible (counts at zero exposure), "
                "or is a prior far too wide?"
            )

    def _first(self, key: Array, values: Values, arguments: Arguments) -> Any:
        key, noise_key = random.split(key)
        view = self._view(arguments, {})
        ellipses = self._ellipses(view)
        scale, step = jnp.ones(len(self._parts)), jnp.int32(0)
        shifts = self._shifts(self._noise(noise_key, ellipses, scale), ellipses)
        drawn = jax.tree.map(jnp.add, ellipses.centre.latents, shifts)
        numbers = self._numbers_of(drawn, ellipses.geometry)
        numbers = self._moved(numbers, values, {}, arguments)
        return self._evaluated(key, numbers, scale, step, ellipses, view)

    def _warm_up(self, num_warmup: int) -> None:
        self._num_warmup = num_warmup

    def _renewed(self, state: EllipticalState, arguments: Arguments) -> EllipticalState:
        view = self._view(arguments, {})
        ellipses, numbers = self._ellipses(view), self._numbers(state.z, arguments)
        new = self._evaluated(
            state.rng_key, numbers, state.scale, state.step, ellipses, view
        )
        return new._replace(evaluations=state.evaluations)

    def _next(self, state: EllipticalState, arguments: Arguments) -> EllipticalState:
        key, noise_key, uniform_key = random.split(state.rng_key, 3)
        view, ellipses = self._view(arguments, {}), state.ellipses
        at_angle = self._on_ellipses(noise_key, state, view)

        def evaluate(angle: Array) -> Array:
            return self._ratio(at_angle(angle), state.scale, ellipses, view)

        found = angle_in_slice(uniform_key, state.log_ratio, evaluate)
        point = at_angle(found.angle)
        scale = self._adapted(state, point.white)
        gained = minus_log_density(point.white, scale)
        gained -= minus_log_density(point.white, state.scale)
        return EllipticalState(
            self._valued(point, ellipses, arguments), point, scale, state.step + 1,
            found.log_ratio + gained, found.evaluations, ellipses, key,
        )  # fmt: skip

    def _evaluated(
        self,
        key: Array,
        numbers: Values,
        scale: Array,
        step: Array,
        ellipses: Ellipses,
        view: JointView,
    ) -> EllipticalState:
        placed = zip(self._parts, ellipses.geometry, strict=True)
        latents = tuple(part.latents(numbers, known) for part, known in placed)
        pairs = zip(ellipses.moments, latents, strict=True)
        white = tuple(q.whiten(x - q.mean) for q, x in pairs)
        point = self._point(white, latents, ellipses.geometry, view)
        ratio = self._ratio(point, scale, ellipses, view)
        z = self._valued(point, ellipses, view.arguments)
        none = jnp.int32(0)
        return EllipticalState(z, point, scale, step, ratio, none, ellipses, key)

    def _valued(self, point: Point, ellipses: Ellipses, arguments: Arguments) -> Values:
        """Return values of Gaussian and deterministic sites."""
        return self._sites(
            point.latents, ellipses.geometry, {}, arguments, point.functions
        )

    def _adapted(self, state: EllipticalState, white: Parted) -> Array:
        """Return the scales after a step: in warm-up, root mean squares of the whitened
        coordinates."""
        squares = jnp.stack([jnp.square(u).mean() for u in white])
        mean = jnp.square(state.scale)
        mean += (squares.astype(mean.dtype) - mean) / (PRIOR_DRAWS + 1 + state.step)
        return jnp.where(state.step < self._num_warmup, jnp.sqrt(mean), state.scale)

    def get_diagnostics_str(self, state: Any) -> str:
        if self._composite is not None:
            return super().get_diagnostics_str(state)
        return f"{state.evaluations} evaluations"

    def _ellipses(self, view: JointView) -> Ellipses:
        moments, geometry, scales = self._gaussians(view)
        means = tuple(q.mean for q in moments)
        white = tuple(
            jnp.zeros((*q.mean.shape[:-1], q.rank), q.mean.dtype) for q in moments
        )
        centre = self._point(white, means, geometry, view)
        return Ellipses(moments, geometry, scales, centre)

    def _point(
        self,
        white: Parted,
        latents: Parted,
        geometry: Sequence[Geometry],
        view: JointView,
    ) -> Point:
        numbers = self._numbers_of(latents, geometry)
        functions: Values = {}
        for known in geometry:
            functions |= function_values(known.processes, numbers)
        whole = geometry[0].map
        if whole is not None:
            return Point(white, latents, functions, whole(latents[0])[0])
        at = view.of_density_at(functions, numbers)
        return Point(white, latents, functions, at)

    def _noise(self, key: Array, ellipses: Ellipses, scale: Array) -> Parted:
        """Draw white noise for every part, times its scale."""
        noise = []
        for i, q in enumerate(ellipses.moments):
            shape, dtype = (*q.mean.shape[:-1], q.rank), q.mean.dtype
            white = random.normal(random.fold_in(key, i), shape, dtype)
            noise.append(scale[i].astype(dtype) * white)
        return tuple(noise)

    def _shifts(self, white: Parted, ellipses: Ellipses) -> Parted:
        """Return the deviations of latents from the means."""
        pairs = zip(ellipses.moments, white, strict=True)
        return tuple(q.unwhiten(u) for q, u in pairs)

    def _on_ellipses(
        self, key: Array, state: EllipticalState, view: JointView
    ) -> Callable[[Array], Point]:
        """Return the ellipses through the state and a draw: a function of the angle."""
        ellipses, centre = state.ellipses, state.ellipses.centre
        white = self._noise(key, ellipses, state.scale)
        drawn = jax.tree.map(jnp.add, centre.latents, self._shifts(white, ellipses))
        other = self._point(white, drawn, ellipses.geometry, view)
        here, there = (
            jax.tree.map(jnp.subtract, point, centre) for point in (state.point, other)
        )

        def at_angle(angle: Array) -> Point:
            def turned(middle: Array, a: Array, b: Array) -> Array:
                cos, sin = jnp.cos(angle), jnp.sin(angle)
                return middle + cos.astype(a.dtype) * a + sin.astype(b.dtype) * b

            return jax.tree.map(turned, centre, here, there)

        return at_angle

    def _ratio(
        self, point: Point, scale: Array, ellipses: Ellipses, view: JointView
    ) -> Array:
        """Return the log-ratio of the posterior to the Gaussians, up to a constant."""
        total = minus_log_density(point.white, scale)
        total += view.log_density(point.predictors)
        for z, known, power in zip(
            point.latents, ellipses.geometry, ellipses.scales, strict=True
        ):
            total += power * known.prior.log_density(z).sum()
        return total


def minus_log_density(white: Parted, scale: Array) -> Array:
    """Return minus the log-density of the Gaussians, up to a constant.

    :param white: coordinates that are white under the Gaussians, by part.
    :param scale: factors of their standard deviations, by part.
    """
    squares = jnp.stack([jnp.square(u).sum() for u in white])
    return 0.5 * (squares / jnp.square(scale.astype(squares.dtype))).sum()
