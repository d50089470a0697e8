# SPDX-License-Identifier: Apache-2.0
"""The structure of a model with one Gaussian on all latents: which latents it has, what
is affine in them, and the route of each observed site.

Everything comes from abstract tracing (no arithmetic runs). :class:`Reading` reads a
model as a program of the numbers behind its latents.
"""

from __future__ import annotations

import warnings
from collections.abc import Callable, Sequence
from functools import cache
from math import prod
from typing import Any

import jax
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
from numpyro_gpaug.math.arrays import is_traced
from numpyro_gpaug.model.arguments import Arguments
from numpyro_gpaug.model.correlated_data import correlated_axes
from numpyro_gpaug.model.costs import FEWEST_NODES, FIT, MAX_DENSE, Purpose
from numpyro_gpaug.model.exponentials import has_form
from numpyro_gpaug.model.forms import Queries, find_form, find_sparse, refuse_large
from numpyro_gpaug.model.frontier import frontier, separation, single_inputs
from numpyro_gpaug.model.gaussians import Field
from numpyro_gpaug.model.jaxpr import (
    called_name,
    has_other_derivative,
    inputs_of,
    source_of,
)
from numpyro_gpaug.model.latents import GaussianSite, Grouping, Structure
from numpyro_gpaug.model.links import refuse_reversed
from numpyro_gpaug.model.observations import check_constants, wrong_labels
from numpyro_gpaug.model.pitfalls import (
    refuse_drawn,
    refuse_moving_support,
    warn_of_members,
)
from numpyro_gpaug.model.program import Program, check_indices
from numpyro_gpaug.model.structure import (
    Observed,
    run_model,
)
from numpyro_gpaug.model.survey import Survey
from numpyro_gpaug.model.whitened import (
    Parts,
    elementwise_expectation,
    find_missing_link,
    parts_of,
    whitened,
)

# The reason why, for example, a site is a hyperparameter that another site is
# multiplied by.
IN_DENSITY = "in the density"
_SEVERAL = "several function values"
_OTHER_DERIVATIVE = " has a custom derivative, not the derivative of its values"


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
        wrong: list[ValueError] = []

        def parts(z: dict[str, Array]) -> Parts:
            seeded = whitened(survey.model, z, fields)
            trace = run_model(seeded, survey.arguments, jax.random.key(0), {})
            check_constants(trace)
            wrong.extend(wrong_labels(trace, survey.observed))
            for name in survey.observed:
                fn = trace[name]["fn"]
                cls = self.classes[name] = type(base_distribution(fn))
                known = elementwise_expectation(fn) or lookup_correlated(cls)
                self._single[name] = known is not None or bool(correlated_axes(fn))
            return parts_of(trace, tuple(z), tuple(survey.observed), fields)

        self.program = Program(parts, shapes | survey.functions)
        for error in wrong:
            raise error
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
            try:
                rest = found.blamed()
            except NotConjugateError:
                continue  # without this site the model is refused: try another
            if not rest:
                routes = [found.observed(k).route for k in self._survey.observed]
                passed[name] = sum(route is Route.GAUSS_HERMITE for route in routes)
        best = passed or sizes
        name = min(best, key=lambda k: best[k])
        return name, tried[name]

    def blamed(self) -> dict[str, str]:
        """Return the sites that cannot all be part of a joint Gaussian, with the reason
        for each."""
        for name, spread in self.parts.spreads.items():
            if sources := inputs_of(spread) - self._processes:
                return {s: f"it is in the scale of {name!r}" for s in sources}
        for name, fn in self.parts.others.items():
            if sources := inputs_of(fn.tree[0]) - self._processes:
                how = _transformed(fn.tree[0], name)
                return {s: f"the prior of {name!r} depends on it{how}" for s in sources}
        for name in self._survey.observed:
            if reason := self.observed(name).reason:
                sources = inputs_of(self.parts.densities[name]) - self._processes
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
                    f"one datum depends on {_SEVERAL} of the sparse process "
                    f"{process!r}, by two predictors"
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
                        f"one datum depends on {_SEVERAL} of the sparse process "
                        f"{process!r}, and their matrix, {sizes[0]} by {max(sizes)}, "
                        "is too large"
                    )
        return None

    def _closed(self, name: str) -> bool:
        """Whether latents reach the data only through the parameters of a registered
        likelihood, these are affine, and no two depend on the same latent. Only exact
        samplers may have several for a datum."""
        if not (self._projected or self._single[name]):
            return False
        states = [x.state for x in self.parts.parameters.get(name, {}).values()]
        found = [(k, d.affine) for state in states for k, d in state.items()]
        alone = len(found) == len(dict(found)) > 0
        affine = all(affine for _, affine in found)
        return alone and affine and not inputs_of(self.parts.rest[name])

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
    base = base_distribution(fn)
    if not isinstance(base, dist.TransformedDistribution):
        return ""
    if not isinstance(base.base_dist, dist.Normal):
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
    if _SEVERAL in reason:
        return (
            "Write the process without inducing inputs, "
            'numpyro.sample("f", dist.MultivariateNormal(mean, kernel(X, X)))'
        )
    return (
        "Combine data by operations on the affine predictor, before its link. Write a "
        "softmax as Categorical(logits=eta) or Multinomial(total, logits=eta). "
        "AutoSparseGP fits RobustMax and LogisticSoftmax"
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
    :raises NotConjugateError: for discrete latents, for latents of some members of a
        plate, and for a site whose log-density is not a sum over data of functions of
        one or two affine predictors each, whichever latent is fixed.
    """
    survey = Survey(model, arguments)
    survey.refuse(survey.latent)
    refuse_drawn(survey)
    warn_of_members(survey)
    fields = _resolved(survey)
    size = sum(prod(own.shape) for own in fields.values())
    if purpose.fields and survey.observed and size >= FEWEST_NODES:
        found = _read(survey, purpose, tuple(fields))
        if found is not None:
            asked = Queries(found, model, arguments)
            sparse = find_sparse(found, asked, purpose, fields)
            if sparse is not None:
                return sparse
    found = _read(survey, purpose, ())
    assert found is not None
    return found


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
    asked = Queries(structure, model, arguments)
    form = find_form(structure, asked, purpose)
    if not (purpose.projected and form.form.any_rows and asked.rows <= purpose.largest):

        def chains() -> tuple[Grouping, ...]:
            return tuple(x.steps for x in asked.whole.loops)

        refuse_large(form, chains, purpose.largest, traced=is_traced(arguments))
    return form


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
    refuse_moving_support(survey)
    survey.check_codes(others)
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
        rounded=tuple(survey.rounded),
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
