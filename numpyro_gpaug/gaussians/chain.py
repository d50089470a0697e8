# SPDX-License-Identifier: Apache-2.0
r"""Gaussians of very many latents along chains: random walks, autoregressions and other
linear states.

The latents are ``z = (x_1, ..., x_T, u)``: R numbers of each of T steps, and K numbers
that any datum may depend on. In the prior each step depends on the one before it by a
transition matrix (link), which may depend on hyperparameters,

.. math:: x_t = A_t x_{t-1} + \epsilon_t, \quad \epsilon_t \sim N(0, I).

The link is one for a random walk, the coefficient for an autoregression, and zero for
independent noise and at the start of a chain. The noise may also have covariances of
its own, as that of the states of a process of time does
(:mod:`numpyro_gpaug.gp.chain`): with K lower and :math:`K \epsilon_t` standard normal,
``K A`` takes the place of A in the precisions below. Such numbers are in units, which
the prior states, since they may change with hyperparameters. A datum depends on one
step and on
``u``, and adds W (R, R) to the precision of its step, and to the border B (R, K) and
the corner. (A prediction may depend on two adjacent steps.) The precision is stored in
these parts and is positive definite by construction.
Let ``E_t`` be the precision of a step given all earlier ones
(:func:`~numpyro_gpaug.math.recurrences.filtered`). With ``M_t = E_t + A_{t+1}'
A_{t+1}`` and ``G_t = M_t^{-1} A_{t+1}'`` the numbers ``y_t = x_t - G_t x_{t+1}`` and
``u`` are Gaussian with a bordered block-diagonal precision of blocks M.
:mod:`~numpyro_gpaug.gaussians.groups` does the rest, between two recurrences. Work and
memory are linear in T.

References: Rue and Held (2005), Gaussian Markov random fields, section 2.4; Rauch, Tung
and Striebel (1965), Maximum likelihood estimates of linear dynamic systems; Sarkka and
Garcia-Fernandez (2021), Temporal parallelization of Bayesian smoothers, of which the
recurrences in blocks are a variant.
"""

from __future__ import annotations

from dataclasses import dataclass, field, replace
from functools import partial
from typing import Any, ClassVar, NamedTuple, Self

import jax
import jax.numpy as jnp
import numpy as np
from jax import Array

from numpyro_gpaug.gaussians.base import Change, Layout, Structure
from numpyro_gpaug.gaussians.groups import (
    Blocks,
    GroupedMoments,
    GroupMoments,
    GroupNatural,
    Groups,
)
from numpyro_gpaug.gaussians.rows import Rows, shifts
from numpyro_gpaug.math import linalg, small
from numpyro_gpaug.math.arrays import STATIC
from numpyro_gpaug.math.blocks import cut_rows, over_blocks, rows_of_blocks
from numpyro_gpaug.math.recurrences import (
    congruent,
    filtered,
    followed,
    linear,
    linked_along,
    noise_of,
    split,
    step_after,
    step_before,
    white_along,
)


@dataclass(frozen=True)
class _Steps(Blocks):
    """The latents of chains given the border: each step depends on the next.

    :param gain: the coefficients of a step on the next, (chains, steps, R, R).
    """

    gain: Array

    def half(self, b: Array) -> Array:
        return super().half(_ahead(self.gain, self._along(b)).reshape(b.shape))

    def drawn(self, e: Array) -> Array:
        alone = self._along(super().drawn(e))
        return _back(self.gain, alone).reshape(e.shape)

    def noise_of(self, x: Array) -> Array:
        along = self._along(x)
        apart = along - small.product(self.gain, step_after(along))
        return super().noise_of(apart.reshape(x.shape))

    def _along(self, x: Array) -> Array:
        return x.reshape(*self.gain.shape[:3], -1)


class _ChainMoments(NamedTuple):
    mean: Array
    inverse: Array
    gain: Array
    roots: Array
    cross: Array
    whitener: Array
    kept: Array | None = None


