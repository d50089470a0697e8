# SPDX-License-Identifier: Apache-2.0
r"""How long until something happens: what a first fit and a first prediction cost.

``waveform``: the fixed problem of ``binary.py`` (N = 4500, M = 100, 6 steps);
``readme``: the model of the README (N = 200, M = 20, hyperparameters learnt, 50 steps).
Beside the package the same arithmetic as bare functions of JAX, whose programs have to
be compiled too, and GPflow. Every start is a process of its own on one core, without
and with programs that an earlier process left in JAX's persistent compilation cache;
methods take turns, so that ratios hold on a machine with other work::

    python examples/benchmarks/start.py --json start.json --gpflow /path/to/python

For each stage (the first fit, ``posterior()``, the first prediction, a second fit, a
later prediction): calls of the user's model function, programs that JAX compiled or
found in its cache, seconds it spent tracing, lowering and compiling (or reading). Then
fusions and calls of libraries in one step of the README's model, compiled.

``--parts classify`` runs ``classify.py`` again and again, with an empty cache the first
time: wall seconds from its imports done to its scores, rivals' fits included.
"""

from __future__ import annotations

import argparse
import importlib
import json
import os
import re
import statistics
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
from common import Clock, Problem, machine, make_problem, print_table, spawn, versions

HERE = Path(__file__).resolve()
OURS = "numpyro_gpaug"
STEPS = {"waveform": 6, "readme": 50}
ROWS, REPEATS = 100, 100
SECONDS = {
    "/jax/core/compile/jaxpr_trace_duration": "trace",
    "/jax/core/compile/jaxpr_to_mlir_module_duration": "lower",
    "/jax/core/compile/backend_compile_duration": "compile",
}
NO_CACHE = "gpflow", "second"
STAGES = ("fit", "posterior", "prediction", "refit", "later")
COLUMNS = {
    "problem": "", "method": "", "cache": "", "calls": "", "programs": "",
    "trace": ".2f", "lower": ".2f", "compile": ".2f", "setup": ".2f", "imports": ".2f",
    "first_fit": ".2f", "first_prediction": ".2f", "warm_fit": ".4f", "warm_ms": ".2f",
}  # fmt: skip
COMPARED = {
    "setup": "set-up and compilation",
    "first_fit": "time to the first fit",
    "first_prediction": "time to the first prediction",
    "warm_fit": "warm fit",
    "warm_ms": f"warm prediction of {ROWS} rows",
}


# -- a start, as a worker --------------------------------------------------------------


def package(problem: Problem, clock: Clock, calls: list[int]) -> tuple[Any, float]:
    """Return the package's fit: the one of ``binary.py``, or the README's."""
    import jax
    import numpyro
    import numpyro.distributions as dist
    import optax

    import numpyro_gpaug as gpaug

    imports = clock.now()

    def model(X: Any, y: Any = None, *, inducing: Any) -> None:
        calls.append(1)
        lengthscale, variance = problem.lengthscale, problem.variance
        if problem.learn:
            lengthscale = numpyro.param(
                "lengthscale", lengthscale, constraint=dist.constraints.positive
            )
            variance = numpyro.sample("variance", dist.LogNormal(0.0, 1.0))
        kernel = gpaug.kernels.SquaredExponential(lengthscale, variance)
        gp = gpaug.GaussianProcess("f", kernel, inducing=inducing)
        with numpyro.plate("data", X.shape[0]):
            numpyro.sample("y", dist.Bernoulli(logits=gp(X)), obs=y)

    class Package:
        def __init__(self, learn: bool) -> None:
            optim = optax.adam(0.05) if learn else None
            self.svi = gpaug.ConjugateSVI(model, gpaug.AutoSparseGP(model), optim)

        def run(self, steps: int) -> None:
            self.result = self.svi.run(
                jax.random.key(0), steps, problem.X, problem.y.astype(int),
                inducing=problem.Z, progress_bar=False,
            )  # fmt: skip
            jax.block_until_ready(self.result.params)

        def posterior(self) -> None:
            self.fitted = self.svi.posterior(self.result)

        def probs(self, X: np.ndarray) -> np.ndarray:
            return np.asarray(self.fitted.predict_y(X).probs)

    return Package, imports


