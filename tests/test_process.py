# SPDX-License-Identifier: Apache-2.0
"""The model side: values, residual policies, kernels, weights and dtypes."""

from functools import partial

import jax
import jax.numpy as jnp
import numpy as np
import numpyro
import numpyro.distributions as dist
import pytest
from jax import random
from numpyro import handlers
from numpyro.infer import Predictive, log_likelihood
from numpyro.infer.util import log_density
from scipy.stats import norm

import numpyro_gpaug as gpaug
from numpyro_gpaug.kernels import Matern32, SquaredExponential
from tests.conftest import assert_close
from tests.models import gram

RNG = np.random.default_rng(0)
X = RNG.uniform(-2, 2, (7, 2))
Z = RNG.uniform(-2, 2, (4, 2))
V = RNG.normal(size=(3, 4))


def squared_exponential(a, b, lengthscale=0.9, variance=1.5):
    difference = (a[:, None] - b[None]) / lengthscale
    return variance * np.exp(-0.5 * (difference**2).sum(-1))


def brute(v, X=X, Z=Z, **hyper):
    """Values without residual, and the residual variance, by NumPy."""
    factor = np.linalg.cholesky(squared_exponential(Z, Z, **hyper))
    A = np.linalg.solve(factor, squared_exponential(Z, X, **hyper))
    diagonal = np.diag(squared_exponential(X, X, **hyper))
    return A.T @ v, diagonal - (A**2).sum(0)


KERNEL = SquaredExponential(0.9, 1.5)


def values(v, at=X, policy="mean", kernel=KERNEL, latents=None, seed=0, **options):
    """Function values of a process whose whitened inducing vector is ``v``."""
    options = {"inducing": jnp.asarray(Z), "jitter": 0.0, **options}

    @jax.jit
    def run(v, at):
        def model():
            gp = gpaug.GaussianProcess("f", kernel, **options)
            return gp(at, latents=latents)

        filled = handlers.substitute(model, data={"f.v": v})
        return handlers.seed(gpaug.with_residual(filled, policy), seed)()

    return run(jnp.asarray(v), jnp.asarray(at))


def density(model, params, *args):
    """The log density, and the values and the types of the sites."""
    types = {}

    @jax.jit
    def run(params):
        total, trace = log_density(model, args, {}, params)
        types.update({k: site["type"] for k, site in trace.items()})
        return total, {k: site["value"] for k, site in trace.items()}

    total, found = run(params)
    return total, found, types


# Values.


@pytest.mark.usefixtures("x64")
def test_the_conditional_exposes_projection_and_residual():

    @jax.jit
    def exposed(X, Z):
        with handlers.seed(rng_seed=0), handlers.trace() as trace:
            gpaug.GaussianProcess("f", KERNEL, inducing=Z, jitter=0.0)(X)
        assert trace["f"]["type"] == "deterministic"
        assert trace["f.v"]["type"] == "sample"
        d = trace["f"]["fn"]
        return d.projection, d.residual, d.prior_variance, d.gp.factor

    projection, residual, prior_variance, whitener = exposed(X, Z)
    factor = np.linalg.cholesky(squared_exponential(Z, Z))
    A = np.linalg.solve(factor, squared_exponential(Z, X))
    assert_close(projection, A[None], 10)
    assert_close(residual, brute(V[0])[1][None], 10)
    assert_close(prior_variance, np.full((1, 7), 1.5))
    assert_close(whitener, factor[None], 10)


@pytest.mark.usefixtures("x64")
def test_inducing_at_the_inputs_leaves_no_residual():
    v = RNG.normal(size=7)
    factor = np.linalg.cholesky(squared_exponential(X, X))
    for policy in ("mean", "noise"):
        exact = values(v, policy=policy, inducing=jnp.asarray(X))
        np.testing.assert_allclose(exact, factor @ v, atol=1e-6)

    @jax.jit
    def left(X):
        with handlers.seed(rng_seed=0), handlers.trace() as trace:
            gpaug.GaussianProcess("f", KERNEL, inducing=X, jitter=0.0)(X)
        return trace["f"]["fn"].residual

    residual = left(X)
    assert np.all(residual >= 0)
    assert np.all(residual < 1e-12)


