# SPDX-License-Identifier: Apache-2.0
r"""Rejection sampler for the Polya-Gamma family, one envelope for every shape.

In the notation of :mod:`._pg_density`, the density of :math:`X=4x` is that of an
inverse Gaussian times :math:`\rho_h(X)`, the probability that a Brownian excursion
survives, which is decreasing and log-concave.  A tangent to :math:`\log\rho_h` at
:math:`x_0` only moves the drift of the inverse Gaussian, so the proposal is inverse
Gaussian again and the acceptance probability is at least 0.81 for every shape and
tilt.
"""

import math
from functools import partial
from typing import NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
from jax import Array, lax, random
from jax.scipy.special import gammaln

from numpyro_gpaug.distributions._pg_density import (
    POLE,
    deviance,
    saddle_prefactor,
    scaled_tanh_derivatives,
    series_log_rho,
)

#: Up to this shape ``rho`` comes from its two convergent series, above it from the
#: saddlepoint expansion.
SERIES_MAX = 12.0
_NUM_POLE_TERMS = 14
_COMPACT_FROM = 4096


class _Lanes(NamedTuple):
    """What a proposal needs, one entry per batch element."""

    h: Array
    z: Array
    drift: Array
    x0: Array
    shift: Array
    slope: Array
    pole: tuple[Array, ...]  # constant term of log rho, then the coefficients


def _log_sine_taylor(num: int) -> np.ndarray:
    r"""Taylor coefficients of
    :math:`\frac{4}{\pi w}\cos(\frac{\pi}{2}\sqrt{1-w})` about 0."""
    # With f(w) = cos(pi/2 sqrt(1 - w)): 4 (1 - w) f'' - 2 f' + pi^2/4 f = 0.
    f = [0.0, math.pi / 4]
    for n in range(num - 1):
        rise = (n + 1) * (4 * n + 2) * f[n + 1] - POLE * f[n]
        f.append(rise / (4 * (n + 2) * (n + 1)))
    return np.array(f[1:]) * 4 / math.pi


def pole_coefficients(h: Array, num_terms: int) -> tuple[Array, ...]:
    r"""The constant of the right-tail expansion, then its coefficients in powers of
    :math:`1/X`, which vanish from ``k = h`` on when ``h`` is an integer."""
    g = _log_sine_taylor(num_terms)
    p = [jnp.ones_like(h)]
    for n in range(1, num_terms):
        terms = (((1 - h) * k - n) * float(g[k]) * p[n - k] for k in range(1, n + 1))
        p.append(jnp.asarray(sum(terms) / n))
    falling = jnp.ones_like(h)
    const = h * math.log(POLE / math.pi) - gammaln(h + 1)
    out = [const + 0.5 * math.log(2 * math.pi)]
    for k in range(num_terms):
        out.append(p[k] * falling)
        falling = falling * (h - 1 - k) * (2 / POLE)
    return tuple(out)


def log_rho(x: Array, h: Array, pole: tuple[Array, ...]) -> Array:
    """``log(rho)`` for ``0 < h <= SERIES_MAX``: alternating series to the left of a
    switch, expansion at the first pole to its right."""
    bits = jnp.finfo(x.dtype).bits
    switch = 2.5 + 0.7 * h if bits <= 32 else 4.0 + 0.6 * h
    left = x < switch
    x_left = jnp.where(left, x, 1.0)
    out_left = series_log_rho(x_left, h, 8 if bits <= 32 else 13)

    x_right = jnp.where(left, switch, x)
    inverse = 1 / x_right
    total = jnp.zeros_like(x_right)
    for coef in pole[:0:-1]:
        total = total * inverse + coef
    out_right = (
        pole[0]
        + (h + 0.5) * jnp.log(x_right)
        - 0.5 * POLE * x_right
        + 0.5 * jnp.square(h) * inverse
        + jnp.log(total)
    )
    return jnp.where(left, out_left, out_right)


def _series_lanes(h: Array, z: Array, num_terms: int) -> _Lanes:
    (mean,) = scaled_tanh_derivatives(jnp.square(z) + POLE, 0)
    # Below h = 1 a tangent at the mean is so flat that the proposal keeps the heavy
    # tail of a first-passage time.
    x0 = jnp.where(h < 1, jnp.maximum(h * mean, 0.6), h * mean)
    pole = pole_coefficients(h, num_terms)
    value, slope = jax.jvp(lambda x: log_rho(x, h, pole), (x0,), (jnp.ones_like(x0),))
    slope = jnp.maximum(-slope, 0.0)
    drift = jnp.sqrt(jnp.square(z) + 2 * slope)
    return _Lanes(h, z, drift, x0, value, slope, pole)


def _series_log_accept(x: Array, lane: _Lanes) -> Array:
    ratio = log_rho(x, lane.h, lane.pole) - lane.shift
    return ratio + lane.slope * (x - lane.x0)


def _saddle_lanes(h: Array, z: Array) -> _Lanes:
    w = jnp.square(z) + POLE
    y0, t1 = scaled_tanh_derivatives(w, 1)
    shift, slope = jax.jvp(
        lambda a: saddle_prefactor(a, h) + 1.5 * jnp.log(_tangent_y(a)),
        (w,),
        (w / t1,),
    )
    # In units of y = X/h; to leading order the proposal has the target's mean.
    slope = -slope / h
    drift = jnp.sqrt(1 / jnp.square(y0) + 2 * slope)
    return _Lanes(h, z, drift, y0, shift, slope, ())


