# SPDX-License-Identifier: Apache-2.0
"""The structure of a model with an independent Gaussian for each process and weight
vector: which parameters are affine in them, and the route of each observed site; and
structures at other arguments.

Everything comes from abstract tracing (no arithmetic runs). :class:`Dependencies` reads
the jaxpr of the likelihood's parameters as the user wrote them.
:mod:`~numpyro_gpaug.model.reading` reads a model by one Gaussian on all latents.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from typing import Any

import jax
import jax.numpy as jnp

from numpyro_gpaug.errors import NotConjugateError
from numpyro_gpaug.likelihoods.contract import lookup_augmentation
from numpyro_gpaug.likelihoods.expectations import (
    Route,
    base_distribution,
    lookup_expectation,
)
from numpyro_gpaug.model.arguments import Arguments
from numpyro_gpaug.model.jaxpr import (
    dependence_tree,
    inputs_of,
)
from numpyro_gpaug.model.joint import REGISTERED
from numpyro_gpaug.model.latents import Grouping, Structure
from numpyro_gpaug.model.observations import check_constants, skipped_error
from numpyro_gpaug.model.pitfalls import refuse_drawn, refuse_moving_support
from numpyro_gpaug.model.structure import (
    Block,
    Observed,
    flat_functions,
    run_model,
)
from numpyro_gpaug.model.survey import Survey
from numpyro_gpaug.model.whitened import (
    LINK,
    Parts,
    missing_link,
    parts_of,
    registered_latents,
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
            if site in inputs_of(used):
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
        return inputs_of(self.priors.get(latent)) & self.processes

    def is_weight(self, block: Block) -> bool:
        """Whether a block is a vector normal on which only likelihood predictors
        depend, and affinely, so that its update has a closed form."""
        name, parts = block.name, self.parts
        if block.is_process or name in inputs_of((parts.rest, self.priors)):
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
            name, latents, sources, route, processes, augmented, log_concave, reason,
            vector=self.joint[name],
        )  # fmt: skip

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
        rest = inputs_of(self.parts.rest[name])
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


def inspect_model(model: Callable[..., Any], *args: Any, **kwargs: Any) -> Structure:
    """Return the structure of a model.

    :param model: a NumPyro model.
    :param args: its arguments.
    :param kwargs: its keyword arguments.
    :return: a :class:`Structure`.
    """
    arguments = Arguments.split(args, kwargs)
    survey = Survey(model, arguments)
    refuse_drawn(survey)
    for name in survey.chains:
        raise NotConjugateError(
            f'GaussianProcess("{name}", markov=True) needs AutoLatentGaussian(model) '
            "or NestedVI(model): AutoSparseGP and EllipticalSlice need inducing "
            "values. NestedVI, AugmentedGaussian and NUTS draw from its posterior"
        )
    return structure_of(survey)


def structure_of(survey: Survey) -> Structure:
    """Return the structure of a surveyed model, in which the states of a chain are
    latents like others: they determine its function values.

    :param survey: the survey.
    """
    for site in survey.uncalled:
        raise ValueError(
            f'GaussianProcess("{site.removesuffix(".v")}") is never called. '
            "Its values at the inputs are gp(X)"
        )
    survey.refuse(n for n in survey.latent if n.endswith("_unobserved"))
    found = Dependencies(survey)
    every = [b for b in survey.blocks if b.name not in survey.chains]
    weights = [b for b in every if found.is_weight(b)]
    processes = [b for b in every if b.is_process]
    routes = [found.observed(n, (*processes, *weights)) for n in survey.observed]
    weights = [b for b in weights if found.in_closed_form(b.name, routes)]
    found.refuse_unsupported(tuple(survey.latent), bool(survey.observed))
    blocks = tuple(b for b in every if b.is_process or b in weights)
    owned = {b.site for b in blocks}
    others = tuple(n for n in survey.latent if n not in owned and not found.reached(n))
    if survey.observed:
        survey.refuse(others)
        _refuse_residuals(others, [b.name for b in processes])
        refuse_moving_support(survey)
    sites = {k: survey.shapes[k] for k in survey.latent if k not in found.vectors}
    sites |= {k: f.shape for k, f in survey.functions.items()}
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
        shapes=tuple(survey.shapes.items()),
        indexed=survey.check_codes(sites),
        rounded=tuple(survey.rounded),
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
    """Return ``structure`` with the latents, plates and shapes of the model at these
    arguments.

    :param model: the model.
    :param structure: its structure, from arguments of any size.
    :param arguments: its arguments.
    :raises ValueError: if it is the structure of another model.
    """
    data = tuple(site.name for site in structure.observed)
    survey = Survey(flat_functions(model), arguments, data)
    _check_likelihoods(structure, survey)
    here = (_sites_at if structure.joint else _blocks_at)(structure, survey)
    shapes = tuple(survey.shapes.items())
    functions = {k: survey.functions[k] for k in structure.process_names}
    return replace(here, plates=survey.plates, functions=functions, shapes=shapes)


def _sites_at(structure: Structure, survey: Survey) -> Structure:
    """Return a structure with the jointly Gaussian sites of a survey."""
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
    return here


def _blocks_at(structure: Structure, survey: Survey) -> Structure:
    """Return a structure with the processes and weight vectors of a survey."""
    names = {block.name for block in structure.blocks}
    blocks = tuple(block for block in survey.blocks if block.name in names)
    return replace(structure, blocks=blocks)


def _check_likelihoods(structure: Structure, survey: Survey) -> None:
    """Raise for likelihoods without the parameters that depend on latents."""
    for site in structure.observed:
        cls: Any = survey.classes.get(site.name)
        if cls is None and not structure.joint:
            raise skipped_error(site.name)
        if cls is None or site.correlated or site.route not in REGISTERED:
            continue
        if not set(site.latents) <= {*registered_latents(cls)}:
            raise ValueError(
                f"{site.name!r} has another likelihood with these arguments than in "
                f"the fit, {cls.__name__}. Pass the flags and functions of the fit, or "
                "fit the model with these"
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
