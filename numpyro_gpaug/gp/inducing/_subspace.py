# SPDX-License-Identifier: Apache-2.0
"""Inducing inputs in a subspace of inputs with many columns."""

from __future__ import annotations

import operator
import os
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from os import PathLike
from typing import Any, Literal, get_args

import jax
import jax.numpy as jnp
import numpy as np
from jax.typing import ArrayLike
from scipy import sparse
from scipy.linalg import lu

from numpyro_gpaug.math.files import read, refusing, write
from numpyro_gpaug.math.sparse import canonical

from ._choice import float_dtype, kmeans, quiet_and_repeatable, rows_to_keep, some_rows

Method = Literal["svd", "clusters"]

# The number of entries in one block of a pass over the data (32 MiB in float64), and
# the number of columns in one product. SciPy's products read a row of the columns for
# every entry, and short rows cost as much as long ones.
_BLOCK_ENTRIES = 2**22
_BLOCK_COLUMNS = 256

# Each thread holds this many columns of D entries.
_MOST_THREADS = 4

# Directions beyond the rank, and passes, of the randomised iteration. Its error falls
# as (s_{R+1} / s_R) to twice the number of passes; any orthonormal basis is exact.
_OVERSAMPLING = 10
_PASSES = 5

# Multiples of the rounding of |x|^2 below which a squared residual is rounding.
_ROUNDING = 8


