# SPDX-License-Identifier: Apache-2.0
"""Scrambled Halton sequences. SciPy has them, too, in a module that takes as long to
import as a small model to fit."""

from __future__ import annotations

import math

import numpy as np


def halton(num: int, size: int, rng: np.random.Generator) -> np.ndarray:
    """Return quasi-random points in (0, 1), uniform one by one, (num, size).

    Coordinate i of point n has the digits of n in the base of the i-th prime number, in
    reverse order after the point, each permuted at random: Owen (2017), A randomized
    Halton algorithm in R.

    :param num: the number of points.
    :param size: the number of coordinates.
    :param rng: draws the permutations.
    """
    found = np.empty((num, size))
    for column, base in zip(found.T, _primes(size), strict=True):
        digits, left = math.ceil(53 / math.log2(base)), np.arange(num)
        column[:] = 0.5 * float(base) ** -digits
        for place in range(1, digits + 1):
            left, digit = np.divmod(left, base)
            column += rng.permutation(base)[digit] * float(base) ** -place
    return found


def _primes(number: int) -> list[int]:
    """Return the first prime numbers."""
    found: list[int] = []
    while len(found) < number:
        last = found[-1] if found else 1
        found.append(
            next(n for n in range(last + 1, 2 * last + 1) if all(n % p for p in found))
        )
    return found
