# SPDX-License-Identifier: Apache-2.0
"""Matrices whose entries have any joint normal distribution."""

from __future__ import annotations

from typing import Any, ClassVar

import jax.numpy as jnp
import numpyro.distributions as dist
from jax import Array
from numpyro.distributions import constraints


class DenseMatrixNormal(dist.Distribution):
    """The multivariate normal distribution of the entries of a matrix.

    ``predict_y`` of a posterior returns it for observations from NumPyro's
    ``MatrixNormal``. With the latents integrated out the covariance of the entries is
    no longer a Kronecker product.

    :param loc: means, (..., n, p).
    :param scale_tril: lower triangular factor of the covariance of the entries, counted
        row by row, (..., n p, n p).

    **Example**

    >>> import jax.numpy as jnp
    >>> d = DenseMatrixNormal(jnp.zeros((3, 2)), 2 * jnp.eye(6))
    >>> d.event_shape, d.covariance_matrix.shape, float(d.variance[0, 1])
    ((3, 2), (6, 6), 4.0)
    """

    arg_constraints: ClassVar[dict[str, Any]] = {
        "loc": constraints.real_matrix,
        "scale_tril": constraints.lower_cholesky,
    }
    support = constraints.real_matrix
    reparametrized_params: ClassVar[list[str]] = ["loc", "scale_tril"]

    def __init__(self, loc: Array, scale_tril: Array) -> None:
        self.loc, self.scale_tril = loc, scale_tril
        super().__init__(jnp.shape(loc)[:-2], jnp.shape(loc)[-2:])

    @property
    def _entries(self) -> dist.MultivariateNormal:
        return dist.MultivariateNormal(
            _flat(self.loc), scale_tril=self.scale_tril, validate_args=False
        )

    def sample(self, key: Array, sample_shape: tuple[int, ...] = ()) -> Array:
        draws = self._entries.sample(key, sample_shape)
        return draws.reshape(*draws.shape[:-1], *self.loc.shape[-2:])

    def log_prob(self, value: Array) -> Array:
        return self._entries.log_prob(_flat(value))

    @property
    def mean(self) -> Array:
        return self.loc

    @property
    def variance(self) -> Array:
        return self._entries.variance.reshape(self.loc.shape)

    @property
    def covariance_matrix(self) -> Array:
        """The covariance of the entries, counted row by row, (..., n p, n p)."""
        return self._entries.covariance_matrix


def _flat(matrix: Array) -> Array:
    return matrix.reshape(*matrix.shape[:-2], -1)
