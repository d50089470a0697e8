# SPDX-License-Identifier: Apache-2.0
r"""Effective samples per processor second of exact samplers.

Bayesian logistic regression on a real table, and full-process classifiers; the
package's ``AugmentedGaussian`` and ``EllipticalSlice`` beside NumPyro's NUTS (whitened:
the Cholesky factor of the kernel matrix is computed once and passed in) and a Gibbs
sampler in NumPy with the draws of ``polyagamma``. One process per sampler and problem,
one thread, float32 for JAX::

    python examples/benchmarks/mcmc.py --json results.json
    python examples/benchmarks/mcmc.py --sizes 50 --draws 200 --table none   # reduced

Effective sample sizes are ArviZ's bulk ones, of the worst latent function value (or
weight). ``warm``: per second of sampling, compiled and adapted. ``cold``: per second of
all it takes to get ``--draws`` draws after imports: set-up, the fit, compilation,
warm-up and sampling. ``to_10000``: seconds from the start to 10000 effective draws,
that is the same at a longer run (the overhead measured, the sampling at its warm rate).
Ratios within one run mean more than seconds.
"""

from __future__ import annotations

import argparse
import json
import os
import subprocess
import sys
import time
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np
from common import THREADS, load_data, machine, print_table, versions

SAMPLERS = ("elliptical", "gibbs", "nuts", "numpy")
LENGTHSCALE, VARIANCE = 1.0, 2.0
COLUMNS = {
    "problem": "",
    "sampler": "",
    "ess_per_draw": ".3f",
    "ms_per_draw": ".3f",
    "warm": ".0f",
    "cold": ".0f",
    "cold_seconds": ".1f",
    "to_10000": ".1f",
}


class Problem(NamedTuple):
    """Data, and the covariance of a process at the inputs (``None`` for weights)."""

    X: np.ndarray
    y: np.ndarray
    covariance: np.ndarray | None


def make_problem(name: str) -> Problem:
    """A table by name, standardised, with a column of ones; or a number of inputs in
    two dimensions, with labels of a smooth function."""
    if not name.isdigit():
        X, y = load_data(name)
        X = (X - X.mean(0)) / X.std(0)
        return Problem(np.c_[np.ones(len(X)), X], y, None)
    rng = np.random.default_rng(0)
    X = rng.normal(size=(int(name), 2))
    y = (rng.random(len(X)) < 1 / (1 + np.exp(-3 * np.sin(2 * X[:, 0])))).astype(int)
    square = np.square(X[:, None] - X[None]).sum(-1) / LENGTHSCALE**2
    return Problem(X, y, VARIANCE * np.exp(-0.5 * square))


# -- samplers: draws of function values or weights, and seconds ------------------------

Drawn = tuple[np.ndarray, float, float]


def with_numpyro(
    build: Callable[[], tuple[Any, tuple[Any, ...]]],
    sites: Sequence[str],
    warmup: int,
    draws: int,
) -> tuple[dict[str, np.ndarray], float, float]:
    """Return draws of some sites, the seconds of a draw once warm, and seconds from the
    start.
    """
    import jax
    from numpyro.infer import MCMC

    start = time.process_time()
    kernel, args = build()
    mcmc = MCMC(kernel, num_warmup=warmup, num_samples=draws, progress_bar=False)
    mcmc.run(jax.random.key(1), *args)
    samples = mcmc.get_samples()
    found = {site: np.asarray(samples[site]) for site in sites}
    cold = time.process_time() - start

    def scan(state: Any, args: Any) -> Any:
        def step(state: Any, _: None) -> tuple[Any, Any]:
            state = kernel.sample(state, args, {})
            return state, {site: state.z[site] for site in sites if site in state.z}

        return jax.lax.scan(step, state, None, length=draws)

    chain = jax.jit(scan).lower(mcmc.last_state, args).compile()
    times = []
    for _ in range(3):
        start = time.process_time()
        jax.block_until_ready(chain(mcmc.last_state, args))
        times.append(time.process_time() - start)
    return found, min(times) / draws, cold


def gp_model(X: Any, y: Any = None) -> None:
    import numpyro
    import numpyro.distributions as dist

    import numpyro_gpaug as gpaug

    kernel = gpaug.kernels.SquaredExponential(LENGTHSCALE, VARIANCE)
    gp = gpaug.GaussianProcess("f", kernel, inducing=X)
    with numpyro.plate("data", X.shape[0]):
        numpyro.sample("y", dist.Bernoulli(logits=gp(X)), obs=y)


def linear_model(X: Any, y: Any = None) -> None:
    import jax.numpy as jnp
    import numpyro
    import numpyro.distributions as dist

    w = numpyro.sample("f", dist.Normal(jnp.zeros(X.shape[1]), 1).to_event(1))
    with numpyro.plate("data", X.shape[0]):
        numpyro.sample("y", dist.Bernoulli(logits=X @ w), obs=y)


def ours(problem: Problem, draws: int, *, elliptical: bool) -> Drawn:
    import jax.numpy as jnp

    import numpyro_gpaug as gpaug

    model = linear_model if problem.covariance is None else gp_model

    def build() -> tuple[Any, tuple[Any, ...]]:
        args = jnp.asarray(problem.X, jnp.float32), jnp.asarray(problem.y)
        kernel = gpaug.EllipticalSlice if elliptical else gpaug.AugmentedGaussian
        return kernel(model), args

    found, seconds, cold = with_numpyro(build, ["f"], 50, draws)
    return found["f"], seconds, cold


