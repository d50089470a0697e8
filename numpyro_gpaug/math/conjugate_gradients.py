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


def conjugate_gradients(
    apply: Callable[[Any], Any], precondition: Callable[[Any], Any], right: Any
) -> Any:
    """Return an approximate solution of a positive definite system, of a few digits.

    :param apply: the product with the matrix, of a pytree.
    :param precondition: the product with an approximate inverse.
    :param right: the right-hand side.
    """
    zero = jax.tree.map(jnp.zeros_like, right)
    direction = precondition(right)
    first = _dot(right, direction)

    def going(carry: Any) -> Array:
        number, size = carry[0], carry[-1]
        return (number < _MOST) & (size > _ENOUGH**2 * first)

    def iterate(carry: Any) -> Any:
        number, x, residual, direction, size = carry
        image = apply(direction)
        length = size / _dot(direction, image)
        x = _added(x, length, direction)
        residual = _added(residual, -length, image)
        new = precondition(residual)
        after = _dot(residual, new)
        return number + 1, x, residual, _added(new, after / size, direction), after

    start = jnp.int32(0), zero, right, direction, first
    return lax.while_loop(going, iterate, start)[1]


def _dot(a: Any, b: Any) -> Array:
    products = jax.tree.map(lambda x, y: (x * y).sum(), a, b)
    return sum(jax.tree.leaves(products), start=jnp.zeros(()))


def _added(x: Any, length: Array, direction: Any) -> Any:
    return jax.tree.map(lambda a, d: a + jnp.asarray(length, a.dtype) * d, x, direction)
