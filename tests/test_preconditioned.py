# SPDX-License-Identifier: Apache-2.0
"""q(u) = N(K mu, (K^-1 + Sigma^-1)^-1) with a diagonal Sigma."""

import jax
import numpy as np
import numpyro
import numpyro.distributions as dist
import pytest
from numpyro import handlers

import numpyro_gpaug as gpaug
from tests.conftest import assert_close, enable_x64, slow

KEY = jax.random.key(0)


def model(X, y=None, *, inducing, num_latents=None):
    kernel = gpaug.kernels.Matern32(0.7, 2.0)
    gp = gpaug.GaussianProcess("f", kernel, inducing, 0.3, num_latents, jitter=0.0)
    with numpyro.plate("data", X.shape[0]):
        f = gp(X)
        if num_latents is None:
            numpyro.sample("y", dist.Bernoulli(logits=f), obs=y)
        else:
            numpyro.sample("y", dist.Bernoulli(logits=f).to_event(1), obs=y)


def data(dtype="float64", size=12, width=None):
    rng = np.random.default_rng(1)
    X = rng.normal(size=(size, 2)).astype(dtype)
    shape = (size,) if width is None else (size, width)
    return X, (rng.random(shape) < 0.6).astype(int)


def matern(A, B):
    """The kernel by NumPy."""
    r = np.sqrt(3 * np.square((A[:, None] - B[None]) / 0.7).sum(-1))
    return 2 * (1 + r) * np.exp(-r)


def spread_params(dtype, num_latents, size=5):
    """Params that are at no optimum."""
    rng = np.random.default_rng(2)
    shape = (size,) if num_latents is None else (num_latents, size)
    return {
        "f.v_auto_targets": rng.normal(size=shape).astype(dtype),
        "f.v_auto_noise": rng.uniform(0.2, 2.0, shape).astype(dtype),
    }


@pytest.mark.parametrize(
    ("precision", "num_latents"),
    [
        ("float32", None),
        ("float64", 2),
        slow("float32", 2),
        slow("float64", None),
    ],
)
def test_it_is_the_gaussian_its_draws_come_from(precision, num_latents) -> None:
    """q(u) = N(K a, (K^-1 + Sigma^-1)^-1) with a = (K + Sigma)^-1 targets: moments by
    NumPy, and the KL as NumPyro has it for the Gaussian that draws come from."""
    with enable_x64(precision == "float64"):
        X, y = data(precision, width=num_latents)
        kwargs = {"inducing": X[:5], "num_latents": num_latents}
        guide = gpaug.AutoSparseGP(model, covariance="preconditioned")
        guide.setup(X, y, **kwargs)
        params = spread_params(precision, num_latents)

        @jax.jit
        def losses(params):
            seeded = handlers.seed(handlers.substitute(guide, data=params), 0)
            q = handlers.trace(seeded).get_trace(X, y, **kwargs)["f.v"]["fn"]

            def plain(*args, **kwargs):
                return {"f.v": numpyro.sample("f.v", q)}

            loss = gpaug.TraceAnalytic_ELBO().loss
            ours = loss(KEY, params, model, guide, X, y, **kwargs)
            return ours, loss(KEY, {}, model, plain, X, y, **kwargs), q

        ours, other, q = losses(params)
        assert q.event_shape == guide.structure.blocks[0].shape
        assert_close(ours, other, factor=30)
        posterior = gpaug.Posterior.from_guide(model, guide, params, X, y, **kwargs)
        f = posterior.predict_f(X, full_covariance=True)
        rows, Z = X.astype(float), X[:5].astype(float)
        K, cross = matern(Z, Z), matern(rows, Z)
        own = (np.atleast_2d(x).astype(float) for x in params.values())
        means, covariances = [], []
        for targets, noise in zip(*own, strict=True):
            inner = np.linalg.inv(K + np.diag(noise))
            means.append(0.3 + cross @ inner @ targets)
            covariances.append(matern(rows, rows) - cross @ inner @ cross.T)
        expected = np.stack(means, -1)
        assert_close(f.mean, expected.reshape(np.shape(f.mean)), factor=30)
        expected = np.stack(covariances)
        assert_close(f.variance, expected.reshape(np.shape(f.variance)), factor=30)


def test_it_contains_the_optimum_of_a_full_process(x64) -> None:
    """With Z = X and one latent per datum, the optimal precision is K's plus a diagonal
    (equation A.5 of the paper).
    """
    X, y = data()
    svi = gpaug.ConjugateSVI(model, gpaug.AutoSparseGP(model))
    best = svi.run(KEY, 60, X, y, inducing=X, progress_bar=False)
    f = svi.posterior(best).predict_f(X)
    K, mean = matern(X, X), np.asarray(f.mean)

    @jax.jit
    def curvature(mean, variance):
        def expected(variance):
            means, variances = {"logits": mean}, {"logits": variance}
            fn = dist.Bernoulli(logits=mean)
            return gpaug.expected_log_prob(fn, y, means, variances).sum()

        return jax.grad(expected)(variance)

    noise = -0.5 / np.asarray(curvature(f.mean, f.variance))
    targets = (K + np.diag(noise)) @ np.linalg.solve(K, mean - 0.3)
    params = {"f.v_auto_targets": targets, "f.v_auto_noise": noise}
    guide = gpaug.AutoSparseGP(model, covariance="preconditioned")
    guide.setup(X, y, inducing=X)
    loss = gpaug.TraceAnalytic_ELBO().loss
    ours, slopes = jax.jit(jax.value_and_grad(
        lambda params: loss(KEY, params, model, guide, X, y, inducing=X)
    ))(params)  # fmt: skip
    np.testing.assert_allclose(ours, best.losses[-1], rtol=1e-8)
    assert all(np.abs(s).max() < 1e-5 for s in slopes.values())


def test_a_singular_kernel_matrix_needs_no_jitter() -> None:
    """Duplicate inducing inputs, float32, jitter 0."""
    X, y = data("float32")
    inducing = np.concatenate([X[:4], X[:4]])
    guide = gpaug.AutoSparseGP(model, covariance="preconditioned").setup(
        X, y, inducing=inducing
    )
    params = {
        "f.v_auto_targets": np.linspace(-1, 1, 8, dtype="float32"),
        "f.v_auto_noise": np.full(8, 0.01, "float32"),
    }

    def loss(params):
        elbo = gpaug.TraceAnalytic_ELBO()
        return elbo.loss(KEY, params, model, guide, X, y, inducing=inducing)

    value, slopes = jax.jit(jax.value_and_grad(loss))(params)
    assert np.isfinite(value)
    assert all(np.isfinite(s).all() for s in slopes.values())
    posterior = gpaug.Posterior.from_guide(
        model, guide, params, X, y, inducing=inducing
    )
    assert np.all(np.asarray(posterior.predict_f(X).variance) > 0)
