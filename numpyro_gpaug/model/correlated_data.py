# SPDX-License-Identifier: Apache-2.0
r"""Gaussian data whose entries are correlated: several outcomes of one subject,
residuals along time or space.

With a covariance ``S = L L'`` that depends on no Gaussian latent, and a mean ``eta``
that is affine in them,

.. math:: \log N(y | \eta, L L') = \sum_i \log N(0 | c (L^{-1} (\eta - y))_i, c^2),
   \quad c^n = |L|:

independent normal data of other predictors, which are affine too. Nothing else in the
package depends on covariances of data, except for predictions.

Reference: Aitken (1935), On least squares and linear combination of observations.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import jax.numpy as jnp
import numpyro.distributions as dist
from jax import Array
from numpyro import handlers
from numpyro.infer.reparam import Reparam

from numpyro_gpaug.likelihoods.expectations import base_distribution, feasible
from numpyro_gpaug.math import linalg
from numpyro_gpaug.model.gaussians import car_precision

_CORRELATED = (
    dist.MultivariateNormal,
    dist.LowRankMultivariateNormal,
    dist.CAR,
    dist.MatrixNormal,
)


def correlated_axes(fn: Any) -> int:
    """Return the number of axes of the event of a Gaussian with a mean and a
    covariance, also inside wrappers: 1 for vectors, 2 for matrices. It is 0 for any
    other distribution.

    :param fn: the distribution of a site.
    """
    base = base_distribution(fn)
    return base.event_dim if isinstance(base, _CORRELATED) else 0


def mean_of(fn: Any) -> Array:
    """Return the mean of such a distribution, in the shape of its values.

    :param fn: the distribution of a site.
    """
    return jnp.broadcast_to(base_distribution(fn).loc, fn.shape())


def covariance_of(fn: Any, axes: int) -> Array:
    """Return the covariance of its entries, (..., n, n); the entries of a matrix are
    counted row by row. For data that were rewritten as independent ones it is the
    covariance of these.

    :param fn: the distribution of a site.
    :param axes: see :func:`correlated_axes`.
    """
    base = base_distribution(fn)
    if isinstance(base, dist.Normal):
        scale = base.scale.reshape(*base.scale.shape[: base.scale.ndim - axes], -1)
        return jnp.square(scale)[..., None] * jnp.eye(scale.shape[-1])
    if isinstance(base, dist.MatrixNormal):
        factors = base.scale_tril_row, base.scale_tril_column
        rows, columns = (f @ f.mT for f in factors)
        whole = jnp.einsum("...ij,...kl->...ikjl", rows, columns)
        size = rows.shape[-1] * columns.shape[-1]
        return whole.reshape(*whole.shape[:-4], size, size)
    return _factor_and_covariance(base)[1]


def independent_data(model: Callable[..., Any]) -> Callable[..., Any]:
    """Return ``model`` with correlated Gaussian data rewritten as independent ones.

    :param model: a NumPyro model.
    """

    def chosen(message: dict[str, Any]) -> Reparam | None:
        fn, value = message["fn"], message["value"]
        _check_factors(message["name"], base_distribution(fn))
        # Data of another shape are refused by the checks of sites.
        right = message["is_observed"] and jnp.shape(value) == fn.shape()
        return _Independent() if right and correlated_axes(fn) else None

    return handlers.reparam(model, config=chosen)


class _Independent(Reparam):
    """The reparametrisation of :func:`independent_data`."""

    def __call__(self, name: str, fn: Any, obs: Any) -> tuple[Any, Array]:
        base, apart = base_distribution(fn), mean_of(fn) - feasible(fn, obs)
        if isinstance(base, dist.MatrixNormal):
            rows, columns = map(
                linalg.inverse_lower, (base.scale_tril_row, base.scale_tril_column)
            )
            log_scale = (_log_scale(rows) + _log_scale(columns))[..., None, None]
            white = rows @ apart @ columns.mT
        else:
            factor, _ = _factor_and_covariance(base)
            log_scale = _log_scale(factor)[..., None]
            white = (factor @ apart[..., None])[..., 0]
        scale = jnp.broadcast_to(jnp.exp(log_scale), apart.shape)
        away = scale * white
        normal = dist.Normal(away, scale).to_event(base.event_dim)
        return _wrapped(fn, normal), jnp.zeros_like(away)


def _wrapped(fn: Any, base: Any) -> Any:
    """Return a distribution of the shape of ``fn`` in its masks and ``to_event``."""
    if isinstance(fn, dist.MaskedDistribution):
        return _wrapped(fn.base_dist, base).mask(fn._mask)
    if isinstance(fn, dist.Independent):
        return _wrapped(fn.base_dist, base).to_event(fn.reinterpreted_batch_ndims)
    expanded = isinstance(fn, dist.ExpandedDistribution)
    return _wrapped(fn.base_dist, base) if expanded else base


def _log_scale(factor: Array) -> Array:
    """Return the logarithm of the geometric mean of standard deviations, from a
    triangular factor of a precision."""
    return -jnp.log(jnp.diagonal(factor, axis1=-2, axis2=-1)).mean(-1)


def _check_factors(name: str, base: Any) -> None:
    """Raise if the factors of a MatrixNormal do not have the size of its location,
    which NumPyro does not check.

    :param name: the name of a site.
    :param base: its distribution, without wrappers.
    """
    if not isinstance(base, dist.MatrixNormal):
        return
    factors = base.scale_tril_row, base.scale_tril_column
    pairs = zip(base.event_shape, factors, strict=True)
    for kind, (size, factor) in zip(("row", "column"), pairs, strict=True):
        if factor.shape[-1] != size:
            raise ValueError(
                f"site {name!r}: the location has shape {base.event_shape}, and "
                f"scale_tril_{kind} has {factor.shape[-1]} rows. Compute it for the "
                f"{kind}s of the location, at new inputs too"
            )


def _factor_and_covariance(base: Any) -> tuple[Array, Array]:
    """Return a triangular W, with ``W' W`` the inverse of the covariance, and the
    covariance."""
    if isinstance(base, dist.CAR):
        factor = linalg.cholesky(car_precision(base))
        inverse = linalg.inverse_lower(factor)
        return factor.mT, inverse.mT @ inverse
    if isinstance(base, dist.LowRankMultivariateNormal):
        covariance = base.covariance_matrix
        return linalg.inverse_cholesky(covariance), covariance
    factor = base.scale_tril
    return linalg.inverse_lower(factor), factor @ factor.mT
