# SPDX-License-Identifier: Apache-2.0
r"""Millions of rows: seconds, memory and accuracy of minibatch fits, and of all rows.

Synthetic labels of a nonlinear function of 18 columns. Inducing inputs start at k-means
centres of a subset and are learnt with the hyperparameters, on minibatches; one process
per likelihood, so that peak memory is its own::

    python examples/benchmarks/large.py
    python examples/benchmarks/large.py --rows 100000 --longer 3 --json large.json

A million rows, all of them in every step, by L-BFGS::

    python examples/benchmarks/large.py --full --rows 1000000 --inducing 100 --steps 5
"""

from __future__ import annotations

import argparse
import json
import resource
import subprocess
import sys
import time
from pathlib import Path
from typing import Any

import numpy as np
from common import machine, print_table

LIKELIHOODS = "bernoulli", "svm"
COLUMNS = {
    "likelihood": "",
    "steps": "d",
    "choosing": ".2f",
    "setup": ".2f",
    "seconds": ".2f",
    "each": ".3f",
    "total": ".2f",
    "cpu": ".2f",
    "peak": ".0f",
    "auc": ".4f",
    "brier": ".4f",
    "nll": ".4f",
}


def draw(rows: int, columns: int, seed: int) -> tuple[np.ndarray, ...]:
    """Inputs, labels from the logit of a smooth function with interactions, and their
    probabilities."""
    rng = np.random.default_rng(seed)
    slopes = np.random.default_rng(0).normal(size=(columns, 3)).astype("float32")
    X = rng.standard_normal((rows, columns), "float32")
    t = X @ (slopes / np.sqrt(columns))
    f = 3 * np.sin(1.5 * t[:, 0]) + 2 * t[:, 1] * t[:, 2] + t[:, 1] + X[:, 0]
    p = 1 / (1 + np.exp(-f))
    return X, (rng.random(rows, "float32") < p).astype("int8"), p


def model(X, y=None, *, inducing, batch=None, likelihood="bernoulli"):
    """The model, in which everything is learnt: one lengthscale per column, variance,
    inducing inputs.
    """
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
    with numpyro.plate("data", X.shape[0], subsample_size=batch) as i:
        f, y = gp(X[i]), None if y is None else y[i]
        svm = likelihood == "svm"
        observed = gpaug.BayesianSVM(f) if svm else dist.Bernoulli(logits=f)
        numpyro.sample("y", observed, obs=y)


def judge(probs: np.ndarray, y: np.ndarray) -> dict[str, float]:
    from sklearn.metrics import log_loss, roc_auc_score

    p = np.asarray(probs, float)
    return {
        "auc": float(roc_auc_score(y, p)),
        "brier": float(np.mean((p - y) ** 2)),
        "nll": float(log_loss(y, p, labels=[0, 1])),
    }


def work(args: argparse.Namespace) -> None:
    """One likelihood: prints a line of JSON."""
    import jax
    import optax

    import numpyro_gpaug as gpaug

    X, y, _ = draw(args.rows, args.columns, 1)
    X_test, y_test, _ = draw(args.test_rows, args.columns, 2)
    begin, worked = time.perf_counter(), time.process_time()
    subset = np.random.default_rng(0).integers(0, len(X), 10_000)
    Z = gpaug.inducing.kmeans(X[subset], args.inducing)
    chosen = time.perf_counter()
    # Put on the device once: every chunk of steps would copy them again.
    X, y = jax.device_put(X), jax.device_put(y)
    optim = "lbfgs" if args.full else optax.adam(args.rate)
    every = None if args.full else args.hyper_every
    guide = gpaug.AutoSparseGP(model)
    svi = gpaug.ConjugateSVI(model, guide, optim, hyper_every=every)
    batch = None if args.full else args.batch
    given = {"inducing": Z, "batch": batch, "likelihood": args.worker}
    quiet = {"progress_bar": False}
    key = jax.random.key(0)
    state = svi.init(key, X, y, **given)
    svi.run(key, 1, X, y, init_state=state, **given, **quiet)
    ready = time.perf_counter()
    result = svi.run(key, args.steps, X, y, init_state=state, **given, **quiet)
    jax.block_until_ready(result.params)
    fitted, worked = time.perf_counter(), time.process_time() - worked
    # Kilobytes on Linux, bytes on macOS.
    unit = 2**20 if sys.platform == "darwin" else 2**10
    peak = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss / unit
    probs = svi.posterior(result).predict_y(X_test).probs
    steps = len(result.losses)
    row = {"likelihood": args.worker, "steps": steps, "choosing": chosen - begin}
    row |= {"setup": ready - chosen, "seconds": fitted - ready, "peak": peak}
    row |= {"each": (fitted - ready) / steps, "total": fitted - begin, "cpu": worked}
    print(json.dumps(row | judge(probs, y_test)))


def spawn(likelihood: str, steps: int, args: argparse.Namespace) -> dict[str, Any]:
    """Run a worker; on failure the row holds the last line of its error."""
    command = [sys.executable, __file__, "--worker", likelihood, "--steps", str(steps)]
    for name in (
        "rows",
        "test_rows",
        "columns",
        "inducing",
        "batch",
        "rate",
        "hyper_every",
    ):
        if getattr(args, name) is not None:
            command += [f"--{name.replace('_', '-')}", str(getattr(args, name))]
    command += ["--full"] * args.full
    done = subprocess.run(command, capture_output=True, text=True, check=False)
    if done.returncode:
        lines = done.stderr.strip().splitlines() or [f"exit code {done.returncode}"]
        return {"method": likelihood, "dtype": "", "failed": lines[-1]}
    return json.loads(done.stdout.strip().splitlines()[-1])


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.split("\n")[0])
    parser.add_argument("--rows", type=int, default=5_000_000)
    parser.add_argument("--test-rows", type=int, default=100_000)
    parser.add_argument("--columns", type=int, default=18)
    parser.add_argument("--inducing", type=int, default=64)
    parser.add_argument("--batch", type=int, default=1000)
    parser.add_argument("--full", action="store_true", help="no minibatches: L-BFGS")
    parser.add_argument("--steps", type=int, default=2000)
    parser.add_argument("--rate", type=float, default=0.01, help="of the gradients")
    parser.add_argument("--hyper-every", type=int, help="steps per gradient")
    parser.add_argument("--longer", type=int, default=0, help="also so many times more")
    parser.add_argument("--likelihoods", default=",".join(LIKELIHOODS))
    parser.add_argument("--json", type=Path)
    parser.add_argument("--worker", choices=LIKELIHOODS, help=argparse.SUPPRESS)
    args = parser.parse_args()
    if args.worker:
        work(args)
        return
    factors = [1, args.longer] if args.longer > 1 else [1]
    rows = []
    for likelihood in args.likelihoods.split(","):
        for factor in factors:
            rows.append(spawn(likelihood, factor * args.steps, args))
    batches = "all in every step" if args.full else f"batches of {args.batch}"
    print(f"{machine()}\n{args.rows} rows, {batches}, M {args.inducing}")
    print(
        "seconds: of the steps, compiled before; each: of one; total: with k-means and "
        "compilation; cpu: processor seconds of that; peak: MiB with data and libraries"
    )
    _, y, p = draw(args.test_rows, args.columns, 2)
    rows.append({"likelihood": "the truth", **judge(p, y)})
    print_table(rows, COLUMNS)
    if args.json:
        args.json.write_text(json.dumps({"machine": machine(), "rows": rows}, indent=1))


if __name__ == "__main__":
    main()
