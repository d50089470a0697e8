# SPDX-License-Identifier: Apache-2.0
"""Proof, from the jaxpr, of how a function depends on its inputs.

A closed-form update needs the likelihood's parameters to be *elementwise affine* in the
latent function values (``-f``, ``f + offset``, ``2 f + X b``). Numeric probes cannot
prove that (a ``clip`` looks affine between its bounds), so the traced program is read.
"""

from __future__ import annotations

from collections.abc import Callable, Hashable
from typing import Any, NamedTuple

import jax
from jax.extend.core import Literal


class Dependence(NamedTuple):
    """How one output depends on one input.

    :param alignment: which element of the input each output element depends on, as a
        token (equal tokens, equal maps); ``None`` when several elements are mixed.
    :param nonlinear: the first operation that is not affine, or ``None``.
    """

    alignment: Hashable | None
    nonlinear: str | None

    @property
    def elementwise(self) -> bool:
        """Whether each output element depends on at most one input element."""
        return self.alignment is not None

    @property
    def affine(self) -> bool:
        """Whether the dependence is affine."""
        return self.nonlinear is None


_LINEAR = {"add", "sub", "neg", "add_any", "copy", "copy_p", "real", "select_n"}
_MOVES = {
    "broadcast_in_dim", "reshape", "transpose", "squeeze", "expand_dims", "slice",
    "rev", "gather", "dynamic_slice", "pad", "split", "concatenate",
}  # fmt: skip
_SUMS = {"reduce_sum", "cumsum", "dot_general"}
_ELEMENTWISE = {
    "abs", "acos", "acosh", "asin", "asinh", "atan", "atan2", "atanh", "cbrt", "ceil",
    "clamp", "cos", "cosh", "digamma", "erf", "erf_inv", "erfc", "exp", "exp2",
    "expm1", "floor", "integer_pow", "is_finite", "lgamma", "log", "log1p", "logistic",
    "max", "min", "ne", "eq", "ge", "gt", "le", "lt", "nextafter", "not", "pow",
    "rem", "round", "rsqrt", "sign", "sin", "sinh", "sqrt", "square", "tan", "tanh",
    "igamma", "igammac", "bessel_i0e", "bessel_i1e", "regularized_incomplete_beta",
    "and", "or", "xor", "convert_element_type",
}  # fmt: skip

State = dict[str, Dependence]


def dependences(
    fn: Callable[[dict[str, Any]], Any], inputs: dict[str, Any]
) -> list[State]:
    """The dependence of every output leaf of ``fn`` on every named input.

    :param fn: function of one dict of arrays.
    :param inputs: example arrays or ``jax.ShapeDtypeStruct`` per name.
    :return: one dict per output leaf (in ``jax.tree`` order); an input absent from it
        does not reach that output.
    """
    names = sorted(inputs)
    closed = jax.make_jaxpr(lambda *leaves: fn(dict(zip(names, leaves, strict=True))))(
        *(inputs[name] for name in names)
    )
    starts: list[State] = [{name: Dependence((), None)} for name in names]
    return _interpret(closed.jaxpr, starts)


def _interpret(jaxpr: Any, starts: list[State]) -> list[State]:
    env: dict[Any, State] = dict(zip(jaxpr.invars, starts, strict=True))

    def read(var: Any) -> State:
        return {} if isinstance(var, Literal) else env.get(var, {})

    for eqn in jaxpr.eqns:
        states = [read(var) for var in eqn.invars]
        if any(states):
            outputs = _equation(eqn, states)
            env.update(zip(eqn.outvars, outputs, strict=True))
    return [read(var) for var in jaxpr.outvars]


def _equation(eqn: Any, states: list[State]) -> list[State]:
    inner = _inner_jaxpr(eqn)
    if inner is not None:
        results = _interpret(inner, states)
        return [_renamed(state, eqn.params.get("name")) for state in results]
    state = _primitive(eqn, states)
    return [
        _moved(state, ("output", k)) if len(eqn.outvars) > 1 else state
        for k in range(len(eqn.outvars))
    ]


def _inner_jaxpr(eqn: Any) -> Any:
    if eqn.primitive.name in ("while", "scan", "cond"):
        return None
    for value in eqn.params.values():
        jaxpr = getattr(value, "jaxpr", value)
        invars = getattr(jaxpr, "invars", None)
        if invars is not None and len(invars) == len(eqn.invars):
            return jaxpr
    return None


def _renamed(state: State, name: str | None) -> State:
    """Names the user's function (``clip``) rather than its first primitive (``max``)."""
    if name is None or name.startswith("<") or name.startswith("_"):
        return state
    return {
        key: Dependence(d.alignment, name if d.nonlinear else None)
        for key, d in state.items()
    }


def _primitive(eqn: Any, states: list[State]) -> State:
    name = eqn.primitive.name
    if name in _MOVES and (name in ("pad", "concatenate") or not any(states[1:])):
        if name == "concatenate":
            return _concatenated(states)
        return _moved(_join(states), (name, _static(eqn)))
    if name in _SUMS and sum(bool(state) for state in states) == 1:
        return _mixed(_join(states), None)
    if name == "mul" or name == "div":
        numerator_only = name == "mul" or not states[1]
        if numerator_only and not (states[0] and states[1]):
            return _join(states)
        return _nonlinear(_join(states), name)
    if name == "convert_element_type":
        kept = jax.numpy.issubdtype(eqn.params["new_dtype"], jax.numpy.inexact)
        return _join(states) if kept else _nonlinear(_join(states), name)
    if name == "select_n" and states[0]:
        return _nonlinear(_join(states), "where")
    if name in _LINEAR:
        return _join(states)
    if name == "integer_pow" and eqn.params["y"] == 1:
        return _join(states)
    if name in _ELEMENTWISE:
        return _nonlinear(_join(states), name)
    return _mixed(_nonlinear(_join(states), name), name)


def _static(eqn: Any) -> Hashable:
    constants = tuple(id(var) for var in eqn.invars[1:])
    return (str(sorted((k, str(v)) for k, v in eqn.params.items())), constants)


def _join(states: list[State]) -> State:
    joined: State = {}
    for state in states:
        for key, new in state.items():
            old = joined.get(key, new)
            alignment = old.alignment if old.alignment == new.alignment else None
            joined[key] = Dependence(alignment, old.nonlinear or new.nonlinear)
    return joined


def _moved(state: State, move: Hashable) -> State:
    return {
        key: Dependence(
            None if d.alignment is None else (d.alignment, move), d.nonlinear
        )
        for key, d in state.items()
    }


def _concatenated(states: list[State]) -> State:
    """Pieces side by side keep each output on one input element."""
    joined = _join(states)
    for key, d in joined.items():
        pieces = tuple(state[key].alignment if key in state else "" for state in states)
        joined[key] = Dependence(None if None in pieces else pieces, d.nonlinear)
    return joined


def _nonlinear(state: State, op: str) -> State:
    return {key: Dependence(d.alignment, d.nonlinear or op) for key, d in state.items()}


def _mixed(state: State, op: str | None) -> State:
    return {key: Dependence(None, d.nonlinear or op) for key, d in state.items()}
