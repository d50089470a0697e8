# SPDX-License-Identifier: Apache-2.0
"""Random effects of very many groups, walks and autoregressions of very many steps, by
``AutoLatentGaussian`` and ``ConjugateSVI``.

``rows``: simulated binary data with a random intercept and slope of a tenth as many
groups as rows and 20 fixed effects, at fixed hyperparameters; the slope of seconds and
of memory against rows on logarithmic scales, and that of ``bare``, a sum of the columns
of a new array of the size of the data, which costs more for a row where a cache no
longer holds it and the system has to find its pages. ``insteval``: lme4's ratings of
1128 lecturers by 2972 students, crossed, with departments, all variance components
learnt, by a Normal likelihood (beside the exact evidence by sparse factorisation,
SciPy's SuperLU) and an ordinal one. ``walk``: simulated counts along a random walk of
as many steps as rows, seen once each, with an intercept and the walk's scale learnt (it
is .01: ``error`` is the distance from it). ``series``: the same along an autoregression
in NumPyro's ``scan``, its coefficient learnt too (.95, of which ``error`` is)::

    GPAUG_DATA=/path/to/data python examples/benchmarks/groups.py --json groups.json

Every fit is a process of its own: ``cold`` counts everything after imports, ``warm`` is
the quickest of the third to ``--repeats``-th runs of the same shapes (a second one
compiles what checks data that a fitter has not seen), ``MiB`` is the peak of the
process. Seconds are the wall's or, where others use the machine, the processor's
(``--clock cpu``).
"""

from __future__ import annotations

import json
import math
import subprocess
import sys
from argparse import SUPPRESS, ArgumentParser, Namespace, RawDescriptionHelpFormatter
from collections.abc import Callable
from pathlib import Path
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import numpyro
import numpyro.distributions as dist
from common import Clock, data_folder, machine, peak_memory, print_table, versions
from numpyro.contrib.control_flow import scan
from scipy import signal

import numpyro_gpaug as gpaug

HERE = Path(__file__).resolve()
COLUMNS = {"fit": "", "rows": "d", "latents": "d", "steps": "d", "bound": ".2f"}
COLUMNS |= {"exact": ".2f", "cold": ".1f", "warm": ".3f", "bare": ".4f", "MiB": ".0f"}
COLUMNS |= {"error": ".3f"}
STUDENTS, LECTURERS, DEPARTMENTS = 2972, 1128, 14


def varying(X: Any, group: Any, groups: int, y: Any = None) -> None:
    """Intercept and slope of every group, standard deviations 1 and .5."""
    beta = numpyro.sample("beta", dist.Normal(0, 2).expand([X.shape[1]]).to_event(1))
    with numpyro.plate("groups", groups):
        a = numpyro.sample("a", dist.Normal(0, 1.0))
        b = numpyro.sample("b", dist.Normal(0, 0.5))
    with numpyro.plate("data", len(group)):
        eta = X @ beta + a[group] + b[group] * X[:, 1]
        numpyro.sample("y", dist.Bernoulli(logits=eta), obs=y)


def ratings(
    student: Any, lecturer: Any, dept: Any, service: Any, y: Any, *, ordinal: bool
) -> None:
    """Crossed effects of students and lecturers, and of departments."""
    sd = numpyro.sample("sd", dist.HalfNormal(1).expand([3]).to_event(1))
    slope = numpyro.sample("slope", dist.Normal(0, 10))
    with numpyro.plate("students", STUDENTS):
        u = numpyro.sample("u", dist.Normal(0, sd[0]))
    with numpyro.plate("lecturers", LECTURERS):
        v = numpyro.sample("v", dist.Normal(0, sd[1]))
    with numpyro.plate("departments", DEPARTMENTS):
        w = numpyro.sample("w", dist.Normal(0, sd[2]))
    eta = slope * service + u[student] + v[lecturer] + w[dept]
    if ordinal:
        loc = dist.Normal(0, 2).expand([4]).to_event(1)
        ordered = dist.transforms.OrderedTransform()
        cuts = numpyro.sample("cuts", dist.TransformedDistribution(loc, ordered))
        likelihood: Any = dist.OrderedLogistic(eta, cuts)
    else:
        intercept = numpyro.sample("intercept", dist.Normal(0, 10))
        likelihood = dist.Normal(
            intercept + eta, numpyro.sample("sigma", dist.HalfNormal(2))
        )
    with numpyro.plate("data", len(student)):
        numpyro.sample("y", likelihood, obs=y)


