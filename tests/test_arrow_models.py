# SPDX-License-Identifier: Apache-2.0
"""Models whose latents come in groups: found, fitted and predicted like dense ones."""

import re

import jax
import jax.numpy as jnp
import numpy as np
import numpyro
import numpyro.distributions as dist
import pytest

import numpyro_gpaug as gpaug
from numpyro_gpaug.model import arrow, forms
from numpyro_gpaug.predict import posterior as predict

N = 400
rng = np.random.default_rng(0)
T = rng.normal(size=N)
GROUP, ITEM = rng.integers(0, 40, N), rng.integers(0, 20, N)
ETA = 0.5 + rng.normal(size=40)[GROUP] + 0.5 * rng.normal(size=20)[ITEM] - 0.3 * T
COUNTS, REAL = rng.poisson(np.exp(ETA)), ETA + 0.5 * rng.normal(size=N)
WIDE = jnp.array([5.0, 1.0])


def crossed(t, group, item, y=None, *, members=40):
    """A random intercept and slope, another grouping, fixed effects."""
    beta = numpyro.sample("beta", dist.Normal(0, WIDE).to_event(1))
    scale = numpyro.sample("scale", dist.HalfNormal(1).expand([3]).to_event(1))
    with numpyro.plate("groups", members):
        a = numpyro.sample("a", dist.Normal(0, scale[0]))
        b = numpyro.sample("b", dist.Normal(beta[1], scale[1]))
    with numpyro.plate("items", 20):
        c = numpyro.sample("c", dist.Normal(0, scale[2]))
    eta = beta[0] + a[group] + b[group] * t + c[item]
    numpyro.deterministic("eta", eta)
    numpyro.deterministic("average", eta.mean())
    with numpyro.plate("data", len(t)):
        numpyro.sample("y", dist.Poisson(jnp.exp(eta)), obs=y)


def slopes(t, group, item, y=None):
    """Two numbers of each group, one in the mean, one in the scale."""
    loc = numpyro.sample("loc", dist.Normal(0, 3))
    with numpyro.plate("groups", 40):
        z = numpyro.sample("z", dist.Normal(0, jnp.array([0.5, 0.2])).to_event(1))
    with numpyro.plate("data", len(t)):
        law = dist.Normal(loc + z[group, 0], jnp.exp(-0.5 + z[group, 1]))
        numpyro.sample("y", law, obs=y)


def nested(t, group, item, y=None):
    """Members of a matrix of two plates, and an effect of each datum."""
    noise = numpyro.param("noise", 0.5, constraint=dist.constraints.positive)
    with numpyro.plate("items", 20, dim=-1), numpyro.plate("groups", 40, dim=-2):
        e = numpyro.sample("e", dist.Normal(0, 1))
    with numpyro.plate("data", len(t)):
        own = numpyro.sample("own", dist.Normal(0, 0.3))
        numpyro.sample("y", dist.Normal(e[group, item] + own, noise), obs=y)


def fitted(model, y, steps=60, **how):
    guide = gpaug.AutoLatentGaussian(model)
    svi = gpaug.ConjugateSVI(model, guide, **how)
    args = T, GROUP, ITEM, y
    result = svi.run(jax.random.key(0), steps, *args, progress_bar=False)
    return svi.posterior(result), result, guide


@pytest.fixture
def either(monkeypatch):
    """Fits a model as a dense Gaussian, and as an arrow whatever it costs."""

    def fit(model, y, **how):
        found = []
        for overhead in (np.inf, -np.inf):
            with monkeypatch.context() as patched:
                patched.setattr(forms, "_OVERHEAD", overhead)
                found.append(fitted(model, y, **how))
        return found

    return fit


@pytest.mark.parametrize(
    ("model", "y", "form"),
    [
        (crossed, COUNTS, r"40 groups of 2 \(a, b\), 22 others"),
        (slopes, REAL, r"40 groups of 2 \(z\), 1 others"),
        pytest.param(
            nested, REAL, r"800 groups of 1 \(e\), 400 others", marks=pytest.mark.slow
        ),
    ],
)
def test_an_arrow_fits_what_a_matrix_fits(x64, either, monkeypatch, model, y, form):
    (dense, one, _), (posterior, other, guide) = either(model, y)
    assert re.search(f"an arrow: {form} dense", repr(guide))
    np.testing.assert_allclose(other.losses[-1], one.losses[-1], rtol=1e-6)
    names = [k for k in one.params if "latents" not in k]
    for name in names:
        np.testing.assert_allclose(other.params[name], one.params[name], rtol=1e-3)
    table, expected = posterior.summary(), dense.summary()
    for column in ("mean", "sd"):
        np.testing.assert_allclose(table[column], expected[column], atol=1e-3)
    new = T[:50], GROUP[:50], ITEM[:50]
    predicted, there = posterior.predict_y(*new), dense.predict_y(*new)
    np.testing.assert_allclose(predicted.mean, there.mean, rtol=1e-3)
    # Of many rows no matrix is made: the same by groups.
    monkeypatch.setattr(arrow, "_MOST", 0)
    rows = (x[:49] for x in new)
    np.testing.assert_allclose(
        posterior.predict_y(*rows).variance, there.variance[:49], rtol=1e-3
    )


