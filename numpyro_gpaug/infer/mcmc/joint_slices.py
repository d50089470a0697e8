# SPDX-License-Identifier: Apache-2.0
"""Elliptical slices around one Gaussian on all Gaussian latents of a model."""

from __future__ import annotations

from typing import Any, NamedTuple

import jax.numpy as jnp
from jax import Array, random

from numpyro_gpaug.guides import AutoLatentGaussian
from numpyro_gpaug.infer.mcmc.ellipses import LEAST_GAIN, White, minus_log_density
from numpyro_gpaug.infer.mcmc.groups import Values
from numpyro_gpaug.infer.mcmc.joint_kernel import JointKernel
from numpyro_gpaug.infer.mcmc.slices import AtAngle, EllipticalState, Ratio, Slices
from numpyro_gpaug.infer.nested.bound import CollapsedBound
from numpyro_gpaug.model.joint import JointView
from numpyro_gpaug.model.latents import JOINT


class JointEllipse(NamedTuple):
    """A Gaussian on latents ``z = mean + W' u``, ``u`` white, and the
    predictors there.

    :param moments: moments of the latents, with a leading axis of 1.
    :param map: the map from latents to predictors.
    :param centre: predictors at the mean, (1, n).
    """

    moments: Any
    map: Any
    centre: Array

    def latents(self, white: Array) -> Array:
        """Compute ``z``, (1, size), from ``u``."""
        return self.moments.mean + self.moments.unwhiten(white)


class JointSlices(JointKernel, Slices):
    """Slices around the Gaussian that ``AutoLatentGaussian`` would fit, found by the
    same updates.

    :param model: a NumPyro model.
    """

    _num_parts = 1

    # What slices go around.

    def _maps(self, view: JointView) -> Any:
        return view.density[0].matrices

    def _ellipses(self, view: JointView, maps: Any) -> JointEllipse:
        guide = AutoLatentGaussian(self._model)
        arguments = view.arguments
        bound = CollapsedBound(guide, self.structure, arguments.static, projected=True)
        problem = bound.problem({}, arguments.arrays, learns=False)
        q = bound.settle(problem, None, LEAST_GAIN).moments
        return JointEllipse(q, maps, maps(q.mean))

    def _noise(self, key: Array, ellipses: JointEllipse, scale: Array) -> White:
        mean = ellipses.moments.mean
        noise = random.normal(key, (1, ellipses.moments.rank), mean.dtype)
        return (scale[0].astype(mean.dtype) * noise,)

    def _start(
        self, noise: White, ellipses: JointEllipse, values: Values, view: JointView
    ) -> Values:
        structure, latents = self.structure, ellipses.latents(noise[0])
        white = structure.white(latents[0], view.links)[None]
        started = self._started(white, values, view)
        return {JOINT: structure.linked(started[0], view.links)[None]}

    def _latents(self, state: EllipticalState, view: JointView) -> Values:
        white = self._white_of(state.z, view)
        return {JOINT: self.structure.linked(white[0], view.links)[None]}

    def _placed(
        self, x: Values, ellipses: JointEllipse, maps: Any, view: JointView
    ) -> tuple[White, Values]:
        q, z = ellipses.moments, x[JOINT]
        return (q.whiten(z - q.mean),), {JOINT: maps(z)}

    def _on_ellipses(
        self, key: Array, state: EllipticalState, view: JointView
    ) -> AtAngle:
        ellipse: JointEllipse = state.ellipses
        (there,), (here,) = self._noise(key, ellipse, state.scale), state.white
        mean, centre = ellipse.moments.mean, ellipse.centre
        z = [ellipse.latents(u) - mean for u in (here, there)]
        moved = [ellipse.map(mean + each) - centre for each in z]

        def at_angle(angle: Array) -> tuple[White, Values, Values]:
            a, b = jnp.cos(angle).astype(mean.dtype), jnp.sin(angle).astype(mean.dtype)
            latents = mean + a * z[0] + b * z[1]
            predictors = centre + a * moved[0] + b * moved[1]
            return (a * here + b * there,), {JOINT: latents}, {JOINT: predictors}

        return at_angle

    def _ratio(self, view: JointView) -> Ratio:
        (_, log_density), prior = view.density, view.prior

        def ratio(white: White, x: Values, at: Values, scale: Array) -> Array:
            latents, data = prior.log_density(x[JOINT]).sum(), log_density(at[JOINT][0])
            return data + latents + minus_log_density(white, scale)

        return ratio

    def _sampled(self, x: Values, at: Values, view: JointView) -> Values:
        white = self.structure.white(x[JOINT][0], view.links)
        return self._sites(white[None], view)
