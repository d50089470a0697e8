# SPDX-License-Identifier: Apache-2.0
"""Samplers that choose one of two kernels, depending on the model."""

from __future__ import annotations

import copy
from collections.abc import Callable
from typing import Any, Self

from jax import Array
from numpyro.infer import NUTS, Gibbs
from numpyro.infer.mcmc import MCMCKernel

from numpyro_gpaug.errors import NotConjugateError
from numpyro_gpaug.infer.mcmc.gaussian_kernel import GaussianKernel
from numpyro_gpaug.infer.mcmc.groups import Values
from numpyro_gpaug.likelihoods.expectations import Route
from numpyro_gpaug.model.latents import JointStructure
from numpyro_gpaug.model.structure import Structure


class EitherKernel(MCMCKernel):
    """A kernel of processes and weight vectors if the model has no other latents to
    sample and its likelihoods are registered; otherwise, and for weights alone under a
    softmax, a kernel of all Gaussian latents. If there are other latents, it is a block
    of NumPyro's ``Gibbs``, with ``NUTS`` as the other.

    :param blocks: the kernel of processes and weight vectors.
    :param joint: the kernel of all Gaussian latents.
    """

    sample_field = "z"

    def __init__(self, blocks: GaussianKernel, joint: GaussianKernel) -> None:
        self._blocks, self._joint = blocks, joint
        self._chosen: MCMCKernel | None = None
        self._structure: Structure | None = None
        # MCMC asks for it to know whether there was an init.
        self._sample_fn: Callable[..., Any] | None = None

    @property
    def model(self) -> Callable[..., Any]:
        """The model, conditioned on the sites of other blocks inside ``Gibbs``."""
        return self._blocks.model

    @property
    def structure(self) -> Structure:
        """The structure of the model.

        :raises RuntimeError: before ``init``.
        """
        if self._structure is None:
            raise RuntimeError("init must be called first")
        return self._structure

    @property
    def _kernel(self) -> MCMCKernel:
        if self._chosen is None:
            raise RuntimeError("init must be called first")
        return self._chosen

    def _choose(
        self, args: tuple[Any, ...], kwargs: dict[str, Any]
    ) -> tuple[GaussianKernel, Structure]:
        structure = self._blocks.read(args, kwargs)
        observed = [s for s in structure.observed if s.route is not Route.CONSTANT]
        closed = all(site.latents for site in observed)
        apart = bool(structure.blocks) and closed and not structure.others
        if apart and structure.processes:
            return self._blocks, structure
        try:
            joint = self._joint.read(args, kwargs)
        except NotConjugateError:
            # Processes of softmax likelihoods are for the others, or say what is wrong.
            if not structure.blocks:
                raise
            return self._blocks, structure
        # Those that a softmax ties to each other mix as one Gaussian, not by turns.
        tied = any(site.route is Route.CORRELATED for site in joint.observed)
        if apart and not tied:
            return self._blocks, structure
        return self._joint, joint

    def init(
        self,
        rng_key: Array,
        num_warmup: int,
        init_params: Values | None,
        model_args: tuple[Any, ...],
        model_kwargs: dict[str, Any] | None,
    ) -> Any:
        kernel, self._structure = self._choose(model_args, model_kwargs or {})
        self._chosen = kernel
        if self._structure.others:
            # NumPyro says which of them NUTS does not take.
            own = _sites_of(self._structure)
            self._chosen = Gibbs([(self, own), (NUTS(self.model), None)])
        self._sample_fn = self._chosen.sample
        return self._chosen.init(
            rng_key, num_warmup, init_params, model_args, model_kwargs
        )

    def sample(
        self,
        state: Any,
        model_args: tuple[Any, ...],
        model_kwargs: dict[str, Any] | None,
    ) -> Any:
        return self._kernel.sample(state, model_args, model_kwargs)

    def refresh(
        self,
        state: Any,
        model_args: tuple[Any, ...],
        model_kwargs: dict[str, Any] | None,
    ) -> Any:
        return self._kernel.refresh(state, model_args, model_kwargs)

    def wrap_model(self, wrapper: Callable) -> Self:
        kernel = copy.copy(self)
        kernel._blocks = self._blocks.wrap_model(wrapper)
        kernel._joint = self._joint.wrap_model(wrapper)
        kernel._chosen = kernel._sample_fn = None
        return kernel

    def postprocess_fn(self, model_args: Any, model_kwargs: Any) -> Any:
        return self._kernel.postprocess_fn(model_args, model_kwargs)

    def get_diagnostics_str(self, state: Any) -> str:
        return self._kernel.get_diagnostics_str(state)


def _sites_of(structure: Structure) -> list[str]:
    """Return the names of the Gaussian sites."""
    if isinstance(structure, JointStructure):
        return [site.name for site in structure.sites]
    return [block.site for block in structure.blocks]
