# SPDX-License-Identifier: Apache-2.0
"""Runs of models at draws of their latents, and draws from priors: densities of latents
and of observations, and replicated data."""

from __future__ import annotations

import dataclasses
import math
from collections.abc import Callable, Iterable
from copy import copy
from functools import partial
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
import numpyro.distributions as dist
from jax import Array, random
from numpyro import handlers
from numpyro.distributions import BinomialLogits, BinomialProbs, Distribution, Unit
from numpyro.distributions.batch_util import promote_batch_shape
from numpyro.infer.inspect import get_dependencies

from numpyro_gpaug._numpyro import (
    is_scanned,
    residual_policy,
    unscaled,
    whole_plates,
)
from numpyro_gpaug.gaussians.base import selected as _selected
from numpyro_gpaug.gp.conditional import Conditional
from numpyro_gpaug.likelihoods.expectations import (
    Route,
    base_distribution,
    is_pseudo,
    lookup_expectation,
    predictive,
    through_wrappers,
)
from numpyro_gpaug.math.arrays import in_blocks
from numpyro_gpaug.math.compiling import jit
from numpyro_gpaug.model.arguments import Arguments, Model, Values
from numpyro_gpaug.model.closures import watched
from numpyro_gpaug.model.expectation import of_site, scaled_sum
from numpyro_gpaug.model.inspect import structure_of
from numpyro_gpaug.model.structure import (
    Observed,
    Trace,
    from_cache,
    is_improper,
    run_model,
)
from numpyro_gpaug.model.survey import Survey
from numpyro_gpaug.model.view import NUM_NODES, ModelView


def replicate(message: dict[str, Any], key: Array) -> Array:
    """Draw new data for a site.

    :param message: NumPyro's message of the site.
    :param key: random key.
    """
    fn = message["fn"]
    return _drawable(_of_all_steps(fn) if is_scanned(message) else fn).sample(key)


def replicated(sites: Trace, key: Array) -> dict[str, Array]:
    """Draw new data for each of some sites.

    :param sites: from :func:`data_sites`.
    :param key: random key.
    """
    each = enumerate(sites.items())
    return {k: replicate(site, random.fold_in(key, i)) for i, (k, site) in each}


class Seen(NamedTuple):
    """The value of an observed site, whether each observation is not masked, and its
    weight, the scale of the site; of the shapes of its value and of its density."""

    value: Any
    known: Any
    weight: Any

    @classmethod
    def of(cls, message: dict[str, Any]) -> Seen:
        """Read NumPyro's message of a site."""
        ones = through_wrappers(message["fn"], lambda base: jnp.ones(base.batch_shape))
        weight = scaled(jnp.ones(message["fn"].batch_shape), message["scale"])
        return cls(message["value"], ones > 0, weight)

    def masked_as_nan(self) -> np.ndarray:
        """Return the observations, NaN where they are masked. Without masks they keep
        their dtype."""
        found, given = np.asarray(self.value), np.asarray(self.known)
        if given.all():
            return found
        given = given.reshape(given.shape + (1,) * (found.ndim - given.ndim))
        return np.where(given, found.astype(np.result_type(found, np.float32)), np.nan)


def observed_sites(trace: Trace) -> Trace:
    """Return the observed sites of a trace."""
    sites = {k: s for k, s in trace.items() if s["type"] == "sample"}
    return {k: s for k, s in sites.items() if s["is_observed"]}


def data_sites(trace: Trace) -> Trace:
    """Return the observed sites of a trace that are not factors
    (``numpyro.factor``)."""
    sites = observed_sites(trace).items()
    return {k: s for k, s in sites if not isinstance(base_distribution(s["fn"]), Unit)}


def densities_of_data(trace: Trace, densities: Values) -> Values:
    """Return the log densities of observations, with the factors that belong to them:
    those in the same plates, which have a term for each observation (a late entry).

    :param trace: the trace of a model.
    :param densities: log densities of all observed sites.
    """
    found = {k: densities[k] for k in data_sites(trace)}
    for name in densities.keys() - found.keys():
        plates = trace[name]["cond_indep_stack"]
        same = [k for k in found if plates and trace[k]["cond_indep_stack"] == plates]
        if len(same) == 1:
            found[same[0]] = found[same[0]] + densities[name]
    return found


def scaled(density: Array, scale: Any) -> Array:
    """Return a log density times the scale of its site, if it has one."""
    return density if scale is None else density * scale


