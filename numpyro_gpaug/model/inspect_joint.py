# SPDX-License-Identifier: Apache-2.0
"""Which latents of a model are Gaussian and reach its data affinely, and how each
observed site depends on them; found by reading the traced model, not by probing it."""

from __future__ import annotations

import warnings
from collections.abc import Callable
from dataclasses import replace
from math import prod
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
from jax import Array
from numpyro.distributions import constraints

from numpyro_gpaug._numpyro import is_scanned
from numpyro_gpaug.errors import NotConjugateError
from numpyro_gpaug.gp.process import Conditional
from numpyro_gpaug.likelihoods.augmentation import lookup_augmentation
from numpyro_gpaug.likelihoods.expectations import (
    Route,
    base_distribution,
    lookup_correlated,
    lookup_expectation,
)
from numpyro_gpaug.model.arrow import Predictors
from numpyro_gpaug.model.exponentials import has_form
from numpyro_gpaug.model.forms import Asked, find_form, refuse_large
from numpyro_gpaug.model.frontier import frontier
from numpyro_gpaug.model.gaussians import whitening
from numpyro_gpaug.model.indices import check_indices, program_of_others
from numpyro_gpaug.model.joint import JointView
from numpyro_gpaug.model.latents import (
    GaussianSite,
    Grouping,
    JointStructure,
    Parts,
    joint_block,
    parts_of,
    whitened,
)
from numpyro_gpaug.model.plates import trace_plates, with_whole_sizes
from numpyro_gpaug.model.program import Program
from numpyro_gpaug.model.structure import (
    Arguments,
    Observed,
    Plate,
    Structure,
    Trace,
    is_improper,
    run_model,
    unobserved_error,
)

# Predictors of one datum whose expectation is by quadrature.
_MOST = 2
IMPROPER = (
    "its prior is flat, so that it is a point: with a wide one, such as "
    "dist.Normal(0, 100), it is Gaussian"
)


class _Survey(NamedTuple):
    candidates: tuple[GaussianSite, ...]
    latent: tuple[str, ...]
    observed: tuple[str, ...]
    plates: dict[str, Plate]
    constraints: dict[str, Any]
    dtype: Any
    shapes: dict[str, tuple[int, ...]]
    functions: dict[str, jax.ShapeDtypeStruct]
    held: tuple[tuple[str, str], ...]
    walks: tuple[str, ...]


def inspect_joint(
    model: Callable[..., Any], uses: float, *args: Any, **kwargs: Any
) -> JointStructure:
    """The structure of a model whose Gaussian latents are held jointly.

    :param model: a NumPyro model.
    :param uses: see :func:`~numpyro_gpaug.model.forms.find_form`.
    :param args: its arguments.
    :param kwargs: its keyword arguments.
    :raises NotConjugateError: for discrete latents, and for a site whose log-density is
        no sum over data of functions of one or two affine predictors each, whichever
        latent is held fixed.
    """
    arguments = Arguments.split(args, kwargs)
    survey = _surveyed(model, arguments)
    sites, held = survey.candidates, [*survey.held]
    while True:
        found = _Read(model, arguments, sites, survey)
        if not (blamed := found.blamed()):
            break
        name, reason = _chosen(model, arguments, sites, survey, blamed)
        held.append((name, reason))
        sites = tuple(s for s in sites if s.name != name)
    check_indices(found.program)
    names = {s.name for s in sites}
    others = {k: survey.shapes[k] for k in survey.latent if k not in names}
    if any(others.values()):
        check_indices(program_of_others(model, arguments, others, {}, survey.dtype))
    structure = JointStructure(
        blocks=(joint_block(sites, survey.dtype),) if sites else (),
        others=tuple(n for n in survey.latent if n not in names),
        observed=tuple(found.observed(n) for n in survey.observed),
        plates=survey.plates,
        functions=survey.functions,
        constraints=survey.constraints,
        sites=sites,
        dtype=survey.dtype,
        held=tuple(held),
        shapes=tuple(survey.shapes.items()),
    )
    if not sites or not survey.observed:
        return structure

    def at(structure: JointStructure, arrays: tuple[Array, ...]) -> Predictors:
        given = arguments._replace(arrays=arrays)
        return JointView(structure, model, given, {}, jax.random.key(0)).predictors

    walks = tuple(name for name in survey.walks if name in names)
    view = JointView(structure, model, arguments, {}, jax.random.key(0))
    asked = Asked(at, arguments.arrays, view.pairs, view.rows)
    structure = find_form(structure, walks, asked, uses)
    refuse_large(structure, walks)
    return structure


def _chosen(
    model: Callable[..., Any],
    arguments: Arguments,
    sites: tuple[GaussianSite, ...],
    survey: _Survey,
    blamed: dict[str, str],
) -> tuple[str, str]:
    """The site to hold fixed: one without which all the others pass, of the smallest;
    otherwise the smallest.

    :param blamed: sites that may be at fault, with what they do.
    """
    sizes = {s.name: prod(s.shape) for s in sites}
    ordered = sorted(blamed, key=lambda name: sizes[name])
    for name in ordered:
        rest = tuple(s for s in sites if s.name != name)
        if not _Read(model, arguments, rest, survey).blamed():
            return name, blamed[name]
    return ordered[0], blamed[ordered[0]]


