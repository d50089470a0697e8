# SPDX-License-Identifier: Apache-2.0
"""Predictions of rows of which something else is observed."""

import jax
import jax.numpy as jnp
import numpy as np
import numpyro
import numpyro.distributions as dist
import pytest
from numpyro import handlers

import numpyro_gpaug as gpaug
from numpyro_gpaug.model import costs
from tests.conftest import slow
from tests.problems import moved, unfitted

N, SLOPE, ERROR, NOISE = 30, 2.0, 0.3, 0.2
RNG = np.random.default_rng(0)
X = RNG.normal(size=N)
MEASURED = X + ERROR * RNG.normal(size=N)
GROUP = np.arange(N) % 3
Y = 1 + SLOPE * X + NOISE * RNG.normal(size=N)
NEW = np.array([-2.0, 0.0, 2.0, 1.0])


def measured(x_obs, group, y=None, *, known=True, likelihood=None):
    """A covariate that is measured with an error, and effects of groups."""
    with numpyro.plate("groups", 3):
        a = numpyro.sample("a", dist.Normal(0, 2))
    with numpyro.plate("data", len(x_obs)):
        x = numpyro.sample("x", dist.Normal(0, 1))
        eta = numpyro.deterministic("eta", a[group] + SLOPE * x)
        with handlers.mask(mask=known):
            likelihood = likelihood or (lambda x: dist.Normal(x, ERROR))
            numpyro.sample("x_obs", likelihood(x), obs=x_obs)
        numpyro.sample("y", dist.Normal(eta, NOISE), obs=y)


@pytest.mark.parametrize(
    "overhead",
    [slow(np.inf), -np.inf],
    ids=["dense", "groups"],
)
def test_a_measured_covariate_counts_in_predictions(x64, monkeypatch, overhead):
    """Given it a row's own is known by Bayes' rule, and rows say nothing of each
    other."""
    monkeypatch.setattr(costs, "_OVERHEAD", overhead)
    svi = gpaug.ConjugateSVI(measured, gpaug.AutoLatentGaussian(measured))
    posterior = moved(svi, 1, MEASURED, GROUP, Y)
    a = posterior["a"]
    assert np.ptp(a.mean) > 0.01
    group = np.array([0, 1, 1, 2])
    shrunk = 1 / (1 + ERROR**-2)
    found = posterior.predict_f(NEW, group, site="x")
    np.testing.assert_allclose(found.mean, NEW * shrunk / ERROR**2, rtol=1e-6)
    np.testing.assert_allclose(found.variance, shrunk, rtol=1e-6)
    eta = posterior.predict_f(NEW, group, site="eta")
    mean = a.mean[group] + SLOPE * NEW * shrunk / ERROR**2
    variance = a.variance[group] + SLOPE**2 * shrunk
    np.testing.assert_allclose(eta.mean, mean, rtol=1e-5)
    np.testing.assert_allclose(eta.variance, variance, rtol=1e-5)
    y = posterior.predict_y(NEW, group, site="y")
    np.testing.assert_allclose(y.mean, mean, rtol=1e-5)
    np.testing.assert_allclose(y.variance, variance + NOISE**2, rtol=1e-5)
    alone = posterior.predict_y(NEW[:1], group[:1], site="y")
    np.testing.assert_allclose(alone.mean, y.mean[:1], rtol=1e-6)
    # Missing values are not conditioned on.
    known = np.array([True, False, True, True])
    found = posterior.predict_f(NEW, group, known=known, site="x")
    np.testing.assert_allclose(found.variance, np.where(known, shrunk, 1), rtol=1e-6)


def test_what_has_no_gaussian_is_refused():
    def proxy(x):
        return dist.Poisson(jnp.exp(x))

    counts = RNG.poisson(np.exp(X))
    svi = gpaug.ConjugateSVI(measured, gpaug.AutoLatentGaussian(measured))
    posterior = unfitted(svi, counts, GROUP, Y, likelihood=proxy)
    with pytest.raises(gpaug.NotConjugateError, match="'x_obs' is observed at the new"):
        posterior.predict_y(counts[:4], GROUP[:4], site="y")


def test_rows_of_the_fit_are_not_those_of_as_many_others(x64, tmp_path):
    def model(group, y=None, *, x):
        with numpyro.plate("groups", 3):
            slope = numpyro.sample("slope", dist.Normal(0, 2))
        with numpyro.plate("data", len(group)):
            numpyro.sample("y", dist.Normal(slope[group] * x, 0.5), obs=y)

    svi = gpaug.ConjugateSVI(model, gpaug.AutoLatentGaussian(model))
    posterior = moved(svi, 1, GROUP, Y, x=X)
    slope = np.asarray(posterior["slope"].mean)
    assert np.ptp(slope) > 0.01
    np.testing.assert_allclose(posterior.predict_y(GROUP).mean, slope[GROUP] * X)
    found = posterior.predict_y(GROUP[::-1], x=X).mean
    np.testing.assert_allclose(found, slope[GROUP[::-1]] * X)
    last = np.append(GROUP[:-1], (GROUP[-1] + 1) % 3)
    for other in (GROUP[::-1].copy(), last):
        with pytest.raises(ValueError, match="'group' differs from the fit.*x="):
            posterior.predict_y(other)
    with pytest.raises(TypeError) as error:
        posterior.predict_y(GROUP[:4])
    assert any("without x, which had a row" in note for note in error.value.__notes__)
    posterior.save(tmp_path / "fit.npz")
    loaded = gpaug.Posterior.load(tmp_path / "fit.npz", model)
    with pytest.raises(ValueError, match="'group' differs from the fit"):
        loaded.predict_y(GROUP[::-1].copy())


