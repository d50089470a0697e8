# SPDX-License-Identifier: Apache-2.0
r"""The probability that one of several independent normals is the largest.

With ``F(t) = prod_l Phi((t - m_l) / s_l)``, the distribution function of the maximum,
normal k is the largest with probability ``int (log F_k)' F dt``: its share of the slope
of ``log F``. Gauss-Hermite nodes lie at the scale of one normal and miss the variation
of narrower ones. Here all normals share one set of nodes, which resolves every one of
them:

Every factor of F is at least F. So where F is no longer negligible, at ``bottom``, no
normal has its mean more than r of its own standard deviations further up. From there
on, every variation on a scale ``s`` is within ``2 r s`` of ``bottom``. At a distance d
nothing is narrower than ``d / 2 r``, and the trapezoid rule in ``log d`` (Trefethen and
Weideman, 2014, The exponentially convergent trapezoidal rule) resolves all scales with
a number of nodes that grows only with the logarithm of their ratio.
"""

from __future__ import annotations

import math
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
from jax import Array, lax

from numpyro_gpaug.math import normal

# The number of standardised distances in one chunk, which fits into a fast cache.
CHUNK = 8192

# Standard deviations are raised to this fraction of the largest one of the datum,
# because the nodes do not resolve smaller ones. Probabilities change by less than this
# fraction.
_LEAST_RATIO = 2e-7
_NEWTON_STEPS = 12


class _Rule(NamedTuple):
    """A rule for one dtype.

    :param num: number of nodes.
    :param log_tail: logarithm of the largest negligible F.
    :param below: the point of a standard normal with this log-probability below it.
    :param above: the point above which a standard normal is negligible.
    """

    num: int
    log_tail: float
    below: float
    above: float


# The number of nodes in float32.
NODES = 96
_RULES = {
    "float32": _Rule(NODES, math.log(1e-6), -4.753424, 5.5),
    "float64": _Rule(160, math.log(1e-10), -6.361341, 6.7),
}


class _Mesh(NamedTuple):
    """Nodes ``bottom + distance`` of (N, C) normals, in order along the leading axis.

    :param distance: (Q, N, 1).
    :param weights: weights of the nodes, of the same shape.
    :param offset: ``bottom`` minus the means, (N, C).
    """

    distance: Array
    weights: Array
    offset: Array


def argmax_probability(mean: Array, variance: Array, index: Array) -> Array:
    """The probability that ``f_index`` is the largest of independent normals.

    They are ``f_k ~ N(mean_k, variance_k)``.

    The absolute error is below 1e-8 in float64 and 1e-5 in float32, rounding of the
    means apart, for any means and for variances that differ by up to 1e12 within a
    datum. The derivatives come from the same nodes in the same pass, in O(C) memory.

    :param mean: (..., C).
    :param variance: of the same shape, >= 0; a normal without variance gets 2e-7 of the
        largest standard deviation.
    :param index: integers of the batch shape.
    :return: probabilities, of the batch shape.

    **Example**

    >>> import jax.numpy as jnp
    >>> m, v = jnp.array([2.0, 0.0, 0.0]), jnp.array([1.0, 0.01, 0.01])
    >>> print(f"{argmax_probability(m, v, jnp.array(0)):.4f}")
    0.9736
    """
    mean, variance = jnp.broadcast_arrays(mean, variance)
    index = jnp.asarray(index, jnp.int32)
    chosen = jax.nn.one_hot(index, mean.shape[-1], dtype=mean.dtype)
    mean, variance, chosen = jnp.broadcast_arrays(mean, variance, chosen)
    rows = (x.reshape(-1, x.shape[-1]) for x in (mean, _raised(variance), chosen))
    return _chosen_probability(*rows).reshape(mean.shape[:-1])


def argmax_probabilities(mean: Array, variance: Array) -> Array:
    """Return the probability that each of several normals is the largest, by one rule.

    :param mean: (..., C).
    :param variance: of the same shape, >= 0; see :func:`argmax_probability`.
    :return: probabilities, (..., C), that sum to one.

    **Example**

    >>> import jax.numpy as jnp
    >>> m, v = jnp.array([2.0, 0.0, 0.0]), jnp.array([1.0, 0.01, 0.01])
    >>> [f"{p:.4f}" for p in argmax_probabilities(m, v)]
    ['0.9736', '0.0132', '0.0132']
    """
    mean, variance = jnp.broadcast_arrays(mean, variance)
    m, v = (x.reshape(-1, x.shape[-1]) for x in (mean, _raised(variance)))
    shares, _ = _shares(m, v, jnp.zeros_like(m))
    return shares.reshape(mean.shape)


def _raised(variance: Array) -> Array:
    """Return variances that are positive, and not too far below the largest."""
    tiny = jnp.finfo(variance.dtype).eps ** 4
    largest = lax.stop_gradient(variance).max(-1, keepdims=True)
    return jnp.maximum(variance, _LEAST_RATIO**2 * largest + tiny)


