# SPDX-License-Identifier: Apache-2.0
"""The structure of a model: which latents are Gaussian, what is affine in them, and the
route of each observed site.

Everything comes from abstract tracing (no arithmetic runs). :class:`Dependencies` reads
a model by an independent Gaussian for each process and weight vector, from the jaxpr of
the likelihood's parameters as the user wrote them. :class:`Reading` reads it by one
Gaussian on all latents, as a program of the numbers behind these.
"""

from __future__ import annotations

import warnings
from collections.abc import Callable, Sequence
from dataclasses import replace
from functools import cache
from math import prod
from typing import Any

import jax
import jax.numpy as jnp
import numpyro
import numpyro.distributions as dist
from jax import Array

from numpyro_gpaug.errors import NotConjugateError
from numpyro_gpaug.likelihoods.contract import lookup_augmentation
from numpyro_gpaug.likelihoods.expectations import (
    Route,
    base_distribution,
    lookup_correlated,
    lookup_expectation,
)
from numpyro_gpaug.model.arguments import Arguments
from numpyro_gpaug.model.correlated_data import correlated_axes
from numpyro_gpaug.model.costs import FEWEST_NODES, FIT, MAX_DENSE, Purpose
from numpyro_gpaug.model.exponentials import has_form
from numpyro_gpaug.model.forms import Queries, find_form, find_sparse, refuse_large
from numpyro_gpaug.model.frontier import frontier, separation, single_inputs
from numpyro_gpaug.model.gaussians import Field
from numpyro_gpaug.model.jaxpr import (
    called_name,
    dependence_tree,
    has_other_derivative,
    source_of,
)
from numpyro_gpaug.model.joint import JointView
from numpyro_gpaug.model.latents import GaussianSite, Grouping, Structure
from numpyro_gpaug.model.links import refuse_reversed
from numpyro_gpaug.model.observations import check_constants
from numpyro_gpaug.model.program import Program, check_indices, program_of_others
from numpyro_gpaug.model.structure import (
    Block,
    Observed,
    fixed_key,
    flat_functions,
    run_model,
)
from numpyro_gpaug.model.survey import Survey
from numpyro_gpaug.model.whitened import (
    LINK,
    Parts,
    elementwise_expectation,
    find_missing_link,
    missing_link,
    parts_of,
    registered_latents,
    whitened,
)

_INSTEAD = {
    "BernoulliProbs": "Bernoulli(logits=f)",
    "BinomialProbs": "Binomial(n, logits=f)",
    "CategoricalProbs": "Categorical(logits=f)",
    "NegativeBinomialProbs": "NegativeBinomialLogits(r, f)",
    "Poisson": "numpyro_gpaug.Linked(f, link, Poisson) and LogisticPoisson",
}


