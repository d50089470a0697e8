# SPDX-License-Identifier: Apache-2.0
"""Learning from batches that are not kept: the last posterior is the next prior, also
when its inducing inputs move."""

from __future__ import annotations

from collections.abc import Mapping
from typing import TYPE_CHECKING, Any

import jax
import jax.numpy as jnp
import numpy as np
from jax import Array

from numpyro_gpaug._display import NotPickled, Rows
from numpyro_gpaug._numpyro import one_thread
from numpyro_gpaug.gaussians.dense import Moments, NaturalGaussian, Prior
from numpyro_gpaug.gaussians.pseudo_data import projected
from numpyro_gpaug.gp.conditional import Conditional
from numpyro_gpaug.gp.process import GaussianProcess
from numpyro_gpaug.gp.projection import lead, project
from numpyro_gpaug.guides.continued import ContinuedGP, TrackedGP
from numpyro_gpaug.infer.vi.conjugate import ConjugateSVI
from numpyro_gpaug.infer.vi.plan import is_optax
from numpyro_gpaug.math.compiling import jit_for_few_runs
from numpyro_gpaug.math.linalg import precise
from numpyro_gpaug.model.arguments import Arguments, Model, Values
from numpyro_gpaug.model.columns import by_name
from numpyro_gpaug.model.sources import sources
from numpyro_gpaug.model.structure import Block, flat_functions, from_cache, run_model
from numpyro_gpaug.model.view import prior_of
from numpyro_gpaug.predict.mixture import Fitted
from numpyro_gpaug.predict.posterior import Posterior
from numpyro_gpaug.predict.predictor import differing, predictor_for

if TYPE_CHECKING:
    import optax

# The largest number of steps in one update. It ends earlier if the bound no longer
# rises.
STEPS = 50
SETTLED = 1e-3


