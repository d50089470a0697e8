# SPDX-License-Identifier: Apache-2.0
"""Whole groups of observations, left out in closed form, against fits without them."""

from functools import cache
from types import SimpleNamespace

import jax
import jax.numpy as jnp
import numpy as np
import numpyro
import numpyro.distributions as dist
import pytest

import numpyro_gpaug as gpaug
from numpyro_gpaug.errors import NotConjugateError
from numpyro_gpaug.infer.nested.collapse import of_points
from numpyro_gpaug.predict.mixture import MIXED, WithoutData
from tests.conftest import slow
from tests.problems import unfitted

GROUP = np.repeat(np.arange(6), [3, 1, 4, 2, 5, 3])
RNG = np.random.default_rng(3)
TIME = RNG.normal(size=GROUP.size)
EFFECT = RNG.normal(0, 0.8, 6)
VALUES = 1 + 0.5 * TIME + EFFECT[GROUP] + RNG.normal(0, 0.5, GROUP.size)
COUNTS = RNG.poisson(np.exp(1 + 0.3 * TIME + EFFECT[GROUP]))


def linear(time, group, keep, y=None, *, likelihood):
    level = numpyro.sample("level", dist.Normal(0, 3))
    slope = numpyro.sample("slope", dist.Normal(0, 1))
    with numpyro.plate("groups", 6):
        effect = numpyro.sample("effect", dist.Normal(0, 0.8))
    eta = level + slope * time + effect[group]
    with numpyro.plate("data", len(time)), numpyro.handlers.mask(mask=keep):
        numpyro.sample("y", likelihood(eta), obs=y)


@cache
def fitter(x64):
    """All fits in a dtype share programs."""
    return gpaug.ConjugateSVI(linear, gpaug.AutoLatentGaussian(linear))


def fitted(y, keep, likelihood):
    svi = fitter(jax.config.jax_enable_x64)
    data = TIME, GROUP, jnp.asarray(keep), y
    result = svi.run(
        jax.random.key(0), 60, *data, likelihood=likelihood, progress_bar=False
    )
    return svi.posterior(result), data


def refits(y, groups, likelihood):
    """Log densities of observations under fits without their groups."""
    found, everything = np.empty(len(y)), np.ones(len(y), bool)
    for name in np.unique(groups):
        inside = groups == name
        posterior, data = fitted(y, ~inside, likelihood)
        density = posterior.log_prob(*data[:2], everything, y, likelihood=likelihood)
        found[inside] = np.asarray(density)[inside]
    return found


def normal(eta):
    return dist.Normal(eta, 0.5)


def poisson(eta):
    return dist.Poisson(jnp.exp(eta))


EVERYTHING = np.ones(GROUP.size, bool)