class Dependencies:
    """The dependence of each part of a model on the processes and vector normals.

    :param survey: the survey of the model.
    """

    def __init__(self, survey: Survey) -> None:
        processes = [b for b in survey.blocks if b.is_process]
        self.processes = {b.name for b in processes}
        self.vectors = {b.site: b.name for b in processes}
        self.correlated, self.classes = survey.loaded, survey.classes
        # Whether all data have the same distribution, and whether one datum depends on
        # several entries of a parameter.
        self.shared: dict[str, bool] = {}
        self.joint: dict[str, bool] = {}

        def parts(values: dict[str, Any]) -> tuple[Parts, dict[str, Any]]:
            key = jax.random.key(0)
            trace = run_model(survey.model, survey.arguments, key, values)
            check_constants(trace)
            found = parts_of(trace, (), tuple(survey.observed))
            for name in survey.observed:
                self._visit(name, trace[name]["fn"])
            priors: dict[str, Any] = {
                k: x for k, x in found.others.items() if k not in values
            }
            for block in processes:
                f = trace[block.name]["fn"]
                gp = f.gp.loadings, f.gp.bias
                priors[block.name] = f.mean, f.prior_variance, f.projection, gp
            return found, priors

        self.parts, self.priors = dependence_tree(parts, survey.inputs)

    def _visit(self, name: str, fn: Any) -> None:
        """Note what the likelihood of an observed site is."""
        base = base_distribution(fn)
        self.shared[name] = base.batch_shape == () and fn.batch_shape != ()
        ranks = [jnp.ndim(getattr(base, k)) for k in registered_latents(type(base))]
        self.joint[name] = max(ranks, default=0) > len(base.batch_shape)

    def refuse_unsupported(self, latents: tuple[str, ...], observed: bool) -> None:
        """Raise for models whose processes enter something other than likelihoods.

        :param latents: all latent sites.
        :param observed: whether anything is observed. If nothing is, a latent site that
            depends on a process is an observation that was not passed in.
        :raises NotConjugateError: naming the two sites.
        """
        found = self.parts
        used = found.densities, found.parameters, found.rest, found.bounded, self.priors
        for site, name in self.vectors.items():
            if site in _sources(used):
                raise NotConjugateError(
                    f"the inducing values {site!r} are used directly. Use the "
                    f"function values {name!r}, or fit by MCMC(NUTS(model))"
                )
        for prior in (*self.processes, *(latents if observed else ())):
            if sources := self.reached(prior):
                raise NotConjugateError(
                    f"the distribution of {prior!r} depends on the process "
                    f"{sorted(sources)[0]!r}, and only observed sites may. If it is "
                    "data, pass the model its values (obs=...); MCMC(NUTS(model)) "
                    "samples such a model"
                )

    def reached(self, latent: str) -> set[str]:
        """Return the processes that the distribution of a latent site depends on. If it
        depends on one, it is an observation that was not passed in."""
        return _sources(self.priors.get(latent)) & self.processes

    def is_weight(self, block: Block) -> bool:
        """Whether a block is a vector normal on which only likelihood predictors
        depend, and affinely, so that its update has a closed form."""
        name, parts = block.name, self.parts
        if block.is_process or name in _sources((parts.rest, self.priors)):
            return False
        known = {k: self._parameters(k) for k in self.classes}
        others = [parts.densities[k].state for k, own in known.items() if not own]
        states = [state for own in known.values() for state in own.values()]
        found = [state[name].affine for state in states if name in state]
        return bool(found) and all(found) and not any(name in x for x in others)

    def _parameters(self, name: str) -> dict[str, Any]:
        """Return what the parameters of a registered likelihood depend on."""
        found = self.parts.parameters.get(name, {})
        latents = registered_latents(self.classes[name])
        return {k: found[k].state for k in latents}

    def in_closed_form(self, weight: str, routes: list[Observed]) -> bool:
        """Whether every observed site of a weight vector has a closed form (nodes
        run over function values only)."""
        densities = self.parts.densities
        reached = [r for r in routes if weight in densities[r.name].state]
        return all(r.route is Route.CLOSED_FORM for r in reached)

    def observed(self, name: str, blocks: tuple[Block, ...]) -> Observed:
        """Return an observed site with its route."""
        density = self.parts.densities[name].state
        reached = tuple(b.name for b in blocks if b.name in density)
        processes = tuple(n for n in reached if n in self.processes)
        augmented = lookup_augmentation(self.classes[name]) is not None
        expectation = lookup_expectation(self.classes[name])
        log_concave = expectation is not None and expectation.log_concave
        if processes and self.shared[name]:
            cls = self.classes[name].__name__
            raise ValueError(
                f"site {name!r}: all data have the same {cls}, because its last "
                f"axis has the function values of {processes[0]!r} at all data. If "
                "its last axis runs over classes, construct the process with "
                "num_latents=C"
            )
        if not reached:
            return Observed(name, augmented=augmented, log_concave=log_concave)
        reason = self._why_not_closed(name, reached)
        latents = registered_latents(self.classes[name]) if reason is None else ()
        if latents and expectation is not None:
            route = Route.CLOSED_FORM
        elif len(reached) == 1 and density[reached[0]].elementwise:
            route = Route.GAUSS_HERMITE
        else:
            route = Route.MONTE_CARLO
        self._refuse_correlated(name, processes, route)
        states = self._parameters(name)
        sources = tuple(tuple(b for b in reached if b in states[k]) for k in latents)
        return Observed(
            name, latents, sources, route, processes, augmented, log_concave, reason
        )

    def _refuse_correlated(
        self, name: str, processes: tuple[str, ...], route: Route
    ) -> None:
        """Raise if a likelihood depends on several outputs that share latents. Each of
        them is Gaussian with a known variance, but the bound uses no covariances."""
        correlated = [p for p in processes if p in self.correlated]
        joint = self.joint[name] or route is Route.MONTE_CARLO
        if correlated and joint:
            raise NotConjugateError(
                f"site {name!r}: the outputs of {correlated[0]!r} share latents "
                "(loadings=), so they are correlated, but "
                f"{self.classes[name].__name__} has no closed form for one output "
                "at a time. MCMC(NUTS(model)) samples this model"
            )

    def _missing_link(self, name: str) -> str | None:
        """Return the message about a parameter that has a domain and is affine in a
        block."""
        for k, leaf in self.parts.bounded[name].items():
            for block, dependence in leaf.state.items():
                if dependence.affine:
                    return missing_link(name, self.classes[name], k, block)
        return None

    def _why_not_closed(self, name: str, reached: tuple[str, ...]) -> str | None:
        parameters, cls = self._parameters(name), self.classes[name].__name__
        if not parameters:
            instead = _INSTEAD.get(cls, "numpyro_gpaug.Linked(f, link, family)")
            return self._missing_link(name) or (
                f"no closed form is registered for {cls} (one is for {instead})"
            )
        rest = _sources(self.parts.rest[name])
        if touched := [r for r in reached if r in rest]:
            return self._missing_link(name) or (
                f"a parameter of {cls} other than {(*parameters,)} depends on "
                f"{touched[0]!r}"
            )
        carriers: dict[str, str] = {}
        for latent, state in parameters.items():
            for block in (b for b in reached if b in state):
                dependence = state[block]
                if carriers.setdefault(block, latent) != latent:
                    return (
                        f"{carriers[block]!r} and {latent!r} of {cls} both depend on "
                        f"{block!r}, but they must be independent: give each its own "
                        "GaussianProcess"
                    )
                if not dependence.affine:
                    return (
                        f"{latent!r} is not affine in {block!r}: it passes through "
                        f"{dependence.nonlinear!r}"
                    )
                if block in self.processes and not dependence.elementwise:
                    return (
                        f"{latent!r} mixes several function values of {block!r} (of "
                        f"{block} @ W write num_latents=... and loadings=W.T of the "
                        "process)"
                    )
        return None


