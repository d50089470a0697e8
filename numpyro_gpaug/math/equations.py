# SPDX-License-Identifier: Apache-2.0
"""Equations of traced programs."""

from __future__ import annotations

from collections.abc import Callable, Iterable
from typing import Any

import jax.numpy as jnp
from jax import Array, lax
from jax.extend.core import Literal

# Reductions to the largest and to the smallest number.
_CHOSEN: dict[str, Any] = {"reduce_max": jnp.argmax, "reduce_min": jnp.argmin}


def walked(
    jaxpr: Any,
    starts: Iterable[Any],
    literal: Callable[[Any], Any],
    equation: Callable[[Any, list[Any]], Iterable[Any]],
    constants: Iterable[Any] = (),
) -> list[Any]:
    """Go through the equations of a jaxpr in order, and return what is known about its
    outputs.

    :param jaxpr: the program.
    :param starts: what is known about its inputs.
    :param literal: returns what is known about a number in the program.
    :param equation: returns what is known about the results of an equation, from what
        is known about its operands.
    :param constants: what is known about its constants.
    """
    known = dict(zip(jaxpr.constvars, constants, strict=True))
    known |= zip(jaxpr.invars, starts, strict=True)

    def read(var: Any) -> Any:
        return literal(var) if isinstance(var, Literal) else known[var]

    for eqn in jaxpr.eqns:
        results = equation(eqn, [read(v) for v in eqn.invars])
        known |= zip(eqn.outvars, results, strict=True)
    return [read(v) for v in jaxpr.outvars]


def carried_by(eqn: Any, body: Any) -> tuple[int, int]:
    """Return where the carry of a scan begins among its operands, and its length.
    Stacked operands have one axis more outside the scan than inside. The parameters of
    the scan state this too, under names that differ between versions of JAX."""

    def stacked(outer: list[Any], inner: list[Any]) -> int:
        pairs = zip(outer, inner, strict=True)
        return sum(a.aval.ndim > b.aval.ndim for a, b in pairs)

    carried = len(eqn.outvars) - stacked(eqn.outvars, body.outvars)
    passed = len(eqn.invars) - stacked(eqn.invars, body.invars)
    return passed - carried, carried


def applied(eqn: Any, operands: list[Any]) -> list[Any]:
    """Apply an equation to values of its operands.

    :param eqn: an equation of a jaxpr.
    :param operands: arrays.
    """
    primitive = eqn.primitive
    if primitive.name in _CHOSEN and jnp.issubdtype(operands[0].dtype, jnp.inexact):
        return [_chosen(operands[0], eqn.params["axes"], _CHOSEN[primitive.name])]
    bound = primitive.get_bind_params(eqn.params)
    # Before JAX 0.10, functions are separate from params.
    subfuns, params = bound if isinstance(bound, tuple) else ((), bound)
    found = primitive.bind(*subfuns, *operands, **params)
    return list(found) if primitive.multiple_results else [found]


def _chosen(x: Array, axes: tuple[int, ...], place: Any) -> Array:
    """Return the largest or smallest numbers along axes, selected by their places.

    JAX's derivative searches for the numbers that equal the result. XLA may round them
    differently when it computes them again: none is equal, and the derivative is NaN,
    or wrong.

    :param x: the numbers.
    :param axes: the axes that are reduced.
    :param place: ``jnp.argmax`` or ``jnp.argmin``.
    """
    others = [a for a in range(x.ndim) if a not in axes]
    x = x.transpose(*others, *axes).reshape(*(x.shape[a] for a in others), -1)
    places = lax.broadcasted_iota(jnp.int32, x.shape, x.ndim - 1)
    return jnp.where(places == place(x, -1, keepdims=True), x, 0).sum(-1)
