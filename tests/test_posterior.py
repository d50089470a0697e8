# SPDX-License-Identifier: Apache-2.0
"""Prediction: formulas, streaming, saving, other models."""

import jax
import jax.numpy as jnp
import numpy as np
import numpyro
import numpyro.distributions as dist
import optax
import pytest

import numpyro_gpaug as gpaug
from tests.conftest import compilations
from tests.problems import classifier, learnt, regression, toy

KEY = jax.random.key(0)


def fitted(model=classifier, num_steps=10, optim=None, **kwargs):
    X, y = toy(60)
    svi = gpaug.ConjugateSVI(model, gpaug.AutoSparseGP(model), optim)
    kwargs.setdefault("inducing", X[:12])
    result = svi.run(KEY, num_steps, X, y, progress_bar=False, **kwargs)
    return svi.posterior(result), result


def test_moments_and_probabilities_against_formulas(x64) -> None:
    posterior, result = fitted()
    X, _ = toy(60)
    new, Z = toy(9, seed=5)[0], X[:12]
    kernel = gpaug.kernels.SquaredExponential()
    gram, cross = np.asarray(kernel(Z, Z)), np.asarray(kernel(Z, new))
    A = np.linalg.solve(np.linalg.cholesky(gram + 1e-10 * np.eye(12)), cross)
    S = np.linalg.inv(np.asarray(result.params["f.v_auto_precision"]))
    mean = A.T @ (S @ np.asarray(result.params["f.v_auto_potential"]))
    covariance = np.asarray(kernel(new, new)) - A.T @ A + A.T @ S @ A
    f = posterior.predict_f(new)
    np.testing.assert_allclose(f.mean, mean, atol=1e-9)
    np.testing.assert_allclose(f.variance, np.diag(covariance), atol=1e-9)
    joint = posterior.predict_f(new, full_covariance=True)
    np.testing.assert_allclose(joint.variance, covariance, atol=1e-9)
    # E sigmoid by brute force.
    nodes, weights = np.polynomial.hermite_e.hermegauss(80)
    values = mean[:, None] + np.sqrt(np.diag(covariance))[:, None] * nodes
    probs = (weights / weights.sum() / (1 + np.exp(-values))).sum(1)
    np.testing.assert_allclose(posterior.predict_y(new).probs, probs, atol=1e-10)
    y = jnp.array([0, 1, 1, 0, 1, 0, 0, 1, 1])
    expected = np.log(np.where(np.asarray(y) == 1, probs, 1 - probs))
    np.testing.assert_allclose(posterior.log_prob(new, y), expected, atol=1e-9)


@pytest.mark.slow
def test_draws_have_the_posterior_moments() -> None:
    posterior, _ = fitted()
    new = toy(5, seed=3)[0]
    draws = posterior.sample(KEY, new, sample_shape=(20000,))
    joint = posterior.predict_f(new, full_covariance=True)
    assert draws.shape == (20000, 5)
    np.testing.assert_allclose(draws.mean(0), joint.mean, atol=0.03)
    np.testing.assert_allclose(jnp.cov(draws.T), joint.variance, atol=0.04)


def test_predictions_do_not_depend_on_batch_size() -> None:
    posterior, _ = fitted()
    new = toy(101, seed=3)[0]
    whole = posterior.predict_y(new)
    for batch_size in (7, 1000):
        part = posterior.predict_y(new, batch_size=batch_size)
        assert part.batch_shape == whole.batch_shape == (101,)
        np.testing.assert_allclose(part.probs, whole.probs, rtol=2e-6)
        f = posterior.predict_f(new, batch_size=batch_size)
        assert f.mean.shape == f.variance.shape == (101,)


def test_any_number_of_rows_costs_one_compilation_each() -> None:
    posterior, _ = fitted()
    before = compilations("_answer")
    for rows in range(1, 41, 2):
        assert posterior.predict_y(toy(rows, seed=1)[0], batch_size=16).probs.shape == (
            rows,
        )
        posterior.predict_f(toy(rows, seed=1)[0], batch_size=16)
    assert compilations("_answer") - before == 2


def test_save_and_load_predict_the_same(tmp_path) -> None:
    posterior, _ = fitted(learnt, num_steps=20, optim=optax.adam(0.05), batch_size=30)
    path = tmp_path / "posterior.npz"
    posterior.save(path)
    loaded = gpaug.Posterior.load(path, learnt)
    new = toy(11, seed=2)[0]
    np.testing.assert_array_equal(
        loaded.predict_y(new).probs, posterior.predict_y(new).probs
    )
    with np.load(path, allow_pickle=False) as archive:
        total = sum(v.size for k, v in archive.items() if k != "meta")
        assert not any(v.dtype == object for v in archive.values())
    # Only M-sized things: no training data.
    assert total < 12 * 12 + 12 * 2 + 12 + 10


