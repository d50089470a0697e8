# SPDX-License-Identifier: Apache-2.0
"""Samplers against their own models: simulation-based calibration of every augmentation
(Talts et al., 2018), and joint-distribution tests (Geweke, 2004).

Calibration: draw latents from the prior and data from the likelihood, sample the
posterior, and ask where the true latents rank. Joint distribution: alternate data given
latents and a step of the sampler; the latents keep their prior, whatever the data.
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
from numpyro.infer import NUTS, Gibbs
from scipy import stats

import numpyro_gpaug as gpaug
from numpyro_gpaug.likelihoods import augmentation as base
from numpyro_gpaug.likelihoods import poisson

SIMULATIONS = int(os.environ.get("GPAUG_SIMULATIONS", 200))
BURN_IN, DRAWS, THINNING = 30, 15, 3
LEVEL = 0.01  # of each family of tests
X = jnp.linspace(-1.0, 1.0, 6)[:, None]


def normalizer(f):
    return gpaug.LogisticNormalizer(f, 3, zeta=jnp.full(len(f), 1.5))


# By likelihood: a function of the latents, and how many per datum.
LIKELIHOODS = {
    "bernoulli": (lambda f: dist.Bernoulli(logits=1 - 2 * f), None),
    "binomial": (lambda f: dist.Binomial(jnp.arange(6) + 1, logits=f), None),
    "negative binomial": (lambda f: dist.NegativeBinomialLogits(2.5, f), None),
    "normal": (lambda f: dist.Normal(f, 0.7), None),
    "student t": (lambda f: dist.StudentT(3.0, f, 0.5), None),
    "laplace": (lambda f: dist.Laplace(f, 0.6), None),
    "logistic-softmax": (gpaug.LogisticSoftmax, 3),
    "mean field": (gpaug.LogisticSoftmaxMeanField, 3),
    "logistic Poisson": (lambda f: gpaug.LogisticPoisson(f, 4.0), None),
    "heteroscedastic": (
        lambda f: gpaug.HeteroscedasticNormal(*f, 5.0), 2,
    ),
    "Bayesian SVM": (gpaug.BayesianSVM, None),
    "normaliser": (normalizer, 3),
}  # fmt: skip


def model(X, y=None, *, likelihood, num_latents=None):
    """A sparse process, of which the projected one is sampled. Heteroscedastic
    observations have two, for their two parameters."""
    kernel = gpaug.kernels.SquaredExponential(0.7, 2.0)
    if num_latents == 2:
        f = [gpaug.GaussianProcess(k, kernel, X[::2])(X) for k in "fg"]
    else:
        f = gpaug.GaussianProcess("f", kernel, X[::2], num_latents=num_latents)(X)
    with numpyro.plate("data", X.shape[0]):
        numpyro.sample("y", likelihood(f), obs=y)


def simulated(model, key, values):
    """Observations given latents."""
    filled = handlers.substitute(handlers.seed(model, key), data=values)
    return handlers.trace(filled).get_trace(X)["y"]


def prior_draws(model, name, key, template):
    """Latents and data from the joint distribution, ``SIMULATIONS`` of them."""
    many = SIMULATIONS * (400 if name in ("Bayesian SVM", "normaliser") else 1)

    @jax.jit
    @jax.vmap
    def draw(key):
        keys = jax.random.split(key, len(template) + 2)
        values = {
            k: jax.random.normal(x, template[k].shape)
            for k, x in zip(template, keys[2:], strict=True)
        }
        if name not in ("Bayesian SVM", "normaliser"):
            return values, simulated(model, keys[0], values)["value"], True
        # A factor, not a law of data: prior draws are accepted in proportion to what
        # it sums to over the data there may be.
        labels = jnp.array([0, 1]) if name == "Bayesian SVM" else jnp.zeros(1)
        filled = handlers.substitute(model, data=values)
        densities = []
        for label in labels:
            y = jnp.full(len(X), label)
            fn = handlers.trace(filled).get_trace(X, y)["y"]["fn"]
            densities.append(fn.log_prob(y))
        log_sum = jax.nn.logsumexp(jnp.stack(densities), 0)
        top = jnp.log1p(jnp.exp(-4.0)) if name == "Bayesian SVM" else 1 - jnp.log(1.5)
        accepted = jnp.log(jax.random.uniform(keys[0])) < (log_sum - top).sum()
        y = labels[jax.random.categorical(keys[1], jnp.stack(densities, 1))]
        return values, y, accepted

    values, y, accepted = draw(jax.random.split(key, many))
    chosen = np.flatnonzero(accepted)[:SIMULATIONS]
    assert len(chosen) == SIMULATIONS
    return jax.tree.map(lambda a: a[chosen], (values, y))


def ranks(name, key):
    """Rank of the true latents' statistics among posterior draws."""
    likelihood, num_latents = LIKELIHOODS[name]
    bound = partial(model, likelihood=likelihood, num_latents=num_latents)
    shape = {"f.v": (3,)} if num_latents != 3 else {"f.v": (3, 3)}
    if num_latents == 2:
        shape["g.v"] = (3,)
    template = {k: jnp.zeros(s) for k, s in shape.items()}
    kernel = gpaug.AugmentedGaussian(bound)
    keys = jax.random.split(key, 4)
    values, y = prior_draws(bound, name, keys[0], template)
    first = kernel.init(keys[1], 0, None, (X, y[0]), {})

    def statistics(values, y):
        trace = handlers.trace(handlers.substitute(bound, data=values)).get_trace(X, y)
        site = trace["y"]
        coordinates = [v.ravel()[:2] for v in values.values()]
        density = site["fn"].log_prob(site["value"]).sum()
        return jnp.concatenate([*coordinates, density[None]])

    @jax.jit
    @jax.vmap
    def run(key, truth, y):
        start_key, key = jax.random.split(key)
        start = {
            k: jax.random.normal(jax.random.fold_in(start_key, i), v.shape)
            for i, (k, v) in enumerate(truth.items())
        }
        state = first._replace(z={**first.z, **start}, rng_key=key)
        state = kernel.refresh(state, (X, y), {})

        def step(state, _):
            state = kernel.sample(state, (X, y), {})
            return state, statistics({k: state.z[k] for k in truth}, y)

        _, found = jax.lax.scan(step, state, None, length=BURN_IN + DRAWS * THINNING)
        kept = found[BURN_IN::THINNING]
        return (kept < statistics(truth, y)).sum(0)

    return np.asarray(run(jax.random.split(keys[2], SIMULATIONS), values, y))