def start(method: str, problem: Problem, clock: Clock, steps: int) -> dict[str, Any]:
    """Run the stages of one start in turn, and return the seconds of each."""
    calls: list[int] = []
    spans: dict[str, list[tuple[float, float]]] = {k: [] for k in SECONDS.values()}
    if method != "gpflow":
        import jax

        def note(event: str, seconds: float, **_: Any) -> None:
            if event in SECONDS:
                end = time.perf_counter()
                spans[SECONDS[event]].append((end - seconds, end))

        jax.monitoring.register_event_duration_secs_listener(note)
    if method == OURS:
        make, imports = package(problem, clock, calls)
        fit = make(problem.learn)
    else:
        module = "bare_binary" if method == "bare" else "peers_binary"
        fit, notes = getattr(importlib.import_module(module), method)(problem, clock)
        imports = notes["imports"]
    rows = problem.X_test[:ROWS]

    def stage(function: Callable[[], Any]) -> dict[str, float]:
        calls.clear()
        for found in spans.values():
            found.clear()
        seconds = clock.time(function)
        taken = {name: union(found) for name, found in spans.items()}
        counts = {"calls": len(calls), "programs": len(spans["compile"])}
        return {"seconds": seconds, **counts, **taken}

    stages = {
        "fit": stage(lambda: fit.run(steps)),
        "posterior": stage(getattr(fit, "posterior", lambda: None)),
        "prediction": stage(lambda: fit.probs(rows)),
    }
    reached = clock.now()
    later = stage(lambda: [fit.probs(rows) for _ in range(REPEATS)])
    times = [clock.time(lambda: fit.probs(rows)) for _ in range(REPEATS)]
    refits = [stage(lambda: fit.run(steps)) for _ in range(5)]
    stages["refit"] = sorted(refits, key=lambda refit: refit["seconds"])[2]
    stages["later"] = {k: value / REPEATS for k, value in later.items()}
    warm, first = (stages[k]["seconds"] for k in ("refit", "fit"))
    return {
        "stages": stages, "imports": imports, "first_fit": imports + first,
        "first_prediction": reached, "setup": first - warm, "warm_fit": warm,
        "warm_ms": 1e3 * statistics.median(times),
    }  # fmt: skip


def union(spans: list[tuple[float, float]]) -> float:
    """Seconds covered: functions are traced within others."""
    covered, until = 0.0, -np.inf
    for begin, end in sorted(spans):
        covered += max(0.0, end - max(begin, until))
        until = max(until, end)
    return covered


def compiled_steps(problem: Problem, clock: Clock) -> dict[str, Any]:
    """Count the operations of the compiled steps, with hyperparameters learnt and
    fixed.
    """
    from numpyro_gpaug.math.compiling import compiler_options

    fit, _ = package(problem, clock, [])
    options = compiler_options(quick=False)

    def counted(learn: bool) -> dict[str, int]:
        made, texts = fit(learn), []
        step = made.svi._programs.advance

        def watched(*args: Any, **how: Any) -> Any:
            lowered = step.plain.lower(*args, **how)
            texts.append(lowered.compile(options).as_text())
            return step(*args, **how)

        made.svi._programs.advance = watched
        made.run(1)
        words = {"fusions": " fusion(", "calls": " custom-call("}
        return {key: texts[0].count(word) for key, word in words.items()}

    return {"learning": counted(learn=True), "fixed": counted(learn=False)}


def work() -> None:
    """Run a worker process, which prints JSON."""
    parser = argparse.ArgumentParser()
    for name in ("method", "problem", "--dtype", "--clock", "--cache"):
        parser.add_argument(name)
    parser.add_argument("--steps", type=int)
    parser.add_argument("--spawned", type=float)
    args = parser.parse_args()
    clock = Clock(args.clock, args.spawned)
    problem = Problem.load(args.problem, args.dtype)
    if args.cache:
        import jax

        jax.config.update("jax_compilation_cache_dir", args.cache)
        jax.config.update("jax_persistent_cache_min_compile_time_secs", 0.0)
        jax.config.update("jax_persistent_cache_min_entry_size_bytes", -1)
    if args.method == "steps":
        print(json.dumps(compiled_steps(problem, clock)))
    else:
        print(json.dumps(start(args.method, problem, clock, args.steps)))


# -- the benchmark ---------------------------------------------------------------------


def readme() -> Problem:
    """The data of the README, with rows to predict."""
    from sklearn.cluster import KMeans

    rng = np.random.default_rng(1)
    X, X_test = rng.normal(size=(200, 2)), rng.normal(size=(ROWS, 2))
    y, y_test = (np.asarray(x[:, 0] * x[:, 1] > 0, int) for x in (X, X_test))
    Z = KMeans(20, n_init=1, random_state=0).fit(X).cluster_centers_
    return Problem(X, y, X_test, y_test, Z, 1.0, 1.0, True)


def run_problem(
    name: str, problem: Problem, methods: dict[str, str], args: argparse.Namespace
) -> list[dict[str, Any]]:
    """All methods on one problem, medians over starts."""
    runs: dict[tuple[str, str], list[dict[str, Any]]] = {}
    kinds = [(m, cache) for m in methods for cache in ("none", "second")]
    with tempfile.TemporaryDirectory() as folder:
        path = str(Path(folder) / "problem.npz")
        problem.save(path)
        # The first round fills the caches.
        for count in range(args.repeats + 1):
            for method, cache in kinds:
                options = ["--clock", args.clock, "--steps", str(STEPS[name])]
                if cache == "second":
                    options += ["--cache", str(Path(folder) / method)]
                if (count or cache == "second") and (method, cache) != NO_CACHE:
                    python = methods[method]
                    run = spawn(python, HERE, method, path, *options, dtype=args.dtype)
                    runs.setdefault((method, cache), []).extend([run] * bool(count))
            print(f"  {name}: round {count} of {args.repeats}", file=sys.stderr)
    return [summary(name, *kind, runs[kind]) for kind in kinds if kind in runs]


