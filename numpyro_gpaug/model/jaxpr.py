# SPDX-License-Identifier: Apache-2.0
"""Proof, from the jaxpr, of how a function depends on its inputs.

A closed-form update needs the likelihood's parameters to be *elementwise affine* in the
latent function values (``-f``, ``f + offset``, ``2 f + X b``). Numerical probes cannot
prove this (a ``clip`` seems affine between its bounds), so the traced program is read.
"""

from __future__ import annotations

import os
from collections.abc import Callable, Hashable
from functools import cache, partial
from importlib import import_module
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
import numpyro
from jax.extend.core import ClosedJaxpr
from jax.test_util import check_vjp

from numpyro_gpaug.math.equations import applied, carried_by, walked


class Dependence(NamedTuple):
    """The dependence of one output on one input.

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


# These tables are the only place that states what an operation does to values.
LINEAR = {
    "add", "sub", "neg", "add_any", "copy", "copy_p", "real", "imag", "conj", "complex",
    "select_n", "reduce_precision", "stop_gradient",
}  # fmt: skip
COPIES = {"copy", "copy_p", "convert_element_type"}
RESHAPES = {"reshape", "squeeze", "expand_dims"}
# Operations that move, repeat and drop entries of one operand.
MOVES = RESHAPES | {"broadcast_in_dim", "transpose", "slice", "rev", "tile"}
_PLACED = MOVES | {
    "gather", "dynamic_slice", "pad", "split", "concatenate", "stack", "unstack",
}  # fmt: skip
SUMS = {"reduce_sum", "cumsum"}
# Functions of all entries along some axes, and the parameter that states these.
ALONG = {
    "reduce_sum": "axes", "reduce_max": "axes", "reduce_min": "axes",
    "reduce_prod": "axes", "reduce_and": "axes", "reduce_or": "axes", "argmax": "axes",
    "argmin": "axes", "cumsum": "axis", "cumlogsumexp": "axis", "cummax": "axis",
    "cummin": "axis", "cumprod": "axis", "sort": "dimension",
}  # fmt: skip
# Products of matrices, with the parameters of ``dot_general``.
PRODUCTS = {"dot_general", "small_product"}
# Operations that are linear in one of two operands, the other fixed.
BILINEAR = PRODUCTS | {"mul", "div", "conv_general_dilated"}
# Operations that are linear in these operands together, the others fixed.
LINEAR_IN = {
    "triangular_solve": (1,), "tridiagonal_solve": (3,), "scatter": (0, 2),
    "scatter-add": (0, 2), "scatter_add": (0, 2), "scatter-sub": (0, 2),
    "scatter-mul": (0,), "scatter_mul": (0,), "dynamic_update_slice": (0, 1),
    "bcoo_dot_general": (2,), "fft": (0,),
    "reduce_window_sum": (0,),
}  # fmt: skip
ELEMENTWISE = {
    "abs", "acos", "acosh", "asin", "asinh", "atan", "atan2", "atanh", "cbrt", "ceil",
    "clamp", "cos", "cosh", "digamma", "erf", "erf_inv", "erfc", "exp", "exp2",
    "expm1", "floor", "integer_pow", "is_finite", "lgamma", "log", "log1p", "logistic",
    "max", "min", "ne", "eq", "ge", "gt", "le", "lt", "le_to", "lt_to", "nextafter",
    "not", "pow", "rem", "round", "rsqrt", "sign", "sin", "sinh", "sqrt", "square",
    "tan", "tanh", "igamma", "igammac", "igamma_grad_a", "bessel_i0e", "bessel_i1e",
    "regularized_incomplete_beta", "polygamma", "zeta", "and", "or", "xor",
    "convert_element_type",
}  # fmt: skip
# Operations whose results have entries that depend on the same entries of operands.
BY_ENTRY = ELEMENTWISE | LINEAR | {"mul", "div"}
# Calls of programs, which compute what the called program computes. A custom derivative
# of a call says nothing about its values.
_PLAIN = {
    "jit", "pjit", "closed_call", "core_closed_call", "core_call", "remat", "remat2",
    "checkpoint",
}  # fmt: skip
OWN_DERIVATIVE = {"custom_jvp_call", "custom_vjp_call", "custom_vjp_call_jaxpr"}

_CALLED = "jaxpr", "call_jaxpr", "fun_jaxpr"

State = dict[str, Dependence]


class Leaf:
    """A leaf of the result of a function: how it depends on the inputs.

    :param state: its dependences, as a whole.
    :param variable: its variable in a :class:`~numpyro_gpaug.model.program.Program`.
    """

    def __init__(self, state: State, variable: Any = None) -> None:
        self.state, self.variable = state, variable


def inputs_of(tree: Any) -> set[str]:
    """Return the names of the inputs that the leaves of a tree depend on.

    :param tree: a tree of :class:`Leaf`.
    """
    return {name for leaf in jax.tree.leaves(tree) for name in leaf.state}


def dependence_tree(fn: Callable[[dict[str, Any]], Any], inputs: dict[str, Any]) -> Any:
    """Return the dependence of every output of ``fn`` on every named input. The
    function is called once.

    :param fn: function of one dict of arrays.
    :param inputs: example arrays or ``jax.ShapeDtypeStruct`` per name.
    :return: the tree that ``fn`` returns, with a :class:`Leaf` for every array. Its
        state has a :class:`Dependence` for each input that reaches the output.
    """
    inputs = dict(sorted(inputs.items()))
    closed, treedef = jaxpr_and_tree(fn, inputs)
    reader = Reader(differentiated=True)
    values = reader.interpret(closed.jaxpr, [reader.input(name) for name in inputs])
    return jax.tree.unflatten(treedef, [Leaf(value.state) for value in values])


def by_place(
    fn: Callable[[Any], Any], tree: Any
) -> tuple[Callable[[dict[str, Any]], Any], dict[str, Any]]:
    """Return a function of a tree of arrays as one of named arrays, and these arrays.
    Their names are their places among the leaves of the tree.

    :param fn: a function of one tree of arrays.
    :param tree: example arrays, or their shapes.
    """
    leaves, treedef = jax.tree.flatten(tree)
    inputs = {str(i): x for i, x in enumerate(leaves)}

    def named(given: dict[str, Any]) -> Any:
        return fn(jax.tree.unflatten(treedef, [given[k] for k in inputs]))

    return named, inputs


def dependence_on_arrays(fn: Callable[[Any], Any], tree: Any) -> Any:
    """Return the dependence of every output of ``fn`` on every array.

    :param fn: a function of one tree of arrays.
    :param tree: example arrays, or their shapes.
    :return: as from :func:`dependence_tree`, with places among the arrays as names.
    """
    return dependence_tree(*by_place(fn, tree))


def jaxpr_and_tree(
    fn: Callable[[dict[str, Any]], Any], inputs: dict[str, Any]
) -> tuple[Any, Any]:
    """Return the closed jaxpr of a function of named arrays, and the tree that the
    function returns. JAX does not see the tree: it would compare the trees of several
    traces, which fails for arrays that are not JAX types.

    :param fn: function of one dict of arrays; it is called once.
    :param inputs: arrays, or their shapes, by name.
    """
    found = []

    def flat(*leaves: Any) -> list[Any]:
        returned, treedef = jax.tree.flatten(fn(dict(zip(inputs, leaves, strict=True))))
        found.append(treedef)
        return returned

    closed = jax.make_jaxpr(flat)(*inputs.values())
    return closed, found[0]


class Value(NamedTuple):
    """The known facts about a variable: how it depends on the inputs, and a token. Two
    variables share a token only if the same operations on the same operands produce
    them."""

    state: State
    token: int


class Reader:
    """An interpreter of a jaxpr. Tokens are interned: they remain small, and they are
    comparable across calls of one inner jaxpr (jit caches these) with different
    operands.

    :param differentiated: whether the function itself is differentiated, as the user
        wrote it. A function with a custom derivative is then not known to be affine.
    """

    def __init__(self, *, differentiated: bool = False) -> None:
        self._tokens: dict[Hashable, int] = {}
        self._differentiated = differentiated

    def token(self, *key: Hashable) -> int:
        """Return the token of a structural key."""
        return self._tokens.setdefault(key, len(self._tokens))

    def input(self, name: str) -> Value:
        """Return the value of an input."""
        return Value({name: Dependence(self.token("input"), None)}, self.token(name))

    def constant(self, var: Any) -> Value:
        """Return the value of a constant, which differs from all other values."""
        return Value({}, self.token("constant", id(var)))

    def literal(self, var: Any) -> Value:
        """Return the value of a number in the program."""
        return Value({}, self.token("literal", str(var.val), str(var.aval)))

    def interpret(self, jaxpr: Any, starts: list[Value]) -> list[Value]:
        """Return the values of the outputs of ``jaxpr``, given the values of its
        inputs."""
        constants = map(self.constant, jaxpr.constvars)
        return walked(jaxpr, starts, self.literal, self.equation, constants)

    def equation(self, eqn: Any, operands: list[Value]) -> list[Value]:
        """Return the values of the results of one equation."""
        if eqn.primitive.name == "optimization_barrier":
            return operands
        called = called_jaxpr(eqn)
        states = [value.state for value in operands]
        if called is not None:
            results = self.interpret(called.jaxpr, operands)
            name = eqn.params.get("name")
            if self._differentiated and eqn.primitive.name in OWN_DERIVATIVE:
                name = called_name(eqn)
                # Without a forward derivative, a function cannot be linearised.
                forward = eqn.primitive.name == "custom_jvp_call"
                if not forward or has_other_derivative(eqn):
                    results = [
                        x._replace(state=_nonlinear(x.state, name)) for x in results
                    ]
            return [
                value._replace(state=_renamed(value.state, states, name))
                for value in results
            ]
        key = _key(eqn, operands)
        if eqn.primitive.name == "scan":
            _, found = self.step(eqn, operands)
        elif eqn.primitive.name == "cond":
            found = self._conditional(eqn, operands)
        else:
            state = self._primitive(eqn, operands) if any(states) else {}
            found = [state] * len(eqn.outvars)
            if len(found) > 1:
                found = [self._moved(x, ("output", k)) for k, x in enumerate(found)]
        return [Value(state, self.token(*key, k)) for k, state in enumerate(found)]

    def step(self, eqn: Any, operands: list[Value]) -> tuple[list[Value], list[State]]:
        """Return the values at the start of a step of a scan, and how its outputs
        depend on the inputs. The step is read repeatedly until the dependences of the
        carry stop growing. Entries count as mixed."""
        body = eqn.params["jaxpr"].jaxpr
        begin, count = carried_by(eqn, body)
        key = _key(eqn, operands)
        states = [_mixed(value.state, None) for value in operands]
        while True:
            starts = [
                Value(state, self.token(*key, "step", k))
                for k, state in enumerate(states)
            ]
            found = [_mixed(v.state, None) for v in self.interpret(body, starts)]
            carried = states[begin : begin + count]
            after = [_join(list(x)) for x in zip(carried, found, strict=False)]
            if after == carried:
                return starts, found
            states[begin : begin + count] = after

    def _conditional(self, eqn: Any, operands: list[Value]) -> list[State]:
        """Return the states of the results of a conditional: affine if all branches
        are, and the condition does not depend on the inputs."""
        index, *given = operands
        branches = eqn.params["branches"]
        found = [self.interpret(branch.jaxpr, given) for branch in branches]
        chosen = _mixed(index.state, "cond")
        each = zip(*found, strict=True)
        return [_join([chosen, *(value.state for value in x)]) for x in each]

    def _primitive(self, eqn: Any, operands: list[Value]) -> State:
        name = eqn.primitive.name
        states = [value.state for value in operands]
        joined = _join(states)
        if name in ("concatenate", "stack"):
            return self._side_by_side(eqn, operands)
        if name in _PLACED and (name == "pad" or not any(states[1:])):
            indices = tuple(value.token for value in operands[1:])
            return self._moved(joined, (name, _static(eqn), indices))
        if name not in BY_ENTRY:
            joined = _mixed(joined, None)
        stopped = name == "stop_gradient" and self._differentiated
        moving = {k for k, state in enumerate(states) if state}
        if is_linear(eqn, moving) and not stopped:
            return joined
        return _nonlinear(joined, "where" if name == "select_n" else name)

    def _moved(self, state: State, move: Hashable) -> State:
        return {
            key: Dependence(
                None if d.alignment is None else self.token("moved", d.alignment, move),
                d.nonlinear,
            )
            for key, d in state.items()
        }

    def _side_by_side(self, eqn: Any, operands: list[Value]) -> State:
        """Return the state of a concatenation, in which each output element still
        depends on one input element."""
        states, none = [value.state for value in operands], Dependence(-1, None)
        joined = _join(states)
        for key, d in joined.items():
            pieces = tuple(state.get(key, none).alignment for state in states)
            whole = self.token("pieces", _static(eqn), pieces)
            joined[key] = Dependence(None if None in pieces else whole, d.nonlinear)
        return joined


def is_linear(eqn: Any, moving: set[int]) -> bool:
    """Whether an operation is affine in some of its operands together.

    :param eqn: its equation.
    :param moving: the places of these operands.
    """
    name, params = eqn.primitive.name, eqn.params
    if name == "select_n":
        return 0 not in moving
    if name == "convert_element_type":
        return bool(jnp.issubdtype(params["new_dtype"], jnp.inexact))
    if name == "custom_linear_solve":
        return min(moving) >= sum(params["const_lengths"])
    if name in BILINEAR:
        return len(moving) == 1 and not (name == "div" and 1 in moving)
    if name == "integer_pow":
        return params["y"] == 1
    return name in LINEAR | SUMS or moving <= set(LINEAR_IN.get(name, ()))


def axes_of(eqn: Any) -> tuple[int, ...]:
    """Return the axes of an operation of :data:`ALONG`."""
    axes = eqn.params[ALONG[eqn.primitive.name]]
    return axes if isinstance(axes, tuple) else (axes,)


def called_jaxpr(eqn: Any) -> ClosedJaxpr | None:
    """Return the jaxpr that an equation calls with its own operands, or ``None``."""
    if eqn.primitive.name not in _PLAIN | OWN_DERIVATIVE:
        return None
    params = eqn.params
    (found, *_) = (params[k] for k in _CALLED if k in params)
    return found if isinstance(found, ClosedJaxpr) else ClosedJaxpr(found, ())


def called_name(eqn: Any) -> str:
    """Return the name of the function that a call equation calls."""
    found = getattr(_debug_info(eqn), "func_name", None)
    return found or eqn.params.get("name", eqn.primitive.name)


def _debug_info(eqn: Any) -> Any:
    called = called_jaxpr(eqn)
    return called and getattr(called.jaxpr, "debug_info", None)


@cache
def _libraries() -> tuple[str, ...]:
    """Return the folders of code that does not belong to the user."""
    modules = jax, numpyro, import_module(__name__.partition(".")[0]), os
    return tuple(os.path.dirname(str(module.__file__)) for module in modules)


def has_other_derivative(eqn: Any) -> bool:
    """Whether an equation calls a user's function with a custom derivative that differs
    from the derivative of its values."""
    if eqn.primitive.name not in OWN_DERIVATIVE:
        return False
    path = str(getattr(_debug_info(eqn), "func_filename", None))
    return not path.startswith(_libraries()) and differs(eqn)


def source_of(eqn: Any) -> str:
    """Return the location of an equation, `` (model.py:12)``: the innermost frame of
    the user's own code; empty if there is none."""
    traceback = eqn.source_info.traceback
    for frame in traceback.frames if traceback is not None else ():
        if not frame.file_name.startswith(_libraries()):
            return f" ({os.path.basename(frame.file_name)}:{frame.line_num})"
    return ""


