# SPDX-License-Identifier: Apache-2.0
"""Averages over rows of functions of a likelihood, at draws of the latents."""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping, Sequence
from functools import partial
from typing import Any

import jax
import jax.numpy as jnp
from jax import Array, random
from jax.typing import ArrayLike
from numpyro import handlers
from numpyro.distributions import Distribution, Unit

from numpyro_gpaug._numpyro import one_thread, residual_policy
from numpyro_gpaug.likelihoods.expectations import base_distribution
from numpyro_gpaug.model.arguments import Arguments, Model, Values
from numpyro_gpaug.model.structure import run_model
from numpyro_gpaug.predict.averages import Averages, Contrast, Question

Of = Callable[[Distribution], Array] | None
# Numbers held at once while draws are averaged.
BUDGET = 2**22


def response(fn: Distribution) -> Array:
    """Return the mean of a likelihood, or the probabilities of its classes, with the
    rows last.

    :param fn: the distribution of all observations given the latents.
    """
    base = base_distribution(fn)
    probs = jnp.asarray(getattr(base, "probs", 0.0))
    if not base.event_shape and probs.ndim == len(base.batch_shape) + 1:
        return jnp.moveaxis(
            jnp.broadcast_to(probs, (*fn.batch_shape, probs.shape[-1])), -1, 0
        )
    try:
        mean = fn.mean
    except NotImplementedError:
        raise ValueError(
            f"{type(base).__name__} has no mean. Pass of=, a function of the "
            "distribution, such as lambda d: d.probs"
        ) from None
    if not fn.batch_shape:
        return mean
    events = range(len(fn.batch_shape), jnp.ndim(mean))
    return jnp.moveaxis(mean, [*events], range(len(events)))


def over_rows(fn: Distribution, of: Of, rows: Mapping[str, Array]) -> Array:
    """Return a function of a likelihood averaged over rows, (groups, ...).

    :param fn: the distribution of all observations given the latents.
    :param of: the function; ``None`` for the mean.
    :param rows: ``group``, the group of each row; ``total``, an array with an entry for
        each group; ``weights``, of the rows.
    """
    values = response(fn) if of is None else jnp.asarray(of(fn))
    shape = fn.batch_shape or fn.event_shape
    split = values.ndim - len(shape)
    if split < 0 or values.shape[split:] != shape:
        raise ValueError(
            f"of returned shape {values.shape}, which must end in the shape of the "
            f"observations, {shape}"
        )
    values = jnp.moveaxis(values.reshape(*values.shape[:split], -1), -1, 0)
    for name in rows.keys() & {"group", "weights"}:
        if rows[name].shape != shape:
            raise ValueError(
                f"{'by' if name == 'group' else name} has shape {rows[name].shape}, "
                f"and the observations have shape {shape}: expected an entry for each"
            )
    size = math.prod(shape)
    weights = jnp.ravel(rows.get("weights", jnp.ones(size, values.dtype)))
    group = jnp.ravel(rows.get("group", jnp.zeros(size, int)))
    number = len(rows.get("total", jnp.zeros(1)))
    each = jnp.expand_dims(weights, [*range(1, values.ndim)])
    sums = jax.ops.segment_sum(values * each, group, number)
    totals = jax.ops.segment_sum(weights, group, number)
    return sums / jnp.expand_dims(totals, [*range(1, sums.ndim)])


