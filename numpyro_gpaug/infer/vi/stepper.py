# SPDX-License-Identifier: Apache-2.0
"""The pure steps under :class:`~numpyro_gpaug.ConjugateSVI`."""

from __future__ import annotations

from collections.abc import Callable
from functools import cached_property, partial
from typing import Any, ClassVar

import jax
import jax.numpy as jnp
from jax import Array, lax, random

from numpyro_gpaug.gaussians.base import Change, centred
from numpyro_gpaug.infer.vi import quasi_newton
from numpyro_gpaug.infer.vi.differentiation import floats_of, vjp, with_zeros
from numpyro_gpaug.infer.vi.elbo import drawn, other_terms
from numpyro_gpaug.infer.vi.epochs import epoch_length, next_batch
from numpyro_gpaug.infer.vi.latent_gaussian import Evaluation, LatentGaussian, Natural
from numpyro_gpaug.infer.vi.means import solved
from numpyro_gpaug.infer.vi.plan import Plan, constrained
from numpyro_gpaug.infer.vi.resolution import lost
from numpyro_gpaug.infer.vi.schedules import Adaptive, Schedule, as_schedule
from numpyro_gpaug.infer.vi.settling import SETTLED, Place, settled
from numpyro_gpaug.infer.vi.state import (
    ConjugateState,
    Hyper,
    flagged,
    unknown_bound,
)
from numpyro_gpaug.infer.vi.sweeps import backtracked_sweep, damped_sweep
from numpyro_gpaug.model.arguments import Arguments, Values

# The smallest part of a pending update that is tried before a new one.
LEAST_SCALE = 0.1
# The smallest share of the rate on minibatches from which failures halve it.
LEAST_RATE = 2.0**-9
# An update of a hyperparameter, in unconstrained units, that is too long to be undone.
LONGEST = 10.0
# The largest change of hyperparameters per step, relative to the step size of the
# posterior.
LARGEST_PART = 0.5


