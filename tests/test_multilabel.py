# SPDX-License-Identifier: Apache-2.0
"""Reading multi-label data, and drawing rows and labels."""

import itertools
import threading

import numpy as np
import pytest
from scipy import sparse, stats
from sklearn.datasets import dump_svmlight_file

from numpyro_gpaug.multilabel import (
    LabelSampler,
    _sampling,
    load_npz,
    load_svmlight,
    load_xmc,
    prefetch,
)

PARTS = ("data", "indices", "indptr", "shape")


def write(folder, text):
    path = folder / "data.txt"
    path.write_text(text, encoding="utf-8")
    return path


def draw(seed, rows=20, labels=11, density=0.25):
    rng = np.random.default_rng(seed)
    Y = (rng.random((rows, labels)) < density).astype(int)
    Y[0], Y[1] = 0, 1
    return sparse.csr_array(Y)


# -- files -----------------------------------------------------------------------------


def test_xmc(tmp_path):
    text = "6 5 4\n0,3 0:1.5 4:-2e-1\n 2:1\n1 \n\n3,3,1\t4:1 0:2\r\n2 1:1 1:2.5\n"
    data = load_xmc(write(tmp_path, text))
    X, Y = np.zeros((6, 5)), np.zeros((6, 4))
    X[[0, 0, 1, 4, 4, 5], [0, 4, 2, 4, 0, 1]] = [1.5, -0.2, 1, 1, 2, 3.5]
    Y[[0, 0, 2, 4, 4, 5], [0, 3, 1, 3, 1, 2]] = 1
    np.testing.assert_array_equal(data.X.toarray(), X.astype("float32"))
    np.testing.assert_array_equal(data.Y.toarray(), Y)
    assert (data.X.dtype, data.Y.dtype) == ("float32", "int8")
    assert data.X.has_canonical_format
    assert data.Y.has_canonical_format
    assert data.X.indices.dtype == data.Y.indices.dtype == "int32"
    assert data.num_unlabelled == 2


def test_xmc_without_any_label_or_feature(tmp_path):
    data = load_xmc(write(tmp_path, "2 3 4\n\n\n"))
    assert (data.X.shape, data.Y.shape) == ((2, 3), (2, 4))
    assert data.X.nnz == data.Y.nnz == 0
    assert data.num_unlabelled == 2


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ("", "line 1: expected the numbers of rows"),
        ("2 3\n", "line 1: expected.*got '2 3'"),
        ("2 3 x\n", "line 1: expected"),
        ("2 3 -1\n", "line 1: expected"),
        ("1 3 2 4\n", "line 1: expected"),
        ("2 3 2\n0 1:1\n2 1:1\n", "line 3: label 2 is out of range: .* 2 labels"),
        ("2 3 2\n\n0 1:1 3:2\n", "line 3: feature 3 is out of range.* 3 features"),
        ("2 3 2\n0 1:1\n0 1:x\n", "line 3: expected 'label.*got '0 1:x'"),
        ("1 3 2\n0 -1:1\n", "line 2: expected"),
        ("1 3 2\n-1 1:1\n", "line 2: expected"),
        ("1 3 2\n0,1.5 1:1\n", "line 2: expected"),
        ("1 3 2\n0, 1:1\n", "line 2: expected"),
        ("1 3 2\n0 1:1:1\n", "line 2: expected"),
        ("1 3 2\n0 1:12:1\n", "line 2: expected"),
        ("1 3 2\n0 1: 1\n", "line 2: expected"),
        ("1 3 2\n0 1:1 2\n", "line 2: expected"),
        ("1 3 2\n0 1:1_0\n", "line 2: expected"),
        ("1 3 2\n0 9999999999999999999999:1\n", "line 2: expected"),
        ("2 3 2\n0 1:1\n0 0:1 1:nan\n", "line 3: value nan is not finite"),
        ("1 3 2\n0 1:1e39\n", "line 2: value 1e[+]39 is not finite in float32"),
        ("2 3 2\n0 1:1\n", "announces 2 rows, but 1 follow, to line 2"),
        ("1 3 2\n0 1:1\n0 1:1\n", "announces 1 rows, but 2 follow, to line 3"),
    ],
)
def test_malformed_xmc(tmp_path, text, message):
    path = write(tmp_path, text)
    with pytest.raises(ValueError, match=message) as error:
        load_xmc(path)
    assert str(path) in str(error.value)


