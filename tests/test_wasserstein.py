# SPDX-License-Identifier: Apache-2.0
"""Gaussian Wasserstein inference: distances, guide, loss, prediction."""

import json
from pathlib import Path

import jax
import jax.numpy as jnp
import numpy as np
import numpyro
import numpyro.distributions as dist
import optax
import pytest
from numpyro import handlers
from numpyro.infer import SVI, Predictive

import numpyro_gpaug as gpaug
from numpyro_gpaug.guides.function_posterior import GaussianMeasure
from numpyro_gpaug.infer.vi.wasserstein import spectral_distance, symmetric_distance
from tests.conftest import assert_close, compilations
from tests.problems import regression, toy

# Many of these means are fixed functions, on purpose.
pytestmark = pytest.mark.filterwarnings(
    "ignore:the mean of AutoFunctionSpaceGP has no params"
)

KEY = jax.random.key(0)
GOLDEN = json.loads((Path(__file__).parent / "golden/problem_gwi.json").read_text())
POSITIVE = dist.constraints.positive


def golden(*names):
    return [jnp.asarray(GOLDEN[name]) for name in names]


def root(matrix):
    """Symmetric square root by NumPy."""
    values, vectors = np.linalg.eigh(matrix)
    return (vectors * np.sqrt(np.maximum(values, 0))) @ vectors.T


def exact_distance(m, K, n, R):
    """The squared distance between Gaussians by NumPy."""
    half = root(K)
    cross = np.trace(root(half @ R @ half))
    return np.sum((m - n) ** 2) + np.trace(K) + np.trace(R) - 2 * cross


def measure(mean, kernel):
    """A measure of one latent."""
    return GaussianMeasure(
        lambda X: mean(X)[None], lambda X, *Z: kernel(X, *Z)[None] if Z else kernel(X)
    )


def golden_model(X, y=None, *, Z):
    kernel = gpaug.kernels.SquaredExponential(lengthscale=0.9, variance=1.3)
    gp = gpaug.GaussianProcess("f", kernel, Z, jitter=0.0)
    with numpyro.plate("data", X.shape[0]):
        scale = jnp.sqrt(jnp.asarray(GOLDEN["noise_var"], X.dtype))
        numpyro.sample("y", dist.Normal(gp(X), scale), obs=y)


def golden_params(dtype):
    """The params that are the golden problem's mean and Sigma, S = L' Sigma L."""
    L = np.linalg.cholesky(np.asarray(GOLDEN["Kzz"]))
    tril = np.linalg.cholesky(L.T @ np.asarray(GOLDEN["Sig"]) @ L)
    return {"f.v_auto_tril": jnp.asarray(tril, dtype), "height": jnp.ones((), dtype)}


def wave(X):
    return numpyro.param("height", jnp.zeros((), X.dtype)) * jnp.sin(X[:, 0])


def three(X, y=None, *, Z, batch_size=None):
    """Three classes, each with a kernel and a prior mean of its own."""
    lengthscale = numpyro.param("lengthscale", jnp.ones((3, 1)), constraint=POSITIVE)
    kernel = gpaug.kernels.SquaredExponential(lengthscale, jnp.array([1.0, 2.0, 3.0]))
    mean = jnp.array([0.5, 0.0, -0.5])
    gp = gpaug.GaussianProcess("f", kernel, Z, mean=mean, num_latents=3)
    with numpyro.plate("data", X.shape[0], subsample_size=batch_size) as i:
        y = None if y is None else y[i]
        numpyro.sample("y", gpaug.RobustMax(gp(X[i])), obs=y)


def linear(X):
    return X @ numpyro.param("W", 0.3 * jnp.eye(X.shape[1], 3))


def three_classes(num=40):
    X, _ = toy(num)
    return X, (X[:, 0] > 0).astype(int) + (X[:, 1] > 0.5)


def loss_at(loss, guide, model, params, *args, **kwargs):
    return loss.loss(KEY, params, model, guide, *args, **kwargs)


# -- distances ----------------------------------------------------------------------


