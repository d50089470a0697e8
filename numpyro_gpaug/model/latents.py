# SPDX-License-Identifier: Apache-2.0
"""The structure of a model: its Gaussian latents, and the form of their precision."""

from __future__ import annotations

import zlib
from base64 import b64decode, b64encode
from dataclasses import dataclass, replace
from math import prod
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
from jax import Array

from numpyro_gpaug.gaussians import Structure as Form
from numpyro_gpaug.gaussians import unstructured
from numpyro_gpaug.gaussians.base import Layout, StructurePrior
from numpyro_gpaug.math.recurrences import linked_along, split, white_along
from numpyro_gpaug.model.structure import Block, Observed, Plate


class GaussianSite(NamedTuple):
    """A sample site that is part of the joint Gaussian.

    :param name: the name of the site.
    :param shape: the shape of its standard normal numbers.
    :param value_shape: the shape of its values.
    :param local: whether it has a member for every datum, and no other data depend on
        its members by codes. In a prediction the members are then new.
    :param ordered: the number of its last axes whose members have an order that the
        prior depends on, such as areas of a map and steps of a walk.
    """

    name: str
    shape: tuple[int, ...]
    value_shape: tuple[int, ...]
    local: bool
    ordered: int = 0


class Grouping(NamedTuple):
    """Sites with the same members, such that every datum depends on one member.

    :param sites: names, and the axes of their numbers that are over members.
    :param size: the number of steps (along the last of the axes) in a block; each block
        is a member.
    :param before: the number of entries of the first block that precede the first step;
        entries may also follow the last step. These entries are standard normal, and no
        datum depends on them.
    :param colours: the colour of each member (by :func:`coded`) if a datum depends on
        several members, each of another colour.
    :param most: the number of members that a datum depends on at most.
    :param correlated: whether the members are steps whose noise has covariances of its
        own.
    :param in_turn: whether the members are those of the first site, then those of the
        second, and so on, each with numbers of its own site. Numbers that a site has
        not are standard normal, and no datum depends on them.
    """

    sites: tuple[tuple[str, tuple[int, ...]], ...]
    size: int = 1
    before: int = 0
    colours: str = ""
    most: int = 1
    correlated: bool = False
    in_turn: bool = False

    @property
    def alone(self) -> tuple[Grouping, ...]:
        """The groupings of its single sites."""
        return tuple(self._replace(sites=(site,), in_turn=False) for site in self.sites)

    @property
    def classes(self) -> np.ndarray:
        """Whether each member has each of the colours, (colours, members)."""
        found = np.frombuffer(b64decode(self.colours), np.int32)
        return np.equal.outer(np.arange(found.max() + 1), found)


def coded(colours: np.ndarray) -> str:
    """Return whole numbers as text."""
    return b64encode(colours.astype(np.int32).tobytes()).decode()


