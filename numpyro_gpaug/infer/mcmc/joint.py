# SPDX-License-Identifier: Apache-2.0
"""Gaussian latents given Gaussian sites: joint draws and the latents' evidence.

Latents ``z ~ N(0, I)`` meet Gaussian sites (potential h, precision w, per datum) at
fields ``p = offset + A' z``. All is written with leading axes over independent latents,
and nothing has to be positive definite but by construction: ``I + A diag(w) A'`` or
``I + sqrt(w) A' A sqrt(w)``.
"""

from __future__ import annotations

from typing import NamedTuple

import jax.numpy as jnp
from jax import Array, lax, random


class Design(NamedTuple):
    """Fields that are affine in standardised latents.

    :param offset: fields at latents of zero, (C, n).
    :param projection: A, (1 or C, D, n).
    :param gram: ``A' A``, (1 or C, n, n), where it is no larger than ``A A'``: with it
        a draw takes one factorisation and no product of matrices. ``None`` otherwise.
    """

    offset: Array
    projection: Array
    gram: Array | None

    @classmethod
    def of(cls, offset: Array, projection: Array) -> Design:
        """With the Gram matrix where it pays."""
        size, num = projection.shape[-2:]
        gram = None if num > size else _transposed(projection) @ projection
        return cls(offset, projection, gram)

    def draw(self, key: Array, potential: Array, precision: Array) -> Array:
        """Draws the latents given their sites, (C, D).

        :param key: random key.
        :param potential: of the sites, (C, n).
        :param precision: of the sites, (C, n), >= 0.
        """
        shape = (*self.offset.shape[:-1], self.projection.shape[-2])
        key, error_key = random.split(key)
        noise = random.normal(key, shape, self.projection.dtype)
        if self.gram is None:
            factor, potential = self._posterior(potential, precision)
            white = _solve(factor, potential) + noise
            return _solve(factor, white, transpose=True)
        # Matheron's rule: a draw from the prior, moved by what its fields and their
        # noise lack of the observations (of potential / precision).
        root = jnp.sqrt(precision)
        seen = precision > 0
        residual = potential - precision * self.offset
        scaled = jnp.where(seen, residual / jnp.where(seen, root, 1), 0)
        error = random.normal(error_key, scaled.shape, scaled.dtype)
        lacking = scaled - root * self.fields(noise) - error
        inner = root[..., :, None] * self.gram * root[..., None, :]
        factor = _factor(inner)
        weights = _solve(factor, _solve(factor, lacking), transpose=True)
        return noise + _apply(self.projection, root * weights)

    def fields(self, z: Array) -> Array:
        """``A' z``, (C, n)."""
        return _apply(_transposed(self.projection), z)

    def log_evidence(self, potential: Array, precision: Array) -> Array:
        """``log E exp(sum(potential p - precision p^2 / 2))`` over ``z ~ N(0, I)``.

        :param potential: of the sites, (C, n).
        :param precision: of the sites, (C, n), >= 0.
        """
        fixed = potential * self.offset - 0.5 * precision * jnp.square(self.offset)
        factor, potential = self._posterior(potential, precision)
        gain = 0.5 * jnp.square(_solve(factor, potential)).sum()
        diagonal = jnp.diagonal(factor, axis1=-2, axis2=-1)
        return fixed.sum() + gain - jnp.log(diagonal).sum()

    def _posterior(self, potential: Array, precision: Array) -> tuple[Array, Array]:
        """Factor of the precision of the latents, and their potential."""
        weighted = self.projection * precision[..., None, :]
        factor = _factor(weighted @ _transposed(self.projection))
        residual = potential - precision * self.offset
        return factor, _apply(self.projection, residual)


def _factor(matrix: Array) -> Array:
    """Cholesky factor of ``I + matrix``."""
    eye = jnp.eye(matrix.shape[-1], dtype=matrix.dtype)
    return jnp.linalg.cholesky(eye + matrix, symmetrize_input=False)


def _solve(factor: Array, vector: Array, *, transpose: bool = False) -> Array:
    return lax.linalg.triangular_solve(
        factor, vector[..., None], left_side=True, lower=True, transpose_a=transpose
    )[..., 0]


def _apply(matrix: Array, vector: Array) -> Array:
    return jnp.einsum("...mn,...n->...m", matrix, vector)


def _transposed(matrix: Array) -> Array:
    return jnp.swapaxes(matrix, -1, -2)
