# SPDX-License-Identifier: Apache-2.0
"""The axes of latents that arguments with labels index."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any

import jax
import jax.numpy as jnp
from numpyro.distributions import OrderedLogistic

from numpyro_gpaug.likelihoods.expectations import base_distribution
from numpyro_gpaug.math.compiling import ahead
from numpyro_gpaug.model.arguments import Arguments
from numpyro_gpaug.model.columns import Columns, Labels, by_name, is_unordered
from numpyro_gpaug.model.latents import Structure
from numpyro_gpaug.model.sources import names_of_arrays
from numpyro_gpaug.model.structure import fixed_key, flat_functions, run_model
from numpyro_gpaug.model.view import View


def labelled_axes(
    view: Callable[[Any], View], given: Any, names: list[str], labels: Labels
) -> dict[str, tuple[str, ...]]:
    """Return, by site, the argument with labels that indexes each axis; empty for an
    axis that none index, or several with different labels.

    :param view: returns the view of the model at its arguments.
    :param given: the model's arguments.
    :param names: the names of their arguments.
    :param labels: labels by argument.
    :raises ValueError: for fewer labels than members whose order matters.
    """
    if not labels.keys() & set(names):
        return {}
    leaves, treedef = jax.tree.flatten(given)
    seen: list[Any] = []

    def largest(*leaves: Any) -> list[Any]:
        here = view(jax.tree.unflatten(treedef, leaves))
        found = here.gathers()
        seen[:] = here.structure, [gather for gather, _ in found]
        return [highs for _, (_, highs, _) in found]

    program = ahead(largest, *leaves)
    structure, gathers = seen
    shapes = dict(structure.shapes)
    shapes |= {s.name: s.value_shape for s in structure.sites}
    axes: dict[str, list[set[str]]] = {}
    for place, name in enumerate(names):
        if name not in labels:
            continue
        # An index that is the argument, and no function of it, follows it.
        codes = 0, max(1, len(labels[name]) - 1)
        at = [jnp.full_like(leaves[place], code) for code in codes]
        found = [program(*leaves[:place], x, *leaves[place + 1 :]) for x in at]
        for gather, *highs in zip(gathers, *found, strict=True):
            shape = shapes.get(gather.name, ())
            own = axes.setdefault(gather.name, [set() for _ in shape])
            for size, *ends in zip(gather.sizes, *highs, strict=True):
                # Effects depend on the hyperparameters of their prior, too.
                drawn = gather.name in structure.others and size not in gather.own
                if tuple(ends) == codes and shape.count(size) == 1 and not drawn:
                    own[shape.index(size)].add(name)
    _check_order(structure, axes, labels)
    return {
        name: tuple(_one(k, labels) for k in found)
        for name, found in axes.items()
        if any(found)
    }


def refuse_unordered(
    model: Callable[..., Any], args: Any, kwargs: Any, columns: Columns
) -> None:
    """Raise for ordinal responses whose categories are text without an order: pandas
    sorts them, high before low.

    :param model: the model.
    :param args: its arguments, before they were read.
    :param kwargs: its keyword arguments, likewise.
    :param columns: its arguments.
    """
    given = by_name(model, args) | kwargs
    labelled = columns.labels.keys() & given.keys()
    unordered = {k for k in labelled if is_unordered(given[k])}
    if not unordered:
        return
    arguments = Arguments.split(columns.args, columns.kwargs)
    names = names_of_arrays(model, columns.args, columns.kwargs)

    def visit(arrays: tuple[Any, ...]) -> list[Any]:
        here = Arguments(arrays, arguments.static)
        trace = run_model(flat_functions(model), here, fixed_key(), {})
        for site in trace.values():
            ordinal = isinstance(base_distribution(site.get("fn")), OrderedLogistic)
            for name, x in zip(names, arrays, strict=True):
                if ordinal and x is site["value"] and name in unordered:
                    raise ValueError(
                        f"{name!r} is ordinal, and its categories have no order, so "
                        f"that they count as {', '.join(columns.labels[name])}. Pass "
                        f"pandas.Categorical({name}, categories=[lowest, ..., "
                        "highest], ordered=True)"
                    )
        return []

    jax.make_jaxpr(visit)(arguments.arrays)


def _check_order(
    structure: Structure, axes: Mapping[str, list[set[str]]], labels: Labels
) -> None:
    """Raise for fewer labels than members whose order matters, as areas of a map: codes
    of the labels would be other members than the user means.

    :param structure: the structure of the model.
    :param axes: by site, the arguments that index each axis.
    :param labels: labels by argument.
    """
    for site in structure.sites:
        indexed = axes.get(site.name, [])
        first = len(indexed) - site.ordered
        pairs = zip(site.value_shape[first:], indexed[first:], strict=False)
        for size, name in ((n, k) for n, found in pairs for k in sorted(found)):
            if len(labels[name]) < size:
                raise ValueError(
                    f"{site.name!r} has {size} members in an order, and {name!r} "
                    f"indexes it by {len(labels[name])} labels, whose codes may belong "
                    f"to other members. Pass pandas.Categorical({name}, "
                    f"categories=names), with the names of all {size} in that order, "
                    "or integer codes"
                )


def _one(names: set[str], labels: Labels) -> str:
    """Return the first of the names, if all have the same labels."""
    return min(names) if len({labels[k] for k in names}) == 1 else ""
