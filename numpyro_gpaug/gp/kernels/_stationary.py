# SPDX-License-Identifier: Apache-2.0
"""Covariance functions of the scaled Euclidean distance."""

from __future__ import annotations

import dataclasses
import math
from abc import abstractmethod
from collections.abc import Callable

import jax
import jax.numpy as jnp
import numpy as np
from jax.typing import ArrayLike

from numpyro_gpaug.math.linalg import safe_sqrt, valued

from ._base import Matrix, matmul, pytree

# With at most this many columns, differences cost no more than a matrix product. They
# do not cancel in float32 if the lengthscale is short relative to the spread of the
# inputs.
PAIRWISE_COLUMNS = 8


def centre(Z: jax.Array) -> jax.Array:
    """Return the mean row of ``Z`` as a constant."""
    # One centre for all leading axes, else X would be repeated along them. Distances
    # do not depend on it, so neither does the gradient.
    return jax.lax.stop_gradient(jnp.mean(Z, axis=tuple(range(Z.ndim - 1))))


def pairwise_form(
    X: jax.Array,
    Z: jax.Array,
    lengthscale: jax.Array | None,
    length: Callable[[jax.Array], jax.Array],
) -> jax.Array:
    """Sum ``(length(x_d - z_d) / lengthscale_d)^2`` over the columns d."""

    # A loop over columns, recomputed for the gradient, never holds an (N, M, D) array;
    # one array for all columns is several times larger and slower.
    @jax.checkpoint
    def total(X: jax.Array, Z: jax.Array, weights: jax.Array | None) -> jax.Array:
        def column(d: int) -> jax.Array:
            squared = jnp.square(length(X[..., :, None, d] - Z[..., None, :, d]))
            return squared if weights is None else squared * weights[..., d, None, None]

        return sum(map(column, range(1, X.shape[-1])), column(0))

    weights = None if lengthscale is None else 1 / jnp.square(lengthscale)
    return total(X, Z, weights)


def matmul_form(
    X: jax.Array, Z: jax.Array, lengthscale: jax.Array | None, same: bool
) -> jax.Array:
    """Sum ``((x_d - z_d) / lengthscale_d)^2`` over the columns d."""
    origin = centre(Z)
    X, Z = X - origin, Z - origin
    if lengthscale is None:
        weighted = Z
        X_norms = jnp.sum(jnp.square(X), -1, keepdims=True)
    else:
        # Weights on one side only leave X without the axis of latents.
        weights = 1 / jnp.square(lengthscale)
        weighted = Z * weights[..., None, :]
        X_norms = matmul(jnp.square(X), weights[..., None])
    Z_norms = jnp.sum(Z * weighted, -1)[..., None, :]
    inner = matmul(X, weighted.mT)
    squared = X_norms + Z_norms - 2 * inner
    # Rounding makes it negative where points are equal. The derivatives are right.
    squared = valued(squared, jnp.maximum(squared, 0))
    if same:
        squared = jnp.where(jnp.eye(X.shape[-2], dtype=bool), 0, squared)
    return squared


# Above this value, the series gives exp(x) - 1.
_CLOSE = -0.5
# Up to this value, one minus a Matern correlation would be a sum of terms that cancel.
_NEAR = 2.5
_TERMS = 20


@jax.custom_jvp
def _less_one(x: jax.Array) -> jax.Array:
    """Return ``e^x - 1`` for ``x <= 0``, to about one unit in the last place.
    ``jnp.expm1`` is off by up to five in float32, mostly of one sign, and whitening
    takes differences of deviations."""
    near, total = jnp.maximum(x, _CLOSE), jnp.zeros_like(x)
    for k in range(14 if x.dtype == jnp.float64 else 9, 1, -1):
        total = (total + 1 / math.factorial(k)) * near
    return jnp.where(x > _CLOSE, near + near * total, jnp.exp(x) - 1)


_less_one.defjvps(lambda moved, value, _: moved * (value + 1))


