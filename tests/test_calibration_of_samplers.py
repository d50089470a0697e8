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
from numpyro.infer import HMC, NUTS, Gibbs
from scipy import stats

import numpyro_gpaug as gpaug
from numpyro_gpaug.likelihoods import contract as base
from numpyro_gpaug.likelihoods import poisson
from tests.conftest import slow

SIMULATIONS = int(os.environ.get("GPAUG_SIMULATIONS", 150))
BURN_IN, DRAWS, THINNING = 30, 15, 3
LEVEL = 0.01  # for each family of tests
X = np.linspace(-1.0, 1.0, 6, dtype=np.float32)[:, None]


def normalizer(f):
    return gpaug.LogisticNormalizer(f, 3, zeta=jnp.full(len(f), 1.5))


# By likelihood: a function of the latents, and their number per datum.
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


FACTORS = ("Bayesian SVM", "normaliser")  # factors, which are not distributions of data


def model(X, y=None, *, name):
    """The model: a sparse (projected) process. Heteroscedastic observations have two,
    for their two parameters.
    """
    kernel = gpaug.kernels.SquaredExponential(0.7, 2.0)
    likelihood, count = LIKELIHOODS[name]
    if count == 2:
        f = [gpaug.GaussianProcess(k, kernel, X[::2])(X) for k in "fg"]
    else:
        f = gpaug.GaussianProcess("f", kernel, X[::2], num_latents=count)(X)
    with numpyro.plate("data", X.shape[0]):
        numpyro.sample("y", likelihood(f), obs=y)


def traced(model, key, values, y=None):
    """The model's sites given latents."""
    filled = handlers.substitute(handlers.seed(model, key), data=values)
    return handlers.trace(filled).get_trace(X, y)


def prior_draws(model, name, key, template, num):
    """Latents and data from the joint distribution, ``num`` of them."""
    many = num * (400 if name in FACTORS else 1)

    @jax.jit
    @jax.vmap
    def draw(key):
        keys = jax.random.split(key, len(template) + 2)
        values = {
            k: jax.random.normal(x, template[k].shape)
            for k, x in zip(template, keys[2:], strict=True)
        }
        if name not in FACTORS:
            return values, traced(model, keys[0], values)["y"]["value"], True
        # A prior draw is accepted in proportion to the sum of the factor over all
        # possible data.
        labels = jnp.array([0, 1]) if name == "Bayesian SVM" else jnp.zeros(1)
        densities = []
        for label in labels:
            y = jnp.full(len(X), label)
            fn = traced(model, keys[0], values, y)["y"]["fn"]
            densities.append(fn.log_prob(y))
        log_sum = jax.nn.logsumexp(jnp.stack(densities), 0)
        top = jnp.log1p(jnp.exp(-4.0)) if name == "Bayesian SVM" else 1 - jnp.log(1.5)
        accepted = jnp.log(jax.random.uniform(keys[0])) < (log_sum - top).sum()
        y = labels[jax.random.categorical(keys[1], jnp.stack(densities, 1))]
        return values, y, accepted

    *drawn, accepted = jax.device_get(draw(jax.random.split(key, many)))
    chosen = np.flatnonzero(accepted)[:num]
    assert len(chosen) == num
    return jax.tree.map(lambda a: a[chosen], drawn)


def ranks(name, key):
    """Return the ranks of the true latents' statistics among posterior draws."""
    bound, count = partial(model, name=name), LIKELIHOODS[name][1]
    shape = {"f.v": (3, 3) if count == 3 else (3,)}
    if count == 2:
        shape["g.v"] = (3,)
    template = {k: np.zeros(s, np.float32) for k, s in shape.items()}
    kernel = gpaug.AugmentedGaussian(bound)
    keys = jax.random.split(key, 3)
    values, y = prior_draws(bound, name, keys[0], template, SIMULATIONS)

    def statistics(values, y):
        trace = traced(bound, keys[1], values, y)
        coordinates = [v.ravel()[:2] for v in values.values()]
        density = trace["y"]["fn"].log_prob(y).sum()
        return jnp.concatenate([*coordinates, density[None]])

    @jax.jit
    @jax.vmap
    def run(key, truth, y):
        start_key, key = jax.random.split(key)
        start = {
            k: jax.random.normal(jax.random.fold_in(start_key, i), v.shape)
            for i, (k, v) in enumerate(truth.items())
        }
        state = kernel.init(key, 0, start, (X, y), {})

        def step(state, _):
            state = kernel.sample(state, (X, y), {})
            return state, {k: state.z[k] for k in truth}

        _, found = jax.lax.scan(step, state, None, length=BURN_IN + DRAWS * THINNING)

        def with_truth(truth, found):
            return jnp.concatenate([truth[None], found[BURN_IN::THINNING]])

        among = jax.vmap(statistics, (0, None))(
            jax.tree.map(with_truth, truth, found), y
        )
        return (among[1:] < among[0]).sum(0), (among[1:] == among[0]).sum(0)

    below, ties = jax.device_get(run(jax.random.split(keys[2], SIMULATIONS), values, y))
    # A hinge that no datum reaches is exactly zero, in the truth and in draws.
    return below + np.random.default_rng(1).integers(0, ties + 1)


def worst_p_value(ranks):
    """Return the smallest p-value of uniformity over statistics, times their number."""
    noise = np.random.default_rng(0).random(ranks.shape)
    uniform = (ranks + noise) / (DRAWS + 1)
    p = [stats.kstest(column, "uniform").pvalue for column in uniform.T]
    return min(p) * len(p)


def test_all_augmentations_are_here() -> None:
    zeros = {None: np.zeros(6), 2: np.zeros((2, 6)), 3: np.zeros((6, 3))}
    classes = {type(d(zeros[n])) for d, n in LIKELIHOODS.values()}
    ours = {c for c in base._AUGMENTATIONS if c.__module__.startswith("numpyro")}
    assert all(any(issubclass(c, k) for c in classes) for k in ours)


@pytest.mark.slow  # every conditional is quick in test_augmentations.py
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


@pytest.mark.slow
def test_a_wrong_conditional_is_caught(monkeypatch) -> None:
    wrong = _ThinsTheWrongEvents()
    monkeypatch.setitem(base._AUGMENTATIONS, gpaug.LogisticPoisson, wrong)
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
