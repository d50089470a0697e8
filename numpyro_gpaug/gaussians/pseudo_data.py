# SPDX-License-Identifier: Apache-2.0
r"""The information of old data, as a Gaussian pseudo-likelihood that contains no prior.

A posterior :math:`q(a)` under a prior :math:`p(a)` is that prior times :math:`t(a) =
q(a) / p(a)`. This factor is stored as :math:`\exp(-|y - R a|^2 / 2)`: as observations y
of R a with unit noise. Under another prior, with other hyperparameters, the posterior
given these observations is proper for any R.

Projection of the information about whitened function values onto others.

Values ``a = A' b + r`` of a process have the distribution ``q(a) = N(m, S)``, where
``p(a)`` and ``p(b)`` are standard normal and ``r`` is independent of ``b`` with
covariance ``I - A' A``. Among all processes that have information about ``b`` alone,
``p(f | b) q(b)``, the nearest one to ``p(f | a) q(a)`` in Kullback-Leibler divergence
is

.. math::

    q(b) \propto p(b) \exp \mathrm{E}_{p(a | b)} \log \frac{q(a)}{p(a)}
    = N(b; \Lambda^{-1} A S^{-1} m, \Lambda^{-1}), \quad
    \Lambda = I - A A^\top + A S^{-1} A^\top.

This is the variational optimum without new data of Bui, Nguyen and Turner (2017,
section 3.1): old data enter with the noise :math:`D = (S^{-1} - I)^{-1}`, without the
:math:`I - A^\top A` that power EP adds to it. The loss of the projection is the bound's
trace term and more. :math:`\Lambda` is a sum of positive semi-definite matrices with no
common null space, whether the likelihood is log-concave (:math:`S \le I`) or not.
"""

from __future__ import annotations

from typing import NamedTuple

import jax.numpy as jnp
from jax import Array

from numpyro_gpaug.gaussians.dense import Moments, NaturalGaussian, Prior
from numpyro_gpaug.math.linalg import diagonal, one_by_one, precise


@precise
def projected(q: Moments, projection: Array) -> tuple[Moments, Array]:
    """Return the Gaussian of ``b``, given the Gaussian of ``a``.

    :param q: moments of a, (latents, K).
    :param projection: A, (1 or latents, M, K).
    :return: moments of b, (latents, M), and the divergence of its process from the
        process of ``q``, (latents,): 0 up to rounding where ``b`` determines ``a``.
    """
    root = q.precision_root()
    known = projection @ root
    eye = jnp.eye(projection.shape[-2], dtype=projection.dtype)
    apart = eye - projection @ projection.mT
    # The residual of b in a regression on the mean of a. It is zero if b has the points
    # of a in another order, and small if a has almost the same information.
    start = jnp.matvec(projection, q.mean)
    unsaid = jnp.vecmat(q.mean - jnp.vecmat(start, projection), root)
    potential = jnp.matvec(known, unsaid) - jnp.vecmat(start, apart)
    precision = jnp.broadcast_to(apart + known @ known.mT, (*start.shape, len(eye)))
    found = NaturalGaussian(potential, precision).moments()
    found = found._replace(mean=start + found.mean)
    return found, _divergence(q, found, projection, root, apart)


def _divergence(
    q: Moments, new: Moments, projection: Array, root: Array, apart: Array
) -> Array:
    """Return the KL divergence between the processes of ``new`` and of ``q``: sums of
    squares, the trace term of the bound, and determinants."""
    eye = jnp.eye(projection.shape[-1], dtype=projection.dtype)
    left = eye - projection.mT @ projection
    trace = (root * (left @ root)).sum((-2, -1)) - diagonal(left).sum(-1)
    missed = jnp.vecmat(q.mean - jnp.vecmat(new.mean, projection), root)
    prior = new.mean * jnp.vecmat(new.mean, apart)
    distance = jnp.square(missed).sum(-1) + prior.sum(-1)
    log_det = 2 * jnp.log(jnp.abs(diagonal(root))).sum(-1)
    return 0.5 * (trace + distance - new.log_det - log_det)


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
