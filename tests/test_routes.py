# SPDX-License-Identifier: Apache-2.0
"""One model through every route, and the same posterior at the end of each."""

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
from jax import random
from numpyro import handlers
from numpyro.infer import (
    MCMC,
    NUTS,
    SVI,
    Predictive,
    Trace_ELBO,
    TraceMeanField_ELBO,
    log_likelihood,
)

import numpyro_gpaug as gpaug
from tests.models import (
    blocks_of,
    brute_bound,
    classifier,
    draw_data,
    expected_terms,
    moments,
    projection,
)

pytestmark = pytest.mark.usefixtures("x64")

GOLDEN = json.loads(
    (Path(__file__).parent / "golden" / "problem_binary_logistic.json").read_text()
)
KEY = 0
NEW = np.random.default_rng(9).uniform(-2, 2, (11, 2))  # another number of rows

latents = pytest.mark.parametrize("num_latents", [None, 3], ids=["C=1", "C=3"])
ONE = pytest.param(None, id="C=1")
SLOW_ONE = pytest.param(None, id="C=1", marks=pytest.mark.slow)
SLOW_THREE = pytest.param(3, id="C=3", marks=pytest.mark.slow)


def crossed(name, quick, others):
    """Both numbers of latents with every option; only the pairs in ``quick`` are not
    marked slow."""
    pairs = [
        pytest.param(c, o, marks=() if (c, o) in quick else pytest.mark.slow)
        for c in (None, 3)
        for o in others
    ]
    return pytest.mark.parametrize(("num_latents", name), pairs)


def problem(num_latents, **options):
    """Arguments and keyword arguments of the classifier."""
    X, y, Z = draw_data()
    y = y[:, 0] if num_latents is None else y
    return (X, y), {"inducing": Z, "num_latents": num_latents, **options}


def conjugate(args, kwargs, steps=40, model=classifier, updates="auto", **options):
    guide = gpaug.AutoSparseGP(model)
    svi = gpaug.ConjugateSVI(model, guide, updates=updates, **options)
    result = svi.run(random.key(KEY), steps, *args, progress_bar=False, **kwargs)
    return svi, result


@cache
def fitted(num_latents, updates="auto"):
    """The closed-form fit on full data; call it with 64-bit types enabled."""
    return conjugate(*problem(num_latents), updates=updates)


@cache
def posterior_of(num_latents, updates="auto"):
    svi, result = fitted(num_latents, updates)
    return svi.posterior(result)


def stock(args, kwargs, loss, covariance, steps, rate=0.05, model=classifier):
    guide = gpaug.AutoSparseGP(model, covariance=covariance).setup(*args, **kwargs)
    schedule = optax.cosine_decay_schedule(rate, steps)
    svi = SVI(model, guide, optax.adam(schedule), loss)
    result = svi.run(random.key(KEY), steps, *args, progress_bar=False, **kwargs)
    return guide, result


def loss_at(loss, params, guide, args, kwargs, model=classifier):
    return jax.jit(
        lambda params: loss.loss(random.key(KEY), params, model, guide, *args, **kwargs)
    )(params)


# Closed form against NumPy.


@crossed("updates", [(3, "auto"), (None, "augmented")], ["auto", "augmented", "exact"])
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


@pytest.mark.parametrize("num_latents", [None, SLOW_THREE], ids=["C=1", None])
def test_exact_sites_end_at_a_higher_bound(num_latents):
    svi, augmented = fitted(num_latents, "augmented")
    args, kwargs = problem(num_latents)
    exact_loss = gpaug.TraceAnalytic_ELBO("exact")
    there = loss_at(exact_loss, augmented.params, svi.guide, args, kwargs)
    assert fitted(num_latents, "exact")[1].losses[-1] < there < augmented.losses[-1]
    auto = fitted(num_latents, "auto")[1].losses[-1]
    np.testing.assert_allclose(fitted(num_latents, "exact")[1].losses[-1], auto)


