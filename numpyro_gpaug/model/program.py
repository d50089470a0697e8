# SPDX-License-Identifier: Apache-2.0
"""Traced programs, one equation after the other, of which parts can be run."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
from jax.extend.core import Literal

from numpyro_gpaug.model.jaxpr import Reader, Value

# Calls that change nothing: what they call may as well stand in their place. Those that
# bring derivatives of their own (``custom_jvp_call``) are kept whole.
_INLINED = {"jit", "pjit", "closed_call", "core_call", "remat", "checkpoint"}

_INDEX_MOVES = {
    "concatenate", "broadcast_in_dim", "reshape", "convert_element_type", "squeeze",
    "expand_dims", "copy", "stack", "transpose",
}  # fmt: skip


class Operation(NamedTuple):
    """An equation between numbered variables.

    :param eqn: of the jaxpr.
    :param operands: numbers of variables, or literals.
    :param results: numbers of variables.
    """

    eqn: Any
    operands: tuple[int | Literal, ...]
    results: tuple[int, ...]


class Gather(NamedTuple):
    """An indexed input.

    :param name: of the input.
    :param sizes: how many places there are, by coordinate of the indices.
    :param indices: the variable that holds them, coordinates last.
    :param raw: variables that hold them before negative ones count from the end.
    """

    name: str
    sizes: tuple[int, ...]
    indices: Any
    raw: tuple[int, ...]

    def bad(self, values: Any) -> str | None:
        """What is wrong with indices, ``None`` if nothing is.

        :param values: from :meth:`extremes`, as numbers.
        """
        lows, highs, least = (np.asarray(x).tolist() for x in values)
        pairs = zip(self.sizes, lows, highs, strict=True)
        for size, low, high in pairs:
            if low < 0 or high >= size:
                return (
                    f"{self.name!r} has {size} members along an axis, codes 0 to "
                    f"{size - 1}, but is indexed by numbers from {low} to {high}"
                )
        if least < 0:
            return (
                f"{self.name!r} is indexed by numbers from {least} on, and negative "
                "ones count from the end (codes of pandas are -1 where missing)"
            )
        return None

    @staticmethod
    def extremes(indices: Any, raw: list[Any]) -> tuple[Any, Any, Any]:
        """The least and largest index by coordinate, and the least before wrapping.

        :param indices: values of the variable.
        :param raw: of those before wrapping.
        """
        # Constants of a jaxpr are no arrays in older releases of JAX.
        indices, raw = jnp.asarray(indices), [jnp.asarray(x) for x in raw]
        flat = indices.reshape(-1, indices.shape[-1])
        least = jnp.stack([jnp.zeros((), int), *(x.min().astype(int) for x in raw)])
        return flat.min(0), flat.max(0), least.min()


class Program:
    """What a function of named arrays computes, written out.

    :param fn: function of one dict of arrays; it is called once. What it closes over
        may be traced.
    :param inputs: arrays, or their shapes, by name.
    """

    def __init__(
        self, fn: Callable[[dict[str, Any]], Any], inputs: dict[str, Any]
    ) -> None:
        self.names = tuple(inputs)
        trace = jax.make_jaxpr(
            lambda *leaves: fn(dict(zip(self.names, leaves, strict=True))),
            return_shape=True,
        )
        closed, shapes = trace(*inputs.values())
        self.operations: list[Operation] = []
        self.avals: list[Any] = []
        self._reader = Reader()
        self.values: list[Value] = []
        self.constants: dict[int, Any] = {}
        starts = [
            self._new(v.aval, self._reader.input(name))
            for v, name in zip(closed.jaxpr.invars, self.names, strict=True)
        ]
        self.inputs = dict(zip(self.names, starts, strict=True))
        outputs = self._write(closed.jaxpr, self._constants(closed), starts)
        self.outputs = jax.tree.unflatten(
            jax.tree.structure(shapes), [Output(x) for x in outputs]
        )
        self.makers = {k: op for op in self.operations for k in op.results}

    def _new(self, aval: Any, value: Value) -> int:
        self.avals.append(aval)
        self.values.append(value)
        return len(self.avals) - 1

    def _constants(self, closed: Any) -> list[int]:
        numbers = []
        pairs = zip(closed.jaxpr.constvars, closed.consts, strict=True)
        for var, value in pairs:
            number = self._new(var.aval, self._reader.constant(var))
            self.constants[number] = value
            numbers.append(number)
        return numbers

    def _write(
        self, jaxpr: Any, constants: list[int], starts: list[Any]
    ) -> list[int | Literal]:
        env: dict[Any, Any] = dict(zip(jaxpr.constvars, constants, strict=True))
        env |= dict(zip(jaxpr.invars, starts, strict=True))

        def read(var: Any) -> int | Literal:
            return var if isinstance(var, Literal) else env[var]

        for eqn in jaxpr.eqns:
            operands = tuple(read(v) for v in eqn.invars)
            inner = eqn.params.get("jaxpr") or eqn.params.get("call_jaxpr")
            if eqn.primitive.name in _INLINED and inner is not None:
                if hasattr(inner, "consts"):
                    results = self._write(
                        inner.jaxpr, self._constants(inner), list(operands)
                    )
                else:
                    results = self._write(inner, [], list(operands))
            else:
                results = self._equation(eqn, operands)
            env.update(zip(eqn.outvars, results, strict=True))
        return [read(v) for v in jaxpr.outvars]

    def _equation(self, eqn: Any, operands: tuple[int | Literal, ...]) -> list[Any]:
        known = [self.value(x) for x in operands]
        found = self._reader.equation(eqn, known)
        results = [
            self._new(v.aval, value)
            for v, value in zip(eqn.outvars, found, strict=True)
        ]
        self.operations.append(Operation(eqn, operands, tuple(results)))
        return results

    def value(self, variable: int | Literal) -> Value:
        """What is known of how a variable depends on the inputs."""
        if isinstance(variable, Literal):
            return self._reader.literal(variable)
        return self.values[variable]

    def depends(self, variable: int | Literal) -> bool:
        """Whether a variable depends on any input."""
        return bool(self.value(variable).state)

    def affine(self, variable: int | Literal) -> bool:
        """Whether it depends on inputs, and affinely on them all together."""
        state = self.value(variable).state
        return bool(state) and all(d.affine for d in state.values())

    def between(self, wanted: Iterable[Any], known: Iterable[int]) -> list[Operation]:
        """The operations that compute some variables from others, in order.

        :param wanted: numbers of variables, or literals.
        :param known: numbers of variables that need no computing.
        """
        needed = {x for x in wanted if not isinstance(x, Literal)}
        stop = {*known, *self.constants, *self.inputs.values()}
        chosen: list[Operation] = []
        for operation in reversed(self.operations):
            if needed.isdisjoint(operation.results) or stop.issuperset(
                operation.results
            ):
                continue
            if needed.intersection(operation.results) <= stop:
                continue
            chosen.append(operation)
            needed |= {x for x in operation.operands if not isinstance(x, Literal)}
        return chosen[::-1]

    def gathers(self) -> Iterator[Gather]:
        """Where inputs are indexed by numbers that depend on none."""
        for eqn, operands, _ in self.operations:
            if eqn.primitive.name != "gather" or self.depends(operands[1]):
                continue
            axes = eqn.params["dimension_numbers"].start_index_map
            shape, slices = eqn.invars[0].aval.shape, eqn.params["slice_sizes"]
            names = tuple(self.value(operands[0]).state)
            sizes = tuple(shape[a] - slices[a] + 1 for a in axes)
            if names and sizes:
                raw = tuple(self._before_wrapping(operands[1]))
                yield Gather(names[-1], sizes, operands[1], raw)

    def reached(self) -> Iterator[tuple[Gather, tuple[Any, Any, Any]]]:
        """Inputs that are indexed, and how far their indices go."""
        for gather in self.gathers():
            indices, *raw = self.run([gather.indices, *gather.raw], {})
            yield gather, gather.extremes(indices, raw)

    def _before_wrapping(self, variable: Any) -> Iterator[int]:
        """Index arrays to which their axis' length is added where they are negative."""
        if isinstance(variable, Literal) or variable not in self.makers:
            return
        eqn, operands, _ = self.makers[variable]
        if eqn.primitive.name == "select_n" and operands[0] in self.makers:
            test, (left, *right), _ = self.makers[operands[0]]
            if test.primitive.name == "lt" and isinstance(right[0], Literal):
                if not isinstance(left, Literal) and self.avals[left].shape:
                    yield left
                return
        if eqn.primitive.name in _INDEX_MOVES:
            for operand in operands:
                yield from self._before_wrapping(operand)

    def run(self, wanted: list[Any], known: dict[int, Any]) -> list[Any]:
        """Values of variables, given those of some others.

        :param wanted: numbers of variables, or literals.
        :param known: values by number; constants are known anyway.
        """
        return execute(self.between(wanted, known), wanted, {**self.constants, **known})


class Output:
    """A leaf of what the function returned: the variable that holds it."""

    def __init__(self, variable: int | Literal) -> None:
        self.variable = variable


def execute(
    operations: list[Operation] | tuple[Operation, ...],
    wanted: list[Any],
    known: dict[int, Any],
) -> list[Any]:
    """Runs operations in order.

    :param operations: see :meth:`Program.between`.
    :param wanted: numbers of variables, or literals.
    :param known: values of all that the operations do not compute.
    """
    env = dict(known)

    def read(variable: Any) -> Any:
        return variable.val if isinstance(variable, Literal) else env[variable]

    for eqn, operands, results in operations:
        env.update(zip(results, applied(eqn, list(map(read, operands))), strict=True))
    return [read(x) for x in wanted]


def applied(eqn: Any, operands: list[Any]) -> list[Any]:
    """What an equation makes of values of its operands.

    :param eqn: of a jaxpr.
    :param operands: arrays.
    """
    primitive = eqn.primitive
    bound = primitive.get_bind_params(eqn.params)
    # Functions apart from params: before JAX 0.10.
    subfuns, params = bound if isinstance(bound, tuple) else ((), bound)
    found = primitive.bind(*subfuns, *operands, **params)
    return list(found) if primitive.multiple_results else [found]
