# SPDX-License-Identifier: Apache-2.0
"""A model of the hyperparameters alone, and the Gaussian latents at draws of these:
predictions, and draws."""

from __future__ import annotations

from collections.abc import Callable
from functools import cache, partial, update_wrapper
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import numpyro
from jax import Array, random

from numpyro_gpaug.infer.nested.bound import CollapsedBound, Start
from numpyro_gpaug.infer.nested.hyperparameters import (
    Hyperparameters,
    compiled,
    declared,
    sizes,
)
from numpyro_gpaug.infer.nested.programs import Evaluated, Programs
from numpyro_gpaug.infer.nested.setup import CollapsedBounds
from numpyro_gpaug.math.arrays import in_dtype_of, is_traced, nan_unless
from numpyro_gpaug.math.threads import threads_for
from numpyro_gpaug.model.arguments import Arguments, Model, Values
from numpyro_gpaug.model.calls import check_count, check_key
from numpyro_gpaug.model.closures import RunsModel, Version
from numpyro_gpaug.model.columns import Columns, Labels
from numpyro_gpaug.model.labels import refuse_unordered
from numpyro_gpaug.model.latents import JOINT
from numpyro_gpaug.model.validation import check_arguments
from numpyro_gpaug.predict import Posterior
from numpyro_gpaug.predict.mixture import Fitted, Members
from numpyro_gpaug.predict.predictor import predictor_for

SITE = "collapsed_bound"
# Points of a mixture by default; at most, once observations are left out; and the
# largest numbers of entries of all covariances and of predictions of rows at these (a
# prediction has up to 32 nodes, or 225 for two predictors).
_POINTS, _MOST_POINTS, _NUMBERS, _ROWS = 64, 512, 2**24, 2**21


def collapse(model: Model) -> CollapsedModel:
    r"""Make a NumPyro model of the hyperparameters of ``model`` alone, with its
    Gaussian latents integrated out by the best Gaussian approximation.

    Its density is the prior of the hyperparameters :math:`\theta` times
    :math:`\exp l(\theta)`, with

    .. math:: l(\theta) = \max_q \; \mathbb{E}_q \log p(y \mid z, \theta)
              - \mathrm{KL}(q \,\|\, p(z)),

    over Gaussians :math:`q` on all Gaussian latents jointly, whitened
    (:class:`~numpyro_gpaug.AutoLatentGaussian`), found by closed-form updates. With
    Normal likelihoods this is exactly :math:`\log p(y \mid \theta)`, so that NUTS on
    the collapsed model samples the posterior of :math:`\theta`. With others it is a
    lower bound, and the posterior is approximate: :class:`~numpyro_gpaug.NestedVI`
    corrects it. The same holds for a process with fewer inducing inputs than data,
    whose values keep their variance given inducing values.

    The gradient is the gradient of the bound at fixed q, which by the envelope theorem
    is exact at the optimum. Second derivatives
    (:class:`~numpyro.infer.autoguide.AutoLaplaceApproximation`) are differences of
    gradients; third derivatives are not available. :func:`jax.vmap` maps everything.
    The collapsed model is called like ``model``, observations included. Its sites are
    the hyperparameters, with the names, priors and plates that they have in ``model``,
    the params, and the factor ``"collapsed_bound"``. Deterministic sites are left out,
    because they may depend on latents.

    The result, a :class:`~numpyro_gpaug.CollapsedModel`, is called like any model. From
    draws of the hyperparameters, its ``posterior`` predicts, and its ``sample_latents``
    draws the latents. ``Predictive(model, draws)`` without them draws latents from
    their *prior*.

    :param model: a NumPyro model as :class:`~numpyro_gpaug.AutoLatentGaussian` takes
        it, on full data.
    :return: a NumPyro model, for :class:`~numpyro.infer.NUTS`,
        :class:`~numpyro.infer.SVI` or any other algorithm.
    :raises NotConjugateError: when called, for a model that is not of this form.
    :raises ValueError: when called, for invalid arguments, and plates that draw a
        subsample.

    **Example**

    >>> import jax, numpyro, jax.numpy as jnp, numpyro.distributions as dist
    >>> import numpyro_gpaug as gpaug
    >>> from numpyro.infer import MCMC, NUTS
    >>> def model(X, y=None):
    ...     scale = numpyro.sample("scale", dist.HalfNormal(1))
    ...     K = gpaug.kernels.Matern52(0.5)(X, X) + 1e-4 * jnp.eye(len(X))
    ...     f = numpyro.sample("f", dist.MultivariateNormal(jnp.zeros(len(X)), K))
    ...     with numpyro.plate("data", len(X)):
    ...         numpyro.sample("y", dist.Normal(f, scale), obs=y)
    >>> X = jnp.linspace(0, 1, 12)[:, None]
    >>> y = jnp.sin(6 * X[:, 0])
    >>> collapsed = gpaug.collapse(model)
    >>> kernel = NUTS(collapsed)
    >>> mcmc = MCMC(kernel, num_warmup=50, num_samples=50, progress_bar=False)
    >>> mcmc.run(jax.random.key(0), X, y)
    >>> sorted(mcmc.get_samples())
    ['scale']

    Its draws predict, and the latents can be drawn at each of them:

    >>> posterior = collapsed.posterior(mcmc.get_samples(), X, y)
    >>> bool(abs(posterior.predict_y(X).mean - y).max() < 0.5)
    True
    >>> draws = collapsed.sample_latents(jax.random.key(1), mcmc.get_samples(), X, y)
    >>> draws["f"].shape
    (50, 12)

    References: Khan and Lin (2017), Conjugate-computation variational inference;
    Lazaro-Gredilla and Titsias (2011), Variational heteroscedastic Gaussian process
    regression (the marginalised bound).
    """
    return CollapsedModel(model)