def _renamed(state: State, operands: list[State], name: str | None) -> State:
    """Return a state that names the user's function (``clip``), not its first primitive
    (``max``)."""
    if name is None or name.startswith(("<", "_")):
        return state
    before = _join(operands)
    return {
        key: Dependence(
            d.alignment, name if d.nonlinear and before[key].affine else d.nonlinear
        )
        for key, d in state.items()
    }


def _key(eqn: Any, operands: list[Value]) -> tuple[Hashable, ...]:
    """Return what determines the results of an equation."""
    tokens = tuple(value.token for value in operands)
    return eqn.primitive.name, _static(eqn), tokens


def _static(eqn: Any) -> str:
    return str(sorted((k, str(v)) for k, v in eqn.params.items()))


def _join(states: list[State]) -> State:
    joined: State = {}
    for state in states:
        for key, new in state.items():
            old = joined.get(key, new)
            alignment = old.alignment if old.alignment == new.alignment else None
            joined[key] = Dependence(alignment, old.nonlinear or new.nonlinear)
    return joined


def _nonlinear(state: State, op: str) -> State:
    return {key: Dependence(d.alignment, d.nonlinear or op) for key, d in state.items()}


def _mixed(state: State, op: str | None) -> State:
    return {key: Dependence(None, d.nonlinear or op) for key, d in state.items()}


