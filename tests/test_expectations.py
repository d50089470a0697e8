# SPDX-License-Identifier: Apache-2.0
"""Exact expectations, augmented bounds, and the contract both registries hold."""

from functools import cache
from math import exp, log1p, pi, sqrt

import jax
import jax.numpy as jnp
import numpy as np
import numpyro
import numpyro.distributions as dist
import pytest
from jax import random
from numpyro.distributions import constraints
from scipy.integrate import quad
from scipy.special import expit, ndtr
from scipy.stats import t

import numpyro_gpaug as gpaug
from numpyro_gpaug.errors import NotConjugateError, UnknownLikelihoodError
from numpyro_gpaug.likelihoods.expectations import predictive
from numpyro_gpaug.math.logistic import (
    expected_log_sigmoid,
    expected_sigmoid,
    logistic_mixture,
)
from tests.conftest import assert_close

MEANS = [-200.0, -37.0, -9.0, -2.0, -0.3, 0.0, 0.3, 2.0, 9.0, 37.0, 200.0]
VARIANCES = [1e-6, 1e-4, 1e-2, 0.3, 1.0, 7.0, 1e2, 1e3, 1e4, 1e6]
GRID = np.array([(m, v) for m in MEANS for v in VARIANCES])


def log_sigmoid(f):
    return f - log1p(exp(f)) if f < 0 else -log1p(exp(-f))


def sigmoid(f):
    return exp(log_sigmoid(f))


def sigmoid_of_minus(f):
    return sigmoid(-f)


def slope_sigmoid(f):
    return exp(log_sigmoid(f) + log_sigmoid(-f))


def expectation(g, mean, variance):
    """``E g(f)`` by adaptive quadrature between points where the integrand turns."""
    scale = sqrt(variance)
    steps = (-38, -12, -8, -5, -3, -1.5, 0, 1.5, 3, 5, 8, 12, 38)
    kinks = ((k - mean) / scale for k in (-40, -12, -4, -1, 0, 1, 4, 12, 40))
    turns = sorted({*steps, *(z for z in kinks if abs(z) < 38)})

    def integrand(z):
        return g(mean + scale * z) * exp(-0.5 * z * z)

    parts = [
        quad(integrand, a, b, epsabs=0, epsrel=1e-13)[0]
        for a, b in zip(turns[:-1], turns[1:], strict=True)
    ]
    return sum(parts) / sqrt(2 * pi)


@cache
def of_the_grid(g, dtype):
    """References at the grid's points, rounded to the dtype."""
    return reference(g, GRID.astype(dtype).astype(float))


def reference(g, points):
    return np.array([expectation(g, *point) for point in points.tolist()])


def test_expected_log_sigmoid_and_derivatives(dtype):
    tolerance = {"float64": 1e-12, "float32": 1e-6}[dtype]

    @jax.jit
    def everything(mean, variance):
        slopes = jax.vmap(jax.grad(expected_log_sigmoid, (0, 1)))(mean, variance)
        value = expected_log_sigmoid(mean, variance)
        return value, *slopes, expected_sigmoid(-mean, variance)

    found = everything(*GRID.astype(dtype).T)
    assert {x.dtype for x in found} == {np.dtype(dtype)}
    value, by_mean, by_variance, share = (np.asarray(x, float) for x in found)
    exact = of_the_grid(log_sigmoid, dtype)
    error = np.abs(value - exact) / np.maximum(1, np.abs(exact))
    assert error.max() < tolerance
    assert np.all(value <= 0)
    exact = of_the_grid(sigmoid_of_minus, dtype)
    assert np.abs(by_mean - exact).max() < tolerance
    assert np.abs(share - exact).max() < tolerance
    exact = -0.5 * of_the_grid(slope_sigmoid, dtype)
    assert np.abs(by_variance - exact).max() < tolerance


