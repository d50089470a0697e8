# SPDX-License-Identifier: Apache-2.0
"""Likelihoods as NumPyro distributions, and predictions with the latent integrated
out."""

from functools import cache

import jax
import jax.numpy as jnp
import numpy as np
import numpyro
import numpyro.distributions as dist
import pytest
import scipy.stats as st
from jax import random
from scipy.special import expit, gammaln, log_expit, log_softmax, logsumexp

import numpyro_gpaug as gpaug
from numpyro_gpaug.distributions.bayesian_svm import expected_ratio
from numpyro_gpaug.likelihoods.expectations import predictive, stable_log_prob
from numpyro_gpaug.math.normal import expected_absolute, expected_ramp
from numpyro_gpaug.math.quadrature import gaussian_nodes, log_gamma_nodes
from tests.augmented import normal_rule
from tests.conftest import slow, slow_in_double

PARAMETERS = {
    "binomial": ("logits", lambda m: dist.Binomial(20, logits=m)),
    "negative_binomial": ("logits", lambda m: dist.NegativeBinomialLogits(9.0, m)),
    "poisson": ("logits", lambda m: gpaug.LogisticPoisson(m, 12.0)),
    "student_t": ("loc", lambda m: dist.StudentT(9.0, m, 0.6)),
    "laplace": ("loc", lambda m: dist.Laplace(m, 0.7)),
    "svm": ("f", gpaug.BayesianSVM),
}


def predicted(name, m, v):
    if name == "heteroscedastic":
        d = gpaug.HeteroscedasticNormal(m, m, 3.0)
        means = {"loc": m, "precision_logits": m + 1}
        return predictive(d, means, dict.fromkeys(means, v))
    latent, make = PARAMETERS[name]
    return predictive(make(m), {latent: m}, {latent: v})


def moments(dtype):
    return np.array([-0.7, 0.4, 1.0], dtype), np.array([0.1, 0.3, 0.01], dtype)


def of_classes(name, dtype):
    m = np.stack([moments(dtype)[0], np.zeros(3, dtype), np.ones(3, dtype)], -1)
    if name == "predicted_robust_max":
        return predictive(gpaug.RobustMax(m, 0.1), {"f": m}, {"f": 0.3 + m * m})
    softmax = name == "logistic_softmax"
    return gpaug.LogisticSoftmax(m) if softmax else gpaug.RobustMax(m, 0.1)


TABLE = {
    "svm": lambda t: gpaug.BayesianSVM(moments(t)[0]),
    "logistic_poisson": lambda t: gpaug.LogisticPoisson(moments(t)[0], 7.0),
    "heteroscedastic_normal": lambda t: gpaug.HeteroscedasticNormal(
        moments(t)[0], moments(t)[1], 5.0
    ),
    **{
        f"predicted_{name}": lambda t, name=name: predicted(name, *moments(t))
        for name in [*PARAMETERS, "heteroscedastic"]
    },
    **{
        name: lambda t, name=name: of_classes(name, t)
        for name in ("logistic_softmax", "robust_max", "predicted_robust_max")
    },
}
# Classes have no order, and no moments.
ORDERED = list(TABLE)[:-3]
# Distributions of positive numbers, which have tests of their own besides.
POSITIVE = {
    gpaug.PolyaGamma: (1.0, [0.0, 1.0, 4.0]),
    gpaug.GeneralizedInverseGaussian: ([-1.0, 0.5, 3.0], 2.0, [0.1, 1.0, 5.0]),
    gpaug.InverseGaussian: ([0.5, 1.0, 4.0], [2.0, 1.0, 0.3]),
}
CITIZENS = TABLE | {
    kind.__name__: lambda t, kind=kind: kind(*(np.array(x, t) for x in POSITIVE[kind]))
    for kind in POSITIVE
}


@cache
def compiled(name, dtype):
    """Return the log-density, mean and variance in one program: op by op they take
    long.
    """

    @jax.jit
    def make():
        d = CITIZENS[name](dtype)
        return d, d.mean, d.variance

    return make()


QUICK = (
    "InverseGaussian", "svm", "logistic_poisson", "predicted_poisson",
    "heteroscedastic_normal", "predicted_student_t", "robust_max", "logistic_softmax",
)  # fmt: skip


