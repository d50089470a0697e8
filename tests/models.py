# SPDX-License-Identifier: Apache-2.0
"""One model for every route, and its bound by NumPy."""

from contextlib import ExitStack

import jax
import jax.numpy as jnp
import numpy as np
import numpyro
import numpyro.distributions as dist
from numpyro import handlers

import numpyro_gpaug as gpaug

LENGTHSCALE, VARIANCE = 0.8, 2.0


def classifier(
    X, y=None, *, inducing, num_latents=None, batch_size=None, size=None,
    weights=None, mask=None, learn=False, lengthscale=LENGTHSCALE,
):  # fmt: skip
    """A (sparse) process with Bernoulli observations, one or several per datum.

    :param batch_size: rows of a batch drawn by the plate.
    :param size: total number of rows, if ``X`` and ``y`` are a batch passed in.
    :param weights: per-datum scale.
    :param mask: per-datum mask.
    :param learn: whether the lengthscale is a param.
    """
    if learn:
        positive = dist.constraints.positive
        lengthscale = numpyro.param("lengthscale", lengthscale, constraint=positive)
    kernel = gpaug.kernels.SquaredExponential(lengthscale, VARIANCE)
    gp = gpaug.GaussianProcess(
        "f", kernel, inducing=inducing, num_latents=num_latents, jitter=0.0
    )
    passed_in = size is not None
    rows, chosen = (size, X.shape[0]) if passed_in else (X.shape[0], batch_size)
    with (
        numpyro.plate("data", rows, subsample_size=chosen) as idx,
        ExitStack() as stack,
    ):
        if not passed_in:
            X, y, weights, mask = (
                None if a is None else a[idx] for a in (X, y, weights, mask)
            )
        d = dist.Bernoulli(logits=gp(X))
        if weights is not None:
            stack.enter_context(handlers.scale(scale=weights))
        if mask is not None:
            stack.enter_context(handlers.mask(mask=mask))
        numpyro.sample("y", d if num_latents is None else d.to_event(1), obs=y)


@jax.jit
def _covariances(kernel, a, b):
    return kernel(a, b)


def gram(kernel, a, b):
    """Covariances of a kernel in NumPy, by one program: operation by operation they
    take twenty."""
    return np.asarray(_covariances(kernel, a, b), float)


def covariance(a, b, lengthscale=LENGTHSCALE, variance=VARIANCE):
    """Squared-exponential covariance by NumPy."""
    difference = (np.asarray(a)[:, None] - np.asarray(b)[None]) / lengthscale
    return variance * np.exp(-0.5 * (difference**2).sum(-1))


def projection(X, Z, lengthscale=LENGTHSCALE, variance=VARIANCE):
    """``A = L^-1 K_ZX`` and the residual variance by NumPy."""
    factor = np.linalg.cholesky(covariance(Z, Z, lengthscale, variance))
    A = np.linalg.solve(factor, covariance(Z, X, lengthscale, variance))
    return A, variance - (A**2).sum(0)


def moments(X, Z, mean, cover, **hyper):
    """Mean and variance of f under ``v ~ N(mean, cover)`` by NumPy."""
    A, residual = projection(X, Z, **hyper)
    return A.T @ mean, residual + np.einsum("mn,mk,kn->n", A, cover, A)


def expected_terms(y, m, v, bound):
    """Expected log-likelihood per datum by NumPy: 150 Gauss-Hermite nodes, or the
    Polya-Gamma bound."""
    sign = 2 * np.asarray(y) - 1.0
    if bound == "augmented":
        return 0.5 * sign * m - np.log(2 * np.cosh(np.sqrt(m**2 + v) / 2))
    nodes, weights = np.polynomial.hermite_e.hermegauss(150)
    f = m[:, None] + np.sqrt(v)[:, None] * nodes
    return -np.logaddexp(0, -sign[:, None] * f) @ (weights / weights.sum())


def brute_bound(X, y, Z, q, bound="exact", weights=1.0, **hyper):
    """The evidence lower bound by NumPy.

    :param q: mean and covariance of v, with a leading axis over latents.
    """
    total = 0.0
    labels = np.asarray(y).reshape(len(X), -1)
    for mean, cover, label in zip(*q, labels.T, strict=True):
        m, v = moments(X, Z, mean, cover, **hyper)
        total += np.sum(weights * expected_terms(label, m, v, bound))
        log_det = np.linalg.slogdet(cover)[1]
        total -= 0.5 * (np.trace(cover) + mean @ mean - len(mean) - log_det)
    return total


def blocks_of(guide, params):
    """Mean and covariance of the guide's v, with a leading axis over latents."""
    (block,) = guide.structure.blocks
    size = block.shape[-1]
    if guide.covariance == "natural":
        precision = np.asarray(params[f"{block.site}_auto_precision"]).reshape(
            -1, size, size
        )
        cover = np.linalg.inv(precision)
        potential = np.asarray(params[f"{block.site}_auto_potential"]).reshape(-1, size)
        return np.einsum("cij,cj->ci", cover, potential), cover
    mean = np.asarray(params[f"{block.site}_auto_loc"]).reshape(-1, size)
    if guide.covariance == "dense":
        factor = np.tril(np.asarray(params[f"{block.site}_auto_tril"])).reshape(
            -1, size, size
        )
        return mean, factor @ np.swapaxes(factor, -1, -2)
    scale = np.asarray(params[f"{block.site}_auto_scale"]).reshape(-1, size)
    return mean, np.square(scale)[..., None] * np.eye(size)


def poisson_posterior(prior, A, y):
    """Mean and covariance of the best Gaussian for latents ``N(0, prior)`` and counts
    with rates ``exp(A z)``, by NumPy."""
    mean, covariance = np.zeros(len(prior)), prior
    for _ in range(100):
        m = A @ mean
        rate = np.exp(m + 0.5 * ((A @ covariance) * A).sum(1))
        information = (A.T * rate) @ A
        covariance = np.linalg.solve(np.eye(len(prior)) + prior @ information, prior)
        mean = 0.5 * (mean + covariance @ (A.T @ (rate * m + y - rate)))
    return mean, covariance


def draw_data(seed=0, rows=24, inducing=6, columns=2):
    """Inputs, labels (rows, 3) and inducing inputs, as JAX arrays."""
    rng = np.random.default_rng(seed)
    X = rng.uniform(-2, 2, (rows, columns))
    slope = rng.normal(size=(columns, 3))
    y = rng.random((rows, 3)) < 1 / (1 + np.exp(-3 * np.sin(X @ slope)))
    Z = rng.uniform(-2, 2, (inducing, columns))
    return jnp.asarray(X), jnp.asarray(y, int), jnp.asarray(Z)
