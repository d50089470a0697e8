# SPDX-License-Identifier: Apache-2.0
"""Loops in a model's program that carry numbers of Gaussian sites from step to step."""

from __future__ import annotations

from collections.abc import Callable, Collection, Iterator
from math import prod
from typing import Any, NamedTuple

from jax import Array
from jax.extend.core import jaxpr_as_fun

from numpyro_gpaug.errors import NotConjugateError
from numpyro_gpaug.math.equations import carried_by
from numpyro_gpaug.model.latents import Grouping, Structure
from numpyro_gpaug.model.program import Program

# The largest numbers of values in the state of a step, and in a block of steps.
WIDEST = 128

# Returns the carry and the outputs of a step, given the constants, the carry, and the
# inputs of the step.
_Step = Callable[..., tuple[list[Array], list[Array]]]


class Loop(NamedTuple):
    """A scan, or a cumulative sum.

    :param steps: sites whose numbers are added to the state. Members are the steps of
        all chains; steps are the last of the axes.
    :param states: places of the state in the carry, and its shapes.
    :param operands: variables, in three groups: those that are the same at all steps,
        the initial carry (empty if it is zero), and the inputs of each step.
    :param carried: variables of the final carry.
    :param stacked: variables of the stacked outputs of the steps.
    :param axis: the axis over steps, of inputs and stacked outputs.
    :param step: the function that computes one step.
    """

    steps: Grouping
    states: tuple[tuple[int, tuple[int, ...]], ...]
    operands: tuple[tuple[Any, ...], tuple[Any, ...], tuple[Any, ...]]
    carried: tuple[Any, ...]
    stacked: tuple[Any, ...]
    axis: int
    step: _Step


def loops(program: Program, structure: Structure) -> Iterator[Loop]:
    """Iterate over loops that may be recurrences of the numbers of Gaussian sites.

    :param program: the program of a model, from standard normal numbers.
    :param structure: the structure of the model.
    """
    shapes = {s.name: s.shape for s in structure.sites}
    for operation in program.operations:
        name, params = operation.eqn.primitive.name, operation.eqn.params
        if name not in _KINDS or params["reverse"]:
            continue
        length, states, loop = _KINDS[name](program, operation)
        entering = names(program, (*loop.operands[0], *loop.operands[2]))
        # A state that is not affine is carried without being part of a chain, because
        # nothing affine depends on it.
        states = [s for s in states if affine(program, s[1], entering)]
        moved = [(k, s) for k, x, s in states if entering & names(program, [x])]
        reached = entering & {
            name for k, x, _ in states for name in names(program, [x])
        }
        added = {k: shape for k, shape in shapes.items() if k in reached}
        for steps in _groupings(added, length, [shape for _, shape in moved]):
            yield loop._replace(steps=steps, states=tuple(moved))


# The number of steps; for each carried value its place, a variable that depends on it,
# and its shape; and the loop.
_Found = tuple[int, list[tuple[int, Any, tuple[int, ...]]], Loop]


def _scanned(program: Program, operation: Any) -> _Found:
    eqn, operands, results = operation
    body = eqn.params["jaxpr"]
    begin, count = carried_by(eqn, body.jaxpr)
    run = jaxpr_as_fun(body)

    def step(*operands: Any) -> tuple[list[Array], list[Array]]:
        found = run(*operands)
        return list(found[:count]), list(found[count:])

    parts = operands[:begin], operands[begin:][:count], operands[begin:][count:]
    carried, stacked = results[:count], results[count:]
    states = [(k, x, program.avals[x].shape) for k, x in enumerate(carried)]
    none = Grouping(())
    loop = Loop(none, (), parts, carried, stacked, 0, step)
    return eqn.params["length"], states, loop


def _summed(program: Program, operation: Any) -> _Found:
    eqn, operands, results = operation
    axis, shape = eqn.params["axis"], program.avals[results[0]].shape

    def step(before: Array, here: Array) -> tuple[list[Array], list[Array]]:
        return [before + here], [before + here]

    states = [(0, results[0], (*shape[:axis], *shape[axis + 1 :]))]
    loop = Loop(Grouping(()), (), ((), (), operands), (), results, axis, step)
    return shape[axis], states, loop


_KINDS = {"scan": _scanned, "cumsum": _summed}


def names(program: Program, variables: Any) -> set[str]:
    """Return the names of the inputs that variables depend on.

    :param program: the program that contains them.
    :param variables: their numbers, or literals.
    """
    return {k for x in variables for k in program.value(x).state}


def affine(program: Program, variable: Any, inputs: Collection[str]) -> bool:
    """Whether a variable is affine in some inputs, or does not depend on them.

    :param program: the program that contains the variable.
    :param variable: its number, or a literal.
    :param inputs: names of the inputs.
    """
    state = program.value(variable).state
    return all(state[k].affine for k in inputs if k in state)


def _groupings(
    sites: dict[str, tuple[int, ...]], length: int, states: list[tuple[int, ...]]
) -> Iterator[Grouping]:
    """Iterate over the ways in which numbers may belong to steps, one for every choice
    of leading axes of the state that are over chains, most axes first. If a step has as
    many numbers as the state, the transitions are between single steps. Otherwise they
    are between blocks, which contain as many steps as the state needs to forget its
    earlier value (:mod:`~numpyro_gpaug.model.links`).

    :param sites: shapes by name.
    :param length: the number of steps of a chain.
    :param states: shapes of the states.
    """
    for axis in range(max(map(len, sites.values()), default=0)):
        over = {k: x for k, x in sites.items() if x[axis : axis + 1] == (length,)}
        each = [(*x[:axis], *x[axis + 1 :]) for x in over.values()]
        if not over:
            continue
        most = min(map(len, (*each, *states)))
        for batch in range(most, -1, -1):
            leading = {x[:batch] for x in (*each, *states)}
            own, carried = (sum(prod(x[batch:]) for x in y) for y in (each, states))
            size = carried - own + 1
            if len(leading) == 1 and 0 < size < length and own * size <= WIDEST:
                places = [k + (k >= axis) for k in range(batch)]
                along = tuple((k, (*places, axis)) for k in over)
                yield Grouping(along, size, -length % size)


def refuse_reversed(program: Program, scanned: Collection[str]) -> None:
    """Raise for Gaussian sites in a scan from the last step to the first.

    :param program: the program of a model.
    :param scanned: sites that are sampled in a scan.
    :raises NotConjugateError: naming the sites.
    """
    for eqn, operands, _ in program.operations:
        if eqn.primitive.name == "scan" and eqn.params["reverse"]:
            if found := sorted(names(program, operands) & set(scanned)):
                raise NotConjugateError(
                    f"{found} are sampled in scan(..., reverse=True), for which "
                    "NumPyro takes values in the order of sampling, but returns "
                    "them in reverse. Scan over reversed inputs instead, xs[::-1]"
                )
