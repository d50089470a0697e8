# SPDX-License-Identifier: Apache-2.0
"""Models of groups and of steps give the same Gaussian in each form that holds them:
one dense matrix, groups, chains."""

import jax
import jax.numpy as jnp
import numpy as np
import numpyro
import numpyro.distributions as dist
import pytest

import numpyro_gpaug as gpaug
from numpyro_gpaug.model import costs

N, MEMBERS = 60, 18
rng = np.random.default_rng(1)
GROUP = np.concatenate([np.arange(MEMBERS), rng.integers(0, MEMBERS, N - MEMBERS)])
COUNTS, BINARY = rng.poisson(2.0, N), rng.integers(0, 2, N)
REAL, POSITIVE = rng.normal(size=N), rng.gamma(2.0, 1.0, N)

# Functions of values by member, the members of the data, and a common effect.
LIKELIHOODS = {
    "Poisson": (lambda u, g, b: dist.Poisson(jnp.exp(u[g] + b)), COUNTS),
    "rate by member": (lambda u, g, b: dist.Poisson(jnp.exp(u + b)[g]), COUNTS),
    "Bernoulli": (lambda u, g, b: dist.Bernoulli(logits=u[g] + b), BINARY),
    "share by member": (lambda u, g, b: dist.Bernoulli(jax.nn.sigmoid(u)[g]), BINARY),
    "scale": (lambda u, g, b: dist.Normal(b, jnp.exp(u[g] / 2)), REAL),
    "scale by member": (lambda u, g, b: dist.Normal(b, jnp.exp(u / 2)[g]), REAL),
    "Student-t": (lambda u, g, b: dist.StudentT(4.0, u[g] + b, 0.7), REAL),
    "gamma": (lambda u, g, b: dist.Gamma(2.0, 2 * jnp.exp(-u[g] - b)), POSITIVE),
    "negative binomial": (
        lambda u, g, b: dist.NegativeBinomial2(jnp.exp(u[g]), jnp.exp(b)),
        COUNTS,
    ),
    "zero-inflated": (
        lambda u, g, b: dist.ZeroInflatedPoisson(0.2, jnp.exp(u[g] + b)),
        COUNTS,
    ),
    "mixture": (
        lambda u, g, b: dist.MixtureSameFamily(
            dist.Categorical(probs=jnp.array([0.3, 0.7])),
            dist.Normal(jnp.stack([u[g], jnp.full(N, b)], -1), 0.8),
        ),
        REAL,
    ),
    "mask": (lambda u, g, b: dist.Poisson(jnp.exp(u[g])).mask(g > 3), COUNTS),
}
LATENTS = {
    "groups": lambda: dist.Normal(0, 0.7).expand([MEMBERS]).to_event(1),
    "a chain": lambda: dist.GaussianRandomWalk(0.3, MEMBERS),
}


def fitted(form, kind, overhead):
    make, y = LIKELIHOODS[kind]

    def model(g, y=None):
        b = numpyro.sample("b", dist.Normal(0.2, 0.5))
        u = numpyro.sample("u", LATENTS[form]())
        with numpyro.plate("data", len(g)):
            numpyro.sample("y", make(u, g, b), obs=y)

    with pytest.MonkeyPatch.context() as patched:
        patched.setattr(costs, "_OVERHEAD", overhead)
        svi = gpaug.ConjugateSVI(model, gpaug.AutoLatentGaussian(model), None)
        result = svi.run(jax.random.key(0), 200, GROUP, y, progress_bar=False, tol=1e-9)
    return result.losses[-1], svi.posterior(result), repr(svi.guide)


@pytest.mark.slow  # quick in test_group_models.py and test_scanned_models.py
@pytest.mark.parametrize("kind", LIKELIHOODS)
@pytest.mark.parametrize("form", LATENTS)
def test_each_form_gives_the_same_gaussian(x64, form, kind):
    (dense, expected, said), (loss, posterior, other) = (
        fitted(form, kind, overhead) for overhead in (np.inf, -np.inf)
    )
    assert f"{MEMBERS} " in other
    assert "dense" in said
    assert "groups" in other or "chain" in other
    np.testing.assert_allclose(loss, dense, rtol=1e-6)
    for site in ("u", "b"):
        found, right = posterior[site], expected[site]
        np.testing.assert_allclose(found.mean, right.mean, atol=1e-5)
        np.testing.assert_allclose(found.variance, right.variance, rtol=1e-5)