def some_slow(names):
    return [n if n in QUICK else slow(n) for n in names]


@pytest.mark.parametrize("name", some_slow(CITIZENS))
def test_citizenship(x64, name) -> None:
    """Pytree, jit, vmap and expand leave the log-density what it is."""
    d, moment, _ = compiled(name, "float64")
    assert (d.batch_shape, d.event_shape) == ((3,), ())
    y = np.ones(3, int if name in TABLE and name not in ORDERED else float)

    @jax.jit
    def everything(d, y):
        stacked = jax.tree.map(lambda x: jnp.stack([x, x]), d)
        mapped = jax.vmap(lambda d, y: d.log_prob(y))(stacked, jnp.stack([y, y]))
        expanded = d.expand((2, 3)).log_prob(y)
        event = d.to_event(1).log_prob(y)
        return d.log_prob(y), expanded, mapped, event, d.mean, d.support(y)

    value, expanded, mapped, event, mean, supported = everything(d, y)
    assert value.shape == (3,)
    np.testing.assert_allclose(expanded, np.stack([value] * 2), rtol=1e-12)
    np.testing.assert_allclose(mapped, np.stack([value] * 2), rtol=1e-12)
    np.testing.assert_allclose(event, np.sum(value), rtol=1e-12)
    rebuilt = jax.tree.unflatten(jax.tree.structure(d), jax.tree.leaves(d))
    assert type(rebuilt) is type(d)
    assert rebuilt.batch_shape == (3,)
    np.testing.assert_array_equal(everything(rebuilt, y)[-2], mean)
    np.testing.assert_allclose(mean, moment, rtol=1e-12)
    assert supported.all()


# The samplers of the others have tests of their own.
@pytest.mark.parametrize(
    "kind", [k if k is gpaug.InverseGaussian else slow(k) for k in POSITIVE]
)
def test_draws_of_positive_numbers(kind) -> None:
    """Expanded, mapped, none of them, of whole parameters, and as a site."""
    args = [np.array(x, "float32") for x in POSITIVE[kind]]
    d, full, key = kind(*args), np.broadcast_arrays(*args), random.key(0)
    assert not d.has_rsample
    wide, keys = d.expand((4, 3)), random.split(key, 3)
    draw = jax.jit(lambda key: wide.sample(key, (5,)))
    draws, again, others = map(np.asarray, (draw(key), draw(key), draw(keys[0])))
    assert draws.shape == (5, 4, 3)
    assert len(np.unique(draws)) == 60
    np.testing.assert_array_equal(draws, again)
    assert np.all(draws != others)

    @jax.jit
    def mapped(keys, *full):
        each = jax.vmap(lambda k, *args: kind(*args).sample(k, (6,)))(keys, *full)
        return each[1], kind(*(x[1] for x in full)).sample(keys[1], (6,))

    np.testing.assert_allclose(*mapped(keys, *full), rtol=1e-4)
    of_wide, mean = jax.jit(lambda: (wide.mean, d.mean))()
    np.testing.assert_allclose(of_wide, np.tile(mean, (4, 1)), rtol=1e-6)

    def model():
        with numpyro.plate("data", 3):
            numpyro.sample("x", d)

    def shapes(key):
        whole = kind(*(np.arange(1, 4) for _ in args))
        trace = numpyro.handlers.trace(numpyro.handlers.seed(model, key)).get_trace()
        some = trace["x"]["value"], d.sample(key, (0,)), wide.log_prob(draws)
        return *some, whole.sample(key), whole.mean

    *some, drawn, mean = jax.eval_shape(shapes, key)
    assert [x.shape for x in some] == [(3,), (0, 3), (5, 4, 3)]
    assert drawn.dtype == mean.dtype == "float32"


@pytest.mark.parametrize("name", TABLE)
def test_dtypes(dtype, name) -> None:
    is_discrete = []

    def everything(key):
        d = TABLE[name](dtype)
        is_discrete.append(d.is_discrete)
        draw = d.sample(key, (4,))
        return draw, (d.mean, d.variance, d.log_prob(draw))

    draw, rest = jax.eval_shape(everything, random.key(0))
    assert draw.shape == (4, 3)
    if not is_discrete[0]:
        assert draw.dtype == dtype
    assert {leaf.dtype for leaf in rest} == {np.dtype(dtype)}


