# SPDX-License-Identifier: Apache-2.0
"""Processes of time as chains of states: the quasiseparable solver of tinygp, and
dense matrices, beside them; work by the number of times; counts.

``equality``: the collapsed bound of Normal data at irregular times, some of them equal,
and its gradient, beside the evidence by tinygp and by a dense matrix in float64, all
relative to the largest; the largest errors of the mean and variance at other times are
relative to the prior's scale. ``time``: processor seconds of the bound and its gradient
at 10^4 to 10^6 times, and of tinygp's evidence and gradient in the same process;
``exponent`` is the slope of their logarithms. ``counts``: Poisson counts with a Matern
5/2 process, a weekly wave, a day of the week and two covariates, hyperparameters learnt
(``ConjugateSVI``, ``prediction``: the first of all predictors) and integrated
(``NestedVI``, 64 points)::

    python examples/benchmarks/markov.py --json markov.json

Every case is a process of its own. Seconds are processor seconds: ``cold`` counts
everything after imports, ``warm`` is a second run of the same shapes. ``MiB`` is the
peak of the process. Rows of other cases that the JSON file has already are kept.
"""

from __future__ import annotations

import argparse
import json
import os
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

# One thread, since processor times are compared; set before jax starts.
os.environ.setdefault("XLA_FLAGS", "--xla_cpu_multi_thread_eigen=false")
os.environ.setdefault("OPENBLAS_NUM_THREADS", "1")

import jax
import jax.numpy as jnp
import numpy as np
import numpyro
import numpyro.distributions as dist
import tinygp
from common import (
    case_in_process,
    peak_memory,
    print_table,
    rows_of_cases,
    write_rows,
)
from numpyro.infer.util import log_density
from tinygp.kernels import quasisep

import numpyro_gpaug as gpaug
from numpyro_gpaug import kernels

HERE = Path(__file__).resolve()
KEY = jax.random.key(0)
COLUMNS = {
    "case": "", "dtype": "", "times": "d", "cold": ".1f", "warm": ".1f",
    "prediction": ".1f", "evaluation": ".3f", "tinygp": ".3f", "exponent": ".2f",
    "bound": ".0e", "slope": ".0e", "mean": ".0e", "variance": ".0e", "MiB": ".0f",
    "khat": ".2f", "certified": "", "error": ".3f", "load": ".1f",
}  # fmt: skip
# Lengthscale and variance of a smooth part, lengthscale and period of a damped wave,
# and the noise.
POINT = {"smooth": [3.0, 1.5], "wave": [20.0, 7.0], "noise": 0.3}


def series(t: Any, y: Any = None) -> None:
    smooth = numpyro.sample("smooth", dist.LogNormal(0, 2).expand([2]))
    wave = numpyro.sample("wave", dist.LogNormal(0, 3).expand([2]))
    noise = numpyro.sample("noise", dist.LogNormal(0, 1))
    f = gpaug.GaussianProcess("f", kernel_of(smooth, wave), markov=True)(t)
    with numpyro.plate("data", len(t)):
        numpyro.sample("y", dist.Normal(f, noise), obs=y)


def kernel_of(smooth: Any, wave: Any) -> Any:
    rough = kernels.Matern12(wave[0]) * kernels.Cosine(wave[1])
    return kernels.Matern52(smooth[0], smooth[1]) + rough


def by_tinygp(point: Any, t: Any, y: Any) -> Any:
    """The evidence of times in order."""
    smooth, wave = point["smooth"], point["wave"]
    rough = quasisep.Exp(wave[0]) * quasisep.Cosine(wave[1])
    kernel = smooth[1] * quasisep.Matern52(smooth[0]) + rough
    return tinygp.GaussianProcess(kernel, t, diag=point["noise"] ** 2)


def data_of(size: int) -> tuple[np.ndarray, np.ndarray]:
    """Irregular times, one in ten of them repeated, at two per unit."""
    rng = np.random.default_rng(0)
    t = np.sort(rng.uniform(0, size / 2, size)).astype(np.float32)
    t[::10] = t[1::10]
    y = np.sin(t / 3) + np.cos(2 * np.pi * t / 7) + 0.3 * rng.normal(size=size)
    return tuple(np.asarray(jnp.asarray(x, float)) for x in (t, y.astype(np.float32)))


