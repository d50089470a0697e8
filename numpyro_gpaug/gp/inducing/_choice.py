# SPDX-License-Identifier: Apache-2.0
"""Inducing inputs from dense training inputs."""

from __future__ import annotations

import contextlib
import operator
import warnings
from collections.abc import Iterator
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax.typing import ArrayLike

from numpyro_gpaug.gp.kernels import as_kernel
from numpyro_gpaug.math.sharding import some_of_all

# More rows than this move the centres little and cost a great deal.
_MAX_ROWS = 20_000
_MAX_ITERATIONS = 100


def kmeans(X: ArrayLike, num_inducing: int, *, seed: int = 0) -> jax.Array:
    """Return centres of k-means, started from k-means++.

    With more than 20 000 distinct rows (or ten per centre, if that is more) the centres
    are computed from a random subset of that size. If several processes share the rows,
    all of them get the same centres of all rows.

    :param X: training inputs ``(N, D)``.
    :param num_inducing: number of centres.
    :param seed: seed of the start and of the subset.
    :return: ``(num_inducing, D)``.

    .. doctest::

        >>> import jax.numpy as jnp
        >>> from numpyro_gpaug.inducing import kmeans
        >>> Z = kmeans(jnp.array([0.0, 0.2, 5.0, 5.2]), 2)
        >>> print([f"{z:.2f}" for z in sorted(Z[:, 0])])
        ['0.10', '5.10']
    """
    rows, counts = _distinct_rows(X, num_inducing)
    if len(rows) == num_inducing:
        return jnp.asarray(rows)
    from sklearn.cluster import KMeans

    rng = np.random.default_rng(seed)
    subset = some_rows(rng, len(rows), rows_to_keep(num_inducing))
    estimator = KMeans(num_inducing, n_init=1, **_settings(rng))
    with quiet_and_repeatable():
        fit = estimator.fit(rows[subset], sample_weight=counts[subset])
    return _complete(rng, fit.cluster_centers_, rows)


def gmm(X: ArrayLike, num_inducing: int, *, seed: int = 0) -> jax.Array:
    """Return means of a Gaussian mixture with diagonal covariances, started from
    k-means.

    With more than 20 000 rows (or ten per component, if that is more) the mixture is
    fitted to a random subset of that size.

    :param X: training inputs ``(N, D)``.
    :param num_inducing: number of components.
    :param seed: seed of the start and of the subset.
    :return: ``(num_inducing, D)``.

    .. doctest::

        >>> import jax.numpy as jnp
        >>> from numpyro_gpaug.inducing import gmm
        >>> Z = gmm(jnp.array([0.0, 0.2, 5.0, 5.2]), 2)
        >>> print([f"{z:.2f}" for z in sorted(Z[:, 0])])
        ['0.10', '5.10']
    """
    rows, counts = _distinct_rows(X, num_inducing)
    if len(rows) == num_inducing:
        return jnp.asarray(rows)
    from sklearn.mixture import GaussianMixture

    rng = np.random.default_rng(seed)
    data = np.repeat(rows, counts, axis=0)
    data = data[some_rows(rng, len(data), rows_to_keep(num_inducing))]
    # The mixture adds an absolute constant to its variances, which suits unit scale.
    shift, scale = data.mean(0), data.std(0)
    scale = np.where(scale > 0, scale, 1)
    estimator = GaussianMixture(num_inducing, covariance_type="diag", **_settings(rng))
    with quiet_and_repeatable():
        fit = estimator.fit(((data - shift) / scale).astype(np.float64))
    return _complete(rng, fit.means_ * scale + shift, rows)


def random(X: ArrayLike, num_inducing: int, *, seed: int = 0) -> jax.Array:
    """Return distinct rows of ``X``, drawn at random without replacement.

    :param X: training inputs ``(N, D)``.
    :param num_inducing: number of rows.
    :param seed: seed of the draw.
    :return: ``(num_inducing, D)``.

    .. doctest::

        >>> import jax.numpy as jnp
        >>> from numpyro_gpaug.inducing import random
        >>> random(jnp.arange(10.0), 3).shape
        (3, 1)
    """
    rows, _ = _distinct_rows(X, num_inducing)
    rng = np.random.default_rng(seed)
    return jnp.asarray(rows[rng.choice(len(rows), num_inducing, replace=False)])


