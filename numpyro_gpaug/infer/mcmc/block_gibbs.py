# SPDX-License-Identifier: Apache-2.0
"""Gibbs sampling of processes and weight vectors through augmented likelihoods."""

from __future__ import annotations

from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpyro.distributions as dist
from jax import Array, random

from numpyro_gpaug.errors import NotConjugateError
from numpyro_gpaug.gaussians.base import GaussianFactors
from numpyro_gpaug.gaussians.dense import AffineMap
from numpyro_gpaug.infer.mcmc.gaussian_kernel import GaussianKernel
from numpyro_gpaug.infer.mcmc.groups import (
    Factors,
    Group,
    Values,
    draw_group,
    groups_of,
    in_order,
    joint_map,
)
from numpyro_gpaug.likelihoods.augmentation import (
    Parameters,
    draw_auxiliaries,
    lookup_augmentation,
)
from numpyro_gpaug.likelihoods.expectations import base_distribution, feasible
from numpyro_gpaug.model.closures import Version
from numpyro_gpaug.model.view import ModelView

INSTEAD = "EllipticalSlice(model, guide, params) and MCMC(NUTS(model)) sample it"


class AugmentedState(NamedTuple):
    """State of :class:`AugmentedGaussian`.

    :param z: latents and deterministic sites.
    :param aux: the auxiliaries on which the draw of the latents is conditioned, by site
        and name.
    :param maps: maps from inducing vectors to processes at the data.
    :param joint: maps from latents to predictors, one per group of latents drawn
        jointly.
    :param rng_key: random key.
    :param version: the version of everything the model reads besides its arguments.
    """

    z: Values
    aux: dict[str, dict[str, Array]]
    maps: dict[str, AffineMap]
    joint: tuple[AffineMap, ...]
    rng_key: Array
    version: Version | None = None


class BlockGibbs(GaussianKernel):
    """Gibbs sampling of processes and weight vectors, jointly if they share a
    predictor.

    :param model: a NumPyro model.
    """

    _groups: tuple[Group, ...] = ()

    @property
    def _name(self) -> str:
        return "AugmentedGaussian"

    def _check(self, view: ModelView) -> None:
        self._refuse_unaugmented(view)
        self._groups = in_order(groups_of(view), view)

    def _refuse_unaugmented(self, view: ModelView) -> None:
        for site in self.structure.observed:
            message = view.message(site.name)
            cls = type(base_distribution(message["fn"])).__name__
            if site.reason is not None:
                raise NotConjugateError(
                    f"site {site.name!r} is not Gaussian given auxiliaries: "
                    f"{site.reason}. {INSTEAD}"
                )
            if site.latents and not site.augmented:
                raise NotConjugateError(
                    f"site {site.name!r}: no augmentation is registered for {cls} "
                    f"(numpyro_gpaug.register_augmentation). {INSTEAD}"
                )
            if site.latents:
                refuse_scaled(message, INSTEAD)
        for block in self.structure.blocks:
            if view.message(block.site)["scale"] is not None:
                raise NotConjugateError(
                    f"the prior of {block.site!r} is scaled. Drop the scale. {INSTEAD}"
                )

    def _first(self, key: Array, values: Values, view: ModelView) -> Any:
        key, prior_key = random.split(key)
        x = self._drawn_from_prior(prior_key, values, view)
        maps, joint = self._geometry(view)
        at = self._at(x, maps, view)
        aux = self._no_auxiliaries(view, at)
        z = self._sampled(x, at, view)
        return AugmentedState(z, aux, maps, joint, key)

    def _renewed(self, state: Any, view: ModelView) -> Any:
        maps, joint = self._geometry(view)
        at = self._at(state.z, maps, view)
        x = {b.site: state.z[b.site] for b in self.structure.blocks}
        z = self._sampled(x, at, view)
        return state._replace(z=z, maps=maps, joint=joint)

    def _next(self, state: Any, view: ModelView) -> Any:
        key, *keys = random.split(state.rng_key, 1 + len(self._groups))
        x = {b.site: state.z[b.site] for b in self.structure.blocks}
        at = {b.name: state.z[b.name] for b in self.structure.blocks}
        aux = dict(state.aux)
        # Auxiliaries are drawn again for each group, so that a sweep is a sequence of
        # moves each of which leaves the posterior of the latents as it is.
        for group, map_, group_key in zip(self._groups, state.joint, keys, strict=True):
            aux_key, draw_key = random.split(group_key)
            drawn, factors = self._factors(aux_key, group.sites, view, at)
            aux.update(drawn)
            x.update(draw_group(draw_key, group, map_, factors, view))
            at = self._at(x, state.maps, view)
        return state._replace(z=self._sampled(x, at, view), aux=aux, rng_key=key)

    def _geometry(
        self, view: ModelView
    ) -> tuple[dict[str, AffineMap], tuple[AffineMap, ...]]:
        maps = self._maps(view)
        joint = tuple(
            maps[g.blocks[0].name] if g.batched else joint_map(g, view)
            for g in self._groups
        )
        return maps, tuple(map_.with_gram() for map_ in joint)

    def _no_auxiliaries(
        self, view: ModelView, at: Values
    ) -> dict[str, dict[str, Array]]:
        """Return zeros in place of auxiliaries that no sweep has drawn yet."""

        def drawn() -> dict[str, dict[str, Array]]:
            return self._factors(random.key(0), self._observed, view, at)[0]

        shapes = jax.eval_shape(drawn)
        return jax.tree.map(lambda s: jnp.zeros(s.shape, s.dtype), shapes)

    @property
    def _observed(self) -> tuple[str, ...]:
        """The observed sites that depend on latents."""
        return tuple(dict.fromkeys(s for group in self._groups for s in group.sites))

    def _factors(
        self, key: Array, sites: tuple[str, ...], view: ModelView, at: Values
    ) -> tuple[dict[str, dict[str, Array]], Factors]:
        """Draw the auxiliaries of observed sites. Return their values by site, and the
        Gaussian factors that they put on the predictors."""
        trace = view.trace(at)
        drawn: dict[str, dict[str, Array]] = {}
        factors: Factors = {}
        for i, site in enumerate(sites):
            message = trace[site]
            given = latent_parameters(message["fn"])
            aux_key = random.fold_in(key, i)
            drawn[site], found = augmented(aux_key, message, given)
            factors.update({f"{site}/{k}": x for k, x in found.items()})
        return drawn, factors