def walking(step: Any, steps: int, y: Any = None) -> None:
    """Counts along a random walk."""
    scale = numpyro.sample("scale", dist.HalfNormal(0.1))
    level = numpyro.sample("level", dist.Normal(0, 2.0))
    walk = numpyro.sample("walk", dist.GaussianRandomWalk(scale, steps))
    with numpyro.plate("data", len(step)):
        numpyro.sample("y", dist.Poisson(jnp.exp(level + walk[step])), obs=y)


def returning(step: Any, steps: int, y: Any = None) -> None:
    """Counts along an autoregression."""
    phi = numpyro.sample("phi", dist.Uniform(-1, 1))
    scale = numpyro.sample("scale", dist.HalfNormal(1))
    level = numpyro.sample("level", dist.Normal(0, 2.0))

    def follow(x: Any, t: Any) -> tuple[Any, Any]:
        spread = jnp.where(t == 0, scale / jnp.sqrt(1 - phi**2), scale)
        x = numpyro.sample("x", dist.Normal(phi * x, spread))
        return x, x

    _, x = scan(follow, 0.0, jnp.arange(steps))
    with numpyro.plate("data", len(step)):
        numpyro.sample("y", dist.Poisson(jnp.exp(level + x[step])), obs=y)


def simulated(rows: int) -> tuple[Any, ...]:
    rng = np.random.default_rng(0)
    groups = rows // 10
    X = rng.normal(size=(rows, 20)).astype(np.float32)
    X[:, 0] = 1
    group, beta = rng.integers(0, groups, rows), 0.5 * rng.normal(size=20)
    a, b = rng.normal(size=groups), 0.5 * rng.normal(size=groups)
    eta = X @ beta + a[group] + b[group] * X[:, 1]
    y = (rng.uniform(size=rows) < 1 / (1 + np.exp(-eta))).astype(np.int32)
    return X, group, groups, y, beta


def insteval() -> dict[str, np.ndarray]:
    folder = data_folder()
    assert folder is not None, "set GPAUG_DATA to the folder of lgm_insteval.npz"
    with np.load(folder / "lgm_insteval.npz") as file:
        return {k: file[k].astype(np.int32) for k in file}


def seconds(function: Callable[[], Any], how: Namespace) -> list[float]:
    """Return the seconds of every repeat."""
    clock = Clock(how.clock, 0.0)
    return [clock.time(function) for _ in range(max(how.repeats, 3))]


def timed(
    svi: Any, steps: int, args: Any, how: Namespace, tol: float | None, **kwargs: Any
) -> tuple[Any, dict[str, float]]:
    """The result of a fit and its seconds."""
    results = []

    def fit() -> None:
        key = jax.random.key(0)
        found = svi.run(key, steps, *args, progress_bar=False, tol=tol, **kwargs)
        results[:] = [found]

    cold, _, *warm = seconds(fit, how)
    return results[0], {"cold": cold, "warm": min(warm)}


def bare(X: np.ndarray, how: Namespace) -> float:
    """Measure the seconds that a new array of the size of the data takes, with the sums
    of its columns.
    """
    moved = jax.jit(lambda X, by: X + by)
    sums = jax.jit(lambda X: X.sum(0))
    array = jnp.asarray(X)
    return min(seconds(lambda: sums(moved(array, 1.0)).block_until_ready(), how)[2:])


