# SPDX-License-Identifier: Apache-2.0
"""What NumPy does for operations of JAX: rules from an operation's arguments and
parameters to its result, whose dtype and shape are those that JAX says."""

from __future__ import annotations

from collections.abc import Callable
from math import prod
from typing import Any

import numpy as np
from jax import lax
from scipy import special

from numpyro_gpaug.math import numpy_random

Rule = Callable[..., Any]


def _plain(function: Callable[..., Any]) -> Rule:
    """A rule that looks at arguments alone."""
    return lambda *args, **_: function(*args)


def _divided(x: np.ndarray, y: np.ndarray) -> Any:
    if np.issubdtype(x.dtype, np.inexact):
        return x / y
    safe = np.where(y == 0, 1, y)
    found = np.abs(x) // np.abs(safe) * (np.sign(x) * np.sign(safe))
    return np.where(y == 0, np.array(-1).astype(x.dtype), found)


def _remainder(x: np.ndarray, y: np.ndarray) -> Any:
    if np.issubdtype(x.dtype, np.inexact):
        return np.fmod(x, y)
    return np.where(y == 0, x, np.fmod(x, np.where(y == 0, 1, y)))


def _rounded(x: np.ndarray, *, rounding_method: Any) -> Any:
    if rounding_method == lax.RoundingMethod.TO_NEAREST_EVEN:
        return np.round(x)
    return np.trunc(x) + np.trunc(2 * (x - np.trunc(x)))


def _shifted(x: np.ndarray, by: np.ndarray) -> Any:
    unsigned = np.dtype(f"u{x.dtype.itemsize}")
    return np.right_shift(x.astype(unsigned), by.astype(unsigned))


def _selected(which: np.ndarray, *cases: np.ndarray) -> Any:
    if len(cases) == 2:
        return np.where(which, cases[1], cases[0])
    return np.choose(which, cases)


def _broadcast(
    x: np.ndarray, *, shape: Any, broadcast_dimensions: Any, **_: Any
) -> Any:
    sizes = [1] * len(shape)
    for axis, size in zip(broadcast_dimensions, x.shape, strict=True):
        sizes[axis] = size
    return np.broadcast_to(x.reshape(sizes), shape)


def _iota(*, dtype: Any, shape: Any, dimension: int, **_: Any) -> Any:
    sizes = [1] * len(shape)
    sizes[dimension] = shape[dimension]
    return np.broadcast_to(
        np.arange(shape[dimension], dtype=dtype).reshape(sizes), shape
    )


def _sliced(
    x: np.ndarray, *, start_indices: Any, limit_indices: Any, strides: Any
) -> Any:
    steps = strides or (1,) * x.ndim
    every = zip(start_indices, limit_indices, steps, strict=True)
    return x[tuple(slice(*part) for part in every)]


def _padded(x: np.ndarray, value: np.ndarray, *, padding_config: Any) -> Any:
    for axis, (low, high, inside) in enumerate(padding_config):
        size = x.shape[axis] + max(x.shape[axis] - 1, 0) * inside
        shape = [*x.shape]
        shape[axis] = max(low, 0) + size + max(high, 0)
        wider = np.full(shape, value, x.dtype)
        where: list[Any] = [slice(None)] * x.ndim
        begin = max(low, 0)
        where[axis] = slice(begin, begin + size, inside + 1)
        wider[tuple(where)] = x
        where[axis] = slice(max(-low, 0), shape[axis] - max(-high, 0))
        x = wider[tuple(where)]
    return x


def _starts(shape: Any, sizes: Any, starts: tuple[np.ndarray, ...]) -> list[int]:
    every = zip(shape, sizes, starts, strict=True)
    return [int(np.clip(start, 0, whole - size)) for whole, size, start in every]


def _dynamic_slice(x: np.ndarray, *starts: np.ndarray, slice_sizes: Any) -> Any:
    begin = _starts(x.shape, slice_sizes, starts)
    return x[tuple(slice(b, b + n) for b, n in zip(begin, slice_sizes, strict=True))]


def _dynamic_update(x: np.ndarray, part: np.ndarray, *starts: np.ndarray) -> Any:
    begin, found = _starts(x.shape, part.shape, starts), x.copy()
    places = tuple(slice(b, b + n) for b, n in zip(begin, part.shape, strict=True))
    found[places] = part
    return found


