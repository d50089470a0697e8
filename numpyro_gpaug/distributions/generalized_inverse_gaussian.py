# SPDX-License-Identifier: Apache-2.0
"""The generalised inverse Gaussian distribution, and the inverse Gaussian."""

from __future__ import annotations

import math
from functools import partial
from typing import NamedTuple

import jax
import jax.numpy as jnp
from jax import Array, lax
from jax.typing import ArrayLike
from numpyro.distributions import constraints
from numpyro.distributions.kl import kl_divergence
from numpyro.distributions.util import validate_sample

from numpyro_gpaug.distributions._elementwise import Elementwise, Located, parameter
from numpyro_gpaug.distributions._gig_sampler import (
    sample_inverse_gaussian,
    sample_log,
    within_range,
)
from numpyro_gpaug.math.arrays import floating
from numpyro_gpaug.math.bessel import averages, e2, energies, log_peak_integral, peak
from numpyro_gpaug.math.normal import LOG_2PI


class _Shape(NamedTuple):
    """The distribution of ``x``, or of ``1/x`` if ``flip`` is true, with a non-negative
    order.

    In the notation of :mod:`numpyro_gpaug.math.bessel`, the logarithm of that variable
    divided by ``root**-2`` has the density ``exp(-P/2 e2(v) - Q/2 e2(-v))``, up to a
    constant.
    """

    flip: Array
    big: Array
    log_q: Array
    root: Array
    scale: Array  # root, or its inverse if flip is true


@jax.custom_jvp
def _log_mean(a: Array, b: Array, omega: Array) -> Array:
    # The log of omega is the log of the geometric mean, but its slopes do not divide by
    # omega.
    return jnp.log(omega)


@_log_mean.defjvp
def _log_mean_jvp(primals, tangents):
    a, b, _ = primals
    return _log_mean(*primals), 0.5 * (tangents[0] / a + tangents[1] / b)


def _shape(p: Array, a: Array, b: Array) -> _Shape:
    flip = p < 0
    rate, other = jnp.where(flip, b, a), jnp.where(flip, a, b)
    # Not the root of the product, which may leave the range of the dtype.
    omega = jnp.sqrt(rate) * jnp.sqrt(other)
    lam = jnp.where(flip, -p, p)
    big, log_q = peak(lam, omega, _log_mean(rate, other, omega))
    root, inverse = jnp.sqrt(rate) / jnp.sqrt(big), jnp.sqrt(big) / jnp.sqrt(rate)
    return _Shape(flip, big, log_q, root, jnp.where(flip, inverse, root))


def _sign(shape: _Shape) -> Array:
    return jnp.where(shape.flip, -1.0, 1.0).astype(shape.root.dtype)


def _log_mode(shape: _Shape) -> Array:
    """The mode of ``log x``."""
    return -2 * _sign(shape) * jnp.log(shape.root)


def _log_ratio(x: Array, shape: _Shape) -> Array:
    """Return ``log(y root**2)`` for ``y = x``, or ``1/x`` if ``flip`` is true."""
    sign = _sign(shape)
    coarse = sign * jnp.log(x) + 2 * jnp.log(shape.root)
    # Close to one the product is exact to rounding and the sum of logs is not; far
    # from it the product may leave the range of the dtype.
    near = jnp.abs(coarse) < 1
    scale, safe = jnp.where(near, shape.scale, 1.0), jnp.where(near, x, 1.0)
    return jnp.where(near, sign * jnp.log(safe * scale * scale), coarse)


def _place(u: Array, sign: Array, root: Array, log_weight: ArrayLike = 0.0) -> Array:
    """Return the mode ``root**-2`` to the power of ``sign``, times ``exp(sign u)`` and
    the weight."""
    # The square of a product, because a factor may leave the range of the dtype.
    half = jnp.exp((sign * u + log_weight) / 2)
    return jnp.square(half * jnp.where(sign < 0, root, 1 / root))


def _moment_terms(u, right, left, big, log_q, root, sign):
    energy = right + left
    weight = jnp.exp(-energy)
    mean = _place(u, sign, root, -energy)
    reciprocal = _place(u, -sign, root, -energy)
    return mean, reciprocal, weight * u, weight * energy


def _mean_terms(u, right, left, big, log_q, root, sign):
    """Return the ratio of mean to mode, and the mean, which do not overflow
    together."""
    energy = right + left
    return jnp.exp(sign * u - energy), _place(u, sign, root, -energy)


