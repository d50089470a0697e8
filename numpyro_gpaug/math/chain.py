# SPDX-License-Identifier: Apache-2.0
r"""Joint Gaussians of very many latents along chains: random walks.

Latents ``z = (x_1, ..., x_T, u)``: R numbers of each of T steps, and K numbers that any
datum may depend on. A number of a walk is the running sum of standard normal ones, so
that the prior ties each step to the next,

.. math:: p(x) \propto \exp\Big(-\frac12 \sum_t x_t' W_t x_t
    - \frac12 \sum_t (x_t - x_{t+1})' C_t (x_t - x_{t+1})\Big),

with C of ones and W of one at a chain's start; numbers that are not tied (the noise of
a step) have ones in W. A datum looks at one step and at ``u`` and adds to W, to the
border B (R, K) of its step and to the corner. The precision is kept in these parts and
is positive definite by construction. With the precision ``E_t`` of a step given all
before it (:func:`~numpyro_gpaug.math.recurrences.filtered`), ``M_t = E_t + C_t`` and
``G_t = M_t^{-1} C_t`` the numbers ``y_t = x_t - G_t x_{t+1}`` and ``u`` are Gaussian
with an arrow for a precision, of blocks M: :mod:`~numpyro_gpaug.math.arrow` does the
rest, between two recurrences. Work and memory are linear in T.

References: Rue and Held (2005), Gaussian Markov random fields, section 2.4; Rauch, Tung
and Striebel (1965), Maximum likelihood estimates of linear dynamic systems.
"""

from __future__ import annotations

from dataclasses import dataclass
from functools import partial
from typing import NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
from jax import Array

from numpyro_gpaug.math import linalg, small
from numpyro_gpaug.math.arrow import ArrowNatural, ArrowSizes, Chain, log_det_of
from numpyro_gpaug.math.recurrences import filtered, linear


