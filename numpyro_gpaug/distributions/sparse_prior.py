# SPDX-License-Identifier: Apache-2.0
r"""The one form in which Gaussian Markov random fields state their sparse precision.

A field is an affine function of coordinates ``x = (x_1, .., x_K)``, K vectors of n
numbers each: ``value = loc + scales[0] * x_1 + .. + scales[K-1] * x_K``. The
coordinates have mean zero and a sparse precision Q, and are restricted to
``constraints @ x = 0``. They are chosen such that Q depends on as few
hyperparameters as possible:

=========================  =  ========================  ===========================
field                      K  Q depends on              constraints
=========================  =  ========================  ===========================
``ICAR``                   1  the graph                 a sum over each component
``BYM2``                   2  the graph                 the same, on the second half
``GMRF``                   1  the precision             none
``RandomWalk2``            1  its three scales          none
``SpaceTime``              1  the graph, correlations   none
``dist.CAR``               1  the graph, correlation    none
weights of an ``SPDE``     1  the mesh, range           none
=========================  =  ========================  ===========================

A :class:`Field` states it by a method ``_sparse_precision()``. Independent fields of
one distribution (axes of its ``batch_shape``) have coordinates of their own, all with
the same Q.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
import numpyro.distributions as dist
from jax import Array, random
from numpyro.distributions import constraints
from scipy import sparse

from numpyro_gpaug.math import sparse_cholesky
from numpyro_gpaug.math.sparse_pattern import Pattern
from numpyro_gpaug.math.sparse_terms import sum_of_terms


class SparsePrior(NamedTuple):
    """A field as an affine function of coordinates with a sparse precision Q.

    :param pattern: the places of the entries of Q, of size ``K n``.
    :param values: the entries, (nnz,).
    :param constraints: rows ``a`` with ``a' x = 0``, (c, K n), or ``None``. Q may be
        singular on their span, and is positive definite on the null space.
    :param loc: the value at ``x = 0``; it broadcasts to (..., n).
    :param scales: K factors, each broadcasts to (..., n).
    :param log_det: returns the logarithm of the determinant of Q, or of its restriction
        to the null space of the constraints in orthonormal coordinates.
    :param event_shape: the shape of a value, of n numbers; (n,) for ``None``.
    :param resolved: whether the dtype resolves the quadratic form of likely values.
    :param chained: whether the field by itself is the states of a chain.
    :param sums: the sums of the rows of Q, (K n,), where they are known better than by
        adding up the entries.
    """

    pattern: Pattern
    values: Array
    constraints: np.ndarray | None
    loc: Array
    scales: tuple[Array, ...]
    log_det: Callable[[], Array]
    event_shape: tuple[int, ...] | None = None
    resolved: bool = True
    chained: bool = False
    sums: Any = None

    @property
    def entries(self) -> Array:
        """Entries with sums of rows, see
        :func:`~numpyro_gpaug.math.sparse_cholesky.with_sums`."""
        return sparse_cholesky.with_sums(self.pattern, self.values, self.sums)

    def value(self, x: Array) -> Array:
        """Return the value of the field.

        :param x: coordinates, (..., K n).
        """
        groups = zip(self.scales, jnp.split(x, len(self.scales), -1), strict=True)
        flat = self.loc + sum(scale * group for scale, group in groups)
        if self.event_shape is None:
            return flat
        return flat.reshape(*flat.shape[:-1], *self.event_shape)


class Field(dist.Distribution):
    """A Gaussian Markov random field: of mean zero, unless a class states another."""

    support: Any = constraints.real_vector

    @property
    def dtype(self) -> np.dtype:
        """The dtype of the values."""
        return getattr(self, self.reparametrized_params[0]).dtype

    @property
    def mean(self) -> Array:
        return jnp.zeros(self.shape(), self.dtype)

    def white(self, key: Array, sample_shape: tuple[int, ...]) -> Array:
        """Return standard normal numbers in the shape of draws."""
        return random.normal(key, sample_shape + self.shape(), self.dtype)

    def _sparse_precision(self) -> SparsePrior:
        raise NotImplementedError


def sparse_prior(fn: dist.Distribution) -> SparsePrior | None:
    """Return the sparse form of a distribution, or ``None`` if it has none.

    :param fn: a distribution without wrappers (plates, masks).

    **Example**

    >>> import numpy as np
    >>> from numpyro_gpaug.distributions import ICAR
    >>> prior = sparse_prior(ICAR(np.ones((3, 3)) - np.eye(3), scale=2.0))
    >>> prior.pattern.size, prior.constraints.tolist(), float(prior.scales[0][0])
    (3, [[1.0, 1.0, 1.0]], 2.0)
    """
    if isinstance(fn, dist.CAR):
        return _of_car(fn)
    return fn._sparse_precision() if isinstance(fn, Field) else None


def _of_car(fn: dist.CAR) -> SparsePrior | None:
    adjacency: Any = fn.adj_matrix
    known = np.ndim(adjacency) == 2 and not isinstance(adjacency, jax.core.Tracer)
    if not known or np.ndim(fn.correlation):
        return None
    neighbours = sparse.csr_array(adjacency)
    degrees = sparse.diags_array(np.asarray(neighbours.sum(1), float).ravel())
    terms = [(1.0, degrees), (-jnp.asarray(fn.correlation, float), neighbours)]
    pattern, values = sum_of_terms(terms, "adj_matrix")
    dtype = jnp.result_type(fn.loc, values, fn.conditional_precision)
    values = values.astype(dtype)
    scale = jnp.asarray(fn.conditional_precision, dtype)[..., None] ** -0.5
    sums = (1 - jnp.asarray(fn.correlation, dtype)) * degrees.diagonal()
    return SparsePrior(
        pattern, values, None, jnp.asarray(fn.loc, dtype), (scale,),
        lambda: sparse_cholesky.log_det(pattern, values), sums=sums,
    )  # fmt: skip