@pytest.mark.parametrize("sparse", [False, True], ids=["full", "sparse"])
def test_augmented_steps_are_coordinate_ascent_to_the_golden_optimum(sparse):
    X, Z = jnp.asarray(GOLDEN["X"]), jnp.asarray(GOLDEN["Z"])
    y = ((jnp.asarray(GOLDEN["y"]) + 1) / 2).astype(int)
    inducing = Z if sparse else X
    golden = GOLDEN["sparse" if sparse else "full"]

    def model(X, y):
        kernel = gpaug.kernels.SquaredExponential(0.9, 1.3)
        gp = gpaug.GaussianProcess("f", kernel, inducing=inducing, jitter=0.0)
        with numpyro.plate("data", X.shape[0]):
            numpyro.sample("y", dist.Bernoulli(logits=gp(X)), obs=y)

    svi, result = conjugate((X, y), {}, 100, model, updates="augmented")
    np.testing.assert_allclose(-result.losses[-1], golden["elbo"], rtol=1e-8)
    at = inducing if sparse else X
    mean, cover = svi.posterior(result).predict_f(at, full_covariance=True)
    np.testing.assert_allclose(mean, golden["mu"], rtol=1e-8)
    np.testing.assert_allclose(cover, golden["Sigma"], rtol=1e-7, atol=1e-10)
    if sparse:
        trace = golden["elbo_trace_from_prior"]
        ours = -np.asarray(result.losses)
        start = int(np.argmin(np.abs(np.asarray(trace[:3]) - ours[0])))
        count = min(8, len(trace) - start)
        np.testing.assert_allclose(
            ours[:count], trace[start : start + count], rtol=1e-8
        )
        f = svi.posterior(result).predict_f(X)
        np.testing.assert_allclose(f.mean, golden["m"], rtol=1e-8)
        np.testing.assert_allclose(f.variance, golden["v"], rtol=1e-8)


@latents
def test_the_first_step_on_a_batch_is_the_formula(num_latents):
    """From the prior every f has mean 0 and variance 2, so PG(1, sqrt(2))."""
    (X, y), kwargs = problem(num_latents, size=24)
    Z = kwargs["inducing"]
    batch = X[:6], y[:6]
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


def test_three_latents_are_three_fits():
    (X, y), kwargs = problem(3)
    svi, result = fitted(3)
    together = blocks_of(svi.guide, result.params)
    one, _ = fitted(None)
    apart = [
        one.run(
            random.key(KEY), 40, X, y[:, c], inducing=kwargs["inducing"],
            num_latents=None, progress_bar=False,
        )
        for c in range(3)
    ]  # fmt: skip
    for c, alone in enumerate(apart):
        mean, cover = blocks_of(one.guide, alone.params)
        np.testing.assert_allclose(together[0][c], mean[0], rtol=1e-6, atol=1e-7)
        np.testing.assert_allclose(together[1][c], cover[0], rtol=1e-6, atol=1e-7)
    total = sum(alone.losses[-1] for alone in apart)
    np.testing.assert_allclose(result.losses[-1], total, rtol=1e-9)
    joint = posterior_of(3)
    alone = one.posterior(apart[1])
    probs = joint.predict_y(NEW).probs[:, 1]
    np.testing.assert_allclose(probs, alone.predict_y(NEW).probs, rtol=1e-6)
    covariances = (p.predict_f(NEW, full_covariance=True)[1] for p in (joint, alone))
    three, single = covariances
    assert three.shape == (3, 11, 11)
    np.testing.assert_allclose(three[1], single, rtol=1e-5, atol=1e-7)


@latents
def test_prediction_is_the_brute_force_formula(num_latents):
    kwargs = problem(num_latents)[1]
    svi, result = fitted(num_latents)
    f = posterior_of(num_latents).predict_f(NEW)
    shape = (11,) if num_latents is None else (11, 3)
    assert f.mean.shape == f.variance.shape == shape
    columns = [np.asarray(x).reshape(11, -1).T for x in f]
    for c, (mean, cover) in enumerate(
        zip(*blocks_of(svi.guide, result.params), strict=True)
    ):
        m, v = moments(NEW, kwargs["inducing"], mean, cover)
        np.testing.assert_allclose(columns[0][c], m, rtol=1e-8, atol=1e-10)
        np.testing.assert_allclose(columns[1][c], v, rtol=1e-8)


# Gradients.


