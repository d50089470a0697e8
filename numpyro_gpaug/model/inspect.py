# SPDX-License-Identifier: Apache-2.0
"""The structure of a model: which latents update in closed form, and on which of them
each observed site depends.

Everything comes from abstract tracing (no arithmetic runs) and from the jaxpr of the
likelihood's parameters. The model is run twice: once for its sites, and once for their
dependences.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from typing import Any

from numpyro_gpaug.errors import NotConjugateError
from numpyro_gpaug.likelihoods.expectations import Route
from numpyro_gpaug.model.arguments import Arguments
from numpyro_gpaug.model.dependencies import Dependencies
from numpyro_gpaug.model.domains import LINK
from numpyro_gpaug.model.latents import Grouping, Structure
from numpyro_gpaug.model.structure import (
    flat_functions,
)
from numpyro_gpaug.model.survey import Survey


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
            f'GaussianProcess("{name}", markov=True) needs AutoLatentGaussian(model)'
        )
    for site in survey.uncalled:
        raise ValueError(
            f'GaussianProcess("{site.removesuffix(".v")}") is never called. '
            "Its values at the inputs are gp(X)"
        )
    survey.refuse(n for n in survey.latent if n.endswith("_unobserved"))
    found = Dependencies(model, arguments, survey)
    weights = [b for b in survey.blocks if found.is_weight(b)]
    processes = [b for b in survey.blocks if b.is_process]
    routes = [found.observed(n, (*processes, *weights)) for n in survey.observed]
    weights = [b for b in weights if found.in_closed_form(b.name, routes)]
    found.refuse_unsupported(tuple(survey.latent), bool(survey.observed))
    blocks = tuple(b for b in survey.blocks if b.is_process or b in weights)
    owned = {b.site for b in blocks}
    others = tuple(
        n for n in survey.latent if n not in owned and not found.is_likelihood(n)
    )
    if survey.observed:
        survey.refuse(others)
        _refuse_residuals(others, [b.name for b in processes])
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
    if len(set(found.values())) > 1:
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
