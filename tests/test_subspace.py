# SPDX-License-Identifier: Apache-2.0
"""Inducing inputs in a subspace."""

import tracemalloc

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from scipy import sparse
from sklearn.utils.extmath import randomized_svd

import numpyro_gpaug as gpaug
from numpyro_gpaug.gp.inducing import _subspace
from numpyro_gpaug.inducing import Subspace
from numpyro_gpaug.kernels import (
    Linear,
    Matern12,
    Matern32,
    Matern52,
    RationalQuadratic,
    SquaredExponential,
)

from .conftest import assert_close, slow

KERNELS = [
    Linear(0.7),
    SquaredExponential(2.5, 1.3),
    Matern12(3.0, 0.4),
    Matern32(2.0),
    Matern52(4.0, 2.0) + Linear(0.1),
    RationalQuadratic(2.0, 1.5, 0.7) * Matern32(5.0),
]


def draw(seed, *shape):
    return np.random.default_rng(seed).normal(size=shape)


def draw_sparse(seed, rows, columns, density, dtype="float64"):
    rng = np.random.default_rng(seed)
    kept = rng.random((rows, columns)) < density
    return sparse.csr_array((rng.normal(size=kept.shape) * kept).astype(dtype))


def projector(subspace):
    return subspace.basis.T @ subspace.basis


@jax.jit
def evaluate(kernel, *inputs):
    return kernel(*inputs)


@jax.jit
def evaluate_all(kernel, X, Z):
    return kernel(X, Z), kernel(Z, Z), kernel(X), kernel(Z)


@pytest.mark.parametrize("kernel", KERNELS, ids=lambda k: type(k).__name__)
def test_kernels_are_those_of_the_original_inputs(kernel, dtype):
    X, A = draw(0, 40, 12).astype(dtype), draw(1, 7, 5).astype(dtype)
    subspace = Subspace.fit(X, 5)
    Z = A @ subspace.basis
    inputs, inducing = subspace.transform(X), subspace.inducing(A)
    assert inputs.dtype == inducing.dtype == dtype
    assert inputs.shape == (40, 6)
    factor = 3.0 if dtype == "float32" else 1.0
    ours = evaluate_all(kernel, inputs, inducing)
    for found, original in zip(ours, evaluate_all(kernel, X, Z), strict=True):
        assert_close(found, original, factor)


def test_covariances_between_data_are_others():
    X = draw(0, 40, 12).astype("float32")
    subspace = Subspace.fit(X, 5)
    inputs, kernel = subspace.transform(X), Linear()
    ours = np.asarray(evaluate(kernel, inputs, inputs))
    assert np.abs(ours - X @ X.T).max() > 1


def test_lengthscales_act_in_the_subspace_and_the_last_one_outside(dtype):
    X, A = draw(0, 30, 9).astype(dtype), draw(1, 6, 4).astype(dtype)
    subspace = Subspace.fit(X, 4)
    lengthscale = np.array([0.5, 1.0, 2.0, 4.0, 3.0], dtype)
    V = subspace.basis.astype(float)
    inside = V.T @ np.diag(lengthscale[:4] ** -2.0) @ V
    metric = inside + (np.eye(9) - V.T @ V) / lengthscale[4] ** 2
    difference = X[:, None].astype(float) - A @ V
    squared = np.einsum("nmd,de,nme->nm", difference, metric, difference)
    kernel = SquaredExponential(lengthscale)
    actual = evaluate(kernel, subspace.transform(X), subspace.inducing(A))
    assert_close(actual, np.exp(-squared / 2), 3.0)


def test_a_lengthscale_per_original_column_is_refused():
    X = draw(0, 30, 9).astype("float32")
    subspace = Subspace.fit(X, 4)
    kernel = SquaredExponential(np.ones(9, "float32"))
    inputs = subspace.transform(X)
    with pytest.raises(ValueError, match=r"lengthscale of shape \(9,\).*\(30, 5\)"):
        kernel(inputs, subspace.inducing(np.ones((2, 4), "float32")))
    with pytest.raises(ValueError, match=r"lengthscale of shape \(9,\).*\(30, 5\)"):
        kernel(inputs)


@pytest.mark.usefixtures("x64")
def test_singular_vectors():
    X = draw(0, 120, 60) * 0.9 ** np.arange(60)
    _, s, V = np.linalg.svd(X, full_matrices=False)
    subspace = Subspace.fit(X, 8)
    overlap = np.abs(np.sum(subspace.basis * V[:8], axis=1))
    np.testing.assert_allclose(overlap, 1, atol=1e-6)
    kept = np.linalg.norm(X @ subspace.basis.T)
    rival = randomized_svd(X, 8, random_state=0)[2]
    assert kept >= np.linalg.norm(X @ rival.T) * (1 - 1e-9)
    assert kept <= np.linalg.norm(s[:8]) * (1 + 1e-12)


