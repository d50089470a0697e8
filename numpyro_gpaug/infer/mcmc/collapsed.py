# SPDX-License-Identifier: Apache-2.0
"""Hyperparameters with the Gaussian latents integrated out, given auxiliaries."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, NamedTuple, Self

import jax
import jax.numpy as jnp
import numpyro
from jax import Array, random
from numpyro import handlers
from numpyro.infer import NUTS
from numpyro.infer.mcmc import MCMCKernel
from numpyro.infer.util import unconstrain_fn
from numpyro.util import is_prng_key

from numpyro_gpaug.errors import NotConjugateError
from numpyro_gpaug.infer.mcmc.block_gibbs import BlockGibbs
from numpyro_gpaug.infer.mcmc.groups import (
    Factors,
    Values,
    draw_group,
    factors_of_group,
    needs_auxiliaries,
)
from numpyro_gpaug.likelihoods.expectations import Route, base_distribution
from numpyro_gpaug.math.linalg import precise
from numpyro_gpaug.model.arguments import Arguments
from numpyro_gpaug.model.closures import Version
from numpyro_gpaug.model.jaxpr import dependence_tree
from numpyro_gpaug.model.structure import flat_functions
from numpyro_gpaug.model.view import ModelView

FACTORS_KWARG = "_gaussian_factors"


class CollapsedState(NamedTuple):
    """State of :class:`CollapsedGaussian`.

    :param z: latents, hyperparameters and deterministic sites.
    :param aux: the auxiliaries on which their draw is conditioned, by site and name.
    :param inner: state of the kernel of the hyperparameters.
    :param rng_key: random key.
    :param version: the version of everything the model reads besides its arguments.
    """

    z: Values
    aux: dict[str, dict[str, Array]]
    inner: Any
    rng_key: Array
    version: Version | None = None


class CollapsedGaussian(BlockGibbs):
    """A sampler like :class:`~numpyro_gpaug.AugmentedGaussian` that also samples the
    hyperparameters of its processes and priors, with the Gaussian latents integrated
    out.

    A sweep draws all auxiliaries, updates the hyperparameters given the auxiliaries
    alone (their density is in closed form, because the latents are then Gaussian), and
    draws the latents. In plain Gibbs sampling, a hyperparameter is updated given the
    latents, and the more informative the data, the shorter its moves. Here only the
    auxiliaries limit the moves. Each evaluation of the collapsed density costs the
    factorisations of a sweep, and its gradient a few times as much: better mixing costs
    time.

    The kernel samples every latent of the model, or the latents of its block of
    ``Gibbs``. Parameters of the likelihood itself (a noise scale) are not collapsed;
    they go to another block::

        Gibbs([(CollapsedGaussian(model), ["f.v", "lengthscale"]), (NUTS(model), None)])

    Several chains run in sequence, in parallel or by ``chain_method=jax.vmap``.

    :param model: a NumPyro model.
    :param kernel: class of the kernel that updates the hyperparameters,
        :class:`~numpyro.infer.NUTS` or any that can be a block of ``Gibbs``, called
        with a model.
    :raises NotConjugateError: at ``init``, as for ``AugmentedGaussian``; also if a
        parameter of a likelihood depends on hyperparameters, and for likelihoods with
        latents that are drawn without auxiliaries (``HeteroscedasticNormal``).

    **Example**

    >>> import jax, numpyro, jax.numpy as jnp, numpyro.distributions as dist
    >>> import numpyro_gpaug as gpaug
    >>> from numpyro.infer import MCMC
    >>> def model(X, y=None):
    ...     variance = numpyro.sample("variance", dist.LogNormal(0.0, 1.0))
    ...     gp = gpaug.GaussianProcess("f", gpaug.kernels.Matern52(0.5, variance), X)
    ...     with numpyro.plate("data", X.shape[0]):
    ...         numpyro.sample("y", dist.Bernoulli(logits=gp(X)), obs=y)
    >>> X = jnp.linspace(0, 1, 12)[:, None]
    >>> y = (X[:, 0] > 0.5).astype(int)
    >>> kernel = gpaug.CollapsedGaussian(model)
    >>> mcmc = MCMC(kernel, num_warmup=100, num_samples=100, progress_bar=False)
    >>> mcmc.run(jax.random.key(0), X, y)
    >>> sorted(mcmc.get_samples())
    ['f', 'f.v', 'variance']
    """

    def __init__(
        self,
        model: Callable[..., Any],
        kernel: Callable[[Callable[..., Any]], MCMCKernel] = NUTS,
    ) -> None:
        super().__init__(model)
        self._kernel_class = kernel
        self._inner = kernel(self._collapsed)

    @property
    def _name(self) -> str:
        return "CollapsedGaussian"

    def wrap_model(self, wrapper: Callable) -> Self:
        copied = super().wrap_model(wrapper)
        copied._inner = self._kernel_class(copied._collapsed)
        return copied

    def get_diagnostics_str(self, state: CollapsedState) -> str:
        return self._inner.get_diagnostics_str(state.inner)

    # What is checked.

    def _check(self, view: ModelView) -> None:
        if not self.structure.others:
            raise NotConjugateError(
                "the model has no hyperparameters to sample. "
                "AugmentedGaussian(model) draws its latents"
            )
        super()._check(view)
        for group in self._groups:
            for predictor in group.predictors:
                if not needs_auxiliaries(view, predictor):
                    raise NotConjugateError(
                        f"{predictor!r} is drawn without auxiliaries, given other "
                        "latents, so there is nothing to collapse it on. Sample it "
                        "by AugmentedGaussian(model) and NUTS(model) in Gibbs"
                    )
        self._refuse_likelihood_parameters(view)
        shown = {s.name for s in self.structure.observed if s.route is Route.CONSTANT}
        shown.update(self.structure.others)
        self._hidden = [name for name in view.trace({}) if name not in shown]

    def _refuse_likelihood_parameters(self, view: ModelView) -> None:
        start = view.other_sites()
        shapes = {
            k: jax.ShapeDtypeStruct(jnp.shape(s["value"]), jnp.result_type(s["value"]))
            for k, s in start.items()
        }
        sites = [s for s in self.structure.observed if s.latents]

        def parameters(values: Values) -> dict[str, list[Any]]:
            trace = view.trace({**values, **self._flat_values()})
            found = {}
            for site in sites:
                d = base_distribution(trace[site.name]["fn"])
                own = d.arg_constraints.keys() & vars(d).keys() - set(site.latents)
                found[site.name] = [vars(d)[k] for k in sorted(own)]
            return found

        for name, leaves in dependence_tree(parameters, shapes).items():
            reached = {k for leaf in leaves for k in leaf.state}
            if reached:
                raise NotConjugateError(
                    f"a parameter of the likelihood of {name!r} depends on "
                    f"{sorted(reached)}, which are not collapsed. Use "
                    "Gibbs([(CollapsedGaussian(model), [the other sites]), "
                    "(NUTS(model), None)])"
                )

    def _flat_values(self) -> Values:
        functions = self.structure.functions
        return {k: jnp.zeros(f.shape, f.dtype) for k, f in functions.items()}

    # States.

    def _warm_up(self, num_warmup: int) -> None:
        self._num_warmup = num_warmup

    @precise
    def _begun(
        self,
        rng_key: Array,
        num_warmup: int,
        init_params: Values | None,
        model_args: tuple[Any, ...],
        model_kwargs: dict[str, Any] | None,
    ) -> CollapsedState:
        if not is_prng_key(rng_key):
            raise ValueError(
                "CollapsedGaussian takes a single random key. For several chains "
                'use chain_method="sequential", "parallel" or jax.vmap'
            )
        kwargs = model_kwargs or {}
        key, inner_key = random.split(rng_key)
        first, factors = super()._begun(
            key, num_warmup, init_params, model_args, model_kwargs
        )
        given = {**kwargs, FACTORS_KWARG: factors}
        others = {k: first.z[k] for k in self.structure.others}
        start = unconstrain_fn(self._collapsed, model_args, given, others)
        inner = self._inner.init(inner_key, num_warmup, start, model_args, given)
        return first._replace(inner=inner)

    def _first(self, key: Array, values: Values, view: ModelView) -> Any:
        key, other_key, prior_key, aux_key = random.split(key, 4)
        given = {k: values[k] for k in self.structure.others if k in values}
        drawn = self._with_key(view, other_key, given).other_sites()
        others = {k: jnp.asarray(site["value"]) for k, site in drawn.items()}
        view = self._given(view, others)
        x = self._drawn_from_prior(prior_key, values, view)
        at = self._at(x, self._maps(view), view)
        aux, factors = self._factors(aux_key, self._observed, view, at)
        z = {**self._sampled(x, at, view), **others}
        return CollapsedState(z, aux, (), key), factors

    def _refuse_broken(
        self, state: Any, args: tuple[Any, ...], kwargs: dict[str, Any]
    ) -> None:
        super()._refuse_broken(state[0], args, kwargs)

    def _renewed(self, state: CollapsedState, view: ModelView) -> CollapsedState:
        view = self._given(view, self._others(state))
        x = {b.site: state.z[b.site] for b in self.structure.blocks}
        at = self._at(x, self._maps(view), view)
        z = {**self._sampled(x, at, view), **self._others(state)}
        return state._replace(z=z)

    def _next(self, state: CollapsedState, view: ModelView) -> CollapsedState:
        key, aux_key, draw_key = random.split(state.rng_key, 3)
        view = self._given(view, self._others(state))
        at = {b.name: state.z[b.name] for b in self.structure.blocks}
        aux, factors = self._factors(aux_key, self._observed, view, at)
        args, kwargs = view.arguments.merge()
        kwargs = {**kwargs, FACTORS_KWARG: factors}
        inner = self._inner.refresh(state.inner, args, kwargs)
        inner = self._inner.sample(inner, args, kwargs)
        constrain = self._inner.get_constrain_fn(args, kwargs)
        moved = constrain(getattr(inner, self._inner.sample_field))
        others = {
            k: jnp.asarray(moved[k], state.z[k].dtype) for k in self.structure.others
        }
        view = self._given(view, others)
        maps, joint = self._geometry(view)
        x: Values = {}
        for i, (group, map_) in enumerate(zip(self._groups, joint, strict=True)):
            group_key = random.fold_in(draw_key, i)
            x.update(draw_group(group_key, group, map_, factors, view))
        at = self._at(x, maps, view)
        z = {**self._sampled(x, at, view), **others}
        return CollapsedState(z, aux, inner, key)

    def _others(self, state: CollapsedState) -> Values:
        return {k: state.z[k] for k in self.structure.others}

    def _given(self, view: ModelView, others: Values) -> ModelView:
        return self._with_key(view, random.key(0), others)

    def _with_key(self, view: ModelView, key: Array, others: Values) -> ModelView:
        return ModelView(self.structure, self._model, view.arguments, others, key)

    # The density of the hyperparameters.

    def _collapsed(self, *args: Any, **kwargs: Any) -> None:
        """Return the model of the hyperparameters given auxiliaries: their priors,
        everything else that depends on them, and the evidence of the latents' Gaussian
        factors."""
        factors: Factors = kwargs.pop(FACTORS_KWARG)
        structure = self.structure
        flat = handlers.substitute(flat_functions(self._model), data=structure.zeros)
        # Not expose=: whoever fills in the hyperparameters adds factors of its own (the
        # Jacobians of their transforms), inside.
        with handlers.block(hide=self._hidden):
            seeded = handlers.seed(flat, random.key(0))
            trace = handlers.trace(seeded).get_trace(*args, **kwargs)
        others = {k: trace[k]["value"] for k in structure.others}
        arguments = Arguments.split(args, kwargs)
        view = ModelView(structure, self._model, arguments, others, random.key(0))
        total = jnp.zeros(())
        for group, map_ in zip(self._groups, self._geometry(view)[1], strict=True):
            on_map, fixed = factors_of_group(group, factors, view)
            total += fixed + map_.log_evidence(on_map)
        numpyro.factor("evidence", total)
