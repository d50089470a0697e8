# SPDX-License-Identifier: Apache-2.0
r"""Binary classification with a sparse Gaussian process: time, bound and accuracy.

``waveform``: N = 4500, M = 100, hyperparameters fixed (lengthscale 5, variance 1),
closed form against rivals that maximise the same bound on the same inducing inputs; one
iteration against the floor of its linear algebra, timed in the same run. ``learnt``:
hyperparameters learnt on smaller sets.

Every method runs in a process of its own, one core, one dtype, so every start is cold::

    python examples/benchmarks/binary.py --json results.json \
        --peers numpy,svc,gpflow=/path/to/python,gpytorch=/path/to/python

Without ``--peers``, those that this interpreter can import are run. Data other than
scikit-learn's are read from the folder ``GPAUG_DATA``.
"""

from __future__ import annotations

import argparse
import importlib.util
import json
import os
import statistics
import sys
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import numpy as np
from common import (
    Clock,
    Fit,
    Prediction,
    Problem,
    machine,
    make_problem,
    measure,
    print_table,
    versions,
    worker_main,
)

HERE = Path(__file__).resolve()
OURS = "numpyro_gpaug"
PEERS = ("bare", "gpflow", "gpytorch", "gpjax", "numpy", "gpc", "svc")
LIBRARIES = {"gpc": "sklearn", "svc": "sklearn", "bare": "jax"}
LEARNERS = ("gpflow", "gpytorch", "gpc", "svc")
DTYPES = ("float32", "float64")
LEARNT = ("breast_cancer", "ratsch_diabetis", "ratsch_heart")
LEARNT_STEPS = 300
COLUMNS = {
    "method": "",
    "dtype": "",
    "elbo": ".2f",
    "nll": ".4f",
    "error": ".1%",
    "steps": "d",
    "warm": ".4f",
    "per_step": ".5f",
    "imports": ".2f",
    "setup": ".2f",
    "cold": ".2f",
    "memory": ".0f",
    "load": ".1f",
}


# -- the package, as a worker ----------------------------------------------------------


def numpyro_gpaug(problem: Problem, clock: Clock) -> tuple[Fit, dict[str, Any]]:
    """Fit by closed-form updates, with the default settings."""
    import jax
    import numpyro
    import numpyro.distributions as dist
    import optax

    import numpyro_gpaug as gpaug

    imports = clock.now()
    key = jax.random.key(0)
    positive = dist.constraints.positive

    def model(X: Any, y: Any = None, *, inducing: Any) -> None:
        lengthscale, variance = problem.lengthscale, problem.variance
        if problem.learn:
            lengthscale = numpyro.param("lengthscale", lengthscale, constraint=positive)
            variance = numpyro.param("variance", variance, constraint=positive)
        kernel = gpaug.kernels.SquaredExponential(lengthscale, variance)
        gp = gpaug.GaussianProcess("f", kernel, inducing=inducing)
        with numpyro.plate("data", X.shape[0]):
            numpyro.sample("y", dist.Bernoulli(logits=gp(X)), obs=y)

    optim = optax.adam(0.05) if problem.learn else None
    svi = gpaug.ConjugateSVI(model, gpaug.AutoSparseGP(model), optim)

    class Package:
        initial = None

        def fit(self, steps: int) -> Any:
            if self.initial is None:
                self.initial = svi.init(key, problem.X, problem.y, inducing=problem.Z)
            self.result = svi.run(
                key, steps, problem.X, problem.y, inducing=problem.Z,
                init_state=self.initial, progress_bar=False,
            )  # fmt: skip
            return self.result

        def run(self, steps: int) -> None:
            jax.block_until_ready(self.fit(steps).params)

        def bounds(self, steps: int) -> Sequence[float]:
            return -self.fit(steps).losses

        def predict(self) -> Prediction:
            posterior = svi.posterior(self.result)
            probs = np.asarray(posterior.predict_y(problem.X_test).probs)
            mean, variance = map(np.asarray, posterior.predict_f(problem.X))
            divergence = _divergence(self.result.params)
            return Prediction(probs, mean, variance, divergence)

    notes = {"imports": imports, "max_steps": 30}
    return Package(), notes | {"versions": versions("jax", "jaxlib", "numpyro")}


