# SPDX-License-Identifier: Apache-2.0
"""When a run stops: the bound has not risen by the tolerance for some steps, or on
minibatches, the mean loss has not changed by it from one epoch to the next."""

from __future__ import annotations

from typing import Any

import jax.numpy as jnp
import numpy as np
from jax import Array

from numpyro_gpaug.infer.vi import quasi_newton
from numpyro_gpaug.infer.vi.epochs import epoch_length
from numpyro_gpaug.infer.vi.latent_gaussian import Evaluation
from numpyro_gpaug.infer.vi.plan import CHUNK, Plan
from numpyro_gpaug.infer.vi.quasi_newton import Search
from numpyro_gpaug.infer.vi.state import ConjugateState
from numpyro_gpaug.infer.vi.sweeps import was_whole

# The increase of the bound in nats below which a search ends if no tol is given.
LEAST_RISE = 1e-3
# A step whose increase is below the tolerance has several points, and this sum of
# points ends a run with fixed hyperparameters. After a larger increase, one whole step
# ends the run if its increase is below this part of the previous one, because the
# increases shrink at least geometrically.
PATIENCE, POINTS, SHORT = 12, 4, 0.25
# An increase counts from this number of units in the last place of the bound on. If the
# tolerance is smaller, steps that still move marginals have only one point.
SHOWN = 2


class Stop:
    """The tolerance of a run.

    :param plan: the plan of the fit.
    :param tol: see :meth:`numpyro_gpaug.ConjugateSVI.run`.
    :ivar tol: the tolerance of single steps in nats; 0 if their bounds are noisy, and
        for a run that does not stop.
    """

    def __init__(self, plan: Plan, tol: float | None) -> None:
        if tol is None and plan.searches:
            tol = LEAST_RISE
        self._noisy_tol = tol if plan.noisy else None
        self.tol = np.asarray(0 if tol is None or plan.noisy else tol, plan.dtype)
        # Without minibatches, losses are noisy only if samples are drawn.
        batches = bool(plan.structure.subsampled)
        self._epoch = epoch_length(plan.structure) if batches else CHUNK

    def settled(self, losses: list[np.ndarray]) -> bool:
        """Whether the mean of noisy losses over the last whole epoch has changed by
        less than the tolerance.

        :param losses: losses of all steps.
        """
        taken, epoch = np.concatenate(losses), self._epoch
        if self._noisy_tol is None or len(taken) < 2 * epoch or len(taken) % CHUNK:
            return False
        last, before = taken[-epoch:].mean(), taken[-2 * epoch : -epoch].mean()
        return bool(abs(last - before) < self._noisy_tol)


def patience(plan: Plan, state: ConjugateState, tol: Any) -> Any:
    """Return the number of stalled steps, or of their points, that end a run.

    :param plan: the plan of the fit.
    :param state: the state after a step.
    :param tol: see :class:`Stop`.
    """
    if plan.searches:
        return quasi_newton.patience(state.hyper, tol)
    if plan.learns:
        return jnp.maximum(40 * plan.settings.every, state.step // 5)
    return PATIENCE


def counted(
    state: ConjugateState,
    new: ConjugateState,
    tol: Any,
    before: Any,
    after: Any,
    *,
    exact: bool,
) -> ConjugateState:
    """Return the state after a step, with its counters, and whether the bound has risen
    by ``tol``.

    :param state: the state before.
    :param new: the state after.
    :param tol: see :class:`Stop`.
    :param before: the evaluation before, if hyperparameters are fixed.
    :param after: the evaluation after, likewise.
    :param exact: whether a whole step, at fixed hyperparameters, leads to the optimum.
    """
    # Not ``mark + tol``, which may equal the mark if the bound is large.
    rose = new.bound - state.mark >= tol
    if isinstance(state.hyper.optim_state, Search):
        rose |= quasi_newton.begins(state.hyper)
    # A refused update gives no information: a part of it follows, or another one.
    rests = new.hyper is state.hyper
    tried: Any = jnp.int32(new.hyper.scale >= state.hyper.scale)
    if rests:
        # An increase within rounding does not count, but then marginals show more. They
        # also detect a step from one side of the maximum to the other.
        shown = SHOWN * jnp.finfo(new.bound.dtype).eps * jnp.abs(new.bound)
        moves = _moves(before, after, tol)
        unseen = moves & (SHORT * tol < shown)
        short = new.bound - state.bound < jnp.maximum(SHORT * tol, shown)
        whole = was_whole(state.step_sizes, new.step_sizes)
        ends = short & (state.stalled == 0) & whole & jnp.logical_not(moves)
        tried = jnp.where(ends, PATIENCE, jnp.where(unseen, 1, POINTS))
    stalled = jnp.where(rose, 0, state.stalled + tried)
    if rests and exact:
        stalled = jnp.where(whole, PATIENCE, stalled)
    mark = jnp.where(rose, new.bound, state.mark)
    return new._replace(mark=mark, stalled=stalled, step=state.step + 1)


def _moves(before: Any, after: Any, tol: Array) -> Any:
    """Whether a step has changed any marginal by ``tol`` nats, from evaluations; False
    if they do not keep numbers by row."""
    if not isinstance(after, Evaluation):
        return False

    def moves(old: Any, new: Any, slopes: Any) -> Array:
        # Rows with weight zero do not count.
        seen = (slopes.mean != 0) | (slopes.variance != 0)
        far = jnp.square(new.mean - old.mean) > 2 * tol * new.variance
        return (far & seen).any()

    at, slopes = after.marginals, after.slopes
    return jnp.stack([moves(before.marginals[k], at[k], slopes[k]) for k in at]).any()
