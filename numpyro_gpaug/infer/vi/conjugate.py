# SPDX-License-Identifier: Apache-2.0
"""Closed-form variational inference with the interface of NumPyro's ``SVI``."""

from __future__ import annotations

import operator
from collections.abc import Callable, Sequence
from typing import TYPE_CHECKING, Any

import jax
import jax.numpy as jnp
import numpy as np
from jax import Array, lax
from numpyro.infer.svi import SVIRunResult
from tqdm.auto import tqdm

from numpyro_gpaug.guides.sparse_gp import AutoSparseGP, natural_names
from numpyro_gpaug.infer.vi.schedules import Schedule, as_schedule
from numpyro_gpaug.infer.vi.start import Start
from numpyro_gpaug.infer.vi.stepper import (
    ConjugateState,
    Stepper,
)
from numpyro_gpaug.model.inspect import require_conjugate, structure_for
from numpyro_gpaug.model.structure import Arguments, Structure
from numpyro_gpaug.model.validation import (
    check_arguments,
    explain_failure,
)
from numpyro_gpaug.predict.posterior import Posterior

if TYPE_CHECKING:
    import optax

SITES = ("auto", "augmented", "exact")
CHUNK = 100


class ConjugateSVI:
    r"""Variational inference with closed-form (natural-gradient) updates of every
    Gaussian block, and gradient steps for hyperparameters on the same bound.

    Mirrors :class:`numpyro.infer.SVI`: ``init``, ``update``, ``run``, ``evaluate``,
    ``get_params``. One step moves each Gaussian block once, one block at a time, then
    computes an optax update of everything else.

    *Full data*: whole steps, halved while the bound falls. An update of the
    hyperparameters that makes the bound fall is undone and halved too, so that a step
    never lowers the bound by more than rounding (unless ``other`` draws latents at
    random). Near an optimum the rounding of many steps may add up.

    *Minibatches* (a plate with ``subsample_size``): shuffled epochs, a decaying step.
    Batches may also be passed in, ``update(state, X[idx], y[idx])`` inside
    ``plate(name, N, subsample_size=len(idx))``.

    :param model: a NumPyro model.
    :param guide: an :class:`~numpyro_gpaug.AutoSparseGP` with ``covariance="natural"``.
    :param optim: an optax transformation for hyperparameters, inducing inputs and the
        other guide's params; ``None`` keeps them fixed.
    :param sites: ``"augmented"`` (monotone whatever happens, looser bound), ``"exact"``
        (conjugate-computation VI, tighter), or ``"auto"``: one augmented step where the
        likelihood has one, then exact. ``"augmented"`` reports the augmented bound.
    :param step_size: a number in (0, 1], ``"adaptive"``, a schedule such as
        :class:`~numpyro_gpaug.infer.RobbinsMonro`, or ``None``: 1 on full data,
        ``RobbinsMonro(delay)`` on minibatches, the delay one epoch, within
        20 and 100 steps.
    :param hyper_steps: gradient steps after each closed-form step.
    :param hyper_every: closed-form steps between gradient steps: with more than one the
        posterior settles before hyperparameters move, and the steps between cost no
        gradient.
    :param m_step: names of params to set, instead, to the closed-form maximiser of the
        bound: one number that is (up to a factor) the ``scale`` of a ``Normal``,
        ``Laplace`` or ``PiecewiseNormal``, the ``max_rate`` of a ``LogisticPoisson``,
        the ``max_precision`` of a ``HeteroscedasticNormal``, or the free heights of a
        piecewise link. Full data only. Not the default: from a poor start a noise scale
        set to its maximiser takes all for noise.
    :raises ValueError: for unknown options.

    **Example**

    >>> import jax, numpyro, optax, jax.numpy as jnp, numpyro.distributions as dist
    >>> import numpyro_gpaug as gpaug
    >>> def model(X, y=None, *, inducing):
    ...     ls = numpyro.param("ls", 1.0, constraint=dist.constraints.positive)
    ...     gp = gpaug.GaussianProcess("f", gpaug.kernels.Matern52(ls), inducing)
    ...     with numpyro.plate("data", X.shape[0]):
    ...         numpyro.sample("y", dist.Bernoulli(logits=gp(X)), obs=y)
    >>> X = jnp.linspace(-3, 3, 20)[:, None]
    >>> y = (X[:, 0] > 0).astype(int)
    >>> svi = gpaug.ConjugateSVI(model, gpaug.AutoSparseGP(model), optax.adam(0.05))
    >>> result = svi.run(
    ...     jax.random.key(0), 50, X, y, inducing=X[::2], progress_bar=False
    ... )
    >>> print(svi.posterior(result.params).predict_y(X[:1]).probs.round(2))
    [0.25]

    References: Wenzel et al. (2019), Efficient Gaussian process classification using
    Polya-Gamma data augmentation; Khan and Lin (2017), Conjugate-computation
    variational inference.
    """

    def __init__(
        self,
        model: Callable[..., Any],
        guide: AutoSparseGP,
        optim: optax.GradientTransformation | None = None,
        sites: str = "auto",
        step_size: float | str | Schedule | None = None,
        hyper_steps: int = 1,
        hyper_every: int = 1,
        m_step: str | Sequence[str] = (),
    ) -> None:
        if sites not in SITES:
            raise ValueError(f"sites must be one of {SITES}, got {sites!r}")
        if not isinstance(guide, AutoSparseGP) or guide.covariance != "natural":
            raise ValueError(
                "ConjugateSVI moves natural parameters: it needs "
                "AutoSparseGP(model, covariance='natural'); other guides are fitted by "
                "numpyro.infer.SVI, with TraceAnalytic_ELBO() or, for an "
                "AutoFunctionSpaceGP, TraceWasserstein_ELBO()"
            )
        if optim is not None and not _is_optax(optim):
            raise ValueError(
                "optim must be an optax GradientTransformation (such as "
                f"optax.adam(1e-2)) or None, got {type(optim).__name__}"
            )
        for name, count in (("hyper_steps", hyper_steps), ("hyper_every", hyper_every)):
            if count < 1 or count != int(count):
                raise ValueError(f"{name} must be a whole number >= 1, got {count}")
        as_schedule(step_size, batches=1.0)
        self.model = model
        self.guide = guide
        self.optim = optim
        self.sites = sites
        self.step_size = step_size
        self.hyper_steps = hyper_steps
        self.hyper_every = hyper_every
        self.m_step = (m_step,) if isinstance(m_step, str) else tuple(m_step)
        self._start = Start(model, guide, optim, step_size, self.m_step)
        self._seen: tuple[tuple[Any, ...], dict[str, Any]] | None = None
        self._structures: dict[Any, tuple[Structure, Structure]] = {}
        # The state is donated: with many latents a second copy would not fit. Callers
        # pass in none that a user holds.
        self._advance = jax.jit(
            self._run_chunk, static_argnames="static", donate_argnames="state"
        )
        self._loss = jax.jit(self._evaluate, static_argnames="static")

    # -- the interface of SVI ---------------------------------------------------------

    def init(
        self,
        rng_key: Array,
        *args: Any,
        init_params: dict[str, Any] | None = None,
        **kwargs: Any,
    ) -> ConjugateState:
        """The initial state: every Gaussian block at its prior.

        :param rng_key: random key.
        :param args: the model's arguments.
        :param init_params: constrained values to start from instead, by param name.
        :param kwargs: the model's keyword arguments.
        :raises NotConjugateError: if a site has no closed-form update.
        :raises ValueError: for data that are not finite, of the wrong shape, or outside
            the likelihood's support.
        """
        check_arguments(self.model, args, kwargs)
        structure = self.guide.setup(*args, **kwargs).structure
        if not structure.blocks:
            raise ValueError(
                "the model has no Gaussian process and no Gaussian weights"
            )
        if not structure.observed:
            raise ValueError(
                "the model has no observed site: pass the observations (y) to init "
                "or run"
            )
        require_conjugate(structure, self.sites)
        self._seen = args, kwargs
        arguments = Arguments.split(args, kwargs)
        # Copied: the steps overwrite the state, and with it what it is made of.
        given = _copied(init_params or {})
        state = self._start.state(arguments, rng_key, given)
        return state._replace(hyper=_copied(state.hyper))

    def get_params(self, state: ConjugateState) -> dict[str, Any]:
        """Constrained params of model and guide, the natural parameters among them."""
        params = self._constrain(state.hyper.values)
        for block in self.guide.structure.blocks:
            natural = state.natural[block.name]
            shapes = block.shape, block.shape + block.shape[-1:]
            for name, x, shape in zip(
                natural_names(block), natural, shapes, strict=True
            ):
                params[name] = x.reshape(shape)
        return params

    def update(
        self, state: ConjugateState, *args: Any, **kwargs: Any
    ) -> tuple[ConjugateState, Array]:
        """One step.

        :return: the new state and the loss (minus the bound).
        """
        arguments = Arguments.split(args, kwargs)
        state = _copied(self._comparable_state(state, args, kwargs))
        state, losses, _ = self._advance(
            state, jnp.int32(1), jnp.zeros_like(state.bound), arguments.arrays,
            static=arguments.static,
        )  # fmt: skip
        return state, losses[0]

    def evaluate(self, state: ConjugateState, *args: Any, **kwargs: Any) -> Array:
        """The loss (minus the bound) of a state on these data."""
        arguments = Arguments.split(args, kwargs)
        return self._loss(state, arguments.arrays, static=arguments.static)

    def run(
        self,
        rng_key: Array,
        num_steps: int,
        *args: Any,
        progress_bar: bool = True,
        tol: float | None = None,
        init_state: ConjugateState | None = None,
        init_params: dict[str, Any] | None = None,
        **kwargs: Any,
    ) -> SVIRunResult:
        """Runs ``num_steps`` steps, or fewer if ``tol`` is met.

        :param rng_key: random key.
        :param num_steps: number of steps.
        :param args: the model's arguments.
        :param progress_bar: whether to show one; it is redrawn every 100 steps at most.
        :param tol: stop once the bound moves by less than ``tol`` nats: for three steps
            in a row (three times ``hyper_every``) on full data, from one epoch's mean
            to the next on minibatches.
        :param init_state: a state to continue from.
        :param init_params: constrained values to start from, by param name.
        :param kwargs: the model's keyword arguments.
        :return: params, state and the losses of the steps taken.
        :raises CholeskyError: if the bound is not finite, naming the likely cause.
        """
        if num_steps < 1:
            raise ValueError(f"num_steps must be at least 1, got {num_steps}")
        state = init_state
        if state is None:
            state = self.init(rng_key, *args, init_params=init_params, **kwargs)
        else:
            check_arguments(self.model, args, kwargs)
            if self._seen is None:
                self.init(rng_key, *args, init_params=init_params, **kwargs)
            state = _copied(self._comparable_state(state, args, kwargs))
        self._seen = args, kwargs
        arguments = Arguments.split(args, kwargs)
        subsampled = self._structure_at(arguments).subsampled
        if set(subsampled) != set(state.epochs):
            raise ValueError(
                f"the state was made for subsampled plates {sorted(state.epochs)}, but "
                f"the arguments subsample {sorted(subsampled)}: start a new run"
            )
        noisy = bool(subsampled) or self.guide.random_others
        epochs = [p.size // p.subsample_size for p in subsampled.values()]
        epoch = max(epochs, default=CHUNK if noisy else 0)
        limit = 0.0 if tol is None or noisy else tol
        losses: list[np.ndarray] = []
        taken = 0
        with tqdm(total=num_steps, disable=not progress_bar) as bar:
            while taken < num_steps:
                wanted = min(CHUNK, num_steps - taken)
                state, chunk, steps = self._advance(
                    state, jnp.int32(wanted), jnp.asarray(limit, state.bound.dtype),
                    arguments.arrays, static=arguments.static,
                )  # fmt: skip
                chunk = np.asarray(chunk)[: int(steps)]
                losses.append(chunk)
                taken += len(chunk)
                if not np.isfinite(chunk).all():
                    self._explain(state, args, kwargs)
                bar.update(len(chunk))
                bar.set_postfix_str(f"loss {chunk[-1]:.4f}", refresh=False)
                if len(chunk) < wanted or _settled(losses, epoch, tol):
                    break
        return SVIRunResult(self.get_params(state), state, np.concatenate(losses))

    # -- states and params ------------------------------------------------------------

    def _structure_at(self, arguments: Arguments) -> Structure:
        """The model's structure at these arguments; traced once for their shapes, as
        the compiled steps are."""
        shapes = tuple((x.shape, x.dtype) for x in arguments.arrays)
        found = self._structures.get((shapes, arguments.static))
        if found is None or found[0] is not self.guide.structure:
            whole = self.guide.structure
            found = whole, structure_for(self.model, whole, arguments)
            self._structures[shapes, arguments.static] = found
        return found[1]

    def _comparable_state(
        self, state: ConjugateState, args: Any, kwargs: Any
    ) -> ConjugateState:
        """The state, its bound forgotten if these are not the arrays of the last call:
        the bounds of different data must not be compared."""
        last, self._seen = self._seen, (args, kwargs)
        now, before = jax.tree.leaves((args, kwargs)), jax.tree.leaves(last)
        if len(now) == len(before) and all(map(operator.is_, now, before)):
            return state
        return state._replace(bound=jnp.full_like(state.bound, -jnp.inf))

    def _explain(self, state: ConjugateState, args: Any, kwargs: Any) -> None:
        # The natural parameters follow from the rest: they are never the cause.
        params = self._constrain(state.hyper.values)
        values = {**params, **self.guide.other_median(params)}
        blocks = self.guide.structure.blocks
        explain_failure(self.model, values, blocks, args, kwargs)

    def _constrain(self, values: dict[str, Any]) -> dict[str, Any]:
        return {
            k: jax.tree.map(self._start.transforms[k], v) for k, v in values.items()
        }

    # -- steps ----------------------------------------------------------------------

    def _run_chunk(
        self,
        state: ConjugateState,
        num_steps: Array,
        tol: Array,
        arrays: tuple[Array, ...],
        static: Any,
    ) -> tuple[ConjugateState, Array, Array]:
        """Up to ``num_steps`` (at most ``CHUNK``) steps in one compiled loop."""
        stepper = self._stepper(Arguments(arrays, static))
        losses = jnp.full((CHUNK,), jnp.nan, state.bound.dtype)
        # The bound rests between two updates of the hyperparameters.
        patience = 3 * self.hyper_every if stepper.learns else 3

        def going(carry: Any) -> Array:
            i, state, _, _ = carry
            return (i < num_steps) & ((tol <= 0) | (state.stalled < patience))

        def body(carry: Any) -> Any:
            i, state, evaluation, losses = carry
            new, evaluation = stepper.step(state, evaluation)
            # A refused update leaves the bound where it is: no sign of an optimum.
            accepted = new.hyper.scale >= state.hyper.scale
            still = accepted & (jnp.abs(new.bound - state.bound) < tol)
            stalled = jnp.where(still, state.stalled + 1, 0)
            new = new._replace(stalled=stalled, step=state.step + 1)
            return i + 1, new, evaluation, losses.at[i].set(-new.bound)

        start = (
            jnp.int32(0), state._replace(stalled=jnp.int32(0)), stepper.start(state),
            losses,
        )  # fmt: skip
        taken, state, _, losses = lax.while_loop(going, body, start)
        return state, losses, taken

    def _evaluate(
        self, state: ConjugateState, arrays: tuple[Array, ...], static: Any
    ) -> Array:
        return -self._stepper(Arguments(arrays, static)).evaluate(state).bound

    def _stepper(self, arguments: Arguments) -> Stepper:
        optim = self.optim if self._start.transforms else None
        return Stepper(
            self.model, self.guide, arguments, self._constrain, optim,
            self._start.closed, self.hyper_steps, self.hyper_every, self.sites,
            self.step_size,
        )  # fmt: skip

    def posterior(self, params: dict[str, Any]) -> Posterior:
        """The fitted posterior, for prediction.

        :param params: params of a fit, as in ``result.params``.
        :return: a :class:`~numpyro_gpaug.Posterior`.
        :raises RuntimeError: before ``init``.
        """
        if not isinstance(params, dict):
            raise TypeError(
                f"params is a {type(params).__name__}: pass result.params, or "
                "svi.get_params(state)"
            )
        if self._seen is None:
            raise RuntimeError("call init or run first, or use Posterior.from_guide")
        args, kwargs = self._seen
        return Posterior.from_guide(self.model, self.guide, params, *args, **kwargs)


def _copied(tree: Any) -> Any:
    return jax.tree.map(jnp.copy, tree)


def _is_optax(optim: Any) -> bool:
    """Told by its two functions: importing optax would cost every user its import."""
    return (
        callable(getattr(optim, "init", None))
        and callable(getattr(optim, "update", None))
        and not hasattr(optim, "get_params")
    )


def _settled(losses: list[np.ndarray], epoch: int, tol: float | None) -> bool:
    """Whether the mean loss of the last whole epoch moved by less than ``tol``."""
    if tol is None or epoch == 0:
        return False
    taken = np.concatenate(losses)
    if len(taken) < 2 * epoch:
        return False
    last, before = taken[-epoch:].mean(), taken[-2 * epoch : -epoch].mean()
    return bool(abs(last - before) < tol)
