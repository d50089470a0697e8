# SPDX-License-Identifier: Apache-2.0
"""Draws in rounds, until their weights are even: incremental mixture importance
sampling. Each round draws around the point with the largest weight, where earlier
proposals were too thin, and from a distribution as wide as the weighted points. All
points are weighted as draws from the mixture of all proposals.

Such weights are biased: a proposal around a point with a large weight makes that weight
small. In eight dimensions and more, a tenth of the posterior may be missing, which
k-hat does not show. At the end, all points are therefore drawn again from the proposals
that were found.

Before, rounds move the proposals. For each group, the collapsed bound is slightly below
the evidence, by more where groups vary more; with thousands of groups its mode is far
from the mode of the posterior. Separate weights of groups locate the posterior almost
without noise, and the rounds move the proposals there.

References: Cornuet, Marin, Mira and Robert (2012), Adaptive multiple importance
sampling; Raftery and Bao (2010), Estimating and projecting trends in HIV/AIDS
generalized epidemics using incremental mixture importance sampling; Owen and Zhou
(2000), Safe and effective importance sampling.
"""

from __future__ import annotations

from typing import Any

import jax
import numpy as np
from scipy import special

from numpyro_gpaug.infer.nested.drawer import Drawer, Points
from numpyro_gpaug.infer.nested.proposal import (
    Proposal,
    StudentT,
    tempered,
    with_points,
)
from numpyro_gpaug.infer.nested.weighted import Weighted
from numpyro_gpaug.math.importance import log_mean_exp

# Multiples of the requested number of points: the most points that are drawn, and the
# effective sample size that ends the refinement.
MOST, WORTH = 8, 0.6
# The margin of k-hat below its limit. The shape of a tail is estimated from some dozens
# of weights, so k-hat varies about this much between random keys.
MARGIN = 0.15
# The smallest decrease of k-hat while as many points are added as were requested.
FALL = 0.05


