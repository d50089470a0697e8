# SPDX-License-Identifier: Apache-2.0
"""The influence of priors and likelihood on a posterior, by power scaling."""

from __future__ import annotations

import warnings
from collections.abc import Sequence
from typing import TYPE_CHECKING

from jax import random

from numpyro_gpaug.diagnostics._arviz import part_of_arviz, weighted
from numpyro_gpaug.diagnostics._importance import check_tree
from numpyro_gpaug.diagnostics._tree import tree_of_nested
from numpyro_gpaug.infer import NestedVI

if TYPE_CHECKING:
    import pandas
    from xarray import DataTree


def sensitivity(
    draws: NestedVI | DataTree,
    var_names: Sequence[str] | None = None,
    *,
    threshold: float = 0.05,
) -> pandas.DataFrame:
    r"""Return how much the posterior of each latent depends on the priors, and how much
    on the likelihood.

    The prior :math:`p(\theta)^a`, or the likelihood, is raised to powers a little above
    and below 1, and the draws of the run are weighted again, without another run. A
    sensitivity is the change of the marginal posterior per doubling of the power. If a
    posterior depends on both the prior and the data, these may be in conflict. If it
    depends on the prior only, the data contain little information: choose the prior
    with care.

    Only priors of latents that depend on no other latent are scaled: they are the
    user's choice.

    :param draws: a :class:`~numpyro_gpaug.NestedVI` after its run; or a tree of
        :func:`to_datatree` or of MCMC draws, with the groups ``log_prior`` and
        ``log_likelihood``.
    :param var_names: names of latents and deterministic sites. The default is the
        latents whose priors are scaled.
    :param threshold: sensitivities above it are pointed out.
    :return: the table of :func:`arviz_stats.psense_summary`, with one row per entry:
        ``prior``, ``likelihood`` and ``diagnosis``, which is "✓" if both are small.
        Entries that are the same in all draws (the diagonal of a correlation matrix)
        are left out.
    :raises ValueError: for a tree without one of these groups: if all hyperparameters
        are point estimates, no posterior of them can change.

    Reference: Kallioinen, Paananen, Bürkner and Vehtari (2024), Detecting and
    diagnosing prior and likelihood sensitivity with power-scaling.

    **Example**

    >>> import jax, numpyro, jax.numpy as jnp, numpyro.distributions as dist
    >>> import numpyro_gpaug as gpaug
    >>> def model(t, y=None):
    ...     b = numpyro.sample("b", dist.Normal(0, 0.1))
    ...     with numpyro.plate("data", len(t)):
    ...         numpyro.sample("y", dist.Normal(b * t, 1.0), obs=y)
    >>> t = jnp.arange(5.0)
    >>> nested = gpaug.NestedVI(model, num_points=64, progress_bar=False)
    >>> nested.run(jax.random.key(0), t, t)
    >>> table = gpaug.diagnostics.sensitivity(nested)
    >>> print(table.loc["b", "diagnosis"])
    potential prior-data conflict
    """
    if isinstance(draws, NestedVI):
        draws = tree_of_nested(random.key(0), draws)
    check_tree(draws)
    for group in ("log_prior", "log_likelihood"):
        if group not in draws.children:
            raise ValueError(
                f"the tree has no group {group!r}, so its effect cannot be computed. "
                "to_datatree makes one for each latent with a distribution: "
                "integrate hyperparameters by NestedVI"
            )
    draws = draws.copy()
    draws["log_likelihood"] = draws["log_likelihood"].to_dataset().map(weighted)
    names = list(draws["log_prior"].data_vars) if var_names is None else [*var_names]
    with warnings.catch_warnings():
        # Entries that are equal in all draws, as those of a Cholesky factor of
        # correlations are, have no sensitivity.
        warnings.filterwarnings("ignore", "invalid value encountered", RuntimeWarning)
        table = part_of_arviz("arviz_stats").psense_summary(
            draws, var_names=names, threshold=threshold
        )
    return table.dropna(subset=["prior", "likelihood"])
