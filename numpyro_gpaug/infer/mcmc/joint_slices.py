# SPDX-License-Identifier: Apache-2.0
"""Elliptical slices around one Gaussian on all Gaussian latents of a model."""

from __future__ import annotations

from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
from jax import Array, random

from numpyro_gpaug.guides import AutoLatentGaussian
from numpyro_gpaug.infer.mcmc.ellipses import LEAST_GAIN, White, minus_log_density
from numpyro_gpaug.infer.mcmc.groups import Values
from numpyro_gpaug.infer.mcmc.slices import AtAngle, EllipticalState, Ratio, Slices
from numpyro_gpaug.infer.nested.bound import CollapsedBound
from numpyro_gpaug.model.forms import refuse_large
from numpyro_gpaug.model.inspect_joint import inspect_joint
from numpyro_gpaug.model.joint import JointView
from numpyro_gpaug.model.latents import JOINT, JointStructure
from numpyro_gpaug.model.structure import Arguments, run_model
from numpyro_gpaug.model.whitened import white_numbers, whitened


class JointEllipse(NamedTuple):
    """A Gaussian on standard normal latents ``z = mean + W' u``, ``u`` white, and the
    predictors there.

    :param moments: of the latents, with a leading axis of 1.
    :param map: from latents to predictors.
    :param centre: predictors at the mean, (1, n).
    """

    moments: Any
    map: Any
    centre: Array

    def latents(self, white: Array) -> Array:
        """``z``, (1, size), from ``u``."""
        return self.moments.mean + self.moments.spread(white)


class JointSlices(Slices):
    """Slices around the Gaussian that ``AutoLatentGaussian`` would fit, found by the
    same moves.

    :param model: a NumPyro model.
    """

    _kinds, _otherwise = "Gaussian latents", "; MCMC(NUTS(model)) samples any model"
    _num_parts = 1

    @property
    def structure(self) -> JointStructure:
        found = super().structure
        assert isinstance(found, JointStructure)
        return found

    def _structure_of(
        self, args: tuple[Any, ...], kwargs: dict[str, Any]
    ) -> JointStructure:
        found = inspect_joint(self._model, 1.0, *args, **kwargs)
        if not found.chains:
            return found
        # Slices go around standard normal numbers, and those of chains are not.
        dense = found.in_steps(()).with_arrow(None)
        refuse_large(dense)
        return dense

    def _seen(self, structure: Any, arguments: Arguments) -> JointView:
        return JointView(structure, self._model, arguments, {}, random.key(0))

    def _check(self, view: JointView) -> None:
        structure: Any = view.structure
        others, names = structure.others, [s.name for s in structure.sites]
        reasons = "; ".join(f"{k!r}: {why}" for k, why in structure.held)
        self._refuse_others(
            f"as a block, Gibbs([(EllipticalSlice(model), {names}), (NUTS(model), "
            "None)]) has NUTS sample them; handlers.condition(model, data={"
            f"{others[0]!r}: ...}}) holds them at values; NestedVI(model) integrates "
            f"them{' (' + reasons + ')' if reasons else ''}"
            if others
            else ""
        )

    def _refuse_broken(
        self, state: Any, args: tuple[Any, ...], kwargs: dict[str, Any]
    ) -> None:
        for site in self.structure.sites:
            value = state.z[site.name]
            if not isinstance(value, jax.core.Tracer) and not np.isfinite(value).all():
                raise FloatingPointError(
                    f"the first draw of {site.name!r} is not finite: is the prior very "
                    "wide, or are columns very large? Standardise them"
                )

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
        z = ellipses.latents(noise[0])
        names = [s.name for s in self.structure.sites]
        given = {k: values[k] for k in names if k in values}
        if not given:
            return {JOINT: z}
        drawn = self._sites(z, view)
        return self._numbers({k: given.get(k, drawn[k]) for k in names}, view)

    def _latents(self, state: EllipticalState, view: JointView) -> Values:
        return self._numbers(state.z, view)

    def _numbers(self, values: Values, view: JointView) -> Values:
        """The standard normal numbers that make these values of the sites."""
        structure = self.structure
        here = {s.name: values[s.name] for s in structure.sites}
        trace = run_model(self._model, view.arguments, random.key(0), here)
        z = structure.joined(white_numbers(trace, tuple(here)))
        return {JOINT: z.astype(structure.dtype)[None]}

    def _placed(
        self, x: Values, ellipses: JointEllipse, maps: Any, view: JointView
    ) -> tuple[White, Values]:
        q, z = ellipses.moments, x[JOINT]
        return (q.white(z - q.mean),), {JOINT: maps(z)}

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
        _, log_density = view.density

        def ratio(white: White, x: Values, at: Values, scale: Array) -> Array:
            prior = -0.5 * jnp.square(x[JOINT]).sum()
            data = log_density(at[JOINT][0])
            return data + prior + minus_log_density(white, scale)

        return ratio

    def _sampled(self, x: Values, at: Values, view: JointView) -> Values:
        return self._sites(x[JOINT], view)

    def _sites(self, z: Array, view: JointView) -> Values:
        """Values of Gaussian and deterministic sites."""
        model = whitened(self._model, self.structure.split(z[0]))
        trace = run_model(model, view.arguments, random.key(0), {})
        names = {s.name for s in self.structure.sites}
        return {
            name: jnp.asarray(site["value"], jnp.result_type(site["value"]))
            for name, site in trace.items()
            if site["type"] == "deterministic" or name in names
        }
