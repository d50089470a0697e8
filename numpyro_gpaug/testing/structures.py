# SPDX-License-Identifier: Apache-2.0
"""Structures of Gaussians, compared with dense matrices."""

from __future__ import annotations

from collections.abc import Callable
from functools import partial
from types import SimpleNamespace
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
from jax import Array

from numpyro_gpaug.gaussians import Structure
from numpyro_gpaug.gaussians.base import (
    Change,
    GaussianFactors,
    centre_of,
    drawn_white,
    log_density,
    rebased,
    times,
)
from numpyro_gpaug.gaussians.dense import AffineMap
from numpyro_gpaug.gaussians.rows import Rows
from numpyro_gpaug.math.linalg import precise
from numpyro_gpaug.testing.augmentations import require


@precise
def check_structure(
    structure: Structure,
    links: Any = None,
    *,
    precision: Callable[[Structure, Any], Array] | None = None,
    other: tuple[Structure, Any, np.ndarray] | None = None,
    dtype: Any = None,
    seed: int = 0,
    tolerance: float | None = None,
) -> None:
    r"""Check all that a structure of Gaussians offers against a dense matrix.

    Random Gaussian factors on random predictors are added to the prior, in compiled
    programs. The comparison covers the prior, the information of factors about the
    latents (on single predictors and on pairs), moments, factors of the covariance, the
    divergence, marginals and covariances of predictors, moments of other latents, and
    derivatives, under :func:`jax.vmap`, with respect to factors, predictors and
    ``links``.

    :param structure: see ``numpyro_gpaug.gaussians.base``.
    :param links: the transition matrices of its prior.
    :param precision: the prior's precision matrix as a function of the structure and of
        ``links``; from the prior's ``pull`` by default.
    :param other: a structure of other latents, the transition matrices of its prior,
        and the places of its latents among those of ``structure`` (-1 for new ones).
    :param dtype: a float dtype; JAX's default by default.
    :param seed: the seed of the random numbers.
    :param tolerance: relative to one plus the largest number; default 2e-3 in float32
        and 1e-8 in float64.
    :raises AssertionError: naming what differs, and by how much.

    **Example**

    >>> from numpyro_gpaug.gaussians import Groups, Layout
    >>> check_structure(Groups(Layout(groups=4, each=2, others=3)))
    """
    dtype = jnp.dtype(jnp.result_type(float) if dtype is None else dtype)
    if tolerance is None:
        tolerance = 1e-8 if dtype == jnp.float64 else 2e-3
    links = None if links is None else jnp.asarray(links, dtype)
    check = _Structured(structure, precision, other)
    problem = _Problem.random(structure, links, dtype, np.random.default_rng(seed))
    found = jax.jit(check.found)(problem)
    expected = check.expected(problem)
    slopes, dense = (
        jax.jit(jax.grad(partial(check.summary, dense=dense), allow_int=True))(problem)
        for dense in (False, True)
    )
    for known, tree in ((found, slopes), (expected, dense)):
        for path, slope in jax.tree_util.tree_leaves_with_path(tree):
            known[f"the derivative in {jax.tree_util.keystr(path)}"] = slope
    for what, x in expected.items():
        if jax.dtypes.issubdtype(x.dtype, np.floating):
            _compare(what, found[what], x, tolerance)


def _compare(what: str, found: Any, expected: Any, tolerance: float) -> None:
    found, expected = np.asarray(found), np.asarray(expected)
    shapes = found.shape, expected.shape
    require(shapes[0] == shapes[1], f"{what} has shape {shapes[0]}, not {shapes[1]}")
    scale = 1 + np.abs(expected).max(initial=0)
    worst = np.abs(found - expected).max(initial=0) / scale
    require(worst <= tolerance, f"{what} is off by {worst:.3g} > {tolerance:.3g}")


