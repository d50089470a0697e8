# SPDX-License-Identifier: Apache-2.0
"""What a run of :class:`~numpyro_gpaug.ConjugateSVI` returns."""

from __future__ import annotations

from typing import Any, Self

import numpy as np
from numpyro.infer.svi import SVIRunResult

from numpyro_gpaug._display import Displayed, Rows, brief
from numpyro_gpaug.infer.vi.state import ConjugateState


class ConjugateResult(Displayed, SVIRunResult):
    """What :meth:`numpyro_gpaug.ConjugateSVI.run` returns: ``params``, ``state`` and
    ``losses``, as NumPyro's ``SVIRunResult``, and the arguments of the fit.

    :param params: constrained params of model and guide.
    :param state: to continue from.
    :param losses: minus the bound, of the steps taken.
    :param args: the model's arguments.
    :param kwargs: its keyword arguments.
    :param restored: where learning on minibatches had made the bound fall, the steps at
        which the run went back, each with the step whose state it went back to.
    """

    args: tuple[Any, ...]
    kwargs: dict[str, Any]
    restored: tuple[tuple[int, int], ...]

    def __new__(
        cls,
        params: dict[str, Any],
        state: ConjugateState,
        losses: np.ndarray,
        args: tuple[Any, ...] = (),
        kwargs: dict[str, Any] | None = None,
        restored: tuple[tuple[int, int], ...] = (),
    ) -> Self:
        result = super().__new__(cls, params, state, losses)
        result.args, result.kwargs = args, kwargs or {}
        result.restored = restored
        return result

    def _display(self) -> tuple[str, Rows]:
        losses = np.asarray(self.losses)
        rows = [("steps", str(len(losses)))]
        if len(losses):
            rows.append(("bound", f"{-losses[-1]:.6g}"))
        if len(losses) > 1:
            n = max(1, len(losses) // 10)
            # Of minibatches a single loss says little.
            rise = losses[-2 * n : -n].mean() - losses[-n:].mean()
            rows.append(("rise", f"{rise:.2g} nats, of the last tenth of the steps"))
        if self.restored:
            rows.append(("restored", f"{len(self.restored)} times, as the bound fell"))
        rows += [(name, brief(value)) for name, value in self.params.items()]
        return "ConjugateResult", rows