def _drawable(fn: Distribution) -> Distribution:
    """Return the same distribution in a form from which NumPyro can draw: a binomial
    needs a number of trials with an integer dtype."""

    def binomial(x: Any) -> bool:
        return isinstance(x, (BinomialLogits, BinomialProbs))

    def whole(x: Any) -> Any:
        ours = copy(x)
        ours.total_count = jnp.asarray(x.total_count).astype(int)
        return ours

    # Other distributions are unchanged: a user's class need not be a complete pytree.
    if not any(map(binomial, jax.tree.leaves(fn, is_leaf=binomial))):
        return fn
    return jax.tree.map(lambda x: whole(x) if binomial(x) else x, fn, is_leaf=binomial)


def _of_all_steps(fn: Distribution) -> Distribution:
    """Broadcast the parts of a distribution from a scan to the shape of all steps. The
    distribution has that shape, but NumPyro leaves its parts (the Gamma in a Student-t)
    in the shape of one step."""

    def inner(x: Any) -> bool:
        return isinstance(x, Distribution) and x is not fn

    return jax.tree.map(
        lambda x: promote_batch_shape(_of_all_steps(x)) if inner(x) else x,
        fn,
        is_leaf=inner,
    )


# The largest number of draws from the prior, enough for a picture.
MOST_DRAWS = 1000


def top_level(model: Model, arguments: Arguments) -> tuple[str, ...]:
    """Return the names of the sites whose distribution depends on no latent.

    :param model: a NumPyro model.
    :param arguments: its arguments.
    """
    args, kwargs = arguments.merge()
    found = get_dependencies(unscaled(model), args, kwargs)["prior_dependencies"]
    return tuple(name for name, sources in found.items() if sources.keys() == {name})


def log_priors(trace: Trace, names: Iterable[str]) -> Values:
    """Return log prior densities of latents by site, of the shape of their batch.

    Numbers behind a process are left out. They are standard normal whatever its
    hyperparameters are, and so their density is no choice of the user.

    :param trace: a trace of the model.
    :param names: names of sites; observed ones are left out.
    """
    latent = {k: s for k in names if not (s := trace[k])["is_observed"]}
    return {
        name: scaled(site["fn"].log_prob(site["value"]), site["scale"])
        for name, site in latent.items()
        if "process" not in site["infer"]
    }


def one_draw(
    model: Model, arguments: Arguments, values: Values, key: Array
) -> tuple[Values, dict[str, Array]]:
    """Return a draw from the prior and one from the prior predictive distribution, by
    site, given the values of some sites.

    :param model: a NumPyro model.
    :param arguments: its arguments.
    :param values: values of sites and params.
    :param key: random key.
    :raises NotImplementedError: for an improper prior.
    """
    own, new = random.split(key)
    trace = run_model(residual_policy(model, "noise"), arguments, own, values)
    if any(map(is_improper, trace.values())):
        raise NotImplementedError
    prior = {
        name: site["value"]
        for name, site in trace.items()
        if site["type"] in ("sample", "deterministic") and not site.get("is_observed")
    }
    return prior, replicated(data_sites(trace), new)


def prior_sampler(model: Model) -> Callable[..., Any]:
    """Return a compiled function from ``(arguments, params, keys)`` to draws from the
    prior and from the prior predictive distribution, by site.

    :param model: a NumPyro model.
    """

    def all_of(arguments: Arguments, params: Values, keys: Array) -> Any:
        one = partial(one_draw, model, arguments, params)
        return jax.lax.map(one, keys)

    return jit(all_of)


def prior_groups(
    sampler: Callable[..., Any],
    arguments: Arguments,
    params: Values,
    key: Array,
    num: int,
) -> dict[str, dict[str, np.ndarray]]:
    """Return draws from the prior and the prior predictive distribution, as groups of a
    tree, with axes (1, draws, ...).

    There are none if NumPyro cannot draw from a prior, because it is improper.

    :param sampler: from :func:`prior_sampler`.
    :param arguments: the model's arguments, with observations.
    :param params: values of the model's params.
    :param key: random key.
    :param num: the number of draws. More than 1000 count as 1000.
    """
    try:
        found = sampler(arguments, params, random.split(key, min(num, MOST_DRAWS)))
    except NotImplementedError:
        return {}
    prior, predicted = jax.tree.map(lambda x: np.asarray(x)[None], found)
    return {"prior": prior, "prior_predictive": predicted}


# The largest number of values that are held at once while draws are evaluated: 64 MiB
# in float32.
_BUDGET = 2**24


