# SPDX-License-Identifier: Apache-2.0
r"""The information of old data, as a Gaussian pseudo-likelihood that contains no prior.

A posterior :math:`q(a)` under a prior :math:`p(a)` is that prior times :math:`t(a) =
q(a) / p(a)`. This factor is stored as :math:`\exp(-|y - R a|^2 / 2)`: as observations y
of R a with unit noise. Under another prior, with other hyperparameters, the posterior
given these observations is proper for any R.
"""

from __future__ import annotations

from typing import NamedTuple

import jax.numpy as jnp
from jax import Array

from numpyro_gpaug.gaussians.dense import Moments, NaturalGaussian, Prior
from numpyro_gpaug.math.linalg import one_by_one, precise


class PseudoData(NamedTuple):
    """Observations of linear combinations of latents, with unit noise.

    :param targets: y, (latents, M).
    :param root: R, (latents, M, M).
    """

    targets: Array
    root: Array

    @classmethod
    @precise
    def of(cls, q: Moments, prior: Prior) -> PseudoData:
        """Return the pseudo-data that turn a prior into a posterior.

        The precision of the prior is subtracted from that of the posterior. In
        directions about which the data have no information, the difference is rounding
        error. Under another prior, with more variance in these directions, it could
        seem to be much information. Therefore unresolved directions, and directions of
        negative precision, are dropped.

        :param q: the posterior.
        :param prior: the prior.
        """
        scale = prior.scale
        white = Moments((q.mean - prior.loc) / scale, q.whitener / scale[..., None, :])
        root = white.precision_root()
        precision, directions = one_by_one(jnp.linalg.eigh)(root @ root.mT)
        added = precision - 1
        eps = jnp.finfo(added.dtype).eps
        least = eps * added.shape[-1] * precision.max(-1, keepdims=True)
        kept = added > least
        strength = jnp.where(kept, jnp.sqrt(jnp.where(kept, added, 1)), 0)
        mean = jnp.vecmat(white.mean, directions)
        seen = jnp.where(kept, precision * mean / jnp.where(kept, strength, 1), 0)
        rows = strength[..., None] * directions.mT / scale[..., None, :]
        return cls(seen + jnp.matvec(rows, prior.loc), rows)

    @precise
    def through(self, offset: Array, spread: Array) -> PseudoData:
        """Return the pseudo-data of x, if the latents here are ``offset + spread x``.

        :param offset: (latents, M).
        :param spread: (1 or latents, M, M).
        """
        targets = self.targets - jnp.matvec(self.root, offset)
        return PseudoData(targets, self.root @ spread)


class SeenPrior(NamedTuple):
    """A prior of independent normal latents, with the information of old data about
    them.

    :param prior: the prior.
    :param data: the information of the old data.
    """

    prior: Prior
    data: PseudoData

    @property
    def loc(self) -> Array:
        """The mean of the prior."""
        return self.prior.loc

    @property
    def natural(self) -> NaturalGaussian:
        """The potential and precision of the product of both."""
        targets, root = self.data
        potential = jnp.vecmat(targets, root)
        own = NaturalGaussian(potential, root.mT @ root)
        pairs = zip(self.prior.natural, own, strict=True)
        return NaturalGaussian(*(a + b for a, b in pairs))

    @precise
    def divergence(self, q: Moments) -> Array:
        """Return KL(q || prior) minus the expected log of the pseudo-likelihood,
        (latents,). It is at least minus the log of their evidence."""
        targets, root = self.data
        missed = targets - jnp.matvec(root, q.mean)
        spread = jnp.square(root @ q.whitener.mT).sum((-2, -1))
        unexplained = jnp.square(missed).sum(-1) + spread
        return self.prior.divergence(q) + 0.5 * unexplained

    @precise
    def pull(self, mean: Array) -> Array:
        """Return the gradient of :meth:`divergence` in the means, (latents, M).

        :param mean: the means, (latents, M).
        """
        targets, root = self.data
        missed = targets - jnp.matvec(root, mean)
        return self.prior.pull(mean) - jnp.vecmat(missed, root)