def test_distance_of_gaussians_against_golden_and_one_dimension(x64) -> None:
    m, K, n, R = golden("mP", "K", "mQ", "R")
    distance = gpaug.squared_wasserstein(m, K, n, R)
    assert distance / 5 == pytest.approx(GOLDEN["W2sq_exact_empirical"], rel=1e-12)
    # Scalars: (m - n)^2 + (s - t)^2; a singular covariance; a batch.
    means, scales = jnp.array([[1.0], [0.0], [2.0]]), jnp.array([3.0, 1.0, 0.0])
    found = gpaug.squared_wasserstein(
        means, scales[:, None, None] ** 2, jnp.zeros(1), jnp.full((1, 1), 4.0)
    )
    np.testing.assert_allclose(found, [2.0, 1.0, 8.0], rtol=1e-14)


def test_gradients_of_the_distance_against_finite_differences(x64) -> None:
    m, K, n, R = golden("mP", "K", "mQ", "R")
    rng = np.random.default_rng(0)
    for which in range(2):
        half = rng.normal(size=(5, 5))
        direction = jnp.asarray(half + half.T)

        def along(t, which=which, direction=direction):
            moved = [K, R]
            moved[which] = moved[which] + t * direction
            return gpaug.squared_wasserstein(m, moved[0], n, moved[1])

        step = 1e-5
        difference = (along(step) - along(-step)) / (2 * step)
        slope = jax.grad(along)(0.0)
        assert slope == pytest.approx(float(difference), rel=1e-7)


def test_estimators_against_golden_numbers(x64) -> None:
    X, K, R, mQ = golden("X", "K", "R", "mQ")
    rows = {float(x): i for i, x in enumerate(X[:, 0])}

    def table(matrix):
        def kernel(A, B=None):
            a = [rows[float(x)] for x in A[:, 0]]
            if B is None:
                return jnp.diagonal(matrix)[jnp.array(a)]
            return matrix[
                jnp.ix_(jnp.array(a), jnp.array([rows[float(x)] for x in B[:, 0]]))
            ]

        return kernel

    P = measure(lambda A: jnp.zeros(A.shape[0]), table(K))
    Q = measure(lambda A: mQ[jnp.array([rows[float(x)] for x in A[:, 0]])], table(R))
    part = X[jnp.array(GOLDEN["subset"])]
    found = {
        "W2sq_exact_empirical": symmetric_distance(P, Q, X),
        "W2sq_same_subset": symmetric_distance(P, Q, part),
        "W2sq_est_XS_equals_X": spectral_distance(P, Q, X, X),
        "W2sq_est_subset": spectral_distance(P, Q, X, part),
    }
    for name, value in found.items():
        assert float(value[0]) == pytest.approx(GOLDEN[name], rel=1e-8), name


def grid(num=120, seed=3):
    """Inputs, prior, and a sparse posterior kernel with a mean, by NumPy arrays."""
    rng = np.random.default_rng(seed)
    X = np.sort(rng.uniform(-3, 3, num))[:, None]
    kernel = gpaug.kernels.SquaredExponential(lengthscale=0.9, variance=1.3)
    Z = np.linspace(-2.7, 2.7, 8)[:, None]
    half = rng.normal(size=(8, 8))
    sigma = 0.05 * half @ half.T / 8 + 0.02 * np.eye(8)
    inner = np.asarray(kernel(Z, Z))
    inner = sigma - np.linalg.inv(inner)

    def posterior(A, B=None):
        if B is None:
            return jnp.diagonal(posterior(A, A))
        return kernel(A, B) + kernel(A, Z) @ inner @ kernel(Z, B)

    P = measure(lambda A: jnp.zeros(A.shape[0]), kernel)
    Q = measure(lambda A: jnp.sin(A[:, 0]), posterior)
    return jnp.asarray(X), P, Q


