# SPDX-License-Identifier: Apache-2.0
"""The joint Gaussian under NumPyro's own SVI."""

from functools import partial

import jax
import jax.numpy as jnp
import numpy as np
import numpyro
import numpyro.distributions as dist
import optax
import pytest
from numpyro.infer import SVI, Trace_ELBO

import numpyro_gpaug as gpaug
from tests.conftest import slow

RNG = np.random.default_rng(1)
N, GROUPS = 24, 4
GROUP, X = np.arange(N) % GROUPS, RNG.normal(size=N)
DATA = {"normal": X + RNG.normal(size=N), "poisson": RNG.poisson(np.exp(X / 2))}
LIKELIHOODS = {
    "normal": lambda e: dist.Normal(e, 0.7),
    "poisson": lambda e: dist.Poisson(e),
}


def mixed(x, group, y=None, *, likelihood):
    """Nested locations, so that values are not the numbers they are made of."""
    level = numpyro.sample("level", dist.Normal(0, 2))
    walk = numpyro.sample("walk", dist.GaussianRandomWalk(0.3, num_steps=3))
    with numpyro.plate("groups", GROUPS):
        effect = numpyro.sample("effect", dist.Normal(level, 0.8))
    eta = effect[group] + x * walk[group % 3]
    with numpyro.plate("data", len(x)):
        mean = eta if likelihood == "normal" else jnp.exp(eta)
        numpyro.sample("y", LIKELIHOODS[likelihood](mean), obs=y)


@pytest.mark.parametrize("likelihood", ["normal", slow("poisson")])
def test_losses_are_those_of_closed_form_updates(x64, likelihood) -> None:
    """The losses are compared at the Gaussian of closed-form updates. With Gaussian
    noise it is the posterior, and every draw's ratio is the evidence.
    """
    args, data = (X, GROUP, DATA[likelihood]), {"likelihood": likelihood}
    model = partial(mixed, **data)
    svi = gpaug.ConjugateSVI(model, gpaug.AutoLatentGaussian(model), None)
    fit = svi.run(jax.random.key(0), 20, *args, progress_bar=False)
    (q,) = svi.guide.moments(svi.guide.split_params(fit.params)[1]).values()
    covariance = q.whitener[0].T @ q.whitener[0]
    params = {
        "latents_auto_loc": q.mean[0],
        "latents_auto_tril": jnp.linalg.cholesky(covariance),
    }
    guide = gpaug.AutoLatentGaussian(model, covariance="dense")

    @partial(jax.jit, static_argnums=0)
    def at(loss, key):
        return loss.loss(key, params, model, guide, *args)

    losses = [gpaug.TraceAnalytic_ELBO()]
    losses += [Trace_ELBO()] if likelihood == "normal" else []
    for loss in losses:
        for seed in range(2):
            found = at(loss, jax.random.key(seed))
            np.testing.assert_allclose(found, fit.losses[-1], rtol=1e-8)
    if likelihood == "poisson":
        optimised = SVI(model, guide, optax.adam(0.1), losses[0])
        found = optimised.run(jax.random.key(0), 300, *args, progress_bar=False)
        np.testing.assert_allclose(found.losses[-1], fit.losses[-1], atol=0.05)
        params = found.params
    posterior = gpaug.Posterior.from_guide(model, guide, params, *args)
    theirs = svi.posterior(fit)["effect"].mean
    atol = 0.02 if likelihood == "poisson" else 1e-8
    np.testing.assert_allclose(posterior["effect"].mean, theirs, atol=atol)


def test_routes_are_those_of_the_guide() -> None:
    def model(group, y=None):
        tau = numpyro.sample("tau", dist.HalfNormal(1))
        with numpyro.plate("groups", GROUPS):
            effect = numpyro.sample("effect", dist.Normal(0, tau))
        with numpyro.plate("data", N):
            numpyro.sample("y", dist.Poisson(jnp.exp(effect[group])), obs=y)

    loss, args = gpaug.TraceAnalytic_ELBO(), (GROUP, DATA["poisson"])
    assert loss.routes(model, *args) == {"y": gpaug.Route.CONSTANT}
    guide = gpaug.AutoLatentGaussian(model, covariance="dense")
    assert loss.routes(guide, *args) == {"y": gpaug.Route.EXPONENTIAL}


def test_natural_parameters_are_refused_by_name() -> None:
    def model(x, y=None):
        b = numpyro.sample("b", dist.Normal(0, 1))
        with numpyro.plate("data", N):
            numpyro.sample("y", dist.Poisson(jnp.exp(b * x)), obs=y)

    svi = SVI(model, gpaug.AutoLatentGaussian(model), optax.adam(0.1), Trace_ELBO())
    with pytest.raises(ValueError, match=r'AutoLatentGaussian.*covariance="dense"'):
        jax.eval_shape(lambda: svi.init(jax.random.key(0), X, DATA["poisson"]))
    with pytest.raises(ValueError, match="covariance must be one of"):
        gpaug.AutoLatentGaussian(model, "diagonal")
    dense = gpaug.AutoLatentGaussian(model, "dense")
    with pytest.raises(ValueError, match="natural parameters"):
        gpaug.ConjugateSVI(model, dense)


def test_a_fit_beside_a_large_constant_ends_by_itself() -> None:
    """In float32, such a bound does not resolve the smallest rise that counts."""

    def model(x, group, y=None):
        numpyro.factor("constant", -1e6)
        tau = numpyro.sample("tau", dist.HalfNormal(1))
        with numpyro.plate("groups", GROUPS):
            effect = numpyro.sample("effect", dist.Normal(0, tau))
        with numpyro.plate("data", len(x)):
            numpyro.sample("y", dist.Normal(x + effect[group], 0.7), obs=y)

    svi = gpaug.ConjugateSVI(model, gpaug.AutoLatentGaussian(model))
    args = X, GROUP, DATA["normal"]
    fit = svi.run(jax.random.key(0), 60, *args, progress_bar=False)
    assert len(fit.losses) < 40
