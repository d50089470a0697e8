# SPDX-License-Identifier: Apache-2.0
"""Arrays of callers as JAX's."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import jax
import numpy as np
from jax import Array

try:
    from jax import enable_x64
except ImportError:  # before jax 0.8
    from jax.experimental import enable_x64  # type: ignore[attr-defined,no-redef]

# Bytes of an array up to which programs take it over in less time than a transfer of
# its own takes.
_SMALL = 2**14
# Bytes: memory that begins at a multiple of them JAX takes over on a CPU.
_ALIGNED = 64
_NARROW: dict[Any, Any] = {
    np.dtype(f"{kind}64"): np.dtype(f"{kind}32") for kind in ("float", "int", "uint")
}


@contextmanager
def in_dtype_of(fitted: Any) -> Iterator[None]:
    """JAX with the dtypes that a fit was made in, whatever ``jax_enable_x64`` is since.

    :param fitted: whether numbers were of 64 bits; or what was fitted: they were, if
        any array of JAX's in it is float64. NumPy's say nothing.
    """
    leaves = [x for x in jax.tree.leaves(fitted) if isinstance(x, bool | Array)]
    double = any(x is True or getattr(x, "dtype", 0) == np.float64 for x in leaves)
    if not leaves or double == has_doubles():
        yield
        return
    with enable_x64(double):
        yield


def has_doubles() -> bool:
    """Whether JAX's numbers are of 64 bits here."""
    config: Any = jax.config  # what a context manager has set included
    return bool(config.jax_enable_x64)


def held(leaves: list[Any]) -> tuple[Any, ...]:
    """Array arguments as programs take them: small ones of NumPy's as copies of the
    dtypes that JAX has, which no caller can change; all others as JAX's.

    :param leaves: arrays of JAX's or NumPy's.
    """
    if not has_doubles():
        leaves = [_single(x) if isinstance(x, Array) else x for x in leaves]
    small = {i: _copied(x) for i, x in enumerate(leaves) if _is_small(x)}
    if len(small) == len(leaves):
        return tuple(small.values())
    others = iter(as_arrays([x for i, x in enumerate(leaves) if i not in small]))
    return tuple(small[i] if i in small else next(others) for i in range(len(leaves)))


def _single(array: Array) -> Array:
    """An array made where numbers are of 64 bits, as it would be where they are not."""
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
    """Array arguments as JAX's, NumPy's by one transfer: ``jnp.asarray`` compiles a
    program for each shape."""
    given = [_own(x) for x in leaves if not isinstance(x, Array)]
    if not given:
        return tuple(leaves)
    # Known numbers in a trace, too, that does not concern them.
    with jax.ensure_compile_time_eval():
        placed = iter(jax.device_put(given))
    return tuple(x if isinstance(x, Array) else next(placed) for x in leaves)


def _own(array: Any) -> Any:
    """An array that its caller may change: JAX copies it unless it is aligned, when its
    memory becomes that of the answer, whatever ``may_alias`` says."""
    aligned = isinstance(array, np.ndarray) and array.ctypes.data % _ALIGNED == 0
    return array.copy() if aligned else array
