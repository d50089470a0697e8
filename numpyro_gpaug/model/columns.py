# SPDX-License-Identifier: Apache-2.0
"""Columns of pandas, polars and Arrow tables as arguments of models: numbers, and codes
of categories, whose labels are kept."""

from __future__ import annotations

import re
import warnings
from collections.abc import Callable, Mapping, Sequence
from inspect import signature
from typing import Any, NamedTuple

import jax
import numpy as np

from numpyro_gpaug.math.arrays import is_traced


def argument_names(model: Callable[..., Any], given: int) -> list[str]:
    """Return the names of a model's arguments, in order; ``*args`` are numbered.

    :param model: the model.
    :param given: the number of arguments given by position.
    """
    names: list[str] = []
    for parameter in signature(model).parameters.values():
        if parameter.kind is parameter.VAR_POSITIONAL:
            names += [f"{parameter.name}[{i}]" for i in range(given - len(names))]
        else:
            names.append(parameter.name)
    return names


def by_name(model: Callable[..., Any], args: Sequence[Any]) -> dict[str, Any]:
    """Return positional arguments of a model by name; see :func:`argument_names`.

    :param model: the model.
    :param args: the arguments.
    """
    return dict(zip(argument_names(model, len(args)), args, strict=False))


# Labels of the codes of an argument, by its name; names of columns, by "name.columns".
Labels = dict[str, tuple[str, ...]]

_NUMBER = re.compile(r"-?\d+([.]\d+)?")
_DAYS = "(({0} - {0}.min()) / numpy.timedelta64(1, 'D')).astype('float32')"
_DATES = (
    "{0} contains {1}. Pass numbers, such as days since the first date: with NumPy {2}"
)


class Columns(NamedTuple):
    """The arguments of a model as arrays.

    :param args: positional arguments.
    :param kwargs: keyword arguments.
    :param labels: labels of the arguments that were categories, and columns of tables.
    """

    args: tuple[Any, ...]
    kwargs: dict[str, Any]
    labels: Labels

    @classmethod
    def read(
        cls,
        model: Callable[..., Any],
        args: tuple[Any, ...],
        kwargs: dict[str, Any],
        known: Mapping[str, tuple[str, ...]] | None = None,
    ) -> Columns:
        """Read the arguments of a model. All but columns are returned as they are.

        :param model: the model.
        :param args: its arguments.
        :param kwargs: its keyword arguments.
        :param known: labels of the fit, in predictions: their codes are used, and the
            columns of tables are found by name. A category whose labels are not known
            would have other codes.
        :raises TypeError: for text, dates and durations.
        :raises ValueError: for categories that are missing, or not in the fit, and for
            columns that are missing.
        """
        predicts, known = known is not None, known or {}
        names = argument_names(model, len(args))[: len(args)]
        names += [f"argument {i}" for i in range(len(names), len(args))]
        if not any(map(is_column, jax.tree.leaves((args, kwargs)))) and not known:
            return cls(args, kwargs, {})
        labels: Labels = {}

        def one(name: str, value: Any) -> Any:
            if type(value) is dict:
                return {k: one(f"{name}[{k!r}]", x) for k, x in value.items()}
            text = isinstance(value, np.ndarray) and value.dtype.kind in "UO"
            if type(value).__module__.startswith("pyarrow"):
                value = value.to_pandas()  # whose categories have labels
            if not is_column(value) and not (text and name in known):
                _warn_of_codes(name, value, known.get(name, ()))
                return value
            if hasattr(value, "columns"):
                columns = _columns(name, value, known.get(f"{name}.columns"))
                labels[f"{name}.columns"] = tuple(map(str, columns))
                return _table(name, value, columns)
            found, own = _column(name, value, known.get(name))
            if own is None:
                _warn_of_codes(name, found, known.get(name, ()))
            elif predicts and name not in known:
                raise ValueError(
                    f"{name} contains categories, and contained numbers in the "
                    "fit. Pass the same numbers, or fit the categories"
                )
            else:
                labels[name] = own
            return found

        return cls(
            tuple(one(k, x) for k, x in zip(names, args, strict=True)),
            {k: one(k, x) for k, x in kwargs.items()},
            labels,
        )


