# SPDX-License-Identifier: Apache-2.0
"""Inverse roots of kernel matrices: what float32 loses against float64."""

from __future__ import annotations

from functools import partial
from types import SimpleNamespace

import jax
import jax.numpy as jnp
import numpy as np
import numpyro
import numpyro.distributions as dist
import pytest

import numpyro_gpaug as gpaug
from numpyro_gpaug import kernels
from numpyro_gpaug.gp.projection import project, whitener
from numpyro_gpaug.inducing import kmeans
from numpyro_gpaug.math.linalg import inverse_cholesky
from numpyro_gpaug.math.whitening import inverse_root, least_jitter
from tests.conftest import enable_x64, slow
from tests.models import gram

NOISE = 0.05
SMOOTH, ROUGH = kernels.SquaredExponential, kernels.Matern52


@pytest.fixture(scope="module")
def problems():
    """A few columns, a smooth function, noise of standard deviation .05."""

    def make(seed: int, num: int, dim: int):
        rng = np.random.default_rng(seed)
        X = rng.normal(size=(num, dim)).astype(np.float32)
        waves = rng.normal(size=(dim, 5)) / 3
        f = np.sin(X @ waves + rng.uniform(0, 6, 5)).sum(1)
        y = (f - f.mean()) / f.std() + NOISE * rng.normal(size=num)
        return X, y.astype(np.float32), np.asarray(kmeans(X, 200))

    return {2: make(0, 400, 2), 4: make(1, 600, 4), 6: make(2, 500, 6)}


def regression(X, y=None, *, inducing, kernel, lengthscale, variance):
    gp = gpaug.GaussianProcess("f", kernel(lengthscale, variance), inducing)
    with numpyro.plate("data", X.shape[0]):
        numpyro.sample("y", dist.Normal(gp(X), NOISE), obs=y)


@pytest.fixture(scope="module")
def fitters():
    """One per dtype: it keeps what it found of the model's shapes and dtypes."""
    return {
        dtype: gpaug.ConjugateSVI(regression, gpaug.AutoSparseGP(regression))
        for dtype in ("float32", "float64")
    }


def bound(fitters, problem, dtype, **hyper) -> float:
    with enable_x64(dtype == "float64"):
        X, y, Z = (x.astype(dtype) for x in problem)
        hyper = {
            k: v if callable(v) else np.asarray(v, dtype) for k, v in hyper.items()
        }
        run = fitters[dtype].run(
            jax.random.key(0), 2, X, y, inducing=Z, progress_bar=False, **hyper
        )
        return -float(run.losses[-1])


USUAL, FAR = ((2.0, 3.0), (3.0, 10.0)), ((6.0, 300.0),)


@pytest.mark.parametrize(
    ("dim", "kernel", "scales", "most"),
    [
        (2, SMOOTH, USUAL, 2),
        slow(2, ROUGH, USUAL, 2),
        slow(4, SMOOTH, USUAL, 2),
        slow(4, ROUGH, USUAL, 2),
        slow(6, SMOOTH, USUAL, 2),
        slow(6, ROUGH, USUAL, 2),
        # 120000 times the variance of the noise: covariances rounded to float32 lose
        # 17, 8 and 20 nats.
        (2, SMOOTH, FAR, 4),
        slow(2, ROUGH, FAR, 4),
        slow(4, SMOOTH, FAR, 4),
    ],
)
def test_float32_loses_few_nats(dim, kernel, scales, most, problems, fitters) -> None:
    for lengthscale, variance in scales:
        hyper = {"kernel": kernel, "lengthscale": lengthscale, "variance": variance}
        single, double = (
            bound(fitters, problems[dim], dtype, **hyper)
            for dtype in ("float32", "float64")
        )
        # Above as well: rounding must not increase the evidence.
        assert abs(single - double) < most, (lengthscale, single, double)


