# SPDX-License-Identifier: Apache-2.0
"""Mixtures over nodes of the parameters of a distribution."""

from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import numpyro.distributions as dist
import pytest
from scipy import special, stats

from numpyro_gpaug._numpyro import Ordered
from numpyro_gpaug.distributions._grid import Grid
from numpyro_gpaug.distributions.predictor_mixture import PredictorMixture
from numpyro_gpaug.math.expectation import nodes
from tests.conftest import slow

DISTRIBUTIONS: dict[str, Callable[[Any], dist.Distribution]] = {
    # A mixture by a gamma distribution.
    "negative binomial": lambda m: dist.NegativeBinomial2(jnp.exp(m), 3.0),
    "beta-binomial": lambda m: dist.BetaBinomial(jnp.exp(m), 2.0, 5),
    # As many cutpoints as data, by chance; they are shared by all data.
    "ordinal": lambda m: dist.OrderedLogistic(m, jnp.linspace(-1, 1, 4)),
    "zero-inflated": lambda m: dist.ZeroInflatedPoisson(0.2, rate=jnp.exp(m)),
    # One scale for all data, whose shape does not show it.
    "truncated": lambda m: dist.TruncatedNormal(m, 0.5, low=0.0, high=8.0),
    # Draws are whole durations.
    "censored": lambda m: dist.RightCensoredDistribution(
        dist.LogNormal(m, 0.5), jnp.arange(4) % 2
    ),
}


SLOW = {"negative binomial", "beta-binomial", "zero-inflated", "truncated"}


@pytest.mark.parametrize(
    "name",
    [slow(n) if n in SLOW else n for n in DISTRIBUTIONS],
)
def test_draws_follow_the_probabilities(name: str) -> None:
    nodes = 6
    at = 0.7 * np.random.default_rng(0).normal(size=(nodes, 4)).astype("float32")
    leaves, treedef = jax.tree.flatten(jax.jit(jax.vmap(DISTRIBUTIONS[name]))(at))
    weights = special.softmax(np.arange(nodes, dtype="float32") / 3)
    varies = (True,) * len(leaves)
    mixture = PredictorMixture(tuple(leaves), weights, treedef, varies, (4,), ())
    draws, *moments = jax.jit(
        lambda key: (mixture.sample(key, (20_000,)), mixture.mean, mixture.variance)
    )(jax.random.key(1))
    draws, (mean, variance) = np.asarray(draws, float), map(np.asarray, moments)
    assert draws.shape == (20_000, 4)
    # NumPyro has no mean of classes.
    if name != "ordinal":
        assert (np.abs(draws.mean(0) - mean) < 4 * np.sqrt(variance / 20_000)).all()
        np.testing.assert_allclose(draws.var(0), variance, rtol=0.1)
    edges = np.arange(9.0)[:, None]
    if mixture.is_discrete:
        counts = np.tile(edges[:4].astype(int), 4)
        expected = np.exp(jax.jit(jax.vmap(mixture.log_prob))(counts))
        found = (draws == edges[:4, None]).mean(1)
    else:
        expected = jax.jit(jax.vmap(mixture.cdf))(np.tile(edges[1:4], 4))
        found = (draws <= edges[1:4, None]).mean(1)
    # Four standard errors.
    np.testing.assert_allclose(found, expected, atol=4 * np.sqrt(0.25 / 20_000))
    # Every datum draws its own node: neighbours are independent.
    assert np.abs(np.corrcoef(draws.T) - np.eye(4)).max() < 0.035


def test_memory_of_draws_does_not_grow_with_nodes_and_draws() -> None:
    # The exponent in its transformation is no parameter that is known.
    mixture = over_nodes(lambda z: dist.InverseGamma(6.0, jnp.exp(z[0])), 1)
    assert mixture._constraints() is None
    number = 10_000
    program = jax.jit(lambda key: mixture.sample(key, (number,)))
    compiled = program.lower(jax.random.key(0)).compile()
    every_draw_at_every_node = number * 3 * len(mixture.weights) * 4
    assert compiled.memory_analysis().temp_size_in_bytes < every_draw_at_every_node / 4
    draws, mean = compiled(jax.random.key(0)), np.exp(0.5) / 5
    np.testing.assert_allclose(draws.mean(0), mean, rtol=0.05)


def over_nodes(of: Callable[[Any], dist.Distribution], dimensions: int) -> Any:
    """Return a mixture for three data."""
    x, weights = nodes(dimensions, jnp.zeros(0).dtype)
    each = jax.vmap(lambda z: of([*jnp.broadcast_to(z[:, None], (dimensions, 3))]))
    leaves = jax.tree.leaves(jax.jit(lambda x: Ordered(each(x)))(x))
    component = jax.eval_shape(of, jnp.zeros((dimensions, 3)))
    varies = tuple(jnp.ndim(leaf) > 0 for leaf in leaves)
    return PredictorMixture(
        tuple(leaves), weights, jax.tree.structure(Ordered(component)), varies,
        (3,), (), dimensions,
    )  # fmt: skip