def test_more_groups_than_one_digit_tells(monkeypatch):
    def model(group, y=None):
        with numpyro.plate("groups", 3000):
            a = numpyro.sample("a", dist.Normal(0, 1))
        with numpyro.plate("data", N):
            numpyro.sample("y", dist.Normal(a[group], 1), obs=y)

    monkeypatch.setattr(forms, "_OVERHEAD", -np.inf)
    group = rng.choice([2, 1023, 1024, 1500, 2047, 2048, 2999], N)
    guide = gpaug.AutoLatentGaussian(model)
    svi = gpaug.ConjugateSVI(model, guide)
    fit = svi.run(jax.random.key(0), 3, group, REAL, progress_bar=False)
    assert "an arrow: 3000 groups of 1 (a), 0 others" in repr(guide)
    a = svi.posterior(fit)["a"]
    rows = np.bincount(group, minlength=3000)
    means = np.bincount(group, REAL, minlength=3000) / (rows + 1)
    np.testing.assert_allclose(a.mean, means, atol=1e-4)
    np.testing.assert_allclose(a.variance, 1 / (rows + 1), rtol=1e-4)


@pytest.fixture(scope="module")
def of_groups():
    with pytest.MonkeyPatch.context() as patched:
        patched.setattr(forms, "_OVERHEAD", -np.inf)
        yield fitted(crossed, COUNTS)


def test_new_groups_and_sums_over_groups(of_groups):
    posterior, result, _ = of_groups
    new = T[:9], np.full(9, 45), ITEM[:9]
    found = posterior.predict_f(*new, members=60, site="a")
    old = posterior["a"]
    np.testing.assert_allclose(found.mean[:40], old.mean, rtol=1e-4, atol=1e-5)
    np.testing.assert_allclose(found.variance[:40], old.variance, rtol=1e-4)
    scale = result.params["scale_auto_loc"]
    np.testing.assert_allclose(found.mean[40:], 0, atol=1e-6)
    np.testing.assert_allclose(found.variance[40:], scale[0] ** 2, rtol=1e-4)
    average = posterior.predict_f(T, GROUP, ITEM, site="average")
    joint = posterior.predict_f(T, GROUP, ITEM, site="eta", full_covariance=True)
    np.testing.assert_allclose(average.mean, joint.mean.mean(), rtol=1e-4)
    np.testing.assert_allclose(average.variance, joint.variance.mean(), rtol=1e-3)
    draws = posterior.sample(
        jax.random.key(1), T, GROUP, ITEM, site="eta", sample_shape=(2000,)
    )
    spread = np.sqrt(np.diagonal(joint.variance))
    np.testing.assert_allclose(draws.std(0) / spread, 1, atol=0.1)
    np.testing.assert_allclose((draws.mean(0) - joint.mean) / spread, 0, atol=0.1)


def test_what_looks_at_several_groups_is_refused(of_groups, monkeypatch):
    posterior, *_ = of_groups
    monkeypatch.setattr(arrow, "_MOST", 0)
    with pytest.raises(gpaug.NotConjugateError, match="'average' look at several"):
        posterior.predict_f(T[:8], GROUP[:8], ITEM[:8], site="average")

    def paired(first, second, y=None):
        with numpyro.plate("groups", 40):
            a = numpyro.sample("a", dist.Normal(0, 1))
            b = numpyro.sample("b", dist.Normal(0, 1))
        with numpyro.plate("data", len(first)):
            numpyro.sample("y", dist.Normal(a[first] + b[second], 1), obs=y)

    monkeypatch.setattr(forms, "_OVERHEAD", -np.inf)
    guide = gpaug.AutoLatentGaussian(paired)
    svi = gpaug.ConjugateSVI(paired, guide, optim=None)
    svi.run(jax.random.key(0), 2, GROUP, GROUP, REAL, progress_bar=False)
    assert "40 groups of 2 (a, b)" in repr(guide)
    with pytest.raises(gpaug.NotConjugateError, match="data look at several groups"):
        svi.run(jax.random.key(0), 2, GROUP, GROUP[::-1], REAL, progress_bar=False)


