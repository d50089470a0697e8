# SPDX-License-Identifier: Apache-2.0
"""The parts of a model as printed rows."""

from __future__ import annotations

from collections.abc import Mapping

from numpyro_gpaug.likelihoods.expectations import Route
from numpyro_gpaug.model.latents import Structure
from numpyro_gpaug.model.structure import Block, Observed

Row = tuple[str, str, str]

_ROUTES = {
    Route.CLOSED_FORM: "observed, in closed form",
    Route.EXPONENTIAL: "observed, in closed form",
    Route.GAUSS_HERMITE: "observed, by quadrature",
    Route.CORRELATED: "observed, by quasi-random nodes",
    Route.MONTE_CARLO: "observed, by Monte Carlo",
    Route.CONSTANT: "observed, without latents",
}


def latent_rows(structure: Structure) -> list[Row]:
    """Return name, shape and kind of every Gaussian latent.

    :param structure: the structure of a model.
    """
    if structure.joint:
        # A prediction at the rows of the fit does not use these latents, so their rows
        # are marked.
        kinds = "Gaussian", "Gaussian, of each datum: predictions draw it anew"
        return [(s.name, str(s.value_shape), kinds[s.local]) for s in structure.sites]
    return [_block_row(structure, block) for block in structure.blocks]


def _block_row(structure: Structure, block: Block) -> Row:
    if not block.is_process:
        return block.name, str(block.shape), "Gaussian weights"
    function = structure.functions.get(block.name)
    *latents, inducing = block.shape
    what = f"{latents[0]} processes" if latents else "process"
    shape = str(function.shape) if function else ""
    return block.name, shape, f"{what}, {inducing} inducing inputs"


def observed_rows(
    structure: Structure, errors: Mapping[str, float] | None = None
) -> list[Row]:
    """Return name, shape and route of every observed site.

    :param structure: the structure of a model.
    :param errors: errors of quadrature, in nats per datum, by site, where they are
        known.
    """
    shapes = dict(structure.shapes)

    def route(site: Observed) -> str:
        lost = (errors or {}).get(site.name)
        known = "" if lost is None else f", off by {lost:.1g} nats per datum"
        found = _ROUTES[site.route] + known
        return found.replace("observed", "a factor", 1) if site.factor else found

    def shape(site: Observed) -> str:
        found = shapes.get(site.name, "")
        # NumPyro observes an empty vector at a factor.
        return str(found[:-1] if site.factor and found else found)

    return [(site.name, shape(site), route(site)) for site in structure.observed]
