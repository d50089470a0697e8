# SPDX-License-Identifier: Apache-2.0
r"""What the package's choice of XLA's options costs and saves.

Each workload runs in a process of its own on one core, with the options of
``numpyro_gpaug.math.compiling`` and with XLA's defaults, in turns: seconds to compile
and do it once, then the quickest of several times at the same shapes, and after how
many times the defaults would have been quicker in all::

    python examples/benchmarks/compiling.py --repeats 3 --json compiling.json
"""

from __future__ import annotations

import argparse
import json
import math
import os
import statistics
import subprocess
import sys
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
from common import THREADS, machine, print_table, versions

# The package keeps options that a user sets; these are XLA's defaults.
DEFAULTS = {
    "xla_cpu_use_fusion_emitters": "true", "xla_backend_optimization_level": "3",
    "xla_cpu_parallel_codegen_split_count": "32", "xla_disable_hlo_passes": "",
}  # fmt: skip
COLUMNS = {
    "workload": "", "cold": ".2f", "cold_default": ".2f", "cold_ratio": ".2f",
    "warm": ".4f", "warm_default": ".4f", "warm_ratio": ".2f", "times": ".0f",
}  # fmt: skip
# Rows, inducing inputs, likelihood, whether hyperparameters are learnt, batch size.
FITS: dict[str, tuple[int, int, str, bool, int | None]] = {
    "small, fixed": (200, 20, "bernoulli", False, None),
    "small": (200, 20, "bernoulli", True, None),
    "small, Student-t": (200, 20, "student", True, None),
    "smallish": (500, 50, "bernoulli", True, None),
    "fixed": (4500, 100, "bernoulli", False, None),
    "learning": (4500, 100, "bernoulli", True, None),
    "learning, more rows": (50_000, 100, "bernoulli", True, None),
    "Student-t": (4500, 100, "student", True, None),
    "softmax": (3000, 60, "softmax", True, None),
    "minibatches": (100_000, 100, "bernoulli", True, 500),
}
# The number of rows to predict, and the fit.
PREDICTIONS = {
    "first predictions": (100, "small"), "predictions of 500 rows": (500, "fixed"),
    "predictions of classes": (100, "softmax"), "predictions": (100_000, "fixed"),
}  # fmt: skip
WORKLOADS = (*FITS, *PREDICTIONS, "groups", "nested")
STEPS = 6


def fit_of(
    rows: int, size: int, likelihood: str, learnt: bool, batch: int | None
) -> tuple[Callable[[], Any], Any]:
    """Return a function that fits, and one that predicts from the fit."""
    import jax
    import jax.numpy as jnp
    import numpyro
    import numpyro.distributions as dist

    import numpyro_gpaug as gpaug

    def model(X: Any, y: Any = None, *, inducing: Any) -> None:
        lengthscale = numpyro.param(
            "lengthscale", jnp.full(X.shape[1], 2.0),
            constraint=dist.constraints.positive,
        )  # fmt: skip
        kernel = gpaug.kernels.SquaredExponential(lengthscale, 1.0)
        count = {"num_latents": 6} if likelihood == "softmax" else {}
        gp = gpaug.GaussianProcess("f", kernel, inducing=inducing, **count)
        with numpyro.plate("data", X.shape[0], subsample_size=batch):
            x = numpyro.subsample(X, 1) if batch else X
            f = gp(x)
            observed = {
                "bernoulli": lambda: dist.Bernoulli(logits=f),
                "student": lambda: dist.StudentT(4.0, f, 0.3),
                "softmax": lambda: dist.Categorical(logits=f),
            }[likelihood]()
            of = numpyro.subsample(y, 0) if batch and y is not None else y
            numpyro.sample("y", observed, obs=of)

    rng = np.random.default_rng(0)
    X = rng.normal(size=(rows, 10)).astype(np.float32)
    f = X[:, 0] * X[:, 1] + 0.3 * rng.normal(size=rows)
    y = {
        "bernoulli": (f > 0).astype(np.int32),
        "student": f.astype(np.float32),
        "softmax": np.clip(np.round(f + 2.5), 0, 5).astype(np.int32),
    }[likelihood]
    optim = () if learnt and not batch else (_adam() if learnt else None,)
    svi = gpaug.ConjugateSVI(model, gpaug.AutoSparseGP(model), *optim)

    def fit() -> Any:
        key = jax.random.key(0)
        steps = 100 if batch or rows < 1000 else STEPS
        return svi.run(key, steps, X, y, inducing=X[:size], progress_bar=False)

    return fit, svi


def _adam() -> Any:
    import optax

    return optax.adam(0.05)


def predictions(rows: int, after: str) -> Callable[[], Any]:
    """Return a function that predicts rows after a fit."""
    fit, svi = fit_of(*FITS[after])
    posterior = svi.posterior(fit())
    X = np.random.default_rng(1).normal(size=(rows, 10)).astype(np.float32)
    return lambda: np.asarray(posterior.predict_y(X).probs)


