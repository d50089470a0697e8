# SPDX-License-Identifier: Apache-2.0
"""Robust-max: the probability of the largest normal, the likelihood, fits."""

import json
from functools import cache
from pathlib import Path

import jax
import jax.numpy as jnp
import numpy as np
import numpyro
import numpyro.distributions as dist
import optax
import pytest
from scipy.special import log_ndtr, ndtr

import numpyro_gpaug as gpaug
from numpyro_gpaug import argmax
from numpyro_gpaug.argmax import argmax_probabilities, argmax_probability
from numpyro_gpaug.expectations import expected_log_prob, predictive
from tests.test_multiclass import blobs
from tests.test_robustness import assert_monotone

GOLDEN = json.loads((Path(__file__).parent / "golden" / "robustmax.json").read_text())
KEY = jax.random.key(0)
shares_of = jax.jit(argmax_probabilities)


# -- the probability of the largest -------------------------------------------------


def reference(m, v, y, more=()):
    """Probabilities of all normals, and the derivatives of that of normal y in means
    and variances, by Gauss-Legendre panels between points around every mean.

    :param more: further ends of panels; then only the first 20 means get their own.
    """
    s = np.sqrt(v)
    low, high = (m - 8 * s).max(), (m + 8.5 * s).max()
    around = (m + s * np.linspace(-8.5, 8.5, 35)[:, None])[
        :, : 20 if len(more) else None
    ]
    ends = np.unique(np.clip(np.concatenate([around.ravel(), more]), low, high))
    x, w = np.polynomial.legendre.leggauss(16)
    middle, half = (ends[1:] + ends[:-1]) / 2, np.diff(ends) / 2
    z = ((middle[:, None] + half[:, None] * x).reshape(-1, 1) - m) / s
    log_cdf = log_ndtr(z)
    hazard = np.exp(-0.5 * z * z - log_cdf) / np.sqrt(2 * np.pi) / s
    mass = (half[:, None] * w).reshape(-1, 1) * np.exp(log_cdf.sum(1))[:, None] * hazard
    own = np.arange(len(m)) == y
    others = own * hazard - hazard[:, [y]]
    by_mean = (mass * (own * z / s + others)).sum(0)
    by_variance = (mass * (own * (z * z - 1) / s + others * z)).sum(0) / (2 * s)
    return mass.sum(0), by_mean, by_variance


def problems(num_classes, num):
    """Means and variances from 1e-8 to 1e4, mixed within a datum, and a class."""
    rng = np.random.default_rng(num_classes)
    for i in range(num):
        v = 10.0 ** rng.uniform(-8, 4, num_classes)
        if i % 3 == 1:
            v = 10.0 ** rng.choice([-8.0, -6.0, 4.0], num_classes)
        if i % 3 == 2:
            v = 10.0 ** rng.uniform(-8, 4) * np.exp(rng.normal(size=num_classes))
        s = np.sqrt(v)
        m = 2 * s * rng.normal(size=num_classes)
        m += 2 * rng.normal() * s[rng.integers(num_classes)]
        if i % 4 == 0:  # all of them along the lower flank of the widest
            wide = v.argmax()
            m = s * rng.normal(size=num_classes) - rng.uniform(0, 6) * s[wide]
            m[wide] = 0
        yield m + (i % 2) * 1000 * rng.normal(), v, rng.integers(num_classes)


@jax.jit
def everything(m, v, y):
    """Probabilities of all classes, that of y, and its derivatives."""

    def one(m, v):
        p = argmax_probability(m, v, y)
        return p.sum(), p

    (_, p), slopes = jax.value_and_grad(one, (0, 1), has_aux=True)(m, v)
    return argmax_probabilities(m, v), p, *slopes