# By number of predictors; their standard deviation is one.
NARROW: dict[int, Callable[[Any], dist.Distribution]] = {
    1: lambda z: dist.Poisson(jnp.exp(5 + z[0])),
    # Its arrays have another order than those of the mixture.
    2: lambda z: dist.BetaProportion(jax.nn.sigmoid(z[0]), jnp.exp(6 + 0.3 * z[1])),
}


@pytest.mark.parametrize("dimensions", [1, slow(2)])
def test_likelihoods_that_are_narrower_than_the_distance_of_nodes(
    dimensions: int,
) -> None:
    def of(z: Any) -> dist.Distribution:
        z = jnp.stack(jnp.broadcast_arrays(*z))
        return NARROW[dimensions](z)

    mixture = over_nodes(of, dimensions)
    y = jnp.array([40, 150, 1200]) if dimensions == 1 else jnp.array([0.1, 0.6, 0.8])
    fine = np.linspace(-5, 5, 2001 if dimensions == 1 else 401)
    z = np.stack([x.ravel() for x in np.meshgrid(*[fine] * dimensions)])
    log_weights = special.log_softmax(-0.5 * np.square(z).sum(0))[:, None]
    each = jax.jit(lambda z: of(z[..., None]).log_prob(y))(z)
    expected = special.logsumexp(log_weights + each, 0)
    np.testing.assert_allclose(mixture.log_prob(y), expected, atol=2e-3)
    if dimensions == 2:
        return
    each = jax.jit(lambda z: of(z[..., None]).cdf(y))(z)
    below = (np.exp(log_weights) * each).sum(0)
    np.testing.assert_allclose(mixture.cdf(y), below, atol=2e-3)
    draws = np.asarray(mixture.sample(jax.random.key(0), (2000,)))
    np.testing.assert_allclose((draws <= y).mean(0), below, atol=0.04)
    # Draws at the nodes alone are close to a few numbers, in logarithms .35 apart.
    middle = np.sort(np.log(draws[:, 1]))[100:-100]
    assert np.diff(middle).max() < 0.1


def test_flags_and_numbers_of_trials_have_no_values_in_between() -> None:
    censored = jnp.array([True, False, False])

    def of(z: Any) -> dist.Distribution:
        return dist.RightCensoredDistribution(dist.Normal(z[0], 0.1), censored)

    mixture, y = over_nodes(of, 1), jnp.array([0.5, 0.5, -1.2])
    sum_ = stats.norm(0, np.sqrt(1.01))
    expected = np.where(censored, sum_.logsf(y), sum_.logpdf(y))
    np.testing.assert_allclose(mixture.log_prob(y), expected, atol=2e-3)
    draws = mixture.sample(jax.random.key(0), (2000,))
    np.testing.assert_allclose(draws.std(0), np.sqrt(1.01), atol=0.07)


