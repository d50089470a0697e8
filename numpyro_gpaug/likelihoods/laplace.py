# SPDX-License-Identifier: Apache-2.0
"""Laplace observations: inverse-Gaussian augmentation and exact expectation.

Andrews and Mallows (1974), Scale mixtures of normal distributions.
"""

from __future__ import annotations

import jax.numpy as jnp
import numpyro.distributions as dist
from jax import Array

from numpyro_gpaug.distributions.generalized_inverse_gaussian import InverseGaussian
from numpyro_gpaug.distributions.mixtures import NormalLaplace
from numpyro_gpaug.math.normal import expected_absolute

from .contract import Conditionals, Parameters, ScaleMixture, power, register


class Laplace(ScaleMixture):
    r"""``y | w ~ N(f, 1 / w)``, ``1 / w ~ Exponential(1 / (2 b^2))``, ``b = scale``.

    The auxiliary is the precision ``w``, which enters the natural parameters linearly:
    ``w | f ~ InverseGaussian(1 / (b |y - f|), 1 / b^2)``, that is, the variance
    ``1 / w`` is generalised inverse-Gaussian, ``GIG(1/2, 1/b^2, (y - f)^2)``. The bound
    is ``-log(2 b) - sqrt((y - m)^2 + v) / b``. At ``f = y`` the conditional has no
    mean, so the residual is bounded below by the rounding error.
    """

    def bound(self, d, y, means: Parameters, variances: Parameters) -> Array:
        m, v = means["loc"], variances["loc"]
        scale = jnp.asarray(d.scale, m.dtype)
        size = (jnp.square(y - m) + v) / jnp.square(scale)
        # Not sqrt(size), whose slope at zero is infinite.
        return -jnp.log(2 * scale) - jnp.sqrt(size + jnp.finfo(m.dtype).eps ** 2)

    def conditional(self, d, y, f: Parameters) -> Conditionals:
        loc = f["loc"]
        scale = jnp.asarray(d.scale, loc.dtype)
        ratio = jnp.maximum(jnp.abs(y - loc) / scale, jnp.finfo(loc.dtype).eps)
        shape = 1 / jnp.square(scale)
        return {"precision": InverseGaussian(shape / ratio, shape)}


def _expected_log_prob(d, y, m: Array, v: Array) -> Array:
    scale = jnp.asarray(d.scale, m.dtype)
    return -jnp.log(2 * scale) - expected_absolute(y - m, v) / scale


def _predictive(d, m: Array, v: Array) -> dist.Distribution:
    return NormalLaplace(m, v, d.scale)


register(
    dist.Laplace, ("loc",), _expected_log_prob, _predictive, Laplace(),
    log_concave=True, m_steps={"scale": power(1)},
)  # fmt: skip
