# SPDX-License-Identifier: Apache-2.0
"""One model through every route, and the same posterior at the end of each."""

import jax
import numpy as np
import optax
import pytest
from jax import random
from numpyro import handlers
from numpyro.infer import (
    SVI,
    Predictive,
    Trace_ELBO,
    TraceMeanField_ELBO,
)

import numpyro_gpaug as gpaug
from tests.models import blocks_of, brute_bound, classifier, projection
from tests.routes import (
    KEY,
    NEW,
    ONE,
    SLOW_ONE,
    SLOW_THREE,
    crossed,
    fitted,
    loss_at,
    posterior_of,
    problem,
    spread_params,
    stock,
)

pytestmark = pytest.mark.usefixtures("x64")

# Closed form against NumPy.


@crossed("updates", [(3, "auto")], ["auto", "augmented", "exact"])
def test_closed_form_ends_at_the_brute_force_bound(num_latents, updates):
    (X, y), kwargs = problem(num_latents)
    svi, result = fitted(num_latents, updates)
    assert np.all(np.diff(result.losses) < 1e-9)
    assert abs(result.losses[-1] - result.losses[-2]) < 1e-6
    q = blocks_of(svi.guide, result.params)
    bound = "augmented" if updates == "augmented" else "exact"
    expected = brute_bound(X, y, kwargs["inducing"], q, bound)
    np.testing.assert_allclose(-result.losses[-1], expected, rtol=1e-9)
    again = gpaug.TraceAnalytic_ELBO(bound)
    value = loss_at(again, result.params, svi.guide, (X, y), kwargs)
    np.testing.assert_allclose(-value, expected, rtol=1e-9)


@pytest.mark.parametrize("num_latents", [SLOW_ONE, 3])
def test_the_first_step_on_a_batch_is_the_formula(num_latents):
    """Under the prior every f has mean 0 and variance 2: the auxiliaries are PG(1,
    sqrt(2)).
    """
    (X, y), kwargs = problem(num_latents, size=24)
    Z = kwargs["inducing"]
    batch = np.asarray(X)[:6], np.asarray(y)[:6]
    guide = gpaug.AutoSparseGP(classifier)
    svi = gpaug.ConjugateSVI(classifier, guide, updates="augmented", step_size=1.0)
    state = svi.init(random.key(KEY), *batch, **kwargs)
    state, _ = svi.update(state, *batch, **kwargs)
    mean, cover = blocks_of(guide, svi.get_params(state))
    A, _ = projection(batch[0], Z)
    weight = np.tanh(np.sqrt(2) / 2) / (2 * np.sqrt(2))
    precision = np.eye(6) + 4 * weight * A @ A.T
    for c, label in enumerate(np.asarray(batch[1]).reshape(6, -1).T):
        np.testing.assert_allclose(np.linalg.inv(cover[c]), precision, rtol=1e-8)
        potential = 4 * A @ (label - 0.5)
        expected = np.linalg.solve(precision, potential)
        np.testing.assert_allclose(mean[c], expected, rtol=1e-8, atol=1e-10)


# Gradients.


@crossed("bound", [(None, "exact")], ["exact", "augmented"])
def test_adam_reaches_the_closed_form_optimum(num_latents, bound):
    args, kwargs = problem(num_latents)
    guide, result = stock(args, kwargs, gpaug.TraceAnalytic_ELBO(bound), "dense", 1000)
    closed = fitted(num_latents, bound)[1]
    assert abs(result.losses[-1] - closed.losses[-1]) < 1e-5
    gradient = gpaug.Posterior.from_guide(
        classifier, guide, result.params, *args, **kwargs
    ).predict_f(NEW)
    natural = posterior_of(num_latents, bound).predict_f(NEW)
    np.testing.assert_allclose(gradient.mean, natural.mean, atol=3e-3)
    np.testing.assert_allclose(gradient.variance, natural.variance, atol=3e-3)


@pytest.mark.parametrize("num_latents", [ONE, SLOW_THREE])
def test_adam_with_a_diagonal_guide(num_latents):
    (X, y), kwargs = problem(num_latents)
    loss = gpaug.TraceAnalytic_ELBO()
    guide, result = stock((X, y), kwargs, loss, "diagonal", 1000)
    value = loss_at(loss, result.params, guide, (X, y), kwargs)
    q = blocks_of(guide, result.params)
    expected = brute_bound(X, y, kwargs["inducing"], q)
    np.testing.assert_allclose(-value, expected, rtol=1e-9)
    best = fitted(num_latents)[1].losses[-1]
    assert best < value < best + 3
    # At a mean-field optimum the variances are those of the precision's diagonal.
    h = 1e-4

    def moved(k, i, step):
        parts = [np.array(p) for p in q]
        if k == 0:
            parts[0][0, i] += step
        else:
            parts[1][0, i, i] *= 1 + step
        return brute_bound(X, y, kwargs["inducing"], parts)

    for k, i in [(0, 0), (0, 4), (1, 0), (1, 4)]:
        assert abs(moved(k, i, h) - moved(k, i, -h)) / (2 * h) < 1e-2


