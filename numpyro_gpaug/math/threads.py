# SPDX-License-Identifier: Apache-2.0
"""The number of threads of BLAS."""

from __future__ import annotations

import threading
from collections.abc import Iterator
from contextlib import contextmanager
from functools import cache
from typing import Any

from threadpoolctl import ThreadpoolController

# The number of rows from which a second thread makes a Cholesky factorisation faster.
# With fewer rows, threads that share their cores with other processes wait for each
# other by spinning, for ten to a hundred times as long as the work takes.
LARGE = 400


class _OneThread:
    """A context in which BLAS has one thread. The limit applies to the whole process,
    and ends when the last user leaves."""

    def __init__(self) -> None:
        self._lock, self._inside = threading.Lock(), 0
        self._limit: Any = None

    def __enter__(self) -> None:
        with self._lock:
            if not self._inside:
                self._limit = _blas().limit(limits=1)
            self._inside += 1

    def __exit__(self, *_: object) -> None:
        with self._lock:
            self._inside -= 1
            if not self._inside:
                self._limit.restore_original_limits()


_one_thread = _OneThread()


@cache
def _blas() -> ThreadpoolController:
    # JAX calls the BLAS of SciPy. Libraries are searched once, among those that are
    # loaded.
    import scipy.linalg  # noqa: F401

    return ThreadpoolController().select(user_api="blas")


@contextmanager
def threads_for(size: int) -> Iterator[None]:
    """Limit BLAS in the whole process to one thread inside, if matrices are small.

    :param size: rows of the matrices that are factorised.
    """
    if size >= LARGE:
        yield
        return
    with _one_thread:
        yield
