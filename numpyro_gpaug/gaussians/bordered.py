# SPDX-License-Identifier: Apache-2.0
r"""The moments of latents with a border, whatever the structure of the others.

N latents x have a structured precision, and any predictor may depend on K others, u. If
:math:`S^{-1} = V^\top V` for the Schur complement S of the border,

.. math:: u = m + V^\top \epsilon, \quad x = m + W^\top e - Y \epsilon,

where ``W' W`` is the covariance of x given u. The structure provides W.
"""

from __future__ import annotations

from math import prod
from typing import Any

import jax.numpy as jnp
from jax import Array

from numpyro_gpaug.math import linalg


class Bordered:
    """The moments of latents with a border.

    Subclasses are named tuples with the following fields, among others, and with a
    leading axis of 1. Their ``given_border`` has three functions of columns (N, n):
    ``half(b)`` returns ``W b``, ``drawn(e)`` returns ``W' e``, and ``noise_of`` is the
    inverse of ``drawn``.

    :param mean: (1, N + K).
    :param cross: Y, (1, N, E), where further axes may divide the N latents.
    :param whitener: V, (1, E, K); E is K, or more after latents were added.
    """

    mean: Any
    cross: Any
    whitener: Any
    given_border: Any

    @property
    def _across(self) -> Array:
        """Y as one matrix."""
        _, *latents, border = self.cross.shape
        return self.cross.reshape(prod(latents), border)

    @property
    def rank(self) -> int:
        """The number of standard normal numbers that :meth:`unwhiten` takes."""
        return sum(self._across.shape)

    def push_forward(self, projection: Array) -> tuple[Array, tuple[Array, Array]]:
        """Return the shift of the means, and the root of the covariance, under an
        affine map.

        :param projection: A, (1, N + K, n).
        :return: ``A' mean`` (1, n) and rows, (1, rank - E, n) and (1, E, n), whose
            squares sum to the variances.
        """
        own, corner = jnp.split(projection[0], [len(self._across)])
        rest = self.whitener[0] @ corner - linalg.sum_of_products(self._across, own)
        shift = jnp.vecmat(self.mean, projection)
        return shift, (self.given_border.half(own)[None], rest[None])

    def unwhiten(self, noise: Array) -> Array:
        """Return deviations from the mean.

        :param noise: standard normal, (..., rank).
        """
        flat = noise.reshape(-1, self.rank).T
        own, corner = jnp.split(flat, [self.rank - self.whitener.shape[1]])
        rows = self.given_border.drawn(own) - self._across @ corner
        found = jnp.concatenate([rows, self.whitener[0].T @ corner])
        return found.T.reshape(*noise.shape[:-1], len(found))

    def whiten(self, deviation: Array) -> Array:
        """Return the noise of deviations; the inverse of :meth:`unwhiten`.

        :param deviation: (..., N + K).
        """
        flat = deviation.reshape(-1, deviation.shape[-1]).T
        own, corner = jnp.split(flat, [len(self._across)])
        corner = linalg.inverse_lower(self.whitener[0]).mT @ corner
        rows = self.given_border.noise_of(own + self._across @ corner)
        found = jnp.concatenate([rows, corner])
        return found.T.reshape(*deviation.shape[:-1], len(found))
