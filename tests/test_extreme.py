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
from numpyro_gpaug.likelihoods.contract import lookup_augmentation
from numpyro_gpaug.likelihoods.expectations import expected_log_prob
from numpyro_gpaug.math.log_sum import LOGISTIC, expected_log_sum
from numpyro_gpaug.testing import check_augmentation
from tests.augmented import left_over

KEY = jax.random.key(0)


ZETA = np.array([0.7, 2.0, 4.0])


def test_given_auxiliaries_the_model_is_gaussian(x64) -> None:
    """The log-density by NumPy is 1 - log zeta - C / (K zeta) sum sigmoid(f)."""

    def log_density(f):
        total = (5 / 2) * (1 / (1 + np.exp(-f))).sum(-1)
        return 1 - np.log(ZETA) - total / ZETA

    rng = np.random.default_rng(0)
    f = 2 * rng.normal(size=(4, 3, 2))
    n = rng.integers(1, 4, (3, 2))
    auxiliaries = {"n": n, "omega": n * rng.uniform(0.1, 0.4, (3, 2))}
    d = gpaug.LogisticNormalizer(np.zeros((3, 2)), 5, ZETA)
    left = left_over(d, np.zeros(3), f, auxiliaries, log_density)
    np.testing.assert_allclose(left, left[:1].repeat(4, 0), rtol=1e-8)


def test_the_bound_is_tight_without_variance_and_so_are_its_sites(x64) -> None:
    """The reference has the factors at the means of the auxiliaries, by NumPy."""
    f = 2 * np.random.default_rng(1).normal(size=(3, 2))
    augmentation = lookup_augmentation(gpaug.LogisticNormalizer)

    @jax.jit
    def bound_and_slopes(m, v):
        def total(m, v):
            d = gpaug.LogisticNormalizer(m, 5, ZETA)
            bound = augmentation.bound(d, np.zeros(3), {"logits": m}, {"logits": v})
            return bound.sum(), bound

        return jax.value_and_grad(total, (0, 1), has_aux=True)(m, v)

    (_, bound), (by_mean, by_variance) = bound_and_slopes(f, np.zeros_like(f))
    g, rate = 1 / (1 + np.exp(-f)), (5 / 2) / ZETA
    expected = 1 - np.log(ZETA) - rate * g.sum(-1)
    np.testing.assert_allclose(bound, expected, rtol=1e-12)
    counts = rate[:, None] * (1 - g)
    precision = counts * np.tanh(f / 2) / (2 * f)
    np.testing.assert_allclose(-2 * by_variance, precision, rtol=1e-10)
    potential = by_mean - 2 * by_variance * f
    np.testing.assert_allclose(potential, -counts / 2, rtol=1e-9, atol=1e-12)


@pytest.mark.slow
def test_conformance() -> None:
    d = gpaug.LogisticNormalizer(jnp.zeros((3, 2)), 5, jnp.asarray(ZETA, "float32"))
    check_augmentation(d, jnp.zeros(3))


def test_unbiased_over_all_subsets_and_a_bound() -> None:
    rng = np.random.default_rng(0)
    m, v = 3 * rng.normal(size=5), rng.random(5)
    total = np.sum(1 / (1 + np.exp(-m)))

    @jax.jit
    def terms(f, s, zeta):
        d = gpaug.LogisticNormalizer(f, 5, zeta)
        moments = {"logits": f}, {"logits": s}
        exact = expected_log_prob(d, jnp.zeros(()), *moments)
        cls = gpaug.LogisticNormalizer
        augmented = lookup_augmentation(cls).bound(d, jnp.zeros(()), *moments)
        return jnp.stack([d.log_prob(0.0), exact, augmented])

    m, v = m.astype("float32"), v.astype("float32")
    whole = np.asarray(terms(m, v, 1.7))
    subsets = [list(subset) for subset in combinations(range(5), 2)]
    part = [np.asarray(terms(m[chosen], v[chosen], 1.7)) for chosen in subsets]
    np.testing.assert_allclose(np.mean(part, 0), whole, rtol=1e-5)
    _, exact, augmented = whole
    log_sum = jax.jit(lambda m, v: expected_log_sum(LOGISTIC, m, v))(m, v)
    assert augmented < exact < -log_sum
    # At its best zeta the factor is the plain logarithm.
    np.testing.assert_allclose(terms(m, v, total)[0], -np.log(total), rtol=1e-6)


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
    return jnp.asarray((centres[y] + 0.6 * noise).astype("float32")), jnp.asarray(y)


@pytest.mark.slow
def test_all_classes_at_once_bound_the_logistic_softmax() -> None:
    X, y = clusters(6, 1)
    members = jnp.asarray(np.arange(len(X)).reshape(CLASSES, 6))
    Z = np.asarray(X)[::4]
    svi = gpaug.ConjugateSVI(
        sampled, gpaug.AutoSparseGP(sampled), optax.adam(0.1), updates="exact"
    )
    result = svi.run(KEY, 100, X, members, inducing=Z, progress_bar=False)
    full = gpaug.ConjugateSVI(whole, gpaug.AutoSparseGP(whole))
    exact = full.run(KEY, 60, X, y, inducing=Z, progress_bar=False)
    gap = (result.losses[-1] - exact.losses[-1]) / len(X)
    assert 0 < gap < 0.03
