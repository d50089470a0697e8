# SPDX-License-Identifier: Apache-2.0
r"""Recurrences along chains of very many steps, in work linear in their number.

A chain is cut into about as many blocks as a block has steps. All blocks are run at
once, each with nothing entering it. The values that do enter are then computed from
block to block, and their effect is added. A chain of T steps thus takes a few times
``sqrt(T)`` sequential operations.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Collection
from typing import Any

import jax
import jax.numpy as jnp
from jax import Array, lax

from numpyro_gpaug.math import small


def linear(
    act: Callable[[Array, Array], Array],
    transitions: Array,
    inputs: Array,
    *,
    reverse: bool = False,
) -> Array:
    """Compute ``x_t = act(A_t, x_{t-1}) + b_t``, or with ``x_{t+1}`` in reverse. The
    recurrence starts at zero.

    :param act: the action of a matrix: linear in x, and the action of a product is the
        composition of the actions.
    :param transitions: A, (chains, steps, R, R).
    :param inputs: b, (chains, steps, ...).
    :param reverse: whether chains are run from their ends.
    """
    steps = transitions.shape[1]
    cut = tuple(_cut(x) for x in (transitions, inputs))

    def inside(carry: Any, here: Any) -> Any:
        """Take a step, without the product of transitions after the first pass."""
        (x, *passed), (transition, own) = carry, here
        x = act(transition, x) + own
        passed = [small.product(transition, each) for each in passed]
        return (x, *passed), None if passed else x

    eye = jnp.broadcast_to(_eye(transitions), cut[0].shape[1:])
    start = jnp.zeros_like(cut[1][0]), eye
    ends, _ = lax.scan(inside, start, cut, reverse=reverse)

    def across(x: Array, block: Any) -> Any:
        own, passed = block
        return act(passed, x) + own, x

    by_block = jax.tree.map(lambda x: jnp.moveaxis(x, 1, 0), ends)
    first = jnp.zeros_like(by_block[0][0])
    _, entering = lax.scan(across, first, by_block, reverse=reverse)
    # Computed again, which takes less time than to keep all products of transitions.
    entering = jnp.moveaxis(entering, 0, 1)
    _, found = lax.scan(inside, (entering,), cut, reverse=reverse)
    return _whole(found, steps)


def filtered(own: Array, links: Array) -> Array:
    r"""Return the precision of each step given all earlier ones.

    With steps :math:`x_t = A_t x_{t-1} + \epsilon_t`, standard normal noise, and
    factors of precisions W, the precision of a step given all factors up to its own is

    .. math:: E_t = W_t + (I + A_t E_{t-1}^{-1} A_t')^{-1},

    a sum of positive terms in this computation. Otherwise, for a walk with little data,
    it would be the small difference of numbers near one.

    :param own: W, (chains, steps, R, R).
    :param links: A, (chains, steps, R, R); zero at the starts of chains. With the
        whiteners of the noise behind A, see :func:`split`, the covariance of the noise
        takes the place of I.
    """
    eye, steps = _eye(own), own.shape[1]
    links, whitener = split(links)
    noise = None if whitener is None else noise_of(whitener)
    # Steps that fill up the last block have standard normal noise.
    more = jnp.zeros_like(links) if noise is None else noise - eye
    cut = _cut(own), _cut(links), _cut(more)

    def alone(carry: Any, here: Any) -> Any:
        """Return a block as a function of the step before it, y. Its last step has the
        mean ``gain y`` and covariance ``spread``, and the precision of its information
        about y is ``seen``."""
        spread, gain, seen = carry
        weights, link, more = here
        spread, gain = followed(link, spread, more), small.product(link, gain)
        before = small.inverse(spread)
        spread = small.inverse(before + weights)
        left, moved = (small.product(spread, x) for x in (before, weights))
        if noise is not None:
            # The same value, but states that the weights do not change stay exactly
            # equal.
            left = eye - moved
        about = small.product(left.mT, small.product(weights, left))
        about += small.product(moved.mT, small.product(before, moved))
        seen += small.product(gain.mT, small.product(about, gain))
        return (spread, small.product(left, gain), seen), None

    # Nothing leaves the last block, which may not be full.
    before = tuple(x[:, :, :-1] for x in cut)
    zeros = jnp.zeros_like(before[0][0])
    start = zeros, jnp.broadcast_to(eye, zeros.shape), zeros
    blocks, _ = lax.scan(alone, start, before)

    def across(entering: Array, block: Any) -> Any:
        spread, gain, seen = block
        known = small.inverse(entering + seen)
        leaving = small.inverse(spread + congruent(gain, known))
        return leaving, leaving

    by_block = tuple(jnp.moveaxis(x, 1, 0) for x in blocks)
    # Chains start with a link of zero, whatever comes before.
    first = jnp.broadcast_to(eye, (len(own), *eye.shape))
    _, leaving = lax.scan(across, first, by_block)
    entering = jnp.concatenate([first[None], leaving])

    def inside(entering: Array, here: Any) -> Any:
        weights, link, more = here
        seen = weights + small.inverse(followed(link, small.inverse(entering), more))
        return seen, seen

    _, found = lax.scan(inside, jnp.moveaxis(entering, 0, 1), cut)
    return _whole(found, steps)


def followed(link: Array, covariance: Array, more: Array) -> Array:
    """Return the covariance of the next step.

    :param link: A, (..., R, R).
    :param covariance: the covariance of the step, (..., R, R).
    :param more: the covariance of the noise minus I, (..., R, R).
    """
    return _eye(link) + more + congruent(link, covariance)


def split(links: Array) -> tuple[Array, Array | None]:
    """Return transition matrices, and the whiteners of the noise, or ``None`` if it is
    standard normal.

    :param links: A, (..., R, R), or A, K and the units of the numbers, (..., R, 2 R +
        1). ``K e`` is standard normal for the noise e, with the lower triangle K.
    """
    size = links.shape[-2]
    if links.shape[-1] == size:
        return links, None
    return links[..., :size], jnp.tril(links[..., size : 2 * size])


def noise_of(whitener: Array) -> Array:
    """Return the covariance of the noise of a whitener (..., R, R)."""
    root = small.inverse_lower(whitener)
    return small.product(root, root.mT)


def white_along(links: Array, along: Array) -> Array:
    """Return the standard normal numbers behind the numbers of chains.

    :param links: see :func:`split`, (chains, steps, ...).
    :param along: (chains, steps, R, n).
    """
    link, whitener = split(links)
    noise = along - small.product(link, step_before(along))
    return noise if whitener is None else small.product(whitener, noise)


def log_volume_along(links: Collection[Array]) -> Array:
    """Return the logarithm of the factor by which :func:`white_along` changes volumes.

    :param links: by chain, see :func:`split`.
    """
    given = [whitener for _, whitener in map(split, links) if whitener is not None]
    diagonals = [jnp.diagonal(x, axis1=-2, axis2=-1) for x in given]
    return sum((jnp.log(jnp.abs(x)).sum() for x in diagonals), jnp.zeros(()))


def linked_along(links: Array, white: Array) -> Array:
    """Return the numbers of chains; the inverse of :func:`white_along`."""
    link, whitener = split(links)
    if whitener is not None:
        white = small.product(small.inverse_lower(whitener), white)
    return linear(small.product, link, white)


def congruent(matrix: Array, covariance: Array) -> Array:
    """Return ``A P A'``, for matrices (..., R, R)."""
    return small.product(small.product(matrix, covariance), matrix.mT)


def step_after(along: Array) -> Array:
    """Return, for each step, (chains, steps, ...), the value of the next step; zero at
    the end."""
    return jnp.pad(along[:, 1:], [(0, 0), (0, 1)] + [(0, 0)] * (along.ndim - 2))


def step_before(along: Array) -> Array:
    """Return, for each step, (chains, steps, ...), the value of the step before; zero
    at the start."""
    return jnp.pad(along[:, :-1], [(0, 0), (1, 0)] + [(0, 0)] * (along.ndim - 2))


def _eye(matrices: Array) -> Array:
    return jnp.eye(matrices.shape[-1], dtype=matrices.dtype)


def _size(steps: int) -> int:
    """Return the number of steps of a block."""
    return math.isqrt(steps - 1) + 1


def _cut(x: Array) -> Array:
    """Return (chains, steps, ...) as (steps of a block, chains, blocks, ...)."""
    chains, steps = x.shape[:2]
    size = _size(steps)
    blocks = -(-steps // size)
    missing = [(0, 0), (0, blocks * size - steps)] + [(0, 0)] * (x.ndim - 2)
    cut = jnp.pad(x, missing).reshape(chains, blocks, size, *x.shape[2:])
    return jnp.moveaxis(cut, 2, 0)


def _whole(x: Array, steps: int) -> Array:
    """Join the blocks that :func:`_cut` made."""
    whole = jnp.moveaxis(x, 0, 2)
    return whole.reshape(whole.shape[0], -1, *whole.shape[3:])[:, :steps]
