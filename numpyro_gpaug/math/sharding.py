# SPDX-License-Identifier: Apache-2.0
"""Rows, and latents, on several devices.

Every computation here is a sum over data. If the rows of arrays are divided among
devices, only sums of the size of the latents have to move between these. JAX's
partitioner finds this plan by itself, given the placement of the rows and no operation
that mixes rows of different devices.
"""

from __future__ import annotations

import contextlib
import math
from collections.abc import Callable, Iterable
from functools import partial
from typing import Any

import jax
import numpy as np
from jax import Array
from jax.sharding import AxisType, Mesh, NamedSharding, PartitionSpec, Sharding

from numpyro_gpaug.math.arrays import is_traced
from numpyro_gpaug.math.processes import text_of_every_process

# The axes of a mesh over which rows and latents are divided.
ROWS, LATENTS = "rows", "latents"


def shards() -> int:
    """Return the number of parts of the rows inside of :func:`on_mesh`; 1 elsewhere."""
    return dict(jax.sharding.get_abstract_mesh().shape).get(ROWS, 1)


def parts_on_devices(parts: Array) -> Array:
    """Return an array whose first axis is over the parts of :func:`shards`, constrained
    to stay on its devices, as is its derivative."""
    if parts.shape[0] == 1:
        return parts
    return _constrained(parts, ROWS, 0)


def rows_on_devices(rows: Array) -> Array:
    """Return an array whose first axis is over rows, with each part of :func:`shards`
    on its device, if the parts have equally many rows."""
    parts = shards()
    return rows if parts == 1 or len(rows) % parts else _constrained(rows, ROWS, 0)


def latent_parts(count: int) -> int:
    """Return the number of parts of a stack over latents inside of :func:`on_mesh`. It
    is 1 if every device has the whole stack, and inside of :func:`by_latents`.

    :param count: the number of latents.
    """
    mesh = jax.sharding.get_abstract_mesh()
    parts = dict(mesh.shape).get(LATENTS, 1)
    return 1 if count % parts or LATENTS in mesh.manual_axes else parts


def by_latents(function: Callable[..., Any], count: int) -> Callable[..., Any]:
    """Return a function of stacks over latents with which each device computes its own
    part. The function must treat all latents alike. For a loop over latents the
    partitioner would gather them.

    :param function: a function of arrays whose first axis is over the latents.
    :param count: the number of latents.
    """
    if latent_parts(count) == 1:
        return function
    spec = PartitionSpec(LATENTS)
    return jax.shard_map(function, in_specs=spec, out_specs=spec, axis_names={LATENTS})


def mesh_of_latents(tree: Any) -> Mesh | None:
    """Return the mesh that divides some array's first axis, over latents.

    :param tree: a pytree of arrays.
    """
    for leaf in jax.tree.leaves(tree):
        sharding = None if is_traced(leaf) else getattr(leaf, "sharding", None)
        if isinstance(sharding, NamedSharding) and LATENTS in sharding.spec[:1]:
            devices: Any = sharding.mesh
            return rows_mesh(devices, ())
    return None


def latents_on_devices(tree: Any, axis: int = 0) -> Any:
    """Return arrays with an axis over latents, constrained to stay on their devices.

    :param tree: a pytree of such arrays.
    :param axis: the axis over latents.
    """

    def apart(array: Array) -> Array:
        if not array.ndim or latent_parts(array.shape[axis]) == 1:
            return array
        return _constrained(array, LATENTS, axis % array.ndim)

    return jax.tree.map(apart, tree)


def on_mesh(mesh: Mesh | None) -> contextlib.AbstractContextManager[Any]:
    """Trace and call inside programs whose rows are on a mesh."""
    return contextlib.nullcontext() if mesh is None else jax.set_mesh(mesh)


