# SPDX-License-Identifier: Apache-2.0
"""Sparse processes whose prior is an earlier posterior."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any, ClassVar

import jax.numpy as jnp
import numpyro
from jax import Array, lax
from numpyro.distributions import constraints

from numpyro_gpaug.gaussians.base import selected
from numpyro_gpaug.gaussians.blocks import AffineBlocks
from numpyro_gpaug.gaussians.dense import AffineMap, Moments, Prior
from numpyro_gpaug.guides.sparse_gp import AutoSparseGP
from numpyro_gpaug.math.linalg import precise
from numpyro_gpaug.model.arguments import Arguments
from numpyro_gpaug.model.latents import Structure
from numpyro_gpaug.model.structure import Block
from numpyro_gpaug.model.view import ModelView


class _ContinuedView(ModelView):
    """A model whose Gaussian blocks have information from earlier data."""

    def maps(
        self, factors: dict[str, Any] | None = None
    ) -> dict[str, AffineMap | AffineBlocks]:
        found: dict[str, AffineMap] = {}
        for block in self.structure.processes:
            # Batches of a stream are small, so they are not divided into blocks of
            # rows.
            found[block.name] = self.conditional(block).affine_map
        found |= self.weight_maps()
        chosen, earlier = self.selected(), self._earlier
        return {
            name: map_.about(selected(earlier[name], chosen.get(name)))
            for name, map_ in found.items()
        }

    def priors(self) -> dict[str, Prior]:
        return {
            name: Prior(jnp.zeros_like(q.mean), jnp.ones_like(q.mean))
            for name, q in self._earlier.items()
        }

    @property
    def _earlier(self) -> dict[str, Moments]:
        blocks = self.structure.blocks
        return {b.name: Moments(*earlier_of(b, self.values)) for b in blocks}


class ContinuedGP(AutoSparseGP):
    """An :class:`~numpyro_gpaug.AutoSparseGP` for data that follow earlier data.

    The earlier posterior of an inducing vector is ``v = mean + W' z`` with ``z``
    standard normal, and the natural parameters here are those of ``z``: updates then
    use a standard normal prior, and affine maps of ``z``. Means and whiteners are
    params, so one program serves all batches.

    :param model: a NumPyro model; params and other latents stay fixed.
    """

    view: ClassVar[Any] = _ContinuedView

    def __init__(self, model: Callable[..., Any]) -> None:
        super().__init__(model)
        self._first: dict[str, Any] = {}

    def going_on(
        self, arguments: Arguments, values: dict[str, Any], moments: dict[str, Moments]
    ) -> tuple[dict[str, Array], Array | float]:
        """Return params of a fit that continues from a posterior, and the constant, in
        nats, that earlier data add to its bound.

        :param arguments: the model's arguments.
        :param values: params, and point values of other latents.
        :param moments: moments of the posterior, by block.
        """
        found: dict[str, Array] = {}
        for block in self.structure.blocks:
            found |= earlier_params(block, moments[block.name])
        return found, 0.0

    def _start_at(self, structure: Structure, arguments: Arguments) -> None:
        super()._start_at(structure, arguments)
        self._first = {block.name: self.start(block) for block in structure.blocks}
        self._starts = {}

    @property
    def priors(self) -> dict[str, Prior]:
        """Return priors of the plain weight vectors, latent axis first, by block;
        inducing vectors have standard normal priors."""
        found = {}
        for block in self.structure.weights:
            rows = (-1, block.shape[-1])
            found[block.name] = Prior(*(
                jnp.reshape(x, rows) for x in self._first[block.name]
            ))  # fmt: skip
        return found

    @property
    def constraints(self) -> dict[str, Any]:
        blocks = self.structure.blocks
        names = [name for block in blocks for name in earlier_names(block)]
        return {**super().constraints, **dict.fromkeys(names, constraints.real)}

    def draw_others(self, *args: Any, **kwargs: Any) -> dict[str, Array]:
        for block in self.structure.blocks:
            for name, start in zip(
                earlier_names(block), _nothing_known(block), strict=True
            ):
                numpyro.param(name, start)
        return super().draw_others(*args, **kwargs)

    def split_params(
        self, params: dict[str, Any]
    ) -> tuple[dict[str, Any], dict[str, dict[str, Array]]]:
        values, own = super().split_params(params)
        for block in self.structure.blocks:
            own[block.name] |= {name: values.pop(name) for name in earlier_names(block)}
        return values, own

    @precise
    def moments(
        self, own: Mapping[str, dict[str, Array] | Moments]
    ) -> dict[str, Moments]:
        found = super().moments(own)
        for block in self.structure.blocks:
            params, z = own[block.name], found[block.name]
            if not isinstance(params, Moments):
                earlier = Moments(*earlier_of(block, params))
                mean = earlier.mean + earlier.unwhiten(z.mean)
                found[block.name] = Moments(mean, z.whitener @ earlier.whitener)
        return found


def earlier_names(block: Block) -> tuple[str, str]:
    """Return the names of the params with the earlier information about a block."""
    return f"{block.site}_earlier_vector", f"{block.site}_earlier_matrix"


def earlier_params(block: Block, known: tuple[Array, Array]) -> dict[str, Array]:
    """Return the params named by :func:`earlier_names`.

    :param block: a block of the model.
    :param known: a vector and a matrix for each latent, latent axis first.
    """
    shapes = block.shape, block.shape + block.shape[-1:]
    named = zip(earlier_names(block), known, shapes, strict=True)
    return {name: x.reshape(shape) for name, x, shape in named}


def earlier_of(block: Block, values: Mapping[str, Any]) -> tuple[Array, Array]:
    """Return the earlier information about a block, latent axis first, from its params.
    The params have no derivatives, so that learning does not change them."""
    vector, matrix = (
        lax.stop_gradient(jnp.asarray(values[name])) for name in earlier_names(block)
    )
    size = block.shape[-1]
    return vector.reshape(-1, size), matrix.reshape(-1, size, size)


def _nothing_known(block: Block) -> tuple[Array, Array]:
    eye = jnp.eye(block.shape[-1], dtype=block.dtype)
    whole = jnp.broadcast_to(eye, block.shape + block.shape[-1:])
    return jnp.zeros(block.shape, block.dtype), whole
