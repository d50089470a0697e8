# SPDX-License-Identifier: Apache-2.0
r"""Projection of the information about whitened function values onto others.

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

import jax.numpy as jnp
from jax import Array

from numpyro_gpaug.gaussians.dense import Moments, NaturalGaussian
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
