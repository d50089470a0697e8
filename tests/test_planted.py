# SPDX-License-Identifier: Apache-2.0
"""Errors to plant: their places in the package, and the tests that catch them."""

from tests.planted import TOP, planted


def test_every_error_has_one_place_and_tests():
    for error in planted():
        text = (TOP / "numpyro_gpaug" / error.module).read_text()
        assert text.count(error.right) == 1, error.what
        tests = [TOP / "tests" / f"{name}.py" for name in error.tests]
        assert tests, error.what
        assert all(path.exists() for path in tests), error.what
