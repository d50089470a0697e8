# SPDX-License-Identifier: Apache-2.0
r"""The survival probability :math:`\rho_h(x)` of the Polya-Gamma family, tabulated.

In the notation of :mod:`._pg_density`, the density of :math:`X=4x` at tilt zero is
:math:`2^h\rho_h(x)` times the density of the first passage of Brownian motion through
:math:`h`.  With :math:`v=x/(1+h)`, the function

.. math::
    p_h(v) = \frac{\log\rho_h(x) + \frac{\pi^2}{8}x
        - (h+\frac12)\log(1+v/\alpha)}{1+h}

is bounded and smooth on the whole quadrant, up to and including its limits at
:math:`h\to 0,\infty` and :math:`x\to 0,\infty`: one Chebyshev table in
:math:`h/(1+h)` and :math:`u=v/(\alpha+v)` serves every shape and every value.
"""

import itertools
import math
from functools import lru_cache
from typing import NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
from jax import Array, lax

from numpyro_gpaug.math.special import horner

RATE = math.pi**2 / 8
ALPHA = 0.7
_NODES = (80, 32)
# With y = x / h, the saddle point is about this polynomial in y / (1 + y), times (1 +
# 2 y) / y^2; the relative error is 6e-3.
SADDLE_FIT = (1.00038262, -2.10773872, 5.94080879, -5.94887077, 2.11569219)


def _log_cosh_sqrt(q: np.ndarray) -> np.ndarray:
    r = np.sqrt(q)
    return r + np.log1p(np.exp(-2 * r)) - math.log(2.0)


def _log_rho_series(h: np.ndarray, x: np.ndarray) -> np.ndarray:
    """Return ``log(rho)`` by the alternating series, for values at which three terms
    are enough."""
    total, binomial = np.zeros_like(x), np.ones_like(h)
    for n in range(1, 4):
        binomial = binomial * (h + n - 1) / n
        term = binomial * (2 * n + h) / h * np.exp(-2 * n * (n + h) / x)
        total += term if n % 2 == 0 else -term
    return np.log1p(total)


def _log_rho_contour(h: np.ndarray, x: np.ndarray, num: int = 96) -> np.ndarray:
    r"""Return ``log(rho)`` by the inverse Laplace transform of
    :math:`\cosh^{-h}\sqrt{2s}`, on a parabola around the branch cut."""
    y = x / h
    # The integral does not depend on the vertex, so a rough saddle point will do.
    fit = np.polynomial.polynomial.polyval(y / (1 + y), SADDLE_FIT)
    delta = np.maximum(0.5 * fit * (1 / y + 2) / y, 1 / x)
    width = np.sqrt(44.0 / (x * delta))
    v = width * ((np.arange(num) + 0.5) / num)[:, None]
    # For small h the integral of exp(s x) itself, which is zero, is subtracted: the
    # density is O(h) and would otherwise be left over from cancellation.
    small = h < 1
    base = np.where(small, 0.0, _log_cosh_sqrt(2 * delta - 2 * RATE + 0j).real)
    log_cosh = _log_cosh_sqrt(2 * delta * np.square(1 + 1j * v) - 2 * RATE)
    ratio = np.expm1(-h * (log_cosh - base)) + np.where(small, 0.0, 1.0)
    terms = np.exp(x * delta * (2j * v - np.square(v))) * ratio * (1 + 1j * v)
    integral = terms.real.sum(0) * width / num
    log_density = x * (delta - RATE) - h * base + np.log(2 * delta / np.pi * integral)
    first_passage = np.log(h) - 1.5 * np.log(x) - np.square(h) / (2 * x)
    return log_density - h * math.log(2.0) - first_passage + 0.5 * math.log(2 * np.pi)


@lru_cache
def _coefficients() -> np.ndarray:
    """Return the Chebyshev coefficients of ``p``: rows for ``u``, columns for
    ``h / (1 + h)``."""
    nodes = [np.cos(np.pi * (np.arange(n) + 0.5) / n) for n in _NODES]
    u, share = np.meshgrid(*((t + 1) / 2 for t in nodes), indexing="ij")
    h, v = share / (1 - share), ALPHA * u / (1 - u)
    x = (1 + h) * v
    left = v < 0.16
    log_rho = np.where(
        left,
        _log_rho_series(h, np.where(left, x, 0.16)),
        _log_rho_contour(h.ravel(), np.where(left, 1 + h, x).ravel()).reshape(x.shape),
    )
    values = (log_rho + RATE * x - (h + 0.5) * np.log1p(v / ALPHA)) / (1 + h)
    for axis, (n, t) in enumerate(zip(_NODES, nodes, strict=True)):
        basis = np.polynomial.chebyshev.chebvander(t, n - 1) * (2 - (np.arange(n) == 0))
        values = np.moveaxis(np.tensordot(basis / n, values, (0, axis)), 0, axis)
    return values


