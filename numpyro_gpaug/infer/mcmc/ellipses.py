# SPDX-License-Identifier: Apache-2.0
"""The Gaussians around which elliptical slices move."""

from __future__ import annotations

from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
from jax import Array, lax

from numpyro_gpaug.gaussians.base import Marginals, selected
from numpyro_gpaug.gaussians.dense import AffineMap, Moments, Prior, unstandardised
from numpyro_gpaug.infer.mcmc.groups import Group, Values, joint_map
from numpyro_gpaug.infer.vi.evaluation import Evaluation
from numpyro_gpaug.infer.vi.latent_gaussian import LatentGaussian, Natural
from numpyro_gpaug.infer.vi.sweeps import backtracked_sweep
from numpyro_gpaug.likelihoods.expectations import Route
from numpyro_gpaug.math.linalg import solve_lower
from numpyro_gpaug.model.structure import Block
from numpyro_gpaug.model.view import ModelView

# Rounds of closed-form updates at most, and the gain in nats below which they stop.
MAX_ROUNDS = 40
LEAST_GAIN = 1e-3

White = tuple[Array, ...]


class Ellipse(NamedTuple):
    """A Gaussian ``x = mean + W' u``, ``u`` white, and its image at the data.

    :param moments: moments of one block, latent axis first, or of several blocks side
        by side, (1, D).
    :param spread: the derivative of function values with respect to ``u``, by process:
        ``W A``, (latents, M, N) or (latents, D, N).
    """

    moments: Moments
    spread: Values


class Ellipses(NamedTuple):
    """The Gaussians around which slices move.

    :param parts: an ellipse per part of the model.
    :param centres: the inputs of the model when all latents are at their means.
    """

    parts: tuple[Ellipse, ...]
    centres: Values


class Part(NamedTuple):
    """Blocks that share one ellipse.

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

    @property
    def name(self) -> str:
        """The name of the first block."""
        return self.blocks[0].name

    def by_block(self, flat: Array) -> Values:
        """Values of all latents by block name."""
        return self.group.split(flat.ravel())

    def shift(self, ellipse: Ellipse, white: Array) -> Values:
        """Return ``W' u`` by block name."""
        return self.by_block(pushed(ellipse.moments.whitener, white))

    def means(self, ellipse: Ellipse) -> Values:
        """Means by block name."""
        return self.by_block(ellipse.moments.mean)

    def whitened(self, ellipse: Ellipse, x: Values) -> Array:
        """Return ``u`` with ``x = mean + W' u``, from latents by site."""
        q = ellipse.moments
        flat = self.group.join({b.name: x[b.site] for b in self.blocks})
        centred = flat.reshape(q.mean.shape) - q.mean
        return solve_lower(q.whitener, centred[..., None], transpose=True)[..., 0]

    def moved(
        self, ellipse: Ellipse, white: Array, shift: Values, view: ModelView
    ) -> Values:
        """Return the change of the model's inputs due to ``u``, by block name."""
        found, latents = dict(shift), view.selected()
        for block in self.blocks:
            if block.is_process:
                chosen = None if self.joint else latents[block.name]
                noise = selected(white, chosen)
                values = pushed(ellipse.spread[block.name], noise)
                found[block.name] = view.conditional(block).outputs.shifts(values)
        return found

    def ellipse(
        self, q: Moments, maps: dict[str, AffineMap], view: ModelView
    ) -> Ellipse:
        """The ellipse of a Gaussian on these blocks."""
        latents, found = view.selected(), {}
        columns = jax.vmap(self.by_block)(q.whitener[0]) if self.joint else {}
        for block in self.blocks:
            if not block.is_process:
                continue
            chosen, projection = latents[block.name], maps[block.name].projection
            if self.joint:
                spread = columns[block.name]
                spread = spread.reshape(len(spread), -1, spread.shape[-1])
                spread = selected(jnp.swapaxes(spread, 0, 1), chosen)
            else:
                spread = selected(q, chosen).whitener
            found[block.name] = spread @ projection
        return Ellipse(q, found)


def share_predictors(groups: tuple[Group, ...], view: ModelView) -> bool:
    """Whether blocks share a predictor, or the latents of one do. Then the Gaussian of
    a fit that makes them independent is too narrow."""
    coupled = view.coupled()
    return any(len(g.blocks) > 1 or g.blocks[0].name in coupled for g in groups)


