# SPDX-License-Identifier: Apache-2.0
"""The Gaussians that elliptical slices go around."""

from __future__ import annotations

from typing import NamedTuple

import jax
import jax.numpy as jnp
from jax import Array, lax
from jax.flatten_util import ravel_pytree

from numpyro_gpaug.fields import Marginals, chosen
from numpyro_gpaug.infer.bound import BoundProblem
from numpyro_gpaug.infer.gaussian_kernel import Function, Values
from numpyro_gpaug.infer.groups import Group, joint_design
from numpyro_gpaug.infer.joint import Design
from numpyro_gpaug.linalg import Moments, NaturalGaussian, kl_to_diagonal, moments
from numpyro_gpaug.structure import Block

MAX_ROUNDS = 30


class Ellipse(NamedTuple):
    """A Gaussian ``x = mean + W' u``, ``u`` white, and where it takes the data.

    :param moments: of one block, latent axis first; of several, side by side, (1, D).
    :param reach: how function values move with ``u``, by process: ``W A``,
        (latents, M, N) or (latents, D, N).
    """

    moments: Moments
    reach: Values


class Part(NamedTuple):
    """Blocks that one ellipse is made for.

    :param blocks: the blocks.
    :param group: where they reach the same predictors; ``None`` for a block alone,
        whose ellipse is the fit itself.
    """

    blocks: tuple[Block, ...]
    group: Group | None

    def spread(self, ellipse: Ellipse, white: Array) -> Values:
        """``W' u`` by block name."""
        flat = pushed(ellipse.moments.whitener, white)
        if self.group is None:
            (block,) = self.blocks
            return {block.name: flat.reshape(block.shape)}
        return self._restored(flat[0])

    def means(self, ellipse: Ellipse) -> Values:
        """By block name."""
        mean = ellipse.moments.mean
        if self.group is None:
            (block,) = self.blocks
            return {block.name: mean.reshape(block.shape)}
        return self._restored(mean[0])

    def whitened(self, ellipse: Ellipse, x: Values) -> Array:
        """``u`` with ``x = mean + W' u``, from latents by site."""
        q = ellipse.moments
        flat, _ = ravel_pytree({b.name: x[b.site] for b in self.blocks})
        centred = flat.reshape(q.mean.shape) - q.mean
        return lax.linalg.triangular_solve(
            q.whitener, centred[..., None], left_side=True, lower=True, transpose_a=True
        )[..., 0]

    def moved(
        self, ellipse: Ellipse, white: Array, spread: Values, problem: BoundProblem
    ) -> Values:
        """How far ``u`` moves what the model is run at, by block name."""
        found, latents = dict(spread), problem.latents()
        for name, reach in ellipse.reach.items():
            rows = latents[name]
            noise = white if self.group or rows is None else white[jnp.asarray(rows)]
            block = next(b for b in self.blocks if b.name == name)
            found[name] = problem.conditional(block).shifts(pushed(reach, noise))
        return found

    def ellipse(
        self,
        fitted: dict[str, Moments],
        functions: dict[str, Function],
        problem: BoundProblem,
    ) -> Ellipse:
        """The Gaussian of these blocks, at the model's present hyperparameters."""
        latents = problem.latents()
        if self.group is None:
            (block,) = self.blocks
            q = fitted[block.name]
            reach = {
                name: chosen(q, latents[name]).whitener @ functions[name].projection
                for name in {block.name} & functions.keys()
            }
            return Ellipse(q, reach)
        q = joint_fit(self.group, fitted, problem)
        columns, reach = jax.vmap(self._restored)(q.whitener[0]), {}
        for name in columns.keys() & functions.keys():
            rows = latents[name]
            spread = columns[name].reshape(
                q.mean.shape[-1], -1, columns[name].shape[-1]
            )
            spread = spread if rows is None else spread[:, jnp.asarray(rows)]
            reach[name] = jnp.swapaxes(spread, 0, 1) @ functions[name].projection
        return Ellipse(q, reach)

    def _restored(self, flat: Array) -> Values:
        zeros = {b.name: jnp.zeros(b.shape, b.dtype) for b in self.blocks}
        return ravel_pytree(zeros)[1](flat)


def parts_of(groups: tuple[Group, ...], problem: BoundProblem) -> tuple[Part, ...]:
    """Blocks that meet in a predictor (or whose latents do) together, others alone."""
    coupled = problem.coupled()

    def part(group: Group) -> Part:
        meet = len(group.blocks) > 1 or group.blocks[0].name in coupled
        return Part(group.blocks, group if meet else None)

    return tuple(part(group) for group in groups)


