# SPDX-License-Identifier: Apache-2.0
"""Leave-one-out cross-validation, and comparison of models by it."""

from __future__ import annotations

import warnings
from collections.abc import Mapping, Sequence
from functools import partial
from typing import TYPE_CHECKING, Any

import numpy as np
from jax.typing import ArrayLike

from numpyro_gpaug.diagnostics._arviz import part_of_arviz, weighted
from numpyro_gpaug.diagnostics._importance import check_tree

if TYPE_CHECKING:
    from xarray import DataTree

# The noise that breaks ties, in nats.
TIED = 1e-7
# The part of the observations of the first model that may have a large k without a
# warning of compare.
MANY = 0.5


def loo(tree: DataTree, site: str | None = None, *, correct: bool = True) -> Any:
    """Return the leave-one-out log predictive density, by PSIS, without refitting.

    Latents that the guide fixes at a point estimate (hyperparameters) are not refitted.
    Draws of :class:`~numpyro_gpaug.NestedVI` come from the posterior and have no such
    latents. A :func:`numpyro.factor` in the plate of the observations, with a term for
    each, is part of their density. Others are neither left out nor scored, with a
    warning if they are sums over the data. An observation is left out with its weight
    (:class:`numpyro.handlers.scale`), and its density without the weight is scored.

    :param tree: a tree from :func:`to_datatree`; or one of MCMC draws, as
        :func:`arviz_base.from_numpyro` makes it with ``log_likelihood=True``.
        Entries of ``observed_data`` that are NaN are not data: masked ones, and
        missing ones of MCMC trees. The results leave them out.
    :param site: the observed site, if the model has several.
    :param correct: whether to reweight draws also from the guide to the posterior, by
        ``log_p`` and ``log_q``, not only from the posterior to the posterior without
        the observation. Otherwise draws are treated as draws from the posterior; prefer
        that only if :func:`psis_khat` is above 0.7. MCMC draws are from the posterior
        anyway.
    :return: ArviZ's ``ELPDData``: ``elpd``, ``se``, ``p``, and per observation
        ``elpd_i`` and ``pareto_k``. ArviZ warns if some ``pareto_k`` are too large.
    :raises ValueError: for a pseudo-likelihood (``BayesianSVM``), because it is not
        normalised over labels, and its cross-validated value is not a score; for a
        model without observed sites, whose data are all in factors; and if ``site`` is
        missing and there are several.

    Reference: Magnusson, Andersen, Jonasson and Vehtari (2019), Bayesian
    leave-one-out cross-validation for large data.
    """
    arviz_stats = part_of_arviz("arviz_stats")
    check_tree(tree)
    _check_site(tree, site)
    if summed := tree["log_likelihood"].attrs.get("summed"):
        warnings.warn(
            f"numpyro.factor {summed!r} is a sum over the data, and loo neither leaves "
            "out nor scores its terms. Write it in the plate of the observations, with "
            "a term for each",
            stacklevel=2,
        )
    tree = _without_ties(_without_missing(tree, site))
    stats = tree.children.get("sample_stats", {})
    # Draws of a guide are independent: their relative efficiency is 1.
    given = {"var_name": site} | ({"reff": 1.0} if "log_q" in stats else {})
    corrected = correct and "log_q" in stats
    name = site or next(iter(tree["log_likelihood"].data_vars))
    density = tree["log_likelihood"][name]
    if f"{name}.weight" in density.coords:
        removed = weighted(density)
        if corrected:
            removed = removed - (stats["log_p"] - stats["log_q"])
        log_weights, pareto_k = removed.azstats.psislw(dim=["chain", "draw"])
        given |= {"log_weights": log_weights, "pareto_k": pareto_k}
    elif corrected:
        ratio = stats["log_p"], stats["log_q"]
        return arviz_stats.loo_approximate_posterior(tree, *ratio, True, site)
    return arviz_stats.loo(tree, pointwise=True, **given)


def _check_site(tree: DataTree, site: str | None) -> None:
    """Raise if there is no likelihood for leave-one-out; see :func:`loo`."""
    pseudo = tree.children.get("pseudo_log_likelihood", {})
    names = sorted(map(str, tree.children.get("log_likelihood", {})))
    if not (pseudo or names):
        raise ValueError(
            "loo needs an observed site with a likelihood, and the model has none. "
            "numpyro.factor does not state terms for single observations: write a "
            "distribution with log_prob instead"
        )
    if site in pseudo or (site is None and not names):
        raise ValueError(
            f"loo needs an observed site with a likelihood. {list(pseudo)} have a "
            "pseudo-likelihood, which is not normalised over labels: score "
            "held-out labels by Posterior.log_prob(X, y) instead"
        )
    if (site is None and len(names) > 1) or (site is not None and site not in names):
        raise ValueError(
            f"site={site!r}: the sites with a likelihood are {names}; pass site=..."
        )


