# SPDX-License-Identifier: Apache-2.0
"""Choose the form of a model's joint Gaussian by its cost: groups of latents, chains of
steps with transitions between them, or one dense matrix."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator
from itertools import combinations
from math import prod
from typing import Any, cast

import jax
import jax.numpy as jnp
import numpy as np
from jax import Array
from jax.core import Tracer

from numpyro_gpaug.errors import NotConjugateError
from numpyro_gpaug.gaussians import Chain, Groups, Iterative, Layout, Sparse
from numpyro_gpaug.math.compiling import once
from numpyro_gpaug.math.sparse_pattern import Pattern
from numpyro_gpaug.model.affine import PROBES, ROUNDING, Predictors, relative
from numpyro_gpaug.model.arguments import Arguments
from numpyro_gpaug.model.costs import MAX_DENSE, Purpose
from numpyro_gpaug.model.gaussians import Field
from numpyro_gpaug.model.joint import JointView
from numpyro_gpaug.model.latents import GaussianSite, Grouping, Structure, coded
from numpyro_gpaug.model.links import WIDEST, Declared, Loop
from numpyro_gpaug.model.structure import fixed_key

# The smallest number of members of a grouping, and the largest number of latents of
# each member.
_FEWEST, _WIDEST = 16, 8
# The largest number of latents of a grouping in a dense border beside an iterative
# form, where each is a column of the recurrences.
_BORDER = 64


class Queries:
    """A model's predictors, with queries of their dependence on latents.

    :param structure: the dense structure of the model.
    :param model: the model.
    :param arguments: its arguments.
    :ivar pairs: pairs of predictors that likelihoods depend on jointly.
    :ivar rows: the number of predictors.
    """

    def __init__(
        self, structure: Structure, model: Callable[..., Any], arguments: Arguments
    ) -> None:
        self._model, self._arguments = model, arguments
        self.arrays = arguments.arrays
        self.whole = self.view(structure, self.arrays)
        self.pairs, self.rows = self.whole.pairs, self.whole.rows

    def view(self, structure: Structure, arrays: tuple[Array, ...]) -> JointView:
        """Return the view of the model by a Gaussian of some structure."""
        given = Arguments(arrays, self._arguments.static)
        return JointView(structure, self._model, given, {}, fixed_key())

    def misfit(self, structure: Structure) -> float:
        """Return :meth:`~numpyro_gpaug.model.affine.Predictors.misfit` as a number."""

        def misfit(arrays: tuple[Array, ...], pairs: Any) -> Array:
            return self.view(structure, arrays).predictors.misfit(pairs)

        return float(once(misfit, self.arrays, self.pairs))

    def recurrences(self, structure: Structure) -> tuple[Grouping, ...]:
        """Return the sites with transitions between steps, whatever predictors depend
        on them. Sites that can be read as one chain or as several are listed both ways.
        The result is empty if the arguments are traced."""
        loops: list[Loop | Declared] = []

        def misfits(arrays: tuple[Array, ...]) -> list[Array]:
            view = self.view(structure, arrays)
            loops[:] = view.loops
            return [view.chained(loop).links.misfit for loop in loops]

        found = once(misfits, self.arrays)
        if any(isinstance(misfit, Tracer) for misfit in found):
            return ()
        # As Python numbers, because in a trace JAX also traces comparisons of known
        # arrays.
        pairs = zip(loops, map(float, found), strict=True)
        return tuple(loop.steps for loop, misfit in pairs if misfit < ROUNDING)

    def looked_at(
        self, structure: Structure, singles: list[Grouping]
    ) -> list[tuple[Any, Any, Any]]:
        """Return, by grouping, whether each predictor depends on single numbers of the
        grouping, the places of these numbers, and how far the response to random
        numbers differs from this dependence, relative to the size of the terms. One
        program computes everything."""

        def looked_at(arrays: tuple[Array, ...]) -> list[tuple[Array, Array, Array]]:
            predictors = self.view(structure, arrays).predictors
            return [_looked_at(predictors, single) for single in singles]

        return once(looked_at, self.arrays)


def find_form(structure: Structure, asked: Queries, purpose: Purpose) -> Structure:
    """Return a structure in the form that costs least: groups, steps of chains, or one
    dense matrix. The dense structure is returned unchanged if the arguments are traced.

    :param structure: the dense structure of a model.
    :param asked: its predictors.
    :param purpose: the purpose of the form.
    """
    rows = asked.rows
    if purpose.contents(structure, rows):
        return structure
    chains = asked.recurrences(structure)
    stepwise = structure.in_steps(_once(chains))
    singles = [*chains]
    for site in structure.sites:
        for axes in _axes(site.shape):
            if not _is_steps((site.name, axes), chains):
                singles += _alone(structure, site, axes, chains)
    told = asked.looked_at(stepwise, singles)
    if any(isinstance(x, Tracer) for x in jax.tree.leaves(told)):
        return structure
    members = [_group_of_data(answer, asked.pairs) for answer in told]
    found = _groupings(structure, zip(singles, members, strict=True))
    reached = {
        steps: member >= 0
        for steps, member in zip(singles, members, strict=True)
        if steps in chains and member is not None
    }
    # Those that are refused anyway might not even fit into memory.
    known = sorted(
        (
            x for x in _proposals(structure, found, chains, reached)
            if x.form.largest_matrix <= purpose.largest
        ),
        key=lambda form: (form.cost(rows), form.form.largest_matrix),
    )  # fmt: skip
    fitting = (x for x in known if _pays(x, structure, asked, purpose))
    chosen = next(fitting, structure)
    if chains or purpose.projected or not purpose.too_costly(chosen, rows):
        return chosen
    crossed = _iterative(structure, zip(singles, told, strict=True), asked.pairs)
    if crossed is None or crossed.cost(rows) > chosen.cost(rows):
        return chosen
    return crossed if asked.misfit(crossed) < ROUNDING else chosen


def find_sparse(
    structure: Structure, asked: Queries, purpose: Purpose, fields: dict[str, Field]
) -> Structure | None:
    """Return a structure in which fields, and other sites of whose members each datum
    depends on one, are the nodes of a sparse precision; ``None`` if it does not exist,
    or if one dense matrix costs less.

    :param structure: the dense structure of a model, with fields in coordinates of
        their own.
    :param asked: its predictors.
    :param purpose: the purpose of the form.
    :param fields: the fields.
    """
    found = []
    for site in structure.sites:
        for grouping in _tried(site, fields.get(site.name)):
            ((depends, place, off),) = asked.looked_at(structure, [grouping])
            if isinstance(off, Tracer):
                return None
            # As a Python number, because in a trace JAX also traces comparisons of
            # known arrays.
            if float(off) < ROUNDING:
                if grouping.colours:
                    most = int(np.asarray(depends).sum(-1).max(initial=1))
                    grouping = grouping._replace(most=most)
                found.append((grouping, np.where(depends, place, -1)))
                break
        else:
            if site.name in fields:
                return None
    chosen = [both for both in found if both[0].sites[0][0] in fields]
    forms = [_sparse(structure, part, asked.pairs, fields) for part in (found, chosen)]
    form = min(forms, key=lambda form: form.cost(asked.rows))
    # The other form has the same number of latents.
    return form if _pays(form, structure, asked, purpose) else None


def _pays(
    form: Structure, structure: Structure, asked: Queries, purpose: Purpose
) -> bool:
    """Whether a form costs less than one dense matrix, and predictors have it."""
    whole = form.cost(asked.rows) + purpose.overhead(form)
    return whole < structure.cost(asked.rows) and asked.misfit(form) < ROUNDING


def _tried(site: GaussianSite, own: Field | None) -> Iterator[Grouping]:
    """Iterate over groupings of a site by itself, the simplest first."""
    if own is None:
        for axes in _axes(site.shape):
            yield Grouping(((site.name, axes),))
        return
    alone = Grouping(((site.name, tuple(range(len(site.shape)))),))
    for colouring in _colourings(own, site.shape):
        colours = np.unique(colouring, return_inverse=True)[1]
        if most := int(colours.max()):
            yield alone._replace(colours=coded(colours), most=most + 1)
        else:
            yield alone


def _colourings(own: Field, shape: tuple[int, ...]) -> Iterator[np.ndarray]:
    """Iterate over colours of the coordinates of a field: by the vectors that it is the
    sum of, by independent fields, and such that neighbours have different ones."""
    size, fields = shape[-1], prod(shape[:-1])
    parts = np.tile(np.arange(size) * len(own.prior.scales) // size, fields)
    yield parts
    if 1 < fields <= _WIDEST:
        yield parts * fields + np.repeat(np.arange(fields), size)
    near = own.prior.pattern.colours
    yield parts * (near.max() + 1) + np.tile(near, fields)


def _iterative(
    structure: Structure,
    told: Iterable[tuple[Grouping, tuple[Any, Any, Any]]],
    pairs: tuple[Array, Array] | None,
) -> Structure | None:
    """Return a structure in which the latents of all large groupings are nodes of a
    precision that is not factorised, the largest grouping first; ``None`` if there are
    fewer than two.

    :param structure: the dense structure of a model.
    :param told: groupings of one site, with answers of :meth:`Queries.looked_at`.
    :param pairs: pairs of predictors that likelihoods depend on jointly.
    """
    found: dict[str, tuple[Grouping, np.ndarray]] = {}
    for single, answer in told:
        depends, place, off = map(np.asarray, answer)
        name = single.sites[0][0]
        if off < ROUNDING and prod(structure.site(name).shape) > _BORDER:
            found.setdefault(name, (single, np.where(depends, place, -1)))
    if len(found) < 2:
        return None
    size = {k: prod(structure.site(k).shape) for k in found}
    ordered = [found[k] for k in sorted(found, key=lambda k: -size[k])]
    sparse = _sparse(structure, ordered, pairs, {})
    form = Iterative(sparse.form.layout, cast(Any, sparse.form).pattern)
    return sparse.in_form(form, sparse.groupings)


def _sparse(
    structure: Structure,
    found: list[tuple[Grouping, np.ndarray]],
    pairs: tuple[Array, Array] | None,
    fields: dict[str, Field],
) -> Structure:
    """Return a structure with a sparse precision.

    :param structure: the dense structure of a model.
    :param found: groupings, with the numbers that each predictor depends on, -1 for
        none.
    :param pairs: pairs of predictors that likelihoods depend on jointly.
    :param fields: the fields.
    """
    begin, nodes, edges, labels, most = 0, [], [], [], 0
    for grouping, told in found:
        size = structure.latents(grouping)
        nodes.append(np.where(told >= 0, told + begin, -1))
        own = fields.get(grouping.sites[0][0])
        each = size if own is None else own.shape[-1]
        for first in range(begin, begin + size, each):
            component = np.full(each, -1)
            if own is not None:
                pattern = own.prior.pattern
                edges.append((first + pattern.rows, first + pattern.columns))
                component = own.labels
            labels.append(np.where(component >= 0, component + most, -1))
            most += component.max(initial=-1) + 1
        begin += size
    rows = [np.concatenate(nodes, -1)]
    if pairs is not None:
        rows.append(np.concatenate([rows[0][np.asarray(x)] for x in pairs], -1))
    for part in rows:
        for s, t in combinations(range(part.shape[-1]), 2):
            both = (part[:, s] >= 0) & (part[:, t] >= 0)
            edges.append((part[both, s], part[both, t]))
    pattern = Pattern.of(begin, *(np.concatenate(x) for x in zip(*edges, strict=True)))
    known = np.concatenate(labels).astype(np.int32).tobytes() if most else None
    form = Sparse(Layout(begin, 1, structure.size - begin), pattern, known)
    return structure.in_form(form, tuple(grouping for grouping, _ in found))


def _once(chains: tuple[Grouping, ...]) -> tuple[Grouping, ...]:
    """Return the first of any groupings that have sites in common."""
    found: dict[str, Grouping] = {}
    for steps in chains:
        names = [name for name, _ in steps.sites]
        if found.keys().isdisjoint(names):
            found |= dict.fromkeys(names, steps)
    return tuple(dict.fromkeys(found.values()))


def _proposals(
    structure: Structure,
    found: list[Grouping],
    chains: tuple[Grouping, ...],
    reached: dict[Grouping, np.ndarray],
) -> Iterator[Structure]:
    """Iterate over structures with the largest grouping, except steps, as groups; with
    the steps of the largest chains as groups, together with other sites that have a
    member per step; and with the steps of several processes one after the other as one
    chain, if no datum depends on two of them.

    :param structure: the dense structure of a model.
    :param found: groupings, which may have sites in common.
    :param chains: sites whose steps have transitions between them.
    :param reached: whether each predictor depends on a chain, by chain.
    """
    # The groupings without sites that are steps of chains, and without groupings of
    # blocks of steps.
    apart = [
        Grouping(tuple(s for s in g.sites if not _is_steps(s, chains)))
        for g in found
        if g.size == 1
    ]
    if groups := _disjoint(structure, apart):
        yield structure.in_form(Groups(Layout(0, 0, 0)), groups)

    def along(steps: list[Grouping], first: Grouping) -> Structure:
        form = Chain(Layout(0, 0, 0), any(x.correlated for x in steps))
        groupings = _disjoint(structure, apart, first)
        return structure.in_steps(tuple(steps)).in_form(form, groupings)

    stepwise = [g for g in (_of_steps(structure, g, chains) for g in found) if g.sites]
    if stepwise:
        first = max(stepwise, key=structure.latents)
        yield along([x for x in chains if _within(x, first)], first)
    chosen: list[Grouping] = []
    for steps in sorted(reached, key=structure.members, reverse=True):
        alone = not any((reached[steps] & reached[x]).any() for x in chosen)
        if steps.correlated and alone:
            chosen.append(steps)
    if len(chosen) > 1:
        sites = tuple(site for steps in chosen for site in steps.sites)
        yield along(chosen, Grouping(sites, correlated=True, in_turn=True))


def _disjoint(
    structure: Structure, found: list[Grouping], *chosen: Grouping
) -> tuple[Grouping, ...]:
    """Return groupings of different sites, the largest first, after the chosen ones."""
    while True:
        taken = {name for g in chosen for name, _ in g.sites}
        found = [
            g._replace(sites=tuple(s for s in g.sites if s[0] not in taken))
            for g in found
        ]
        found = [g for g in found if g.sites]
        if not found:
            return chosen
        chosen = *chosen, max(found, key=structure.latents)


def _is_steps(site: tuple[str, tuple[int, ...]], chains: tuple[Grouping, ...]) -> bool:
    """Whether members of a site are steps of chains, rather than whole chains."""
    name, axes = site
    return any(dict(x.sites).get(name, (None,))[-1] in axes for x in chains)


def _within(steps: Grouping, grouping: Grouping) -> bool:
    return set(steps.sites) <= set(grouping.sites)


def _of_steps(
    structure: Structure, grouping: Grouping, chains: tuple[Grouping, ...]
) -> Grouping:
    """Return the sites of a grouping whose members are steps of chains of one length;
    an empty grouping if there are none."""
    along = [x for x in chains if _within(x, grouping)]
    if not along:
        return Grouping(())
    same = [x for x in along if structure.along(x) == structure.along(along[0])]
    kept = {site for x in same for site in x.sites}
    steps = grouping._replace(sites=tuple(
        s for s in grouping.sites if s in kept or not _is_steps(s, chains)
    ))  # fmt: skip
    return steps if structure.each(steps) <= WIDEST else along[0]


def _groupings(
    structure: Structure, members: Iterable[tuple[Grouping, np.ndarray | None]]
) -> list[Grouping]:
    """Return groupings of sites such that every datum depends on one member. Sites are
    in one grouping if this member is the same.

    :param structure: the structure of the model.
    :param members: groupings of one site, or of one chain, with the member of each
        predictor, -1 for none; ``None`` if some predictor depends on several members.
    """
    known: list[tuple[Grouping, np.ndarray]] = []
    for single, group in members:
        if group is None:
            continue
        place = len(known)
        both = single, group
        # Sites that share no datum may be joined by a third one.
        while fitting := [i for i, x in enumerate(known) if _alike(structure, x, both)]:
            place = fitting[0]
            (one, seen), (other, group) = known.pop(place), both
            both = one._replace(sites=one.sites + other.sites), np.maximum(seen, group)
        known.insert(place, both)
    return [grouping for grouping, _ in known]


def _alike(
    structure: Structure,
    one: tuple[Grouping, np.ndarray],
    other: tuple[Grouping, np.ndarray],
) -> bool:
    """Whether the data that depend on sites of two groupings depend on the same member
    of both."""
    (first, seen), (second, group) = one, other
    if first[1:] != second[1:] or not dict(first.sites).keys().isdisjoint(
        dict(second.sites)
    ):
        return False
    members = [structure.members(Grouping(g.sites)) for g in (first, second)]
    # New rows have other members of one site, but not of the other.
    local = [structure.site(g.sites[0][0]).local for g in (first, second)]
    both = (group >= 0) & (seen >= 0)
    same = bool((group == seen)[both].all() and both.any())
    return same and members[0] == members[1] and local[0] == local[1]


def _axes(shape: tuple[int, ...]) -> Iterator[tuple[int, ...]]:
    for count in range(len(shape), 0, -1):
        for axes in combinations(range(len(shape)), count):
            members = prod(shape[a] for a in axes)
            if members >= _FEWEST and prod(shape) <= _WIDEST * members:
                yield axes


def _alone(
    structure: Structure,
    site: GaussianSite,
    axes: tuple[int, ...],
    chains: tuple[Grouping, ...],
) -> list[Grouping]:
    """Return the groupings of a site by itself. If chains have as many members, its
    members are in the order of the chain's (for sites in plates that are scanned, the
    first axis is over steps), and also in the chain's blocks."""
    members = {a: site.shape[a] for a in axes}
    found: dict[Grouping, None] = {}
    for steps in chains:
        (name, along), *_ = steps.sites
        shape = structure.site(name).shape
        if members == {a: shape[a] for a in along}:
            own = Grouping(((site.name, along),))
            found |= {own: None, steps._replace(sites=own.sites): None}
    return [*found] or [Grouping(((site.name, axes),))]


