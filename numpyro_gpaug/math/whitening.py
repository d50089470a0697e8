# SPDX-License-Identifier: Apache-2.0
r"""Inverse roots of kernel matrices that are singular to rounding.

``W = L^-1`` with :math:`L L^\top = K + j I` whitens K but for
:math:`W K W^\top = I - R` with :math:`R = j W W^\top`: every eigenvector of K of an
eigenvalue well above j loses the same j, all of which a likelihood of low noise sees.
R is known from W alone, without the cancellation there is in K, so that
:math:`(I - R)^{-1/2} W` is what j spoilt: the first terms of its series leave a share
of :math:`5/8\,(j / \lambda)^3` of an eigenvalue :math:`\lambda \gg j` unexplained. What
is far below j stays unexplained, as in a matrix without it, and the prior of what is
whitened is never larger than it says.
"""

from __future__ import annotations

import math
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax import Array, lax

from numpyro_gpaug.math.linalg import (
    cholesky,
    diagonal,
    inverse_lower,
    lower_half,
    one_by_one,
    precise,
)

# In exact arithmetic every pivot of K + j I is at least j. Pivots below are rounding
# errors of the size of j, which the inverse would amplify.
_LEAST_PIVOT = 0.95
_MOST = 2.0**13
# Eigenvalues of R are at most 1. Sums of rounding errors that all point one way escape
# the pivots and make them larger: the series may grow as it would at this one.
_LARGEST = 3.0


def least_jitter(size: int, dtype: np.dtype | type) -> float:
    """The smallest jitter that is tried, relative to the mean of the diagonal.

    :param size: number of rows M.
    :param dtype: float dtype of the matrix.
    :return: 1e-10 in float64; in float32 ``2.4e-7 sqrt(M)``, about twice the norm of
        what rounding its elements adds to a matrix.
    """
    rounding = 2 * float(jnp.finfo(dtype).eps) * math.sqrt(size)
    return max(rounding, 1e-10) if jnp.dtype(dtype) == jnp.float64 else rounding


@precise
def inverse_root(matrix: Array) -> Array:
    """``V`` with ``V K V' = I`` as far as the dtype resolves K, and no more elsewhere.

    Made from the smallest jitter, of those that double from :func:`least_jitter`, whose
    Cholesky factor is not spoilt by rounding. Its derivative is that of an inverse
    factor, ``-half(V dK V') V``: of the root of K, not of what the jitter makes of it.
    Where noise is near the jitter the two differ by half, and searches that go by this
    one end nearer to float64's optimum.

    :param matrix: K, (..., M, M), symmetric to rounding and positive semi-definite.
    :return: (..., M, M), not triangular; NaN where no jitter makes K positive definite.
    """
    still = lax.stop_gradient(matrix)
    factor, jitter = _factorised(still, diagonal(still).mean(-1))
    inverse = inverse_lower(factor)
    lost = inverse @ (jitter * inverse).mT
    squared = lost @ lost
    # An eigenvalue r of R has r (r - 1) <= |R^2 - R|.
    excess = jnp.sqrt(jnp.square(squared - lost).sum((-2, -1), keepdims=True))
    largest = 0.5 + jnp.sqrt(0.25 + excess)
    share = jnp.minimum(
        1, _series(_LARGEST, _LARGEST**2) / _series(largest, largest**2)
    )
    found = inverse + share * _series(lost, squared) @ inverse
    return as_inverse_root(matrix, found)


@jax.custom_jvp
def as_inverse_root(matrix: Array, inverse: Array) -> Array:
    """An inverse root of a matrix (..., M, M) that was found in some other way, with
    the derivative of :func:`inverse_root`."""
    del matrix
    return inverse


def cholesky_of_sums(matrix: Array, scale: Array) -> Array:
    """Lower factor of a covariance that was made of larger ones by sums and
    differences, with the smallest jitter for which :func:`inverse_root` would take it.

    :param matrix: (..., M, M), symmetric to rounding.
    :param scale: (...), of what it was made of: rounding errors are relative to it.
    :return: (..., M, M); NaN where no jitter makes it positive definite.
    """
    _, jitter = _factorised(*map(lax.stop_gradient, (matrix, scale)))
    return cholesky(matrix + jitter * jnp.eye(matrix.shape[-1], dtype=matrix.dtype))


def _series(first: Any, second: Any) -> Any:
    """``(1 - r)^-1/2 - 1`` to second order, from r and its square."""
    return 0.5 * first + 0.375 * second


@as_inverse_root.defjvp
@precise
def _as_inverse_root_jvp(primals: Any, tangents: Any) -> tuple[Array, Array]:
    tangent, _ = tangents
    inverse = as_inverse_root(*primals)
    return inverse, -lower_half(inverse, tangent) @ inverse


def _factorised(matrix: Array, scale: Array) -> tuple[Array, Array]:
    """The lower factor of ``K + j I`` and j, (..., 1, 1), relative to a scale (...)."""
    least = least_jitter(matrix.shape[-1], matrix.dtype)
    start = jnp.asarray(least, matrix.dtype) * scale[..., None, None]
    start = jnp.broadcast_to(start, (*matrix.shape[:-2], 1, 1))
    single = jnp.vectorize(_first_unspoilt, signature="(m,m),(k,k)->(m,m),(k,k)")
    return one_by_one(single)(matrix, start)


def _first_unspoilt(matrix: Array, least: Array) -> tuple[Array, Array]:
    # Made here: a literal becomes a constant of the loop, and JAX's custom batching
    # does not take constants that a scan under vmap carries along.
    eye = jnp.eye(matrix.shape[-1], dtype=matrix.dtype)

    def spoilt(trial: tuple[Array, Array]) -> Array:
        factor, following = trial
        # Of a matrix that is not positive definite pivots are NaN.
        kept = (jnp.square(factor) >= _LEAST_PIVOT / 2 * following * eye).all()
        return ~kept & (following < 2 * _MOST * least)[0, 0]

    def attempt(trial: tuple[Array, Array]) -> tuple[Array, Array]:
        _, jitter = trial
        # LAPACK reads columns: the transpose of an array of rows needs no copy.
        raised = (matrix + jitter * eye).mT
        return jnp.linalg.cholesky(raised, symmetrize_input=False), 2 * jitter

    factor, following = lax.while_loop(spoilt, attempt, (jnp.zeros_like(matrix), least))
    return factor, following / 2
