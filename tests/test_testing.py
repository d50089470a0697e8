# SPDX-License-Identifier: Apache-2.0
"""The conformance check passes what is right and names what is wrong."""

import jax.numpy as jnp
import numpyro.distributions as dist
import pytest

from numpyro_gpaug import UnknownLikelihoodError, register_augmentation
from numpyro_gpaug.distributions import PolyaGamma
from numpyro_gpaug.likelihoods import bernoulli, normal
from numpyro_gpaug.testing import check_augmentation

Y = jnp.array([0, 1, 1, 0, 1])


class WrongTilt(bernoulli.BernoulliLogits):
    def conditional(self, d, y, f):
        return {"omega": PolyaGamma(jnp.ones_like(f["logits"]), 1.1 * f["logits"])}


class WrongPotential(bernoulli.BernoulliLogits):
    def natural(self, d, y, aux, f):
        ((name, (potential, precision)),) = super().natural(d, y, aux, f).items()
        return {name: (1.05 * potential, precision)}


class WrongConstant(bernoulli.BernoulliLogits):
    def bound(self, d, y, means, variances):
        return super().bound(d, y, means, variances) - 0.01


class NotABound(bernoulli.BernoulliLogits):
    def bound(self, d, y, means, variances):
        larger = {"logits": 0.5 * variances["logits"]}
        return super().bound(d, y, means, larger)


@pytest.mark.parametrize(
    ("wrong", "message"),
    [
        (WrongTilt, "depends on f"),
        (WrongPotential, "depends on f"),
        (WrongConstant, "not tight"),
        (NotABound, "exceeds"),
    ],
)
def test_planted_errors_are_named(wrong, message: str) -> None:
    class Likelihood(dist.BernoulliLogits):
        pass

    register_augmentation(Likelihood, wrong())
    with pytest.raises(AssertionError, match=message):
        check_augmentation(Likelihood(jnp.zeros(5)), Y)


def test_wrong_normal_precision_is_named() -> None:
    class Wrong(normal.Normal):
        def natural(self, d, y, aux, f):
            return {"loc": (y / d.scale, jnp.broadcast_to(1 / d.scale, y.shape))}

    class Likelihood(dist.Normal):
        pass

    register_augmentation(Likelihood, Wrong())
    with pytest.raises(AssertionError):
        check_augmentation(Likelihood(jnp.zeros(5), 0.5), jnp.linspace(-1, 1, 5))


def test_unregistered_likelihood() -> None:
    with pytest.raises(UnknownLikelihoodError, match="Poisson"):
        check_augmentation(dist.Poisson(jnp.ones(5)), Y)
