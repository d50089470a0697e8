# SPDX-License-Identifier: Apache-2.0
"""Gaussians with one dense precision matrix for each independent set of latents.

Predictors are ``p = offset + A' z``, plus independent noise of variance ``residual`` if
a sparse process leaves some unexplained. Marginals of the predictors, the posterior
given Gaussian factors, draws from it, and its evidence have leading axes over sets of
latents. Every factorised matrix is positive definite by construction: ``P + A diag(w)
A'`` or ``I + sqrt(w) A' A sqrt(w)``.

For a million rows and 100 inducing inputs the projection ``A`` takes 400 MB. Every
intermediate array takes as much, from the kernel matrix to marginals, factors and
derivatives: whitened products, the standard deviation of every row.
:class:`AffineBlocks` has these for one block of rows at a time. Only ``A`` itself is
complete, where repeated updates read it.
"""

from __future__ import annotations

import math
from collections.abc import Callable
from dataclasses import dataclass, field, replace
from functools import partial
from typing import Any, ClassVar, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
from jax import Array, lax, random
from jax.custom_derivatives import SymbolicZero
from jax.extend.core import ClosedJaxpr, Jaxpr, jaxpr_as_fun

from numpyro_gpaug.gaussians.base import (
    Change,
    GaussianFactors,
    Marginals,
    Structure,
    selected,
)
from numpyro_gpaug.math import linalg
from numpyro_gpaug.math.arrays import STATIC
from numpyro_gpaug.math.blocks import (
    cut_rows,
    kept_blocks,
    over_blocks,
    remade,
    summed_blocks,
)
from numpyro_gpaug.math.sharding import latents_on_devices

# A share of the prior variance (a squared correlation). Below it, the best predictor
# from the inducing values moves by less than a hundredth of their standard deviations.
# With white noise of ten times the variance of the rest of the kernel, a tenth remains.
LEAST_EXPLAINED = 1e-4
# The part of a variance that no single inducing value explains.
LEAST_SHARED = 0.05


class Moments(NamedTuple):
    """Moments of a Gaussian, computed from one Cholesky factor.

    :param mean: (..., M).
    :param whitener: (..., M, M), triangular, ``W`` with covariance ``W' W``.
    """

    mean: Array
    whitener: Array

    @property
    def log_det(self) -> Array:
        """The log-determinant of the covariance, (...)."""
        return 2 * jnp.log(jnp.abs(linalg.diagonal(self.whitener))).sum(-1)

    @property
    def variances(self) -> Array:
        """Variances of the latents, (..., M)."""
        return jnp.square(self.whitener).sum(-2)

    @linalg.precise
    def push_forward(self, projection: Array) -> tuple[Array, tuple[Array]]:
        """Return the shift of the means, and the root of the covariance, under an
        affine map.

        :param projection: A, (..., M, n).
        :return: ``A' mean`` (..., n) and, as one of several parts, rows (..., M, n)
            whose squares sum to the variances.
        """
        # Two products, because slices of one product become loops without a library
        # call.
        return linalg.vecmat(self.mean, projection), (self.whitener @ projection,)

    @property
    def rank(self) -> int:
        """The number of standard normal numbers that :meth:`unwhiten` takes."""
        return self.whitener.shape[-2]

    @linalg.precise
    def unwhiten(self, noise: Array) -> Array:
        """Return deviations from the mean.

        :param noise: standard normal, (..., rank).
        """
        return linalg.vecmat(noise, self.whitener)

    def whiten(self, deviation: Array) -> Array:
        """Return the noise of deviations, (..., M), for a lower whitener; the inverse
        of :meth:`unwhiten`."""
        return _solve(self.whitener, deviation, transpose=True)

    def precision_root(self) -> Array:
        """``R`` with precision ``R R'``, upper triangular, (..., M, M), for any
        whitener. It has all digits of the whitener; the product ``W' W`` would have
        half of them."""
        triangle = linalg.one_by_one(partial(jnp.linalg.qr, mode="r"))(self.whitener)
        return linalg.inverse_lower(triangle.mT).mT

    def extended(self, prior: Any, places: np.ndarray) -> Moments:
        """Return moments with new latents at their prior, for one set of latents.

        :param prior: the prior of the requested latents: standard normal.
        :param places: places of the requested latents among the known ones, -1 for
            new ones.
        """
        known = places >= 0
        columns = jnp.where(known, self.whitener[..., places], 0)
        fresh = np.flatnonzero(~known)
        own = jax.nn.one_hot(fresh, len(places), dtype=self.mean.dtype)
        whitener = jnp.concatenate([columns, own[None]], -2)
        return Moments(jnp.where(known, self.mean[..., places], 0), whitener)


