# SPDX-License-Identifier: Apache-2.0
"""Results of predictions without the rows that were added so that predictions at
similar numbers of rows share compiled programs (:mod:`numpyro_gpaug.model.padding`)."""

from __future__ import annotations

import copy
from collections.abc import Collection
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax import Array, lax, random
from numpyro.distributions import Distribution

from numpyro_gpaug._numpyro import Ordered
from numpyro_gpaug.math.whitening import cholesky_of_sums
from numpyro_gpaug.predict.mixture import FunctionValues


class PartsDifferError(TypeError):
    """The distributions of two numbers of rows differ in more than shapes of arrays, as
    a user's class may. They cannot be predicted with added rows."""


def without_added(found: Any, few: Any, num: int) -> Any:
    """Return a prediction for the first rows alone.

    :param found: the prediction, or its shapes: arrays, function values, or a
        distribution.
    :param few: the same prediction, or its shapes, for another number of rows. Sizes
        that differ run over rows.
    :param num: how many rows to keep.
    :raises PartsDifferError: for a distribution with attributes that differ otherwise.
    """
    if isinstance(found, FunctionValues) and found.mean.ndim != 1:
        whole, covariance = found
        if covariance.shape == (whole.size, whole.size):
            # Entries of a table are counted row by row.
            mean = _of_array(whole, few.mean.shape, num)
            table = np.asarray(covariance).reshape(2 * whole.shape)
            kept = _of_array(table, 2 * few.mean.shape, num)
            return FunctionValues(mean, kept.reshape(mean.size, mean.size))
    if isinstance(found, Ordered):
        return Ordered(without_added(found.tree, few.tree, num))
    if isinstance(found, Distribution):
        cut, others = copy.copy(found), vars(few)
        for name, value in vars(found).items():
            vars(cut)[name] = without_added(value, others[name], num)
        return cut
    if isinstance(found, tuple | list):
        pairs = zip(found, few, strict=True)
        kept = [without_added(a, b, num) for a, b in pairs]
        return found._make(kept) if hasattr(found, "_make") else type(found)(kept)
    if isinstance(found, dict):
        return type(found)((k, without_added(x, few[k], num)) for k, x in found.items())
    if isinstance(found, jax.tree_util.PyTreeDef):
        # The tree of a distribution, which contains its shape.
        many, fewer = (jax.tree.unflatten(x, range(x.num_leaves)) for x in (found, few))
        return jax.tree.structure(without_added(many, fewer, num))
    if hasattr(found, "shape") and hasattr(found, "dtype"):
        return _of_array(found, few.shape, num)
    if type(found) is int:
        return found if found == few else num
    if found is not few and found != few:
        raise PartsDifferError(f"the parts {found} and {few} of predictions differ")
    return found


def _of_array(found: Any, few: tuple[int, ...], num: int) -> Any:
    sizes = zip(found.shape, few, strict=True)
    if isinstance(found, jax.ShapeDtypeStruct):
        shape = tuple(a if a == b else num for a, b in sizes)
        return jax.ShapeDtypeStruct(shape, found.dtype)
    kept = tuple(slice(None if a == b else num) for a, b in sizes)
    # In NumPy, because JAX would compile a program for each number of rows.
    return jax.device_put(np.asarray(found)[kept])


def joint_draws(
    key: Array,
    num: int,
    mean: Array,
    covariance: Array,
    scale: Array,
    rows: Collection[int] = (),
    count: Any = None,
) -> tuple[Array, Array]:
    """Draw jointly Gaussian function values, and return whether their covariance
    factorised. Added rows do not change the draws of the others.

    :param key: random key.
    :param num: number of draws.
    :param mean: means, of any shape.
    :param covariance: covariances (..., n, n) of the means, raveled along their last
        axes.
    :param scale: see :func:`~numpyro_gpaug.math.whitening.cholesky_of_sums`.
    :param rows: axes of the means over rows, if rows were added.
    :param count: how many of these rows count.
    """
    place, counts = jnp.zeros(mean.shape, int), jnp.ones(mean.shape, bool)
    for axis, size in enumerate(mean.shape):
        whole = count if axis in rows else size
        index = lax.broadcasted_iota(place.dtype, mean.shape, axis)
        place, counts = place * whole + index, counts & (index < whole)
    if rows:
        # Repeated rows would make the covariance singular.
        counts = counts.reshape(covariance.shape[:-1])
        eye = jnp.eye(covariance.shape[-1], dtype=mean.dtype)
        both = counts[..., :, None] & counts[..., None, :]
        covariance = jnp.where(both, covariance, scale[..., None, None] * eye)
    factor = cholesky_of_sums(covariance, scale)
    # The noise of an entry does not depend on the number of entries.
    keys = jax.vmap(lambda i: random.fold_in(key, i))(place.ravel())
    noise = jax.vmap(lambda k: random.normal(k, (num,), mean.dtype), out_axes=1)(keys)
    noise = noise.reshape(num, *covariance.shape[:-1])
    moved = jnp.einsum("...ij,s...j->s...i", factor, noise)
    return mean + moved.reshape(num, *mean.shape), jnp.isfinite(factor).all()
