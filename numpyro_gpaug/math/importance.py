# SPDX-License-Identifier: Apache-2.0
"""Importance weights, with smoothed tails, and the effective number of weighted
draws."""

from __future__ import annotations

from typing import Any, NamedTuple

import jax.numpy as jnp
import numpy as np
from jax import Array
from scipy.special import exprel, logsumexp, softmax


class Psis(NamedTuple):
    """Pareto-smoothed importance sampling of the posterior with the guide as proposal.

    :param khat: shape of the tail of the importance ratios. Below 0.5 the guide is a
        very good proposal, below 0.7 a usable one. Above, expectations under it may be
        far from those of the posterior, and reweighting cannot repair them.
    :param log_weights: smoothed and normalised log-weights, one per draw.
    """

    khat: float
    log_weights: np.ndarray

    def __repr__(self) -> str:
        worth = f"{len(self.log_weights)} draws worth {self.effective_draws:.0f}"
        return f"Psis(khat={self.khat:.2f}, {self.verdict}, {worth})"

    @property
    def verdict(self) -> str:
        """``"good"`` below 0.5, ``"usable"`` below 0.7, else ``"unreliable"``."""
        if self.khat < 0.5:
            return "good"
        return "usable" if self.khat < 0.7 else "unreliable"

    @property
    def effective_draws(self) -> float:
        """The number of posterior draws that give the same accuracy as the weighted
        draws."""
        return float(1 / np.exp(2 * self.log_weights).sum())


def smoothed(log_ratios: np.ndarray, scale: float = 1.0) -> Psis:
    """Return log-weights from log importance ratios, with the largest ratios replaced
    by quantiles of a generalised Pareto distribution.

    :param log_ratios: finite, flat.
    :param scale: size of the numbers whose differences are the ratios. Ratios that
        differ by no more than its rounding count as equal.
    """
    khats, log_weights = smoothed_columns(log_ratios[:, None], scale)
    return Psis(float(khats[0]), log_weights[:, 0])


def smoothed_columns(
    log_ratios: np.ndarray, scale: float = 1.0
) -> tuple[np.ndarray, np.ndarray]:
    """Smooth the tail of each column, see :func:`smoothed`.

    :param log_ratios: finite, (n, columns).
    :param scale: like that of :func:`smoothed`.
    :return: k-hat, (columns,), and normalised log-weights, (n, columns).

    The method is that of ArviZ, whose import takes longer than a short run.

    Reference: Vehtari, Simpson, Gelman, Yao and Gabry (2024), Pareto smoothed
    importance sampling.
    """
    log_weights = log_ratios - log_ratios.max(0)
    num = len(log_weights)
    order = np.argsort(log_weights, axis=0, kind="stable")
    tail = int(min(num / 5, 3 * np.sqrt(num)))
    highest = order[-tail:]
    cutoff = np.take_along_axis(log_weights, order[-tail - 1][None], 0)
    # Smaller weights are zero up to rounding.
    below = np.exp(np.maximum(cutoff, np.log(np.finfo(float).tiny)))
    exceedances = np.exp(np.take_along_axis(log_weights, highest, 0)) - below
    even = np.ptp(log_ratios, axis=0) <= 1e-12 * scale
    khats = np.where(even, -np.inf, np.inf)
    fitted = ~even & (tail > 4) & (exceedances[(tail - 1) // 4] > 0)
    if fitted.any():
        khats[fitted], scales = _generalised_pareto(exceedances[:, fitted])
        levels = (np.arange(tail)[:, None] + 0.5) / tail
        distance = -np.log1p(-levels)  # quantiles of an exponential distribution
        quantiles = scales * distance * exprel(khats[fitted] * distance)
        better = np.minimum(np.log(below[:, fitted] + quantiles), 0.0)
        log_weights[highest[:, fitted], fitted] = better
    log_weights[:, even] = 0.0
    return khats, log_weights - np.log(np.exp(log_weights).sum(0))


def _generalised_pareto(x: np.ndarray) -> tuple[np.ndarray, np.ndarray]:
    """Estimate shapes and scales of generalised Pareto distributions, (columns,), with
    shapes shrunk slightly towards 1/2.

    :param x: exceedances, positive, each column in order, (n, columns).

    References: Zhang and Stephens (2009), A new and efficient estimation method for the
    generalized Pareto distribution; Vehtari et al. (2024), appendix C, for the prior.
    """
    n = len(x)
    grid = np.arange(1, 31 + int(np.sqrt(n)))[:, None] - 0.5
    quartile = x[int(n / 4 + 0.5) - 1]
    # Values of minus the shape divided by the scale, for the profile likelihood.
    ratios = 1 / x[-1] + (1 - np.sqrt(len(grid) / grid)) / (3 * quartile)
    shapes = np.log1p(-ratios[:, None] * x).mean(1)
    profile = n * (np.log(-ratios / shapes) - shapes - 1)
    ratio = (softmax(profile, 0) * ratios).sum(0)
    shape = np.log1p(-ratio * x).mean(0)
    return (n * shape + 5) / (n + 10), -shape / ratio


def log_mean_exp(x: np.ndarray, axis: int | None = None) -> Any:
    """Return the logarithm of the mean of exponentials."""
    return logsumexp(x, axis) - np.log(x.size if axis is None else x.shape[axis])


def varying(values: np.ndarray) -> np.ndarray:
    """Return, for each column, whether it varies by more than rounding. The diagonal of
    a correlation matrix, or the zeros of its factor, do not.

    :param values: (n, columns), in the precision in which they were computed.
    """
    floats = np.issubdtype(values.dtype, np.floating)
    rounding = 8 * np.finfo(values.dtype).eps if floats else 0.0
    return np.ptp(values, axis=0) > rounding * np.abs(values).max(0)


def weighted_quantiles(
    values: np.ndarray, weights: np.ndarray, levels: tuple[float, ...]
) -> np.ndarray:
    """Return quantiles of each column, (levels, columns).

    :param values: (n, columns).
    :param weights: normalised, (n,).
    :param levels: between 0 and 1.
    """
    found = np.empty((len(levels), values.shape[1]))
    # One column after another stays in the cache: three times as fast.
    for i, column in enumerate(values.T):
        order = np.argsort(column)
        own = weights[order]
        found[:, i] = np.interp(levels, np.cumsum(own) - 0.5 * own, column[order])
    return found


def compensated_sum(x: Array) -> tuple[Array, Array]:
    """Return a sum over the last axis, and its rounding error.

    Log-weights are small differences of large sums. A sequential sum of 1e5 terms in
    float32 would turn them into noise. Both results are added in double precision, on
    the host; the rounding error of that sum is negligible for weights.

    :param x: (..., n).

    Reference: Ogita, Rump and Oishi (2005), Accurate sum and dot product.
    """
    if x.dtype == jnp.float64:
        total = x.sum(-1)
        return total, jnp.zeros_like(total)
    size = 1 << max(x.shape[-1] - 1, 0).bit_length()
    total = jnp.pad(x, [(0, 0)] * (x.ndim - 1) + [(0, size - x.shape[-1])])
    lost = jnp.zeros_like(total)
    while size > 1:
        size //= 2
        a, b = total[..., :size], total[..., size:]
        total = a + b
        part = total - a
        error = (a - (total - part)) + (b - part)
        lost = lost[..., :size] + lost[..., size:] + error
    return total[..., 0], lost[..., 0]
