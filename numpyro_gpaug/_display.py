# SPDX-License-Identifier: Apache-2.0
"""Printing of objects as a title and aligned rows, or as a table in notebooks; and
errors for objects that cannot be pickled."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from html import escape
from typing import Any, ClassVar, NoReturn

import jax
import jax.numpy as jnp
import numpy as np

Rows = Sequence[tuple[str, ...]]

# Arrays of at most this many values are written out; of larger ones, only the shape.
_SHOWN = 6


def of_posterior(where: str) -> Callable[[Any, str], Any]:
    """Return a ``__getattr__`` whose error names the object that predicts.

    :param where: the call that returns it.
    """

    def missing(self: Any, name: str) -> Any:
        raise AttributeError(
            f"{type(self).__name__} has no attribute {name!r}. {where} predicts, and "
            "has summaries"
        )

    return missing


class Displayed:
    """An object that prints as a title and rows: aligned text, HTML in notebooks."""

    def _display(self) -> tuple[str, Rows]:
        raise NotImplementedError

    def __repr__(self) -> str:
        return as_text(*self._display())

    def _repr_html_(self) -> str:
        return as_html(*self._display())


class NotPickled(Displayed):
    """An object with compiled programs, which cannot be pickled. Its error explains
    that; otherwise ``pickle`` would complain about a function of JAX.

    :param instead: the advice in the error.
    """

    _instead: ClassVar[str]

    def __init_subclass__(cls, instead: str, **kwargs: Any) -> None:
        super().__init_subclass__(**kwargs)
        cls._instead = instead

    def __reduce__(self) -> NoReturn:
        raise TypeError(
            f"a {type(self).__name__} contains compiled programs, which cannot be "
            f"pickled: {self._instead}"
        )


def as_text(title: str, rows: Rows) -> str:
    """Return a title, and the rows under it with their columns aligned.

    :param title: the first line.
    :param rows: rows with equal numbers of cells.

    **Example**

    >>> print(as_text("Fit", [("steps", "20"), ("bound", "-1.5")]))
    Fit
      steps  20
      bound  -1.5
    """
    widths = [max(map(len, column)) for column in zip(*rows, strict=True)]
    lines = (
        "  ".join(f"{cell:{n}}" for cell, n in zip(row, widths, strict=True))
        for row in rows
    )
    return "\n".join([title, *(f"  {line.rstrip()}" for line in lines)])


def as_html(title: str, rows: Rows) -> str:
    """Return an HTML table; a row with an empty first cell continues the row above it.

    :param title: its caption.
    :param rows: rows with equal numbers of cells.

    **Example**

    >>> as_html("Fit", [("bound", "at"), ("", "rest")]).count("<tr>")
    1
    """
    whole: list[list[str]] = []
    for row in rows:
        if whole and not row[0]:
            pairs = zip(whole[-1], row, strict=True)
            whole[-1] = [f"{above} {rest}".strip() for above, rest in pairs]
        else:
            whole.append([*row])
    cell = '<td style="text-align: left">{}</td>'.format
    body = "".join(
        f"<tr>{''.join(cell(escape(text)) for text in row)}</tr>" for row in whole
    )
    caption = f'<caption style="text-align: left">{escape(title)}</caption>'
    return f"<table>{caption}<tbody>{body}</tbody></table>"


def brief(value: Any) -> str:
    """Return a value in a few characters: the numbers if they are few, otherwise the
    shape.

    :param value: an array, a number, a tree of arrays, or anything else.

    **Example**

    >>> import numpy as np
    >>> brief(0.123456), brief(np.ones(2)), brief(np.zeros((30, 30)))
    ('0.1235', '[1, 1]', 'array (30, 30)')
    """
    if isinstance(value, jax.core.Tracer):
        return f"traced {value.shape}"
    if isinstance(value, float | int):
        return f"{value:.4g}"
    if isinstance(value, np.ndarray | np.generic | jax.Array):
        # A random key is an array without numbers.
        numeric = jnp.issubdtype(value.dtype, jnp.number)
        if value.ndim > 1 or value.size > _SHOWN or not numeric:
            return f"array {value.shape}"
        numbers = np.asarray(value)
        if numbers.ndim == 0:
            return f"{numbers:.4g}"
        return f"[{', '.join(f'{x:.4g}' for x in numbers)}]"
    leaves = jax.tree.leaves(value)
    if leaves and leaves[0] is not value:
        return f"{len(leaves)} arrays, {sum(map(np.size, leaves))} numbers"
    return str(value)


def name_of(fn: Callable[..., Any]) -> str:
    """Return the name of a function, or of another callable.

    :param fn: a model.
    """
    return getattr(fn, "__name__", type(fn).__name__)


def entries(name: str, shape: tuple[int, ...]) -> Iterator[tuple[str, Any]]:
    """Yield the label and the place of every entry of an array.

    **Example**

    >>> [label for label, _ in entries("effect", (2,))]
    ['effect[0]', 'effect[1]']
    """
    for place in np.ndindex(shape):
        yield f"{name}[{', '.join(map(str, place))}]" if place else name, place
