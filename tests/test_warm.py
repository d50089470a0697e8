# SPDX-License-Identifier: Apache-2.0
"""Fits of known shapes compile nothing, and check all arguments."""

import pickle

import jax
import jax.numpy as jnp
import numpy as np
import numpyro
import numpyro.distributions as dist
import pytest

import numpyro_gpaug as gpaug
from numpyro_gpaug.model.arguments import Arguments
from tests import conftest

GROUP = np.repeat(np.arange(4), 4)
Y = np.random.default_rng(0).normal(size=16) + GROUP


def model(y, group):
    level = numpyro.sample("level", dist.Normal(0, 3))
    with numpyro.plate("groups", 4):
        effect = numpyro.sample("effect", dist.Normal(0, 2))
    with numpyro.plate("data", len(y)):
        numpyro.sample("y", dist.Normal(level + effect[group], 0.5), obs=y)


def learnt(y, group):
    level = numpyro.sample("level", dist.Normal(0, 3))
    sd = numpyro.sample("sd", dist.HalfNormal(1))
    with numpyro.plate("groups", 4):
        effect = numpyro.sample("effect", dist.Normal(level, sd))
    with numpyro.plate("data", len(y)):
        numpyro.sample("y", dist.Normal(2 * effect[group], 0.5), obs=y)


@pytest.fixture(scope="module")
def svi():
    made = gpaug.ConjugateSVI(model, gpaug.AutoLatentGaussian(model))
    moments(run(made, Y, GROUP)[1])
    return made


def moments(posterior):
    distributions = [posterior[k] for k in ("level", "effect")]
    return [np.asarray(x) for d in distributions for x in (d.mean, d.variance)]


def run(svi, y, group, **how):
    key = jax.random.key(0)
    fit = svi.run(key, 20, y=y, group=group, progress_bar=False, tol=1e-4, **how)
    return fit, svi.posterior(fit)


def test_a_second_fit_compiles_nothing(svi) -> None:
    before = len(conftest._COMPILED)
    _, posterior = run(svi, Y + 1, GROUP[::-1].copy())
    found = moments(posterior)
    assert conftest._COMPILED[before:] == []
    assert all(np.isfinite(x).all() for x in found)


def test_gaussian_data_take_one_step(svi) -> None:
    fit, posterior = run(svi, Y, GROUP)
    assert len(fit.losses) == 1
    assert fit.stopped
    design = np.concatenate([np.ones((16, 1)), np.eye(4)[GROUP]], 1)
    precision = design.T @ design / 0.25 + np.diag([1 / 9, *[1 / 4] * 4])
    mean = np.linalg.solve(precision, design.T @ Y / 0.25)
    found = np.append(posterior["level"].mean, posterior["effect"].mean)
    np.testing.assert_allclose(found, mean, rtol=1e-4, atol=1e-4)
    again, _ = run(svi, Y, GROUP, init_state=fit.state)
    np.testing.assert_allclose(again.losses, fit.losses, rtol=1e-5)


def test_repeated_and_divided_fits_are_equal() -> None:
    svi = gpaug.ConjugateSVI(learnt, gpaug.AutoLatentGaussian(learnt))
    found = []
    for _ in range(2):
        fit, posterior = run(svi, Y, GROUP)
        found.append([fit.losses, *jax.tree.leaves(fit.params), *moments(posterior)])
    for first, second in zip(*found, strict=True):
        np.testing.assert_array_equal(first, second)
    short = svi.run(jax.random.key(0), 3, y=Y, group=GROUP, progress_bar=False)
    rest = svi.run(
        jax.random.key(0), 2, y=Y, group=GROUP, progress_bar=False,
        init_state=short.state,
    )  # fmt: skip
    divided = np.concatenate([short.losses, rest.losses])
    np.testing.assert_array_equal(divided, found[0][0][:5])
    kept = pickle.loads(pickle.dumps(fit))
    np.testing.assert_array_equal(kept.losses, fit.losses)


def test_posteriors_are_of_the_params_that_a_result_has() -> None:
    svi = gpaug.ConjugateSVI(learnt, gpaug.AutoLatentGaussian(learnt))
    fit, posterior = run(svi, Y, GROUP)
    before = moments(posterior)
    fit.params["sd_auto_loc"] = 3 * fit.params["sd_auto_loc"]
    again = svi.posterior(fit), svi.posterior(dict(fit.params), y=Y, group=GROUP)
    for moved, same in zip(*map(moments, again), strict=True):
        np.testing.assert_array_equal(moved, same)
    assert np.abs(moments(again[0])[2] - before[2]).max() > 0.1


def test_every_fit_is_checked(svi) -> None:
    with pytest.raises(ValueError, match="'effect' has 4 members.*1 to 4"):
        run(svi, Y, GROUP + 1)
    with pytest.raises(ValueError, match="1 NaN"):
        run(svi, np.where(np.arange(16) == 3, np.nan, Y), GROUP)


def test_a_latent_has_its_covariance_when_asked(svi) -> None:
    _, posterior = run(svi, Y, GROUP)
    marginal = posterior["effect"]
    assert {"scale_tril", "_covariance"}.isdisjoint(vars(marginal))
    whole = marginal.covariance_matrix
    np.testing.assert_allclose(jnp.diagonal(whole), marginal.variance, rtol=1e-5)
    plain = dist.MultivariateNormal(marginal.mean, whole)
    point, key = marginal.mean + 0.3, jax.random.key(1)
    np.testing.assert_allclose(
        marginal.log_prob(point), plain.log_prob(point), rtol=1e-4
    )
    kept = pickle.loads(pickle.dumps(marginal))
    np.testing.assert_array_equal(kept.scale_tril, marginal.scale_tril)
    leaves, tree = jax.tree.flatten(posterior["effect"])
    same = jax.tree.unflatten(tree, leaves)
    drawn = [jax.jit(lambda d: d.sample(key, (3,)))(d) for d in (marginal, same, plain)]
    np.testing.assert_allclose(drawn[0], drawn[1])
    np.testing.assert_allclose(drawn[0], drawn[2], atol=1e-4)


def test_arrays_that_change_are_not_seen() -> None:
    for size in (8, 2**15):
        given = np.arange(size, dtype=float)
        kept = Arguments.split((given,), {})
        given[:] = -1
        assert (np.asarray(kept.arrays[0]) == np.arange(size)).all()
        assert kept.arrays[0].dtype == jnp.result_type(float)
        ((merged,), _) = kept.merge()
        assert isinstance(merged, jax.Array)
