# SPDX-License-Identifier: Apache-2.0
"""Checks and dtypes of values that may be traced."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax import Array
from jax.typing import ArrayLike


def known_to(condition: Callable[[Any], Any], values: ArrayLike) -> bool:
    """Whether all values satisfy a condition. The answer is yes if either is traced."""
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
    dtype = jnp.result_type(*given.values(), float)
    return tuple(jnp.asarray(value, dtype) for value in given.values())


def floating(*values: ArrayLike) -> tuple[Array, ...]:
    """Return the values as floating arrays of one shape and dtype."""
    dtype = jnp.result_type(*values, 0.0)
    return tuple(jnp.broadcast_arrays(*(jnp.asarray(x, dtype) for x in values)))
