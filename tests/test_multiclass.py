# SPDX-License-Identifier: Apache-2.0
"""Softmax and logistic-softmax: integrals, golden problem, augmentation, fits."""

import json
from functools import partial
from pathlib import Path

import jax
import jax.numpy as jnp
import numpy as np
import numpyro
import numpyro.distributions as dist
import pytest

import numpyro_gpaug as gpaug
from numpyro_gpaug.likelihoods.contract import lookup_augmentation
from numpyro_gpaug.likelihoods.expectations import expected_log_prob, predictive
from numpyro_gpaug.math.log_sum import (
    EXPONENTIAL,
    LOGISTIC,
    expected_log_sum,
    expected_shares,
)
from numpyro_gpaug.testing import check_augmentation
from tests.conftest import slow
from tests.models import covariance

GOLDEN = json.loads(
    (Path(__file__).parent / "golden" / "problem_logistic_softmax.json").read_text()
)
KEY = jax.random.key(0)
LINKS = {"softmax": EXPONENTIAL, "logistic": LOGISTIC}


def brute(link, m, v, num=161):
    """``E log S`` and ``E g_0 / S`` of two classes by a product trapezoid: at these
    variances its error is below 1e-12."""
    z = np.linspace(-8, 8, num)
    w = np.exp(-0.5 * z * z)
    w /= w.sum()
    first, second = (
        link.log(np.asarray(m)[i] + np.sqrt(np.asarray(v)[i]) * z) for i in (0, 1)
    )
    log_s = np.logaddexp(first[:, None], second[None])
    return w @ log_s @ w, w @ np.exp(first[:, None] - log_s) @ w


@pytest.mark.parametrize(
    ("dtype", "name"),
    [
        ("float32", "logistic"),
        ("float64", "softmax"),
        slow("float32", "softmax"),
        slow("float64", "logistic"),
    ],
    indirect=["dtype"],
)
def test_two_classes_against_brute_force(dtype: str, name: str) -> None:
    link, rng = LINKS[name], np.random.default_rng(0)
    scale = np.logspace(-4, 1, 12)[:, None]
    v = scale * np.exp(rng.normal(size=(12, 2)) / 2)
    m = 3 * rng.normal(size=(12, 2))

    @jax.jit
    def everything(m, v):
        both = jax.value_and_grad(partial(expected_log_sum, link), (0, 1))
        return *jax.vmap(both)(m, v), expected_shares(link, m, v)

    found = everything(m.astype(dtype), v.astype(dtype))
    value, slopes, shares = jax.tree.map(np.asarray, found)
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


def test_golden_expectations(x64) -> None:
    rows = GOLDEN["expected_loglik"]
    m, v = (np.asarray([row[k] for row in rows]) for k in ("m", "v"))
    y = np.asarray([row["y"] for row in rows])

    @jax.jit
    def everything(m, v):
        means, variances = {"logits": m}, {"logits": v}
        return [
            (
                lookup_augmentation(cls).bound(cls(m), y, means, variances),
                expected_log_prob(cls(m), y, means, variances),
                predictive(cls(m), means, variances).probs,
            )
            for cls in (gpaug.LogisticSoftmax, gpaug.LogisticSoftmaxMeanField)
        ]

    golden = {k: [row[k] for row in rows] for k in rows[0]}
    names = ("bound_collapsed", "bound_mf")
    for name, found in zip(names, everything(m, v), strict=True):
        augmented, exact, probs = found
        np.testing.assert_allclose(augmented, golden[name], rtol=1e-10)
        np.testing.assert_allclose(exact, golden["exact"], atol=2e-11)
        own = np.asarray(probs)[np.arange(len(rows)), y]
        np.testing.assert_allclose(own, golden["predictive"], atol=1e-10)


def golden_model(X, y=None, *, inducing, likelihood):
    variance, lengthscale = np.asarray(GOLDEN["hyp"]).T
    kernel = gpaug.kernels.SquaredExponential(lengthscale[:, None], variance)
    gp = gpaug.GaussianProcess("f", kernel, inducing, num_latents=3, jitter=0.0)
    with numpyro.plate("data", X.shape[0]):
        numpyro.sample("y", likelihood(gp(X)), obs=y)


