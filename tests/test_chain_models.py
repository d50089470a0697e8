# SPDX-License-Identifier: Apache-2.0
"""Models with random walks: found, fitted and predicted like dense ones."""

import jax
import jax.numpy as jnp
import numpy as np
import numpyro
import numpyro.distributions as dist
import pytest
from numpyro.contrib.control_flow import scan

import numpyro_gpaug as gpaug
from numpyro_gpaug.model import costs
from tests.problems import moved

N, STEPS = 90, 40
rng = np.random.default_rng(0)
# Some steps have several rows, some have none.
TIME = rng.choice(np.delete(np.arange(STEPS), [0, 7, 8, STEPS - 1]), N)
ITEM, X = rng.integers(0, 3, N), rng.normal(size=N)
LEVEL = np.cumsum(rng.normal(size=(2, STEPS)) * 0.3, -1)
COUNTS = rng.poisson(np.exp(0.5 + LEVEL[0, TIME] + 0.3 * X))
REAL = LEVEL[0, TIME] + LEVEL[1, TIME] * X + 0.3 * rng.normal(size=N)


def counts(t, item, x, y=None, *, steps=STEPS):
    """A walk, noise of every step, fixed effects and a few groups."""
    scale = numpyro.sample("scale", dist.HalfNormal(1).expand([3]).to_event(1))
    beta = numpyro.sample("beta", dist.Normal(0, 3).expand([2]).to_event(1))
    walk = numpyro.sample("walk", dist.GaussianRandomWalk(scale[0], steps))
    with numpyro.plate("steps", steps):
        shock = numpyro.sample("shock", dist.Normal(0, scale[1]))
    with numpyro.plate("items", 3):
        c = numpyro.sample("c", dist.Normal(0, scale[2]))
    eta = beta[0] + beta[1] * x + walk[t] + shock[t] + c[item]
    numpyro.deterministic("eta", eta)
    numpyro.deterministic("growth", walk[-1] - walk[0])
    with numpyro.plate("data", len(t)):
        numpyro.sample("y", dist.Poisson(jnp.exp(eta)), obs=y)


def test_forecasts(monkeypatch):
    monkeypatch.setattr(costs, "_OVERHEAD", -np.inf)
    guide = gpaug.AutoLatentGaussian(counts)
    svi = gpaug.ConjugateSVI(counts, guide, optim=None)
    posterior = moved(svi, 1, TIME, ITEM, X, COUNTS)
    assert "a chain of 40 steps of 2 (walk, shock), 5 others dense" in repr(guide)
    numbers = jax.tree.map(lambda x: np.asarray(x) + 1, guide.structure.zeros)
    links = (np.ones((1, STEPS, 1, 1), np.float32),)
    white = jax.device_get(jax.jit(guide.structure.unlinked)(numbers, links))
    np.testing.assert_array_equal(np.cumsum(white["walk"]), numbers["walk"])
    np.testing.assert_array_equal(white["shock"], numbers["shock"])
    new = TIME[:9], ITEM[:9], X[:9]
    mean, variance = jax.device_get(posterior.predict_f(*new, steps=50, site="walk"))
    old, scale = posterior["walk"], np.asarray(posterior.values["scale"])[0]
    assert np.ptp(mean[:40]) > 0.1
    np.testing.assert_allclose(mean[:40], old.mean, rtol=1e-4, atol=1e-5)
    np.testing.assert_allclose(variance[:40], old.variance, rtol=1e-4)
    np.testing.assert_allclose(mean[40:], mean[39], rtol=1e-4)
    ahead = variance[39] + scale**2 * np.arange(1, 11)
    np.testing.assert_allclose(variance[40:], ahead, rtol=1e-4)


def test_what_is_no_chain(monkeypatch):
    def doubled(t, y=None, *, steps=STEPS):
        walk = numpyro.sample("walk", dist.GaussianRandomWalk(1.0, steps))
        with numpyro.plate("data", len(t)):
            numpyro.sample("y", dist.Normal(jnp.cumsum(walk)[t], 1), obs=y)

    monkeypatch.setattr(costs, "_OVERHEAD", -np.inf)
    guide = gpaug.AutoLatentGaussian(doubled)
    guide.setup(TIME, REAL)
    assert "40 Gaussian latents, dense" in repr(guide)
    with pytest.raises(
        gpaug.NotConjugateError,
        match=r"Random walks and autoregressions \(\['walk'\]\)",
    ):
        gpaug.AutoLatentGaussian(doubled).setup(TIME, REAL, steps=6000)


def test_a_level_that_steps_compensate_for():
    """Potentials are about the means: as sums over rows they would move the level by
    up to 17 of its standard deviations."""
    steps, noise, phi = 400, 0.03, 0.3
    t = np.delete(np.arange(steps), np.arange(50, 90))
    known = 49 + 2 * np.random.default_rng(1).normal(size=len(t))

    def model(t, y=None):
        level = numpyro.sample("level", dist.Normal(0, 100))

        def step(x, i):
            sd = jnp.where(i == 0, 2.0, 2 * (1 - phi**2) ** 0.5)
            x = numpyro.sample("x", dist.Normal(phi * x, sd))
            return x, x

        _, x = scan(step, 0.0, jnp.arange(steps))
        with numpyro.plate("data", len(t)):
            numpyro.sample("y", dist.Normal(level + x[t], noise), obs=y)

    svi = gpaug.ConjugateSVI(model, gpaug.AutoLatentGaussian(model), optim=None)
    fit = svi.run(jax.random.key(0), 4, t, known, progress_bar=False)
    covariance = 4 * phi ** abs(t[:, None] - t) + noise**2 * np.eye(len(t))
    weights = np.linalg.solve(covariance, np.ones(len(t)))
    precision = weights.sum() + 1e-4
    error = float(svi.posterior(fit)["level"].mean) - weights @ known / precision
    assert abs(error) * precision**0.5 < 0.02
