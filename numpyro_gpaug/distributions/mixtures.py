# SPDX-License-Identifier: Apache-2.0
"""Predictive distributions as finite mixtures over nodes of integrated variables."""

from __future__ import annotations

import math
from collections.abc import Callable
from functools import partial
from typing import Any

import jax
import jax.numpy as jnp
import numpyro.distributions as dist
from jax import Array, lax, random
from jax.scipy.special import ndtr
from jax.typing import ArrayLike
from numpyro.distributions import constraints
from numpyro.distributions.util import validate_sample

from numpyro_gpaug.distributions._elementwise import Elementwise, Located, parameter
from numpyro_gpaug.math.blocks import by_elements
from numpyro_gpaug.math.normal import LOG_2PI, drawn
from numpyro_gpaug.math.quadrature import gaussian_nodes, log_gamma_nodes, peaked_nodes


class CountMixture(Elementwise):
    """Counts with a latent log-odds ``f ~ N(loc, loc_variance)`` integrated out.

    It is a finite mixture with separate nodes for each count, near the mode of its
    likelihood: fixed nodes do not resolve the peak of a large count. Sampling draws the
    latent. A subclass defines the likelihood.

    :param other: the other parameter of the likelihood.
    :param loc: mean of the latent.
    :param loc_variance: its variance, >= 0. All have the batch shape.
    :param mean: mean of the counts.
    :param variance: variance of the counts.
    """

    other: Array = parameter(constraints.nonnegative)
    loc: Array = parameter(constraints.real)
    loc_variance: Array = parameter(constraints.nonnegative)
    mean: Array = parameter(constraints.dependent)
    variance: Array = parameter(constraints.dependent)
    support = constraints.nonnegative_integer

    def likelihood(self, other: Array, logits: Array) -> dist.Distribution:
        """Return the distribution of a count given its latent."""
        raise NotImplementedError

    def turn(self, other: Array, y: Array) -> tuple[Array, Array, Array]:
        """Return the most likely log-odds for a count, the width of the likelihood
        there, and the part of its logarithm that does not depend on the latent."""
        raise NotImplementedError

    def exponent(self, other: Array, y: Array, logits: Array) -> Array:
        """Return the part of the log-likelihood that depends on the latent."""
        raise NotImplementedError

    def at_most(self, other: Array, y: Array, logits: Array) -> Array:
        """Return the probability of at most ``y`` counts, given the latent.

        :param y: integers, >= 0.
        """
        raise NotImplementedError

    def cdf(self, value: ArrayLike) -> Array:
        """Return the probability of counts up to a value, to four digits in float32.

        :param value: the value, which broadcasts with the batch shape.
        """
        other, loc, loc_variance, *_ = self._arrays()
        y = jnp.floor(jnp.asarray(value, loc.dtype))
        # As a function of the latent it falls where the likelihood of y peaks.
        counted = jnp.maximum(y, 0)
        centre, width, _ = self.turn(other, counted)
        nodes, log_weights = gaussian_nodes(loc, loc_variance, centre, width)
        falls = self.at_most(other[..., None], counted[..., None], nodes)
        return jnp.where(y < 0, 0, (jnp.exp(log_weights) * falls).sum(-1))

    def icdf(self, q: ArrayLike) -> Array:
        return quantile(self, q)

    def sample(self, key: Array, sample_shape: tuple[int, ...] = ()) -> Array:
        latent_key, key = random.split(key)
        other, loc, loc_variance, *_ = self._arrays()
        # NumPyro's negative binomial computes exp(-logits), which must be finite.
        largest = -0.9 * math.log(jnp.finfo(loc.dtype).tiny)
        logits = drawn(latent_key, sample_shape, loc, loc_variance)
        return self.likelihood(other, jnp.clip(logits, -largest, largest)).sample(key)

    @validate_sample
    def log_prob(self, value: ArrayLike) -> Array:
        other, loc, loc_variance, *_ = self._arrays()
        y = jnp.asarray(value, loc.dtype)
        centre, width, constant = self.turn(other, y)
        fixed = lax.stop_gradient((other, y))
        nodes, log_weights = peaked_nodes(
            lambda f: self.exponent(*fixed, f), loc, loc_variance, centre, width
        )
        exponent = self.exponent(other[..., None], y[..., None], nodes)
        return constant + jax.nn.logsumexp(log_weights + exponent, axis=-1)


