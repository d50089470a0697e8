# SPDX-License-Identifier: Apache-2.0
r"""Expectations of sums over data under Gaussians on one or two predictors each.

The rules are Gauss-Hermite, or a product of two for pairs. They average the *logarithm*
of a density: it grows slowly where the density falls fast, so that the rule needs no
search for a peak. With 32 nodes, expectations of ``exp(f)`` are right to 1e-6 for
standard deviations to 4, and those of the logarithm of a logistic function to 1e-6 for
2, and to 1e-4 for 4 (``tests/test_expectation.py``).

Narrow Gaussians need fewer nodes. With many data, smaller rules are tried first, each
compared with the one before, and the first that is accurate enough is used.
"""

from __future__ import annotations

from collections.abc import Callable
from functools import partial
from typing import Any, NamedTuple, cast

import jax
import jax.numpy as jnp
import numpy as np
from jax import Array, lax

from numpyro_gpaug.math.blocks import summed
from numpyro_gpaug.math.linalg import safe_sqrt

# Numbers of nodes in one dimension, and in each of two.
NODES = {1: 32, 2: 15}
# The same for the rules that are tried first. Each has half as many more nodes as the
# one before, so its error is about the power 3 / 2 of the error of that.
SMALLER = {1: (6, 9), 2: (4, 6, 9)}
# The largest error that is accepted, in posterior standard deviations and in nats, in
# units of the root of the dtype's rounding error: a thousandth in single precision.
ACCEPTED = 3.0
# The same for the finer rules used for comparison.
FINER = {1: 48, 2: 23}
# The smallest number of predictor values at nodes that are computed together.
AT_ONCE = 2**14

Sum = Callable[[Any, tuple[Array, ...]], Array]
# Sums over nodes (nodes, dimensions) with weights (nodes,).
Sums = Callable[[Array, Array], Any]


class PredictorMoments(NamedTuple):
    """Gaussian distributions of the predictors of one site's data.

    :param means: means of each predictor, (N,), or (1,) for a predictor that all data
        share. If only one of two is shared, it is the first.
    :param variances: variances of each predictor, in the same shapes.
    :param covariance: covariances of two predictors, (N,); ``None`` for one.
    :param partner: the entry of the first predictor that is paired with each entry of
        the second, (N,). It is ``None`` if they are paired entry by entry, or the first
        is shared.
    """

    means: tuple[Array, ...]
    variances: tuple[Array, ...]
    covariance: Array | None = None
    partner: Array | None = None


def nodes(
    dimensions: int, dtype: Any, numbers: dict[int, int] = NODES
) -> tuple[Array, Array]:
    """Return standard normal nodes (nodes, dimensions) and their weights.

    :param dimensions: the dimension of the rule.
    :param dtype: the dtype of both.
    :param numbers: the number of nodes in one dimension, by number of dimensions.
    """
    x, weights = np.polynomial.hermite_e.hermegauss(numbers[dimensions])
    weights = weights / weights.sum()
    grids = np.meshgrid(*[x] * dimensions, indexing="ij")
    product = np.prod(np.meshgrid(*[weights] * dimensions, indexing="ij"), 0)
    stacked = np.stack([g.ravel() for g in grids], -1)
    return jnp.asarray(stacked, dtype), jnp.asarray(product.ravel(), dtype)


def placed(at: PredictorMoments, x: Array) -> tuple[Array, ...]:
    """Return values of the predictors at a standard normal node.

    :param at: their Gaussians.
    :param x: the node, (dimensions,).
    """
    first, *others = zip(at.means, _factor(at), strict=True)
    values = [first[0] + first[1][0] * x[0]]
    for mean, (shared, own) in others:
        values.append(mean + shared * x[0] + own * x[1])
    return tuple(values)


def _factor(at: PredictorMoments) -> list[tuple[Array, ...]]:
    """Return rows of the Cholesky factor of each datum's covariance."""
    first = safe_sqrt(at.variances[0])
    if at.covariance is None:
        return [(first,)]
    beside = first if at.partner is None else first[at.partner]
    shared = at.covariance / jnp.where(beside > 0, beside, 1)
    # Non-negative by the Cauchy-Schwarz inequality, up to rounding.
    rest = jnp.maximum(at.variances[1] - jnp.square(shared), 0)
    return [(first,), (shared, safe_sqrt(rest))]


def rule_differences(
    values: Callable[[tuple[Array, ...]], list[Array]], at: PredictorMoments
) -> list[Array]:
    """Return the differences between expectations by this rule and by a finer one,
    which has half as many more nodes in every dimension.

    :param values: a function from values of the predictors to arrays.
    :param at: Gaussians on the predictors.
    """
    dtype = at.means[0].dtype
    rules = [nodes(len(at.means), dtype, numbers) for numbers in (NODES, FINER)]
    (x, weights), (finer, others) = rules
    signed = jnp.concatenate([x, finer]), jnp.concatenate([weights, -others])

    def sums(x: Array, weights: Array) -> list[Array]:
        found = jax.vmap(lambda node: values(placed(at, node)))(x)
        return [_share(weights, y).sum(0) for y in found]

    return _summed(sums, at, *signed)


