# SPDX-License-Identifier: Apache-2.0
"""Softmax and logistic-softmax: integrals, golden problem, augmentation, fits."""

import json
from pathlib import Path

import jax
import jax.numpy as jnp
import numpy as np
import numpyro
import numpyro.distributions as dist
import optax
import pytest

import numpyro_gpaug as gpaug
from numpyro_gpaug.likelihoods.augmentation import draw_auxiliaries, lookup_augmentation
from numpyro_gpaug.likelihoods.expectations import expected_log_prob, predictive
from numpyro_gpaug.math import log_sum
from numpyro_gpaug.math.log_sum import (
    EXPONENTIAL,
    LOGISTIC,
    expected_log_sum,
    expected_shares,
)
from numpyro_gpaug.testing import check_augmentation

GOLDEN = json.loads(
    (Path(__file__).parent / "golden" / "problem_logistic_softmax.json").read_text()
)
KEY = jax.random.key(0)
LINKS = {"softmax": EXPONENTIAL, "logistic": LOGISTIC}


def brute(link, m, v, num=401):
    """``E log S`` and ``E g_0 / S`` of two classes by a product trapezoid."""
    z = np.linspace(-8, 8, num)
    w = np.exp(-0.5 * z * z)
    w /= w.sum()
    first, second = (
        link.log(np.asarray(m)[i] + np.sqrt(np.asarray(v)[i]) * z) for i in (0, 1)
    )
    log_s = np.logaddexp(first[:, None], second[None])
    return w @ log_s @ w, w @ np.exp(first[:, None] - log_s) @ w


@pytest.mark.parametrize("name", LINKS)
def test_two_classes_against_brute_force(dtype: str, name: str) -> None:
    link, rng = LINKS[name], np.random.default_rng(0)
    scale = np.logspace(-4, 1, 12)[:, None]
    v = scale * np.exp(rng.normal(size=(12, 2)) / 2)
    m = 3 * rng.normal(size=(12, 2))
    at = jnp.asarray(m, dtype), jnp.asarray(v, dtype)
    value, slopes = jax.vmap(jax.value_and_grad(
        lambda m, v: expected_log_sum(link, m, v), (0, 1)
    ))(*at)  # fmt: skip
    shares = expected_shares(link, *at)
    tolerance = 1e-9 if dtype == "float64" else 1e-5
    step = 1e-3
    for i in range(12):
        expected, share = brute(link, m[i], v[i])
        np.testing.assert_allclose(value[i], expected, rtol=0, atol=tolerance)
        np.testing.assert_allclose(shares[i, 0], share, rtol=0, atol=tolerance)
        moved = [brute(link, m[i] + [s, 0], v[i])[0] for s in (step, -step)]
        by_mean = (moved[0] - moved[1]) / (2 * step)
        np.testing.assert_allclose(slopes[0][i, 0], by_mean, atol=3 * tolerance + 1e-7)
        moved = [brute(link, m[i], v[i] * [1 + s, 1])[0] for s in (step, -step)]
        by_variance = (moved[0] - moved[1]) / (2 * step)
        np.testing.assert_allclose(
            v[i, 0] * slopes[1][i, 0], by_variance, atol=3 * tolerance + 1e-7
        )


@pytest.mark.parametrize("num_classes", [3, 100])
def test_many_classes_against_draws(num_classes: int) -> None:
    rng = np.random.default_rng(1)
    m = rng.normal(size=num_classes).astype(np.float32)
    v = np.exp(rng.normal(size=num_classes)).astype(np.float32)
    f = m + np.sqrt(v) * rng.normal(size=(200_000, num_classes))
    for link in (EXPONENTIAL, LOGISTIC):
        log_s = np.logaddexp.reduce(link.log(f), axis=1)
        error = 5 * log_s.std() / np.sqrt(len(f))
        value = expected_log_sum(link, jnp.asarray(m), jnp.asarray(v))
        assert abs(value - log_s.mean()) < error + 1e-5
        share = np.exp(link.log(f[:, 0]) - log_s)
        error = 5 * share.std() / np.sqrt(len(f))
        assert abs(expected_shares(link, m, v)[0] - share.mean()) < error


