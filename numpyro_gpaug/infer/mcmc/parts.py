# SPDX-License-Identifier: Apache-2.0
"""Parts of the latents of a model that are independent of each other, given Gaussian
factors on the predictors."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
from jax import Array, random

from numpyro_gpaug.gaussians.base import GaussianFactors, times
from numpyro_gpaug.gaussians.dense import AffineMap, Prior
from numpyro_gpaug.gp.conditional import Outputs
from numpyro_gpaug.likelihoods.expectations import Route
from numpyro_gpaug.model.arguments import Arguments, Model
from numpyro_gpaug.model.joint import JointView, ProjectedView
from numpyro_gpaug.model.latents import JOINT, Structure
from numpyro_gpaug.model.structure import Observed

Values = dict[str, Array]
Predictors = Callable[[Array], Array]


class Geometry(NamedTuple):
    """The quantities of a part that depend on hyperparameters alone.

    :param map: the map from latents to predictors; ``None`` for a process, whose
        predictors depend on its function values.
    :param prior: the prior of the latents.
    :param links: transition matrices between its steps.
    :param processes: maps from inducing vectors to function values, by process.
    """

    map: Any
    prior: Any
    links: tuple[Array, ...]
    processes: dict[str, tuple[AffineMap, Outputs]]


class Part(NamedTuple):
    """Latents that have a joint posterior given Gaussian factors on the predictors.

    :param structure: the structure of these latents alone.
    :param process: the process that they are the inducing vectors of, if these are
        independent given the factors. They are then (latents, M), and otherwise (1,
        size).
    """

    structure: Structure
    process: str | None = None

    def view(self, model: Model, arguments: Arguments, values: Values) -> JointView:
        """Return the view of the model by these latents.

        :param model: the model.
        :param arguments: its arguments.
        :param values: values of hyperparameters.
        """
        # The key is fixed, because the initial value of a param may be random and must
        # not change.
        key = random.key(0)
        return ProjectedView(self.structure, model, arguments, values, key)

    def numbers(self, z: Array, geometry: Geometry) -> Values:
        """Return numbers by site."""
        if self.process is not None:
            (site,) = self.structure.sites
            return {site.name: z.reshape(site.shape)}
        white = self.structure.white(z[0], geometry.links)
        return self.structure.split(white)

    def latents(self, numbers: Values, geometry: Geometry) -> Array:
        """Return the latents of numbers by site."""
        if self.process is not None:
            (site,) = self.structure.sites
            own = numbers[site.name].reshape(-1, site.shape[-1])
            return own.astype(self.structure.dtype)
        white = self.structure.joined(numbers).astype(self.structure.dtype)
        return self.structure.linked(white, geometry.links)[None]

    def geometry(self, view: JointView) -> Geometry:
        """Return the quantities that depend on hyperparameters alone."""
        processes = view.processes
        if self.process is None:
            map_ = view.maps()[JOINT]
            map_ = map_.with_gram() if isinstance(map_, AffineMap) else map_
            return Geometry(map_, view.prior, view.links, processes)
        map_, outputs = processes[self.process]
        processes = {self.process: (map_.with_gram(), outputs)}
        return Geometry(None, self.standard, (), processes)

    @property
    def standard(self) -> Prior:
        """The prior of the inducing vectors of a process."""
        (site,) = self.structure.sites
        zeros = jnp.zeros(site.shape, self.structure.dtype)
        zeros = zeros.reshape(-1, site.shape[-1])
        return Prior(zeros, zeros + 1)

    def draw(
        self,
        key: Array,
        z: Array,
        factors: GaussianFactors,
        geometry: Geometry,
        predictors: Predictors,
    ) -> Array:
        """Draw the latents given factors on their predictors.

        :param key: random key.
        :param z: the latents before, which do not change the distribution.
        :param factors: factors of precisions >= 0, (n,).
        :param geometry: from :meth:`geometry`.
        :param predictors: the predictors of a process, given its function values.
        """
        map_, factors, _ = self._on_map(factors, geometry, predictors)
        if isinstance(map_, AffineMap):
            return map_.draw(key, z, factors)
        # The information about differences from the current latents.
        said = map_.information(factors, map_(z))
        q = times(geometry.prior, said, z).moments()
        noise = random.normal(key, (len(z), q.rank), z.dtype)
        return q.mean + q.unwhiten(noise)

    def log_evidence(
        self, factors: GaussianFactors, geometry: Geometry, predictors: Predictors
    ) -> Array:
        """Return ``log E exp(sum(h p - w p^2 / 2))`` under the prior of the latents.

        :param factors: factors of precisions >= 0 on predictors p, (n,).
        :param geometry: from :meth:`geometry`.
        :param predictors: the predictors of a process, given its function values.
        """
        map_, factors, fixed = self._on_map(factors, geometry, predictors)
        h, w = factors
        fixed += (h * map_.offset - 0.5 * w * jnp.square(map_.offset)).sum()
        prior = geometry.prior
        # The prior has mean zero.
        natural = times(prior, map_.information(factors))
        q = natural.moments()
        gain = prior.log_det + q.log_det.sum() + (natural.potential * q.mean).sum()
        return fixed + 0.5 * gain

    def _on_map(
        self, factors: GaussianFactors, geometry: Geometry, predictors: Predictors
    ) -> tuple[Any, GaussianFactors, Array]:
        """Return an affine map of the latents, the factors on its values, and the sum
        of the factors where these are zero."""
        if self.process is None:
            none = jnp.zeros((), factors.potential.dtype)
            return geometry.map, jax.tree.map(lambda x: x[None], factors), none
        map_, outputs = geometry.processes[self.process]
        # Each predictor is affine in one function value.
        zeros = jnp.zeros_like(map_.offset)
        offset, push = jax.linearize(lambda f: predictors(outputs.shifts(f)), zeros)
        pull = jax.linear_transpose(push, zeros)
        h, w = factors
        slanted = h - w * offset
        (potential,), (precision,) = pull(slanted), pull(w * push(zeros + 1))
        fixed = (0.5 * offset * (h + slanted)).sum()
        return map_, GaussianFactors(potential, precision), fixed


def parts_of(structure: Structure, independent: list[str]) -> list[Part]:
    """Return the smallest parts of the latents: each predictor depends on one. Latents
    with a sparse precision are not divided.

    :param structure: the structure of the model.
    :param independent: processes whose latents are independent, too.
    """
    if structure.fields:
        return [Part(structure)]
    groups: list[set[str]] = []
    for names in (set(x) for site in structure.observed for x in site.sources):
        shared = [group for group in groups if group & names]
        apart = [group for group in groups if not group & names]
        groups = [*apart, names.union(*shared)] if names else groups
    rest = {s.name for s in structure.sites}.difference(*groups)
    found = []
    for group in (*groups, rest) if rest else groups:
        process = next((k for k in independent if group == {f"{k}.v"}), None)
        found.append(Part(_alone(structure, group), process))
    return found


def _alone(structure: Structure, names: set[str]) -> Structure:
    """Return the structure of some sites and the predictors that depend on them."""
    sites = tuple(s for s in structure.sites if s.name in names)
    observed = tuple(_reached(site, names) for site in structure.observed)
    return replace(structure.with_sites(sites), observed=observed)


def _reached(site: Observed, names: set[str]) -> Observed:
    pairs = zip(site.latents, site.sources, strict=True)
    kept = [(k, sources) for k, sources in pairs if names.intersection(sources)]
    if not kept:
        return site._replace(latents=(), sources=(), route=Route.CONSTANT)
    latents, sources = zip(*kept, strict=True)
    return site._replace(latents=latents, sources=sources)
