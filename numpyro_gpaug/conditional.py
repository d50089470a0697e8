# SPDX-License-Identifier: Apache-2.0
"""The law of function values given the inducing values of a process."""

from __future__ import annotations

from functools import cached_property
from typing import TYPE_CHECKING, Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
import numpyro
import numpyro.distributions as dist
from jax import Array

from numpyro_gpaug._numpyro import current_residual_policy
from numpyro_gpaug.linalg import safe_sqrt, solve_lower

if TYPE_CHECKING:
    from numpyro_gpaug.process import GaussianProcess


class FunctionDraw(NamedTuple):
    """What a guide fills in for an inducing vector when it draws the function itself.

    :param values: function values where the model calls the process.
    """

    values: Array


class Conditional:
    """The law of function values at ``X`` given the inducing values; everything lazy.

    It is the ``fn`` of the deterministic site a :class:`GaussianProcess` call makes.

    :param gp: the process.
    :param X: inputs, (N, D).
    :param latents: indices of the latents (of the outputs, if the process has
        loadings), or ``None`` for all.
    """

    def __init__(self, gp: GaussianProcess, X: Array, latents: Array | None) -> None:
        self.gp = gp
        self.X = X
        self.latents = latents

    @cached_property
    def projection(self) -> Array:
        """``A = L^-1 K_ZX``, (1 or C, M, N)."""
        return self.projection_through(self.gp.cholesky)

    def projection_through(self, factor: Array) -> Array:
        """``A`` from a factor of ``K_ZZ`` computed before, (1 or C, M, M)."""
        gp = self.gp
        return self.select(project(gp.kernel, gp.inducing, factor, self.X))

    @cached_property
    def prior_variance(self) -> Array:
        """``k(x, x)``, (1 or C, N)."""
        return self.select(lead(self.gp.kernel(self.X), 1))

    @property
    def prior_covariance(self) -> Array:
        """``k(X, X)``, (1 or C, N, N)."""
        return self.select(lead(self.gp.kernel(self.X, self.X), 2))

    @cached_property
    def residual(self) -> Array:
        """Variance of f given v, (1 or C, N)."""
        return residual_variance(self.prior_variance, self.projection)

    @property
    def rows(self) -> Array | None:
        """Which of the process's latents are looked at; ``None`` for all."""
        return None if self.gp.loadings is not None else self.latents

    @property
    def latent_shape(self) -> tuple[int, ...]:
        """Shape of the values of the latents, one per datum: (N,) or (N, latents)."""
        size, number = self.X.shape[0], self.gp.num_latents
        if number is None:
            return (size,)
        return (size, number if self.rows is None else len(self.rows))

    @property
    def shape(self) -> tuple[int, ...]:
        """Shape of the function values: (N,), (N, C) or (N, L)."""
        if self.gp.loadings is None:
            return self.latent_shape
        size, outputs = self.X.shape[0], self.gp.loadings.shape[0]
        return (size, outputs if self.latents is None else np.shape(self.latents)[-1])

    @property
    def dtype(self) -> np.dtype:
        """Dtype of the function values."""
        return jnp.result_type(self.X.dtype, self.gp.inducing.dtype)

    @cached_property
    def mean(self) -> Array:
        """The mean function of the latents at ``X``, (latents, N)."""
        mean = self.gp.mean
        value = jnp.asarray(mean(self.X) if callable(mean) else mean, self.dtype)
        per_latent = value.ndim == 2 or (value.ndim == 1 and not callable(mean))
        if per_latent and self.rows is not None:
            value = value[..., jnp.asarray(self.rows)]
        if not per_latent and value.ndim and len(self.latent_shape) == 2:
            value = value[:, None]
        return latent_first(jnp.broadcast_to(value, self.latent_shape))

    def values(self, v: Array, eps: Array | None = None) -> Array:
        """Function values from whitened inducing values and residual noise.

        :param v: (M,) or (C, M).
        :param eps: standard normal of :attr:`latent_shape`, or ``None`` for no
            residual.
        """
        # NumPyro draws standard normals in JAX's default dtype, whatever their loc's.
        v = jnp.asarray(v, self.dtype)
        v = self.select(v) if self.gp.num_latents is not None else v[None]
        values = self.mean + jnp.einsum("...mn,...m->...n", self.projection, v)
        if eps is not None:
            # The residual is 0 where X is Z.
            values = values + safe_sqrt(self.residual) * latent_first(eps)
        return self.outputs(values)

    def outputs(self, latents: Array) -> Array:
        """Function values, of :attr:`shape`, from those of the latents.

        :param latents: (latents, N).
        """
        values, bias = self.shifts(latents), self.gp.bias
        if bias is None:
            return values
        return values + (bias if self.latents is None else bias[self.latents])

    def shifts(self, latents: Array) -> Array:
        """How function values move, of :attr:`shape`, as the latents move by so much.

        :param latents: (latents, N).
        """
        return self._mixed(latents, self.gp.loadings)

    def output_variances(self, latents: Array) -> Array:
        """Variances of function values, of :attr:`shape`, from those of the latents.

        :param latents: (1 or latents, N).
        """
        gp = self.gp
        squares = None if gp.loadings is None else jnp.square(gp.loadings)
        return self._mixed(latents, squares)

    def output_covariances(self, latents: Array) -> Array:
        """Covariances between data, per output, (N, N) or (outputs, N, N).

        :param latents: those of the latents, (1 or latents, N, N).
        :raises ValueError: if every row has outputs of its own.
        """
        if self.gp.num_latents is None:
            return latents[0]
        shape = self.latent_shape[1:] + latents.shape[1:]
        latents = jnp.broadcast_to(latents, shape)
        if self.gp.loadings is None:
            return latents
        if self.latents is not None and self.latents.ndim == 2:
            raise ValueError(
                f"latents of shape {self.latents.shape}: covariances between data are "
                "those of one and the same output, pass (L,)"
            )
        chosen = slice(None) if self.latents is None else self.latents
        return jnp.tensordot(jnp.square(self.gp.loadings[chosen]), latents, 1)

    def _mixed(self, latents: Array, loadings: Array | None) -> Array:
        if self.gp.num_latents is None:
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

    def __call__(self) -> Array:
        if isinstance(self.gp.v, FunctionDraw):
            return self.gp.v.values
        policy = current_residual_policy()
        eps = None
        if policy == "noise":
            key = numpyro.prng_key()
            eps = jax.random.normal(key, self.latent_shape, self.dtype)
        elif policy == "site":
            standard = dist.Normal(jnp.zeros(self.latent_shape, self.dtype), 1)
            eps = numpyro.sample(
                f"{self.gp.name}.eps", standard.to_event(len(self.latent_shape) - 1)
            )
        return self.values(self.gp.v, eps)

    def select(self, per_latent: Array) -> Array:
        """The chosen latents of an array with a leading axis 1 or C."""
        if self.rows is None or per_latent.shape[0] == 1:
            return per_latent
        return per_latent[jnp.asarray(self.rows)]


def project(kernel: Any, inducing: Array, factor: Array, X: Array) -> Array:
    """``A = L^-1 K_ZX``, (1 or C, M, N), from the lower factor of ``K_ZZ``."""
    cross = lead(kernel(X, inducing), 2)
    return solve_lower(factor, jnp.swapaxes(cross, -1, -2))


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
