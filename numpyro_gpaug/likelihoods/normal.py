# SPDX-License-Identifier: Apache-2.0
"""Normal observations: they are conjugate, and the bound is the exact expectation."""

from __future__ import annotations

import jax.numpy as jnp
import numpyro.distributions as dist
from jax import Array

from .contract import Augmentation, Conditionals, Parameters, power, register


def _expected_log_prob(d, y, m: Array, v: Array) -> Array:
    return dist.Normal(m, d.scale).log_prob(y) - 0.5 * v / jnp.square(d.scale)


def _predictive(d, m: Array, v: Array) -> dist.Distribution:
    return dist.Normal(m, jnp.sqrt(v + jnp.square(d.scale)))


class Normal(Augmentation):
    """The normal likelihood, which needs no auxiliary variable: precision
    ``1 / scale^2``, potential ``y / scale^2``."""

    latents = ("loc",)

    def bound(self, d, y, means: Parameters, variances: Parameters) -> Array:
        return _expected_log_prob(d, y, means["loc"], variances["loc"])

    def conditional(self, d, y, f: Parameters) -> Conditionals:
        return {}

    def natural(self, d, y, aux, f: Parameters) -> dict[str, tuple[Array, Array]]:
        precision = 1 / jnp.square(d.scale)
        precision = jnp.broadcast_to(precision, jnp.shape(y))
        return {"loc": (y * precision, precision)}


register(
    dist.Normal, ("loc",), _expected_log_prob, _predictive, Normal(),
    log_concave=True, m_steps={"scale": power(2)},
)  # fmt: skip
