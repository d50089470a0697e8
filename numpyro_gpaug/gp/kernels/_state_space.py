# SPDX-License-Identifier: Apache-2.0
r"""Kernels of one input as stochastic differential equations.

A sum of products of kernels is a sum of terms,

.. math:: k(t, t') = \sum_i \sigma_i^2 \, m_i(t - t') \prod_j \cos(\omega_{ij} (t -
    t')),

where m is a product of Matern kernels and oscillators, or one. The function of a term
is :math:`\sigma \sum_k c_k(t) g_k(t)`. Its waves c are the products of a cosine or a
sine of every frequency, and the functions g are independent with kernel m, or are
constants. Such a :math:`\sigma g` is the last number of a state :math:`\sigma s`, with

.. math:: s(t + \Delta) = \Phi(\Delta) s(t) + e, \qquad e \sim N(0, Q(\Delta)), \qquad
    s(t) \sim N(0, P).

Numbers of a state are derivatives in units of the lengthscale, the roughest first.
These units have no derivatives themselves: at a fixed state a change of the lengthscale
moves what the state predicts by as little as it should. For
short steps the entries of Q are powers of the step that differ between the numbers of
the state, and :math:`P - \Phi P \Phi^\top` would be nothing but rounding errors. Here
they are sums without cancellation, so that correlations of the noise keep all their
digits.

References: Hartikainen and Sarkka (2010), Kalman filtering and smoothing solutions to
temporal Gaussian process regression models; Solin and Sarkka (2014).
"""

from __future__ import annotations

import itertools
import math
from collections.abc import Sequence
from functools import partial, reduce
from typing import Any, NamedTuple, Protocol

import jax
import jax.numpy as jnp
import numpy as np
from jax import Array, lax

from numpyro_gpaug._display import name_of
from numpyro_gpaug.math import small
from numpyro_gpaug.math.linalg import diagonal
from numpyro_gpaug.math.recurrences import congruent

from ._base import Constant, Product, Sum
from ._oscillating import Cosine, Oscillator
from ._stationary import Matern12, Matern32, Matern52, Periodic

# Up to this value, the series gives an incomplete gamma function.
_NEAR = 8.0
_TERMS = 42
# The smallest variance of the noise of a first state: squares of ratios must be finite.
_LEAST = {"float32": 1e-30, "float64": 1e-120}
_RULE = np.polynomial.legendre.leggauss(10)


class Factor(Protocol):
    """A stationary state: a function of variance one, and its derivatives."""

    @property
    def order(self) -> int:
        """The number of derivatives."""

    @property
    def unit(self) -> Array:
        """The inverse of the unit of time."""

    @property
    def covariance(self) -> np.ndarray:
        """P, (d, d)."""

    def transition(self, dt: Array) -> Array:
        """Return Phi, (..., d, d), over steps (...)."""

    def noise(self, dt: Array) -> Array:
        """Return Q, (..., d, d), over steps (...)."""


class Matern(NamedTuple):
    """A Matern kernel of smoothness ``order + 1/2``.

    :param unit: the square root of ``2 order + 1`` over the lengthscale.
    :param order: the number of derivatives: 0, 1 or 2.
    """

    unit: Array
    order: int

    @property
    def covariance(self) -> np.ndarray:
        known = (
            [[1.0]],
            [[1.0, 0.0], [0.0, 1.0]],
            [[1.0, 0.0, -1 / 3], [0.0, 1 / 3, 0.0], [-1 / 3, 0.0, 1.0]],
        )
        return np.array(known[self.order])

    def transition(self, dt: Array) -> Array:
        x = (self.unit * dt)[..., None, None]
        size = self.order + 1
        # The derivative of e^-x x^k / k!; higher powers are zero.
        nilpotent = np.eye(size) + np.eye(size, k=1)
        nilpotent[-1] -= [math.comb(size, k) for k in range(size)]
        power, total = np.eye(size), jnp.zeros_like(x)
        for k in range(size):
            total = total + jnp.asarray(power / math.factorial(k), x.dtype) * x**k
            power = power @ nilpotent
        return jnp.exp(-x) * total

    def noise(self, dt: Array) -> Array:
        x = _steps(self, dt)
        top = 2 * self.order
        integrals = [m * x ** (k + 1) for k, m in enumerate(_integrals(x, top))]
        # Impulse responses without the factor e^-x, as polynomials.
        response = [np.polynomial.Polynomial([0] * self.order + [1.0])]
        response[0] /= math.factorial(self.order)
        for _ in range(self.order):
            response.append(response[-1].deriv() - response[-1])
        intensity = (2.0, 4.0, 16 / 3)[self.order]

        def integral(product: Any) -> Any:
            terms = zip(intensity * product.coef, integrals, strict=False)
            return sum(float(c) * x for c, x in terms if c)

        rows = [jnp.stack([integral(p * q) for q in response], -1) for p in response]
        return jnp.stack(rows, -2)


