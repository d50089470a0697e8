# SPDX-License-Identifier: Apache-2.0
"""The axes of latents that arguments with labels index."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import jax

from numpyro_gpaug.model.columns import Labels
from numpyro_gpaug.model.jaxpr import dependence_on_arrays
from numpyro_gpaug.model.joint import JointView


def labelled_axes(
    view: Callable[[Any], JointView], given: Any, names: list[str], labels: Labels
) -> dict[str, tuple[str, ...]]:
    """Return, by site, the argument with labels that indexes each axis; empty for an
    axis that none index, or several with different labels.

    :param view: returns the view of the model at its arguments.
    :param given: the model's arguments.
    :param names: the names of their arguments.
    :param labels: labels by argument.
    """
    seen: list[Any] = []
    shapes: dict[str, tuple[int, ...]] = {}
    others: set[str] = set()

    def reached(given: Any) -> Any:
        here = view(given)
        found = here.gathers()
        seen[:] = [gather for gather, _ in found]
        others.update(here.structure.others)
        shapes.update(here.structure.shapes)
        shapes.update({s.name: s.value_shape for s in here.structure.sites})
        return [extremes for _, extremes in found]

    sources = dependence_on_arrays(reached, given)
    axes: dict[str, list[set[str]]] = {}
    for gather, used in zip(seen, sources, strict=True):
        shape = shapes.get(gather.name, ())
        places = {int(k) for leaf in jax.tree.leaves(used) for k in leaf.state}
        given = {names[i] for i in places if i < len(names)} & labels.keys()
        own = axes.setdefault(gather.name, [set() for _ in shape])
        for size, found in _by_size(gather.sizes, given, labels).items():
            # Effects depend on the hyperparameters of their prior, too.
            drawn = gather.name in others and size not in gather.own
            if shape.count(size) == 1 and not drawn:
                own[shape.index(size)] |= found
    return {
        name: tuple(_one(k, labels) for k in found)
        for name, found in axes.items()
        if any(found)
    }


def _one(names: set[str], labels: Labels) -> str:
    """Return the first of the names, if all have the same labels."""
    return min(names) if len({labels[k] for k in names}) == 1 else ""


def _by_size(
    sizes: tuple[int, ...], names: set[str], labels: Labels
) -> dict[int, set[str]]:
    """Return the arguments that may index the axes of each size. Which of several
    arguments indexes which axis is known from the numbers of their labels alone.

    :param sizes: sizes of the axes that are indexed together.
    :param names: the arguments that index them.
    """
    exact = {n: {k for k in names if len(labels[k]) == n} for n in sizes}
    rest = names.difference(*(x for x in exact.values() if len(x) == 1))
    return {n: x or {k for k in rest if len(labels[k]) < n} for n, x in exact.items()}
