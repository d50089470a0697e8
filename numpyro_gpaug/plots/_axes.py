# SPDX-License-Identifier: Apache-2.0
"""Where plots are drawn."""

from __future__ import annotations

from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from matplotlib.axes import Axes


def axes_or_new(ax: Axes | None) -> Axes:
    """The axes given, or those of a new figure."""
    if ax is not None:
        return ax
    try:
        import matplotlib.pyplot as plt
    except ImportError as error:
        error.add_note('matplotlib comes with pip install "numpyro_gpaug[plots]"')
        raise
    return plt.subplots(layout="constrained")[1]
