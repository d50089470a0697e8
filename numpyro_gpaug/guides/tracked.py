# SPDX-License-Identifier: Apache-2.0
"""Sparse processes of data that follow earlier data, with hyperparameters that are
learnt."""

from __future__ import annotations

import copy
import math
from collections.abc import Callable, Mapping
from functools import cached_property
from typing import Any

import jax
import jax.numpy as jnp
from jax import Array, lax
from numpyro import handlers

from numpyro_gpaug._numpyro import one_thread
from numpyro_gpaug.gaussians.base import GaussianPrior
from numpyro_gpaug.gaussians.dense import Moments
from numpyro_gpaug.gaussians.pseudo_data import PseudoData, SeenPrior
from numpyro_gpaug.gp.conditional import Conditional
from numpyro_gpaug.gp.process import GaussianProcess
from numpyro_gpaug.gp.projection import latent_first
from numpyro_gpaug.guides.continued import ContinuedGP, earlier_of, earlier_params
from numpyro_gpaug.guides.sparse_gp import AutoSparseGP
from numpyro_gpaug.math.compiling import few
from numpyro_gpaug.math.linalg import precise
from numpyro_gpaug.model.arguments import Arguments
from numpyro_gpaug.model.structure import Block
from numpyro_gpaug.model.view import ModelView


class _TrackedView(ModelView):
    """A model with earlier information about function values at inducing inputs, and
    about weights."""

    def conditional(self, block: Block) -> Conditional:
        return self._resting[block.name]

    @cached_property
    def _resting(self) -> dict[str, Conditional]:
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

    def __init__(self, model: Callable[..., Any]) -> None:
        super().__init__(model)
        self._program: Any = one_thread(few(self._known, static_argnames="static"))

    def going_on(
        self, arguments: Arguments, values: dict[str, Any], moments: dict[str, Moments]
    ) -> tuple[dict[str, Array], Array | float]:
        return self._program(arguments.arrays, values, moments, static=arguments.static)

    @precise
    def _known(
        self,
        arrays: Any,
        values: dict[str, Any],
        moments: dict[str, Moments],
        static: Any,
    ) -> tuple[dict[str, Array], Array]:
        arguments = Arguments(arrays, static)
        structure = self.structure_at(arguments)
        key = jax.random.key(0)
        view = ModelView(structure, self.model, arguments, values, key)
        params: dict[str, Array] = {}
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

    def moments(
        self, own: Mapping[str, dict[str, Array] | Moments]
    ) -> dict[str, Moments]:
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
