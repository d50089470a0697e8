# SPDX-License-Identifier: Apache-2.0
r"""Constants of the cost model in ``docs/theory/scaling.md``.

It measures two compiled programs: the bound and the targets of all latents at given
hyperparameters (one sweep), and the bound with its gradient in hyperparameters and
inducing inputs. The operations that XLA counts, and the seconds, are fitted by the
terms of the cost model over sizes of the data; ``error`` is the largest relative error
of the fit. It also prints the operations per second of a product of matrices, and the
bytes per second of a copy::

    python examples/benchmarks/cost.py --json cost.json

Timings need a machine without other work.
"""

from __future__ import annotations

import argparse
import itertools
import json
import time
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import numpyro
import numpyro.distributions as dist
from common import machine, print_table, versions
from scipy.optimize import nnls

import numpyro_gpaug as gpaug
from numpyro_gpaug.infer.vi.passes import Pass, add_block
from numpyro_gpaug.infer.vi.plan import Settings
from numpyro_gpaug.infer.vi.stepper import Stepper
from numpyro_gpaug.model.arguments import Arguments

# Rows, inducing inputs, columns, latents.
SIZES = [
    *itertools.product((2048, 8192), (32, 128), (4, 16), (1,)),
    *itertools.product((2048, 8192), (32, 128), (4,), (3,)),
]
TERMS = ("N M^2", "C N M^2", "N M D", "C N", "C M^3")


def terms(n: int, m: int, d: int, c: int) -> list[int]:
    return [n * m**2, c * n * m**2, n * m * d, c * n, c * m**3]


def model(X, y=None, *, inducing, latents):
    positive = dist.constraints.positive
    start = jnp.ones(X.shape[1], X.dtype)
    lengthscale = numpyro.param("lengthscale", start, constraint=positive)
    Z = numpyro.param("inducing", inducing)
    kernel = gpaug.kernels.SquaredExponential(lengthscale)
    gp = gpaug.GaussianProcess("f", kernel, Z, num_latents=latents)
    with numpyro.plate("data", X.shape[0]):
        numpyro.sample("y", dist.Bernoulli(logits=gp(X)).to_event(1), obs=y)


def programs(n: int, m: int, d: int, c: int) -> dict[str, tuple[Any, Any]]:
    """Compiled programs and their arguments, by name."""
    rng = np.random.default_rng(0)
    X = rng.normal(size=(n, d)).astype(np.float32) / np.sqrt(d)
    y = rng.integers(0, 2, (n, c)).astype(np.int32)
    Z = (rng.normal(size=(m, d)) / np.sqrt(d)).astype(np.float32)
    svi = gpaug.ConjugateSVI(model, gpaug.AutoSparseGP(model))
    how = {"inducing": Z, "latents": c}
    state = svi.init(jax.random.key(0), X, y, **how)
    arguments = Arguments.split((X, y), how)
    plan = svi._programs.plan_at(arguments, state)
    rest = replace(plan, settings=Settings(None, "exact", None, 1, None, ()))

    def sweep(state: Any, arguments: Arguments) -> Any:
        begun = Pass.begun(state.natural, plan)
        values, key = state.hyper.values, state.rng_key
        return add_block(values, key, begun, arguments, rest, None).targets

    def gradient(state: Any, arguments: Arguments) -> Any:
        stepper = Stepper(plan, arguments)
        values, key = state.hyper.values, stepper.key(state)
        problem, pull = stepper.problem_and_pullback(values, key, {})
        at = problem.evaluate(state.natural)
        return at.bound, pull(problem.gradient(at))

    given = state, arguments
    return {
        name: (jax.jit(program).lower(*given).compile(), given)
        for name, program in (("sweep", sweep), ("gradient", gradient))
    }


def seconds(run: Callable[[], Any], rounds: int) -> float:
    """The least of several rounds."""
    found = []
    for _ in range(rounds):
        begun = time.perf_counter()
        jax.block_until_ready(run())
        found.append(time.perf_counter() - begun)
    return min(found)


def fitted(sizes: list[tuple[int, ...]], values: list[float]) -> dict[str, Any]:
    """Coefficients of the terms, none negative, of least relative error."""
    design = np.array([terms(*size) for size in sizes], float)
    relative = design / np.array(values)[:, None]
    scale = relative.max(0)
    found = nnls(relative / scale, np.ones(len(values)))[0] / scale
    error = np.abs(relative @ found - 1).max()
    return {**dict(zip(TERMS, found, strict=True)), "error": float(error)}


def rates(rounds: int) -> dict[str, float]:
    """Measure the highest rates of the machine."""
    a = jnp.ones((1024, 1024))
    long = jnp.ones(2**24)
    product, copy = jax.jit(lambda a: a @ a), jax.jit(lambda x: x + 1)
    jax.block_until_ready((product(a), copy(long)))
    return {
        "product, operations per second": 2
        * 1024**3
        / seconds(lambda: product(a), rounds),
        "copy, bytes per second": 2 * long.nbytes / seconds(lambda: copy(long), rounds),
    }


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.split("\n")[0])
    parser.add_argument("--rounds", type=int, default=7)
    parser.add_argument("--json", type=Path)
    args = parser.parse_args()
    found: dict[str, dict[str, list[float]]] = {}
    for size in SIZES:
        for name, (program, given) in programs(*size).items():
            row = found.setdefault(name, {"operations": [], "seconds": []})
            row["operations"].append(program.cost_analysis()["flops"])
            row["seconds"].append(
                seconds(lambda p=program, g=given: p(*g), args.rounds)
            )
    rows = []
    for name, measured in found.items():
        for unit, values in measured.items():
            rows.append({"program": name, "unit": unit, **fitted(SIZES, values)})
    output = {"machine": machine(), "rates": rates(args.rounds), "fits": rows}
    output["versions"] = versions("jax", "jaxlib", "numpyro")
    print(output["machine"], output["rates"], sep="\n")
    columns = {"program": "", "unit": "", **dict.fromkeys(TERMS, ".3g"), "error": ".2f"}
    print_table(rows, columns)
    if args.json:
        args.json.write_text(json.dumps(output, indent=1))


if __name__ == "__main__":
    main()
