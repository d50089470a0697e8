# SPDX-License-Identifier: Apache-2.0
"""Linear functions."""

from __future__ import annotations

import jax
import jax.numpy as jnp
from jax.typing import ArrayLike

from ._base import Matrix, matmul, pytree


@pytree
class Linear(Matrix):
    r"""Linear functions through the origin.

    .. math:: k(x, z) = \sigma^2 \sum_d x_d z_d

    :param variance: :math:`\sigma^2`, scalar or ``(C,)``.

    .. doctest::

        >>> import jax.numpy as jnp
        >>> from numpyro_gpaug.kernels import Linear
        >>> print((Linear(2.0) + 1.0)(jnp.array([1.0, 2.0])))
        [3. 9.]
    """

    variance: ArrayLike = 1.0

    def _covariance(self, X: jax.Array, Z: jax.Array, same: bool) -> jax.Array:
        del same
        product = matmul(X, Z.mT)
        return self._over_pairs("variance", X.dtype) * product

    def _diagonal(self, X: jax.Array) -> jax.Array:
        squared = jnp.sum(jnp.square(X), -1)
        return self._value("variance", X.dtype)[..., None] * squared
