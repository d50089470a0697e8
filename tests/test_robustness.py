# SPDX-License-Identifier: Apache-2.0
"""Hard problems, random problems in float32, and bad input."""

import jax
import jax.numpy as jnp
import numpy as np
import numpyro
import numpyro.distributions as dist
import optax
import pytest
from numpyro import handlers

import numpyro_gpaug as gpaug
from numpyro_gpaug.model.validation import cholesky_message
from tests.problems import classifier, learnt, toy

KEY = jax.random.key(0)


def assert_monotone(losses, dtype) -> None:
    losses = np.asarray(losses, np.float64)
    assert np.isfinite(losses).all()
    slack = 64 * np.finfo(dtype).eps * (np.abs(losses).max() + 100)
    assert np.diff(losses).max() <= slack


@pytest.mark.parametrize("problem", ["separable", "one class", "noise"])
def test_hard_problems_float32(problem) -> None:
    rng = np.random.default_rng(0)
    X = rng.normal(size=(40, 2)).astype(np.float32)
    y = {
        "separable": (X[:, 0] > 0).astype(int),
        "one class": np.ones(40, int),
        "noise": rng.integers(0, 2, 40),
    }[problem]
    how = {"inducing": np.unique(X, axis=0), "variance": np.float32(1e4)}
    assert_monotone(LEARNS.run(KEY, 40, X, y, progress_bar=False, **how).losses, "f")


LEARNS = gpaug.ConjugateSVI(learnt, gpaug.AutoSparseGP(learnt), optax.adam(0.1))


# -- bad input --------------------------------------------------------------------


def start(model=classifier, X=None, y=None, guide=None, **kwargs):
    X0, y0 = toy(20)
    X, y = X0 if X is None else X, y0 if y is None else y
    kwargs.setdefault("inducing", X0[:5])
    svi = gpaug.ConjugateSVI(model, guide or gpaug.AutoSparseGP(model))
    return svi.run(KEY, 2, X, y, progress_bar=False, **kwargs)


def spoilt(value, row=3):
    X = np.array(toy(20)[0])
    X[row, 1] = value
    return X


@pytest.mark.parametrize(
    ("arguments", "error", "message"),
    [
        ({"X": spoilt(np.nan)}, ValueError, r"X has shape \(20, 2\) and 1 NaN"),
        ({"X": spoilt(np.inf)}, ValueError, r"X .* infinite"),
        ({"X": jnp.asarray(spoilt(np.nan))}, ValueError, r"X .* NaN"),
        ({"X": spoilt(1e36)}, ValueError, r"X .* 1 entries of .* squares are not fin"),
        ({"y": np.full(20, np.nan)}, ValueError, r"'y'.* \(20,\) contain 20 NaN"),
        ({"y": np.array([-1, 1] * 10)}, ValueError, r"\(y \+ 1\) // 2"),
        (
            {"y": np.array([0, 2] * 10)},
            ValueError,
            r"contain \[2\], outside the support",
        ),
        ({"y": np.array(["a", "b"] * 10)}, ValueError, "y .*Encode labels"),
        ({"y": np.array(["a", "b"] * 10, object)}, ValueError, "y .*Encode labels"),
        (
            {"X": np.full((20, 2), "a")},
            ValueError,
            "X .*Encode categories as columns",
        ),
        ({"y": np.zeros(19, int)}, ValueError, r"\(19,\).*\(20,\)"),
        ({"y": np.zeros((20, 1), int)}, ValueError, r"\(20, 1\).*\(20,\)"),
        ({"X": np.zeros((0, 2))}, ValueError, r"X has shape \(0, 2\) and is empty"),
        ({"inducing": np.zeros((5, 3))}, ValueError, r"\(20, 2\).*\(5, 3\)"),
        ({"lengthscale": -1.0}, ValueError, "lengthscale"),
        ({"variance": 0.0}, ValueError, "variance"),
        (
            {"inducing": np.ones((5, 2), np.float32), "jitter": 0.0},
            gpaug.CholeskyError,
            r"4 inducing inputs are duplicates",
        ),
    ],
    ids=lambda value: None if isinstance(value, dict) else "",
)
def test_bad_input_is_named(arguments, error, message) -> None:
    with pytest.raises(error, match=message):
        start(**arguments)