def test_peaks_are_sought_only_where_nodes_step_over_them(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    def sought(*_: Any) -> None:
        raise AssertionError

    monkeypatch.setattr(Grid, "log_average", sought)
    mixture = over_nodes(lambda z: dist.Poisson(jnp.exp(0.4 * z[0])), 1)
    y = jnp.arange(3)
    below = mixture.cdf(y)
    quantiles = mixture.icdf(below - 1e-3)
    assert (quantiles == y).all()
    assert not jnp.signbit(quantiles).any()
    assert jnp.isfinite(mixture.log_prob(y)).all()
    pairs = over_nodes(lambda z: dist.Normal(z[0], 3 * jnp.exp(0.2 * z[1])), 2)
    assert jnp.isfinite(pairs.log_prob(jnp.zeros(3))).all()
    # In a shape of its own, because programs are shared with other tests.
    with pytest.raises(AssertionError):
        mixture.log_prob(jnp.array([[30], [40]]))


def test_members_of_float32_are_refined_in_float64(x64: None) -> None:
    mixture = over_nodes(lambda z: dist.Normal(z[0], 0.1), 1)
    mixture.weights = mixture.weights.astype("float32")
    assert jnp.isfinite(mixture.log_prob(jnp.zeros(3))).all()


class Silent(dist.Distribution):
    """A user's distribution, with the required methods only."""

    support = dist.constraints.real
    arg_constraints: dict[str, Any] = {"loc": dist.constraints.real}

    def __init__(self, loc: Any, *, validate_args: bool | None = None) -> None:
        self.loc = loc
        super().__init__(jnp.shape(loc), validate_args=validate_args)

    def sample(self, key: Any, sample_shape: tuple[int, ...] = ()) -> Any:
        return jnp.broadcast_to(self.loc, sample_shape + self.batch_shape)


@pytest.mark.parametrize("name", ["mean", "variance"])
def test_moments_that_a_distribution_does_not_know(name: str) -> None:
    treedef = jax.tree.structure(Silent(jnp.zeros(2)))
    leaves = (jnp.zeros((3, 2)),)
    mixture = PredictorMixture(leaves, jnp.ones(3) / 3, treedef, (True,), (2,), ())
    with pytest.raises(NotImplementedError, match="no mean: compute .*draws"):
        getattr(mixture, name)


def test_angles_have_circular_moments() -> None:
    def of(z: Any) -> dist.Distribution:
        return dist.VonMises(3 + 0.6 * z[0], 4.0)

    mixture = over_nodes(of, 1)
    points = np.exp(1j * np.asarray(mixture.sample(jax.random.key(0), (20_000,))))
    resultant = points.mean(0)
    np.testing.assert_allclose(mixture.mean, np.angle(resultant), atol=0.03)
    np.testing.assert_allclose(mixture.variance, 1 - abs(resultant), atol=0.01)


def test_weights_that_differ_between_data() -> None:
    loc, weights = (
        np.arange(6, dtype="float32").reshape(2, 3),
        np.array([[0.2, 0.5, 1], [0.8, 0.5, 0]], "float32"),
    )
    leaves, treedef = jax.tree.flatten(dist.Normal(loc[0], 1.0))
    varies = tuple(jnp.shape(x) == (3,) for x in leaves)
    given = tuple(loc if v else x for x, v in zip(leaves, varies, strict=True))
    mixture = PredictorMixture(given, weights, treedef, varies, (3,), ())
    one = [
        PredictorMixture(given, w, treedef, varies, (3,), ()) for w in weights.T
    ]  # every datum has its own weights
    y = jnp.linspace(-1, 2, 12).reshape(4, 3)
    for name in ("log_prob", "cdf"):
        each = [np.asarray(getattr(m, name)(y))[:, i] for i, m in enumerate(one)]
        each = np.stack(each, 1)
        np.testing.assert_allclose(getattr(mixture, name)(y), each, rtol=1e-5)
    for name in ("mean", "variance"):
        each = [np.asarray(getattr(m, name))[i] for i, m in enumerate(one)]
        np.testing.assert_allclose(getattr(mixture, name), each, rtol=1e-5)
    draws = mixture.sample(jax.random.key(0), (4000,))
    np.testing.assert_allclose(draws.mean(0), mixture.mean, atol=0.1)


def test_nodes_without_a_moment_are_left_out_if_they_weigh_nothing() -> None:
    """NumPyro's formulas for a normal are 0/0 where next to nothing is not cut off."""

    def mixture(last: float) -> PredictorMixture:
        at = jnp.array([[1.0], [-30.0]])
        component = jax.vmap(lambda m: dist.TruncatedNormal(m, 0.5, low=0.0))(at)
        leaves, treedef = jax.tree.flatten(component)
        weights = jnp.array([1 - last, last])
        return PredictorMixture(
            tuple(leaves), weights, treedef, (True,) * len(leaves), (1,), ()
        )

    alone = stats.truncnorm(-2, np.inf, 1.0, 0.5)
    found, known = mixture(1e-6), jnp.array([0.7])
    np.testing.assert_allclose(found.mean, alone.mean(), rtol=1e-4)
    np.testing.assert_allclose(found.variance, alone.var(), rtol=1e-3)
    expected = alone.logpdf(known)
    np.testing.assert_allclose(found.log_prob(known), expected, rtol=1e-4)
    assert not np.isfinite(mixture(0.1).log_prob(known)).any()


def test_components_that_need_numbers() -> None:
    """A multinomial takes its largest count out of the array, in no program."""
    probs = jnp.array([[[0.2, 0.8], [0.5, 0.5]], [[0.3, 0.7], [1.0, 0.0]]])
    counts = jnp.array([3, 4])
    leaves, tree = jax.tree.flatten(dist.MultinomialProbs(probs[0], counts))
    varies = tuple(x.ndim == 2 for x in leaves)
    given = tuple(probs if v else x for v, x in zip(varies, leaves, strict=True))
    mixture = PredictorMixture(given, jnp.array([0.0, 1.0]), tree, varies, (2,), (2,))
    drawn = mixture.sample(jax.random.key(0), (3,))
    np.testing.assert_array_equal(drawn.sum(-1), np.broadcast_to(counts, (3, 2)))
    np.testing.assert_array_equal(drawn[:, 1, 1], 0)