class NaturalGaussian(NamedTuple):
    """A Gaussian in natural parameters: ``exp(potential . v - v' precision v / 2)``.

    :param potential: (..., M).
    :param precision: (..., M, M), positive definite.
    :param centre: (..., M), from which v deviates; ``None`` for zero.
    """

    potential: Array
    precision: Array
    centre: Array | None = None

    @linalg.precise
    def moments(self) -> Moments:
        """Return mean and covariance factor.

        The inverse factor is formed explicitly: a product with it costs less than a
        triangular solve with many right-hand sides, and the log-determinant, the trace
        of the covariance and the marginal variances all reuse it.
        """
        whitener = linalg.inverse_cholesky(self.precision)
        white = linalg.matvec(whitener, self.potential)
        mean = linalg.vecmat(white, whitener)
        return Moments(mean if self.centre is None else self.centre + mean, whitener)

    def centred(self, mean: Array) -> NaturalGaussian:
        """Return the same with its centre at the means."""
        return self._replace(potential=jnp.zeros_like(mean), centre=mean)

    @linalg.precise
    def times(self, z: Array) -> Array:
        """Return the product of the precision with latents (..., M)."""
        return linalg.matvec(self.precision, z)

    def moved(self, z: Array) -> NaturalGaussian:
        """Return the natural parameters of latents, given the natural parameters of
        their deviations from ``z``, (..., M).

        The potential of a mean is a large sum, and is accurate only to its last digit.
        Where latents compensate each other (an intercept and the effects of all
        groups), this error goes into the latents. The potential of deviations is small,
        and ``precision z`` has the same error as the matrix of the linear system.
        """
        return self._replace(potential=self.potential + self.times(z))

    @linalg.precise
    def changed(self, change: Change) -> NaturalGaussian:
        """Return information about latents there as information about latents here."""
        precision = change.others.mT @ self.precision @ change.others
        # Otherwise rounding errors of many changes would make it unsymmetric.
        precision = jnp.tril(precision) + jnp.tril(precision, -1).mT
        potential = linalg.vecmat(self.potential, change.others)
        return self._replace(potential=potential, precision=precision)

    @property
    def diagonal(self) -> Array:
        """The diagonal of the precision, (..., M)."""
        return linalg.diagonal(self.precision)


class Prior(NamedTuple):
    """Independent normal latents.

    :param loc: means, (latents, M).
    :param scale: standard deviations, (latents, M).
    """

    loc: Array
    scale: Array

    @property
    def natural(self) -> NaturalGaussian:
        """The potential and precision."""
        precision = jnp.square(1 / self.scale)
        eye = jnp.eye(precision.shape[-1], dtype=precision.dtype)
        return NaturalGaussian(precision * self.loc, precision[..., None] * eye)

    def divergence(self, q: Moments) -> Array:
        """Return KL(q || prior), (latents,)."""
        return kl_to_diagonal(q, self.loc, self.scale)

    def pull(self, mean: Array) -> Array:
        """Return the gradient of :meth:`divergence` in the means, (latents, M).

        :param mean: the means, (latents, M).
        """
        return (mean - self.loc) * jnp.square(1 / self.scale)

    @property
    def log_det(self) -> Array:
        """The log-determinant of the precision of the first set of latents."""
        return -2 * jnp.log(self.scale[0]).sum()

    def terms(self, z: Array) -> Array:
        """See :class:`~numpyro_gpaug.gaussians.base.StructurePrior`."""
        return -0.5 * jnp.square((z - self.loc[0]) / self.scale[0])