def test_a_function_that_is_no_kernel_is_named() -> None:
    k = gpaug.kernels.Matern52()
    negative = gpaug.kernels.from_function(lambda X, Z: -k(X, Z), lambda X: -k(X))
    with handlers.seed(rng_seed=0):
        gp = gpaug.GaussianProcess("f", negative, jnp.zeros((3, 1)))
    assert "cause: the kernel gives negative variances" in cholesky_message(gp)


@pytest.mark.parametrize(
    ("num_latents", "labels", "message"),
    [
        (2, [0, 1, 2], r"2 classes: for 3, numbered 0\.\.2, .*num_latents=3$"),
        (3, [0, 1, 3], r"Labels are 0\.\.2: numpy.unique"),
        (None, [0, 1, 2], r"for 3, .*num_latents=3 and observe dist.Categorical"),
    ],
)
def test_labels_the_model_does_not_know(num_latents, labels, message) -> None:
    def model(X, y=None, *, inducing):
        kernel = gpaug.kernels.Matern52()
        f = gpaug.GaussianProcess("f", kernel, inducing, num_latents=num_latents)(X)
        with numpyro.plate("data", X.shape[0]):
            several = num_latents is not None
            d = dist.Categorical(logits=f) if several else dist.Bernoulli(logits=f)
            numpyro.sample("y", d, obs=y)

    with pytest.raises(ValueError, match=message):
        start(model, y=np.resize(labels, 20))


def test_a_param_that_starts_outside_its_constraint() -> None:
    def model(X, y=None, *, inducing):
        positive = dist.constraints.positive
        variance = numpyro.param("variance", -1.0, constraint=positive)
        return classifier(X, y, inducing=inducing, variance=variance)

    with pytest.raises(ValueError, match="variance"):
        start(model)


def edge_cases():
    X, y = toy(20)
    repeated = np.concatenate([X[:5], X[:5]])
    return {
        "one datum": {"X": X[:1], "y": y[:1], "inducing": X[:1]},
        "repeated inducing inputs": {"inducing": repeated},
        "more inducing inputs than data": {"X": X[:4], "y": y[:4], "inducing": X},
        "a constant column": {"X": np.stack([0 * X[:, 0] + 3, X[:, 1]], 1)},
        "float labels": {"y": np.asarray(y, float)},
    }


QUICK = "one datum", "repeated inducing inputs"


@pytest.mark.parametrize(
    "case",
    [pytest.param(k, marks=() if k in QUICK else pytest.mark.slow)
     for k in edge_cases()],
)  # fmt: skip
def test_handled_edge_cases(case: str) -> None:
    assert np.isfinite(start(**edge_cases()[case]).losses).all()


def test_unsuitable_models_and_guides() -> None:
    def empty(X, y=None, *, inducing):
        scale = numpyro.sample("scale", dist.LogNormal(0.0, 1.0))
        with numpyro.plate("data", X.shape[0]):
            numpyro.sample("y", dist.Normal(0.0, scale), obs=X[:, 0])

    with pytest.raises(ValueError, match="no Gaussian process"):
        start(empty)
    with pytest.raises(ValueError, match="covariance='natural'"):
        start(guide=gpaug.AutoSparseGP(classifier, covariance="dense"))
    guide = gpaug.AutoSparseGP(classifier)
    with pytest.raises(ValueError, match="optax"):
        gpaug.ConjugateSVI(classifier, guide, numpyro.optim.Adam(0.1))
    with pytest.raises(ValueError, match="updates must be one of"):
        gpaug.ConjugateSVI(classifier, guide, None, updates="best")
    with pytest.raises(ValueError, match="step_size"):
        gpaug.ConjugateSVI(classifier, guide, step_size=1.5)
    with pytest.raises(ValueError, match="covariance must be one of"):
        gpaug.AutoSparseGP(classifier, covariance="banded")


def test_a_bound_that_blows_up_names_the_learning_rate() -> None:
    X, y = toy(20)
    guide, optim = gpaug.AutoSparseGP(learnt), optax.sgd(1e30)
    svi = gpaug.ConjugateSVI(learnt, guide, optim, hyper_every=1)
    arguments = {"inducing": X[:5], "batch_size": 5, "progress_bar": False}
    with pytest.raises(gpaug.CholeskyError):
        svi.run(KEY, 50, X, y, **arguments)
