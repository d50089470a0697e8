# SPDX-License-Identifier: Apache-2.0
"""Crossed effects where both sides are large: GPBoost, and the exact form, beside us.

``normal`` and ``binary``: simulated data of as many levels on both sides, and fifty
rows for each level, with an intercept and both standard deviations learnt
(``ConjugateSVI``), and by GPBoost's iterative methods on the same data, one after the
other in one run. ``ratio`` divides our processor seconds, with compilation (``cold``)
and without (``warm``), by GPBoost's. ``error`` is the largest distance of standard
deviations from those that simulated, and ``noise`` the standard error of the bound, in
nats.
``exact``: at fewer levels, the form that factorises beside the other; ``sds`` is the
largest relative difference of the posterior standard deviations of effects, and
``bounds`` the difference of the bounds::

    python examples/benchmarks/crossed.py --json crossed.json --gpboost /path/to/python

Every fit is a process of its own. ``MiB`` is the peak of the process. GPBoost is left
out without an interpreter that has it. Rows of other cases that the JSON file has
already are kept.
"""

from __future__ import annotations

import argparse
import json
import os
import subprocess
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import jax
import numpy as np
import numpyro
import numpyro.distributions as dist
from common import (
    case_in_process,
    peak_memory,
    print_table,
    rows_of_cases,
    write_rows,
)

import numpyro_gpaug as gpaug
from numpyro_gpaug.model.costs import Purpose

HERE = Path(__file__).resolve()
KEY = jax.random.key(0)
COLUMNS = {
    "case": "", "levels": "d", "rows": "d", "steps": "d", "cold": ".1f", "warm": ".1f",
    "GPBoost": ".1f", "ratio cold": ".2f", "ratio warm": ".2f", "wall": ".0f",
    "MiB": ".0f", "MiB of GPBoost": ".0f", "error": ".4f", "error of GPBoost": ".4f",
    "noise": ".4f", "sds": ".1e", "bounds": ".4f", "load": ".1f",
}  # fmt: skip
SDS, INTERCEPT, NOISE = np.array([1.0, 0.7]), 0.5, 0.8
# The same by GPBoost, in an interpreter that has it.
PEER = """
import json, sys, time
import gpboost, numpy as np
with np.load(sys.argv[1]) as file:
    codes, y = file["codes"], file["y"].astype(float)
start = time.process_time(), time.time()
status = lambda: dict(line.split(":", 1) for line in open("/proc/self/status"))
model = gpboost.GPModel(
    group_data=codes, likelihood=sys.argv[2], matrix_inversion_method="iterative"
)
model.fit(y=y, X=np.ones((len(y), 1)))
print(json.dumps({
    "seconds": time.process_time() - start[0], "wall": time.time() - start[1],
    "variances": np.asarray(model.get_cov_pars()).ravel().tolist()[-2:],
    "MiB": int(status()["VmHWM"].split()[0]) / 1024,
}))
"""


def ratings(codes: Any, y: Any = None, *, levels: int, normal: bool) -> None:
    """Two crossed effects."""
    sd = numpyro.sample("sd", dist.HalfNormal(2).expand([2]).to_event(1))
    intercept = numpyro.sample("intercept", dist.Normal(0, 10))
    with numpyro.plate("ones", levels):
        u = numpyro.sample("u", dist.Normal(0, sd[0]))
    with numpyro.plate("twos", levels):
        v = numpyro.sample("v", dist.Normal(0, sd[1]))
    eta = intercept + u[codes[:, 0]] + v[codes[:, 1]]
    if normal:
        likelihood: Any = dist.Normal(eta, numpyro.sample("sigma", dist.HalfNormal(2)))
    else:
        likelihood = dist.Bernoulli(logits=eta)
    with numpyro.plate("data", len(codes)):
        numpyro.sample("y", likelihood, obs=y)


def simulated(levels: int, normal: bool) -> tuple[np.ndarray, np.ndarray]:
    rng = np.random.default_rng(0)
    codes = rng.integers(0, levels, (50 * levels, 2))
    effects = SDS[:, None] * rng.normal(size=(2, levels))
    eta = INTERCEPT + effects[0][codes[:, 0]] + effects[1][codes[:, 1]]
    if normal:
        return codes, (eta + NOISE * rng.normal(size=len(eta))).astype(np.float32)
    return codes, (rng.uniform(size=len(eta)) < 1 / (1 + np.exp(-eta))).astype(np.int32)


