# SPDX-License-Identifier: Apache-2.0
"""Derivatives of pytrees that hold other things than floats, too."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp
from jax import Array

Floats = tuple[Array, ...]


def split_floats(tree: Any) -> tuple[Floats, Callable[[Floats], Any]]:
    """The arrays of a tree that can be differentiated, and what puts it together.

    :param tree: any pytree.
    :return: its float leaves, and a function from such leaves to the tree.
    """
    leaves, treedef = jax.tree.flatten(tree)
    floating = [jnp.issubdtype(jnp.result_type(x), jnp.floating) for x in leaves]

    def rebuild(floats: Floats) -> Any:
        given = iter(floats)
        merged = [
            next(given) if is_float else leaf
            for is_float, leaf in zip(floating, leaves, strict=True)
        ]
        return jax.tree.unflatten(treedef, merged)

    floats = (x for is_float, x in zip(floating, leaves, strict=True) if is_float)
    return tuple(jnp.asarray(x) for x in floats), rebuild


def vjp(fn: Callable[[Any], Any], values: Any) -> tuple[Any, Callable[[Floats], Any]]:
    """What ``fn`` returns, and the pullback of cotangents of its float leaves, in the
    order of :func:`split_floats`, to ``values``; ``fn`` is called once.

    :param fn: from a pytree of floats to any pytree.
    :param values: where.
    """
    rest: list[Any] = []

    def floats_of(values: Any) -> tuple[Floats, list[Any]]:
        leaves, treedef = jax.tree.flatten(fn(values))
        floating = [jnp.issubdtype(jnp.result_type(x), jnp.floating) for x in leaves]
        rest[:] = [treedef, floating]
        pairs = list(zip(floating, leaves, strict=True))
        floats = tuple(jnp.asarray(x) for is_float, x in pairs if is_float)
        return floats, [x for is_float, x in pairs if not is_float]

    floats, pull, others = jax.vjp(floats_of, values, has_aux=True)
    treedef, floating = rest
    given, static = iter(floats), iter(others)
    leaves = [next(given) if is_float else next(static) for is_float in floating]
    return jax.tree.unflatten(treedef, leaves), lambda slopes: pull(slopes)[0]
