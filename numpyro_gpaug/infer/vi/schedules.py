# SPDX-License-Identifier: Apache-2.0
"""Step sizes of the natural-parameter updates on minibatches."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

from jax.typing import ArrayLike

# The range of the delay. Without a delay, the first step takes one batch for all data,
# from which likelihoods that are not log-concave do not recover. With a long delay, the
# posterior stays near its prior for most of a short run.
DELAYS = 20.0, 100.0

# Returns the size of a step, in (0, 1], given the number of steps before. A convex
# combination of natural parameters stays positive definite for any of them.
Schedule = Callable[[Any], ArrayLike]


@dataclass(frozen=True)
class RobbinsMonro:
    """``(delay + t)^-forgetting_rate``: the sum of steps diverges, the sum of their
    squares converges (Robbins and Monro, 1951; Hoffman et al., 2013, Stochastic
    variational inference).

    :param delay: at least 1; with 1 the first step is whole. A whole step treats one
        batch as all data. The default of :class:`~numpyro_gpaug.ConjugateSVI` is the
        number of batches in an epoch, at least 20 and at most 100.
    :param forgetting_rate: in (0.5, 1].
    :raises ValueError: for values outside these ranges.
    """

    delay: float = 1.0
    forgetting_rate: float = 0.6

    def __post_init__(self) -> None:
        if not (0.5 < self.forgetting_rate <= 1 and self.delay >= 1):
            raise ValueError(
                "RobbinsMonro needs delay >= 1 and forgetting_rate in (0.5, 1], got "
                f"{self.delay} and {self.forgetting_rate}"
            )

    def __call__(self, step: Any) -> Any:
        """Return the size of a step, given the number of steps before."""
        return (step + self.delay) ** -self.forgetting_rate


def check_step_size(step_size: float | Schedule | None) -> None:
    """Raise unless the argument is ``None``, a number in (0, 1], or a schedule.

    :raises ValueError: with the argument.
    """
    number = isinstance(step_size, int | float)
    if step_size is None or callable(step_size) or (number and 0 < step_size <= 1):
        return
    raise ValueError(
        "step_size must be None, a number in (0, 1] or a schedule such as "
        f"RobbinsMonro(), got {step_size!r}"
    )


def size_of_step(
    step_size: float | Schedule | None, batches: float, step: Any
) -> ArrayLike:
    """Return the size of a step.

    :param step_size: see :class:`~numpyro_gpaug.ConjugateSVI`.
    :param batches: number of batches in an epoch. It is 1 if only other latents are
        drawn at random.
    :param step: the number of steps before.
    """
    if step_size is None:
        least, most = DELAYS
        delay = min(max(batches, least), most) if batches > 1 else 1.0
        step_size = RobbinsMonro(delay)
    return step_size(step) if callable(step_size) else step_size
