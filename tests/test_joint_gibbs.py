# SPDX-License-Identifier: Apache-2.0
"""Gibbs sampling by augmentation of all Gaussian latents of a model, jointly."""

import pickle
from functools import partial

import jax
import jax.numpy as jnp
import numpy as np
import numpyro
import numpyro.distributions as dist
import pytest
from numpyro import handlers
from numpyro.infer import MCMC
from numpyro.infer.gibbs import GIBBS_SITES_KWARG, conditioned

import numpyro_gpaug as gpaug
from numpyro_gpaug.infer.mcmc import gibbs
from numpyro_gpaug.model import costs
from tests.chains import assert_same_distribution, importance_draws, many_chains
from tests.conftest import slow
from tests.test_joint_slices import GROUP, GROUPS, TAU, N, X, given, mixed

KEY = jax.random.key(0)
RNG = np.random.default_rng(0)
LABELS = (RNG.normal(size=N) + X > 0).astype(int)
REALS = X + 0.5 * RNG.standard_t(3, N)


def logistic(eta):
    return dist.Bernoulli(logits=eta)


def robust(eta):
    return dist.StudentT(4.0, eta, 0.5)


def log_density(z, data):
    """Return the log-density of slope, level and effects, at rows, by NumPy alone."""
    beta, level, effect = z[:, :1], z[:, 1:2], z[:, 2:]
    prior = beta[:, 0] ** 2 + level[:, 0] ** 2 / 4
    prior += (((effect - level) / TAU) ** 2).sum(1)
    return data(beta * X + effect[:, GROUP]).sum(1) - 0.5 * prior


@pytest.mark.parametrize(
    ("likelihood", "y", "data"),
    [
        slow(logistic, LABELS, lambda f: -np.logaddexp(0, (1 - 2 * LABELS) * f)),
        (robust, REALS, lambda f: -2.5 * np.log1p((REALS - f) ** 2)),
    ],
)
def test_mixed_models_are_sampled_exactly(likelihood, y, data) -> None:
    z = importance_draws(partial(log_density, data=data), 2 + GROUPS)
    found = many_chains(
        gpaug.AugmentedGaussian(given), (X, GROUP, y), {"likelihood": likelihood}
    )
    truth = {"beta": z[:, 0], "level": z[:, 1], "effect": z[:, 2:]}
    assert_same_distribution(found, truth, *truth)
    eta = found["beta"][:, None] * X + found["effect"][:, GROUP]
    np.testing.assert_allclose(found["eta"], eta, atol=1e-5)


STEPS, SUBJECTS = 40, 50
TIME = np.arange(60) * 7 % STEPS
SUBJECT = np.arange(150) % SUBJECTS


def walk(t, y=None):
    """Steps that follow each other, and a slope."""
    beta = numpyro.sample("beta", dist.Normal(0, 1))
    level = numpyro.sample("level", dist.GaussianRandomWalk(0.3, STEPS))
    eta = numpyro.deterministic("eta", level[t] + beta * (t % 3))
    with numpyro.plate("data", len(t)):
        numpyro.sample("y", dist.Normal(eta, 0.5), obs=y)


def subjects(t, y=None):
    """Groups around a level."""
    level = numpyro.sample("level", dist.Normal(0, 1))
    with numpyro.plate("subjects", SUBJECTS):
        effect = numpyro.sample("effect", dist.Normal(level, 0.3))
    eta = numpyro.deterministic("eta", effect[t])
    with numpyro.plate("data", len(t)):
        numpyro.sample("y", dist.Normal(eta, 0.5), obs=y)


def covariance(model, t):
    """Return the covariance of predictors under the prior."""
    if model is subjects:
        return 1 + 0.3**2 * (t[:, None] == t)
    steps = 0.3**2 * (1 + np.minimum(t[:, None], t))
    return steps + np.outer(t % 3, t % 3)


@pytest.mark.parametrize(("model", "t"), [(walk, TIME), (subjects, SUBJECT)])
def test_a_step_with_gaussian_noise_is_a_draw_of_the_posterior(
    model, t, x64, monkeypatch
) -> None:
    """This holds for every structure: along a chain, and group by group."""
    y = RNG.normal(size=len(t))
    kernel, count = gpaug.AugmentedGaussian(model), 2000
    monkeypatch.setattr(costs, "_OVERHEAD", 0)

    @jax.jit
    def draws(keys):
        state = kernel.init(KEY, 0, None, (t, y), {})

        def one(key):
            return kernel.sample(state._replace(rng_key=key), (t, y), {}).z["eta"]

        return jax.vmap(one)(keys)

    found = np.asarray(draws(jax.random.split(KEY, count)))
    (part,) = kernel._parts
    assert not part.structure.form.any_rows
    assert bool(part.structure.recurrences) == (model is walk)
    prior = covariance(model, t)
    gain = prior @ np.linalg.inv(prior + 0.25 * np.eye(len(t)))
    cover, mean = prior - gain @ prior, gain @ y
    sd = np.sqrt(np.diag(cover))
    assert np.abs((found.mean(0) - mean) / sd).max() < 5 / np.sqrt(count)
    apart = np.abs(np.cov(found.T) - cover) / np.outer(sd, sd)
    assert apart.max() < 6 * np.sqrt(2 / count)


