# SPDX-License-Identifier: Apache-2.0
"""Averages of predictions over rows, as joint draws."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import TYPE_CHECKING, Any

import numpy as np
from jax.typing import ArrayLike

from numpyro_gpaug._display import Displayed, Rows
from numpyro_gpaug.math.importance import weighted_quantiles

if TYPE_CHECKING:
    import pandas


class Averages(Displayed):
    """Averages over rows, as joint draws from their posterior.

    :param draws: the draws, (draws, ...): by scenario if covariates were changed, by
        group if there are any, and by the entries of one response.
    :param weights: their weights, (draws,), normalised.
    :param axes: names and labels of the axes after the first.

    **Example**

    >>> import numpy as np
    >>> draws = np.arange(100.0)[:, None] + [0, 10]
    >>> found = Averages(draws, np.full(100, 0.01), {"dose": (0, 1)})
    >>> print(found.mean, found.probability(above=54.5))
    [49.5 59.5] [0.45 0.55]
    """

    def __init__(
        self,
        draws: np.ndarray,
        weights: np.ndarray,
        axes: Mapping[str, Sequence[Any]],
    ) -> None:
        self.draws, self.weights, self.axes = draws, weights, dict(axes)

    @property
    def mean(self) -> np.ndarray:
        """The posterior means."""
        return np.tensordot(self.weights, self.draws, 1)

    @property
    def sd(self) -> np.ndarray:
        """The posterior standard deviations."""
        apart = np.square(self.draws - self.mean)
        return np.sqrt(np.tensordot(self.weights, apart, 1))

    def quantile(self, level: float) -> np.ndarray:
        """Return a quantile of each average.

        :param level: between 0 and 1.
        """
        return self._quantiles((level,))[0]

    def interval(
        self, prob: float = 0.9, *, joint: bool = False
    ) -> tuple[np.ndarray, np.ndarray]:
        """Return the lower and the upper ends of intervals.

        :param prob: the probability of each interval; by default the ends are the 5 and
            95% quantiles.
        :param joint: whether ``prob`` is the probability that *all* averages are within
            their intervals, as for the band of a curve.
        """
        tail = (1 - prob) / 2
        if joint:
            flat = self._flat
            order = np.argsort(flat, axis=0)
            each = self.weights[order]
            rank = np.empty_like(flat)
            np.put_along_axis(rank, order, np.cumsum(each, 0) - 0.5 * each, 0)
            depth = np.minimum(rank, 1 - rank).min(1)
            levels = weighted_quantiles(depth[:, None], self.weights, (1 - prob,))
            tail = float(levels[0, 0])
        low, high = self._quantiles((tail, 1 - tail))
        return low, high

    def probability(self, *, above: ArrayLike) -> np.ndarray:
        """Return the posterior probability that each average exceeds a threshold.

        :param above: the threshold, or one for each average.
        """
        return np.tensordot(self.weights, self.draws > np.asarray(above), 1)

    def summary(self) -> pandas.DataFrame:
        """Return a table of mean, standard deviation and the 5, 50 and 95% quantiles,
        with one row for each average."""
        import pandas

        columns = {"mean": self.mean, "sd": self.sd}
        levels = self._quantiles((0.05, 0.5, 0.95))
        columns |= dict(zip(("5%", "50%", "95%"), levels, strict=True))
        if not self.axes:
            index: Any = ["average"]
        elif len(self.axes) == 1:
            ((_, labels),) = self.axes.items()
            index = pandas.Index(list(labels))
        else:
            index = pandas.MultiIndex.from_product(
                list(self.axes.values()), names=list(self.axes)
            )
        return pandas.DataFrame({k: np.ravel(x) for k, x in columns.items()}, index)

    @property
    def _flat(self) -> np.ndarray:
        return np.asarray(self.draws, float).reshape(len(self.draws), -1)

    def _quantiles(self, levels: tuple[float, ...]) -> np.ndarray:
        found = weighted_quantiles(self._flat, self.weights, levels)
        return found.reshape(len(levels), *self.draws.shape[1:])

    def _display(self) -> tuple[str, Rows]:
        table = self.summary().map("{:.4g}".format)
        head = (" ".join(map(str, self.axes)), *table.columns)
        names = [x if isinstance(x, tuple) else (x,) for x in table.index]
        labels = [", ".join(map(str, x)) for x in names]
        cells = zip(labels, table.itertuples(index=False), strict=True)
        rows = [(label, *values) for label, values in cells]
        return f"Averages, {len(self.draws)} draws", [head, *rows]
