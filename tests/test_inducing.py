# SPDX-License-Identifier: Apache-2.0
"""Choosing inducing inputs."""

import functools

import jax.numpy as jnp
import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from numpyro_gpaug import inducing
from numpyro_gpaug.gp.inducing import _choice
from numpyro_gpaug.kernels import Linear, Matern32, SquaredExponential

METHODS = {
    "kmeans": inducing.kmeans,
    "gmm": inducing.gmm,
    "random": inducing.random,
    "greedy": functools.partial(inducing.greedy, kernel=SquaredExponential()),
}
SEEDED = ["kmeans", "gmm", "random"]


@pytest.fixture(params=METHODS)
def method(request):
    return METHODS[request.param]


def draw(seed, *shape, dtype=np.float32):
    return np.random.default_rng(seed).normal(size=shape).astype(dtype)


def assert_distinct(Z, shape):
    assert Z.shape == shape
    assert np.isfinite(Z).all()
    assert len(np.unique(Z, axis=0)) == len(Z)


def is_row_of(Z, X):
    return (np.asarray(Z)[:, None] == np.asarray(X)[None]).all(-1).any(1)


@pytest.mark.parametrize("num_inducing", [1, 7, 39, 40])
def test_shape_dtype_and_distinctness(method, num_inducing):
    X = draw(0, 40, 3)
    Z = method(X, num_inducing)
    assert_distinct(Z, (num_inducing, 3))
    assert Z.dtype == np.float32
    if num_inducing == 40:
        assert is_row_of(Z, X).all()


def test_inputs_of_any_kind(method):
    X = draw(0, 30)
    assert_distinct(method(X, 5), (5, 1))
    assert method(jnp.asarray(X), 5).dtype == np.float32
    assert method(X.astype(np.float64), 5).dtype == np.float32
    assert method(np.arange(30), 5).dtype == np.float32
    np.testing.assert_array_equal(method(X.tolist(), 5), method(X[:, None], 5))


@pytest.mark.usefixtures("x64")
def test_double_precision(method):
    X = 1e3 + 1e-6 * draw(0, 30, 2, dtype=np.float64)
    Z = method(X, 6)
    assert Z.dtype == np.float64
    assert_distinct(Z, (6, 2))
    assert method(X.astype(np.float32) + draw(1, 30, 2), 6).dtype == np.float32


@pytest.mark.parametrize("name", SEEDED)
def test_the_seed_decides(name):
    X = draw(0, 300, 2)
    first = METHODS[name](X, 20, seed=1)
    np.testing.assert_array_equal(first, METHODS[name](X, 20, seed=1))
    assert not np.array_equal(first, METHODS[name](X, 20, seed=2))


@given(
    rows=st.integers(1, 30),
    columns=st.integers(1, 3),
    levels=st.integers(1, 5),
    scale=st.sampled_from([1e-6, 1.0, 1e6]),
    data=st.data(),
)
@settings(max_examples=15, deadline=None, derandomize=True)
@pytest.mark.parametrize("name", SEEDED)
def test_repeated_rows(name, rows, columns, levels, scale, data):
    rng = np.random.default_rng(rows)
    X = (scale * rng.integers(0, levels, (rows, columns))).astype(np.float32)
    distinct = len(np.unique(X, axis=0))
    num_inducing = data.draw(st.integers(1, distinct))
    assert_distinct(METHODS[name](X, num_inducing), (num_inducing, columns))


def test_repeated_rows_are_chosen_once(method):
    X = np.repeat(draw(0, 12, 2), [200, *[1] * 11], axis=0)
    for num_inducing in (3, 11, 12):
        assert_distinct(method(X, num_inducing), (num_inducing, 2))
    with pytest.raises(ValueError, match="13 exceeds the 12 distinct rows among"):
        method(X, 13)


def test_zeros_of_either_sign_are_one_row(method):
    with pytest.raises(ValueError, match="3 exceeds the 2 distinct rows"):
        method(np.array([0.0, -0.0, 1.0]), 3)


