# SPDX-License-Identifier: Apache-2.0
r"""The frontier of a log-density: the last affine functions of the Gaussian latents,
before any nonlinear operation.

A density ``log p(y | z)`` that depends on latents through a few affine arrays ("roots",
each with an entry per datum, or one for all data) is a sum over data of functions of as
many numbers, whatever other operations it contains. This is proved from the program of
the density, not by probing: which parts are affine, which variables are the roots, and
that no operation after them mixes data.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from math import prod
from typing import Any, NamedTuple

import jax.numpy as jnp
import numpy as np
from jax import Array
from jax.extend.core import Literal

from numpyro_gpaug.math.equations import applied
from numpyro_gpaug.model.entries import NONE, Entries, Places, partners, places_of
from numpyro_gpaug.model.jaxpr import COPIES, RESHAPES
from numpyro_gpaug.model.listing import Operation, Rule, execute
from numpyro_gpaug.model.program import Program

# Operations between a root and a nonlinear operation: one operand depends on latents,
# and the result has the same entries or copies of them.
_WALKED = RESHAPES | COPIES | {
    "add", "sub", "mul", "div", "neg", "select_n", "broadcast_in_dim",
}  # fmt: skip


@dataclass(frozen=True, eq=False)
class Frontier:
    """The point where a sum of log-densities becomes nonlinear. It is compared by
    identity.

    :param roots: variables that the rest depends on, the smallest first.
    :param avals: their shapes and dtypes.
    :param rest: operations from the roots to the densities.
    :param alike: the root that each variable equals, as a place among the roots.
    :param fixed: variables that the rest reads and that depend on no latent.
    :param outputs: the densities.
    :param scaled: for each root, whether every operation on it first scales it by an
        array. The root may then be a coefficient of a predictor.
    :param columns: the axis along which one variable is cut into two roots; ``None`` if
        each root is a variable of its own.
    """

    roots: tuple[int, ...]
    avals: tuple[Any, ...]
    rest: tuple[Operation, ...]
    alike: dict[int, int]
    fixed: tuple[int, ...]
    outputs: tuple[int | Literal, ...]
    scaled: tuple[bool, ...]
    columns: int | None = None

    def density(
        self, fixed: Sequence[Any], roots: Sequence[Any], rule: Rule = applied
    ) -> list[Any]:
        """Return the densities at values of the roots.

        :param fixed: values of the variables that depend on no latent.
        :param roots: values of the roots, in the shapes that the program gives them.
        :param rule: applies an equation to values of its operands.
        """
        if self.columns is not None:
            roots = [jnp.stack(roots, self.columns)]
        known = dict(zip(self.fixed, fixed, strict=True))
        known |= {k: roots[i] for k, i in self.alike.items()}
        return execute(self.rest, list(self.outputs), known, rule)

    def density_at(self, fixed: Any, predictors: Sequence[Array]) -> list[Array]:
        """Return the densities at values of the predictors.

        :param fixed: values of the variables that depend on no latent.
        :param predictors: values of the roots, flat.
        """
        pairs = zip(predictors, self.avals, strict=True)
        # Inputs of float32 make a predictor of float32, also in a float64 model.
        roots = [x.reshape(like.shape).astype(like.dtype) for x, like in pairs]
        return self.density(fixed, roots)

    def total(self, fixed: Any, predictors: Sequence[Array]) -> Array:
        """Return the sum of :meth:`density_at`."""
        found = self.density_at(fixed, predictors)
        return sum((jnp.sum(x) for x in found), start=jnp.zeros((), found[0].dtype))


def frontier(
    program: Program, outputs: list[int | Literal], columns: int | None = None
) -> Frontier:
    """Return the frontier of the sum of some outputs of a program.

    :param program: the program of a model's densities, as functions of its latents.
    :param outputs: variables, arrays of log-densities.
    :param columns: the axis, of size two, along which the one root is cut into two.
    """
    inputs = program.inputs.values()
    moving = [x for x in outputs if program.depends(x)]
    reached, used = program.between(moving, inputs), program.read_for(moving, inputs)
    # An output that is affine is a root itself, like everything else.
    found = [x for x in outputs if program.affine(x)]
    for operation in reached:
        dependent = [x for x in operation.results if x in used and program.depends(x)]
        if not all(program.affine(x) for x in dependent):
            found += [x for x in operation.operands if program.affine(x)]
    roots: dict[int, int] = {}
    scaled: dict[int, bool] = {}
    for candidate in found:
        root, by_array = _root(program, candidate)
        # Two computations of the same value are one root.
        token = program.values[root].token
        roots.setdefault(token, root)
        scaled[token] = scaled.get(token, True) and by_array
    ordered = sorted(roots, key=lambda token: program.avals[roots[token]].size)
    places = {token: i for i, token in enumerate(ordered)}
    alike = {
        k: places[value.token]
        for k, value in enumerate(program.values)
        if value.state and value.token in places
    }
    rest = tuple(program.between(outputs, alike))
    made = {x for op in rest for x in op.results}
    fixed = program.read_for(outputs, alike) - made - set(alike)
    chosen = tuple(roots[token] for token in ordered)
    if columns is not None:
        chosen = _cut(program, chosen, columns)
    return Frontier(
        chosen, tuple(program.avals[x] for x in chosen), rest, alike,
        tuple(sorted(fixed)), tuple(outputs),
        tuple(scaled[token] for token in ordered), columns,
    )  # fmt: skip


def _cut(program: Program, roots: tuple[int, ...], axis: int) -> tuple[int, int]:
    """Add variables for the two halves of the one root, and return them."""
    (root,) = roots
    index = (slice(None),) * axis

    first = program.appended(lambda x: x[(*index, 0)], root)
    return first, program.appended(lambda x: x[(*index, 1)], root)


class Separation(NamedTuple):
    """The separation of a sum of densities into functions of one entry of each root.

    :param reason: why the sum does not separate, ``None`` if it does.
    :param columns: the axis along which the one root is cut into two, if it is.
    :param indexed: whether indices in the data pair the entries of two roots.
    """

    reason: str | None
    columns: int | None = None
    indexed: bool = False


def separation(
    program: Program,
    outputs: list[int | Literal],
    *,
    traced: bool = False,
    batch: int | None = None,
) -> Separation:
    """Return whether, and how, a sum of densities is a sum over data of functions of
    one or two affine predictors of each datum.

    :param program: the program of a model's densities, as functions of its latents.
    :param outputs: variables, arrays of log-densities.
    :param traced: whether a term that depends on traced indices is assumed to be a sum
        over data, as was proved when these were known.
    :param batch: the number of batch dimensions, if the outputs are the parameters of a
        distribution.
    """
    found = frontier(program, outputs)
    whole = _separated(program, found, traced, batch)
    if whole.reason is None or len(found.roots) > 1:
        return whole
    shape = program.avals[found.roots[0]].shape
    for axis in [a for a, size in enumerate(shape) if size == 2][::-1]:
        cut = _separated(program, frontier(program, outputs, axis), traced, batch)
        if cut.reason is None:
            return cut
    return whole


def _separated(
    program: Program, found: Frontier, traced: bool, batch: int | None
) -> Separation:
    if len(found.roots) > 2:
        return Separation(f"it depends on {len(found.roots)} predictors")
    if any(program.avals[root].dtype.kind == "c" for root in found.roots):
        return Separation("it depends on complex predictors")
    entries, apart = _carried(program, found, batch)
    if not apart:
        return Separation(f"{entries.mixing} mixes data that depend on latents")
    if entries.unchecked and not traced:
        return Separation("which predictor each datum depends on is not known in jit")
    if len(found.roots) < 2:
        return Separation(None)
    first, second = (program.avals[root].size for root in found.roots)
    going, single = partners(entries.pairs, second)
    if first > 1 and not single and not entries.unchecked:
        shapes = [program.avals[root].shape for root in found.roots]
        return Separation(f"it combines entries of predictors of shapes {shapes}")
    same = first == second and not entries.by_data
    same = same and np.array_equal(going, np.arange(second))
    indexed = first > 1 and not same
    return Separation(None, found.columns, indexed)


def index_of(program: Program, found: Frontier, batch: int | None = None) -> Any:
    """Return the entry of the first of two roots that is paired with each entry of the
    second.

    :param program: the program of a model's densities.
    :param found: the frontier of a sum that :func:`separation` found to be indexed.
    :param batch: as in :func:`separation`.
    :return: places (size of the second,).
    """
    entries, _ = _carried(program, found, batch)
    second = program.avals[found.roots[1]].size
    return jnp.asarray(partners(entries.pairs, second)[0])


def single_inputs(program: Program, process: str, variables: Sequence[int]) -> bool:
    """Whether each entry of some variables depends on a process at one input only.

    :param program: the program of a model.
    :param process: its name; its function values have a row for each input.
    :param variables: variables that are affine in it.
    """
    values = program.inputs[process]
    shape = program.avals[values].shape
    rows = places_of(shape[:1]).reshape(-1, *[1] * (len(shape) - 1))
    entries = Entries(program, {values: np.broadcast_to(rows, (1, *shape))})
    entries.run(program.between(variables, program.inputs.values()))
    found = [entries.places(x) for x in variables]
    return not entries.unchecked and all(
        x is None or bool((x >= NONE).all()) for x in found
    )


def _carried(
    program: Program, found: Frontier, batch: int | None
) -> tuple[Entries, bool]:
    """Propagate the places of the roots' entries to the densities. Return them, and
    whether no density mixes several entries."""
    entries = Entries(program, {k: _starts(program, found, k) for k in found.alike})
    entries.run(found.rest)
    if batch is not None and len(found.roots) == 2:
        entries.meet(found.outputs, batch)
    return entries, all([entries.close(x) for x in found.outputs])


def _starts(program: Program, found: Frontier, variable: int) -> Places:
    """Return the places of the entries of a variable that is a root, by root."""
    shape, cut = program.avals[variable].shape, found.columns
    places = np.full((len(found.roots), *shape), NONE, np.int32)
    if cut is None:
        places[found.alike[variable]] = places_of(shape)
        return places
    for i, root in enumerate(found.roots):
        np.moveaxis(places, cut + 1, 1)[i, i] = places_of(program.avals[root].shape)
    return places


def _root(program: Program, variable: Any) -> tuple[int, bool]:
    """Walk back through operations that only reorder, scale or shift one operand.
    Return the variable where they start, and whether one of them scales it by an
    array."""
    scaled = False
    while variable in program.makers:
        eqn, operands, _ = program.makers[variable]
        depends = [x for x in operands if program.depends(x)]
        if len(depends) != 1 or eqn.primitive.name not in _WALKED:
            break
        # A sum with a larger array repeats its entries first, by a broadcast.
        (variable,) = depends
        if eqn.primitive.name in ("mul", "div"):
            pairs = zip(eqn.invars, operands, strict=True)
            others = [v.aval for v, x in pairs if x is not variable]
            scaled |= any(prod(aval.shape) > 1 for aval in others)
    return variable, scaled
