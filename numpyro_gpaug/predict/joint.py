# SPDX-License-Identifier: Apache-2.0
"""Predictions of latent Gaussian models."""

from __future__ import annotations

import warnings
from collections.abc import Callable
from functools import cache, partial
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import numpyro.distributions as dist
from jax import Array, random
from numpyro import handlers
from numpyro.distributions import Distribution

from numpyro_gpaug._numpyro import one_thread
from numpyro_gpaug.errors import NotConjugateError
from numpyro_gpaug.gp.markov import numbers_of, times_of
from numpyro_gpaug.guides.base import ProcessGuide
from numpyro_gpaug.guides.function_posterior import Fit
from numpyro_gpaug.math.compiling import few
from numpyro_gpaug.math.threads import threads_for
from numpyro_gpaug.model.affine import ROUNDING, check_groups
from numpyro_gpaug.model.arguments import Arguments
from numpyro_gpaug.model.inspect_joint import joint_structure_at
from numpyro_gpaug.model.jaxpr import dependence_tree
from numpyro_gpaug.model.joint_predictive import JointPredictiveView
from numpyro_gpaug.model.latents import JOINT, JointStructure
from numpyro_gpaug.model.sources import names_of_arrays
from numpyro_gpaug.model.structure import (
    Block,
    Structure,
    flat_functions,
    remembered,
    run_model,
)
from numpyro_gpaug.predict.added_rows import joint_draws
from numpyro_gpaug.predict.mixture import (
    Fitted,
    FunctionValues,
    averaged,
)
from numpyro_gpaug.predict.predictor import Predictor, check_observed
from numpyro_gpaug.predict.summary import MAX_JOINT, SiteMoments

# Of an expectation by quadrature, in nats per datum.
MOST_ERROR = 1e-3


