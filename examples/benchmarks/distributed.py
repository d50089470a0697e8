# SPDX-License-Identifier: Apache-2.0
"""Rows shared out: over simulated devices, and over two processes of one core each;
latents shared out over simulated devices.

``devices``: full-data steps on 1, 2, 4 and 8 simulated devices: the bound, and from the
compiled program the kinds of what goes between devices and its bytes per step (which do
not depend on the rows: told at N and at 2 N). ``processes``: milliseconds per step, of
the clock and of a processor, of one process against two, each on a core of its own.
``latents``: a process for each of ``--labels`` labels on one device and shared out
among 8: the bound, and the memory of one device from the compiled program::

    python examples/benchmarks/distributed.py --json distributed.json
    python examples/benchmarks/distributed.py --parts processes,ceiling

Timings need a machine without other work.
"""

from __future__ import annotations

import argparse
import json
import math
import os
import re
import socket
import subprocess
import sys
import time
from pathlib import Path
from typing import Any

from common import machine, print_table, versions

HERE = Path(__file__).resolve()
COLLECTIVES = "all-reduce|all-gather|all-to-all|collective-permute|reduce-scatter"
DEVICES = (1, 2, 4, 8)
ROUNDS = 3
# Seconds of each operation.
WINDOW = 3.0


def traffic(text: str) -> tuple[str, int]:
    """Return the kinds of messages between devices in a compiled step, and bytes."""
    kinds, total = set(), 0
    for line in text.splitlines():
        if match := re.search(rf" = (.*?) ({COLLECTIVES})(-start)?\(", line):
            kinds.add(match[2])
            for bits, shape in re.findall(r"[a-z]+(\d*)\[([\d,]*)\]", match[1]):
                size = math.prod(int(n) for n in shape.split(",") if n)
                total += size * int(bits or 8) // 8
    return " ".join(sorted(kinds)) or "nothing", total


def watched(svi: Any) -> list[Any]:
    """Collect the program of a fit's steps, when the first step compiles it."""
    programs, advance = [], svi._programs.advance

    def step(*given: Any, **static: Any) -> Any:
        if not programs:
            programs.append(advance.plain.lower(*given, **static).compile())
        return advance(*given, **static)

    svi._programs.advance = step
    return programs


def fit(args: argparse.Namespace, rows: int) -> dict[str, Any]:
    """Steps at fixed hyperparameters on this process's share of the rows."""
    import jax
    import numpy as np
    import numpyro
    import numpyro.distributions as dist
    from jax.sharding import NamedSharding, PartitionSpec

    import numpyro_gpaug as gpaug

    def model(X: Any, y: Any = None, *, inducing: Any) -> None:
        kernel = gpaug.kernels.SquaredExponential(1.0, 4.0)
        gp = gpaug.GaussianProcess("f", kernel, inducing)
        with numpyro.plate("data", len(X)):
            numpyro.sample("y", dist.Bernoulli(logits=gp(X)), obs=y)

    rng = np.random.default_rng(0)
    X = rng.uniform(-3, 3, size=(rows, 2)).astype(np.float32)
    f = 3 * np.sin(X[:, 0]) * np.cos(X[:, 1])
    y = (rng.uniform(size=rows) < 1 / (1 + np.exp(-f))).astype(np.int32)
    Z = X[: args.inducing].copy()
    mesh = jax.make_mesh((jax.device_count(),), ("rows",))
    by_row = NamedSharding(mesh, PartitionSpec("rows"))
    each = rows // jax.process_count()
    mine = slice(jax.process_index() * each, (jax.process_index() + 1) * each)
    X, y = (jax.make_array_from_process_local_data(by_row, x[mine]) for x in (X, y))

    svi = gpaug.ConjugateSVI(model, gpaug.AutoSparseGP(model), None)
    programs = watched(svi) if args.read else []
    how = {"inducing": Z, "progress_bar": False}
    result = svi.run(jax.random.key(0), args.steps, X, y, **how)
    kinds, size = traffic(programs[0].as_text()) if args.read else ("", 0)
    # A short and a longer run: their difference is the cost of the steps.
    least: dict[int, tuple[float, float]] = {}
    for steps in (args.steps, 3 * args.steps) * ROUNDS:
        begun, cpu = time.perf_counter(), time.process_time()
        svi.run(jax.random.key(0), steps, X, y, init_state=result.state, **how)
        took = time.perf_counter() - begun, time.process_time() - cpu
        least[steps] = tuple(map(min, took, least.get(steps, took)))
    run, longer = least.values()
    step, used = (
        1e3 * (b - a) / (2 * args.steps) for a, b in zip(run, longer, strict=True)
    )
    return {
        "rows": rows, "devices": jax.device_count(), "between": kinds, "bytes": size,
        "bound": float(-result.losses[-1]), "ms_step": step, "cpu_ms": used,
        "ms_beside": 1e3 * run[0] - args.steps * step,
    }  # fmt: skip


