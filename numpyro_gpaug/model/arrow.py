# SPDX-License-Identifier: Apache-2.0
"""Which latents come in groups of which every datum looks at one.

Random effects ``b[group]`` do, written in whatever way: the affine map from latents to
predictors, which the model's program was proved to be, is asked. Ones in all members
give the loading of a predictor, numbers of the members in their place give which one it
is; and random numbers must give what the two say, or the predictor looks at several.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import replace
from itertools import combinations
from math import prod
from typing import NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
from jax import Array, lax
from jax.core import Tracer

from numpyro_gpaug.errors import NotConjugateError
from numpyro_gpaug.math.affine import AffineMap
from numpyro_gpaug.math.arrow_map import ArrowMap, Loadings
from numpyro_gpaug.model.latents import Arrow, Grouping, JointStructure

# Members of a grouping, at least; numbers of each, at most.
_FEWEST, _WIDEST = 16, 8
# Entries of a matrix that predictions may take.
_MOST = 2**24
# Numbers of members are told in digits that float32 has with room for rounding.
_BASE = 1024
# An arrow's program is longer: so many operations it has to save in each sweep.
_OVERHEAD = 5e7
# Random vectors that a map is compared by, and how far, in units of the last digit, it
# may be off by rounding.
_PROBES, ROUNDING = 2, 500


class Predictors(NamedTuple):
    """Affine functions of a model's Gaussian latents, side by side.

    :param structure: of the model.
    :param offset: their values at latents of zero, (n,).
    :param push: how they move with numbers by site.
    :param residual: their variances given the latents, (n,).
    """

    structure: JointStructure
    offset: Array
    push: Callable[[dict[str, Array]], Array]
    residual: Array

    def __call__(self, flat: Array) -> Array:
        """Values (n,) at latents (size,), without the residual."""
        return self.offset + self.push(self.structure.split(flat))

    @property
    def many(self) -> bool:
        """Whether they are too many for one matrix."""
        return len(self.offset) * self.structure.size > _MOST

    @property
    def matrices(self) -> AffineMap | ArrowMap:
        """Of whatever they look at, if there are few; of many, what has to be
        groups."""
        grouped = self.structure.arrow is not None and self.many
        return self.arrow if grouped else self.dense

    @property
    def dense(self) -> AffineMap:
        """As one matrix."""
        structure, number = self.structure, len(self.offset)

        def push(flat: Array) -> Array:
            return self.push(structure.split(flat))

        if number < structure.size:
            # By rows, where there are fewer of them.
            zeros = jnp.zeros(structure.size, structure.dtype)
            pull = jax.linear_transpose(push, zeros)
            eye = jnp.eye(number, dtype=self.offset.dtype)
            projection = jax.vmap(lambda row: pull(row)[0], out_axes=1)(eye)
        else:
            eye = jnp.eye(structure.size, dtype=structure.dtype)
            projection = jax.vmap(push)(eye)
        return AffineMap(self.offset[None], projection[None], self.residual[None])

    @property
    def arrow(self) -> ArrowMap:
        """As rows that look at one group each; see :meth:`misfit`."""
        structure, arrow = self.structure, self.structure.arrow
        assert arrow is not None
        own, group = self.looked_at(arrow.groups)
        eye = jnp.eye(structure.width, dtype=structure.dtype)
        dense = jax.vmap(self._pushed(None), out_axes=1)(eye)
        values, places, begin = [own[:, :0]], [group[:, None][:, :0]], 0
        for grouping in arrow.others:
            value, index = self.looked_at(grouping)
            each = value.shape[-1]
            values.append(value)
            places.append(begin + index[:, None] * each + jnp.arange(each))
            begin += each * structure.members(grouping)
        value, index = jnp.concatenate(values, -1), jnp.concatenate(places, -1)
        rows = Loadings(own, group, dense, value, index)
        sizes = structure.sizes
        return ArrowMap(self.offset[None], rows, self.residual[None], sizes)

    def _pushed(self, grouping: Grouping | None) -> Callable[[Array], Array]:
        return lambda numbers: self.push(self.structure.placed(grouping, numbers))

    def looked_at(self, grouping: Grouping) -> tuple[Array, Array]:
        """Loadings (n, R) on the member that each predictor looks at, and which it is,
        (n,); of one that looks at none, zeros and the first.

        :param grouping: of which each looks at one member, or none.
        """
        structure = self.structure
        members, each = structure.members(grouping), structure.each(grouping)
        digits = (
            1 if members <= _BASE else int(np.ceil(np.log(members) / np.log(_BASE)))
        )
        counted = jnp.arange(members)
        codes = [counted // _BASE**k % _BASE for k in range(digits)]
        marks = jnp.stack([jnp.ones_like(counted), *codes]).astype(structure.dtype)
        # One number of every member at a time. The compiler would compute it all
        # itself, and slowly, where nothing else is known only later.
        eye = jnp.eye(each, dtype=structure.dtype)[:, None, None, :]
        asked = lax.optimization_barrier(marks[None, :, :, None] * eye)
        told = jax.vmap(jax.vmap(self._pushed(grouping)))(asked)
        loadings = told[:, 0]
        largest = jnp.abs(loadings).argmax(0)
        told = lax.stop_gradient(jnp.take_along_axis(told, largest[None, None], 0)[0])
        seen = told[0] != 0
        ratio = jnp.where(seen, told[1:] / jnp.where(seen, told[0], 1), 0)
        powers = jnp.asarray(_BASE ** np.arange(digits))[:, None]
        index = (jnp.round(ratio).astype(int) * powers).sum(0)
        return loadings.T, jnp.clip(index, 0, members - 1)

    def misfit(self, pairs: tuple[Array, Array] | None = None) -> Array:
        """How far :attr:`arrow` is, at random latents and relative to its terms, from
        what it stands for; in units of rounding, so that a large number says that some
        predictor looks at several groups.

        :param pairs: predictors of one datum, which must look at the same.
        """
        structure, map_ = self.structure, self.arrow
        parts = map_.loadings
        terms = parts.own, parts.dense, parts.value
        scale = jnp.abs(jnp.concatenate(terms, -1)).sum(-1)
        rng, worst = np.random.default_rng(0), jnp.zeros((), self.offset.dtype)
        for _ in range(_PROBES):
            probe = jnp.asarray(rng.normal(size=structure.size), structure.dtype)
            # Without the offset, which may be larger than all else.
            moved = replace(map_, offset=jnp.zeros_like(map_.offset))(probe[None])[0]
            off = self.push(structure.split(probe)) - moved
            worst = jnp.maximum(worst, _relative(off, scale))
        if pairs is not None:
            left, right = (parts.at(place) for place in pairs)
            seen = (left.own != 0).any(-1) & (right.own != 0).any(-1)
            apart = (seen & (left.group != right.group)).any()
            worst = jnp.where(apart, jnp.inf, worst)
        return worst


def _relative(off: Array, terms: Array) -> Array:
    """The largest deviation, in units of the rounding of terms: where there are none,
    none is right."""
    info = jnp.finfo(off.dtype)
    return (jnp.abs(off) / jnp.maximum(terms, info.tiny)).max(initial=0) / info.eps


def check_groups(misfit: Array, what: str) -> None:
    """Raises where some datum looks at several groups, or at one for each of two sites
    of which it looked at the same before.

    :param misfit: of :meth:`Predictors.misfit`.
    :param what: what the data are.
    """
    if not misfit < ROUNDING:
        raise NotConjugateError(
            f"{what} look at several groups, where those that the guide was set up "
            "with look at one each: set up another guide with these arguments; of "
            "predictions draw, numpyro.infer.Predictive(model, guide=guide, ...)"
        )


def find_arrow(
    predictors: Predictors, pairs: tuple[Array, Array] | None, uses: float
) -> Arrow | None:
    """The form of a model's joint Gaussian that costs least; ``None`` for a dense
    matrix, and where the arguments are traced.

    :param predictors: of all data, of a model with a dense structure.
    :param pairs: predictors that likelihoods look at in pairs.
    :param uses: how many times as long as a fit's the program's savings are counted.
    """
    structure, rows = predictors.structure, len(predictors.offset)
    overhead = _OVERHEAD / uses
    if _dense_cost(rows, structure.size) < overhead:
        return None
    if isinstance(predictors.offset, Tracer):
        return None
    chosen, found = [], [*_groupings(predictors, pairs)]
    while found:
        best = max(found, key=lambda g: structure.members(g) * structure.each(g))
        chosen.append(best)
        taken = {name for name, _ in best.sites}
        left = (tuple(s for s in g.sites if s[0] not in taken) for g in found)
        found = [Grouping(sites) for sites in left if sites]
    if not chosen:
        return None
    arrow = Arrow(chosen[0], tuple(chosen[1:]))
    ordered = predictors._replace(structure=structure.with_arrow(arrow))
    cheaper = _cheaper(ordered, overhead)
    return arrow if cheaper and ordered.misfit(pairs) < ROUNDING else None


def _groupings(
    predictors: Predictors, pairs: tuple[Array, Array] | None
) -> list[Grouping]:
    """Sites of which every datum looks at one member, together where it is the same."""
    structure = predictors.structure
    known: list[tuple[Grouping, np.ndarray]] = []
    for site in structure.sites:
        for axes in _axes(site.shape):
            single = Grouping(((site.name, axes),))
            group = _group_of_data(predictors, pairs, single)
            if group is None:
                continue
            for i, (other, seen) in enumerate(known):
                same = structure.members(other) == structure.members(single)
                both = (group >= 0) & (seen >= 0)
                again = site.name in dict(other.sites)
                # New rows have other members of the one, not of the other.
                same &= site.local == structure.site(other.sites[0][0]).local
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


def _group_of_data(
    predictors: Predictors, pairs: tuple[Array, Array] | None, grouping: Grouping
) -> np.ndarray | None:
    """By predictor, which member it looks at, those of one datum the same; -1 for none;
    ``None`` if some look at several.

    :param predictors: of all data.
    :param pairs: those of one datum.
    :param grouping: of one site.
    """
    structure = predictors.structure
    loadings, group = predictors.looked_at(grouping)
    rng = np.random.default_rng(0)
    for _ in range(_PROBES):
        shape = structure.members(grouping), structure.each(grouping)
        probe = jnp.asarray(rng.normal(size=shape), structure.dtype)
        moved = predictors.push(structure.placed(grouping, probe))
        off = moved - (loadings * probe[group]).sum(-1)
        if not _relative(off, jnp.abs(loadings).sum(-1)) < ROUNDING:
            return None
    found = np.where(np.asarray(loadings != 0).any(-1), np.asarray(group), -1)
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


def _cheaper(predictors: Predictors, overhead: float) -> bool:
    structure, rows = predictors.structure, len(predictors.offset)
    groups, each, corner = structure.sizes
    border = float(groups) * each * corner**2 + 2 * float(corner) ** 3
    seen = float(rows) * ((each + structure.width) ** 2 + 10 * corner)
    return border + seen + overhead < _dense_cost(rows, structure.size)
