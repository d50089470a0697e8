# SPDX-License-Identifier: Apache-2.0
r"""Data in Parquet files that are never in memory: seconds, peak memory and accuracy.

Rows of the problem of ``large.py`` are written to a temporary folder. Each way to go
through them is a process of its own, whose peak memory is told:

- ``read``: the columns of every row group, in order, nothing else;
- ``shuffle``: an epoch of ``Batches``, without a fit;
- ``blocks``: steps that see all data, ``Blocks``, at fixed hyperparameters;
- ``learn``: everything learnt on minibatches, judged on rows of their own.

``--rows 20000000`` is the whole problem (1.5 GB of files)::

    python examples/benchmarks/disk.py --json disk.json
    python examples/benchmarks/disk.py --rows 20000000

Timings need a machine without other work, ``cpu`` less than others: microseconds of
processors per row, of which reading is what ``read`` takes.
"""

from __future__ import annotations

import argparse
import json
import resource
import subprocess
import sys
import tempfile
import time
from pathlib import Path
from typing import Any

from common import machine, print_table, versions
from large import draw, judge

PARTS = "read", "shuffle", "blocks", "learn"
# Rows of a file, and of a row group in it.
FILE, GROUP = 1_000_000, 250_000
TABLE = {
    "part": "", "rows": "d", "seconds": ".1f", "rows_second": ",.0f",
    "of_reading": ".2f", "cpu": ".2f", "peak": ".0f", "auc": ".4f", "nll": ".4f",
    "loss": ".5f",
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
    """As in ``large.py``, for rows that come in batches."""
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


def work(args: argparse.Namespace) -> dict[str, Any]:
    """One part, in a process of its own."""
    import jax
    import optax

    import numpyro_gpaug as gpaug

    rows = gpaug.ArrowRows(str(args.folder), X=names(args.columns), y="y")
    batches = gpaug.Batches(rows, args.batch)
    blocks = gpaug.Blocks(rows, args.block)
    Z = gpaug.inducing.kmeans(
        next(gpaug.Batches(rows, 10_000).epoch(0))["X"], args.inducing
    )
    key, quiet = jax.random.key(0), {"progress_bar": False, "inducing": Z}
    fitted: dict[str, Any] = {}
    if args.worker in ("blocks", "learn"):
        optim = optax.adam(args.rate) if args.worker == "learn" else None
        svi = gpaug.ConjugateSVI(model, gpaug.AutoSparseGP(model), optim)
        data = batches if args.worker == "learn" else blocks
        svi.run(key, 1, data, **quiet)  # compiled before
    begun, used, seen = time.perf_counter(), time.process_time(), args.rows
    if args.worker == "read":
        for i in range(len(rows.sizes)):
            rows.read(i)
    elif args.worker == "shuffle":
        seen = sum(len(batch["y"]) for batch in batches.epoch(0))
    elif args.worker == "blocks":
        result = svi.run(key, args.passes, data, **quiet)
        fitted["loss"] = float(result.losses[-1]) / args.rows
        # One pass more than steps: the first finds the first targets.
        seen = (args.passes + 1) * args.rows
    else:
        result = svi.run(key, args.steps, data, **quiet)
        seen = args.steps * args.batch
    seconds, used = time.perf_counter() - begun, time.process_time() - used
    unit = 2**20 if sys.platform == "darwin" else 2**10
    peak = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss / unit
    if args.worker in ("blocks", "learn"):
        X, y, _ = draw(args.test_rows, args.columns, 2)
        scores = judge(svi.posterior(result).predict_y(X).probs, y)
        fitted |= {k: scores[k] for k in ("auc", "nll")}
    return {
        "part": args.worker, "rows": seen, "seconds": seconds,
        "rows_second": seen / seconds, "cpu": 1e6 * used / seen, "peak": peak,
        **fitted,
    }  # fmt: skip


def spawn(part: str, folder: str, args: argparse.Namespace) -> dict[str, Any]:
    """Runs a worker; raises with its error."""
    command = [sys.executable, __file__, "--worker", part, "--folder", folder]
    for name in (
        "rows", "columns", "inducing", "batch", "block", "passes", "steps", "rate",
        "test_rows",
    ):  # fmt: skip
        command += [f"--{name.replace('_', '-')}", str(getattr(args, name))]
    done = subprocess.run(command, capture_output=True, text=True, check=False)
    if done.returncode:
        raise RuntimeError(f"{part} failed:\n{done.stderr}")
    return json.loads(done.stdout.strip().splitlines()[-1])


def parse(argv: list[str] | None = None) -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__.split("\n")[0])
    parser.add_argument("--rows", type=int, default=2_000_000)
    parser.add_argument("--test-rows", type=int, default=100_000)
    parser.add_argument("--columns", type=int, default=18)
    parser.add_argument("--inducing", type=int, default=64)
    parser.add_argument("--batch", type=int, default=1000)
    parser.add_argument("--block", type=int, default=2**13, help="rows of a block")
    parser.add_argument("--passes", type=int, default=3, help="steps on all data")
    parser.add_argument("--steps", type=int, default=2000, help="on minibatches")
    parser.add_argument("--rate", type=float, default=0.01, help="of the gradients")
    parser.add_argument("--parts", default=",".join(PARTS))
    parser.add_argument("--json", type=Path)
    parser.add_argument("--worker", choices=PARTS, help=argparse.SUPPRESS)
    parser.add_argument("--folder", type=Path, help=argparse.SUPPRESS)
    return parser.parse_args(argv)


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
        output["results"] = rows = []
        for part in args.parts.split(","):
            rows.append(spawn(part, folder, args))
            if rows[0]["part"] == "read":
                speed = rows[-1]["rows_second"] / rows[0]["rows_second"]
                rows[-1]["of_reading"] = speed
    print(
        "rows_second: of rows seen; of_reading: that over the speed of reading alone; "
        "cpu: microseconds of processors per row; peak: MiB with libraries; loss: "
        "minus the bound per row"
    )
    print_table(rows, TABLE)
    if args.json:
        args.json.write_text(json.dumps(output, indent=1))


if __name__ == "__main__":
    main()
