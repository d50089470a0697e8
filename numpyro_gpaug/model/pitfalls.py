# SPDX-License-Identifier: Apache-2.0
"""Models whose fits would fail, or be wrong or slow, without a word: data that latents
move out of their support, latents of some members of a plate, point estimates of
effects beside their scale, and members of a plate that have models of their own."""

from __future__ import annotations

import warnings
from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp
import numpyro
from jax import Array
from numpyro import handlers

from numpyro_gpaug.errors import NotConjugateError
from numpyro_gpaug.model.arguments import Arguments
from numpyro_gpaug.model.jaxpr import (
    dependence_tree,
    inputs_of,
)
from numpyro_gpaug.model.structure import (
    fixed_key,
    flat_functions,
    run_model,
)
from numpyro_gpaug.model.survey import IMPROPER, Survey

# Members of a plate with a model of their own, from which on joint fits are slow.
MANY_MEMBERS = 32


def refuse_moving_support(survey: Survey) -> None:
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
        moving = sorted(inputs_of(found[name]))
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


def refuse_drawn(survey: Survey) -> None:
    """Raise for a latent in a plate that draws some of its members.

    :raises NotConjugateError: if there is one. Posteriors could not match members.
    """
    for name, plate in ((n, p) for n in survey.latent for p in survey.inside[n]):
        # Plates inside of a scan are not listed.
        size, drawn = survey.plates.get(plate, (0, 0))
        if drawn < size:
            raise NotConjugateError(
                f"the latent {name!r} is in the plate {plate!r}, which draws {drawn} "
                f"of {size} members. Sample it in a plate of all members, and index it "
                "by those drawn"
            )


def warn_of_members(survey: Survey) -> None:
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


def warn_of_modes(
    model: Callable[..., Any],
    arguments: Arguments,
    others: dict[str, Any],
    held: tuple[tuple[str, str], ...],
) -> None:
    """Warn about vectors that get point estimates together with a parameter of their
    prior, such as random effects from a Student-t distribution with an unknown scale.
    Their joint density may be largest at a scale near zero, with equal effects. The
    prior of a vector with a flat prior is in factors, which may contain any parameter.
    Warn about scalars with a flat prior, too, such as an intercept.

    :param model: the model.
    :param arguments: its arguments.
    :param others: latents with point estimates, by name; only shapes and dtypes matter.
    :param held: those that could be Gaussian, and why they are not.
    """

    def priors(values: dict[str, Array]) -> dict[str, Any]:
        def drawn(message: dict[str, Any]) -> Array | None:
            """Return as many members of a plate as it draws."""
            if message["name"] not in values:
                return None
            return values[message["name"]][tuple(map(slice, message["fn"].shape()))]

        seen = handlers.substitute(flat_functions(model), substitute_fn=drawn)
        trace = run_model(seen, arguments, fixed_key(), {})
        return {name: trace[name]["fn"] for name in vectors}

    vectors = [name for name, value in others.items() if value.size > 1]
    for name, why in held:
        if why == IMPROPER and name in others:
            lost = "Intervals of other latents, and predictions, take it as known"
            if name in vectors:
                lost = (
                    "Scales in a factor that penalises it become too small, often zero"
                )
            warnings.warn(
                f"{name!r} gets a point estimate, since {why}. {lost}", stacklevel=2
            )
    if not vectors:
        return
    found = dependence_tree(priors, others)
    unknown = {name: sorted(inputs_of(found[name]) - {name}) for name in vectors}
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
