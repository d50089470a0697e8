# SPDX-License-Identifier: Apache-2.0
"""Full-data steps on data that are read block by block: factors are sums over rows, and
so is the gradient in hyperparameters."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
from jax import Array
from jax.sharding import Mesh

from numpyro_gpaug.infer.vi import quasi_newton
from numpyro_gpaug.infer.vi.feeds import Reader, Taken
from numpyro_gpaug.infer.vi.latent_gaussian import Natural
from numpyro_gpaug.infer.vi.loop import PATIENCE, counted
from numpyro_gpaug.infer.vi.plan import LBFGS, Plan, Settings
from numpyro_gpaug.infer.vi.resolution import lost
from numpyro_gpaug.infer.vi.schedules import as_schedule
from numpyro_gpaug.infer.vi.searching import Collapsed, goes_on, searched
from numpyro_gpaug.infer.vi.settling import (
    MAX_MOVES,
    SETTLED,
    Memory,
    are_mixed,
    least_seen,
    mixed,
    seen,
)
from numpyro_gpaug.infer.vi.state import ConjugateState, unknown_bound
from numpyro_gpaug.infer.vi.stepper import Stepper
from numpyro_gpaug.infer.vi.sweeps import (
    MAX_HALVINGS,
    mix,
    next_step,
    slopes_at,
    starts_augmented,
)
from numpyro_gpaug.math.compiling import few
from numpyro_gpaug.math.sharding import on_mesh
from numpyro_gpaug.model.arguments import Arguments
from numpyro_gpaug.model.observations import all_valid


class Pass(NamedTuple):
    """The results of a pass over the data at natural parameters, so far or complete.

    :param bound: evidence lower bound of the rows so far.
    :param rounding: the largest decrease that rounding alone may cause.
    :param expected: the expected log-likelihood.
    :param information: the information of the data about each block.
    :param pushes: gradients of the expected log-likelihood with respect to means, by
        block.
    :param means: means of the latents, by block.
    :param ascents: gradients of the bound with respect to means, by block.
    :param targets: the result of a whole step of each block.
    :param values: by process, the number of function values that inducing values hardly
        determine, and the total number.
    :param unresolved: see :class:`~numpyro_gpaug.infer.vi.quasi_newton.Search`.
    :param valid: whether all observations are valid.
    """

    bound: Array
    rounding: Array
    expected: Array
    information: Natural
    pushes: dict[str, Array]
    means: dict[str, Array]
    ascents: dict[str, Array]
    targets: Natural
    values: dict[str, Array]
    unresolved: Array
    valid: Array

    @classmethod
    def begun(cls, state: ConjugateState) -> Pass:
        """Return the pass before the first block.

        :param state: the state of the pass.
        """
        dtype = state.bound.dtype
        # In NumPy: JAX would compile a program for each shape.
        none = jax.tree.map(lambda x: np.zeros(x.shape, x.dtype), state.natural)
        values: Any = {name: np.zeros(2, dtype) for name in state.unreached}
        zero: Any = np.zeros((), dtype)
        means = {name: q.potential for name, q in none.items()}
        return cls(
            zero, zero, zero, none, means, means, means, none, values, zero, zero == 0
        )

    @property
    def shares_unreached(self) -> dict[str, Array]:
        """Return the shares of these function values, by process."""
        return {name: none / all_ for name, (none, all_) in self.values.items()}


def add_block(
    settings: Settings,
    state: ConjugateState,
    before: Pass,
    arrays: tuple[Array, ...],
    plan: Plan,
    static: Any,
    augmented: Array | None,
) -> Pass:
    """Return a pass with one more block of rows.

    :param settings: options of the fit.
    :param state: the state of the pass.
    :param before: the pass so far.
    :param arrays: array arguments of the model.
    :param plan: the plan of the fit.
    :param static: the model's other arguments.
    :param augmented: whether factors come from the augmented bound; ``None`` if they
        never do.
    :raises NotImplementedError: for processes whose latents share outputs, and for
        latents that a plate draws.
    """
    stepper = Stepper(plan, settings, Arguments(arrays, static))
    problem = stepper.problem(state.hyper.values, stepper.key(state), {})
    drawn = any(latents is not None for latents in problem.latents.values())
    if problem.coupled or drawn:
        raise NotImplementedError(
            "Blocks are for processes without loadings that are called for all of "
            "their latents. Pass Batches"
        )
    at = problem.evaluate(state.natural)
    found = {
        name: problem.information(
            name, q, at.marginals[name], slopes_at(problem, at, name, augmented)
        )
        for name, q in at.moments.items()
    }
    dtype = problem.dtype
    values = {
        name: jnp.stack([x.sum(dtype=dtype), jnp.asarray(x.size, dtype)])
        for name, x in problem.unreached.items()
    }
    pushes = {name: problem.push(name, at) for name in found}
    value, found, pushes, values = jax.tree.map(
        jnp.add, (before.expected, before.information, before.pushes, before.values),
        (at.expected, found, pushes, values),
    )  # fmt: skip
    means = {name: q.mean for name, q in at.moments.items()}
    ascents = {name: pushes[name] - problem.pull(name, means[name]) for name in means}
    unresolved = before.unresolved
    if stepper.searches:
        unresolved = unresolved + stepper.unresolved(problem, at)
    bound, rounding = problem.bound(value, at.divergences)
    priors = {name: problem.priors[name].natural for name in found}
    targets = jax.tree.map(jnp.add, priors, found)
    valid = all_valid(plan.model, plan.structure, Arguments(arrays, static))
    return Pass(
        bound, rounding, value, found, pushes, means, ascents, targets, values,
        unresolved, before.valid & valid,
    )  # fmt: skip


def add_gradient(
    settings: Settings,
    state: ConjugateState,
    before: dict[str, Array],
    ascents: dict[str, Array],
    share: Array,
    arrays: tuple[Array, ...],
    plan: Plan,
    static: Any,
) -> dict[str, Array]:
    """Add the gradient of one more block to the gradient of the bound with respect to
    hyperparameters.

    :param settings: options of the fit.
    :param state: the state of the pass.
    :param before: the gradient so far.
    :param ascents: gradients of the bound with respect to means, by block.
    :param share: 1 for the first block, which has all terms that are not sums over
        rows, and 0 for others.
    :param arrays: array arguments of the model.
    :param plan: the plan of the fit.
    :param static: the model's other arguments.
    """
    stepper = Stepper(plan, settings, Arguments(arrays, static))
    problem, pullback = stepper.problem_and_pullback(
        state.hyper.values, stepper.key(state), {}
    )
    at = problem.evaluate(state.natural)
    corrections = problem.newton(at, ascents)
    slopes = problem.gradient(at, share=share, corrections=corrections)
    return jax.tree.map(jnp.add, before, pullback(slopes))


_moved, _goes_on = few(quasi_newton.moved), few(goes_on)
_patience, _lost = few(quasi_newton.patience), few(lost)
_empty, _mix = few(Memory.empty), few(mixed)


@few
def _searched(
    state: ConjugateState, values: dict[str, Any], at: Collapsed, ascent: dict[str, Any]
) -> ConjugateState:
    return searched(state, values, at, lambda: ascent, lambda ascent: {})


def _rise(before: Pass, after: Pass) -> Array:
    """Return the increase of the bound in a move."""
    along = jnp.zeros_like(after.bound)
    for name, mean in after.means.items():
        slopes = before.ascents[name] + after.ascents[name]
        along += 0.5 * (slopes * (mean - before.means[name])).sum()
    return seen(after.bound - before.bound, after.rounding, along)


class Passes:
    """Steps that use all data, each as in memory. At fixed hyperparameters every block
    is updated once (:func:`~.sweeps.backtracked_sweep`), and the step is halved while
    the bound falls. If hyperparameters are learnt, blocks are updated until the bound
    no longer rises, and L-BFGS proposes the next point (:mod:`~.searching`). A pass is
    one evaluation of the bound, which also finds the next targets, or one of its
    gradient.

    :param reader: the reader of the blocks of rows.
    :param plan: the plan of the fit at the first block.
    :param plan_at: returns the plan at a block with fewer rows.
    :param settings: options of the fit.
    :param add: :func:`add_block`, compiled.
    :param add_slopes: :func:`add_gradient`, compiled.
    :param data: fingerprint of the first block.
    :raises NotImplementedError: for hyperparameters that are learnt without L-BFGS, and
        for latents drawn at random.
    """

    def __init__(
        self,
        reader: Reader,
        plan: Plan,
        plan_at: Callable[[Arguments, ConjugateState], Plan],
        settings: Settings,
        add: Any,
        add_slopes: Any,
        data: np.uint32,
    ) -> None:
        self._searches = bool(plan.transforms) and settings.optim == LBFGS
        learns = bool(plan.transforms) and settings.optim is not None
        if plan.noisy or plan.closed or learns > self._searches:
            raise NotImplementedError(
                "steps on Blocks draw nothing, and learn hyperparameters "
                f"({sorted(plan.transforms)}) by optim='lbfgs' only. Otherwise "
                "learn them on Batches, then pass optim=None and "
                "init_params=result.params"
            )
        self._reader, self._plan, self._plan_at = reader, plan, plan_at
        self._add, self._add_slopes, self._data = add, add_slopes, data
        self._augmented = settings.updates == "auto" and starts_augmented(
            plan.structure
        )
        schedule: Any = as_schedule(settings.step_size, None)
        self._largest = getattr(schedule, "value", 1.0)
        self._here: Pass | None = None
        first = jax.tree.leaves(reader.batches.first)
        self.size = reader.batches.rows * sum(x[0].size for x in first)

    @property
    def mesh(self) -> Mesh | None:
        """The mesh over which blocks are sharded."""
        return self._reader.mesh

    def steps(self, state: ConjugateState, wanted: int, tol: np.ndarray) -> Taken:
        """Take some steps, fewer if the bound no longer rises; return also their
        losses."""
        if self._searches and state.data != self._data:
            unknown = jnp.full_like(state.bound, unknown_bound(state.bound.dtype))
            state = state._replace(bound=unknown)
        state = state._replace(data=jnp.asarray(self._data))
        step = self._search_step if self._searches else self._step
        losses: list[np.ndarray] = []
        while len(losses) < wanted:
            state = counted(state, step(state), tol)
            losses.append(np.asarray(-state.bound))
            patience: Any = PATIENCE
            if self._searches:
                patience = _patience(state.hyper, tol)
            if tol > 0 and state.stalled >= patience:
                break
        state = state._replace(lost=_lost(state.natural))
        return Taken(state, np.array(losses))

    def bounds(self, state: ConjugateState) -> Array:
        """Return the bound of a state."""
        return self._pass(state, last=True).bound[None]

    def close(self) -> None:
        """Do nothing: no thread runs between steps."""

    def _step(self, state: ConjugateState) -> ConjugateState:
        here = self._here or self._pass(state, last=False)
        state, self._here = self._sweep(state, here)
        return state._replace(unreached=self._here.shares_unreached)

    def _search_step(self, state: ConjugateState) -> ConjugateState:
        values = _moved(state.hyper)
        there = state._replace(hyper=state.hyper._replace(values=values))
        there, found = self._settled(there)
        at = Collapsed(
            there.natural, there.step_sizes, self._plan.known(found.bound, values),
            found.rounding, found.unresolved, found.shares_unreached,
        )  # fmt: skip
        ascent = jax.tree.map(np.zeros_like, values)
        if _goes_on(state, at):
            ascent = self._gradient(there, ascent, found.ascents)
        return _searched(state, values, at, ascent)

    def _settled(self, state: ConjugateState) -> tuple[ConjugateState, Pass]:
        """Update the blocks until the bound no longer rises, as
        :func:`~numpyro_gpaug.infer.vi.settling.settled` does."""
        here, first = self._pass(state, last=False), state.step
        mixes = are_mixed(state.natural)
        memory = _empty(state.natural) if mixes else None
        before: Any = -np.inf
        # Where targets are mixed the first move is the evaluation.
        for moves in range(mixes, MAX_MOVES):
            state = state._replace(step=first + moves - mixes)
            if memory is None:
                state, here = self._sweep(state, here)
                rise, least = here.bound - before, max(here.rounding, SETTLED)
                before = here.bound
            else:
                start = here
                state, here, memory = self._mixed(state, here, memory, moves)
                rise, least = _rise(start, here), least_seen(here.rounding, SETTLED)
            if not rise > least:
                break
        return state, here

    def _mixed(
        self, state: ConjugateState, here: Pass, memory: Memory, moves: int
    ) -> tuple[ConjugateState, Pass, Memory]:
        """Take an Anderson step from the last targets, or a coordinate pass if that
        makes the bound fall."""
        number = jnp.int32(moves)
        proposal, memory = _mix(memory, number, here.targets, state.natural)
        there = state._replace(natural=proposal)
        found = self._pass(there, last=True)
        rose = found.bound >= here.bound - here.rounding
        rose = rose and -_rise(here, found) <= least_seen(here.rounding, SETTLED)
        there = there._replace(bound=found.bound)
        if not rose:
            there, found = self._sweep(state, here)
        return there, found, memory

    def _gradient(
        self,
        state: ConjugateState,
        ascent: dict[str, Array],
        ascents: dict[str, Array],
    ) -> dict[str, Array]:
        """Return the gradient of the bound with respect to hyperparameters.

        :param ascents: gradients with respect to means, by block.
        """
        share = jnp.ones((), state.bound.dtype)
        for block in self._reader.blocks():
            arguments = self._reader.arguments(block)
            plan = self._plan_at(arguments, state)
            with on_mesh(self._reader.mesh):
                ascent = self._add_slopes(
                    state, ascent, ascents, share, arguments.arrays, plan=plan,
                    static=arguments.static,
                )  # fmt: skip
            share = jnp.zeros_like(share)
        return ascent

    def _sweep(self, state: ConjugateState, here: Pass) -> tuple[ConjugateState, Pass]:
        """Update every block once; return the state, and the pass there.

        :param here: the pass at the state.
        """
        names = list(state.natural)
        for name in names:
            floor = here.bound - here.rounding
            old, step = state.natural[name], state.step_sizes[name]
            for tries in range(MAX_HALVINGS + 1):
                # The last attempt is no step at all, and is accepted.
                none = tries == MAX_HALVINGS
                size = 0 * step if none else step * 2.0**-tries
                candidate = mix(old, here.targets[name], size)
                natural = {**state.natural, name: candidate}
                there = self._pass(
                    state._replace(natural=natural), last=name == names[-1]
                )
                if none or there.bound >= floor:
                    break
            moved = there.means[name] - here.means[name]
            slopes = ((at.ascents[name] * moved).sum() for at in (here, there))
            size = next_step(step, jnp.int32(tries + 1), self._largest, *slopes)
            state = state._replace(
                natural=natural, step_sizes=state.step_sizes | {name: size},
                bound=there.bound,
            )  # fmt: skip
            here = there
        return state, here

    def _pass(self, state: ConjugateState, *, last: bool) -> Pass:
        """Read all data once.

        :param state: the state of the pass.
        :param last: whether the next step follows, which does not use the augmented
            bound.
        """
        kind = (state.step == 0) & (not last) if self._augmented else None
        found = Pass.begun(state)
        for block in self._reader.blocks():
            arguments = self._reader.arguments(block)
            plan = self._plan_at(arguments, state)
            with on_mesh(self._reader.mesh):
                found = self._add(
                    state, found, arguments.arrays, plan=plan,
                    static=arguments.static, augmented=kind,
                )  # fmt: skip
        if not found.valid:
            for number, block in enumerate(self._reader.blocks()):
                self._reader.explain(block, f"batch {number} of a pass")
        return found
