# SPDX-License-Identifier: Apache-2.0
"""The accuracy of natural parameters of a Gaussian under rounding.

If latents compensate for each other (an intercept, and dummy variables of all levels),
the data determine their sum, and only the prior determines the rest. If the prior of
the sum is 1e4 times as wide as its posterior, the precision has entries of 1e8 whose
differences are 1, which float32 cannot represent. The same holds for a potential,
precision times mean, of data that are 1e4 standard deviations from their prior.
"""

from __future__ import annotations

import warnings
from typing import Any

import jax.numpy as jnp
import numpy as np
from jax import Array

from numpyro_gpaug.errors import CholeskyError
from numpyro_gpaug.gaussians.dense import Moments
from numpyro_gpaug.infer.vi.latent_gaussian import Natural
from numpyro_gpaug.math.compiling import jit_for_few_runs
from numpyro_gpaug.model.latents import JOINT, Structure

# The error in nats that users are told of. Means of latents are off by the same number
# of standard deviations.
LOST = 0.1
# Rounding is the cause of a precision that is not positive definite only if it can move
# eigenvalues by this part.
MOVED = 0.01
# A latent is named if its value is at least this part of the largest one.
NAMED = 0.01

_FLOAT64 = "use float64, jax.config.update('jax_enable_x64', True)"


def inflated_and_displaced(natural: Any, moments: Any) -> tuple[Array, Array]:
    """Return the ratios of the variances to the variances given all other latents
    (variance inflation factors), (..., M), or less if the moments are more accurate;
    and the nats that the means lose because potentials are rounded, (..., M).

    Potentials and precisions are sums over rows, whose errors add up to about a unit of
    the last digit: twelve times the variance of one rounding error, which is uniform.

    :param natural: natural parameters of a block.
    :param moments: their moments.
    """
    variances, eps = moments.variances, _eps(natural)
    moved = jnp.square(eps * _potential(natural)) * variances / 2
    own = getattr(natural, "inflation", None)
    return own(variances) if own else natural.diagonal * variances, moved


def _potential(natural: Any) -> Array:
    """Return potentials of latents, not of deviations from a centre, (..., M)."""
    if natural.centre is None:
        return natural.potential
    centre = getattr(natural, "origin", natural.centre)
    return natural.potential + natural.times(centre)


def _eps(natural: Any) -> float:
    return float(jnp.finfo(natural.potential.dtype).eps)


def _is_estimated(natural: Any) -> bool:
    """Whether the log-determinant of a precision is estimated."""
    structure = getattr(natural, "structure", None)
    return structure is not None and not structure.factorised


@jit_for_few_runs
def lost(natural: Natural, moments: dict[str, Any] | None = None) -> Array:
    """Return the error of the bound, in nats, due to rounding of natural parameters, or
    to an estimated log-determinant.

    The relative error of a variance is the rounding error times its inflation. Errors
    are independent: their squares add up.

    :param natural: natural parameters of all blocks.
    :param moments: their moments, if these are known.
    """
    total: Any = 0.0
    for name, each in natural.items():
        q = each.moments() if moments is None else moments[name]
        inflated, moved = inflated_and_displaced(each, q)
        total += _eps(each) * jnp.linalg.norm(inflated) + moved.sum()
        if _is_estimated(each):
            total += q.noise.sum()
    return jnp.asarray(total)


def lost_by(moments: Moments) -> float:
    """Return :func:`lost` of one dense Gaussian, given its moments alone.

    :param moments: its moments, with leading axes of 1.
    """
    shape, eps = moments.whitener.shape[-2:], float(jnp.finfo(moments.mean.dtype).eps)
    inverse = np.linalg.inv(np.asarray(moments.whitener, float).reshape(shape))
    variances = np.asarray(moments.variances, float).ravel()
    potential = inverse @ (np.ravel(moments.mean) @ inverse)
    inflated = np.square(inverse).sum(-1) * variances
    moved = np.square(eps * potential) * variances / 2
    return float(eps * np.linalg.norm(inflated) + moved.sum())


def warn_of_lost(nats: Array, natural: Natural, structure: Structure) -> None:
    """Warn if rounding of natural parameters, or an estimated log-determinant, makes
    the bound uncertain.

    :param nats: from :func:`lost`.
    :param natural: natural parameters of all blocks.
    :param structure: the structure of the model.
    """
    estimated = any(map(_is_estimated, natural.values()))
    if np.asarray(nats) > LOST and estimated:
        warnings.warn(
            "the log-determinant of the precision is estimated, since its factor would "
            f"be too large. This makes the bound uncertain by about {float(nats):.2g} "
            "nats: compare models only if their bounds differ by more. Many members of "
            "the crossed groupings have little data, or form parts that do not cross",
            stacklevel=6,
        )
    elif np.asarray(nats) > LOST:
        both = {k: inflated_and_displaced(x, x.moments()) for k, x in natural.items()}
        figures, cause = {k: moved for k, (_, moved) in both.items()}, _far
        if 2 * sum(float(x.sum()) for x in figures.values()) < nats:
            figures, cause = {k: inflated for k, (inflated, _) in both.items()}, _cause
        warnings.warn(
            f"rounding makes the bound uncertain by about {float(nats):.2g} nats, and "
            "learning may have ended further below: "
            + cause(figures, natural, structure),
            stacklevel=6,
        )