SAMPLED = ("svm", "heteroscedastic_normal")


@pytest.mark.parametrize(
    "name",
    [n if n in SAMPLED else slow(n) for n in ORDERED],
)
def test_draws_have_the_moments(name) -> None:
    d, mean, variance = compiled(name, "float32")
    num = 20_000
    sample = jax.jit(lambda d, key: d.sample(key, (num,)))
    draws = np.asarray(sample(d, random.key(1)), float)
    error = np.abs(draws.mean(0) - mean) / np.sqrt(np.asarray(variance) / num)
    assert error.max() < 4.5
    spread = draws.var(0)
    kurtosis = np.square(np.square(draws - draws.mean(0))).mean(0) / spread**2
    error = np.abs(spread / variance - 1) / np.sqrt((kurtosis - 1) / num)
    assert error.max() < 4.5


@pytest.mark.parametrize("name", some_slow(ORDERED))
def test_densities_are_normalised_and_have_the_moments(x64, name) -> None:
    d, exact_mean, exact_variance = compiled(name, "float64")
    if d.is_discrete:
        y, weight = np.arange(2.0 if "svm" in name else 3000.0), 1.0
    else:
        u = np.linspace(-12, 12, 4001)
        y, weight = np.sinh(u), np.cosh(u) * (u[1] - u[0])
    log_prob = d.normalized_log_prob if name == "svm" else d.log_prob
    density = np.exp(jax.jit(log_prob)(y[:, None])).T * weight
    mean = density @ y
    tail = 1e-5 if name in ("predicted_student_t", "predicted_laplace") else 1e-7
    np.testing.assert_allclose(density.sum(1), 1, rtol=tail)
    np.testing.assert_allclose(mean, exact_mean, rtol=tail, atol=tail)
    second = density @ y**2 - mean**2
    np.testing.assert_allclose(second, exact_variance, rtol=tail, atol=tail)


# The likelihoods.


def test_svm_pseudo_likelihood() -> None:
    f = np.array([-3.0, 0.0, 0.5, 2.0], "float32")

    @jax.jit
    def everything(f):
        d, both = gpaug.BayesianSVM(f), (1, 0)
        pseudo = [d.log_prob(jnp.full(4, y)) for y in both]
        return pseudo, d.probs, [d.normalized_log_prob(y) for y in both]

    (one, zero), probs, (log_one, log_zero) = everything(f)
    np.testing.assert_allclose(one, [-8, -2, -1, 0])
    np.testing.assert_allclose(zero, [0, -2, -3, -6])
    sums = np.exp(one) + np.exp(zero)
    np.testing.assert_allclose(sums[[1, 3]], [0.2707, 1.0025], atol=1e-4)
    ratio = np.exp(one) / sums
    np.testing.assert_allclose(probs, ratio, rtol=1e-6)
    np.testing.assert_allclose(np.exp(log_one), ratio, rtol=1e-6)
    np.testing.assert_allclose(log_zero, np.log1p(-ratio), rtol=1e-4)


def test_svm_arguments() -> None:
    with pytest.raises(ValueError, match="probit"):
        gpaug.BayesianSVM(np.zeros(2), predictive="softmax")
    d = gpaug.BayesianSVM(np.zeros(2, "float32"), validate_args=True)
    with pytest.warns(UserWarning, match="Out-of-support"):
        d.log_prob(np.array([-1, 1]))


def test_scaled_likelihoods_against_scipy(x64) -> None:
    logits, y = np.array([-2.0, 0.0, 3.0]), np.array([0, 2, 5])

    @jax.jit
    def ours(logits, y):
        distributions = (
            gpaug.LogisticPoisson(logits, 4.0),
            gpaug.HeteroscedasticNormal(0.5, logits, 4.0),
        )
        return [d.log_prob(y) for d in distributions]

    poisson, normal = ours(logits, y)
    rate = 4 * expit(logits)
    np.testing.assert_allclose(poisson, st.poisson.logpmf(y, rate), rtol=1e-12)
    expected = st.norm.logpdf(y, 0.5, 1 / np.sqrt(rate))
    np.testing.assert_allclose(normal, expected, rtol=1e-12)


