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

from numpyro_gpaug.errors import NotConjugateError
from numpyro_gpaug.likelihoods.expectations import base_distribution, feasible
from numpyro_gpaug.math import linalg
from numpyro_gpaug.model.gaussians import car_precision

_CORRELATED = (
    dist.MultivariateNormal,
    dist.LowRankMultivariateNormal,
    dist.CAR,
    dist.MatrixNormal,
)


def is_correlated(fn: Any) -> bool:
    """Whether a distribution is a Gaussian with a mean and a covariance, also inside
    wrappers.

    :param fn: the distribution of a site.
    """
    return isinstance(base_distribution(fn), _CORRELATED)


def mean_of(fn: Any) -> Array:
    """Return the mean of such a distribution, in the shape of its values.

    :param fn: the distribution of a site.
    """
    return jnp.broadcast_to(base_distribution(fn).loc, fn.shape())


def covariance_of(fn: Any) -> Array:
    """Return the covariance of its entries, (..., n, n). For data that were rewritten
    as independent ones it is the covariance of these.

    :param fn: the distribution of a site.
    :raises NotConjugateError: for a matrix whose rows and columns are both correlated.
    """
    base = base_distribution(fn)
    if isinstance(base, dist.MatrixNormal):
        raise NotConjugateError(
            "predictions of MatrixNormal data are not implemented. Name the mean, "
            "numpyro.deterministic('eta', ...), and predict it by predict_f(..., "
            "site='eta')"
        )
    if isinstance(base, dist.Normal):
        return jnp.square(base.scale)[..., None] * jnp.eye(base.scale.shape[-1])
    return _factor_and_covariance(base)[1]


def independent_data(model: Callable[..., Any]) -> Callable[..., Any]:
    """Return ``model`` with correlated Gaussian data rewritten as independent ones.

    :param model: a NumPyro model.
    """

    def chosen(message: dict[str, Any]) -> Reparam | None:
        fn, value = message["fn"], message["value"]
        # Data of another shape are refused where sites are checked.
        right = message["is_observed"] and jnp.shape(value) == fn.shape()
        return _Independent() if right and is_correlated(fn) else None

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
        law = dist.Normal(away, scale).to_event(fn.event_dim)
        if isinstance(fn, dist.MaskedDistribution):
            law = law.mask(fn._mask)
        return law, jnp.zeros_like(away)


def _log_scale(factor: Array) -> Array:
    """Return the logarithm of the geometric mean of standard deviations, from a
    triangular factor of a precision."""
    return -jnp.log(jnp.diagonal(factor, axis1=-2, axis2=-1)).mean(-1)


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