def warn_of_rounded(natural: Natural, structure: Structure) -> None:
    """Warn if rounding of the covariances of processes makes the bound uncertain.

    A datum of precision W loses ``W eps k(x, x) / 2`` nats, and errors are independent.
    The diagonal of the precision of the whitened inducing values is 1 plus a sum over
    data that adds up to ``W k(x, x)``.

    :param natural: natural parameters of all blocks.
    :param structure: the structure of the model.
    """
    if not structure.rounded:
        return
    added = _by_site({k: x.diagonal - 1 for k, x in natural.items()}, structure)
    eps = max(_eps(x) for x in natural.values())
    for name in structure.rounded:
        known = np.asarray(added[f"{name}.v" if structure.joint else name], float)
        nats = eps / 2 * known.sum() / structure.functions[name].shape[0] ** 0.5
        if nats > LOST:
            warnings.warn(
                f"rounding of the covariances of {name!r} makes the bound uncertain by "
                f"about {nats:.2g} nats: its prior variance is far larger than the "
                "variance of the noise. Centre the inputs of kernels that are not "
                "stationary, write a Linear kernel as weights, f(X) + X @ w, pass no "
                f"jitter, or {_FLOAT64}",
                stacklevel=6,
            )


def is_broken(natural: Natural) -> bool:
    """Whether rounding keeps a precision from being positive definite.

    Its eigenvalues are at least one, because of the prior. Rounding changes them by at
    most about its trace times the relative rounding error.

    :param natural: natural parameters of all blocks.
    """
    moved = [
        float(each.diagonal.sum() * jnp.finfo(each.diagonal.dtype).eps)
        for each in natural.values()
    ]
    may_be = np.isfinite(moved).all() and max(moved) > MOVED
    return bool(may_be and not np.isfinite(np.asarray(lost(natural))))


def check_precision(natural: Natural, structure: Structure) -> None:
    """Raise for a precision that :func:`is_broken`.

    :param natural: natural parameters of all blocks.
    :param structure: the structure of the model.
    :raises CholeskyError: for such a precision; it names the latents.
    """
    if is_broken(natural):
        figures = {name: each.diagonal for name, each in natural.items()}
        raise CholeskyError(
            "the precision of the latents is not positive definite as rounded: "
            + _cause(figures, natural, structure)
        )


def _far(figures: dict[str, Any], natural: Natural, structure: Structure) -> str:
    """Describe the cause and the remedy if means are far from zero.

    :param figures: errors by block and latent; the largest are named.
    """
    far = max(
        float((jnp.abs(_potential(x)) / jnp.sqrt(x.diagonal)).max())
        for x in natural.values()
    )
    return (
        f"values of {_named(figures, structure)} are up to {far:.0e} posterior "
        "standard deviations from their prior means. Centre the responses, give "
        f"their location a prior around their mean, or {_FLOAT64}"
    )


def _cause(figures: dict[str, Any], natural: Natural, structure: Structure) -> str:
    """Describe the cause and the remedy if latents compensate for each other.

    :param figures: errors by block and latent; the largest are named.
    """
    widest = max(float(natural[name].diagonal.max()) for name in figures)
    return (
        f"values of {_named(figures, structure)} compensate for each other, under "
        f"priors {widest**0.5:.0e} times as wide as their posteriors given the others. "
        "Narrow these priors, leave out a column that is a combination of others, or "
        f"{_FLOAT64}"
    )


def _named(figures: dict[str, Any], structure: Structure) -> list[str]:
    """Return the sites with the largest values.

    :param figures: errors by block and latent.
    """
    sites = _by_site(figures, structure)
    largest = max(np.max(x) for x in sites.values())
    return [k for k, x in sites.items() if np.max(x) > NAMED * largest]


def _by_site(figures: dict[str, Any], structure: Structure) -> dict[str, Any]:
    """Return values of latents by block as values by site."""
    if not structure.joint:
        return {name: np.asarray(x) for name, x in figures.items()}
    (flat,) = np.asarray(figures[JOINT])
    if structure.basis is not None:
        flat = np.square(structure.matrix) @ flat
    return structure.split(flat)