def test_bias_of_the_estimators(x64) -> None:
    X, P, Q = grid()
    m, K = np.zeros(120), np.asarray(P.kernel(X, X)[0])
    n, R = np.asarray(Q.mean(X)[0]), np.asarray(Q.kernel(X, X)[0])
    exact = exact_distance(m, K, n, R) / 120
    np.testing.assert_allclose(exact, 1.0319, atol=2e-3)
    np.testing.assert_allclose(spectral_distance(P, Q, X, X)[0], exact, rtol=1e-6)
    np.testing.assert_allclose(symmetric_distance(P, Q, X)[0], exact, rtol=1e-6)
    rng = np.random.default_rng(0)
    subsets = jnp.stack([X[rng.choice(120, 20, replace=False)] for _ in range(60)])
    one = jax.jit(jax.vmap(lambda S: spectral_distance(P, Q, X, S)[0]))(subsets)
    other = jax.jit(jax.vmap(lambda S: symmetric_distance(P, Q, S)[0]))(subsets)
    np.testing.assert_allclose(one.mean(), 1.053, atol=0.01)
    np.testing.assert_allclose(other.mean(), 1.025, atol=0.03)
    # Equal measures: nothing for one, a bias for the other.
    same = jax.vmap(lambda S: spectral_distance(P, P, X, S)[0])(subsets)
    np.testing.assert_allclose(same.mean(), 0.06, atol=0.02)
    assert float(symmetric_distance(P, P, subsets[0])[0]) < 1e-12


def test_equal_measures_are_at_distance_zero_with_no_gradient(dtype) -> None:
    X = jnp.asarray(np.random.default_rng(0).uniform(-2, 2, (30, 1)), dtype)

    def distance(estimator, height, variance):
        kernel = gpaug.kernels.SquaredExponential(lengthscale=0.7)
        P = measure(lambda A: jnp.zeros(A.shape[0], A.dtype), kernel)
        scaled = gpaug.kernels.SquaredExponential(0.7, variance)
        Q = measure(lambda A: height * A[:, 0], scaled)
        return estimator(P, Q)

    def symmetric(P, Q):
        return symmetric_distance(P, Q, X)[0]

    def spectral(P, Q):
        return spectral_distance(P, Q, X, X[:6])[0]

    one = jnp.ones((), dtype)
    value, slopes = jax.value_and_grad(distance, (1, 2))(symmetric, 0 * one, one)
    assert 0 <= value < (1e-5 if dtype == "float32" else 1e-12)
    np.testing.assert_allclose(slopes, 0, atol=1e-3 if dtype == "float32" else 1e-8)
    slopes = jax.grad(distance, (1, 2))(spectral, 0 * one, one)
    assert np.isfinite(slopes).all()
    # d/dv of k (1 - sqrt v)^2 at v = 4 is 1 / 2.
    slope = jax.grad(distance, 2)(symmetric, 0 * one, 4 * one)
    np.testing.assert_allclose(slope, 0.5, rtol=2e-3 if dtype == "float32" else 1e-6)


# -- loss ---------------------------------------------------------------------------


def test_objective_against_golden(dtype) -> None:
    X, y, Z = (jnp.asarray(GOLDEN[k], dtype) for k in ("X", "y", "Z"))
    guide = gpaug.AutoFunctionSpaceGP(golden_model, wave)
    params = golden_params(dtype)
    for estimator in ("symmetric", "spectral"):
        loss = gpaug.TraceWasserstein_ELBO(estimator=estimator)
        value = loss_at(loss, guide, golden_model, params, X, y, Z=Z)
        assert value.dtype == dtype
        assert_close(value, GOLDEN["objective_exact"], 100)
    doubled = gpaug.TraceWasserstein_ELBO(weight=2.0)
    value = loss_at(doubled, guide, golden_model, params, X, y, Z=Z)
    distance = GOLDEN["W2sq_exact_empirical"]
    assert_close(value, GOLDEN["objective_exact"] + distance, 100)


def test_gradients_of_the_objective(x64) -> None:
    X, y = three_classes()
    guide = gpaug.AutoFunctionSpaceGP(three, linear)
    loss = gpaug.TraceWasserstein_ELBO(weight=3.0)
    rng = np.random.default_rng(0)
    start = {
        "lengthscale": jnp.array([[1.0], [0.7], [1.3]]),
        "W": jnp.asarray(rng.normal(size=(2, 3))),
        "f.v_auto_tril": jnp.asarray(np.eye(5) + 0.2 * rng.normal(size=(3, 5, 5))),
    }
    direction = {k: jnp.asarray(rng.normal(size=v.shape)) for k, v in start.items()}

    @jax.jit
    def along(t):
        params = {k: v + t * direction[k] for k, v in start.items()}
        return loss_at(loss, guide, three, params, X, y, Z=X[:5])

    slope = jax.jit(jax.grad(along))(0.0)
    difference = (along(1e-5) - along(-1e-5)) / 2e-5
    assert float(slope) == pytest.approx(float(difference), rel=1e-5)