def ceiling(args: argparse.Namespace, start: float) -> dict[str, float]:
    """Products of matrices, and sums of arrays, per second of this process.

    :param start: when, so that processes do it at once.
    """
    import numpy as np

    M = args.inducing
    blocks = np.ones((400, 5000, M), np.float32)
    factor, out = np.eye(M, dtype=np.float32), np.empty((5000, M), np.float32)
    x, y, z = np.ones((3, 2**24), np.float32)

    def product(i: int) -> None:
        np.matmul(blocks[i % len(blocks)], factor, out=out)

    def total(i: int) -> None:
        np.add(x, y, out=z)

    found = {}
    for number, (name, does) in enumerate((("products", product), ("sums", total))):
        does(0)
        begins = start + number * (WINDOW + 1)
        time.sleep(max(0.0, begins - time.time()))
        done = 0
        while time.time() < begins + WINDOW:
            does(done)
            done += 1
        found[name] = done / WINDOW
    return found


def ceilings(args: argparse.Namespace) -> dict[str, float]:
    """Return rates of two processes at once relative to one, by operation."""
    rates = []
    for number in (1, 2):
        start = time.time() + 5
        workers = [
            subprocess.Popen(
                [
                    sys.executable, str(HERE), "--ceiling", str(start),
                    "--core", str(i), "--inducing", str(args.inducing),
                ],
                env={**os.environ, "OPENBLAS_NUM_THREADS": "1"},
                stdout=subprocess.PIPE, text=True,
            )
            for i in range(number)
        ]  # fmt: skip
        told = [json.loads(worker.communicate()[0]) for worker in workers]
        rates.append({name: sum(x[name] for x in told) for name in told[0]})
    return {name: rates[1][name] / rate for name, rate in rates[0].items()}


def fit_labels(args: argparse.Namespace, rows: int) -> dict[str, Any]:
    """Steps of a process per label, shared out among all devices."""
    import jax
    import numpy as np
    import numpyro
    import numpyro.distributions as dist

    import numpyro_gpaug as gpaug

    def model(X: Any, y: Any = None, *, inducing: Any) -> None:
        kernel = gpaug.kernels.SquaredExponential(1.0, 4.0)
        gp = gpaug.GaussianProcess("f", kernel, inducing, num_latents=args.labels)
        with numpyro.plate("data", len(X)):
            likelihood = dist.Bernoulli(logits=gp(X)).to_event(1)
            numpyro.sample("y", likelihood, obs=y)

    rng = np.random.default_rng(0)
    X = rng.uniform(-3, 3, size=(rows, 2)).astype(np.float32)
    y = (rng.uniform(size=(rows, args.labels)) < 0.1).astype(np.int32)
    mesh = jax.make_mesh((1, jax.device_count()), ("rows", "latents"))
    svi = gpaug.ConjugateSVI(model, gpaug.AutoSparseGP(model), None, mesh=mesh)
    programs = watched(svi)
    Z = X[: args.inducing].copy()
    how = {"inducing": Z, "progress_bar": False}
    result = svi.run(jax.random.key(0), args.steps, X, y, **how)
    begun = time.perf_counter()
    svi.run(jax.random.key(0), args.steps, X, y, init_state=result.state, **how)
    seconds = time.perf_counter() - begun
    memory = programs[0].memory_analysis()
    kinds, size = traffic(programs[0].as_text())
    (posterior,) = result.state.natural.values()
    held = sum(x.addressable_shards[0].data.nbytes for x in posterior)
    return {
        "labels": args.labels, "devices": jax.device_count(), "between": kinds,
        "bytes": size, "bound": float(-result.losses[-1]), "posterior_MB": held / 1e6,
        "temporary_MB": memory.temp_size_in_bytes / 1e6,
        "ms_step": 1e3 * seconds / args.steps,
    }  # fmt: skip