def test_of_a_product_the_factor_is_held_and_has_the_right_sign():
    def slopes(x_obs, y=None):
        level = numpyro.sample("level", dist.Normal(0, 2))
        slope = numpyro.sample("slope", dist.Normal(0, 2))
        with numpyro.plate("data", len(x_obs)):
            x = numpyro.sample("x", dist.Normal(0, 1))
            numpyro.sample("x_obs", dist.Normal(x, ERROR), obs=x_obs)
            numpyro.sample("y", dist.Normal(level + slope * x, NOISE), obs=y)

    svi = gpaug.ConjugateSVI(slopes, gpaug.AutoLatentGaussian(slopes))
    for sign in (1, -1):
        fit = svi.run(jax.random.key(0), 60, MEASURED, sign * Y, progress_bar=False)
        assert svi.guide.structure.others == ("slope",)
        # A start with the other sign once ended at a mode of -12, hundreds of nats
        # lower.
        assert sign * fit.params["slope_auto_loc"] == pytest.approx(SLOPE, abs=0.3)


@pytest.mark.parametrize("kind", [gpaug.AutoLatentGaussian, gpaug.AutoSparseGP])
def test_inducing_values_are_not_read_under_another_prior(kind):
    def model(x, y=None, scale=1.0, start=0.0, level=0.0, slope=0.0):
        def mean(x):
            return level + slope * x

        Z, kernel = start + jnp.arange(2.0), gpaug.kernels.Matern52(scale)
        f = gpaug.GaussianProcess("f", kernel, Z, mean if slope else level)(x)
        with numpyro.plate("data", len(x)):
            numpyro.sample("y", dist.Normal(f, 0.5), obs=y)

    @jax.jit
    def traced(scale):
        return posterior.predict_y(NEW, scale=scale).mean

    posterior = unfitted(gpaug.ConjugateSVI(model, kind(model)), X, Y)
    kept = posterior.predict_y(NEW).mean
    np.testing.assert_array_equal(kept, posterior.predict_y(NEW, scale=1.0).mean)
    # The covariances of inducing values do not depend on the start.
    others = {"scale": 2.0}, {"start": 1.0}, {"level": 1.0}, {"slope": 1.0}
    for other in others:
        with pytest.raises(gpaug.NotConjugateError, match="the prior of 'f' differs"):
            posterior.predict_y(NEW, **other)
    np.testing.assert_allclose(traced(1.0), kept, rtol=1e-4, atol=1e-5)
    assert kind is gpaug.AutoSparseGP or np.isnan(traced(2.0)).all()
    if kind is gpaug.AutoSparseGP:
        stream = gpaug.Stream(posterior)
        for _ in range(2):
            with pytest.raises(ValueError, match="'f' differs from the batches before"):
                stream.update(X, Y, level=1.0)
            stream.update(X, Y)


def test_the_prior_of_a_batch_with_weights_is_read():
    """Predictions draw all rows of a plate; the arguments of the fit are a batch."""

    def model(x, y=None, weights=None, *, rows=None):
        f = gpaug.GaussianProcess("f", gpaug.kernels.Matern52(), jnp.arange(2.0))(x)
        weights = jnp.ones(len(x)) if weights is None else weights
        with (
            numpyro.plate("data", rows or len(x), subsample_size=len(x)),
            handlers.mask(mask=weights > 0),
        ):
            numpyro.sample("y", dist.Normal(f, 0.5), obs=y)

    guide = gpaug.AutoSparseGP(model)
    guide.setup(X, Y, np.ones(N), rows=90)
    params = {
        "f.v_auto_potential": jnp.zeros(2), "f.v_auto_precision": 2 * jnp.eye(2),
    }  # fmt: skip
    posterior = gpaug.Posterior.from_guide(
        model, guide, params, X, Y, np.ones(N), rows=90
    )
    assert posterior.predict_y(NEW, rows=None).mean.shape == NEW.shape


def test_numbers_of_the_fit_are_not_read_under_another_prior():
    def model(x, y=None, *, scale=1.0, num=3):
        slope = numpyro.sample("slope", dist.Normal(0, scale))
        gp = gpaug.GaussianProcess(
            "f", gpaug.kernels.Matern52(2 * scale), inducing=jnp.arange(2.0)
        )
        with numpyro.plate("groups", num):
            effect = numpyro.sample("effect", dist.Normal(0, scale))
        eta = slope * x + gp(x) + effect[0]
        with numpyro.plate("data", len(x)):
            numpyro.sample("y", dist.Normal(eta, 0.5), obs=y)

    svi = gpaug.ConjugateSVI(model, gpaug.AutoLatentGaussian(model))
    posterior = moved(svi, 1, X, Y, scale=0.5)
    kept = posterior.predict_y(NEW, num=4).mean
    assert np.ptp(kept) > 0.01
    np.testing.assert_array_equal(kept, posterior.predict_y(NEW, scale=0.5).mean)
    with pytest.raises(
        gpaug.NotConjugateError, match="the prior of '.*' differs from the f"
    ):
        posterior.predict_y(NEW, scale=1)
    with pytest.raises(ValueError, match=r"x has shape \(\), and had \(30,\)"):
        posterior.predict_y(NEW[0])
