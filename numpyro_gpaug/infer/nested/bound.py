# SPDX-License-Identifier: Apache-2.0
r"""The collapsed bound: the evidence lower bound at the best Gaussian, as a function of
the hyperparameters alone.

By the envelope theorem its gradient is the gradient of the bound with the Gaussian
fixed, except for means, which follow their optimum
(:meth:`~.latent_gaussian.LatentGaussian.gradient`). The updates that find the Gaussian
are not differentiated. Second derivatives are differences of such gradients.
"""

from __future__ import annotations

import warnings
from collections.abc import Callable
from dataclasses import replace
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
from jax import Array, random
from jax.custom_derivatives import SymbolicZero
from jax.flatten_util import ravel_pytree

from numpyro_gpaug.gaussians.base import times
from numpyro_gpaug.gaussians.dense import Moments
from numpyro_gpaug.gaussians.pairs import PairedMap, factors_of, observed
from numpyro_gpaug.guides import AutoLatentGaussian
from numpyro_gpaug.infer.vi.differentiation import vjp
from numpyro_gpaug.infer.vi.latent_gaussian import Evaluation, LatentGaussian
from numpyro_gpaug.infer.vi.means import by_rows
from numpyro_gpaug.infer.vi.resolution import lost
from numpyro_gpaug.infer.vi.settling import settled
from numpyro_gpaug.infer.vi.sweeps import starts_augmented
from numpyro_gpaug.math.compiling import jit
from numpyro_gpaug.math.linalg import total
from numpyro_gpaug.model.arguments import Arguments, Values
from numpyro_gpaug.model.joint import JointView
from numpyro_gpaug.model.latents import JOINT, Structure

# The increase in nats below which updates stop, unless rounding is larger. An error of
# the Gaussian has a second-order effect on the bound, but a first-order effect on its
# gradient.
TOLERANCE = 1e-15
# The smallest precision of a factor at the start of a search.
LEAST = 1e-3
# Nats that rounding may hide from a sampler without a warning.
_ROUGH = 1.0
# Steps of finite differences of gradients, in unconstrained hyperparameters.
STEP = {"float32": 0.05, "float64": 0.01}


class Start(NamedTuple):
    """The start of the Gaussian: Gaussian factors on the predictors, which remain valid
    as hyperparameters change the prior.

    :param factors: factors on the predictors.
    :param known: whether to use them; otherwise every predictor is treated as observed
        at its prior mean with a variance of one.
    """

    factors: Any
    known: Array | np.ndarray


class Settled(NamedTuple):
    """The Gaussian at its optimum.

    :param evaluation: the evaluation of the bound.
    :param factors: the Gaussian factors that replace the likelihood there.
    """

    evaluation: Evaluation
    factors: Any

    @property
    def moments(self) -> Moments:
        """Moments of the whitened latents, with a leading axis of 1."""
        return self.evaluation.moments[JOINT]


