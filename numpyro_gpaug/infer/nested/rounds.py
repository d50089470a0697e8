# SPDX-License-Identifier: Apache-2.0
"""Where draws are moved before the last ones are made: to where the weights of the
model itself are, which those of groups weighed apart tell nearly without noise. The
collapsed bound is lower than the evidence by a little for each group, more where
groups vary more, and of thousands its mode is far from that of the posterior."""

from __future__ import annotations

from typing import Any

import numpy as np

from numpyro_gpaug.infer.nested.proposal import Proposal, StudentT, tempered
from numpyro_gpaug.math.importance import log_mean_exp

# Rounds, at most; how far weighted means may be from where draws come from, in the
# standard deviations of these.
ROUNDS, NEAR = 6, 0.7
# Standard errors that the mean of a corner's number is from zero, or it stays there.
SURE = 2.5


def moved(
    laws: tuple[StudentT, ...], points: np.ndarray, log_weights: np.ndarray
) -> tuple[tuple[StudentT, ...], float]:
    """Laws about the weighted means of the points nearest to each, and how far the
    largest move was.

    :param laws: of the hyperparameters.
    :param points: (n, d), drawn from them.
    :param log_weights: of the points.
    """
    d = points.shape[1]
    nearest = np.argmax([law.log_density(points) for law in laws], axis=0)
    found, far = [], 0.0
    for i, law in enumerate(laws):
        own = (nearest == i) & np.isfinite(log_weights)
        if own.sum() >= 10 * (d + 1):
            mean = tempered(log_weights[own], 3.0 * (d + 1)) @ points[own]
            far = max(far, float(np.sqrt(law.distances(mean[None])[0])))
            law = law._replace(mode=mean)
        found.append(law)
    return tuple(found), far


def corner_mean(corner: np.ndarray, log_weights: np.ndarray) -> np.ndarray:
    """Means of the corner's numbers, zero where they may be.

    :param corner: (n, corners, K), standard normal under the Gaussian.
    :param log_weights: (n, corners).
    """
    each = log_weights.ravel()
    flat = corner.reshape(each.size, corner.shape[-1])
    weights = tempered(np.where(np.isfinite(each), each, -np.inf), 30.0)
    mean = weights @ flat
    error = np.sqrt(np.square(weights).sum())
    return np.where(np.abs(mean) > SURE * error, mean, 0.0)


def approached(
    drawer: Any,
    laws: tuple[StudentT, ...],
    first: Any,
    points: np.ndarray,
    ratios: np.ndarray,
    prior: np.ndarray,
    widths: np.ndarray,
    from_prior: float,
    rng: np.random.Generator,
) -> tuple[tuple[StudentT, ...], np.ndarray, np.ndarray]:
    """Laws about where the posterior is, and the last points that were drawn with their
    log-weights.

    :param drawer: draws; its shift is set.
    :param laws: to begin with.
    :param first: draws at the first points.
    :param points: (n, d).
    :param ratios: log-weights of their draws, (n, draws).
    :param prior: draws of the prior, if there are any.
    :param widths: of the draws.
    :param from_prior: share of the points that comes from the prior.
    :param rng: random numbers.
    """
    num, drawn = len(points), first
    for _ in range(ROUNDS):
        weights = log_mean_exp(ratios, 1)
        better, far = moved(laws, points, weights)
        shift = corner_mean(drawn.corner, ratios[:, :: drawer.alike])
        if far < NEAR and np.abs(shift - drawer.shift).max(initial=0) < NEAR:
            break
        laws, drawer.shift = better, shift
        shares = tuple(1.0 for _ in laws)
        proposal = Proposal(laws, shares, from_prior)
        points = rng.permutation(proposal.draws(num, prior, rng))
        drawn = drawer.draw(points, widths, found=False)
        density = proposal.log_density(points, drawn.log_prior, num)
        ratios = drawn.log_joint_over_q - density[:, None]
        ratios = np.where(np.isfinite(ratios), ratios, -np.inf)
    return laws, points, log_mean_exp(ratios, 1)
