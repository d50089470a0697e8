# SPDX-License-Identifier: Apache-2.0
"""The inverse Gaussian distribution."""

import jax.numpy as jnp
from jax import Array, lax
from jax.typing import ArrayLike
from numpyro.distributions import constraints
from numpyro.distributions.kl import kl_divergence
from numpyro.distributions.util import validate_sample
from numpyro.util import is_prng_key

from numpyro_gpaug.distributions._elementwise import Elementwise, parameter
from numpyro_gpaug.distributions._gig_sampler import sample_inverse_gaussian
from numpyro_gpaug.distributions.generalized_inverse_gaussian import (
    GeneralizedInverseGaussian,
)
from numpyro_gpaug.math.bessel import e2
from numpyro_gpaug.math.concrete import floating
from numpyro_gpaug.math.normal import LOG_2PI

__all__ = ["InverseGaussian"]


class InverseGaussian(Elementwise):
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
        assert is_prng_key(key)
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
    def mean(self) -> Array:
        return self._arrays()[0]

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