def greedy(X: ArrayLike, num_inducing: int, *, kernel: Any) -> jax.Array:
    """Return rows of ``X``, each with the largest variance given the earlier ones.

    This is the pivoted Cholesky decomposition of the kernel matrix, in time
    :math:`O(N M^2)` and memory :math:`O(N M)`. Rows past the numerical rank of the
    kernel are arbitrary.

    :param X: training inputs ``(N, D)``.
    :param num_inducing: number of rows.
    :param kernel: a kernel of one latent, or a plain function ``k(X, Z) -> (N, M)``.
    :return: ``(num_inducing, D)``, in the order of choice.

    .. doctest::

        >>> import jax.numpy as jnp
        >>> from numpyro_gpaug.inducing import greedy
        >>> from numpyro_gpaug.kernels import SquaredExponential
        >>> X = jnp.array([0.0, 0.1, 0.2, 3.0])
        >>> print(greedy(X, 2, kernel=SquaredExponential())[:, 0])
        [0. 3.]
    """
    rows = jnp.asarray(_distinct_rows(X, num_inducing)[0])
    kernel = as_kernel(kernel)
    # Functions for one-dimensional inputs receive them in the user's shape.
    points = rows[:, 0] if np.ndim(X) == 1 else rows
    prior = jnp.asarray(kernel(points))
    if prior.shape != (len(rows),):
        raise ValueError(
            "greedy needs the kernel of a single latent, but its diagonal at "
            f"{len(rows)} rows has shape {prior.shape}"
        )
    # A variance below round-off is noise; dividing by it would spread the noise.
    floor = jnp.finfo(prior.dtype).eps * prior + jnp.finfo(prior.dtype).tiny

    def choose(i: jax.Array, state: tuple) -> tuple:
        factor, variance, taken, chosen = state
        pivot = jnp.argmax(jnp.where(taken, -1, variance))
        covariance = kernel(points[pivot][None], points)[0] - jnp.matmul(
            factor[:, pivot], factor, precision=jax.lax.Precision.HIGHEST
        )
        row = covariance / jnp.sqrt(jnp.maximum(variance[pivot], floor[pivot]))
        variance = jnp.maximum(variance - jnp.square(row), 0)
        taken, chosen = taken.at[pivot].set(True), chosen.at[i].set(pivot)
        return factor.at[i].set(row), variance, taken, chosen

    factor = jnp.zeros((num_inducing, len(rows)), prior.dtype)
    first = factor, prior, jnp.zeros(len(rows), bool), jnp.zeros(num_inducing, int)
    *_, chosen = jax.lax.fori_loop(0, num_inducing, choose, first)
    return rows[chosen]


def _distinct_rows(X: ArrayLike, num_inducing: int) -> tuple[np.ndarray, np.ndarray]:
    """Check the arguments; return the distinct rows in order, and their counts."""
    if operator.index(num_inducing) < 1:
        raise ValueError(f"num_inducing must be at least 1, got {num_inducing}")
    rows = some_of_all(X, rows_to_keep(num_inducing))
    shape = rows.shape
    if rows.ndim not in (1, 2) or rows.size == 0:
        raise ValueError(f"X must be a non-empty (N, D) or (N,), got shape {shape}")
    # Rows that are distinct in the caller's float64 may not be in JAX's float32.
    rows = rows.reshape(len(rows), -1).astype(float_dtype(rows.dtype))
    bad = rows.size - np.count_nonzero(np.isfinite(rows))
    if bad:
        raise ValueError(f"X of shape {shape} has {bad} NaN or infinite entries")
    if len(rows) < num_inducing:
        raise ValueError(f"num_inducing={num_inducing} exceeds the {len(rows)} rows")
    # Comparing rows as bytes is far quicker than np.unique(axis=0); adding 0 makes -0
    # and 0 the same.
    rows = np.ascontiguousarray(rows + 0)
    whole = rows.view(np.dtype((np.void, rows.strides[0])))[:, 0]
    _, first, counts = np.unique(whole, return_index=True, return_counts=True)
    if len(first) < num_inducing:
        raise ValueError(
            f"num_inducing={num_inducing} exceeds the {len(first)} distinct rows "
            f"among the {len(rows)} rows of X"
        )
    order = np.argsort(first)
    return rows[first[order]], counts[order]


def float_dtype(dtype: Any) -> np.dtype:
    """Return the floating dtype that JAX gives inputs of a NumPy dtype."""
    found = jnp.asarray(np.empty(0, dtype)).dtype
    return found if jnp.issubdtype(found, jnp.floating) else jnp.result_type(float)


def rows_to_keep(num_inducing: int) -> int:
    """Return the number of rows from which a number of centres is computed."""
    return max(_MAX_ROWS, 10 * num_inducing)


def some_rows(rng: np.random.Generator, size: int, keep: int) -> Any:
    """Return indices of a number of random rows, in order."""
    if size <= keep:
        return slice(None)
    return np.sort(rng.choice(size, keep, replace=False))


def _complete(
    rng: np.random.Generator, centres: np.ndarray, rows: np.ndarray
) -> jax.Array:
    """Replace repeated centres, such as centres of empty clusters, by random rows."""
    centres = centres.astype(rows.dtype) + 0
    seen = {centre.tobytes(): centre for centre in centres}
    for i in rng.permutation(len(rows)):
        if len(seen) == len(centres):
            break
        seen.setdefault(rows[i].tobytes(), rows[i])
    return jnp.asarray(np.stack(list(seen.values())))


def _settings(rng: np.random.Generator) -> dict[str, int]:
    return {"max_iter": _MAX_ITERATIONS, "random_state": int(rng.integers(2**31))}


@contextlib.contextmanager
def quiet_and_repeatable() -> Iterator[None]:
    """Silence convergence warnings; add up sums in a fixed order."""
    from sklearn.exceptions import ConvergenceWarning
    from threadpoolctl import threadpool_limits

    # Centres serve as well unconverged. With several threads scikit-learn adds partial
    # sums in the order in which the threads finish.
    with warnings.catch_warnings(), threadpool_limits(1, user_api="openmp"):
        warnings.simplefilter("ignore", ConvergenceWarning)
        yield
