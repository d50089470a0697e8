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


READER = """
import sys, jax, numpy as np, numpyro, numpyro.distributions as dist, optax
import numpyro_gpaug as gpaug
port, process, processes, rows = map(int, sys.argv[1:])
if processes > 1:
    jax.config.update("jax_cpu_collectives_implementation", "gloo")
    jax.distributed.initialize(f"127.0.0.1:{port}", processes, process)
def model(X, y=None, *, Z):
    scale = numpyro.param("scale", 1.0, constraint=dist.constraints.positive)
    gp = gpaug.GaussianProcess("f", gpaug.kernels.Matern52(scale), Z)
    with numpyro.plate("data", len(X)):
        numpyro.sample("y", dist.Bernoulli(logits=gp(X)), obs=y)
X = np.random.default_rng(0).normal(size=(90, 2)).astype("f")
y = (X[:, 0] * X[:, 1] > 0).astype("int32")
def of(process, source):
    own = slice(45 * process, 45 * process + rows)
    return source((X[own], y[own]), 10)
class Both:
    def __init__(self, source):
        self.source = source
    def __iter__(self):
        if self.source is gpaug.Blocks:
            parts = [of(i, gpaug.Blocks).blocks() for i in (0, 1)]
        else:
            parts = [of(i, gpaug.Batches).epoch(0) for i in (0, 1)]
        for pair in zip(*parts):
            yield tuple(map(np.concatenate, zip(*pair)))
mesh = jax.make_mesh((processes,), ("rows",))
for source, optim in ((gpaug.Blocks, "lbfgs"), (gpaug.Batches, optax.adam(0.02))):
    read = source(Both(source), rows=90) if processes == 1 else of(process, source)
    svi = gpaug.ConjugateSVI(model, gpaug.AutoSparseGP(model), optim, mesh=mesh)
    # Within an epoch: the order of the next is another.
    result = svi.run(jax.random.key(0), 4, read, Z=X[:6], progress_bar=False)
    print("found", *result.losses, *svi.posterior(result).predict_y(X[:3]).probs)
"""


def readers(*rows):
    """What processes print that read as many rows each; their errors."""
    with socket.socket() as free:
        free.bind(("127.0.0.1", 0))
        port = free.getsockname()[1]
    started = [
        subprocess.Popen(
            [sys.executable, "-c", READER, *map(str, (port, i, len(rows), number))],
            env=ENVIRONMENT, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True,
        )
        for i, number in enumerate(rows)
    ]  # fmt: skip
    found, errors = zip(*(x.communicate(timeout=240) for x in started), strict=True)
    printed = [re.findall("^found (.*)", text, re.M) for text in found]
    return [[np.array(x.split(), float) for x in text] for text in printed], errors


@pytest.mark.slow
def test_every_process_reads_its_own_rows():
    """A step sees the batches of both, side by side."""
    (alone,), errors = readers(45)
    assert len(alone) == 2, errors
    both, errors = readers(45, 45)
    for found in both:
        assert len(found) == 2, errors
        for one, expected in zip(found, alone, strict=True):
            np.testing.assert_allclose(one, expected, rtol=1e-3)


@pytest.mark.slow
def test_processes_that_read_unequal_data_are_refused_by_all():
    _, errors = readers(45, 35)
    for text in errors:
        assert "ValueError: processes read data that are not alike" in text
        assert "('Blocks', 45, (10, 2, 'float32')" in text


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
