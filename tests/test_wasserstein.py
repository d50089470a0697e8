# SPDX-License-Identifier: Apache-2.0
"""The Wasserstein distance of Gaussian measures and the loss made of it."""

import json
from functools import cache
from pathlib import Path

import jax
import jax.numpy as jnp
import numpy as np
import numpyro
import numpyro.distributions as dist
import pytest

import numpyro_gpaug as gpaug
from numpyro_gpaug.guides.function_posterior import GaussianMeasure
from numpyro_gpaug.infer.vi.elbo import spectral_distance, symmetric_distance
from tests.conftest import assert_close
from tests.function_space import (
    LENGTHSCALES,
    MEANS,
    VARIANCES,
    exact_distance,
    linear,
    somewhere,
    sparse_covariance,
    three,
    three_classes,
)

KEY = jax.random.key(0)
GOLDEN = json.loads((Path(__file__).parent / "golden/problem_gwi.json").read_text())
distance_and_slopes = jax.jit(
    jax.value_and_grad(gpaug.squared_wasserstein, argnums=(1, 3))
)


def golden(*names, dtype="float64"):
    return [np.asarray(GOLDEN[name], dtype) for name in names]


def measure(mean, kernel):
    """A measure of one latent."""
    return GaussianMeasure(
        lambda X: mean(X)[None], lambda X, *Z: kernel(X, *Z)[None] if Z else kernel(X)
    )


# -- distances ----------------------------------------------------------------------


def test_distance_of_gaussians_against_golden_and_one_dimension(x64) -> None:
    m, K, n, R = golden("mP", "K", "mQ", "R")
    distance, _ = distance_and_slopes(m, K, n, R)
    assert distance / 5 == pytest.approx(GOLDEN["W2sq_exact_empirical"], rel=1e-12)
    # Scalars: (m - n)^2 + (s - t)^2; a singular covariance; a batch.
    means, scales = np.array([[1.0], [0.0], [2.0]]), np.array([3.0, 1.0, 0.0])
    found = jax.jit(gpaug.squared_wasserstein)(
        means, scales[:, None, None] ** 2, np.zeros(1), np.full((1, 1), 4.0)
    )
    np.testing.assert_allclose(found, [2.0, 1.0, 8.0], rtol=1e-14)


def test_slopes_of_the_distance_are_the_differences_by_numpy(x64) -> None:
    m, K, n, R = golden("mP", "K", "mQ", "R")
    slopes = distance_and_slopes(m, K, n, R)[1]
    rng = np.random.default_rng(0)
    for which in range(2):
        half = rng.normal(size=(5, 5))
        direction = half + half.T
        ends = []
        for step in (1e-5, -1e-5):
            moved = [K, R]
            moved[which] = moved[which] + step * direction
            ends.append(exact_distance(m, moved[0], n, moved[1]))
        slope = np.sum(np.asarray(slopes[which]) * direction)
        assert slope == pytest.approx((ends[0] - ends[1]) / 2e-5, rel=1e-7)


def test_estimators_against_golden_numbers(x64) -> None:
    K, R, mQ = golden("K", "R", "mQ")

    def table(matrix):
        """A covariance function whose inputs are rows of a matrix."""

        def kernel(A, B=None):
            a = A[:, 0].astype(int)
            if B is None:
                return jnp.diagonal(jnp.asarray(matrix))[a]
            return jnp.asarray(matrix)[a[:, None], B[:, 0].astype(int)]

        return kernel

    P = measure(lambda A: jnp.zeros(A.shape[0]), table(K))
    Q = measure(lambda A: jnp.asarray(mQ)[A[:, 0].astype(int)], table(R))

    @jax.jit
    def estimates(X, part):
        return {
            "W2sq_exact_empirical": symmetric_distance(P, Q, X),
            "W2sq_same_subset": symmetric_distance(P, Q, part),
            "W2sq_est_XS_equals_X": spectral_distance(P, Q, X, X),
            "W2sq_est_subset": spectral_distance(P, Q, X, part),
        }

    rows = np.arange(5.0)[:, None]
    for name, value in estimates(rows, rows[GOLDEN["subset"]]).items():
        assert float(value[0]) == pytest.approx(GOLDEN[name], rel=1e-8), name


def test_equal_measures_are_at_distance_zero_with_no_gradient(dtype) -> None:
    X = np.random.default_rng(0).uniform(-2, 2, (30, 1)).astype(dtype)

    def measures(height, variance):
        kernel = gpaug.kernels.SquaredExponential(lengthscale=0.7)
        scaled = gpaug.kernels.SquaredExponential(0.7, variance)
        P = measure(lambda A: jnp.zeros(A.shape[0], A.dtype), kernel)
        return P, measure(lambda A: height * A[:, 0], scaled)

    @jax.jit
    def both(height, variance):
        symmetric = jax.value_and_grad(
            lambda *at: symmetric_distance(*measures(*at), X)[0], (0, 1)
        )
        spectral = jax.grad(
            lambda *at: spectral_distance(*measures(*at), X, X[:6])[0], (0, 1)
        )
        return *symmetric(height, variance), spectral(height, variance)

    single = dtype == "float32"
    zero, one, four = (np.asarray(x, dtype) for x in (0, 1, 4))
    value, slopes, spectral = both(zero, one)
    assert 0 <= value < (1e-5 if single else 1e-12)
    np.testing.assert_allclose(slopes, 0, atol=1e-3 if single else 1e-8)
    assert np.isfinite(spectral).all()
    # d/dv of k (1 - sqrt v)^2 at v = 4 is 1 / 2.
    _, (_, slope), _ = both(zero, four)
    np.testing.assert_allclose(slope, 0.5, rtol=2e-3 if single else 1e-6)


