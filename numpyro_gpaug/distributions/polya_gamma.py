# SPDX-License-Identifier: Apache-2.0
"""The Polya-Gamma distribution."""

import math

import jax
import jax.numpy as jnp
import numpy as np
from jax import Array
from jax.typing import ArrayLike
from numpyro.distributions import constraints
from numpyro.distributions.kl import kl_divergence
from numpyro.distributions.util import not_jax_tracer, validate_sample

from numpyro_gpaug.distributions._elementwise import Elementwise, parameter
from numpyro_gpaug.distributions._pg_density import (
    POLE,
    bregman,
    log_density,
    saddle_threshold,
    scaled_tanh_derivatives,
    with_tangent_of,
)
from numpyro_gpaug.distributions._pg_sampler import sample as _sample
from numpyro_gpaug.math.arrays import floating
from numpyro_gpaug.math.special import log2cosh_half, pg_mean_unit


def _half_abs(c: Array) -> Array:
    # Unlike jnp.abs this has slope one at zero, where the density is smooth in c and
    # the slope cancels: the second derivative there would otherwise be lost.
    return jnp.where(c < 0, -c, c) / 2


@jax.jit
def _unit_variance(c: Array) -> Array:
    w = jnp.square(c) / 4 + POLE
    _, t1 = scaled_tanh_derivatives(w, 1)
    return -t1 / (8 * w)


@jax.jit
def _unit_divergence(c1: Array, c2: Array) -> Array:
    s1, s2 = jnp.square(c1), jnp.square(c2)
    # The divergence is that of two points of log cosh; its textbook form is a small
    # difference of large terms when c1 and c2 are close.
    value = bregman(s1 / 4 + POLE, s2 / 4 + POLE, (c2 - c1) * (c2 + c1) / 4)
    surrogate = log2cosh_half(s1) - log2cosh_half(s2) + (s2 - s1) / 2 * pg_mean_unit(s1)
    return with_tangent_of(value, surrogate)