def bound_of(t: Any, y: Any) -> Callable[[Any], Any]:
    collapsed = gpaug.collapse(series)

    def bound(point: Any) -> Any:
        _, trace = log_density(collapsed, (t, y), {}, point)
        return trace["collapsed_bound"]["fn"].log_factor

    # The bound is compiled inside, where data are arguments. As constants of another
    # program they would be sorted when that is compiled.
    return jax.value_and_grad(bound)


def equality(size: int) -> dict[str, Any]:
    """Differences from tinygp and from a dense matrix; see the module's docstring."""
    t, y = data_of(size)
    order = np.random.default_rng(1).permutation(size)
    point = jax.tree.map(jnp.asarray, POINT, is_leaf=lambda x: isinstance(x, list))
    new = np.linspace(-5, t.max() + 10, 500).astype(np.float32).astype(t.dtype)
    value, slope = bound_of(jnp.asarray(t[order]), jnp.asarray(y[order]))(point)
    guide = gpaug.AutoLatentGaussian(fixed)
    svi = gpaug.ConjugateSVI(fixed, guide)
    result = svi.run(KEY, 3, t[order], y[order], progress_bar=False)
    f = svi.posterior(result).predict_f(new, site="f")
    with jax.enable_x64(True):
        exact = jax.tree.map(lambda x: jnp.asarray(x, float), POINT)
        exact = {k: jnp.asarray(x, float) for k, x in POINT.items()}
        given = jnp.asarray(t, float), jnp.asarray(y, float)
        evidence = jax.jit(jax.value_and_grad(
            lambda point: by_tinygp(point, *given).log_probability(given[1])
        ))  # fmt: skip
        expected, slopes = evidence(exact)
        kernel = kernel_of(exact["smooth"], exact["wave"])
        both = jnp.concatenate([given[0], jnp.asarray(new, float)])
        whole = np.asarray(kernel(both, both))
    noisy = whole[:size, :size] + POINT["noise"] ** 2 * np.eye(size)
    gain = np.linalg.solve(noisy, whole[:size, size:]).T
    spread = np.diag(whole)[size:] - (gain * whole[size:, :size]).sum(-1)
    half = np.linalg.slogdet(2 * np.pi * noisy)[1]
    dense = -0.5 * (y @ np.linalg.solve(noisy, y.astype(float)) + half)
    largest = max(np.abs(x).max() for x in slopes.values())
    worst = max(np.abs(slope[k] - x).max() for k, x in slopes.items())
    return {
        "times": size, "bound": float(abs(value - expected) / abs(expected)),
        "dense": float(abs(value - dense) / abs(dense)),
        "slope": float(worst / largest),
        "mean": float(np.abs(f.mean - gain @ y).max() / np.sqrt(whole[0, 0])),
        "variance": float(np.abs(f.variance - spread).max() / whole[0, 0]),
    }  # fmt: skip


def fixed(t: Any, y: Any = None) -> None:
    """The series with known hyperparameters."""
    known = {k: jnp.asarray(x) for k, x in POINT.items()}
    with numpyro.handlers.block(hide=list(known)):
        numpyro.handlers.substitute(series, data=known)(t, y)


def seconds(run: Callable[[], Any]) -> float:
    start = time.process_time()
    jax.block_until_ready(run())
    return time.process_time() - start


