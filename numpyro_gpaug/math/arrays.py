# SPDX-License-Identifier: Apache-2.0
"""Conversion of callers' arrays into JAX arrays, their dtypes, and computations in
blocks."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from functools import partial
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax import Array
from jax.core import Tracer
from jax.typing import ArrayLike


def known_to(condition: Callable[[Any], Any], values: ArrayLike) -> bool:
    """Whether all values satisfy a condition; also true if values or condition are
    traced."""
    if isinstance(values, jax.core.Tracer):
        return True
    with jax.ensure_compile_time_eval():
        satisfied = jnp.all(condition(values))
    return isinstance(satisfied, jax.core.Tracer) or bool(satisfied)


def numbers(**given: ArrayLike) -> tuple[Array, ...]:
    """Return numbers as floating scalars of one dtype.

    :param given: numbers by name.
    :raises ValueError: for an array, naming it.
    """
    for name, value in given.items():
        if np.ndim(value):
            raise ValueError(f"{name} has shape {np.shape(value)}; expected a number")
    return floating(*given.values())


def floating(*values: ArrayLike) -> tuple[Array, ...]:
    """Return the values as floating arrays of one shape and dtype."""
    dtype = jnp.result_type(*values, 0.0)
    # Inside a trace, known values stay known, and are checked.
    with jax.ensure_compile_time_eval():
        return tuple(jnp.broadcast_arrays(*(jnp.asarray(x, dtype) for x in values)))


try:
    from jax import enable_x64
except ImportError:  # before jax 0.8
    from jax.experimental import enable_x64  # type: ignore[attr-defined,no-redef]

# Up to this number of bytes, a program takes an array over faster than a separate
# transfer does.
_SMALL = 2**14
# On a CPU, JAX takes over memory that starts at a multiple of this number of bytes.
_ALIGNED = 64
_NARROW: dict[Any, Any] = {
    np.dtype(f"{kind}64"): np.dtype(f"{kind}32") for kind in ("float", "int", "uint")
}

# Metadata of fields of a dataclass that are no leaves of its tree.
STATIC = {"static": True}


@contextmanager
def in_dtype_of(fitted: Any) -> Iterator[None]:
    """Run JAX inside with the dtypes of a fit, whatever ``jax_enable_x64`` is now.

    :param fitted: whether the fit used 64-bit numbers, or an object from the fit: it
        did if any JAX array in the object is float64. NumPy arrays are not considered.
    """
    leaves = [x for x in jax.tree.leaves(fitted) if isinstance(x, bool | Array)]
    double = any(x is True or getattr(x, "dtype", 0) == np.float64 for x in leaves)
    if not leaves or double == has_doubles():
        yield
        return
    with enable_x64(double):
        yield


def is_traced(tree: Any) -> bool:
    """Whether some array is traced: a caller differentiates, vectorises or compiles."""
    return any(isinstance(x, Tracer) for x in jax.tree.leaves(tree))


def nan_unless(valid: Any, tree: Any) -> Any:
    """Return a tree whose floating numbers are NaN unless ``valid`` is true."""
    if valid is True:
        return tree

    def kept(x: Any) -> Any:
        floating = jnp.issubdtype(jnp.result_type(x), jnp.floating)
        return jnp.where(valid, x, jnp.nan) if floating else x

    return jax.tree.map(kept, tree)


def has_doubles() -> bool:
    """Whether JAX uses 64-bit numbers here."""
    config: Any = jax.config  # includes settings of context managers
    return bool(config.jax_enable_x64)


def held(leaves: list[Any]) -> tuple[Any, ...]:
    """Return array arguments as programs take them. Small NumPy arrays are copied, in
    JAX's dtypes, so that no caller can change them. All others become JAX arrays.

    :param leaves: JAX or NumPy arrays.
    """
    if not has_doubles():
        leaves = [_single(x) if isinstance(x, Array) else x for x in leaves]
    small = {i: _copied(x) for i, x in enumerate(leaves) if _is_small(x)}
    others = iter(as_arrays([x for i, x in enumerate(leaves) if i not in small]))
    return tuple(small[i] if i in small else next(others) for i in range(len(leaves)))


def _single(array: Array) -> Array:
    """Return a 64-bit array in the 32-bit dtype that JAX would have given it."""
    narrow = _NARROW.get(array.dtype)
    return array if narrow is None else array.astype(narrow)


def _is_small(array: Any) -> bool:
    known = type(array) is np.ndarray and array.nbytes <= _SMALL
    return known and array.dtype.kind in "biuf" and array.dtype.isnative


def _copied(array: np.ndarray) -> np.ndarray:
    copy = array.astype(jax.dtypes.canonicalize_dtype(array.dtype), order="C")
    copy.flags.writeable = False
    return copy


def as_arrays(leaves: list[Any]) -> tuple[Array, ...]:
    """Return array arguments as JAX arrays. One transfer takes all NumPy arrays;
    ``jnp.asarray`` would compile a program for each shape."""
    given = [_own(x) for x in leaves if not isinstance(x, Array)]
    if not given:
        return tuple(leaves)
    # Inside a trace, known numbers stay known.
    with jax.ensure_compile_time_eval():
        placed = iter(jax.device_put(given))
    return tuple(x if isinstance(x, Array) else next(placed) for x in leaves)


def _own(array: Any) -> Any:
    """Return a copy of an array that its caller may change. JAX copies an array unless
    it is aligned; then both share memory, whatever ``may_alias`` is."""
    aligned = isinstance(array, np.ndarray) and array.ctypes.data % _ALIGNED == 0
    return array.copy() if aligned else array


def in_blocks(
    function: Callable[[np.ndarray], Any],
    number: int,
    size: int,
    took: Callable[[int], Any] = lambda _: None,
) -> Any:
    """Apply a function to many rows (draws, responses), in blocks of one size.

    :param function: a function of the numbers of some rows, which returns a tree of
        arrays.
    :param number: the number of rows.
    :param size: the size of a block. The last one is filled up.
    :param took: called with the number of rows of each block, once it is done.
    :return: the tree, as NumPy arrays of all rows.
    """
    parts = []
    for start in range(0, number, size):
        places = np.minimum(np.arange(start, start + size), number - 1)
        kept = min(size, number - start)
        cut = partial(lambda x, kept: np.asarray(x)[:kept], kept=kept)
        parts.append(jax.tree.map(cut, function(places)))
        took(kept)
    return jax.tree.map(lambda *blocks: np.concatenate(blocks), *parts)
