# SPDX-License-Identifier: Apache-2.0
"""Autoregressive states, whose links depend on hyperparameters: they are chains, and
fitted like the equal dense Gaussians.
"""

import re

import jax
import jax.numpy as jnp
import numpy as np
import numpyro
import numpyro.distributions as dist
import pytest
from numpyro.contrib.control_flow import scan

import numpyro_gpaug as gpaug
from numpyro_gpaug.model import costs
from numpyro_gpaug.model.whitened import whitened as program
from tests.conftest import slow

STEPS, ITEMS, NOISE = 24, 3, 0.4
rng = np.random.default_rng(0)
# Some steps have several rows; some have none, the first and last among them.
SEEN = np.setdiff1d(np.arange(STEPS), [0, 5, 6, STEPS - 1])
TIME = np.sort(rng.choice(SEEN, 60))
ITEM = rng.integers(0, ITEMS, len(TIME))
REAL = rng.normal(size=len(TIME))


def hyperparameters():
    phi = numpyro.sample("phi", dist.Uniform(-1, 1))
    scale = numpyro.sample("scale", dist.HalfNormal(1))
    return phi, scale, scale / jnp.sqrt(1 - phi**2)


def panel(steps):
    """Return series with the same coefficient, from the stationary distribution."""
    phi, scale, kept = hyperparameters()

    def step(x, t):
        with numpyro.plate("items", ITEMS):
            d = dist.Normal(phi * x, jnp.where(t == 0, kept, scale))
            x = numpyro.sample("x", d)
        return x, x

    return scan(step, jnp.zeros(ITEMS), jnp.arange(steps))[1]


def begun(steps):
    """One series, of numbers that are not centred, from a state of its own."""
    phi, scale, kept = hyperparameters()
    first = numpyro.sample("first", dist.Normal(0, kept))

    def step(x, _):
        x = phi * x + scale * numpyro.sample("noise", dist.Normal(0, 1))
        return x, x

    _, x = scan(step, first, None, length=steps - 1)
    return jnp.concatenate([first[None], x])[:, None]


def lags(steps):
    """The model: an autoregression of second order for every item."""

    def step(before, _):
        first, second = before
        with numpyro.plate("items", ITEMS):
            x = numpyro.sample("x", dist.Normal(1.2 * first - 0.5 * second, 0.5))
        return (x, first), x

    return scan(step, tuple(jnp.zeros((2, ITEMS))), None, length=steps)[1]


def seasonal(season):
    """A level, a season that sums to little, and noise of every step."""

    def states(steps):
        with numpyro.plate("steps", steps):
            shock = numpyro.sample("shock", dist.Normal(0, 0.3))

        def step(before, _):
            level, last = before
            level = numpyro.sample("level", dist.Normal(level, 0.3))
            new = numpyro.sample("new", dist.Normal(-last.sum(), 0.2))
            return (level, jnp.concatenate([new[None], last[:-1]])), level + new

        start = 0.0, jnp.zeros(season - 1)
        return (scan(step, start, None, length=steps)[1] + shock)[:, None]

    return states


def model_of(states):
    def model(t, item, y=None, *, steps=STEPS):
        x = numpyro.deterministic("states", states(steps))
        eta = x[t, item % x.shape[1]]
        with numpyro.plate("data", len(t)):
            numpyro.sample("y", dist.Normal(eta, NOISE), obs=y)

    return model


def forced(monkeypatch):
    """Choose chains even for few steps."""
    monkeypatch.setattr(costs, "_OVERHEAD", -np.inf)


def guided(states):
    return gpaug.AutoLatentGaussian(model_of(states)).setup(TIME, ITEM, REAL)


@pytest.mark.parametrize(
    ("states", "form"),
    [
        (lags, r"3 chains of 12 blocks of 2 steps of 2 \(x\), 0 others"),
        slow(panel, r"3 chains of 24 steps of 1 \(x\), 0 others"),
        slow(begun, r"a chain of 23 steps of 1 \(noise\), 1 others"),
        slow(
            seasonal(3),
            r"a chain of 12 blocks of 2 steps of 6 \(level, new, shock\), 0 others"
        ),
    ],
)  # fmt: skip
def test_what_is_a_chain(monkeypatch, states, form):
    forced(monkeypatch)
    assert re.search(form + " dense", repr(guided(states)))


@pytest.mark.slow
@pytest.mark.parametrize(
    ("states", "steps"),
    [(lags, STEPS - 1), (seasonal(4), STEPS - 1), (seasonal(12), 50)],
)
def test_states_of_lags_are_chains_of_blocks(x64, monkeypatch, states, steps):
    """Evidence and forecasts of dense Gaussians, by NumPy from the program itself, of
    blocks that the first step does not begin, nor the last one end."""
    forced(monkeypatch)
    model, ahead = model_of(states), steps + 4
    guide = gpaug.AutoLatentGaussian(model)
    svi = gpaug.ConjugateSVI(model, guide, optim=None)
    seen = TIME < steps
    args = TIME[seen], ITEM[seen], REAL[seen]
    fit = svi.run(jax.random.key(0), 10, *args, progress_bar=False, steps=steps)
    assert "blocks of" in repr(guide)
    names = {s.name: s.shape for s in guide.structure.sites}

    def of_noise(z):
        """States from standard normal numbers."""
        whitened = numpyro.handlers.seed(program(model, z), 0)
        traced = numpyro.handlers.trace(whitened)
        return traced.get_trace(*args[:2], steps=ahead)["states"]["value"].ravel()

    shapes = {k: (ahead, *shape[1:]) for k, shape in names.items()}
    root = jax.jacobian(of_noise)({k: jnp.zeros(s) for k, s in shapes.items()})
    root = np.concatenate([np.reshape(x, (len(x), -1)) for x in root.values()], 1)
    prior = root @ root.T
    rows = args[0] * (len(root) // ahead) + args[1] % (len(root) // ahead)
    past = prior[np.ix_(rows, rows)] + NOISE**2 * np.eye(len(rows))
    gain = np.linalg.solve(past, prior[rows]).T
    white = np.linalg.solve(past, args[2])
    logs = np.linalg.slogdet(2 * np.pi * past)[1]
    np.testing.assert_allclose(
        fit.losses[-1], 0.5 * (args[2] @ white + logs), rtol=1e-9
    )
    found = svi.posterior(fit).predict_f(*args[:2], steps=ahead, site="states")
    np.testing.assert_allclose(found.mean.ravel(), gain @ args[2], atol=1e-8)
    variance = np.diag(prior - gain @ prior[rows])
    np.testing.assert_allclose(found.variance.ravel(), variance, rtol=1e-8)


def test_a_scan_from_the_end_is_refused():
    def backwards(steps):
        def step(x, _):
            x = numpyro.sample("x", dist.Normal(0.5 * x, 1))
            return x, x

        return scan(step, 0.0, None, length=steps, reverse=True)[1][:, None]

    with pytest.raises(gpaug.NotConjugateError, match=r"\['x'\] .* reverse=True"):
        guided(backwards)