def _variance_terms(u, right, left, big, log_q, sign, mean):
    half_energy = (right + left) / 2
    weight = jnp.exp(-half_energy)
    near = jnp.abs(u) < 1
    close = weight * (jnp.exp(jnp.where(near, sign * u, 0.0)) / mean - 1)
    far = jnp.exp(sign * u - half_energy) / mean - weight
    return (jnp.square(jnp.where(near, close, far)),)


def _divergence_terms(u, right, left, big, log_q, big_r, log_q_r, shift, sign):
    right_r, left_r = energies(shift + sign * u, big_r, log_q_r)
    return (jnp.exp(-right - left) * (right_r + left_r - right - left),)


@jax.jit
def _moments(p: Array, a: Array, b: Array) -> tuple[Array, ...]:
    """Return mean, mean of the reciprocal, mean of the logarithm, and entropy."""
    shape = _shape(p, a, b)
    sign = _sign(shape)
    log_integral, mean, reciprocal, u, energy = averages(
        _moment_terms, shape.big, shape.log_q, shape.root, sign
    )
    log_mean = sign * u + _log_mode(shape)
    return mean, reciprocal, log_mean, log_mean + energy + log_integral


@jax.jit
def _variance(p: Array, a: Array, b: Array) -> Array:
    shape = _shape(p, a, b)
    big, log_q, sign = shape.big, shape.log_q, _sign(shape)
    _, relative, mean = averages(_mean_terms, big, log_q, shape.root, sign)
    _, squared = averages(_variance_terms, big, log_q, sign, relative)
    return squared * mean * mean


@jax.jit
def _log_density(x: Array, p: Array, a: Array, b: Array) -> Array:
    shape = _shape(p, a, b)
    right, left = energies(_log_ratio(x, shape), shape.big, shape.log_q)
    return -jnp.log(x) - right - left - log_peak_integral(shape.big, shape.log_q)


@partial(jax.jit, static_argnames="shape")
def _draw(key: Array, p: Array, a: Array, b: Array, *, shape: tuple[int, ...]) -> Array:
    distribution = _shape(p, a, b)
    num = math.prod(shape[: len(shape) - p.ndim])
    big, log_q = jnp.ravel(distribution.big), jnp.ravel(distribution.log_q)
    v = sample_log(key, big, log_q, num=num).reshape(shape)
    return within_range(_place(v, _sign(distribution), distribution.root))


@jax.jit
def _mode(p: Array, a: Array, b: Array) -> Array:
    size = jnp.hypot(p - 1, jnp.sqrt(a) * jnp.sqrt(b))
    # This form of the root of the quadratic takes no difference.
    total = size + jnp.abs(p - 1)
    return jnp.where(p < 1, b / total, total / a)


@jax.jit
def _divergence(q: tuple[Array, ...], r: tuple[Array, ...]) -> Array:
    shape_q, shape_r = _shape(*q), _shape(*r)
    # As functions of x, the two logs may have opposite signs.
    sign_r = _sign(shape_r)
    sign = sign_r * _sign(shape_q)
    shift = sign_r * (_log_mode(shape_q) - _log_mode(shape_r))
    (big, log_q), reference = shape_q[1:3], shape_r[1:3]
    total, extra = averages(_divergence_terms, big, log_q, *reference, shift, sign)
    return extra + log_peak_integral(*reference) - total


