# SPDX-License-Identifier: Apache-2.0
"""Arrays of callers as JAX's."""

from __future__ import annotations

from typing import Any

import jax
import numpy as np
from jax import Array

# Bytes: memory that begins at a multiple of them JAX takes over on a CPU.
_ALIGNED = 64


def as_arrays(leaves: list[Any]) -> tuple[Array, ...]:
    """Array arguments as JAX's, NumPy's by one transfer: ``jnp.asarray`` compiles a
    program for each shape."""
    given = [_own(x) for x in leaves if not isinstance(x, Array)]
    placed = iter(jax.device_put(given) if given else ())
    return tuple(x if isinstance(x, Array) else next(placed) for x in leaves)


def _own(array: Any) -> Any:
    """An array that its caller may change: JAX copies it unless it is aligned, when its
    memory becomes that of the answer, whatever ``may_alias`` says."""
    aligned = isinstance(array, np.ndarray) and array.ctypes.data % _ALIGNED == 0
    return array.copy() if aligned else array
