# SPDX-License-Identifier: Apache-2.0
"""Hyperparameters: L-BFGS on the collapsed bound, and minibatches that run away."""

import re
from functools import partial
from types import SimpleNamespace

import jax
import jax.numpy as jnp
import numpy as np
import numpyro
import numpyro.distributions as dist
import optax
import pytest
import scipy.optimize
import scipy.stats
from numpyro import handlers

import numpyro_gpaug as gpaug
from numpyro_gpaug.gp.conditional import Conditional
from numpyro_gpaug.infer.vi import (
    first_order,
    quasi_newton,
    reach,
    settling,
)
from numpyro_gpaug.infer.vi.lbfgs import Memory
from numpyro_gpaug.infer.vi.result import ConjugateResult
from numpyro_gpaug.infer.vi.state import Hyper
from tests.conftest import slow

KEY = jax.random.key(0)
positive = dist.constraints.positive
NETWORK = [
    jax.random.normal(jax.random.key(seed), shape) / shape[0] ** 0.5
    for seed, shape in ((1, (3, 20)), (2, (20, 2)))
]


def data(num=60, columns=2, seed=0):
    rng = np.random.default_rng(seed)
    X = rng.normal(size=(num, columns))
    f = np.sin(2 * X[:, 0]) + 0.3 * X[:, -1]
    return X, f + 0.2 * rng.normal(size=num), (f + rng.logistic(size=num) / 3) > 0


def regression(X, y=None, *, batch_size=None, flat=False):
    lengthscales = numpyro.param("lengthscales", jnp.ones(2), constraint=positive)
    variance = numpyro.param("variance", 1.0, constraint=positive)
    if flat:
        prior = dist.ImproperUniform(positive, (), ())
        scale = numpyro.sample("scale", prior)
    else:
        scale = numpyro.param("scale", 0.5, constraint=positive)
    kernel = gpaug.kernels.SquaredExponential(lengthscales, variance)
    gp = gpaug.GaussianProcess("f", kernel, inducing=jnp.asarray(X)[:40])
    with numpyro.plate("data", X.shape[0], subsample_size=batch_size) as idx:
        obs = None if y is None else y[idx]
        numpyro.sample("y", dist.Normal(gp(X[idx]), scale), obs=obs)


def classifier(X, y=None, *, lengthscale=None, variance=None):
    if lengthscale is None:
        lengthscale = numpyro.param("lengthscale", 1.0, constraint=positive)
        variance = numpyro.param("variance", 1.0, constraint=positive)
    kernel = gpaug.kernels.Matern52(lengthscale, variance)
    gp = gpaug.GaussianProcess("f", kernel, inducing=jnp.asarray(X)[:15])
    with numpyro.plate("data", X.shape[0]):
        numpyro.sample("y", dist.Bernoulli(logits=gp(X)), obs=y)


def fitter(model, *options, **more):
    return gpaug.ConjugateSVI(model, gpaug.AutoSparseGP(model), *options, **more)


def run(svi, *args, steps=100, **kwargs):
    return svi.run(KEY, steps, *args, progress_bar=False, **kwargs)


# -- the search, on functions of five numbers, which share what is compiled ------------


def rosenbrock(z):
    return -(100 * (z[1:] - z[:-1] ** 2) ** 2 + (1 - z[:-1]) ** 2).sum()


def walled(z):
    """A quadratic of condition 1e4 beside a region where there is no number."""
    curvature = jnp.geomspace(1.0, 1e4, len(z))
    value = -0.5 * (curvature * (z - 0.4) ** 2).sum()
    return jnp.where(z.sum() > 5, jnp.nan, value)


def flat(z):
    """Rises for ever, ever less."""
    return -jnp.exp(-0.1 * z.sum())


