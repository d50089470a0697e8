# SPDX-License-Identifier: Apache-2.0
"""Very many small matrices (..., R, R), computed number by number for all at once.
LAPACK would be called for one after the other, which is faster, and compiles sooner,
for larger matrices."""

from __future__ import annotations

from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax import Array, lax
from jax.extend.core import Primitive
from jax.interpreters import ad, batching, mlir

from numpyro_gpaug.math import linalg

# The largest size of matrices that are computed entry by entry.
SMALL = 6
# Limits in :func:`cholesky_and_inverse`: above the first size, matrices are factorised
# by blocks of rows; the number of rows in a block; above the last size, LAPACK is used.
_BY_ROWS, _BLOCK, _BY_BLOCKS = 24, 8, 512

_Entries = list[list[Any]]


def product(left: Array, right: Array) -> Array:
    """Return ``left @ right`` of matrices (..., R, S) and (..., S, n).

    On CPUs with several threads XLA calls a library once for each pair of matrices with
    more than three rows and columns. This takes twenty times as long as a sum of
    products over an inner axis. The derivatives of such a sum would be sums over the
    last axis, which XLA leaves to a library, too. So the product is an operation of its
    own, whose derivatives are products.
    """
    if left.shape[-1] == 1:
        return left * right
    if left.shape[-1] > SMALL:
        return linalg.precise(jnp.matmul)(left, right)
    dtype = jnp.result_type(left, right)
    leading = jnp.broadcast_shapes(left.shape[:-2], right.shape[:-2])
    both = (
        jnp.broadcast_to(x, (*leading, *x.shape[-2:])).astype(dtype)
        for x in (left, right)
    )
    batch = tuple(range(len(leading)))
    numbers = (((len(batch) + 1,), (len(batch),)), (batch, batch))
    return _small_product.bind(*both, dimension_numbers=numbers)


def _sums(left: Array, right: Array, **_: Any) -> Array:
    """Return the product as a sum."""
    return (left[..., None] * right[..., None, :, :]).sum(-2)


def _mapped_product(
    both: tuple[Array, Array], axes: tuple[Any, Any], **_: Any
) -> tuple[Array, int]:
    pairs = list(zip(both, axes, strict=True))
    size = next(x.shape[a] for x, a in pairs if a is not None)
    return product(*(batching.bdim_at_front(x, a, size) for x, a in pairs)), 0


# Its parameter is that of ``dot_general``, which computes the same.
_small_product = Primitive("small_product")
_small_product.def_impl(jax.jit(_sums, static_argnames="dimension_numbers"))
_small_product.def_abstract_eval(
    lambda left, right, **_: left.update(shape=(*left.shape[:-1], right.shape[-1]))
)
ad.defbilinear(
    _small_product,
    lambda g, left, right, **_: product(g, right.mT),
    lambda g, left, right, **_: product(left.mT, g),
)
batching.primitive_batchers[_small_product] = _mapped_product
mlir.register_lowering(_small_product, mlir.lower_fun(_sums, multiple_results=False))


@jax.custom_jvp
def inverse(matrix: Array) -> Array:
    """Return the inverse of each symmetric matrix, by ``L D L'``. It takes no square
    roots, and so inverts matrices that are not positive definite too."""
    size = matrix.shape[-1]
    if size > SMALL:
        return _swept(matrix)
    factor, pivots = _factored(matrix)
    lower = _stacked(_inverted(factor, matrix))
    scaled = lower / jnp.stack(pivots, -1)[..., :, None]
    return 1 / matrix if size == 1 else product(lower.mT, scaled)


# The derivative of a division contains squares, which may not be finite.
inverse.defjvps(lambda moved, found, _: -product(product(found, moved), found))


def cholesky(matrix: Array) -> Array:
    """Return the lower Cholesky factor of each; NaN where it is not positive
    definite."""
    if matrix.shape[-1] > SMALL:
        return linalg.cholesky(matrix)
    factor, pivots = _factored(matrix)
    return _stacked(factor) * jnp.sqrt(jnp.stack(pivots, -1))[..., None, :]