def bounds(support: Any) -> tuple[ArrayLike, ArrayLike]:
    """Return the bounds of a support; infinite ones if it has none."""
    while isinstance(support, constraints.independent):
        support = support.base_constraint
    low, high = (getattr(support, f"{k}_bound", None) for k in ("lower", "upper"))
    return -math.inf if low is None else low, math.inf if high is None else high


def quantile(
    d: Any, q: ArrayLike, ends: tuple[ArrayLike, ArrayLike] | None = None
) -> Array:
    """Return a quantile of a distribution that has ``cdf`` alone, of any scale.

    :param d: the distribution.
    :param q: probabilities, which broadcast with the batch shape.
    :param ends: bounds of the quantile, if not those of the support.
    """
    leaves = map(jnp.asarray, jax.tree.leaves(d))
    numbers = [x for x in leaves if jnp.issubdtype(x.dtype, jnp.floating)]
    dtype = jax.dtypes.canonicalize_dtype(jnp.result_type(*numbers))
    q = jnp.asarray(q, dtype)
    q = jnp.broadcast_to(q, jnp.broadcast_shapes(q.shape, d.batch_shape))
    low, high = (
        jnp.broadcast_to(jnp.asarray(x, dtype), q.shape)
        for x in ends or bounds(d.support)
    )
    if not d.is_discrete:
        return _inverse(_bisected, d, q, low, high)

    def cdf(y: Array) -> Array:
        count = jnp.ceil(y)
        return jnp.where(count < low, 0, d.cdf(jnp.maximum(count, low)))

    # The numbers whose next integer has at least this probability begin one below it.
    found = jnp.ceil(bisected_icdf(cdf, q, low - 1, high, counts=True))
    # Numbers between -1 and 0 are rounded to -0, which would be printed.
    return jnp.where(found == 0, 0, found)


def _bisected(d: Any, q: Array, low: Array, high: Array) -> Array:
    return bisected_icdf(d.cdf, q, low, high)


@partial(jax.custom_jvp, nondiff_argnums=(0,))
def _inverse(find: Callable[..., Array], d: Any, q: Array, *ends: Array) -> Array:
    """Return ``find(d, q, *ends)``, a quantile of a continuous distribution, with
    derivatives, which bisection does not have."""
    return find(d, q, *ends)


@_inverse.defjvp
def _inverse_jvp(
    find: Callable[..., Array], primals: Any, tangents: Any
) -> tuple[Array, Array]:
    found = _inverse(find, *primals)
    _, moved = jax.jvp(lambda d, q: d.cdf(found) - q, primals[:2], tangents[:2])
    density = jnp.exp(primals[0].log_prob(found))
    known = density > 0
    return found, jnp.where(known, -moved / jnp.where(known, density, 1), 0)


def bisected_icdf(
    cdf: Callable[[Array], Array],
    q: Array,
    low: Array,
    high: Array,
    *,
    counts: bool = False,
) -> Array:
    """Return the quantile q of a distribution function: the smallest floating-point
    number that has at least this probability. The numbers are bisected in their order,
    as integers, so that no scale needs to be known.

    :param cdf: an increasing function. Where it overflows (NaN), it counts as 0 or 1.
    :param q: probabilities.
    :param low: a lower bound of the quantile, of the shape of the answer; or -inf.
    :param high: an upper bound; or inf.
    :param counts: whether a number with the same next integer is close enough.
    """
    dtype = low.dtype
    whole = jnp.int32 if jnp.finfo(dtype).bits == 32 else jnp.int64

    def turned(order: Array) -> Array:
        # Negative numbers are ordered by magnitude.
        return jnp.where(order < 0, order ^ jnp.iinfo(whole).max, order)

    def number(order: Array) -> Array:
        return lax.bitcast_convert_type(turned(order), dtype)

    def middle(ends: tuple[Array, Array]) -> Array:
        low, high = ends
        return (low >> 1) + (high >> 1) + (low & high & 1)

    def wide(ends: tuple[Array, Array]) -> Array:
        left = middle(ends) != ends[0]
        if counts:
            low, high = (jnp.ceil(number(x)) for x in ends)
            left &= high - low > 1
        return left.any()

    def halve(ends: tuple[Array, Array]) -> tuple[Array, Array]:
        low, high = ends
        at = number(middle(ends))
        reached = cdf(at)
        below = jnp.where(jnp.isnan(reached), at < 0, reached < q)
        return jnp.where(below, middle(ends), low), jnp.where(below, high, middle(ends))

    low, high = (turned(lax.bitcast_convert_type(x, whole)) for x in (low, high))
    return number(lax.while_loop(wide, halve, (low, high))[1])


