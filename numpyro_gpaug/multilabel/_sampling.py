# SPDX-License-Identifier: Apache-2.0
"""Minibatches of rows, with all their positive labels and some of the negative ones."""

from __future__ import annotations

import operator
from collections.abc import Iterable, Iterator
from queue import Empty, Queue
from threading import TIMEOUT_MAX, Event, Semaphore, Thread
from typing import Any, NamedTuple, TypeVar

import numpy as np

from numpyro_gpaug.math.sparse import label_matrix

T = TypeVar("T")


class LabelBatch(NamedTuple):
    """Some rows, and the labels that a step uses in each.

    Shapes are the same in every batch: P is the largest number of positive labels of
    any row of the data, and L is the requested number of negative labels. Unused
    entries of a row have label 0 with weight 0.

    :param rows: indices of the rows, (B,).
    :param positives: all positive labels of each row, (B, P).
    :param negatives: sampled negative labels of each row, (B, L).
    :param positive_weights: 1, or 0 for padding, (B, P), float32.
    :param negative_weights: number of negatives of the row divided by the sampled
        number, or 0 for padding, (B, L), float32.
    """

    rows: np.ndarray
    positives: np.ndarray
    negatives: np.ndarray
    positive_weights: np.ndarray
    negative_weights: np.ndarray

    @property
    def labels(self) -> np.ndarray:
        """Positives, then negatives, (B, P + L)."""
        return np.concatenate([self.positives, self.negatives], 1)

    @property
    def targets(self) -> np.ndarray:
        """The observations at :attr:`labels`: 1 and 0, (B, P + L)."""
        kinds = np.ones_like(self.positives), np.zeros_like(self.negatives)
        return np.concatenate(kinds, 1)

    @property
    def weights(self) -> np.ndarray:
        """Weights of :attr:`labels`, (B, P + L)."""
        return np.concatenate([self.positive_weights, self.negative_weights], 1)


class LabelSampler:
    r"""Stratified minibatches of multi-label data.

    All positive labels :math:`P_i` of a row i, and a sample :math:`L_i` of its negative
    ones :math:`N_i`, uniform without replacement, give an unbiased estimate of a sum
    over all labels of the row,

    .. math:: \sum_{l \in P_i} g_{il} + \frac{|N_i|}{|L_i|} \sum_{l \in L_i} g_{il}.

    Rows are drawn without replacement: an epoch is a random order of all rows, split
    into batches, without the last rows if they do not fill one (each batch alone is a
    uniform sample of rows). The weights do not include the factor N / B for rows,
    because a NumPyro plate with ``subsample_size`` provides it.

    Panos, Dellaportas and Titsias (2018), equation (23).

    :param labels: sparse (N, K) of 0/1.
    :param batch_size: number B of rows in a batch.
    :param num_negatives: number L of negative labels of each row; rows with fewer have
        all of them, with weight 1.
    :param seed: seed of rows and labels.
    :raises ValueError: for a batch larger than N, or ``num_negatives`` outside 1 .. K.

    .. doctest::

        >>> import scipy.sparse
        >>> from numpyro_gpaug.multilabel import LabelSampler
        >>> Y = scipy.sparse.csr_array([[1, 1, 0, 0, 0], [0, 0, 0, 0, 1], [0] * 5])
        >>> sampler = LabelSampler(Y, batch_size=2, num_negatives=2)
        >>> batch = next(sampler.epoch(0))
        >>> batch.labels.shape, batch.weights.sum(1).tolist()
        ((2, 4), [5.0, 5.0])
    """

    def __init__(
        self, labels: Any, batch_size: int, num_negatives: int, seed: int = 0
    ) -> None:
        labels = label_matrix(labels, "labels")
        size, num_labels = labels.shape
        if not 1 <= operator.index(batch_size) <= size:
            raise ValueError(
                f"batch_size must be between 1 and the {size} rows of labels, got "
                f"{batch_size}"
            )
        if not 1 <= operator.index(num_negatives) <= num_labels:
            raise ValueError(
                f"num_negatives must be between 1 and the {num_labels} labels, got "
                f"{num_negatives}"
            )
        self.batch_size = batch_size
        self.num_negatives = num_negatives
        self.seed = seed
        self._shape = size, num_labels
        self._starts = labels.indptr.astype(np.int64)
        self._counts = np.diff(self._starts)
        self._labels = labels.indices
        # The number of negatives below each positive label, shifted so that it also
        # increases over rows.
        place = np.arange(labels.nnz) - np.repeat(self._starts[:-1], self._counts)
        row = np.repeat(np.arange(size), self._counts)
        self._below = row * (num_labels + 1) + (self._labels - place)

    def __len__(self) -> int:
        """The number of batches in an epoch."""
        return self._shape[0] // self.batch_size

    def epoch(self, number: int) -> Iterator[LabelBatch]:
        """Yield the batches of an epoch; the same number gives the same batches.

        :param number: the number of the epoch, from 0.
        """
        rng = np.random.default_rng([self.seed, number])
        order = rng.permutation(self._shape[0])
        for i in range(len(self)):
            yield self._batch(rng, order[i * self.batch_size :][: self.batch_size])

    def _batch(self, rng: np.random.Generator, rows: np.ndarray) -> LabelBatch:
        counts = self._counts[rows]
        place = np.arange(self._counts.max())
        present = place < counts[:, None]
        positives = np.zeros(present.shape, np.int32)
        places = self._starts[rows][:, None] + place
        positives[present] = self._labels[places[present]]
        absent = self._shape[1] - counts
        sampled = np.minimum(absent, self.num_negatives)
        real = np.arange(self.num_negatives) < sampled[:, None]
        ranks = distinct_integers(rng, absent, self.num_negatives)
        negatives = np.where(real, self._negatives(rows, ranks), 0)
        weights = np.where(real, (absent / np.maximum(sampled, 1))[:, None], 0)
        present, weights = present.astype(np.float32), weights.astype(np.float32)
        return LabelBatch(rows, positives, negatives.astype(np.int32), present, weights)

    def _negatives(self, rows: np.ndarray, ranks: np.ndarray) -> np.ndarray:
        """Return the labels with given ranks among the negative labels of each row, (B,
        L)."""
        # The negative of rank r comes after r negatives and after the positives that
        # have at most r negatives below them.
        keys = rows[:, None] * (self._shape[1] + 1) + ranks
        positives = np.searchsorted(self._below, keys, "right")
        return ranks + positives - self._starts[rows][:, None]


