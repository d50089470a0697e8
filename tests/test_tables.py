# SPDX-License-Identifier: Apache-2.0
"""Classification of tables by default."""

import numpy as np
import pytest
from threadpoolctl import threadpool_limits

from numpyro_gpaug import tables
from numpyro_gpaug.tables import TableClassifier

RNG = np.random.default_rng(0)


@pytest.fixture(scope="module")
def checkers():
    """Labels on a board of nine fields, and columns that say nothing."""
    X = RNG.uniform(0, 3, (240, 4)) * [1, 100, 1, 0]
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
    assert classifier._given["apart"]
    assert len(classifier._given["Z"]) == 60
    p = classifier.predict_proba(X[200:])
    np.testing.assert_allclose(p.sum(1), 1, rtol=1e-5)
    assert classifier.score(X[200:], y[200:]) > 0.7


def test_separate_lengthscales_that_do_not_pay(checkers, monkeypatch):
    """The fit before is kept whole: its lengthscale was once read as several."""
    monkeypatch.setattr(tables, "FEW", 3)
    monkeypatch.setattr(tables, "GAIN", np.inf)
    X, y = checkers
    classifier = TableClassifier(num_inducing=60, steps=2).fit(X[:60], y[:60])
    assert classifier.predict_proba(X[60:]).shape == (180, 2)


@pytest.mark.slow
def test_boosting_is_named_where_it_is_better():
    X = RNG.uniform(0, 1, (300, 3))
    y = (np.floor(12 * X[:, 1]) % 2).astype(int)
    classifier = TableClassifier(num_inducing=10, steps=5).fit(X, y)
    warns = pytest.warns(UserWarning, match="gradient boosting predicts labels")
    with warns, threadpool_limits(1):
        found = classifier.beside_boosting()
    assert found["own"] - found["boosting"] > 2 * found["se"] > 0


@pytest.mark.parametrize(
    ("X", "y", "match"),
    [
        ([[1.0], [np.nan]], [0, 1], "finite"),
        ([1.0, 2.0], [0, 1], "expected finite numbers"),
        ([[1.0], [2.0]], [0, 1, 1], "y has shape"),
        ([[1.0], [2.0]], [1, 1], "one class"),
    ],
)
def test_tables_that_are_refused(X, y, match):
    with pytest.raises(ValueError, match=match):
        TableClassifier().fit(X, y)
