# SPDX-License-Identifier: Apache-2.0
r"""Joint Gaussians of very many latents in groups, with a block diagonal precision and
a border.

Latents ``z = (z_1, ..., z_G, u)``: R numbers of each of G groups (a random intercept
and slope of every subject), and K numbers that any datum may depend on (fixed effects,
inducing values, the effects of other groupings). A predictor looks at one group and at
``u``, so that the precision matrix is an arrow: blocks ``D_g`` (R, R) along its
diagonal, a border ``B_g`` (R, K) and a corner ``C`` (K, K). Groups are eliminated one
by one and the corner's Schur complement is dense,

.. math:: S = C - \sum_g B_g^\top D_g^{-1} B_g,

so that all costs ``G R K^2 + K^3`` and no array has a side of G squared. With
``D_g^{-1} = L_g^\top L_g``, ``S^{-1} = V^\top V`` and ``Y_g = D_g^{-1} B_g V^\top``,

.. math:: u = m + V^\top \epsilon, \quad
    z_g = m_g + L_g^\top \epsilon_g - Y_g \epsilon,

and the variance of a predictor ``a' z_g + c' u`` is ``|L_g a|^2 + |V c - Y_g' a|^2``, a
sum of squares.

Reference: Bates, Maechler, Bolker and Walker (2015), Fitting linear mixed-effects
models using lme4, section 3, whose factorisation this is.
"""

from __future__ import annotations

from dataclasses import dataclass
from functools import partial
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
from jax import Array

from numpyro_gpaug.math import linalg, small


class ArrowSizes(NamedTuple):
    """The layout of the latents, groups first.

    :param groups: G.
    :param each: R.
    :param corner: K.
    :param steps: of each chain, one after the other, where groups are the steps of
        chains (:mod:`numpyro_gpaug.math.chain`); ``None`` for others.
    """

    groups: int
    each: int
    corner: int
    steps: int | None = None

    @property
    def total(self) -> int:
        """The number of latents."""
        return self.groups * self.each + self.corner

    def split(self, flat: Any) -> tuple[Any, Any]:
        """Split numbers (..., total) into those of groups, (..., G, R), and of the
        border."""
        cut = self.groups * self.each
        shape = *flat.shape[:-1], self.groups, self.each
        return flat[..., :cut].reshape(shape), flat[..., cut:]

    def joined(self, groups: Array, corner: Array) -> Array:
        """Join the two parts that :meth:`split` returns."""
        flat = groups.reshape(*groups.shape[:-2], self.groups * self.each)
        return jnp.concatenate([flat, corner], -1)


def log_det_of(inverse: Array, whitener: Array) -> Array:
    """Log-determinant of a covariance, (1,), from factors of groups and corner.

    :param inverse: (1, G, R, R), triangular.
    :param whitener: (1, E, K), triangular.
    """
    logs = [
        jnp.log(jnp.abs(linalg.diagonal(x))).reshape(1, -1).sum(-1)
        for x in (inverse, whitener)
    ]
    return 2 * (logs[0] + logs[1])