def check_accuracy(cases, dtype, more=()):
    m, v, y = (np.array(x) for x in zip(*cases, strict=True))
    m, v = m.astype(dtype), v.astype(dtype)
    rows = zip(m.astype(float), v.astype(float), y, strict=True)
    exact = [reference(*row, more) for row in rows]
    shares, by_mean, by_variance = (np.array(x) for x in zip(*exact, strict=True))
    np.testing.assert_allclose(shares.sum(1), 1, atol=1e-9)
    found = everything(*(jnp.asarray(x) for x in (m, v, y)))
    assert all(x.dtype == dtype for x in found)
    shares_, own, *slopes = (np.asarray(x, float) for x in found)
    tolerance = {"float64": 2e-9, "float32": 5e-6}[dtype]
    np.testing.assert_allclose(shares_.sum(1), 1, atol=tolerance)
    np.testing.assert_allclose(shares_, shares, rtol=0, atol=tolerance)
    chosen = shares[np.arange(len(y)), y]
    np.testing.assert_allclose(own, chosen, rtol=0, atol=tolerance)
    # Per standard deviation of the mean, and per relative change of the variance.
    for ours, slope, unit in zip(
        slopes, (by_mean, by_variance), (np.sqrt(v), v), strict=True
    ):
        np.testing.assert_allclose(
            ours * unit, slope * unit, rtol=0, atol=30 * tolerance
        )


@pytest.mark.parametrize("num_classes", [2, 3, 10])
def test_accuracy_at_every_scale(dtype, num_classes) -> None:
    check_accuracy(list(problems(num_classes, 60)), dtype)


def test_accuracy_of_many_classes(dtype) -> None:
    """Twenty classes of any scale among 980 that are alike."""
    cases = []
    for m, v, y in problems(20, 3):
        rng = np.random.default_rng(int(y))
        m = np.concatenate([m - m.mean(), rng.normal(size=980)])
        cases.append((m, np.concatenate([v, rng.uniform(0.5, 2, 980)]), y))
    check_accuracy(cases, dtype, np.linspace(-12, 12, 100))


def test_draws() -> None:
    rng = np.random.default_rng(0)
    m, v = rng.normal(size=5), 10.0 ** rng.uniform(-3, 1, 5)
    draws = m + np.sqrt(v) * rng.normal(size=(1_000_000, 5))
    counts = np.bincount(draws.argmax(1), minlength=5) / len(draws)
    p = shares_of(jnp.asarray(m, jnp.float32), jnp.asarray(v, jnp.float32))
    assert np.all(np.abs(counts - p) < 5 * np.sqrt(p * (1 - p) / len(draws)) + 1e-5)


def test_two_classes_in_closed_form(dtype) -> None:
    rng = np.random.default_rng(1)
    m = np.asarray(3 * rng.normal(size=(200, 2)), dtype)
    v = np.asarray(10.0 ** rng.uniform(-8, 4, (200, 2)), dtype)
    gap = (m[:, 0].astype(float) - m[:, 1]) / np.sqrt(v.sum(1, dtype=float))
    tolerance = {"float64": 2e-9, "float32": 5e-6}[dtype]
    p = shares_of(jnp.asarray(m), jnp.asarray(v))[:, 0]
    np.testing.assert_allclose(p, ndtr(gap), rtol=0, atol=tolerance)


def test_equivariance(dtype) -> None:
    """Under permutations exactly but for rounding; under shifts and scalings too."""
    m, v, _ = (np.array(x) for x in zip(*problems(10, 30), strict=True))
    m -= m.mean(1, keepdims=True)
    m, v = m.astype(dtype), v.astype(dtype)
    p = np.asarray(shares_of(jnp.asarray(m), jnp.asarray(v)))
    order = np.random.default_rng(2).permutation(10)
    moved = shares_of(jnp.asarray(m[:, order]), jnp.asarray(v[:, order]))
    tolerance = {"float64": 1e-12, "float32": 3e-6}[dtype]
    np.testing.assert_allclose(moved, p[:, order], rtol=0, atol=tolerance)
    # Powers of two: no rounding.
    for scale in (2.0**-12, 2.0**12):
        scaled = shares_of(
            jnp.asarray(m * m.dtype.type(scale)),
            jnp.asarray(v * v.dtype.type(scale**2)),
        )
        np.testing.assert_allclose(scaled, p, rtol=0, atol=tolerance)
    m, v = m[2::3], v[2::3]
    shift = m.dtype.type(2.0 ** np.ceil(np.log2(np.abs(m).max())))
    rounded = (m + shift) - shift
    shifted = shares_of(jnp.asarray(rounded + shift), jnp.asarray(v))
    plain = shares_of(jnp.asarray(rounded), jnp.asarray(v))
    np.testing.assert_allclose(shifted, plain, rtol=0, atol=tolerance)


