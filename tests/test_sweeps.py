# SPDX-License-Identifier: Apache-2.0
"""Closed-form steps: how far they go, and when they have arrived."""

from types import SimpleNamespace

import jax
import jax.numpy as jnp
import numpy as np
import numpyro
import numpyro.distributions as dist
import pytest
from scipy import special, stats

import numpyro_gpaug as gpaug
from numpyro_gpaug.gaussians.dense import Moments, NaturalGaussian, Prior
from numpyro_gpaug.gaussians.pseudo_data import SeenPrior
from numpyro_gpaug.infer.vi import sweeps
from numpyro_gpaug.infer.vi.settling import _Memory, _mixed, _shrank

KEY = jax.random.key(0)


def test_steps_that_go_too_far_do_not_end_a_fit(x64) -> None:
    # Counts with the rate at its limit: a whole step reaches the other side of the
    # maximum, where the bound is equal. That once counted as convergence.
    kernel = gpaug.kernels.SquaredExponential(12.379977, 26.789555)
    X = np.array([[-137.10135], [-120.26357], [45.068638]])

    def model(X, y):
        gp = gpaug.GaussianProcess("f", kernel, inducing=X)
        with numpyro.plate("data", 3):
            numpyro.sample("y", gpaug.LogisticPoisson(gp(X), 260.9118), obs=y)

    svi = gpaug.ConjugateSVI(model, gpaug.AutoSparseGP(model))
    args = KEY, 200, X, np.array([2, 240, 1])
    fit = svi.run(*args, tol=1e-5, progress_bar=False)
    further = svi.run(*args, init_state=fit.state, progress_bar=False)
    assert 20 < len(fit.losses) < 60
    assert fit.losses[-1] - further.losses.min() < 1e-4


def test_a_fall_within_rounding_is_judged_by_slopes() -> None:
    floor, more = jnp.float32(-10.0), jnp.float32(1e-4)
    at = SimpleNamespace(bound=floor - more, slack=more / 10, rounding=2 * more)
    for before, after, rises in ((1, 0.5, 1), (1, -0.5, 1), (1, -0.9, 0), (-1, 0, 0)):
        assert (
            sweeps._rises(at, floor, jnp.float32(before), jnp.float32(after)) == rises
        )
    far = SimpleNamespace(bound=floor - 3 * more, slack=at.slack, rounding=at.rounding)
    assert not sweeps._rises(far, floor, jnp.float32(1), jnp.float32(0.5))


@pytest.mark.parametrize(
    ("after", "step", "following"),
    [(-1.0, 1.0, 0.5), (-0.2, 1.0, 1.0), (0.05, 0.5, 0.5), (0.6, 0.25, 0.5),
     (1.5, 0.25, 0.5)],
)  # fmt: skip
def test_the_next_step_is_where_the_slope_would_vanish(after, step, following) -> None:
    one, tries = jnp.ones(()), jnp.int32(1)
    given = one * step, tries, 1.0, one, one * after
    assert sweeps.next_step(*given, 0 * one) == following
    # With slopes that are no more than rounding, the step is not shortened.
    assert sweeps.next_step(*given, 2 * one / sweeps.FINER) == min(1.0, 2 * step)


def test_data_seen_before_pull_as_their_divergence_says(x64) -> None:
    rng = np.random.default_rng(0)
    prior = Prior(rng.normal(size=(1, 3)), rng.uniform(1, 2, (1, 3)))
    vector, precision, start = rng.uniform(size=(3, 1, 3))
    here, turn = rng.normal(size=(2, 1, 3, 3))
    seen = SeenPrior(prior, Moments(vector, here), precision, -vector, start, turn)
    q = seen.natural.moments()
    # The divergence is least at the product of both.
    slopes = jax.grad(lambda q: seen.divergence(q).sum())(q)
    np.testing.assert_allclose(slopes.mean, 0, atol=1e-10)
    np.testing.assert_allclose(jnp.tril(slopes.whitener), 0, atol=1e-10)

    def at(mean):
        return seen.divergence(q._replace(mean=mean)).sum()

    mean = jnp.asarray(rng.normal(size=(1, 3)))
    np.testing.assert_allclose(seen.pull(mean), jax.grad(at)(mean), rtol=1e-10)


@pytest.mark.parametrize("rounded", [0.0, 1.0])
def test_the_shortest_step_is_seen_as_such(x64, rounded) -> None:
    """As the compiled program rounds it: updates that began with it went on only if it
    was rounded down, and the fit of counts of ten thousands stopped at its start."""
    least = 2.0**-sweeps.MAX_HALVINGS
    after = {"f": jnp.asarray(np.nextafter(least, rounded))}
    assert _shrank({"f": jnp.ones(())}, after)
    assert not _shrank(after, after)


def test_mixed_targets_of_a_linear_map_are_its_fixed_point(x64) -> None:
    slope, fixed = np.array([[0.9, -0.5]]), np.array([[1.0, 2.0]])
    natural = {"f": NaturalGaussian(jnp.zeros((1, 2)), jnp.eye(2)[None])}
    memory = _Memory.empty(natural)
    for moves in range(6):
        target = fixed + slope * (natural["f"].potential - fixed)
        targets = {"f": natural["f"]._replace(potential=target)}
        natural, memory = _mixed(memory, jnp.int32(moves), targets, natural)
    np.testing.assert_allclose(natural["f"].potential, fixed, atol=1e-3)


RATE = 20_000


def large_counts(y=None):
    e = numpyro.sample("e", dist.Normal(0, 0.6).expand([10]).to_event(1))
    with numpyro.plate("data", 10):
        numpyro.sample("y", dist.Poisson(RATE * jnp.exp(e)), obs=y)


def test_rounding_of_large_counts_does_not_end_steps() -> None:
    """A step that raises the bound by less than its rounding counts: without it, what
    is known of a predictor without its datum is off by nats."""
    rng, grid = np.random.default_rng(0), np.linspace(-4, 4, 100_001)
    y = rng.poisson(RATE * np.exp(0.6 * rng.normal(size=10)))
    svi = gpaug.ConjugateSVI(large_counts, gpaug.AutoLatentGaussian(large_counts))
    result = svi.run(jax.random.key(0), 30, y, progress_bar=False)
    found = svi.posterior(result).leave_one_out(y).log_prob(y)
    heights = stats.poisson.logpmf(y[:, None], RATE * np.exp(0.6 * grid))
    heights += stats.norm.logpdf(grid)
    exact = special.logsumexp(heights, 1) + np.log(grid[1] - grid[0])
    np.testing.assert_allclose(found, exact, atol=0.2)