def test_gradients_are_finite_at_the_prior() -> None:
    X, y = three_classes()
    guide = gpaug.AutoFunctionSpaceGP(three, lambda X: jnp.zeros((X.shape[0], 3)))
    loss = gpaug.TraceWasserstein_ELBO()
    params = {
        "lengthscale": jnp.ones((3, 1)),
        "f.v_auto_tril": jnp.broadcast_to(jnp.eye(5), (3, 5, 5)),
    }
    slope = jax.grad(lambda p: loss_at(loss, guide, three, p, X, y, Z=X[:5]))
    slopes = jax.jit(slope)(params)
    assert all(np.isfinite(slope).all() for slope in slopes.values())


def test_batches_are_unbiased_in_the_likelihood() -> None:
    X, y = three_classes(12)
    guide = gpaug.AutoFunctionSpaceGP(three, linear)
    # So light that the distance does not show.
    loss = gpaug.TraceWasserstein_ELBO(weight=1e-9)
    params = {
        "lengthscale": jnp.ones((3, 1)),
        "W": jnp.array([[1.0, -1.0, 0.5], [0.3, 0.2, 2.0]]),
        "f.v_auto_tril": jnp.broadcast_to(0.5 * jnp.eye(5), (3, 5, 5)),
    }
    given = {"Z": X[:5]}
    whole = loss_at(loss, guide, three, params, X, y, **given)
    batch = gpaug.AutoFunctionSpaceGP(three, linear)
    keys = jax.random.split(KEY, 1000)
    values = jax.jit(jax.vmap(
        lambda key: loss.loss(key, params, three, batch, X, y, batch_size=4, **given)
    ))(keys)  # fmt: skip
    error = values.std() / np.sqrt(len(keys))
    assert float(values.std()) > 20 * float(error)
    assert abs(float(values.mean() - whole)) < 4 * float(error)


def test_one_kernel_per_class_is_one_distance_per_class(x64) -> None:
    X, y = three_classes(30)
    guide = gpaug.AutoFunctionSpaceGP(three, linear)
    rng = np.random.default_rng(0)
    tril = np.tril(np.eye(5) + 0.2 * rng.normal(size=(3, 5, 5)))
    W = rng.normal(size=(2, 3))
    params = {"lengthscale": jnp.array([[1.0], [0.7], [1.3]]), "W": jnp.asarray(W)}
    params["f.v_auto_tril"] = jnp.asarray(tril)
    values = [
        loss_at(gpaug.TraceWasserstein_ELBO(w), guide, three, params, X, y, Z=X[:5])
        for w in (1.0, 2.0)
    ]
    expected = 0.0
    for c, (scale, variance, mean) in enumerate(
        zip((1.0, 0.7, 1.3), (1.0, 2.0, 3.0), (0.5, 0.0, -0.5), strict=True)
    ):
        kernel = gpaug.kernels.SquaredExponential(scale, variance)
        K, A, S = closed_form(kernel, X[:5], X, tril[c])
        R = K - A.T @ A + A.T @ S @ A
        expected += exact_distance(mean, K, np.asarray(X) @ W[:, c], R) / 30
    assert float(values[1] - values[0]) == pytest.approx(expected, rel=1e-6)


def closed_form(kernel, Z, X, tril):
    """k(X, X), A = L^-1 k(Z, X) and S by NumPy."""
    gram = np.asarray(kernel(Z, Z)) * (1 + 1e-10 * np.eye(len(Z)))
    A = np.linalg.solve(np.linalg.cholesky(gram), np.asarray(kernel(Z, X)))
    return np.asarray(kernel(X, X)), A, tril @ tril.T


# -- fits ---------------------------------------------------------------------------


def fit(model, guide, loss, *args, steps=400, rate=0.05, **kwargs):
    svi = SVI(model, guide, optax.adam(rate), loss)
    result = svi.run(KEY, steps, *args, progress_bar=False, **kwargs)
    posterior = gpaug.Posterior.from_guide(model, guide, result.params, *args, **kwargs)
    return posterior, result


