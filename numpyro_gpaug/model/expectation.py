# SPDX-License-Identifier: Apache-2.0
"""The expected log-likelihood, and the two parts into which a frontier divides
densities."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field
from functools import partial
from math import prod
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax import Array

from numpyro_gpaug.gaussians.base import Marginals
from numpyro_gpaug.likelihoods.expectations import (
    Route,
    base_distribution,
    feasible,
    lookup_correlated,
    lookup_expectation,
    through_wrappers,
)
from numpyro_gpaug.math import correlated_softmax
from numpyro_gpaug.math.expectation import PredictorMoments, expected_sum
from numpyro_gpaug.model.exponentials import expectation
from numpyro_gpaug.model.frontier import Frontier
from numpyro_gpaug.model.latents import JOINT
from numpyro_gpaug.model.predictors import (
    Likelihood,
    are_normal,
    closed_form,
    scaled_sum,
)
from numpyro_gpaug.model.program import Program
from numpyro_gpaug.model.structure import Observed


class Split:
    """A frontier that is compared by identity."""

    def __init__(self, program: Program, found: Frontier) -> None:
        self.frontier = found
        self.shapes = tuple(program.avals[r].shape for r in found.roots)

    def outputs(self, numbers: Any, predictors: tuple[Array, ...]) -> list[Array]:
        """Return the outputs that are computed from the roots.

        :param numbers: values of the variables that depend on no latent.
        :param predictors: the predictors, flat, the smaller first.
        """
        pairs = zip(predictors, self.shapes, strict=True)
        roots = [x.reshape(shape) for x, shape in pairs]
        return self.frontier.density(numbers, roots)

    def total(self, numbers: Any, predictors: tuple[Array, ...]) -> Array:
        """Return the sum of the densities.

        :param numbers: values of the variables that depend on no latent.
        :param predictors: the predictors, flat, the smaller first.
        """
        found = self.outputs(numbers, predictors)
        return sum((jnp.sum(x) for x in found), start=jnp.zeros((), found[0].dtype))

    def expectation(self, route: Route, numbers: Any, at: PredictorMoments) -> Array:
        """Return the expectation of the sum of the densities.

        :param route: the route of the site.
        :param numbers: values of the variables that depend on no latent.
        :param at: Gaussian distributions of the predictors, flat.
        """
        if route is not Route.EXPONENTIAL:
            return expected_sum(self.total, numbers, at)
        (shape,) = self.shapes
        mean, variance = (x[0].reshape(shape) for x in (at.means, at.variances))
        return expectation(self.frontier, numbers, mean, variance)


def places_within(shape: tuple[int, ...]) -> tuple[np.ndarray, np.ndarray]:
    """Return the pairs of entries of each datum, as :func:`pair_places` does.

    :param shape: the shape of all data, with entries last.
    """
    rows = np.arange(prod(shape[:-1]))[:, None] * shape[-1]
    left, right = correlated_softmax.pair_places(shape[-1])
    return (rows + left).ravel(), (rows + right).ravel()


def pair_places(
    site: Observed, shapes: Sequence[tuple[int, ...]], index: Array | None = None
) -> tuple[Any, Any]:
    """Return the pairs of predictors of a site whose covariances matter, as places
    among all of its predictors, flattened and concatenated.

    :param site: the site.
    :param shapes: shapes of its predictors.
    :param index: the entry of the first predictor that is paired with each entry of the
        second, if the data contain indices.
    """
    if site.route is Route.CORRELATED:
        return places_within(*shapes)
    if len(shapes) != 2 or site.route is Route.CLOSED_FORM:
        return np.arange(0), np.arange(0)
    first, second = (np.arange(prod(shape)) for shape in shapes)
    beside: Any = first if index is None else index
    return np.broadcast_to(beside, len(second)) if index is None else beside, (
        len(first) + second
    )


def correlated(
    fn: Any,
    value: Any,
    mean: Array,
    variance: Array,
    covariance: Array,
    num: int = correlated_softmax.NODES,
) -> Array:
    """Return the expected log-density of each datum of a site with correlated
    predictors.

    :param fn: the likelihood.
    :param value: the data.
    :param mean: means of predictors, (..., C).
    :param variance: their variances, (..., C).
    :param covariance: covariances of pairs, flat.
    :param num: the number of nodes.
    """
    entry, y = lookup_correlated(type(base_distribution(fn))), feasible(fn, value)
    assert entry is not None
    pairs = covariance.reshape(*mean.shape[:-1], -1)
    of_base = entry.expected_log_prob
    return through_wrappers(fn, lambda d: of_base(d, y, mean, variance, pairs, num))


@partial(
    jax.tree_util.register_dataclass, data_fields=(), meta_fields=("names", "shapes")
)
@dataclass(frozen=True)
class Concatenated:
    """Predictors whose marginals are concatenated, in one block.

    :param names: names of the predictors.
    :param shapes: their shapes.
    """

    names: tuple[str, ...]
    shapes: tuple[tuple[int, ...], ...]

    def marginals(self, at: dict[str, Any]) -> dict[str, Marginals]:
        """Return means and variances of every predictor, in its shape.

        :param at: marginals by block.
        """
        (mean,), (variance,), *_ = at[JOINT]
        found, begin = {}, 0
        for name, shape in zip(self.names, self.shapes, strict=True):
            part = slice(begin, begin + prod(shape))
            found[name] = Marginals(*(x[part].reshape(shape) for x in (mean, variance)))
            begin = part.stop
        return found


@partial(
    jax.tree_util.register_dataclass,
    data_fields=("predictors", "likelihoods", "fixed", "indices"),
    meta_fields=("sites", "bound", "frontiers"),
)
@dataclass(frozen=True)
class ExpectedLogLikelihood:
    """The expected log-likelihood as a function of marginals.

    :param predictors: predictors of all observed sites, with a method ``marginals``.
    :param likelihoods: likelihoods of sites in closed form, and of sites without
        latents.
    :param sites: the observed sites that it sums over.
    :param bound: ``"exact"`` or ``"augmented"``.
    :param fixed: constants in the densities of the other sites.
    :param indices: indices by site, for sites whose data pair the entries of two
        predictors.
    :param frontiers: frontiers of sites that depend on latents.
    """

    predictors: Any
    likelihoods: dict[str, Likelihood]
    sites: tuple[Observed, ...]
    bound: str
    fixed: dict[str, tuple[Array, ...]] = field(default_factory=dict)
    indices: dict[str, Array] = field(default_factory=dict)
    frontiers: tuple[tuple[str, Any], ...] = ()

    @property
    def competing(self) -> tuple[str, ...]:
        """The predictors that a softmax of their last axis alone depends on. There are
        none in one Gaussian of all latents, whose updates move them together."""
        if self.bound != "exact" or isinstance(self.predictors, Concatenated):
            return ()
        found: list[str] = []
        for site in self.sites:
            fn = base_distribution(self.likelihoods[site.name].fn)
            entry = lookup_expectation(type(fn))
            if entry is not None and entry.competing:
                found += site.predictors
        return tuple(found)

    def not_widened(self) -> dict[str, Array]:
        """Return zeros for ``wider`` in :meth:`__call__`; none unless classes
        compete."""
        values = self.predictors.values if self.competing else {}
        return {k: jnp.zeros_like(x) for k, x in values.items()}

    @property
    def quadratic(self) -> bool:
        """See :func:`~numpyro_gpaug.model.predictors.are_normal`."""
        return are_normal(self.sites, self.likelihoods)

    def carried(self, at: dict[str, Any]) -> dict[str, Marginals]:
        """Return marginals of the predictors.

        :param at: marginals by block.
        """
        return self.predictors.marginals(at)

    def __call__(
        self,
        at: dict[str, Any],
        bound: str | None = None,
        wider: dict[str, Array] | None = None,
    ) -> Array:
        """Return the sum over sites of their scaled, masked expectations.

        :param at: marginals by block.
        :param bound: a bound to use in place of :attr:`bound`.
        :param wider: additional variances of predictors; the derivatives in these show
            the curvature of the likelihood.
        """
        carried, bound = self.carried(at), bound or self.bound
        for k, more in (wider or {}).items():
            mean, variance = carried[k]
            carried[k] = Marginals(mean, variance + more)
        total = jnp.zeros((), jnp.result_type(*jax.tree.leaves(carried), 0.0))
        begin = 0
        for site in self.sites:
            moments = [carried[p] for p in site.predictors]
            index = self.indices.get(site.name)
            places = pair_places(site, [m.shape for m, _ in moments], index)
            size = len(places[0])
            pairs = at[JOINT].covariance[0, begin : begin + size] if size else None
            begin += size
            if site.name in self.fixed:
                total += self._by_nodes(site, moments, pairs, index)
            else:
                fn, value, scale = self.likelihoods[site.name]
                if site.route is Route.CONSTANT:
                    term = fn.log_prob(value)
                elif site.route is Route.CORRELATED:
                    assert pairs is not None
                    term = correlated(fn, value, *moments[0], pairs)
                else:
                    term = closed_form(site, fn, value, carried, bound)
                total += scaled_sum(term, scale)
        return total

    def _by_nodes(
        self, site: Observed, moments: list[Any], pairs: Any, index: Any
    ) -> Array:
        """Return the expectation of a site without a registered likelihood."""
        means, variances = zip(*moments, strict=True)
        means, variances = (tuple(x.ravel() for x in y) for y in (means, variances))
        flat = PredictorMoments(means, variances, pairs, index)
        split = dict(self.frontiers)[site.name]
        return split.expectation(site.route, self.fixed[site.name], flat)
