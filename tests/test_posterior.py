# SPDX-License-Identifier: Apache-2.0
"""Prediction: formulas, streaming, saving, other models. Where no fit is asked about,
the params of the guide are written by hand."""

from functools import cache

import jax
import jax.numpy as jnp
import numpy as np
import numpyro
import numpyro.distributions as dist
import pytest
from scipy import stats

import numpyro_gpaug as gpaug
from numpyro_gpaug.predict import FunctionValues
from numpyro_gpaug.predict.predictor import Predictor
from tests.conftest import compilations
from tests.models import covariance
from tests.problems import classifier, learnt, toy

KEY = jax.random.key(0)
pytestmark = pytest.mark.usefixtures("x64")
RNG = np.random.default_rng(1)
X, Y = np.random.default_rng(0).normal(size=(60, 2)), np.arange(60) % 2
Z = X[:12]
POTENTIAL = RNG.normal(size=(3, 12))
PRECISION = np.eye(12) + [b @ b.T / 4 for b in RNG.normal(size=(3, 12, 12))]


SVI = gpaug.ConjugateSVI(classifier, gpaug.AutoSparseGP(classifier))


@cache
def fitted():
    """A classifier, fitted in float64 once for all tests."""
    X, y = toy(60)
    result = SVI.run(KEY, 10, X, y, progress_bar=False, inducing=X[:12])
    return SVI.posterior(result), result


def by_hand(model, *args, latents=0, **params):
    """A posterior whose q is ``POTENTIAL`` and ``PRECISION``, not fitted."""
    q = {"f.v_auto_potential": POTENTIAL[latents]}
    q["f.v_auto_precision"] = PRECISION[latents]
    params = jax.tree.map(jnp.asarray, {**q, **params})
    args = args or (X, Y)
    guide = gpaug.AutoSparseGP(model)
    return gpaug.Posterior.from_guide(model, guide, params, *args, inducing=Z)


def moments(new, Z, precision, potential):
    """Mean and covariance of f at new inputs, by NumPy."""
    gram = covariance(Z, Z, 1.0, 1.0) + 1e-13 * np.eye(len(Z))
    cross = covariance(Z, new, 1.0, 1.0)
    A = np.linalg.solve(np.linalg.cholesky(gram), cross)
    S = np.linalg.inv(precision)
    spread = covariance(new, new, 1.0, 1.0) - A.T @ A + A.T @ S @ A
    return A.T @ (S @ potential), spread


def test_moments_and_probabilities_against_formulas() -> None:
    posterior, result = fitted()
    new, Z = toy(9, seed=5)[0], toy(60)[0][:12]
    q = (np.asarray(result.params[f"f.v_auto_{k}"]) for k in ("precision", "potential"))
    mean, spread = moments(new, Z, *q)
    f = posterior.predict_f(new)
    np.testing.assert_allclose(f.mean, mean, atol=1e-9)
    np.testing.assert_allclose(f.variance, np.diag(spread), atol=1e-9)
    joint = posterior.predict_f(new, full_covariance=True)
    np.testing.assert_allclose(joint.variance, spread, atol=1e-9)
    # E sigmoid by brute force.
    nodes, weights = np.polynomial.hermite_e.hermegauss(80)
    values = mean[:, None] + np.sqrt(np.diag(spread))[:, None] * nodes
    probs = (weights / weights.sum() / (1 + np.exp(-values))).sum(1)
    np.testing.assert_allclose(posterior.predict_y(new).probs, probs, atol=1e-10)
    y = np.array([0, 1, 1, 0, 1, 0, 0, 1, 1])
    expected = np.log(np.where(y == 1, probs, 1 - probs))
    np.testing.assert_allclose(posterior.log_prob(new, y), expected, atol=1e-9)


def test_a_posterior_tells_its_parts(capsys) -> None:
    posterior, result = fitted()
    text = repr(posterior)
    assert text.startswith("Posterior of classifier\n")
    assert "process, 12 inducing inputs" in text
    assert "observed, in closed form" in text
    assert f"{-result.losses[-1]:.6g}" in repr(result)
    posterior.print_summary()
    assert "mean" in capsys.readouterr().out


def test_draws_have_the_posterior_moments() -> None:
    posterior, _ = fitted()
    new = toy(5, seed=3)[0]
    draws = np.asarray(posterior.sample(KEY, new, sample_shape=(20000,)))
    joint = posterior.predict_f(new, full_covariance=True)
    assert draws.shape == (20000, 5)
    np.testing.assert_allclose(draws.mean(0), joint.mean, atol=0.03)
    np.testing.assert_allclose(np.cov(draws.T), joint.variance, atol=0.04)


def test_predictions_do_not_depend_on_batch_size() -> None:
    posterior, _ = fitted()
    new = toy(101, seed=3)[0]
    whole, at_once = posterior.predict_y(new), posterior.predict_f(new)
    for batch_size in (7, 1000):
        part = posterior.predict_y(new, batch_size=batch_size)
        assert part.batch_shape == whole.batch_shape == (101,)
        np.testing.assert_allclose(part.probs, whole.probs, rtol=1e-12)
        f = posterior.predict_f(new, batch_size=batch_size)
        assert f.mean.shape == f.variance.shape == (101,)
        np.testing.assert_allclose(f.mean, at_once.mean, rtol=1e-9)
        np.testing.assert_allclose(f.variance, at_once.variance, rtol=1e-9)