def hidden_layer(X):
    """A small network, by NumPyro's own params."""
    inner = numpyro.param("inner", lambda key: 2 * jax.random.normal(key, (2, 20)))
    outer = numpyro.param("outer", jnp.zeros(20))
    return jnp.tanh(X @ inner + numpyro.param("shift", jnp.zeros(20))) @ outer


def test_a_network_recovers_a_regression_function() -> None:
    X, _ = toy(100)
    truth = jnp.sin(2 * X[:, 0])
    y = truth + 0.1 * jax.random.normal(KEY, (100,))
    guide = gpaug.AutoFunctionSpaceGP(regression, hidden_layer)
    posterior, result = fit(
        regression, guide, gpaug.TraceWasserstein_ELBO(num_points=20), X, y,
        steps=1000, rate=0.02, inducing=X[:15], scale=0.1,
    )  # fmt: skip
    assert np.isfinite(result.losses).all()
    f = posterior.predict_f(X)
    assert float(jnp.sqrt(jnp.mean((f.mean - truth) ** 2))) < 0.1
    predicted = posterior.predict_y(X)
    np.testing.assert_allclose(predicted.variance, f.variance + 0.01, rtol=1e-5)
    # Away from the data the prior's uncertainty is left.
    far = posterior.predict_f(jnp.array([[30.0, 30.0]]))
    np.testing.assert_allclose(far.variance, 1.0, rtol=1e-3)
    assert float(f.variance.mean()) < 0.5


def test_a_kernel_of_its_own_with_params() -> None:
    X, _ = toy(60)
    y = jnp.sin(2 * X[:, 0])

    def kernel():
        variance = numpyro.param("v", 0.5, constraint=POSITIVE)
        return gpaug.kernels.Matern52(variance=variance)

    guide = gpaug.AutoFunctionSpaceGP(regression, hidden_layer, kernel)
    posterior, result = fit(
        regression, guide, gpaug.TraceWasserstein_ELBO(60.0), X, y,
        inducing=X[:15],
    )  # fmt: skip
    # Of 60 v / (2 0.5^2) + 60 (1 - sqrt v)^2 the minimum is at v = 1/9.
    assert float(result.params["v"]) == pytest.approx(1 / 9, rel=0.03)
    assert "f.v_auto_tril" not in result.params
    f = posterior.predict_f(X[:7], full_covariance=True)
    expected = gpaug.kernels.Matern52(variance=result.params["v"])(X[:7], X[:7])
    np.testing.assert_allclose(f.variance, expected, rtol=1e-5)
    fixed = gpaug.AutoFunctionSpaceGP(
        regression, hidden_layer, gpaug.kernels.Matern52()
    )
    drawn = handlers.trace(handlers.seed(fixed, 0)).get_trace(X, y, inducing=X[:15])
    assert set(drawn) == {"inner", "outer", "shift", "f"}


def test_comparable_with_the_fit_by_kl() -> None:
    """The same family, the same data: both find the function; the distance is no KL,
    and by its published weight it hardly holds variances up."""
    X, _ = toy(60)
    y = jnp.sin(2 * X[:, 0])
    found = []
    for loss in (gpaug.TraceAnalytic_ELBO(), gpaug.TraceWasserstein_ELBO()):
        guide = gpaug.AutoSparseGP(regression, covariance="dense")
        posterior, _ = fit(regression, guide, loss, X, y, inducing=X[:15])
        found.append(posterior.predict_f(X))
    kl, wasserstein = found
    rms = float(jnp.sqrt(jnp.mean((kl.mean - wasserstein.mean) ** 2)))
    assert rms < 0.3 * float(kl.mean.std())
    assert float(wasserstein.variance.mean()) < float(kl.variance.mean())


