# SPDX-License-Identifier: Apache-2.0
"""Predictions with hyperparameters averaged over: against sums over grids where the
latents are Gaussian given them, weighted draws where they are not, and NUTS."""

import jax
import jax.numpy as jnp
import numpy as np
import numpyro
import numpyro.distributions as dist
import pytest
from numpyro.infer import Predictive
from scipy import special, stats

import numpyro_gpaug as gpaug
from numpyro_gpaug.infer.nested.weighted import stratified
from tests.test_nested import (
    COUNTS,
    GROUP,
    REAL,
    G,
    counts_on_a_grid,
    grid,
    nested,
    noisy,
    poisson,
)

KNOWN = np.stack([COUNTS, GROUP])
NEW = np.array([0, 3, G])  # two groups of the fit, and a new one


@pytest.fixture(scope="module")
def of_normal():
    return nested(noisy, GROUP, REAL, num_points=256)


@pytest.fixture(scope="module")
def of_counts():
    return nested(poisson, GROUP, COUNTS, num_points=1024)


def exact_mixture():
    """Weights of the hyperparameters over a grid, and mean, covariance and noise of the
    groups at each."""
    values, logs, _ = grid()
    tau, sigma = values["tau"].astype(float), values["sigma"].astype(float)
    return special.softmax(logs), *conditioned(tau, sigma), sigma


def conditioned(tau, sigma):
    """Mean and covariance of the groups given hyperparameters."""
    prior = 4 + tau[:, None, None] ** 2 * np.eye(G + 1)
    counts = np.bincount(GROUP, minlength=G + 1)
    seen = np.diag(counts) / sigma[:, None, None] ** 2
    cover = np.linalg.inv(np.linalg.inv(prior) + seen)
    sums = np.bincount(GROUP, REAL, minlength=G + 1)
    mean = cover @ sums / sigma[:, None] ** 2
    return mean, cover


def test_normal_models_are_predicted_exactly(of_normal):
    weights, means, covers, sigma = exact_mixture()
    mean = weights @ means
    apart = means - mean
    cover = np.tensordot(weights, covers + apart[:, :, None] * apart[:, None], 1)
    posterior = of_normal.posterior(num_points=10_000)
    f = posterior.predict_f(NEW, site="eta", members=G + 1, full_covariance=True)
    deviation = np.sqrt(np.diag(cover)[NEW])
    np.testing.assert_allclose(f.mean, mean[NEW], atol=0.02 * deviation.max())
    np.testing.assert_allclose(f.variance, cover[np.ix_(NEW, NEW)], rtol=0.1, atol=0.01)

    # Observations: a mixture of normals over the grid.
    loc = means[:, NEW]
    scale = np.sqrt(np.diagonal(covers, axis1=1, axis2=2)[:, NEW] + sigma[:, None] ** 2)
    predicted = posterior.predict_y(NEW, members=G + 1)
    y = np.array([0.3, 1.4, -0.5])
    density = np.log(weights @ stats.norm(loc, scale).pdf(y))
    log_prob, variance, quantile = jax.jit(
        lambda d: (d.log_prob(y), d.variance, d.icdf(jnp.array(0.9)))
    )(predicted)
    np.testing.assert_allclose(log_prob, density, atol=0.02)
    np.testing.assert_allclose(
        variance, f.variance.diagonal() + weights @ sigma**2, rtol=0.05, atol=0.02
    )
    at = weights @ stats.norm(loc, scale).cdf(quantile)
    np.testing.assert_allclose(at, 0.9, atol=0.01)