class CollapsedBound:
    """The collapsed bound of a model at arguments of certain shapes: the expected
    log-likelihood minus the divergence from the prior, without the prior of the
    hyperparameters.

    :param guide: the guide of the model, set up.
    :param structure: the structure of the model at these arguments.
    :param projected: whether inducing values of sparse processes determine the function
        values, as in the model that weighs draws. Otherwise function values keep their
        variance given the inducing values, and the bound is a bound for the process
        itself.
    """

    def __init__(
        self,
        guide: AutoLatentGaussian,
        structure: Structure,
        *,
        projected: bool,
    ) -> None:
        self.guide, self.structure = guide, structure
        self._projected = projected and bool(structure.functions)
        self._starts_augmented = starts_augmented(structure)
        self._settled = jit(self._bound_and_lost)
        self._value = self._differentiable()

    def __call__(
        self, values: Values, steps: dict[str, Array], data: Arguments
    ) -> Array:
        """Return the bound, which can be differentiated twice in the hyperparameters.

        :param values: constrained hyperparameters and params by name.
        :param steps: the change of each value for a unit change of its unconstrained
            value.
        :param data: the model's arguments.
        """
        return self._value(values, jax.lax.stop_gradient(steps), data)

    def view(self, values: Values, data: Arguments) -> JointView:
        """Return the view of the model by its guide at given hyperparameters."""
        guide, key = self.guide, random.key(0)
        return guide.view(self.structure, guide.model, data, values, key)

    def problem(
        self, values: Values, data: Arguments, *, learns: bool
    ) -> LatentGaussian:
        """Return the closed-form problem at given hyperparameters."""
        view = self.view(values, data)
        found = LatentGaussian.seen(view, "exact", 0.0, learns=learns)
        if not self._projected:
            return found
        return replace(found, maps={k: m.certain() for k, m in found.maps.items()})

    def first(self, problem: LatentGaussian) -> dict[str, Any]:
        """Return the initial natural parameters of a search from no factors, by block.

        :param problem: from :meth:`problem`.
        """
        factors = self._start(problem, None)
        return {JOINT: _given(factors, problem.maps[JOINT], problem.priors[JOINT])}

    def _start(self, problem: LatentGaussian, start: Start | None) -> Any:
        """Return the factors from which a search starts."""
        map_: Any = problem.maps[JOINT]

        def first() -> Any:
            if isinstance(map_, PairedMap):
                return _first_factors(map_)
            return by_rows(problem, JOINT)

        if start is None:
            return first()
        return jax.lax.cond(start.known, lambda: start.factors, first)

    def settle(
        self,
        problem: LatentGaussian,
        start: Start | None = None,
        tolerance: Any = TOLERANCE,
    ) -> Settled:
        """Find the Gaussian that maximises the bound.

        :param problem: from :meth:`problem`.
        :param start: factors to start from, if there are any.
        :param tolerance: the rise in nats that ends the moves.
        """
        map_: Any = problem.maps[JOINT]
        known, safe = self._start(problem, start), self._starts_augmented
        natural = {JOINT: _given(known, map_, problem.priors[JOINT])}

        def augmented(moves: Array) -> Array | None:
            if not safe:
                return None
            return moves == 0 if start is None else (moves == 0) & ~start.known

        one = {JOINT: jnp.ones((), problem.dtype)}
        _, evaluation, _ = settled(
            problem, natural, one, 1.0, augmented, tolerance, known.precision
        )
        factors = factors_of(
            map_, evaluation.marginals[JOINT], evaluation.slopes[JOINT]
        )
        return Settled(evaluation, factors)

    def with_pullback(
        self,
        values: Values,
        data: Arguments,
        start: Start | None = None,
        tolerance: Any = TOLERANCE,
    ) -> tuple[Array, Callable[[], dict[str, Array]], Settled]:
        """Return the bound, a function for its derivatives in the hyperparameters, and
        the Gaussian.

        :param values: constrained hyperparameters and params by name.
        :param data: the model's arguments.
        :param start: factors to start from, if there are any.
        :param tolerance: the rise in nats that ends the moves.
        """
        problem, pullback = vjp(
            lambda values: self.problem(values, data, learns=True), values
        )
        found = self.settle(problem, start, tolerance)

        def gradient() -> Values:
            return pullback(problem.collapsed_gradient(found.evaluation))

        return found.evaluation.bound, gradient, found

    def shapes(self, values: Values, data: Arguments) -> Any:
        """Return the shapes of the factors in a :class:`Start`; values and data may
        be shapes, too."""

        def factors(values: Any, data: Arguments) -> Any:
            return _first_factors(self.view(values, data).maps()[JOINT])

        return jax.eval_shape(factors, values, data)

    def _bound_and_lost(self, values: Values, data: Arguments) -> tuple[Array, Array]:
        problem = self.problem(values, data, learns=False)
        found = self.settle(problem)
        map_: Any = problem.maps[JOINT]
        natural = {JOINT: _given(found.factors, map_, problem.priors[JOINT])}
        return found.evaluation.bound, lost(natural, found.evaluation.moments)

    def warn_of_rounding(self, values: Values, data: Arguments) -> None:
        """Warn if rounding makes the bound uncertain at some hyperparameters."""
        nats = float(self._settled(values, data)[1])
        if not nats < _ROUGH:
            warnings.warn(
                f"rounding makes the collapsed bound uncertain by about {nats:.2g} "
                "nats, and draws of it may be wrong. Centre responses and covariates, "
                "or use float64, jax.config.update('jax_enable_x64', True)",
                stacklevel=3,
            )

    def _differentiable(self) -> Callable[..., Array]:
        # NUTS evaluates the collapsed model a few times outside of any program, to find
        # its sites and a start. Operation by operation, that would compile more than
        # two hundred programs.
        @jit
        def bound_and_gradient(values: Any, data: Arguments) -> Any:
            bound, gradient, _ = self.with_pullback(values, data)
            return bound, gradient()

        @jax.custom_jvp
        def value(values: Any, steps: Any, data: Arguments) -> Array:
            return self._settled(values, data)[0]

        @jax.custom_jvp
        def with_gradient(values: Any, steps: Any, data: Arguments) -> Any:
            return bound_and_gradient(values, data)

        def value_jvp(primals: Any, tangents: Any) -> tuple[Array, Array]:
            moved = _moves(primals[0], tangents)
            bound, gradient = with_gradient(*primals)
            return bound, total(gradient, moved)

        def gradient_jvp(primals: Any, tangents: Any) -> tuple[Any, Any]:
            values, steps, data = primals
            moved = _moves(values, tangents)
            bound, gradient = with_gradient(*primals)
            curvature = _differences(
                lambda values: with_gradient(values, steps, data)[1], values, steps
            )
            flat, unravel = ravel_pytree(moved)
            turned = unravel(curvature @ flat)
            return (bound, gradient), (total(gradient, moved), turned)

        value.defjvp(value_jvp, symbolic_zeros=True)
        with_gradient.defjvp(gradient_jvp, symbolic_zeros=True)
        return value


