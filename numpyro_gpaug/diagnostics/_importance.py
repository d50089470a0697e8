# SPDX-License-Identifier: Apache-2.0
"""The distance of a fit from the posterior, and estimates corrected by reweighting."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import numpy as np
from jax.typing import ArrayLike

from numpyro_gpaug.infer.nested import NestedVI
from numpyro_gpaug.math.importance import Psis, smoothed

if TYPE_CHECKING:
    from xarray import DataTree


def psis_khat(
    tree_or_log_p: DataTree | ArrayLike, log_q: ArrayLike | None = None
) -> Psis:
    """Measure the distance of a guide from the posterior by the tail of importance
    ratios.

    The result is for all latents jointly, so it grows with their number: a large value
    in hundreds of dimensions does not mean that marginals are wrong.

    :param tree_or_log_p: a tree from :func:`to_datatree`, or log joint densities of
        the draws.
    :param log_q: log densities of the guide at the draws, unless a tree is passed.
    :return: ``khat`` and smoothed log-weights; -inf if all ratios are equal.
    :raises ValueError: for shapes that differ, fewer than 25 draws, or values that are
        not finite.
    :raises TypeError: for anything but a tree without ``log_q``.

    **Example**

    >>> import numpy as np
    >>> z = np.random.default_rng(0).normal(size=1000)  # draws of the guide
    >>> log_q = -(z**2) / 2
    >>> psis_khat(-2 * z**2, log_q).khat < 0.5  # the posterior is narrower
    True
    >>> psis_khat(-(z**2) / 8, log_q).khat > 0.7  # it is wider
    True

    Reference: Yao, Vehtari, Simpson and Gelman (2018), Yes, but did it work?
    """
    found: Any = (tree_or_log_p, log_q)
    if log_q is None:
        check_tree(tree_or_log_p)
        stats: Any = tree_or_log_p["sample_stats"]  # type: ignore[index]
        found = stats["log_p"].values, stats["log_q"].values
    log_p, log_q = (np.asarray(x, float) for x in found)
    if log_p.shape != log_q.shape:
        raise ValueError(
            f"log_p has shape {log_p.shape} and log_q {log_q.shape}: expected the same"
        )
    ratios = (log_p - log_q).ravel()
    if ratios.size < 25 or not np.isfinite(ratios).all():
        raise ValueError(
            "k-hat needs at least 25 draws, all with finite log_p and log_q. Here "
            f"{np.count_nonzero(np.isfinite(ratios))} of {ratios.size} are finite"
        )
    return smoothed(ratios, np.abs(log_p).max())


def check_tree(tree: Any) -> None:
    """Raise for anything but a tree, such as a posterior, which has no draws.

    :param tree: from :func:`to_datatree`.
    :raises TypeError: for anything else; it states how to make a tree.
    """
    from xarray import DataTree

    if not isinstance(tree, DataTree):
        nested = isinstance(tree, NestedVI)
        args = "nested" if nested else "model, guide, result.params, X, y"
        raise TypeError(
            f"got a {type(tree).__name__}. Pass a tree of draws, to_datatree(key, "
            f"{args})"
        )


def psis_estimates(tree: DataTree) -> DataTree:
    r"""Compare estimates under a guide with estimates corrected by importance sampling.

    Every draw gets its Pareto-smoothed weight (:func:`psis_khat`). Weighted means over
    draws of the guide estimate means over the posterior. If the verdict is
    ``"unreliable"``, the corrected estimates are no better than the others.

    :param tree: a tree from :func:`to_datatree`.
    :return: a :class:`xarray.DataTree` with ``khat``, its ``verdict`` and
        ``effective_draws`` as ``attrs``, and the groups

        * ``posterior``: every latent and deterministic site;
        * ``posterior_predictive``: replicated observations;
        * ``likelihood``: the predictive probability (density) of every observation,
          :math:`p(y_n \mid \text{data})`; not for pseudo-likelihoods.

        Each variable has a first dimension ``statistic``, with ``"mean"``, ``"sd"``,
        ``"psis_mean"`` and ``"psis_sd"`` in the units of the site, followed by the
        dimensions of its site without ``chain`` and ``draw``. The ``sd`` of
        ``likelihood`` is over draws.
    :raises KeyError: for a tree without ``log_p`` and ``log_q``.
    :raises ValueError: as :func:`psis_khat`.

    **Example**

    >>> import numpy as np
    >>> from arviz_base import from_dict
    >>> z = np.random.default_rng(0).normal(size=(1, 4000))  # draws of the guide
    >>> stats = {"log_p": -(z**2) / 2 / 0.8**2, "log_q": -(z**2) / 2}
    >>> tree = from_dict({"posterior": {"z": z}, "sample_stats": stats})
    >>> found = psis_estimates(tree)["posterior"]["z"]
    >>> print(found.sel(statistic=["sd", "psis_sd"]).values.round(1))
    [1.  0.8]

    Reference: Vehtari, Simpson, Gelman, Yao and Gabry (2024), Pareto smoothed
    importance sampling.
    """
    from xarray import Dataset, DataTree

    psis = psis_khat(tree)
    groups = {}
    for name in ("posterior", "posterior_predictive", "log_likelihood"):
        if name in tree.children:
            found = tree[name].to_dataset()
            if name == "log_likelihood":
                name, found = "likelihood", np.exp(found)
            groups[name] = Dataset(
                {k: _estimates(v, psis.log_weights) for k, v in found.items()}
            )
    names = "khat", "verdict", "effective_draws"
    root = Dataset(attrs={name: getattr(psis, name) for name in names})
    return DataTree.from_dict({"/": root, **groups})


def _estimates(draws: Any, log_weights: np.ndarray) -> Any:
    from xarray import concat

    sample = ["chain", "draw"]
    shape = [draws.sizes[dim] for dim in sample]
    weights = draws["chain"] * draws["draw"] * 0.0 + np.exp(log_weights).reshape(shape)
    weighted = draws.weighted(weights)
    found = [f(sample) for d in (draws, weighted) for f in (d.mean, d.std)]
    labels = {"statistic": ["mean", "sd", "psis_mean", "psis_sd"]}
    return concat(found, "statistic").assign_coords(labels)
