# SPDX-License-Identifier: Apache-2.0
"""Gaussian factors of observations that are removed from the moments of predictors; and
other observations of the predicted rows: a covariate measured with error, another
response."""

from __future__ import annotations

from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
import numpyro.distributions as dist
from jax import Array

from numpyro_gpaug.errors import NotConjugateError
from numpyro_gpaug.gaussians.dense import AffineMap, Moments
from numpyro_gpaug.likelihoods.expectations import (
    Route,
    base_distribution,
    feasible,
    through_wrappers,
)
from numpyro_gpaug.math import linalg, small
from numpyro_gpaug.model.affine import Predictors
from numpyro_gpaug.model.expectation import Likelihood, scaled_sum
from numpyro_gpaug.model.latents import Structure
from numpyro_gpaug.model.structure import Observed


def local_names(structure: Structure) -> set[str]:
    """Return the names of the latents that have a member for every row."""
    return {s.name for s in structure.sites if s.local}


def refuse_others(site: Observed, fn: Any, structure: Structure) -> None:
    """Raise for observations that a Gaussian cannot be conditioned on.

    :param site: a site that is observed at the new rows.
    :param fn: its distribution.
    :param structure: the structure of the model there.
    """
    chained = {name for steps in structure.recurrences for name, _ in steps.sites}
    normal = isinstance(base_distribution(fn), dist.Normal)
    if (
        site.route is Route.CLOSED_FORM
        and normal
        and not chained & local_names(structure)
    ):
        return
    raise NotConjugateError(
        f"site {site.name!r} is observed at the new rows and shares latents with "
        "the prediction. Conditioning on it needs Normal observations of latents "
        f"in plates, and it is {type(base_distribution(fn)).__name__}. Mask it "
        "there (numpyro.handlers.mask), or fit the new rows too, with the "
        "prediction masked, and draw, numpyro.infer.Predictive(model, guide=guide, "
        "params=fit.params, num_samples=...)"
    )


def conditioned(
    q: Any,
    structure: Structure,
    predictors: list[Predictors],
    likelihoods: list[Likelihood],
) -> Moments:
    """Return the Gaussian on the latents at new rows, given other observations of these
    rows. Only the rows' own latents are conditioned, given all other latents, which
    keep their fitted distribution: a prediction of one row does not depend on the other
    rows.

    :param q: a Gaussian in which the latents of new rows have their prior.
    :param structure: the structure of the model at the new rows.
    :param predictors: predictors of Normal observations.
    :param likelihoods: the distributions of these observations.
    """
    numbers = structure.split(np.arange(structure.size))
    own = np.concatenate([numbers[k].ravel() for k in sorted(local_names(structure))])
    spread = q.unwhiten(jnp.eye(q.rank, dtype=q.mean.dtype)).at[:, own].set(0)
    mean = q.mean[0].at[own].set(0)
    maps = [p.dense for p in predictors]
    projection = jnp.concatenate([m.projection[0] for m in maps], -1)
    parts = [
        _factors(m, likelihood, m(mean[None])[0])
        for m, likelihood in zip(maps, likelihoods, strict=True)
    ]
    slope, precision = (jnp.concatenate(x) for x in zip(*parts, strict=True))
    ours = projection[own]
    eye = jnp.eye(len(own), dtype=mean.dtype)
    whitener = linalg.inverse_cholesky(eye + (ours * precision) @ ours.T)
    given = whitener.T @ (whitener @ ours)
    # The regression of the rows' own latents on all others, and the residual.
    follow = -(spread @ projection) @ (given * precision).T
    left = jnp.zeros((len(own), structure.size), mean.dtype).at[:, own].set(whitener)
    rows = jnp.concatenate([spread.at[:, own].set(follow), left])
    return Moments(mean.at[own].set(given @ slope)[None], rows[None])