def _tangent_y(w: Array) -> Array:
    return scaled_tanh_derivatives(w, 0)[0]


def _saddle_log_accept(x: Array, lane: _Lanes) -> Array:
    y = x / lane.h
    w, dev = deviance(x, lane.h, lane.z)
    gap = y - lane.x0
    bend = jnp.square(gap / lane.x0) / (2 * y) + lane.slope * gap
    prefactor = saddle_prefactor(w, lane.h) + 1.5 * jnp.log(y) - lane.shift
    return lane.h * (bend - dev) + prefactor


def _propose(
    key: Array, lane: _Lanes, shape: tuple[int, ...], kind: str
) -> tuple[Array, Array]:
    """One inverse-Gaussian proposal per lane, and whether it is accepted."""
    dtype = lane.h.dtype
    # One call to the generator: each call adds its own copy of the cipher to the
    # program, which dominates the time to compile it.
    low = float(np.nextafter(np.array(-1, dtype), np.array(0, dtype)))
    u = random.uniform(key, (3, *shape), dtype, low, 1.0)
    lane = jax.tree.map(lambda a: jnp.broadcast_to(a, shape), lane)

    spread = jnp.square(lax.erf_inv(u[0])) / (lane.h * lane.drift)
    root = 1 + spread + jnp.sqrt(spread * (spread + 2))
    mean = lane.h / lane.drift
    choose = 0.5 * (1 + u[1]) * (1 + 1 / root) <= 1
    x = jnp.where(choose, mean / root, mean * root)
    x = jnp.maximum(x, jnp.finfo(dtype).tiny)

    accept = _series_log_accept if kind == "series" else _saddle_log_accept
    return x, jnp.log(0.5 * (1 + u[2])) <= accept(x, lane)


@partial(jax.jit, static_argnames=("num", "kind", "num_terms"))
def _sample_regime(
    key: Array, h: Array, z: Array, *, num: int, kind: str, num_terms: int
) -> Array:
    """``num`` draws of ``X`` for each entry of the flat ``h``, ``z``."""
    lanes = _series_lanes(h, z, num_terms) if kind == "series" else _saddle_lanes(h, z)
    batch = h.shape[0]
    total = num * batch

    def until_accepted(key, lanes, width, x, done):
        def redraw(state):
            count, x, done = state
            x_new, ok = _propose(random.fold_in(key, count), lanes, (width,), kind)
            return count + 1, jnp.where(done, x, x_new), done | ok

        start = (0, x, done)
        return lax.while_loop(lambda state: ~jnp.all(state[2]), redraw, start)[1]

    def take(index):
        return jax.tree.map(lambda a: a[index % batch], lanes)

    if total <= _COMPACT_FROM:
        x, done = jnp.zeros(total, h.dtype), jnp.zeros(total, bool)
        x = until_accepted(key, take(np.arange(total)), total, x, done)
        return x.reshape(num, batch)

    # At most 19% of the lanes are rejected on average.  Looping over all of them
    # until the last is accepted would waste most of the work.
    width = total // 4
    x, done = _propose(key, lanes, (num, batch), kind)

    def retry(state):
        count, x, done = state
        index = jnp.nonzero(~done, size=width, fill_value=total)[0]
        key_next = random.fold_in(key, count)
        blank = jnp.zeros(width, x.dtype)
        x_sub = until_accepted(key_next, take(index), width, blank, index == total)
        x = x.at[index].set(x_sub, mode="drop")
        return count + 1, x, done.at[index].set(True, mode="drop")

    start = (0, x.reshape(-1), done.reshape(-1))
    _, x, _ = lax.while_loop(lambda state: ~jnp.all(state[2]), retry, start)
    return x.reshape(num, batch)


def sample(
    key: Array, h: Array, z: Array, num: int, concrete_h: np.ndarray | None
) -> Array:
    """``num`` draws of ``X`` for each entry of the flat ``h >= 0``, ``z >= 0``.

    :param concrete_h: The values of ``h`` if they are known, so that each regime is
        run on its own entries only, with no more terms than they need.
    """
    keys = dict(zip(("series", "saddle"), random.split(key), strict=True))
    out = jnp.zeros((num, h.shape[0]), h.dtype)
    if concrete_h is None:
        # A shape of zero is a point mass; any stand-in keeps the arithmetic finite.
        parts = {"series": (h > 0) & (h <= SERIES_MAX), "saddle": h > SERIES_MAX}
        stand_in = {"series": 1.0, "saddle": 2 * SERIES_MAX}
        for kind, member in parts.items():
            safe = jnp.where(member, h, stand_in[kind])
            draws = _sample_regime(
                keys[kind], safe, z, num=num, kind=kind, num_terms=_NUM_POLE_TERMS
            )
            out = jnp.where(member[None], draws, out)
        return out

    positive = concrete_h > 0
    for kind, members in (
        ("series", positive & (concrete_h <= SERIES_MAX)),
        ("saddle", concrete_h > SERIES_MAX),
    ):
        if not members.any():
            continue
        values = concrete_h[members]
        whole = kind == "series" and np.all(values == np.round(values))
        terms = int(values.max()) if whole else _NUM_POLE_TERMS
        if members.all():
            return _sample_regime(keys[kind], h, z, num=num, kind=kind, num_terms=terms)
        index = np.flatnonzero(members)
        draws = _sample_regime(
            keys[kind], h[index], z[index], num=num, kind=kind, num_terms=terms
        )
        out = out.at[:, index].set(draws)
    return out
