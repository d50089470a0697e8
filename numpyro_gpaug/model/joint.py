# SPDX-License-Identifier: Apache-2.0
"""The joint view of a model at fixed params, with all of its Gaussian latents
together."""

from __future__ import annotations

import math
from collections.abc import Iterator
from functools import cached_property, partial
from typing import Any, cast

import jax
import jax.numpy as jnp
import numpy as np
from jax import Array

from numpyro_gpaug.errors import NotConjugateError
from numpyro_gpaug.gaussians.base import Change, StructurePrior
from numpyro_gpaug.gaussians.dense import AffineMap
from numpyro_gpaug.gaussians.pairs import PairedMap
from numpyro_gpaug.gp.conditional import Conditional, Outputs
from numpyro_gpaug.gp.markov import MarkovConditional
from numpyro_gpaug.likelihoods.expectations import Route
from numpyro_gpaug.model.affine import Predictors
from numpyro_gpaug.model.expectation import (
    Concatenated,
    ExpectedLogLikelihood,
    pair_places,
)
from numpyro_gpaug.model.frontier import (
    Frontier,
    frontier,
    index_of,
    single_inputs,
)
from numpyro_gpaug.model.gaussians import Field, field
from numpyro_gpaug.model.latents import JOINT, Grouping
from numpyro_gpaug.model.links import Chained, Declared, Loop, loops
from numpyro_gpaug.model.program import Gather, Program, program_of_sites
from numpyro_gpaug.model.structure import Observed, Trace, run_model
from numpyro_gpaug.model.view import View
from numpyro_gpaug.model.whitened import Parts, parts_of, whitened

# Routes of likelihoods whose parameter is the predictor.
REGISTERED = Route.CLOSED_FORM, Route.CORRELATED


def function_values(
    processes: dict[str, tuple[AffineMap, Outputs]], numbers: dict[str, Array]
) -> dict[str, Array]:
    """Return function values by process.

    :param processes: maps from inducing vectors to function values.
    :param numbers: inducing vectors by site, beside others.
    """
    found = {}
    for name, (map_, outputs) in processes.items():
        v = numbers[f"{name}.v"]
        found[name] = outputs(map_(outputs.select(v.reshape(-1, v.shape[-1]))))
    return found


