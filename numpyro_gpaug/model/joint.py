# SPDX-License-Identifier: Apache-2.0
"""A model at fixed params, seen from all of its Gaussian latents together."""

from __future__ import annotations

import math
from collections.abc import Callable
from functools import cached_property, partial
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax import Array
from numpyro.distributions import Distribution

from numpyro_gpaug.distributions.predictor_mixture import PredictorMixture
from numpyro_gpaug.errors import NotConjugateError
from numpyro_gpaug.likelihoods.expectations import (
    Route,
    base_distribution,
    lookup_correlated,
    predictive,
)
from numpyro_gpaug.math.affine import Prior
from numpyro_gpaug.math.arrow import ArrowPrior
from numpyro_gpaug.math.chain import ChainPrior
from numpyro_gpaug.math.correlated_softmax import FINER, NODES
from numpyro_gpaug.math.expectation import (
    PredictorMoments,
    nodes,
    placed,
    rule_differences,
)
from numpyro_gpaug.math.pairs import PairedMap
from numpyro_gpaug.model.arrow import Predictors
from numpyro_gpaug.model.frontier import Frontier, frontier
from numpyro_gpaug.model.indices import program_of_others
from numpyro_gpaug.model.jaxpr import dependence_tree
from numpyro_gpaug.model.joint_expectation import (
    JointExpectation,
    Split,
    correlated,
    ordered_roots,
    pair_places,
)
from numpyro_gpaug.model.latents import (
    JOINT,
    JointStructure,
    Parts,
    parts_of,
    whitened,
)
from numpyro_gpaug.model.program import Gather, Program
from numpyro_gpaug.model.structure import Arguments, Block, Observed, Trace, run_model

# Of likelihoods whose parameter is the predictor.
_REGISTERED = Route.CLOSED_FORM, Route.CORRELATED