class NormalLaplace(Located):
    """The sum of a normal and a Laplace variable.

    :param loc: mean of the sum.
    :param loc_variance: variance of the normal, >= 0.
    :param scale: scale of the Laplace variable, > 0. All three broadcast to the batch
        shape.

    **Example**

    >>> import jax.numpy as jnp
    >>> d = NormalLaplace(0.0, jnp.array([0.0, 1.0]), 0.5)
    >>> [f"{x:.3f}" for x in d.log_prob(jnp.array([1.0, 1.0]))]
    ['-2.000', '-1.459']
    >>> print(f"{NormalLaplace(0.0, 1.0, 0.5).icdf(0.9):.3f}")
    1.544
    """

    loc: Array = parameter(constraints.real)
    loc_variance: Array = parameter(constraints.nonnegative)
    scale: Array = parameter(constraints.positive)
    support = constraints.real

    @property
    def variance(self) -> Array:
        _, loc_variance, scale = self._arrays()
        return loc_variance + 2 * jnp.square(scale)

    def sample(self, key: Array, sample_shape: tuple[int, ...] = ()) -> Array:
        keys, (loc, loc_variance, scale) = random.split(key), self._arrays()
        smooth = drawn(keys[0], sample_shape, loc, loc_variance)
        return smooth + scale * random.laplace(keys[1], smooth.shape, smooth.dtype)

    @validate_sample
    def log_prob(self, value: ArrayLike) -> Array:
        # In units of the scale: the sum of exp(s^2/2 -+ d) Phi(+-d/s - s) / 2.
        distance, square = self._in_units(value)
        right, left = (_log_side(x, square) for x in (distance, -distance))
        return jnp.logaddexp(right, left) - jnp.log(2 * self.scale)

    def _in_units(self, value: ArrayLike) -> tuple[Array, Array]:
        """Return distance and variance of the normal, in units of the scale."""
        loc, loc_variance, scale = self._arrays()
        square = loc_variance / jnp.square(scale)
        distance = (jnp.asarray(value) - loc) / scale
        return distance, jnp.maximum(square, jnp.finfo(loc.dtype).eps ** 3)

    def cdf(self, value: ArrayLike) -> Array:
        distance, square = self._in_units(value)
        right, left = (jnp.exp(_log_side(x, square)) for x in (distance, -distance))
        return ndtr(distance / jnp.sqrt(square)) - 0.5 * (right - left)

    def icdf(self, q: ArrayLike) -> Array:
        return quantile(self, q)


def _log_side(distance: Array, square: Array) -> Array:
    """Return ``log [exp(s^2 / 2 - d) Phi(d / s - s)]`` for ``square = s^2``."""
    s = jnp.sqrt(square)
    x = distance / s - s
    far = x < -15
    near = square / 2 - distance + jax.scipy.special.log_ndtr(jnp.where(far, 0.0, x))
    # Both terms are close to x^2 / 2 here, and their difference is not.
    z = jnp.where(far, x, -15.0)
    r = 1 / jnp.square(z)
    series = r * (-1 + r * (3 + r * (-15 + r * (105 - 945 * r))))
    tail = jnp.log1p(series) - jnp.log(-z) - 0.5 * LOG_2PI
    return jnp.where(far, tail - jnp.square(distance) / (2 * square), near)


class NodeMixture(dist.MixtureSameFamily):
    """A mixture over nodes with its exact moments.

    A draw chooses its node first, so it needs memory for one draw, not for one per
    node.

    :param log_weights: log-weights, of shape batch + (K,).
    :param component: the component, of that batch shape.
    :param mean: mean, of the batch shape.
    :param variance: variance, of the batch shape.
    """

    # Fields, which are properties in NumPyro.
    mean: Array = None  # type: ignore[assignment]
    variance: Array = None  # type: ignore[assignment]
    pytree_data_fields: tuple[str, ...] = ("mean", "variance")

    def __init__(
        self,
        log_weights: Array,
        component: dist.Distribution,
        mean: Array,
        variance: Array,
    ) -> None:
        weights = jnp.broadcast_to(log_weights, component.batch_shape)
        super().__init__(dist.CategoricalLogits(weights), component)
        self.mean = jnp.broadcast_to(mean, self.batch_shape)
        self.variance = jnp.broadcast_to(variance, self.batch_shape)

    def icdf(self, q: ArrayLike) -> Array:
        return quantile(self, q)

    def sample_with_intermediates(
        self, key: Array, sample_shape: tuple[int, ...] = ()
    ) -> tuple[Array, list[Array]]:
        node_key, key = random.split(key)
        shape = tuple(sample_shape) + self.batch_shape
        nodes = self.mixing_distribution.expand(shape).sample(node_key)
        component = self.component_distribution
        places = nodes.reshape(-1, *self.batch_shape, 1)
        chosen = {}
        for name in component.arg_constraints.keys() & vars(component).keys():
            table = jnp.broadcast_to(getattr(component, name), component.batch_shape)
            found = jnp.take_along_axis(table[None], places, -1)
            chosen[name] = found.reshape(nodes.shape)
        return type(component)(**chosen).sample(key), [nodes]


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