def pairs(key: Array, number: Array) -> tuple[Array, Array]:
    """Return the key of a draw, and the sign of its noise. Draws come in pairs with
    opposite noise, so that the average of a linear function has no error.

    :param key: the key of all draws.
    :param number: the number of the draw.
    """
    return random.fold_in(key, number // 2), 1.0 - 2.0 * (number % 2)


def in_chunks(function: Callable[[Array], Array], num: int, held: int) -> Array:
    """Map a function over the numbers of draws; several at once, since what does not
    differ between them is then computed once.

    :param function: a function of the number of a draw.
    :param num: number of draws.
    :param held: numbers that a draw holds.
    """
    most = max(1, min(num, BUDGET // max(held, 1)))
    parts = -(-num // most)
    numbers = jnp.arange(parts * -(-num // parts)).reshape(parts, -1)
    found = jax.lax.map(jax.vmap(function), numbers)
    return found.reshape(-1, *found.shape[2:])[:num]


# -- of draws -------------------------------------------------------------------------


@one_thread
def average(
    model: Model,
    samples: Mapping[str, ArrayLike],
    *args: Any,
    of: Of = None,
    at: Mapping[str, Sequence[Any]] | None = None,
    by: ArrayLike | None = None,
    contrast: Contrast = None,
    weights: ArrayLike | None = None,
    site: str | None = None,
    **kwargs: Any,
) -> Averages:
    """Average predictions over rows, and compare them at changed covariates, for draws
    of the latents: :meth:`Posterior.average` for MCMC draws, or for those of
    :meth:`NestedVI.get_samples`.

    Rows must be of groups of the fit: the draws contain no others, and JAX would use
    the last one for them.

    :param model: the model.
    :param samples: draws of all latents by name, equally weighted, draws first.
    :param args: the model's arguments, without observations.
    :param of: as for :meth:`Posterior.average`, like the arguments that follow.
    :param at: values of changed arguments.
    :param by: the group of each row.
    :param contrast: how scenarios are compared with the first.
    :param weights: weights of the rows.
    :param site: the observed site, if the model has several.
    :param kwargs: the model's keyword arguments.
    :raises ValueError: for arguments that do not fit together.

    **Example**

    >>> import jax, numpyro, jax.numpy as jnp, numpyro.distributions as dist
    >>> from numpyro.infer import MCMC, NUTS
    >>> import numpyro_gpaug as gpaug
    >>> def model(x, y=None):
    ...     b = numpyro.sample("b", dist.Normal(0, 1))
    ...     with numpyro.plate("data", len(x)):
    ...         numpyro.sample("y", dist.Poisson(jnp.exp(b * x)), obs=y)
    >>> x, y = jnp.array([0.0, 1.0, 0.0, 1.0]), jnp.array([1, 2, 1, 3])
    >>> mcmc = MCMC(NUTS(model), num_warmup=100, num_samples=100, progress_bar=False)
    >>> mcmc.run(jax.random.key(0), x, y)
    >>> draws = mcmc.get_samples()
    >>> ratio = gpaug.average(model, draws, x, at={"x": [0.0, 1.0]}, contrast="ratio")
    >>> print(bool(abs(ratio.mean[0] - jnp.exp(draws["b"]).mean()) < 1e-4))
    True
    """
    question = Question.of(
        model, args, kwargs, {}, at=at, by=by, contrast=contrast, weights=weights
    )
    key, rows = random.key(0), question.rows
    first = Arguments.split(*question.scenarios[0])
    trace = jax.eval_shape(partial(_sites, model), first)
    known = {k: jnp.asarray(samples[k]) for k in trace if k in samples}
    name = _observed(set(trace) - known.keys(), site)
    num = len(next(iter(known.values())))
    drawn = residual_policy(model, "noise")

    @jax.jit
    def all_of(here: Arguments, known: Any, rows: Any) -> Array:
        def one(i: Array) -> Array:
            values = {k: x[i] for k, x in known.items()}
            trace = run_model(drawn, here, random.fold_in(key, i), values)
            return over_rows(trace[name]["fn"], of, rows)

        return in_chunks(one, num, sum(x.size for x in here.arrays))

    scenarios = [Arguments.split(*scenario) for scenario in question.scenarios]
    return question.answered([all_of(x, known, rows) for x in scenarios], None)


def _sites(model: Model, arguments: Arguments) -> Values:
    """Return values of the sample sites of a model, without factors."""
    args, kwargs = arguments.merge()
    trace = handlers.trace(handlers.seed(model, random.key(0))).get_trace(
        *args, **kwargs
    )
    return {
        k: s["value"]
        for k, s in trace.items()
        if s["type"] == "sample" and not isinstance(base_distribution(s["fn"]), Unit)
    }


def _observed(names: set[str], site: str | None) -> str:
    if site in names:
        return site
    if site is not None or len(names) != 1:
        raise ValueError(
            f"site={site!r}: the sites of the model without draws are "
            f"{sorted(names)}, and one of them is averaged. Pass site=..., and draws "
            "of all latents"
        )
    return names.pop()
