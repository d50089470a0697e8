# SPDX-License-Identifier: Apache-2.0
"""Trees of arrays and model structures as plain arrays and JSON; nothing is pickled."""

from __future__ import annotations

from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax import Array

from numpyro_gpaug.expectations import Route
from numpyro_gpaug.structure import Block, Observed, Plate, Structure


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


def unpack(packed: dict[str, Any], arrays: dict[str, Array]) -> Any:
    """The tree :func:`pack` described."""
    ((kind, content),) = packed.items()
    if kind == "array":
        return arrays[content]
    if kind == "dict":
        return {k: unpack(v, arrays) for k, v in content.items()}
    if kind == "list":
        return [unpack(v, arrays) for v in content]
    return content


def pack_structure(structure: Structure) -> dict[str, Any]:
    """A structure as JSON."""
    return {
        "blocks": [[b.name, b.site, b.shape, str(b.dtype)] for b in structure.blocks],
        "others": structure.others,
        "observed": [[*o[:2], o.route.value, *o[3:]] for o in structure.observed],
        "plates": {k: list(p) for k, p in structure.plates.items()},
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
            Observed(name, tuple(latents), Route(route), tuple(processes), *rest)
            for name, latents, route, processes, *rest in packed["observed"]
        ),
        plates={k: Plate(*p) for k, p in packed["plates"].items()},
    )
