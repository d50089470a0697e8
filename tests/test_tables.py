# SPDX-License-Identifier: Apache-2.0
"""Classification of tables by default."""

import pickle

import numpy as np
import pandas as pd
import pytest
from sklearn.base import clone, is_classifier
from sklearn.datasets import load_digits
from sklearn.exceptions import NotFittedError
from threadpoolctl import threadpool_limits

from numpyro_gpaug import _indicators, kernels, tables
from numpyro_gpaug.tables import TableClassifier


@pytest.fixture(scope="module")
def checkers():
    """Labels on a board of nine fields, and columns that say nothing."""
    X = np.random.default_rng(0).uniform(0, 3, (240, 4)) * [1, 100, 1, 0]
    fields = np.floor(X[:, 0]) + np.floor(X[:, 1] / 100)
    return X, np.where(fields % 2, "black", "white")


@pytest.mark.slow
def test_choices_of_lengthscales_and_inducing_inputs(checkers, monkeypatch):
    """With many columns, separate lengthscales are chosen if they pay; and there are
    more inducing inputs if few leave much unexplained.
    """
    monkeypatch.setattr(tables, "FEW", 3)
    X, y = checkers
    classifier = TableClassifier(num_inducing=20, steps=40).fit(X[:200], y[:200])
    assert list(classifier.classes_) == ["black", "white"]
    given = classifier.result_.kwargs
    assert given["apart"]
    assert len(given["Z"]) == 60
    p = classifier.predict_proba(X[200:])
    np.testing.assert_allclose(p.sum(1), 1, rtol=1e-5)
    assert classifier.score(X[200:], y[200:]) > 0.7


def test_what_labels_that_are_left_out_choose(monkeypatch, capsys):
    """One scale for all columns, so that noise in columns that hardly vary is not made
    as large as the rest; and half a lengthscale, as often as it is better. The fit that
    is kept is kept whole: its lengthscale was once read as several."""
    score = TableClassifier._score

    def short(self, fit):
        return score(self, fit) - 100 * max(fit.medians["lengthscale"], 0.6)

    monkeypatch.setattr(TableClassifier, "_score", short)
    monkeypatch.setattr(tables, "FEW", 3)
    monkeypatch.setattr(tables, "UNEXPLAINED", 1)
    X = np.random.default_rng(0).normal(size=(180, 8)) * [1, 1, *[0.01] * 6]
    y = X[:, 0] * X[:, 1] > 0
    X = pd.DataFrame(X, columns=list("abcdefgh"))
    classifier = TableClassifier(num_inducing=40, steps=10, verbose=True)
    classifier.fit(X[:80], y[:80])
    assert "/10" in capsys.readouterr().err
    assert classifier.score(X[80:], y[80:]) > 0.8
    with pytest.raises(ValueError, match="feature names"):
        classifier.predict(X[list("badcfehg")])
    assert np.ptp(classifier._scale) == 0
    expected = classifier.predict_proba(X)
    again = pickle.loads(pickle.dumps(classifier))
    np.testing.assert_allclose(again.predict_proba(X), expected, atol=1e-6)
    compiled = tables._programs.cache_info().misses
    np.testing.assert_allclose(
        clone(again).fit(X[:80], y[:80]).predict_proba(X), expected, atol=1e-6
    )
    assert tables._programs.cache_info().misses == compiled
    assert 0.4 < classifier.result_.params["lengthscale_auto_loc"] < 0.6


def test_what_a_regression_predicts_without_a_row():
    """Beside the mean of a process given all other rows."""
    X = np.random.default_rng(0).normal(size=(14, 2)).astype(np.float32)
    codes, noise, shares = np.arange(14) % 3, 0.3, np.array([5, 5, 4]) / 14
    values = {"noise": noise, "power": 2.0, "bend": 4.0}

    def build(columns):
        return kernels.Matern52(1.5, 2.0) + kernels.Linear(variance=0.5)

    weights, found = _indicators._fitted(values, X, X, codes, shares, build)
    K = np.asarray(build(2)(X, X), float)
    noise += 1e-3 * np.diag(K).mean()
    observed = np.eye(3)[codes] - shares
    for i in range(14):
        own = np.arange(14) != i
        alone = K[np.ix_(own, own)] + noise * np.eye(13)
        mean = K[i, own] @ np.linalg.solve(alone, observed[own]) + shares
        power = np.log1p(np.exp(4 * mean)) ** 2
        np.testing.assert_allclose(found[i], np.log(power / power.sum()), atol=1e-3)
    expected = np.linalg.solve(K + noise * np.eye(14), observed)
    np.testing.assert_allclose(K @ weights, K @ expected, atol=1e-3)


