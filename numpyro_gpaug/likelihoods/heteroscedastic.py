# SPDX-License-Identifier: Apache-2.0
"""Normal observations with a latent precision: two latents per observation.

The model is from Goldberg, Williams and Bishop (1998), Regression with input-dependent
noise, with the variational treatment of Lazaro-Gredilla and Titsias (2011), Variational
heteroscedastic Gaussian process regression, and with a scaled logistic in place of
their exponential. The augmentation is from Donner and Opper (2018), Efficient Bayesian
inference of sigmoidal Gaussian Cox processes.
"""

from __future__ import annotations

from typing import Any

import jax
import jax.numpy as jnp
import numpyro.distributions as dist
from jax import Array

from numpyro_gpaug.distributions import HeteroscedasticNormal as Likelihood
from numpyro_gpaug.distributions.mixtures import NoiseMixture
from numpyro_gpaug.distributions.polya_gamma import PolyaGamma
from numpyro_gpaug.math.logistic import expected_log_sigmoid, expected_sigmoid
from numpyro_gpaug.math.normal import LOG_2PI

from ._logistic import log_tilt
from .contract import (
    Augmentation,
    Conditionals,
    Parameters,
    count_data,
    moments,
    power,
    register,
)

_LATENTS = ("loc", "precision_logits")


def _constant(top: Array) -> Array:
    return 0.5 * (jnp.log(top) - LOG_2PI)


class HeteroscedasticNormal(Augmentation):
    r"""Precision ``L sigmoid(g)``, ``L = max_precision``. With ``R = (y - f)^2 / 2``,
    ``exp(-L R sigmoid(g)) = sum_n Poisson(n | L R) sigmoid(-g)^n``:
    ``n | f, g ~ Poisson(L R sigmoid(-g))``, then ``omega | n, g ~ PG(n + 1/2, g)``,
    with potential ``(1/2 - n) / 2`` and precision ``omega`` for ``g``.

    The distribution of ``n`` depends on ``f``, so given ``n`` the density is not
    Gaussian in ``f``: Gibbs draws ``f`` with ``n`` and ``omega`` integrated out
    (precision ``L sigmoid(g)``), then both, then ``g`` given both. In the bound, with
    ``R = ((y - m_f)^2 + v_f) / 2``, ``c = sqrt(m_g^2 + v_g)`` and
    ``log T(m) = m / 2 - log(2 cosh(c / 2))``: ``log(L / (2 pi)) / 2 + log T(m_g) / 2
    - L (1 - T(-m_g)) R``, one bound for both latents and for ``L``.
    """

    latents = _LATENTS

    def bound(self, d, y, means: Parameters, variances: Parameters) -> Array:
        m, v, mg, vg = moments(_LATENTS, means, variances)
        top = jnp.asarray(d.max_precision, m.dtype)
        half_square = 0.5 * (jnp.square(y - m) + v)
        precision = -top * jnp.expm1(log_tilt(-mg, vg))
        return _constant(top) + 0.5 * log_tilt(mg, vg) - precision * half_square

    def conditional(self, d, y, f: Parameters) -> Conditionals:
        loc, g = (f[name] for name in _LATENTS)
        half_square = 0.5 * jnp.square(y - loc)
        rate = d.max_precision * half_square * jax.nn.sigmoid(-g)
        return {
            "n": dist.Poisson(rate),
            "omega": lambda aux: PolyaGamma(jnp.asarray(aux["n"], g.dtype) + 0.5, g),
        }

    def natural(self, d, y, aux, f: Parameters) -> dict[str, tuple[Array, Array]]:
        g = f["precision_logits"]
        precision = d.max_precision * jax.nn.sigmoid(g)
        n = jnp.asarray(aux["n"], g.dtype)
        return {
            "loc": (y * precision, precision),
            "precision_logits": (0.5 * (0.5 - n), aux["omega"]),
        }

    def gibbs_blocks(self, d) -> tuple[tuple[str, ...], ...]:
        return (("loc",), ("aux",), ("precision_logits",))


def _expected_log_prob(d, y, m: Array, v: Array, mg: Array, vg: Array) -> Array:
    top = jnp.asarray(d.max_precision, m.dtype)
    half_square = 0.5 * (jnp.square(y - m) + v)
    precision = top * expected_sigmoid(mg, vg)
    return _constant(top) + 0.5 * expected_log_sigmoid(mg, vg) - precision * half_square


class _Predictive(NoiseMixture):
    def log_noise(self, latent: Array, other: Array) -> Array:
        return jax.nn.softplus(-latent) - other

    @property
    def variance(self) -> Array:
        # The noise is one plus a log-normal, whose mean lies above the nodes.
        _, v, mg, vg, log_top = self._arrays()
        return v + (1 + jnp.exp(0.5 * vg - mg)) * jnp.exp(-log_top)


def _predictive(d, m: Array, v: Array, mg: Array, vg: Array) -> dist.Distribution:
    return _Predictive(m, v, mg, vg, jnp.log(jnp.asarray(d.max_precision, m.dtype)))


def _half(*given: Any) -> Array:
    return -0.5 * count_data(*given)


register(
    Likelihood, _LATENTS, _expected_log_prob, _predictive, HeteroscedasticNormal(),
    m_steps={"max_precision": power(-1, _half)},
)  # fmt: skip
