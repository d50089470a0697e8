# SPDX-License-Identifier: Apache-2.0
"""Expectations of likelihoods with a piecewise-constant link: sums over cells."""

from __future__ import annotations

import jax.numpy as jnp
import numpyro.distributions as dist
from jax import Array

from numpyro_gpaug.distributions.linked import (
    Linked,
    PiecewiseBernoulli,
    PiecewiseHeteroscedasticNormal,
    PiecewiseNormal,
)
from numpyro_gpaug.distributions.mixtures import NodeMixture

from .contract import MStep, Parameters, power, register


def _expected(d: Linked, y, m: Array, v: Array) -> Array:
    components = d.components(jnp.broadcast_shapes(d.batch_shape, jnp.shape(y)))
    return d.expectation(components.log_prob(jnp.asarray(y)[..., None]), m, v)


def _mixture(d: Linked, component: dist.Distribution, m: Array, v: Array):
    """Return the mixture over cells with its exact moments."""
    p = d.cell_probabilities(m, v)
    mean = (p * component.mean).sum(-1)
    # A sum of squares, not a difference of moments.
    spread = jnp.square(component.mean - mean[..., None])
    variance = (p * (component.variance + spread)).sum(-1)
    return NodeMixture(d.log_cell_probabilities(m, v), component, mean, variance)


def _predictive(d: Linked, m: Array, v: Array) -> NodeMixture:
    return _mixture(d, d.components(), m, v)


def _bernoulli_predictive(d, m: Array, v: Array) -> dist.Distribution:
    return dist.Bernoulli(probs=d.links()[0].expected_value(m, v))


def _expected_normal(d, y, m: Array, v: Array, heights: Array, spread: Array) -> Array:
    scale = jnp.broadcast_to(jnp.asarray(d.scale, m.dtype), d.batch_shape)[..., None]
    log_density = dist.Normal(heights, scale).log_prob(jnp.asarray(y)[..., None])
    return d.expectation(log_density - 0.5 * spread / jnp.square(scale), m, v)


def _normal_predictive(d, m: Array, v: Array, heights: Array, spread: Array):
    scale = jnp.broadcast_to(jnp.asarray(d.scale, heights.dtype), d.batch_shape)
    noise = jnp.sqrt(jnp.square(scale)[..., None] + spread)
    return _mixture(d, _normals(d, heights, noise), m, v)


def _expected_heteroscedastic(d, y, loc: Array, spread: Array, m: Array, v: Array):
    components = dist.Normal(loc[..., None], jnp.sqrt(d.heights))
    log_density = components.log_prob(jnp.asarray(y)[..., None])
    return d.expectation(log_density - 0.5 * spread[..., None] / d.heights, m, v)


def _heteroscedastic_predictive(d, loc: Array, spread: Array, m: Array, v: Array):
    noise = jnp.sqrt(spread[..., None] + d.heights)
    return _mixture(d, _normals(d, loc[..., None], noise), m, v)


def _normals(d: Linked, loc: Array, scale: Array) -> dist.Normal:
    """Return one normal for every observation and cell."""
    shape = (*d.batch_shape, d.heights.shape[-1])
    return dist.Normal(jnp.broadcast_to(loc, shape), jnp.broadcast_to(scale, shape))


def _cells(d, y: Array, means: Parameters, variances: Parameters) -> Array:
    return d.cell_probabilities(means["f"], variances["f"])


def _cell_precisions(d, y: Array, means: Parameters, variances: Parameters):
    p = _cells(d, y, means, variances)
    return p / jnp.square(jnp.asarray(d.scale, p.dtype))[..., None]


def _newton(value: Array, slope: Array, precision: Array) -> Array:
    reached = precision > jnp.finfo(precision.dtype).tiny
    return value + jnp.where(reached, slope / jnp.where(reached, precision, 1), 0)


def _bernoulli(value: Array, slope: Array, mass: Array) -> Array:
    # The derivative of a log b + (n - a) log(1 - b) gives a / n, kept away from 0 and
    # 1, where the log-likelihood of the other label is infinite.
    eps = jnp.finfo(mass.dtype).eps
    height = _newton(value, value * (1 - value) * slope, mass)
    return jnp.clip(height, eps, 1 - eps)


register(Linked, ("f",), _expected, _predictive)
register(
    PiecewiseBernoulli, ("f",), _expected, _bernoulli_predictive,
    m_steps={"heights": MStep(_cells, _bernoulli)},
)  # fmt: skip
register(
    PiecewiseNormal, ("f", "heights"), _expected_normal, _normal_predictive,
    m_steps={"scale": power(2), "heights": MStep(_cell_precisions, _newton)},
)  # fmt: skip
register(
    PiecewiseHeteroscedasticNormal, ("loc", "f"), _expected_heteroscedastic,
    _heteroscedastic_predictive,
)  # fmt: skip
