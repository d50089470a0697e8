# SPDX-License-Identifier: Apache-2.0
"""Closed-form updates: golden problems, equivalences, monotonicity, minibatches."""

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
from scipy import stats

import numpyro_gpaug as gpaug
from numpyro_gpaug.infer import Adaptive, RobbinsMonro
from numpyro_gpaug.model.arguments import Arguments
from tests.conftest import slow
from tests.models import covariance
from tests.problems import classifier, learnt, regression, toy

GOLDEN = json.loads(
    (Path(__file__).parent / "golden" / "problem_binary_logistic.json").read_text()
)
KEY = jax.random.key(0)
ADAM = optax.adam(0.1)
pytestmark = pytest.mark.usefixtures("x64")


@cache
def fitter(model, updates="auto", optim=None, size=(20, None), **options):
    """Return one fitter for all tests with equal numbers of inducing inputs and
    latents: it compiles once for each shape.
    """
    return gpaug.ConjugateSVI(
        model, gpaug.AutoSparseGP(model), optim, updates, **options
    )


def fit(model, *args, num_steps=60, optim=None, updates="auto", **kwargs):
    known = ("step_size", "hyper_steps", "hyper_every")
    options = {k: kwargs.pop(k) for k in known if k in kwargs}
    size = len(kwargs.get("inducing", ())), kwargs.get("num_latents")
    svi = fitter(model, updates, optim, size, **options)
    return svi, svi.run(KEY, num_steps, *args, progress_bar=False, **kwargs)


def classify(updates="auto", num_steps=60, **hyper):
    """A fit of the classifier to 60 data by 20 inducing inputs. Hyperparameters as
    arrays, which compile nothing."""
    X, y = toy(60)
    given = {k: np.array(float(x)) for k, x in hyper.items()}
    given = {"lengthscale": np.array(1.0), "variance": np.array(1.0)} | given
    options = {"updates": updates, "num_steps": num_steps, "inducing": X[:20]}
    return fit(classifier, X, y, **options, **given)


def with_inducing_inputs(X, y=None, *, inducing):
    Z = numpyro.param("Z", inducing)
    gp = gpaug.GaussianProcess("f", gpaug.kernels.Matern52(), Z)
    with numpyro.plate("data", X.shape[0]):
        numpyro.sample("y", dist.Bernoulli(logits=gp(X)), obs=y)


def inducing_moments(params, Z, lengthscale, variance):
    """Mean and covariance of u = L v."""
    L = np.linalg.cholesky(covariance(Z, Z, lengthscale, variance))
    S = np.linalg.inv(np.asarray(params["f.v_auto_precision"]))
    mean = S @ np.asarray(params["f.v_auto_potential"])
    return L @ mean, L @ S @ L.T


@pytest.mark.parametrize("which", ["full", "sparse"])
def test_golden_problem(which: str) -> None:
    X = np.asarray(GOLDEN["X"])
    Z = X if which == "full" else np.asarray(GOLDEN["Z"])
    y = (np.asarray(GOLDEN["y"]) + 1) / 2
    kernel = {"lengthscale": 0.9, "variance": 1.3}
    given = {"inducing": Z, "jitter": 0, **kernel}
    svi, result = fit(classifier, X, y, updates="augmented", **given)
    golden = GOLDEN[which]
    mean, cover = inducing_moments(result.params, Z, **kernel)
    np.testing.assert_allclose(mean, golden["mu"], rtol=1e-8)
    np.testing.assert_allclose(cover, golden["Sigma"], rtol=1e-8, atol=1e-10)
    np.testing.assert_allclose(-result.losses[-1], golden["elbo"], rtol=1e-8)
    if which == "sparse":
        trace = golden["elbo_trace_from_prior"][1:]
        np.testing.assert_allclose(-result.losses[: len(trace)], trace, rtol=1e-8)
        f = svi.posterior(result).predict_f(X)
        np.testing.assert_allclose(f.mean, golden["m"], rtol=1e-8)
        np.testing.assert_allclose(f.variance, golden["v"], rtol=1e-8)
    else:
        # The exact bound is tighter and still below the evidence.
        _, exact = fit(classifier, X, y, inducing=Z, jitter=0, **kernel)
        assert golden["elbo"] < -exact.losses[-1] < golden["log_evidence"]


def matern(a, b):
    r = np.sqrt(5 * ((a[:, None] - b[None]) ** 2).sum(-1))
    return (1 + r + r**2 / 3) * np.exp(-r)