def test_malformed_lines_are_shown_in_part(tmp_path):
    with pytest.raises(ValueError, match=r"got 'x{60}\.\.\.'$"):
        load_xmc(write(tmp_path, "1 3 2\n" + "x" * 10_000 + "\n"))


@pytest.mark.parametrize("zero_based", [True, False])
def test_svmlight(tmp_path, zero_based):
    Y = draw(0)
    X = np.random.default_rng(0).normal(size=(20, 6)).astype("float32")
    path = tmp_path / "data.svm"
    dump_svmlight_file(X, Y, str(path), zero_based=zero_based, multilabel=True)
    data = load_svmlight(path, zero_based=zero_based)
    np.testing.assert_allclose(data.X.toarray(), X, rtol=1e-6)
    np.testing.assert_array_equal(data.Y.toarray(), Y.toarray())
    assert data.num_unlabelled == np.count_nonzero(Y.sum(1) == 0)
    wider = load_svmlight(path, zero_based=zero_based, num_features=9, num_labels=15)
    assert (wider.X.shape, wider.Y.shape) == ((20, 9), (20, 15))
    assert (wider.X.dtype, wider.Y.dtype) == ("float32", "int8")


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ("0 1:1\n0,1.5 1:1\n", "label 1.5 of row 1 is not an integer from 0$"),
        ("-1 1:1\n", "label -1 of row 0"),
        ("0 1:1\n7 2:1\n", "label 7 of row 1.*below num_labels=5"),
        ("0 1:1\n0 2:1 3:nan\n", "data.txt: row 1 has a value that is not finite"),
        ("0 1:x\n", "data.txt: could not convert"),
        ("0 1:1 99:1\n", "data.txt: .*n_features"),
    ],
)
def test_malformed_svmlight(tmp_path, text, message):
    options = {"num_features": 9}
    if "7" in text:
        options["num_labels"] = 5
    with pytest.raises(ValueError, match=message):
        load_svmlight(write(tmp_path, text), zero_based=False, **options)


def archive(**matrices):
    return {
        f"{name}_{part}": getattr(matrix, part)
        for name, matrix in matrices.items()
        for part in PARTS
    }


def test_npz(tmp_path):
    X, Y = sparse.csr_array(np.eye(20, 6)), draw(1)
    parts = archive(X_test=X, Y_test=Y)
    parts["Y_test_indices"] = parts["Y_test_indices"].astype("uint16")
    np.savez(tmp_path / "data.npz", **parts)
    data = load_npz(tmp_path / "data.npz", "test")
    np.testing.assert_array_equal(data.X.toarray(), X.toarray())
    np.testing.assert_array_equal(data.Y.toarray(), Y.toarray())
    assert (data.X.dtype, data.Y.dtype) == ("float32", "int8")
    with pytest.raises(KeyError, match=r"data.npz has no X_train_data, X_train_ind"):
        load_npz(tmp_path / "data.npz", "train")


def test_malformed_npz(tmp_path):
    path = tmp_path / "data.npz"
    X, Y = sparse.csr_array(np.eye(20, 6)), draw(1)
    np.savez(path, **archive(X_test=X[:5], Y_test=Y))
    with pytest.raises(ValueError, match=r"X_test has shape \(5, 6\) and Y_test"):
        load_npz(path, "test")
    np.savez(path, **archive(X_test=X, Y_test=3 * Y))
    with pytest.raises(ValueError, match="Y_test of shape .* 0 and 1 only, got 3"):
        load_npz(path, "test")
    parts = archive(X_test=X, Y_test=Y)
    parts["X_test_indices"] = parts["X_test_indices"] + 1
    np.savez(path, **parts)
    with pytest.raises(ValueError, match="data.npz: X_test: .*6"):
        load_npz(path, "test")