class ChainMoments(NamedTuple):
    """What is needed of a Gaussian along chains; each with a leading axis of 1. The
    groups of :class:`~numpyro_gpaug.math.arrow.ArrowSizes` are the ``G = chains steps``
    steps.

    :param mean: (1, G R + K).
    :param inverse: L, lower, of steps given the next: ``L' L = M^-1``, (1, G, R, R).
    :param gain: how far a step follows the next, (1, chains, steps, R, R).
    :param roots: of every step's covariance given the corner, ``L' L``, (1, G, R, R).
    :param shrunk: Y, (1, G, R, E): how steps follow the corner's noise.
    :param whitener: V, (1, E, K); E = K but for members that came later.
    """

    mean: Array
    inverse: Array
    gain: Array
    roots: Array
    shrunk: Array
    whitener: Array

    @property
    def sizes(self) -> ArrowSizes:
        """Of the latents."""
        _, groups, each, _ = self.inverse.shape
        return ArrowSizes(groups, each, self.whitener.shape[-1])

    @property
    def log_det(self) -> Array:
        """Log-determinant of the covariance, (1,)."""
        return log_det_of(self.inverse, self.whitener)

    @property
    def rank(self) -> int:
        """Standard normal numbers that :meth:`spread` takes."""
        return self.sizes.total - self.sizes.corner + self.whitener.shape[1]

    def carried(self, projection: Array) -> tuple[Array, Array]:
        """How means shift by, and how far values spread along, an affine map.

        :param projection: A, (1, G R + K, n).
        :return: ``A' mean`` (1, n) and rows (1, G R + E, n) whose squares sum to the
            variances.
        """
        shift = jnp.vecmat(self.mean, projection)
        own, corner = self._columns(projection[0])
        rows = small.product(self.inverse[0], self._ahead(own))
        rest = self.whitener[0] @ corner - self._drawn(own)
        return shift, jnp.concatenate([rows.reshape(-1, own.shape[-1]), rest])[None]

    def covarying(self, projection: Array) -> Array:
        """Covariances of all latents with affine functions of them, (G R + K, n).

        :param projection: A, (G R + K, n).
        """
        own, corner = self._columns(projection)
        drawn = self.whitener[0] @ corner - self._drawn(own)
        inverse = self.inverse[0]
        rows = small.product(inverse.mT, small.product(inverse, self._ahead(own)))
        rows = self._back(rows) - jnp.einsum("gre,en->grn", self.shrunk[0], drawn)
        rest = self.whitener[0].T @ drawn
        return jnp.concatenate([rows.reshape(-1, own.shape[-1]), rest])

    def spread(self, noise: Array) -> Array:
        """Deviations from the mean.

        :param noise: standard normal, (..., rank).
        """
        sizes, lead = self.sizes, noise.shape[:-1]
        flat = noise.reshape(-1, self.rank).T
        own, corner = self._columns(flat)
        rows = self._back(small.product(self.inverse[0].mT, own))
        rows -= jnp.einsum("gre,en->grn", self.shrunk[0], corner)
        rest = self.whitener[0].T @ corner
        found = jnp.concatenate([rows.reshape(-1, flat.shape[-1]), rest])
        return found.T.reshape(*lead, sizes.total)

    def white(self, deviation: Array) -> Array:
        """The noise that :meth:`spread` makes such deviations of.

        :param deviation: (..., G R + K).
        """
        lead = deviation.shape[:-1]
        flat = deviation.reshape(-1, self.sizes.total).T
        own, corner = self._columns(flat)
        corner = linalg.inverse_lower(self.whitener[0]).mT @ corner
        own = own + jnp.einsum("gre,en->grn", self.shrunk[0], corner)
        along = own.reshape(*self.gain.shape[1:4], -1)
        after = jnp.pad(along[:, 1:], [(0, 0), (0, 1), (0, 0), (0, 0)])
        apart = (along - small.product(self.gain[0], after)).reshape(own.shape)
        rows = small.product(small.inverse_lower(self.inverse[0]).mT, apart)
        found = jnp.concatenate([rows.reshape(-1, flat.shape[-1]), corner])
        return found.T.reshape(*lead, self.rank)

    def _columns(self, flat: Array) -> tuple[Array, Array]:
        """Columns (G R + ..., n) of steps, (G, R, n), and of the corner."""
        groups, each = self.inverse.shape[1:3]
        cut = groups * each
        return flat[:cut].reshape(groups, each, -1), flat[cut:]

    def _drawn(self, own: Array) -> Array:
        return jnp.einsum("gre,grn->en", self.shrunk[0], own)

    def _ahead(self, numbers: Array) -> Array:
        along = numbers.reshape(*self.gain.shape[1:4], -1)
        return _ahead(self.gain[0], along).reshape(numbers.shape)

    def _back(self, numbers: Array) -> Array:
        along = numbers.reshape(*self.gain.shape[1:4], -1)
        return _back(self.gain[0], along).reshape(numbers.shape)

    def extended(self, sizes: ArrowSizes, places: np.ndarray) -> ChainMoments:
        """With chains that go on longer, or end sooner, and new chains and latents of
        the corner, all at their prior given what is known.

        :param sizes: of the latents wanted.
        :param places: where they are among these, -1 for new ones.
        """
        assert sizes.chain is not None
        groups, corner = sizes.split(places)
        each, (chains, steps) = self.sizes.each, self.gain.shape[1:3]
        first = groups[:: sizes.chain.steps, 0]
        # A chain is known from its first step on, or not at all.
        old, chain = first >= 0, first // each // steps
        parts = _Parts(*(x[0].reshape(chains, steps, *x.shape[2:]) for x in (
            self.sizes.split(self.mean)[0],
            self.inverse, self.gain.reshape(self.inverse.shape),
            self.roots, self.shrunk,
        )))  # fmt: skip
        known = _continued(_Parts(*(x[chain] for x in parts)), sizes.chain)
        fresh = _continued(_unseen(parts, sizes.chain), sizes.chain)
        chosen = (
            jnp.where(old.reshape(-1, *[1] * (x.ndim - 1)), x, y)
            for x, y in zip(known, fresh, strict=True)
        )
        mean, inverse, gain, roots, shrunk = chosen
        seen = corner >= 0
        column = np.where(seen, corner - self.sizes.groups * each, 0)
        rest = self.sizes.split(self.mean)[1]
        own = jax.nn.one_hot(np.flatnonzero(~seen), len(seen), dtype=mean.dtype)
        columns = jnp.where(seen, self.whitener[..., column], 0)
        rest = jnp.where(seen, rest[:, column], 0)
        flat = 1, sizes.groups
        shrunk = shrunk.reshape(*flat, *shrunk.shape[2:])
        return ChainMoments(
            sizes.joined(mean.reshape(*flat, each), rest),
            inverse.reshape(*flat, each, each),
            gain[None],
            roots.reshape(*flat, each, each),
            jnp.pad(shrunk, [(0, 0)] * 3 + [(0, len(own))]),
            jnp.concatenate([columns, own[None]], 1),
        )


class _Parts(NamedTuple):
    """Of steps, (chains, steps, R, ...), as in :class:`ChainMoments`."""

    mean: Array
    inverse: Array
    gain: Array
    roots: Array
    shrunk: Array