def test_regression_equals_the_exact_posterior() -> None:
    X, _ = toy(30, 1)
    y = np.sin(X[:, 0])
    svi, result = fit(regression, X, y, inducing=X, num_steps=2)
    new = np.linspace(-2, 2, 7)[:, None]
    gram, cross = matern(X, X) + 0.25 * np.eye(30), matern(new, X)
    f = svi.posterior(result).predict_f(new)
    np.testing.assert_allclose(f.mean, cross @ np.linalg.solve(gram, y), atol=1e-6)
    variance = 1 - np.einsum("ij,ji->i", cross, np.linalg.solve(gram, cross.T))
    np.testing.assert_allclose(f.variance, variance, atol=1e-6)
    density = stats.multivariate_normal(np.zeros(30), gram).logpdf(y)
    np.testing.assert_allclose(-result.losses[-1], density, rtol=1e-7)


def test_hyperparameters_reach_the_optimum_and_the_bound_never_falls() -> None:
    X, y = toy(60)
    _, result = fit(learnt, X, y, inducing=X[:20], num_steps=300, optim=ADAM)
    assert np.diff(result.losses).max() < 1e-9
    at = {k: float(result.params[k]) for k in ("lengthscale", "variance")}
    for name in at:
        for factor in (0.9, 1.1):
            moved = {**at, name: at[name] * factor}
            _, other = classify(**moved)
            assert other.losses[-1] > result.losses[-1]


def at_rest_for_twenty_steps(count):
    return jnp.where(count < 20, 0.0, 0.05)


LATE = optax.adam(at_rest_for_twenty_steps)


def test_inducing_inputs_are_learnt() -> None:
    X, y = toy(60)
    _, result = fit(
        with_inducing_inputs, X, y, inducing=X[:4], num_steps=220, optim=LATE
    )
    fixed = result.losses[19]
    assert result.losses[15] - fixed < 1e-3
    assert result.losses[-1] < fixed - 0.5
    assert result.params["Z"].shape == (4, 2)


@pytest.mark.slow
def test_several_gradient_steps_per_update() -> None:
    X, y = toy(40)
    arguments = {"inducing": X[:10], "optim": optax.adam(0.05), "num_steps": 20}
    one = fit(learnt, X, y, **arguments)[1]
    three = fit(learnt, X, y, hyper_steps=3, **arguments)[1]
    assert three.losses[-1] < one.losses[-1]


@pytest.mark.parametrize("batch_size", [None, slow(10)])
def test_gradient_steps_after_several_updates(batch_size) -> None:
    """Hyperparameters are constant between, then move."""
    X, y = toy(60)
    svi = fitter(learnt, "auto", ADAM, hyper_every=3)
    data = {"inducing": X[:20], "batch_size": batch_size}
    state, seen = svi.init(KEY, X, y, **data), []
    for _ in range(8):
        state, _ = svi.update(state, X, y, **data)
        seen.append(float(svi.get_params(state)["lengthscale"]))
    # An update is computed by the third step and applied by the fourth.
    moved = np.diff(seen) != 0
    np.testing.assert_array_equal(
        moved, [False, False, True, False, False, True, False]
    )


@cache
def lengthscales_on_a_grid():
    """Log lengthscales, and the log density of each: prior, and bound at the best q."""
    grid = np.linspace(-2.0, 1.5, 11)
    bounds = [-classify(lengthscale=np.exp(t))[1].losses[-1] for t in grid]
    fine = np.linspace(-2.0, 1.5, 500)
    return fine, np.polyval(np.polyfit(grid, bounds, 8), fine) - fine**2 / 2


@pytest.mark.parametrize("other", ["AutoDelta", slow("AutoNormal")])
def test_sampled_hyperparameters_through_a_stock_autoguide(other) -> None:
    def model(X, y=None, *, inducing):
        lengthscale = numpyro.sample("lengthscale", dist.LogNormal(0.0, 1.0))
        kernel = gpaug.kernels.SquaredExponential(lengthscale)
        gp = gpaug.GaussianProcess("f", kernel, inducing=inducing)
        with numpyro.plate("data", X.shape[0]):
            numpyro.sample("y", dist.Bernoulli(logits=gp(X)), obs=y)

    X, y = toy(60)
    at, density = lengthscales_on_a_grid()
    guide = gpaug.AutoSparseGP(model, other=getattr(numpyro.infer.autoguide, other))
    point = other == "AutoDelta"
    svi = gpaug.ConjugateSVI(model, guide, optax.adam(0.1 if point else 0.05))
    result = svi.run(
        KEY, 150 if point else 300, X, y, inducing=X[:20], progress_bar=False
    )
    median = np.log(guide.median(result.params)["lengthscale"])
    if point:
        assert np.diff(result.losses).max() < 1e-8
        # It is a mode of the density of the lengthscale, not of its logarithm.
        np.testing.assert_allclose(median, at[np.argmax(density - at)], atol=0.03)
    else:
        weights = np.exp(density - density.max())
        mean = (weights * at).sum() / weights.sum()
        np.testing.assert_allclose(median, mean, atol=0.15)