class ChainMoments(_ChainMoments, GroupedMoments):
    """Moments of a Gaussian along chains. The groups of
    :class:`~numpyro_gpaug.gaussians.base.Layout` are the ``G = chains steps`` steps.

    :param gain: the coefficients of a step on the next, (1, chains, steps, R, R).
    :param roots: roots of every step's covariance given the corner, ``L' L``, (1, G, R,
        R).
    :param kept: if the noise has covariances of its own, ``I - A_{t+1} G_t``, computed
        without a difference, ``A_{t+1}``, and the part of mean and cross gain that does
        not come from the next step, (1, chains, steps, R, 2 R + 1 + E).
    """

    @property
    def given_border(self) -> _Steps:
        return _Steps(self.inverse[0], self.gain[0])

    @property
    def variances(self) -> Array:
        """Variances of the latents, (1, G R + K)."""
        return self._of_steps(self.roots).variances

    def _of_steps(self, roots: Array) -> GroupMoments:
        """Return the moments of steps that are independent, with roots of their
        covariances given the border."""
        return GroupMoments(self.mean, roots, self.cross, self.whitener)

    def half(self, rows: Rows) -> tuple[Array, Array]:
        """Return the two factors of
        :meth:`~numpyro_gpaug.gaussians.groups.GroupMoments.half`, for predictors of one
        step each, or of two adjacent steps."""
        first, second = _by_step(rows, self.layout)
        if second is None:
            return self._of_steps(self.roots).half(rows)
        # A step is its gain times the next step, plus independent noise.
        gain = self.gain.reshape(self.inverse.shape)[0, first.group]
        alone, rest = self._of_steps(self.inverse).half(first)
        moved = small.product(gain.mT, first.own[..., None])[..., 0] + second.own
        given = second._replace(own=moved)
        ahead, _ = self._of_steps(self.roots).half(given)
        for r in range(second.own.shape[-1]):
            lost = self.cross[0, :, r][second.group]
            rest = rest - second.own[:, r, None] * lost
        return jnp.concatenate([alone, ahead], -1), rest

    def covariance(self, rows: Rows) -> Array:
        """Return the covariances of predictors, (n, n)."""
        layout, number = self.layout, len(rows.own)
        size = rows_of_blocks(number, 8 * layout.size, self.mean.dtype) or number

        def of_block(part: Rows) -> Array:
            _, roots = self.push_forward(_projection(part, layout)[None])
            covarying = self.unwhiten(jnp.concatenate(roots, 1)[0].T)
            return jax.vmap(lambda z: _shifts(rows, layout, z))(covarying)

        cut = jax.tree.map(lambda x: cut_rows(x, size), rows)
        return over_blocks(of_block, cut, number)

    def extended(self, prior: ChainPrior, places: np.ndarray) -> ChainMoments:
        """Return moments with longer or shorter chains, and with new chains and border
        latents. New latents have their prior given the rest.

        :param prior: the prior of the requested latents.
        :param places: places of the requested latents among the known ones, -1 for
            new ones.
        """
        layout, links = prior.structure.layout, prior.links
        groups, corner = layout.split(places)
        wanted = links.shape[1]
        each, (chains, steps) = self.layout.each, self.gain.shape[1:3]
        # The first block of a site may not be full.
        first = groups[::wanted].max(-1)
        # A chain is known from its first step, or completely unknown.
        old, chain = first >= 0, first // each // steps
        parts = _Parts(*(x[0].reshape(chains, steps, *x.shape[2:]) for x in (
            self.layout.split(self.mean)[0],
            self.inverse, self.gain.reshape(self.inverse.shape),
            self.roots, self.cross,
        )))  # fmt: skip
        known = _continued(_Parts(*(x[chain] for x in parts)), links)
        fresh = _continued(_unseen(parts, links), links)
        chosen = (
            jnp.where(old.reshape(-1, *[1] * (x.ndim - 1)), x, y)
            for x, y in zip(known, fresh, strict=True)
        )
        mean, inverse, gain, roots, cross = chosen
        border, number = self.border_of(corner)
        flat = 1, layout.groups
        cross = cross.reshape(*flat, *cross.shape[2:])
        return ChainMoments(
            layout.joined(mean.reshape(*flat, each), border.mean),
            inverse.reshape(*flat, each, each),
            gain[None],
            roots.reshape(*flat, each, each),
            jnp.pad(cross, [(0, 0)] * 3 + [(0, number)]),
            border.whitener,
        )