def test_what_a_datum_compares_is_not_a_group(monkeypatch):
    def preferred(first, second, y=None):
        with numpyro.plate("players", 40):
            f = numpyro.sample("f", dist.Normal(0, 1))
        with numpyro.plate("data", len(first)):
            law = dist.Bernoulli(logits=f[first] - f[second])
            numpyro.sample("y", law, obs=y)

    monkeypatch.setattr(forms, "_OVERHEAD", -np.inf)
    guide = gpaug.AutoLatentGaussian(preferred)
    guide.setup(GROUP, GROUP[::-1], REAL > 0)
    assert "40 Gaussian latents, dense" in repr(guide)


def test_files_and_draws_of_an_arrow(of_groups, tmp_path):
    posterior, result, guide = of_groups
    posterior.save(tmp_path / "fit.npz")
    loaded = predict.Posterior.load(tmp_path / "fit.npz", crossed)
    new = T[:9], GROUP[:9], ITEM[:9]
    expected = posterior.predict_y(*new)
    np.testing.assert_array_equal(loaded.predict_y(*new).mean, expected.mean)
    predictive = numpyro.infer.Predictive(
        crossed, guide=guide, params=result.params, num_samples=3000
    )
    draws = predictive(jax.random.key(0), *new)["y"]
    np.testing.assert_allclose(draws.mean(0), expected.mean, rtol=0.15)


def test_minibatches_of_rows():
    def batched(t, group, y=None):
        with numpyro.plate("groups", 40):
            a = numpyro.sample("a", dist.Normal(0, 1))
        with numpyro.plate("data", N, subsample_size=100 if y is not None else None):
            t, group, y = (
                x if x is None else numpyro.subsample(x, event_dim=0)
                for x in (t, group, y)
            )
            numpyro.sample("y", dist.Bernoulli(logits=a[group] - 0.3 * t), obs=y)

    def whole(t, group, y=None):
        with numpyro.plate("groups", 40):
            a = numpyro.sample("a", dist.Normal(0, 1))
        with numpyro.plate("data", N):
            numpyro.sample("y", dist.Bernoulli(logits=a[group] - 0.3 * t), obs=y)

    means = []
    for model, steps in ((batched, 600), (whole, 20)):
        with pytest.MonkeyPatch.context() as patched:
            patched.setattr(forms, "_OVERHEAD", -np.inf)
            guide = gpaug.AutoLatentGaussian(model)
            svi = gpaug.ConjugateSVI(model, guide, optim=None)
            args = T, GROUP, (REAL > 0).astype(int)
            fit = svi.run(jax.random.key(0), steps, *args, progress_bar=False)
        assert "an arrow" in repr(guide)
        means.append(svi.posterior(fit)["a"])
    np.testing.assert_allclose(means[0].mean, means[1].mean, atol=0.1)
    np.testing.assert_allclose(means[0].variance, means[1].variance, rtol=0.1)


def test_no_array_of_groups_by_groups_or_rows_by_groups(monkeypatch):
    """Sizes that are told apart in the shapes of a compiled step."""
    rows, groups, items = 3001, 613, 53

    def model(group, item, y=None):
        scale = numpyro.sample("scale", dist.HalfNormal(1).expand([2]).to_event(1))
        with numpyro.plate("groups", groups):
            a = numpyro.sample("a", dist.Normal(0, scale[0]))
        with numpyro.plate("items", items):
            c = numpyro.sample("c", dist.Normal(0, scale[1]))
        with numpyro.plate("data", rows):
            numpyro.sample("y", dist.Bernoulli(logits=a[group] + c[item]), obs=y)

    monkeypatch.setattr(forms, "_OVERHEAD", -np.inf)
    rng = np.random.default_rng(0)
    args = (rng.integers(0, n, rows) for n in (groups, items, 2))
    args = tuple(jnp.asarray(x) for x in args)
    guide = gpaug.AutoLatentGaussian(model)
    svi = gpaug.ConjugateSVI(model, guide)
    state = svi.init(jax.random.key(0), *args)
    step = jax.jit(lambda state, *args: svi.update(state, *args)[1])
    text = step.lower(state, *args).compile().as_text()
    shapes = {
        tuple(map(int, s.split(","))) for s in re.findall(r"f32\[([\d,]+)\]", text)
    }
    assert any(groups in shape and items in shape for shape in shapes)
    for shape in shapes:
        assert max(shape) <= rows
        several = [n for n in shape if n >= groups]
        assert len(several) <= 1, shape
