# SPDX-License-Identifier: Apache-2.0
"""Metrics of rankings of very many labels.

Scores of all labels are never stored together: :func:`top_k` and :func:`linear_top_k`
keep the best labels of each row, block by block. The metrics take those labels, (N, k)
in the order of decreasing score, and the true labels as a sparse matrix (N, K) of 0/1.
They are averages over all N rows; a row without labels counts as 0.
"""

from __future__ import annotations

import operator
from collections.abc import Callable
from functools import partial
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
from jax.typing import ArrayLike

from numpyro_gpaug.math.sparse import label_matrix

__all__ = [
    "TopK",
    "linear_top_k",
    "ndcg_at_k",
    "precision_at_k",
    "propensities",
    "propensity_scored_precision_at_k",
    "top_k",
]


class TopK(NamedTuple):
    """The labels with the largest scores of each row.

    :param labels: labels in the order of decreasing scores, and of increasing labels
        for equal scores, (B, k).
    :param scores: their scores, (B, k).
    """

    labels: jax.Array
    scores: jax.Array


def top_k(
    scores: Callable[[slice], ArrayLike],
    num_labels: int,
    k: int,
    *,
    block_size: int = 8192,
) -> TopK:
    """Return the k best labels of each row, from scores of one block of labels at a
    time.

    :param scores: a function of a slice of the labels that returns their scores, (B,
        length of the slice). All slices except the last have the same length.
    :param num_labels: number K of labels.
    :param k: number of labels to keep.
    :param block_size: labels scored at once.
    :raises ValueError: for k outside 1 .. K, scores of another shape, and NaN.

    .. doctest::

        >>> import numpy as np
        >>> from numpyro_gpaug.multilabel.ranking import top_k
        >>> table = np.array([[0.1, 0.9, 0.3, 0.9], [4.0, 3.0, 2.0, 1.0]])
        >>> print(top_k(lambda labels: table[:, labels], 4, 2, block_size=3).labels)
        [[1 3]
         [0 1]]
    """
    _check_k(k, num_labels)
    if operator.index(block_size) < 1:
        raise ValueError(f"block_size must be at least 1, got {block_size}")
    best: TopK | None = None
    for start in range(0, num_labels, block_size):
        block = slice(start, min(start + block_size, num_labels))
        new = jnp.asarray(scores(block))
        rows = new.shape[:1] if best is None else best.scores.shape[:1]
        if new.shape != (*rows, block.stop - start):
            raise ValueError(
                f"scores({block}) has shape {new.shape}, expected one row of "
                f"{block.stop - start} labels for each of the same rows"
            )
        if best is None:
            best = TopK(jnp.zeros((*rows, 0), jnp.int32), new[:, :0])
        best = _merge(best, new, start, k)
    assert best is not None
    if bool(jnp.isnan(best.scores).any()):
        raise ValueError("scores returned NaN: labels cannot be ranked")
    return best


def linear_top_k(
    factors: ArrayLike,
    loadings: ArrayLike,
    bias: ArrayLike,
    k: int,
    *,
    block_size: int = 8192,
) -> TopK:
    r"""Return the k best labels of each row if scores are linear in a few factors.

    .. math:: f_{il} = \sum_p h_{ip} \Phi_{lp} + b_l

    :param factors: h, (B, P).
    :param loadings: :math:`\Phi`, (K, P).
    :param bias: b, (K,), or 0.
    :param k: number of labels to keep.
    :param block_size: labels scored at once.

    .. doctest::

        >>> import numpy as np
        >>> from numpyro_gpaug.multilabel.ranking import linear_top_k
        >>> h, loadings = np.array([[1.0, -1.0]]), np.array([[1.0, 2.0], [2.0, 1.0]])
        >>> print(linear_top_k(h, loadings, 0.0, 1).labels)
        [[1]]
    """
    factors, loadings = jnp.asarray(factors), jnp.asarray(loadings)
    if factors.ndim != 2 or loadings.ndim != 2:
        raise ValueError(
            f"factors of shape {factors.shape} must be (B, P), and loadings of shape "
            f"{loadings.shape} must be (K, P)"
        )
    num_labels = len(loadings)
    bias = jnp.broadcast_to(jnp.asarray(bias), (num_labels,))

    def scores(labels: slice) -> jax.Array:
        product = jnp.matmul(
            factors, loadings[labels].T, precision=jax.lax.Precision.HIGHEST
        )
        return product + bias[labels]

    return top_k(scores, num_labels, k, block_size=block_size)


