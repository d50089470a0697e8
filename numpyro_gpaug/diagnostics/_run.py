# SPDX-License-Identifier: Apache-2.0
"""Runs of models at draws of their latents, and draws from priors."""

from __future__ import annotations

from collections.abc import Callable, Iterable
from copy import copy
from functools import partial
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax import Array, random
from numpyro import handlers
from numpyro.distributions import BinomialLogits, BinomialProbs, Distribution, Unit
from numpyro.distributions.batch_util import promote_batch_shape
from numpyro.infer.inspect import get_dependencies

from numpyro_gpaug._numpyro import is_scanned, residual_policy
from numpyro_gpaug.likelihoods.expectations import base_distribution, through_wrappers
from numpyro_gpaug.math.compiling import jit
from numpyro_gpaug.model.arguments import Arguments, Model, Values
from numpyro_gpaug.model.structure import Trace


def run(
    model: Model, arguments: Arguments, key: Array, values: Values, policy: str = "mean"
) -> Trace:
    """Return the trace of a model at values of its latents.

    :param model: a NumPyro model.
    :param arguments: its arguments.
    :param key: random key for all sites that are not in ``values``.
    :param values: values by site.
    :param policy: the policy for residuals, see :class:`residual_policy`.
    """
    args, kwargs = arguments.merge()
    filled = handlers.substitute(handlers.seed(model, key), data=values)
    return handlers.trace(residual_policy(filled, policy)).get_trace(*args, **kwargs)


def replicate(message: dict[str, Any], key: Array) -> Array:
    """Draw new data for a site.

    :param message: NumPyro's message of the site.
    :param key: random key.
    """
    fn = message["fn"]
    return _drawable(_of_all_steps(fn) if is_scanned(message) else fn).sample(key)


def observations(message: dict[str, Any]) -> tuple[Array, Array]:
    """Return the value of an observed site, and which of its entries are not masked.

    :param message: NumPyro's message of the site.
    """
    ones = through_wrappers(message["fn"], lambda base: jnp.ones(base.batch_shape))
    return message["value"], ones > 0


def masked_as_nan(value: Array, known: Array) -> np.ndarray:
    """Return observations, NaN where they are masked. Without masks they keep their
    dtype.

    :param value: from :func:`observations`.
    :param known: likewise.
    """
    found, given = np.asarray(value), np.asarray(known)
    if given.all():
        return found
    given = given.reshape(given.shape + (1,) * (found.ndim - given.ndim))
    return np.where(given, found.astype(np.result_type(found, np.float32)), np.nan)


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
    found = get_dependencies(model, args, kwargs)["prior_dependencies"]
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
    """
    own, new = random.split(key)
    trace = run(model, arguments, own, values, "noise")
    prior, predicted = {}, {}
    for i, (name, site) in enumerate(trace.items()):
        observed = site["type"] == "sample" and site["is_observed"]
        if observed and not isinstance(base_distribution(site["fn"]), Unit):
            predicted[name] = replicate(site, random.fold_in(new, i))
        elif site["type"] in ("sample", "deterministic") and not observed:
            prior[name] = site["value"]
    return prior, predicted


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