def nuts(problem: Problem, draws: int) -> Drawn:
    import jax.numpy as jnp
    from numpyro.infer import NUTS

    design = problem.X
    if problem.covariance is not None:
        size = len(problem.X)
        jitter = 2e-7 * size * VARIANCE
        design = np.linalg.cholesky(problem.covariance + jitter * np.eye(size))

    def build() -> tuple[Any, tuple[Any, ...]]:
        args = jnp.asarray(design, jnp.float32), jnp.asarray(problem.y)
        return NUTS(linear_model), args

    found, seconds, cold = with_numpyro(build, ["f"], 500, draws)
    white = found["f"]
    return (
        white if problem.covariance is None else white @ design.T, seconds, cold
    )  # fmt: skip


def numpy_gibbs(problem: Problem, draws: int, warmup: int = 50) -> Drawn:
    from polyagamma import random_polyagamma
    from scipy.linalg import cho_factor, cho_solve, cholesky, solve_triangular

    rng = np.random.default_rng(1)
    X, K, potential = problem.X, problem.covariance, problem.y - 0.5
    start = time.process_time()
    if K is not None:
        K = K + 1e-8 * np.eye(len(X))
        prior = cholesky(K, lower=True)
    logits = np.zeros(len(X))
    found = []
    for i in range(warmup + draws):
        if i == warmup:
            warm = time.process_time()
        omega = random_polyagamma(1, logits, random_state=rng)
        if K is None:
            factor = cholesky(np.eye(X.shape[1]) + (X.T * omega) @ X, lower=True)
            white = solve_triangular(factor, X.T @ potential, lower=True)
            white += rng.normal(size=X.shape[1])
            value = solve_triangular(factor, white, lower=True, trans=1)
            logits = X @ value
        else:
            # Matheron's rule: one factorisation and no product of matrices.
            root = np.sqrt(omega)
            inner = root[:, None] * K * root
            inner[np.diag_indices_from(inner)] += 1
            value = prior @ rng.normal(size=len(X))
            lacking = potential / root - root * value - rng.normal(size=len(X))
            factor = cho_factor(inner, lower=True, overwrite_a=True, check_finite=False)
            value = value + K @ (root * cho_solve(factor, lacking, check_finite=False))
            logits = value
        found.append(value)
    end = time.process_time()
    return np.asarray(found), (end - warm) / draws, end - start


RUNS: dict[str, Callable[[Problem, int], Drawn]] = {
    "elliptical": lambda problem, draws: ours(problem, draws, elliptical=True),
    "gibbs": lambda problem, draws: ours(problem, draws, elliptical=False),
    "nuts": nuts,
    "numpy": numpy_gibbs,
}


def worst_size(draws: np.ndarray) -> float:
    """Bulk effective sample size of the worst element, draws along the first axis."""
    from arviz_stats.base import array_stats

    chain = draws.reshape(1, len(draws), -1).astype(float)
    ess: Callable[..., Any] = array_stats.ess
    return float(np.min(ess(chain, chain_axis=0, draw_axis=1, method="bulk")))


def worker(sampler: str, name: str, draws: int) -> None:
    """Measure one sampler on one problem, and print JSON."""
    found, seconds, cold = RUNS[sampler](make_problem(name), draws)
    worst = worst_size(found)
    overhead = cold - draws * seconds
    row = {
        "problem": name,
        "sampler": sampler,
        "ess_per_draw": worst / draws,
        "ms_per_draw": 1e3 * seconds,
        "warm": worst / draws / seconds,
        "cold": worst / cold,
        "cold_seconds": cold,
        "to_10000": overhead + 1e4 * draws * seconds / worst,
        "mean": found.mean(0).round(4).tolist(),
        "sd": found.std(0).round(4).tolist(),
    }
    print(json.dumps(row))


def spawn(script: str, options: list[str]) -> dict[str, Any]:
    """A script in a process of its own, on one thread; the JSON it prints last."""
    environment = os.environ | dict.fromkeys(THREADS, "1")
    environment["XLA_FLAGS"] = "--xla_cpu_multi_thread_eigen=false"
    environment["JAX_PLATFORMS"] = "cpu"
    done = subprocess.run(
        [sys.executable, script, *options], env=environment, stdout=subprocess.PIPE,
        text=True, check=True,
    )  # fmt: skip
    return json.loads(done.stdout.strip().splitlines()[-1])


def main() -> None:
    """Run the benchmark."""
    parser = argparse.ArgumentParser(description=__doc__.split("\n")[0])
    parser.add_argument("--sizes", default=["200", "500", "1000"],
                        type=lambda t: t.split(","))  # fmt: skip
    parser.add_argument("--table", default="breast_cancer", help="or none")
    parser.add_argument("--samplers", default=[*SAMPLERS], type=lambda t: t.split(","))
    parser.add_argument("--draws", type=int, default=2000)
    parser.add_argument("--json", type=Path)
    parser.add_argument("--worker", help=argparse.SUPPRESS)
    args = parser.parse_args()
    if args.worker:
        worker(args.worker, args.sizes[0], args.draws)
        return
    problems = [] if args.table == "none" else [args.table]
    output: dict[str, Any] = {
        "machine": machine(),
        "versions": versions("jax", "numpyro", "numpy"),
        "draws": args.draws,
        "rows": [],
    }
    for name in [*problems, *args.sizes]:
        given = ["--sizes", name, "--draws", str(args.draws)]
        rows = [spawn(__file__, ["--worker", s, *given]) for s in args.samplers]
        for row in rows:
            # All samplers have one posterior: the largest difference of means, in sds.
            shift = np.subtract(row["mean"], rows[0]["mean"]) / rows[0]["sd"]
            row["shift"] = float(np.abs(shift).max())
        output["rows"] += [
            {k: x for k, x in row.items() if k not in ("mean", "sd")} for row in rows
        ]
        print_table(rows, COLUMNS | {"shift": ".2f"})
    if args.json:
        args.json.write_text(json.dumps(output, indent=1))


if __name__ == "__main__":
    main()