def work(args: argparse.Namespace) -> None:
    """Run a worker process; the first one prints JSON."""
    if hasattr(os, "sched_setaffinity") and args.core is not None:
        os.sched_setaffinity(0, {args.core})
    if args.ceiling:
        print(json.dumps(ceiling(args, args.ceiling)))
        return
    import jax

    if args.processes > 1:
        jax.config.update("jax_cpu_collectives_implementation", "gloo")
        jax.distributed.initialize(
            f"127.0.0.1:{args.port}", args.processes, args.process
        )
    found = (fit_labels if args.of_labels else fit)(args, args.worker)
    if jax.process_index() == 0:
        print(json.dumps(found))


def spawn(
    args: argparse.Namespace,
    rows: int,
    devices: int = 1,
    processes: int = 1,
    also: tuple[str, ...] = (),
) -> dict[str, Any]:
    """Run workers and return what the first one printed."""
    with socket.socket() as free:
        free.bind(("127.0.0.1", 0))
        port = free.getsockname()[1]
    flags = f"--xla_force_host_platform_device_count={devices}"
    command = [
        sys.executable, str(HERE), "--worker", str(rows), "--port", str(port),
        "--processes", str(processes), "--steps", str(args.steps),
        "--inducing", str(args.inducing), "--labels", str(args.labels), *also,
    ]  # fmt: skip
    if devices == processes == 1 or processes > 1:
        cores = [["--core", str(i)] for i in range(processes)]
    else:
        cores = [[]]
    workers = [
        subprocess.Popen(
            [*command, "--process", str(i), *core, *["--read"] * (processes == 1)],
            env={**os.environ, "XLA_FLAGS": flags}, stdout=subprocess.PIPE,
            stderr=subprocess.DEVNULL, text=True,
        )
        for i, core in enumerate(cores)
    ]  # fmt: skip
    printed = [worker.communicate()[0] for worker in workers]
    return json.loads(printed[0].strip().splitlines()[-1])


def main() -> None:
    """Run the benchmark."""
    parser = argparse.ArgumentParser(description=__doc__.split("\n")[0])
    parser.add_argument("--parts", default="devices,processes,ceiling,latents")
    parser.add_argument("--rows", type=int, default=1_000_000)
    parser.add_argument("--small", type=int, default=80_000, help="rows of devices")
    parser.add_argument("--labels", type=int, default=2000)
    parser.add_argument("--inducing", type=int, default=100)
    parser.add_argument("--steps", type=int, default=6)
    parser.add_argument("--json", type=Path)
    hidden: Any = {"type": int, "help": argparse.SUPPRESS}
    for name in ("worker", "port", "process", "core"):
        parser.add_argument(f"--{name}", **hidden)
    parser.add_argument("--processes", default=1, **hidden)
    parser.add_argument("--ceiling", type=float, help=argparse.SUPPRESS)
    parser.add_argument("--of-labels", action="store_true", help=argparse.SUPPRESS)
    parser.add_argument("--read", action="store_true", help=argparse.SUPPRESS)
    args = parser.parse_args()
    if args.worker or args.ceiling:
        work(args)
        return
    output: dict[str, Any] = {"machine": machine()}
    output["versions"] = versions("jax", "jaxlib", "numpyro")
    print(output["machine"])
    columns = {
        "rows": "d", "devices": "d", "between": "", "bytes": "d", "bound": ".3f",
        "ms_step": ".1f", "cpu_ms": ".1f", "ms_beside": ".0f",
    }  # fmt: skip
    if "devices" in args.parts:
        sizes = [(args.small, d) for d in DEVICES] + [(2 * args.small, DEVICES[-1])]
        output["devices"] = [spawn(args, n, devices=d) for n, d in sizes]
        print_table(output["devices"], columns)
    if "processes" in args.parts:
        rows = [spawn(args, args.rows, processes=p) for p in (1, 2)]
        output["processes"] = rows
        output["speed_up"] = rows[0]["ms_step"] / rows[1]["ms_step"]
        print_table(rows, columns)
        print(f"two processes of one core each: {output['speed_up']:.2f} times as fast")
    if "ceiling" in args.parts:
        output["ceiling"] = ceilings(args)
        for name, rate in output["ceiling"].items():
            print(f"{name} of two processes at once: {rate:.2f} times those of one")
    if "latents" in args.parts:
        found = [spawn(args, 512, d, also=("--of-labels",)) for d in (1, 8)]
        output["latents"] = found
        sizes = {"posterior_MB": ".1f", "temporary_MB": ".1f"}
        del columns["rows"], columns["cpu_ms"], columns["ms_beside"]
        print_table(found, {"labels": "d"} | columns | sizes)
    if args.json:
        args.json.write_text(json.dumps(output, indent=1))


if __name__ == "__main__":
    main()
