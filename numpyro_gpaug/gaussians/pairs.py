# SPDX-License-Identifier: Apache-2.0
r"""Pairs of predictors that likelihoods depend on, affine in one Gaussian.

A datum whose likelihood depends on two predictors (a location and a logarithm of a
scale) needs their covariance, and its Gaussian factor is a function of both:

.. math:: \exp(h_1 p_1 + h_2 p_2 - w_1 p_1^2 / 2 - w_2 p_2^2 / 2 - c\, p_1 p_2).
"""

from __future__ import annotations

from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
from jax import Array

from numpyro_gpaug.gaussians.base import GaussianFactors, Marginals, gaussian_factors


class PairMarginals(NamedTuple):
    """Means, variances and covariances of predictors.

    :param mean: (1, n).
    :param variance: (1, n).
    :param covariance: of the pairs, (1, P).
    """

    mean: Array
    variance: Array
    covariance: Array


class PairFactors(NamedTuple):
    """Gaussian factors on predictors and on pairs of them.

    :param potential: h, (1, n).
    :param precision: w, (1, n).
    :param cross: c, (1, P).
    """

    potential: Array
    precision: Array
    cross: Array


class PairedMap(NamedTuple):
    """An affine map with pairs of predictors.

    :param single: the map, an :class:`~numpyro_gpaug.gaussians.dense.AffineMap` or an
        :class:`~numpyro_gpaug.gaussians.rows.RowMap`.
    :param left: one predictor of each pair, (P,).
    :param right: the other.
    """

    single: Any
    left: Array
    right: Array

    def marginals(self, q: Any) -> PairMarginals:
        """Return marginals of the predictors, and covariances of the pairs.

        :param q: moments of the latents, with a leading axis of 1.
        """
        mean, variance = self.single.marginals(q)
        pairs = self.single.covariances(q, self.left, self.right)
        return PairMarginals(mean, variance, pairs)

    @property
    def offset(self) -> Array:
        """The predictors where all latents are zero, (1, n)."""
        return self.single.offset

    def certain(self) -> PairedMap:
        """Return the same map without the residual."""
        return self._replace(single=self.single.certain())

    def given(self, z: Array) -> Any:
        """Return means and variances of the predictors given latents.

        :param z: the latents, with a leading axis of 1.
        """
        return self.single.given(z)

    def swapped(self, x: Array, pairs: Array) -> Array:
        """Return ``C x``, where the symmetric matrix C has the pairs as entries.

        :param x: numbers of the predictors, (1, n).
        :param pairs: numbers of the pairs, (1, P).
        """
        left, right = self.left, self.right
        moved = jnp.zeros_like(x).at[..., left].add(pairs * x[..., right])
        return moved.at[..., right].add(pairs * x[..., left])

    def factors(
        self, at: PairMarginals, slopes: PairMarginals, least_precision: float
    ) -> PairFactors:
        """Return the factors of predictors, as
        :func:`~numpyro_gpaug.gaussians.base.gaussian_factors` does, and of pairs: with
        E the expected log-likelihood of a datum, ``c = -dE/dcovariance``."""
        means, spreads = (Marginals(x.mean, x.variance) for x in (at, slopes))
        potential, precision = gaussian_factors(means, spreads, least_precision)
        cross = -slopes.covariance
        lean = self.swapped(at.mean, cross)
        return PairFactors(potential + lean, precision, cross)

    def information(self, factors: PairFactors, about: Array | None = None) -> Any:
        """Return the information of factors about the latents, to be added to the
        prior's.

        :param factors: factors of predictors and pairs.
        :param about: as in :meth:`numpyro_gpaug.gaussians.dense.AffineMap.information`.
        """
        about = self.single.offset if about is None else about
        lean = self.swapped(about, factors.cross)
        own = GaussianFactors(factors.potential - lean, factors.precision)
        coupling = self.single.coupling(factors.cross, self.left, self.right)
        return jax.tree.map(jnp.add, self.single.information(own, about), coupling)


def factors_of(
    map_: Any, at: Any, slopes: Any, least_precision: float = -jnp.inf
) -> GaussianFactors | PairFactors:
    """Return the factors on the predictors of a map, and on pairs of them if it has
    any; see :func:`~numpyro_gpaug.gaussians.base.gaussian_factors`."""
    if isinstance(map_, PairedMap):
        return map_.factors(at, slopes, least_precision)
    return gaussian_factors(at, slopes, least_precision)


def slope_changes(map_: Any, slopes: Any, moved: Array) -> Array:
    """Return the changes of the derivatives in the means of predictors, with fixed
    factors.

    :param map_: the map.
    :param slopes: the derivatives in the marginals, which define the factors.
    :param moved: changes of the means.
    """
    found = 2 * slopes.variance * moved
    if isinstance(map_, PairedMap):
        found += map_.swapped(moved, slopes.covariance)
    return found


def observed(map_: Any, mean: Array, precision: Array) -> Any:
    """Return the factors for observing every predictor of a map.

    :param map_: the map.
    :param mean: the observations, (1, n).
    :param precision: their precisions, (1, n).
    """
    own = GaussianFactors(precision * mean, precision)
    if not isinstance(map_, PairedMap):
        return own
    return PairFactors(*own, jnp.zeros((1, len(map_.left)), mean.dtype))
