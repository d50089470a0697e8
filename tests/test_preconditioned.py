# SPDX-License-Identifier: Apache-2.0
"""q(u) = N(K mu, (K^-1 + Sigma^-1)^-1) with a diagonal Sigma."""

import jax
import jax.numpy as jnp
import numpy as np
import numpyro
import numpyro.distributions as dist
import optax
import pytest
from numpyro import handlers
from numpyro.infer import SVI

import numpyro_gpaug as gpaug
from numpyro_gpaug.model.marginals import moments_of

from .conftest import assert_close

KEY = jax.random.key(0)


def model(X, y=None, *, inducing, num_latents=None, slope=False):
    kernel = gpaug.kernels.Matern32(0.7, 2.0)
    gp = gpaug.GaussianProcess("f", kernel, inducing, 0.3, num_latents, jitter=0.0)
    shift = 0.0
    if slope:
        normal = dist.Normal(jnp.zeros(X.shape[1]), 2.0).to_event(1)
        shift = X @ numpyro.sample("slope", normal)
    with numpyro.plate("data", X.shape[0]):
        f = gp(X)
        if num_latents is None:
            numpyro.sample("y", dist.Bernoulli(logits=f + shift), obs=y)
        else:
            numpyro.sample("y", dist.Bernoulli(logits=f).to_event(1), obs=y)


def data(dtype="float64", size=12, width=None):
    rng = np.random.default_rng(1)
    X = jnp.asarray(rng.normal(size=(size, 2)), dtype)
    shape = (size,) if width is None else (size, width)
    return X, jnp.asarray(rng.random(shape) < 0.6, int)


def at(guide, X, y, **kwargs):
    """Params of a fit that is not at rest."""
    svi = SVI(model, guide, optax.adam(0.1), gpaug.TraceAnalytic_ELBO())
    return svi.run(KEY, 10, X, y, progress_bar=False, **kwargs).params


@pytest.mark.parametrize("num_latents", [None, 2])
def test_it_is_the_gaussian_its_draws_come_from(dtype, num_latents) -> None:
    """Moments and KL by the factor of K + Sigma, and by that of K."""
    X, y = data(dtype, width=num_latents)
    kwargs = {"inducing": X[:5], "num_latents": num_latents}
    guide = gpaug.AutoSparseGP(model, covariance="preconditioned")
    params = at(guide, X, y, **kwargs)
    ours = gpaug.TraceAnalytic_ELBO().loss(KEY, params, model, guide, X, y, **kwargs)
    seeded = handlers.seed(handlers.substitute(guide, data=params), 0)
    q = handlers.trace(seeded).get_trace(X, y, **kwargs)["f.v"]["fn"]
    assert q.event_shape == guide.structure.blocks[0].shape

    def plain(*args, **kwargs):
        return {"f.v": numpyro.sample("f.v", q)}

    other = gpaug.TraceAnalytic_ELBO().loss(KEY, {}, model, plain, X, y, **kwargs)
    assert_close(ours, other, factor=30)
    posterior = gpaug.Posterior.from_guide(model, guide, params, X, y, **kwargs)
    f = posterior.predict_f(X, full_covariance=True)
    kernel = gpaug.kernels.Matern32(0.7, 2.0)
    factor = jnp.linalg.cholesky(kernel(X[:5], X[:5]))
    A = jnp.linalg.solve(factor, kernel(X[:5], X))
    spread = moments_of(q).whitener @ A
    expected = kernel(X, X) - A.T @ A + jnp.swapaxes(spread, -1, -2) @ spread
    assert_close(f.variance, expected, factor=30)
    assert_close(f.mean, 0.3 + A.T @ q.mean.T, factor=30)


def test_it_contains_the_optimum_of_a_full_process(x64) -> None:
    """With Z = X and one latent per datum, the optimal precision is that of K plus a
    diagonal (equation A.5 of the paper)."""
    X, y = data()
    svi = gpaug.ConjugateSVI(model, gpaug.AutoSparseGP(model))
    best = svi.run(KEY, 60, X, y, inducing=X, progress_bar=False)
    f = svi.posterior(best).predict_f(X)
    kernel = gpaug.kernels.Matern32(0.7, 2.0)

    def expected(variance):
        means, variances = {"logits": f.mean}, {"logits": variance}
        fn = dist.Bernoulli(logits=f.mean)
        return gpaug.expected_log_prob(fn, y, means, variances).sum()

    noise = -0.5 / jax.grad(expected)(f.variance)
    weights = jnp.linalg.solve(kernel(X, X), f.mean - 0.3)
    targets = (kernel(X, X) + jnp.diag(noise)) @ weights
    params = {"f.v_auto_targets": targets, "f.v_auto_noise": noise}
    guide = gpaug.AutoSparseGP(model, covariance="preconditioned")
    guide.setup(X, y, inducing=X)
    loss = gpaug.TraceAnalytic_ELBO().loss
    ours = loss(KEY, params, model, guide, X, y, inducing=X)
    np.testing.assert_allclose(ours, best.losses[-1], rtol=1e-8)
    slopes = jax.grad(lambda p: loss(KEY, p, model, guide, X, y, inducing=X))(params)
    assert all(np.abs(s).max() < 1e-5 for s in slopes.values())


def test_a_singular_kernel_matrix_needs_no_jitter() -> None:
    """Duplicate inducing inputs, float32, jitter 0."""
    X, y = data("float32")
    inducing = jnp.concatenate([X[:4], X[:4]])
    guide = gpaug.AutoSparseGP(model, covariance="preconditioned").setup(
        X, y, inducing=inducing
    )
    params = {
        "f.v_auto_targets": jnp.linspace(-1, 1, 8),
        "f.v_auto_noise": jnp.full(8, 0.01),
    }

    def loss(params):
        elbo = gpaug.TraceAnalytic_ELBO()
        return elbo.loss(KEY, params, model, guide, X, y, inducing=inducing)

    value, slopes = jax.value_and_grad(loss)(params)
    assert np.isfinite(value)
    assert all(np.isfinite(s).all() for s in slopes.values())
    posterior = gpaug.Posterior.from_guide(
        model, guide, params, X, y, inducing=inducing
    )
    assert (posterior.predict_f(X).variance > 0).all()


def test_beside_a_weight_vector(x64) -> None:
    X, y = data()
    kwargs = {"inducing": X[:5], "slope": True}
    guide = gpaug.AutoSparseGP(model, covariance="preconditioned")
    params = at(guide, X, y, **kwargs)
    assert {"slope_auto_loc", "slope_auto_tril", "f.v_auto_noise"} <= params.keys()
    posterior = gpaug.Posterior.from_guide(model, guide, params, X, y, **kwargs)
    assert posterior.predict_y(X[:3]).probs.shape == (3,)
    process = next(b for b in guide.structure.blocks if b.is_process)
    with pytest.raises(ValueError, match="depends on the kernel matrix"):
        guide.gaussian(process, params)
