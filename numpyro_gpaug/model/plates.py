# SPDX-License-Identifier: Apache-2.0
"""The plates of a model: their sizes, and whether data have a row for every member."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, NamedTuple

import jax
import numpy as np
from jax.extend.core import Literal
from numpyro import handlers

from numpyro_gpaug.gp.conditional import Conditional
from numpyro_gpaug.math.equations import walked
from numpyro_gpaug.model.arguments import Arguments
from numpyro_gpaug.model.calls import check_count
from numpyro_gpaug.model.jaxpr import COPIES, RESHAPES, called_jaxpr
from numpyro_gpaug.model.structure import Plate, Trace

# Operations before a gather that return the index of a plate unchanged.
_KEPT = RESHAPES | COPIES | {"broadcast_in_dim"}


def with_whole_sizes(model: Callable[..., Any]) -> Callable[..., Any]:
    """Return ``model`` with a check that sizes of plates are whole numbers.

    :param model: a NumPyro model.
    """

    def check(message: dict[str, Any]) -> None:
        if message["type"] == "plate":
            name = message["name"]
            size, chosen = message["args"]
            _check_int(f"the size of plate {name!r}", size)
            if chosen is not None:
                _check_int(f"subsample_size of plate {name!r}", chosen)
                if chosen > size:
                    raise ValueError(
                        f"plate {name!r} has subsample_size {chosen}, more than its "
                        f"size {size}"
                    )

    return handlers.substitute(model, substitute_fn=check)


def _check_int(name: str, value: Any) -> None:
    """Raise unless a size is an integer: 10.0 and True cannot be part of a shape."""
    check_count(name, value)
    if isinstance(value, (bool, np.bool_, float, np.floating)):
        raise ValueError(f"{name} must be an int, got {value!r}")


def trace_plates(run: Callable[[Any], Trace], arguments: Arguments) -> dict[str, Plate]:
    """Return plates by name, from a trace of the model without arithmetic.

    :param run: returns the trace, from the arrays among the arguments.
    :param arguments: the model's arguments.
    :raises ValueError: for a plate whose members index a shorter array (JAX would
        repeat its last row), or an argument with more rows, which would be ignored.
    """
    plates: dict[str, Plate] = {}

    def indices(arrays: Any) -> Any:
        trace = run(arrays)
        found = {k: m for k, m in trace.items() if m["type"] == "plate"}
        values = {k: m["value"] for k, m in found.items()}
        plates.update(
            {k: Plate(m["args"][0], values[k].shape[0]) for k, m in found.items()}
        )
        processes = [m["fn"] for m in trace.values() if "fn" in m]
        called = [f for f in processes if isinstance(f, Conditional)]
        return values, [(f.X, f.inducing) for f in called]

    jaxpr = jax.make_jaxpr(indices)(arguments.arrays).jaxpr
    # A dict is flattened in the order of its names. The inputs of processes follow.
    reading = _Reading(jaxpr, {k: plates[k].size for k in sorted(plates)})
    reading.check_rows()
    return plates


class _Span(NamedTuple):
    """The numbers that a plate's index runs over, perhaps with a constant added."""

    plate: str
    low: int
    high: int


# A condition that is never true.
_NEVER = "never"


