# SPDX-License-Identifier: Apache-2.0
"""The costs of the forms of a model's joint Gaussian, in operations of one update."""

from __future__ import annotations

from math import inf, prod
from typing import NamedTuple

from numpyro_gpaug.likelihoods.expectations import Route
from numpyro_gpaug.math import argmax, correlated_softmax
from numpyro_gpaug.math.expectation import NODES
from numpyro_gpaug.model.latents import Structure

# The programs of the other forms take a quarter of a second longer to compile. They
# must save that many operations, which take as long in two hundred sweeps (ten fits).
_OVERHEAD = 2e7
# The largest number of Gaussian latents in one dense matrix, which contains all of them
# or those outside of groups.
MAX_DENSE = 5000
# Fields with fewer nodes are dense matrices, whose programs have fewer operations.
FEWEST_NODES = round(_OVERHEAD ** (1 / 3))


class Purpose(NamedTuple):
    """The purpose for which a form is chosen.

    :param apart: the number of groups from which on groups are preferred even if they
        save less than the overhead of a form.
    :param held: the largest size of a site that may be fixed at a point estimate, with
        the hyperparameters, if no Gaussian can contain it.
    :param fields: whether fields may keep coordinates of their own, with a sparse
        precision.
    :param projected: whether sparse processes have no residual, as in exact samplers.
        Several function values of one process may then enter one datum. Several
        parameters of a registered likelihood may also depend on latents: the bound
        treats them as independent, which a sampler corrects.
    :param operations: the number of operations of an update above which a form that is
        not factorised is preferred.
    :param largest: rows of the largest dense matrix. For draws given factors on
        predictors one has as many rows as there are latents or predictors, whichever
        are fewer.
    """

    apart: float = inf
    held: int = 0
    fields: bool = True
    projected: bool = False
    operations: float = inf
    largest: int = MAX_DENSE

    def overhead(self, form: Structure) -> float:
        """Return the number of operations that a form has to save.

        :param form: a form with groups or chains.
        """
        if form.form.independent.groups >= self.apart:
            return 0.0
        return _OVERHEAD

    def contents(self, structure: Structure, rows: int) -> bool:
        """Whether one dense matrix is as good as any form can be.

        :param structure: the dense structure of a model.
        :param rows: the number of predictors.
        """
        largest = max((prod(s.shape) for s in structure.sites), default=0)
        cheap = structure.cost(rows) < _OVERHEAD
        return cheap and largest < self.apart and not self.too_costly(structure, rows)

    def too_costly(self, structure: Structure, rows: int) -> bool:
        """Whether a form should rather not be factorised.

        :param structure: a structure in that form.
        :param rows: the number of predictors.
        """
        large = structure.form.largest_matrix > self.largest
        return large or structure.cost(rows) > self.operations


# If an update would take more than some seconds, log-determinants are estimated.
FIT = Purpose(operations=1e11)
# Standard normal variables only.
WHITE = Purpose(fields=False)
# For exact samplers.
SAMPLE = Purpose(projected=True, largest=30_000)


def kernel_entries(structure: Structure) -> int:
    """Return the number of entries of the kernel matrices between data and inducing
    inputs, each latent counted.

    :param structure: the structure of the model at its arguments.
    """
    rows = {name: f.shape[0] for name, f in structure.functions.items()}
    if structure.joint:
        return max(rows.values(), default=0) * structure.largest
    return sum(rows[b.name] * prod(b.shape) for b in structure.processes)


def densities(structure: Structure) -> int:
    """Return the number of densities at nodes that one expected log-likelihood
    evaluates.

    :param structure: the structure of the model at its arguments.
    """
    shapes, total = dict(structure.shapes), 0
    for site in structure.observed:
        number = max(len(site.predictors), 1)
        own = [b.shape[0] for b in structure.processes if b.name in site.processes]
        nodes = {
            Route.CLOSED_FORM: sum(own) * argmax.NODES if site.vector else 0,
            Route.GAUSS_HERMITE: NODES.get(number, 1) ** number,
            Route.CORRELATED: correlated_softmax.NODES,
        }
        total += prod(shapes.get(site.name, ())) * nodes.get(site.route, 0)
    return total
