# SPDX-License-Identifier: Apache-2.0
"""Top labels and the metrics of a ranking."""

import jax.numpy as jnp
import numpy as np
import pytest
from scipy import sparse
from sklearn.metrics import ndcg_score

from numpyro_gpaug import ranking

from .conftest import assert_close, slow_in_double


def draw(seed, rows=30, labels=17, density=0.15):
    rng = np.random.default_rng(seed)
    truth = (rng.random((rows, labels)) < density).astype(int)
    truth[0], truth[1] = 0, 1
    return rng.normal(size=(rows, labels)).astype("float32"), truth


def by_sorting(scores, k):
    return np.argsort(-scores, axis=1, kind="stable")[:, :k]


def blocks_of(scores):
    return lambda labels: scores[:, labels]


@pytest.mark.parametrize(("k", "block_size"), [(1, 5), (5, 1), (5, 100), (17, 17)])
def test_top_k_is_that_of_a_sort(k, block_size):
    scores, _ = draw(0)
    scores = np.round(scores, 1)  # ties
    top = ranking.top_k(blocks_of(scores), 17, k, block_size=block_size)
    np.testing.assert_array_equal(top.labels, by_sorting(scores, k))
    expected = np.take_along_axis(scores, by_sorting(scores, k), 1)
    np.testing.assert_array_equal(top.scores, expected)


def test_blocks_cover_the_labels_once():
    asked = []

    def scores(labels):
        asked.append(labels)
        return jnp.zeros((2, labels.stop - labels.start))

    labels = ranking.top_k(scores, 10, 3, block_size=4).labels
    assert asked == [slice(0, 4), slice(4, 8), slice(8, 10)]
    np.testing.assert_array_equal(labels, [[0, 1, 2]] * 2)


def test_scores_of_minus_infinity():
    scores = np.full((1, 6), -np.inf, "float32")
    scores[0, 4] = 0
    labels = ranking.top_k(blocks_of(scores), 6, 3, block_size=2).labels
    np.testing.assert_array_equal(labels, [[4, 0, 1]])


@slow_in_double
def test_linear_scores(dtype):
    rng = np.random.default_rng(0)
    h, loadings, bias = (
        rng.normal(size=shape).astype(dtype) for shape in [(8, 3), (50, 3), 50]
    )
    top = ranking.linear_top_k(h, loadings, bias, 4, block_size=16)
    scores = h @ loadings.T + bias
    np.testing.assert_array_equal(top.labels, by_sorting(scores, 4))
    assert_close(top.scores, -np.sort(-scores)[:, :4])
    assert top.scores.dtype == dtype
    same = ranking.linear_top_k(h, loadings, 0.0, 4).labels
    np.testing.assert_array_equal(same, by_sorting(h @ loadings.T, 4))


@pytest.mark.parametrize("k", [1, 3, 5])
def test_metrics_by_dense_loops(k):
    scores, truth = draw(1)
    top, labels = by_sorting(scores, 5), sparse.csr_matrix(truth)
    p = np.linspace(0.1, 1, 17)
    precision, scored, best = [], 0.0, 0.0
    for row, first in zip(truth, top[:, :k], strict=True):
        precision.append(sum(row[label] for label in first) / k)
        scored += sum(row[label] / p[label] for label in first)
        best += sum(sorted(row / p, reverse=True)[:k])
    assert ranking.precision_at_k(top, labels, k) == pytest.approx(np.mean(precision))
    actual = ranking.propensity_scored_precision_at_k(top, labels, k, p)
    assert actual == pytest.approx(scored / best)


@pytest.mark.parametrize("k", [1, 3, 5, 17])
def test_ndcg_is_that_of_scikit_learn(k):
    scores, truth = draw(2)
    actual = ranking.ndcg_at_k(by_sorting(scores, k), sparse.csr_array(truth), k)
    assert actual == pytest.approx(ndcg_score(truth, scores, k=k))


def test_propensities_by_the_printed_formula():
    _, truth = draw(4, rows=200)
    a, b, size = 0.6, 2.6, 200
    C = (np.log(size) - 1) * (b + 1) ** a
    expected = 1 / (1 + C * np.exp(-a * np.log(truth.sum(0) + b)))
    actual = ranking.propensities(sparse.csr_array(truth), a=a, b=b)
    np.testing.assert_allclose(actual, expected, rtol=1e-12)


def test_stored_zeros_and_any_sparse_format():
    scores, truth = draw(6)
    top = by_sorting(scores, 3)
    stored = sparse.csr_array(np.ones_like(truth))
    stored.data[:] = truth.ravel()
    expected = ranking.precision_at_k(top, sparse.csr_array(truth), 3)
    for labels in (stored, sparse.coo_matrix(truth), sparse.csc_array(truth == 1)):
        assert ranking.precision_at_k(top, labels, 3) == expected
        assert ranking.ndcg_at_k(top, labels, 3) == ranking.ndcg_at_k(
            top, sparse.csr_array(truth), 3
        )
    assert stored.nnz == truth.size


def test_invalid_arguments():
    scores, truth = draw(7)
    labels, top = sparse.csr_array(truth), by_sorting(scores, 3)
    for k in (0, 18):
        with pytest.raises(ValueError, match=f"between 1 and 17, got {k}"):
            ranking.top_k(blocks_of(scores), 17, k)
    with pytest.raises(ValueError, match="block_size must be"):
        ranking.top_k(blocks_of(scores), 17, 1, block_size=0)
    with pytest.raises(ValueError, match=r"has shape \(17,\), expected"):
        ranking.top_k(lambda block: scores[0, block], 17, 1)
    with pytest.raises(ValueError, match=r"slice\(8, 16, None\)\) has shape \(16, 8\)"):
        ranking.top_k(lambda b: np.zeros((b.stop, 8)), 17, 1, block_size=8)
    scores[2, 5] = np.nan
    with pytest.raises(ValueError, match="NaN"):
        ranking.top_k(blocks_of(scores), 17, 2, block_size=4)
    with pytest.raises(ValueError, match=r"factors of shape \(3,\)"):
        ranking.linear_top_k(np.ones(3), np.ones((4, 3)), 0.0, 1)
    with pytest.raises(ValueError, match="between 1 and 3, got 4"):
        ranking.precision_at_k(top, labels, 4)
    with pytest.raises(ValueError, match=r"top of shape \(29, 3\) must have the rows"):
        ranking.precision_at_k(top[1:], labels, 3)
    with pytest.raises(ValueError, match="labels from 0 to 17"):
        ranking.precision_at_k(np.tile([0, 17], (30, 1)), labels, 2)
    with pytest.raises(TypeError, match="must be a sparse matrix"):
        ranking.precision_at_k(top, truth, 3)
    with pytest.raises(ValueError, match="entries 0 and 1 only, got 2"):
        ranking.precision_at_k(top, 2 * labels, 3)
    for p in (np.zeros(17), np.ones(16), np.full(17, 1.1)):
        with pytest.raises(ValueError, match="propensity of shape"):
            ranking.propensity_scored_precision_at_k(top, labels, 3, p)
    with pytest.raises(ValueError, match="no row has a label"):
        ranking.propensity_scored_precision_at_k(top, 0 * labels, 3, np.ones(17))
    with pytest.raises(ValueError, match="propensities need 3 rows"):
        ranking.propensities(labels[[0, 1]])
    with pytest.raises(ValueError, match="a and b must be positive"):
        ranking.propensities(labels, a=0)