def test_a_fresh_guide_may_be_set_up_inside_handlers():
    args, kwargs = problem(None)
    guide = gpaug.AutoSparseGP(classifier, covariance="dense")

    def draw():
        trace = handlers.trace(handlers.seed(guide, 0)).get_trace(*args, **kwargs)
        return {name: site["value"] for name, site in trace.items()}

    assert set(jax.eval_shape(draw)) == {"f.v", "f.v_auto_loc", "f.v_auto_tril"}
    fresh = gpaug.AutoSparseGP(classifier, covariance="dense")
    svi = SVI(classifier, fresh, optax.adam(0.1), gpaug.TraceAnalytic_ELBO())
    params = jax.eval_shape(
        lambda: svi.get_params(svi.init(random.key(KEY), *args, **kwargs))
    )
    assert set(params) == {"f.v_auto_loc", "f.v_auto_tril"}


# Stock bounds.


@crossed(
    "covariance", [(3, "natural"), (None, "dense")], ["natural", "dense", "diagonal"]
)
def test_stock_bounds_agree_with_the_analytic_one(num_latents, covariance):
    (X, y), kwargs = problem(num_latents)
    guide, params = spread_params(num_latents, covariance)
    q = blocks_of(guide, params)
    expected = -brute_bound(X, y, kwargs["inducing"], q)
    kinds = [TraceMeanField_ELBO()]
    if covariance == "dense":
        kinds.append(Trace_ELBO())

    @jax.jit
    def values(params, keys):
        def value(loss, key):
            return loss.loss(key, params, classifier, guide, X, y, **kwargs)

        draws = [jax.vmap(lambda key, k=k: value(k, key))(keys) for k in kinds]
        return value(gpaug.TraceAnalytic_ELBO(), keys[0]), draws

    analytic, draws_of = values(params, random.split(random.key(1), 3000))
    np.testing.assert_allclose(analytic, expected, rtol=1e-9)
    for loss, draws in zip(kinds, map(np.asarray, draws_of), strict=True):
        error = abs(draws.mean() - expected) / (draws.std() / np.sqrt(len(draws)))
        assert error < 4.5, (type(loss).__name__, error)
        # The residual of the sparse process is many standard errors large.
        _, residual = projection(X, kwargs["inducing"])
        assert residual.mean() > 0.1


# Minibatches.


@pytest.mark.parametrize("num_latents", [SLOW_ONE, 3])
def test_batch_losses_average_to_the_full_loss(num_latents):
    """Over a partition of the data, whoever makes the batches."""
    (X, y), kwargs = problem(num_latents)
    loss = gpaug.TraceAnalytic_ELBO()
    guide, params = spread_params(num_latents, "dense")
    full = loss_at(loss, params, guide, (X, y), kwargs)
    svi, result = fitted(num_latents)
    batched = {**kwargs, "batch_size": 8}

    @jax.jit
    def both(idx, X_batch, y_batch):
        """Fit with a plate that draws rows, and with batches passed in."""
        chosen = handlers.substitute(classifier, data={"data": idx})
        at = random.key(KEY), params
        drawn = loss.loss(*at, chosen, guide, X, y, **batched)
        given = {**kwargs, "size": 24}
        return drawn, loss.loss(*at, classifier, guide, X_batch, y_batch, **given)

    drawn, passed, conjugated = [], [], []
    for idx in np.random.default_rng(2).permutation(24).reshape(3, 8):
        batch = np.asarray(X)[idx], np.asarray(y)[idx]
        for values, value in zip((drawn, passed), both(idx, *batch), strict=True):
            values.append(value)
        given = {**result.kwargs, "size": 24}
        conjugated.append(svi.evaluate(result.state, *batch, **given))
    np.testing.assert_allclose(np.mean(drawn), full, rtol=1e-11)
    np.testing.assert_allclose(passed, drawn, rtol=1e-11)
    assert np.std(drawn) > 0.1
    np.testing.assert_allclose(np.mean(conjugated), result.losses[-1], rtol=1e-11)


# MCMC.


# Predictive and log_likelihood.


@crossed("how", [(None, "guide and params")], ["guide and params", "posterior samples"])
def test_predictive_from_the_fit_agrees_with_the_posterior(num_latents, how):
    args, kwargs = problem(num_latents)
    svi, result = fitted(num_latents)
    count = 4000

    @jax.jit
    def draw(X):
        if how == "posterior samples":
            samples = svi.guide.sample_posterior(
                random.key(3), result.params, *args, sample_shape=(count,), **kwargs
            )
            predict = Predictive(classifier, samples)
        else:
            predict = Predictive(
                classifier, guide=svi.guide, params=result.params, num_samples=count
            )
        return predict(random.key(2), X, **kwargs)

    draws = {k: np.asarray(v) for k, v in draw(NEW).items()}
    posterior = posterior_of(num_latents)
    mean, variance = posterior.predict_f(NEW)
    f = np.asarray(draws["f"])
    assert f.shape == (count, *mean.shape)
    assert np.abs((f.mean(0) - mean) / np.sqrt(variance / count)).max() < 5
    assert np.abs(f.var(0) / variance - 1).max() < 5 * np.sqrt(2 / count)
    probs = posterior.predict_y(NEW).probs
    spread = np.sqrt(probs * (1 - probs) / count)
    assert np.abs((draws["y"].mean(0) - probs) / spread).max() < 5


# Hyperparameters on the same bound.
