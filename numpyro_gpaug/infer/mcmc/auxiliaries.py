# SPDX-License-Identifier: Apache-2.0
"""Draws of the auxiliaries of observed sites, and the Gaussian factors they give."""

from __future__ import annotations

from collections.abc import Iterable
from typing import Any

import jax
import jax.numpy as jnp
import numpyro.distributions as dist
from jax import Array, random

from numpyro_gpaug.gaussians.base import GaussianFactors
from numpyro_gpaug.likelihoods.augmentation import (
    Augmentation,
    Parameters,
    draw_auxiliaries,
    lookup_augmentation,
)
from numpyro_gpaug.likelihoods.expectations import base_distribution, feasible
from numpyro_gpaug.model.structure import Observed, Trace

Auxiliaries = dict[str, dict[str, Array]]


def draw_factors(
    key: Array, trace: Trace, observed: Iterable[Observed]
) -> tuple[Auxiliaries, GaussianFactors]:
    """Draw the auxiliaries of observed sites. Return their values by site and name, and
    the Gaussian factors that they put on all predictors, (n,).

    :param key: random key.
    :param trace: the trace of the model.
    :param observed: the sites, with the parameters that are predictors.
    """
    drawn, factors = {}, []
    for i, site in enumerate(observed):
        if site.latents:
            aux_key, message = random.fold_in(key, i), trace[site.name]
            drawn[site.name], found = _augmented(aux_key, message, site.latents)
            factors += [jax.tree.map(jnp.ravel, factor) for factor in found]
    none = GaussianFactors(jnp.zeros(0), jnp.zeros(0))
    return drawn, jax.tree.map(lambda *x: jnp.concatenate(x), *factors or [none])


def parameters(trace: Trace, observed: Iterable[Observed]) -> Array:
    """Return all predictors, (n,), as in :func:`draw_factors`."""
    return jnp.concatenate([
        jnp.ravel(getattr(base_distribution(trace[site.name]["fn"]), name))
        for site in observed for name in site.latents
    ] or [jnp.zeros(0)])  # fmt: skip


def needs_auxiliaries(message: dict[str, Any], name: str) -> bool:
    """Whether the Gaussian factors of a parameter depend on auxiliaries.

    :param message: NumPyro's message of the site.
    :param name: the parameter.
    """
    d = base_distribution(message["fn"])
    blocks = augmentation_of(d).gibbs_blocks(d)
    own = next(i for i, block in enumerate(blocks) if name in block)
    return ("aux",) in blocks[:own]


def augmentation_of(d: dist.Distribution) -> Augmentation:
    """Return the augmentation of a distribution that has one."""
    found = lookup_augmentation(type(d))
    assert found is not None
    return found


def _augmented(
    key: Array, message: dict[str, Any], names: tuple[str, ...]
) -> tuple[dict[str, Array], list[GaussianFactors]]:
    """Draw the auxiliaries of a site. Return Gaussian factors for some of its
    parameters, of their shapes.

    :param message: NumPyro's message of the site.
    :param names: the parameters.
    """
    fn = message["fn"]
    d = base_distribution(fn)
    augmentation = augmentation_of(d)
    y = feasible(fn, message["value"])
    # Each datum has its own auxiliaries, even if several data share a latent.
    trailing = 0 if augmentation.latent_axis is None else 1
    given = {k: jnp.asarray(getattr(d, k)) for k in augmentation.latents}
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
    return aux, [
        GaussianFactors(*(shared(part, k) for part in natural[k])) for k in names
    ]


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
