# SPDX-License-Identifier: Apache-2.0
"""Affine maps to predictors that each depend on one step of a chain, and on a border
that all share (:mod:`numpyro_gpaug.math.chain`)."""

from __future__ import annotations

from dataclasses import dataclass
from functools import partial

import jax
import jax.numpy as jnp
from jax import Array

from numpyro_gpaug.math.affine import GaussianFactors
from numpyro_gpaug.math.arrow import ArrowNatural
from numpyro_gpaug.math.arrow_map import ArrowMap, Loadings
from numpyro_gpaug.math.blocks import cut_rows, over_blocks, rows_of_blocks
from numpyro_gpaug.math.chain import ChainMoments, ChainNatural


@partial(
    jax.tree_util.register_dataclass,
    data_fields=("offset", "loadings", "residual", "order"), meta_fields=("sizes",),
)  # fmt: skip
@dataclass(frozen=True)
class ChainMap(ArrowMap):
    """An :class:`~numpyro_gpaug.math.arrow_map.ArrowMap` whose groups are steps.
    Predictors have the same information about steps as about groups, and other
    covariances."""

    def information(
        self, factors: GaussianFactors, about: Array | None = None
    ) -> ChainNatural:
        return self._unlinked(super().information(factors, about))

    def coupling(self, cross: Array, left: Array, right: Array) -> ChainNatural:
        return self._unlinked(super().coupling(cross, left, right))

    def _unlinked(self, natural: ArrowNatural) -> ChainNatural:
        groups, each, _, steps = self.sizes
        assert steps is not None
        shape = 1, groups // steps, steps, each, each
        return ChainNatural(*natural, jnp.zeros(shape, natural.potential.dtype))

    def covariance(self, q: ChainMoments) -> Array:
        """The covariance of all predictors, (1, n, n), without the residual."""
        number = self.offset.shape[-1]
        size = rows_of_blocks(number, 8 * self.sizes.total, q.mean.dtype) or number

        def of_block(rows: Loadings) -> Array:
            moved = q.covarying(self._projection(rows))
            return jax.vmap(lambda z: self(z[None])[0] - self.offset[0])(moved.T)

        cut = jax.tree.map(lambda x: cut_rows(x, size), self._rows)
        return over_blocks(of_block, cut, number)[None]

    def _projection(self, rows: Loadings) -> Array:
        """How some predictors depend on latents, (G R + K, n)."""
        groups, each, corner, _ = self.sizes
        own, group, dense, value, place = rows
        row = jnp.arange(len(own))
        steps = jnp.zeros((groups, each, len(own)), own.dtype)
        steps = steps.at[group, :, row].set(own)
        rest = (
            jnp.zeros((corner, len(own)), own.dtype).at[: dense.shape[-1]].set(dense.T)
        )
        rest = rest.at[dense.shape[-1] + place, row[:, None]].add(value)
        return jnp.concatenate([steps.reshape(groups * each, -1), rest])