def _divergence(params: dict[str, Any]) -> float:
    """The divergence of the fitted whitened Gaussian from the standard normal, in
    float64.
    """
    potential, precision = (
        np.asarray(params[f"f.v_auto_{name}"], float)
        for name in ("potential", "precision")
    )
    covariance = np.linalg.inv(precision)
    mean = covariance @ potential
    log_det = np.linalg.slogdet(precision)[1]
    return float(0.5 * (np.trace(covariance) + mean @ mean - len(mean) + log_det))


def against_floor(
    fit: Fit, problem: Problem, clock: Clock, repeats: int
) -> dict[str, Any]:
    """Cost of a step beside its linear algebra, timed in turns in one process."""
    import jax
    import jax.numpy as jnp
    from jax.scipy.linalg import solve_triangular

    if problem.learn:
        return {}
    short, long = 6, 46
    size, rows = len(problem.Z), len(problem.X)
    A = jax.random.normal(jax.random.key(0), (size, rows), problem.X.dtype) / 10
    eye = jnp.eye(size, dtype=A.dtype)

    def variances_solved(factor: Any) -> Any:
        return jnp.square(solve_triangular(factor, A, lower=True)).sum(0)

    def variances_inverted(factor: Any) -> Any:
        inverse = solve_triangular(factor, eye, lower=True)
        return jnp.square(inverse @ A).sum(0)

    def linear_algebra(variances: Any) -> Any:
        def body(_: Any, weights: Any) -> Any:
            factor = jnp.linalg.cholesky(eye + (A * weights) @ A.T)
            # Each pass depends on the one before: XLA cannot hoist it.
            return 0.25 / (1 + variances(factor))

        start = jnp.full(rows, 0.25, A.dtype)
        return jax.jit(lambda steps: jax.lax.fori_loop(0, steps, body, start))

    floors = [linear_algebra(v) for v in (variances_solved, variances_inverted)]
    times: list[list[float]] = []
    for _ in range(repeats + 1):
        steps = clock.time(lambda: fit.run(long)) - clock.time(lambda: fit.run(short))
        passes = [
            clock.time(lambda f=floor: f(long - short).block_until_ready())
            for floor in floors
        ]
        times.append([steps, *passes])
    # The first round compiles.
    step, solved, inverted = (
        statistics.median(column) / (long - short)
        for column in zip(*times[1:], strict=True)
    )
    ratios = [row[0] / min(row[1:]) for row in times[1:]]
    return {
        "step": step,
        "floor_solve": solved,
        "floor_inverse": inverted,
        "over_floor": statistics.median(ratios),
        "over_floor_solve": statistics.median(row[0] / row[1] for row in times[1:]),
    }


# -- the benchmark ---------------------------------------------------------------------


def parse_peers(text: str | None) -> dict[str, str]:
    """Interpreters by peer; by default, all that this interpreter can import."""
    if text is None:
        found = importlib.util.find_spec
        return {p: sys.executable for p in PEERS if found(LIBRARIES.get(p, p))}
    pairs = [entry.partition("=") for entry in text.split(",") if entry]
    unknown = {name for name, _, _ in pairs} - set(PEERS)
    if unknown:
        raise SystemExit(f"unknown peers {sorted(unknown)}; there are {PEERS}")
    return {name: python or sys.executable for name, _, python in pairs}