class ArrowMoments(NamedTuple):
    """Moments of a Gaussian whose precision is block diagonal with a border; each with
    a leading axis of 1, like other moments.

    :param mean: (1, G R + K).
    :param inverse: L, lower, (1, G, R, R).
    :param shrunk: Y, (1, G, R, E).
    :param whitener: V, (1, E, K); E = K but for members that came later.
    """

    mean: Array
    inverse: Array
    shrunk: Array
    whitener: Array

    @property
    def sizes(self) -> ArrowSizes:
        """The layout of the latents."""
        _, groups, each, _ = self.inverse.shape
        return ArrowSizes(groups, each, self.whitener.shape[-1])

    @property
    def roots(self) -> Array:
        """Roots of every group's covariance given the border, ``L' L``, (1, G, R,
        R)."""
        return self.inverse

    @property
    def log_det(self) -> Array:
        """Log-determinant of the covariance, (1,)."""
        return log_det_of(self.inverse, self.whitener)

    def carried(self, projection: Array) -> tuple[Array, tuple[Array, Array]]:
        """Return the shift of the means, and the root of the covariance, under an
        affine map.

        :param projection: A, (1, G R + K, n).
        :return: ``A' mean`` (1, n) and rows, (1, G R, n) and (1, E, n), whose squares
            sum to the variances.
        """
        shift, (groups, each, *_) = jnp.vecmat(self.mean, projection), self.sizes
        own, corner = jnp.split(projection, [groups * each], 1)
        shape = *self.inverse.shape[:3], own.shape[-1]
        rows = small.product(self.inverse, own.reshape(shape)).reshape(own.shape)
        drawn = self.shrunk.reshape(1, groups * each, -1).mT @ own
        return shift, (rows, self.whitener @ corner - drawn)

    @property
    def variances(self) -> Array:
        """Variances of the latents, (1, G R + K)."""
        groups = jnp.square(self.roots).sum(-2) + jnp.square(self.shrunk).sum(-1)
        return self.sizes.joined(groups, jnp.square(self.whitener).sum(-2))

    @property
    def rank(self) -> int:
        """Standard normal numbers that :meth:`spread` takes."""
        return self.sizes.total - self.sizes.corner + self.whitener.shape[1]

    def extended(self, sizes: ArrowSizes, places: np.ndarray) -> ArrowMoments:
        """Return moments with new groups, and new latents in the border, at a standard
        normal prior.

        :param sizes: of the latents wanted.
        :param places: where they are among these, -1 for new ones.
        """
        groups, corner = sizes.split(places)
        # A group is known as a whole or not at all.
        group, old = groups[:, 0] // self.sizes.each, groups[:, 0] >= 0
        known = corner >= 0
        column = np.where(known, corner - self.sizes.groups * self.sizes.each, 0)
        means, rest = self.sizes.split(self.mean)
        means = jnp.where(old[:, None], means[:, group], 0)
        rest = jnp.where(known, rest[:, column], 0)
        eye = jnp.eye(sizes.each, dtype=rest.dtype)
        inverse = jnp.where(old[:, None, None], self.inverse[:, group], eye)
        fresh = np.flatnonzero(~known)
        own = jax.nn.one_hot(fresh, len(known), dtype=rest.dtype)
        columns = jnp.where(known, self.whitener[..., column], 0)
        shrunk = jnp.where(old[:, None, None], self.shrunk[:, group], 0)
        return ArrowMoments(
            sizes.joined(means, rest),
            inverse,
            jnp.pad(shrunk, [(0, 0)] * 3 + [(0, len(fresh))]),
            jnp.concatenate([columns, own[None]], 1),
        )

    def spread(self, noise: Array) -> Array:
        """Deviations from the mean.

        :param noise: standard normal, (..., rank).
        """
        rank = self.whitener.shape[1]
        groups, corner = self.sizes._replace(corner=rank).split(noise)
        own = jnp.einsum("gij,...gi->...gj", self.inverse[0], groups)
        moved = jnp.einsum("gre,...e->...gr", self.shrunk[0], corner)
        return self.sizes.joined(own - moved, corner @ self.whitener[0])

    def white(self, deviation: Array) -> Array:
        """The noise that :meth:`spread` makes such deviations of.

        :param deviation: (..., G R + K).
        """
        groups, corner = self.sizes.split(deviation)
        root = linalg.inverse_lower(self.whitener[0]).mT
        corner = jnp.einsum("ek,...k->...e", root, corner)
        groups = groups + jnp.einsum("gre,...e->...gr", self.shrunk[0], corner)
        inverse = small.inverse_lower(self.inverse[0])
        own = jnp.einsum("gij,...gi->...gj", inverse, groups)
        return self.sizes.joined(own, corner)


