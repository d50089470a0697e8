# SPDX-License-Identifier: Apache-2.0
"""Gaussian latents that meet in a likelihood, and so are drawn jointly."""

from __future__ import annotations

from typing import NamedTuple

import jax
import jax.numpy as jnp
from jax import Array
from jax.flatten_util import ravel_pytree

from numpyro_gpaug.gp.projection import latent_first
from numpyro_gpaug.infer.mcmc.gaussian_kernel import Values
from numpyro_gpaug.infer.mcmc.joint import Design
from numpyro_gpaug.likelihoods.augmentation import lookup_augmentation
from numpyro_gpaug.likelihoods.expectations import base_distribution
from numpyro_gpaug.model.jaxpr import dependence_tree
from numpyro_gpaug.model.structure import Block
from numpyro_gpaug.model.view import BoundProblem

Natural = dict[str, tuple[Array, Array]]


class Group(NamedTuple):
    """Blocks that share predictors, and so are drawn jointly.

    :param blocks: the blocks.
    :param predictors: what they reach, as ``"site/parameter"``.
    :param batched: whether the group is one process whose latents are independent of
        each other given the auxiliaries.
    """

    blocks: tuple[Block, ...]
    predictors: tuple[str, ...]
    batched: bool

    @property
    def sites(self) -> tuple[str, ...]:
        """The observed sites they reach."""
        return tuple(dict.fromkeys(p.rsplit("/", 1)[0] for p in self.predictors))


def reached_by(problem: BoundProblem) -> dict[str, set[str]]:
    """Names of the blocks that reach each predictor."""
    blocks = problem.structure.blocks
    shapes = {
        b.name: problem.conditional(b).shape if b.is_process else b.shape
        for b in blocks
    }
    inputs = {b.name: jax.ShapeDtypeStruct(shapes[b.name], b.dtype) for b in blocks}
    tree = dependence_tree(problem.predictor_values, inputs)
    return {name: set(leaf.state) for name, leaf in tree.items()}


def groups_of(problem: BoundProblem) -> tuple[Group, ...]:
    """Blocks joined where they reach the same predictor."""
    blocks, reach = problem.structure.blocks, reached_by(problem)
    latents, coupled = problem.latents(), problem.coupled()
    groups = []
    left = list(blocks)
    while left:
        names, predictors = {left[0].name}, set[str]()
        grown = True
        while grown:
            grown = False
            for predictor, reached in reach.items():
                if reached & names and predictor not in predictors:
                    predictors.add(predictor)
                    names |= reached
                    grown = True
        members = tuple(b for b in left if b.name in names)
        left = [b for b in left if b.name not in names]
        alone = len(members) == 1 and members[0].is_process
        name = members[0].name
        batched = alone and latents[name] is None and name not in coupled
        groups.append(Group(members, tuple(sorted(predictors)), batched))
    return tuple(groups)


def in_order(groups: tuple[Group, ...], problem: BoundProblem) -> tuple[Group, ...]:
    """First those whose draw needs no auxiliaries, so that the last auxiliaries drawn
    go with the latents."""
    needs = {
        g: any(needs_auxiliaries(problem, p) for p in g.predictors) for g in groups
    }
    return tuple(sorted(groups, key=lambda g: needs[g]))


def needs_auxiliaries(problem: BoundProblem, predictor: str) -> bool:
    """Whether a predictor's Gaussian site is one given auxiliaries."""
    site, latent = predictor.rsplit("/", 1)
    d = base_distribution(problem.message(site)["fn"])
    augmentation = lookup_augmentation(type(d))
    assert augmentation is not None
    blocks = augmentation.gibbs_blocks(d)
    own = next(i for i, block in enumerate(blocks) if latent in block)
    return ("aux",) in blocks[:own]


def joint_design(group: Group, problem: BoundProblem) -> Design:
    """All latents of a group, standardised and side by side, at all its predictors."""
    blocks = group.blocks
    laws = {b.name: problem.conditional(b) for b in blocks if b.is_process}
    priors = problem.priors()
    zeros = {b.name: jnp.zeros(b.shape, b.dtype) for b in blocks}
    flat, restore = ravel_pytree(zeros)
    projections = [law.projection for law in laws.values()]  # computed outside the jvp
    assert len(projections) == len(laws)

    def predictors(flat: Array) -> Array:
        at = {}
        for name, white in restore(flat).items():
            loc, scale = priors[name]
            value = loc + scale * white
            at[name] = laws[name].values(value) if name in laws else value
        values = problem.predictor_values(at)
        return jnp.concatenate([values[p].ravel() for p in group.predictors])

    offset, push = jax.linearize(predictors, flat)
    projection = jax.vmap(push)(jnp.eye(flat.size, dtype=flat.dtype))
    return Design.of(offset[None], projection[None])


def draw_group(
    key: Array, group: Group, design: Design, natural: Natural, problem: BoundProblem
) -> Values:
    """Draws the latents of a group, by site."""
    potential, precision, _ = sites_of_group(group, natural, problem)
    z = design.draw(key, potential, precision)
    if group.batched:
        (block,) = group.blocks
        return {block.site: z.reshape(block.shape)}
    zeros = {b.name: jnp.zeros(b.shape, b.dtype) for b in group.blocks}
    white, priors = ravel_pytree(zeros)[1](z[0]), problem.priors()
    found = {}
    for block in group.blocks:
        loc, scale = priors[block.name]
        found[block.site] = loc + scale * white[block.name]
    return found


def sites_of_group(
    group: Group, natural: Natural, problem: BoundProblem
) -> tuple[Array, Array, Array]:
    """Potentials and precisions where the design of a group looks, and what the
    predictors' sites sum to at function values of zero (for a batched group, whose
    design looks at function values)."""
    if not group.batched:
        columns = [natural[p] for p in group.predictors]
        potential, precision = (
            jnp.concatenate([column[i].ravel() for column in columns]) for i in (0, 1)
        )
        return potential[None], precision[None], jnp.zeros((), potential.dtype)
    (block,) = group.blocks

    def predictors(values: Array) -> Values:
        found = problem.predictor_values({block.name: values})
        return {p: found[p] for p in group.predictors}

    # Predictors are elementwise affine in the function values.
    law = problem.conditional(block)
    zeros = jnp.zeros(law.shape, law.dtype)
    offsets, push = jax.linearize(predictors, zeros)
    pull = jax.linear_transpose(push, zeros)
    slopes = push(jnp.ones_like(zeros))
    slanted = {p: natural[p][0] - natural[p][1] * offsets[p] for p in group.predictors}
    (potential,) = pull(slanted)
    (precision,) = pull({p: natural[p][1] * slopes[p] for p in group.predictors})
    fixed = sum(
        0.5 * (offsets[p] * (natural[p][0] + slanted[p])).sum()
        for p in group.predictors
    )
    return latent_first(potential), latent_first(precision), jnp.asarray(fixed)