def test_extreme_logits_stay_finite() -> None:
    @jax.jit
    def ours(logits, of_precision):
        d = gpaug.HeteroscedasticNormal(0.0, of_precision, 4.0)
        return gpaug.LogisticPoisson(logits, 4.0).log_prob(3), d.log_prob(3.0)

    for values in ours(np.array([-200.0, 200.0]), np.array([-80.0, 200.0])):
        assert values.dtype == "float32"
        assert np.isfinite(values).all()


@pytest.mark.parametrize(
    "make",
    [
        lambda: gpaug.LogisticPoisson(jnp.zeros(2), -1.0, validate_args=True),
        lambda: gpaug.HeteroscedasticNormal(0.0, 0.0, 0.0, validate_args=True),
        lambda: gpaug.BayesianSVM(jnp.array([jnp.nan]), validate_args=True),
    ],
)
def test_bad_parameters(make) -> None:
    with pytest.raises(ValueError, match="invalid"):
        make()


# Predictions.

MEANS = [-9.0, 0.5, 5.0, 200.0]
VARIANCES = [1e-8, 0.25, 4.0, 100.0, 1e4, 1e6]
GRID = np.array([(m, v) for m in MEANS for v in VARIANCES])


@cache
def rule(turns):
    m, v = GRID.T
    z, weights = normal_rule(m, np.sqrt(v), turns)
    return m[:, None] + np.sqrt(v)[:, None] * z, weights


def average(g, *turns):
    f, weights = rule(turns)
    return (weights * g(f)).sum(1)


def binomial(n, y):
    top = gammaln(n + 1) - gammaln(y + 1) - gammaln(n - y + 1)
    return lambda f: np.exp(top + y * log_expit(f) + (n - y) * log_expit(-f))


def negative_binomial(r, y):
    top = gammaln(y + r) - gammaln(y + 1) - gammaln(r)
    return lambda f: np.exp(top + y * log_expit(f) + r * log_expit(-f))


def logistic_poisson(rate, y):
    top = y * np.log(rate) - gammaln(y + 1)
    return lambda f: np.exp(top + y * log_expit(f) - rate * expit(f))


CASES = [
    ("logits", lambda z: dist.Binomial(20, logits=z), 5, binomial(20, 5), -1.1),
    ("logits", lambda z: dist.Binomial(1000, logits=z), 300,
     binomial(1000, 300), -0.85),
    ("logits", lambda z: dist.Binomial(1000, logits=z), 0, binomial(1000, 0), -7.6),
    ("logits", lambda z: dist.NegativeBinomialLogits(2.5, z), 3,
     negative_binomial(2.5, 3), 0.3),
    ("logits", lambda z: dist.NegativeBinomialLogits(50.0, z), 200,
     negative_binomial(50.0, 200), 1.4),
    ("logits", lambda z: gpaug.LogisticPoisson(z, 4.0), 0,
     logistic_poisson(4.0, 0), 0.0),
    ("logits", lambda z: gpaug.LogisticPoisson(z, 500.0), 200,
     logistic_poisson(500.0, 200), -0.4),
    ("loc", lambda z: dist.StudentT(1.0, z, 0.6), 2.0,
     lambda f: st.t.pdf(2.0, 1.0, f, 0.6), 2.0),
    ("loc", lambda z: dist.StudentT(1e4, z, 0.6), 2.0,
     lambda f: st.t.pdf(2.0, 1e4, f, 0.6), 2.0),
    ("loc", lambda z: dist.Laplace(z, 0.7), -3.0,
     lambda f: st.laplace.pdf(-3.0, f, 0.7), -3.0),
]  # fmt: skip


@pytest.mark.parametrize(
    "case",
    [c if i in (1, 6, 7, 9) else slow(c)
     for i, c in enumerate(CASES)],
)  # fmt: skip
def test_predictive_probabilities(x64, case) -> None:
    latent, make, y, g, turn = case
    expected = average(g, 0.0, turn)
    for dtype, tolerance in (("float64", 1e-7), ("float32", 1e-5)):
        m, v = GRID.astype(dtype).T

        @jax.jit
        def log_prob(m, v):
            predicted = predictive(make(m), {latent: m}, {latent: v})
            return predicted.log_prob(jnp.asarray(y, m.dtype))

        ours = np.exp(np.asarray(log_prob(m, v), float))
        assert np.abs(ours - expected).max() < tolerance


