# SPDX-License-Identifier: Apache-2.0
"""A test of whether a trace of losses has converged."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, replace
from typing import Any

import numpy as np
from jax.typing import ArrayLike


@dataclass(frozen=True)
class Convergence:
    """The verdict on a trace of losses.

    :param verdict: ``"converged"``, ``"still improving"``, ``"getting worse"``, ``"not
        finite"`` or ``"too short"``.
    :param suggestion: what to do about it, a sentence.
    :param elbo: mean of the evidence lower bound over the last window, in nats.
    :param change: the difference to the mean over the window before, in nats.
    :param relative_change: ``change / max(1, |elbo|)``.
    :param error: standard error of ``change`` from the noise between steps, in nats:
        the noise of minibatches or of random draws, which is about zero on full data.
    :param window: steps in a window, a tenth of the trace.
    :param first_bad: the first step (from 0) whose loss is NaN or infinite, or
        ``None``.
    """

    verdict: str
    suggestion: str
    elbo: float
    change: float
    relative_change: float
    error: float
    window: int
    first_bad: int | None = None

    @property
    def hidden(self) -> float:
        """The largest change that noise between steps may hide, in nats: three standard
        errors."""
        return 3 * self.error

    @property
    def converged(self) -> bool:
        """Whether the bound has stopped changing."""
        return self.verdict == "converged"


def convergence(
    losses: ArrayLike,
    tol: float = 1e-3,
    *,
    step_sizes: ArrayLike | Callable[[int], Any] | None = None,
) -> Convergence:
    """Return whether a fit has converged, from its losses.

    The mean bound over the last tenth of the steps is compared with the mean over the
    tenth before. A change counts as one if it exceeds ``tol`` relative to the bound and
    three standard errors, which are estimated from differences of consecutive losses.
    It is a statement about the bound alone: hyperparameters may drift along directions
    in which it is flat, and a converged fit may be a bad one
    (:func:`~numpyro_gpaug.diagnostics.psis_khat`).

    A schedule that shrinks the steps also stops the bound, wherever it is. With
    ``step_sizes``, the trace is read once per length of the largest step. The
    comparison is then between losses that steps of that size would have reached.

    :param losses: (steps,), as in ``result.losses``; minus the bound, on full data or
        noisy.
    :param tol: relative change below which the bound counts as still.
    :param step_sizes: sizes of the steps, (steps,), or the optax schedule, if they
        vary.
    :return: a :class:`Convergence`; with ``step_sizes``, its windows are in steps of
        the largest size.
    :raises ValueError: for losses that are not a vector, or none, or step sizes that
        are not one nonnegative number each, or all zero.

    **Example**

    >>> import numpy as np
    >>> steps = np.arange(200)
    >>> convergence(100 + 50 * np.exp(-steps / 10)).verdict
    'converged'
    >>> convergence(100 + 50 * np.exp(-steps / 200)).verdict
    'still improving'
    >>> sizes = 0.95**steps
    >>> convergence(300 - sizes.cumsum()).verdict
    'converged'
    >>> convergence(300 - sizes.cumsum(), step_sizes=sizes).verdict
    'still improving'
    >>> convergence([3.0, 2.0, np.nan]).suggestion[:33]
    'losses[2] of 3 is nan: see the da'
    """
    trace = np.asarray(losses, float)
    if trace.ndim != 1 or trace.size == 0:
        raise ValueError(
            f"losses has shape {trace.shape}; expected one loss per step, (steps,)"
        )
    steps = trace.size
    window = max(1, steps // 10)
    finite = np.isfinite(trace)
    if not finite.all():
        first = int(finite.argmin())
        suggestion = (
            f"losses[{first}] of {steps} is {trace[first]}: see the data for NaN and "
            "duplicate rows, lower the step size of the optimiser, or compute in "
            "float64; params after that step are lost"
        )
        nothing = (float("nan"),) * 4
        return Convergence("not finite", suggestion, *nothing, window, first)
    if step_sizes is not None:
        trace = _by_distance(trace, step_sizes)
        steps, window = trace.size, max(1, trace.size // 10)
    last, before = trace[-window:], trace[-2 * window : -window]
    change = float(before.mean() - last.mean()) if steps > 1 else float("nan")
    # Differences remove a trend, and each contains the noise of two steps.
    noise = np.diff(trace[-2 * window :]).std() / np.sqrt(2) if steps > 2 else 0.0
    error = float(noise * np.sqrt(2 / window))
    elbo = -float(last.mean())
    relative = change / max(1.0, abs(elbo))
    found = Convergence("", "", elbo, change, relative, error, window)
    verdict, suggestion = _judged(found, steps, tol)
    return replace(found, verdict=verdict, suggestion=suggestion)


def _by_distance(
    trace: np.ndarray, step_sizes: ArrayLike | Callable[[int], Any]
) -> np.ndarray:
    """Return the losses at distances from the end that are multiples of the largest
    step."""
    given: Any = step_sizes
    if callable(given):
        given = [given(i) for i in range(trace.size)]
    sizes = np.asarray(given, float)
    if sizes.shape != trace.shape or not (sizes >= 0).all() or not sizes.any():
        raise ValueError(
            f"step_sizes must be {trace.size} numbers >= 0, one per loss and not all "
            f"zero; got shape {sizes.shape}"
        )
    back = np.cumsum(sizes[::-1]) / sizes.max()
    # Despite rounding, equal steps must all count.
    strides = np.arange(1, int(back[-1] + 1e-6) + 1) - 1e-6
    return trace[::-1][np.searchsorted(back, strides)][::-1]


def _judged(found: Convergence, steps: int, tol: float) -> tuple[str, str]:
    """Return the verdict on a finite trace, and what to do about it."""
    change, hidden, window = found.change, found.hidden, found.window
    if steps < 5:
        return "too short", f"run at least 5 steps, not {steps}"
    if abs(found.relative_change) <= tol or abs(change) <= hidden:
        if hidden <= tol * max(1.0, abs(found.elbo)):
            return "converged", (
                "none: the bound has stopped changing (if a schedule shrank the steps, "
                "pass step_sizes)"
            )
        return "converged", (
            f"changes below {hidden:.3g} nats would not show in the noise: "
            "compare the bound of all data at two late states, or take a smaller "
            "step size and larger batches"
        )
    if change > 0:
        return "still improving", (
            f"run more steps: the bound rose by {change:.3g} nats over the last "
            f"{window}"
        )
    return "getting worse", (
        f"lower the step size of the optimiser: the bound fell by {-change:.3g} nats "
        f"over the last {window} steps"
    )
