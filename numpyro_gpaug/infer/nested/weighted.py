# SPDX-License-Identifier: Apache-2.0
"""Weighted draws, and statistics of them; in double precision, on the host."""

from __future__ import annotations

from dataclasses import dataclass
from functools import cached_property

import numpy as np
from scipy.special import logsumexp

from numpyro_gpaug._display import entries
from numpyro_gpaug.math.importance import log_mean_exp, smoothed_columns
from numpyro_gpaug.predict.summary import weighted_columns

# The largest k-hat that is certified, for any number of draws.
LARGEST_KHAT = 0.7
# The largest share of the posterior at points where the model could not be evaluated.
LARGEST_LOSS = 0.01
# The smallest weight of a point, relative to the largest, that counts.
_COUNTS = 1e-12


@dataclass(frozen=True)
class Weighted:
    """Weights of draws of hyperparameters, and of the latents at each of them.

    :param points: unconstrained hyperparameters, (n, d).
    :param log_ratios: log-ratios of the unnormalised exact posterior to the proposal,
        (n, draws). NaN and infinity are weights of zero.
    :param normalised: whether the density of the points is normalised, so that the mean
        ratio estimates the evidence.
    :param failed: points at which the model could not be evaluated, (n,).
    :param alike: the number of consecutive draws that share a weight, because they
        differ only in the groups.
    """

    points: np.ndarray
    log_ratios: np.ndarray
    normalised: bool
    failed: np.ndarray
    alike: int = 1

    @classmethod
    def of(
        cls, points: np.ndarray, ratios: np.ndarray, normalised: bool, alike: int = 1
    ) -> Weighted:
        """Make weighted draws; some of them may have failed.

        :param ratios: like ``log_ratios``; NaN where the model could not be evaluated.
        """
        broken = np.isnan(ratios) | (ratios == np.inf)
        kept = np.where(broken, -np.inf, ratios)
        return cls(points, kept, normalised, broken.any(1), alike)

    @cached_property
    def khat(self) -> float:
        """The tail shape of the weights: the larger of two values, one for
        hyperparameters with one draw of the latents each, and one for hyperparameters
        with the mean over their draws.

        Draws at the same hyperparameters have similar weights, and a tail of ties has
        no shape. The first value is therefore a mean over sets with one draw of each.
        """
        khat = float(_tail_shapes(self.log_ratios[:, :: self.alike]).mean())
        if self.points.shape[1] == 0:
            return khat
        means = log_mean_exp(self.log_ratios, 1)
        return max(khat, float(_tail_shapes(means[:, None])[0]))

    @property
    def limit(self) -> float:
        """The largest k-hat at which estimates from so many weighted points are
        reliable: ``min(1 - 1 / log10(n), 0.7)``, which is 0.63 for 512 of them
        (Vehtari, Simpson, Gelman, Yao and Gabry, 2024)."""
        return min(1 - 1 / np.log10(len(self.points)), LARGEST_KHAT)

    @property
    def certified(self) -> bool:
        """Whether the draws are from the posterior, up to Monte Carlo error."""
        return bool(self.khat <= self.limit and self.loss <= LARGEST_LOSS)

    @cached_property
    def loss(self) -> float:
        """The approximate share of the posterior's mass where the model could not be
        evaluated, if such points had the weights of their nearest neighbours."""
        if not self.failed.any() or self.points.shape[1] == 0:
            return float(self.failed.mean())
        from scipy.spatial import KDTree  # takes a tenth of a second to import

        good = self.points[~self.failed]
        spread = good.std(0) + 1e-12
        _, nearest = KDTree(good / spread).query(self.points[self.failed] / spread)
        weights = np.exp(logsumexp(self.log_weights, 1))
        missing = weights[~self.failed][nearest].sum()
        return float(missing / (missing + weights.sum()))

    @cached_property
    def log_weights(self) -> np.ndarray:
        """Logarithms of the weights, Pareto-smoothed and normalised, (n, draws)."""
        columns = _smoothed(self.log_ratios[:, :: self.alike])
        found = np.repeat(columns, self.alike, 1)
        return found - logsumexp(found)

    @property
    def effective_size(self) -> float:
        """The effective number of independent draws; equal draws count once."""
        each = self.log_weights[:, :: self.alike] + np.log(self.alike)
        return float(1 / np.exp(2 * each).sum())

    @property
    def effective_points(self) -> float:
        """The effective number of independent points of the hyperparameters."""
        return float(1 / np.exp(2 * logsumexp(self.log_weights, 1)).sum())

    @property
    def log_evidence(self) -> float:
        """Logarithm of the mean ratio; NaN if it estimates no evidence."""
        return float(log_mean_exp(self.log_ratios)) if self.normalised else np.nan

    @property
    def log_evidence_error(self) -> float:
        """The standard error of the evidence. It treats points as independent. They are
        quasi-random, so it is too large rather than too small."""
        if not self.normalised:
            return np.nan
        each = log_mean_exp(self.log_ratios, 1)
        relative = np.exp(each - log_mean_exp(each))
        return float(relative.std(ddof=1) / np.sqrt(len(each)))

    def resampled(self, num: int, rng: np.random.Generator) -> np.ndarray:
        """Return indices of equally weighted draws, in random order: systematic
        resampling.

        :param num: number of draws.
        :param rng: random numbers.
        """
        return rng.permutation(systematic(np.exp(self.log_weights.ravel()), num, rng))

    def table(
        self, sites: dict[str, np.ndarray], levels: tuple[float, ...]
    ) -> dict[str, list[float]]:
        """Return mean, standard deviation, quantiles and effective draws of every
        entry. The number is NaN for an entry that is equal in all draws.

        :param sites: values by name, (n * draws, ...).
        :param levels: levels of the quantiles.
        """
        weights = np.exp(self.log_weights.ravel())
        weights = weights / weights.sum()
        rows: dict[str, list[float]] = {}
        # Draws without weight may be NaN if the model could not be evaluated there.
        some = weights.argmax()
        for name, values in sites.items():
            rounded = values.reshape(len(weights), -1)
            rounded = np.where(weights[:, None] > 0, rounded, rounded[some])
            found = weighted_columns(rounded, weights, levels)
            mean, spread = found[:2]
            # Draws at one point are not independent, so the errors are those of sums
            # over points.
            own = weights[:, None] * (rounded - mean)
            error = np.square(own.reshape(*self.log_ratios.shape, -1).sum(1)).sum(0)
            worth = np.square(spread) / np.where(error > 0, error, np.inf)
            worth = np.where(spread > 0, worth, np.nan)
            columns = np.stack([*found, worth], 1).tolist()
            labels = (label for label, _ in entries(name, values.shape[1:]))
            rows |= dict(zip(labels, columns, strict=True))
        return rows


