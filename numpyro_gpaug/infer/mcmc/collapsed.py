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
from numpyro_gpaug.gaussians.base import GaussianFactors
from numpyro_gpaug.infer.mcmc.gibbs import (
    AugmentedGaussian,
    Auxiliaries,
    needs_auxiliaries,
)
from numpyro_gpaug.infer.mcmc.parts import Values
from numpyro_gpaug.likelihoods.expectations import Route, base_distribution
from numpyro_gpaug.math.linalg import precise
from numpyro_gpaug.model.arguments import Arguments, Model
from numpyro_gpaug.model.closures import Version
from numpyro_gpaug.model.jaxpr import dependence_tree
from numpyro_gpaug.model.joint import JointView
from numpyro_gpaug.model.structure import flat_functions, run_model

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
    aux: Auxiliaries
    inner: Any
    rng_key: Array
    version: Version | None = None


class CollapsedGaussian(AugmentedGaussian):
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

    _takes_others = True

    def __init__(
        self, model: Model, kernel: Callable[[Callable[..., Any]], MCMCKernel] = NUTS
    ) -> None:
        super().__init__(model)
        self._kernel_class = kernel
        self._inner = kernel(self._collapsed)

    def wrap_model(self, wrapper: Callable) -> Self:
        copied = super().wrap_model(wrapper)
        copied._inner = self._kernel_class(copied._collapsed)
        return copied

    def get_diagnostics_str(self, state: CollapsedState) -> str:
        return self._inner.get_diagnostics_str(state.inner)

    def _refuse(self, view: JointView) -> None:
        if not self.structure.others:
            raise NotConjugateError(
                "the model has no hyperparameters to sample. "
                "AugmentedGaussian(model) draws its latents"
            )
        super()._refuse(view)
        for site in self.structure.observed:
            for name in site.latents:
                if not needs_auxiliaries(view.message(site.name), name):
                    raise NotConjugateError(
                        f"'{site.name}/{name}' is drawn without auxiliaries, given "
                        "other latents, so there is nothing to collapse it on. Sample "
                        "it by AugmentedGaussian(model) and NUTS(model) in Gibbs"
                    )
        self._refuse_likelihood_parameters(view)
        shown = {s.name for s in self.structure.observed if s.route is Route.CONSTANT}
        shown.update(self.structure.others)
        self._hidden = [k for k in self._run(view.arguments, {}) if k not in shown]

    def _refuse_likelihood_parameters(self, view: JointView) -> None:
        start = self._run(view.arguments, {})
        shapes = {
            k: jax.ShapeDtypeStruct(jnp.shape(x), jnp.result_type(x))
            for k, x in ((k, start[k]["value"]) for k in self.structure.others)
        }
        sites, flat = [s for s in self.structure.observed if s.latents], self._flat()

        def parameters(values: Values) -> dict[str, list[Any]]:
            trace = self._run(view.arguments, {**values, **flat})
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

    def _flat(self) -> Values:
        """Return latents and function values of zero."""
        functions = self.structure.functions
        flat = {k: jnp.zeros(f.shape, f.dtype) for k, f in functions.items()}
        return self.structure.zeros | flat

    @precise
    def _begun(
        self, rng_key: Array, values: Values, arguments: Arguments
    ) -> CollapsedState:
        if not is_prng_key(rng_key):
            raise ValueError(
                "CollapsedGaussian takes a single random key. For several chains "
                'use chain_method="sequential", "parallel" or jax.vmap'
            )
        key, inner_key = random.split(rng_key)
        first, factors = super()._begun(key, values, arguments)
        args, kwargs = arguments.merge()
        given = {**kwargs, FACTORS_KWARG: factors}
        others = {k: first.z[k] for k in self.structure.others}
        start = unconstrain_fn(self._collapsed, args, given, others)
        inner = self._inner.init(inner_key, self._num_warmup, start, args, given)
        return first._replace(inner=inner)

    def _first(self, key: Array, values: Values, arguments: Arguments) -> Any:
        key, other_key, prior_key, aux_key = random.split(key, 4)
        names = self.structure.others
        given = {k: values[k] for k in names if k in values}
        drawn = run_model(self._model, arguments, other_key, given)
        others = {k: jnp.asarray(drawn[k]["value"]) for k in names}
        numbers = self._start(prior_key, values, others, arguments)
        z = self._values(numbers, others, arguments)
        aux, factors = self._all_drawn(aux_key, z, arguments)
        return CollapsedState(z, aux, (), key), factors

    def _refuse_broken(self, state: Any, arguments: Arguments) -> None:
        super()._refuse_broken(state[0], arguments)

    def _renewed(self, state: CollapsedState, arguments: Arguments) -> CollapsedState:
        numbers = self._numbers(state.z, arguments)
        others = {k: state.z[k] for k in self.structure.others}
        return state._replace(z=self._values(numbers, others, arguments))

    def _next(self, state: CollapsedState, arguments: Arguments) -> CollapsedState:
        key, aux_key, draw_key = random.split(state.rng_key, 3)
        aux, factors = self._all_drawn(aux_key, state.z, arguments)
        args, kwargs = arguments.merge()
        kwargs = {**kwargs, FACTORS_KWARG: factors}
        inner = self._inner.refresh(state.inner, args, kwargs)
        inner = self._inner.sample(inner, args, kwargs)
        constrain = self._inner.get_constrain_fn(args, kwargs)
        moved = constrain(getattr(inner, self._inner.sample_field))
        others = {
            k: jnp.asarray(moved[k], state.z[k].dtype) for k in self.structure.others
        }
        numbers = self._numbers(state.z | others, arguments)
        latents, geometry = self._placed(numbers, others, arguments)
        new = []
        keys = random.split(draw_key, len(self._parts))
        for part, part_key, x, known, each in zip(
            self._parts, keys, latents, geometry, factors, strict=True
        ):
            predictors = self._predictors(part, state.z | others, arguments)
            new.append(part.draw(part_key, x, each, known, predictors))
        z = self._sites(new, geometry, others, arguments) | others
        return CollapsedState(z, aux, inner, key)

    def _values(self, numbers: Values, others: Values, arguments: Arguments) -> Values:
        """Return the values of all sites at numbers by site."""
        placed = self._placed(numbers, others, arguments)
        return self._sites(*placed, others, arguments) | others

    def _all_drawn(
        self, key: Array, values: Values, arguments: Arguments
    ) -> tuple[Auxiliaries, tuple[GaussianFactors, ...]]:
        """Draw all auxiliaries. Return them, and the factors of each part. Parts that
        share a site have the same key, and so the same auxiliaries."""
        drawn = [self._drawn(key, part, values, arguments) for part in self._parts]
        aux = {site: each for own, _ in drawn for site, each in own.items()}
        return aux, tuple(factors for _, factors in drawn)

    def _collapsed(self, *args: Any, **kwargs: Any) -> None:
        """Return the model of the hyperparameters given auxiliaries: their priors,
        everything else that depends on them, and the evidence of the latents' Gaussian
        factors."""
        factors: tuple[GaussianFactors, ...] = kwargs.pop(FACTORS_KWARG)
        structure = self.structure
        flat = handlers.substitute(flat_functions(self._model), data=structure.zeros)
        # Without expose=, because whoever substitutes the hyperparameters adds factors
        # inside (Jacobians of their transforms).
        with handlers.block(hide=self._hidden):
            seeded = handlers.seed(flat, random.key(0))
            trace = handlers.trace(seeded).get_trace(*args, **kwargs)
        others = {k: trace[k]["value"] for k in structure.others}
        arguments, given = Arguments.split(args, kwargs), self._flat()
        total = jnp.zeros(())
        for part, each in zip(self._parts, factors, strict=True):
            geometry = part.geometry(part.view(self._model, arguments, others))
            predictors = self._predictors(part, given | others, arguments)
            total += part.log_evidence(each, geometry, predictors)
        numpyro.factor("evidence", total)
