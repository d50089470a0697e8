# SPDX-License-Identifier: Apache-2.0
"""Models, means and closed forms for the tests of Gaussian Wasserstein inference."""

from __future__ import annotations

import jax.numpy as jnp
import numpy as np
import numpyro
import numpyro.distributions as dist

import numpyro_gpaug as gpaug
from tests.models import covariance
from tests.problems import toy

LENGTHSCALES, VARIANCES, MEANS = (1.0, 0.7, 1.3), (1.0, 2.0, 3.0), (0.5, 0.0, -0.5)


def three(X, y=None, *, Z, batch_size=None):
    """Three classes, each with a kernel and a prior mean of its own."""
    positive = dist.constraints.positive
    lengthscale = numpyro.param("lengthscale", jnp.ones((3, 1)), constraint=positive)
    kernel = gpaug.kernels.SquaredExponential(lengthscale, jnp.array(VARIANCES))
    gp = gpaug.GaussianProcess("f", kernel, Z, mean=jnp.array(MEANS), num_latents=3)
    with numpyro.plate("data", X.shape[0], subsample_size=batch_size) as i:
        y = None if y is None else jnp.asarray(y)[i]
        numpyro.sample("y", gpaug.RobustMax(gp(jnp.asarray(X)[i])), obs=y)


def linear(X):
    """A mean for three classes."""
    return X @ numpyro.param("W", 0.3 * jnp.eye(X.shape[1], 3))


def three_classes(num=40):
    """Inputs and labels, by NumPy."""
    X = np.asarray(toy(num)[0])
    return X, (X[:, 0] > 0).astype(int) + (X[:, 1] > 0.5)


def sparse_covariance(X, Z, lengthscale, variance, tril):
    """Return the covariances of the prior and of the sparse posterior ``K - A' A + A' S
    A``, by NumPy.
    """
    hyper = {"lengthscale": lengthscale, "variance": variance}
    X, Z = np.asarray(X, float), np.asarray(Z, float)
    K, gram = covariance(X, X, **hyper), covariance(Z, Z, **hyper)
    A = np.linalg.solve(np.linalg.cholesky(gram), covariance(Z, X, **hyper))
    spread = np.tril(np.asarray(tril, float)).T @ A
    return K, K - A.T @ A + spread.T @ spread


def root(matrix):
    """Symmetric square root by NumPy."""
    values, vectors = np.linalg.eigh(matrix)
    return (vectors * np.sqrt(np.maximum(values, 0))) @ vectors.T


def exact_distance(m, K, n, R):
    """The squared distance between Gaussians by NumPy."""
    half = root(K)
    cross = np.trace(root(half @ R @ half))
    return np.sum((m - n) ** 2) + np.trace(K) + np.trace(R) - 2 * cross


def somewhere(inducing=5):
    """Params of a fit of three classes that is at no optimum, by NumPy."""
    rng = np.random.default_rng(0)
    half = 0.2 * rng.normal(size=(3, inducing, inducing))
    return {
        "lengthscale": np.asarray(LENGTHSCALES)[:, None],
        "W": rng.normal(size=(2, 3)),
        "f.v_auto_tril": np.tril(np.eye(inducing) + half),
    }