@crossed("bound", [(None, "exact"), (3, "augmented")], ["exact", "augmented"])
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
    trace = handlers.trace(handlers.seed(guide, 0)).get_trace(*args, **kwargs)
    assert set(trace) == {"f.v", "f.v_auto_loc", "f.v_auto_tril"}
    fresh = gpaug.AutoSparseGP(classifier, covariance="dense")
    svi = SVI(classifier, fresh, optax.adam(0.1), gpaug.TraceAnalytic_ELBO())
    result = svi.run(random.key(KEY), 3, *args, progress_bar=False, **kwargs)
    assert set(result.params) == {"f.v_auto_loc", "f.v_auto_tril"}


# Stock bounds.


def spread_params(num_latents, covariance):
    """Params away from the optimum, where the residual matters."""
    args, kwargs = problem(num_latents)
    guide = gpaug.AutoSparseGP(classifier, covariance=covariance)
    guide.setup(*args, **kwargs)
    (block,) = guide.structure.blocks
    rng = np.random.default_rng(4)
    loc = jnp.asarray(rng.normal(size=block.shape))
    if covariance == "diagonal":
        scale = jnp.asarray(rng.uniform(0.3, 1, block.shape))
        return guide, {"f.v_auto_loc": loc, "f.v_auto_scale": scale}
    factor = np.tril(rng.normal(size=(*block.shape, 6))) * 0.2 + 0.5 * np.eye(6)
    if covariance == "dense":
        return guide, {"f.v_auto_loc": loc, "f.v_auto_tril": jnp.asarray(factor)}
    precision = jnp.asarray(factor @ np.swapaxes(factor, -1, -2) + np.eye(6))
    return guide, {"f.v_auto_potential": loc, "f.v_auto_precision": precision}


@crossed(
    "covariance",
    [(3, "natural"), (None, "dense"), (None, "diagonal")],
    ["natural", "dense", "diagonal"],
)
def test_stock_bounds_agree_with_the_analytic_one(num_latents, covariance):
    (X, y), kwargs = problem(num_latents)
    guide, params = spread_params(num_latents, covariance)
    q = blocks_of(guide, params)
    expected = -brute_bound(X, y, kwargs["inducing"], q)
    analytic = loss_at(gpaug.TraceAnalytic_ELBO(), params, guide, (X, y), kwargs)
    np.testing.assert_allclose(analytic, expected, rtol=1e-9)
    kinds = [TraceMeanField_ELBO()]
    if covariance == "dense":
        kinds.append(Trace_ELBO())
    for loss in kinds:
        keys = random.split(random.key(1), 3000)

        def value(key, loss=loss):
            return loss.loss(key, params, classifier, guide, X, y, **kwargs)

        draws = np.asarray(jax.jit(jax.vmap(value))(keys))
        error = abs(draws.mean() - expected) / (draws.std() / np.sqrt(len(draws)))
        assert error < 4.5, (type(loss).__name__, error)
        # The residual of a sparse process is worth many standard errors.
        _, residual = projection(X, kwargs["inducing"])
        assert residual.mean() > 0.1


@pytest.mark.parametrize(
    ("loss", "batch_size"),
    [
        (Trace_ELBO(), None),
        (TraceMeanField_ELBO(), 8),
        pytest.param(Trace_ELBO(), 8, marks=pytest.mark.slow),
        pytest.param(TraceMeanField_ELBO(), None, marks=pytest.mark.slow),
    ],
)
def test_stock_svi_runs(loss, batch_size):
    args, kwargs = problem(None, batch_size=batch_size)
    guide, result = stock(args, kwargs, loss, "dense", 400)
    analytic = gpaug.TraceAnalytic_ELBO()
    value = loss_at(analytic, result.params, guide, *problem(None))
    best = fitted(None)[1].losses[-1]
    assert best - 1e-9 < value < best + 1.0


# Minibatches.


