# SPDX-License-Identifier: Apache-2.0
"""Incomplete gamma and beta functions of large parameters."""

import jax
import jax.numpy as jnp
import numpy as np
import numpyro.distributions as dist
import scipy.special
import scipy.stats as st

from numpyro_gpaug.distributions.predictor_mixture import PredictorMixture
from numpyro_gpaug.math.incomplete import betainc, gammaincc

# From far below the mean to far above it, at the mean, and next to it.
DEVIATIONS = np.r_[-1e9, np.linspace(-5, 5, 21), 1e-3, -0.02, 1e9]


def test_incomplete_gamma_functions() -> None:
    shapes = np.array([0.5, 30, 99, 100, 1e3, 1e5, 1e7], np.float32)[:, None]
    x = np.maximum(shapes + np.sqrt(shapes) * DEVIATIONS, 0).astype(np.float32)
    expected = scipy.special.gammaincc(shapes.astype(float), x.astype(float))
    np.testing.assert_allclose(jax.jit(gammaincc)(shapes, x), expected, atol=1e-4)
    slope = jax.jit(jax.grad(gammaincc, argnums=1))(1e5, 1e5)
    np.testing.assert_allclose(slope, -st.norm.pdf(0) / 1e5**0.5, rtol=1e-3)


def test_incomplete_beta_functions() -> None:
    shapes = np.array([0.5, 7, 9, 200, 301, 1e4, 1e6])
    a, b = (x[..., None] for x in np.meshgrid(shapes, shapes))
    mean = a / (a + b)
    scale = np.sqrt(mean * (1 - mean) / (a + b + 1))
    x = np.clip(mean + scale * DEVIATIONS, 0, 1)
    x, rest = (y.astype(np.float32) for y in (x, 1 - x))
    # Of the two the smaller one has more digits.
    expected = np.where(
        x < rest,
        scipy.special.betainc(a, b, x.astype(float)),
        1 - scipy.special.betainc(b, a, rest.astype(float)),
    )
    a, b = a.astype(np.float32), b.astype(np.float32)
    found = jax.jit(betainc)(a, b, x, rest)
    np.testing.assert_allclose(found, expected, atol=3e-4)


def test_probabilities_of_large_counts_and_shapes() -> None:
    """NumPyro computes these by JAX's functions: in float32 they were off by .03 to
    more than one."""
    cases = (
        (dist.Poisson(1e6), st.poisson(1e6)),
        (dist.NegativeBinomial2(1e6, 20.0), st.nbinom(20, 20 / (1e6 + 20))),
        (dist.ZeroInflatedPoisson(0.0, 1e6), st.poisson(1e6)),
        (dist.GeometricProbs(1e-6), st.geom(1e-6, loc=-1)),
        (dist.Gamma(1e5, 0.1), st.gamma(1e5, scale=10)),
        (dist.BetaProportion(0.25, 1e6), st.beta(0.25e6, 0.75e6)),
    )
    for component, known in cases:
        leaves, tree = jax.tree.flatten(component)
        mixture = PredictorMixture(
            tuple(jnp.stack([x, x]) for x in leaves), jnp.full(2, 0.5), tree,
            (True,) * len(leaves), (), (),
        )  # fmt: skip
        y = np.float32(known.ppf([0.01, 0.5, 0.9]))
        np.testing.assert_allclose(mixture.cdf(y), known.cdf(y), atol=3e-4)
        if isinstance(component, dist.Poisson):
            density = known.logpmf(y.astype(float))
            np.testing.assert_allclose(mixture.log_prob(y), density, atol=1e-3)
