# SPDX-License-Identifier: Apache-2.0
"""What a sparse process sees of inputs: their projection on its inducing inputs."""

from __future__ import annotations

from typing import Any

import jax.numpy as jnp
from jax import Array

from numpyro_gpaug.math.linalg import precise


@precise
def project(kernel: Any, inducing: Array, inverse_factor: Array, X: Array) -> Array:
    """``A = L^-1 K_ZX``, (1 or C, M, N), with L the lower factor of ``K_ZZ``.

    A product with the inverse factor, not a triangular solve: it costs the same on a
    CPU, runs at full speed on accelerators, and XLA can partition it over devices.

    :param inverse_factor: ``L^-1``, (1 or C, M, M).
    """
    cross = lead(kernel(X, inducing), 2)
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
