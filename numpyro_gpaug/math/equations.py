# SPDX-License-Identifier: Apache-2.0
"""Equations of traced programs."""

from __future__ import annotations

from typing import Any


def carried_by(eqn: Any, body: Any) -> tuple[int, int]:
    """Where what a scan carries begins among its operands, and how many there are. What
    is stacked has an axis more outside than inside. Its parameters say so too, under
    names that differ between versions of JAX."""

    def stacked(outer: list[Any], inner: list[Any]) -> int:
        pairs = zip(outer, inner, strict=True)
        return sum(a.aval.ndim > b.aval.ndim for a, b in pairs)

    carried = len(eqn.outvars) - stacked(eqn.outvars, body.outvars)
    passed = len(eqn.invars) - stacked(eqn.invars, body.invars)
    return passed - carried, carried


def applied(eqn: Any, operands: list[Any]) -> list[Any]:
    """Apply an equation to values of its operands.

    :param eqn: of a jaxpr.
    :param operands: arrays.
    """
    primitive = eqn.primitive
    bound = primitive.get_bind_params(eqn.params)
    # Functions apart from params: before JAX 0.10.
    subfuns, params = bound if isinstance(bound, tuple) else ((), bound)
    found = primitive.bind(*subfuns, *operands, **params)
    return list(found) if primitive.multiple_results else [found]
