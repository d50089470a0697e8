# SPDX-License-Identifier: Apache-2.0
"""Sources of rows: arguments in memory, or batches that are read."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import closing
from itertools import islice
from typing import Any, NamedTuple

import jax
import numpy as np
from jax import Array
from jax.sharding import Mesh

from numpyro_gpaug._numpyro import one_thread
from numpyro_gpaug.infer.vi.batches import Batches, Blocks, check_batch
from numpyro_gpaug.infer.vi.loop import BATCHES, Stacked
from numpyro_gpaug.infer.vi.plan import Batch, Plan
from numpyro_gpaug.infer.vi.state import ConjugateState
from numpyro_gpaug.math.processes import (
    all_or_none,
    spans_processes,
    text_of_every_process,
)
from numpyro_gpaug.math.sharding import ROWS, on_mesh, row_processes, rows_placed
from numpyro_gpaug.model.arguments import Arguments, Model, Values
from numpyro_gpaug.model.latents import Structure
from numpyro_gpaug.model.observations import check_observations
from numpyro_gpaug.model.validation import are_moderate, check_arguments
from numpyro_gpaug.multilabel import prefetch

# The largest number of batches in one compiled loop, and of bytes in them. With large
# batches, a loop allocates memory for its intermediate results, which may take as long
# as a step.
TOGETHER, BYTES = 32, 2**24


class Steps(NamedTuple):
    """The result of some steps.

    :param state: the last state.
    :param losses: the losses of the steps.
    :param params: constrained params at the last state, if they were requested.
    """

    state: ConjugateState
    losses: np.ndarray
    params: Values | None = None


class Feed:
    """A source of rows to a run.

    :ivar size: the number of entries of the data of a step.
    :ivar mesh: the mesh of the rows.
    """

    size: int
    mesh: Mesh | None

    def steps(self, state: ConjugateState, wanted: int, tol: np.ndarray) -> Steps:
        """Take so many steps, or fewer if the bound no longer rises."""
        raise NotImplementedError

    def bounds(self, state: ConjugateState) -> Array:
        """Return the bounds of a state on minibatches that are the same in every
        call."""
        raise NotImplementedError

    def close(self) -> None:
        """Stop all threads of this source."""


class InMemory(Feed):
    """Arguments that every step uses completely.

    :param programs: the :class:`~numpyro_gpaug.infer.vi.programs.Programs` of the fit.
    :param plan: the plan of the fit.
    :param arguments: the model's arguments.
    :param data: fingerprint of the arguments, without added rows.
    """

    def __init__(
        self, programs: Any, plan: Plan, arguments: Arguments, data: np.uint32
    ) -> None:
        self._programs, self._plan, self._data = programs, plan, data
        self._arguments, self.mesh = arguments, arguments.mesh
        self.size = sum(x.size for x in arguments.arrays)

    @one_thread
    def take(self, state: ConjugateState, wanted: int, tol: np.ndarray) -> Any:
        """Take steps; see :func:`~numpyro_gpaug.infer.vi.loop.run_chunk`. The state is
        overwritten."""
        with on_mesh(self.mesh):
            return self._programs.advance(
                state, np.int32(wanted), tol, self._data, self._arguments,
                plan=self._plan,
            )  # fmt: skip

    def steps(self, state: ConjugateState, wanted: int, tol: np.ndarray) -> Steps:
        last, losses, taken, params = self.take(state, wanted, tol)
        return Steps(last, np.asarray(losses)[: int(taken)], params)

    @one_thread
    def bounds(self, state: ConjugateState) -> Array:
        with on_mesh(self.mesh):
            return self._programs.bounds(state, self._arguments, plan=self._plan)


class RunArguments(NamedTuple):
    """A model's arguments; some may be :class:`Blocks` or :class:`Batches`.

    :param batches: the batches or blocks; ``None`` if all data are in memory.
    :param args: the arguments, with the first batch.
    :param kwargs: the keyword arguments, likewise.
    :param processes: the number of processes that read batches, each with its own rows.
    """

    batches: Blocks | None
    args: tuple[Any, ...]
    kwargs: dict[str, Any]
    processes: int = 1

    @classmethod
    def split(
        cls, mesh: Mesh | None, args: tuple[Any, ...], kwargs: dict[str, Any]
    ) -> RunArguments:
        """Split the arguments of a run.

        :param mesh: the mesh over which rows of batches are sharded.
        :param args: the arguments.
        :param kwargs: the keyword arguments.
        :raises TypeError: for batches together with other positional arguments, or
            passed by name.
        :raises ValueError: for batches that cannot be sharded.
        """
        found = [x for x in (*args, *kwargs.values()) if isinstance(x, Blocks)]
        if not found:
            return cls(None, args, kwargs)
        if args != (found[0],):
            raise TypeError(
                f"{type(found[0]).__name__} replace all positional arguments, and "
                "cannot be passed by name: run(key, num_steps, batches, "
                "inducing=...)"
            )
        processes = 1 if mesh is None else _sharing(found[0], mesh)
        given, first = cls(found[0], (), kwargs), found[0].first
        if processes > 1:
            first = jax.tree.map(lambda x: rows_placed(x, mesh, 0), first)
        return cls(found[0], *given.at(first), processes)

    def at(self, batch: Any) -> tuple[tuple[Any, ...], dict[str, Any]]:
        """Return the arguments with a batch.

        :param batch: a tuple of arrays, or a dict of them.
        :raises ValueError: for a name of the batch that is also passed as an argument.
        """
        if not isinstance(batch, dict):
            return batch, self.kwargs
        names = set(self.batches.first) if self.batches else set()
        others = {k: v for k, v in self.kwargs.items() if k not in names}
        return (), {**others, **batch}

    @property
    def batch(self) -> Batch | None:
        """The total number of rows, and the rows of a batch, if a step uses one of
        :class:`Batches`."""
        if not isinstance(self.batches, Batches):
            return None
        rows, size = self.batches.rows, self.batches.size
        return Batch(self.processes * rows, self.processes * size)


def _sharing(batches: Blocks, mesh: Mesh) -> int:
    """The number of processes that read batches.

    :raises ValueError: for batches that cannot be sharded evenly, or that differ
        between processes, which would then wait for one another.
    """
    processes = row_processes(mesh)
    parts, left = mesh.shape[ROWS] // processes, batches.rows % batches.size
    # The remainder of an epoch is in no batch, but it is in a block.
    last = 0 if isinstance(batches, Batches) else left
    if batches.size % parts or last % parts:
        of_last = f", and a last one of {last}," if last else ""
        raise ValueError(
            f"{type(batches).__name__} of {batches.size} rows{of_last} cannot be "
            f"divided evenly among {parts} devices. Choose another size"
        )
    if processes > 1:
        arrays = [(*x.shape, str(x.dtype)) for x in jax.tree.leaves(batches.first)]
        found = text_of_every_process((type(batches).__name__, batches.rows, *arrays))
        if len(set(found)) > 1:
            raise ValueError(
                f"the processes read different data, by process: {found} (total "
                "rows, and the contents of the first batch). Each process must "
                "read equally many rows, in batches of one size, with the same "
                "columns"
            )
    return processes


class Reader:
    """Checked batches, numbered over epochs.

    :param given: the arguments of the run.
    :param model: the model.
    :param structure: its structure at a batch.
    :param mesh: the mesh over which the rows of every batch are sharded.
    """

    def __init__(
        self, given: RunArguments, model: Model, structure: Structure, mesh: Mesh | None
    ) -> None:
        assert given.batches is not None
        self.mesh = mesh
        self.batches: Any = given.batches
        self._given, self._model, self._structure = given, model, structure
        first = self.batches.first
        of_batch, of_others = given.at(jax.tree.map(lambda x: True, first))
        marks = jax.tree.map(lambda x: x is True, (of_batch, of_others))
        # Of arrays only: values that are True but no arrays are dropped.
        self._of_batches = tuple(
            Arguments.select_arrays(given.at(first), jax.tree.leaves(marks))
        )
        self._first = Arguments.split(given.args, given.kwargs).on(mesh)
        bytes_ = sum(x.nbytes for x in jax.tree.leaves(first))
        self.together = int(np.clip(BYTES // max(bytes_, 1), 1, TOGETHER))

    def arguments(self, batch: Any) -> Arguments:
        """Return the model's arguments with a batch."""

        def rows(x: np.ndarray) -> Array:
            if self.mesh is None:
                return jax.device_put(x)
            return rows_placed(x, self.mesh, 0)

        return self._filled([batch], lambda parts: rows(*parts))

    def _filled(self, batches: list[Any], rows: Callable[[Any], Any]) -> Arguments:
        """Return the model's arguments with batches.

        :param batches: one or more.
        :param rows: returns an argument from its parts, one in each batch.
        """
        trees = [self._given.at(batch) for batch in batches]
        leaves = [Arguments.select_arrays(x, jax.tree.leaves(x)) for x in trees]
        first, of_batches = self._first, self._of_batches
        each = zip(first.arrays, of_batches, *leaves, strict=True)
        arrays = tuple(rows(parts) if of else array for array, of, *parts in each)
        return Arguments(arrays, first.static)

    def stacked(self, batches: list[Any], places: int) -> Stacked:
        """Return arguments with stacked batches.

        :param batches: one or more.
        :param places: the length of the stack, filled up with the first batch.
        """
        filled = [*batches, *batches[:1] * (places - len(batches))]
        stacked = self._filled(
            filled, lambda parts: rows_placed(np.stack(parts), self.mesh, 1)
        )
        return Stacked(stacked, self._of_batches)

    def from_batch(self, number: int) -> Iterator[Any]:
        """Yield batches without end.

        :param number: the number of the first batch, counted over epochs.
        """
        epoch, start = divmod(number, len(self.batches))
        while True:
            yield from self._checked(
                self.batches.epoch(epoch, start), f"of epoch {epoch}", start
            )
            epoch, start = epoch + 1, 0

    def blocks(self) -> Iterator[Any]:
        """Yield all rows once."""
        blocks: Any = self._checked(self.batches.blocks(), "of a pass", 0)
        # Processes wait for each other, so they do so for several blocks at once.
        number = self.together if spans_processes(self.mesh) else 1
        with closing(blocks):
            while some := self.some(blocks, number):
                yield from some

    def some(self, batches: Iterator[Any], number: int) -> list[Any]:
        """Return the next batches.

        :param batches: from :meth:`from_batch`.
        :param number: the number of batches.
        :raises Exception: if they could not be read, in this or another process.
        """
        with all_or_none(self.mesh):
            return list(islice(batches, number))

    def _checked(
        self, batches: Iterator[Any], of_what: str, number: int
    ) -> Iterator[Any]:
        """Yield checked batches; an error names the batch.

        :param of_what: the name of a batch in errors.
        :param number: the number of the first batch.
        """
        # A generator, because its thread can be stopped; it is closed with this one.
        ahead: Any = prefetch(batches, self.batches.ahead, self.batches.timeout)
        with closing(ahead):
            while True:
                try:
                    batch = next(ahead, None)
                    if batch is None:
                        return
                    self._check(batch)
                except Exception as error:
                    error.add_note(f"batch {number} {of_what}")
                    raise
                number += 1
                yield batch

    @one_thread
    def _check(self, batch: Any) -> None:
        check_batch(batch, self.batches.first, self.batches.size)
        # The first batch has passed all other checks.
        if not are_moderate(jax.tree.leaves(batch)):
            check_arguments(self._model, *self._given.at(batch))

    @one_thread
    def explain(self, batch: Any, which: str) -> None:
        """Raise for a batch with invalid observations.

        :param batch: the batch.
        :param which: its name in errors.
        """
        try:
            check_observations(self._model, self._structure, self.arguments(batch))
        except ValueError as error:
            error.add_note(which)
            raise


