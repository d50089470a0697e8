# SPDX-License-Identifier: Apache-2.0
"""What a model with jointly Gaussian latents is made of."""

from __future__ import annotations

from collections.abc import Collection
from dataclasses import dataclass, replace
from math import prod
from typing import Any, NamedTuple

import jax.numpy as jnp
import numpy as np
from jax import Array

from numpyro_gpaug.math.affine import Prior
from numpyro_gpaug.math.arrow import ArrowPrior, ArrowSizes, Chain
from numpyro_gpaug.math.chain import ChainPrior
from numpyro_gpaug.model.structure import Block, Structure


class GaussianSite(NamedTuple):
    """A sample site that is part of the joint Gaussian.

    :param name: of the site.
    :param shape: of the standard normal numbers that it is made of.
    :param value_shape: of its values.
    :param local: whether it has members for every datum: in a prediction these are
        others.
    :param steps: of a random walk, whether the numbers are running sums of standard
        normal ones along their last axis, instead of these.
    """

    name: str
    shape: tuple[int, ...]
    value_shape: tuple[int, ...]
    local: bool
    steps: bool = False


class Grouping(NamedTuple):
    """Sites with the same members, of which every datum looks at one.

    :param sites: names, and the axes of their numbers that are over members.
    """

    sites: tuple[tuple[str, tuple[int, ...]], ...]


class Arrow(NamedTuple):
    """The form of a joint Gaussian of very many latents, see
    :mod:`numpyro_gpaug.math.arrow`; where the groups are the steps of random walks,
    :mod:`numpyro_gpaug.math.chain`.

    :param groups: what is eliminated.
    :param others: what else every datum looks at single members of.
    """

    groups: Grouping
    others: tuple[Grouping, ...]

    @property
    def all(self) -> tuple[Grouping, ...]:
        """What is eliminated first."""
        return self.groups, *self.others