class Stream(NotPickled, instead="save the posterior, stream.posterior.save(path)"):
    r"""A posterior that keeps learning from batches of data, which need not be kept.

    The posterior so far, :math:`q_{t-1}(v)` of the inducing values, is the prior of the
    next batch: :math:`q_t(v) \propto q_{t-1}(v) \prod_i t_i(v)` with the Gaussian
    factors :math:`t_i` of its data, found by the same closed-form updates.
    With a Normal likelihood, fixed inducing inputs and ``optim=None`` the result does
    not depend on the division into batches, and is the posterior of all data up to
    rounding. With other likelihoods, factors of old data are no longer improved.

    Hyperparameters are fixed, or tracked with ``optim``: learnt with every batch from
    the bound on its density given the data before,

    .. math::

        \mathrm{E}_q \log p(y_t | f, \theta) - \mathrm{KL}(q(u) \| p(u | \theta))
        + \mathrm{E}_q \log \frac{q_{t-1}(u)}{p(u | \theta_{t-1})}.

    The last term is the information of old data about the function values u at the
    inducing inputs, under the hyperparameters of their time. It distinguishes kernels,
    but has no information about hyperparameters of the likelihood itself (the scale of
    noise), which are learnt from one batch at a time.

    Inducing inputs may be added or moved with any batch: pass others in the model's
    keyword argument for them. The posterior is first moved to these,
    :math:`q(b) \propto p(b) \exp \mathrm{E}_{p(a | b)} \log q_{t-1}(a) / p(a)` for old
    inducing values a and new ones b, which is the nearest process in Kullback-Leibler
    divergence. The divergence is 0 if the new inputs include the old ones. Information
    at dropped inputs is kept to the extent that the remaining ones determine it.

    If the function drifts, a forgetting factor :math:`\gamma < 1` moves the posterior
    back towards the prior before each batch, :math:`q_{t-1}^\gamma p^{1 - \gamma}`:
    data of :math:`k` batches ago have weight :math:`\gamma^k`.

    :param posterior: the start: fitted to first data with
        :class:`~numpyro_gpaug.AutoSparseGP` in natural parameters, or loaded.
    :param forgetting: :math:`\gamma`, in (0, 1]; 1 forgets nothing.
    :param optim: how hyperparameters are tracked, as in
        :class:`~numpyro_gpaug.ConjugateSVI`: ``"lbfgs"``, to the optimum of every
        batch; an optax transformation, restarted with every batch, for up to 50
        updates, whose rate limits the change in one batch; ``None``, not at all.
        Inducing inputs that are a param stay fixed. In float32 a kernel matrix may be
        too close to singular to carry information from one lengthscale to another (a
        squared exponential with inducing inputs close together). The update then warns.
        A jitter of 1e-5 helps, unless noise is as small.
    :raises NotImplementedError: for a joint posterior
        (:class:`~numpyro_gpaug.AutoLatentGaussian`), and for one that averages over
        hyperparameters.
    :raises ValueError: for a forgetting factor outside of (0, 1].

    **Example**

    >>> import jax, numpyro, jax.numpy as jnp, numpyro.distributions as dist
    >>> import numpyro_gpaug as gpaug
    >>> def model(X, y=None, *, inducing):
    ...     gp = gpaug.GaussianProcess("f", gpaug.kernels.Matern52(1.0), inducing)
    ...     with numpyro.plate("data", X.shape[0]):
    ...         numpyro.sample("y", dist.Bernoulli(logits=gp(X)), obs=y)
    >>> X = jnp.linspace(-3, 3, 20)[:, None]
    >>> y, even = (X[:, 0] > 0).astype(int), slice(None, None, 2)
    >>> svi = gpaug.ConjugateSVI(model, gpaug.AutoSparseGP(model), None)
    >>> key, how = jax.random.key(0), dict(inducing=X[::4], progress_bar=False)
    >>> first = svi.posterior(svi.run(key, 20, X[even], y[even], **how))
    >>> stream = gpaug.Stream(first)
    >>> print(stream.update(X[1::2], y[1::2]).predict_y(X[:1]).probs.round(1))
    [0.3]

    New data extend to the right, and the inducing inputs follow:

    >>> more = jnp.concatenate([X[::4], X[::4] + 6])
    >>> moved = stream.update(X[even] + 6, y[even], inducing=more)
    >>> moved.predict_f(X + 6).mean.shape, len(more)
    ((20,), 10)

    Reference: Bui, Nguyen and Turner (2017), Streaming sparse Gaussian process
    approximations, section 3.1. If inducing inputs move while hyperparameters are
    tracked, both are updated one after the other, not with the joint bound.
    """

    def __init__(
        self,
        posterior: Posterior,
        forgetting: float = 1.0,
        optim: optax.GradientTransformation | str | None = None,
    ) -> None:
        if not isinstance(posterior, Posterior):
            raise TypeError(
                "a stream continues from a posterior, svi.posterior(result). Got a "
                f"{type(posterior).__name__}"
            )
        if not 0 < forgetting <= 1:
            raise ValueError(f"forgetting must be in (0, 1], got {forgetting}")
        if posterior.structure.joint:
            raise NotImplementedError(
                "a stream needs the posterior of an AutoSparseGP. With an "
                "AutoLatentGaussian fit all data again"
            )
        if posterior.is_mixture:
            raise NotImplementedError(
                "a stream needs one value of the hyperparameters, and this "
                "posterior averages over several (other=AutoNormal, NestedVI)"
            )
        self.posterior, self.forgetting = posterior, forgetting
        self._guide_of = ContinuedGP if optim is None else TrackedGP
        self._optim: Any = optim
        if is_optax(optim):
            self._optim = _of_what_has_gradients(optim)
        self.losses: list[float] = []
        self._moves = InducingMoves(posterior.model)
        self._begin(posterior.model)

    def _display(self) -> tuple[str, Rows]:
        title, rows = self.posterior._display()
        batches = "batches", str(len(self.losses)), f"forgetting {self.forgetting}"
        return title.replace("Posterior", "Stream", 1), [batches, *rows]

    def _begin(self, model: Any) -> None:
        """Make the programs of a model with a given number of inducing inputs."""
        self._guide = self._guide_of(model)
        self._svi = ConjugateSVI(model, self._guide, self._optim)
        self._moments: Any = one_thread(jax.jit(self._guide.moments))
        self._towards_prior: Any = one_thread(jax.jit(self._blended))

    def update(self, *args: Any, **kwargs: Any) -> Posterior:
        """Learn from a batch.

        :param args: the model's arguments at it, observations included. Batches of the
            same shape share a program.
        :param kwargs: its keyword arguments, if they differ from those before. New
            inducing inputs are kept, like those of a fit. The same number as before
            shares a program; another number compiles its own.
        :return: the posterior of all data so far, also ``stream.posterior``. The last
            entry of ``stream.losses`` is minus its bound on the log density of the
            batch given those before (and of the prior of hyperparameters). If inducing
            inputs moved, it includes the divergence of the moved process from the one
            before.
        :raises ValueError: for data that a fit rejects, and a batch without
            observations; for moved inducing inputs with other columns or another dtype,
            or that are a param or a positional argument; and for kernels and means that
            change.
        :raises NotImplementedError: for moving separate inducing inputs per latent.
        """
        # The next batch may be anywhere, and move inducing inputs.
        known = self.posterior.arguments
        told = {k: x for k, x in known.fingerprints.items() if k not in known.kwargs}
        known = known._replace(ranges={}, fingerprints=told)
        model = self.posterior.model
        passed = by_name(model, args) | kwargs
        if missing := [k for k in known.observations if passed.get(k) is None]:
            raise ValueError(
                f"a batch needs observations, and {missing} are missing, which the "
                "fit had. Call stream.update(X, y) with arrays of the batch"
            )
        args, kwargs = known.joined(model, args, kwargs)[0].merge()
        posterior, moments, lost = self._prior(args, kwargs)
        guide, values = self._guide_for(moments, args, kwargs), posterior.values
        params = {k: v for k, v in values.items() if k in guide.constraints}
        for name in guide.structure.others:
            params[f"{name}_auto_loc"] = values[name]
        arguments = Arguments.split(args, kwargs)
        structure = guide.structure_at(arguments)
        here = posterior.marked(arguments, structure)
        if (other := differing(here.marks, posterior.marks)) is not None:
            raise ValueError(
                f"the prior of {other!r} differs from the batches before. A stream "
                "keeps kernels and means; inducing inputs may move if they are a "
                "keyword argument that was passed to the fit"
            )
        earlier, gained = guide.going_on(arguments, values, moments)
        result = self._svi.run(
            jax.random.key(0), STEPS, *args, tol=SETTLED, progress_bar=False,
            init_params=params | earlier, **kwargs,
        )  # fmt: skip
        found, own = guide.split_params(result.params)
        self.losses.append(float(result.losses[-1]) + lost + float(gained))
        if self._optim is not None:
            values |= found | guide.other_median(found)
        after = posterior.moved(self._moments(own), values)
        self.posterior = after.marked(arguments, structure)
        return self.posterior

    def _prior(
        self, args: Any, kwargs: Any
    ) -> tuple[Posterior, dict[str, Moments], float]:
        """Return the information before a batch about processes at its inducing inputs:
        as a posterior, its moments after forgetting, and the nats that moving inducing
        inputs has lost."""
        posterior, values = self.posterior, self.posterior.values
        known, moments = posterior.arguments, posterior.moments
        old = self._moves.changed(args, kwargs, known.kwargs, values)
        if self.forgetting < 1:
            arguments = Arguments.split(args, kwargs)
            self._guide.setup(*args, **kwargs)
            moments = self._towards_prior(arguments, values, moments)
        if not old:
            return posterior, moments, 0.0
        before = Arguments.split(args, {**kwargs, **old})
        after = Arguments.split(args, kwargs)
        moments, lost = self._moves(before, after, values, moments)
        guide, new = self._guide_for(moments, args, kwargs), {k: kwargs[k] for k in old}
        if guide.structure.blocks == posterior.structure.blocks:
            return posterior.moved(moments, **new), moments, lost
        predictor = predictor_for(guide, posterior.model, guide.structure)
        at = Posterior(predictor, Fitted(values, moments), known.holding(new))
        return at, moments, lost

    def _guide_for(
        self, moments: dict[str, Moments], args: Any, kwargs: Any
    ) -> ContinuedGP:
        """Return the guide for a number of inducing inputs; only one is kept."""
        guide = self._guide.setup(*args, **kwargs)
        sizes = {b.name: b.shape[-1] for b in guide.structure.blocks}
        if any(q.mean.shape[-1] != sizes[name] for name, q in moments.items()):
            self._begin(guide.model)
            guide = self._guide.setup(*args, **kwargs)
        return guide

    def _blended(
        self, arguments: Arguments, values: Any, moments: dict[str, Moments]
    ) -> dict[str, Moments]:
        """Return ``q^g p^(1 - g)`` for every block, with the forgetting factor g.
        Priors of processes are standard normal, wherever inducing inputs are."""
        guide, share = self._guide, self.forgetting
        flat, key = flat_functions(guide.model), jax.random.key(0)
        trace = run_model(flat, arguments, key, values)

        def of_block(q: Moments, block: Block) -> Moments:
            prior = Prior(jnp.zeros_like(q.mean), jnp.ones_like(q.mean))
            if not block.is_process:
                prior = prior_of(block, trace)
            root = q.precision_root()
            precision = root @ root.mT
            potential = jnp.einsum("...ij,...j->...i", precision, q.mean)
            pairs = zip((potential, precision), prior.natural[:2], strict=True)
            blended = (share * x + (1 - share) * p for x, p in pairs)
            return NaturalGaussian(*blended).moments()

        blocks = guide.structure.blocks
        return {block.name: of_block(moments[block.name], block) for block in blocks}


