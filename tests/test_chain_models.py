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
# Several rows at a step, steps without rows.
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


def slopes(t, item, x, y=None):
    """Two walks of the same steps, an intercept and a slope, and the noise learnt."""
    noise = numpyro.sample("noise", dist.HalfNormal(1))
    scale = numpyro.sample("scale", dist.HalfNormal(1).expand([2]).to_event(1))
    walks = numpyro.sample("walks", dist.GaussianRandomWalk(scale, STEPS))
    with numpyro.plate("data", len(t)):
        loc = walks[0, t] + walks[1, t] * x
        numpyro.sample("y", dist.Normal(loc, noise), obs=y)


def panel(t, item, x, y=None):
    """A walk of every item, in the location, and another in the scale."""
    scale = numpyro.sample("scale", dist.HalfNormal(1))
    with numpyro.plate("items", 3):
        level = numpyro.sample("level", dist.GaussianRandomWalk(scale, STEPS))
        spread = numpyro.sample("spread", dist.GaussianRandomWalk(0.1, STEPS))
    with numpyro.plate("data", len(t)):
        law = dist.Normal(level[item, t], jnp.exp(spread[item, t]))
        numpyro.sample("y", law, obs=y)


def fitted(model, y, steps=60, **how):
    guide = gpaug.AutoLatentGaussian(model)
    svi = gpaug.ConjugateSVI(model, guide, **how)
    args = TIME, ITEM, X, y
    result = svi.run(jax.random.key(0), steps, *args, progress_bar=False)
    return svi.posterior(result), result, guide


FORMS = pytest.mark.parametrize(
    ("model", "y", "form"),
    [
        (counts, COUNTS, r"a chain of 40 steps of 2 \(walk, shock\), 5 others"),
        (slopes, REAL, r"a chain of 40 steps of 2 \(walks\), 0 others"),
        (panel, REAL, r"3 chains of 40 steps of 2 \(level, spread\), 0 others"),
    ],
)


@pytest.mark.slow
@FORMS
def test_a_chain_fits_what_a_matrix_fits(x64, monkeypatch, model, y, form):
    found = []
    for overhead in (np.inf, -np.inf):
        monkeypatch.setattr(costs, "_OVERHEAD", overhead)
        found.append(fitted(model, y))
    (dense, one, _), (posterior, other, guide) = found
    assert re.search(form + " dense", repr(guide))
    np.testing.assert_allclose(other.losses[-1], one.losses[-1], rtol=1e-8)
    for name in [k for k in one.params if "latents" not in k]:
        np.testing.assert_allclose(other.params[name], one.params[name], rtol=1e-5)
    table, expected = posterior.summary(), dense.summary()
    for column in ("mean", "sd"):
        np.testing.assert_allclose(table[column], expected[column], atol=1e-5)
    new = TIME[:30], ITEM[:30], X[:30]
    predicted, there = posterior.predict_y(*new), dense.predict_y(*new)
    np.testing.assert_allclose(predicted.mean, there.mean, rtol=1e-5)
    np.testing.assert_allclose(predicted.variance, there.variance, rtol=1e-5)


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
    # Of many rows no matrix is made.
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


@pytest.mark.slow  # quick in test_faults_files.py
def test_files_of_a_chain(of_steps, tmp_path):
    posterior, *_ = of_steps
    posterior.save(tmp_path / "fit.npz")
    loaded = gpaug.Posterior.load(tmp_path / "fit.npz", counts)
    new = TIME[:9], ITEM[:9], X[:9]
    found, expected = (
        p.predict_f(*new, steps=50, site="walk") for p in (loaded, posterior)
    )
    np.testing.assert_array_equal(found, expected)


@pytest.mark.slow
def test_draws_of_a_chain(of_steps):
    posterior, result, guide = of_steps
    new = TIME[:9], ITEM[:9], X[:9]
    expected = posterior.predict_y(*new)
    predictive = numpyro.infer.Predictive(
        counts, guide=guide, params=result.params, num_samples=3000
    )
    draws = predictive(jax.random.key(0), *new)["y"]
    np.testing.assert_allclose(draws.mean(0), expected.mean, rtol=0.15)


@pytest.mark.slow
def test_the_density_of_draws(of_steps):
    """With it the mean of log ratios is the bound, NumPyro's way."""
    _, result, guide = of_steps
    args = TIME, ITEM, X, COUNTS
    substituted = numpyro.handlers.substitute(guide, data=result.params)

    def log_ratio(key):
        """The log-density of data and values over that of the values' draw."""
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