def moments_given(factors: Any, view: JointView) -> Moments:
    """Return the Gaussian of given factors, with a leading axis of 1.

    :param factors: factors on the predictors.
    :param view: the view of the model at some hyperparameters.
    """
    return _given(factors, view.maps()[JOINT], view.priors()[JOINT]).moments()


def _given(factors: Any, map_: Any, prior: Any) -> Any:
    return times(prior, map_.information(factors))


def log_factors(map_: Any, factors: Any, z: Array) -> Array:
    """Return the logarithm of the product of Gaussian factors at latents (1, size), up
    to a constant."""
    at = map_.given(z).mean
    terms = at * (factors.potential - 0.5 * factors.precision * at)
    if isinstance(map_, PairedMap):
        pairs = at[..., map_.left] * at[..., map_.right]
        return terms.sum() - (factors.cross * pairs).sum()
    return terms.sum()


def moved_to(map_: Any, factors: Any, z: Array) -> Any:
    """Return factors as narrow as the given ones, centred on the predictors at latents
    (1, size). From wide factors a search might move to the highest mode."""
    precision = jnp.maximum(jnp.abs(factors.precision), LEAST)
    return observed(map_, map_.given(z).mean, precision)


def _first_factors(map_: Any) -> Any:
    """Return the factors for observing every predictor at its mean with variance one:
    under a wide prior, the expectation of a likelihood may not be finite."""
    return observed(map_, map_.offset, jnp.ones_like(map_.offset))


def _moves(values: Values, tangents: Any) -> Values:
    """Return tangents of the hyperparameters; there must be no others."""
    moved, _, of_data = tangents
    leaves = jax.tree.leaves(of_data, is_leaf=_is_zero)
    if not all(map(_is_zero, leaves)):
        raise NotImplementedError(
            "the collapsed bound has derivatives only with respect to the "
            "hyperparameters, not the model's arguments. Make the argument a "
            "numpyro.param or a sample site"
        )
    return jax.tree.map(
        lambda x, move: jnp.zeros_like(x) if _is_zero(move) else move, values, moved
    )


def _is_zero(x: Any) -> bool:
    return isinstance(x, SymbolicZero)


def _differences(
    gradient: Callable[[dict[str, Array]], dict[str, Array]],
    values: Values,
    steps: dict[str, Array],
) -> Array:
    """Return second derivatives by central differences of a gradient, symmetrised."""
    (flat, unravel), (sizes, _) = ravel_pytree(values), ravel_pytree(steps)
    sizes = STEP[str(flat.dtype)] * sizes

    def row(direction: Array) -> Array:
        move = direction * sizes
        ends = (ravel_pytree(gradient(unravel(flat + s * move)))[0] for s in (1, -1))
        above, below = ends
        return (above - below) / (2 * (move * direction).sum())

    found = jax.lax.map(row, jnp.eye(flat.size, dtype=flat.dtype))
    return (found + found.T) / 2