def fit_rows(rows: int, how: Namespace) -> dict[str, Any]:
    """One size of the simulated data; ``error`` is the root mean square of fixed
    effects."""
    X, group, groups, y, beta = simulated(rows)
    guide = gpaug.AutoLatentGaussian(varying)
    svi = gpaug.ConjugateSVI(varying, guide, optim=None)
    given = X, group, groups, y
    result, taken = timed(svi, 50, given, how, 1e-6 * rows)
    off = np.asarray(svi.posterior(result)["beta"].mean) - beta
    return {
        "fit": "rows", "rows": rows, "latents": 2 * groups + 20,
        "steps": len(result.losses), "bound": -float(result.losses[-1]),
        **taken, "bare": bare(X, how), "error": float(np.sqrt(np.mean(off**2))),
    }  # fmt: skip


def fit_walk(rows: int, how: Namespace) -> dict[str, Any]:
    """One length of the walk."""
    x = np.cumsum(0.01 * np.random.default_rng(0).normal(size=rows))
    return fit_steps("walk", walking, x, ("scale", 0.01), how)


def fit_series(rows: int, how: Namespace) -> dict[str, Any]:
    """One length of the autoregression."""
    noise = 0.2 * np.random.default_rng(0).normal(size=rows)
    noise[0] /= math.sqrt(1 - 0.95**2)
    x = signal.lfilter([1.0], [1.0, -0.95], noise)
    return fit_steps("series", returning, x, ("phi", 0.95), how)


def fit_steps(
    name: str,
    model: Callable[..., Any],
    x: np.ndarray,
    truth: tuple[str, float],
    how: Namespace,
) -> dict[str, Any]:
    """Counts of the rates ``exp(1 + x)``; ``error`` is of a hyperparameter."""
    rows, rng = len(x), np.random.default_rng(1)
    y = rng.poisson(np.exp(1 + x)).astype(np.int32)
    svi = gpaug.ConjugateSVI(model, gpaug.AutoLatentGaussian(model))
    given = np.arange(rows), rows, y
    result, taken = timed(svi, 100, given, how, None)
    found = float(result.params[f"{truth[0]}_auto_loc"])
    return {
        "fit": name, "rows": rows, "latents": rows + 1,
        "steps": len(result.losses), "bound": -float(result.losses[-1]),
        **taken, "error": abs(found - truth[1]), "hyper": found,
    }  # fmt: skip


def fit_ratings(kind: str, how: Namespace) -> dict[str, Any]:
    """InstEval, hyperparameters learnt."""
    data = insteval()
    ordinal = kind == "ordinal"
    guide = gpaug.AutoLatentGaussian(ratings)
    svi = gpaug.ConjugateSVI(ratings, guide)
    args = [data[k] for k in ("s", "d", "dept", "service")]
    y = data["y"] - 1 if ordinal else data["y"].astype(float)
    result, taken = timed(svi, 80, (*args, y), how, None, ordinal=ordinal)
    found = {k[:-9]: x for k, x in result.params.items() if k.endswith("_auto_loc")}
    out = {
        "fit": f"insteval {kind}", "rows": len(y), "latents": guide.structure.size,
        "steps": len(result.losses), "bound": -float(result.losses[-1]),
        **taken,
        "hyper": {k: np.asarray(x).tolist() for k, x in found.items()},
    }  # fmt: skip
    if not ordinal:
        hyper = (np.asarray(found[k], float) for k in ("sd", "sigma"))
        out["exact"] = exact(data, *hyper)
    return out


