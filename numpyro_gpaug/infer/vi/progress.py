# SPDX-License-Identifier: Apache-2.0
"""The progress of a run: the length of its loops, its progress bar, Ctrl-C, and the
return to its best state.

Steps on batches are not undone, and the losses of two batches are hard to compare. The
bound is therefore evaluated on fixed batches every 100 steps. Since a single outlier in
these rows could make it fall, the mean loss of the last 100 steps has to confirm the
decrease."""

from __future__ import annotations

import math
import signal
import sys
import threading
import time
import warnings
from collections.abc import Callable
from types import FrameType
from typing import Any, NamedTuple, Self

import numpy as np
from jax import Array
from tqdm.auto import tqdm

from numpyro_gpaug.infer.vi.loop import copied
from numpyro_gpaug.infer.vi.plan import CHUNK
from numpyro_gpaug.infer.vi.state import ConjugateState
from numpyro_gpaug.math.processes import minimum_over_processes

# Up to this number of entries in the data, and of operations of a step, the first loop
# has its full length.
_SMALL = 10**6
# The time of a loop in seconds, and of the longest loop where longer loops have faster
# steps: results that all steps share, such as the projection of all data, are computed
# once per loop.
_SECONDS, _LONGEST = 1.0, 10.0
# The factor by which steps of longer loops must be faster, and the factor by which the
# next loop is longer.
_PAYS, _TIMES = 1.1, 8


# The script or notebook cell in which Ctrl-C ended a run early. Its next Ctrl-C is not
# for a run.
_ended_in: FrameType | None = None


class Pace:
    """The number of steps in the loops of a program.

    :param size: number of entries of the data, or of operations of a step.
    :ivar length: steps of the next loop.
    """

    def __init__(self, size: int) -> None:
        self.length = CHUNK if size <= _SMALL else 1
        # The length of the shortest loops so far, their steps per second, and whether
        # longer loops have faster steps (assumed until known).
        self._shortest, self._speed, self._pays = CHUNK, 0.0, True

    def took(self, steps: int, seconds: float) -> None:
        """Record a loop.

        :param steps: its number of steps.
        :param seconds: its duration, including compilation for the first loop.
        """
        speed = steps / max(seconds, 1e-9)
        if steps > self._shortest:
            self._pays = speed > _PAYS * self._speed
        else:
            best = self._speed if steps == self._shortest else 0.0
            self._shortest, self._speed = steps, max(speed, best)
        longer = min(_TIMES * steps, speed * _LONGEST) if self._pays else 0
        self.length = int(min(max(speed * _SECONDS, longer, 1), CHUNK))


class Progress:
    """Divide a run into compiled loops of about a second, or of up to ten if steps are
    then quicker. Between loops, progress is shown, callbacks are called, and the run
    can be interrupted. The division does not change results.

    The first Ctrl-C ends the run after the current loop; it raises
    ``KeyboardInterrupt`` if that was the last loop. A second one, in this run or a
    later run of the same script or notebook cell, raises at once.

    :param num_steps: steps of the run.
    :param pace: the pace of earlier runs of the same program.
    :param bar: whether to show a progress bar.
    :param several: whether processes share the data. Their loops then have the length
        of the slowest process, and end together if one is interrupted.
    :ivar taken: steps so far.
    :ivar at_rest: whether the last loop ended because the bound had converged.
    """

    def __init__(
        self, num_steps: int, pace: Pace, bar: bool, *, several: bool = False
    ) -> None:
        self._num_steps, self.taken, self.at_rest = num_steps, 0, False
        self._pace = pace
        self._several, self._all_end = several, False
        self._bar = tqdm(total=num_steps, desc="compiling") if bar else None
        self._since = time.perf_counter()
        self._interrupted = False
        self._handler: Any = None

    def __enter__(self) -> Self:
        ours = threading.current_thread() is threading.main_thread()
        if (
            ours
            and signal.getsignal(signal.SIGINT) is signal.default_int_handler
            and _ended_in is not _script()
        ):
            self._handler = signal.signal(signal.SIGINT, self._interrupt)
        return self

    def __exit__(self, *error: Any) -> None:
        if self._bar is not None:
            self._bar.close()
        if self._handler is not None:
            signal.signal(signal.SIGINT, self._handler)
        if not self._ends or error[0] is not None:
            return
        if self.is_whole:
            # Otherwise each short fit in a loop would swallow one interrupt.
            if self._interrupted:
                raise KeyboardInterrupt
        else:
            global _ended_in
            _ended_in = _script()
            warnings.warn(
                f"interrupted after {self.taken} of {self._num_steps} steps. This "
                "is the fit so far; continue with run(..., init_state=result.state)",
                stacklevel=4,
            )

    def _interrupt(self, number: int, frame: FrameType | None) -> None:
        if self._interrupted:
            raise KeyboardInterrupt
        self._interrupted = True

    @property
    def _ends(self) -> bool:
        return self._all_end if self._several else self._interrupted

    @property
    def is_whole(self) -> bool:
        """Whether the run has reached its end."""
        return self.at_rest or self.taken >= self._num_steps

    @property
    def over(self) -> bool:
        """Whether the run has ended by itself, or was interrupted."""
        return self._ends or self.is_whole

    def next(self) -> int:
        """Return the number of steps of the next loop: zero at the end, or after
        Ctrl-C."""
        # Minibatches are compared over whole loops, wherever time divides the run.
        left = min(self._num_steps - self.taken, CHUNK - self.taken % CHUNK)
        return 0 if self.over else min(self._pace.length, left)

    def took(self, losses: np.ndarray) -> None:
        """Record a loop that has ended.

        :param losses: losses of its steps; none if the last loop ended at its limit for
            another reason.
        """
        if len(losses) == 0:
            return
        now = time.perf_counter()
        first, self.taken = self.taken == 0, self.taken + len(losses)
        self._pace.took(len(losses), now - self._since)
        self._since = now
        if self._bar is not None:
            self._show(self._bar, losses, first=first)
        if self._several:
            here = self._pace.length, not self._interrupted
            self._pace.length, search_continues = minimum_over_processes(here)
            self._all_end = not search_continues

    def _show(self, bar: tqdm, losses: np.ndarray, *, first: bool) -> None:
        if first:  # the remaining time excludes compilation
            bar.set_description_str("", refresh=False)
            bar.reset(self._num_steps)
            bar.initial = bar.n = self.taken
        else:
            bar.update(len(losses))
        bar.set_postfix_str(f"loss {losses[-1]:.4f}", refresh=first)