@pytest.mark.parametrize("num_latents", [SLOW_ONE, 3])
def test_batch_losses_average_to_the_full_loss(num_latents):
    """Over a partition of the data, whoever makes the batches."""
    (X, y), kwargs = problem(num_latents)
    loss = gpaug.TraceAnalytic_ELBO()
    guide, params = spread_params(num_latents, "dense")
    full = loss_at(loss, params, guide, (X, y), kwargs)
    order = np.random.default_rng(2).permutation(24).reshape(3, 8)
    drawn, passed, conjugated = [], [], []
    svi, result = fitted(num_latents)
    for idx in order:
        drawn_model = handlers.substitute(classifier, data={"data": jnp.asarray(idx)})
        batched = {**kwargs, "batch_size": 8}
        drawn.append(loss_at(loss, params, guide, (X, y), batched, drawn_model))
        given = (X[idx], y[idx]), {**kwargs, "size": 24}
        passed.append(loss_at(loss, params, guide, *given))
        conjugated.append(svi.evaluate(result.state, *given[0], **given[1]))
    np.testing.assert_allclose(np.mean(drawn), full, rtol=1e-11)
    np.testing.assert_allclose(passed, drawn, rtol=1e-11)
    assert np.std(drawn) > 0.1
    np.testing.assert_allclose(np.mean(conjugated), result.losses[-1], rtol=1e-11)


@crossed("passed_in", [(None, True), (3, False)], [False, True])
def test_minibatches_approach_the_full_optimum(num_latents, passed_in):
    (X, y), full = problem(num_latents)
    guide = gpaug.AutoSparseGP(classifier)
    svi = gpaug.ConjugateSVI(classifier, guide)
    if passed_in:
        kwargs = {**full, "size": 24}
        state = svi.init(random.key(KEY), X[:8], y[:8], **kwargs)
        rng = np.random.default_rng(0)
        for _ in range(30):
            for idx in rng.permutation(24).reshape(3, 8):
                state, _ = svi.update(state, X[idx], y[idx], **kwargs)
        params = svi.get_params(state)
    else:
        kwargs = {**full, "batch_size": 8}
        run = svi.run(random.key(KEY), 150, X, y, progress_bar=False, **kwargs)
        params = run.params
    value = -brute_bound(X, y, full["inducing"], blocks_of(guide, params))
    best = fitted(num_latents)[1].losses[-1]
    assert best - 1e-9 < value < best + (0.2 if num_latents is None else 0.6)


def test_analytic_svi_on_minibatches():
    args, kwargs = problem(None, batch_size=8)
    guide, result = stock(args, kwargs, gpaug.TraceAnalytic_ELBO(), "dense", 400)
    value = loss_at(gpaug.TraceAnalytic_ELBO(), result.params, guide, *problem(None))
    best = fitted(None)[1].losses[-1]
    assert best - 1e-9 < value < best + 0.5


# MCMC.


def importance_moments(X, y, Z, q, count=40_000):
    """Mean and variance of v under the exact posterior, from draws of ``q``."""
    (mean,), (cover,) = q
    rng = np.random.default_rng(0)
    factor = np.linalg.cholesky(cover)
    # A little wider than q: variational posteriors are too narrow.
    eps = rng.normal(size=(count, len(mean)))
    v = mean + 1.2 * eps @ factor.T
    f = v @ projection(X, Z)[0]
    sign = 2 * np.asarray(y) - 1.0
    log_weight = -np.logaddexp(0, -sign * f).sum(1) - 0.5 * (v**2).sum(1)
    log_weight += 0.5 * (eps**2).sum(1)
    weight = np.exp(log_weight - log_weight.max())
    weight /= weight.sum()
    assert 1 / (weight**2).sum() > count / 4
    centre = weight @ v
    return centre, weight @ (v - centre) ** 2


def test_nuts_samples_the_posterior_of_the_full_process():
    X, y, _ = draw_data(seed=3, rows=8)
    y = y[:, 0]
    svi, result = conjugate((X, y), {"inducing": X})
    mean, variance = importance_moments(X, y, X, blocks_of(svi.guide, result.params))
    mcmc = MCMC(NUTS(classifier), num_warmup=200, num_samples=800, progress_bar=False)
    mcmc.run(random.key(KEY), X, y, inducing=X)
    draws = mcmc.get_samples()
    assert set(draws) == {"f.v", "f"}
    np.testing.assert_allclose(
        draws["f"], draws["f.v"] @ projection(X, X)[0], atol=1e-6
    )
    deviation = np.sqrt(variance)
    assert np.abs((draws["f.v"].mean(0) - mean) / deviation).max() < 0.25
    assert np.abs(draws["f.v"].std(0) / deviation - 1).max() < 0.2
    q = blocks_of(svi.guide, result.params)
    assert np.abs((q[0][0] - mean) / deviation).max() < 0.05
    assert np.abs(np.sqrt(np.diag(q[1][0])) / deviation - 1).max() < 0.1

    new = Predictive(classifier, draws)(random.key(1), jnp.asarray(NEW), inducing=X)
    assert new["f"].shape == new["y"].shape == (800, 11)
    f = svi.posterior(result).predict_f(NEW)
    error = (new["f"].mean(0) - f.mean) / np.sqrt(f.variance)
    assert np.abs(error).max() < 0.3
    pointwise = log_likelihood(classifier, draws, X, y, inducing=X)["y"]
    sign = 2 * np.asarray(y) - 1.0
    expected = -np.logaddexp(0, -sign * np.asarray(draws["f"]))
    np.testing.assert_allclose(pointwise, expected, rtol=1e-6, atol=1e-9)


