# SPDX-License-Identifier: Apache-2.0
"""Scalar functions of ``q = c**2`` shared by the Polya-Gamma code.

Both are analytic in ``q`` although ``c`` itself is a square root, so they are
written in ``q``: gradients stay finite where a mean and a variance are both zero.
"""

import math
from collections.abc import Sequence

import jax.numpy as jnp
import numpy as np
from jax import Array
from jax.typing import ArrayLike


def tanh_taylor(num_terms: int) -> np.ndarray:
    r"""Return Taylor coefficients of :math:`T(q)=\tanh(\sqrt q)/\sqrt q` about 0.

    From :math:`2qT' = 1 - T - qT^2`; the radius of convergence is
    :math:`\pi^2/4`.
    """
    coef = [1.0]
    for n in range(1, num_terms):
        conv = math.fsum(coef[i] * coef[n - 1 - i] for i in range(n))
        coef.append(-conv / (2 * n + 1))
    return np.array(coef)


def horner(coef: Sequence[float] | np.ndarray, x: Array) -> Array:
    """Return the polynomial with these coefficients, the constant first."""
    out = jnp.full_like(x, float(coef[-1]))
    for a in coef[-2::-1]:
        out = out * x + float(a)
    return out


def series_terms(dtype: jnp.dtype) -> int:
    """Return the number of terms of the series near zero."""
    # |x| <= 1/4 and a radius of convergence of pi^2/4 give a factor of ten per term;
    # two further terms are for the derivatives.
    return 10 if jnp.finfo(dtype).bits <= 32 else 19


def _split(q: ArrayLike) -> tuple[Array, Array, Array]:
    """Return ``near``, ``x = q/4`` near zero, and ``r = sqrt(q)/2`` elsewhere, in the
    dtype of ``q``. Unused values are replaced by harmless ones."""
    x = jnp.asarray(q, dtype=jnp.result_type(q, 0.0)) / 4
    near = x < 0.25
    return near, jnp.where(near, x, 0.0), jnp.sqrt(jnp.where(near, 1.0, x))


def log2cosh_half(q: ArrayLike) -> Array:
    r""":math:`\log(2\cosh(c/2))` as a function of :math:`q=c^2\ge 0`.

    :param q: The squared argument, non-negative, any shape.
    :return: An array of the shape of ``q``; differentiable to every order at 0.
    """
    near, x, r = _split(q)
    a = tanh_taylor(series_terms(x.dtype))
    coef = a / (2.0 * np.arange(1, len(a) + 1))
    small = math.log(2.0) + x * horner(coef, x)
    return jnp.where(near, small, r + jnp.log1p(jnp.exp(-2 * r)))


def pg_mean_unit(q: ArrayLike) -> Array:
    r""":math:`T(c)=\tanh(c/2)/(2c)`, the mean of :math:`PG(1,c)`, as a function of
    :math:`q=c^2\ge 0`.

    :param q: The squared argument, non-negative, any shape.
    :return: An array of the shape of ``q``; differentiable to every order at 0.
    """
    near, x, r = _split(q)
    small = horner(tanh_taylor(series_terms(x.dtype)), x) / 4
    return jnp.where(near, small, jnp.tanh(r) / (4 * r))
