# SPDX-License-Identifier: Apache-2.0
"""The entries of predictors that each entry of an array depends on.

A density is a sum over data of functions of their own predictors if no nonlinear
operation is applied to a number that depends on several entries of one predictor. The
operations of a program determine which entries these are: an operation that reorders
entries is applied to their places, and all others combine the places of their operands.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from contextlib import AbstractContextManager, nullcontext
from functools import cache, partial
from itertools import permutations
from math import prod
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
from jax import lax
from jax.core import Tracer
from jax.extend.core import Literal

from numpyro_gpaug.math.equations import applied, carried_by, walked
from numpyro_gpaug.model.jaxpr import (
    ALONG,
    BY_ENTRY,
    MOVES,
    PRODUCTS,
    RESHAPES,
    axes_of,
    called_jaxpr,
    called_name,
    is_linear,
    source_of,
)
from numpyro_gpaug.model.listing import Operation
from numpyro_gpaug.model.program import Program

# Codes instead of a place: no entry; a sum of entries of several places; and any
# function of several places.
NONE, SUM, MIXED = -1, -2, -3

Places = tuple[Any, ...]


class Term(NamedTuple):
    """A variable of a program.

    :param places: for each predictor, the place of the entry that each entry of the
        variable depends on; ``None`` for a variable that depends on no predictor.
    :param value: a function that computes the variable, if it depends on no predictor;
        ``None`` if the value is unknown as well, as in each step of a scan.
    """

    places: Places | None
    value: Callable[[], Any] | None = None


class Entries:
    """The places of the predictors' entries, propagated through operations.

    :param program: the program of a model's densities.
    :param starts: places that are known, by variable.
    """

    def __init__(self, program: Program, starts: dict[int, Places]) -> None:
        self._program = program
        self._known: dict[int, Term] = {k: Term(places) for k, places in starts.items()}
        self._memo: dict[Any, Any] = {}
        #: The operation that first mixed entries.
        self.mixing: str | None = None
        #: The operation that first added up entries.
        self.summing: str | None = None
        #: Whether traced values determine which entries are combined.
        self.unchecked = False
        #: Whether places depend on indices, which differ between data sets.
        self.by_data = False
        #: Arrays of places that occur together in two predictors.
        self.pairs: list[Places] = []

    def run(self, operations: Sequence[Operation]) -> None:
        """Propagate places through operations, in order."""
        for eqn, operands, results in operations:
            found = self._equation(eqn, [self._term(x) for x in operands])
            self._known |= dict(zip(results, found, strict=True))

    def places(self, variable: int | Literal) -> Places | None:
        """Return the places of a variable; ``None`` if it depends on no predictor."""
        return self._term(variable).places

    def close(self, variable: int | Literal) -> bool:
        """Whether a density is a sum of functions of single entries. The entries that
        occur together in one of them join :attr:`pairs`."""
        places = self.places(variable)
        if places is None:
            return True
        self.pairs.append(places)
        return not _any(places[0] == MIXED)

    def meet(self, parameters: Sequence[int | Literal], batch: int) -> None:
        """Add the pairs of entries that two parameters of a datum depend on, as its
        location and its scale do.

        :param parameters: variables, the parameters of a distribution.
        :param batch: the number of its batch dimensions.
        """
        known = [places for x in parameters if (places := self.places(x)) is not None]
        for (first, _), (_, second) in permutations(known, 2):
            one = first.reshape(*first.shape[:batch], -1, 1)
            other = second.reshape(*second.shape[:batch], 1, -1)
            both = _namespace(one, other).broadcast_arrays(one, other)
            self.pairs.append(tuple(both))

    def _term(self, variable: int | Literal) -> Term:
        if isinstance(variable, Literal):
            return _literal(variable)
        if variable not in self._known:
            self._known[variable] = Term(None, cache(partial(self._computed, variable)))
        return self._known[variable]

    def _computed(self, variable: int) -> Any:
        """Return the value of a variable that depends on no predictor."""
        program = self._program
        used = program.read_for([variable], ())
        known = [x for k, x in program.constants.items() if k in used]
        with _at_once(*known):
            return program.run([variable], {})[0]

    def _equation(self, eqn: Any, operands: list[Term]) -> list[Term]:
        if all(x.places is None for x in operands):
            given = [x.value for x in operands]
            if None in given:
                return [Term(None) for _ in eqn.outvars]

            @cache
            def values() -> list[Any]:
                operands = [f() for f in given if f]
                with _at_once(*operands):
                    return applied(eqn, operands)

            return [
                Term(None, partial(lambda k: values()[k], k))
                for k in range(len(eqn.outvars))
            ]
        name, inner = eqn.primitive.name, called_jaxpr(eqn)
        before = self.mixing, self.summing
        if inner is not None:
            terms = self._inside(inner, operands)
            if self.mixing != before[0]:
                self.mixing = self._named(called_name(eqn), eqn, before[1])
            return terms
        if name == "cond":
            return self._conditional(eqn, operands)
        if name == "scan":
            terms = self._scanned(eqn, operands)
            if self.mixing != before[0]:
                self.mixing = self._named(name, eqn, before[1])
            return terms
        if name == "optimization_barrier":
            return operands
        found = self._results(eqn, operands)
        if before[0] is None and any(_any(x[0] == MIXED) for x in found):
            self.mixing = self._named(name, eqn, before[1])
        if before[1] is None and any(_any(x[0] == SUM) for x in found):
            self.summing = f"{name}{source_of(eqn)}"
        return [Term(places) for places in found]

    @staticmethod
    def _named(name: str, eqn: Any, summing: str | None) -> str:
        after = f", after {summing}," if summing else ""
        return f"{name}{source_of(eqn)}{after}"

    def _inside(self, closed: Any, operands: list[Term]) -> list[Term]:
        constants = [Term(None, partial(lambda x: x, x)) for x in closed.consts]
        return walked(closed.jaxpr, operands, _literal, self._equation, constants)

    def _conditional(self, eqn: Any, operands: list[Term]) -> list[Term]:
        """Return the results of a conditional: each depends on the entries of all
        branches."""
        index, *given = operands
        branches = [self._inside(b, given) for b in eqn.params["branches"]]
        found = []
        for var, results in zip(eqn.outvars, zip(*branches, strict=True), strict=True):
            known = [index.places] if index.places is not None else []
            known += [x.places for x in results if x.places is not None]
            places = self._combined(known, var.aval.shape, linear=False)
            found.append(Term(places))
        return found

    def _scanned(self, eqn: Any, operands: list[Term]) -> list[Term]:
        """Return the results of a scan: each depends on the same entries in all steps,
        as within one datum."""
        closed = eqn.params["jaxpr"]
        begin, count = carried_by(eqn, closed.jaxpr)
        split = begin + count
        each = []
        for term in operands[split:]:
            places = term.places and self._along(term.places, (0,), linear=False)
            each.append(Term(places))
        carried = [Term(x.places) for x in operands[begin:split]]
        for _ in range(3):
            found = self._inside(closed, [*operands[:begin], *carried, *each])
            after = []
            for old, new in zip(carried, found[:count], strict=True):
                known = [x.places for x in (old, new) if x.places is not None]
                shape = np.shape(known[0][0]) if known else ()
                after.append(
                    Term(self._combined(known, shape, linear=False))
                    if known else old
                )  # fmt: skip
            if all(
                _same(x.places, y.places) for x, y in zip(carried, after, strict=True)
            ):
                break
            carried = after
        results = []
        (moving, *_) = (x.places for x in operands if x.places is not None)
        for var, term in zip(eqn.outvars, [*carried, *found[count:]], strict=True):
            places = term.places or self._none(moving, var.aval.shape)
            results.append(Term(tuple(_broadcast(p, var.aval.shape) for p in places)))
        return results

    def _results(self, eqn: Any, operands: list[Term]) -> list[Places]:
        """Return the places of the results of a primitive that depends on
        predictors."""
        name, shape = eqn.primitive.name, eqn.outvars[0].aval.shape
        places = {i: x.places for i, x in enumerate(operands) if x.places is not None}
        moving, linear = [*places.values()], is_linear(eqn, {*places})
        if name in BY_ENTRY and all(_fits(v.aval.shape, shape) for v in eqn.invars):
            return [self._combined(moving, shape, linear)]
        if name in MOVES and len(moving) == 1:
            return [self._moved(eqn, moving[0])]
        if name.startswith("scatter"):
            at = operands[1].value
            with _at_once(at and at()):
                return [self._scatter(eqn, operands)]
        if name in _RULES:
            return _RULES[name](self, eqn, operands)
        if name in ALONG:
            return self._reduced(eqn, moving, linear)
        return self._any_way(eqn, operands, linear=linear)

    def _combined(
        self, moving: list[Places], shape: tuple[int, ...], linear: bool
    ) -> Places:
        """Return the places of an elementwise function.

        :param moving: places of the operands that depend on predictors.
        :param shape: the shape of the result.
        :param linear: whether it is linear in all of them.
        """
        found = tuple(_broadcast(p, shape) for p in moving[0])
        for places in moving[1:]:
            other = tuple(_broadcast(p, shape) for p in places)
            found = self._merged(found, other, linear)
        return found if linear else self._nonlinear(found)

    def _nonlinear(self, places: Places) -> Places:
        first = places[0]
        if not _any(first == SUM):
            return places
        return tuple(_where(first == SUM, MIXED, p) for p in places)

    def _merged(self, left: Places, right: Places, linear: bool) -> Places:
        if all(x is y or _equal(x, y) for x, y in zip(left, right, strict=True)):
            return left
        self._note(*left, *right)
        lost = SUM if linear else MIXED
        apart: Any = False
        for x, y in zip(left, right, strict=True):
            apart = apart | ((x >= 0) & (y >= 0) & (x != y))
        apart = apart | (left[0] == SUM) | (right[0] == SUM)
        mixed = (left[0] == MIXED) | (right[0] == MIXED)
        if linear and _perhaps(apart):
            self.pairs += [left, right]
        return tuple(
            _where(mixed, MIXED, _where(apart, lost, _where(x >= 0, x, y)))
            for x, y in zip(left, right, strict=True)
        )

    def _along(self, places: Places, axes: Sequence[int], linear: bool) -> Places:
        """Return the places of a function of all entries along axes, which are
        dropped."""
        axes = tuple(axes)
        if not prod(np.shape(places[0])[a] for a in axes):
            return tuple(np.full(p.sum(axes).shape, NONE, np.int32) for p in places)
        self._note(*places)
        lost = SUM if linear else MIXED
        large = np.iinfo(np.int32).max
        apart: Any = (places[0] == SUM).any(axes)
        for p in places:
            least = _where(p < 0, large, p).min(axes)
            apart = apart | ((p.max(axes) > least) & (least < large))
        if linear and _perhaps(apart):
            self.pairs.append(places)
        mixed = (places[0] == MIXED).any(axes)
        return tuple(
            _where(mixed, MIXED, _where(apart, lost, p.max(axes))) for p in places
        )

    def _whole(self, places: Places, linear: bool) -> Places:
        """Return the places of a function of all entries."""
        return self._along(places, range(np.ndim(places[0])), linear)

    def _reduced(self, eqn: Any, moving: list[Places], linear: bool) -> list[Places]:
        axes, shapes = axes_of(eqn), [v.aval.shape for v in eqn.outvars]
        joint = self._combined(
            moving, np.shape(moving[0][0]), linear or len(moving) < 2
        )
        found = self._along(joint, axes, linear)
        if np.ndim(joint[0]) == len(shapes[0]):
            found = tuple(_namespace(p).expand_dims(p, axes[0]) for p in found)
        return [tuple(_broadcast(p, shape) for p in found) for shape in shapes]

    def _moved(self, eqn: Any, places: Places, *others: Any) -> Places:
        """Return places after an operation that reorders entries.

        :param others: values of its other operands.
        """
        key = eqn.primitive.name, str(eqn.params), *map(id, others)
        found = []
        for p in places:
            at = (*key, id(p))
            if at not in self._memo:
                # Objects whose id is used must stay alive.
                self._memo[at] = _move(eqn, p, others), p, others
            found.append(self._memo[at][0])
        return tuple(found)

    def _note(self, *places: Any) -> None:
        self.unchecked |= any(isinstance(p, Tracer) for p in places)

    def _none(self, like: Places, shape: tuple[int, ...]) -> Places:
        return tuple(np.full(shape, NONE, np.int32) for _ in like)

    def _whole_terms(self, eqn: Any, operands: list[Term]) -> list[Places]:
        """Return the places of all operands, including operands that depend on no
        predictor."""
        (like, *_) = (x.places for x in operands if x.places is not None)
        return [
            self._none(like, v.aval.shape) if x.places is None else x.places
            for v, x in zip(eqn.invars, operands, strict=True)
        ]

    def _rearranged(self, eqn: Any, operands: list[Term]) -> list[Places]:
        parts = zip(*self._whole_terms(eqn, operands), strict=True)
        rule = _REARRANGED[eqn.primitive.name]
        found = [rule(_namespace(*p), p, eqn.params) for p in parts]
        return [*zip(*found, strict=True)]

    def _dynamic_slice(self, eqn: Any, operands: list[Term]) -> list[Places]:
        source, *starts = operands
        if source.places is None or any(x.places is not None for x in starts):
            return self._any_way(eqn, operands)
        cut = zip(eqn.invars[0].aval.shape, eqn.params["slice_sizes"], strict=True)
        axes = [a for a, (n, size) in enumerate(cut) if n != size]
        if _is_constant(source.places, axes):
            return [self._moved(eqn, source.places, *[np.int32(0)] * len(starts))]
        known = [x.value for x in starts]
        if None in known:
            return self._any_way(eqn, operands)
        self.by_data = True
        return [self._moved(eqn, source.places, *(f() for f in known if f))]

    def _inserted(self, eqn: Any, operands: list[Term]) -> list[Places]:
        """Return the places of one array within another, perhaps at known indices."""
        known = [x.value for x in operands[2:]]
        if None in known:
            return self._any_way(eqn, operands)
        self.by_data |= bool(known)
        starts = [f() for f in known if f]
        pairs = zip(*self._whole_terms(eqn, operands)[:2], strict=True)
        return [tuple(_bound(eqn, p, other, *starts) for p, other in pairs)]

    def _any_way(
        self, eqn: Any, operands: list[Term], *, linear: bool = False
    ) -> list[Places]:
        """Return the places of functions of all entries of all operands."""
        moving = [x.places for x in operands if x.places is not None]
        whole = [self._whole(places, linear) for places in moving]
        shapes = [v.aval.shape for v in eqn.outvars]
        return [self._combined(whole, shape, linear) for shape in shapes]

    def _gather(self, eqn: Any, operands: list[Term]) -> list[Places]:
        source, index = operands
        numbers, shape = eqn.params["dimension_numbers"], eqn.outvars[0].aval.shape
        found = []
        if index.places is not None:
            # One row of the indices chooses each entry of the result.
            rows = self._along(index.places, (np.ndim(index.places[0]) - 1,), False)
            axes = [i for i in range(len(shape)) if i not in numbers.offset_dims]
            found.append(tuple(_spread(p, axes, shape) for p in rows))
        if source.places is not None:
            axes = numbers.start_index_map
            if _is_constant(source.places, axes):
                at: Any = np.zeros(eqn.invars[1].aval.shape, np.int32)
            elif index.value is None:
                return self._any_way(eqn, operands)
            else:
                self.by_data, at = True, index.value()
            found.append(self._moved(eqn, source.places, at))
        return [self._combined(found, shape, linear=index.places is None)]

    def _scatter(self, eqn: Any, operands: list[Term]) -> Places:
        name, index = eqn.primitive.name, operands[1]
        if index.value is None:
            return self._any_way(eqn, operands)[0]
        self.by_data = True
        operand, _, updates = self._whole_terms(eqn, operands)
        at, keys = index.value(), ("dimension_numbers", "mode")
        params = {k: eqn.params[k] for k in keys}
        shape = np.shape(operand[0])
        ones = jnp.ones(np.shape(updates[0]), jnp.int32)
        written = _host(
            lax.scatter_max(jnp.zeros(shape, jnp.int32), at, ones, **params)
        )
        linear = name in ("scatter", "scatter-add", "scatter_add", "scatter-sub")
        large = np.iinfo(np.int32).max
        here, apart = [], np.zeros(shape, bool)
        for u in updates:
            empty = jnp.full(shape, MIXED, jnp.int32)
            most = _host(lax.scatter_max(empty, at, jnp.asarray(u), **params))
            positive = jnp.where(jnp.asarray(u) < 0, large, u)
            full = jnp.full(shape, large, jnp.int32)
            least = _host(lax.scatter_min(full, at, positive, **params))
            apart = apart | ((least < most) & (least < large))
            here.append(_where(written > 0, most, NONE))
        lost = SUM if linear else MIXED
        if linear and _perhaps(apart):
            self.pairs.append(updates)
        added = tuple(_where(apart, lost, p) for p in here)
        if name == "scatter":
            return tuple(
                _where(written > 0, a, p) for a, p in zip(added, operand, strict=True)
            )
        both = sum(x.places is not None for x in operands) > 1
        return self._combined([operand, added], shape, linear or not both)

    def _dot_general(self, eqn: Any, operands: list[Term]) -> list[Places]:
        (left, right), (first, second) = eqn.params["dimension_numbers"]
        linear = sum(x.places is not None for x in operands) == 1
        shape, found, begin = eqn.outvars[0].aval.shape, [], len(first)
        dims = zip(operands, (left, right), (first, second), strict=True)
        for v, (x, summed, batch) in zip(eqn.invars, dims, strict=True):
            free = [a for a in range(v.aval.ndim) if a not in summed and a not in batch]
            axes = [*range(len(batch)), *range(begin, begin + len(free))]
            begin += len(free)
            if x.places is None:
                continue
            order = *batch, *free, *summed
            turned = tuple(p.transpose(order) for p in x.places)
            last = range(len(axes), len(order))
            places = self._along(turned, last, linear)
            found.append(tuple(_spread(p, axes, shape) for p in places))
        return [self._combined(found, shape, linear)]


# By NumPy: JAX would compile a program for each.
_REARRANGED: dict[str, Callable[[Any, Any, Any], Sequence[Any]]] = {
    "concatenate": lambda xp, p, params: [xp.concatenate(p, params["dimension"])],
    "stack": lambda xp, p, params: [xp.stack(p, params["axis"])],
    "unstack": lambda xp, p, params: [*xp.moveaxis(p[0], params["axis"], 0)],
    "split": lambda xp, p, params: xp.split(
        p[0], np.cumsum(params["sizes"])[:-1], params["axis"]
    ),
}
_RULES: dict[str, Callable[[Entries, Any, list[Term]], list[Places]]] = {
    **dict.fromkeys(_REARRANGED, Entries._rearranged), "pad": Entries._inserted,
    **dict.fromkeys(PRODUCTS, Entries._dot_general), "gather": Entries._gather,
    "dynamic_slice": Entries._dynamic_slice,
    "dynamic_update_slice": Entries._inserted,
}  # fmt: skip


def places_of(shape: tuple[int, ...]) -> np.ndarray:
    """Return the place of every entry of an array."""
    return np.arange(prod(shape), dtype=np.int32).reshape(shape)


def partners(pairs: list[Places], size: int) -> tuple[Any, bool]:
    """Return the entry of the first of two predictors that is paired with each entry of
    the second.

    :param pairs: places of both that occur together.
    :param size: the size of the second predictor.
    :return: places (size,), 0 where there is none; and whether there is at most one for
        each entry, which is unknown for traced places.
    """
    traced = any(isinstance(p, Tracer) for each in pairs for p in each)
    found: Any = jnp.full(size, NONE) if traced else np.full(size, NONE, np.int32)
    single = True
    for first, second in pairs:
        if traced:
            both = (jnp.asarray(first) >= 0) & (jnp.asarray(second) >= 0)
            at = jnp.where(both, second, size).ravel()
            found = found.at[at].set(jnp.ravel(first), mode="drop")
            continue
        both = (first >= 0) & (second >= 0)
        a, b = first[both], second[both]
        before = found.copy()
        found[b] = a
        single &= bool((found[b] == a).all())
        single &= bool(((before < 0) | (before == found)).all())
    return _where(found < 0, 0, found), single


def _literal(var: Any) -> Term:
    return Term(None, lambda: np.asarray(var.val, var.aval.dtype))


def _at_once(*operands: Any) -> AbstractContextManager[None]:
    """Return a context in which known numbers are computed at once, even inside a
    trace."""
    if any(isinstance(x, Tracer) for x in operands):
        return nullcontext()
    return jax.ensure_compile_time_eval()


def _namespace(*arrays: Any) -> Any:
    return jnp if any(isinstance(x, Tracer) for x in arrays) else np


def _where(condition: Any, x: Any, y: Any) -> Any:
    return _namespace(condition, x, y).where(condition, x, y).astype(np.int32)


def _any(flags: Any) -> bool:
    """Whether any flag is true, as far as is known."""
    return not isinstance(flags, Tracer) and bool(np.any(flags))


def _perhaps(flags: Any) -> bool:
    """Whether any flag may be true."""
    return isinstance(flags, Tracer) or bool(np.any(flags))


def _equal(x: Any, y: Any) -> bool:
    traced = isinstance(x, Tracer) or isinstance(y, Tracer)
    return not traced and np.array_equal(x, y)


def _same(x: Places | None, y: Places | None) -> bool:
    if x is None or y is None:
        return x is y
    return all(a is b or _equal(a, b) for a, b in zip(x, y, strict=True))


def _host(x: Any) -> Any:
    return x if isinstance(x, Tracer) else np.asarray(x)


def _fits(shape: tuple[int, ...], whole: tuple[int, ...]) -> bool:
    """Whether the shape of an operand fits that of the result of an elementwise
    function: an axis of size 1 fits any."""
    same_rank = len(shape) == len(whole)
    return shape == () or (
        same_rank and all(n in (1, m) for n, m in zip(shape, whole, strict=True))
    )


def _broadcast(p: Any, shape: tuple[int, ...]) -> Any:
    return p if np.shape(p) == shape else _namespace(p).broadcast_to(p, shape)


def _spread(p: Any, axes: Sequence[int], shape: tuple[int, ...]) -> Any:
    """Return an array broadcast to a shape, in which its own axes are ``axes``, in
    order."""
    sizes = [1] * len(shape)
    for size, axis in zip(np.shape(p), axes, strict=True):
        sizes[axis] = size
    return _broadcast(p.reshape(sizes), shape)


def _is_constant(places: Places, axes: Sequence[int]) -> bool:
    """Whether places are constant along axes, so that any index selects the same."""
    for p in places:
        first = p
        for axis in axes:
            first = first[(slice(None),) * axis + (slice(0, 1),)]
        if isinstance(p, Tracer) or not (p == first).all():
            return False
    return True


def _move(eqn: Any, p: Any, others: Sequence[Any]) -> Any:
    params, shape = eqn.params, eqn.outvars[0].aval.shape
    name = eqn.primitive.name
    if name in RESHAPES and params.get("dimensions", ()) is not None:
        return p.reshape(shape)
    if name == "broadcast_in_dim":
        return _spread(p, params["broadcast_dimensions"], shape)
    if name == "transpose":
        return p.transpose(params["permutation"])
    return _bound(eqn, p, *others)


def _bound(eqn: Any, *operands: Any) -> Any:
    """Return the places after applying the operation to them."""
    params = dict(eqn.params)
    if "fill_value" in params:
        params["fill_value"] = NONE
    with _at_once(*operands):
        arrays = [jnp.asarray(x) for x in operands]
        return _host(eqn.primitive.bind(*arrays, **params))
