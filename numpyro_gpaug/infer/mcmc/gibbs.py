# SPDX-License-Identifier: Apache-2.0
"""Gibbs sampling of Gaussian latents through augmented likelihoods."""

from __future__ import annotations

from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpyro.distributions as dist
from jax import Array, random

from numpyro_gpaug.errors import NotConjugateError
from numpyro_gpaug.infer.mcmc.gaussian_kernel import Function, GaussianKernel, Values
from numpyro_gpaug.infer.mcmc.groups import (
    Group,
    Natural,
    draw_group,
    groups_of,
    in_order,
    joint_design,
)
from numpyro_gpaug.infer.mcmc.joint import Design
from numpyro_gpaug.likelihoods.augmentation import (
    Parameters,
    draw_auxiliaries,
    lookup_augmentation,
)
from numpyro_gpaug.likelihoods.expectations import base_distribution, feasible
from numpyro_gpaug.model.view import BoundProblem


class AugmentedState(NamedTuple):
    """State of :class:`AugmentedGaussian`.

    :param z: latents and deterministic sites.
    :param aux: the auxiliaries the latents were drawn given, by site and name.
    :param functions: processes at the data.
    :param designs: one per group of latents drawn jointly.
    :param rng_key: random key.
    """

    z: Values
    aux: dict[str, dict[str, Array]]
    functions: dict[str, Function]
    designs: tuple[Design, ...]
    rng_key: Array


