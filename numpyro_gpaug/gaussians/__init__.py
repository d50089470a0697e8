# SPDX-License-Identifier: Apache-2.0
"""Gaussians by the structure of their precision matrix, one structure to a file.

:mod:`~numpyro_gpaug.gaussians.base` states what a structure offers. No module outside
this folder asks which structure it has; :data:`STRUCTURES` lists them by name.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from jax import Array

from numpyro_gpaug.gaussians.base import Layout, Structure
from numpyro_gpaug.gaussians.chain import Chain
from numpyro_gpaug.gaussians.dense import Dense
from numpyro_gpaug.gaussians.groups import Groups
from numpyro_gpaug.gaussians.iterative import Iterative
from numpyro_gpaug.gaussians.sparse import Sparse

__all__ = [
    "Chain", "Dense", "Groups", "Iterative", "Layout", "STRUCTURES", "Sparse",
    "Structure", "natural_from", "unstructured",
]  # fmt: skip

# By the name in saved files.
STRUCTURES: Mapping[str, type[Structure]] = {
    "dense": Dense, "groups": Groups, "chain": Chain, "sparse": Sparse,
    "iterative": Iterative,
}  # fmt: skip


def unstructured(size: int) -> Structure:
    """Return the structure of a general Gaussian: one dense matrix."""
    return Dense(Layout(0, 0, size))


def natural_from(parts: Mapping[str, Array], structure: Structure) -> Any:
    """Return natural parameters from their arrays by name.

    :param parts: arrays of natural parameters of any structure.
    :param structure: the structure, if they contain theirs.
    """
    for kind in STRUCTURES.values():
        fields = set(kind.natural._fields)
        if fields - {"structure"} == parts.keys():
            own = {"structure": structure} if "structure" in fields else {}
            return kind.natural(**parts, **own)
    raise ValueError(f"no Gaussian has the natural parameters {sorted(parts)}")
