# SPDX-License-Identifier: Apache-2.0
"""Convergence of a trace, probability integral transforms, reweighted estimates."""

import re

import jax
import jax.numpy as jnp
import numpy as np
import numpyro
import numpyro.distributions as dist
import pytest
from arviz_base import from_dict
from jax import random
from scipy import stats

import numpyro_gpaug as gpaug
from numpyro_gpaug import diagnostics
from numpyro_gpaug.likelihoods.expectations import predictive
from tests.models import gram
from tests.test_diagnostics import NOISE, data, draws, gaussian, kernel, wide_tree

KEY = random.key(0)

# -- convergence ----------------------------------------------------------------------


def decay(time: float, steps: int = 200) -> np.ndarray:
    return 100 + 50 * np.exp(-np.arange(steps) / time)


@pytest.mark.parametrize(
    ("losses", "verdict", "advice"),
    [
        (decay(10), "converged", "none: the bound has stopped"),
        (decay(100), "still improving", "run more steps: the bound rose by"),
        (decay(10)[::-1], "getting worse", "lower the step size.*fell by"),
        ([3.0, 2.0, 1.0], "too short", "run at least 5 steps, not 3"),
        ([1.0], "too short", "5 steps, not 1"),
        (np.r_[decay(10), np.inf], "not finite", r"losses\[200\] of 201 is inf"),
    ],
)
def test_verdicts(losses, verdict, advice):
    found = diagnostics.convergence(losses)
    assert found.verdict == verdict
    assert found.converged == (verdict == "converged")
    assert re.search(advice, found.suggestion)


def test_numbers_of_a_trend_and_of_noise():
    trend = diagnostics.convergence(500 - np.arange(100.0))
    assert trend.window == 10
    assert (trend.change, trend.elbo) == (10, -405.5)
    assert trend.relative_change == pytest.approx(10 / 405.5)
    assert trend.error < 1e-12
    noise = 5 * np.random.default_rng(0).normal(size=20_000)
    found = diagnostics.convergence(1000 + noise)
    assert found.error == pytest.approx(5 * np.sqrt(2 / 2000), rel=0.1)


def test_noise_alone_is_no_trend_and_a_trend_in_noise_is_found():
    rng = np.random.default_rng(1)
    flat = [diagnostics.convergence(10 + rng.normal(size=300)) for _ in range(200)]
    assert np.mean([f.converged for f in flat]) > 0.97
    assert "would not show in the noise" in flat[0].suggestion
    slope = np.linspace(20, 0, 300)
    rising = [
        diagnostics.convergence(10 + slope + rng.normal(size=300)).verdict
        for _ in range(50)
    ]
    assert set(rising) == {"still improving"}


def test_nan_is_placed_and_bad_shapes_refused():
    losses = decay(10)
    losses[17:] = np.nan
    found = diagnostics.convergence(losses)
    assert (found.verdict, found.first_bad) == ("not finite", 17)
    assert np.isnan(found.elbo)
    for bad in (np.zeros((2, 3)), [], 1.0):
        with pytest.raises(ValueError, match="expected one loss per step"):
            diagnostics.convergence(bad)


# -- probability integral transforms --------------------------------------------------


RIGHT = dist.RightCensoredDistribution


def uniform(values) -> bool:
    return stats.kstest(values, "uniform").pvalue > 0.001


def test_pit_of_real_observations_is_the_cdf():
    y = np.array([-1.0, 0.0, 2.0])
    for d in (dist.Normal(jnp.zeros(3), 2.0), dist.Normal(0.0, 2.0).expand([3])):
        found = diagnostics.pit(d, y, KEY)
        np.testing.assert_allclose(found, stats.norm.cdf(y, 0, 2), rtol=1e-5)


def test_pit_without_a_cdf_ranks_draws():
    class NoCdf(dist.Normal):
        def cdf(self, value):
            raise NotImplementedError

    y = np.linspace(-2, 2, 9)
    found = diagnostics.pit(NoCdf(jnp.zeros(9), 1.0), y, KEY)
    np.testing.assert_allclose(found, stats.norm.cdf(y), atol=0.05)