def test_draws_of_a_collapsed_model_predict_and_draw_latents(of_normal):
    collapsed = gpaug.collapse(noisy)
    few = {"tau": np.array([0.2, 0.7, 2.0]), "sigma": np.array([0.8, 0.5, 0.4])}
    means, covers = conditioned(few["tau"], few["sigma"])
    mean = means.mean(0)
    cover = (covers + (means - mean)[:, :, None] * (means - mean)[:, None]).mean(0)
    posterior = collapsed.posterior(few, GROUP, REAL)
    f = posterior.predict_f(NEW, site="eta", members=G + 1, full_covariance=True)
    np.testing.assert_allclose(f.mean, mean[NEW], atol=1e-3)
    np.testing.assert_allclose(f.variance, cover[np.ix_(NEW, NEW)], rtol=1e-3)

    many = {k: np.tile(x, 400) for k, x in few.items()}
    draws = collapsed.sample_latents(jax.random.key(0), many, GROUP, REAL)
    assert draws["eta"].shape == (1200, len(GROUP))
    np.testing.assert_array_equal(draws["sigma"], many["sigma"].astype(np.float32))
    np.testing.assert_allclose(draws["a"].mean(0), mean[:G], atol=0.06)
    np.testing.assert_allclose(np.cov(draws["a"].T), cover[:G, :G], atol=0.03)

    # With the same draws of hyperparameters, the weighted run agrees.
    samples = of_normal.get_samples()
    ours = collapsed.posterior(samples, GROUP, REAL, num_points=100).summary()
    theirs = of_normal.posterior().summary()
    # Three standard errors of 100 draws.
    assert ((ours["mean"] - theirs["mean"]).abs() < 0.3 * theirs["sd"]).all()

    for wrong, said in (
        ({"tau": few["tau"]}, r"lack draws of the hyperparameters \['sigma'\]"),
        ({**few, "tau": np.ones((3, 2))}, r"'tau' have shape \(3, 2\)"),
        ({**few, "tau": np.ones(4)}, "as many draws as the others"),
    ):
        with pytest.raises(ValueError, match=said):
            collapsed.posterior(wrong, GROUP, REAL)


def test_counts_against_weighted_draws(of_counts):
    weights = np.exp(of_counts.get_extra_fields()["log_weights"])
    rate = np.exp(np.asarray(of_counts.get_samples(weighted=True)["a"], float))
    posterior = of_counts.posterior()
    rows, y = np.arange(G), np.array([1, 2, 1, 4])
    exact = np.log(weights @ stats.poisson(rate).pmf(y))
    found = posterior.log_prob(rows, y)
    # Given hyperparameters the Gaussian is not exact, but near.
    np.testing.assert_allclose(found, exact, atol=0.03)
    predicted = posterior.predict_y(rows)
    np.testing.assert_allclose(predicted.mean, weights @ rate, rtol=0.06)


def test_new_groups_follow_the_prior_at_each_scale(of_counts):
    posterior = of_counts.posterior(num_points=10_000)
    weights = np.exp(of_counts.get_extra_fields()["log_weights"])
    draws = of_counts.get_samples(weighted=True)
    level, tau = (np.asarray(draws[k], float) for k in ("level", "tau"))
    mean = weights @ level
    variance = weights @ (tau**2 + (level - mean) ** 2)
    f = posterior.predict_f(np.array([G]), site="eta", members=G + 1)
    np.testing.assert_allclose(f.mean, mean, atol=0.05)
    np.testing.assert_allclose(f.variance, variance, rtol=0.1)


def test_latents_and_hyperparameters_have_a_table(of_counts):
    posterior, draws = of_counts.posterior(), of_counts.summary()
    found = posterior.summary()
    for column, size in (("mean", 0.15), ("95%", 0.35)):
        off = (found[column] - draws.loc[found.index, column]).abs()
        assert (off < size * draws.loc[found.index, "sd"]).all()
    marginal = posterior["a"]
    np.testing.assert_allclose(marginal.mean, found["mean"][: G + 1][1:], atol=1e-5)
    joint = posterior.sample(
        jax.random.key(0), np.arange(G), site="eta", sample_shape=(4000,)
    )
    np.testing.assert_allclose(
        np.cov(np.asarray(joint).T), marginal.covariance_matrix, atol=0.03
    )


