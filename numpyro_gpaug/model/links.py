# SPDX-License-Identifier: Apache-2.0
r"""Transitions between the steps of a model: autoregressions, random walks, trends.

A scan carries a state from step to step and adds numbers of Gaussian sites to it,
:math:`c_t = F_t c_{t-1} + B_t z_t + ...`; the program was proved to be affine. With
numbers :math:`x_t = B_t^{-1} F_t B_{t-1} x_{t-1} + z_t` in place of the standard normal
ones, the state is :math:`B_t x_t`, apart from its initial value: whatever depends on a
state depends on one step. The Jacobians F and B, and so the transition matrices (links)
between steps, are functions of the hyperparameters and have derivatives. Rounding of
the links does no harm: numbers that follow these links have exactly the distribution
that the links define, since the links only choose the coordinates.

A state may contain more numbers than are added to it: the state of an autoregression of
order p is its last p levels, and that of a seasonal component is its last season. The
new part of it, :math:`f_t = B_t^+ c_t`, with a left inverse of B, has standard normal
noise, too. The remainder, :math:`(I - B_t B_t^+) F_t c_{t-1}`, is older. If products of
m of the matrices :math:`M_t = (I - B_t B_t^+) F_t` are zero, a state consists of the
last m new numbers, and these are an autoregression of order m,

.. math:: c_t = \sum_{i=0}^{m-1} W_{t,i} f_{t-i}, \quad
    f_t = z_t + B_t^+ F_t \sum_{i=1}^m W_{t-1,i-1} f_{t-i}, \quad
    W_{t,i} = M_t W_{t-1,i-1}, \quad W_{t,0} = B_t.

In a block of m steps, :math:`f = L f + U f_{\mathrm{before}} + z` with L strictly lower
triangular, so that the links between blocks :math:`x = (I - L) f` are :math:`U (I -
L_{\mathrm{before}})^{-1}`. If a step adds as many numbers as the state has, m is one.
"""

from __future__ import annotations

from collections.abc import Callable, Collection, Iterator
from math import prod
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
from jax import Array, lax
from jax.extend.core import jaxpr_as_fun

from numpyro_gpaug.errors import NotConjugateError
from numpyro_gpaug.math import small
from numpyro_gpaug.math.equations import carried_by
from numpyro_gpaug.math.recurrences import step_before
from numpyro_gpaug.model.affine import relative
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


class Links(NamedTuple):
    """The transitions between the steps of a loop, in blocks of m steps with R numbers
    each.

    :param values: transition matrices from each block to the next, (chains, blocks, R,
        R); zero at the start of a chain.
    :param loadings: W, the dependence of states on the new numbers of their step and of
        earlier ones, (m, chains, steps, D, R / m).
    :param inverse: the inverse of ``I - L``, (chains, blocks, R, R).
    :param misfit: the error, relative to the size of the terms, of two assumptions:
        each step depends on the previous step alone, and each number is added to one
        step.
    """

    values: Array
    loadings: Array
    inverse: Array
    misfit: Array


class Declared(NamedTuple):
    """The states of a process, in place of the standard normal numbers behind them.

    :param steps: the site of these numbers; its first axis is over steps.
    :param variable: the variable of the states in the program.
    :param values: the transitions between them, (1, steps, R, 2 R + 1).
    """

    steps: Grouping
    variable: int
    values: Array

    @property
    def links(self) -> Links:
        """The transitions between the steps."""
        none: Any = None
        zero = jnp.zeros((), self.values.dtype)
        return Links(self.values, none, none, zero)

    def results(
        self, numbers: dict[str, Array], known: dict[int, Array]
    ) -> dict[int, Array]:
        """Return the states, by variable: these are the numbers that follow the links.

        :param numbers: the numbers by site.
        :param known: inputs of the program, and the outputs of other loops.
        """
        ((name, _),) = self.steps.sites
        return {self.variable: numbers[name]}


