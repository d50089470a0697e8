# SPDX-License-Identifier: Apache-2.0
"""Gaussian Markov random fields: distributions with a sparse precision.

They are ordinary NumPyro distributions. Memory and work grow little faster than the
number of entries of the precision. :mod:`.sparse_prior` is the form in which a guide
reads them.
"""

from __future__ import annotations

from functools import partial
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax import Array, random
from jax.typing import ArrayLike
from numpyro.distributions import constraints
from numpyro.distributions.util import validate_sample
from scipy import sparse

from numpyro_gpaug.distributions.graph import Graph, graph_of
from numpyro_gpaug.distributions.sparse_prior import Field, SparsePrior
from numpyro_gpaug.distributions.zero_sum import ZeroSumByComponent, centred, sums
from numpyro_gpaug.math import sparse_cholesky, sparse_terms
from numpyro_gpaug.math.arrays import floating
from numpyro_gpaug.math.linalg import precise
from numpyro_gpaug.math.normal import LOG_2PI
from numpyro_gpaug.math.sparse_pattern import Pattern


class ICAR(Field):
    r"""The intrinsic conditional autoregression on a graph, with a zero sum over every
    connected component and unit generalised variance at ``scale=1``.

    The density on the vectors with zero sums is proportional to :math:`\exp(-\frac{s}
    {2\,\text{scale}^2} \sum_{i \sim j} w_{ij} (u_i - u_j)^2)`, and is normalised. The
    constant s of a component makes the geometric mean of the marginal variances one, so
    ``scale`` is a typical standard deviation on every graph (Sorbye and Rue, 2014;
    Riebler et al., 2016; Freni-Sterrantino et al., 2018, for several components). It is
    computed once per graph, on the host. Areas without neighbours ("islands") are
    independent normals with standard deviation ``scale``.

    NumPyro's :class:`~numpyro.infer.NUTS` samples one number less than nodes for every
    component.

    :param adjacency: weights of neighbours, (n, n), symmetric and zero on the diagonal:
        an array, a SciPy sparse matrix, or a BCOO of JAX. Lists of neighbours i, j
        (with both orders) make one: ``scipy.sparse.coo_array((ones, (i, j)), shape=(n,
        n))``. The graph must be known when the model is traced.
    :param scale: a positive number, or an array of independent fields' scales.
    :raises TypeError: for a traced adjacency.
    :raises ValueError: for an adjacency that is not square, or has entries that are
        negative, not finite, on the diagonal, or not symmetric.

    **Example**

    >>> import numpy as np
    >>> road = np.diag(np.ones(3), 1) + np.diag(np.ones(3), -1)  # four areas in a row
    >>> field = ICAR(road, scale=2.0)
    >>> print(np.asarray(field.variance).round(2))
    [6.11 2.62 2.62 6.11]
    >>> print(f"{field.log_prob(np.array([0.5, -0.5, -0.5, 0.5])):.3f}")
    -5.122
    """

    arg_constraints = {"scale": constraints.positive}
    reparametrized_params = ["scale"]
    pytree_aux_fields = ("graph",)

    def __init__(
        self,
        adjacency: Any,
        scale: ArrayLike = 1.0,
        *,
        validate_args: bool | None = None,
    ) -> None:
        self.graph = graph_of(adjacency)
        (self.scale,) = floating(scale)
        super().__init__(
            self.scale.shape, (self.graph.size,), validate_args=validate_args
        )

    @constraints.dependent_property(is_discrete=False, event_dim=1)
    def support(self) -> constraints.Constraint:
        return ZeroSumByComponent(self.graph)

    @precise
    def sample(self, key: Array, sample_shape: tuple[int, ...] = ()) -> Array:
        noise = self.white(key, sample_shape)
        return self.scale[..., None] * _intrinsic(self.graph, noise)

    @validate_sample
    def log_prob(self, value: Array) -> Array:
        graph, dtype = self.graph, self.dtype
        x = jnp.asarray(value, dtype) / self.scale[..., None]
        constant = jnp.asarray(graph.intrinsic.log_det - graph.rank * LOG_2PI, dtype)
        entries = self._sparse_precision().entries
        quadratic = sparse_cholesky.quadratic(graph.pattern, entries, x)
        return 0.5 * (constant - quadratic) - graph.rank * jnp.log(self.scale)

    @property
    def variance(self) -> Array:
        variances = jnp.asarray(self.graph.intrinsic.variances, self.dtype)
        return jnp.square(self.scale[..., None]) * variances

    def _sparse_precision(self) -> SparsePrior:
        graph, dtype = self.graph, self.dtype
        return SparsePrior(
            graph.pattern, jnp.asarray(graph.precision, dtype), _zero_sums(graph),
            jnp.zeros((), dtype), (self.scale[..., None],),
            lambda: jnp.asarray(graph.intrinsic.log_det, dtype), sums=_row_sums(graph),
        )  # fmt: skip


