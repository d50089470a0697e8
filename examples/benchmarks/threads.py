# SPDX-License-Identifier: Apache-2.0
"""Whether anything hangs: chains in parallel, and fits in a pool of threads.

Three kinds of run, all of a process of three latents, each in a Python process of its
own that is ended when it takes too long: ``chains``, two parallel chains of NumPyro's
MCMC; ``vectorized``, two chains in one program; and ``fits``, ``ConjugateSVI.run`` in
four threads at once. XLA may compile and run them as it likes: nothing is set but the
number of devices. Printed as JSON::

    python examples/benchmarks/threads.py --runs 20
"""

from __future__ import annotations

import argparse
import json
import os
import subprocess
import sys
import time

ROWS, INDUCING, LATENTS, THREADS = 300, 20, 3, 4
FLAGS = "--xla_force_host_platform_device_count=2"


def problem(seed: int):
    """The model, its data and the inducing inputs."""
    import numpy as np
    import numpyro
    import numpyro.distributions as dist

    import numpyro_gpaug as gpaug

    def model(X, y=None, *, inducing):
        kernel = gpaug.kernels.SquaredExponential(1.0, 2.0)
        gp = gpaug.GaussianProcess("f", kernel, inducing, num_latents=LATENTS)
        with numpyro.plate("data", X.shape[0]):
            d = dist.Bernoulli(logits=gp(X)).to_event(1)
            numpyro.sample("y", d, obs=y)

    rng = np.random.default_rng(seed)
    X = rng.normal(size=(ROWS, 2)).astype("float32")
    noise = rng.logistic(size=(ROWS, LATENTS))
    y = (np.sin(2 * X[:, :1]) + noise > 0).astype(int)
    return model, X, y


def chains(seed: int, method: str = "parallel") -> None:
    """Two chains, one per device if in parallel."""
    import jax
    from numpyro.infer import MCMC

    import numpyro_gpaug as gpaug

    model, X, y = problem(seed)
    kernel = gpaug.AugmentedGaussian(model)
    mcmc = MCMC(
        kernel, num_warmup=50, num_samples=50, num_chains=2,
        chain_method=method, progress_bar=False,
    )  # fmt: skip
    mcmc.run(jax.random.key(seed), X, y, inducing=X[:INDUCING])
    jax.block_until_ready(mcmc.get_samples())


def fits(seed: int) -> None:
    """The same fit in every thread, and its prediction."""
    from concurrent.futures import ThreadPoolExecutor

    import jax

    import numpyro_gpaug as gpaug

    model, X, y = problem(seed)
    svi = gpaug.ConjugateSVI(model, gpaug.AutoSparseGP(model))

    def fit(thread: int) -> None:
        key = jax.random.key(thread)
        result = svi.run(key, 100, X, y, inducing=X[:INDUCING], progress_bar=False)
        jax.block_until_ready(svi.posterior(result).predict_f(X).mean)

    with ThreadPoolExecutor(THREADS) as pool:
        list(pool.map(fit, range(THREADS)))


def vectorized(seed: int) -> None:
    """Two chains in one program."""
    chains(seed, "vectorized")


KINDS = {"chains": chains, "vectorized": vectorized, "fits": fits}


def ends(kind: str, seed: int, limit: float) -> bool:
    """Whether a process that does this ends in time.

    :raises RuntimeError: if it ends with an error.
    """
    flags = f"{os.environ.get('XLA_FLAGS', '')} {FLAGS}"
    command = [sys.executable, __file__, "--one", kind, "--seed", str(seed)]
    try:
        done = subprocess.run(
            command, env={**os.environ, "XLA_FLAGS": flags}, timeout=limit,
            capture_output=True, text=True, check=False,
        )  # fmt: skip
    except subprocess.TimeoutExpired:
        return False
    if done.returncode:
        raise RuntimeError(done.stderr)
    return True


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.split("\n")[0])
    parser.add_argument("--runs", type=int, default=20, help="of each kind")
    parser.add_argument("--kinds", nargs="+", choices=KINDS, default=list(KINDS))
    parser.add_argument("--limit", type=float, default=180, help="seconds of a run")
    parser.add_argument("--one", choices=KINDS, help=argparse.SUPPRESS)
    parser.add_argument("--seed", type=int, default=0, help=argparse.SUPPRESS)
    options = parser.parse_args()
    if options.one:
        KINDS[options.one](options.seed)
        return
    report = {}
    for kind in options.kinds:
        start = time.perf_counter()
        ended = [ends(kind, seed, options.limit) for seed in range(options.runs)]
        report[kind] = {
            "runs": options.runs,
            "hangs": ended.count(False),
            "seconds_per_run": round((time.perf_counter() - start) / options.runs, 1),
        }
        print(f"{kind}: {report[kind]}", file=sys.stderr, flush=True)
    print(json.dumps(report, indent=1))


if __name__ == "__main__":
    main()
