# SPDX-License-Identifier: Apache-2.0
"""The dependence of each part of a model on each Gaussian process and weight vector,
read from its jaxpr, and the resulting route of each observed site."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp

from numpyro_gpaug.errors import NotConjugateError
from numpyro_gpaug.likelihoods.augmentation import lookup_augmentation
from numpyro_gpaug.likelihoods.expectations import (
    Route,
    base_distribution,
    lookup_expectation,
)
from numpyro_gpaug.model.arguments import Arguments
from numpyro_gpaug.model.domains import missing_link
from numpyro_gpaug.model.jaxpr import dependence_tree
from numpyro_gpaug.model.observations import check_constants
from numpyro_gpaug.model.structure import (
    Block,
    Observed,
    conditional_of,
    run_model,
)
from numpyro_gpaug.model.survey import Survey
from numpyro_gpaug.model.whitened import Parts, parts_of

_INSTEAD = {
    "BernoulliProbs": "Bernoulli(logits=f)",
    "BinomialProbs": "Binomial(n, logits=f)",
    "CategoricalProbs": "Categorical(logits=f)",
    "NegativeBinomialProbs": "NegativeBinomialLogits(r, f)",
    "Poisson": "numpyro_gpaug.Linked(f, link, Poisson) and LogisticPoisson",
}


class Dependencies:
    """The dependence of each part of a model on the processes and vector normals.

    :param model: the model.
    :param arguments: its arguments.
    :param survey: the survey of the model.
    """

    def __init__(
        self, model: Callable[..., Any], arguments: Arguments, survey: Survey
    ) -> None:
        processes = [b for b in survey.blocks if b.is_process]
        self.processes = {b.name for b in processes}
        self.vectors = {b.site: b.name for b in processes}
        self.correlated = survey.loaded
        self.registered: dict[str, tuple[str, ...]] = {}
        self.classes = survey.classes
        self.shared: dict[str, bool] = {}
        self.joint: dict[str, bool] = {}

        def parts(values: dict[str, Any]) -> tuple[Parts, dict[str, Any]]:
            trace = run_model(model, arguments, jax.random.key(0), values)
            check_constants(trace)
            found = parts_of(trace, (), tuple(survey.observed))
            for name in survey.observed:
                self._visit(name, trace[name]["fn"])
            priors: dict[str, Any] = {
                k: x for k, x in found.others.items() if k not in values
            }
            for block in processes:
                f = conditional_of(trace, block)
                gp = f.gp.loadings, f.gp.bias
                priors[block.name] = f.mean, f.prior_variance, f.projection, gp
            return found, priors

        self.parts, self.priors = dependence_tree(parts, survey.inputs)

    def _visit(self, name: str, fn: Any) -> None:
        """Note what the likelihood of an observed site is."""
        base = base_distribution(fn)
        latents = _latents(type(base))
        self.registered[name] = latents
        self.shared[name] = base.batch_shape == () and fn.batch_shape != ()
        ranks = [jnp.ndim(getattr(base, k)) for k in latents]
        self.joint[name] = max(ranks, default=0) > len(base.batch_shape)

    def refuse_unsupported(self, latents: tuple[str, ...], observed: bool) -> None:
        """Raise for models whose processes enter something other than likelihoods.

        :param latents: all latent sites.
        :param observed: whether anything is observed. If nothing is, a latent site that
            depends on a process is an observation that was not passed in.
        :raises NotConjugateError: naming the two sites.
        """
        found = self.parts
        used = jax.tree.leaves((
            found.densities, found.parameters, found.rest, found.bounded, self.priors
        ))  # fmt: skip
        for site, name in self.vectors.items():
            if any(site in leaf.state for leaf in used):
                raise NotConjugateError(
                    f"the inducing values {site!r} are used directly. Use the "
                    f"function values {name!r}, or fit by MCMC(NUTS(model))"
                )
        priors = (*self.processes, *(latents if observed else ()))
        for prior in priors:
            leaves = jax.tree.leaves(self.priors.get(prior))
            sources = {n for leaf in leaves for n in leaf.state} & self.processes
            if sources:
                raise NotConjugateError(
                    f"the distribution of {prior!r} depends on the process "
                    f"{sorted(sources)[0]!r}, and only observed sites may. If it is "
                    "data, pass the model its values (obs=...); MCMC(NUTS(model)) "
                    "samples such a model"
                )

    def is_likelihood(self, latent: str) -> bool:
        """Whether a latent site is an observation that was not passed in: its own
        distribution depends on a process."""
        leaves = jax.tree.leaves(self.priors.get(latent))
        return any(self.processes & set(leaf.state) for leaf in leaves)

    def is_weight(self, block: Block) -> bool:
        """Whether a block is a vector normal on which only likelihood predictors
        depend, and affinely, so that its update has a closed form."""
        name, rest = block.name, jax.tree.leaves((self.parts.rest, self.priors))
        if block.is_process or any(name in leaf.state for leaf in rest):
            return False
        reached = False
        for site, latents in self.registered.items():
            for latent in latents:
                dependence = self.parts.parameters[site][latent].state.get(name)
                reached |= dependence is not None
                if dependence is not None and not dependence.affine:
                    return False
            if not latents and name in self.parts.densities[site].state:
                return False
        return reached

    def in_closed_form(self, weight: str, routes: list[Observed]) -> bool:
        """Whether every observed site of a weight vector has a closed form (nodes
        run over function values only)."""
        densities = self.parts.densities
        reached = [r for r in routes if weight in densities[r.name].state]
        return all(r.route is Route.CLOSED_FORM for r in reached)

    def observed(self, name: str, blocks: tuple[Block, ...]) -> Observed:
        """Return an observed site with its route."""
        density = self.parts.densities[name].state
        reached = tuple(b.name for b in blocks if b.name in density)
        processes = tuple(n for n in reached if n in self.processes)
        augmented = lookup_augmentation(self.classes[name]) is not None
        expectation = lookup_expectation(self.classes[name])
        log_concave = expectation is not None and expectation.log_concave
        if processes and self.shared[name]:
            cls = self.classes[name].__name__
            raise ValueError(
                f"site {name!r}: all data have the same {cls}, because its last "
                f"axis has the function values of {processes[0]!r} at all data. If "
                "its last axis runs over classes, construct the process with "
                "num_latents=C"
            )
        if not reached:
            return Observed(
                name, (), (), Route.CONSTANT, (), augmented, log_concave, None
            )
        reason = self._why_not_closed(name, reached)
        latents = self.registered[name] if reason is None else ()
        if latents and expectation is not None:
            route = Route.CLOSED_FORM
        elif len(reached) == 1 and density[reached[0]].elementwise:
            route = Route.GAUSS_HERMITE
        else:
            route = Route.MONTE_CARLO
        self._refuse_correlated(name, processes, route)
        states = [self.parts.parameters[name][latent].state for latent in latents]
        sources = tuple(tuple(b for b in reached if b in state) for state in states)
        return Observed(
            name, latents, sources, route, processes, augmented, log_concave, reason
        )

    def _refuse_correlated(
        self, name: str, processes: tuple[str, ...], route: Route
    ) -> None:
        """Raise if a likelihood depends on several outputs that share latents. Each of
        them is Gaussian with a known variance, but the bound uses no covariances."""
        correlated = [p for p in processes if p in self.correlated]
        joint = self.joint[name] or route is Route.MONTE_CARLO
        if correlated and joint:
            raise NotConjugateError(
                f"site {name!r}: the outputs of {correlated[0]!r} share latents "
                "(loadings=), so they are correlated, but "
                f"{self.classes[name].__name__} has no closed form for one output "
                "at a time. MCMC(NUTS(model)) samples this model"
            )

    def _missing_link(self, name: str) -> str | None:
        """Return the message about a parameter that has a domain and is affine in a
        block."""
        for k, leaf in self.parts.bounded[name].items():
            for block, dependence in leaf.state.items():
                if dependence.affine:
                    return missing_link(name, self.classes[name], k, block)
        return None

    def _why_not_closed(self, name: str, reached: tuple[str, ...]) -> str | None:
        if not self.registered[name]:
            if missing := self._missing_link(name):
                return missing
            cls = self.classes[name].__name__
            instead = _INSTEAD.get(cls, "numpyro_gpaug.Linked(f, link, family)")
            return f"no closed form is registered for {cls} (one is for {instead})"
        for leaf in jax.tree.leaves(self.parts.rest[name]):
            if touched := [r for r in reached if r in leaf.state]:
                return self._missing_link(name) or (
                    f"a parameter of {self.classes[name].__name__} other than "
                    f"{self.registered[name]} depends on {touched[0]!r}"
                )
        carriers: dict[str, str] = {}
        for latent in self.registered[name]:
            state = self.parts.parameters[name][latent].state
            for block in reached:
                if block in state and carriers.setdefault(block, latent) != latent:
                    return (
                        f"{carriers[block]!r} and {latent!r} of "
                        f"{self.classes[name].__name__} both depend on {block!r}, but "
                        "they must be independent: give each its own GaussianProcess"
                    )
                dependence = state.get(block)
                if dependence is None:
                    continue
                if not dependence.affine:
                    return (
                        f"{latent!r} is not affine in {block!r}: it passes through "
                        f"{dependence.nonlinear!r}"
                    )
                if block in self.processes and not dependence.elementwise:
                    return (
                        f"{latent!r} mixes several function values of {block!r} (of "
                        f"{block} @ W write num_latents=... and loadings=W.T of the "
                        "process)"
                    )
        return None


def _latents(cls: type) -> tuple[str, ...]:
    expectation = lookup_expectation(cls)
    if expectation is not None:
        return expectation.latents
    augmentation = lookup_augmentation(cls)
    return () if augmentation is None else augmentation.latents
