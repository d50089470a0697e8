# SPDX-License-Identifier: Apache-2.0
"""Params that are set to the closed-form maximiser of the bound at every update."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
from jax import Array

from numpyro_gpaug.errors import NotConjugateError
from numpyro_gpaug.gaussians.base import Marginals
from numpyro_gpaug.guides import ConjugateGuide
from numpyro_gpaug.likelihoods.contract import MStep, lookup_m_step
from numpyro_gpaug.likelihoods.expectations import (
    Route,
    base_distribution,
    feasible,
    through_wrappers,
)
from numpyro_gpaug.model.arguments import Arguments, Model, Values
from numpyro_gpaug.model.expectation import ExpectedLogLikelihood, of_site, scaled_sum
from numpyro_gpaug.model.jaxpr import dependence_tree
from numpyro_gpaug.model.latents import Structure
from numpyro_gpaug.model.structure import Trace, run_model

# Stands for all parameters of a likelihood whose expectation has no closed form.
_DENSITY = "density"


class ClosedParam(NamedTuple):
    """A param that is one parameter of one likelihood, up to a constant factor.

    :param name: the param.
    :param site: the observed site.
    :param step: the maximiser.
    :param transform: the elementwise transform from the unconstrained param.
    """

    name: str
    site: str
    step: MStep
    transform: Any

    def update(
        self,
        expected: ExpectedLogLikelihood,
        carried: dict[str, Marginals],
        unconstrained: Array,
        slope: Array,
    ) -> Array:
        """Return the update that takes the unconstrained param to the maximum of the
        bound.

        :param expected: the likelihoods at the current values.
        :param carried: marginals of the predictors.
        :param unconstrained: the current value.
        :param slope: the derivative of the bound with respect to it.
        """
        one = jnp.ones_like(unconstrained)
        at, rate = jax.jvp(self.transform, (unconstrained,), (one,))
        statistic = self._statistic(expected, carried, jnp.ndim(at) > 0)
        best = self.step.maximiser(at, slope / rate, statistic)
        return self.transform.inv(best) - unconstrained

    def _statistic(
        self,
        expected: ExpectedLogLikelihood,
        carried: dict[str, Marginals],
        vector: bool,
    ) -> Array:
        """Return the statistic summed over the data, with their masks and scales."""
        (site,) = (s for s in expected.sites if s.name == self.site)
        fn, value, scale = expected.likelihoods[self.site]
        base, y = base_distribution(fn), feasible(fn, value)
        found = self.step.statistic(base, y, *of_site(carried, site))

        def total(part: Array) -> Array:
            return scaled_sum(through_wrappers(fn, lambda _: part), scale)

        return jax.vmap(total, in_axes=-1)(found) if vector else total(found)


def closed_params(
    names: tuple[str, ...],
    model: Model,
    guide: ConjugateGuide,
    structure: Structure,
    arguments: Arguments,
    params: Callable[[], Values],
    transforms: dict[str, Any],
) -> tuple[ClosedParam, ...]:
    """Return the params that are set in closed form, after verifying which likelihood
    parameter each of them is.

    :param names: names of params.
    :param model: the model.
    :param guide: its guide.
    :param structure: the structure of the model at these arguments.
    :param arguments: its arguments.
    :param params: returns constrained values, which the verification may use.
    :param transforms: transforms to constrained params, by name.
    :raises NotConjugateError: for a param that is not one parameter of one likelihood,
        or one without a closed-form maximiser.
    :raises ValueError: for minibatches, other latents drawn at random, and unknown
        names.
    """
    if not names:
        return ()
    if structure.subsampled or guide.random_others:
        raise ValueError(
            "m_step needs full data and point values of other latents, because the "
            "maximiser of a batch is noise. Leave the params to optim"
        )
    known, key = params(), jax.random.key(0)
    values = {**known, **guide.other_median(known)}
    if unknown := set(names) - set(values):
        raise ValueError(
            f"m_step names {sorted(unknown)}, but the params are {sorted(values)}"
        )

    def run(given: Values) -> Trace:
        return run_model(model, arguments, key, {**structure.zeros, **values, **given})

    return tuple(
        _proved(name, values[name], transforms[name], run, structure) for name in names
    )


def _parts(
    trace: Trace, structure: Structure, classes: dict[str, type]
) -> dict[str, Any]:
    """Return parameters by "site/name", and everything else that may depend on a param.
    Classes of likelihoods are added to ``classes``."""
    parameters: dict[str, Any] = {}
    rest: list[Any] = []
    for site in structure.observed:
        fn = trace[site.name]["fn"]
        base = base_distribution(fn)
        classes[site.name] = type(base)
        if site.route is not Route.CLOSED_FORM:
            parameters[f"{site.name}/{_DENSITY}"] = jax.tree.leaves(fn)
            continue
        for k in (*base.arg_constraints, "family_parameters"):
            if k in vars(base):
                parameters[f"{site.name}/{k}"] = vars(base)[k]
    for name in structure.process_names:
        f = trace[name]["fn"]
        rest += [f.mean, f.prior_variance, f.projection]
    for name in (*structure.zeros, *structure.others):
        rest += jax.tree.leaves(trace[name]["fn"])
    return {"parameters": parameters, "rest": rest}


def _proved(
    name: str,
    value: Array,
    transform: Any,
    run: Callable[[dict[str, Any]], Trace],
    structure: Structure,
) -> ClosedParam:
    """Return the one parameter that a param is, up to a factor; raise if there is
    none."""
    classes: dict[str, type] = {}

    def parts(given: Values) -> dict[str, Any]:
        return _parts(run(given), structure, classes)

    key, affine = _only_parameter(name, dependence_tree(parts, {name: value}))
    site, parameter = key.rsplit("/", 1)
    if parameter == _DENSITY:
        raise NotConjugateError(
            f"m_step names {name!r}, which the density of {site!r} depends on. The "
            "expectation of that density has no registered closed form in latents: "
            f"leave {name!r} to optim"
        )
    owner = f"parameter {parameter!r} of {classes[site].__name__}"
    step = lookup_m_step(classes[site], parameter)
    if step is None:
        raise NotConjugateError(
            f"m_step names {name!r}, but no closed-form maximiser is registered for "
            f"{owner}. Leave it to optim"
        )
    # In one program, because operation by operation a model compiles about a hundred.
    at = jax.jit(lambda x: parts({name: x})["parameters"][key])
    once, half = at(value), at(0.5 * value)
    # The parameter must be a multiple of the param (affine without offset), which a
    # maximiser over one number allows. Heights must be the param itself.
    same = affine and np.allclose(half, 0.5 * np.asarray(once))
    if parameter == "heights":
        same = same and np.shape(value) == once.shape and np.allclose(value, once)
    else:
        same = same and np.ndim(value) == 0
    if not same or transform.domain.event_dim:
        raise NotConjugateError(
            f"m_step names {name!r}, which is not {owner} up to a factor. It must "
            "be one number, or the K free heights of a link as they are"
        )
    return ClosedParam(name, site, step, transform)


def _only_parameter(name: str, states: dict[str, Any]) -> tuple[str, bool]:
    """Return the parameter that depends on a param, "site/parameter", and whether it is
    affine in the param."""
    reached = {
        key: leaf.state[name].affine
        for key, kept in states["parameters"].items()
        for leaf in jax.tree.leaves(kept)
        if name in leaf.state
    }
    elsewhere = any(name in leaf.state for leaf in jax.tree.leaves(states["rest"]))
    if len(reached) != 1 or elsewhere:
        also = " and a prior" if elsewhere else ""
        raise NotConjugateError(
            f"m_step names {name!r}, but {sorted(reached)}{also} depend on it. It "
            "must be one parameter of one likelihood, and used nowhere else"
        )
    return next(iter(reached.items()))
