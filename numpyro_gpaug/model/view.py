# SPDX-License-Identifier: Apache-2.0
"""Views of a model at fixed params and other latents, and the codes by which data
index its latents; the view by its Gaussian blocks."""

from __future__ import annotations

import dataclasses
from collections.abc import Callable
from functools import cached_property
from typing import Any, NamedTuple, Self

import jax
import jax.numpy as jnp
import numpy as np
from jax import Array, random

from numpyro_gpaug.gaussians.base import Change, Marginals
from numpyro_gpaug.gaussians.dense import AffineBlocks, AffineMap, Prior
from numpyro_gpaug.gp.conditional import Conditional
from numpyro_gpaug.likelihoods.expectations import Route, base_distribution
from numpyro_gpaug.math.arrays import STATIC
from numpyro_gpaug.math.fingerprints import checksums
from numpyro_gpaug.math.linalg import safe_sqrt
from numpyro_gpaug.math.quadrature import gauss_hermite
from numpyro_gpaug.model.affine import ROUNDING, check_groups
from numpyro_gpaug.model.arguments import Arguments
from numpyro_gpaug.model.expectation import (
    ExpectedLogLikelihood,
    Likelihood,
    Predictors,
    scaled_sum,
)
from numpyro_gpaug.model.latents import Structure
from numpyro_gpaug.model.observations import check_shape, unobserved_error
from numpyro_gpaug.model.program import Gather, Program, program_of_sites
from numpyro_gpaug.model.structure import (
    Block,
    Observed,
    Trace,
    run_model,
)

NUM_NODES = 32


class View:
    """A model at fixed params and other latents: the priors of its Gaussian blocks,
    their affine maps to the predictors, and the likelihoods there.

    :param structure: the structure of the model, at these arguments.
    :param model: the model.
    :param arguments: its arguments.
    :param values: params, other latents and plate indices by name.
    :param key: the seed of all sites that are not in ``values``.
    """

    def __init__(
        self,
        structure: Structure,
        model: Callable[..., Any],
        arguments: Arguments,
        values: dict[str, Any],
        key: Array,
    ) -> None:
        self.structure = structure
        self._model, self.arguments = model, arguments
        self.values, self._key = values, key

    @cached_property
    def _program(self) -> Program:
        """The program of observed values, given weights, function values and other
        latents."""
        structure, shapes = self.structure, self._shapes_of_others
        shapes |= {block.site: block.shape for block in structure.weights}
        shapes |= {name: f.shape for name, f in structure.functions.items()}
        given = self._model, self.arguments, shapes, self.values
        found = program_of_sites(*given, jnp.result_type(float))
        self._shown = set(found.outputs)
        return found

    @property
    def _shapes_of_others(self) -> dict[str, tuple[int, ...]]:
        known = dict(self.structure.shapes)
        known |= {k: jnp.shape(x) for k, x in self.values.items() if k in known}
        return {k: known[k] for k in self.structure.others}

    def gathers(self) -> list[tuple[Gather, tuple[Array, Array, Array]]]:
        """Return the indexed latents and hyperparameters, with the range of the
        indices."""
        return self._program.reached()

    @property
    def unobserved(self) -> list[str]:
        """Names of the sites that were observed in the fit and are not observed at
        these arguments."""
        names = [site.name for site in self.structure.observed]
        _ = self._program
        return [name for name in names if name not in self._shown]

    @property
    def misfit(self) -> Array:
        """The error of assuming that every datum depends on one group; zero without
        this assumption."""
        return jnp.zeros((), self.structure.dtype)

    def misfits_of(self, name: str) -> tuple[Array, Array]:
        """Return how far a site's predictors are from depending on one group each, as
        two numbers. The first is for predictors that must: it is zero if a dense matrix
        is used. The second is for all predictors: it is the largest number if a
        dense matrix is as fast.

        :param name: the name of the site.
        """
        zero = jnp.zeros((), self.structure.dtype)
        return zero, zero + jnp.finfo(zero.dtype).max

    def selected(self) -> dict[str, Array | None]:
        """Return the latents that each process was called for; ``None`` for all."""
        return {}

    def coupled(self) -> tuple[str, ...]:
        """Return the processes whose latents share outputs."""
        return ()

    def block_scale(self, block: Block) -> Any:
        """Return the factor of a block's KL divergence."""
        return 1

    def units(self) -> dict[str, Change]:
        """Return latents, given the values of the model's sites, by block.

        Data determine the values of sites. While hyperparameters change, what is known
        from earlier batches is therefore about these, not about whitened latents: Adam,
        Chang, Khan and Solin (2021), Dual parameterization of sparse variational
        Gaussian processes."""
        return {}