class _Parts(NamedTuple):
    """The parts of the steps, (chains, steps, R, ...), as in :class:`ChainMoments`."""

    mean: Array
    inverse: Array
    gain: Array
    roots: Array
    cross: Array


def _unseen(parts: _Parts, links: Array) -> _Parts:
    """Return the first steps of chains without any data.

    :param parts: the parts of other chains.
    :param links: their transition matrices.
    """
    none = (jnp.zeros((len(links), 1, *x.shape[2:]), x.dtype) for x in parts)
    one, (_, whitener) = _Parts(*none), split(links[:, :1])
    if whitener is not None:
        return one._replace(roots=small.inverse_lower(whitener).mT)
    eye = jnp.eye(one.roots.shape[-1], dtype=one.roots.dtype)
    return one._replace(roots=jnp.broadcast_to(eye, one.roots.shape))


def _continued(parts: _Parts, links: Array) -> _Parts:
    """Return chains of the requested length: cut short, or continued.

    :param parts: the parts of the chains.
    :param links: the requested transition matrices.
    """
    last = min(parts.mean.shape[1], links.shape[1]) - 1
    end = jax.tree.map(lambda x: x[:, last:][:, :1], parts)
    # Steps after the last known one form a chain of their own, about which nothing else
    # is known.
    both = links[:, last:]
    links, whitener = split(both.at[:, 0, :, : both.shape[-2]].set(0))
    noise = jnp.broadcast_to(_eye(links), links.shape)
    if whitener is not None:
        noise = noise_of(whitener)
    start = congruent(end.roots.mT, jnp.broadcast_to(_eye(links), end.roots.shape))
    covariance = linear(congruent, links, noise.at[:, :1].set(start))
    stiff, ahead = small.inverse(covariance), _ahead_of(links, whitener)
    inverse = small.inverse_cholesky(stiff + small.product(ahead.mT, ahead))
    if whitener is None:
        gain = small.product(small.product(inverse.mT, inverse), ahead.mT)
    else:
        both = small.product(covariance, step_after(links).mT)
        gain = small.product(both, step_after(stiff))
    begun = jnp.concatenate([end.mean[..., None], end.cross], -1)
    none = [(0, 0), (0, links.shape[1] - 1), (0, 0), (0, 0)]
    follows = linear(small.product, links, jnp.pad(begun, none))
    roots = _roots(covariance, whitener)
    tail = _Parts(follows[..., 0], inverse, gain, roots, follows[..., 1:])
    return jax.tree.map(lambda x, y: jnp.concatenate([x[:, :last], y], 1), parts, tail)