def best_gaussians(
    parts: tuple[Part, ...], maps: dict[str, AffineMap], view: ModelView
) -> tuple[Moments, ...]:
    """Return, for every part, the Gaussian that maximises the evidence lower bound,
    found by closed-form updates from the prior.

    :param parts: parts of the model; the likelihood depends on each of them through
        predictors. Latents of a part are correlated, and parts are independent.
    :param maps: maps to processes at the data.
    :param view: the view of the model.
    :return: moments per part, (latents, M) or (1, D).
    """
    problem = _problem(parts, maps, view)

    def go_on(carry: tuple[Any, ...]) -> Array:
        *_, gain, rounds = carry
        return (rounds < MAX_ROUNDS) & (gain > LEAST_GAIN)

    def sweep(carry: tuple[Any, ...]) -> tuple[Any, ...]:
        natural, before, steps, _, rounds = carry
        natural, after, steps = backtracked_sweep(
            problem, natural, before, steps, 1.0, None, rounds == 0
        )
        return natural, after, steps, after.bound - before.bound, rounds + 1

    start: Natural = {k: prior.natural for k, prior in problem.priors.items()}
    one = jnp.ones((), problem.dtype)
    evaluation: Evaluation = problem.unevaluated(start)
    steps, first = {name: one for name in start}, jnp.full_like(one, jnp.inf)
    carry = start, evaluation, steps, first, jnp.int32(0)
    natural, *_ = lax.while_loop(go_on, sweep, carry)
    return tuple(_moments(part, natural[part.name], view) for part in parts)


def minus_log_density(white: White, scale: Array) -> Array:
    """Return minus the log-density of the Gaussians, up to a constant.

    :param white: coordinates that are white under the Gaussians, by part.
    :param scale: factors of their standard deviations, by part.
    """
    squares = jnp.stack([jnp.square(u).sum() for u in white])
    return 0.5 * (squares / jnp.square(scale.astype(squares.dtype))).sum()


def pushed(matrix: Array, vector: Array) -> Array:
    """Return ``matrix' vector``, with leading axes broadcast."""
    return jnp.einsum("...mn,...m->...n", matrix, vector)


def _problem(
    parts: tuple[Part, ...], maps: dict[str, AffineMap], view: ModelView
) -> LatentGaussian:
    """Return the model with a part of standard normal latents in place of every
    block."""
    found, priors = {}, {}
    for part in parts:
        map_ = joint_map(part.group, view) if part.joint else maps[part.name]
        size = map_.projection.shape[-2]
        zeros = jnp.zeros((map_.offset.shape[0], size), map_.projection.dtype)
        found[part.name], priors[part.name] = map_, Prior(zeros, zeros + 1)

    sites = [site for site in view.structure.observed if site.latents]
    closed = tuple(s for s in sites if s.route is Route.CLOSED_FORM)
    augmented = tuple(s for s in sites if s.route is not Route.CLOSED_FORM)

    def likelihood(at: dict[str, Marginals]) -> Array:
        carried = _carried(parts, at, view)
        exact = view.expected("exact", closed).of_predictors(carried)
        return exact + view.expected("augmented", augmented).of_predictors(carried)

    return LatentGaussian(
        maps=found,
        priors=priors,
        scales={name: 1 for name in found},
        latents={},
        coupled=(),
        likelihood=likelihood,
        constant=0.0,
        unreached={},
    )


def _carried(
    parts: tuple[Part, ...], at: dict[str, Marginals], view: ModelView
) -> dict[str, Marginals]:
    """Return marginals of all predictors, computed from the marginals of the parts."""
    predictors = view.predictors
    carried = predictors.marginals({p.name: at[p.name] for p in parts if not p.joint})
    for part in parts:
        if part.joint:
            names = part.group.predictors
            means, variances = (predictors.split(names, x[0]) for x in at[part.name])
            carried |= {k: Marginals(means[k], variances[k]) for k in names}
    return carried


def _moments(part: Part, natural: Any, view: ModelView) -> Moments:
    q = natural.moments()
    return unstandardised(q, part.group.prior(view.priors())) if part.joint else q