class Chained:
    """A loop of a model's program, at given values of the inputs of its steps.

    :param program: the program of a model, from standard normal numbers.
    :param structure: the structure of the model.
    :param loop: a loop from :func:`~numpyro_gpaug.model.links.loops`.
    :param known: the inputs of the program, at which the loop is linearised.
    """

    def __init__(
        self,
        program: Program,
        structure: Structure,
        loop: Loop,
        known: dict[int, Array],
    ) -> None:
        self._program, self._structure, self._loop = program, structure, loop
        self._known = known
        self._sites = [name for name, _ in loop.steps.sites]
        # One step at a time.
        self._single = Grouping(loop.steps.sites)
        self._shape = *structure.along(self._single), structure.each(self._single)
        # Outputs of steps that depend affinely on the standard normal variables.
        self._moving = [
            k
            for k, x in enumerate(loop.stacked)
            if not names(program, [x]).isdisjoint(self._sites)
            and affine(program, x, self._sites)
        ]
        self._push = self._linearised()
        self.links = self._links()

    def _linearised(self) -> Callable[..., Any]:
        """Return the derivative of the states, (steps, ...), and of the outputs of the
        steps, in the previous states and the numbers by site."""
        loop, dtype = self._loop, self._structure.dtype
        same, start, own = self._operands({})
        start = start or [jnp.zeros(shape, dtype) for _, shape in loop.states]

        def carry(before: list[Any], own: list[Any]) -> tuple[list[Any], list[Any]]:
            return loop.step(*same, *before, *own)[0], before

        _, length, _ = self._shape
        _, before = lax.scan(carry, start, own, length)

        def after(moved: list[Array], z: dict[str, Array]) -> tuple[Any, Any]:
            same, _, own = self._operands(z)

            def step(before: Any, own: Any, moved: list[Array]) -> tuple[Any, Any]:
                carried = list(before)
                for (k, _), x in zip(loop.states, moved, strict=True):
                    carried[k] = before[k] + x
                new, left = loop.step(*same, *carried, *own)
                return [new[k] for k, _ in loop.states], [left[k] for k in self._moving]

            return jax.vmap(step)(before, own, moved)

        none = [jnp.zeros((length, *shape), dtype) for _, shape in loop.states]
        zeros = jnp.zeros(self._shape, dtype)
        return jax.linearize(after, none, self._numbers(zeros))[1]

    def _operands(self, z: dict[str, Array]) -> tuple[list[Any], list[Any], list[Any]]:
        """Return the operands of the loop. The inputs of steps have the axis over steps
        first."""
        known = self._known | {self._program.inputs[k]: x for k, x in z.items()}
        found: list[list[Any]] = []
        for variables in self._loop.operands:
            found.append(self._program.run(list(variables), known))
        same, start, own = found
        return same, start, [jnp.moveaxis(x, self._loop.axis, 0) for x in own]

    def _states(self, flat: Array) -> list[Array]:
        """Return numbers (chains, steps, D) in the shapes of states."""
        chains, length, _ = self._shape
        shapes = [shape for _, shape in self._loop.states]
        ends = np.cumsum([np.prod(shape, dtype=int) // chains for shape in shapes])
        parts = jnp.split(jnp.moveaxis(flat, 1, 0), ends[:-1], -1)
        pairs = zip(parts, shapes, strict=True)
        return [x.reshape(length, *shape) for x, shape in pairs]

    def _flat(self, states: list[Array]) -> Array:
        """Return the inverse of :meth:`_states`."""
        chains, length, _ = self._shape
        parts = [x.reshape(length, chains, -1) for x in states]
        return jnp.moveaxis(jnp.concatenate(parts, -1), 0, 1)

    def _numbers(self, flat: Array) -> dict[str, Array]:
        """Return numbers (chains, steps, R / m) by site."""
        each = flat.reshape(-1, flat.shape[-1])
        placed = self._structure.placed(self._single, each)
        return {name: placed[name] for name in self._sites}

    def _links(self) -> Links:
        carried, added, misfit = self._jacobians()
        left = small.product(small.inverse(small.product(added.mT, added)), added.mT)
        new = small.product(left, carried)
        shares, lags = [added], []
        for _ in range(self._loop.steps.size):
            before = step_before(shares[-1])
            lags.append(small.product(new, before))
            moved = small.product(carried, before)
            shares.append(moved - small.product(added, lags[-1]))
        loadings, beyond = jnp.stack(shares[:-1]), shares[-1]
        if len(lags) > 1:
            terms = jnp.abs(loadings).sum((0, -1), keepdims=True)[0]
            misfit = jnp.maximum(misfit, relative(beyond, terms))
        own, before = self._blocks(jnp.stack(lags))
        eye = jnp.eye(own.shape[-1], dtype=own.dtype)
        inverse = small.inverse_lower(eye - own)
        order = self._order
        values = small.product(before, step_before(inverse))
        values = values[..., order[:, None], order]
        return Links(values, loadings, inverse, misfit + 0 * values.sum())

    def _jacobians(self) -> tuple[Array, Array, Array]:
        """Return F, (chains, steps, D, D), B, (chains, steps, D, R / m), and the error
        of assuming that states depend on these alone."""
        (chains, length, each), rng = self._shape, np.random.default_rng(0)
        sizes = [np.prod(shape, dtype=int) for _, shape in self._loop.states]
        carried, dtype = sum(sizes) // chains, self._structure.dtype

        def moved(state: Array, number: Array) -> Array:
            return self._flat(self._push(self._states(state), self._numbers(number))[0])

        # One direction at a time, and all at once in a random direction.
        both = carried + each
        basis = np.eye(both)[:, None, None]
        ones = np.broadcast_to(basis, (both, chains, length, both))
        random = rng.normal(size=(1, chains, length, both))
        asked = jnp.asarray(np.concatenate([ones, random]), dtype)
        found = jax.vmap(moved)(asked[..., :carried], asked[..., carried:])
        columns, after = jnp.moveaxis(found[:-1], 0, -1), found[-1]
        terms = columns * asked[-1][..., None, :]
        misfit = relative(after - terms.sum(-1), jnp.abs(terms).sum(-1))
        return columns[..., :carried], columns[..., carried:], misfit

    def _blocks(self, lags: Array) -> tuple[Array, Array]:
        """Return L and U, (chains, blocks, R, R), in the order of steps.

        :param lags: the coefficients of new numbers on earlier ones, (m, chains, steps,
            r, r).
        """
        size, each = len(lags), lags.shape[-1]
        lags = self._whole(jnp.moveaxis(lags, 0, 2))
        # (chains, blocks, step, lag, r, r) become rows of steps and columns of two
        # blocks.
        apart = np.arange(size)[:, None] + size - np.arange(2 * size)
        seen = (apart >= 1) & (apart <= size)
        rows = jnp.arange(size)[:, None]
        placed = lags[:, :, rows, np.where(seen, apart, 1) - 1]
        placed = jnp.where(seen[..., None, None], placed, 0)
        whole = jnp.moveaxis(placed, -2, -3)
        whole = whole.reshape(*whole.shape[:2], size * each, 2 * size * each)
        return whole[..., size * each :], whole[..., : size * each]

    def _whole(self, along: Array) -> Array:
        """Return arrays of steps, (chains, steps, ...), in blocks of m steps."""
        none = [(0, 0)] * along.ndim
        none[1] = self._structure.missing(self._loop.steps)
        padded, size = jnp.pad(along, none), self._loop.steps.size
        return padded.reshape(len(along), -1, size, *along.shape[2:])

    def _steps(self, blocks: Array) -> Array:
        """Return the inverse of :meth:`_whole`."""
        before = self._loop.steps.before
        flat = blocks.reshape(len(blocks), -1, *blocks.shape[3:])
        return flat[:, before : before + self._shape[1]]

    @property
    def _order(self) -> np.ndarray:
        """Return the permutation from the order of sites to the order of steps within a
        block."""
        size, each = self._loop.steps.size, self._shape[-1]
        parts, begin = [], 0
        for site in self._single.sites:
            own = self._structure.each(Grouping((site,)))
            steps = np.arange(size)[:, None] * each
            parts.append((steps + begin + np.arange(own)).ravel())
            begin += own
        return np.concatenate(parts)

    def results(
        self, numbers: dict[str, Array], known: dict[int, Array]
    ) -> dict[int, Array]:
        """Return the outputs of the loop, by variable, at numbers that follow the
        links. Every state is computed from its own number, and not from all earlier
        ones, except for rounding.

        :param numbers: the numbers by site.
        :param known: inputs of the program, and the outputs of other loops.
        """
        program, loop, links = self._program, self._loop, self.links
        none = {program.inputs[k]: jnp.zeros_like(numbers[k]) for k in self._sites}
        both = [*loop.carried, *loop.stacked]
        found = dict(zip(both, program.run(both, known | none), strict=True))
        x = self._structure.grouped(loop.steps, numbers)
        x = x.reshape(*links.values.shape[:3], 1)
        white = x - small.product(links.values, step_before(x))
        # From an order by sites to an order by steps.
        back = np.argsort(self._order)
        new = small.product(links.inverse, x[..., back, :])
        new, white = (
            self._steps(y.reshape(*y.shape[:2], loop.steps.size, -1))
            for y in (new, white[..., back, :])
        )
        state = jnp.zeros((), new.dtype)
        for loading in links.loadings:
            state += small.product(loading, new[..., None])[..., 0]
            new = step_before(new)
        if not loop.carried:
            # A running sum returns its states.
            (sums,), (k,) = self._states(state), loop.stacked
            return found | {k: found[k] + jnp.moveaxis(sums, 0, loop.axis)}
        before = self._states(step_before(state))
        states, left = self._push(before, self._numbers(white))
        for k, x in zip(self._moving, left, strict=True):
            found[loop.stacked[k]] += jnp.moveaxis(x, 0, loop.axis)
        for (k, _), x in zip(loop.states, states, strict=True):
            found[loop.carried[k]] += x[-1]
        return found