class ChainNatural(NamedTuple):
    """A Gaussian along chains in natural parameters. Information that is added to it
    has links of zero.

    :param potential: of deviations from the centre, (1, G R + K). If the noise of steps
        has covariances of its own, that of steps is the data's alone.
    :param groups: W, the additional precision of each step, (1, G, R, R).
    :param border: B, (1, G, R, K).
    :param corner: the corner of the precision, (1, K, K).
    :param links: A, the transition matrices to each step, (1, chains, steps, R, R);
        zero at a chain's start. Whiteners of the noise and units may follow, as in
        :func:`~numpyro_gpaug.math.recurrences.split`.
    :param centre: latents, (1, G R + K). If the noise of steps has covariances of its
        own, (1, 2, G R + K): also the standard normal numbers behind the steps, which
        the steps do not have enough digits to find.
    """

    potential: Array
    groups: Array
    border: Array
    corner: Array
    links: Array
    centre: Array

    @property
    def layout(self) -> Layout:
        """The layout of the latents."""
        groups, each, corner = self.border.shape[1:]
        return Layout(groups, each, corner)

    def moments(self) -> ChainMoments:
        """Return mean and factors of the covariance; NaN where the precision is not
        positive definite."""
        layout, (links, whitener) = self.layout, split(self.links[0])
        ahead, along = _ahead_of(links, whitener), links.shape[:3]
        so_far = filtered(self.groups[0].reshape(links.shape), self.links[0])
        inverse = small.inverse_cholesky_of_sum(so_far, ahead)
        covariance = small.product(inverse.mT, inverse)
        kept = None
        if whitener is None:
            gain = small.product(covariance, ahead.mT)
        else:
            gain, kept = _correlated(links, whitener, so_far)
        own, _ = layout.split(self.potential)
        centre, others = layout.split(self.origin)
        if whitener is not None:
            # Steps are accurate where their deviations from the centre are not.
            own += jnp.matvec(self.groups, centre)
            centre = jnp.zeros_like(centre)
        columns = jnp.concatenate([own[0][..., None], self.border[0]], -1)
        columns = _ahead(gain, columns.reshape(*along, -1))
        alone = small.product(covariance, columns)
        solved = _back(gain, alone)
        precision, corner = self._without_steps(solved[..., 1:], alone[..., 1:], kept)
        border = linalg.inverse_cholesky(precision[None])
        corner = jnp.vecmat(jnp.matvec(border, corner), border)
        # The mean and the cross gain are combinations of the solutions.
        turn = jnp.concatenate([-corner.T, border[0].T], -1)
        turn = jnp.concatenate([jnp.eye(1, 1 + len(turn), dtype=turn.dtype), turn])
        back = small.product(solved, turn).reshape(*self.groups.shape[:3], -1)
        if kept is not None:
            kept = jnp.concatenate([kept, small.product(alone, turn)], -1)[None]
        covariance = linear(congruent, gain, covariance, reverse=True)
        roots = _roots(covariance, whitener).reshape(self.groups.shape)
        centre = layout.joined(centre, others)
        mean = centre + layout.joined(back[..., 0], corner)
        inverse = inverse.reshape(self.groups.shape)
        return ChainMoments(
            mean, inverse, gain[None], roots, back[..., 1:], border, kept
        )

    def _without_steps(
        self, steps: Array, alone: Array, kept: Array | None
    ) -> tuple[Array, Array]:
        """Return the precision of the border, (K, K), and its potential, (1, K), with
        the steps integrated out.

        The precision is ``C - B' Y`` with ``Y = M^-1 B``: a small difference, if steps
        can imitate a number of the border, such as a level. As the minimum over Y of
        ``C - B' Y - Y' B + Y' W Y + e' e``, with the white noise e of the steps Y, its
        error is of second order in the errors of Y. The potential is ``c - Y' s``: if
        the potentials c and s are those at the mean, they are small, and so is what the
        errors of Y add.

        :param steps: Y, (chains, steps, R, K).
        :param alone: the parts of them that do not come from the next step.
        :param kept: see :class:`ChainMoments`.
        """
        links, whitener = split(self.links[0])
        own, corner = self.layout.split(self.potential)
        _, groups, each, width = self.border.shape
        if kept is None or whitener is None:
            noise = white_along(self.links[0], steps)
        else:
            noise = _noise(links, whitener, kept[..., :each], steps, alone)
        weighed = small.product(self.groups.reshape(links.shape), steps)
        weighed = weighed - 2 * self.border.reshape(steps.shape)
        steps, noise, weighed = (
            x.reshape(groups * each, width) for x in (steps, noise, weighed)
        )
        total = linalg.sum_of_products(steps, weighed)
        total += linalg.sum_of_products(noise, noise)
        corner -= linalg.sum_of_products(own.reshape(-1, 1), steps)
        if whitener is not None:
            # The pull of the prior on the steps.
            white, _ = self.layout.split(self.centre[:, 1])
            corner += linalg.sum_of_products(white.reshape(-1, 1), noise)
        return self.corner[0] + (total + total.T) / 2, corner

    @property
    def origin(self) -> Array:
        """The latents at the centre, (1, G R + K)."""
        return self.centre if split(self.links)[1] is None else self.centre[:, 0]

    def centred(self, centre: Array) -> ChainNatural:
        """Return the same with its centre at its means."""
        found = self._replace(centre=centre)
        if split(self.links)[1] is None:
            return found._replace(potential=jnp.zeros_like(self.potential))
        # The potentials of steps and of others have the same rounding errors.
        moved = found.origin - self.origin
        return found._replace(potential=self.potential - self.times(moved))

    def times(self, z: Array) -> Array:
        """Return the product of the precision, without links, with latents."""
        return GroupNatural(*self[:4], self.centre).times(z)

    def changed(self, change: Change) -> ChainNatural:
        """Return information about latents there as information about latents here."""
        found = GroupNatural(*self[:4], self.centre).changed(change)
        return self._replace(**found._replace(centre=self.centre)._asdict())

    @property
    def diagonal(self) -> Array:
        """The diagonal of the precision, (1, G R + K)."""
        links, whitener = split(self.links[0])
        steps = jnp.square(_ahead_of(links, whitener)).sum(-2)
        steps += 1 if whitener is None else jnp.square(whitener).sum(-2)
        steps = linalg.diagonal(self.groups) + steps.reshape(self.groups.shape[:3])
        return self.layout.joined(steps, linalg.diagonal(self.corner))

    def inflation(self, variances: Array) -> Array:
        """Return the errors of variances, relative to rounding, (1, G R + K). Without
        covariances of the noise they are the variances times the diagonal of the
        precision. Otherwise steps keep their digits, see :func:`_correlated`."""
        whole = self.diagonal * variances
        if split(self.links)[1] is None:
            return whole
        steps, corner = self.layout.split(whole)
        return self.layout.joined(jnp.ones_like(steps), corner)


