# SPDX-License-Identifier: Apache-2.0
"""Latents along time written as NumPyro's ``scan`` and ``GaussianStateSpace``: fitted
and forecast as the Gaussians that they are, or refused by name."""

import jax
import jax.numpy as jnp
import numpy as np
import numpyro
import numpyro.distributions as dist
import pytest
from numpyro.contrib.control_flow import scan
from scipy import stats

import numpyro_gpaug as gpaug
from numpyro_gpaug.model import costs
from numpyro_gpaug.model.program import Program
from tests.conftest import slow

STEPS, PHI, SCALE, NOISE = 30, 0.8, 0.5, 0.4
TIMES = np.arange(STEPS)
REAL = np.random.default_rng(0).normal(size=STEPS)


def scanned(t, y=None, *, phi):
    """Observed as it is scanned; the first state is a latent of its own."""
    first = numpyro.sample("first", dist.Normal(0, 1))

    def step(x, y):
        x = numpyro.sample("x", dist.Normal(phi * x, SCALE))
        numpyro.sample("y", dist.Normal(x, NOISE), obs=y)
        return x, x

    _, x = scan(step, first, y, length=len(t))
    numpyro.deterministic("eta", x[t])


def autoregressive(t, y=None):
    matrices = {"transition_matrix": [[PHI]], "scale_tril": [[SCALE]]}
    first = numpyro.sample("first", dist.Normal(0, 1))
    matrices = {k: jnp.array(x) for k, x in matrices.items()}
    d = dist.GaussianStateSpace(STEPS, initial_value=first[None], **matrices)
    x = numpyro.sample("x", d)[:, 0]
    with numpyro.plate("data", STEPS):
        numpyro.sample("y", dist.Normal(x, NOISE), obs=y)


def trend(t, y=None):
    """A level and its slope, which walk."""
    transition = jnp.array([[1.0, 1.0], [0.0, 1.0]])
    factor = jnp.array([[0.3, 0.0], [0.1, 0.2]])
    d = dist.GaussianStateSpace(STEPS, transition, scale_tril=factor)
    x = numpyro.sample("x", d)[:, 0]
    with numpyro.plate("data", STEPS):
        numpyro.sample("y", dist.Normal(x, NOISE), obs=y)


def cover(transition, innovations, first, steps=STEPS):
    """Covariance (steps, D, steps, D) of states, step by step."""
    size = len(transition)
    found = np.zeros((steps, size, steps, size))
    own = first
    for t in range(steps):
        own = transition @ own @ transition.T + innovations
        ahead = own
        for s in range(t, steps):
            found[s, :, t], found[t, :, s] = ahead, ahead.T
            ahead = transition @ ahead
    return found


def fitted(model, **kwargs):
    svi = gpaug.ConjugateSVI(model, gpaug.AutoLatentGaussian(model), optim=None)
    fit = svi.run(jax.random.key(0), 10, TIMES, REAL, progress_bar=False, **kwargs)
    return svi, fit


SQUARE = np.array([[SCALE**2]])
NOISY = np.array([[0.3, 0.0], [0.1, 0.2]])
MODELS = {
    "autoregressive": (autoregressive, {}, ([[PHI]], SQUARE, np.eye(1)), "1 (x), 1"),
    "trend": (
        trend, {}, ([[1, 1], [0, 1]], NOISY @ NOISY.T, np.zeros((2, 2))), "2 (x), 0",
    ),
    "scanned": (scanned, {"phi": PHI}, ([[PHI]], SQUARE, np.eye(1)), "1 (x), 1"),
    "walk": (scanned, {"phi": 1.0}, ([[1.0]], SQUARE, np.eye(1)), "1 (x), 1"),
}  # fmt: skip


@pytest.mark.parametrize(
    "name",
    [slow(n) for n in MODELS if n != "scanned"] + ["scanned"],
)
def test_evidence_and_forecasts_are_exact(x64, monkeypatch, name):
    model, kwargs, (transition, innovations, first), form = MODELS[name]
    monkeypatch.setattr(costs, "_OVERHEAD", -np.inf)
    svi, fit = fitted(model, **kwargs)
    assert f"a chain of 30 steps of {form} others" in repr(svi.guide)
    ahead = STEPS + 5
    prior = cover(np.array(transition), innovations, first, ahead)[:, 0, :, 0]
    past = prior[:STEPS, :STEPS] + NOISE**2 * np.eye(STEPS)
    evidence = stats.multivariate_normal(np.zeros(STEPS), past).logpdf(REAL)
    np.testing.assert_allclose(-fit.losses[-1], evidence, rtol=1e-9)
    if model is not scanned:
        return
    found = svi.posterior(fit).predict_f(np.arange(ahead), **kwargs, site="eta")
    gain = np.linalg.solve(past, prior[:STEPS]).T
    np.testing.assert_allclose(found.mean, gain @ REAL, rtol=1e-6)
    variance = np.diag(prior - gain @ prior[:STEPS])
    np.testing.assert_allclose(found.variance, variance, rtol=1e-6)


