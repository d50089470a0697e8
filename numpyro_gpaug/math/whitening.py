# SPDX-License-Identifier: Apache-2.0
r"""Inverse roots of kernel matrices that are singular to rounding.

Elements of a kernel matrix K, or of its deviation D from a constant, are known to a
relative error. Values at near inputs are nearly equal, and sums lose the digits in
which they differ. So K is factorised as the covariance of differences, of each value
from the most similar earlier one,

.. math:: B (K + j I) B^\top = L L^\top, \qquad W = L^{-1} B,

with B unit lower triangular, so that W has the purpose of the inverse factor of K.
Differences between near inputs have small variances, which keep all their digits.

The jitter j has the size of the error of eigenvalues from rounding of the elements, and
is doubled until no pivot is noise. Its effect on a variance of 1 is known without the
cancellation in K, :math:`R = j W W^\top`, and is corrected by

.. math:: V = C^{-1} W, \qquad C C^\top = I - R + \tfrac{2}{5} R^2.

Far above the jitter this is the whitener of K, except for :math:`r^2 2/5` of an
eigenvalue r of R. Below, where :math:`r \approx 1` or, by rounding, more, no variance
grows by more than 8/3: noise stays unexplained.
"""

from __future__ import annotations

import math
from typing import Any, NamedTuple

import jax.numpy as jnp
import numpy as np
from jax import Array, lax

from numpyro_gpaug.math import linalg

# The smallest jitter, relative to rounding errors: first for the largest eigenvalue
# (random errors of the entries change it by about .4 of this measure), second for the
# first variance if all values are equal.
_NOISE, _TINY = 1 / 4, 1 / 1024
# In exact arithmetic every pivot is at least its jitter. Smaller pivots are rounding
# errors, which the inverse would amplify.
_LEAST_PIVOT, _MOST = 0.95, 2.0**16
# Larger than 1/4, because otherwise nothing of a variance might remain. At least .375
# remains.
_DAMPING = 0.4


def least_jitter(size: int, dtype: np.dtype | type) -> float:
    """Return the smallest jitter of sums of covariances, relative to their diagonal.

    :param size: number of rows M.
    :param dtype: float dtype of the matrix.
    :return: 1e-10 in float64; in float32 ``2.4e-7 sqrt(M)``, about twice the norm of
        the error from rounding the elements of a matrix.
    """
    rounding = 2 * float(jnp.finfo(dtype).eps) * math.sqrt(size)
    return max(rounding, 1e-10) if jnp.dtype(dtype) == jnp.float64 else rounding


@linalg.precise
def inverse_root(matrix: Array) -> Array:
    """Return ``V`` with ``V K V' = I`` as far as the dtype resolves K, and no more
    elsewhere.

    Its derivative is that of an inverse factor, ``-half(W dK W') W``: the derivative of
    the root of K, not of its approximation with jitter and rounding. Where noise is
    near the jitter the two differ by half, and a search with this derivative ends
    nearer to float64's optimum.

    :param matrix: K, (..., M, M), symmetric to rounding and positive semi-definite.
    :return: (..., M, M), lower triangular; NaN where no jitter makes K positive
        definite.
    """
    still = lax.stop_gradient(matrix)
    nothing = jnp.zeros((1, 1), matrix.dtype)
    return linalg.as_inverse_root(
        matrix, differenced(still, linalg.diagonal(still), nothing).root
    )


class Differenced(NamedTuple):
    """An inverse root ``V = F B`` of the covariances of values, which are the sum of a
    constant and deviations.

    :param factor: F, (..., M, M), lower triangular.
    :param near: the place of the value that each value but the first is differenced
        from, as in B, (..., M).
    :param first: the variance of the first value's deviation, (..., 1).
    :param constant: (..., 1, 1).
    """

    factor: Array
    near: Array
    first: Array
    constant: Array

    @property
    def root(self) -> Array:
        """V, (..., M, M)."""
        return self.factor @ _steps(self.near, self.factor.dtype).mT

    @linalg.precise
    def project(self, across: Array, own: Array) -> tuple[Array, Array]:
        """Return ``V k`` of other values, (..., M, N), and their remaining variances,
        (..., N), which rounding may make negative.

        :param across: deviations of their covariances with these, (..., N, M).
        :param own: deviations of their variances, (..., N).
        """
        first = np.arange(self.near.shape[-1]) == 0
        known = _apart(self.near, across) + self.constant * first
        projection = jnp.einsum("...ij,...nj->...in", self.factor, known)
        # Given the first value, which may explain most of a variance, so no term is
        # larger than deviations.
        with_first, constant = across[..., 0], self.constant[..., 0]
        slopes = (with_first - self.first) / (constant + self.first)
        left = own - (with_first + slopes * (constant + with_first))
        return projection, left - jnp.square(projection[..., 1:, :]).sum(-2)


