# SPDX-License-Identifier: Apache-2.0
"""Predictions at many numbers of rows: from few programs, the same as of all rows."""

from functools import partial

import jax
import jax.numpy as jnp
import numpy as np
import numpyro
import numpyro.distributions as dist
import pytest

import numpyro_gpaug as gpaug
from numpyro_gpaug.predict import calls
from numpyro_gpaug.predict.added_rows import PartsDifferError, without_added
from numpyro_gpaug.predict.mixture import WithoutData
from tests.conftest import compilations
from tests.problems import moved, unfitted

KEY = jax.random.key(0)
RNG = np.random.default_rng(0)
X = RNG.normal(size=(41, 2)).astype("float32")
GROUP = RNG.integers(0, 3, 41)
Y = (X[:, 0] > 0).astype("int32")
Z = X[:7]


def mixed(X, group, y=None):
    b = numpyro.sample("b", dist.Normal(0, 1).expand([2]).to_event(1))
    with numpyro.plate("groups", 3):
        effect = numpyro.sample("effect", dist.Normal(0, 0.5))
    eta = numpyro.deterministic("eta", X @ b + effect[group])
    with numpyro.plate("data", len(X)):
        numpyro.sample("y", dist.Bernoulli(logits=eta), obs=y)


def process(X, group, y=None, *, inducing=Z):
    """A table with a row of data in each column."""
    level = numpyro.sample("level", dist.Normal(0, 1).expand([2]).to_event(1))
    kernel = gpaug.kernels.SquaredExponential(1.0)
    f = gpaug.GaussianProcess("f", kernel, inducing)(X)
    eta = numpyro.deterministic("eta", level[:, None] + jnp.array([[1.0], [2.0]]) * f)
    with numpyro.plate("items", 2, dim=-2), numpyro.plate("data", len(X), dim=-1):
        y = None if y is None else jnp.stack([y, 2 * y]) + 0.5
        numpyro.sample("y", dist.Normal(eta, 0.3), obs=y)


def matrices(X, group, y=None):
    b = numpyro.sample("b", dist.Normal(0, 1).expand([2]).to_event(1))
    mean = (X * b)[:, None] * jnp.array([[1.0], [2.0], [-1.0]])
    factor = np.array([[1, 0, 0], [0.5, 1, 0], [0, 0.2, 1]], "float32")
    with numpyro.plate("data", len(X)):
        y = None if y is None else jnp.broadcast_to(y[:, None, None], mean.shape)
        likelihood = dist.MatrixNormal(mean, factor, 0.5 * np.eye(2, dtype="float32"))
        numpyro.sample("y", likelihood, obs=y)


def joint_fit(model):
    """A posterior, which need not be the best, and shares no program with another."""
    model = partial(model)
    svi = gpaug.ConjugateSVI(model, gpaug.AutoLatentGaussian(model))
    return moved(svi, 1, X[:20], GROUP[:20], Y[:20])


def close(found, expected):
    np.testing.assert_allclose(found, expected, rtol=2e-4, atol=2e-4)


def test_many_numbers_of_rows_from_two_programs_of_each_kind() -> None:
    posterior, other = joint_fit(mixed), joint_fit(mixed)
    new = X[:40], GROUP[:40]
    probs, f, densities, whole, draws = jax.device_get((
        other.predict_y(*new).probs, other.predict_f(*new),
        other.log_prob(*new, Y[:40]), other.predict_f(*new, full_covariance=True),
        other.sample(KEY, *new, sample_shape=(3,)),
    ))  # fmt: skip
    before = compilations("_answer"), compilations("checks")
    for num in (5, 6, 8, 9, 12, 16, 17, 23, 32, 33, 39, 40):
        rows = X[:num], GROUP[:num]
        predicted = posterior.predict_y(*rows)
        assert predicted.batch_shape == (num,)
        close(predicted.probs, probs[:num])
        if num not in (5, 6, 17, 40):
            continue
        close(posterior.predict_f(*rows).variance, f.variance[:num])
        close(posterior.log_prob(*rows, Y[:num]), densities[:num])
        joint = posterior.predict_f(*rows, full_covariance=True)
        close(joint.mean, whole.mean[:num])
        close(joint.variance, whole.variance[:num, :num])
        found = posterior.sample(KEY, *rows, sample_shape=(3,))
        close(found, draws[:, :num])
    assert compilations("_answer") - before[0] == 10
    # Checks of observed and of new data.
    assert compilations("checks") - before[1] <= 6


