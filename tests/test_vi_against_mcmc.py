# SPDX-License-Identifier: Apache-2.0
"""Variational fits beside MCMC, and models compared by LOO."""

import jax
import jax.numpy as jnp
import numpy as np
import numpyro
import numpyro.distributions as dist
import pytest
from arviz_base import from_dict
from jax import random
from numpyro import handlers
from numpyro.infer import Predictive
from scipy import stats
from scipy.special import expit

import numpyro_gpaug as gpaug
from numpyro_gpaug import diagnostics
from numpyro_gpaug.diagnostics import vi_against_mcmc
from tests.models import gram


def classifier(X, y=None, *, Z):
    variance = numpyro.sample("variance", dist.LogNormal(0.0, 0.3))
    kernel = gpaug.kernels.Matern52(1.0, variance)
    gp = gpaug.GaussianProcess("f", kernel, inducing=Z)
    with numpyro.plate("data", X.shape[0]):
        numpyro.sample("y", dist.Bernoulli(logits=gp(X)), obs=y)


X = np.linspace(-2, 2, 10, dtype=np.float32)[:, None]
Y = (np.sin(3 * X[:, 0]) > 0).astype(np.int32)


@pytest.fixture(scope="module")
def drawn():
    """Draws from the prior, in the place of MCMC."""
    predictive = Predictive(classifier, num_samples=400)
    draws = jax.jit(lambda key: predictive(key, X, Z=X))(random.key(0))
    return {k: v for k, v in draws.items() if k != "y"}


def statistic(comparison, site, name):
    return comparison["posterior"][site].sel(statistic=name).values


def test_hyperparameters_held_by_condition():
    """They are observed sites that no latent reaches: nothing to predict. The prior
    agrees with its own draws."""
    held = handlers.condition(classifier, {"variance": 1.0})
    q = {"potential": np.zeros(10), "precision": np.eye(10)}
    params = {f"f.v_auto_{k}": jnp.asarray(x, X.dtype) for k, x in q.items()}
    prior = gpaug.Posterior.from_guide(
        held, gpaug.AutoSparseGP(held), params, X, Y, Z=X
    )
    assert prior.observed == ("y",)
    np.testing.assert_allclose(prior.predict_y(X).probs, 0.5, atol=1e-4)
    v = np.random.default_rng(0).normal(size=(1000, 10))
    factor = np.linalg.cholesky(gram(gpaug.kernels.Matern52(), X, X))
    found = vi_against_mcmc(held, prior, {"f": v @ factor.T, "f.v": v}, X, Y, Z=X)
    assert set(found["predictive"].data_vars) == {"y"}
    assert found["predictive"]["y"].min() > 0.93
    assert np.abs(statistic(found, "f", "mean_difference")).max() < 0.15
    np.testing.assert_allclose(statistic(found, "f", "sd_ratio"), 1, atol=0.1)
    assert statistic(found, "f", "wasserstein").max() < 0.2


def test_a_narrow_fit_is_told_by_its_statistics(drawn):
    f = np.asarray(drawn["f"])
    halved = {**drawn, "f": f.mean(0) + 0.5 * (f - f.mean(0)) + 0.3 * f.std(0)}
    found = vi_against_mcmc(classifier, halved, drawn, X, Y, Z=X)
    np.testing.assert_allclose(statistic(found, "f", "sd_ratio"), 0.5, rtol=1e-4)
    difference = statistic(found, "f", "mean_difference")
    np.testing.assert_allclose(difference, 0.3, rtol=1e-3)
    # The same latents give the same predictions, without Monte Carlo error.
    np.testing.assert_allclose(found["predictive"]["y"], 1, rtol=1e-5)


def test_statistics_of_two_normals_by_hand():
    def model(y=None):
        numpyro.sample("w", dist.Normal(jnp.zeros((2, 3)), 1).to_event(2))
        numpyro.sample("y", dist.Normal(0, 1), obs=y)

    rng = np.random.default_rng(0)
    mcmc = 3 + 2 * rng.normal(size=(20_000, 2, 3))
    vi = 4 + 2 * rng.normal(size=(5_000, 2, 3))  # another number of draws
    found = vi_against_mcmc(model, {"w": vi}, {"w": mcmc}, 0.0)
    assert found["posterior"]["w"].shape == (3, 2, 3)
    for name, expected in (("mean_difference", 0.5), ("sd_ratio", 1)):
        np.testing.assert_allclose(statistic(found, "w", name), expected, atol=0.05)
    np.testing.assert_allclose(statistic(found, "w", "wasserstein"), 0.5, atol=0.05)
    assert found["predictive"]["y"].shape == ()
    np.testing.assert_allclose(found["predictive"]["y"], 1, rtol=1e-5)


def bernoulli(f):
    return dist.Bernoulli(logits=f)


def normal(f):
    return dist.Normal(f, 1.0).to_event(1)


