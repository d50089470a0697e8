# SPDX-License-Identifier: Apache-2.0
"""Function values of a process given its latents."""

from __future__ import annotations

from functools import cached_property
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
import numpyro
import numpyro.distributions as dist
from jax import Array

from numpyro_gpaug._numpyro import current_residual_policy
from numpyro_gpaug.gaussians.blocks import AffineBlocks, affine_blocks
from numpyro_gpaug.gaussians.dense import AffineMap
from numpyro_gpaug.gp.outputs import Outputs
from numpyro_gpaug.gp.projection import Projected, Whitener, latent_first, lead, project
from numpyro_gpaug.math.blocks import rows_of_blocks
from numpyro_gpaug.math.linalg import precise, safe_sqrt


class FunctionDraw(NamedTuple):
    """The value that a guide gives an inducing vector when it draws the function
    itself.

    :param values: function values at the inputs at which the model calls the process.
    """

    values: Array


class Conditional:
    """Function values at ``X`` given the inducing values; everything is computed
    lazily.

    It is the ``fn`` of the deterministic site that a call of a :class:`GaussianProcess`
    makes.

    :param gp: the :class:`~numpyro_gpaug.GaussianProcess`.
    :param X: inputs, (N, D).
    :param latents: indices of the latents (of the outputs, if the process has
        loadings), or ``None`` for all.
    """

    def __init__(self, gp: Any, X: Array, latents: Array | None) -> None:
        self.gp = gp
        self.X = X
        self.latents = latents

    @property
    def inducing(self) -> Array:
        """The inducing inputs."""
        return self.gp.inducing

    @cached_property
    def projection(self) -> Array:
        """``A = L^-1 K_ZX``, (1 or C, M, N)."""
        return self._projected.projection

    @cached_property
    def prior_variance(self) -> Array:
        """``k(x, x)``, (1 or C, N)."""
        return self.select(lead(self.gp.kernel(self.X), 1))

    @cached_property
    def residual(self) -> Array:
        """Variance of f given v, (1 or C, N)."""
        return self._projected.residual

    @property
    def residual_covariance(self) -> Array:
        """Covariance of f given v, (1 or C, N, N)."""
        prior = self.select(lead(self.gp.kernel(self.X, self.X), 2))
        return prior - jnp.swapaxes(self.projection, -1, -2) @ self.projection

    @property
    def unreached(self) -> Array:
        """Which function values are explained by at most one inducing value."""
        return AffineMap(self.mean, self.projection, self.residual).unshared()

    @cached_property
    def _projected(self) -> Projected:
        return self._project(self.gp.whitener, self.X)

    def _project(self, whitener: Whitener, X: Array) -> Projected:
        """Return the selected latents at some inputs."""
        return Projected(*map(self.select, project(self.gp, whitener, X)))

    @cached_property
    def outputs(self) -> Outputs:
        """The map from latents to function values."""
        gp, size = self.gp, self.X.shape[0]
        return Outputs(gp.loadings, gp.bias, self.latents, gp.num_latents, size)

    @property
    def shape(self) -> tuple[int, ...]:
        """Shape of the function values: (N,), (N, C) or (N, L)."""
        return self.outputs.shape

    @property
    def dtype(self) -> np.dtype:
        """Dtype of the function values."""
        return jnp.result_type(self.X.dtype, self.gp.inducing.dtype)

    @cached_property
    def mean(self) -> Array:
        """The mean function of the latents at ``X``, (latents, N)."""
        mean, outputs = self.gp.mean, self.outputs
        value = jnp.asarray(mean(self.X) if callable(mean) else mean, self.dtype)
        per_latent = value.ndim == 2 or (value.ndim == 1 and not callable(mean))
        if per_latent and outputs.selected is not None:
            value = value[..., jnp.asarray(outputs.selected)]
        if not per_latent and value.ndim and len(outputs.latent_shape) == 2:
            value = value[:, None]
        return latent_first(jnp.broadcast_to(value, outputs.latent_shape))

    @property
    def affine_map(self) -> AffineMap:
        """The affine map from the inducing vector to the latents' values at ``X``."""
        return self.affine_map_through(self.gp.whitener)

    def affine_map_through(self, whitener: Whitener) -> AffineMap:
        """Compute :attr:`affine_map` with a whitener that was computed before."""
        return AffineMap(self.mean, *self._project(whitener, self.X))

    def map_through(self, whitener: Whitener) -> AffineMap | AffineBlocks:
        """Compute :meth:`affine_map_through`, in blocks if there are very many rows."""
        mean, num = self.mean, whitener.inverse.shape[-1]
        # Matrices of inducing inputs are not divided, and these may be all the data.
        size = rows_of_blocks(len(self.X), len(mean) * num, self.dtype, least=num)
        if size is None:
            return self.affine_map_through(whitener)

        def of_rows(rows: tuple[Array, ...]) -> AffineMap:
            X, mean = rows
            return AffineMap(mean.T, *self._project(whitener, X))

        return affine_blocks(of_rows, (self.X, mean.T), size)

    @precise
    def values(self, v: Array, eps: Array | None = None) -> Array:
        """Compute function values from whitened inducing values and residual noise.

        :param v: whitened inducing values, (M,) or (C, M).
        :param eps: standard normal numbers, one per latent and row, or ``None`` for no
            residual.
        """
        # NumPyro draws standard normal variables in JAX's default dtype, whatever the
        # dtype of their loc.
        v = jnp.asarray(v, self.dtype)
        v = self.select(v) if self.gp.num_latents is not None else v[None]
        values = self.mean + jnp.einsum("...mn,...m->...n", self.projection, v)
        if eps is not None:
            # The residual is zero where X equals Z.
            values = values + safe_sqrt(self.residual) * latent_first(eps)
        return self.outputs(values)

    def __call__(self) -> Array:
        if isinstance(self.gp.v, FunctionDraw):
            return self.gp.v.values
        policy = current_residual_policy()
        eps = None
        if policy == "noise":
            key = numpyro.prng_key()
            eps = jax.random.normal(key, self.outputs.latent_shape, self.dtype)
        elif policy == "site":
            shape = self.outputs.latent_shape
            standard = dist.Normal(jnp.zeros(shape, self.dtype), 1)
            standard, name = standard.to_event(len(shape) - 1), self.gp.name
            misplaced = ValueError(
                f'GaussianProcess("{name}"): its residual of with_residual(model, '
                f'"site") has shape {shape}, and the plates around the call are not '
                "those of the rows alone: call it before them, f = gp(X)"
            )
            try:
                eps = numpyro.sample(f"{name}.eps", standard)
            except ValueError as error:  # incompatible shapes
                raise misplaced from error
            if eps.shape != shape:
                raise misplaced
        return self.values(self.gp.v, eps)

    def select(self, per_latent: Array) -> Array:
        """The selected latents of an array with a leading axis 1 or C."""
        return self.outputs.select(per_latent)