@pytest.mark.usefixtures("x64")
def test_residual_gradients_are_finite_where_it_vanishes():
    def total(lengthscale):
        kernel = SquaredExponential(lengthscale, 1.5)
        v = jnp.ones(7)
        return values(v, policy="noise", kernel=kernel, inducing=jnp.asarray(X)).sum()

    assert np.isfinite(jax.jit(jax.grad(total))(0.9))


@pytest.mark.usefixtures("x64")
def test_jitter_is_relative_and_used():
    exact, loose = (values(V[0], jitter=j) for j in (0.0, 0.5))
    factor = np.linalg.cholesky(squared_exponential(Z, Z) + 0.5 * 1.5 * np.eye(4))
    A = np.linalg.solve(factor, squared_exponential(Z, X))
    assert_close(loose, A.T @ V[0], 10)
    assert np.abs(exact - loose).max() > 0.01


@pytest.mark.usefixtures("x64")
@pytest.mark.parametrize(
    ("mean", "expected"),
    [
        (0.7, lambda f: f + 0.7),
        (np.array([1.0, -2, 3]), lambda f: f + np.array([1.0, -2, 3])),
        (lambda X: X[:, 0] ** 2, lambda f: f + X[:, :1] ** 2),
        (lambda X: X @ np.ones((2, 3)), lambda f: f + X.sum(1, keepdims=True)),
    ],
    ids=["number", "(C,)", "(N,) function", "(N, C) function"],
)
def test_mean_functions(mean, expected):
    plain = np.stack([brute(v)[0] for v in V], 1)
    shifted = values(V, num_latents=3, mean=mean)
    assert_close(shifted, expected(plain), 10)
    chosen = values(V, num_latents=3, mean=mean, latents=jnp.array([2, 0]))
    assert_close(chosen, np.asarray(shifted)[:, [2, 0]], 10)


@pytest.mark.usefixtures("x64")
@pytest.mark.parametrize("mean", [-1.5, lambda X: X[:, 0]], ids=["number", "function"])
def test_mean_functions_of_one_latent(mean):
    offset = mean(X) if callable(mean) else mean
    assert_close(values(V[0], mean=mean), brute(V[0])[0] + offset, 10)


@pytest.mark.usefixtures("x64")
def test_a_square_mean_function_is_not_transposed():
    """N = C: a function that returns (N,) still varies over data, an array over
    latents."""
    at = X[:3]
    plain = np.stack([brute(v, X=at)[0] for v in V], 1)
    by_row = values(V, at=at, num_latents=3, mean=lambda X: X[:, 0])
    assert_close(by_row, plain + at[:, :1], 10)
    by_latent = values(V, at=at, num_latents=3, mean=jnp.arange(3.0))
    assert_close(by_latent, plain + np.arange(3), 10)


@pytest.mark.usefixtures("x64")
def test_num_latents_and_subsets():
    every = values(V, num_latents=3)
    assert every.shape == (7, 3)
    for c in range(3):
        assert_close(every[:, c], brute(V[c])[0], 10)
    some = values(V, num_latents=3, latents=jnp.array([2, 1]))
    assert_close(some, every[:, [2, 1]])
    assert_close(values(V, num_latents=3, latents=[0]), every[:, :1])
    single = values(V[:1], num_latents=1)
    assert single.shape == (7, 1)
    assert_close(single[:, 0], brute(V[0])[0], 10)


