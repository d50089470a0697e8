# SPDX-License-Identifier: Apache-2.0
"""Arguments of a Gaussian process as arrays, and errors for wrong shapes."""

from __future__ import annotations

from typing import Any

import jax.numpy as jnp
from jax import Array


def as_inputs(X: Array, name: str) -> Array:
    """Return inputs as floats.

    :param X: inputs.
    :param name: the name of the argument.
    :raises ValueError: for an empty array, or another number of axes.
    """
    X = jnp.asarray(X)
    if X.ndim not in (1, 2, 3) or 0 in X.shape:
        raise ValueError(
            f"{name} has shape {X.shape}; expected a non-empty array (rows, columns)"
        )
    return X if jnp.issubdtype(X.dtype, jnp.floating) else X.astype(float)


def as_loadings(
    loadings: Any, bias: Any, num_latents: int | None
) -> tuple[Array | None, Array | None]:
    """Return loadings and bias as arrays, if there are any.

    :param loadings: loadings of outputs on latents.
    :param bias: bias of outputs.
    :param num_latents: the number of latents, if given.
    :raises ValueError: for other shapes, and a bias without loadings.
    """
    if loadings is None:
        if bias is not None:
            raise ValueError("bias= needs loadings=. For a single output pass mean=")
        return None, None
    loadings = jnp.asarray(loadings)
    if loadings.ndim != 2 or num_latents not in (None, loadings.shape[1]):
        raise ValueError(
            f"loadings has shape {loadings.shape}; expected (outputs, latents)"
            + ("" if num_latents is None else f" with num_latents={num_latents}")
        )
    if bias is not None:
        bias = jnp.asarray(bias)
        if bias.shape != loadings.shape[:1]:
            raise ValueError(
                f"bias has shape {bias.shape}; expected one per output, "
                f"{loadings.shape[:1]}"
            )
    return loadings, bias


def columns(X: Array) -> int:
    """Return the number of columns of inputs; one for scalar inputs."""
    return 1 if X.ndim == 1 else X.shape[-1]