def grouped() -> tuple[Any, tuple[Any, ...]]:
    """A model of counts with effects of many groups, and its data."""
    import jax.numpy as jnp
    import numpyro
    import numpyro.distributions as dist

    groups, rows = 3000, 30_000

    def model(group: Any, x: Any, y: Any = None) -> None:
        beta = numpyro.sample("beta", dist.Normal(0, 2).expand([2]).to_event(1))
        tau = numpyro.sample("tau", dist.HalfNormal(1))
        with numpyro.plate("groups", groups):
            effect = numpyro.sample("effect", dist.Normal(0, tau))
        with numpyro.plate("data", len(x)):
            rate = jnp.exp(beta[0] + beta[1] * x + effect[group])
            numpyro.sample("y", dist.Poisson(rate), obs=y)

    rng = np.random.default_rng(0)
    group = rng.integers(0, groups, rows)
    x = rng.normal(size=rows).astype(np.float32)
    effect = 0.7 * rng.normal(size=groups)[group]
    return model, (group, x, rng.poisson(np.exp(0.5 + 0.3 * x + effect)))


def work(name: str) -> Callable[[], Any]:
    """Return the function to time."""
    if name in FITS:
        return fit_of(*FITS[name])[0]
    if name in PREDICTIONS:
        return predictions(*PREDICTIONS[name])
    import jax

    import numpyro_gpaug as gpaug

    if name == "groups":
        model, data = grouped()
        svi = gpaug.ConjugateSVI(model, gpaug.AutoLatentGaussian(model))
        return lambda: svi.run(jax.random.key(0), STEPS, *data, progress_bar=False)
    model, data = grouped()
    first = data[0] < 40
    fewer = tuple(x[first] for x in data)

    def nested() -> Any:
        run = gpaug.NestedVI(model, progress_bar=False)
        run.run(jax.random.key(0), *fewer)
        return run.get_samples()

    return nested


def worker(name: str, repeats: int, clock: str) -> None:
    """Print the seconds of one workload in this process."""
    import jax

    now = time.process_time if clock == "cpu" else time.perf_counter
    job = work(name)
    start = now()
    jax.block_until_ready(job())
    cold, warm = now() - start, []
    for _ in range(repeats):
        start = now()
        jax.block_until_ready(job())
        warm.append(now() - start)
    print(json.dumps({"cold": cold, "warm": min(warm)}))


def spawned(name: str, flags: str, clock: str) -> dict[str, float]:
    """The seconds of one process."""
    environment = {k: v for k, v in os.environ.items() if "COMPILATION_CACHE" not in k}
    environment |= dict.fromkeys(THREADS, "1") | {"XLA_FLAGS": flags}
    command = [sys.executable, __file__, "--worker", name, "--clock", clock]
    done = subprocess.run(
        command, env=environment, capture_output=True, text=True, check=True
    )
    return json.loads(done.stdout.strip().splitlines()[-1])


def row(name: str, default: str, repeats: int, clock: str) -> dict[str, Any]:
    """Medians over pairs of processes, and of their ratios."""
    pairs = [
        (spawned(name, "", clock), spawned(name, default, clock))
        for _ in range(repeats)
    ]
    found: dict[str, Any] = {"workload": name, "pairs": pairs}
    for key in ("cold", "warm"):
        ours, default = ([pair[i][key] for pair in pairs] for i in (0, 1))
        found[key], found[f"{key}_default"] = map(statistics.median, (ours, default))
        ratios = [a / b for a, b in zip(ours, default, strict=True)]
        found[f"{key}_ratio"] = statistics.median(ratios)
    saved, lost = (found[f"{k}_default"] - found[k] for k in ("cold", "warm"))
    found["times"] = saved / -lost if lost < 0 < saved else math.inf
    return found


def main() -> None:
    """Run the benchmark."""
    parser = argparse.ArgumentParser(description=__doc__.split("\n")[0])
    parser.add_argument("--workloads", default=";".join(WORKLOADS), help="by ';'")
    parser.add_argument("--repeats", type=int, default=3)
    parser.add_argument("--worker", help=argparse.SUPPRESS)
    parser.add_argument(
        "--clock", choices=("wall", "cpu"), default="wall",
        help="cpu: processor seconds, for a machine with other work",
    )  # fmt: skip
    parser.add_argument("--json", type=Path)
    args = parser.parse_args()
    if args.worker:
        worker(args.worker, 5, args.clock)
        return
    from numpyro_gpaug.math.compiling import compiler_options

    asked = compiler_options(quick=True)
    if not asked:
        parser.exit(message="this jaxlib has no such options, or XLA_FLAGS has one\n")
    default = " ".join(f"--{name}={DEFAULTS[name]}" for name in asked)
    if hasattr(os, "sched_setaffinity"):
        os.sched_setaffinity(0, {max(os.sched_getaffinity(0))})
    names = args.workloads.split(";")
    rows = [row(name, default, args.repeats, args.clock) for name in names]
    output = {"machine": machine(), "rows": rows}
    output["versions"] = versions("jax", "jaxlib", "numpyro", "numpyro_gpaug")
    print_table(rows, COLUMNS)
    if args.json:
        args.json.write_text(json.dumps(output, indent=1))


if __name__ == "__main__":
    main()
