# SPDX-License-Identifier: Apache-2.0
"""The Gaussians that elliptical slices go around."""

from __future__ import annotations

from typing import NamedTuple

import jax
import jax.numpy as jnp
from jax import Array, lax
from jax.flatten_util import ravel_pytree

from numpyro_gpaug.infer.mcmc.gaussian_kernel import Function, Values
from numpyro_gpaug.infer.mcmc.groups import Group, joint_design
from numpyro_gpaug.math.linalg import Moments, NaturalGaussian, kl_to_diagonal, moments
from numpyro_gpaug.model.marginals import Marginals, chosen
from numpyro_gpaug.model.structure import Block
from numpyro_gpaug.model.view import BoundProblem

MAX_ROUNDS = 40
White = tuple[Array, ...]


class Ellipse(NamedTuple):
    """A Gaussian ``x = mean + W' u``, ``u`` white, and where it takes the data.

    :param moments: of one block, latent axis first; of several, side by side, (1, D).
    :param reach: how function values move with ``u``, by process: ``W A``,
        (latents, M, N) or (latents, D, N).
    """

    moments: Moments
    reach: Values


class Ellipses(NamedTuple):
    """The Gaussians that slices go around.

    :param parts: an ellipse per part of the model.
    :param centres: what the model is run at when all latents are at their means.
    """

    parts: tuple[Ellipse, ...]
    centres: Values


class Part(NamedTuple):
    """Blocks that one ellipse is made for.

    :param group: the blocks.
    :param joint: whether all their latents are side by side in one Gaussian; otherwise
        it is one block, whose latents have a Gaussian each.
    """

    group: Group
    joint: bool

    @property
    def blocks(self) -> tuple[Block, ...]:
        """The blocks."""
        return self.group.blocks

    def by_block(self, flat: Array) -> Values:
        """Values of all latents by block name."""
        zeros = {b.name: jnp.zeros(b.shape, b.dtype) for b in self.blocks}
        return ravel_pytree(zeros)[1](flat.ravel())

    def spread(self, ellipse: Ellipse, white: Array) -> Values:
        """``W' u`` by block name."""
        return self.by_block(pushed(ellipse.moments.whitener, white))

    def means(self, ellipse: Ellipse) -> Values:
        """By block name."""
        return self.by_block(ellipse.moments.mean)

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
        for block in self.blocks:
            if block.is_process:
                rows = None if self.joint else latents[block.name]
                noise = white if rows is None else white[jnp.asarray(rows)]
                values = pushed(ellipse.reach[block.name], noise)
                found[block.name] = problem.conditional(block).shifts(values)
        return found

    def ellipse(
        self, q: Moments, functions: dict[str, Function], problem: BoundProblem
    ) -> Ellipse:
        """The ellipse of a Gaussian on these blocks."""
        latents, reach = problem.latents(), {}
        columns = jax.vmap(self.by_block)(q.whitener[0]) if self.joint else {}
        for block in self.blocks:
            if not block.is_process:
                continue
            rows, projection = latents[block.name], functions[block.name].projection
            if self.joint:
                spread = columns[block.name]
                spread = spread.reshape(len(spread), -1, spread.shape[-1])
                spread = spread if rows is None else spread[:, jnp.asarray(rows)]
                reach[block.name] = jnp.swapaxes(spread, 0, 1) @ projection
            else:
                reach[block.name] = chosen(q, rows).whitener @ projection
        return Ellipse(q, reach)


def meet(groups: tuple[Group, ...], problem: BoundProblem) -> bool:
    """Whether blocks meet in a predictor, or the latents of one do: what a fit that
    holds them independent has too narrow a Gaussian for."""
    coupled = problem.coupled()
    return any(len(g.blocks) > 1 or g.blocks[0].name in coupled for g in groups)


class _Fit(NamedTuple):
    """Gaussian sites of all predictors, per part (latents, n), the bound they give, and
    the sites that a whole step leads to."""

    sites: tuple[NaturalGaussian, ...]
    bound: Array
    target: tuple[NaturalGaussian, ...]


class _Seen(NamedTuple):
    """What the predictors see of standardised latents: ``offset + projection' z``."""

    offset: Array
    projection: Array

    def posterior(self, sites: NaturalGaussian) -> Moments:
        """Of standard normal latents given Gaussian sites of the predictors, which hold
        a precision each."""
        weighted = self.projection * sites.precision[..., None, :]
        gram = weighted @ jnp.swapaxes(self.projection, -1, -2)
        residual = sites.potential - sites.precision * self.offset
        potential = jnp.einsum("...mn,...n->...m", self.projection, residual)
        eye = jnp.eye(gram.shape[-1], dtype=gram.dtype)
        return moments(NaturalGaussian(potential, eye + gram))

    def marginals(self, q: Moments) -> Marginals:
        """Of the predictors."""
        spread = jnp.square(q.whitener @ self.projection).sum(-2)
        return Marginals(self.offset + pushed(self.projection, q.mean), spread)