class CollapsedModel(RunsModel):
    """The result of :func:`~numpyro_gpaug.collapse`: a NumPyro model of the
    hyperparameters alone, with methods for latents and predictions.

    :param model: the model.
    """

    def __init__(self, model: Model) -> None:
        super().__init__(model)
        # The version of the model that others, such as NUTS, have compiled.
        self._compiled: Version | None = None
        update_wrapper(self, model)

    def _begin(self) -> None:
        self._bounds = CollapsedBounds(self.model, projected=False)

    def _dtype_of(self, samples: Values) -> Any:
        """Return the arrays that determine the dtype of draws."""
        return samples if self._compiled is None else self._compiled.doubles

    def __call__(self, *args: Any, **kwargs: Any) -> None:
        with self._watch.running(self._compiled), self._running():
            columns = Columns.read(self.model, args, kwargs)
            refuse_unordered(self.model, args, kwargs, columns)
            args, kwargs, _ = columns
            check_arguments(self.model, args, kwargs)
            arguments = Arguments.split(args, kwargs)
            bound = self._bounds.at(arguments, args, kwargs)
            args, kwargs = arguments.merge()  # NumPy arrays become JAX arrays
            trace = declared(self.model, bound.structure, args, kwargs)
            values = {name: site["value"] for name, site in trace.items()}
            found = bound(values, sizes(trace), arguments)
            if not is_traced((values, arguments)):
                bound.warn_of_rounding(values, arguments)
            if is_traced(arguments):
                found = nan_unless(bound.guide.valid(arguments), found)
            numpyro.factor(SITE, found)
        if is_traced((values, arguments)):
            self._compiled = self._version

    def posterior(
        self,
        samples: Values,
        *args: Any,
        num_points: int | None = None,
        **kwargs: Any,
    ) -> Posterior:
        r"""Return predictions averaged over draws of the hyperparameters: mixtures, as
        for :meth:`NestedVI.posterior <numpyro_gpaug.NestedVI.posterior>`.

        Given hyperparameters the latents have the Gaussian that attains the bound. It
        is their posterior for Normal likelihoods, and an approximation for others, like
        the draws themselves.

        :param samples: hyperparameters by name, equally weighted, draws first, (draws,
            ...): ``mcmc.get_samples()``. Others are ignored.
        :param args: the model's arguments of the fit, observations included.
        :param num_points: number of draws in the mixtures, evenly spaced. Memory and
            time of a prediction grow with it. By default 64, and up to 512 for few
            latents and data once observations are left out.
        :param kwargs: the model's keyword arguments.
        :return: predictions, with the arguments and methods of
            :meth:`ConjugateSVI.posterior <numpyro_gpaug.ConjugateSVI.posterior>`'s.
        :raises ValueError: for draws that are missing or of another shape, and for
            params, which have no draws.
        """
        with in_dtype_of(self._dtype_of(samples)), self._running():
            arguments, programs, labels = self._read(args, kwargs)
            draws = AtDraws(programs, arguments, samples)

            def at(num: int) -> Posterior:
                values, moments = draws.gaussians(num)
                return mixture(programs, arguments, values, moments, labels=labels)

            size = programs.structure.size
            return of_points(at, num_points, size, arguments.num_rows)

    def sample_latents(
        self, key: Array, samples: Values, *args: Any, **kwargs: Any
    ) -> Values:
        """Draw all sites (hyperparameters, Gaussian latents and deterministic sites) in
        the form of NUTS draws of the whole model, so that ``Predictive(model, draws)``
        takes them. At each draw of the hyperparameters the latents are drawn once from
        the Gaussian that :meth:`posterior` uses there.

        :param key: random key.
        :param samples: as for :meth:`posterior`.
        :param args: the model's arguments of the fit, observations included.
        :param kwargs: the model's keyword arguments.
        :return: by name, draws first.
        :raises ValueError: as :meth:`posterior`.
        """
        check_key(key)
        with in_dtype_of(self._dtype_of(samples)), self._running():
            arguments, programs, _ = self._read(args, kwargs)
            return AtDraws(programs, arguments, samples).sites(key)

    def _read(self, args: Any, kwargs: Any) -> tuple[Arguments, Programs, Labels]:
        args, kwargs, labels = Columns.read(self.model, args, kwargs)
        check_arguments(self.model, args, kwargs)
        arguments = Arguments.split(args, kwargs)
        bound = self._bounds.at(arguments, args, kwargs)
        refuse_params(bound, "draws of a collapsed model need")
        return arguments, self._bounds.programs(bound, arguments, 1), labels


