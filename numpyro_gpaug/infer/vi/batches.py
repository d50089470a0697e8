# SPDX-License-Identifier: Apache-2.0
"""Data that are read batch by batch, from arrays on disk, from Parquet files and other
Arrow data sets, or from any loader."""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Sequence
from contextlib import closing
from itertools import islice
from typing import Any, Protocol, runtime_checkable

import jax
import numpy as np

from numpyro_gpaug.model.calls import check_count
from numpyro_gpaug.model.columns import categories_of
from numpyro_gpaug.multilabel import prefetch

# The number of consecutive rows that are read at once.
BLOCK = 2**14


@runtime_checkable
class RowBlocks(Protocol):
    """Rows that are read in blocks, in any order.

    :ivar sizes: rows of every block.
    """

    sizes: Sequence[int]

    def read(self, block: int) -> Any:
        """Return a tuple or dict of arrays, rows first.

        :param block: the number of the block.
        """


class ArrayRows:
    """:class:`RowBlocks` of arrays, such as NumPy's memory maps.

    :param arrays: a tuple or dict of arrays, rows first.
    :raises ValueError: for arrays that differ in their number of rows, and for columns
        of categories.
    """

    def __init__(self, arrays: Any) -> None:
        leaves = jax.tree.leaves(arrays)
        if any(categories_of(x) is not None for x in leaves):
            raise ValueError(
                "the source has a column of categories. Pass codes instead, such as "
                "table['herd'].cat.codes.to_numpy() of pandas"
            )
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

    def read(self, block: int) -> Any:
        """A tuple or dict of arrays, rows first."""
        start = self._starts[block]
        end = start + BLOCK
        return jax.tree.map(lambda x: np.array(x[start:end]), self._arrays)


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
        self._columns = columns
        lists = ([x] if isinstance(x, str) else x for x in columns.values())
        wanted = [name for names in lists for name in names]
        if unknown := sorted(set(wanted) - set(dataset.schema.names)):
            raise ValueError(
                f"the data have no columns {unknown}. They have {dataset.schema.names}"
            )
        self._names = list(dict.fromkeys(wanted))
        self._schema = dataset.schema
        blocks = [x for whole in dataset.get_fragments() for x in _split(whole)]
        self._blocks = [block for block, _ in blocks]
        self.sizes = [rows for _, rows in blocks]

    def read(self, block: int) -> dict[str, np.ndarray]:
        """Return the arrays of a block, by argument name, with the dtypes that JAX will
        give them.

        :param block: the number of the block.
        :raises ValueError: for missing values of integers; missing floats are NaN.
        """
        table = self._blocks[block].to_table(columns=self._names, schema=self._schema)
        known = {name: _numbers(table[name], name) for name in self._names}

        def array(given: str | Sequence[str]) -> np.ndarray:
            if isinstance(given, str):
                return known[given]
            return np.stack([known[name] for name in given], 1)

        return _plain({name: array(given) for name, given in self._columns.items()})


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


def _numbers(column: Any, name: str) -> np.ndarray:
    from pyarrow import types

    if column.null_count and not types.is_floating(column.type):
        raise ValueError(
            f"column {name!r}, {column.type}, has {column.null_count} missing values. "
            "Leave these rows out, or write floats with NaN"
        )
    return column.to_numpy()


# Rows that are in memory and shuffled at a time.
SHUFFLED = 2**18
# Of these, rows that become batches at a time, few enough to stay in a cache.
PIECE = 2**15
# The smallest number of batches that are read ahead.
AHEAD = 4
# The time in seconds that a batch may take if other processes may wait for it.
PATIENCE = 300.0


