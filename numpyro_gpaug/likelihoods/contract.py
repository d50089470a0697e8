# SPDX-License-Identifier: Apache-2.0
"""The contract of a likelihood's module, and its registration in one call."""

from __future__ import annotations

from collections.abc import Callable

from jax import Array
from numpyro.distributions import Distribution

from .augmentation import Augmentation, Conditionals, Parameters, register_augmentation
from .expectations import register_expectation
from .maximisers import MStep, count_data, power_maximiser, register_m_step

__all__ = [
    "Augmentation", "Conditionals", "MStep", "Parameters", "moments", "power",
    "register",
]  # fmt: skip


def moments(
    latents: tuple[str, ...], means: Parameters, variances: Parameters
) -> tuple[Array, ...]:
    """Return mean and variance of the first latent, then of the next one."""
    return tuple(x[name] for name in latents for x in (means, variances))


def register(
    cls: type[Distribution],
    latents: tuple[str, ...],
    expected_log_prob: Callable[..., Array],
    predictive: Callable[..., Distribution],
    augmentation: Augmentation | None = None,
    *,
    log_concave: bool = False,
    competing: bool = False,
    **m_steps: MStep,
) -> None:
    """Register a likelihood: see :func:`register_expectation`.

    :param cls: the distribution of the observation.
    :param latents: its parameters that depend on latents.
    :param expected_log_prob: the expected log-density.
    :param predictive: the predictive distribution.
    :param augmentation: an augmentation for :func:`register_augmentation`, if any.
    :param log_concave: whether it is log-concave in its latents.
    :param competing: whether it is a softmax of its last axis.
    :param m_steps: maximisers for :func:`register_m_step`, by parameter.
    """
    register_expectation(
        cls, latents, expected_log_prob, predictive, log_concave=log_concave,
        competing=competing,
    )  # fmt: skip
    if augmentation is not None:
        register_augmentation(cls, augmentation)
    for parameter, step in m_steps.items():
        register_m_step(cls, parameter, step)


def power(p: int, statistic: Callable[..., Array] = count_data) -> MStep:
    """Describe a parameter that enters the log-likelihood as a power: see
    :func:`power_maximiser`.

    :param p: the power.
    :param statistic: by default the number of data.
    """
    return MStep(statistic, power_maximiser(p))