def test_draws_where_the_posterior_is_narrow(problems, fitters) -> None:
    """The draws are at the inducing inputs, with a covariance far below the prior's."""
    X, y, Z = problems[2]
    hyper = {"lengthscale": np.float32(3), "variance": np.float32(10), "kernel": SMOOTH}
    svi = fitters["float32"]
    run = svi.run(jax.random.key(0), 2, X, y, inducing=Z, progress_bar=False, **hyper)
    posterior = svi.posterior(run)
    draws = posterior.sample(jax.random.key(1), Z, sample_shape=(500,))
    f = posterior.predict_f(Z)
    # Five standard errors of the mean of the draws.
    error = 5 * draws.std(0) / np.sqrt(500) + 0.005
    assert (np.abs(draws.mean(0) - f.mean) < error).all()
    # Sums in float32 leave noise of .16 to .2 (JAX 0.10, 0.12), a tenth of the prior's.
    assert draws.std(0).max() < 0.1 * np.sqrt(hyper["variance"])


@pytest.mark.parametrize("size", [200, *(slow(n) for n in (20, 500))])
def test_hard_matrices_are_whitened(size) -> None:
    """Twice the same inducing inputs, and lengthscales up to a constant kernel."""
    root = jax.jit(inverse_root)
    Z = np.random.default_rng(size).normal(size=(size, 2)).astype(np.float32)
    Z[size // 2 :] = Z[: size - size // 2]
    for kernel in (SMOOTH, ROUGH, kernels.Periodic):
        for lengthscale in np.array([1, 100, 1e4], np.float32):
            K = gram(kernel(lengthscale, np.float32(10)), Z, Z)
            whitener = np.asarray(root(K.astype(np.float32)), float)
            assert np.isfinite(whitener).all()
            # The explained variance is at most the variance itself.
            explained = np.square(whitener @ K).sum(0)
            tolerance = 2e-6 * size
            assert (explained < K.diagonal() * (1 + tolerance)).all()
            # Almost nothing is unexplained, either.
            assert (explained > K.diagonal() * (1 - tolerance)).all()


def test_near_inducing_inputs_are_told_apart() -> None:
    """Pairs of them, .0015 apart: half of the eigenvalues are 1e-6, near to rounding
    errors."""
    rng = np.random.default_rng(0)
    Z = np.repeat(3 * rng.normal(size=(6, 2)), 2, 0)
    Z = (Z + [[0, 0], [1.5e-3, 0]] * 6).astype(np.float32)

    def inverse(Z):
        gp = SimpleNamespace(kernel=SMOOTH(), inducing=Z, jitter=None)
        return whitener(gp).inverse[0]

    root = np.asarray(jax.jit(inverse)(Z), float)
    wide = Z.astype(float)
    gram = np.exp(-0.5 * np.square(wide[:, None] - wide).sum(-1))
    found = np.linalg.eigvalsh(root @ gram @ root.T)
    np.testing.assert_allclose(found, 1, atol=0.1)


def test_well_conditioned_matrices_lose_nothing(dtype) -> None:
    Z = np.arange(12.0).astype(dtype)[:, None]
    grams = np.stack([gram(ROUGH(np.asarray(s, dtype)), Z, Z) for s in (0.5, 2.0)])
    root = jax.jit(inverse_root)(grams.astype(dtype))
    assert root.dtype == dtype
    root = np.asarray(root)
    eye = np.broadcast_to(np.eye(12), grams.shape)
    tolerance = 1e-4 if dtype == "float32" else 1e-10
    np.testing.assert_allclose(
        root @ grams @ np.swapaxes(root, 1, 2), eye, atol=tolerance
    )


def test_matrices_choose_their_jitter_apart() -> None:
    """In a stack, and mapped over: the jitter of one matrix is not added to another."""
    Z = np.random.default_rng(0).normal(size=(60, 1)).astype(np.float32)
    grams = np.stack([gram(SMOOTH(np.float32(s)), Z, Z) for s in (30.0, 0.01)])
    grams, alone = grams.astype(np.float32), jax.jit(inverse_root)
    each = np.stack([alone(gram) for gram in grams])
    np.testing.assert_allclose(alone(grams), each, rtol=1e-3, atol=2e-2)
    mapped = jax.jit(jax.vmap(inverse_root))(grams)
    np.testing.assert_allclose(mapped, each, rtol=1e-3, atol=2e-2)


@pytest.mark.parametrize("vectorised", [False, True])
def test_derivatives_of_what_a_root_is_used_for(vectorised, x64) -> None:
    Z = np.random.default_rng(0).normal(size=(8, 2))
    X = np.random.default_rng(1).normal(size=(5, 2))

    def explained(root, log_scale):
        kernel = ROUGH(jnp.exp(log_scale))
        projection = root(kernel(Z, Z)) @ kernel(Z, X)
        return jnp.sin(projection.T @ projection).sum()

    def slope(root, at):
        gradient = jax.grad(partial(explained, root))
        return jax.vmap(gradient)(at) if vectorised else gradient(at[0])

    both = jax.jit(lambda at: [slope(r, at) for r in (inverse_root, inverse_cholesky)])
    ours, theirs = both(np.array([0.3, -0.5]))
    np.testing.assert_allclose(ours, theirs, rtol=1e-8)


def test_what_is_not_positive_definite_is_nan() -> None:
    assert np.isnan(jax.jit(inverse_root)(np.diag([1, -1]).astype(np.float32))).all()
    assert np.isnan(jax.jit(inverse_root)(np.full((2, 2), np.nan, np.float32))).any()


def test_the_least_jitter() -> None:
    assert least_jitter(400, jnp.float64) == 1e-10
    np.testing.assert_allclose(least_jitter(400, jnp.float32), 4.77e-6, rtol=1e-3)


def test_chains_under_vmap_may_scan() -> None:
    def step(scale, _):
        root = inverse_root(scale * jnp.eye(3))
        return scale * 1.1, root[0, 0]

    chains = jax.vmap(lambda s: jax.lax.scan(step, s, None, 4)[1])
    roots = jax.jit(chains)(np.arange(1, 3, dtype="float32"))
    expected = (np.arange(1.0, 3.0)[:, None] * 1.1 ** np.arange(4)) ** -0.5
    np.testing.assert_allclose(roots, expected, rtol=1e-5)


LATENTS = np.array([0.5, 1.0, 2.0])
PROJECTED = {
    "latents": lambda s: ROUGH((s * LATENTS)[:, None], LATENTS),
    "sum": lambda s: SMOOTH(s) + kernels.Linear(0.3) + 0.5,
    "product": lambda s: 2.0 * SMOOTH(s) * kernels.Periodic(2 * s, LATENTS),
    "without a constant": lambda s: kernels.Linear(0.3) * ROUGH(s),
}


@pytest.mark.parametrize(
    "name", ["latents", *(slow(k) for k in PROJECTED if k != "latents")]
)
def test_projections_are_those_of_the_covariances(name, x64) -> None:
    """The explained part, the residual, and the derivatives of both."""
    rng = np.random.default_rng(0)
    X, Z = rng.normal(size=(7, 2)), rng.normal(size=(3, 4, 2))
    Z = Z if "latents" in name else Z[0]
    weights = rng.normal(size=(7, 7))

    def plain(scale):
        kernel = PROJECTED[name](scale)
        cross, gram = kernel(X, Z), kernel(Z, Z)
        explained = cross @ jnp.linalg.solve(gram, cross.mT)
        return explained, kernel(X) - jnp.diagonal(explained, axis1=-2, axis2=-1)

    def ours(scale):
        kernel = PROJECTED[name](scale)
        gp = SimpleNamespace(kernel=kernel, inducing=jnp.asarray(Z), jitter=None)
        found = whitener(gp)
        A, residual = project(gp, found, jnp.asarray(X))
        return A.mT @ A, residual

    def known(function):
        def total(scale):
            explained, residual = function(scale)
            return (explained * weights).sum() + (residual * weights[0]).sum()

        return jax.jit(lambda scale: (*function(scale), jax.jacfwd(total)(scale)))(1.3)

    for one, other in zip(known(ours), known(plain), strict=True):
        np.testing.assert_allclose(
            *np.broadcast_arrays(one, other), rtol=1e-5, atol=1e-6
        )
