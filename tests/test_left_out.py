# SPDX-License-Identifier: Apache-2.0
"""Leave-one-out predictions in closed form, against fits without the row."""

from functools import cache

import jax
import numpy as np
import pytest

import numpyro_gpaug as gpaug
from tests.problems import classifier, regression, toy

KEY = jax.random.key(0)
pytestmark = pytest.mark.usefixtures("x64")
X, LABELS = toy(40, dtype=np.float64)
VALUES = np.sin(2 * X[:, 0]) + 0.5 * np.random.default_rng(1).normal(size=40)
# Fewer than rows: what they leave open of a function value is in no factor.
Z = X[:12]


@cache
def fitter(model, rows):
    """Refits, which are all of as many rows, share a program."""
    return gpaug.ConjugateSVI(model, gpaug.AutoSparseGP(model), None)


def fitted(model, X, y):
    svi = fitter(model, len(X))
    result = svi.run(KEY, 50, X, y, inducing=Z, progress_bar=False)
    return svi.posterior(result)


def by_refits(model, y, rows):
    """Log densities of rows under fits to all others."""
    found = []
    for row in rows:
        others = np.arange(len(X)) != row
        posterior = fitted(model, X[others], y[others])
        found.append(posterior.log_prob(X[row : row + 1], y[row : row + 1])[0])
    return np.array(found)


def test_it_is_exact_for_normal_likelihoods() -> None:
    rows = np.arange(0, 40, 8)
    posterior = fitted(regression, X, VALUES)
    left_out = posterior.leave_one_out(X, VALUES).log_prob(VALUES)
    expected = by_refits(regression, VALUES, rows)
    np.testing.assert_allclose(left_out[rows], expected, atol=1e-8)
    streamed = posterior.leave_one_out(X, VALUES, batch_size=16)
    np.testing.assert_allclose(streamed.log_prob(VALUES), left_out, atol=1e-10)


def test_it_is_near_for_labels() -> None:
    rows = np.arange(0, 40, 4)
    posterior = fitted(classifier, X, LABELS)
    left_out = posterior.leave_one_out(X, LABELS).log_prob(LABELS)[rows]
    inside = posterior.log_prob(X, LABELS)[rows]
    expected = by_refits(classifier, LABELS, rows)
    assert np.abs(left_out - expected).max() < 0.2 * np.abs(inside - expected).max()


def test_rows_of_no_fit_are_refused() -> None:
    posterior = fitted(regression, X[20:], VALUES[20:])
    with pytest.raises(ValueError, match="rows that it was fitted to"):
        posterior.leave_one_out(X[:20], VALUES[:20])
    with pytest.raises(ValueError, match="needs the observations"):
        posterior.leave_one_out(X)


def test_what_has_no_factor_for_each_observation_is_refused() -> None:
    svi = gpaug.ConjugateSVI(classifier, gpaug.AutoLatentGaussian(classifier), None)
    result = svi.run(KEY, 5, X, LABELS, inducing=Z, progress_bar=False)
    with pytest.raises(gpaug.NotConjugateError, match="AutoSparseGP"):
        svi.posterior(result).leave_one_out(X, LABELS)
