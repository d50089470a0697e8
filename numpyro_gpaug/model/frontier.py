# SPDX-License-Identifier: Apache-2.0
r"""The frontier of a log-density: the last affine functions of the Gaussian latents
before anything that is not.

A density ``log p(y | z)`` that depends on latents through a few affine arrays ("roots",
each with an entry per datum, or one for all data) is a sum over data of functions of as
many numbers, whatever else is in it. The program of the density is read, not probed:
what is affine, what the roots are, and that nothing after them mixes data.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from math import prod
from typing import Any, NamedTuple

import jax.numpy as jnp
from jax.extend.core import Literal

from numpyro_gpaug.model.jaxpr import ELEMENTWISE, LINEAR
from numpyro_gpaug.model.listing import Operation, execute
from numpyro_gpaug.model.program import Program

# From a root to what becomes nonlinear: one operand that depends on latents, and as
# many entries of it as of the result, or copies of them.
_WALKED = {
    "add", "sub", "mul", "div", "neg", "select_n", "broadcast_in_dim", "reshape",
    "squeeze", "expand_dims", "convert_element_type", "copy", "copy_p",
}  # fmt: skip
_ROWWISE = ELEMENTWISE | LINEAR | {
    "mul", "div", "stop_gradient", "reduce_precision", "optimization_barrier",
    "custom_jvp_call", "custom_vjp_call",
}  # fmt: skip
_WITHIN = {
    "reduce_sum", "reduce_max", "reduce_min", "reduce_prod", "reduce_and", "reduce_or",
    "argmax", "argmin", "cumsum", "cumlogsumexp", "cummax", "cumprod", "sort",
}  # fmt: skip


class Frontier(NamedTuple):
    """Where a sum of log-densities turns nonlinear.

    :param roots: variables that the rest depends on.
    :param shape: of the data; a root has this shape (but for axes of size 1), or one
        entry.
    :param rest: operations from the roots to the densities.
    :param alike: every variable that is one of the roots, with its place among them.
    :param fixed: variables that the rest reads and that depend on no latent.
    :param outputs: the densities.
    :param scaled: of each root, whether all that is computed from it scales it by an
        array first: it then is a coefficient, perhaps, of a predictor.
    :param reason: why the rest is no sum over data, ``None`` if it is.
    """

    roots: tuple[int, ...]
    shape: tuple[int, ...]
    rest: tuple[Operation, ...]
    alike: dict[int, int]
    fixed: tuple[int, ...]
    outputs: tuple[int | Literal, ...]
    scaled: tuple[bool, ...]
    reason: str | None

    def density(self, fixed: Sequence[Any], roots: Sequence[Any]) -> list[Any]:
        """The densities at values of the roots.

        :param fixed: values of what depends on no latent.
        :param roots: in the shapes that the program gives them.
        """
        known = dict(zip(self.fixed, fixed, strict=True))
        known |= {k: roots[i] for k, i in self.alike.items()}
        return execute(self.rest, list(self.outputs), known)


def frontier(program: Program, outputs: list[int | Literal]) -> Frontier:
    """The frontier of the sum of some outputs of a program.

    :param program: of a model's densities, as functions of its latents.
    :param outputs: variables, arrays of log-densities.
    """
    inputs = program.inputs.values()
    reached = program.between([x for x in outputs if program.depends(x)], inputs)
    # What is affine to its very end is a root itself, as everything else is.
    found = [x for x in outputs if program.affine(x)]
    read = [*outputs, *(x for operation in reached for x in operation.operands)]
    used = {x for x in read if not isinstance(x, Literal)}
    for operation in reached:
        dependent = [x for x in operation.results if x in used and program.depends(x)]
        if not all(program.affine(x) for x in dependent):
            found += [x for x in operation.operands if program.affine(x)]
    roots: dict[int, int] = {}
    scaled: dict[int, bool] = {}
    for candidate in found:
        root, by_array = _root(program, candidate)
        # Computed twice from the same things, it is one.
        token = program.values[root].token
        roots.setdefault(token, root)
        scaled[token] = scaled.get(token, True) and by_array
    chosen = tuple(roots.values())
    places = {token: i for i, token in enumerate(roots)}
    alike = {
        k: places[value.token]
        for k, value in enumerate(program.values)
        if value.state and value.token in places
    }
    rest = tuple(program.between(outputs, alike))
    read = [*outputs, *(x for op in rest for x in op.operands)]
    made = {x for op in rest for x in op.results}
    fixed = {x for x in read if not isinstance(x, Literal)} - made - set(alike)
    shapes = [program.avals[r].shape for r in chosen]
    whole = max(shapes, key=prod, default=())
    whole = tuple(n for n in whole if n != 1)
    if any(prod(shape) not in (1, prod(whole)) for shape in shapes):
        reason: str | None = f"it depends on predictors of shapes {shapes}"
    else:
        mixing = _Apart(program, alike).check(rest)
        reason = mixing and f"{mixing} mixes data that depend on latents"
    return Frontier(
        chosen, whole, rest, alike, tuple(sorted(fixed)), tuple(outputs),
        tuple(scaled.values()), reason,
    )  # fmt: skip


def _root(program: Program, variable: Any) -> tuple[int, bool]:
    """Walks back through operations that only move, scale or shift one operand, and
    says whether one scaled it by an array."""
    scaled = False
    while variable in program.makers:
        eqn, operands, _ = program.makers[variable]
        depends = [x for x in operands if program.depends(x)]
        if len(depends) != 1 or eqn.primitive.name not in _WALKED:
            break
        # A sum with a larger array repeats its entries before, by a broadcast.
        (variable,) = depends
        if eqn.primitive.name in ("mul", "div"):
            scaled |= any(
                prod(v.aval.shape) > 1 for v in _others(eqn, operands, depends)
            )
    return variable, scaled


def _others(eqn: Any, operands: tuple[Any, ...], depends: list[Any]) -> list[Any]:
    pairs = zip(eqn.invars, operands, strict=True)
    return [v for v, x in pairs if x is not depends[0]]


class _MixedError(Exception):
    """An operation mixes data."""


class _Apart:
    """Proof that a sum of outputs is a sum over data of functions of their own roots.

    Every variable after the roots either has data along known axes, each entry a
    function of the roots of its datum (a tuple of axes, one for each axis of the data);
    or it is a sum of such functions (``SUMS``), of which only linear functions may
    follow.
    """

    _SUMS = "sums"

    def __init__(self, program: Program, roots: Iterable[int]) -> None:
        self._program = program
        self._axes: dict[int, Any] = {
            variable: tuple(
                i for i, n in enumerate(program.avals[variable].shape) if n != 1
            )
            for variable in roots
        }

    def check(self, rest: tuple[Operation, ...]) -> str | None:
        """Why data are mixed, or ``None``."""
        for operation in rest:
            known = [self._at(x) for x in operation.operands]
            if all(axes is None for axes in known):
                continue
            try:
                found = self._after(operation, known)
            except (_MixedError, ValueError, IndexError):
                return operation.eqn.primitive.name
            for result in operation.results:
                self._axes[result] = found
        return None

    def _at(self, variable: Any) -> Any:
        """Axes of a variable; ``None`` for one that depends on no root."""
        if isinstance(variable, Literal):
            return None
        return self._axes.get(variable)

    def _after(self, operation: Operation, known: list[Any]) -> Any:
        eqn = operation.eqn
        name = eqn.primitive.name
        dependent = [axes for axes in known if axes is not None]
        if self._SUMS in dependent:
            return self._of_sums(name, known)
        full = [axes for axes in dependent if axes != ()]
        if not full:
            # One number for all data (and numbers that follow from it).
            return ()
        axes = full[0]
        shapes = [self._shape_of(x) for x in operation.operands]
        (at, *_) = (shapes[i] for i, k in enumerate(known) if k == axes)
        if name in _ROWWISE and name not in _MOVED:
            out = eqn.outvars[0].aval.shape
            _demand(all(k in (None, (), axes) for k in known))
            _demand(all(out[a] == at[a] for a in axes))
            return axes
        return self._moved(eqn, name, axes, known)

    def _of_sums(self, name: str, known: list[Any]) -> Any:
        linear = {"add", "sub", "neg", "add_any", "convert_element_type", "copy"}
        moves = {"broadcast_in_dim", "reshape", "squeeze", "reduce_sum"}
        single = sum(k is not None for k in known) == 1
        scaled = name == "mul" or (name == "div" and known[0] is not None)
        if name in linear and all(k in (None, self._SUMS) for k in known):
            return self._SUMS
        if single and (name in moves or scaled):
            return self._SUMS
        raise _MixedError

    def _moved(
        self, eqn: Any, name: str, axes: tuple[int, ...], known: list[Any]
    ) -> Any:
        params = eqn.params
        if name == "broadcast_in_dim":
            return tuple(params["broadcast_dimensions"][a] for a in axes)
        if name == "transpose":
            return tuple(params["permutation"].index(a) for a in axes)
        if name in ("squeeze", "expand_dims"):
            gone = params["dimensions"]
            return tuple(a - sum(d < a for d in gone) for a in axes)
        if name == "reshape":
            return self._reshaped(eqn, axes)
        if name in _WITHIN:
            over = params.get("axes", (params.get("axis", params.get("dimension")),))
            touched = [a for a in axes if a in over]
            if touched and name == "reduce_sum":
                return self._SUMS
            _demand(not touched)
            if name in ("sort",) or name.startswith("cum"):
                return axes
            return tuple(a - sum(d < a for d in over) for a in axes)
        if name == "concatenate":
            _demand(all(k in (None, axes) for k in known))
            _demand(params["dimension"] not in axes)
            return axes
        if name == "stack":
            _demand(all(k in (None, axes) for k in known))
            return tuple(a + (a >= params["axis"]) for a in axes)
        if name in ("slice", "rev", "pad"):
            before, after = eqn.invars[0].aval.shape, eqn.outvars[0].aval.shape
            _demand(name != "rev" or not set(params["dimensions"]) & set(axes))
            _demand(all(before[a] == after[a] for a in axes))
            return axes
        if name == "dot_general":
            return self._product(eqn, axes, known)
        if name == "gather":
            return self._gathered(eqn, axes, known)
        raise _MixedError

    def _reshaped(self, eqn: Any, axes: tuple[int, ...]) -> tuple[int, ...]:
        before, after = eqn.invars[0].aval.shape, eqn.outvars[0].aval.shape
        first, num = axes[0], len(axes)
        whole = prod(before[first : first + num])
        if num > 1 and axes == tuple(range(first, first + num)):
            # Side by side in their own order they may become one (to_event(2) does).
            ahead = prod(before[:first])
            for b, n in enumerate(after):
                if n == whole and prod(after[:b]) == ahead:
                    return (b,)
        found = []
        for a in axes:
            ahead = prod(before[:a])
            (b,) = (
                i for i, n in enumerate(after)
                if n == before[a] and n != 1 and prod(after[:i]) == ahead
            )  # fmt: skip
            found.append(b)
        return tuple(found)

    def _product(self, eqn: Any, axes: tuple[int, ...], known: list[Any]) -> Any:
        (left, right), (batch, other) = eqn.params["dimension_numbers"]
        _demand(known[1] is None)
        _demand(not set(left) & set(axes) and not batch and not other)
        kept = [i for i in range(len(eqn.invars[0].aval.shape)) if i not in left]
        return tuple(kept.index(a) for a in axes)

    def _gathered(self, eqn: Any, axes: tuple[int, ...], known: list[Any]) -> Any:
        """Picks within each datum: ``take_along_axis``, or a fixed column."""
        numbers = eqn.params["dimension_numbers"]
        operand, out = eqn.invars[0].aval.shape, eqn.outvars[0].aval.shape
        batched = tuple(getattr(numbers, "operand_batching_dims", ()))
        sizes = eqn.params["slice_sizes"]
        if known[0] is None:
            # The index depends on data: an entry of it for each entry of the result.
            index = eqn.invars[1].aval.shape
            places = [i for i in range(len(out)) if i not in numbers.offset_dims]
            _demand(all(a < len(index) - 1 for a in axes))
            return tuple(places[a] for a in axes)
        _demand(all(k in (None, ()) or i == 0 for i, k in enumerate(known)))
        if all(a in batched for a in axes):
            starts = tuple(numbers.start_indices_batching_dims)
            places = [i for i in range(len(out)) if i not in numbers.offset_dims]
            return tuple(places[starts[batched.index(a)]] for a in axes)
        _demand(all(sizes[a] == operand[a] and a not in batched for a in axes))
        dropped = (*numbers.collapsed_slice_dims, *batched)
        _demand(all(a not in numbers.start_index_map for a in axes))
        kept = [i for i in range(len(operand)) if i not in dropped]
        return tuple(numbers.offset_dims[kept.index(a)] for a in axes)

    def _shape_of(self, variable: Any) -> tuple[int, ...]:
        if isinstance(variable, Literal):
            return jnp.shape(variable.val)
        return tuple(self._program.avals[variable].shape)


_MOVED = {
    "transpose", "squeeze", "expand_dims", "reshape", "broadcast_in_dim", "concatenate",
    "slice", "rev", "pad", "gather", "dot_general", "reduce_sum", "cumsum", "stack",
}  # fmt: skip


def _demand(true: bool) -> None:
    if not true:
        raise _MixedError