def rows_mesh(mesh: Mesh | None, arrays: Iterable[Any]) -> Mesh | None:
    """Return a mesh whose axes are named by their purpose: the given one, or the mesh
    of the first array on several devices.

    :param mesh: a mesh, whose axis ``"latents"`` divides latents, and whose first other
        axis divides rows; ``None`` to use the arrays' mesh.
    :param arrays: arrays. The first one with sharded rows counts, or else one on a mesh
        that has latents.
    :return: a mesh of axes ``"rows"``, ``"latents"`` and ``"copies"``, the last free
        for the partitioner to use; ``None`` if everything is on one device.
    :raises ValueError: for an array that is sharded along its columns but not its rows.
    """
    if mesh is not None:
        others = [name for name in mesh.axis_names if name != LATENTS]
        return _lined_up(mesh, others[:1])
    latents_alone: Any = None
    for array in arrays:
        sharding = None if is_traced(array) else getattr(array, "sharding", None)
        if not isinstance(sharding, NamedSharding):
            continue
        if sharding.is_fully_replicated:
            if dict(sharding.mesh.shape).get(LATENTS, 1) > 1:
                latents_alone = latents_alone or sharding.mesh
            continue
        first, *others = (*sharding.spec, None)
        if first is None or any(others):
            raise ValueError(
                f"an array of shape {array.shape} is sharded as {sharding.spec}. "
                "Rows can be sharded, columns cannot. Use PartitionSpec(axis) with "
                "the name of a mesh axis"
            )
        devices: Any = sharding.mesh
        return _lined_up(devices, (first,) if isinstance(first, str) else first)
    return None if latents_alone is None else rows_mesh(latents_alone, ())


def partitioned(tree: Any) -> Any:
    """Return the same arrays, with shardings that JAX's partitioner propagates.
    Shardings of meshes with explicit axes, the default of ``jax.make_mesh``, are types,
    which a model would have to state at every product.

    :param tree: arrays, and other leaves, which are unchanged.
    """

    def auto(leaf: Any) -> Any:
        sharding = None if is_traced(leaf) else getattr(leaf, "sharding", None)
        if not isinstance(sharding, NamedSharding):
            return leaf
        mesh = sharding.mesh
        if AxisType.Explicit not in mesh.axis_types:
            return leaf
        same = Mesh(mesh.devices, mesh.axis_names)
        return _renamed(leaf, NamedSharding(same, sharding.spec))

    return jax.tree.map(auto, tree)


def check_shards(tree: Any) -> None:
    """Raise in all processes if their parts do not match. Otherwise each would run a
    program of its own, and wait for the others for ever.

    :param tree: arrays, some of which may be shared among processes.
    :raises ValueError: naming the shapes and dtypes of all processes.
    """
    shared = [
        x
        for x in jax.tree.leaves(tree)
        if isinstance(x, jax.Array) and not is_traced(x) and not x.is_fully_addressable
    ]
    if not shared:
        return
    held = [(*x.addressable_shards[0].data.shape, str(x.dtype)) for x in shared]
    found = text_of_every_process(held)
    if len(set(found)) > 1 or any(0 in x.shape for x in shared):
        raise ValueError(
            "the processes have parts of unequal shapes or dtypes, or without "
            f"rows, by process: {found}. Each process must read equally many rows, "
            "with the same columns"
        )


def row_processes(mesh: Mesh) -> int:
    """Return the number of processes that rows are divided among; each reads its own
    rows.

    :param mesh: from :func:`rows_mesh`.
    :raises ValueError: for a mesh that has more devices of one process than of another,
        or copies of rows in several.
    """
    owners = np.vectorize(lambda device: device.process_index)(mesh.devices)
    owners = owners.reshape(mesh.shape[ROWS], -1)
    processes, parts = np.unique(owners[:, 0], return_counts=True)
    if (owners != owners[:, :1]).any() or len(set(parts)) > 1:
        raise ValueError(
            f"rows are divided among {mesh.shape[ROWS]} parts of the mesh, which "
            f"are in processes {owners.tolist()}. Each process must read rows of "
            "its own, as many as the others"
        )
    return len(processes)


def placed(array: Any, mesh: Mesh, rows: int) -> Array:
    """Return an array on a mesh: divided if it has this number of rows, otherwise
    copied.

    :param array: the array.
    :param mesh: from :func:`rows_mesh`.
    :param rows: the number of data.
    """
    if is_traced(array):
        return array
    whole = not array.ndim or len(array) != rows
    target = NamedSharding(mesh, PartitionSpec() if whole else PartitionSpec(ROWS))
    if getattr(array, "sharding", None) == target:
        return array
    if not getattr(array, "is_fully_addressable", True):
        return _renamed(array, target)
    try:
        return jax.device_put(array, target)
    except AssertionError as error:
        raise ValueError(
            f"an argument of shape {np.shape(array)} differs between processes. "
            "Compute arguments without rows, such as inducing inputs, in every "
            "process from data that all have"
        ) from error


