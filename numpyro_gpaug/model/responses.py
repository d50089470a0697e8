# SPDX-License-Identifier: Apache-2.0
"""Arguments of one model for many responses, which differ along a leading axis."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any, NamedTuple

import jax
import numpy as np

from numpyro_gpaug.model.arguments import Arguments, is_array
from numpyro_gpaug.model.columns import by_name


class Responses(NamedTuple):
    """The arguments of a model for many responses.

    :param args: positional arguments; those in ``over`` with a leading axis over the
        responses.
    :param kwargs: keyword arguments, likewise.
    :param over: the arguments, as trees of flags, that have this axis.
    :param number: the number of responses.
    """

    args: tuple[Any, ...]
    kwargs: dict[str, Any]
    over: tuple[Any, Any]
    number: int

    @classmethod
    def split(
        cls,
        model: Callable[..., Any],
        args: tuple[Any, ...],
        kwargs: dict[str, Any],
        over: str | Sequence[str],
        number: int | None = None,
    ) -> Responses:
        """Find the axis over responses.

        :param model: the model.
        :param args: its positional arguments.
        :param kwargs: its keyword arguments.
        :param over: names of the arguments with a leading axis over responses.
        :param number: the number of responses, if it is known.
        :raises ValueError: for names that are not passed, and for axes of different
            lengths.
        :raises TypeError: for arguments in ``over`` that are not arrays.
        """
        over = (over,) if isinstance(over, str) else tuple(over)
        positional = by_name(model, args)
        named = positional | kwargs
        if unknown := [name for name in over if named.get(name) is None]:
            raise ValueError(
                f"over names {unknown}, but the arguments that were passed are "
                f"{sorted(named)}"
            )
        if number is None and not over:
            raise ValueError(
                "over is empty. Name the arguments with a leading axis over the "
                "responses, such as over='y'"
            )
        lengths: dict[str, int] = {}
        for name in over:
            for leaf in jax.tree.leaves(named[name]):
                if not is_array(leaf) or not leaf.ndim:
                    raise TypeError(
                        f"{name} is in over, and must be an array with a leading "
                        f"axis over the responses; got a {type(leaf).__name__}"
                    )
                lengths[name] = len(leaf)
        found = {*lengths.values()} if number is None else {*lengths.values(), number}
        if len(found) > 1 or 0 in found:
            several = f" of {number} responses" if number is not None else ""
            raise ValueError(f"the leading axes{several} have lengths {lengths}")

        def flags(name: str, tree: Any) -> Any:
            return jax.tree.map(lambda _: name in over, tree)

        which = (
            tuple(flags(*pair) for pair in positional.items()),
            {name: flags(name, tree) for name, tree in kwargs.items()},
        )
        # As NumPy arrays, because each slice of a JAX array would call a program.
        args, kwargs = jax.tree.map(
            lambda x, of_each: np.asarray(x) if of_each else x, (args, kwargs), which
        )
        return cls(args, kwargs, which, found.pop())

    def one(self, i: int) -> tuple[tuple[Any, ...], dict[str, Any]]:
        """Return the arguments of one response."""
        found: Any = jax.tree.map(
            lambda x, of_each: x[i] if of_each else x,
            (self.args, self.kwargs), self.over,
        )  # fmt: skip
        return found

    def finite(self) -> np.ndarray:
        """Return the numbers of the responses whose arguments are finite, or of all if
        none are."""
        good = np.ones(self.number, bool)
        for x, of_each in zip(
            self.arrays(np.arange(self.number)), self.which, strict=True
        ):
            if of_each and np.issubdtype(x.dtype, np.inexact):
                good &= np.isfinite(x).reshape(self.number, -1).all(1)
        return np.flatnonzero(good) if good.any() else np.arange(self.number)

    @property
    def which(self) -> tuple[bool, ...]:
        """Whether each array of the split arguments has the axis over responses."""
        flags = jax.tree.leaves(self.over)
        return tuple(Arguments.select_arrays((self.args, self.kwargs), flags))

    def arrays(self, places: np.ndarray) -> tuple[Any, ...]:
        """Return the array arguments for some responses.

        :param places: the numbers of the responses.
        """
        whole = (self.args, self.kwargs)
        leaves = Arguments.select_arrays(whole, jax.tree.leaves(whole))
        pairs = zip(leaves, self.which, strict=True)
        return tuple(x[places] if of_each else x for x, of_each in pairs)


def in_lanes(
    function: Callable[..., Any], which: tuple[bool, ...]
) -> Callable[..., Any]:
    """Return a function of arrays as one of arrays with a leading axis, which computes
    all entries at once.

    :param function: a function of a tuple of arrays, and of trees with the axis.
    :param which: the arrays that have the axis.
    """

    def all_at_once(arrays: tuple[Any, ...], *trees: Any) -> Any:
        axes = tuple(0 if of_each else None for of_each in which)
        return jax.vmap(function, (axes, *[0] * len(trees)))(arrays, *trees)

    return all_at_once
