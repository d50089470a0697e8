# SPDX-License-Identifier: Apache-2.0
"""Very many rows in blocks, one after the other, so that what is made of them on the
way to a result, and is many times as large, is of one block at a time."""

from __future__ import annotations

import math
from collections.abc import Callable
from functools import partial
from typing import Any

import jax
import jax.numpy as jnp
from jax import Array, lax

from numpyro_gpaug.math.sharding import (
    kept_apart,
    latent_parts,
    rows_apart,
    shards,
)

# In bytes. A loop takes longer to compile: up to the first everything is whole.
WHOLE = 2**25
# Blocks are fastest where they stay in a processor's cache. Accelerators take longer to
# start small ones than to compute them.
BLOCK, BLOCK_OF_ACCELERATORS = 2**21, 2**25
# Arrays of an elementwise function that a processor's cache has to hold at once: sums
# over the nodes of a logistic take 25 ns an element then, and four times as long else.
_AT_ONCE = 16


def rows_of_blocks(rows: int, each: int, dtype: Any, least: int = 1) -> int | None:
    """Return the number of rows in a block; ``None`` if all rows are better taken at
    once.

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
    """Rows in blocks, (blocks, devices, rows, ...): of rows on several devices a block
    has as many of each, so that none has to move.

    :param values: rows first.
    :param size: of a block, of all devices.
    :param filled: how the last one is: by its last row (``"edge"``), or by zeros.
    """
    parts, shape = _parts(len(values)), values.shape[1:]
    of_one, each = len(values) // parts, size // parts
    blocks = -(-of_one // each)
    apart = kept_apart(values.reshape(parts, of_one, *shape))
    last = apart[:, -1:]
    last = kept_apart(last if filled == "edge" else jnp.zeros_like(last))
    missing = (parts, blocks * each - of_one, *shape)
    cut = kept_apart(jnp.concatenate([apart, jnp.broadcast_to(last, missing)], 1))
    return jnp.moveaxis(cut.reshape(parts, blocks, each, *shape), 1, 0)


def over_blocks(function: Callable[[Any], Any], blocks: Any, rows: int) -> Any:
    """A function of rows, one block after the other.

    :param function: from rows of a block on one device to arrays, rows first.
    :param blocks: a pytree of arrays as :func:`cut_rows` cuts them.
    :param rows: their number, without those that fill the last block.
    """
    return _joined(lax.map(remade(_on_devices(function, blocks)), blocks), rows)


def kept_blocks(function: Callable[[Any], Any], blocks: Any) -> Any:
    """Apply a function to every block, for loops over the same blocks.

    :param function: of rows of a block on one device.
    :param blocks: as :func:`cut_rows` cuts them.
    """
    return lax.map(_on_devices(function, blocks), blocks)


def summed_blocks(add: Callable[[Any, Any], Any], none: Any, blocks: Any) -> Any:
    """A sum over rows, one block after the other: each device has its own until the
    last, or it would go between devices with every block.

    :param add: from a sum, and rows of a block on one device, to the sum with these.
    :param none: the sum of no rows.
    :param blocks: as :func:`cut_rows` cuts them.
    """
    parts = _devices(blocks)
    none = jax.tree.map(
        lambda x: kept_apart(jnp.broadcast_to(x, (parts, *x.shape))), none
    )
    like = jax.tree.map(lambda x: x[None], none)
    added = _on_devices(lambda given: add(*given), (like, blocks))

    def body(total: Any, block: Any) -> tuple[Any, None]:
        return added((total, block)), None

    total = lax.scan(body, none, blocks)[0]
    return jax.tree.map(lambda x: x.sum(0), total)


def _on_devices(function: Callable[[Any], Any], blocks: Any) -> Callable[[Any], Any]:
    """A function of a block, whose arrays have a leading axis over devices, from one of
    what one device holds of it.

    On several devices each has a copy of its own of all that the function closes over,
    so that its derivative, which is a sum over rows, is added up in a loop over blocks
    on each device: that of a common one would go between devices with every block.
    """
    parts = _devices(blocks)
    if parts == 1:

        def alone(block: Any) -> Any:
            found = function(jax.tree.map(lambda x: x[0], block))
            return jax.tree.map(lambda x: x[None], found)

        return alone

    like = jax.eval_shape(partial(jax.tree.map, lambda x: x[0, 0]), blocks)
    of_part, common = jax.closure_convert(function, like)
    own = [kept_apart(jnp.broadcast_to(x, (parts, *x.shape))) for x in common]

    def together(block: Any) -> Any:
        found = jax.vmap(of_part)(jax.tree.map(kept_apart, block), *own)
        return jax.tree.map(kept_apart, found)

    return together


def _joined(blocks: Any, rows: int) -> Any:
    """Rows of blocks one after the other again: undoes :func:`cut_rows`."""

    def whole(x: Array) -> Array:
        parts, shape = x.shape[1], x.shape[3:]
        apart = kept_apart(jnp.moveaxis(x, 1, 0).reshape(parts, -1, *shape))
        return apart[:, : rows // parts].reshape(rows, *shape)

    return jax.tree.map(whole, blocks)


def _devices(blocks: Any) -> int:
    return jax.tree.leaves(blocks)[0].shape[1]


def by_elements(
    function: Callable[..., Any], *arrays: Array, each: int, dtype: Any
) -> Any:
    """An elementwise function of arrays of one axis, in blocks of elements if they are
    very many.

    Of one axis, because XLA's CPU compiler makes slow loops of sums over the nodes of a
    rule if there are others, one of a single latent among them: with it a step took
    twice as long (``examples/benchmarks/elements.py``).

    :param function: of arrays of one shape, to a pytree of such; what it closes over is
        constant.
    :param arrays: broadcast against each other.
    :param each: numbers that it makes of an element at once.
    :param dtype: of these numbers.
    """
    # Which axis is over latents is not known here: cut across it, all would move.
    if latent_parts(0) > 1:
        return function(*arrays)
    shape = jnp.broadcast_shapes(*(jnp.shape(x) for x in arrays))
    rows = math.prod(shape)
    # Rows are last. Those of one device stay together if they come first.
    order = "C" if _parts(rows) == 1 else "F"
    flat = [rows_apart(jnp.broadcast_to(x, shape).ravel(order)) for x in arrays]
    held = _AT_ONCE if jax.default_backend() == "cpu" else 1
    size = rows_of_blocks(rows, each * held, dtype)

    def of_devices(block: Any) -> Any:
        parts = len(block[0])
        found = function(*(rows_apart(x.ravel()) for x in block))
        return jax.tree.map(lambda x: kept_apart(x.reshape(parts, -1)), found)

    if size is None:
        found = function(*flat)
    else:
        cut = [cut_rows(x, size) for x in flat]
        found = _joined(lax.map(remade(of_devices), cut), rows)
    return jax.tree.map(lambda x: x.reshape(shape, order=order), found)


def _parts(rows: int) -> int:
    """Devices that rows are shared out among; 1 if they cannot have as many each."""
    parts = shards()
    return 1 if rows % parts else parts


def remade(function: Callable[..., Any]) -> Callable[..., Any]:
    """A loop's body that is run again for its derivative, instead of keeping what is
    in between of all blocks."""
    # In a loop nothing can be taken for the same as in another.
    return jax.checkpoint(function, prevent_cse=False)
