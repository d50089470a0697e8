# SPDX-License-Identifier: Apache-2.0
"""Proof, from two jaxprs, that a function treats the rows of its arguments one by one.

Repeated rows may then be added with weight zero, which changes only the shapes that
programs are compiled for. Traced with two numbers of rows, the function must give the
same program except for that number (a ``1 / N`` in the program would differ), and no
operation may make one row depend on another (a ``mean`` over rows would).
"""

from __future__ import annotations

from math import prod
from typing import Any

import numpy as np
from jax.extend.core import Literal

from numpyro_gpaug.model.jaxpr import ALONG, BY_ENTRY, PRODUCTS, axes_of

# Operations that keep rows. A variable has at most one axis over rows, and all other
# axes have equal sizes in both programs, so that a result has rows along one axis, too.
_ROWWISE = BY_ENTRY | {
    "optimization_barrier", "iota", "broadcast_in_dim", "transpose", "squeeze", "stack",
}  # fmt: skip
# Over rows, too: repeated rows do not change their result.
_IDEMPOTENT = {"reduce_and", "reduce_max", "reduce_min", "reduce_or"}
# Parameters with shapes, of operations that keep the number of rows.
_SHAPES = {
    "broadcast_in_dim": "shape", "iota": "shape", "reshape": "new_sizes",
    "slice": "limit_indices", "gather": "slice_sizes",
}  # fmt: skip


class _MixedError(Exception):
    """Rows depend on one another, or the programs differ."""


def rows_independent(few: Any, many: Any, *, blocks: bool = False) -> bool:
    """Whether a function treats rows one by one, so that additional rows change no
    other row.

    :param few: its closed jaxpr at one number of rows.
    :param many: its closed jaxpr at another number.
    :param blocks: whether it must also give the same in blocks of rows, which have
        other extremes and other row numbers.
    """
    try:
        _Pair(_row_sizes(few.jaxpr, many.jaxpr), blocks=blocks).closed(few, many)
    except (_MixedError, ValueError):  # zip of tuples of different lengths
        return False
    return True


def _row_sizes(first: Any, second: Any) -> set[tuple[int, int]]:
    """Return numbers of rows: the pairs of sizes in which the shapes of inputs
    differ."""
    pairs = zip(first.invars, second.invars, strict=True)
    return {
        sizes
        for a, b in pairs
        for sizes in zip(a.aval.shape, b.aval.shape, strict=True)
        if sizes[0] != sizes[1]
    }


class _Pair:
    """Two jaxprs that are read in parallel.

    :param sizes: pairs of numbers of rows.
    :param blocks: see :func:`rows_independent`.
    """

    def __init__(self, sizes: set[tuple[int, int]], *, blocks: bool) -> None:
        self._sizes, self._blocks = sizes, blocks
        # Row numbers, such as those of a plate, which most models do not use.
        self._numbers: set[Any] = set()

    def closed(self, first: Any, second: Any) -> None:
        """Read two closed jaxprs; constants must be the same."""
        for a, b in zip(first.consts, second.consts, strict=True):
            _demand(a is b or np.array_equal(np.asarray(a), np.asarray(b)))
        self.open(first.jaxpr, second.jaxpr)

    def open(self, first: Any, second: Any) -> None:
        """Read two jaxprs without constants."""
        _demand(len(first.eqns) == len(second.eqns))
        starts = zip(
            (*first.constvars, *first.invars), (*second.constvars, *second.invars),
            strict=True,
        )  # fmt: skip
        partner = dict(starts)
        for a, b in zip(first.eqns, second.eqns, strict=True):
            _demand(a.primitive is b.primitive)
            for x, y in zip(a.invars, b.invars, strict=True):
                if isinstance(x, Literal):
                    _demand(isinstance(y, Literal) and _equal(x.val, y.val))
                else:
                    _demand(partner.get(x) is y)
            partner |= zip(a.outvars, b.outvars, strict=True)
            self._equation(a, b)
        for x, y in zip(first.outvars, second.outvars, strict=True):
            self._axis(x, y)
            _demand(isinstance(x, Literal) or partner.get(x) is y)

    def _axis(self, a: Any, b: Any) -> int | None:
        """Return the axis over rows of a variable, if it has one."""
        pairs = zip(a.aval.shape, b.aval.shape, strict=True)
        found = [(i, sizes) for i, sizes in enumerate(pairs) if sizes[0] != sizes[1]]
        _demand(a.aval.dtype == b.aval.dtype and len(found) <= 1)
        _demand(all(sizes in self._sizes for _, sizes in found))
        return found[0][0] if found else None

    def _equation(self, a: Any, b: Any) -> None:
        ins = [self._axis(x, y) for x, y in zip(a.invars, b.invars, strict=True)]
        outs = [self._axis(x, y) for x, y in zip(a.outvars, b.outvars, strict=True)]
        touched = any(axis is not None for axis in (*ins, *outs))
        shape = _SHAPES.get(a.primitive.name) if touched else None
        _demand(a.params.keys() == b.params.keys())
        inner = [self._param(a.params[k], b.params[k]) for k in a.params if k != shape]
        if self._blocks and touched:
            used = [x for x in a.invars if not isinstance(x, Literal)]
            _demand(self._numbers.isdisjoint(used))
            if a.primitive.name == "iota":
                self._numbers.update(a.outvars)
        if touched and not any(inner):
            _demand(_keeps_rows(a, ins, outs[0], blocks=self._blocks))

    def _param(self, x: Any, y: Any) -> bool:
        """Raise unless two params are the same. Return whether they contain a jaxpr."""
        if hasattr(x, "consts"):
            self.closed(x, y)
        elif hasattr(x, "eqns"):
            self.open(x, y)
        elif isinstance(x, tuple | list):
            return any([self._param(*pair) for pair in zip(x, y, strict=True)])
        else:
            # Custom derivatives are created for exactly these programs.
            derivative = callable(x) or hasattr(x, "call_wrapped")
            _demand(derivative or _equal(x, y))
            return False
        return True