# Predictive and log_likelihood.


@pytest.mark.parametrize("num_latents", [SLOW_ONE, 3])
def test_predictive_from_the_prior_at_any_size(num_latents):
    kwargs = problem(num_latents)[1]
    tail = () if num_latents is None else (3,)
    for rows in (1, 11):
        draws = Predictive(classifier, num_samples=5)(
            random.key(KEY), jnp.asarray(NEW[:rows]), **kwargs
        )
        assert draws["f"].shape == draws["y"].shape == (5, rows, *tail)
        assert set(np.unique(draws["y"])) <= {0, 1}


@crossed(
    "how",
    [(None, "guide and params"), (3, "posterior samples")],
    ["guide and params", "posterior samples"],
)
def test_predictive_from_the_fit_agrees_with_the_posterior(num_latents, how):
    args, kwargs = problem(num_latents)
    svi, result = fitted(num_latents)
    count = 4000
    if how == "posterior samples":
        samples = svi.guide.sample_posterior(
            random.key(3), result.params, *args, sample_shape=(count,), **kwargs
        )
        predict = Predictive(classifier, samples)
    else:
        predict = Predictive(
            classifier, guide=svi.guide, params=result.params, num_samples=count
        )
    draws = predict(random.key(2), jnp.asarray(NEW), **kwargs)
    posterior = posterior_of(num_latents)
    mean, variance = posterior.predict_f(NEW)
    f = np.asarray(draws["f"])
    assert f.shape == (count, *mean.shape)
    assert np.abs((f.mean(0) - mean) / np.sqrt(variance / count)).max() < 5
    assert np.abs(f.var(0) / variance - 1).max() < 5 * np.sqrt(2 / count)
    probs = posterior.predict_y(NEW).probs
    spread = np.sqrt(probs * (1 - probs) / count)
    assert np.abs((draws["y"].mean(0) - probs) / spread).max() < 5


@pytest.mark.parametrize("num_latents", [SLOW_ONE, 3])
def test_log_likelihood_is_pointwise_at_the_projected_mean(num_latents):
    (X, y), kwargs = problem(num_latents)
    _, result = fitted(num_latents)
    svi = fitted(num_latents)[0]
    samples = svi.guide.sample_posterior(
        random.key(3), result.params, X, y, sample_shape=(4,), **kwargs
    )
    value = log_likelihood(classifier, samples, X, y, **kwargs)["y"]
    assert value.shape == (4, 24)
    A, _ = projection(X, kwargs["inducing"])
    f = np.einsum("s...m,mn->sn...", np.asarray(samples["f.v"]), A)
    terms = -np.logaddexp(0, -(2 * np.asarray(y) - 1.0) * f)
    expected = terms if num_latents is None else terms.sum(-1)
    np.testing.assert_allclose(value, expected, rtol=1e-8, atol=1e-10)


# Handlers.


@pytest.mark.parametrize("num_latents", [ONE, SLOW_THREE])
def test_scale_of_the_model_multiplies_every_term(num_latents):
    args, kwargs = problem(num_latents)
    guide, params = spread_params(num_latents, "dense")
    loss = gpaug.TraceAnalytic_ELBO()
    once = loss_at(loss, params, guide, args, kwargs)
    scaled = handlers.scale(classifier, scale=2.5)
    np.testing.assert_allclose(
        loss_at(loss, params, guide, args, kwargs, scaled), 2.5 * once
    )
    svi, result = conjugate(args, kwargs, model=scaled)
    closed = fitted(num_latents)[1]
    np.testing.assert_allclose(result.losses[-1], 2.5 * closed.losses[-1], rtol=1e-8)
    for name, value in closed.params.items():
        np.testing.assert_allclose(result.params[name], value, rtol=1e-4, atol=1e-5)


