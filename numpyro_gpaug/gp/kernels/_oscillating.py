# SPDX-License-Identifier: Apache-2.0
"""Covariance functions that oscillate with the distance of two times."""

from __future__ import annotations

import math
from abc import abstractmethod
from typing import Any

import jax
import jax.numpy as jnp
from jax.typing import ArrayLike

from ._base import Constant, Matrix, pytree
from ._stationary import Periodic

# The number of nodes of the integrals for Fourier coefficients.
_NODES = 256


class _OfTime(Matrix):
    """A function of the distance of two times, which may have a sign."""

    variance: ArrayLike

    @abstractmethod
    def _correlation(self, since: jax.Array) -> jax.Array: ...

    def _check_columns(self, X: jax.Array) -> None:
        if X.shape[-1] != 1:
            raise ValueError(
                f"{type(self).__name__} is a kernel of one column, and the inputs have "
                f"shape {X.shape}"
            )

    def _covariance(self, X: jax.Array, Z: jax.Array, same: bool) -> jax.Array:
        del same
        since = X[..., :, None, 0] - Z[..., None, :, 0]
        return self._over_pairs("variance", X.dtype) * self._correlation(since)


@pytree
class Cosine(_OfTime):
    r"""Cosine waves of one period, with random amplitude and phase.

    .. math:: k(x, z) = \sigma^2 \cos(2 \pi (x - z) / p)

    :param period: :math:`p`, scalar or ``(C,)``.
    :param variance: :math:`\sigma^2`, scalar or ``(C,)``.

    .. doctest::

        >>> import jax.numpy as jnp
        >>> from numpyro_gpaug.kernels import Cosine
        >>> X = jnp.array([0.0, 0.5, 2.0])
        >>> print(Cosine(period=4.0)(X, X)[0].round(3))
        [ 1.     0.707 -1.   ]
    """

    period: ArrayLike = 1.0
    variance: ArrayLike = 1.0

    def _correlation(self, since: jax.Array) -> jax.Array:
        period = self._over_pairs("period", since.dtype)
        return jnp.cos(2 * math.pi * (since / period))


@pytree
class Oscillator(_OfTime):
    r"""A damped harmonic oscillator that is driven by white noise; once differentiable.

    .. math:: k(x, z) = \sigma^2 e^{-r / \ell} \Bigl(\cos(\omega r)
        + \frac{\sin(\omega r)}{\omega \ell}\Bigr), \qquad r = |x - z|, \quad
        \omega = 2 \pi / p

    This is the stochastic harmonic oscillator of Foreman-Mackey et al. (2017, Fast and
    scalable Gaussian process modeling, equation 23) with quality above one half.
    ``Matern12(lengthscale) * Cosine(period)`` is a rougher damped wave.

    :param lengthscale: :math:`\ell`, the time in which a wave decays, scalar or ``(C,
        1)``.
    :param period: :math:`p`, scalar or ``(C,)``.
    :param variance: :math:`\sigma^2`, scalar or ``(C,)``.

    .. doctest::

        >>> import jax.numpy as jnp
        >>> from numpyro_gpaug.kernels import Oscillator
        >>> X = jnp.array([0.0, 2.0])
        >>> print(f"{Oscillator(lengthscale=4.0, period=4.0)(X, X)[0, 1]:.4f}")
        -0.6065
    """

    lengthscale: ArrayLike = 1.0
    period: ArrayLike = 1.0
    variance: ArrayLike = 1.0

    def _correlation(self, since: jax.Array) -> jax.Array:
        # Its derivative at 0 must not be 0: second derivatives contain its square.
        distance = jnp.where(since < 0, -since, since)
        scale = self._value("lengthscale", distance.dtype)
        scale = scale[..., None] if scale.ndim else scale
        omega = 2 * math.pi / self._over_pairs("period", distance.dtype)
        wave = jnp.cos(omega * distance) + jnp.sin(omega * distance) / (omega * scale)
        return jnp.exp(-distance / scale) * wave


def cosines(kernel: Periodic, terms: int) -> Any:
    r"""Return a sum of a constant and cosines that approximates a periodic kernel.

    .. math:: \exp(-2 \sin^2(\pi r / p) / \ell^2) = q_0 + \sum_{j \ge 1} q_j \cos(2 \pi
        j r / p), \qquad q_j = 2 I_j(\ell^{-2}) e^{-\ell^{-2}},

    and half of this for :math:`q_0`. The series is cut after some terms, and the kept
    :math:`q_j` are divided by their sum, so that the variance is unchanged. The
    covariance is then off by at most twice the share that was cut: 1e-5 of the variance
    for a lengthscale of 1 and 6 terms, and 0.02 for a lengthscale of 0.5 and 6 terms
    (Solin and Sarkka, 2014, Explicit link between periodic covariance functions and
    state space models).

    :param kernel: a kernel of one latent.
    :param terms: the number of cosines.
    :raises ValueError: for kernels of several latents, or no terms.

    .. doctest::

        >>> import jax.numpy as jnp
        >>> from numpyro_gpaug.kernels import Periodic, cosines
        >>> k = Periodic(lengthscale=1.0, period=7.0)
        >>> X = jnp.linspace(0.0, 7.0, 50)
        >>> bool(jnp.abs(cosines(k, 6)(X, X) - k(X, X)).max() < 2e-5)
        True
    """
    if terms < 1:
        raise ValueError(f"terms must be at least 1, got {terms}")
    if kernel.batch_shape or jnp.size(kernel.lengthscale) != 1:
        raise ValueError("cosines needs a Periodic kernel of one latent and one column")
    angle = jnp.arange(_NODES) * (2 * math.pi / _NODES)
    scale = jnp.reshape(jnp.asarray(kernel.lengthscale), ())
    density = jnp.exp((jnp.cos(angle) - 1) / jnp.square(scale))
    weights = [density.mean()]
    weights += [2 * (density * jnp.cos(j * angle)).mean() for j in range(1, terms + 1)]
    # Rounding may leave a coefficient of zero slightly negative.
    weights = [jnp.maximum(q, jnp.finfo(q.dtype).tiny) for q in weights]
    total = sum(weights, jnp.zeros(()))
    found: Any = Constant(kernel.variance * weights[0] / total)
    for j, weight in enumerate(weights[1:], 1):
        share = kernel.variance * weight / total
        found = found + Cosine(kernel.period / j, share)
    return found