@pytest.mark.parametrize("boolean", [False, True])
def test_pit_of_labels_is_randomised(boolean):
    p = np.full(2000, 0.3)
    y = np.random.default_rng(0).uniform(size=2000) < p
    d = dist.Bernoulli(probs=jnp.asarray(p))
    found = diagnostics.pit(d, y if boolean else y.astype(int), KEY)
    assert (found[~y] <= 0.7 + 1e-6).all()
    assert (found[y] >= 0.7 - 1e-6).all()
    assert uniform(found)
    assert not uniform(diagnostics.pit(d, ~y, KEY))


@pytest.mark.parametrize("rate", [4.0, 5e4])
def test_pit_of_counts_lies_between_cumulative_probabilities(rate):
    y = np.random.default_rng(0).poisson(rate, 1000)
    found = diagnostics.pit(dist.Poisson(jnp.full(1000, rate)), y, KEY)
    below, upto = stats.poisson.cdf(y - 1, rate), stats.poisson.cdf(y, rate)
    assert ((below - 1e-4 <= found) & (found <= upto + 1e-4)).all()
    assert uniform(found)


def test_pit_of_a_mixture_of_counts():
    """The predictive of the package, whose nodes follow the count."""
    half, one = (np.full(400, x, "float32") for x in (0.5, 1))
    moments = {"logits": half}, {"logits": one}

    @jax.jit
    def drawn():
        predicted = predictive(gpaug.LogisticPoisson(jnp.zeros(400), 8.0), *moments)
        return predicted, predicted.sample(KEY)

    predicted, y = drawn()
    assert uniform(diagnostics.pit(predicted, y, random.key(1)))
    assert not uniform(diagnostics.pit(predicted, y + 1, random.key(1)))


@pytest.mark.parametrize("side", [dist.LeftCensoredDistribution, RIGHT])
@pytest.mark.parametrize("counts", [False, True])
def test_pit_of_censored_observations_is_uniform(side, counts):
    rng = np.random.default_rng(0)
    mean = jnp.full(2000, 5.0)
    whole = dist.Poisson(mean) if counts else dist.Exponential(1 / mean)
    y = np.asarray(whole.sample(KEY), float)
    limit = rng.integers(1, 12, 2000)
    # A count at its lower limit is cut off, and above its upper limit.
    cut = y > limit if side is RIGHT else y <= limit
    found = side(whole, cut)
    assert uniform(diagnostics.pit(found, np.where(cut, limit, y), random.key(1)))


def test_pit_of_draws_is_uniform_with_ties():
    rng = np.random.default_rng(0)
    for sample in (rng.normal, lambda size: rng.poisson(1.0, size)):
        everything = sample(size=(10, 3000))
        assert uniform(diagnostics.pit(everything[1:], everything[0], KEY))
    found = diagnostics.pit(np.arange(9.0)[:, None], np.array([4.5]), KEY)
    assert 0.5 <= found[0] <= 0.6


def test_pit_refuses_shapes_that_do_not_match():
    with pytest.raises(ValueError, match=r"batch shape \(2,\) and y has shape \(3,\)"):
        diagnostics.pit(dist.Normal(jnp.zeros(2), 1.0), np.zeros(3), KEY)
    with pytest.raises(ValueError, match=r"one draw of shape \(3,\)"):
        diagnostics.pit(np.zeros((5, 3)), np.zeros(5), KEY)
    with pytest.raises(ValueError, match=r"an observation has shape \(2,\)"):
        diagnostics.pit(dist.Dirichlet(jnp.ones((3, 2))), np.zeros(3), KEY)


# -- reweighted estimates -------------------------------------------------------------