def _sources(tree: Any) -> set[str]:
    """Return the names of the blocks that a part of a model depends on."""
    return {name for leaf in jax.tree.leaves(tree) for name in leaf.state}


def inspect_model(model: Callable[..., Any], *args: Any, **kwargs: Any) -> Structure:
    """Return the structure of a model.

    :param model: a NumPyro model.
    :param args: its arguments.
    :param kwargs: its keyword arguments.
    :return: a :class:`Structure`.
    """
    arguments = Arguments.split(args, kwargs)
    survey = Survey(model, arguments)
    for name in survey.chains:
        raise NotConjugateError(
            f'GaussianProcess("{name}", markov=True) needs AutoLatentGaussian(model) '
            "or NestedVI(model): AutoSparseGP and EllipticalSlice need inducing "
            "values. NestedVI, AugmentedGaussian and NUTS draw from its posterior"
        )
    for site in survey.uncalled:
        raise ValueError(
            f'GaussianProcess("{site.removesuffix(".v")}") is never called. '
            "Its values at the inputs are gp(X)"
        )
    survey.refuse(n for n in survey.latent if n.endswith("_unobserved"))
    found = Dependencies(survey)
    weights = [b for b in survey.blocks if found.is_weight(b)]
    processes = [b for b in survey.blocks if b.is_process]
    routes = [found.observed(n, (*processes, *weights)) for n in survey.observed]
    weights = [b for b in weights if found.in_closed_form(b.name, routes)]
    found.refuse_unsupported(tuple(survey.latent), bool(survey.observed))
    blocks = tuple(b for b in survey.blocks if b.is_process or b in weights)
    owned = {b.site for b in blocks}
    others = tuple(n for n in survey.latent if n not in owned and not found.reached(n))
    if survey.observed:
        survey.refuse(others)
        _refuse_residuals(others, [b.name for b in processes])
        _refuse_moving_support(survey)
    gaussian = {site.name for site in survey.candidates}
    return Structure(
        blocks=blocks,
        others=others,
        observed=tuple(found.observed(name, blocks) for name in survey.observed),
        plates=survey.plates,
        functions={b.name: survey.inputs[b.name] for b in processes},
        constraints=survey.constraints,
        process_names=tuple(b.name for b in blocks if b.is_process),
        gaussian_others=tuple(n for n in others if n in gaussian),
    )


def _refuse_moving_support(survey: Survey) -> None:
    """Raise for data that leave the support of their distribution at some values of
    latents, if its density is finite there: fits do not check the support. A density
    that is not finite there, as of a shifted log-normal, needs no check.

    :param survey: the survey of the model.
    """
    dtype = jnp.result_type(float)

    def traced(values: dict[str, Any]) -> Any:
        return run_model(survey.model, survey.arguments, fixed_key(), values)

    def masks(values: dict[str, Any]) -> dict[str, Any]:
        trace = traced(values)
        sites = {name: trace[name] for name in survey.limited}
        return {k: s["fn"].support(s["value"]) for k, s in sites.items()}

    if not survey.limited:
        return
    names = [k for k in survey.latent if k not in survey.scanned]
    found = dependence_tree(
        masks, {k: jax.ShapeDtypeStruct(survey.shapes[k], dtype) for k in names}
    )
    for name in survey.limited:
        moving = sorted(_sources(found[name]))
        if moving and _is_finite_outside(traced({})[name]):
            raise NotConjugateError(
                f"whether the data of {name!r} are in the support of "
                f"{survey.classes[name].__name__} depends on {moving}, and its density "
                "is finite outside. Fits do not check the support. MCMC(NUTS(model)) "
                "samples this model"
            )


