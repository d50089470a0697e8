# SPDX-License-Identifier: Apache-2.0
"""Very many classes: the normaliser as a factor."""

from itertools import combinations

import jax
import jax.numpy as jnp
import numpy as np
import pytest

import numpyro_gpaug as gpaug
from numpyro_gpaug.likelihoods.contract import lookup_augmentation
from numpyro_gpaug.likelihoods.expectations import expected_log_prob
from numpyro_gpaug.math.log_sum import LOGISTIC, expected_log_sum
from numpyro_gpaug.testing import check_augmentation
from tests.augmented import sites_without_variance

KEY = jax.random.key(0)


ZETA = np.array([0.7, 2.0, 4.0])


def test_the_bound_is_tight_without_variance_and_so_are_its_sites(x64) -> None:
    """The reference has the factors at the means of the auxiliaries, by NumPy."""
    f = 2 * np.random.default_rng(1).normal(size=(3, 2))
    bound, potential, found = sites_without_variance(
        lambda f: gpaug.LogisticNormalizer(f, 5, ZETA), np.zeros(3), f
    )
    g, rate = 1 / (1 + np.exp(-f)), (5 / 2) / ZETA
    expected = 1 - np.log(ZETA) - rate * g.sum(-1)
    np.testing.assert_allclose(bound, expected, rtol=1e-12)
    counts = rate[:, None] * (1 - g)
    precision = counts * np.tanh(f / 2) / (2 * f)
    np.testing.assert_allclose(found, precision, rtol=1e-10)
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
