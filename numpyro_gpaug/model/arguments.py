# SPDX-License-Identifier: Apache-2.0
"""The arguments of models, divided into arrays and static values."""

from __future__ import annotations

from collections.abc import Callable, Collection, Hashable, Iterable
from dataclasses import dataclass, field
from functools import cached_property
from numbers import Number
from typing import Any, NamedTuple

import jax
import numpy as np
from jax import Array
from jax.sharding import Mesh

from numpyro_gpaug.math.arrays import STATIC, as_arrays, held
from numpyro_gpaug.math.fingerprints import fingerprint
from numpyro_gpaug.math.sharding import ROWS, placed, rows_mesh
from numpyro_gpaug.model.columns import is_column

# A model, a guide, or a part of one; and values of sites and params by name.
Model = Callable[..., Any]
Values = dict[str, Any]


def is_array(leaf: Any) -> bool:
    """Whether an argument is traced; anything else is static."""
    return isinstance(leaf, np.ndarray | np.generic | jax.Array)


class Added(NamedTuple):
    """Rows added to arguments, with weight zero in the likelihood.

    :param size: the number of rows with them.
    :param which: arrays that have a row per datum.
    :param axes: by name, the axis over rows of deterministic sites that have one.
    """

    size: int
    which: frozenset[int]
    axes: tuple[tuple[str, int], ...] = ()


@jax.tree_util.register_dataclass
@dataclass(frozen=True)
class Arguments:
    """Model arguments split for ``jax.jit``: a pytree of arrays. The rest is static.

    :param arrays: the arrays. If some rows do not count, the last one is the number of
        rows that do (:meth:`with_rows`).
    :param static: the tree of the arguments, its other leaves, and the added rows if
        not all rows count.
    """

    arrays: tuple[Array, ...]
    static: tuple[Any, tuple[tuple[int, Hashable], ...], Added | None] = field(
        metadata=STATIC
    )

    @classmethod
    def split(cls, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Arguments:
        """Split positional and keyword arguments. If the rows of one array are sharded
        over devices, the rows of all are."""
        leaves, treedef = jax.tree.flatten((args, kwargs))
        arrays = held([x for x in leaves if is_array(x)])
        static = tuple((i, x) for i, x in enumerate(leaves) if not is_array(x))
        for _, x in static:
            if is_column(x):
                raise TypeError(
                    f"an argument of the model is a {type(x).__name__}, and arrays are "
                    "needed here: pass .to_numpy(), and codes of categories"
                )
        given = cls(arrays, (treedef, static, None))
        return given.on(given.mesh)

    def on(self, mesh: Mesh | None) -> Arguments:
        """Return the arguments with rows divided among devices and everything else
        copied.

        :param mesh: from :func:`~numpyro_gpaug.math.sharding.rows_mesh`; ``None``
            changes nothing.
        :raises ValueError: for rows that cannot be divided evenly.
        """
        if mesh is None:
            return self
        num, parts = self.num_rows, mesh.shape[ROWS]
        if num % parts:
            raise ValueError(
                f"{num} rows cannot be divided evenly among {parts} devices. A run "
                "on full data adds rows of weight zero only if this provably "
                "changes no fit, and here there is no proof. Leave out some rows, or "
                "add some under numpyro.handlers.mask"
            )
        arrays = tuple(placed(x, mesh, num) for x in self.arrays)
        return Arguments(arrays, self.static)

    @cached_property
    def mesh(self) -> Mesh | None:
        """The mesh over which rows are sharded."""
        return rows_mesh(None, self.arrays)

    @cached_property
    def data(self) -> np.uint32:
        """A fingerprint of these arrays."""
        return fingerprint(self.arrays)

    @property
    def num_rows(self) -> int:
        """The number of rows: the length of the first array. Arrays of this length have
        a row per datum."""
        return next((len(x) for x in self.arrays if x.ndim), 0)

    def with_rows(self, added: Added) -> Arguments:
        """Return the arguments with repeated rows, which do not count.

        :param added: the rows to add.
        """
        num = self.num_rows
        # In turn, so that the shares of rows with some property stay the same.
        whole = self.taken(added.which, np.arange(added.size) % num).arrays
        count: Any = np.int32(num)
        return Arguments((*whole, count), (*self.static[:2], added))

    def taken(self, which: Collection[int], rows: Any) -> Arguments:
        """Return the arguments with some of their rows.

        :param which: the arrays that have these rows.
        :param rows: indices of the rows, or a slice.
        """
        arrays: Any = (
            np.asarray(x)[rows] if i in which else x for i, x in enumerate(self.arrays)
        )
        return Arguments(tuple(arrays), self.static)

    def counted(self) -> Arguments:
        """Return the arguments without the rows that do not count."""
        added = self.static[-1]
        if added is None:
            return self
        return self.taken(added.which, slice(int(self.arrays[-1]))).counting_all()

    def counting_all(self) -> Arguments:
        """Return the same arguments, with all rows counting."""
        if self.static[-1] is None:
            return self
        return Arguments(self.arrays[:-1], (*self.static[:2], None))

    @cached_property
    def shapes(self) -> Hashable:
        """The properties that compiled programs depend on."""
        return tuple((x.shape, x.dtype) for x in self.arrays), self.static, self.mesh

    @property
    def choices(self) -> tuple[Hashable, ...]:
        """See :func:`choices_among`."""
        return choices_among(x for _, x in self.static[1])

    @staticmethod
    def select_arrays(tree: Any, items: list[Any]) -> list[Any]:
        """Select from ``items``, which has one item per leaf of ``tree``, the items of
        array leaves."""
        leaves = jax.tree.leaves(tree)
        return [item for x, item in zip(leaves, items, strict=True) if is_array(x)]

    def merge(self) -> tuple[tuple[Any, ...], dict[str, Any]]:
        """Return the positional and keyword arguments. Arrays are JAX arrays, since
        NumPy arrays cannot be indexed by the traced indices of a plate."""
        treedef, static, _ = self.static
        leaves, arrays = dict(static), iter(as_arrays(list(self.arrays)))
        ordered = [
            leaves[i] if i in leaves else next(arrays)
            for i in range(treedef.num_leaves)
        ]
        return jax.tree.unflatten(treedef, ordered)


def choices_among(leaves: Iterable[Any]) -> tuple[Hashable, ...]:
    """Return the arguments that may choose another model: those that are neither arrays
    nor numbers, such as flags, names and functions."""
    return tuple(
        x
        for x in leaves
        if isinstance(x, bool) or not (is_array(x) or isinstance(x, Number))
    )