class BYM2(Field):
    r"""The sum of a structured and an unstructured effect of areas: ``scale * (sqrt(1 -
    mixing) v + sqrt(mixing) u)``.

    v is standard normal and u an :class:`ICAR` with unit generalised variance, so
    ``scale`` is a typical standard deviation of the sum, and ``mixing`` the share of
    the variance that is structured (Riebler et al., 2016). Islands have the variance
    ``scale ** 2``.

    The log density costs one sparse factorisation.

    :param adjacency: as for :class:`ICAR`.
    :param scale: a positive number, or an array.
    :param mixing: a number in [0, 1), or an array. At 1 the distribution is degenerate:
        it is an :class:`ICAR`.
    :raises TypeError: for a traced adjacency.
    :raises ValueError: as :class:`ICAR`.

    **Example**

    >>> import numpy as np
    >>> road = np.diag(np.ones(3), 1) + np.diag(np.ones(3), -1)
    >>> field = BYM2(road, scale=2.0, mixing=0.5)
    >>> print(np.asarray(field.variance).round(2))
    [5.06 3.31 3.31 5.06]
    >>> print(f"{field.log_prob(np.array([1.0, -0.5, 0.0, 0.5])):.3f}")
    -6.507
    """

    arg_constraints = {
        "scale": constraints.positive,
        "mixing": constraints.unit_interval,
    }
    reparametrized_params = ["scale", "mixing"]
    pytree_aux_fields = ("graph",)

    def __init__(
        self,
        adjacency: Any,
        scale: ArrayLike,
        mixing: ArrayLike,
        *,
        validate_args: bool | None = None,
    ) -> None:
        self.graph = graph_of(adjacency)
        self.scale, self.mixing = floating(scale, mixing)
        super().__init__(
            self.scale.shape, (self.graph.size,), validate_args=validate_args
        )

    @precise
    def sample(self, key: Array, sample_shape: tuple[int, ...] = ()) -> Array:
        noise, other = (self.white(k, sample_shape) for k in random.split(key))
        unstructured, structured = self._scales
        return unstructured * noise + structured * _intrinsic(self.graph, other)

    @validate_sample
    @precise
    def log_prob(self, value: Array) -> Array:
        size, dtype = self.graph.size, self.dtype
        x = jnp.asarray(value, dtype) / self.scale[..., None]
        at_unit_scale = partial(_log_prob_at_unit_scale, self.graph)
        per_field = jnp.vectorize(at_unit_scale, signature="(n),()->()")
        constant = jnp.asarray(0.5 * size * LOG_2PI, dtype)
        return per_field(x, self.mixing) - constant - size * jnp.log(self.scale)

    @property
    def variance(self) -> Array:
        variances = jnp.asarray(self.graph.intrinsic.variances, self.dtype)
        unstructured, structured = map(jnp.square, self._scales)
        return unstructured + structured * variances

    @property
    def _scales(self) -> tuple[Array, Array]:
        scale, mixing = self.scale[..., None], self.mixing[..., None]
        return scale * jnp.sqrt(1 - mixing), scale * jnp.sqrt(mixing)

    def _sparse_precision(self) -> SparsePrior:
        graph, dtype, size = self.graph, self.dtype, self.graph.size
        pattern = graph.pattern
        of_field = _zero_sums(graph)
        if of_field is not None:
            of_field = np.hstack([np.zeros_like(of_field), of_field])
        # The precision of the field comes after a diagonal.
        own, values = np.arange(size), np.append(np.ones(size), graph.precision)
        places = (np.append(own, x + size) for x in (pattern.rows, pattern.columns))
        return SparsePrior(
            Pattern.of(size + pattern.size, *places), jnp.asarray(values, dtype),
            of_field, jnp.zeros((), dtype), self._scales,
            lambda: jnp.asarray(graph.intrinsic.log_det, dtype),
            sums=np.append(np.ones(size), _row_sums(graph)),
        )  # fmt: skip


