# SPDX-License-Identifier: Apache-2.0
"""The compiled functions of a fit, its plans by the shapes of arguments, and the start
of its runs."""

from __future__ import annotations

from collections.abc import Callable
from functools import partial
from operator import attrgetter
from typing import Any

import numpy as np
from jax import Array
from jax.sharding import Mesh

from numpyro_gpaug._numpyro import one_thread
from numpyro_gpaug.guides import ConjugateGuide
from numpyro_gpaug.infer.vi import quasi_newton
from numpyro_gpaug.infer.vi.checks import (
    check_basis,
    check_batches,
    check_fit,
    check_gaussian,
    check_latents,
    check_plates,
)
from numpyro_gpaug.infer.vi.closed_params import closed_params
from numpyro_gpaug.infer.vi.feeds import (
    Feed,
    InMemory,
    Minibatches,
    Reader,
    RunArguments,
)
from numpyro_gpaug.infer.vi.loop import (
    bound_ahead,
    bounds_of_batches,
    copied,
    evaluate,
    run_batches,
    run_chunk,
)
from numpyro_gpaug.infer.vi.many import Fit, fit_lanes, found, lanes
from numpyro_gpaug.infer.vi.passes import Passes, add_block, add_gradient
from numpyro_gpaug.infer.vi.plan import (
    Batch,
    Plan,
    Settings,
    constrained,
    is_optax,
    transforms_of,
)
from numpyro_gpaug.infer.vi.progress import Pace
from numpyro_gpaug.infer.vi.start import (
    check_start,
    initial_state,
    opposite_start,
    read_params,
    unmarked,
)
from numpyro_gpaug.infer.vi.state import ConjugateState, check_state
from numpyro_gpaug.math.arrays import in_blocks
from numpyro_gpaug.math.compiling import (
    SMALL,
    SMALL_OF_SEARCHES,
    SMALL_OF_STARTS,
    jit,
    jit_for_few_runs,
)
from numpyro_gpaug.math.sharding import ROWS, on_mesh
from numpyro_gpaug.math.threads import threads_for
from numpyro_gpaug.model.arguments import Arguments, Model, Values
from numpyro_gpaug.model.calls import check_given
from numpyro_gpaug.model.inspect import structure_at
from numpyro_gpaug.model.padding import Padding
from numpyro_gpaug.model.responses import Responses
from numpyro_gpaug.model.structure import MAX_SHAPES, from_cache
from numpyro_gpaug.model.validation import check_arguments
from numpyro_gpaug.predict.many import SMALL as SMALL_IN_LANES
from numpyro_gpaug.predict.many import Posteriors
from numpyro_gpaug.predict.predictor import predictor_for

# Responses that are tried, to find one that can be fitted.
_TRIED = 20


