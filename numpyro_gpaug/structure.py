# SPDX-License-Identifier: Apache-2.0
"""What a model is made of: its Gaussian blocks, other latents and observed sites.

Everything is found by tracing abstractly (no arithmetic runs) and by reading the jaxpr
of the likelihood's parameters.
"""

from __future__ import annotations

from collections.abc import Callable, Hashable
from dataclasses import dataclass, replace
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
import numpyro.distributions as dist
from jax import Array
from numpyro import handlers

from numpyro_gpaug._numpyro import residual_policy
from numpyro_gpaug.affine import State, dependences
from numpyro_gpaug.augmentation.base import lookup_augmentation
from numpyro_gpaug.errors import NotConjugateError
from numpyro_gpaug.expectations import Route, base_distribution, lookup_expectation
from numpyro_gpaug.process import Conditional

Trace = dict[str, dict[str, Any]]


class Block(NamedTuple):
    """A Gaussian latent with closed-form updates.

    :param name: the function-value site ``"f"`` of a Gaussian process, or the sample
        site of a plain weight vector.
    :param site: the sample site: ``"f.v"``, or again the weight vector's.
    :param shape: event shape, (M,) or (C, M).
    :param dtype: its dtype.
    """

    name: str
    site: str
    shape: tuple[int, ...]
    dtype: Any

    @property
    def is_process(self) -> bool:
        """Whether the block is a Gaussian process's inducing vector."""
        return self.name != self.site


class Observed(NamedTuple):
    """An observed site and how its expected log-density is computed.

    :param name: the site.
    :param latents: parameters that carry a latent affinely, in a registered
        likelihood; empty otherwise.
    :param route: of the exact expectation.
    :param processes: Gaussian processes that reach the site.
    :param augmented: whether its likelihood has an augmentation.
    :param reason: why the site has no closed-form update, ``None`` if it has.
    """

    name: str
    latents: tuple[str, ...]
    route: Route
    processes: tuple[str, ...]
    augmented: bool
    reason: str | None


class Plate(NamedTuple):
    """A plate: its size and the size of its subsample."""

    size: int
    subsample_size: int


@dataclass(frozen=True)
class Structure:
    """The parts of a model.

    :param blocks: Gaussian processes and plain Gaussian weight vectors.
    :param others: names of all other latent sites.
    :param observed: observed sites.
    :param plates: plates by name.
    """

    blocks: tuple[Block, ...]
    others: tuple[str, ...]
    observed: tuple[Observed, ...]
    plates: dict[str, Plate]

    @property
    def zeros(self) -> dict[str, Array]:
        """Zeros for the site of every block."""
        return {b.site: jnp.zeros(b.shape, b.dtype) for b in self.blocks}

    @property
    def subsampled(self) -> dict[str, Plate]:
        """The plates that draw a proper subsample."""
        return {k: p for k, p in self.plates.items() if p.subsample_size < p.size}


