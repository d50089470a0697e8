# SPDX-License-Identifier: Apache-2.0
"""Gaussian blocks that share a predictor, and so have a joint posterior."""

from __future__ import annotations

import math
from typing import NamedTuple

import jax
import jax.numpy as jnp
from jax import Array

from numpyro_gpaug.gaussians.base import GaussianFactors
from numpyro_gpaug.gaussians.dense import AffineMap, Prior
from numpyro_gpaug.gp.projection import latent_first
from numpyro_gpaug.likelihoods.augmentation import lookup_augmentation
from numpyro_gpaug.likelihoods.expectations import base_distribution
from numpyro_gpaug.model.structure import Block
from numpyro_gpaug.model.view import ModelView

Values = dict[str, Array]
Factors = dict[str, GaussianFactors]


class Group(NamedTuple):
    """Blocks that share predictors, and so have a joint posterior.

    :param blocks: the blocks.
    :param predictors: predictors that depend on them, as ``"site/parameter"``.
    :param batched: whether the group is one process whose latents are independent of
        each other given the auxiliaries.
    """

    blocks: tuple[Block, ...]
    predictors: tuple[str, ...]
    batched: bool

    @property
    def sites(self) -> tuple[str, ...]:
        """The observed sites that depend on the blocks."""
        return tuple(dict.fromkeys(p.rsplit("/", 1)[0] for p in self.predictors))

    def split(self, flat: Array) -> Values:
        """Split the concatenated values of all latents by block name."""
        found, begin = {}, 0
        for block in self.blocks:
            end = begin + math.prod(block.shape)
            found[block.name] = flat[begin:end].reshape(block.shape)
            begin = end
        return found

    def join(self, values: Values) -> Array:
        """Concatenate the values of all latents, given by block name."""
        return jnp.concatenate([values[b.name].ravel() for b in self.blocks])

    def prior(self, priors: dict[str, Prior]) -> Prior:
        """The prior of the concatenated latents, (1, D)."""
        loc = self.join({b.name: priors[b.name].loc for b in self.blocks})
        scale = self.join({b.name: priors[b.name].scale for b in self.blocks})
        return Prior(loc[None], scale[None])


def groups_of(view: ModelView) -> tuple[Group, ...]:
    """Join blocks that share a predictor."""
    sources = {k: set(names) for k, names in view.structure.sources().items()}
    selected, coupled = view.selected(), view.coupled()
    groups = []
    left = list(view.structure.blocks)
    while left:
        names, predictors = {left[0].name}, set[str]()
        grown = True
        while grown:
            grown = False
            for predictor, found in sources.items():
                if found & names and predictor not in predictors:
                    predictors.add(predictor)
                    names |= found
                    grown = True
        members = tuple(b for b in left if b.name in names)
        left = [b for b in left if b.name not in names]
        alone = len(members) == 1 and members[0].is_process
        name = members[0].name
        batched = alone and selected[name] is None and name not in coupled
        groups.append(Group(members, tuple(sorted(predictors)), batched))
    return tuple(groups)


def in_order(groups: tuple[Group, ...], view: ModelView) -> tuple[Group, ...]:
    """Order groups so that groups without auxiliaries are drawn first. The auxiliaries
    in a sample are then those given which its latents were drawn."""
    needs = {g: any(needs_auxiliaries(view, p) for p in g.predictors) for g in groups}
    return tuple(sorted(groups, key=lambda g: needs[g]))


def needs_auxiliaries(view: ModelView, predictor: str) -> bool:
    """Whether the Gaussian factors of a predictor depend on auxiliaries."""
    site, latent = predictor.rsplit("/", 1)
    d = base_distribution(view.message(site)["fn"])
    augmentation = lookup_augmentation(type(d))
    assert augmentation is not None
    blocks = augmentation.gibbs_blocks(d)
    own = next(i for i, block in enumerate(blocks) if latent in block)
    return ("aux",) in blocks[:own]


def joint_map(group: Group, view: ModelView) -> AffineMap:
    """Return the map from the standardised, concatenated latents of a group to its
    predictors."""
    predictors, names = view.predictors, group.predictors
    start, rows = {}, []
    for block in group.blocks:
        size = math.prod(block.shape)
        if block.is_process:
            # Inducing values are standard normal as they are.
            f = view.conditional(block)
            start[block.name] = f.outputs(f.mean)
            eye = jnp.eye(size, dtype=block.dtype)
            moves = jax.vmap(f.moved)(eye.reshape(size, -1, block.shape[-1]))
        else:
            loc, scale = view.priors()[block.name]
            start[block.name] = loc[0]
            moves = jnp.diag(scale[0])
        rows.append(predictors.projection(block.name, names, moves))
    values = predictors.at(start)
    offset = jnp.concatenate([values[k].ravel() for k in names])[None]
    return AffineMap(offset, jnp.concatenate(rows)[None], jnp.zeros_like(offset))


def draw_group(
    key: Array, group: Group, map_: AffineMap, factors: Factors, view: ModelView
) -> Values:
    """Draw the latents of a group, by site."""
    z = map_.draw(key, factors_of_group(group, factors, view)[0])
    if group.batched:
        (block,) = group.blocks
        return {block.site: z.reshape(block.shape)}
    loc, scale = group.prior(view.priors())
    values = group.split((loc + scale * z)[0])
    return {b.site: values[b.name] for b in group.blocks}


def factors_of_group(
    group: Group, factors: Factors, view: ModelView
) -> tuple[GaussianFactors, Array]:
    """Return the factors on the range of a group's affine map, and the sum of the
    predictors' factors at function values of zero (for a batched group, whose map leads
    to function values)."""
    if not group.batched:
        joined = GaussianFactors(*(
            jnp.concatenate([factors[p][i].ravel() for p in group.predictors])[None]
            for i in (0, 1)
        ))  # fmt: skip
        return joined, jnp.zeros((), joined.potential.dtype)
    (block,) = group.blocks
    predictors = view.predictors

    def shifts(values: Array) -> Values:
        found = predictors.shifts({block.name: values})
        return {p: found[p] for p in group.predictors}

    # Predictors are elementwise affine in the function values.
    shape = view.structure.functions[block.name]
    zeros = jnp.zeros(shape.shape, shape.dtype)
    pull = jax.linear_transpose(shifts, zeros)
    slopes = shifts(jnp.ones_like(zeros))
    offsets = predictors.values
    h = {p: factors[p].potential for p in group.predictors}
    w = {p: factors[p].precision for p in group.predictors}
    slanted = {p: h[p] - w[p] * offsets[p] for p in h}
    (potential,) = pull(slanted)
    (precision,) = pull({p: w[p] * slopes[p] for p in w})
    fixed = sum((0.5 * offsets[p] * (h[p] + slanted[p])).sum() for p in h)
    on_values = GaussianFactors(latent_first(potential), latent_first(precision))
    return on_values, jnp.asarray(fixed)