@pytest.mark.parametrize(
    "step_size",
    [
        None,
        "adaptive",
        slow(0.05),
        slow(RobbinsMonro(5.0, 0.9)),
        slow(Adaptive(20.0)),
    ],
)
def test_minibatches_come_near_the_full_optimum(step_size) -> None:
    X, y = toy(60)
    Z, full = X[:20], classify()[1].losses[-1]
    svi, result = fit(
        learnt, X, y, inducing=Z, batch_size=20, num_steps=500, step_size=step_size
    )
    reached = svi.evaluate(result.state, X, y, inducing=Z)
    assert full - 1e-3 * abs(full) <= reached < full + 2.0


def test_an_epoch_visits_every_datum_once() -> None:
    seen = []

    def model(X, y=None):
        gp = gpaug.GaussianProcess("f", gpaug.kernels.Matern52(), inducing=X[:3])
        with numpyro.plate("data", X.shape[0], subsample_size=5) as index:
            jax.debug.callback(lambda i: seen.append(np.asarray(i)), index)
            numpyro.sample("y", dist.Bernoulli(logits=gp(X[index])), obs=y[index])

    X, y = toy(20)
    svi = gpaug.ConjugateSVI(model, gpaug.AutoSparseGP(model))
    state = svi.init(KEY, X, y)
    for _ in range(4):
        seen.clear()
        order, position = state.epochs["data"]
        state, _ = svi.update(state, X, y)
    order, position = state.epochs["data"]
    assert int(position) == 20
    np.testing.assert_array_equal(np.sort(order), np.arange(20))
    assert (np.asarray(order) != np.arange(20)).any()
    jax.effects_barrier()
    used = np.unique(np.concatenate(seen))
    np.testing.assert_array_equal(used, np.sort(np.asarray(order)[15:]))


def test_tol_stops_and_init_state_continues() -> None:
    svi, _ = classify()
    X, y = toy(60)
    given = {"inducing": X[:20], "progress_bar": False}
    given |= {"lengthscale": np.array(1.0), "variance": np.array(1.0)}
    stopped = svi.run(KEY, 1000, X, y, tol=1e-2, **given)
    assert len(stopped.losses) < 30
    again = svi.run(KEY, 5, X, y, init_state=stopped.state, **given)
    assert again.losses[0] <= stopped.losses[-1] + 1e-9
    # The first result still holds its own arrays.
    assert np.isfinite(stopped.params["f.v_auto_precision"]).all()


def test_one_compilation_whatever_the_number_of_steps() -> None:
    svi, _ = classify(num_steps=3)
    compiled = svi._programs.advance.plain._cache_size()
    for num_steps in (1, 7, 130):
        classify(num_steps=num_steps)
    assert svi._programs.advance.plain._cache_size() == compiled


def test_what_a_user_holds_is_never_overwritten() -> None:
    X, y = toy(60)
    Z = jnp.array(X[:4])
    svi = fitter(with_inducing_inputs, "auto", LATE, (4, None))
    arguments = {"inducing": Z, "progress_bar": False}
    first = svi.run(KEY, 3, X, y, **arguments)
    held = jax.tree.map(np.asarray, (first.params, first.state.natural, Z))
    svi.run(KEY, 3, X, y, init_params=first.params, **arguments)
    svi.run(KEY, 3, X, y, init_state=first.state, **arguments)
    svi.update(first.state, X, y, inducing=Z)
    again = first.params, first.state.natural, Z
    for before, after in zip(
        jax.tree.leaves(held), jax.tree.leaves(again), strict=True
    ):
        np.testing.assert_array_equal(before, after)


@pytest.mark.parametrize("offset", range(0, 64, 8))
def test_what_a_user_changes_later_is_not_seen(offset: int) -> None:
    """JAX takes over memory of NumPy's that is aligned in its way."""
    memory = np.zeros(256, np.uint8)
    begin = -memory.ctypes.data % 64 + offset
    numbers = memory[begin : begin + 40].view(np.float32)
    numbers[:] = 1
    (array,) = Arguments.split((numbers,), {}).arrays
    numbers[:] = 5
    np.testing.assert_array_equal(array, 1)