def test_no_variance(dtype) -> None:
    """A point mass: the largest mean, ties in equal parts, and finite derivatives."""
    m = jnp.asarray([[0.0, 3.0, -1.0], [2.0, 2.0, 0.0], [0.0, 0.0, 0.0]], dtype)
    zero = jnp.zeros_like(m)
    y = jnp.array([1, 0, 2])
    expected = [[0, 1, 0], [0.5, 0.5, 0], [1 / 3, 1 / 3, 1 / 3]]
    some = jnp.asarray([0.0, 4.0, 0.0], dtype)
    for v in (zero, zero + some, zero + some[::-1], zero + 1e-30):
        found = everything(m, v, y)
        assert all(np.isfinite(x).all() for x in found)
        if v is zero:
            np.testing.assert_allclose(found[0], expected, atol=1e-5)
    by_hand = everything(m, zero + some, y)[0]
    exact = [ndtr(-1.5), ndtr(1.5), 0]
    np.testing.assert_allclose(by_hand[0], exact, atol=5e-6)


def test_chunks_change_nothing(monkeypatch) -> None:
    m, v, y = (jnp.asarray(np.array(x)) for x in zip(*problems(10, 60), strict=True))
    whole = everything(m, v, y)
    monkeypatch.setattr(argmax, "CHUNK", 700)
    parts = jax.jit(everything.__wrapped__)(m, v, y)
    for a, b in zip(whole, parts, strict=True):
        np.testing.assert_allclose(a, b, rtol=2e-4, atol=2e-6)


def test_memory_holds_no_array_over_nodes_and_classes() -> None:
    rows, classes = 2000, 100
    m = jax.ShapeDtypeStruct((rows, classes), jnp.float32)
    y = jax.ShapeDtypeStruct((rows,), jnp.int32)
    memory = everything.lower(m, m, y).compile().memory_analysis()
    assert memory.temp_size_in_bytes < 0.3 * 96 * rows * classes * 4


# -- the likelihood -----------------------------------------------------------------


@pytest.mark.parametrize("num_classes", [3, 4, 10])
def test_golden_numbers(x64, num_classes) -> None:
    cases = [case for case in GOLDEN["cases"] if len(case["m"]) == num_classes]
    names = ("m", "v", "y", "S", "expected_loglik", "p_pred")
    m, v, y, p, value, own = (jnp.asarray([c[name] for c in cases]) for name in names)

    @jax.jit
    def ours(m, v):
        d, f, spread = gpaug.RobustMax(m, GOLDEN["eps"]), {"f": m}, {"f": v}
        law = predictive(d, f, spread)
        expected = expected_log_prob(d, y, f, spread)
        return argmax_probability(m, v, y), expected, law.probs, law.log_prob(y)

    chosen, expected, probs, log_prob = ours(m, v)
    np.testing.assert_allclose(chosen, p, rtol=0, atol=1e-9)
    np.testing.assert_allclose(expected, value, rtol=0, atol=1e-8)
    np.testing.assert_allclose(np.exp(log_prob), own, rtol=0, atol=1e-9)
    np.testing.assert_allclose(probs.sum(-1), 1, rtol=1e-14)


