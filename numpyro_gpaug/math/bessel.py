# SPDX-License-Identifier: Apache-2.0
r"""The integral behind the modified Bessel function of the second kind, and averages
over its integrand: all that a generalised inverse Gaussian needs.

From :math:`K_\nu(x) = \tfrac12\int e^{\nu t - x\cosh t}\,dt` [1, eq. 10.32.9], with
:math:`S=\sqrt{\nu^2+x^2}`, :math:`P=S+|\nu|`, :math:`Q=S-|\nu|=x^2/P` and the peak
:math:`t^*=\operatorname{asinh}(|\nu|/x)`, :math:`u=t-t^*`,

.. math::
    \log K_\nu(x) = |\nu| t^* - S + \log\tfrac12\int
        e^{-\frac P2 e_2(u) - \frac Q2 e_2(-u)}\,du,
    \qquad e_2(u) = e^u - 1 - u.

The exponent is at most zero, and no term of it is a difference of large ones.  The
trapezoidal rule converges geometrically.  For a small :math:`x` the integrand is a
long plateau with two short edges: :math:`t = s + \tau\tanh s` shortens the plateau,
so that one number of nodes serves every :math:`x`.

Every derivative is an average over the same nodes.  The nodes are constants: the
integral does not depend on where they are.

[1] NIST *Digital Library of Mathematical Functions*, https://dlmf.nist.gov.
"""

import math
from collections.abc import Callable
from functools import partial
from typing import NamedTuple

import jax
import jax.numpy as jnp
from jax import Array, lax

from numpyro_gpaug.math.special import horner

LOG2 = math.log(2.0)
_BLOCK = 4


class _Layout(NamedTuple):
    """The node layout: equal steps ``h`` in ``s`` from ``low``; ``t = s + tau
    tanh(s)``."""

    peak: Array
    tau: Array
    low: Array
    h: Array


def e2(u: Array) -> Array:
    """Return ``exp(u) - 1 - u`` to a few units of rounding, for any ``u``."""
    small = jnp.abs(u) < 0.5
    x = jnp.where(small, u, 0.0)
    terms = 10 if jnp.finfo(u.dtype).bits <= 32 else 16
    series = horner([1 / math.factorial(k) for k in range(2, terms + 1)], x)
    y = jnp.where(small, 1.0, u)
    return jnp.where(small, series * x * x, jnp.exp(y) - 1 - y)


def _unstretch(t: Array, tau: Array) -> Array:
    """Solve ``s + tau tanh(s) = t``."""
    size = jnp.abs(t)
    s = jnp.maximum(size - tau, size / (1 + tau))
    for _ in range(4):
        # The function is concave and the start is below the root, so the steps never
        # pass it.
        tanh = jnp.tanh(s)
        s = s - (s + tau * tanh - size) / (1 + tau * (1 - tanh) * (1 + tanh))
    return jnp.where(t < 0, -s, s)


def log_edge(log_rate: Array, drop: float) -> Array:
    """Return an upper bound of the ``u > 0`` where ``exp(log_rate)/2 e2(u) = drop``."""
    floor = -60.0
    q = 2 * drop * jnp.exp(-jnp.maximum(log_rate, floor))
    return jnp.log1p(q + jnp.sqrt(2 * q)) + jnp.maximum(floor - log_rate, 0.0)


def _layout(big: Array, log_q: Array, n: int) -> _Layout:
    """Return the layout of the nodes for ``P = big`` and ``log Q = log_q``."""
    drop = 18.0 if jnp.finfo(big.dtype).bits <= 32 else 38.0
    log_p = jnp.log(big)
    peak = (log_p - log_q) / 2
    plateau = jnp.maximum(LOG2 - (log_p + log_q) / 2, 0.0)
    # At the edges nothing is stretched: half a log keeps tau * sech^2 small there.
    tau = jnp.maximum(plateau - 3 - 0.5 * jnp.log1p(plateau), 0.0)

    # The place where the integrand times exp(-2u), the widest average, is below
    # exp(-drop).
    slope = big / 2 - 2
    steep = slope > 0.1
    linear = (drop + big / 2) / jnp.where(steep, slope, 1.0)
    linear = jnp.where(steep, linear, jnp.inf)
    q = 2 * (drop + 2 * linear) / big
    lower = jnp.minimum(linear, q + jnp.sqrt(2 * q))
    lower = jnp.minimum(lower, log_edge(log_q, drop))
    upper = log_edge(log_p, drop)

    low = _unstretch(peak - lower, tau)
    h = (_unstretch(peak + upper, tau) - low) / (n - 1)
    return _Layout(peak, tau, low, h)


def _place(index: Array, at: _Layout) -> tuple[Array, Array]:
    """Return the nodes ``u`` of the given indices, and their steps."""
    s = at.low + at.h * index
    sign = jnp.where(s < 0, -1.0, 1.0).astype(s.dtype)
    rest = 1 / (1 + jnp.exp(2 * jnp.abs(s)))
    u = s + (sign * at.tau - at.peak) - sign * (2 * at.tau) * rest
    return u, at.h * (1 + 4 * at.tau * rest * (1 - rest))