@dataclass(frozen=True)
class Structure:
    """The structure of a model.

    :param blocks: Gaussian processes and plain Gaussian weight vectors that are
        independent; or the one block of all latents that are jointly Gaussian.
    :param others: names of all other latent sites.
    :param observed: observed sites.
    :param plates: plates by name, at the arguments of the analysis.
    :param functions: shapes of the function values of processes, at the same arguments.
    :param constraints: constraints of the model's params, by name.
    :param process_names: names of the Gaussian processes.
    :param gaussian_others: other latent sites that have a Gaussian distribution.
    :param indexed: whether the model indexes latents, or function values, by numbers.
    :param joint: whether one Gaussian has all latents. What follows describes it.
    :param sites: Gaussian sample sites, in the order of the model.
    :param dtype: the dtype of the joint Gaussian.
    :param held: Gaussian sites outside the joint Gaussian, fixed at a point estimate,
        and why.
    :param shapes: shapes of the values of all sites.
    :param form: the structure of its precision matrix.
    :param groupings: sites such that every datum depends on one of their members. The
        first are the groups that the form eliminates.
    :param recurrences: sites whose numbers are not independent standard normal:
        transition matrices connect them from step to step
        (:mod:`numpyro_gpaug.model.links`), and these are not part of the structure. The
        last of the axes over members is over steps.
    :param basis: an orthogonal matrix as bytes of float64, if the numbers of a dense
        Gaussian are coordinates in its columns; see :meth:`turned`.
    :param fields: names of the sites in coordinates of their own, whose prior has a
        sparse precision (:class:`~numpyro_gpaug.model.gaussians.Field`).
    :param rounded: names of the processes whose covariances have the rounding errors of
        the prior variance; see :mod:`numpyro_gpaug.gp.projection`.
    """

    blocks: tuple[Block, ...]
    others: tuple[str, ...]
    observed: tuple[Observed, ...]
    plates: dict[str, Plate]
    functions: dict[str, jax.ShapeDtypeStruct]
    constraints: dict[str, Any]
    process_names: tuple[str, ...] = ()
    gaussian_others: tuple[str, ...] = ()
    indexed: bool = True
    joint: bool = False
    sites: tuple[GaussianSite, ...] = ()
    dtype: Any = None
    held: tuple[tuple[str, str], ...] = ()
    shapes: tuple[tuple[str, tuple[int, ...]], ...] = ()
    form: Form = unstructured(0)
    groupings: tuple[Grouping, ...] = ()
    recurrences: tuple[Grouping, ...] = ()
    basis: bytes | None = None
    fields: tuple[str, ...] = ()
    rounded: tuple[str, ...] = ()

    @property
    def processes(self) -> tuple[Block, ...]:
        """The blocks that are Gaussian processes."""
        return tuple(b for b in self.blocks if b.is_process)

    @property
    def weights(self) -> tuple[Block, ...]:
        """The blocks that are plain weight vectors."""
        return () if self.joint else tuple(b for b in self.blocks if not b.is_process)

    @property
    def largest(self) -> int:
        """The number of rows of the largest dense matrix that a step factorises."""
        if self.joint:
            return self.form.largest_matrix
        return max((b.shape[-1] for b in self.blocks), default=0)

    def sources(self) -> dict[str, tuple[str, ...]]:
        """Return names of the blocks that each predictor depends on."""
        return {
            predictor: sources
            for site in self.observed
            for predictor, sources in zip(site.predictors, site.sources, strict=True)
        }

    @property
    def subsampled(self) -> dict[str, Plate]:
        """The plates that draw a proper subsample."""
        return {k: p for k, p in self.plates.items() if p.subsample_size < p.size}

    @property
    def zeros(self) -> dict[str, Array]:
        """Zeros for the site of every block, or for all jointly Gaussian sites."""
        if self.joint:
            shapes = [(s.name, s.value_shape, self.dtype) for s in self.sites]
        else:
            shapes = [(b.site, b.shape, b.dtype) for b in self.blocks]
        return {name: jnp.zeros(shape, dtype) for name, shape, dtype in shapes}

    @property
    def flat(self) -> dict[str, Array]:
        """:attr:`zeros`, and function values of zero."""
        return self.zeros | jax.tree.map(jnp.zeros_like, self.functions)

    @property
    def size(self) -> int:
        """The size of the joint Gaussian."""
        return self.blocks[0].shape[0] if self.blocks else 0

    def sizeless(self) -> Structure:
        """Return this structure without the parts that depend on the arguments or their
        values."""
        functions = self.functions if self.joint else {}
        kept = replace(self, plates={}, constraints={}, functions=functions)
        return replace(kept, shapes=(), basis=None)

    def places(self, here: Structure) -> np.ndarray:
        """Return the places of another structure's numbers among the numbers of this
        one; -1 for new members. Both are structures of the same model.

        :param here: the structure at other arguments.
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

    def with_sites(self, sites: tuple[GaussianSite, ...]) -> Structure:
        """Return this structure with sites of other shapes."""
        return replace(self, sites=sites)._of_its_size()

    def _of_its_size(self) -> Structure:
        total = sum(
            self.latents(p) if isinstance(p, Grouping) else prod(p.shape)
            for p in self._parts
        )
        layout = Layout(0, 0, total)
        if self.form.all_groupings:
            nodes = sum(map(self.latents, self.groupings))
            layout = Layout(nodes, 1, total - nodes)
        elif self.groupings:
            first = self.groupings[0]
            sizes = self.members(first), self.each(first)
            layout = Layout(*sizes, total - self.latents(first), self._steps)
        form = self.form.resized(layout)
        basis = self.basis if total == self.size else None
        block = Block(JOINT, JOINT, (total,), self.dtype)
        return replace(self, form=form, blocks=(block,), basis=basis)

    @property
    def _steps(self) -> int:
        """The number of steps of each chain of the form."""
        if not self.recurrences:
            return 1
        first = self.groupings[0] if self.groupings else self.recurrences[0]
        if first.in_turn:
            return self.members(first)
        return self.along(self.recurrences[0])[1]

    def turned(self, projection: np.ndarray) -> Structure:
        """Return the dense structure whose numbers are coordinates in principal
        directions of the predictors. Standard normal numbers remain standard normal.
        The information of the data about one coordinate is then separate from the
        information about the others, and keeps all its digits even where the others
        have much more.

        :param projection: the matrix (size, n) of the predictors, which are linear in
            the latents.
        """
        wide = np.asarray(projection, float)
        basis = np.linalg.eigh(wide @ wide.T)[1]
        return replace(self, basis=basis.tobytes())

    @property
    def basis_mark(self) -> int:
        """A fingerprint of the basis of the latents; 0 for the standard basis."""
        return zlib.crc32(self.basis or b"")

    @property
    def unturned(self) -> Structure:
        """Return this structure in the basis of the latents in the model."""
        return replace(self, basis=None)

    @property
    def matrix(self) -> Array:
        """The :attr:`basis`, (size, size)."""
        flat = np.frombuffer(self.basis or b"").reshape(self.size, self.size)
        return jnp.asarray(flat, self.dtype)

    def split(self, flat: Any) -> dict[str, Any]:
        """Return numbers (..., size) by site, in the shapes of :class:`GaussianSite`.
        The sites of the first grouping come first, and sites without a grouping last.

        :param flat: the numbers of all sites.
        """
        found: dict[str, Any] = {}
        begin, lead = 0, flat.shape[:-1]
        for part in self._parts:
            if isinstance(part, Grouping):
                size = self.latents(part)
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
        """Join into (size,) the numbers that :meth:`split` separates."""
        return jnp.concatenate([
            self.grouped(part, numbers).ravel() if isinstance(part, Grouping)
            else numbers[part.name].ravel()
            for part in self._parts
        ])  # fmt: skip

    def in_form(self, form: Form, groupings: tuple[Grouping, ...]) -> Structure:
        """Return this structure in another form, with its numbers in another order.

        :param form: the form, for any numbers of latents.
        :param groupings: see :class:`Structure`.
        """
        return replace(self, form=form, groupings=groupings)._of_its_size()

    def in_steps(self, recurrences: tuple[Grouping, ...]) -> Structure:
        """Return this structure with transitions between the steps of these sites, and
        of no others."""
        return replace(self, recurrences=recurrences)

    @property
    def unstructured(self) -> Structure:
        """Return this structure with independent standard normal numbers and a dense
        precision."""
        return self.in_steps(()).in_form(unstructured(0), ())

    @property
    def standard(self) -> bool:
        """Whether its latents are standard normal a priori."""
        return not (self.recurrences or self.fields)

    def along(self, steps: Grouping) -> tuple[int, int]:
        """Return the number of chains, and the number of steps (or of blocks of steps)
        of each."""
        name, axes = steps.sites[0]
        chains = prod(self.site(name).shape[a] for a in axes[:-1])
        return chains, self.members(steps) // chains

    def unlinked(
        self, numbers: dict[str, Array], links: tuple[Array, ...]
    ) -> dict[str, Array]:
        """Return the standard normal numbers behind the numbers by site.

        :param links: transition matrices by chain, (chains, steps, R, ...).
        """
        found = dict(numbers)
        if self.basis is not None:
            return self.split(self.matrix @ self.joined(found))
        for steps, link in zip(self.recurrences, links, strict=True):
            along = self.grouped(steps, numbers).reshape(*link.shape[:3], 1)
            white = white_along(link, along)
            found |= self._ungrouped(steps, white.reshape(-1, link.shape[-2]))
        return found

    def white(self, flat: Array, links: tuple[Array, ...]) -> Array:
        """Return the standard normal numbers behind the latents (size,).

        :param links: transition matrices by chain, (chains, steps, R, ...).
        """
        if not self.recurrences and self.basis is None:
            return flat
        return self.joined(self.unlinked(self.split(flat), links))

    def linked(self, white: Array, links: tuple[Array, ...]) -> Array:
        """Return the latents (size,) of standard normal numbers; the inverse of
        :meth:`white`.

        :param white: standard normal numbers, one per latent.
        :param links: transition matrices by chain, (chains, steps, R, ...).
        """
        if self.basis is not None:
            return white @ self.matrix
        if not self.recurrences:
            return white
        numbers = self.split(white)
        for steps, link in zip(self.recurrences, links, strict=True):
            noise = self.grouped(steps, numbers).reshape(*link.shape[:3], 1)
            along = linked_along(link, noise)
            numbers |= self._ungrouped(steps, along.reshape(-1, link.shape[-2]))
        return self.joined(numbers)

    def whole_links(self, links: tuple[Array, ...]) -> Array:
        """Return the transition matrices of all numbers of a step, (chains, steps, R,
        R); zero for numbers that are not in a chain. If some chain has whiteners of its
        noise, whiteners and units of all numbers follow.

        :param links: transition matrices by chain.
        """
        # The first step and the first number of each site.
        begins, step, begin, groups = {}, 0, 0, self.groupings[0]
        for alone in groups.alone:
            begins[alone.sites[0][0]] = step, begin
            if groups.in_turn:
                step += self.members(alone)
            else:
                begin += self.each(alone)
        each = self.each(groups)
        found = jnp.zeros((len(links[0]), self._steps, each, each), self.dtype)
        given = [split(link) for link in links]
        none = all(whitener is None for _, whitener in given)
        whole = found + jnp.eye(each, dtype=self.dtype)
        units = jnp.ones_like(found[..., 0])
        pairs = zip(links, given, strict=True)
        for steps, (all_, (link, whitener)) in zip(
            self.recurrences, pairs, strict=True
        ):
            own = np.concatenate([
                begins[alone.sites[0][0]][1] + np.arange(self.each(alone))
                for alone in steps.alone
            ])  # fmt: skip
            first, _ = begins[steps.sites[0][0]]
            there = slice(first, first + link.shape[1])
            found = found.at[:, there, own[:, None], own].set(link)
            if whitener is not None:
                whole = whole.at[:, there, own[:, None], own].set(whitener)
                units = units.at[:, there, own].set(all_[..., -1])
        if none:
            return found
        return jnp.concatenate([found, whole, units[..., None]], -1)

    def prior(self, links: tuple[Array, ...], nodes: Any = None) -> StructurePrior:
        """Return the prior of its numbers.

        :param links: transition matrices by chain.
        :param nodes: the entries of a sparse precision, and its log-determinant.
        """
        if nodes is not None:
            return self.form.prior(self.dtype, nodes)
        whole = self.whole_links(links) if links else None
        return self.form.prior(self.dtype, whole)

    def cost(self, rows: int) -> float:
        """Return the number of operations of one update.

        :param rows: the number of predictors.
        """
        return self.form.cost(rows, self.width)

    @property
    def width(self) -> int:
        """The number of latents outside groups, which any datum may depend on."""
        return sum(prod(p.shape) for p in self._parts if isinstance(p, GaussianSite))

    def members(self, grouping: Grouping) -> int:
        """Return the number of members of a grouping."""
        if grouping.in_turn:
            return sum(map(self.members, grouping.alone))
        name, axes = grouping.sites[0]
        *over, last = (self.site(name).shape[a] for a in axes)
        return prod(over) * -(-(last + grouping.before) // grouping.size)

    def each(self, grouping: Grouping) -> int:
        """Return the number of latents of one member, over all sites."""
        if grouping.in_turn:
            return max(map(self.each, grouping.alone))
        total = sum(prod(self.site(name).shape) for name, _ in grouping.sites)
        return total // self.members(Grouping(grouping.sites)) * grouping.size

    def latents(self, grouping: Grouping) -> int:
        """Return the number of latents of all members, including missing ones."""
        return self.members(grouping) * self.each(grouping)

    def placed(self, grouping: Grouping | None, numbers: Array) -> dict[str, Array]:
        """Return numbers by site, zero for all sites outside a grouping. The numbers
        have the shape (members, each). For ``None`` they have the shape (width,), and
        belong to the sites that any datum may depend on."""
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
        """Return the numbers of a grouping's sites, (members, each)."""
        members, parts = self.members(grouping), []
        if grouping.in_turn:
            each = self.each(grouping)
            for alone in grouping.alone:
                part = self.grouped(alone, numbers)
                parts.append(jnp.pad(part, [(0, 0), (0, each - part.shape[-1])]))
            return jnp.concatenate(parts)
        for name, axes in grouping.sites:
            part = jnp.moveaxis(numbers[name], axes, range(len(axes)))
            if grouping.size > 1:
                none = [(0, 0)] * part.ndim
                none[len(axes) - 1] = self.missing(grouping)
                part = jnp.pad(part, none)
            parts.append(part.reshape(members, -1))
        return jnp.concatenate(parts, -1)

    def missing(self, grouping: Grouping) -> tuple[int, int]:
        """Return the numbers of missing steps in the first and in the last block."""
        single, (_, blocks) = Grouping(grouping.sites), self.along(grouping)
        there = grouping.before + self.along(single)[1]
        return grouping.before, blocks * grouping.size - there

    def _ungrouped(self, grouping: Grouping, numbers: Any) -> dict[str, Any]:
        found: dict[str, Any] = {}
        begin, lead = 0, numbers.shape[:-2]
        if grouping.in_turn:
            for alone in grouping.alone:
                end = begin + self.members(alone)
                part = numbers[..., begin:end, : self.each(alone)]
                found |= self._ungrouped(alone, part)
                begin = end
            return found
        for name, axes in grouping.sites:
            shape = self.site(name).shape
            over = tuple(shape[a] for a in axes)
            order = *axes, *(a for a in range(len(shape)) if a not in axes)
            rest = tuple(shape[a] for a in order[len(axes) :])
            part = numbers[..., begin : begin + prod(rest) * grouping.size]
            begin += prod(rest) * grouping.size
            if grouping.size > 1:
                before, after = self.missing(grouping)
                there = slice(before, before + over[-1])
                whole = *lead, *over[:-1], before + over[-1] + after, *rest
                at = [slice(None)] * (len(lead) + len(over) - 1)
                part = part.reshape(whole)[(*at, there)]
            moved = part.reshape((*lead, *over, *rest))
            places = len(lead) + np.argsort(order)
            found[name] = moved.transpose(*range(len(lead)), *map(int, places))
        return found

    def site(self, name: str) -> GaussianSite:
        """Return the Gaussian site of this name."""
        return next(s for s in self.sites if s.name == name)

    @property
    def _parts(self) -> tuple[Grouping | GaussianSite, ...]:
        """Groupings and single sites, in the order of the numbers."""
        names = {name for g in self.groupings for name, _ in g.sites}
        rest = [s for s in self.sites if s.name not in names]
        cut = None if self.form.all_groupings else 1
        first = self.groupings[:cut]
        return (*first, *rest, *self.groupings[len(first) :])


JOINT = "latents"