@pytest.mark.usefixtures("x64")
def test_second_derivatives_obey_the_heat_equation():
    @jax.jit
    @jax.vmap
    def everything(mean, variance):
        slopes = (
            jax.grad(jax.grad(expected_log_sigmoid)),
            jax.jacfwd(jax.jacrev(expected_log_sigmoid)),
        )
        return [f(mean, variance) for f in (*slopes, jax.grad(expected_log_sigmoid, 1))]

    points = np.array([(m, v) for m, v in GRID if abs(m) < 40])
    twice, forward, once = (np.asarray(x) for x in everything(*points.T))
    np.testing.assert_allclose(twice, 2 * once, rtol=1e-8, atol=1e-13)
    np.testing.assert_allclose(forward, twice, rtol=1e-8, atol=1e-13)


def test_the_point_mass_and_broadcasting(dtype):
    mean = np.linspace(-30, 30, 7).astype(dtype)[:, None]
    ours = jax.jit(expected_log_sigmoid)
    value = ours(mean, np.zeros((), dtype))
    assert_close(value[:, 0], [log_sigmoid(float(m)) for m in mean[:, 0]])
    table = np.asarray(ours(mean, np.ones((7, 3), dtype)))
    assert table.shape == (7, 3)
    assert_close(ours(mean[2, 0], np.ones((), dtype)), table[2, 1])


def test_the_mixture_is_the_logistic(dtype):
    scales, weights = logistic_mixture(dtype)
    assert scales.dtype == weights.dtype == dtype
    assert np.all(np.asarray(weights) > 0)
    f = np.linspace(-30, 30, 61)
    scales, weights = np.asarray(scales, float), np.asarray(weights, float)
    ours = ndtr(f[:, None] / scales) @ weights
    tolerance = {"float64": 1e-14, "float32": 3e-7}[dtype]
    assert np.abs(ours - expit(f)).max() < tolerance


# Wrappers.


@pytest.fixture
def wrapped():
    m = np.linspace(-2, 2, 6, dtype="float32").reshape(2, 3)
    moments = {"logits": m}, {"logits": np.ones((2, 3), "float32")}
    y = np.array([[0, 1, 1], [0, 0, 1]])
    plain = dist.Bernoulli(logits=np.zeros((2, 3), "float32"))
    return plain, y, moments, np.asarray(expected(plain, y, *moments))


expected = jax.jit(gpaug.expected_log_prob)
MASK = np.array([[True, False, True], [True, True, False]])


def test_to_event_sums(wrapped):
    plain, y, moments, value = wrapped
    assert_close(expected(plain.to_event(1), y, *moments), value.sum(1))
    assert_close(expected(plain.to_event(2), y, *moments), value.sum())


def test_mask_removes_even_nan(wrapped):
    plain, y, moments, value = wrapped
    masked = expected(plain.mask(MASK), y, *moments)
    assert_close(masked, np.where(MASK, value, 0))
    broken = np.where(MASK, y, np.float32(np.nan))
    assert_close(expected(plain.mask(MASK), broken, *moments), masked)
    rows = expected(plain.to_event(1).mask(np.array([False, True])), y, *moments)
    assert_close(rows, [0, value[1].sum()])
    nothing = plain.mask(False)  # noqa: FBT003
    none = jax.jit(lambda: gpaug.expected_log_prob(nothing, y, *moments))()
    assert_close(none, np.zeros((2, 3)))


def test_masked_nan_has_finite_gradients(wrapped):
    plain, y, moments, _ = wrapped
    broken = np.where(MASK, y, np.float32(np.nan))

    @jax.jit
    @jax.grad
    def gradient(m):
        means = {"logits": m}
        return expected(plain.mask(MASK), broken, means, moments[1]).sum()

    slopes = np.asarray(gradient(moments[0]["logits"]))
    assert np.isfinite(slopes).all()
    assert np.all((slopes != 0) == MASK)


def test_expand_broadcasts(wrapped):
    _, y, moments, value = wrapped
    row = dist.Bernoulli(logits=np.zeros(3, "float32"))
    assert_close(expected(row.expand([2, 3]), y, *moments), value)
    of_row = {"logits": moments[0]["logits"][1]}, {"logits": np.ones(3, "float32")}
    same = expected(row.expand([4, 3]).to_event(1), y[1], *of_row)
    assert_close(same, np.full(4, value[1].sum()))


