# SPDX-License-Identifier: Apache-2.0
"""Plates of a model: their sizes, and whether data have a row for every member."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any

import jax
from jax.extend.core import Literal
from numpyro import handlers

from numpyro_gpaug.model.calls import check_count
from numpyro_gpaug.model.jaxpr import inner_jaxpr
from numpyro_gpaug.model.structure import Arguments, Plate, Trace

# Operations whose result still is an index of the plate: those before a gather.
_KEPT = {
    "add", "broadcast_in_dim", "convert_element_type", "reshape", "select_n",
    "squeeze",
}  # fmt: skip


def with_whole_sizes(model: Callable[..., Any]) -> Callable[..., Any]:
    """``model``, which raises for plates of sizes that are no whole numbers.

    :param model: a NumPyro model.
    """

    def check(message: dict[str, Any]) -> None:
        if message["type"] == "plate":
            name = message["name"]
            size, chosen = message["args"]
            check_count(f"the size of plate {name!r}", size)
            if chosen is not None:
                check_count(f"subsample_size of plate {name!r}", chosen)
                if chosen > size:
                    raise ValueError(
                        f"plate {name!r} has subsample_size {chosen}, more than its "
                        f"size {size}"
                    )

    return handlers.substitute(model, substitute_fn=check)


@contextmanager
def explained(arguments: Arguments) -> Iterator[None]:
    """Says more of plates that do not have the size of their data.

    :param arguments: the model's arguments.
    """
    try:
        yield
    except (jax.errors.JAXTypeError, jax.errors.JAXIndexError) as error:
        raise TypeError(
            "the model computes the size of something, or an array of NumPy's, from "
            "its array arguments, which are traced: sizes (of a plate, say) are to be "
            "plain numbers, given by keyword or computed outside of the model, and "
            "arrays to be indexed by others are jax.numpy's. JAX says: "
            + str(error).split("\n", 1)[0]
        ) from error
    except ValueError as error:
        if "Incompatible shapes for broadcasting" not in str(error):
            raise
        shapes = [x.shape for x in arguments.arrays]
        raise ValueError(
            f"{error}: does a plate have another size than its data? Arguments of the "
            f"model have shapes {shapes}"
        ) from error


def trace_plates(run: Callable[[Any], Trace], arguments: Arguments) -> dict[str, Plate]:
    """Plates by name, from a trace of the model without arithmetic.

    :param run: the trace, from the arrays among the arguments.
    :param arguments: the model's arguments.
    :raises ValueError: for a plate whose members index an array that has fewer: JAX
        would repeat its last row.
    """
    plates: dict[str, Plate] = {}

    def indices(arrays: Any) -> dict[str, Any]:
        trace = run(arrays)
        found = {k: m for k, m in trace.items() if m["type"] == "plate"}
        values = {k: m["value"] for k, m in found.items()}
        plates.update(
            {k: Plate(m["args"][0], values[k].shape[0]) for k, m in found.items()}
        )
        return values

    with explained(arguments):
        jaxpr = jax.make_jaxpr(indices)(arguments.arrays).jaxpr
    # A dict is flattened by its sorted names.
    members = zip(jaxpr.outvars, sorted(plates), strict=True)
    known = {v: name for v, name in members if not isinstance(v, Literal)}
    _check_gathers(jaxpr, known, {k: p.size for k, p in plates.items()})
    return plates


def _check_gathers(jaxpr: Any, known: dict[Any, str], sizes: dict[str, int]) -> None:
    """Raises for gathers from less than a plate has members.

    :param known: plates by the variables that are indices of them; those found here
        are added.
    """
    for eqn in jaxpr.eqns:
        plates = [None if isinstance(v, Literal) else known.get(v) for v in eqn.invars]
        plate = next((p for p in plates if p is not None), None)
        if plate is None:
            continue
        inner = inner_jaxpr(eqn)
        if inner is not None:
            within = {v: p for v, p in zip(inner.invars, plates, strict=True) if p}
            _check_gathers(inner, within, sizes)
            pairs = zip(eqn.outvars, inner.outvars, strict=True)
            known |= {v: within[w] for v, w in pairs if within.get(w)}
        elif eqn.primitive.name == "gather" and plates[1] is not None:
            shape = eqn.invars[0].aval.shape
            axes = eqn.params["dimension_numbers"].start_index_map
            if any(shape[axis] < sizes[plate] for axis in axes):
                raise ValueError(
                    f"plate {plate!r} has size {sizes[plate]}, but its indices are "
                    f"used on an array of shape {shape}: give the plate the number of "
                    "rows, X.shape[0]"
                )
        elif eqn.primitive.name in _KEPT:
            known[eqn.outvars[0]] = plate
