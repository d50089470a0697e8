# SPDX-License-Identifier: Apache-2.0
"""Extreme classification: what a step costs as the number of classes grows.

A step draws K classes and all data of each; the posterior of all C classes (M means and
an M x M precision each) stays in memory.
Each number of classes runs in a process of its own. The cost of a step is the slope
between a short and a long run, so that what a run does once does not count::

    python examples/benchmarks/extreme.py --classes 1000 10000 100000
"""

from __future__ import annotations

import argparse
import json
import subprocess
import sys
import time
from pathlib import Path

import numpy as np
from common import machine, peak_memory, print_table, versions

PER_CLASS = 4


def make_data(num_classes: int, seed: int = 0) -> tuple[np.ndarray, np.ndarray]:
    """Inputs in two columns, a cluster per class, and their classes."""
    rng = np.random.default_rng(seed)
    centres = 3 * rng.normal(size=(num_classes, 1, 2))
    X = centres + 0.4 * rng.normal(size=(num_classes, PER_CLASS, 2))
    return X.reshape(-1, 2).astype("float32"), np.arange(num_classes).repeat(PER_CLASS)


def model(X, members, *, inducing, num_drawn):
    """The logistic-softmax by classes drawn, and by data of theirs."""
    import numpyro

    import numpyro_gpaug as gpaug

    num_classes = len(members.rows)
    kernel = gpaug.kernels.SquaredExponential(1.0, 4.0)
    mean = -float(np.log(num_classes)) - 2.0
    gp = gpaug.GaussianProcess("f", kernel, inducing, mean, num_latents=num_classes)
    batch = members.draw(num_drawn)
    f = gp(X[batch.rows], latents=batch.classes)
    with numpyro.handlers.scale(scale=batch.scale):
        likelihood = gpaug.SampledLogisticSoftmax(f, num_classes)
        numpyro.sample("y", likelihood, obs=batch.own)


def run_one(options: argparse.Namespace, num_classes: int) -> dict[str, float]:
    """Steps at one number of classes, in this process."""
    import jax

    import numpyro_gpaug as gpaug
    from numpyro_gpaug.multilabel import ClassMembers

    X, y = make_data(num_classes)
    members = ClassMembers.of(y, num_classes)
    arguments = {
        "inducing": X[:: max(1, len(X) // options.num_inducing)][
            : options.num_inducing
        ],
        "num_drawn": options.drawn,
        "progress_bar": False,
    }
    svi = gpaug.ConjugateSVI(model, gpaug.AutoSparseGP(model))

    def run(num_steps, state=None):
        start = time.process_time()
        result = svi.run(
            jax.random.key(0), num_steps, X, members, init_state=state, **arguments
        )
        jax.block_until_ready(result.params)
        return result.state, time.process_time() - start

    state, first = run(1)
    state, short = run(options.steps, state)
    state, long = run(3 * options.steps, state)
    q = sum(x.nbytes for x in jax.tree.leaves(state.natural))
    return {
        "classes": num_classes,
        "first_s": first,
        "ms_per_step": 1e3 * (long - short) / (2 * options.steps),
        "ms_per_step_in_all": 1e3 * long / (3 * options.steps),
        "q_GB": q / 1e9,
        "peak_GB": peak_memory() / 1e3,
    }


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.split("\n")[0])
    parser.add_argument("--classes", type=int, nargs="+", default=[1000, 10000])
    parser.add_argument("--drawn", type=int, default=100, help="classes per step")
    parser.add_argument("--num-inducing", type=int, default=50)
    parser.add_argument("--steps", type=int, default=500)
    parser.add_argument("--one", type=int, help=argparse.SUPPRESS)
    parser.add_argument("--json", type=Path, help="write every figure here")
    options = parser.parse_args()
    if options.one:
        print(json.dumps(run_one(options, options.one)))
        return
    results = []
    for num_classes in options.classes:
        command = [sys.executable, *sys.argv, "--one", str(num_classes)]
        worker = subprocess.run(command, check=True, capture_output=True, text=True)
        results.append(json.loads(worker.stdout.splitlines()[-1]))
    columns = {"classes": "d", "first_s": ".1f", "ms_per_step": ".1f"}
    columns |= {"ms_per_step_in_all": ".1f", "q_GB": ".2f", "peak_GB": ".2f"}
    print_table(results, columns)
    report = {
        "machine": machine(),
        "versions": versions("jax", "numpyro"),
        "dtype": "float32",
        "seconds": "CPU time",
        "results": results,
    }
    if options.json:
        options.json.write_text(json.dumps(report, indent=1))


if __name__ == "__main__":
    main()