@jax.tree_util.register_dataclass
@dataclass(frozen=True)
class ChainPrior:
    """Numbers along chains: each is a link times the number before it plus a standard
    normal number. The other latents are standard normal.

    :param loc: zeros (1, G R + K).
    :param links: transition matrices (chains, steps, R, R); zero at a chain's start.
        Whiteners of the noise and units may follow.
    :param structure: the structure of the latents.
    """

    loc: Array
    links: Array
    structure: Chain = field(metadata=STATIC)

    @property
    def log_det(self) -> Any:
        """The log-determinant of the precision."""
        return 2 * jnp.sum(self._log_noise)

    @property
    def natural(self) -> ChainNatural:
        """The potential and precision."""
        standard = self.structure.standard(self.loc.dtype)
        return standard._replace(links=self.links[None])

    def natural_at(self, centre: Array) -> ChainNatural:
        """Return the natural parameters with a centre, as :class:`ChainNatural` has."""
        if self.structure.correlated:
            steps, corner = self.structure.layout.split(centre[:, 0])
            pull = self.structure.layout.joined(jnp.zeros_like(steps), corner)
        else:
            pull = self.pull(centre)
        return self.natural._replace(potential=-pull, centre=centre)

    def rebased(self, q: ChainNatural) -> ChainNatural:
        """Return natural parameters with the links and units of this prior, for the
        same information as with others."""
        links = self.links[None]
        if not self.structure.correlated:
            # The potential at the centre contains the pull of the prior.
            change = replace(self, links=q.links[0]).pull(q.centre)
            change = change - self.pull(q.centre)
            return q._replace(links=links, potential=q.potential + change)
        before, own, layout = q.links[..., -1], links[..., -1], q.layout
        # Information without data has no units.
        ratio = jnp.where(before > 0, own / jnp.where(before > 0, before, 1), 1)
        ratio = ratio.reshape(1, layout.groups, layout.each)
        steps, corner = layout.split(q.potential)
        known, rest = layout.split(q.origin)
        # The standard normal numbers of the centre stay, and its latents move.
        white, _ = layout.split(q.centre[:, 1])
        along = linked_along(self.links, white.reshape(*links.shape[1:4], 1))
        latents = layout.joined(along.reshape(white.shape), rest)
        found = ChainNatural(
            layout.joined(ratio * steps, corner),
            ratio[..., :, None] * q.groups * ratio[..., None, :],
            ratio[..., None] * q.border, q.corner, links,
            q.centre.at[:, 0].set(latents),
        )  # fmt: skip
        moved = latents - layout.joined(known / ratio, rest)
        return found._replace(potential=found.potential - found.times(moved))

    def divergence(self, q: ChainMoments) -> Array:
        """Return KL(q || prior), (1,), as a sum over steps. Each term is as small as
        the information about its step."""
        links, white = split(self.links)
        steps, corner = self.structure.layout.split(q.mean)
        mean, inverse, roots, cross = (
            x[0].reshape(*links.shape[:3], x.shape[-1])
            for x in (steps[..., None], q.inverse, q.roots, q.cross)
        )
        known = jnp.concatenate([mean, cross], -1)
        # The noise of a step is the part that does not come through its link. The noise
        # of the first step is the step itself.
        first, lost = jnp.concatenate([roots[:, 0].mT, known[:, 0]], -1), self._lost(q)
        if white is None:
            apart = (known - small.product(links, step_before(known)))[:, 1:]
        else:
            assert q.kept is not None
            alone = q.kept[0][..., 2 * links.shape[-1] :]
            first = small.product(white[:, 0], first)
            apart = _noise(links, white, lost, known, alone)[:, 1:]
            lost = small.product(step_after(white), lost)
        spread = small.product(step_after(roots), lost.mT)
        own = small.product(inverse, _ahead_of(links, white).mT)
        noise = (jnp.square(x).sum((-2, -1)) for x in (spread, own))
        logs = 2 * jnp.log(jnp.abs(linalg.diagonal(inverse)))
        logs += 2 * self._log_noise
        along = sum(noise) - (1 + logs).sum(-1)
        along = along.sum() + jnp.square(apart).sum()
        whitener = q.whitener[0]
        rest = jnp.square(corner[0]) - 1
        rest -= 2 * jnp.log(jnp.abs(linalg.diagonal(whitener)))
        total = along + rest.sum() + jnp.square(whitener).sum()
        return 0.5 * (total + jnp.square(first).sum())[None]

    def _lost(self, q: ChainMoments) -> Array:
        """Return ``I - A_{t+1} G_t``, (chains, steps, R, R)."""
        ahead = step_after(split(self.links)[0])
        if q.kept is None:
            return _eye(ahead) - small.product(ahead, q.gain[0])
        size = ahead.shape[-1]
        lost, other = q.kept[0][..., :size], q.kept[0][..., size : 2 * size]
        return lost - small.product(ahead - other, q.gain[0])

    def drawn_white(self, q: ChainMoments, noise: Array) -> Array | None:
        """Return the standard normal numbers behind the latents ``q.mean +
        q.unwhiten(noise)``, (n, G R + K), without the small difference of a step and
        what the step before makes it. ``None`` if the noise of the steps has no
        covariances of its own: the latents are then not much larger than their noise.

        :param q: moments.
        :param noise: standard normal, (n, rank).
        """
        links, whitener = split(self.links)
        if q.kept is None or whitener is None:
            return None
        steps = q.layout.groups * q.layout.each
        fresh, rest = jnp.split(noise.T, [steps])
        fresh = Blocks(q.inverse[0]).drawn(fresh).reshape(*links.shape[:3], -1)
        alone = q.kept[0][..., 2 * links.shape[-1] :]
        alone = alone[..., :1] + fresh - alone[..., 1:] @ rest
        # Without the mean and the cross gain of the steps, which a program of draws
        # then does not compute.
        along = _back(q.gain[0], alone)
        corner = q.mean[0, steps:, None] + q.whitener[0].T @ rest
        white = _noise(links, whitener, self._lost(q), along, alone)
        return jnp.concatenate([white.reshape(-1, len(noise)), corner]).T

    def centre(self, q: ChainMoments) -> Array:
        """Return the means as a centre of natural parameters; see
        :class:`ChainNatural`. The standard normal numbers behind the latents are found
        without the small difference between a step and its prediction from the step
        before."""
        links, whitener = split(self.links)
        if q.kept is None or whitener is None:
            return q.mean
        steps, corner = self.structure.layout.split(q.mean)
        along = steps[0].reshape(*links.shape[:3], 1)
        alone = q.kept[0][..., 2 * links.shape[-1] :][..., :1]
        white = _noise(links, whitener, self._lost(q), along, alone)
        white = self.structure.layout.joined(white.reshape(steps.shape), corner)
        return jnp.stack([q.mean, white], 1)

    @property
    def _log_noise(self) -> Any:
        """The logarithms of the whiteners of the noise, (chains, steps, R) or zero."""
        _, whitener = split(self.links)
        if whitener is None:
            return 0
        return jnp.log(jnp.abs(linalg.diagonal(whitener)))

    def pull(self, mean: Array) -> Array:
        """Return the gradient of :meth:`divergence` in the means, (1, G R + K).

        :param mean: the means, (1, G R + K).
        """
        return -jax.grad(lambda z: self.terms(z).sum())(mean[0])[None]

    def terms(self, z: Array) -> Array:
        """See :class:`~numpyro_gpaug.gaussians.base.StructurePrior`."""
        return -0.5 * jnp.square(
            jnp.concatenate([x.ravel() for x in self._noise(z[None])])
        )

    def _noise(self, z: Array) -> tuple[Array, Array]:
        """Return the standard normal numbers behind the latents: those of steps,
        (chains, steps, R, 1), and the others."""
        steps, corner = self.structure.layout.split(z)
        along = steps[0].reshape(*self.links.shape[:3], 1)
        return white_along(self.links, along), corner