def climb(fn, start, evaluations, rounding=0.0, unresolved=0.0):
    """The best values at every evaluation, the values of those that were accepted, and
    the last state."""
    differentiate = jax.jit(jax.value_and_grad(lambda values: fn(values["z"])))
    accept, refuse = map(jax.jit, (quasi_newton.accepted, quasi_newton.refused))
    values = {"z": jnp.asarray(start)}
    zero = jax.tree.map(jnp.zeros_like, values)
    hyper = Hyper(values, zero, jnp.ones(()), quasi_newton.start(values))
    best, bests, kept = -jnp.inf, [], []
    for _ in range(evaluations):
        here = quasi_newton.moved(hyper)
        value, ascent = differentiate(here)
        first = jnp.isinf(best)
        if first or quasi_newton.accepts(hyper, best, value, rounding, unresolved):
            hyper = accept(hyper, here, ascent, first, 0)
            kept.append(float(value))
            if first or not quasi_newton.is_lower(hyper, best, value, rounding):
                hyper = quasi_newton.improved(hyper, here, unresolved)
                best = max(best, value)
        else:
            hyper = refuse(hyper, best, value, rounding, 1.0)
        bests.append(float(best))
        if hyper.optim_state.exhausted:
            break
    return np.array(bests), np.array(kept), hyper


def test_directions_are_those_of_the_recursion_of_l_bfgs(x64) -> None:
    """The compact form agrees with optax's loop over pairs, of which only five are
    kept.
    """
    pairs, points = 5, np.random.default_rng(0).normal(size=(8, 4))
    gradients = -points @ np.diag([1.0, 3.0, 4.0, 0.5]) + 0.1 * np.sin(points)
    memory, other = Memory.empty(jnp.zeros(4), pairs), optax.scale_by_lbfgs(pairs)
    state = other.init(jnp.zeros(4))

    @jax.jit
    def added(memory, point, gradient):
        memory = memory.added(point, gradient)
        return memory, memory.direction()

    update = jax.jit(other.update)
    for point, gradient in zip(points, gradients, strict=True):
        memory, direction = added(memory, point, gradient)
        expected, state = update(-gradient, state, point)
        if memory.number > 1:  # optax 0.2.3 does not shorten the first one
            np.testing.assert_allclose(direction, -expected, rtol=1e-9)
    # Without memory: along the gradient.
    forgotten = memory.forgotten(jnp.array(True))
    _, direction = added(forgotten, points[0], gradients[0])
    length = np.linalg.norm(gradients[0])
    np.testing.assert_allclose(direction, gradients[0] / max(length, 1))


@pytest.mark.parametrize(
    ("fn", "start", "evaluations"),
    [
        slow(rosenbrock, [-1.2, 1.0], 70),
        (rosenbrock, [-1.2, 1.0, 0.3, -0.7, 2.0], 120),
        (walled, [-3.0, 2.0, -1.0, 0.0, 3.0], 60),
        # With a memory of 20 pairs of points it takes 71.
        (walled, np.linspace(-0.3, 0.3, 12), 50),
    ],
)
def test_a_search_finds_the_maximum(x64, fn, start, evaluations) -> None:
    bounds, kept, hyper = climb(fn, start, evaluations)
    assert (np.diff(kept) >= 0).all()
    assert bounds[-1] > -1e-8
    size = len(start)
    best = np.ones(size) if fn is rosenbrock else np.full(size, 0.4)
    np.testing.assert_allclose(hyper.values["z"], best, atol=1e-3)


def known_to_a_tenth(fn):
    """The function with noise. Its slopes are accurate."""

    @jax.custom_jvp
    def noisy(z):
        return fn(z) + 0.05 * jnp.sin(1e9 * z.sum())

    @noisy.defjvp
    def _(primals, tangents):
        return noisy(*primals), jax.jvp(fn, primals, tangents)[1]

    return noisy


def test_slopes_show_the_best_of_points_within_rounding(x64) -> None:
    def bowl(z):
        return -(jnp.cosh(z - 0.4) - 1).sum() - 5 * (z[0] - z[1]) ** 2

    *_, hyper = climb(known_to_a_tenth(bowl), [-1.2, 1.0, 2.0], 30, rounding=0.1)
    assert float(bowl(hyper.values["z"])) > -1e-10