def _unseen(parts: _Parts, chain: Chain) -> _Parts:
    """The first step of a chain of which nothing is known."""
    one = _Parts(*(jnp.zeros_like(x[:1, :1]) for x in parts))
    eye = jnp.broadcast_to(jnp.eye(len(chain.linked)), one.roots.shape)
    return one._replace(roots=eye.astype(one.roots.dtype))


def _continued(parts: _Parts, chain: Chain) -> _Parts:
    """Chains that end where others are wanted to: cut short, or gone on with.

    :param parts: of the chains.
    :param chain: as wanted.
    """
    last = min(parts.mean.shape[1], chain.steps) - 1
    dtype, linked = parts.mean.dtype, np.array(chain.linked)
    eye = jnp.eye(len(linked), dtype=dtype)
    end = jax.tree.map(lambda x: x[:, last:][:, :1], parts)
    ahead = np.arange(chain.steps - last)
    # Steps from the last on are a chain of their own, of which nothing else is known.
    covariance = small.product(end.roots.mT, end.roots)
    unlinked = jnp.broadcast_to(
        jnp.where(linked, 0, eye), (len(parts.mean), len(ahead) - 1, *eye.shape)
    )
    own = jnp.concatenate([small.inverse(covariance), unlinked], 1)
    links = jnp.asarray(np.where(ahead[:, None] < len(ahead) - 1, linked, 0), dtype)
    links = jnp.broadcast_to(links, (len(parts.mean), *links.shape))
    stiff = filtered(own, links) + links[..., None] * eye
    inverse = small.inverse_cholesky(stiff)
    gain = small.product(inverse.mT, inverse) * links[..., None, :]
    later = jnp.asarray(ahead > 0)[:, None]
    grown = jnp.where(linked, jnp.asarray(ahead, dtype)[:, None], later)
    follows = jnp.where(later, jnp.asarray(linked, dtype), 1)
    spread = follows[..., None] * covariance * follows[..., None, :]
    tail = _Parts(
        follows * end.mean, inverse, gain,
        small.cholesky(spread + grown[..., None] * eye).mT,
        follows[..., None] * end.shrunk,
    )  # fmt: skip
    return jax.tree.map(lambda x, y: jnp.concatenate([x[:, :last], y], 1), parts, tail)


class ChainNatural(NamedTuple):
    """A Gaussian along chains in natural parameters.

    :param potential: (1, G R + K).
    :param groups: W, (1, G, R, R).
    :param border: B, (1, G, R, K).
    :param corner: of the precision, (1, K, K).
    :param links: the diagonals of C, (1, chains, steps, R); zero at a chain's end.
    """

    potential: Array
    groups: Array
    border: Array
    corner: Array
    links: Array

    @property
    def sizes(self) -> ArrowSizes:
        """Of the latents."""
        groups, each, corner = self.border.shape[1:]
        return ArrowSizes(groups, each, corner)

    def moments(self) -> ChainMoments:
        """Mean and factors of the covariance; NaN where the precision is not positive
        definite."""
        sizes, links = self.sizes, self.links[0]
        eye = jnp.eye(sizes.each, dtype=links.dtype)
        along = (*links.shape, sizes.each)
        stiff = filtered(self.groups[0].reshape(along), links) + links[..., None] * eye
        covariance = small.inverse(stiff)
        gain = covariance * links[..., None, :]
        own, corner = sizes.split(self.potential)
        ahead = jnp.concatenate([own[0][..., None], self.border[0]], -1)
        ahead = _ahead(gain, ahead.reshape(*links.shape, -1))
        ahead = ahead.reshape(*self.groups.shape[:3], -1)
        q = ArrowNatural(
            sizes.joined(ahead[..., 0], corner),
            stiff.reshape(self.groups.shape), ahead[..., 1:], self.corner,
        ).moments()  # fmt: skip
        own, corner = sizes.split(q.mean)
        back = jnp.concatenate([own[0][..., None], q.shrunk[0]], -1)
        back = _back(gain, back.reshape(*links.shape, -1))
        back = back.reshape(*self.groups.shape[:3], -1)
        covariance = linear(_congruent, gain, covariance, reverse=True)
        roots = small.cholesky(covariance).mT.reshape(self.groups.shape)
        mean = sizes.joined(back[..., 0], corner)
        return ChainMoments(
            mean, q.inverse, gain[None], roots, back[..., 1:], q.whitener
        )

    def moved(self, z: Array) -> ChainNatural:
        """That of latents, from that of their deviations from ``z``, (1, G R + K); see
        :meth:`~numpyro_gpaug.math.linalg.NaturalGaussian.moved`."""
        arrow = ArrowNatural(*self[:4]).moved(z)
        own, corner = self.sizes.split(arrow.potential)
        steps, _ = self.sizes.split(z)
        x = steps.reshape(self.links.shape)
        pulled = self.links[:, :, :-1] * (x[:, :, :-1] - x[:, :, 1:])
        pulled = jnp.pad(pulled, [(0, 0), (0, 0), (1, 1), (0, 0)])
        added = (pulled[:, :, 1:] - pulled[:, :, :-1]).reshape(own.shape)
        return self._replace(potential=self.sizes.joined(own + added, corner))

    def stand_in(self) -> ChainMoments:
        """Numbers in the shapes of :meth:`moments`, of no meaning."""
        gain = self.groups.reshape(*self.links.shape, self.sizes.each)
        return ChainMoments(
            self.potential, self.groups, gain, self.groups, self.border, self.corner
        )


