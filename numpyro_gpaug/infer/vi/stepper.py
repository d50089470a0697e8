# SPDX-License-Identifier: Apache-2.0
"""The pure steps under :class:`~numpyro_gpaug.ConjugateSVI`."""

from __future__ import annotations

from collections.abc import Callable
from functools import cached_property, partial
from typing import TYPE_CHECKING, Any, NamedTuple

import jax
import jax.numpy as jnp
from jax import Array, lax, random
from numpyro import handlers

from numpyro_gpaug.guides.sparse_gp import AutoSparseGP
from numpyro_gpaug.infer.vi.closed_params import ClosedParam
from numpyro_gpaug.infer.vi.elbo import other_terms
from numpyro_gpaug.infer.vi.epochs import epoch_length, next_batch
from numpyro_gpaug.infer.vi.schedules import Adaptive, Schedule, as_schedule
from numpyro_gpaug.infer.vi.sites import Evaluation, Natural, Sites
from numpyro_gpaug.infer.vi.sweeps import backtracked_sweep, damped_sweep, slack
from numpyro_gpaug.math.linalg import moments
from numpyro_gpaug.model.inspect import structure_for
from numpyro_gpaug.model.structure import Arguments
from numpyro_gpaug.model.view import BoundProblem

if TYPE_CHECKING:
    import optax


class Hyper(NamedTuple):
    """Hyperparameters and their optimiser.

    :param values: unconstrained params of the model and of the other guide.
    :param update: the pending update, applied at the start of the next step.
    :param scale: fraction of it to apply; halved when it made the bound fall.
    :param optim_state: the optax state.
    """

    values: dict[str, Any]
    update: dict[str, Any]
    scale: Array
    optim_state: Any


class ConjugateState(NamedTuple):
    """State of :class:`~numpyro_gpaug.ConjugateSVI`, a pytree of arrays.

    :param hyper: hyperparameters.
    :param natural: natural parameters of every Gaussian block, latent axis first.
    :param step_sizes: next step size to try, by block (full data).
    :param schedule: state of the step-size schedule (minibatches).
    :param epochs: by subsampled plate, a permutation and the position in it.
    :param bound: the bound at this state (full data) or of the last batch before it.
    :param stalled: steps in a row that moved the bound by less than ``tol``.
    :param step: steps taken.
    :param rng_key: random key.
    """

    hyper: Hyper
    natural: Natural
    step_sizes: dict[str, Array]
    schedule: Any
    epochs: dict[str, tuple[Array, Array]]
    bound: Array
    stalled: Array
    step: Array
    rng_key: Array


