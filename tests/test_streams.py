# SPDX-License-Identifier: Apache-2.0
"""Posteriors that go on learning from batches."""

import jax
import jax.numpy as jnp
import numpy as np
import numpyro
import numpyro.distributions as dist
import pytest

import numpyro_gpaug as gpaug

KEY = jax.random.key(0)
LAWS = {
    "normal": lambda f: dist.Normal(f, 0.3),
    "bernoulli": lambda f: dist.Bernoulli(logits=f),
    "poisson": lambda f: gpaug.LogisticPoisson(f, 9.0),
}


def model(X, y=None, *, Z, law="normal"):
    scale = numpyro.sample("scale", dist.LogNormal(0.0, 1.0))
    variance = numpyro.param("variance", 2.0, constraint=dist.constraints.positive)
    kernel = gpaug.kernels.Matern52(scale, variance)
    gp = gpaug.GaussianProcess("f", kernel, Z)
    with numpyro.plate("data", len(X)):
        numpyro.sample("y", LAWS[law](gp(X)), obs=y)


def data(law, rows=400):
    rng = np.random.default_rng(0)
    X = rng.uniform(-3, 3, size=(rows, 1)).astype("f")
    f = 2 * np.sin(X[:, 0])
    y = {
        "normal": f + 0.3 * rng.normal(size=rows),
        "bernoulli": (rng.uniform(size=rows) < 1 / (1 + np.exp(-2 * f))).astype(int),
        "poisson": rng.poisson(9 / (1 + np.exp(-f))),
    }[law]
    return X, y, np.linspace(-3, 3, 8, dtype="f")[:, None]


def fitted(X, y, **kwargs):
    svi = gpaug.ConjugateSVI(model, gpaug.AutoSparseGP(model), None)
    return svi.posterior(svi.run(KEY, 50, X, y, progress_bar=False, **kwargs))


def streamed(X, y, batches, forgetting=1.0, **kwargs):
    size = len(X) // batches
    stream = gpaug.Stream(fitted(X[:size], y[:size], **kwargs), forgetting)
    for start in range(size, len(X), size):
        stream.update(X[start : start + size], y[start : start + size])
    return stream


def test_a_normal_stream_is_the_posterior_of_all_data():
    X, y, Z = data("normal")
    whole = fitted(X, y, Z=Z)
    stream = streamed(X, y, 100, Z=Z)
    for name in ("mean", "variance"):
        found, expected = (
            getattr(p.predict_f(X[:50]), name) for p in (stream.posterior, whole)
        )
        np.testing.assert_allclose(found, expected, atol=1e-5 * np.abs(expected).max())
    assert len(stream.losses) == 99


def test_bounds_of_a_normal_stream_add_up_to_that_of_all_data():
    X, y, Z = data("normal", 60)
    svi = gpaug.ConjugateSVI(model, gpaug.AutoSparseGP(model), None)
    how = {"Z": Z, "progress_bar": False}
    first, whole = (svi.run(KEY, 9, X[:n], y[:n], **how) for n in (20, 60))
    stream = gpaug.Stream(svi.posterior(first))
    for start in (20, 40):
        stream.update(X[start : start + 20], y[start : start + 20])
    # The prior of the hyperparameter, at rest, is in the bound of every batch.
    prior = float(dist.LogNormal(0.0, 1.0).log_prob(first.params["scale_auto_loc"]))
    total = -first.losses[-1] - sum(stream.losses) - 2 * prior
    np.testing.assert_allclose(total, -whole.losses[-1], rtol=2e-5)


@pytest.mark.parametrize(
    "law", ["bernoulli", pytest.param("poisson", marks=pytest.mark.slow)]
)
def test_other_likelihoods_lose_little(law):
    X, y, Z = data(law)
    stream, whole = streamed(X, y, 10, Z=Z, law=law), fitted(X, y, Z=Z, law=law)
    new, y_new, _ = data(law, 300)
    losses = [
        -p.predict_y(new).log_prob(y_new).mean() for p in (stream.posterior, whole)
    ]
    assert abs(losses[0] - losses[1]) < 0.005
    # Not the same: factors of old data are those of the posterior of their time.
    assert losses[0] != losses[1]