class Programs:
    """The compiled functions of one :class:`~numpyro_gpaug.ConjugateSVI`, and its plans
    by the shapes of arguments.

    :param model: the model.
    :param guide: its guide.
    :param settings: options of the fit.
    :param mesh: the mesh over which rows are sharded.
    :ivar padding: adds rows, so that runs share programs.
    """

    def __init__(
        self, model: Model, guide: ConjugateGuide, settings: Settings, mesh: Mesh | None
    ) -> None:
        self._model, self._guide, self._settings = model, guide, settings
        self._mesh, self.padding = mesh, Padding(model)
        self._generation = guide.generation
        self.plans: dict[Any, Plan] = {}
        self._paces: dict[tuple[Plan, int], Pace] = {}
        self.begin = jit(
            partial(initial_state, settings, model, guide), small=SMALL_OF_STARTS,
            static_argnames="batch",
        )  # fmt: skip
        # Each is a function of its own, because all programs of one function share a
        # cache. The state is donated, because with many latents a second copy would not
        # fit into memory. Callers never pass in a state that a user holds.
        steps = partial(
            jit, held="plan", work=attrgetter("work"),
            static_argnames="plan", donate_argnames="state",
        )  # fmt: skip
        small = SMALL if is_optax(settings.optim) else SMALL_OF_SEARCHES
        self.advance = steps(run_chunk, small=small)
        self.advance_batches = steps(run_batches)
        self.read = jit_for_few_runs(partial(read_params, guide))
        static = "plan", "predictor", "static", "which", "mesh"
        self.lanes = jit(
            partial(fit_lanes), small=SMALL_IN_LANES, static_argnames=static
        )
        whole = evaluate, bound_ahead, bounds_of_batches, add_block, add_gradient
        self.loss, self.ahead, self.bounds, self.sums, self.slopes = (
            jit(partial(fn), static_argnames="plan") for fn in whole
        )

    @one_thread
    def begin_run(
        self,
        key: Array,
        state: ConjugateState | None,
        init_params: Values | None,
        given: RunArguments,
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

        def started(init_params: Values | None) -> ConjugateState:
            state = self.start(arguments, first, key, init_params, given.batch)
            return quasi_newton.within(state, num_steps)

        fresh = state is None
        if state is None:
            state = started(init_params)
        else:
            check_state(state, "init_state")
            check_basis(state, self._guide.structure)
            state = unmarked(copied(state))
        plan = self.plan_at(arguments, state, given.batch)
        check_plates(plan.structure, plan.passed, state)
        check_latents(plan.structure, arguments.mesh)
        feed: Feed = InMemory(self, plan, arguments, first.data)
        if given.batches is not None:
            reader = Reader(given, self._model, plan.structure, self._mesh)
            if given.batch is None:
                feed = Passes(self, plan, reader, first.data)
            else:
                feed = Minibatches(self, plan, reader, first.data)
        opposite = opposite_start(plan, state.hyper.values)
        if opposite and fresh and not init_params and given.batches is None:
            limit = np.zeros((), plan.dtype)

            def loss(state: ConjugateState) -> float:
                return float(feed.steps(copied(state), 1, limit).losses[-1])

            state = min(state, started(opposite), key=loss)
        return state, plan, feed

    def _padded(
        self, given: RunArguments, *, begins: bool
    ) -> tuple[Arguments, Arguments]:
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
            # Checks also compile programs, so they use the padded size.
            padded = more.counting_all()
            args, kwargs = padded.merge()
            filled = given._replace(args=args, kwargs=kwargs)
            try:
                self.check(filled, begins=begins, arguments=padded)
                return first, more.on(self._mesh)
            except (TypeError, ValueError):
                # The error of the arguments without added rows has the right sizes.
                pass
        checked = self.check(given, begins=begins, arguments=first)
        return first, checked.on(self._mesh)

    def check(
        self, given: RunArguments, *, begins: bool, arguments: Arguments | None = None
    ) -> Arguments:
        """Set up the guide, and raise for arguments that cannot be fitted.

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
        check_batches(self._model, self._guide.structure_at(found), given, found)
        self.keep_up()
        return found

    def start(
        self,
        arguments: Arguments,
        given: Arguments,
        key: Array,
        init_params: Values | None,
        batch: Batch | None,
    ) -> ConjugateState:
        """Return the initial state, checked.

        :param arguments: the model's arguments, possibly with added rows.
        :param given: the arguments without added rows.
        :param key: random key.
        :param init_params: constrained values to start from, by param name.
        :param batch: the numbers of rows, if the arguments are a batch.
        """
        # Copied, because the steps overwrite the state and the arrays it is made of.
        values = copied(init_params or {})
        if values:
            declared = self.begin.plain.eval_shape(given, key, {}, batch=None)[1]
            check_given(values, declared, self._guide.structure)
        with on_mesh(arguments.mesh):
            state, params, seen, valid = self.begin(arguments, key, values, batch=batch)
        if seen is not None:
            seen.check()
        check_start(self._model, self._guide, given, params, valid, values)
        self.plan(arguments, lambda: params)
        return state

    def fit_each(
        self,
        key: Array,
        num_steps: int,
        tol: float,
        responses: Responses,
        took: Callable[[int], Any],
    ) -> Posteriors:
        """Fit the model to many responses; see
        :meth:`~numpyro_gpaug.ConjugateSVI.run_many`.

        :param responses: the model's arguments.
        :param took: called with the number of responses after each block.
        """
        plan, arguments = self._plan_of_each(key, responses)
        devices = 1 if self._mesh is None else self._mesh.shape[ROWS]
        size = devices * lanes(plan, arguments, responses.number)
        predictor = predictor_for(self._guide, self._model, plan.structure)
        options = {
            "plan": plan, "predictor": predictor, "static": arguments.static,
            "which": responses.which, "mesh": self._mesh,
        }  # fmt: skip
        steps, rise = np.int32(num_steps), np.asarray(tol, plan.dtype)

        @one_thread
        def fitted(places: np.ndarray) -> Fit:
            arrays = responses.arrays(places)
            return self.lanes(arrays, key, steps, rise, **options)

        with threads_for(plan.structure.largest):
            fits: Fit = in_blocks(fitted, responses.number, size, took)
        return Posteriors(
            predictor, plan.structure, found(fits, num_steps, size), responses
        )

    @one_thread
    def _plan_of_each(self, key: Array, responses: Responses) -> tuple[Plan, Arguments]:
        """Return the plan of fits to many responses, and the arguments of one of them
        that can be fitted.

        :param key: random key.
        :param responses: the model's arguments.
        :raises ValueError: if the first responses cannot be fitted.
        """
        for i in responses.finite()[:_TRIED]:
            args, kwargs = responses.one(i)
            try:
                check_arguments(self._model, args, kwargs)
                arguments = self.check(RunArguments(None, args, kwargs), begins=True)
                break
            except ValueError as error:
                failure = error
        else:
            raise failure
        plan = self.plan(arguments, lambda: self.begin(arguments, key, {})[1])
        if plan.noisy:
            raise ValueError(
                "run_many compares bounds, and minibatches or latents drawn at random "
                "make them noisy. Call run for each response"
            )
        return plan, arguments

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
        return from_cache(self.plans, key, lambda: plan.of_batches(batch))

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
            # a wrapper of the guide's model, or another model, which is refused there
            else:
                structure = structure_at(model, guide.structure, arguments)
            names, transforms = self._settings.m_step, transforms_of(guide)
            found = model, guide, structure
            closed = closed_params(names, *found, arguments, params, transforms)
            return Plan(self._settings, *found, transforms, closed)

        if len(self.plans) >= MAX_SHAPES and arguments.shapes not in self.plans:
            # Otherwise JAX would keep the programs of all shapes.
            self._clear()
        return from_cache(self.plans, arguments.shapes, made)

    def keep_up(self) -> None:
        """Discard everything that was compiled before the last set-up of the guide."""
        if self._generation != self._guide.generation:
            self._generation = self._guide.generation
            self._clear()
            self.padding.clear()

    def _clear(self) -> None:
        self.plans.clear()
        self._paces.clear()
        for program in vars(self).values():
            if isinstance(program, jit):
                program.clear_cache()

    def pace(self, plan: Plan, size: int) -> Pace:
        """Return the known speed of steps.

        :param plan: the plan of the fit.
        :param size: number of entries of its data, or of operations of a step.
        """
        return from_cache(self._paces, (plan, size), lambda: Pace(size))