@pytest.mark.parametrize("num_latents", [ONE, SLOW_THREE])
def test_scale_per_datum_weights_its_term(num_latents):
    weights = np.linspace(0.5, 2, 24)
    (X, y), kwargs = problem(num_latents)
    weighted = {**kwargs, "weights": jnp.asarray(weights)}
    svi, result = conjugate((X, y), weighted)
    q = blocks_of(svi.guide, result.params)
    expected = brute_bound(X, y, kwargs["inducing"], q, weights=weights)
    np.testing.assert_allclose(-result.losses[-1], expected, rtol=1e-9)
    # A datum of weight 2 is the same datum twice.
    twice = np.r_[np.arange(24), 5]
    double = {**kwargs, "weights": jnp.ones(24).at[5].set(2.0)}
    one = conjugate((X, y), double)[1]
    other = conjugate((X[twice], y[twice]), kwargs)[1]
    np.testing.assert_allclose(one.losses[-1], other.losses[-1], rtol=1e-9)
    for name, value in other.params.items():
        np.testing.assert_allclose(one.params[name], value, rtol=1e-4, atol=1e-6)
    assert abs(one.losses[-1] - fitted(num_latents)[1].losses[-1]) > 0.1


@crossed("full", [(None, True), (3, False)], [True, False])
def test_a_masked_datum_is_a_deleted_one(num_latents, full):
    (X, y), kwargs = problem(num_latents)
    X, y = X[:10], y[:10]
    keep = np.array([True] * 3 + [False] * 2 + [True] * 5)
    kwargs = {**kwargs, "inducing": X if full else kwargs["inducing"]}
    masked = conjugate((X, y), {**kwargs, "mask": jnp.asarray(keep)})[1]
    deleted = conjugate((X[keep], y[keep]), kwargs)[1]
    np.testing.assert_allclose(masked.losses, deleted.losses, rtol=1e-9)
    for name, value in deleted.params.items():
        np.testing.assert_allclose(masked.params[name], value, rtol=1e-6, atol=1e-8)
    # The masked label is never looked at.
    wild = y.at[3].set(7)
    again = conjugate((X, wild), {**kwargs, "mask": jnp.asarray(keep)})[1]
    np.testing.assert_allclose(again.losses, masked.losses, rtol=1e-12)


def test_mask_and_weights_follow_their_rows_into_batches():
    (X, y), kwargs = problem(None)
    weights = jnp.linspace(0.5, 2, 24)
    mask = jnp.arange(24) % 5 != 0
    kwargs = {**kwargs, "weights": weights, "mask": mask}
    loss = gpaug.TraceAnalytic_ELBO()
    guide, params = spread_params(None, "dense")
    full = loss_at(loss, params, guide, (X, y), kwargs)
    q = blocks_of(guide, params)
    weight = np.asarray(weights * mask)
    expected = brute_bound(X, y, kwargs["inducing"], q, weights=weight)
    np.testing.assert_allclose(-full, expected, rtol=1e-9)
    batches = []
    for idx in np.random.default_rng(2).permutation(24).reshape(3, 8):
        chosen = handlers.substitute(classifier, data={"data": jnp.asarray(idx)})
        batched = {**kwargs, "batch_size": 8}
        batches.append(loss_at(loss, params, guide, (X, y), batched, chosen))
    np.testing.assert_allclose(np.mean(batches), full, rtol=1e-11)


