# SPDX-License-Identifier: Apache-2.0
"""Proposals of hyperparameters: mixtures of multivariate t distributions and their
prior, in unconstrained space, from the mode of the collapsed density and its curvature.
All in double precision, on the host.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, NamedTuple

import numpy as np
from scipy import special

from numpyro_gpaug.errors import CholeskyError
from numpyro_gpaug.math.halton import halton

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
        """Return squared distances of points (n, d) from the mode, in units of the axes
        whatever the scales on either side, (n,)."""
        return np.square(self.along(points)).sum(1)

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
        d, nu, x = len(self.mode), FREEDOM, self.along(points)
        squares = np.square(x / np.where(x < 0, *self.sides)).sum(1)
        constant = (
            special.gammaln((nu + d) / 2)
            - special.gammaln(nu / 2)
            - 0.5 * d * np.log(nu * np.pi)
            - np.linalg.slogdet(self.axes)[1]
            - np.log(self.sides.mean(0)).sum()
        )
        return constant - (nu + d) / 2 * np.log1p(squares / nu)

    def draws(self, num: int, rng: np.random.Generator) -> np.ndarray:
        """Return quasi-random draws, (num, d), from a scrambled Halton sequence."""
        d = len(self.mode)
        uniform = np.clip(halton(num, d + 1, rng), 1e-9, 1 - 1e-9)
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

    def counts(self, num: int) -> tuple[int, list[tuple[StudentT, int]]]:
        """Return how many of ``num`` points are from the prior, and every component
        that has points, with their number."""
        prior = int(round(self.from_prior * num))
        edges = np.round(np.cumsum([0.0, *self.shares]) / sum(self.shares) * num)
        edges = np.round(edges * (num - prior) / num).astype(int)
        pairs = zip(self.components, np.diff(edges), strict=True)
        return prior, [(component, int(n)) for component, n in pairs if n]

    def draws(
        self, num: int, prior: np.ndarray, rng: np.random.Generator
    ) -> np.ndarray:
        """Draw points, (num, d), with the fixed number from each component.

        :param num: number of points.
        :param prior: draws from the prior, at least as many as needed.
        :param rng: random numbers.
        """
        own, counts = self.counts(num)
        parts = [component.draws(n, rng) for component, n in counts]
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
        terms = [np.log(n) + c.log_density(points) for c, n in counts]
        if own:
            terms.append(np.log(own) + log_prior)
        return special.logsumexp(terms, axis=0) - np.log(num)


def tempered(log_weights: np.ndarray, least: float) -> np.ndarray:
    """Return normalised weights, flattened by a power until their effective sample size
    is ``least``. Log-weights of minus infinity stay so."""
    finite = np.isfinite(log_weights)
    for power in (1.0, 0.7, 0.5, 0.3, 0.2, 0.1, 0.0):
        # A weight of zero remains zero. (Zero times minus infinity is NaN.)
        flat = np.where(finite, log_weights, 0.0) * power
        weights = special.softmax(np.where(finite, flat, -np.inf))
        if 1 / np.square(weights).sum() >= min(least, 0.9 * len(weights)):
            break
    return weights


def with_points(
    components: tuple[StudentT, ...], points: np.ndarray, log_weights: np.ndarray
) -> list[tuple[StudentT, np.ndarray]]:
    """Return every component, with a mask (n,) of the weighted points that are most
    probable under it."""
    nearest = np.argmax([c.log_density(points) for c in components], axis=0)
    known = np.isfinite(log_weights)
    return [(c, known & (nearest == i)) for i, c in enumerate(components)]


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
    total = special.softmax(log_weights)
    found: list[StudentT] = []
    shares: list[float] = []
    for component, own in with_points(components, points, log_weights):
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
    return component._replace(sides=np.clip(np.sqrt(sides), 0.3, WIDEST_SIDE))


# The step of finite differences of gradients.
STEP = 0.05
# The distance from the mode, in scales, at which tails are compared, and the largest
# factor by which one side is wider than the curvature at the mode says.
FAR, WIDEST_SIDE = 6.0, 4.0
# The largest standard deviation of a direction in unconstrained space. Where the
# density is flat or convex, the prior determines the width.
WIDEST = 3.0

# Returns the log-density at points (n, d), (n,), and its gradients, (n, d).
Evaluate = Callable[[np.ndarray], tuple[np.ndarray, np.ndarray]]


class Mode(NamedTuple):
    """A mode of the collapsed density.

    :param point: the mode, (d,).
    :param value: the log-density there.
    :param component: a t distribution around it.
    """

    point: np.ndarray
    value: float
    component: StudentT


def climb(evaluate: Evaluate, start: np.ndarray, precise: bool) -> Mode:
    """Find a mode by L-BFGS.

    :param evaluate: returns the log-density and its gradients at points.
    :param start: the start, (d,).
    :param precise: whether these are in double precision.
    :raises CholeskyError: if the density is not finite at the start.
    """
    from scipy import optimize  # takes a fifth of a second to import

    first = float(evaluate(start[None])[0][0])
    if not np.isfinite(first):
        raise CholeskyError(
            "the collapsed bound is not finite at the start of the search for its "
            f"mode, at unconstrained hyperparameters {np.round(start, 3).tolist()} "
            "(the medians of their priors, unless init_params is given). Likely "
            "causes: a kernel matrix without jitter, inputs that are not "
            "standardised, priors far from the data, or data that no value makes "
            "possible (counts at zero exposure). float64 or init_params may help"
        )
    if not start.size:  # SciPy 1.13 rejects an empty vector
        return Mode(start, first, StudentT.symmetric(start, np.eye(0)))

    def descend(point: np.ndarray) -> tuple[float, np.ndarray]:
        (value,), (gradient,) = evaluate(point[None])
        if not (np.isfinite(value) and np.isfinite(gradient).all()):
            return 1e10 + abs(first), np.zeros_like(point)
        return -float(value), -gradient

    # The noise of the bound in float32 is about 1e-6 times the bound.
    least = 1e-10 if precise else 1e-7
    options = {"maxiter": 100, "ftol": least, "gtol": 1e-3}

    found = optimize.minimize(
        descend, start, jac=True, method="L-BFGS-B", options=options
    )
    value = -float(found.fun)
    return Mode(found.x, value, _component(evaluate, found.x, value))


def _component(evaluate: Evaluate, mode: np.ndarray, value: float) -> StudentT:
    steps = STEP * np.eye(len(mode))
    above, below = np.split(evaluate(mode + np.concatenate([steps, -steps]))[1], 2)
    hessian = (below - above) / (2 * STEP)
    hessian = np.where(np.isfinite(hessian), hessian, 0)
    values, vectors = np.linalg.eigh((hessian + hessian.T) / 2)
    values = np.maximum(values, WIDEST**-2)
    covariance = (vectors / values) @ vectors.T
    component = StudentT.symmetric(mode, covariance)
    return component._replace(sides=_sides(evaluate, component, value))


def _sides(evaluate: Evaluate, component: StudentT, value: float) -> np.ndarray:
    """Return the scales below and above the mode, (2, d), at which a t distribution
    falls no more than the density does, ``FAR`` scales away along each axis. They are
    at least one. The logarithm of a scale that may be zero has a long tail below.

    Reference: Geweke (1989), section 5.
    """
    d, steps = len(component.mode), FAR * component.axes.T
    there, _ = evaluate(component.mode + np.concatenate([-steps, steps]))
    fall = np.where(np.isfinite(there), value - there, np.inf).clip(max=100.0)
    # Solves (FREEDOM + d) / 2 * log1p((FAR / side)**2 / FREEDOM) = fall.
    ratio = FREEDOM * np.expm1(2 * fall / (FREEDOM + d))
    sides = FAR / np.sqrt(np.maximum(ratio, 1e-3))
    return np.clip(sides, 1.0, WIDEST_SIDE).reshape(2, d)


def another(
    modes: list[Mode], points: np.ndarray, log_weights: np.ndarray
) -> Any | None:
    """Return a point near a possible further mode: far from known modes, and with much
    of the weight.

    :param modes: known modes.
    :param points: points, (n, d).
    :param log_weights: normalised log-weights, (n,).
    """
    d = points.shape[1]
    far = np.min([m.component.distances(points) for m in modes], axis=0) > 9 + 4 * d
    weights = np.where(far, np.exp(log_weights), 0)
    return points[np.argmax(weights)] if weights.sum() > 0.02 else None


def is_new(mode: Mode, modes: list[Mode]) -> bool:
    """Whether a search ended at a new mode."""
    return all(m.component.distances(mode.point[None])[0] > 1 for m in modes)
