# SPDX-License-Identifier: Apache-2.0
"""Predictions of one model and guide as compiled functions of arrays alone."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
from jax import Array, random
from numpyro import handlers
from numpyro.distributions import Distribution

from numpyro_gpaug._numpyro import whole_plates
from numpyro_gpaug.errors import NotConjugateError
from numpyro_gpaug.gp.process import Conditional
from numpyro_gpaug.guides.base import ProcessGuide
from numpyro_gpaug.guides.function_posterior import Fit, Law
from numpyro_gpaug.likelihoods.expectations import (
    Route,
    base_distribution,
    predictive,
    through_wrappers,
)
from numpyro_gpaug.math.linalg import cholesky_jitter, default_jitter
from numpyro_gpaug.model.structure import (
    Arguments,
    Block,
    Observed,
    Structure,
    check_shape,
)
from numpyro_gpaug.model.view import BoundProblem, predictor


class FunctionValues(NamedTuple):
    """Posterior of function values.

    :param mean: (N,) or (N, C).
    :param variance: of the same shape; or the covariance, (N, N) or (C, N, N).
    """

    mean: Array
    variance: Array


class Predictor:
    """Everything about a prediction but the numbers: posteriors of the same model and
    guide share it, and with it what JAX compiled.

    :param model: the model.
    :param structure: what it is made of.
    :param law: what a fit of its guide says of function values.
    """

    def __init__(
        self, model: Callable[..., Any], structure: Structure, law: Law
    ) -> None:
        self.model = model
        self.structure = structure
        self.law = law
        self._raw: dict[str, Callable[..., Any]] = {
            "f": self._f, "joint": self._joint, "y": self._y,
            "log_prob": self._log_prob,
        }  # fmt: skip
        self.compiled = {
            name: jax.jit(fn, static_argnames=("static", "site"))
            for name, fn in self._raw.items()
        }
        self.compiled["draws"] = jax.jit(
            self._draws, static_argnames=("static", "site", "num")
        )
        self.compiled["factors"] = jax.jit(self._factors, static_argnames="static")

    def factors(self, arguments: Arguments, fit: Fit) -> dict[str, Array]:
        """What can be computed once for all inputs."""
        return self.compiled["factors"](arguments.arrays, fit, static=arguments.static)

    def call(
        self, what: str, arguments: Arguments, fit: Fit, site: str, **how: Any
    ) -> Any:
        """One prediction: ``"f"``, ``"joint"``, ``"y"``, ``"log_prob"``, or ``"draws"``
        (with ``key`` and ``num``)."""
        return self.compiled[what](
            arguments.arrays, fit, static=arguments.static, site=site, **how
        )

    def shape(self, what: str, arguments: Arguments, fit: Fit, site: str) -> Any:
        """The shapes of a prediction, found without arithmetic."""

        def run(arrays: tuple[Array, ...]) -> Any:
            factors = self._factors(arrays, fit, arguments.static)
            complete = fit._replace(factors=factors)
            return self._raw[what](arrays, complete, arguments.static, site)

        return jax.eval_shape(run, arguments.arrays)

    def block(self, site: str | None) -> Block:
        """The Gaussian process of this name; the only one for ``None``."""
        processes = [b for b in self.structure.blocks if b.is_process]
        return _one_of(processes, site, "Gaussian process")

    def observed(self, site: str | None) -> Observed:
        """The observed site of this name; the only one that latents reach for
        ``None`` (``handlers.condition`` makes observed sites of others)."""
        reached = [s for s in self.structure.observed if s.route is not Route.CONSTANT]
        return _one_of(reached, site, "observed site")

    # -- what is compiled ------------------------------------------------------------

    def _problem(self, arrays: Any, static: Any, fit: Fit) -> BoundProblem:
        names = {site.name for site in self.structure.observed}

        def unobserved(message: dict[str, Any]) -> Array | None:
            drawn = message["type"] == "sample" and not message["is_observed"]
            if drawn and message["name"] in names:
                return jnp.zeros(message["fn"].shape())
            return None

        whole = whole_plates(self.model)
        model = handlers.substitute(whole, substitute_fn=unobserved)
        arguments = Arguments(arrays, static)
        return BoundProblem(self.structure, model, arguments, fit.values, random.key(0))

    def _factors(self, arrays: Any, fit: Fit, static: Any) -> dict[str, Array]:
        return self.law.factors(self._problem(arrays, static, fit))

    def _f(self, arrays: Any, fit: Fit, static: Any, site: str) -> FunctionValues:
        problem = self._problem(arrays, static, fit)
        law = problem.conditional(self.block(site))
        mean, variance = self.law.marginals(problem, fit)[site]
        return FunctionValues(law.outputs(mean), law.output_variances(variance))

    def _joint(self, arrays: Any, fit: Fit, static: Any, site: str) -> FunctionValues:
        law, (mean, covariance) = self._latents(arrays, fit, static, site)
        return FunctionValues(law.outputs(mean), law.output_covariances(covariance))

    def _draws(
        self, arrays: Any, fit: Fit, static: Any, site: str, key: Array, num: int
    ) -> tuple[Array, Array]:
        """Joint draws, and whether the covariance factorised."""
        law, (mean, covariance) = self._latents(arrays, fit, static, site)
        jitter = default_jitter(covariance.shape[-1], covariance.dtype)
        factor = cholesky_jitter(covariance, jitter)
        noise = random.normal(key, (num, *mean.shape), mean.dtype)
        latents = mean + jnp.einsum("...ij,s...j->s...i", factor, noise)
        return jax.vmap(law.outputs)(latents), jnp.isfinite(factor).all()

    def _latents(
        self, arrays: Any, fit: Fit, static: Any, site: str
    ) -> tuple[Conditional, FunctionValues]:
        block = self.block(site)
        law = self._problem(arrays, static, fit).conditional(block)
        measure = self.law.measure(law, fit, block)
        mean = law.select(measure.mean(law.X))
        return law, FunctionValues(mean, law.select(measure.kernel(law.X, law.X)))

    def _y(self, arrays: Any, fit: Fit, static: Any, site: str) -> Distribution:
        return self._predictive(arrays, fit, static, site)[0]

    def _log_prob(self, arrays: Any, fit: Fit, static: Any, site: str) -> Array:
        fn, message = self._predictive(arrays, fit, static, site)
        if not message["is_observed"]:
            raise ValueError(
                f"log_prob needs the observations of site {site!r}: log_prob(X, y)"
            )
        check_shape(site, message)
        return through_wrappers(message["fn"], lambda _: fn.log_prob(message["value"]))

    def _predictive(
        self, arrays: Any, fit: Fit, static: Any, site: str
    ) -> tuple[Distribution, dict[str, Any]]:
        observed = self.observed(site)
        if observed.route is not Route.CLOSED_FORM:
            raise NotConjugateError(
                f"site {site!r} has no closed-form predictive distribution; draw from "
                "it with numpyro.infer.Predictive(model, guide=guide, params=params, "
                "num_samples=...)"
            )
        problem = self._problem(arrays, static, fit)
        at = self.law.marginals(problem, fit)
        message = problem.message(site)
        moments = predictor(problem.predictors(at), observed)
        return predictive(base_distribution(message["fn"]), *moments), message


def predictor_for(
    guide: ProcessGuide, model: Callable[..., Any], structure: Structure
) -> Predictor:
    """The predictor of a model and its guide, made once and kept on the guide."""
    found = guide.predictors.get(id(model))
    if found is None or found.structure != structure:
        # It holds the model, whose id is thus not given away.
        found = guide.predictors[id(model)] = Predictor(model, structure, guide.law)
    return found


def _one_of(candidates: Any, name: str | None, what: str) -> Any:
    names = [c.name for c in candidates]
    if name is None and len(names) == 1:
        return candidates[0]
    if name not in names:
        raise ValueError(
            f"site={name!r}: the model's choices of {what} are {names}; pass site=..."
        )
    return candidates[names.index(name)]
