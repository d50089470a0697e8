# SPDX-License-Identifier: Apache-2.0
"""The parts of ArviZ that are used, imported when first needed."""

from __future__ import annotations

from importlib import import_module
from typing import Any


def part_of_arviz(name: str) -> Any:
    """``arviz_base`` or ``arviz_stats``, or what to install.

    :param name: of the package.
    :raises ImportError: where it is missing, or does not import.
    """
    try:
        return import_module(name)
    except Exception as error:
        raise ImportError(
            f"{name} does not import ({error}). It comes with this package: "
            'pip install -U "arviz-base>=0.8" "arviz-stats[xarray]>=0.8" puts it back, '
            "on Python 3.11 too; arviz itself, whose 1.0 needs Python 3.12, is not used"
        ) from error
