# SPDX-License-Identifier: Apache-2.0
"""Rows that can be read in any order, of arrays on disk."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, Protocol, runtime_checkable

import jax
import numpy as np

# Rows of arrays that are read at once; one after the other on disk.
BLOCK = 2**14


@runtime_checkable
class RowBlocks(Protocol):
    """Rows that are read in blocks, in any order.

    :ivar sizes: rows of every block.
    """

    sizes: Sequence[int]

    def read(self, block: int) -> Any:
        """A tuple or dict of arrays, rows first."""


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
                f"the arrays of a source have as many rows each, but shapes {shapes}"
            )
        rows = shapes[0][0]
        self._arrays = arrays
        self._starts = range(0, rows, BLOCK)
        self.sizes = [min(BLOCK, rows - start) for start in self._starts]

    def read(self, block: int) -> Any:
        """A tuple or dict of arrays, rows first."""
        start = self._starts[block]
        return jax.tree.map(lambda x: np.array(x[start : start + BLOCK]), self._arrays)