def _surveyed(
    model: Callable[..., Any], arguments: Arguments, data: tuple[str, ...] = ()
) -> _Survey:
    """Sites and shapes.

    :param data: names of observed sites, where they are not observed.
    """

    def is_data(site: dict[str, Any]) -> bool:
        return site.get("is_observed", False) or site["name"] in data

    candidates: list[GaussianSite] = []
    latent: list[str] = []
    observed: list[str] = []
    constraints_: dict[str, Any] = {}
    held: list[tuple[str, str]] = []
    dtypes: list[Any] = []
    shapes: dict[str, tuple[int, ...]] = {}
    functions: dict[str, jax.ShapeDtypeStruct] = {}
    walks: list[str] = []

    def visit(trace: Trace) -> None:
        rows = {
            frame.name
            for site in trace.values()
            if site["type"] == "sample" and is_data(site)
            for frame in site["cond_indep_stack"]
        }
        for name, site in trace.items():
            if site["type"] == "sample":
                shapes[name] = jnp.shape(site["value"])
            elif isinstance(site.get("fn"), Conditional):
                f = site["fn"]
                functions[name] = jax.ShapeDtypeStruct(f.shape, f.dtype)
            if site["type"] == "param":
                constraints_[name] = site["kwargs"].get("constraint", constraints.real)
            elif site["type"] == "sample" and is_data(site):
                observed.append(name)
            elif site["type"] == "sample":
                latent.append(name)
                _refuse(site, any(is_data(s) for s in trace.values() if "fn" in s))
                found = whitening(site["fn"])
                support = getattr(site["fn"], "support", None)
                anywhere = getattr(support, "base_constraint", support)
                if is_improper(site) and anywhere is constraints.real:
                    held.append((name, IMPROPER))
                if found is not None and site["scale"] is not None:
                    held.append(
                        (
                            name,
                            "its density is scaled, by handlers.scale or "
                            "a plate that is subsampled",
                        )
                    )
                elif found is not None:
                    local = any(f.name in rows for f in site["cond_indep_stack"])
                    known = tuple(found.shape), shapes[name]
                    candidates.append(GaussianSite(name, *known, local))
                    # States of a scan may add up, as a walk's do.
                    scanned = is_scanned(site) and len(found.shape) == 1
                    if found.steps is not None or scanned:
                        walks.append(name)
                    dtypes.append(jnp.result_type(site["value"]))

    def abstract(arrays: tuple[Array, ...]) -> Trace:
        given = arguments._replace(arrays=arrays)
        trace = run_model(with_whole_sizes(model), given, jax.random.key(0), {})
        visit(trace)
        return trace

    plates = trace_plates(abstract, arguments)
    dtype = jnp.result_type(*dtypes) if dtypes else jnp.result_type(float)
    names = tuple(latent), tuple(observed)
    return _Survey(
        tuple(candidates), *names, plates, constraints_, dtype, shapes, functions,
        tuple(held), tuple(walks),
    )  # fmt: skip


def joint_structure_at(
    model: Callable[..., Any], structure: JointStructure, arguments: Arguments
) -> JointStructure:
    """``structure`` with the plates and shapes that these arguments give the model.

    :param model: the model.
    :param structure: what it is made of, from other arguments.
    :param arguments: its arguments.
    """
    data = tuple(site.name for site in structure.observed)
    survey = _surveyed(model, arguments, data)
    names = {s.name for s in structure.sites}
    sites = tuple(s for s in survey.candidates if s.name in names)
    here = structure.with_sites(sites).in_steps(structure.steps)
    for grouping in here.arrow.all if here.arrow else ():
        _check_members(here, grouping)
    shapes = tuple(survey.shapes.items())
    return replace(
        here, plates=survey.plates, functions=survey.functions, shapes=shapes
    )


def _check_members(structure: JointStructure, grouping: Grouping) -> None:
    """Raises where sites that had members in common no longer have as many.

    :param structure: of the model at other arguments than those it was found at.
    :param grouping: of its sites.
    """
    alone = [Grouping((site,)) for site in grouping.sites]
    found = {g.sites[0][0]: structure.members(g) for g in alone}
    if len(set(found.values())) > 1:
        raise ValueError(
            f"{[*found]} had the same members where the model was fitted (the steps of "
            f"a walk and their noise, effects of one plate), and have {found} of them "
            "here: give all the same number, of the walk and of the plate"
        )


def _refuse(site: dict[str, Any], observes: bool) -> None:
    """Raises for a latent that no guide takes.

    :param site: its message.
    :param observes: whether the model observes anything.
    """
    name = site["name"]
    if name.endswith("_unobserved"):
        raise NotConjugateError(
            f"obs_mask makes {name!r} a latent: leave out what is missing by "
            "numpyro.handlers.mask(mask=obs_mask) around the site instead"
        )
    if site["fn"].is_discrete:
        if not observes:
            raise unobserved_error([name])
        raise NotConjugateError(
            f"the latent site {name!r} is discrete: if it is data, pass the model its "
            "values (obs=...); else sum it out (a mixture likelihood), or sample the "
            "model by MCMC"
        )