# -- sampling --------------------------------------------------------------------------


@pytest.mark.parametrize("num_negatives", [1, 3, 6, 11])
def test_batches_are_what_they_say(num_negatives):
    Y = draw(0)
    dense = Y.toarray()
    sampler = LabelSampler(Y, 6, num_negatives)
    batches = list(sampler.epoch(0))
    assert len(batches) == len(sampler) == 3
    rows = np.concatenate([batch.rows for batch in batches])
    assert len(set(rows.tolist())) == 18
    for batch in batches:
        assert batch.positives.shape == batch.positive_weights.shape == (6, 11)
        assert (
            batch.negatives.shape == batch.negative_weights.shape == (6, num_negatives)
        )
        assert batch.weights.dtype == "float32"
        for i, row in enumerate(batch.rows):
            kept = batch.positive_weights[i] > 0
            positives = batch.positives[i][kept]
            np.testing.assert_array_equal(positives, np.flatnonzero(dense[row]))
            np.testing.assert_array_equal(batch.positive_weights[i][kept], 1)
            real = batch.negative_weights[i] > 0
            negatives = batch.negatives[i][real]
            absent = 11 - dense[row].sum()
            assert len(set(negatives)) == len(negatives) == min(absent, num_negatives)
            assert not dense[row, negatives].any()
            if absent:
                weight = np.float32(absent / len(negatives))
                np.testing.assert_array_equal(batch.negative_weights[i][real], weight)
            assert not batch.labels[i][batch.weights[i] == 0].any()
            used = batch.weights[i] > 0
            seen = dense[row, batch.labels[i][used]]
            np.testing.assert_array_equal(seen, batch.targets[i][used])
        np.testing.assert_allclose(batch.weights.sum(1), 11, rtol=1e-6)


@pytest.mark.parametrize("density", [0.0, 1.0])
def test_rows_all_alike(density):
    Y = sparse.csr_array(np.full((4, 5), int(density)))
    batch = next(LabelSampler(Y, 4, 2).epoch(0))
    assert batch.positives.shape == (4, 5 * int(density))
    np.testing.assert_allclose(batch.weights.sum(1), 5)
    assert (batch.negative_weights == 0).all() == bool(density)


def test_epochs_repeat_and_differ():
    Y = draw(0)

    def epoch(number, seed=0):
        sampler = LabelSampler(Y, 5, 3, seed)
        return [
            np.concatenate([b.rows, b.labels.ravel()]) for b in sampler.epoch(number)
        ]

    np.testing.assert_array_equal(epoch(3), epoch(3))
    assert not np.array_equal(epoch(3), epoch(4))
    assert not np.array_equal(epoch(3), epoch(3, seed=1))


@pytest.mark.parametrize("limit", [5, 9, 10])
def test_all_sets_are_equally_likely(limit):
    # Below 2 x 3 keys are sorted; from there on rejection is used.
    size, repeats = 3, 60_000
    rng = np.random.default_rng(1)
    drawn = _sampling.distinct_integers(rng, np.full(repeats, limit), size)
    sets, counts = np.unique(np.sort(drawn, axis=1), axis=0, return_counts=True)
    expected = list(itertools.combinations(range(limit), size))
    np.testing.assert_array_equal(sets, expected)
    assert stats.chisquare(counts).pvalue > 0.01


def test_few_integers_and_many():
    limits = np.array([0, 1, 2, 3, 4, 5, 6, 7, 1000])
    drawn = _sampling.distinct_integers(np.random.default_rng(0), limits, 3)
    for limit, row in zip(limits, drawn, strict=True):
        sample = row[: min(limit, 3)]
        assert len(set(sample)) == len(sample)
        assert (sample < limit).all()
    many = _sampling.distinct_integers(np.random.default_rng(0), np.full(2, 900), 450)
    assert all(len(set(row)) == 450 for row in many)


