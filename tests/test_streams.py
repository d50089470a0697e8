# SPDX-License-Identifier: Apache-2.0
"""Posteriors that go on learning from batches."""

from functools import cache, partial

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


@cache
def svi_of(law):
    """Fits of data of one shape share a program."""
    return gpaug.ConjugateSVI(
        partial(model, law=law), gpaug.AutoSparseGP(partial(model, law=law)), None
    )


def run(X, y, Z, law="normal"):
    return svi_of(law).run(KEY, 50, X, y, Z=Z, progress_bar=False)


def fitted(X, y, Z, law="normal"):
    return svi_of(law).posterior(run(X, y, Z, law))


def streamed(first, X, y, size, forgetting=1.0):
    stream = gpaug.Stream(first, forgetting)
    for start in range(0, len(X), size):
        stream.update(X[start : start + size], y[start : start + size])
    return stream


@pytest.fixture(scope="module")
def first():
    """Fitted to four rows of the normal data."""
    X, y, Z = data("normal")
    return fitted(X[:4], y[:4], Z)


def test_a_normal_stream_is_the_posterior_of_all_data(first, tmp_path):
    X, y, Z = data("normal")
    result = run(X, y, Z)
    whole = svi_of("normal").posterior(result)
    stream = streamed(first, X[4:], y[4:], 36)
    for name in ("mean", "variance"):
        found, expected = (
            getattr(p.predict_f(X[:50]), name) for p in (stream.posterior, whole)
        )
        np.testing.assert_allclose(found, expected, atol=1e-5 * np.abs(expected).max())
    # Bounds add up; the prior of the hyperparameter, at rest, is in every batch's.
    assert len(stream.losses) == 11
    prior = float(dist.LogNormal(0.0, 1.0).log_prob(result.params["scale_auto_loc"]))
    losses = [run(X[:4], y[:4], Z).losses[-1], *stream.losses]
    np.testing.assert_allclose(sum(losses) + 11 * prior, result.losses[-1], rtol=2e-5)
    # A loaded one goes on as well.
    first.save(tmp_path / "first.npz")
    loaded = gpaug.Posterior.load(tmp_path / "first.npz", svi_of("normal").model)
    means = [
        streamed(p, X[4:40], y[4:40], 36).posterior.predict_f(X).mean
        for p in (first, loaded)
    ]
    np.testing.assert_allclose(*means, atol=1e-6)


@pytest.mark.parametrize(
    "law", ["bernoulli", pytest.param("poisson", marks=pytest.mark.slow)]
)
def test_other_likelihoods_lose_little(law):
    X, y, Z = data(law)
    begun, whole = fitted(X[:40], y[:40], Z, law), fitted(X, y, Z, law)
    stream = streamed(begun, X[40:], y[40:], 40)
    new, y_new, _ = data(law, 300)
    losses = [
        -p.predict_y(new).log_prob(y_new).mean() for p in (stream.posterior, whole)
    ]
    assert abs(losses[0] - losses[1]) < 0.005
    # Not the same: factors of old data are those of the posterior of their time.
    assert losses[0] != losses[1]


def test_what_drifts_is_followed_by_forgetting(first):
    X, _, Z = data("normal")
    phase = np.repeat(np.linspace(0, np.pi, 20), 20)
    noise = 0.3 * np.random.default_rng(1).normal(size=400)
    y = 2 * np.sin(X[:, 0] + phase) + noise
    now = 2 * np.sin(X[:, 0] + np.pi)
    # Without forgetting a stream is the posterior of all data.
    stream = streamed(first, X[4:], y[4:], 36, forgetting=0.6)
    errors = [
        np.sqrt(np.mean((np.asarray(p.predict_f(X).mean) - now) ** 2))
        for p in (fitted(X, y, Z), stream.posterior)
    ]
    assert errors[1] < 0.5 * errors[0]
    # Forgetting all but all goes back to the prior.
    stream.forgetting = 1e-6
    found = stream.update(X[4:40], y[4:40]).predict_f(X)
    alone = fitted(X[4:40], y[4:40], Z).predict_f(X)
    np.testing.assert_allclose(found.mean, alone.mean, atol=2e-3)


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


def test_refusals(first):
    X, y, _ = data("normal", 20)
    for forgetting in (0.0, 1.5):
        with pytest.raises(ValueError, match=r"forgetting must be in \(0, 1\]"):
            gpaug.Stream(first, forgetting)
    with pytest.raises(ValueError, match="y has shape|NaN"):
        gpaug.Stream(first).update(X, np.full(20, np.nan))

    def joint(X, y=None):
        a = numpyro.sample("a", dist.Normal(0, 1))
        with numpyro.plate("data", len(X)):
            numpyro.sample("y", dist.Normal(a + X[:, 0] * 0, 1.0), obs=y)

    svi = gpaug.ConjugateSVI(joint, gpaug.AutoLatentGaussian(joint))
    result = svi.run(KEY, 2, X, y, progress_bar=False)
    with pytest.raises(NotImplementedError, match="AutoSparseGP"):
        gpaug.Stream(svi.posterior(result))