class StandardPrior(Prior):
    """Independent standard normal latents."""

    @property
    def natural(self) -> Any:
        """The potential and precision."""
        return super().natural._replace(centre=self.loc)


class AffineMap(NamedTuple):
    """Predictors ``offset + A' z`` (plus a residual) of latents ``z``.

    :param offset: predictors at latents of zero, (latents, n).
    :param projection: A, (1 or latents, M, n).
    :param residual: variance of the predictors given the latents, (1 or latents, n).
    :param gram: ``A' A``, (1 or latents, n, n), stored by :meth:`with_gram`.
    """

    offset: Array
    projection: Array
    residual: Array
    gram: Array | None = None

    def __call__(self, z: Array) -> Array:
        """Return means of the predictors given latents (latents, M): (latents, n)."""
        return self.offset + self.shifts(z)

    @linalg.precise
    def shifts(self, z: Array) -> Array:
        """Return ``A' z``, the change of the predictors for a change ``z`` of the
        latents, (latents, n)."""
        return linalg.vecmat(z, self.projection)

    def marginals(self, q: Moments) -> Marginals:
        """Return marginals of the predictors under a Gaussian on the latents.

        The variance is a sum of squares plus the residual: positive by construction.

        :param q: moments of the latents, with their leading axis.
        """
        shift, spread = _carried(q, self.projection)
        return Marginals(self.offset + shift, self.residual + spread)

    def prior_variance(self) -> Array:
        """Return variances of the predictors under standard normal latents, (latents,
        n)."""
        return self._explained() + self.residual

    def _explained(self) -> Array:
        # For processes, the residual contains the same sum. Written the same way, it is
        # computed once.
        rest = jnp.square(self.projection[..., 1:, :]).sum(-2)
        return jnp.square(self.projection[..., 0, :]) + rest

    def explained(self) -> Array:
        """Return the explained share of :meth:`prior_variance`, (latents, n); 1 where
        the variance is zero."""
        return self._share(self._explained())

    def unshared(self) -> Array:
        """Whether at most one latent explains part of each predictor, (latents, n)."""
        shared = self._explained() - jnp.square(self.projection).max(-2)
        return self._share(shared) < LEAST_SHARED

    def _share(self, part: Array) -> Array:
        total = self.prior_variance()
        some = total > 0
        return jnp.where(some, part / jnp.where(some, total, 1), 1)

    def covariances(self, q: Moments, left: Array, right: Array) -> Array:
        """Return covariances of pairs of predictors, (latents, P).

        :param q: moments of the latents, with their leading axis.
        :param left: one predictor of each pair, (P,).
        :param right: the other.
        """
        _, parts = q.push_forward(self.projection)
        found: Any = sum((x[..., left] * x[..., right]).sum(-2) for x in parts)
        return found

    def covariance(self, q: Moments) -> Array:
        """Return the covariance of all predictors, (latents, n, n), without the
        residual."""
        _, parts = q.push_forward(self.projection)
        found: Any = sum(x.mT @ x for x in parts)
        return found

    def given(self, z: Array) -> Marginals:
        """Return marginals of the predictors given latents (latents, M)."""
        mean = self(z)
        return Marginals(mean, jnp.broadcast_to(self.residual, mean.shape))

    def information(
        self, factors: GaussianFactors, about: Array | None = None
    ) -> NaturalGaussian:
        """Return the information of factors on the predictors about the latents:
        potential ``A (h - w about)`` and precision ``A diag(w) A'``, to be added to the
        prior's.

        :param factors: factors of the predictors.
        :param about: predictors (latents, n) at the origin of the deviations, see
            :meth:`~numpyro_gpaug.gaussians.dense.NaturalGaussian.moved`. The default is
            ``offset``, the predictors at latents of zero.
        """
        weighted = self.projection * factors.precision[..., None, :]
        about = self.offset if about is None else about
        centred = factors.potential - factors.precision * about
        rows = jnp.concatenate([weighted, centred[..., None, :]], -2)
        rows = linalg.sum_of_products(rows.mT, self.projection.mT)
        return NaturalGaussian(rows[..., -1, :], rows[..., :-1, :])

    def coupling(self, cross: Array, left: Array, right: Array) -> NaturalGaussian:
        """Return the information of factors ``exp(-c p q)`` on pairs of predictors
        about the latents.

        :param cross: c, (latents, P).
        :param left: one predictor of each pair, (P,).
        :param right: the other.
        """
        weighted = self.projection[..., left] * cross[..., None, :]
        matrix = linalg.sum_of_products(weighted.mT, self.projection[..., right].mT)
        return NaturalGaussian(jnp.zeros_like(matrix[..., 0]), matrix + matrix.mT)

    def about(self, q: Moments) -> AffineMap:
        """Return the map of standard normal latents z', where z is ``mean + W' z'``
        under a Gaussian.

        :param q: the Gaussian, with its leading axis.
        """
        shift, (rows,) = q.push_forward(self.projection)
        return AffineMap(self.offset + shift, rows, self.residual)

    def select(self, latents: Array | None) -> AffineMap:
        """Return the map of some latents, or of all for ``None``."""
        return selected(self, latents)

    def in_order(self) -> AffineMap:
        """Return this map: the order of its rows makes no difference."""
        return self

    def certain(self) -> AffineMap:
        """Return the same map without the residual."""
        return self._replace(residual=jnp.zeros_like(self.residual))

    def with_gram(self) -> AffineMap:
        """Return the same map, with ``A' A`` stored if it is no larger than ``A A'``. A
        draw then takes no product of matrices."""
        size, num = self.projection.shape[-2:]
        if num > size:
            return self
        return self._replace(gram=self.projection.mT @ self.projection)

    def draw(self, key: Array, z: Array, factors: GaussianFactors) -> Array:
        """Draw standard normal latents given factors on their predictors, (latents, M),
        by one factorisation. The residual is left out.

        :param key: random key.
        :param z: a point near the draws, which does not change their distribution; see
            :meth:`~numpyro_gpaug.gaussians.dense.NaturalGaussian.moved`.
        :param factors: factors of precisions >= 0.
        """
        key, error_key = random.split(key)
        noise = random.normal(key, z.shape, z.dtype)
        if self.gram is None:
            natural = self.information(factors, self(z)).moved(z)
            eye = jnp.eye(z.shape[-1], dtype=z.dtype)
            factor = linalg.cholesky(eye + natural.precision)
            white = _solve(factor, natural.potential) + noise
            return _solve(factor, white, transpose=True)
        # Matheron's rule: a draw from the prior, corrected by the difference of the
        # observations (potential / precision) from its predictors and their noise.
        root = jnp.sqrt(factors.precision)
        seen = factors.precision > 0
        centred = factors.potential - factors.precision * self.offset
        scaled = jnp.where(seen, centred / jnp.where(seen, root, 1), 0)
        error = random.normal(error_key, scaled.shape, scaled.dtype)
        lacking = scaled - root * self.shifts(noise) - error
        inner = root[..., :, None] * self.gram * root[..., None, :]
        eye = jnp.eye(inner.shape[-1], dtype=inner.dtype)
        factor = linalg.cholesky(eye + inner)
        weights = _solve(factor, _solve(factor, lacking), transpose=True)
        return noise + linalg.matvec(self.projection, root * weights)