class Arguments(NamedTuple):
    """Model arguments split for ``jax.jit``: arrays traced, the rest static."""

    arrays: tuple[Array, ...]
    static: tuple[Any, tuple[tuple[int, Hashable], ...]]

    @classmethod
    def split(cls, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Arguments:
        """Splits positional and keyword arguments."""
        leaves, treedef = jax.tree.flatten((args, kwargs))
        is_array = [_is_array(x) for x in leaves]
        # NumPy arrays cannot be indexed by the traced indices of a plate.
        arrays = tuple(
            jnp.asarray(x) for x, a in zip(leaves, is_array, strict=True) if a
        )
        static = tuple((i, x) for i, x in enumerate(leaves) if not is_array[i])
        return cls(arrays, (treedef, static))

    @staticmethod
    def select_arrays(tree: Any, items: list[Any]) -> list[Any]:
        """Of ``items``, one per leaf of ``tree``, those of the array leaves."""
        leaves = jax.tree.leaves(tree)
        return [item for x, item in zip(leaves, items, strict=True) if _is_array(x)]

    def merge(self) -> tuple[tuple[Any, ...], dict[str, Any]]:
        """The positional and keyword arguments again."""
        treedef, static = self.static
        leaves, arrays = dict(static), iter(self.arrays)
        ordered = [
            leaves[i] if i in leaves else next(arrays)
            for i in range(treedef.num_leaves)
        ]
        return jax.tree.unflatten(treedef, ordered)


def _is_array(leaf: Any) -> bool:
    return isinstance(leaf, np.ndarray | np.generic | jax.Array)


def run_model(
    model: Callable[..., Any], arguments: Arguments, key: Array, values: dict[str, Any]
) -> Trace:
    """The trace of ``model`` with sites, params and function values filled in.

    :param model: a NumPyro model.
    :param arguments: its arguments.
    :param key: seed for whatever is not in ``values``.
    :param values: by site name; a Gaussian process whose function values are given
        computes nothing else.
    """
    args, kwargs = arguments.merge()
    filled = handlers.substitute(handlers.seed(model, key), data=values)
    # Whoever calls may be inside handlers of its own (a guide being traced).
    with handlers.block():
        policy = residual_policy(filled, "mean")
        return handlers.trace(policy).get_trace(*args, **kwargs)


def check_shape(name: str, site: dict[str, Any]) -> None:
    """Raises if an observed value does not have the shape of its distribution.

    :param name: the site.
    :param site: its message.
    :raises ValueError: naming both shapes; broadcasting would pair every datum with
        every function value.
    """
    fn, shape = site["fn"], jnp.shape(site["value"])
    expected = tuple(fn.batch_shape) + tuple(fn.event_shape)
    if shape != expected:
        raise ValueError(
            f"site {name!r}: observations have shape {shape}, but the model gives them "
            f"a distribution of shape {expected}"
        )


def flat_functions(model: Callable[..., Any]) -> Callable[..., Any]:
    """``model`` with every Gaussian process at function values of zero."""

    def zeros(message: dict[str, Any]) -> Array | None:
        fn: Any = message.get("fn")
        if isinstance(fn, Conditional):
            return jnp.zeros(fn.shape, fn.dtype)
        return None

    return handlers.substitute(model, substitute_fn=zeros)


def conditional_of(trace: Trace, block: Block) -> Conditional:
    """The conditional law of a Gaussian process block's function values."""
    return trace[block.name]["fn"]


def analyse(model: Callable[..., Any], *args: Any, **kwargs: Any) -> Structure:
    """Takes a model apart.

    :param model: a NumPyro model.
    :param args: its arguments.
    :param kwargs: its keyword arguments.
    :return: a :class:`Structure`.
    """
    arguments = Arguments.split(args, kwargs)
    key = jax.random.key(0)
    candidates, sites = _survey(model, arguments, key)
    reach = _Reach(model, arguments, key, candidates)
    weights = [b for b in candidates if not b.is_process and reach.is_weight(b.name)]
    processes = [b for b in candidates if b.is_process]
    routes = [reach.observed(n, (*processes, *weights)) for n in sites.observed]
    weights = [b for b in weights if reach.in_closed_form(b.name, routes)]
    reach.refuse_unsupported(sites.latent, bool(sites.observed))
    owned = {b.site for b in candidates if b.is_process or b in weights}
    blocks = tuple(sorted(
        (b for b in candidates if b.site in owned),
        key=lambda b: sites.latent.index(b.site),
    ))  # fmt: skip
    return Structure(
        blocks=blocks,
        others=tuple(
            n for n in sites.latent if n not in owned and not reach.is_likelihood(n)
        ),
        observed=tuple(reach.observed(name, blocks) for name in sites.observed),
        plates=sites.plates,
    )


def structure_for(
    model: Callable[..., Any], structure: Structure, arguments: Arguments
) -> Structure:
    """``structure`` with the plates that these arguments give the model.

    :param model: the model.
    :param structure: what it is made of, from arguments of any size.
    :param arguments: its arguments.
    """
    plates: dict[str, Plate] = {}

    def abstract(arrays: tuple[Array, ...]) -> None:
        given = arguments._replace(arrays=arrays)
        trace = run_model(model, given, jax.random.key(0), structure.zeros)
        plates.update(_plates(trace))

    jax.eval_shape(abstract, arguments.arrays)
    return replace(structure, plates=plates)


def _plates(trace: Trace) -> dict[str, Plate]:
    plates = {}
    for name, site in trace.items():
        if site["type"] == "plate":
            size, declared = site["args"]
            if declared is not None and declared > size:
                raise ValueError(
                    f"plate {name!r} has subsample_size {declared}, more than its size "
                    f"{size}"
                )
            plates[name] = Plate(size, site["value"].shape[0])
    return plates


class _Sites(NamedTuple):
    latent: tuple[str, ...]
    observed: tuple[str, ...]
    plates: dict[str, Plate]


def _survey(
    model: Callable[..., Any], arguments: Arguments, key: Array
) -> tuple[list[Block], _Sites]:
    """Names and shapes; candidates are the processes and the vector normals."""
    candidates: list[Block] = []
    latent: list[str] = []
    observed: list[str] = []
    plates: dict[str, Plate] = {}

    def visit(trace: Trace) -> None:
        plates.update(_plates(trace))
        process_sites = set()
        for name, site in trace.items():
            if isinstance(site.get("fn"), Conditional):
                v = trace[f"{name}.v"]
                process_sites.add(f"{name}.v")
                if not v["is_observed"]:
                    candidates.append(_block(name, f"{name}.v", v))
        for name, site in trace.items():
            if site["type"] == "sample" and site["is_observed"]:
                observed.append(name)
            elif site["type"] == "sample":
                latent.append(name)
                if name not in process_sites and _is_vector_normal(site):
                    candidates.append(_block(name, name, site))

    def abstract(arrays: tuple[Array, ...]) -> None:
        visit(run_model(model, arguments._replace(arrays=arrays), key, {}))

    jax.eval_shape(abstract, arguments.arrays)
    return candidates, _Sites(tuple(latent), tuple(observed), plates)


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


class _Reach:
    """How each candidate block reaches each part of the model."""

    def __init__(
        self,
        model: Callable[..., Any],
        arguments: Arguments,
        key: Array,
        candidates: list[Block],
    ) -> None:
        self.processes = {b.name for b in candidates if b.is_process}
        self.vectors = {b.site: b.name for b in candidates if b.is_process}
        self.registered: dict[str, tuple[str, ...]] = {}
        self.classes: dict[str, type] = {}

        def parts(values: dict[str, Any]) -> dict[str, Any]:
            trace = run_model(model, arguments, key, values)
            return self._parts(trace, candidates, values)

        def shapes(arrays: tuple[Array, ...]) -> dict[str, Array]:
            trace = run_model(model, arguments._replace(arrays=arrays), key, {})
            names = {n for b in candidates for n in (b.name, b.site)}
            return {n: trace[n]["value"] for n in names}

        inputs = jax.eval_shape(shapes, arguments.arrays)
        tree = jax.eval_shape(parts, inputs)
        states = dependences(parts, inputs)
        self.states: dict[str, Any] = jax.tree.unflatten(
            jax.tree.structure(tree), [_Leaf(state) for state in states]
        )

    def _parts(
        self, trace: Trace, candidates: list[Block], values: dict[str, Any]
    ) -> dict[str, Any]:
        """What a block may reach: likelihood parameters, densities, everything else."""
        carried: dict[str, Any] = {}
        densities: dict[str, Any] = {}
        rest: dict[str, Any] = {}
        for name, site in trace.items():
            if site["type"] == "sample" and site["is_observed"]:
                check_shape(name, site)
                base = base_distribution(site["fn"])
                self.classes[name] = type(base)
                latents = _latents(type(base))
                self.registered[name] = latents
                carried[name] = {k: getattr(base, k) for k in latents}
                densities[name] = site["fn"].log_prob(site["value"])
                rest[name] = [
                    getattr(base, k) for k in base.arg_constraints
                    if k not in latents and k in vars(base)
                ]  # fmt: skip
            elif site["type"] == "sample" and name not in values:
                rest[name] = jax.tree.leaves(site["fn"])
        for block in candidates:
            if block.is_process:
                law = conditional_of(trace, block)
                rest[block.name] = [law.mean, law.prior_variance, law.projection]
        return {"carried": carried, "densities": densities, "rest": rest}

    def refuse_unsupported(self, latents: tuple[str, ...], observed: bool) -> None:
        """Raises for models whose processes feed something other than likelihoods.

        :param latents: all latent sites.
        :param observed: whether anything is observed; if nothing is, a latent site that
            depends on a process is an observation that was not passed in.
        :raises NotConjugateError: naming the two sites.
        """
        for site, name in self.vectors.items():
            if any(site in leaf.state for leaf in jax.tree.leaves(self.states)):
                raise NotConjugateError(
                    f"the inducing values {site!r} are used directly; use the function "
                    f"values {name!r}, or fit by MCMC(NUTS(model))"
                )
        laws = (*self.processes, *(latents if observed else ()))
        for law in laws:
            leaves = jax.tree.leaves(self.states["rest"].get(law, []))
            sources = {n for leaf in leaves for n in leaf.state} & self.processes
            if sources:
                raise NotConjugateError(
                    f"the law of {law!r} depends on the process "
                    f"{sorted(sources)[0]!r}; only that of an observed site may. "
                    "MCMC(NUTS(model)) samples such a model"
                )

    def is_likelihood(self, latent: str) -> bool:
        """Whether a latent site is an observation that was not passed in: its own
        distribution depends on a process."""
        leaves = jax.tree.leaves(self.states["rest"].get(latent, []))
        return any(self.processes & set(leaf.state) for leaf in leaves)

    def is_weight(self, name: str) -> bool:
        """Whether a vector normal reaches nothing but likelihood predictors, affinely,
        so that its update has a closed form."""
        rest = jax.tree.leaves(self.states["rest"])
        if any(name in leaf.state for leaf in rest):
            return False
        reached = False
        for site, latents in self.registered.items():
            for latent in latents:
                dependence = self.states["carried"][site][latent].state.get(name)
                reached |= dependence is not None
                if dependence is not None and not dependence.affine:
                    return False
            if not latents and name in self.states["densities"][site].state:
                return False
        return reached

    def in_closed_form(self, weight: str, routes: list[Observed]) -> bool:
        """Whether every observed site a weight vector reaches has a closed form (nodes
        run over function values only)."""
        densities = self.states["densities"]
        reached = [r for r in routes if weight in densities[r.name].state]
        return all(r.route is Route.CLOSED_FORM for r in reached)

    def observed(self, name: str, blocks: tuple[Block, ...]) -> Observed:
        """The route of an observed site."""
        density = self.states["densities"][name].state
        reached = tuple(b.name for b in blocks if b.name in density)
        processes = tuple(n for n in reached if n in self.processes)
        augmented = lookup_augmentation(self.classes[name]) is not None
        if not reached:
            return Observed(name, (), Route.CONSTANT, (), augmented, None)
        reason = self._why_not_closed(name, reached)
        latents = self.registered[name] if reason is None else ()
        if latents and lookup_expectation(self.classes[name]) is not None:
            route = Route.CLOSED_FORM
        elif len(reached) == 1 and density[reached[0]].elementwise:
            route = Route.GAUSS_HERMITE
        else:
            route = Route.MONTE_CARLO
        return Observed(name, latents, route, processes, augmented, reason)

    def _why_not_closed(self, name: str, reached: tuple[str, ...]) -> str | None:
        if not self.registered[name]:
            return f"no closed form is registered for {self.classes[name].__name__}"
        for leaf in jax.tree.leaves(self.states["rest"][name]):
            if touched := [r for r in reached if r in leaf.state]:
                return (
                    f"{touched[0]!r} reaches a parameter of "
                    f"{self.classes[name].__name__} other than {self.registered[name]}"
                )
        for latent in self.registered[name]:
            state = self.states["carried"][name][latent].state
            for block in reached:
                dependence = state.get(block)
                if dependence is None:
                    continue
                if not dependence.affine:
                    return (
                        f"{latent!r} is not affine in {block!r}: it passes through "
                        f"{dependence.nonlinear!r}"
                    )
                if block in self.processes and not dependence.elementwise:
                    return f"{latent!r} mixes several function values of {block!r}"
        return None


class _Leaf:
    """Keeps a state (a dict) whole as one leaf of a tree."""

    def __init__(self, state: State) -> None:
        self.state = state


def _latents(cls: type) -> tuple[str, ...]:
    expectation = lookup_expectation(cls)
    if expectation is not None:
        return expectation.latents
    augmentation = lookup_augmentation(cls)
    return () if augmentation is None else augmentation.latents


def require_conjugate(structure: Structure, sites: str) -> None:
    """Raises unless every observed site has closed-form updates.

    :param structure: what the model is made of.
    :param sites: ``"auto"``, ``"exact"`` or ``"augmented"``.

    :raises NotConjugateError: naming the site, the operation and a route that works.
    """
    for site in structure.observed:
        if site.reason is not None:
            raise NotConjugateError(
                f"site {site.name!r} has no closed-form update: {site.reason}. "
                "numpyro.infer.SVI with numpyro_gpaug.TraceAnalytic_ELBO() and "
                "AutoSparseGP(model, covariance='dense') fits this model "
                f"({site.route.value}); MCMC(NUTS(model)) samples it."
            )
        if site.route is Route.MONTE_CARLO and sites != "augmented":
            raise NotConjugateError(
                f"site {site.name!r} has an augmentation but no exact expectation in "
                'closed form: use sites="augmented", or register_expectation'
            )
