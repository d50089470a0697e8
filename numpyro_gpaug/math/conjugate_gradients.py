# SPDX-License-Identifier: Apache-2.0
"""Linear systems by preconditioned conjugate gradients."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp
from jax import Array, lax

# The part of the first residual, in the norm of the preconditioner, that ends the
# iterations, and the largest number of iterations. The solutions are steps, and the
# next steps correct their errors.
_ENOUGH, _MOST = 0.03, 40


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
