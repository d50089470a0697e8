# SPDX-License-Identifier: Apache-2.0
"""Gaussian blocks where they meet the likelihood: their fields and marginals."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any, NamedTuple

import jax
import jax.numpy as jnp
import numpyro.distributions as dist
from jax import Array

from numpyro_gpaug.distributions.gaussian import BlockGaussian
from numpyro_gpaug.errors import NotConjugateError
from numpyro_gpaug.math.linalg import Moments

if TYPE_CHECKING:
    from numpyro_gpaug.model.view import BoundProblem


class Field(NamedTuple):
    """Where a block meets the likelihood: values linear in the block, per datum.

    A Gaussian process meets it at its function values; a weight vector at each
    predictor it reaches, so its fields are a dict over ``"site/parameter"``.

    :param offset: the part that does not depend on the block, (latents, N).
    :param projection: A, with ``field = offset + A' v``, (1 or latents, M, N).
    :param residual: variance given the block, (1 or latents, N).
    """

    offset: Array
    projection: Array
    residual: Array


class Marginals(NamedTuple):
    """Means and variances at a field, (latents, N)."""

    mean: Array
    variance: Array


def marginals(field: Field, q: Moments) -> Marginals:
    """Mean and variance at a field under a Gaussian on its block.

    The variance is a sum of squares plus the residual: positive by construction.

    :param field: the field.
    :param q: moments of the block, with a leading axis over latents.
    """
    mean = field.offset + jnp.einsum("...mn,...m->...n", field.projection, q.mean)
    spread = jnp.square(q.whitener @ field.projection).sum(-2)
    return Marginals(mean, field.residual + spread)


def chosen(q: Moments, latents: Array | None) -> Moments:
    """Moments of the latents a process was called for; all of them for ``None``."""
    if latents is None:
        return q
    return Moments(*(x[jnp.asarray(latents)] for x in q))


def field_marginals(
    problem: BoundProblem, fields: dict[str, Any], moments: dict[str, Moments]
) -> dict[str, Any]:
    """:class:`Marginals` at the field of every block."""
    found: dict[str, Any] = {}
    latents = problem.latents()
    for name, field in fields.items():
        q = chosen(with_latent_axis(moments[name]), latents.get(name))
        if isinstance(field, dict):
            found[name] = {k: marginals(f, q) for k, f in field.items()}
        else:
            found[name] = marginals(field, q)
    return found


def with_latent_axis(q: Moments) -> Moments:
    """Moments with a leading axis over latents, of size 1 for a single one."""
    if q.mean.ndim > 1:
        return q
    return Moments(*(x[None] for x in q))


def moments_of(fn: dist.Distribution) -> Moments:
    """Moments of a guide's Gaussian.

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
        return Moments(loc, whitener(scale), 2 * jnp.log(scale).sum(-1))
    if isinstance(base, dist.MultivariateNormal):
        return BlockGaussian(base.loc, base.scale_tril).moments()
    raise NotConjugateError(
        f"the guide puts a {type(base).__name__} on the inducing values; the analytic "
        "bound needs a Gaussian: use AutoSparseGP"
    )
