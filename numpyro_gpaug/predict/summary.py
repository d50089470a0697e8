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
# The 95% quantile of a standard normal.
_TAIL = 1.6448536
_COLUMNS = ["mean", "sd", "5%", "50%", "95%"]


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


def table(
    sites: dict[str, SiteMoments], points: Values, members: Members | None
) -> pandas.DataFrame:
    """Return mean, standard deviation and quantiles of every entry of every site.

    :param sites: Gaussian latents.
    :param points: latents and params that are fixed at a value.
    :param members: for a mixture, the values of its members.
    """
    import pandas

    rows: dict[str, list[float]] = {}
    for name, (mean, variance, _) in sites.items():
        deviation = np.sqrt(np.asarray(variance))
        for label, m, s in _entries(name, np.asarray(mean), deviation):
            tail = _TAIL * s
            rows[label] = [m, s, m - tail, m, m + tail]
    for name, value in points.items():
        value = np.asarray(value)
        for label, m, s in _entries(name, value, np.full(value.shape, np.nan)):
            rows[label] = [m, s, s, s, s]
    if members is not None:
        weights = np.exp(np.asarray(members.log_weights, float))
        for name, values in members.values.items():
            rows |= _of_members(name, np.asarray(values), weights)
    return pandas.DataFrame.from_dict(rows, orient="index", columns=_COLUMNS)


def long_table(sites: dict[str, SiteMoments], points: Values) -> pandas.DataFrame:
    """Return the :func:`table` of many responses, one below the other.

    :param sites: Gaussian latents, with a leading axis over the responses.
    :param points: latents and params that are fixed at a value, likewise.
    """
    import pandas

    moments = {k: (x.mean, np.sqrt(x.variance)) for k, x in sites.items()}
    fixed = {k: (x, np.full(np.shape(x), np.nan)) for k, x in points.items()}
    labels: list[str] = []
    columns = []
    for name, (mean, deviation) in {**moments, **fixed}.items():
        labels += [label for label, _ in entries(name, np.shape(mean)[1:])]
        columns.append([np.asarray(x).reshape(len(x), -1) for x in (mean, deviation)])
    mean, deviation = (np.concatenate(x, 1) for x in zip(*columns, strict=True))
    tail = _TAIL * deviation
    number, index = len(mean), [range(len(mean)), labels]
    return pandas.DataFrame(
        np.stack(
            [mean, deviation, mean - tail, mean + 0 * tail, mean + tail], -1
        ).reshape(number * len(labels), -1),
        pandas.MultiIndex.from_product(index, names=["response", "site"]),
        _COLUMNS,
    )


def printed(found: pandas.DataFrame) -> str:
    """Return a :func:`table` as text, all of it, to two decimals."""
    text = found.to_string(float_format="{:.2f}".format, na_rep="-")
    if not found["sd"].isna().any():
        return text
    return f"{text}\n-: fixed at a point; NestedVI(model) integrates hyperparameters"


def _of_members(
    name: str, values: np.ndarray, weights: np.ndarray
) -> dict[str, list[float]]:
    mean = np.tensordot(weights, values, 1)
    moves = varying(values.reshape(len(values), -1)).reshape(mean.shape)
    values = values.astype(float)
    spread = np.sqrt(np.tensordot(weights, np.square(values - mean), 1)) * moves
    flat = values.reshape(len(values), -1)
    levels = weighted_quantiles(flat, weights, (0.05, 0.5, 0.95))
    entries = zip(_entries(name, mean, spread), levels.T, strict=True)
    return {label: [m, s, *map(float, each)] for (label, m, s), each in entries}


def _entries(name: str, mean: np.ndarray, spread: np.ndarray) -> Any:
    for label, place in entries(name, mean.shape):
        yield label, float(mean[place]), float(spread[place])