def test_softmax_identities() -> None:
    """Shares are the slopes, and a shift of all latents shifts the value."""
    rng = np.random.default_rng(2)
    m = jnp.asarray(4 * rng.normal(size=(6, 5)))
    v = jnp.asarray(np.exp(rng.normal(size=(6, 5))))

    def total(m, v):
        return expected_log_sum(EXPONENTIAL, m, v).sum()

    slope, curvature = jax.grad(total, (0, 1))(m, v)
    shares = expected_shares(EXPONENTIAL, m, v)
    np.testing.assert_allclose(slope, shares, atol=2e-6)
    np.testing.assert_allclose(shares.sum(-1), 1, atol=1e-6)
    assert curvature.min() > -1e-6
    value = expected_log_sum(EXPONENTIAL, m, v)
    shifted = expected_log_sum(EXPONENTIAL, m + 50, v)
    np.testing.assert_allclose(shifted, value + 50, rtol=1e-6)


def test_blocks_of_rows_change_nothing(monkeypatch) -> None:
    rng = np.random.default_rng(3)
    m = jnp.asarray(rng.normal(size=(11, 2, 3)))
    v = jnp.ones_like(m)

    def both(m):
        value = expected_log_sum(LOGISTIC, m, v)
        return value.sum(), (value, expected_shares(LOGISTIC, m, v))

    whole = jax.grad(both, has_aux=True)(m)
    monkeypatch.setattr(log_sum, "BLOCK", 15)
    parts = jax.grad(both, has_aux=True)(m)
    for a, b in zip(jax.tree.leaves(whole), jax.tree.leaves(parts), strict=True):
        assert a.shape == b.shape
        np.testing.assert_allclose(a, b, rtol=1e-5, atol=1e-6)


def test_golden_expectations(x64) -> None:
    rows = GOLDEN["expected_loglik"]
    m, v = (
        {"logits": jnp.asarray([row[k] for row in rows])} for k in ("m", "v")
    )  # fmt: skip
    y = jnp.asarray([row["y"] for row in rows])
    for cls, bound in (
        (gpaug.LogisticSoftmax, "bound_collapsed"),
        (gpaug.LogisticSoftmaxMeanField, "bound_mf"),
    ):
        d = cls(m["logits"])
        exact = expected_log_prob(d, y, m, v)
        np.testing.assert_allclose(exact, [r["exact"] for r in rows], atol=2e-11)
        augmented = lookup_augmentation(cls).bound(d, y, m, v)
        np.testing.assert_allclose(augmented, [r[bound] for r in rows], rtol=1e-10)
        probs = predictive(d, m, v).probs
        own = probs[jnp.arange(len(rows)), y]
        np.testing.assert_allclose(own, [r["predictive"] for r in rows], atol=1e-10)


def golden_model(X, y=None, *, inducing, likelihood):
    variance, lengthscale = np.asarray(GOLDEN["hyp"]).T
    kernel = gpaug.kernels.SquaredExponential(lengthscale[:, None], variance)
    gp = gpaug.GaussianProcess("f", kernel, inducing, num_latents=3, jitter=0.0)
    with numpyro.plate("data", X.shape[0]):
        numpyro.sample("y", likelihood(gp(X)), obs=y)


@pytest.mark.parametrize("which", ["full", "sparse"])
@pytest.mark.parametrize("kind", ["collapsed", "mf"])
def test_golden_problem(x64, kind: str, which: str) -> None:
    X, y = jnp.asarray(GOLDEN["X"]), jnp.asarray(GOLDEN["y"])
    Z = X if which == "full" else jnp.asarray(GOLDEN["Z"])
    mean_field = kind == "mf"
    likelihood = gpaug.LogisticSoftmaxMeanField if mean_field else gpaug.LogisticSoftmax
    guide = gpaug.AutoSparseGP(golden_model)
    svi = gpaug.ConjugateSVI(golden_model, guide, updates="augmented")
    result = svi.run(
        KEY, 60, X, y, inducing=Z, likelihood=likelihood, progress_bar=False
    )
    golden = GOLDEN[f"{kind}_{which}"]
    np.testing.assert_allclose(-result.losses[-1], golden["elbo"], rtol=1e-10)
    trace = golden["elbo_trace_from_prior"][1:5]
    np.testing.assert_allclose(-result.losses[: len(trace)], trace, rtol=1e-8)
    f = svi.posterior(result).predict_f(X)
    np.testing.assert_allclose(f.mean, golden["m"], rtol=1e-8, atol=1e-10)
    np.testing.assert_allclose(f.variance, golden["v"], rtol=1e-8)


