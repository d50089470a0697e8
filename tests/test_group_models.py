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
from numpyro_gpaug.model import affine, costs
from tests.conftest import enable_x64, small_blocks

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
        likelihood = dist.Normal(loc + z[group, 0], jnp.exp(-0.5 + z[group, 1]))
        numpyro.sample("y", likelihood, obs=y)


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
    # It does not share the form that an earlier guide has found.
    guide.setup(*args)
    result = svi.run(jax.random.key(0), steps, *args, progress_bar=False)
    return svi.posterior(result), result, guide


def of_both_forms(model, y, **how):
    """Fit a model as a dense Gaussian, and in groups, at any cost."""
    found = []
    for overhead in (np.inf, -np.inf):
        with pytest.MonkeyPatch.context() as patched:
            patched.setattr(costs, "_OVERHEAD", overhead)
            found.append(fitted(model, y, **how))
    return found


def check_alike(dense, grouped, form):
    """Losses, params, tables and predictions of two fits."""
    (dense, one, _), (posterior, other, guide) = dense, grouped
    assert re.search(f"{form} dense", repr(guide))
    np.testing.assert_allclose(other.losses[-1], one.losses[-1], rtol=1e-6)
    for name in [k for k in one.params if "latents" not in k]:
        np.testing.assert_allclose(other.params[name], one.params[name], rtol=1e-3)
    table, expected = posterior.summary(), dense.summary()
    for column in ("mean", "sd"):
        np.testing.assert_allclose(table[column], expected[column], atol=1e-3)
    predicted, there = posterior.predict_y(*NEW), dense.predict_y(*NEW)
    np.testing.assert_allclose(predicted.mean, there.mean, rtol=1e-3)
    np.testing.assert_allclose(predicted.variance, there.variance, rtol=1e-3)


NEW = T[:9], GROUP[:9], ITEM[:9]


@pytest.fixture(scope="module")
def of_groups():
    with enable_x64(True):
        return of_both_forms(crossed, COUNTS)


def test_groups_fit_what_a_matrix_fits(x64, of_groups):
    check_alike(*of_groups, r"40 groups of 2 \(a, b\), 22 others")


@pytest.mark.slow
@pytest.mark.parametrize(
    ("model", "form"),
    [
        (slopes, r"40 groups of 2 \(z\), 1 others"),
        (nested, r"800 groups of 1 \(e\), 400 others"),
    ],
)
def test_other_groups_fit_what_a_matrix_fits(x64, model, form):
    check_alike(*of_both_forms(model, REAL), form)


@pytest.mark.slow
def test_rows_in_the_order_of_their_groups_fit_the_same(x64, of_groups):
    """In blocks, as with many rows: bound, its derivatives and Gaussian."""
    with small_blocks(2**14):
        _, (_, found, _) = of_both_forms(crossed, COUNTS)
    _, (_, expected, _) = of_groups
    np.testing.assert_allclose(found.losses, expected.losses, rtol=1e-10)
    for name, param in expected.params.items():
        np.testing.assert_allclose(found.params[name], param, atol=1e-6, err_msg=name)


def test_more_groups_than_one_digit_tells(monkeypatch):
    def model(group, y=None):
        with numpyro.plate("groups", 3000):
            a = numpyro.sample("a", dist.Normal(0, 1))
        with numpyro.plate("data", N):
            numpyro.sample("y", dist.Normal(a[group], 1), obs=y)

    monkeypatch.setattr(costs, "_OVERHEAD", -np.inf)
    group = rng.choice([2, 1023, 1024, 1500, 2047, 2048, 2999], N)
    guide = gpaug.AutoLatentGaussian(model)
    svi = gpaug.ConjugateSVI(model, guide)
    fit = svi.run(jax.random.key(0), 3, group, REAL, progress_bar=False)
    assert "3000 groups of 1 (a), 0 others" in repr(guide)
    # So one thread is enough.
    assert guide.structure.largest == 0
    a = svi.posterior(fit)["a"]
    rows = np.bincount(group, minlength=3000)
    means = np.bincount(group, REAL, minlength=3000) / (rows + 1)
    np.testing.assert_allclose(a.mean, means, atol=1e-4)
    np.testing.assert_allclose(a.variance, 1 / (rows + 1), rtol=1e-4)


