# SPDX-License-Identifier: Apache-2.0
"""Full-data steps on data that are read block by block: factors are sums over rows, and
so is the gradient in hyperparameters."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from functools import partial
from typing import Any, ClassVar, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
from jax import Array

from numpyro_gpaug._numpyro import one_thread
from numpyro_gpaug.gaussians.base import times
from numpyro_gpaug.infer.vi.feeds import Feed, Reader, Steps
from numpyro_gpaug.infer.vi.latent_gaussian import Natural
from numpyro_gpaug.infer.vi.loop import stepped
from numpyro_gpaug.infer.vi.plan import Plan
from numpyro_gpaug.infer.vi.state import ConjugateState
from numpyro_gpaug.infer.vi.stepper import Stepper
from numpyro_gpaug.math.sharding import on_mesh
from numpyro_gpaug.model.arguments import Arguments, Values
from numpyro_gpaug.model.observations import all_valid


class Pass(NamedTuple):
    """The results of a pass over the data at natural parameters, so far or complete: an
    :class:`~numpyro_gpaug.infer.vi.latent_gaussian.Evaluation` without numbers by row.

    :param natural: the natural parameters.
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
    :param rise: the increase of the bound in the last update.
    """

    natural: Natural
    bound: Array
    rounding: Array
    expected: Array
    information: Natural
    pushes: dict[str, Array]
    means: dict[str, Array]
    ascents: dict[str, Array]
    targets: Natural
    values: Values
    unresolved: Array
    valid: Array
    rise: Array

    @classmethod
    def begun(cls, natural: Natural, plan: Plan) -> Pass:
        """Return the pass before the first block.

        :param natural: natural parameters.
        :param plan: the plan of the fit.
        """
        dtype = plan.dtype
        # In NumPy, because JAX would compile a program for each shape.
        none = jax.tree.map(lambda x: np.zeros(x.shape, x.dtype), natural)
        values: Any = {name: np.zeros(2, dtype) for name in plan.structure.functions}
        zero: Any = np.zeros((), dtype)
        means = {name: q.potential for name, q in none.items()}
        return cls(
            natural, zero, zero, zero, none, means, means, means, none, values, zero,
            zero == 0, zero,
        )  # fmt: skip

    @property
    def slack(self) -> Array:
        """The largest decrease for which an update is accepted: with so many rows, it
        is the rounding error."""
        return self.rounding


def add_block(
    params: Values,
    key: Array,
    before: Pass,
    arguments: Arguments,
    plan: Plan,
    augmented: Array | None,
) -> Pass:
    """Return a pass with one more block of rows.

    :param params: unconstrained params.
    :param key: random key.
    :param before: the pass so far.
    :param arguments: the model's arguments.
    :param plan: the plan of the fit.
    :param augmented: whether factors come from the augmented bound; ``None`` if they
        never do.
    :raises NotImplementedError: for processes whose latents share outputs, and for
        latents that a plate draws.
    """
    stepper = Stepper(plan, arguments)
    problem = stepper.problem(params, key, {})
    drawn = any(latents is not None for latents in problem.latents.values())
    if problem.coupled or drawn:
        raise NotImplementedError(
            "Blocks need processes without loadings, called for all of their latents. "
            "Pass Batches instead"
        )
    at = problem.evaluate(before.natural)
    found = {
        name: problem.information(
            name, at.marginals[name], problem.slopes_at(name, at, augmented)
        )
        for name in at.moments
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
    if plan.searches:
        unresolved = unresolved + problem.unresolved(at, stepper.processes)
    bound, rounding = problem.bound(value, at.divergences)
    targets = {k: times(problem.priors[k], found[k], means[k]) for k in found}
    valid = all_valid(plan.model, plan.structure, arguments)
    return Pass(
        before.natural, bound, rounding, value, found, pushes, means, ascents, targets,
        values, unresolved, before.valid & valid, before.rise,
    )  # fmt: skip


def add_gradient(
    params: Values,
    key: Array,
    before: Values,
    at: Pass,
    share: Array,
    arguments: Arguments,
    plan: Plan,
) -> Values:
    """Add the gradient of one more block to the gradient of the bound with respect to
    hyperparameters.

    :param params: unconstrained params.
    :param key: random key.
    :param before: the gradient so far.
    :param at: the pass at these params.
    :param share: 1 for the first block, which has all terms that are not sums over
        rows, and 0 for others.
    :param arguments: the model's arguments.
    :param plan: the plan of the fit.
    """
    stepper = Stepper(plan, arguments)
    problem, pullback = stepper.problem_and_pullback(params, key, {})
    here = problem.evaluate(at.natural)
    corrections = problem.newton(here, at.ascents)
    slopes = problem.gradient(here, share=share, corrections=corrections)
    return jax.tree.map(jnp.add, before, pullback(slopes))


class _PythonLoops:
    """Loops whose bodies read data."""

    @staticmethod
    def while_loop(search_continues: Any, body: Any, carry: Any) -> Any:
        while search_continues(carry):
            carry = body(carry)
        return carry

    @staticmethod
    def cond(which: Any, one: Any, other: Any) -> Any:
        return one() if which else other()


class InBlocks:
    """The problem that closed-form updates solve, on data that are read block by block.
    For these updates it has the interface of
    :class:`~numpyro_gpaug.infer.vi.latent_gaussian.LatentGaussian`. A pass is one
    evaluation of the bound, which also finds the next targets, or one of its gradient.

    :param programs: the :class:`~numpyro_gpaug.infer.vi.programs.Programs` of the fit.
    :param plan: the plan of the fit at the first block.
    :param reader: the reader of the blocks of rows.
    :param params: unconstrained params.
    :param key: random key.
    """

    loops: ClassVar[Any] = _PythonLoops
    coupled: ClassVar[tuple[str, ...]] = ()
    quadratic: ClassVar[bool] = False
    # Joint Newton steps of competing classes would read the data many times.
    competes: ClassVar[bool] = False
    solves: ClassVar[bool] = False

    def __init__(
        self, programs: Any, plan: Plan, reader: Reader, params: Values, key: Array
    ) -> None:
        self._programs, self._plan, self._reader = programs, plan, reader
        # Blocks are checked by another thread, which waits at most for these calls.
        self._add, self._add_slopes = map(one_thread, (programs.sums, programs.slopes))
        self._params, self._key = params, key
        self.shares_unreached: dict[str, Array] = {}

    def rebased(self, natural: Natural) -> Natural:
        return natural

    def unevaluated(self, natural: Natural) -> Pass:
        begun = Pass.begun(natural, self._plan)
        return begun._replace(bound=jnp.full_like(begun.bound, -jnp.inf))

    def evaluate(self, natural: Natural, *, augmented: bool = False) -> Pass:
        at = Pass.begun(natural, self._plan)
        for arguments, plan in self._blocks():
            with on_mesh(self._reader.mesh):
                at = self._add(
                    self._params, self._key, at, arguments, plan=plan,
                    augmented=augmented if self._plan.starts_augmented else None,
                )  # fmt: skip
        shares = {name: none / all_ for name, (none, all_) in at.values.items()}
        self.shares_unreached = shares
        if not at.valid:
            for number, block in enumerate(self._reader.blocks()):
                self._reader.explain(block, f"batch {number} of a pass")
        return at

    def reevaluate(
        self, old: Pass, name: str, candidate: Any, index: Array | None
    ) -> Pass:
        return self.evaluate({**old.natural, name: candidate})

    def target(
        self, name: str, at: Pass, augmented: Any, index: Array | None = None
    ) -> Any:
        if augmented is not None and augmented:  # in the first step
            at = self.evaluate(at.natural, augmented=True)
        return at.targets[name]

    def targets(self, at: Pass, augmented: Any) -> Natural:
        return {name: self.target(name, at, augmented) for name in at.targets}

    def place(self, name: str, at: Pass) -> tuple[Array, Array]:
        return at.means[name], at.ascents[name]

    def slopes_between(self, name: str, one: Any, other: Any) -> tuple[Array, Array]:
        moved = other[0] - one[0]
        return (one[1] * moved).sum(), (other[1] * moved).sum()

    def unresolved(self, at: Pass, processes: tuple[str, ...]) -> Array:
        return at.unresolved

    def collapsed_gradient(self, at: Pass) -> Values:
        ascent = jax.tree.map(np.zeros_like, self._params)
        share = jnp.ones((), at.bound.dtype)
        for arguments, plan in self._blocks():
            with on_mesh(self._reader.mesh):
                ascent = self._add_slopes(
                    self._params, self._key, ascent, at, share, arguments, plan=plan
                )
            share = jnp.zeros_like(share)
        return ascent

    def _blocks(self) -> Iterator[tuple[Arguments, Plan]]:
        for block in self._reader.blocks():
            arguments = self._reader.arguments(block)
            # Params that are set in closed form are not among those that must be known.
            yield arguments, self._programs.plan(arguments, dict)


class _Stepper(Stepper):
    """Steps whose problem is :class:`InBlocks`.

    :param problem: returns the problem at params, given a random key.
    """

    loops = InBlocks.loops

    def __init__(self, plan: Plan, problem: Callable[..., InBlocks]) -> None:
        super().__init__(plan, Arguments.split((), {}))
        self._in_blocks = problem

    # Passes have no moments.
    knows_lost = False

    def key(self, state: ConjugateState) -> Array:
        return state.rng_key  # nothing is drawn

    def problem_and_pullback(self, values: Any, key: Array, indices: Any) -> Any:
        # The gradient is computed with respect to the params.
        return self._in_blocks(values, key), lambda slopes: slopes


class Passes(Feed):
    """Steps that use all data, each as in memory.

    :param programs: the :class:`~numpyro_gpaug.infer.vi.programs.Programs` of the fit.
    :param plan: the plan of the fit at the first block.
    :param reader: the reader of the blocks of rows.
    :param data: fingerprint of the first block.
    :raises NotImplementedError: for hyperparameters that are learnt without L-BFGS, and
        for latents drawn at random.
    """

    def __init__(
        self, programs: Any, plan: Plan, reader: Reader, data: np.uint32
    ) -> None:
        problem = partial(InBlocks, programs, plan, reader)
        self._stepper = _Stepper(plan, problem)
        if plan.noisy or plan.closed or plan.learns > plan.searches:
            raise NotImplementedError(
                "steps on Blocks draw nothing, and learn hyperparameters "
                f"({sorted(plan.transforms)}) by optim='lbfgs' only. Otherwise "
                "learn them on Batches, then pass optim=None and "
                "init_params=result.params"
            )
        self._data, self.mesh = data, reader.mesh
        # The problem and its evaluation at the last state, if hyperparameters are
        # fixed, because an evaluation reads all data.
        self._here: tuple[Any, Any] = None, None
        first = jax.tree.leaves(reader.batches.first)
        self.size = reader.batches.rows * sum(x[0].size for x in first)

    def steps(self, state: ConjugateState, wanted: int, tol: np.ndarray) -> Steps:
        state, losses, taken, *here = stepped(
            self._stepper, state, wanted, tol, self._data, *self._here
        )
        self._here = here[0], here[1]
        return Steps(state, np.asarray(losses)[: int(taken)])
