# SPDX-License-Identifier: Apache-2.0
"""Codes that index latents: none may be of a member that there is not."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import jax
from jax import Array
from jax.core import Tracer

from numpyro_gpaug.model.program import Program
from numpyro_gpaug.model.structure import Arguments, run_model


def check_indices(program: Program) -> None:
    """Raises for codes that no member of a plate has: JAX would take the last one.

    :param program: of a model, with its arguments for constants.
    :raises ValueError: naming the site.
    """
    if any(isinstance(x, Tracer) for x in program.constants.values()):
        return
    for gather in program.gathers():
        indices, *raw = program.run([gather.indices, *gather.raw], {})
        if wrong := gather.bad(gather.extremes(indices, raw)):
            raise ValueError(
                f"{wrong}: give its plate the number of groups, and encode them as 0, "
                "1, ... (numpy.unique(group, return_inverse=True)[1])"
            )


def check_other_indices(
    model: Callable[..., Any],
    arguments: Arguments,
    shapes: dict[str, tuple[int, ...]],
    dtype: Any,
) -> None:
    """The same for codes that index hyperparameters.

    :param model: the model.
    :param arguments: its arguments.
    :param shapes: of latents that are not among the Gaussian ones, by name.
    :param dtype: of their values.
    :raises ValueError: naming the site.
    """
    arrays = {k: jax.ShapeDtypeStruct(s, dtype) for k, s in shapes.items() if s}
    if not arrays:
        return

    def values(given: dict[str, Array]) -> list[Any]:
        trace = run_model(model, arguments, jax.random.key(0), given)
        return [site["value"] for site in trace.values() if site["type"] == "sample"]

    check_indices(Program(values, arrays))
