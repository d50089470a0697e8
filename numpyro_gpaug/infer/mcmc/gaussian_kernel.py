# SPDX-License-Identifier: Apache-2.0
"""The base class of samplers of Gaussian latents, as NumPyro kernels."""

from __future__ import annotations

import copy
from abc import abstractmethod
from collections.abc import Callable
from typing import Any, Self

import jax
import jax.numpy as jnp
import numpy as np
from jax import Array, random
from numpyro.infer.gibbs import GIBBS_SITES_KWARG
from numpyro.infer.mcmc import MCMCKernel
from numpyro.util import is_prng_key

from numpyro_gpaug._fork import refuse_forked
from numpyro_gpaug.errors import CholeskyError
from numpyro_gpaug.gaussians.dense import AffineMap
from numpyro_gpaug.infer.mcmc.groups import Values
from numpyro_gpaug.math.linalg import precise
from numpyro_gpaug.model.arguments import Arguments
from numpyro_gpaug.model.closures import watched
from numpyro_gpaug.model.inspect import inspect_model
from numpyro_gpaug.model.observations import check_observations, check_observed
from numpyro_gpaug.model.structure import Block, Structure
from numpyro_gpaug.model.validation import check_arguments, cholesky_message
from numpyro_gpaug.model.view import ModelView