def test_rows_distinct_only_in_double_precision(method):
    X = 1.0 + 1e-12 * np.arange(5.0)
    with pytest.raises(ValueError, match="2 exceeds the 1 distinct rows"):
        method(X, 2)


def test_invalid_arguments(method):
    X = draw(0, 6, 2)
    with pytest.raises(ValueError, match="num_inducing=7 exceeds the 6 rows"):
        method(X, 7)
    with pytest.raises(ValueError, match="at least 1, got 0"):
        method(X, 0)
    with pytest.raises(TypeError, match="integer"):
        method(X, 2.5)
    for empty in (X[:0], X[:, :0], np.ones((2, 2, 2)), np.float32(1)):
        with pytest.raises(ValueError, match="X must be a non-empty"):
            method(empty, 1)
    for bad in (np.nan, np.inf):
        X[3, 1] = bad
        with pytest.raises(ValueError, match=r"X of shape \(6, 2\) has 1 NaN or inf"):
            method(X, 2)


@pytest.mark.parametrize("name", ["kmeans", "gmm"])
def test_finds_clusters(name):
    centres = np.array([[0.0, 0.0], [10.0, 0.0], [0.0, 10.0]], np.float32)
    X = np.repeat(centres, 50, axis=0) + 0.1 * draw(0, 150, 2)
    Z = METHODS[name](X, 3)
    distance = np.linalg.norm(Z[:, None] - centres, axis=-1)
    assert distance.min(0).max() < 0.1


@pytest.mark.usefixtures("x64")
def test_kmeans_counts_repeated_rows():
    X = np.repeat([0.0, 1.0, 10.0], [9, 1, 5])
    np.testing.assert_allclose(np.sort(inducing.kmeans(X, 2)[:, 0]), [0.1, 10.0])


@pytest.mark.parametrize("name", ["kmeans", "gmm"])
def test_many_rows_are_subsampled(name, monkeypatch):
    monkeypatch.setattr(_choice, "_MAX_ROWS", 200)
    X = draw(0, 5000, 2)
    Z = METHODS[name](X, 10)
    assert_distinct(Z, (10, 2))
    np.testing.assert_array_equal(Z, METHODS[name](X, 10))


def test_repeated_centres_are_replaced():
    rows = draw(0, 6, 2)
    centres = np.stack([rows[0], rows[0], rows[1]])
    Z = _choice._complete(np.random.default_rng(0), centres, rows)
    assert_distinct(Z, (3, 2))
    assert is_row_of(Z, rows).all()


@pytest.mark.usefixtures("x64")
@pytest.mark.parametrize("kernel", [SquaredExponential(0.5), Matern32(2.0, 3.0)])
def test_greedy_takes_the_largest_conditional_variance(kernel):
    X = draw(0, 40, 2, dtype=np.float64)
    K = np.asarray(kernel(X, X))
    chosen = [0]
    for _ in range(9):
        solved = np.linalg.solve(K[np.ix_(chosen, chosen)], K[chosen])
        chosen.append(int(np.argmax(np.diag(K) - np.sum(K[chosen] * solved, axis=0))))
    np.testing.assert_array_equal(inducing.greedy(X, 10, kernel=kernel), X[chosen])


def test_greedy_with_a_kernel_of_low_rank():
    X = np.linspace(-1, 1, 9, dtype=np.float32)
    Z = inducing.greedy(X, 9, kernel=Linear())
    assert_distinct(Z, (9, 1))
    assert abs(Z[0, 0]) == 1


def test_greedy_with_a_function():
    X = draw(0, 20)
    Z = inducing.greedy(X, 5, kernel=lambda x, z: jnp.exp(-((x[:, None] - z) ** 2) / 2))
    np.testing.assert_array_equal(Z, METHODS["greedy"](X, 5))


def test_greedy_refuses_several_latents():
    with pytest.raises(ValueError, match=r"single latent.*\(3, 20\)"):
        inducing.greedy(draw(0, 20), 5, kernel=SquaredExponential(variance=np.ones(3)))