@slow_in_double
def test_predictive_distribution_functions_of_counts(dtype) -> None:
    """Latents have any variance; the values are below zero, between whole numbers, and
    at the top.
    """
    likelihoods = {
        "binomial": (
            lambda z: dist.Binomial(1000, logits=z),
            lambda y, f: st.binom.cdf(y, 1000, expit(f)),
            (-0.5, 300.7, 1000.0),
            -0.85,
        ),
        "negative binomial": (
            lambda z: dist.NegativeBinomialLogits(50.0, z),
            lambda y, f: st.nbinom.cdf(y, 50.0, np.maximum(expit(-f), 1e-300)),
            (-0.5, 0.0, 200.0),
            1.4,
        ),
        "logistic Poisson": (
            lambda z: gpaug.LogisticPoisson(z, 500.0),
            lambda y, f: st.poisson.cdf(y, 500 * expit(f)),
            (-0.5, 200.0, 501.0),
            -0.4,
        ),
    }

    @jax.jit
    def reached(m, v):
        def likelihood(make):
            return predictive(make(m), {"logits": m}, {"logits": v})

        return {
            k: likelihood(make).cdf(jnp.asarray(values, m.dtype)[:, None])
            for k, (make, _, values, _) in likelihoods.items()
        }

    # Incomplete gamma functions of large counts lose three digits of float32.
    tolerance = {"float64": 1e-5, "float32": 1e-4}[dtype]
    for name, found in reached(*GRID.astype(dtype).T).items():
        assert found.dtype == dtype
        _, exact, values, turn = likelihoods[name]
        for ours, y in zip(np.asarray(found, float), values, strict=True):
            expected = average(lambda f, y=y, exact=exact: exact(y, f), 0.0, turn)
            np.testing.assert_allclose(ours, expected, 0, tolerance, err_msg=name)
        assert (np.diff(found, axis=0) >= -tolerance).all()


def test_predictive_heteroscedastic(x64) -> None:
    m, v = GRID.T
    means = {"loc": np.zeros_like(m), "precision_logits": m}
    variances = {"loc": np.full_like(m, 0.01), "precision_logits": v}

    @jax.jit
    def log_prob(means, variances):
        d = gpaug.HeteroscedasticNormal(m, m, 3.0)
        return predictive(d, means, variances).log_prob(jnp.full(m.shape, 2.0))

    def density(f):
        with np.errstate(over="ignore"):
            scale = np.sqrt(0.01 + (1 + np.exp(-f)) / 3)
        return st.norm.pdf(2.0, 0, scale)

    ours = np.exp(log_prob(means, variances))
    np.testing.assert_allclose(ours, average(density, 0.0, -2.0), atol=1e-8)


def test_student_t_without_moments() -> None:
    @jax.jit
    def moments_of_the_distribution():
        d = dist.StudentT(jnp.array([1.0, 2.0, 3.0]), 0.0, 1.0)
        predicted = predictive(d, {"loc": jnp.zeros(3)}, {"loc": jnp.ones(3)})
        return predicted.mean, predicted.variance

    mean, variance = moments_of_the_distribution()
    np.testing.assert_array_equal(mean, [np.nan, 0, 0])
    np.testing.assert_array_equal(variance, [np.nan, np.inf, 4])


def test_svm_ratio_at_every_variance(x64) -> None:
    expected = average(lambda f: expit(2 * (f + np.clip(f, -1, 1))), 0.0, -1.0, 1.0)
    for dtype, tolerance in (("float64", 1e-10), ("float32", 2e-6)):
        ours = jax.jit(expected_ratio)(*GRID.astype(dtype).T)
        assert ours.dtype == dtype
        assert np.abs(np.asarray(ours, float) - expected).max() < tolerance
    edge = np.linspace(-2, 2, len(GRID))
    point = jax.jit(expected_ratio)(edge, np.zeros(len(GRID)))
    probs = jax.jit(lambda f: gpaug.BayesianSVM(f).probs)(edge)
    np.testing.assert_allclose(point, probs, rtol=1e-11)