def _places(
    shape: tuple[int, ...],
    indices: np.ndarray,
    windows: list[int],
    rank: int,
    axes: Any,
    inside: Any,
    batches: tuple[Any, Any],
    sizes: Any,
) -> tuple[list[np.ndarray], np.ndarray]:
    """Which entries of an array a gather takes, or a scatter changes, by axis; and
    whether windows are within it.

    :param shape: of the array.
    :param indices: where windows start, (..., axes).
    :param windows: axes of the result along which windows lie.
    :param rank: of the result.
    :param axes: of the array that starts are along.
    :param inside: axes of the array that windows do not have.
    :param batches: axes of the array, and of the indices, that go together.
    :param sizes: of windows, along all axes of the array.
    """
    free = [i for i in range(rank) if i not in windows]

    def spread(x: np.ndarray, places: list[int]) -> np.ndarray:
        wide = [1] * rank
        for place, size in zip(places, x.shape, strict=True):
            wide[place] = size
        return x.reshape(wide)

    within = np.ones([1] * rank, bool)
    left = iter(windows)
    found = []
    for axis, whole in enumerate(shape):
        place = np.zeros([1] * rank, int)
        if axis in axes:
            start = indices[..., list(axes).index(axis)].astype(int)
            last = whole - sizes[axis]
            within = within & spread((start >= 0) & (start <= last), free)
            place = place + spread(np.clip(start, 0, last), free)
        if axis in batches[0]:
            along = free[batches[1][list(batches[0]).index(axis)]]
            place = place + spread(np.arange(whole), [along])
        elif axis not in inside:
            place = place + spread(np.arange(sizes[axis]), [next(left)])
        found.append(place)
    return found, within


def _gather(
    x: np.ndarray, indices: np.ndarray, *,
    dimension_numbers: Any, slice_sizes: Any, mode: Any, fill_value: Any, **_: Any,
) -> Any:  # fmt: skip
    how = dimension_numbers
    windows = [int(i) for i in how.offset_dims]
    rank = indices.ndim - 1 + len(windows)
    inside = {*how.collapsed_slice_dims, *how.operand_batching_dims}
    batches = how.operand_batching_dims, how.start_indices_batching_dims
    places, within = _places(
        x.shape, indices, windows, rank, how.start_index_map, inside, batches,
        slice_sizes,
    )  # fmt: skip
    found = x[tuple(places)]
    if mode != lax.GatherScatterMode.FILL_OR_DROP or within.all():
        return found
    if fill_value is None:
        fill_value = _missing(x.dtype)
    return np.where(within, found, np.array(fill_value).astype(x.dtype))


def _missing(dtype: np.dtype) -> Any:
    if np.issubdtype(dtype, np.inexact):
        return np.nan
    if np.issubdtype(dtype, np.bool_):
        return True
    info = np.iinfo(dtype)
    return info.min if info.min else info.max


def _scatter(operation: Any) -> Rule:
    def scattered(
        x: np.ndarray, indices: np.ndarray, updates: np.ndarray, *,
        dimension_numbers: Any, mode: Any, **_: Any,
    ) -> Any:  # fmt: skip
        how = dimension_numbers
        windows = [int(i) for i in how.update_window_dims]
        inside = {*how.inserted_window_dims, *how.operand_batching_dims}
        left = iter(windows)
        sizes = [
            1 if axis in inside else updates.shape[next(left)] for axis in range(x.ndim)
        ]
        batches = how.operand_batching_dims, how.scatter_indices_batching_dims
        places, within = _places(
            x.shape, indices, windows, updates.ndim, how.scatter_dims_to_operand_dims,
            inside, batches, sizes,
        )  # fmt: skip
        full = [np.broadcast_to(place, updates.shape) for place in places]
        kept = np.broadcast_to(within, updates.shape)
        if mode == lax.GatherScatterMode.CLIP:
            kept = np.ones_like(kept)
        found = x.copy()
        chosen = tuple(place[kept] for place in full)
        if operation is None:
            found[chosen] = updates[kept]
        else:
            operation.at(found, chosen, updates[kept])
        return found

    return scattered


def _product(x: np.ndarray, y: np.ndarray, *, dimension_numbers: Any, **_: Any) -> Any:
    (left, right), (first, second) = dimension_numbers
    own = [i for i in range(x.ndim) if i not in (*left, *first)]
    other = [i for i in range(y.ndim) if i not in (*right, *second)]
    batch, rows, columns = (
        [z.shape[i] for i in axes] for z, axes in ((x, first), (x, own), (y, other))
    )
    width, tall, wide = (
        prod(sizes) for sizes in ([x.shape[i] for i in left], rows, columns)
    )
    a = x.transpose(*first, *own, *left).reshape(*batch, tall, width)
    b = y.transpose(*second, *right, *other).reshape(*batch, width, wide)
    return (a @ b).reshape(*batch, *rows, *columns)


def _cholesky(x: np.ndarray, **_: Any) -> Any:
    found = np.full(x.shape, np.nan, x.dtype)
    for place in np.ndindex(x.shape[:-2]):
        try:
            found[place] = np.linalg.cholesky(x[place])
        except np.linalg.LinAlgError:
            continue
    return found


def _solved(
    factor: np.ndarray, given: np.ndarray, *,
    left_side: bool, lower: bool, transpose_a: bool, unit_diagonal: bool, **_: Any,
) -> Any:  # fmt: skip
    from scipy import linalg  # a tenth of a second to import

    found = np.empty_like(given)
    for place in np.ndindex(given.shape[:-2]):
        right = given[place] if left_side else given[place].T
        solution = linalg.solve_triangular(
            factor[place], right, lower=lower, trans=int(transpose_a == left_side),
            unit_diagonal=unit_diagonal, check_finite=False,
        )  # fmt: skip
        found[place] = solution if left_side else solution.T
    return found


def _reduced(function: Any) -> Rule:
    return lambda x, *, axes, **_: function(x, axis=tuple(axes))


