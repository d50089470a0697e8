# SPDX-License-Identifier: Apache-2.0
"""What a model is made of, in rows for those who print it."""

from __future__ import annotations

from numpyro_gpaug.likelihoods.expectations import Route
from numpyro_gpaug.model.latents import JointStructure
from numpyro_gpaug.model.structure import Block, Structure

Row = tuple[str, str, str]

_ROUTES = {
    Route.CLOSED_FORM: "observed, in closed form",
    Route.GAUSS_HERMITE: "observed, by quadrature",
    Route.MONTE_CARLO: "observed, by Monte Carlo",
    Route.CONSTANT: "observed, without latents",
}


def latent_rows(structure: Structure) -> list[Row]:
    """Name, shape and kind of every Gaussian latent.

    :param structure: of a model.
    """
    if isinstance(structure, JointStructure):
        return [(s.name, str(s.value_shape), "Gaussian") for s in structure.sites]
    return [_block_row(structure, block) for block in structure.blocks]


def _block_row(structure: Structure, block: Block) -> Row:
    if not block.is_process:
        return block.name, str(block.shape), "Gaussian weights"
    function = structure.functions.get(block.name)
    *latents, inducing = block.shape
    what = f"{latents[0]} processes" if latents else "process"
    shape = str(function.shape) if function else ""
    return block.name, shape, f"{what}, {inducing} inducing inputs"


def observed_rows(structure: Structure) -> list[Row]:
    """Name, shape and route of every observed site.

    :param structure: of a model.
    """
    shapes = dict(getattr(structure, "shapes", ()))
    return [
        (site.name, str(shapes.get(site.name, "")), _ROUTES[site.route])
        for site in structure.observed
    ]
