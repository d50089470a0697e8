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

from numpyro_gpaug.math.sharding import kept_apart, latent_parts, shards

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
    parts = _parts(rows)
    block = max((BLOCK if on_cpu else BLOCK_OF_ACCELERATORS) // size, least)
    of_one = rows // parts
    return None if of_one * size <= WHOLE or of_one <= block else parts * block


def cut_rows(values: Array, size: int, filled: str = "edge") -> Array:
    """Rows in blocks, (blocks, size, ...). Of rows on several devices a block has as
    many of each, so that none has to move.

    :param values: rows first.
    :param size: of a block.
    :param filled: how the last one is, a mode of ``jnp.pad``.
    """
    parts, shape = _parts(len(values)), values.shape[1:]
    of_one, each = len(values) // parts, size // parts
    blocks = -(-of_one // each)
    missing = [(0, 0), (0, blocks * each - of_one)] + [(0, 0)] * len(shape)
    apart = kept_apart(values.reshape(parts, of_one, *shape))
    cut = kept_apart(jnp.pad(apart, missing, filled))
    cut = jnp.moveaxis(cut.reshape(parts, blocks, each, *shape), 1, 0)
    return cut.reshape(blocks, size, *shape)


def over_blocks(function: Callable[[Any], Any], blocks: Any, rows: int) -> Any:
    """A function of rows, one block after the other.

    :param function: from a block to arrays, rows first.
    :param blocks: a pytree with a leading axis over blocks.
    :param rows: their number, without those that fill the last block.
    """
    parts = _parts(rows)

    def whole(x: Array) -> Array:
        count, size, *shape = x.shape
        apart = jnp.moveaxis(x.reshape(count, parts, size // parts, *shape), 1, 0)
        each = kept_apart(apart.reshape(parts, -1, *shape))[:, : rows // parts]
        return each.reshape(rows, *shape)

    return jax.tree.map(whole, lax.map(remade(function), blocks))


def by_devices(function: Callable[..., Any], arrays: Any, rows: int) -> Any:
    """What a sum over the rows of a block is on each device, with a leading axis over
    them: summed in a loop over blocks, it would go between devices with every one.

    :param function: of arrays with their rows last, to arrays without.
    :param arrays: these, as :func:`cut_rows` cuts them.
    :param rows: their number in all blocks.
    """
    parts = _parts(rows)
    if parts == 1:
        return jax.tree.map(lambda x: x[None], function(*arrays))

    def split(x: Array) -> Array:
        apart = x.reshape(*x.shape[:-1], parts, x.shape[-1] // parts)
        return kept_apart(jnp.moveaxis(apart, -2, 0))

    found = jax.vmap(function)(*jax.tree.map(split, arrays))
    return jax.tree.map(kept_apart, found)


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
    # Which axis is over latents is not known here: cut across it, all would move.
    if size is None or latent_parts(0) > 1:
        return function(*arrays)
    # Rows are last. Those of one device stay together if they come first.
    cut = [cut_rows(jnp.broadcast_to(x, shape).T.ravel(), size) for x in arrays]
    found = over_blocks(lambda block: function(*block), cut, rows)
    return jax.tree.map(lambda x: x.reshape(shape[::-1]).T, found)


def _parts(rows: int) -> int:
    """Devices that rows are shared out among; 1 if they cannot have as many each."""
    parts = shards()
    return 1 if rows % parts else parts


def remade(function: Callable[..., Any]) -> Callable[..., Any]:
    """A loop's body that is run again for its derivative, instead of keeping what is
    in between of all blocks."""
    # In a loop nothing can be taken for the same as in another.
    return jax.checkpoint(function, prevent_cse=False)
