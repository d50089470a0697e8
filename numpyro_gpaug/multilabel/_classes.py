# SPDX-License-Identifier: Apache-2.0
"""Classes, and some of their data, drawn inside a model."""

from __future__ import annotations

from typing import Any, NamedTuple

import jax.numpy as jnp
import numpy as np
import numpyro
from jax import Array
from jax.typing import ArrayLike


class ClassBatch(NamedTuple):
    """Some classes, and some of their data.

    :param classes: the K drawn classes.
    :param rows: indices of the rows, (B,).
    :param own: the position of each row's class among the drawn classes, (B,).
    :param scale: the number of rows that each row represents, (B,), for
        :class:`numpyro.handlers.scale`.
    """

    classes: Array
    rows: Array
    own: Array
    scale: Array


class ClassMembers(NamedTuple):
    """The data of every class, for models of very many classes.

    A batch has rows of the drawn classes only, so that each row comes with its own
    class and a uniform sample of the others.

    :param rows: rows of each class, in random order and repeated up to the size of the
        largest class, (C, P).
    :param weights: one over the number of repetitions of the row; 0 if a class has no
        rows.

    **Example**

    >>> import jax, numpyro
    >>> members = ClassMembers.of([0, 1, 2, 2, 1, 2], num_classes=3)
    >>> with numpyro.handlers.seed(rng_seed=0):
    ...     batch = members.draw(2, 2)
    >>> batch.rows.shape, batch.own.tolist()
    ((4,), [0, 0, 1, 1])
    """

    rows: np.ndarray
    weights: np.ndarray

    @classmethod
    def of(cls, labels: ArrayLike, num_classes: int, seed: int = 0) -> ClassMembers:
        """Return the members of every class, from the labels of the data.

        :param labels: classes of the data, (N,), 0 .. C - 1.
        :param num_classes: C.
        :param seed: seed of the order within a class.
        :raises ValueError: for labels outside that range.
        """
        found: Any = np.asarray(labels)
        if found.ndim != 1 or not found.size or not 0 <= found.min() <= found.max() < (
            num_classes
        ):  # fmt: skip
            raise ValueError(
                f"labels of shape {found.shape} must be a vector of classes "
                f"0 .. {num_classes - 1}"
            )
        order = np.random.default_rng(seed).permutation(found.size)
        order = order[np.argsort(found[order], kind="stable")]
        counts = np.bincount(found, minlength=num_classes)[:, None]
        place = np.arange(counts.max()) % np.maximum(counts, 1)
        starts = np.cumsum(counts)[:, None] - counts
        rows = order[np.minimum(starts + place, found.size - 1)]
        repeats = (counts.max() - place - 1) // np.maximum(counts, 1) + 1
        return cls(rows, ((counts > 0) / repeats).astype(np.float32))

    def draw(
        self, num_drawn: int | None = None, num_members: int | None = None
    ) -> ClassBatch:
        """Draw a batch inside a model, by its plates ``"classes"`` and ``"members"``.

        :param num_drawn: number K of classes; all by default.
        :param num_members: number of rows of each class; all by default.
        """
        num_classes, size = np.shape(self.rows)
        with numpyro.plate("classes", num_classes, subsample_size=num_drawn) as drawn:
            pass
        with numpyro.plate("members", size, subsample_size=num_members) as some:
            pass
        rows = jnp.asarray(self.rows)[drawn][:, some]
        scale = jnp.asarray(self.weights)[drawn][:, some] * (
            num_classes * size / rows.size
        )
        own = jnp.repeat(jnp.arange(len(drawn)), len(some))
        return ClassBatch(drawn, rows.ravel(), own, scale.ravel())
