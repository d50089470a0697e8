# SPDX-License-Identifier: Apache-2.0
"""Gibbs sampling of all Gaussian latents of a model, jointly."""

from __future__ import annotations

from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
from jax import Array, random

from numpyro_gpaug.errors import NotConjugateError
from numpyro_gpaug.gaussians.base import GaussianFactors
from numpyro_gpaug.infer.mcmc.block_gibbs import (
    augmented,
    latent_parameters,
    refuse_scaled,
)
from numpyro_gpaug.infer.mcmc.groups import Values
from numpyro_gpaug.infer.mcmc.joint_kernel import JointKernel
from numpyro_gpaug.likelihoods.expectations import Route, base_distribution
from numpyro_gpaug.model.closures import Version
from numpyro_gpaug.model.joint import REGISTERED, JointView
from numpyro_gpaug.model.latents import JOINT

INSTEAD = "EllipticalSlice(model) and MCMC(NUTS(model)) sample it"


class JointAugmentedState(NamedTuple):
    """State of :class:`~numpyro_gpaug.AugmentedGaussian` if all Gaussian latents are
    drawn jointly.

    :param z: latents and deterministic sites.
    :param aux: the auxiliaries on which the draw of the latents is conditioned, by site
        and name.
    :param numbers: the latents in whitened coordinates, (1, size).
    :param map: the map from these to predictors.
    :param prior: the prior of these coordinates.
    :param rng_key: random key.
    :param version: the version of everything the model reads besides its arguments.
    """

    z: Values
    aux: dict[str, dict[str, Array]]
    numbers: Array
    map: Any
    prior: Any
    rng_key: Array
    version: Version | None = None


class JointGibbs(JointKernel):
    """Gibbs sampling of all Gaussian latents jointly, for any structure of their
    Gaussian. Given the auxiliaries, its precision is the sum of the precisions of prior
    and data, and it is factorised as in a fit.

    :param model: a NumPyro model.
    """

    @property
    def _name(self) -> str:
        return "AugmentedGaussian"

    def _check(self, view: JointView) -> None:
        for site in view.structure.observed:
            if site.route is Route.CONSTANT:
                continue
            message = view.message(site.name)
            if site.route not in REGISTERED or not site.augmented:
                cls = type(base_distribution(message["fn"])).__name__
                raise NotConjugateError(
                    f"site {site.name!r}: given auxiliaries, likelihoods with an "
                    "augmentation (numpyro_gpaug.register_augmentation) are Gaussian "
                    "in a parameter that is affine in the latents, such as "
                    f"Bernoulli(logits=eta); this one of {cls} is not. {INSTEAD}"
                )
            refuse_scaled(message, INSTEAD)

    def _first(self, key: Array, values: Values, view: JointView) -> Any:
        key, prior_key = random.split(key)
        structure = self.structure
        white = random.normal(prior_key, (1, structure.size), structure.dtype)
        white = self._started(white, values, view)
        map_ = view.maps()[JOINT]
        numbers = structure.linked(white[0], view.links)[None]

        def drawn() -> dict[str, dict[str, Array]]:
            return self._augmented(random.key(0), map_(numbers), view)[0]

        # Zeros in the place of auxiliaries that no sweep has drawn yet.
        shapes = jax.eval_shape(drawn)
        aux = jax.tree.map(lambda s: jnp.zeros(s.shape, s.dtype), shapes)
        z = self._sites(white, view)
        return JointAugmentedState(z, aux, numbers, map_, view.prior, key)

    def _renewed(self, state: Any, view: JointView) -> Any:
        white = self._white_of(state.z, view)
        numbers = self.structure.linked(white[0], view.links)[None]
        z = self._sites(white, view)
        map_, prior = view.maps()[JOINT], view.prior
        return state._replace(z=z, numbers=numbers, map=map_, prior=prior)

    def _next(self, state: Any, view: JointView) -> Any:
        key, aux_key, draw_key = random.split(state.rng_key, 3)
        numbers, map_ = state.numbers, state.map
        at = map_(numbers)
        aux, factors = self._augmented(aux_key, at, view)
        # What the data say, of deviations from where the latents are.
        said = map_.information(factors, at).moved(numbers)
        q = jax.tree.map(jnp.add, state.prior.natural, said).moments()
        noise = random.normal(draw_key, (1, q.rank), numbers.dtype)
        numbers = q.mean + q.unwhiten(noise)
        white = self.structure.white(numbers[0], view.links)[None]
        z = self._sites(white, view)
        return state._replace(z=z, aux=aux, numbers=numbers, rng_key=key)

    def _augmented(
        self, key: Array, predictors: Array, view: JointView
    ) -> tuple[dict[str, dict[str, Array]], GaussianFactors]:
        """Draw the auxiliaries of all observed sites. Return their values by site and
        name, and the Gaussian factors that they put on the predictors, (1, n)."""
        drawn, factors = {}, []
        for i, (site, value) in enumerate(view.by_site(predictors[0]).items()):
            message = view.message(site)
            (name,) = latent_parameters(message["fn"])
            aux_key = random.fold_in(key, i)
            drawn[site], found = augmented(aux_key, message, {name: value})
            factors.append(jax.tree.map(jnp.ravel, found[name]))
        joined = jax.tree.map(lambda *x: jnp.concatenate(x)[None], *factors)
        return drawn, joined
