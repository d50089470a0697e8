# SPDX-License-Identifier: Apache-2.0
"""Models with random walks: found, fitted and predicted like dense ones."""

import re

import jax
import jax.numpy as jnp
import numpy as np
import numpyro
import numpyro.distributions as dist
import pytest

import numpyro_gpaug as gpaug
from numpyro_gpaug.model import affine, costs

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


def fitted(model, y, steps=60, **how):
    guide = gpaug.AutoLatentGaussian(model)
    svi = gpaug.ConjugateSVI(model, guide, **how)
    args = TIME, ITEM, X, y
    result = svi.run(jax.random.key(0), steps, *args, progress_bar=False)
    return svi.posterior(result), result, guide


@pytest.fixture(scope="module")
def of_steps():
    with pytest.MonkeyPatch.context() as patched:
        patched.setattr(costs, "_OVERHEAD", -np.inf)
        yield fitted(counts, COUNTS, optim=None)


def test_forecasts(of_steps):
    posterior, result, guide = of_steps
    assert "a chain of 40 steps of 2 (walk, shock), 5 others dense" in repr(guide)
    numbers = jax.tree.map(lambda x: x + 1.0, guide.structure.zeros)
    links = (np.ones((1, STEPS, 1, 1), np.float32),)
    white = guide.structure.unlinked(numbers, links)
    np.testing.assert_array_equal(np.cumsum(white["walk"]), numbers["walk"])
    np.testing.assert_array_equal(white["shock"], numbers["shock"])
    new = TIME[:9], ITEM[:9], X[:9]
    found, old = posterior.predict_f(*new, steps=50, site="walk"), posterior["walk"]
    scale = result.params["scale_auto_loc"][0]
    np.testing.assert_allclose(found.mean[:40], old.mean, rtol=1e-4, atol=1e-5)
    np.testing.assert_allclose(found.variance[:40], old.variance, rtol=1e-4)
    np.testing.assert_allclose(found.mean[40:], old.mean[-1], rtol=1e-4)
    ahead = old.variance[-1] + scale**2 * np.arange(1, 11)
    np.testing.assert_allclose(found.variance[40:], ahead, rtol=1e-4)


@pytest.mark.slow
def test_sums_over_steps(of_steps, monkeypatch):
    posterior, *_ = of_steps
    new = TIME[:9], ITEM[:9], X[:9]
    growth = posterior.predict_f(*new, site="growth")
    joint = posterior.predict_f(*new, site="walk", full_covariance=True).variance
    apart = joint[0, 0] + joint[-1, -1] - 2 * joint[0, -1]
    np.testing.assert_allclose(growth.variance, apart, rtol=1e-3)
    # Many rows: their covariance matrix is not made.
    draws = posterior.sample(jax.random.key(1), *new, site="walk", sample_shape=(3000,))
    np.testing.assert_allclose(np.cov(draws.T), joint, atol=0.1 * joint.max())
    for limit in ("_MOST", "_LARGE"):
        monkeypatch.setattr(affine, limit, 0)
    found = posterior.predict_f(
        *(x[:8] for x in new), site="walk", full_covariance=True
    )
    np.testing.assert_allclose(found.variance, joint, rtol=1e-4, atol=1e-5)
    with pytest.raises(gpaug.NotConjugateError, match="'growth' depend on several"):
        posterior.predict_f(*(x[:8] for x in new), site="growth")


@pytest.mark.slow
def test_the_density_of_draws(of_steps):
    """With the density, the mean of log ratios is the bound, computed as in NumPyro."""
    _, result, guide = of_steps
    args = TIME, ITEM, X, COUNTS
    substituted = numpyro.handlers.substitute(guide, data=result.params)

    def log_ratio(key):
        """Return the log-density of data and values minus the log-density of the
        values' draw.
        """
        seeded = numpyro.handlers.seed(substituted, key)
        trace = numpyro.handlers.trace(seeded).get_trace(*args)
        drawn = {k: s for k, s in trace.items() if s["type"] == "sample"}
        log_q = sum(s["fn"].log_prob(s["value"]).sum() for s in drawn.values())
        values = {k: s["value"] for k, s in drawn.items() if k != "_latents"}
        return numpyro.infer.util.log_density(counts, args, {}, values)[0] - log_q

    ratios = jax.jit(jax.vmap(log_ratio))(jax.random.split(jax.random.key(0), 500))
    error = ratios.std() / np.sqrt(500)
    np.testing.assert_allclose(ratios.mean(), -result.losses[-1], atol=4 * error)
    assert error < 0.15


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


@pytest.mark.slow
def test_data_that_look_at_several_steps(monkeypatch):
    def compared(first, second, y=None):
        walk = numpyro.sample("walk", dist.GaussianRandomWalk(1.0, STEPS))
        shock = numpyro.sample("shock", dist.Normal(0, 1).expand([STEPS]).to_event(1))
        with numpyro.plate("data", len(first)):
            numpyro.sample("y", dist.Normal(walk[first] + shock[second], 1), obs=y)

    monkeypatch.setattr(costs, "_OVERHEAD", -np.inf)
    guide = gpaug.AutoLatentGaussian(compared)
    svi = gpaug.ConjugateSVI(compared, guide, optim=None)
    svi.run(jax.random.key(0), 2, TIME, TIME, REAL, progress_bar=False)
    assert "a chain of 40 steps of 2 (walk, shock)" in repr(guide)
    with pytest.raises(gpaug.NotConjugateError, match="data depend on several"):
        svi.run(jax.random.key(0), 2, TIME, TIME[::-1], REAL, progress_bar=False)


@pytest.mark.slow
def test_no_array_of_steps_by_steps(monkeypatch):
    """The sizes differ, so that the shapes of a compiled step identify them."""
    rows, steps = 3001, 613

    def model(t, y=None):
        scale = numpyro.sample("scale", dist.HalfNormal(1))
        a = numpyro.sample("a", dist.Normal(0, 5).expand([2]).to_event(1))
        walk = numpyro.sample("walk", dist.GaussianRandomWalk(scale, steps))
        with numpyro.plate("data", rows):
            logits = a[0] + a[1] * t / steps + walk[t]
            numpyro.sample("y", dist.Bernoulli(logits=logits), obs=y)

    args = (rng.integers(0, n, rows) for n in (steps, 2))
    args = tuple(jnp.asarray(x) for x in args)
    guide = gpaug.AutoLatentGaussian(model)
    svi = gpaug.ConjugateSVI(model, guide)
    state = svi.init(jax.random.key(0), *args)
    assert "a chain of 613 steps of 1 (walk), 2 others" in repr(guide)
    step = jax.jit(lambda state, *args: svi.update(state, *args)[1])
    text = step.lower(state, *args).compile().as_text()
    shapes = {
        tuple(map(int, s.split(","))) for s in re.findall(r"f32\[([\d,]+)\]", text)
    }
    assert any(steps in shape for shape in shapes)
    for shape in shapes:
        assert np.prod(shape) < steps**2, shape
