# SPDX-License-Identifier: Apache-2.0
"""Threads of BLAS."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager

from threadpoolctl import threadpool_limits

# Rows from which a second thread saves any of the time of a Cholesky factorisation. Of
# fewer, threads that share their cores with others wait for each other by spinning: a
# hundred times as long as the work takes.
LARGE = 400


@contextmanager
def threads_for(size: int) -> Iterator[None]:
    """One thread for small matrices inside, of BLAS in the whole process.

    :param size: rows of the matrices that are factorised.
    """
    if size >= LARGE:
        yield
        return
    with threadpool_limits(1, user_api="blas"):
        yield