def _factors(map_: AffineMap, likelihood: Likelihood, at: Array) -> tuple[Array, Array]:
    """Return slopes and curvatures, flat, of the log-density of Normal observations in
    their predictors, including the variance that inducing values do not explain."""
    fn, value = likelihood.fn, feasible(likelihood.fn, likelihood.value)
    shape = jnp.shape(base_distribution(fn).loc)

    def density(loc: Array) -> Array:
        def log_prob(d: Any) -> Array:
            return dist.Normal(loc.reshape(shape), d.scale).log_prob(value)

        return jnp.asarray(scaled_sum(through_wrappers(fn, log_prob), likelihood.scale))

    slope, curved = jax.jvp(jax.grad(density), (at,), (jnp.ones_like(at),))
    shrunk = 1 / (1 - curved * map_.residual[0])
    return slope * shrunk, -curved * shrunk


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

    :param own: covariances, of the predictors of the factors first, (..., k, k).
    :param slopes: g, (..., cut).
    :param precision: W, (..., cut, cut).
    """
    cut = slopes.shape[-1]
    pp, rp = own[..., :cut, :cut], own[..., cut:, :cut]
    kept = jnp.eye(cut, dtype=own.dtype) - small.product(precision, pp)
    gain = _solved(kept.mT, rp.mT)[0].mT
    added = small.product(gain, small.product(precision, rp.mT))
    return jnp.matvec(gain, slopes), own[..., cut:, cut:] + added


def without_groups(
    whole: Array, slopes: Array, precision: Array, together: LeftOut
) -> tuple[Array, Array]:
    """Return :func:`without_factors` where the factors of a group are removed at once.

    :param whole: covariances of all predictors, (count, n, count, n).
    """
    count, cut = len(whole), slopes.shape[1]
    wide = together.members.shape[1]

    def of_group(members: Array) -> tuple[Array, Array]:
        factors = _factors_of(slopes, precision, members)
        shift, spread = without_factors(_of_group(whole, members), *factors)
        of_datum = jnp.einsum("irjr->rij", spread.reshape(2 * (count - cut, wide)))
        there = jnp.where((members >= 0)[:, None], linalg.diagonal(of_datum), 1)
        proper = (there > 0).all()
        return shift.reshape(-1, wide).T, jnp.where(proper, of_datum, jnp.nan)

    found = jax.lax.map(of_group, together.members)
    return jax.tree.map(lambda x: x.reshape(-1, *x.shape[2:])[together.place], found)


def log_density(own: Array, slopes: Array, precision: Array) -> Array:
    r"""Return the logarithm of the mean of factors under the Gaussian without them,
    (...).

    Each factor is one at the mean of its predictors. The mean is
    :math:`\tfrac12 \log |I - W C| - \tfrac12 g^\top C (I - W C)^{-1} g`, with the
    symbols of :func:`without_factors`.

    :param own: covariances of the predictors of the factors, (..., k, k).
    :param slopes: g, (..., k).
    :param precision: W, (..., k, k).
    """
    kept = jnp.eye(own.shape[-1], dtype=own.dtype) - small.product(precision, own)
    moved, log_det = _solved(kept, slopes[..., None])
    return 0.5 * (log_det - (slopes * jnp.matvec(own, moved[..., 0])).sum(-1))


def log_density_of_groups(
    whole: Array, slopes: Array, precision: Array, together: LeftOut
) -> Array:
    """Return :func:`log_density` of the factors of each group, (G,).

    :param whole: covariances of all predictors, (count, n, count, n).
    """
    known = whole[: slopes.shape[1], :, : slopes.shape[1]]

    def of_group(members: Array) -> Array:
        factors = _factors_of(slopes, precision, members)
        return log_density(_of_group(known, members), *factors)

    return jax.lax.map(of_group, together.members)


def _of_group(whole: Array, members: Array) -> Array:
    """Return the covariance of the predictors of a group, by predictor and member."""
    at = jnp.maximum(members, 0)
    size = len(whole) * len(at)
    return whole[:, at][:, :, :, at].reshape(size, size)


def _factors_of(slopes: Array, precision: Array, members: Array) -> tuple[Array, Array]:
    """Return the slopes of a group's factors, flat, and their precision."""
    there, at = members >= 0, jnp.maximum(members, 0)
    # Absent members have no factor.
    each = jnp.where(there[:, None, None], precision[at], 0)
    w = jnp.einsum("rij,rs->irjs", each, jnp.eye(len(at), dtype=each.dtype))
    return jnp.where(there, slopes[at].T, 0).ravel(), w.reshape(2 * (slopes[at].size,))


def _solved(x: Array, right: Array) -> tuple[Array, Array]:
    """Return ``x^-1 right`` of matrices (..., k, k) and (..., k, n), and the
    log-determinants of x; NaN where a determinant is not positive."""
    if x.shape[-1] > 2:
        sign, log_det = linalg.one_by_one(jnp.linalg.slogdet)(x)
        found = linalg.one_by_one(jnp.linalg.solve)(x, right)
    else:
        a, b, c, d = x[..., 0, 0], x[..., 0, -1], x[..., -1, 0], x[..., -1, -1]
        two = x.shape[-1] == 2
        sign = a * d - b * c if two else a
        adjugate = jnp.stack([d, -b, -c, a], -1) if two else jnp.ones_like(x)
        found = small.product(adjugate.reshape(x.shape), right) / sign[..., None, None]
        log_det = jnp.log(sign)
    proper = sign > 0
    found = jnp.where(proper[..., None, None], found, jnp.nan)
    return found, jnp.where(proper, log_det, jnp.nan)
