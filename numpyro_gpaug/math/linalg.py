# SPDX-License-Identifier: Apache-2.0
"""Cholesky factors and solves with them, and preconditioned conjugate gradients."""

from __future__ import annotations

import math
from collections.abc import Callable
from functools import partial, wraps
from typing import Any, ParamSpec, TypeVar

import jax
import jax.numpy as jnp
import numpy as np
from jax import Array, lax

from numpyro_gpaug.math.sharding import by_latents, shards

# The part of the first residual, in the norm of the preconditioner, that ends the
# iterations, and the largest number of iterations. The solutions are steps, and the
# next steps correct their errors.
_ENOUGH, _MOST = 0.03, 40
# Terms that are added one after the other: all, if they are few; otherwise at least so
# many in a block of a sum of products, and about so many at one place. Equal terms are
# rounded in the same direction, and lose up to a quarter of a rounding with each.
_FEW, _BLOCK, _RUN = 512, 32, 8


def total(a: Any, b: Any) -> Array:
    """Return the inner product of two pytrees."""
    products = jax.tree.map(lambda x, y: (x * y).sum(), a, b)
    return sum(jax.tree.leaves(products), start=jnp.zeros(()))


def by_column(a: Array, b: Array) -> Array:
    """Return the inner products of columns (n, c), (c,)."""
    return (a * b).sum(0)


def conjugate_gradients(
    apply: Callable[[Any], Any],
    right: Any,
    precondition: Callable[[Any], Any] = lambda residual: residual,
    *,
    inner: Callable[[Any, Any], Array] = total,
    tolerance: float = _ENOUGH,
    most: int = _MOST,
) -> tuple[Any, Array]:
    """Return an approximate solution of a positive definite system, and the square of
    its residual in the norm of the preconditioner. Both are NaN for a system that is
    not positive definite.

    :param apply: the product with the matrix.
    :param right: the right-hand side, a pytree; or several, the columns of an array.
    :param precondition: the product with an approximate inverse.
    :param inner: :func:`total` for one right-hand side, :func:`by_column` for several.
    :param tolerance: the residual that ends the iterations, relative to the first one.
    :param most: the largest number of iterations.
    """
    direction = precondition(right)
    first = inner(right, direction)

    def going(carry: Any) -> Array:
        number, size = carry[0], carry[-1]
        return (number < most) & (size > tolerance**2 * first).any()

    def iterate(carry: Any) -> Any:
        number, x, residual, direction, size = carry
        image = apply(direction)
        slope = inner(direction, image)
        # Columns that are solved stay as they are.
        length = jnp.where(size > 0, size / jnp.where(slope > 0, slope, jnp.nan), 0)
        x = _added(x, length, direction)
        residual = _added(residual, -length, image)
        new = precondition(residual)
        after = inner(residual, new)
        turned = jnp.where(size > 0, after / jnp.where(size > 0, size, 1), 0)
        return number + 1, x, residual, _added(new, turned, direction), after

    zero = jax.tree.map(jnp.zeros_like, right)
    start = jnp.int32(0), zero, right, direction, first
    _, x, *_, size = lax.while_loop(going, iterate, start)
    return x, size


def _added(x: Any, length: Array, direction: Any) -> Any:
    return jax.tree.map(lambda a, d: a + jnp.asarray(length, a.dtype) * d, x, direction)


P = ParamSpec("P")
T = TypeVar("T")


def precise(function: Callable[P, T]) -> Callable[P, T]:
    """Return ``function`` with all products of matrices in full precision.

    By default accelerators round the factors of float32 products to ten bits (TF32) or
    eight. This is enough for a network, but not for a matrix that will be factorised,
    nor for numbers that its inverse whitens.

    :param function: the function; the precision applies to all that a call computes or
        traces.
    """

    @wraps(function)
    def full(*args: P.args, **kwargs: P.kwargs) -> T:
        with jax.default_matmul_precision("highest"):
            return function(*args, **kwargs)

    return full


def vecmat(vector: Array, matrix: Array) -> Array:
    """Return ``vector @ matrix`` for stacks of both; ``jnp.vecmat``, which is
    vectorised anew in every program, takes several times as long to trace.

    :param vector: (..., M).
    :param matrix: (..., M, N).
    """
    return jnp.einsum("...i,...ij->...j", vector, matrix)


def matvec(matrix: Array, vector: Array) -> Array:
    """Return ``matrix @ vector`` for stacks of both; see :func:`vecmat`.

    :param matrix: (..., M, N).
    :param vector: (..., N).
    """
    return jnp.einsum("...ij,...j->...i", matrix, vector)


