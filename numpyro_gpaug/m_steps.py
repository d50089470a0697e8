# SPDX-License-Identifier: Apache-2.0
r"""Closed-form maximisers of the bound in parameters of likelihoods.

Where the bound depends on a parameter as :math:`-n \log \theta - S \theta^{-p}` (noise
scales, rates), n is known and S follows from the derivative, so the maximiser is
:math:`\theta (1 + \theta g / n)^{1/p}` with g the derivative of the bound, whichever of
the exact and the augmented bound it is. In the heights of a piecewise link the bound is
quadratic, or a sum of ``a log g + b log(1 - g)`` with known ``a + b``.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, NamedTuple

import jax.numpy as jnp
import numpyro.distributions as dist
from jax import Array
from numpyro.distributions import Distribution

from numpyro_gpaug.distributions.heteroscedastic_normal import HeteroscedasticNormal
from numpyro_gpaug.distributions.linked import PiecewiseBernoulli, PiecewiseNormal
from numpyro_gpaug.distributions.logistic_poisson import LogisticPoisson

Parameters = dict[str, Array]


class MStep(NamedTuple):
    """A closed-form maximiser in one parameter of a likelihood.

    :param statistic: ``(d, y, means, variances)`` to the part of the sufficient
        statistics that needs no derivative: per datum, with a trailing axis for a
        vector of parameters; it is summed over the data.
    :param maximiser: ``(value, slope, statistic)`` to the new value; ``slope`` is the
        derivative of the bound in the parameter.
    """

    statistic: Callable[[Any, Array, Parameters, Parameters], Array]
    maximiser: Callable[[Array, Array, Array], Array]


_REGISTRY: dict[tuple[type[Distribution], str], MStep] = {}


def register_m_step(cls: type[Distribution], parameter: str, step: MStep) -> None:
    """Registers a closed-form maximiser.

    :param cls: the likelihood, with its subclasses.
    :param parameter: the name of its parameter.
    :param step: the maximiser.
    """
    _REGISTRY[cls, parameter] = step


def lookup_m_step(cls: type[Distribution], parameter: str) -> MStep | None:
    """The maximiser registered for a class or its nearest base, or ``None``."""
    found = (_REGISTRY.get((base, parameter)) for base in cls.__mro__)
    return next((step for step in found if step is not None), None)


def _power(p: int) -> Callable[[Array, Array, Array], Array]:
    def maximiser(value: Array, slope: Array, n: Array) -> Array:
        return value * (1 + value * slope / n) ** (1 / p)

    return maximiser


def _ones(d: Any, y: Array, means: Parameters, variances: Parameters) -> Array:
    like = next(iter(means.values()))
    return jnp.ones(jnp.broadcast_shapes(jnp.shape(y), d.batch_shape), like.dtype)


def _cells(d: Any, y: Array, means: Parameters, variances: Parameters) -> Array:
    return d.cell_probabilities(means["f"], variances["f"])


def _cell_precisions(d: Any, y: Array, means: Parameters, variances: Parameters):
    p = _cells(d, y, means, variances)
    return p / jnp.square(jnp.asarray(d.scale, p.dtype))[..., None]


def _newton(value: Array, slope: Array, precision: Array) -> Array:
    reached = precision > jnp.finfo(precision.dtype).tiny
    return value + jnp.where(reached, slope / jnp.where(reached, precision, 1), 0)


def _bernoulli(value: Array, slope: Array, mass: Array) -> Array:
    # The slope of a log b + (n - a) log(1 - b) gives a / n. Away from 0 and 1, where
    # the log-likelihood of the other label is infinite.
    eps = jnp.finfo(mass.dtype).eps
    height = _newton(value, value * (1 - value) * slope, mass)
    return jnp.clip(height, eps, 1 - eps)


def _half(d: Any, y: Array, means: Parameters, variances: Parameters) -> Array:
    return -0.5 * _ones(d, y, means, variances)


def _counts(d: Any, y: Array, means: Parameters, variances: Parameters) -> Array:
    return -jnp.asarray(y, means["logits"].dtype)


register_m_step(dist.Normal, "scale", MStep(_ones, _power(2)))
register_m_step(dist.Laplace, "scale", MStep(_ones, _power(1)))
register_m_step(PiecewiseNormal, "scale", MStep(_ones, _power(2)))
register_m_step(LogisticPoisson, "max_rate", MStep(_counts, _power(-1)))
register_m_step(HeteroscedasticNormal, "max_precision", MStep(_half, _power(-1)))
register_m_step(PiecewiseNormal, "heights", MStep(_cell_precisions, _newton))
register_m_step(PiecewiseBernoulli, "heights", MStep(_cells, _bernoulli))
