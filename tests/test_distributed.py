# SPDX-License-Identifier: Apache-2.0
"""A fit by two processes on this machine: the numbers of one, and going on after an
end."""

import os
import re
import signal
import subprocess
import sys
import time
from pathlib import Path

import numpy as np
import pytest

EXAMPLE = Path(__file__).parents[1] / "examples" / "distributed.py"
ENVIRONMENT = {**os.environ, "PYTHONPATH": str(EXAMPLE.parents[1]), "XLA_FLAGS": ""}


def started(folder, *options, rows=2000, steps=30):
    ENVIRONMENT["JAX_COMPILATION_CACHE_DIR"] = str(folder / "compiled")
    options = ["--rows", str(rows), "--inducing", "10", "--steps", str(steps), *options]
    return subprocess.Popen(
        [sys.executable, str(EXAMPLE), *options], cwd=folder, env=ENVIRONMENT,
        stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True,
    )  # fmt: skip


def run(folder, name, *options, **how):
    files = ["--checkpoint", f"{name}_state.npz", "--results", f"{name}.npz"]
    process = started(folder, *files, *options, **how)
    output, _ = process.communicate()
    assert process.returncode == 0, output
    return dict(np.load(folder / f"{name}.npz")), output


@pytest.mark.slow
def test_two_processes_equal_one(tmp_path):
    one, _ = run(tmp_path, "one")
    two, output = run(tmp_path, "two", "--launch", "2")
    assert "2 processes, 2 devices, 2000 rows" in output
    assert set(one) == set(two)
    np.testing.assert_allclose(two["bound"], one["bound"], atol=0.02)
    np.testing.assert_allclose(two["probs"], one["probs"], atol=5e-3)


@pytest.mark.slow
def test_going_on_from_a_checkpoint_is_bit_identical(tmp_path):
    two = ["--launch", "2"]
    whole, _ = run(tmp_path, "whole", *two, steps=8)
    run(tmp_path, "parts", *two, steps=4)
    parts, output = run(tmp_path, "parts", *two, steps=8)
    assert "going on from step 4" in output
    for name, value in whole.items():
        np.testing.assert_array_equal(parts[name], value, err_msg=name)


@pytest.mark.slow
def test_the_others_end_when_one_is_killed(tmp_path):
    files = ["--checkpoint", "state.npz", "--launch", "2", "--patience", "10"]
    process = started(tmp_path, *files, rows=2_000_000)
    for _ in range(600):
        if (tmp_path / "state.npz").exists():
            break
        time.sleep(0.5)
    children = Path(f"/proc/{process.pid}/task/{process.pid}/children").read_text()
    victim = int(children.split()[-1])
    begun = time.monotonic()
    os.kill(victim, signal.SIGKILL)
    output, _ = process.communicate(timeout=120)
    assert process.returncode != 0
    assert time.monotonic() - begun < 60
    assert re.search("heartbeat timeout|closed by peer|Connection", output)
