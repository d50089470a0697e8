# SPDX-License-Identifier: Apache-2.0
"""Poisson counts whose rate is a scaled logistic function."""

from __future__ import annotations

import jax
import jax.numpy as jnp
import numpyro.distributions as dist
from jax import Array
from jax.scipy.special import gammaln
from jax.typing import ArrayLike
from numpyro.distributions import constraints
from numpyro.distributions.util import validate_sample

from numpyro_gpaug.distributions._elementwise import Elementwise, parameter


class LogisticPoisson(Elementwise):
    r"""Poisson distribution with rate ``max_rate * sigmoid(logits)`` [1].

    The rate is bounded, and a Gaussian latent in ``logits`` has closed-form updates; an
    unbounded rate, ``Poisson(exp(f))``, has none.

    :param logits: log-odds of an event being kept, real.
    :param max_rate: the largest rate, positive. Both broadcast to the batch shape.
    :raises ValueError: under ``validate_args``, for parameters outside of these sets,
        and for counts that are negative or not integers.

    **Reference**

    [1] C. Donner and M. Opper (2018), *Efficient Bayesian inference of sigmoidal
    Gaussian Cox processes*, Journal of Machine Learning Research 19.

    **Example**

    >>> import jax.numpy as jnp
    >>> d = LogisticPoisson(jnp.array([-1.0, 0.0, 30.0]), 4.0)
    >>> [f"{x:.2f}" for x in d.mean]
    ['1.08', '2.00', '4.00']
    >>> [f"{x:.2f}" for x in d.log_prob(jnp.array([0, 2, 4]))]
    ['-1.08', '-1.31', '-1.63']
    """

    logits: ArrayLike = parameter(constraints.real)
    max_rate: ArrayLike = parameter(constraints.positive)
    support = constraints.nonnegative_integer

    @property
    def rate(self) -> Array:
        """``max_rate * sigmoid(logits)``."""
        logits, max_rate = self._arrays()
        return max_rate * jax.nn.sigmoid(logits)

    def sample(self, key: Array, sample_shape: tuple[int, ...] = ()) -> Array:
        # Not batch_shape, which still has the old axes under vmap over a distribution.
        return dist.Poisson(self.rate).sample(key, sample_shape)

    @validate_sample
    def log_prob(self, value: ArrayLike) -> Array:
        logits, max_rate = self._arrays()
        y = jnp.asarray(value, logits.dtype)
        # Not the logarithm of the rate, which underflows.
        log_rate = jnp.log(max_rate) + jax.nn.log_sigmoid(logits)
        return y * log_rate - self.rate - gammaln(y + 1)

    mean = rate
    variance = rate
