# SPDX-License-Identifier: Apache-2.0
"""A distribution whose predictors are Gaussian, integrated over them by nodes."""

from __future__ import annotations

import math
from collections.abc import Callable
from functools import partial, wraps
from typing import Any, TypeVar

import jax
import jax.numpy as jnp
import numpyro.distributions as dist
from jax import Array, lax, random
from numpyro.distributions import Distribution, constraints

from numpyro_gpaug._numpyro import Ordered
from numpyro_gpaug.distributions._grid import Grid, stepped_over
from numpyro_gpaug.distributions.densities import log_density
from numpyro_gpaug.distributions.mixtures import bounds, quantile
from numpyro_gpaug.distributions.stacked import expanded
from numpyro_gpaug.math.compiling import jit_for_few_runs
from numpyro_gpaug.math.expectation import AT_ONCE
from numpyro_gpaug.math.incomplete import betainc, gammaincc

# Nodes without a finite moment or density are left out if their weights add up to less.
NEGLIGIBLE = 1e-3
_BINARY = dist.BernoulliProbs, dist.BernoulliLogits
CENSORED = dist.LeftCensoredDistribution, dist.RightCensoredDistribution
_CLASSES = dist.CategoricalProbs, dist.CategoricalLogits, dist.OrderedLogistic

Method = TypeVar("Method", bound=Callable[..., Any])


def _one_program(method: Method, **options: Any) -> Method:
    """Decorate a method of a mixture so that it compiles one program, not one for each
    of its operations.

    :param method: the method.
    :param options: options of ``jax.jit``.
    """

    @wraps(method)
    def of_tree(mixture: Ordered, *args: Any, **kwargs: Any) -> Any:
        return method(mixture.tree, *args, **kwargs)

    program = jit_for_few_runs(of_tree, **options)

    @wraps(method)
    def compiled(self: Any, *args: Any, **kwargs: Any) -> Any:
        try:
            return program(Ordered(self), *args, **kwargs)
        except TypeError:
            # Static fields of a component need not be hashable, and its methods may
            # need numbers (Multinomial).
            return method(self, *args, **kwargs)

    return compiled  # type: ignore[return-value]


