# SPDX-License-Identifier: Apache-2.0
"""Functions for likelihoods that are products of logistic functions."""

from __future__ import annotations

from abc import abstractmethod
from typing import Any

import jax
import jax.numpy as jnp
from jax import Array
from numpyro.distributions import constraints

from numpyro_gpaug.distributions.polya_gamma import PolyaGamma
from numpyro_gpaug.math.logistic import expected_log_sigmoid, expected_sigmoid
from numpyro_gpaug.math.quadrature import gaussian_nodes
from numpyro_gpaug.math.special import log2cosh_half, pg_mean_unit

from .contract import Augmentation, Parameters


@jax.custom_jvp
def log_tilt(mean: Array, variance: Array) -> Array:
    r"""Return the Polya-Gamma lower bound of ``E log sigmoid(f)``, ``f ~ N(mean,
    variance)``.

    It is ``m / 2 - log(2 cosh(c / 2))`` with ``c = sqrt(m^2 + v)``. It is never
    positive, and keeps its relative accuracy if the two terms cancel.

    :param mean: means, any shape.
    :param variance: variances, broadcastable to it, >= 0.

    **Example**

    >>> import jax.numpy as jnp
    >>> print(f"{log_tilt(jnp.array(50.0), jnp.array(1.0)):.3f}")
    -0.005
    """
    q = mean * mean + variance
    near = q < 1
    c = jnp.sqrt(jnp.where(near, 1.0, q))
    # (m - c) / 2 without the cancellation: (m - c)(m + c) = -v.
    gap = jnp.where(mean > 0, -variance / (2 * (c + jnp.abs(mean))), 0.5 * (mean - c))
    close = 0.5 * mean - log2cosh_half(jnp.where(near, q, 0.0))
    return jnp.where(near, close, gap - jnp.log1p(jnp.exp(-c)))


@log_tilt.defjvp
def _log_tilt_jvp(primals: Any, tangents: Any) -> tuple[Array, Array]:
    mean, variance = primals
    tilt = pg_mean_unit(mean * mean + variance)
    slope = (0.5 - mean * tilt) * tangents[0] - 0.5 * tilt * tangents[1]
    return log_tilt(mean, variance), slope


class LogOdds(Augmentation):
    """Densities ``C sigmoid(f)^ups sigmoid(-f)^downs``: Polya-Gamma augmentation."""

    latents = ("logits",)

    @abstractmethod
    def counts(self, d: Any, y: Array, like: Array) -> tuple[Array, Array]:
        """Return ``ups`` and ``downs``, in the dtype of ``like``."""

    @abstractmethod
    def log_coefficient(self, ups: Array, downs: Array) -> Array:
        """Return ``log C``."""

    def bound(self, d, y, means: Parameters, variances: Parameters) -> Array:
        m, v = means["logits"], variances["logits"]
        return self.with_coefficient(log_tilt, d, y, m, v)

    def expected_log_prob(self, d: Any, y: Array, m: Array, v: Array) -> Array:
        """Return the expected log-density."""
        return self.with_coefficient(expected_log_sigmoid, d, y, m, v)

    def with_coefficient(
        self, log_sigmoid: Any, d: Any, y: Array, m: Array, v: Array
    ) -> Array:
        """Return the log-density with a value or bound of ``E log sigmoid(f)``."""
        ups, downs = self.counts(d, y, m)
        # Not min(m, 0) and max(m, 0), whose slopes at zero are those of one side only.
        size = jnp.abs(m)
        lift = 0.5 * (ups * (m - size) - downs * (m + size))
        odds = (ups + downs) * log_sigmoid(size, v) + lift
        return self.log_coefficient(ups, downs) + odds

    def natural(self, d, y, aux, f: Parameters) -> dict[str, tuple[Array, Array]]:
        ups, downs = self.counts(d, y, aux["omega"])
        return {"logits": (0.5 * (ups - downs), aux["omega"])}


def sigmoid_moments(mean: Array, variance: Array) -> tuple[Array, Array]:
    """Return mean and variance of ``sigmoid(f)``, ``f ~ N(mean, variance)``."""
    expected = expected_sigmoid(mean, variance)
    # The variance has no closed form.
    nodes, log_weights = gaussian_nodes(mean, variance)
    squares = jnp.square(jax.nn.sigmoid(nodes) - expected[..., None])
    return expected, (jnp.exp(log_weights) * squares).sum(-1)


class PolyaGammaOrZero(PolyaGamma):
    r"""The Polya-Gamma distribution with a shape that may be zero, which is a point
    mass at zero.

    An observation without any trial needs no auxiliary variable. The point mass has a
    density with respect to the counting measure, and ``log_prob`` is 0 at zero.

    :param b: shape, >= 0.
    :param c: tilt.
    """

    arg_constraints = {"b": constraints.nonnegative, "c": constraints.real}
    support = constraints.nonnegative

    def log_prob(self, value: Array) -> Array:
        b, c, value = self._arrays(value)
        empty = b == 0
        safe = PolyaGamma(jnp.where(empty, 1.0, b), c)
        density = safe.log_prob(jnp.where(empty, 1.0, value))
        return jnp.where(empty, jnp.where(value == 0, 0.0, -jnp.inf), density)
