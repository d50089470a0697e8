# SPDX-License-Identifier: Apache-2.0
"""The arguments of a fit that its predictions keep using."""

from __future__ import annotations

import warnings
from collections.abc import Callable
from inspect import signature
from typing import Any, NamedTuple

import jax
import numpy as np
from jax import Array

from numpyro_gpaug.math.fingerprints import fingerprint
from numpyro_gpaug.model.arguments import Arguments, Model, Values, is_array
from numpyro_gpaug.model.columns import Columns, Labels, by_name
from numpyro_gpaug.model.latents import Structure
from numpyro_gpaug.model.sources import Sources
from numpyro_gpaug.model.validation import check_arguments

# The largest number of columns whose ranges are kept; the number of rows from which
# they are computed; and of rows of a prediction that are compared. A warning follows if
# half of these are this many standard deviations from the mean of the fit, and this
# many times as far as any row of the fit. With fewer rows than the last number, there
# is no reliable deviation.
_COLUMNS, _ROWS, _SOME, _FAR, _TIMES, _FEW = 1000, 10**5, 64, 5.0, 2.0, 10


class Range(NamedTuple):
    """The location of the rows of a column.

    :param mean: of them.
    :param spread: their standard deviation.
    :param reach: how many of these the farthest is from the mean, rounded up.
    """

    mean: float
    spread: float
    reach: float


