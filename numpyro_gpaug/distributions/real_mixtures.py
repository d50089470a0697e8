# SPDX-License-Identifier: Apache-2.0
"""Predictive distributions of real observations, as mixtures over nodes of the
integrated scalar."""

from __future__ import annotations

import math
from collections.abc import Callable

import jax
import jax.numpy as jnp
import numpyro.distributions as dist
from jax import Array, lax, random
from jax.typing import ArrayLike
from numpyro.distributions import constraints
from numpyro.distributions.util import validate_sample

from numpyro_gpaug.distributions._elementwise import Elementwise, parameter
from numpyro_gpaug.distributions.mixtures import bisected_icdf
from numpyro_gpaug.math.blocks import by_elements
from numpyro_gpaug.math.quadrature import gaussian_nodes, log_gamma_nodes, peaked_nodes

# The largest number of nodes for a scalar, in either precision.
_NODES = 112


def normal_of_noise(mean: Array, variance: Array, log_noise: Array) -> dist.Normal:
    """Return normals of the sum of a latent and noise, whose variance may overflow its
    dtype.

    :param mean: mean of the latent.
    :param variance: variance of the latent.
    :param log_noise: logarithms of the variances of the noise, with an additional last
        axis.
    """
    tiny = jnp.finfo(log_noise.dtype).tiny
    total = jnp.logaddexp(jnp.log(jnp.maximum(variance, tiny))[..., None], log_noise)
    largest = 0.95 * math.log(float(jnp.finfo(total.dtype).max))
    scale = jnp.exp(jnp.minimum(0.5 * total, largest))
    return dist.Normal(mean[..., None], scale)


class RealMixture(Elementwise):
    """Real observations with a scalar integrated out: a mixture over nodes of the
    scalar.

    Nodes are computed on demand, for some rows at a time: stored, they would be a
    hundred times as large as the data.
    """

    support = constraints.real

    def components(self, *parameters: Array) -> tuple[Array, dist.Distribution]:
        """Return log-weights of the nodes, along a last axis, and their distributions.

        :param parameters: some rows of each parameter, in the order of their
            declaration.
        """
        raise NotImplementedError

    def density(self, y: Array, *parameters: Array) -> Array:
        """Return the log-density at ``y``, for some rows."""
        log_weights, component = self.components(*parameters)
        return jax.nn.logsumexp(log_weights + component.log_prob(y[..., None]), -1)

    @validate_sample
    def log_prob(self, value: ArrayLike) -> Array:
        return self._by_rows(self.density, value)

    def cdf(self, value: ArrayLike) -> Array:
        return self._by_rows(self._below, value)

    def icdf(self, q: ArrayLike) -> Array:
        def quantile(q: Array, *parameters: Array) -> Array:
            ends = jnp.full_like(q, -jnp.inf), jnp.full_like(q, jnp.inf)
            return bisected_icdf(lambda y: self._below(y, *parameters), q, *ends)

        return self._by_rows(quantile, q)

    def _below(self, y: Array, *parameters: Array) -> Array:
        log_weights, component = self.components(*parameters)
        return (jnp.exp(log_weights) * component.cdf(y[..., None])).sum(-1)

    def _by_rows(self, function: Callable[..., Array], value: ArrayLike) -> Array:
        *parameters, value = self._arrays(value)
        return by_elements(function, value, *parameters, each=_NODES, dtype=value.dtype)


