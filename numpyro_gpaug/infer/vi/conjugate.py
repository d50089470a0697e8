# SPDX-License-Identifier: Apache-2.0
"""Closed-form variational inference with the interface of NumPyro's ``SVI``."""

from __future__ import annotations

import warnings
from collections.abc import Callable, Sequence
from contextlib import closing
from functools import partial, wraps
from inspect import signature
from typing import TYPE_CHECKING, Any, ParamSpec, TypeVar

import jax
import numpy as np
from jax import Array
from jax.sharding import Mesh
from tqdm.auto import tqdm

from numpyro_gpaug._display import NotPickled, Rows, name_of, of_posterior
from numpyro_gpaug._numpyro import one_thread
from numpyro_gpaug.guides import ConjugateGuide
from numpyro_gpaug.infer.vi.checks import (
    CheckedData,
    check_alike,
    check_run,
    warn_of_size,
    warn_of_units,
)
from numpyro_gpaug.infer.vi.feeds import InMemory, RunArguments
from numpyro_gpaug.infer.vi.loop import LEAST_RISE, Stop, copied
from numpyro_gpaug.infer.vi.plan import CHUNK, LBFGS, Plan, Settings, constrained
from numpyro_gpaug.infer.vi.programs import Programs
from numpyro_gpaug.infer.vi.progress import Guard, Progress
from numpyro_gpaug.infer.vi.quasi_newton import MISSED, promised_increase, warn_of_noise
from numpyro_gpaug.infer.vi.reach import warn_of_reach
from numpyro_gpaug.infer.vi.resolution import (
    LOST,
    check_precision,
    is_broken,
    warn_of_lost,
    warn_of_rounded,
)
from numpyro_gpaug.infer.vi.result import ConjugateResult
from numpyro_gpaug.infer.vi.schedules import Schedule
from numpyro_gpaug.infer.vi.state import ConjugateState, unknown_bound
from numpyro_gpaug.infer.vi.sweeps import MAX_HALVINGS
from numpyro_gpaug.math.arrays import in_dtype_of, nan_unless
from numpyro_gpaug.math.processes import all_or_none, spans_processes
from numpyro_gpaug.math.sharding import check_shards, on_mesh, partitioned, rows_mesh
from numpyro_gpaug.math.threads import threads_for
from numpyro_gpaug.model.arguments import Arguments, Model, Values
from numpyro_gpaug.model.calls import check_key
from numpyro_gpaug.model.closures import RunsModel
from numpyro_gpaug.model.columns import Columns
from numpyro_gpaug.model.labels import refuse_unordered
from numpyro_gpaug.model.responses import Responses
from numpyro_gpaug.model.validation import explain_failure
from numpyro_gpaug.predict.many import Posteriors
from numpyro_gpaug.predict.posterior import Posterior

if TYPE_CHECKING:
    import optax


_UNPICKLED = (
    "create it again from its model and guide. svi.posterior(result).save(path) saves "
    "a fit for predictions, numpyro_gpaug.infer.save_state saves a state to continue "
    "from, and results can be pickled"
)

# A guide keeps the compiled functions of so many other fits.
_MOST_KEPT = 7

P = ParamSpec("P")
T = TypeVar("T")


def _of_the_model_now(method: Callable[P, T]) -> Callable[P, T]:
    """Decorate a method of a fitter so that it uses the current model, since globals
    that the model reads may have changed, in the dtype of the state that it is given,
    since ``jax_enable_x64`` may have."""

    @wraps(method)
    def inside(*args: P.args, **kwargs: P.kwargs) -> T:
        self: Any = args[0]
        # A change that a callback makes belongs to the next run.
        settles = kwargs.get("callback") is None
        states = [x for x in args if isinstance(x, ConjugateState)]
        dtype = in_dtype_of([*states, kwargs.get("init_state")])
        with dtype, self._running(settles=settles):
            return method(*args, **kwargs)

    return inside