def _integrals(x: Array, top: int) -> list[Array]:
    """Return the integrals of ``w^m e^(-2 x w)`` over w from 0 to 1, for m = 0, ...,
    ``top``."""
    y = 2 * x
    found = [_integral(y, top)]
    for m in range(top, 0, -1):
        # By parts, as a sum of positive terms.
        found.append((y * found[-1] + jnp.exp(-y)) / m)
    return found[::-1]


@partial(jax.custom_jvp, nondiff_argnums=(1,))
def _integral(y: Array, m: int) -> Array:
    """Return the integral of ``w^m e^(-y w)`` over w from 0 to 1."""
    near, far = jnp.minimum(y, _NEAR), jnp.maximum(y, _NEAR)
    # A loop, because XLA would compute the terms again for each entry of a matrix.
    shares = jnp.asarray(1 / (m + 1 + np.arange(_TERMS, 0, -1)), y.dtype)
    total, _ = lax.scan(
        lambda total, share: ((total + 1) * near * share, None), 0 * near, shares
    )
    series = jnp.exp(-near) * (total + 1) / (m + 1)
    lost = sum(far**k / math.factorial(k) for k in range(m + 1))
    whole = math.factorial(m) / far ** (m + 1) * (1 - jnp.exp(-far) * lost)
    return jnp.where(y < _NEAR, series, whole)


@_integral.defjvp
def _integral_jvp(m: int, primals: Any, tangents: Any) -> tuple[Array, Array]:
    # Derivatives of the series would keep all of its terms.
    (y,), (moved,) = primals, tangents
    return _integral(y, m), -moved * _integral(y, m + 1)


class Oscillating(NamedTuple):
    """A damped oscillator driven by white noise.

    :param decay: the rate of decay, one over the lengthscale.
    :param omega: the angular frequency.
    :param order: the number of derivatives.
    """

    decay: Array
    omega: Array
    order: int = 1

    @property
    def covariance(self) -> np.ndarray:
        return np.eye(2)

    @property
    def unit(self) -> Array:
        return jnp.sqrt(jnp.square(self.decay) + jnp.square(self.omega))

    def _waves(self, x: Array) -> tuple[Array, Array, Array, Array]:
        """Return the decay in units of time, and at times x in these units a decaying
        cosine, a sine over its frequency, and the decay."""
        decay, omega = self.decay / self.unit, self.omega / self.unit
        sine = x * jnp.sinc(omega * x / math.pi)
        return decay, jnp.cos(omega * x), sine, jnp.exp(-decay * x)

    def transition(self, dt: Array) -> Array:
        decay, cosine, sine, left = self._waves(self.unit * dt)
        rows = (cosine + decay * sine, sine), (-sine, cosine - decay * sine)
        return left[..., None, None] * jnp.stack(
            [jnp.stack(row, -1) for row in rows], -2
        )

    def noise(self, dt: Array) -> Array:
        x = _steps(self, dt)
        decay, cosine, sine, left = self._waves(x)
        rest = -jnp.expm1(-2 * decay * x) / (2 * decay)
        pulled = jnp.square(left) * sine
        far = rest - pulled * (cosine + decay * sine)
        near, total = jnp.minimum(x, 1), jnp.zeros_like(x)
        for node, weight in zip(*_RULE, strict=True):
            *_, sine_here, left_here = self._waves(near * (1 + node) / 2)
            total += weight / 2 * near * jnp.square(sine_here * left_here)
        first = jnp.where(x < 1, 2 * total, far)
        both = jnp.square(left * sine)
        last = rest + pulled * (cosine - decay * sine)
        rows = (first, both), (both, last)
        whole = jnp.stack([jnp.stack(row, -1) for row in rows], -2)
        return 2 * decay * whole


