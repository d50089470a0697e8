# SPDX-License-Identifier: Apache-2.0
"""Predictions of sites from the Gaussians of a fit, for a view of the model at new
inputs."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, ClassVar

import jax
import jax.numpy as jnp
import numpy as np
from jax import Array, random
from numpyro import handlers
from numpyro.distributions import Distribution

from numpyro_gpaug._numpyro import residual_policy
from numpyro_gpaug.distributions.predictor_mixture import PredictorMixture
from numpyro_gpaug.errors import NotConjugateError
from numpyro_gpaug.gaussians.base import Marginals, gaussian_factors, selected
from numpyro_gpaug.gp.conditional import Conditional
from numpyro_gpaug.gp.markov import times_of
from numpyro_gpaug.guides.function_posterior import Fit, InducingPosterior
from numpyro_gpaug.likelihoods.expectations import (
    Route,
    base_distribution,
    feasible,
    predictive,
    through_wrappers,
)
from numpyro_gpaug.model.arguments import Arguments, Model
from numpyro_gpaug.model.expectation import of_site, scaled_sum
from numpyro_gpaug.model.inspect import structure_at
from numpyro_gpaug.model.joint_predictive import JointPredictiveView
from numpyro_gpaug.model.latents import JOINT, Structure
from numpyro_gpaug.model.left_out import LeftOut
from numpyro_gpaug.model.observations import check_shape
from numpyro_gpaug.model.structure import Observed, Trace, run_model
from numpyro_gpaug.model.view import Codes, ModelView
from numpyro_gpaug.model.whitened import whitened
from numpyro_gpaug.predict.added_rows import joint_draws
from numpyro_gpaug.predict.averages import Of, in_chunks, over_rows, pairs
from numpyro_gpaug.predict.mixture import FunctionValues, WithoutData

Drawn = tuple[Array, Array]


class Answers:
    """Predictions from an independent Gaussian for each process and weight vector.

    :param structure: the structure of the model.
    :param function_posterior: the posterior of function values, by the guide.
    """

    view: ClassVar[Any] = ModelView

    def __init__(self, structure: Any, function_posterior: Any) -> None:
        self._structure, self._posterior = structure, function_posterior

    def structure_at(self, model: Model, arguments: Arguments) -> Structure:
        """Return the structure of the model at these arguments."""
        return structure_at(self.with_times(model), self._structure, arguments)

    def with_times(self, model: Model) -> Model:
        """Return the model with as many times of chains of states as at the fit."""
        return model

    def named(self, site: str | None) -> str:
        """Return the name of the process to predict; for ``None`` the only one."""
        return one_of(self._structure.processes, site, "Gaussian process").name

    def observed(self, site: str | None) -> Observed:
        """Return the observed site with this name, or for ``None`` the only one that
        depends on latents (``handlers.condition`` turns latent sites into observed
        ones)."""
        return one_of(depending(self._structure), site, "observed site")

    def checks(self, view: Any, site: str) -> tuple[Codes, Any, Any]:
        """Return the codes and the marks of the model at new inputs, and how far
        predictors are from depending on one group each.

        :param view: the model at new inputs.
        :param site: the site to predict.
        """
        needed, whole = view.misfits_of(site)
        return Codes.of(view, needed), self.marks(view), whole

    def marks(self, view: Any) -> dict[str, Array]:
        """Return checksums of the priors on which predictions depend."""
        return self._posterior.marks(view)

    # Answers.

    def f(self, view: Any, fit: Fit, site: str) -> FunctionValues:
        """Return means and variances of function values."""
        outputs = view.predictors.outputs[site]
        mean, variance = self._posterior.marginals(view, fit)[site]
        return FunctionValues(outputs(mean), outputs.variances(variance))

    def joint(self, view: Any, fit: Fit, site: str) -> FunctionValues:
        """Return means and covariances of function values."""
        f, (mean, covariance) = self._latents(view, fit, site)
        return FunctionValues(f.outputs(mean), f.outputs.covariances(covariance))

    def draws(
        self,
        view: Any,
        fit: Fit,
        site: str,
        key: Array,
        num: int,
        unpadded: tuple[int, ...] | None = None,
    ) -> Drawn:
        """Return joint draws, and whether the covariance factorised.

        :param view: the model at new inputs.
        :param fit: the fitted quantities.
        :param site: the site to draw.
        :param key: random key.
        :param num: number of draws.
        :param unpadded: if rows were added, the shape of a draw for another number of
            rows.
        """
        f, (mean, covariance) = self._latents(view, fit, site)
        rows = () if unpadded is None else (mean.ndim - 1,)
        count = view.arguments.arrays[-1] if rows else None
        scale = f.prior_variance.mean(-1)
        draws, factorised = joint_draws(key, num, mean, covariance, scale, rows, count)
        return jax.vmap(f.outputs)(draws), factorised

    def _latents(
        self, view: ModelView, fit: Fit, site: str
    ) -> tuple[Conditional, FunctionValues]:
        block = one_of(self._structure.processes, site, "Gaussian process")
        f = view.conditional(block)
        measure = self._posterior.measure(f, fit, block)
        mean = f.select(measure.mean(f.X))
        return f, FunctionValues(mean, f.select(measure.kernel(f.X, f.X)))

    def y(self, view: Any, fit: Fit, site: str, *, given: bool = False) -> Distribution:
        """Return the distribution of new observations.

        :param view: the model at new inputs.
        :param fit: the fitted quantities.
        :param site: the observed site.
        :param given: whether the arguments contain the observations.
        """
        return self._predictive(self._posterior.marginals(view, fit), view, site)

    def left_out(self, view: Any, fit: Fit, site: str) -> Distribution:
        """Return the distribution of each observation given all others."""
        check_observed(site, view.message(site), "leave_one_out")
        return self._predictive(_left_out(self._posterior, view, fit), view, site)

    def average(
        self, view: Any, fit: Fit, site: str, key: Array, num: int, of: Of, rows: Any
    ) -> Array:
        """Return averages over rows of a function of the likelihood, (draws, groups,
        ...), within joint draws of the latents.

        :param view: the model at new inputs.
        :param fit: the fitted quantities.
        :param site: the observed site.
        :param key: random key.
        :param num: number of draws.
        :param of: the function; ``None`` for the mean.
        :param rows: groups and weights of the rows.
        """
        drawn = self._drawn(view, fit, site)

        def one(number: Array) -> Array:
            return over_rows(drawn(*pairs(key, number))[site]["fn"], of, rows)

        shapes = jax.eval_shape(lambda: drawn(key, jnp.ones(()))[site]["value"])
        return in_chunks(one, num, shapes.size + view.structure.size)

    def _drawn(self, view: Any, fit: Fit, site: str) -> Callable[[Array, Array], Trace]:
        """Return a function from a key, and a sign of the noise, to the trace of the
        model at latents that are drawn jointly."""
        if not isinstance(self._posterior, InducingPosterior):
            raise NotConjugateError(
                "average needs a posterior of inducing values. Average draws of "
                "functions, sample(key, ..., sample_shape=(1000,))"
            )
        model = residual_policy(view._model, "noise")

        def trace(key: Array, sign: Array) -> Trace:
            residuals, key = random.split(key)
            values = dict(view.values)
            for i, block in enumerate(self._structure.blocks):
                mean, whitener = fit.moments[block.name]
                noise = random.normal(random.fold_in(key, i), mean.shape, mean.dtype)
                moved = mean + sign * jnp.einsum("...kj,...k->...j", whitener, noise)
                values[block.site] = moved.reshape(block.shape)
            return run_model(model, view.arguments, residuals, values)

        return trace

    def log_prob(
        self, view: Any, fit: Fit, site: str, *, of_nodes: bool = False
    ) -> Array:
        """Return the density of observations.

        :param of_nodes: whether mixtures may return NaN where their nodes step over
            the peak of a likelihood.
        """
        fn, message = self.y(view, fit, site, given=True), view.message(site)
        observed = self.observed(site)
        check_observed(site, message, "log_prob")
        value = message["value"]
        if observed.correlated:
            # One density for each datum, which has several entries.
            mask = getattr(message["fn"], "_mask", True)
            return jnp.where(mask, fn.log_prob(value), 0)
        if observed.factor:
            return fn.log_prob(value)
        # Wrong labels would have a density of zero, or that of other labels.
        known = of_nodes and isinstance(fn, PredictorMixture)
        found = fn.log_prob_of_nodes(value) if known else fn.log_prob(value)
        inside = base_distribution(message["fn"]).support(value)
        density = jnp.where(inside, found, jnp.nan)
        return through_wrappers(message["fn"], lambda _: density)

    def _predictive(
        self, at: dict[str, Marginals], view: ModelView, site: str
    ) -> Distribution:
        observed = self.observed(site)
        if observed.route is not Route.CLOSED_FORM:
            raise NotConjugateError(
                f"site {site!r} has no closed-form predictive distribution. Draw "
                "from it with numpyro.infer.Predictive(model, guide=guide, "
                "params=params, num_samples=...)"
            )
        base = base_distribution(view.message(site)["fn"])
        return predictive(base, *of_site(view.predictors.marginals(at), observed))


class JointAnswers(Answers):
    """Predictions from one Gaussian on all latents: of any deterministic or Gaussian
    site that is affine in them, and of observations."""

    view = JointPredictiveView
    _structure: Structure

    def with_times(self, model: Model) -> Model:
        # Other processes have no such site.
        structure = self._structure
        shapes = {s.name: s.shape for s in structure.sites}
        times = {
            times_of(k): jnp.zeros(shapes.get(f"{k}.v", ())[:1], structure.dtype)
            for k in structure.process_names
        }
        return handlers.substitute(model, data=times)

    def named(self, site: str | None) -> str:
        """Return the name of the site to predict: a process, a deterministic or a
        Gaussian site; for ``None`` the predictor of the only observed site."""
        return site or self.observed(None).name

    def _extended(
        self, view: JointPredictiveView, fit: Fit, site: str, *, given: bool = False
    ) -> Any:
        """Return moments of the latents that the model has at these arguments: new
        members of a plate have their prior, and latents of new rows are conditioned on
        other observations of these rows."""
        correlated = [s.name for s in self._structure.observed if s.correlated]
        # The predictors of such data are rewritten together with the data.
        if not given and site in correlated and view.message(site)["is_observed"]:
            raise ValueError(
                f"site {site!r} is observed at these arguments, and its entries are "
                "correlated. Predict without its observations (None), or call "
                "log_prob for their density"
            )
        return view.given_rows(self._at_prior(view, fit), site)

    def _at_prior(self, view: JointPredictiveView, fit: Fit) -> Any:
        q: Any = fit.moments[JOINT]
        places = self._structure.places(view.structure)
        if np.array_equal(places, np.arange(q.mean.shape[-1])):
            return q
        return q.extended(view.prior, places)

    def f(self, view: Any, fit: Fit, site: str) -> FunctionValues:
        return FunctionValues(*view.moments(site, self._extended(view, fit, site)))

    def joint(self, view: Any, fit: Fit, site: str) -> FunctionValues:
        q, map_ = self._extended(view, fit, site), view.affine(site).matrices
        mean = map_.marginals(q).mean.reshape(view.shape(site))
        covariance = map_.covariance(q)[0]
        if view.structure.functions:
            covariance += view.residual_covariance(site)
        return FunctionValues(mean, covariance)

    def draws(
        self,
        view: Any,
        fit: Fit,
        site: str,
        key: Array,
        num: int,
        unpadded: tuple[int, ...] | None = None,
    ) -> Drawn:
        q, values = self._extended(view, fit, site), view.affine(site)

        def one(number: Array) -> Array:
            own = random.fold_in(key, number)
            noise = random.normal(own, (1, q.rank), q.mean.dtype)
            return values((q.mean + q.unwhiten(noise))[0])

        draws = in_chunks(one, num, view.structure.size)
        draws = draws.reshape(num, *view.shape(site))
        if not view.structure.functions:
            return draws, jnp.array(True)
        # Given the latents, functions vary by their residuals alone.
        mean, variance = view.moments(site, q)
        sizes = zip(mean.shape, unpadded or mean.shape, strict=True)
        rows = [i for i, (size, other) in enumerate(sizes) if size != other]
        count = view.arguments.arrays[-1] if rows else None
        zero, covariance = jnp.zeros_like(mean), view.residual_covariance(site)
        given = random.fold_in(key, num), num, zero, covariance, variance.mean()
        residuals, factorised = joint_draws(*given, rows, count)
        return draws + residuals, factorised

    def _drawn(self, view: Any, fit: Fit, site: str) -> Callable[[Array, Array], Trace]:
        q, structure = self._extended(view, fit, site), view.structure
        model, links = residual_policy(view._model, "noise"), view.links

        def trace(key: Array, sign: Array) -> Trace:
            residuals, key = random.split(key)
            noise = sign * random.normal(key, (1, q.rank), q.mean.dtype)
            z = structure.white((q.mean + q.unwhiten(noise))[0], links)
            numbers = whitened(model, structure.split(z), structure.fields)
            return run_model(numbers, view.arguments, residuals, view.values)

        return trace

    def y(self, view: Any, fit: Fit, site: str, *, given: bool = False) -> Distribution:
        q = self._extended(view, fit, site, given=given)
        return view.predictive(self.observed(site), q)

    def left_out(
        self,
        view: Any,
        fit: Fit,
        site: str,
        together: LeftOut | None = None,
        *,
        weighed: bool = False,
    ) -> Distribution | WithoutData:
        """Return the distribution of each observation given all others, or given the
        observations of other groups.

        :param view: the model at the rows of the fit, with their observations.
        :param fit: the fitted quantities.
        :param site: the observed site.
        :param together: the groups.
        :param weighed: whether this is a member of a mixture, whose weight without the
            data needs their density.
        """
        method = "leave_one_out" if together is None else "leave_out"
        check_observed(site, view.message(site), method)
        observed, q = self.observed(site), self._at_prior(view, fit)
        without = view.left_out(observed, q, together)
        found = without.predictive(observed, q)
        if not weighed:
            return found
        one = view.left_out(observed, q, None).predictive(observed, q)
        message = view.message(site)
        fn, scale = message["fn"], message["scale"]
        density = one.log_prob(feasible(fn, message["value"]))

        def counted(each: Array) -> Array:
            return scaled_sum(through_wrappers(fn, lambda _: each), scale)

        # By entry, also of data that the model declares as events: each is left out.
        counts = jax.grad(counted)(density)
        return WithoutData(found, without.log_density_left_out(q, density, counts))


def _left_out(posterior: object, view: ModelView, fit: Fit) -> dict[str, Marginals]:
    """Return marginals of every block's affine map, each value without its own factor.

    At the optimum of the bound the Gaussian of a block is its prior times Gaussian
    factors, one for each value, which follow from derivatives of the expected
    log-likelihood. The marginal of each value is divided by its factor, without the
    residual variance given the latents.

    :param posterior: the guide's posterior of function values.
    :param view: the model at rows of the fit, with their observations.
    :param fit: the fitted quantities.
    :raises NotConjugateError: for a posterior that is not a Gaussian on inducing
        values.
    """
    if not isinstance(posterior, InducingPosterior):
        raise NotConjugateError(
            "leave_one_out needs a fit of AutoSparseGP, whose function values have "
            "a Gaussian factor for each observation"
        )
    maps, chosen = view.maps(fit.factors), view.selected()
    at = posterior.marginals(view, fit)
    slopes = jax.grad(lambda at: view.expected_log_likelihood(at, "exact"))(at)
    found = {}
    for name, (mean, variance) in at.items():
        q = selected(fit.moments[name], chosen.get(name))
        residual = maps[name].given(q.mean).variance
        precision = gaussian_factors(at[name], slopes[name]).precision
        explained = variance - residual
        kept = 1 - precision * explained
        # These observations are not from the fit: its Gaussian contains less
        # information than the factor that is removed.
        without = jnp.where(kept > 0, explained / kept, jnp.nan)
        moved = mean - slopes[name].mean * without
        found[name] = Marginals(moved, residual + without)
    return found


def check_observed(site: str, message: dict[str, Any], method: str) -> None:
    """Raise if a method needs observations and there are none, or they have another
    shape.

    :param site: the observed site.
    :param message: NumPyro's message of the site.
    :param method: the name of the method.
    """
    if not message["is_observed"]:
        raise ValueError(
            f"{method} needs the observations of site {site!r}: {method}(X, y)"
        )
    check_shape(site, message)


def depending(structure: Structure) -> list[Observed]:
    """Return the observed sites that depend on latents."""
    return [s for s in structure.observed if s.route is not Route.CONSTANT]


def one_of(candidates: Any, name: str | None, what: str) -> Any:
    """Return the candidate with a name, or for ``None`` the only one.

    :raises ValueError: if there is none; it lists the names.
    """
    names = [c.name for c in candidates]
    if not names:
        raise ValueError(
            f"no {what} depends on Gaussian latents. If the posterior was made without "
            "the observations of the fit, pass them. Otherwise use draws of the other "
            "latents, such as NestedVI(model).get_samples(), with "
            "numpyro.infer.Predictive(model, samples)"
        )
    if name is None and len(names) == 1:
        return candidates[0]
    if name not in names:
        wrong = "" if name is None else f"{name!r} is no {what}. "
        raise ValueError(f"{wrong}Pass site=..., one of {names}")
    return candidates[names.index(name)]
