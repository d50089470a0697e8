# SPDX-License-Identifier: Apache-2.0
"""Rounds that move proposals before the final draws. For each group, the collapsed
bound is slightly below the evidence, by more where groups vary more; with thousands of
groups its mode is far from the mode of the posterior. Separate weights of groups locate
the posterior almost without noise, and the rounds move the proposals there."""

from __future__ import annotations

from typing import Any

import numpy as np

from numpyro_gpaug.infer.nested.proposal import Proposal, StudentT, tempered
from numpyro_gpaug.math.importance import log_mean_exp

# The largest number of rounds, and the distance between weighted means and proposals,
# in standard deviations of the proposal, below which rounds end.
ROUNDS, NEAR = 6, 0.7
# How many standard errors a mean of the border must differ from zero.
SURE = 2.5


def moved(
    components: tuple[StudentT, ...], points: np.ndarray, log_weights: np.ndarray
) -> tuple[tuple[StudentT, ...], float]:
    """Return distributions moved to the weighted means of the points nearest to each,
    and the largest distance moved.

    :param components: distributions of the hyperparameters.
    :param points: points, (n, d), drawn from them.
    :param log_weights: log-weights of the points.
    """
    d = points.shape[1]
    nearest = np.argmax(
        [component.log_density(points) for component in components], axis=0
    )
    found, far = [], 0.0
    for i, component in enumerate(components):
        own = (nearest == i) & np.isfinite(log_weights)
        if own.sum() >= 10 * (d + 1):
            mean = tempered(log_weights[own], 3.0 * (d + 1)) @ points[own]
            far = max(far, float(np.sqrt(component.distances(mean[None])[0])))
            component = component._replace(mode=mean)
        found.append(component)
    return tuple(found), far


def corner_mean(corner: np.ndarray, log_weights: np.ndarray) -> np.ndarray:
    """Return means of the border, set to zero if they do not differ significantly from
    zero, or if there are more numbers than draws.

    :param corner: draws of the border, (n, corners, K), standard normal under the
        Gaussian.
    :param log_weights: log-weights, (n, corners).
    """
    each = log_weights.ravel()
    flat = corner.reshape(each.size, corner.shape[-1])
    if flat.shape[1] > each.size:
        return np.zeros(flat.shape[1])
    weights = tempered(np.where(np.isfinite(each), each, -np.inf), 30.0)
    mean = weights @ flat
    error = np.sqrt(np.square(weights).sum())
    return np.where(np.abs(mean) > SURE * error, mean, 0.0)


def approached(
    drawer: Any,
    components: tuple[StudentT, ...],
    first: Any,
    points: np.ndarray,
    ratios: np.ndarray,
    prior: np.ndarray,
    widths: np.ndarray,
    from_prior: float,
    rng: np.random.Generator,
) -> tuple[tuple[StudentT, ...], np.ndarray, np.ndarray]:
    """Move distributions to the posterior; return them, and the last points that were
    drawn with their log-weights.

    :param drawer: draws the latents; its shift is set.
    :param components: the first distributions.
    :param first: draws at the first points.
    :param points: points, (n, d).
    :param ratios: log-weights of their draws, (n, draws).
    :param prior: draws of the prior, if any.
    :param widths: widths of the draws.
    :param from_prior: share of points from the prior.
    :param rng: random numbers.
    """
    num, drawn = len(points), first
    for _ in range(ROUNDS):
        weights = log_mean_exp(ratios, 1)
        better, far = moved(components, points, weights)
        shift = corner_mean(drawn.corner, ratios[:, :: drawer.alike])
        if far < NEAR and np.abs(shift - drawer.shift).max(initial=0) < NEAR:
            break
        components, drawer.shift = better, shift
        shares = tuple(1.0 for _ in components)
        proposal = Proposal(components, shares, from_prior)
        points = rng.permutation(proposal.draws(num, prior, rng))
        drawn = drawer.draw(points, widths, found=False, kept=False)
        density = proposal.log_density(points, drawn.log_prior, num)
        ratios = drawn.log_joint_over_q - density[:, None]
        ratios = np.where(np.isfinite(ratios), ratios, -np.inf)
    return components, points, log_mean_exp(ratios, 1)