# Predictive distributions.


def test_unknown_likelihoods_raise():
    with pytest.raises(UnknownLikelihoodError, match="Poisson"):
        gpaug.expected_log_prob(dist.Poisson(1.0), 1, {}, {})
    with pytest.raises(UnknownLikelihoodError, match="Poisson"):
        predictive(dist.Poisson(jnp.ones(2)).to_event(1), {}, {})


# A user's own likelihoods, end to end.


class LogPoisson(dist.Distribution):
    """Counts with a log-rate."""

    arg_constraints = {"log_rate": constraints.real}
    support = constraints.nonnegative_integer
    pytree_data_fields = ("log_rate",)

    def __init__(self, log_rate, *, validate_args=None):
        self.log_rate = log_rate
        super().__init__(jnp.shape(log_rate), (), validate_args=validate_args)

    def sample(self, key, sample_shape=()):
        return random.poisson(
            key, jnp.exp(self.log_rate), sample_shape + self.batch_shape
        )

    def log_prob(self, value):
        return dist.Poisson(jnp.exp(self.log_rate)).log_prob(value)


class Robust(dist.StudentT):
    """A Student-t whose location carries a latent."""


class RobustAugmentation(gpaug.Augmentation):
    """A gamma-distributed precision per datum."""

    latents = ("loc",)

    def bound(self, d, y, means, variances):
        square = (y - means["loc"]) ** 2 + variances["loc"]
        at = jnp.sqrt(square)
        return dist.StudentT(d.df, 0.0, d.scale).log_prob(at)

    def conditional(self, d, y, f):
        rate = 0.5 * (d.df * d.scale**2 + (y - f["loc"]) ** 2)
        return {"precision": dist.Gamma((d.df + 1) / 2, rate)}

    def natural(self, d, y, aux, f):
        return {"loc": (y * aux["precision"], aux["precision"])}


@pytest.fixture
def line():
    X = np.linspace(-2, 2, 12)[:, None]
    return X, X[::3]


def process_model(likelihood):
    def model(X, y=None, *, inducing):
        kernel = gpaug.kernels.SquaredExponential(0.8, 1.5)
        gp = gpaug.GaussianProcess("f", kernel, inducing=inducing)
        with numpyro.plate("data", X.shape[0]):
            numpyro.sample("y", likelihood(gp(X)), obs=y)

    return model


@pytest.mark.usefixtures("x64")
def test_a_registered_expectation_end_to_end(line):
    X, Z = line
    y = jnp.array([0, 1, 0, 2, 1, 3, 5, 3, 2, 4, 1, 0])

    def expected(d, y, m, v):
        m, v = m["log_rate"], v["log_rate"]
        return y * m - jnp.exp(m + v / 2) - jax.scipy.special.gammaln(y + 1.0)

    def new(d, m, v):
        mean = jnp.exp(m["log_rate"] + v["log_rate"] / 2)
        return dist.NegativeBinomial2(mean, 1 / jnp.expm1(v["log_rate"]))

    gpaug.register_expectation(LogPoisson, ("log_rate",), expected, new)
    model = process_model(LogPoisson)
    guide = gpaug.AutoSparseGP(model)
    svi = gpaug.ConjugateSVI(model, guide)
    result = svi.run(random.key(0), 30, X, y, inducing=Z, progress_bar=False)
    assert np.all(np.diff(result.losses) < 1e-9)
    (site,) = guide.structure.observed
    assert site.route is gpaug.Route.CLOSED_FORM

    # The same model by quadrature: the likelihood is not registered.
    plain = process_model(lambda f: dist.Poisson(jnp.exp(f)))
    loss = gpaug.TraceAnalytic_ELBO()
    assert loss.routes(plain, X, y, inducing=Z) == {"y": gpaug.Route.GAUSS_HERMITE}
    other = gpaug.AutoSparseGP(plain).setup(X, y, inducing=Z)

    @jax.jit
    def by_quadrature(params):
        return loss.loss(random.key(0), params, plain, other, X, y, inducing=Z)

    same = by_quadrature(result.params)
    np.testing.assert_allclose(same, result.losses[-1], rtol=1e-10)
    posterior = svi.posterior(result)
    f = posterior.predict_f(X)
    mean = posterior.predict_y(X).mean
    np.testing.assert_allclose(mean, jnp.exp(f.mean + f.variance / 2), rtol=1e-10)
    assert np.corrcoef(mean, y)[0, 1] > 0.6

    augmented = gpaug.ConjugateSVI(model, guide, updates="augmented")
    with pytest.raises(NotConjugateError, match="LogPoisson has no augmentation"):
        augmented.run(random.key(0), 2, X, y, inducing=Z, progress_bar=False)