class GaussianKernel(MCMCKernel):
    """A kernel for the Gaussian latents of a model: inducing values of its processes
    and plain Gaussian weights.

    Samples (``state.z``) contain the latents and the model's deterministic sites,
    including function values, so nothing has to be computed after a run. The state
    caches everything that depends on hyperparameters only, and :meth:`refresh` computes
    it again.

    :param model: a NumPyro model.
    """

    sample_field = "z"
    _kinds = "Gaussian processes and Gaussian weight vectors"
    _otherwise = "; EllipticalSlice(model) accepts Gaussian latents of any shape"

    def __init__(self, model: Callable[..., Any]) -> None:
        self._model = model
        self._user_model = model
        self._watch = watched(model)
        self._structure: Structure | None = None
        self._sample_fn: Callable[..., Any] | None = None

    @property
    def model(self) -> Callable[..., Any]:
        """The model, conditioned on the sites of other blocks inside ``Gibbs``."""
        return self._model

    @property
    def structure(self) -> Structure:
        """The structure of the model.

        :raises RuntimeError: before ``init``.
        """
        if self._structure is None:
            raise RuntimeError("init must be called first")
        return self._structure

    # What a sampler defines.

    def _check(self, view: Any) -> None:
        """Raise for models that this sampler does not accept. It runs inside an
        abstract trace, and may record static properties."""

    @abstractmethod
    def _first(self, key: Array, values: Values, view: Any) -> Any:
        """Return the first state, from latents by site name; missing latents are
        drawn."""

    @abstractmethod
    def _next(self, state: Any, view: Any) -> Any:
        """Return the next state."""

    @abstractmethod
    def _renewed(self, state: Any, view: Any) -> Any:
        """Return the state after recomputing everything that depends on other sites."""

    # The interface of a kernel.

    def init(
        self,
        rng_key: Array,
        num_warmup: int,
        init_params: Values | None,
        model_args: tuple[Any, ...],
        model_kwargs: dict[str, Any] | None,
    ) -> Any:
        given = rng_key, num_warmup, init_params, model_args, model_kwargs
        with self._watch.running() as version:
            # MCMC compiles for the structure of states: anew for another version.
            return self._begun(*given)._replace(version=version)

    @precise
    def _begun(
        self,
        rng_key: Array,
        num_warmup: int,
        init_params: Values | None,
        model_args: tuple[Any, ...],
        model_kwargs: dict[str, Any] | None,
    ) -> Any:
        refuse_forked()
        kwargs = model_kwargs or {}
        self._inspect(model_args, kwargs)
        self._warm_up(num_warmup)

        arguments = Arguments.split(model_args, kwargs)

        # In one compilation: run one by one, the operations take many times as long.
        @jax.jit
        def start(keys: Array, values: Values, arrays: tuple[Array, ...]) -> Any:
            args, kwargs = arguments._replace(arrays=arrays).merge()
            view = self._view(args, kwargs)

            def first(key: Array, values: Values) -> Any:
                return self._first(key, values, view)

            return (first if is_prng_key(keys) else jax.vmap(first))(keys, values)

        state = start(rng_key, init_params or {}, arguments.arrays)
        self._refuse_broken(state, model_args, kwargs)
        self._sample_fn = self._step
        return state

    @precise
    def sample(
        self,
        state: Any,
        model_args: tuple[Any, ...],
        model_kwargs: dict[str, Any] | None,
    ) -> Any:
        def step(state: Any) -> Any:
            found = self._step(state, model_args, model_kwargs or {})
            return found._replace(version=state.version)

        with self._watch.running():
            return (step if is_prng_key(state.rng_key) else jax.vmap(step))(state)

    def refresh(
        self,
        state: Any,
        model_args: tuple[Any, ...],
        model_kwargs: dict[str, Any] | None,
    ) -> Any:
        found = self._renewed(state, self._view(model_args, model_kwargs or {}))
        return found._replace(version=state.version)

    def wrap_model(self, wrapper: Callable) -> Self:
        kernel = copy.copy(self)
        kernel._model = wrapper(self._model)
        kernel._structure = kernel._sample_fn = None
        return kernel

    # Helpers.

    def _step(self, state: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        return self._next(state, self._view(args, kwargs))

    def _warm_up(self, num_warmup: int) -> None:
        """Set the number of warm-up steps; most samplers have nothing to adapt."""

    def _view(self, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        return self._seen(self.structure, Arguments.split(args, kwargs))

    def read(self, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Structure:
        """Find the structure of the model at these arguments.

        :param args: the model's arguments.
        :param kwargs: its keyword arguments.
        :raises ValueError: for invalid arguments.
        """
        data = {k: x for k, x in kwargs.items() if k != GIBBS_SITES_KWARG}
        check_arguments(self._user_model, args, data)
        return self._structure_of(args, kwargs)

    def _structure_of(self, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Structure:
        return inspect_model(self._model, *args, **kwargs)

    def _seen(self, structure: Any, arguments: Arguments) -> Any:
        """Return the model at these arguments."""
        # The key is fixed: a param that starts at random must not move.
        return ModelView(structure, self._model, arguments, {}, random.key(0))

    @property
    def _name(self) -> str:
        return type(self).__name__

    def _inspect(self, args: tuple[Any, ...], kwargs: dict[str, Any]) -> None:
        structure = self.read(args, kwargs)
        arguments = Arguments.split(args, kwargs)
        others = kwargs.get(GIBBS_SITES_KWARG, ())
        check_observed(self._model, structure, arguments, others)
        if not structure.largest:
            raise ValueError(
                f"{self._name} samples {self._kinds} on which likelihoods depend "
                f"affinely, and the model has none{self._otherwise}"
            )
        if structure.subsampled:
            raise ValueError(
                f"plates {sorted(structure.subsampled)} draw subsamples, but an "
                "exact sampler needs all data. Drop subsample_size"
            )
        check_observations(self._model, structure, arguments)
        self._structure = structure

        def abstract(arrays: tuple[Array, ...]) -> None:
            self._check(self._seen(structure, arguments._replace(arrays=arrays)))

        jax.eval_shape(abstract, arguments.arrays)

    def _refuse_broken(
        self, state: Any, args: tuple[Any, ...], kwargs: dict[str, Any]
    ) -> None:
        for block in self.structure.blocks:
            value = state.z[block.name]
            if isinstance(value, jax.core.Tracer) or np.isfinite(value).all():
                continue
            if block.is_process:
                gp = self._view(args, kwargs).conditional(block).gp
                raise CholeskyError(cholesky_message(gp))
            raise FloatingPointError(f"the first draw of {block.name!r} is not finite")

    def _maps(self, view: Any) -> Any:
        """Return maps from inducing vectors to processes at the data, by block name,
        without the residual, which is not sampled."""
        maps = {b.name: view.conditional(b).affine_map for b in self._processes}
        return {
            k: m._replace(residual=jnp.zeros_like(m.residual)) for k, m in maps.items()
        }

    @property
    def _processes(self) -> tuple[Block, ...]:
        return self.structure.processes

    def _drawn_from_prior(self, key: Array, values: Values, view: ModelView) -> Values:
        """Return latents by site name; latents that are not in ``values`` are drawn
        from their priors."""
        found, priors = {}, view.priors()
        for i, block in enumerate(self.structure.blocks):
            loc, scale = (x.reshape(block.shape) for x in priors[block.name])
            noise = random.normal(random.fold_in(key, i), block.shape, block.dtype)
            drawn = loc + scale * noise
            found[block.site] = jnp.asarray(values.get(block.site, drawn), block.dtype)
        return found

    def _at(self, x: Values, maps: dict[str, AffineMap], view: ModelView) -> Values:
        """Return the inputs of a run of the model: function values of processes, and
        weights."""
        found = {b.name: x[b.site] for b in self.structure.weights}
        for block in self._processes:
            f, v = view.conditional(block), x[block.site]
            latents = maps[block.name](f.select(v.reshape(-1, v.shape[-1])))
            found[block.name] = f.outputs(latents)
        return found

    def _sampled(self, x: Values, at: Values, view: Any) -> Values:
        """Return a sample: latents and deterministic sites."""
        deterministic = {
            name: _strong(site["value"])
            for name, site in view.trace(at).items()
            if site["type"] == "deterministic"
        }
        return {**deterministic, **x}


def _strong(value: Any) -> Array:
    """Return an array of a fixed dtype: loops need equal input and output types."""
    return jnp.asarray(value, jnp.result_type(value))