def poisson(f):
    return dist.Poisson(jnp.exp(f))


def test_predictive_overlap_by_hand():
    """Draws are at a point, so that both predictive distributions are known."""
    near, far = np.zeros((4, 3)), np.tile([0.0, 1.0, 2.0], (4, 1))
    rates = np.exp(far[0])
    counts = np.arange(60)[:, None]
    shared = np.minimum(stats.poisson.pmf(counts, 1), stats.poisson.pmf(counts, rates))
    cases = [
        (bernoulli, 1 - np.abs(0.5 - expit(far[0])), 1e-5),
        (normal, 2 * stats.norm.cdf(-far[0] / 2), 0.06),
        (poisson, shared.sum(0), 0.06),
    ]
    for likelihood, expected, tolerance in cases:

        def model(y=None, likelihood=likelihood):
            f = numpyro.sample("f", dist.Normal(jnp.zeros(3), 1).to_event(1))
            numpyro.sample("y", likelihood(f), obs=y)

        found = vi_against_mcmc(model, {"f": near}, {"f": far}, np.ones(3, int))
        np.testing.assert_allclose(found["predictive"]["y"], expected, atol=tolerance)
        assert found["predictive"]["y"][0] == pytest.approx(1, abs=1e-5)


def test_a_pseudo_likelihood_predicts_by_normalised_probabilities():
    def model(y=None):
        f = numpyro.sample("f", dist.Normal(jnp.zeros(2), 1).to_event(1))
        numpyro.sample("y", gpaug.BayesianSVM(f), obs=y)

    a, b = np.zeros((3, 2)), np.tile([0.5, -2.0], (3, 1))
    found = vi_against_mcmc(model, {"f": a}, {"f": b}, np.array([1, 0]))
    expected = 1 - np.abs(0.5 - np.asarray(gpaug.BayesianSVM(b[0]).probs))
    np.testing.assert_allclose(found["predictive"]["y"], expected, rtol=1e-5)


def test_residual_sites_of_mcmc_need_no_counterpart():
    whole = gpaug.with_residual(classifier, "site")
    predictive = Predictive(whole, num_samples=30)
    prior = jax.jit(lambda key: predictive(key, X, Z=X[::2]))(random.key(0))
    samples = {k: v for k, v in prior.items() if k != "y"}
    assert "f.eps" in samples
    vi = {k: v for k, v in samples.items() if k != "f.eps"}
    found = vi_against_mcmc(whole, vi, samples, X, Y, Z=X[::2])
    assert "f.eps" not in found["posterior"]
    assert (found["predictive"]["y"] > 0.8).all()


def test_draws_that_do_not_fit_are_refused(drawn):
    with pytest.raises(ValueError, match=r"nothing to compare: .*\['g'\]"):
        vi_against_mcmc(classifier, {"g": np.zeros(3)}, drawn, X, Y, Z=X)
    with pytest.raises(ValueError, match=r"'f' has shape \(9,\).*\(10,\) from MCMC"):
        vi_against_mcmc(classifier, {"f": np.zeros((3, 9))}, drawn, X, Y, Z=X)
    with pytest.raises(ValueError, match="variational draws contain .*'variance'"):
        vi_against_mcmc(classifier, {"f.v": drawn["f.v"]}, drawn, X, Y, Z=X)


def test_observations_that_cannot_be_left_out_are_counted():
    """Ratios ``u^-k`` of uniform draws have a Pareto tail of shape k."""
    u = np.random.default_rng(0).uniform(size=(1, 1000, 4))

    def tree(k, level=0.0):
        terms = level + np.log(u) * k
        groups = {"posterior": {"f": u}, "log_likelihood": {"y": terms}}
        return from_dict({**groups, "observed_data": {"y": np.zeros(4)}})

    light, heavy = tree(0.2), tree(np.array([0.2, 1.5, 0.2, 1.5]))
    table = diagnostics.compare({"heavy": heavy, "light": light})
    assert dict(table["bad_k"]) == {"light": 0, "heavy": 2}
    with pytest.warns(UserWarning, match="of 'worst', is not .* 4 of 4 observations"):
        diagnostics.compare({"worst": tree(1.5, 9.0), "light": light})
    with pytest.warns(UserWarning, match="shape parameter of Pareto"):
        diagnostics.loo(heavy)


def test_only_the_same_observations_are_compared():
    groups = {"log_likelihood": {"y": np.zeros((1, 4, 3))}}
    tree = from_dict({**groups, "observed_data": {"y": np.zeros(3)}})
    other = tree.copy(deep=True)
    other["observed_data"]["y"].values[0] += 1
    with pytest.raises(ValueError, match="'a' observed .* and 'b' one of shape"):
        diagnostics.compare({"a": tree, "b": other})
    with pytest.raises(ValueError, match="two models or more"):
        diagnostics.compare({"a": tree})