class Draws(NamedTuple):
    """The outputs of the model at draws, by site; the first axis runs over draws.

    :param scaled: log-likelihoods times the scales of their sites.
    :param prior: the log prior density of all latents.
    :param priors: that of each latent whose prior depends on no other.
    """

    deterministic: dict[str, Any]
    replicated: dict[str, Any]
    likelihoods: dict[str, Any]
    scaled: dict[str, Any]
    prior: Any
    priors: dict[str, Any]


class Programs:
    """Compiled programs for the draws of a guide, and for its model at the draws, for
    arguments of one shape. Tracing records the kinds of sites."""

    def __init__(self, model: Model, guide: Model, arguments: Arguments) -> None:
        whole: Any = whole_plates(model)
        self.structure = structure = structure_of(Survey(whole, arguments))
        self.model, self.guide = whole, guide
        self.top_level = frozenset(top_level(whole, arguments))
        # Given a draw, weight vectors are known, and only the residuals of processes
        # remain to be integrated.
        self.given_weights = dataclasses.replace(structure, blocks=structure.processes)
        self.delta: set[str] = set()
        self.dims: dict[str, list[str]] = {}
        self.pseudo: set[str] = set()
        self.draw: Any = jit(jax.vmap(self._draw, (None, None, 0)))
        self.prior: Any = prior_sampler(whole)
        self.at: Any = jit(jax.vmap(self._at, (None, None, 0, None, 0), (0, None)))

    def _draw(self, given: Arguments, params: Any, key: Array) -> tuple[Values, Array]:
        """Return latents and their log density. Latents that the guide declares as
        ``Delta`` are recorded, but this alone does not make a latent fixed: guides such
        as ``AutoLowRank...`` draw an auxiliary vector and declare latents as ``Delta``s
        whose ``log_density`` is the Jacobian. The sum over all sites of the guide is
        then the density of the latents."""
        args, kwargs = given.merge()
        seeded = handlers.seed(handlers.substitute(self.guide, data=params), key)
        trace = handlers.trace(seeded).get_trace(*args, **kwargs)
        names = (*(b.site for b in self.structure.blocks), *self.structure.others)
        fns = {n: base_distribution(trace[n]["fn"]) for n in names}
        self.delta.update(n for n, fn in fns.items() if isinstance(fn, dist.Delta))
        drawn = [site for site in trace.values() if site["type"] == "sample"]
        return {n: trace[n]["value"] for n in names}, log_density(drawn)

    def _at(
        self, given: Arguments, params: Any, key: Array, fixed: Any, drawn: Any
    ) -> tuple[Draws, dict[str, Seen]]:
        """Return the outputs of the model at one draw, and the observations."""
        values = {**params, **fixed, **drawn}
        noise_key, bound_key, new_key = random.split(key, 3)
        drawn_residuals = residual_policy(self.model, "noise")
        trace = run_model(drawn_residuals, given, noise_key, values)
        self.dims = {k: names for k, s in trace.items() if (names := _plate_names(s))}
        view = ModelView(self.given_weights, self.model, given, values, bound_key)
        likelihoods = _log_likelihoods(view, {**fixed, **drawn})
        deterministic = {
            n: s["value"] for n, s in trace.items() if s["type"] == "deterministic"
        }
        weighted = {k: scaled(x, trace[k]["scale"]) for k, x in likelihoods.items()}
        new_keys = random.split(new_key, len(likelihoods) + 1)
        keys, sites = dict(zip(likelihoods, new_keys, strict=False)), data_sites(trace)
        self.pseudo.update(k for k, s in sites.items() if is_pseudo(s["fn"]))
        found = Draws(
            deterministic, {k: replicate(s, keys[k]) for k, s in sites.items()},
            densities_of_data(trace, likelihoods), weighted,
            log_density([trace[n] for n in drawn]),
            log_priors(trace, self.top_level & drawn.keys()),
        )  # fmt: skip
        return found, {k: Seen.of(s) for k, s in sites.items()}

    def numbers_held(self, shapes: Draws, fixed: Values) -> int:
        """The number of values in memory while the likelihoods of one draw are
        computed."""
        size = sum(math.prod(s.shape[1:]) for s in jax.tree.leaves(shapes.likelihoods))
        width = NUM_NODES
        if not fixed.keys() >= set(self.structure.others):
            # K_ZX differs between draws.
            width += sum(math.prod(b.shape) for b in self.given_weights.blocks)
        return max(1, size * width)


# By model, guide and shapes of arguments. There are few, because each keeps its model
# and guide alive.
_CACHE: dict[Any, Programs] = {}
_MAX_PROGRAMS = 8