class _Read:
    """A model read as a function of some of its Gaussian sites."""

    def __init__(
        self,
        model: Callable[..., Any],
        arguments: Arguments,
        sites: tuple[GaussianSite, ...],
        survey: _Survey,
    ) -> None:
        self._survey = survey
        self._classes: dict[str, type] = {}
        shapes = {s.name: jax.ShapeDtypeStruct(s.shape, survey.dtype) for s in sites}
        self._processes = set(survey.functions)

        def parts(z: dict[str, Array]) -> Parts:
            seeded = whitened(model, z)
            trace = run_model(seeded, arguments, jax.random.key(0), {})
            for name in survey.observed:
                self._classes[name] = type(base_distribution(trace[name]["fn"]))
            return parts_of(trace, tuple(z), survey.observed)

        self.program = Program(parts, shapes | survey.functions)
        self.parts: Parts = self.program.outputs

    def _sources(self, tree: Any) -> set[str]:
        leaves = jax.tree.leaves(tree)
        found = {k for x in leaves for k in self.program.value(x.variable).state}
        return found - self._processes

    def blamed(self) -> dict[str, str]:
        """Sites that cannot all be part of a joint Gaussian, and what each does."""
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
                if len(sources) < 2:
                    raise NotConjugateError(
                        f"site {name!r}: its log-density is no sum over data of "
                        f"functions of one or two affine predictors: {reason}. "
                        f"{_instead(reason)}; MCMC(NUTS(model)) samples any model"
                    )
                return {s: f"in the density of {name!r}, {reason}" for s in sources}
        return {}

    def _why_not(self, name: str) -> str | None:
        if not self.program.depends(self.parts.densities[name].variable):
            return None
        if self._closed(name):
            return self._mixed_residual((self.parts.parameters[name].variable,))
        found = frontier(self.program, [self.parts.densities[name].variable])
        if found.reason is not None:
            return found.reason
        if len(found.roots) > _MOST:
            return f"there are {len(found.roots)} predictors"
        return self._mixed_residual(found.roots)

    def _mixed_residual(self, roots: tuple[int, ...]) -> str | None:
        """Function values of a sparse process have a variance of their own given the
        inducing values, which each datum can count for one value only."""
        for process in self._processes:
            states = [self.program.value(r).state.get(process) for r in roots]
            reached = [s for s in states if s is not None]
            if len(reached) > 1 or any(not s.elementwise for s in reached):
                return (
                    f"several function values of the sparse process {process!r} reach "
                    "one datum: write it without inducing inputs, numpyro.sample("
                    f'"{process}", dist.MultivariateNormal(mean, kernel(X, X)))'
                )
        return None

    def _closed(self, name: str) -> bool:
        """Whether all that depends on latents is the parameter of a registered
        likelihood, and it affinely."""
        if name not in self.parts.parameters:
            return False
        parameter = self.parts.parameters[name].variable
        if not self.program.affine(parameter):
            return False
        token = self.program.value(parameter).token
        leaves = jax.tree.leaves(self.parts.likelihoods[name])
        values = [self.program.value(leaf.variable) for leaf in leaves]
        return all(v.token == token for v in values if v.state)

    def observed(self, name: str) -> Observed:
        """The route of an observed site."""
        cls = self._classes[name]
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
            assert expectation is not None
            return Observed(
                name, expectation.latents, ((),), Route.CLOSED_FORM, (), augmented,
                expectation.log_concave, None,
            )  # fmt: skip
        found = frontier(self.program, [variable])
        num, form = len(found.roots), has_form(found, self.program.avals)
        return Observed(
            name, tuple(f"predictor {i}" for i in range(num)), ((),) * num,
            Route.EXPONENTIAL if form else Route.GAUSS_HERMITE, (), augmented=False,
            log_concave=False, reason=None,
        )  # fmt: skip


def _instead(reason: str) -> str:
    """What to write where a likelihood is refused for this reason."""
    if reason.startswith("scan "):
        return (
            "Let the scan return its states, and write what is not affine in them and "
            "the observed sites after it, in a plate"
        )
    return (
        "Of softmax likelihoods Categorical(logits=eta), with eta affine, is taken; "
        "others of Gaussian processes are for AutoSparseGP"
    )


def warn_of_points(
    model: Callable[..., Any],
    structure: Structure,
    args: tuple[Any, ...],
    kwargs: dict[str, Any],
) -> None:
    """Says which latents get point estimates though they could be Gaussian jointly with
    all others: random effects in plates, scalar weights.

    :param model: the model.
    :param structure: its blocks, which are held independent, and all other latents.
    :param args: its arguments.
    :param kwargs: its keyword arguments.
    """
    if not structure.gaussian_others or not structure.observed:
        return
    try:
        joint = inspect_joint(model, 1.0, *args, **kwargs)
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
            "them point estimates: AutoLatentGaussian(model) holds them and all "
            "processes jointly; other=AutoNormal gives them normals of their own",
            stacklevel=2,
        )