@pytest.mark.usefixtures("x64")
def test_hyperparameters_and_inducing_inputs_per_latent():
    lengthscales, variances = np.array([0.5, 0.9, 2]), np.array([1, 1.5, 0.2])
    kernel = SquaredExponential(lengthscales[:, None], variances)
    sets = RNG.uniform(-2, 2, (3, 4, 2))
    every = values(V, kernel=kernel, num_latents=3)
    apart = values(V, kernel=kernel, num_latents=3, inducing=jnp.asarray(sets))
    subset = values(V, kernel=kernel, num_latents=3, latents=jnp.array([2, 0]))
    assert_close(subset, every[:, [2, 0]])
    for c in range(3):
        hyper = {"lengthscale": lengthscales[c], "variance": variances[c]}
        assert_close(every[:, c], brute(V[c], **hyper)[0], 10)
        assert_close(apart[:, c], brute(V[c], Z=sets[c], **hyper)[0], 10)

    @jax.jit
    def left(X, Z):
        with handlers.seed(rng_seed=0), handlers.trace() as trace:
            gpaug.GaussianProcess("f", kernel, Z, num_latents=3)(X)
        return trace["f"]["fn"].residual

    residual = left(X, Z)
    for c in range(3):
        hyper = {"lengthscale": lengthscales[c], "variance": variances[c]}
        np.testing.assert_allclose(residual[c], brute(V[c], **hyper)[1], atol=1e-8)


@pytest.mark.usefixtures("x64")
def test_scalar_inputs():
    Z1, X1 = Z[:, 0], X[:, 0]
    ours = values(V[0], at=X1, inducing=jnp.asarray(Z1))
    assert_close(ours, brute(V[0], X=X1[:, None], Z=Z1[:, None])[0], 10)


# Errors.


def test_a_process_inside_a_plate_raises():
    def model():
        with numpyro.plate("data", 7):
            gpaug.GaussianProcess("f", KERNEL, inducing=jnp.asarray(Z))

    with pytest.raises(ValueError, match='"f".*shape .7, 4.*inside a plate'):
        handlers.seed(model, 0)()


@pytest.mark.parametrize("at", [X[:, :1], X[:, 0], np.ones((2, 7, 2)), np.ones((0, 2))])
def test_inputs_of_the_wrong_shape_raise(at):
    with pytest.raises(ValueError, match=r"X.* shape"):
        values(V[0], at=at)


@pytest.mark.parametrize("inducing", [np.ones((0, 2)), np.ones((1, 1, 1, 1)), 3.0])
def test_inducing_inputs_of_the_wrong_shape_raise(inducing):
    with pytest.raises(ValueError, match="inducing has shape"):
        values(V[0], inducing=jnp.asarray(inducing))


def test_other_misuse_raises():
    with pytest.raises(ValueError, match="num_latents"):
        values(V, inducing=jnp.ones((3, 4, 2)), num_latents=2)
    with pytest.raises(ValueError, match="num_latents"):
        values(V[0], latents=jnp.array([0]))
    with pytest.raises(ValueError, match="policy"):
        gpaug.with_residual(lambda: None, "sometimes")


# The residual policy.


def regression(at, y=None, *, inducing=Z, noise=0.3):
    gp = gpaug.GaussianProcess("f", KERNEL, inducing=jnp.asarray(inducing), jitter=0.0)
    with numpyro.plate("data", at.shape[0]):
        return numpyro.sample("y", dist.Normal(gp(jnp.asarray(at)), noise), obs=y)


Y = RNG.normal(size=7)


@pytest.mark.usefixtures("x64")
def test_predictive_adds_noise_of_the_residual_variance():
    at = RNG.uniform(-2, 2, (5, 2))
    mean, residual = brute(V[0], X=at)
    count = 4000
    held = {"f.v": jnp.broadcast_to(jnp.asarray(V[0]), (count, 4))}
    draws = jax.jit(lambda key: Predictive(regression, held)(key, at))(random.key(0))
    f = np.asarray(draws["f"])
    assert f.shape == (count, 5)
    assert residual.min() > 0.01
    assert np.abs((f.mean(0) - mean) / np.sqrt(residual / count)).max() < 5
    assert np.abs(f.var(0) / residual - 1).max() < 5 * np.sqrt(2 / count)
    # Noise is independent between rows, and the observation contains the same noise.
    centred = (f - mean) / np.sqrt(residual)
    across = centred.T @ centred / count - np.diag((centred**2).mean(0))
    assert np.abs(across).max() < 5 / np.sqrt(count)
    noise = np.asarray(draws["y"]) - f
    assert np.abs(noise.var(0) / 0.3**2 - 1).max() < 5 * np.sqrt(2 / count)