@dataclass(frozen=True)
class Chain(Groups):
    """Groups that are the steps of chains, with transitions between them.

    :param correlated: whether the noise of the steps has covariances of its own.
    """

    correlated: bool = False

    natural: ClassVar[Any] = ChainNatural
    # Predictors may depend on two steps.
    variances = Structure.variances
    independent = Structure.independent

    def describe(self, names: str, block: int) -> str:
        groups, each, corner, steps = self.layout
        chains = groups // steps
        what = "a chain" if chains == 1 else f"{chains} chains"
        of = f"{steps} steps" if block == 1 else f"{steps} blocks of {block} steps"
        return f"{what} of {of} of {each} ({names}), {corner} others dense"

    @property
    def record(self) -> tuple[str, ...]:
        return ("correlated",) if self.correlated else ()

    @classmethod
    def of_record(cls, record: tuple[str, ...]) -> Self:
        return cls(Layout(0, 0, 0), correlated=bool(record))

    def shifts(self, rows: Rows, z: Array) -> Array:
        return _shifts(rows, self.layout, z)

    def standard(self, dtype: Any) -> ChainNatural:
        loc, blocks, border, corner, _ = super().standard(dtype)
        found = self._added(loc, jnp.zeros_like(blocks), border, corner)
        if not self.correlated:
            return found
        each = self.layout.each
        eye = jnp.eye(each, 2 * each + 1, each, dtype=dtype)
        return found._replace(links=found.links + eye)

    def prior(self, dtype: Any, links: Array | None = None) -> ChainPrior:
        assert links is not None
        return ChainPrior(jnp.zeros((1, self.size), dtype), links, self)

    def _added(
        self, potential: Array, groups: Array, border: Array, corner: Array
    ) -> ChainNatural:
        all_steps, each, _, steps = self.layout
        width = 2 * each + 1 if self.correlated else each
        shape = 1, all_steps // steps, steps, each, width
        links = jnp.zeros(shape, potential.dtype)
        centre = jnp.zeros_like(potential)
        if self.correlated:
            centre = jnp.stack([centre, centre], 1)
        return ChainNatural(potential, groups, border, corner, links, centre)


