# SPDX-License-Identifier: Apache-2.0
"""Whether the observations of a model were passed in, and have the shapes that it gives
them."""

from __future__ import annotations

from collections.abc import Callable, Iterable
from typing import Any

import jax
import jax.numpy as jnp
from jax import Array
from numpyro.distributions import CategoricalLogits, CategoricalProbs

from numpyro_gpaug.likelihoods.expectations import base_distribution
from numpyro_gpaug.model.structure import Arguments, flat_functions, run_model


def unobserved_error(names: Iterable[str]) -> ValueError:
    """The error for data that were not passed in.

    :param names: of the sites that have no observed value but need one.
    """
    quoted = " and ".join(map(repr, names))
    return ValueError(
        f"site {quoted} has no observed value: was an argument left out? Pass the "
        "model its values, and those to the site, numpyro.sample(..., obs=y)"
    )


def check_observed(
    model: Callable[..., Any], structure: Any, arguments: Arguments
) -> None:
    """Raises for a model in which no site has an observed value.

    :param model: the model.
    :param structure: of it.
    :param arguments: its arguments.
    :raises ValueError: naming the site that comes last, which most likely is the one.
    """
    if structure.observed:
        return
    names: list[str] = []

    def visit(arrays: tuple[Array, ...]) -> None:
        given = arguments._replace(arrays=arrays)
        trace = run_model(flat_functions(model), given, jax.random.key(0), {})
        names.extend(k for k, site in trace.items() if site["type"] == "sample")

    jax.eval_shape(visit, arguments.arrays)
    raise unobserved_error(names[-1:])


def check_shape(name: str, site: dict[str, Any]) -> None:
    """Raises if an observed value does not have the shape of its distribution.

    :param name: the site.
    :param site: its message.
    :raises ValueError: naming both shapes; broadcasting would pair every datum with
        every function value.
    """
    fn, shape = site["fn"], jnp.shape(site["value"])
    expected = tuple(fn.batch_shape) + tuple(fn.event_shape)
    base = base_distribution(fn)
    if shape != expected:
        # Logits of shape (N,) are those of one datum with N classes.
        single = isinstance(base, CategoricalLogits) and base.logits.shape == shape
        hint = "; for C classes give the process num_latents=C" if single else ""
        raise ValueError(
            f"site {name!r}: observations have shape {shape}, but the model gives them "
            f"a distribution of shape {expected}{hint}"
        )
    for frame in site.get("cond_indep_stack", ()):
        rows = expected[frame.dim - len(fn.event_shape)]
        if rows != frame.size:  # of size 1: others cannot be broadcast
            raise ValueError(
                f"site {name!r}: observations of shape {shape} are in plate "
                f"{frame.name!r}, which has (or draws) {frame.size} of {rows} rows"
            )
    if isinstance(base, CategoricalLogits | CategoricalProbs) and jnp.issubdtype(
        jnp.result_type(site["value"]), jnp.floating
    ):
        raise ValueError(
            f"site {name!r}: class labels have a float dtype; pass y.astype(int)"
        )