def worst_p_value(ranks):
    """Of uniformity of ranks, over statistics, times their number."""
    noise = np.random.default_rng(0).random(ranks.shape)
    uniform = (ranks + noise) / (DRAWS + 1)
    p = [stats.kstest(column, "uniform").pvalue for column in uniform.T]
    return min(p) * len(p)


def test_all_augmentations_are_here() -> None:
    zeros = {None: jnp.zeros(6), 2: jnp.zeros((2, 6)), 3: jnp.zeros((6, 3))}
    classes = {type(law(zeros[n])) for law, n in LIKELIHOODS.values()}
    ours = {c for c in base._REGISTRY if c.__module__.startswith("numpyro")}
    assert all(any(issubclass(c, k) for c in classes) for k in ours)


@pytest.mark.parametrize("name", LIKELIHOODS)
def test_ranks_are_uniform(name) -> None:
    p = worst_p_value(ranks(name, jax.random.key(len(name))))
    assert p > LEVEL / len(LIKELIHOODS)


class _ThinsTheWrongEvents(poisson.LogisticPoisson):
    """Draws the thinned events with probability sigmoid(f), as a published package
    does."""

    def conditional(self, d, y, f):
        flipped = {"logits": -f["logits"]}
        return {
            "n": super().conditional(d, y, flipped)["n"],
            "omega": super().conditional(d, y, f)["omega"],
        }


