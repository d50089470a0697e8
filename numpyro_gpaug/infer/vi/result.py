# SPDX-License-Identifier: Apache-2.0
"""The result of a run of :class:`~numpyro_gpaug.ConjugateSVI`."""

from __future__ import annotations

from typing import Any, Self

import numpy as np
from numpyro.infer.svi import SVIRunResult

from numpyro_gpaug._display import Displayed, Rows, brief, of_posterior
from numpyro_gpaug.infer.vi.quasi_newton import NOISY, Search, uncertainty
from numpyro_gpaug.infer.vi.resolution import LOST
from numpyro_gpaug.infer.vi.state import ConjugateState
from numpyro_gpaug.math.convergence import convergence
from numpyro_gpaug.model.arguments import Values
from numpyro_gpaug.model.closures import Version
from numpyro_gpaug.model.columns import Labels

# The part of the bound that noise may hide while a run still counts as converged.
HIDDEN = 0.01


class ConjugateResult(Displayed, SVIRunResult):
    """The result of :meth:`numpyro_gpaug.ConjugateSVI.run`: ``params``, ``state`` and
    ``losses``, as in NumPyro's ``SVIRunResult``, and the arguments of the fit.

    :param params: constrained params of model and guide.
    :param state: the state to continue from.
    :param losses: minus the bound after each step; with L-BFGS minus the highest bound
        so far, which ``params`` and ``state`` attain.
    :param args: the model's arguments.
    :param kwargs: its keyword arguments.
    :param restored: steps at which the run returned to an earlier state, because
        learning on minibatches had made the bound fall, each with the step of that
        state.
    :param stopped: whether the run ended early because the bound stopped rising.
    :param version: the version of everything the model read besides its arguments.
    :param whole: whether the arguments contain all rows of the fit, not one batch.
    :ivar labels: labels of the codes of arguments that were categories.
    """

    args: tuple[Any, ...]
    kwargs: dict[str, Any]
    restored: tuple[tuple[int, int], ...]
    stopped: bool
    version: Version | None = None
    whole: bool = True
    labels: Labels = {}
    __getattr__ = of_posterior("svi.posterior(result)")

    def __new__(
        cls,
        params: Values,
        state: ConjugateState,
        losses: np.ndarray,
        args: tuple[Any, ...] = (),
        kwargs: dict[str, Any] | None = None,
        restored: tuple[tuple[int, int], ...] = (),
        *,
        stopped: bool = False,
        version: Version | None = None,
        whole: bool = True,
    ) -> Self:
        result = super().__new__(cls, params, state, losses)
        result.args, result.kwargs = args, kwargs or {}
        result.restored, result.stopped = restored, stopped
        result.version, result.whole = version, whole
        return result

    def _display(self) -> tuple[str, Rows]:
        losses = np.asarray(self.losses)
        rows = [("steps", str(len(losses)))]
        if len(losses):
            rows.append(("bound", self._bound(losses)))
            rows.append(("verdict", self._verdict(losses)))
        if self.restored:
            rows.append(("restored", f"{len(self.restored)} times, as the bound fell"))
        rows += [(name, brief(value)) for name, value in self.params.items()]
        return "ConjugateResult", rows

    def _bound(self, losses: np.ndarray) -> str:
        known = isinstance(self.state, ConjugateState)
        if not known or not self.state.epochs:
            return f"{-losses[-1]:.6g}"
        found = convergence(losses)
        return f"{found.elbo:.6g}, on average over the last {found.window} minibatches"

    def _verdict(self, losses: np.ndarray) -> str:
        search, unknown = _search(self.state), 0.0
        if search is not None and uncertainty(search) > NOISY:
            unknown = uncertainty(search)
        if isinstance(self.state, ConjugateState) and float(self.state.lost) > LOST:
            unknown = max(unknown, float(self.state.lost))
        if unknown:
            return (
                "limited by rounding: bounds are uncertain by up to "
                f"{unknown:.2g} nats, and the best is kept (try float64)"
            )
        # A search with a first-order phase learns hundreds of values.
        one = "converged"
        if search is not None and search.ascent:
            one = (
                "converged to one of many local optima (compare held-out log_prob of "
                "several starts: a bound does not count what a network learns by heart)"
            )
        if self.stopped:
            return f"{one}: the bound stopped rising before the last step"
        found = convergence(losses)
        if not found.converged:
            return f"{found.verdict}: {found.suggestion}"
        # With minibatches, changes are noise, and the bound of a few steps says little.
        noise = f" (+- {found.error:.1g})" if found.error else ""
        moved = f"{found.change:.2g} nats over the last {found.window} steps"
        noisy = found.hidden > HIDDEN * abs(found.elbo)
        rest = "no rise beyond noise" if noisy else one
        return f"{rest}: {moved}{noise}"


def _search(state: Any) -> Search | None:
    """Return the state of L-BFGS, if it has learnt hyperparameters."""
    if not isinstance(state, ConjugateState):
        return None
    search = state.hyper.optim_state
    return search if isinstance(search, Search) else None
