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
from types import SimpleNamespace

import jax
import numpy as np
import pytest

from numpyro_gpaug.infer.vi import checks
from numpyro_gpaug.infer.vi.progress import Pace, Progress
from numpyro_gpaug.math import processes
from numpyro_gpaug.math.fingerprints import fingerprint

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


# The start of every script: process identity, and a model.
PROCESS = """
import sys, threading, time, jax, numpy as np, optax
import numpyro, numpyro.distributions as dist
import numpyro_gpaug as gpaug
from numpyro_gpaug.infer.vi import progress
port, process, processes, *given = map(int, sys.argv[1:])
if processes > 1:
    jax.config.update("jax_cpu_collectives_implementation", "gloo")
    jax.distributed.initialize(f"127.0.0.1:{port}", processes, process)
mesh = jax.make_mesh((processes,), ("rows",))
def model(X, y=None, *, Z):
    scale = numpyro.param("scale", 1.0, constraint=dist.constraints.positive)
    gp = gpaug.GaussianProcess("f", gpaug.kernels.Matern52(scale), Z)
    with numpyro.plate("data", len(X)):
        numpyro.sample("y", dist.Bernoulli(logits=gp(X)), obs=y)
def shared(*arrays):
    by_row = jax.sharding.NamedSharding(mesh, jax.sharding.PartitionSpec("rows"))
    return [jax.make_array_from_process_local_data(by_row, x) for x in arrays]
def told(*what, error):
    notes = getattr(error, "__notes__", "")
    said = "nothing" if error is None else f"{type(error).__name__}: {error} {notes}"
    print("found", *what, *said.split())
"""

WORKER = """
rows, columns, kind = given
X = np.ones((rows, columns), np.float32)
X, y = shared(X, np.ones(rows, [np.int32, np.float32][kind]))
svi = gpaug.ConjugateSVI(model, gpaug.AutoSparseGP(model))
svi.run(jax.random.key(0), 2, X, y, Z=np.ones((2, columns), np.float32))
"""

READER = """
(rows,) = given
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
for source, optim in ((gpaug.Blocks, "lbfgs"), (gpaug.Batches, optax.adam(0.02))):
    read = source(Both(source), rows=90) if processes == 1 else of(process, source)
    svi = gpaug.ConjugateSVI(model, gpaug.AutoSparseGP(model), optim, mesh=mesh)
    # Within an epoch: the order of the next is another.
    result = svi.run(jax.random.key(0), 4, read, Z=X[:6], progress_bar=False)
    print("found", *result.losses, *svi.posterior(result).predict_y(X[:3]).probs)
"""


def printed(script, *given):
    """Return the output of processes of a script after "found", and their errors.

    :param script: what follows :data:`PROCESS`.
    :param given: numbers, to each process.
    """
    with socket.socket() as free:
        free.bind(("127.0.0.1", 0))
        port = free.getsockname()[1]
    started = [
        subprocess.Popen(
            [
                sys.executable, "-c", PROCESS + script,
                *map(str, (port, i, len(given), *own)),
            ],
            env=ENVIRONMENT, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True,
        )
        for i, own in enumerate(given)
    ]  # fmt: skip
    try:
        both = [x.communicate(timeout=240) for x in started]
    finally:
        for process in started:
            process.kill()
    found, errors = zip(*both, strict=True)
    return [re.findall("^found (.*)", text, re.M) for text in found], errors


def readers(*rows):
    """Return the results of processes that read equal numbers of rows, and their
    errors.
    """
    found, errors = printed(READER, *((number,) for number in rows))
    return [[np.array(x.split(), float) for x in text] for text in found], errors


@pytest.mark.slow
def test_every_process_reads_its_own_rows():
    """A step uses the batches of both, side by side."""
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
        assert "ValueError: the processes read different data" in text
        assert "('Blocks', 45, (10, 2, 'float32')" in text


@pytest.mark.slow
@pytest.mark.parametrize(
    "other", [(0, 2, 0), (20, 3, 0), (20, 2, 1)], ids=["no rows", "columns", "dtype"]
)
def test_shards_that_do_not_fit_are_refused_by_all(other):
    _, errors = printed(WORKER, (20, 2, 0), other)
    for text in errors:
        assert "ValueError: the processes have parts of unequal shapes" in text
        assert f"({other[0]}, {other[1]}, 'float32')" in text
        assert "(20, 'float32')" in text or other[2] == 0