class Stepper:
    """Steps of one model at given arguments, inside one trace.

    :param plan: the model, its guide, and its structure at such arguments.
    :param arguments: the model's arguments.
    """

    loops: ClassVar[Any] = LatentGaussian.loops

    def __init__(self, plan: Plan, arguments: Arguments) -> None:
        self.plan, self._arguments = plan, arguments
        self._structure = plan.structure
        self.processes = tuple(block.name for block in plan.structure.processes)
        # The bound of one step can be compared with that of the next only if both are
        # computed on the same data and the same draws.
        self._comparable = not plan.noisy
        # Draws of other latents are not moves of the hyperparameters.
        self._moves = plan.learns and plan.noisy and not plan.guide.random_others

    @cached_property
    def _schedule(self) -> Schedule:
        # Created only for steps, because an evaluation may have other data.
        batches = None if self._comparable else epoch_length(self._structure)
        return as_schedule(self.plan.settings.step_size, batches)

    @property
    def _largest(self) -> float:
        """The largest step size."""
        return getattr(self._schedule, "value", 1.0)

    @property
    def knows_lost(self) -> bool:
        """Whether steps compute rounding errors from moments that they have, instead of
        a run at its end, from moments of its own. With a sparse precision variances are
        an effort, with others their program is."""
        return self.plan.searches and not self._structure.form.solves

    def fixed(self, state: ConjugateState) -> Any:
        """Return the problem that all steps share; ``None`` if hyperparameters or data
        change."""
        if self.plan.learns or not self._comparable:
            return None
        return self.problem_and_pullback(state.hyper.values, self.key(state), {})[0]

    def evaluate(
        self, state: ConjugateState, key: Array, indices: dict[str, Array]
    ) -> Evaluation:
        """Return the bound at a state, on all data of its arguments or on one
        minibatch.

        :param state: the state.
        :param key: random key for the latents of the other guide.
        :param indices: indices of the minibatch, by plate.
        """
        problem = self.problem(state.hyper.values, key, indices)
        natural = problem.rebased(state.natural)
        return problem.restrict().evaluate(problem.select(natural))

    def step(
        self, state: ConjugateState, problem: Any = None, evaluation: Any = ()
    ) -> tuple[ConjugateState, Any]:
        """Take one step; return the state, and the evaluation there if the problem is
        fixed.

        :param state: the state.
        :param problem: from :meth:`fixed`.
        :param evaluation: the evaluation after the last step.
        """
        if problem is not None:
            return self._fixed_step(state, problem, evaluation)
        if not self._comparable:
            return self._batch_step(state), ()
        if self.plan.searches:
            return self._search_step(state), ()
        return self._joint_step(state), ()

    def _fixed_step(
        self, state: ConjugateState, problem: Any, evaluation: Any
    ) -> tuple[ConjugateState, Any]:
        """Take a step on full data with fixed hyperparameters: problem and evaluation
        are reused."""
        steps = state.step_sizes
        if problem.quadratic and self._largest == 1:
            natural, evaluation = solved(problem, state.natural)
        else:
            natural, evaluation, steps = self._sweep(problem, state, evaluation)
        state = state._replace(
            natural=natural, step_sizes=steps, bound=evaluation.bound
        )
        return state, evaluation

    def _joint_step(self, state: ConjugateState) -> ConjugateState:
        """Take a step on full data: the pending update of the hyperparameters, a
        coordinate pass, a new gradient."""
        values = moved(state.hyper)
        problem, pullback = self.problem_and_pullback(values, self.key(state), {})
        state = state._replace(natural=problem.rebased(state.natural))
        start = problem.unevaluated(state.natural)
        natural, evaluation, steps = self._sweep(problem, state, start)

        at = problem, pullback, natural, lambda: evaluation
        hyper = self._next_hyper(state, values, at, {})
        new = state._replace(
            hyper=hyper, natural=natural, step_sizes=steps, bound=evaluation.bound,
            unreached=problem.shares_unreached,
        )  # fmt: skip
        bound = self.plan.known(evaluation.bound, values)
        fell = ~(bound >= state.bound - evaluation.rounding)
        same = state._replace(hyper=refused(state.hyper))
        return lax.cond(fell, lambda: same, lambda: flagged(new))

    def _search_step(self, state: ConjugateState) -> ConjugateState:
        """Take a step on full data: the collapsed bound at the end of the pending
        update."""
        values = quasi_newton.moved(state.hyper)
        problem, pullback = self.problem_and_pullback(values, self.key(state), {})
        natural, evaluation, steps = self._settled(problem, state)
        new = state._replace(
            natural=natural, step_sizes=steps, unreached=problem.shares_unreached,
            bound=self.plan.known(evaluation.bound, values),
            lost=lost(natural, evaluation.moments) if self.knows_lost else state.lost,
        )  # fmt: skip
        errors = evaluation.rounding, problem.unresolved(evaluation, self.processes)

        def gradient() -> tuple[Values, dict[str, Any]]:
            ascent = pullback(problem.collapsed_gradient(evaluation))
            return ascent, self._maximised(problem, evaluation, values, ascent)

        def none() -> tuple[Values, dict[str, Any]]:
            zero = jax.tree.map(jnp.zeros_like, values)
            return zero, {p.name: zero[p.name] for p in self.plan.closed}

        further = quasi_newton.search_continues(state, new.bound, *errors)
        rise = self.loops.cond(further, gradient, none)
        return quasi_newton.searched(state, new, values, *errors, further, *rise)

    def _batch_step(self, state: ConjugateState) -> ConjugateState:
        """Take a step on a minibatch, or with other latents drawn at random. Bounds
        cannot be compared, so the step size decays instead."""
        key, begun = self.key(state), state
        indices, epochs = next_batch(self._structure, state.epochs, key)
        values = moved(state.hyper)
        whole, pullback = self.problem_and_pullback(values, key, indices)
        self._refuse_adaptive(whole)
        before: dict[str, Change] = {}
        if self._moves:
            before = self._view(state.hyper.values, key, indices)[0].units()
        natural = whole.rebased(state.natural, before)
        if before:
            # Where kernel matrices are close to singular, rounding may leave precisions
            # that are not positive definite.
            found = [n.moments().log_det.ravel() for n in natural.values()]
            fine = jnp.isfinite(jnp.concatenate(found)).all()
            known = whole.rebased(state.natural)
            natural = jax.tree.map(partial(jnp.where, fine), natural, known)
        state = state._replace(natural=natural)
        problem, old = whole.restrict(), whole.select(state.natural)
        natural, schedules, bound, size = damped_sweep(
            problem, old, self._schedule, state.schedule, state.step,
            self._augmented(state.step),
        )  # fmt: skip
        # After the step the Gaussian explains this batch better than others, and before
        # the step worse than it should: scales would be learnt too large, or too small.
        # To first order the errors cancel at half of the step.
        between = {
            name: jax.tree.map(lambda x, y: (x + y) / 2, centred(old[name], q), q)
            for name, q in natural.items()
        }
        at = whole, pullback, between, partial(problem.evaluate, between)
        hyper = self._next_hyper(state, values, at, indices)
        if self.plan.learns and self.plan.settings.hyper_every is None:
            hyper = limited(hyper, size)
        new = state._replace(
            hyper=hyper, natural=whole.scatter(state.natural, natural),
            schedule=schedules, epochs=epochs, bound=bound,
            unreached=whole.shares_unreached,
        )  # fmt: skip
        return without_failure(begun, flagged(new))

    def _refuse_adaptive(self, problem: LatentGaussian) -> None:
        if isinstance(self._schedule, Adaptive) and any(
            latents is not None for latents in problem.latents.values()
        ):
            raise ValueError(
                "step_size='adaptive' averages gradients over steps, but steps "
                "involve different latents if a process is called for some of "
                "them. Use the default (RobbinsMonro) or a number"
            )

    def _sweep(self, problem: Any, state: ConjugateState, evaluation: Any) -> Place:
        return backtracked_sweep(
            problem, state.natural, evaluation, state.step_sizes,
            self._largest, self._augmented(state.step),
        )  # fmt: skip

    def _settled(self, problem: Any, state: ConjugateState) -> Place:
        if problem.quadratic:
            return *solved(problem, state.natural), state.step_sizes

        natural = problem.rebased(state.natural)
        return settled(
            problem, natural, state.step_sizes, self._largest,
            lambda moves: self._augmented(state.step + moves), SETTLED,
        )  # fmt: skip

    def _augmented(self, step: Array) -> Array | None:
        """Return whether a step uses the factors of the augmented bound, for a safe
        start; ``None`` if no step does."""
        return step == 0 if self.plan.starts_augmented else None

    def _next_hyper(
        self,
        state: ConjugateState,
        values: Values,
        at: tuple[LatentGaussian, Callable, Natural, Callable[[], Evaluation]],
        indices: dict[str, Array],
    ) -> Hyper:
        """Return hyperparameters with their next pending update, or with none in
        between two updates. The blocks are fixed in whitened coordinates, or with
        minibatches in those of the model's sites: by the envelope theorem the gradient
        is the gradient of the optimised bound.

        :param values: unconstrained params.
        :param at: the problem there, its pullback, natural parameters of the blocks,
            and a function that evaluates it, for steps with an update.
        :param indices: indices of the minibatch, by plate.
        """
        hyper = state.hyper
        if not self.plan.learns:
            return hyper
        due = (state.step + 1) % self.plan.settings.every == 0
        restricted = not self._comparable

        def next_update(
            values: Any, optim_state: Any, at: tuple[Any, Any, Any, Any]
        ) -> tuple[Any, Any]:
            problem, pullback, natural, evaluate = at
            evaluation = evaluate()
            slopes = problem.gradient(
                evaluation, restricted=restricted, natural=natural
            )
            ascent = pullback(slopes)
            update = jax.tree.map(jnp.zeros_like, values)
            if (optim := self.plan.optim) is not None:
                descent = jax.tree.map(jnp.negative, floats_of(ascent))
                update, optim_state = optim.update(
                    descent, optim_state, floats_of(values)
                )
                update = with_zeros(update, values)
            update |= self._maximised(problem, evaluation, values, ascent)
            return update, optim_state

        def one_more(_: Array, carry: tuple[Any, Any]) -> tuple[Any, Any]:
            update, optim_state = carry
            here = jax.tree.map(jnp.add, values, update)
            whole, pullback = self.problem_and_pullback(here, self.key(state), indices)
            problem = whole.restrict() if restricted else whole
            before = (at[0].restrict() if restricted else at[0]).units
            natural = problem.rebased(at[2], before)
            there = whole, pullback, natural, partial(problem.evaluate, natural)
            more, optim_state = next_update(here, optim_state, there)
            return jax.tree.map(jnp.add, update, more), optim_state

        def moved() -> Hyper:
            carry = next_update(values, hyper.optim_state, at)
            if self.plan.settings.hyper_steps > 1:
                carry = lax.fori_loop(
                    1, self.plan.settings.hyper_steps, one_more, carry
                )
            update, optim_state = carry
            # With minibatches it is the rate, which the guard and failures lower.
            scale = jnp.ones_like(hyper.scale) if self._comparable else hyper.scale
            return Hyper(values, update, scale, optim_state)

        if self.plan.settings.every == 1:
            return moved()
        still = jax.tree.map(jnp.zeros_like, hyper.update)
        return lax.cond(due, moved, lambda: hyper._replace(values=values, update=still))

    def _maximised(
        self,
        problem: LatentGaussian,
        evaluation: Evaluation,
        values: Values,
        ascent: Values,
    ) -> Values:
        """Return updates of the params that are set in closed form."""
        if not self.plan.closed:
            return {}
        expected = problem.likelihood
        carried = expected.carried(evaluation.marginals)
        return {
            p.name: p.update(expected, carried, values[p.name], ascent[p.name])
            for p in self.plan.closed
        }

    def problem(
        self, values: Values, key: Array, indices: dict[str, Array]
    ) -> LatentGaussian:
        """Run the model once, with the latents of the other guide drawn with
        ``key``."""
        view, trace = self._view(values, key, indices)
        augmented = self.plan.settings.updates == "augmented"
        return LatentGaussian.seen(
            view, "augmented" if augmented else "exact", other_terms(view, trace),
            learns=self.plan.learns, moves=self._moves,
        )  # fmt: skip

    def _view(
        self, values: Values, key: Array, indices: dict[str, Array]
    ) -> tuple[Any, Any]:
        """Return the view of the model, and the trace of the other guide."""
        params = constrained(self.plan.guide, values)
        plan, given = self.plan, {**params, **indices}
        trace = drawn(plan.guide.draw_others, key, given, *self._arguments.merge())
        others = {n: trace[n]["value"] for n in self._structure.others}
        filled = {**params, **others, **indices}
        view = plan.guide.view(
            self._structure, plan.model, self._arguments, filled, key
        )
        return view, trace

    def problem_and_pullback(
        self, values: Values, key: Array, indices: dict[str, Array]
    ) -> tuple[LatentGaussian, Callable[[Any], Any]]:
        if not self.plan.learns:
            return self.problem(values, key, indices), lambda slopes: None
        return vjp(lambda values: self.problem(values, key, indices), values)

    def key(self, state: ConjugateState) -> Array:
        """Return the random key of the next step."""
        return random.fold_in(state.rng_key, state.step + 1)