def test_golden_gradient(x64) -> None:
    golden = GOLDEN["grad"]
    m, v = (jnp.asarray([golden[k]]) for k in ("m", "v"))
    _, _, by_mean, by_variance = everything(m, v, jnp.asarray([golden["y"]]))
    np.testing.assert_allclose(by_mean[0], golden["dS_dm"], rtol=0, atol=1e-8)
    np.testing.assert_allclose(by_variance[0], golden["dS_dv_fd"], rtol=0, atol=1e-7)


def test_density_and_draws(dtype) -> None:
    f = jnp.asarray([[0.5, -1.0, 2.0], [0.0, 0.0, -3.0]], dtype)
    epsilon = np.array([0.1, 0.4])
    d = gpaug.RobustMax(f, epsilon, validate_args=True)
    assert (d.batch_shape, d.event_shape) == ((2,), ())
    expected = [[0.05, 0.05, 0.9], [0.6, 0.2, 0.2]]
    np.testing.assert_allclose(d.probs, expected, rtol=1e-6)
    log_prob = d.log_prob(jnp.array([2, 1]))
    assert log_prob.dtype == dtype
    np.testing.assert_allclose(log_prob, np.log([0.9, 0.2]), rtol=1e-6)
    every = d.enumerate_support()
    np.testing.assert_allclose(np.exp(d.log_prob(every)).sum(0), 1, rtol=1e-6)
    draws = d.sample(KEY, (20_000,))
    counts = np.stack([(draws == k).mean(0) for k in range(3)], -1)
    np.testing.assert_allclose(counts, expected, atol=0.02)
    assert np.isnan(d.mean).all()
    assert np.isnan(d.variance).all()
    one = gpaug.RobustMax(f[0], jnp.array([0.1, 0.2, 0.3]))
    assert one.log_prob(2).shape == (3,)


def test_gradients_against_differences(x64) -> None:
    """Of the expectation in means, variances and epsilon."""
    rng = np.random.default_rng(3)
    at = (
        jnp.asarray(rng.normal(size=(4, 5))),
        jnp.asarray(10.0 ** rng.uniform(-1, 1, (4, 5))),
        jnp.asarray(rng.uniform(0.01, 0.5, 4)),
    )
    y = jnp.array([0, 4, 2, 2])

    @jax.jit
    def value(m, v, epsilon):
        d = gpaug.RobustMax(jnp.zeros_like(m), epsilon)
        return expected_log_prob(d, y, {"f": m}, {"f": v})

    for k in range(3):
        tangents = [jnp.zeros_like(x) for x in at]
        tangents[k] = at[k] * jnp.asarray(rng.normal(size=at[k].shape))
        slope = jax.jvp(value, at, tuple(tangents))[1]
        ends = [
            value(*(x + h * t for x, t in zip(at, tangents, strict=True)))
            for h in (1e-5, -1e-5)
        ]
        difference = (ends[0] - ends[1]) / 2e-5
        np.testing.assert_allclose(slope, difference, rtol=1e-6, atol=1e-7)


def test_bad_parameters() -> None:
    with pytest.raises(ValueError, match=r"f has shape \(\).*num_latents=C"):
        gpaug.RobustMax(jnp.zeros(()))
    with pytest.raises(ValueError, match=r"f has shape \(4, 1\).*at least two"):
        gpaug.RobustMax(jnp.zeros((4, 1)))
    for epsilon in (0.0, 1.0, -0.1):
        with pytest.raises(ValueError, match="invalid epsilon"):
            gpaug.RobustMax(jnp.zeros((4, 3)), epsilon, validate_args=True)


# -- fits ---------------------------------------------------------------------------

POSITIVE, UNIT = dist.constraints.positive, dist.constraints.unit_interval