def test_mixtures_over_predictors() -> None:
    def counts(X, y=None):
        b = numpyro.sample("b", dist.Normal(0, 1).expand([2]).to_event(1))
        with numpyro.plate("data", len(X)):
            numpyro.sample("y", dist.Poisson(jnp.exp(X @ b)), obs=y)

    svi = gpaug.ConjugateSVI(counts, gpaug.AutoLatentGaussian(counts))
    posterior = moved(svi, 1, X[:20], Y[:20])
    means, before = posterior.predict_y(X).mean, compilations("_answer")
    rows = np.tile(X, (2, 1))
    for num in (5, 6, 64):
        predicted = posterior.predict_y(rows[:num])
        assert predicted.batch_shape == (num,)
        close(predicted.mean, np.tile(means, 2)[:num])
    assert compilations("_answer") - before == 1


def test_draws_of_tables_of_a_process() -> None:
    """Rows are in the last axis, so draws of outputs interleave."""
    posterior, before = joint_fit(process), compilations("_answer")
    alone, few, padded = (
        posterior.sample(KEY, X[:n], GROUP[:n], site="eta", sample_shape=(4,))
        for n in (9, 5, 9)
    )
    assert compilations("_answer") - before == 2
    assert few.shape == (4, 2, 5)
    np.testing.assert_allclose(padded, alone, atol=0.02)


def test_distributions_over_matrices() -> None:
    posterior, other = joint_fit(matrices), joint_fit(matrices)
    moments = jax.jit(lambda d: (d.mean, d.covariance_matrix))
    whole = jax.device_get(moments(other.predict_y(X[:9], GROUP[:9])))
    before = compilations("_answer")
    for num in (5, 9):
        found = posterior.predict_y(X[:num], GROUP[:num])
        assert found.shape() == (num, 3, 2)
        for one, expected in zip(moments(found), whole, strict=True):
            close(one, expected[:num])
    assert compilations("_answer") - before == 2


def test_independent_processes() -> None:
    """Their other predictions are in blocks, padded to one size."""

    def model(X, y=None, *, inducing=Z):
        kernel = gpaug.kernels.SquaredExponential(1.0)
        f = gpaug.GaussianProcess("f", kernel, inducing, num_latents=3)(X)
        with numpyro.plate("data", len(X)):
            numpyro.sample("y", dist.Categorical(logits=f), obs=y)

    svi = gpaug.ConjugateSVI(model, gpaug.AutoSparseGP(model))
    posterior, before = unfitted(svi, X[:20], Y[:20]), compilations("_answer")
    joint, draws = [], []
    for num in (9, 5, 9):
        found = posterior.predict_f(X[:num], full_covariance=True)
        joint.append(jax.device_get(found))
        draws.append(posterior.sample(KEY, X[:num], sample_shape=(2,)))
        close(joint[-1].mean, joint[0].mean[:num])
        close(joint[-1].variance, joint[0].variance[:, :num, :num])
    assert compilations("_answer") - before == 4
    assert draws[1].shape == (2, 5, 3)
    np.testing.assert_allclose(draws[2], draws[0], atol=0.02)


def centred(X, group, y=None):
    b = numpyro.sample("b", dist.Normal(0, 1).expand([2]).to_event(1))
    with numpyro.plate("data", len(X)):
        numpyro.sample("y", dist.Normal((X - X.mean(0)) @ b, 1.0), obs=y)


def effect_by_row(X, group, y=None):
    b = numpyro.sample("b", dist.Normal(0, 1).expand([2]).to_event(1))
    with numpyro.plate("data", len(X)):
        noise = numpyro.sample("noise", dist.Normal(0, 1))
        numpyro.sample("y", dist.Normal(X @ b + noise, 0.5), obs=y)


