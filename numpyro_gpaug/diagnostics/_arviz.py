# SPDX-License-Identifier: Apache-2.0
"""The packages of ArviZ that are used, imported when first needed."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from importlib import import_module
from typing import TYPE_CHECKING, Any

import numpy as np

from numpyro_gpaug.model.columns import Labels

if TYPE_CHECKING:
    from xarray import DataTree


def part_of_arviz(name: str) -> Any:
    """Import ``arviz_base`` or ``arviz_stats``, or state what to install.

    :param name: the name of the package.
    :raises ImportError: if it is missing, or does not import.
    """
    try:
        return import_module(name)
    except Exception as error:
        raise ImportError(
            f"{name} does not import ({error}). It comes with this package: "
            'pip install -U "arviz-base>=0.8" "arviz-stats[xarray]>=0.8" puts it back, '
            "on Python 3.11 too; arviz itself, whose 1.0 needs Python 3.12, is not used"
        ) from error


def tree_of(
    groups: dict[str, dict[str, Any]],
    dims: dict[str, list[str]] | None = None,
    axes: dict[str, tuple[str, ...]] | None = None,
    labels: Labels | None = None,
    seen: Mapping[str, Any] | None = None,
    summed: Sequence[str] = (),
) -> DataTree:
    """Return a tree of arrays by group and name.

    In a tree, "/" separates the parts of a path and must not occur in a name: a site
    ``"a/b"`` (from NumPyro's ``scope``) becomes ``"a.b"``. Names of dimensions get an
    underscore, ``"draw_"``, since xarray takes a variable of that name for coordinates.

    :param groups: arrays by name, by group; groups of draws have axes (chains, draws,
        ...), and empty groups are left out.
    :param dims: names of further axes, by site.
    :param axes: by site, the argument with labels that indexes each axis.
    :param labels: labels by argument, which become coordinates.
    :param seen: the observations, :class:`~numpyro_gpaug.diagnostics._run.Seen`, by
        site. Weights become coordinates of their densities.
    :param summed: factors that are sums over the data, for a warning.
    """

    def plain(name: str) -> str:
        return f"{name}_" if name in sampled else name.replace("/", ".")

    sampled, seen = ["chain", "draw"], seen or {}
    groups = groups | {"observed_data": {k: x.masked_as_nan() for k, x in seen.items()}}
    found = {
        group: {plain(name): x for name, x in given.items()}
        for group, given in groups.items()
        if given
    }
    named = {plain(name): [*map(plain, x)] for name, x in (dims or {}).items()}
    tree = part_of_arviz("arviz_base").from_dict(
        found,
        sample_dims=sampled,
        dims=named,
        attrs={"/": {"inference_library": "numpyro_gpaug"}},
    )
    for name, x in ((plain(k), x) for k, x in seen.items()):
        found = tree.children.get("log_likelihood", {})
        if name in found and (np.asarray(x.weight) != 1).any():
            shape, dims = found[name].shape[2:], found[name].dims[2:]
            weight = {f"{name}.weight": (dims, np.broadcast_to(x.weight, shape))}
            tree["log_likelihood"] = found.to_dataset().assign_coords(weight)
    if summed:
        tree["log_likelihood"].attrs["summed"] = ", ".join(summed)
    coords: dict[str, list[str]] = {}
    for name, arguments in (axes or {}).items():
        site = tree["posterior"][plain(name)]
        for k, argument in zip(site.dims[2:], arguments, strict=True):
            if known := (labels or {}).get(argument):
                places = range(len(known), site.sizes[k])
                coords[k] = [*known, *map(str, places)][: site.sizes[k]]
    for group in tree.children if coords else ():
        from xarray import DataTree

        found = tree[group].to_dataset()
        here = {k: x for k, x in coords.items() if k in found.dims}
        tree[group] = DataTree(found.assign_coords(here))
    return tree


def weighted(density: Any) -> Any:
    """Return log densities of the observations of a site times their weights."""
    return density * density.coords.get(f"{density.name}.weight", 1.0)