class FitArguments(NamedTuple):
    """A posterior's description of the arguments of its fit.

    :param kwargs: keyword arguments of the fit, without observations.
    :param observations: names of the arguments that hold observations.
    :param shared: names of arguments without a row per datum.
    :param data: positional arguments, and keyword arguments that hold observations,
        with shapes in place of arrays.
    :param fingerprints: by name, of the keyword arguments that determine inducing
        inputs, and, if keyword arguments with a row per datum are kept, of positional
        arguments. They tell other rows from those of the fit.
    :param ranges: ranges of the columns of arguments of floats with a row per datum, by
        name.
    :param rows: a fingerprint of all arguments with a row per datum, observations
        included; ``None`` if it is not known.
    :param labels: labels of the codes of arguments that were categories, by name.
    :param axes: by site, the argument with labels that indexes each axis; empty for
        none.
    """

    kwargs: dict[str, Any]
    observations: tuple[str, ...]
    shared: tuple[str, ...]
    data: tuple[tuple[Any, ...], dict[str, Any]]
    fingerprints: dict[str, int] = {}
    ranges: dict[str, tuple[Range, ...]] = {}
    rows: int | None = None
    labels: Labels = {}
    axes: dict[str, tuple[str, ...]] = {}

    @classmethod
    def of_fit(
        cls,
        model: Model,
        structure: Structure,
        origins: Sources,
        args: tuple[Any, ...],
        kwargs: dict[str, Any],
        arguments: Arguments,
    ) -> FitArguments:
        """Describe the arguments of a fit.

        :param model: the model.
        :param structure: of the model at these arguments.
        :param origins: what is computed from which argument.
        :param args: the arguments.
        :param kwargs: the keyword arguments.
        :param arguments: both, with as many rows as the structure has.
        :raises ValueError: if inducing inputs or hyperparameters are computed from a
            positional argument, which changes at prediction.
        """
        observations, inducing, _, pooled = origins
        positional = by_name(model, args)
        if lost := [name for name in inducing if name in positional]:
            raise ValueError(
                f"inducing inputs or hyperparameters are computed from {lost}, "
                "which change at prediction. Write def model(X, y=None, *, "
                "inducing) and run it with inducing=Z by keyword, which the "
                "posterior keeps (Z may be X), or make them params"
            )
        kept = {k: v for k, v in kwargs.items() if k not in observations}
        rows = {f.shape[0] for f in structure.functions.values()}
        # A numpyro.factor has no plate that shows which arguments are data.
        if observations:
            rows |= {n for p in structure.plates.values() for n in p}
        named = positional | kept
        at = arguments.merge()
        read = by_name(model, at[0]) | at[1]
        # Arguments that determine inducing inputs have no row per datum, whatever their
        # length.
        shared = tuple(
            k for k in named if k in inducing or (rows and not rows & _lengths(read[k]))
        )
        data = args, {k: v for k, v in kwargs.items() if k not in kept}
        seen = {k: _numbers(x) for k, x in kept.items() if k in inducing}
        if any(k not in shared for k in kept):
            seen |= {k: x for k, x in positional.items() if k not in observations}
        rowwise = {k: x for k, x in named.items() if k not in (*shared, *observations)}
        _warn_of_pooled([k for k in pooled if k in rowwise])
        ranges = {k: found for k, x in rowwise.items() if (found := _ranges(x))}
        by_shape = jax.tree.map(_by_shape, data)
        fit = cls(kept, observations, shared, by_shape, _all_seen(seen), ranges)
        return fit._replace(rows=fit._rows(model, args, kwargs))

    def holding(self, kwargs: dict[str, Any]) -> FitArguments:
        """Return a copy with other keyword arguments of the fit."""
        known = {k: x for k, x in self.fingerprints.items() if k not in kwargs}
        new = kwargs.keys() & self.fingerprints.keys()
        known |= _all_seen({k: _numbers(kwargs[k]) for k in new})
        return self._replace(kwargs={**self.kwargs, **kwargs}, fingerprints=known)

    def joined(
        self,
        model: Model,
        args: tuple[Any, ...],
        kwargs: dict[str, Any],
        weighing: Callable[[Arguments], tuple[str, ...] | None] = lambda _: None,
    ) -> tuple[Arguments, frozenset[int]]:
        """Return the model's arguments, and which of their arrays run over rows: the
        new ones whose leading axis equals that of the first; none for a model whose
        inputs had no row per datum at its fit.

        :param model: the model.
        :param args: its arguments.
        :param kwargs: its keyword arguments.
        :param weighing: returns the names of the arguments on which the weights of
            latents depend, if they are known. It is called only if rows are far from
            those of the fit.
        """
        args, kwargs, _ = Columns.read(model, args, kwargs, self.labels)
        # Observations that are not finite have no density unless they are masked.
        check_arguments(model, args, kwargs, lambda: Sources(self.observations, (), ()))
        positional = by_name(model, args)
        # An argument passed by name in the fit may now be passed by position.
        kept = {k: v for k, v in self.kwargs.items() if k not in positional}
        merged = kept | kwargs
        arguments = Arguments.split(args, merged)
        new = [(name not in self.shared, x) for name, x in positional.items()]
        new += [
            (k in kwargs and k not in self.shared, merged[k]) for k in sorted(merged)
        ]
        given = positional | kwargs
        self._refuse_rows_of_fit(positional, kwargs)
        self._refuse_inducing(given)
        self._refuse_shapes(model, given, lambda: weighing(arguments))
        self._warn_of_far(given, lambda: weighing(arguments))
        flags = [
            flag for flag, x in new for leaf in jax.tree.leaves(x) if is_array(leaf)
        ]
        pairs = list(zip(flags, arguments.arrays, strict=True))
        rows = [a.shape[0] for flag, a in pairs if flag and a.ndim]
        # A series with a number of steps, or a table of students and items, has no
        # inputs.
        missed = () if rows else self.not_passed(model, arguments)
        if rows[:1] == [0] or missed:
            raise ValueError(
                "pass the new inputs: arrays with one row per point"
                + f" for {', '.join(missed)}" * bool(missed)
            )
        return arguments, frozenset(
            i
            for i, (flag, a) in enumerate(pairs)
            if flag and a.ndim > 0 and a.shape[0] == rows[0]
        )

    def _refuse_rows_of_fit(
        self, positional: dict[str, Any], kwargs: dict[str, Any]
    ) -> None:
        """Raise if new rows, as many as in the fit, would be combined with the fit's
        rows of a keyword argument.

        :param positional: arguments of a prediction, by name.
        :param kwargs: its keyword arguments.
        """
        known = {k: x for k, x in self.fingerprints.items() if k in positional}
        rows = {n for k in known for n in _lengths(positional[k])}
        rows &= {n for x in self.data[0] for n in _lengths(x)}
        left = [
            k
            for k, x in self.kwargs.items()
            if k not in (*kwargs, *positional, *self.shared) and rows & _lengths(x)
        ]
        if not left:
            return
        differ = [k for k, x in known.items() if _seen(positional[k]) not in (None, x)]
        if differ:
            raise ValueError(
                f"{differ[0]!r} differs from the fit, but {left[0]!r} is kept from "
                "the fit and has a row per datum. Pass it for the new rows too, as "
                f"in predict_y({differ[0]}_new, {left[0]}=...)"
            )

    def _rows(
        self, model: Model, args: tuple[Any, ...], kwargs: dict[str, Any]
    ) -> int | None:
        """Return the fingerprint of all arguments with a row per datum."""
        given = by_name(model, args) | kwargs
        return _seen({k: x for k, x in given.items() if k not in self.shared})

    def refuse_other_rows(self, model: Model, arguments: Arguments) -> None:
        """Raise for data that are not the data of the fit.

        :param model: the model.
        :param arguments: its arguments, observations included.
        """
        found = self._rows(model, *arguments.merge())
        if found is not None and self.rows not in (None, found):
            raise ValueError(
                "only observations of the fit can be left out, and these rows differ "
                "from the fit in values, number or order. Pass the rows that it was "
                "fitted to; log_prob(X, y) scores others"
            )

    def _refuse_inducing(self, given: Values) -> None:
        """Raise if inducing inputs or hyperparameters differ from the fit, to which the
        posterior of the inducing values belongs.

        :param given: arguments of a prediction, by name.
        """
        for name in given.keys() & self.kwargs.keys() & self.fingerprints.keys():
            found = _seen(_numbers(given[name]))
            if found not in (None, self.fingerprints[name]):
                raise ValueError(
                    f"{name!r} determines inducing inputs or hyperparameters, and "
                    "differs from the fit. Leave it out: the posterior keeps that of "
                    "the fit"
                )

    def _refuse_shapes(
        self, model: Model, given: Values, weighing: Callable[[], Any]
    ) -> None:
        """Raise for a first argument with fewer axes than in the fit, and for an
        argument whose columns weigh latents, and are more or fewer than in the fit:
        more weights would follow their prior, in silence. Columns that
        observations have, too, are members of a plate, which may be new, and a square
        matrix is one of rows by rows.

        :param model: the model.
        :param given: arguments of a prediction, by name.
        :param weighing: returns the names of the arguments on which the weights depend.
        """
        args, others = self.data
        of_fit = by_name(model, args) | self.kwargs | others
        shapes = {k: _shape(x) for k, x in of_fit.items()}
        members = {n for k in self.observations for n in shapes.get(k, ())[1:]}
        rowwise = [k for k in shapes if k not in (*self.shared, *self.observations)]
        first = next((k for k in rowwise if shapes[k]), "")
        if given.get(first) is not None:
            here, known = _shape(given[first]), shapes[first]
            if len(here) < len(known):
                raise ValueError(
                    f"{first} has shape {here}, and had {known} in the fit. Pass an "
                    f"array of rows, {first}[None] for one row"
                )
        for name in given.keys() & {*rowwise}:
            here, known = _shape(given[name]), shapes[name]
            if len(here) != 2 or len(known) != 2 or here[1] == known[1]:
                continue
            if here[0] == here[1] and known[0] == known[1]:
                continue
            if known[1] in members:
                continue
            if (names := weighing()) is None or name in names:
                raise ValueError(
                    f"{name} has {here[1]} columns, and had {known[1]} in the fit. "
                    "Pass the same columns, in the same order"
                )

    def _warn_of_far(
        self, given: Values, weighing: Callable[[], tuple[str, ...] | None]
    ) -> None:
        """Warn about rows that are far from all rows of the fit. An exposure or an
        offset may be anywhere: the weights of latents do not depend on it.

        :param given: arguments of a prediction, by name.
        :param weighing: returns the names of the arguments on which the weights depend.
        """
        for name, ranges in self.ranges.items():
            rows = _some_rows(given.get(name), _SOME)
            if rows is None or rows.shape[1] != len(ranges):
                continue
            mean, spread, reach = np.array(ranges).T
            here = np.median(rows, 0)
            far = np.abs(here - mean) > spread * np.maximum(_FAR, _TIMES * reach)
            found = np.flatnonzero(far & (spread > 0))[:1]
            if len(found) and (names := weighing()) is not None and name not in names:
                continue
            for i in found:
                which = name if len(ranges) == 1 else f"column {i} of {name}"
                warnings.warn(
                    f"{which} is about {here[i]:.3g} here, but was {mean[i]:.3g}, "
                    f"give or take {spread[i]:.3g}, in the fit, which has no "
                    "information so far away. Pass columns in the units of the "
                    "fit, standardised with its means and deviations if they were",
                    stacklevel=7,
                )

    def not_passed(self, model: Model, arguments: Arguments) -> tuple[str, ...]:
        """The names of arguments that had a row per datum at the fit, and have no new
        rows: left out, or, as keyword arguments, kept from the fit.

        :param model: the model.
        :param arguments: of a prediction.
        """
        args, kwargs = arguments.merge()
        by_place = by_name(model, args)
        given = by_place | kwargs
        of_fit = by_name(model, self.data[0]) | self.kwargs
        return tuple(
            name
            for name, value in of_fit.items()
            if name not in (*self.observations, *self.shared)
            and jax.tree.leaves(value)
            and (given.get(name) is None or _alike(given[name], value))
            # If inputs of the fit are passed again, they belong to new rows.
            and by_place.get(name) is None
        )

    def without_observations(self, model: Model, given: int) -> dict[str, None]:
        """Set observation arguments to ``None`` that were not passed and have no
        default.

        :param model: the model.
        :param given: how many positional arguments were passed.
        """
        parameters = list(signature(model).parameters.values())[given:]
        return {
            p.name: None
            for p in parameters
            if p.name in self.observations and p.default is p.empty
        }