def test_other_latents_go_to_another_guide() -> None:
    def model(X, y=None, *, Z):
        noise = numpyro.sample("noise", dist.LogNormal(-1, 1))
        beta = numpyro.sample("beta", dist.Normal(0, 2).expand([2]).to_event(1))
        gp = gpaug.GaussianProcess("f", gpaug.kernels.Matern52(), Z)
        with numpyro.plate("data", X.shape[0]):
            numpyro.sample("y", dist.Normal(gp(X) + X @ beta, noise), obs=y)

    X, _ = toy(60)
    y = X @ jnp.array([1.0, -2.0]) + 0.1 * jax.random.normal(KEY, (60,))
    guide = gpaug.AutoFunctionSpaceGP(
        model, lambda X: jnp.zeros(X.shape[0]), other=numpyro.infer.autoguide.AutoNormal
    )
    posterior, result = fit(
        model, guide, gpaug.TraceWasserstein_ELBO(num_points=20), X, y, Z=X[:10]
    )
    assert guide.structure.others == ("noise", "beta")
    np.testing.assert_allclose(result.params["beta_auto_loc"], [1, -2], atol=0.15)
    assert posterior.predict_y(X[:3]).mean.shape == (3,)
    assert set(guide.median(result.params)) == {"noise", "beta"}


# -- prediction ---------------------------------------------------------------------


@pytest.fixture(scope="module")
def classes():
    """A fit of three classes in batches."""
    X, y = three_classes()
    guide = gpaug.AutoFunctionSpaceGP(three, linear)
    given = {"Z": X[:5], "batch_size": 20}
    posterior, result = fit(
        three, guide, gpaug.TraceWasserstein_ELBO(num_points=10), X, y,
        steps=300, **given,
    )  # fmt: skip
    return posterior, guide, result, (X, y), given


def test_learns_in_batches(classes) -> None:
    posterior, _, result, (X, y), _ = classes
    assert result.losses[-20:].mean() < 0.6 * result.losses[0]
    accuracy = np.mean(posterior.predict_y(X).probs.argmax(1) == y)
    assert accuracy > 0.75


def test_posterior_is_the_closed_form(x64) -> None:
    X, y = three_classes()
    rng = np.random.default_rng(0)
    tril = np.tril(np.eye(5) + 0.2 * rng.normal(size=(3, 5, 5)))
    W = rng.normal(size=(2, 3))
    params = {"lengthscale": jnp.ones((3, 1)), "W": jnp.asarray(W)}
    params["f.v_auto_tril"] = jnp.asarray(tril)
    guide = gpaug.AutoFunctionSpaceGP(three, linear)
    posterior = gpaug.Posterior.from_guide(three, guide, params, X, y, Z=X[:5])
    new = toy(7, seed=3)[0]
    f = posterior.predict_f(new)
    joint = posterior.predict_f(new, full_covariance=True)
    np.testing.assert_allclose(f.mean, np.asarray(new) @ W, rtol=1e-12)
    np.testing.assert_allclose(joint.mean, f.mean, rtol=1e-12)
    for c, variance in enumerate((1.0, 2.0, 3.0)):
        kernel = gpaug.kernels.SquaredExponential(1.0, variance)
        K, A, S = closed_form(kernel, X[:5], new, tril[c])
        expected = K - A.T @ A + A.T @ S @ A
        np.testing.assert_allclose(joint.variance[c], expected, atol=1e-8)
        np.testing.assert_allclose(f.variance[:, c], np.diag(expected), atol=1e-8)
    probs = posterior.predict_y(new).probs
    labels = jnp.arange(7) % 3
    expected = jnp.log(probs[jnp.arange(7), labels])
    np.testing.assert_allclose(posterior.log_prob(new, labels), expected, rtol=1e-9)


def test_predictions_stream_and_draw(classes) -> None:
    posterior, guide, result, _, given = classes
    new = toy(33, seed=3)[0]
    whole, part = (posterior.predict_y(new, batch_size=size) for size in (64, 8))
    np.testing.assert_allclose(part.probs, whole.probs, rtol=2e-5)
    joint = posterior.predict_f(new[:4], full_covariance=True)
    draws = posterior.sample(KEY, new[:4], sample_shape=(20000,))
    np.testing.assert_allclose(draws.mean(0), joint.mean, atol=0.06)
    spread = jnp.cov(draws[..., 2].T)
    np.testing.assert_allclose(spread, joint.variance[2], atol=0.1)
    # NumPyro's own prediction, function values included.
    predictive = Predictive(three, guide=guide, params=result.params, num_samples=5000)
    drawn = predictive(jax.random.key(1), new[:4], Z=given["Z"])
    assert set(drawn) == {"f", "y"}
    variance = jnp.diagonal(joint.variance, axis1=-2, axis2=-1).T
    np.testing.assert_allclose(drawn["f"].mean(0), joint.mean, atol=0.1)
    np.testing.assert_allclose(drawn["f"].var(0), variance, rtol=0.1)
    shares = np.stack([(drawn["y"] == k).mean(0) for k in range(3)], 1)
    np.testing.assert_allclose(shares, whole.probs[:4], atol=0.03)
    with pytest.raises(ValueError, match="draw a batch.*Posterior"):
        predictive(KEY, new, Z=given["Z"], batch_size=20)
    posterior_draws = guide.sample_posterior(
        KEY, result.params, new[:4], Z=given["Z"], sample_shape=(6,)
    )
    assert posterior_draws["f"].shape == (6, 4, 3)