def distinct_integers(
    rng: np.random.Generator, limits: np.ndarray, size: int
) -> np.ndarray:
    """Draw uniform sets of integers below a limit, without replacement, (len(limits),
    size).

    A row with a limit below ``size`` begins with all of its integers; later entries are
    not part of the sample.
    """
    result = np.empty((len(limits), size), np.int64)
    few = limits < 2 * size
    # If most integers are taken, rejection is slow, and sorting random keys takes at
    # most twice the work of producing the result.
    keys = rng.random((np.count_nonzero(few), 2 * size))
    keys[np.arange(2 * size) >= limits[few][:, None]] = 2
    result[few] = np.argsort(keys, axis=1)[:, :size]
    result[~few] = _by_rejection(rng, limits[~few], size)
    return result


def _by_rejection(
    rng: np.random.Generator, limits: np.ndarray, size: int
) -> np.ndarray:
    # A repeated integer is drawn again. Nothing depends on which integer it is, so by
    # symmetry all sets are equally likely.
    high = np.broadcast_to(limits[:, None], (len(limits), size))
    result = np.sort(rng.integers(high), axis=1)
    pending = np.arange(len(limits))
    while pending.size:
        block = result[pending]
        repeated = np.zeros(block.shape, bool)
        repeated[:, 1:] = block[:, 1:] == block[:, :-1]
        block[repeated] = rng.integers(high[pending][repeated])
        block.sort(axis=1)
        result[pending] = block
        pending = pending[repeated.any(1)]
    return result


def prefetch(
    iterable: Iterable[T], size: int = 2, timeout: float | None = None
) -> Iterator[T]:
    """Yield the items of an iterable; a thread prepares the next ones.

    An error while preparing an item is raised in place of the item. The thread ends
    with the returned iterator, also if that is closed early.

    :param iterable: an iterable such as :meth:`LabelSampler.epoch`, or a generator that
        also transforms the inputs of each batch.
    :param size: the number of items to prepare ahead.
    :param timeout: the maximum time to wait for an item, in seconds; no limit by
        default.
    :raises TimeoutError: if no item came within that time. The thread continues, but
        does not prevent the process from exiting.

    .. doctest::

        >>> from numpyro_gpaug.multilabel import prefetch
        >>> list(prefetch(range(4)))
        [0, 1, 2, 3]
    """
    if operator.index(size) < 1:
        raise ValueError(f"size must be at least 1, got {size}")
    if timeout is not None and not 0 < timeout < TIMEOUT_MAX:
        raise ValueError(f"timeout must be a number of seconds or None, got {timeout}")
    return _prefetch(iter(iterable), size, timeout)


# The time in seconds that a thread gets to finish its current item when no more are
# wanted.
_LAST = 10.0


def _prefetch(items: Iterator[T], size: int, timeout: float | None) -> Iterator[T]:
    end, closed, places = object(), Event(), Semaphore(size)
    ready: Queue[tuple[Any, BaseException | None]] = Queue()

    def prepare() -> None:
        item: Any = None
        while item is not end:
            places.acquire()
            if closed.is_set():
                return
            try:
                item, error = next(items, end), None
            except BaseException as raised:
                item, error = end, raised
            ready.put((item, error))

    # A daemon thread, because a hanging thread cannot be stopped and Python would wait
    # for it.
    thread = Thread(target=prepare, daemon=True)
    thread.start()
    patience = _LAST
    try:
        while True:
            # A hanging thread gives None, after the time limit or after Ctrl-C.
            patience = 0.0
            item, error = _within(timeout, ready)
            patience = _LAST
            if error is not None:
                raise error
            if item is end:
                return
            places.release()
            yield item
    finally:
        closed.set()
        places.release()
        thread.join(patience)


def _within(timeout: float | None, ready: Queue[T]) -> T:
    try:
        return ready.get(timeout=timeout)
    except Empty:
        raise TimeoutError(
            f"nothing came within {timeout:g} seconds (timeout={timeout:g}). The "
            "source hangs, or needs more time"
        ) from None
