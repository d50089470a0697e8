# SPDX-License-Identifier: Apache-2.0
"""Normal observations whose precision is a scaled logistic function."""

from __future__ import annotations

import jax
import jax.numpy as jnp
import numpy as np
import numpyro.distributions as dist
from jax import Array, random
from jax.typing import ArrayLike
from numpyro.distributions import constraints
from numpyro.distributions.util import promote_shapes, validate_sample
from numpyro.util import is_prng_key


class HeteroscedasticNormal(dist.Distribution):
    r"""Normal distribution of precision ``max_precision * sigmoid(precision_logits)``.

    The noise has a floor: its variance is at least ``1 / max_precision``. Independent
    Gaussian latents in ``loc`` and ``precision_logits`` have closed-form updates [1],
    [2].

    :param loc: mean, real.
    :param precision_logits: the larger, the less noise; real.
    :param max_precision: the largest precision, positive. All three broadcast to the
        batch shape.
    :raises ValueError: under ``validate_args``, for parameters off these sets.

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

    arg_constraints = {
        "loc": constraints.real,
        "precision_logits": constraints.real,
        "max_precision": constraints.positive,
    }
    support = constraints.real
    reparametrized_params = ["loc", "precision_logits", "max_precision"]
    pytree_data_fields = ("loc", "precision_logits", "max_precision")

    def __init__(
        self,
        loc: ArrayLike,
        precision_logits: ArrayLike,
        max_precision: ArrayLike,
        *,
        validate_args: bool | None = None,
    ) -> None:
        parameters = (loc, precision_logits, max_precision)
        self.loc, self.precision_logits, self.max_precision = promote_shapes(
            *parameters
        )
        batch_shape = jnp.broadcast_shapes(*map(jnp.shape, parameters))
        super().__init__(batch_shape, validate_args=validate_args)

    def _arrays(self) -> tuple[Array, Array, Array]:
        parameters = (self.loc, self.precision_logits, self.max_precision)
        dtype = jnp.result_type(*parameters, 0.0)
        loc, logits, top = jnp.broadcast_arrays(
            *(jnp.asarray(x, dtype) for x in parameters)
        )
        return loc, logits, top

    def sample(self, key: Array, sample_shape: tuple[int, ...] = ()) -> Array:
        assert is_prng_key(key)
        loc, _, _ = self._arrays()
        # Not batch_shape: under vmap over a distribution that still has the old axes.
        noise = random.normal(key, (*sample_shape, *loc.shape), loc.dtype)
        return loc + jnp.sqrt(self.variance) * noise

    @validate_sample
    def log_prob(self, value: ArrayLike) -> Array:
        loc, logits, top = self._arrays()
        log_precision = jnp.log(top) + jax.nn.log_sigmoid(logits)
        square = top * jax.nn.sigmoid(logits) * jnp.square(value - loc)
        return 0.5 * (log_precision - square - np.asarray(np.log(2 * np.pi), loc.dtype))

    @property
    def mean(self) -> Array:
        return self._arrays()[0]

    @property
    def variance(self) -> Array:
        _, logits, top = self._arrays()
        return (1 + jnp.exp(-logits)) / top