class RealMixture(Located):
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
        return _inverse(RealMixture._found, self, jnp.asarray(q))

    def _found(self, q: Array) -> Array:
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
    :param loc_variance: variance of the normal, >= 0.
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
    loc_variance: Array = parameter(constraints.nonnegative)
    scale: Array = parameter(constraints.positive)

    @property
    def mean(self) -> Array:
        df, loc, *_ = self._arrays()
        return jnp.where(df > 1, loc, jnp.nan)

    @property
    def variance(self) -> Array:
        # As in NumPyro, infinite for df <= 2, and NaN for df <= 1.
        df, _, loc_variance, scale = self._arrays()
        finite = loc_variance + jnp.square(scale) * df / jnp.where(df > 2, df - 2, 1.0)
        return jnp.where(df > 2, finite, jnp.where(df > 1, jnp.inf, jnp.nan))

    def components(self, *parameters: Array) -> tuple[Array, dist.Distribution]:
        df, loc, loc_variance, scale = (x[..., None] for x in parameters)
        x, log_weights = log_gamma_nodes(0.5 * parameters[0])
        noise = jnp.sqrt(loc_variance + jnp.square(scale) * jnp.exp(-x))
        return log_weights, dist.Normal(loc, noise)

    def sample(self, key: Array, sample_shape: tuple[int, ...] = ()) -> Array:
        keys, (df, loc, loc_variance, scale) = random.split(key), self._arrays()
        smooth = drawn(keys[0], sample_shape, loc, loc_variance)
        return smooth + scale * random.t(keys[1], df, smooth.shape, smooth.dtype)


class NoiseMixture(RealMixture):
    """Normal observations with a noise that is a function of a normal latent.

    It is a mixture over nodes of that latent. Densities use their own nodes, because an
    outlier has a noise level that nodes around the mean do not cover. A subclass
    defines the function.

    :param loc: mean of the function values.
    :param loc_variance: their variance, >= 0.
    :param latent: mean of the latent.
    :param latent_variance: its variance, >= 0.
    :param other: other parameters of the noise. All have the batch shape.
    """

    loc: Array = parameter(constraints.real)
    loc_variance: Array = parameter(constraints.nonnegative)
    latent: Array = parameter(constraints.real)
    latent_variance: Array = parameter(constraints.nonnegative)
    other: Array = parameter(constraints.real)

    def log_noise(self, latent: Array, other: Array) -> Array:
        """Return the logarithm of the variance of the noise."""
        raise NotImplementedError

    def components(self, *parameters: Array) -> tuple[Array, dist.Distribution]:
        loc, loc_variance, *latent, other = parameters
        nodes, log_weights = gaussian_nodes(*latent)
        noise = self.log_noise(nodes, other[..., None])
        return log_weights, normal_of_noise(loc, loc_variance, noise)

    def density(self, y: Array, *parameters: Array) -> Array:
        def given(
            f: Array, y: Array, loc: Array, loc_variance: Array, *rest: Array
        ) -> Array:
            noise = self.log_noise(f, rest[-1])[..., None]
            return normal_of_noise(loc, loc_variance, noise).log_prob(y[..., None])[
                ..., 0
            ]

        fixed = lax.stop_gradient((y, *parameters))
        nodes, log_weights = peaked_nodes(lambda f: given(f, *fixed), *parameters[2:4])
        each = (x[..., None] for x in (y, *parameters))
        return jax.nn.logsumexp(log_weights + given(nodes, *each), -1)

    def sample(self, key: Array, sample_shape: tuple[int, ...] = ()) -> Array:
        keys = random.split(key)
        loc, loc_variance, latent, latent_variance, other = self._arrays()
        f = drawn(keys[0], sample_shape, latent, latent_variance)
        noise = self.log_noise(f, other)[..., None]
        return normal_of_noise(loc, loc_variance, noise).sample(keys[1])[..., 0]