def moved(hyper: Hyper) -> Values:
    """Return hyperparameters after their pending update."""

    def after(value: Array, update: Array) -> Array:
        return value + jnp.asarray(hyper.scale * update, value.dtype)

    return jax.tree.map(after, hyper.values, hyper.update)


def limited(hyper: Hyper, size: Array) -> Hyper:
    """Clip every entry of a pending update to half the step size of the posterior. A
    step of size ``s`` takes the posterior a fraction ``s`` of its way, so it lags
    behind by about ``1 / s`` steps. In these, no hyperparameter then changes by more
    than a half in unconstrained units (a factor of 1.6 for a positive one). Stochastic
    approximation of two quantities needs two such time scales to converge (Borkar,
    1997, Stochastic approximation with two time scales).

    :param hyper: hyperparameters with an update from any optax transformation.
    :param size: the size of the last step of the posterior.
    """

    def cut(update: Array) -> Array:
        most = jnp.asarray(LARGEST_PART * size, update.dtype)
        return jnp.clip(update, -most, most)

    return hyper._replace(update=jax.tree.map(cut, hyper.update))


def without_failure(state: ConjugateState, new: ConjugateState) -> ConjugateState:
    """Return the state after a step on a minibatch. If bound or gradient are not finite
    there, return the state before, without its pending update, and with half of the
    rate of further ones: hyperparameters may wander to where kernel matrices are
    singular in this dtype. Failures are not undone if the rate has been halved ten
    times, if the update was larger than any sound rate makes it, nor after a step
    without an update, which would fail again.

    :param state: the state before the step.
    :param new: the state after it, with a bound of NaN if it failed.
    """
    moves = [jnp.abs(x).max() for x in jax.tree.leaves(state.hyper.update) if x.size]
    if not moves:
        return new
    known = state.bound > unknown_bound(state.bound.dtype)
    longest = state.hyper.scale * jnp.stack(moves).max()
    may = known & (state.hyper.scale > LEAST_RATE) & (longest > 0)
    undone = may & (longest < LONGEST) & ~jnp.isfinite(new.bound)
    hyper = state.hyper._replace(
        update=jax.tree.map(jnp.zeros_like, state.hyper.update),
        scale=state.hyper.scale / 2,
    )
    before = state._replace(hyper=hyper)
    return jax.tree.map(partial(jnp.where, undone), before, new)


def refused(hyper: Hyper) -> Hyper:
    """Halve a pending update that made the bound fall. If less than a tenth is left, it
    is replaced by an update from a new gradient: an update with momentum need not
    ascend, however small it is.

    :param hyper: hyperparameters before the update.
    """
    dropped = hyper.scale < 2 * LEAST_SCALE
    update = jax.tree.map(
        lambda u: jnp.where(dropped, jnp.zeros_like(u), u), hyper.update
    )
    scale = jnp.where(dropped, 1, hyper.scale / 2)
    return hyper._replace(update=update, scale=scale)