# -- loss ---------------------------------------------------------------------------


def golden_model(X, y=None, *, Z, batch_size=None):
    kernel = gpaug.kernels.SquaredExponential(lengthscale=0.9, variance=1.3)
    gp = gpaug.GaussianProcess("f", kernel, Z, jitter=0.0)
    with numpyro.plate("data", X.shape[0], subsample_size=batch_size) as i:
        scale = jnp.sqrt(jnp.asarray(GOLDEN["noise_var"], X.dtype))
        numpyro.sample("y", dist.Normal(gp(X[i]), scale), obs=y[i])


def golden_params(dtype):
    """The params that are the golden problem's mean and Sigma, S = L' Sigma L."""
    L = np.linalg.cholesky(np.asarray(GOLDEN["Kzz"]))
    tril = np.linalg.cholesky(L.T @ np.asarray(GOLDEN["Sig"]) @ L)
    return {"f.v_auto_tril": np.asarray(tril, dtype), "height": np.ones((), dtype)}


def wave(X):
    return numpyro.param("height", jnp.zeros((), X.dtype)) * jnp.sin(X[:, 0])


def test_objective_against_golden(dtype) -> None:
    X, y, Z = golden("X", "y", "Z", dtype=dtype)
    guide = gpaug.AutoFunctionSpaceGP(golden_model, wave).setup(X, y, Z=Z)
    losses = [
        gpaug.TraceWasserstein_ELBO(estimator="symmetric"),
        gpaug.TraceWasserstein_ELBO(estimator="spectral"),
        gpaug.TraceWasserstein_ELBO(weight=2.0),
    ]

    @jax.jit
    def values(params):
        return [
            loss.loss(KEY, params, golden_model, guide, X, y, Z=Z) for loss in losses
        ]

    symmetric, spectral, doubled = values(golden_params(dtype))
    assert symmetric.dtype == spectral.dtype == doubled.dtype == dtype
    assert_close(symmetric, GOLDEN["objective_exact"], 100)
    assert_close(spectral, GOLDEN["objective_exact"], 100)
    distance = GOLDEN["W2sq_exact_empirical"]
    assert_close(doubled, GOLDEN["objective_exact"] + distance, 100)


def test_batches_are_unbiased_in_the_likelihood(x64) -> None:
    """Against E log p(y | f) of all five rows in closed form, by NumPy."""
    X, y, Z, variance, noise = golden("X", "y", "Z", "R", "noise_var")
    terms = (y - np.sin(X[:, 0])) ** 2 + np.diag(variance)
    whole = 0.5 * np.sum(np.log(2 * np.pi * noise) + terms / noise)
    guide = gpaug.AutoFunctionSpaceGP(golden_model, wave)
    # A weight so small that the distance has no effect.
    loss = gpaug.TraceWasserstein_ELBO(weight=1e-9)
    params = golden_params("float64")
    given = {"Z": Z, "batch_size": 2}
    guide.setup(X, y, **given)
    values = jax.jit(jax.vmap(
        lambda key: loss.loss(key, params, golden_model, guide, X, y, **given)
    ))(jax.random.split(KEY, 1000))  # fmt: skip
    # All pairs of rows are equally likely: ten values.
    assert len(np.unique(np.round(values, 6))) == 10
    error = np.std(values) / np.sqrt(len(values))
    assert np.std(values) > 20 * error
    assert abs(np.mean(values) - whole) < 4 * error


@cache
def loss_of_three_classes():
    """Losses by weights 3 and 1, and the slopes of the first, as a function of params;
    with 64-bit types enabled."""
    X, y = three_classes(30)
    X = np.asarray(X, float)
    given = {"Z": X[:5]}
    guide = gpaug.AutoFunctionSpaceGP(three, linear).setup(X, y, **given)

    def both(params):
        heavy, light = (
            gpaug.TraceWasserstein_ELBO(w).loss(
                KEY, params, three, guide, X, y, **given
            )
            for w in (3.0, 1.0)
        )
        return heavy, light

    return X, jax.jit(jax.value_and_grad(both, has_aux=True))


def test_gradients_are_finite_at_the_kernel_of_the_prior(x64) -> None:
    prior = {
        "lengthscale": np.ones((3, 1)),
        "W": np.zeros((2, 3)),
        "f.v_auto_tril": np.broadcast_to(np.eye(5), (3, 5, 5)),
    }
    slopes = loss_of_three_classes()[1](prior)[1]
    assert all(np.isfinite(slope).all() for slope in slopes.values())


def test_one_kernel_per_class_is_one_distance_per_class(x64) -> None:
    X, losses = loss_of_three_classes()
    params = somewhere()
    (heavy, light), _ = losses(params)
    expected = 0.0
    hyper = zip(LENGTHSCALES, VARIANCES, MEANS, strict=True)
    for c, (scale, variance, mean) in enumerate(hyper):
        tril = params["f.v_auto_tril"][c]
        K, R = sparse_covariance(X, X[:5], scale, variance, tril)
        expected += exact_distance(mean, K, X @ params["W"][:, c], R) / 30
    assert float(heavy - light) / 2 == pytest.approx(expected, rel=1e-6)
