# SPDX-License-Identifier: Apache-2.0
"""Gaussian data whose entries are correlated, against linear algebra."""

import jax
import jax.numpy as jnp
import numpy as np
import numpyro
import numpyro.distributions as dist
import pytest
from numpyro import handlers
from numpyro.infer.util import log_density
from scipy.stats import multivariate_normal

import numpyro_gpaug as gpaug
from numpyro_gpaug.model.correlated_data import independent_data
from tests.conftest import slow

N, G = 7, 3
RNG = np.random.default_rng(3)
X, NEW = RNG.normal(size=(N, 2)), RNG.normal(size=(4, 2))
GROUP, AMONG = np.arange(N) % G, np.array([0, 1, 2, 1])
Y, HELD = RNG.normal(size=(N, 2)), RNG.normal(size=(4, 2))
NOISE = np.array([[0.5, 0.3], [0.3, 0.4]])
STEPS = 0.5 * 0.8 ** np.abs(np.subtract.outer(np.arange(N), np.arange(N)))


def outcomes(X, group, seen, Y=None, *, groups=G):
    """Two outcomes of each datum, which have noise in common."""
    slopes = numpyro.sample("slopes", dist.Normal(0, 2).expand([2, 2]).to_event(2))
    with numpyro.plate("groups", groups):
        b = numpyro.sample("b", dist.Normal(0, 0.7).expand([2]).to_event(1))
    with numpyro.plate("data", len(X)), handlers.mask(mask=seen):
        likelihood = dist.MultivariateNormal(X @ slopes + b[group], NOISE)
        numpyro.sample("Y", likelihood, obs=Y)


def design(X, group):
    """The outcomes' coefficients in the standard normal numbers of :func:`outcomes`."""
    found = np.zeros((len(X), 2, 4 + 2 * G))
    for k in range(2):
        found[:, k, [k, 2 + k]] = 2 * X
        found[np.arange(len(X)), k, 4 + 2 * group + k] = 0.7
    return found


def posterior_of(J, noise, y):
    """Mean and covariance of standard normal numbers, and the log evidence."""
    given = np.linalg.solve(noise, J)
    covariance = np.linalg.inv(np.eye(J.shape[1]) + J.T @ given)
    evidence = multivariate_normal(np.zeros(len(J)), J @ J.T + noise).logpdf(y)
    return covariance @ given.T @ y, covariance, evidence


@pytest.mark.parametrize("covariance", [slow("dense"), "groups"])
def test_several_outcomes_of_a_datum_against_linear_algebra(x64, covariance):
    seen = np.array([1, 1, 0, 1, 1, 0, 1], bool)
    data = np.where(seen[:, None], Y, np.nan)
    # With many groups, they are eliminated.
    groups = G if covariance == "dense" else 200
    svi = gpaug.ConjugateSVI(outcomes, gpaug.AutoLatentGaussian(outcomes))
    fit = svi.run(
        jax.random.key(0), 20, X, GROUP, seen, data, groups=groups, progress_bar=False
    )
    assert ("groups of" in repr(svi.guide)) == (covariance == "groups")
    kept = np.flatnonzero(seen)
    J = design(X, GROUP)[kept].reshape(-1, 4 + 2 * G)
    noise = np.kron(np.eye(len(kept)), NOISE)
    mean, spread, evidence = posterior_of(J, noise, Y[kept].ravel())
    np.testing.assert_allclose(-fit.losses[-1], evidence, rtol=1e-9)

    posterior, all_of = svi.posterior(fit), np.ones(4, bool)
    J = design(NEW, AMONG)
    with pytest.raises(ValueError, match="'Y' is observed at these arguments.*None"):
        posterior.predict_y(NEW, AMONG, all_of, HELD, groups=groups)
    predicted = posterior.predict_y(NEW, AMONG, all_of, groups=groups)
    expected = J @ spread @ J.mT + NOISE
    np.testing.assert_allclose(predicted.mean, J @ mean, rtol=1e-8)
    np.testing.assert_allclose(predicted.covariance_matrix, expected, rtol=1e-8)
    none = all_of.copy()
    none[1] = False
    found = posterior.log_prob(NEW, AMONG, none, HELD, groups=groups)
    parts = zip(J @ mean, expected, HELD, strict=True)
    densities = np.array([multivariate_normal(m, c).logpdf(y) for m, c, y in parts])
    np.testing.assert_allclose(found, densities * none, rtol=1e-8)
    means = posterior.predict_f(NEW, AMONG, all_of, site="Y", groups=groups).mean
    np.testing.assert_allclose(means, J @ mean, rtol=1e-8)