def inverse_cholesky(matrix: Array) -> Array:
    """Return ``L^-1`` of the lower Cholesky factor of each; NaN where it is not
    positive definite."""
    if matrix.shape[-1] > SMALL:
        return linalg.inverse_cholesky(matrix)
    factor, pivots = _factored(matrix)
    lower = _stacked(_inverted(factor, matrix))
    return lower / jnp.sqrt(jnp.stack(pivots, -1))[..., :, None]


def inverse_cholesky_of_sum(matrix: Array, root: Array) -> Array:
    """Return ``L^-1`` of the lower Cholesky factor L of each ``matrix + root' root``,
    without the sum, which would lose small parts of ``matrix``: by the weighted
    Gram-Schmidt method of Thornton (1976).

    :param matrix: symmetric, (..., R, R).
    :param root: (..., S, R).
    """
    size = matrix.shape[-1]
    if size > SMALL:
        return linalg.inverse_cholesky(matrix + product(root.mT, root))
    factor, pivots = _factored(matrix)
    own = jnp.concatenate([_stacked(factor), root.mT], -1)
    columns = [own[..., j, :] for j in range(size)]
    ones = jnp.ones_like(root[..., :, 0])
    weights = jnp.concatenate([jnp.stack(pivots, -1), ones], -1)
    for j in range(size):
        weighted = weights * columns[j]
        pivots[j] = (weighted * columns[j]).sum(-1)
        for i in range(j + 1, size):
            factor[i][j] = (weighted * columns[i]).sum(-1) / pivots[j]
            columns[i] = columns[i] - factor[i][j][..., None] * columns[j]
    lower = _stacked(_inverted(factor, matrix))
    return lower / jnp.sqrt(jnp.stack(pivots, -1))[..., :, None]


@jax.custom_jvp
@linalg.precise
def cholesky_and_inverse(matrix: Array) -> tuple[Array, Array]:
    """Return the lower Cholesky factors of many matrices (m, P, P), and their inverses;
    NaN where a matrix is not positive definite.

    Up to 512 rows are computed for all matrices at once, eight by eight or one after
    the other. This is faster than LAPACK's functions, whose threads wait for each
    other, and at least as accurate.
    """
    size = matrix.shape[-1]
    if size > _BY_BLOCKS:
        factor = linalg.cholesky(matrix)
        return factor, linalg.inverse_lower(factor)
    rows = _by_rows(matrix) if size <= _BY_ROWS else _by_blocks(matrix)
    places = np.arange(size, dtype=np.int32)
    eye, above = places[:, None] == places, places[:, None] < places
    factor = jnp.where(eye, 1 / rows, jnp.where(above, rows, 0)).mT
    return factor, jnp.tril(rows)


def _by_rows(matrix: Array) -> Array:
    """Return ``L'`` above the diagonal, and ``L^-1`` below and on it.

    Both are sums over earlier rows, whose rounding errors are smaller than those of
    repeated differences.
    """
    places = np.arange(matrix.shape[-1], dtype=np.int32)
    above = places[:, None] < places

    def with_row(k: Any, rows: Array) -> Array:
        column = lax.dynamic_index_in_dim(rows, k, -1)
        earlier = jnp.where(above & (places < k), 0, rows) * column
        given = lax.dynamic_index_in_dim(matrix, k, -2)
        row = jnp.where(places < k, 0, given) - earlier.sum(-2, keepdims=True)
        pivot = lax.dynamic_index_in_dim(row, k, -1)
        # XLA's rsqrt is biased, and the errors of all rows would add up here.
        scale = jnp.sqrt(1 / jnp.where(pivot > 0, pivot, jnp.nan))
        row = jnp.where(places == k, 1, row) * scale
        return lax.dynamic_update_slice_in_dim(rows, row, k, -2)

    start, size = jnp.zeros_like(matrix), np.int32(len(places))
    return lax.fori_loop(np.int32(0), size, with_row, start)


