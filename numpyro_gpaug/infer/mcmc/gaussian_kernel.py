# SPDX-License-Identifier: Apache-2.0
"""The base class of samplers of Gaussian latents, as NumPyro kernels."""

from __future__ import annotations

import copy
from abc import abstractmethod
from collections.abc import Callable, Sequence
from typing import Any, Self

import jax
import jax.numpy as jnp
import numpy as np
from jax import Array, random
from numpyro.infer import NUTS, Gibbs
from numpyro.infer.gibbs import GIBBS_SITES_KWARG
from numpyro.infer.mcmc import MCMCKernel
from numpyro.util import is_prng_key

from numpyro_gpaug._fork import refuse_forked
from numpyro_gpaug.errors import CholeskyError, NotConjugateError
from numpyro_gpaug.infer.mcmc.parts import Geometry, Part, Values
from numpyro_gpaug.math.compiling import jit_for_few_runs
from numpyro_gpaug.math.linalg import precise
from numpyro_gpaug.model.arguments import Arguments, Model
from numpyro_gpaug.model.closures import watched
from numpyro_gpaug.model.joint import JointView, function_values
from numpyro_gpaug.model.latents import Structure
from numpyro_gpaug.model.observations import check_observations, check_observed
from numpyro_gpaug.model.structure import Trace, run_model
from numpyro_gpaug.model.validation import check_arguments, cholesky_message
from numpyro_gpaug.model.whitened import white_numbers, whitened