class JointPredictor(Predictor):
    """Predictions of a model with jointly fitted Gaussian latents: of any deterministic
    or Gaussian site that is affine in them, and of observations.

    :param model: the model.
    :param structure: the structure of the model.
    :param guide: its guide.
    """

    structure: JointStructure

    def __init__(
        self, model: Any, structure: JointStructure, guide: ProcessGuide
    ) -> None:
        super().__init__(model, structure, guide)
        self._checks: dict[Any, Any] = {}
        self._weighing: dict[Any, tuple[str, ...]] = {}
        self._sites: dict[Any, Any] = {}
        self._covariances: dict[Any, Any] = {}
        self._times: dict[Any, Any] = {}

    @one_thread
    def check(
        self, arguments: Arguments, fitted: Fitted, marks: dict[str, Array], site: str
    ) -> bool:
        """Raise for group codes that the model does not have (JAX would silently use
        the last group), for values of a latent that differ from the fit's, and for
        latents that are too many for one matrix and depend on several groups.

        :param arguments: the model's arguments.
        :param fitted: the fitted quantities; for a mixture the first member is checked.
        :param marks: the checksum of the factors of the fit, from :meth:`sites`.
        :param site: the site to predict.
        :return: whether to predict by groups: there are many rows, and each of them
            depends on one group.
        """
        static = arguments.static  # the program outlives the arrays

        def checks(arrays: Any, fitted: Fitted) -> Any:
            view = self._view(arrays, static, fitted)
            gathers = view.gathers()
            indexed[:] = [gather for gather, _ in gathers]
            reached = [extremes for _, extremes in gathers]
            return reached, view.marks(), view.misfits_of(site)

        indexed: list[Any] = []
        program = remembered(
            self._checks, (arguments.shapes, site), lambda: (few(checks), indexed)
        )
        reached, here, (needed, whole) = program[0](arguments.arrays, fitted.first)
        check_groups(needed, f"values of {site!r}")
        for gather, extremes in zip(program[1], reached, strict=True):
            if wrong := gather.bad(extremes):
                raise ValueError(
                    f"{wrong}. A new group needs a plate with more members, and a step "
                    "beyond the last one a longer series. Make the size a keyword "
                    "argument of the model, and pass it here"
                )
        for name, mark in here.items():
            if not np.allclose(mark, marks[name], rtol=1e-3, atol=1e-5):
                if arguments.static[-1] is not None:
                    # It may depend on the rows.
                    return self.check(arguments.counted(), fitted, marks, site)
                raise NotConjugateError(
                    f"the covariance of {name!r} differs from the fit, which does "
                    "not determine its values elsewhere. Pass the graph, mesh or "
                    "points of the fit, or predict a process: "
                    f'gpaug.GaussianProcess("{name}", kernel, inducing)(X) can be '
                    "predicted at any X"
                )
        return float(whole) < ROUNDING

    @one_thread
    def weighing(self, arguments: Arguments, fitted: Fitted) -> tuple[str, ...]:
        static = arguments.static

        def slopes(arrays: dict[str, Array]) -> Array:
            given = tuple(arrays[str(i)] for i in range(len(arrays)))
            return self._view(given, static, fitted.first).slopes()

        def found() -> tuple[str, ...]:
            arrays = {str(i): x for i, x in enumerate(arguments.arrays)}
            used = dependence_tree(slopes, arrays).state
            names = names_of_arrays(self.model, *arguments.merge())
            return tuple(names[int(i)] for i in used)

        return remembered(self._weighing, arguments.shapes, found)

    def of_other_sites(self) -> str:
        """Explain, for a message, how to predict a site that is not a Gaussian
        latent."""
        return "predict_f(..., site=...) predicts deterministic sites"

    def block(self, site: str | None) -> Block:
        """Return the site to predict by name: a process, a deterministic or a Gaussian
        site; for ``None`` the predictor of the only observed site."""
        return Block(site or self.observed(None).name, "", (), None)

    def _known_at(self, arguments: Arguments) -> Callable[[Any, Fitted], Any]:
        """Compute what :meth:`sites` compiles, a pure function of arrays and of the
        fit: moments of all Gaussian sites, a checksum of their factors, and quadrature
        errors."""
        static = arguments.static  # the program outlives the arrays

        def sites(
            arrays: Any, fitted: Fitted
        ) -> tuple[dict[str, SiteMoments], Any, Any]:
            view = self._view(arrays, static, fitted)
            q = self._moments(fitted.own)[JOINT]
            found = {s.name: _site(view, s.name, q) for s in view.structure.sites}
            return found, view, q

        def known(arrays: Any, fitted: Fitted) -> Any:
            first, view, q = sites(arrays, fitted.first)
            marks, errors = view.marks(), view.rule_errors(q)
            if fitted.members is None:
                return first, marks, errors
            weights = jnp.exp(fitted.members.log_weights)
            means = {k: x.mean for k, x in first.items()}

            def about(fitted: Fitted) -> dict[str, SiteMoments]:
                each, *_ = sites(arrays, fitted)
                return {k: x.about(means[k]) for k, x in each.items()}

            total = averaged(about, fitted, weights)
            return {k: x.centred(means[k]) for k, x in total.items()}, marks, errors

        return known

    @one_thread
    def sites(
        self, arguments: Arguments, fitted: Fitted
    ) -> tuple[dict[str, SiteMoments], dict[str, Array], dict[str, float]]:
        """Return posteriors of all Gaussian sites at the arguments of the fit, a
        checksum of their factors, and quadrature errors by observed site. For a mixture
        the last two belong to its first member.

        :param arguments: the model's arguments.
        :param fitted: the fitted quantities.
        """
        program = remembered(
            self._sites, arguments.shapes, lambda: few(self._known_at(arguments))
        )
        with threads_for(self.structure.largest):
            found = program(arguments.arrays, fitted)
            # All results of a program are there at once.
            jax.block_until_ready(jax.tree.leaves(found)[:1])
        at, marks, errors = found
        # Inducing values are whitened: predict_f has the process.
        hidden = {x for k in self.structure.functions for x in numbers_of(k)}
        names = [s.name for s in self.structure.sites if s.name not in hidden]
        shown = {k: SiteMoments(*at[k]) for k in names}
        lost = {name: float(x) for name, x in errors.items()}
        flat = {k: x.mean for k, x in shown.items() if _is_small_vector(x.mean)}
        known = cache(partial(self.covariances, arguments, fitted, flat))
        for k in flat:
            one = partial(lambda k: known()[k], k)
            shown[k] = shown[k]._replace(covariance=one)
        return shown, marks, lost

    @one_thread
    def covariances(
        self, arguments: Arguments, fitted: Fitted, means: dict[str, Array]
    ) -> dict[str, Array]:
        """Return the covariances of Gaussian sites.

        :param arguments: the model's arguments.
        :param fitted: the fitted quantities.
        :param means: means of the sites in the mixture.
        """
        static = arguments.static  # the program outlives the arrays

        def covariances(arrays: Any, fitted: Fitted, means: dict[str, Array]) -> Any:
            def of_one(fitted: Fitted) -> dict[str, Array]:
                view = self._view(arrays, static, fitted)
                q, found = self._moments(fitted.own)[JOINT], {}
                for k, mean in means.items():
                    map_ = view.affine(k).matrices
                    shift = map_(q.mean)[0] - mean
                    found[k] = map_.covariance(q)[0] + jnp.outer(shift, shift)
                return found

            if fitted.members is None:
                return of_one(fitted)
            return averaged(of_one, fitted, jnp.exp(fitted.members.log_weights))

        program = remembered(
            self._covariances, arguments.shapes, lambda: few(covariances)
        )
        with threads_for(self.structure.largest), self.running():
            return jax.block_until_ready(program(arguments.arrays, fitted, means))

    def weights(self, fitted: Fitted) -> dict[str, dist.MultivariateNormal]:
        return {}

    def _view(
        self, arrays: Any, static: Any, fitted: Fitted, *, grouped: bool = False
    ) -> Any:
        view = super()._view(arrays, static, fitted)
        return view.of_groups() if grouped else view

    @one_thread
    def completed(self, arguments: Arguments, fitted: Fitted) -> Fitted:
        """Return the fitted quantities with the times of chains of states."""
        names = {times_of(name) for name in self.structure.process_names}
        if not names:
            return fitted
        static = arguments.static  # the program outlives the arrays

        def times(arrays: Any, values: dict[str, Any]) -> dict[str, Array]:
            flat = flat_functions(self._without_data())
            given = Arguments(arrays, static)
            trace = run_model(flat, given, random.key(0), values)
            return {k: site["value"] for k, site in trace.items() if k in names}

        program = remembered(self._times, arguments.shapes, lambda: few(times))
        found = program(arguments.arrays, fitted.first.values)
        return fitted._replace(values={**fitted.values, **found})

    _seen = JointPredictiveView

    @staticmethod
    def _structure_at(
        model: Callable[..., Any], structure: JointStructure, arguments: Arguments
    ) -> JointStructure:
        # As many times as states. Of other processes, which have no such site, they
        # mean nothing.
        shapes = {s.name: s.shape for s in structure.sites}
        times = {
            times_of(k): jnp.zeros(shapes.get(f"{k}.v", ())[:1], structure.dtype)
            for k in structure.process_names
        }
        known = handlers.substitute(model, data=times)
        return joint_structure_at(known, structure, arguments)

    def _stand_in(self, message: dict[str, Any]) -> Array:
        fn = message["fn"]
        return fn.support.feasible_like(jnp.zeros(fn.shape()))

    def _extended(self, view: JointPredictiveView, fit: Fit, site: str) -> Any:
        """Return moments of the latents that the model has at these arguments: new
        members of a plate have their prior, and latents of new rows are conditioned on
        other observations of these rows."""
        return view.given_rows(self._at_prior(view, fit), site)

    def _at_prior(self, view: JointPredictiveView, fit: Fit) -> Any:
        q: Any = fit.moments[JOINT]
        return q.extended(view.prior, self.structure.places(view.structure))

    def _f(self, view: Any, fit: Fit, site: str) -> FunctionValues:
        at = view.affine(site).matrices.marginals(self._extended(view, fit, site))
        return FunctionValues(*(x.reshape(view.shape(site)) for x in at))

    def _joint(self, view: Any, fit: Fit, site: str) -> FunctionValues:
        q, map_ = self._extended(view, fit, site), view.affine(site).matrices
        mean = map_.marginals(q).mean.reshape(view.shape(site))
        covariance = map_.covariance(q)[0]
        if view.structure.functions:
            covariance += view.residual_covariance(site)
        return FunctionValues(mean, covariance)

    def _draws(
        self,
        view: Any,
        fit: Fit,
        site: str,
        key: Array,
        num: int,
        unpadded: tuple[int, ...] | None = None,
    ) -> tuple[Array, Array]:
        if view.structure.functions:
            mean, covariance = self._joint(view, fit, site)
            scale = jnp.diagonal(covariance).mean()
            sizes = zip(mean.shape, unpadded or mean.shape, strict=True)
            rows = [i for i, (size, other) in enumerate(sizes) if size != other]
            count = view.arguments.arrays[-1] if rows else None
            return joint_draws(key, num, mean, covariance, scale, rows, count)
        q, values = self._extended(view, fit, site), view.affine(site)
        noise = random.normal(key, (num, q.rank), q.mean.dtype)
        moved = jax.vmap(lambda e: values(q.mean[0] + q.unwhiten(e[None])[0]))(noise)
        return moved.reshape(num, *view.shape(site)), jnp.array(True)

    def _left_out(self, view: Any, fit: Fit, site: str) -> Distribution:
        check_observed(site, view.message(site), "leave_one_out")
        observed, q = self.observed(site), self._at_prior(view, fit)
        return view.left_out(observed, q).predictive(observed, q)

    def _predictive(
        self, view: Any, fit: Fit, site: str
    ) -> tuple[Distribution, dict[str, Any]]:
        observed = self.observed(site)
        q = self._extended(view, fit, site)
        return view.predictive(observed, q), view.message(site)


