# SPDX-License-Identifier: Apache-2.0
r"""Draws of latents whose groups are weighted separately.

Given hyperparameters and all other latents :math:`u` (fixed effects, effects of other
groupings), groups :math:`z_g` are independent in the posterior. So are the unstructured
effects of areas given the structured ones. With J
candidates for each group, their mean weight estimates the integral of the group, and
the product of the means estimates the weight of :math:`u`,

.. math:: \frac{p(\theta, u)}{q(u)} \prod_{g=1}^G \frac 1 J \sum_{j=1}^J
    \frac{p(y_g \mid z_{gj}, u)\, p(z_{gj} \mid \theta)}{h(z_{gj} \mid u)},

without bias, because candidates of different groups are independent. One candidate per
group, drawn according to the weights, makes a draw of the latents. A single weight for
all groups would vary with the sum of their log-weights, whose variance grows with G.

Candidates are the points of a lattice, shifted at random for each group, mapped to
quantiles of logistic distributions around the Gaussian. These have wider tails than the
posterior under a Gaussian prior, so the weight is a smooth and periodic function on the
unit cube. For such functions a lattice is the more precise the smoother they are. With
one latent per group, two binary data and J = 8, the logarithm of the mean varies more
than a thousand times less than the logarithm of one weight; with two latents and J =
16, about a hundred times less.

References: Kuntz, Crucinio and Johansen (2022), Product-form estimators: exploiting
independence to scale up Monte Carlo; Dick, Kuo and Sloan (2013), High-dimensional
integration: the quasi-Monte Carlo way (shifted lattice rules).
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
from jax import Array
from jax.scipy.special import logsumexp

from numpyro_gpaug.gaussians import Structure as Form
from numpyro_gpaug.gaussians.base import GroupsPrior, Layout
from numpyro_gpaug.math.importance import compensated_sum
from numpyro_gpaug.model.affine import ROUNDING
from numpyro_gpaug.model.latents import Structure

# The smallest number of groups that are weighted apart: with fewer, one weight for all
# of them is as even.
FEWEST = 48
# The smallest numbers of candidates of a group (if there are draws enough): of groups
# with one latent, and with several.
CANDIDATES = 8, 16
# Steps of the lattice, one for each latent of a group; a group has at most as many.
LATTICE = 1, 5, 3, 11, 7, 13, 9, 15
# Scales of the pairs of random latents that show on which group each datum depends.
# Every second pair has opposite signs. The scales grow, because a likelihood may have
# wide steps.
SCALES = 1.0, 1.0, 2.0, 4.0, 8.0, 16.0


class GroupDraws(NamedTuple):
    """The way in which draws at one point are weighted.

    :param sizes: sizes of the noise: of groups, and of the rest.
    :param group: the group on which each log-density of the data depends, (n,); the
        number of groups for none.
    :param corners: the number of draws of the border; all have equally many candidates
        of every group.
    """

    sizes: Layout
    group: np.ndarray
    corners: int

    def uniform(self, rng: np.random.Generator, points: int, dtype: Any) -> np.ndarray:
        """Draw uniform numbers that shift lattices, and one that chooses among
        candidates, (points, corners, G, R + 1)."""
        shape = points, self.corners, self.sizes.groups, self.sizes.each + 1
        return rng.random(shape, dtype)


def may_part(structure: Structure) -> bool:
    """Whether a model has enough groups that are independent given the other latents.

    :param structure: the structure of the model.
    """
    return structure.form.independent.groups >= FEWEST


def draws_at(sizes: Layout, room: float) -> int:
    """Return the default number of draws at each point: enough for two draws of the
    border; for one if groups have several latents, or if there is no room for more.

    :param sizes: sizes of the latents.
    :param room: the number of draws that there is room for.
    """
    few = CANDIDATES[sizes.each > 1]
    return few if room < 2 * CANDIDATES[0] else max(2 * CANDIDATES[0], few)


def corners_of(draws: int, sizes: Layout) -> int:
    """Return the number of draws of the border among a number of draws.

    :param draws: draws at each point.
    :param sizes: sizes of the latents.
    """
    most = max(draws // CANDIDATES[sizes.each > 1], 1)
    return next(n for n in range(most, 0, -1) if draws % n == 0)


def group_of_terms(
    terms: Callable[[np.ndarray], np.ndarray], sizes: Layout, rng: np.random.Generator
) -> np.ndarray | None:
    """Return the group on which each term of the log-density of data depends, (n,), the
    number of groups for none; ``None`` if some term depends on several. If each group
    has one of two values, a term of one group equals the term at one of both.

    :param terms: returns the terms, (k, n), at latents made from standard normal
        numbers (k, size).
    :param sizes: sizes of these numbers.
    :param rng: random numbers.
    """
    groups = sizes.groups
    bits = max(groups - 1, 1).bit_length()
    places = np.arange(groups)[None] >> np.arange(bits)[:, None] & 1
    found: Any = None
    for turn, scale in enumerate(SCALES):
        mixed = rng.random((2, groups)) < 0.5
        second = np.concatenate([np.zeros((1, groups)), np.ones((1, groups)), places])
        chosen = np.concatenate([second > 0, mixed])
        drawn = scale * rng.normal(size=(2, sizes.size))
        if turn % 2:
            drawn[1] = -drawn[0]
        own, rest = sizes.split(drawn)
        numbers = np.where(chosen[..., None], own[1], own[0]).reshape(len(chosen), -1)
        corner = np.broadcast_to(rest[0], (len(chosen), rest.shape[1]))
        values = terms(np.concatenate([numbers, corner], 1))
        first, other, told = values[0], values[1], values[2:]
        rounding = ROUNDING * np.finfo(values.dtype).eps
        near = rounding * (1 + np.abs(first) + np.abs(other))
        known = np.isfinite(near)
        found = np.full(len(first), groups) if found is None else found
        first, other = np.where(known, first, 0), np.where(known, other, 0)
        moved = np.abs(told[:bits] - first) > near
        code = (moved * (1 << np.arange(bits))[:, None]).sum(0)
        apart = np.abs(other - first)
        fresh = (apart > 4 * near) & (found == groups)
        found = np.where(fresh, np.minimum(code, groups), found)
        # Every value now follows from the values of single groups, unless some term
        # depends on several groups.
        seen = np.concatenate([chosen[2:], np.zeros((len(told), 1), bool)], 1)[:, found]
        expected = np.where(seen, other, first)
        # Values that are almost equal show nothing.
        off = np.abs(told - expected) - np.where(apart > 4 * near, 0, apart)
        if not (off <= near)[:, known].all():
            return None
        if (found < groups).all():
            break
    return found


def weigh_groups(
    apart: GroupDraws,
    number: int,
    form: Form,
    q: Any,
    prior: GroupsPrior,
    log_terms: Callable[[Array], Array],
    latents: Callable[[Array], Any],
    shift: Array,
    noise: Array,
    widths: Array,
    uniform: Array,
) -> tuple[Array, Array, Array, Any]:
    """Draw the latents at one point. Return the draws, (corners * J, size), the
    log-weight of each, its rounding error, and values of sites.

    :param apart: the groups; its ``group`` may be traced.
    :param number: J, candidates of a group.
    :param form: the structure of the latents.
    :param q: the Gaussian.
    :param prior: the prior of the latents.
    :param log_terms: returns the terms of the data at latents (size,).
    :param latents: returns values of sites there.
    :param shift: shift of the border from the mean of the Gaussian, in units of
        ``noise``, (K,).
    :param noise: standard normal numbers, (corners, K).
    :param widths: factors by which draws of the border are wider than the Gaussian,
        (corners,).
    :param uniform: from :meth:`GroupDraws.uniform`, (corners, G, R + 1).
    """
    sizes = apart.sizes

    def one(rest: Array, width: Array, uniform: Array) -> tuple[Any, ...]:
        own, over = _candidates(uniform[:, :-1], number)
        wide = jnp.broadcast_to(width * rest + shift, (number, len(rest)))
        z = q.mean + q.unwhiten(form.join_noise(own, wide))
        data = jax.vmap(log_terms)(z)
        # Relative to the best candidate, whose rounding error counts; others may be far
        # away.
        base = data.max(0)
        base = jnp.where(jnp.isfinite(base), base, 0)
        rises = jnp.zeros((sizes.groups + 1, number), data.dtype)
        rises = rises.at[apart.group].add((data - base).T)[:-1]
        candidates, corners = form.split_groups(z)
        of_groups, of_corner = prior.terms_by_group(candidates, corners[0])
        latent = 0.5 * jnp.square(own) + of_groups - over
        weights = rises.T + latent.sum(-1)
        level = logsumexp(weights, 0)
        chosen = _chosen(jnp.exp(weights - level), uniform[:, -1])
        composed = jnp.take_along_axis(candidates, chosen[..., None], 0)
        beside = 0.5 * jnp.square(rest) + jnp.log(width)
        terms = jnp.concatenate([base, beside, of_corner, level - np.log(number)])
        drawn = form.join_groups(composed, corners)
        return drawn, *compensated_sum(terms), jax.vmap(latents)(drawn)

    drawn, total, lost, sites = jax.vmap(one)(noise, widths, uniform)
    flat = jax.tree.map(lambda x: x.reshape(-1, *x.shape[2:]), (drawn, sites))
    return flat[0], jnp.repeat(total, number), jnp.repeat(lost, number), flat[1]


def _candidates(shifts: Array, number: int) -> tuple[Array, Array]:
    """Return the whitened candidates of every group, and the log-ratio of their density
    to the standard normal density; both (J, G, R).

    :param shifts: shifts of the lattice, (G, R).
    :param number: J.
    """
    each, dtype = shifts.shape[-1], shifts.dtype
    steps = np.outer(np.arange(number), LATTICE[:each]) % number / number
    places = (shifts + jnp.asarray(steps, dtype)[:, None]) % 1
    eps = float(jnp.finfo(dtype).eps)
    logits = jax.scipy.special.logit(jnp.clip(places, eps, 1 - eps))
    # A product of several logistic densities is wider than a normal density unless each
    # is narrower.
    scale = max(0.6, each**-0.5)
    own = scale * logits
    density = -logits - 2 * jax.nn.softplus(-logits) - np.log(scale)
    return own, density + 0.5 * jnp.square(own) + 0.5 * np.log(2 * np.pi)


def _chosen(shares: Array, picks: Array) -> Array:
    """Choose a candidate of each group for as many draws as there are candidates: each
    draw according to their shares, and the draws of one group as different as the
    shares allow.

    :param shares: shares that sum to one, (J, G).
    :param picks: uniform, (G,).
    """
    number = len(shares)
    steps = jnp.arange(number, dtype=picks.dtype)[:, None] / number
    places = (picks + steps) % 1
    edges = jnp.cumsum(shares, 0)
    index = (edges[None] < places[:, None]).sum(1)
    return jnp.minimum(index, number - 1)
