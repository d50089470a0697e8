# SPDX-License-Identifier: Apache-2.0
"""A model as a function of some of its Gaussian sites: which of them cannot be part of
the joint Gaussian, and the route of each observed site."""

from __future__ import annotations

from collections.abc import Callable
from math import prod
from typing import Any

import jax
import numpyro.distributions as dist
from jax import Array

from numpyro_gpaug.errors import NotConjugateError
from numpyro_gpaug.likelihoods.augmentation import lookup_augmentation
from numpyro_gpaug.likelihoods.expectations import (
    Route,
    base_distribution,
    lookup_correlated,
    lookup_expectation,
)
from numpyro_gpaug.model.arguments import Arguments
from numpyro_gpaug.model.correlated_data import correlated_axes
from numpyro_gpaug.model.costs import Purpose
from numpyro_gpaug.model.exponentials import has_form
from numpyro_gpaug.model.frontier import (
    Separation,
    frontier,
    separation,
    single_inputs,
)
from numpyro_gpaug.model.jaxpr import called_name, has_other_derivative, source_of
from numpyro_gpaug.model.latents import GaussianSite
from numpyro_gpaug.model.observations import check_constants
from numpyro_gpaug.model.program import Program
from numpyro_gpaug.model.structure import Observed, run_model
from numpyro_gpaug.model.survey import Survey
from numpyro_gpaug.model.whitened import (
    Parts,
    elementwise_expectation,
    parts_of,
    whitened,
)

# Why a site is held that is multiplied by another, say.
IN_DENSITY = "in the density"
_SEVERAL = "several function values"
_OTHER_DERIVATIVE = " has a custom derivative, which is not that of its values"


