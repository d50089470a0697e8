# SPDX-License-Identifier: Apache-2.0
"""Class probabilities whose temperature is inferred from labels that are left out."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import numpy as np
from scipy.special import log_softmax, softmax

from numpyro_gpaug.predict import Posterior

LOG_TEMPERATURES = np.linspace(-4, 4, 81)


def tempered(posterior: Posterior, X: Any, y: np.ndarray) -> Callable[[Any], Any]:
    """Return calibrated predictions: class probabilities (N, C) as a function of
    inputs, all of their logarithms divided by a temperature.

    Where classes separate, a posterior is less sure than it could be: that of each
    class by itself most, the exact one, too. The temperature has a weak prior, and its
    likelihood is how labels of the fit are predicted, each left out; predictions are
    averaged over what that leaves open.

    :param posterior: of labels 0 .. C - 1.
    :param X: the inputs of the fit.
    :param y: its labels.
    """
    left_out = log_probs(posterior.leave_one_out(X, y).probs)
    weights = softmax(log_posterior(left_out, y))
    return lambda X: mixed(log_probs(posterior.predict_y(X).probs), weights)


def mixed(found: np.ndarray, weights: np.ndarray) -> np.ndarray:
    """Return class probabilities, averaged over weighted temperatures."""
    each = (softmax(found / np.exp(t), 1) for t in LOG_TEMPERATURES)
    return sum(w * p for w, p in zip(weights, each, strict=True))


def log_posterior(left_out: np.ndarray, y: np.ndarray) -> np.ndarray:
    """Return the log-likelihood plus log-prior of each temperature.

    :param left_out: log probabilities of labels that are left out, (N, C).
    :param y: the labels.
    """
    rows, steps = np.arange(len(y)), LOG_TEMPERATURES
    fits = [log_softmax(left_out / np.exp(t), 1)[rows, y].sum() for t in steps]
    return np.array(fits) - 0.5 * steps**2


def log_probs(probs: Any) -> np.ndarray:
    """Return normalised log probabilities (N, C), also of two classes."""
    p = np.asarray(probs, float)
    p = np.stack([1 - p, p], 1) if p.ndim == 1 else p
    return log_softmax(np.log(np.maximum(p, np.finfo(np.float32).tiny)), 1)
