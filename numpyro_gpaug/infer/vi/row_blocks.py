# SPDX-License-Identifier: Apache-2.0
"""Rows of arrays on disk, and of Parquet files and other Arrow data sets, which can be
read in any order."""

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


class ArrowRows:
    """Rows of an Arrow data set: Parquet (read by its row groups), Feather, CSV; needs
    pyarrow, ``pip install numpyro_gpaug[arrow]``.

    :param dataset: a file, a folder of them, a list of files, or a
        ``pyarrow.dataset.Dataset``.
    :param columns: for each argument of the model, by name, a column, of shape (rows,),
        or a list of columns, of shape (rows, columns).
    :raises ValueError: for columns that the data do not have.

    **Example** ``Batches(ArrowRows("folder", X=["a", "b"], y="label"), 1000)`` are the
    model's arguments ``X``, (rows, 2), and ``y``.
    """

    def __init__(self, dataset: Any, **columns: str | Sequence[str]) -> None:
        from pyarrow import dataset as datasets

        if not isinstance(dataset, datasets.Dataset):
            dataset = datasets.dataset(dataset)
        self._columns = {
            name: [given] if isinstance(given, str) else list(given)
            for name, given in columns.items()
        }
        self._flat = {name for name, given in columns.items() if isinstance(given, str)}
        wanted = [x for names in self._columns.values() for x in names]
        if unknown := sorted(set(wanted) - set(dataset.schema.names)):
            raise ValueError(
                f"the data have no columns {unknown}. They have {dataset.schema.names}"
            )
        self._names = list(dict.fromkeys(wanted))
        self._schema = dataset.schema
        blocks = [x for whole in dataset.get_fragments() for x in _split(whole)]
        self._blocks = [block for block, _ in blocks]
        self.sizes = [rows for _, rows in blocks]

    def read(
        self, block: int, into: dict[str, np.ndarray] | None = None
    ) -> dict[str, np.ndarray]:
        """Return the arrays of a block, by argument name, with the dtypes that JAX will
        give them.

        :param block: the number of the block.
        :param into: arrays to read into; by default new ones.
        :raises ValueError: for missing values of integers; missing floats are NaN.
        """
        table = self._blocks[block].to_table(columns=self._names, schema=self._schema)
        dtypes = {name: _dtype(table[name], name) for name in self._names}
        if into is None:
            into = {}
            for name, columns in self._columns.items():
                of_all = np.result_type(*(dtypes[column] for column in columns))
                dtype = jax.dtypes.canonicalize_dtype(of_all)
                width = () if name in self._flat else (len(columns),)
                into[name] = np.empty((len(table), *width), dtype)
        start = 0
        # Combining the chunks of whole columns would copy them once more.
        for part in table.to_batches():
            end = start + len(part)
            for name, columns in self._columns.items():
                np.stack(
                    [part.column(x).to_numpy(zero_copy_only=False) for x in columns],
                    axis=1, out=into[name][start:end].reshape(-1, len(columns)),
                )  # fmt: skip
            start = end
        return into


def _split(fragment: Any) -> list[tuple[Any, int]]:
    """Return the row groups of Parquet files, or else the files, with their numbers of
    rows."""
    if not hasattr(fragment, "split_by_row_group"):
        return [(fragment, fragment.count_rows())]
    # For a single row group, count_rows counts the rows of the file.
    return [
        (part, sum(group.num_rows for group in part.row_groups))
        for part in fragment.split_by_row_group()
    ]


def _dtype(column: Any, name: str) -> np.dtype:
    from pyarrow import types

    if column.null_count and not types.is_floating(column.type):
        raise ValueError(
            f"column {name!r}, {column.type}, has {column.null_count} missing values"
        )
    return column.slice(0, 0).to_numpy().dtype