def programs_for(model: Model, guide: Model, arguments: Arguments) -> Programs:
    """Return compiled programs, with a cache for the last few models and guides.

    :param model: the model.
    :param guide: its guide.
    :param arguments: the model's arguments.
    """
    made = partial(Programs, model, guide, arguments)
    key = model, guide, arguments.shapes, watched(model).version()
    return from_cache(_CACHE, key, made, _MAX_PROGRAMS)


def evaluated_at(
    model: Programs,
    arguments: Arguments,
    params: Values,
    keys: Array,
    fixed: dict[str, np.ndarray],
    drawn: dict[str, np.ndarray],
) -> tuple[Draws, np.ndarray, dict[str, Seen]]:
    """Return the outputs of the model at every draw, in chunks that bound the memory,
    the log joint density of each draw and the observations, and these by site.

    :param model: from :func:`programs_for`.
    :param arguments: its arguments.
    :param params: params of model and guide.
    :param keys: random keys, one for each draw.
    :param fixed: latents that are the same in all draws.
    :param drawn: all other latents.
    """
    total = len(keys)
    shapes, _ = model.at.plain.eval_shape(arguments, params, keys, fixed, drawn)
    chunk = min(total, max(1, _BUDGET // model.numbers_held(shapes, fixed)))
    observed: dict[str, Seen] = {}

    def at(chosen: np.ndarray) -> Draws:
        block = {n: v[chosen] for n, v in drawn.items()}
        part, seen = model.at(arguments, params, keys[chosen], fixed, block)
        observed.update(seen)
        return part

    draws = in_blocks(at, total, chunk)
    # In double precision, because the ratios are small differences of large sums.
    log_p = draws.prior.astype(float) + sum(
        v.astype(float).reshape(total, -1).sum(-1) for v in draws.scaled.values()
    )
    return draws, log_p, observed


def _log_likelihoods(view: ModelView, latents: Any) -> Values:
    """Return, for each observed site, the log density of each observation given the
    draw."""
    at, maps, selected = {}, view.maps(), view.selected()
    for block in view.structure.blocks:
        v = latents[block.site]
        v = _selected(v if v.ndim > 1 else v[None], selected[block.name])
        at[block.name] = maps[block.name].given(v)
    means, spreads = view.predictors.moments(at)
    carried = view.predictors.marginals(at)

    def one(site: Observed) -> Array:
        message = view.message(site.name)
        fn, y = message["fn"], message["value"]
        if site.route is Route.CONSTANT or not site.processes:
            return fn.log_prob(y)
        registered = lookup_expectation(type(base_distribution(fn))) is not None
        if site.route is Route.CLOSED_FORM and registered and not is_pseudo(fn):
            value = predictive(fn, *of_site(carried, site)).log_prob(y)
            return through_wrappers(fn, lambda _: value)
        return _mixture(view, site, means, spreads)

    return {site.name: one(site) for site in view.structure.observed}


def _mixture(
    view: ModelView, site: Observed, means: dict[str, Array], spreads: dict[str, Array]
) -> Array:
    """Return :func:`_log_likelihoods` of a site without a closed form: by quadrature if
    each observation depends on one latent, otherwise by draws. Without residuals, as
    for a full process, both are exact."""
    pseudo = len(site.processes) == 1 and is_pseudo(view.message(site.name)["fn"])
    nodal = site._replace(route=Route.GAUSS_HERMITE) if pseudo else site
    values, weights = view.at_nodes(nodal, means, spreads, random.key(0))
    log_weights = jnp.log(weights).reshape((-1,) + (1,) * (values.ndim - 1))
    return jax.nn.logsumexp(values + log_weights, 0)


def log_density(sites: list[dict[str, Any]]) -> Array:
    """Return the log density of all sites together.

    :param sites: their messages.
    """
    terms = [scaled_sum(s["fn"].log_prob(s["value"]), s["scale"]) for s in sites]
    return sum(terms[1:], terms[0]) if terms else jnp.zeros(())


def _plate_names(site: dict[str, Any]) -> list[str]:
    """Return the names of plates as names of dimensions; ArviZ names the remaining
    axes."""
    frames = {frame.dim: frame.name for frame in site.get("cond_indep_stack", ())}
    if isinstance(site.get("fn"), Conditional):
        # Rows are the first axis of function values, for any dim of their plate.
        return [frames[-1]] if frames.keys() == {-1} else []
    if site["type"] != "sample" or not frames:
        return []
    batch = site["fn"].batch_shape
    axes = range(-len(batch), 0)
    return [frames.get(d, f"{site['name']}_dim_{i}") for i, d in enumerate(axes)]
