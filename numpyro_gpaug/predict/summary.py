# SPDX-License-Identifier: Apache-2.0
"""Posteriors of the latents themselves, and a table of them."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any, NamedTuple

import jax.numpy as jnp
import numpy as np
import numpyro.distributions as dist
from jax import Array

if TYPE_CHECKING:
    import pandas

# Of larger ones only the marginals are given: the covariance would have as many rows.
MAX_JOINT = 2000


class SiteMoments(NamedTuple):
    """A Gaussian latent.

    :param mean: in the shape of the site.
    :param variance: likewise.
    :param covariance: of a flat vector of at most 2000 entries, or ``None``.
    """

    mean: Array
    variance: Array
    covariance: Array | None

    @property
    def distribution(self) -> dist.Distribution:
        """The posterior: normal of a scalar, multivariate normal of a flat vector; of
        what has more axes, or more than 2000 entries, its marginals."""
        mean, variance, covariance = self
        if covariance is None:
            return dist.Normal(mean, jnp.sqrt(variance))
        # A constraint (a sum of zero) leaves it singular.
        least = 10 * jnp.finfo(mean.dtype).eps * jnp.trace(covariance) / len(mean)
        eye = jnp.eye(len(mean), dtype=mean.dtype)
        return dist.MultivariateNormal(mean, covariance + least * eye)


def table(sites: dict[str, SiteMoments], points: dict[str, Any]) -> pandas.DataFrame:
    """Mean, standard deviation and quantiles of every entry of every site.

    :param sites: Gaussian latents.
    :param points: latents and params held at a value.
    """
    import pandas

    rows: dict[str, list[float]] = {}
    for name, (mean, variance, _) in sites.items():
        deviation = np.sqrt(np.asarray(variance))
        for label, m, s in _entries(name, np.asarray(mean), deviation):
            tail = 1.6448536 * s  # of a normal, to 5 and 95%
            rows[label] = [m, s, m - tail, m, m + tail]
    for name, value in points.items():
        value = np.asarray(value)
        for label, m, s in _entries(name, value, np.full(value.shape, np.nan)):
            rows[label] = [m, s, s, s, s]
    columns = ["mean", "sd", "5%", "50%", "95%"]
    return pandas.DataFrame.from_dict(rows, orient="index", columns=columns)


def _entries(name: str, mean: np.ndarray, spread: np.ndarray) -> Any:
    for place in np.ndindex(mean.shape):
        label = f"{name}[{', '.join(map(str, place))}]" if place else name
        yield label, float(mean[place]), float(spread[place])