@pytest.mark.parametrize(
    "groups", [GROUP, np.arange(GROUP.size) // 5], ids=["own", "blocks"]
)
def test_groups_of_normal_data_are_left_out_exactly(x64, groups) -> None:
    posterior, data = fitted(VALUES, EVERYTHING, normal)
    labels = np.array([f"group {g}" for g in groups])
    found = posterior.leave_out(labels, *data).log_prob(VALUES)
    np.testing.assert_allclose(found, refits(VALUES, groups, normal), atol=1e-8)


def test_each_datum_in_a_group_of_its_own_is_leave_one_out() -> None:
    posterior, data = fitted(COUNTS, EVERYTHING, poisson)
    one = posterior.leave_one_out(*data).log_prob(COUNTS)
    alone = posterior.leave_out(np.arange(len(COUNTS)), *data).log_prob(COUNTS)
    np.testing.assert_allclose(alone, one, atol=1e-4)


def test_groups_of_counts_are_left_out_nearly() -> None:
    posterior, data = fitted(COUNTS, EVERYTHING, poisson)
    found = np.asarray(posterior.leave_out(GROUP, *data).log_prob(COUNTS))
    expected = refits(COUNTS, GROUP, poisson)
    inside = np.asarray(posterior.log_prob(*data))
    assert abs(found.sum() - expected.sum()) < 0.1 * abs(inside.sum() - expected.sum())


def test_what_cannot_be_left_out() -> None:
    posterior, data = fitted(COUNTS, EVERYTHING, poisson)
    with pytest.raises(ValueError, match="groups has 5 labels, and 'y' has 18 obs"):
        posterior.leave_out(np.arange(5), *data)
    with pytest.raises(ValueError, match="observations as one matrix, of at most"):
        posterior.leave_out(np.zeros(5001), *data)
    with pytest.raises(ValueError, match=r"leave_out needs the observations of site"):
        posterior.leave_out(GROUP, *data[:3])
    exact, data = fitted(VALUES, EVERYTHING, normal)
    with pytest.raises(ValueError, match="less information than these observations"):
        exact.leave_out(GROUP, *data, likelihood=lambda eta: dist.Normal(eta, 0.05))

    def process(X, y=None):
        f = gpaug.GaussianProcess(
            "f", gpaug.kernels.Matern32(), inducing=TIME[::3, None]
        )
        with numpyro.plate("data", len(X)):
            numpyro.sample("y", dist.Normal(f(X), 0.5), obs=y)

    svi = gpaug.ConjugateSVI(process, gpaug.AutoSparseGP(process))
    X = TIME[:, None]
    posterior = unfitted(svi, X, VALUES)
    with pytest.raises(NotConjugateError, match="a fit of AutoLatentGaussian"):
        posterior.leave_out(GROUP, X, VALUES)


def integrated(time, group, keep, y=None, *, likelihood):
    tau = numpyro.sample("tau", dist.HalfNormal(1))
    level = numpyro.sample("level", dist.Normal(0, 3))
    with numpyro.plate("groups", 6):
        effect = numpyro.sample("effect", dist.Normal(0, tau))
    eta = level + 0.5 * time + effect[group]
    with numpyro.plate("data", len(time)), numpyro.handlers.mask(mask=keep):
        numpyro.sample("y", likelihood(eta), obs=y)


@pytest.mark.parametrize(
    ("likelihood", "y"),
    [
        slow(normal, VALUES, id="normal"),
        pytest.param(poisson, COUNTS, id="counts"),
    ],
)
def test_hyperparameters_follow_their_posterior_without_the_group(likelihood, y):
    nested = gpaug.NestedVI(integrated, num_points=64, progress_bar=False)
    key, rest = jax.random.key(0), {"likelihood": likelihood}

    def posterior(keep):
        nested.run(key, TIME, GROUP, keep, y, **rest)
        return nested.posterior()

    whole, left = posterior(EVERYTHING), GROUP == 4
    found = whole.leave_out(GROUP, TIME, GROUP, EVERYTHING, y).log_prob(y)
    without = posterior(~left).log_prob(TIME, GROUP, EVERYTHING, y)
    # The tolerance covers the Monte Carlo error, and the Gaussian approximation for
    # counts.
    found, without = map(np.asarray, (found, without))
    np.testing.assert_allclose(found[left], without[left], atol=0.1)


@pytest.mark.parametrize("log_weight", [-20.0, -2.0])
def test_members_without_an_answer_are_dropped_if_they_weigh_little(log_weight) -> None:
    loc = jnp.array([[0.0, 1.0], [2.0, 3.0], [jnp.nan, 0.0], [9.0, 9.0]])
    # The last member allows to leave the first datum out only just.
    worth = jnp.array([[-1.0, -1.0], [-1.0, -3.0], [jnp.nan, -1.0], [-90.0, -1.0]])

    @jax.jit
    def mixed(weights):
        each = jax.vmap(lambda x: dist.Normal(x, jnp.ones(2), validate_args=False))(loc)
        weights = jax.nn.log_softmax(weights)
        return MIXED["left_out"](WithoutData(each, worth), weights)

    found = mixed(jnp.array([0.0, 0.0, log_weight, -20.0]))
    if log_weight == -2:
        # The caller looks for them.
        assert np.isnan(found.distribution.weights).any(0).tolist() == [True, False]
        return
    mean = found.distribution.mean
    share = 1 / (1 + np.exp(-2))
    np.testing.assert_allclose(mean, [1, 3 * share + 1 - share], atol=1e-6)
    assert found.worth[0] < 1.1


def test_weights_leave_out_copies_and_events_are_left_out_by_entry() -> None:
    def model(x, y, weight=1.0):
        scale = numpyro.sample("scale", dist.HalfNormal(1))
        level = numpyro.sample("level", dist.Normal(0, 1))
        likelihood = dist.Normal(level + x, scale).to_event(x.ndim - 1)
        with numpyro.plate("data", len(x)), numpyro.handlers.scale(scale=weight):
            numpyro.sample("y", likelihood, obs=y)

    def left_out(*args, groups=None):
        nested = gpaug.NestedVI(model, num_points=64, progress_bar=False)
        nested.run(jax.random.key(0), *args)
        posterior = nested.posterior()
        if groups is None:
            return posterior.leave_one_out(*args).log_prob(args[1])
        return posterior.leave_out(groups, *args).log_prob(args[1])

    x, weight = TIME[:6].reshape(3, 2), np.array([1, 2, 9])
    y = x + np.array([[0.3, -0.5], [0.1, 0.4], [0.9, 1.6]], np.float32)
    found = left_out(x, y, weight.astype(np.float32)).ravel()
    copies = np.repeat(np.arange(6), np.repeat(weight, 2))
    expected = left_out(x.ravel()[copies], y.ravel()[copies], groups=copies)
    np.testing.assert_allclose(found[copies], expected, atol=2e-3)


def test_models_are_compared_by_groups_left_out() -> None:
    better = np.linspace(-2, -1, 20)
    densities = {"poor": better - 0.5, "better": better}
    table = gpaug.diagnostics.compare(densities)
    assert list(table.index) == ["better", "poor"]
    assert abs(table.loc["poor", "elpd_diff"]) == pytest.approx(10)
    with pytest.raises(ValueError, match=r"log densities have shapes .*\(5,\)"):
        gpaug.diagnostics.compare({"a": better, "b": better[:5]})
    with pytest.raises(ValueError, match="log densities of 'b' are not finite"):
        gpaug.diagnostics.compare({"a": better, "b": better * np.inf})


def test_many_data_are_left_out_with_fewer_points() -> None:
    asked: list[int] = []
    for rows in (100, 10**4, 10**6):
        found = of_points(lambda n: SimpleNamespace(num=n, finer=None), None, 9, rows)
        asked.append(found.finer().num if found.finer else found.num)
    assert asked[0] == 512
    assert asked[2] == 64 < asked[1] < 512