def test_what_drifts_is_followed_by_forgetting():
    rng = np.random.default_rng(1)
    X = rng.uniform(-3, 3, size=(600, 1)).astype("f")
    phase = np.repeat(np.linspace(0, np.pi, 20), 30)
    y = 2 * np.sin(X[:, 0] + phase) + 0.3 * rng.normal(size=600)
    Z = np.linspace(-3, 3, 8, dtype="f")[:, None]
    now = 2 * np.sin(X[:, 0] + np.pi)
    errors = []
    for forgetting in (1.0, 0.7):
        stream = streamed(X, y, 20, forgetting=forgetting, Z=Z)
        f = stream.posterior.predict_f(X)
        errors.append(np.sqrt(np.mean((np.asarray(f.mean) - now) ** 2)))
    assert errors[1] < 0.5 * errors[0]


def test_forgetting_all_but_all_goes_back_to_the_prior():
    X, y, Z = data("normal", 40)
    stream = gpaug.Stream(fitted(X, y, Z=Z), forgetting=1e-6)
    alone = fitted(X[:5], y[:5], Z=Z)
    found = stream.update(X[:5], y[:5]).predict_f(X)
    np.testing.assert_allclose(found.mean, alone.predict_f(X).mean, atol=2e-3)


def test_a_loaded_posterior_goes_on(tmp_path):
    X, y, Z = data("normal", 40)
    first = fitted(X[:20], y[:20], Z=Z)
    first.save(tmp_path / "first.npz")
    loaded = gpaug.Posterior.load(tmp_path / "first.npz", model)
    means = [
        gpaug.Stream(p).update(X[20:], y[20:]).predict_f(X).mean
        for p in (first, loaded)
    ]
    np.testing.assert_allclose(*means, atol=1e-6)


@pytest.mark.slow
def test_several_latents_and_weights():
    def both(X, y=None, *, Z):
        w = numpyro.sample("w", dist.Normal(jnp.ones(1), 2.0).to_event(1))
        kernel = gpaug.kernels.Matern52(1.0)
        gp = gpaug.GaussianProcess("f", kernel, Z, num_latents=2)
        with numpyro.plate("data", len(X)):
            law = dist.Normal(gp(X) + (X @ w)[:, None], 0.3).to_event(1)
            numpyro.sample("y", law, obs=y)

    X, y, Z = data("normal", 60)
    Y = np.stack([y, -y], 1)
    svi = gpaug.ConjugateSVI(both, gpaug.AutoSparseGP(both), None)
    how = {"Z": Z, "progress_bar": False}
    few, whole = (
        svi.posterior(svi.run(KEY, 200, X[:n], Y[:n], **how)) for n in (30, 60)
    )
    both_parts = gpaug.Stream(few).update(X[30:], Y[30:])
    found, expected, before = (p.predict_y(X).mean for p in (both_parts, whole, few))
    # Not equal: weights and processes are independent in every posterior.
    assert abs(found - expected).max() < 0.03 < 0.2 * abs(before - expected).max()
    assert both_parts.weights["w"].variance < few.weights["w"].variance


def test_refusals():
    X, y, Z = data("normal", 20)
    posterior = fitted(X, y, Z=Z)
    for forgetting in (0.0, 1.5):
        with pytest.raises(ValueError, match=r"forgetting must be in \(0, 1\]"):
            gpaug.Stream(posterior, forgetting)
    with pytest.raises(ValueError, match="y has shape|NaN"):
        gpaug.Stream(posterior).update(X, np.full(20, np.nan))

    def joint(X, y=None):
        a = numpyro.sample("a", dist.Normal(0, 1))
        with numpyro.plate("data", len(X)):
            numpyro.sample("y", dist.Normal(a + X[:, 0] * 0, 1.0), obs=y)

    svi = gpaug.ConjugateSVI(joint, gpaug.AutoLatentGaussian(joint))
    result = svi.run(KEY, 2, X, y, progress_bar=False)
    with pytest.raises(NotImplementedError, match="AutoSparseGP"):
        gpaug.Stream(svi.posterior(result))