def _by_blocks(matrix: Array) -> Array:
    """Return what :func:`_by_rows` does, in the same way, several rows at a time."""
    size = matrix.shape[-1]
    count = -(-size // _BLOCK)
    places = np.arange(count * _BLOCK, dtype=np.int32)
    if more := len(places) - size:
        ones = np.diag(places >= size).astype(matrix.dtype)
        matrix = jnp.pad(matrix, ((0, 0), (0, more), (0, more))) + ones
    above = places[:, None] < places

    def with_rows(k: Any, rows: Array) -> Array:
        first = k * _BLOCK
        columns = lax.dynamic_slice_in_dim(rows, first, _BLOCK, -1)
        earlier = jnp.where(above & (places < first), 0, rows)
        given = lax.dynamic_slice_in_dim(matrix, first, _BLOCK, -2)
        rest = jnp.where(places < first, 0, given) - columns.mT @ earlier
        own = _by_rows(lax.dynamic_slice_in_dim(rest, first, _BLOCK, -1))
        found = jnp.tril(own) @ rest
        found = lax.dynamic_update_slice_in_dim(found, own, first, -1)
        return lax.dynamic_update_slice_in_dim(rows, found, first, -2)

    start, last = jnp.zeros_like(matrix), np.int32(count)
    rows = lax.fori_loop(np.int32(0), last, with_rows, start)
    return rows[:, :size, :size]


@cholesky_and_inverse.defjvp
@linalg.precise
def _cholesky_and_inverse_jvp(
    primals: Any, tangents: Any
) -> tuple[tuple[Array, Array], tuple[Array, Array]]:
    factor, inverse = cholesky_and_inverse(*primals)
    half = linalg.lower_half(inverse, tangents[0])
    return (factor, inverse), (factor @ half, -half @ inverse)


def inverse_lower(factor: Array) -> Array:
    """Return the inverse of each lower triangular factor."""
    size = factor.shape[-1]
    if size > SMALL:
        return linalg.inverse_lower(factor)
    entries = [[factor[..., i, j] for j in range(size)] for i in range(size)]
    return _stacked(_inverted(entries, factor))


def _swept(matrix: Array) -> Array:
    """Return the inverse of each symmetric matrix, by the sweep operator on one row and
    column after the other, without square roots."""
    places = jnp.arange(matrix.shape[-1])

    def sweep(matrix: Array, k: Array) -> tuple[Array, None]:
        here = places == k
        row = jnp.where(here, 1, lax.dynamic_index_in_dim(matrix, k, -2, False))
        column = jnp.where(here, -1, lax.dynamic_index_in_dim(matrix, k, -1, False))
        pivot = lax.dynamic_index_in_dim(
            lax.dynamic_index_in_dim(matrix, k, -2, False), k, -1
        )
        rest = jnp.where(here | here[:, None], 0, matrix)
        return rest - column[..., :, None] * (row / pivot)[..., None, :], None

    return lax.scan(sweep, matrix, places)[0]


def _factored(matrix: Array) -> tuple[_Entries, list[Any]]:
    """Return ``L``, with ones along its diagonal, and ``D``."""
    size = matrix.shape[-1]
    none = jnp.zeros_like(matrix[..., 0, 0])
    factor: _Entries = [[none] * size for _ in range(size)]
    pivots: list[Any] = []
    for j in range(size):
        for i in range(j, size):
            known = sum(factor[i][k] * factor[j][k] * pivots[k] for k in range(j))
            rest = matrix[..., i, j] - known
            if i == j:
                pivots.append(rest)
                factor[j][j] = jnp.ones_like(none)
            else:
                factor[i][j] = rest / pivots[j]
    return factor, pivots


def _inverted(factor: _Entries, like: Array) -> _Entries:
    size = len(factor)
    none = jnp.zeros_like(like[..., 0, 0])
    found: _Entries = [[none] * size for _ in range(size)]
    for j in range(size):
        found[j][j] = 1 / factor[j][j]
        for i in range(j + 1, size):
            known = sum(factor[i][k] * found[k][j] for k in range(j, i))
            found[i][j] = -known / factor[i][i]
    return found


def _stacked(entries: _Entries) -> Array:
    return jnp.stack([jnp.stack(row, -1) for row in entries], -2)