@dataclass(frozen=True)
class Dense(Structure):
    """One dense precision matrix, without further structure."""

    natural: ClassVar[Any] = NaturalGaussian
    any_rows: ClassVar[bool] = True

    def cost(self, rows: int, width: int) -> float:
        return float(rows) * self.size**2 + float(self.size) ** 3

    def describe(self, names: str, block: int) -> str:
        return "dense"

    def standard(self, dtype: Any) -> NaturalGaussian:
        # NumPy arrays, because JAX would compile a program for each.
        zeros: Any = np.zeros((1, self.size), dtype)
        eye: Any = np.eye(self.size, dtype=dtype)[None]
        return NaturalGaussian(zeros, eye, zeros)

    def prior(self, dtype: Any, links: Array | None = None) -> Prior:
        zeros = jnp.zeros((1, self.size), dtype)
        return StandardPrior(zeros, zeros + 1)

    def map(self, predictors: Any) -> AffineMap:
        return predictors.dense


def _carried_plainly(q: Any, projection: Array) -> tuple[Array, Array]:
    """Return means and variances of an affine map."""
    shift, parts = q.push_forward(projection)
    variance: Any = sum(jnp.square(x).sum(-2) for x in parts)
    return shift, variance


_carried = jax.custom_jvp(_carried_plainly)


