# SPDX-License-Identifier: Apache-2.0
"""Sparse Cholesky factors against dense matrices."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from scipy import sparse
from scipy.spatial import Delaunay

from numpyro_gpaug.math import sparse_cholesky, sparse_pattern
from numpyro_gpaug.math.dissection import dissect
from numpyro_gpaug.math.sparse_pattern import Pattern

TOLERANCES = {"float32": 1e-4, "float64": 1e-8}


def of_edges(size, rows, columns):
    """A Laplacian plus a diagonal, with random weights."""
    rng = np.random.default_rng(size)
    w = sparse.coo_array((rng.uniform(0.5, 2, len(rows)), (rows, columns)), (size,) * 2)
    w = (w + w.T).tocsr()
    return (sparse.diags_array(w.sum(0) + rng.uniform(0.3, 1, size)) - w).tocsr()


def lattice(k, j):
    places = np.arange(k * j).reshape(k, j)
    across = places[:, :-1].ravel(), places[:, 1:].ravel()
    down = places[:-1].ravel(), places[1:].ravel()
    return of_edges(k * j, *(np.concatenate(x) for x in zip(across, down, strict=True)))


def mesh(size):
    points = np.random.default_rng(0).random((size, 2))
    triangles = Delaunay(points).simplices
    ends = triangles[:, [0, 1, 2]].ravel(), triangles[:, [1, 2, 0]].ravel()
    return of_edges(size, *ends)


def chain(size):
    return of_edges(size, np.arange(size - 1), np.arange(1, size))


def star(size):
    return of_edges(size, np.zeros(size - 1, int), np.arange(1, size))


def scattered(size):
    """Random edges: separators are not small."""
    ends = np.random.default_rng(1).integers(0, size, (2, 2 * size))
    return of_edges(size, *ends[:, ends[0] != ends[1]])


def components():
    """Three components, and a node without neighbours."""
    return sparse.block_diag(
        [sparse.coo_array(x) for x in (lattice(4, 5), chain(9), np.eye(1), star(6))]
    ).tocsr()


CASES = {
    "lattice": lattice(14, 14), "mesh": mesh(150), "chain": chain(100),
    "star": star(100), "scattered": scattered(100), "components": components(),
    "apart": sparse.block_diag([chain(7)] * 40).tocsr(),
    "single": sparse.csr_array(np.full((1, 1), 2.5)),
}  # fmt: skip
QUICK = {
    "lattice": "float32", "mesh": "float64", "star": "float64",
    "scattered": "float32", "components": "float64", "apart": "float32",
    "single": "float32",
}  # fmt: skip


def values_of(matrix, dtype):
    pattern = Pattern.of(len(matrix.indptr) - 1, *matrix.nonzero())
    dense = matrix.toarray()
    return pattern, jnp.asarray(dense[pattern.rows, pattern.columns], dtype), dense


@jax.jit
def everything(factor, b):
    size = factor.pattern.size
    return {
        "log_det": factor.log_det,
        "solve": factor.solve(b),
        "inverse": factor.selected_inverse(),
        "root": factor.half_solve_transposed(jnp.eye(size, dtype=b.dtype)),
        "half": factor.half_solve(b),
        "back": factor.half_solve_transposed(factor.half_product(b[:, 0])),
    }


@pytest.fixture
def many_groups(monkeypatch, dtype):
    """Put fronts of each depth into a group, in float64: small matrices would have one
    or two groups. Programs of the two dtypes are separate.
    """
    if dtype == "float64":
        monkeypatch.setattr(sparse_pattern, "_GROUP", 0.0)
        monkeypatch.setattr(sparse_pattern, "_FRONT", 0.0)
    sparse_pattern._eliminated.cache_clear()
    yield
    sparse_pattern._eliminated.cache_clear()


@pytest.mark.usefixtures("many_groups")
@pytest.mark.parametrize(
    ("case", "dtype"),
    [
        pytest.param(c, t, marks=() if t in QUICK.get(c, "") else pytest.mark.slow)
        for c in CASES
        for t in ("float32", "float64")
    ],
    indirect=["dtype"],
)
def test_equals_dense(case, dtype):
    pattern, values, dense = values_of(CASES[case], dtype)
    b = np.random.default_rng(2).normal(size=(len(dense), 2))
    found = everything(sparse_cholesky.factor(pattern, values), jnp.asarray(b, dtype))
    product = sparse_cholesky.matvec(pattern, values, jnp.asarray(b, dtype))
    inverse = np.linalg.inv(dense)
    root, rtol = np.asarray(found["root"], float), TOLERANCES[dtype]

    def close(x, y):
        np.testing.assert_allclose(x, y, rtol=rtol, atol=rtol * np.abs(y).max())

    assert all(x.dtype == dtype for x in found.values())
    np.testing.assert_allclose(found["log_det"], np.linalg.slogdet(dense)[1], rtol=rtol)
    close(found["solve"], inverse @ b)
    close(found["inverse"], inverse[pattern.rows, pattern.columns])
    close(root @ root.T, inverse)
    close(np.square(found["half"]).sum(0), np.einsum("ik,ij,jk->k", b, inverse, b))
    close(found["back"], b[:, 0])
    close(product, dense @ b)


def test_large_fronts(dtype):
    """LAPACK factorises them."""
    rng = np.random.default_rng(5)
    root = rng.normal(size=(150, 150))
    matrix = sparse.csr_array(root @ root.T + 150 * np.eye(150))
    pattern, values, dense = values_of(matrix, dtype)
    found = everything(
        sparse_cholesky.factor(pattern, values), jnp.ones((len(dense), 1), dtype)
    )
    inverse, rtol = np.linalg.inv(dense), TOLERANCES[dtype]
    np.testing.assert_allclose(found["log_det"], np.linalg.slogdet(dense)[1], rtol=rtol)
    expected = inverse[pattern.rows, pattern.columns]
    np.testing.assert_allclose(
        found["inverse"], expected, rtol=rtol, atol=rtol * expected.max()
    )
    np.testing.assert_allclose(found["solve"][:, 0], inverse.sum(1), rtol=10 * rtol)
    np.testing.assert_allclose(found["back"], 1, rtol=rtol)


def test_single_precision_of_a_matrix_that_is_almost_singular():
    """The condition number is 1e6. With XLA's biased ``rsqrt`` the log-determinant
    would have an error of .004.
    """
    matrix = lattice(30, 30)
    matrix = -sparse.tril(matrix, -1)
    matrix = matrix + matrix.T
    matrix = (sparse.diags_array(matrix.sum(0) + 1e-5) - matrix).tocsr()
    pattern, values, dense = values_of(matrix, np.float32)
    dense[pattern.rows, pattern.columns] = dense[pattern.columns, pattern.rows] = values
    found = everything(sparse_cholesky.factor(pattern, values), jnp.ones((900, 1)))
    expected = np.linalg.slogdet(dense)[1]
    # An H100 adds in another order: .009.
    tolerance = 2e-3 if jax.default_backend() == "cpu" else 2e-2
    np.testing.assert_allclose(found["log_det"], expected, atol=tolerance)
    inverse = np.linalg.inv(dense)
    expected = inverse[pattern.rows, pattern.columns]
    np.testing.assert_allclose(found["inverse"], expected, rtol=tolerance)
    np.testing.assert_allclose(found["solve"][:, 0], inverse.sum(1), rtol=tolerance)


def test_derivatives(x64):
    pattern, values, _ = values_of(mesh(40), np.float64)
    b = jnp.asarray(np.random.default_rng(3).normal(size=pattern.size))

    def dense(values):
        lower = jnp.zeros((pattern.size,) * 2).at[pattern.rows, pattern.columns]
        lower = lower.set(values)
        return lower + jnp.tril(lower, -1).T

    def with_dense(values, b):
        matrix = dense(values)
        solved = jnp.linalg.solve(matrix, b)
        return jnp.linalg.slogdet(matrix)[1] * jnp.sin(solved).sum()

    def with_sparse(values, b):
        solved = sparse_cholesky.solve(pattern, values, b)
        return sparse_cholesky.log_det(pattern, values) * jnp.sin(solved).sum()

    expected = jax.jit(jax.grad(with_dense, (0, 1)))(values, b)
    found = jax.jit(jax.grad(with_sparse, (0, 1)))(values, b)
    for x, y in zip(found, expected, strict=True):
        np.testing.assert_allclose(x, y, rtol=1e-8, atol=1e-10)
    moved = jax.random.normal(jax.random.key(0), values.shape)
    _, slope = jax.jit(lambda v, t: jax.jvp(lambda v: with_sparse(v, b), (v,), (t,)))(
        values, moved
    )
    np.testing.assert_allclose(slope, expected[0] @ moved, rtol=1e-8)


def test_derivative_of_the_selected_inverse(x64):
    pattern, values, dense = values_of(lattice(4, 4), np.float64)

    def total(values):
        factor = sparse_cholesky.factor(pattern, values)
        return jnp.log(factor.selected_inverse()).sum()

    found = jax.jit(jax.grad(total))(values)
    inverse = np.linalg.inv(dense)
    i, j = pattern.rows, pattern.columns
    weights = np.zeros_like(dense)
    weights[i, j] = 1 / inverse[i, j]
    full = -inverse @ (weights + weights.T) / 2 @ inverse
    np.testing.assert_allclose(found, np.where(i == j, 1, 2) * full[i, j], rtol=1e-8)


def test_vmap():
    pattern, values, _ = values_of(lattice(6, 5), np.float32)
    scales = jnp.array([0.5, 1.0, 3.0])
    b = jnp.ones(pattern.size)

    def both(scale):
        factor = sparse_cholesky.factor(pattern, scale * values)
        return factor.log_det, factor.solve(b), factor.selected_inverse()

    found = jax.jit(jax.vmap(both))(scales)
    log_det, solved, inverse = both(1.0)
    np.testing.assert_allclose(found[0], log_det + pattern.size * np.log(scales), 1e-5)
    np.testing.assert_allclose(found[1], solved / scales[:, None], rtol=1e-5)
    np.testing.assert_allclose(found[2], inverse / scales[:, None], rtol=1e-5)


def test_forms():
    matrix = mesh(60)
    pattern, values, dense = values_of(matrix, np.float32)
    known = sparse_cholesky.factor(pattern, values).selected_inverse()
    triangles = Delaunay(np.random.default_rng(0).random((60, 2))).simplices
    a = np.random.default_rng(4).normal(size=triangles.shape)
    a[0, 1:] = 0
    found = sparse_cholesky.forms(
        pattern, known, jnp.asarray(triangles), jnp.asarray(a)
    )
    inverse = np.linalg.inv(dense)
    full = np.zeros((len(a), 60))
    np.put_along_axis(full, triangles, a, 1)
    expected = np.einsum("ni,ij,nj->n", full, inverse, full)
    np.testing.assert_allclose(found, expected, rtol=1e-4)
    apart = np.argwhere(dense[0] == 0)[0, 0]
    rows = jnp.array([[0, apart], [0, 0]])
    signs = jnp.array([[1.0, 1.0], [1.0, -1.0]])
    found = sparse_cholesky.forms(pattern, known, rows, signs)
    assert np.isnan(found[0])
    assert found[1] == 0


def test_matrices_that_are_not_positive_definite_give_nan():
    pattern, values, _ = values_of(lattice(5, 5), np.float32)
    spoilt = values.at[-1].set(-1.0)
    factor = sparse_cholesky.factor(pattern, spoilt)
    assert np.isnan(factor.log_det)
    assert np.isnan(factor.solve(jnp.ones(pattern.size))).any()
    singular = Pattern.of(2, [1], [0])
    assert np.isnan(sparse_cholesky.log_det(singular, jnp.ones(3)))


def test_separators_are_small():
    """A square lattice is cut along a line of its nodes, and then its halves are."""
    matrix = lattice(32, 32)
    rows, columns = (x.astype(int) for x in matrix.nonzero())
    apart = rows != columns
    depth, code = dissect(1024, rows[apart], columns[apart], 8)
    assert (depth == 0).sum() == 32
    assert (depth == 1).sum() <= 40
    sides = np.bincount(code[depth > 0] >> (depth[depth > 0] - 1))
    assert sides.min() >= 0.45 * 1024
    # No edge joins two parts at one depth.
    i, j = rows[apart], columns[apart]
    level = np.minimum(depth[i], depth[j])
    assert ((code[i] >> (depth[i] - level)) == (code[j] >> (depth[j] - level))).all()


def test_pattern():
    pattern = Pattern.of(4, [0, 3, 3, 2], [1, 0, 0, 2])
    assert pattern.rows.tolist() == [0, 1, 1, 2, 3, 3]
    assert pattern.columns.tolist() == [0, 0, 1, 2, 0, 3]
    places = pattern.places([[0, 0, 3], [1, 2, 1]], [[0, 1, 0], [1, 3, 9]])
    assert places.tolist() == [[0, 1, 4], [2, 6, 6]]
    again = Pattern.of(4, [1, 3], [0, 0])
    assert again == pattern
    assert hash(again) == hash(pattern)
    assert pattern != Pattern.of(4, [1, 3, 3], [0, 0, 2])
    with pytest.raises(ValueError, match="from 0 to 3"):
        Pattern.of(4, [4], [0])


def test_places_of_large_matrices():
    """Keys of pairs would overflow 32 bits."""
    size = 200_000
    pattern = Pattern.of(size, np.arange(size - 1), np.arange(1, size))
    rows = jnp.array([5, 199_998, 199_999, 199_999, 7])
    columns = jnp.array([6, 199_999, 199_999, 199_997, -1])
    found = jax.jit(pattern.places)(rows, columns)
    none = 2 * size - 1
    assert found.tolist() == [11, none - 2, none - 1, none, none]
