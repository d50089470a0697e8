# SPDX-License-Identifier: Apache-2.0
"""Posteriors of the latents themselves, and a table of them."""

from __future__ import annotations

from collections.abc import Callable
from typing import TYPE_CHECKING, Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
import numpyro.distributions as dist
from jax import Array
from numpyro.distributions.util import lazy_property
from scipy.special import ndtri

from numpyro_gpaug._display import entries
from numpyro_gpaug.math import linalg
from numpyro_gpaug.math.compiling import jit_for_few_runs
from numpyro_gpaug.math.importance import varying, weighted_quantiles
from numpyro_gpaug.math.threads import threads_for
from numpyro_gpaug.model.arguments import Values
from numpyro_gpaug.predict.mixture import Members

if TYPE_CHECKING:
    import pandas

# Larger sites have only marginals, because the covariance would have this many rows.
MAX_JOINT = 2000


class SiteMoments(NamedTuple):
    """Moments of a Gaussian latent.

    :param mean: the mean, in the shape of the site.
    :param variance: the variance likewise.
    :param covariance: returns the covariance of a flat vector of at most 2000 entries,
        at a higher cost than everything else; otherwise ``None``.
    """

    mean: Array
    variance: Array
    covariance: Callable[[], Array] | None = None

    @property
    def distribution(self) -> dist.Distribution:
        """The posterior: a normal for a scalar, a multivariate normal for a flat
        vector, and marginals for more axes or more than 2000 entries."""
        mean, variance, covariance = self
        if covariance is None:
            return dist.Normal(mean, _root(variance))
        return LatentNormal(mean, variance, covariance)

    def about(self, point: Array) -> SiteMoments:
        """Return first and second moments about a point: unlike moments about the mean,
        they are averages over the members of a mixture.

        :param point: the point, in the shape of the site.
        """
        shift = self.mean - point
        return SiteMoments(shift, self.variance + jnp.square(shift))

    def centred(self, point: Array) -> SiteMoments:
        """Make moments from moments about a point.

        :param point: the point of :meth:`about`.
        """
        spread = self.variance - jnp.square(self.mean)
        return SiteMoments(point + self.mean, spread)


class KnownSites(NamedTuple):
    """What is known about the Gaussian sites at the arguments of the fit.

    :param moments: their moments, by name.
    :param marks: a checksum of their factors.
    :param rule_errors: errors of quadrature, by observed site.
    """

    moments: dict[str, SiteMoments]
    marks: dict[str, Array]
    rule_errors: dict[str, float]


NO_SITES = KnownSites({}, {}, {})


class LatentNormal(dist.MultivariateNormal):
    """A multivariate normal with known marginals. Its covariance is computed, and
    factorised, only if something needs it: means and variances do not.

    :param mean: the mean, (n,).
    :param variance: the variances, (n,).
    :param covariance: returns the covariance, (n, n).
    """

    pytree_data_fields = ("_variance", "_covariance")

    def __init__(
        self, mean: Array, variance: Array, covariance: Callable[[], Array]
    ) -> None:
        self.loc, self._variance, self._ask = mean, variance, covariance
        dist.Distribution.__init__(self, (), mean.shape, validate_args=False)

    def tree_flatten(self) -> Any:
        _ = self._covariance
        return super().tree_flatten()

    def __getstate__(self) -> dict[str, Any]:
        covariance = self._covariance
        return {**vars(self), "_covariance": covariance, "_ask": None}

    @lazy_property
    def _covariance(self) -> Array:
        return self._ask()

    @lazy_property
    def scale_tril(self) -> Array:
        """The lower Cholesky factor of the covariance."""
        with threads_for(len(self.loc)):
            return jax.block_until_ready(_factor(self._covariance))

    @property
    def mean(self) -> Array:
        return self.loc

    @property
    def variance(self) -> Array:
        return self._variance


# Compiled, because single operations take longer than a fit when a size is new.
_root = jit_for_few_runs(jnp.sqrt)


@jit_for_few_runs
def _factor(covariance: Array) -> Array:
    # A constraint (such as a sum of zero) makes it singular.
    least = 10 * jnp.finfo(covariance.dtype).eps * jnp.trace(covariance)
    eye = jnp.eye(len(covariance), dtype=covariance.dtype)
    return linalg.cholesky(covariance + least / len(covariance) * eye)


