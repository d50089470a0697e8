# SPDX-License-Identifier: Apache-2.0
"""Draws from the prior of a model, and the latents whose priors the user states."""

from __future__ import annotations

from collections.abc import Callable, Iterable
from functools import partial
from typing import Any

import jax
import numpy as np
from jax import Array, random
from numpyro.distributions import Unit
from numpyro.infer.inspect import get_dependencies

from numpyro_gpaug.diagnostics._run import replicate, run, scaled
from numpyro_gpaug.likelihoods.expectations import base_distribution
from numpyro_gpaug.math.compiling import jit
from numpyro_gpaug.model.arguments import Arguments, Model, Values
from numpyro_gpaug.model.structure import Trace

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