@pytest.mark.usefixtures("x64")
def test_log_densities_use_the_mean():
    mean = brute(V[0])[0]
    likelihood = norm(mean, 0.3).logpdf(Y)
    prior = norm.logpdf(V[0]).sum()
    params = {"f.v": jnp.asarray(V[0])}
    total, *_ = density(regression, params, X, Y)
    assert_close(total, prior + likelihood.sum(), 10)
    assert_close(density(handlers.seed(regression, 0), params, X, Y)[0], total)
    held = {"f.v": jnp.asarray(V[:1])}
    pointwise = jax.jit(lambda held: log_likelihood(regression, held, X, Y)["y"])
    assert_close(pointwise(held), likelihood[None], 10)


@pytest.mark.usefixtures("x64")
def test_residual_sites_are_whitened_latents():
    model = gpaug.with_residual(regression, "site")
    eps = RNG.normal(size=7)
    params = {"f.v": jnp.asarray(V[0]), "f.eps": jnp.asarray(eps)}
    mean, residual = brute(V[0])
    expected = norm.logpdf(V[0]).sum() + norm.logpdf(eps).sum()
    expected += norm(mean + np.sqrt(residual) * eps, 0.3).logpdf(Y).sum()
    total, found, types = density(model, params, X, Y)
    assert_close(total, expected, 10)
    assert types["f.eps"] == "sample"
    assert_close(found["f"], mean + np.sqrt(residual) * eps, 10)


def test_residual_sites_do_not_go_into_plates_of_outputs():
    def model(X, rows, how):
        gp = gpaug.GaussianProcess("f", gpaug.kernels.Matern32(), X[:2], **how)
        with numpyro.plate("outputs", 2), numpyro.plate("data", rows):
            gp(X)

    model = handlers.seed(gpaug.with_residual(model, "site"), 0)
    for rows, how in (
        (3, {}),
        (2, {"num_latents": 2}),
        (2, {"loadings": jnp.ones((2, 1))}),
    ):
        run = partial(model, rows=rows, how=how)
        with pytest.raises(ValueError, match=r"before them, f = gp\(X\)"):
            jax.eval_shape(run, jnp.arange(rows * 1.0)[:, None])


# Other shapes of model.


def fit(model, *args, steps=25, **options):
    guide = gpaug.AutoSparseGP(model)
    svi = gpaug.ConjugateSVI(model, guide, **options)
    result = svi.run(random.key(0), steps, *args, progress_bar=False)
    return svi, guide, result


@pytest.mark.usefixtures("x64")
def test_several_processes_and_linear_weights_add_up():
    """Full processes and a linear term under normal noise: the mean field bound's
    predictive mean is the exact one, as means of Gaussian mean field are."""
    other = Matern32(1.3, 0.4)

    inputs, y = jnp.asarray(X), jnp.asarray(Y)

    def model(X, y=None):
        f = gpaug.GaussianProcess("f", KERNEL, inducing=inputs)
        g = gpaug.GaussianProcess("g", other, inducing=inputs)
        w = numpyro.sample("w", dist.Normal(jnp.zeros(2), 1).to_event(1))
        with numpyro.plate("data", X.shape[0]):
            loc = f(X) - 2 * g(X) + X @ w
            numpyro.sample("y", dist.Normal(loc, 0.5), obs=y)

    svi, guide, result = fit(model, inputs, y, steps=400)
    assert [b.name for b in guide.structure.blocks] == ["f", "g", "w"]
    assert np.all(np.diff(result.losses) < 1e-9)
    posterior = svi.posterior(result)
    parts = {
        "f": squared_exponential(X, X),
        "g": -2 * gram(other, inputs, inputs),
    }
    total = parts["f"] + 4 * gram(other, inputs, inputs) + X @ X.T
    weights = np.linalg.solve(total + 0.25 * np.eye(7), Y)
    for name, cross in parts.items():
        mean = posterior.predict_f(inputs, site=name).mean
        np.testing.assert_allclose(mean, cross @ weights, atol=1e-4)
    new = posterior.predict_y(inputs)
    np.testing.assert_allclose(new.mean, total @ weights, atol=1e-4)
