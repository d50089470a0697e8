# SPDX-License-Identifier: Apache-2.0
"""Whether learning on minibatches has made the bound fall.

Steps on batches are not undone, and the losses of two batches are hard to compare. The
bound is therefore evaluated on fixed batches every 100 steps. Since a single outlier in
these rows could make it fall, the mean loss of the last 100 steps has to confirm the
decrease."""

from __future__ import annotations

import warnings
from collections.abc import Callable
from typing import NamedTuple

import numpy as np
from jax import Array

from numpyro_gpaug.infer.vi.loop import copied
from numpyro_gpaug.infer.vi.plan import CHUNK
from numpyro_gpaug.infer.vi.progress import Progress
from numpyro_gpaug.infer.vi.state import ConjugateState

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