def model(X, y=None, *, inducing, variance=4.0, epsilon=0.01, batch_size=None):
    """Three classes, everything fixed."""
    kernel = gpaug.kernels.SquaredExponential(1.0, variance)
    gp = gpaug.GaussianProcess("f", kernel, inducing, num_latents=3)
    with numpyro.plate("data", X.shape[0], subsample_size=batch_size) as index:
        y = None if y is None else y[index]
        numpyro.sample("y", gpaug.RobustMax(gp(X[index]), epsilon), obs=y)


def learnt(X, y=None, *, inducing, variance=4.0, batch_size=None):
    """Three classes, hyperparameters and epsilon learnt."""
    lengthscale = numpyro.param("lengthscale", 1.0, constraint=POSITIVE)
    epsilon = numpyro.param("epsilon", 0.05, constraint=UNIT)
    kernel = gpaug.kernels.SquaredExponential(lengthscale, variance)
    gp = gpaug.GaussianProcess("f", kernel, inducing, num_latents=3)
    with numpyro.plate("data", X.shape[0], subsample_size=batch_size) as index:
        y = None if y is None else y[index]
        numpyro.sample("y", gpaug.RobustMax(gp(X[index]), epsilon), obs=y)


def fitter(model, optim=None, **options):
    return gpaug.ConjugateSVI(model, gpaug.AutoSparseGP(model), optim, **options)


def run(svi, X, y, num_steps, **arguments):
    return svi.run(KEY, num_steps, X, y, progress_bar=False, **arguments)


@cache
def hard_problems():
    rng = np.random.default_rng(0)
    cloud = rng.normal(size=(40, 2))
    sector = np.floor(3 * (np.arctan2(*cloud.T) / (2 * np.pi) + 0.5)).astype(int) % 3
    return {
        "two unlike": (cloud[:2], np.array([0, 1])),
        "separable": (cloud, sector),
        "one class": (cloud, np.ones(40, int)),
        "noise": (cloud, rng.integers(0, 3, 40)),
        "duplicates": (np.repeat(cloud[:10], 4, 0), rng.integers(0, 3, 40)),
    }


def run_hard(names, dtype, kinds, num_steps):
    compiled: dict = {}
    for name in names:
        X, y = hard_problems()[name]
        X, y = jnp.asarray(X, dtype), jnp.asarray(y)
        Z = jnp.asarray(np.unique(np.asarray(X), axis=0))
        for kind, optim in kinds:
            svi = compiled.setdefault((kind, Z.shape), fitter(kind, optim))
            for variance in (1.0, 1e3):
                arguments = {"inducing": Z, "variance": np.asarray(variance, dtype)}
                result = run(svi, X, y, num_steps, **arguments)
                assert_monotone(result.losses, dtype)
                leaves = jax.tree.leaves(result.params)
                assert all(np.isfinite(x).all() for x in leaves)
                assert result.losses[-1] < result.losses[0]


def test_hard_problems_learnt() -> None:
    names = ("separable", "one class", "noise")
    run_hard(names, "float32", [(learnt, optax.adam(0.1))], 60)


def test_a_hard_problem_in_float64(x64) -> None:
    run_hard(["separable"], "float64", [(model, None)], 60)


@pytest.mark.slow
def test_all_hard_problems(dtype) -> None:
    kinds = [(model, None), (learnt, optax.adam(0.1))]
    run_hard(hard_problems(), dtype, kinds, 200)


@pytest.mark.slow
def test_bad_starts() -> None:
    """From a q far from any posterior the bound rises, if to an optimum of its own: it
    is not concave."""
    X, y = blobs(60)
    svi = fitter(model)
    best = run(svi, X, y, 100, inducing=X[:10]).losses[-1]
    rng = np.random.default_rng(1)
    for scale in (1e-2, 1e4):
        potential = 3 * scale * rng.normal(size=(3, 10))
        start = {
            "f.v_auto_precision": scale * jnp.eye(10) * jnp.ones((3, 1, 1)),
            "f.v_auto_potential": jnp.asarray(potential, X.dtype),
        }
        result = run(svi, X, y, 100, inducing=X[:10], init_params=start)
        assert_monotone(result.losses, np.float32)
        assert result.losses[-1] < best + 20