class _Fit(NamedTuple):
    """A Gaussian from the Gaussian sites of its predictors, (1, n)."""

    potential: Array
    precision: Array
    q: Moments
    slopes: Marginals
    at: Marginals
    bound: Array


def joint_fit(
    group: Group, fitted: dict[str, Moments], problem: BoundProblem
) -> Moments:
    """The best Gaussian on all latents of a group, blocks side by side: closed-form
    updates, from the sites that the blocks' own Gaussians give.

    A fit in which blocks are independent is narrower than the posterior where they
    meet, and so no Gaussian to take ellipses of.

    :param group: blocks that reach the same predictors.
    :param fitted: a Gaussian for every block.
    :param problem: the model.
    :return: moments, (1, D).
    """
    design, priors = joint_design(group, problem), problem.priors()
    locs, scales = (
        ravel_pytree({b.name: priors[b.name][i] for b in group.blocks})[0]
        for i in (0, 1)
    )
    names = sorted(b.name for b in group.blocks)
    apart = jax.scipy.linalg.block_diag(
        *(w for name in names for w in fitted[name].whitener)
    )
    mean = jnp.concatenate([fitted[name].mean.ravel() for name in names])
    first = Moments((mean - locs)[None] / scales, apart[None] / scales, jnp.zeros(1))

    def expected(at: Marginals) -> Array:
        return problem.expected_at(_by_predictor(group, at, problem))

    def fit(potential: Array, precision: Array) -> _Fit:
        weighted = design.projection * precision[..., None, :]
        eye = jnp.eye(locs.size, dtype=weighted.dtype)
        total = eye + weighted @ jnp.swapaxes(design.projection, -1, -2)
        residual = potential - precision * design.offset
        q = moments(
            NaturalGaussian(
                jnp.einsum("...mn,...n->...m", design.projection, residual), total
            )
        )
        at = _seen(design, q)
        value, slopes = jax.value_and_grad(expected)(at)
        bound = value - kl_to_diagonal(q, jnp.zeros(()), jnp.ones(())).sum()
        return _Fit(potential, precision, q, slopes, at, bound)

    def sites(at: Marginals, slopes: Marginals) -> tuple[Array, Array]:
        precision = jnp.maximum(-2 * slopes.variance, 0)
        return slopes.mean + precision * at.mean, precision

    at = _seen(design, first)
    start = fit(*sites(at, jax.grad(expected)(at)))

    def go_on(carry: tuple[_Fit, Array, Array, Array]) -> Array:
        _, step, gain, rounds = carry
        return (rounds < MAX_ROUNDS) & (gain > 1e-2) & (step > 1e-2)

    def update(
        carry: tuple[_Fit, Array, Array, Array],
    ) -> tuple[_Fit, Array, Array, Array]:
        now, step, gain, rounds = carry
        target = sites(now.at, now.slopes)
        old = now.potential, now.precision
        new = fit(*(o + step * (t - o) for o, t in zip(old, target, strict=True)))
        better = new.bound > now.bound
        kept = jax.tree.map(lambda a, b: jnp.where(better, a, b), new, now)
        gain = jnp.where(better, new.bound - now.bound, gain)
        return kept, jnp.where(better, step, step / 2), gain, rounds + 1

    dtype = start.bound.dtype
    infinite = jnp.asarray(jnp.inf, dtype)
    best, *_ = lax.while_loop(
        go_on, update, (start, jnp.ones((), dtype), infinite, jnp.int32(0))
    )
    q = best.q
    return Moments(locs + scales * q.mean, q.whitener * scales, q.log_det)


def pushed(matrix: Array, vector: Array) -> Array:
    """``matrix' vector``, leading axes broadcast."""
    return jnp.einsum("...mn,...m->...n", matrix, vector)


def _seen(design: Design, q: Moments) -> Marginals:
    """Marginals of the predictors."""
    spread = jnp.square(q.whitener @ design.projection).sum(-2)
    return Marginals(design.offset + design.fields(q.mean), spread)


def _by_predictor(
    group: Group, at: Marginals, problem: BoundProblem
) -> dict[str, Marginals]:
    values = problem.predictor_values({})
    shapes = {p: values[p].shape for p in group.predictors}
    found, begin = {}, 0
    for name, shape in shapes.items():
        end = begin + values[name].size
        found[name] = Marginals(*(x[0, begin:end].reshape(shape) for x in at))
        begin = end
    return found
