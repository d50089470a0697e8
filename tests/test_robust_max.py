# SPDX-License-Identifier: Apache-2.0
"""Robust-max: the distribution, its expectation, fits."""

import json
from pathlib import Path

import jax
import jax.numpy as jnp
import numpy as np
import numpyro
import numpyro.distributions as dist
import optax
import pytest

import numpyro_gpaug as gpaug
from numpyro_gpaug.likelihoods.expectations import expected_log_prob, predictive
from numpyro_gpaug.math.argmax import argmax_probability
from tests.conftest import slow, slow_in_double
from tests.test_argmax import everything
from tests.test_multiclass import blobs

GOLDEN = json.loads((Path(__file__).parent / "golden" / "robustmax.json").read_text())
KEY = jax.random.key(0)


# -- the likelihood -----------------------------------------------------------------


@pytest.mark.parametrize("num_classes", [3, slow(4), 10])
def test_golden_numbers(x64, num_classes) -> None:
    cases = [case for case in GOLDEN["cases"] if len(case["m"]) == num_classes]
    names = ("m", "v", "y", "S", "expected_loglik", "p_pred")
    m, v, y, p, value, own = (np.asarray([c[name] for c in cases]) for name in names)

    @jax.jit
    def ours(m, v):
        d, f, spread = gpaug.RobustMax(m, GOLDEN["eps"]), {"f": m}, {"f": v}
        predicted = predictive(d, f, spread)
        expected = expected_log_prob(d, y, f, spread)
        found = predicted.probs, predicted.log_prob(y)
        return argmax_probability(m, v, y), expected, *found

    chosen, expected, probs, log_prob = ours(m, v)
    np.testing.assert_allclose(chosen, p, rtol=0, atol=1e-9)
    np.testing.assert_allclose(expected, value, rtol=0, atol=1e-8)
    np.testing.assert_allclose(np.exp(log_prob), own, rtol=0, atol=1e-9)
    np.testing.assert_allclose(np.sum(probs, -1), 1, rtol=1e-14)


def test_golden_gradient(x64) -> None:
    golden = GOLDEN["grad"]
    m, v = (np.asarray([golden[k]]) for k in ("m", "v"))
    _, _, by_mean, by_variance = everything(m, v, np.asarray([golden["y"]]))
    np.testing.assert_allclose(by_mean[0], golden["dS_dm"], rtol=0, atol=1e-8)
    np.testing.assert_allclose(by_variance[0], golden["dS_dv_fd"], rtol=0, atol=1e-7)


@slow_in_double
def test_density_and_draws(dtype) -> None:
    f = np.asarray([[0.5, -1.0, 2.0], [0.0, 0.0, -3.0]], dtype)
    d = gpaug.RobustMax(f, np.array([0.1, 0.4]), validate_args=True)
    assert (d.batch_shape, d.event_shape) == ((2,), ())
    expected = [[0.05, 0.05, 0.9], [0.6, 0.2, 0.2]]

    @jax.jit
    def everything(d, y, key):
        every = d.log_prob(d.enumerate_support())
        return d.probs, d.log_prob(y), every, d.sample(key, (20_000,))

    probs, log_prob, every, draws = everything(d, np.array([2, 1]), KEY)
    np.testing.assert_allclose(probs, expected, rtol=1e-6)
    assert log_prob.dtype == dtype
    np.testing.assert_allclose(log_prob, np.log([0.9, 0.2]), rtol=1e-6)
    np.testing.assert_allclose(np.exp(every).sum(0), 1, rtol=1e-6)
    counts = np.stack([(np.asarray(draws) == k).mean(0) for k in range(3)], -1)
    np.testing.assert_allclose(counts, expected, atol=0.02)
    assert np.isnan(d.mean).all()
    assert np.isnan(d.variance).all()
    one = gpaug.RobustMax(f[0], np.array([0.1, 0.2, 0.3]))
    assert jax.eval_shape(lambda d: d.log_prob(2), one).shape == (3,)


def test_bad_parameters() -> None:
    with pytest.raises(ValueError, match=r"f has shape \(\).*num_latents=C"):
        gpaug.RobustMax(jnp.zeros(()))
    with pytest.raises(ValueError, match=r"f has shape \(4, 1\).*at least two"):
        gpaug.RobustMax(jnp.zeros((4, 1)))
    for epsilon in (0.0, 1.0, -0.1):
        with pytest.raises(ValueError, match="inside .0, 1."):
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


@pytest.mark.parametrize("gradients", [False, slow(True)])
def test_same_optimum_as_gradients_and_the_best_epsilon(x64, gradients) -> None:
    X, y = blobs(20)
    X = jnp.asarray(np.asarray(X, "float64"))
    arguments = {"inducing": np.asarray(X)[:5]}
    svi = fitter(learnt, optax.adam(optax.cosine_decay_schedule(0.1, 400)))
    closed = run(svi, X, y, 400, **arguments)
    if gradients:
        assert_reached_by_gradients(closed, X, y, arguments)
    # Epsilon is the share of wrong labels.
    f = svi.posterior(closed).predict_f(X)
    wrong = 1 - np.mean(jax.jit(argmax_probability)(f.mean, f.variance, y))
    np.testing.assert_allclose(closed.params["epsilon"], wrong, rtol=1e-3)


def assert_reached_by_gradients(closed, X, y, arguments) -> None:
    guide = gpaug.AutoSparseGP(learnt, covariance="dense").setup(X, y, **arguments)
    stock = numpyro.infer.SVI(
        learnt, guide, optax.adam(optax.cosine_decay_schedule(0.05, 1000)),
        gpaug.TraceAnalytic_ELBO(),
    )  # fmt: skip
    start = jax.jit(lambda: stock.init(KEY, X, y, **arguments))()
    by_gradients = stock.run(
        KEY, 1000, X, y, progress_bar=False, init_state=start, **arguments
    )
    assert abs(closed.losses[-1] - by_gradients.losses[-1]) < 1e-3
    for name in ("lengthscale", "epsilon"):
        values = (fit.params[name] for fit in (closed, by_gradients))
        np.testing.assert_allclose(*values, rtol=1e-2)


@pytest.mark.parametrize(
    ("labels", "epsilon", "message"),
    [
        ([0, 1, 3], 0.1, r"0\.\.2"),
        ([-1, 1, 1], 0.1, "support of RobustMax"),
        ([0, 1, 2], 1.5, "epsilon"),
    ],
)
def test_bad_input_to_a_fit(labels, epsilon, message) -> None:
    X = np.arange(3.0)[:, None]
    with pytest.raises(ValueError, match=message):
        run(fitter(model), X, np.array(labels), 1, inducing=X, epsilon=epsilon)


def test_no_augmentation() -> None:
    X, y = (np.asarray(a) for a in blobs(12))
    with pytest.raises(gpaug.NotConjugateError, match="no augmentation"):
        run(fitter(model, updates="augmented"), X, y, 1, inducing=X[:3])
