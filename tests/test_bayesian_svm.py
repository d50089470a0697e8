# SPDX-License-Identifier: Apache-2.0
"""The Bayesian support vector machine, end to end."""

import json
from functools import cache
from pathlib import Path

import jax
import numpy as np
import numpyro
import numpyro.distributions as dist
from scipy.special import ndtr

import numpyro_gpaug as gpaug

GOLDEN = json.loads(
    (Path(__file__).parent / "golden" / "problem_bayesian_svm.json").read_text()
)
KEY = jax.random.key(0)
QUIET = {"progress_bar": False}


def golden_model(X, y=None, *, inducing, predictive="probit"):
    kernel = gpaug.kernels.SquaredExponential(0.9, 1.3)
    gp = gpaug.GaussianProcess("f", kernel, inducing=inducing, jitter=0)
    with numpyro.plate("data", X.shape[0]):
        numpyro.sample("y", gpaug.BayesianSVM(gp(X), predictive), obs=y)


def primal(X, y=None, *, scale, batch=None):
    """The linear machine: no process, a weight per column."""
    w = numpyro.sample("w", dist.Normal(0, scale).to_event(1))
    with numpyro.plate("data", X.shape[0], subsample_size=batch) as i:
        y = None if y is None else y[i]
        numpyro.sample("y", gpaug.BayesianSVM(X[i] @ w), obs=y)


@cache
def fitter(model, size):
    """Return one fitter for all fits with equal numbers of latents: it compiles once
    for each shape.
    """
    return gpaug.ConjugateSVI(model, gpaug.AutoSparseGP(model), None, "augmented")


def fit(model, steps, *args, **kwargs):
    svi = fitter(model, np.shape(kwargs.get("inducing", kwargs.get("scale"))))
    return svi, svi.run(KEY, steps, *args, **kwargs, **QUIET)


def gaussian(params, site):
    """Mean and covariance of a fitted block."""
    cover = np.linalg.inv(params[f"{site}_auto_precision"])
    return cover @ np.asarray(params[f"{site}_auto_potential"]), cover


def cavi(A, residual, y, steps=200):
    """Coordinate ascent as published, corrected, in NumPy.

    :param A: rows that map a standard normal vector to the function values.
    :param residual: prior variance of the function values given that vector.
    :return: mean and covariance of the vector, and the bound.
    """
    s = 2 * np.asarray(y) - 1.0
    eye = np.eye(A.shape[1])
    mean, cover = np.zeros(A.shape[1]), eye
    for _ in range(steps):
        spread = residual + np.einsum("nm,mk,nk->n", A, cover, A)
        weights = 1 / np.sqrt((1 - s * (A @ mean)) ** 2 + spread)
        cover = np.linalg.inv(eye + A.T * weights @ A)
        mean = cover @ A.T @ (s * (1 + weights))
    m = A @ mean
    v = residual + np.einsum("nm,mk,nk->n", A, cover, A)
    slack = 1 - s * m
    divergence = np.trace(cover) + mean @ mean - len(mean) - np.linalg.slogdet(cover)[1]
    return mean, cover, -np.sum(slack + np.hypot(slack, np.sqrt(v))) - divergence / 2


# -- batch -----------------------------------------------------------------------------


def test_both_predictive_rules_of_one_fit(x64, tmp_path) -> None:
    X, Z = np.array(GOLDEN["X"]), np.array(GOLDEN["Z"])
    y = (np.array(GOLDEN["y"]) + 1) // 2
    svi, result = fit(golden_model, 100, X, y, inducing=Z)
    fitted = svi.posterior(result)
    golden = GOLDEN["predict"]
    new = np.array(golden["Xs"])
    default = fitted.predict_y(new).probs
    np.testing.assert_allclose(default, golden["p_probit"], rtol=1e-7)
    # The rule is chosen at prediction; a saved fit keeps the choice open.
    fitted.save(tmp_path / "svm.npz")
    loaded = gpaug.Posterior.load(tmp_path / "svm.npz", golden_model)
    ratio = loaded.predict_y(new, predictive="normalized").probs
    np.testing.assert_allclose(ratio, golden["p_ratio"], rtol=1e-7)
    scores = fitted.log_prob(new, np.array([0, 1, 1, 0]), predictive="normalized")
    expected = np.abs(np.array([1.0, 0, 0, 1]) - golden["p_ratio"])
    np.testing.assert_allclose(np.exp(scores), expected, rtol=1e-7)


# -- the linear machine in its primal form ---------------------------------------------


def test_primal_golden(x64) -> None:
    golden = GOLDEN["linear"]
    X, y = np.array(golden["X"]), (np.array(golden["y"]) + 1) // 2
    scale = np.sqrt(np.diag(np.array(golden["prior_cov"])))
    svi, result = fit(primal, 200, X, y, scale=scale)
    np.testing.assert_allclose(-result.losses[-1], golden["elbo"], rtol=1e-10)
    assert np.diff(result.losses).max() < 1e-12
    posterior = svi.posterior(result)
    mean, cover = np.array(golden["mu"]), np.array(golden["Sigma"])
    new = np.array([[1.0, 0.3], [-2.0, 1.0]])
    m, v = new @ mean, np.einsum("nd,de,ne->n", new, cover, new)
    probs = posterior.predict_y(new, scale=scale).probs
    np.testing.assert_allclose(probs, ndtr(m / np.sqrt(1 + v)), rtol=1e-6)


def test_primal_by_minibatches(x64) -> None:
    rng = np.random.default_rng(5)
    X = rng.normal(size=(500, 4))
    y = (X @ [2.0, -1.0, 0.5, 0.0] + rng.normal(size=500) > 0).astype(int)
    mean, cover, _ = cavi(X, 0.0, y)
    _, result = fit(primal, 2000, X, y, scale=np.ones(4), batch=50)
    got, spread = gaussian(result.params, "w")
    deviation = np.sqrt(np.diag(cover))
    assert np.abs((got - mean) / deviation).max() < 0.15
    np.testing.assert_allclose(np.sqrt(np.diag(spread)), deviation, rtol=0.05)
