# SPDX-License-Identifier: Apache-2.0
"""The map from the values of a process's latents to the function values in a model."""

from __future__ import annotations

from dataclasses import dataclass, field

import jax
import jax.numpy as jnp
import numpy as np
from jax import Array

from numpyro_gpaug.math.arrays import STATIC


@jax.tree_util.register_dataclass
@dataclass(frozen=True)
class Outputs:
    """Function values ``f = h Phi' + b`` of latents ``h``; without loadings, ``f = h``.

    :param loadings: Phi, (K, P), or ``None``.
    :param bias: b, (K,), or ``None``.
    :param latents: indices of latents, (L,), or, with loadings, of outputs, (L,) or (N,
        L) if they differ between rows; ``None`` for all.
    :param num_latents: number of latents of the process; ``None`` for a single one
        without an axis.
    :param size: number of rows N.
    """

    loadings: Array | None
    bias: Array | None
    latents: Array | None
    num_latents: int | None = field(metadata=STATIC)
    size: int = field(metadata=STATIC)

    @property
    def selected(self) -> Array | None:
        """Indices of the selected latents; ``None`` for all."""
        return None if self.loadings is not None else self.latents

    @property
    def latent_shape(self) -> tuple[int, ...]:
        """Shape of the values of the latents, one per row: (N,) or (N, latents)."""
        if self.num_latents is None:
            return (self.size,)
        selected = self.selected
        return (self.size, self.num_latents if selected is None else len(selected))

    @property
    def shape(self) -> tuple[int, ...]:
        """Shape of the function values: (N,), (N, C) or (N, L)."""
        if self.loadings is None:
            return self.latent_shape
        outputs = self.loadings.shape[0]
        return (
            self.size,
            outputs if self.latents is None else np.shape(self.latents)[-1],
        )

    def select(self, per_latent: Array) -> Array:
        """The selected latents of an array with a leading axis 1 or C."""
        if self.selected is None or per_latent.shape[0] == 1:
            return per_latent
        return per_latent[jnp.asarray(self.selected)]

    def __call__(self, latents: Array) -> Array:
        """Return function values, of :attr:`shape`, from the values of the latents.

        :param latents: (latents, N).
        """
        values = self.shifts(latents)
        if self.bias is None:
            return values
        return values + (self.bias if self.latents is None else self.bias[self.latents])

    def shifts(self, latents: Array) -> Array:
        """Return the change of the function values, of :attr:`shape`, for a change of
        the latents.

        :param latents: the change, (latents, N).
        """
        return self._mixed(latents, self.loadings)

    def variances(self, latents: Array) -> Array:
        """Return variances of function values, of :attr:`shape`, from the variances of
        the latents.

        :param latents: variances of the latents, (1 or latents, N).
        """
        squares = None if self.loadings is None else jnp.square(self.loadings)
        return self._mixed(latents, squares)

    def covariances(self, latents: Array) -> Array:
        """Return covariances between rows, per output, (N, N) or (outputs, N, N).

        :param latents: covariances of the latents, (1 or latents, N, N).
        :raises ValueError: if outputs differ between rows.
        """
        if self.num_latents is None:
            return latents[0]
        shape = self.latent_shape[1:] + latents.shape[1:]
        latents = jnp.broadcast_to(latents, shape)
        if self.loadings is None:
            return latents
        if self.latents is not None and self.latents.ndim == 2:
            raise ValueError(
                f"latents of shape {self.latents.shape} must be (L,): covariances "
                "between data need the same output for all of them"
            )
        chosen = slice(None) if self.latents is None else self.latents
        return jnp.tensordot(jnp.square(self.loadings[chosen]), latents, 1)

    def _mixed(self, latents: Array, loadings: Array | None) -> Array:
        if self.num_latents is None:
            return latents[0]
        if loadings is None:
            return jnp.broadcast_to(latents.T, self.shape)
        latents = jnp.broadcast_to(latents, self.latent_shape[::-1])
        if self.latents is None:
            return latents.T @ loadings.T
        chosen = loadings[self.latents]
        if chosen.ndim == 2:
            return latents.T @ chosen.T
        return jnp.einsum("pn,nlp->nl", latents, chosen)
