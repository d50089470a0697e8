# SPDX-License-Identifier: Apache-2.0
"""Elliptical slices around Gaussians of single processes and weight vectors."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
from jax import Array, random

from numpyro_gpaug.errors import NotConjugateError
from numpyro_gpaug.gaussians.dense import AffineMap, Moments
from numpyro_gpaug.infer.mcmc.ellipses import (
    Ellipses,
    Part,
    White,
    best_gaussians,
    minus_log_density,
    share_predictors,
)
from numpyro_gpaug.infer.mcmc.groups import Values, groups_of
from numpyro_gpaug.infer.mcmc.slices import AtAngle, EllipticalState, Ratio, Slices
from numpyro_gpaug.likelihoods.expectations import Route
from numpyro_gpaug.model.arguments import Arguments
from numpyro_gpaug.model.predictors import scaled_sum
from numpyro_gpaug.model.structure import Block, flat_functions, run_model
from numpyro_gpaug.model.view import ModelView


class BlockSlices(Slices):
    """Slices around Gaussians of processes and weight vectors: one for each block with
    predictors of its own, and a joint one for blocks that share a predictor.

    :param model: a NumPyro model.
    :param fit: values of a fit's params, and moments of its blocks, by name.
    :param fitted: the blocks of the fit, by site.
    """

    def __init__(
        self,
        model: Callable[..., Any],
        fit: tuple[dict[str, Any], dict[str, Moments]] | None,
        fitted: dict[str, Block],
    ) -> None:
        super().__init__(model)
        self._values = {} if fit is None else fit[0]
        self._fit = None if fit is None else fit[1]
        self._fitted = fitted
        self._parts: tuple[Part, ...] = ()
        self._as_fitted = False

    @property
    def _num_parts(self) -> int:
        return len(self._parts)

    def _check(self, view: ModelView) -> None:
        for block in self.structure.blocks if self._fit is not None else ():
            fitted = self._fitted.get(block.site)
            if fitted is None or fitted.shape != block.shape:
                found = "is not part of it" if fitted is None else f"has {fitted.shape}"
                raise ValueError(
                    f"site {block.site!r} has shape {block.shape} in the model, but in "
                    f"the fit it {found}: fit this model at these arguments"
                )
        groups = groups_of(view)
        self._as_fitted = self._fit is not None and not share_predictors(groups, view)
        if not self._as_fitted:
            self._refuse_open()
        self._parts = tuple(
            Part(group, not self._as_fitted and not group.batched) for group in groups
        )

    def _refuse_open(self) -> None:
        """Raise for sites whose best Gaussian cannot be found here."""
        for site in self.structure.observed:
            if site.route is not Route.CONSTANT and not site.latents:
                instead = (
                    "pass a fit by SVI and TraceAnalytic_ELBO (guide, params), or "
                    if self._fit is None
                    else "blocks that share a predictor need one: "
                )
                raise NotConjugateError(
                    f"site {site.name!r} has no expectation in closed form, "
                    f"{site.reason or 'so that no Gaussian is found for it'}; "
                    f"{instead}MCMC(NUTS(model)) samples it"
                )

    def _inspect(self, args: tuple[Any, ...], kwargs: dict[str, Any]) -> None:
        super()._inspect(args, kwargs)
        if self._values:
            self._refuse_moved(Arguments.split(args, kwargs))

    def _refuse_moved(self, arguments: Arguments) -> None:
        """Raise for params that differ from those of the fit."""

        @jax.jit
        def params(arrays: tuple[Array, ...]) -> dict[str, Any]:
            given, key = arguments._replace(arrays=arrays), random.key(0)
            zeros = self.structure.zeros
            trace = run_model(flat_functions(self._model), given, key, zeros)
            names = self._values.keys() & trace.keys()
            return {k: trace[k]["value"] for k in names if trace[k]["type"] == "param"}

        for name, value in params(arguments.arrays).items():
            pairs = zip(*map(jax.tree.leaves, (value, self._values[name])), strict=True)
            for now, fitted in pairs:
                if not isinstance(now, jax.core.Tracer) and not np.allclose(
                    now, fitted
                ):
                    raise ValueError(
                        f"param {name!r} is {now} in the model, but {fitted} in the "
                        "fit. Sample handlers.substitute(model, data=params)"
                    )

    def _start(
        self, noise: White, ellipses: Ellipses, values: Values, view: ModelView
    ) -> Values:
        x = {}
        for part, ellipse, u in zip(self._parts, ellipses.parts, noise, strict=True):
            shift, means = part.shift(ellipse, u), part.means(ellipse)
            for b in part.blocks:
                drawn = means[b.name] + shift[b.name]
                x[b.site] = jnp.asarray(values.get(b.site, drawn), b.dtype)
        return x

    def _latents(self, state: EllipticalState, view: ModelView) -> Values:
        return {b.site: state.z[b.site] for b in self.structure.blocks}

    def _placed(
        self, x: Values, ellipses: Ellipses, maps: dict[str, AffineMap], view: ModelView
    ) -> tuple[White, Values]:
        pairs = zip(self._parts, ellipses.parts, strict=True)
        white = tuple(part.whitened(ellipse, x) for part, ellipse in pairs)
        return white, self._at(x, maps, view)

    def _ellipses(self, view: ModelView, maps: dict[str, AffineMap]) -> Ellipses:
        if self._as_fitted and self._fit is not None:
            owners = [part.blocks[0] for part in self._parts]
            qs = tuple(
                Moments(*(jnp.asarray(m, b.dtype) for m in self._fit[b.name]))
                for b in owners
            )
        else:
            qs = best_gaussians(self._parts, maps, view)
        parts = tuple(
            part.ellipse(q, maps, view) for part, q in zip(self._parts, qs, strict=True)
        )
        means: Values = {}
        for part, ellipse in zip(self._parts, parts, strict=True):
            means.update(part.means(ellipse))
        x = {b.site: means[b.name] for b in self.structure.blocks}
        return Ellipses(parts, self._at(x, maps, view))

    def _noise(self, key: Array, ellipses: Ellipses, scale: Array) -> White:
        noise = []
        for i, ellipse in enumerate(ellipses.parts):
            mean = ellipse.moments.mean
            white = random.normal(random.fold_in(key, i), mean.shape, mean.dtype)
            noise.append(scale[i].astype(mean.dtype) * white)
        return tuple(noise)

    def _on_ellipses(
        self, key: Array, state: EllipticalState, view: ModelView
    ) -> AtAngle:
        ellipses, blocks = state.ellipses, self.structure.blocks
        other = self._noise(key, ellipses, state.scale)
        means, shifts, moved = {}, {}, {}
        for part, ellipse, noise in zip(
            self._parts, ellipses.parts, other, strict=True
        ):
            shift = part.shift(ellipse, noise)
            shifts.update(shift)
            moved.update(part.moved(ellipse, noise, shift, view))
            means.update(part.means(ellipse))
        here = _Point(
            state.white,
            {b.name: state.z[b.site] - means[b.name] for b in blocks},
            {b.name: state.z[b.name] - ellipses.centres[b.name] for b in blocks},
        )
        there = _Point(other, shifts, moved)

        def at_angle(angle: Array) -> tuple[White, Values, Values]:
            point = jax.tree.map(
                lambda a, b: jnp.cos(angle) * a + jnp.sin(angle) * b, here, there
            )
            centres = ellipses.centres
            x = {b.site: means[b.name] + point.latents[b.name] for b in blocks}
            at = {b.name: centres[b.name] + point.values[b.name] for b in blocks}
            return point.white, x, at

        return at_angle

    def _ratio(self, view: ModelView) -> Ratio:
        def ratio(white: White, x: Values, at: Values, scale: Array) -> Array:
            trace, priors = view.trace(at), view.priors()
            total = minus_log_density(white, scale)
            for block in self.structure.blocks:
                loc, spread = (z.reshape(block.shape) for z in priors[block.name])
                quadratic = -0.5 * jnp.square((x[block.site] - loc) / spread)
                total += scaled_sum(quadratic, trace[block.site]["scale"])
            for site in self.structure.observed:
                if site.route is not Route.CONSTANT:
                    message = trace[site.name]
                    density = message["fn"].log_prob(message["value"])
                    total += scaled_sum(density, message["scale"])
            return jnp.asarray(total)

        return ratio


class _Point(NamedTuple):
    """A point on the ellipses: the whitened coordinates, and, by block, the latents and
    the inputs of the model, relative to their values at the mean."""

    white: White
    latents: Values
    values: Values
