# SPDX-License-Identifier: Apache-2.0
r"""How steps of a model follow each other: autoregressions, random walks, trends.

A scan carries a state from step to step, and numbers of Gaussian sites are added to it,
:math:`c_t = F_t c_{t-1} + B_t z_t + ...`, affine as the program was proved to be. With
numbers :math:`x_t = B_t^{-1} F_t B_{t-1} x_{t-1} + z_t` in place of the standard normal
ones, the state is :math:`B_t x_t`, apart from what it started at: who looks at a state
looks at one step. The Jacobians F and B, and so the links between steps, are functions
of the hyperparameters and have derivatives. However links are rounded, numbers that
follow each other by them have the law they say: they only choose what is looked at.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
from jax import Array, lax

from numpyro_gpaug.math import small
from numpyro_gpaug.math.recurrences import step_before
from numpyro_gpaug.model.arrow import relative
from numpyro_gpaug.model.latents import JointStructure
from numpyro_gpaug.model.loops import Loop, affine, names
from numpyro_gpaug.model.program import Program


class Links(NamedTuple):
    """Of the steps of a loop, (chains, steps, R, R).

    :param values: how each follows the one before it; zero at the start of a chain.
    :param loadings: B, how a state depends on the numbers of its step.
    :param misfit: how far steps are, relative to their terms, from following each other
        alone, and numbers from being added to one step each.
    """

    values: Array
    loadings: Array
    misfit: Array


class Chained:
    """A loop of a model's program, at some values of what its steps are made of.

    :param program: of a model, from standard normal numbers.
    :param structure: of the model.
    :param loop: of :func:`~numpyro_gpaug.model.loops.loops`.
    :param known: the inputs of the program, at which it is looked at.
    """

    def __init__(
        self,
        program: Program,
        structure: JointStructure,
        loop: Loop,
        known: dict[int, Array],
    ) -> None:
        self._program, self._structure, self._loop = program, structure, loop
        self._known = known
        self._sites = [name for name, _ in loop.steps.sites]
        self._shape = *structure.along(loop.steps), structure.each(loop.steps)
        # What steps leave that depends on the numbers affinely.
        self._moving = [
            k
            for k, x in enumerate(loop.stacked)
            if not names(program, [x]).isdisjoint(self._sites)
            and affine(program, x, self._sites)
        ]
        self._push = self._linearised()
        self.links = self._links()

    def _linearised(self) -> Callable[..., Any]:
        """How states, (steps, ...), and what steps leave move with the states before
        them and with numbers by site."""
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

        zeros = jnp.zeros(self._shape, dtype)
        return jax.linearize(after, self._states(zeros), self._numbers(zeros))[1]

    def _operands(self, z: dict[str, Array]) -> tuple[list[Any], list[Any], list[Any]]:
        """Of the loop; what steps have, with the axis over them first."""
        known = self._known | {self._program.inputs[k]: x for k, x in z.items()}
        found: list[list[Any]] = []
        for variables in self._loop.operands:
            found.append(self._program.run(list(variables), known))
        same, start, own = found
        return same, start, [jnp.moveaxis(x, self._loop.axis, 0) for x in own]

    def _states(self, flat: Array) -> list[Array]:
        """Numbers (chains, steps, R) in the shapes of states."""
        chains, length, _ = self._shape
        shapes = [shape for _, shape in self._loop.states]
        ends = np.cumsum([np.prod(shape, dtype=int) // chains for shape in shapes])
        parts = jnp.split(jnp.moveaxis(flat, 1, 0), ends[:-1], -1)
        pairs = zip(parts, shapes, strict=True)
        return [x.reshape(length, *shape) for x, shape in pairs]

    def _flat(self, states: list[Array]) -> Array:
        """What :meth:`_states` took apart."""
        chains, length, _ = self._shape
        parts = [x.reshape(length, chains, -1) for x in states]
        return jnp.moveaxis(jnp.concatenate(parts, -1), 0, 1)

    def _numbers(self, flat: Array) -> dict[str, Array]:
        """Numbers (chains, steps, R) by site."""
        each = flat.reshape(-1, flat.shape[-1])
        placed = self._structure.placed(self._loop.steps, each)
        return {name: placed[name] for name in self._sites}

    def _links(self) -> Links:
        (chains, length, each), rng = self._shape, np.random.default_rng(0)
        dtype = self._structure.dtype

        def moved(state: Array, number: Array) -> Array:
            return self._flat(self._push(self._states(state), self._numbers(number))[0])

        # One direction at a time, and all at once in a random one.
        basis = np.eye(2 * each)[:, None, None]
        ones = np.broadcast_to(basis, (2 * each, chains, length, 2 * each))
        random = rng.normal(size=(1, chains, length, 2 * each))
        asked = jnp.asarray(np.concatenate([ones, random]), dtype)
        found = jax.vmap(moved)(asked[..., :each], asked[..., each:])
        columns, after = jnp.moveaxis(found[:-1], 0, -1), found[-1]
        carried, added = columns[..., :each], columns[..., each:]
        inverse = small.product(small.inverse(small.product(added.mT, added)), added.mT)
        values = small.product(inverse, small.product(carried, step_before(added)))
        terms = columns * asked[-1][..., None, :]
        off = after - terms.sum(-1) + 0 * values.sum(-1)
        return Links(values, added, relative(off, jnp.abs(terms).sum(-1)))

    def results(
        self, numbers: dict[str, Array], known: dict[int, Array]
    ) -> dict[int, Array]:
        """What the loop leaves, by variable, at numbers that follow each other: every
        state is that of its own number, and not of all before it but for rounding.

        :param numbers: by site.
        :param known: inputs of the program, and what other loops leave.
        """
        program, loop, links = self._program, self._loop, self.links
        none = {program.inputs[k]: jnp.zeros_like(numbers[k]) for k in self._sites}
        both = [*loop.carried, *loop.stacked]
        found = dict(zip(both, program.run(both, known | none), strict=True))
        x = self._structure.grouped(loop.steps, numbers).reshape(*self._shape, 1)
        state = small.product(links.loadings, x)
        if not loop.carried:
            # A running sum leaves its states.
            (sums,), (k,) = self._states(state[..., 0]), loop.stacked
            return found | {k: found[k] + jnp.moveaxis(sums, 0, loop.axis)}
        white = (x - small.product(links.values, step_before(x)))[..., 0]
        before = self._states(step_before(state)[..., 0])
        states, left = self._push(before, self._numbers(white))
        for k, x in zip(self._moving, left, strict=True):
            found[loop.stacked[k]] += jnp.moveaxis(x, 0, loop.axis)
        for (k, _), x in zip(loop.states, states, strict=True):
            found[loop.carried[k]] += x[-1]
        return found
