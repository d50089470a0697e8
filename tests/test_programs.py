# SPDX-License-Identifier: Apache-2.0
"""Random programs are fitted correctly or refused; see :mod:`tests.programs`."""

import pytest

from tests.conftest import slow
from tests.programs import run


@pytest.mark.parametrize(
    ("first", "number", "fitted"),
    [
        (0, 6, False),
        (60, 2, True),
        slow(6, 54, False),
    ],
)
def test_random_programs_are_right_or_refused(
    first: int, number: int, fitted: bool
) -> None:
    counts = run(first, number, fitted=fitted)
    assert counts.total() == number
    assert counts["wrong"] == counts["error"] == 0, counts
    assert counts["refused"] <= 1 + number / 4, counts