def run_part(
    problem: Problem, peers: dict[str, str], args: argparse.Namespace, steps: int = 0
) -> list[dict[str, Any]]:
    """All methods on one problem; those without a choice of dtype in float64 only."""
    rows = []
    for dtype in args.dtypes:
        runs = [(OURS, sys.executable, HERE)]
        for name, python in peers.items():
            chosen = name not in ("gpc", "svc") and not problem.learn
            if dtype == "float64" or chosen:
                script = "bare" if name == "bare" else "peers"
                runs.append((name, python, HERE.parent / f"{script}_binary.py"))
        for method, python, script in runs:
            row = measure(
                python, script, method, problem, dtype, args.clock, args.repeats, steps
            )
            rows.append(row)
            print(f"  {method} {dtype} done", file=sys.stderr)
    return rows


def print_targets(rows: list[dict[str, Any]]) -> None:
    """Ratios to the floor, and to the rivals that reach the exact optimum."""
    for row in rows:
        if row["method"] != OURS or "failed" in row:
            continue
        print(
            f"{OURS} {row['dtype']}: step {1e3 * row['step']:.2f} ms, floor "
            f"{1e3 * row['floor_solve']:.2f} ms by a triangular solve and "
            f"{1e3 * row['floor_inverse']:.2f} ms by the inverse factor, ratio "
            f"{row['over_floor_solve']:.2f}, and {row['over_floor']:.2f} to the faster"
        )
        for rival in rows:
            reaches = rival.get("elbo", -np.inf) >= row["elbo"] - 0.1
            if rival["method"] == OURS or not reaches:
                continue
            print(
                f"  {rival['method']} {rival['dtype']}: "
                f"{rival['warm'] / row['warm']:.1f} times longer warm, "
                f"{rival['cold'] / row['cold']:.1f} times longer cold"
            )


def main() -> None:
    """Run the benchmark."""
    parser = argparse.ArgumentParser(description=__doc__.split("\n")[0])
    parser.add_argument("--parts", default="waveform,learnt")
    parser.add_argument("--peers", help="name or name=interpreter, by commas")
    parser.add_argument("--dtypes", default=DTYPES, type=lambda text: text.split(","))
    parser.add_argument("--repeats", type=int, default=5)
    parser.add_argument(
        "--clock", choices=("wall", "cpu"), default="wall",
        help="cpu: processor seconds, for a machine with other work",
    )  # fmt: skip
    parser.add_argument("--json", type=Path)
    args = parser.parse_args()
    if hasattr(os, "sched_setaffinity"):
        os.sched_setaffinity(0, {max(os.sched_getaffinity(0))})
    peers = parse_peers(args.peers)
    output: dict[str, Any] = {"machine": machine(), "clock": args.clock}
    print(
        f"{output['machine']}; {args.clock} seconds on one core, medians, memory in MiB"
    )
    print(
        "elbo: the exact bound, by quadrature; steps: until the method's own bound is "
        "within 0.01 nats of its best; warm: so many steps, compiled before; cold: "
        "with imports, set-up and compilation"
    )
    if "waveform" in args.parts:
        try:
            problem = make_problem("ratsch_waveform", 100, 5.0, learn=False)
        except FileNotFoundError as error:
            print(f"waveform skipped: {error}")
        else:
            rows = output["waveform"] = run_part(problem, peers, args)
            print("\nwaveform, N = 4500, M = 100, hyperparameters fixed")
            print_table(rows, COLUMNS)
            print_targets(rows)
    for name in LEARNT if "learnt" in args.parts else ():
        try:
            problem = make_problem(name, 100, None, learn=True)
        except FileNotFoundError as error:
            print(f"{name} skipped: {error}")
            continue
        learners = {p: python for p, python in peers.items() if p in LEARNERS}
        rows = output[name] = run_part(problem, learners, args, LEARNT_STEPS)
        print(f"\n{name}, N = {len(problem.X)}, M = {len(problem.Z)}, learnt")
        print_table(rows, COLUMNS)
    if args.json:
        args.json.write_text(json.dumps(output, indent=1))


if __name__ == "__main__":
    if len(sys.argv) > 1 and sys.argv[1] == OURS:
        worker_main({OURS: numpyro_gpaug}, against_floor)
    else:
        main()