class Subspace:
    r"""Inducing inputs :math:`Z = A V` in the span of a few directions.

    With the orthonormal rows of a basis :math:`V`, (R, D), an input :math:`x` of D
    columns is replaced by one of R + 1,

    .. math:: x \mapsto \bigl(V x,\ \sqrt{|x|^2 - |V x|^2}\bigr), \qquad
        a \mapsto (a, 0),

    and so is an inducing input :math:`z = V^\top a`. The transform preserves inner
    products and distances between data and inducing inputs, and among inducing inputs,
    and the norm of an input. With a linear kernel, with stationary kernels of one
    lengthscale (squared exponential, Matern, rational quadratic), and with their sums
    and products, a sparse process on the R + 1 columns *equals* the process on the D
    columns with inducing inputs in the subspace, for any basis. The coordinates
    :math:`a` may be learnt, at a cost that does not depend on D. A periodic kernel
    changes under the transform.

    *Joint predictions.* Distances between two data are not preserved: one non-negative
    column represents everything outside the subspace. Fits, marginal predictions and
    predictions of observations do not need covariances between data.
    ``predict_f(..., full_covariance=True)`` and ``sample`` of a
    :class:`numpyro_gpaug.Posterior` need them: on transformed inputs they are wrong,
    without a warning.

    *A lengthscale per column.* There are R + 1: one for each direction of the subspace,
    and the last one for all directions outside it, so that the distance is exact for
    the metric
    :math:`V^\top \mathrm{diag}(\ell_{1:R}^{-2}) V + \ell_{R+1}^{-2} (I - V^\top V)`. A
    kernel with D lengthscales raises an error for R + 1 columns. (With D = R + 1 there
    is no error, but the columns are the directions, not the original columns.)

    :param basis: V, (R, D), with orthonormal rows; every result has the dtype that JAX
        gives it.
    :raises ValueError: if the rows are not orthonormal.

    A. Panos, P. Dellaportas and M. K. Titsias, *Fully scalable Gaussian processes using
    subspace inducing inputs*, 2018, section 2.2 (linear kernel) and appendix A.6
    (squared exponential). The extra column, which makes it an input transform for any
    isotropic kernel, is an addition of this package.

    .. doctest::

        >>> import numpy as np, scipy.sparse
        >>> from numpyro_gpaug.inducing import Subspace
        >>> counts = np.random.default_rng(0).poisson(0.01, (200, 5000))
        >>> X = scipy.sparse.csr_array(counts)
        >>> subspace = Subspace.fit(X, 20)
        >>> subspace.transform(X).shape
        (200, 21)
        >>> A = subspace.kmeans(X, 10)  # or numpyro.param("A", A)
        >>> subspace.inducing(A).shape
        (10, 21)
    """

    def __init__(self, basis: ArrayLike) -> None:
        basis = np.asarray(basis)
        if basis.ndim != 2 or not 1 <= basis.shape[0] <= basis.shape[1]:
            raise ValueError(
                "basis must be (rank, columns) with no more rows than columns, got "
                f"shape {basis.shape}"
            )
        basis = basis.astype(float_dtype(basis.dtype), copy=False)
        error = np.abs(basis @ basis.T - np.eye(len(basis))).max()
        # Products of D entries accumulate rounding as its root.
        if not error <= 10 * np.finfo(basis.dtype).eps * np.sqrt(basis.shape[1]):
            raise ValueError(
                f"the rows of basis, of shape {basis.shape}, are not orthonormal: "
                f"their inner products differ from 0 and 1 by {error:.1e}; "
                "numpy.linalg.qr makes them so"
            )
        # Contiguous along R: SciPy would copy the whole basis for every sparse product.
        self._directions = np.ascontiguousarray(basis.T)

    @classmethod
    def fit(
        cls, X: Any, rank: int, *, method: Method = "svd", seed: int = 0
    ) -> Subspace:
        """Find a basis for training inputs.

        ``"svd"`` finds the directions of the largest singular values of ``X`` (which is
        not centred), by randomised subspace iteration; if the rank of ``X`` is lower,
        the remaining directions are arbitrary. ``"clusters"`` uses the span of the
        centres of mini-batch k-means. Both read ``X`` in blocks, and need memory for
        arrays of D x rank entries (``"svd"`` for two of them, and one in float64 at the
        end), but for none of N x rank. Products are in float32 if ``X`` is, which takes
        a third of the time.

        N. Halko, P. G. Martinsson and J. A. Tropp, *Finding structure with randomness*,
        SIAM Review 53, 2011, algorithm 4.4.

        :param X: training inputs (N, D): an array, or any SciPy sparse matrix
            (:class:`~scipy.sparse.csr_array`), which is used as CSR; duplicate
            entries add up.
        :param rank: number R of directions.
        :param method: ``"svd"`` or ``"clusters"``.
        :param seed: seed of the start.
        :raises ValueError: for a rank outside 1 .. min(N, D), NaN or infinite inputs.
        """
        if method not in get_args(Method):
            raise ValueError(
                f"method must be one of {get_args(Method)}, got {method!r}"
            )
        X = _as_rows(X)
        if not 1 <= operator.index(rank) <= min(X.shape):
            raise ValueError(
                f"rank must be between 1 and {min(X.shape)} for X of shape {X.shape}, "
                f"got {rank}"
            )
        find = _singular_directions if method == "svd" else _cluster_directions
        return cls(find(X, rank, seed).T.astype(float_dtype(X.dtype)))

    @property
    def basis(self) -> np.ndarray:
        """The orthonormal rows V, (R, D)."""
        return self._directions.T

    @property
    def rank(self) -> int:
        """The number R of directions."""
        return self._directions.shape[1]

    def __repr__(self) -> str:
        columns, rank = self._directions.shape
        return f"Subspace(rank={rank}, columns={columns})"

    def transform(self, X: Any, *, batch_size: int = 4096) -> np.ndarray:
        """Return inputs in R + 1 columns: coordinates in the subspace, and the norm of
        the remainder.

        This runs on the host. With very many rows, transform every minibatch when it is
        drawn, not all rows together.

        :param X: inputs (N, D), an array or a sparse matrix.
        :param batch_size: rows that are made dense or multiplied together.
        :return: transformed inputs, (N, R + 1), in the dtype of the basis.
        :raises ValueError: for another number of columns, NaN or infinite inputs.
        """
        X = _as_rows(X)
        columns, rank = self._directions.shape
        if X.shape[1] != columns:
            raise ValueError(
                f"X of shape {X.shape} must have the {columns} columns of the inputs "
                "the subspace was fitted to"
            )
        if operator.index(batch_size) < 1:
            raise ValueError(f"batch_size must be at least 1, got {batch_size}")
        result = np.empty((X.shape[0], rank + 1), self._directions.dtype)
        for start in range(0, X.shape[0], batch_size):
            rows = slice(start, start + batch_size)
            block = _block(X, rows, result.dtype)
            projected = block @ self._directions
            result[rows, :-1] = projected
            result[rows, -1] = _residual_norms(block, projected)
        return result

    def inducing(self, A: ArrayLike) -> jax.Array:
        """Return inducing inputs in the columns of :meth:`transform`, for use in a
        model.

        :param A: coordinates in the subspace, (M, R) or (C, M, R); may be traced, as a
            :func:`numpyro.param` is.
        :return: (M, R + 1) or (C, M, R + 1): a column of zeros is appended.
        """
        A = jnp.asarray(A)
        if A.ndim < 2 or A.shape[-1] != self.rank:
            raise ValueError(
                f"A of shape {A.shape} must be (num_inducing, {self.rank}): "
                "coordinates in the subspace, without the last column of the "
                "transform"
            )
        return jnp.concatenate([A, jnp.zeros_like(A[..., :1])], -1)

    def kmeans(self, X: Any, num_inducing: int, *, seed: int = 0) -> jax.Array:
        """Return centres of k-means in the subspace, to start :meth:`inducing` from.

        Like :func:`numpyro_gpaug.inducing.kmeans`, it uses a random subset of 20 000
        rows (or ten per centre, if that is more) if there are more rows.

        :param X: training inputs (N, D), an array or a sparse matrix.
        :param num_inducing: number of centres M.
        :param seed: seed of the start and of the subset.
        :return: A, (M, R).
        """
        X = _as_rows(X)
        rng, keep = np.random.default_rng(seed), rows_to_keep(num_inducing)
        rows = some_rows(rng, X.shape[0], keep)
        return kmeans(self.transform(X[rows])[:, :-1], num_inducing, seed=seed)

    def save(self, path: str | PathLike[str]) -> None:
        """Save the basis (``.npz``).

        :param path: the file.
        """
        write(path, {"basis": self.basis}, {"kind": "subspace"})

    @classmethod
    def load(cls, path: str | PathLike[str]) -> Subspace:
        """Load a file that :meth:`save` wrote; nothing is unpickled.

        :param path: the file.
        :raises ArchiveError: if the file is damaged, or does not contain a subspace.
        """
        with refusing(f"{path} is not the file of a subspace, or is damaged"):
            return cls(read(path)[1]["basis"])