class Stepper:
    """Steps of one model at given arguments, inside one trace.

    :param model: the model.
    :param guide: its guide.
    :param arguments: the model's arguments.
    :param constrain: from unconstrained params to constrained ones.
    :param optim: optax transformation, or ``None`` to leave params where they are.
    :param closed: params set in closed form.
    :param hyper_steps: gradient steps after a closed-form step.
    :param hyper_every: closed-form steps per time they are taken.
    :param sites: ``"auto"``, ``"augmented"`` or ``"exact"``.
    :param step_size: see :func:`~numpyro_gpaug.infer.vi.schedules.as_schedule`.
    """

    def __init__(
        self,
        model: Callable[..., Any],
        guide: AutoSparseGP,
        arguments: Arguments,
        constrain: Callable[[dict[str, Any]], dict[str, Any]],
        optim: optax.GradientTransformation | None,
        closed: tuple[ClosedParam, ...],
        hyper_steps: int,
        hyper_every: int,
        sites: str,
        step_size: float | str | Schedule | None,
    ) -> None:
        self._model, self._guide, self._arguments = model, guide, arguments
        self._constrain = constrain
        self._optim, self._closed = optim, closed
        self.learns = optim is not None or bool(closed)
        self._hyper_steps, self._hyper_every = hyper_steps, hyper_every
        self._structure = structure_for(model, guide.structure, arguments)
        self._subsampled = bool(self._structure.subsampled)
        # The bound of one step can be compared with that of the next only if both are
        # computed on the same data and the same draws.
        self._comparable = not self._subsampled and not guide.random_others
        self._bound = "augmented" if sites == "augmented" else "exact"
        self._starts_augmented = sites == "auto" and all(
            site.augmented for site in self._structure.observed if site.latents
        )
        self._step_size = step_size
        self._fixed_fields: dict[str, Any] | None = None

    @cached_property
    def _schedule(self) -> Schedule:
        # Not made for an evaluation: its data may not be those of the steps.
        return as_schedule(
            self._step_size, None if self._comparable else epoch_length(self._structure)
        )

    def start(self, state: ConjugateState) -> Evaluation | tuple[()]:
        """What the first step of a loop needs; the fields are computed here, once, if
        they cannot change."""
        if self.learns or not self._comparable:
            return ()
        values, key = state.hyper.values, self._key(state)
        self._fixed_fields = self._fields(values, key, {})
        sites = self._sites(values, key, {}, self._fixed_fields)
        return sites.unevaluated(state.natural)

    def evaluate(self, state: ConjugateState) -> Evaluation:
        """The bound at a state, on all of its arguments' data."""
        values, key = state.hyper.values, self._key(state)
        fields = self._fixed_fields or self._fields(values, key, {})
        sites = self._sites(values, key, {}, fields)
        return sites.of_held().evaluate(sites.held(state.natural))

    def step(
        self, state: ConjugateState, evaluation: Evaluation | tuple[()]
    ) -> tuple[ConjugateState, Evaluation | tuple[()]]:
        """One step.

        :param state: the state.
        :param evaluation: the evaluation there, if :meth:`start` gave one.
        """
        if self._fixed_fields is not None and evaluation:
            return self._fixed_step(state, self._fixed_fields, evaluation)
        if not self._comparable:
            return self._batch_step(state), ()
        return self._joint_step(state), ()

    # The three kinds of step.

    def _fixed_step(
        self, state: ConjugateState, fields: dict[str, Any], evaluation: Evaluation
    ) -> tuple[ConjugateState, Evaluation]:
        """Full data, hyperparameters at rest: geometry and evaluation are reused."""
        key = self._key(state)
        sites = self._sites(state.hyper.values, key, {}, fields)
        fresh = ~jnp.isfinite(evaluation.bound)
        natural, evaluation, steps = self._sweep(sites, state, evaluation, fresh)
        state = state._replace(
            natural=natural, step_sizes=steps, bound=evaluation.bound
        )
        return state, evaluation

    def _joint_step(self, state: ConjugateState) -> ConjugateState:
        """Full data: the pending hyperparameter update, a sweep, a new gradient."""
        key = self._key(state)
        values = _moved(state.hyper)
        fields, pullback = self._fields_and_pullback(values, key, {})
        sites = self._sites(values, key, {}, fields)
        start = sites.unevaluated(state.natural)
        fresh = jnp.array(True)
        natural, evaluation, steps = self._sweep(sites, state, start, fresh)
        hyper = self._next_hyper(state, values, natural, key, {}, fields, pullback)
        new = state._replace(
            hyper=hyper, natural=natural, step_sizes=steps, bound=evaluation.bound
        )
        fell = ~(evaluation.bound >= state.bound - slack(evaluation))
        halved = state.hyper._replace(scale=state.hyper.scale / 2)
        refused = state._replace(hyper=halved)
        return _flagged(jax.tree.map(partial(jnp.where, fell), refused, new), hyper)

    def _batch_step(self, state: ConjugateState) -> ConjugateState:
        """A minibatch, or other latents drawn at random: no bound to compare with, so a
        decaying step instead."""
        key = self._key(state)
        indices, epochs = next_batch(self._structure, state.epochs, key)
        values = _moved(state.hyper)
        fields, pullback = self._fields_and_pullback(values, key, indices)
        whole = self._sites(values, key, indices, fields)
        self._refuse_adaptive(whole)
        natural, schedules, bound = damped_sweep(
            whole.of_held(), whole.held(state.natural), self._schedule, state.schedule,
            state.step, self._augmented(state),
        )  # fmt: skip
        hyper = self._next_hyper(state, values, natural, key, indices, fields, pullback)
        new = state._replace(
            hyper=hyper, natural=whole.put_back(state.natural, natural),
            schedule=schedules, epochs=epochs, bound=bound,
        )  # fmt: skip
        return _flagged(new, hyper)

    def _refuse_adaptive(self, sites: Sites) -> None:
        if isinstance(self._schedule, Adaptive) and any(
            rows is not None for rows in sites.latents.values()
        ):
            raise ValueError(
                "step_size='adaptive' averages gradients over steps, which do not "
                "concern the same latents when a process is called for some of them: "
                "use the default (RobbinsMonro) or a number"
            )

    # Their parts.

    def _sweep(
        self, sites: Sites, state: ConjugateState, evaluation: Evaluation, fresh: Array
    ) -> tuple[Natural, Evaluation, dict[str, Array]]:
        return backtracked_sweep(
            sites, state.natural, evaluation, state.step_sizes,
            getattr(self._schedule, "value", 1.0), self._augmented(state), fresh,
        )  # fmt: skip

    def _augmented(self, state: ConjugateState) -> Array | None:
        """Whether a step takes its sites from the augmented bound, to start safely."""
        return state.step == 0 if self._starts_augmented else None

    def _next_hyper(
        self, state: ConjugateState, values: dict[str, Any], *at: Any
    ) -> Hyper:
        """Hyperparameters with their next pending update, none between two of them."""
        hyper = state.hyper
        if self._hyper_every == 1 or not self.learns:
            return self._gradient_step(hyper, values, *at)
        still = jax.tree.map(jnp.zeros_like, hyper.update)
        due = (state.step + 1) % self._hyper_every == 0
        return lax.cond(
            due,
            lambda: self._gradient_step(hyper, values, *at),
            lambda: hyper._replace(values=values, update=still),
        )

    def _gradient_step(
        self,
        hyper: Hyper,
        values: dict[str, Any],
        natural: Natural,
        key: Array,
        indices: dict[str, Array],
        fields: dict[str, Any],
        pullback: Callable[[Any], Any],
    ) -> Hyper:
        """The next pending update of the hyperparameters, the blocks held fixed in
        whitened coordinates (the envelope theorem makes this the gradient of the
        optimised bound)."""
        if not self.learns:
            return hyper
        q = {name: moments(n) for name, n in natural.items()}

        def loss(values: dict[str, Any], fields: dict[str, Any]) -> Array:
            sites = self._sites(values, key, indices, fields)
            return -(sites if self._comparable else sites.of_held()).bound_at(q)

        def gradient(values: Any, fields: Any, pullback: Callable) -> Any:
            direct, through = jax.grad(loss, (0, 1))(values, fields)
            return jax.tree.map(jnp.add, direct, pullback(through)[0])

        def advance(
            at: Any, optim_state: Any, fields: Any, pullback: Callable
        ) -> tuple[Any, Any]:
            gradients = gradient(at, fields, pullback)
            updates = jax.tree.map(jnp.zeros_like, at)
            if self._optim is not None:
                updates, optim_state = self._optim.update(gradients, optim_state, at)
            if self._closed:
                sites = self._sites(at, key, indices, fields)
                marginals = {name: sites.marginals(name, q[name]) for name in q}
                problem, _ = self._problem(at, key, indices)
                updates |= self._maximised(problem, marginals, at, gradients)
            return jax.tree.map(jnp.add, at, updates), optim_state

        def further(_: Array, carry: tuple[Any, Any]) -> tuple[Any, Any]:
            return advance(*carry, *self._fields_and_pullback(carry[0], key, indices))

        carry = advance(values, hyper.optim_state, fields, pullback)
        if self._hyper_steps > 1:
            carry = lax.fori_loop(1, self._hyper_steps, further, carry)
        update = jax.tree.map(lambda a, b: a - b, carry[0], values)
        scale = jnp.minimum(1, 2 * hyper.scale)
        return Hyper(values, update, scale, carry[1])

    def _maximised(
        self,
        problem: BoundProblem,
        marginals: dict[str, Any],
        values: dict[str, Any],
        gradients: dict[str, Any],
    ) -> dict[str, Array]:
        """Updates of the params that are set in closed form; gradients of the loss."""
        carried = problem.predictors(marginals)
        return {
            p.name: p.update(problem, carried, values[p.name], -gradients[p.name])
            for p in self._closed
        }

    # The problem at given hyperparameters.

    def _problem(
        self, values: dict[str, Any], key: Array, indices: dict[str, Array]
    ) -> tuple[BoundProblem, dict[str, Any]]:
        """The model, and the trace of the other guide, drawn with ``key``."""
        params = self._constrain(values)
        args, kwargs = self._arguments.merge()
        seeded = handlers.seed(self._guide.draw_others, key)
        drawn = handlers.substitute(seeded, data={**params, **indices})
        trace = handlers.trace(drawn).get_trace(*args, **kwargs)
        others = {n: trace[n]["value"] for n in self._structure.others}
        filled = {**params, **others, **indices}
        problem = BoundProblem(
            self._structure, self._model, self._arguments, filled, key
        )
        return problem, trace

    def _fields(
        self, values: dict[str, Any], key: Array, indices: dict[str, Array]
    ) -> dict[str, Any]:
        return self._problem(values, key, indices)[0].fields()

    def _fields_and_pullback(
        self, values: dict[str, Any], key: Array, indices: dict[str, Array]
    ) -> tuple[dict[str, Any], Callable[[Any], Any]]:
        return jax.vjp(lambda values: self._fields(values, key, indices), values)

    def _sites(
        self,
        values: dict[str, Any],
        key: Array,
        indices: dict[str, Array],
        fields: dict[str, Any],
    ) -> Sites:
        problem, trace = self._problem(values, key, indices)
        priors = {
            name: (loc.reshape(-1, loc.shape[-1]), scale.reshape(-1, scale.shape[-1]))
            for name, (loc, scale) in problem.priors().items()
        }
        return Sites(
            fields=fields,
            priors=priors,
            scales={b.name: problem.block_scale(b) for b in self._structure.blocks},
            latents=problem.latents(),
            coupled=problem.coupled(),
            log_likelihood=partial(problem.expected_log_likelihood, bound=self._bound),
            constant=other_terms(problem, trace),
            dtype=jnp.result_type(*(b.dtype for b in self._structure.blocks)),
        )

    def _key(self, state: ConjugateState) -> Array:
        return random.fold_in(state.rng_key, state.step)


def _flagged(state: ConjugateState, hyper: Hyper) -> ConjugateState:
    """A bound of NaN if the gradient is not finite: every later step would be refused,
    and the fit would seem to have converged."""
    finite = [jnp.isfinite(x).all() for x in jax.tree.leaves(hyper.update)]
    if not finite:
        return state
    good = jnp.stack(finite).all()
    return state._replace(bound=jnp.where(good, state.bound, jnp.nan))


def _moved(hyper: Hyper) -> dict[str, Any]:
    """Hyperparameters after their pending update."""
    return jax.tree.map(lambda v, u: v + hyper.scale * u, hyper.values, hyper.update)
