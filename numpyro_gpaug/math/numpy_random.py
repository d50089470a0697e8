# SPDX-License-Identifier: Apache-2.0
"""Random numbers of programs that NumPy runs. Keys are numbers that seed its
generators: an array of keys gives one generator, which makes the bits of all of them.
They are not the numbers that JAX makes of the same keys."""

from __future__ import annotations

from typing import Any

import numpy as np


def wrapped(words: np.ndarray, **_: Any) -> Any:
    """Keys are one entry each, so that whatever moves entries moves keys."""
    whole = np.ascontiguousarray(words)
    return whole.view(f"V{4 * words.shape[-1]}")[..., 0]


def words(keys: np.ndarray) -> np.ndarray:
    """The numbers that keys are made of, (..., words)."""
    number = keys.dtype.itemsize // 4
    return np.frombuffer(keys.tobytes(), np.uint32).reshape(*keys.shape, number)


def _generator(keys: np.ndarray, purpose: int) -> np.random.Generator:
    return np.random.default_rng([purpose, *words(keys).ravel()])


def seeded(seeds: np.ndarray, *, impl: Any) -> Any:
    """Keys of seeds."""
    wide = seeds.astype(np.uint64)
    halves = np.stack([wide >> np.uint64(32), wide & np.uint64(2**32 - 1)], -1)
    number = impl.key_shape[0]
    return wrapped(np.tile(halves.astype(np.uint32), number // 2))


def _fresh(rng: np.random.Generator, shape: tuple[int, ...], like: np.ndarray) -> Any:
    return wrapped(
        rng.integers(2**32, size=(*shape, like.dtype.itemsize // 4), dtype=np.uint32)
    )


def split(keys: np.ndarray, *, shape: Any) -> Any:
    """Keys in the place of others, of a new last shape."""
    return _fresh(_generator(keys, 0), (*keys.shape, *shape), keys)


def folded(keys: np.ndarray, numbers: np.ndarray) -> Any:
    """Keys of keys and numbers."""
    all_of_them = *words(keys).ravel(), *np.ravel(numbers).astype(np.uint32)
    shape = np.broadcast_shapes(keys.shape, np.shape(numbers))
    return _fresh(np.random.default_rng([1, *all_of_them]), shape, keys)


def bits(keys: np.ndarray, *, bit_width: int, shape: Any) -> Any:
    """Random bits of each key, of a shape."""
    dtype: Any = {8: np.uint8, 16: np.uint16, 32: np.uint32, 64: np.uint64}[bit_width]
    most = np.iinfo(dtype).max
    size = *keys.shape, *shape
    return _generator(keys, 2).integers(most, size=size, dtype=dtype, endpoint=True)


def gamma(keys: np.ndarray, shape: np.ndarray, *, log_space: bool) -> Any:
    """Of small shapes by those of larger ones, whose logarithms are finite (Marsaglia
    and Tsang, 2000)."""
    rng = _generator(keys, 3)
    own = shape.astype(float)
    logarithm = (
        np.log(rng.standard_gamma(own + 1)) - rng.exponential(size=own.shape) / own
    )
    return logarithm if log_space else np.exp(logarithm)
