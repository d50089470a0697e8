# SPDX-License-Identifier: Apache-2.0
"""A model at fixed params, seen from all of its Gaussian latents together."""

from __future__ import annotations

from collections.abc import Callable
from functools import cached_property, partial
from typing import Any

import jax
import jax.numpy as jnp
from jax import Array
from numpyro.distributions import Distribution

from numpyro_gpaug.distributions.predictor_mixture import PredictorMixture
from numpyro_gpaug.errors import NotConjugateError
from numpyro_gpaug.likelihoods.expectations import (
    Route,
    base_distribution,
    predictive,
)
from numpyro_gpaug.math.affine import AffineMap, Prior
from numpyro_gpaug.math.expectation import nodes, placed
from numpyro_gpaug.math.linalg import Moments
from numpyro_gpaug.math.pairs import PairedMap
from numpyro_gpaug.model.frontier import Frontier, frontier
from numpyro_gpaug.model.jaxpr import dependence_tree
from numpyro_gpaug.model.joint_expectation import (
    JointExpectation,
    Split,
    moments_of,
    ordered_roots,
)
from numpyro_gpaug.model.latents import JOINT, JointStructure, Parts, parts_of, whitened
from numpyro_gpaug.model.program import Gather, Program
from numpyro_gpaug.model.structure import Arguments, Block, Observed, Trace, run_model


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
            model = whitened(self._model, z)
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
            closed = site.route is Route.CLOSED_FORM
            kind = parts.parameters if closed else parts.densities
            found[site.name] = frontier(self._program, [kind[site.name].variable])
        return found

    @cached_property
    def _roots(self) -> list[Any]:
        """Variables of all predictors: of registered likelihoods the parameter itself,
        not what it was computed from."""
        parts, found = self._program.outputs, []
        for site in self.structure.observed:
            if site.route is Route.CLOSED_FORM:
                found.append(parts.parameters[site.name].variable)
            elif site.route is not Route.CONSTANT:
                found += ordered_roots(self._program, self.frontiers[site.name])
        return found

    @cached_property
    def _linear(self) -> tuple[list[Array], Callable[[Array], list[Array]]]:
        """Predictors at latents of zero, and how they move with the flat latents."""
        return self._linearised(self._roots)

    def _linearised(
        self, variables: list[Any]
    ) -> tuple[list[Array], Callable[[Array], list[Array]]]:
        program, structure = self._program, self.structure
        rest = self._at(structure.functions)

        def values(flat: Array) -> list[Array]:
            z = structure.split(flat)
            known = {program.inputs[k]: x for k, x in z.items()}
            return program.run(variables, rest | known)

        return jax.linearize(values, jnp.zeros(structure.size, structure.dtype))

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
        values, push = self._linear
        eye = jnp.eye(self.structure.size, dtype=self.structure.dtype)
        moved = jax.vmap(push)(eye)
        offset = jnp.concatenate([v.ravel() for v in values])[None]
        size = len(eye)
        projection = jnp.concatenate([m.reshape(size, -1) for m in moved], -1)[None]
        residuals = [r.ravel() for r in self._residuals(self._roots)]
        single = AffineMap(offset, projection, jnp.concatenate(residuals)[None])
        pairs = self._pairs()
        return {JOINT: single if pairs is None else PairedMap(single, *pairs)}

    def _pairs(self) -> tuple[Array, Array] | None:
        left, right, begin = [], [], 0
        sizes = iter([v.size for v in self._linear[0]])
        for site in self.structure.observed:
            count = len(site.latents)
            places = []
            for _ in range(count):
                size = next(sizes)
                places.append(jnp.arange(begin, begin + size))
                begin += size
            if count == 2:
                both = jnp.broadcast_arrays(*places)
                left.append(both[0])
                right.append(both[1])
        if not left:
            return None
        return jnp.concatenate(left), jnp.concatenate(right)

    def priors(self) -> dict[str, Prior]:
        """Standard normal."""
        zeros = jnp.zeros((1, self.structure.size), self.structure.dtype)
        return {JOINT: Prior(zeros, zeros + 1)}

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
        shapes = [jax.ShapeDtypeStruct(v.shape, v.dtype) for v in self._linear[0]]
        quadrature = Route.GAUSS_HERMITE
        closed = [s for s in self.structure.observed if s.route is not quadrature]
        likelihoods = self._at_zero({s.name: parts.likelihoods[s.name] for s in closed})
        fixed = {
            s.name: tuple(program.run(list(self.frontiers[s.name].fixed), {}))
            for s in self.structure.observed
            if s not in closed
        }
        return JointExpectation(
            likelihoods, fixed, self.structure.observed,
            tuple((s.shape, str(s.dtype)) for s in shapes),
            tuple((k, Split(program, f)) for k, f in self.frontiers.items()),
            bound,
        )  # fmt: skip

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
        """Sites that are indexed, and how far their indices go."""
        found = []
        for gather in self._program.gathers():
            indices, *raw = self._program.run([gather.indices, *gather.raw], {})
            found.append((gather, gather.extremes(indices, raw)))
        return found

    def spread(self, name: str, q: Moments) -> tuple[Array, Array, Array]:
        """Mean of a Gaussian or deterministic site, the rows of its spread, and the
        variance it has given the latents: to be added to the sum of their squares.

        :param name: of the site.
        :param q: moments of the latents, without a leading axis.
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
        (mean,), (rows,) = self._spread([variable], q)
        return mean, rows, self._residuals([variable])[0]

    def _variable(self, name: str) -> Any:
        """What holds a site's values; of an observed site in closed form, the parameter
        of its likelihood."""
        parts = self._program.outputs
        closed = {
            site.name: parts.parameters[site.name]
            for site in self.structure.observed
            if site.route is Route.CLOSED_FORM
        }
        known = {**closed, **parts.values}
        if name not in known:
            raise ValueError(
                f"site={name!r}: the values that can be predicted are {sorted(known)}; "
                "numpyro.deterministic gives a predictor a name"
            )
        return known[name].variable

    def _spread(self, variables: list[Any], q: Moments) -> Any:
        values, push = self._linearised(variables)
        shifts, rows = push(q.mean), jax.vmap(push)(q.whitener)
        return [v + s for v, s in zip(values, shifts, strict=True)], rows

    def predictive(self, site: Observed, q: Moments) -> Distribution:
        """The distribution of new observations, the latents integrated out.

        :param site: the observed site.
        :param q: moments of the latents, without a leading axis.
        """
        parts, program = self._program.outputs, self._program
        if site.route is Route.CLOSED_FORM:
            parameter = parts.parameters[site.name].variable
            (mean,), (rows,) = self._spread([parameter], q)
            (residual,) = self._residuals([parameter])
            (law,) = self._at_zero([parts.likelihoods[site.name]])
            (latent,) = site.latents
            spread = {latent: jnp.square(rows).sum(0) + residual}
            return predictive(law.fn, {latent: mean}, spread)
        fn = base_distribution(parts.likelihoods[site.name].fn)
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
        means, rows = self._spread(roots, q)
        at = moments_of(means, rows, self._residuals(roots))
        split = Split(program, found)
        numbers = program.run(list(found.fixed), {})
        x, weights = nodes(len(means), means[0].dtype)
        place = partial(split.outputs, numbers)
        moved = iter(jax.vmap(lambda node: place(placed(at, node)))(x))
        still = iter(self._at_zero([
            leaf for leaf, moves in zip(leaves, varies, strict=True) if not moves
        ]))  # fmt: skip
        given = tuple(next(moved) if moves else next(still) for moves in varies)
        return PredictorMixture(
            given, weights, treedef, varies, fn.batch_shape, fn.event_shape
        )
