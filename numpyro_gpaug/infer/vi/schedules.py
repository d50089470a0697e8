# SPDX-License-Identifier: Apache-2.0
"""Step sizes of the natural-parameter updates."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any, NamedTuple, Protocol

import jax
import jax.numpy as jnp
from jax import Array

# The range of the delay. Without a delay, the first step takes one batch for all data,
# from which likelihoods that are not log-concave do not recover. With a long delay, the
# posterior stays near its prior for most of a short run.
DELAYS = 20.0, 100.0


class Schedule(Protocol):
    """A step size in (0, 1] per step; a convex combination of natural parameters stays
    positive definite for any of them."""

    def init(self, natural: Any) -> Any:
        """Return the schedule's state, from the initial natural parameters."""

    def next(self, state: Any, step: Array, direction: Any) -> tuple[Array, Any]:
        """Return the step size and the next state.

        :param state: the schedule's state.
        :param step: number of steps taken.
        :param direction: target minus current natural parameters, the noisy natural
            gradient.
        """


@dataclass(frozen=True)
class Constant:
    """The same step size at every step.

    :param value: in (0, 1].
    :raises ValueError: outside it.
    """

    value: float = 1.0

    def __post_init__(self) -> None:
        if not 0 < self.value <= 1:
            raise ValueError(f"step_size must be in (0, 1], got {self.value}")

    def init(self, natural: Any) -> Any:
        return ()

    def next(self, state: Any, step: Array, direction: Any) -> tuple[Array, Any]:
        dtype = jax.tree.leaves(direction)[0].dtype
        return jnp.asarray(self.value, dtype), state


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

    def init(self, natural: Any) -> Any:
        return ()

    def next(self, state: Any, step: Array, direction: Any) -> tuple[Array, Any]:
        dtype = jax.tree.leaves(direction)[0].dtype
        base = jnp.asarray(step, dtype) + jnp.asarray(self.delay, dtype)
        return base ** jnp.asarray(-self.forgetting_rate, dtype), state


class _Averages(NamedTuple):
    gradient: Any
    square: Array
    window: Array


@dataclass(frozen=True)
class Adaptive:
    """Step size from the signal-to-noise ratio of the natural gradient.

    The squared length of a moving average of the natural gradient over the moving
    average of its squared length, with a window that becomes short after large steps
    (Ranganath, Wang, Blei and Xing, 2013).

    :param window: initial window, in steps.
    """

    window: float = 10.0

    def init(self, natural: Any) -> _Averages:
        dtype = jax.tree.leaves(natural)[0].dtype
        zero = jax.tree.map(jnp.zeros_like, natural)
        return _Averages(zero, jnp.zeros((), dtype), jnp.asarray(self.window, dtype))

    def next(
        self, state: _Averages, step: Array, direction: Any
    ) -> tuple[Array, _Averages]:
        # The first gradient initialises the averages, with a whole step as from the
        # prior.
        rate = jnp.where(step == 0, jnp.ones_like(state.window), 1 / state.window)
        gradient = jax.tree.map(
            lambda old, new: (1 - rate) * old + rate * new, state.gradient, direction
        )
        square = (1 - rate) * state.square + rate * _square(direction)
        ratio = _square(gradient) / jnp.maximum(square, jnp.finfo(square.dtype).tiny)
        size = jnp.clip(ratio, 1e-4, 1)
        window = jnp.where(step == 0, state.window, state.window * (1 - size) + 1)
        return size, _Averages(gradient, square, jnp.maximum(window, 1))


def _square(tree: Any) -> Array:
    return jnp.sum(jnp.stack([jnp.sum(leaf**2) for leaf in jax.tree.leaves(tree)]))


def as_schedule(
    step_size: float | str | Schedule | None, batches: float | None
) -> Schedule:
    """Return the schedule that a ``step_size`` argument stands for.

    :param step_size: ``None`` (whole steps on full data, :class:`RobbinsMonro` on
        minibatches), a number, ``"adaptive"``, or a :class:`Schedule`.
    :param batches: number of batches in an epoch; ``None`` if steps are not noisy. It
        is 1 if only other latents are drawn at random.
    :raises ValueError: for anything else.
    """
    if step_size is None:
        if batches is None:
            return Constant(1.0)
        least, most = DELAYS
        return RobbinsMonro(min(max(batches, least), most) if batches > 1 else 1.0)
    if isinstance(step_size, int | float):
        return Constant(float(step_size))
    if batches is None and not isinstance(step_size, Constant):
        raise ValueError(
            f"step_size={step_size!r} is for minibatches. On full data a step is "
            "halved while the bound falls: pass a number in (0, 1] or None"
        )
    if step_size == "adaptive":
        return Adaptive()
    if hasattr(step_size, "init") and hasattr(step_size, "next"):
        return step_size
    raise ValueError(
        "step_size must be None, a number in (0, 1], 'adaptive' or a schedule with "
        f"init and next, got {step_size!r}"
    )