class Term(NamedTuple):
    """A term of a sum of products.

    :param variance: its variance.
    :param factors: the factors that have noise.
    :param periods: periods of the factors that are cosines.
    """

    variance: Array
    factors: tuple[Factor, ...] = ()
    periods: tuple[Array, ...] = ()

    @property
    def order(self) -> np.ndarray:
        """The order of the numbers of the state: the roughest first, the function
        last. Numbers in units of their noise and of those before them then stay as
        different as the powers of a short step are."""
        levels = np.zeros(1, int) + 9
        for factor in self.factors:
            own = range(factor.order, -1, -1)
            levels = np.minimum.outer(levels, own).ravel()
        return np.lexsort((np.arange(len(levels)) == 0, levels))

    @property
    def covariance(self) -> Array:
        """P of the state of one g, (d, d)."""
        return self._ordered(reduce(_kron, map(_stationary, self.factors)))

    @property
    def size(self) -> int:
        """Numbers of the state of one g."""
        return math.prod(f.order + 1 for f in self.factors)

    def transition(self, dt: Array) -> Array:
        """Return Phi, (..., d, d), over steps (...)."""
        return self._ordered(reduce(_kron, (_moved(f, dt) for f in self.factors)))

    def noise(self, dt: Array) -> Array:
        """Return Q, (..., d, d), over steps (...)."""
        first, *others = self.factors
        total, moved = (
            _noise(first, dt),
            congruent(_moved(first, dt), _stationary(first)),
        )
        for factor in others:
            # P1 x P2 less (P1 - Q1) x (P2 - Q2), and P - Q is Phi P Phi'.
            other = _stationary(factor)
            total = _kron(total, other) + _kron(moved, _noise(factor, dt))
            moved = _kron(moved, congruent(_moved(factor, dt), other))
        return self._ordered(total)

    def _ordered(self, matrix: Array) -> Array:
        order = self.order
        return matrix[..., order[:, None], order]

    def root(self, dt: Array, start: Array | None = None) -> tuple[Array, Array]:
        """Return a root of the covariance of the noise, as standard deviations (..., d)
        and the lower factor of the correlations, (..., d, d).

        :param dt: steps.
        :param start: where the noise is the stationary state.
        """
        noise = self.noise(dt)
        if start is not None:
            noise = jnp.where(start[..., None, None], self.covariance, noise)
        # First in constant units, because the derivatives contain squares that might
        # not be finite.
        units = lax.stop_gradient(1 / jnp.sqrt(diagonal(noise)))
        noise = noise * units[..., :, None] * units[..., None, :]
        scale = jnp.sqrt(diagonal(noise))
        noise = noise / scale[..., :, None] / scale[..., None, :]
        return self._deviation(dt.dtype) * scale / units, small.cholesky(noise)

    def _deviation(self, dtype: Any) -> Array:
        # The units of a state are positive even if its variance is zero.
        least = float(jnp.finfo(dtype).tiny) ** 0.5
        return jnp.sqrt(jnp.maximum(jnp.asarray(self.variance, dtype), least))

    def waves(self, t: Array) -> Array:
        """Return the waves, (..., 2^m), at times (...); those of constants times their
        standard deviation."""
        found = jnp.ones((*t.shape, 1), t.dtype)
        if not self.factors:
            found *= self._deviation(t.dtype)
        for period in self.periods:
            # For large times, only the remainder keeps its digits. Angles of both signs
            # have errors of both signs, which cancel in the derivative by the period.
            since = jnp.remainder(t, period)
            since -= jnp.where(since > period / 2, period, 0)
            angle = 2 * math.pi * (since / period)
            pair = jnp.stack([jnp.cos(angle), jnp.sin(angle)], -1)
            found = (found[..., None] * pair[..., None, :]).reshape(*t.shape, -1)
        return found


