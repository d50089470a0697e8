# SPDX-License-Identifier: Apache-2.0
"""Function values of a process given its latents, and the map from the values of
latents to the function values in a model."""

from __future__ import annotations

from dataclasses import dataclass, field
from functools import cached_property
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
import numpyro
import numpyro.distributions as dist
from jax import Array
from numpyro import handlers

from numpyro_gpaug._numpyro import current_residual_policy
from numpyro_gpaug.gaussians.dense import AffineBlocks, AffineMap, affine_blocks
from numpyro_gpaug.gp.projection import Projected, Whitener, latent_first, lead, project
from numpyro_gpaug.math.arrays import STATIC
from numpyro_gpaug.math.blocks import rows_of_blocks
from numpyro_gpaug.math.linalg import precise, safe_sqrt


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
        chosen = self.latents
        return self.size, len(self.loadings) if chosen is None else np.shape(chosen)[-1]

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


def _ends(Z: Array, rows: int) -> Array:
    """Return the first and the last inducing input, alternating in a number of rows."""
    return jnp.take(Z, -(jnp.arange(rows) % 2), max(Z.ndim - 2, 0))


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
    @precise
    def marks(self) -> tuple[Array, ...]:
        """The inducing inputs, and the covariances of the first and the last with all:
        numbers that change with the prior of the inducing values."""
        Z = self.inducing
        return Z, self.gp.kernel(_ends(Z, 2), Z)

    @property
    def prior(self) -> tuple[Array, ...]:
        """:attr:`marks`, and the mean at the first and the last inducing input."""
        return *self.marks, jnp.asarray(self._mean_at_ends(), self.dtype)

    def _mean_at_ends(self) -> Array:
        mean = self.gp.mean
        if not callable(mean):
            return jnp.stack([mean, mean])
        # A function of rows of its own, which ignores its inputs, has another number.
        rows = len(self.X) + 1
        with handlers.block(), handlers.seed(rng_seed=0):
            try:
                found = mean(_ends(self.inducing, rows))
                return jnp.broadcast_to(found, (rows, *jnp.shape(found)[1:]))[:2]
            # Such a function may raise anything. Its mean is then not compared.
            except Exception:
                return jnp.zeros(2)

    @property
    def unreached(self) -> Array:
        """Whether at most one inducing value explains each function value."""
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
                f'GaussianProcess("{name}"): with_residual(model, "site") makes a site '
                f"of shape {shape}, and the call is in other plates than the plate of "
                "the rows. Call the process before them, f = gp(X)"
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