class ArrowNatural(NamedTuple):
    """A Gaussian in natural parameters whose precision is an arrow.

    :param potential: (1, G R + K).
    :param groups: D, (1, G, R, R).
    :param border: B, (1, G, R, K).
    :param corner: C, (1, K, K).
    """

    potential: Array
    groups: Array
    border: Array
    corner: Array

    @property
    def sizes(self) -> ArrowSizes:
        """The layout of the latents."""
        groups, each, corner = self.border.shape[1:]
        return ArrowSizes(groups, each, corner)

    def moments(self) -> ArrowMoments:
        """Mean and factors of the covariance; NaN where the precision is not positive
        definite.

        ``S`` is a difference, but its eigenvalues are at least those of the prior's
        precision: what rounding can take is the ratio of the groups' information to
        the prior's, times that of a number's last digit.
        """
        groups, each, size = self.border.shape[1:]
        inverse = small.inverse_cholesky(self.groups)
        half = small.product(inverse, self.border)
        flat = half.reshape(1, groups * each, size)
        schur = self.corner - flat.mT @ flat
        whitener = linalg.inverse_cholesky(schur)
        own, corner = self.sizes.split(self.potential)
        white = (inverse * own[..., None, :]).sum(-1)
        corner = corner - jnp.vecmat(white.reshape(1, -1), flat)
        corner = jnp.vecmat(jnp.matvec(whitener, corner), whitener)
        white = white - jnp.matvec(flat, corner).reshape(white.shape)
        mean = (inverse * white[..., None]).sum(-2)
        shrunk = small.product(inverse.mT, (flat @ whitener.mT).reshape(half.shape))
        mean = self.sizes.joined(mean, corner)
        return ArrowMoments(mean, inverse, shrunk, whitener)

    def moved(self, z: Array) -> ArrowNatural:
        """Natural parameters of latents, given those of their deviations from ``z``,
        (1, G R + K); see :meth:`~numpyro_gpaug.math.linalg.NaturalGaussian.moved`."""
        groups, corner = self.sizes.split(z)
        own = jnp.einsum("zgrs,zgs->zgr", self.groups, groups)
        own = own + jnp.einsum("zgrk,zk->zgr", self.border, corner)
        rest = jnp.einsum("zgrk,zgr->zk", self.border, groups)
        rest = rest + jnp.matvec(self.corner, corner)
        return self._replace(potential=self.potential + self.sizes.joined(own, rest))

    @property
    def diagonal(self) -> Array:
        """The diagonal of the precision, (1, G R + K)."""
        groups, corner = linalg.diagonal(self.groups), linalg.diagonal(self.corner)
        return self.sizes.joined(groups, corner)

    def stand_in(self) -> ArrowMoments:
        """Numbers in the shapes of :meth:`moments`, of no meaning."""
        return ArrowMoments(self.potential, self.groups, self.border, self.corner)


@partial(jax.tree_util.register_dataclass, data_fields=("loc",), meta_fields=("sizes",))
@dataclass(frozen=True)
class ArrowPrior:
    """Independent standard normal latents.

    :param loc: zeros (1, G R + K).
    :param sizes: of the latents.
    """

    loc: Array
    sizes: ArrowSizes

    @property
    def natural(self) -> ArrowNatural:
        """Potential and precision."""
        groups, each, corner, _ = self.sizes
        dtype = self.loc.dtype
        blocks = jnp.broadcast_to(jnp.eye(each, dtype=dtype), (1, groups, each, each))
        border = jnp.zeros((1, groups, each, corner), dtype)
        eye = jnp.eye(corner, dtype=dtype)[None]
        return ArrowNatural(self.loc, blocks, border, eye)

    def divergence(self, q: ArrowMoments) -> Array:
        """KL(q || prior), (1,)."""
        parts = q.mean, q.inverse, q.shrunk, q.whitener
        squares = sum(jnp.square(x).reshape(1, -1).sum(-1) for x in parts)
        return 0.5 * (squares - self.sizes.total - q.log_det)

    def pull(self, mean: Array) -> Array:
        """Gradient of :meth:`divergence` in the means, (1, G R + K).

        :param mean: where, (1, G R + K).
        """
        return mean
