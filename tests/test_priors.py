# SPDX-License-Identifier: Apache-2.0
"""Priors stated by a tail probability, draws from priors, and their influence."""

import jax
import jax.numpy as jnp
import numpy as np
import numpyro
import numpyro.distributions as dist
import pytest
from scipy import integrate, stats

import numpyro_gpaug as gpaug
from numpyro_gpaug import diagnostics
from numpyro_gpaug.diagnostics._arviz import tree_of
from numpyro_gpaug.diagnostics._run import log_priors, top_level
from numpyro_gpaug.model.arguments import Arguments


@pytest.mark.parametrize(("upper", "prob"), [(1.0, 0.05), (30.0, 0.01), (0.2, 0.5)])
def test_a_scale_exceeds_its_bound_with_the_stated_probability(upper, prob) -> None:
    prior = gpaug.PCScale(upper, prob)
    np.testing.assert_allclose(1 - prior.cdf(upper), prob, rtol=1e-5)


@pytest.mark.parametrize("dim", [1, 2, 3])
def test_the_density_of_a_range_is_that_of_fuglstad(x64, dim) -> None:
    lower, prob = 3.0, 0.05
    prior = gpaug.PCRange(lower, prob, dim=dim)
    rate = -np.log(prob) * lower ** (dim / 2)
    x = np.array([0.05, 0.5, 3.0, 40.0, 1e6])
    expected = (
        np.log(dim / 2 * rate) - (dim / 2 + 1) * np.log(x) - rate * x ** (-dim / 2)
    )
    density = jax.jit(prior.log_prob)
    np.testing.assert_allclose(density(x), expected, rtol=1e-10)
    below, _ = integrate.quad(lambda r: np.exp(density(r)), 0, lower)
    np.testing.assert_allclose(below, prob, rtol=1e-6)
    draws = prior.sample(jax.random.key(0), (2000,))
    assert stats.kstest(draws, lambda r: np.exp(-rate * r ** (-dim / 2))).pvalue > 1e-3


def test_a_range_is_finite_in_single_precision() -> None:
    def density(x):
        return gpaug.PCRange(1.0).log_prob(x)

    x = jnp.array([1e-6, 1e-2, 1.0, 1e6, 1e12])
    both = jax.jit(lambda x: (density(x), jax.vmap(jax.grad(density))(x)))(x)
    assert np.isfinite(both).all()


@pytest.mark.parametrize(
    ("call", "message"),
    [
        (lambda: gpaug.PCScale(0.0), "upper must be positive"),
        (lambda: gpaug.PCScale(1.0, 1.0), "prob must be between 0 and 1"),
        (lambda: gpaug.PCRange(-1.0), "lower must be positive"),
        (lambda: gpaug.PCRange(1.0, 0.0), "prob must be between 0 and 1"),
        (lambda: gpaug.PCRange(1.0, dim=4), "dim must be 1, 2 or 3"),
    ],
)
def test_bounds_that_mean_nothing(call, message) -> None:
    with pytest.raises(ValueError, match=message):
        call()


GROUP = np.arange(24) % 4
COUNT = np.random.default_rng(0).poisson(4.0, 24)


def counts(group, y=None, wide=2.0):
    scale = numpyro.sample("scale", gpaug.PCScale(1.0))
    level = numpyro.sample("level", dist.Normal(0, wide))
    with numpyro.plate("groups", 4):
        effect = numpyro.sample("effect", dist.Normal(0, scale))
    with numpyro.plate("data", len(group)):
        numpyro.sample("y", dist.Poisson(jnp.exp(level + effect[group])), obs=y)


@pytest.fixture(scope="module")
def integrated():
    nested = gpaug.NestedVI(counts, num_points=64, progress_bar=False)
    nested.run(jax.random.key(0), GROUP, COUNT)
    return nested


@pytest.fixture(scope="module")
def tree(integrated):
    return diagnostics.to_datatree(jax.random.key(1), integrated)


def test_trees_have_the_prior_of_what_depends_on_no_other_latent(tree) -> None:
    assert set(tree["log_prior"].data_vars) == {"scale", "level"}
    level, scale = (tree["posterior"][k].values for k in ("level", "scale"))
    expected = stats.norm(0, 2).logpdf(level)
    np.testing.assert_allclose(tree["log_prior"]["level"], expected, atol=1e-4)
    expected = stats.expon(scale=-1 / np.log(0.05)).logpdf(scale)
    np.testing.assert_allclose(tree["log_prior"]["scale"], expected, atol=1e-4)
    prior = tree["prior"]
    assert stats.kstest(prior["level"].values.ravel() / 2, "norm").pvalue > 1e-3
    assert prior["effect"].shape == (1, 1000, 4)
    # Prior predictive draws vary far more than the observations.
    assert tree["prior_predictive"]["y"].values.std() > 5 * COUNT.std()