def best_gaussians(
    parts: tuple[Part, ...], functions: dict[str, Function], problem: BoundProblem
) -> tuple[Moments, ...]:
    """The Gaussian of every part that maximises the evidence lower bound: closed-form
    updates with backtracking, from the prior.

    :param parts: of the model, every one of which reaches the likelihood through
        predictors; latents of a part are correlated, parts are independent.
    :param functions: processes at the data.
    :param problem: the model.
    :return: moments per part, (latents, M) or (1, D).
    """
    seen = tuple(_seen(part, functions, problem) for part in parts)

    def expected(at: tuple[Marginals, ...]) -> Array:
        return problem.expected_at(_carried(parts, at, problem))

    def evaluate(sites: tuple[NaturalGaussian, ...]) -> tuple[Array, tuple]:
        qs = [s.posterior(site) for s, site in zip(seen, sites, strict=True)]
        at = tuple(s.marginals(q) for s, q in zip(seen, qs, strict=True))
        value, slopes = jax.value_and_grad(expected)(at)
        prior = jnp.zeros((), value.dtype), jnp.ones((), value.dtype)
        divergence = sum(kl_to_diagonal(q, *prior).sum() for q in qs)
        pairs = zip(at, slopes, strict=True)
        return value - divergence, tuple(_site(a, slope) for a, slope in pairs)

    def go_on(carry: tuple[_Fit, Array, Array, Array]) -> Array:
        _, step, gain, rounds = carry
        return (rounds < MAX_ROUNDS) & (gain > 1e-2) & (step > 1e-2)

    def update(
        carry: tuple[_Fit, Array, Array, Array],
    ) -> tuple[_Fit, Array, Array, Array]:
        now, step, gain, rounds = carry
        sites = jax.tree.map(lambda a, b: a + step * (b - a), now.sites, now.target)
        bound, target = evaluate(sites)
        better = bound > now.bound
        new = _Fit(sites, bound, target)
        kept = jax.tree.map(lambda a, b: jnp.where(better, a, b), new, now)
        gain = jnp.where(better, bound - now.bound, gain)
        return kept, jnp.where(better, step, step / 2), gain, rounds + 1

    shapes = [jnp.zeros_like(s.offset) for s in seen]
    nothing = tuple(NaturalGaussian(zero, zero) for zero in shapes)
    dtype = jnp.result_type(*shapes)
    start = _Fit(nothing, jnp.asarray(-jnp.inf, dtype), nothing)
    one, infinite = jnp.ones((), dtype), jnp.asarray(jnp.inf, dtype)
    best, *_ = lax.while_loop(go_on, update, (start, one, infinite, jnp.int32(0)))
    found = zip(parts, seen, best.sites, strict=True)
    return tuple(_unstandardised(p, s.posterior(site), problem) for p, s, site in found)


def minus_log_density(white: White, scale: Array) -> Array:
    """Minus the log-density of the Gaussians, up to a constant.

    :param white: what they would have white, by part.
    :param scale: factors of their standard deviations, by part.
    """
    squares = jnp.stack([jnp.square(u).sum() for u in white])
    return 0.5 * (squares / jnp.square(scale.astype(squares.dtype))).sum()


def pushed(matrix: Array, vector: Array) -> Array:
    """``matrix' vector``, leading axes broadcast."""
    return jnp.einsum("...mn,...m->...n", matrix, vector)


def _site(at: Marginals, slopes: Marginals) -> NaturalGaussian:
    # Where a likelihood is not log-concave its site's precision may be negative.
    precision = jnp.maximum(-2 * slopes.variance, 0)
    return NaturalGaussian(slopes.mean + precision * at.mean, precision)


def _seen(part: Part, functions: dict[str, Function], problem: BoundProblem) -> _Seen:
    """Function values of a process alone; of several blocks, their predictors."""
    if not part.joint:
        function = functions[part.blocks[0].name]
        shape = (part.blocks[0].shape[:-1] or (1,)) + function.offset.shape[-1:]
        return _Seen(jnp.broadcast_to(function.offset, shape), function.projection)
    design = joint_design(part.group, problem)
    return _Seen(design.offset, design.projection)


def _carried(
    parts: tuple[Part, ...], at: tuple[Marginals, ...], problem: BoundProblem
) -> dict[str, Marginals]:
    """Marginals of all predictors from those that parts see."""
    alone = {p.blocks[0].name: x for p, x in zip(parts, at, strict=True) if not p.joint}
    carried = problem.predictors(alone)
    for part, marginals in zip(parts, at, strict=True):
        begin = 0
        for name in part.group.predictors if part.joint else ():
            shape = carried[name].mean.shape
            end = begin + carried[name].mean.size
            values = (x[0, begin:end].reshape(shape) for x in marginals)
            carried[name], begin = Marginals(*values), end
    return carried


def _unstandardised(part: Part, q: Moments, problem: BoundProblem) -> Moments:
    if not part.joint:
        return q
    priors = problem.priors()
    loc, scale = (
        ravel_pytree({b.name: priors[b.name][i] for b in part.blocks})[0]
        for i in (0, 1)
    )
    log_det = q.log_det + 2 * jnp.log(scale).sum()
    return Moments(loc + scale * q.mean, q.whitener * scale, log_det)
