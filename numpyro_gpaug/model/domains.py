# SPDX-License-Identifier: Apache-2.0
"""Parameters of observed sites that lack a link: they have a domain, but are affine in
Gaussian latents, which may have any value."""

from __future__ import annotations

from typing import Any

import jax
import numpy as np
import numpyro.distributions as dist
from jax.core import Tracer
from numpyro.distributions import constraints

from numpyro_gpaug.math.compiling import ahead
from numpyro_gpaug.model.program import Program

# Whoever reads it needs no other route.
LINK = "Write a link"
_ANY = constraints.real, constraints.real_vector, constraints.real_matrix


def bounded(base: dist.Distribution) -> dict[str, Any]:
    """Return the parameters of a distribution that have a domain, by name.

    :param base: the distribution, without wrappers.
    """
    return {
        k: vars(base)[k]
        for k, domain in base.arg_constraints.items()
        if vars(base).get(k) is not None
        and domain not in _ANY
        and not constraints.is_dependent(domain)
    }


def missing_link(name: str, cls: type, parameter: str, latent: str) -> str:
    """Return the message about a parameter that lacks a link.

    :param name: the name of the site.
    :param cls: the class of its distribution.
    :param parameter: the parameter of the distribution.
    :param latent: the latent that it is affine in.
    """
    domain = cls.arg_constraints[parameter]  # type: ignore[attr-defined]
    cure = f"{parameter}=jnp.exp(f)"
    if "Probs" in cls.__name__:
        cure = "logits=f"
    elif domain in (constraints.unit_interval, constraints.open_interval(0, 1)):
        cure = f"{parameter}=jax.nn.sigmoid(f)"
    return (
        f"site {name!r}: {parameter!r} of {cls.__name__} is affine in "
        f"{latent.removesuffix('.v')!r}, which is Gaussian and may have any value, but "
        f"it must satisfy {domain}. {LINK}: {cure}, with f the present {parameter!r}"
    )


def find_missing_link(
    program: Program, classes: dict[str, type], parameters: dict[str, dict[str, Any]]
) -> str | None:
    """Return the message about a parameter that leaves its domain where latents are at
    most one standard deviation of their prior from its mean; ``None`` if no parameter
    does.

    :param program: the model, from standard normal numbers.
    :param classes: classes of the distributions of observed sites, by name.
    :param parameters: parameters from :func:`bounded`, as outputs of the program.
    """
    found = [
        (name, k, leaf.variable)
        for name, own in parameters.items()
        for k, leaf in own.items()
        if program.affine(leaf.variable)
    ]
    if not found or any(isinstance(x, Tracer) for x in program.constants.values()):
        return None
    wanted = [variable for *_, variable in found]
    rng = np.random.RandomState(0)
    numbers = {
        v: rng.choice([-1.0, 1.0], program.avals[v].shape).astype(
            program.avals[v].dtype
        )
        for v in program.inputs.values()
    }
    run = ahead(lambda known: program.run(wanted, known), numbers)
    ends = run(numbers), run(jax.tree.map(np.negative, numbers))
    for (name, k, variable), *values in zip(found, *ends, strict=True):
        domain = classes[name].arg_constraints[k]  # type: ignore[attr-defined]
        if not all(np.all(domain(np.asarray(x))) for x in values):
            latent = next(iter(program.value(variable).state))
            return missing_link(name, classes[name], k, latent)
    return None