def test_noise_is_told_from_curvature(x64) -> None:
    noisy = known_to_a_tenth(rosenbrock)
    start = [-1.2, 1.0, 0.3, -0.7, 2.0]
    *_, hyper = climb(noisy, start, 200)
    assert 1e-3 < hyper.optim_state.noise < 0.2
    assert float(rosenbrock(hyper.values["z"])) > -0.5
    exact, *_ = climb(rosenbrock, start, 200)
    assert exact[-1] > -1e-6
    # With a known noise level, decreases are accepted, but never far below the best.
    bests, kept, hyper = climb(noisy, start, 120, unresolved=0.1)
    below = np.maximum.accumulate(kept) - kept
    assert 0.01 < below.max() < 0.2
    assert bests[-1] == kept.max() == noisy(hyper.values["z"])
    assert float(rosenbrock(hyper.values["z"])) > -0.2
    search = hyper.optim_state._replace(noise=jnp.asarray(3.0))
    for functions, cause in (({}, "wide priors"), ({"f": None}, "a rougher kernel")):
        structure = SimpleNamespace(functions=functions)
        with pytest.warns(UserWarning, match=f"up to 3 nats .*{cause}"):
            quasi_newton.warn_of_noise(search, structure, ended=False)


def test_coordinates_with_small_gradients_move(x64) -> None:
    """Scales of the noise of many data, of many effects and of a few."""

    def scales(z):
        numbers = jnp.asarray([1e5, 3e3, 2e3, 30.0, 0.0])
        return -(numbers * (z + 0.5 * jnp.exp(-2 * z))).sum()

    start = [-0.6, 0.5, 0.1, 1.5, 0.0]
    bounds, *_, hyper = climb(scales, start, 14)
    assert bounds[-1] > float(scales(jnp.zeros(5))) - 1e-2
    np.testing.assert_allclose(hyper.values["z"], 0, atol=0.03)


def test_a_search_that_ends_on_a_slope_says_so() -> None:
    search = quasi_newton.start({"x": jnp.zeros(1)})
    search = search._replace(gradient=jnp.array([40.0]), exhausted=jnp.array(True))
    with pytest.warns(UserWarning, match="gradient promises about 10 nats"):
        quasi_newton.warn_of_noise(search, None, ended=False)
    # The curvature of an earlier step says that the end is near.
    memory = search.memory
    steps, falls = memory.steps.at[0].set(0.1), memory.falls.at[0].set(4e3)
    near = search._replace(memory=memory._replace(steps=steps, falls=falls))
    going = search._replace(exhausted=jnp.array(False))
    for each in (near, going):
        assert quasi_newton.promised_increase(each, ended=False) < 0.1
    assert quasi_newton.promised_increase(going, ended=True) == 10


def test_a_search_ends_where_known_curvature_promises_nothing(x64) -> None:
    start = [-1.2, 1.0, 0.3, -0.7, 2.0]
    # Few points do not determine the curvature, however little they promise.
    *_, early = climb(rosenbrock, start, 5)
    assert quasi_newton.patience(early, 1e6) == quasi_newton.PATIENCE
    bounds, _, hyper = climb(rosenbrock, start, 120)
    assert quasi_newton.patience(hyper, 1e-3) == 1
    assert quasi_newton.patience(hyper, 0.0) == quasi_newton.PATIENCE
    for evaluations in range(20, 45, 8):
        bounds, _, hyper = climb(rosenbrock, start, evaluations)
        over = quasi_newton.patience(hyper, 1e-3) == 1
        assert over == (bounds[-1] > -1e-5)


def test_steps_double_where_the_slope_stays(x64) -> None:
    bounds, _, hyper = climb(flat, [0.0] * 5, 16)
    assert (np.diff(bounds) > 0).all()
    assert float(hyper.values["z"].sum()) > 30


def endless(y):
    """A model whose bound rises with a scale without end."""
    scale = numpyro.param("scale", 1.0, constraint=positive)
    mean = numpyro.sample("mean", dist.Normal(0, 1))
    numpyro.factor("push", 0.5 * jnp.log(scale))
    with numpyro.plate("data", len(y)):
        numpyro.sample("y", dist.Normal(mean, 1.0), obs=y)