def systematic(weights: np.ndarray, num: int, rng: np.random.Generator) -> np.ndarray:
    """Return the indices, in order, of a systematic sample."""
    edges = np.cumsum(weights)
    places = (rng.random() + np.arange(num)) / num * edges[-1]
    return np.searchsorted(edges, places).clip(0, len(weights) - 1)


def stratified(
    points: np.ndarray, log_weights: np.ndarray, num: int, rng: np.random.Generator
) -> tuple[np.ndarray, np.ndarray]:
    """Replace weighted points by fewer, with their normalised log-weights. All points
    with a positive weight are kept if there are no more than requested; otherwise they
    are a systematic sample along the direction of their largest variance.

    :param points: points, (n, d).
    :param log_weights: log-weights, (n,).
    :param num: the maximum number of points.
    :param rng: random numbers.
    """
    known = np.isfinite(log_weights)
    points, log_weights = points[known], log_weights[known]
    if not points.shape[1]:  # all points are equal
        return points[:1], np.zeros(1)
    log_weights = log_weights - logsumexp(log_weights)
    if len(points) <= num:
        # Far away a single point can fail without observations, though it counts for
        # nothing. The best one replaces it, so that programs keep their shapes.
        best = log_weights.argmax()
        counts = log_weights > log_weights[best] + np.log(_COUNTS)
        return np.where(counts[:, None], points, points[best]), log_weights
    weights = np.exp(log_weights)
    apart = points - weights @ points
    _, _, axes = np.linalg.svd(np.sqrt(weights)[:, None] * apart, full_matrices=False)
    order = np.argsort(apart @ axes[0])
    chosen = systematic(weights[order], num, rng)
    return points[order[chosen]], np.full(num, -np.log(num))


def _smoothed(log_ratios: np.ndarray) -> np.ndarray:
    """Replace the largest log-ratios of each column by quantiles of a Pareto
    distribution, so that a single distant draw does not dominate.

    :param log_ratios: (n, columns).
    """
    largest = log_ratios.max(0)
    # Columns in which some weight is far above the others.
    chosen = np.isfinite(largest) & (largest - log_mean_exp(log_ratios, 0) >= np.log(3))
    if len(log_ratios) < 25 or not chosen.any():
        return log_ratios
    kept = np.maximum(log_ratios[:, chosen], largest[chosen] - 700)
    # Ties have no tail shape, so they are broken by tiny noise.
    kept += 1e-9 * np.random.default_rng(0).normal(size=(len(kept), 1))
    with np.errstate(all="ignore"):
        found = smoothed_columns(kept)[1]
    # Smoothed weights are normalised. The smallest weight keeps its value, which
    # determines the constant.
    least = np.argmin(kept, 0)[None]
    found += np.take_along_axis(kept, least, 0) - np.take_along_axis(found, least, 0)
    smooth = np.isfinite(found).all(0) & np.isfinite(log_ratios[:, chosen])
    result = log_ratios.copy()
    result[:, chosen] = np.where(smooth, found, result[:, chosen])
    return result


def _tail_shapes(log_ratios: np.ndarray) -> np.ndarray:
    """Return k-hat of the weights in each column after adding exponential noise of a
    tenth of their mean.

    The fitted shape depends on the relative sizes of the exceedances, however small
    they are: if all weights are within a fifth of their mean, the shape is arbitrary. A
    relevant tail is larger than the noise.

    :param log_ratios: (n, columns).
    """
    num, columns = log_ratios.shape
    if num < 25:
        return np.full(columns, np.inf)
    relative = np.maximum(log_ratios - log_mean_exp(log_ratios, 0), -700)
    noise = np.random.default_rng(0).exponential(0.1, (num, 1))
    return smoothed_columns(np.logaddexp(relative, np.log(noise)))[0]