def rows_placed(array: np.ndarray, mesh: Mesh | None, axis: int) -> Any:
    """Return an array whose rows, along some axis, are divided among the devices of a
    mesh.

    :param array: the rows that this process has read; every other has read as many.
    :param mesh: from :func:`rows_mesh`; ``None`` leaves the array unchanged.
    :param axis: the axis of the rows.
    """
    if mesh is None:
        return array
    by_row = NamedSharding(mesh, PartitionSpec(*[None] * axis, ROWS))
    return jax.make_array_from_process_local_data(by_row, array)


def of_this_process(array: Any) -> np.ndarray:
    """Return the part of an array in this process: all of it, unless several processes
    share the rows."""
    if not isinstance(array, jax.Array) or array.is_fully_addressable:
        return np.asarray(array)
    if array.is_fully_replicated:
        return np.asarray(array.addressable_data(0))
    parts = {str(s.index): np.asarray(s.data) for s in array.addressable_shards}
    return np.concatenate(list(parts.values()))


def total(holds: Callable[..., Any], array: Any, *how: Any) -> int:
    """Return the number of entries of an array that satisfy a condition, over all
    processes, which then come to the same conclusion.

    :param holds: the condition, from an array and the other arguments to as many
        booleans. It must be the same function in every call, since a program is
        compiled for it.
    :param array: the array.
    :param how: the other arguments.
    """
    if not isinstance(array, jax.Array) or array.is_fully_addressable:
        return int(np.sum(holds(np.asarray(array), *how)))
    return int(_total(holds, *partitioned([array]), *how))


@partial(jax.jit, static_argnums=0)
def _total(holds: Callable[..., Any], array: Array, *how: Any) -> Array:
    return holds(array, *how).sum()


def some_of_all(array: Any, most: int) -> np.ndarray:
    """Return rows of an array that is divided among processes; every process returns
    the same rows.

    :param array: the array. If this process has all of it, it is returned unchanged.
    :param most: the number of rows that are drawn, if there are more.
    """
    if not isinstance(array, jax.Array) or array.is_fully_addressable:
        return np.asarray(array)
    rows = np.arange(len(array))
    if len(rows) > most:
        drawn = np.random.default_rng(0).choice(len(rows), most, replace=False)
        rows = np.sort(drawn)
    check_shards(array)
    (array,) = partitioned([array])
    everywhere = NamedSharding(array.sharding.mesh, PartitionSpec())
    found = jax.jit(lambda x, i: x[i], out_shardings=everywhere)(array, rows)
    return np.asarray(found)


def _renamed(array: jax.Array, target: Sharding) -> Array:
    """Return a global array under an equivalent sharding; no number moves."""
    held = {s.device: s.data for s in array.addressable_shards}
    try:
        wanted = target.addressable_devices_indices_map(array.shape)
        same = array.sharding.is_equivalent_to(target, array.ndim)
        parts = [held[device] for device in wanted]
    except (KeyError, ValueError):
        same = False
    if not same:
        raise ValueError(
            f"an array of shape {array.shape} is sharded as {array.sharding} over "
            "several processes, and others are sharded differently. Shard rows "
            "alike, and copy everything else to every process"
        )
    return jax.make_array_from_single_device_arrays(array.shape, target, parts)


def _lined_up(mesh: Mesh, axes: Iterable[str]) -> Mesh:
    axes, names = tuple(axes), mesh.axis_names
    latents = [name for name in names if name == LATENTS and name not in axes]
    others = [name for name in names if name not in (*axes, *latents)]
    order = [names.index(name) for name in (*axes, *latents, *others)]
    sizes = [math.prod(mesh.shape[name] for name in some) for some in (axes, latents)]
    devices = np.transpose(mesh.devices, order).reshape(*sizes, -1)
    lines = np.moveaxis(devices, 1, -1).reshape(-1, sizes[1])
    if any(len({device.process_index for device in line}) > 1 for line in lines):
        raise ValueError(
            f"the mesh {mesh.shape} has latents in several processes. Divide rows "
            "among processes, and latents among the devices of each"
        )
    return Mesh(devices, (ROWS, LATENTS, "copies"), axis_types=(AxisType.Auto,) * 3)


def _constrained(array: Array, name: str, axis: int) -> Array:
    free: list[Any] = [PartitionSpec.UNCONSTRAINED] * array.ndim
    free[axis] = name
    return jax.lax.with_sharding_constraint(array, PartitionSpec(*free))
