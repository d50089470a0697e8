# SPDX-License-Identifier: Apache-2.0
"""Data, timing and workers that the benchmarks share; needs NumPy only to import."""

from __future__ import annotations

import argparse
import importlib.metadata
import json
import os
import platform
import statistics
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any, NamedTuple, Protocol

import numpy as np

TOLERANCE = 0.01
THREADS = (
    "OMP_NUM_THREADS",
    "OPENBLAS_NUM_THREADS",
    "MKL_NUM_THREADS",
    "TF_NUM_INTRAOP_THREADS",
    "TF_NUM_INTEROP_THREADS",
)


class Problem(NamedTuple):
    """A binary classification problem, standardised, with the inputs of every method.

    :param X: training inputs.
    :param y: training labels, 0 or 1.
    :param X_test: test inputs.
    :param y_test: test labels.
    :param Z: inducing inputs.
    :param lengthscale: of the squared-exponential kernel, at the start if it is learnt.
    :param variance: of the kernel.
    :param learn: whether the two are learnt.
    """

    X: np.ndarray
    y: np.ndarray
    X_test: np.ndarray
    y_test: np.ndarray
    Z: np.ndarray
    lengthscale: float
    variance: float
    learn: bool

    @classmethod
    def load(cls, path: str, dtype: str) -> Problem:
        """Read what :meth:`save` wrote."""
        with np.load(path, allow_pickle=False) as file:
            arrays = [
                file[k].astype(dtype) for k in ("X", "y", "X_test", "y_test", "Z")
            ]
            scalars = float(file["lengthscale"]), float(file["variance"])
            return cls(*arrays, *scalars, bool(file["learn"]))

    def save(self, path: str) -> None:
        """Write plain arrays."""
        np.savez(path, **self._asdict())


class Prediction(NamedTuple):
    """The predictions that a fit is judged by.

    :param probs: probability of label 1 at the test inputs.
    :param mean: of the latent function at the training inputs, if there is one.
    :param variance: of the latent function there.
    :param kl: from the approximation to the prior.
    """

    probs: np.ndarray
    mean: np.ndarray | None = None
    variance: np.ndarray | None = None
    kl: float = float("nan")


class Fit(Protocol):
    """A method set up on a problem."""

    def run(self, steps: int) -> None:
        """Fit from the start for a number of steps, and wait for the result."""

    def bounds(self, steps: int) -> Sequence[float]:
        """The method's own bound after each step from the start."""

    def predict(self) -> Prediction:
        """Predict with the last fit."""


# -- data ------------------------------------------------------------------------------


def data_folder() -> Path | None:
    """The folder of optional data sets, if there is one."""
    beside = Path(__file__).resolve().parents[2].parent / "shared" / "data"
    folder = Path(os.environ.get("GPAUG_DATA", beside))
    return folder if folder.is_dir() else None


def load_data(name: str) -> tuple[np.ndarray, np.ndarray]:
    """Inputs and labels 0/1; ``breast_cancer`` ships with scikit-learn.

    :raises FileNotFoundError: if an optional data set is not there.
    """
    if name == "breast_cancer":
        from sklearn.datasets import load_breast_cancer

        return load_breast_cancer(return_X_y=True)
    folder = data_folder()
    if folder is None or not (folder / f"{name}.npz").exists():
        raise FileNotFoundError(f"no {name}.npz: set GPAUG_DATA to the data folder")
    with np.load(folder / f"{name}.npz", allow_pickle=False) as file:
        return file["X"].astype(float), (file["y"].ravel() > 0).astype(int)