@precise
def sum_of_products(left: Array, right: Array) -> Array:
    """Return ``left' right`` of very many rows (..., n, K) and (..., n, L), (..., K,
    L).

    It is a sum of sums over blocks: equal terms are rounded in the same direction, and
    the error of one long sum, as of the weights of all data about a level, would be as
    many roundings as there are rows.
    """
    number, width = left.shape[-2:]
    # Blocks are larger where the sum of many wide products would take longer.
    size = _BLOCK if width <= 4 else 2 * _BLOCK if width <= 64 else 4 * width
    # With several devices, blocks would move rows from one to another.
    if number <= max(size, _FEW) or shards() > 1:
        return left.mT @ right
    count = -(-number // size)

    def cut(x: Array) -> Array:
        lead, width = x.shape[:-2], x.shape[-1]
        filled = [(0, 0)] * len(lead) + [(0, count * size - number), (0, 0)]
        return jnp.pad(x, filled).reshape(*lead, count, size, width)

    return pairwise_sum(jnp.moveaxis(cut(left).mT @ cut(right), -3, 0))


def pairwise_sum(x: Array) -> Array:
    """Return the sum over the first axis, as a sum of sums of pairs. Its error grows
    with the logarithm of the number of terms."""
    while len(x) > 1:
        half = len(x) // 2
        pairs = x[:half] + x[half : 2 * half]
        x = pairs if len(x) % 2 == 0 else jnp.concatenate([pairs, x[-1:]])
    return x[0]


def added_at(total: Array, places: tuple[Array, ...], values: Array) -> Array:
    """Return ``total.at[places].add(values)``, accurate also where many rows share a
    place.

    The rows are added to several copies of the array, whose sum is returned. The reason
    is that of :func:`sum_of_products`.

    :param total: an array whose leading axes the places index.
    :param places: indices of equal shapes, rows first.
    :param values: what is added, rows first.
    """
    number, size = len(values), max(math.prod(total.shape[: len(places)]), 1)
    copies = number // (_RUN * size)
    if copies < 2 or number <= _FEW or shards() > 1:
        return total.at[places].add(values)
    # Rows of a group may follow each other.
    copy = (jnp.arange(number) % copies).reshape(-1, *[1] * (places[0].ndim - 1))
    apart = jnp.zeros((copies, *total.shape), total.dtype)
    return total + pairwise_sum(apart.at[copy, *places].add(values))


def default_jitter(size: int, dtype: np.dtype | type) -> float:
    """Return the default jitter, relative to the mean of the diagonal.

    It is for factors that are not corrected for it; inducing matrices use a smaller one
    (:mod:`numpyro_gpaug.math.whitening`).

    :param size: number of rows M.
    :param dtype: float dtype of the matrix.
    :return: ``2e-7 M`` in float32, 1e-10 in float64. Squared-exponential and Matern
        matrices of 20 to 1000 random inputs in 1 to 20 dimensions, with lengthscales
        0.3 to 100, all factorise with it (``tests/test_linalg.py``).
    """
    return 1e-10 if jnp.dtype(dtype) == jnp.float64 else 2e-7 * size


def with_jitter(matrix: Array, jitter: float) -> Array:
    """Return ``matrix + jitter * mean(diag) * I``.

    :param matrix: (..., M, M).
    :param jitter: relative to the mean of the diagonal; 0 adds nothing.
    """
    eye = jnp.eye(matrix.shape[-1], dtype=matrix.dtype)
    mean = diagonal(matrix).mean(-1)[..., None, None]
    return matrix + jnp.asarray(jitter, matrix.dtype) * mean * eye


@jax.custom_jvp
def cholesky(matrix: Array) -> Array:
    """Return the lower Cholesky factor of a matrix that is symmetric to rounding. Only
    its upper triangle is read.

    :param matrix: (..., M, M).
    :return: (..., M, M); NaN where the matrix is not positive definite.
    """
    # LAPACK reads columns, so the transpose of an array of rows needs no copy.
    return one_by_one(partial(jnp.linalg.cholesky, symmetrize_input=False))(matrix.mT)


def one_by_one(function: Callable[..., Any]) -> Callable[..., Any]:
    """Return a function of stacks of matrices (..., M, N), from a function that calls
    LAPACK.

    On a CPU the matrices are taken one after the other, also under ``vmap``. jaxlib
    splits the matrices of one call into tasks of its thread pool, and two concurrent
    programs that wait for such tasks (chains in parallel, threads of a server) would
    deadlock.

    :param function: a function of one matrix or several; it is not differentiated.
    """
    if jax.default_backend() != "cpu":
        return function
    # A function without keywords, because the keywords of a partial would be traced.
    single = jax.custom_batching.sequential_vmap(lambda *each: function(*each))

    def of_each(*stacks: Array) -> Any:
        leading = stacks[0].shape[:-2]
        count = math.prod(leading)
        flat = [x.reshape(count, *x.shape[-2:]) for x in stacks]
        if len(flat[0]) == 1:
            found = jax.tree.map(lambda x: x[None], single(*(x[0] for x in flat)))
        else:
            each_of = by_latents(partial(lax.map, lambda each: single(*each)), count)
            found = each_of(tuple(flat))
        return jax.tree.map(lambda x: x.reshape(leading + x.shape[1:]), found)

    return of_each


def eigh(matrix: Array) -> tuple[Array, Array]:
    """Return eigenvalues (..., M) and eigenvectors (..., M, M) of a matrix that is
    symmetric to rounding. They have no derivatives."""
    return one_by_one(
        lambda each: tuple(jnp.linalg.eigh(each, symmetrize_input=False))
    )(matrix)


def inverse_cholesky(matrix: Array) -> Array:
    """Return ``L^-1`` of the lower Cholesky factor L of ``matrix``, (..., M, M); NaN
    where it is not positive definite."""
    still = lax.stop_gradient(matrix)
    return as_inverse_root(matrix, inverse_lower(cholesky(still)))


@jax.custom_jvp
def as_inverse_root(matrix: Array, inverse: Array) -> Array:
    """Return the lower triangular W with ``W K W' = I`` of a matrix K, (..., M, M),
    from another computation.

    Its derivative is ``-half(W dK W') W``: products only, no triangular solves.
    """
    del matrix
    return inverse


@precise
def lower_half(inverse: Array, tangent: Array) -> Array:
    """Return ``half(W dK W')``, the change of a factor with its matrix in the factor's
    own coordinates; ``half`` keeps the lower triangle and half the diagonal."""
    size, dtype = inverse.shape[-1], inverse.dtype
    half = jnp.asarray(np.tri(size) - 0.5 * np.eye(size), dtype)
    return half * jnp.einsum("...ij,...kj->...ik", inverse @ tangent, inverse)


@jax.custom_jvp
def valued(formula: Array, value: Array) -> Array:
    """Return ``value`` with the derivative of ``formula``, a less accurate form of
    it."""
    del formula
    return value


valued.defjvps(lambda moved, *_: moved, None)


def safe_sqrt(x: Array) -> Array:
    """Return the square root, with a gradient of 0, not infinity, at 0."""
    positive = x > 0
    return jnp.where(positive, jnp.sqrt(jnp.where(positive, x, 1)), 0)


def solve_lower(factor: Array, rhs: Array, *, transpose: bool = False) -> Array:
    """Return ``factor^-1 rhs``, or ``factor'^-1 rhs``, for a lower factor.

    :param factor: (..., M, M).
    :param rhs: (..., M, n); leading axes broadcast.
    :param transpose: whether the factor is transposed.
    """
    batch = jnp.broadcast_shapes(factor.shape[:-2], rhs.shape[:-2])
    factor, rhs = (jnp.broadcast_to(x, batch + x.shape[-2:]) for x in (factor, rhs))
    return _solved(transpose, factor, rhs)


@partial(jax.custom_jvp, nondiff_argnums=(0,))
def _solved(transpose: bool, factor: Array, rhs: Array) -> Array:
    return one_by_one(
        partial(
            lax.linalg.triangular_solve, left_side=True, lower=True,
            transpose_a=transpose,
        )
    )(factor, rhs)  # fmt: skip


@_solved.defjvp
@precise
def _solved_jvp(transpose: bool, primals: Any, tangents: Any) -> tuple[Array, Array]:
    (factor, rhs), (factor_dot, rhs_dot) = primals, tangents
    solution, inverse = _solved(transpose, factor, rhs), inverse_lower(factor)
    if transpose:
        inverse, factor_dot = inverse.mT, factor_dot.mT
    return solution, inverse @ (rhs_dot - factor_dot @ solution)


@jax.custom_jvp
def inverse_lower(factor: Array) -> Array:
    """Return the inverse of a lower triangular factor (..., M, M)."""
    eye = jnp.eye(factor.shape[-1], dtype=factor.dtype)
    # LAPACK writes columns, which are the rows of the transpose.
    return solve_lower(factor, eye, transpose=True).mT


def diagonal(matrix: Array) -> Array:
    """Return the diagonal of (..., M, M), as every (M + 1)-th number. The derivative of
    ``jnp.diagonal`` would be a scatter."""
    size = matrix.shape[-1]
    return matrix.reshape(*matrix.shape[:-2], size * size)[..., :: size + 1]


# Derivatives, given the results x.
_times: Any = precise(jnp.matmul)
cholesky.defjvps(lambda moved, x, _: _times(x, lower_half(inverse_lower(x), moved)))
as_inverse_root.defjvps(lambda moved, x, *_: -_times(lower_half(x, moved), x), None)
inverse_lower.defjvps(lambda moved, x, _: -_times(_times(x, moved), x))