def _script() -> FrameType:
    """Return the frame of the script, or of the notebook cell, that is running."""
    frame = sys._getframe()
    while frame.f_back is not None and frame.f_code.co_name != "<module>":
        frame = frame.f_back
    return frame


# The relative decrease that both the bound and the loss must show, and in how many
# consecutive windows.
_LEAST_FALL, _PATIENCE = 0.05, 2


class _Best(NamedTuple):
    step: int
    bound: float
    loss: float
    state: ConjugateState


class Guard:
    """Return to the state with the highest bound when the bound has fallen for 200
    steps, and continue at half the rate.

    :param evaluate: returns the bounds of a state on batches that are the same in every
        call; see :func:`~numpyro_gpaug.infer.vi.loop.bounds_of_batches`.
    :param num_steps: steps of the run. Fewer than 300 are not enough for a conclusion.
    """

    def __init__(
        self, evaluate: Callable[[ConjugateState], Array], num_steps: int
    ) -> None:
        self._evaluate = evaluate
        self._active = num_steps > _PATIENCE * CHUNK
        self._best: _Best | None = None
        self._worse = 0
        self.restored: tuple[tuple[int, int], ...] = ()

    def __call__(
        self, state: ConjugateState, progress: Progress, recent: np.ndarray
    ) -> ConjugateState:
        """Return the state to continue from, in most cases the given one.

        :param state: the state after a loop of steps.
        :param progress: the progress of the run.
        :param recent: losses of the last 100 steps.
        """
        last = progress.over
        if not self._active or (progress.taken % CHUNK and not last):
            return state
        bound, loss = float(self._evaluate(state).mean()), float(recent.mean())
        if self._best is None or bound >= self._best.bound:
            self._best = _Best(int(state.step), bound, loss, copied(state))
            self._worse = 0
            return state
        best = self._best
        least = _LEAST_FALL * abs(best.bound)
        fell = not (bound >= best.bound - least or loss <= best.loss + least)
        self._worse = self._worse + 1 if fell else 0
        if self._worse == 0 or (self._worse < _PATIENCE and not last):
            return state
        return self._restore(state, best, bound)

    def warn_of_failures(self, slower: float) -> None:
        """Warn if steps undid updates of hyperparameters. Each of these halves the
        rate.

        :param slower: the rate at the start of the run over the rate at its end.
        """
        if undone := round(math.log2(slower)) - len(self.restored):
            warnings.warn(
                f"{undone} updates of hyperparameters were undone, and each time the "
                "rate of optim was halved, because the bound or its gradient was not "
                "finite after them. Check whether the model can be evaluated there (a "
                "kernel matrix close to singular needs float64 or fewer inducing "
                "inputs), or lower the rate of optim",
                stacklevel=5,
            )

    def _restore(
        self, state: ConjugateState, best: _Best, bound: float
    ) -> ConjugateState:
        warnings.warn(
            "learning on minibatches made the bound fall: at step "
            f"{int(state.step)} it is {bound:.6g}, at step {best.step} it was "
            f"{best.bound:.6g}, on the same rows. The run returned to that step, "
            "and continues at half the rate of optim. If this happens again, lower "
            "the rate of optim, or raise hyper_every",
            stacklevel=5,
        )
        self.restored += ((int(state.step), best.step),)
        self._worse, again = 0, copied(best.state)
        hyper = again.hyper._replace(scale=state.hyper.scale / 2)
        return again._replace(hyper=hyper, step=state.step, epochs=state.epochs)
