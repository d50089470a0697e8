# SPDX-License-Identifier: Apache-2.0
"""Derivatives of pytrees that also have leaves without gradients, such as the counts
and flags of a network."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp
from jax import Array
from jax.flatten_util import ravel_pytree

Floats = tuple[Array, ...]


def split_floats(tree: Any) -> tuple[Floats, Callable[[Floats], Any]]:
    """Return the arrays of a tree that can be differentiated, and a function that
    restores the tree.

    :param tree: any pytree.
    :return: its float leaves, and a function from such leaves to the tree.
    """
    leaves, treedef = jax.tree.flatten(tree)

    def rebuild(floats: Floats) -> Any:
        given = iter(floats)
        merged = [next(given) if is_float(x) else x for x in leaves]
        return jax.tree.unflatten(treedef, merged)

    return tuple(jnp.asarray(x) for x in leaves if is_float(x)), rebuild


def is_float(leaf: Any) -> bool:
    """Whether a leaf can be differentiated."""
    return bool(jnp.issubdtype(jnp.result_type(leaf), jnp.floating))


def floats_of(tree: Any) -> Any:
    """Return the tree with ``None``, which is an empty tree, in place of all leaves but
    floats: the part that optax updates.

    :param tree: any pytree.
    """
    return jax.tree.map(lambda x: x if is_float(x) else None, tree)


def with_zeros(floats: Any, like: Any) -> Any:
    """Return a tree of floats with zeros for the leaves that :func:`floats_of` left
    out.

    :param floats: the tree.
    :param like: the full tree.
    """
    _, rebuild = split_floats(jax.tree.map(jnp.zeros_like, like))
    return rebuild(tuple(jax.tree.leaves(floats)))


def raveled(tree: Any) -> tuple[Array, Callable[[Array], Any]]:
    """Return all floats of a tree as a vector, and a function from such a vector to the
    tree.

    :param tree: any pytree.
    """
    floats, rebuild = split_floats(tree)
    flat, unravel = ravel_pytree(floats)
    return flat, lambda vector: rebuild(unravel(vector))


def vjp(fn: Callable[[Any], Any], values: Any) -> tuple[Any, Callable[[Floats], Any]]:
    """Return the value of ``fn``, and the pullback of cotangents of its float leaves,
    in the order of :func:`split_floats`, to ``values``. The pullback is zero at leaves
    that are not floats. ``fn`` is called once.

    :param fn: a function from a pytree to any pytree.
    :param values: the point.
    """
    inputs, rebuild = split_floats(values)

    def outputs(inputs: Floats) -> tuple[Floats, Any]:
        value = fn(rebuild(inputs))
        return split_floats(value)[0], value

    _, pull, value = jax.vjp(outputs, inputs, has_aux=True)

    def pullback(slopes: Floats) -> Any:
        return with_zeros(pull(slopes)[0], values)

    return value, pullback
