# SPDX-License-Identifier: Apache-2.0
"""Loops over blocks of very many rows. Intermediate arrays, which are many times as
large as the rows, then exist for one block at a time."""

from __future__ import annotations

import math
from collections.abc import Callable
from functools import partial
from typing import Any

import jax
import jax.numpy as jnp
from jax import Array, lax

from numpyro_gpaug.math.sharding import (
    latent_parts,
    parts_on_devices,
    rows_on_devices,
    shards,
)

# In bytes. Up to this size there is one block, because loops take longer to compile.
WHOLE = 2**25
# Blocks that stay in a processor's cache are fastest. Accelerators take longer to start
# small blocks than to compute them.
BLOCK, BLOCK_OF_ACCELERATORS = 2**21, 2**25
# The number of arrays that an elementwise function holds at once and that must fit into
# the cache. Sums over the nodes of a logistic then take 25 ns per element, and four
# times as long otherwise.
_AT_ONCE = 16


def rows_of_blocks(
    rows: int, each: int, dtype: Any, least: int = 1, passes: int = 1
) -> int | None:
    """Return the number of rows in a block; ``None`` if one block should take all rows.

    :param rows: the total number of rows.
    :param each: how many numbers are computed from each row.
    :param dtype: the dtype of these numbers.
    :param least: the smallest number of rows of a block.
    :param passes: how often these numbers are read: the more often, the sooner a loop
        over blocks in a processor's cache pays.
    """
    size = each * jnp.dtype(dtype).itemsize
    on_cpu = jax.default_backend() == "cpu"
    parts = _parts(rows)
    block = max((BLOCK if on_cpu else BLOCK_OF_ACCELERATORS) // size, least)
    of_one = rows // parts
    return None if of_one * size * passes <= WHOLE or of_one <= block else parts * block


def cut_rows(values: Array, size: int, filled: str = "edge") -> Array:
    """Return rows in blocks, (blocks, devices, rows, ...). If the rows are on several
    devices, a block has equally many of each device, so that no row moves.

    :param values: an array, rows first.
    :param size: number of rows of a block, over all devices.
    :param filled: how the last block is padded: by its last row (``"edge"``), or by
        zeros.
    """
    parts, shape = _parts(len(values)), values.shape[1:]
    of_one, each = len(values) // parts, size // parts
    blocks = -(-of_one // each)
    apart = parts_on_devices(values.reshape(parts, of_one, *shape))
    last = apart[:, -1:]
    last = parts_on_devices(last if filled == "edge" else jnp.zeros_like(last))
    missing = (parts, blocks * each - of_one, *shape)
    cut = parts_on_devices(jnp.concatenate([apart, jnp.broadcast_to(last, missing)], 1))
    return jnp.moveaxis(cut.reshape(parts, blocks, each, *shape), 1, 0)


def over_blocks(function: Callable[[Any], Any], blocks: Any, rows: int) -> Any:
    """Apply a function to rows, one block after the other.

    :param function: a function from rows of a block on one device to arrays, rows
        first.
    :param blocks: a pytree of arrays from :func:`cut_rows`.
    :param rows: the number of rows, without padding of the last block.
    """
    return _joined(lax.map(remade(_on_devices(function, blocks)), blocks), rows)


def kept_blocks(function: Callable[[Any], Any], blocks: Any) -> Any:
    """Apply a function to every block, for loops over the same blocks.

    :param function: a function of rows of a block on one device.
    :param blocks: a pytree of arrays from :func:`cut_rows`.
    """
    return lax.map(_on_devices(function, blocks), blocks)


def summed_blocks(add: Callable[[Any, Any], Any], none: Any, blocks: Any) -> Any:
    """Return a sum over rows, one block after the other. Each device has its own sum
    until the last block; a common sum would move between devices with every block.

    :param add: a function from a sum, and rows of a block on one device, to the sum
        with these rows.
    :param none: the sum of no rows.
    :param blocks: a pytree of arrays from :func:`cut_rows`.
    """
    parts = _devices(blocks)
    none = jax.tree.map(
        lambda x: parts_on_devices(jnp.broadcast_to(x, (parts, *x.shape))), none
    )
    like = jax.tree.map(lambda x: x[None], none)
    added = _on_devices(lambda given: add(*given), (like, blocks))

    def body(total: Any, block: Any) -> tuple[Any, None]:
        return added((total, block)), None

    total = lax.scan(body, none, blocks)[0]
    return jax.tree.map(lambda x: x.sum(0), total)


def summed(function: Callable[[Any], Any], parts: Any) -> Any:
    """Return the sum of a function over the first axis of arrays, one part after the
    other.

    :param function: a function of one part, which returns a tree of floats.
    :param parts: a tree of arrays.
    """

    def add(total: Any, part: Any) -> tuple[Any, None]:
        return jax.tree.map(jnp.add, total, function(part)), None

    like = jax.eval_shape(lambda: function(jax.tree.map(lambda x: x[0], parts)))
    return lax.scan(add, jax.tree.map(jnp.zeros_like, like), parts)[0]


def _on_devices(function: Callable[[Any], Any], blocks: Any) -> Callable[[Any], Any]:
    """Return a function of a block, whose arrays have a leading axis over devices, from
    a function of one device's part of it.

    With several devices each has its own copy of all arrays that the function closes
    over. The derivative, which is a sum over rows, is then added up in a loop over
    blocks on each device. The derivative of a common copy would move between devices
    with every block.
    """
    parts = _devices(blocks)
    if parts == 1:

        def alone(block: Any) -> Any:
            found = function(jax.tree.map(lambda x: x[0], block))
            return jax.tree.map(lambda x: x[None], found)

        return alone

    like = jax.eval_shape(partial(jax.tree.map, lambda x: x[0, 0]), blocks)
    of_part, common = jax.closure_convert(function, like)
    own = [parts_on_devices(jnp.broadcast_to(x, (parts, *x.shape))) for x in common]

    def together(block: Any) -> Any:
        found = jax.vmap(of_part)(jax.tree.map(parts_on_devices, block), *own)
        return jax.tree.map(parts_on_devices, found)

    return together


def _joined(blocks: Any, rows: int) -> Any:
    """Return rows of blocks one after the other; the inverse of :func:`cut_rows`."""

    def whole(x: Array) -> Array:
        parts, shape = x.shape[1], x.shape[3:]
        apart = parts_on_devices(jnp.moveaxis(x, 1, 0).reshape(parts, -1, *shape))
        return apart[:, : rows // parts].reshape(rows, *shape)

    return jax.tree.map(whole, blocks)


def _devices(blocks: Any) -> int:
    return jax.tree.leaves(blocks)[0].shape[1]


def by_elements(
    function: Callable[..., Any], *arrays: Array, each: int, dtype: Any
) -> Any:
    """Apply an elementwise function to arrays of one axis, in blocks of elements if
    they are very many.

    The arrays have one axis, because XLA's CPU compiler makes slow loops of sums over
    the nodes of a rule if there are further axes, even an axis over a single latent:
    with it a step took twice as long (``examples/benchmarks/elements.py``).

    :param function: a function of arrays of one shape, to a pytree of such arrays.
        Everything that it closes over is constant.
    :param arrays: arrays that are broadcast against each other.
    :param each: how many numbers it computes from an element at once.
    :param dtype: the dtype of these numbers.
    """
    # It is unknown here which axis is over latents. Blocks across it would move all
    # values between devices.
    if latent_parts(0) > 1:
        return function(*arrays)
    shape = jnp.broadcast_shapes(*(jnp.shape(x) for x in arrays))
    rows = math.prod(shape)
    # Rows are the last axis. In C order the rows of one device stay together.
    order = "C" if _parts(rows) == 1 else "F"
    flat = [rows_on_devices(jnp.broadcast_to(x, shape).ravel(order)) for x in arrays]
    held = _AT_ONCE if jax.default_backend() == "cpu" else 1
    size = rows_of_blocks(rows, each * held, dtype)

    def of_devices(block: Any) -> Any:
        parts = len(block[0])
        found = function(*(rows_on_devices(x.ravel()) for x in block))
        return jax.tree.map(lambda x: parts_on_devices(x.reshape(parts, -1)), found)

    if size is None:
        found = function(*flat)
    else:
        cut = [cut_rows(x, size) for x in flat]
        found = _joined(lax.map(remade(of_devices), cut), rows)
    return jax.tree.map(lambda x: x.reshape(shape, order=order), found)


def _parts(rows: int) -> int:
    """Return the number of devices that share the rows; 1 if they cannot have equally
    many."""
    parts = shards()
    return 1 if rows % parts else parts


def remade(function: Callable[..., Any]) -> Callable[..., Any]:
    """Return a loop's body that is run again for its derivative. Intermediate arrays of
    all blocks are then not stored."""
    # In a loop, the compiler cannot share subexpressions with other code.
    return jax.checkpoint(function, prevent_cse=False)
