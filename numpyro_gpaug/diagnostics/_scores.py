# SPDX-License-Identifier: Apache-2.0
"""Scores of predicted probabilities, re-exported by ``numpyro_gpaug.diagnostics``."""

from __future__ import annotations

from typing import NamedTuple

import numpy as np
from jax.typing import ArrayLike


class ReliabilityCurve(NamedTuple):
    """A reliability diagram over bins of equal width; empty bins have NaN.

    Small probabilities of a rare event are all in the first bin. For these use bins of
    equal counts, ``sklearn.calibration.calibration_curve(y, p, strategy="quantile")``.

    :param edges: edges of the bins, (num_bins + 1,).
    :param predicted: mean predicted probabilities, (num_bins,).
    :param observed: observed frequencies, (num_bins,).
    :param counts: numbers of observations, (num_bins,).
    """

    edges: np.ndarray
    predicted: np.ndarray
    observed: np.ndarray
    counts: np.ndarray


def brier_score(probs: ArrayLike, y: ArrayLike) -> float:
    """Return the mean squared error of predicted probabilities.

    It is ``mean((p - y)^2)`` for binary probabilities, between 0 and 1, and
    ``mean(sum_c (p_c - [y = c])^2)`` for C classes, between 0 and 2. Two columns
    therefore give twice the binary score.

    :param probs: probabilities of class 1, (N,); or rows that sum to one, (N, C).
    :param y: labels 0 or 1, or 0, ..., C - 1, (N,).
    :raises ValueError: for anything else.

    **Example**

    >>> print(f"{brier_score([0.9, 0.2], [1, 0]):.3f}")
    0.025
    """
    p, labels = _check_probabilities(probs, y)
    if p.ndim == 1:
        return float(np.square(p - labels).mean())
    hot = np.arange(p.shape[1]) == labels[:, None]
    return float(np.square(p - hot).sum(1).mean())


def reliability_curve(
    probs: ArrayLike, y: ArrayLike, num_bins: int = 15
) -> ReliabilityCurve:
    """Return observed frequencies against predicted probabilities.

    Binary probabilities are binned over the probability of class 1. With C classes, the
    bins are over the probability of the most probable class, and the observed frequency
    is the share of correct predictions. Bins are closed on the right; the first also
    contains 0.

    :param probs: (N,) or (N, C); see :func:`brier_score`.
    :param y: (N,), labels.
    :param num_bins: number of bins.
    :return: a :class:`ReliabilityCurve`.
    :raises ValueError: as :func:`brier_score`, or if there is no bin.

    **Example**

    >>> curve = reliability_curve([0.1, 0.3, 0.8, 0.9], [0, 1, 1, 1], num_bins=2)
    >>> print(curve.predicted.round(2), curve.observed, curve.counts)
    [0.2  0.85] [0.5 1. ] [2 2]
    """
    p, labels = _check_probabilities(probs, y)
    if num_bins < 1:
        raise ValueError(f"num_bins must be at least 1, got {num_bins}")
    hit = labels
    if p.ndim == 2:
        hit, p = p.argmax(1) == labels, p.max(1)
    edges = np.linspace(0, 1, num_bins + 1)
    # scikit-learn's calibration_curve bins the same way, but drops empty bins and does
    # not give counts.
    index = np.searchsorted(edges[1:-1], p)
    counts = np.bincount(index, minlength=num_bins)
    weight = np.where(counts > 0, counts, np.nan)
    predicted = np.bincount(index, p, num_bins) / weight
    return ReliabilityCurve(
        edges, predicted, np.bincount(index, hit, num_bins) / weight, counts
    )


def expected_calibration_error(
    probs: ArrayLike, y: ArrayLike, num_bins: int = 15
) -> float:
    """Return the mean distance between observed frequency and predicted probability,
    over bins weighted by their counts: ``sum_b counts_b / N |observed_b -
    predicted_b|``.

    It depends on the bins, and sampling noise alone makes it positive.

    :param probs: (N,) or (N, C); see :func:`reliability_curve`.
    :param y: (N,), labels.
    :param num_bins: number of bins.
    :raises ValueError: as :func:`reliability_curve`.

    **Example**

    >>> p, y = [0.1, 0.3, 0.8, 0.9], [0, 1, 1, 1]
    >>> print(f"{expected_calibration_error(p, y, num_bins=2):.3f}")
    0.225
    """
    curve = reliability_curve(probs, y, num_bins)
    gaps = np.abs(curve.observed - curve.predicted)
    return float(np.nansum(gaps * curve.counts) / curve.counts.sum())


def _check_probabilities(
    probs: ArrayLike, y: ArrayLike
) -> tuple[np.ndarray, np.ndarray]:
    if hasattr(probs, "log_prob"):
        raise ValueError(
            f"probs is a {type(probs).__name__}; pass its probabilities, "
            "predict_y(X).probs"
        )
    p, labels = np.asarray(probs, float), np.asarray(y)
    if p.ndim not in (1, 2) or p.size == 0 or labels.shape != p.shape[:1]:
        raise ValueError(
            f"probs has shape {p.shape} and y {labels.shape}; expected (N,) or (N, C) "
            "and (N,), not empty"
        )
    slack = 1e-5  # rounding in float32
    if not ((p >= -slack) & (p <= 1 + slack)).all():  # also false for NaN
        raise ValueError(
            f"probs of shape {p.shape} must lie in [0, 1]; they run from {p.min()} to "
            f"{p.max()}"
        )
    if p.ndim == 2 and np.abs(p.sum(1) - 1).max() > 100 * slack:
        raise ValueError(
            f"probs of shape {p.shape}: rows must sum to 1; their sums run from "
            f"{p.sum(1).min()} to {p.sum(1).max()}"
        )
    classes = np.arange(2 if p.ndim == 1 else p.shape[1])
    if not np.isin(labels, classes).all():
        raise ValueError(
            f"y of shape {labels.shape} must contain labels {classes[0]} to "
            f"{classes[-1]}; it contains {np.unique(labels)[:5]}"
        )
    return np.clip(p, 0, 1), labels.astype(int)
