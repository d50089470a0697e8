# SPDX-License-Identifier: Apache-2.0
"""Other observations of the predicted rows: a covariate measured with error, another
response."""

from __future__ import annotations

from typing import Any

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
from numpyro_gpaug.math import linalg
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