def mixture(
    programs: Programs,
    arguments: Arguments,
    values: Values,
    moments: Any,
    log_weights: np.ndarray | None = None,
    labels: Labels | None = None,
) -> Posterior:
    """Average predictions over hyperparameters.

    :param programs: programs of the model.
    :param arguments: arguments of the fit.
    :param values: hyperparameters by name, with a leading axis (n,).
    :param moments: moments of the Gaussian given them, likewise.
    :param log_weights: normalised log-weights of the hyperparameters, (n,); equal by
        default.
    :param labels: labels of the codes of arguments.
    """
    bound = programs.bound
    if log_weights is None:
        num = len(jax.tree.leaves(moments)[0])
        log_weights = np.full(num, -np.log(num))
    weights = jnp.asarray(log_weights, programs.hyper.dtype)
    members = Members(weights, values, {JOINT: moments})
    model = bound.guide.model
    predictor = predictor_for(bound.guide, model, bound.structure)
    args, kwargs = arguments.counted().merge()
    return Posterior.of_fit(
        predictor, Fitted({}, {}, members), bound.structure, args, kwargs,
        arguments.counting_all(), labels=labels,
    )  # fmt: skip


def of_points(
    at: Callable[[int], Posterior], num_points: int | None, size: int, rows: int
) -> Posterior:
    """Return a mixture of some points, by default with one of more points, computed
    once observations are left out: without them the posterior of hyperparameters may be
    in the tails.

    :param at: returns a mixture of at most so many points.
    :param num_points: this number.
    :param size: the number of latents.
    :param rows: the number of data.
    """
    if num_points is not None:
        check_count("num_points", num_points)
        return at(num_points)
    found = at(_POINTS)
    many = min(_NUMBERS // size**2, _ROWS // max(rows, 1), _MOST_POINTS)
    if many > _POINTS:
        found.finer = cache(partial(at, many))
    return found


def refuse_params(bound: CollapsedBound, what: str) -> None:
    """Raise for params, which have no prior.

    :param what: what needs a prior, for the message.
    """
    if params := sorted(bound.structure.constraints):
        raise ValueError(
            f"params {params} have no prior: {what} sample sites. Write them as "
            "numpyro.sample(name, prior), or as plain numbers"
        )


class AtDraws:
    """The Gaussian at draws of the hyperparameters of a collapsed model.

    :param programs: programs of the model at its arguments.
    :param data: the model's arguments.
    :param samples: hyperparameters by name, (draws, ...); others are ignored.
    :raises ValueError: for draws that are missing or not of these shapes.
    """

    def __init__(self, programs: Programs, data: Arguments, samples: Values) -> None:
        self._programs, self._data = programs, data
        self._largest = programs.structure.largest
        self.points = _unconstrained(programs.hyper, data, samples)
        self._start = programs.no_start(data)
        with threads_for(self._largest):
            self._start = Start(self._at(self.points[:1]).factors, np.ones(1, bool))

    def gaussians(self, num: int) -> Any:
        """Return hyperparameters by name, and moments of the Gaussian, at some of the
        draws, evenly spaced.

        :param num: the maximum number of draws.
        """
        total = len(self.points)
        chosen = np.arange(min(num, total)) * total // min(num, total)
        with threads_for(self._largest):
            _, values, moments = self._programs.gaussians(
                self.points[chosen], self._start, self._data
            )
            return values, moments

    def sites(self, key: Array) -> Values:
        """Return values of all sites, with the Gaussian latents drawn once at each
        draw.

        :param key: random key.
        """
        programs, data = self._programs, self._data
        shape = len(self.points), programs.structure.form.rank
        noise = np.asarray(random.normal(key, shape, programs.structure.dtype))
        # One point after another, because the covariances of all points may not fit in
        # memory.
        with threads_for(self._largest):
            z = [
                programs.drawn(point, self._at(point[None]).factors, each, data)
                for point, each in zip(self.points, noise, strict=True)
            ]
            points = jnp.asarray(self.points, programs.hyper.dtype)
            found = programs.sites(points, np.stack(z), data)
            return jax.block_until_ready(found)

    def _at(self, points: np.ndarray) -> Evaluated:
        """Return the Gaussian at one point, (1, d)."""
        return self._programs.evaluate(points, self._start, self._data, gradient=True)


def _unconstrained(
    hyper: Hyperparameters, data: Arguments, samples: Values
) -> np.ndarray:
    flat = jax.ShapeDtypeStruct((hyper.size,), hyper.dtype)
    wanted = jax.eval_shape(lambda flat: hyper.values(flat, data)[0], flat)
    if missing := sorted(set(wanted) - set(samples)):
        raise ValueError(
            f"samples lack draws of the hyperparameters {missing}. They contain "
            f"{sorted(samples)}"
        )
    draws = {k: jnp.asarray(samples[k], x.dtype) for k, x in wanted.items()}
    counts = {x.shape[:1] for x in draws.values()}
    for name, x in wanted.items():
        found = draws[name].shape
        if found[1:] != x.shape or len(counts) > 1 or found[:1] == (0,):
            raise ValueError(
                f"draws of {name!r} have shape {found}, not (draws, "
                f"{', '.join(map(str, x.shape))}) with as many draws as the others: "
                "get_samples() without group_by_chain has one axis of draws"
            )
    if not draws:
        return np.zeros((1, 0))
    free = compiled(jax.vmap(hyper.flatten, in_axes=(0, None)))
    return np.asarray(free(draws, data), float)