def test_rounding_does_not_tell_the_label_of_a_row_without_neighbours():
    """Where rows are independent and the noise is tiny, shares predict a label."""
    X, codes = np.arange(40, dtype=np.float32)[:, None], np.arange(40) % 4
    values = {"noise": 1e-9, "power": 5.0, "bend": 4.0}
    given = codes, np.full(4, 0.25, np.float32), lambda _: kernels.Matern52(0.01, 9.0)
    _, found = _indicators._fitted(values, X, X, *given)
    np.testing.assert_allclose(found, np.log(0.25), atol=0.05)


def test_many_classes_are_regressed_unless_a_softmax_is_better(monkeypatch):
    """On sectors of a circle, of which a column that says nothing is no part."""
    monkeypatch.setattr(_indicators, "STEPS", 15)
    X = np.random.default_rng(0).normal(size=(250, 3))
    y = np.floor((np.arctan2(X[:, 0], X[:, 1]) / np.pi + 1) * 4.4)
    classifier = TableClassifier(num_inducing=9).fit(X[:150], y[:150])
    relative = classifier.regression_.values["relative"]
    assert relative[2] > 1.2 * max(relative[:2])
    assert classifier.score(X[150:], y[150:]) > 0.75
    again = pickle.loads(pickle.dumps(classifier))
    expected = classifier.predict_proba(X)
    np.testing.assert_allclose(again.predict_proba(X), expected, atol=1e-6)
    np.testing.assert_allclose(expected.sum(1), 1, rtol=1e-5)
    # A regression must gain a nat.
    monkeypatch.setattr(
        TableClassifier, "_score", lambda _, x, *rows: 0.9 * hasattr(x, "judges")
    )
    fits = []
    monkeypatch.setattr(TableClassifier, "_searched", lambda *_: fits[0])
    one = TableClassifier._fit
    monkeypatch.setattr(
        TableClassifier, "_fit", lambda *a, **k: fits.append(one(*a, **k)) or fits[-1]
    )
    compiled = _indicators._potential.__wrapped__._cache_size()
    classifier.fit(X[:150], y[:150])
    assert _indicators._potential.__wrapped__._cache_size() == compiled
    assert classifier.regression_ is None
    assert classifier.posterior_ is fits[0].posterior
    assert np.abs(classifier.predict_proba(X) - expected).max() > 0.05


def test_a_regression_is_judged_by_labels_that_it_did_not_learn():
    """Where classes separate, labels that chose many lengthscales look certain."""
    X, codes = load_digits(return_X_y=True)
    X, codes = np.float32(X[:300] - X[:300].mean(0)) / 4, codes[:300]
    found = _indicators.regress(tables._kernel, X, codes, 0)
    losses = -found.left_out[np.arange(300), codes]
    learned = np.delete(losses, found.judges)
    assert len(found.judges) == len(learned) == 150
    assert learned.mean() < 0.7 * losses[found.judges].mean()


def test_few_rows_have_as_many_inducing_inputs():
    X = np.random.default_rng(0).normal(size=(900, 2))
    found = [tables.num_inducing(X[:n], cheap=c) for n, c in ((300, 577), (900, 333))]
    assert found == [300, 333]
    assert tables.num_inducing(X, 20, more=3, cheap=500) == 60


@pytest.mark.slow
def test_boosting_is_named_where_it_is_better():
    X = np.random.default_rng(0).uniform(0, 1, (300, 3))
    y = (np.floor(12 * X[:, 1]) % 2).astype(int)
    classifier = TableClassifier(num_inducing=10, steps=5).fit(X, y)
    warns = pytest.warns(UserWarning, match="gradient boosting predicts labels")
    with warns, threadpool_limits(1):
        found = classifier.beside_boosting()
    assert found["own"] - found["boosting"] > 2 * found["se"] > 0


def test_scikit_learn_takes_it_for_a_classifier():
    copy = clone(TableClassifier(steps=7).set_params(seed=3))
    with pytest.raises(NotFittedError, match="not fitted yet"):
        copy.predict([[1.0]])
    assert is_classifier(copy)
    assert copy.get_params() == {
        "num_inducing": None, "seed": 3, "steps": 7, "verbose": False,
    }  # fmt: skip


@pytest.mark.parametrize(
    ("X", "y", "match"),
    [
        ([[1.0], [np.nan]], [0, 1], "X contains NaN"),
        ([[1.0], [2.0]], [0, np.nan], "y contains NaN"),
        ([[1.0], [2.0]], [0.1, 0.7], "label type: continuous"),
        ([[1.0], [2.0]], [1, 1], "one class"),
        (pd.DataFrame({"a": [1.0, 2.0], "b": ["x", "y"]}), [0, 1], r"\['b'\].*sparse_"),
    ],
)
def test_tables_that_are_refused(X, y, match):
    with pytest.raises(ValueError, match=match):
        TableClassifier().fit(X, y)
