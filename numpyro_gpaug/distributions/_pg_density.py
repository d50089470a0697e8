# SPDX-License-Identifier: Apache-2.0
r"""Log-density of the Polya-Gamma family for every real shape.

All formulas are for :math:`X = 4x`, whose distribution has the Laplace transform
:math:`\{\cosh z/\cosh\sqrt{z^2+2t}\}^h` with :math:`h=b`, :math:`z=|c|/2`.  Notation:

* :math:`T(q)=\tanh(\sqrt q)/\sqrt q` and :math:`L(q)=\log\cosh\sqrt q`, so that
  :math:`L'=T/2`; both continue analytically to :math:`q>-\pi^2/4`, and are computed
  from :math:`w=q+\pi^2/4>0` because the right tail lives at :math:`w\to 0`;
* :math:`y=X/h`, and :math:`w_y` solves :math:`T=y` (the saddle point).

Three evaluators cover the half-line.  The alternating series (small :math:`X`) and the
contour integral are exact to rounding.  For large :math:`h` the exponent of the contour
integral would lose :math:`h` units of rounding, so a second-order saddlepoint expansion
is used, whose error falls as :math:`h^{-3}`.
"""

import math
from functools import partial

import jax
import jax.numpy as jnp
import numpy as np
from jax import Array, lax

from numpyro_gpaug.math.special import horner, series_terms, tanh_taylor

POLE = math.pi**2 / 4
LOG2 = math.log(2.0)

# w_y y^2 / (1 + 2y) as a polynomial in y / (1 + y); relative error 6e-3.
_SADDLE_FIT = (1.00038262, -2.10773872, 5.94080879, -5.94887077, 2.11569219)


def saddle_threshold(dtype: jnp.dtype) -> float:
    """The shape above which the saddlepoint expansion is used."""
    return 12.0 if jnp.finfo(dtype).bits <= 32 else 1000.0


def log_cosh(z: Array) -> Array:
    """Return ``log(cosh(z))`` for ``z >= 0``."""
    return z + jnp.log1p(jnp.exp(-2 * z)) - LOG2


def _theta(w: Array) -> Array:
    return jnp.sqrt(jnp.maximum(POLE - w, 0.0))


def _scaled_tanh_derivatives(w: Array, order: int) -> list[Array]:
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


@partial(jax.custom_jvp, nondiff_argnums=(1,))
def scaled_tanh_derivatives(w: Array, order: int) -> list[Array]:
    """Return :func:`_scaled_tanh_derivatives`, differentiable to every order."""
    return _scaled_tanh_derivatives(w, order)


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


@log_cosh_sqrt.defjvp
def _log_cosh_sqrt_jvp(primals, tangents):
    (w,), (dw,) = primals, tangents
    (t,) = scaled_tanh_derivatives(w, 0)
    return log_cosh_sqrt(w), 0.5 * t * dw


def _saddle_guess(y: Array) -> Array:
    return horner(_SADDLE_FIT, y / (1 + y)) * (1 / y + 2) / y


@jax.custom_jvp
def solve_saddle(y: Array) -> Array:
    """Return the ``w`` with ``T = y``, for ``y > 0``."""
    w = _saddle_guess(y)
    for _ in range(2 if jnp.finfo(y.dtype).bits <= 32 else 4):
        # Newton on 1/T, which is nearly linear in w towards the pole and nearly
        # sqrt(w) away from it.
        t, t1 = scaled_tanh_derivatives(w, 1)
        w = w * (1 + (y - t) * t / (y * t1))
    return w


@solve_saddle.defjvp
def _solve_saddle_jvp(primals, tangents):
    (y,), (dy,) = primals, tangents
    w = solve_saddle(y)
    _, t1 = scaled_tanh_derivatives(w, 1)
    return w, w / t1 * dy


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


def series_log_rho(x: Array, h: Array, num_terms: int = 8) -> Array:
    r"""Return ``log(rho)`` by its alternating series. ``rho`` is the density of ``X``
    at ``z = 0``, divided by ``2**h`` times the density of the first passage of Brownian
    motion through ``h``."""
    total = jnp.zeros_like(x)
    binom = jnp.ones_like(h)
    for n in range(1, num_terms):
        if n > 1:
            binom = binom * (h + (n - 1)) / n
        sign = 1.0 if n % 2 else -1.0
        total = total + sign * binom * (2 * n + h) * jnp.exp(-2 * n * (n + h) / x)
    return jnp.log1p(-total)


