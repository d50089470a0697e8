# SPDX-License-Identifier: Apache-2.0
r"""How hyperparameters mix: with the latents integrated out, given them, or jointly.

A full-process classifier on the first rows of a real table; its lengthscale and
variance have priors and are sampled with the function values, all on the same
posterior. ``collapsed`` is ``CollapsedGaussian``: hyperparameters move with the latents
integrated out given the auxiliaries. ``augmented`` and ``elliptical`` are blocks of
NumPyro's ``Gibbs`` (``AugmentedGaussian``, ``EllipticalSlice``), with NUTS on the
hyperparameters given the latents; ``nuts`` is NUTS on everything, the latents whitened.
One process each, one thread, float32::

    python examples/benchmarks/mcmc_hyper.py --json results.json

Effective sample sizes are ArviZ's bulk ones, of the worst hyperparameter (``hyper``)
and of the worst function value (``f``). ``cold`` counts all it takes to get ``--draws``
draws after imports, ``warm`` the sampling alone; seconds are of the processor.
"""

from __future__ import annotations

import argparse
import json
from pathlib import Path
from typing import Any

import numpy as np
from common import load_data, print_table, write_report
from mcmc import spawn, with_numpyro, worst_size

SAMPLERS = ("collapsed", "augmented", "elliptical", "nuts")
COLUMNS = {
    "sampler": "",
    "hyper_per_draw": ".3f",
    "f_per_draw": ".3f",
    "ms_per_draw": ".2f",
    "hyper_warm": ".1f",
    "f_warm": ".1f",
    "hyper_cold": ".1f",
    "cold_seconds": ".0f",
    "lengthscale": ".2f",
    "variance": ".2f",
    "shift": ".2f",
}


def model(X: Any, y: Any = None) -> None:
    import numpyro
    import numpyro.distributions as dist

    import numpyro_gpaug as gpaug

    lengthscale = numpyro.sample("lengthscale", dist.LogNormal(np.log(4.0), 0.5))
    variance = numpyro.sample("variance", dist.LogNormal(1.0, 0.7))
    kernel = gpaug.kernels.SquaredExponential(lengthscale, variance)
    gp = gpaug.GaussianProcess("f", kernel, inducing=X)
    with numpyro.plate("data", X.shape[0]):
        numpyro.sample("y", dist.Bernoulli(logits=gp(X)), obs=y)


def kernel_of(sampler: str) -> Any:
    """A NumPyro kernel for all of the model."""
    from numpyro.infer import NUTS
    from numpyro.infer.gibbs import Gibbs

    import numpyro_gpaug as gpaug

    if sampler == "nuts":
        return NUTS(model)
    if sampler == "collapsed":
        return gpaug.CollapsedGaussian(model)
    if sampler == "augmented":
        latents = gpaug.AugmentedGaussian(model)
    else:
        latents = gpaug.EllipticalSlice(model)
    return Gibbs([(latents, ["f.v"]), (NUTS(model), None)])


def worker(sampler: str, table: str, args: argparse.Namespace) -> None:
    """Measure one sampler, and print JSON."""
    import jax.numpy as jnp

    X, y = load_data(table)
    X = (X - X.mean(0)) / X.std(0)
    data = jnp.asarray(X[: args.rows], jnp.float32), jnp.asarray(y[: args.rows])

    def build() -> tuple[Any, tuple[Any, ...]]:
        return kernel_of(sampler), data

    names = "lengthscale", "variance", "f"
    found, seconds, cold = with_numpyro(build, names, args.warmup, args.draws)

    hyper = np.stack([np.log(found[name]) for name in names[:2]], -1)
    sizes = {"hyper": worst_size(hyper), "f": worst_size(found["f"])}
    row: dict[str, Any] = {"sampler": sampler, "rows": len(data[0])}
    row |= {f"{k}_per_draw": size / args.draws for k, size in sizes.items()}
    row |= {f"{k}_warm": size / args.draws / seconds for k, size in sizes.items()}
    row |= {"ms_per_draw": 1e3 * seconds, "cold_seconds": cold}
    row |= {"hyper_cold": sizes["hyper"] / cold, "hyper_size": sizes["hyper"]}
    row |= {name: float(found[name].mean()) for name in names[:2]}
    row |= {"mean": hyper.mean(0).tolist(), "sd": hyper.std(0).tolist()}
    print(json.dumps(row))


def main() -> None:
    """Run the benchmark."""
    parser = argparse.ArgumentParser(description=__doc__.split("\n")[0])
    parser.add_argument("--table", default="breast_cancer")
    parser.add_argument("--rows", type=int, default=200, help="the first so many")
    parser.add_argument("--samplers", default=[*SAMPLERS], type=lambda t: t.split(","))
    parser.add_argument("--draws", type=int, default=2000)
    parser.add_argument("--warmup", type=int, default=500)
    parser.add_argument("--json", type=Path, help="write every figure here")
    parser.add_argument("--worker", help=argparse.SUPPRESS)
    args = parser.parse_args()
    if args.worker:
        worker(args.worker, args.table, args)
        return
    given = ["--table", args.table, "--rows", str(args.rows)]
    given += ["--draws", str(args.draws), "--warmup", str(args.warmup)]
    rows: list[dict[str, Any]] = []
    for sampler in args.samplers:
        row = spawn(__file__, ["--worker", sampler, *given])
        rows.append(row)
        # All sample one posterior: the worst difference of a mean (of the log of a
        # hyperparameter) from the first sampler's, in units of its Monte Carlo error.
        error = np.divide(row["sd"], np.sqrt(row["hyper_size"]))
        first = np.divide(rows[0]["sd"], np.sqrt(rows[0]["hyper_size"]))
        apart = np.subtract(row["mean"], rows[0]["mean"])
        row["shift"] = float(np.abs(apart / np.hypot(error, first)).max())
        print_table([row], COLUMNS)
    print(f"\n{args.table}, {rows[0]['rows']} rows")
    print_table(rows, COLUMNS)
    write_report(args.json, rows)


if __name__ == "__main__":
    main()
