# SPDX-License-Identifier: Apache-2.0
"""Warnings of what is on no scale: arguments, responses, rows of a prediction; and
parameters that lack a link. That nothing else warns, all other tests show: there a
warning is an error."""

import warnings
from functools import partial

import jax
import jax.numpy as jnp
import numpy as np
import numpyro
import numpyro.distributions as dist
import pytest

import numpyro_gpaug as gpaug
from numpyro_gpaug.predict.arguments import _ranges
from tests.archives import at_start

KEY = jax.random.key(0)
rng = np.random.default_rng(0)
X = rng.normal(size=(40, 2)).astype(np.float32)
LABELS = (X[:, 0] > 0).astype(int)
REAL = (X[:, 0] + 0.3 * rng.normal(size=40)).astype(np.float32)
POSITIVE = np.exp(REAL)


def weights(inputs, y=None, *, f=jnp.asarray):
    rows = f(inputs)
    b = numpyro.sample("b", dist.Normal(0, 1).expand([rows.shape[1]]).to_event(1))
    with numpyro.plate("data", len(rows)):
        numpyro.sample("y", dist.Bernoulli(logits=rows @ b), obs=y)


def fitted(model, *args) -> gpaug.Posterior:
    return at_start(gpaug.AutoLatentGaussian(model), *args)


# -- parameters without a link ---------------------------------------------------------


def process(inputs, y=None, *, likelihood, mean=0.0, variance=1.0):
    kernel = gpaug.kernels.SquaredExponential(1.0, variance)
    gp = gpaug.GaussianProcess("f", kernel, X[:5], mean=mean)
    with numpyro.plate("data", len(inputs)):
        numpyro.sample("y", likelihood(gp(inputs)), obs=y)


@pytest.mark.parametrize("guide", [gpaug.AutoSparseGP, gpaug.AutoLatentGaussian])
@pytest.mark.parametrize(
    ("likelihood", "y", "message"),
    [
        (lambda f: dist.Bernoulli(probs=f), LABELS, "'probs'.*logits=f"),
        (lambda f: dist.Binomial(5, probs=f), LABELS, "'probs'.*logits=f"),
        (dist.Poisson, LABELS, r"'rate' of Poisson.*rate=jnp.exp\(f\)"),
        (lambda f: dist.Normal(0, f), REAL, "'scale'.*'f', which is Gaussian"),
        (lambda f: dist.Gamma(2.0, f), POSITIVE, "'rate' of Gamma.*Write a link"),
    ],
)
def test_a_parameter_without_a_link(guide, likelihood, y, message) -> None:
    model = partial(process, likelihood=likelihood)
    svi = gpaug.ConjugateSVI(model, guide(model))
    with pytest.raises(gpaug.NotConjugateError, match=message) as raised:
        svi.init(KEY, X, y)
    assert "AutoLatentGaussian" not in str(raised.value)


@pytest.mark.parametrize(
    ("likelihood", "how"),
    [
        (lambda f: dist.Bernoulli(probs=jax.nn.sigmoid(f)), {}),
        (lambda f: dist.Poisson(jnp.exp(f)), {}),
        # This one hardly leaves the domain.
        (dist.Poisson, {"mean": 5.0, "variance": 0.04}),
    ],
)
def test_a_parameter_that_stays_in_its_domain(likelihood, how) -> None:
    gpaug.AutoLatentGaussian(partial(process, likelihood=likelihood, **how)).setup(
        X, LABELS
    )


# -- arguments -------------------------------------------------------------------------


def ages(t):
    """Years, as a column of inputs of size one."""
    return (t[:, None] - 1.7e9) / 100


@pytest.mark.parametrize(
    ("t", "message"),
    [
        (
            1.7e9 + np.arange(40.0),
            "^inputs has numbers about 1.7e.09.*distinguishes only 1",
        ),
        (np.float32(1.7e9 + 128 * (np.arange(40) % 2)), "Subtract a constant"),
    ],
)
def test_numbers_that_become_the_same(t, message) -> None:
    with pytest.warns(UserWarning, match=message):
        fitted(partial(weights, f=ages), t, LABELS)


