# SPDX-License-Identifier: Apache-2.0
"""Threads of BLAS."""

from __future__ import annotations

import threading
from collections.abc import Iterator
from contextlib import ExitStack, contextmanager
from functools import cache

from threadpoolctl import ThreadpoolController

# Rows from which a second thread saves any of the time of a Cholesky factorisation. Of
# fewer, threads that share their cores with others wait for each other by spinning: ten
# to a hundred times as long as the work takes.
LARGE = 400


class _OneThread:
    """BLAS with one thread while anybody is inside: the limit is of the whole process,
    and whoever leaves last lifts it."""

    def __init__(self) -> None:
        self._lock, self._inside, self._limit = threading.Lock(), 0, ExitStack()

    def __enter__(self) -> None:
        with self._lock:
            if not self._inside:
                self._limit.enter_context(_pools().limit(limits=1, user_api="blas"))
            self._inside += 1

    def __exit__(self, *_: object) -> None:
        with self._lock:
            self._inside -= 1
            if not self._inside:
                self._limit.close()


_one_thread = _OneThread()


@cache
def _pools() -> ThreadpoolController:
    # Whose BLAS JAX calls: pools are found once, among the libraries that are loaded.
    import scipy.linalg  # noqa: F401

    return ThreadpoolController()


@contextmanager
def threads_for(size: int) -> Iterator[None]:
    """One thread for small matrices inside, of BLAS in the whole process.

    :param size: rows of the matrices that are factorised.
    """
    if size >= LARGE:
        yield
        return
    with _one_thread:
        yield
