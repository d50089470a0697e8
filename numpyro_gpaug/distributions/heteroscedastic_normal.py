# SPDX-License-Identifier: Apache-2.0
"""Normal observations whose precision is a scaled logistic function, or whose
log-variance is a latent."""

from __future__ import annotations

from abc import abstractmethod

import jax
import jax.numpy as jnp
from jax import Array
from jax.typing import ArrayLike
from numpyro.distributions import constraints
from numpyro.distributions.util import validate_sample

from numpyro_gpaug.distributions._elementwise import Located, parameter
from numpyro_gpaug.math.normal import LOG_2PI, drawn


class NormalOfPrecision(Located):
    """Normal observations with mean ``loc``, the first parameter."""

    @abstractmethod
    def _precision(self) -> tuple[Array, Array]:
        """Return the logarithm of the precision, and the precision."""

    def sample(self, key: Array, sample_shape: tuple[int, ...] = ()) -> Array:
        return drawn(key, sample_shape, self.mean, self.variance)

    @validate_sample
    def log_prob(self, value: ArrayLike) -> Array:
        log_precision, precision = self._precision()
        square = precision * jnp.square(value - self.mean)
        return 0.5 * (log_precision - square - LOG_2PI)


class HeteroscedasticNormal(NormalOfPrecision):
    r"""Normal distribution with precision ``max_precision *
    sigmoid(precision_logits)``.

    The noise has a floor: its variance is at least ``1 / max_precision``. Independent
    Gaussian latents in ``loc`` and ``precision_logits`` have closed-form updates [1],
    [2].

    :param loc: mean, real.
    :param precision_logits: log-odds of the precision, real: the larger, the less
        noise.
    :param max_precision: the largest precision, positive. All three broadcast to the
        batch shape.
    :raises ValueError: under ``validate_args``, for parameters outside of these sets.

    **References**

    [1] P. W. Goldberg, C. K. I. Williams and C. M. Bishop (1998), *Regression with
    input-dependent noise: a Gaussian process treatment*.

    [2] M. Lazaro-Gredilla and M. K. Titsias (2011), *Variational heteroscedastic
    Gaussian process regression*.

    **Example**

    >>> import jax.numpy as jnp
    >>> d = HeteroscedasticNormal(1.0, jnp.array([-3.0, 0.0, 3.0]), 100.0)
    >>> [f"{x:.3f}" for x in jnp.sqrt(d.variance)]
    ['0.459', '0.141', '0.102']
    """

    loc: ArrayLike = parameter(constraints.real)
    precision_logits: ArrayLike = parameter(constraints.real)
    max_precision: ArrayLike = parameter(constraints.positive)
    support = constraints.real
    reparametrized_params = ["loc", "precision_logits", "max_precision"]

    def _precision(self) -> tuple[Array, Array]:
        _, logits, top = self._arrays()
        return jnp.log(top) + jax.nn.log_sigmoid(logits), top * jax.nn.sigmoid(logits)

    @property
    def variance(self) -> Array:
        _, logits, top = self._arrays()
        return (1 + jnp.exp(-logits)) / top


class LogVarianceNormal(NormalOfPrecision):
    r"""Normal distribution with variance ``exp(log_variance)``.

    This is the heteroscedastic model of [1] and [2]. Independent Gaussian latents
    :math:`N(m, v)` in ``loc`` and :math:`N(m_g, v_g)` in ``log_variance`` have the
    exact expectation

    .. math::
        -\frac12 \log 2 \pi - \frac12 m_g - \frac12 ((y - m)^2 + v)
        \exp(-m_g + \tfrac12 v_g),

    so that the exponential needs no approximation.

    :param loc: mean, real.
    :param log_variance: real. Both broadcast to the batch shape.

    **References**

    [1] P. W. Goldberg, C. K. I. Williams and C. M. Bishop (1998), *Regression with
    input-dependent noise: a Gaussian process treatment*.

    [2] M. Lazaro-Gredilla and M. K. Titsias (2011), *Variational heteroscedastic
    Gaussian process regression*.

    **Example**

    >>> import jax.numpy as jnp
    >>> print(LogVarianceNormal(0.0, jnp.array([-2.0, 0.0, 2.0])).variance.round(2))
    [0.14 1.   7.39]
    """

    loc: ArrayLike = parameter(constraints.real)
    log_variance: ArrayLike = parameter(constraints.real)
    support = constraints.real
    reparametrized_params = ["loc", "log_variance"]

    def _precision(self) -> tuple[Array, Array]:
        log_variance = self._arrays()[1]
        return -log_variance, jnp.exp(-log_variance)

    @property
    def variance(self) -> Array:
        return jnp.exp(self._arrays()[1])
