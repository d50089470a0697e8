# SPDX-License-Identifier: Apache-2.0
"""Softmax likelihoods of jointly Gaussian latents: expectations against product rules,
fits and predictions against a grid, groups against one matrix."""

import jax
import jax.numpy as jnp
import numpy as np
import numpyro
import numpyro.distributions as dist
import pytest
from scipy.special import gammaln, logsumexp, softmax

import numpyro_gpaug as gpaug
from numpyro_gpaug.math.correlated_softmax import (
    expected_log_sum_exp,
    expected_softmax,
    matrix_of_pairs,
    pair_places,
)

N, C = 40, 3
RNG = np.random.default_rng(2)
T = np.linspace(-2, 2, N)
CLASSES = np.array([RNG.choice(C, p=softmax([0.5, t, -0.3])) for t in T])


def moments(rng, rows, rank, size=1.0):
    """Means, variances and covariances of pairs, of this rank."""
    roots = size * rng.normal(size=(rows, C, rank))
    whole = roots @ np.swapaxes(roots, 1, 2)
    left, right = pair_places(C)
    return rng.normal(size=(rows, C)), whole.diagonal(0, 1, 2), whole[:, left, right]


def test_a_covariance_of_one_number():
    assert matrix_of_pairs(jnp.ones((N, 1)), jnp.ones((N, 0))).shape == (N, 1, 1)


@pytest.mark.parametrize("rank", [3, 1])
def test_expectations_against_a_product_rule(x64, rank):
    """The cases have full covariances and singular ones."""
    mean, variance, pairs = moments(np.random.default_rng(0), 4, rank, 0.8)
    x, weights = np.polynomial.hermite_e.hermegauss(40)
    grid = np.stack(np.meshgrid(x, x, x), -1).reshape(-1, C)
    weights = np.prod(np.meshgrid(weights, weights, weights), 0).ravel()
    weights /= weights.sum()
    left, right = pair_places(C)

    @jax.jit
    def ours(*at):
        value, back = jax.vjp(expected_log_sum_exp, *at)
        return value, *back(jnp.ones_like(value)), expected_softmax(*at)

    found = ours(mean, variance, pairs)
    for i in range(len(mean)):
        whole = np.diag(variance[i])
        whole[left, right] = whole[right, left] = pairs[i]
        values, vectors = np.linalg.eigh(whole)
        f = mean[i] + grid * np.sqrt(np.maximum(values, 0)) @ vectors.T
        shares = softmax(f, axis=1)
        expected = (
            weights @ logsumexp(f, axis=1), weights @ shares,
            weights @ (0.5 * shares * (1 - shares)),
            -weights @ (shares[:, left] * shares[:, right]), weights @ shares,
        )  # fmt: skip
        for got, there in zip(found, expected, strict=True):
            np.testing.assert_allclose(got[i], there, atol=3e-3)
        # The precision of the factor.
        curved = np.diag(2 * found[2][i])
        curved[left, right] = curved[right, left] = found[3][i]
        assert np.linalg.eigvalsh(curved).min() > -1e-12


def regression(t, y=None):
    """Two numbers in three predictors, so that these are correlated."""
    a = numpyro.sample("a", dist.Normal(0, 1.5))
    b = numpyro.sample("b", dist.Normal(0, 1.5))
    logits = jnp.stack([a + 0 * t, b * t + 0.5 * a, -0.3 + 0 * t], -1)
    with numpyro.plate("data", len(t)):
        numpyro.sample("y", dist.Categorical(logits=logits), obs=y)


