# SPDX-License-Identifier: Apache-2.0
"""Gaussian factors of observations that are removed from the moments of predictors."""

from __future__ import annotations

from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
from jax import Array

from numpyro_gpaug.math import linalg, small


class LeftOut(NamedTuple):
    """The observations that are left out together.

    :param members: the places of the data of each group, (G, R); -1 for none.
    :param place: the place of each datum among them, (n,).
    """

    members: Array
    place: Array

    @classmethod
    def of(cls, groups: np.ndarray) -> LeftOut:
        """Sort data by their group.

        :param groups: labels, (n,).
        """
        _, group, sizes = np.unique(groups, return_inverse=True, return_counts=True)
        order = np.argsort(group, kind="stable")
        within = np.arange(len(order)) - np.repeat(np.cumsum(sizes) - sizes, sizes)
        members = np.full((len(sizes), sizes.max()), -1)
        members[group[order], within] = order
        place = np.empty_like(order)
        place[order] = group[order] * members.shape[1] + within
        return cls(jnp.asarray(members), jnp.asarray(place))


class Removed(NamedTuple):
    """Gaussian factors that are taken from the predictors of a site.

    :param roots: the variables of the predictors.
    :param slopes: derivatives in their means, (n, roots).
    :param precision: precisions of the factors, (n, roots, roots).
    :param together: data that are left out together; ``None`` for each by itself.
    """

    roots: list[Any]
    slopes: Array
    precision: Array
    together: LeftOut | None


def of_each_datum(map_: Any, q: Any, variance: Array) -> Array:
    """Return the covariances of the predictors of each datum, (n, count, count).

    :param map_: the map of all predictors, one after the other.
    :param q: moments of the latents.
    :param variance: variances of the predictors, (count, n).
    """
    count, size = variance.shape
    rows, own = jnp.arange(size), jnp.zeros((size, count, count), variance.dtype)
    for i in range(count):
        own = own.at[:, i, i].set(variance[i])
        for j in range(i):
            each = map_.covariances(q, i * size + rows, j * size + rows)[0]
            own = own.at[:, i, j].set(each).at[:, j, i].set(each)
    return own


def without_factors(own: Array, slopes: Array, precision: Array) -> tuple[Array, Array]:
    r"""Return how far means fall, and covariances, of predictors without one or two
    factors.

    With p the predictors of the factors, their precision W and the derivatives g in the
    means of p, the moments of predictors r are, with covariances C,

    .. math:: m_r - C_{rp} (I - W C_{pp})^{-1} g, \quad
        C_{rr} + C_{rp} (I - W C_{pp})^{-1} W C_{pr}.

    They are NaN where less is known of p than the factors say.

    :param own: covariances, of the predictors of the factors first, (n, k, k).
    :param slopes: g, (n, cut).
    :param precision: W, (n, cut, cut).
    """
    cut = slopes.shape[1]
    pp, rp = own[:, :cut, :cut], own[:, cut:, :cut]
    kept = jnp.eye(cut, dtype=own.dtype) - small.product(precision, pp)
    gain = small.product(rp, _inverse(kept))
    added = small.product(gain, small.product(precision, rp.mT))
    return jnp.matvec(gain, slopes), own[:, cut:, cut:] + added


def without_groups(
    whole: Array, slopes: Array, precision: Array, together: LeftOut
) -> tuple[Array, Array]:
    """Return :func:`without_factors` where the factors of a group are removed at once.

    :param whole: covariances of all predictors, (count, n, count, n).
    """
    count, cut = len(whole), slopes.shape[1]
    wide = together.members.shape[1]

    @linalg.one_by_one
    def solved(kept: Array, rp: Array) -> Array:
        sign, _ = jnp.linalg.slogdet(kept)
        return jnp.where(sign > 0, jnp.linalg.solve(kept.T, rp.T).T, jnp.nan)

    def of_group(members: Array) -> tuple[Array, Array]:
        there, at = members >= 0, jnp.maximum(members, 0)
        own = whole[:, at][:, :, :, at]
        rp = own[cut:, :, :cut].reshape(-1, cut * wide)
        pp, w, g = _of_group(whole[:cut, :, :cut], slopes, precision, members)
        gain = solved(jnp.eye(len(pp), dtype=own.dtype) - w @ pp, rp)
        spread = own[cut:, :, cut:].reshape(len(rp), len(rp)) + gain @ w @ rp.T
        of_datum = jnp.einsum("irjr->rij", spread.reshape(2 * (count - cut, wide)))
        variances = linalg.diagonal(of_datum)
        proper = (jnp.where(there[:, None], variances, 1) > 0).all()
        return (gain @ g).reshape(-1, wide).T, jnp.where(proper, of_datum, jnp.nan)

    found = jax.lax.map(of_group, together.members)
    return jax.tree.map(lambda x: x.reshape(-1, *x.shape[2:])[together.place], found)


