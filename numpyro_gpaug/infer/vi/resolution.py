# SPDX-License-Identifier: Apache-2.0
"""What rounding leaves of the precision of a Gaussian.

Where latents compensate each other (an intercept, and dummies of all levels) the data
determine their sum, and their prior alone the rest. Under a prior that is 1e4 times as
wide as what the data say of the sum, a precision has numbers of 1e8 whose differences
are 1, which float32 does not have.
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
# A latent is named if it has this part of the largest figure.
NAMED = 0.01


def inflation(natural: Any) -> Array:
    """The variances over those given all other latents (variance inflation factors),
    (..., M).

    :param natural: natural parameters of a block.
    """
    return natural.diagonal * natural.moments().variances


def lost(natural: Natural) -> Array:
    """The nats by which the bound may be off because precisions are rounded.

    The relative error of a variance is as many roundings as it is inflated by. Errors
    are independent: their squares add up.

    :param natural: natural parameters of all blocks.
    """
    norms = [jnp.linalg.norm(inflation(each)) for each in natural.values()]
    eps = float(jnp.finfo(norms[0].dtype).eps)
    return jnp.asarray(eps * sum(norms), norms[0].dtype)


def warn_of_lost(nats: Array, natural: Natural, structure: Structure) -> None:
    """Warns of a bound that rounding of the precision makes uncertain.

    :param nats: from :func:`lost`.
    :param natural: natural parameters of all blocks.
    :param structure: of the model.
    """
    if nats > LOST:
        figures = {name: inflation(each) for name, each in natural.items()}
        warnings.warn(
            f"rounding makes the bound uncertain by about {float(nats):.2g} nats: "
            + _cause(figures, natural, structure),
            stacklevel=4,
        )


def is_broken(natural: Natural) -> bool:
    """Return whether a precision is finite and, as rounded, not positive definite.

    :param natural: natural parameters of all blocks.
    """
    finite = [np.isfinite(np.asarray(each.diagonal)).all() for each in natural.values()]
    return all(finite) and not np.isfinite(np.asarray(lost(natural)))


def check_precision(natural: Natural, structure: Structure) -> None:
    """Raises for a precision that :func:`is_broken`.

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


def _cause(figures: dict[str, Any], natural: Natural, structure: Structure) -> str:
    """The cause, and the cure.

    :param figures: by block and latent: the largest are named.
    """
    names: list[str] = []
    largest = max(np.max(x) for x in figures.values())
    widest = max(float(natural[name].diagonal.max()) for name in figures)
    for name, of_block in figures.items():
        by_site = {name: np.asarray(of_block)}
        if isinstance(structure, JointStructure):
            by_site = structure.split(by_site[name][0])
        names += [k for k, x in by_site.items() if np.max(x) > NAMED * largest]
    return (
        f"values of {names} compensate each other, under priors {widest**0.5:.0e} "
        "times as wide as what the data say of each. Narrow these priors, leave out a "
        "column that others make up, or use float64, "
        "jax.config.update('jax_enable_x64', True)"
    )