def _is_finite_outside(site: dict[str, Any]) -> bool:
    """Whether the density of a site is finite at values far outside of its support."""
    fn, value = site["fn"], jnp.asarray(site["value"])
    far = 1e3 * (1 + jnp.abs(value))
    with numpyro.validation_enabled(is_validate=False):
        return any(
            bool((jnp.isfinite(fn.log_prob(x)) & ~fn.support(x)).any())
            for x in (value - far, value + far)
        )


def _refuse_residuals(others: tuple[str, ...], processes: list[str]) -> None:
    """Raise for residuals of processes that are latent sites."""
    for name in others:
        process = name.removesuffix(".eps")
        if process != name and process in processes:
            raise NotConjugateError(
                f'with_residual(model, "site") makes the residual of {process!r} a '
                "latent site, for MCMC. Variational fits integrate it out: pass "
                "the model itself"
            )


def structure_at(
    model: Callable[..., Any], structure: Structure, arguments: Arguments
) -> Structure:
    """Return ``structure`` with the plates and shapes of the model at these arguments.

    :param model: the model.
    :param structure: its structure, from arguments of any size.
    :param arguments: its arguments.
    :raises ValueError: if it is the structure of another model.
    """
    data = tuple(site.name for site in structure.observed)
    values = {} if structure.joint else structure.zeros
    survey = Survey(flat_functions(model), arguments, data, values)
    if not structure.joint:
        _check_classes(structure, survey)
        functions = {k: survey.functions[k] for k in structure.process_names}
        return replace(structure, plates=survey.plates, functions=functions)
    local = {s.name: s.local for s in structure.sites}
    shape = {s.name: s.shape for s in survey.candidates}
    shape |= {k: survey.fields[k].shape for k in structure.fields if k in survey.fields}
    sites = tuple(
        s._replace(local=local[s.name], shape=shape[s.name])
        for s in survey.candidates
        if s.name in local
    )
    here = structure.with_sites(sites)
    for grouping in here.groupings:
        _check_members(here, grouping)
    shapes = tuple(survey.shapes.items())
    return replace(
        here, plates=survey.plates, functions=survey.functions, shapes=shapes
    )


def _check_classes(structure: Structure, survey: Survey) -> None:
    """Raise if likelihoods do not have the parameters that depend on latents."""
    for site in structure.observed:
        cls: Any = survey.classes.get(site.name)
        if cls is None or not all(
            hasattr(cls, k) or k in cls.arg_constraints for k in site.latents
        ):
            raise ValueError(
                f"the guide was set up for a model in which site {site.name!r} "
                f"has parameters {list(site.latents)}, and here it is "
                f"{'missing' if cls is None else cls.__name__}. A guide belongs to "
                "one model: make a new one"
            )


def _check_members(structure: Structure, grouping: Grouping) -> None:
    """Raise if sites that had members in common no longer have equally many.

    :param structure: the structure of the model at new arguments.
    :param grouping: a grouping of its sites.
    """
    alone = [Grouping((site,)) for site in grouping.sites]
    found = {g.sites[0][0]: structure.members(g) for g in alone}
    if not grouping.in_turn and len(set(found.values())) > 1:
        raise ValueError(
            f"sites {[*found]} had equal lengths when the guide was set up (the "
            "steps of a walk and their noise, effects of one plate), and have "
            f"lengths {found} here. Make the walk and the plate equally long"
        )


def require_conjugate(structure: Structure, updates: str) -> None:
    """Raise unless every observed site has closed-form updates.

    :param structure: the structure of the model.
    :param updates: ``"auto"``, ``"exact"`` or ``"augmented"``.

    :raises NotConjugateError: naming the site, the operation and a route that works.
    """
    for site in structure.observed:
        if site.reason is not None and LINK in site.reason:
            raise NotConjugateError(site.reason)
        if site.reason is not None:
            raise NotConjugateError(
                f"site {site.name!r} has no closed-form update: {site.reason}. "
                "AutoLatentGaussian(model) fits it by quadrature, if each datum "
                "depends on one or two predictors; "
                "numpyro.infer.SVI with numpyro_gpaug.TraceAnalytic_ELBO() and "
                "AutoSparseGP(model, covariance='dense') fits this model "
                f"({site.route.value}); MCMC(NUTS(model)) samples it."
            )
        if site.route is Route.MONTE_CARLO and updates != "augmented":
            raise NotConjugateError(
                f"site {site.name!r} has an augmentation but no exact expectation "
                'in closed form. Use updates="augmented", or register_expectation'
            )


