# SPDX-License-Identifier: Apache-2.0
"""The run of a model from the standard normal numbers behind its Gaussian latents, and
the results of such a run; and parameters of observed sites that lack a link: they have
a domain, but are affine in Gaussian latents, which may have any value."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
import numpyro
import numpyro.distributions as dist
from jax import Array
from jax.core import Tracer
from numpyro import handlers
from numpyro.distributions import constraints

from numpyro_gpaug._numpyro import scan_index, traceable_sites
from numpyro_gpaug.distributions.class_counts import traceable
from numpyro_gpaug.errors import NotConjugateError
from numpyro_gpaug.gp.conditional import Conditional
from numpyro_gpaug.gp.markov import MarkovConditional
from numpyro_gpaug.likelihoods.contract import lookup_augmentation
from numpyro_gpaug.likelihoods.expectations import (
    Expectation,
    base_distribution,
    lookup_expectation,
    stable_log_prob,
)
from numpyro_gpaug.math.compiling import ahead
from numpyro_gpaug.model.correlated_data import (
    correlated_axes,
    independent_data,
    mean_of,
)
from numpyro_gpaug.model.expectation import Likelihood
from numpyro_gpaug.model.gaussians import field, whitening
from numpyro_gpaug.model.observations import check_shape
from numpyro_gpaug.model.program import Program
from numpyro_gpaug.model.structure import Trace

# Counts whose densities, as NumPyro computes them, are differences of large numbers.
_COUNTS = dist.Poisson, dist.BinomialProbs
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


# In the infer= of a site: the links of its chain, and its states.
_CHAIN = "gpaug_chain"


class Parts(NamedTuple):
    """The results of a run of the model, as outputs of a :class:`Program`.

    :param densities: scaled log-densities of observed sites.
    :param parameters: for observed sites with a registered likelihood, the parameters
        that may carry latents, by name.
    :param rest: for the same sites, the other arguments of their distributions.
    :param likelihoods: likelihoods of observed sites.
    :param others: the distributions of all other latents.
    :param spreads: for Gaussian sites, the scales and factors, which must not depend on
        latents.
    :param values: values of Gaussian and deterministic sites.
    :param factors: factors of Gaussian sites that mix several numbers in their values.
    :param precisions: for sites in coordinates of their own, the entries of the
        precision of these, and its log-determinant.
    :param chains: for sites that make the states of a process or a curve, the
        transitions between the states, (steps, R, 2 R + 1), and the states, (steps, R).
    :param bounded: for observed sites, parameters that have a domain.
    :param kernels: marks of the priors of inducing values, by process.
    :param residuals: variances of function values given inducing values, by process.
    :param unreached: which function values are explained by at most one inducing value,
        by process.
    """

    densities: dict[str, Any]
    parameters: dict[str, dict[str, Any]]
    rest: dict[str, Any]
    likelihoods: dict[str, Likelihood]
    others: dict[str, Likelihood]
    spreads: dict[str, Any]
    values: dict[str, Any]
    residuals: dict[str, Any]
    unreached: dict[str, Any]
    factors: dict[str, Any]
    precisions: dict[str, Any]
    chains: dict[str, tuple[Any, Any]]
    bounded: dict[str, dict[str, Any]]
    kernels: dict[str, Any]


def whitened(
    model: Callable[..., Any], z: dict[str, Any], fields: tuple[str, ...] = ()
) -> Callable[..., Any]:
    """Return ``model`` with Gaussian sites filled in from standard normal numbers, and
    with correlated Gaussian data rewritten as independent ones.

    :param z: numbers by site; for a process, the numbers to add to its function values.
    :param fields: names of the sites that are filled in from coordinates of their own.
    """

    def filled(message: dict[str, Any]) -> Array | None:
        if isinstance(message.get("fn"), Conditional) and message["name"] in z:
            return message["fn"]() + z[message["name"]]
        if message["type"] != "sample" or message["name"] not in z:
            return None
        if message["name"] in fields:
            own = field(message["fn"])
            assert own is not None
            return own.prior.value(z[message["name"]])
        found = whitening(message["fn"])
        if found is None:
            return None
        numbers, index = z[message["name"]], scan_index(message)
        if found.chain and index is None:
            states = found.chain.states(numbers)
            message["infer"] = message["infer"] | {_CHAIN: (found.chain.links, states)}
            return found.chain.value(states)
        return found.value(numbers if index is None else numbers[index])

    filled_in = handlers.substitute(traceable_sites(model), substitute_fn=filled)
    return independent_data(filled_in)


def white_numbers(
    trace: Trace, names: tuple[str, ...], fields: tuple[str, ...] = ()
) -> dict[str, Array]:
    """Return the numbers behind the values of Gaussian sites, as for :func:`whitened`.

    :param trace: the trace of the model at these values.
    :param names: names of the sites.
    :param fields: names of those in coordinates of their own.
    :raises NotConjugateError: for a site whose values do not determine the numbers.
    """
    found = {}
    for name in names:
        site = trace[name]
        made = (field if name in fields else whitening)(site["fn"])
        numbers = getattr(made, "numbers", None)
        if numbers is None:
            raise NotConjugateError(
                f"{name!r} has more standard normal numbers than entries "
                "(LowRankMultivariateNormal, BYM2), so that its values do not "
                "determine them. Write MultivariateNormal, and the two effects of BYM2 "
                "as two sites, ICAR and Normal"
            )
        found[name] = numbers(site["value"])
    return found


def parts_of(
    trace: Trace,
    sites: tuple[str, ...],
    observed: tuple[str, ...],
    fields: tuple[str, ...] = (),
) -> Parts:
    """Return the results of a trace of a :func:`whitened` model.

    :param trace: the trace of the model.
    :param sites: names of Gaussian sites.
    :param observed: names of observed sites; in a prediction they need not be observed.
    :param fields: names of Gaussian sites in coordinates of their own.
    """
    parts = Parts(*({} for _ in Parts._fields))
    for name, site in trace.items():
        if site["type"] == "deterministic":
            parts.values[name] = site["value"]
            if isinstance(site.get("fn"), Conditional):
                f = site["fn"]
                parts.residuals[name] = f.outputs.variances(f.residual)
                parts.unreached[name] = f.unreached
                if isinstance(f, MarkovConditional) and f.chain.width:
                    parts.chains[f"{name}.v"] = f.chain.links, f.states
                parts.kernels[name] = f.prior
        if site["type"] != "sample":
            continue
        fn, value, scale = site["fn"], site["value"], site["scale"]
        if name in observed:
            if site["is_observed"]:
                check_shape(name, site)
            # Checks of a value would make another predictor of it: observations were
            # checked, and a difference that depends on latents is a real number.
            with numpyro.validation_enabled(is_validate=False):
                is_count = type(base_distribution(fn)) in _COUNTS
                density = stable_log_prob(fn, value) if is_count else fn.log_prob(value)
            parts.bounded[name] = bounded(base_distribution(fn))
            parts.densities[name] = density if scale is None else density * scale
            if correlated_axes(fn):
                parts.parameters[name] = {"loc": mean_of(fn)}
                parts.rest[name] = *_rest(fn, ("loc",)), value, scale
            elif latents := registered_latents(type(base_distribution(fn))):
                base = base_distribution(fn)
                parts.parameters[name] = {k: getattr(base, k) for k in latents}
                parts.rest[name] = *_rest(fn, latents), value, scale
            parts.likelihoods[name] = Likelihood((traceable(fn), value, scale))
        elif name in fields:
            own = field(fn)
            assert own is not None
            parts.spreads[name] = own.prior.values, own.prior.scales
            parts.precisions[name] = own.prior.entries, own.prior.log_det()
            parts.values[name] = value
        elif name in sites:
            found = whitening(fn)
            assert found is not None
            parts.spreads[name] = found.spread
            if _CHAIN in site["infer"]:
                parts.chains[name] = site["infer"][_CHAIN]
            if found.mixes:
                parts.factors[name] = found.spread
            parts.values[name] = value
        else:
            parts.others[name] = Likelihood((fn, value, scale))
    return parts


def registered_latents(cls: type) -> tuple[str, ...]:
    """Return the parameters that may carry latents, for a likelihood with a registered
    expectation or augmentation; none for others."""
    found = lookup_expectation(cls) or lookup_augmentation(cls)
    return found.latents if found else ()


def _rest(fn: Any, latents: tuple[str, ...]) -> tuple[Any, Any]:
    """Return the parameters of a distribution except the carriers of latents, and its
    masks. Parameters that the distribution derives from all of them are left out."""
    base, masks = base_distribution(fn), []
    while fn is not base:
        masks.append(getattr(fn, "_mask", None))
        fn = fn.base_dist
    given = {*base.arg_constraints, "family_parameters"}.difference(latents)
    return {k: x for k, x in vars(base).items() if k in given}, masks


def elementwise_expectation(fn: Any) -> Expectation | None:
    """Return the registered expectation of a likelihood, if it has one and depends on
    one predictor for each datum."""
    base = base_distribution(fn)
    found = lookup_expectation(type(base))
    if found is None or len(found.latents) != 1:
        return None
    rank = jnp.ndim(getattr(base, found.latents[0]))
    # If several data share one distribution, the log-likelihood is a sum over them of
    # functions of one number, which is computed by quadrature.
    shared = base.batch_shape == () and fn.batch_shape != ()
    return None if shared or rank > len(base.batch_shape) else found