def test_conformance() -> None:
    check_augmentation(gpaug.LogisticSoftmax(jnp.zeros((3, 3))), jnp.array([0, 1, 2]))


@pytest.mark.slow
def test_conformance_in_float64(x64) -> None:
    zeros = jnp.zeros((5, 3), jnp.float64)
    check_augmentation(gpaug.LogisticSoftmax(zeros), jnp.array([0, 1, 2, 2, 0]))


def test_the_mean_field_bound_is_never_tighter() -> None:
    rng = np.random.default_rng(4)
    m = {"logits": jnp.asarray(4 * rng.normal(size=(50, 4)))}
    v = {"logits": jnp.asarray(np.exp(2 * rng.normal(size=(50, 4))))}
    y = jnp.asarray(rng.integers(4, size=50))
    d = gpaug.LogisticSoftmax(m["logits"])
    collapsed = lookup_augmentation(gpaug.LogisticSoftmax).bound(d, y, m, v)
    mean_field = lookup_augmentation(gpaug.LogisticSoftmaxMeanField).bound(d, y, m, v)
    slack = 1e-5 * (1 + jnp.abs(collapsed))
    assert jnp.all(mean_field <= collapsed + slack)
    assert jnp.all(collapsed <= expected_log_prob(d, y, m, v) + slack)


@pytest.mark.slow
def test_gibbs_conditionals_sample_the_posterior(x64) -> None:
    """One datum, three classes: auxiliaries and latents in turn, against a grid."""
    prior, y, d = 2.0, jnp.zeros((), int), gpaug.LogisticSoftmax(jnp.zeros(3))
    augmentation = lookup_augmentation(gpaug.LogisticSoftmax)

    def sweep(f, key):
        aux_key, f_key = jax.random.split(key)
        conditionals = augmentation.conditional(d, y, {"logits": f})
        aux = draw_auxiliaries(aux_key, conditionals)
        potential, precision = augmentation.natural(d, y, aux, {})["logits"]
        scale = 1 / jnp.sqrt(precision + 1 / prior)
        noise = jax.random.normal(f_key, f.shape)
        return scale * (scale * potential + noise), f

    @jax.jit
    def chain(key):
        return jax.lax.scan(sweep, jnp.zeros(3), jax.random.split(key, 300))[1][50:]

    draws = np.asarray(jax.vmap(chain)(jax.random.split(KEY, 300)))
    grid = np.linspace(-8, 8, 61)
    f = np.stack(np.meshgrid(grid, grid, grid, indexing="ij"), -1).reshape(-1, 3)
    log_density = gpaug.LogisticSoftmax(jnp.asarray(f)).log_prob(0)
    weight = np.exp(log_density - 0.5 * (f**2).sum(-1) / prior)
    weight /= weight.sum()
    for power in (1, 2):
        expected = weight @ f**power
        chains = (draws**power).mean(1)
        error = chains.std(0) / np.sqrt(len(chains))
        assert np.all(np.abs(chains.mean(0) - expected) < 4 * error)


def classifier(X, y=None, *, inducing, likelihood, num_classes=3, batch_size=None):
    positive = dist.constraints.positive
    lengthscale = numpyro.param("lengthscale", 1.0, constraint=positive)
    kernel = gpaug.kernels.SquaredExponential(lengthscale, 4.0)
    gp = gpaug.GaussianProcess("f", kernel, inducing, num_latents=num_classes)
    with numpyro.plate("data", X.shape[0], subsample_size=batch_size) as index:
        y = None if y is None else y[index]
        numpyro.sample("y", likelihood(gp(X[index])), obs=y)


def categorical(f):
    return dist.Categorical(logits=f)


def blobs(num=90, seed=0):
    rng = np.random.default_rng(seed)
    y = rng.integers(3, size=num)
    angle = 2 * np.pi * y / 3
    X = np.stack([np.cos(angle), np.sin(angle)], 1) + 0.6 * rng.normal(size=(num, 2))
    return jnp.asarray(X, jnp.float32), jnp.asarray(y)


def fit(X, y, updates="auto", num_steps=40, optim=None, **kwargs):
    svi = gpaug.ConjugateSVI(
        classifier, gpaug.AutoSparseGP(classifier), optim, updates=updates
    )
    arguments = {"inducing": X[:20], **kwargs}
    return svi, svi.run(KEY, num_steps, X, y, progress_bar=False, **arguments)


