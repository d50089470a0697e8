# SPDX-License-Identifier: Apache-2.0
r"""The expected curvature of a softmax, up to a tenth, from its diagonal.

Given latents f, minus the Hessian of a log-softmax is ``diag(p) - p p'``. It is the
Laplacian of a graph with edges ``p_c p_d``, and so is its Gaussian expectation, with
edges ``E p_c p_d``. Its diagonal is known: it is the precision of the Gaussian factors.
Here the edges are approximated by ``a_c a_d``, with numbers ``a`` that give the same
diagonal. For two classes this is exact. A product takes O(C) operations.
"""

from __future__ import annotations

import jax
import jax.numpy as jnp
from jax import Array

# Rounds of scaling: after four, diagonals are within a tenth, which is the size of the
# errors of the edges.
_ROUNDS = 4


def edge_roots(mean: Array, variance: Array, precision: Array) -> Array:
    """Return ``a`` with ``a_c (sum_d a_d - a_c)`` near the given diagonal.

    :param mean: means of the latents of each datum, (..., C).
    :param variance: their variances, of the same shape.
    :param precision: the diagonal, of the same shape, >= 0 up to rounding.
    """
    tiny = jnp.finfo(mean.dtype).tiny ** 0.5
    precision = jnp.maximum(precision, 0)
    shares = jax.nn.softmax(mean / jnp.sqrt(1 + (jnp.pi / 8) * variance), -1)
    total = (shares * (1 - shares)).sum(-1, keepdims=True)
    size = precision.sum(-1, keepdims=True) / jnp.maximum(total, tiny)
    a = shares * jnp.sqrt(size)
    for _ in range(_ROUNDS):
        others = a.sum(-1, keepdims=True) - a
        # The geometric mean of a and the value that the diagonal requires, because the
        # latter alone would alternate.
        a = jnp.sqrt(a * precision / jnp.maximum(others, tiny))
    return a


def laplacian_product(a: Array, vector: Array) -> Array:
    """Return the product of the Laplacian with edges ``a_c a_d`` and a vector.

    :param a: (..., C).
    :param vector: of the same shape.
    """
    mixed = (a * vector).sum(-1, keepdims=True)
    return a * (a.sum(-1, keepdims=True) * vector - mixed)
