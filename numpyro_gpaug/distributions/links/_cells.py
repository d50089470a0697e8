# SPDX-License-Identifier: Apache-2.0
"""Cells of a piecewise-constant link: their edges, the points at which a function is
evaluated, and the number of cells for a given accuracy."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax import Array
from jax.typing import ArrayLike

RULES = ("midpoint", "upper")

# The number of standard deviations that contain a normal variable, and the number of
# points per Gaussian.
_REACH = 9.0
_POINTS = 6001
# The shares of the error that the outer cells may have.
_SHARES = (0.05, 0.2, 0.5, 0.8)


def knots(edges: Sequence[float], rule: str = "midpoint") -> np.ndarray:
    """Return the points at which a function is evaluated, one per cell.

    :param edges: the finite edges, (K - 1,).
    :param rule: ``"midpoint"``: midpoints of the finite cells, and finite edges of the
        outer ones; ``"upper"``: upper edges, and the lower edge of the last cell.
    :raises ValueError: for another rule.
    """
    if rule not in RULES:
        raise ValueError(f"rule must be one of {RULES}, got {rule!r}")
    ends = np.asarray(edges, np.float64)
    inner = 0.5 * (ends[1:] + ends[:-1]) if rule == "midpoint" else ends[1:]
    return np.concatenate([ends[:1], inner, ends[-1:]])


def equal_edges(num_pieces: int, lower: float, upper: float) -> tuple[float, ...]:
    """Return K - 1 edges, equally spaced from ``lower`` to ``upper`` inclusive; the two
    must be equal for K = 2."""
    if num_pieces < 2:
        raise ValueError(f"num_pieces must be at least 2, got {num_pieces}")
    if num_pieces > 2 and not lower < upper:
        raise ValueError(f"lower must be below upper, got {lower} and {upper}")
    if num_pieces == 2 and lower != upper:
        raise ValueError(
            "two pieces have one finite edge, so lower and upper must be equal. "
            f"Got {lower} and {upper}"
        )
    return tuple(np.linspace(lower, upper, num_pieces - 1).tolist())


def checked_edges(edges: Sequence[float] | Array) -> tuple[float, ...]:
    """Return edges as plain numbers, finite and increasing."""
    if isinstance(edges, jax.core.Tracer):
        raise ValueError("edges must be constants, not traced values")
    values = np.asarray(edges, np.float64)
    if values.ndim != 1 or values.size < 1:
        raise ValueError(
            f"edges has shape {values.shape}. Pass the finite edges, at least one "
            "(two pieces)"
        )
    if not (np.isfinite(values).all() and (np.diff(values) > 0).all()):
        raise ValueError(
            f"edges of shape {values.shape} must be finite and increasing, got "
            f"{values[:5]}"
        )
    return tuple(values.tolist())


def search(
    function: Callable[[Array], Array],
    error: float,
    mean: ArrayLike,
    variance: ArrayLike,
    max_pieces: int,
) -> tuple[int, float, float]:
    """Return the number of pieces, and the first and last edge; see
    :meth:`~numpyro_gpaug.PiecewiseLink.to_accuracy`."""
    if not error > 0:
        raise ValueError(f"error must be positive, got {error}")
    m, v = np.broadcast_arrays(
        np.asarray(mean, float).ravel(), np.asarray(variance, float).ravel()
    )
    if not (v > 0).all():
        raise ValueError(f"variance must be positive, got {v.min()}")
    problem = _Problem(function, m, np.sqrt(v))
    found = [problem.pieces(error**2, share, max_pieces) for share in _SHARES]
    if all(pieces is None for pieces, _ in found):
        lower, upper = problem.range(found[0][1])
        reached = problem.total(max_pieces, lower, upper) ** 0.5
        raise ValueError(
            f"{max_pieces} pieces on [{lower:.3g}, {upper:.3g}] have a root mean "
            f"squared error of {reached:.2g}, more than the {error} asked for"
        )
    pieces, reach = min((k, c) for k, c in found if k is not None)
    return pieces, *problem.range(reach)


class _Problem:
    """Mean squared errors, by a fine trapezoid rule, under each Gaussian."""

    def __init__(self, function: Any, mean: np.ndarray, scale: np.ndarray) -> None:
        z = np.linspace(-_REACH, _REACH, _POINTS)
        weights = np.exp(-0.5 * z * z)
        self._weights = weights / weights.sum()
        self._f = mean[:, None] + scale[:, None] * z
        self._mean, self._scale, self._function = mean, scale, function
        self._values = self._at(self._f)

    def _at(self, f: np.ndarray) -> np.ndarray:
        return np.asarray(self._function(jnp.asarray(f)), float)

    def range(self, reach: float) -> tuple[float, float]:
        low, high = self._mean - reach * self._scale, self._mean + reach * self._scale
        return float(low.min()), float(high.max())

    def outside(self, reach: float) -> float:
        """Return the worst mean squared error in the outer cells alone."""
        lower, upper = self.range(reach)
        edge = self._at(np.clip(self._f, lower, upper))
        return self._worst(np.square(self._values - edge))

    def total(self, num_pieces: int, lower: float, upper: float) -> float:
        """Return the worst mean squared error of all cells."""
        edges = equal_edges(num_pieces, lower, upper)
        heights = self._at(knots(edges))
        cells = np.searchsorted(edges, self._f, side="right")
        return self._worst(np.square(self._values - heights[cells]))

    def pieces(
        self, square: float, share: float, most: int
    ) -> tuple[int | None, float]:
        """Return the fewest pieces, ``None`` if ``most`` do not suffice, and the range,
        if the outer cells may take a share of the mean squared error."""
        reach = _smallest(lambda c: self.outside(c) < share * square, 0.0, _REACH)
        lower, upper = self.range(reach)

        def good(k: int) -> bool:
            return self.total(k, lower, upper) < square

        high = 3
        while high < most and not good(high):
            high = min(2 * high, most)
        if not good(high):
            return None, reach
        low = max(3, high // 2)
        while low < high:
            middle = (low + high) // 2
            low, high = (low, middle) if good(middle) else (middle + 1, high)
        return high, reach

    def _worst(self, squares: np.ndarray) -> float:
        return float((squares @ self._weights).max())


def _smallest(good: Callable[[float], bool], low: float, high: float) -> float:
    """Find about the smallest number that is sufficient, by bisection; ``high`` if none
    is."""
    for _ in range(20):
        middle = 0.5 * (low + high)
        low, high = (low, middle) if good(middle) else (middle, high)
    return high