def _of_what_has_gradients(optim: optax.GradientTransformation) -> Any:
    """Restrict a transformation to params that have gradients. Whatever else it does
    (decay), it must not change the information from old data."""

    def update(slopes: Any, state: Any, values: Any = None) -> tuple[Any, Any]:
        updates, state = optim.update(slopes, state, values)
        held = jax.tree.map(
            lambda u, slope: jnp.where((slope == 0).all(), 0, u), updates, slopes
        )
        return held, state

    return optim._replace(update=update)


# The largest relative difference of elements of a kernel matrix that two calls of the
# same program compute.
_SAME = 1e-4


class InducingMoves:
    """Moves of the inducing inputs of a model, compiled once per pair of shapes.

    :param model: the model.
    """

    def __init__(self, model: Model) -> None:
        self._model = model
        self._sources: dict[Any, tuple[str, ...]] = {}
        self._program: Any = one_thread(jit_for_few_runs(self._moved))

    def changed(
        self,
        args: tuple[Any, ...],
        kwargs: dict[str, Any],
        before: Values,
        values: Values,
    ) -> Values:
        """Return the old values of the arguments that determine inducing inputs, and
        have changed.

        :param args: the model's arguments.
        :param kwargs: its keyword arguments.
        :param before: the cached arguments before.
        :param values: values of params and other latents.
        :raises ValueError: for an argument that is the start of a param, because params
            are fixed.
        """
        others = {
            k: v for k, v in before.items() if k in kwargs and not _same(v, kwargs[k])
        }
        if not others:
            return {}
        inducing = self._origins(args, kwargs, values)
        found = {k: v for k, v in others.items() if k in inducing}
        if len(found) < len(others):
            # The initial values of params may depend on the arguments.
            started = self._origins(args, kwargs, {})
            if idle := [k for k in others if k in started and k not in inducing]:
                raise ValueError(
                    f"params of the model start at {idle} and stay at their fitted "
                    "values. A stream moves inducing inputs that are arguments of "
                    "the model, not params"
                )
        return found

    def _origins(
        self, args: tuple[Any, ...], kwargs: dict[str, Any], values: Values
    ) -> tuple[str, ...]:
        """Return the arguments from which inducing matrices are computed."""
        given = Arguments.split(args, kwargs)
        return from_cache(
            self._sources, (given.shapes, bool(values)),
            lambda: sources(self._model, *given.merge(), None, values).inducing,
        )  # fmt: skip

    def __call__(
        self,
        before: Arguments,
        after: Arguments,
        values: Values,
        moments: dict[str, Moments],
    ) -> tuple[dict[str, Moments], float]:
        """Return moments of all blocks at the new inducing inputs, and the divergence
        of the new processes from the old ones.

        :param before: the model's arguments with the old inducing inputs.
        :param after: the arguments with the new ones.
        :param values: values of params and other latents.
        :param moments: moments of the blocks.
        :raises ValueError: for inducing inputs with other columns or another dtype, and
            for hyperparameters that have changed with them.
        :raises NotImplementedError: for separate inducing inputs per latent.
        """
        moved, lost, shifts = self._program(before, after, values, moments)
        for name, shift in shifts.items():
            if not float(shift) < _SAME:
                raise ValueError(
                    f"the kernel of {name!r} differs at the new arguments. A stream "
                    "moves inducing inputs, and keeps hyperparameters fixed"
                )
        return moved, float(lost)

    @precise
    def _moved(
        self,
        before: Arguments,
        after: Arguments,
        values: Any,
        moments: dict[str, Moments],
    ) -> tuple[dict[str, Moments], Array, dict[str, Array]]:
        old, new = (self._processes(each, values) for each in (before, after))
        moved, lost, shifts = dict(moments), jnp.zeros(()), {}
        for name, gp in old.items():
            _check(name, gp, new[name])
            shifts[name] = _shift(gp, new[name])
            moved[name], each = projected(moments[name], _projection(gp, new[name]))
            lost += each.sum()
        return moved, lost, shifts

    def _processes(
        self, arguments: Arguments, values: Mapping[str, Any]
    ) -> dict[str, GaussianProcess]:
        flat = flat_functions(self._model)
        trace = run_model(flat, arguments, jax.random.key(0), dict(values))
        found = {name: site.get("fn") for name, site in trace.items()}
        return {n: fn.gp for n, fn in found.items() if isinstance(fn, Conditional)}