def test_estimates_are_weighted_means():
    rng = np.random.default_rng(0)
    z = rng.normal(size=(1, 500))
    loglik = rng.normal(size=(1, 500, 3))
    tree = from_dict(
        {
            "posterior": {"z": z},
            "log_likelihood": {"y": loglik},
            "sample_stats": {"log_p": -(z**2) / 2 / 0.8**2, "log_q": -(z**2) / 2},
        }
    )
    psis = diagnostics.psis_khat(tree)
    w = np.exp(psis.log_weights)
    found = diagnostics.psis_estimates(tree)
    assert found.attrs["verdict"] == psis.verdict == "good"
    assert found.attrs["effective_draws"] == pytest.approx(1 / (w**2).sum())
    assert list(found.children) == ["posterior", "likelihood"]
    mean = (w * z[0]).sum()
    expected = [z.mean(), z.std(), mean, np.sqrt((w * (z[0] - mean) ** 2).sum())]
    np.testing.assert_allclose(found["posterior"]["z"].values, expected)
    probability = found["likelihood"]["y"].sel(statistic="psis_mean").values
    np.testing.assert_allclose(probability, w @ np.exp(loglik[0]))


def test_verdicts_on_khat():
    verdicts = [diagnostics.Psis(k, np.zeros(1)).verdict for k in (0.4, 0.6, 0.8)]
    assert verdicts == ["good", "usable", "unreliable"]


def test_a_guide_that_is_too_wide_is_repaired(x64):
    """The guide is 10% too wide in every direction; the posterior is known."""
    X, _, _ = data()
    tree = wide_tree()
    K = gram(kernel(), X, X)
    solved = np.linalg.solve(K + NOISE**2 * np.eye(20), K)
    truth = np.sqrt(np.diag(K - K @ solved))
    sd = diagnostics.psis_estimates(tree)["posterior"]["f"]
    plain, corrected = (sd.sel(statistic=s).values for s in ("sd", "psis_sd"))
    np.testing.assert_allclose(plain / truth, 1.1, atol=0.03)
    np.testing.assert_allclose(corrected / truth, 1, atol=0.06)
    assert abs((corrected / truth).mean() - 1) < 0.02


# -- pseudo-likelihoods ---------------------------------------------------------------


def test_a_pseudo_likelihood_has_its_own_density_and_no_loo(x64):
    X, y, labels = data()
    Z = X[::4]

    def svm(X, y=None):
        gp = gpaug.GaussianProcess("f", kernel(), inducing=Z)
        with numpyro.plate("data", X.shape[0]):
            numpyro.sample("y", gpaug.BayesianSVM(gp(X)), obs=y)

    params, _ = gaussian(X, y, Z)
    tree = draws(svm, params, X, labels, num_samples=30)
    v = tree["posterior"]["f.v"].values[0]
    factor = np.linalg.cholesky(gram(kernel(), Z, Z))
    A = np.linalg.solve(factor, gram(kernel(), Z, X))
    r = np.maximum(1 - np.square(A).sum(0), 0)
    z = np.linspace(-8, 8, 4001)
    f = (v @ A)[..., None] + np.sqrt(r)[:, None] * z
    margin = np.maximum(1 - np.where(labels, 1, -1)[:, None] * f, 0)
    w = stats.norm.pdf(z) * (z[1] - z[0])
    expected = np.log(np.exp(-2 * margin) @ w)
    found = tree["pseudo_log_likelihood"]["y"].values[0]
    np.testing.assert_allclose(found, expected, atol=0.02)
    total = stats.norm.logpdf(v).sum(1) + found.sum(1)
    np.testing.assert_allclose(tree["sample_stats"]["log_p"].values[0], total)
    assert "log_likelihood" not in tree.children
    for site in (None, "y"):
        with pytest.raises(ValueError, match="pseudo-likelihood, which is not normal"):
            diagnostics.loo(tree, site)
    groups = list(diagnostics.psis_estimates(tree).children)
    assert groups == ["posterior", "posterior_predictive"]
