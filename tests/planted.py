# SPDX-License-Identifier: Apache-2.0
"""Plants errors in a copy of the package, one at a time, and runs quick tests on each.

``python -m tests.planted [WORD ...]`` prints which test caught which error (of those
whose description has one of the words), and fails if one was not caught. Every error
names the test files that are run first; the whole quick suite follows where they pass,
unless ``--named`` is given.
"""

from __future__ import annotations

import os
import shutil
import subprocess
import sys
import tempfile
import time
import tomllib
from pathlib import Path
from typing import NamedTuple

TOP = Path(__file__).parents[1]


class Planted(NamedTuple):
    """An error in the package: ``right``, which occurs once in ``module``, becomes
    ``wrong``.
    """

    what: str
    module: str
    right: str
    wrong: str
    tests: list[str]


def planted() -> list[Planted]:
    """The errors of the file beside."""
    found = tomllib.loads((TOP / "tests" / "planted.toml").read_text())
    return [Planted(**error) for error in found["errors"]]


def caught_by(error: Planted, tests: list[str]) -> str:
    """The first test that fails with the error in place; empty if none does."""
    with tempfile.TemporaryDirectory() as folder:
        copy = Path(folder)
        for part in ("numpyro_gpaug", "tests", "examples", "docs"):
            shutil.copytree(TOP / part, copy / part)
        for part in ("conftest.py", "pyproject.toml", "README.md"):
            shutil.copy(TOP / part, copy / part)
        module = copy / "numpyro_gpaug" / error.module
        text = module.read_text()
        if text.count(error.right) != 1:
            raise ValueError(f"{error.what}: {text.count(error.right)} places for it")
        module.write_text(text.replace(error.right, error.wrong))
        files = [f"tests/{name}.py" for name in tests]
        done = subprocess.run(
            [sys.executable, "-m", "pytest", "-q", "-x", "-p", "no:cacheprovider",
             "--ignore=tests/test_planted.py", *files],
            cwd=copy, env={**os.environ, "PYTHONPATH": folder},
            capture_output=True, text=True, check=False,
        )  # fmt: skip
    failed = [x for x in done.stdout.splitlines() if x.startswith(("FAILED", "ERROR"))]
    if done.returncode and not failed:
        raise RuntimeError(done.stdout + done.stderr)
    return failed[0].split(" - ")[0].removeprefix("FAILED ") if failed else ""


def main() -> int:
    """Plant them all."""
    missed = 0
    wanted = [word for word in sys.argv[1:] if word != "--named"]
    named = "--named" in sys.argv
    for error in planted():
        if wanted and not any(word in error.what for word in wanted):
            continue
        start = time.perf_counter()
        found = caught_by(error, error.tests)
        if not found and not named:
            found = caught_by(error, [])
        missed += not found
        seconds = time.perf_counter() - start
        print(f"{error.what}: {found or 'NOT CAUGHT'} ({seconds:.0f} s)", flush=True)
    return missed


if __name__ == "__main__":
    sys.exit(main())