@pytest.mark.slow
def test_the_evidence_of_a_walk_against_a_grid(monkeypatch):
    """A walk's scale integrated, with Normal data: the density of its draws enters."""
    t = np.delete(np.arange(30), [4, 5, 20])
    y = 0.5 * np.cumsum(np.random.default_rng(5).normal(size=30))[t]
    y += 0.3 * np.random.default_rng(6).normal(size=len(t))

    def model(t, y=None):
        scale = numpyro.sample("scale", dist.HalfNormal(1))
        walk = numpyro.sample("walk", dist.GaussianRandomWalk(scale, 30))
        with numpyro.plate("data", len(t)):
            numpyro.sample("y", dist.Normal(walk[t], 0.3), obs=y)

    scale = np.linspace(0.01, 4, 2000)
    values, vectors = np.linalg.eigh(np.minimum(t[:, None], t) + 1.0)
    variances = scale[:, None] ** 2 * values + 0.09
    terms = np.log(2 * np.pi * variances) + np.square(vectors.T @ y) / variances
    density = np.exp(-0.5 * (terms.sum(-1) + scale**2)) * np.sqrt(2 / np.pi)
    evidence = np.log(density.sum() * (scale[1] - scale[0]))

    monkeypatch.setattr(costs, "_OVERHEAD", -np.inf)
    nested = gpaug.NestedVI(model, num_points=128, progress_bar=False)
    nested.run(jax.random.key(0), t, y)
    found = nested.get_extra_fields()
    error = found["log_evidence_error"]
    assert abs(found["log_evidence"] - evidence) < 4 * error < 0.3
    guide = gpaug.AutoLatentGaussian(model)
    guide.setup(t, y)
    assert "a chain of 30 steps" in repr(guide)
    mean = (scale * density).sum() / density.sum()
    draws = nested.get_samples()
    np.testing.assert_allclose(draws["scale"].mean(), mean, rtol=0.05)
    step = np.diff(draws["walk"], axis=-1).std() / draws["scale"].mean()
    np.testing.assert_allclose(step, 1, atol=0.25)


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
def test_single_precision_of_a_long_walk(monkeypatch):
    """A walk of 20000 steps, seen at one in fifty, and an intercept that it can stand
    for, against the Kalman filter in double precision."""
    steps, scale, noise = 20_000, 0.05, 0.4
    rng = np.random.default_rng(0)
    t = np.arange(25, steps, 50)
    walk = np.cumsum(scale * rng.normal(size=steps))
    y = 3 + walk[t] + noise * rng.normal(size=len(t))

    def model(t, y=None):
        scale = numpyro.param("scale", 0.05, constraint=dist.constraints.positive)
        a = numpyro.sample("a", dist.Normal(0, 5.0))
        walk = numpyro.sample("walk", dist.GaussianRandomWalk(scale, steps))
        with numpyro.plate("data", len(t)):
            numpyro.sample("y", dist.Normal(a + walk[t], noise), obs=y)

    guide = gpaug.AutoLatentGaussian(model)
    svi = gpaug.ConjugateSVI(model, guide, optim=None)
    fit = svi.run(jax.random.key(0), 10, t, y, progress_bar=False)
    assert "a chain of 20000 steps of 1 (walk), 1 others" in repr(guide)
    cover = 25 + scale**2 * (np.minimum(t[:, None], t) + 1)
    whole = cover + noise**2 * np.eye(len(t))
    factor = np.linalg.cholesky(whole)
    evidence = -0.5 * np.square(np.linalg.solve(factor, y)).sum()
    evidence -= np.log(np.diag(factor)).sum() + 0.5 * len(t) * np.log(2 * np.pi)
    np.testing.assert_allclose(-fit.losses[-1], evidence, atol=0.05)
    found = svi.posterior(fit).predict_f(t, site="walk")
    past = scale**2 * (np.minimum(np.arange(steps)[:, None], t) + 1)
    mean = past @ np.linalg.solve(whole, y)
    prior = scale**2 * (np.arange(steps) + 1)
    variance = prior - np.square(np.linalg.solve(factor, past.T)).sum(0)
    np.testing.assert_allclose(found.mean, mean, atol=2e-3 * np.abs(mean).max())
    np.testing.assert_allclose(found.variance, variance, rtol=2e-3)


@pytest.mark.slow
def test_no_array_of_steps_by_steps(monkeypatch):
    """Sizes that are told apart in the shapes of a compiled step."""
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