def levels_of(prob: float) -> dict[str, float]:
    """Return the levels of the median and of the ends of an interval, by the names of
    their columns.

    :param prob: the probability of the interval.
    """
    if not 0 < prob < 1:
        raise ValueError(
            f"prob={prob}; the probability of intervals must be between 0 and 1"
        )
    levels = (1 - prob) / 2, 0.5, (1 + prob) / 2
    return {f"{100 * level:g}%": level for level in levels}


def table(
    sites: dict[str, SiteMoments],
    points: Values,
    members: Members | None,
    prob: float = 0.9,
) -> pandas.DataFrame:
    """Return mean, standard deviation and quantiles of every entry of every site.

    :param sites: Gaussian latents.
    :param points: latents and params that are fixed at a value.
    :param members: for a mixture, the values of its members.
    :param prob: the probability between the outer quantiles.
    """
    import pandas

    levels = levels_of(prob)
    labels, rows = _rows(sites, points, (), levels)
    if members is not None:
        weights = np.exp(np.asarray(members.log_weights, float))
        for name, values in members.values.items():
            labels += [label for label, _ in entries(name, np.shape(values)[1:])]
            flat = np.asarray(values).reshape(len(weights), -1)
            own = weighted_columns(flat, weights, (*levels.values(),))
            rows = np.concatenate([rows, own.T])
    return pandas.DataFrame(rows, labels, ["mean", "sd", *levels])


def long_table(
    sites: dict[str, SiteMoments], points: Values, number: int, prob: float
) -> pandas.DataFrame:
    """Return the :func:`table` of many responses, one below the other.

    :param sites: Gaussian latents, with a leading axis over the responses.
    :param points: latents and params that are fixed at a value, likewise.
    :param number: the number of responses.
    :param prob: the probability between the outer quantiles.
    """
    import pandas

    levels = levels_of(prob)
    labels, rows = _rows(sites, points, (number,), levels)
    index = pandas.MultiIndex.from_product(
        [range(number), labels], names=["response", "site"]
    )
    columns = ["mean", "sd", *levels]
    return pandas.DataFrame(rows.reshape(len(index), -1), index, columns)


def _rows(
    sites: dict[str, SiteMoments],
    points: Values,
    leading: tuple[int, ...],
    levels: dict[str, float],
) -> tuple[list[str], np.ndarray]:
    """Return the labels of all entries, and their rows, (..., entries, 5).

    :param leading: sizes of leading axes.
    :param levels: levels of quantiles.
    """
    found: dict[str, Any] = {k: (x.mean, np.sqrt(x.variance)) for k, x in sites.items()}
    found |= {k: (x, np.full(np.shape(x), np.nan)) for k, x in points.items()}
    labels, columns = list[str](), [np.zeros((2, *leading, 0))]
    for name, pair in found.items():
        columns.append(np.stack(pair).reshape(2, *leading, -1))
        shape = np.shape(pair[0])[len(leading) :]
        labels += [label for label, _ in entries(name, shape)]
    mean, deviation = np.concatenate(columns, -1, dtype=float)
    quantiles = [mean + ndtri(level) * deviation for level in levels.values()]
    return labels, np.stack([mean, deviation, *quantiles], -1)


def weighted_columns(
    values: np.ndarray, weights: np.ndarray, levels: tuple[float, ...]
) -> np.ndarray:
    """Return mean, standard deviation and quantiles of each column, in rows. The
    deviation of a column that varies by no more than rounding is zero.

    :param values: (n, columns), in the precision in which they were computed.
    :param weights: normalised, (n,).
    :param levels: levels of the quantiles.
    """
    moves, values = varying(values), values.astype(float)
    mean = weights @ values
    spread = np.sqrt(weights @ np.square(values - mean)) * moves
    return np.stack([mean, spread, *weighted_quantiles(values, weights, levels)])


def printed(found: pandas.DataFrame) -> str:
    """Return a :func:`table` as text, all of it, to two decimals."""
    text = found.to_string(float_format="{:.2f}".format, na_rep="-")
    if not found["sd"].isna().any():
        return text
    return f"{text}\n-: fixed at a point; NestedVI(model) integrates hyperparameters"