class GeneralizedInverseGaussian(Elementwise):
    r"""Generalised inverse Gaussian distribution :math:`GIG(p, a, b)` [1].

    .. math::
        f(x) = \frac{(a/b)^{p/2}}{2K_p(\sqrt{ab})}\, x^{p-1} e^{-(ax + b/x)/2},
        \qquad x > 0.

    :math:`1/x` has the distribution :math:`GIG(-p, b, a)`, and :math:`sx` has
    :math:`GIG(p, a/s, bs)`.  :math:`GIG(-1/2, a, b)` is the inverse Gaussian of mean
    :math:`\sqrt{b/a}` and shape :math:`b`.

    Both ``a`` and ``b`` must be positive.  The limits :math:`b\to 0`, the Gamma
    distribution of shape :math:`p>0` and rate :math:`a/2`, and :math:`a\to 0`, the
    inverse Gamma distribution of shape :math:`-p` and scale :math:`b/2`, are not
    members: zero raises an error if ``validate_args`` is set; otherwise ``log_prob`` is
    NaN and ``sample`` is undefined. The limits are approached smoothly: in double
    precision the relative errors are 1e-13 for :math:`\sqrt{ab}` of 1e-8 or more, and
    1e-10 at 1e-200.

    **log_prob**, the moments and the divergence are sums over one quadrature rule for
    :math:`K_p`, centred at the mode, in which no large terms cancel.  They can be
    differentiated in the value and in all parameters.

    **sample** is an exact rejection sampler (Devroye 2014 [2], on the log of the
    draw), which accepts at least 63% of its proposals for all parameters.  (For orders
    of -1/2, :class:`~numpyro_gpaug.InverseGaussian` needs no rejections.)
    A draw is never zero nor infinite: one beyond the range of the
    dtype becomes the nearest normal number.  Draws carry no gradient.

    **References**

    [1] B. Jorgensen (1982), *Statistical properties of the generalized inverse
    Gaussian distribution*, Lecture Notes in Statistics 9, Springer.

    [2] L. Devroye (2014), *Random variate generation for the generalized inverse
    Gaussian distribution*, Statistics and Computing 24, 239-246.

    :param p: Order, real.
    :param a: Coefficient of the value, positive.
    :param b: Coefficient of the reciprocal of the value, positive. ``p``, ``a`` and
        ``b`` broadcast to the batch shape; the event is a scalar.

    **Example**

    .. doctest::

        >>> import jax.numpy as jnp
        >>> from jax import random
        >>> from numpyro_gpaug.distributions import GeneralizedInverseGaussian
        >>> distribution = GeneralizedInverseGaussian(0.5, 1.0, jnp.array([1.0, 100.0]))
        >>> distribution.sample(random.key(0), (3,)).shape
        (3, 2)
        >>> [f"{m:.4f}" for m in distribution.mean]
        ['2.0000', '11.0000']
        >>> [f"{m:.4f}" for m in distribution.mean_reciprocal]
        ['1.0000', '0.1000']
    """

    p: ArrayLike = parameter(constraints.real)
    a: ArrayLike = parameter(constraints.positive)
    b: ArrayLike = parameter(constraints.positive)
    support = constraints.positive

    def sample(self, key: Array, sample_shape: tuple[int, ...] = ()) -> Array:
        """Draw from the distribution.

        :param key: A JAX random key.
        :param sample_shape: Shape of independent draws, prepended to the batch shape.
        :return: An array of shape ``sample_shape + batch_shape``.
        """
        p, a, b = jax.lax.stop_gradient(self._arrays())
        # Not batch_shape, which still has the old axes under vmap over a distribution.
        shape = tuple(sample_shape) + p.shape
        return _draw(key, p, a, b, shape=shape)

    @validate_sample
    def log_prob(self, value: ArrayLike) -> Array:
        """Return the log-density.

        :param value: Positive values, broadcast against the batch shape.
        :return: The log-density, minus infinity off the support.
        """
        p, a, b, x = self._arrays(value)
        positive = x > 0
        out = _log_density(jnp.where(positive, x, 1.0), p, a, b)
        return jnp.where(positive, out, -jnp.inf)

    @property
    def mean(self) -> Array:
        return _moments(*self._arrays())[0]

    @property
    def mean_reciprocal(self) -> Array:
        r""":math:`\mathrm{E}[1/x]`, of the batch shape."""
        return _moments(*self._arrays())[1]

    @property
    def mean_log(self) -> Array:
        r""":math:`\mathrm{E}[\log x]`, of the batch shape."""
        return _moments(*self._arrays())[2]

    @property
    def variance(self) -> Array:
        return _variance(*self._arrays())

    @property
    def mode(self) -> Array:
        return _mode(*self._arrays())

    def entropy(self) -> Array:
        """Return the differential entropy, of the batch shape."""
        return _moments(*self._arrays())[3]


@kl_divergence.register(GeneralizedInverseGaussian, GeneralizedInverseGaussian)
def _kl_gig(q: GeneralizedInverseGaussian, r: GeneralizedInverseGaussian) -> Array:
    """Return ``KL(q || r)``, of the broadcast batch shape."""
    arrays = floating(*q._arrays(), *r._arrays())
    return _divergence(arrays[:3], arrays[3:])