def log_density(own: Array, slopes: Array, precision: Array) -> Array:
    r"""Return the logarithm of the mean of factors under the Gaussian without them,
    (n,).

    Each factor is one at the mean of its predictors. The mean is
    :math:`\tfrac12 \log |I - W C| - \tfrac12 g^\top C (I - W C)^{-1} g`, with the
    symbols of :func:`without_factors`.

    :param own: covariances of the predictors of the factors, (n, k, k).
    :param slopes: g, (n, k).
    :param precision: W, (n, k, k).
    """
    kept = jnp.eye(own.shape[-1], dtype=own.dtype) - small.product(precision, own)
    log_det, inverse = _log_det(kept), _inverse(kept)
    fall = (slopes * jnp.matvec(small.product(own, inverse), slopes)).sum(-1)
    return 0.5 * (log_det - fall)


def log_density_of_groups(
    whole: Array, slopes: Array, precision: Array, together: LeftOut
) -> Array:
    """Return :func:`log_density` of the factors of each group, (G,).

    :param whole: covariances of all predictors, (count, n, count, n).
    """
    cut, wide = slopes.shape[1], together.members.shape[1]

    @linalg.one_by_one
    def of(kept: Array, pp: Array, g: Array) -> Array:
        sign, log_det = jnp.linalg.slogdet(kept)
        fall = g @ pp @ jnp.linalg.solve(kept, g)
        return jnp.where(sign > 0, 0.5 * (log_det - fall), jnp.nan)

    def of_group(members: Array) -> Array:
        pp, w, g = _of_group(whole[:cut, :, :cut], slopes, precision, members)
        return of(jnp.eye(cut * wide, dtype=pp.dtype) - w @ pp, pp, g)

    return jax.lax.map(of_group, together.members)


def _of_group(
    whole: Array, slopes: Array, precision: Array, members: Array
) -> tuple[Array, Array, Array]:
    """Return the covariance of the predictors of a group's factors, the precision of
    the factors, and their slopes, flat."""
    there, at = members >= 0, jnp.maximum(members, 0)
    cut, wide = slopes.shape[1], len(members)
    pp = whole[:, at][:, :, :, at].reshape(cut * wide, cut * wide)
    # Absent members have no factor.
    each = jnp.where(there[:, None, None], precision[at], 0)
    w = jnp.einsum("rij,rs->irjs", each, jnp.eye(wide, dtype=pp.dtype))
    return pp, w.reshape(pp.shape), jnp.where(there, slopes[at].T, 0).ravel()


def _log_det(x: Array) -> Array:
    """Return the log-determinants of matrices of one or two rows, (n, k, k)."""
    a, b, c, d = x[:, 0, 0], x[:, 0, -1], x[:, -1, 0], x[:, -1, -1]
    return jnp.log(a * d - b * c if x.shape[-1] == 2 else a)


def _inverse(x: Array) -> Array:
    """Return the inverses of matrices of one or two rows, (n, k, k); NaN where the
    determinant is not positive."""
    a, b, c, d = x[:, 0, 0], x[:, 0, -1], x[:, -1, 0], x[:, -1, -1]
    two = x.shape[-1] == 2
    determinant = a * d - b * c if two else a
    adjugate = jnp.stack([d, -b, -c, a], -1) if two else jnp.ones_like(x)
    kept = jnp.where(determinant > 0, determinant, jnp.nan)
    return adjugate.reshape(x.shape) / kept[:, None, None]
