# SPDX-License-Identifier: Apache-2.0
"""Initial params and state of :class:`~numpyro_gpaug.ConjugateSVI`."""

from __future__ import annotations

from functools import partial
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax import Array, random

from numpyro_gpaug.guides import ConjugateGuide
from numpyro_gpaug.infer.vi import quasi_newton
from numpyro_gpaug.infer.vi.differentiation import floats_of
from numpyro_gpaug.infer.vi.elbo import drawn
from numpyro_gpaug.infer.vi.epochs import epoch_length, first_epochs
from numpyro_gpaug.infer.vi.latent_gaussian import Natural
from numpyro_gpaug.infer.vi.plan import (
    LBFGS,
    Batch,
    Plan,
    Settings,
    constrained,
    free_numbers,
    seen_in_batches,
    transforms_of,
)
from numpyro_gpaug.infer.vi.schedules import as_schedule
from numpyro_gpaug.infer.vi.state import ConjugateState, Hyper, unknown_bound
from numpyro_gpaug.likelihoods.expectations import base_distribution
from numpyro_gpaug.math.sharding import latents_on_devices
from numpyro_gpaug.model.arguments import Arguments, Model, Values
from numpyro_gpaug.model.latents import Structure
from numpyro_gpaug.model.observations import at_prior, check_valid, valid_observations
from numpyro_gpaug.model.reading import IN_DENSITY
from numpyro_gpaug.model.structure import Trace
from numpyro_gpaug.model.validation import check_param
from numpyro_gpaug.model.view import Codes


def initial_state(
    settings: Settings,
    model: Model,
    guide: ConjugateGuide,
    arguments: Arguments,
    key: Array,
    given: Values,
    batch: Batch | None = None,
) -> tuple[ConjugateState, dict[str, Any], Codes | None, dict[tuple[str, str], Array]]:
    """Return the initial state, its constrained params, the dependence of data on
    latents, and whether the observations are valid. The function is pure, and one
    program.

    :param settings: options of the fit.
    :param model: the model.
    :param guide: its guide, set up.
    :param arguments: the model's arguments.
    :param key: random key.
    :param given: constrained values to start from instead, by param name.
    :param batch: the numbers of rows, if the arguments are a batch.
    """
    structure = guide.structure_at(arguments)
    passed: tuple[str, ...] = ()
    if batch is not None:
        model, structure, passed = seen_in_batches(model, structure, batch)
    # Steps use the numbers from one on.
    guide_key, model_key = random.split(random.fold_in(key, 0))
    guide_trace = drawn(guide.draw_others, guide_key, {}, *arguments.merge())
    others = {n: guide_trace[n]["value"] for n in structure.others}
    at = structure, arguments, {**others, **given}, model_key
    trace = at_prior(model, *at)
    if batch is None and guide.model is not model:
        _check_same(trace, at_prior(guide.model, *at), type(guide).__name__)
    params = {
        site["name"]: _numbers(site["name"], given.get(site["name"], site["value"]))
        for site in (*guide_trace.values(), *trace.values())
        if site["type"] == "param"
    }
    view = guide.view(structure, model, arguments, {**params, **others}, model_key)
    # A batch is checked without padding.
    seen = Codes.of_fit(view) if batch is None else None
    natural = latents_on_devices(guide.start_at(given, trace, view))
    state = _state(settings, structure, guide, params, natural, key)
    state = state._replace(epochs=first_epochs(structure, passed))
    return state, params, seen, valid_observations(trace)


def _check_same(own: Trace, of_guide: Trace, guide: str) -> None:
    """Raise if the guide was made for another model.

    :param own: a trace of the model.
    :param of_guide: a trace of the guide's model.
    :param guide: the name of its class.
    """
    kinds, expected = (
        {
            name: type(base_distribution(site["fn"])).__name__
            for name, site in trace.items()
            if site["type"] == "sample"
        }
        for trace in (own, of_guide)
    )
    for name in {**kinds, **expected}:
        here, there = kinds.get(name, "missing"), expected.get(name, "missing")
        if here != there:
            raise ValueError(
                f"the guide was made for another model, where site {name!r} is {there} "
                f"and not {here}. Pass {guide}(model) of the same model"
            )


def check_start(
    model: Model,
    guide: ConjugateGuide,
    arguments: Arguments,
    params: Values,
    valid: dict[tuple[str, str], Array],
    given: Values,
) -> None:
    """Raise for initial params or observations that are not valid.

    :param model: the model.
    :param guide: its guide, set up.
    :param arguments: the model's arguments.
    :param params: from :func:`initial_state`.
    :param valid: likewise.
    :param given: the values from which the caller wants to start.
    :raises ValueError: for invalid values; it names the param, or the site.
    """
    structure = guide.structure
    for name, value in params.items():
        check_param(name, value, guide.constraints[name])
    run = partial(at_prior, model, structure, values={**params, **given})
    check_valid(run, arguments, valid)
    own = guide.own_params()
    if unknown := set(given) - set(params) - set(own):
        points = {k: f"{k}_auto_loc" for k in sorted(unknown)}
        known = [f"{k!r} is {v!r}" for k, v in points.items() if v in params]
        hint = f". The point estimate of {', '.join(known)}" if known else ""
        raise ValueError(
            f"init_params names {sorted(unknown)}, but the params are "
            f"{sorted([*params, *own])}{hint}"
        )


