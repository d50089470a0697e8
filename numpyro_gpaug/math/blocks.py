# SPDX-License-Identifier: Apache-2.0
"""Very many rows in blocks, one after the other, so that what is made of them on the
way to a result, and is many times as large, is of one block at a time."""

from __future__ import annotations

import math
from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp
from jax import Array, lax

# In bytes. A loop takes longer to compile: up to the first everything is whole.
WHOLE = 2**25
# Blocks are fastest where they stay in a processor's cache. Accelerators take longer to
# start small ones than to compute them.
BLOCK, BLOCK_OF_ACCELERATORS = 2**21, 2**25


def rows_of_blocks(rows: int, each: int, dtype: Any, least: int = 1) -> int | None:
    """How many rows a block has; ``None`` where they are better taken at once.

    :param rows: in all.
    :param each: numbers that are made of each row.
    :param dtype: of these numbers.
    :param least: that a block has, rather than be small.
    """
    size = each * jnp.dtype(dtype).itemsize
    on_cpu = jax.default_backend() == "cpu"
    block = max((BLOCK if on_cpu else BLOCK_OF_ACCELERATORS) // size, least)
    return None if rows * size <= WHOLE or rows <= block else block


def cut_rows(values: Array, size: int, filled: str = "edge") -> Array:
    """Rows in blocks, (blocks, size, ...).

    :param values: rows first.
    :param size: of a block.
    :param filled: how the last one is, a mode of ``jnp.pad``.
    """
    blocks = -(-len(values) // size)
    missing = [(0, blocks * size - len(values))] + [(0, 0)] * (values.ndim - 1)
    return jnp.pad(values, missing, filled).reshape(blocks, size, *values.shape[1:])


def over_blocks(function: Callable[[Any], Any], blocks: Any, rows: int) -> Any:
    """A function of rows, one block after the other.

    :param function: from a block to arrays, rows first.
    :param blocks: a pytree with a leading axis over blocks.
    :param rows: their number, without those that fill the last block.
    """
    found = lax.map(remade(function), blocks)
    return jax.tree.map(lambda x: x.reshape(-1, *x.shape[2:])[:rows], found)


def by_elements(
    function: Callable[..., Any], *arrays: Array, each: int, dtype: Any
) -> Any:
    """An elementwise function, in blocks of elements if they are very many.

    :param function: of arrays of one shape, to a pytree of such.
    :param arrays: broadcast against each other.
    :param each: numbers that it makes of an element at once.
    :param dtype: of these numbers.
    """
    shape = jnp.broadcast_shapes(*(jnp.shape(x) for x in arrays))
    rows = math.prod(shape)
    size = rows_of_blocks(rows, each, dtype)
    if size is None:
        return function(*arrays)
    cut = [cut_rows(jnp.broadcast_to(x, shape).ravel(), size) for x in arrays]
    found = over_blocks(lambda block: function(*block), cut, rows)
    return jax.tree.map(lambda x: x.reshape(shape), found)


def remade(function: Callable[..., Any]) -> Callable[..., Any]:
    """A loop's body that is run again for its derivative, instead of keeping what is
    in between of all blocks."""
    # In a loop nothing can be taken for the same as in another.
    return jax.checkpoint(function, prevent_cse=False)
