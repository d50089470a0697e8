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
        self._before: list[tuple[Any, int]] = []

    def __enter__(self) -> None:
        with self._lock:
            if not self._inside:
                # Not threadpoolctl's ``limit``, which examines all libraries: that is
                # noticeable in a fit of a millisecond.
                self._before = [(pool, pool.num_threads) for pool in _pools()]
                for pool, number in self._before:
                    if number != 1:
                        pool.set_num_threads(1)
            self._inside += 1

    def __exit__(self, *_: object) -> None:
        with self._lock:
            self._inside -= 1
            if not self._inside:
                for pool, number in self._before:
                    if number != 1:
                        pool.set_num_threads(number)


_one_thread = _OneThread()


@cache
def _pools() -> list[Any]:
    # JAX calls the BLAS of SciPy. Pools are searched once, among the libraries that are
    # loaded.
    import scipy.linalg  # noqa: F401

    found = ThreadpoolController().lib_controllers
    return [pool for pool in found if pool.user_api == "blas"]


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
