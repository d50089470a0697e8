# SPDX-License-Identifier: Apache-2.0
"""Proposals of hyperparameters: mixtures of multivariate t distributions and their
prior, in unconstrained space. All in double precision, on the host."""

from __future__ import annotations

from typing import NamedTuple

import numpy as np
from scipy import special

# Degrees of freedom. In unconstrained space the tails of a posterior fall at least
# exponentially, so a t distribution covers them.
FREEDOM = 6.0
# If there is a better proposal: the shares of the points that come from the t
# distribution at the mode, and from the prior. With points from the prior, no weight
# exceeds the largest likelihood divided by that share, and other modes can be found.
AT_MODE, FROM_PRIOR = 0.2, 0.1


class StudentT(NamedTuple):
    """A multivariate t distribution, with different scales on either side of its mode.

    :param mode: the mode, (d,).
    :param axes: principal axes, in columns, (d, d).
    :param sides: scales along each axis, below the mode and above it, (2, d).

    Reference: Geweke (1989), Bayesian inference in econometric models using Monte Carlo
    integration, section 5: the split t.
    """

    mode: np.ndarray
    axes: np.ndarray
    sides: np.ndarray

    @classmethod
    def symmetric(cls, mode: np.ndarray, covariance: np.ndarray) -> StudentT:
        """Return the symmetric distribution with a positive definite scale matrix."""
        values, vectors = np.linalg.eigh(covariance)
        return cls(mode, vectors * np.sqrt(values), np.ones((2, len(mode))))

    def along(self, points: np.ndarray) -> np.ndarray:
        """Return points in units of the axes, (n, d)."""
        return np.linalg.solve(self.axes, (points - self.mode).T).T

    def distances(self, points: np.ndarray) -> np.ndarray:
        """Return squared distances of points (n, d) from the mode, (n,)."""
        x = self.along(points)
        return np.square(x / np.where(x < 0, *self.sides)).sum(1)

    def about(
        self, centre: np.ndarray, points: np.ndarray, weights: np.ndarray, share: float
    ) -> StudentT:
        """Return a symmetric distribution as wide as weighted points around a centre.

        :param centre: the centre, (d,).
        :param points: points, (n, d).
        :param weights: their weights, (n,), which sum to one.
        :param share: the share of this distribution's covariance that is added, because
            few points may lie in a hyperplane.
        """
        apart = points - centre
        covariance = (weights[:, None] * apart).T @ apart
        covariance += share * self.axes @ self.axes.T
        return StudentT.symmetric(centre, covariance)

    def log_density(self, points: np.ndarray) -> np.ndarray:
        """Return the log-density at points of shape (n, d), with shape (n,)."""
        d, nu = len(self.mode), FREEDOM
        constant = (
            special.gammaln((nu + d) / 2)
            - special.gammaln(nu / 2)
            - 0.5 * d * np.log(nu * np.pi)
            - np.linalg.slogdet(self.axes)[1]
            - np.log(self.sides.mean(0)).sum()
        )
        return constant - (nu + d) / 2 * np.log1p(self.distances(points) / nu)

    def draws(self, num: int, rng: np.random.Generator) -> np.ndarray:
        """Return quasi-random draws, (num, d), from a scrambled Halton sequence."""
        from scipy.stats import qmc  # takes half a second to import

        d = len(self.mode)
        uniform = qmc.Halton(d + 1, scramble=True, seed=rng).random(num)
        uniform = np.clip(uniform, 1e-9, 1 - 1e-9)
        own, radii = uniform[:, :d], uniform[:, d:]
        below, above = self.sides
        edge = below / (below + above)
        lower = own < edge
        half = np.where(lower, 0.5 * own / edge, 1 - 0.5 * (1 - own) / (1 - edge))
        normal = special.ndtri(half) * np.where(lower, below, above)
        chi = 2 * special.gammaincinv(FREEDOM / 2, radii)
        return self.mode + (normal / np.sqrt(chi / FREEDOM)) @ self.axes.T


