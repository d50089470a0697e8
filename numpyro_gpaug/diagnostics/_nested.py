# SPDX-License-Identifier: Apache-2.0
"""Runs of :class:`~numpyro_gpaug.NestedVI`: trees of their draws, and comparison of
models by their evidence."""

from __future__ import annotations

import warnings
from collections.abc import Mapping
from typing import TYPE_CHECKING, Any

import jax
import numpy as np
from jax import Array, random
from numpyro.distributions import Unit

from numpyro_gpaug.diagnostics._arviz import tree_of
from numpyro_gpaug.diagnostics._prior import (
    log_priors,
    prior_groups,
    prior_sampler,
    top_level,
)
from numpyro_gpaug.diagnostics._run import (
    masked_as_nan,
    observations,
    replicate,
    run,
)
from numpyro_gpaug.infer import NestedVI
from numpyro_gpaug.likelihoods.expectations import base_distribution
from numpyro_gpaug.model.arguments import Arguments, Values

if TYPE_CHECKING:
    import pandas
    from xarray import DataTree


def tree_of_nested(key: Array, nested: NestedVI) -> DataTree:
    """Return the equally weighted draws of a run, for
    :func:`~numpyro_gpaug.diagnostics.to_datatree`.

    :param key: random key for replicated observations.
    :param nested: a :class:`~numpyro_gpaug.NestedVI` after a run.
    """
    draws = nested.get_samples(group_by_chain=True)
    chains, num = next(iter(draws.values())).shape[:2]
    flat = {k: x.reshape(chains * num, *x.shape[2:]) for k, x in draws.items()}
    arguments = nested.arguments
    latent = {*nested.latents}
    tops = [n for n in top_level(nested.model, arguments) if n in latent]

    def one(
        given: Arguments, each: tuple[Array, dict[str, Array]]
    ) -> tuple[Values, ...]:
        key, values = each
        trace = run(nested.model, given, key, values)
        densities, replicated = {}, {}
        for i, (name, site) in enumerate(trace.items()):
            if site["type"] != "sample" or not site["is_observed"]:
                continue
            if isinstance(base_distribution(site["fn"]), Unit):
                continue
            densities[name] = site["fn"].log_prob(site["value"])
            replicated[name] = replicate(site, random.fold_in(key, i))
        return densities, replicated, log_priors(trace, tops)

    @jax.jit
    def everywhere(given: Arguments, keys: Array, values: Values) -> Any:
        first = {k: x[0] for k, x in values.items()}
        trace = run(nested.model, given, keys[0], first)
        found = jax.lax.map(lambda each: one(given, each), (keys, values))
        return {k: observations(trace[k]) for k in found[0]}, found

    key, prior_key = random.split(key)
    keys = random.split(key, chains * num)
    values = {k: x for k, x in flat.items() if k in latent}
    seen, found = everywhere(arguments, keys, values)
    densities, replicated, priors = found
    observed = {k: masked_as_nan(*x) for k, x in seen.items()}
    sampler = prior_sampler(nested.model)
    groups = {
        "posterior": {k: np.asarray(x) for k, x in draws.items()},
        "posterior_predictive": _by_chain(replicated, chains, num),
        "log_likelihood": _by_chain(densities, chains, num),
        "log_prior": _by_chain(priors, chains, num),
        **prior_groups(sampler, arguments, {}, prior_key, chains * num),
    }
    groups["observed_data"] = observed
    return tree_of(groups, None, nested.labelled_axes, nested.labels)


def _by_chain(found: Values, chains: int, num: int) -> dict[str, np.ndarray]:
    return {
        k: np.asarray(x).reshape(chains, num, *x.shape[1:]) for k, x in found.items()
    }


def compare_evidence(runs: Mapping[str, NestedVI]) -> pandas.DataFrame:
    """Rank models by their evidence ``p(y)``, the density of the data under the prior
    predictive distribution.

    The evidence depends on the **priors** of all hyperparameters and latents, however
    many data there are: a prior that is ten times too wide costs about 2.3 nats for
    each of its numbers. The evidence compares models including their priors, and does
    not exist for improper priors. All models must have observed the same data in the
    same units. :func:`compare` uses predictions, which depend less on priors.

    :param runs: by name, each :class:`~numpyro_gpaug.NestedVI` after its run; at least
        two.
    :return: a table with one row per model, the best first: ``log_evidence`` and its
        standard error ``error``, ``difference`` to the best (the logarithm of a Bayes
        factor) and its standard error ``difference_error``, and ``khat``.
    :raises ValueError: for fewer than two runs, and runs without evidence (NUTS on the
        collapsed model).
    :raises TypeError: for anything but runs.

    It warns about runs whose certificate fails: their evidence is not reliable.

    **Example**

    >>> import jax, numpyro, jax.numpy as jnp, numpyro.distributions as dist
    >>> import numpyro_gpaug as gpaug
    >>> def model(t, y=None, *, wide):
    ...     b = numpyro.sample("b", dist.Normal(0, wide))
    ...     with numpyro.plate("data", len(t)):
    ...         numpyro.sample("y", dist.Normal(b * t, 1.0), obs=y)
    >>> t, runs = jnp.arange(5.0), {}
    >>> for wide in (1.0, 100.0):
    ...     run = gpaug.NestedVI(model, num_points=64, progress_bar=False)
    ...     run.run(jax.random.key(0), t, 0.5 * t, wide=wide)
    ...     runs[f"sd {wide}"] = run
    >>> print(gpaug.diagnostics.compare_evidence(runs)["difference"].round(1))
    sd 1.0      0.0
    sd 100.0   -4.5
    Name: difference, dtype: float64
    """
    import pandas

    if not isinstance(runs, Mapping):
        raise TypeError(
            f"runs is a {type(runs).__name__}: expected a dict of NestedVI by name"
        )
    if len(runs) < 2:
        raise ValueError(f"runs holds {list(runs)}: there is nothing to compare")
    rows = {}
    for name, nested in runs.items():
        if not isinstance(nested, NestedVI):
            raise TypeError(
                f"{name!r} is a {type(nested).__name__}: expected a NestedVI that has "
                "been run"
            )
        fields = nested.get_extra_fields()
        rows[name] = [fields[k] for k in ("log_evidence", "log_evidence_error", "khat")]
        if not np.isfinite(rows[name][0]):
            raise ValueError(
                f"{name!r} has no evidence: with more than eight hyperparameters "
                "they are drawn by NUTS, which does not estimate it"
            )
        if not nested.certified:
            warnings.warn(
                f"{name!r} is not certified (k-hat {fields['khat']:.2f}; its "
                "summary gives the reason), so its evidence may be far off",
                stacklevel=2,
            )
    columns = ["log_evidence", "error", "khat"]
    table = pandas.DataFrame.from_dict(rows, orient="index", columns=columns)
    table = table.sort_values("log_evidence", ascending=False)
    best = table.iloc[0]
    table.insert(2, "difference", table["log_evidence"] - best["log_evidence"])
    errors = np.hypot(table["error"], best["error"])
    errors.iloc[0] = 0.0
    table.insert(3, "difference_error", errors)
    return table