def _warn_of_codes(name: str, value: Any, labels: Sequence[str]) -> None:
    """Warn about numbers that are both labels and codes, of different members.

    :param name: the name of the argument.
    :param value: the argument.
    :param labels: the labels of its codes.
    """
    known = isinstance(value, np.ndarray | jax.Array) and not is_traced(value)
    if not labels or not known or value.dtype.kind not in "iu":
        return
    codes = np.unique(value).tolist()
    # Numbers beside missing ones are floats: labels such as "1.0".
    numbers = [float(x) if _NUMBER.fullmatch(x) else None for x in labels]
    other = [k for k in codes if 0 <= k < len(labels) and numbers[k] != k]
    if other and set(codes) <= set(numbers):
        (first, *_) = other
        warnings.warn(
            f"{name} has numbers, which are codes of the categories of the fit: "
            f"{first} is the category {labels[first]!r}. For the category "
            f"{labels[numbers.index(first)]!r} pass this text, or a categorical column",
            stacklevel=2,
        )


def is_column(value: Any) -> bool:
    """Whether an argument is a column, or a table, of another library."""
    return hasattr(value, "to_numpy") and not hasattr(value, "addressable_shards")


def check_dates(name: str, value: np.ndarray) -> None:
    """Raise for dates and durations.

    :param name: the name of the argument.
    :param value: the argument.
    """
    if value.dtype.kind == "M":
        raise TypeError(_DATES.format(name, "dates", _DAYS.format(name)))
    if value.dtype.kind == "m":
        days = f"({name} / numpy.timedelta64(1, 'D')).astype('float32')"
        raise TypeError(_DATES.format(name, "durations", days))


def _column(
    name: str, value: Any, known: tuple[str, ...] | None
) -> tuple[np.ndarray, tuple[str, ...] | None]:
    """Return a column as an array, and its labels if it was one of categories."""
    categories = categories_of(value)
    if categories is None and known is None:
        return _numbers(name, value), None
    plain = np.asarray(value.to_numpy() if is_column(value) else value)
    if categories is None and plain.dtype.kind not in "UO":
        return _numbers(name, value) if is_column(value) else plain, None
    labels = known or tuple(map(str, categories or ()))
    text = [str(x) for x in plain.ravel()]
    missing = _missing(value, plain)
    if missing.any():
        raise ValueError(
            f"{name} has missing values ({missing.sum()}), the first in row "
            f"{np.flatnonzero(missing)[0]}. Drop these rows, or make them a category"
        )
    codes = {label: i for i, label in enumerate(labels)}
    if unknown := sorted(set(text) - set(labels)):
        raise ValueError(
            f"{name} has {unknown[0]!r}, which is not among the {len(labels)} labels "
            f"of the fit. To predict a new member pass integer codes ({len(labels)} "
            "for the first; the order is that of the categories), and a larger plate"
        )
    found = np.array([codes[x] for x in text], np.int32)
    return found.reshape(plain.shape), labels


def categories_of(value: Any) -> Sequence[Any] | None:
    """Return the categories of a column; ``None`` if it is no such column."""
    dtype = getattr(value, "dtype", None)
    if str(dtype).startswith("Categorical"):  # of polars, which keeps no order
        return sorted({x for x in value.to_list() if x is not None})
    known = getattr(dtype, "categories", None)
    return None if known is None else list(known)


def is_unordered(value: Any) -> bool:
    """Whether an argument is a column of text categories without an order."""
    known, dtype = categories_of(value), getattr(value, "dtype", None)
    ordered = getattr(dtype, "ordered", str(dtype).startswith("Enum"))
    return not ordered and any(isinstance(x, str) for x in known or ())


