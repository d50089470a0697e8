# SPDX-License-Identifier: Apache-2.0
"""Marginals of predictors under Gaussians on the blocks."""

from __future__ import annotations

from collections.abc import Mapping

import jax
import jax.numpy as jnp
import numpyro.distributions as dist

from numpyro_gpaug.distributions.gaussian import BlockGaussian
from numpyro_gpaug.errors import NotConjugateError
from numpyro_gpaug.gaussians.base import Marginals, selected
from numpyro_gpaug.gaussians.blocks import AffineBlocks
from numpyro_gpaug.gaussians.dense import AffineMap, Moments
from numpyro_gpaug.model.view import ModelView


def block_marginals(
    view: ModelView,
    maps: Mapping[str, AffineMap | AffineBlocks],
    moments: dict[str, Moments],
) -> dict[str, Marginals]:
    """Return marginals of blocks under independent Gaussians on them.

    :param view: the view of the model.
    :param maps: affine maps, by block.
    :param moments: moments of all latents of every block, with or without an axis over
        them.
    """
    chosen = view.selected()
    return {
        name: map_.marginals(
            selected(with_latent_axis(moments[name]), chosen.get(name))
        )
        for name, map_ in maps.items()
    }


def with_latent_axis(q: Moments) -> Moments:
    """Return moments with a leading axis over latents, of size 1 for a single one."""
    if q.mean.ndim > 1:
        return q
    return Moments(*(x[None] for x in q))


def moments_of(fn: dist.Distribution) -> Moments:
    """Return moments of a guide's Gaussian.

    :param fn: :class:`~numpyro_gpaug.distributions.BlockGaussian`, independent normals,
        or a multivariate normal (possibly one per latent).
    :raises NotConjugateError: for any other distribution.
    """
    if isinstance(fn, BlockGaussian):
        return fn.moments()
    base = fn
    while isinstance(base, dist.Independent | dist.ExpandedDistribution):
        base = base.base_dist
    if isinstance(base, dist.Normal):
        loc = jnp.broadcast_to(base.loc, fn.event_shape)
        scale = jnp.broadcast_to(base.scale, fn.event_shape)
        whitener = jax.vmap(jnp.diag) if scale.ndim > 1 else jnp.diag
        return Moments(loc, whitener(scale))
    if isinstance(base, dist.MultivariateNormal):
        return BlockGaussian(base.loc, base.scale_tril).moments()
    raise NotConjugateError(
        f"the guide puts a {type(base).__name__} on the inducing values, but the "
        "analytic bound needs a Gaussian. Use AutoSparseGP"
    )
