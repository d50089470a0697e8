# SPDX-License-Identifier: Apache-2.0
"""A fit by two processes on this machine: the numbers of one, and going on after an
end."""

import os
import re
import signal
import socket
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


WORKER = """
import sys, jax, numpy as np, numpyro, numpyro.distributions as dist
import numpyro_gpaug as gpaug
port, process, rows, columns = map(int, sys.argv[1:])
jax.config.update("jax_cpu_collectives_implementation", "gloo")
jax.distributed.initialize(f"127.0.0.1:{port}", 2, process)
def model(X, y=None, *, Z):
    gp = gpaug.GaussianProcess("f", gpaug.kernels.Matern52(1.0), Z)
    with numpyro.plate("data", len(X)):
        numpyro.sample("y", dist.Bernoulli(logits=gp(X)), obs=y)
mesh = jax.make_mesh((2,), ("rows",))
by_row = jax.sharding.NamedSharding(mesh, jax.sharding.PartitionSpec("rows"))
data = np.ones((rows, columns), np.float32), np.ones(rows, np.int32)
X, y = (jax.make_array_from_process_local_data(by_row, x) for x in data)
svi = gpaug.ConjugateSVI(model, gpaug.AutoSparseGP(model))
svi.run(jax.random.key(0), 2, X, y, Z=np.ones((2, columns), np.float32))
"""


@pytest.mark.slow
@pytest.mark.parametrize("other", [(0, 2), (20, 3)], ids=["no rows", "columns"])
def test_shards_that_do_not_fit_are_refused_by_all(other):
    with socket.socket() as free:
        free.bind(("127.0.0.1", 0))
        port = free.getsockname()[1]
    processes = [
        subprocess.Popen(
            [sys.executable, "-c", WORKER, str(port), str(i), *map(str, shape)],
            env=ENVIRONMENT, stderr=subprocess.PIPE, text=True,
        )
        for i, shape in enumerate([(20, 2), other])
    ]  # fmt: skip
    for process in processes:
        _, errors = process.communicate(timeout=120)
        assert process.returncode != 0
        assert "ValueError: processes hold parts of unequal shapes" in errors
        assert f"({other[0]}, {other[1]}, 'float32')" in errors