@pytest.mark.parametrize("optim", ["lbfgs", optax.adam(5.0)], ids=["lbfgs", "adam"])
def test_a_bound_that_rises_without_end_is_left_at_the_end_of_the_range(optim) -> None:
    svi = gpaug.ConjugateSVI(endless, gpaug.AutoLatentGaussian(endless), optim)
    with pytest.warns(UserWarning, match=r"\['scale'\] towards zero or infinity"):
        result = svi.run(KEY, 100, jnp.zeros(3), progress_bar=False, tol=0)
    assert np.isfinite(result.losses).all()
    assert 1e30 < result.params["scale"] < np.inf


def test_a_search_that_cannot_rise_says_so(x64) -> None:
    def wall(z):
        return jnp.where((z == 1).all(), z.sum(), jnp.nan)

    *_, hyper = climb(wall, [1.0] * 5, 60)
    assert bool(hyper.optim_state.exhausted)
    assert not np.any(hyper.update["z"])


def test_a_fall_is_not_excused_by_how_little_is_known_below(x64) -> None:
    values = {"z": jnp.ones(2)}
    hyper = Hyper(values, values, jnp.ones(()), quasi_newton.start(values))
    hyper = quasi_newton.improved(hyper, values, jnp.asarray(1.0))
    for fall, unresolved, taken in (
        (1.9, 1.0, True),
        (2.1, 1.0, False),
        (2.1, 1e3, False),
        (1.1, 0.2, True),
        (1.3, 0.2, False),
    ):
        assert quasi_newton.accepts(hyper, 5.0, 5 - fall, 0.0, unresolved) == taken


def test_a_first_step_within_rounding_leads_on(x64) -> None:
    """Along the gradient next to nothing is gained, across it ten nats."""

    def valley(z):
        return -1e4 * (z[0] - 1) ** 2 - 10 * (z[1] - 1) ** 2

    bounds, *_ = climb(valley, [1.001, 0.0, 0.0, 0.0, 0.0], 60, rounding=1.0)
    assert bounds[0] < -10
    assert bounds[-1] > -1


def test_the_search_begins_at_the_best_of_the_first_order_phase(x64) -> None:
    """Adam oscillates about the maximum across the valley and lowers the bound there;
    L-BFGS begins at the highest bound that it has seen."""
    values = {"z": jnp.array([1.0, 0.0, 0.0])}
    search = quasi_newton.start(values, free=first_order.MANY)
    zero = jax.tree.map(jnp.zeros_like, values)
    hyper = Hyper(values, zero, jnp.ones(()), search)

    def fn(values):
        return -0.5 * (jnp.geomspace(1.0, 1e4, 3) * (values["z"] - 0.405) ** 2).sum()

    @jax.jit
    def step(hyper, best, first, stalled):
        here, begins = quasi_newton.moved(hyper), quasi_newton.begins(hyper)
        value, ascent = jax.value_and_grad(fn)(here)
        hyper = quasi_newton.accepted(hyper, here, ascent, first, stalled)
        better = quasi_newton.improved(hyper, here, 0.0)
        kept = jax.tree.map(partial(jnp.where, value >= best), better, hyper)
        return kept, value, begins, quasi_newton.is_first_order(kept)

    seen, best, stalled, ascends = [], -np.inf, 0, quasi_newton.is_first_order(hyper)
    while ascends:
        hyper, value, begins, ascends = step(hyper, best, not seen, stalled)
        seen.append(float(value))
        stalled = 0 if seen[-1] > best else stalled + 1
        best = max(best, seen[-1])
    assert begins
    assert seen[-1] == max(seen) > seen[-2]
    assert first_order.PATIENCE < len(seen) < first_order.STEPS
    assert hyper.optim_state.memory.number == 1
    # A bound that is not finite ends the phase.
    lost = jax.jit(quasi_newton.refused)(
        hyper._replace(optim_state=search), 1.0, jnp.nan, 0.0, 1.0
    )
    assert quasi_newton.begins(lost)


# -- fits ------------------------------------------------------------------------------


def deep(X, y=None, *, inducing):
    """A kernel on what a network makes of the inputs."""
    first, second = numpyro.param("network", NETWORK)
    noise = numpyro.sample("noise", dist.HalfNormal(0.5))

    def features(x):
        return jnp.tanh(x @ first) @ second

    kernel = gpaug.kernels.SquaredExponential(1.0, 1.0)
    gp = gpaug.GaussianProcess("f", kernel, features(inducing))
    with numpyro.plate("data", X.shape[0]):
        numpyro.sample("y", dist.Normal(gp(features(X)), noise), obs=y)


