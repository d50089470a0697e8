# SPDX-License-Identifier: Apache-2.0
"""Tests of the integral behind the modified Bessel function of the second kind."""

import json
from pathlib import Path

import jax
import jax.numpy as jnp
import mpmath as mp
import numpy as np
import pytest

from numpyro_gpaug.math.bessel import averages, e2, log_peak_integral, peak

GOLDEN = json.loads((Path(__file__).parent / "golden" / "gig_logk.json").read_text())


def tol(dtype: str, single: float, double: float) -> float:
    return single if dtype == "float32" else double


def test_golden_values(dtype):
    nu, x, log_k = (
        np.array([row[name] for row in GOLDEN["logK"]], dtype)
        for name in ("nu", "x", "logK")
    )
    log_integral = jax.jit(log_peak_integral)(*peak(nu, x, np.log(x)))
    top = nu * np.arcsinh(nu / x) - np.hypot(nu, x)
    out = top - np.log(2).astype(dtype) + log_integral
    assert out.dtype == dtype
    # Relative to max(1, |log K|).
    both = tol(dtype, 2e-6, 1e-13)
    np.testing.assert_allclose(out, log_k, rtol=both, atol=both)


@pytest.mark.slow
def test_tiny_arguments_agree_with_many_more_nodes(x64):
    """The documented accuracy, at arguments far below those of the golden file."""
    lam, x = (
        jnp.asarray(a.ravel())
        for a in np.meshgrid(
            [0.0, 1e-6, 0.1, 0.3, 0.5, 1.0, 2.2, 50.0, 1e4],
            10.0 ** np.arange(-200, 1, 8),
        )
    )
    big, log_q = peak(lam, x, jnp.log(x))

    def terms(u, right, left, big, log_q):
        weight = jnp.exp(-right - left)
        return weight * (1 + u * u), weight * right, weight * left

    coarse, fine = averages(terms, big, log_q), averages(terms, big, log_q, num=1000)
    for got, want in zip(coarse, fine, strict=True):
        np.testing.assert_allclose(got, want, rtol=3e-8, atol=1e-10)
    assert np.max(np.abs(coarse[0] - fine[0])) < 2e-10
    poor = averages(terms, big, log_q, num=24)
    assert np.max(np.abs(poor[0] - fine[0])) > 1e-6


def test_e2(dtype):
    u = np.array([-50.0, -2.0, -0.51, -0.49, -1e-3, 1e-6, 0.0, 0.3, 0.49, 0.51, 3.0])
    u = np.asarray(u, dtype)
    with mp.workdps(40):
        exact = [float(mp.exp(v) - 1 - v) for v in map(mp.mpf, u.astype(float))]
    ours = jax.jit(e2)(u)
    np.testing.assert_allclose(ours, exact, rtol=tol(dtype, 2e-6, 4e-15))