def test_any_number_of_rows_costs_one_compilation_each(monkeypatch) -> None:
    posterior, _ = fitted()
    before, traced = compilations("_answer"), []
    traces = Predictor.shapes_of

    def shapes(*args):
        traced.append(args)
        return traces(*args)

    monkeypatch.setattr(Predictor, "shapes_of", shapes)
    for rows in (1, 2, 15, 17, 32, 40, 41):
        new = toy(rows, seed=1)[0]
        assert posterior.predict_y(new, batch_size=16).batch_shape == (rows,)
        assert posterior.predict_f(new, batch_size=16).mean.shape == (rows,)
    assert compilations("_answer") - before == 2
    # The structures of both answers are traced once, at the first number of rows, if no
    # earlier prediction shows them.
    assert len(traced) <= 2


def test_save_and_load_predict_the_same(tmp_path) -> None:
    posterior = by_hand(learnt, lengthscale=0.7, variance=2.0)
    path = tmp_path / "posterior.npz"
    posterior.save(path)
    loaded = gpaug.Posterior.load(path, learnt)
    new = toy(11, seed=2)[0]
    probs = posterior.predict_y(new).probs
    for name, value in posterior.values.items():
        np.testing.assert_array_equal(loaded.values[name], value)
    # Two programs, which may add numbers in different orders.
    np.testing.assert_allclose(loaded.predict_y(new).probs, probs, rtol=1e-12)
    # Hyperparameters come from the params, not from the model's initial values.
    assert np.abs(probs - by_hand(classifier).predict_y(new).probs).max() > 0.01
    with np.load(path, allow_pickle=False) as archive:
        total = sum(v.size for k, v in archive.items() if k != "meta")
        assert not any(v.dtype == object for v in archive.values())
    # The file contains arrays of size M, checksums, and no training data.
    assert total < 12 * 12 + 12 * 2 + 2 * 12 + 18


def test_saving_what_cannot_be_saved_is_named(tmp_path) -> None:
    def model(X, y=None, *, kernel, inducing):
        gp = gpaug.GaussianProcess("f", kernel, inducing)
        with numpyro.plate("data", X.shape[0]):
            numpyro.sample("y", dist.Bernoulli(logits=gp(X)), obs=y)

    params = {"f.v_auto_potential": POTENTIAL[0], "f.v_auto_precision": PRECISION[0]}
    posterior = gpaug.Posterior.from_guide(
        model, gpaug.AutoSparseGP(model), params, X, Y, inducing=Z,
        kernel=gpaug.kernels.Matern32(0.7),
    )  # fmt: skip
    with pytest.raises(ValueError, match="arguments/kernel is a Matern32"):
        posterior.save(tmp_path / "posterior.npz")


def test_keyword_data_and_observations_are_forgotten() -> None:
    (X, y), new = toy(60), toy(7, seed=4)[0]
    as_positional, result = fitted()
    posterior = SVI.posterior(result.params, X=X, y=y, inducing=X[:12])
    found = posterior.predict_y(X=new).probs
    np.testing.assert_allclose(found, as_positional.predict_y(new).probs, rtol=1e-9)
    found = posterior.log_prob(X=X[:5], y=y[:5])
    np.testing.assert_allclose(found, as_positional.log_prob(X[:5], y[:5]), rtol=1e-9)


def test_what_the_fit_had_by_row_and_a_prediction_lacks_is_named() -> None:
    """A note is added to any error that the model raises without the argument."""

    def model(X, y=None, scale=None, *, inducing):
        gp = gpaug.GaussianProcess("f", gpaug.kernels.Matern32(), inducing=inducing)
        with numpyro.plate("data", X.shape[0]):
            numpyro.sample("y", dist.Normal(gp(X), 2 * scale), obs=y)

    new, scale = toy(7, seed=4)[0], np.ones(len(X))
    q = {"f.v_auto_potential": POTENTIAL[0], "f.v_auto_precision": PRECISION[0]}
    guide = gpaug.AutoSparseGP(model)
    for args, kwargs in (((scale,), {}), ((), {"scale": scale})):
        posterior = gpaug.Posterior.from_guide(
            model, guide, q, X, X[:, 0], *args, inducing=Z, **kwargs
        )
        with pytest.raises((TypeError, ValueError)) as error:
            posterior.predict_y(new)
        assert "without scale, which had a row" in error.value.__notes__[-1]
    assert posterior.predict_y(new, scale=scale[:7]).variance.shape == (7,)
    with pytest.raises(KeyError, match=r"'eta' is not .* the processes \['f'\], "):
        posterior["eta"]


