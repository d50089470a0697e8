# SPDX-License-Identifier: Apache-2.0
"""The fitted posterior: prediction at new inputs, without the training data."""

from __future__ import annotations

import math
import warnings
from collections.abc import Callable, Mapping, Sequence
from contextlib import AbstractContextManager
from functools import wraps
from inspect import signature
from os import PathLike
from typing import TYPE_CHECKING, Any, ParamSpec, TypeVar

import jax
import numpy as np
import numpyro.distributions as dist
from jax import Array
from jax.typing import ArrayLike
from numpyro.distributions import Distribution

from numpyro_gpaug._display import NotPickled, Rows, brief, name_of
from numpyro_gpaug._numpyro import one_thread, whole_plates
from numpyro_gpaug.errors import NotConjugateError
from numpyro_gpaug.gaussians.dense import Moments
from numpyro_gpaug.guides.base import ProcessGuide
from numpyro_gpaug.math.arrays import in_dtype_of, is_traced
from numpyro_gpaug.model.arguments import Arguments, Model, Values
from numpyro_gpaug.model.calls import check_count, check_key
from numpyro_gpaug.model.closures import Version, watched
from numpyro_gpaug.model.columns import Columns, Labels, labelled
from numpyro_gpaug.model.costs import MAX_DENSE
from numpyro_gpaug.model.display import latent_rows, observed_rows
from numpyro_gpaug.model.latents import Structure
from numpyro_gpaug.model.left_out import LeftOut
from numpyro_gpaug.model.observations import check_observations
from numpyro_gpaug.model.sources import factors_of_rows
from numpyro_gpaug.model.structure import from_cache
from numpyro_gpaug.predict.answers import depending
from numpyro_gpaug.predict.archive import SavedFit, read_fit, write_fit
from numpyro_gpaug.predict.arguments import FitArguments
from numpyro_gpaug.predict.averages import Averages, AveragesWanted, Contrast, Of
from numpyro_gpaug.predict.calls import Calls
from numpyro_gpaug.predict.mixture import (
    LEAST_MEMBERS,
    Fitted,
    FunctionValues,
    WithoutData,
)
from numpyro_gpaug.predict.predictor import Predictor, Query, predictor_for
from numpyro_gpaug.predict.summary import (
    NO_SITES,
    KnownSites,
    SiteMoments,
    printed,
    table,
)

if TYPE_CHECKING:
    import pandas

BATCH_SIZE = 1024
# The error of an expectation by quadrature, in nats per datum, that users are told of.
MOST_ERROR = 1e-3

P = ParamSpec("P")
T = TypeVar("T")


def _within(
    context: Callable[[Version], AbstractContextManager[Any]], method: Callable[P, T]
) -> Callable[P, T]:
    """Decorate a method of a posterior so that it runs in a context of its version."""

    @wraps(method)
    def inside(*args: P.args, **kwargs: P.kwargs) -> T:
        self: Any = args[0]
        with context(self._predictor.version):
            return method(*args, **kwargs)

    return inside


def _in_its_dtype(method: Callable[P, T]) -> Callable[P, T]:
    """Decorate a method so that it computes in the dtype of the fit."""
    return _within(lambda version: in_dtype_of(version.doubles), method)


def _as_fitted(method: Callable[P, T]) -> Callable[P, T]:
    """Decorate a method that runs the model: it computes in the dtype of the fit, and
    requires that everything the model reads besides its arguments equals that of the
    fit."""
    return _within(Version.running, method)


