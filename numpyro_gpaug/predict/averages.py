# SPDX-License-Identifier: Apache-2.0
"""Averages of predictions over rows, as joint draws, and the averages that a user asks
for: rows, scenarios, groups and contrasts."""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping, Sequence
from functools import partial
from typing import TYPE_CHECKING, Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
from jax import Array, random
from jax.typing import ArrayLike
from numpyro.distributions import Distribution, Unit

from numpyro_gpaug._display import Displayed, Rows
from numpyro_gpaug._numpyro import one_thread, residual_policy
from numpyro_gpaug.distributions.predictor_mixture import uncensored
from numpyro_gpaug.likelihoods.expectations import base_distribution
from numpyro_gpaug.math import linalg
from numpyro_gpaug.math.importance import weighted_quantiles
from numpyro_gpaug.model.arguments import Arguments, Model, Values, is_array
from numpyro_gpaug.model.columns import Columns, Labels, by_name, is_column
from numpyro_gpaug.model.structure import run_model
from numpyro_gpaug.predict.summary import levels_of

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

    def summary(self, prob: float = 0.9) -> pandas.DataFrame:
        """Return a table of mean, standard deviation and three quantiles, with one row
        for each average.

        :param prob: the probability between the outer quantiles.
        """
        import pandas

        columns, levels = {"mean": self.mean, "sd": self.sd}, levels_of(prob)
        columns |= dict(zip(levels, self._quantiles((*levels.values(),)), strict=True))
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