def test_posteriors_of_one_guide_share_what_is_compiled(classes) -> None:
    _, guide, result, (X, y), given = classes
    posterior = gpaug.Posterior.from_guide(three, guide, result.params, X, y, **given)
    none = compilations("_answer")
    posterior.predict_y(X, batch_size=16)
    before = compilations("_answer")
    assert before == none + 1
    for scale in (1.0, 1.1):
        params = {**result.params, "W": scale * result.params["W"]}
        again = gpaug.Posterior.from_guide(three, guide, params, X, y, **given)
        probs = again.predict_y(X[: int(20 * scale)], batch_size=16).probs
    assert compilations("_answer") == before
    # The params are data, not part of what is shared.
    assert float(jnp.abs(probs - posterior.predict_y(X[:22]).probs).max()) > 1e-4
    other = gpaug.AutoFunctionSpaceGP(three, linear)
    apart = gpaug.Posterior.from_guide(three, other, result.params, X, y, **given)
    assert apart._predictor is not posterior._predictor


def test_a_mean_without_params_is_told() -> None:
    guide = gpaug.AutoFunctionSpaceGP(regression, lambda X: 0 * X[:, 0])
    X, y = toy(8)
    with pytest.warns(UserWarning, match="has no params"):
        handlers.seed(guide, 0)(X, jnp.asarray(y, float), inducing=X[:3])


def network(library: str, depth: int):
    """A mean function from a network of some library, by NumPyro's own means. Flax is
    no dependency of the tests: too much comes with it."""
    from numpyro.contrib import module

    if library == "equinox":
        eqx = pytest.importorskip("equinox")
        net = eqx.nn.MLP(2, "scalar", 8, depth, key=KEY)
        return lambda X: jax.vmap(module.eqx_module("net", net))(X)
    if library == "nnx":
        nnx = pytest.importorskip("flax.nnx")
        rngs = nnx.Rngs(0)
        layers = [nnx.Linear(2 if i == 0 else 8, 8, rngs=rngs) for i in range(depth)]
        inner = [part for layer in layers for part in (layer, jax.nn.tanh)]
        deep = nnx.Sequential(*inner, nnx.Linear(8, 1, rngs=rngs))
        return lambda X: module.nnx_module("net", deep)(X)[..., 0]
    linen = pytest.importorskip("flax.linen")
    inner = [part for _ in range(depth) for part in (linen.Dense(8), jax.nn.tanh)]
    stack = linen.Sequential([*inner, linen.Dense(1)])
    return lambda X: module.flax_module("net", stack, input_shape=(1, 2))(X)[..., 0]


@pytest.mark.parametrize("library", ["equinox", "nnx", "linen"])
def test_save_and_load_a_network(tmp_path, library) -> None:
    mean = network(library, 1)
    X, _ = toy(40)
    guide = gpaug.AutoFunctionSpaceGP(regression, mean)
    posterior, result = fit(
        regression, guide, gpaug.TraceWasserstein_ELBO(num_points=10),
        X, jnp.sin(X[:, 0]), steps=20, inducing=X[:10],
    )  # fmt: skip
    path = tmp_path / "posterior.npz"
    posterior.save(path)
    fresh = gpaug.AutoFunctionSpaceGP(regression, mean)
    loaded = gpaug.Posterior.load(path, regression, fresh)
    before, after = posterior.predict_f(X), loaded.predict_f(X)
    np.testing.assert_array_equal(before.mean, after.mean)
    np.testing.assert_array_equal(before.variance, after.variance)
    assert float(jnp.abs(before.mean).max()) > 0
    with pytest.raises(ValueError, match="pass the guide of the fit"):
        gpaug.Posterior.load(path, regression)
    if library == "linen":
        return  # names the parameter of the wrong shape itself
    wrong = gpaug.AutoFunctionSpaceGP(regression, network(library, 2))
    with pytest.raises(ValueError, match="saved with 4 arrays.*declares 6"):
        gpaug.Posterior.load(path, regression, wrong).predict_f(X)


