# SPDX-License-Identifier: Apache-2.0
r"""The information of old data under another prior, and about other function values.

A posterior :math:`q(a)` under a prior :math:`p(a)` is that prior times the information
of the data, :math:`t(a) = q(a) / p(a)`, which contains no prior. Let the columns of
:math:`V \Sigma` be the principal axes of q where p is standard normal, and :math:`a = m
+ V \Sigma z`. Then q is standard normal in z, and

.. math::

    t(z) \propto \prod_i \exp(h_i z_i - (1 - \sigma_i^2) z_i^2 / 2), \quad
    h = \Sigma V^\top m.

No axis loses digits to others, about which the data say a million times as much: a
precision matrix of a would lose them. Under another prior the posterior is proper,
because negative precisions, as of likelihoods that are not log-concave, are dropped.

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
from numpyro_gpaug.math.linalg import diagonal, precise


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


class SeenPrior(NamedTuple):
    """A prior of independent normal latents, with the information of old data, as a
    prior of ``z``. The posterior from the old data, under an earlier prior, was
    standard normal in z, see the module.

    :param prior: the prior of the latents.
    :param here: the latents, given z, as moments: ``mean + W' z``.
    :param precision: that of the information about each z under the earlier prior, not
        negative, (latents, M).
    :param potential: h, (latents, M).
    :param start: z under the earlier prior, where z is zero here, (latents, M).
    :param turn: its derivatives in z, (latents, M, M).
    """

    prior: Prior
    here: Moments
    precision: Array
    potential: Array
    start: Array
    turn: Array

    @classmethod
    @precise
    def of(
        cls, prior: Prior, here: Moments, white: Moments, start: Array, turn: Array
    ) -> SeenPrior:
        """Return the prior with the information of a posterior. Unresolved and negative
        precisions are dropped.

        :param prior: the prior of the latents.
        :param here: the posterior from old data.
        :param white: the same in units where the earlier prior was standard normal, by
            principal axes.
        :param start: see the class.
        :param turn: see the class.
        """
        precision = 1 - jnp.square(white.whitener).sum(-1)
        resolved = precision > jnp.finfo(precision.dtype).eps * precision.shape[-1]
        potential = jnp.matvec(white.whitener, white.mean)
        precision, potential = (
            jnp.where(resolved, x, 0) for x in (precision, potential)
        )
        return cls(prior, here, precision, potential, start, turn)

    @property
    def loc(self) -> Array:
        """The mean of z in the posterior from old data."""
        return jnp.zeros_like(self.potential)

    @property
    def _white(self) -> tuple[Array, Array]:
        """The mean of the latents, and W, in standard deviations of the prior."""
        loc, scale = self.prior
        return (self.here.mean - loc) / scale, self.here.whitener / scale[..., None, :]

    @property
    @precise
    def natural(self) -> NaturalGaussian:
        """The potential and precision of z under prior and information."""
        mean, rows = self._white
        informed = self.precision[..., None] * self.turn
        precision = rows @ rows.mT + self.turn.mT @ informed
        told = self.potential - self.precision * self.start
        potential = jnp.vecmat(told, self.turn) - jnp.matvec(rows, mean)
        return NaturalGaussian(potential, precision)

    @precise
    def divergence(self, q: Moments) -> Array:
        """Return KL(q || prior) minus the expected log of the information, (latents,),
        up to a constant."""
        mean, rows = self._white
        mean = mean + jnp.vecmat(q.mean, rows)
        squares = jnp.square(mean).sum(-1) + jnp.square(q.whitener @ rows).sum((-2, -1))
        before = self.start + jnp.matvec(self.turn, q.mean)
        spread = jnp.square(q.whitener @ self.turn.mT).sum(-2)
        told = self.precision * (jnp.square(before) + spread)
        told = 0.5 * told - self.potential * before
        log_scale = jnp.log(self.prior.scale).sum(-1)
        size = rows.shape[-1]
        return 0.5 * (squares - size - q.log_det) + log_scale + told.sum(-1)

    @precise
    def pull(self, mean: Array) -> Array:
        """Return the gradient of :meth:`divergence` in the means, (latents, M).

        :param mean: the means, (latents, M).
        """
        middle, rows = self._white
        pulled = jnp.matvec(rows, middle + jnp.vecmat(mean, rows))
        before = self.start + jnp.matvec(self.turn, mean)
        told = self.precision * before - self.potential
        return pulled + jnp.vecmat(told, self.turn)