FAILING = """
X = np.random.default_rng(process).normal(size=(60, 2)).astype("f")
y = (X[:, 0] > 0).astype("int32")
Z = np.random.default_rng(2).normal(size=(3, 2)).astype("f")
class Loader:
    def __init__(self, fault):
        self.fault = fault if process == 1 else None
    def __iter__(self):
        for i in range(0, 60, 10):
            some, labels = X[i : i + 10].copy(), y[i : i + 10].copy()
            if i == 30 and self.fault == "raises":
                raise OSError("the disk is gone")
            if i == 30 and self.fault == "hangs":
                threading.Event().wait()
            if i == 30 and self.fault == "ends early":
                return
            if i == 30 and self.fault == "NaN":
                some[:] = np.nan
            if i == 30 and self.fault == "labels":
                labels[:] = 7
            yield some, labels
def full(state, losses):
    raise OSError("no space left on device")
svi = gpaug.ConjugateSVI(model, gpaug.AutoSparseGP(model), None, mesh=mesh)
how = {"Z": Z, "progress_bar": False}
faults = (
    "missing", "raises", "hangs", "ends early", "NaN", "labels", "callback", "key", None
)
for source in (gpaug.Batches, gpaug.Blocks):
    for fault in faults:
        begun, error = time.monotonic(), None
        try:
            with gpaug.infer.all_or_none(mesh):
                if fault == "missing" and process == 1:
                    np.load("nowhere.npy")
                timeout = 2.0 if fault == "hangs" else None
                read = source(Loader(fault), rows=60, timeout=timeout)
            svi.run(
                jax.random.key(process if fault == "key" else 0), 4, read, **how,
                callback=full if fault == "callback" and process == 1 else None,
            )
        except Exception as found:
            error = found
        told(source.__name__, fault, time.monotonic() - begun < 30, error=error)
"""


@pytest.fixture
def two_processes(monkeypatch):
    """Simulate another process, which sends the content of the returned list."""
    others = []
    monkeypatch.setattr(processes, "spans_processes", lambda mesh: True)
    monkeypatch.setattr(
        processes.multihost_utils, "process_allgather",
        lambda own: np.stack([own, others.pop(0)]),
    )  # fmt: skip
    return others


def said(text):
    return np.frombuffer(text.encode().ljust(processes._LONGEST), np.uint8)


def test_an_error_of_another_process_is_raised_here(two_processes):
    two_processes += [np.ones(1, np.int32)]
    with processes.all_or_none(None):
        pass
    two_processes += [np.zeros(1, np.int32), said("OSError: gone")]
    with pytest.raises(RuntimeError, match="^process 1 failed: OSError: gone$"):
        with processes.all_or_none(None):
            pass
    two_processes += [np.ones(1, np.int32), said("")]
    with pytest.raises(KeyError, match="mine"), processes.all_or_none(None):
        raise KeyError("mine")
    assert two_processes == []


def test_processes_that_were_to_run_unlike_things(two_processes, monkeypatch):
    monkeypatch.setattr(checks, "spans_processes", lambda mesh: True)
    key, state = jax.random.key(0), SimpleNamespace(step=np.int32(4))
    held = f"num_steps=9, tol=None, rng_key {fingerprint([key])}"
    two_processes += [said(f"from step 4, {held}")]
    checks.check_alike(None, key, 9, None, state)
    two_processes += [said(f"a new fit, {held}")]
    with pytest.raises(ValueError, match="'from step 4, n.*, 'a new fit, n.*file"):
        checks.check_alike(None, key, 9, None, state)


def test_loops_of_processes_are_as_long_as_the_shortest(two_processes):
    progress = Progress(300, Pace(1), bar=False, several=True)
    for length, goes_on, wanted in ((40, 1, 100), (100, 1, 40), (100, 0, 60)):
        assert progress.next() == wanted
        two_processes.append(np.array([length, goes_on], np.int32))
        progress.took(np.ones(wanted))
    assert progress.over
    assert progress.next() == 0


@pytest.mark.slow
def test_what_fails_in_one_process_ends_all_with_the_same_message():
    """After that they can continue together."""
    (first, second), errors = printed(FAILING, (), ())
    assert len(first) == len(second) == 18, errors
    for source in ("Batches", "Blocks"):
        at = "epoch 0" if source == "Batches" else "a pass"
        for fault, message in (
            ("missing", "FileNotFoundError: .*'nowhere.npy'"),
            ("hangs", f"TimeoutError: .* within 2 seconds .*batch 3 of {at}"),
            ("raises", f"OSError: the disk is gone .*batch 3 of {at}"),
            ("ends early", f"ValueError: .* after 30 of 60 rows .*batch 3 of {at}"),
            ("NaN", f"ValueError: X has shape .* 20 NaN.*batch 3 of {at}"),
            ("labels", f"ValueError: .*outside the support.*batch 3 of {at}"),
            ("callback", "OSError: no space left on device"),
            ("key", "ValueError: the processes disagree about the run"),
            ("None", "nothing"),
        ):
            (one,), (two,) = (
                [x for x in found if x.startswith(f"{source} {fault} True")]
                for found in (first, second)
            )
            assert re.search(message, one), one
            assert re.search(message, two), two
            if fault not in ("labels", "key", "None"):
                assert "RuntimeError: process 1 failed: " in one