# -- what is refused ----------------------------------------------------------------


def test_wrong_means_and_kernels_are_named() -> None:
    X, y = three_classes()

    def run(mean, kernel=None, model=three, **given):
        guide = gpaug.AutoFunctionSpaceGP(model, mean, kernel)
        svi = SVI(model, guide, optax.adam(0.1), gpaug.TraceWasserstein_ELBO())
        svi.init(KEY, X, y, **(given or {"Z": X[:5]}))

    with pytest.raises(ValueError, match=r"\(40, 2\).*num_latents=3.*\(40, 3\)"):
        run(lambda X: X)
    with pytest.raises(ValueError, match=r"\(40,\).*expected \(40, 3\).*width 3"):
        run(lambda X: X[:, 0])
    with pytest.raises(ValueError, match=r"\(40, 1\).*expected \(40,\)"):
        run(lambda X: X[:, :1], model=regression, inducing=X[:5])
    four = gpaug.kernels.Matern32(variance=jnp.ones(4))
    with pytest.raises(ValueError, match=r"kernel.*num_latents=3.*\(3, 5, 5\)"):
        run(linear, four)
    with pytest.raises(TypeError, match="mean is a float"):
        run(0.0)
    with pytest.raises(TypeError, match="expected a kernel"):
        run(linear, gpaug.kernels.Matern32)
    with pytest.raises(ValueError, match="mean makes the sample site 'w'"):
        run(lambda X: X @ numpyro.sample("w", dist.Normal(0, 1).expand([2, 3])))


def test_wrong_models_guides_and_settings_are_named() -> None:
    X, y = toy(20)

    def two(X, y=None):
        f, g = (
            gpaug.GaussianProcess(name, gpaug.kernels.Matern32(), X[:3])
            for name in "fg"
        )
        with numpyro.plate("data", X.shape[0]):
            numpyro.sample("y", dist.Bernoulli(logits=f(X) + g(X)), obs=y)

    guide = gpaug.AutoFunctionSpaceGP(two, lambda X: X[:, 0])
    with pytest.raises(ValueError, match=r"one GaussianProcess.*\['f', 'g'\]"):
        guide.setup(X, y)
    loss = gpaug.TraceWasserstein_ELBO()
    autoguide = numpyro.infer.autoguide.AutoNormal(two)
    with pytest.raises(TypeError, match="AutoNormal"):
        loss.loss(KEY, {}, two, autoguide, X, y)
    guide = gpaug.AutoFunctionSpaceGP(regression, lambda X: X[:, 0])
    params = {"f.v_auto_tril": jnp.eye(3)}
    with pytest.raises(gpaug.NotConjugateError, match="TraceWasserstein_ELBO"):
        gpaug.TraceAnalytic_ELBO().loss(
            KEY, params, regression, guide, X, X[:, 0], inducing=X[:3]
        )
    with pytest.raises(TypeError, match="no density with respect to the prior"):
        gpaug.diagnostics.to_datatree(
            KEY, regression, guide, params, X, X[:, 0], inducing=X[:3]
        )
    with pytest.raises(ValueError, match="estimator must be one of"):
        gpaug.TraceWasserstein_ELBO(estimator="exact")
    with pytest.raises(ValueError, match="weight=0"):
        gpaug.TraceWasserstein_ELBO(weight=0)
    posterior = gpaug.Posterior.from_guide(
        regression, gpaug.AutoFunctionSpaceGP(regression, wave), params,
        X, X[:, 0], inducing=X[:3],
    )  # fmt: skip
    with pytest.raises(ValueError, match="mean asks for the param 'height'"):
        posterior.predict_f(X)