# The reason why, for example, a site is a hyperparameter that another site is
# multiplied by.
IN_DENSITY = "in the density"
# Members of a plate with a model of their own, from which on joint fits are slow.
MANY_MEMBERS = 32
_SEVERAL = "several function values"
_OTHER_DERIVATIVE = " has a custom derivative, which is not that of its values"


class Reading:
    """A model read as a function of some of its Gaussian sites.

    :param survey: the survey of the model.
    :param purpose: the purpose of the Gaussian.
    :param sites: the Gaussian sites.
    :param fields: names of the sites in coordinates of their own.
    """

    def __init__(
        self,
        survey: Survey,
        purpose: Purpose,
        sites: tuple[GaussianSite, ...],
        fields: tuple[str, ...],
    ) -> None:
        self._given = survey, purpose, fields
        self._survey, self._projected, self.sites = survey, purpose.projected, sites
        self._small = {s.name for s in sites if prod(s.shape) <= purpose.held}
        self.classes: dict[str, type] = {}
        # By site: whether a registered likelihood takes one predictor for each datum.
        self._single: dict[str, bool] = {}
        self.observed: Callable[[str], Observed] = cache(self._routed)
        shapes = {s.name: jax.ShapeDtypeStruct(s.shape, survey.dtype) for s in sites}
        self._processes = set(survey.functions)

        def parts(z: dict[str, Array]) -> Parts:
            seeded = whitened(survey.model, z, fields)
            trace = run_model(seeded, survey.arguments, jax.random.key(0), {})
            check_constants(trace)
            for name in survey.observed:
                fn = trace[name]["fn"]
                cls = self.classes[name] = type(base_distribution(fn))
                known = elementwise_expectation(fn) or lookup_correlated(cls)
                self._single[name] = known is not None or bool(correlated_axes(fn))
            return parts_of(trace, tuple(z), tuple(survey.observed), fields)

        self.program = Program(parts, shapes | survey.functions)
        self.parts: Parts = self.program.outputs

    def without(self, name: str) -> Reading:
        """Return the reading of the model as a function of all sites but one."""
        survey, purpose, fields = self._given
        rest = tuple(s for s in self.sites if s.name != name)
        return Reading(survey, purpose, rest, fields)

    def chosen(self, blamed: dict[str, str]) -> tuple[str, Reading]:
        """Return the site to fix at a point estimate, and the reading without it.

        It is the smallest site without which all others can be part of the joint
        Gaussian. Among several of this size, it is one that leaves most observed sites
        in closed form. If there is no such site, it is the smallest candidate.

        :param blamed: candidates, with the reason for each.
        """
        # In the order of the model, because the names come from a set.
        sizes = {s.name: prod(s.shape) for s in self.sites if s.name in blamed}
        tried: dict[str, Reading] = {}
        passed: dict[str, int] = {}
        for name in sorted(sizes, key=lambda name: sizes[name]):
            if passed and sizes[name] > sizes[next(iter(passed))]:
                break
            found = tried[name] = self.without(name)
            if not found.blamed():
                routes = [found.observed(k).route for k in self._survey.observed]
                passed[name] = sum(route is Route.GAUSS_HERMITE for route in routes)
        best = passed or sizes
        name = min(best, key=lambda k: best[k])
        return name, tried[name]

    def blamed(self) -> dict[str, str]:
        """Return the sites that cannot all be part of a joint Gaussian, with the reason
        for each."""
        for name, spread in self.parts.spreads.items():
            if sources := _sources(spread) - self._processes:
                return {s: f"it is in the scale of {name!r}" for s in sources}
        for name, fn in self.parts.others.items():
            if sources := _sources(fn.tree[0]) - self._processes:
                how = _transformed(fn.tree[0], name)
                return {s: f"the prior of {name!r} depends on it{how}" for s in sources}
        for name in self._survey.observed:
            if reason := self.observed(name).reason:
                sources = _sources(self.parts.densities[name]) - self._processes
                if len(sources) < 2 and not sources & self._small:
                    raise NotConjugateError(
                        f"site {name!r}: its log-density is not a sum over data of "
                        f"differentiable functions of one or two affine predictors: "
                        f"{reason}. {_instead(reason)}; MCMC(NUTS(model)) samples any "
                        "model"
                    )
                return {s: f"{IN_DENSITY} of {name!r}, {reason}" for s in sources}
        return {}

    def _mixed_residual(self, roots: Sequence[Any]) -> str | None:
        """Return why the residual variances cannot be computed, or ``None``. Given the
        inducing values, a sparse process has a variance of its own at each input. A
        predictor of values at several inputs needs their covariance matrix; covariances
        between two predictors are not computed."""
        for process in () if self._projected else self._processes:
            reached = [r for r in roots if process in self.program.value(r).state]
            if len(reached) > 1:
                return (
                    f"{_SEVERAL} of the sparse process {process!r} reach one datum, by "
                    "two predictors"
                )
            for root in reached:
                if self.program.value(root).state[process].elementwise:
                    continue
                inputs = self._survey.functions[process].shape
                sizes = prod(inputs), prod(self.program.avals[root].shape)
                loaded = process in self._survey.loaded
                single = not loaded and single_inputs(self.program, process, [root])
                if not single and sizes[0] * max(sizes) > MAX_DENSE**2:
                    return (
                        f"{_SEVERAL} of the sparse process {process!r} reach one "
                        f"datum, and a matrix of all, {sizes[0]} by {max(sizes)}, is "
                        "too large"
                    )
        return None

    def _closed(self, name: str) -> bool:
        """Whether the only dependence on latents is through the parameters of a
        registered likelihood, which are affine, and of which no two depend on the same
        latent. Only exact samplers may have several for a datum."""
        if not (self._projected or self._single[name]):
            return False
        states = [x.state for x in self.parts.parameters.get(name, {}).values()]
        found = [(k, d.affine) for state in states for k, d in state.items()]
        alone = len(found) == len(dict(found)) > 0
        affine = all(affine for _, affine in found)
        return alone and affine and not _sources(self.parts.rest[name])

    def kept(self, site: GaussianSite) -> GaussianSite:
        """Return a site with the members that a prediction keeps from the fit. Members
        are kept where data outside the plates of the site depend on it, by codes, even
        if other data have a row for each member.

        :param site: one of the Gaussian sites.
        """
        inside = self._survey.inside
        for name in self._survey.observed:
            reached = site.name in self.parts.densities[name].state
            if reached and not inside[site.name] & inside[name]:
                return site._replace(local=False)
        return site

    def _routed(self, name: str) -> Observed:
        """Return an observed site with its route, and why the latents that it depends
        on cannot all be part of a joint Gaussian."""
        program, cls = self.program, self.classes[name]
        augmented = lookup_augmentation(cls) is not None
        variable = self.parts.densities[name].variable
        if not program.depends(variable):
            return Observed(name, augmented=augmented)
        if self._closed(name):
            parameters = self.parts.parameters[name]
            reason = self._mixed_residual([x.variable for x in parameters.values()])
            if several := lookup_correlated(cls):
                return Observed(
                    name, (several.latent,), ((),), Route.CORRELATED, (), augmented,
                    log_concave=True, reason=reason,
                )  # fmt: skip
            expectation = lookup_expectation(cls)
            concave = expectation is not None and expectation.log_concave
            states = [x.state.keys() - self._processes for x in parameters.values()]
            known = [tuple(sorted(names)) for names in states]
            return Observed(
                name, tuple(parameters), tuple(known), Route.CLOSED_FORM, (), augmented,
                concave, reason, correlated=self._survey.correlated[name],
            )  # fmt: skip
        apart = separation(program, [variable])
        if apart.reason is not None:
            return Observed(name, reason=apart.reason)
        found = frontier(program, [variable], apart.columns)
        num, reason = len(found.roots), self._mixed_residual(found.roots)
        for eqn in [e for e, *_ in found.rest if has_other_derivative(e)][:1]:
            reason = f"{called_name(eqn)}{source_of(eqn)}{_OTHER_DERIVATIVE}"
        form = reason is None and has_form(found, program.avals)
        return Observed(
            name, tuple(f"predictor {i}" for i in range(num)), ((),) * num,
            Route.EXPONENTIAL if form else Route.GAUSS_HERMITE, reason=reason,
            factor=cls is dist.Unit, columns=apart.columns, indexed=apart.indexed,
        )  # fmt: skip