class InverseGaussian(Located):
    r"""Inverse Gaussian (Wald) distribution with mean :math:`\mu` and shape
    :math:`\lambda`.

    .. math::
        f(x) = \sqrt{\frac{\lambda}{2\pi x^3}}
            \exp\Bigl(-\frac{\lambda(x-\mu)^2}{2\mu^2x}\Bigr), \qquad x > 0,

    the distribution :math:`GIG(-1/2, \lambda/\mu^2, \lambda)`, which :meth:`to_gig`
    returns. The parameters have the names that TensorFlow Probability uses.

    **sample** is exact, without rejections [1].  A draw beyond the range of the dtype
    becomes the nearest normal number.  Draws carry no gradient.

    **References**

    [1] J. R. Michael, W. R. Schucany and R. W. Haas (1976), *Generating random
    variates using transformations with multiple roots*, The American Statistician
    30(2), 88-90.

    :param loc: Mean :math:`\mu`, positive.
    :param concentration: Shape :math:`\lambda`, positive.  Both broadcast to the batch
        shape; the event is a scalar.

    **Example**

    .. doctest::

        >>> import jax.numpy as jnp
        >>> from jax import random
        >>> from numpyro_gpaug.distributions import InverseGaussian
        >>> distribution = InverseGaussian(2.0, jnp.array([1.0, 4.0]))
        >>> distribution.sample(random.key(0), (3,)).shape
        (3, 2)
        >>> [f"{v:.1f}" for v in distribution.variance]
        ['8.0', '2.0']
        >>> [f"{lp:.4f}" for lp in distribution.log_prob(2.0)]
        ['-1.9587', '-1.2655']
    """

    loc: ArrayLike = parameter(constraints.positive)
    concentration: ArrayLike = parameter(constraints.positive)
    support = constraints.positive

    def to_gig(self) -> GeneralizedInverseGaussian:
        """Return the same distribution as a :class:`GeneralizedInverseGaussian`."""
        loc, concentration = self._arrays()
        return GeneralizedInverseGaussian(
            -0.5, concentration / loc / loc, concentration, validate_args=False
        )

    def sample(self, key: Array, sample_shape: tuple[int, ...] = ()) -> Array:
        """Draw from the distribution.

        :param key: A JAX random key.
        :param sample_shape: Shape of independent draws, prepended to the batch shape.
        :return: An array of shape ``sample_shape + batch_shape``.
        """
        loc, concentration = lax.stop_gradient(self._arrays())
        # Not batch_shape, which still has the old axes under vmap over a distribution.
        shape = tuple(sample_shape) + loc.shape
        return sample_inverse_gaussian(key, loc, concentration, shape=shape)

    @validate_sample
    def log_prob(self, value: ArrayLike) -> Array:
        """Return the log-density.

        :param value: Positive values, broadcast against the batch shape.
        :return: The log-density, minus infinity off the support.
        """
        loc, concentration, x = self._arrays(value)
        positive = x > 0
        x = jnp.where(positive, x, 1.0)
        # Not the squared gap times a ratio, because one may overflow and the other
        # underflow.
        gap = (x - loc) / loc * (jnp.sqrt(concentration) / jnp.sqrt(x))
        log_scale = jnp.log(concentration) - 3 * jnp.log(x) - LOG_2PI
        out = 0.5 * (log_scale - jnp.square(gap))
        return jnp.where(positive, out, -jnp.inf)

    @property
    def variance(self) -> Array:
        loc, concentration = self._arrays()
        return loc * loc * (loc / concentration)

    @property
    def mean_reciprocal(self) -> Array:
        r""":math:`\mathrm{E}[1/x] = 1/\mu + 1/\lambda`, of the batch shape."""
        loc, concentration = self._arrays()
        return 1 / loc + 1 / concentration

    @property
    def mean_log(self) -> Array:
        r""":math:`\mathrm{E}[\log x]`, of the batch shape."""
        loc, concentration = self._arrays()
        ratio = concentration / loc
        scaled = GeneralizedInverseGaussian(-0.5, ratio, ratio, validate_args=False)
        return jnp.log(loc) + scaled.mean_log

    @property
    def mode(self) -> Array:
        loc, concentration = self._arrays()
        half = 1.5 * (loc / concentration)
        return loc / (half + jnp.hypot(1.0, half))

    def entropy(self) -> Array:
        """Return the differential entropy, of the batch shape."""
        _, concentration = self._arrays()
        log_scale = LOG_2PI + 1 - jnp.log(concentration)
        return 0.5 * log_scale + 1.5 * self.mean_log


@kl_divergence.register(InverseGaussian, InverseGaussian)
def _kl_inverse_gaussian(q: InverseGaussian, r: InverseGaussian) -> Array:
    """``KL(q || r)``, of the broadcast batch shape."""
    m, k, loc, concentration = floating(*q._arrays(), *r._arrays())
    shape_part = e2(jnp.log(concentration / k))
    return 0.5 * (shape_part + concentration / m * jnp.square((m - loc) / loc))