def summary(
    name: str, method: str, cache: str, runs: list[dict[str, Any]]
) -> dict[str, Any]:
    """A row of the table."""
    row = {"problem": name, "method": method, "cache": cache, "runs": runs}
    if failed := [run["failed"] for run in runs if "failed" in run]:
        return row | {"dtype": cache, "failed": failed[0]}
    row |= {
        k: statistics.median(run[k] for run in runs) for k in (*COMPARED, "imports")
    }
    if method == "gpflow":
        return row
    stages = [run["stages"] for run in runs]
    for key in SECONDS.values():
        taken = [sum(s[k][key] for k in STAGES[:3]) for s in stages]
        row[key] = statistics.median(taken)
    for key in ("calls", "programs") if method == OURS else ("programs",):
        row[key] = " ".join(f"{stages[-1][k][key]:g}" for k in STAGES)
    return row


def print_ratios(rows: list[dict[str, Any]]) -> None:
    """The package over bare JAX, round by round."""
    at = {(row["method"], row["cache"]): row for row in rows if "failed" not in row}
    for cache in ("none", "second"):
        if not {(OURS, cache), ("bare", cache)} <= set(at):
            continue
        print(f"{rows[0]['problem']}, {OURS} / bare, cache: {cache}")
        pairs = list(zip(*(at[m, cache]["runs"] for m in (OURS, "bare")), strict=True))
        for key, words in COMPARED.items():
            ratios = sorted(ours[key] / bare[key] for ours, bare in pairs)
            middle = at[OURS, cache][f"{key}_ratio"] = statistics.median(ratios)
            print(f"  {words}: {middle:.2f} ({ratios[0]:.2f} to {ratios[-1]:.2f})")


def classify(repeats: int) -> list[float]:
    """Seconds until ``classify.py`` has its scores, of a first start and later ones."""
    script = HERE.parent.parent / "classify.py"
    seconds = []
    with tempfile.TemporaryDirectory() as folder:
        environment = os.environ | {"JAX_COMPILATION_CACHE_DIR": folder}
        for _ in range(repeats + 1):
            done = subprocess.run(
                [sys.executable, str(script), "--no-progress"], cwd=folder,
                env=environment, capture_output=True, text=True, check=True,
            )  # fmt: skip
            seconds.append(float(re.search(r"after (\S+) s, imports", done.stdout)[1]))
    return seconds


def main() -> None:
    """Run the benchmark."""
    parser = argparse.ArgumentParser(description=__doc__.split("\n")[0])
    parser.add_argument("--parts", default="waveform,readme")
    parser.add_argument("--gpflow", metavar="PYTHON", help="an interpreter that has it")
    parser.add_argument("--dtype", default="float32", choices=("float32", "float64"))
    parser.add_argument("--repeats", type=int, default=3, help="starts of each kind")
    parser.add_argument(
        "--clock", choices=("wall", "cpu"), default="wall",
        help="cpu: processor seconds, for a machine with other work",
    )  # fmt: skip
    parser.add_argument("--json", type=Path)
    args = parser.parse_args()
    output: dict[str, Any] = {"machine": machine(), "clock": args.clock}
    parts = args.parts.split(",")
    if "classify" in parts:
        parts.remove("classify")
        first, *later = output["classify"] = classify(args.repeats)
        shown = ", ".join(f"{x:.2f}" for x in later)
        print(f"{output['machine']}; wall seconds, all cores")
        print(f"classify.py to its scores: at first {first:.2f}, then {shown}\n")
    if hasattr(os, "sched_setaffinity"):
        os.sched_setaffinity(0, {max(os.sched_getaffinity(0))})
    methods = {OURS: sys.executable, "bare": sys.executable}
    if args.gpflow:
        methods["gpflow"] = args.gpflow
    output["versions"] = versions("jax", "jaxlib", "numpyro")
    print(
        f"{output['machine']}; {args.clock} seconds, one core, {args.dtype}, medians\n"
        f"calls and programs: of {', '.join(STAGES)}; trace, lower, compile: wall "
        "seconds until the first prediction; setup: first fit less a warm one; "
        f"warm_ms: a prediction of {ROWS} rows"
    )
    problems = {"readme": readme(), "waveform": None}
    try:
        problems["waveform"] = make_problem("ratsch_waveform", 100, 5.0, learn=False)
    except FileNotFoundError as error:
        print(f"waveform skipped: {error}")
    for name in parts:
        if (problem := problems[name]) is not None:
            rows = output[name] = run_problem(name, problem, methods, args)
            print()
            print_table(rows, COLUMNS)
            print_ratios(rows)
    with tempfile.TemporaryDirectory() as folder:
        path = str(Path(folder) / "problem.npz")
        problems["readme"].save(path)
        clock = ("--clock", args.clock)
        found = spawn(sys.executable, HERE, "steps", path, *clock, dtype=args.dtype)
    output["steps"] = found
    print(f"\na step of the README's model, compiled: {found}")
    if args.json:
        args.json.write_text(json.dumps(output, indent=1))


if __name__ == "__main__":
    if "--spawned" in sys.argv:
        work()
    else:
        main()
