# SPDX-License-Identifier: Apache-2.0
"""Runs of models at draws."""

from __future__ import annotations

from copy import copy
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax import Array
from numpyro import handlers
from numpyro.distributions import BinomialLogits, BinomialProbs, Distribution
from numpyro.distributions.batch_util import promote_batch_shape

from numpyro_gpaug._numpyro import is_scanned, residual_policy
from numpyro_gpaug.likelihoods.expectations import through_wrappers
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