class AugmentedGaussian(GaussianKernel):
    """Exact Gibbs sampling through augmented likelihoods: every auxiliary variable from
    its conditional, then all Gaussian latents that meet in a likelihood jointly, from
    their Gaussian conditional. No tuning, no rejection, no gradients.

    The model is written without auxiliaries, as for every other route. Latents are the
    inducing values of its Gaussian processes (whitened: site ``"f.v"``) and plain
    Gaussian weight vectors that reach the likelihood affinely. If they are all there
    is, ``MCMC(AugmentedGaussian(model), ...)`` samples the model; otherwise it is a
    block of NumPyro's composite kernel::

        Gibbs([(AugmentedGaussian(model), ["f.v"]), (NUTS(model), None)])

    Auxiliaries are extra fields: ``mcmc.run(..., extra_fields=("aux",))``, inside
    ``Gibbs`` ``"block_states.0.aux"``. Chains may run in sequence, in parallel, or
    vectorised (``chain_method="vectorized"``; inside ``Gibbs``,
    ``chain_method=jax.vmap``); they start from prior draws unless ``init_params`` has
    the latents. ``mcmc.post_warmup_state = mcmc.last_state`` continues a run, of the
    same inputs: what was computed from them is part of the state.

    *What is sampled* is what every log density of the model says. With fewer inducing
    inputs than data that is the process projected on them, without its residual; with
    ``inducing=X_train`` it is the full process, which a comparison should use.
    ``numpyro.param`` sites stay at their initial values: give what is to be inferred a
    prior, or fix it with ``handlers.substitute(model, data=params)``.

    A sweep costs one Cholesky factorisation of min(M, N) rows per process (of all their
    latents together, where several processes or weights are summed). Hyperparameters
    that rest are factorised once.

    :param model: a NumPyro model.
    :raises NotConjugateError: at ``init``, for a likelihood without augmentation or one
        that latents reach otherwise than affinely, for scaled sites, and for latents
        that are not Gaussian, unless another block owns them.
    :raises ValueError: at ``init``, for plates that draw subsamples.

    **Example**

    >>> import jax, numpyro, jax.numpy as jnp, numpyro.distributions as dist
    >>> import numpyro_gpaug as gpaug
    >>> from numpyro.infer import MCMC
    >>> def model(X, y=None):
    ...     w = numpyro.sample("w", dist.Normal(0, 1).expand([2]).to_event(1))
    ...     with numpyro.plate("data", X.shape[0]):
    ...         numpyro.sample("y", dist.Bernoulli(logits=X @ w), obs=y)
    >>> X = jax.random.normal(jax.random.key(1), (50, 2))
    >>> y = (X[:, 0] > 0).astype(int)
    >>> kernel = gpaug.AugmentedGaussian(model)
    >>> mcmc = MCMC(kernel, num_warmup=50, num_samples=200, progress_bar=False)
    >>> mcmc.run(jax.random.key(0), X, y, extra_fields=("aux",))
    >>> mcmc.get_samples()["w"].shape
    (200, 2)
    >>> mcmc.get_extra_fields()["aux"]["y"]["omega"].shape
    (200, 50)

    References: Albert and Chib (1993), Bayesian analysis of binary and polychotomous
    response data; Polson, Scott and Windle (2013), Bayesian inference for logistic
    models using Polya-Gamma latent variables; Galy-Fajou, Wenzel and Opper (2020),
    Automated augmented conjugate inference for non-conjugate Gaussian process models.
    """

    _groups: tuple[Group, ...] = ()

    def _check(self, problem: BoundProblem) -> None:
        self._refuse_others(
            "as a block, Gibbs([(AugmentedGaussian(model), "
            f"{[b.site for b in self.structure.blocks]}), (NUTS(model), None)]) has "
            "NUTS sample them"
        )
        self._refuse_unaugmented(problem)
        self._groups = in_order(groups_of(problem), problem)

    def _refuse_unaugmented(self, problem: BoundProblem) -> None:
        instead = (
            "EllipticalSlice(model, guide, params) and MCMC(NUTS(model)) sample it"
        )
        for site in self.structure.observed:
            message = problem.message(site.name)
            cls = type(base_distribution(message["fn"])).__name__
            if site.reason is not None:
                raise NotConjugateError(
                    f"site {site.name!r} is not Gaussian given auxiliaries: "
                    f"{site.reason}. {instead}"
                )
            if site.latents and not site.augmented:
                raise NotConjugateError(
                    f"site {site.name!r}: no augmentation is registered for {cls} "
                    f"(numpyro_gpaug.register_augmentation). {instead}"
                )
            if site.latents and message["scale"] is not None:
                raise NotConjugateError(
                    f"site {site.name!r} is scaled, and a power of {cls} has no "
                    f"augmentation: drop the scale. {instead}"
                )
        for block in self.structure.blocks:
            if problem.message(block.site)["scale"] is not None:
                raise NotConjugateError(
                    f"the prior of {block.site!r} is scaled: drop the scale. {instead}"
                )

    def _first(self, key: Array, values: Values, problem: BoundProblem) -> Any:
        key, prior_key = random.split(key)
        x = self._drawn_from_prior(prior_key, values, problem)
        functions, designs = self._geometry(problem)
        at = self._at(x, functions, problem)
        aux = self._no_auxiliaries(problem, at)
        z = self._sampled(x, at, problem)
        return AugmentedState(z, aux, functions, designs, key)

    def _renewed(self, state: Any, problem: BoundProblem) -> Any:
        functions, designs = self._geometry(problem)
        at = self._at(state.z, functions, problem)
        x = {b.site: state.z[b.site] for b in self.structure.blocks}
        z = self._sampled(x, at, problem)
        return state._replace(z=z, functions=functions, designs=designs)

    def _next(self, state: Any, problem: BoundProblem) -> Any:
        key, *keys = random.split(state.rng_key, 1 + len(self._groups))
        x = {b.site: state.z[b.site] for b in self.structure.blocks}
        at = {b.name: state.z[b.name] for b in self.structure.blocks}
        aux = dict(state.aux)
        # Auxiliaries are drawn anew for each group, so that a sweep is a sequence of
        # moves each of which leaves the posterior of the latents as it is.
        for group, design, group_key in zip(
            self._groups, state.designs, keys, strict=True
        ):
            aux_key, draw_key = random.split(group_key)
            drawn, natural = self._sites(aux_key, group.sites, problem, at)
            aux.update(drawn)
            x.update(draw_group(draw_key, group, design, natural, problem))
            at = self._at(x, state.functions, problem)
        return state._replace(z=self._sampled(x, at, problem), aux=aux, rng_key=key)

    def _geometry(
        self, problem: BoundProblem
    ) -> tuple[dict[str, Function], tuple[Design, ...]]:
        functions = self._functions(problem)
        designs = tuple(
            Design.of(*functions[g.blocks[0].name])
            if g.batched
            else joint_design(g, problem)
            for g in self._groups
        )
        return functions, designs

    def _no_auxiliaries(
        self, problem: BoundProblem, at: Values
    ) -> dict[str, dict[str, Array]]:
        """Zeros in the place of auxiliaries that no sweep has drawn yet."""

        def drawn() -> dict[str, dict[str, Array]]:
            return self._sites(random.key(0), self._observed, problem, at)[0]

        shapes = jax.eval_shape(drawn)
        return jax.tree.map(lambda s: jnp.zeros(s.shape, s.dtype), shapes)

    @property
    def _observed(self) -> tuple[str, ...]:
        """The observed sites that latents reach."""
        return tuple(dict.fromkeys(s for group in self._groups for s in group.sites))

    def _sites(
        self, key: Array, sites: tuple[str, ...], problem: BoundProblem, at: Values
    ) -> tuple[dict[str, dict[str, Array]], Natural]:
        """Draws the auxiliaries of observed sites: their values by site, and the
        natural parameters that they give the predictors."""
        trace = problem.trace(at)
        drawn: dict[str, dict[str, Array]] = {}
        natural: Natural = {}
        for i, site in enumerate(sites):
            drawn[site], found = _augmented(random.fold_in(key, i), trace[site])
            natural.update({f"{site}/{k}": n for k, n in found.items()})
        return drawn, natural