def test_saving_what_cannot_be_saved_is_named(tmp_path) -> None:
    def model(X, y=None, *, kernel, inducing):
        gp = gpaug.GaussianProcess("f", kernel, inducing)
        with numpyro.plate("data", X.shape[0]):
            numpyro.sample("y", dist.Bernoulli(logits=gp(X)), obs=y)

    posterior, _ = fitted(model, kernel=gpaug.kernels.Matern32(0.7))
    with pytest.raises(ValueError, match="arguments/kernel is a Matern32"):
        posterior.save(tmp_path / "posterior.npz")


def test_keyword_data_and_observations_are_forgotten() -> None:
    X, y = toy(60)
    svi = gpaug.ConjugateSVI(classifier, gpaug.AutoSparseGP(classifier))
    result = svi.run(KEY, 5, X=X, y=y, inducing=X[:12], progress_bar=False)
    posterior = svi.posterior(result)
    assert posterior.predict_y(X=toy(7, seed=4)[0]).probs.shape == (7,)
    assert posterior.log_prob(X=X[:5], y=y[:5]).shape == (5,)


def test_a_model_whose_observations_have_no_default() -> None:
    def model(X, y, inducing):
        return classifier(X, y, inducing=inducing)

    posterior, _ = fitted(model)
    assert posterior.predict_y(toy(7, seed=4)[0]).probs.shape == (7,)


def test_normal_likelihood_gives_intervals() -> None:
    X, _ = toy(60)
    y = jnp.sin(X[:, 0])
    svi = gpaug.ConjugateSVI(regression, gpaug.AutoSparseGP(regression))
    result = svi.run(KEY, 2, X, y, inducing=X[:20], progress_bar=False)
    new = toy(7, seed=4)[0]
    posterior = svi.posterior(result)
    d, f = posterior.predict_y(new), posterior.predict_f(new)
    np.testing.assert_allclose(d.variance, f.variance + 0.25, rtol=1e-5)
    assert (d.icdf(0.025) < d.mean).all()


def test_from_a_gradient_fit_and_a_dense_guide() -> None:
    X, y = toy(60)
    guide = gpaug.AutoSparseGP(classifier, covariance="dense")
    svi = numpyro.infer.SVI(
        classifier, guide, optax.adam(0.05), gpaug.TraceAnalytic_ELBO()
    )
    result = svi.run(KEY, 1500, X, y, inducing=X[:12], progress_bar=False)
    posterior = gpaug.Posterior.from_guide(
        classifier, guide, result.params, X, y, inducing=X[:12]
    )
    closed, _ = fitted()
    new = toy(9, seed=5)[0]
    np.testing.assert_allclose(
        posterior.predict_y(new).probs, closed.predict_y(new).probs, atol=5e-3
    )


def test_three_latents_a_linear_term_and_two_processes() -> None:
    def three(X, y=None, *, inducing):
        gp = gpaug.GaussianProcess(
            "f", gpaug.kernels.Matern52(), inducing, num_latents=3
        )
        with numpyro.plate("data", X.shape[0]):
            d = dist.Bernoulli(logits=gp(X)).to_event(1)
            numpyro.sample("y", d, obs=y)

    X, y = toy(60)
    labels = jnp.stack([y, 1 - y, y], 1)
    svi = gpaug.ConjugateSVI(three, gpaug.AutoSparseGP(three))
    result = svi.run(KEY, 5, X, labels, inducing=X[:12], progress_bar=False)
    posterior = svi.posterior(result)
    new = toy(7, seed=4)[0]
    f = posterior.predict_f(new)
    assert f.mean.shape == f.variance.shape == (7, 3)
    assert posterior.predict_f(new, full_covariance=True).variance.shape == (3, 7, 7)
    assert posterior.sample(KEY, new, sample_shape=(2,)).shape == (2, 7, 3)
    probs = posterior.predict_y(new).probs
    np.testing.assert_allclose(probs[:, 0], 1 - probs[:, 1], atol=1e-5)
    assert posterior.log_prob(X, labels).shape == (60,)

    def mixed(X, y=None, *, inducing):
        beta = numpyro.sample("beta", dist.Normal(0, 2).expand([2]).to_event(1))
        f = gpaug.GaussianProcess("f", gpaug.kernels.Matern52(), inducing)
        g = gpaug.GaussianProcess("g", gpaug.kernels.Linear(), inducing)
        with numpyro.plate("data", X.shape[0]):
            logits = f(X) + g(X) + X @ beta
            numpyro.sample("y", dist.Bernoulli(logits=logits), obs=y)

    posterior, _ = fitted(mixed)
    assert posterior.predict_f(new, site="g").mean.shape == (7,)
    with pytest.raises(ValueError, match=r"site=None.*\['f', 'g'\]"):
        posterior.predict_f(new)
    assert posterior.predict_y(new).probs.shape == (7,)


def test_bad_new_inputs() -> None:
    posterior, _ = fitted()
    with pytest.raises(ValueError, match=r"\(5, 3\)"):
        posterior.predict_y(jnp.zeros((5, 3)))
    with pytest.raises(ValueError, match="new inputs"):
        posterior.predict_y()
    with pytest.raises(ValueError, match="site='z'"):
        posterior.predict_y(jnp.zeros((5, 2)), site="z")