@partial(jax.jit, static_argnums=0)
def _log_prob_at_unit_scale(graph: Graph, x: Array, mixing: Array) -> Array:
    """Return the log density of one vector, without the constant.

    With the precision Q of the field, ``M = (1 - mixing) Q + mixing I`` and z the
    vector minus the means of components, the quadratic form is ``z' Q M^-1 z`` plus
    ``n mean^2 / (1 - mixing)`` of every component. M is singular on constants as
    ``mixing`` vanishes. M plus a multiple c of ``e_k e_k'`` (k the last node of a
    component) is not; with its solution h for a vector of ones, ``log|M| =
    log|M + c e_k e_k'| + log(mixing h_k)``, and ``M^-1 z`` differs from the new
    solution w by ``h w_k / h_k`` and a constant.
    """
    dtype = x.dtype
    labels, sizes, last = graph.components
    pattern = graph.pattern
    eye = jnp.asarray(pattern.rows == pattern.columns, dtype)
    precision = jnp.asarray(graph.precision, dtype)
    raised = jnp.asarray(graph.grounded - graph.precision, dtype)
    values = (1 - mixing) * precision + mixing * eye + raised
    z = centred(graph, x)
    sides = jnp.stack([z, jnp.ones_like(z)], -1)
    w, h = sparse_cholesky.solve(pattern, values, sides).T
    ratio = jnp.append(w[last] / h[last], 0)[labels]
    pulled = sparse_cholesky.matvec(pattern, precision, z)
    quadratic = pulled @ (w - h * ratio)
    means = sums(graph, x)[:-1] / jnp.asarray(np.sqrt(sizes), dtype)
    quadratic = quadratic + jnp.square(means).sum() / (1 - mixing)
    log_det = sparse_cholesky.log_det(pattern, values) + jnp.log(h[last]).sum()
    log_det = log_det + len(sizes) * jnp.log1p(-mixing)
    return 0.5 * (jnp.asarray(graph.intrinsic.log_det, dtype) - log_det - quadratic)