class Reading:
    """A model read as a function of some of its Gaussian sites.

    :param model: a NumPyro model.
    :param arguments: its arguments.
    :param sites: the Gaussian sites.
    :param survey: the survey of the model.
    :param purpose: the purpose of the Gaussian.
    :param fields: names of the sites in coordinates of their own.
    """

    def __init__(
        self,
        model: Callable[..., Any],
        arguments: Arguments,
        sites: tuple[GaussianSite, ...],
        survey: Survey,
        purpose: Purpose,
        fields: tuple[str, ...] = (),
    ) -> None:
        self._survey, self._projected = survey, purpose.projected
        self._small = {s.name for s in sites if prod(s.shape) <= purpose.held}
        self.classes: dict[str, type] = {}
        # Whether a registered likelihood takes one predictor for each datum, by site.
        self._single: dict[str, bool] = {}
        self._separations: dict[int, Separation] = {}
        shapes = {s.name: jax.ShapeDtypeStruct(s.shape, survey.dtype) for s in sites}
        self._processes = set(survey.functions)

        def parts(z: dict[str, Array]) -> Parts:
            seeded = whitened(model, z, fields)
            trace = run_model(seeded, arguments, jax.random.key(0), {})
            check_constants(trace)
            for name in survey.observed:
                fn = trace[name]["fn"]
                cls = self.classes[name] = type(base_distribution(fn))
                known = elementwise_expectation(fn) or lookup_correlated(cls)
                self._single[name] = known is not None or bool(correlated_axes(fn))
            return parts_of(trace, tuple(z), tuple(survey.observed), fields)

        self.program = Program(parts, shapes | survey.functions)
        self.parts: Parts = self.program.outputs

    def _sources(self, tree: Any) -> set[str]:
        leaves = jax.tree.leaves(tree)
        found = {k for x in leaves for k in self.program.value(x.variable).state}
        return found - self._processes

    def blamed(self) -> dict[str, str]:
        """Return the sites that cannot all be part of a joint Gaussian, with the reason
        for each."""
        for name, spread in self.parts.spreads.items():
            if sources := self._sources(spread):
                return {s: f"it is in the scale of {name!r}" for s in sources}
        for name, law in self.parts.others.items():
            if sources := self._sources(law.tree[0]):
                return {s: f"the prior of {name!r} depends on it" for s in sources}
        for name in self._survey.observed:
            if reason := self._why_not(name):
                density = self.parts.densities[name].variable
                sources = set(self.program.value(density).state) - self._processes
                if len(sources) < 2 and not sources & self._small:
                    raise NotConjugateError(
                        f"site {name!r}: its log-density is not a sum over data of "
                        f"differentiable functions of one or two affine predictors: "
                        f"{reason}. {_instead(reason)}; MCMC(NUTS(model)) samples any "
                        "model"
                    )
                return {s: f"{IN_DENSITY} of {name!r}, {reason}" for s in sources}
        return {}

    def _why_not(self, name: str) -> str | None:
        if not self.program.depends(self.parts.densities[name].variable):
            return None
        if self._closed(name):
            return self._mixed_residual(tuple(self._carriers(name)))
        variable = self.parts.densities[name].variable
        apart = self._separation(variable)
        if apart.reason is not None:
            return apart.reason
        found = frontier(self.program, [variable], apart.columns)
        for eqn, *_ in found.rest:
            if has_other_derivative(eqn):
                return f"{called_name(eqn)}{source_of(eqn)}{_OTHER_DERIVATIVE}"
        return self._mixed_residual(found.roots)

    def _separation(self, variable: int) -> Separation:
        """Return how a density separates into a sum over data; the result is cached."""
        if variable not in self._separations:
            self._separations[variable] = separation(self.program, [variable])
        return self._separations[variable]

    def _mixed_residual(self, roots: tuple[int, ...]) -> str | None:
        """Return why the residual variances cannot be computed, or ``None``. Given the
        inducing values, a sparse process has a variance of its own at each input. Its
        values at several inputs are correlated, and so are two predictors of one
        process; these correlations are not computed."""
        for process in () if self._projected else self._processes:
            states = [self.program.value(r).state for r in roots]
            pairs = zip(roots, states, strict=True)
            reached = [(r, s[process]) for r, s in pairs if process in s]
            if all(s.elementwise for _, s in reached) and len(reached) < 2:
                continue
            variables = [r for r, _ in reached]
            single = single_inputs(self.program, process, variables)
            if len(reached) > 1 or not single or process in self._survey.loaded:
                return (
                    f"{_SEVERAL} of the sparse process {process!r} reach one datum: "
                    "at several inputs, by two predictors, or of outputs that share "
                    "latents by loadings"
                )
        return None

    def _closed(self, name: str) -> bool:
        """Whether the only dependence on latents is through the parameters of a
        registered likelihood, which are affine, and of which no two depend on the same
        latent. Only exact samplers may have several for a datum."""
        if not (self._projected or self._single[name]):
            return False
        carriers = [x for x in self._carriers(name) if self.program.depends(x)]
        if not carriers or not all(map(self.program.affine, carriers)):
            return False
        sources = [k for x in carriers for k in self.program.value(x).state]
        leaves = jax.tree.leaves(self.parts.rest[name])
        alone = len(sources) == len(set(sources))
        return alone and not any(self.program.depends(x.variable) for x in leaves)

    def _carriers(self, name: str) -> list[Any]:
        """Return the variables of the parameters of a registered likelihood."""
        return [x.variable for x in self.parts.parameters.get(name, {}).values()]

    def kept(self, site: GaussianSite) -> GaussianSite:
        """Return a site with the members that a prediction keeps from the fit. Members
        are kept where data outside the plates of the site depend on it, by codes, even
        if other data have a row for each member.

        :param site: one of the Gaussian sites.
        """
        inside = self._survey.inside
        for name in self._survey.observed:
            density = self.program.value(self.parts.densities[name].variable)
            if site.name in density.state and not inside[site.name] & inside[name]:
                return site._replace(local=False)
        return site

    def observed(self, name: str) -> Observed:
        """Return an observed site with its route."""
        cls = self.classes[name]
        augmented = lookup_augmentation(cls) is not None
        variable = self.parts.densities[name].variable
        if not self.program.depends(variable):
            return Observed(
                name, (), (), Route.CONSTANT, (), augmented, log_concave=False,
                reason=None,
            )  # fmt: skip
        if self._closed(name) and (several := lookup_correlated(cls)):
            return Observed(
                name, (several.latent,), ((),), Route.CORRELATED, (), augmented,
                log_concave=True, reason=None,
            )  # fmt: skip
        if self._closed(name):
            expectation = lookup_expectation(cls)
            concave = expectation is not None and expectation.log_concave
            parameters = self.parts.parameters[name]
            known = [tuple(sorted(self._sources(x))) for x in parameters.values()]
            return Observed(
                name, tuple(parameters), tuple(known), Route.CLOSED_FORM, (), augmented,
                concave, None, correlated=self._survey.correlated[name],
            )  # fmt: skip
        apart = self._separation(variable)
        found = frontier(self.program, [variable], apart.columns)
        num, form = len(found.roots), has_form(found, self.program.avals)
        return Observed(
            name, tuple(f"predictor {i}" for i in range(num)), ((),) * num,
            Route.EXPONENTIAL if form else Route.GAUSS_HERMITE, (), augmented=False,
            log_concave=False, reason=None, factor=cls is dist.Unit,
            columns=apart.columns, indexed=apart.indexed,
        )  # fmt: skip


def _instead(reason: str) -> str:
    """Return the advice for a likelihood that is refused for this reason."""
    if reason.startswith("scan "):
        return (
            "The state of a scan has to be affine in Gaussian latents. Let its steps "
            "return, or observe, functions that are not, such as exp(level)"
        )
    if reason.endswith(_OTHER_DERIVATIVE):
        return "Leave its derivative to JAX, or define the derivative of its values"
    if reason.startswith(_SEVERAL):
        return (
            "Write the process without inducing inputs, "
            'numpyro.sample("f", dist.MultivariateNormal(mean, kernel(X, X)))'
        )
    return (
        "Combine data by operations on the affine predictor, before its link. Write a "
        "softmax as Categorical(logits=eta) or Multinomial(total, logits=eta)"
    )