def _missing(value: Any, plain: np.ndarray) -> np.ndarray:
    """Return which entries are missing.

    :param value: a column.
    :param plain: the column as an array.
    """
    for method in ("isna", "is_null"):
        if hasattr(value, method):
            return np.asarray(getattr(value, method)(), bool)
    if plain.dtype.kind == "O":
        return np.array([x is None or x != x for x in plain.ravel()])
    return np.isnan(plain) if plain.dtype.kind == "f" else np.zeros(plain.shape, bool)


def _numbers(name: str, value: Any) -> np.ndarray:
    """Return a column of numbers; NaN for missing ones."""
    found = np.asarray(value.to_numpy())
    missing = _missing(value, found)
    check_dates(name, found)
    if found.dtype.kind == "f" or (found.dtype.kind in "biu" and not missing.any()):
        return found
    # Nullable types give arrays of objects.
    objects = found[~missing].tolist()
    present = np.array(objects)
    if present.ndim > 1 or present.dtype.kind not in "biuf":
        if hasattr(objects[0], "ordinal"):
            steps = f"{name}.astype('int64') - {name}.min().ordinal"
            raise TypeError(f"{name} contains periods. Pass their numbers: {steps}")
        if hasattr(objects[0], "year"):
            check_dates(name, np.empty(0, "datetime64[us]"))
        raise TypeError(
            f"{name} contains text. Convert it by .astype('category') of pandas "
            "or .cast(polars.Categorical): the model gets codes, and summaries "
            "labels"
        )
    if not missing.any():
        return present
    filled = np.full(found.shape, np.nan)
    filled[~missing] = present
    return filled


def _columns(name: str, value: Any, known: tuple[str, ...] | None) -> list[Any]:
    """Return the names of the columns of a table, in the order of the fit. Numbers and
    their text are the same name."""
    columns = {str(k): k for k in value.columns}
    if len(columns) < len(value.columns):
        raise ValueError(f"{name} has columns of the same name, {[*value.columns]}")
    if missing := [k for k in known or () if k not in columns]:
        raise ValueError(
            f"{name} lacks the column {missing[0]!r} of the fit, and has "
            f"{[*columns][:8]}. An array has columns in the order of the fit"
        )
    return [columns[k] for k in known or columns]


def _table(name: str, value: Any, names: Sequence[Any]) -> np.ndarray:
    """Return columns of a table of numbers as an array, rows first."""
    columns = []
    for k in names:
        own = f"column {k!r} of {name}"
        if categories_of(value[k]) is not None:
            raise TypeError(
                f"{own} contains categories. Pass it as an argument of its own, or as "
                "columns of 0 and 1, one of each"
            )
        columns.append(_numbers(own, value[k]))
    return np.column_stack(columns)


# -- labels in summaries --------------------------------------------------------------


def labelled(
    entry: str, axes: Mapping[str, Sequence[str]], labels: Mapping[str, Sequence[str]]
) -> str:
    """Return the name of an entry of a site, with labels instead of positions.

    :param entry: ``effect[2]``.
    :param axes: by site, the argument that indexes each axis; empty for none.
    :param labels: labels by argument.

    **Example**

    >>> labelled("a[1, 0]", {"a": ("herd", "")}, {"herd": ("Aubrac", "Salers")})
    'a[Salers, 0]'
    >>> labelled("a[1, 0]", {"a": ("herd", "")}, {"herd": ("7", "9")})
    'a[herd 9, 0]'
    """
    found = re.fullmatch(r"(.*)\[([\d, ]+)\]", entry)
    if found is None or found[1] not in axes:
        return entry
    shown = []
    for place, argument in zip(found[2].split(", "), axes[found[1]], strict=True):
        known = labels.get(argument, ())
        if int(place) >= len(known):
            shown.append(place)
            continue
        label = known[int(place)]
        # A number alone would look like an index.
        bare = _NUMBER.fullmatch(label)
        shown.append(f"{argument} {label}" if bare else label)
    return f"{found[1]}[{', '.join(shown)}]"