class Posterior(NotPickled, instead="save(path) writes it, load(path, model) reads it"):
    """A fitted posterior; make it with ``svi.posterior(params)`` or :meth:`from_guide`.

    Predictions call the model again at new inputs. Pass the arguments that contain
    inputs, in their positions in the model, and leave out the observations, which
    become ``None``. Keyword arguments of the fit, such as ``inducing=Z``, are kept.
    Factors of the inducing matrices are computed once; a prediction then costs O(M^2)
    per point. If another autoguide draws latents (``other=AutoNormal``), predictions
    average over 64 of its draws with a fixed key: every prediction is a mixture. The
    same holds after :meth:`NestedVI.posterior <numpyro_gpaug.NestedVI.posterior>`, with
    the hyperparameters drawn there.

    :param predictor: the model, and function values under its guide; posteriors of the
        same model and guide share its compiled programs.
    :param fitted: params and point values of other latents, and the Gaussian blocks.
    :param arguments: a description of the arguments of the fit.
    :param known: moments of the Gaussian sites, and numbers of the same fit.

    All methods stream over rows in blocks of ``batch_size``, or of 128 for few rows.
    After :class:`~numpyro_gpaug.AutoSparseGP` blocks are padded to one shape: any
    number of rows costs one or two compilations, and predictions do not depend on it. A
    joint Gaussian takes up to 5000 rows at once, because they may be members of a
    latent. If the model provably treats every row alone, all numbers of rows after the
    first share programs of few sizes: rows are repeated, and the results are cut.
    Otherwise each new number of rows costs a compilation.

    Predictions have the dtype of the fit, for any later ``jax_enable_x64``. They run
    the model again. If a global that it reads has changed since the fit, they raise a
    :class:`~numpyro_gpaug.ModelChangedError`, which names it.
    """

    def __init__(
        self,
        predictor: Predictor,
        fitted: Fitted,
        arguments: FitArguments,
        known: KnownSites = NO_SITES,
    ) -> None:
        self._predictor, self._fitted = predictor, fitted
        #: The model.
        self.model: Callable[..., Any] = predictor.model
        #: The structure of the model.
        self.structure: Structure = predictor.structure
        #: The description of the arguments of the fit.
        self.arguments = arguments
        #: Checksums of the priors of the fit, by site.
        self.marks = known.marks
        self._sites, self._rule_errors = known.moments, known.rule_errors
        self._calls = Calls(predictor, fitted, arguments, known.marks)
        self._known: dict[str, Distribution] = {}
        #: Returns a mixture of more points, to leave out observations.
        self.finer: Callable[[], Posterior] | None = None

    @classmethod
    def from_guide(
        cls,
        model: Model,
        guide: ProcessGuide,
        params: Values,
        *args: Any,
        **kwargs: Any,
    ) -> Posterior:
        """Make a posterior from a guide, its params, and the arguments of the fit.

        :param model: the model.
        :param guide: its guide: :class:`~numpyro_gpaug.AutoSparseGP`, of any
            covariance, or :class:`~numpyro_gpaug.AutoFunctionSpaceGP`.
        :param params: params of model and guide.
        :param args: the model's arguments at the fit, observations included.
        :param kwargs: its keyword arguments.
        :raises ValueError: if params are missing, or if inducing inputs or
            hyperparameters are computed from a positional argument.
        """
        args, kwargs, labels = Columns.read(model, args, kwargs)
        return cls.of_guide(model, guide, params, args, kwargs, labels=labels)

    @classmethod
    @one_thread
    def of_guide(
        cls,
        model: Model,
        guide: ProcessGuide,
        params: Values,
        args: tuple[Any, ...],
        kwargs: dict[str, Any],
        version: Version | None = None,
        arguments: Arguments | None = None,
        *,
        whole: bool = True,
        labels: Labels | None = None,
    ) -> Posterior:
        """Make a posterior; see :meth:`from_guide`.

        :param model: the model.
        :param guide: its guide.
        :param params: params of model and guide.
        :param args: the model's arguments at the fit.
        :param kwargs: its keyword arguments.
        :param version: the version of everything the model read besides its arguments,
            if known.
        :param arguments: arguments of the fit, with added rows if programs for these
            exist.
        :param whole: whether the arguments contain all rows of the fit.
        :param labels: labels of the codes of arguments.
        :raises ModelChangedError: if the version has changed.
        """
        double = version.doubles if version is not None else params
        with in_dtype_of(double), watched(model).running(version):
            arguments = arguments or Arguments.split(args, kwargs)
            guide.prepare(arguments)
            structure = guide.structure_at(arguments)
            guide.check_params(params)
            fitted = Fitted.of_guide(guide, params)
            predictor = predictor_for(guide, model, structure)
            return cls.of_fit(
                predictor, fitted, structure, args, kwargs, arguments,
                whole=whole, labels=labels,
            )  # fmt: skip

    @classmethod
    def of_fit(
        cls,
        predictor: Predictor,
        fitted: Fitted,
        structure: Structure,
        args: tuple[Any, ...],
        kwargs: dict[str, Any],
        arguments: Arguments | None = None,
        *,
        whole: bool = True,
        labels: Labels | None = None,
    ) -> Posterior:
        """Make a posterior from the fitted quantities; see :meth:`from_guide`.

        :param predictor: the predictor of the model and its guide.
        :param fitted: the fitted quantities.
        :param structure: the structure of the model at the arguments of the fit.
        :param args: these arguments, observations included.
        :param kwargs: keyword arguments.
        :param arguments: both on the device, if they are there; possibly with added
            rows.
        :param whole: whether the arguments contain all rows of the fit.
        :param labels: labels of the codes of arguments.
        """
        arguments = arguments or Arguments.split(args, kwargs)
        fitted = predictor.completed(arguments, fitted)
        first = fitted.first.values
        origins = predictor.sources(arguments, structure, first)
        given = FitArguments.of_fit(
            predictor.model, structure, origins, args, kwargs, arguments
        )
        if not whole:  # one batch says nothing about others
            given = given._replace(ranges={}, rows=None)
        if labels:
            axes = predictor.axes(arguments, fitted, labels)
            given = given._replace(labels=labels, axes=axes)
        known = predictor.sites(arguments, fitted, structure)
        _warn_of_quadrature(known.rule_errors)
        return cls(predictor, fitted, given, known)

    @property
    def values(self) -> Values:
        """Params, and point values of latents that are not among the Gaussian ones."""
        return dict(self._fitted.values)

    @property
    def is_mixture(self) -> bool:
        """Whether predictions average over hyperparameters."""
        return self._fitted.members is not None

    @property
    @_in_its_dtype
    def moments(self) -> dict[str, Moments]:
        """Means and covariance factors of the Gaussian blocks, latent axis first. A
        process has the moments of its whitened inducing values."""
        return self._predictor.moments(self._fitted)

    def moved(
        self,
        moments: dict[str, Moments],
        values: Values | None = None,
        /,
        **kwargs: Any,
    ) -> Posterior:
        """Return the same posterior with other :attr:`moments`, :attr:`values` and
        keyword arguments. It shares the compiled programs."""
        fitted = Fitted(self.values if values is None else values, moments)
        # Where the rows of the fit were says nothing of those that moved it.
        known = self.arguments.holding(kwargs)._replace(ranges={}, rows=None)
        return Posterior(self._predictor, fitted, known)

    @_as_fitted
    def marked(self, arguments: Arguments, structure: Structure) -> Posterior:
        """Return the same posterior with the :attr:`marks` of a model at arguments.

        :param arguments: the model's arguments.
        :param structure: the structure of the model there.
        """
        known = self._predictor.sites(arguments, self._fitted, structure)
        return Posterior(self._predictor, self._fitted, self.arguments, known)

    @property
    def processes(self) -> tuple[str, ...]:
        """Names of the Gaussian processes, as :meth:`predict_f` takes them."""
        return self.structure.process_names

    @property
    def observed(self) -> tuple[str, ...]:
        """Names of the observed sites that depend on latents, which can be predicted.
        Factors (:func:`numpyro.factor`) are not among them."""
        return tuple(s.name for s in depending(self.structure) if not s.factor)

    @property
    def quadrature_errors(self) -> dict[str, float]:
        """The errors of expectations that were computed by quadrature, by observed
        site, in nats per datum: the mean absolute difference from a rule with half as
        many nodes more, at the posterior and the data of the fit. Making the posterior
        warns above 1e-3, which a density with a kink may reach. Empty if the comparison
        would take a matrix of more than 2^24 entries."""
        return dict(self._rule_errors)

    @property
    @_in_its_dtype
    def weights(self) -> dict[str, dist.MultivariateNormal]:
        """Posteriors of the plain Gaussian weight vectors, by site. They are too narrow
        if a process shares the predictor, because the fit makes both independent.

        **Example**

        >>> import jax, numpyro, jax.numpy as jnp, numpyro.distributions as dist
        >>> import numpyro_gpaug as gpaug
        >>> def model(X, y=None):
        ...     w = numpyro.sample("w", dist.Normal(jnp.zeros(2), 1.0).to_event(1))
        ...     with numpyro.plate("data", X.shape[0]):
        ...         numpyro.sample("y", dist.Bernoulli(logits=X @ w), obs=y)
        >>> X = jnp.array([[1.0, 0.0], [0.0, 1.0], [1.0, 1.0], [-1.0, 0.0]])
        >>> y = jnp.array([1, 0, 1, 0])
        >>> svi = gpaug.ConjugateSVI(model, gpaug.AutoSparseGP(model))
        >>> fit = svi.run(jax.random.key(0), 20, X, y, progress_bar=False)
        >>> w = svi.posterior(fit).weights["w"]
        >>> [f"{x:.1f}" for x in w.mean]
        ['0.9', '-0.1']
        """
        return self._predictor.weights(self._fitted)

    @_in_its_dtype
    def __getitem__(self, site: str) -> Distribution:
        """Return the posterior of a Gaussian latent: a normal, or a multivariate normal
        for a vector (only its marginals, from 2000 entries on). If hyperparameters are
        averaged over, it has the moments of the mixture.

        :param site: name of the sample site.
        :raises KeyError: if the site was not fitted jointly, and is not a weight
            vector.
        """
        if site in self._sites:
            # A covariance matrix needs a factorisation.
            return from_cache(self._known, site, lambda: self._sites[site].distribution)
        weights = self.weights
        if site not in weights:
            if site in self._fitted.values and not site.endswith("_auto_loc"):
                raise KeyError(
                    f"{site!r} is fixed at a value, which summary() shows. "
                    "NestedVI(model) gives hyperparameters a posterior"
                )
            known = [*self.processes]
            functions = f"the processes {known}, and" if known else "a process, or"
            raise KeyError(
                f"{site!r} is not among the Gaussian latents "
                f"{[*self._sites, *weights]}. predict_f(..., site=...) predicts "
                f"{functions} after AutoLatentGaussian or NestedVI a deterministic "
                "site. Draws of every site, hyperparameters included, are in "
                "nested.get_samples(), or after ConjugateSVI from numpyro.infer."
                "Predictive(model, guide=guide, params=result.params, num_samples=...)"
            )
        return weights[site]

    @_in_its_dtype
    def summary(self, prob: float = 0.9) -> pandas.DataFrame:
        """Return mean, standard deviation and three quantiles of every latent except
        whitened inducing values (:meth:`predict_f` has the process), in the rows and
        columns that ArviZ uses. Members of a plate that a categorical column of the fit
        indexes have its labels. Latents that are fixed at a value have only a mean.

        :param prob: the probability between the outer quantiles; by default these are
            the 5 and 95% quantiles.
        :return: a data frame, ``summary.loc["effect[2]", "mean"]``.
        """
        sites = dict(self._sites)
        for name, normal in self.weights.items():
            sites[name] = SiteMoments(normal.mean, normal.variance)
        found = table(sites, self._fitted.points, self._fitted.members, prob)
        axes, labels = self.arguments.axes, self.arguments.labels
        return found.rename(lambda x: labelled(x, axes, labels))

    def print_summary(self, prob: float = 0.9) -> None:
        """Print the table of :meth:`summary`, all of it, to two decimals."""
        print(printed(self.summary(prob)))

    # -- prediction -------------------------------------------------------------------

    @_as_fitted
    def predict_f(
        self,
        *args: Any,
        site: str | None = None,
        full_covariance: bool = False,
        batch_size: int = BATCH_SIZE,
        **kwargs: Any,
    ) -> FunctionValues:
        """Return posterior mean and variance of a Gaussian process, or, for jointly
        Gaussian latents, of any site that is affine in them. Latents in the plate of
        the data, such as an effect of each observation, get their prior;
        ``print(posterior)`` lists them.

        :param args: the model's arguments at new inputs, without observations.
        :param site: the process, if the model has several; or a Gaussian or
            deterministic site. The default is the predictor of the observed site: for
            likelihoods in closed form their parameter (``logits``), for others the
            affine values that the density depends on, before constants (offsets,
            cutpoints), scales and links.
        :param full_covariance: the covariance between all rows (O(N^2) memory, no
            streaming) instead of the variance.
        :param batch_size: rows per block; more if there are very many latents.
        :param kwargs: the model's keyword arguments, where they differ from the fit's.
        :return: ``mean`` and ``variance``, (N,) or (N, C), with ``sd``, ``quantile``
            and ``interval``.
        """
        name = self._predictor.named(site)
        called = self._calls.unobserved(args, kwargs)
        if full_covariance:
            return self._calls(Query("joint", name), called[0])
        return self._calls.stream(Query("f", name), called, batch_size)

    @_as_fitted
    def predict_y(
        self,
        *args: Any,
        site: str | None = None,
        batch_size: int = BATCH_SIZE,
        **kwargs: Any,
    ) -> Distribution:
        """Return the posterior predictive distribution of new observations with the
        latents integrated out: a NumPyro distribution (``.probs`` of a Bernoulli,
        ``.mean``, ``.variance``, ``.log_prob``, ``.sample``, and ``.icdf`` for
        intervals of real ones). Latents in the plate of the data belong to new data: an
        effect that data share needs a plate of its own, which they index.

        :param args: the model's arguments at new inputs, without observations. Those of
            another site condition the latents of their rows alone. To use them for
            groups and processes, which rows share, fit them too.
        :param site: which observed site, if the model has several.
        :param batch_size: rows per block; more if there are very many latents.
        :param kwargs: the model's keyword arguments, where they differ from the fit's.
        """
        observed = self._predictor.predicted(site)
        called = self._calls.unobserved(args, kwargs)
        return self._calls.stream(Query("y", observed.name), called, batch_size)

    @_as_fitted
    def average(
        self,
        *args: Any,
        of: Of = None,
        at: Mapping[str, Sequence[Any]] | None = None,
        by: ArrayLike | str | None = None,
        contrast: Contrast = None,
        weights: ArrayLike | None = None,
        site: str | None = None,
        num_draws: int = 1000,
        **kwargs: Any,
    ) -> Averages:
        """Average predictions over rows, on the scale of the response, and compare them
        at changed covariates.

        The average is taken within each joint draw of the latents, so that its interval
        contains the uncertainty that rows share, but not the noise of single
        observations. All draws, and thus all differences and ratios, use the same
        numbers: the call is deterministic.

        :param args: the model's arguments, without observations: the rows to average
            over.
        :param of: a function of the likelihood, a NumPyro distribution with one entry
            for each row: ``lambda d: 1 - d.cdf(2.0)``. The default is its mean, or
            the probabilities of its classes. The result must end in the shape of the
            observations; further axes before (times of a survival curve) are kept.
        :param at: new values of arguments, by name, one for each scenario:
            ``{"treated": [0, 1]}``. All rows get the value; arrays in the shape of the
            argument give each row its own (``{"age": [age, age + 1]}``). Several
            arguments change together.
        :param by: the group of each row, numbers or strings, or the name of an
            argument: averages are taken within groups. ``np.arange(n)`` keeps every
            row.
        :param contrast: ``"difference"`` or ``"ratio"`` of the averages of each further
            scenario and of the first one, or a function of two arrays, these averages
            in this order: ``lambda new, first: new / (1 - new) * (1 - first) / first``
            is an odds ratio.
        :param weights: weights of the rows, as for poststratification.
        :param site: which observed site, if the model has several.
        :param num_draws: the smallest number of joint draws. Standard errors of means
            are at most the posterior standard deviation divided by its root, and less
            the more linear the averages are.
        :param kwargs: the model's keyword arguments, where they differ from the fit's.
        :return: the averages: ``mean``, ``interval()``, ``probability(above=...)``,
            ``summary()`` and ``draws``.
        :raises ValueError: for arguments that do not fit together.
        :raises NotConjugateError: for an :class:`~numpyro_gpaug.AutoFunctionSpaceGP`.

        A process with fewer inducing inputs than data has a residual at each row, which
        is drawn for each row alone. Latents in the plate of the data are those of new
        rows, as in :meth:`predict_y`.

        **Example**

        >>> import jax, numpyro, jax.numpy as jnp, numpyro.distributions as dist
        >>> import numpyro_gpaug as gpaug
        >>> def model(treated, ward, cured=None):
        ...     b = numpyro.sample("b", dist.Normal(0, 1).expand([2]).to_event(1))
        ...     with numpyro.plate("wards", 3):
        ...         effect = numpyro.sample("effect", dist.Normal(0, 0.5))
        ...     logits = b[0] + b[1] * treated + effect[ward]
        ...     with numpyro.plate("data", len(ward)):
        ...         numpyro.sample("cured", dist.Bernoulli(logits=logits), obs=cured)
        >>> ward, treated = jnp.arange(60) % 3, jnp.arange(60) // 30
        >>> cured = (jnp.arange(60) % 5 < 1 + 2 * treated).astype(int)
        >>> svi = gpaug.ConjugateSVI(model, gpaug.AutoLatentGaussian(model))
        >>> key, rows = jax.random.key(0), (treated, ward)
        >>> fit = svi.run(key, 50, *rows, cured, progress_bar=False)
        >>> posterior, both = svi.posterior(fit), {"treated": [0, 1]}
        >>> print(posterior.average(*rows, at=both).mean.round(2))
        [0.27 0.56]
        >>> found = posterior.average(*rows, at=both, contrast="difference")
        >>> print(found.summary().round(1))
               mean   sd   5%  50%  95%
        1 - 0   0.3  0.1  0.1  0.3  0.4
        """
        check_count("num_draws", num_draws)
        observed = self._predictor.predicted(site)
        of_fit = self.arguments
        question = AveragesWanted.of(
            self.model, args, kwargs, of_fit.kwargs,
            at=at, by=by, contrast=contrast, weights=weights, labels=of_fit.labels,
        )  # fmt: skip
        draws = []
        for args, kwargs in question.scenarios:
            with warnings.catch_warnings():
                # Its codes are those of the labels that it was asked with.
                warnings.filterwarnings("ignore", ".* codes of the categories")
                arguments, _ = self._calls.unobserved(args, kwargs)
            given = observed.name, jax.random.key(0), num_draws, of, question.rows
            draws.append(self._calls.averages(arguments, *given))
        classes = {k: x for k, x in of_fit.labels.items() if k in of_fit.observations}
        members = self._fitted.members
        shares = None if members is None else np.asarray(members.log_weights)
        return question.answered(draws, shares, None if of else classes)

    @_as_fitted
    def log_prob(
        self,
        *args: Any,
        site: str | None = None,
        batch_size: int = BATCH_SIZE,
        **kwargs: Any,
    ) -> Array:
        """Return the log posterior predictive density of each held-out observation.

        :param args: the model's arguments, observations included: ``log_prob(X, y)``.
        :param site: which observed site, if the model has several.
        :param batch_size: rows per block; more if there are very many latents.
        :param kwargs: the model's keyword arguments, where they differ from the fit's.
        """
        observed = self._predictor.observed(site)
        called = self._calls.joined(args, kwargs)
        query, given = Query("log_prob", observed.name), (called, batch_size)
        if is_traced(called[0]):
            return self._calls.stream(query, *given)
        found = self._calls.stream(query.given(of_nodes=True), *given)
        # The program for all densities takes much longer to compile.
        if np.isnan(found).any():
            found = self._calls.stream(query, *given)
        if np.isnan(found).any():
            check_observations(whole_plates(self.model), self.structure, called[0])
        return found

    @_as_fitted
    def leave_one_out(
        self,
        *args: Any,
        site: str | None = None,
        batch_size: int = BATCH_SIZE,
        **kwargs: Any,
    ) -> Distribution:
        """Return the predictive distribution of each observation of the fit given all
        others, in closed form: its Gaussian factors are removed from the function
        values that it depends on. It is exact for Normal likelihoods and approximate
        for others; with several classes the log-density is too low rather than too
        high. Hyperparameters stay fixed, or, after
        :class:`~numpyro_gpaug.NestedVI`, follow their posterior without the
        observation. In a fit of :class:`~numpyro_gpaug.AutoSparseGP` observations that
        depend on the same function value are left out together.

        :param args: the model's arguments of the fit, observations included.
        :param site: the observed site, if the model has several.
        :param batch_size: rows per block; more if there are very many latents.
        :param kwargs: the model's keyword arguments, where they differ from the fit's.
        :raises NotConjugateError: unless each datum has one or two predictors of its
            own (no softmax of a joint Gaussian, no latents in the plate of the data);
            :func:`diagnostics.loo <numpyro_gpaug.diagnostics.loo>` accepts any fit.
        :raises ValueError: for rows that were not in the fit.

        Reference: Vehtari, Mononen, Tolvanen, Sivula and Winther (2016), Bayesian
        leave-one-out cross-validation approximations for Gaussian latent variable
        models.
        """
        if self.is_mixture and not self.structure.joint:
            raise NotConjugateError(
                "leave_one_out needs point values of the hyperparameters, or NestedVI. "
                "diagnostics.loo(diagnostics.to_datatree(...)) works for any fit"
            )
        if self.finer is not None:
            kwargs |= {"site": site, "batch_size": batch_size}
            return self.finer().leave_one_out(*args, **kwargs)
        observed = self._predictor.predicted(site)
        called = self._calls.joined(args, kwargs)
        query = Query("left_out", observed.name)
        found = self._calls.stream(query, called, batch_size)
        return self._without(found, called[0])

    @_as_fitted
    def leave_out(
        self, groups: ArrayLike, *args: Any, site: str | None = None, **kwargs: Any
    ) -> Distribution:
        """Return the predictive distribution of each observation of the fit given the
        observations of all other groups, in closed form: the Gaussian factors of its
        whole group are removed. With one subject, hospital or area for a group it
        predicts new ones; with blocks of time it predicts gaps.

        It is exact for Normal likelihoods and approximate for others. Hyperparameters
        stay fixed, or, after :class:`~numpyro_gpaug.NestedVI`, follow their posterior
        without the group: the weight of each point is divided by the density of the
        group there. The sum of ``log_prob`` is the score of a cross-validation that
        leaves out one group at a time; :func:`diagnostics.compare
        <numpyro_gpaug.diagnostics.compare>` compares models by it.

        :param groups: the group of each observation, numbers or strings, of the shape
            of the observations.
        :param args: the model's arguments of the fit, observations included.
        :param site: the observed site, if the model has several.
        :param kwargs: the model's keyword arguments, where they differ from the fit's.
        :raises NotConjugateError: for an :class:`~numpyro_gpaug.AutoSparseGP`, and
            unless each datum has one or two predictors of its own.
        :raises ValueError: for rows that were not in the fit, labels of another number
            of observations, and more than 5,000 observations, whose covariance is one
            matrix.

        Reference: Liu and Rue (2022), Leave-group-out cross-validation for latent
        Gaussian models.
        """
        if not self.structure.joint:
            raise NotConjugateError(
                "leave_out needs a fit of AutoLatentGaussian or NestedVI"
            )
        if self.finer is not None:
            return self.finer().leave_out(groups, *args, site=site, **kwargs)
        observed = self._predictor.predicted(site)
        arguments, _ = self._calls.joined(args, kwargs)
        labels = np.asarray(groups)
        if labels.size > MAX_DENSE:
            raise ValueError(
                f"leave_out takes the covariance of all {labels.size} observations as "
                f"one matrix, of at most {MAX_DENSE} rows. Use leave_one_out, or "
                "log_prob of a fit without some groups"
            )
        together = LeftOut.of(labels.ravel())
        query = Query("left_out", observed.name, {"together": together})
        found = self._calls.exactly(query, arguments)
        return self._without(found, arguments)

    def _without(self, found: Any, arguments: Arguments) -> Distribution:
        """Check predictions of data that were left out, and return their
        distribution."""
        self.arguments.refuse_other_rows(self.model, arguments)
        names = [s.name for s in self.structure.observed if s.factor and s.sources]
        if left := [*factors_of_rows(self.model, names, self.structure, arguments)]:
            warnings.warn(
                f"numpyro.factor {left[0]!r} is a likelihood of the data, and its "
                "terms are not left out. diagnostics.loo leaves them out if the factor "
                "is in the plate of the observations",
                stacklevel=4,
            )
        leaves = () if is_traced(arguments) else jax.tree.leaves(found)
        if any(np.isnan(leaf).any() for leaf in leaves):
            check_observations(whole_plates(self.model), self.structure, arguments)
            raise ValueError(
                "the posterior contains less information than these observations. Pass "
                "the rows that it was fitted to, and fit until the bound no longer "
                "rises. If one observation is thousands of times as informative as all "
                "others, float32 does not resolve the others: use float64, "
                "jax.config.update('jax_enable_x64', True)"
            )
        if not isinstance(found, WithoutData):
            return found
        several = not is_traced(arguments) and self._fitted.size != 1
        if several and found.worth.min() < LEAST_MEMBERS:
            warnings.warn(
                "without some of the observations the posterior of the hyperparameters "
                f"differs so much that its {self._fitted.size} points are worth "
                f"{found.worth.min():.1f}. Draw more, NestedVI(model, num_points="
                "2048), and use more, nested.posterior(num_points=1024)",
                stacklevel=4,
            )
        return found.distribution

    @_as_fitted
    def sample(
        self,
        key: Array,
        *args: Any,
        site: str | None = None,
        sample_shape: tuple[int, ...] = (),
        **kwargs: Any,
    ) -> Array:
        """Draw function values jointly at new inputs; O(N^3) in the number of rows.

        :param key: random key.
        :param args: the model's arguments at new inputs, without observations.
        :param site: the process, if the model has several.
        :param sample_shape: leading shape of the draws.
        :param kwargs: the model's keyword arguments, where they differ from the fit's.
        :return: ``sample_shape + (N,)`` or ``sample_shape + (N, C)``.
        """
        check_key(key)
        name = self._predictor.named(site)
        if "num_samples" in kwargs.keys() - signature(self.model).parameters:
            raise TypeError("sample takes sample_shape=(n,), not num_samples=n")
        arguments, _ = self._calls.unobserved(args, kwargs)
        draws = self._calls.draws(arguments, name, key, math.prod(sample_shape))
        return draws.reshape(*sample_shape, *draws.shape[1:])

    def _display(self) -> tuple[str, Rows]:
        points = [
            (name, str(np.shape(value)), f"fixed at {brief(value)}")
            for name, value in self._fitted.points.items()
        ]
        title = f"Posterior of {name_of(self.model)}"
        if self._fitted.size is not None:
            title += f", a mixture of {self._fitted.size}"
        seen = observed_rows(self.structure, self._rule_errors)
        return title, latent_rows(self.structure) + points + seen

    # -- saving -----------------------------------------------------------------------

    @_as_fitted
    def save(self, path: str | PathLike[str]) -> None:
        """Save plain arrays (``.npz``): values of params and other latents, moments of
        the Gaussian blocks, and keyword arguments of the fit. The file contains no
        code, no pickle, and no training data unless they were passed by keyword. It is
        replaced atomically.

        :param path: the file.
        :raises ValueError: for a value that is not made of arrays and plain numbers.
        """
        known = KnownSites(self._sites, self.marks, self._rule_errors)
        fit = SavedFit(self._predictor, self._fitted, self.arguments, known)
        write_fit(path, fit)

    @classmethod
    def load(
        cls, path: str | PathLike[str], model: Model, guide: ProcessGuide | None = None
    ) -> Posterior:
        """Load a file that :meth:`save` wrote; nothing is unpickled.

        :param path: the file.
        :param model: the model it was fitted with; its code may have been rewritten.
            Sites, classes and shapes are compared, and the covariance of inducing
            inputs. Priors, predictors and constants are compared at the same stand-ins
            for data and latents, up to a thousandth.
        :param guide: the guide it was fitted with, or a new one like it. It may be left
            out after :class:`~numpyro_gpaug.AutoLatentGaussian`,
            :class:`~numpyro_gpaug.NestedVI` and an :class:`~numpyro_gpaug.AutoSparseGP`
            that is not preconditioned, but not for an
            :class:`~numpyro_gpaug.AutoFunctionSpaceGP`, whose mean is code.
        :raises ArchiveError: for a file that is not from :meth:`save`, or is truncated,
            damaged or edited; and for another model, or another kind of guide, than in
            the fit.
        """
        return cls(*read_fit(path, model, guide))


def _warn_of_quadrature(errors: dict[str, float]) -> None:
    """Warn about expectations that quadrature does not resolve.

    :param errors: their errors by observed site, in nats per observation.
    """
    for site, error in errors.items():
        if error > MOST_ERROR:
            warnings.warn(
                f"the expectations of {site!r} are off by about {error:.1g} nats "
                "per datum. Its log-density has a kink, or changes within much "
                "less than a predictor's posterior standard deviation, which "
                "Gauss-Hermite quadrature does not resolve, or float32 rounds it "
                "(probs= near 0 or 1: write logits=). "
                "MCMC(EllipticalSlice(model)) draws from the exact posterior",
                stacklevel=5,
            )
