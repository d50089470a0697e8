# SPDX-License-Identifier: Apache-2.0
"""Normal observations whose log-variance is a latent."""

from __future__ import annotations

import jax.numpy as jnp
import numpy as np
import numpyro.distributions as dist
from jax import Array, random
from jax.typing import ArrayLike
from numpyro.distributions import constraints
from numpyro.distributions.util import promote_shapes, validate_sample
from numpyro.util import is_prng_key


class LogVarianceNormal(dist.Distribution):
    r"""Normal distribution of variance ``exp(log_variance)``.

    The heteroscedastic model of [1] and [2]. Independent Gaussian latents
    :math:`N(m, v)` in ``loc`` and :math:`N(m_g, v_g)` in ``log_variance`` have the
    exact expectation :math:`-\frac12 \log 2 \pi - \frac12 m_g - \frac12 ((y - m)^2 + v)
    \exp(-m_g + \frac12 v_g)`: no approximation of the exponential is needed.

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

    arg_constraints = {"loc": constraints.real, "log_variance": constraints.real}
    support = constraints.real
    reparametrized_params = ["loc", "log_variance"]
    pytree_data_fields = ("loc", "log_variance")

    def __init__(
        self,
        loc: ArrayLike,
        log_variance: ArrayLike,
        *,
        validate_args: bool | None = None,
    ) -> None:
        self.loc, self.log_variance = promote_shapes(loc, log_variance)
        batch_shape = jnp.broadcast_shapes(jnp.shape(loc), jnp.shape(log_variance))
        super().__init__(batch_shape, validate_args=validate_args)

    def _arrays(self) -> tuple[Array, Array]:
        dtype = jnp.result_type(self.loc, self.log_variance, 0.0)
        loc, log_variance = jnp.broadcast_arrays(
            jnp.asarray(self.loc, dtype), jnp.asarray(self.log_variance, dtype)
        )
        return loc, log_variance

    def sample(self, key: Array, sample_shape: tuple[int, ...] = ()) -> Array:
        assert is_prng_key(key)
        loc, log_variance = self._arrays()
        # Not batch_shape: under vmap over a distribution that still has the old axes.
        noise = random.normal(key, (*sample_shape, *loc.shape), loc.dtype)
        return loc + jnp.exp(0.5 * log_variance) * noise

    @validate_sample
    def log_prob(self, value: ArrayLike) -> Array:
        loc, log_variance = self._arrays()
        square = jnp.square(value - loc) * jnp.exp(-log_variance)
        return -0.5 * (log_variance + square + np.asarray(np.log(2 * np.pi), loc.dtype))

    @property
    def mean(self) -> Array:
        return self._arrays()[0]

    @property
    def variance(self) -> Array:
        return jnp.exp(self._arrays()[1])