class Proposal(NamedTuple):
    """A mixture of t distributions and the prior.

    :param components: the t distributions.
    :param shares: the share of points of each.
    :param from_prior: the share of draws from the prior.
    """

    components: tuple[StudentT, ...]
    shares: tuple[float, ...]
    from_prior: float

    def counts(self, num: int) -> tuple[int, list[int]]:
        """Return the numbers of points, out of ``num``, from the prior and from each
        component."""
        prior = int(round(self.from_prior * num))
        edges = np.round(np.cumsum([0.0, *self.shares]) / sum(self.shares) * num)
        edges = np.round(edges * (num - prior) / num).astype(int)
        return prior, [int(x) for x in np.diff(edges)]

    def draws(
        self, num: int, prior: np.ndarray, rng: np.random.Generator
    ) -> np.ndarray:
        """Draw points, (num, d), with the fixed number from each component.

        :param num: number of points.
        :param prior: draws from the prior, at least as many as needed.
        :param rng: random numbers.
        """
        own, counts = self.counts(num)
        parts = [
            component.draws(n, rng)
            for component, n in zip(self.components, counts, strict=True)
            if n
        ]
        return np.concatenate([prior[:own], *parts])

    def log_density(
        self, points: np.ndarray, log_prior: np.ndarray, num: int
    ) -> np.ndarray:
        """Return the log-density of the mixture that points come from.

        :param points: points, (n, d).
        :param log_prior: log-density of the prior there, (n,).
        :param num: number of points that were drawn.
        """
        own, counts = self.counts(num)
        terms = [
            np.log(n) + component.log_density(points)
            for component, n in self._used(counts)
        ]
        if own:
            terms.append(np.log(own) + log_prior)
        return special.logsumexp(terms, axis=0) - np.log(num)

    def _used(self, counts: list[int]) -> list[tuple[StudentT, int]]:
        pairs = zip(self.components, counts, strict=True)
        return [(component, n) for component, n in pairs if n]


def tempered(log_weights: np.ndarray, least: float) -> np.ndarray:
    """Return normalised weights, flattened by a power until their effective sample size
    is ``least``."""
    for power in (1.0, 0.7, 0.5, 0.3, 0.2, 0.1, 0.0):
        weights = special.softmax(power * log_weights)
        if 1 / np.square(weights).sum() >= min(least, 0.9 * len(weights)):
            break
    return weights


def refined(
    components: tuple[StudentT, ...], points: np.ndarray, log_weights: np.ndarray
) -> tuple[tuple[StudentT, ...], tuple[float, ...]]:
    """Return two distributions for each given one, and their shares: one split, and one
    moved to the weighted mean, with the width of the weighted points near it.

    :param components: distributions at the modes.
    :param points: points, (n, d), drawn from them and the prior.
    :param log_weights: log-weights of the points, up to a constant.
    :return: distributions, and their shares.
    """
    d = points.shape[1]
    nearest = np.argmax(
        [component.log_density(points) for component in components], axis=0
    )
    total = special.softmax(log_weights)
    found: list[StudentT] = []
    shares: list[float] = []
    for i, component in enumerate(components):
        own = (nearest == i) & np.isfinite(log_weights)
        share = max(float(total[own].sum()), 0.1)
        if own.sum() < 10 * (d + 1):
            found.append(component)
            shares.append(share)
            continue
        weights = tempered(log_weights[own], 5.0 * (d + 1))
        mean = weights @ points[own]
        found += [_split(component, points[own], weights)]
        found += [component.about(mean, points[own], weights, 0.05)]
        shares += [0.6 * share, 0.4 * share]
    return tuple(found), tuple(shares)


def _split(component: StudentT, points: np.ndarray, weights: np.ndarray) -> StudentT:
    """Return the distribution with the scales of the weighted points on either side."""
    x, count = component.along(points), 1 / np.square(weights).sum()
    squares = weights[:, None] * np.square(x)
    sides = []
    for side in (x < 0, x >= 0):
        # As if two more points confirmed the scale of the distribution.
        seen = count * (weights[:, None] * side).sum(0)
        sides.append((count * (squares * side).sum(0) + 2) / (seen + 2))
    return component._replace(sides=np.clip(np.sqrt(sides), 0.3, 4.0))