def test_a_guide_has_the_prior_of_what_it_does_not_fix() -> None:
    def model(x, y=None):
        noise = numpyro.sample("noise", dist.LogNormal(0, 1))
        everywhere = dist.ImproperUniform(dist.constraints.real, (), ())
        shift = numpyro.sample("shift", everywhere)
        weight = numpyro.sample("weight", dist.Normal(0, 3))
        with numpyro.plate("data", len(x)):
            numpyro.sample("y", dist.Normal(shift + weight * x, noise), obs=y)

    x = np.linspace(0, 1, 8)
    guide = gpaug.AutoLatentGaussian(model)
    svi = gpaug.ConjugateSVI(model, guide)
    with pytest.warns(UserWarning, match="'shift' gets a point .* take it as known"):
        params = svi.get_params(svi.init(jax.random.key(0), x, x**2))
    tree = diagnostics.to_datatree(
        jax.random.key(1), model, guide, params, x, x**2, num_samples=30
    )
    assert set(tree["log_prior"].data_vars) == {"weight"}
    draws = tree["posterior"]["weight"].values
    expected = stats.norm(0, 3).logpdf(draws)
    np.testing.assert_allclose(tree["log_prior"]["weight"], expected, atol=1e-4)
    assert "prior" not in tree.children  # no draws from an improper prior


def test_weighted_data_may_be_read_twice() -> None:
    def model(weight):
        level = numpyro.sample("level", dist.Normal(0, 1))
        with numpyro.plate("data", 3), numpyro.handlers.scale(scale=weight):
            numpyro.sample("y", dist.Normal(level, 1), obs=jnp.zeros(3))

    given = Arguments.split((np.arange(1.0, 4.0),), {})
    assert top_level(model, given) == top_level(model, given) == ("level",)


def test_numbers_behind_a_process_have_no_prior_of_the_user() -> None:
    def model(X):
        lengthscale = numpyro.sample("lengthscale", dist.LogNormal(0, 1))
        kernel = gpaug.kernels.Matern32(lengthscale)
        gpaug.GaussianProcess("f", kernel, inducing=X)(X)

    X = jnp.linspace(0, 1, 3)[:, None]
    names = top_level(model, Arguments.split((X,), {}))
    assert set(names) == {"lengthscale", "f.v"}

    def priors(X):
        seeded = numpyro.handlers.seed(model, 0)
        return log_priors(numpyro.handlers.trace(seeded).get_trace(X), names)

    assert jax.eval_shape(priors, X).keys() == {"lengthscale"}


def test_a_narrow_prior_matters_and_a_wide_one_does_not(integrated) -> None:
    wide = diagnostics.sensitivity(integrated)
    assert list(wide.index) == ["level", "scale"]
    narrow = gpaug.NestedVI(counts, num_points=64, progress_bar=False)
    narrow.run(jax.random.key(0), GROUP, COUNT, wide=0.1)
    found = diagnostics.sensitivity(narrow, ["level"])
    # By 64 points, over four keys, 2.0 to 3.6 times as large.
    assert found.loc["level", "prior"] > 1.5 * wide.loc["level", "prior"]
    assert "prior" in found.loc["level", "diagnosis"]


def test_a_tree_without_priors_has_no_sensitivity(tree) -> None:
    with pytest.raises(ValueError, match="no group 'log_prior'"):
        diagnostics.sensitivity(tree.drop_nodes("log_prior"))


def test_entries_that_do_not_vary_have_no_sensitivity() -> None:
    rng = np.random.default_rng(0)
    draws = rng.normal(size=(4, 100))
    both = np.stack([np.ones_like(draws), draws], -1)
    tree = tree_of(
        {
            "posterior": {"factor": both},
            "log_prior": {"factor": -0.5 * draws**2},
            "log_likelihood": {"y": draws[..., None] * np.ones(3)},
            "observed_data": {"y": np.zeros(3)},
        }
    )
    assert list(diagnostics.sensitivity(tree).index) == ["factor[1]"]