def test_nodes(x64) -> None:
    m, v = GRID.T
    f, log_weights = (np.asarray(x) for x in jax.jit(gaussian_nodes)(m, v))
    weights = np.exp(log_weights)
    np.testing.assert_allclose(
        (weights * expit(f)).sum(1), average(expit, 0.0), 0, 1e-9
    )
    np.testing.assert_allclose((weights * f).sum(1), m, rtol=1e-9, atol=1e-6)
    a = np.array([0.5, 3.0, 1e3])
    x, log_weights = jax.jit(log_gamma_nodes)(a)
    second = np.exp(np.asarray(log_weights) + 2 * np.asarray(x)).sum(1)
    np.testing.assert_allclose(second, 1 + 1 / a, rtol=1e-6)


def test_ramp(dtype) -> None:
    m = np.asarray([-30.0, -1.0, 0.0, 2.0, 40.0], dtype)
    v = np.asarray([4.0, 0.5, 1.0, 1e-12, 0.0], dtype)
    s = np.sqrt(v.astype(float).clip(1e-30))
    z = m.astype(float) / s
    expected = m * st.norm.cdf(z) + s * st.norm.pdf(z)
    tolerance = {"float64": 1e-12, "float32": 1e-6}[dtype]
    both = expected + (-m * st.norm.cdf(-z) + s * st.norm.pdf(z))
    twice = jax.vmap(jax.grad(jax.grad(expected_ramp)))
    ours = jax.jit(
        lambda: (expected_ramp(m, v), expected_absolute(m, v), twice(m, v))
    )()
    np.testing.assert_allclose(ours[0], expected, tolerance, tolerance)
    np.testing.assert_allclose(ours[1], both, tolerance, tolerance)
    np.testing.assert_allclose(ours[2], st.norm.pdf(z) / s, 1e-4, 1e-6)


def test_intervals_of_real_predictions() -> None:
    """Quantiles invert the distribution functions, which agree with draws."""
    a = lambda *x: np.array(x, "float32")  # noqa: E731
    m, v = {"loc": a(0.0, 2.0)}, {"loc": a(0.5, 3.0)}
    q = a(0.05, 0.5, 0.95, 0.9)[:, None]
    for make in (lambda z: dist.StudentT(3.0, z, 0.7), lambda z: dist.Laplace(z, 0.7)):

        @jax.jit
        def everything(key, make=make):
            predicted = predictive(make(jnp.zeros(2)), m, v)
            x = predicted.icdf(q)
            slope = jax.jacobian(lambda q: predicted.icdf(q))(0.05)
            density = jnp.exp(predicted.log_prob(x[0]))
            return (
                x,
                predicted.cdf(x),
                predicted.sample(key, (20_000,)),
                slope * density,
            )

        x, reached, draws, one = (np.asarray(a) for a in everything(random.key(0)))
        np.testing.assert_allclose(one, 1, rtol=1e-3)
        np.testing.assert_allclose(reached, q * np.ones(2), atol=2e-5)
        np.testing.assert_allclose((draws < x[-1]).mean(0), 0.9, atol=0.01)


def test_densities_of_large_counts_are_right_in_float32() -> None:
    """The differences of log-gamma functions were wrong by a nat at a million, and an
    evidence that was certified by 15."""
    y, eta = np.float32([0, 3, 1e4, 9.99e5]), np.float32([-3.0, 60.0, 9.22, 13.8])
    rate = np.exp(eta.astype(float))
    density = jax.jit(stable_log_prob)
    found = jax.jit(
        lambda eta: stable_log_prob(dist.Poisson(jnp.exp(eta)).mask(y != 3), y)
    )(eta)
    expected = np.where(y == 3, 0, st.poisson(rate).logpmf(y.astype(float)))
    np.testing.assert_allclose(found, expected, rtol=1e-6, atol=2e-3)

    total, logits = np.float32([10, 10, 1e6, 1e6]), np.float32([-3, 20, -4.59, 6.9])
    counts, wide = y.astype(float), logits.astype(float)
    expected = st.binom(total.astype(int), expit(wide)).logpmf(counts)
    given = {"logits": logits}, {"probs": expit(logits)}
    for chosen, kind in zip((slice(None), [0, 2, 3]), given, strict=True):
        found = np.asarray(density(dist.Binomial(total, **kind), y))
        # A probability near one has few digits.
        np.testing.assert_allclose(found[chosen], expected[chosen], 1e-5, 5e-3)

    y, f = np.float32([0, 3, 1e4, 9.99e5]), np.float32([-3.0, 60.0, 6.2, 10.8])
    expected = st.nbinom(20.0, expit(-f.astype(float))).logpmf(y.astype(float))
    found = density(dist.NegativeBinomialLogits(20.0, f), y)
    np.testing.assert_allclose(found, expected, rtol=1e-6, atol=2e-4)

    y, logits = np.float32([3e5, 7e5 - 2, 2]), np.float32([-0.845, 0, -12.7])
    total = int(y.sum())
    probs = np.exp(logits - logits.max().astype(float))
    expected = st.multinomial(total, probs / probs.sum()).logpmf(y.astype(int))
    for kind in {"logits": logits}, {"probs": np.float32(probs / probs.sum())}:
        found = density(dist.Multinomial(total, **kind), y)
        np.testing.assert_allclose(found, expected, atol=5e-3)


