# SPDX-License-Identifier: Apache-2.0
"""Joint-distribution tests of samplers (Geweke, 2004): alternate data given latents and
a step of the sampler; the latents keep their prior, whatever the data.
``GPAUG_SIMULATIONS=5000 pytest tests/test_calibration_of_samplers.py`` runs longer.
"""

import os
from functools import partial

import jax
import jax.numpy as jnp
import numpy as np
import numpyro
import numpyro.distributions as dist
import pytest
from numpyro import handlers
from numpyro.infer import HMC, NUTS, Gibbs
from scipy import stats

import numpyro_gpaug as gpaug
from tests.conftest import slow

SIMULATIONS = int(os.environ.get("GPAUG_SIMULATIONS", 150))
LEVEL = 0.01  # of all tests together
X = np.linspace(-1.0, 1.0, 6, dtype=np.float32)[:, None]


def traced(model, key, values, y=None):
    """The model's sites given latents."""
    filled = handlers.substitute(handlers.seed(model, key), data=values)
    return handlers.trace(filled).get_trace(X, y)


def hierarchical(X, y=None):
    """A process with a hyperparameter, and weights."""
    lengthscale = numpyro.sample("lengthscale", dist.LogNormal(0.0, 0.5))
    weights = numpyro.sample("w", dist.Normal(jnp.ones(1), 0.5).to_event(1))
    kernel = gpaug.kernels.SquaredExponential(lengthscale, 2.0)
    f = gpaug.GaussianProcess("f", kernel, X[::2])(X)
    with numpyro.plate("data", X.shape[0]):
        numpyro.sample("y", dist.Bernoulli(logits=f + X @ weights), obs=y)


def noisy(X, y=None):
    """Laplace observations of a process."""
    kernel = gpaug.kernels.SquaredExponential(0.7, 2.0)
    f = gpaug.GaussianProcess("f", kernel, X[::2])(X)
    with numpyro.plate("data", X.shape[0]):
        numpyro.sample("y", dist.Laplace(f, 0.6), obs=y)


def slices():
    """Around any Gaussian: the target does not depend on it."""
    q = {"potential": np.array([0.5, -1.0, 2.0]), "precision": 2 * np.eye(3) + 0.5}
    params = {f"f.v_auto_{k}": jnp.asarray(x, jnp.float32) for k, x in q.items()}
    guide = gpaug.AutoSparseGP(noisy).setup(X, X[:, 0])
    return noisy, gpaug.EllipticalSlice(noisy, guide, params)


def hamiltonian(model=hierarchical):
    return HMC(model, step_size=0.4, trajectory_length=1.2)


def nuts(model=hierarchical):
    return NUTS(model, step_size=0.4, max_tree_depth=2)


def plain_in_gibbs(moves):
    latents = ["f.v", "w"]
    blocks = [(gpaug.AugmentedGaussian(hierarchical), latents), (moves(), None)]
    return hierarchical, Gibbs(blocks)


def collapsed(moves):
    return hierarchical, gpaug.CollapsedGaussian(hierarchical, moves)


SAMPLERS = {
    "elliptical": slices,
    "plain": partial(plain_in_gibbs, hamiltonian),
    "collapsed": partial(collapsed, hamiltonian),
    "plain, NUTS": partial(plain_in_gibbs, nuts),
    "collapsed, NUTS": partial(collapsed, nuts),
}  # fmt: skip


# Slices around a Gaussian are compared with the posterior in test_gibbs.py.
@pytest.mark.parametrize("name", [n if n == "collapsed" else slow(n) for n in SAMPLERS])
def test_latents_keep_their_prior(name) -> None:
    target, kernel = SAMPLERS[name]()
    y = np.zeros(6, int if target is hierarchical else np.float32)
    rng = np.random.default_rng(7)
    prior = {"f.v": rng.normal(size=(SIMULATIONS, 3))}
    if target is hierarchical:
        prior["w"] = rng.normal(1.0, 0.5, (SIMULATIONS, 1))
        prior["lengthscale"] = rng.lognormal(0.0, 0.5, SIMULATIONS)
    prior = {k: x.astype(np.float32) for k, x in prior.items()}

    @jax.jit
    @jax.vmap
    def run(key, prior):
        first = kernel.init(key, 0, None, (X, y), {})
        state = with_values(first, prior, jax.random.fold_in(key, 1))

        def step(state, key):
            z = kernel.postprocess_fn((X, None), {})(state.z)
            values = {k: z[k] for k in prior}
            drawn = traced(target, key, values)["y"]["value"]
            state = kernel.refresh(state, (X, drawn), {})
            return kernel.sample(state, (X, drawn), {}), values

        _, values = jax.lax.scan(step, state, jax.random.split(key, 30))
        return jax.tree.map(lambda x: x[-1], values)

    def with_values(state, values, key):
        if not isinstance(kernel, Gibbs):
            moved = state._replace(z={**state.z, **values}, rng_key=key)
            if hasattr(state, "inner"):
                moved = moved._replace(inner=with_free(state.inner, values, key))
            return moved
        block, inner = state.block_states
        own = {k: values.get(k, x) for k, x in block.z.items()}
        block = block._replace(z=own, rng_key=key)
        inner = with_free(inner, values, key)
        z = {k: {**own, **inner.z}[k] for k in state.z}
        return state._replace(z=z, block_states=(block, inner))

    def with_free(inner, values, key):
        free = {"lengthscale": jnp.log(values["lengthscale"])}
        return inner._replace(z=free, rng_key=jax.random.fold_in(key, 1))

    last = jax.device_get(run(jax.random.split(jax.random.key(7), SIMULATIONS), prior))
    white = [last["f.v"]]
    if target is hierarchical:
        white.append((last["w"] - 1.0) / 0.5)
        white.append(np.log(last["lengthscale"])[:, None] / 0.5)
    p = [stats.kstest(column, "norm").pvalue for column in np.concatenate(white, 1).T]
    assert min(p) * len(p) > LEVEL / len(SAMPLERS)