def precision_at_k(top: ArrayLike, labels: Any, k: int) -> float:
    r"""Return the share of true labels among the first k.

    .. math:: P@k = \frac1N \sum_i \frac1k \sum_{l \in \mathrm{top}_k(i)} y_{il}

    The sum is divided by k also for rows with fewer labels, as in the Extreme
    Classification repository.

    :param top: ranked labels, (N, k or more).
    :param labels: true labels, sparse (N, K) of 0/1.
    :param k: number of ranked labels that count.
    :return: a number between 0 and 1.

    .. doctest::

        >>> import scipy.sparse
        >>> from numpyro_gpaug.multilabel.ranking import precision_at_k
        >>> truth = scipy.sparse.csr_array([[1, 0, 1], [0, 1, 0]])
        >>> precision_at_k([[2, 0], [0, 1]], truth, 2)
        0.75
    """
    hits, _, _ = _hits(top, labels, k)
    return float(hits.mean())


def ndcg_at_k(top: ArrayLike, labels: Any, k: int) -> float:
    r"""Return the normalised discounted cumulative gain of the first k.

    .. math::

        nDCG@k = \frac1N \sum_i \frac{\sum_{j \le k} y_{i, \mathrm{top}_j(i)} /
        \log_2(j + 1)}{\sum_{j \le \min(k, |y_i|)} 1 / \log_2(j + 1)}

    K. Jarvelin and J. Kekalainen, *Cumulated gain-based evaluation of IR techniques*,
    ACM Transactions on Information Systems 20, 2002, with gains of 0 and 1.

    :param top: ranked labels, (N, k or more).
    :param labels: true labels, sparse (N, K) of 0/1.
    :param k: number of ranked labels that count.
    :return: a number between 0 and 1.

    .. doctest::

        >>> import scipy.sparse
        >>> from numpyro_gpaug.multilabel.ranking import ndcg_at_k
        >>> truth = scipy.sparse.csr_array([[1, 0, 1], [0, 1, 0]])
        >>> print(round(ndcg_at_k([[2, 0], [0, 1]], truth, 2), 4))
        0.8155
    """
    hits, _, truth = _hits(top, labels, k)
    discount = 1 / np.log2(np.arange(k) + 2)
    attainable = np.append(0, np.cumsum(discount))[np.minimum(np.diff(truth.indptr), k)]
    gain = hits @ discount
    # A row without labels has gain 0.
    return float(np.mean(gain / np.where(attainable > 0, attainable, 1)))


def propensities(labels: Any, *, a: float = 0.55, b: float = 1.5) -> np.ndarray:
    r"""Return the probability that a true label was recorded, by its frequency.

    .. math:: p_l = \frac{1}{1 + C (N_l + b)^{-a}}, \qquad C = (\log N - 1)(b + 1)^a,

    with :math:`N_l` the number of the N training rows that have label l.

    H. Jain, Y. Prabhu and M. Varma, *Extreme multi-label loss functions for
    recommendation, tagging, ranking and other missing label applications*, KDD 2016.
    The defaults are theirs; they set a = 0.5, b = 0.4 for Wikipedia and
    a = 0.6, b = 2.6 for Amazon data.

    :param labels: training labels, sparse (N, K) of 0/1, with N of 3 or more.
    :param a: the rate of increase with the frequency, positive.
    :param b: a number added to the counts, positive.
    :return: probabilities between 0 and 1, (K,).

    .. doctest::

        >>> import numpy as np, scipy.sparse
        >>> from numpyro_gpaug.multilabel.ranking import propensities
        >>> training = scipy.sparse.csr_array(np.eye(100, 3, dtype=int))
        >>> print(propensities(training).round(3))
        [0.217 0.217 0.217]
    """
    truth = label_matrix(labels, "labels")
    size, num_labels = truth.shape
    if size < 3:
        raise ValueError(f"labels of shape {truth.shape}: propensities need 3 rows")
    if not (0 < a < np.inf and 0 < b < np.inf):
        raise ValueError(f"a and b must be positive, got {a} and {b}")
    frequency = np.bincount(truth.indices, minlength=num_labels)
    return 1 / (1 + (np.log(size) - 1) * ((b + 1) / (frequency + b)) ** a)