@pytest.mark.slow
def test_draws_of_a_scan_go_back_into_it(x64, monkeypatch):
    """Draws are sites of NumPyro's own programs, in their shapes."""
    monkeypatch.setattr(costs, "_OVERHEAD", -np.inf)
    svi, fit = fitted(scanned, phi=PHI)
    predictive = numpyro.infer.Predictive(
        scanned, guide=svi.guide, params=fit.params, num_samples=2000
    )
    draws = predictive(jax.random.key(1), TIMES, phi=PHI)
    assert draws["y"].shape == (2000, STEPS)
    x = svi.posterior(fit)["x"]
    np.testing.assert_allclose(draws["y"].mean(0), x.mean, atol=0.08)
    spread = np.sqrt(x.variance + NOISE**2)
    np.testing.assert_allclose(draws["y"].std(0), spread, rtol=0.1)


COUNTS = np.arange(STEPS) % 3


def rates(where):
    """The model: a level and its rate, which is observed in the scan, after it, or by
    another rate there. The scan carries it though nothing reads it.
    """

    def model(y=None):
        scale = numpyro.sample("scale", dist.HalfNormal(1))
        first = numpyro.sample("first", dist.Normal(0, 1))

        def step(carried, y):
            x = numpyro.sample("x", dist.Normal(PHI * carried[0], scale))
            rate = jnp.exp(x)
            if where == "inside":
                numpyro.sample("y", dist.Poisson(rate), obs=y)
            return (x, rate if where == "after" else 0.0), (x, rate)

        y_inside = y if where == "inside" else None
        _, (x, rate) = scan(step, (first, 1.0), y_inside, length=STEPS)
        numpyro.deterministic("rate", rate)
        if where != "inside":
            rate = rate if where == "returned" else jnp.exp(x)
            with numpyro.plate("data", STEPS):
                numpyro.sample("y", dist.Poisson(rate), obs=y)

    return model


@pytest.mark.parametrize(
    "where",
    [
        "inside",
        *(slow(w) for w in ("after", "returned")),
    ],
)
def test_what_steps_make_of_their_states_may_be_looked_at(monkeypatch, where):
    monkeypatch.setattr(costs, "_OVERHEAD", -np.inf)
    guide = gpaug.AutoLatentGaussian(rates(where)).setup(COUNTS)
    assert "a chain of 30 steps of 1 (x), 1 others" in repr(guide)
    assert "observed, in closed form" in repr(guide)


def test_a_scan_over_a_call_that_vmap_scans_stays_whole():
    """A Cholesky factorisation of each of several matrices is such a scan."""
    call = jax.vmap(jax.custom_batching.sequential_vmap(jnp.exp))
    program = Program(lambda values: call(values["z"]), {"z": jnp.ones(3)})
    assert program.makers[program.outputs.variable].eqn.primitive.name == "scan"


def test_what_is_carried_is_affine():
    def growing(y=None):
        _, x = scan(
            lambda x, _: (numpyro.sample("x", dist.Normal(x * x, SCALE)),) * 2,
            0.5, None, length=STEPS,
        )  # fmt: skip
        with numpyro.plate("data", STEPS):
            numpyro.sample("y", dist.Normal(x, NOISE), obs=y)

    with pytest.raises(
        gpaug.NotConjugateError, match="scan .*mixes .* state of a scan"
    ):
        gpaug.AutoLatentGaussian(growing).setup(REAL)


@pytest.mark.slow
def test_what_a_scan_observed_is_replicated_step_by_step():
    def model(y=None):
        def step(x, y):
            x = numpyro.sample("x", dist.Normal(PHI * x, SCALE))
            numpyro.sample("y", dist.StudentT(5.0, x, NOISE), obs=y)
            return x, None

        scan(step, 0.0, y)

    nested = gpaug.NestedVI(model, num_points=64, progress_bar=False)
    nested.run(jax.random.key(0), REAL)
    tree = gpaug.diagnostics.to_datatree(jax.random.key(0), nested)
    noise = (tree["posterior_predictive"]["y"].values - tree["posterior"]["x"].values)[
        0
    ]
    assert noise.shape == (1000, STEPS)
    np.testing.assert_allclose(noise.std(), NOISE * np.sqrt(5 / 3), rtol=0.05)
    apart = np.corrcoef(noise.T) - np.eye(STEPS)
    assert abs(apart).max() < 0.2


@pytest.mark.slow
def test_a_walk_goes_on_with_its_noise(monkeypatch):
    def model(t, y=None, *, steps=STEPS, noisy=STEPS):
        walk = numpyro.sample("walk", dist.GaussianRandomWalk(SCALE, steps))
        with numpyro.plate("steps", noisy):
            shock = numpyro.sample("shock", dist.Normal(0, 0.1))
        with numpyro.plate("data", len(t)):
            numpyro.sample("y", dist.Normal(walk[t] + shock[t], NOISE), obs=y)

    monkeypatch.setattr(costs, "_OVERHEAD", -np.inf)
    svi = gpaug.ConjugateSVI(model, gpaug.AutoLatentGaussian(model), optim=None)
    t = np.arange(STEPS)
    fit = svi.run(jax.random.key(0), 2, t, REAL, progress_bar=False)
    said = r"\['walk', 'shock'\] had equal lengths.*'walk': 35, 'shock': 30"
    with pytest.raises(ValueError, match=said):
        svi.posterior(fit).predict_f(t[:3], steps=35, site="walk")
