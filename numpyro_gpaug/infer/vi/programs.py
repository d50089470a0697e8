# SPDX-License-Identifier: Apache-2.0
"""The compiled functions of a fit, and its plans by the shapes of arguments."""

from __future__ import annotations

from collections.abc import Callable
from functools import partial
from typing import Any

from jax import Array

from numpyro_gpaug.guides import ConjugateGuide
from numpyro_gpaug.infer.vi.closed_params import closed_params
from numpyro_gpaug.infer.vi.loop import (
    bounds_of_batches,
    copied,
    evaluate,
    run_batches,
    run_chunk,
)
from numpyro_gpaug.infer.vi.passes import add_block, add_gradient
from numpyro_gpaug.infer.vi.plan import (
    Batch,
    Plan,
    Settings,
    constrained,
    transforms_of,
)
from numpyro_gpaug.infer.vi.progress import Pace
from numpyro_gpaug.infer.vi.start import check_start, initial_state, read_params
from numpyro_gpaug.infer.vi.state import ConjugateState
from numpyro_gpaug.math.compiling import jit
from numpyro_gpaug.math.sharding import on_mesh
from numpyro_gpaug.model.arguments import Arguments
from numpyro_gpaug.model.calls import check_given
from numpyro_gpaug.model.inspect import structure_at
from numpyro_gpaug.model.structure import MAX_SHAPES, remembered


class Programs:
    """The compiled functions of one :class:`~numpyro_gpaug.ConjugateSVI`, and its plans
    by the shapes of arguments.

    :param model: the model.
    :param guide: its guide.
    :param settings: options of the fit.
    """

    def __init__(
        self, model: Callable[..., Any], guide: ConjugateGuide, settings: Settings
    ) -> None:
        self._model, self._guide, self._settings = model, guide, settings
        self._generation = guide.generation
        self.plans: dict[Any, Plan] = {}
        self._paces: dict[tuple[Plan, int], Pace] = {}
        self.begin = jit(
            partial(initial_state, settings, model, guide),
            static_argnames=("static", "batch"),
        )
        # The state is donated: with many latents a second copy would not fit. Callers
        # pass in none that a user holds.
        self.advance, self.advance_batches = (
            jit(
                partial(fn, settings), static_argnames=("plan", "static"),
                donate_argnames="state",
            )
            for fn in (run_chunk, run_batches)
        )  # fmt: skip
        self.read = jit(partial(read_params, guide))
        self.loss, self.bounds, self.sums, self.slopes = (
            jit(partial(fn, settings), static_argnames=("plan", "static"))
            for fn in (evaluate, bounds_of_batches, add_block, add_gradient)
        )

    def start(
        self,
        arguments: Arguments,
        given: Arguments,
        key: Array,
        init_params: dict[str, Any] | None,
        batch: Batch | None,
    ) -> ConjugateState:
        """Return the initial state, checked.

        :param arguments: the model's arguments, possibly with added rows.
        :param given: the arguments without added rows.
        :param key: random key.
        :param init_params: constrained values to start from, by param name.
        :param batch: the numbers of rows, if the arguments are a batch.
        """
        # Copied: the steps overwrite the state, and with it what it is made of.
        values = copied(init_params or {})
        if values:
            check_given(values, self._declared(given, key), self._guide.structure)
        with on_mesh(arguments.mesh):
            state, params, seen, valid = self.begin(
                arguments.arrays, key, values, self._guide.initial_natural(values),
                static=arguments.static, batch=batch,
            )  # fmt: skip
        if seen is not None:
            seen.check()
        check_start(self._model, self._guide, given, params, valid, values)
        self.plan(arguments, lambda: params)
        return state

    def _declared(self, arguments: Arguments, key: Array) -> dict[str, Any]:
        """Return the shapes of the params that model and guide declare."""
        natural = self._guide.initial_natural({})
        begun = self.begin.plain.eval_shape(
            arguments.arrays, key, {}, natural, static=arguments.static, batch=None
        )
        return begun[1]

    def plan_at(
        self, arguments: Arguments, state: ConjugateState, batch: Batch | None = None
    ) -> Plan:
        """Return the plan at a state.

        :param arguments: the model's arguments.
        :param state: the state.
        :param batch: the numbers of rows, if the arguments are a batch.
        """
        values = state.hyper.values
        plan = self.plan(arguments, lambda: constrained(self._guide, values))
        if batch is None:
            return plan
        key = arguments.shapes, batch
        return remembered(self.plans, key, lambda: plan.of_batches(batch))

    def plan(self, arguments: Arguments, params: Callable[[], dict[str, Any]]) -> Plan:
        """Return the plan for arguments of these shapes; the model is traced once for
        each.

        :param arguments: the model's arguments.
        :param params: returns constrained params, for verifications that need numbers.
        """
        guide, model = self._guide, self._model

        def made() -> Plan:
            if model is guide.model:
                structure = guide.structure_at(arguments)
            else:  # a wrapper of the guide's model, or another one: refused there
                structure = structure_at(model, guide.structure, arguments)
            names, transforms = self._settings.m_step, transforms_of(guide)
            parts = names, model, guide, structure, arguments
            closed = closed_params(*parts, params(), transforms) if names else ()
            return Plan(model, guide, structure, transforms, closed)

        if len(self.plans) >= MAX_SHAPES and arguments.shapes not in self.plans:
            # JAX would keep what it compiled for every one of them.
            self._clear()
        return remembered(self.plans, arguments.shapes, made)

    def keep_up(self) -> bool:
        """Discard programs that were compiled before the last set-up of the guide.

        :return: whether the guide has been set up since the last call.
        """
        anew = self._generation != self._guide.generation
        if anew:
            self._generation = self._guide.generation
            self._clear()
        return anew

    def _clear(self) -> None:
        self.plans.clear()
        self._paces.clear()
        programs: tuple[Any, ...] = self.begin, self.advance, self.loss, self.read
        programs += self.bounds, self.advance_batches, self.sums, self.slopes
        for program in programs:
            program.clear_cache()

    def pace(self, plan: Plan, size: int) -> Pace:
        """Return the known speed of steps.

        :param plan: the plan of the fit.
        :param size: number of entries of its data.
        """
        return remembered(self._paces, (plan, size), lambda: Pace(size))