def every_estimate(sampler, row, g, num_negatives):
    """Return the estimates of the sum of ``g[row]``, for every set of ranks that may be
    drawn.
    """
    num_labels = g.shape[1]
    positives = sampler._labels[sampler._starts[row] : sampler._starts[row + 1]]
    absent = num_labels - len(positives)
    size = min(absent, num_negatives)
    ranks = np.array(list(itertools.combinations(range(absent), size)), int)
    negatives = sampler._negatives(np.full(len(ranks), row), ranks)
    weight = absent / max(size, 1)
    return g[row, positives].sum() + weight * g[row, negatives].sum(1)


@pytest.mark.parametrize("num_negatives", [1, 2, 4, 8])
def test_the_estimate_is_unbiased(num_negatives):
    Y = draw(2, rows=9, labels=8)
    g = np.random.default_rng(0).normal(size=Y.shape)
    sampler = LabelSampler(Y, 2, num_negatives)
    for row in range(9):
        mean = every_estimate(sampler, row, g, num_negatives).mean()
        assert mean == pytest.approx(g[row].sum(), rel=1e-12)


def test_many_labels_take_no_dense_row():
    K = 10**9
    indices = np.sort(np.random.default_rng(0).integers(0, K, (50, 4)), axis=1)
    parts = np.ones(200, "int8"), indices.ravel(), np.arange(0, 201, 4)
    Y = sparse.csr_array(parts, shape=(50, K))
    batch = next(LabelSampler(Y, 50, 20).epoch(0))
    np.testing.assert_array_equal(batch.positives, indices[batch.rows])
    assert batch.negatives.max() > K / 2
    np.testing.assert_allclose(batch.weights.sum(1), K, rtol=1e-6)


def test_invalid_sampler():
    Y = draw(0)
    for size in (0, 21):
        with pytest.raises(
            ValueError, match=f"1 and the 20 rows of labels, got {size}"
        ):
            LabelSampler(Y, size, 2)
    for size in (0, 12):
        with pytest.raises(ValueError, match=f"1 and the 11 labels, got {size}"):
            LabelSampler(Y, 5, size)
    with pytest.raises(TypeError, match="labels must be a sparse matrix"):
        LabelSampler(Y.toarray(), 5, 2)


# -- prefetching -----------------------------------------------------------------------


def test_prefetch_keeps_the_order():
    Y = draw(0)
    sampler = LabelSampler(Y, 5, 3)
    plain, ahead = list(sampler.epoch(0)), list(prefetch(sampler.epoch(0), 3))
    for one, other in zip(plain, ahead, strict=True):
        np.testing.assert_array_equal(one.labels, other.labels)
    assert list(prefetch([])) == []


def test_prefetch_works_ahead_but_not_further():
    made = []

    def items():
        for i in range(10):
            made.append(i)
            yield i

    before = threading.active_count()
    iterator = prefetch(items(), size=2)
    assert next(iterator) == 0
    iterator.close()
    assert len(made) <= 3
    assert threading.active_count() == before


def test_prefetch_raises_where_the_item_would_have_come():
    def items():
        yield 1
        raise OSError("disk")

    iterator = prefetch(items(), size=4)
    assert next(iterator) == 1
    with pytest.raises(OSError, match="disk"):
        next(iterator)
    with pytest.raises(ValueError, match="size must be at least 1, got 0"):
        prefetch([1], 0)


def test_prefetch_does_not_wait_for_ever():
    def items():
        yield 1
        threading.Event().wait()

    before = set(threading.enumerate())
    iterator = prefetch(items(), timeout=0.2)
    assert next(iterator) == 1
    with pytest.raises(TimeoutError, match=r"within 0\.2 seconds \(timeout=0\.2\)"):
        next(iterator)
    # Python exits without waiting for the thread.
    assert [x.daemon for x in set(threading.enumerate()) - before] == [True]
    for timeout in (0, -1.0, np.nan, np.inf):
        with pytest.raises(ValueError, match="timeout must be a number of seconds"):
            prefetch([1], timeout=timeout)
