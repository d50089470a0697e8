# SPDX-License-Identifier: Apache-2.0
"""Rows of arrays on disk, which can be read in any order."""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Sequence
from typing import Any, Protocol, runtime_checkable

import jax
import numpy as np

# The number of consecutive rows that are read at once.
BLOCK = 2**14


@runtime_checkable
class RowBlocks(Protocol):
    """Rows that are read in blocks, in any order.

    :ivar sizes: rows of every block.
    """

    sizes: Sequence[int]

    def read(self, block: int, into: Any = None) -> Any:
        """Return a tuple or dict of arrays, rows first.

        :param block: the number of the block.
        :param into: arrays to read the rows into; these may be returned.
        """


class ArrayRows:
    """:class:`RowBlocks` of arrays, such as NumPy's memory maps.

    :param arrays: a tuple or dict of arrays, rows first.
    :raises ValueError: for arrays that differ in their number of rows.
    """

    def __init__(self, arrays: Any) -> None:
        leaves = jax.tree.leaves(arrays)
        shapes = [np.shape(x) for x in leaves]
        if not all(shapes) or len({shape[0] for shape in shapes}) != 1:
            raise ValueError(
                "the arrays of a source must have equally many rows, but have "
                f"shapes {shapes}"
            )
        rows = shapes[0][0]
        self._arrays = arrays
        self._starts = range(0, rows, BLOCK)
        self.sizes = [min(BLOCK, rows - start) for start in self._starts]

    def read(self, block: int, into: Any = None) -> Any:
        """A tuple or dict of arrays, rows first."""
        start = self._starts[block]
        rows = jax.tree.map(lambda x: x[start : start + BLOCK], self._arrays)
        if into is None:
            return jax.tree.map(np.array, rows)
        jax.tree.map(np.copyto, into, rows)
        return into


def rows_of(batch: Any) -> int:
    """Return the number of rows of a batch, a tuple or dict of arrays."""
    shapes = [x.shape for x in jax.tree.leaves(batch)]
    if not shapes or not shapes[0]:
        raise ValueError(f"a batch has no rows: its arrays have shapes {shapes}")
    return shapes[0][0]


def grouped(order: Any, sizes: Sequence[int], least: int) -> list[list[int]]:
    """Yield blocks in an order, in groups of at least ``least`` rows.

    :param order: the numbers of the blocks.
    :param sizes: rows of every block.
    """
    groups: list[list[int]] = [[]]
    number = 0
    for block in order:
        if number >= least:
            groups.append([])
            number = 0
        groups[-1].append(int(block))
        number += sizes[block]
    return groups


def _joined(parts: list[Any]) -> Any:
    if len(parts) == 1:
        return parts[0]
    return jax.tree.map(lambda *leaves: np.concatenate(leaves), *parts)


def cut(parts: Iterable[Any], size: int, count: int) -> Iterator[Any]:
    """Yield rows from parts of any length in batches; the last batch may have fewer
    rows.

    :param parts: tuples or dicts of arrays.
    :param size: rows of a batch.
    :param count: the number of batches.
    """
    held: list[Any] = []
    number = 0
    for part in parts:
        held, number = [*held, part], number + rows_of(part)
        if number < size:
            continue
        rows = _joined(held)
        for start in range(0, number - size + 1, size):
            if count == 0:
                return
            yield jax.tree.map(lambda x, s=start: x[s : s + size], rows)
            count -= 1
        done = number - number % size
        number -= done
        left = jax.tree.map(lambda x, done=done: x[done:], rows)
        held = [left] if number else []
    if number and count:
        yield _joined(held)