class _Reading:
    """The rows of arguments that the indices of plates take in a program.

    :param jaxpr: the program. Its first results are the indices of the plates.
    :param sizes: sizes of the plates, in this order.
    :raises ValueError: for gathers from an axis that is shorter than the plate.
    """

    def __init__(self, jaxpr: Any, sizes: dict[str, int]) -> None:
        self.sizes = sizes
        data = [*jaxpr.invars, *jaxpr.constvars]
        self.shapes = [v.aval.shape for v in data]
        # First and last rows, by the number of an argument, plate and axis.
        self.taken: dict[tuple[int, str, int], list[tuple[int, int]]] = {}
        # Arguments that are also used in other ways.
        self.elsewhere: set[int] = set()
        pairs = zip(map(id, jaxpr.outvars), sizes.items(), strict=False)
        self._spans = {v: _Span(name, 0, size - 1) for v, (name, size) in pairs}
        # Arguments are known by their number, also after elementwise operations.
        starts = [self._spans.get(id(v), i) for i, v in enumerate(data)]
        inputs = len(jaxpr.invars)
        found = self._read(jaxpr, starts[:inputs], starts[inputs:])
        self.elsewhere.update(x for x in found[len(sizes) :] if isinstance(x, int))

    def _read(self, jaxpr: Any, starts: list[Any], constants: list[Any]) -> list[Any]:
        return walked(jaxpr, starts, lambda x: None, self._results, constants)

    def _results(self, eqn: Any, given: list[Any]) -> list[Any]:
        called = called_jaxpr(eqn)
        if called is not None:
            found = self._read(called.jaxpr, given, [None] * len(called.consts))
        else:
            found = [self._result(eqn, given)] * len(eqn.outvars)
        pairs = zip(eqn.outvars, found, strict=True)
        return [self._spans.get(id(v)) if x is None else x for v, x in pairs]

    def _result(self, eqn: Any, given: list[Any]) -> Any:
        if eqn.primitive.name == "gather":
            self._gather(eqn, *given[:2])
            return None
        spans = [x for x in given if isinstance(x, _Span)]
        if spans:
            return _moved(eqn, given, spans[0])
        data = {x for x in given if isinstance(x, int)}
        shapes = [self.shapes[x] for x in data]
        if shapes and shapes == [v.aval.shape for v in eqn.outvars]:
            return data.pop()
        self.elsewhere |= data
        return None

    def _gather(self, eqn: Any, operand: Any, indices: Any) -> None:
        shape = eqn.invars[0].aval.shape
        axes = eqn.params["dimension_numbers"].start_index_map
        if isinstance(indices, _Span) and len(axes) == 1:
            last = indices.high + eqn.params["slice_sizes"][axes[0]] - 1
            if last >= shape[axes[0]]:
                raise ValueError(
                    f"{self._of(indices.plate)} go up to {last} along an axis of "
                    f"length {shape[axes[0]]}, of an array of shape {shape}. Use the "
                    "indices unchanged, and give the plate the length of that axis "
                    "(X.shape[0] for rows)"
                )
            if isinstance(operand, int):
                which = operand, indices.plate, axes[0]
                self.taken.setdefault(which, []).append((indices.low, last))
        elif isinstance(operand, int):
            self.elsewhere.add(operand)

    def check_rows(self) -> None:
        """Raise for arguments that have rows outside a plate's indices.

        :raises ValueError: naming the plate, and the shape of the argument.
        """
        for (data, plate, axis), spans in self.taken.items():
            shape = self.shapes[data]
            covered = 0  # the number of rows from the first one on
            for low, high in sorted(spans):
                covered = max(covered, high + 1) if low <= covered else covered
            if data not in self.elsewhere and covered < shape[axis]:
                raise ValueError(
                    f"{self._of(plate)} are used on an argument of shape {shape}, "
                    "so that its other rows would be ignored. Give the plate the "
                    "number of rows, X.shape[0], or leave rows out before"
                )

    def _of(self, plate: str) -> str:
        return f"plate {plate!r} has size {self.sizes[plate]}, but its indices"


def _moved(eqn: Any, given: list[Any], span: _Span) -> Any:
    """Return the index of a plate after an operation, if it still is one."""
    name = eqn.primitive.name
    if name in _KEPT:
        return span
    if name == "select_n":
        # Negative indices count from the end. These indices are not negative.
        return given[1] if given[0] is _NEVER else None
    constants = [int(v.val) for v in eqn.invars if _is_whole(v)]
    if len(constants) != 1:
        return None
    if name == "lt" and constants == [0] and given[0] is span and span.low >= 0:
        return _NEVER
    if name == "add" or (name == "sub" and given[0] is span):
        by = constants[0] if name == "add" else -constants[0]
        return span._replace(low=span.low + by, high=span.high + by)
    return None


def _is_whole(variable: Any) -> bool:
    if not isinstance(variable, Literal) or np.ndim(variable.val) > 0:
        return False
    return np.issubdtype(np.result_type(variable.val), np.integer)
