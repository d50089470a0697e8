# SPDX-License-Identifier: Apache-2.0
"""Affine maps of very many rows, in blocks of rows.

For a million rows and 100 inducing inputs the projection ``A`` takes 400 MB. Every
intermediate array takes as much, from the kernel matrix to marginals, factors and
derivatives: whitened products, the standard deviation of every row. Here these exist
for one block of rows at a time. Only ``A`` itself is complete, where repeated updates
read it.
"""

from __future__ import annotations

import math
from collections.abc import Callable
from dataclasses import dataclass, field, replace
from typing import Any

import jax
import jax.numpy as jnp
from jax import Array, lax
from jax.extend.core import ClosedJaxpr, Jaxpr, jaxpr_as_fun

from numpyro_gpaug.gaussians.base import GaussianFactors, Marginals
from numpyro_gpaug.gaussians.dense import AffineMap, Moments, NaturalGaussian
from numpyro_gpaug.math.arrays import STATIC
from numpyro_gpaug.math.blocks import (
    cut_rows,
    kept_blocks,
    over_blocks,
    remade,
    summed_blocks,
)
from numpyro_gpaug.math.sharding import latents_apart


@jax.tree_util.register_dataclass
@dataclass(frozen=True)
class AffineBlocks:
    """An :class:`~numpyro_gpaug.gaussians.dense.AffineMap` in blocks of rows. Each use,
    and each derivative, computes the blocks again, unless :meth:`keep` stored them.

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

    def keep(self) -> AffineBlocks:
        """Return the same map, computed once."""
        still = jax.tree.map(lax.stop_gradient, replace(self, latents=None))
        return replace(self, kept=kept_blocks(still._block, self.rows))

    def afresh(self) -> AffineBlocks:
        """Return the same map, computed at each use; it has derivatives."""
        return replace(self, kept=None)

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
        parts = self._parts, latents_apart(cut, -1)

        @remade
        def block(part: Any) -> NaturalGaussian:
            rows, given = part
            return self._block(rows).information(*jax.tree.map(jnp.transpose, given))

        def add(total: NaturalGaussian, part: Any) -> NaturalGaussian:
            return jax.tree.map(jnp.add, total, block(part))

        like = jax.eval_shape(block, jax.tree.map(lambda x: x[0, 0], parts))
        none = jax.tree.map(lambda x: jnp.zeros(x.shape, x.dtype), like)
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
            return latents_apart(of_block, -1)

        found = latents_apart(over_blocks(block, self._parts, self.number), -1)
        return jax.tree.map(jnp.transpose, found)


def kept(map_: Any) -> Any:
    """Return a map whose blocks, if it has any, are computed once."""
    return map_.keep() if isinstance(map_, AffineBlocks) else map_


def afresh(map_: Any) -> Any:
    """Return a map with derivatives: blocks are computed at each use."""
    return map_.afresh() if isinstance(map_, AffineBlocks) else map_


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
