# SPDX-License-Identifier: Apache-2.0
"""The accuracy of natural parameters of a Gaussian under rounding.

Where latents compensate each other (an intercept, and dummies of all levels) the data
determine their sum, and their prior alone the rest. Under a prior that is 1e4 times as
wide as what the data say of the sum, a precision has numbers of 1e8 whose differences
are 1, which float32 does not have. Likewise a potential, precision times mean, of data
that are 1e4 standard deviations from their prior.
"""

from __future__ import annotations

import warnings
from typing import Any

import jax.numpy as jnp
import numpy as np
from jax import Array

from numpyro_gpaug.errors import CholeskyError
from numpyro_gpaug.infer.vi.latent_gaussian import Natural
from numpyro_gpaug.model.latents import JointStructure
from numpyro_gpaug.model.structure import Structure

# Nats that a user should know of. Means of latents are off by as much, in their
# standard deviations.
LOST = 0.1
# By how much rounding must be able to move a precision's eigenvalues to be the cause of
# one that is not positive definite.
MOVED = 0.01
# A latent is named if it has this part of the largest figure.
NAMED = 0.01

_FLOAT64 = "use float64, jax.config.update('jax_enable_x64', True)"


def inflation(natural: Any) -> Array:
    """The ratios of the variances to the variances given all other latents (variance
    inflation factors), (..., M).

    :param natural: natural parameters of a block.
    """
    return natural.diagonal * natural.moments().variances


def displaced(natural: Any) -> Array:
    """The nats that the means lose because potentials are rounded, (..., M).

    An error in the last digit is uniform, of variance 1/12.

    :param natural: natural parameters of a block.
    """
    eps = float(jnp.finfo(natural.potential.dtype).eps)
    return jnp.square(eps * natural.potential) * natural.moments().variances / 24


def lost(natural: Natural) -> Array:
    """The nats by which the bound may be off because natural parameters are rounded.

    The relative error of a variance is as many roundings as it is inflated by. Errors
    are independent: their squares add up.

    :param natural: natural parameters of all blocks.
    """
    total: Any = 0.0
    for each in natural.values():
        eps = float(jnp.finfo(each.potential.dtype).eps)
        total += eps * jnp.linalg.norm(inflation(each)) + displaced(each).sum()
    return jnp.asarray(total)


def warn_of_lost(nats: Array, natural: Natural, structure: Structure) -> None:
    """Warn if rounding of natural parameters makes the bound uncertain.

    :param nats: from :func:`lost`.
    :param natural: natural parameters of all blocks.
    :param structure: of the model.
    """
    if nats > LOST:
        figures = {name: displaced(each) for name, each in natural.items()}
        cause = _far
        if 2 * sum(float(x.sum()) for x in figures.values()) < nats:
            figures = {name: inflation(each) for name, each in natural.items()}
            cause = _cause
        warnings.warn(
            f"rounding makes the bound uncertain by about {float(nats):.2g} nats, and "
            "learning may have ended further below: "
            + cause(figures, natural, structure),
            stacklevel=4,
        )


def is_broken(natural: Natural) -> bool:
    """Whether rounding keeps a precision from being positive definite.

    Its eigenvalues are one or more, from the prior. Rounding moves them by no more than
    about its trace times the resolution of its numbers.

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
    :param structure: of the model.
    :raises CholeskyError: naming the latents.
    """
    if is_broken(natural):
        figures = {name: each.diagonal for name, each in natural.items()}
        raise CholeskyError(
            "the precision of the latents is not positive definite as rounded: "
            + _cause(figures, natural, structure)
        )


def _far(figures: dict[str, Any], natural: Natural, structure: Structure) -> str:
    """The cause and the remedy if means are far from zero.

    :param figures: by block and latent: the largest are named.
    """
    far = max(
        float((jnp.abs(x.potential) / jnp.sqrt(x.diagonal)).max())
        for x in natural.values()
    )
    return (
        f"values of {_named(figures, structure)} are up to {far:.0e} posterior "
        "standard deviations from their prior means. Centre the responses, give "
        f"their location a prior around their mean, or {_FLOAT64}"
    )


def _cause(figures: dict[str, Any], natural: Natural, structure: Structure) -> str:
    """The cause and the remedy if latents compensate each other.

    :param figures: by block and latent: the largest are named.
    """
    widest = max(float(natural[name].diagonal.max()) for name in figures)
    return (
        f"values of {_named(figures, structure)} compensate each other, under priors "
        f"{widest**0.5:.0e} times as wide as the data determine each. Narrow these "
        f"priors, leave out a column that is a combination of others, or {_FLOAT64}"
    )


def _named(figures: dict[str, Any], structure: Structure) -> list[str]:
    """The sites with the largest values.

    :param figures: by block and latent.
    """
    names: list[str] = []
    largest = max(np.max(x) for x in figures.values())
    for name, of_block in figures.items():
        by_site = {name: np.asarray(of_block)}
        if isinstance(structure, JointStructure):
            flat = by_site[name][0]
            if structure.basis is not None:
                flat = np.square(structure.matrix) @ flat
            by_site = structure.split(flat)
        names += [k for k, x in by_site.items() if np.max(x) > NAMED * largest]
    return names
