# SPDX-License-Identifier: Apache-2.0
r"""The projection of a process onto its inducing inputs.

The rounding error of covariances is 6e-8 of the prior variance in float32. With long
lengthscales, that may not be far below the variance of the noise. The data then depend
on differences of function values, whose variances are far smaller. A kernel that states
a constant and the deviation from it (``kernel.constant``, ``kernel.deviation``)
computes these differences without cancellation:
:class:`~numpyro_gpaug.math.whitening.Differenced`. Whitened values are the same as
without it. Derivatives do not need this. They are written so that ``L^-1`` does not
multiply rounding errors of sums over rows.
"""

from __future__ import annotations

from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
from jax import Array, lax

from numpyro_gpaug.gp.kernels._base import constant_of, deviation_of
from numpyro_gpaug.math import linalg
from numpyro_gpaug.math.whitening import Differenced, differenced, inverse_root


class Whitener(NamedTuple):
    """The linear map that whitens inducing values.

    :param inverse: ``L^-1`` of ``K_ZZ``, (1 or C, M, M).
    :param gram: ``K_ZZ``, likewise, with the given jitter if there is one.
    :param values: the factors of ``inverse``, without derivatives, if it was computed
        from differences; otherwise None.
    """

    inverse: Array
    gram: Array
    values: Differenced | None


class Projected(NamedTuple):
    """Function values given inducing values.

    :param projection: ``A = L^-1 K_ZX``, (1 or C, M, N).
    :param residual: ``k(x, x) - |A_i|^2``, (1 or C, N).
    """

    projection: Array
    residual: Array


@linalg.precise
def whitener(gp: Any) -> Whitener:
    """Return the map from the inducing values of a process to standard normal ones.

    :param gp: the process.
    """
    # A given jitter belongs to the covariances in their original form.
    if gp.jitter is None and constant_of(gp.kernel) is not None:
        constant, gram, own = _apart(gp, gp.inducing)
        values = differenced(*map(lax.stop_gradient, (gram, own, constant)))
        gram = constant + gram
        return Whitener(linalg.as_inverse_root(gram, values.root), gram, values)
    gram = lead(gp.kernel(gp.inducing, gp.inducing), 2)
    if gp.jitter is None:
        return Whitener(inverse_root(gram), gram, None)
    gram = linalg.with_jitter(gram, gp.jitter)
    return Whitener(linalg.inverse_cholesky(gram), gram, None)


@linalg.precise
def project(gp: Any, whitener: Whitener, X: Array) -> Projected:
    """Return function values at inputs (N, D) given inducing values.

    It uses a product with the inverse factor, not a triangular solve: the product costs
    the same on a CPU, runs at full speed on accelerators, and can be partitioned over
    devices by XLA.

    :param gp: the process.
    :param whitener: from :func:`whitener`.
    """
    if whitener.values is None:
        cross, variance = lead(gp.kernel(X, gp.inducing), 2), lead(gp.kernel(X), 1)
        found = _product(whitener.inverse, cross)
        left = variance - jnp.square(found).sum(-2)
    else:
        constant, across, own = _apart(gp, X)
        found, left = whitener.values.project(*map(lax.stop_gradient, (across, own)))
        cross, variance = constant + across, constant[..., 0] + own
    projection = _projected(found, *whitener[:2], cross)
    left = _left(left, *whitener[:2], projection, cross, variance)
    return Projected(projection, jnp.maximum(left, 0))


def _apart(gp: Any, X: Array) -> tuple[Array, Array, Array]:
    """Return covariances as a constant (1 or C, 1, 1), and deviations from it of the
    covariances with the inducing values and of the variance, (1 or C, N, M) and (1 or
    C, N)."""
    constant = jnp.asarray(constant_of(gp.kernel), gp.inducing.dtype)
    across = lead(deviation_of(gp.kernel, X, gp.inducing), 2)
    own = lead(deviation_of(gp.kernel, X), 1)
    return lead(constant[..., None, None], 2), across, own


@jax.custom_jvp
def _projected(value: Array, inverse: Array, gram: Array, cross: Array) -> Array:
    """Return ``value``, which is ``A = L^-1 K_ZX``, with its derivative ``L^-1 dK_ZX -
    half(L^-1 dK_ZZ L^-T) A``.

    The chain rule would multiply rounded sums over rows by ``L^-1``, whose entries may
    be large.
    """
    del inverse, gram, cross
    return value


@_projected.defjvp
@linalg.precise
def _projected_jvp(primals: Any, tangents: Any) -> tuple[Array, Array]:
    found, inverse = _projected(*primals), primals[1]
    _, _, gram, cross = tangents
    return found, _product(inverse, cross) - linalg.lower_half(inverse, gram) @ found


@jax.custom_jvp
def _left(
    value: Array, inverse: Array, gram: Array, projection: Array, cross: Array,
    variance: Array,
) -> Array:  # fmt: skip
    """Return ``value``, which is ``k(x, x) - |A_i|^2``, with its derivative.

    It is the variance of ``f(x) - P f(Z)``, smallest at ``P = K_XZ K_ZZ^-1``, so that
    P may be held fixed. The chain rule through A would multiply rounding errors by
    ``L^-1``: with smooth functions and many rows, hyperparameters ended far from the
    optimum.
    """
    del inverse, gram, projection, cross, variance
    return value


@_left.defjvp
@linalg.precise
def _left_jvp(primals: Any, tangents: Any) -> tuple[Array, Array]:
    _, inverse, _, projection, _, _ = primals
    _, _, gram, _, cross, variance = tangents
    weights = inverse.mT @ projection
    moved = gram @ weights - 2 * cross.mT
    return _left(*primals), variance + (weights * moved).sum(-2)


def _product(inverse_factor: Array, cross: Array) -> Array:
    return jnp.einsum("...ij,...nj->...in", inverse_factor, cross)


def residual_variance(prior_variance: Array, projection: Array) -> Array:
    """Return ``k(x, x) - |A_i|^2``. It is a Schur complement, so only rounding can make
    it negative, and the true value is then 0 up to rounding."""
    return jnp.maximum(prior_variance - jnp.square(projection).sum(-2), 0)


def lead(array: Array, ndim: int) -> Array:
    """Add an axis over latents in front of the last ``ndim`` axes of ``array``."""
    return array if array.ndim > ndim else array[None]


def latent_first(values: Array) -> Array:
    """Reshape (N,) or (N, latents) to (latents, N)."""
    return values.T if values.ndim == 2 else values[None]
