# SPDX-License-Identifier: Apache-2.0
r"""Data in Parquet files that are never in memory: seconds, peak memory and accuracy.

Rows of the problem of ``large.py`` are written to a temporary folder. Each way to go
through them is a process of its own, whose peak memory is told:

- ``read``: the columns of every row group as rows of floats, in order, nothing else;
- ``shuffle``: an epoch of ``Batches``, without a fit;
- ``blocks``: steps that see all data, ``Blocks``, at fixed hyperparameters;
- ``blocks_memory``: the same on half a million of the rows, in memory;
- ``learn``: an epoch on minibatches: everything is learnt, and judged on other rows;
- ``learn_memory``: the same steps on batches of half a million rows that are in memory,
  neither read nor shuffled: the arithmetic alone.

What is compiled is compiled before. ``--rows 20000000`` is the whole problem (2.2 GB of
files)::

    python examples/benchmarks/disk.py --json disk.json
    python examples/benchmarks/disk.py --rows 20000000
    python examples/benchmarks/disk.py --rows 20000000 --inducing 16

Timings need a machine without other work, ``cpu`` less than others: microseconds of
processors per row, of which reading is what ``read`` takes.
"""

from __future__ import annotations

import argparse
import itertools
import json
import resource
import subprocess
import sys
import tempfile
import time
from pathlib import Path
from typing import Any

import numpy as np
from common import machine, print_table, versions
from large import draw, judge

PARTS = "read", "shuffle", "blocks_memory", "blocks", "learn_memory", "learn"
# Rows of a file, and of a row group in it.
FILE, GROUP = 1_000_000, 250_000
# The largest number of rows in memory, and of steps on minibatches of them.
HELD, STEPS = 500_000, 400
# After this many steps all is compiled: shorter runs have no guard.
COMPILED = 201
TABLE = {
    "part": "", "rows": "d", "seconds": ".1f", "rows_second": ",.0f",
    "of_reading": ".2f", "of_memory": ".2f", "of_slower": ".2f", "cpu": ".2f",
    "peak": ".0f", "auc": ".4f", "nll": ".4f", "loss": ".5f",
}  # fmt: skip


def names(columns: int) -> list[str]:
    return [f"x{i}" for i in range(columns)]


def write(folder: Path, args: argparse.Namespace) -> None:
    """The files, one after the other."""
    import pyarrow as arrow
    from pyarrow import parquet

    for number, start in enumerate(range(0, args.rows, FILE)):
        X, y, _ = draw(min(FILE, args.rows - start), args.columns, 1000 + number)
        columns = dict(zip(names(args.columns), X.T, strict=True))
        table = arrow.table({**columns, "y": y})
        parquet.write_table(
            table, folder / f"{number:04}.parquet", row_group_size=GROUP
        )


def model(X, y=None, *, inducing):
    """The model of ``large.py``, for rows that come in batches."""
    import jax.numpy as jnp
    import numpyro
    import numpyro.distributions as dist

    import numpyro_gpaug as gpaug

    positive = dist.constraints.positive
    start = jnp.full(X.shape[1], X.shape[1] ** 0.5, X.dtype)
    lengthscale = numpyro.param("lengthscale", start, constraint=positive)
    variance = numpyro.param("variance", 4.0, constraint=positive)
    Z = numpyro.param("inducing", inducing)
    kernel = gpaug.kernels.SquaredExponential(lengthscale, variance)
    gp = gpaug.GaussianProcess("f", kernel, inducing=Z)
    with numpyro.plate("data", X.shape[0]):
        numpyro.sample("y", dist.Bernoulli(logits=gp(X)), obs=y)


class Measured:
    """Seconds since it was made, of the clock and of processors."""

    def __init__(self) -> None:
        self._begun = time.perf_counter(), time.process_time()

    def row(self, rows: int) -> dict[str, Any]:
        """Return the row of the table for a number of rows."""
        seconds = time.perf_counter() - self._begun[0]
        used = time.process_time() - self._begun[1]
        return {
            "rows": rows, "seconds": seconds, "rows_second": rows / seconds,
            "cpu": 1e6 * used / rows,
        }  # fmt: skip


def reading(part: str, rows: Any, args: argparse.Namespace) -> dict[str, Any]:
    """``read`` and ``shuffle``."""
    import numpyro_gpaug as gpaug

    batches = gpaug.Batches(rows, args.batch)
    measured = Measured()
    if part == "shuffle":
        return measured.row(sum(len(batch["y"]) for batch in batches.epoch(0)))
    for i in range(len(rows.sizes)):
        rows.read(i)
    return measured.row(args.rows)