@jax.tree_util.register_dataclass
@dataclasses.dataclass(frozen=True)
class Codes:
    """The dependence of data on latents by codes, computed once by a program.

    :param extremes: ranges of indices from
        :meth:`~numpyro_gpaug.model.program.Program.reached`, for all gathers.
    :param misfit: see :attr:`~numpyro_gpaug.model.view.View.misfit`.
    :param gathers: the indexed latents.
    """

    extremes: tuple[tuple[Array, Array, Array], ...]
    misfit: Array
    gathers: tuple[Gather, ...] = dataclasses.field(metadata=STATIC)

    @classmethod
    def of_fit(cls, view: View) -> Self:
        """Return the codes of a model at the arguments of a fit.

        :raises ValueError: for observations that are missing.
        """
        if missing := view.unobserved:
            raise unobserved_error(missing)
        return cls.of(view, jnp.asarray(view.misfit))

    @classmethod
    def of(cls, view: View, misfit: Array) -> Self:
        """Return the codes of a model at the arguments of its view."""
        found = view.gathers()
        return cls(tuple(x for _, x in found), misfit, tuple(x for x, _ in found))

    @property
    def valid(self) -> Array:
        """Whether :meth:`check` does not raise; may be traced."""
        found = [self.misfit < ROUNDING]
        pairs = zip(self.gathers, self.extremes, strict=True)
        for gather, (lows, highs, least) in pairs:
            inside = (lows >= 0) & (highs < np.array(gather.sizes))
            found += [inside.all(), least >= 0]
        return jnp.stack(found).all()

    def check(self, what: str = "data", cure: str = "") -> None:
        """Raise for codes without a member, and for data that depend on several groups.

        :param what: the name of the data in the message.
        :param cure: what to do about codes without a member.
        :raises ValueError: naming the indexed latent.
        :raises NotConjugateError: if data depend on several groups.
        """
        found = jax.device_get(self.extremes)
        for gather, extremes in zip(self.gathers, found, strict=True):
            if wrong := gather.bad(extremes):
                raise ValueError(wrong + cure)
        check_groups(self.misfit, what)


class _Run(NamedTuple):
    trace: Trace
    predictors: Predictors
    likelihoods: dict[str, Likelihood]