class AveragesWanted(NamedTuple):
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
        by: ArrayLike | str | None,
        contrast: Contrast,
        weights: ArrayLike | None,
        labels: Labels | None = None,
    ) -> AveragesWanted:
        """Read the arguments of :meth:`Posterior.average`.

        :param kept: keyword arguments of the fit.
        :param labels: labels of arguments that were categories in the fit.
        """
        if isinstance(by, str):
            given = by_name(model, args) | kwargs
            if by not in given:
                raise ValueError(
                    f"by={by!r} is none of the arguments that were passed, {[*given]}"
                )
            by = given[by]
        args, kwargs, _ = Columns.read(model, args, kwargs, labels)
        scenarios = _scenarios(model, args, kwargs, kept, at or {}, labels or {})
        named = CONTRASTS.get(contrast) if isinstance(contrast, str) else None
        against = ("|", contrast) if callable(contrast) else named
        if contrast is not None and against is None:
            raise ValueError(
                f"contrast={contrast!r} is none of 'difference' and 'ratio', and no "
                "function of two arrays, lambda new, first: ..."
            )
        if contrast is not None and len(scenarios) < 2:
            raise ValueError(
                "a contrast compares scenarios. Pass at={'name': [value, other]} with "
                "at least two values of an argument"
            )
        groups, group = (), None
        if by is not None:
            found, group = np.unique(np.asarray(by), return_inverse=True)
            groups, group = tuple(found.tolist()), group.reshape(np.shape(by))
        heavy = None if weights is None else np.asarray(weights, float)
        if heavy is not None and not (np.isfinite(heavy) & (heavy >= 0)).all():
            raise ValueError(
                "weights must be finite and at least zero. Pass the number of people, "
                "or the exposure, that each row stands for"
            )
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
        self,
        draws: Sequence[Array],
        log_weights: np.ndarray | None,
        classes: Labels | None = None,
    ) -> Averages:
        """Return the averages.

        :param draws: averages of each scenario, (draws, groups, ...).
        :param log_weights: log-weights of equal parts of the draws; ``None`` for equal
            ones.
        :param classes: labels that the entries of a response may have, by argument.
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
        labelled = {k: x for k, x in (classes or {}).items() if (len(x),) == entries}
        if len(labelled) == 1:
            axes |= labelled
        else:
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
    positional = by_name(model, args)
    given = kept | kwargs | positional
    for name, values in at.items():
        if name not in given:
            raise ValueError(
                f"at has {name!r}, which is none of the arguments that were passed, "
                f"{[*positional, *kwargs]}"
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
        new = {
            k: np.asarray(x[i]) if k in labels and not is_column(x[i]) else x[i]
            for k, x in at.items()
        }
        each = Columns.read(model, (), new, labels).kwargs
        changed = {k: _changed(k, given[k], x) for k, x in each.items()}
        own = [changed.pop(k, x) for k, x in positional.items()]
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


Of = Callable[[Distribution], Array] | None
# Numbers held at once while draws are averaged.
BUDGET = 2**22


def response(fn: Distribution) -> Array:
    """Return the mean of a likelihood, or the probabilities of its classes, with the
    rows last.

    :param fn: the distribution of all observations given the latents.
    """
    base = base_distribution(fn)
    probs = jnp.asarray(getattr(base, "probs", 0.0))
    if not base.event_shape and probs.ndim == len(base.batch_shape) + 1:
        return jnp.moveaxis(
            jnp.broadcast_to(probs, (*fn.batch_shape, probs.shape[-1])), -1, 0
        )
    try:
        mean = fn.mean
    except NotImplementedError:
        raise ValueError(
            f"{type(base).__name__} has no mean. Pass of=, a function of the "
            "distribution, such as lambda d: d.probs"
        ) from None
    if not fn.batch_shape:
        return mean
    events = range(len(fn.batch_shape), jnp.ndim(mean))
    return jnp.moveaxis(mean, [*events], range(len(events)))


def over_rows(fn: Distribution, of: Of, rows: Mapping[str, Array]) -> Array:
    """Return a function of a likelihood averaged over rows, (groups, ...).

    :param fn: the distribution of all observations given the latents.
    :param of: the function; ``None`` for the mean.
    :param rows: ``group``, the group of each row; ``total``, an array with an entry for
        each group; ``weights``, of the rows.
    """
    shape, fn = fn.batch_shape or fn.event_shape, uncensored(fn)
    values = response(fn) if of is None else jnp.asarray(of(fn))
    split = values.ndim - len(shape)
    if split < 0 or values.shape[split:] != shape:
        raise ValueError(
            f"of returned shape {values.shape}, which must end in the shape of the "
            f"observations, {shape}. Further axes come before: jnp.moveaxis(values, "
            "-1, 0)"
        )
    values = jnp.moveaxis(values.reshape(*values.shape[:split], -1), -1, 0)
    for name in rows.keys() & {"group", "weights"}:
        if rows[name].shape != shape:
            raise ValueError(
                f"{'by' if name == 'group' else name} has shape {rows[name].shape}, "
                f"and the observations have shape {shape}: expected an entry for each"
            )
    size = math.prod(shape)
    weights = jnp.ravel(rows.get("weights", jnp.ones(size, values.dtype)))
    group = jnp.ravel(rows.get("group", jnp.zeros(size, int)))
    none = jnp.zeros(len(rows.get("total", jnp.zeros(1))), weights.dtype)
    each = jnp.expand_dims(weights, [*range(1, values.ndim)])
    sums = jnp.zeros((*none.shape, *values.shape[1:]), values.dtype)
    sums = linalg.added_at(sums, (group,), values * each)
    totals = linalg.added_at(none, (group,), weights)
    return sums / jnp.expand_dims(totals, [*range(1, sums.ndim)])


def pairs(key: Array, number: Array) -> tuple[Array, Array]:
    """Return the key of a draw, and the sign of its noise. Draws come in pairs with
    opposite noise, so that the average of a linear function has no error.

    :param key: the key of all draws.
    :param number: the number of the draw.
    """
    return random.fold_in(key, number // 2), 1.0 - 2.0 * (number % 2)


def in_chunks(function: Callable[[Array], Array], num: int, held: int) -> Array:
    """Map a function over the numbers of draws; several at once, since what does not
    differ between them is then computed once.

    :param function: a function of the number of a draw.
    :param num: number of draws.
    :param held: numbers that a draw holds.
    """
    most = max(1, min(num, BUDGET // max(held, 1)))
    parts = -(-num // most)
    numbers = jnp.arange(parts * -(-num // parts)).reshape(parts, -1)
    found = jax.lax.map(jax.vmap(function), numbers)
    return found.reshape(-1, *found.shape[2:])[:num]


# -- of draws -------------------------------------------------------------------------


@one_thread
def average(
    model: Model,
    samples: Mapping[str, ArrayLike],
    *args: Any,
    of: Of = None,
    at: Mapping[str, Sequence[Any]] | None = None,
    by: ArrayLike | str | None = None,
    contrast: Contrast = None,
    weights: ArrayLike | None = None,
    site: str | None = None,
    **kwargs: Any,
) -> Averages:
    """Average predictions over rows, and compare them at changed covariates, for draws
    of the latents: :meth:`Posterior.average` for MCMC draws, or for those of
    :meth:`NestedVI.get_samples`.

    Rows must be of groups of the fit: the draws contain no others, and JAX would use
    the last one for them.

    :param model: the model.
    :param samples: draws of all latents by name, equally weighted, draws first.
    :param args: the model's arguments, without observations.
    :param of: as for :meth:`Posterior.average`, like the arguments that follow.
    :param at: values of changed arguments.
    :param by: the group of each row.
    :param contrast: how scenarios are compared with the first.
    :param weights: weights of the rows.
    :param site: the observed site, if the model has several.
    :param kwargs: the model's keyword arguments.
    :raises ValueError: for arguments that do not fit together.

    **Example**

    >>> import jax, numpyro, jax.numpy as jnp, numpyro.distributions as dist
    >>> from numpyro.infer import MCMC, NUTS
    >>> import numpyro_gpaug as gpaug
    >>> def model(x, y=None):
    ...     b = numpyro.sample("b", dist.Normal(0, 1))
    ...     with numpyro.plate("data", len(x)):
    ...         numpyro.sample("y", dist.Poisson(jnp.exp(b * x)), obs=y)
    >>> x, y = jnp.array([0.0, 1.0, 0.0, 1.0]), jnp.array([1, 2, 1, 3])
    >>> mcmc = MCMC(NUTS(model), num_warmup=100, num_samples=100, progress_bar=False)
    >>> mcmc.run(jax.random.key(0), x, y)
    >>> draws = mcmc.get_samples()
    >>> ratio = gpaug.average(model, draws, x, at={"x": [0.0, 1.0]}, contrast="ratio")
    >>> print(bool(abs(ratio.mean[0] - jnp.exp(draws["b"]).mean()) < 1e-4))
    True
    """
    question = AveragesWanted.of(
        model, args, kwargs, {}, at=at, by=by, contrast=contrast, weights=weights
    )
    key, rows = random.key(0), question.rows
    first = Arguments.split(*question.scenarios[0])
    trace = jax.eval_shape(partial(_sites, model), first)
    known = {k: jnp.asarray(samples[k]) for k in trace if k in samples}
    name = _observed(set(trace) - known.keys(), site)
    num = len(next(iter(known.values())))
    drawn = residual_policy(model, "noise")

    @jax.jit
    def all_of(here: Arguments, known: Any, rows: Any) -> Array:
        def one(i: Array) -> Array:
            values = {k: x[i] for k, x in known.items()}
            trace = run_model(drawn, here, random.fold_in(key, i), values)
            return over_rows(trace[name]["fn"], of, rows)

        return in_chunks(one, num, sum(x.size for x in here.arrays))

    scenarios = [Arguments.split(*scenario) for scenario in question.scenarios]
    return question.answered([all_of(x, known, rows) for x in scenarios], None)


def _sites(model: Model, arguments: Arguments) -> Values:
    """Return values of the sample sites of a model, without factors."""
    return {
        k: s["value"]
        for k, s in run_model(model, arguments, random.key(0), {}).items()
        if s["type"] == "sample" and not isinstance(base_distribution(s["fn"]), Unit)
    }


def _observed(names: set[str], site: str | None) -> str:
    if site in names:
        return site
    if site is not None or len(names) != 1:
        raise ValueError(
            f"site={site!r}: the sites of the model without draws are "
            f"{sorted(names)}, and one of them is averaged. Pass site=..., and draws "
            "of all latents"
        )
    return names.pop()