def _augmented(key: Array, message: dict[str, Any]) -> tuple[dict[str, Array], Natural]:
    """Draws the auxiliaries of a site; natural parameters, per parameter that carries a
    latent and of its shape."""
    fn = message["fn"]
    d = base_distribution(fn)
    augmentation = lookup_augmentation(type(d))
    assert augmentation is not None
    y = feasible(fn, message["value"])
    given = {k: jnp.asarray(getattr(d, k)) for k in augmentation.latents}
    # Every datum has auxiliaries of its own, even where several share a latent.
    trailing = 0 if augmentation.latent_axis is None else 1
    f: Parameters = {
        k: jnp.broadcast_to(x, fn.shape() + x.shape[x.ndim - trailing :])
        for k, x in given.items()
    }
    aux = draw_auxiliaries(key, augmentation.conditional(d, y, f))
    seen = _seen(fn)
    seen = seen.reshape(seen.shape + (1,) * trailing)

    def shared(part: Array, k: str) -> Array:
        part = jnp.broadcast_to(jnp.where(seen, part, 0), f[k].shape)
        return _summed(jnp.asarray(part, given[k].dtype), given[k].shape)

    natural = augmentation.natural(d, y, aux, f)
    return aux, {k: (shared(h, k), shared(w, k)) for k, (h, w) in natural.items()}


def _seen(fn: dist.Distribution) -> Array:
    """Which data are not masked, broadcast against one value per datum."""
    if isinstance(fn, dist.MaskedDistribution):
        mask = jnp.asarray(fn._mask)
        return mask.reshape(mask.shape + (1,) * fn.event_dim) & _seen(fn.base_dist)
    if isinstance(fn, dist.Independent | dist.ExpandedDistribution):
        return _seen(fn.base_dist)
    return jnp.array(True)


def _summed(value: Array, shape: tuple[int, ...]) -> Array:
    """Sums ``value`` over the axes along which something of ``shape`` is repeated."""
    extra = value.ndim - len(shape)
    repeated = [
        i + extra
        for i, size in enumerate(shape)
        if size == 1 and value.shape[i + extra] > 1
    ]
    return value.sum((*range(extra), *repeated)).reshape(shape)