class ConjugateSVI(RunsModel, NotPickled, instead=_UNPICKLED):
    r"""Variational inference with closed-form (natural-gradient) updates of every
    Gaussian block; hyperparameters are learnt on the same bound.

    The interface is that of :class:`numpyro.infer.SVI`: ``init``, ``update``, ``run``,
    ``evaluate``, ``get_params``.

    *Full data*: one step evaluates the collapsed bound at hyperparameters that L-BFGS
    proposes. For this the Gaussian blocks are optimised one at a time, by whole steps
    that are halved while the bound falls. With several latents, Anderson acceleration
    updates all of them together as long as the bound rises. Without hyperparameters, or
    with an optax transformation, a step updates each block once.

    No step lowers the bound by more than rounding (unless ``other`` draws latents at
    random): an update of the hyperparameters that would do so is undone, and a shorter
    one is tried. If a kernel matrix is ill-conditioned, rounding in float32 can amount
    to nats. L-BFGS then continues where decreases may be rounding, keeps the best
    state, and the run warns.

    With fifty or more params without a natural scale, such as the weights of a network,
    a run begins with Adam, because second-order steps would change scales too far
    first. Adam takes a third of the steps, at most 300, at a rate of .01. L-BFGS
    continues from the highest bound.

    *Minibatches* (a plate with ``subsample_size``): epochs are shuffled, and the step
    size decays. A step is halved while the bound of its rows falls. An update of the
    hyperparameters after which the bound or its gradient is not finite (a kernel matrix
    that is singular in float32) is undone, the rate is halved, and the run warns; after
    ten of them it raises an error. Batches may also be passed in,
    ``update(state, X[idx], y[idx])`` inside ``plate(name, N,
    subsample_size=len(idx))``. A run evaluates the bound every 100 steps on fixed
    batches. If learning has made it fall for 200 steps, the run returns to the best
    state, continues at half the rate, and warns.

    *Data that do not fit into memory* are read during a run: pass
    :class:`~numpyro_gpaug.Batches` instead of the model's arguments, or
    :class:`~numpyro_gpaug.Blocks`. Every step uses all blocks.

    :param model: a NumPyro model.
    :param guide: an :class:`~numpyro_gpaug.AutoLatentGaussian`, one Gaussian on all
        Gaussian latents; or an :class:`~numpyro_gpaug.AutoSparseGP` with
        ``covariance="natural"``, for many independent processes.
    :param optim: how params of the model and of the other guide (hyperparameters,
        inducing inputs) are learnt: ``"lbfgs"`` on full data, which needs no learning
        rate; an optax transformation such as :func:`optax.adam`, which minibatches
        need; ``None`` keeps them as they are.
    :param updates: ``"augmented"`` (always monotone, looser bound), ``"exact"``
        (conjugate-computation VI, tighter), or ``"auto"``: one augmented step if the
        likelihood has one and is not log-concave, then exact steps. ``"augmented"``
        reports the augmented bound.
    :param step_size: a number in (0, 1], ``"adaptive"``, a schedule such as
        :class:`~numpyro_gpaug.infer.RobbinsMonro`, or ``None``: 1 on full data,
        ``RobbinsMonro(delay)`` on minibatches, the delay one epoch, within
        20 and 100 steps.
    :param hyper_steps: optax updates after each closed-form step.
    :param hyper_every: closed-form steps between optax updates, in which the posterior
        approaches its optimum without a gradient. By default every step has an optax
        update. On minibatches the posterior lags behind, and its gradient can drive
        hyperparameters far off: by default each entry of an update is clipped, in
        unconstrained units, to half the step size of the closed-form update. With a
        number, even 1, updates are not clipped.
    :param m_step: names of params that are set to the closed-form maximiser of the
        bound instead: one number that is (up to a factor) the ``scale`` of a
        ``Normal``, ``Laplace`` or ``PiecewiseNormal``, the ``max_rate`` of a
        ``LogisticPoisson``, the ``max_precision`` of a ``HeteroscedasticNormal``, or
        the free heights of a piecewise link. Full data only. It is not the default,
        because from a poor start a noise scale at its maximiser explains everything as
        noise.
    :param mesh: devices over whose first axis rows are sharded: all arrays with as many
        rows as the first. Full data are padded with rows of weight zero. The mesh is
        not needed for arrays that are on several devices already
        (:func:`jax.device_put` with a ``NamedSharding``), of one process or several. In
        one process the rows of each of :class:`~numpyro_gpaug.Batches` and
        :class:`~numpyro_gpaug.Blocks` are sharded. Devices exchange arrays of the size
        of the latents, and none with rows. An axis named ``"latents"`` shards the
        latents of processes with ``num_latents``: every device has only the posteriors
        of its part, and a softmax sends sums over classes, of the size of the rows.
    :raises ValueError: for unknown options.

    **Example**

    >>> import jax, numpyro, jax.numpy as jnp, numpyro.distributions as dist
    >>> import numpyro_gpaug as gpaug
    >>> def model(X, y=None, *, inducing):
    ...     ls = numpyro.param("ls", 1.0, constraint=dist.constraints.positive)
    ...     gp = gpaug.GaussianProcess("f", gpaug.kernels.Matern52(ls), inducing)
    ...     with numpyro.plate("data", X.shape[0]):
    ...         numpyro.sample("y", dist.Bernoulli(logits=gp(X)), obs=y)
    >>> X = jnp.linspace(-3, 3, 20)[:, None]
    >>> y = (X[:, 0] > 0).astype(int)
    >>> svi = gpaug.ConjugateSVI(model, gpaug.AutoSparseGP(model))
    >>> result = svi.run(
    ...     jax.random.key(0), 50, X, y, inducing=X[::2], progress_bar=False
    ... )
    >>> print(svi.posterior(result).predict_y(X[:1]).probs.round(2))
    [0.25]

    References: Wenzel et al. (2019), Efficient Gaussian process classification using
    Polya-Gamma data augmentation; Khan and Lin (2017), Conjugate-computation
    variational inference; Nocedal and Wright (2006), Numerical Optimization, chapter 7.
    """

    __getattr__ = of_posterior("svi.posterior(result)")

    def __init__(
        self,
        model: Model,
        guide: ConjugateGuide,
        optim: optax.GradientTransformation | str | None = LBFGS,
        updates: str = "auto",
        step_size: float | str | Schedule | None = None,
        hyper_steps: int = 1,
        hyper_every: int | None = None,
        m_step: str | Sequence[str] = (),
        mesh: Mesh | None = None,
    ) -> None:
        if isinstance(guide, type):
            name = guide.__name__
            raise TypeError(f"{name} is a class. Pass a guide, gpaug.{name}(model)")
        if not getattr(guide, "conjugate", False):
            raise ValueError(
                "ConjugateSVI changes natural parameters, so it needs "
                "AutoSparseGP(model, covariance='natural') or "
                "AutoLatentGaussian(model). Fit other guides by numpyro.infer.SVI, "
                "with TraceAnalytic_ELBO() or, for an AutoFunctionSpaceGP, "
                "TraceWasserstein_ELBO()"
            )
        m_step = (m_step,) if isinstance(m_step, str) else tuple(m_step)
        self.guide = guide
        self.settings = Settings(
            optim, updates, step_size, hyper_steps, hyper_every, m_step
        )
        self._mesh = rows_mesh(mesh, ())
        # By argument, all labels with which fits began.
        self._labels: dict[str, set[tuple[str, ...]]] = {}
        super().__init__(model)

    @one_thread
    def _begin(self) -> None:
        given, guide = (self._version, self.settings, self._mesh), self.guide
        self._checked = CheckedData(self.model, guide, self._mesh)
        known = [programs for of, programs in guide.programs if of == given]
        self._programs = known[0] if known else Programs(self.model, guide, *given[1:])
        kept = [x for x in guide.programs if x[1] is not self._programs]
        guide.programs = [*kept[-_MOST_KEPT:], (given, self._programs)]

    def _read(
        self, args: tuple[Any, ...], kwargs: dict[str, Any], *, begins: bool = False
    ) -> Columns:
        """Read the model's arguments. A state and params have no labels, so codes are
        those of the fit that made them.

        :param begins: whether a fit begins with these arguments.
        :raises ValueError: if fits with different labels may have made them.
        """
        known = {} if begins else {k: max(x) for k, x in self._labels.items()}
        found = Columns.read(self.model, args, kwargs, known or None)
        new = [k for k, x in found.labels.items() if x not in self._labels.get(k, ())]
        if begins and new:
            refuse_unordered(self.model, args, kwargs, found)
        if begins and self.guide.join(found.args, found.kwargs):
            self._begin()
        for name, labels in found.labels.items():
            seen = self._labels.setdefault(name, set())
            seen.add(labels)
            if not begins and len(seen) > 1:
                what = name.replace(".columns", ", the columns")
                raise ValueError(
                    f"{what}: fits of this ConjugateSVI had different labels, and "
                    "states and params do not state theirs. Make one ConjugateSVI for "
                    "each set of labels"
                )
        return found

    # -- the interface of SVI ---------------------------------------------------------

    @_of_the_model_now
    @one_thread
    def init(
        self,
        rng_key: Array,
        *args: Any,
        init_params: Values | None = None,
        **kwargs: Any,
    ) -> ConjugateState:
        """Return the initial state: every Gaussian block at its prior.

        :param rng_key: random key.
        :param args: the model's arguments, as :meth:`run` takes them.
        :param init_params: constrained values to start from instead, by param name.
        :param kwargs: the model's keyword arguments.
        :raises NotConjugateError: if a site has no closed-form update.
        :raises ValueError: for data that are not finite, of the wrong shape, or outside
            the likelihood's support.
        """
        check_key(rng_key)
        args, kwargs, _ = self._read(args, kwargs, begins=True)
        check_shards((args, kwargs))
        given = RunArguments.split(self._mesh, *partitioned((args, kwargs)))
        arguments = self._programs.check(given, begins=True).on(self._mesh)
        return self._programs.start(
            arguments, arguments, rng_key, init_params, given.batch
        )

    @one_thread
    def get_params(self, state: ConjugateState) -> Values:
        """Return constrained params of model and guide, including the natural
        parameters."""
        with in_dtype_of(state):
            return self._programs.read(state.hyper.values, state.natural)

    @_of_the_model_now
    @one_thread
    def update(
        self, state: ConjugateState, *args: Any, **kwargs: Any
    ) -> tuple[ConjugateState, Array]:
        """Take one step.

        :return: the new state and the loss (minus the bound). If state or data are
            traced, codes without a member, and data that depend on other groups than
            the guide was set up for, make both NaN.
        :raises ValueError: as :meth:`init` does, unless state or data are traced.
        """
        args, kwargs, _ = self._read(args, kwargs)
        arguments, data, valid = self._checked(state, *partitioned((args, kwargs)))
        self._programs.keep_up()
        plan = self._programs.plan_at(arguments, state)
        never = np.zeros((), state.bound.dtype)
        feed = InMemory(self._programs, plan, arguments, data)
        state, losses, *_ = feed.take(copied(state), 1, never)
        return nan_unless(valid, (state, losses[0]))

    @_of_the_model_now
    @one_thread
    def evaluate(self, state: ConjugateState, *args: Any, **kwargs: Any) -> Array:
        """Return the loss (minus the bound) of a state on these data; NaN as for
        :meth:`update`."""
        args, kwargs, _ = self._read(args, kwargs)
        arguments, _, valid = self._checked(state, *partitioned((args, kwargs)))
        self._programs.keep_up()
        plan = self._programs.plan_at(arguments, state)
        with on_mesh(arguments.mesh):
            loss = self._programs.loss(state, arguments, plan=plan)
            return nan_unless(valid, loss)

    @_of_the_model_now
    def run(
        self,
        rng_key: Array,
        num_steps: int,
        *args: Any,
        progress_bar: bool = True,
        tol: float | None = None,
        init_state: ConjugateState | None = None,
        init_params: Values | None = None,
        callback: Callable[[ConjugateState, np.ndarray], None] | None = None,
        **kwargs: Any,
    ) -> ConjugateResult:
        """Run ``num_steps`` steps, or fewer if ``tol`` is met.

        :param rng_key: random key.
        :param num_steps: number of steps, at most. L-BFGS needs 20 to 90 for a dozen
            params; each step evaluates the collapsed bound.
        :param args: the model's arguments, as arrays or as columns of pandas, polars or
            Arrow tables (categories become codes, and summaries show their labels); or
            :class:`~numpyro_gpaug.Batches` or :class:`~numpyro_gpaug.Blocks` of them,
            with all other arguments by name.
        :param progress_bar: whether to show one.
        :param tol: stop once the bound has improved by less than ``tol`` nats; 0 never
            stops a run.

            * With L-BFGS (default 1e-3): over five accepted steps, or earlier if its
              curvature, known in all directions, predicts less than a hundredth of
              ``tol`` for the next.
            * On full data at fixed hyperparameters: over three steps. A run also stops
              after a whole step that improves by less than a quarter of ``tol`` (or
              than rounding), if the step before improved too, and after an exact step.
            * With optax: over 40 (times ``hyper_every``) accepted steps, or a fifth of
              all steps if that is more. On minibatches, from the mean of one epoch to
              the next.

            Except with L-BFGS, ``None`` (the default) never stops a run either.
        :param init_state: a state to continue from. The run has its dtype, whatever
            ``jax_enable_x64`` is by now.
        :param init_params: constrained values to start from, by param name.
        :param callback: called with the current state and the losses so far, about once
            a second, or every ten seconds if steps are slow, and at least every 100
            steps: see :func:`~numpyro_gpaug.infer.save_state`.
        :param kwargs: the model's keyword arguments.
        :return: params, state and losses, with the arguments, for :meth:`posterior`. If
            rounding does not resolve the precision of latents (wide priors), they are
            from a second run, in a basis in which it does. After Ctrl-C they are the
            results so far, with a warning. Ctrl-C raises ``KeyboardInterrupt`` if no
            steps were left, or if it is the second one in the same script or notebook
            cell.
        :raises CholeskyError: if the bound is not finite, naming the likely cause.
        """
        check_run(rng_key, num_steps, tol)
        args, kwargs, labels = self._read(args, kwargs, begins=init_state is None)
        check_shards((args, kwargs))
        run = partial(
            self._run, rng_key, num_steps, args, kwargs, progress_bar=progress_bar,
            tol=tol, init_state=init_state, init_params=init_params, callback=callback,
        )  # fmt: skip
        found = run(turns=init_state is None) or run(turns=False)
        assert found is not None
        found.labels = labels
        return found

    @_of_the_model_now
    def run_many(
        self,
        rng_key: Array,
        num_steps: int,
        *args: Any,
        over: str | Sequence[str],
        progress_bar: bool = True,
        tol: float = LEAST_RISE,
        **kwargs: Any,
    ) -> Posteriors:
        """Fit the model to many responses that share no latents and no hyperparameters:
        genes, shops, sensors, imputed data sets, resampled data.

        Each fit is that of :meth:`run` to the data of its response. The fits run side
        by side in one compiled program (32 of a small model), which is called for one
        block of responses after the other, so that memory is bounded. With ``mesh=``
        the responses of a block are divided among the devices.

        A fit that fails has a verdict, and the others go on.

        :param rng_key: random key of every fit.
        :param num_steps: number of steps of each fit, at most.
        :param args: the model's arguments. Those in ``over`` have a leading axis over
            the responses, and all responses share the others.
        :param over: the name of an argument, or several names.
        :param progress_bar: whether to show one.
        :param tol: each fit stops as a :meth:`run` with this tolerance.
        :param kwargs: the model's keyword arguments.
        :return: the posteriors of all responses.
        :raises ValueError: for names that are not arguments, axes of different lengths,
            minibatches, and a model that cannot be fitted to any response.

        **Example**

        >>> import jax, numpyro, jax.numpy as jnp, numpyro.distributions as dist
        >>> import numpyro_gpaug as gpaug
        >>> def model(dose, y=None):
        ...     slope = numpyro.sample("slope", dist.Normal(0, 1))
        ...     with numpyro.plate("data", len(dose)):
        ...         numpyro.sample("y", dist.Poisson(jnp.exp(slope * dose)), obs=y)
        >>> dose = jnp.linspace(-1, 1, 6)
        >>> counts = jnp.array([[0, 1, 1, 2, 2, 4], [5, 3, 1, 1, 0, 0]])
        >>> svi = gpaug.ConjugateSVI(model, gpaug.AutoLatentGaussian(model))
        >>> fits = svi.run_many(
        ...     jax.random.key(0), 50, dose, counts, over="y", progress_bar=False
        ... )
        >>> print(fits["slope"].mean.round(1))
        [ 1.1 -1.4]
        """
        check_run(rng_key, num_steps, tol)
        args, kwargs, labels = self._read(args, kwargs, begins=True)
        responses = Responses.split(self.model, args, kwargs, over)
        with tqdm(total=responses.number, disable=not progress_bar) as bar:
            found = self._programs.fit_each(
                rng_key, num_steps, tol, responses, bar.update
            )
        found.labels = labels
        return found

    def _run(
        self,
        rng_key: Array,
        num_steps: int,
        args: tuple[Any, ...],
        kwargs: dict[str, Any],
        *,
        turns: bool,
        progress_bar: bool,
        tol: float | None,
        init_state: ConjugateState | None,
        init_params: Values | None,
        callback: Callable[[ConjugateState, np.ndarray], None] | None,
    ) -> ConjugateResult | None:
        """See :meth:`run`.

        :param turns: whether the guide may change to another basis.
        :return: ``None`` if the guide has changed its basis, and another run is needed.
        """
        given = RunArguments.split(self._mesh, *partitioned((args, kwargs)))
        mesh = rows_mesh(self._mesh, jax.tree.leaves((given.args, given.kwargs)))
        check_alike(mesh, rng_key, num_steps, tol, init_state)
        state, plan, feed = self._programs.begin_run(
            rng_key, init_state, init_params, given, num_steps
        )
        stop, guards = Stop(plan, tol), plan.noisy and plan.optim is not None
        guard = Guard(feed.bounds, num_steps if guards else 0)
        rate = float(state.hyper.scale) if guards else 1.0
        start = partial(self.init, rng_key, *args, init_params=init_params, **kwargs)
        turns = turns and given.batches is None and not plan.noisy
        losses: list[np.ndarray] = []
        pace = self._programs.pace(plan, max(feed.size, plan.work))
        several = spans_processes(feed.mesh)
        progress = Progress(num_steps, pace, progress_bar, several=several)
        with progress, closing(feed), threads_for(plan.structure.largest):
            while wanted := progress.next():
                taken = feed.steps(state, wanted, stop.tol)
                state, chunk = taken.state, taken.losses
                losses.append(chunk)
                # A bound of minus infinity is never the bound of a state.
                known = -chunk[-1:] > unknown_bound(chunk.dtype)
                if not (known.all() and np.isfinite(chunk).all()):
                    first = start() if init_state is None else state
                    broken = any(is_broken(x.natural) for x in (state, first))
                    if turns and broken and self._turn(first, given):
                        return None
                    for each in (state, first):
                        check_precision(each.natural, self.guide.structure)
                    explain_failure(
                        self.model, self._values(state), self.guide.structure,
                        given.args, given.kwargs,
                    )  # fmt: skip
                progress.took(losses[-1])
                short = len(losses[-1]) < wanted
                progress.at_rest = short or stop.settled(losses)
                state = guard(state, progress, np.concatenate(losses)[-CHUNK:])
                if several or callback is not None:
                    seen = copied(state), np.concatenate(losses)
                    # Only one process may run the callback. The others are told if it
                    # fails.
                    with all_or_none(feed.mesh):
                        if callback is not None:
                            self._watch.settle()
                            callback(*seen)
        # An interrupted run does not start again.
        turns = turns and progress.is_whole
        rounded = np.asarray(state.lost) > LOST
        ended = progress.at_rest and bool(0 < stop.tol < MISSED)
        if plan.searches:
            rounded |= promised_increase(state.hyper.optim_state, ended=ended) > MISSED
        if turns and rounded and self._turn(state, given):
            return None
        self._warn(state, plan, given, start if init_state is None else None, ended)
        if guards:
            guard.warn_of_failures(rate / float(state.hyper.scale))
        # The last loop may have no steps.
        found = np.concatenate(losses)
        if given.batches is None and not plan.noisy and len(found):
            loss, arguments = found[-1], Arguments.split(given.args, given.kwargs)
            if not warn_of_size(loss, arguments.num_rows):
                self._warn_of_no_step(state, arguments)
            # If all scales are fixed, the user has chosen them.
            if progress.at_rest and plan.transforms:
                at = self.model, plan.structure, given.args, given.kwargs
                warn_of_units(float(loss), *at)
        params = taken.params
        if params is None or state is not taken.state:
            params = self.get_params(state)
        return ConjugateResult(
            params, state, found, given.args, given.kwargs,
            guard.restored, stopped=progress.at_rest, version=self._version,
            whole=given.batches is None,
        )  # fmt: skip

    def _turn(self, state: ConjugateState, given: RunArguments) -> bool:
        """Whether the guide has changed to a basis that preserves more of the
        precision.

        :param state: the state of a fit with too large rounding errors.
        :param given: the arguments of the run.
        """
        arguments = Arguments.split(given.args, given.kwargs)
        if not self.guide.turn(arguments, self._values(state)):
            return False
        self._begin()
        return True

    def _warn(
        self,
        state: ConjugateState,
        plan: Plan,
        given: RunArguments,
        start: Callable[[], ConjugateState] | None,
        ended: bool,
    ) -> None:
        """Warn about properties of the fit that users should know.

        :param start: a function that returns the initial state, if none was given.
        :param ended: whether the last steps did not raise the bound.
        """
        if plan.searches:
            warn_of_noise(state.hyper.optim_state, plan.structure, ended=ended)
        warn_of_lost(state.lost, state.natural, plan.structure)
        warn_of_rounded(state.natural, plan.structure)
        if learns := plan.optim is not None:
            plan.warn_of_range(state.hyper.values)
        warn_of_reach(
            state, plan.structure, self.model, self._values,
            start if learns else None, given.args, given.kwargs,
        )  # fmt: skip

    def _warn_of_no_step(self, state: ConjugateState, arguments: Arguments) -> None:
        """Warn if no step is short enough, and a whole one has no finite bound."""
        sizes = [np.asarray(x).min() for x in state.step_sizes.values()]
        if min(sizes, default=1.0) > 2.0**-MAX_HALVINGS:
            return
        plan = self._programs.plan_at(arguments, state)
        if not np.isfinite(self._programs.ahead(state, arguments, plan=plan)):
            sites = [site.name for site in plan.structure.observed if site.latents]
            warnings.warn(
                f"the fit stopped early: a log-density of {sites} is not finite at "
                "likely values of its latents, where rounding makes a probability 0 "
                "or 1. Write it with logits=, jax.nn.log_sigmoid, jnp.log1p or "
                "jnp.expm1",
                stacklevel=5,
            )

    # -- states and params ------------------------------------------------------------

    def posterior(
        self, fit: ConjugateResult | dict[str, Any], *args: Any, **kwargs: Any
    ) -> Posterior:
        """Return the fitted posterior, for prediction.

        :param fit: the result of :meth:`run`; or params, followed by the arguments of
            the fit.
        :param args: the model's arguments at the fit, if ``fit`` is a dict of params.
        :param kwargs: its keyword arguments, likewise.
        :return: a :class:`~numpyro_gpaug.Posterior`.
        :raises ValueError: if params of the model or of the guide are missing.
        :raises ModelChangedError: if a global, or whatever else the model reads besides
            its arguments, has changed since the run.
        :raises TypeError: for params without arguments, and for a state.
        """
        version, whole = None, True
        args, kwargs, labels = self._read(args, kwargs)
        if isinstance(fit, ConjugateResult) and not args and not kwargs:
            args, kwargs, params = fit.args, fit.kwargs, fit.params
            version, whole, labels = fit.version, fit.whole, fit.labels
        elif isinstance(fit, dict):
            params = fit
        else:
            raise TypeError(
                f"got a {type(fit).__name__}. Pass the result of run, or params and "
                "the arguments of the fit, svi.posterior(svi.get_params(state), X, "
                "y)"
            )
        takes_arguments = bool(signature(self.model).parameters)
        if isinstance(fit, dict) and takes_arguments and not (args or kwargs):
            raise TypeError(
                "params alone do not state which data they were fitted to. Pass "
                "the result of run, svi.posterior(result), or also the arguments, "
                "svi.posterior(params, X, y)"
            )
        # Read at the place where the run was compiled.
        arguments = self._programs.padding(
            Arguments.split(*partitioned((args, kwargs)))
        )
        return Posterior.of_guide(
            self.model, self.guide, params, args, kwargs, version,
            arguments.counting_all(), whole=whole, labels=labels,
        )  # fmt: skip

    def _display(self) -> tuple[str, Rows]:
        given = self.settings
        learnt = {LBFGS: "by L-BFGS", None: "kept as they are"}
        searched = given.optim is None or given.optim == LBFGS
        rows = [
            ("model", name_of(self.model)),
            ("guide", repr(self.guide).split("\n")[0]),
            ("hyperparameters", learnt[given.optim] if searched else "by optax"),
            ("updates", given.updates),
        ]
        if given.m_step:
            rows.append(("m_step", ", ".join(given.m_step)))
        return "ConjugateSVI", rows

    def _values(self, state: ConjugateState) -> Values:
        """Return params and other latents."""
        params = constrained(self.guide, state.hyper.values)
        return {**params, **self.guide.other_median(params)}