def test_one_column_of_several_is_named() -> None:
    inputs = np.column_stack([REAL, 2450000 + np.arange(40) / 1440]).astype(float)
    with pytest.warns(UserWarning, match="^column 1 of inputs has numbers about 2.45e"):
        fitted(weights, inputs, LABELS)


@pytest.mark.parametrize(
    "column",
    [
        np.arange(1990.0, 2030.0), 293.15 + 0.5 * REAL, np.ones(40) + 1e-16,
        1 + 1e-15 * REAL, np.float32(1 + 1e-7 * REAL), 1e6 + 1e3 * REAL,
    ],
)  # fmt: skip
def test_numbers_that_stay_apart(column) -> None:
    gpaug.model.validation.check_arguments(weights, (column,), {})


# -- responses -------------------------------------------------------------------------


def line(inputs, y=None):
    b = numpyro.sample("b", dist.Normal(0, 1).expand([2]).to_event(1))
    noise = numpyro.sample("noise", dist.HalfNormal(1))
    with numpyro.plate("data", len(inputs)):
        numpyro.sample("y", dist.Normal(inputs @ b, noise), obs=y)


def test_responses_that_priors_do_not_reach() -> None:
    svi = gpaug.ConjugateSVI(line, gpaug.AutoLatentGaussian(line))
    run = partial(svi.run, KEY, 60, X, progress_bar=False)
    with pytest.warns(UserWarning, match="'y', with mean .*: units.*Standardise it"):
        run(1e6 * REAL)
    run(REAL)


# -- predictions -----------------------------------------------------------------------


def test_rows_far_from_those_of_the_fit() -> None:
    posterior = fitted(weights, X, LABELS)
    with pytest.warns(UserWarning, match="column 1 of inputs is about .* units of the"):
        posterior.predict_y(X * [1, 12] + [0, 50])
    for inputs in (X, X[:1], 2 * X, X[np.abs(X).max(1).argmax()][None]):
        posterior.predict_y(inputs)
    (years,) = _ranges(2021 + 1e-3 * X[:, 0])
    assert abs(years.mean - 2021 - 1e-3 * X[:, 0].mean()) < years.spread


@pytest.mark.parametrize(
    "f",
    [
        lambda X: X - X.mean(0), lambda X: X / X.std(0), lambda X: X / abs(X).max(),
        lambda X: X - jnp.median(X, 0), lambda X: X / jnp.linalg.norm(X, axis=0),
    ],
)  # fmt: skip
def test_statistics_of_all_rows(f) -> None:
    model = partial(weights, f=f)
    guide = gpaug.AutoSparseGP(model)
    with pytest.warns(UserWarning, match="all rows of 'inputs'.*pass it by keyword"):
        at_start(guide, X, LABELS)


def test_statistics_of_each_row() -> None:
    def f(X):
        return X / jnp.linalg.norm(X, axis=1, keepdims=True) - X.mean(1)[:, None]

    with warnings.catch_warnings():
        warnings.simplefilter("error")
        at_start(gpaug.AutoSparseGP(partial(weights, f=f)), X, LABELS)


def test_a_density_that_rounding_makes_infinite() -> None:
    """A probability is 1 at nodes that the best Gaussian reaches, and its complement
    0: the fit could only end before."""
    rng = np.random.default_rng(7)
    x = rng.normal(size=40)
    y = (rng.random(40) < 1 / (1 + np.exp(-3 - 5 * x))).astype(float)

    def model(x, y):
        w = numpyro.sample("w", dist.Normal(0, 10).expand([2]).to_event(1))
        p = jax.nn.sigmoid(w[0] + w[1] * x)
        numpyro.factor("y", y * jnp.log(p) + (1 - y) * jnp.log(1 - p))

    svi = gpaug.ConjugateSVI(model, gpaug.AutoLatentGaussian(model), None)
    with pytest.warns(UserWarning, match=r"stopped early: a log-density of \['y'\]"):
        svi.run(jax.random.key(0), 40, x, y, progress_bar=False)