def make_problem(
    name: str, inducing: int, lengthscale: float | None, learn: bool
) -> Problem:
    """Stratified fold 0 of 10, standardised on its training part, k-means inputs.

    :param name: see :func:`load_data`.
    :param inducing: number of inducing inputs, at most 20% of N if learnt.
    :param lengthscale: ``None`` for the root of the number of columns.
    :param learn: whether the hyperparameters are learnt.
    """
    from sklearn.cluster import KMeans
    from sklearn.model_selection import StratifiedKFold

    X, y = load_data(name)
    folds = StratifiedKFold(10, shuffle=True, random_state=0)
    train, test = next(folds.split(X, y))
    X = (X - X[train].mean(0)) / X[train].std(0)
    size = min(inducing, len(train) // 5) if learn else inducing
    Z = KMeans(size, n_init=1, random_state=0).fit(X[train]).cluster_centers_
    start = float(np.sqrt(X.shape[1])) if lengthscale is None else lengthscale
    return Problem(X[train], y[train], X[test], y[test], Z, start, 1.0, learn)


# -- judgement: the same arithmetic for every method -----------------------------------


def exact_bound(problem: Problem, prediction: Prediction) -> float:
    """The exact evidence lower bound of a Gaussian approximation, by quadrature."""
    if prediction.mean is None or prediction.variance is None:
        return float("nan")
    nodes, weights = np.polynomial.hermite_e.hermegauss(80)
    spread = np.sqrt(prediction.variance.astype(float))[:, None]
    f = prediction.mean.astype(float)[:, None] + spread * nodes
    values = -np.logaddexp(0, -(2 * problem.y[:, None] - 1) * f)
    return float((values @ weights).sum() / weights.sum() - prediction.kl)


def scores(problem: Problem, prediction: Prediction) -> dict[str, float]:
    """Test negative log-likelihood and error, and the exact bound."""
    p = np.clip(prediction.probs.astype(float), 1e-12, 1 - 1e-12)
    y = problem.y_test
    return {
        "nll": float(-np.mean(y * np.log(p) + (1 - y) * np.log1p(-p))),
        "error": float(np.mean((p > 0.5) != (y > 0.5))),
        "elbo": exact_bound(problem, prediction),
    }


# -- timing ----------------------------------------------------------------------------


class Clock:
    """Seconds since this process was spawned: wall-clock, or its processor time."""

    def __init__(self, kind: str, spawned: float) -> None:
        self._kind, self._spawned = kind, spawned

    def now(self) -> float:
        """Seconds since the start."""
        if self._kind == "cpu":
            return time.process_time()
        return time.time() - self._spawned

    def time(self, function: Callable[[], Any]) -> float:
        """Seconds a call takes."""
        start = self.now()
        function()
        return self.now() - start


def peak_memory() -> float:
    """Peak resident memory of this process in MiB; nan where it is not known."""
    # getrusage would count the memory of the parent at the fork.
    status = Path("/proc/self/status")
    lines = status.read_text().splitlines() if status.exists() else []
    peak = [line.split()[1] for line in lines if line.startswith("VmHWM")]
    return int(peak[0]) / 1024 if peak else float("nan")


def steps_needed(bounds: Sequence[float]) -> int:
    """Steps after which the bound stays within ``TOLERANCE`` nats of its best."""
    bounds = np.asarray(bounds, float)
    outside = np.flatnonzero(~(bounds >= np.nanmax(bounds) - TOLERANCE))
    return int(outside[-1]) + 2 if outside.size else 1


def versions(*packages: str) -> dict[str, str]:
    """Versions of installed packages."""
    return {name: importlib.metadata.version(name) for name in packages}


def machine() -> dict[str, Any]:
    """Describe the machine that the figures were measured on."""
    info = Path("/proc/cpuinfo")
    lines = info.read_text().splitlines() if info.exists() else []
    models = [line.split(":")[1].strip() for line in lines if "model name" in line]
    return {
        "cpu": models[0] if models else platform.processor(),
        "cores": os.cpu_count(),
        "cores_used": len(os.sched_getaffinity(0))
        if hasattr(os, "sched_getaffinity")
        else os.cpu_count(),
        "python": platform.python_version(),
        "system": f"{platform.system()} {platform.release()}",
    }


def write_report(path: Path | None, rows: Sequence[Any], *packages: str) -> None:
    """Write the rows of a table as JSON, with the machine and the versions.

    :param path: where to; nowhere if ``None``.
    :param rows: of the table.
    :param packages: whose versions are told, beside JAX and NumPyro.
    """
    if path is None:
        return
    found = versions("jax", "numpyro", *packages)
    report = {"machine": machine(), "versions": found, "rows": rows}
    path.write_text(json.dumps(report, indent=1))


# -- workers: one process per method and dtype, so that every start is cold ------------


def worker_main(
    builders: dict[str, Callable[[Problem, Clock], tuple[Fit, dict[str, Any]]]],
    extras: Callable[[Fit, Problem, Clock, int], dict[str, Any]] | None = None,
) -> None:
    """Run a worker process: measure one method, print JSON.

    :param builders: by method; each imports its library when it is called, and returns
        the fit, set up, with notes: ``imports`` (the clock after the imports),
        ``versions``, and ``max_steps``, enough steps to reach the optimum.
    :param extras: further measurements of a warm fit.
    """
    parser = argparse.ArgumentParser()
    parser.add_argument("method", choices=builders)
    parser.add_argument("problem")
    parser.add_argument("--dtype", default="float64")
    parser.add_argument("--clock", default="wall")
    parser.add_argument("--spawned", type=float, default=time.time())
    parser.add_argument("--steps", type=int, default=0, help="0: find out how many")
    parser.add_argument("--repeats", type=int, default=5)
    parser.add_argument("--cold", action="store_true")
    args = parser.parse_args()
    clock = Clock(args.clock, args.spawned)
    problem = Problem.load(args.problem, args.dtype)
    fit, notes = builders[args.method](problem, clock)
    steps = args.steps or 1
    fit.run(steps)
    result = {**notes, "cold": clock.now(), "memory": peak_memory()}
    if not args.cold:
        if not args.steps:
            steps = steps_needed(fit.bounds(notes["max_steps"]))
        times = [clock.time(lambda: fit.run(steps))]
        # Slow methods run once; the median is for runs that noise can change.
        while len(times) < args.repeats and times[0] < 10:
            times.append(clock.time(lambda: fit.run(steps)))
        result |= {"steps": steps, "warm": statistics.median(times), "runs": len(times)}
        result["per_step"] = result["warm"] / steps
        result |= scores(problem, fit.predict())
        if extras is not None:
            result |= extras(fit, problem, clock, args.repeats)
    print(json.dumps(result))


def spawn(
    python: str, script: Path, method: str, problem: str, *options: str, dtype: str
) -> dict[str, Any]:
    """Run a worker; on failure the result holds the last line of its error."""
    environment = {k: v for k, v in os.environ.items() if "COMPILATION_CACHE" not in k}
    environment |= dict.fromkeys(THREADS, "1")
    environment["JAX_ENABLE_X64"] = str(int(dtype == "float64"))
    environment["TF_CPP_MIN_LOG_LEVEL"] = "3"
    command = [python, str(script), method, problem, "--dtype", dtype, *options]
    spawned = ["--spawned", repr(time.time())]
    done = subprocess.run(
        command + spawned, env=environment, capture_output=True, text=True, check=False
    )
    if done.returncode:
        lines = done.stderr.strip().splitlines()
        return {"failed": lines[-1] if lines else f"exit code {done.returncode}"}
    return json.loads(done.stdout.strip().splitlines()[-1])


def case_in_process(script: Path, case: str, size: int, dtype: str) -> dict[str, Any]:
    """Run a case of a script in a process of its own, which prints a row as JSON; on
    failure the row holds the last line of its error."""
    argv = [sys.executable, str(script), "--child", case, "--size", str(size)]
    row = {"case": case, "dtype": dtype, "load": os.getloadavg()[0]}
    done = subprocess.run(
        argv, capture_output=True, text=True, check=False,
        env=os.environ | {"JAX_ENABLE_X64": str(int(dtype == "float64"))},
    )  # fmt: skip
    if not done.returncode:
        return row | json.loads(done.stdout.strip().splitlines()[-1])
    # The last line of JAX's errors says that frames are hidden.
    said = [
        x for x in done.stderr.splitlines() if x and not x.startswith(("For s", "--"))
    ]
    last = said[-1] if said else f"exit code {done.returncode}"
    return row | {"method": case, "failed": last}


def rows_of_cases(path: Path | None) -> dict[Any, dict[str, Any]]:
    """Return the rows of a JSON file by case and dtype; none if there is no file."""
    if path is None or not path.exists():
        return {}
    rows = json.loads(path.read_text())["rows"]
    return {(row["case"], row["dtype"]): row for row in rows}


def write_rows(
    path: Path | None, rows: dict[Any, dict[str, Any]], *packages: str
) -> None:
    """Write rows of cases to a JSON file, if there is to be one."""
    if path is not None:
        report = {"rows": list(rows.values()), "machine": machine()}
        report["versions"] = versions("jax", "numpyro", *packages)
        path.write_text(json.dumps(report, indent=1))


def measure(
    python: str,
    script: Path,
    method: str,
    problem: Problem,
    dtype: str,
    clock: str,
    repeats: int,
    steps: int = 0,
) -> dict[str, Any]:
    """One warm worker, then cold ones with the number of steps it found (none if it
    was given: the first fit of the warm one is then a cold one too).

    :param python: interpreter.
    :param script: the worker.
    :param method: one of its methods.
    :param problem: the problem.
    :param dtype: ``"float32"`` or ``"float64"``.
    :param clock: ``"wall"`` or ``"cpu"``.
    :param repeats: of every measurement.
    :param steps: number of steps, 0 to find how many the optimum takes.
    """
    load = os.getloadavg()[0] if hasattr(os, "getloadavg") else float("nan")
    common = ("--clock", clock, "--repeats", str(repeats))
    with tempfile.TemporaryDirectory() as folder:
        path = str(Path(folder) / "problem.npz")
        problem.save(path)
        start = python, script, method, path
        result = spawn(*start, *common, "--steps", str(steps), dtype=dtype)
        result |= {"method": method, "dtype": dtype, "load": load}
        if "failed" in result:
            return result
        result["setup"] = result["cold"] - result["imports"] - result["warm"]
        if steps or result["runs"] == 1:
            return result
        taken = "--steps", str(result["steps"]), "--cold"
        cold = [spawn(*start, *common, *taken, dtype=dtype) for _ in range(repeats)]
    for key in ("imports", "cold", "memory"):
        result[key] = statistics.median(run[key] for run in cold)
    result["setup"] = result["cold"] - result["imports"] - result["warm"]
    return result


def print_table(rows: Sequence[dict[str, Any]], columns: dict[str, str]) -> None:
    """Print rows; ``columns`` maps a key to its format."""
    cells = [[key for key in columns]]
    for row in rows:
        cells.append([_cell(row, key, form) for key, form in columns.items()])
    widths = [max(len(row[i]) for row in cells) for i in range(len(columns))]
    for row in cells:
        print("  ".join(c.rjust(w) for c, w in zip(row, widths, strict=True)))
    for row in rows:
        if "failed" in row:
            print(f"{row['method']} {row['dtype']} failed: {row['failed']}")


def _cell(row: dict[str, Any], key: str, form: str) -> str:
    value = row.get(key)
    return "-" if value is None or value != value else format(value, form)
