# SPDX-License-Identifier: Apache-2.0
"""Squared Euclidean distances between the rows of two arrays."""

from __future__ import annotations

from collections.abc import Callable

import jax
import jax.numpy as jnp

from ._base import matmul

# With at most this many columns, differences cost no more than a matrix product. They
# do not cancel in float32 if the lengthscale is short relative to the spread of the
# inputs.
PAIRWISE_COLUMNS = 8


def centre(Z: jax.Array) -> jax.Array:
    """Return the mean row of ``Z`` as a constant."""
    # One centre for all leading axes, else X would be repeated along them. Distances
    # do not depend on it, so neither does the gradient.
    return jax.lax.stop_gradient(jnp.mean(Z, axis=tuple(range(Z.ndim - 1))))


def pairwise_form(
    X: jax.Array,
    Z: jax.Array,
    lengthscale: jax.Array | None,
    length: Callable[[jax.Array], jax.Array],
) -> jax.Array:
    """Sum ``(length(x_d - z_d) / lengthscale_d)^2`` over the columns d."""

    # A loop over columns, recomputed for the gradient, never holds an (N, M, D) array;
    # one array for all columns is several times larger and slower.
    @jax.checkpoint
    def total(X: jax.Array, Z: jax.Array, weights: jax.Array | None) -> jax.Array:
        def column(d: int) -> jax.Array:
            squared = jnp.square(length(X[..., :, None, d] - Z[..., None, :, d]))
            return squared if weights is None else squared * weights[..., d, None, None]

        return sum(map(column, range(1, X.shape[-1])), column(0))

    weights = None if lengthscale is None else 1 / jnp.square(lengthscale)
    return total(X, Z, weights)


def matmul_form(
    X: jax.Array, Z: jax.Array, lengthscale: jax.Array | None, same: bool
) -> jax.Array:
    """Sum ``((x_d - z_d) / lengthscale_d)^2`` over the columns d."""
    origin = centre(Z)
    X, Z = X - origin, Z - origin
    if lengthscale is None:
        weighted = Z
        X_norms = jnp.sum(jnp.square(X), -1, keepdims=True)
    else:
        # Weights on one side only leave X without the axis of latents.
        weights = 1 / jnp.square(lengthscale)
        weighted = Z * weights[..., None, :]
        X_norms = matmul(jnp.square(X), weights[..., None])
    Z_norms = jnp.sum(Z * weighted, -1)[..., None, :]
    inner = matmul(X, weighted.mT)
    squared = jnp.maximum(X_norms + Z_norms - 2 * inner, 0)
    if same:
        squared = jnp.where(jnp.eye(X.shape[-2], dtype=bool), 0, squared)
    return squared
