# SPDX-License-Identifier: Apache-2.0
"""Densities with exponentials of a predictor: which of them are recognised, and their
expectations, beside quadrature.
"""

import jax
import jax.numpy as jnp
import numpy as np
import numpyro
import numpyro.distributions as dist
import pytest
import scipy.stats as st
from scipy.optimize import minimize

import numpyro_gpaug as gpaug
from numpyro_gpaug.likelihoods.expectations import Route
from numpyro_gpaug.math.expectation import PredictorMoments
from numpyro_gpaug.model.expectation import expected_density
from numpyro_gpaug.model.exponentials import has_form
from tests.test_frontier import COUNTS, SHARES, SPLIT, eta, split_at

EXPONENTIAL = {
    "poisson", "gamma", "weibull", "censored", "matrix", "matrix as one datum", "event",
    "masked", "factor", "exponentials",
}  # fmt: skip
TOLD = {
    **{name: (density, name in EXPONENTIAL) for name, (density, _) in SPLIT.items()},
    # A function of a sum within each datum.
    "sum of rates": (
        lambda z: jnp.log(jnp.exp(eta(z)[:, None] * jnp.arange(3.0)).sum(1)),
        False,
    ),
    # Two sums side by side, in one array.
    "beta of rates": (
        lambda z: dist.Beta(jnp.exp(eta(z)), jnp.exp(-eta(z))).log_prob(SHARES),
        False,
    ),
    "rate and a constant": (
        lambda z: dist.Poisson(0.1 + jnp.exp(eta(z))).log_prob(COUNTS),
        False,
    ),
}


@pytest.mark.parametrize("name", TOLD)
def test_sums_of_exponentials_are_told(name):
    density, exponential = TOLD[name]
    _, program, found = split_at(density)
    assert has_form(found, program.avals) == exponential


def test_expectations_and_slopes_are_those_of_quadrature():
    splits = {}
    for name, (density, exponential) in TOLD.items():
        if exponential:
            _, program, found = split_at(density)
            numbers = program.run(list(found.fixed), {})
            size = program.avals[found.roots[0]].size
            splits[name] = found, numbers, size

    @jax.jit
    def both(numbers):
        found = {}
        for name, (split, _, size) in splits.items():
            mean = jnp.linspace(-1, 1, size)
            at = PredictorMoments((mean,), (jnp.linspace(0.01, 0.6, size),))
            found[name] = [
                jax.value_and_grad(lambda at, r, s=split, k=name: expected_density(
                    s, r, numbers[k], at
                ))(at, route)
                for route in (Route.EXPONENTIAL, Route.GAUSS_HERMITE)
            ]  # fmt: skip
        return found

    for name, (ours, theirs) in both({k: v[1] for k, v in splits.items()}).items():
        for a, b in zip(jax.tree.leaves(ours), jax.tree.leaves(theirs), strict=True):
            atol = 1e-4 * float(np.abs(b).max())
            np.testing.assert_allclose(a, b, atol=atol, err_msg=name)


@pytest.mark.parametrize("kind", ["poisson", "binomial"])
def test_bounds_of_large_counts_are_right_in_float32(kind):
    """Densities in NumPyro are differences of numbers of ten millions. The reference is
    the best bound by quadrature in double precision. The first count is missing."""
    rng = np.random.default_rng(0)
    total = rng.integers(10**5, 10**6, 50)
    counts = rng.poisson(0.3 * total).astype(float)
    counts[0] = np.nan

    def likelihood(f):
        if kind == "poisson":
            return dist.Poisson(total * jnp.exp(f))
        return dist.Binomial(total, probs=jnp.exp(-jnp.exp(f)))

    def model(y=None):
        level = numpyro.sample("level", dist.Normal(0, 1))
        with numpyro.plate("data", 50), numpyro.handlers.mask(mask=jnp.arange(50) > 0):
            numpyro.sample("y", likelihood(level), obs=y)

    svi = gpaug.ConjugateSVI(model, gpaug.AutoLatentGaussian(model), None)
    losses = svi.run(jax.random.key(0), 40, counts, progress_bar=False).losses

    nodes, weights = np.polynomial.hermite_e.hermegauss(20)
    weights /= weights.sum()

    def loss(at):
        f = np.exp(at[0] + np.exp(at[1]) * nodes[:, None])
        of = st.poisson(total * f) if kind == "poisson" else st.binom(total, np.exp(-f))
        divergence = (np.exp(2 * at[1]) + at[0] ** 2 - 1) / 2 - at[1]
        return divergence - weights @ of.logpmf(counts)[:, 1:].sum(1)

    start = np.log(0.3 if kind == "poisson" else -np.log(0.3)), -8
    found = minimize(loss, start, method="Nelder-Mead", options={"xatol": 1e-6})
    np.testing.assert_allclose(losses[-1], found.fun, atol=0.02)


def test_rows_without_exposure_keep_derivatives_by_hyperparameters_finite():
    exposure = np.arange(4.0)

    def model(y=None):
        scale = numpyro.sample("scale", dist.LogNormal(0, 1))
        level = numpyro.sample("level", dist.Normal(0, 1))
        with numpyro.plate("data", 4):
            rate = scale * exposure * jnp.exp(level)
            numpyro.sample("y", dist.Poisson(rate), obs=y)

    svi = gpaug.ConjugateSVI(model, gpaug.AutoLatentGaussian(model))
    losses = svi.run(jax.random.key(0), 4, np.arange(4), progress_bar=False).losses
    assert losses[-1] < losses[0]