@pytest.mark.usefixtures("x64")
def test_a_registered_augmentation_end_to_end(line):
    X, Z = line
    y = np.where(np.arange(12) == 4, 30.0, np.sin(2 * X[:, 0]))
    gpaug.register_augmentation(Robust, RobustAugmentation())
    model = process_model(lambda f: Robust(3.0, f, 0.2))
    svi = gpaug.ConjugateSVI(model, gpaug.AutoSparseGP(model), updates="augmented")
    result = svi.run(random.key(0), 60, X, y, inducing=Z, progress_bar=False)
    assert np.all(np.diff(result.losses) < 1e-9)

    # The bound is stationary there: gradients in mean and factor vanish.
    dense = gpaug.AutoSparseGP(model, covariance="dense").setup(X, y, inducing=Z)
    (block,) = dense.structure.blocks
    precision = np.asarray(result.params[f"{block.site}_auto_precision"])
    covariance = np.linalg.inv(precision)
    mean = covariance @ result.params[f"{block.site}_auto_potential"]
    params = {"f.v_auto_loc": mean, "f.v_auto_tril": np.linalg.cholesky(covariance)}
    loss = gpaug.TraceAnalytic_ELBO(bound="augmented")

    def at(params):
        return loss.loss(random.key(0), params, model, dense, X, y, inducing=Z)

    value, gradients = jax.jit(jax.value_and_grad(at))(params)
    np.testing.assert_allclose(value, result.losses[-1], rtol=1e-10)
    for gradient in gradients.values():
        assert np.abs(gradient).max() < 1e-5


@pytest.mark.slow
@pytest.mark.usefixtures("x64")
def test_an_augmentation_alone_is_enough_for_the_defaults(line):
    """Exact expectations are then quadratures: no route that is offered may fail."""
    X, Z = line
    y = jnp.sin(2 * X[:, 0])
    gpaug.register_augmentation(Robust, RobustAugmentation())
    model = process_model(lambda f: Robust(3.0, f, 0.2))
    guide = gpaug.AutoSparseGP(model, covariance="dense").setup(X, y, inducing=Z)
    params = {"f.v_auto_loc": jnp.zeros(4), "f.v_auto_tril": jnp.eye(4)}
    loss = gpaug.TraceAnalytic_ELBO()
    value = jax.jit(
        lambda params: loss.loss(random.key(0), params, model, guide, X, y, inducing=Z)
    )(params)
    # At the prior every f is N(0, 1.5) and the divergence is 0.
    nodes, weights = np.polynomial.hermite_e.hermegauss(32)
    f = np.sqrt(1.5) * nodes
    terms = t.logpdf(np.asarray(y)[:, None], 3.0, f, 0.2)
    expected = np.sum(terms @ weights) / weights.sum()
    np.testing.assert_allclose(-value, expected, rtol=0.02)
    svi = gpaug.ConjugateSVI(model, gpaug.AutoSparseGP(model))
    result = svi.run(random.key(0), 5, X, y, inducing=Z, progress_bar=False)
    assert result.losses[-1] < value