@lru_cache
def _table(tolerance: float) -> tuple[tuple[float, ...], ...]:
    """Return, for each Chebyshev polynomial in ``u``, its coefficient as a polynomial
    in ``2 h / (1 + h) - 1``."""
    coef = _coefficients()
    rows = []
    for row in coef[: np.flatnonzero(np.abs(coef).max(1) > tolerance)[-1] + 1]:
        large = np.flatnonzero(np.abs(row) > tolerance)
        kept = row[: large[-1] + 1] if large.size else row[:1]
        rows.append(tuple(map(float, np.polynomial.chebyshev.cheb2poly(kept))))
    return tuple(rows)


def log_rho(h: Array, x: Array) -> Array:
    """Return ``log(rho)`` at values ``x > 0`` for shapes ``h > 0`` (one shape)."""
    double = jnp.finfo(x.dtype).bits > 32
    table = itertools.zip_longest(*_table(1e-16 if double else 1e-9), fillvalue=0.0)
    rows = jnp.asarray([*table], x.dtype).T
    v, share = x / (1 + h), (h - 1) / (h + 1)
    t = 1 - 2 * ALPHA / (v + ALPHA)

    @jax.checkpoint
    def step(sums: tuple[Array, Array], row: Array) -> tuple[tuple[Array, Array], None]:
        b1, b2 = sums
        return (2 * t * b1 + (jnp.polyval(row[::-1], share, unroll=32) - b2), b1), None

    zeros = jnp.zeros_like(x)
    (b1, b2), _ = lax.scan(step, (zeros, zeros), rows[::-1])
    p = b1 - t * b2
    return (1 + h) * p + (h + 0.5) * jnp.log1p(v / ALPHA) - RATE * x


class Tangent(NamedTuple):
    """A tangent to ``log(rho)``, as a function of the value, at one point.

    :param h: shape.
    :param offset: the point divided by ``1 + h``, plus ``ALPHA``.
    :param slope: minus the derivative of ``log(rho)`` there.
    :param bend: the derivative of ``p`` with respect to ``u`` there.
    :param chain: intermediate derivatives of the evaluation of ``p``.
    """

    h: Array
    offset: Array
    slope: Array
    bend: Array
    chain: list[Array]


def _in_u(h: Array) -> list[Array]:
    """Return the coefficients of the Chebyshev polynomials in ``u`` at the shape
    ``h``."""
    share = (h - 1) / (h + 1)
    rows = _table(1e-8 if jnp.finfo(h.dtype).bits <= 32 else 1e-12)
    if h.size == 1:
        # Few operations to compile; for many shapes it would need many arrays.
        width = max(map(len, rows))
        table = np.array([row + (0.0,) * (width - len(row)) for row in rows])
        powers = jnp.cumprod(jnp.full(width, share.reshape(())).at[0].set(1))
        return list(jnp.sum(jnp.asarray(table, h.dtype) * powers, axis=1))
    return [horner(row, share) for row in rows]


def tangent(h: Array, x0: Array) -> Tangent:
    """Return the tangent at ``x0``; ``h`` broadcasts against it."""
    offset = x0 / (1 + h) + ALPHA
    rest = ALPHA / offset
    t = 1 - 2 * rest
    in_u = _in_u(h)
    b1, b2, d1, d2 = (jnp.zeros_like(x0) for _ in range(4))
    chain = []
    for coef in in_u[:0:-1]:
        chain.append(d1)
        d1, d2 = 2 * t * d1 + (2 * b1 - d2), d1
        b1, b2 = 2 * t * b1 + (coef - b2), b1
    chain.append(d1)
    bend = 2 * (b1 + t * d1 - d2)
    slope = RATE - ((h + 0.5) / (h + 1) + bend * rest) / offset
    return Tangent(h, offset, slope, bend, chain)


def log_gap(x: Array, at: Tangent) -> Array:
    """Return ``log(rho(x))`` minus the tangent, which is not positive, by the second
    divided difference of the polynomial. The rounding error of a plain difference would
    grow with ``h``.

    :param x: values.
    :param at: the tangent.
    """
    step = (x / (1 + at.h) + ALPHA - at.offset) / at.offset
    rest = ALPHA / (at.offset * (1 + step))
    t = 1 - 2 * rest
    e1, e2 = jnp.zeros_like(x), jnp.zeros_like(x)
    for d in at.chain[:-1]:
        e1, e2 = 2 * t * e1 + (2 * d - e2), e1
    second = 4 * (at.chain[-1] + t * e1 - e2)
    bent = rest * (rest * second - at.bend) * jnp.square(step)
    return (at.h + 0.5) * (jnp.log1p(step) - step) + (1 + at.h) * bent