def test_a_model_whose_observations_have_no_default() -> None:
    def model(X, y, inducing):
        return classifier(X, y, inducing=inducing)

    new = toy(7, seed=4)[0]
    mean, _ = moments(new, Z, PRECISION[0], POTENTIAL[0])
    posterior = by_hand(model)
    np.testing.assert_array_equal(posterior.predict_y(new).probs > 0.5, mean > 0)


def test_bad_new_inputs() -> None:
    posterior, _ = fitted()
    with pytest.raises(ValueError, match=r"\(5, 3\)"):
        posterior.predict_y(np.zeros((5, 3)))
    with pytest.raises(ValueError, match="'inducing' .* differs from the fit"):
        posterior.predict_y(X, inducing=X[1:13])
    with pytest.raises(ValueError, match="new inputs"):
        posterior.predict_y()
    with pytest.raises(ValueError, match="'z' is no observed"):
        posterior.predict_y(np.zeros((5, 2)), site="z")


def uncertain(X, y=None, *, inducing):
    length = numpyro.sample("length", dist.LogNormal(0.0, 1.0))
    kernel = gpaug.kernels.SquaredExponential(length)
    gp = gpaug.GaussianProcess("f", kernel, inducing=inducing)
    with numpyro.plate("data", X.shape[0]):
        numpyro.sample("y", dist.Normal(gp(X), 0.5), obs=y)


def test_predictions_average_over_draws_of_another_guide() -> None:
    guide = gpaug.AutoSparseGP(uncertain, other=numpyro.infer.autoguide.AutoNormal)
    spread = 0.6
    params = {"f.v_auto_potential": POTENTIAL[0], "f.v_auto_precision": PRECISION[0]}
    params |= {"length_auto_loc": np.array(0.1), "length_auto_scale": np.array(spread)}
    params = jax.tree.map(jnp.asarray, params)
    posterior = gpaug.Posterior.from_guide(uncertain, guide, params, X, Y, inducing=Z)
    new = np.random.default_rng(7).normal(size=(6, 2))

    def at(length):
        gram = covariance(Z, Z, length, 1.0) + 1e-10 * np.eye(len(Z))
        A = np.linalg.solve(np.linalg.cholesky(gram), covariance(Z, new, length, 1.0))
        S = np.linalg.inv(PRECISION[0])
        return A.T @ (S @ POTENTIAL[0]), 1 + ((A.T @ S) * A.T - A.T**2).sum(1)

    draws = posterior._fitted.members.values["length"]
    means, variances = (np.array(x) for x in zip(*map(at, draws), strict=True))
    f = posterior.predict_f(new)
    np.testing.assert_allclose(f.mean, means.mean(0), atol=1e-7)
    total = variances.mean(0) + means.var(0)
    np.testing.assert_allclose(f.variance, total, atol=1e-7)
    # The draws average over the guide: by quadrature, not at its median.
    nodes, weights = np.polynomial.hermite_e.hermegauss(30)
    each = np.array([at(np.exp(0.1 + spread * x))[0] for x in nodes])
    mean = weights / weights.sum() @ each
    error = means.std(0) / np.sqrt(len(draws))
    assert (abs(f.mean - mean) < 4 * error).all()
    assert (abs(at(np.exp(0.1))[0] - mean) > 0.05).any()

    y = np.zeros(6)
    predicted = posterior.predict_y(new)
    scales = np.sqrt(variances + 0.25)
    density = np.log(stats.norm(means, scales).pdf(y).mean(0))
    log_prob = jax.jit(lambda d: d.log_prob(y))(predicted)
    np.testing.assert_allclose(log_prob, density, atol=1e-7)
    row = posterior.summary().loc["length"]
    np.testing.assert_allclose(row["mean"], np.mean(draws), rtol=1e-6)


def test_a_model_without_arguments_asks_for_none() -> None:
    def model():
        w = numpyro.sample("w", dist.Normal(0, 1))
        with numpyro.plate("data", 4):
            numpyro.sample("y", dist.Normal(w, 1), obs=jnp.arange(4.0))

    svi = gpaug.ConjugateSVI(model, gpaug.AutoLatentGaussian(model))
    result = svi.run(jax.random.key(0), 2, progress_bar=False)
    for fit in (result, result.params):
        posterior = svi.posterior(fit)
        np.testing.assert_allclose(posterior["w"].mean, 1.2, rtol=1e-5)
        np.testing.assert_allclose(posterior.predict_y().mean, 1.2, rtol=1e-5)


@pytest.mark.parametrize("joint", ["none", "independent", "table"])
def test_intervals_of_function_values(joint) -> None:
    mean, sd = np.arange(6.0).reshape(3, 2), 1 + np.arange(6.0).reshape(3, 2)
    variance = {
        "none": sd**2,
        "independent": np.stack([np.diag(x**2) for x in sd.T]),
        "table": np.diag(np.square(sd).ravel()),
    }[joint]
    found = FunctionValues(jnp.array(mean), jnp.array(variance))
    np.testing.assert_allclose(found.sd, sd, rtol=1e-5)
    expected = stats.norm(mean, sd).interval(0.9)
    np.testing.assert_allclose(found.interval(), expected, rtol=1e-4)
