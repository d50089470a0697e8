# SPDX-License-Identifier: Apache-2.0
"""One fit by several processes, each of which reads its own rows.

The same script is one process, several on this machine, or one of many on a cluster::

    python examples/distributed.py --rows 200000
    python examples/distributed.py --rows 200000 --launch 2
    srun -n 16 python examples/distributed.py --rows 20000000 --cluster

``--launch`` starts this many processes here. ``--cluster`` lets JAX find the other
processes, which it can under SLURM, Open MPI and on cloud TPUs. Elsewhere (Kubernetes,
Ray) pass them: ``--coordinator host:port --processes 16 --process 3``. Only the first
process prints, and writes a checkpoint about once a second; a restart continues from
it. With ``--results``, parameters are written to a file.
"""

from __future__ import annotations

import argparse
import os
import socket
import subprocess
import sys
import time
from pathlib import Path
from typing import Any

import jax
import numpy as np
import numpyro
import numpyro.distributions as dist
from jax.sharding import NamedSharding, PartitionSpec
from support.compilation import keep_compiled_programs

import numpyro_gpaug as gpaug
from numpyro_gpaug.infer import all_or_none, load_state, save_state

# Rows are simulated in parts, so that every process simulates the same rows.
PART = 1000


def model(X: Any, y: Any = None, *, inducing: Any) -> None:
    """Binary classification, three hyperparameters learnt."""
    lengthscale = numpyro.sample(
        "lengthscale", dist.LogNormal(0.0, 1.0).expand([2]).to_event(1)
    )
    variance = numpyro.sample("variance", dist.LogNormal(0.0, 1.0))
    kernel = gpaug.kernels.SquaredExponential(lengthscale, variance)
    gp = gpaug.GaussianProcess("f", kernel, inducing)
    with numpyro.plate("data", len(X)):
        numpyro.sample("y", dist.Bernoulli(logits=gp(X)), obs=y)


def rows_of(first: int, last: int) -> tuple[np.ndarray, np.ndarray]:
    """Rows of the data, as a process would read its own from disk."""
    parts = []
    for part in range(first // PART, -(-last // PART)):
        rng = np.random.default_rng([1, part])
        X = rng.uniform(-3, 3, size=(PART, 2)).astype(np.float32)
        f = 3 * np.sin(X[:, 0]) * np.cos(X[:, 1])
        parts.append((X, (rng.uniform(size=PART) < 1 / (1 + np.exp(-f)))))
    X, y = (np.concatenate(column) for column in zip(*parts, strict=True))
    inside = slice(first - first // PART * PART, None)
    return X[inside][: last - first], y[inside][: last - first].astype(np.int32)


def launch(number: int, options: list[str]) -> int:
    """Starts processes of this script that find each other here."""
    with socket.socket() as free:
        free.bind(("127.0.0.1", 0))
        port = free.getsockname()[1]
    others = [
        subprocess.Popen(
            [
                sys.executable, __file__, *options, "--processes", str(number),
                "--coordinator", f"127.0.0.1:{port}", "--process", str(process),
            ],
        )
        for process in range(number)
    ]  # fmt: skip
    codes = [other.wait() for other in others]
    return max(map(abs, codes))


def join(args: argparse.Namespace) -> None:
    """Find the other processes, if there are any."""
    how = {"heartbeat_timeout_seconds": args.patience}
    # The transport between processes on CPUs; accelerators have their own.
    jax.config.update("jax_cpu_collectives_implementation", "gloo")
    if args.cluster:
        jax.distributed.initialize(**how)
    elif args.coordinator:
        jax.distributed.initialize(
            args.coordinator, args.processes, args.process, **how
        )


def fit(args: argparse.Namespace) -> None:
    """The fit; every process runs the same lines."""
    first = jax.process_index() == 0
    mesh = jax.make_mesh((jax.device_count(),), ("rows",))
    by_row = NamedSharding(mesh, PartitionSpec("rows"))
    each = args.rows // jax.device_count() * jax.local_device_count()
    # If one process cannot read its rows, all end with its error.
    with all_or_none(mesh):
        mine = rows_of(jax.process_index() * each, (jax.process_index() + 1) * each)
    X, y = (jax.make_array_from_process_local_data(by_row, x) for x in mine)

    Z = gpaug.inducing.kmeans(X, args.inducing)
    svi = gpaug.ConjugateSVI(model, gpaug.AutoSparseGP(model))
    key, state, data = jax.random.key(0), None, {"X": X, "y": y, "inducing": Z}
    steps = args.steps
    if args.checkpoint.exists():
        state = load_state(args.checkpoint, like=svi.init(key, **data))
        steps = max(1, steps - int(state.step))
        if first:
            print(f"going on from step {int(state.step)}")

    def keep(state: Any, losses: np.ndarray) -> None:
        if first:
            save_state(args.checkpoint, state)

    begun = time.perf_counter()
    result = svi.run(
        key, steps, **data, init_state=state, callback=keep,
        progress_bar=first and args.progress,
    )  # fmt: skip
    seconds = time.perf_counter() - begun
    probs = np.asarray(svi.posterior(result).predict_y(rows_of(0, PART)[0]).probs)
    if not first:
        return
    print(
        f"{jax.process_count()} processes, {jax.device_count()} devices, {len(X)} rows"
        f": {len(result.losses)} steps in {seconds:.1f} s, "
        f"bound {-result.losses[-1]:.3f}"
    )
    if args.results:
        learnt = {k: np.asarray(v) for k, v in result.params.items()}
        np.savez(args.results, bound=-result.losses[-1], probs=probs, **learnt)


def main() -> None:
    """Run the example."""
    parser = argparse.ArgumentParser(description=__doc__.split("\n")[0])
    parser.add_argument("--rows", type=int, default=100_000)
    parser.add_argument("--inducing", type=int, default=50)
    parser.add_argument("--steps", type=int, default=60, help="in all, at most")
    parser.add_argument("--launch", type=int, help="processes to start here")
    parser.add_argument("--cluster", action="store_true")
    parser.add_argument("--coordinator", help="host:port of the first process")
    parser.add_argument("--processes", type=int)
    parser.add_argument("--process", type=int)
    parser.add_argument(
        "--patience", type=int, default=30,
        help="seconds after which a process that is silent is taken for dead",
    )  # fmt: skip
    parser.add_argument("--checkpoint", type=Path, default=Path("distributed_fit.npz"))
    parser.add_argument("--results", type=Path)
    parser.add_argument("--progress", action="store_true")
    args = parser.parse_args()
    if args.launch:
        position = sys.argv.index("--launch")
        options = sys.argv[1:position] + sys.argv[position + 2 :]
        os._exit(launch(args.launch, options))
    join(args)
    keep_compiled_programs()
    fit(args)


if __name__ == "__main__":
    main()