def series_log_density(x: Array, h: Array, z: Array) -> Array:
    """Return the log-density in inverse-Gaussian form, which is accurate if the series
    needs few terms."""
    quad = jnp.square(h - z * x) / (2 * x)
    norm = jnp.log(h) - 1.5 * jnp.log(x) - 0.5 * math.log(2 * math.pi)
    tilt = h * jnp.log1p(jnp.exp(-2 * z))
    return norm - quad + tilt + series_log_rho(x, h)


def contour_log_density(x: Array, h: Array, z: Array) -> Array:
    r"""Return the log-density by a Bromwich integral on the parabola
    :math:`s=-\pi^2/8+\delta(1+iv)^2`, which opens around the branch cut."""
    bits = jnp.finfo(x.dtype).bits
    num, log_drop = (16, 18.0) if bits <= 32 else (32, 42.0)
    # The integral does not depend on the contour, so the nodes carry no gradient.
    xc, hc = lax.stop_gradient((x, h))
    w = _saddle_guess(xc / hc)
    delta = jnp.maximum(0.5 * w, 2.0 / xc)
    small = hc < 1
    # For small h the integral of exp(s X) itself, which is zero, is subtracted:
    # the density is O(h) and would otherwise be left over from cancellation.
    offset = jnp.where(small, 0.0, 1.0)
    l0 = jnp.where(small, 0.0, log_cosh_sqrt(2 * delta))

    v_max = jnp.sqrt(log_drop / (xc * delta))
    grid = (np.arange(num) + 0.5) / num
    v = v_max[None] * jnp.asarray(grid, x.dtype).reshape((-1,) + (1,) * x.ndim)
    re_l, im_l = _complex_log_sin(delta[None], v)

    damp = jnp.exp(-x * delta * jnp.square(v))
    phase = 2 * x * delta * v
    mod = jnp.expm1(-h * (re_l - l0))
    arg = h * im_l
    half = jnp.sin(0.5 * arg)
    a = mod * (1 - 2 * jnp.square(half)) - 2 * jnp.square(half) + offset
    b = -(mod + 1) * jnp.sin(arg)
    cos, sin = jnp.cos(phase), jnp.sin(phase)
    # Real part of (a + ib) exp(i phase) (1 + iv).
    terms = damp * ((a * cos - b * sin) - v * (a * sin + b * cos))
    integral = jnp.sum(terms, axis=0) * (v_max / num)
    scale = jnp.log(2 * delta / math.pi)
    exponent = h * (log_cosh(z) - l0) + x * ((delta - 0.5 * POLE) - 0.5 * jnp.square(z))
    return exponent + scale + jnp.log(integral)


def _complex_log_sin(delta: Array, v: Array) -> tuple[Array, Array]:
    """Return the real and imaginary parts of ``L`` on the contour, continuous along it,
    as the log-sine of the distance from the branch point (no cancellation near it)."""
    sigma_re, sigma_im = delta * (1 - jnp.square(v)), 2 * delta * v
    re, im = POLE - 2 * sigma_re, 2 * sigma_im
    root = jnp.sqrt(0.5 * (jnp.hypot(re, im) + jnp.abs(re)))
    other = im / (2 * root)
    theta_re = jnp.where(re >= 0, root, other)
    theta_im = -jnp.where(re >= 0, other, root)
    den_re = math.pi / 2 + theta_re
    den = jnp.square(den_re) + jnp.square(theta_im)
    a = 2 * (sigma_re * den_re + sigma_im * theta_im) / den
    b = 2 * (sigma_im * den_re - sigma_re * theta_im) / den
    e = jnp.exp(-2 * b)
    sin, cos = jnp.sin(a), jnp.cos(a)
    gap = -jnp.expm1(-2 * b)
    modulus = jnp.square(gap) + 4 * e * jnp.square(sin)
    turn = jnp.arctan2(-2 * e * sin * cos, gap + 2 * e * jnp.square(sin))
    return b - LOG2 + 0.5 * jnp.log(modulus), math.pi / 2 - a + turn


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
    head = (x <= 1.5) | (5 * x <= h)

    x_head = jnp.where(head & ~large, x, 1.0)
    h_head = jnp.where(large, 1.0, h)
    out_head = series_log_density(x_head, h_head, z)

    x_tail = jnp.where(head | large, 2.0, x)
    h_tail = jnp.where(head | large, 1.0, h)
    out_tail = contour_log_density(x_tail, h_tail, z)
    out = jnp.where(head, out_head, out_tail)
    if all_small:
        return out
    x_large = jnp.where(large, x, threshold)
    h_large = jnp.where(large, h, threshold)
    return jnp.where(large, saddle_log_density(x_large, h_large, z), out)