def _looked_at(
    predictors: Predictors, grouping: Grouping
) -> tuple[Array, Array, Array]:
    """Return the dependence of predictors on one grouping; see
    :meth:`Queries.looked_at`."""
    structure = predictors.structure
    value, place = predictors.single(grouping)
    rng, worst = np.random.default_rng(0), []
    for _ in range(PROBES):
        shape = structure.members(grouping), structure.each(grouping)
        probe = jnp.asarray(rng.normal(size=shape), structure.dtype)
        moved = predictors.push(structure.placed(grouping, probe))
        off = moved - (value * probe.ravel()[place]).sum(-1)
        worst.append(relative(off, jnp.abs(value).sum(-1)))
    return value != 0, place, jnp.stack(worst).max()


def _group_of_data(
    told: tuple[Any, Any, Any], pairs: tuple[Array, Array] | None
) -> np.ndarray | None:
    """Return the member that each predictor depends on, the same for all predictors of
    a datum; -1 for none. Return ``None`` if a predictor depends on several members.

    :param told: an answer of :meth:`Queries.looked_at`.
    :param pairs: the pairs of predictors of one datum.
    """
    depends, place, off = map(np.asarray, told)
    if not off < ROUNDING:
        return None
    found = np.where(depends.any(-1), place[:, 0] // place.shape[-1], -1)
    if pairs is not None:
        first, second = (np.asarray(place) for place in pairs)
        left, right = found[first], found[second]
        if ((left != right) & (left >= 0) & (right >= 0)).any():
            return None
        # A latent that all data share belongs to no group.
        single = np.bincount(np.concatenate(pairs), minlength=len(found)) == 1
        for place in (first, second):
            np.maximum.at(
                found, place[single[place]], np.maximum(left, right)[single[place]]
            )
    return found


def refuse_large(
    structure: Structure,
    chains: Callable[[], tuple[Grouping, ...]] = tuple,
    largest: int = MAX_DENSE,
    *,
    traced: bool = False,
) -> None:
    """Raise for a joint Gaussian that needs too large a matrix.

    :param structure: the structure of a model.
    :param chains: returns chains that could have been represented as such.
    :param largest: the number of rows of a matrix that is not too large.
    :param traced: whether the model was read at traced arguments.
    :raises NotConjugateError: naming the largest site.
    """
    size = structure.form.largest_matrix
    if size <= largest:
        return
    if traced:
        raise NotConjugateError(
            f"the joint Gaussian of {size} latents is too large for a dense matrix, "
            "and its groups and chains are not known: they are found from the values "
            "of the arguments, which are traced. Call it once outside of jax.jit and "
            "jax.vmap, with arrays of these shapes"
        )
    grouped = {name for g in structure.groupings[:1] for name, _ in g.sites}
    left = [s for s in structure.sites if s.name not in grouped]
    widest = max(left, key=lambda s: prod(s.shape))
    beside = f", besides {sorted(grouped)}," if grouped else ""
    raise NotConjugateError(
        f"the joint Gaussian of {size} latents{beside} would be a dense matrix of "
        f"{4 * size**2 / 2**30:.0f} GiB in float32. At most {largest} are allowed "
        f"if a datum depends on more than one member of a group. The largest "
        f"site is {widest.name!r} of shape {widest.value_shape}"
        f"{_following(left, chains())}. MCMC(NUTS(model)) samples any model"
    )


def _following(left: list[GaussianSite], chains: tuple[Grouping, ...]) -> str:
    """Explain why chains are not represented as such."""
    along = {name: x.correlated for x in chains for name, _ in x.sites}
    names = [s.name for s in left if s.name in along]
    if not names:
        return ""
    if all(along[name] for name in names):
        # The sites of processes of time.
        names = [name.removesuffix(".v") for name in names]
        return (
            f". Processes with markov=True ({names}) may have any number of times if "
            "every datum depends on one of them, or on several at the same times. "
            "Otherwise pass inducing= to all but one: 100 times within the range of "
            "the data, for example"
        )
    return (
        f". Random walks and autoregressions ({names}) may have any number of steps if "
        "every datum depends on one step, walk[t], the same of all walks, and other "
        "groups have few members. It must not depend on sums or differences of steps, "
        "or on several walks with different indices"
        + any(len(s.shape) > 1 for s in left if s.name in along)
        * ". If each step is a CAR of areas, gpaug.SpaceTime is the same field with a "
        "sparse precision"
    )