def _state(
    settings: Settings,
    structure: Structure,
    guide: ConjugateGuide,
    params: Values,
    natural: Natural,
    key: Array,
) -> ConjugateState:
    optim, transforms = settings.optim, transforms_of(guide)
    noisy = bool(structure.subsampled) or guide.random_others
    batches = epoch_length(structure) if noisy else None
    schedule = as_schedule(settings.step_size, batches)
    dtype = jnp.result_type(*(b.dtype for b in structure.blocks))
    values = {k: jax.tree.map(transforms[k].inv, v) for k, v in params.items()}
    step_size = jnp.asarray(getattr(schedule, "value", 1.0), dtype)
    return ConjugateState(
        hyper=Hyper(
            values,
            jax.tree.map(jnp.zeros_like, values),
            jnp.ones((), dtype),
            _first(optim, values, transforms, noisy),
        ),
        natural=natural,
        step_sizes={name: step_size for name in natural},
        schedule={k: schedule.init(n) for k, n in natural.items()},
        epochs={},
        bound=jnp.asarray(unknown_bound(dtype)),
        data=jnp.uint32(0),
        mark=jnp.asarray(unknown_bound(dtype)),
        stalled=jnp.int32(0),
        unreached={name: jnp.zeros((), dtype) for name in structure.functions},
        lost=jnp.zeros((), dtype),
        basis=jnp.uint32(structure.basis_mark),
        step=jnp.int32(0),
        rng_key=key,
    )


def _first(optim: Any, values: Values, transforms: dict[str, Any], noisy: bool) -> Any:
    """Return the first state of the optimiser."""
    if optim is None or not values:
        return ()
    if optim != LBFGS:
        return optim.init(floats_of(values))
    if noisy:
        raise ValueError(
            f"optim={LBFGS!r}, the default, compares bounds, and minibatches or "
            f"latents drawn at random make them noisy. To learn {sorted(values)} pass "
            "an optax transformation, optim=optax.adam(0.01). To keep them fixed pass "
            "optim=None"
        )
    return quasi_newton.start(values, free_numbers(values, transforms))


def unmarked(state: ConjugateState) -> ConjugateState:
    """Return a state from which a run continues: it stops only by its own steps."""
    hyper = state.hyper
    if isinstance(search := hyper.optim_state, quasi_newton.Search):
        # A search that has ended tries once more.
        going = search._replace(exhausted=jnp.zeros_like(search.exhausted))
        hyper = hyper._replace(optim_state=going)
    return state._replace(
        hyper=hyper,
        mark=jnp.full_like(state.mark, unknown_bound(state.mark.dtype)),
        stalled=jnp.zeros_like(state.stalled),
    )


def opposite_start(plan: Plan, values: Values) -> Values:
    """Return starts of the other sign, by param, for sites that multiply others. A
    search does not get from one sign to the other, because at zero nothing depends on
    the others."""
    held = getattr(plan.structure, "held", ()) if plan.searches else ()
    names = [f"{site}_auto_loc" for site, why in held if why.startswith(IN_DENSITY)]
    return {k: -values[k] for k in names if k in values}


def read_params(guide: ConjugateGuide, values: Values, natural: Natural) -> Values:
    """Return constrained params, including the natural parameters, from a state; pure.

    :param guide: the guide.
    :param values: unconstrained params.
    :param natural: natural parameters by block, latent axis first.
    """
    return constrained(guide, values) | guide.natural_params(natural)


def _numbers(name: str, value: Any) -> Any:
    """Return a param with strongly typed arrays as leaves: a Python number would change
    its dtype in the first update.

    :param name: the name of the param.
    :param value: a tree of numbers.
    :raises TypeError: for other leaves.
    """

    def strong(leaf: Any) -> Array:
        kind = getattr(leaf, "dtype", type(leaf))
        if not (jnp.issubdtype(kind, np.number) or jnp.issubdtype(kind, np.bool_)):
            raise TypeError(
                f"param {name!r} has a leaf of {kind}, which is not a number. Keep "
                "functions, keys and settings outside of the param, for example by "
                "eqx.partition(module, eqx.is_inexact_array)"
            )
        dtype = jnp.result_type(float) if isinstance(leaf, float) else None
        return jnp.asarray(leaf, dtype)

    return jax.tree.map(strong, value)