@pytest.mark.parametrize("model", [given, slow(mixed, id="beside NUTS")])
def test_runs_are_pickled_and_go_on(model) -> None:
    mcmc = MCMC(
        gpaug.AugmentedGaussian(model), num_warmup=1, num_samples=2, progress_bar=False
    )
    mcmc.run(KEY, X, GROUP, LABELS, likelihood=logistic)
    again = pickle.loads(pickle.dumps(mcmc))
    for each in (mcmc, again):
        each.post_warmup_state = each.last_state
        each.run(KEY, X, GROUP, LABELS, likelihood=logistic)
    jax.tree.map(np.testing.assert_array_equal, again.get_samples(), mcmc.get_samples())


@pytest.mark.parametrize(("model", "t"), [(walk, TIME), slow(subjects, SUBJECT)])
def test_other_blocks_leave_values_as_they_are(model, t, x64, monkeypatch) -> None:
    monkeypatch.setattr(costs, "_OVERHEAD", 0)

    def scaled(t, y=None):
        scale = numpyro.sample("scale", dist.LogNormal(0, 1))
        with handlers.scope(prefix="in", divider="/"):
            model(t, y)
        numpyro.deterministic("scaled", scale)

    kernel = gpaug.AugmentedGaussian(scaled).wrap_model(conditioned)
    y = RNG.normal(size=len(t))
    here, there = ({GIBBS_SITES_KWARG: {"scale": jnp.array(s)}} for s in (0.5, 2.0))

    @jax.jit
    def before_and_after():
        state = kernel.init(KEY, 0, None, (t, y), here)
        return state, kernel.refresh(state, (t, y), there)

    before, after = before_and_after()
    assert bool(kernel._parts[0].structure.recurrences) == (model is walk)
    for name in ("in/level", "in/eta"):
        np.testing.assert_allclose(after.z[name], before.z[name], atol=1e-9)
    np.testing.assert_allclose(after.latents, before.latents, atol=1e-9)


def test_more_latents_than_a_matrix_may_have_rows_need_few_data(
    x64, monkeypatch
) -> None:
    """Draws then factorise a matrix with a row for each datum."""
    monkeypatch.setattr(gibbs, "SAMPLE", costs.SAMPLE._replace(largest=50))
    monkeypatch.setattr(costs, "_OVERHEAD", 0)
    size, num, noise = 60, 5, 0.1
    design = RNG.normal(size=(num, size)) / np.sqrt(size)
    y = RNG.normal(size=num)

    def wide(design, y=None):
        w = numpyro.sample("w", dist.Normal().expand([size]).to_event(1))
        eta = numpyro.deterministic("eta", design @ w)
        with numpyro.plate("data", len(design)):
            numpyro.sample("y", dist.Normal(eta, noise), obs=y)

    kernel = gpaug.AugmentedGaussian(wide)
    with pytest.raises(gpaug.NotConjugateError, match="At most 50"):
        kernel.init(KEY, 0, None, (np.tile(design, (12, 1)), np.tile(y, 12)), {})

    @jax.jit
    def draws(key):
        state = kernel.init(key, 0, None, (design, y), {})

        def step(state, _):
            state = kernel.sample(state, (design, y), {})
            return state, state.z["eta"]

        return jax.lax.scan(step, state, None, length=500)[1]

    found, prior = np.asarray(draws(KEY)), design @ design.T
    gain = prior @ np.linalg.inv(prior + noise**2 * np.eye(num))
    sd = np.sqrt(np.diag(prior - gain @ prior))
    assert np.abs((found.mean(0) - gain @ y) / sd).max() < 4.5 / np.sqrt(500)
    np.testing.assert_allclose(found.std(0), sd, rtol=0.15)


def test_hyperparameters_are_another_block_of_gibbs() -> None:
    kernel, given = gpaug.AugmentedGaussian(mixed), (X, GROUP, LABELS)
    ours, theirs = jax.eval_shape(
        lambda key: (
            kernel.init(key, 0, None, given, {"likelihood": logistic}).block_states
        ),
        KEY,
    )
    assert {"beta", "level", "effect"} <= ours.z.keys()
    assert set(theirs.z) == {"tau"}


def test_what_has_no_augmentation_is_named() -> None:
    def init(model, likelihood, **how):
        y = LABELS if likelihood is not robust else REALS
        kernel = gpaug.AugmentedGaussian(model)
        given = (X, GROUP, y), {"likelihood": likelihood, **how}
        jax.eval_shape(lambda key: kernel.init(key, 0, None, *given), KEY)

    with pytest.raises(gpaug.NotConjugateError, match="Bernoulli.logits=eta"):
        init(given, lambda eta: dist.Poisson(jnp.exp(eta)))
    # NumPyro also stores exp(-logits).
    init(given, lambda eta: dist.NegativeBinomialLogits(3.0, eta))
    with pytest.raises(gpaug.NotConjugateError, match="scaled"):
        init(handlers.scale(given, 0.5), robust)