# Matern correlations as functions of the squared distance over the lengthscale, times
# twice the smoothness, with derivatives that are right at 0, too. Second derivatives of
# a kernel between equal points are the covariances of derivatives.


@jax.custom_jvp
def _matern32(squared: jax.Array) -> jax.Array:
    r = safe_sqrt(squared)
    return (1 + r) * jnp.exp(-r)


_matern32.defjvps(lambda moved, _, squared: moved * jnp.exp(-safe_sqrt(squared)) / -2)


@jax.custom_jvp
def _matern52(squared: jax.Array) -> jax.Array:
    r = safe_sqrt(squared)
    return (1 + r + squared / 3) * jnp.exp(-r)


_matern52.defjvps(lambda moved, _, squared: moved * _matern32(squared) / -6)


def _lost_of_matern(
    r: jax.Array, quadratic: float, correlation: jax.Array
) -> jax.Array:
    """Return ``(1 + r + quadratic r^2) e^-r - 1``, with the derivative of the
    correlation. Near 0 this is ``-e^-r`` times the terms of the series of ``e^r``
    beyond the polynomial."""
    near = jnp.minimum(r, _NEAR)
    total = jnp.zeros_like(r)
    for k in range(_TERMS, 2, -1):
        total = (total + 1 / math.factorial(k)) * near
    lost = -jnp.exp(-near) * jnp.square(near) * (total + (0.5 - quadratic))
    plain = correlation - 1
    return valued(plain, jax.lax.stop_gradient(jnp.where(r < _NEAR, lost, plain)))


@dataclasses.dataclass(frozen=True, eq=False, repr=False)
class _Stationary(Matrix):
    """A function of the scaled squared distance."""

    lengthscale: ArrayLike = 1.0
    variance: ArrayLike = 1.0

    @abstractmethod
    def _correlation(self, scaled: jax.Array) -> jax.Array: ...

    @abstractmethod
    def _lost(self, scaled: jax.Array) -> jax.Array:
        """The correlation minus 1, without cancellation."""

    @property
    def constant(self) -> ArrayLike:
        """The variance; :meth:`deviation` is the decrease due to distance."""
        return self.variance

    def deviation(self, X: ArrayLike, Z: ArrayLike | None = None) -> jax.Array:
        """Return ``k(X, Z)`` or ``k(X)`` minus :attr:`constant`, without cancellation.
        With long lengthscales only this distinguishes function values."""
        return self._at(X, Z, self._deviation, self._own_deviation)

    def _check_columns(self, X: jax.Array) -> None:
        shape = np.shape(self.lengthscale)
        if shape and shape[-1] not in (1, X.shape[-1]):
            raise ValueError(
                f"{type(self).__name__}: lengthscale of shape {shape} does not match "
                f"inputs of shape {X.shape}; use a scalar, (D,) for one per column, "
                "or (C, 1) or (C, D) for C latents"
            )

    def _covariance(self, X: jax.Array, Z: jax.Array, same: bool) -> jax.Array:
        correlation = self._correlation(self._scaled(X, Z, same))
        return self._over_pairs("variance", X.dtype) * correlation

    def _deviation(self, X: jax.Array, Z: jax.Array, same: bool) -> jax.Array:
        lost = self._lost(self._scaled(X, Z, same))
        return self._over_pairs("variance", X.dtype) * lost

    def _scaled(self, X: jax.Array, Z: jax.Array, same: bool) -> jax.Array:
        lengthscale = self._value("lengthscale", X.dtype)
        if lengthscale.ndim and lengthscale.shape[-1] != 1:
            return self._squared_distance(X, Z, lengthscale, same)
        # Dividing the result keeps one distance matrix for all latents.
        scale = lengthscale[..., None] if lengthscale.ndim else lengthscale
        return self._squared_distance(X, Z, None, same) / jnp.square(scale)

    def _squared_distance(
        self, X: jax.Array, Z: jax.Array, lengthscale: jax.Array | None, same: bool
    ) -> jax.Array:
        if X.shape[-1] <= PAIRWISE_COLUMNS:
            return pairwise_form(X, Z, lengthscale, lambda difference: difference)
        return matmul_form(X, Z, lengthscale, same)

    def _own_deviation(self, X: jax.Array) -> jax.Array:
        return jnp.zeros_like(self._diagonal(X))


