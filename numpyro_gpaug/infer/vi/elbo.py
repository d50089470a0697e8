# SPDX-License-Identifier: Apache-2.0
"""The analytic evidence lower bound, as a loss for NumPyro's own ``SVI``."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import jax.numpy as jnp
from jax import Array, random
from numpyro import handlers
from numpyro.distributions.kl import kl_divergence
from numpyro.infer.elbo import ELBO

from numpyro_gpaug.errors import NotConjugateError
from numpyro_gpaug.gaussians.dense import Moments
from numpyro_gpaug.guides import ConjugateGuide
from numpyro_gpaug.guides.base import ProcessGuide
from numpyro_gpaug.guides.function_posterior import Fit, InducingPosterior
from numpyro_gpaug.guides.sparse_gp import moments_of, with_latent_axis
from numpyro_gpaug.math.linalg import precise
from numpyro_gpaug.model.arguments import Arguments, Model, Values
from numpyro_gpaug.model.expectation import scaled_sum
from numpyro_gpaug.model.inspect import inspect_model
from numpyro_gpaug.model.latents import Structure
from numpyro_gpaug.model.observations import check_observed
from numpyro_gpaug.model.structure import Block, Trace, flat_functions, run_model
from numpyro_gpaug.model.view import ModelView

BOUNDS = ("exact", "augmented")


class TraceAnalytic_ELBO(ELBO):
    """Evidence lower bound with all Gaussian-process values integrated out, or with
    :class:`~numpyro_gpaug.AutoLatentGaussian` all Gaussian latents. It is a loss for
    :class:`numpyro.infer.SVI`.

    The expected log-likelihood is exact (closed form or one-dimensional integrals) for
    registered likelihoods, by Gauss-Hermite quadrature with 32 nodes if the likelihood
    depends elementwise on one latent, and by Monte Carlo otherwise; ``routes`` returns
    which. The KL divergence of the Gaussian blocks is exact. Other latents are drawn
    once per particle; their KL divergence is analytic if NumPyro registers it, and
    otherwise ``log p - log q`` at the draw.

    :param bound: ``"exact"``, or ``"augmented"`` for the looser bound whose maximum the
        augmented closed-form updates find.
    :param num_particles: draws of the other latents per step.
    :raises ValueError: for an unknown ``bound``.

    **Example**

    >>> import jax, numpyro, optax, jax.numpy as jnp, numpyro.distributions as dist
    >>> import numpyro_gpaug as gpaug
    >>> def model(X, y=None):
    ...     gp = gpaug.GaussianProcess("f", gpaug.kernels.Matern32(), inducing=X[:3])
    ...     with numpyro.plate("data", X.shape[0]):
    ...         numpyro.sample("y", dist.Bernoulli(logits=gp(X)), obs=y)
    >>> guide = gpaug.AutoSparseGP(model, covariance="dense")
    >>> svi = numpyro.infer.SVI(model, guide, optax.adam(0.1), TraceAnalytic_ELBO())
    >>> X, y = jnp.arange(8.0)[:, None], jnp.array([0, 1] * 4)
    >>> result = svi.run(jax.random.key(0), 50, X, y, progress_bar=False)
    >>> bool(result.losses[-1] < result.losses[0])
    True
    """

    def __init__(self, bound: str = "exact", num_particles: int = 1) -> None:
        if bound not in BOUNDS:
            raise ValueError(f"bound must be one of {BOUNDS}, got {bound!r}")
        self.bound = bound
        super().__init__(num_particles=num_particles)

    def routes(self, model: Model, *args: Any, **kwargs: Any) -> dict:
        """Return the route of every observed site.

        :param model: the model; or the guide of its fit, because an
            :class:`~numpyro_gpaug.AutoLatentGaussian` integrates out more latents than
            the processes and weight vectors that are found without a guide.
        :param args: its arguments.
        :param kwargs: its keyword arguments.
        :return: :class:`~numpyro_gpaug.likelihoods.expectations.Route` by site name.
        """
        if isinstance(model, ProcessGuide):
            structure = model.setup(*args, **kwargs).structure
        else:
            structure = inspect_model(model, *args, **kwargs)
        return {site.name: site.route for site in structure.observed}

    @precise
    def loss_with_mutable_state(
        self,
        rng_key: Array,
        param_map: Values,
        model: Model,
        guide: Model,
        *args: Any,
        **kwargs: Any,
    ) -> Values:
        """Return the loss (negative bound); mutable state is not supported."""
        arguments = Arguments.split(args, kwargs)
        ours = guide if isinstance(guide, ConjugateGuide) else None
        seen: Callable[..., Any] = ModelView
        if ours is not None:
            ours.setup(*args, **kwargs)
            seen = ours.view
        if ours is not None and model is ours.model:
            structure = ours.structure_at(arguments).unturned
        else:
            read = inspect_model if ours is None else ours.read
            structure = read(model, *args, **kwargs)
        check_observed(model, structure, arguments)

        def particle(key: Array) -> Array:
            guide_key, model_key = random.split(key)
            function_posterior: Any = InducingPosterior()
            if ours is not None:
                moments = ours.moments(ours.split_params(param_map)[1])
                drawn = ours.draw_others
                function_posterior = ours.function_posterior
                trace = trace_guide(drawn, guide_key, param_map, args, kwargs)
            else:
                trace = trace_guide(guide, guide_key, param_map, args, kwargs)
                moments = {b.name: _block_moments(trace, b) for b in structure.blocks}
            view = view_at(
                structure, model, arguments, param_map, trace, model_key, seen
            )
            fit = Fit(view.values, moments, function_posterior.factors(view))
            return self._bound(view, function_posterior, fit) + other_terms(view, trace)

        value = mean_over_particles(self, particle, rng_key)
        return {"loss": -value, "mutable_state": None}

    def _bound(
        self, view: Any, function_posterior: InducingPosterior, fit: Fit
    ) -> Array:
        at = function_posterior.marginals(view, fit)
        total = view.expected_log_likelihood(at, self.bound)
        for block in view.structure.blocks:
            kl = function_posterior.divergence(view, fit, block)
            total = total - kl * view.block_scale(block)
        return total


def _block_moments(guide_trace: Trace, block: Block) -> Moments:
    site = guide_trace.get(block.site, {})
    if site.get("type") != "sample":
        raise NotConjugateError(
            f"the guide puts no distribution on {block.site!r}, so that there is no KL "
            "to its prior: use AutoSparseGP, or TraceWasserstein_ELBO for the guide "
            "AutoFunctionSpaceGP"
        )
    return with_latent_axis(moments_of(site["fn"]))


def mean_over_particles(
    elbo: ELBO, particle: Callable[[Array], Array], rng_key: Array
) -> Array:
    """Average ``particle(key)`` over the particles of ``elbo``."""
    if elbo.num_particles == 1:
        return particle(rng_key)
    keys = random.split(rng_key, elbo.num_particles)
    return jnp.mean(elbo.vectorize_particles_fn(particle, keys))


def trace_guide(
    guide: Model,
    key: Array,
    params: Values,
    args: tuple[Any, ...],
    kwargs: dict[str, Any],
) -> Trace:
    """Draw once from a guide (or from a part of it) at its params."""
    with handlers.seed(rng_seed=key):
        drawn = handlers.trace(handlers.substitute(guide, data=params))
        return drawn.get_trace(*args, **kwargs)


def view_at(
    structure: Structure,
    model: Model,
    arguments: Arguments,
    params: Values,
    guide_trace: Trace,
    key: Array,
    seen: Callable[..., Any] = ModelView,
) -> Any:
    """Return the view of the model by its guide, at params, other latents that a guide
    drew, and one batch."""
    plates = [name for name in structure.plates if name in guide_trace]
    drawn = {k: guide_trace[k]["value"] for k in (*structure.others, *plates)}
    values = {**params, **drawn}
    if structure.subsampled:
        # Drawn once: all runs of the model in a step then use the same batch.
        filled = {**structure.zeros, **values}
        trace = run_model(flat_functions(model), arguments, key, filled)
        values |= {name: trace[name]["value"] for name in structure.subsampled}
    return seen(structure, model, arguments, values, key)


def other_terms(view: Any, guide_trace: Trace) -> Array | float:
    """Return minus the KL divergence of the other latents: analytic if registered, else
    at the draw."""
    total: Array | float = 0.0
    for name, site in view.other_sites().items():
        guide_site = guide_trace[name]
        try:
            term = -kl_divergence(guide_site["fn"], site["fn"])
        except NotImplementedError:
            value = guide_site["value"]
            term = site["fn"].log_prob(value) - guide_site["fn"].log_prob(value)
        total = total + scaled_sum(term, site["scale"])
    return total