def fitting(part: str, rows: Any, args: argparse.Namespace) -> dict[str, Any]:
    """Measure steps on rows that are read, or on rows in memory."""
    import jax
    import optax

    import numpyro_gpaug as gpaug

    read = gpaug.Batches(rows, args.batch)
    key, in_memory = jax.random.key(0), part.endswith("memory")
    held, optim, steps = args.rows, None, args.passes
    if part == "learn":
        given = read
    elif part == "blocks":
        given = gpaug.Blocks(rows, args.block)
    else:
        batches = list(itertools.islice(read.epoch(0), max(1, HELD // args.batch)))
        held = len(batches) * args.batch
        given = gpaug.Batches(batches, rows=held)
    if part == "blocks_memory":
        arrays = {k: np.concatenate([x[k] for x in batches]) for k in batches[0]}
        given = gpaug.Blocks(arrays, min(args.block, held))
    if part.startswith("learn"):
        optim = optax.adam(args.rate)
        steps = min(args.rows // args.batch, STEPS if in_memory else args.rows)
    Z = gpaug.inducing.kmeans(read.first["X"][:10_000], args.inducing)
    how: dict[str, Any] = {"progress_bar": False, "inducing": Z}
    svi = gpaug.ConjugateSVI(model, gpaug.AutoSparseGP(model), optim)
    svi.run(key, min(steps, COMPILED) if optim else 1, given, **how)
    measured = Measured()
    result = svi.run(key, steps, given, **how)
    # One pass more than steps: the first computes the first targets.
    row = measured.row(steps * args.batch if optim else (steps + 1) * held)
    if not optim:
        row["loss"] = float(result.losses[-1]) / held
    if not in_memory:
        X, y, _ = draw(args.test_rows, args.columns, 2)
        scores = judge(svi.posterior(result).predict_y(X).probs, y)
        row |= {k: scores[k] for k in ("auc", "nll")}
    return row


def work(args: argparse.Namespace) -> dict[str, Any]:
    """One part, in a process of its own."""
    import numpyro_gpaug as gpaug

    rows = gpaug.ArrowRows(str(args.folder), X=names(args.columns), y="y")
    does = reading if args.worker in ("read", "shuffle") else fitting
    found = does(args.worker, rows, args)
    unit = 2**20 if sys.platform == "darwin" else 2**10
    peak = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss / unit
    return {"part": args.worker, **found, "peak": peak}


def spawn(part: str, folder: str, args: argparse.Namespace) -> dict[str, Any]:
    """Run a worker; raise its error."""
    command = [sys.executable, __file__, "--worker", part, "--folder", folder]
    for name in (
        "rows", "columns", "inducing", "batch", "block", "passes", "rate", "test_rows",
    ):  # fmt: skip
        command += [f"--{name.replace('_', '-')}", str(getattr(args, name))]
    done = subprocess.run(command, capture_output=True, text=True, check=False)
    if done.returncode:
        raise RuntimeError(f"{part} failed:\n{done.stderr}")
    return json.loads(done.stdout.strip().splitlines()[-1])


def compared(rows: list[dict[str, Any]]) -> list[dict[str, Any]]:
    """Return speeds relative to reading alone, and to the same steps in memory."""
    speeds = {row["part"]: row["rows_second"] for row in rows}
    for row in rows:
        beside = {"of_reading": "read", "of_memory": f"{row['part']}_memory"}
        limits = {k: speeds[part] for k, part in beside.items() if part in speeds}
        if "of_memory" in limits and len(limits) == 2:
            limits["of_slower"] = min(limits.values())
        row |= {name: row["rows_second"] / limit for name, limit in limits.items()}
    return rows


def parse(argv: list[str] | None = None) -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__.split("\n")[0])
    parser.add_argument("--rows", type=int, default=2_000_000)
    parser.add_argument("--test-rows", type=int, default=100_000)
    parser.add_argument("--columns", type=int, default=18)
    parser.add_argument("--inducing", type=int, default=64)
    parser.add_argument(
        "--batch", type=int, help="rows; else an epoch has 2000 steps, as large.py has"
    )
    parser.add_argument("--block", type=int, default=2**13, help="rows of a block")
    parser.add_argument("--passes", type=int, default=3, help="steps on all data")
    parser.add_argument("--rate", type=float, default=0.01, help="of the gradients")
    parser.add_argument("--parts", default=",".join(PARTS))
    parser.add_argument("--json", type=Path)
    parser.add_argument("--worker", choices=PARTS, help=argparse.SUPPRESS)
    parser.add_argument("--folder", type=Path, help=argparse.SUPPRESS)
    args = parser.parse_args(argv)
    args.batch = args.batch or max(1, args.rows // 2000)
    return args


def main() -> None:
    args = parse()
    if args.worker:
        print(json.dumps(work(args)))
        return
    output: dict[str, Any] = {"machine": machine()}
    output["versions"] = versions("jax", "jaxlib", "numpyro", "pyarrow")
    with tempfile.TemporaryDirectory() as folder:
        write(Path(folder), args)
        size = sum(x.stat().st_size for x in Path(folder).iterdir()) / 2**20
        print(f"{output['machine']}\n{args.rows} rows, {size:.0f} MiB of files")
        rows = [spawn(part, folder, args) for part in args.parts.split(",")]
    output["results"] = compared(rows)
    print(
        "rows_second: of rows seen; of_reading, of_memory, of_slower: that over the "
        "speed of reading alone, of the same steps in memory, of the slower of both; "
        "cpu: microseconds of processors per row; peak: MiB with libraries; loss: "
        "minus the bound per row"
    )
    print_table(rows, TABLE)
    if args.json:
        args.json.write_text(json.dumps(output, indent=1))


if __name__ == "__main__":
    main()