@pytest.mark.parametrize("likelihood", [categorical, gpaug.LogisticSoftmax])
def test_exact_sites_rise_to_a_stationary_point(x64, likelihood) -> None:
    X, y = blobs()
    X = jnp.asarray(X, jnp.float64)
    svi, result = fit(X, y, num_steps=250, likelihood=likelihood)
    assert np.diff(result.losses[1:]).max() < 1e-8
    # At the optimum the mean of v is the pull of the likelihood's slopes: compare with
    # an independent gradient of the bound.
    f = svi.posterior(result).predict_f(X)

    def total(m, v):
        return expected_log_prob(likelihood(m), y, {"logits": m}, {"logits": v}).sum()

    slope = jax.grad(total)(f.mean, f.variance)
    kernel = gpaug.kernels.SquaredExponential(1.0, 4.0)
    gram = np.asarray(kernel(X[:20], X[:20])) + 1e-10 * 20 * np.eye(20)
    cross = np.asarray(kernel(X, X[:20]))
    mean = cross @ np.linalg.solve(gram, cross.T @ np.asarray(slope))
    np.testing.assert_allclose(f.mean, mean, atol=1e-4)
    probs = svi.posterior(result).predict_y(X).probs
    np.testing.assert_allclose(probs.sum(-1), 1, atol=1e-9)
    assert (probs.argmax(-1) == y).mean() > 0.75


def test_minibatches_and_hyperparameters_of_the_softmax() -> None:
    X, y = blobs(300)
    full = fit(X, y, likelihood=categorical, optim=optax.adam(0.05))[1]
    svi, result = fit(
        X, y, likelihood=categorical, optim=optax.adam(0.01), batch_size=60,
        num_steps=300,
    )  # fmt: skip
    loss = svi.evaluate(result.state, X, y, inducing=X[:20], likelihood=categorical)
    assert np.isfinite(result.losses).all()
    assert loss < full.losses[-1] + 0.03 * len(X)


@pytest.mark.parametrize(
    ("labels", "message"),
    [([0, 1, 3], "support"), ([-1, 1, 1], "support")],
)
def test_labels_outside_the_classes(labels: list[int], message: str) -> None:
    X = jnp.arange(3.0)[:, None]
    with pytest.raises(ValueError, match=message):
        fit(X, jnp.array(labels), likelihood=gpaug.LogisticSoftmax, num_steps=1)


def test_one_class_is_refused() -> None:
    with pytest.raises(ValueError, match="at least two"):
        gpaug.LogisticSoftmax(jnp.zeros((4, 1)))


def test_a_class_without_examples_is_fitted() -> None:
    X, y = blobs()
    y = jnp.where(y == 2, 0, y)
    svi, result = fit(X, y, likelihood=gpaug.LogisticSoftmax, num_steps=10)
    probs = svi.posterior(result).predict_y(X).probs
    assert np.isfinite(probs).all()
    assert (probs[:, 2] < 0.5).all()


def test_the_distribution_is_a_numpyro_citizen() -> None:
    f = jnp.asarray([[0.5, -1.0, 2.0], [0.0, 0.0, 3.0]])
    d = gpaug.LogisticSoftmax(f)
    reference = dist.Categorical(logits=jax.nn.log_sigmoid(f))
    y = jnp.array([2, 0])
    np.testing.assert_allclose(d.log_prob(y), reference.log_prob(y), rtol=1e-6)
    np.testing.assert_allclose(d.probs, reference.probs, rtol=1e-6)
    draws = d.sample(KEY, (20_000,))
    counts = np.stack([(draws == k).mean(0) for k in range(3)], -1)
    np.testing.assert_allclose(counts, d.probs, atol=0.02)
    again = jax.tree.unflatten(*jax.tree.flatten(d)[::-1])
    np.testing.assert_array_equal(again.logits, d.logits)
    assert d.expand((4, 2)).batch_shape == (4, 2)
    assert d.enumerate_support().shape == (3, 2)
    batched = jax.vmap(lambda f, y: gpaug.LogisticSoftmax(f).log_prob(y))(f, y)
    np.testing.assert_allclose(batched, d.log_prob(y), rtol=1e-6)
