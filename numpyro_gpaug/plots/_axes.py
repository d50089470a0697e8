# SPDX-License-Identifier: Apache-2.0
"""Axes of plots."""

from __future__ import annotations

from collections.abc import Mapping
from typing import TYPE_CHECKING, Any

from jax.typing import ArrayLike

if TYPE_CHECKING:
    from matplotlib.axes import Axes


def axes_or_new(ax: Axes | None) -> Axes:
    """Return the given axes, or the axes of a new figure."""
    if ax is not None:
        return ax
    try:
        import matplotlib.pyplot as plt
    except ImportError as error:
        error.add_note('matplotlib comes with pip install "numpyro_gpaug[plots]"')
        raise
    return plt.subplots(layout="constrained")[1]


def by_method(
    values: ArrayLike | Mapping[str, ArrayLike], colors: Mapping[str, str] | None
) -> list[tuple[str, ArrayLike, str]]:
    """Return names, values and colours of methods, or of a single method."""
    methods = values if isinstance(values, Mapping) else {"predictions": values}
    given = colors or {}
    return [(k, v, given.get(k, f"C{i}")) for i, (k, v) in enumerate(methods.items())]


def legend_above(ax: Axes, **settings: Any) -> Any:
    """Put a legend above the axes, where no mark can be behind it, with room for a
    title."""
    return ax.legend(
        frameon=False, loc="lower center", bbox_to_anchor=(0.5, 0.98), fontsize="small",
        **settings,
    )  # fmt: skip


def diagonal(ax: Axes, zorder: int) -> None:
    """Draw the line where predictions equal observations."""
    ax.plot([0, 1], [0, 1], color="0.7", lw=1, ls="--", zorder=zorder)