def _by_step(rows: Rows, layout: Layout) -> tuple[Rows, Rows | None]:
    """Return rows that depend on one step each: the dependence on the first step and on
    latents outside of steps, and the dependence on the next step, if there is any."""
    own, each = rows.own, layout.each
    if own.shape[-1] == each:
        return rows, None
    after = jnp.minimum(rows.group + 1, layout.groups - 1)
    first = rows._replace(own=own[:, :each])
    return first, rows._replace(own=own[:, each:], group=after)


def _shifts(rows: Rows, layout: Layout, z: Array) -> Array:
    """Return the change of predictors for latents (size,), (n,)."""
    first, second = _by_step(rows, layout)
    moved = shifts(first, layout, z)
    if second is None:
        return moved
    steps, _ = layout.split(z)
    # Not a sum of products, for the reason in numpyro_gpaug.gp.chain.Weights.
    dot = linalg.precise(partial(jnp.einsum, "nr,nr->n"))
    return moved + dot(second.own, steps[second.group])


def _projection(rows: Rows, layout: Layout) -> Array:
    """Return the dependence of predictors on latents as a matrix, (G R + K, n)."""
    groups, each, corner, _ = layout
    first, second = _by_step(rows, layout)
    own, group, dense, value, place = first
    row = jnp.arange(len(own))
    steps = jnp.zeros((groups, each, len(own)), own.dtype)
    steps = steps.at[group, :, row].add(own)
    if second is not None:
        steps = steps.at[second.group, :, row].add(second.own)
    rest = jnp.zeros((corner, len(own)), own.dtype).at[: dense.shape[-1]].set(dense.T)
    rest = rest.at[dense.shape[-1] + place, row[:, None]].add(value)
    return jnp.concatenate([steps.reshape(groups * each, -1), rest])