@partial(_carried.defjvp, symbolic_zeros=True)
@linalg.precise
def _carried_jvp(primals: Any, tangents: Any) -> Any:
    """Return the values, and the derivative in ``a``. If the Gaussian is constant, the
    slope of ``|W a|^2`` is ``2 W' W a``: one product with all columns, where the chain
    rule takes two."""
    (q, projection), (*of_q, moved) = primals, jax.tree.leaves(tangents)
    rests = all(isinstance(x, SymbolicZero) for x in of_q)
    # W' W itself needs a product with as many columns as there are latents.
    pays = isinstance(q, Moments) and projection.shape[-1] > q.mean.shape[-1]
    if isinstance(moved, SymbolicZero) or not (rests and pays):
        whole = jax.tree.map(_instantiated, tangents)
        return jax.jvp(_carried_plainly, primals, whole)
    slopes = (q.whitener.mT @ q.whitener) @ projection
    tangent = linalg.vecmat(q.mean, moved), 2 * (slopes * moved).sum(-2)
    return _carried_plainly(q, projection), tangent


def kl_to_diagonal(q: Moments, loc: Array, scale: Array) -> Array:
    """Return KL(q || N(loc, diag(scale^2))), (...).

    :param q: moments of q.
    :param loc: (..., M), prior means.
    :param scale: (..., M), prior standard deviations.
    """
    # A plain sum of squares is a library call; with further terms in it, it is a slow
    # loop.
    terms = (q.variances + jnp.square(q.mean - loc)) / jnp.square(scale)
    roots = jnp.abs(linalg.diagonal(q.whitener)) / scale
    return 0.5 * (terms - 1 - 2 * jnp.log(roots)).sum(-1)


def _instantiated(tangent: Any) -> Any:
    zero = isinstance(tangent, SymbolicZero)
    return jnp.zeros(tangent.shape, tangent.dtype) if zero else tangent


def _solve(factor: Array, vector: Array, *, transpose: bool = False) -> Array:
    return linalg.solve_lower(factor, vector[..., None], transpose=transpose)[..., 0]