def _keeps_rows(
    eqn: Any, ins: list[int | None], out: int | None, *, blocks: bool
) -> bool:
    """Whether each row of an operation's result depends only on the same row of its
    operands.

    :param eqn: the equation.
    :param ins: axes over rows of its operands, ``None`` without.
    :param out: the axis over rows of its result.
    :param blocks: see :func:`rows_independent`.
    """
    name, params, axis = eqn.primitive.name, eqn.params, ins[0] if ins else None
    if name == "gather":
        numbers = params["dimension_numbers"]
        # Rows of the operand, each with its own indices.
        if axis in numbers.operand_batching_dims:
            return True
        if ins[1] is not None:  # values without rows, gathered for each row
            return axis is None
        # Columns of rows: along the other axes the operand is taken completely.
        apart = {*numbers.collapsed_slice_dims, *numbers.start_index_map}
        whole = params["slice_sizes"][axis] == eqn.invars[0].aval.shape[axis]
        return axis not in apart and whole
    if name.startswith("scatter"):
        # Columns of rows: along the other axes the update is complete.
        numbers = params["dimension_numbers"]
        apart = {*numbers.inserted_window_dims, *numbers.operand_batching_dims}
        whole = [i for i in range(eqn.invars[0].aval.ndim) if i not in apart]
        if axis not in whole or axis in numbers.scatter_dims_to_operand_dims:
            return False
        window = numbers.update_window_dims[whole.index(axis)]
        return ins[1:] == [None, window] and out == axis
    if name in PRODUCTS:
        contracted, _ = params["dimension_numbers"]
        sides = zip(ins, contracted, strict=True)
        return all(axis not in axes for axis, axes in sides)
    if name in _ROWWISE:
        return True
    if name == "concatenate":
        return params["dimension"] != out
    if axis is None:
        return False
    if name in _IDEMPOTENT:
        return not blocks or axis not in params["axes"]
    if name in ALONG:
        return axis not in axes_of(eqn)
    if name == "reshape":
        # The number of entries before a row is the same, so the number within one is,
        # too.
        before = eqn.invars[0].aval.shape[:axis], eqn.outvars[0].aval.shape[:out]
        return out is not None and prod(before[0]) == prod(before[1])
    if name == "slice":
        whole = eqn.invars[0].aval.shape[axis]
        return (params["start_indices"][axis], params["limit_indices"][axis]) == (
            0, whole
        )  # fmt: skip
    return False


def _equal(x: Any, y: Any) -> bool:
    """Whether two params or numbers are equal; NaN, which fills gaps, equals itself."""
    numbers = [np.asarray(each) for each in (x, y)]
    gaps = all(each.dtype.kind == "f" and np.isnan(each).all() for each in numbers)
    return gaps or bool(np.all(x == y))


def _demand(true: bool) -> None:
    if not true:
        raise _MixedError
