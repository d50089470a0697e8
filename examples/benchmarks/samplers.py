# SPDX-License-Identifier: Apache-2.0
r"""Draws per second, parameters per element, beside compiled samplers.

One process per dtype, one thread, processor time; the package and its rival take turns
in it, so that other work on the machine hits both::

    python examples/benchmarks/samplers.py --json results.json

``traced``: both parameters are arguments of a compiled function. ``known``: the call a
user makes outside of one, where a shape that all elements share is seen. ``first``: the
first traced call, which compiles. The rival draws in float64 whatever it is compared
with.
"""

from __future__ import annotations

import argparse
import json
import os
import statistics
import subprocess
import sys
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np
from common import THREADS, machine, print_table, versions

DTYPES = ("float32", "float64")
COLUMNS = {
    "suite": "",
    "dtype": "",
    "cell": "",
    "traced": ".2e",
    "known": ".2e",
    "rival": ".2e",
    "traced_ratio": ".2f",
    "known_ratio": ".2f",
    "first": ".2f",
}


class Suite(NamedTuple):
    """A distribution and its rival.

    :param rival: the package to import for it.
    :param cells: label and parameters, one array each; called with a generator and the
        number of elements.
    :param ours: the distribution, from its parameters.
    :param theirs: one draw per element, from the parameters and a NumPy generator.
    :param apart: cells left out of the geometric mean.
    """

    rival: str
    cells: Callable[[np.random.Generator, int], dict[str, tuple[np.ndarray, ...]]]
    ours: Callable[..., Any]
    theirs: Callable[..., np.ndarray]
    apart: tuple[str, ...] = ()


# -- Polya-Gamma -----------------------------------------------------------------------

SHAPES = (0.5, 1.0, 1.5, 4.0, 10.0, 30.0)


def polya_gamma_cells(
    rng: np.random.Generator, size: int
) -> dict[str, tuple[np.ndarray, ...]]:
    tilt = rng.normal(scale=2.0, size=size)
    return {f"b={b:g}": (np.full(size, b), tilt) for b in SHAPES}


def polya_gamma(b: Any, c: Any) -> Any:
    from numpyro_gpaug.distributions import PolyaGamma

    return PolyaGamma(b, c, validate_args=False)


def polya_gamma_rival(
    rng: np.random.Generator, b: np.ndarray, c: np.ndarray
) -> np.ndarray:
    from polyagamma import random_polyagamma

    return random_polyagamma(b, c, random_state=rng)


# Add other distributions here.
SUITES = {
    "polya_gamma": Suite(
        "polyagamma", polya_gamma_cells, polya_gamma, polya_gamma_rival, ("b=1",)
    ),
}


# -- measurement -----------------------------------------------------------------------


def cpu_seconds(function: Callable[[], Any]) -> float:
    """Processor time of a call."""
    start = time.process_time()
    function()
    return time.process_time() - start


def measure_cell(
    suite: Suite, parameters: tuple[np.ndarray, ...], dtype: str, repeats: int
) -> dict[str, float]:
    """Return the draws per second of each method, and medians of their ratios within a
    round.
    """
    import jax

    size = len(parameters[0])
    arrays = [jax.numpy.asarray(p, dtype) for p in parameters]
    keys = iter(jax.random.split(jax.random.key(1), 2 * repeats + 2))
    rng = np.random.default_rng(1)
    traced = jax.jit(lambda key, *args: suite.ours(*args).sample(key))

    def draw_traced() -> None:
        assert traced(next(keys), *arrays).block_until_ready().dtype == dtype

    def draw_known() -> None:
        assert suite.ours(*arrays).sample(next(keys)).block_until_ready().size == size

    def draw_rival() -> None:
        assert suite.theirs(rng, *parameters).size == size

    ways = (draw_traced, draw_known, draw_rival)
    first = [cpu_seconds(way) for way in ways][0]
    rounds = [[cpu_seconds(way) for way in ways] for _ in range(repeats)]
    fast, known, rival = (
        statistics.median(c) for c in zip(*rounds, strict=True)
    )  # fmt: skip
    return {
        "traced": size / fast,
        "known": size / known,
        "rival": size / rival,
        "traced_ratio": statistics.median(r / t for t, _, r in rounds),
        "known_ratio": statistics.median(r / k for _, k, r in rounds),
        "first": first,
    }


def worker(args: argparse.Namespace) -> None:
    """Measure one suite in one dtype, and print JSON."""
    suite = SUITES[args.worker]
    cells = suite.cells(np.random.default_rng(0), args.size)
    rows = [
        {"suite": args.worker, "dtype": args.dtypes[0], "cell": label}
        | measure_cell(suite, parameters, args.dtypes[0], args.repeats)
        for label, parameters in cells.items()
    ]
    packages = versions("jax", "jaxlib", "numpyro", "numpy", suite.rival)
    print(json.dumps({"rows": rows, "versions": packages}))


def spawn(name: str, dtype: str, args: argparse.Namespace) -> dict[str, Any]:
    """Run a worker on a single thread."""
    environment = os.environ | dict.fromkeys(THREADS, "1")
    environment["JAX_ENABLE_X64"] = str(int(dtype == "float64"))
    environment["JAX_PLATFORMS"] = "cpu"
    environment["XLA_FLAGS"] = "--xla_cpu_multi_thread_eigen=false"
    options = ["--size", str(args.size), "--repeats", str(args.repeats)]
    command = [sys.executable, __file__, "--worker", name, "--dtypes", dtype, *options]
    done = subprocess.run(
        command, env=environment, stdout=subprocess.PIPE, text=True, check=True
    )
    return json.loads(done.stdout.strip().splitlines()[-1])


def main() -> None:
    """Run the benchmark."""
    parser = argparse.ArgumentParser(description=__doc__.split("\n")[0])
    parser.add_argument("--suites", default=[*SUITES], type=lambda t: t.split(","))
    parser.add_argument("--dtypes", default=DTYPES, type=lambda t: t.split(","))
    parser.add_argument("--size", type=int, default=200_000)
    parser.add_argument("--repeats", type=int, default=9)
    parser.add_argument("--json", type=Path)
    parser.add_argument("--worker", help=argparse.SUPPRESS)
    args = parser.parse_args()
    if args.worker:
        worker(args)
        return
    if hasattr(os, "sched_setaffinity"):
        os.sched_setaffinity(0, {max(os.sched_getaffinity(0))})
    output: dict[str, Any] = {"machine": machine(), "size": args.size, "rows": []}
    print(f"{output['machine']}; one thread, processor time, medians")
    for name in args.suites:
        for dtype in args.dtypes:
            result = spawn(name, dtype, args)
            output["rows"] += result["rows"]
            output["versions"] = output.get("versions", {}) | result["versions"]
    print(output["versions"])
    print(f"draws per second and ratios to the rival, {args.size} elements per call")
    print_table(output["rows"], COLUMNS)
    for name in args.suites:
        for dtype in args.dtypes:
            for way in ("traced", "known"):
                ratios = [
                    row[f"{way}_ratio"]
                    for row in output["rows"]
                    if (row["suite"], row["dtype"]) == (name, dtype)
                    and row["cell"] not in SUITES[name].apart
                ]
                mean = statistics.geometric_mean(ratios)
                cells = f"{len(ratios)} cells, without {SUITES[name].apart}"
                print(f"{name} {dtype} {way}: geometric mean {mean:.2f} ({cells})")
    if args.json:
        args.json.write_text(json.dumps(output, indent=1))


if __name__ == "__main__":
    main()
