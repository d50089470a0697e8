# SPDX-License-Identifier: Apache-2.0
"""Agreement of several processes that run the same program. If one of them took another
branch, the others would wait for it for ever."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from typing import Any

import numpy as np
from jax.experimental import multihost_utils
from jax.sharding import Mesh

# The number of characters of the messages between processes.
_LONGEST = 4096


def spans_processes(mesh: Mesh | None) -> bool:
    """Whether the devices of a mesh are in several processes."""
    return mesh is not None and len({x.process_index for x in mesh.devices.flat}) > 1


def text_of_every_process(held: Any) -> list[str]:
    """Gather the state of every process, by process.

    :param held: the state, which prints alike exactly if it is alike.
    """
    text = str(held).encode()[:_LONGEST].ljust(_LONGEST)
    everywhere = multihost_utils.process_allgather(np.frombuffer(text, np.uint8))
    rows = everywhere.reshape(-1, _LONGEST)
    return [bytes(row).decode(errors="ignore").strip() for row in rows]


def minimum_over_processes(numbers: Sequence[int]) -> list[int]:
    """Return the minimum over processes, for each of some numbers."""
    everywhere = multihost_utils.process_allgather(np.array(numbers, np.int32))
    return everywhere.reshape(-1, len(numbers)).min(0).tolist()


@contextmanager
def all_or_none(mesh: Mesh | None) -> Iterator[None]:
    """Raise in all processes if any process fails inside, in work that each does for
    itself before a fit, such as opening its files. Otherwise the others would wait for
    a process that has ended. Runs use it around their own reading, and callbacks.

    All processes have to enter, and wait for the last one at the end.

    :param mesh: the mesh of the devices that they share. Nothing is waited for if its
        devices are in one process, or it is ``None``.
    :raises RuntimeError: in processes that did not fail, with the errors of the others.

    **Example** Each process reads a file of its own:

    >>> import jax, numpy as np, numpyro_gpaug as gpaug
    >>> def rows_of(process):
    ...     return np.zeros((60, 2), "float32"), np.zeros(60, "int32")
    >>> mesh = jax.make_mesh((jax.device_count(),), ("rows",))
    >>> with gpaug.infer.all_or_none(mesh):
    ...     batches = gpaug.Batches(rows_of(jax.process_index()), 10)
    >>> len(batches)
    6
    """
    error = None
    try:
        yield
    except Exception as found:
        error = found
    if spans_processes(mesh) and not minimum_over_processes([error is None])[0]:
        told = text_of_every_process("" if error is None else _described(error))
        if error is None:
            failed = [f"process {i} failed: {x}" for i, x in enumerate(told) if x]
            raise RuntimeError("; ".join(failed))
    if error is not None:
        raise error


def _described(error: Exception) -> str:
    where = ", ".join(getattr(error, "__notes__", ()))
    return f"{type(error).__name__}: {error}" + (f" ({where})" if where else "")
