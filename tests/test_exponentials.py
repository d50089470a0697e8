# SPDX-License-Identifier: Apache-2.0
"""Densities with exponentials of a predictor: which of them are recognised, and their
expectations, beside quadrature.
"""

import jax
import jax.numpy as jnp
import numpy as np
import numpyro.distributions as dist
import pytest

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