def _steps(factor: Factor, dt: Array) -> Array:
    """Return steps in units of time, none too short for a float to have its noise."""
    least = _LEAST[str(dt.dtype)] ** (1 / (2 * factor.order + 1))
    return jnp.maximum(factor.unit * dt, least)


def _scales(factor: Factor) -> Array:
    """Return ones with the derivatives of the units of a state, (d,)."""
    ratio = factor.unit / lax.stop_gradient(factor.unit)
    return ratio ** np.arange(factor.order + 1)


def _stationary(factor: Factor) -> Array:
    scales = _scales(factor)
    covariance = jnp.asarray(factor.covariance, scales.dtype)
    return covariance * scales[:, None] * scales


def _moved(factor: Factor, dt: Array) -> Array:
    scales = _scales(factor)
    return factor.transition(dt) * scales[:, None] / scales


def _noise(factor: Factor, dt: Array) -> Array:
    scales = _scales(factor)
    return factor.noise(dt) * scales[:, None] * scales


def terms_of(kernel: Any, dtype: Any) -> list[Term]:
    """Return a kernel of one input as terms.

    :param kernel: a kernel.
    :param dtype: the dtype of the times.
    :raises ValueError: for a kernel that is no stochastic differential equation, or has
        hyperparameters of several latents.
    """

    def number(name: str) -> Array:
        value = jnp.asarray(getattr(kernel, name), dtype)
        if value.size != 1:
            raise ValueError(
                f"{type(kernel).__name__}: {name} has shape {value.shape}. A process "
                "with markov=True has one latent and one input: pass a number"
            )
        return value.reshape(())

    if isinstance(kernel, Sum):
        return terms_of(kernel.left, dtype) + terms_of(kernel.right, dtype)
    if isinstance(kernel, Product):
        both = (terms_of(k, dtype) for k in (kernel.left, kernel.right))
        return [
            Term(a.variance * b.variance, a.factors + b.factors, a.periods + b.periods)
            for a, b in itertools.product(*both)
        ]
    if isinstance(kernel, Constant):
        return [Term(number("variance"))]
    if isinstance(kernel, Cosine):
        return [Term(number("variance"), (), (number("period"),))]
    if isinstance(kernel, Oscillator):
        omega = 2 * math.pi / number("period")
        oscillating = Oscillating(1 / number("lengthscale"), omega)
        return [Term(number("variance"), (oscillating,))]
    for order, kind in enumerate((Matern12, Matern32, Matern52)):
        if isinstance(kernel, kind):
            rate = math.sqrt(2 * order + 1) / number("lengthscale")
            return [Term(number("variance"), (Matern(rate, order),))]
    raise ValueError(
        f"{_name(kernel)} has no state-space form with a finite state, which "
        f"markov=True needs. {_instead(kernel)}"
    )


def _name(kernel: Any) -> str:
    kind = type(kernel)
    fn = getattr(kernel, "fn", None)
    return name_of(fn) if fn is not None else f"{kind.__module__}.{kind.__name__}"


def _instead(kernel: Any) -> str:
    if isinstance(kernel, Periodic):
        return "kernels.cosines(kernel, terms) approximates it"
    return (
        "Sums and products of Matern12, Matern32, Matern52, Cosine, Oscillator and "
        "constants have one"
    )


def _kron(left: Array, right: Array) -> Array:
    """Return Kronecker products of matrices (..., d, d)."""
    whole = left[..., :, None, :, None] * right[..., None, :, None, :]
    lead, size = whole.shape[:-4], left.shape[-1] * right.shape[-1]
    return whole.reshape(*lead, size, size)


def block_diagonal(blocks: Sequence[Array]) -> Array:
    """Return matrices (..., R, R) with these blocks (..., d, d)."""
    size = sum(x.shape[-1] for x in blocks)
    rows, begin = [], 0
    for block in blocks:
        width = block.shape[-1]
        none = [(0, 0)] * (block.ndim - 1)
        rows.append(jnp.pad(block, [*none, (begin, size - begin - width)]))
        begin += width
    return jnp.concatenate(rows, -2)