@pytest.mark.usefixtures("x64")
def test_a_low_rank_is_found_and_completed():
    X = draw(0, 80, 4) @ draw(1, 4, 30)
    subspace = Subspace.fit(X, 6)
    assert_close(projector(subspace) @ X.T, X.T, 100.0)
    np.testing.assert_array_equal(subspace.transform(X)[:, -1], 0)
    assert_close(Subspace.fit(np.zeros((5, 4)), 3).basis @ np.ones((4, 0)), 0)


@pytest.mark.usefixtures("x64")
def test_all_columns():
    X = draw(0, 20, 6)
    assert_close(projector(Subspace.fit(X, 6)), np.eye(6))
    assert_close(projector(Subspace.fit(X[:3], 3)) @ X[:3].T, X[:3].T)


@pytest.mark.usefixtures("x64")
def test_clusters():
    centres = np.eye(3, 40) * 10
    X = np.repeat(centres, 60, axis=0) + 0.01 * draw(0, 180, 40)
    dense = Subspace.fit(X, 3, method="clusters")
    np.testing.assert_allclose(projector(dense) @ centres.T, centres.T, atol=0.1)
    same = Subspace.fit(sparse.csr_array(X), 3, method="clusters")
    np.testing.assert_allclose(projector(dense), projector(same), atol=1e-2)
    assert_close(dense.basis @ dense.basis.T, np.eye(3))


@pytest.mark.parametrize("method", ["svd", "clusters"])
def test_indices_of_64_bits(method):
    X = draw_sparse(0, 100, 30, 0.2, "float32")
    indices, ends = X.indices.astype("int64"), X.indptr.astype("int64")
    long = sparse.csr_array((X.data, indices, ends), shape=X.shape)
    assert long.indices.dtype == "int64"
    subspace = Subspace.fit(long, 4, method=method)
    assert_close(subspace.basis, Subspace.fit(X, 4, method=method).basis, 10.0)
    assert_close(subspace.transform(long), subspace.transform(X))


@pytest.mark.parametrize("form", ["csr_matrix", "csr_array", "csc_array", "coo_array"])
def test_sparse_inputs_are_dense_ones(form, dtype):
    dense = draw_sparse(0, 70, 25, 0.2, dtype).toarray()
    dense[:, 3] = dense[10] = 0
    X = getattr(sparse, form)(dense)
    subspace = Subspace.fit(X, 6)
    assert_close(projector(subspace), projector(Subspace.fit(dense, 6)), 30.0)
    assert_close(subspace.transform(X) ** 2, subspace.transform(dense) ** 2)
    np.testing.assert_array_equal(subspace.transform(X)[10], 0)


@pytest.mark.usefixtures("x64")
def test_unsorted_and_repeated_entries():
    X = draw_sparse(0, 70, 25, 0.2)
    data = np.concatenate([X.data, X.data])[::-1] / 2
    rows, columns = X.nonzero()
    order = np.argsort(np.tile(rows, 2)[::-1], kind="stable")
    messy = sparse.csr_array(
        (data[order], np.tile(columns, 2)[::-1][order], 2 * X.indptr), shape=X.shape
    )
    assert not messy.has_canonical_format
    kept = messy.indices.copy()
    subspace = Subspace.fit(messy, 6)
    assert_close(projector(subspace), projector(Subspace.fit(X, 6)), 100.0)
    assert_close(subspace.transform(messy), subspace.transform(X), 100.0)
    np.testing.assert_array_equal(messy.indices, kept)


@pytest.mark.usefixtures("x64")
@pytest.mark.parametrize("as_sparse", [True, False])
def test_blocks_do_not_matter(as_sparse, monkeypatch):
    X = draw_sparse(0, 70, 25, 0.2)
    X = X if as_sparse else X.toarray()
    subspace = Subspace.fit(X, 6)
    whole = subspace.transform(X)
    for size in (1, 13, 70):
        assert_close(subspace.transform(X, batch_size=size), whole)
    monkeypatch.setattr(_subspace, "_BLOCK_ENTRIES", 90)
    monkeypatch.setattr(_subspace, "_BLOCK_COLUMNS", 5)
    assert_close(projector(Subspace.fit(X, 6)), projector(subspace), 100.0)


def test_dtypes():
    X = draw(0, 20, 6)
    # JAX holds float32 here.
    assert Subspace.fit(X, 2).transform(X).dtype == "float32"
    assert Subspace.fit(np.round(X).astype(int), 2).basis.dtype == "float32"
    assert Subspace.fit(sparse.csr_array(X > 0), 2).basis.dtype == "float32"
    assert Subspace.fit(jnp.asarray(X), 2).basis.dtype == "float32"


