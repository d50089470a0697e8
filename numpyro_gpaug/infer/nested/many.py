# SPDX-License-Identifier: Apache-2.0
"""Runs of ``NestedVI`` for many responses."""

from __future__ import annotations

from collections import Counter
from typing import TYPE_CHECKING, Any

import numpy as np

from numpyro_gpaug._display import Displayed, Rows
from numpyro_gpaug.infer.nested.report import columns_of

if TYPE_CHECKING:
    import pandas

CERTIFIED = "certified"


class NestedRuns(Displayed):
    """The runs of one model for many responses, which :meth:`NestedVI.run_many
    <numpyro_gpaug.NestedVI.run_many>` returns; arrays over the responses.

    :param runs: of each run the table (``None`` if it failed), k-hat, the evidence and
        the verdict.
    :ivar khats: k-hat of each run.
    :ivar log_evidences: the logarithm of the evidence of each.
    :ivar verdicts: ``"certified"``, or what is wrong with a run.
    """

    def __init__(self, runs: list[tuple[Any, float, float, str]]) -> None:
        self._tables, khats, evidences, verdicts = zip(*runs, strict=True)
        self.khats, self.log_evidences = np.array(khats), np.array(evidences, float)
        self.verdicts = np.array(verdicts, object)

    def __len__(self) -> int:
        return len(self._tables)

    @property
    def certified(self) -> np.ndarray:
        """Whether each run is certified."""
        return self.verdicts == CERTIFIED

    def summary(self) -> pandas.DataFrame:
        """Return the tables of :meth:`NestedVI.summary
        <numpyro_gpaug.NestedVI.summary>`, one below the other, with rows ``(response,
        site)``. Runs that failed have NaN.
        """
        import pandas

        labels = list(next(x for x in self._tables if x is not None))
        columns = columns_of()
        none = {label: [np.nan] * len(columns) for label in labels}
        rows = [[(table or none)[k] for k in labels] for table in self._tables]
        index = pandas.MultiIndex.from_product(
            [range(len(self)), labels], names=["response", "site"]
        )
        return pandas.DataFrame(np.concatenate(rows), index, columns)

    def _display(self) -> tuple[str, Rows]:
        counts = Counter(self.verdicts).most_common()
        rows = [(str(number), verdict) for verdict, number in counts]
        return f"{len(self)} runs of NestedVI", rows
