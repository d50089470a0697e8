# SPDX-License-Identifier: Apache-2.0
r"""Closed-form updates of Gaussian blocks from their Gaussian sites.

The sites of a likelihood follow from its expected log-density ``E(m, v)`` (or its
augmented bound): precision ``-2 dE/dv``, potential ``dE/dm + precision m``. The update
``precision <- P + A diag(precision) A'`` with the prior precision ``P`` is positive
definite by construction for log-concave likelihoods, and a step is a convex combination
of natural parameters.
"""

from __future__ import annotations

from collections.abc import Callable
from functools import partial
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
from jax import Array, lax

from numpyro_gpaug.fields import Field, Marginals, chosen, marginals
from numpyro_gpaug.linalg import Moments, NaturalGaussian, kl_to_diagonal, moments

MAX_HALVINGS = 12

Natural = dict[str, NaturalGaussian]


class Evaluation(NamedTuple):
    """The bound at natural parameters, and all that the next update needs.

    :param bound: evidence lower bound.
    :param magnitude: sum of the magnitudes it was summed from, for rounding.
    :param marginals: by block (and predictor).
    :param gradients: derivatives of the expected log-likelihood in the marginals.
    :param divergences: KL by block.
    """

    bound: Array
    magnitude: Array
    marginals: dict[str, Any]
    gradients: dict[str, Any]
    divergences: dict[str, Array]


class Sites(NamedTuple):
    """The pieces of a problem that a sweep of closed-form updates needs.

    :param fields: by block.
    :param priors: prior mean and standard deviation by block, with a latent axis.
    :param scales: NumPyro's scale of each block's site (1 if none).
    :param latents: indices of the latents a process was called for, by block.
    :param log_likelihood: function of the marginals (and of the kind of bound).
    :param constant: the part of the bound the blocks do not enter.
    :param dtype: of the bound; other latents may be in JAX's default dtype.
    """

    fields: dict[str, Any]
    priors: dict[str, tuple[Array, Array]]
    scales: dict[str, Any]
    latents: dict[str, Array | None]
    log_likelihood: Callable[..., Array]
    constant: Array | float
    dtype: Any

    def held(self, natural: Natural) -> Natural:
        """The natural parameters of those latents the processes were called for."""
        return {k: _rows(n, self.latents.get(k)) for k, n in natural.items()}

    def put_back(self, natural: Natural, held: Natural) -> Natural:
        """``natural`` with the latents of :meth:`held` replaced."""
        return {
            k: jax.tree.map(partial(_with_rows, self.latents.get(k)), n, held[k])
            for k, n in natural.items()
        }

    def of_held(self) -> Sites:
        """The same problem for :meth:`held` natural parameters: no other latent is
        looked at, so that a step costs what the latents it was called for cost."""
        priors = {k: _rows(p, self.latents.get(k)) for k, p in self.priors.items()}
        return self._replace(priors=priors, latents={})

    def marginals(self, name: str, q: Moments) -> Any:
        """Marginals of one block at its field or fields."""
        q = chosen(q, self.latents.get(name))
        return _map_fields(lambda field: marginals(field, q), self.fields[name])

    def evaluate(self, natural: Natural) -> Evaluation:
        """The bound and the site gradients at ``natural``."""
        q = {name: moments(n) for name, n in natural.items()}
        at = {name: self.marginals(name, q[name]) for name in natural}
        kl = {name: self._kl(name, q[name]) for name in natural}
        return self._evaluation(at, kl)

    def unevaluated(self, natural: Natural) -> Evaluation:
        """An evaluation of the right shapes, with a bound of minus infinity."""
        shapes = jax.eval_shape(self.evaluate, natural)
        empty = jax.tree.map(lambda s: jnp.zeros(s.shape, s.dtype), shapes)
        return empty._replace(bound=jnp.full_like(empty.bound, -jnp.inf))

    def reevaluate(
        self, old: Evaluation, name: str, candidate: NaturalGaussian
    ) -> Evaluation:
        """The bound after a change of one block only."""
        q = moments(candidate)
        at = {**old.marginals, name: self.marginals(name, q)}
        kl = {**old.divergences, name: self._kl(name, q)}
        return self._evaluation(at, kl)

    def bound_at(self, q: dict[str, Moments]) -> Array:
        """The bound at given moments, to be differentiated."""
        at = {name: self.marginals(name, q[name]) for name in q}
        divergence = sum(self._kl(name, q[name]) for name in q)
        return self.log_likelihood(at) + self.constant - divergence

    def _kl(self, name: str, q: Moments) -> Array:
        return kl_to_diagonal(q, *self.priors[name]) * self.scales[name]

    def _evaluation(self, at: dict[str, Any], kl: dict[str, Array]) -> Evaluation:
        value, gradients = jax.value_and_grad(self.log_likelihood)(at)
        total = sum(kl.values())
        bound = jnp.asarray(value + self.constant - total, self.dtype)
        magnitude = jnp.abs(value) + jnp.abs(self.constant) + total + 1
        magnitude = jnp.asarray(magnitude, self.dtype)
        return Evaluation(bound, magnitude, at, gradients, kl)

    def target(
        self, name: str, at: Any, gradients: Any, least_precision: float = -jnp.inf
    ) -> NaturalGaussian:
        """Where a whole step takes a block: prior plus sites.

        :param name: the block.
        :param at: its marginals.
        :param gradients: derivatives of the expected log-likelihood there.
        :param least_precision: sites of log-concave likelihoods have positive
            precisions; those of others may not, and raising them to zero keeps every
            step positive definite, but it moves the fixed point away from the maximum
            of the bound. A caller that refuses steps by their bound needs no floor.
        """
        loc, scale = self.priors[name]
        prior_precision = jnp.square(1 / scale)
        potential = prior_precision * loc
        precision = jax.vmap(jnp.diag)(prior_precision)
        field = self.fields[name]
        parts = field if isinstance(field, dict) else {"": field}
        for key, part in parts.items():
            point, slope = (at, gradients) if key == "" else (at[key], gradients[key])
            site_potential, site_precision = _gaussian_site(
                part, point, slope, least_precision
            )
            # A scale on the whole model multiplies likelihood and prior alike.
            site_potential = site_potential / self.scales[name]
            site_precision = site_precision / self.scales[name]
            weighted = part.projection * site_precision[..., None, :]
            here = self.latents.get(name)
            rows = slice(None) if here is None else jnp.asarray(here)
            precision = precision.at[rows].add(
                weighted @ jnp.swapaxes(part.projection, -1, -2)
            )
            potential = potential.at[rows].add(
                jnp.einsum("...mn,...n->...m", part.projection, site_potential)
            )
        return NaturalGaussian(potential, precision)