class Blocks:
    """All data, read block by block in every step of a fit. Pass it instead of the
    model's arguments: ``svi.run(key, num_steps, blocks, inducing=Z)``. A thread reads
    ahead.

    Factors of the likelihood are sums over rows, and so is the gradient in
    hyperparameters. Steps therefore equal those on data in memory, up to rounding. With
    fixed hyperparameters (``optim=None``) a step with one Gaussian process reads the
    data once. A step of L-BFGS (``optim="lbfgs"``, the default) reads them for every
    update of the latents, two to five times with one Gaussian process, and once for the
    gradient. The model must treat rows one by one: no mean over ``X``. If the mesh of a
    fit spans several operating system processes, each passes the rows that it reads,
    equally many, in blocks of the same size.

    :param source: a tuple of arrays (the model's arguments) or a dict of them (by
        name), rows first, that can be sliced: NumPy's memory maps, HDF5, Zarr; or an
        :class:`~numpyro_gpaug.ArrowRows`; or any iterable of batches as such tuples or
        dicts (torch's ``DataLoader``, Grain), with equally many rows except in the
        last. It is iterated over repeatedly.
    :param size: rows of a block; ``None`` for an iterable.
    :param rows: number of rows in all, of an iterable.
    :param timeout: seconds to wait for the next block, after which the fit ends with a
        ``TimeoutError``. The default is no limit, or 300 seconds after
        :func:`jax.distributed.initialize`, because other processes wait, too.
    :raises ValueError: for arrays of unequal length, for anything but arrays, and if
        ``size`` or ``rows`` are missing or superfluous.

    **Example** All learnt on all data; or continued from :class:`Batches`, where
    hyperparameters were learnt::

        svi.run(key, 60, gpaug.Blocks((X, y), 1000), inducing=Z)
        still = gpaug.ConjugateSVI(model, gpaug.AutoSparseGP(model), optim=None)
        still.run(
            key, 5, gpaug.Blocks((X, y), 1000), inducing=Z, init_params=result.params
        )
    """

    def __init__(
        self,
        source: Any,
        size: int | None = None,
        *,
        rows: int | None = None,
        timeout: float | None = None,
    ) -> None:
        if timeout is None and jax.distributed.is_initialized():
            timeout = PATIENCE
        self.timeout = timeout
        if _is_arrays(source):
            source = ArrayRows(source)
        self._loads = not isinstance(source, RowBlocks)
        if self._loads:
            _check_loader(source, size, rows)
        elif size is None or rows is not None:
            raise ValueError("for arrays pass only the rows of a batch, size=...")
        self._source: Any = source
        self.rows = int(sum(source.sizes) if rows is None else rows)
        check_count("rows", self.rows)
        first = _kept(_first(source, timeout)) if self._loads else None
        self.size = rows_of(first) if size is None else size
        check_count("size", self.size)
        if self.size > self.rows:
            raise ValueError(
                f"a batch of {self.size} rows is larger than all {self.rows}"
            )
        self.first = next(self.blocks()) if first is None else first

    @property
    def ahead(self) -> int:
        """The number of batches to read ahead. Arrays are read in large parts: reading
        of the next part begins when the steps on the current part begin, not when they
        end. A loader creates each batch separately."""
        if self._loads:
            return AHEAD
        return max(AHEAD, (SHUFFLED + max(self._source.sizes)) // self.size)

    def blocks(self) -> Iterator[Any]:
        """Yield all rows once, in their order; the last block may have fewer rows."""
        if self._loads:
            return self._loaded(0, slack=0)
        parts = map(self._read, range(len(self._source.sizes)))
        return cut(parts, self.size, -(-self.rows // self.size))

    def _read(self, block: int) -> Any:
        found = _plain(self._source.read(block))
        size = self._source.sizes[block]
        if rows_of(found) != size:
            raise ValueError(
                f"block {block} of the source has {rows_of(found)} rows, but was "
                f"announced with {size}"
            )
        return found

    def _loaded(self, start: int, slack: int) -> Iterator[Any]:
        """Iterate once over a loader, with checks.

        :param start: the first batch.
        :param slack: the number of rows that the loader may have left out at its end.
        """
        seen, last = 0, self.size
        for i, batch in enumerate(map(_kept, self._source)):
            rows = rows_of(batch)
            if last < self.size or rows > self.size:
                number, other = (i - 1, last) if last < self.size else (i, rows)
                raise ValueError(
                    f"batch {number} of an epoch has {other} rows, but the first "
                    f"had {self.size}. Only the last batch of an epoch may have "
                    "fewer"
                )
            seen, last = seen + rows, rows
            if seen > self.rows:
                raise ValueError(
                    f"the source has more than {self.rows} rows. Pass the number of "
                    "all rows of an epoch, rows=..."
                )
            if i >= start and not (rows < self.size and slack):
                yield batch
        if seen + slack < self.rows:
            raise ValueError(
                f"the source ended early, after {seen} of {self.rows} rows. If it is "
                "complete, pass rows=..., the number of all rows of an epoch"
            )


class Batches(Blocks):
    """Minibatches that are read during a fit. Pass it instead of the model's arguments:
    ``svi.run(key, num_steps, batches, inducing=Z)``. A thread reads ahead.

    A step uses one batch, which represents all rows: the model is written for all data,
    ``plate("data", X.shape[0])``, and its observations get the weight rows / size.
    Epochs are shuffled, and rows that do not fill the last batch of an epoch are left
    out.

    A state contains the number of batches so far: a run that continues from it
    (:func:`~numpyro_gpaug.infer.load_state`) begins with the next.

    :param source: see :class:`Blocks`; an iterable has its own order. To continue in
        the middle of an epoch, its first batches are read and discarded.
    :param size: rows of a batch; ``None`` for an iterable.
    :param rows: number of rows in all, of an iterable.
    :param seed: seed of the shuffling. Blocks of adjacent rows are read in random
        order, and the rows of up to 2^18 of them are shuffled at a time.
    :param timeout: see :class:`Blocks`.
    :raises ValueError: as :class:`Blocks` does.

    **Example**

    >>> import jax, numpyro, optax, numpy as np, numpyro.distributions as dist
    >>> import numpyro_gpaug as gpaug
    >>> def model(X, y=None, *, inducing):
    ...     ls = numpyro.param("ls", 1.0, constraint=dist.constraints.positive)
    ...     gp = gpaug.GaussianProcess("f", gpaug.kernels.Matern52(ls), inducing)
    ...     with numpyro.plate("data", X.shape[0]):
    ...         numpyro.sample("y", dist.Bernoulli(logits=gp(X)), obs=y)
    >>> X = np.linspace(-3, 3, 400, dtype="float32")[:, None]  # or np.memmap(...)
    >>> batches = gpaug.Batches((X, (X[:, 0] > 0).astype("int8")), 50)
    >>> svi = gpaug.ConjugateSVI(model, gpaug.AutoSparseGP(model), optax.adam(0.01))
    >>> result = svi.run(
    ...     jax.random.key(0), 40, batches, inducing=X[::50], progress_bar=False
    ... )
    >>> print(svi.posterior(result).predict_y(X[::399]).probs > 0.5)
    [False  True]
    """

    def __init__(
        self,
        source: Any,
        size: int | None = None,
        *,
        rows: int | None = None,
        seed: int = 0,
        timeout: float | None = None,
    ) -> None:
        super().__init__(source, size, rows=rows, timeout=timeout)
        self._seed = seed

    def __len__(self) -> int:
        """The number of batches in an epoch."""
        return self.rows // self.size

    def epoch(self, number: int, start: int = 0) -> Iterator[Any]:
        """Yield the batches of an epoch, shuffled; the same number gives the same
        batches.

        :param number: the number of the epoch, from 0.
        :param start: the first batch to yield.
        """
        if self._loads:
            return self._loaded(start, slack=self.size - 1)
        rng = np.random.default_rng([self._seed, number])
        order = rng.permutation(len(self._source.sizes))
        seeds = np.random.SeedSequence([self._seed, number, 1])
        groups = grouped(order, self._source.sizes, max(SHUFFLED, self.size))
        parts = self._shuffled(groups, seeds.spawn(len(groups)), start * self.size)
        return cut(parts, self.size, len(self) - start)

    def _shuffled(
        self, groups: list[list[int]], seeds: list[Any], skipped: int
    ) -> Iterator[Any]:
        """Yield groups of blocks with their rows shuffled, in pieces of whole batches.

        :param skipped: rows at the start of the epoch to leave out.
        """
        numbers = [sum(self._source.sizes[i] for i in group) for group in groups]
        while numbers and skipped >= numbers[0]:
            skipped -= numbers[0]
            del groups[0], seeds[0], numbers[0]
        piece = max(PIECE // self.size, 1) * self.size
        # The next group is read while the last is shuffled.
        groups_read: Any = prefetch(map(self._gathered, groups), 1)
        with closing(groups_read):
            for held, seed, number in zip(groups_read, seeds, numbers, strict=True):
                order = np.random.default_rng(seed).permutation(number)[skipped:]
                skipped = 0
                for start in range(0, len(order), piece):
                    some = order[start : start + piece]
                    yield jax.tree.map(lambda x, i=some: x.take(i, axis=0), held)

    def _gathered(self, group: list[int]) -> Any:
        """Return the rows of a group of blocks."""
        rows = sum(self._source.sizes[block] for block in group)
        held = jax.tree.map(
            lambda x: np.empty((rows, *x.shape[1:]), x.dtype), self.first
        )
        start = 0
        for block in group:
            found = self._read(block)
            check_batch(found, self.first, rows)
            end = start + self._source.sizes[block]
            for x, there in zip(*map(jax.tree.leaves, (found, held)), strict=True):
                there[start:end] = x
            start = end
        return held


def _first(loader: Iterable[Any], timeout: float | None) -> Any:
    ahead: Any = prefetch(islice(loader, 1), 1, timeout)
    with closing(ahead):
        return next(ahead, ())


def check_batch(batch: Any, like: Any, size: int) -> None:
    """Raise if a batch differs in form from the first one.

    :param batch: a tuple or dict of arrays.
    :param like: the first batch.
    :param size: the maximum number of rows.
    :raises ValueError: if they differ; it names the argument, both shapes and dtypes.
    """
    found, wanted = (jax.tree_util.tree_leaves_with_path(x) for x in (batch, like))
    if [name for name, _ in found] != [name for name, _ in wanted]:
        raise ValueError(
            f"it contains {_names(found)}, but the first one contained {_names(wanted)}"
        )
    rows = {len(x) for _, x in found}
    for (name, x), (_, first) in zip(found, wanted, strict=True):
        same = x.shape[1:] == first.shape[1:] and x.dtype == first.dtype
        if not same or len(rows) > 1 or len(x) > size:
            raise ValueError(
                f"argument {jax.tree_util.keystr(name)} has shape {x.shape} and dtype "
                f"{x.dtype}, but in the first one {first.shape} and {first.dtype}"
            )


def _check_loader(source: Any, size: int | None, rows: int | None) -> None:
    _check_no_arrays(source)
    name = type(source).__name__
    if size is not None or rows is None:
        raise ValueError(
            f"a {name} yields its own batches. Pass the total number of rows, "
            "rows=..., and no size"
        )
    if not isinstance(source, Iterable) or isinstance(source, Iterator):
        raise ValueError(
            f"a {name} can be read only once, and a fit reads the data in every "
            "epoch. Pass arrays, or an object that iter() accepts repeatedly"
        )


def _names(leaves: Any) -> list[str]:
    return [jax.tree_util.keystr(name) for name, _ in leaves]


def _is_arrays(source: Any) -> bool:
    if not isinstance(source, tuple | dict):
        return False
    leaves = jax.tree.leaves(source, is_leaf=lambda x: x is None)
    arrays = all(hasattr(x, "shape") and hasattr(x, "dtype") for x in leaves)
    return bool(leaves) and arrays


def _check_no_arrays(source: Any) -> None:
    """Raise for data that look like arrays, but not in the form that :func:`_is_arrays`
    accepts."""
    parts = list(source.values()) if isinstance(source, dict) else source
    if isinstance(parts, list | tuple):
        meant = not isinstance(source, list) or any(hasattr(x, "shape") for x in parts)
        of = f" of {', '.join(type(x).__name__ for x in parts)}"
    else:
        meant, of = hasattr(source, "shape"), ""
    if meant:
        raise ValueError(
            "the data are a tuple of arrays, as the model's positional arguments, (X, "
            'y), or a dict of them by name, {"X": X, "y": y}; got '
            f"{type(source).__name__}{of}"
        )


def _kept(batch: Any) -> Any:
    """Copy a batch of a loader, because a loader may fill the same arrays again before
    the batch is used."""
    return jax.tree.map(np.copy, _plain(batch))


def _plain(batch: Any) -> Any:
    """Return a tuple or dict of NumPy arrays with the dtypes that JAX gives them."""

    def array(leaf: Any) -> np.ndarray:
        found = np.asarray(leaf)
        return found.astype(jax.dtypes.canonicalize_dtype(found.dtype), copy=False)

    if isinstance(batch, dict):
        return {name: array(leaf) for name, leaf in batch.items()}
    if not isinstance(batch, tuple | list):
        raise TypeError(
            "a batch must be a tuple of arrays, or a dict of them by name. Got a "
            f"{type(batch).__name__}"
        )
    return tuple(array(leaf) for leaf in batch)