def _as_rows(X: Any) -> Any:
    """Return ``X`` as an array or CSR, (N, D)."""
    X = X.tocsr() if sparse.issparse(X) and X.ndim == 2 else X
    X = X if sparse.issparse(X) else np.asarray(X)
    if X.ndim != 2 or 0 in X.shape:
        raise ValueError(
            f"X must be a non-empty array or sparse matrix (N, D), got shape {X.shape}"
        )
    return X


def _block(X: Any, rows: slice, dtype: Any) -> Any:
    """Return checked rows of ``X`` in a dtype; sparse if ``X`` is."""
    block = X[rows].astype(dtype, copy=False)
    if sparse.issparse(X):
        block = canonical(block)
    entries = block.data if sparse.issparse(X) else block
    bad = entries.size - np.count_nonzero(np.isfinite(entries))
    if bad:
        raise ValueError(
            f"X of shape {X.shape} has {bad} NaN or infinite entries in rows "
            f"{rows.start} to {min(rows.stop, X.shape[0]) - 1}"
        )
    return block


def _blocks(X: Any, dtype: Any) -> Iterator[Any]:
    """Yield all rows in a dtype, a bounded number of entries at a time."""
    size = X.shape[0]
    stored = X.nnz if sparse.issparse(X) else X.size
    length = _BLOCK_ENTRIES * size // max(stored, 1)
    length = max(1, min(length, _BLOCK_ENTRIES // _BLOCK_COLUMNS))
    for start in range(0, size, length):
        yield _block(X, slice(start, start + length), dtype)


def _gram_product(X: Any, W: np.ndarray) -> np.ndarray:
    """Compute ``X' (X W)`` without storing all of ``X W``. Columns run in threads,
    because SciPy's products use one thread each and release the lock."""
    result = np.zeros_like(W)
    starts = range(0, W.shape[1], _BLOCK_COLUMNS)
    with ThreadPoolExecutor(min(_MOST_THREADS, os.cpu_count() or 1)) as pool:
        for block in _blocks(X, W.dtype):

            def add(start: int, block: Any = block) -> None:
                columns = slice(start, start + _BLOCK_COLUMNS)
                result[:, columns] += block.T @ (block @ W[:, columns])

            list(pool.map(add, starts))
    return result


def _singular_directions(X: Any, rank: int, seed: int) -> np.ndarray:
    size = min(rank + _OVERSAMPLING, X.shape[1])
    dtype = np.float32 if X.dtype == np.float32 else np.float64
    W = np.random.default_rng(seed).normal(size=(X.shape[1], size)).astype(dtype)
    for _ in range(_PASSES - 1):
        # LU keeps the columns independent, as QR would, in a fraction of the time.
        W = lu(_gram_product(X, W), permute_l=True)[0]
    W = np.linalg.qr(_gram_product(X, W).astype(np.float64))[0]
    # Rayleigh-Ritz: the best directions within the span.
    gram = W.T @ _gram_product(X, W.astype(dtype, copy=False))
    _, vectors = np.linalg.eigh(gram)
    return W @ vectors[:, : -rank - 1 : -1]


def _cluster_directions(X: Any, rank: int, seed: int) -> np.ndarray:
    from sklearn.cluster import MiniBatchKMeans

    if sparse.issparse(X):
        X = _for_scikit_learn(canonical(X))
    for _ in _blocks(X, X.dtype):
        pass  # Read once more, because scikit-learn's error for NaN does not say where.
    estimator = MiniBatchKMeans(
        rank, batch_size=max(1024, rank), n_init=1, compute_labels=False,
        random_state=seed,
    )  # fmt: skip
    with quiet_and_repeatable():
        fit = estimator.fit(X)
    return np.linalg.qr(fit.cluster_centers_.T.astype(np.float64))[0]


def _for_scikit_learn(X: Any) -> Any:
    """Return ``X`` with the 32-bit indices that scikit-learn requires."""
    largest = max(X.nnz, *X.shape)
    if largest > np.iinfo(np.int32).max:
        raise ValueError(
            f'X of shape {X.shape} with {X.nnz} entries is too large for "clusters"; '
            'use method="svd", or a random subset of the rows'
        )
    indices, ends = X.indices.astype(np.int32), X.indptr.astype(np.int32)
    return sparse.csr_array((X.data, indices, ends), shape=X.shape)


def _residual_norms(block: Any, projected: np.ndarray) -> np.ndarray:
    """Return ``|x - V' V x|`` of every row.

    It is the root of a difference of squared norms, which is not negative up to
    rounding. Kernels depend only on its square, whose error is the rounding error of
    |x|^2. (x - V' V x itself would be dense.) A difference within rounding is set to 0,
    because its root would be far above rounding.
    """
    squared = _squared_norms(block)
    residual = squared - _squared_norms(projected)
    floor = _ROUNDING * np.finfo(projected.dtype).eps * squared
    return np.sqrt(np.where(residual > floor, residual, 0))


def _squared_norms(rows: Any) -> np.ndarray:
    if sparse.issparse(rows):
        return sparse.csr_array(rows, dtype=np.float64).power(2).sum(axis=1)
    return np.einsum("ij,ij->i", rows, rows, dtype=np.float64)