def test_new_groups_and_sums_over_groups(x64, of_groups, monkeypatch):
    posterior, result, _ = of_groups[1]
    new = T[:9], np.full(9, 45), ITEM[:9]
    found = posterior.predict_f(*new, members=60, site="a")
    old = posterior["a"]
    np.testing.assert_allclose(found.mean[:40], old.mean, rtol=1e-4, atol=1e-5)
    np.testing.assert_allclose(found.variance[:40], old.variance, rtol=1e-4)
    scale = result.params["scale_auto_loc"]
    np.testing.assert_allclose(found.mean[40:], 0, atol=1e-6)
    np.testing.assert_allclose(found.variance[40:], scale[0] ** 2, rtol=1e-4)
    average = posterior.predict_f(*NEW, site="average")
    joint = posterior.predict_f(*NEW, site="eta", full_covariance=True)
    np.testing.assert_allclose(average.mean, joint.mean.mean(), rtol=1e-4)
    np.testing.assert_allclose(average.variance, joint.variance.mean(), rtol=1e-3)

    # With many rows that depend on one group each, results are computed by group,
    # without a matrix.
    def no_matrix(predictors):
        raise AssertionError(f"a matrix of {len(predictors.offset)} rows")

    monkeypatch.setattr(affine, "_LARGE", 0)
    again = posterior.predict_f(*(np.tile(x, 2) for x in NEW), site="average")
    np.testing.assert_allclose(again, average, rtol=1e-8)
    monkeypatch.setattr(affine.Predictors, "dense", property(no_matrix))
    found = posterior.predict_f(*(x[:7] for x in NEW), site="eta")
    np.testing.assert_allclose(found.mean, joint.mean[:7], rtol=1e-8)
    variance = np.diagonal(joint.variance)[:7]
    np.testing.assert_allclose(found.variance, variance, rtol=1e-8)
    monkeypatch.undo()
    for limit in ("_LARGE", "_MOST"):
        monkeypatch.setattr(affine, limit, 0)
    rows = [x[:8] for x in NEW]
    found = posterior.predict_f(*rows, site="eta", full_covariance=True)
    np.testing.assert_allclose(found.mean, joint.mean[:8], rtol=1e-8)
    np.testing.assert_allclose(found.variance, joint.variance[:8, :8], rtol=1e-8)
    with pytest.raises(gpaug.NotConjugateError, match="'average' depend on several"):
        posterior.predict_f(*rows, site="average")


def test_joint_draws_of_groups(x64, of_groups):
    posterior, *_ = of_groups[1]
    joint = posterior.predict_f(*NEW, site="eta", full_covariance=True)
    draws = posterior.sample(jax.random.key(1), *NEW, site="eta", sample_shape=(2000,))
    spread = np.sqrt(np.diagonal(joint.variance))
    np.testing.assert_allclose(draws.std(0) / spread, 1, atol=0.1)
    np.testing.assert_allclose((draws.mean(0) - joint.mean) / spread, 0, atol=0.1)


def test_what_looks_at_several_groups_is_refused(monkeypatch):
    def paired(first, second, y=None):
        with numpyro.plate("groups", 40):
            a = numpyro.sample("a", dist.Normal(0, 1))
            b = numpyro.sample("b", dist.Normal(0, 1))
        with numpyro.plate("data", len(first)):
            numpyro.sample("y", dist.Normal(a[first] + b[second], 1), obs=y)

    monkeypatch.setattr(costs, "_OVERHEAD", -np.inf)
    guide = gpaug.AutoLatentGaussian(paired)
    svi = gpaug.ConjugateSVI(paired, guide, optim=None)
    guide.setup(GROUP, GROUP, REAL)
    assert "40 groups of 2 (a, b)" in repr(guide)
    with pytest.raises(gpaug.NotConjugateError, match="data depend on several groups"):
        svi.run(jax.random.key(0), 2, GROUP, GROUP[::-1], REAL, progress_bar=False)
    state = svi.init(jax.random.key(0), GROUP, GROUP, REAL)
    evaluate = jax.jit(svi.evaluate)
    found = [evaluate(state, x, y, REAL) for x, y in (
        (GROUP, GROUP), (GROUP, GROUP[::-1]), (GROUP + 40, GROUP + 40),
    )]  # fmt: skip
    np.testing.assert_array_equal(np.isnan(found), [False, True, True])