@pytest.mark.parametrize(
    ("kind", "which"),
    [
        ("collapsed", "full"),
        slow("mf", "sparse"),
        slow("collapsed", "sparse"),
        slow("mf", "full"),
    ],
)
def test_golden_problem(x64, kind: str, which: str) -> None:
    X, y = np.asarray(GOLDEN["X"]), np.asarray(GOLDEN["y"])
    Z = X if which == "full" else np.asarray(GOLDEN["Z"])
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


@pytest.mark.slow
def test_conformance(dtype) -> None:
    zeros = jnp.zeros((5, 3), dtype)
    check_augmentation(gpaug.LogisticSoftmax(zeros), jnp.array([0, 1, 2, 2, 0]))


def test_the_mean_field_bound_is_never_tighter() -> None:
    rng = np.random.default_rng(4)
    m = (4 * rng.normal(size=(50, 4))).astype("float32")
    v = np.exp(2 * rng.normal(size=(50, 4))).astype("float32")
    y = rng.integers(4, size=50)

    @jax.jit
    def values(m, v):
        at = gpaug.LogisticSoftmax(m), y, {"logits": m}, {"logits": v}
        classes = gpaug.LogisticSoftmax, gpaug.LogisticSoftmaxMeanField
        bounds = [lookup_augmentation(cls).bound(*at) for cls in classes]
        return *bounds, expected_log_prob(*at)

    collapsed, mean_field, exact = map(np.asarray, values(m, v))
    slack = 1e-5 * (1 + np.abs(collapsed))
    assert np.all(mean_field <= collapsed + slack)
    assert np.all(collapsed <= exact + slack)


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


def run(svi, X, y, num_steps, likelihood, **kwargs):
    kwargs = {"inducing": np.asarray(X)[:10], "likelihood": likelihood, **kwargs}
    return svi.run(KEY, num_steps, X, y, progress_bar=False, **kwargs)


@pytest.mark.parametrize(
    "likelihood",
    [categorical, slow(gpaug.LogisticSoftmax)],
)
def test_exact_sites_rise_to_a_stationary_point(x64, likelihood) -> None:
    X, y = (np.asarray(a) for a in blobs(30))
    X = X.astype("float64")
    svi = gpaug.ConjugateSVI(classifier, gpaug.AutoSparseGP(classifier), None)
    result = run(svi, X, y, 150, likelihood)
    assert np.diff(result.losses[1:]).max() < 1e-8
    # At the optimum the mean of v is the product of the map with the likelihood's
    # slopes: compare with an independent gradient of the bound.
    f = svi.posterior(result).predict_f(X)

    def total(m, v):
        return expected_log_prob(likelihood(m), y, {"logits": m}, {"logits": v}).sum()

    slope = np.asarray(jax.jit(jax.grad(total))(f.mean, f.variance))
    gram = covariance(X[:10], X[:10], 1.0, 4.0) * (1 + 1e-10 * np.eye(10))
    cross = covariance(X, X[:10], 1.0, 4.0)
    mean = cross @ np.linalg.solve(gram, cross.T @ slope)
    np.testing.assert_allclose(f.mean, mean, atol=1e-4)
    probs = np.asarray(svi.posterior(result).predict_y(X).probs)
    np.testing.assert_allclose(probs.sum(-1), 1, atol=1e-9)
    assert (probs.argmax(-1) == y).mean() > 0.75
    # One class is absent; the program is already compiled.
    result = run(svi, X, np.where(y == 2, 0, y), 10, likelihood)
    probs = np.asarray(svi.posterior(result).predict_y(X).probs)
    assert np.isfinite(probs).all()
    assert (probs[:, 2] < 0.5).all()


@pytest.mark.parametrize(
    ("labels", "message"),
    [([0, 1, 3], "support"), ([-1, 1, 1], "support")],
)
def test_labels_outside_the_classes(labels: list[int], message: str) -> None:
    X = np.arange(3.0)[:, None]
    svi = gpaug.ConjugateSVI(classifier, gpaug.AutoSparseGP(classifier))
    with pytest.raises(ValueError, match=message):
        run(svi, X, np.array(labels), 1, gpaug.LogisticSoftmax)


def test_one_class_is_refused() -> None:
    with pytest.raises(ValueError, match="at least two"):
        gpaug.LogisticSoftmax(jnp.zeros((4, 1)))