class GaussianKernel(MCMCKernel):
    """A kernel for the Gaussian latents of a model. If the model has other latents, it
    is a block of NumPyro's ``Gibbs``, with ``NUTS`` as the other.

    Samples (``state.z``) contain the latents and the model's deterministic sites,
    including function values, so nothing has to be computed after a run. The state
    caches everything that depends on hyperparameters only, and :meth:`refresh` computes
    it again.

    :param model: a NumPyro model.
    """

    sample_field = "z"
    #: Whether the kernel samples all other latents itself.
    _takes_others = False

    def __init__(self, model: Model) -> None:
        self._model = model
        self._user_model = model
        self._watch = watched(model)
        self._structure: Structure | None = None
        self._parts: tuple[Part, ...] = ()
        self._composite: Gibbs | None = None
        # The last composite, and compiled programs, with what they were made for.
        self._made: tuple[Any, Gibbs] | None = None
        self._compiled: tuple[Any, Callable[..., Any], Callable[..., Any]] | None = None
        self._num_warmup = 0
        # MCMC reads it to find out whether the kernel is initialised.
        self._sample_fn: Callable[..., Any] | None = None

    def __getstate__(self) -> dict[str, Any]:
        # A run of MCMC is pickled with its kernel, and programs cannot be: the next run
        # makes them again.
        return {**self.__dict__, "_compiled": None, "_sample_fn": None}

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

    @abstractmethod
    def _read(self, arguments: Arguments) -> Structure:
        """Return the structure of the model at these arguments."""

    @abstractmethod
    def _divided(self, arguments: Arguments) -> Sequence[Part]:
        """Return the parts of the latents. Raise for models that this sampler does not
        accept."""

    @abstractmethod
    def _first(self, key: Array, values: Values, arguments: Arguments) -> Any:
        """Return the first state, from latents by site name; missing latents are
        drawn."""

    @abstractmethod
    def _next(self, state: Any, arguments: Arguments) -> Any:
        """Return the next state."""

    @abstractmethod
    def _renewed(self, state: Any, arguments: Arguments) -> Any:
        """Return the state after recomputing everything that depends on other sites."""

    def init(
        self,
        rng_key: Array,
        num_warmup: int,
        init_params: Values | None,
        model_args: tuple[Any, ...],
        model_kwargs: dict[str, Any] | None,
    ) -> Any:
        self._composite, self._num_warmup = None, num_warmup
        self._structure = self._inspected(model_args, model_kwargs or {})
        if self.structure.others and not self._takes_others:
            # NumPyro's error names the sites that NUTS cannot sample.
            own = [site.name for site in self.structure.sites]
            key = self._watch.version(), own
            if self._made is None or self._made[0] != key:
                blocks = [(self, own), (NUTS(self.model), None)]
                self._made = key, Gibbs(blocks)
            # In a further run the same, whose blocks have compiled programs.
            self._composite = self._made[1]
            self._sample_fn = self._composite.sample
            return self._composite.init(
                rng_key, num_warmup, init_params, model_args, model_kwargs
            )
        arguments = Arguments.split(model_args, model_kwargs or {})
        with self._watch.running() as version:
            # MCMC compiles for a tree structure of states, so another version compiles
            # anew.
            state = self._begun(rng_key, init_params or {}, arguments)
            return state._replace(version=version)

    @precise
    def _begun(self, rng_key: Array, values: Values, arguments: Arguments) -> Any:
        """Return the first state, checked.

        :param rng_key: random key, or one for each chain.
        :param values: initial values of some latents.
        :param arguments: the model's arguments.
        """
        refuse_forked()
        check_observations(self._model, self.structure, arguments)
        self._parts = tuple(self._divided(arguments))
        state = self._programs()[0](rng_key, values, arguments)
        self._refuse_broken(state, arguments)
        self._sample_fn = self._step
        return state

    def _programs(self) -> tuple[Callable[..., Any], Callable[..., Any]]:
        """Return programs of :meth:`_first`, for one random key or several, and
        :meth:`_renewed`. Single operations would take many times as long."""
        key = self._watch.version(), self._structure, self._parts
        if self._compiled is None or self._compiled[0] != key:

            def start(keys: Array, values: Values, given: Arguments) -> Any:
                def first(key: Array, values: Values) -> Any:
                    return self._first(key, values, given)

                return (first if is_prng_key(keys) else jax.vmap(first))(keys, values)

            def renew(state: Any, given: Arguments) -> Any:
                return self._renewed(state, given)

            self._compiled = key, jit_for_few_runs(start), jit_for_few_runs(renew)
        return self._compiled[1:]

    @precise
    def sample(self, state: Any, model_args: Any, model_kwargs: Any) -> Any:
        if self._composite is not None:
            return self._composite.sample(state, model_args, model_kwargs)

        def step(state: Any) -> Any:
            found = self._step(state, model_args, model_kwargs or {})
            return found._replace(version=state.version)

        with self._watch.running():
            return (step if is_prng_key(state.rng_key) else jax.vmap(step))(state)

    def refresh(self, state: Any, model_args: Any, model_kwargs: Any) -> Any:
        if self._composite is not None:
            return self._composite.refresh(state, model_args, model_kwargs)
        arguments = Arguments.split(model_args, model_kwargs or {})
        found = self._programs()[1](state, arguments)
        return found._replace(version=state.version)

    def wrap_model(self, wrapper: Callable) -> Self:
        kernel = copy.copy(self)
        kernel._model = wrapper(self._model)
        kernel._structure = kernel._composite = kernel._sample_fn = None
        kernel._made = kernel._compiled = None
        return kernel

    def postprocess_fn(self, model_args: Any, model_kwargs: Any) -> Any:
        if self._composite is None:
            return super().postprocess_fn(model_args, model_kwargs)
        return self._composite.postprocess_fn(model_args, model_kwargs)

    def get_diagnostics_str(self, state: Any) -> str:
        if self._composite is None:
            return super().get_diagnostics_str(state)
        return self._composite.get_diagnostics_str(state)

    def _inspected(self, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Structure:
        data = {k: x for k, x in kwargs.items() if k != GIBBS_SITES_KWARG}
        check_arguments(self._user_model, args, data)
        arguments = Arguments.split(args, kwargs)
        structure = self._read(arguments)
        name, otherwise = type(self).__name__, "MCMC(NUTS(model)) samples any model"
        if structure.held and not structure.sites:
            reasons = "; ".join(f"{k!r}: {why}" for k, why in structure.held)
            raise NotConjugateError(
                f"{name} samples Gaussian latents, and none can be part of the "
                f"joint Gaussian: {reasons}; {otherwise}"
            )
        others = kwargs.get(GIBBS_SITES_KWARG, ())
        check_observed(self._model, structure, arguments, others)
        if not structure.sites:
            raise ValueError(
                f"{name} samples Gaussian latents on which likelihoods depend "
                f"affinely, and the model has none; {otherwise}"
            )
        if structure.subsampled:
            raise ValueError(
                f"plates {sorted(structure.subsampled)} draw subsamples, but an "
                "exact sampler needs all data. Drop subsample_size"
            )
        return structure

    def _refuse_broken(self, state: Any, arguments: Arguments) -> None:
        for name, value in state.z.items():
            if isinstance(value, jax.core.Tracer) or np.isfinite(value).all():
                continue
            if name in self.structure.functions:
                others = {k: state.z[k] for k in self.structure.others}
                made = self._view(arguments, others).conditionals
                if name in made:
                    raise CholeskyError(cholesky_message(made[name].gp))
            if name in {site.name for site in self.structure.sites}:
                raise FloatingPointError(
                    f"the first draw of {name!r} is not finite. Is the prior very "
                    "wide, or are columns very large? Standardise them"
                )

    def _step(self, state: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        return self._next(state, Arguments.split(args, kwargs))

    def _view(self, arguments: Arguments, values: Values) -> JointView:
        """Return the model with other latents given."""
        return Part(self.structure).view(self._model, arguments, values)

    def _run(
        self, arguments: Arguments, values: Values, numbers: Values | None = None
    ) -> Trace:
        """Run the model at values of sites, and numbers of others."""
        model = whitened(self._model, numbers or {}, self.structure.fields)
        return run_model(model, arguments, random.key(0), values)

    def _given(self, values: Values) -> Values:
        """Return the values of latents and processes, without other deterministic
        sites."""
        structure = self.structure
        names = {s.name for s in structure.sites} | {*structure.functions}
        return {k: x for k, x in values.items() if k in names.union(structure.others)}

    def _start(
        self, key: Array, values: Values, others: Values, arguments: Arguments
    ) -> Values:
        """Return numbers to start from, by site.

        :param key: random key, for sites without values.
        :param values: initial values.
        :param others: values of other latents.
        :param arguments: the model's arguments.
        """
        structure, dtype = self.structure, self.structure.dtype
        if structure.fields:
            q = self._view(arguments, others).prior.natural.moments()
            noise = random.normal(key, (1, q.rank), dtype)
            drawn = structure.split(q.unwhiten(noise)[0])
        else:
            drawn = {
                s.name: random.normal(random.fold_in(key, i), s.shape, dtype)
                for i, s in enumerate(structure.sites)
            }
        return self._moved(drawn, values, others, arguments)

    def _moved(
        self, numbers: Values, values: Values, others: Values, arguments: Arguments
    ) -> Values:
        """Return numbers at which some sites have the given values, and all others the
        values at the given numbers."""
        given = {k: values[k] for k in numbers if k in values}
        if not given:
            return numbers
        drawn = self._run(arguments, others, numbers)
        here = {k: drawn[k]["value"] for k in numbers} | given
        return self._numbers({**here, **others}, arguments)

    def _numbers(self, values: Values, arguments: Arguments) -> Values:
        """Return the numbers behind values of all sites: standard normal, except the
        coordinates of fields."""
        names = tuple(s.name for s in self.structure.sites)
        # The function values do not matter here.
        flat = jax.tree.map(jnp.zeros_like, self.structure.functions)
        trace = self._run(arguments, self._given(values) | flat)
        return white_numbers(trace, names, self.structure.fields)

    def _numbers_of(
        self, latents: Sequence[Array], geometry: Sequence[Geometry]
    ) -> Values:
        """Return the numbers behind latents, by site."""
        found: Values = {}
        for part, z, known in zip(self._parts, latents, geometry, strict=True):
            found |= part.numbers(z, known)
        return found

    def _sites(
        self,
        latents: Sequence[Array],
        geometry: Sequence[Geometry],
        others: Values,
        arguments: Arguments,
        functions: Values | None = None,
    ) -> Values:
        """Return values of Gaussian and deterministic sites. Kernel matrices are not
        computed.

        :param latents: the latents of each part.
        :param geometry: the geometry of each part.
        :param others: values of other latents.
        :param arguments: the model's arguments.
        :param functions: function values by process, if they are known.
        """
        numbers, given = self._numbers_of(latents, geometry), dict(others)
        for known in geometry:
            given |= functions or function_values(known.processes, numbers)
            given |= {f"{k}.v": numbers[f"{k}.v"] for k in known.processes}
        white = {k: x for k, x in numbers.items() if k not in given}
        return {
            name: jnp.asarray(site["value"], jnp.result_type(site["value"]))
            for name, site in self._run(arguments, given, white).items()
            if site["type"] == "deterministic" or name in numbers
        }