@dataclass(frozen=True)
class JointStructure(Structure):
    """The parts of a model whose Gaussian latents are held jointly.

    :param sites: Gaussian sample sites, in the order of the model.
    :param dtype: of the joint Gaussian.
    :param held: Gaussian sites that are not among them, and why.
    :param shapes: of the values of all sites.
    :param arrow: the form of its precision matrix; ``None`` for a dense one.
    """

    sites: tuple[GaussianSite, ...] = ()
    dtype: Any = None
    held: tuple[tuple[str, str], ...] = ()
    shapes: tuple[tuple[str, tuple[int, ...]], ...] = ()
    arrow: Arrow | None = None

    @property
    def zeros(self) -> dict[str, Array]:
        return {s.name: jnp.zeros(s.value_shape, self.dtype) for s in self.sites}

    @property
    def size(self) -> int:
        """Of the joint Gaussian."""
        return self.blocks[0].shape[0] if self.blocks else 0

    def sizeless(self) -> JointStructure:
        return replace(self, plates={}, constraints={}, shapes=())

    def places(self, here: JointStructure) -> np.ndarray:
        """Where the numbers of another structure of the same model are among those of
        this one; -1 for new members.

        :param here: the model at other arguments.
        """
        own = self.split(np.arange(self.size))
        theirs = here.split(np.arange(here.size))
        found = np.full(here.size, -1)
        for site in here.sites:
            if not site.local:
                both = map(min, own[site.name].shape, site.shape)
                part = tuple(slice(n) for n in both)
                found[theirs[site.name][part]] = own[site.name][part]
        return found

    def with_sites(self, sites: tuple[GaussianSite, ...]) -> JointStructure:
        """This structure with sites of other shapes."""
        return replace(self, sites=sites, blocks=(joint_block(sites, self.dtype),))

    def split(self, flat: Any) -> dict[str, Any]:
        """Numbers (..., size) by site, in the shapes of :class:`GaussianSite`: those of
        an arrow's groups first, those of its other groupings last.

        :param flat: of all sites.
        """
        found: dict[str, Any] = {}
        begin, lead = 0, flat.shape[:-1]
        for part in self._parts:
            if isinstance(part, Grouping):
                size = self.members(part) * self.each(part)
                block = flat[..., begin : begin + size]
                block = block.reshape(*lead, self.members(part), self.each(part))
                found |= self._ungrouped(part, block)
            else:
                size = prod(part.shape)
                own = flat[..., begin : begin + size]
                found[part.name] = own.reshape((*lead, *part.shape))
            begin += size
        return found

    def joined(self, numbers: dict[str, Array]) -> Array:
        """Numbers (size,) that :meth:`split` takes apart."""
        places = self.split(np.arange(self.size))
        order = np.concatenate([places[name].ravel() for name in numbers])
        flat = jnp.concatenate([x.ravel() for x in numbers.values()])
        return flat[np.argsort(order)]

    # Of an arrow.

    def with_arrow(self, arrow: Arrow | None) -> JointStructure:
        """This structure with its numbers in another order."""
        return replace(self, arrow=arrow)

    @property
    def sizes(self) -> ArrowSizes:
        """Of its Gaussian."""
        assert self.arrow is not None
        groups, each = self.members(self.arrow.groups), self.each(self.arrow.groups)
        corner = self.size - groups * each
        return ArrowSizes(groups, each, corner, self.chain)

    # Of chains.

    def in_steps(self, names: Collection[str]) -> JointStructure:
        """This structure with the numbers of some walks, and of no others, running
        sums."""
        changed = tuple(s._replace(steps=s.name in names) for s in self.sites)
        return replace(self, sites=changed)

    @property
    def steps(self) -> tuple[str, ...]:
        """Sites whose numbers are running sums."""
        return tuple(s.name for s in self.sites if s.steps)

    @property
    def chain(self) -> Chain | None:
        """Of an arrow whose groups are steps."""
        if self.arrow is None or not self.steps:
            return None
        members = self.members(self.arrow.groups)
        linked: list[bool] = []
        for name, _ in self.arrow.groups.sites:
            site = self.site(name)
            linked += [site.steps] * (prod(site.shape) // members)
        return Chain(self.site(self.steps[0]).shape[-1], tuple(linked))

    def white(self, flat: Array) -> Array:
        """The standard normal numbers that latents (..., size) are made of."""
        if self.chain is None:
            return flat
        sums, corner = self.sizes.split(flat)
        along = sums.reshape(*sums.shape[:-2], -1, self.chain.steps, sums.shape[-1])
        before = [(0, 0)] * (along.ndim - 2) + [(1, 0), (0, 0)]
        apart = along - jnp.pad(along[..., :-1, :], before)
        white = jnp.where(np.array(self.chain.linked), apart, along)
        return self.sizes.joined(white.reshape(sums.shape), corner)

    @property
    def prior(self) -> Prior | ArrowPrior | ChainPrior:
        """Of its numbers."""
        zeros = jnp.zeros((1, self.size), self.dtype)
        if self.arrow is None:
            return Prior(zeros, zeros + 1)
        kind = ArrowPrior if self.chain is None else ChainPrior
        return kind(zeros, self.sizes)

    @property
    def width(self) -> int:
        """Numbers of the corner that any datum may look at."""
        return sum(prod(p.shape) for p in self._parts if isinstance(p, GaussianSite))

    def members(self, grouping: Grouping) -> int:
        """How many there are."""
        name, axes = grouping.sites[0]
        return prod(self.site(name).shape[a] for a in axes)

    def each(self, grouping: Grouping) -> int:
        """Numbers of a member, of all sites."""
        total = sum(prod(self.site(name).shape) for name, _ in grouping.sites)
        return total // self.members(grouping)

    def placed(self, grouping: Grouping | None, numbers: Array) -> dict[str, Array]:
        """Numbers by site, zero for all sites but those of a grouping, (members, each),
        or, for ``None``, but those that any datum may look at, (width,)."""
        found = {s.name: jnp.zeros(s.shape, self.dtype) for s in self.sites}
        if grouping is not None:
            return found | self._ungrouped(grouping, numbers)
        begin = 0
        for part in self._parts:
            if isinstance(part, GaussianSite):
                size = prod(part.shape)
                found[part.name] = numbers[begin : begin + size].reshape(part.shape)
                begin += size
        return found

    def grouped(self, grouping: Grouping, numbers: dict[str, Any]) -> Any:
        """Numbers of a grouping's sites, (members, each)."""
        parts = [
            jnp.moveaxis(numbers[name], axes, range(len(axes)))
            for name, axes in grouping.sites
        ]
        members = self.members(grouping)
        return jnp.concatenate([x.reshape(members, -1) for x in parts], -1)

    def _ungrouped(self, grouping: Grouping, numbers: Any) -> dict[str, Any]:
        found, begin, lead = {}, 0, numbers.shape[:-2]
        for name, axes in grouping.sites:
            shape = self.site(name).shape
            over = tuple(shape[a] for a in axes)
            rest = tuple(n for a, n in enumerate(shape) if a not in axes)
            part = numbers[..., begin : begin + prod(rest)]
            begin += prod(rest)
            front = range(len(lead), len(lead) + len(axes))
            back = [len(lead) + a for a in axes]
            moved = part.reshape((*lead, *over, *rest))
            # NumPy's or JAX's: places are numbers too.
            found[name] = (np if isinstance(moved, np.ndarray) else jnp).moveaxis(
                moved, front, back
            )
        return found

    def site(self, name: str) -> GaussianSite:
        """The Gaussian site of this name."""
        return next(s for s in self.sites if s.name == name)

    @property
    def _parts(self) -> tuple[Grouping | GaussianSite, ...]:
        """In the order of the numbers."""
        if self.arrow is None:
            return self.sites
        groupings = self.arrow.all
        names = {name for g in groupings for name, _ in g.sites}
        rest = [s for s in self.sites if s.name not in names]
        return (groupings[0], *rest, *groupings[1:])


JOINT = "latents"


def joint_block(sites: tuple[GaussianSite, ...], dtype: Any) -> Block:
    """The one Gaussian block of a joint structure."""
    return Block(JOINT, JOINT, (sum(prod(s.shape) for s in sites),), dtype)