class PredictorMixture(Distribution):
    """The mixture of any distribution over quadrature nodes of its parameters.

    ``predict_y`` of a posterior returns it for likelihoods whose predictive
    distribution has no closed form. ``cdf`` and ``icdf`` exist if the components have
    a ``cdf``.

    :param leaves: leaves of the component, in the order of ``treedef``; leaves marked
        by ``varies`` have a leading axis over nodes.
    :param weights: weights of the nodes, summing to one; (nodes,), or (nodes, ...) if
        they differ between data.
    :param treedef: structure of the component, possibly as an ``Ordered`` tree.
    :param varies: which leaves vary.
    :param batch_shape: batch shape of a component.
    :param event_shape: event shape of a component.
    :param dimensions: the number of predictors of each datum, if the nodes are those of
        :func:`.expectation.nodes`. Densities, probabilities and draws then interpolate
        the parameters between nodes: a large count has a likelihood that is narrower
        than their distances.
    """

    pytree_data_fields = ("leaves", "weights")
    pytree_aux_fields = ("treedef", "varies", "dimensions")
    arg_constraints: dict[str, Any] = {}

    def __init__(
        self,
        leaves: tuple[Array, ...],
        weights: Array,
        treedef: Any,
        varies: tuple[bool, ...],
        batch_shape: tuple[int, ...],
        event_shape: tuple[int, ...],
        dimensions: int = 0,
    ) -> None:
        self.leaves, self.weights = tuple(leaves), weights
        self.treedef, self.varies = treedef, varies
        self.dimensions = dimensions
        super().__init__(batch_shape, event_shape, validate_args=False)

    def over_members(self, weights: Array) -> PredictorMixture:
        """Combine several stacked mixtures into one over the nodes of all.

        :param weights: weights of the members, (members,), or (members, ...) if they
            differ between data; all arrays have a leading axis over members.
        """
        nodes = self.weights.shape[1]
        each = self.weights.reshape(*self.weights.shape, *[1] * (weights.ndim - 1))
        both = weights[:, None] * each
        leaves = tuple(
            x.reshape(-1, *x.shape[2:]) if v else jnp.repeat(x, nodes, 0)
            for x, v in zip(self.leaves, self.varies, strict=True)
        )
        return PredictorMixture(
            leaves, both.reshape(-1, *both.shape[2:]), self.treedef,
            (True,) * len(leaves), self.batch_shape, self.event_shape, self.dimensions,
        )  # fmt: skip

    def _of_nodes(self) -> PredictorMixture:
        """Return the mixture without interpolation between its nodes."""
        return PredictorMixture(
            self.leaves, self.weights, self.treedef, self.varies, self.batch_shape,
            self.event_shape,
        )  # fmt: skip

    def of_labels(self) -> Distribution:
        """Return, for binary labels and classes, a distribution of the same kind with
        ``probs``; otherwise the mixture itself."""
        component = self.component
        # Not for subclasses, whose density may differ.
        if type(component) in _BINARY:
            no, yes = (self._by_nodes(jnp.full(self.batch_shape, k))[0] for k in (0, 1))
            return dist.Bernoulli(logits=yes - no)
        if type(component) in _CLASSES:
            classes = jnp.arange(component.probs.shape[-1])
            labels = classes.reshape(-1, *[1] * len(self.batch_shape))
            labels = jnp.broadcast_to(labels, (classes.size, *self.batch_shape))
            each = jax.vmap(lambda y: self._by_nodes(y)[0], 0, -1)(labels)
            return dist.Categorical(logits=each)
        return self

    @property
    def _moving(self) -> list[Array]:
        return [x for x, v in zip(self.leaves, self.varies, strict=True) if v]

    @property
    def _fixed(self) -> list[Array]:
        return [x for x, v in zip(self.leaves, self.varies, strict=True) if not v]

    def _with(self, moving: list[Array], fixed: list[Array] | None = None) -> Any:
        """Return the component with these varying leaves, and these others."""
        given, kept = iter(moving), iter(self._fixed if fixed is None else fixed)
        return self._of_leaves([next(given if v else kept) for v in self.varies])

    def _of_leaves(self, leaves: list[Array]) -> Any:
        found = jax.tree.unflatten(self.treedef, leaves)
        return found.tree if isinstance(found, Ordered) else found

    def _each(self, function: Callable[[Any], Array]) -> Array:
        """Apply a function to every component, nodes first."""
        num, size = len(self.weights), math.prod(self.batch_shape + self.event_shape)
        # Iterations of an incomplete beta function keep dozens of arrays of entries.
        most = max(AT_ONCE // max(size, 1), 1)
        # Not a remainder, which would be compiled, too.
        together = next(k for k in range(min(most, num), 0, -1) if num % k == 0)
        return lax.map(
            lambda x: function(self._with(x)), self._moving, batch_size=together
        )

    def _weighed(self, wrong: Array, event_dim: int = 0) -> Array:
        """Return the weights of the nodes, aligned with ``wrong``. Wrong nodes have no
        weight if together they weigh little: far in the tails, formulas of NumPyro are
        0/0 (truncated normals far outside)."""
        weights = self._aligned(self.weights, wrong, event_dim)
        lost = jnp.where(wrong, weights, 0).sum(0)
        few = (lost > 0) & (lost < NEGLIGIBLE)
        return jnp.where(few, jnp.where(wrong, 0, weights) / (1 - lost), weights)

    def _average(self, values: Array, event_dim: int = 0) -> Array:
        weights = self._weighed(~jnp.isfinite(values), event_dim)
        return jnp.where(weights > 0, weights * values, 0).sum(0)

    @staticmethod
    def _aligned(weights: Array, values: Array, event_dim: int = 0) -> Array:
        """Return weights with additional axes: for draws, before the axes of data, and
        for events, after them."""
        draws = (1,) * (values.ndim - weights.ndim - event_dim)
        nodes, *data = weights.shape
        return weights.reshape(nodes, *draws, *data, *(1,) * event_dim)

    @property
    def component(self) -> Any:
        """The component at the first node."""
        return self._with([x[0] for x in self._moving])

    @constraints.dependent_property
    def support(self) -> Any:
        return self.component.support

    def _known(self, name: str, function: Callable[[Any], Array], draws: str) -> Array:
        """Return a property of every component, or raise an error that states an
        alternative."""
        try:
            return self._each(function)
        except NotImplementedError as error:
            cls = type(self.component)
            if cls.sample is Distribution.sample:
                draws = f"define {name}, or sample, in the class"
            said = f"{cls.__name__} has no {name}: {draws}"
            raise NotImplementedError(str(error) or said) from None

    def _moment(self, name: str) -> Array:
        draws = "compute it from draws, predicted.sample(key, (1000,)), or define "
        draws += f"{name} in the class"
        return self._known(name, lambda d: getattr(uncensored(d), name), draws)

    @property
    @_one_program
    def mean(self) -> Array:
        """The mean; of angles, its direction."""
        if self.support is constraints.circular:
            return jnp.angle(self._resultant)
        return self._average(self._moment("mean"), self.event_dim)

    @property
    @_one_program
    def variance(self) -> Array:
        """The variance; of angles, the circular one, as in NumPyro."""
        if self.support is constraints.circular:
            return 1 - jnp.abs(self._resultant)
        means, dims = self._moment("mean"), self.event_dim
        within = self._average(self._moment("variance"), dims)
        apart = jnp.square(means - self._average(means, dims))
        return within + self._average(apart, dims)

    @property
    def _resultant(self) -> Array:
        """The mean of angles as points of the unit circle, complex."""
        lengths, angles = 1 - self._moment("variance"), self._moment("mean")
        mean = self._average(lengths * jnp.cos(angles))
        return lax.complex(mean, self._average(lengths * jnp.sin(angles)))

    def log_prob(self, value: Array) -> Array:
        return self._where_needed("_log_density", value)

    def log_prob_of_nodes(self, value: Array) -> Array:
        """Return ``log_prob`` by the nodes alone; NaN where they step over the peak of
        the likelihood.

        :param value: the data.
        """
        found, wrong = self._log_density(value)
        return found if wrong is None else jnp.where(wrong, jnp.nan, found)

    def cdf(self, value: Array) -> Array:
        return self._where_needed("_probability", value)

    def _where_needed(self, name: str, value: Array) -> Array:
        """Return an average by the nodes of the mixture, or by others where these step
        over the peak of the likelihood."""
        found, wrong = getattr(self, name)(value)
        if wrong is None:
            return found
        # A program that is being traced contains both.
        if isinstance(wrong, jax.core.Tracer) or wrong.any():
            return getattr(self, f"{name}_between")(value)
        return found

    @_one_program
    def _log_density(self, value: Array) -> tuple[Array, Array | None]:
        found, densities = self._by_nodes(value)
        return found, self._stepped_over(densities)

    @_one_program
    def _log_density_between(self, value: Array) -> Array:
        return self._between_nodes(value, *self._by_nodes(value))

    def _by_nodes(self, value: Array) -> tuple[Array, Array]:
        densities = self._each(lambda d: log_density(d, value))
        weights = self._weighed(jnp.isnan(densities) | (densities == jnp.inf))
        terms = jnp.where(weights > 0, jnp.log(weights) + densities, -jnp.inf)
        return jax.nn.logsumexp(terms, 0), densities

    @_one_program
    def _probability(self, value: Array) -> tuple[Array, Array | None]:
        draws = "count draws, (predicted.sample(key, (1000,)) <= value).mean(0), or "
        found = self._average(
            self._known(
                "cdf", lambda d: at_most(d, value), f"{draws}define cdf in the class"
            )
        )
        return found, self._stepped_over(self._by_nodes(self._turn(value))[1])

    @_one_program
    def _probability_between(self, value: Array) -> Array:
        found, at = self._probability(value)[0], self._turn(value)
        densities = self._by_nodes(at)[1]
        log = self._between_nodes(
            at, jnp.log(found), densities, lambda d, y: jnp.log(at_most(d, y))
        )
        return jnp.minimum(jnp.exp(log), 1)

    def _turn(self, value: Array) -> Array:
        """Return the data at whose likely predictors a probability turns."""
        return jnp.floor(value) if self.is_discrete else value

    def _stepped_over(self, densities: Array) -> Array | None:
        """Whether the nodes step over the peak of the likelihood, by data; ``None`` if
        they are all that is known."""
        if not self.dimensions or densities.size == 0 or self._constraints() is None:
            return None
        weights = self._aligned(self.weights, densities)
        return stepped_over(jnp.log(weights) + densities, self.dimensions)

    def _between_nodes(
        self,
        value: Array,
        found: Array,
        densities: Array,
        function: Callable[[Any, Array], Array] | None = None,
    ) -> Array:
        """Return the logarithm of the average of a function of components, by nodes
        near the peak of the likelihood where the mixture's nodes step over it.

        :param value: the data, which determine the peak.
        :param found: the logarithm by the mixture's own nodes.
        :param densities: the log-densities of the data at the nodes.
        :param function: the logarithm of the function of a component and of data; by
            default the log-density.
        """
        known, wrong = self._constraints(), self._stepped_over(densities)
        if known is None or wrong is None:
            return found
        moving, fixed = known
        shape, batch = found.shape, self.batch_shape
        grid = Grid(self.dimensions, self._moving, moving, batch)
        value = jnp.broadcast_to(value, shape + self.event_shape)
        draws = math.prod(shape[: len(shape) - len(batch)])
        weights = self._aligned(self.weights, densities)
        weights = jnp.broadcast_to(weights, densities.shape)
        others = [
            jnp.broadcast_to(x, batch + x.shape[x.ndim - dims :])
            for x, dims in zip(self._fixed, fixed, strict=True)
        ]

        def of_data(function: Callable[[Any, Array], Array]) -> Any:
            return lambda moving, data: function(self._with(moving, data[1:]), data[0])

        averaged = None if function is None else of_data(function)

        def refined(
            value: Array, densities: Array, weights: Array, wrong: Array
        ) -> Array:
            return grid.log_average(
                of_data(log_density), averaged, densities, weights,
                [value, *others], wrong,
            )  # fmt: skip

        def all_of(_: None) -> Array:
            each = (
                value.reshape(draws, *batch, *self.event_shape),
                *(x.reshape(len(x), draws, *batch) for x in (densities, weights)),
                wrong.reshape(draws, *batch),
            )
            axes = (0, 1, 1, 0)
            if draws > 1:
                return jax.vmap(refined, axes)(*each).reshape(shape)
            # Under vmap, a cond computes both of its branches.
            return refined(*map(jnp.squeeze, each, axes)).reshape(shape)

        other = lax.cond(wrong.any(), all_of, lambda _: found, None)
        return jnp.where(wrong & jnp.isfinite(other), other, found)

    def icdf(self, q: Array) -> Array:
        return self._where_needed("_quantile", q)

    @_one_program
    def _quantile(self, q: Array) -> tuple[Array, Array | None]:
        found = self._of_nodes()._quantile_between(q)
        return found, self._stepped_over(self._by_nodes(self._turn(found))[1])

    @_one_program
    def _quantile_between(self, q: Array) -> Array:
        def ends(d: Any) -> Array:
            found = jnp.stack(
                jnp.broadcast_arrays(*map(jnp.asarray, bounds(d.support)))
            )
            return jnp.moveaxis(found, 0, -1)

        each = self._each(ends)
        return quantile(self, q, (each[..., 0].min(0), each[..., 1].max(0)))

    @partial(_one_program, static_argnames="sample_shape")
    def sample(self, key: Array, sample_shape: tuple[int, ...] = ()) -> Array:
        node_key, key = random.split(key)
        shape = sample_shape + self.batch_shape
        if self.weights.ndim == 1:
            # Not Categorical, which draws a random number for every node.
            chosen = random.choice(node_key, len(self.weights), shape, p=self.weights)
        else:
            weights = jnp.log(self.weights)
            chosen = random.categorical(node_key, weights, 0, shape=shape)
        flat = chosen.reshape(-1, *self.batch_shape)
        keys, known = random.split(key, len(flat)), self._constraints()

        def picked(each: tuple[Array, Array]) -> Array:
            key, chosen = each
            # Several data at different nodes may share a parameter.
            chosen = chosen.reshape(1, *chosen.shape, *(1,) * self.event_dim)
            at_nodes = self._each(lambda d: d.sample(key))
            return jnp.take_along_axis(at_nodes, chosen, 0)[0]

        def draw(key: Array, chosen: Array) -> Array:
            if not self.dimensions:
                return self._with(grid.at_nodes(chosen[None])).sample(key)
            # The node only states the member.
            key, node_key = random.split(key)
            dtype = self.weights.dtype
            z = random.normal(node_key, (self.dimensions, *chosen.shape), dtype)
            return self._with(grid.between(z, chosen // grid.size)).sample(key)

        if known is None:
            # One after another: each has an array over all nodes.
            draws = lax.map(picked, (keys, flat))
        else:
            grid = Grid(self.dimensions, self._moving, known[0], self.batch_shape)
            draws = jax.vmap(draw)(keys, flat)
        return draws.reshape(shape + self.event_shape)

    def _constraints(self) -> tuple[list[Any], list[int]] | None:
        """Return the constraint of each varying array, which states its trailing axes
        that are not axes of data, and the number of these axes of each other array;
        ``None`` unless all arrays are known parameters."""
        # Not the leaves of the component, which may have another order.
        leaves = [
            x[0] if v else x for x, v in zip(self.leaves, self.varies, strict=True)
        ]
        given = _parameters(self._of_leaves(leaves), self.batch_shape)
        pairs = list(zip(leaves, self.varies, strict=True))
        moving = [given.get(id(x)) for x, v in pairs if v]
        # Single numbers need not be known.
        fixed: list[Any] = [
            given.get(id(x), None if jnp.ndim(x) else constraints.real)
            for x, v in pairs
            if not v
        ]
        if any(kind is None for kind in (*moving, *fixed)):
            return None
        return moving, [kind.event_dim for kind in fixed]


def uncensored(d: Any) -> Any:
    """Return the distribution of whole durations, from which NumPyro draws censored
    ones, too."""
    return expanded(d.base_dist, d.batch_shape) if isinstance(d, CENSORED) else d


def at_most(d: Any, value: Array) -> Array:
    """Return the probability of at most a value."""
    # Formulas apply inside of a support alone.
    low, high = bounds(d.support)
    inside = _cdf(d, jnp.clip(value, low, high))
    return jnp.where(value < low, 0, jnp.where(value > high, 1, inside))


def _cdf(d: Any, value: Array) -> Array:
    """Return the distribution function of a component."""
    if isinstance(d, CENSORED):
        return _cdf(d.base_dist, value)
    # NumPyro lacks these.
    if isinstance(d, dist.ZeroInflatedProbs):
        return jnp.where(value < 0, 0, d.gate + (1 - d.gate) * _cdf(d.base_dist, value))
    if isinstance(d, dist.GeometricProbs | dist.GeometricLogits):
        return -jnp.expm1((jnp.floor(value) + 1) * jnp.log1p(-d.probs))
    # And these are wrong in float32 where shapes are large.
    if isinstance(d, dist.Poisson):
        return gammaincc(jnp.floor(value) + 1, d.rate)
    if isinstance(d, dist.GammaPoisson):
        shares = 1 / (1 + 1 / d.rate), 1 / (1 + d.rate)
        return betainc(d.concentration, jnp.floor(value) + 1, *shares)
    if isinstance(d, dist.Gamma):
        return 1 - gammaincc(d.concentration, d.rate * value)
    if isinstance(d, dist.Beta):
        return betainc(d.concentration1, d.concentration0, value, 1 - value)
    return d.cdf(value)


def _parameters(fn: Distribution, batch_shape: tuple[int, ...]) -> dict[int, Any]:
    """Return the constraints of the parameters of a distribution and of its base
    distributions, by the identity of the arrays."""
    if fn.batch_shape != batch_shape:
        return {}
    own: dict[str, Any] = {}
    for kind in reversed(type(fn).__mro__):
        constrained = vars(kind).get("arg_constraints", {})
        if isinstance(constrained, dict):
            own |= {k: c for k, c in constrained.items() if _knows(c)}
    found = {id(x): own[name] for name, x in vars(fn).items() if name in own}
    inner = jax.tree.leaves(
        fn, is_leaf=lambda x: isinstance(x, Distribution) and x is not fn
    )
    for each in inner:
        if isinstance(each, Distribution):
            found |= _parameters(each, batch_shape)
    return found


def _knows(constraint: Any) -> bool:
    """Whether a constraint states the number of event dimensions of its values."""
    try:
        return constraint.event_dim is not None
    except NotImplementedError:
        return False