def _projection(old: GaussianProcess, new: GaussianProcess) -> Array:
    """Return covariances of the whitened values at new inducing inputs, in rows, with
    those at the old ones."""
    cross = project(new, new.whitener, old.inducing)
    return cross.projection @ old.inverse_factor.mT


def _shift(old: GaussianProcess, new: GaussianProcess) -> Array:
    """Return the change of the kernel, relative to its values."""
    grams = [lead(gp.kernel(old.inducing, old.inducing), 2) for gp in (old, new)]
    return jnp.abs(grams[0] - grams[1]).max() / jnp.abs(grams[0]).max()


def _check(name: str, old: GaussianProcess, new: GaussianProcess) -> None:
    shapes = old.inducing.shape, new.inducing.shape
    if any(len(shape) > 2 for shape in shapes):
        raise NotImplementedError(
            f"the inducing inputs of {name!r} have shape {shapes[1]} and had "
            f"{shapes[0]}. A stream moves one set that all latents share, (M, D)"
        )
    if shapes[0][1:] != shapes[1][1:]:
        raise ValueError(
            f"the inducing inputs of {name!r} have shape {shapes[1]} and had "
            f"{shapes[0]}. The number of columns must not change"
        )
    if old.inducing.dtype != new.inducing.dtype:
        raise ValueError(
            f"the inducing inputs of {name!r} have dtype {new.inducing.dtype}, and "
            f"those of the fit {old.inducing.dtype}"
        )


def _same(left: Any, right: Any) -> bool:
    leaves = [jax.tree.leaves(x) for x in (left, right)]
    if len(leaves[0]) != len(leaves[1]):
        return False
    pairs = zip(*leaves, strict=True)
    return all(x is y or np.array_equal(x, y) for x, y in pairs)
