# SPDX-License-Identifier: Apache-2.0
"""Very many classes: the normaliser as a factor, classes and rows drawn by plates."""

from itertools import combinations

import jax
import jax.numpy as jnp
import numpy as np
import numpyro
import numpyro.distributions as dist
import optax
import pytest
from numpyro import handlers

import numpyro_gpaug as gpaug
from numpyro_gpaug.likelihoods.augmentation import lookup_augmentation
from numpyro_gpaug.likelihoods.expectations import expected_log_prob
from numpyro_gpaug.math.log_sum import LOGISTIC, expected_log_sum
from numpyro_gpaug.testing import check_augmentation

KEY = jax.random.key(0)


def test_conformance() -> None:
    zeta = jnp.array([0.7, 2.0, 4.0])
    d = gpaug.LogisticNormalizer(jnp.zeros((3, 2)), 5, zeta)
    check_augmentation(d, jnp.zeros(3))


def test_unbiased_over_all_subsets_and_a_bound() -> None:
    rng = np.random.default_rng(0)
    m, v = jnp.asarray(3 * rng.normal(size=5)), jnp.asarray(rng.random(5))
    zeta = 1.7

    def terms(classes):
        f, s = m[jnp.asarray(classes)], v[jnp.asarray(classes)]
        d = gpaug.LogisticNormalizer(f, 5, zeta)
        moments = {"logits": f}, {"logits": s}
        exact = expected_log_prob(d, jnp.zeros(()), *moments)
        cls = gpaug.LogisticNormalizer
        augmented = lookup_augmentation(cls).bound(d, jnp.zeros(()), *moments)
        return jnp.stack([d.log_prob(0.0), exact, augmented])

    whole = terms(range(5))
    part = jnp.stack([terms(subset) for subset in combinations(range(5), 2)])
    np.testing.assert_allclose(part.mean(0), whole, rtol=1e-5)
    _, exact, augmented = whole
    assert augmented < exact < -expected_log_sum(LOGISTIC, m, v)
    # At its best zeta the factor is the plain logarithm.
    total = jax.nn.sigmoid(m).sum()
    best = gpaug.LogisticNormalizer(m, 5, total).log_prob(0.0)
    np.testing.assert_allclose(best, -jnp.log(total), rtol=1e-6)


def test_a_factor_cannot_be_drawn() -> None:
    d = gpaug.LogisticNormalizer(jnp.zeros(3), 5, 1.0)
    with pytest.raises(NotImplementedError, match="LogisticSoftmax"):
        d.sample(KEY)
    with pytest.raises(ValueError, match="num_classes=2"):
        gpaug.LogisticNormalizer(jnp.zeros(3), 2, 1.0)


CLASSES, PER_CLASS = 12, 25
KERNEL = gpaug.kernels.SquaredExponential(1.0, 4.0)


def sampled(X, members, *, inducing, num_rows=None, num_drawn=None):
    """K classes, B background rows for their normaliser, p members of each class.

    :param members: rows of each class, (C, p); here all of them.
    """
    N = X.shape[0]
    gp = gpaug.GaussianProcess("f", KERNEL, inducing, num_latents=CLASSES)
    zeta = numpyro.param(
        "zeta", jnp.full(N, CLASSES / 2), constraint=dist.constraints.positive
    )
    with numpyro.plate("classes", CLASSES, subsample_size=num_drawn) as drawn:
        pass
    data = numpyro.plate("data", N, subsample_size=num_rows)
    with data as rows:
        pass
    own = members[drawn]
    f = gp(jnp.concatenate([X[rows], X[own.ravel()]]), latents=drawn)
    background, f_own = f[: len(rows)], f[len(rows) :]
    f_own = f_own.reshape(*own.shape, len(drawn))
    f_own = jnp.take_along_axis(f_own, jnp.arange(len(drawn))[:, None, None], 2)[..., 0]
    with data:
        d = gpaug.LogisticNormalizer(background, CLASSES, zeta[rows])
        numpyro.sample("rest", d, obs=jnp.zeros(len(rows)))
    with handlers.scale(scale=CLASSES / len(drawn)):
        numpyro.sample(
            "own", dist.Bernoulli(logits=f_own).to_event(2),
            obs=jnp.ones(own.shape, int),
        )  # fmt: skip


def whole(X, y=None, *, inducing):
    gp = gpaug.GaussianProcess("f", KERNEL, inducing, num_latents=CLASSES)
    with numpyro.plate("data", X.shape[0]):
        numpyro.sample("y", gpaug.LogisticSoftmax(gp(X)), obs=y)


def clusters(per_class, seed):
    centres = 2 * np.random.default_rng(0).normal(size=(CLASSES, 2))
    y = np.repeat(np.arange(CLASSES), per_class)
    noise = np.random.default_rng(seed).normal(size=(len(y), 2))
    return jnp.asarray(centres[y] + 0.6 * noise, jnp.float32), jnp.asarray(y)


@pytest.mark.slow
def test_drawn_classes_reach_the_fit_of_all() -> None:
    X, y = clusters(PER_CLASS, 1)
    X_test, y_test = clusters(40, 2)
    Z = X[np.random.default_rng(3).permutation(len(X))[:30]]
    guide = gpaug.AutoSparseGP(whole)
    full = gpaug.ConjugateSVI(whole, guide)
    result = full.run(KEY, 150, X, y, inducing=Z, progress_bar=False)

    def score(params):
        posterior = full.posterior(params, X, y, inducing=Z)
        return posterior.log_prob(X_test, y_test).mean()

    reference = score(result.params)
    members = jnp.arange(len(X)).reshape(CLASSES, PER_CLASS)
    svi = gpaug.ConjugateSVI(
        sampled, gpaug.AutoSparseGP(sampled), optax.adam(0.1), updates="exact"
    )
    drawn = svi.run(
        KEY, 2000, X, members, inducing=Z, num_rows=150, num_drawn=4,
        progress_bar=False,
    )  # fmt: skip
    assert abs(score(drawn.params) - reference) < 0.01
    bound = -np.mean(drawn.losses[-200:]) / len(X)
    assert abs(bound + result.losses[-1] / len(X)) < 0.05


def test_all_classes_at_once_bound_the_logistic_softmax() -> None:
    X, y = clusters(6, 1)
    members = jnp.arange(len(X)).reshape(CLASSES, 6)
    Z = X[::4]
    svi = gpaug.ConjugateSVI(
        sampled, gpaug.AutoSparseGP(sampled), optax.adam(0.1), updates="exact"
    )
    result = svi.run(KEY, 100, X, members, inducing=Z, progress_bar=False)
    full = gpaug.ConjugateSVI(whole, gpaug.AutoSparseGP(whole))
    exact = full.run(KEY, 60, X, y, inducing=Z, progress_bar=False)
    gap = (result.losses[-1] - exact.losses[-1]) / len(X)
    assert 0 < gap < 0.03