def fitted(levels: int, normal: bool, repeats: int = 2) -> tuple[Any, Any, Any]:
    """An inference, its result, and its seconds."""
    codes, y = simulated(levels, normal)
    svi = gpaug.ConjugateSVI(ratings, gpaug.AutoLatentGaussian(ratings))
    found: dict[str, Any] = {"levels": levels, "rows": len(y)}
    for name in ("cold", "warm")[:repeats]:
        start = time.process_time(), time.time()
        result = svi.run(
            KEY, 100, codes, y, levels=levels, normal=normal, progress_bar=False
        )
        jax.block_until_ready(result.params)
        found[name] = time.process_time() - start[0]
        found.setdefault("wall", time.time() - start[1])
    found["MiB"] = peak_memory()
    found["steps"] = len(result.losses)
    return svi, result, found


def by_gpboost(levels: int, normal: bool) -> dict[str, Any]:
    """A fit by GPBoost in its own process; nothing without an interpreter."""
    python = os.environ.get("GPAUG_GPBOOST")
    if python is None:
        return {}
    path = Path(os.environ.get("TMPDIR", "/tmp")) / f"crossed-{os.getpid()}.npz"
    codes, y = simulated(levels, normal)
    np.savez(path, codes=codes, y=y)
    kind = "gaussian" if normal else "bernoulli_logit"
    try:
        done = subprocess.run(
            [python, "-c", PEER, str(path), kind],
            capture_output=True, text=True, check=True,
        )  # fmt: skip
    finally:
        path.unlink()
    told = json.loads(done.stdout.strip().splitlines()[-1])
    error = np.abs(np.sqrt(told["variances"]) - SDS).max()
    return {
        "GPBoost": told["seconds"], "wall of GPBoost": told["wall"],
        "MiB of GPBoost": told["MiB"], "error of GPBoost": float(error),
    }  # fmt: skip


def beside(levels: int, normal: bool) -> dict[str, Any]:
    """A fit of both."""
    svi, result, found = fitted(levels, normal)
    sds = np.asarray(result.params["sd_auto_loc"])
    found["error"] = float(np.abs(sds - SDS).max())
    own = svi.guide.split_params(result.params)[1]
    noise = jax.jit(lambda own: svi.guide.moments(own)["latents"].noise)
    found["noise"] = float(noise(own)[0])
    found |= by_gpboost(levels, normal)
    if "GPBoost" in found:
        found |= {f"ratio {k}": found[k] / found["GPBoost"] for k in ("cold", "warm")}
    return found


def exactly(levels: int) -> dict[str, Any]:
    """Both forms on the same binary data."""
    found, tables, bounds = {}, [], []
    for largest in (5000, levels // 2):
        gpaug.AutoLatentGaussian._purpose = Purpose(largest=largest)
        svi, result, found = fitted(levels, False, 1)
        tables.append(svi.posterior(result).summary())
        bounds.append(result.losses[-1])
    effects = [x["sd"].filter(like="[").dropna().to_numpy(float) for x in tables]
    found["sds"] = float(np.abs(effects[1] / effects[0] - 1).max())
    return found | {"bounds": float(bounds[1] - bounds[0])}


CASES: dict[str, tuple[Callable[[int], dict[str, Any]], int]] = {
    "normal": (lambda levels: beside(levels, True), 20_000),
    "binary": (lambda levels: beside(levels, False), 20_000),
    "exact": (exactly, 1000),
}
QUICK = 200


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--cases", nargs="+", default=[*CASES], choices=[*CASES])
    parser.add_argument("--levels", type=int, help="on each side, instead of 20,000")
    parser.add_argument("--quick", action="store_true", help="tiny sizes")
    parser.add_argument("--gpboost", help="an interpreter that has GPBoost")
    parser.add_argument("--json", type=Path)
    parser.add_argument("--child", help=argparse.SUPPRESS)
    parser.add_argument("--size", type=int, help=argparse.SUPPRESS)
    args = parser.parse_args()
    if args.child:
        if args.size <= QUICK:
            gpaug.AutoLatentGaussian._purpose = Purpose(largest=args.size // 2)
        print(json.dumps(CASES[args.child][0](args.size)))
        return
    if args.gpboost:
        os.environ["GPAUG_GPBOOST"] = args.gpboost
    known = rows_of_cases(args.json)
    for case in args.cases:
        size = QUICK if args.quick else args.levels or CASES[case][1]
        row = case_in_process(HERE, case, size, "float32")
        print_table([row], COLUMNS)
        known[case, "float32"] = row
        write_rows(args.json, known)


if __name__ == "__main__":
    main()
