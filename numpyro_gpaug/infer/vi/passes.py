# SPDX-License-Identifier: Apache-2.0
"""Full-data steps on data that are read block by block: factors are sums over rows."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
from jax import Array

from numpyro_gpaug.infer.vi.feeds import Reader
from numpyro_gpaug.infer.vi.latent_gaussian import Natural
from numpyro_gpaug.infer.vi.loop import counted
from numpyro_gpaug.infer.vi.plan import Plan, Settings
from numpyro_gpaug.infer.vi.schedules import as_schedule
from numpyro_gpaug.infer.vi.state import ConjugateState
from numpyro_gpaug.infer.vi.stepper import Stepper
from numpyro_gpaug.infer.vi.sweeps import (
    MAX_HALVINGS,
    mix,
    next_step,
    slack,
    slopes_at,
    starts_augmented,
)
from numpyro_gpaug.model.observations import all_valid
from numpyro_gpaug.model.structure import Arguments

# Steps without a rise of the bound that end a run, as in memory.
PATIENCE = 3


class Pass(NamedTuple):
    """What a pass over the data finds at natural parameters; so far, or in the end.

    :param bound: evidence lower bound of the rows so far.
    :param magnitude: of what it was summed from.
    :param expected: the expected log-likelihood.
    :param information: what the data say of each block.
    :param targets: where a whole step takes each block.
    :param values: by process, of how many function values inducing values say next to
        nothing, and how many there are.
    :param valid: whether all observations are.
    """

    bound: Array
    magnitude: Array
    expected: Array
    information: Natural
    targets: Natural
    values: dict[str, Array]
    valid: Array


def add_block(
    settings: Settings,
    state: ConjugateState,
    before: Pass | None,
    arrays: tuple[Array, ...],
    plan: Plan,
    static: Any,
    augmented: bool | None,
) -> Pass:
    """A pass with one more block of rows.

    :param settings: options of the fit.
    :param state: where.
    :param before: the pass so far; ``None`` before the first block.
    :param arrays: array arguments of the model.
    :param plan: of the fit.
    :param static: the model's other arguments.
    :param augmented: whether factors are those of the augmented bound; ``None`` if
        never.
    :raises NotImplementedError: for processes whose latents share outputs, and for
        latents that a plate draws.
    """
    stepper = Stepper(plan, settings, Arguments(arrays, static))
    problem = stepper.problem(state.hyper.values, stepper.key(state), {})
    drawn = any(latents is not None for latents in problem.latents.values())
    if problem.coupled or drawn:
        raise NotImplementedError(
            "Blocks are for processes without loadings, called for all of their "
            "latents: pass Batches"
        )
    at = problem.evaluate(state.natural)
    kind = None if augmented is None else jnp.array(augmented)
    found = {
        name: problem.information(
            name, q, at.marginals[name], slopes_at(problem, at, name, kind)
        )
        for name, q in at.moments.items()
    }
    value = at.expected
    valid = all_valid(plan.model, plan.structure, Arguments(arrays, static))
    dtype = problem.dtype
    values = {
        name: jnp.stack([x.sum(dtype=dtype), jnp.asarray(x.size, dtype)])
        for name, x in problem.unreached.items()
    }
    if before is not None:
        valid = before.valid & valid
        value = before.expected + value
        found = jax.tree.map(jnp.add, before.information, found)
        values = jax.tree.map(jnp.add, before.values, values)
    bound, magnitude = problem.bound(value, at.divergences)
    priors = {name: problem.priors[name].natural for name in found}
    targets = jax.tree.map(jnp.add, priors, found)
    return Pass(bound, magnitude, value, found, targets, values, valid)


class Passes:
    """Steps that see all data, each as in memory (:func:`~.sweeps.backtracked_sweep`):
    every block moves once, and the step is halved while the bound falls. A pass is one
    evaluation of the bound, which finds the next targets too.

    :param reader: of the blocks of rows.
    :param plan: of the fit at the first.
    :param plan_at: gives that at another one, which has fewer rows.
    :param settings: options of the fit.
    :param add: :func:`add_block`, compiled.
    :param data: fingerprint of the first block.
    :raises NotImplementedError: for hyperparameters that are to be learnt, and latents
        drawn at random.
    """

    def __init__(
        self,
        reader: Reader,
        plan: Plan,
        plan_at: Callable[[Arguments, ConjugateState], Plan],
        settings: Settings,
        add: Any,
        data: np.uint32,
    ) -> None:
        if plan.noisy or plan.closed or (plan.transforms and settings.optim):
            raise NotImplementedError(
                "steps on Blocks keep hyperparameters, which are "
                f"{sorted(plan.transforms)}, and draw nothing: learn them on Batches, "
                "then pass optim=None and init_params=result.params"
            )
        self._reader, self._plan_at, self._add = reader, plan_at, add
        self._data = data
        self._augmented = settings.updates == "auto" and starts_augmented(
            plan.structure
        )
        schedule: Any = as_schedule(settings.step_size, None)
        self._largest = getattr(schedule, "value", 1.0)
        self._here: Pass | None = None
        first = jax.tree.leaves(reader.batches.first)
        self.size = reader.batches.rows * sum(x[0].size for x in first)

    def steps(
        self, state: ConjugateState, wanted: int, tol: np.ndarray
    ) -> tuple[ConjugateState, np.ndarray]:
        """So many steps, fewer if the bound rises no more; and their losses."""
        state = state._replace(data=jnp.asarray(self._data))
        losses: list[np.ndarray] = []
        while len(losses) < wanted:
            state = counted(state, self._step(state), tol)
            losses.append(np.asarray(-state.bound))
            if tol > 0 and state.stalled >= PATIENCE:
                break
        return state, np.array(losses)

    def bounds(self, state: ConjugateState) -> Array:
        """The bound of a state."""
        return self._pass(state, last=True).bound[None]

    def close(self) -> None:
        """Nothing goes on between steps."""

    def _step(self, state: ConjugateState) -> ConjugateState:
        here = self._here or self._pass(state, last=False)
        names = list(state.natural)
        for name in names:
            floor = here.bound - slack(here)
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
            sizes = state.step_sizes | {
                name: next_step(step, jnp.int32(tries + 1), self._largest)
            }
            state = state._replace(natural=natural, step_sizes=sizes, bound=there.bound)
            here = there
        self._here = here
        unreached = {name: none / all_ for name, (none, all_) in here.values.items()}
        return state._replace(unreached=unreached)

    def _pass(self, state: ConjugateState, *, last: bool) -> Pass:
        """One reading of all data.

        :param state: where.
        :param last: whether what follows is the next step, which does not start safely.
        """
        kind = (not last and int(state.step) == 0) if self._augmented else None
        found = None
        for block in self._reader.blocks():
            arguments = self._reader.arguments(block)
            plan = self._plan_at(arguments, state)
            found = self._add(
                state, found, arguments.arrays, plan=plan,
                static=arguments.static, augmented=kind,
            )  # fmt: skip
        assert found is not None
        if not found.valid:
            for number, block in enumerate(self._reader.blocks()):
                self._reader.explain(block, f"batch {number} of a pass")
        return found
