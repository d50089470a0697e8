# SPDX-License-Identifier: Apache-2.0
"""Gaussian factors at known hyperparameters, and the collapsed bound there, with a
spline to interpolate between them. Far from all of them, a search starts from the
factors of the nearest."""

from __future__ import annotations

from typing import Any

import jax
import numpy as np

from numpyro_gpaug.infer.nested.bound import Start
from numpyro_gpaug.infer.nested.proposal import StudentT

# The total number of values in all kept factors.
REMEMBERED = 2**24
# Points that are closer than this, in units of the t distribution, count as one point
# of the spline. Otherwise its equations would be almost singular.
CLOSE = 0.05
# The largest sum of absolute spline weights, which add up to one. It is larger for
# points outside of the known ones, and in more dimensions.
WITHIN = 200.0
KNOWN = np.ones(1, bool)
# An observation is far out if it is so many times as far from the median as most are.
OUT = 30.0
# The spline is fitted again when this many times as many points are known, up to a
# number of points whose equations take as long as a few searches.
MORE, MOST_POINTS = 1.25, 400


class Known:
    """Known factors at points of the hyperparameters.

    :param none: a start without factors, which has their shapes.
    :param dimension: dimension of the hyperparameters.
    """

    def __init__(self, none: Start, dimension: int) -> None:
        self._none = none
        leaves, self._tree = jax.tree.flatten(none.factors)
        self._shapes = [x.shape[1:] for x in leaves]
        self._ends = np.cumsum([int(np.prod(s)) for s in self._shapes])
        self._dtype = leaves[0].dtype
        # Potentials come first, then equally many precisions.
        self._size = int(self._ends[0])
        self._room = max(REMEMBERED // max(int(self._ends[-1]), 1), 1)
        self._points = np.zeros((0, dimension))
        self._rows: list[np.ndarray] = []
        self._bounds = np.zeros(0)
        self._learnt = 0
        self.component: StudentT | None = None
        self._spline: Spline | None = None

    def add(self, points: np.ndarray, factors: Any, bounds: np.ndarray) -> None:
        """Add factors that were found, as far as there is room.

        :param points: points, (n, d).
        :param factors: factors with a leading axis of points.
        :param bounds: the collapsed bound at each point, (n,).
        """
        room = max(self._room - len(self._rows), 0)
        self._rows += list(self.flat(factors)[:room])
        self._points = np.concatenate([self._points, points[:room]])
        self._bounds = np.concatenate([self._bounds, bounds[:room]])

    def room(self, num: int) -> np.ndarray:
        """Return an array for the flat factors at so many points."""
        return np.zeros((num, int(self._ends[-1])), self._dtype)

    @property
    def grown(self) -> bool:
        """Whether so many points were added that the spline should be fitted again."""
        return MORE * self._learnt <= len(self._rows) <= MOST_POINTS

    def learn(self) -> None:
        """Fit the spline to all known factors."""
        self._learnt = len(self._rows)
        white = self._white(self._points)
        kept: list[int] = []
        for i, point in enumerate(white):
            apart = np.square(white[kept] - point).sum(1)
            if not kept or apart.min() > CLOSE**2:
                kept.append(i)
        self._spline = Spline.of(white[kept])
        if self._spline is not None:
            rows = np.stack([self._rows[i] for i in kept])
            precisions = rows[:, self._size : 2 * self._size]
            least = np.sqrt(np.finfo(self._dtype).tiny)
            self._positive = (precisions > least).all(0)
            safe = np.where(self._positive, precisions, 1)
            self._steady = self._positive & _steady(rows[:, : self._size] / safe)
            self._between = self._observed(rows)
            self._between_bounds = self._bounds[kept]
            self._least, self._most = self._between.min(0), self._between.max(0)

    def at(self, points: np.ndarray) -> tuple[np.ndarray, np.ndarray, np.ndarray]:
        """Return factors at points (n, d), flat; an error bound for each, which is
        infinite if they are the factors of the nearest known point; and the collapsed
        bound, NaN for these."""
        doubts, bounds = np.full(len(points), np.inf), np.full(len(points), np.nan)
        if not self._rows:
            return self.room(len(points)), doubts, bounds
        white, known = self._white(points), self._white(self._points)
        apart = np.square(white[:, None] - known).sum(-1)
        rows = self.room(len(points))
        for row, nearest in zip(rows, apart.argmin(1), strict=True):
            row[:] = self._rows[nearest]
        if self._spline is not None:
            weights, doubt = self._spline(white)
            inside = np.abs(weights).sum(1) < WITHIN
            weights, doubts[inside] = weights[inside], doubt[inside]
            # Precisions that are positive at all known points remain positive.
            chosen = weights.astype(self._dtype)
            found = np.clip(chosen @ self._between, self._least, self._most)
            rows[inside] = self._factors_of(found)
            bounds[inside] = weights @ self._between_bounds
        return rows, doubts, bounds

    def _observed(self, rows: np.ndarray) -> np.ndarray:
        """Return factors as observations of their predictors and logarithms of their
        precisions, which change less with the hyperparameters: for a normal likelihood,
        the observations do not change, and the logarithms change as the logarithm of
        the scale. Precisions that are not positive everywhere are not transformed, nor
        are potentials whose observations are far out at some points."""
        found, n = rows.copy(), self._size
        potential, precision = found[:, :n], found[:, n : 2 * n]
        potential[:, self._steady] /= precision[:, self._steady]
        precision[:, self._positive] = np.log(precision[:, self._positive])
        return found

    def _factors_of(self, observed: np.ndarray) -> np.ndarray:
        """Invert :meth:`_observed`."""
        found, n = observed.copy(), self._size
        potential, precision = found[:, :n], found[:, n : 2 * n]
        precision[:, self._positive] = np.exp(precision[:, self._positive])
        potential[:, self._steady] *= precision[:, self._steady]
        return found

    def without_negative(self, rows: np.ndarray) -> np.ndarray:
        """Return flat factors in which factors of pairs, and factors with a negative
        precision, are zero: the product with any prior is a Gaussian.

        :param rows: flat factors, (n, numbers).
        """
        found, n = rows.copy(), self._size
        negative = found[:, n : 2 * n] < 0
        for part in (found[:, :n], found[:, n : 2 * n]):
            part[negative] = 0
        found[:, 2 * n :] = 0
        return found

    def start(self, rows: np.ndarray) -> Start:
        """Return the starts of searches.

        :param rows: flat factors, (n, numbers).
        """
        return Start(self.factors(rows), np.full(len(rows), bool(self._rows)))

    def factors(self, rows: np.ndarray) -> Any:
        """Return factors from their flat form."""
        parts = np.split(rows, self._ends[:-1], 1)
        shaped = [
            x.reshape(len(rows), *s) for x, s in zip(parts, self._shapes, strict=True)
        ]
        return jax.tree.unflatten(self._tree, shaped)

    def flat(self, factors: Any) -> np.ndarray:
        """Return factors as one flat row per point."""
        leaves = map(np.asarray, jax.tree.leaves(factors))
        return np.concatenate([x.reshape(len(x), -1) for x in leaves], 1)

    def _white(self, points: np.ndarray) -> np.ndarray:
        return points if self.component is None else self.component.along(points)


def _steady(observations: np.ndarray) -> np.ndarray:
    """Whether no observation is far out. One whose precision almost vanishes at some
    point may be a million there, and spoils the spline between all others.

    :param observations: at known points, (n, numbers).
    """
    apart = np.abs(observations - np.median(observations, 0))
    rounding = 1e-3 * np.abs(observations).min(0)
    return apart.max(0) <= OUT * np.median(apart, 0) + rounding


class Spline:
    """A polyharmonic spline, a sum of cubed distances and an affine function, without a
    scale parameter.

    :param points: points at which values are known, (n, d).
    :param inverse: inverse matrix of its equations, (n + 1 + d, n + 1 + d).

    Reference: Wendland (2005), Scattered data approximation, sections 8.3 and 11.1: the
    power function.
    """

    def __init__(self, points: np.ndarray, inverse: np.ndarray) -> None:
        self._points, self._inverse = points, inverse

    @classmethod
    def of(cls, points: np.ndarray) -> Spline | None:
        """Return the spline of points (n, d), if there are enough of them."""
        num, d = points.shape
        if num < 2 * d + 1:
            return None
        sides = _sides(points, points)
        corner = np.zeros((d + 1, d + 1))
        equations = np.block(
            [[sides[:, :num], sides[:, num:]], [sides[:, num:].T, corner]]
        )
        try:
            return cls(points, np.linalg.inv(equations))
        except np.linalg.LinAlgError:  # the points lie in a hyperplane
            return None

    def __call__(self, at: np.ndarray) -> tuple[np.ndarray, np.ndarray]:
        """Return the weights of the known values at points (m, d), (m, n), and squares
        of the power function, which bound the error, (m,)."""
        sides = _sides(at, self._points)
        weights = sides @ self._inverse
        return weights[:, : len(self._points)], -(weights * sides).sum(1).clip(max=0)


def _sides(at: np.ndarray, points: np.ndarray) -> np.ndarray:
    apart = np.square(at[:, None] - points).sum(-1)
    return np.concatenate([apart**1.5, np.ones((len(at), 1)), at], 1)