@jax.tree_util.register_dataclass
@dataclass(frozen=True)
class AffineBlocks:
    """An :class:`~numpyro_gpaug.gaussians.dense.AffineMap` in blocks of rows. Each use,
    and each derivative, computes the blocks again, unless :func:`kept` stored them.

    :param rows: the inputs of the blocks, with leading axes over blocks and devices.
    :param constants: inputs that all blocks share.
    :param kept: stored blocks, which have no derivatives.
    :param latents: indices of the selected latents; ``None`` for all.
    :param program: the jaxpr of the map of a block's rows on one device.
    :param number: the number of rows, without padding of the last block.
    """

    rows: tuple[Array, ...]
    constants: list[Array]
    kept: AffineMap | None
    latents: Array | None
    program: Jaxpr = field(metadata=STATIC)
    number: int = field(metadata=STATIC)

    def select(self, latents: Array | None) -> AffineBlocks:
        """Return the map of some latents, or of all for ``None``."""
        return replace(self, latents=latents)

    def marginals(self, q: Moments) -> Marginals:
        """Return marginals of the predictors under a Gaussian on the latents.

        :param q: moments of the latents, with their leading axis.
        """
        return self._of_rows(lambda map_: map_.marginals(q))

    def prior_variance(self) -> Array:
        """Return :meth:`numpyro_gpaug.gaussians.dense.AffineMap.prior_variance`."""
        return self._of_rows(AffineMap.prior_variance)

    def unshared(self) -> Array:
        """Return :meth:`numpyro_gpaug.gaussians.dense.AffineMap.unshared`."""
        return self._of_rows(AffineMap.unshared)

    def given(self, z: Array) -> Marginals:
        """Return marginals of the predictors given latents (latents, M)."""
        return self._of_rows(lambda map_: map_.given(z))

    def information(
        self, factors: GaussianFactors, about: Array | None = None
    ) -> NaturalGaussian:
        """Return the information of factors on the predictors about the latents: a sum
        over blocks.

        :param factors: factors of the predictors.
        :param about: as in :meth:`numpyro_gpaug.gaussians.dense.AffineMap.information`.
        """
        # Rows that fill up the last block have factors of zero.
        given = factors, about
        cut = jax.tree.map(lambda x: cut_rows(x.T, self._size, "constant"), given)
        parts = self._parts, latents_on_devices(cut, -1)

        @remade
        def block(part: Any) -> NaturalGaussian:
            rows, given = part
            return self._block(rows).information(*jax.tree.map(jnp.transpose, given))

        def add(total: NaturalGaussian, part: Any) -> NaturalGaussian:
            return jax.tree.map(jnp.add, total, block(part))

        like = jax.eval_shape(block, jax.tree.map(lambda x: x[0, 0], parts))
        none = jax.tree.map(jnp.zeros_like, like)
        return summed_blocks(add, none, parts)

    @property
    def _size(self) -> int:
        return math.prod(self.rows[0].shape[1:3])

    @property
    def _parts(self) -> Any:
        return self.rows if self.kept is None else self.kept

    def _block(self, part: Any) -> AffineMap:
        if self.kept is None:
            program = jaxpr_as_fun(ClosedJaxpr(self.program, self.constants))
            part = AffineMap(*program(*part))
        return part.select(self.latents)

    def _of_rows(self, function: Callable[[AffineMap], Any]) -> Any:
        def block(part: Any) -> Any:
            of_block = jax.tree.map(jnp.transpose, function(self._block(part)))
            return latents_on_devices(of_block, -1)

        found = latents_on_devices(over_blocks(block, self._parts, self.number), -1)
        return jax.tree.map(jnp.transpose, found)


def kept(map_: Any) -> Any:
    """Return a map whose blocks, if it has any, are computed once."""
    if not isinstance(map_, AffineBlocks):
        return map_
    still = jax.tree.map(lax.stop_gradient, replace(map_, latents=None))
    return replace(map_, kept=kept_blocks(still._block, map_.rows))


def afresh(map_: Any) -> Any:
    """Return a map with derivatives: blocks are computed at each use."""
    return replace(map_, kept=None) if isinstance(map_, AffineBlocks) else map_


def affine_blocks(
    make: Callable[[tuple[Array, ...]], AffineMap], rows: tuple[Array, ...], size: int
) -> AffineBlocks:
    """Return an affine map in blocks.

    :param make: a function that returns the map of some rows.
    :param rows: its input arrays, rows first.
    :param size: number of rows of a block.
    """
    cut = tuple(cut_rows(x, size) for x in rows)
    # Values that the function closes over must be leaves so that they can be
    # differentiated.
    traced = jax.make_jaxpr(make)(
        tuple(jax.ShapeDtypeStruct(x.shape[2:], x.dtype) for x in cut)
    )
    return AffineBlocks(cut, traced.consts, None, None, traced.jaxpr, len(rows[0]))