def test_minibatches() -> None:
    X, y = blobs(300)
    svi = fitter(learnt, optax.adam(0.01), step_size=0.1)
    result = run(svi, X, y, 200, inducing=X[:20], batch_size=60)
    assert np.isfinite(result.losses).all()
    assert result.losses[-50:].mean() < 0.6 * len(X)
    probs = svi.posterior(result.params).predict_y(X).probs
    np.testing.assert_allclose(probs.sum(-1), 1, atol=1e-5)
    assert (probs.argmax(-1) == y).mean() > 0.75


def test_same_optimum_as_gradients_and_the_best_epsilon(x64) -> None:
    X, y = blobs(20)
    X = jnp.asarray(X, jnp.float64)
    arguments = {"inducing": X[:5]}
    svi = fitter(learnt, optax.adam(optax.cosine_decay_schedule(0.1, 400)))
    closed = run(svi, X, y, 400, **arguments)
    guide = gpaug.AutoSparseGP(learnt, covariance="dense")
    stock = numpyro.infer.SVI(
        learnt, guide, optax.adam(optax.cosine_decay_schedule(0.05, 1000)),
        gpaug.TraceAnalytic_ELBO(),
    )  # fmt: skip
    by_gradients = stock.run(KEY, 1000, X, y, progress_bar=False, **arguments)
    assert abs(closed.losses[-1] - by_gradients.losses[-1]) < 1e-3
    for name in ("lengthscale", "epsilon"):
        values = (fit.params[name] for fit in (closed, by_gradients))
        np.testing.assert_allclose(*values, rtol=1e-2)
    # The bound is that of so many wrong labels among N: epsilon is their share.
    f = svi.posterior(closed.params).predict_f(X)
    wrong = 1 - argmax_probability(f.mean, f.variance, y).mean()
    np.testing.assert_allclose(closed.params["epsilon"], wrong, rtol=1e-3)


@pytest.mark.slow
def test_epsilon_with_a_prior() -> None:
    def sampled(X, y=None, *, inducing):
        epsilon = numpyro.sample("epsilon", dist.Beta(1.0, 20.0))
        model(X, y, inducing=inducing, epsilon=epsilon)

    X, y = blobs(60)
    result = run(fitter(sampled, optax.adam(0.1)), X, y, 60, inducing=X[:10])
    assert_monotone(result.losses, np.float32)
    assert result.losses[-1] < result.losses[1] - 1
    _, value = next(x for x in result.params.items() if "epsilon" in x[0])
    assert 0 < value < 0.5


@pytest.mark.parametrize(
    ("labels", "epsilon", "message"),
    [
        ([0, 1, 3], 0.1, r"0\.\.C-1"),
        ([-1, 1, 1], 0.1, "support of RobustMax"),
        ([0, 1, 2], 1.5, "RobustMax .* invalid epsilon"),
    ],
)
def test_bad_input_to_a_fit(labels, epsilon, message) -> None:
    X = jnp.arange(3.0)[:, None]
    with pytest.raises(ValueError, match=message):
        run(fitter(model), X, jnp.array(labels), 1, inducing=X, epsilon=epsilon)


def test_epsilon_that_starts_outside_its_domain() -> None:
    def sloppy(X, y=None, *, inducing):
        model(X, y, inducing=inducing, epsilon=numpyro.param("epsilon", 1.5))

    X, y = blobs(12)
    with pytest.raises(ValueError, match="epsilon.* of RobustMax|RobustMax.*epsilon"):
        run(fitter(sloppy), X, y, 1, inducing=X[:3])


def test_no_augmentation() -> None:
    X, y = blobs(12)
    with pytest.raises(gpaug.NotConjugateError, match="no augmentation"):
        run(fitter(model, sites="augmented"), X, y, 1, inducing=X[:3])