@pytree
class SquaredExponential(_Stationary):
    r"""Infinitely smooth functions.

    .. math:: k(x, z) = \sigma^2 \exp(-r^2 / 2), \qquad
        r^2 = \sum_d (x_d - z_d)^2 / \ell_d^2

    :param lengthscale: :math:`\ell`, scalar or ``(D,)``; ``(C, 1)`` or ``(C, D)``.
    :param variance: :math:`\sigma^2`, scalar or ``(C,)``.

    .. doctest::

        >>> import jax.numpy as jnp
        >>> from numpyro_gpaug.kernels import SquaredExponential
        >>> k = SquaredExponential(lengthscale=jnp.array([1.0, 2.0]), variance=3.0)
        >>> X = jnp.ones((5, 2))
        >>> k(X, X[:2]).shape, k(X).shape
        ((5, 2), (5,))
        >>> SquaredExponential(variance=jnp.ones(7))(X, X).shape
        (7, 5, 5)
    """

    def _correlation(self, squared: jax.Array) -> jax.Array:
        return jnp.exp(-0.5 * squared)

    def _lost(self, squared: jax.Array) -> jax.Array:
        return _less_one(-0.5 * squared)


@pytree
class Matern12(_Stationary):
    r"""Continuous, nowhere differentiable functions (Ornstein-Uhlenbeck in one
    dimension).

    .. math:: k(x, z) = \sigma^2 \exp(-r), \qquad
        r^2 = \sum_d (x_d - z_d)^2 / \ell_d^2

    :param lengthscale: :math:`\ell`, scalar or ``(D,)``; ``(C, 1)`` or ``(C, D)``.
    :param variance: :math:`\sigma^2`, scalar or ``(C,)``.

    .. doctest::

        >>> import jax.numpy as jnp
        >>> from numpyro_gpaug.kernels import Matern12
        >>> X = jnp.array([0.0, 1.0])
        >>> print(f"{Matern12()(X, X)[0, 1]:.4f}")
        0.3679
    """

    def _correlation(self, squared: jax.Array) -> jax.Array:
        return jnp.exp(-safe_sqrt(squared))

    def _lost(self, squared: jax.Array) -> jax.Array:
        return _less_one(-safe_sqrt(squared))


@pytree
class Matern32(_Stationary):
    r"""Once differentiable functions.

    .. math:: k(x, z) = \sigma^2 (1 + \sqrt 3 r) \exp(-\sqrt 3 r), \qquad
        r^2 = \sum_d (x_d - z_d)^2 / \ell_d^2

    :param lengthscale: :math:`\ell`, scalar or ``(D,)``; ``(C, 1)`` or ``(C, D)``.
    :param variance: :math:`\sigma^2`, scalar or ``(C,)``.

    .. doctest::

        >>> import jax.numpy as jnp
        >>> from numpyro_gpaug.kernels import Matern32
        >>> X = jnp.array([0.0, 1.0])
        >>> print(f"{Matern32()(X, X)[0, 1]:.4f}")
        0.4834
    """

    def _correlation(self, squared: jax.Array) -> jax.Array:
        return _matern32(3 * squared)

    def _lost(self, squared: jax.Array) -> jax.Array:
        r = math.sqrt(3) * safe_sqrt(squared)
        return _lost_of_matern(r, 0, self._correlation(squared))