def propensity_scored_precision_at_k(
    top: ArrayLike, labels: Any, k: int, propensity: ArrayLike
) -> float:
    r"""Return the precision with rare labels weighted up, relative to its largest
    possible value.

    .. math::

        PSP@k = \frac{\sum_i \sum_{l \in \mathrm{top}_k(i)} y_{il} / p_l}
        {\sum_i \max_{|S| = k} \sum_{l \in S} y_{il} / p_l}

    Jain, Prabhu and Varma (2016); the normalisation is the ratio of sums of
    the Extreme Classification repository's scripts.

    :param top: ranked labels, (N, k or more).
    :param labels: true labels, sparse (N, K) of 0/1.
    :param k: number of ranked labels that count.
    :param propensity: propensities of the labels, (K,), from the *training* labels: see
        :func:`propensities`.
    :return: a number between 0 and 1.
    :raises ValueError: if no row has a label.

    .. doctest::

        >>> import scipy.sparse
        >>> from numpyro_gpaug import ranking
        >>> truth = scipy.sparse.csr_array([[1, 0, 1], [0, 1, 0]])
        >>> weights = [1.0, 0.5, 0.25]
        >>> ranking.propensity_scored_precision_at_k([[0], [1]], truth, 1, weights)
        0.5
    """
    hits, top, truth = _hits(top, labels, k)
    p = np.asarray(propensity, float)
    if p.shape != truth.shape[1:] or not np.all((p > 0) & (p <= 1)):
        raise ValueError(
            f"propensity of shape {p.shape} must be of shape {truth.shape[1:]}, "
            "one in (0, 1] per label"
        )
    if truth.nnz == 0:
        raise ValueError(f"labels of shape {truth.shape}: no row has a label")
    return float(np.sum(hits / p[top]) / _largest_sums(truth, 1 / p, k))


@partial(jax.jit, static_argnames="k")
def _merge(best: TopK, new: jax.Array, start: int, k: int) -> TopK:
    # lax.top_k orders -0 below 0.
    new = jnp.where(new == 0, 0, new)
    scores = jnp.concatenate([best.scores, new], 1)
    labels = start + jnp.arange(new.shape[1], dtype=jnp.int32)
    labels = jnp.concatenate([best.labels, jnp.broadcast_to(labels, new.shape)], 1)
    # Among equal scores it takes the first, which is the smaller label.
    scores, places = jax.lax.top_k(scores, min(k, scores.shape[1]))
    return TopK(jnp.take_along_axis(labels, places, 1), scores)


def _check_k(k: int, limit: int) -> None:
    if not 1 <= operator.index(k) <= limit:
        raise ValueError(f"k must be between 1 and {limit}, got {k}")


def _hits(top: ArrayLike, labels: Any, k: int) -> tuple[np.ndarray, np.ndarray, Any]:
    """Return which of the first k labels are true, (N, k), these labels, and the true
    labels."""
    truth = label_matrix(labels, "labels")
    top = np.asarray(top)
    if top.ndim != 2 or len(top) != truth.shape[0] or not len(top):
        raise ValueError(
            f"top of shape {top.shape} must have the rows of labels, of shape "
            f"{truth.shape}"
        )
    _check_k(k, top.shape[1])
    top = top[:, :k].astype(np.int64, casting="same_kind")
    if top.min() < 0 or top.max() >= truth.shape[1]:
        raise ValueError(
            f"top has labels from {top.min()} to {top.max()}; labels has shape "
            f"{truth.shape}"
        )
    rows = np.arange(len(top)) * truth.shape[1]
    true = np.repeat(rows, np.diff(truth.indptr)) + truth.indices
    return np.isin(rows[:, None] + top, true), top, truth


def _largest_sums(truth: Any, weight: np.ndarray, k: int) -> float:
    """Return the sum over rows of the k largest weights of true labels."""
    counts = np.diff(truth.indptr)
    rows = np.repeat(np.arange(len(counts)), counts)
    weights = weight[truth.indices]
    order = np.lexsort((-weights, rows))
    place = np.arange(truth.nnz) - np.repeat(truth.indptr[:-1], counts)
    return float(weights[order][place < k].sum())
