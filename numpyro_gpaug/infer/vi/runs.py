# SPDX-License-Identifier: Apache-2.0
"""The start of a run, and the data of its steps."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import jax.numpy as jnp
import numpy as np
from jax import Array
from jax.sharding import Mesh

from numpyro_gpaug._numpyro import one_thread
from numpyro_gpaug.guides import ConjugateGuide
from numpyro_gpaug.infer.vi import quasi_newton
from numpyro_gpaug.infer.vi.checkpoints import check_state
from numpyro_gpaug.infer.vi.checks import (
    check_basis,
    check_fit,
    check_gaussian,
    check_latents,
)
from numpyro_gpaug.infer.vi.feeds import (
    Feed,
    Given,
    InMemory,
    Minibatches,
    Reader,
)
from numpyro_gpaug.infer.vi.loop import copied
from numpyro_gpaug.infer.vi.passes import Passes
from numpyro_gpaug.infer.vi.plan import LBFGS, Plan, Settings
from numpyro_gpaug.infer.vi.programs import Programs
from numpyro_gpaug.infer.vi.quasi_newton import Search
from numpyro_gpaug.infer.vi.state import ConjugateState, unknown_bound
from numpyro_gpaug.model.arguments import Arguments
from numpyro_gpaug.model.joint_reading import IN_DENSITY
from numpyro_gpaug.model.padding import Padding
from numpyro_gpaug.model.structure import Structure
from numpyro_gpaug.model.validation import check_arguments


class Runs:
    """The runs of one :class:`~numpyro_gpaug.ConjugateSVI`.

    :param model: the model.
    :param guide: its guide.
    :param settings: options of the fit.
    :param programs: what is compiled for it.
    :param mesh: where rows are to be shared out.
    """

    def __init__(
        self,
        model: Callable[..., Any],
        guide: ConjugateGuide,
        settings: Settings,
        programs: Programs,
        mesh: Mesh | None,
    ) -> None:
        self._model, self._guide, self._settings = model, guide, settings
        self._programs, self._mesh = programs, mesh
        self.padding = Padding(model)

    @one_thread
    def begin(
        self,
        key: Array,
        state: ConjugateState | None,
        init_params: dict[str, Any] | None,
        given: Given,
        num_steps: int,
    ) -> tuple[Any, Plan, Feed]:
        """Return the state that a run starts from, its plan, and the data of its steps.

        :param key: random key.
        :param state: to continue from, if it does.
        :param init_params: constrained values to start from, by param name.
        :param given: the arguments of the run.
        :param num_steps: of it.
        """
        first, arguments = self._padded(given, begins=state is None)

        def started(init_params: dict[str, Any] | None) -> ConjugateState:
            state = self._programs.start(
                arguments, first, key, init_params, given.batch
            )
            return quasi_newton.within(state, num_steps)

        fresh = state is None
        if state is None:
            state = started(init_params)
        else:
            check_state(state, "init_state")
            check_basis(state, self._guide.structure)
            state = _unmarked(copied(state))
        plan = self._programs.plan_at(arguments, state, given.batch)
        _check_plates(plan, state)
        check_latents(plan.structure, arguments.mesh)
        feed = self._feed(given, arguments, plan, first.data)
        searches = self._settings.optim == LBFGS and not init_params
        opposite = _opposite(plan.structure, state.hyper.values)
        if opposite and fresh and searches and given.batches is None:
            limit = np.zeros((), plan.dtype)
            both = state, started(opposite)
            ends = [feed.steps(copied(each), 1, limit) for each in both]
            losses = [float(end.losses[-1]) for end in ends]
            state = both[losses[1] < losses[0]]
        return state, plan, feed

    def _padded(self, given: Given, *, begins: bool) -> tuple[Arguments, Arguments]:
        """Check the arguments of a run. Return them, and the arguments to compile for,
        which may have added rows of weight zero.

        :param given: the arguments of the run.
        :param begins: whether it begins with them, from no state.
        """
        check_arguments(self._model, given.args, given.kwargs)
        first = Arguments.split(given.args, given.kwargs)
        noisy = self._guide.random_others or bool(self._settings.m_step)
        fills = given.batches is None and not noisy
        more = self.padding(first, self._mesh) if fills else first
        if more is not first:
            # Checks compile programs, too: for the padded size.
            padded = more.counting_all()
            args, kwargs = padded.merge()
            filled = given._replace(args=args, kwargs=kwargs)
            try:
                self.check(filled, begins=begins, arguments=padded)
            except (TypeError, ValueError):
                # A message about the arguments themselves has the right numbers.
                more = first
        if more is first:
            more = self.check(given, begins=begins, arguments=first)
        return first, more.on(self._mesh)

    def check(
        self, given: Given, *, begins: bool, arguments: Arguments | None = None
    ) -> Arguments:
        """Raise for arguments that cannot be fitted.

        :param given: the arguments of a run.
        :param begins: whether it begins with them, from no state.
        :param arguments: the arguments split, if they have been checked one by one.
        :return: the arguments, on the device.
        """
        found = check_fit(
            self._model, self._guide, self._settings.updates, given.args, given.kwargs,
            begins=begins and given.batch is None, arguments=arguments,
        )  # fmt: skip
        check_gaussian(self._guide.structure)
        if self._programs.keep_up():
            self.padding.clear()
        return found

    def _feed(
        self,
        given: Given,
        arguments: Arguments,
        plan: Plan,
        data: np.uint32,
    ) -> Feed:
        """Return the data of steps.

        :param given: the arguments of the run.
        :param arguments: those of a step.
        :param plan: of the run.
        :param data: fingerprint of its arguments, without added rows.
        """
        if given.batches is None:
            return InMemory(self._programs, plan, arguments, data)
        reader = Reader(given, self._model, plan.structure, self._mesh)
        if given.batch is None:
            return Passes(self._programs, plan, self._settings, reader, data)
        return Minibatches(self._programs, plan, reader, data)


def _check_plates(plan: Plan, state: ConjugateState) -> None:
    subsampled = set(plan.structure.subsampled) - set(plan.passed)
    if subsampled != set(state.epochs):
        raise ValueError(
            f"the state was made for subsampled plates {sorted(state.epochs)}, but "
            f"the arguments subsample {sorted(subsampled)}: start a new run"
        )


def _unmarked(state: ConjugateState) -> ConjugateState:
    hyper = state.hyper
    if isinstance(search := hyper.optim_state, Search):
        # One that is at its end tries once more.
        going = search._replace(exhausted=jnp.zeros_like(search.exhausted))
        hyper = hyper._replace(optim_state=going)
    return state._replace(
        hyper=hyper,
        mark=jnp.full_like(state.mark, unknown_bound(state.mark.dtype)),
        stalled=jnp.zeros_like(state.stalled),
    )


def _opposite(structure: Structure, values: dict[str, Any]) -> dict[str, Array]:
    """Return starts of the other sign, by param, for sites that multiply others. A
    search does not get from one sign to the other, because at zero nothing depends on
    the others."""
    held = getattr(structure, "held", ())
    names = [f"{site}_auto_loc" for site, why in held if why.startswith(IN_DENSITY)]
    return {k: -values[k] for k in names if k in values}