class Pool:
    """Draws of several proposals, weighted as draws from their mixture.

    :param drawer: draws the latents.
    :param widths: factors by which draws are wider than the Gaussian, (draws,).
    :param prior: draws of the prior, if any.
    :param rng: random numbers.
    :param flips: signs that leave the posterior unchanged, (m, d).
    :ivar points: points, (n, d).
    """

    points: np.ndarray

    def __init__(
        self,
        drawer: Drawer,
        widths: np.ndarray,
        prior: np.ndarray,
        rng: np.random.Generator,
        flips: np.ndarray,
    ) -> None:
        self._flips = flips
        self._drawer, self._widths, self._prior = drawer, widths, prior
        self._rng = rng
        self._parts: list[tuple[Proposal, Points]] = []

    def draw(self, proposal: Proposal, num: int) -> Weighted:
        """Draw at further points; return all draws with their weights.

        :param proposal: the proposal of the points.
        :param num: number of points.
        """
        more = proposal.draws(num, self._prior, self._rng)
        widths = np.broadcast_to(self._widths, (num, len(self._widths)))
        drawn = self._drawer.draw(more, widths, found=False)
        self.points = np.concatenate([self.points, more]) if self._parts else more
        self._parts.append((proposal, drawn))
        log_prior, ratios = (
            np.concatenate([getattr(drawn, name) for _, drawn in self._parts])
            for name in ("log_prior", "log_joint_over_q")
        )
        each = []
        for part, drawn in self._parts:
            num = len(drawn.log_prior)
            # Densities as if each draw had been flipped at random: its mirror images
            # have the same weight, and need not be drawn.
            images = [
                part.log_density(self.points * flip, log_prior, num)
                for flip in self._flips
            ]
            density = special.logsumexp(images, axis=0) - np.log(len(images))
            each.append(np.log(num) + density)
        density = special.logsumexp(each, axis=0) - np.log(len(self.points))
        ratios = ratios - density[:, None]
        alike = self._drawer.alike
        return Weighted.of(self.points, ratios, normalised=True, alike=alike)

    def draw_again(self) -> Weighted:
        """Replace all draws by draws from the same proposals, which do not depend on
        them: their weights are not biased."""
        parts, self._parts = self._parts, []
        # With other draws of the prior.
        self._prior = np.roll(self._prior, -(len(self._prior) // 2), 0)
        for proposal, drawn in parts:
            weighted = self.draw(proposal, len(drawn.log_prior))
        return weighted

    def more(self, num: int) -> Weighted:
        """Draw further points from the first proposal."""
        return self.draw(self._parts[0][0], num)

    @property
    def drawn(self) -> tuple[np.ndarray, dict[str, Any]]:
        """The latents and the values of sites of all draws."""
        parts = [(drawn.z, drawn.sites) for _, drawn in self._parts]
        if len(parts) == 1:
            return parts[0]
        return jax.tree.map(lambda *x: np.concatenate(x), *parts)


def extended(
    pool: Pool, weighted: Weighted, component: StudentT, asked: int, least: int
) -> Weighted:
    """Draw in rounds until k-hat is clearly below its limit and the effective number of
    points is .6 of the requested number. Rounds end earlier at eight times as many
    points, or if k-hat stays above its limit and no longer falls: then the latents, not
    the hyperparameters, make the weights uneven. More points of the first proposal
    suffice while only their number is too small. Otherwise all points are drawn again
    at the end, and rounds go on if these are not certified.

    :param pool: the pool with the requested points.
    :param weighted: its draws.
    :param component: the distribution at the mode, whose axes define distances.
    :param asked: the requested number of points.
    :param least: the smallest number of points in a round.
    """
    each = max(asked // 4, least)
    while True:
        weighted, adapted = _rounds(pool, weighted, component, asked, each)
        if not (adapted and weighted.certified):
            return weighted
        weighted = pool.draw_again()
        if weighted.certified:
            return weighted


def _rounds(
    pool: Pool, weighted: Weighted, component: StudentT, asked: int, each: int
) -> tuple[Weighted, bool]:
    """Return the draws after further rounds of ``each`` points, and whether proposals
    depend on them; the rest as for :func:`extended`."""
    khats, adapted = [weighted.khat], False
    while not _is_accurate(weighted, asked) and len(pool.points) < MOST * asked:
        before = khats[-1 - asked // each] if len(khats) > asked // each else np.inf
        if weighted.khat > max(weighted.limit, before - FALL):
            break
        adapted = adapted or not _is_efficient(weighted, asked)
        if adapted:
            log_weights = log_mean_exp(weighted.log_ratios, 1)
            parts = (
                t_around_largest(component, pool.points, log_weights, each),
                t_with_moments(component, pool.points, log_weights),
            )
            weighted = pool.draw(Proposal(parts, (0.5, 0.5), 0.0), each)
        else:
            weighted = pool.more(each)
        khats.append(weighted.khat)
    return weighted, adapted


def _is_clear(weighted: Weighted) -> bool:
    return weighted.khat <= weighted.limit - MARGIN


def _is_efficient(weighted: Weighted, asked: int) -> bool:
    """Whether other proposals would not pay: their points are drawn twice. More points
    of the same proposal do not make the tail of their weights lighter."""
    if _is_clear(weighted):
        return True
    half = weighted.effective_points >= len(weighted.points) / 2
    return half and weighted.khat <= weighted.limit and not _is_enough(weighted, asked)


def _is_enough(weighted: Weighted, asked: int) -> bool:
    return weighted.effective_points >= WORTH * asked


def _is_accurate(weighted: Weighted, asked: int) -> bool:
    return _is_clear(weighted) and _is_enough(weighted, asked)


def t_around_largest(
    component: StudentT, points: np.ndarray, log_weights: np.ndarray, num: int
) -> StudentT:
    """Return a t distribution around the point with the largest weight, as wide as the
    points near it.

    :param component: the distribution at the mode.
    :param points: points, (n, d).
    :param log_weights: log-weights, (n,).
    :param num: the number of points that count as near.
    """
    centre = points[np.argmax(log_weights)]
    white = component.along(points) - component.along(centre[None])
    near = np.argsort(np.square(white).sum(1))[:num]
    # Half of the covariance is unweighted, because one of many points may have all the
    # weight.
    weights = special.softmax(log_weights)[near] + 1 / len(points)
    return component.about(centre, points[near], weights / weights.sum(), 1e-4)


def t_with_moments(
    component: StudentT, points: np.ndarray, log_weights: np.ndarray
) -> StudentT:
    """Return a t distribution with the mean and the covariance of weighted points.

    :param component: the distribution at the mode.
    :param points: points, (n, d).
    :param log_weights: log-weights, (n,).
    """
    weights = tempered(log_weights, 5.0 * (points.shape[1] + 1))
    return component.about(weights @ points, points, weights, 1e-4)


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
    found, far = [], 0.0
    for component, own in with_points(components, points, log_weights):
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