class JointView:
    """A model at fixed params and other latents: the affine map from its joint Gaussian
    to the predictors of its likelihoods, and their expectation.

    :param structure: what the model is made of, at these arguments.
    :param model: the model.
    :param arguments: its arguments.
    :param values: params, other latents and plate indices by name.
    :param key: seed for whatever is not in ``values``.
    """

    def __init__(
        self,
        structure: JointStructure,
        model: Callable[..., Any],
        arguments: Arguments,
        values: dict[str, Any],
        key: Array,
    ) -> None:
        self.structure = structure
        self._model, self.arguments = model, arguments
        self.values, self._key = values, key
        self._shown: set[str] = set()

    @cached_property
    def _program(self) -> Program:
        structure = self.structure
        observed = tuple(site.name for site in structure.observed)

        def parts(z: dict[str, Array]) -> Parts:
            model = whitened(self._model, z, self.structure.steps)
            trace = run_model(model, self.arguments, self._key, self.values)
            self._shown = {k for k in observed if trace[k]["is_observed"]}
            return parts_of(trace, tuple(z), observed)

        return Program(parts, self._shapes | structure.functions)

    @property
    def _shapes(self) -> dict[str, jax.ShapeDtypeStruct]:
        dtype = self.structure.dtype
        sites = self.structure.sites
        return {s.name: jax.ShapeDtypeStruct(s.shape, dtype) for s in sites}

    def _at_zero(self, tree: Any) -> Any:
        """A part of what the run left, at latents of zero."""
        program = self._program
        leaves, treedef = jax.tree.flatten(tree)
        zeros = self._at(self._shapes | self.structure.functions)
        wanted = [leaf.variable for leaf in leaves]
        return jax.tree.unflatten(treedef, program.run(wanted, zeros))

    @cached_property
    def frontiers(self) -> dict[str, Frontier]:
        """By observed site that depends on latents, where its density is no longer
        affine in them; of a registered likelihood, its parameter."""
        found = {}
        parts = self._program.outputs
        for site in self.structure.observed:
            if site.route is Route.CONSTANT:
                continue
            closed = site.route in _REGISTERED
            kind = parts.parameters if closed else parts.densities
            found[site.name] = frontier(self._program, [kind[site.name].variable])
        return found

    @cached_property
    def _roots(self) -> list[Any]:
        """Variables of all predictors: of registered likelihoods the parameter itself,
        not what it was computed from."""
        return [v for s in self.structure.observed for v in self._of_site(s)]

    def _of_site(self, site: Observed) -> list[Any]:
        if site.route is Route.CONSTANT:
            return []
        if site.route in _REGISTERED:
            return [self._program.outputs.parameters[site.name].variable]
        return ordered_roots(self._program, self.frontiers[site.name])

    @cached_property
    def predictors(self) -> Predictors:
        """Of all data, side by side."""
        return self._affine(self._roots)

    def _affine(self, variables: list[Any]) -> Predictors:
        program, structure = self._program, self.structure
        rest = self._at(structure.functions)

        def values(z: dict[str, Array]) -> Array:
            known = {program.inputs[k]: x for k, x in z.items()}
            found = program.run(variables, rest | known)
            return jnp.concatenate([x.ravel() for x in found])

        zeros = {k: jnp.zeros(s.shape, s.dtype) for k, s in self._shapes.items()}
        offset, push = jax.linearize(values, zeros)
        residuals = [r.ravel() for r in self._residuals(variables)]
        return Predictors(structure, offset, push, jnp.concatenate(residuals))

    def _at(self, moved: dict[str, Any]) -> dict[int, Array]:
        """Inputs of the program: zero, or what they are moved by."""
        return {
            self._program.inputs[k]: x
            if isinstance(x, Array)
            else jnp.zeros(x.shape, x.dtype)
            for k, x in moved.items()
        }

    def _residuals(self, variables: list[Any]) -> list[Array]:
        """Variances of predictors given the latents: slope times slope times that of
        the function value that each depends on."""
        program, functions = self._program, self.structure.functions
        if not functions:
            shapes = [program.avals[v].shape for v in variables]
            return [jnp.zeros(shape, self.structure.dtype) for shape in shapes]
        zeros = {k: jnp.zeros(f.shape, f.dtype) for k, f in functions.items()}
        latents = self._at(self._shapes)

        def values(moved: dict[str, Array]) -> list[Array]:
            return program.run(variables, latents | self._at(moved))

        found, push = jax.linearize(values, zeros)
        total = [jnp.zeros_like(x) for x in found]
        residuals = self._at_zero(program.outputs.residuals)
        for name, variance in residuals.items():
            slope = push(zeros | {name: jnp.ones_like(zeros[name])})
            carried = push(zeros | {name: variance.astype(zeros[name].dtype)})
            total = [t + s * c for t, s, c in zip(total, slope, carried, strict=True)]
        return total

    # What a fit is made of.

    def maps(self) -> dict[str, Any]:
        """The affine map from the joint Gaussian to all predictors, side by side."""
        predictors, pairs = self.predictors, self.pairs
        arrow = self.structure.arrow is not None
        single = predictors.arrow if arrow else predictors.dense
        return {JOINT: single if pairs is None else PairedMap(single, *pairs)}

    @property
    def _root_shapes(self) -> list[Any]:
        return [self._program.avals[root] for root in self._roots]

    @property
    def rows(self) -> int:
        """How many predictors there are."""
        return sum(v.size for v in self._root_shapes)

    @property
    def pairs(self) -> tuple[Array, Array] | None:
        """Predictors that likelihoods look at in pairs."""
        left, right, begin = [], [], 0
        known = iter([v.shape for v in self._root_shapes])
        for site in self.structure.observed:
            shapes = [next(known) for _ in site.latents]
            places = pair_places(site, shapes)
            left.append(begin + places[0])
            right.append(begin + places[1])
            begin += sum(map(math.prod, shapes))
        if not sum(map(len, left)):
            return None
        return jnp.asarray(np.concatenate(left)), jnp.asarray(np.concatenate(right))

    def priors(self) -> dict[str, Prior | ArrowPrior | ChainPrior]:
        """Standard normal, or running sums of such numbers."""
        return {JOINT: self.structure.prior}

    def block_scale(self, block: Block) -> Any:
        """The factor of the KL: none is supported but one."""
        return 1

    def selected(self) -> dict[str, None]:
        """No process is called for some of its latents."""
        return {}

    def coupled(self) -> tuple[str, ...]:
        """Nothing is moved in parts."""
        return ()

    def other_sites(self) -> Trace:
        """The sample sites of all other latents."""
        found = self._at_zero(self._program.outputs.others)
        return {
            name: dict(zip(("fn", "value", "scale"), likelihood, strict=True))
            for name, likelihood in found.items()
        }

    def message(self, site: str) -> dict[str, Any]:
        """The message of an observed site, at latents of zero."""
        law = self._at_zero(self._program.outputs.likelihoods[site])
        named = dict(zip(("fn", "value", "scale"), law, strict=True))
        return {"is_observed": site in self._shown, **named}

    def expected(self, bound: str) -> JointExpectation:
        """The expected log-likelihood.

        :param bound: ``"exact"`` or ``"augmented"``, of registered likelihoods.
        """
        parts, program = self._program.outputs, self._program
        registered = *_REGISTERED, Route.CONSTANT
        closed = [s for s in self.structure.observed if s.route in registered]
        likelihoods = self._at_zero({s.name: parts.likelihoods[s.name] for s in closed})
        fixed = {
            s.name: tuple(program.run(list(self.frontiers[s.name].fixed), {}))
            for s in self.structure.observed
            if s not in closed
        }
        return JointExpectation(
            likelihoods, fixed, self.structure.observed,
            tuple((s.shape, str(s.dtype)) for s in self._root_shapes),
            tuple((k, Split(program, f)) for k, f in self.frontiers.items()),
            bound,
        )  # fmt: skip

    @cached_property
    def density(self) -> tuple[Predictors, Callable[[Array], Array]]:
        """The predictors of all data, flat, and the sum of the log-densities as a
        function of their values."""
        program, densities = self._program, self._program.outputs.densities
        sites = [s for s in self.structure.observed if s.route is not Route.CONSTANT]
        found = frontier(program, [densities[s.name].variable for s in sites])
        roots, split = ordered_roots(program, found), Split(program, found)
        ends = np.cumsum([program.avals[root].size for root in roots])
        numbers = program.run(list(found.fixed), {})

        def total(values: Array) -> Array:
            return split.total(numbers, tuple(jnp.split(values, ends[:-1])))

        return self._affine(roots), total

    @property
    def unobserved(self) -> list[str]:
        """Observed sites that are not so at these arguments."""
        names = [site.name for site in self.structure.observed]
        _ = self._program
        return [name for name in names if name not in self._shown]

    def rule_errors(self, q: Any) -> dict[str, Array]:
        """How far quadrature is off, as a finer rule says, in nats per datum (a mean of
        absolute differences), by site; nothing where that takes too large a matrix.

        :param q: moments of the latents.
        """
        found: dict[str, Array] = {}
        for site in self.structure.observed:
            if site.route not in (Route.GAUSS_HERMITE, Route.CORRELATED):
                continue
            roots = self._of_site(site)
            if self._affine(roots).many and self.structure.arrow is None:
                continue
            if site.route is Route.CORRELATED:
                found[site.name] = self._node_error(site, q)
                continue
            split = self._split(site)
            numbers = self._program.run(list(split.frontier.fixed), {})
            at = self._marginals(roots, q)
            differences = rule_differences(partial(split.outputs, numbers), at)
            total = jnp.stack([jnp.abs(x).sum() for x in differences]).sum()
            found[site.name] = total / max(m.size for m in at.means)
        return found

    def _node_error(self, site: Observed, q: Any) -> Array:
        """See :meth:`rule_errors`; of an average over quasi-random nodes."""
        (law,) = self._at_zero([self._program.outputs.likelihoods[site.name]])
        at = self._correlated(site, q)
        rough, fine = (correlated(law.fn, law.value, *at, n) for n in (NODES, FINER))
        return jnp.abs(rough - fine).mean()

    def _correlated(self, site: Observed, q: Any) -> tuple[Array, Array, Array]:
        """Moments of the correlated predictors of each datum of a site."""
        (root,) = self._of_site(site)
        shape = self._program.avals[root].shape
        map_ = self._affine([root]).matrices
        mean, variance = (x[0].reshape(shape) for x in map_.marginals(q))
        pairs = (jnp.asarray(x) for x in pair_places(site, [shape]))
        return mean, variance, map_.covariances(q, *pairs)[0]

    def _split(self, site: Observed) -> Split:
        return Split(self._program, self.frontiers[site.name])

    # What predictions are made of.

    def marks(self) -> dict[str, Array]:
        """Numbers that tell the factors of sites whose values are mixed by them, and
        the arguments that these are computed from: a covariance of places may be that
        of other places."""
        found = self._at_zero(self._program.outputs.factors)
        if not found:
            return {}
        arrays = {str(i): x for i, x in enumerate(self.arguments.arrays)}

        def factors(inputs: dict[str, Array]) -> Any:
            arguments = self.arguments._replace(arrays=tuple(inputs.values()))
            here = self.structure, self._model, arguments, self.values, self._key
            view = JointView(*here)
            return view._at_zero(view._program.outputs.factors)

        shapes = {k: jax.ShapeDtypeStruct(x.shape, x.dtype) for k, x in arrays.items()}
        sources = dependence_tree(factors, shapes)

        def mark(name: str) -> Array:
            used = {k for leaf in jax.tree.leaves(sources[name]) for k in leaf.state}
            leaves = [*jax.tree.leaves(found[name]), *(arrays[k] for k in sorted(used))]
            flat = jnp.concatenate([jnp.ravel(x).astype(float) for x in leaves])
            waves = jnp.cos(jnp.arange(flat.size, dtype=flat.dtype))
            return jnp.stack([flat.sum(), (flat * waves).sum()])

        return {name: mark(name) for name in found}

    def gathers(self) -> list[tuple[Gather, tuple[Array, Array, Array]]]:
        """Latents that are indexed, hyperparameters too, and how far their indices
        go."""
        found = list(self._program.reached())
        known = dict(self.structure.shapes)
        known |= {k: jnp.shape(x) for k, x in self.values.items() if k in known}
        others = {k: known[k] for k in self.structure.others}
        if any(others.values()):
            given = self._model, self.arguments, others, self.values
            program = program_of_others(*given, self.structure.dtype)
            found += list(program.reached())
        return found

    def shape(self, name: str) -> tuple[int, ...]:
        """Of a Gaussian or deterministic site's values.

        :param name: of the site.
        """
        return tuple(self._program.avals[self._variable(name)].shape)

    def affine(self, name: str) -> Predictors:
        """The values of a Gaussian or deterministic site.

        :param name: of the site.
        :raises NotConjugateError: if it is not affine in the latents.
        """
        variable = self._variable(name)
        state = self._program.value(variable).state
        for source, dependence in state.items():
            if dependence.nonlinear:
                raise NotConjugateError(
                    f"{name!r} is not affine in {source!r} ({dependence.nonlinear}): "
                    "draw from it with numpyro.infer.Predictive(model, guide=guide, "
                    "params=fit.params, num_samples=...)"
                )
        return self._affine([variable])

    def misfit(self, name: str | None) -> Array:
        """How far what is predicted, or all data for ``None``, is from looking at one
        group each; zero where a matrix takes them whatever they look at."""
        if self.structure.arrow is None:
            return jnp.zeros((), self.structure.dtype)
        if name is None:
            return self.predictors.misfit(self.pairs)
        known = {s.name: s for s in self.structure.observed}
        if name in known:
            found = [self._affine([root]) for root in self._of_site(known[name])]
        else:
            found = [self.affine(name)]
        worst = [each.misfit() for each in found if each.many]
        return jnp.max(jnp.stack([jnp.zeros((), self.structure.dtype), *worst]))

    def _variable(self, name: str) -> Any:
        """What holds a site's values; of an observed site its predictor: in closed form
        the parameter of its likelihood, otherwise the one root of its density."""
        values = self._program.outputs.values
        if name in values:
            return values[name].variable
        known = {s.name: self._of_site(s) for s in self.structure.observed}
        if name not in known:
            raise ValueError(
                f"site={name!r}: the values that can be predicted are "
                f"{sorted([*known, *values])}; numpyro.deterministic gives a predictor "
                "a name"
            )
        if len(known[name]) != 1 or not self._has_root_of_its_own(name):
            raise ValueError(
                f"site={name!r}: its likelihood does not depend on one predictor for "
                f"each datum: give one a name, numpyro.deterministic('eta', ...), and "
                "predict that, predict_f(..., site='eta')"
            )
        return known[name][0]

    def _has_root_of_its_own(self, name: str) -> bool:
        """Whether the one root of a site's density has an entry for each datum, which
        no data scale before they are looked at."""
        found, program = self.frontiers[name], self._program
        density = program.avals[program.outputs.densities[name].variable]
        closed = name in {
            s.name for s in self.structure.observed if s.route in _REGISTERED
        }
        whole = program.avals[found.roots[0]].size >= density.size
        return closed or (whole and not found.scaled[0])

    def _marginals(self, variables: list[Any], q: Any) -> PredictorMoments:
        """Moments of one or two predictors of each datum, flat."""
        sizes = [self._program.avals[v].size for v in variables]
        ends = np.cumsum(sizes)
        map_ = self._affine(variables).matrices
        mean, variance = map_.marginals(q)
        means, variances = (jnp.split(x[0], ends[:-1]) for x in (mean, variance))
        covariance = None
        if len(sizes) == 2:
            places = jnp.arange(sizes[0]), sizes[0] + jnp.arange(sizes[1])
            covariance = map_.covariances(q, *jnp.broadcast_arrays(*places))[0]
        return PredictorMoments(tuple(means), tuple(variances), covariance)

    def predictive(self, site: Observed, q: Any) -> Distribution:
        """The distribution of new observations, the latents integrated out.

        :param site: the observed site.
        :param q: moments of the latents.
        """
        parts, program = self._program.outputs, self._program
        if site.route is Route.CLOSED_FORM:
            parameter = parts.parameters[site.name].variable
            (mean,), (variance,), _ = self._marginals([parameter], q)
            (law,) = self._at_zero([parts.likelihoods[site.name]])
            (latent,) = site.latents
            shape = self._program.avals[parameter].shape
            return predictive(
                law.fn,
                {latent: mean.reshape(shape)},
                {latent: variance.reshape(shape)},
            )
        fn = base_distribution(parts.likelihoods[site.name].fn)
        if site.route is Route.CORRELATED:
            mean, variance, pairs = self._correlated(site, q)
            entry = lookup_correlated(type(fn))
            assert entry is not None
            pairs = pairs.reshape(*mean.shape[:-1], -1)
            return entry.predictive(fn, mean, variance, pairs)
        leaves, treedef = jax.tree.flatten(fn)
        variables = [leaf.variable for leaf in leaves]
        varies = tuple(program.depends(v) for v in variables)
        moving = [v for v, moves in zip(variables, varies, strict=True) if moves]
        found = frontier(program, moving)
        if found.reason is not None or len(found.roots) > 2:
            raise NotConjugateError(
                f"the parameters of {site.name!r} are no functions of one or two "
                f"predictors for each datum: {found.reason}"
            )
        roots = ordered_roots(program, found)
        at = self._marginals(roots, q)
        split = Split(program, found)
        numbers = program.run(list(found.fixed), {})
        x, weights = nodes(len(roots), at.means[0].dtype)
        place = partial(split.outputs, numbers)
        moved = iter(jax.vmap(lambda node: place(placed(at, node)))(x))
        still = iter(self._at_zero([
            leaf for leaf, moves in zip(leaves, varies, strict=True) if not moves
        ]))  # fmt: skip
        given = tuple(next(moved) if moves else next(still) for moves in varies)
        return PredictorMixture(
            given, weights, treedef, varies, fn.batch_shape, fn.event_shape
        )