def _without_missing(tree: DataTree, site: str | None) -> DataTree:
    """Return the tree without observations that are NaN, which are not data. Tables of
    observations become flat."""
    observed = tree.children.get("observed_data", {})
    name = site or next(iter(tree["log_likelihood"].data_vars))
    if name not in observed or observed[name].dtype.kind != "f":
        return tree
    values = tree["log_likelihood"][name]
    dims = [d for d in values.dims if d not in ("chain", "draw")]
    missing = np.isnan(observed[name].values)
    missing = missing.any(tuple(range(len(dims), missing.ndim))).ravel()
    if not missing.any():
        return tree
    if len(dims) != 1:
        values, dims = values.stack(observation=dims), ["observation"]
    tree = tree.copy()
    tree["log_likelihood"] = values.isel({dims[0]: ~missing}).to_dataset(name=name)
    return tree


def _without_ties(tree: DataTree) -> DataTree:
    """Return a tree that PSIS accepts. If all draws predict an observation with
    certainty, its log-likelihoods differ by rounding or not at all, and the tail of
    equal values cannot be fitted. They get noise of the size of float32's rounding."""
    rng, changed = np.random.default_rng(0), {}
    for name, values in tree["log_likelihood"].data_vars.items():
        spread = values.max(("chain", "draw")) - values.min(("chain", "draw"))
        tied = spread < 1000 * TIED
        if tied.any():
            noise = rng.uniform(-TIED, TIED, values.shape)
            changed[name] = values + tied * values.astype(float).copy(data=noise)
    if not changed:
        return tree
    tree = tree.copy()
    tree["log_likelihood"] = tree["log_likelihood"].to_dataset().assign(changed)
    return tree


def compare(
    trees: Mapping[str, DataTree | ArrayLike],
    site: str | None = None,
    *,
    correct: bool = True,
) -> Any:
    """Rank models, and ways to fit them, by :func:`loo`, or by log densities of data
    that were left out.

    All models must have observed the same data in the same units. A density cannot be
    compared with a probability: do not compare a ``Normal`` for counts with a
    ``Poisson``. (:func:`arviz_stats.compare` accepts the trees, too, but treats draws
    of a guide as draws from the posterior.)

    :param trees: trees by name, at least two; each as in :func:`loo`. Or log densities
        of the same observations, as ``posterior.leave_out(groups, X, y).log_prob(y)``
        returns them; NaN for observations that are missing. Densities of observations
        of one group depend on one another: if groups are few, pass their sums,
        ``np.bincount(group, densities)``, so that standard errors are those of
        independent terms.
    :param site: the observed site, if the models have several.
    :param correct: as in :func:`loo`.
    :return: ArviZ's table, a :class:`pandas.DataFrame` with one row per model, the best
        first: ``elpd`` and its standard error ``se``, ``elpd_diff`` to the best and its
        standard error ``dse``, all in nats summed over observations, and ``weight`` of
        the stacked predictions; and ``bad_k``, the number of observations with a
        ``pareto_k`` above ArviZ's ``good_k`` (0.7 from 2200 draws on). :func:`loo`
        warns about these observations: if there are many, ``elpd`` is not reliable, and
        probably too high. This function warns if the first model has a large
        ``pareto_k`` for most observations.
        ArviZ 1 adds diagnostics and rounds; :func:`loo` has unrounded values. The sign
        of ``elpd_diff`` is ArviZ's: positive in 0.8, negative in 1.3. If a terminal is
        too narrow, pandas leaves out columns: use ``print(table.to_string())``.
    :raises ValueError: for fewer than two trees, observations that differ, or a
        pseudo-likelihood.

    **Example**

    >>> import numpy as np
    >>> from arviz_base import from_dict
    >>> rng = np.random.default_rng(0)
    >>> def tree(level):  # here by hand, else by to_datatree
    ...     groups = {
    ...         "posterior": {"f": rng.normal(size=(1, 100))},
    ...         "log_likelihood": {"y": level + 0.1 * rng.normal(size=(1, 100, 20))},
    ...         "observed_data": {"y": np.zeros(20)},
    ...     }
    ...     return from_dict(groups)
    >>> found = compare({"poor": tree(-2.0), "better": tree(-1.0)})
    >>> print(found[["rank", "bad_k"]])
            rank  bad_k
    better     0      0
    poor       1      0
    """
    if not isinstance(trees, Mapping):
        raise TypeError(f"trees is a {type(trees).__name__}. Pass a dict by name")
    if len(trees) < 2:
        raise ValueError(f"trees has {[*trees]}. Pass two models or more to compare")
    arrays = {n: np.asarray(x) for n, x in trees.items() if _is_array(x)}
    if arrays:
        table = _ranked(_scores_of(arrays, trees))
        return table.drop(columns=["p", "warning"], errors="ignore")
    first, *others = trees.items()
    expected = _observed(first[1], site)
    for name, tree in others:
        found = _observed(tree, site)
        if found.shape != expected.shape or not np.array_equal(
            found, expected, equal_nan=found.dtype.kind == "f"
        ):
            raise ValueError(
                f"{first[0]!r} observed an array of shape {expected.shape}, and "
                f"{name!r} one of shape {found.shape} or with other values. Models "
                "can be compared only on the same observations, in the same units "
                "and order"
            )
    with warnings.catch_warnings():
        # The table counts the data that this warning is about.
        warnings.filterwarnings("ignore", "Estimated shape parameter of Pareto")
        scores = {n: loo(tree, site, correct=correct) for n, tree in trees.items()}
    table = _ranked(scores)
    bad = {n: int((s.pareto_k > s.good_k).sum()) for n, s in scores.items()}
    best = table.index[0]
    if bad[best] > MANY * expected.size:
        warnings.warn(
            f"the first rank, of {best!r}, is not reliable: reweighted draws cannot "
            f"leave out {bad[best]} of {expected.size} observations (bad_k). Compare "
            "posterior.leave_one_out(...).log_prob(y), or log densities of new data",
            stacklevel=2,
        )
    return table.assign(bad_k=[bad[name] for name in table.index])