def test_densities_of_large_shapes_are_right_in_float32() -> None:
    """An evidence that was certified was off by .3 nats at a shape of ten thousand."""
    mean, away = np.float32([0.2, 0.3, 0.3, 0.9]), np.float32([-1, 0, 2, 1])
    for size in np.float32([5, 1e4, 1e6]):
        y = mean + away * np.minimum(mean, 1 - mean) / np.sqrt(size)
        wide, each = y.astype(float), mean.astype(float)
        found = jax.jit(stable_log_prob)(dist.Gamma(size, size / mean), y)
        rate = (size / mean).astype(float)
        expected = st.gamma(float(size), scale=1 / rate).logpdf(wide)
        np.testing.assert_allclose(found, expected, rtol=1e-6, atol=5e-3)
        found = jax.jit(stable_log_prob)(dist.BetaProportion(mean, size), y)
        expected = st.beta(size * each, size * (1 - each)).logpdf(wide)
        np.testing.assert_allclose(found, expected, rtol=1e-6, atol=5e-3)

    y, rate = np.float32([0, 3, 1e4, 9.99e5]), np.float32([2.0, 3.0, 1.01e4, 1e6])
    expected = np.log(0.2 * (y == 0) + 0.8 * np.exp(st.poisson(rate).logpmf(y)))
    found = stable_log_prob(dist.ZeroInflatedPoisson(0.2, rate=rate), y)
    np.testing.assert_allclose(found, expected, rtol=1e-6, atol=5e-3)


def test_predictive_densities_of_large_counts_are_right_in_float32() -> None:
    """They were wrong by .1 nats, on average."""
    y, total, mean, sd = np.float32([4.99e5, 5e5, 5.02e5]), 3_000_000, -1.61, 1e-3
    f = mean + sd * np.linspace(-8, 8, 2001)
    weights = log_softmax(-0.5 * ((f - mean) / sd) ** 2)
    each = st.binom(total, expit(f)).logpmf(y.astype(float)[:, None])

    @jax.jit
    def found(m, v):
        binomial = dist.Binomial(total, logits=m)
        return predictive(binomial, {"logits": m}, {"logits": v}).log_prob(y)

    at = np.full(3, mean, np.float32), np.full(3, sd**2, np.float32)
    np.testing.assert_allclose(found(*at), logsumexp(weights + each, 1), atol=5e-3)


def test_densities_of_few_counts_have_the_derivatives_of_numpyros(x64) -> None:
    y = jnp.array([0.0, 5.0, 100.0])
    makes = (
        lambda f: dist.Poisson(jnp.exp(f)), lambda f: dist.Binomial(100, logits=f),
        lambda f: dist.Binomial(100, probs=jax.nn.sigmoid(f)),
    )  # fmt: skip

    @jax.jit
    @jax.vmap
    @jax.value_and_grad
    def stable(f):
        return sum(stable_log_prob(make(f), y).sum() for make in makes)

    @jax.jit
    @jax.vmap
    @jax.value_and_grad
    def plain(f):
        return sum(make(f).log_prob(y).sum() for make in makes)

    f = jnp.array([-30.0, -2.0, 0.3, 4.0])
    np.testing.assert_allclose(stable(f), plain(f), rtol=1e-6, atol=1e-6)

    @jax.jit
    @jax.grad
    def none(p):
        return stable_log_prob(dist.Multinomial(5, probs=p), y[:2])

    np.testing.assert_allclose(none(jnp.array([0.0, 1.0])), [-5, 0], atol=1e-6)