def _alike(new: Any, old: Any) -> bool:
    """Whether arrays of a prediction have the shapes of the fit's."""
    leaves = zip(jax.tree.leaves(new), jax.tree.leaves(old), strict=False)
    return all(np.shape(a) == np.shape(b) for a, b in leaves)


def _seen(tree: Any) -> int | None:
    """A fingerprint of arrays, in single precision, in which they may be passed again;
    ``None`` if they are traced, or parts of them are in other processes."""
    arrays = [x for x in jax.tree.leaves(tree) if is_array(x)]
    if any(
        isinstance(x, jax.core.Tracer) or not getattr(x, "is_fully_addressable", True)
        for x in arrays
    ):
        return None
    return int(fingerprint(np.asarray(x, np.float32) for x in arrays))


def _all_seen(named: dict[str, Any]) -> dict[str, int]:
    """Return the fingerprints of arguments that have one."""
    return {k: seen for k, x in named.items() if (seen := _seen(x)) is not None}


def _numbers(tree: Any) -> list[Any]:
    """The arrays of an argument, with numbers as arrays."""
    leaves = jax.tree.leaves(tree)
    numbers = [np.asarray(x) if isinstance(x, int | float) else x for x in leaves]
    return [x for x in numbers if is_array(x)]


def _warn_of_pooled(names: list[str]) -> None:
    if names:
        warnings.warn(
            "the model computes a sum, a mean, an extreme or an order of all rows "
            f"of {names[0]!r}, which differs at other rows. Compute it outside, and "
            "pass it by keyword, which the posterior keeps",
            stacklevel=5,
        )