def _transformed(fn: Any, name: str) -> str:
    """Return how to make a latent a function of a Gaussian one, if it can be.

    :param fn: its distribution.
    """
    while isinstance(fn, dist.ExpandedDistribution | dist.Independent):
        fn = fn.base_dist
    if not isinstance(fn, dist.TransformedDistribution):
        return ""
    if not isinstance(fn.base_dist, dist.Normal):
        return ""
    return f". Write {name!r} as a function of a Normal (reparam.TransformReparam)"


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


def inspect_joint(
    model: Callable[..., Any], purpose: Purpose, *args: Any, **kwargs: Any
) -> Structure:
    """Return the structure of a model for one joint Gaussian on its latents.

    :param model: a NumPyro model.
    :param purpose: see :func:`~numpyro_gpaug.model.forms.find_form`.
    :param args: its arguments.
    :param kwargs: its keyword arguments.
    :raises NotConjugateError: as :func:`read_joint` does, and for a Gaussian that needs
        too large a matrix.
    """
    arguments = Arguments.split(args, kwargs)
    found = read_joint(model, purpose, arguments)
    return in_form(found, model, purpose, arguments)


def read_joint(
    model: Callable[..., Any], purpose: Purpose, arguments: Arguments
) -> Structure:
    """Return the structure of a model, with a sparse precision if it has large fields,
    and otherwise with one dense matrix.

    :param model: a NumPyro model.
    :param purpose: see :func:`~numpyro_gpaug.model.forms.find_form`.
    :param arguments: its arguments.
    :raises NotConjugateError: for discrete latents, and for a site whose log-density is
        not a sum over data of functions of one or two affine predictors each, whichever
        latent is fixed.
    """
    survey = Survey(model, arguments)
    survey.refuse(survey.latent)
    _warn_of_members(survey)
    fields = _resolved(survey)
    size = sum(prod(own.shape) for own in fields.values())
    if purpose.fields and survey.observed and size >= FEWEST_NODES:
        found = _read(survey, purpose, tuple(fields))
        if found is not None:
            asked, _ = _asked(found, model, arguments)
            sparse = find_sparse(found, asked, purpose, fields)
            if sparse is not None:
                return sparse
    found = _read(survey, purpose, ())
    assert found is not None
    return found