def test_saved_mixtures_predict_the_same(of_counts, tmp_path):
    posterior, path = of_counts.posterior(num_points=5), tmp_path / "fit.npz"
    posterior.save(path)
    loaded = gpaug.Posterior.load(path, poisson)
    expected = posterior.log_prob(NEW[:2], COUNTS[:2])
    np.testing.assert_array_equal(loaded.log_prob(NEW[:2], COUNTS[:2]), expected)
    assert loaded.summary().equals(posterior.summary())


def test_without_hyperparameters_there_is_one_member():
    points, log_weights = stratified(
        np.zeros((9, 0)), np.zeros(9), 4, np.random.default_rng(0)
    )
    assert points.shape == (1, 0)
    assert log_weights == [0]


def test_systematic_samples_have_the_moments():
    rng = np.random.default_rng(0)
    points = rng.normal(size=(4000, 2)) * [3, 1]
    log_weights = 0.5 * points[:, 1]
    log_weights[:10] = -np.inf
    chosen, even = stratified(points, log_weights, 64, rng)
    np.testing.assert_allclose(even, -np.log(64))
    # Strata along the first axis, chance along the second.
    weights = special.softmax(log_weights)
    off = chosen.mean(0) - weights @ points
    assert abs(off[0]) < 0.15
    assert abs(off[1]) < 4 / 8
    everything, known = stratified(points, log_weights, 4000, rng)
    assert len(everything) == 3990
    np.testing.assert_allclose(np.exp(known) @ everything, weights @ points)


def test_leaving_out_averages_more_points_by_default(of_normal):
    found = of_normal.posterior().leave_one_out(GROUP, REAL).log_prob(REAL)
    many = of_normal.posterior(num_points=512).leave_one_out(GROUP, REAL)
    np.testing.assert_array_equal(found, many.log_prob(REAL))


def test_leave_one_out_against_refits(of_counts):
    tree = gpaug.diagnostics.to_datatree(jax.random.key(0), of_counts)
    found = gpaug.diagnostics.loo(tree)
    whole = special.logsumexp(counts_on_a_grid(COUNTS, GROUP)[1])
    left_out = [COUNTS.argmax(), COUNTS.argmin(), 5]
    expected = [
        whole - special.logsumexp(counts_on_a_grid(*np.delete(KNOWN, i, 1))[1])
        for i in left_out
    ]
    elpd = np.asarray(found.elpd_i)[left_out]
    np.testing.assert_allclose(elpd, expected, atol=0.12)
    assert np.asarray(found.pareto_k).max() < 0.7


def process(X, y=None, *, Z):
    length = numpyro.sample("length", dist.LogNormal(0.0, 0.7))
    scale = numpyro.sample("scale", dist.LogNormal(0.0, 0.7))
    kernel = gpaug.kernels.Matern52(length, scale)
    gp = gpaug.GaussianProcess("f", kernel, inducing=Z)
    with numpyro.plate("data", len(X)):
        numpyro.sample("y", dist.Bernoulli(logits=gp(X)), obs=y)


def probabilities(num):
    """Return the probabilities of a process at new inputs, from data of this number,
    and the run.
    """
    rng = np.random.default_rng(0)
    X = rng.uniform(-3, 3, (num, 1))
    y = rng.binomial(1, special.expit(2 * np.sin(2 * X[:, 0])))
    run = nested(process, X, y, num_points=256, data={"Z": Z})
    return run, run.posterior(num_points=32), (X, y)


Z, INPUTS = np.linspace(-3, 3, 8)[:, None], np.linspace(-4, 4, 9)[:, None]


def test_a_process_at_new_inputs_against_its_draws():
    run, posterior, _ = probabilities(40)
    predictive = jax.jit(Predictive(process, run.get_samples()))
    expected = predictive(jax.random.key(2), INPUTS, Z=Z)["y"].mean(0)
    predicted = posterior.predict_y(INPUTS)
    np.testing.assert_allclose(predicted.probs, expected, atol=0.06)
    # Inducing values are whitened, and no table shows them.
    assert list(run.summary().index) == ["length", "scale"]
    assert set(run.get_samples()) > {"f.v", "f"}
