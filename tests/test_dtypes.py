# SPDX-License-Identifier: Apache-2.0
"""``jax_enable_x64`` switched between a fit and its predictions."""

import jax
import numpy as np
import numpyro
import numpyro.distributions as dist
import pytest
from numpyro.infer import MCMC

import numpyro_gpaug as gpaug
from tests.conftest import enable_x64, slow

KEY = jax.random.key(0)
QUIET = {"progress_bar": False}
rng = np.random.default_rng(0)
X = rng.normal(size=(12, 1))
GROUP = np.arange(12) % 3
Y = (X[:, 0] > 0).astype(int)


def process(X, y=None, *, inducing):
    scale = numpyro.sample("scale", dist.LogNormal(0, 1))
    f = gpaug.GaussianProcess("f", gpaug.kernels.Matern52(scale), inducing)
    with numpyro.plate("data", len(X)):
        numpyro.sample("y", dist.Bernoulli(logits=f(X)), obs=y)


def groups(group, x, y=None):
    tau = numpyro.sample("tau", dist.HalfNormal(1))
    with numpyro.plate("groups", 3):
        u = numpyro.sample("u", dist.Normal(0, tau))
    with numpyro.plate("data", len(group)):
        numpyro.sample("y", dist.Bernoulli(logits=u[group] + x), obs=y)


def answers(posterior, args):
    found = [
        posterior.predict_y(*args).probs,
        posterior.predict_f(*args, full_covariance=True),
        posterior.log_prob(*args, Y),
        posterior.sample(KEY, *(x[:2] for x in args)),
        posterior.summary()["mean"].to_numpy(),
    ]
    return jax.tree.map(np.asarray, found)


@pytest.mark.parametrize("double", [False, slow(True)])
@pytest.mark.parametrize("model", [groups, slow(process)])
def test_predictions_are_in_the_dtype_of_the_fit(double, model, tmp_path):
    dtype, other = np.float32, np.float64
    if double:
        dtype, other = other, dtype
    path = tmp_path / "fit.npz"

    def given(dtype):
        x = X.astype(dtype)
        if model is process:
            return (x,), {"inducing": x[:3]}
        return (GROUP, x[:, 0]), {}

    with enable_x64(double):
        guide = gpaug.AutoSparseGP if model is process else gpaug.AutoLatentGaussian
        svi = gpaug.ConjugateSVI(model, guide(model))
        args, kwargs = given(dtype)
        result = svi.run(KEY, 30, *args, Y, **kwargs, **QUIET)
        posterior = svi.posterior(result)
        expected = answers(posterior, args)
        posterior.save(path)
    with enable_x64(not double):
        # Inputs in the dtypes that JAX has now.
        args = jax.device_put(args)
        kinds = posterior, svi.posterior(result), gpaug.Posterior.load(path, model)
        found = [answers(each, args) for each in kinds]
        # A new fit is in the current dtype.
        args, kwargs = given(other)
        new = svi.run(KEY, 30, *args, Y, **kwargs, **QUIET)
        assert new.losses.dtype == other
    np.testing.assert_allclose(new.losses[-1], result.losses[-1], rtol=1e-4)
    tolerance = {"rtol": 1e-5, "atol": 1e-6} if double else {"rtol": 1e-4, "atol": 1e-5}
    for one in found:
        leaves = zip(jax.tree.leaves(one), jax.tree.leaves(expected), strict=True)
        for new, old in leaves:
            assert new.dtype == old.dtype
            np.testing.assert_allclose(new, old, **tolerance)


@pytest.mark.parametrize("double", [False, slow(True)])
def test_a_run_goes_on_in_the_dtype_of_its_state(double):
    x = X[:, 0]
    svi = gpaug.ConjugateSVI(groups, gpaug.AutoLatentGaussian(groups))
    with enable_x64(double):
        first = svi.run(KEY, 4, GROUP, x, Y, **QUIET)
    with enable_x64(not double):
        on = svi.run(KEY, 20, GROUP, x, Y, init_state=first.state, **QUIET)
        state, loss = svi.update(on.state, GROUP, x, Y)
        probs = svi.posterior(on).predict_y(GROUP, x).probs
        precision = svi.get_params(state)["latents_auto_precision"]
    kind = np.dtype(np.float64 if double else np.float32)
    found = on.losses, loss, state.bound, probs, precision
    assert {x.dtype for x in found} == {kind}
    assert on.losses[-1] <= first.losses[-1]


def test_a_process_at_inputs_of_float32_in_a_float64_model(x64):
    def model(X, y, inducing):
        f = gpaug.GaussianProcess("f", gpaug.kernels.Matern52(1.0), inducing)(X)
        numpyro.sample("y", dist.Bernoulli(probs=jax.scipy.special.ndtr(f)), obs=y)

    svi = gpaug.ConjugateSVI(model, gpaug.AutoLatentGaussian(model))
    fits = [svi.run(KEY, 9, x, Y, inducing=x, **QUIET) for x in (X.astype("f4"), X)]
    np.testing.assert_allclose(fits[0].losses[-1], fits[1].losses[-1], rtol=1e-6)


@pytest.mark.parametrize("kind", [gpaug.EllipticalSlice, gpaug.AugmentedGaussian])
def test_samplers_of_a_process_at_inputs_of_float32_in_a_float64_model(x64, kind):
    def model(X, y, inducing):
        f = gpaug.GaussianProcess("f", gpaug.kernels.Matern52(1.0), inducing)(X)
        numpyro.sample("y", dist.Bernoulli(logits=f), obs=y)

    mcmc = MCMC(kind(model), num_warmup=5, num_samples=5, progress_bar=False)
    mcmc.run(KEY, X.astype("f4"), Y, X[:4].astype("f4"))
    draws = mcmc.get_samples()["f"]
    assert draws.shape == (5, len(X))
    assert np.isfinite(draws).all()