def _some_rows(x: Any, most: int) -> np.ndarray | None:
    """Return rows (n, columns) of floats, at most about so many; ``None`` of all else
    than an array of them that one device holds."""
    known = is_array(x) and not isinstance(x, jax.core.Tracer)
    if not known or (isinstance(x, jax.Array) and len(x.sharding.device_set) > 1):
        return None
    if x.ndim not in (1, 2) or not x.size or not np.issubdtype(x.dtype, np.floating):
        return None
    rows = np.asarray(x[:: max(1, len(x) // most)], float)
    return rows.reshape(len(rows), -1)


def _ranges(x: Any) -> tuple[Range, ...]:
    """Return the ranges of the columns of an argument, if it is an array of floats."""
    rows = _some_rows(x, _ROWS)
    if rows is None or rows.shape[1] > _COLUMNS or len(rows) < _FEW:
        return ()
    mean, spread = rows.mean(0), rows.std(0)
    reach = np.abs(rows - mean).max(0) / np.where(spread > 0, spread, np.inf)
    # A mean may be far larger than the deviation: years, degrees of longitude.
    columns = zip(mean, spread, np.ceil(reach), strict=True)
    return tuple(Range(*(float(f"{number:.12g}") for number in c)) for c in columns)


def _lengths(tree: Any) -> set[int]:
    """The lengths of the arrays of an argument."""
    leaves = jax.tree.leaves(tree)
    return {n for x in leaves for n in _shape(x)[:1]}


def _shape(x: Any) -> tuple[int, ...]:
    return x.shape if is_array(x) or isinstance(x, jax.ShapeDtypeStruct) else ()


def _by_shape(leaf: Any) -> Any:
    return jax.ShapeDtypeStruct(leaf.shape, leaf.dtype) if is_array(leaf) else leaf


def joined_rows(shape: tuple[int, ...], parts: list[Array]) -> Array:
    """Join parts along the axis over rows: the one whose size differs from that of a
    block."""
    sizes = zip(parts[0].shape, shape, strict=True)
    axes = [i for i, (block, whole) in enumerate(sizes) if block != whole]
    if not axes:
        return parts[0]
    if len(axes) > 1:
        raise ValueError(
            f"predictions have shape {shape}: an argument without a row per datum "
            f"has {shape[axes[0]]} entries, as many as there are rows, and was "
            "mistaken for rows. Predict at another number of rows"
        )
    # In NumPy, because JAX would compile a program for each number of rows.
    whole = np.concatenate([np.asarray(part) for part in parts], axes[0])
    return jax.device_put(np.take(whole, range(shape[axes[0]]), axes[0]))