def by_time(size: int) -> dict[str, Any]:
    """Measure the seconds of an evaluation at growing numbers of times."""
    point = {k: jnp.asarray(x) for k, x in POINT.items()}
    sizes = [size // 100, size // 10, size]
    ours, theirs, chosen = [], [], {}
    evidence = jax.jit(jax.value_and_grad(
        lambda point, t, y: by_tinygp(point, t, y).log_probability(y)
    ))  # fmt: skip
    for n in sizes:
        t, y = map(jnp.asarray, data_of(n))
        bound = bound_of(t, y)
        jax.block_until_ready(bound(point))
        ours.append(seconds(lambda bound=bound: bound(point)))
        jax.block_until_ready(evidence(point, t, y))
        theirs.append(seconds(lambda t=t, y=y: evidence(point, t, y)))
        chosen[n] = ours[-1], theirs[-1]
    logs = np.log(sizes)
    return {
        "times": size, "evaluation": ours[-1], "tinygp": theirs[-1],
        "exponent": float(np.polyfit(logs, np.log(ours), 1)[0]),
        "exponent of tinygp": float(np.polyfit(logs, np.log(theirs), 1)[0]),
        "seconds": chosen,
    }  # fmt: skip


def visits(t: Any, day: Any, X: Any, y: Any = None) -> None:
    """Counts: a smooth level, a weekly wave, days of the week, and covariates."""
    smooth = numpyro.sample("smooth", dist.LogNormal(jnp.array([3.0, -1]), 1))
    weekly = numpyro.sample("weekly", dist.HalfNormal(0.5))
    beta = numpyro.sample("beta", dist.Normal(0, 2).expand([X.shape[1]]).to_event(1))
    level = numpyro.sample("level", dist.Normal(0, 3))
    with numpyro.plate("days", 7):
        of_day = numpyro.sample("of_day", dist.Normal(0, 0.3))
    kernel = kernels.Matern52(smooth[0], smooth[1])
    f = gpaug.GaussianProcess("f", kernel + kernels.Cosine(7.0, weekly), markov=True)(t)
    eta = numpyro.deterministic("eta", level + f + of_day[day] + X @ beta)
    with numpyro.plate("data", len(t)):
        numpyro.sample("y", dist.Poisson(jnp.exp(eta)), obs=y)


def counts_of(size: int) -> tuple[tuple[np.ndarray, ...], np.ndarray]:
    """Arguments of :func:`visits`, and true predictors."""
    rng = np.random.default_rng(0)
    t = np.sort(rng.uniform(0, size / 50, size)).astype(np.float32)
    X = rng.normal(size=(size, 2)).astype(np.float32)
    eta = 0.5 + 0.6 * np.sin(t / 12) + 0.3 * np.cos(2 * np.pi * t / 7)
    eta += X @ np.array([0.3, -0.2])
    day = np.floor(t).astype(int) % 7
    return (t, day, X, rng.poisson(np.exp(eta))), eta


def learnt(size: int) -> dict[str, Any]:
    """Counts by ``ConjugateSVI``."""
    args, eta = counts_of(size)
    guide = gpaug.AutoLatentGaussian(visits)
    svi = gpaug.ConjugateSVI(visits, guide)
    found = {}
    for name in ("cold", "warm"):
        start = time.process_time()
        result = svi.run(KEY, 200, *args, progress_bar=False)
        found[name] = time.process_time() - start
    posterior = svi.posterior(result)
    start = time.process_time()
    f = posterior.predict_f(*args[:3], site="eta")
    error = np.sqrt(np.square(np.asarray(f.mean) - eta).mean())
    return found | {
        "times": size, "steps": len(result.losses), "loss": float(result.losses[-1]),
        "prediction": time.process_time() - start, "error": float(error),
    }  # fmt: skip


def integrated(size: int) -> dict[str, Any]:
    """Counts by ``NestedVI``."""
    args, _ = counts_of(size)
    nested = gpaug.NestedVI(visits, num_points=64, progress_bar=False)
    found = {}
    for name in ("cold", "warm"):
        start = time.process_time()
        nested.run(KEY, *args)
        found[name] = time.process_time() - start
    extra = nested.get_extra_fields()
    return found | {
        "times": size, "khat": float(extra["khat"]), "certified": str(nested.certified)
    }  # fmt: skip


CASES: dict[str, tuple[Callable[[int], dict[str, Any]], int, str]] = {
    "equality": (equality, 1000, "float64"),
    "equality, float32": (equality, 1000, "float32"),
    "time": (by_time, 1_000_000, "float32"),
    "counts learnt": (learnt, 100_000, "float32"),
    "counts integrated": (integrated, 100_000, "float32"),
}
QUICK = 200


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--cases", nargs="+", default=[*CASES], choices=[*CASES])
    parser.add_argument("--quick", action="store_true", help="tiny sizes")
    parser.add_argument("--json", type=Path)
    parser.add_argument("--child", help=argparse.SUPPRESS)
    parser.add_argument("--size", type=int, help=argparse.SUPPRESS)
    args = parser.parse_args()
    if args.child:
        found = CASES[args.child][0](args.size)
        print(json.dumps({"MiB": peak_memory()} | found))
        return
    known = rows_of_cases(args.json)
    for case in args.cases:
        _, size, dtype = CASES[case]
        row = case_in_process(HERE, case, QUICK if args.quick else size, dtype)
        print_table([row], COLUMNS)
        known[case, dtype] = row
        write_rows(args.json, known, "tinygp")


if __name__ == "__main__":
    main()