def test_kmeans_starts_from_the_subspace(monkeypatch):
    X = draw_sparse(0, 300, 25, 0.2, "float32")
    subspace = Subspace.fit(X, 6)
    A = subspace.kmeans(X, 10, seed=3)
    assert A.shape == (10, 6)
    expected = gpaug.inducing.kmeans(subspace.transform(X)[:, :-1], 10, seed=3)
    np.testing.assert_array_equal(A, expected)
    monkeypatch.setattr(_subspace, "rows_to_keep", lambda num_inducing: 50)
    assert subspace.kmeans(X, 10).shape == (10, 6)


def test_saved_and_loaded(tmp_path):
    subspace = Subspace.fit(draw(0, 20, 6), 3)
    subspace.save(tmp_path / "basis")
    loaded = Subspace.load(tmp_path / "basis")
    np.testing.assert_array_equal(loaded.basis, subspace.basis)
    assert loaded.rank == 3
    assert repr(loaded) == "Subspace(rank=3, columns=6)"


def test_one_set_of_inducing_inputs_per_latent():
    subspace = Subspace(np.eye(3, 8))
    A = draw(0, 4, 5, 3).astype("float32")
    Z = subspace.inducing(A)
    assert Z.shape == (4, 5, 4)
    np.testing.assert_array_equal(Z[..., :3], A)
    np.testing.assert_array_equal(Z[..., 3], 0)


@pytest.mark.parametrize(
    ("method", "size", "rank"),
    [
        ("svd", 1_000_000, 50),
        slow("clusters", 200_000, 60),
    ],
)
def test_tall_sparse_inputs_stay_small(method, size, rank):
    columns = 100
    rng = np.random.default_rng(0)
    indices = rng.integers(0, columns // 2, (size, 2)) + [0, columns // 2]
    X = sparse.csr_array(
        (
            np.ones(2 * size, "float32"),
            indices.ravel().astype("int32"),
            np.arange(0, 2 * size + 1, 2, dtype="int32"),
        ),
        shape=(size, columns),
    )
    assert X.has_canonical_format
    Subspace.fit(X[:200], 2, method=method)  # imports
    tracemalloc.start()
    Subspace.fit(X, rank, method=method)
    peak = tracemalloc.get_traced_memory()[1]
    tracemalloc.stop()
    # A fraction of N x rank numbers in float32.
    assert peak < 0.3 * 4 * size * rank, peak


def test_invalid_arguments():
    X = draw(0, 8, 5)
    for rank in (0, 6, -1):
        with pytest.raises(
            ValueError, match=rf"between 1 and 5 .*\(8, 5\), got {rank}"
        ):
            Subspace.fit(X, rank)
    with pytest.raises(ValueError, match="between 1 and 3"):
        Subspace.fit(X[:3], 4)
    with pytest.raises(TypeError, match="integer"):
        Subspace.fit(X, 2.5)
    with pytest.raises(ValueError, match="method must be one of .*'pca'"):
        Subspace.fit(X, 2, method="pca")
    for bad in (X[:0], X[0], np.ones((2, 2, 2)), sparse.csr_array((0, 3))):
        with pytest.raises(ValueError, match="X must be a non-empty"):
            Subspace.fit(bad, 1)
    subspace = Subspace.fit(X, 2)
    with pytest.raises(ValueError, match=r"\(8, 4\) must have the 5 columns"):
        subspace.transform(X[:, :4])
    with pytest.raises(ValueError, match="batch_size must be at least 1, got 0"):
        subspace.transform(X, batch_size=0)
    with pytest.raises(ValueError, match=r"A of shape \(4, 3\) must be .*2\)"):
        subspace.inducing(np.ones((4, 3)))
    with pytest.raises(ValueError, match=r"A of shape \(2,\)"):
        subspace.inducing(np.ones(2))


@pytest.mark.parametrize("method", ["svd", "clusters"])
@pytest.mark.parametrize("bad", [np.nan, np.inf])
def test_entries_that_are_not_finite(method, bad):
    X = draw(0, 8, 5)
    subspace = Subspace.fit(X, 2)
    X[3, 1] = bad
    for inputs in (X, sparse.csr_array(X)):
        with pytest.raises(
            ValueError, match="1 NaN or infinite entries in rows 0 to 7"
        ):
            Subspace.fit(inputs, 2, method=method)
        with pytest.raises(ValueError, match="entries in rows 2 to 3"):
            subspace.transform(inputs, batch_size=2)


def test_bases_that_are_not_orthonormal():
    with pytest.raises(ValueError, match="not orthonormal.*by 3.0e"):
        Subspace(2 * np.eye(2, 4))
    with pytest.raises(ValueError, match="not orthonormal.*by nan"):
        Subspace(np.full((1, 3), np.nan))
    for shape in ((4, 2), (3,), (0, 3)):
        with pytest.raises(ValueError, match="basis must be"):
            Subspace(np.zeros(shape))
