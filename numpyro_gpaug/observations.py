# SPDX-License-Identifier: Apache-2.0
"""Whether observations, and parameters of their likelihoods, are what they may be."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import numpyro
import numpyro.distributions as dist
from jax import Array
from numpyro.distributions import constraints

from numpyro_gpaug.distributions.linked import Linked
from numpyro_gpaug.expectations import base_distribution
from numpyro_gpaug.structure import (
    Arguments,
    Structure,
    Trace,
    check_shape,
    flat_functions,
    run_model,
)


def check_observations(
    model: Callable[..., Any], structure: Structure, arguments: Arguments
) -> None:
    """Raises for observations outside the support of their likelihood, or parameters
    of it that break their constraints, at initial params; traced ones are not looked
    at.

    :param model: the model.
    :param structure: what it is made of.
    :param arguments: its arguments.
    :raises ValueError: naming the site and what was expected.
    """
    if any(isinstance(x, jax.core.Tracer) for x in arguments.arrays):
        return
    flat = flat_functions(model)

    def run(arrays: tuple[Array, ...]) -> Trace:
        given = arguments._replace(arrays=arrays)
        return run_model(flat, given, jax.random.key(0), structure.zeros)

    names: list[tuple[str, str]] = []

    def flags(arrays: tuple[Array, ...]) -> list[Array]:
        found = valid_observations(run(arrays))
        names[:] = found
        return list(found.values())

    # A guide may be called in a trace that does not concern its arguments. Compiled
    # outside of that context: within it JAX runs constants operation by operation.
    compiled = jax.jit(flags).lower(arguments.arrays).compile()
    with jax.ensure_compile_time_eval():
        inside_all = compiled(arguments.arrays)
    for (name, parameter), inside in zip(names, inside_all, strict=True):
        # The model may close over values that are traced.
        if not isinstance(inside, jax.core.Tracer) and not inside:
            with numpyro.validation_enabled(is_validate=False):
                message = run(arguments.arrays)[name]
            raise invalid_error(name, parameter, message)


def valid_observations(trace: Trace) -> dict[tuple[str, str], Array]:
    """Whether each observed site's value lies in its support, by ``(site, "")``, and
    each parameter of its likelihood satisfies its constraint, by ``(site, parameter)``;
    may run inside ``jit``.

    :param trace: a trace of the model.
    :raises ValueError: for observations of the wrong shape, naming both shapes.
    """
    valid: dict[tuple[str, str], Array] = {}
    for name, site in trace.items():
        if site["type"] != "sample" or not site["is_observed"]:
            continue
        check_shape(name, site)
        fn, value = site["fn"], jnp.asarray(site["value"])
        inside = fn.support(value)
        if isinstance(fn, dist.MaskedDistribution):
            inside = inside | ~jnp.asarray(fn._mask)
        valid[name, ""] = jnp.all(inside)
        base = base_distribution(fn)
        for k, constraint in base.arg_constraints.items():
            if constraint in (constraints.real, constraints.real_vector):
                continue  # nothing to break, and logits cost a factorisation
            if k in vars(base) and not constraints.is_dependent(constraint):
                value = jnp.asarray(getattr(base, k))
                # What is not finite has a cause of its own (a failed Cholesky, say),
                # which the first steps find.
                finite = jnp.all(jnp.isfinite(value))
                valid[name, k] = jnp.all(constraint(value)) | ~finite
        if isinstance(base, Linked):
            for k, inside in base.valid_parameters().items():
                valid[name, k] = inside
    return valid


def invalid_error(name: str, parameter: str, site: dict[str, Any]) -> ValueError:
    """The error for what :func:`valid_observations` found invalid.

    :param name: the site.
    :param parameter: the parameter that breaks its constraint; empty if it is the
        observations that leave their support.
    :param site: the message of the site, executed.
    """
    base = base_distribution(site["fn"])
    cls = type(base).__name__
    if parameter:
        value = np.asarray(getattr(base, parameter))
        wanted: Any = base.arg_constraints[parameter]
        if constraints.is_dependent(wanted):
            wanted = f"the constraints of {type(base.components()).__name__}"
        return ValueError(
            f"site {name!r}: parameter {parameter!r} of {cls}, of shape {value.shape}, "
            f"takes values {np.unique(value)[:5]}, which do not satisfy {wanted}"
        )
    value = np.asarray(site["value"])
    hint = ""
    if base.support is constraints.nonnegative_integer:
        hint = ". Counts are whole numbers, 0 or more"
    elif hasattr(base, "total_count"):
        hint = ". Counts are whole numbers from 0 to total_count"
    elif base.is_discrete and value.min() < 0:
        hint = ". Labels are 0/1 (or 0..C-1): convert -1/+1 labels with (y + 1) // 2"
    elif base.is_discrete:
        hint = (
            ". Labels are 0/1, or 0..C-1 with C the num_latents of the process: "
            "numpy.unique(y, return_inverse=True)[1] numbers them"
        )
    return ValueError(
        f"site {name!r}: observations of shape {value.shape} take values "
        f"{np.unique(value)[:5]}, outside the support of {cls}{hint}"
    )