class Minibatches(Feed):
    """Steps that use one batch each.

    :param programs: the :class:`~numpyro_gpaug.infer.vi.programs.Programs` of the fit.
    :param plan: the plan of the fit at one batch.
    :param reader: the reader of the batches.
    :param data: fingerprint of the first batch.
    """

    def __init__(
        self, programs: Any, plan: Plan, reader: Reader, data: np.uint32
    ) -> None:
        self._reader, self._plan, self._data = reader, plan, data
        self.mesh = reader.mesh
        # Batches are checked by another thread, which waits at most for these calls.
        self._advance = one_thread(programs.advance_batches)
        self._bounds_of = one_thread(programs.bounds)
        first = reader.batches.first
        self.size = sum(x.size for x in jax.tree.leaves(first))
        self._coming: Any = None
        self._next = -1
        self._compared: Stacked | None = None

    def steps(self, state: ConjugateState, wanted: int, tol: np.ndarray) -> Steps:
        """Take so many steps."""
        here = int(state.step)
        if here != self._next:
            self.close()
            self._coming = self._reader.from_batch(here)
        self._next = here + wanted
        found, taken = [], []
        while wanted:
            number = min(wanted, self._reader.together)
            batches = self._reader.some(self._coming, number)
            stacked = self._reader.stacked(batches, self._reader.together)
            with on_mesh(self.mesh):
                state, losses, valid = self._advance(
                    state, np.int32(number), self._data, stacked, plan=self._plan
                )
            found.append((losses, valid, number))
            taken += batches
            wanted -= number
        # Read at the end only, so that steps do not wait.
        losses, valid = (
            np.concatenate([np.asarray(each[k])[: each[2]] for each in found])
            for k in (0, 1)
        )
        for i in np.flatnonzero(~valid):
            epoch, number = divmod(here + int(i), len(self._reader.batches))
            self._reader.explain(taken[i], f"batch {number} of epoch {epoch}")
        return Steps(state, losses)

    def bounds(self, state: ConjugateState) -> Array:
        """Return the bounds of a state on the first batches of the data, and of further
        epochs if there are few batches."""
        if self._compared is None:
            batches: Any = self._reader.from_batch(0)
            with closing(batches):
                first = self._reader.some(batches, BATCHES)
            self._compared = self._reader.stacked(first, BATCHES)
        with on_mesh(self.mesh):
            return self._bounds_of(state, self._compared, plan=self._plan)

    def close(self) -> None:
        """Stop the thread that reads."""
        if self._coming is not None:
            self._coming.close()