class _Problem(NamedTuple):
    """Random factors on random predictors of the latents of a structure.

    :param cross: cross precisions of factors on pairs of predictors.
    :param places: the pairs.
    :param noise: standard normal numbers.
    """

    offset: Array
    residual: Array
    rows: Rows
    links: Any
    potential: Array
    precision: Array
    cross: Array
    places: Any
    noise: Array

    @classmethod
    def random(
        cls, structure: Structure, links: Any, dtype: Any, rng: np.random.Generator
    ) -> _Problem:
        groups, each, others, _ = structure.layout
        number = 3 * max(groups, others) + 8
        width = others if structure.any_rows else (others + 1) // 2
        singles = 2 * (others > width)
        # A group without predictors, and a predictor of no group.
        group = rng.integers(0, max(groups - 1, 1), number)
        same = [rng.choice(np.flatnonzero(group == g)) for g in group]
        own = rng.normal(size=(number, each))
        own[0] = 0
        place = rng.integers(0, max(others - width, 1), (number, singles))
        if structure.all_groupings:
            # Two neighbours each.
            width, singles, own = others, 2, own[:, :0]
            pattern: Any = structure.pattern  # type: ignore[attr-defined]
            edge = rng.integers(0, len(pattern.rows), number)
            place = np.stack([pattern.rows[edge], pattern.columns[edge]], 1)
            same = [*range(number)]
        dense, value = (rng.normal(size=(number, n)) for n in (width, singles))
        rows = Rows(*map(jnp.asarray, (own, group, dense, value, place)))
        arrays: list[Any] = [
            rng.normal(size=number), rng.uniform(0.1, 1, number), rows, links,
            rng.normal(size=(1, number)), rng.uniform(0.5, 1, (1, number)),
            0.1 * rng.normal(size=(1, number)), (np.arange(number), np.array(same)),
            rng.normal(size=(3, structure.size)),
        ]  # fmt: skip
        kinds = {"f": dtype}
        return jax.tree.map(
            lambda x: jnp.asarray(x, kinds.get(x.dtype.kind)), cls(*arrays)
        )

    def scaled(self, scale: Any) -> _Problem:
        """Return the problem with other factors."""
        return self._replace(precision=self.precision * scale)

    def dense(self, structure: Structure) -> AffineMap:
        """Return the map as a dense matrix."""
        own, group, dense, value, place = self.rows
        groups, _, others, _ = structure.layout
        chosen = jax.nn.one_hot(group, groups, dtype=own.dtype)
        ours = (chosen[..., None] * own[:, None]).reshape(len(own), -1)
        parts: tuple[Array, ...]
        if structure.all_groupings:
            single = jax.nn.one_hot(place, groups, dtype=own.dtype)
            parts = (single * value[..., None]).sum(1), dense
        else:
            single = jax.nn.one_hot(place, others - dense.shape[1], dtype=own.dtype)
            parts = ours, dense, (single * value[..., None]).sum(1)
        whole = jnp.concatenate(parts, 1)
        return AffineMap(self.offset[None], whole.T[None], self.residual[None])