@partial(jax.tree_util.register_dataclass, data_fields=("loc",), meta_fields=("sizes",))
@dataclass(frozen=True)
class ChainPrior:
    """Running sums of standard normal numbers along chains, and such numbers alone.

    :param loc: zeros (1, G R + K).
    :param sizes: of the latents, with their chain.
    """

    loc: Array
    sizes: ArrowSizes

    @property
    def natural(self) -> ChainNatural:
        """Potential and precision."""
        groups, each, corner, _ = self.sizes
        dtype, (own, links) = self.loc.dtype, self._parts
        blocks = own.reshape(1, groups, 1, each) * jnp.eye(each, dtype=dtype)
        border = jnp.zeros((1, groups, each, corner), dtype)
        eye = jnp.eye(corner, dtype=dtype)[None]
        return ChainNatural(self.loc, blocks, border, eye, links[None])

    @property
    def _parts(self) -> tuple[Array, Array]:
        """Diagonals of W and C, (chains, steps, R)."""
        chain = self.sizes.chain
        assert chain is not None
        linked, step = np.array(chain.linked), np.arange(chain.steps)[:, None]
        shape = self.sizes.groups // chain.steps, chain.steps, len(linked)
        parts = ~linked | (step == 0), linked & (step < chain.steps - 1)
        own, links = (
            jnp.broadcast_to(jnp.asarray(x, self.loc.dtype), shape) for x in parts
        )
        return own, links

    def divergence(self, q: ChainMoments) -> Array:
        """KL(q || prior), (1,), as a sum over steps: each is as small as what is
        learnt of it."""
        own, links = self._parts
        steps, corner = self.sizes.split(q.mean)
        mean = steps.reshape(links.shape)
        inverse, roots, shrunk = (
            x[0].reshape(*links.shape, x.shape[-1])
            for x in (q.inverse, q.roots, q.shrunk)
        )
        square = jnp.square(mean) + jnp.square(shrunk).sum(-1)
        square += jnp.square(roots).sum(-2)
        apart = jnp.eye(self.sizes.each, dtype=mean.dtype) - q.gain[0, :, :-1]
        step = jnp.square(inverse[:, :-1]).sum(-2)
        step += jnp.square(small.product(roots[:, 1:], apart.mT)).sum(-2)
        step += jnp.square(shrunk[:, :-1] - shrunk[:, 1:]).sum(-1)
        step += jnp.square(mean[:, :-1] - mean[:, 1:])
        step = jnp.pad(step, [(0, 0), (0, 1), (0, 0)])
        logs = 2 * jnp.log(jnp.abs(linalg.diagonal(inverse)))
        along = own * square + links * step - 1 - logs
        whitener = q.whitener[0]
        rest = jnp.square(corner[0]) - 1
        rest -= 2 * jnp.log(jnp.abs(linalg.diagonal(whitener)))
        total = along.sum() + rest.sum() + jnp.square(whitener).sum()
        return 0.5 * total[None]


def _ahead(gain: Array, numbers: Array) -> Array:
    """``x_t = b_t + G_{t-1}' x_{t-1}``.

    :param gain: (chains, steps, R, R).
    :param numbers: b, (chains, steps, R, n).
    """
    before = jnp.pad(gain[:, :-1], [(0, 0), (1, 0), (0, 0), (0, 0)])
    return linear(small.product, before.mT, numbers)


def _back(gain: Array, numbers: Array) -> Array:
    """``x_t = b_t + G_t x_{t+1}``; arguments as for :func:`_ahead`."""
    return linear(small.product, gain, numbers, reverse=True)


def _congruent(transition: Array, covariance: Array) -> Array:
    return small.product(small.product(transition, covariance), transition.mT)