U = np.array([[0.6, 0.2, 0.0], [0.2, 0.5, -0.1], [0.0, -0.1, 0.4]])
TABLES, MORE = RNG.normal(size=(N, 3, 2)), RNG.normal(size=(4, 3, 2))


def test_masks_inside_of_events_are_kept():
    def model():
        fn = dist.MultivariateNormal(np.zeros((N, 2)), NOISE).mask(np.arange(N) > 2)
        numpyro.sample("Y", fn.to_event(1), obs=Y)

    models = model, independent_data(model)
    densities = jax.jit(lambda: [log_density(m, (), {}, {})[0] for m in models])()
    np.testing.assert_allclose(*densities, rtol=1e-5)


def tables(X, group, seen, Y=None, *, groups=G):
    """A matrix for each datum, whose rows and columns have noise in common."""
    slopes = numpyro.sample("slopes", dist.Normal(0, 2).expand([2, 2]).to_event(2))
    with numpyro.plate("groups", groups):
        b = numpyro.sample("b", dist.Normal(0, 0.7).expand([2]).to_event(1))
    mean = (X @ slopes + b[group])[:, None, :] * jnp.array([[1.0], [2.0], [-1.0]])
    rows, columns = np.linalg.cholesky(U), np.linalg.cholesky(NOISE)
    with numpyro.plate("data", len(X)), handlers.mask(mask=seen):
        numpyro.sample("Y", dist.MatrixNormal(mean, rows, columns), obs=Y)


@pytest.mark.parametrize(
    "dtype",
    [slow("float32"), "float64"],
    indirect=["dtype"],
)
def test_matrices_against_linear_algebra(dtype):
    rtol = 1e-8 if dtype == "float64" else 2e-4
    seen, kept = np.array([1, 1, 0, 1, 1, 0, 1], bool), [0, 1, 3, 4, 6]
    data = np.where(seen[:, None, None], TABLES, np.nan)
    svi = gpaug.ConjugateSVI(tables, gpaug.AutoLatentGaussian(tables))
    fit = svi.run(jax.random.key(0), 20, X, GROUP, seen, data, progress_bar=False)

    def in_matrices(J):
        times = np.array([1.0, 2.0, -1.0])[:, None, None]
        return (J[:, None] * times).reshape(len(J), 6, -1)

    noise = np.kron(U, NOISE)
    J = in_matrices(design(X, GROUP)[kept]).reshape(30, -1)
    mean, spread, evidence = posterior_of(
        J, np.kron(np.eye(5), noise), TABLES[kept].ravel()
    )
    np.testing.assert_allclose(-fit.losses[-1], evidence, rtol=rtol)

    posterior, J = svi.posterior(fit), in_matrices(design(NEW, AMONG))
    none = np.array([1, 0, 1, 1], bool)
    predicted = posterior.predict_y(NEW, AMONG, none)
    means, expected = J @ mean, J @ spread @ J.mT + noise
    assert (predicted.batch_shape, predicted.event_shape) == ((4,), (3, 2))
    tolerance = {"rtol": rtol, "atol": rtol}
    np.testing.assert_allclose(predicted.mean.reshape(4, 6), means, **tolerance)
    np.testing.assert_allclose(predicted.covariance_matrix, expected, **tolerance)
    variances = expected.diagonal(axis1=1, axis2=2).reshape(4, 3, 2)
    np.testing.assert_allclose(predicted.variance, variances, **tolerance)
    flat = MORE.reshape(4, 6)
    densities = np.array([
        multivariate_normal(m, c).logpdf(y)
        for m, c, y in zip(means, expected, flat, strict=True)
    ])  # fmt: skip
    log_prob = jax.jit(lambda d: d.log_prob(MORE))(predicted)
    np.testing.assert_allclose(log_prob, densities, rtol=rtol)
    found = posterior.log_prob(NEW, AMONG, none, MORE)
    np.testing.assert_allclose(found, densities * none, rtol=rtol)
    draw = jax.jit(lambda d: d.sample(jax.random.key(1), (40_000,)))
    draws = np.asarray(draw(predicted)).reshape(-1, 4, 6)
    assert np.abs(np.cov(draws[:, 0].T) - expected[0]).max() < 0.05 * expected[0].max()
    eta = posterior.predict_f(NEW, AMONG, none, site="Y", full_covariance=True)
    J = J.reshape(24, -1)
    np.testing.assert_allclose(eta.mean.ravel(), J @ mean, **tolerance)
    np.testing.assert_allclose(eta.variance, J @ spread @ J.T, **tolerance)


def matrix_of_rows(X, steps, Y=None, *, tau=None):
    """One matrix of outcomes, correlated along rows and along columns."""
    tau = numpyro.sample("tau", dist.HalfNormal(1)) if tau is None else tau
    B = numpyro.sample("B", dist.Normal(0, 3).expand([2, 2]).to_event(2))
    columns = tau * np.linalg.cholesky(NOISE)
    rows = jnp.linalg.cholesky(steps)
    numpyro.sample("Y", dist.MatrixNormal(X @ B, rows, columns), obs=Y)