# The number of points at which derivatives are compared, the step of finite
# differences, and the largest relative difference.
_POINTS, _STEP, _FAR = 3, 0.01, 0.05


def differs(eqn: Any) -> bool:
    """Whether a call's own derivative (``jax.custom_jvp``, ``custom_vjp``) differs from
    the derivative of its values, at each of some random points.

    The expectation of a density is differentiated through custom derivatives. A
    derivative that intentionally differs, as in straight-through estimators or clipped
    gradients, would lead a fit away from the maximum of its bound.

    :param eqn: an equation of a jaxpr.
    """
    rng = np.random.default_rng(0)
    return all(_differs(eqn, rng) for _ in range(_POINTS))


def _differs(eqn: Any, rng: np.random.Generator) -> bool:
    """Whether the two differ at a random point, in a random direction."""
    at = [
        jnp.asarray(rng.uniform(0.2, 0.8, a.shape), a.dtype)
        if jnp.issubdtype(a.dtype, jnp.floating)
        else jnp.ones(a.shape, a.dtype)
        for a in (v.aval for v in eqn.invars)
    ]
    moving = [i for i, x in enumerate(at) if jnp.issubdtype(x.dtype, jnp.floating)]

    def value(*moved: Any) -> list[Any]:
        given = dict(enumerate(at)) | dict(zip(moving, moved, strict=True))
        found = applied(eqn, [*given.values()])
        return [x for x in found if jnp.issubdtype(x.dtype, jnp.floating)]

    start = tuple(at[i] for i in moving)
    try:
        check_vjp(value, partial(jax.vjp, value), start, _FAR**2, _FAR, _STEP)
    except AssertionError:
        return True
    return False
