# SPDX-License-Identifier: Apache-2.0
"""Nodes and weights for one-dimensional expectations.

Trapezoid rules converge geometrically for integrands that are analytic and decay on
both sides (Trefethen and Weideman, 2014, The exponentially convergent trapezoidal
rule).
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax import Array, lax
from jax.typing import ArrayLike

# In units of the width of the transition, the density of nodes is 1 / s + BUNCHING /
# sqrt(TURN^2 + f^2), up to a constant step.
_TURN = 2.0
_BUNCHING = 2.0
# In standard deviations: the distance up to which a peak is well covered by the nodes
# around the mean, and the largest distance at which a peak is searched.
_NEAR, _FAR = 2.5, 64.0


def gaussian_nodes(
    mean: Array, variance: Array, centre: ArrayLike = 0.0, width: ArrayLike = 1.0
) -> tuple[Array, Array]:
    r"""Return nodes and log-weights for ``E g(f)``, ``f ~ N(mean, variance)``, where
    ``g`` turns near one point and saturates, or decays, away from it.

    The spacing of Gauss-Hermite nodes grows with the standard deviation, and steps over
    the turn of ``g`` if that is large. These nodes keep a spacing within the turn that
    grows only with the logarithm of the variance: for the logistic function the error
    is below 1e-9 (float64) for standard deviations to 1e4.

    :param mean: any shape.
    :param variance: of that shape, >= 0.
    :param centre: where ``g`` turns.
    :param width: the width of the turn, > 0; 1 for the logistic function.
    :return: nodes and log-weights, each with a trailing axis over nodes.

    **Example**

    >>> import jax, jax.numpy as jnp
    >>> f, log_weights = gaussian_nodes(jnp.array(300.0), jnp.array(9e4))
    >>> print(f"{(jnp.exp(log_weights) * jax.nn.sigmoid(f)).sum():.3f}")
    0.841
    """
    mean, variance = jnp.broadcast_arrays(mean, variance)
    scale = _scale(variance)
    z, log_weights = _standard_nodes(mean, scale, centre, width)
    return mean[..., None] + scale[..., None] * z, log_weights


def _scale(variance: Array) -> Array:
    return jnp.sqrt(jnp.maximum(variance, jnp.finfo(variance.dtype).tiny))


def peaked_nodes(
    log_g: Callable[[Array], Array],
    mean: Array,
    variance: Array,
    centre: ArrayLike = 0.0,
    width: ArrayLike = 1.0,
) -> tuple[Array, Array]:
    r"""Return nodes and log-weights of :func:`gaussian_nodes`, shifted to the peak of
    ``g(f)`` times the density of ``f ~ N(mean, variance)`` if the unshifted nodes would
    miss this peak.

    :param log_g: elementwise, of the broadcast shape; with the density, unimodal.
    :param mean: any shape.
    :param variance: of that shape, >= 0.
    :param centre: where ``g`` turns, for means near the peak.
    :param width: the width of the turn.
    :return: nodes and log-weights, each with a trailing axis over nodes.

    **Example**

    >>> import jax.numpy as jnp
    >>> f, log_weights = peaked_nodes(
    ...     lambda f: 9 * f, jnp.array(0.0), jnp.array(1.0)
    ... )
    >>> print(f"{jax.nn.logsumexp(log_weights + 9 * f):.2f}")  # 9^2 / 2
    40.50
    """
    scale = _scale(variance)
    fixed = lax.stop_gradient((mean, scale))
    peak = lax.stop_gradient(_peak(log_g, *fixed))
    return shifted_nodes(mean, scale, peak, centre, width)


def shifted_nodes(
    mean: Array, scale: Array, peak: Array, centre: ArrayLike, width: ArrayLike
) -> tuple[Array, Array]:
    """Return the nodes of :func:`peaked_nodes` for a known peak.

    :param mean: mean of ``f``.
    :param scale: its standard deviation.
    :param peak: the place of the peak, in standard deviations from the mean.
    :param centre: where ``g`` turns, for peaks near the mean.
    :param width: the width of the turn.
    """
    shift = jnp.where(jnp.abs(peak) > _NEAR, peak, 0)
    here = lax.stop_gradient(mean) + shift * lax.stop_gradient(scale)
    centre = jnp.where(shift == 0, centre, here)
    mean, scale, here, shift = jnp.broadcast_arrays(mean, scale, here, shift)
    z, log_weights = _standard_nodes(here, scale, centre, width)
    mean, scale, shift = (x[..., None] for x in (mean, scale, shift))
    # The ratio of the normal densities about the mean and about the peak.
    log_weights = log_weights - shift * (z + 0.5 * shift)
    return mean + scale * (z + shift), log_weights


def _standard_nodes(
    mean: Array, scale: Array, centre: ArrayLike, width: ArrayLike
) -> tuple[Array, Array]:
    """Return nodes of :func:`gaussian_nodes` in standard deviations from the mean, and
    their log-weights."""
    dtype = jnp.result_type(mean, scale)
    num, reach = (96, 7.5) if dtype == jnp.float64 else (64, 5.5)
    mean, scale, centre, width = jnp.broadcast_arrays(
        mean, scale, jnp.asarray(centre, dtype), jnp.asarray(width, dtype)
    )
    grid = jnp.linspace(0, 1, num, dtype=dtype)
    away = mean - centre
    # Otherwise the step is small or the transition is out of reach.
    wide = (scale > width) & (jnp.abs(away) < 2 * reach * scale)
    s = jnp.where(wide, scale / width, 1.0)[..., None]
    shift = jnp.where(wide, away / scale, 0.0)[..., None]

    def stretched(z: float) -> Array:
        return z + shift + _BUNCHING * jnp.arcsinh(s * (z + shift) / _TURN)

    low, high = stretched(-reach), stretched(reach)
    t = low + (high - low) * grid
    u = _unstretch(jnp.abs(t), s) * jnp.sign(t)
    slope = 1 / (1 + _BUNCHING * s / (_TURN * jnp.cosh(u)))
    z = jnp.where(wide[..., None], t - _BUNCHING * u - shift, (2 * grid - 1) * reach)
    log_weights = jnp.where(wide[..., None], jnp.log(slope), 0.0) - 0.5 * z * z
    # The rule is valid for any nodes, so derivatives go through the integrand alone.
    return lax.stop_gradient((z, jax.nn.log_softmax(log_weights)))


def _peak(log_g: Callable[[Array], Array], mean: Array, scale: Array) -> Array:
    """Find the maximum of ``log_g(mean + scale z) - z^2 / 2`` by bisection."""

    def falls(z: Array) -> Array:
        f, rate = jnp.broadcast_arrays(mean + scale * z, scale)
        slope = jax.jvp(log_g, (f,), (rate,))[1]
        # Outside of the range of the dtype: the peak is closer to the mean.
        return jnp.where(jnp.isnan(slope), z > 0, slope < z)

    def halve(_: int, ends: tuple[Array, Array]) -> tuple[Array, Array]:
        low, high = ends
        middle = 0.5 * (low + high)
        left = falls(middle)
        return jnp.where(left, low, middle), jnp.where(left, middle, high)

    shape = jnp.broadcast_shapes(
        jax.eval_shape(log_g, mean).shape, mean.shape, scale.shape
    )
    far = jnp.full(shape, _FAR, mean.dtype)
    low, high = lax.fori_loop(0, 16, halve, (-far, far))
    return 0.5 * (low + high)


def _unstretch(t: Array, s: Array) -> Array:
    """Solve ``BUNCHING u + TURN sinh(u) / s = t >= 0`` by Newton's method, from above,
    where it never overshoots because the function is convex."""
    u: Array = jnp.minimum(t / _BUNCHING, jnp.arcsinh(s * t / _TURN))
    for _ in range(6):
        # One exponential: library calls of sinh and cosh take ten times as long.
        up = jnp.exp(u)
        down = 1 / up
        value = _BUNCHING * u + 0.5 * _TURN * (up - down) / s - t
        u = u - value / (_BUNCHING + 0.5 * _TURN * (up + down) / s)
    return u


def log_gamma_nodes(shape: Array) -> tuple[Array, Array]:
    r"""Return nodes ``x`` and log-weights for ``E g(x)``, ``exp(x) ~ Gamma(a, a)``.

    The log-density ``a (x - exp(x))`` is analytic for ``|Im x| < pi / 2`` and decays on
    both sides, so the trapezoid rule is spectrally accurate: to 1e-8 (float64) for
    ``a >= 1 / 2``; the left tail is longer for smaller ``a``.

    :param shape: ``a``, any shape, > 0.
    :return: nodes and log-weights, each with a trailing axis over nodes.

    **Example**

    >>> import jax.numpy as jnp
    >>> x, log_weights = log_gamma_nodes(jnp.array(2.0))
    >>> print(f"{(jnp.exp(log_weights) * jnp.exp(2 * x)).sum():.4f}")  # 1 + 1 / a
    1.5000
    """
    shape = jnp.asarray(shape)
    double = shape.dtype == jnp.float64
    num, drop, longest = (112, 22.0, 120.0) if double else (72, 16.0, 50.0)
    a = shape[..., None]
    grid = jnp.linspace(0, 1, num, dtype=shape.dtype)
    q = drop / a
    # Upper bounds of the roots of exp(x) - x - 1 = q on both sides of zero.
    root = jnp.sqrt(2 * q)
    left = jnp.minimum(q + jnp.minimum(1, root), longest)
    x = lax.stop_gradient((left + jnp.log1p(q + root)) * grid - left)
    return x, jax.nn.log_softmax(a * (x - jnp.expm1(x)))


def gauss_hermite(num_points: int, dtype: Any) -> tuple[Array, Array]:
    """Return nodes and weights for ``E g(z)``, ``z ~ N(0, 1)``.

    The expectation is ``sum(weights * g(nodes))``.

    :param num_points: number of nodes.
    :param dtype: float dtype of the result.

    **Example**

    >>> nodes, weights = gauss_hermite(20, "float32")
    >>> print(f"{(weights * nodes**4).sum():.3f}")
    3.000
    """
    nodes, weights = np.polynomial.hermite_e.hermegauss(num_points)
    return jnp.asarray(nodes, dtype), jnp.asarray(weights / weights.sum(), dtype)
