# SPDX-License-Identifier: Apache-2.0
"""The kernel of the classifiers here, their number of inducing inputs, and how sure
their predictions are made: what works on data that nobody tuned it for."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import numpy as np
import numpyro
import numpyro.distributions as dist
from scipy.special import log_softmax, softmax

from numpyro_gpaug import Posterior, kernels

# With more columns than this, few rows cannot tell which of them matter, and a linear
# function takes more inducing inputs than there are.
FEW = 30


def kernel(columns: int) -> kernels.Kernel:
    """A smooth function; of few columns, plus a linear one, so that where the truth is
    linear little is lost to logistic regression. The values are point estimates under
    weak priors.

    Columns share a lengthscale, from which each departs as far as the data insist: free
    lengthscales overfit a few hundred rows. Weaker priors gain .004 nats where classes
    separate (wine, iris) and lose .013 where labels are noisy (breast cancer of the
    Raetsch sets). Where classes separate, test NLL falls with ever larger slopes, which
    the penalty of logistic regression allows and the bound does not: see
    :func:`tempered`.

    :param columns: number of them, standardised.
    """
    lengthscale = dist.LogNormal(0.5 * np.log(columns), 1)
    lengthscale = numpyro.sample("lengthscale", lengthscale)
    variance = numpyro.sample("variance", dist.LogNormal(1, 1))
    if columns > FEW:
        return kernels.Matern52(lengthscale, variance)
    relative = dist.LogNormal(0, 0.5).expand([columns]).to_event(1)
    lengthscale = lengthscale * numpyro.sample("relative", relative)
    slopes = numpyro.sample("slopes", dist.LogNormal(-np.log(columns), 1.5))
    smooth = kernels.Matern52(lengthscale, variance)
    return smooth + kernels.Linear(variance=slopes)


def num_inducing(X: np.ndarray, most: int | None = None) -> int:
    """How many inducing inputs; no more than there are different rows.

    :param X: the inputs, (N, D).
    :param most: 100 by default, twice as many for many columns: a function has more
        directions to vary in.
    """
    default = 100 if X.shape[1] <= FEW else 200
    return min(most or default, len(np.unique(X, axis=0)))


def tempered(posterior: Posterior, X: Any, y: np.ndarray) -> Callable[[Any], Any]:
    """Predictions as sure as they turn out right: class probabilities (N, C) as a
    function of inputs, all of their logarithms divided by a temperature.

    Where classes separate, a posterior is less sure than it could be: that of each
    class by itself most, the exact one, too. The temperature has a weak prior, and its
    likelihood is how labels of the fit are predicted, each left out; predictions are
    averaged over what that leaves open.

    :param posterior: of labels 0 .. C - 1.
    :param X: the inputs of the fit.
    :param y: its labels.
    """
    rows, left_out = np.arange(len(y)), _log_probs(posterior.leave_one_out(X, y).probs)
    steps = np.linspace(-4, 4, 81)
    fits = [log_softmax(left_out / np.exp(t), 1)[rows, y].sum() for t in steps]
    weights = softmax(np.array(fits) - 0.5 * steps**2)

    def probabilities(X_new: Any) -> np.ndarray:
        found = _log_probs(posterior.predict_y(X_new).probs)
        each = (softmax(found / np.exp(t), 1) for t in steps)
        return sum(w * p for w, p in zip(weights, each, strict=True))

    return probabilities


def _log_probs(probs: Any) -> np.ndarray:
    p = np.asarray(probs, float)
    p = np.stack([1 - p, p], 1) if p.ndim == 1 else p
    return np.log(np.maximum(p, np.finfo(np.float32).tiny))