def _ahead_of(links: Array, whitener: Array | None) -> Array:
    """Return ``K_{t+1} A_{t+1}``, or the links to the next steps if the noise is
    standard normal."""
    return step_after(links if whitener is None else small.product(whitener, links))


def _roots(covariance: Array, whitener: Array | None) -> Array:
    """Return L with ``L' L`` equal to each covariance, (..., R, R)."""
    if whitener is None:
        return small.cholesky(covariance).mT
    scale = jnp.sqrt(linalg.diagonal(covariance))
    scaled = covariance / scale[..., :, None] / scale[..., None, :]
    return small.cholesky(scaled).mT * scale[..., None, :]


def _correlated(links: Array, whitener: Array, so_far: Array) -> tuple[Array, Array]:
    r"""Return the gain and the moments' ``kept`` if the noise has covariances R.

    With the covariance :math:`S = R + A E^{-1} A^\top` of a step given all before it
    they are :math:`G = E^{-1} A^\top S^{-1}` and :math:`I - A G = R S^{-1}`. Numbers of
    a step may be known to very different parts of their noise. These products of graded
    matrices then keep the digits of their smallest entries.

    :param so_far: E, the precision of each step given all earlier ones.
    """
    noise, known = noise_of(whitener), small.inverse(so_far)
    next_ = small.inverse(followed(links, step_before(known), noise - _eye(noise)))
    # The last step has no next step.
    lost = step_after(small.product(noise, next_)).at[:, -1].set(_eye(noise))
    ahead = step_after(links)
    gain = small.product(small.product(known, ahead.mT), step_after(next_))
    return gain, jnp.concatenate([lost, ahead], -1)


def _noise(
    links: Array, whitener: Array, lost: Array, along: Array, alone: Array
) -> Array:
    """Return the standard normal numbers behind numbers of steps, without their small
    difference from what the steps before make them, if the noise has covariances of its
    own.

    :param lost: ``I - A_{t+1} G_t``, (chains, steps, R, R).
    :param along: the numbers, (chains, steps, R, n).
    :param alone: the parts of them that do not come from the next step.
    """
    ahead = small.product(lost[:, :-1], along[:, 1:])
    apart = ahead - small.product(links[:, 1:], alone[:, :-1])
    return small.product(whitener, jnp.concatenate([along[:, :1], apart], 1))


def _eye(matrices: Array) -> Array:
    return jnp.eye(matrices.shape[-1], dtype=matrices.dtype)


def _ahead(gain: Array, numbers: Array) -> Array:
    """Compute ``x_t = b_t + G_{t-1}' x_{t-1}``.

    :param gain: (chains, steps, R, R).
    :param numbers: b, (chains, steps, R, n).
    """
    return linear(small.product, step_before(gain).mT, numbers)


def _back(gain: Array, numbers: Array) -> Array:
    """Compute ``x_t = b_t + G_t x_{t+1}``; the arguments are those of
    :func:`_ahead`."""
    return linear(small.product, gain, numbers, reverse=True)