def _extreme(function: Any, side: int) -> Rule:
    def reduced(x: np.ndarray, *, axes: Any, **_: Any) -> Any:
        if np.issubdtype(x.dtype, np.inexact):
            return function(x, axis=tuple(axes), initial=side * np.inf)
        return function(x, axis=tuple(axes))

    return reduced


def _largest(x: np.ndarray, *, axes: Any, function: Any, **_: Any) -> Any:
    return function(x, axis=axes[0])


def _summed(function: Any) -> Rule:
    def cumulative(x: np.ndarray, *, axis: int, reverse: bool) -> Any:
        if not reverse:
            return function(x, axis=axis)
        return np.flip(function(np.flip(x, axis), axis=axis), axis)

    return cumulative


_ARITHMETIC: dict[str, Rule] = {
    "abs": np.abs, "add": np.add, "add_any": np.add, "and": np.bitwise_and,
    "atan2": np.arctan2, "cbrt": np.cbrt, "ceil": np.ceil, "cos": np.cos,
    "cosh": np.cosh, "digamma": special.digamma, "div": _divided, "eq": np.equal,
    "erf": special.erf, "erf_inv": special.erfinv, "erfc": special.erfc, "exp": np.exp,
    "exp2": np.exp2, "expm1": np.expm1, "floor": np.floor, "ge": np.greater_equal,
    "gt": np.greater, "is_finite": np.isfinite, "le": np.less_equal,
    "lgamma": special.gammaln, "log": np.log, "log1p": np.log1p,
    "logistic": special.expit, "lt": np.less, "max": np.maximum, "min": np.minimum,
    "mul": np.multiply, "ne": np.not_equal, "neg": np.negative, "not": np.invert,
    "or": np.bitwise_or, "pow": np.power, "rem": _remainder, "sign": np.sign,
    "sin": np.sin, "sinh": np.sinh, "sqrt": np.sqrt, "square": np.square,
    "sub": np.subtract, "tan": np.tan, "tanh": np.tanh, "xor": np.bitwise_xor,
    "rsqrt": lambda x: 1 / np.sqrt(x), "shift_right_logical": _shifted,
    "clamp": lambda low, x, high: np.minimum(np.maximum(x, low), high),
    "copy": np.asarray, "copy_p": np.asarray, "stop_gradient": np.asarray,
    "convert_element_type": np.asarray, "select_n": _selected,
    "dynamic_update_slice": _dynamic_update,
}  # fmt: skip
RULES: dict[str, Rule] = {k: _plain(rule) for k, rule in _ARITHMETIC.items()} | {
    "integer_pow": lambda x, *, y: x.astype(x.dtype) ** y,
    "round": _rounded,
    "bitcast_convert_type": lambda x, *, new_dtype: np.ascontiguousarray(x).view(
        new_dtype
    ),
    "broadcast_in_dim": _broadcast,
    "reshape": lambda x, *, new_sizes, **_: x.reshape(new_sizes),
    "squeeze": lambda x, *, dimensions: np.squeeze(x, tuple(dimensions)),
    "expand_dims": lambda x, *, dimensions: np.expand_dims(x, tuple(dimensions)),
    "transpose": lambda x, *, permutation: x.transpose(permutation),
    "rev": lambda x, *, dimensions: np.flip(x, tuple(dimensions)),
    "slice": _sliced,
    "concatenate": lambda *xs, dimension: np.concatenate(xs, dimension),
    "stack": lambda *xs, axis: np.stack(xs, axis),
    "pad": _padded,
    "iota": _iota,
    "split": lambda x, *, sizes, axis: np.split(x, np.cumsum(sizes)[:-1], axis),
    "unstack": lambda x, *, axis, **_: list(np.moveaxis(x, axis, 0)),
    "optimization_barrier": lambda *xs: list(xs),
    "gather": _gather,
    "scatter": _scatter(None),
    "scatter-add": _scatter(np.add),
    "scatter-mul": _scatter(np.multiply),
    "dynamic_slice": _dynamic_slice,
    "dot_general": _product,
    "cholesky": _cholesky,
    "triangular_solve": _solved,
    "reduce_sum": _reduced(np.sum),
    "reduce_prod": _reduced(np.prod),
    "reduce_max": _extreme(np.max, -1),
    "reduce_min": _extreme(np.min, 1),
    "reduce_and": _reduced(np.all),
    "reduce_or": _reduced(np.any),
    "argmax": lambda x, **how: _largest(x, function=np.argmax, **how),
    "argmin": lambda x, **how: _largest(x, function=np.argmin, **how),
    "cumsum": _summed(np.cumsum),
    "cumprod": _summed(np.cumprod),
    "random_wrap": numpy_random.wrapped,
    "random_unwrap": numpy_random.words,
    "random_seed": numpy_random.seeded,
    "random_split": numpy_random.split,
    "random_fold_in": numpy_random.folded,
    "random_bits": numpy_random.bits,
    "random_gamma": numpy_random.gamma,
}
# Whose result is a list.
SEVERAL = {"split", "unstack", "optimization_barrier"}
