# SPDX-License-Identifier: Apache-2.0
r"""What a sparse process sees of inputs: their projection on its inducing inputs.

A dtype resolves covariances to a share of the prior variance, 6e-8 in float32. Where
that is not far below the variance of the noise, as where lengthscales are long, what
counts is how function values differ, and their differences vary far less than they do.
A kernel that is a constant c and a deviation D from it that does not cancel
(``kernel.constant``, ``kernel.deviation``) knows these: given the first inducing value
the covariance of two function values is

.. math::

    k(x, z) - \frac{k(x, z_0)\, k(z_0, z)}{k(z_0, z_0)}
    = D_{xz} - D_{x0} - t_z\, k(x, z_0), \qquad
    t_z = \frac{D_{0z} - D_{00}}{c + D_{00}},

where no term is larger than deviations are. It is the first step of a Cholesky
factorisation, so that whitened values remain what they are without it. Derivatives need
no such care, and are those of ``L^-1 K_ZX`` as it is written.
"""

from __future__ import annotations

from typing import Any, NamedTuple

import jax.numpy as jnp
from jax import Array, lax

from numpyro_gpaug.gp.kernels._base import constant_of, deviation_of
from numpyro_gpaug.math.linalg import inverse_cholesky, precise, valued, with_jitter
from numpyro_gpaug.math.whitening import as_inverse_root, inverse_root

# Units of the first inducing value: jitter is relative to the mean of a diagonal, most
# of which would be its variance.
_UNITS = 1 / 4


class Whitener(NamedTuple):
    """What whitens inducing values.

    :param inverse: ``L^-1`` of ``K_ZZ``, (1 or C, M, M).
    :param given: of their covariances given the first one, whose derivative is not
        looked at; None if these are not known.
    """

    inverse: Array
    given: Array | None


class Projected(NamedTuple):
    """Function values given inducing values.

    :param projection: ``A = L^-1 K_ZX``, (1 or C, M, N).
    :param residual: ``k(x, x) - |A_i|^2``, (1 or C, N).
    """

    projection: Array
    residual: Array


@precise
def whitener(gp: Any) -> Whitener:
    """From the inducing values of a process to standard normal ones.

    :param gp: the process.
    """
    # A jitter that is given is one of the covariances as they are.
    if gp.jitter is None and constant_of(gp.kernel) is not None:
        return _Pivoted(gp).whitener()
    gram = lead(gp.kernel(gp.inducing, gp.inducing), 2)
    if gp.jitter is None:
        return Whitener(inverse_root(gram), None)
    return Whitener(inverse_cholesky(with_jitter(gram, gp.jitter)), None)


@precise
def project(gp: Any, whitener: Whitener, X: Array) -> Projected:
    """Function values at inputs (N, D) given inducing values.

    A product with the inverse factor, not a triangular solve: it costs the same on a
    CPU, runs at full speed on accelerators, and XLA can partition it over devices.

    :param gp: the process.
    :param whitener: of :func:`whitener`.
    """
    inverse, given = whitener
    if given is not None:
        return _Pivoted(gp).project(inverse, given, X)
    cross, variance = lead(gp.kernel(X, gp.inducing), 2), lead(gp.kernel(X), 1)
    projection = _product(inverse, cross)
    return Projected(projection, residual_variance(variance, projection))


class _Pivoted:
    """Covariances given the first inducing value, as values without derivatives, beside
    covariances as they are."""

    def __init__(self, gp: Any) -> None:
        self._kernel, self._inducing = gp.kernel, gp.inducing
        constant = jnp.asarray(constant_of(gp.kernel), gp.inducing.dtype)
        self._constant = lead(constant[..., None, None], 2)
        self._gram = self._deviation(gp.inducing)
        self._first = jnp.arange(self._gram.shape[-1]) == 0
        across = lax.stop_gradient(self._gram[..., :1, :])
        self._own = across[..., :1]
        self._variance = lax.stop_gradient(self._constant) + self._own
        self._slopes = (across - self._own) / self._variance

    def whitener(self) -> Whitener:
        apart = jnp.where(self._first, _UNITS**2 * self._variance, 0)
        gram = jnp.where(self._first[:, None], apart, self._given(self._gram)[0])
        given = inverse_root(gram)
        # In units of its own, less what the first one says of the others.
        slopes = 1 + self._slopes[..., 0, :]
        column = -jnp.matvec(given, jnp.where(self._first, -_UNITS, slopes))
        inverse = jnp.where(self._first, column[..., None], given)
        return Whitener(as_inverse_root(self._constant + self._gram, inverse), given)

    def project(self, inverse: Array, given: Array, X: Array) -> Projected:
        deviation = self._deviation(X)
        rest, across, shared = self._given(deviation)
        projection = valued(
            _product(inverse, self._constant + deviation),
            _product(given, jnp.where(self._first, _UNITS * shared, rest)),
        )
        own = lead(deviation_of(self._kernel, X), 1)
        slopes = (across - self._own) / self._variance
        left = valued(
            self._constant[..., 0] + own - jnp.square(projection[..., 0, :]),
            own - (across + slopes * shared)[..., 0],
        )
        return Projected(projection, residual_variance(left, projection[..., 1:, :]))

    def _given(self, deviation: Array) -> tuple[Array, Array, Array]:
        """From ``D_xz``: covariances given the first, ``D_x0`` and ``k(x, z_0)``."""
        deviation = lax.stop_gradient(deviation)
        across = deviation[..., :1]
        shared = self._variance - self._own + across
        return (deviation - across) - self._slopes * shared, across, shared

    def _deviation(self, X: Array) -> Array:
        return lead(deviation_of(self._kernel, X, self._inducing), 2)


def _product(inverse_factor: Array, cross: Array) -> Array:
    return jnp.einsum("...ij,...nj->...in", inverse_factor, cross)


def residual_variance(prior_variance: Array, projection: Array) -> Array:
    """``k(x, x) - |A_i|^2``: a Schur complement, so only rounding can make it negative,
    and the true value is then 0 to rounding."""
    return jnp.maximum(prior_variance - jnp.square(projection).sum(-2), 0)


def lead(array: Array, ndim: int) -> Array:
    """``array`` with an axis over latents in front of its last ``ndim``."""
    return array if array.ndim > ndim else array[None]


def latent_first(values: Array) -> Array:
    """From (N,) or (N, latents) to (latents, N)."""
    return values.T if values.ndim == 2 else values[None]