def _gaussian_site(
    field: Field, at: Marginals, gradients: Marginals, least_precision: float
) -> tuple[Array, Array]:
    """Potential and precision of the sites on ``A' v``, per datum."""
    precision = jnp.maximum(-2 * gradients.variance, least_precision)
    potential = gradients.mean + precision * (at.mean - field.offset)
    return potential, precision


def _map_fields(fn: Callable[[Field], Any], field: Any) -> Any:
    if isinstance(field, dict):
        return {key: fn(part) for key, part in field.items()}
    return fn(field)


def _rows(tree: Any, latents: Array | None) -> Any:
    if latents is None:
        return tree
    return jax.tree.map(lambda x: x[jnp.asarray(latents)], tree)


def _with_rows(latents: Array | None, whole: Array, part: Array) -> Array:
    if latents is None:
        return part
    return whole.at[jnp.asarray(latents)].set(part)


def mix(old: NaturalGaussian, target: NaturalGaussian, step: Array) -> NaturalGaussian:
    """The convex combination of natural parameters a step of size ``step`` takes."""
    return jax.tree.map(
        lambda a, b: jnp.asarray((1 - step) * a + step * b, a.dtype), old, target
    )


def slack(evaluation: Evaluation) -> Array:
    """How far the bound may seem to fall by rounding alone."""
    return 32 * jnp.finfo(evaluation.bound.dtype).eps * evaluation.magnitude


def backtracked_update(
    sites: Sites,
    natural: Natural,
    evaluation: Evaluation,
    name: str,
    gradients: Callable[[], Any],
    step: Array,
    largest_step: float,
    only_evaluate: Array,
) -> tuple[Natural, Evaluation, Array]:
    """Moves one block towards its target, halving the step while the bound falls.

    :param sites: the problem.
    :param natural: natural parameters of all blocks.
    :param evaluation: the evaluation there.
    :param name: the block to move.
    :param gradients: gives the site gradients of this block that define the target.
    :param step: the first step size tried.
    :param largest_step: bound of the step size tried next time.
    :param only_evaluate: take no step, but evaluate the block where it is. (The same
        code does both: compiling the bound twice would double the compile time.)
    :return: natural parameters and evaluation after the move (unchanged if no step
        raised the bound), and the step size to try next time.
    """
    old = natural[name]
    target = lax.cond(
        only_evaluate,
        lambda: old,
        lambda: sites.target(name, evaluation.marginals[name], gradients()),
    )
    floor = evaluation.bound - slack(evaluation)

    def refused(search: _Search) -> Array:
        return ~search.accepted

    def attempt(search: _Search) -> _Search:
        # The last attempt is no step at all, and is accepted.
        last = only_evaluate | (search.tries == MAX_HALVINGS)
        step = jnp.where(last, 0, search.step / 2)
        candidate = mix(old, target, step)
        # A precision that is not positive definite has a bound of NaN: refused.
        outcome = sites.reevaluate(evaluation, name, candidate)
        accepted = last | (outcome.bound >= floor)
        return _Search(step, search.tries + 1, accepted, candidate, outcome)

    start = _Search(2 * step, jnp.int32(0), jnp.array(False), old, evaluation)
    found = lax.while_loop(refused, attempt, start)
    grown = jnp.where(found.tries == 1, 2 * found.step, found.step)
    next_step = jnp.clip(grown, 2.0**-MAX_HALVINGS, largest_step)
    next_step = jnp.where(only_evaluate, step, next_step)
    return {**natural, name: found.natural}, found.evaluation, next_step


class _Search(NamedTuple):
    step: Array
    tries: Array
    accepted: Array
    natural: NaturalGaussian
    evaluation: Evaluation
