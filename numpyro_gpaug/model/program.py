# SPDX-License-Identifier: Apache-2.0
"""Traced programs, whose parts can be run separately, and the indices they apply to
their inputs."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
from jax import Array
from jax.core import Tracer
from jax.extend.core import Literal

from numpyro_gpaug.math.compiling import once
from numpyro_gpaug.model.arguments import Arguments
from numpyro_gpaug.model.jaxpr import (
    BY_ENTRY,
    COPIES,
    MOVES,
    Leaf,
    Reader,
    jaxpr_and_tree,
)
from numpyro_gpaug.model.listing import Listing, execute
from numpyro_gpaug.model.structure import run_model

_INDEX_MOVES = MOVES | COPIES | {"concatenate", "stack"}


class Gather(NamedTuple):
    """An indexed input.

    :param name: the name of the input.
    :param sizes: the number of places along each coordinate of the indices.
    :param own: the sizes of the axes that are axes of the input itself, and not of a
        value that is computed from it, such as effects that are drawn with a scale.
    """

    name: str
    sizes: tuple[int, ...]
    own: frozenset[int]

    def bad(self, values: Any) -> str | None:
        """Return a description of invalid indices, ``None`` if all are valid.

        :param values: from :meth:`Program.reached`, as numbers.
        """
        lows, highs, least = (np.asarray(x).tolist() for x in values)
        pairs = zip(self.sizes, lows, highs, strict=True)
        for size, low, high in pairs:
            if low < 0 or high >= size:
                numbers = low if low == high else f"numbers from {low} to {high}"
                return (
                    f"{self.name!r} has {size} members along an axis, codes 0 to "
                    f"{size - 1}, but is indexed by {numbers}"
                )
        if least < 0:
            return (
                f"{self.name!r} is indexed by numbers from {least} on, and negative "
                "ones count from the end (pandas codes missing values as -1)"
            )
        return None


# The condition of a ``jnp.where`` that drops entries, such as the effect of a reference
# group: its variable, its value for entries that are kept, and the axes of the entries
# that have no index.
_Kept = tuple[int, bool, tuple[int, ...]]


def _extremes(kept: _Kept | None, indices: Any, *given: Any) -> tuple[Any, Any, Any]:
    """Return the least and largest index by coordinate, and the least before wrapping.

    :param kept: which entries count; ``None`` for all.
    :param indices: the indices, coordinates last.
    :param given: the indices before negative ones are wrapped, and the condition.
    """
    raw = [*given]
    if kept is not None:
        here = (raw.pop() == kept[1]).any(kept[2])
        indices = jnp.where(here[..., None], indices, 0)
        raw = [
            jnp.where(here.reshape(x.shape), x, 0) if x.size == here.size else x
            for x in raw
        ]
    flat = indices.reshape(-1, indices.shape[-1])
    least = jnp.stack([jnp.zeros((), int), *(x.min().astype(int) for x in raw)])
    return flat.min(0), flat.max(0), least.min()


class Program(Listing):
    """The computation of a function of named arrays, as a list of equations.

    :param fn: function of one dict of arrays; it is called once. It may close over
        traced values.
    :param inputs: arrays, or their shapes, by name.
    """

    def __init__(
        self, fn: Callable[[dict[str, Any]], Any], inputs: dict[str, Any]
    ) -> None:
        self.names = tuple(inputs)
        closed, treedef = jaxpr_and_tree(fn, inputs)
        reader = Reader()
        super().__init__(reader)
        starts = [
            self.new(v.aval, reader.input(name))
            for v, name in zip(closed.jaxpr.invars, self.names, strict=True)
        ]
        self.inputs = dict(zip(self.names, starts, strict=True))
        outputs = self.write(closed.jaxpr, self.held(closed), list(starts))
        leaves = [Leaf(self.value(x).state, x) for x in outputs]
        self.outputs = jax.tree.unflatten(treedef, leaves)
        self._returned = {x for x in outputs if not isinstance(x, Literal)}
        self._using: dict[int, list[Any]] = {}
        for operation in self.operations:
            for x in operation.operands:
                if not isinstance(x, Literal):
                    self._using.setdefault(x, []).append(operation)

    def gathers(self) -> Iterator[tuple[Gather, _Kept | None, list[Any]]]:
        """Iterate over the inputs that are indexed by numbers that depend on no input,
        which entries count, and the variables of :func:`_extremes`."""
        for eqn, operands, results in self.operations:
            if eqn.primitive.name != "gather" or self.depends(operands[1]):
                continue
            axes = eqn.params["dimension_numbers"].start_index_map
            shape, slices = eqn.invars[0].aval.shape, eqn.params["slice_sizes"]
            names = tuple(self.value(operands[0]).state)
            sizes = tuple(shape[a] - slices[a] + 1 for a in axes)
            if names and sizes:
                kept = self._kept(results[0])
                raw = [*self._before_wrapping(operands[1]), *(kept or ())[:1]]
                own = frozenset(n for n in sizes if self._from_input(operands[0], n))
                yield Gather(names[-1], sizes, own), kept, [operands[1], *raw]

    def reached(self) -> list[tuple[Gather, tuple[Any, Any, Any]]]:
        """Return the indexed inputs, with the ranges of their indices."""
        gathers = list(self.gathers())
        wanted = [x for *_, variables in gathers for x in variables]
        operations = self.between(wanted, ())

        def extremes(known: dict[int, Any]) -> list[Any]:
            values = iter(execute(operations, wanted, known))
            return [
                _extremes(kept, *(next(values) for _ in variables))
                for _, kept, variables in gathers
            ]

        used = self.read_for(wanted, ())
        known = {k: x for k, x in self.constants.items() if k in used}
        # In one program, because each single operation would compile another one.
        ranges = once(extremes, known) if gathers else []
        return list(zip((gather for gather, *_ in gathers), ranges, strict=True))

    def _from_input(self, variable: Any, size: int) -> bool:
        """Whether an axis of this size is one of an input that a variable is computed
        from: all values between them have an axis of this size."""
        while size in self.avals[variable].shape:
            if variable not in self.makers:
                return True
            operands = self.makers[variable].operands
            moving = {x for x in operands if self.depends(x)}
            if len(moving) != 1:
                return False
            (variable,) = moving
        return False

    def _kept(self, variable: int) -> _Kept | None:
        """Return which entries of the result of a gather count."""
        numbers = self.makers[variable].eqn.params["dimension_numbers"]
        shape = self.avals[variable].shape
        while True:
            using = self._using.get(variable, [])
            if len(using) != 1 or variable in self._returned:
                return None
            eqn, operands, results = using[0]
            if eqn.primitive.name == "select_n" and len(operands) == 3:
                test, *cases = operands
                here = [x == variable for x in cases]
                known = not isinstance(test, Literal) and not self.depends(test)
                if known and sum(here) == 1 and self.avals[test].shape == shape:
                    return test, here[1], numbers.offset_dims
            same = len(results) == 1 and self.avals[results[0]].shape == shape
            if eqn.primitive.name not in BY_ENTRY or not same:
                return None
            (variable,) = results

    def _before_wrapping(self, variable: Any) -> Iterator[int]:
        """Iterate over index arrays whose negative entries get their axis' length
        added."""
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


def check_indices(program: Program) -> None:
    """Raise for codes that no member of a plate has. JAX would silently take the last
    one.

    :param program: the program of a model, with its arguments as constants.
    :raises ValueError: naming the site.
    """
    if any(isinstance(x, Tracer) for x in program.constants.values()):
        return
    for gather, extremes in program.reached():
        if wrong := gather.bad(extremes):
            raise ValueError(
                f"{wrong}. Give its plate the number of groups, and encode them as "
                "0, 1, ... (numpy.unique(group, return_inverse=True)[1])"
            )


def program_of_sites(
    model: Callable[..., Any],
    arguments: Arguments,
    shapes: dict[str, tuple[int, ...]],
    values: dict[str, Any],
    dtype: Any,
) -> Program:
    """Return the program of a model as a function of values of some sites, for the
    indices that it applies to them.

    :param model: the model.
    :param arguments: its arguments.
    :param shapes: shapes of these values, by name; scalars are left out.
    :param values: values of other sites and params, by name.
    :param dtype: the dtype of the values of these sites.
    :return: the program of the values of observed sites, by name.
    """
    arrays = {k: jax.ShapeDtypeStruct(s, dtype) for k, s in shapes.items() if s}

    def observed(given: dict[str, Array]) -> dict[str, Any]:
        at = {**values, **given}
        trace = run_model(model, arguments, jax.random.key(0), at)
        return {k: s["value"] for k, s in trace.items() if s.get("is_observed")}

    return Program(observed, arrays)
