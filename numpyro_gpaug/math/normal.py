# SPDX-License-Identifier: Apache-2.0
"""The standard normal, in the dtype of the argument."""

from __future__ import annotations

import math

import jax.numpy as jnp
from jax import Array
from jax.scipy.special import erfc

LOG_2PI = math.log(2 * math.pi)


def density(z: Array) -> Array:
    """Return the density at z."""
    return jnp.exp(-0.5 * z * z) * (1 / math.sqrt(2 * math.pi))


def cdf(z: Array) -> Array:
    """Return the probability below z, to relative precision where it is small."""
    return 0.5 * erfc(z * -math.sqrt(0.5))