@pytree
class Matern52(_Stationary):
    r"""Twice differentiable functions.

    .. math:: k(x, z) = \sigma^2 (1 + \sqrt 5 r + 5 r^2 / 3) \exp(-\sqrt 5 r), \qquad
        r^2 = \sum_d (x_d - z_d)^2 / \ell_d^2

    :param lengthscale: :math:`\ell`, scalar or ``(D,)``; ``(C, 1)`` or ``(C, D)``.
    :param variance: :math:`\sigma^2`, scalar or ``(C,)``.

    .. doctest::

        >>> import jax.numpy as jnp
        >>> from numpyro_gpaug.kernels import Matern52
        >>> X = jnp.array([0.0, 1.0])
        >>> print(f"{Matern52()(X, X)[0, 1]:.4f}")
        0.5240
    """

    def _correlation(self, squared: jax.Array) -> jax.Array:
        return _matern52(5 * squared)

    def _lost(self, squared: jax.Array) -> jax.Array:
        r = math.sqrt(5) * safe_sqrt(squared)
        return _lost_of_matern(r, 1 / 3, self._correlation(squared))


@pytree
class RationalQuadratic(_Stationary):
    r"""A scale mixture of squared exponentials.

    .. math:: k(x, z) = \sigma^2 \left(1 + \frac{r^2}{2 \alpha}\right)^{-\alpha}, \qquad
        r^2 = \sum_d (x_d - z_d)^2 / \ell_d^2

    :param lengthscale: :math:`\ell`, scalar or ``(D,)``; ``(C, 1)`` or ``(C, D)``.
    :param variance: :math:`\sigma^2`, scalar or ``(C,)``.
    :param alpha: :math:`\alpha`, scalar or ``(C,)``; large values approach
        :class:`SquaredExponential`.

    .. doctest::

        >>> import jax.numpy as jnp
        >>> from numpyro_gpaug.kernels import RationalQuadratic
        >>> X = jnp.array([0.0, 1.0])
        >>> print(f"{RationalQuadratic(alpha=0.5)(X, X)[0, 1]:.4f}")
        0.7071
    """

    alpha: ArrayLike = 1.0

    def _correlation(self, squared: jax.Array) -> jax.Array:
        alpha = self._over_pairs("alpha", squared.dtype)
        return jnp.exp(-alpha * jnp.log1p(squared / (2 * alpha)))

    def _lost(self, squared: jax.Array) -> jax.Array:
        alpha = self._over_pairs("alpha", squared.dtype)
        return _less_one(-alpha * jnp.log1p(squared / (2 * alpha)))


@pytree
class Periodic(SquaredExponential):
    r"""Functions that repeat along every column.

    .. math:: k(x, z) = \sigma^2 \exp\Bigl(
        -2 \sum_d \sin^2(\pi (x_d - z_d) / p) / \ell_d^2 \Bigr)

    :param lengthscale: :math:`\ell`, scalar or ``(D,)``; ``(C, 1)`` or ``(C, D)``.
    :param variance: :math:`\sigma^2`, scalar or ``(C,)``.
    :param period: :math:`p`, scalar or ``(C,)``.

    .. doctest::

        >>> import jax.numpy as jnp
        >>> from numpyro_gpaug.kernels import Periodic
        >>> X = jnp.array([0.0, 1.0, 2.0])
        >>> print(" ".join(f"{x:.4f}" for x in Periodic(period=2.0)(X, X)[0]))
        1.0000 0.1353 1.0000
    """

    period: ArrayLike = 1.0

    # The squared distance is that of the columns wrapped around unit circles, where a
    # chord has length 2 |sin(pi (x - z) / p)|.

    def _squared_distance(
        self, X: jax.Array, Z: jax.Array, lengthscale: jax.Array | None, same: bool
    ) -> jax.Array:
        period = self._over_pairs("period", X.dtype)
        if X.shape[-1] <= PAIRWISE_COLUMNS:
            return pairwise_form(
                X, Z, lengthscale, lambda d: 2 * jnp.sin(math.pi * (d / period))
            )
        origin = centre(Z)

        def wrap(inputs: jax.Array) -> jax.Array:
            angle = 2 * math.pi * ((inputs - origin) / period)
            return jnp.concatenate([jnp.cos(angle), jnp.sin(angle)], -1)

        if lengthscale is not None:
            lengthscale = jnp.concatenate([lengthscale, lengthscale], -1)
        return matmul_form(wrap(X), wrap(Z), lengthscale, same)