class ModelView(View):
    """The view of a model by an independent Gaussian for each process and weight
    vector.

    The model is run once, at function values and weights of zero, on first use.
    Quadrature and samplers, which need its densities elsewhere, run it again
    (:meth:`trace`).
    """

    def trace(self, at: dict[str, Array]) -> Trace:
        """Run the model with function values and weights filled in from ``at``; missing
        ones are zero."""
        values = {**self.structure.flat, **self.values, **at}
        return run_model(self._model, self.arguments, self._key, values)

    @cached_property
    def _run(self) -> _Run:
        """The one run of the model, linearised in function values and weights."""
        traces: list[Trace] = []
        structure = self.structure
        flat = structure.flat
        zeros = {b.name: flat[b.name] for b in structure.blocks}

        def run(at: dict[str, Array]) -> tuple[dict[str, Array], Any]:
            trace = self.trace(at)
            traces.append(trace)
            predictors, likelihoods = {}, {}
            for site in structure.observed:
                message = trace[site.name]
                if message["is_observed"]:
                    check_shape(site.name, message)
                parts = message["fn"], message["value"], message["scale"]
                likelihoods[site.name] = Likelihood(parts)
                base = base_distribution(message["fn"])
                for k in site.latents:
                    predictors[f"{site.name}/{k}"] = jnp.asarray(getattr(base, k))
            return predictors, likelihoods

        values, push, likelihoods = jax.linearize(run, zeros, has_aux=True)
        # The parts of it that are read do not depend on the inputs of the
        # linearisation.
        (trace,) = traces
        outputs = {b.name: trace[b.name]["fn"].outputs for b in structure.processes}
        sources = structure.sources()
        columns = {
            b.name: tuple(k for k, names in sources.items() if b.name in names)
            for b in structure.weights
        }
        shapes = {k: jax.ShapeDtypeStruct(z.shape, z.dtype) for k, z in zeros.items()}
        predictors = Predictors(values, push, outputs, columns, shapes)
        return _Run(trace, predictors, likelihoods)

    @property
    def predictors(self) -> Predictors:
        """The latent-carrying parameters of its likelihoods."""
        return self._run.predictors

    def conditional(self, block: Block) -> Conditional:
        """Return the distribution of a process's function values given its inducing
        vector."""
        return self._run.trace[block.name]["fn"]

    def message(self, site: str) -> dict[str, Any]:
        """Return the message of a sample site, at function values of zero."""
        known = self._run.likelihoods
        own = known[site].message if site in known else {}
        return {**self._run.trace[site], **own}

    def other_sites(self) -> Trace:
        """Return the sample sites of all other latents."""
        return {name: self._run.trace[name] for name in self.structure.others}

    def selected(self) -> dict[str, Array | None]:
        return {k: o.selected for k, o in self.predictors.outputs.items()}

    def coupled(self) -> tuple[str, ...]:
        outputs = self.predictors.outputs
        return tuple(k for k, o in outputs.items() if o.loadings is not None)

    def maps(
        self, factors: dict[str, Any] | None = None
    ) -> dict[str, AffineMap | AffineBlocks]:
        """Return the affine map of every block. The map of a process is to its latents'
        values at the data, and that of a weight vector is to the predictors that depend
        on it, concatenated.

        :param factors: whitening factors of inducing values, if computed before.
        """
        found: dict[str, AffineMap | AffineBlocks] = {}
        for block in self.structure.processes:
            f = self.conditional(block)
            factor = f.gp.whitener if factors is None else factors[block.name]
            found[block.name] = f.map_through(factor)
        return {**found, **self.weight_maps()}

    def unreached(self, maps: dict[str, Any]) -> dict[str, Array]:
        """Return, by process, which function values are explained by at most one of its
        inducing values.

        :param maps: from :meth:`maps`.
        """
        names = [block.name for block in self.structure.processes]
        return {name: maps[name].unshared() for name in names}

    def weight_maps(self) -> dict[str, AffineMap]:
        """Return the affine maps of plain weight vectors."""
        found, predictors = {}, self.predictors
        for block in self.structure.weights:
            names, eye = predictors.columns[block.name], jnp.eye(block.shape[0])
            directions = jnp.asarray(eye, block.dtype)
            projection = predictors.projection(block.name, names, directions)[None]
            nothing = jnp.zeros_like(projection[:, 0])
            found[block.name] = AffineMap(nothing, projection, nothing)
        return found

    def priors(self) -> dict[str, Prior]:
        """Return the priors of every block, latent axis first."""
        blocks = self.structure.blocks
        return {block.name: prior_of(block, self._run.trace) for block in blocks}

    def units(self) -> dict[str, Change]:
        found = {}
        for block in self.structure.processes:
            inverse = self.conditional(block).gp.whitener.inverse
            found[block.name] = Change(inverse[:, 0, :0], inverse)
        return found

    def slopes(self) -> Array:
        """Return the weights of the blocks in function values and predictors, as a
        vector. It depends on the arguments on which the weights depend."""
        values = [self.conditional(b).projection for b in self.structure.processes]
        values += [x.projection for x in self.weight_maps().values()]
        return jnp.concatenate([jnp.ravel(x) for x in values])

    def marks(self) -> dict[str, Array]:
        """Return checksums, by process, of the prior of its inducing values. They show
        whether numbers of the fit have the same meaning."""
        processes = self.structure.processes
        return {b.name: checksums(self.conditional(b).prior) for b in processes}

    def block_scale(self, block: Block) -> Any:
        """Return the scale NumPyro put on a block's sample site, times C / K if the
        process was called for the K latents a plate of size C drew."""
        trace = self._run.trace
        scale = trace[block.site]["scale"]
        scale = 1 if scale is None else scale
        latents = self.selected().get(block.name)
        if latents is None:
            return scale
        plates = [s for s in trace.values() if s["type"] == "plate"]
        drawn = [s for s in plates if s["value"] is latents]
        sizes = block.shape[0], len(latents)
        if not drawn and any((s["args"][0], len(s["value"])) == sizes for s in plates):
            raise ValueError(
                f"process {block.name!r} is called for {sizes[1]} of {sizes[0]} "
                "latents, as many as a plate draws, but not with the indices of "
                "that plate. Pass them unchanged (latents=index)"
            )
        return scale * block.shape[0] / len(latents) if drawn else scale

    def expected(
        self, bound: str, sites: tuple[Observed, ...] | None = None
    ) -> ExpectedLogLikelihood:
        """Return the expected log-likelihood of sites that have it in closed form.

        :param bound: ``"exact"`` or ``"augmented"``.
        :param sites: the sites; all by default.
        """
        run, sites = self._run, self.structure.observed if sites is None else sites
        return ExpectedLogLikelihood(run.predictors, run.likelihoods, sites, bound)

    def expected_log_likelihood(self, at: dict[str, Marginals], bound: str) -> Array:
        """Return the expected log-likelihood of all sites, by nodes if there is no
        closed form.

        :param at: marginals by block name.
        :param bound: ``"exact"`` or ``"augmented"``.
        :return: scalar.
        """
        routes = Route.CLOSED_FORM, Route.CONSTANT
        closed = tuple(
            site
            for site in self.structure.observed
            if site.route in routes or (site.latents and bound == "augmented")
        )
        total = self.expected(bound, closed)(at)
        means, spreads = self.predictors.moments(at)
        for site in self.structure.observed:
            if site not in closed:
                values, weights = self.at_nodes(site, means, spreads, self._key)
                term = jnp.tensordot(weights, values, 1)
                total += scaled_sum(term, self.message(site.name)["scale"])
        return total

    def at_nodes(
        self,
        site: Observed,
        means: dict[str, Array],
        spreads: dict[str, Array],
        key: Array,
    ) -> tuple[Array, Array]:
        """Return the log-densities of a site, and weights, by running the model again
        at nodes of the function values: Gauss-Hermite nodes if each datum depends on
        one process, otherwise draws.

        :param site: the site.
        :param means: means of function values, by process.
        :param spreads: their variances.
        :param key: seed of nodes that are draws.
        """
        reached = {k: means[k] for k in site.processes}
        dtype = jnp.result_type(*reached.values())
        if site.route is Route.GAUSS_HERMITE:
            nodes, weights = gauss_hermite(NUM_NODES, dtype)
            draws = dict.fromkeys(reached, nodes)
        else:
            keys = dict(zip(reached, random.split(key, len(reached)), strict=True))
            draws = {
                k: random.normal(keys[k], (NUM_NODES, *m.shape), dtype)
                for k, m in reached.items()
            }
            weights = jnp.full((NUM_NODES,), 1 / NUM_NODES, dtype)

        def density(z: dict[str, Array]) -> Array:
            moved = {k: means[k] + safe_sqrt(spreads[k]) * z[k] for k in z}
            message = self.trace({**means, **moved})[site.name]
            return message["fn"].log_prob(message["value"])

        return jax.vmap(density)(draws), weights


def prior_of(block: Block, trace: Trace) -> Prior:
    """Return the prior of a block, latent axis first, from a trace of the model."""
    normal = base_distribution(trace[block.site]["fn"])
    loc, scale = (
        jnp.broadcast_to(jnp.asarray(x, block.dtype), block.shape)
        for x in (normal.loc, normal.scale)
    )
    rows = (-1, block.shape[-1])
    return Prior(loc.reshape(rows), scale.reshape(rows))