class GMRF(Field):
    r"""A multivariate normal with a sparse precision: a Gaussian Markov random field.

    :param loc: the mean, a number or (..., n); leading axes are independent fields.
    :param precision: symmetric positive definite (n, n), both triangles stored. A SciPy
        sparse matrix; or a :class:`jax.experimental.sparse.BCOO`, whose values may be
        traced but whose indices may not (in a model, pass it the indices of a BCOO that
        was made outside); or pairs ``[(a, A), (b, B)]`` of a number that may be traced,
        and such a matrix: their sum ``a A + b B``.
    :raises TypeError: for traced indices, and for a dense precision.
    :raises ValueError: for a precision that is not square or not symmetric, whose rows
        add up to zero over a connected component, or a ``loc`` of another length.

    The density is NaN where the precision is not positive definite. For a field with a
    singular precision see :class:`ICAR`.

    **Example**

    >>> import numpy as np, scipy.sparse
    >>> steps = scipy.sparse.diags_array([-1.0, 2.0, -1.0], offsets=[-1, 0, 1],
    ...                                  shape=(4, 4))
    >>> field = GMRF(0.0, [(2.0, steps), (0.1, scipy.sparse.eye_array(4))])
    >>> print(np.asarray(field.variance).round(3))
    [0.373 0.542 0.542 0.373]
    >>> print(f"{field.log_prob(np.zeros(4)):.3f}")
    -1.389
    """

    arg_constraints = {"loc": constraints.real_vector}
    reparametrized_params = ["loc", "values"]
    pytree_data_fields = ("values", "sums")
    pytree_aux_fields = ("pattern",)

    def __init__(
        self, loc: ArrayLike, precision: Any, *, validate_args: bool | None = None
    ) -> None:
        terms = precision if isinstance(precision, list | tuple) else [(1.0, precision)]
        self.pattern, self.values = sparse_terms.sum_of_terms(terms, "precision")
        self.sums = sparse_terms.sums_of_rows(terms)
        _refuse_free_levels(self.pattern, [matrix for _, matrix in terms])
        size = self.pattern.size
        if np.ndim(loc) and np.shape(loc)[-1] not in (1, size):
            raise ValueError(
                f"loc has shape {np.shape(loc)}, and the precision ({size}, {size})"
            )
        dtype = jnp.result_type(loc, self.values)
        self.values = self.values.astype(dtype)
        batch = np.shape(loc)[:-1]
        self.loc = jnp.broadcast_to(jnp.asarray(loc, dtype), (*batch, size))
        super().__init__(batch, (size,), validate_args=validate_args)

    @precise
    def sample(self, key: Array, sample_shape: tuple[int, ...] = ()) -> Array:
        given = self.pattern, self.values, self.sums
        draws = partial(sparse_cholesky.half_solve_with_sums, *given)
        return self.loc + sparse_terms.by_columns(draws, self.white(key, sample_shape))

    @validate_sample
    @precise
    def log_prob(self, value: Array) -> Array:
        x = value - self.loc
        entries = self._sparse_precision().entries
        quadratic = sparse_cholesky.quadratic(self.pattern, entries, x)
        constant = jnp.asarray(self.pattern.size * LOG_2PI, x.dtype)
        return 0.5 * (self._log_det() - constant - quadratic)

    @property
    def mean(self) -> Array:
        return self.loc

    @property
    @precise
    def variance(self) -> Array:
        given = self.pattern, self.values, self.sums
        return jnp.broadcast_to(
            sparse_cholesky.variances_with_sums(*given), self.shape()
        )

    def _sparse_precision(self) -> SparsePrior:
        return SparsePrior(
            self.pattern, self.values, None, self.loc,
            (jnp.ones((), self.loc.dtype),),
            self._log_det, sums=self.sums,
        )  # fmt: skip

    def _log_det(self) -> Array:
        return sparse_cholesky.log_det_with_sums(self.pattern, self.values, self.sums)


def _refuse_free_levels(pattern: Pattern, matrices: list[Any]) -> None:
    """Raise for a connected component whose rows add up to zero in all matrices.

    Otherwise rounding would decide whether a factorisation of the precision fails.

    :param pattern: the places of the entries of all matrices.
    :param matrices: the matrices; BCOO, whose entries may be traced, are not checked.
    """
    if not all(map(sparse.issparse, matrices)):
        return
    free = np.ones(pattern.size, bool)
    for matrix in matrices:
        free &= sparse_terms.row_sums(matrix) == 0
    if not free.any():
        return
    labels = pattern.components
    singular = np.bincount(labels, ~free)[labels] == 0
    if singular.any():
        raise ValueError(
            f"all rows of precision that are connected with row {singular.argmax()} "
            "add up to zero, so that their level is free. Use gpaug.ICAR, or add a "
            "multiple of the identity, [(a, A), (b, scipy.sparse.eye_array(n))]"
        )


def _intrinsic(graph: Graph, noise: Array) -> Array:
    """Return draws of the scaled intrinsic field: of the grounded field, without the
    levels of components."""
    values = jnp.asarray(graph.grounded, noise.dtype)
    factor = sparse_cholesky.factor(graph.pattern, values)
    return centred(graph, sparse_terms.by_columns(factor.half_solve_transposed, noise))


def _row_sums(graph: Graph) -> np.ndarray:
    """Return the sums of the rows of the scaled precision: zero, but for islands."""
    labels, sizes, _ = graph.components
    return np.where(labels == len(sizes), graph.precision[graph.pattern.diagonal], 0)


def _zero_sums(graph: Graph) -> np.ndarray | None:
    labels, sizes, _ = graph.components
    rows = np.arange(len(sizes))[:, None] == labels
    return rows.astype(float) if len(sizes) else None
