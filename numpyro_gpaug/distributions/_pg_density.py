# SPDX-License-Identifier: Apache-2.0
r"""Log-density of the Polya-Gamma family for every real shape.

All formulas are for :math:`X = 4x`, whose distribution has the Laplace transform
:math:`\{\cosh z/\cosh\sqrt{z^2+2t}\}^h` with :math:`h=b`, :math:`z=|c|/2`.  Notation:

* :math:`T(q)=\tanh(\sqrt q)/\sqrt q` and :math:`L(q)=\log\cosh\sqrt q`, so that
  :math:`L'=T/2`; both continue analytically to :math:`q>-\pi^2/4`, and are computed
  from :math:`w=q+\pi^2/4>0` because the right tail lives at :math:`w\to 0`;
* :math:`y=X/h`, and :math:`w_y` solves :math:`T=y` (the saddle point).

A table of :math:`\rho` (:mod:`._pg_rho`) gives the density up to large :math:`h`,
where it would lose :math:`h` units of rounding. There a second-order saddlepoint
expansion is used, whose error falls as :math:`h^{-3}`.
"""

import math
from functools import partial

import jax
import jax.numpy as jnp
import numpy as np
from jax import Array, lax

from numpyro_gpaug.distributions._pg_rho import SADDLE_FIT, log_rho
from numpyro_gpaug.math.special import horner, series_terms, tanh_taylor

POLE = math.pi**2 / 4
LOG2 = math.log(2.0)


def saddle_threshold(dtype: jnp.dtype) -> float:
    """The shape above which the saddlepoint expansion is used."""
    return 12.0 if jnp.finfo(dtype).bits <= 32 else 1000.0


def log_cosh(z: Array) -> Array:
    """Return ``log(cosh(z))`` for ``z >= 0``."""
    return z + jnp.log1p(jnp.exp(-2 * z)) - LOG2


def _theta(w: Array) -> Array:
    return jnp.sqrt(jnp.maximum(POLE - w, 0.0))


@partial(jax.custom_jvp, nondiff_argnums=(1,))
def scaled_tanh_derivatives(w: Array, order: int) -> list[Array]:
    """Return ``w**k`` times the k-th derivative of ``T`` for ``k = 0..order``.

    The derivatives are scaled because the plain fifth derivative underflows in float32
    while the standardised cumulants computed from it still matter.
    """
    q = w - POLE
    near = jnp.abs(q) < 0.25
    positive = q > 0

    r = jnp.sqrt(jnp.where(positive & ~near, q, 1.0))
    e = jnp.exp(-2 * r)
    t_pos = (1 - e) / ((1 + e) * r)
    s_pos = 4 * e / jnp.square(1 + e)

    w_neg = jnp.where(positive | near, 1.0, w)
    theta = _theta(w_neg)
    eps = w_neg / (math.pi / 2 + theta)
    sin = jnp.sin(eps)
    t_neg = jnp.cos(eps) / (sin * theta)
    s_neg = 1 / jnp.square(sin)

    # T and S = 1 - q T^2 obey 2 q T' = S - T and S' = -T S.
    t = [jnp.where(positive, t_pos, t_neg)]
    s = [jnp.where(positive, s_pos, s_neg)]
    ratio = w / jnp.where(near, 1.0, q)
    for k in range(order):
        t.append(ratio * (0.5 * s[k] - (k + 0.5) * t[k]))
        conv = sum(math.comb(k, j) * t[j] * s[k - j] for j in range(k + 1))
        s.append(-w * conv)

    num = series_terms(w.dtype) + order
    coef = np.zeros((order + 1, num))
    coef[0] = tanh_taylor(num)
    for k in range(order):
        coef[k + 1, :-1] = coef[k, 1:] * np.arange(1, num)
    table = jnp.asarray(coef, w.dtype)
    q_near = jnp.where(near, q, 0.0)
    shape = (order + 1,) + (1,) * w.ndim
    acc = jnp.broadcast_to(table[:, -1].reshape(shape), (order + 1,) + w.shape)
    for n in range(num - 2, -1, -1):
        acc = acc * q_near[None] + table[:, n].reshape(shape)
    return [jnp.where(near, acc[k] * w**k, t[k]) for k in range(order + 1)]