def exact(data: dict[str, np.ndarray], sd: np.ndarray, sigma: np.ndarray) -> float:
    """The log marginal likelihood plus the log priors of the hyperparameters, in
    float64, by a sparse LU factorisation of the posterior precision."""
    from scipy import sparse, stats
    from scipy.sparse.linalg import splu

    rows = len(data["y"])
    sizes = STUDENTS, LECTURERS, DEPARTMENTS
    parts: list[Any] = [
        sparse.csr_matrix((np.full(rows, s), (np.arange(rows), data[k])), (rows, n))
        for k, s, n in zip(("s", "d", "dept"), sd, sizes, strict=True)
    ]
    fixed = 10 * np.stack([np.ones(rows), data["service"]], 1)
    Z = sparse.hstack([*parts, sparse.csr_matrix(fixed)]).tocsc()
    precision = (sparse.eye(Z.shape[1]) + Z.T @ Z / sigma**2).tocsc()
    factor = splu(
        precision, permc_spec="MMD_AT_PLUS_A", options={"SymmetricMode": True}
    )
    log_det = np.log(np.abs(factor.U.diagonal())).sum()
    y = data["y"].astype(float)
    projected = Z.T @ y / sigma**2
    quadratic = y @ y / sigma**2 - projected @ factor.solve(projected)
    normal = rows * math.log(2 * math.pi * sigma**2)
    prior = stats.halfnorm.logpdf(sd).sum() + stats.halfnorm.logpdf(sigma, scale=2)
    return float(-0.5 * (normal + log_det + quadratic) + prior)


def child(kind: str, rows: int, how: Namespace) -> dict[str, Any]:
    """A fit in another process."""
    argv = [sys.executable, str(HERE), "--child", kind, "--rows", str(rows)]
    argv += ["--clock", how.clock, "--repeats", str(how.repeats)]
    argv += ["--float64"] * how.float64
    done = subprocess.run(argv, capture_output=True, text=True, check=False)
    if done.returncode:
        return {"fit": kind, "failed": done.stderr.strip().splitlines()[-1]}
    return json.loads(done.stdout.strip().splitlines()[-1])


def log_slopes(table: list[dict[str, Any]], kind: str) -> dict[str, float]:
    """Return the slopes of seconds and memory against rows, on logarithmic scales."""
    sized = [row for row in table if row["fit"] == kind and "warm" in row]
    if len(sized) < 2:
        return {}
    size = np.log([row["rows"] for row in sized])
    return {
        what: float(np.polyfit(size, np.log([row[what] for row in sized]), 1)[0])
        for what in ("warm", "bare", "MiB")
        if what in sized[0]
    }


def main() -> None:
    """Run the benchmark."""
    parser = ArgumentParser(
        description=__doc__, formatter_class=RawDescriptionHelpFormatter
    )
    sizes = [10_000, 100_000, 1_000_000]
    parser.add_argument("--rows", type=int, nargs="*", default=sizes)
    parser.add_argument("--steps", type=int, nargs="*", default=[1000, 10_000, 100_000])
    parser.add_argument("--ratings", nargs="*", default=["normal", "ordinal"])
    parser.add_argument("--float64", action="store_true")
    parser.add_argument("--clock", choices=("wall", "cpu"), default="wall")
    parser.add_argument("--repeats", type=int, default=5)
    parser.add_argument("--child", help=SUPPRESS)
    parser.add_argument("--json")
    args = parser.parse_args()
    if args.child:
        jax.config.update("jax_enable_x64", args.float64)
        kinds = {"rows": fit_rows, "walk": fit_walk, "series": fit_series}
        sized = kinds.get(args.child)
        found = sized(args.rows[0], args) if sized else fit_ratings(args.child, args)
        print(json.dumps(found | {"MiB": peak_memory()}))
        return
    table = [child("rows", rows, args) for rows in args.rows]
    for kind in ("walk", "series"):
        table += [child(kind, steps, args) for steps in args.steps]
    if data_folder() is not None:
        table += [child(kind, 0, args) for kind in args.ratings]
    print_table(table, COLUMNS)
    slopes = {kind: log_slopes(table, kind) for kind in ("rows", "walk", "series")}
    print("slopes on logarithmic scales:", slopes)
    if args.json:
        report = {"rows": table, "slopes": slopes, "machine": machine()}
        report["clock"] = args.clock
        report["versions"] = versions("jax", "numpyro", "scipy", "numpyro-gpaug")
        Path(args.json).write_text(json.dumps(report, indent=2))


if __name__ == "__main__":
    main()