@jax.custom_jvp
def _chosen_probability(mean: Array, variance: Array, chosen: Array) -> Array:
    """Return probabilities of the normals that the (N, C) one-hot rows choose, (N,)."""
    shares, _ = _shares(mean, variance, chosen)
    return (shares * chosen).sum(-1)


@_chosen_probability.defjvp
def _chosen_probability_jvp(primals, tangents):
    shares, (by_mean, by_variance) = _shares(*primals)
    slope = by_mean * tangents[0] + by_variance * tangents[1]
    return (shares * primals[2]).sum(-1), slope.sum(-1)


def _shares(
    mean: Array, variance: Array, chosen: Array
) -> tuple[Array, tuple[Array, Array]]:
    """Return probabilities of all normals, (N, C), and the derivatives of ``(chosen *
    probabilities).sum(-1)`` in the means and variances.

    The sum of the probabilities is one up to the error of the rule. That error is
    nearly the same fraction of each, so the probabilities are divided by their sum.
    """
    scale_inv = lax.rsqrt(variance)
    # The rule is valid for any nodes, so derivatives go through the integrand alone.
    mesh = lax.stop_gradient(_mesh(mean, 1 / scale_inv))
    offset = mesh.offset - (mean - lax.stop_gradient(mean))
    by_chosen = chosen * scale_inv

    def add(sums: Any, nodes: Any) -> tuple[Any, None]:
        distance, weights = nodes
        z = _standard(distance + offset, scale_inv)
        cdf = normal.cdf(z)
        hazard = normal.density(z) / cdf
        mass = weights * cdf.prod(-1, keepdims=True) * hazard
        # The derivative of log(F hazard) for the chosen class, in units of the standard
        # deviations.
        others = by_chosen * hazard
        others = others - others.sum(-1, keepdims=True)
        by_mean = mass * (by_chosen * z + others)
        by_scale = mass * (by_chosen * (z * z - 1) + others * z)
        terms = mass, by_mean, by_scale
        return tuple(x + y.sum(0) for x, y in zip(sums, terms, strict=True)), None

    zeros = jnp.zeros_like(mean)
    steps = _num_steps(len(mesh.weights), mean.size)
    nodes = [x.reshape(steps, -1, *x.shape[1:]) for x in mesh[:2]]
    (mass, by_mean, by_scale), _ = lax.scan(add, (zeros,) * 3, nodes)
    mass = mass * scale_inv
    total = mass.sum(-1, keepdims=True)
    unit = scale_inv / total
    return mass / total, (by_mean * unit, 0.5 * by_scale * unit * scale_inv)


def _num_steps(num_nodes: int, size: int) -> int:
    """Return the smallest divisor of the number of nodes whose chunks are small
    enough."""
    divisors = (k for k in range(1, num_nodes) if num_nodes % k == 0)
    return next((k for k in divisors if num_nodes // k * size <= CHUNK), num_nodes)


def _mesh(mean: Array, scale: Array) -> _Mesh:
    rule, rate = _RULES[str(mean.dtype)], 1 / scale

    def relative_to(index: Array) -> tuple[Array, Array]:
        origin = jnp.take_along_axis(mean, index, -1)
        return origin, mean - origin

    def log_cdf_and_slope(t: Array) -> tuple[Array, Array]:
        z = _standard(t - centred, rate)
        cdf = normal.cdf(z)
        slope = (normal.density(z) / cdf * rate).sum(-1, keepdims=True)
        return jnp.log(cdf).sum(-1, keepdims=True), slope

    def newton(_: int, t: Array) -> Array:
        value, slope = log_cdf_and_slope(t)
        return t + jnp.maximum(rule.log_tail - value, 0) / slope

    lowest = jnp.argmax(mean + rule.below * scale, -1, keepdims=True)
    origin, centred = relative_to(lowest)
    start = (centred + rule.below * scale).max(-1, keepdims=True)
    # log F is concave, so Newton steps from below do not overshoot, and an early stop
    # is harmless.
    bottom = lax.fori_loop(0, _NEWTON_STEPS, newton, start)
    _, slope = log_cdf_and_slope(bottom)

    # The difference of two close numbers is exact, so values near the narrowest normals
    # are measured from one of them.
    in_play = centred + rule.above * scale > bottom
    narrowest = jnp.argmin(jnp.where(in_play, scale, jnp.inf), -1, keepdims=True)
    moved, centred = relative_to(narrowest)
    bottom = bottom - (moved - origin)
    top = (centred + rule.above * scale).max(-1, keepdims=True)
    # Up to the first node, F grows at most by a factor of e.
    first, last = -jnp.log(slope), jnp.log(jnp.maximum(top - bottom, 2 / slope))
    spacing = (last - first) / (rule.num - 1)
    steps = jnp.arange(rule.num, dtype=mean.dtype)[:, None, None]
    distance = jnp.exp(first + spacing * steps)
    return _Mesh(distance, distance * spacing, bottom - centred)


def _standard(distance: Array, rate: Array) -> Array:
    """Return standardised distances, clipped so that the cdf is positive and the square
    finite. Rounding may put a mean with hardly any variance too far above a node."""
    return jnp.clip(distance * rate, -8.0, 30.0)
