# SPDX-License-Identifier: Apache-2.0
"""Predictors of observed sites as functions of the marginals of Gaussians, and the
expected log-likelihood: in closed form, or by the two parts into which a frontier
divides densities."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, field
from math import prod
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import numpyro.distributions as dist
from jax import Array

from numpyro_gpaug._numpyro import Ordered
from numpyro_gpaug.errors import NotConjugateError
from numpyro_gpaug.gaussians.base import Marginals
from numpyro_gpaug.gp.conditional import Outputs
from numpyro_gpaug.likelihoods.contract import lookup_augmentation
from numpyro_gpaug.likelihoods.expectations import (
    Route,
    base_distribution,
    expected_log_prob,
    feasible,
    lookup_correlated,
    lookup_expectation,
    through_wrappers,
)
from numpyro_gpaug.math import correlated_softmax
from numpyro_gpaug.math.arrays import STATIC
from numpyro_gpaug.math.expectation import PredictorMoments, expected_sum
from numpyro_gpaug.model.exponentials import expectation
from numpyro_gpaug.model.frontier import Frontier
from numpyro_gpaug.model.latents import JOINT
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

    @property
    def message(self) -> dict[str, Any]:
        """These three as parts of the message of the site."""
        return dict(zip(("fn", "value", "scale"), self.tree, strict=True))


@jax.tree_util.register_dataclass
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
    columns: dict[str, tuple[str, ...]] = field(metadata=STATIC)
    shapes: dict[str, jax.ShapeDtypeStruct] = field(metadata=STATIC)

    def shifts(self, moved: dict[str, Array]) -> dict[str, Array]:
        """Return their change for a change of function values and weights, zero where
        missing."""
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
        """Return marginals of every predictor, given the marginals of independent
        blocks.

        A predictor is elementwise affine in function values, so its variance is the sum
        over processes of slope^2 v. Slope and slope * v are two tangents, which avoids
        a square root (its gradient at 0 is infinite).

        :param at: marginals by block name; blocks that are missing are at zero.
        """
        means, spreads = self.moments(at)
        values = jax.tree.map(jnp.add, self.values, self.shifts(means))
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


def expected_density(
    found: Frontier, route: Route, numbers: Any, at: PredictorMoments
) -> Array:
    """Return the expectation of the sum of the densities behind a frontier.

    :param found: the frontier.
    :param route: the route of the site.
    :param numbers: values of the variables that depend on no latent.
    :param at: Gaussian distributions of the predictors, flat.
    """
    if route is not Route.EXPONENTIAL:
        return expected_sum(found.total, numbers, at)
    (shape,) = (x.shape for x in found.avals)
    mean, variance = (x[0].reshape(shape) for x in (at.means, at.variances))
    return expectation(found, numbers, mean, variance)


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
    first, second = map(prod, shapes)
    beside = np.broadcast_to(np.arange(first), second) if index is None else index
    return beside, first + np.arange(second)


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


@jax.tree_util.register_dataclass
@dataclass(frozen=True)
class Concatenated:
    """Predictors whose marginals are concatenated, in one block.

    :param names: names of the predictors.
    :param shapes: their shapes.
    """

    names: tuple[str, ...] = field(metadata=STATIC)
    shapes: tuple[tuple[int, ...], ...] = field(metadata=STATIC)

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


@jax.tree_util.register_dataclass
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
    sites: tuple[Observed, ...] = field(metadata=STATIC)
    bound: str = field(metadata=STATIC)
    fixed: dict[str, tuple[Array, ...]] = field(default_factory=dict)
    indices: dict[str, Array] = field(default_factory=dict)
    frontiers: tuple[tuple[str, Frontier], ...] = field(default=(), metadata=STATIC)

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
        """Whether the expected log-likelihood is quadratic in the latents, so that
        Gaussian factors are the same at any marginals."""
        routes = {site.route for site in self.sites}
        closed = [s.name for s in self.sites if s.route is Route.CLOSED_FORM]
        kinds = [type(base_distribution(self.likelihoods[k].fn)) for k in closed]
        simple = routes <= {Route.CLOSED_FORM, Route.CONSTANT}
        return simple and all(kind is dist.Normal for kind in kinds)

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
        found = dict(self.frontiers)[site.name]
        try:
            return expected_density(found, site.route, self.fixed[site.name], flat)
        except (ValueError, NotImplementedError) as error:
            lacking = "gradient with respect to", "ifferentiation rule"
            if not any(text in str(error) for text in lacking):
                raise
            raise NotConjugateError(
                f"JAX cannot differentiate the density of {site.name!r}: {error} "
                "Write another density, or fit with ConjugateSVI and the parameter as "
                "a plain number"
            ) from error
