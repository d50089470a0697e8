# SPDX-License-Identifier: Apache-2.0
"""The dependence of predictors on latents in groups, each on one group.

Random effects ``b[group]`` are found in this way, however they are written, and so are
the steps of a walk. The method probes the affine map from latents to predictors (the
model's program was proved to be affine). Ones in all members give the loading of a
predictor, and the numbers of the members in their place give which member it is. Random
numbers must then give the same predictors; otherwise a predictor depends on several
members.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
from jax import Array, lax

from numpyro_gpaug.errors import NotConjugateError
from numpyro_gpaug.gaussians.dense import AffineMap
from numpyro_gpaug.gaussians.rows import Rows
from numpyro_gpaug.math import linalg
from numpyro_gpaug.model.latents import Grouping, Structure

# The largest number of entries in a matrix for predictions, and the number from which
# on rows by groups are faster although they need a check.
_MOST, _LARGE = 2**24, 2**20
# Numbers of members are written in digits to this base, which float32 resolves with
# room for rounding.
_BASE = 1024
# The number of random vectors with which a map is compared, and the largest rounding
# error, in units of the last digit.
PROBES, ROUNDING = 2, 500


class Predictors(NamedTuple):
    """Affine functions of a model's Gaussian latents, concatenated.

    :param structure: the structure of the model.
    :param offset: their values at latents of zero, (n,).
    :param push: their derivative in the numbers by site.
    :param residual: their variances given the latents, (n,).
    :param grouped: whether each is known to depend on one group.
    :param adjacent: whether each may depend on two adjacent steps of a chain.
    """

    structure: Structure
    offset: Array
    push: Callable[[dict[str, Array]], Array]
    residual: Array
    grouped: bool = False
    adjacent: bool = False

    def __call__(self, flat: Array) -> Array:
        """Return the values (n,) at latents (size,), without the residual."""
        return self.offset + self.push(self.structure.split(flat))

    @property
    def many(self) -> bool:
        """Whether they are too many for one matrix."""
        return len(self.offset) * self.structure.size > _MOST

    @property
    def large(self) -> bool:
        """Whether one dense matrix would be slow."""
        return len(self.offset) * self.structure.size > _LARGE

    @property
    def matrices(self) -> Any:
        """Return a dense map for few predictors, and otherwise the map of the structure
        of the Gaussian, which may need every row to depend on one group."""
        whole = not (self.many or self.grouped)
        return self.dense if whole else self.structure.form.map(self)

    @property
    def dense(self) -> AffineMap:
        """The map as one matrix."""
        structure, number = self.structure, len(self.offset)
        like = jnp.zeros(structure.size, structure.dtype)
        projection = _matrix(lambda z: self.push(structure.split(z)), like, number)
        if structure.basis is not None:
            projection = _resolved(projection, structure.matrix)
        return AffineMap(self.offset[None], projection[None], self.residual[None])

    @property
    def rows(self) -> Rows:
        """The predictors as rows that each depend on one group, or on one step of a
        chain; see :meth:`misfit`."""
        structure = self.structure
        if structure.form.all_groupings:
            others = list(structure.groupings)
            own = jnp.zeros((len(self.offset), 0), structure.dtype)
            group = jnp.zeros(len(self.offset), int)
        else:
            groups, *others = structure.groupings
            read = self._adjacent if self.adjacent else self.looked_at
            own, group = read(groups)
        eye = jnp.eye(structure.width, dtype=structure.dtype)
        dense = jax.vmap(self._pushed(None), out_axes=1)(eye)
        values, places, begin = [own[:, :0]], [group[:, None][:, :0]], 0
        for grouping in others:
            value, place = self.single(grouping)
            values.append(value)
            places.append(begin + place)
            begin += structure.each(grouping) * structure.members(grouping)
        value, index = jnp.concatenate(values, -1), jnp.concatenate(places, -1)
        return Rows(own, group, dense, value, index)

    def _pushed(self, grouping: Grouping | None) -> Callable[[Array], Array]:
        return lambda numbers: self.push(self.structure.placed(grouping, numbers))

    def single(self, grouping: Grouping) -> tuple[Array, Array]:
        """Return the coefficients of single latents of a grouping, (n, s), and their
        places in the grouping.

        :param grouping: a grouping such that each predictor depends on at most one
            member, or on one of each colour.
        """
        if not grouping.colours:
            value, index = self.looked_at(grouping)
            each = value.shape[-1]
            return value, index[:, None] * each + jnp.arange(each)
        classes = jnp.asarray(grouping.classes, self.structure.dtype)
        found = lax.map(lambda marked: self.looked_at(grouping, marked), classes)
        value, place = found[0][..., 0].T, found[1].T
        if grouping.most >= len(classes):
            return value, place
        _, largest = lax.top_k(jnp.abs(value), grouping.most)
        value, place = (jnp.take_along_axis(x, largest, 1) for x in (value, place))
        return value, place

    def _adjacent(self, grouping: Grouping) -> tuple[Array, Array]:
        """Return the coefficients (n, 2 R) of the first step that each predictor
        depends on and of the next step, and which step the first is, (n,)."""
        even = jnp.arange(self.structure.members(grouping)) % 2 == 0
        found = [
            self.looked_at(grouping, marked.astype(self.structure.dtype))
            for marked in (even, ~even)
        ]
        (left, at), (right, other) = found
        seen, also = ((x != 0).any(-1) for x in (left, right))
        # Both steps in the order of the chain.
        turned = also & (~seen | (other < at))
        first = jnp.where(turned[:, None], right, left)
        second = jnp.where(turned[:, None], left, right)
        return jnp.concatenate([first, second], -1), jnp.where(turned, other, at)

    def looked_at(
        self, grouping: Grouping, marked: Array | float = 1.0
    ) -> tuple[Array, Array]:
        """Return the coefficients (n, R) of the member that each predictor depends on,
        and which member it is, (n,). For a predictor that depends on none, these are
        zeros and the first member.

        :param grouping: a grouping such that each predictor depends on at most one
            member.
        :param marked: one for members that count, and zero for all others, (members,).
        """
        structure = self.structure
        members, each = structure.members(grouping), structure.each(grouping)
        digits = (
            1 if members <= _BASE else int(np.ceil(np.log(members) / np.log(_BASE)))
        )
        counted = jnp.arange(members)
        codes = [counted // _BASE**k % _BASE for k in range(digits)]
        marks = jnp.stack([jnp.ones_like(counted), *codes]).astype(structure.dtype)
        marks = marks * marked
        # One number of every member at a time. The barrier prevents the compiler from
        # computing all of this itself, slowly, if nothing else is unknown.
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

    def misfit(
        self, pairs: tuple[Array, Array] | None = None, *, any_pairs: bool = False
    ) -> Array:
        """Return the error of :attr:`rows` at random latents, relative to its terms and
        in units of rounding. A large number shows that some predictor depends on
        several groups.

        :param pairs: pairs of predictors of one datum, which must depend on the same
            group.
        :param any_pairs: whether predictors may depend on nodes that are no neighbours.
        """
        structure, parts = self.structure, self.rows
        form: Any = structure.form
        terms = parts.own, parts.dense, parts.value
        scale = jnp.abs(jnp.concatenate(terms, -1)).sum(-1)
        rng, worst = np.random.default_rng(0), jnp.zeros((), self.offset.dtype)
        for _ in range(PROBES):
            probe = jnp.asarray(rng.normal(size=structure.size), structure.dtype)
            # Without the offset, which may be much larger than the rest.
            moved = form.shifts(parts, probe)
            off = self.push(structure.split(probe)) - moved
            worst = jnp.maximum(worst, relative(off, scale))
        if any_pairs:
            return worst
        if form.all_groupings:
            both = (parts, parts) if pairs is None else [parts.at(x) for x in pairs]
            missing = form.missing(parts, parts)
            missing |= form.missing(*both)
            return jnp.where(missing, jnp.inf, worst)
        if pairs is not None:
            left, right = (parts.at(place) for place in pairs)
            seen = (left.own != 0).any(-1) & (right.own != 0).any(-1)
            apart = (seen & (left.group != right.group)).any()
            worst = jnp.where(apart, jnp.inf, worst)
        return worst


def _matrix(linear: Callable[[Array], Array], like: Array, number: int) -> Array:
    """Return the matrix of a linear map, transposed.

    :param linear: the map, of a vector.
    :param like: such a vector.
    :param number: the length of its result.
    """
    if number < like.size:
        # Row by row if there are fewer rows.
        pull = jax.linear_transpose(linear, like)
        eye = jnp.eye(number, dtype=jax.eval_shape(linear, like).dtype)
        return jax.vmap(lambda row: pull(row)[0], out_axes=1)(eye)
    return jax.vmap(linear)(jnp.eye(like.size, dtype=like.dtype))


def _resolved(projection: Array, basis: Array) -> Array:
    """Return a projection in which rows are zero if they are as small as rounding
    errors of zero: of the sums over latents that they are.

    :param projection: (size, n).
    :param basis: the directions of its rows as columns, (size, size).
    """
    eps = float(jnp.finfo(projection.dtype).eps)
    plain = jnp.square(linalg.precise(jnp.matmul)(basis, projection)).sum(-1)
    # A few roundings, of half a unit each, of terms of these sizes.
    least = 2 * eps * (jnp.sqrt(plain) @ jnp.abs(basis))
    sizes = jnp.linalg.norm(projection, axis=-1)
    return jnp.where((sizes > least)[:, None], projection, 0)


def relative(off: Array, terms: Array) -> Array:
    """Return the largest deviation, in units of the rounding of terms. Where there are
    no terms, the deviation must be zero."""
    info = jnp.finfo(off.dtype)
    return (jnp.abs(off) / jnp.maximum(terms, info.tiny)).max(initial=0) / info.eps


def check_groups(misfit: Array, what: str) -> None:
    """Raise if some datum depends on several groups, or on different members of two
    sites that were found to share their members.

    :param misfit: the error from :meth:`Predictors.misfit`.
    :param what: the name of the data in the message.
    """
    # In Python, because a comparison in JAX would compile a program.
    if not float(misfit) < ROUNDING:
        raise NotConjugateError(
            f"{what} depend on several groups or steps each, and depended on one each "
            "when the guide was set up. Make a new guide for these arguments. For "
            "predictions use draws, numpyro.infer.Predictive(model, guide=guide, ...)"
        )
