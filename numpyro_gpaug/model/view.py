# SPDX-License-Identifier: Apache-2.0
"""The expected log-likelihood of a model, as a function of Gaussian marginals."""

from __future__ import annotations

from collections.abc import Callable
from functools import cached_property
from typing import Any

import jax
import jax.numpy as jnp
from jax import Array, random

from numpyro_gpaug.errors import NotConjugateError
from numpyro_gpaug.gp.process import Conditional
from numpyro_gpaug.gp.projection import residual_variance
from numpyro_gpaug.likelihoods.augmentation import lookup_augmentation
from numpyro_gpaug.likelihoods.expectations import (
    Route,
    base_distribution,
    expected_log_prob,
    feasible,
    through_wrappers,
)
from numpyro_gpaug.math.linalg import safe_sqrt
from numpyro_gpaug.math.quadrature import gauss_hermite
from numpyro_gpaug.model.marginals import Field, Marginals
from numpyro_gpaug.model.structure import (
    Arguments,
    Block,
    Observed,
    Structure,
    Trace,
    check_shape,
    conditional_of,
    run_model,
)

NUM_NODES = 32


class BoundProblem:
    """A model at fixed params and other latents, seen from its Gaussian blocks.

    :param structure: what the model is made of.
    :param model: the model.
    :param arguments: its arguments.
    :param values: params, other latents and plate indices by name.
    :param key: seed for Monte Carlo routes.
    """

    def __init__(
        self,
        structure: Structure,
        model: Callable[..., Any],
        arguments: Arguments,
        values: dict[str, Any],
        key: Array,
    ) -> None:
        self.structure = structure
        self._model, self.arguments = model, arguments
        self.values, self._key = values, key
        self._processes = [b for b in structure.blocks if b.is_process]
        self._weights = [b for b in structure.blocks if not b.is_process]
        self._zeros = structure.zeros

    def trace(self, at: dict[str, Array]) -> Trace:
        """Runs the model with function values and weights filled in from ``at``;
        whatever is missing from it is at zero."""
        values = {**self._zeros, **self.values, **at}
        return run_model(self._model, self.arguments, self._key, values)

    @cached_property
    def _flat(self) -> dict[str, Array]:
        """Zero function values, of the right shapes, found without arithmetic."""
        names = [b.name for b in self._processes]
        abstract = jax.eval_shape(
            lambda: {n: self.trace({})[n]["value"] for n in names}
        )
        return {n: jnp.zeros(s.shape, s.dtype) for n, s in abstract.items()}

    @cached_property
    def _base(self) -> Trace:
        return self.trace(self._flat)

    # Geometry: what can be kept while hyperparameters rest.

    def fields(self, factors: dict[str, Array] | None = None) -> dict[str, Any]:
        """The :class:`Field` of every block, by block name.

        :param factors: Cholesky factors of the inducing matrices, if computed before.
        """
        found: dict[str, Any] = {}
        for block in self._processes:
            law = self.conditional(block)
            factor = law.gp.cholesky if factors is None else factors[block.name]
            projection = law.projection_through(factor)
            residual = residual_variance(law.prior_variance, projection)
            found[block.name] = Field(law.mean, projection, residual)
        return {**found, **self.weight_fields()}

    def latents(self) -> dict[str, Array | None]:
        """Which latents each process was called for; ``None`` for all."""
        return {b.name: self.conditional(b).rows for b in self._processes}

    def coupled(self) -> tuple[str, ...]:
        """Processes whose latents meet in the same outputs."""
        laws = {b.name: self.conditional(b) for b in self._processes}
        return tuple(n for n, law in laws.items() if law.gp.loadings is not None)

    def message(self, site: str) -> dict[str, Any]:
        """The message of a sample site, at function values of zero."""
        return self._base[site]

    def conditional(self, block: Block) -> Conditional:
        """The law of a process's function values given its inducing vector."""
        return conditional_of(self._base, block)

    def weight_fields(self) -> dict[str, dict[str, Field]]:
        """Those of plain weight vectors, by block name and predictor."""
        if not self._weights:
            return {}
        zeros = {b.name: self._zeros[b.site] for b in self._weights}
        _, push = jax.linearize(
            lambda w: self.predictor_values({**self._flat, **w}), zeros
        )
        found = {}
        for block in self._weights:
            size = block.shape[0]
            directions = {
                k: jnp.zeros((size, *z.shape), z.dtype) for k, z in zeros.items()
            }
            directions[block.name] = jnp.eye(size, dtype=block.dtype)
            columns = jax.vmap(push)(directions)
            found[block.name] = {
                name: Field(*_flat_field(column)) for name, column in columns.items()
            }
        return found

    def priors(self) -> dict[str, tuple[Array, Array]]:
        """Prior mean and standard deviation of every block, each of its shape."""
        found = {}
        for block in self.structure.blocks:
            normal = base_distribution(self._base[block.site]["fn"])
            loc, scale = (
                jnp.broadcast_to(jnp.asarray(x, block.dtype), block.shape)
                for x in (normal.loc, normal.scale)
            )
            found[block.name] = (loc, scale)
        return found

    def block_scale(self, block: Block) -> Any:
        """The factor of a block's KL: the scale NumPyro put on its sample site, times
        C / K if the process was called for the K latents a plate of size C drew."""
        scale = self._base[block.site]["scale"]
        scale = 1 if scale is None else scale
        latents = self.conditional(block).rows if block.is_process else None
        if latents is None:
            return scale
        plates = [s for s in self._base.values() if s["type"] == "plate"]
        drawn = [s for s in plates if s["value"] is latents]
        sizes = block.shape[0], len(latents)
        if not drawn and any((s["args"][0], len(s["value"])) == sizes for s in plates):
            raise ValueError(
                f"process {block.name!r} is called for {sizes[1]} of {sizes[0]} "
                "latents, as many as a plate draws, but not with that plate's indices: "
                "pass them as they are (latents=index)"
            )
        return scale * block.shape[0] / len(latents) if drawn else scale

    def other_sites(self) -> Trace:
        """The sample sites of all other latents."""
        return {name: self._base[name] for name in self.structure.others}

    # Expected log-likelihood.

    def expected_log_likelihood(self, at: dict[str, Any], bound: str) -> Array:
        """The sum over observed sites of their scaled, masked expectations.

        :param at: :class:`Marginals` by block name (a dict of them for weights).
        :param bound: ``"exact"`` or ``"augmented"``.
        :return: scalar.
        """
        means, spreads = self.process_moments(at)
        trace, carried = self.trace(means), self.predictors(at)
        terms = []
        for site in self.structure.observed:
            message = trace[site.name]
            check_shape(site.name, message)
            if site.latents and (
                bound == "augmented" or site.route is Route.CLOSED_FORM
            ):
                value = _closed_form(message, *predictor(carried, site), bound)
            elif site.route is Route.CONSTANT:
                value = message["fn"].log_prob(message["value"])
            else:
                value = self._at_nodes(site, means, spreads)
            terms.append(scaled_sum(value, message["scale"]))
        return sum(terms[1:], terms[0])

    def expected_at(self, carried: dict[str, Marginals]) -> Array:
        """The expectations of the observed sites that these predictors belong to: exact
        where there is a closed form, otherwise their augmented bounds.

        :param carried: marginals by ``"site/parameter"``, all of a site or none.
        :return: scalar.
        """
        names = {name.rsplit("/", 1)[0] for name in carried}
        total = jnp.zeros(())
        for site in self.structure.observed:
            if site.name in names:
                message = self._base[site.name]
                exact = site.route is Route.CLOSED_FORM
                bound = "exact" if exact else "augmented"
                value = _closed_form(message, *predictor(carried, site), bound)
                total += scaled_sum(value, message["scale"])
        return total

    def predictors(self, at: dict[str, Any]) -> dict[str, Marginals]:
        """Marginals of every latent-carrying parameter, by ``"site/parameter"``.

        :param at: :class:`Marginals` by block name (a dict of them for weights);
            blocks that are missing are at zero.
        """
        carried = self._carried(*self.process_moments(at))
        for block in self._weights:
            for name, marginal in at.get(block.name, {}).items():
                mean, variance = carried[name]
                carried[name] = Marginals(
                    mean + marginal.mean.reshape(mean.shape),
                    variance + marginal.variance.reshape(mean.shape),
                )
        return carried

    def process_moments(self, at: dict[str, Any]) -> tuple[dict, dict]:
        """Means and variances of function values as the model sees them, by block name.

        :param at: :class:`Marginals` by block name.
        """
        means, spreads = {}, {}
        for block in self._processes:
            if block.name not in at:
                continue
            law, (mean, variance) = self.conditional(block), at[block.name]
            means[block.name] = law.outputs(mean)
            spreads[block.name] = law.output_variances(variance)
        return means, spreads

    def predictor_values(self, at: dict[str, Array]) -> dict[str, Array]:
        """Every latent-carrying parameter at given function values and weights, by
        ``"site/parameter"``."""
        trace = self.trace(at)
        return {
            f"{site.name}/{k}": jnp.asarray(
                getattr(base_distribution(trace[site.name]["fn"]), k)
            )
            for site in self.structure.observed
            for k in site.latents
        }

    def _carried(
        self, means: dict[str, Array], spreads: dict[str, Array]
    ) -> dict[str, Marginals]:
        """Mean and variance of each latent-carrying parameter, processes only.

        It is elementwise affine in independent latents, so its variance is the sum over
        latents of slope^2 v; slope and slope * v are two tangents, and no square root
        (whose gradient at 0 is infinite) is taken.
        """
        values, push = jax.linearize(
            lambda at: self.predictor_values({**self._flat, **at}), means
        )
        variances = jax.tree.map(jnp.zeros_like, values)
        blank = jax.tree.map(jnp.zeros_like, means)
        for name, mean in means.items():
            slope = push({**blank, name: jnp.ones_like(mean)})
            carried = push({**blank, name: spreads[name]})
            variances = {k: v + slope[k] * carried[k] for k, v in variances.items()}
        return {k: Marginals(values[k], variances[k]) for k in values}

    def _at_nodes(
        self, site: Observed, means: dict[str, Array], spreads: dict[str, Array]
    ) -> Array:
        """Expectation by re-running the model at nodes of the function values."""
        reached = {k: means[k] for k in site.processes}
        dtype = jnp.result_type(*reached.values())
        if site.route is Route.GAUSS_HERMITE:
            nodes, weights = gauss_hermite(NUM_NODES, dtype)
            draws = {k: nodes for k in reached}
        else:
            weights = jnp.full((NUM_NODES,), 1 / NUM_NODES, dtype)
            keys = random.split(self._key, len(reached))
            draws = {
                k: random.normal(key, (NUM_NODES, *m.shape), dtype)
                for key, (k, m) in zip(keys, reached.items(), strict=True)
            }

        def density(z: dict[str, Array]) -> Array:
            moved = {k: means[k] + safe_sqrt(spreads[k]) * z[k] for k in z}
            message = self.trace({**means, **moved})[site.name]
            return message["fn"].log_prob(message["value"])

        return jnp.tensordot(weights, jax.vmap(density)(draws), 1)