class PolyaGamma(Elementwise):
    r"""Polya-Gamma distribution :math:`PG(b, c)`, :math:`b>0`, :math:`c` real [1].

    The distribution of

    .. math::
        \omega = \frac{1}{2\pi^2} \sum_{k\ge 1}
            \frac{g_k}{(k-1/2)^2 + c^2/(4\pi^2)},
        \qquad g_k \sim \mathrm{Gamma}(b, 1),

    the auxiliary variable which makes a logistic likelihood Gaussian in its
    log-odds,

    .. math::
        e^{af}(1+e^f)^{-b} = 2^{-b} e^{(a-b/2)f}\,
        \mathrm{E}_{\omega\sim PG(b,0)}\, e^{-\omega f^2/2}.

    The density is even in
    :math:`c`.

    **log_prob** is exact to rounding (from a table) up to :math:`b=1000` in double and
    :math:`b=12` in single precision.  For larger shapes it is a saddlepoint expansion
    with two correction terms, whose error falls as :math:`b^{-3}`.  Over :math:`b` in
    [0.01, 1e4], :math:`|c|` in [0, 1e3], values in [1e-4, 1e3] and from 0.01 to 30
    times the mean, the largest error relative to :math:`\max(1, |\log p|)` was 1e-11 in
    double and 3e-5 in single precision (3e-6 up to :math:`b=12`).  It is differentiable
    in the value, in ``b`` and in ``c``.

    **sample** is a rejection sampler [1, 2] with one envelope for every real ``b`` and
    every ``c``, an inverse Gaussian distribution (drawn as in [3]), which accepts at
    least 81% of its proposals.  Nothing is truncated. Only the logarithm of the
    acceptance probability is approximate: it comes from a table. Its error, and hence
    the relative error of the density of the draws, was at most 1e-9 in double precision
    for :math:`b\le 32` and 3e-9 up to :math:`b=10^4`; in single precision 3e-6 for
    :math:`b\le 32` and 2e-5 up to :math:`b=10^4`.  A draw is rounded, and its normal
    quantile is an inverse of a uniform number with 52 (23) bits: single-precision tails
    end at a probability of about 1e-7.  A draw takes less time if all elements share a
    ``b`` that is a scalar, or is known and not traced.  A shape of zero, which
    ``validate_args`` rejects, gives zero.  Draws carry no gradient.

    **References**

    [1] N. G. Polson, J. G. Scott and J. Windle (2013), *Bayesian inference for
    logistic models using Polya-Gamma latent variables*, Journal of the American
    Statistical Association 108(504).

    [2] J. Windle, N. G. Polson and J. G. Scott (2014), *Sampling Polya-Gamma random
    variates: alternate and approximate techniques*, arXiv:1405.0506.

    [3] J. R. Michael, W. R. Schucany and R. W. Haas (1976), *Generating random
    variates using transformations with multiple roots*, The American Statistician
    30(2).

    :param b: Shape, positive.
    :param c: Tilt, real. ``b`` and ``c`` broadcast to the batch shape; the event is
        a scalar.

    **Example**

    .. doctest::

        >>> import jax.numpy as jnp
        >>> from jax import random
        >>> from numpyro_gpaug.distributions import PolyaGamma
        >>> omega = PolyaGamma(1.0, jnp.array([0.0, 2.0]))
        >>> omega.sample(random.key(0), (3,)).shape
        (3, 2)
        >>> [f"{m:.4f}" for m in omega.mean]
        ['0.2500', '0.1904']
    """

    b: ArrayLike = parameter(constraints.positive)
    c: ArrayLike = parameter(constraints.real)
    support = constraints.positive

    def _concrete_b(self, shape: tuple[int, ...]) -> np.ndarray | None:
        if not not_jax_tracer(self.b):
            return None
        return np.broadcast_to(np.asarray(self.b), shape).ravel()

    def sample(self, key: Array, sample_shape: tuple[int, ...] = ()) -> Array:
        """Draw from the distribution.

        :param key: A JAX random key.
        :param sample_shape: Shape of independent draws, prepended to the batch shape.
        :return: An array of shape ``sample_shape + batch_shape``.
        """
        b, c = self._arrays()
        # A single shape for many tilts takes fewer operations than one shape for each.
        one = jnp.size(self.b) == 1
        draws = _sample(
            key,
            jnp.ravel(b)[:1] if one else jnp.ravel(b),
            jnp.ravel(_half_abs(c)),
            math.prod(sample_shape),
            self._concrete_b(b.shape),
        )
        # Not batch_shape, which still has the old axes under vmap over a distribution.
        return draws.reshape(tuple(sample_shape) + b.shape) / 4

    @validate_sample
    def log_prob(self, value: ArrayLike) -> Array:
        """Return the log-density.

        :param value: Positive values, broadcast against the batch shape.
        :return: The log-density, minus infinity off the support.
        """
        b, c, x = self._arrays(value)
        positive = x > 0
        concrete_b = self._concrete_b(x.shape)
        threshold = saddle_threshold(x.dtype)
        small = large = False
        if concrete_b is not None:
            small = bool(np.all(concrete_b <= threshold))
            large = bool(np.all(concrete_b > threshold))
        scaled = 4 * jnp.where(positive, x, 1.0)
        out = log_density(scaled, b, _half_abs(c), all_small=small, all_large=large)
        return jnp.where(positive, out + math.log(4.0), -jnp.inf)

    @property
    def mean(self) -> Array:
        b, c = self._arrays()
        return b * pg_mean_unit(jnp.square(c))

    @property
    def variance(self) -> Array:
        b, c = self._arrays()
        return b * _unit_variance(c)


@kl_divergence.register(PolyaGamma, PolyaGamma)
def _kl_polya_gamma(p: PolyaGamma, q: PolyaGamma) -> Array:
    r"""Return ``KL(p || q)`` for two Polya-Gamma distributions of the same shape.

    There is no closed form when the shapes differ.  They are compared when both are
    concrete; a traced pair must agree, and ``p.b`` is used.

    :raises NotImplementedError: If the shapes are known to differ.
    """
    if not_jax_tracer(p.b) and not_jax_tracer(q.b):
        if not np.all(np.asarray(p.b) == np.asarray(q.b)):
            raise NotImplementedError(
                "KL between PolyaGamma distributions is available in closed form "
                "only when they share the shape `b`."
            )
    b, c1, c2 = floating(p.b, p.c, q.c)
    return b * _unit_divergence(c1, c2)