def test_a_fit_and_its_predictions_against_a_grid(x64, tmp_path):
    svi = gpaug.ConjugateSVI(regression, gpaug.AutoLatentGaussian(regression), None)
    fit = svi.run(jax.random.key(0), 60, T, CLASSES, progress_bar=False)
    assert "observed, by quasi-random nodes" in repr(svi.guide)
    axis = np.linspace(-4, 5, 151)
    a, b = (x.ravel()[:, None] for x in np.meshgrid(axis, axis))

    def logits(t):
        parts = a + 0 * t, b * t + 0.5 * a, -0.3 + 0 * t + 0 * a
        return np.stack(parts, -1)

    f = logits(T)
    density = np.take_along_axis(f, CLASSES[None, :, None], -1)[..., 0]
    logs = (density - logsumexp(f, axis=-1)).sum(1) - (a + 0 * b)[:, 0] ** 2 / 4.5
    weights = softmax(logs - b[:, 0] ** 2 / 4.5)
    posterior = svi.posterior(fit)
    for name, x in (("a", a[:, 0]), ("b", b[:, 0])):
        mean = weights @ x
        deviation = np.sqrt(weights @ np.square(x - mean))
        marginal = posterior[name]
        np.testing.assert_allclose(marginal.mean, mean, atol=0.07 * deviation)
        np.testing.assert_allclose(np.sqrt(marginal.variance), deviation, rtol=0.05)
    new = np.array([-1.5, 0.0, 3.0])
    shares = np.tensordot(weights, softmax(logits(new), -1), 1)
    found = posterior.predict_y(new)
    np.testing.assert_allclose(found.probs, shares, atol=0.01)
    # It is a lower bound, and near the evidence.
    evidence = logsumexp(logs - b[:, 0] ** 2 / 4.5) - np.log(2 * np.pi * 1.5**2)
    evidence += 2 * np.log(axis[1] - axis[0])
    assert -fit.losses[-1] < evidence + 0.005
    np.testing.assert_allclose(-fit.losses[-1], evidence, atol=0.05)
    assert posterior.quadrature_errors["y"] < 1e-3
    posterior.save(tmp_path / "fit.npz")
    loaded = gpaug.Posterior.load(tmp_path / "fit.npz", regression)
    np.testing.assert_array_equal(loaded.predict_y(new).probs, found.probs)


def observed(total, logits, y):
    """Counts where there are totals, or classes."""
    with numpyro.plate("data", len(logits)):
        likelihood = (
            dist.Categorical(logits=logits)
            if total is None
            else dist.Multinomial(total, logits=logits, total_count_max=6)
        )
        numpyro.sample("y", likelihood, obs=y)


def joint(t, total, y=None, *, inducing):
    a = numpyro.sample("a", dist.Normal(0, 1.5).expand([2]).to_event(1))
    logits = jnp.stack([a[0] + 0 * t, a[1] * t + 0.5 * a[0], -0.3 + 0 * t], -1)
    observed(total, logits, y)


def independent(t, total, y=None, *, inducing):
    kernel = gpaug.kernels.Matern52()
    gp = gpaug.GaussianProcess("f", kernel, inducing, num_latents=C)
    observed(total, gp(t[:, None]), y)


FAMILIES = [(joint, gpaug.AutoLatentGaussian), (independent, gpaug.AutoSparseGP)]


@pytest.mark.slow
@pytest.mark.parametrize(("model", "family"), FAMILIES)
def test_counts_are_classes_one_by_one(x64, model, family):
    """A row of counts and one for every class counted have the same fit, and a bound
    that differs by the number of ways."""
    total = RNG.integers(1, 7, 12)
    t = np.linspace(-2, 2, 12)
    counts = np.stack([RNG.multinomial(n, [0.5, 0.3, 0.2]) for n in total])
    classes = np.concatenate([np.repeat(np.arange(C), row) for row in counts])
    found = []
    for args in ((t, total, counts), (np.repeat(t, total), None, classes)):
        svi = gpaug.ConjugateSVI(model, family(model))
        how = {"inducing": t[::3, None], "progress_bar": False}
        fit = svi.run(jax.random.key(0), 60, *args, **how)
        found.append((svi.posterior(fit), -fit.losses[-1]))
    (ours, bound), (theirs, other) = found
    ways = gammaln(total + 1).sum() - gammaln(counts + 1).sum()
    np.testing.assert_allclose(bound - ways, other, rtol=1e-7)
    one = ours.predict_y(t[:3], np.ones(3, int))
    many = ours.predict_y(t[:3], total[:3])
    probs = theirs.predict_y(t[:3], None).probs
    np.testing.assert_allclose(one.mean, probs, atol=2e-3)
    density = one.log_prob(np.eye(C, dtype=int))
    np.testing.assert_allclose(density, np.log(np.diagonal(probs)), atol=5e-3)
    np.testing.assert_allclose(many.mean, total[:3, None] * probs, atol=0.01)
    draws = many.sample(jax.random.key(0), (50,))
    np.testing.assert_array_equal(draws.sum(-1), np.tile(total[:3], (50, 1)))
