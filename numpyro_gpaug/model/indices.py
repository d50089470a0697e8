# SPDX-License-Identifier: Apache-2.0
"""Checks of codes that index latents: every code must have a member."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import jax
from jax import Array
from jax.core import Tracer

from numpyro_gpaug.model.arguments import Arguments
from numpyro_gpaug.model.program import Program
from numpyro_gpaug.model.structure import run_model


def check_indices(program: Program) -> None:
    """Raise for codes that no member of a plate has. JAX would silently take the last
    one.

    :param program: the program of a model, with its arguments as constants.
    :raises ValueError: naming the site.
    """
    if any(isinstance(x, Tracer) for x in program.constants.values()):
        return
    for gather, extremes in program.reached():
        if wrong := gather.bad(extremes):
            raise ValueError(
                f"{wrong}. Give its plate the number of groups, and encode them as "
                "0, 1, ... (numpy.unique(group, return_inverse=True)[1])"
            )


def program_of_others(
    model: Callable[..., Any],
    arguments: Arguments,
    shapes: dict[str, tuple[int, ...]],
    values: dict[str, Any],
    dtype: Any,
) -> Program:
    """Return the program of a model as a function of its latents that are not Gaussian.

    :param model: the model.
    :param arguments: its arguments.
    :param shapes: shapes of these latents, by name; scalars are left out.
    :param values: values of params, by name.
    :param dtype: the dtype of the latents.
    """
    arrays = {k: jax.ShapeDtypeStruct(s, dtype) for k, s in shapes.items() if s}

    def sites(given: dict[str, Array]) -> list[Any]:
        at = {**values, **given}
        trace = run_model(model, arguments, jax.random.key(0), at)
        return [site["value"] for site in trace.values() if site["type"] == "sample"]

    return Program(sites, arrays)
