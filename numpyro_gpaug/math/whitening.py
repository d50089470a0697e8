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
from functools import partial
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax import Array, lax

from numpyro_gpaug.math.linalg import (
    diagonal,
    inverse_lower,
    lower_half,
    one_by_one,
)

# In exact arithmetic every pivot of K + j I is at least j. Pivots below are rounding
# errors of the size of j, which the inverse would amplify.
_LEAST_PIVOT = 0.95
_RUNGS = 14
# Eigenvalues of R are at most 1. Sums of rounding errors that all point one way escape
# the pivots and make them larger: the series may grow as it would at this one.
_LARGEST = 3.0

_matmul = partial(jnp.matmul, precision=lax.Precision.HIGHEST)


def least_jitter(size: int, dtype: np.dtype | type) -> float:
    """The smallest jitter that is tried, relative to the mean of the diagonal.

    :param size: number of rows M.
    :param dtype: float dtype of the matrix.
    :return: 1e-10 in float64; in float32 ``2.4e-7 sqrt(M)``, about twice the norm of
        what rounding its elements adds to a matrix.
    """
    rounding = 2 * float(jnp.finfo(dtype).eps) * math.sqrt(size)
    return max(rounding, 1e-10) if jnp.dtype(dtype) == jnp.float64 else rounding


@jax.custom_jvp
def inverse_root(matrix: Array) -> Array:
    """``V`` with ``V K V' = I`` as far as the dtype resolves K, and no more elsewhere.

    Made from the smallest jitter, of those that double from :func:`least_jitter`, whose
    Cholesky factor is not spoilt by rounding. Its derivative is that of an inverse
    factor, ``-half(V dK V') V``: the jitter is a constant.

    :param matrix: K, (..., M, M), symmetric to rounding and positive semi-definite.
    :return: (..., M, M), not triangular; NaN where no jitter makes K positive definite.
    """
    factor, jitter = one_by_one(_factorised)(matrix)
    inverse = inverse_lower(factor)
    lost = jitter[..., None, None] * _matmul(inverse, inverse.mT)
    squared = _matmul(lost, lost)
    # An eigenvalue r of R has r (r - 1) <= |R^2 - R|.
    excess = jnp.sqrt(jnp.square(squared - lost).sum((-2, -1), keepdims=True))
    largest = 0.5 + jnp.sqrt(0.25 + excess)
    share = jnp.minimum(
        1, _series(_LARGEST, _LARGEST**2) / _series(largest, largest**2)
    )
    return inverse + _matmul(share * _series(lost, squared), inverse)


def _series(first: Any, second: Any) -> Any:
    """``(1 - r)^-1/2 - 1`` to second order, from r and its square."""
    return 0.5 * first + 0.375 * second


@inverse_root.defjvp
def _inverse_root_jvp(primals: Any, tangents: Any) -> tuple[Array, Array]:
    (tangent,) = tangents
    inverse = inverse_root(*primals)
    return inverse, -lower_half(inverse, tangent) @ inverse


def _factorised(matrix: Array) -> tuple[Array, Array]:
    """The lower factor of ``K + j I`` and j, (...), found by trial."""
    size, dtype = matrix.shape[-1], matrix.dtype
    eye = jnp.eye(size, dtype=dtype)
    least = jnp.asarray(least_jitter(size, dtype), dtype) * diagonal(matrix).mean(-1)

    def unfinished(trial: tuple[Any, ...]) -> Array:
        rung, _, _, done = trial
        return (rung < _RUNGS) & ~done.all()

    def attempt(trial: tuple[Any, ...]) -> tuple[Any, ...]:
        rung, jitter, _, done = trial
        jitter = jnp.where(done, jitter, 2 * jitter)
        # LAPACK reads columns: the transpose of an array of rows needs no copy.
        raised = (matrix + jitter[..., None, None] * eye).mT
        factor = jnp.linalg.cholesky(raised, symmetrize_input=False)
        pivots = jnp.square(diagonal(factor)) / jitter[..., None]
        # Of a matrix that is not positive definite they are NaN.
        return rung + 1, jitter, factor, (pivots >= _LEAST_PIVOT).all(-1)

    done = jnp.zeros(matrix.shape[:-2], bool)
    start = jnp.zeros((), int), least / 2, jnp.zeros_like(matrix), done
    _, jitter, factor, _ = lax.while_loop(unfinished, attempt, start)
    return factor, jitter