def _is_small_vector(mean: Array) -> bool:
    return mean.ndim == 1 and len(mean) <= MAX_JOINT


def _site(view: Any, name: str, q: Any) -> SiteMoments:
    values, shape = view.affine(name), view.shape(name)
    at = values.matrices.marginals(q)
    mean, variance = (x.reshape(shape) for x in at)
    return SiteMoments(mean, variance)


def predictor_for(
    guide: ProcessGuide, model: Callable[..., Any], structure: Structure
) -> Predictor:
    """Return the predictor of a model and its guide, which is made once and cached on
    the guide.

    :param structure: the structure of the model, at any arguments.
    """
    found = guide.predictors.get(id(model))
    if found is not None and not found.is_current():
        found = None
    if found is not None and found.known is structure:
        return found
    known, structure = structure, structure.sizeless()
    if found is None or found.structure != structure:
        # It holds the model, whose id is thus not given away.
        joint = isinstance(structure, JointStructure)
        kind: Any = JointPredictor if joint else Predictor
        found = guide.predictors[id(model)] = kind(model, structure, guide)
    found.known = known
    return found


def warn_of_quadrature(errors: dict[str, float]) -> None:
    """Warn about expectations that quadrature does not resolve.

    :param errors: their errors by observed site, in nats per observation.
    """
    for site, error in errors.items():
        if error > MOST_ERROR:
            warnings.warn(
                f"the expectations of {site!r} are off by about {error:.1g} nats "
                "per datum. Its log-density has a kink, or changes within much "
                "less than a predictor's posterior standard deviation, which "
                "Gauss-Hermite quadrature does not resolve. "
                "MCMC(EllipticalSlice(model)) draws from the exact posterior",
                stacklevel=5,
            )