@scaled_tanh_derivatives.defjvp
def _scaled_tanh_derivatives_jvp(order, primals, tangents):
    (w,), (dw,) = primals, tangents
    t = scaled_tanh_derivatives(w, order + 1)
    out = [(k * t[k] + t[k + 1]) / w * dw for k in range(order + 1)]
    return t[: order + 1], out


@jax.custom_jvp
def log_cosh_sqrt(w: Array) -> Array:
    """Return ``L`` at ``w``; its absolute, not its relative, error is of the size of
    rounding."""
    q = w - POLE
    positive = q > 0
    r = jnp.sqrt(jnp.where(positive, q, 1.0))
    w_neg = jnp.where(positive, 1.0, w)
    sin = jnp.sin(w_neg / (math.pi / 2 + _theta(w_neg)))
    return jnp.where(positive, log_cosh(r), jnp.log(sin))


log_cosh_sqrt.defjvps(lambda dw, _, w: 0.5 * scaled_tanh_derivatives(w, 0)[0] * dw)


@jax.custom_jvp
def solve_saddle(y: Array) -> Array:
    """Return the ``w`` with ``T = y``, for ``y > 0``."""
    w = horner(SADDLE_FIT, y / (1 + y)) * (1 / y + 2) / y
    for _ in range(2 if jnp.finfo(y.dtype).bits <= 32 else 4):
        # Newton on 1/T, which is nearly linear in w towards the pole and nearly
        # sqrt(w) away from it.
        t, t1 = scaled_tanh_derivatives(w, 1)
        w = w * (1 + (y - t) * t / (y * t1))
    return w


solve_saddle.defjvps(lambda dy, w, _: w / scaled_tanh_derivatives(w, 1)[1] * dy)


def bregman(w: Array, w_ref: Array, step: Array) -> Array:
    r"""Return ``L(w) - L(w_ref) - (w - w_ref) L'(w) >= 0``, without cancellation.

    :param w: Point of tangency.
    :param w_ref: The other point.
    :param step: ``w_ref - w``, which a caller may know more accurately than the
        computed difference.
    """
    bits = jnp.finfo(w.dtype).bits
    nodes, weights = np.polynomial.legendre.leggauss(7 if bits <= 32 else 13)
    nodes, weights = (nodes + 1) / 2, weights / 2
    tail = (1,) * w.ndim
    # Taylor's formula with integral remainder; the integrand is analytic and far
    # from its pole when the two points are within a factor of three.
    at = w[None] + step[None] * jnp.asarray(nodes, w.dtype).reshape((-1,) + tail)
    close = jnp.abs(step) < 0.5 * (w + w_ref)
    at = jnp.where(close[None], at, 1.0)
    _, t1 = scaled_tanh_derivatives(at, 1)
    kernel = jnp.asarray((1 - nodes) * weights, w.dtype).reshape((-1,) + tail)
    near = -0.5 * jnp.square(step) * jnp.sum(kernel * t1 / at, axis=0)
    (t,) = scaled_tanh_derivatives(w, 0)
    far = log_cosh_sqrt(w) - log_cosh_sqrt(w_ref) + 0.5 * step * t
    return jnp.where(close, near, far)


def with_tangent_of(value: Array, surrogate: Array) -> Array:
    """Return ``value`` with the derivatives of ``surrogate``."""
    return lax.stop_gradient(value) + (surrogate - lax.stop_gradient(surrogate))


