# SPDX-License-Identifier: Apache-2.0
"""The Gaussian latents of a model that its data depend on affinely, and the dependence
of each observed site on them. The traced model is read, not probed."""

from __future__ import annotations

import warnings
from collections.abc import Callable
from math import prod
from typing import Any

from jax import Array

from numpyro_gpaug.errors import NotConjugateError
from numpyro_gpaug.likelihoods.expectations import Route
from numpyro_gpaug.model.arguments import Arguments
from numpyro_gpaug.model.costs import FEWEST_NODES, FIT, Purpose
from numpyro_gpaug.model.domains import find_missing_link
from numpyro_gpaug.model.forms import Asked, find_form, find_sparse, refuse_large
from numpyro_gpaug.model.indices import check_indices, program_of_others
from numpyro_gpaug.model.joint import JointView
from numpyro_gpaug.model.joint_reading import Reading
from numpyro_gpaug.model.latents import (
    GaussianSite,
    Structure,
)
from numpyro_gpaug.model.loops import refuse_reversed
from numpyro_gpaug.model.structure import any_key
from numpyro_gpaug.model.survey import Survey


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
    size = sum(prod(own.shape) for own in survey.fields.values())
    if purpose.fields and survey.observed and size >= FEWEST_NODES:
        _warn_of_rounding(survey)
        found = _read(model, purpose, arguments, survey, tuple(survey.fields))
        if found is not None:
            asked, _ = _asked(found, model, arguments)
            sparse = find_sparse(found, asked, purpose, survey.fields)
            if sparse is not None:
                return sparse
    found = _read(model, purpose, arguments, survey, ())
    assert found is not None
    return found


def _warn_of_rounding(survey: Survey) -> None:
    """Warn about long curves, which need more digits than float32 has."""
    names = [k for k, own in survey.fields.items() if own.prior.needs_float64]
    if names and survey.dtype == "float32":
        warnings.warn(
            f"float32 does not resolve so long a smooth curve as "
            f"{', '.join(map(repr, names))}: its learnt scale will be too large. Use "
            "float64, jax.config.update('jax_enable_x64', True), or at most 270 points",
            stacklevel=2,
        )


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
        refuse_large(form, tuple(x.steps for x in view.loops), purpose.largest)
    return form


def _asked(
    structure: Structure, model: Callable[..., Any], arguments: Arguments
) -> tuple[Asked, JointView]:
    """Return queries of the dependence of predictors on latents, and the view of the
    model."""

    def seen(structure: Structure, arrays: tuple[Array, ...]) -> JointView:
        given = arguments._replace(arrays=arrays)
        return JointView(structure, model, given, {}, any_key())

    view = seen(structure, arguments.arrays)
    return Asked(seen, arguments.arrays, view.pairs, view.rows), view


def _read(
    model: Callable[..., Any],
    purpose: Purpose,
    arguments: Arguments,
    survey: Survey,
    fields: tuple[str, ...],
) -> Structure | None:
    """Return the structure of a model, before a form is chosen; ``None`` if a site in
    coordinates of its own cannot be part of the Gaussian.

    :param fields: names of the sites in coordinates of their own.
    """
    sites, held = tuple(survey.candidates), [*survey.held]
    own = {k: survey.fields[k] for k in fields}
    sites = tuple(
        s._replace(shape=own[s.name].shape) if s.name in own else s for s in sites
    )
    while True:
        found = Reading(model, arguments, sites, survey, purpose, fields)
        if not (blamed := found.blamed()):
            break
        if not own.keys().isdisjoint(blamed):
            return None
        name, reason = _chosen(model, arguments, sites, survey, purpose, blamed, fields)
        held.append((name, reason))
        sites = tuple(s for s in sites if s.name != name)
    sites = tuple(found.kept(s) for s in sites)
    refuse_reversed(found.program, survey.scanned)
    if missing := find_missing_link(found.program, found.classes, found.parts.bounded):
        raise NotConjugateError(missing)
    check_indices(found.program)
    names = {s.name for s in sites}
    others = {k: survey.shapes[k] for k in survey.latent if k not in names}
    if any(others.values()):
        check_indices(program_of_others(model, arguments, others, {}, survey.dtype))
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


def _chosen(
    model: Callable[..., Any],
    arguments: Arguments,
    sites: tuple[GaussianSite, ...],
    survey: Survey,
    purpose: Purpose,
    blamed: dict[str, str],
    fields: tuple[str, ...],
) -> tuple[str, str]:
    """Return the site to fix at a point estimate, and the reason.

    It is the smallest site without which all others can be part of the joint Gaussian.
    Among several of this size, it is one that leaves most observed sites in closed
    form. If there is no such site, it is the smallest candidate.

    :param blamed: candidates, with the reason for each.
    """
    # Names in the order of the model: those blamed come from a set.
    sizes = {s.name: prod(s.shape) for s in sites if s.name in blamed}
    passed: dict[str, int] = {}
    for name in sorted(sizes, key=lambda name: sizes[name]):
        if passed and sizes[name] > sizes[next(iter(passed))]:
            break
        rest = tuple(s for s in sites if s.name != name)
        found = Reading(model, arguments, rest, survey, purpose, fields)
        if not found.blamed():
            routes = [found.observed(k).route for k in survey.observed]
            passed[name] = sum(route is Route.GAUSS_HERMITE for route in routes)
    chosen = (
        min(passed, key=lambda k: passed[k])
        if passed
        else min(sizes, key=lambda k: sizes[k])
    )
    return chosen, blamed[chosen]


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