class _Structured(NamedTuple):
    """A structure, and its dense reference."""

    structure: Structure
    precision: Callable[[Structure, Any], Array] | None
    other: tuple[Structure, Any, np.ndarray] | None

    def map(self, problem: _Problem) -> Any:
        """Return the affine map of the structure."""
        dense = problem.dense(self.structure)
        return self.structure.map(
            SimpleNamespace(**{**problem._asdict(), "dense": dense})
        )

    def natural(self, problem: _Problem) -> Any:
        """Return natural parameters of the latents given factors."""
        factors = GaussianFactors(problem.potential, problem.precision)
        prior = self.structure.prior(problem.noise.dtype, problem.links)
        return times(prior, self.map(problem).information(factors))

    def pairs(self, problem: _Problem) -> tuple[Array, Array]:
        """Return pairs of predictors whose covariances follow from their rows: pairs in
        any groups, if groups are independent given all other latents."""
        left, right = problem.places
        structure = self.structure
        apart = structure.independent.groups and not structure.all_groupings
        free = structure.any_rows or apart
        return left, right[::-1] if free else right

    def matrices(self, problem: _Problem) -> tuple[Array, Array]:
        """Return the projection, and the precision of the prior."""
        return problem.dense(self.structure).projection[0], self.known(problem)

    def known(self, problem: _Problem) -> Array:
        """Return the precision of the prior."""
        return self._precision(self.structure, problem.links)

    def _precision(self, structure: Structure, links: Any) -> Array:
        if self.precision is not None:
            return self.precision(structure, links)
        dtype = jnp.result_type(float) if links is None else links.dtype
        return _precision_of(structure.prior(dtype, links))

    def summary(self, problem: _Problem, dense: bool) -> Array:
        """Return a number that depends on everything, for several sets of factors."""
        first = self.known(problem)
        prior = self.structure.prior(problem.noise.dtype, problem.links)
        map_ = problem.dense(self.structure) if dense else self.map(problem)

        def at(scale: Array) -> Array:
            if dense:
                precision = problem.precision * scale
                factors = GaussianFactors(problem.potential, precision)
                added = map_.information(factors)
                q = added._replace(precision=first + added.precision).moments()
                divergence = _divergence(q, first)
            else:
                q = self.natural(problem.scaled(scale)).moments()
                divergence = prior.divergence(q)
            mean, variance = map_.marginals(q)
            parts = divergence, q.log_det, jnp.sin(mean), jnp.log(variance)
            return sum((x.sum() for x in parts), jnp.zeros(()))

        return jax.vmap(at)(jnp.asarray([1.0, 0.3], first.dtype)).sum()

    def found(self, problem: _Problem) -> dict[str, Array]:
        """Return what the structure computes, by name."""
        structure, noise, dtype = self.structure, problem.noise, problem.noise.dtype
        map_, ordered = self.map(problem), self.map(problem).in_order()
        factors = GaussianFactors(problem.potential, problem.precision)
        prior = structure.prior(dtype, problem.links)
        eye, z = jnp.eye(structure.size, dtype=dtype), noise[:1]
        added = ordered.information(factors)
        coupled = map_.coupling(problem.cross, *problem.places)
        natural = self.natural(problem)
        q = natural.moments()
        shift, parts = q.push_forward(problem.dense(structure).projection)
        rows, marginals = jnp.concatenate(parts, 1), ordered.marginals(q)
        found = {
            "the prior's mean": prior.loc,
            "the prior's pull": _precision_of(prior),
            "the prior's log-density": log_density(prior, z)[None],
            "standard normal latents": structure.standard(dtype).diagonal,
            "the map": map_(z),
            "the map given latents": map_.given(z).variance,
            "the potential of factors": added.potential,
            "the precision of factors": _moved(added, eye),
            "the precision of pairs": _moved(coupled, eye),
            "the diagonal of the precision": natural.diagonal,
            "the mean": q.mean,
            "the log-determinant": q.log_det,
            "the variances": q.variances,
            "the covariance": _covariance(q),
            "noise, unwhitened and whitened": q.whiten(q.unwhiten(noise)),
            "the divergence": prior.divergence(q),
            "the gradient of the divergence": prior.pull(q.mean),
            "means that are pushed forward": shift,
            "covariances that are pushed forward": rows.mT @ rows,
            "the means of predictors": marginals.mean,
            "the variances of predictors": marginals.variance,
            "the residual of a certain map": map_.certain().residual,
            "the covariances of pairs": map_.covariances(q, *self.pairs(problem)),
            "the covariances of predictors": map_.covariance(q),
        }
        draws = jnp.eye(q.rank + 1, q.rank, -1, dtype=dtype)
        if (white := drawn_white(prior, q, draws)) is not None:
            moved = white[1:] - white[0]
            found["the mean of whitened draws"] = white[:1]
            found["the covariance of whitened draws"] = moved.T @ moved
        if structure.changes:
            natural = natural.centred(centre_of(prior, q))
            here = rebased(prior, natural, self._change(dtype)).moments()
            found["the mean after a change"] = here.mean
            found["the covariance after a change"] = _covariance(here)
        if structure.independent.groups:
            found |= self._found_apart(prior, q, z[0])
        if self.other is not None:
            other, links, places = self.other
            links = None if links is None else jnp.asarray(links, dtype)
            q = q.extended(other.prior(dtype, links), places)
            found |= {
                "the mean of other latents": q.mean,
                "the covariance of other latents": _covariance(q),
                "the variances of other latents": q.variances,
            }
        return found

    def _change(self, dtype: Any) -> Change:
        """Return a change of latents."""
        others = self.structure.layout.others
        groups = np.linspace(0.5, 2, self.structure.size - others)
        if getattr(self.structure, "correlated", False):
            groups = np.ones_like(groups)
        triangle = np.tri(others) / 2
        return Change(*(jnp.asarray(x[None], dtype) for x in (groups, triangle)))

    def _found_apart(self, prior: Any, q: Any, z: Array) -> dict[str, Array]:
        """Return the results for groups that are independent given all other latents,
        by name."""
        structure = self.structure
        groups, others = structure.split_groups(z)
        parts = prior.terms_by_group(groups[None], others)
        number = groups.size
        own = jnp.eye(number, dtype=z.dtype).reshape(number, *groups.shape)
        rest = jnp.zeros((number, structure.independent.others), z.dtype)
        moved = structure.split_groups(q.unwhiten(structure.join_noise(own, rest)))
        root = moved[0].reshape(number, number)
        return {
            "latents that are split and joined": structure.join_groups(groups, others),
            "the prior's terms of groups and others": sum(x.sum() for x in parts),
            "the covariance of groups given others": root.T @ root,
            "others for the noise of groups": moved[1],
        }

    def expected(self, problem: _Problem) -> dict[str, Any]:
        """Return the expected results, computed with matrices in double precision."""
        exact = jax.tree.map(lambda x: np.asarray(x, float), problem)
        _, residual, _, _, potential, precision, cross, _, noise = exact
        dense, first = jax.jit(self.matrices)(problem)
        projection, first = np.asarray(dense, float), np.asarray(first, float)
        z = noise[:1]
        size, (left, right) = self.structure.size, problem.places
        added = (projection * precision) @ projection.T
        lean = potential - precision * exact.offset
        pairs = (projection[:, left] * cross) @ projection[:, right].T
        whole = first + added
        covariance = np.linalg.inv(whole)
        mean = lean @ projection.T @ covariance
        variances = np.diag(covariance)
        predicted = projection.T @ covariance @ projection
        log_det, log_first = (-np.linalg.slogdet(x)[1] for x in (whole, first))
        squares = (z @ first * z).sum(-1)
        divergence = (mean @ first * mean).sum(-1) + np.trace(first @ covariance)
        found = {
            "the prior's mean": np.zeros_like(z),
            "the prior's pull": first,
            "the prior's log-density": -0.5 * (squares + log_first),
            "standard normal latents": np.ones_like(z),
            "the map": exact.offset + z @ projection,
            "the map given latents": residual[None],
            "the potential of factors": lean @ projection.T,
            "the precision of factors": added,
            "the precision of pairs": pairs + pairs.T,
            "the diagonal of the precision": np.diag(whole)[None],
            "the mean": mean,
            "the log-determinant": log_det[None],
            "the variances": variances[None],
            "the covariance": covariance,
            "noise, unwhitened and whitened": noise,
            "the divergence": 0.5 * (divergence - size + log_first - log_det),
            "the gradient of the divergence": mean @ first,
            "means that are pushed forward": mean @ projection,
            "covariances that are pushed forward": predicted[None],
            "the means of predictors": exact.offset + mean @ projection,
            "the variances of predictors": residual + np.diag(predicted)[None],
            "the residual of a certain map": np.zeros_like(residual)[None],
            "the covariances of pairs": predicted[self.pairs(problem)][None],
            "the covariances of predictors": predicted[None],
        }
        if self.structure.changes:
            factors, triangle = (np.asarray(x[0]) for x in self._change(float))
            change, cut = (
                np.diag(np.append(factors, np.ones(len(triangle)))),
                len(factors),
            )
            change[cut:, cut:] = triangle
            here = np.linalg.inv(first + change.T @ added @ change)
            found["the mean after a change"] = lean @ projection.T @ change @ here
            found["the covariance after a change"] = here
        if getattr(self.structure, "correlated", False):
            # The lower triangle T with ``T' T`` equal to the prior's precision.
            lower = np.linalg.cholesky(first[::-1, ::-1]).T[::-1, ::-1]
            found |= {
                "the mean of whitened draws": mean @ lower.T,
                "the covariance of whitened draws": lower @ covariance @ lower.T,
            }
        if self.structure.independent.groups:
            groups, others = self.structure.split_groups(np.arange(size))
            own = np.ix_(groups.ravel(), groups.ravel())
            found |= {
                "latents that are split and joined": z[0],
                "the prior's terms of groups and others": -0.5 * squares[0],
                "the covariance of groups given others": np.linalg.inv(whole[own]),
                "others for the noise of groups": np.zeros((groups.size, others.size)),
            }
        if self.other is not None:
            found |= self._of_others(mean[0], covariance)
        return found

    def _of_others(self, mean: np.ndarray, covariance: np.ndarray) -> dict[str, Any]:
        """Return the regression of other latents on the known ones."""
        assert self.other is not None
        structure, links, places = self.other
        given = None if links is None else jnp.asarray(links)
        first = jax.jit(partial(self._precision, structure))(given)
        first = np.asarray(first, float)
        new, old = np.flatnonzero(places < 0), np.flatnonzero(places >= 0)
        own = np.linalg.inv(first[np.ix_(new, new)])
        slope = np.zeros((structure.size, len(old)))
        slope[old], slope[new] = np.eye(len(old)), -own @ first[np.ix_(new, old)]
        whole = slope @ covariance[np.ix_(places[old], places[old])] @ slope.T
        whole[np.ix_(new, new)] += own
        return {
            "the mean of other latents": (slope @ mean[places[old]])[None],
            "the covariance of other latents": whole,
            "the variances of other latents": np.diag(whole)[None],
        }


def _moved(natural: Any, eye: Array) -> Array:
    """Return the added precision, without the prior."""
    zero = natural._replace(potential=jnp.zeros_like(natural.potential))
    product = getattr(zero, "times", lambda z: zero.moved(z).potential)
    return jax.vmap(lambda z: product(z[None])[0])(eye)


def _precision_of(prior: Any) -> Array:
    zeros = jnp.zeros_like(prior.loc)
    pulled: Array = jax.jacobian(lambda mean: prior.pull(mean)[0])(zeros)
    return pulled[:, 0]


def _covariance(q: Any) -> Array:
    root = q.unwhiten(jnp.eye(q.rank, dtype=q.mean.dtype))
    return root.T @ root


def _divergence(q: Any, precision: Array) -> Array:
    """Return the divergence of a dense Gaussian from a prior of mean zero."""
    mean, whitener = q
    squares = jnp.einsum("...i,ij,...j->...", mean, precision, mean)
    trace = jnp.einsum("...ki,ij,...kj->...", whitener, precision, whitener)
    log_det = jnp.linalg.slogdet(precision)[1] + q.log_det
    return 0.5 * (squares + trace - mean.shape[-1] - log_det)