def _flat_field(column: Array) -> tuple[Array, Array, Array]:
    """Offset, projection and residual of a weight vector at one predictor: its mean is
    relative to the predictor at zero weights, and nothing is left over."""
    projection = column.reshape(1, column.shape[0], -1)
    zero = jnp.zeros((1, projection.shape[-1]), column.dtype)
    return zero, projection, zero


def predictor(
    carried: dict[str, Marginals], site: Observed
) -> tuple[dict[str, Array], dict[str, Array]]:
    """Means and variances of one site's latent-carrying parameters."""
    found = {k: carried[f"{site.name}/{k}"] for k in site.latents}
    means = {k: marginal.mean for k, marginal in found.items()}
    return means, {k: marginal.variance for k, marginal in found.items()}


def _closed_form(
    message: dict[str, Any], means: dict, variances: dict, bound: str
) -> Array:
    fn = message["fn"]
    y = feasible(fn, message["value"])
    if bound == "exact":
        return expected_log_prob(fn, y, means, variances)
    cls = type(base_distribution(fn))
    augmentation = lookup_augmentation(cls)
    if augmentation is None:
        raise NotConjugateError(
            f"site {message['name']!r}: {cls.__name__} has no augmentation registered, "
            'only an exact expectation; use sites="exact" or bound="exact"'
        )
    return through_wrappers(fn, lambda d: augmentation.bound(d, y, means, variances))


def scaled_sum(value: Array, scale: Any) -> Array:
    """Sum of a site's terms, with the scale NumPyro put on the site."""
    return jnp.sum(value if scale is None else value * scale)