def test_what_a_datum_compares_is_not_a_group(monkeypatch):
    def preferred(first, second, y=None):
        with numpyro.plate("players", 40):
            f = numpyro.sample("f", dist.Normal(0, 1))
        with numpyro.plate("data", len(first)):
            likelihood = dist.Bernoulli(logits=f[first] - f[second])
            numpyro.sample("y", likelihood, obs=y)

    monkeypatch.setattr(costs, "_OVERHEAD", -np.inf)
    guide = gpaug.AutoLatentGaussian(preferred)
    guide.setup(GROUP, GROUP[::-1], REAL > 0)
    assert "40 Gaussian latents, dense" in repr(guide)
    assert guide.structure.largest == 40


def test_no_array_of_groups_by_groups_or_rows_by_groups(monkeypatch):
    """The sizes differ, so that the shapes of a compiled step identify them."""
    rows, groups, items = 3001, 613, 53

    def model(group, item, y=None):
        scale = numpyro.sample("scale", dist.HalfNormal(1).expand([2]).to_event(1))
        with numpyro.plate("groups", groups):
            a = numpyro.sample("a", dist.Normal(0, scale[0]))
        with numpyro.plate("items", items):
            c = numpyro.sample("c", dist.Normal(0, scale[1]))
        with numpyro.plate("data", rows):
            numpyro.sample("y", dist.Bernoulli(logits=a[group] + c[item]), obs=y)

    monkeypatch.setattr(costs, "_OVERHEAD", -np.inf)
    rng = np.random.default_rng(0)
    args = (rng.integers(0, n, rows) for n in (groups, items, 2))
    args = tuple(jnp.asarray(x) for x in args)
    guide = gpaug.AutoLatentGaussian(model)
    svi = gpaug.ConjugateSVI(model, guide)
    state = svi.init(jax.random.key(0), *args)
    step = jax.jit(lambda state, *args: svi.update(state, *args)[1])
    text = step.lower(state, *args).as_text()
    shapes = {
        tuple(map(int, s.split("x"))) for s in re.findall(r"tensor<([\dx]+)xf32>", text)
    }
    assert any(groups in shape and items in shape for shape in shapes)
    for shape in shapes:
        assert np.prod(shape) < groups**2 < rows * groups, shape


@pytest.mark.parametrize("members", [3, 60])
def test_a_level_beside_groups_of_very_many_rows(members) -> None:
    """A level and effects compensate for each other: the variance of the level is that
    of the mean effect, and what determines it is a small part of the weights."""

    def model(group, y=None, *, members):
        level = numpyro.sample("level", dist.Normal(0, 10))
        with numpyro.plate("members", members):
            effect = numpyro.sample("effect", dist.Normal(0, 0.9))
        with numpyro.plate("data", len(group)):
            numpyro.sample("y", dist.Normal(level + effect[group], 0.65), obs=y)

    number = 200_000
    group, noise = np.sort(np.arange(number) % members), rng.normal(size=number)
    y = (3 + rng.normal(size=members)[group] + 0.65 * noise).astype("float32")
    svi = gpaug.ConjugateSVI(model, gpaug.AutoLatentGaussian(model), None)
    result = svi.run(
        jax.random.key(0), 20, group, y, members=members, progress_bar=False
    )
    level = svi.posterior(result)["level"]
    each = 0.9**2 + 0.65**2 * members / number
    variance = 1 / (0.01 + members / each)
    assert float(level.variance) == pytest.approx(variance, rel=0.1)
    means = np.bincount(group, y) * members / number
    expected = variance * means.sum() / each
    assert float(level.mean) == pytest.approx(expected, abs=0.1 * variance**0.5)
