# SPDX-License-Identifier: Apache-2.0
"""The entries of predictors that each entry of an array depends on.

A density is a sum over data of functions of their own predictors if no nonlinear
operation is applied to a number that depends on several entries of one predictor. The
operations of a program determine which entries these are: an operation that reorders
entries is applied to their places, and all others combine the places of their operands.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence
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

# The place of the entry of each predictor that each entry of a variable depends on,
# (predictors, ...): an array of NumPy, or of JAX if indices are traced.
Places = Any


class Term(NamedTuple):
    """A variable of a program.

    :param places: the places that it depends on; ``None`` for a variable that depends
        on no predictor.
    :param value: a function that computes the variable, if it depends on no predictor;
        ``None`` if the value is unknown as well, as in each step of a scan.
    """

    places: Any
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
        for left, right in permutations(_moving(map(self._term, parameters)), 2):
            first, second = left[0], right[1]
            one = first.reshape(*first.shape[:batch], -1, 1)
            other = second.reshape(*second.shape[:batch], 1, -1)
            self.pairs.append(_namespace(one, other).broadcast_arrays(one, other))

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
        mixing, summing = self.mixing, self.summing
        if name == "cond":
            return self._conditional(eqn, operands)
        if name == "optimization_barrier":
            return operands
        if inner is not None:
            terms, name = self._inside(inner, operands), called_name(eqn)
        elif name == "scan":
            terms = self._scanned(eqn, operands)
        else:
            terms = [Term(places) for places in self._results(eqn, operands)]
            if mixing is None and any(_any(x.places[0] == MIXED) for x in terms):
                self.mixing = name
            if summing is None and any(_any(x.places[0] == SUM) for x in terms):
                self.summing = f"{name}{source_of(eqn)}"
        if self.mixing != mixing:
            after = f", after {summing}," if summing else ""
            self.mixing = f"{name}{source_of(eqn)}{after}"
        return terms

    def _inside(self, closed: Any, operands: list[Term]) -> list[Term]:
        constants = [Term(None, partial(lambda x: x, x)) for x in closed.consts]
        return walked(closed.jaxpr, operands, _literal, self._equation, constants)

    def _conditional(self, eqn: Any, operands: list[Term]) -> list[Term]:
        """Return the results of a conditional: each depends on the entries of all
        branches."""
        index, *given = operands
        branches = [self._inside(b, given) for b in eqn.params["branches"]]
        each = zip(eqn.outvars, *branches, strict=True)
        return [self._joined([index, *terms], v.aval.shape) for v, *terms in each]

    def _joined(
        self, terms: list[Term], shape: tuple[int, ...], *, linear: bool = False
    ) -> Term:
        """Return an elementwise function of some terms, see :meth:`_combined`."""
        known = _moving(terms)
        return Term(self._combined(known, shape, linear) if known else None)

    def _scanned(self, eqn: Any, operands: list[Term]) -> list[Term]:
        """Return the results of a scan: each depends on the same entries in all steps,
        as within one datum."""
        closed = eqn.params["jaxpr"]
        begin, count = carried_by(eqn, closed.jaxpr)
        split = begin + count
        each = [
            Term(None if x.places is None else self._along(x.places, (0,), False))
            for x in operands[split:]
        ]
        carried = [Term(x.places) for x in operands[begin:split]]
        for _ in range(3):
            found = self._inside(closed, [*operands[:begin], *carried, *each])
            triples = zip(carried, found, eqn.outvars, strict=False)
            after = [self._joined([old, new], v.aval.shape) for old, new, v in triples]
            pairs = zip(carried, after, strict=True)
            if all(_equal(old.places, new.places) for old, new in pairs):
                break
            carried = after
        results = zip(eqn.outvars, [*carried, *found[count:]], strict=True)
        return [self._joined([x], v.aval.shape, linear=True) for v, x in results]

    def _results(self, eqn: Any, operands: list[Term]) -> list[Places]:
        """Return the places of the results of a primitive that depends on
        predictors."""
        name, shape = eqn.primitive.name, eqn.outvars[0].aval.shape
        places = {i: x.places for i, x in enumerate(operands) if x.places is not None}
        moving, linear = [*places.values()], is_linear(eqn, {*places})
        if name in BY_ENTRY:
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
        found, *others = (_broadcast(places, shape) for places in moving)
        for other in others:
            found = self._merged(found, other, linear)
        summed = found[0] == SUM
        return found if linear or not _any(summed) else _where(summed, MIXED, found)

    def _merged(self, left: Places, right: Places, linear: bool) -> Places:
        if _equal(left, right):
            return left
        self._note(left, right)
        apart = ((left >= 0) & (right >= 0) & (left != right)).any(0)
        apart = apart | (left[0] == SUM) | (right[0] == SUM)
        mixed = (left[0] == MIXED) | (right[0] == MIXED)
        if linear and _perhaps(apart):
            self.pairs += [left, right]
        joined = _where(left >= 0, left, right)
        return _where(mixed, MIXED, _where(apart, SUM if linear else MIXED, joined))

    def _along(self, places: Places, axes: Sequence[int], linear: bool) -> Places:
        """Return the places of a function of all entries along axes, which are
        dropped."""
        axes = tuple(a + 1 for a in axes)
        if not prod(places.shape[a] for a in axes):
            return np.full(places.sum(axes).shape, NONE, np.int32)
        self._note(places)
        large = np.iinfo(np.int32).max
        least, most = _where(places < 0, large, places).min(axes), places.max(axes)
        apart = ((most > least) & (least < large)).any(0)
        apart = apart | (places == SUM).any((0, *axes))
        if linear and _perhaps(apart):
            self.pairs.append(places)
        mixed = (places == MIXED).any((0, *axes))
        return _where(mixed, MIXED, _where(apart, SUM if linear else MIXED, most))

    def _whole(self, places: Places, linear: bool) -> Places:
        """Return the places of a function of all entries."""
        return self._along(places, range(places.ndim - 1), linear)

    def _reduced(self, eqn: Any, moving: list[Places], linear: bool) -> list[Places]:
        axes, shapes = axes_of(eqn), [v.aval.shape for v in eqn.outvars]
        alone = linear or len(moving) < 2
        joint = self._combined(moving, moving[0].shape[1:], alone)
        found = self._along(joint, axes, linear)
        if joint.ndim == len(shapes[0]) + 1:
            found = _namespace(found).expand_dims(found, axes[0] + 1)
        return [_broadcast(found, shape) for shape in shapes]

    def _moved(self, eqn: Any, places: Places, *others: Any) -> Places:
        """Return places after an operation that reorders entries.

        :param others: values of its other operands.
        """
        key = eqn.primitive.name, str(eqn.params), *map(id, (places, *others))
        if key not in self._memo:
            # Objects whose id is used must stay alive.
            self._memo[key] = _move(eqn, places, others), places, others
        return self._memo[key][0]

    def _note(self, *places: Places) -> None:
        self.unchecked |= any(isinstance(p, Tracer) for p in places)

    def _whole_terms(self, eqn: Any, operands: list[Term]) -> list[Places]:
        """Return the places of all operands, including operands that depend on no
        predictor."""
        (like, *_) = _moving(operands)
        return [
            np.full((len(like), *v.aval.shape), NONE, np.int32)
            if x.places is None
            else x.places
            for v, x in zip(eqn.invars, operands, strict=True)
        ]

    def _rearranged(self, eqn: Any, operands: list[Term]) -> list[Places]:
        parts = self._whole_terms(eqn, operands)
        return [*_REARRANGED[eqn.primitive.name](_namespace(*parts), parts, eqn.params)]

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
        return [_bound(eqn, self._whole_terms(eqn, operands)[:2], starts)]

    def _any_way(
        self, eqn: Any, operands: list[Term], *, linear: bool = False
    ) -> list[Places]:
        """Return the places of functions of all entries of all operands."""
        whole = [self._whole(places, linear) for places in _moving(operands)]
        shapes = [v.aval.shape for v in eqn.outvars]
        return [self._combined(whole, shape, linear) for shape in shapes]

    def _gather(self, eqn: Any, operands: list[Term]) -> list[Places]:
        source, index = operands
        numbers, shape = eqn.params["dimension_numbers"], eqn.outvars[0].aval.shape
        found = []
        if index.places is not None:
            # One row of the indices chooses each entry of the result.
            rows = self._along(index.places, (index.places.ndim - 2,), False)
            axes = [i for i in range(len(shape)) if i not in numbers.offset_dims]
            found.append(_spread(rows, axes, shape))
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
        shape, large = operand.shape[1:], np.iinfo(np.int32).max

        def written(rule: Any, start: int, values: Any) -> Any:
            full = jnp.full(shape, start, jnp.int32)
            return _host(rule(full, at, jnp.asarray(values), **params))

        here = written(lax.scatter_max, 0, np.ones(updates.shape[1:], np.int32)) > 0
        positive = _where(updates < 0, large, updates)
        most = _stacked([written(lax.scatter_max, MIXED, x) for x in updates])
        least = _stacked([written(lax.scatter_min, large, x) for x in positive])
        apart = ((least < most) & (least < large)).any(0)
        linear = name in ("scatter", "scatter-add", "scatter_add", "scatter-sub")
        if linear and _perhaps(apart):
            self.pairs.append(updates)
        added = _where(apart, SUM if linear else MIXED, _where(here, most, NONE))
        if name == "scatter":
            return _where(here, added, operand)
        both = len(_moving(operands)) > 1
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
            turned = x.places.transpose(0, *(a + 1 for a in order))
            places = self._along(turned, range(len(axes), len(order)), linear)
            found.append(_spread(places, axes, shape))
        return [self._combined(found, shape, linear)]


# By NumPy: JAX would compile a program for each.
_REARRANGED: dict[str, Callable[[Any, Any, Any], Sequence[Any]]] = {
    "concatenate": lambda xp, p, params: [xp.concatenate(p, params["dimension"] + 1)],
    "stack": lambda xp, p, params: [xp.stack(p, params["axis"] + 1)],
    "unstack": lambda xp, p, params: xp.moveaxis(p[0], params["axis"] + 1, 0),
    "split": lambda xp, p, params: xp.split(
        p[0], np.cumsum(params["sizes"])[:-1], params["axis"] + 1
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
    """Whether places are known to be equal."""
    traced = isinstance(x, Tracer) or isinstance(y, Tracer)
    return x is y or (not traced and np.array_equal(x, y))


def _host(x: Any) -> Any:
    return x if isinstance(x, Tracer) else np.asarray(x)


def _broadcast(places: Places, shape: tuple[int, ...]) -> Places:
    if places.shape[1:] == shape:
        return places
    number, *own = places.shape
    ones = [1] * (len(shape) - len(own))
    whole = places.reshape(number, *ones, *own)
    return _namespace(places).broadcast_to(whole, (number, *shape))


def _spread(places: Places, axes: Sequence[int], shape: tuple[int, ...]) -> Places:
    """Return places broadcast to a shape, in which their own axes are ``axes``, in
    order."""
    sizes = [1] * len(shape)
    for size, axis in zip(places.shape[1:], axes, strict=True):
        sizes[axis] = size
    return _broadcast(places.reshape(len(places), *sizes), shape)


def _is_constant(places: Places, axes: Sequence[int]) -> bool:
    """Whether places are constant along axes, so that any index selects the same."""
    first = places
    for axis in axes:
        first = first[(slice(None),) * (axis + 1) + (slice(0, 1),)]
    return not isinstance(places, Tracer) and bool((places == first).all())


def _move(eqn: Any, places: Places, others: Sequence[Any]) -> Places:
    params, shape = eqn.params, eqn.outvars[0].aval.shape
    name = eqn.primitive.name
    if name in RESHAPES and params.get("dimensions", ()) is not None:
        return places.reshape(len(places), *shape)
    if name == "broadcast_in_dim":
        return _spread(places, params["broadcast_dimensions"], shape)
    if name == "transpose":
        return places.transpose(0, *(a + 1 for a in params["permutation"]))
    return _bound(eqn, [places], others)


def _bound(eqn: Any, parts: list[Places], others: Sequence[Any]) -> Places:
    """Return the places after applying the operation to them.

    :param parts: the places of its first operands.
    :param others: the values of its other operands.
    """
    params = dict(eqn.params)
    if "fill_value" in params:
        params["fill_value"] = NONE
    with _at_once(*parts, *others):
        found = [
            _host(eqn.primitive.bind(*map(jnp.asarray, (*each, *others)), **params))
            for each in zip(*parts, strict=True)
        ]
    return _stacked(found)


def _stacked(each: list[Any]) -> Places:
    return _namespace(*each).stack(each)


def _moving(terms: Iterable[Term]) -> list[Places]:
    """Return the places of the terms that depend on predictors."""
    return [x.places for x in terms if x.places is not None]
