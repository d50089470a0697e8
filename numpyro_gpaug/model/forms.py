# SPDX-License-Identifier: Apache-2.0
"""The form of a model's joint Gaussian, chosen by cost: one dense matrix, an arrow
where latents come in groups, chains where these are steps of random walks."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator
from itertools import combinations
from math import prod
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
from jax import Array
from jax.core import Tracer

from numpyro_gpaug.errors import NotConjugateError
from numpyro_gpaug.math.arrow import SMALL
from numpyro_gpaug.math.compiling import once
from numpyro_gpaug.model.arrow import PROBES, ROUNDING, Predictors, relative
from numpyro_gpaug.model.latents import Arrow, GaussianSite, Grouping, JointStructure

# Gaussian latents that are held by one dense matrix: all, or those beside groups.
MAX_DENSE = 5000
# Members of a grouping, at least; numbers of each, at most.
_FEWEST, _WIDEST = 16, 8
# The program of other forms is longer: so many operations it has to save.
_OVERHEAD = 5e7


class Asked(NamedTuple):
    """A model's predictors, to be asked what they look at.

    :param at: predictors of all data, from a structure and arrays.
    :param arrays: the arguments' arrays.
    :param pairs: predictors that likelihoods look at in pairs.
    :param rows: how many predictors there are.
    """

    at: Callable[[JointStructure, tuple[Array, ...]], Predictors]
    arrays: tuple[Array, ...]
    pairs: tuple[Array, Array] | None
    rows: int

    def misfit(self, structure: JointStructure) -> float:
        """See :meth:`~numpyro_gpaug.model.arrow.Predictors.misfit`."""

        @once
        def misfit(arrays: tuple[Array, ...], pairs: Any) -> Array:
            return self.at(structure, arrays).misfit(pairs)

        return float(misfit(self.arrays, self.pairs))

    def looked_at(
        self, structure: JointStructure, singles: list[Grouping]
    ) -> list[tuple[Any, Any, Any]]:
        """By grouping of one site: whether each predictor looks at any of its members,
        at which, and how far random numbers are from what these two say, relative to
        their terms. One program says it all."""

        @once
        def looked_at(arrays: tuple[Array, ...]) -> list[tuple[Array, Array, Array]]:
            predictors = self.at(structure, arrays)
            return [_looked_at(predictors, single) for single in singles]

        return looked_at(self.arrays)


def find_form(
    structure: JointStructure, walks: tuple[str, ...], asked: Asked, uses: float
) -> JointStructure:
    """A structure in the form that costs least: of groups, of steps of random walks, or
    as it is, one dense matrix, which it is too where the arguments are traced.

    :param structure: of a model, dense.
    :param walks: sites whose numbers may be running sums.
    :param asked: its predictors.
    :param uses: how many times as long as a fit's the program's savings are counted.
    """
    overhead, rows = _OVERHEAD / uses, asked.rows
    if _dense_cost(rows, structure.size) < overhead:
        return structure
    stepwise = structure.in_steps(walks)
    singles = [
        Grouping(((site.name, axes),))
        for site in structure.sites
        for axes in _axes(site.shape)
    ]
    told = asked.looked_at(stepwise, singles)
    if any(isinstance(x, Tracer) for x in jax.tree.leaves(told)):
        return structure
    members = [_group_of_data(answer, asked.pairs) for answer in told]
    found = _groupings(structure, zip(singles, members, strict=True))
    forms = [_arrow(structure, found, walks), _chain(structure, found, walks)]
    known = sorted(
        (form for form in forms if form is not None),
        key=lambda form: (_cost(form, rows), form.sizes.corner),
    )
    for form in known:
        cheaper = _cost(form, rows) + overhead < _dense_cost(rows, structure.size)
        if cheaper and asked.misfit(form) < ROUNDING:
            return form
    return structure


def _arrow(
    structure: JointStructure, found: list[Grouping], walks: tuple[str, ...]
) -> JointStructure | None:
    """With the largest grouping, but for steps, for groups.

    :param structure: of a model, dense.
    :param found: groupings, which may have sites in common.
    :param walks: sites whose numbers were running sums.
    """
    chosen = _disjoint(structure, [_without_steps(structure, g, walks) for g in found])
    if not chosen:
        return None
    return structure.with_arrow(Arrow(chosen[0], tuple(chosen[1:])))


def _chain(
    structure: JointStructure, found: list[Grouping], walks: tuple[str, ...]
) -> JointStructure | None:
    """With the steps of the largest walks, and what else steps have, for groups;
    arguments as for :func:`_arrow`."""
    along = [g for g in (_of_steps(structure, g, walks) for g in found) if g.sites]
    if not along:
        return None
    first = max(along, key=lambda g: structure.members(g) * structure.each(g))
    names = {name for name, _ in first.sites}
    others = [_without_steps(structure, g, walks) for g in found]
    others = [Grouping(tuple(s for s in g.sites if s[0] not in names)) for g in others]
    chosen = _disjoint(structure, others)
    ordered = structure.in_steps(names & set(walks))
    return ordered.with_arrow(Arrow(first, tuple(chosen)))


def _disjoint(structure: JointStructure, found: list[Grouping]) -> list[Grouping]:
    """Groupings of different sites, the largest first."""
    chosen: list[Grouping] = []
    while found := [g for g in found if g.sites]:
        best = max(found, key=lambda g: structure.members(g) * structure.each(g))
        chosen.append(best)
        taken = {name for name, _ in best.sites}
        left = (tuple(s for s in g.sites if s[0] not in taken) for g in found)
        found = [Grouping(sites) for sites in left]
    return chosen


def _is_steps(
    structure: JointStructure, site: tuple[str, tuple[int, ...]], walks: tuple[str, ...]
) -> bool:
    """Whether members of a site are steps of walks, not whole ones."""
    name, axes = site
    return name in walks and len(structure.site(name).shape) - 1 in axes


def _without_steps(
    structure: JointStructure, grouping: Grouping, walks: tuple[str, ...]
) -> Grouping:
    sites = grouping.sites
    return Grouping(tuple(s for s in sites if not _is_steps(structure, s, walks)))


def _of_steps(
    structure: JointStructure, grouping: Grouping, walks: tuple[str, ...]
) -> Grouping:
    """The sites of a grouping whose members are steps of chains of one length; none
    where there are none."""
    along = [s for s in grouping.sites if _is_steps(structure, s, walks)]
    if not along:
        return Grouping(())
    length = structure.site(along[0][0]).shape[-1]
    same = {name for name, _ in along if structure.site(name).shape[-1] == length}
    steps = Grouping(tuple(
        s for s in grouping.sites if s[0] in same or s[0] not in walks
    ))  # fmt: skip
    few = structure.each(steps) <= SMALL
    alone = structure.each(Grouping(tuple(along[:1]))) <= SMALL
    return steps if few else Grouping(tuple(along[:1]) if alone else ())


def _groupings(
    structure: JointStructure, members: Iterable[tuple[Grouping, np.ndarray | None]]
) -> list[Grouping]:
    """Sites of which every datum looks at one member, together where it is the same.

    :param structure: of the model.
    :param members: groupings of one site, with the member of each predictor, -1 for
        none; ``None`` where some look at several.
    """
    known: list[tuple[Grouping, np.ndarray]] = []
    for single, group in members:
        if group is None:
            continue
        ((name, _),) = single.sites
        for i, (other, seen) in enumerate(known):
            same = structure.members(other) == structure.members(single)
            both = (group >= 0) & (seen >= 0)
            again = name in dict(other.sites)
            # New rows have other members of the one, not of the other.
            first = structure.site(other.sites[0][0])
            same &= structure.site(name).local == first.local
            if same and not again and (group == seen)[both].all() and both.any():
                merged = Grouping(other.sites + single.sites)
                known[i] = merged, np.maximum(group, seen)
                break
        else:
            known.append((single, group))
    return [grouping for grouping, _ in known]


def _axes(shape: tuple[int, ...]) -> Iterator[tuple[int, ...]]:
    for count in range(len(shape), 0, -1):
        for axes in combinations(range(len(shape)), count):
            members = prod(shape[a] for a in axes)
            if members >= _FEWEST and prod(shape) <= _WIDEST * members:
                yield axes


def _looked_at(
    predictors: Predictors, grouping: Grouping
) -> tuple[Array, Array, Array]:
    """See :meth:`Asked.looked_at`."""
    structure = predictors.structure
    loadings, group = predictors.looked_at(grouping)
    rng, worst = np.random.default_rng(0), []
    for _ in range(PROBES):
        shape = structure.members(grouping), structure.each(grouping)
        probe = jnp.asarray(rng.normal(size=shape), structure.dtype)
        moved = predictors.push(structure.placed(grouping, probe))
        off = moved - (loadings * probe[group]).sum(-1)
        worst.append(relative(off, jnp.abs(loadings).sum(-1)))
    return (loadings != 0).any(-1), group, jnp.stack(worst).max()


def _group_of_data(
    told: tuple[Any, Any, Any], pairs: tuple[Array, Array] | None
) -> np.ndarray | None:
    """By predictor, which member it looks at, those of one datum the same; -1 for none;
    ``None`` if some look at several.

    :param told: see :meth:`Asked.looked_at`.
    :param pairs: those of one datum.
    """
    looks, group, off = map(np.asarray, told)
    if not off < ROUNDING:
        return None
    found = np.where(looks, group, -1)
    if pairs is not None:
        first, second = (np.asarray(place) for place in pairs)
        left, right = found[first], found[second]
        if ((left != right) & (left >= 0) & (right >= 0)).any():
            return None
        # One that all data share looks at no group.
        single = np.bincount(np.concatenate(pairs), minlength=len(found)) == 1
        for place in (first, second):
            np.maximum.at(
                found, place[single[place]], np.maximum(left, right)[single[place]]
            )
    return found


def _dense_cost(rows: int, size: int) -> float:
    return float(rows) * size**2 + float(size) ** 3


def _cost(structure: JointStructure, rows: int) -> float:
    groups, each, corner, _ = structure.sizes
    border = float(groups) * each * corner**2 + 2 * float(corner) ** 3
    seen = float(rows) * ((each + structure.width) ** 2 + 10 * corner)
    return border + seen


def refuse_large(structure: JointStructure, walks: tuple[str, ...] = ()) -> None:
    """Raises for a joint Gaussian that needs too large a matrix.

    :param structure: of a model.
    :param walks: sites that might have been held as chains.
    :raises NotConjugateError: naming the largest site.
    """
    grouped = structure.arrow is not None
    size = structure.sizes.corner if grouped else structure.size
    if size <= MAX_DENSE:
        return
    groups = structure.arrow.groups.sites if structure.arrow else ()
    left = [s for s in structure.sites if s.name not in dict(groups)]
    largest = max(left, key=lambda s: prod(s.shape))
    beside = f", beside those of {[name for name, _ in groups]}," if grouped else ""
    raise NotConjugateError(
        f"the joint Gaussian of {size} latents{beside} would be a dense matrix of "
        f"{4 * size**2 / 2**30:.0f} GiB in float32; at most {MAX_DENSE} are held "
        f"jointly where a datum looks at more than one member of a group. The largest "
        f"site is {largest.name!r} of shape {largest.value_shape}"
        f"{_walking(left, walks)}; MCMC(NUTS(model)) samples any model"
    )


def _walking(left: list[GaussianSite], walks: tuple[str, ...]) -> str:
    """Why random walks are not held as chains, where they are not."""
    names = [s.name for s in left if s.name in walks]
    if not names:
        return ""
    return (
        f". Of random walks ({names}) any number of steps is held where every datum "
        "looks at one, walk[t], of all of them the same, and other groups have few "
        "members: not at a sum or difference of steps, nor at several walks that are "
        "indexed differently"
    )