class JointView(View):
    """The view of a model by one Gaussian on its latents: the affine map to the
    predictors of its likelihoods, and their expectation."""

    # Whether predictors may be at times between the steps of a chain, whether they are
    # known to depend on one group each, and whether sparse processes have no residual.
    _between = _grouped = _projected = False

    @cached_property
    def _program(self) -> Program:
        structure = self.structure
        # Sites that are observed here, and the fields.
        self._shown: set[str] = set()
        self._fields: dict[str, Field] = {}
        observed = tuple(site.name for site in structure.observed)

        def parts(z: dict[str, Array]) -> Parts:
            model = whitened(self._model, z, structure.fields)
            trace = run_model(model, self.arguments, self._key, self.values)
            here = [k for k in observed if k in trace]
            self._shown = {k for k in here if trace[k]["is_observed"]}
            for name in structure.fields:
                own = field(trace[name]["fn"])
                assert own is not None
                self._fields[name] = own
            return parts_of(trace, tuple(z), observed, structure.fields)

        return Program(parts, self._shapes | structure.functions)

    @property
    def _shapes(self) -> dict[str, jax.ShapeDtypeStruct]:
        dtype = self.structure.dtype
        sites = self.structure.sites
        return {s.name: jax.ShapeDtypeStruct(s.shape, dtype) for s in sites}

    @cached_property
    def _still(self) -> dict[int, Any]:
        """The values that do not depend on latents, by variable, as far as they are
        computed."""
        return {}

    def _share(self, variables: list[Any]) -> dict[int, Any]:
        """Compute the values that variables are computed from and that do not depend
        on latents, and return all of these."""
        self._still |= self._program.still(variables, self._still)
        return self._still

    def _at_zero(self, tree: Any) -> Any:
        """Return a part of the outputs of the run, at latents of zero."""
        leaves, treedef = jax.tree.flatten(tree)
        zeros = self._at(self._shapes | self.structure.functions)
        wanted = [leaf.variable for leaf in leaves]
        found = self._program.run(wanted, self._share(wanted) | zeros)
        return jax.tree.unflatten(treedef, found)

    @property
    def loops(self) -> list[Loop | Declared]:
        """The recurrences that the numbers of its sites may follow. If several loops
        have the same steps, only the first is listed."""
        found: dict[Grouping, Loop | Declared] = {}
        for name, (links, states) in self._program.outputs.chains.items():
            steps = Grouping(((name, (0,)),), correlated=True)
            values = self._at_zero(links)[None]
            found[steps] = Declared(steps, states.variable, values)
        declared = {name for steps in found for name, _ in steps.sites}
        for loop in loops(self._program, self.structure):
            if declared.isdisjoint(name for name, _ in loop.steps.sites):
                found.setdefault(loop.steps, loop)
        return list(found.values())

    def chained(self, loop: Loop | Declared) -> Chained | Declared:
        """Return the transitions of a loop at these hyperparameters."""
        if isinstance(loop, Declared):
            return loop
        zeros = self._at(self._shapes | self.structure.functions)
        return Chained(self._program, self.structure, loop, zeros)

    @cached_property
    def _chains(self) -> list[Chained | Declared]:
        if not self.structure.recurrences:
            return []
        known = {loop.steps[:2]: loop for loop in self.loops}
        for steps in self.structure.recurrences:
            if steps[:2] not in known:
                names = [name for name, _ in steps.sites]
                raise NotConjugateError(
                    f"steps of {names} followed each other when the guide was set "
                    "up, and do not at these arguments. Make a new guide for them"
                )
        # In a longer series, the first block is that of the fitted one.
        return [
            self.chained(known[steps[:2]]._replace(steps=steps))
            for steps in self.structure.recurrences
        ]

    @property
    def links(self) -> tuple[Array, ...]:
        """The transition matrices of the steps, by chain of the structure."""
        return tuple(chain.links.values for chain in self._chains)

    @cached_property
    def nodes(self) -> tuple[Array, Array] | None:
        """The entries of the precision of nodes, and its log-determinant; ``None`` for
        other structures."""
        structure, form = self.structure, cast(Any, self.structure.form)
        if not structure.fields:
            return None
        found = self._at_zero(self._program.outputs.precisions)
        parts, begin = [], 0
        log_det = jnp.zeros((), structure.dtype)
        for grouping in structure.groupings:
            size = structure.latents(grouping)
            if (own := self._fields.get(grouping.sites[0][0])) is not None:
                values, each = found[grouping.sites[0][0]]
                pattern = own.prior.pattern
                firsts = range(begin, begin + size, pattern.size)
                parts += [(first, pattern, values) for first in firsts]
                log_det += len(firsts) * each
            begin += size
        return form.joined(parts, structure.dtype), log_det

    @cached_property
    def frontiers(self) -> dict[str, Frontier]:
        """The frontier of the density of each observed site that depends on latents, by
        site: the last affine functions of the latents. For a registered likelihood this
        is its parameter."""
        found = {}
        parts = self._program.outputs
        for site in self.structure.observed:
            if site.route is Route.CONSTANT or site.name not in parts.densities:
                continue
            variables = [parts.densities[site.name].variable]
            if site.route in REGISTERED:
                variables = self._parameters(site)
            found[site.name] = frontier(self._program, variables, site.columns)
        return found

    @cached_property
    def _indices(self) -> dict[str, Array]:
        """The entry of the first predictor that is paired with each entry of the
        second, by site. Only sites are listed in which indices in the data pair the
        entries."""
        return {
            site.name: index_of(self._program, self.frontiers[site.name])
            for site in self.structure.observed
            if site.indexed and site.name in self.frontiers
        }

    @cached_property
    def _roots(self) -> list[Any]:
        """The variables of all predictors. For a registered likelihood this is the
        parameter itself, not the variables that it was computed from."""
        return [v for s in self.structure.observed for v in self._of_site(s)]

    def _of_site(self, site: Observed) -> list[Any]:
        """Return the variables of the predictors of a site; none where the model skips
        the site, as under an ``if y is not None`` in a prediction."""
        if site.name not in self.frontiers:
            return []
        if site.route in REGISTERED:
            return self._parameters(site)
        return list(self.frontiers[site.name].roots)

    def _parameters(self, site: Observed) -> list[Any]:
        """Return the variables of the parameters of a registered likelihood that carry
        latents."""
        parameters = self._program.outputs.parameters[site.name]
        return [parameters[k].variable for k in site.latents]

    @cached_property
    def predictors(self) -> Predictors:
        """The predictors of all data, concatenated."""
        return self._affine(self._roots)

    def _affine(self, variables: list[Any]) -> Predictors:
        program, structure = self._program, self.structure
        rest, chains = self._at(structure.functions), self._chains
        links = self.links
        processes = self.processes if self._projected else {}
        rest |= self._share(variables)

        def values(numbers: dict[str, Array]) -> Array:
            z = structure.unlinked(numbers, links)
            known = rest | {program.inputs[k]: x for k, x in z.items()}
            known |= self._made(function_values(processes, z))
            for chain in chains:
                known |= chain.results(numbers, known)
            found = program.run(variables, known)
            return self._flat(found)

        zeros = jax.tree.map(jnp.zeros_like, self._shapes)
        offset, push = jax.linearize(values, zeros)
        residual = self._flat(self._residuals(variables))
        correlated = any(steps.correlated for steps in structure.groupings[:1])
        adjacent = self._between and correlated
        given = structure, offset, push, residual, self._grouped
        return Predictors(*given, adjacent)

    def _flat(self, values: list[Array]) -> Array:
        """Return the values concatenated; an empty array if no data depend on
        latents."""
        none = jnp.zeros(0, self.structure.dtype)
        return jnp.concatenate([x.ravel() for x in values]) if values else none

    def _at(self, moved: dict[str, Any]) -> dict[int, Array]:
        """Return the inputs of the program: zeros, or the given changes."""
        return {
            self._program.inputs[k]: x if isinstance(x, Array) else jnp.zeros_like(x)
            for k, x in moved.items()
        }

    def _residuals(self, variables: list[Any]) -> list[Array]:
        """Return the variances of predictors given the latents. Each is the sum over
        function values, at one input, of their variances times the squared slopes of
        the predictor. Predictors that mix several function values of a process need
        the covariances of these."""
        program, functions = self._program, self.structure.functions
        if self._projected or not functions:
            shapes = [program.avals[v].shape for v in variables]
            return [jnp.zeros(shape, self.structure.dtype) for shape in shapes]
        zeros = jax.tree.map(jnp.zeros_like, functions)
        outputs = jax.tree.leaves(program.outputs.residuals)
        latents = self._share([x.variable for x in outputs]) | self._at(self._shapes)

        def values(moved: dict[str, Array]) -> list[Array]:
            return program.run(variables, latents | self._at(moved))

        found, push = jax.linearize(values, zeros)
        total = [jnp.zeros_like(x) for x in found]
        residuals = self._at_zero(program.outputs.residuals)
        for name, variance in residuals.items():
            like, ones = zeros[name], jnp.ones_like(zeros[name])
            for only in self._latents_apart(name, variables):
                slope = push(zeros | {name: ones * only})
                carried = push(zeros | {name: variance.astype(like.dtype) * only})
                pairs = zip(total, slope, carried, strict=True)
                total = [t + s * c for t, s, c in pairs]
        for place, variable in enumerate(variables):
            state = program.value(variable).state
            mixed = (n for n in functions if n in state and not state[n].elementwise)
            if not all(self._has_single_inputs(n, variable) for n in mixed):
                each = self._mixed_residuals(variable)
                variance = sum((s * c).sum((0, 1)) for s, c in each)
                total[place] = jnp.maximum(variance, 0).reshape(total[place].shape)
        return total

    def _has_single_inputs(self, process: str, variable: int) -> bool:
        """Whether the residual variance is a sum over independent latents at one
        input."""
        loadings = self._conditionals[process].outputs.loadings
        return loadings is None and single_inputs(self._program, process, [variable])

    def _mixed_residuals(self, variable: int) -> Iterator[tuple[Array, Array]]:
        """Yield, by process, the slopes (latents, N, n) of the n entries of a variable
        in the values of latents, and their products with the covariances of these
        given the inducing values."""
        program, functions = self._program, self.structure.functions
        zeros = jax.tree.map(jnp.zeros_like, functions)
        latents = self._at(self._shapes)

        def values(moved: dict[str, Array]) -> Array:
            return program.run([variable], latents | self._at(moved))[0].ravel()

        _, push = jax.linearize(values, zeros)
        state = program.value(variable).state
        for name in (n for n in functions if n in state):
            f = self._conditionals[name]
            basis = jnp.eye(f.mean.size, dtype=f.dtype).reshape(-1, *f.mean.shape)

            def moved_by(e: Array, name: str = name, f: Any = f) -> Array:
                return push(zeros | {name: f.outputs.shifts(e)})

            slopes = jax.vmap(moved_by)(basis).reshape(*f.mean.shape, -1)
            yield slopes, f.residual_covariance @ slopes

    def _latents_apart(self, name: str, variables: list[Any]) -> list[Any]:
        """Return masks of a process's function values, such that each predictor depends
        on at most one value under each mask. One mask covers everything if no predictor
        mixes latents; otherwise each latent has its own mask."""
        states = [self._program.value(v).state for v in variables]
        if all(s[name].elementwise for s in states if name in s):
            return [1]
        (_, *latents) = self.structure.functions[name].shape
        return [*jnp.eye(math.prod(latents)).reshape(-1, *latents)]

    @cached_property
    def _conditionals(self) -> dict[str, Any]:
        """The conditional distributions of the processes at their inputs, by name."""
        zeros = jax.tree.map(jnp.zeros_like, self._shapes)
        model = whitened(self._model, zeros, self.structure.fields)
        trace = run_model(model, self.arguments, self._key, self.values)
        return {name: trace[name]["fn"] for name in self.structure.functions}

    @property
    def conditionals(self) -> dict[str, Conditional]:
        """The distributions of function values given inducing values, by process.
        Processes as chains of states are left out."""
        made = {k: x for k, x in self._conditionals.items() if f"{k}.v" in self._shapes}
        return {k: x for k, x in made.items() if not isinstance(x, MarkovConditional)}

    @cached_property
    def processes(self) -> dict[str, tuple[AffineMap, Outputs]]:
        """The maps from inducing vectors to function values, by process. Processes are
        left out whose mean or residual depends on other latents."""
        program, found = self._program, {}
        for name, f in self.conditionals.items():
            made = program.outputs.values[name].state
            if made.keys() <= {name, f"{name}.v"}:
                # Inputs of float32 make maps of float32, also in a float64 model.
                to_dtype = partial(jnp.asarray, dtype=self.structure.dtype)
                map_ = jax.tree.map(to_dtype, f.affine_map.certain())
                found[name] = map_, f.outputs
        return found

    @property
    def independent(self) -> list[str]:
        """The processes whose latents are independent of each other and of all other
        latents, given Gaussian factors on the predictors: every predictor that depends
        on such a process depends on one of its function values and on nothing else."""
        program, found = self._program, []
        states = [program.value(root).state for root in self._roots]
        for name, f in self.conditionals.items():
            site, value = f"{name}.v", program.outputs.values[name].variable
            own = [state for state in states if {name, site} & state.keys()]
            alone = all(
                state.keys() <= {name, site} and name in state
                and state[name].elementwise
                for state in own
            )  # fmt: skip
            # Not if the model itself reads the inducing values.
            alone &= program.inputs[site] not in program.read_for(self._roots, [value])
            if alone and f.outputs.loadings is None and f.outputs.latents is None:
                found.append(name)
        return found

    def _made(self, functions: dict[str, Array]) -> dict[int, Array]:
        """Return function values by variable."""
        values = self._program.outputs.values
        return {values[name].variable: x for name, x in functions.items()}

    def maps(self, factors: dict[str, Any] | None = None) -> dict[str, Any]:
        """Return the affine map from the joint Gaussian to all predictors,
        concatenated.

        :param factors: not used: processes are computed with the model.
        """
        single, pairs = self.structure.form.map(self.predictors), self.pairs
        if pairs is not None:
            return {JOINT: PairedMap(single, *pairs)}
        return {JOINT: single.in_order()}

    def unreached(self, maps: dict[str, Any]) -> dict[str, Array]:
        """Return, by process, which function values are explained by at most one of its
        inducing values.

        :param maps: maps to predictors, from :meth:`maps`; a predictor may mix
            processes.
        """
        return {} if self._projected else self._at_zero(self._program.outputs.unreached)

    def slopes(self) -> Array:
        """Return the change of all predictors if all latents grow by one, (n,). It
        depends on the arguments on which the weights of latents depend."""
        found = self._affine(self._roots)
        return found.push(jax.tree.map(jnp.ones_like, self._shapes))

    @property
    def _root_shapes(self) -> list[Any]:
        return [*map(self._program.aval, self._roots)]

    @property
    def rows(self) -> int:
        """The number of predictors."""
        return sum(v.size for v in self._root_shapes)

    @property
    def pairs(self) -> tuple[Array, Array] | None:
        """The pairs of predictors that likelihoods depend on jointly."""
        left, right, begin = [], [], 0
        known = iter([v.shape for v in self._root_shapes])
        for site in self.structure.observed:
            shapes = [next(known) for _ in site.latents]
            places = pair_places(site, shapes, self._indices.get(site.name))
            left.append(begin + places[0])
            right.append(begin + places[1])
            begin += sum(map(math.prod, shapes))
        if not sum(map(len, left)):
            return None
        return jnp.concatenate(left), jnp.concatenate(right)

    @property
    def prior(self) -> StructurePrior:
        """Return the prior: standard normal latents, or latents with transitions
        between steps."""
        return self.structure.prior(self.links, self.nodes)

    def priors(self) -> dict[str, StructurePrior]:
        """Return :attr:`prior` by block."""
        return {JOINT: self.prior}

    def units(self) -> dict[str, Change]:
        structure = self.structure
        if not structure.form.changes or structure.basis is not None:
            return {}
        parts = self._program.outputs
        found = {s.name: jnp.ones(s.shape, structure.dtype) for s in structure.sites}
        for name, scales in self._at_zero(parts.spreads).items():
            for scale in jax.tree.leaves(scales) if name not in parts.factors else ():
                found[name] /= jnp.where(scale > 0, scale, 1)
        flat = structure.joined(found)
        cut = structure.size - structure.form.layout.others
        others = jnp.diag(flat[cut:])
        numbers = structure.split(np.arange(structure.size))
        for name, f in self.conditionals.items():
            own = numbers[f"{name}.v"].reshape(-1, numbers[f"{name}.v"].shape[-1]) - cut
            places = own[:, :, None], own[:, None, :]
            others = others.at[places].set(f.gp.whitener.inverse)
        return {JOINT: Change(flat[None, :cut], others[None])}

    def other_sites(self) -> Trace:
        """Return the sample sites of all other latents."""
        found = self._at_zero(self._program.outputs.others)
        return {name: likelihood.message for name, likelihood in found.items()}

    def message(self, site: str) -> dict[str, Any]:
        """Return the message of an observed site, at latents of zero."""
        found = self._at_zero(self._program.outputs.likelihoods[site])
        return {"is_observed": site in self._shown, **found.message}

    def expected(self, bound: str) -> ExpectedLogLikelihood:
        """Return the expected log-likelihood.

        :param bound: ``"exact"`` or ``"augmented"``, of registered likelihoods.
        """
        parts, program = self._program.outputs, self._program
        registered = *REGISTERED, Route.CONSTANT
        closed = [s for s in self.structure.observed if s.route in registered]
        likelihoods = self._at_zero({s.name: parts.likelihoods[s.name] for s in closed})
        fixed = {
            s.name: tuple(program.run(list(self.frontiers[s.name].fixed), {}))
            for s in self.structure.observed
            if s not in closed
        }
        observed = self.structure.observed
        names = tuple(p for site in observed for p in site.predictors)
        shapes = tuple(s.shape for s in self._root_shapes)
        return ExpectedLogLikelihood(
            Concatenated(names, shapes), likelihoods, observed, bound, fixed,
            self._indices, tuple(self.frontiers.items()),
        )  # fmt: skip

    def expected_log_likelihood(self, at: dict[str, Any], bound: str) -> Array:
        """Return the expected log-likelihood of all sites, see :meth:`expected`.

        :param at: marginals by block.
        :param bound: ``"exact"`` or ``"augmented"``.
        """
        return self.expected(bound)(at)

    @cached_property
    def _density(self) -> Frontier:
        """The frontier of the density of all data."""
        densities = self._program.outputs.densities
        sites = [s for s in self.structure.observed if s.route is not Route.CONSTANT]
        return frontier(self._program, [densities[s.name].variable for s in sites])

    def log_density(self, values: Array) -> Array:
        """Return the sum of the log-densities of all data.

        :param values: values of :attr:`of_density`, (n,).
        """
        program, found = self._program, self._density
        ends = np.cumsum([x.size for x in found.avals])
        numbers = program.run(list(found.fixed), {})
        parts = tuple(jnp.split(values, ends[:-1]))
        return found.total(numbers, parts)

    @property
    def of_density(self) -> Predictors:
        """The affine functions of latents that the density depends on, flat."""
        return self._affine(list(self._density.roots))

    @property
    def by_functions(self) -> bool:
        """Whether :meth:`of_density_at` costs less than a map from latents would: no
        site but processes has a matrix to factorise."""
        known = bool(self.processes) and len(self.processes) == len(self.conditionals)
        plain = self.structure.standard and not self._program.outputs.factors
        return known and plain

    def of_density_at(
        self, functions: dict[str, Array], numbers: dict[str, Array]
    ) -> Array:
        """Return the values of :attr:`of_density`.

        :param functions: function values, by process.
        :param numbers: standard normal numbers of all other sites.
        """
        known = self._made(functions) | self._at(numbers)
        return self._flat(self._program.run(list(self._density.roots), known))

    @property
    def misfit(self) -> Array:
        if self.structure.form.any_rows:
            return super().misfit
        return self.predictors.misfit(self.pairs)

    def gathers(self) -> list[tuple[Gather, tuple[Array, Array, Array]]]:
        found, others = super().gathers(), self._shapes_of_others
        if any(others.values()):
            given = self._model, self.arguments, others, self.values
            found += program_of_sites(*given, self.structure.dtype).reached()
        return found


class ProjectedView(JointView):
    """A view in which inducing values determine function values, as in exact samplers.
    Kernel matrices are computed once for all results."""

    _projected = True