def test_a_network_moves_before_the_noise_takes_all(x64) -> None:
    """L-BFGS alone has the noise near the deviation of the data, .6, by then."""
    rng = np.random.default_rng(4)
    X = rng.uniform(-1, 1, (60, 3))
    y = np.sin(5 * (X[:, 0] * X[:, 1] + X[:, 2])) + 0.1 * rng.normal(size=60)
    svi = fitter(deep)
    state = svi.init(KEY, X, y, inducing=X[:15])
    start = svi.get_params(state)
    for _ in range(6):
        state, loss = svi.update(state, X, y, inducing=X[:15])
    params = svi.get_params(state)
    change = np.log(params["noise_auto_loc"] / start["noise_auto_loc"])
    assert 0.02 < change < 0.08
    weights = params["network"][0] - start["network"][0]
    assert np.median(np.abs(weights)) > 0.02
    # The phase is a third of a run, or ends with it: at most half of one of 9 steps.
    result = run(svi, X, y, inducing=X[:15], steps=9)
    assert result.state.hyper.optim_state.ascent.left == -1
    assert result.losses[-1] < result.losses[3]
    at_rest = ConjugateResult(params, result.state, result.losses, stopped=True)
    assert "one of many local optima" in str(at_rest)


def test_regression_reaches_the_marginal_likelihoods_maximum(x64) -> None:
    X, y, _ = data(40)

    def loss(z):
        *ls, variance, scale = np.exp(z)
        difference = (X[:, None] - X[None]) / np.array(ls)
        gram = variance * np.exp(-0.5 * (difference**2).sum(-1))
        cov = gram + (scale**2 + 1e-10) * np.eye(40)
        return -scipy.stats.multivariate_normal(np.zeros(40), cov).logpdf(y)

    reference = scipy.optimize.minimize(loss, np.log([1, 1, 1, 0.5]), method="BFGS")
    # A flat prior adds nothing: a point estimate is the likelihood's maximum.
    result = run(fitter(regression), X, y, flat=True)
    assert len(result.losses) < 40
    assert abs(result.losses[-1] - reference.fun) < 1e-3
    found = [
        *result.params["lengthscales"],
        *map(result.params.get, ("variance", "scale_auto_loc")),
    ]
    np.testing.assert_allclose(np.log(found), reference.x, atol=0.05)
    # The rounding error of residual variances, times the bound's slopes in them.
    *_, variance, scale = found
    unresolved = np.finfo(float).eps * 40**0.5 * 40 * variance / (2 * scale**2)
    seen = result.state.hyper.optim_state.unresolved
    np.testing.assert_allclose(seen, unresolved, rtol=1e-6)


@pytest.fixture(scope="module")
def learnt():
    X, _, y = data(80)
    X, y = X.astype("float32"), y.astype("int32")
    svi = fitter(classifier)
    return svi, (X, y), run(svi, X, y)


@pytest.fixture(scope="module")
def fixed():
    return fitter(classifier, None)


def test_a_fit_ends_where_the_collapsed_bound_is_highest(learnt, fixed) -> None:
    _, (X, y), result = learnt
    assert len(result.losses) < 60
    assert (np.diff(result.losses) < 1e-3).all()
    here = {k: np.float32(result.params[k]) for k in ("lengthscale", "variance")}
    at = run(fixed, X, y, tol=1e-5, **here).losses[-1]
    assert abs(at - result.losses[-1]) < 5e-3
    for name, value in here.items():
        for factor in (0.8, 1.25):
            other = {**here, name: np.float32(factor * value)}
            assert run(fixed, X, y, tol=1e-5, **other).losses[-1] > at - 5e-3