def test_scope_only_renames():
    args, kwargs = problem(None)
    scoped = handlers.scope(classifier, prefix="a")
    svi, result = conjugate(args, {**kwargs, "learn": True}, model=scoped)
    plain = conjugate(args, {**kwargs, "learn": True})[1]
    np.testing.assert_allclose(result.losses, plain.losses, rtol=1e-11)
    assert set(result.params) == {f"a/{name}" for name in plain.params}
    for name, value in plain.params.items():
        np.testing.assert_allclose(result.params[f"a/{name}"], value, rtol=1e-9)
    f = svi.posterior(result).predict_f(NEW)
    reference = posterior_of(None).predict_f(NEW)
    np.testing.assert_allclose(f.mean, reference.mean, rtol=1e-7, atol=1e-9)
    draws = Predictive(scoped, num_samples=2)(random.key(0), jnp.asarray(NEW), **kwargs)
    assert set(draws) == {"a/f", "a/f.v", "a/y"}


def test_two_scopes_of_one_process_do_not_mix():
    (X, y), kwargs = problem(None)

    def model(X, y=None):
        for prefix in "ab":
            handlers.scope(classifier, prefix=prefix)(X, y, **kwargs)

    svi, result = conjugate((X, y), {}, model=model)
    once = fitted(None)[1].losses[-1]
    np.testing.assert_allclose(result.losses[-1], 2 * once, rtol=1e-9)
    potentials = [result.params[f"{p}/f.v_auto_potential"] for p in "ab"]
    np.testing.assert_allclose(potentials[0], potentials[1], rtol=1e-9)


def test_substitute_fixes_a_hyperparameter():
    (X, y), kwargs = problem(None)
    fixed = handlers.substitute(classifier, data={"lengthscale": jnp.asarray(0.5)})
    result = conjugate((X, y), {**kwargs, "learn": True}, model=fixed)[1]
    constant = conjugate((X, y), {**kwargs, "lengthscale": 0.5})[1]
    np.testing.assert_allclose(result.losses, constant.losses, rtol=1e-10)
    assert abs(result.losses[-1] - fitted(None)[1].losses[-1]) > 0.01


def test_substitute_of_the_inducing_values():
    kwargs = problem(None)[1]
    v = np.random.default_rng(5).normal(size=6)
    held = handlers.substitute(classifier, data={"f.v": jnp.asarray(v)})
    mean_only = gpaug.with_residual(handlers.seed(held, 0), "mean")
    trace = handlers.trace(mean_only).get_trace(jnp.asarray(NEW), **kwargs)
    A, _ = projection(NEW, kwargs["inducing"])
    np.testing.assert_allclose(trace["f"]["value"], A.T @ v, rtol=1e-9)


def test_condition_on_the_inducing_values_leaves_no_block():
    args, kwargs = problem(None)
    v = jnp.asarray(np.random.default_rng(5).normal(size=6))
    held = handlers.condition(classifier, data={"f.v": v})
    with pytest.raises(ValueError, match="no Gaussian process"):
        conjugate(args, kwargs, model=held)


# Hyperparameters on the same bound.


@pytest.mark.parametrize("num_latents", [ONE, SLOW_THREE])
def test_hyperparameters_meet_whoever_learns_them(num_latents):
    args, kwargs = problem(num_latents, learn=True)
    optim = optax.adam(optax.cosine_decay_schedule(0.1, 200))
    svi, closed = conjugate(args, kwargs, 200, optim=optim)
    assert np.all(np.diff(closed.losses) < 1e-8)
    loss = gpaug.TraceAnalytic_ELBO()
    _, result = stock(args, kwargs, loss, "dense", 1000)
    assert abs(closed.losses[-1] - result.losses[-1]) < 1e-3
    np.testing.assert_allclose(
        closed.params["lengthscale"], result.params["lengthscale"], rtol=1e-2
    )
    q = blocks_of(svi.guide, closed.params)
    at = {"lengthscale": float(closed.params["lengthscale"])}
    expected = brute_bound(*args, kwargs["inducing"], q, **at)
    np.testing.assert_allclose(-closed.losses[-1], expected, rtol=1e-2)
    sides = [
        brute_bound(*args, kwargs["inducing"], q, lengthscale=at["lengthscale"] * k)
        for k in (0.9, 1.1)
    ]
    assert max(sides) < expected


def test_the_augmented_terms_bound_the_exact_ones():
    """Of the NumPy reference itself."""
    m, v = np.array([0.3, -2, 5]), np.array([0.1, 3, 1.0])
    for y in (0, 1):
        labels = np.full(3, y)
        exact = expected_terms(labels, m, v, "exact")
        assert np.all(expected_terms(labels, m, v, "augmented") < exact)