@pytest.mark.filterwarnings("ignore:the model computes a sum")
@pytest.mark.parametrize("model", [centred, effect_by_row])
def test_no_rows_are_added_where_they_could_change_a_prediction(model) -> None:
    posterior = joint_fit(model)
    before = compilations("_answer")
    b = posterior["b"].mean
    for num in (5, 6, 9):
        x = X[:num] - X[:num].mean(0) if model is centred else X[:num]
        close(posterior.predict_y(X[:num], GROUP[:num]).mean, x @ b)
    assert compilations("_answer") - before == 3


def test_data_left_out_of_a_mixture_are_cut_too() -> None:
    many, few = (
        WithoutData(dist.Normal(jnp.zeros(n), 1.0), jnp.zeros(n)) for n in (8, 5)
    )
    cut = without_added(many, few, 6)
    assert isinstance(cut, WithoutData)
    assert cut.distribution.batch_shape == cut.worth.shape == (6,)


def test_an_error_has_the_numbers_of_the_arguments() -> None:
    posterior = joint_fit(mixed)
    for num in (5, 6):
        posterior.predict_y(X[:num], GROUP[:num])
    with pytest.raises(ValueError, match="3"):
        posterior.predict_y(X[:7], GROUP[:7] + 3)
    with pytest.raises(TypeError, match="shapes for broadcasting: .6,., .5,."):
        posterior.predict_y(X[:6], GROUP[:5])
    before = compilations("_answer")
    posterior.predict_y(X[:8], GROUP[:8])
    assert compilations("_answer") == before


def test_a_fault_of_added_rows_is_raised(monkeypatch) -> None:
    """Once it was passed over, and every number of rows compiled."""
    posterior = joint_fit(mixed)
    posterior.predict_y(X[:5], GROUP[:5])
    differ = iter([PartsDifferError("of a class"), ValueError("a fault")])

    def fails(*args):
        raise next(differ)

    monkeypatch.setattr(calls, "without_added", fails)
    assert posterior.predict_y(X[:6], GROUP[:6]).batch_shape == (6,)
    with pytest.raises(ValueError, match="a fault"):
        posterior.predict_y(X[:7], GROUP[:7])


def added(by_rows):
    """A process with a function of the rows added to it."""

    def model(X, y=None, *, inducing=Z):
        kernel = gpaug.kernels.SquaredExponential(1.0)
        f = gpaug.GaussianProcess("f", kernel, inducing)(X)
        with numpyro.plate("data", len(by_rows(X[:, 0]))):
            numpyro.sample("y", dist.Normal(f + by_rows(X[:, 0]), 1.0), obs=y)

    return gpaug.ConjugateSVI(model, gpaug.AutoSparseGP(model), None)


def test_independent_rows_with_observations_need_no_check(monkeypatch) -> None:
    x, y = X[:20], X[:20, 0]
    posterior = unfitted(added(lambda x: 2 * x), x, y)
    monkeypatch.setattr(calls, "MAX_DENSE", 19)
    monkeypatch.setattr(calls, "_check_mixed", None)
    assert posterior.log_prob(x, y, batch_size=8).shape == (20,)


@pytest.mark.parametrize(
    "by_rows",
    [lambda x: x[::-1], lambda x: x[:20]],
    ids=["order", "fixed"],
)
@pytest.mark.filterwarnings("ignore:the model computes a sum")
def test_rows_that_depend_on_one_another_are_not_predicted_in_blocks(
    by_rows, monkeypatch
) -> None:
    x, y = X[:20], X[:20, 0]
    posterior, expected = unfitted(added(by_rows), x, y), by_rows(y)
    close(posterior.predict_y(x, batch_size=8).mean, expected)
    monkeypatch.setattr(calls, "MAX_DENSE", 19)
    if np.array_equal(by_rows(y), y):
        close(posterior.predict_y(x, batch_size=8).mean, expected)
    else:
        with pytest.raises(ValueError, match="blocks of 8 rows are wrong"):
            posterior.predict_y(x, batch_size=8)
