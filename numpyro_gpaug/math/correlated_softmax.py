# SPDX-License-Identifier: Apache-2.0
r"""Expectations of the softmax and of its normaliser under correlated Gaussians.

For independent latents ``E log sum_c exp(f_c)`` is a one-dimensional integral
(:mod:`~numpyro_gpaug.math.log_sum`). For correlated ones it is an average over
quasi-random nodes, in pairs ``x, -x`` and with the identity for second moments, so that
quadratic functions are averaged exactly. The derivatives that define Gaussian factors
are averages too, of the softmax s and of ``diag(s) - s s'`` (Bonnet's and Price's
theorems). The latter is positive semi-definite at every node, and so are the factors'
precisions, whatever the number of nodes.

Reference: Opper and Archambeau (2009), The variational Gaussian approximation
revisited, section 2.
"""

from __future__ import annotations

from functools import cache, partial
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax import Array
from jax.scipy.special import logsumexp
from scipy.special import ndtri

from numpyro_gpaug.math.blocks import summed

# The number of nodes, half of which mirror the others, and the number of nodes of a
# finer rule for comparison.
NODES, FINER = 256, 2048


def pair_places(classes: int) -> tuple[np.ndarray, np.ndarray]:
    """Return the pairs of classes, in the order in which covariances are given.

    :param classes: the number of classes.
    """
    return np.triu_indices(classes, 1)


@cache
def _nodes(classes: int, num: int) -> np.ndarray:
    """Return standard normal nodes (num, classes) of equal weight."""
    from scipy.stats import qmc  # takes half a second to import

    sobol = qmc.Sobol(classes, scramble=True, seed=np.random.default_rng(0))
    half = ndtri(sobol.random(num // 2))
    half = half @ np.linalg.inv(np.linalg.cholesky(half.T @ half / len(half))).T
    return np.concatenate([half, -half])


def matrix_of_pairs(variance: Array, covariance: Array) -> Array:
    """Return covariance matrices, (..., C, C).

    :param variance: their diagonals, (..., C).
    :param covariance: covariances of pairs, in the order of :func:`pair_places`.
    """
    classes = variance.shape[-1]
    left, right = pair_places(classes)
    if not len(left):
        return variance[..., None]
    places = np.zeros((classes, classes), int)
    places[left, right] = places[right, left] = np.arange(len(left))
    eye = np.eye(classes, dtype=bool)
    return jnp.where(eye, variance[..., None], covariance[..., places])


def _factor(variance: Array, covariance: Array) -> Array:
    """Return Cholesky factors (..., C, C) of covariances, which may be singular: a
    class may have a latent that is zero."""
    classes, whole = variance.shape[-1], matrix_of_pairs(variance, covariance)
    found = jnp.zeros_like(whole)
    least = 8 * jnp.finfo(whole.dtype).eps * variance
    for j in range(classes):
        known = jnp.matvec(found[..., :j], found[..., j, :j])
        column = whole[..., :, j] - known
        pivot = column[..., j]
        seen = pivot > least[..., j]
        root = jnp.sqrt(jnp.where(seen, pivot, 1))
        column = jnp.where(seen[..., None], column / root[..., None], 0)
        found = found.at[..., :, j].set(jnp.where(np.arange(classes) < j, 0, column))
    return found


def nodes_of(mean: Array, variance: Array, covariance: Array) -> Array:
    """Return nodes (num, ..., C) of equal weight; the arguments are those of
    :func:`expected_log_sum_exp`."""
    factor = _factor(variance, covariance)
    nodes = jnp.asarray(_nodes(mean.shape[-1], NODES), mean.dtype)
    return jax.vmap(lambda node: mean + jnp.matvec(factor, node))(nodes)


def _averages(
    value: Any, mean: Array, variance: Array, covariance: Array, num: int
) -> Any:
    """Return averages of a tree of arrays over nodes, one after the other."""
    factor = _factor(variance, covariance)
    nodes = jnp.asarray(_nodes(mean.shape[-1], num), mean.dtype)
    total = summed(lambda node: value(mean + jnp.matvec(factor, node)), nodes)
    return jax.tree.map(lambda x: x / num, total)


@partial(jax.custom_vjp, nondiff_argnums=(3,))
def expected_log_sum_exp(
    mean: Array, variance: Array, covariance: Array, num: int = NODES
) -> Array:
    """Return ``E log sum_c exp(f_c)``.

    :param mean: means of f, (..., C).
    :param variance: variances of f, (..., C).
    :param covariance: covariances of pairs of classes, (..., C (C - 1) / 2), in the
        order of :func:`pair_places`.
    :param num: the number of nodes, even.
    :return: (...).
    """
    return _averages(partial(logsumexp, axis=-1), mean, variance, covariance, num)


def _forward(mean: Array, variance: Array, covariance: Array, num: int) -> Any:
    left, right = pair_places(mean.shape[-1])

    def value(f: Array) -> tuple[Array, ...]:
        shares = jax.nn.softmax(f)
        curved = 0.5 * shares * (1 - shares)
        return (
            logsumexp(f, axis=-1), shares, curved,
            -shares[..., left] * shares[..., right],
        )  # fmt: skip

    found, *slopes = _averages(value, mean, variance, covariance, num)
    return found, tuple(slopes)


def _backward(num: int, slopes: tuple[Array, ...], cotangent: Array) -> Any:
    return tuple(cotangent[..., None] * x for x in slopes)


expected_log_sum_exp.defvjp(_forward, _backward)


def expected_softmax(
    mean: Array, variance: Array, covariance: Array, num: int = NODES
) -> Array:
    """Return ``E softmax(f)``, (..., C); see :func:`expected_log_sum_exp` for the
    arguments."""
    return _averages(jax.nn.softmax, mean, variance, covariance, num)
