# SPDX-License-Identifier: Apache-2.0
"""Sparse processes whose prior is an earlier posterior. Their hyperparameters are fixed
or learnt."""

from __future__ import annotations

import copy
import math
from collections.abc import Callable, Mapping
from functools import cached_property
from typing import Any, ClassVar

import jax
import jax.numpy as jnp
import numpyro
from jax import Array, lax
from numpyro import handlers
from numpyro.distributions import constraints

from numpyro_gpaug._numpyro import one_thread
from numpyro_gpaug.gaussians.base import GaussianPrior, selected
from numpyro_gpaug.gaussians.dense import AffineBlocks, AffineMap, Moments, Prior
from numpyro_gpaug.gaussians.pseudo_data import PseudoData, SeenPrior
from numpyro_gpaug.gp.conditional import Conditional
from numpyro_gpaug.gp.process import GaussianProcess
from numpyro_gpaug.gp.projection import latent_first
from numpyro_gpaug.guides.base import Own
from numpyro_gpaug.guides.sparse_gp import AutoSparseGP, standard
from numpyro_gpaug.math.compiling import jit_for_few_runs
from numpyro_gpaug.math.linalg import precise
from numpyro_gpaug.model.arguments import Arguments, Model, Values
from numpyro_gpaug.model.structure import Block, Trace
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
        return {block.name: standard(block) for block in self.structure.blocks}

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

    def going_on(
        self, arguments: Arguments, values: Values, moments: dict[str, Moments]
    ) -> tuple[Values, Array | float]:
        """Return params of a fit that continues from a posterior, and the constant, in
        nats, that earlier data add to its bound.

        :param arguments: the model's arguments.
        :param values: params, and point values of other latents.
        :param moments: moments of the posterior, by block.
        """
        found: Values = {}
        for block in self.structure.blocks:
            found |= earlier_params(block, moments[block.name])
        return found, 0.0

    def _first(self, block: Block, trace: Callable[[], Trace]) -> Prior:
        return standard(block)

    @property
    def constraints(self) -> dict[str, Any]:
        blocks = self.structure.blocks
        names = [name for block in blocks for name in earlier_names(block)]
        return {**super().constraints, **dict.fromkeys(names, constraints.real)}

    def draw_others(self, *args: Any, **kwargs: Any) -> Values:
        for block in self.structure.blocks:
            for name, start in zip(
                earlier_names(block), _nothing_known(block), strict=True
            ):
                numpyro.param(name, start)
        return super().draw_others(*args, **kwargs)

    def split_params(self, params: Values) -> tuple[Values, dict[str, Values]]:
        values, own = super().split_params(params)
        for block in self.structure.blocks:
            own[block.name] |= {name: values.pop(name) for name in earlier_names(block)}
        return values, own

    @precise
    def moments(self, own: Own) -> dict[str, Moments]:
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


def earlier_params(block: Block, known: tuple[Array, Array]) -> Values:
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


class _TrackedView(ModelView):
    """A model with earlier information about function values at inducing inputs, and
    about weights."""

    def conditional(self, block: Block) -> Conditional:
        return self._with_fixed_inputs[block.name]

    @cached_property
    def _with_fixed_inputs(self) -> dict[str, Conditional]:
        """Processes whose inducing inputs have no derivatives."""
        found = {}
        for block in self.structure.processes:
            f = super().conditional(block)
            gp = copy.copy(f.gp)
            gp.inducing = lax.stop_gradient(gp.inducing)
            found[block.name] = Conditional(gp, f.X, f.latents)
            # They may depend on params, which only a run of the model substitutes.
            found[block.name].mean = f.mean
        return found

    def priors(self) -> dict[str, Any]:
        found: dict[str, GaussianPrior] = {}
        own = super().priors()
        for block in self.structure.blocks:
            data = PseudoData(*earlier_of(block, self.values))
            if block.is_process:
                gp = self.conditional(block).gp
                offset = means_at_inducing(gp, block, self.values)
                data = data.through(offset, gp.factor)
            found[block.name] = SeenPrior(own[block.name], data)
        return found


class TrackedGP(ContinuedGP):
    """A :class:`~numpyro_gpaug.guides.continued.ContinuedGP` whose hyperparameters may
    change.

    The earlier information about *function values* at the inducing inputs (and about
    weights) does not depend on hyperparameters, and is stored as pseudo-data. Natural
    parameters belong to whitened inducing values, as in a first fit, under a prior that
    includes the pseudo-data.

    :param model: a NumPyro model. Its inducing inputs stay fixed, because the
        information is about function values there.
    """

    view = _TrackedView

    def __init__(self, model: Model) -> None:
        super().__init__(model)
        self._program: Any = one_thread(jit_for_few_runs(self._known))

    def going_on(
        self, arguments: Arguments, values: Values, moments: dict[str, Moments]
    ) -> tuple[Values, Array | float]:
        return self._program(arguments, values, moments)

    @precise
    def _known(
        self, arguments: Arguments, values: Values, moments: dict[str, Moments]
    ) -> tuple[Values, Array]:
        structure = self.structure_at(arguments)
        key = jax.random.key(0)
        view = ModelView(structure, self.model, arguments, values, key)
        params: Values = {}
        priors, natural, evidence = view.priors(), {}, jnp.zeros(())
        for block in structure.blocks:
            q, prior = moments[block.name], priors[block.name]
            data = PseudoData.of(q, prior)
            seen = SeenPrior(prior, data)
            natural[block.name] = seen.natural
            evidence -= seen.divergence(q).sum()
            if block.is_process:
                gp = view.conditional(block).gp
                whiten = gp.inverse_factor
                offset = jnp.matvec(whiten, means_at_inducing(gp, block, values))
                data = data.through(-offset, whiten)
            params |= earlier_params(block, data)
        return params | self.natural_params(natural), evidence

    def moments(self, own: Own) -> dict[str, Moments]:
        return AutoSparseGP.moments(self, own)


def means_at_inducing(
    gp: GaussianProcess, block: Block, values: Mapping[str, Any]
) -> Array:
    """Return the mean function at inducing inputs, (latents, M).

    :param gp: the process.
    :param block: its block.
    :param values: values of params.
    :raises NotImplementedError: for a mean function of inputs that differ between
        latents.
    """
    shape = math.prod(block.shape[:-1]), block.shape[-1]
    if not callable(gp.mean):
        mean = jnp.asarray(gp.mean, block.dtype).reshape(-1, 1)
    elif gp.inducing.ndim == 3:
        raise NotImplementedError(
            f"{block.name!r} has a mean function and a set of inducing inputs per "
            "latent. A stream cannot track its hyperparameters"
        )
    else:
        with handlers.block(), handlers.substitute(data=dict(values)):
            mean = latent_first(jnp.asarray(gp.mean(gp.inducing), block.dtype))
    return jnp.broadcast_to(mean, shape)