def test_several_latents_settle_in_float32_as_in_float64(monkeypatch) -> None:
    """Slopes decide where bounds resolve no rise: the searches of ten classes once
    ended half a nat early. Twelve moves are enough, since the means of classes move
    together.
    """
    monkeypatch.setattr(settling, "MAX_MOVES", 12)
    rng = np.random.default_rng(0)
    X, classes = rng.normal(size=(40, 2)).astype(np.float32), 5
    noisy = X[:, 0] + 0.3 * rng.normal(size=40)
    y = np.digitize(noisy, np.linspace(-1.5, 1.5, classes - 1))

    def ordered(X, y=None):
        variance = numpyro.param("variance", 100.0, constraint=positive)
        kernel = gpaug.kernels.SquaredExponential(1.0, variance)
        gp = gpaug.GaussianProcess("f", kernel, X[:8], num_latents=classes)
        with numpyro.plate("data", len(X)):
            numpyro.sample("y", dist.Categorical(logits=gp(X)), obs=y)

    found = fitter(ordered).run(KEY, 1, X, y, progress_bar=False)
    # From a run in float64 on data rounded to float32; before the mend the loss was
    # 107.7943.
    np.testing.assert_allclose(found.losses, 107.7872, atol=2.5e-3)


def test_tol_nothinggoes_on(learnt) -> None:
    svi, data, result = learnt
    longer = run(svi, *data, steps=len(result.losses) + 30, tol=0.0)
    assert len(longer.losses) == len(result.losses) + 30
    assert result.losses[-1] - longer.losses[-1] < 0.1


def test_steps_one_by_one_and_from_a_state_are_those_of_a_run(learnt) -> None:
    svi, data, result = learnt
    state = svi.init(KEY, *data)
    for _ in range(4):
        state, loss = svi.update(state, *data)
    np.testing.assert_allclose(float(loss), result.losses[3], rtol=1e-5)
    first = run(svi, *data, steps=7, tol=0.0)
    rest = run(svi, *data, steps=5, tol=0.0, init_state=first.state)
    whole = run(svi, *data, steps=12, tol=0.0)
    np.testing.assert_array_equal(rest.losses, whole.losses[7:])


def test_other_data_are_learnt_from_anew(learnt) -> None:
    svi, (X, y), result = learnt
    there = run(svi, -X, y)
    moved = run(svi, -X, y, init_state=result.state)
    assert abs(moved.losses[-1] - there.losses[-1]) < 0.05


def test_nothing_is_learnt_if_none_is_said(learnt) -> None:
    _, data, _ = learnt
    params = run(fitter(classifier, None), *data, steps=3).params
    assert params["lengthscale"] == params["variance"] == 1.0


def test_searches_are_refused_where_bounds_are_noisy() -> None:
    X, y, _ = data()
    with pytest.raises(ValueError, match=r"optax\.adam.*optim=None"):
        run(fitter(regression), X, y, batch_size=10)
    with pytest.raises(ValueError, match="hyper_every is for optax"):
        fitter(regression, hyper_every=3)
    with pytest.raises(ValueError, match="got 'adam'"):
        fitter(regression, "adam")


# -- inputs that no inducing input is near to ------------------------------------------


def test_inputs_far_from_all_inducing_inputs_are_named(learnt, fixed) -> None:
    """Fifteen rows, the inducing inputs, are explained wherever they are."""
    svi, (X, y), result = learnt
    assert result.state.unreached["f"] < 0.1
    here = {"lengthscale": np.float32(1e-8), "variance": np.float32(1)}
    message = (
        r'"f"\): for 81% .* are {} or more \([\d.]+e\+07 lengthscales\) .*'
        "lengthscale is too short for these inputs"
    )
    with pytest.warns(UserWarning, match=message.format(r"[\d.]+e\+07")) as seen:
        run(svi, 1e8 * X, y)
    assert len(seen) == 1
    with pytest.warns(UserWarning, match=message.format(r"0\.\d+")) as seen:
        run(fixed, X, y, **here)
    assert len(seen) == 1


UNITS = r'"f"\): its function values are almost {}, both at the start and at the end'