def of_rows(X, steps, tau):
    J = 3 * np.kron(X, np.eye(2))
    return J, np.kron(steps, tau**2 * NOISE)


def test_one_matrix_of_all_data_against_linear_algebra(x64):
    svi = gpaug.ConjugateSVI(matrix_of_rows, gpaug.AutoLatentGaussian(matrix_of_rows))
    tau, steps = np.array(0.8), STEPS[:4, :4]
    fit = svi.run(
        jax.random.key(0), 20, X, STEPS, Y, tau=tau, progress_bar=False
    )  # fmt: skip
    mean, spread, evidence = posterior_of(*of_rows(X, STEPS, tau), Y.ravel())
    np.testing.assert_allclose(-fit.losses[-1], evidence, rtol=1e-9)
    posterior = svi.posterior(fit)
    with pytest.warns(UserWarning, match="'Y' are correlated .* another set"):
        predicted = posterior.predict_y(NEW, steps)
    J, noise = of_rows(NEW, steps, tau)
    whole = J @ spread @ J.T + noise
    np.testing.assert_allclose(predicted.mean.ravel(), J @ mean, rtol=1e-8)
    np.testing.assert_allclose(predicted.covariance_matrix, whole, rtol=1e-8)
    with pytest.warns(UserWarning, match="'Y' are correlated"):
        found = posterior.log_prob(NEW, steps, HELD)
    expected = multivariate_normal(J @ mean, whole).logpdf(HELD.ravel())
    np.testing.assert_allclose(found, expected, rtol=1e-8)
    with pytest.raises(ValueError, match=r"shape \(4, 2\), and scale_tril_row has 7"):
        posterior.predict_y(NEW, STEPS)
    with pytest.raises(ValueError, match="the 5002 entries of 'Y' are all correlated"):
        posterior.predict_y(np.ones((2501, 2)), np.eye(2501))


def in_a_plate(likelihood):
    with numpyro.plate("data", N):
        return numpyro.sample("y", likelihood, obs=Y)


ROAD = np.eye(N, k=1) + np.eye(N, k=-1)
DISTRIBUTIONS = {
    "factor of each datum": lambda a: in_a_plate(
        dist.MultivariateNormal(
            a, scale_tril=jnp.linalg.cholesky(NOISE) * (1 + X[:, :1, None] ** 2)
        )
    ),
    "precision": lambda a: in_a_plate(
        dist.MultivariateNormal(a, precision_matrix=jnp.asarray(NOISE))
    ),
    "low rank": lambda a: numpyro.sample(
        "y",
        dist.LowRankMultivariateNormal(a * X[:, 0], X, 0.1 + jnp.square(X[:, 1])),
        obs=Y[:, 0],
    ),
    "matrix": lambda a: numpyro.sample(
        "y",
        dist.MatrixNormal(
            a * X, jnp.linalg.cholesky(jnp.asarray(STEPS)), np.linalg.cholesky(NOISE)
        ),
        obs=Y,
    ),
    "areas": lambda a: numpyro.sample(
        "y", dist.CAR(a * X[:, 0], 0.7, 2.0, ROAD), obs=Y[:, 0]
    ),
}


@pytest.mark.parametrize("sample", DISTRIBUTIONS.values(), ids=DISTRIBUTIONS.keys())
def test_independent_data_have_the_same_density_and_derivatives(x64, sample):
    def model():
        sample(numpyro.sample("a", dist.Normal(0, 1)))

    @jax.jit
    def densities(a):
        both = independent_data(model), model
        return jnp.stack([log_density(m, (), {}, {"a": a})[0] for m in both])

    at = jnp.asarray(-2.0), jnp.asarray(1.0)
    for ours, theirs in jax.jit(lambda *a: jax.jvp(densities, a[:1], a[1:]))(*at):
        np.testing.assert_allclose(ours, theirs, rtol=1e-10)


def test_covariances_that_depend_on_latents_hold_these():
    def model(X, y=None):
        b = numpyro.sample("b", dist.Normal(0, 3).expand([2]).to_event(1))
        s = numpyro.sample("s", dist.Normal(0, 1))
        covariance = jnp.exp(s) * jnp.eye(N)
        numpyro.sample("y", dist.MultivariateNormal(X @ b, covariance), obs=y)

    guide = gpaug.AutoLatentGaussian(model)
    guide.setup(X, Y[:, 0])
    assert "s  ()    not jointly Gaussian" in repr(guide)
    assert "observed, in closed form" in repr(guide)
