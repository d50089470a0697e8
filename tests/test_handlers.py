# SPDX-License-Identifier: Apache-2.0
"""NumPyro's handlers around a model: scale, mask, scope, substitute, condition."""

from functools import cache

import jax
import jax.numpy as jnp
import numpy as np
import numpyro
import numpyro.distributions as dist
import pytest
from jax import random
from numpyro import handlers
from numpyro.infer import Predictive

import numpyro_gpaug as gpaug
from tests.models import LENGTHSCALE, blocks_of, brute_bound, classifier, projection
from tests.routes import (
    KEY,
    NEW,
    ONE,
    SLOW_THREE,
    conjugate,
    fitted,
    loss_at,
    posterior_of,
    problem,
    rerun,
    spread_params,
)

pytestmark = pytest.mark.usefixtures("x64")


# Scales of the whole model.


@pytest.mark.parametrize("num_latents", [ONE, SLOW_THREE])
def test_scale_of_the_model_multiplies_every_term(num_latents):
    args, kwargs = problem(num_latents)
    guide, params = spread_params(num_latents, "dense")
    loss = gpaug.TraceAnalytic_ELBO()
    once = loss_at(loss, params, guide, args, kwargs)
    scaled = handlers.scale(classifier, scale=2.5)
    np.testing.assert_allclose(
        loss_at(loss, params, guide, args, kwargs, scaled), 2.5 * once
    )
    svi, result = conjugate(args, kwargs, model=scaled)
    closed = fitted(num_latents)[1]
    np.testing.assert_allclose(result.losses[-1], 2.5 * closed.losses[-1], rtol=1e-8)
    for name, value in closed.params.items():
        np.testing.assert_allclose(result.params[name], value, rtol=1e-4, atol=1e-5)


# Weights and masks: one program for every fit with both.


@cache
def weighted(num_latents):
    svi = gpaug.ConjugateSVI(classifier, gpaug.AutoSparseGP(classifier), None)

    def run(X, y, weights=None, mask=None):
        weights = np.ones(len(X)) if weights is None else weights
        mask = np.ones(len(X), bool) if mask is None else mask
        kwargs = {**problem(num_latents)[1], "weights": weights, "mask": mask}
        return rerun(svi, (X, y), kwargs)

    return svi.guide, run


@pytest.mark.parametrize("num_latents", [ONE, SLOW_THREE])
def test_scale_per_datum_weights_its_term(num_latents):
    weights = np.linspace(0.5, 2, 24)
    (X, y), kwargs = problem(num_latents)
    X, y = np.asarray(X), np.asarray(y)
    guide, run = weighted(num_latents)
    result = run(X, y, weights)
    q = blocks_of(guide, result.params)
    expected = brute_bound(X, y, kwargs["inducing"], q, weights=weights)
    np.testing.assert_allclose(-result.losses[-1], expected, rtol=1e-9)
    # A datum with weight 2 equals two copies; the second replaces the last row.
    double, rows = np.ones(24), np.arange(24)
    double[5], rows[-1] = 2.0, 5
    one = run(X, y, double, np.arange(24) < 23)
    other = run(X[rows], y[rows])
    np.testing.assert_allclose(one.losses[-1], other.losses[-1], rtol=1e-9)
    for name, value in other.params.items():
        np.testing.assert_allclose(one.params[name], value, rtol=1e-4, atol=1e-6)
    assert abs(one.losses[-1] - fitted(num_latents)[1].losses[-1]) > 0.01


@pytest.mark.parametrize("num_latents", [ONE, SLOW_THREE])
def test_a_masked_datum_is_a_deleted_one(num_latents):
    (X, y), _ = problem(num_latents)
    X, y = np.asarray(X), np.array(y)
    keep = ~np.isin(np.arange(24), [3, 4])
    _, run = weighted(num_latents)
    masked, deleted = run(X, y, mask=keep), run(X[keep], y[keep])
    np.testing.assert_allclose(masked.losses, deleted.losses, rtol=1e-9)
    for name, value in deleted.params.items():
        np.testing.assert_allclose(masked.params[name], value, rtol=1e-6, atol=1e-8)
    # The masked label is not read.
    y[3] = 7
    again = run(X, y, mask=keep)
    np.testing.assert_allclose(again.losses, masked.losses, rtol=1e-12)