def deviance(x: Array, h: Array, z: Array) -> tuple[Array, Array]:
    """Return the saddle point ``w`` of ``X / h``, and minus the exponent of the
    saddlepoint density divided by ``h``. The second value has no gradient."""
    w = solve_saddle(x / h)
    frozen_w, x, h, z = lax.stop_gradient((w, x, h, z))
    q, q_ref = frozen_w - POLE, jnp.square(z)
    r = jnp.sqrt(jnp.maximum(q, 1.0))
    # With r = tanh(r)/y, z - r needs z X - h, whose rounding error alone would
    # cost sqrt(h z) units in the last place: form the product exactly.
    z_hi, z_lo = _halves(z)
    x_hi, x_lo = _halves(x)
    gap = ((h - z_hi * x_hi) - (z_hi * x_lo + z_lo * x_hi)) - z_lo * x_lo
    e = jnp.exp(-2 * r)
    z_minus_r = 2 * e / (1 + e) * (h / x) - gap / x
    step = jnp.where(q > 1.0, z_minus_r * (z + r), q_ref - q)
    return w, lax.stop_gradient(bregman(frozen_w, q_ref + POLE, step))


def saddle_log_density(x: Array, h: Array, z: Array) -> Array:
    """Return the second-order saddlepoint log-density of ``X``, with relative error
    O(h^-3)."""
    w, dev = deviance(x, h, z)
    gap = w - (jnp.square(z) + POLE)
    surrogate = h * (log_cosh(z) - log_cosh_sqrt(w)) + 0.5 * x * gap
    return with_tangent_of(-h * dev, surrogate) + saddle_prefactor(w, h)


def _halves(a: Array) -> tuple[Array, Array]:
    info = jnp.finfo(a.dtype)
    hi = lax.reduce_precision(a, exponent_bits=info.nexp, mantissa_bits=info.nmant // 2)
    return hi, a - hi


def saddle_prefactor(w: Array, h: Array) -> Array:
    """Return the saddlepoint log-density without its exponent."""
    t = scaled_tanh_derivatives(w, 5)
    k2 = -2 * t[1] / w
    # Standardised cumulants, in units which neither tail drives out of range.
    unit = [a * jnp.sqrt(w) for a in t]
    l3, l4, l5, l6 = (
        (-2.0) ** (n - 1) * unit[n - 1] * w ** (0.5 - n / 4) / (-2 * unit[1]) ** (n / 2)
        for n in (3, 4, 5, 6)
    )
    l33 = jnp.square(l3)
    a1 = l4 / 8 - 5 / 24 * l33
    a2 = (
        -l6 / 48
        + 35 / 384 * jnp.square(l4)
        + 7 / 48 * l3 * l5
        - 35 / 64 * l33 * l4
        + 385 / 1152 * jnp.square(l33)
    )
    correction = jnp.log1p((a1 + a2 / h) / h)
    return correction - 0.5 * jnp.log(2 * math.pi * h * k2)


def rho_log_density(x: Array, h: Array, z: Array) -> Array:
    r"""Return the log-density: an inverse Gaussian times :math:`\rho`, the probability
    that a Brownian excursion survives (:mod:`._pg_rho`)."""
    quad = jnp.square(h - z * x) / (2 * x)
    norm = jnp.log(h) - 1.5 * jnp.log(x) - 0.5 * math.log(2 * math.pi)
    tilt = h * jnp.log1p(jnp.exp(-2 * z))
    return norm - quad + tilt + log_rho(h, x)


@partial(jax.jit, static_argnames=("all_small", "all_large"))
def log_density(
    x: Array, h: Array, z: Array, *, all_small: bool = False, all_large: bool = False
) -> Array:
    """Return the log-density of ``X`` at ``x > 0`` for ``h > 0`` and ``z >= 0`` (one
    shape).

    :param all_small: whether no element needs the saddlepoint expansion.
    :param all_large: whether all elements use the saddlepoint expansion.
    """
    threshold = saddle_threshold(x.dtype)
    large = h > threshold
    if all_large:
        return saddle_log_density(x, h, z)
    out = rho_log_density(x, jnp.where(large, 1.0, h), z)
    if all_small:
        return out
    x_large = jnp.where(large, x, threshold)
    h_large = jnp.where(large, h, threshold)
    return jnp.where(large, saddle_log_density(x_large, h_large, z), out)