class NormalStudentT(RealMixture):
    """The sum of a normal and a Student-t variable. It is normal given the precision of
    the latter, which is a gamma variable.

    :param df: degrees of freedom, > 0.
    :param loc: mean of the sum.
    :param spread: variance of the normal, >= 0.
    :param scale: scale of the Student-t variable, > 0. All broadcast to the batch
        shape.

    **Example**

    >>> import jax.numpy as jnp
    >>> d = NormalStudentT(4.0, 0.0, jnp.array([0.0, 1.0]), 0.5)
    >>> [f"{x:.3f}" for x in d.log_prob(jnp.array([1.0, 1.0]))]
    ['-2.021', '-1.455']
    """

    df: Array = parameter(constraints.positive)
    loc: Array = parameter(constraints.real)
    spread: Array = parameter(constraints.nonnegative)
    scale: Array = parameter(constraints.positive)

    @property
    def mean(self) -> Array:
        df, loc, *_ = self._arrays()
        return jnp.where(df > 1, loc, jnp.nan)

    @property
    def variance(self) -> Array:
        # As in NumPyro, infinite for df <= 2, and NaN for df <= 1.
        df, _, spread, scale = self._arrays()
        finite = spread + jnp.square(scale) * df / jnp.where(df > 2, df - 2, 1.0)
        return jnp.where(df > 2, finite, jnp.where(df > 1, jnp.inf, jnp.nan))

    def components(self, *parameters: Array) -> tuple[Array, dist.Distribution]:
        df, loc, spread, scale = (x[..., None] for x in parameters)
        x, log_weights = log_gamma_nodes(0.5 * parameters[0])
        noise = jnp.sqrt(spread + jnp.square(scale) * jnp.exp(-x))
        return log_weights, dist.Normal(loc, noise)

    def sample(self, key: Array, sample_shape: tuple[int, ...] = ()) -> Array:
        keys, (df, loc, spread, scale) = random.split(key), self._arrays()
        shape, dtype = (*sample_shape, *loc.shape), loc.dtype
        smooth = jnp.sqrt(spread) * random.normal(keys[0], shape, dtype)
        return loc + smooth + scale * random.t(keys[1], df, shape, dtype)


class NoiseMixture(RealMixture):
    """Normal observations with a noise that is a function of a normal latent.

    It is a mixture over nodes of that latent. Densities use their own nodes, because an
    outlier has a noise level that nodes around the mean do not cover. A subclass
    defines the function.

    :param loc: mean of the function values.
    :param spread: their variance, >= 0.
    :param latent: mean of the latent.
    :param latent_spread: its variance, >= 0.
    :param other: other parameters of the noise. All have the batch shape.
    """

    loc: Array = parameter(constraints.real)
    spread: Array = parameter(constraints.nonnegative)
    latent: Array = parameter(constraints.real)
    latent_spread: Array = parameter(constraints.nonnegative)
    other: Array = parameter(constraints.real)

    def log_noise(self, latent: Array, other: Array) -> Array:
        """Return the logarithm of the variance of the noise."""
        raise NotImplementedError

    @property
    def mean(self) -> Array:
        return self._arrays()[0]

    def components(self, *parameters: Array) -> tuple[Array, dist.Distribution]:
        loc, spread, *latent, other = parameters
        nodes, log_weights = gaussian_nodes(*latent)
        noise = self.log_noise(nodes, other[..., None])
        return log_weights, normal_of_noise(loc, spread, noise)

    def density(self, y: Array, *parameters: Array) -> Array:
        def given(f: Array, y: Array, loc: Array, spread: Array, *rest: Array) -> Array:
            noise = self.log_noise(f, rest[-1])[..., None]
            return normal_of_noise(loc, spread, noise).log_prob(y[..., None])[..., 0]

        fixed = lax.stop_gradient((y, *parameters))
        nodes, log_weights = peaked_nodes(lambda f: given(f, *fixed), *parameters[2:4])
        each = (x[..., None] for x in (y, *parameters))
        return jax.nn.logsumexp(log_weights + given(nodes, *each), -1)

    def sample(self, key: Array, sample_shape: tuple[int, ...] = ()) -> Array:
        keys = random.split(key)
        loc, spread, latent, latent_spread, other = self._arrays()
        shape, dtype = (*sample_shape, *loc.shape), loc.dtype
        f = latent + jnp.sqrt(latent_spread) * random.normal(keys[0], shape, dtype)
        noise = self.log_noise(f, other)[..., None]
        return normal_of_noise(loc, spread, noise).sample(keys[1])[..., 0]
