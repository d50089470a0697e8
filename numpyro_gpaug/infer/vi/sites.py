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
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
from jax import Array

from numpyro_gpaug.math.linalg import Moments, NaturalGaussian, kl_to_diagonal, moments
from numpyro_gpaug.model.marginals import Field, Marginals, chosen, marginals

Natural = dict[str, NaturalGaussian]


class Evaluation(NamedTuple):
    """The bound at natural parameters, and all that the next update needs.

    :param bound: evidence lower bound.
    :param magnitude: sum of the magnitudes it was summed from, for rounding.
    :param marginals: by block (and predictor).
    :param gradients: derivatives of the expected log-likelihood in the marginals.
    :param divergences: KL by block, (latents,).
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
    :param coupled: blocks whose latents meet in the same outputs (loadings): they are
        moved one at a time, as moved together they overshoot.
    :param log_likelihood: function of the marginals (and of the kind of bound).
    :param constant: the part of the bound the blocks do not enter.
    :param dtype: of the bound; other latents may be in JAX's default dtype.
    """

    fields: dict[str, Any]
    priors: dict[str, tuple[Array, Array]]
    scales: dict[str, Any]
    latents: dict[str, Array | None]
    coupled: tuple[str, ...]
    log_likelihood: Callable[..., Array]
    constant: Array | float
    dtype: Any

    def held(self, natural: Natural) -> Natural:
        """The natural parameters of those latents the processes were called for."""
        return {k: rows_of(n, self.latents.get(k)) for k, n in natural.items()}

    def put_back(self, natural: Natural, held: Natural) -> Natural:
        """``natural`` with the latents of :meth:`held` replaced."""
        return {
            k: put_rows(n, self.latents.get(k), held[k]) for k, n in natural.items()
        }

    def of_held(self) -> Sites:
        """The same problem for :meth:`held` natural parameters: no other latent is
        looked at, so that a step costs what the latents it was called for cost."""
        priors = {k: rows_of(p, self.latents.get(k)) for k, p in self.priors.items()}
        return self._replace(priors=priors, latents={})

    def of_row(self, name: str, row: Array | None) -> Sites:
        """The same problem with one latent alone of one block.

        :param name: the block.
        :param row: its index, (1,); ``None`` for all.
        """
        if row is None:
            return self
        field = _map_fields(lambda field: rows_of(field, row), self.fields[name])
        prior = rows_of(self.priors[name], row)
        return self._replace(
            fields={**self.fields, name: field}, priors={**self.priors, name: prior}
        )

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
        self,
        old: Evaluation,
        name: str,
        candidate: NaturalGaussian,
        row: Array | None = None,
    ) -> Evaluation:
        """The bound after a change of one block only, or of one of its latents."""
        q = moments(candidate)
        part = self.of_row(name, row)
        new = put_rows(
            (old.marginals[name], old.divergences[name]), row,
            (part.marginals(name, q), part._kl(name, q)),
        )  # fmt: skip
        at = {**old.marginals, name: new[0]}
        return self._evaluation(at, {**old.divergences, name: new[1]})

    def bound_at(self, q: dict[str, Moments]) -> Array:
        """The bound at given moments, to be differentiated."""
        at = {name: self.marginals(name, q[name]) for name in q}
        divergence = sum(self._kl(name, q[name]).sum() for name in q)
        return self.log_likelihood(at) + self.constant - divergence

    def _kl(self, name: str, q: Moments) -> Array:
        return kl_to_diagonal(q, *self.priors[name]) * self.scales[name]

    def _evaluation(self, at: dict[str, Any], kl: dict[str, Array]) -> Evaluation:
        value, gradients = jax.value_and_grad(self.log_likelihood)(at)
        total = sum(each.sum() for each in kl.values())
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


def rows_of(tree: Any, rows: Array | None) -> Any:
    """Some latents of arrays with a leading axis over latents (or of size 1, which is
    one for all); everything for ``None``."""
    if rows is None:
        return tree
    indices = jnp.asarray(rows)
    return jax.tree.map(lambda x: x if x.shape[0] == 1 else x[indices], tree)


def put_rows(tree: Any, rows: Array | None, part: Any) -> Any:
    """``tree`` with those latents replaced."""
    if rows is None:
        return part
    indices = jnp.asarray(rows)
    return jax.tree.map(lambda x, new: x.at[indices].set(new), tree, part)
