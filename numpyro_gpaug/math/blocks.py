# SPDX-License-Identifier: Apache-2.0
"""Affine maps of very many rows, in blocks of rows.

For a million rows and 100 inducing inputs the projection ``A`` takes 400 MB, and so
does everything on the way to it, to marginals, to factors and to derivatives: kernel
matrices, whitened products, the spread of every row. Here all that is of one block of
rows at a time; only ``A`` itself is whole, where sweeps read it again and again.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, replace
from functools import partial
from typing import Any

import jax
import jax.numpy as jnp
from jax import Array, lax

from numpyro_gpaug.math.affine import AffineMap, GaussianFactors, Marginals
from numpyro_gpaug.math.linalg import Moments, NaturalGaussian

# Bytes of a projection, as often as it has marginals. A loop takes longer to compile:
# up to the first everything is whole.
WHOLE = 2**26
# Blocks are fastest where they stay in a processor's cache. Accelerators take longer to
# start small ones than to compute them.
BLOCK, BLOCK_OF_ACCELERATORS = 2**21, 2**25


@partial(
    jax.tree_util.register_dataclass,
    data_fields=("rows", "constants", "kept", "latents"),
    meta_fields=("make", "number"),
)
@dataclass(frozen=True)
class AffineBlocks:
    """An :class:`~numpyro_gpaug.math.affine.AffineMap` in blocks of rows: made again
    whenever it is looked at, and for its derivatives, unless :meth:`keep` kept it.

    :param rows: what blocks are made of, with a leading axis over them.
    :param constants: what all are made of.
    :param kept: blocks made before, which have no derivatives.
    :param latents: indices of those that are looked at; ``None`` for all.
    :param make: gives the map of a block from its rows and the constants.
    :param number: of rows, without those that fill the last block.
    """

    rows: tuple[Array, ...]
    constants: tuple[Array, ...]
    kept: AffineMap | None
    latents: Array | None
    make: Callable[..., AffineMap]
    number: int

    def keep(self) -> AffineBlocks:
        """The same map, made once."""
        still = jax.tree.map(lax.stop_gradient, self)
        return replace(self, kept=lax.map(still._block, self.rows))

    def afresh(self) -> AffineBlocks:
        """The same map, made whenever it is looked at: it has derivatives."""
        return replace(self, kept=None)

    def select(self, latents: Array | None) -> AffineBlocks:
        """The map of some latents, all for ``None``; of a map of all."""
        return replace(self, latents=latents)

    def marginals(self, q: Moments) -> Marginals:
        """Marginals of the predictors under a Gaussian on the latents.

        :param q: moments of the latents, with their leading axis.
        """
        return self._of_rows(lambda map_: map_.marginals(q))

    def given(self, z: Array) -> Marginals:
        """Marginals of the predictors given latents (latents, M)."""
        return self._of_rows(lambda map_: map_.given(z))

    def information(self, factors: GaussianFactors) -> NaturalGaussian:
        """What factors on the predictors say of the latents: a sum over blocks."""
        # Rows that fill the last block have factors of zero.
        cut = jax.tree.map(lambda x: cut_rows(x.T, self._size, "constant"), factors)
        parts = self._parts, cut

        def block(part: Any) -> NaturalGaussian:
            rows, factors = part
            factors = jax.tree.map(jnp.transpose, factors)
            return self._block(rows).information(factors)

        def add(total: NaturalGaussian, part: Any) -> tuple[NaturalGaussian, None]:
            return jax.tree.map(jnp.add, total, remade(block)(part)), None

        like = jax.eval_shape(block, jax.tree.map(lambda x: x[0], parts))
        none = jax.tree.map(lambda x: jnp.zeros(x.shape, x.dtype), like)
        return lax.scan(add, none, parts)[0]

    @property
    def _size(self) -> int:
        return self.rows[0].shape[1]

    @property
    def _parts(self) -> Any:
        return self.rows if self.kept is None else self.kept

    def _block(self, part: Any) -> AffineMap:
        made = self.kept is not None
        map_ = part if made else self.make(part, *self.constants)
        return map_.select(self.latents)

    def _of_rows(self, function: Callable[[AffineMap], Marginals]) -> Marginals:
        def block(part: Any) -> Any:
            return jax.tree.map(jnp.transpose, function(self._block(part)))

        found = lax.map(remade(block), self._parts)
        return jax.tree.map(
            lambda x: x.reshape(-1, x.shape[-1])[: self.number].T, found
        )


def affine_blocks(
    make: Callable[[tuple[Array, ...]], AffineMap], rows: tuple[Array, ...], size: int
) -> AffineBlocks:
    """An affine map in blocks.

    :param make: gives the map of some rows.
    :param rows: arrays that it is made of, rows first.
    :param size: rows of a block.
    """
    cut = tuple(cut_rows(x, size, "edge") for x in rows)
    make, constants = jax.closure_convert(make, tuple(x[0] for x in cut))
    return AffineBlocks(cut, tuple(constants), None, None, make, len(rows[0]))


def rows_of_blocks(rows: int, latents: int, size: int, dtype: Any) -> int | None:
    """How many rows a block has; ``None`` where the map is better whole.

    :param rows: in all.
    :param latents: with marginals of their own.
    :param size: of a latent, M.
    :param dtype: of the map.
    """
    each = latents * size * jnp.dtype(dtype).itemsize
    on_cpu = jax.default_backend() == "cpu"
    # Matrices of the inducing inputs exist anyway, and these may be all of the data.
    block = max((BLOCK if on_cpu else BLOCK_OF_ACCELERATORS) // each, size)
    return None if rows * each <= WHOLE or rows <= block else block


def cut_rows(values: Array, size: int, filled: str) -> Array:
    """Rows in blocks, (blocks, size, ...).

    :param values: rows first.
    :param size: of a block.
    :param filled: how the last one is, a mode of ``jnp.pad``.
    """
    missing = [(0, -len(values) % size)] + [(0, 0)] * (values.ndim - 1)
    return jnp.pad(values, missing, filled).reshape(-1, size, *values.shape[1:])


def remade(function: Callable[..., Any]) -> Callable[..., Any]:
    """A loop's body that is run again for its derivative, instead of keeping what is
    in between of all blocks."""
    # In a loop nothing can be taken for the same as in another.
    return jax.checkpoint(function, prevent_cse=False)
