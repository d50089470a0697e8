# SPDX-License-Identifier: Apache-2.0
"""Shuffled epochs of the plates that draw a batch."""

from __future__ import annotations

from collections.abc import Collection
from functools import partial

import jax.numpy as jnp
from jax import Array, lax, random

from numpyro_gpaug.model.arguments import Values
from numpyro_gpaug.model.latents import Structure

Epochs = dict[str, tuple[Array, Array]]


def epoch_length(structure: Structure) -> int:
    """The number of batches per epoch of the plate with most batches. Members left over
    at the end of an epoch are shuffled into the next one (:func:`next_batch`)."""
    batches = [p.size // p.subsample_size for p in structure.subsampled.values()]
    return max(batches, default=1)


def first_epochs(structure: Structure, passed: Collection[str] = ()) -> Epochs:
    """Return epochs at their end, so that the first step shuffles.

    :param structure: the structure of the model.
    :param passed: plates whose batches are passed in, which need no draws.
    """
    return {
        name: (jnp.arange(plate.size, dtype=jnp.int32), jnp.int32(plate.size))
        for name, plate in structure.subsampled.items()
        if name not in passed
    }


def drawn_batch(
    structure: Structure, key: Array, passed: Collection[str] = ()
) -> Values:
    """Draw indices of every subsampled plate with replacement, to evaluate a state:
    shuffling half a million rows takes as long as a hundred steps on 1000 of them.

    :param structure: the structure of the model.
    :param key: random key.
    :param passed: plates whose batches are passed in.
    """
    return {
        name: random.randint(
            random.fold_in(key, k), (plate.subsample_size,), 0, plate.size
        )
        for k, (name, plate) in enumerate(structure.subsampled.items())
        if name not in passed
    }


def next_batch(
    structure: Structure, epochs: Epochs, key: Array
) -> tuple[Values, Epochs]:
    """Return indices of every subsampled plate, from epochs shuffled without
    replacement. NumPyro's own draw would cost a sequential pass over the plate per
    step.

    :param structure: the structure of the model.
    :param epochs: by plate, a permutation and the position in it; nothing for a plate
        whose batches are passed in.
    :param key: random key of the step.
    :return: indices by plate, and the next state of the epochs.
    """
    indices, following = {}, {}
    for k, (name, plate) in enumerate(structure.subsampled.items()):
        if name not in epochs:
            continue
        order, position = epochs[name]
        over = position + plate.subsample_size > plate.size
        shuffled = partial(random.permutation, random.fold_in(key, k))
        order = lax.cond(over, shuffled, lambda order: order, order)
        position = jnp.where(over, 0, position)
        indices[name] = lax.dynamic_slice(order, (position,), (plate.subsample_size,))
        following[name] = order, position + plate.subsample_size
    return indices, following
