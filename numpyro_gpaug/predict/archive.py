# SPDX-License-Identifier: Apache-2.0
"""Trees of arrays and model structures as plain arrays and JSON; nothing is pickled."""

from __future__ import annotations

from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax import Array

from numpyro_gpaug.likelihoods.expectations import Route
from numpyro_gpaug.model.structure import Block, Leaves, Observed, Structure


def pack(tree: Any, path: str, arrays: dict[str, np.ndarray]) -> Any:
    """A JSON description of ``tree``; its arrays go into ``arrays``, by path."""
    if isinstance(tree, np.ndarray | jax.Array):
        arrays[path] = np.asarray(tree)
        return {"array": path}
    if isinstance(tree, dict) and all(isinstance(k, str) for k in tree):
        return {"dict": {k: pack(v, f"{path}/{k}", arrays) for k, v in tree.items()}}
    if type(tree) in (list, tuple):
        return {"list": [pack(v, f"{path}/{i}", arrays) for i, v in enumerate(tree)]}
    if tree is None or isinstance(tree, bool | int | float | str):
        return {"plain": tree}
    raise ValueError(
        f"{path} is a {type(tree).__name__}: only arrays, numbers, strings, and dicts, "
        "lists and tuples of them can be saved"
    )


def pack_values(values: dict[str, Any], arrays: dict[str, np.ndarray]) -> Any:
    """As :func:`pack`, for params: of one with a structure of its own (a network) only
    the leaves are stored, and the code that declares it puts them together again."""

    def described(name: str, value: Any) -> Any:
        path = f"values/{name}"
        if _is_plain(value):
            return pack(value, path, arrays)
        leaves = [np.asarray(leaf) for leaf in jax.tree.leaves(value)]
        return {"leaves": pack(leaves, path, arrays)}

    return {"dict": {name: described(name, x) for name, x in values.items()}}


def unpack(packed: dict[str, Any], arrays: dict[str, Array]) -> Any:
    """The tree :func:`pack` described."""
    ((kind, content),) = packed.items()
    if kind == "array":
        return arrays[content]
    if kind == "dict":
        return {k: unpack(v, arrays) for k, v in content.items()}
    if kind == "leaves":
        return Leaves(tuple(unpack(content, arrays)))
    if kind == "list":
        return [unpack(v, arrays) for v in content]
    return content


def _is_plain(tree: Any) -> bool:
    """Whether :func:`pack` keeps the structure of ``tree`` as it is."""
    if isinstance(tree, dict):
        return all(isinstance(k, str) and _is_plain(v) for k, v in tree.items())
    if type(tree) in (list, tuple):
        return all(map(_is_plain, tree))
    return jax.tree_util.all_leaves([tree])


def pack_structure(structure: Structure) -> dict[str, Any]:
    """A structure as JSON, without what depends on arguments."""
    return {
        "blocks": [[b.name, b.site, b.shape, str(b.dtype)] for b in structure.blocks],
        "others": structure.others,
        "observed": [[*o[:3], o.route.value, *o[4:]] for o in structure.observed],
    }


def unpack_structure(packed: dict[str, Any]) -> Structure:
    """The structure :func:`pack_structure` described."""
    return Structure(
        blocks=tuple(
            Block(name, site, tuple(shape), jnp.dtype(dtype))
            for name, site, shape, dtype in packed["blocks"]
        ),
        others=tuple(packed["others"]),
        observed=tuple(
            Observed(
                name,
                tuple(latents),
                tuple(map(tuple, sources)),
                Route(route),
                tuple(processes),
                *rest,
            )
            for name, latents, sources, route, processes, *rest in packed["observed"]
        ),
        plates={},
        functions={},
        constraints={},
    )
