# SPDX-License-Identifier: Apache-2.0
r"""Closed-form maximisers of the bound in parameters of likelihoods.

If the bound depends on a parameter as :math:`-n \log \theta - S \theta^{-p}` (noise
scales, rates), n is known and S follows from the derivative, so the maximiser is
:math:`\theta (1 + \theta g / n)^{1/p}` with g the derivative of the bound, exact or
augmented. In the heights of a piecewise link the bound is quadratic, or a sum of
``a log g + b log(1 - g)`` with known ``a + b``.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, NamedTuple

import jax.numpy as jnp
from jax import Array
from numpyro.distributions import Distribution

Parameters = dict[str, Array]


class MStep(NamedTuple):
    """A closed-form maximiser in one parameter of a likelihood.

    :param statistic: a function of ``(d, y, means, variances)`` that returns the part
        of the sufficient statistics that needs no derivative, per observation, with a
        trailing axis for a vector of parameters; it is summed over the data.
    :param maximiser: a function of ``(value, slope, statistic)`` that returns the new
        value; ``slope`` is the derivative of the bound with respect to the parameter.
    """

    statistic: Callable[[Any, Array, Parameters, Parameters], Array]
    maximiser: Callable[[Array, Array, Array], Array]


_REGISTRY: dict[tuple[type[Distribution], str], MStep] = {}


def register_m_step(cls: type[Distribution], parameter: str, step: MStep) -> None:
    """Register a closed-form maximiser.

    :param cls: the likelihood, with its subclasses.
    :param parameter: the name of its parameter.
    :param step: the maximiser.
    """
    _REGISTRY[cls, parameter] = step


def lookup_m_step(cls: type[Distribution], parameter: str) -> MStep | None:
    """Return the maximiser registered for a class or its nearest base, or ``None``."""
    found = (_REGISTRY.get((base, parameter)) for base in cls.__mro__)
    return next((step for step in found if step is not None), None)


def power_maximiser(p: int) -> Callable[[Array, Array, Array], Array]:
    """Return the maximiser of a bound ``-n log(value) - S value^-p``.

    :param p: the power.
    """

    def maximiser(value: Array, slope: Array, n: Array) -> Array:
        return value * (1 + value * slope / n) ** (1 / p)

    return maximiser


def count_data(d: Any, y: Array, means: Parameters, variances: Parameters) -> Array:
    """Return the statistic n: one per observation.

    :param d: the likelihood.
    :param y: observations.
    :param means: means of the latents.
    :param variances: their variances.
    """
    like = next(iter(means.values()))
    return jnp.ones(jnp.broadcast_shapes(jnp.shape(y), d.batch_shape), like.dtype)
