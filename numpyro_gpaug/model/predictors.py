# SPDX-License-Identifier: Apache-2.0
"""Predictors of observed sites as functions of the Gaussian blocks' marginals, with
derivatives, and the expectations of their likelihoods in closed form."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import dataclass
from functools import partial
from typing import Any

import jax
import jax.numpy as jnp
import numpyro.distributions as dist
from jax import Array

from numpyro_gpaug._numpyro import Ordered
from numpyro_gpaug.errors import NotConjugateError
from numpyro_gpaug.gaussians.base import Marginals
from numpyro_gpaug.gp.outputs import Outputs
from numpyro_gpaug.likelihoods.augmentation import lookup_augmentation
from numpyro_gpaug.likelihoods.expectations import (
    Route,
    base_distribution,
    expected_log_prob,
    feasible,
    lookup_expectation,
    through_wrappers,
)
from numpyro_gpaug.model.structure import Observed


@jax.tree_util.register_pytree_node_class
class Likelihood(Ordered):
    """An observed site's distribution, value and scale (``None`` for 1), at function
    values of zero. Only its latent-carrying parameters depend on function values."""

    def __iter__(self) -> Iterator[Any]:
        return iter(self.tree)

    @property
    def fn(self) -> Any:
        """The distribution."""
        return self.tree[0]

    @property
    def value(self) -> Any:
        """The observed value."""
        return self.tree[1]

    @property
    def scale(self) -> Any:
        """NumPyro's scale of the site."""
        return self.tree[2]


@partial(
    jax.tree_util.register_dataclass,
    data_fields=("values", "push", "outputs"),
    meta_fields=("columns", "shapes"),
)
@dataclass(frozen=True)
class Predictors:
    """Latent-carrying parameters of likelihoods, affine in function values and weights.

    :param values: their values at zero, by ``"site/parameter"``.
    :param push: their derivative in function values and weights, by block.
    :param outputs: maps from latents to function values, by process.
    :param columns: predictors that depend on a weight vector, by block; its affine map
        has them concatenated.
    :param shapes: shapes of function values and weights, by block.
    """

    values: dict[str, Array]
    push: Callable[[dict[str, Array]], dict[str, Array]]
    outputs: dict[str, Outputs]
    columns: dict[str, tuple[str, ...]]
    shapes: dict[str, jax.ShapeDtypeStruct]

    def at(self, moved: dict[str, Array]) -> dict[str, Array]:
        """Return the predictors at function values and weights, zero where missing."""
        shifts = self.shifts(moved)
        return {k: value + shifts[k] for k, value in self.values.items()}

    def shifts(self, moved: dict[str, Array]) -> dict[str, Array]:
        """Return their change for a change of function values and weights."""
        full = {
            k: jnp.asarray(moved.get(k, jnp.zeros(like.shape)), like.dtype)
            for k, like in self.shapes.items()
        }
        return self.push(full)

    def projection(self, block: str, names: tuple[str, ...], by: Any) -> Array:
        """Return the change of predictors, raveled and concatenated, for changes of one
        block.

        :param block: its name.
        :param names: names of the predictors.
        :param by: changes of its function values, or weights, with a leading axis.
        :return: (changes, n).
        """

        def columns(move: Array) -> Array:
            shifts = self.shifts({block: move})
            return jnp.concatenate([shifts[k].ravel() for k in names])

        return jax.vmap(columns)(by)

    def split(self, names: tuple[str, ...], flat: Array) -> dict[str, Array]:
        """Split concatenated values, (n,), by predictor and into its shape."""
        found, begin = {}, 0
        for name in names:
            value = self.values[name]
            found[name] = flat[begin : begin + value.size].reshape(value.shape)
            begin += value.size
        return found

    def moments(
        self, at: dict[str, Marginals]
    ) -> tuple[dict[str, Array], dict[str, Array]]:
        """Return means and variances of function values in the model, by process.

        :param at: marginals by block name.
        """
        processes = {k: o for k, o in self.outputs.items() if k in at}
        means = {k: o(at[k].mean) for k, o in processes.items()}
        variances = {k: o.variances(at[k].variance) for k, o in processes.items()}
        return means, variances

    def marginals(self, at: dict[str, Marginals]) -> dict[str, Marginals]:
        """Return marginals of every predictor, given those of independent blocks.

        A predictor is elementwise affine in function values, so its variance is the sum
        over processes of slope^2 v. Slope and slope * v are two tangents, which avoids
        a square root (its gradient at 0 is infinite).

        :param at: marginals by block name; blocks that are missing are at zero.
        """
        means, spreads = self.moments(at)
        values = self.at(means)
        variances = {k: jnp.zeros_like(value) for k, value in values.items()}
        for name, mean in means.items():
            slope = self.shifts({name: jnp.ones_like(mean)})
            carried = self.shifts({name: spreads[name]})
            variances = {k: v + slope[k] * carried[k] for k, v in variances.items()}
        for block, names in self.columns.items():
            if block in at:
                shift, spread = (self.split(names, x[0]) for x in at[block])
                values |= {k: values[k] + shift[k] for k in names}
                variances |= {k: variances[k] + spread[k] for k in names}
        return {k: Marginals(values[k], variances[k]) for k in values}


def are_normal(sites: tuple[Observed, ...], likelihoods: dict[str, Likelihood]) -> bool:
    """Whether the expected log-likelihood is quadratic in the latents, so that Gaussian
    factors are the same at any marginals.

    :param sites: observed sites.
    :param likelihoods: likelihoods of the sites in closed form, by site.
    """
    closed = [s.name for s in sites if s.route is Route.CLOSED_FORM]
    rest = [s for s in sites if s.route not in (Route.CLOSED_FORM, Route.CONSTANT)]
    kinds = [type(base_distribution(likelihoods[name].fn)) for name in closed]
    return not rest and all(kind is dist.Normal for kind in kinds)


def of_site(
    carried: dict[str, Marginals], site: Observed
) -> tuple[dict[str, Array], dict[str, Array]]:
    """Return means and variances of one site's latent-carrying parameters."""
    found = {k: carried[f"{site.name}/{k}"] for k in site.latents}
    means = {k: marginal.mean for k, marginal in found.items()}
    return means, {k: marginal.variance for k, marginal in found.items()}


def closed_form(
    site: Observed, fn: Any, value: Any, carried: dict[str, Marginals], bound: str
) -> Array:
    """Return the expected log-density of each datum of a site, or its augmented bound
    if no exact expectation is registered."""
    moments, y = of_site(carried, site), feasible(fn, value)
    cls = type(base_distribution(fn))
    if bound == "exact" and lookup_expectation(cls) is not None:
        return expected_log_prob(fn, y, *moments)
    augmentation = lookup_augmentation(cls)
    if augmentation is None:
        raise NotConjugateError(
            f"site {site.name!r}: {cls.__name__} has no augmentation registered, "
            'only an exact expectation; use updates="exact" or bound="exact"'
        )
    return through_wrappers(fn, lambda d: augmentation.bound(d, y, *moments))


def scaled_sum(value: Array, scale: Any) -> Array:
    """Return the sum of a site's terms, with the scale NumPyro put on the site."""
    return jnp.sum(value if scale is None else value * scale)