def test_mask_and_weights_follow_their_rows_into_batches():
    (X, y), kwargs = problem(None)
    weights, mask = np.linspace(0.5, 2, 24), np.arange(24) % 5 != 0
    given = {"weights": jnp.asarray(weights), "mask": jnp.asarray(mask)}
    kwargs = {**kwargs, **given}
    loss = gpaug.TraceAnalytic_ELBO()
    guide, params = spread_params(None, "dense")
    full = loss_at(loss, params, guide, (X, y), kwargs)
    q = blocks_of(guide, params)
    expected = brute_bound(X, y, kwargs["inducing"], q, weights=weights * mask)
    np.testing.assert_allclose(-full, expected, rtol=1e-9)

    @jax.jit
    def at_batch(idx):
        chosen = handlers.substitute(classifier, data={"data": idx})
        batched = {**kwargs, "batch_size": 8}
        return loss.loss(random.key(KEY), params, chosen, guide, X, y, **batched)

    order = np.random.default_rng(2).permutation(24).reshape(3, 8)
    batches = [at_batch(idx) for idx in order]
    np.testing.assert_allclose(np.mean(batches), full, rtol=1e-11)


def test_scope_only_renames():
    args, kwargs = problem(None)
    scoped = handlers.scope(classifier, prefix="a")
    svi, result = conjugate(args, {**kwargs, "learn": True}, model=scoped)
    plain = fitted(None)[1]
    np.testing.assert_allclose(result.losses, plain.losses, rtol=1e-11)
    names = {f"a/{name}" for name in (*plain.params, "lengthscale")}
    assert set(result.params) == names
    np.testing.assert_allclose(result.params["a/lengthscale"], LENGTHSCALE)
    for name, value in plain.params.items():
        np.testing.assert_allclose(result.params[f"a/{name}"], value, rtol=1e-9)
    f = svi.posterior(result).predict_f(NEW)
    reference = posterior_of(None).predict_f(NEW)
    np.testing.assert_allclose(f.mean, reference.mean, rtol=1e-7, atol=1e-9)
    draws = jax.eval_shape(
        lambda X: Predictive(scoped, num_samples=2)(random.key(0), X, **kwargs), NEW
    )
    assert set(draws) == {"a/f", "a/f.v", "a/y"}


def test_two_scopes_of_one_process_do_not_mix():
    (X, y), kwargs = problem(None)

    def model(X, y=None):
        for prefix in "ab":
            handlers.scope(classifier, prefix=prefix)(X, y, **kwargs)

    svi, result = conjugate((X, y), {}, model=model)
    once = fitted(None)[1].losses[-1]
    np.testing.assert_allclose(result.losses[-1], 2 * once, rtol=1e-9)
    potentials = [result.params[f"{p}/f.v_auto_potential"] for p in "ab"]
    np.testing.assert_allclose(potentials[0], potentials[1], rtol=1e-9)


def test_substitute_fixes_a_hyperparameter():
    (X, y), kwargs = problem(None)
    fixed = handlers.substitute(classifier, data={"lengthscale": np.asarray(0.5)})
    result = conjugate((X, y), {**kwargs, "learn": True}, model=fixed)[1]
    svi, other = fitted(None)
    constant = rerun(svi, (X, y), {**other.kwargs, "lengthscale": np.asarray(0.5)})
    np.testing.assert_allclose(result.losses, constant.losses, rtol=1e-10)
    assert abs(result.losses[-1] - other.losses[-1]) > 0.01


def test_substitute_of_the_inducing_values():
    kwargs = problem(None)[1]
    v = np.random.default_rng(5).normal(size=6)
    held = handlers.substitute(classifier, data={"f.v": jnp.asarray(v)})
    mean_only = gpaug.with_residual(handlers.seed(held, 0), "mean")
    f = jax.jit(
        lambda X: handlers.trace(mean_only).get_trace(X, **kwargs)["f"]["value"]
    )(NEW)
    A, _ = projection(NEW, kwargs["inducing"])
    np.testing.assert_allclose(f, A.T @ v, rtol=1e-9)


def test_condition_on_the_inducing_values_leaves_no_block():
    args, kwargs = problem(None)
    v = np.random.default_rng(5).normal(size=6)
    held = handlers.condition(classifier, data={"f.v": v})
    with pytest.raises(ValueError, match="no Gaussian process"):
        conjugate(args, kwargs, model=held)


def test_codes_index_values_that_are_conditioned_on():
    def grouped(group, y):
        effect = numpyro.sample("effect", dist.Normal(0, 1).expand([3]).to_event(1))
        level = numpyro.sample("level", dist.Normal(0, 1))
        with numpyro.plate("data", len(group)):
            numpyro.sample("y", dist.Normal(level + effect[group], 1), obs=y)

    held = handlers.condition(grouped, data={"effect": np.array([0.0, 1.0, 4.0])})
    svi = gpaug.ConjugateSVI(held, gpaug.AutoLatentGaussian(held))
    group, y = np.array([2, 0, 1]), np.array([5.0, 0.0, 1.0])
    fit = svi.run(random.key(KEY), 1, group, y, progress_bar=False)
    # The three residuals are 1, 0 and 0.
    np.testing.assert_allclose(svi.posterior(fit)["level"].mean, 1 / 4)
