# SPDX-License-Identifier: Apache-2.0
"""Programs that run once, operation by operation by NumPy.

On small arrays an operation takes NumPy some microseconds, and XLA a third of a
millisecond to compile."""

from __future__ import annotations

from collections.abc import Callable, Iterable
from math import prod
from typing import Any, NamedTuple

import jax
import numpy as np
from jax.core import Tracer
from jax.extend.core import ClosedJaxpr, Jaxpr, Literal

from numpyro_gpaug.math.equations import carried_by
from numpyro_gpaug.math.numpy_rules import RULES, SEVERAL, Rule

# Operations, those of loops as often as they are done, and elements that they make.
MOST, MOST_ELEMENTS = 3000, 2**23
# Operations that are another program, by the name of the parameter that holds it.
_CALLS = {
    "jit": "jaxpr", "pjit": "jaxpr", "remat2": "jaxpr", "checkpoint": "jaxpr",
    "closed_call": "call_jaxpr", "core_call": "call_jaxpr",
    "custom_jvp_call": "call_jaxpr", "custom_vjp_call": "call_jaxpr",
    "custom_vmap_call": "call",
}  # fmt: skip


class _Step(NamedTuple):
    """An operation.

    :param run: from values of its arguments to those of its results.
    :param given: its arguments.
    :param made: its results.
    :param operations: how many it is.
    :param elements: how many they make.
    """

    run: Callable[..., Iterable[Any]]
    given: list[Any]
    made: list[Any]
    operations: int
    elements: int


class Hosted:
    """A program for NumPy.

    :param steps: its operations, but for those that nothing is made of.
    :param consts: values of its constants.
    :param given: its arguments.
    :param made: its results.
    :ivar operations: how many are done.
    :ivar elements: how many they make.
    """

    def __init__(
        self, steps: list[_Step], consts: dict[Any, Any], given: Any, made: Any
    ) -> None:
        self._steps, self._consts = steps, consts
        self._given, self._made = given, made
        self.operations = sum(step.operations for step in steps)
        self.elements = sum(step.elements for step in steps)

    @classmethod
    def of(cls, program: ClosedJaxpr | Jaxpr) -> Hosted | None:
        """``None`` for a program of which NumPy has no rule for some operation, that
        has a loop of unknown length or returns random keys, takes more than
        :data:`MOST` operations, or makes more than :data:`MOST_ELEMENTS`.

        :param program: that JAX has traced.
        """
        found = cls._listed(program)
        if found is None or found.operations > MOST or found.elements > MOST_ELEMENTS:
            return None
        return None if any(_is_key(v.aval) for v in found._made) else found

    @classmethod
    def _listed(cls, program: ClosedJaxpr | Jaxpr) -> Hosted | None:
        jaxpr = program.jaxpr if isinstance(program, ClosedJaxpr) else program
        values = program.consts if isinstance(program, ClosedJaxpr) else []
        if any(isinstance(value, Tracer) for value in values):
            return None
        consts = {v: _numbers(x) for v, x in zip(jaxpr.constvars, values, strict=True)}
        wanted = {v for v in jaxpr.outvars if not isinstance(v, Literal)}
        steps: list[_Step] = []
        for eqn in reversed(jaxpr.eqns):
            if wanted.isdisjoint(eqn.outvars):
                continue
            found = _step(eqn)
            if found is None:
                return None
            steps.append(found)
            wanted |= {v for v in eqn.invars if not isinstance(v, Literal)}
        return cls(steps[::-1], consts, jaxpr.invars, jaxpr.outvars)

    def __call__(self, *args: Any) -> list[np.ndarray]:
        """The results.

        :param args: arrays.
        """
        known = {
            v: _as_said(v.aval, _numbers(x))
            for v, x in zip(self._given, args, strict=True)
        }
        known |= self._consts
        with np.errstate(all="ignore"):
            for step in self._steps:
                results = step.run(*(_value(v, known) for v in step.given))
                for v, x in zip(step.made, results, strict=True):
                    known[v] = _as_said(v.aval, x)
        return [_value(v, known) for v in self._made]


def _value(variable: Any, known: dict[Any, Any]) -> Any:
    if isinstance(variable, Literal):
        return _as_said(variable.aval, variable.val)
    return known[variable]


def _numbers(x: Any) -> np.ndarray:
    if isinstance(x, jax.Array) and jax.dtypes.issubdtype(x.dtype, jax.dtypes.prng_key):
        return RULES["random_wrap"](np.asarray(jax.random.key_data(x)))
    return np.asarray(x)


def _as_said(aval: Any, x: Any) -> np.ndarray:
    """A result in the dtype that JAX gives it."""
    if _is_key(aval):
        return x
    return np.asarray(x).astype(aval.dtype, copy=False)


def _is_key(aval: Any) -> bool:
    return jax.dtypes.issubdtype(aval.dtype, jax.dtypes.extended)


def _step(eqn: Any) -> _Step | None:
    name, params = eqn.primitive.name, eqn.params
    if eqn.effects:
        return None
    if name in _CALLS:
        parts, run = [params[_CALLS[name]]], _called
    elif name == "cond" and "branches_platforms" not in params:
        parts, run = list(params["branches"]), _chosen
    elif name == "scan" and params["length"]:
        parts, run = [params["jaxpr"]], _repeated
    elif name in RULES:
        rule = _one(RULES[name], params, name in SEVERAL)
        elements = sum(prod(v.aval.shape) for v in eqn.outvars)
        return _Step(rule, eqn.invars, eqn.outvars, 1, elements)
    else:
        return None
    inner = [Hosted._listed(part) for part in parts]
    known = [part for part in inner if part is not None]
    if len(known) < len(inner):
        return None
    times = params["length"] if name == "scan" else 1
    operations, elements = (
        times * max(sizes)
        for sizes in zip(
            *((part.operations, part.elements) for part in known), strict=True
        )
    )
    return _Step(run(known, eqn), eqn.invars, eqn.outvars, operations, elements)


def _one(rule: Rule, params: dict[str, Any], several: bool) -> Callable[..., Any]:
    if several:
        return lambda *args: rule(*args, **params)
    return lambda *args: (rule(*args, **params),)


def _called(inner: list[Hosted], eqn: Any) -> Callable[..., Any]:
    return inner[0]


def _chosen(inner: list[Hosted], eqn: Any) -> Callable[..., Any]:
    def run(which: np.ndarray, *args: Any) -> Any:
        return inner[int(np.clip(which, 0, len(inner) - 1))](*args)

    return run


def _repeated(inner: list[Hosted], eqn: Any) -> Callable[..., Any]:
    fixed, carried = carried_by(eqn, eqn.params["jaxpr"].jaxpr)
    length = eqn.params["length"]
    order = range(length)[::-1] if eqn.params["reverse"] else range(length)

    def run(*args: Any) -> Any:
        consts, rows = args[:fixed], args[fixed + carried :]
        carry = list(args[fixed : fixed + carried])
        made: dict[int, list[Any]] = {}
        for i in order:
            found = inner[0](*consts, *carry, *(x[i] for x in rows))
            carry, made[i] = found[:carried], found[carried:]
        columns = zip(*(made[i] for i in range(length)), strict=True)
        return [*carry, *(np.stack(column) for column in columns)]

    return run