def _ranked(scores: dict[str, Any]) -> Any:
    """Return ArviZ's table of scores by model."""
    with warnings.catch_warnings():
        # ArviZ 0.8 calls pandas in a way that pandas 3.1 deprecates.
        warnings.filterwarnings("ignore", "The inplace keyword")
        return part_of_arviz("arviz_stats").compare(scores)


def _is_array(x: Any) -> bool:
    return hasattr(x, "dtype") or isinstance(x, Sequence)


def _scores_of(arrays: dict[str, np.ndarray], given: Mapping[str, Any]) -> Any:
    """Return ArviZ's scores of log densities by model.

    :param arrays: log densities.
    :param given: everything that is to be compared.
    """
    part_of_arviz("arviz_stats")
    from arviz_stats import utils
    from xarray import DataArray

    # From ArviZ 1.3 on, each estimator has a class; before, its name was a field.
    score = getattr(utils, "ELPDDataLOO", None) or partial(utils.ELPDData, "loo")
    shapes = {name: x.shape for name, x in arrays.items()}
    if len(arrays) < len(given):
        raise ValueError(
            f"{[k for k in given if k not in arrays]} are trees, and {[*arrays]} are "
            "log densities. Pass all models in one form"
        )
    if len({*shapes.values()}) > 1:
        raise ValueError(
            f"log densities have shapes {shapes}. Models can be compared only on the "
            "same observations, in the same order"
        )
    # Missing observations have no density in any model.
    missing = np.isnan([np.ravel(x) for x in arrays.values()]).all(0)
    scores = {}
    for name, x in arrays.items():
        terms = np.asarray(x, float).ravel()
        terms = terms[~missing]
        if not np.isfinite(terms).all():
            raise ValueError(
                f"{(~np.isfinite(terms)).sum()} of {terms.size} log densities of "
                f"{name!r} are not finite. Leave these observations out of all models"
            )
        error = np.sqrt(terms.size * terms.var())
        scores[name] = score(
            elpd=terms.sum(), se=error, p=np.nan, n_samples=1,
            n_data_points=terms.size, scale="log", warning=False, good_k=0.7,
            elpd_i=DataArray(terms), pareto_k=DataArray(np.zeros_like(terms)),
        )  # fmt: skip
    return scores


def _observed(tree: DataTree, site: str | None) -> np.ndarray:
    check_tree(tree)
    observed = tree["observed_data"]
    names = list(observed.data_vars) if site is None else [site]
    if len(names) != 1:
        raise ValueError(f"the observed sites are {names}: pass site=...")
    return np.asarray(observed[names[0]].values)