def _warn_of_members(survey: Survey) -> None:
    """Warn about a plate of many members that have models of their own, with
    hyperparameters and rows of their own."""
    hyper = set(survey.latent) - {site.name for site in survey.candidates}
    sites = [survey.inside[name] for name in (*survey.latent, *survey.observed)]
    nested = all(len(survey.inside[name]) > 1 for name in survey.observed)
    if not (hyper and survey.observed and nested):
        return
    for name in set.intersection(*sites):
        if (size := survey.plates[name].size) >= MANY_MEMBERS:
            warnings.warn(
                f"the {size} members of the plate {name!r} share no latents, and are "
                "fitted together. Write the model of one member, and fit it to all by "
                "ConjugateSVI.run_many(..., over=...), which is much faster",
                stacklevel=2,
            )


def _resolved(survey: Survey) -> dict[str, Field]:
    """Return the fields with a sparse precision that the dtype resolves, unless there
    is one field, and it is a chain. The others are functions of independent numbers,
    which have few rounding errors."""
    fields: dict[str, Field] = survey.fields
    dense = [
        k for k, own in fields.items()
        if not (own.prior.resolved or own.prior.chained)
        and own.shape[-1] >= 4 * FEWEST_NODES
    ]  # fmt: skip
    if dense and survey.dtype == "float32":
        warnings.warn(
            f"float32 does not resolve distances as uneven as those of {dense}, which "
            "become part of a dense matrix. Fits are faster in float64, "
            "jax.config.update('jax_enable_x64', True)",
            stacklevel=2,
        )
    found = {k: own for k, own in fields.items() if own.prior.resolved}
    chains = [own.prior.chained and len(own.shape) == 1 for own in found.values()]
    return {} if chains == [True] else found


def in_form(
    structure: Structure,
    model: Callable[..., Any],
    purpose: Purpose,
    arguments: Arguments,
) -> Structure:
    """Return a structure in the form that costs least. One with a sparse precision is
    returned unchanged.

    :param structure: from :func:`read_joint`.
    :param model: the model.
    :param purpose: see :func:`~numpyro_gpaug.model.forms.find_form`.
    :param arguments: its arguments.
    :raises NotConjugateError: for a Gaussian that needs too large a matrix.
    """
    if structure.fields or not structure.sites or not structure.observed:
        return structure
    asked, view = _asked(structure, model, arguments)
    form = find_form(structure, asked, purpose)
    if not (purpose.projected and form.form.any_rows and asked.rows <= purpose.largest):

        def chains() -> tuple[Grouping, ...]:
            return tuple(x.steps for x in view.loops)

        refuse_large(form, chains, purpose.largest)
    return form


def _asked(
    structure: Structure, model: Callable[..., Any], arguments: Arguments
) -> tuple[Queries, JointView]:
    """Return queries of the dependence of predictors on latents, and the view of the
    model."""

    def seen(structure: Structure, arrays: tuple[Array, ...]) -> JointView:
        given = arguments._replace(arrays=arrays)
        return JointView(structure, model, given, {}, fixed_key())

    view = seen(structure, arguments.arrays)
    return Queries(seen, arguments.arrays, view.pairs, view.rows), view