def test_inputs_in_other_units_than_the_lengthscale_are_named(
    learnt, fixed, recwarn
) -> None:
    """With such inputs, learning finds only the common level of the labels."""
    svi, (X, y), _ = learnt
    constant = UNITS.format("equal at all rows") + r".* is 0\.0016 \(0\.0016 length"
    with pytest.warns(UserWarning, match=constant) as seen:
        result = run(svi, np.float32(1e-3) * X, y)
    assert len(seen) == 1
    # A continued run did not begin at these values.
    run(svi, np.float32(1e-3) * X, y, steps=1, init_state=result.state)
    # A user who fixes the lengthscale has chosen it.
    run(fixed, X, y, lengthscale=jnp.float32(1e3), variance=jnp.float32(1))
    # If all labels are one, only a constant can be found.
    found = run(svi, X, np.ones_like(y))
    assert not recwarn.list
    assert found.state.unreached["f"] > reach.MOST_UNREACHED


def conditional(kernel, X, Z):
    with handlers.seed(rng_seed=0):
        gp = gpaug.GaussianProcess("f", kernel, jnp.asarray(Z))
    return Conditional(gp, jnp.asarray(X), None)


def diagnosed(kernel, X, Z):
    return reach._diagnosis(conditional(kernel, X, Z))


@pytest.mark.parametrize(
    ("lengthscale", "more", "rows", "found"),
    [
        (1e-4, 0.0, 1, reach.APART),
        (1e-4, 0.0, 4, None),  # few groups
        (1.5, 0.0, 1, None),
        (1.5, 1e3, 1, None),  # with a constant kernel added
        (1e3, 0.0, 1, reach.ALIKE),
    ],
)
def test_functions_that_are_one_number_or_white_noise(lengthscale, more, rows, found):
    X = np.random.default_rng(0).normal(size=(40, 2)).astype("float32")
    kernel = gpaug.kernels.SquaredExponential(lengthscale)
    f = conditional(kernel + more if more else kernel, np.repeat(X, rows, 0), X)
    assert reach._extreme(f, reach.FIRST_DIFFERENCES) == found


def test_what_is_diagnosed_and_what_is_not() -> None:
    rng = np.random.default_rng(0)
    X = rng.normal(size=(40, 8)).astype("float32")
    few, smooth = X[:5], gpaug.kernels.SquaredExponential
    noisy = gpaug.kernels.from_function(
        lambda X, Z: smooth(3.0)(X, Z), lambda X: smooth(3.0)(X) + 10
    )
    # Few inducing inputs among many columns, white noise in the kernel, no variance.
    for kernel, rows in ((smooth(1.5), X), (noisy, X), (gpaug.kernels.Linear(), 0 * X)):
        assert diagnosed(kernel, rows, few) is None
    elsewhere = diagnosed(smooth(0.1) + smooth(2.0), X, 1e3 * few)
    assert re.search(r"different units or regions: .* [\d.]+ and \de\+03", elsewhere)
    shifted = diagnosed(smooth(np.full((2, 1), 3.0)), X, few + 100)
    assert re.search(r"\([\d.e+]+ lengthscales\).* different units or regions", shifted)


# -- minibatches -----------------------------------------------------------------------


def test_a_bound_that_falls_on_minibatches_is_seen_and_undone() -> None:
    X, y, _ = data(200)
    downhill = optax.sgd(-1e-4)  # it diverges: descent on the bound
    svi = fitter(regression, downhill)
    with pytest.warns(UserWarning, match="made the bound fall: at step"):
        result = run(svi, X, y, batch_size=20, steps=800)
    step, best = result.restored[0]
    assert 0 < best < step <= 800
    assert result.state.hyper.scale < 1
    assert result.state.step == 800
    # The same without a guard: as many steps, in runs too short for one.
    state, losses, pending = None, [], []
    for _ in range(8):
        part = run(svi, X, y, batch_size=20, steps=100, init_state=state)
        assert part.restored == ()
        state = part.state
        losses.append(svi.evaluate(state, X, y))
        largest = max(abs(u).max() for u in jax.tree.leaves(state.hyper.update))
        # Divided by the posterior's step size in the last step.
        pending.append(largest / (20 + float(state.step) - 1) ** -0.6)
    # Updates are cut to half the step size, and these would be larger.
    assert max(pending) == pytest.approx(0.5, rel=1e-5)
    kept = svi.evaluate(result.state, X, y)
    assert kept < min(losses) + 0.5 * (losses[-1] - min(losses))
    assert losses[-1] > 1.5 * min(losses)
