# SPDX-License-Identifier: Apache-2.0
"""Averages of predictions over rows, as joint draws, and the averages that a user asks
for: rows, scenarios, groups and contrasts."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import TYPE_CHECKING, Any

import numpy as np
from jax.typing import ArrayLike

from numpyro_gpaug._display import Displayed, Rows
from numpyro_gpaug.math.importance import weighted_quantiles

if TYPE_CHECKING:
    import pandas


from collections.abc import Callable
from typing import NamedTuple

import jax.numpy as jnp
from jax import Array

from numpyro_gpaug.model.arguments import Model, is_array
from numpyro_gpaug.model.columns import Columns, Labels, coded
from numpyro_gpaug.model.signatures import argument_names


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
        self, draws: np.ndarray, weights: np.ndarray, axes: Mapping[str, Sequence[Any]]
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


Contrast = str | Callable[[np.ndarray, np.ndarray], np.ndarray] | None
CONTRASTS: dict[str, tuple[str, Callable[..., Any]]] = {
    "difference": ("-", np.subtract),
    "ratio": ("/", np.divide),
}


class Question(NamedTuple):
    """What is averaged, and how.

    :param scenarios: arguments of the model, one pair for each scenario.
    :param labels: names of the scenarios; ``None`` if nothing is changed.
    :param group: the group of each row, by number; ``None`` for one group.
    :param groups: names of the groups.
    :param weights: the weight of each row; ``None`` for equal ones.
    :param contrast: the symbol of a contrast, and the contrast.
    """

    scenarios: list[tuple[tuple[Any, ...], dict[str, Any]]]
    labels: tuple[str, tuple[Any, ...]] | None
    group: np.ndarray | None
    groups: tuple[Any, ...]
    weights: np.ndarray | None
    contrast: tuple[str, Callable[..., Any]] | None

    @classmethod
    def of(
        cls,
        model: Model,
        args: tuple[Any, ...],
        kwargs: dict[str, Any],
        kept: dict[str, Any],
        *,
        at: Mapping[str, Sequence[Any]] | None,
        by: ArrayLike | None,
        contrast: Contrast,
        weights: ArrayLike | None,
        labels: Labels | None = None,
    ) -> Question:
        """Read the arguments of :meth:`Posterior.average`.

        :param kept: keyword arguments of the fit.
        :param labels: labels of arguments that were categories in the fit.
        """
        args, kwargs, new = Columns.read(model, args, kwargs, labels)
        known = {**new, **(labels or {})}
        scenarios = _scenarios(model, args, kwargs, kept, at or {}, known)
        if not (contrast is None or callable(contrast) or contrast in CONTRASTS):
            raise ValueError(
                f"contrast={contrast!r}: the contrasts are 'difference', 'ratio' and "
                "functions of two arrays, lambda new, first: ..."
            )
        if contrast is not None and len(scenarios) < 2:
            raise ValueError(
                "a contrast compares scenarios. Pass at={'name': [value, other]} with "
                "at least two values of an argument"
            )
        against = CONTRASTS[contrast] if isinstance(contrast, str) else None
        if callable(contrast):
            against = "|", contrast
        groups, group = (), None
        if by is not None:
            found, group = np.unique(np.asarray(by), return_inverse=True)
            groups, group = tuple(found.tolist()), group.reshape(np.shape(by))
        heavy = None if weights is None else np.asarray(weights, float)
        named_by = _labels(at) if at else None
        return cls(scenarios, named_by, group, groups, heavy, against)

    @property
    def rows(self) -> dict[str, np.ndarray]:
        """Groups and weights of rows, for :func:`over_rows`."""
        found: dict[str, np.ndarray] = {}
        if self.group is not None:
            found["group"] = self.group
            found["total"] = np.zeros(len(self.groups), np.int32)
        if self.weights is not None:
            found["weights"] = self.weights.astype(jnp.zeros(()).dtype)
        return found

    def answered(
        self, draws: Sequence[Array], log_weights: np.ndarray | None
    ) -> Averages:
        """Return the averages.

        :param draws: averages of each scenario, (draws, groups, ...).
        :param log_weights: log-weights of equal parts of the draws; ``None`` for equal
            ones.
        """
        found = np.stack([np.asarray(x, float) for x in draws], 1)
        parts = np.zeros(1) if log_weights is None else np.asarray(log_weights, float)
        each = np.repeat(np.exp(parts - parts.max()), len(found) // len(parts))
        axes: dict[str, Sequence[Any]] = {}
        if self.labels is not None:
            name, labels = self.labels
            axes[name] = labels
            if self.contrast is not None:
                symbol, function = self.contrast
                found = np.asarray(function(found[:, 1:], found[:, :1]))
                axes[name] = [f"{x} {symbol} {labels[0]}" for x in labels[1:]]
        else:
            found = found[:, 0]
        entries = found.shape[2 + (self.labels is not None) :]
        if self.group is not None:
            axes["group"] = self.groups
        else:
            found = found.squeeze(1 + (self.labels is not None))
        names = ["entry"] if len(entries) == 1 else [f"entry {i}" for i in range(9)]
        axes |= {k: range(n) for k, n in zip(names, entries, strict=False)}
        return Averages(found, each / each.sum(), axes)


def _scenarios(
    model: Model,
    args: tuple[Any, ...],
    kwargs: dict[str, Any],
    kept: dict[str, Any],
    at: Mapping[str, Sequence[Any]],
    labels: Labels,
) -> list[tuple[tuple[Any, ...], dict[str, Any]]]:
    """Return the arguments of the model in each scenario.

    :param at: values of changed arguments by name.
    :param labels: labels of arguments that are categories.
    """
    places = {k: i for i, k in enumerate(argument_names(model, len(args))[: len(args)])}
    given = {**kept, **kwargs, **{k: args[i] for k, i in places.items()}}
    for name, values in at.items():
        if name not in given:
            raise ValueError(
                f"at has {name!r}, and the arguments that were passed are "
                f"{[*places, *kwargs]}"
            )
        if isinstance(values, str) or not isinstance(values, Sequence | np.ndarray):
            raise TypeError(
                f"at[{name!r}] is a {type(values).__name__}. Pass a list with one "
                f"value for each scenario, at={{{name!r}: [0, 1]}}"
            )
    if not at:
        return [(args, kwargs)]
    counts = {name: len(values) for name, values in at.items()}
    if len({*counts.values()}) != 1 or 0 in counts.values():
        raise ValueError(
            f"at has lists of lengths {counts}. Pass one value for each scenario, and "
            "at least one"
        )
    scenarios = []
    for i in range(next(iter(counts.values()))):
        each = {k: coded(k, x[i], labels.get(k)) for k, x in at.items()}
        changed = {k: _changed(k, given[k], x) for k, x in each.items()}
        own = [changed.pop(k, args[place]) for k, place in places.items()]
        scenarios.append(((*own,), {**kwargs, **changed}))
    return scenarios


def _changed(name: str, old: Any, new: Any) -> Any:
    """Return the new value of an argument in the shape of the old one."""
    if not is_array(old) or not np.ndim(old):
        return new
    new = np.asarray(new)
    kinds = np.issubdtype(new.dtype, np.floating), np.issubdtype(old.dtype, np.floating)
    dtype = (
        np.result_type(old.dtype, np.float32) if kinds == (True, False) else old.dtype
    )
    try:
        return np.broadcast_to(new, old.shape).astype(dtype)
    except ValueError:
        raise ValueError(
            f"at[{name!r}] has a value of shape {new.shape}, and {name} has shape "
            f"{np.shape(old)}. Pass numbers, or arrays of its shape"
        ) from None


def _labels(at: Mapping[str, Sequence[Any]]) -> tuple[str, tuple[Any, ...]]:
    """Return the names of scenarios: their values, or their places if these are
    arrays."""
    plain = {k: v for k, v in at.items() if all(np.ndim(x) == 0 for x in v)}
    number = len(next(iter(at.values())))
    if not plain:
        return ", ".join(at), tuple(range(number))
    told = [
        tuple(np.asarray(x).item() for x in each)
        for each in zip(*plain.values(), strict=True)
    ]
    labels = [x[0] if len(x) == 1 else ", ".join(map(str, x)) for x in told]
    return ", ".join(plain), tuple(labels)
