# SPDX-License-Identifier: Apache-2.0
"""Fixtures shared by all tests."""

from collections.abc import Iterator

import pytest

try:
    from jax import enable_x64
except ImportError:
    from jax.experimental import enable_x64


@pytest.fixture
def x64() -> Iterator[None]:
    """Run the test with 64-bit types enabled."""
    with enable_x64(True):
        yield