def test_a_wrong_conditional_is_caught(monkeypatch) -> None:
    wrong = _ThinsTheWrongEvents()
    monkeypatch.setitem(base._REGISTRY, gpaug.LogisticPoisson, wrong)
    assert worst_p_value(ranks("logistic Poisson", jax.random.key(0))) < 1e-6


# -- joint distribution ----------------------------------------------------------------


def hierarchical(X, y=None):
    """A process with a hyperparameter, and weights."""
    lengthscale = numpyro.sample("lengthscale", dist.LogNormal(0.0, 0.5))
    weights = numpyro.sample("w", dist.Normal(jnp.ones(1), 0.5).to_event(1))
    kernel = gpaug.kernels.SquaredExponential(lengthscale, 2.0)
    f = gpaug.GaussianProcess("f", kernel, X[::2])(X)
    with numpyro.plate("data", X.shape[0]):
        numpyro.sample("y", dist.Bernoulli(logits=f + X @ weights), obs=y)


def fitted_slice(y):
    """Around any Gaussian: the target does not depend on it."""
    bound = partial(model, likelihood=LIKELIHOODS["laplace"][0])
    svi = gpaug.ConjugateSVI(bound, gpaug.AutoSparseGP(bound))
    params = svi.run(jax.random.key(3), 5, X, y, progress_bar=False).params
    return bound, gpaug.EllipticalSlice(bound, svi.guide, params)


def plain_in_gibbs():
    latents = ["f.v", "w"]
    blocks = [(gpaug.AugmentedGaussian(hierarchical), latents), (nuts(), None)]
    return hierarchical, Gibbs(blocks)


def nuts(model=hierarchical):
    return NUTS(model, step_size=0.4, max_tree_depth=2)


SAMPLERS = {
    "elliptical": lambda: fitted_slice(jnp.sin(3 * X[:, 0])),
    "plain": plain_in_gibbs,
    "collapsed": lambda: (
        hierarchical, gpaug.CollapsedGaussian(hierarchical, nuts),
    ),
}  # fmt: skip


@pytest.mark.parametrize("name", SAMPLERS)
def test_latents_keep_their_prior(name) -> None:
    target, kernel = SAMPLERS[name]()
    key = jax.random.key(7)
    template = handlers.trace(handlers.seed(target, key)).get_trace(X)
    latent = [k for k, s in template.items() if s["type"] == "sample" and k != "y"]

    def draw(key, values):
        filled = handlers.substitute(handlers.seed(target, key), data=values)
        return handlers.trace(filled).get_trace(X)

    first = kernel.init(key, 0, None, (X, template["y"]["value"]), {})

    @jax.jit
    @jax.vmap
    def run(key):
        prior_key, key = jax.random.split(key)
        prior = draw(prior_key, {})
        state = with_values(first, {k: prior[k]["value"] for k in latent}, key)

        def step(state, key):
            values = kernel.postprocess_fn((X, None), {})(state.z)
            y = draw(key, {k: values[k] for k in latent})["y"]["value"]
            state = kernel.refresh(state, (X, y), {})
            return kernel.sample(state, (X, y), {}), None

        state, _ = jax.lax.scan(step, state, jax.random.split(key, 30))
        values = kernel.postprocess_fn((X, None), {})(state.z)
        return {k: values[k] for k in latent}

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

    last = run(jax.random.split(key, SIMULATIONS))
    white = [np.asarray(last["f.v"])]
    if name != "elliptical":
        white.append((np.asarray(last["w"]) - 1.0) / 0.5)
        white.append(np.log(np.asarray(last["lengthscale"]))[:, None] / 0.5)
    p = [stats.kstest(column, "norm").pvalue for column in np.concatenate(white, 1).T]
    assert min(p) * len(p) > LEVEL / len(SAMPLERS)