def _read(
    survey: Survey, purpose: Purpose, fields: tuple[str, ...]
) -> Structure | None:
    """Return the structure of a model, before a form is chosen; ``None`` if a site in
    coordinates of its own cannot be part of the Gaussian.

    :param survey: the survey of the model.
    :param purpose: see :func:`~numpyro_gpaug.model.forms.find_form`.
    :param fields: names of the sites in coordinates of their own.
    """
    own, held = {k: survey.fields[k] for k in fields}, [*survey.held]
    sites = tuple(
        s._replace(shape=own[s.name].shape) if s.name in own else s
        for s in survey.candidates
    )
    found = Reading(survey, purpose, sites, fields)
    while blamed := found.blamed():
        if not own.keys().isdisjoint(blamed):
            return None
        name, found = found.chosen(blamed)
        held.append((name, blamed[name]))
    sites = tuple(found.kept(s) for s in found.sites)
    refuse_reversed(found.program, survey.scanned)
    if missing := find_missing_link(found.program, found.classes, found.parts.bounded):
        raise NotConjugateError(missing)
    check_indices(found.program)
    names = {s.name for s in sites}
    others = {k: survey.shapes[k] for k in survey.latent if k not in names}
    _refuse_moving_support(survey)
    if any(others.values()):
        given = survey.model, survey.arguments, others
        check_indices(program_of_others(*given, {}, survey.dtype))
    return Structure(
        blocks=(),
        others=tuple(n for n in survey.latent if n not in names),
        observed=tuple(found.observed(n) for n in survey.observed),
        plates=survey.plates,
        functions=survey.functions,
        constraints=survey.constraints,
        joint=True,
        dtype=survey.dtype,
        held=tuple(held),
        shapes=tuple(survey.shapes.items()),
        process_names=tuple(survey.functions),
        fields=fields,
    ).with_sites(sites)


def warn_of_points(
    model: Callable[..., Any],
    structure: Structure,
    args: tuple[Any, ...],
    kwargs: dict[str, Any],
) -> None:
    """Warn about latents that get point estimates though they could be part of the
    joint Gaussian: random effects in plates, scalar weights.

    :param model: the model.
    :param structure: its blocks, which are independent, and all other latents.
    :param args: its arguments.
    :param kwargs: its keyword arguments.
    """
    if not structure.gaussian_others or not structure.observed:
        return
    try:
        joint = inspect_joint(model, FIT, *args, **kwargs)
    except (NotConjugateError, ValueError):
        return
    registered = Route.CLOSED_FORM, Route.CONSTANT
    closed = all(site.route in registered for site in joint.observed)
    points = [
        s.name
        for s in joint.sites
        if s.name in structure.others and (closed or s.shape not in ((), (1,)))
    ]
    if points:
        warnings.warn(
            f"{points} are Gaussian and reach data affinely, but AutoSparseGP gives "
            "them point estimates. AutoLatentGaussian(model) puts one Gaussian on "
            "them and all processes; other=AutoNormal gives them normals of their "
            "own. The constant mean of a process may also be a part of its kernel, "
            "kernel + variance",
            stacklevel=2,
        )


def warn_of_modes(
    model: Callable[..., Any], arguments: Arguments, others: dict[str, Any]
) -> None:
    """Warn about vectors that get point estimates together with a parameter of their
    prior, such as random effects from a Student-t distribution with an unknown scale.
    Their joint density may be largest at a scale near zero, with equal effects.

    :param model: the model.
    :param arguments: its arguments.
    :param others: latents with point estimates, by name; only shapes and dtypes matter.
    """

    def priors(values: dict[str, Array]) -> dict[str, Any]:
        trace = run_model(flat_functions(model), arguments, fixed_key(), values)
        return {name: trace[name]["fn"] for name in vectors}

    vectors = [name for name, value in others.items() if value.size > 1]
    if not vectors:
        return
    found = dependence_tree(priors, others)
    unknown = {name: sorted(_sources(found[name]) - {name}) for name in vectors}
    for name, parameters in unknown.items():
        if parameters:
            warnings.warn(
                f"{name!r} and {parameters}, on which its prior depends, get point "
                "estimates together: scales become too small, often zero. "
                "NestedVI(model) integrates over few of them, other=AutoNormal gives "
                "them normals, MCMC(NUTS(model)) samples any. A Student-t effect may "
                "also be a Normal whose variance has an inverse gamma prior",
                stacklevel=2,
            )