@partial(jax.custom_vjp, nondiff_argnums=(0,))
def expected_sum(total: Sum, numbers: Any, at: PredictorMoments) -> Array:
    """Return ``E total(numbers, predictors)``, for a sum over data of functions of
    their own predictors alone.

    :param total: the sum; it closes over no arrays.
    :param numbers: its other arguments.
    :param at: Gaussians on the predictors.
    :return: scalar.
    """
    return _sums(total, numbers, at, [False] * len(jax.tree.leaves(numbers)))[0]


class _Sums(NamedTuple):
    """A sum over data, averaged over nodes, with derivatives.

    :param value: the sum.
    :param direct: derivatives in the other arguments.
    :param slopes: derivatives in each predictor.
    :param turned: for each predictor, its slope times the standard normal values that
        determine it, which are the first axis.
    """

    value: Array
    direct: list[Array]
    slopes: tuple[Array, ...]
    turned: tuple[Array, ...]


def _averaged(function: Sums, at: PredictorMoments) -> _Sums:
    """Return the average over nodes. All rules are in one loop, so that the function is
    compiled once.

    :param function: the sums over some nodes.
    :param at: Gaussians on the predictors.
    """
    number, dtype = len(at.means), at.means[0].dtype
    largest = nodes(number, dtype)
    if len(largest[0]) * at.means[-1].size <= AT_ONCE:
        return cast(_Sums, _summed(function, at, *largest))
    small = [nodes(number, dtype, {number: n}) for n in SMALLER[number]]
    each = int(np.clip(AT_ONCE // at.means[-1].size, 1, len(small[0][0])))
    blocks = [_in_blocks(*rule, each) for rule in (*small, largest)]
    x, weights = (jnp.concatenate(parts) for parts in zip(*blocks, strict=True))
    ends = jnp.asarray(np.cumsum([0, *(len(part) for part, _ in blocks)]))
    like = jax.eval_shape(function, x[0], weights[0])
    zeros = jax.tree.map(jnp.zeros_like, like)

    def by_rule(state: Any) -> Any:
        rule, before, _ = state

        def add(i: Array, sums: _Sums) -> _Sums:
            return cast(_Sums, jax.tree.map(jnp.add, sums, function(x[i], weights[i])))

        found = lax.fori_loop(ends[rule], ends[rule + 1], add, zeros)
        return rule + 1, found, (rule > 0) & _agree(at, before, found)

    def going(state: Any) -> Array:
        return (state[0] < len(blocks)) & ~state[2]

    start = jnp.int32(0), zeros, jnp.zeros((), bool)
    return cast(_Sums, lax.while_loop(going, by_rule, start)[1])


def _agree(at: PredictorMoments, first: _Sums, second: _Sums) -> Array:
    """Whether the second of two quadrature rules is accurate enough, by its difference
    from the first.

    Errors of slopes move the posterior, and errors of curvatures change its variances.
    In standard deviations, a move is at most the norm of the errors of slopes in the
    metric of the inverse curvatures, because the precision of the posterior is at least
    the sum of these. The relative change of variances is at most the largest relative
    error of a curvature. Curvatures may vanish where data are outliers. Their scale is
    therefore at least the squared slope (the Fisher information).

    :param at: Gaussians on the predictors.
    :param first: sums of the first rule.
    :param second: sums of the second.
    """
    moves, relative = jnp.zeros_like(second.value), jnp.zeros_like(second.value)
    for i, variance in enumerate(at.variances):
        scale = safe_sqrt(variance)
        slope, turned = second.slopes[i], second.turned[i]
        off = scale * (slope - first.slopes[i])
        bent = scale * jnp.abs(turned - first.turned[i]).sum(0)
        curved = scale * jnp.abs(turned).sum(0)
        curved = jnp.minimum(curved + jnp.square(scale * slope), 1)
        some = curved > 0
        curved = jnp.where(some, curved, 1)
        share = bent / curved
        moves += (jnp.square(off) / curved * share).sum()
        relative = jnp.maximum(relative, share.max(initial=0))
    # These differences are errors of the first rule. The second has the power 3 / 2 of
    # them.
    eps = jnp.finfo(second.value.dtype).eps
    most = ACCEPTED * jnp.sqrt(eps)
    change = jnp.abs(second.value - first.value) * jnp.sqrt(relative)
    known = change <= jnp.maximum(most, 8 * eps * jnp.abs(second.value))
    return known & (moves <= most**2) & (relative**1.5 <= most)


def _summed(function: Sums, at: PredictorMoments, x: Array, weights: Array) -> Any:
    """Return the weighted sum of a function over nodes.

    Each iteration of a loop takes as many nodes as make up ``AT_ONCE`` values: with few
    data a node is so little work that most of the time would be the loop's.

    :param function: the sums over some nodes.
    :param at: Gaussians on the predictors.
    :param x: the nodes, (nodes, dimensions).
    :param weights: their weights, (nodes,).
    """
    number = len(x)
    blocks = min(number, -(-number * at.means[-1].size // AT_ONCE))
    each = -(-number // max(blocks, 1))
    x, weights = _in_blocks(x, weights, each)
    if len(x) == 1:
        return function(x[0], weights[0])
    return summed(lambda part: function(*part), (x, weights))


def _in_blocks(x: Array, weights: Array, each: int) -> tuple[Array, Array]:
    """Return nodes and weights in blocks of one size, (blocks, each, ...)."""
    # Nodes that fill up the last block have no weight.
    more = -len(x) % each
    x = jnp.pad(x, ((0, more), (0, 0))).reshape(-1, each, x.shape[1])
    return x, jnp.pad(weights, (0, more)).reshape(-1, each)


def _forward(total: Sum, numbers: Any, at: PredictorMoments) -> tuple[Array, Any]:
    """Return the value, and its derivatives in all that has derivatives itself: a
    density need not have a derivative in a constant."""
    moved = [x.perturbed for x in jax.tree.leaves(numbers)]
    numbers, at = jax.tree.map(lambda x: x.value, (numbers, at))
    return _sums(total, numbers, at, moved)


def _sums(
    total: Sum, numbers: Any, at: PredictorMoments, moved: list[bool]
) -> tuple[Array, Any]:
    """Return the value and its derivatives, in one pass that stores no array per node.

    :param moved: the leaves of ``numbers`` in which to differentiate.
    """
    leaves, treedef = jax.tree.flatten(numbers)
    moving = [x if move else None for move, x in zip(moved, leaves, strict=True)]

    def at_node(moving: list[Array | None], values: tuple[Array, ...]) -> Array:
        pairs = zip(moving, leaves, strict=True)
        merged = [leaf if x is None else x for x, leaf in pairs]
        return total(jax.tree.unflatten(treedef, merged), values)

    differentiated = jax.value_and_grad(at_node, (0, 1))

    def sums(x: Array, weights: Array) -> _Sums:
        found = jax.vmap(lambda node: differentiated(moving, placed(at, node)))(x)
        found = jax.tree.map(partial(_share, weights), found)
        value, (direct, slopes) = jax.tree.map(lambda y: y.sum(0), found)
        turned = (
            jnp.matmul(x[:, : i + 1].T, slope, precision="highest")
            for i, slope in enumerate(found[1][1])
        )
        return _Sums(value, direct, slopes, tuple(turned))

    found = _averaged(sums, at)
    slopes = _moment_slopes(at, found.slopes, found.turned)
    return found.value, (jax.tree.unflatten(treedef, found.direct), slopes)


def _share(weight: Array, y: Array) -> Array:
    """Return the contributions of nodes: their weights times ``y``, nodes first. At ten
    standard deviations a correct density may overflow (such as a logarithm of a
    distribution function). Values that are not finite are dropped there, if the weight
    of the node is smaller than rounding."""
    weight = weight.reshape(-1, *(1,) * (y.ndim - 1))
    rounded = jnp.abs(weight) < jnp.finfo(weight.dtype).eps
    return jnp.where(rounded & ~jnp.isfinite(y), 0, y * weight.astype(y.dtype))


def _moment_slopes(
    at: PredictorMoments, slopes: Any, turned: tuple[Array, ...]
) -> PredictorMoments:
    """Return derivatives in means, variances and covariance. With ``f = m + L x``, the
    derivative in the covariance matrix is half of ``E (slope x') L^-1`` (Stein)."""
    factor = _factor(at)

    def over(x: Array, scale: Array) -> Array:
        return jnp.where(scale > 0, x / jnp.where(scale > 0, scale, 1), 0)

    first = over(turned[0][0], factor[0][0])
    if at.covariance is None:
        return PredictorMoments(tuple(slopes), (0.5 * first,))
    shared, own = factor[1]
    second = over(turned[1][1], own)
    # E (slope_2 x_1) = H_21 L_11 + H_22 L_21.
    beside = factor[0][0] if at.partner is None else factor[0][0][at.partner]
    cross = over(turned[1][0] - second * shared, beside)
    # E (slope_1 x_1) = H_11 L_11 + H_12 L_21, summed over data that share L_21.
    lean = cross * shared
    if at.partner is not None:
        lean = jnp.zeros_like(first).at[at.partner].add(lean)
    elif first.shape != lean.shape:
        lean = lean.sum(keepdims=True)
    first = over(turned[0][0] - lean, factor[0][0])
    return PredictorMoments(tuple(slopes), (0.5 * first, 0.5 * second), cross)


def _backward(total: Sum, kept: Any, cotangent: Array) -> tuple[Any, Any]:
    # Arguments in which the sum was not differentiated have None. Data may be float32
    # in a float64 model, and a derivative has the dtype of its argument.
    direct, moments = jax.tree.map(lambda x: cotangent.astype(x.dtype) * x, kept)
    return direct, moments


expected_sum.defvjp(_forward, _backward, symbolic_zeros=True)
