# SPDX-License-Identifier: Apache-2.0
"""Normal observations whose log-variance is a latent."""

from __future__ import annotations

import jax.numpy as jnp
from jax import Array
from jax.typing import ArrayLike
from numpyro.distributions import constraints

from numpyro_gpaug.distributions._elementwise import parameter
from numpyro_gpaug.distributions.heteroscedastic_normal import NormalOfPrecision


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