def _apart(near: Array, values: Array) -> Array:
    """Return differences of columns (..., n, M), except for the first one. They are
    sums of two terms, which products with B are not."""

    def columns_of(x: Array, places: Array) -> Array:
        return x.at[:, places].get(
            mode="promise_in_bounds", wrap_negative_indices=False
        )

    columns = jnp.vectorize(columns_of, signature="(n,m),(m)->(n,m)")
    later = np.arange(values.shape[-1]) > 0
    return values - jnp.where(later, columns(values, near), 0)


def _steps(near: Array, dtype: Any) -> Array:
    """Return the transpose of B."""
    return _apart(near, jnp.eye(near.shape[-1], dtype=dtype))


@linalg.precise
def differenced(deviation: Array, own: Array, constant: Array) -> Differenced:
    """Return the :func:`inverse_root` of a constant and deviations from it, without
    derivatives.

    :param deviation: (..., M, M).
    :param own: its diagonal, (..., M).
    :param constant: (..., 1, 1).
    """
    size, eps = deviation.shape[-1], float(jnp.finfo(deviation.dtype).eps)
    places = np.arange(size)
    # Variances of differences, without the part that differences from one common value
    # share.
    apart = own[..., None, :] - 2 * deviation
    near = jnp.where(places < places[:, None], apart, jnp.inf).argmin(-1)
    gram = _apart(near, _apart(near, deviation).mT)
    gram = gram + constant * ((places == 0) & (places[:, None] == 0))
    noise = jnp.sqrt(jnp.square(deviation).sum((-2, -1), keepdims=True) / size)
    tiny = _TINY * jnp.abs(constant + own[..., :1, None])
    least = eps * (_NOISE * noise + tiny)
    steps = _steps(near, deviation.dtype)
    lower, jitter = _factorised(gram, least, _apart(near, steps.mT))
    factor = linalg.inverse_lower(lower)
    root = factor @ steps.mT
    lost = root @ (jitter * root.mT)
    left = jnp.eye(size, dtype=lost.dtype) - lost + _DAMPING * (lost @ lost)
    factor = linalg.inverse_lower(linalg.cholesky(left)) @ factor
    return Differenced(factor, near, own[..., :1], constant)


def cholesky_of_sums(matrix: Array, scale: Array) -> Array:
    """Return the lower factor of a covariance that is computed from larger ones by sums
    and differences, with the smallest jitter at which rounding does not spoil it.

    :param matrix: (..., M, M), symmetric to rounding.
    :param scale: size of the original covariances, (...), to which rounding errors are
        relative.
    :return: (..., M, M); NaN where no jitter makes it positive definite.
    """
    matrix_, scale = map(lax.stop_gradient, (matrix, scale[..., None, None]))
    size, dtype = matrix.shape[-1], matrix.dtype
    least = jnp.asarray(least_jitter(size, dtype), dtype) * scale
    eye = jnp.eye(size, dtype=dtype)
    return linalg.cholesky(matrix + _factorised(matrix_, least, eye)[1] * eye)


def _factorised(matrix: Array, least: Array, spread: Array) -> tuple[Array, Array]:
    """Return the lower factor of ``K + j E`` and j, (..., 1, 1), the first sufficient
    one of ``least``, (..., 1, 1), and its doubles.

    :param spread: E, (..., M, M).
    """
    single = jnp.vectorize(_first_unspoilt, signature="(m,m),(k,k),(m,m)->(m,m),(k,k)")
    batch = matrix.shape[:-2]
    given = (jnp.broadcast_to(x, batch + x.shape[-2:]) for x in (least, spread))
    return linalg.one_by_one(single)(matrix, *given)


def _first_unspoilt(matrix: Array, least: Array, spread: Array) -> tuple[Array, Array]:
    # Created here: a literal would become a constant of the loop, and JAX's custom
    # batching does not support constants in a scan under vmap.
    eye = jnp.eye(matrix.shape[-1], dtype=matrix.dtype)

    def spoilt(trial: tuple[Array, Array]) -> Array:
        factor, following = trial
        # If a matrix is not positive definite, pivots are NaN.
        kept = (jnp.square(factor) >= _LEAST_PIVOT / 2 * following * eye).all()
        return ~kept & (following < 2 * _MOST * least)[0, 0]

    def attempt(trial: tuple[Array, Array]) -> tuple[Array, Array]:
        _, jitter = trial
        # LAPACK reads columns, so the transpose of an array of rows needs no copy.
        raised = (matrix + jitter * spread).mT
        return jnp.linalg.cholesky(raised, symmetrize_input=False), 2 * jitter

    factor, following = lax.while_loop(spoilt, attempt, (jnp.zeros_like(matrix), least))
    return factor, following / 2