def refuse_scaled(message: dict[str, Any], instead: str) -> None:
    """Raise for an observed site whose log-density is scaled.

    :param message: NumPyro's message of the site.
    :param instead: the advice on another sampler.
    """
    if message["scale"] is not None:
        cls = type(base_distribution(message["fn"])).__name__
        raise NotConjugateError(
            f"site {message['name']!r} is scaled, and a power of {cls} has no "
            f"augmentation. Drop the scale. {instead}"
        )


def latent_parameters(fn: dist.Distribution) -> Parameters:
    """Return the parameters of an augmented likelihood that depend on latents."""
    d = base_distribution(fn)
    augmentation = lookup_augmentation(type(d))
    assert augmentation is not None
    return {k: jnp.asarray(getattr(d, k)) for k in augmentation.latents}


def augmented(
    key: Array, message: dict[str, Any], given: Parameters
) -> tuple[dict[str, Array], Factors]:
    """Draw the auxiliaries of a site. Return Gaussian factors for each parameter that
    depends on a latent, of its shape.

    :param message: NumPyro's message of the site.
    :param given: values of those parameters.
    """
    fn = message["fn"]
    d = base_distribution(fn)
    augmentation = lookup_augmentation(type(d))
    assert augmentation is not None
    y = feasible(fn, message["value"])
    # Every datum has auxiliaries of its own, even where several share a latent.
    trailing = 0 if augmentation.latent_axis is None else 1
    f: Parameters = {
        k: jnp.broadcast_to(x, fn.shape() + x.shape[x.ndim - trailing :])
        for k, x in given.items()
    }
    aux = draw_auxiliaries(key, augmentation.conditional(d, y, f))
    seen = _seen(fn)
    seen = seen.reshape(seen.shape + (1,) * trailing)

    def shared(part: Array, k: str) -> Array:
        part = jnp.broadcast_to(jnp.where(seen, part, 0), f[k].shape)
        return _summed(jnp.asarray(part, given[k].dtype), given[k].shape)

    natural = augmentation.natural(d, y, aux, f)
    return aux, {
        k: GaussianFactors(shared(h, k), shared(w, k)) for k, (h, w) in natural.items()
    }


def _seen(fn: dist.Distribution) -> Array:
    """Return the mask of the data, broadcast against one value per observation."""
    if isinstance(fn, dist.MaskedDistribution):
        mask = jnp.asarray(fn._mask)
        return mask.reshape(mask.shape + (1,) * fn.event_dim) & _seen(fn.base_dist)
    if isinstance(fn, dist.Independent | dist.ExpandedDistribution):
        return _seen(fn.base_dist)
    return jnp.array(True)


def _summed(value: Array, shape: tuple[int, ...]) -> Array:
    """Sum ``value`` over the axes along which an array of ``shape`` is repeated."""
    extra = value.ndim - len(shape)
    repeated = [
        i + extra
        for i, size in enumerate(shape)
        if size == 1 and value.shape[i + extra] > 1
    ]
    return value.sum((*range(extra), *repeated)).reshape(shape)
