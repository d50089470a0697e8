# SPDX-License-Identifier: Apache-2.0
"""The structure of a model: which latents update in closed form, and on which of them
each observed site depends.

Everything comes from abstract tracing (no arithmetic runs) and from the jaxpr of the
likelihood's parameters. The model is run twice: once for its sites, and once for their
dependences.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from typing import Any

import jax
import jax.numpy as jnp
import numpyro.distributions as dist
from jax import Array
from numpyro.distributions import constraints

from numpyro_gpaug.errors import NotConjugateError
from numpyro_gpaug.gp.conditional import Conditional
from numpyro_gpaug.gp.markov import MarkovConditional
from numpyro_gpaug.likelihoods.expectations import Route, base_distribution
from numpyro_gpaug.model.arguments import Arguments
from numpyro_gpaug.model.dependencies import Dependencies
from numpyro_gpaug.model.domains import LINK
from numpyro_gpaug.model.gaussians import whitening
from numpyro_gpaug.model.plates import trace_plates, with_whole_sizes
from numpyro_gpaug.model.structure import (
    Block,
    Structure,
    Trace,
    conditional_of,
    flat_functions,
    run_model,
)


def inspect_model(model: Callable[..., Any], *args: Any, **kwargs: Any) -> Structure:
    """Return the structure of a model.

    :param model: a NumPyro model.
    :param args: its arguments.
    :param kwargs: its keyword arguments.
    :return: a :class:`Structure`.
    """
    arguments = Arguments.split(args, kwargs)
    sites = _Survey(model, arguments)
    candidates = sites.candidates
    found = Dependencies(model, arguments, candidates, sites.inputs)
    weights = [b for b in candidates if not b.is_process and found.is_weight(b.name)]
    processes = [b for b in candidates if b.is_process]
    routes = [found.observed(n, (*processes, *weights)) for n in sites.observed]
    weights = [b for b in weights if found.in_closed_form(b.name, routes)]
    found.refuse_unsupported(tuple(sites.latent), bool(sites.observed))
    owned = {b.site for b in candidates if b.is_process or b in weights}
    others = tuple(
        n for n in sites.latent if n not in owned and not found.is_likelihood(n)
    )
    if sites.observed:
        _refuse_latents(others, tuple(sites.discrete), candidates)
    blocks = tuple(sorted(
        (b for b in candidates if b.site in owned),
        key=lambda b: sites.latent.index(b.site),
    ))  # fmt: skip
    return Structure(
        blocks=blocks,
        others=others,
        observed=tuple(found.observed(name, blocks) for name in sites.observed),
        plates=sites.plates,
        functions={b.name: sites.inputs[b.name] for b in blocks if b.is_process},
        constraints=sites.constraints,
        gaussian_others=tuple(n for n in others if n in sites.gaussian),
    )


def _refuse_latents(
    others: tuple[str, ...], discrete: tuple[str, ...], candidates: list[Block]
) -> None:
    """Raise for latents that no guide of this package, and no autoguide, supports."""
    for name in others:
        if name in discrete:
            raise NotConjugateError(
                f"the latent site {name!r} is discrete. Sum it out (a mixture "
                "likelihood), observe it, or sample the model by MCMC"
            )
        process = name.removesuffix(".eps")
        if process != name and any(b.name == process for b in candidates):
            raise NotConjugateError(
                f'with_residual(model, "site") makes the residual of {process!r} a '
                "latent site, for MCMC. Variational fits integrate it out: pass "
                "the model itself"
            )


def structure_at(
    model: Callable[..., Any], structure: Structure, arguments: Arguments
) -> Structure:
    """Return ``structure`` with the plates and shapes of the model at these arguments.

    :param model: the model.
    :param structure: its structure, from arguments of any size.
    :param arguments: its arguments.
    :raises ValueError: if it is the structure of another model.
    """
    functions: dict[str, jax.ShapeDtypeStruct] = {}

    def abstract(arrays: tuple[Array, ...]) -> Trace:
        given = arguments._replace(arrays=arrays)
        flat, key = flat_functions(model), jax.random.key(0)
        trace = run_model(flat, given, key, structure.zeros)
        for site in structure.observed:
            message = trace.get(site.name)
            found = base_distribution(message["fn"]) if message else None
            if found is None or not all(hasattr(found, k) for k in site.latents):
                raise ValueError(
                    f"the guide was set up for a model in which site {site.name!r} "
                    f"has parameters {list(site.latents)}, and here it is "
                    f"{'missing' if found is None else type(found).__name__}. A "
                    "guide belongs to one model: make a new one"
                )
        for block in structure.processes:
            f = conditional_of(trace, block)
            functions[block.name] = jax.ShapeDtypeStruct(f.shape, f.dtype)
        return trace

    plates = trace_plates(abstract, arguments)
    return replace(structure, plates=plates, functions=functions)


class _Survey:
    """The sites of a model, from a trace without arithmetic.

    It lists names of ``observed`` sites and of ``latent`` ones, which may be
    ``discrete`` or ``gaussian``; ``plates``, ``constraints`` of params, and
    ``candidates`` for blocks, which are the processes and the vector normals, with the
    shapes of their ``inputs``.

    :param model: a NumPyro model.
    :param arguments: its arguments.
    """

    def __init__(self, model: Callable[..., Any], arguments: Arguments) -> None:
        self.candidates: list[Block] = []
        self.latent: list[str] = []
        self.discrete: list[str] = []
        self.gaussian: list[str] = []
        self.observed: list[str] = []
        self.constraints: dict[str, Any] = {}
        self.inputs: dict[str, jax.ShapeDtypeStruct] = {}

        def abstract(arrays: tuple[Array, ...]) -> Trace:
            given = arguments._replace(arrays=arrays)
            trace = run_model(with_whole_sizes(model), given, jax.random.key(0), {})
            self._visit(trace)
            return trace

        self.plates = trace_plates(abstract, arguments)

    def _visit(self, trace: Trace) -> None:
        process_sites = set()
        for name, site in trace.items():
            if isinstance(site.get("fn"), MarkovConditional):
                raise NotConjugateError(
                    f'GaussianProcess("{name}", markov=True) needs '
                    "AutoLatentGaussian(model)"
                )
            if isinstance(site.get("fn"), Conditional):
                v = trace[f"{name}.v"]
                process_sites.add(f"{name}.v")
                if not v["is_observed"]:
                    self.candidates.append(_block(name, f"{name}.v", v))
        for name, site in trace.items():
            if site["type"] == "param":
                constraint = site["kwargs"].get("constraint", constraints.real)
                self.constraints[name] = constraint
            elif site["type"] == "sample" and site["is_observed"]:
                self.observed.append(name)
            elif site["type"] == "sample":
                self._visit_latent(name, site, process_sites)
        for name in (n for b in self.candidates for n in (b.name, b.site)):
            value = trace[name]["value"]
            self.inputs[name] = jax.ShapeDtypeStruct(value.shape, value.dtype)

    def _visit_latent(
        self, name: str, site: dict[str, Any], process_sites: set[str]
    ) -> None:
        self.latent.append(name)
        if site["fn"].is_discrete:
            self.discrete.append(name)
        if whitening(site["fn"]) is not None:
            self.gaussian.append(name)
        if name in process_sites:
            return
        if "process" in site["infer"]:
            raise ValueError(
                f'GaussianProcess("{site["infer"]["process"]}") is never called. '
                "Its values at the inputs are gp(X)"
            )
        if _is_vector_normal(site):
            self.candidates.append(_block(name, name, site))


def _block(name: str, site: str, message: dict[str, Any]) -> Block:
    value = message["value"]
    # The dtype of the prior, not of the draw, which NumPyro makes in the default dtype;
    # but Normal(0, 1) has integer parameters.
    dtype = jnp.result_type(base_distribution(message["fn"]).loc)
    floating = jnp.issubdtype(dtype, jnp.floating)
    return Block(name, site, value.shape, dtype if floating else value.dtype)


def _is_vector_normal(site: dict[str, Any]) -> bool:
    fn = site["fn"]
    vector = len(fn.event_shape) == 1 and fn.batch_shape == ()
    plain = isinstance(base_distribution(fn), dist.Normal)
    return vector and plain and not site["cond_indep_stack"]


def require_conjugate(structure: Structure, updates: str) -> None:
    """Raise unless every observed site has closed-form updates.

    :param structure: the structure of the model.
    :param updates: ``"auto"``, ``"exact"`` or ``"augmented"``.

    :raises NotConjugateError: naming the site, the operation and a route that works.
    """
    for site in structure.observed:
        if site.reason is not None and LINK in site.reason:
            raise NotConjugateError(site.reason)
        if site.reason is not None:
            raise NotConjugateError(
                f"site {site.name!r} has no closed-form update: {site.reason}. "
                "AutoLatentGaussian(model) fits it by quadrature, if each datum "
                "depends on one or two predictors; "
                "numpyro.infer.SVI with numpyro_gpaug.TraceAnalytic_ELBO() and "
                "AutoSparseGP(model, covariance='dense') fits this model "
                f"({site.route.value}); MCMC(NUTS(model)) samples it."
            )
        if site.route is Route.MONTE_CARLO and updates != "augmented":
            raise NotConjugateError(
                f"site {site.name!r} has an augmentation but no exact expectation "
                'in closed form. Use updates="augmented", or register_expectation'
            )