def energies(u: Array, big: Array, log_q: Array) -> tuple[Array, Array]:
    """Return ``P/2 e2(u)`` and ``Q/2 e2(-u)``; their sum is minus the log of the
    integrand."""
    near = jnp.abs(u) < 0.5
    close = jnp.where(near, u, 0.0)
    far = jnp.where(near, 1.0, u)
    # Half of the smallest P may be subnormal, exp(u) and exp(-u) may overflow, and Q
    # may underflow.
    root = jnp.exp(far / 2)
    small, half_big = jnp.exp(log_q) / 2, big / 2
    right = 0.5 * ((big * root) * root) - half_big * (1 + far)
    left = jnp.exp(log_q - LOG2 - far) - small * (1 - far)
    right = jnp.where(near, half_big * e2(close), right)
    return right, jnp.where(near, small * e2(-close), left)


@partial(jax.jit, static_argnames=("terms", "num"))
def averages(
    terms: Callable[..., tuple[Array, ...]],
    big: Array,
    log_q: Array,
    *others: Array,
    num: int | None = None,
) -> tuple[Array, ...]:
    """Return the log of the integral, and averages over the normalised integrand.

    All results are differentiable, to any order.

    :param terms: The integrands of the averages: a function of ``u``, ``P/2 e2(u)``,
        ``Q/2 e2(-u)``, ``big``, ``log_q`` and ``others`` that returns a tuple of
        arrays. Each is already multiplied by the integrand, since one factor may
        overflow where the product does not.
    :param others: Arrays of the shape and dtype of ``big`` and ``log_q``.
    :param num: Number of nodes; by default enough for rounding in the dtype of ``big``.
    """
    fixed_big, fixed_log_q = lax.stop_gradient((big, log_q))
    n = num or (48 if jnp.finfo(big.dtype).bits <= 32 else 96)
    at = _layout(fixed_big, fixed_log_q, n)
    # These factors are one. They carry the tangents, which would otherwise go through
    # the positions of the nodes.
    scale_right = big / fixed_big
    scale_left = jnp.exp(log_q - fixed_log_q)
    column = (_BLOCK,) + (1,) * big.ndim

    # Nodes are processed in blocks, so that memory is that of the batch.
    @jax.checkpoint
    def add(totals, start):
        index = start + jnp.arange(_BLOCK, dtype=big.dtype).reshape(column)
        u, step = _place(index, at)
        right, left = energies(u, fixed_big, fixed_log_q)
        right, left = right * scale_right, left * scale_left
        values = terms(u, right, left, big, log_q, *others)
        new = (jnp.exp(-right - left), *values)
        sums = (jnp.sum(step * part, axis=0) for part in new)
        return tuple(map(jnp.add, totals, sums)), None

    blank = (jnp.zeros_like(big),) * 3
    count = len(jax.eval_shape(lambda: terms(*blank, big, log_q, *others)))
    start = (jnp.zeros_like(big),) * (1 + count)
    blocks = jnp.arange(0, n, _BLOCK).astype(big.dtype)
    (total, *sums), _ = lax.scan(add, start, blocks)
    return jnp.log(total), *(part / total for part in sums)


def _no_terms(*_: Array) -> tuple[Array, ...]:
    return ()


def _energy_terms(u, right, left, big, log_q):
    weight = jnp.exp(-right - left)
    return weight * (right / big), weight * left


@jax.custom_jvp
def log_peak_integral(big: Array, log_q: Array) -> Array:
    r"""Return the log of :math:`\int e^{-\frac P2 e_2(u) - \frac Q2 e_2(-u)} du`.

    :param big: ``P > 0``.
    :param log_q: ``log Q``, at most ``log P``, of the same shape and dtype.
    """
    return averages(_no_terms, big, log_q)[0]


@log_peak_integral.defjvp
def _log_peak_integral_jvp(primals, tangents):
    big, log_q = primals
    d_big, d_log_q = tangents
    _, by_big, by_log_q = averages(_energy_terms, big, log_q)
    return log_peak_integral(big, log_q), -by_big * d_big - by_log_q * d_log_q


@jax.custom_jvp
def _hypot(x: Array, y: Array) -> Array:
    # The derivative of a division squares the divisor, which may underflow.
    return jnp.hypot(x, y)


_hypot.defjvps(lambda dx, out, x, _: x / out * dx, lambda dy, out, _, y: y / out * dy)


def peak(lam: Array, omega: Array, log_omega: Array) -> tuple[Array, Array]:
    """Return ``P`` and ``log Q`` for the order ``lam >= 0`` and argument ``omega``."""
    big = _hypot(lam, omega) + lam
    return big, 2 * log_omega - jnp.log(big)
