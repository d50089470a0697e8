# SPDX-License-Identifier: Apache-2.0
"""Hyperparameters integrated: ``NestedVI`` beside NUTS on the model and NUTS on the
collapsed model.

``worth`` is the smallest number of effective draws over all latents and
hyperparameters. ``to 1000`` is the time until it is 1000, with compilation and without
imports. ``cold`` is a first run. ``warm`` is a second run of ours, and NUTS's draws
alone: its compilation and warm-up (as many steps as draws) are paid once. If our first
run takes more than 100 seconds, it also counts as the second. ``times`` is NUTS's time
over ours. One run of ``--points`` 1200 is usually worth 1000 draws; of 512 points, the
default of ``NestedVI``, it takes two runs or more. Garbage of the imports is collected
before either.

NUTS is ``stopped`` at the first reading of the clock after ``--limit`` seconds (600).
While it draws, ``to 1000`` is extrapolated from the draws so far. In its warm-up that
is not known: ``to 1000`` is then the time spent, and ``times`` a lower bound. ``pace``
is not a bound: it is the time that 1000 steps of all chains would take at the pace so
far, which may change once the step size is adapted.

``mean``, ``5%``, ``50%`` and ``95%`` are the largest differences over all latents and
hyperparameters, in standard deviations; ``sd`` is the largest relative difference of
standard deviations. The reference is posteriordb's draws where there are any
(``gp_pois_regr``, ``eight_schools``), otherwise NUTS's, whose Monte Carlo error of the
same entry follows in brackets. The standard deviation of a heavy tail is mostly noise;
its quantiles are not. ``apart`` is the largest difference of quantiles over the Monte
Carlo error of both runs together: among hundreds of entries some differ by three. NUTS
runs on the whitened model, four chains at once. On the collapsed model it draws only
the hyperparameters, with the density of the bound. ``--draws 0`` omits NUTS. PyMC's
NUTS runs on ``cbpp`` if ``--pymc`` names an interpreter that has it. ``exact`` is the
evidence by quadrature (``quadrature.py``)::

    GPAUG_DATA=/path/to/data python examples/benchmarks/nested.py --json nested.json

Rows of other data that the JSON file has already are kept.
Data are those of ``latent.py`` and ``mixed.py``, and logistic regression by a Gaussian
process on the first N rows of scikit-learn's breast cancer data, of more than its 569
on those of ``ratsch_waveform``; ``gp_student_t`` and ``sparse_ard5000`` (a sparse
process, 100 inducing inputs, eight lengthscales) are simulated. In double precision
unless ``--float32``. Seconds are of one process: of the processor, or with ``--clock
wall`` of the clock. LAPACK has one thread: of small matrices more of them spend theirs
waiting.
"""

from __future__ import annotations

import argparse
import gc
import json
import math
import subprocess
import tempfile
import time
from functools import partial
from pathlib import Path
from typing import Any

import jax
import jax.numpy as jnp
import mixed
import numpy as np
import numpyro
import numpyro.distributions as dist
from agreement import LEVELS, Statistics, Table, differences, of_chains, of_weighted
from common import data_folder, load_data, print_table, write_report
from latent import MODELS, load
from numpyro.infer import NUTS
from numpyro.infer.reparam import LocScaleReparam, Reparam
from quadrature import EVIDENCE
from threadpoolctl import threadpool_limits

import numpyro_gpaug as gpaug

COLUMNS = {"data": "", "method": "", "latents": "d", "hyper": "d", "worth": ".0f"}
COLUMNS |= {
    "cold": ".1f",
    "warm": ".1f",
    "to 1000": ".1f",
    "pace": ".0f",
    "times": ".1f",
    "khat": ".2f",
    "mean": ".2f",
    "sd": ".2f",
}
COLUMNS |= {k: ".2f" for level in LEVELS for k in (level, f"({level})")}
COLUMNS["apart"] = ".1f"
COLUMNS |= {"evidence": ".3f", "error": ".3f", "exact": ".3f", "stopped": ""}
CHAINS = 4
# Steps of NUTS between readings of the clock, and the same for slow models.
LEG, MANY = 20, 500
# A run of more seconds is not repeated: compilation is a small part of it.
LONG = 100.0
CLOCKS = {"cpu": time.process_time, "wall": time.perf_counter}


def eight_schools(y: Any, sigma: Any) -> None:
    mu = numpyro.sample("mu", dist.Normal(0, 5))
    tau = numpyro.sample("tau", dist.HalfCauchy(5))
    with numpyro.plate("schools", 8):
        theta = numpyro.sample("theta", dist.Normal(mu, tau))
        numpyro.sample("y", dist.Normal(theta, sigma), obs=y)


def bernoulli(f: Any) -> dist.Distribution:
    return dist.Bernoulli(logits=f)


def student_t(f: Any) -> dist.Distribution:
    return dist.StudentT(4.0, f, numpyro.sample("noise", dist.LogNormal(-1.0, 1.0)))


def gp(X: Any, y: Any, *, distribution: Any) -> None:
    """A Gaussian process at all inputs."""
    lengthscale = numpyro.sample("lengthscale", dist.LogNormal(jnp.log(5.0), 1.0))
    variance = numpyro.sample("variance", dist.LogNormal(1.0, 1.0))
    K = gpaug.kernels.SquaredExponential(lengthscale, variance)(X, X)
    K = K + 1e-6 * variance * jnp.eye(len(X))
    f = numpyro.sample("f", dist.MultivariateNormal(jnp.zeros(len(X)), K))
    observed = distribution(f)
    with numpyro.plate("data", len(X)):
        numpyro.sample("y", observed, obs=y)


def sparse_ard(X: Any, y: Any, Z: Any) -> None:
    """A sparse process with a lengthscale for each of its eight inputs."""
    prior = dist.LogNormal(jnp.log(3.0), 0.7).expand([8]).to_event(1)
    lengthscales = numpyro.sample("lengthscales", prior)
    kernel = gpaug.kernels.Matern52(lengthscales, 4.0)
    f = gpaug.GaussianProcess("f", kernel, inducing=Z)(X)
    with numpyro.plate("data", len(X)):
        numpyro.sample("y", dist.Bernoulli(logits=f), obs=y)


def simulated(name: str) -> dict[str, np.ndarray]:
    """Data of ``gp_student_t`` and ``sparse_ard``: the last is named by its rows."""
    rng = np.random.default_rng(0)
    if name == "gp_student_t":
        X = rng.uniform(-10, 10, (100, 1))
        y = np.sin(X[:, 0] / 2) + 0.2 * rng.standard_t(3, 100)
        return {"X": X, "y": y}
    num = int(name.removeprefix("sparse_ard"))
    X = rng.normal(size=(num, 8))
    f = 3 * np.sin(X[:, 0]) + X[:, 1] * X[:, 2]
    y = rng.binomial(1, 1 / (1 + np.exp(-f)))
    return {"X": X, "y": y, "Z": np.asarray(gpaug.inducing.kmeans(X, 100))}


class Standard(Reparam):
    """A multivariate normal from standard normals."""

    def __call__(self, name: str, fn: Any, obs: Any) -> tuple[None, Any]:
        white = dist.Normal(0, 1).expand(fn.event_shape).to_event(1)
        z = numpyro.sample(f"{name}_white", white)
        return None, fn.loc + fn.scale_tril @ z


def for_nuts(model: Any) -> Any:
    """The model with its Gaussian latents whitened: normals in plates, and vectors."""

    def way(site: dict[str, Any]) -> Any:
        made = site["name"].endswith(("_white", "_decentered"))
        if site["is_observed"] or made:
            return None
        if isinstance(site["fn"], dist.MultivariateNormal):
            return Standard()
        return LocScaleReparam(0) if site["cond_indep_stack"] else None

    return numpyro.handlers.reparam(model, config=way)


def problem(name: str) -> tuple[Any, dict[str, np.ndarray]]:
    """A model and its arguments."""
    if name.startswith("gp_logistic"):
        num = int(name.removeprefix("gp_logistic"))
        X, y = load_data("breast_cancer" if num <= 569 else "ratsch_waveform")
        X = ((X - X.mean(0)) / X.std(0))[:num]
        return partial(gp, distribution=bernoulli), {"X": X, "y": y[:num]}
    if name == "gp_student_t":
        return partial(gp, distribution=student_t), simulated(name)
    if name.startswith("sparse_ard"):
        return sparse_ard, simulated(name)
    if name == "eight_schools":
        with np.load(folder() / "lgm_eight_schools.npz") as file:
            return eight_schools, {k: file[k] for k in ("y", "sigma")}
    if name in mixed.MADE:
        return mixed.problem(name)
    return MODELS[name], load(name)


def folder() -> Path:
    found = data_folder()
    if found is None:
        raise SystemExit("set GPAUG_DATA to the data folder")
    return found


def reference(name: str) -> Table | None:
    """Statistics of posteriordb's reference draws."""
    if name not in ("eight_schools", "gp_pois_regr"):
        return None
    with np.load(folder() / f"lgm_{name}.npz") as file:
        names = [str(x) for x in file["reference_names"]]
        kinds = "mean", "sd", "quantiles_5_50_95"
        means, deviations, quantiles = (file[f"reference_{k}"] for k in kinds)

    def from_zero(label: str) -> str:
        site, _, place = label.partition("[")
        return f"{site}[{int(place[:-1]) - 1}]" if place else site

    rows = zip(names, means, deviations, quantiles.T, strict=True)
    # The error of 10 000 independent draws of a normal.
    errors = np.array([0.021, 0.0125, 0.021])
    return {from_zero(k): Statistics(m, s, q, s * errors) for k, m, s, q in rows}


def by_nuts(
    model: Any, data: Any, draws: int, clock: Any, limit: float, each: int = LEG
) -> tuple[Any, dict[str, float]]:
    """Return draws by chain (none if the sampler is stopped before), and the seconds of
    all and of the draws alone. Chains are vectorized, as by ``MCMC``, and run in legs
    that are compiled once.
    """
    kernel = NUTS(model)
    gc.collect()
    start = clock()
    keys = jax.random.split(jax.random.key(1), CHAINS)
    state = kernel.init(keys, draws, None, (), data)
    named = jax.vmap(kernel.postprocess_fn((), data))

    @jax.jit
    def leg(state: Any) -> tuple[Any, Any]:
        def step(state: Any, _: None) -> tuple[Any, Any]:
            state = kernel.sample(state, (), data)
            return state, state.z

        return jax.lax.scan(step, state, length=each)

    @jax.jit
    def sites(z: Any) -> Any:
        return jax.lax.map(named, z)

    steps, warmed, kept = 0, math.inf, []
    while steps < 2 * draws and (not steps or clock() - start < limit):
        state, z = jax.block_until_ready(leg(state))
        if steps + each >= draws:  # compiled in the last leg of the warm-up
            found = jax.tree.map(np.asarray, sites(z))
        if steps >= draws:
            kept.append(found)
        steps += each
        warmed = clock() if steps == draws else warmed
    cold = clock() - start
    drawing = max(clock() - warmed, 0.0)
    seconds = {"cold": cold, "warm": drawing, "drawing": drawing, "steps": steps}
    if not kept:
        return {}, seconds
    joined = jax.tree.map(lambda *x: np.swapaxes(np.concatenate(x), 0, 1), *kept)
    return joined, seconds


def by_pymc(
    python: str, data: Any, draws: int
) -> tuple[dict[str, np.ndarray], dict[str, float]]:
    """The same of PyMC, in another interpreter."""
    with tempfile.TemporaryDirectory() as temporary:
        path = str(Path(temporary) / "cbpp.npz")
        np.savez(path, **data)
        script = Path(__file__).with_name("peers_nested.py")
        command = [python, "-P", str(script), path, str(draws)]  # coverage.py is ours
        done = subprocess.run(command, stdout=subprocess.PIPE, text=True, check=True)
        report = json.loads(done.stdout.splitlines()[-1])
        print(f"PyMC {report.pop('version')}")
        with np.load(path) as file:
            return dict(file), report


def timed(worth: float, cold: float, warm: float, drawing: float) -> dict[str, float]:
    to_1000 = cold + drawing * (1000 / worth - 1)
    return {"worth": worth, "cold": cold, "warm": warm, "to 1000": to_1000}


def row_of_nuts(
    draws: Any, names: set[str], seconds: dict[str, float], wanted: int
) -> tuple[dict[str, Any], Table]:
    """Return the effective draws and the statistics of a run by NUTS; none before its
    first draws.
    """
    steps = seconds.pop("steps")
    if draws:
        table, worth = of_chains(draws, names)
        stopped = "" if steps == 2 * wanted else f"after {steps - wanted:.0f} draws"
        return timed(worth, **seconds) | {"stopped": stopped}, table
    pace = seconds["cold"] * max(1.0, 1000 / (CHAINS * steps))
    stopped = f"at step {steps:.0f} of warm-up"
    spent = seconds["cold"]
    return {"cold": spent, "to 1000": spent, "pace": pace, "stopped": stopped}, {}


def rows_of(name: str, args: argparse.Namespace) -> list[dict[str, Any]]:
    (model, data), clock = problem(name), CLOCKS[args.clock]
    # Every process of JAX pays this once.
    key, other = jax.block_until_ready(tuple(jax.random.split(jax.random.key(0))))
    gc.collect()
    start = clock()
    nested = gpaug.NestedVI(model, num_points=args.points, progress_bar=False)
    nested.run(key, **data)
    nested.get_samples()
    cold = clock() - start
    fields, table = nested.get_extra_fields(), nested.summary()
    names = set(nested.latents)
    size = {"data": name, "latents": nested._run.z.shape[-1]}
    size["hyper"] = nested._run.weighted.points.shape[1]
    worth = float(table["n_eff"].min())
    weighted = nested.get_samples(weighted=True)
    ours = of_weighted(
        {k: weighted[k] for k in names}, fields["log_weights"], args.points
    )
    warm = cold
    if cold < LONG:
        start = clock()
        nested.run(other, **data)
        nested.get_samples()
        warm = clock() - start
    rows = [
        size
        | {"method": "NestedVI", "khat": fields["khat"], "loss": fields["loss"]}
        | {"evidence": fields["log_evidence"], "error": fields["log_evidence_error"]}
        | {"seconds": fields["seconds"], "width": fields["width"]}
        | timed(worth, cold, warm, warm if worth < 1000 else 0.0)
    ]
    if name in EVIDENCE:
        rows[0]["exact"] = EVIDENCE[name](**data)
    if not args.draws:
        return rows
    each = 1 if size["latents"] > MANY else LEG
    given = data, args.draws, clock, args.limit, each
    draws, seconds = by_nuts(for_nuts(model), *given)
    found, theirs = row_of_nuts(draws, names, seconds, args.draws)
    rows.append(size | {"method": "NUTS"} | found)
    rows[0]["times"] = rows[1]["to 1000"] / rows[0]["to 1000"]
    if truth := reference(name) or theirs:
        rows[0] |= differences(ours, truth)
    if truth is not theirs and theirs:
        rows[1] |= differences(theirs, truth)
    if args.pymc and name == "cbpp":
        draws, seconds = by_pymc(args.pymc, data, args.draws)
        found, worth = of_chains(draws, names)
        row = size | {"method": "PyMC, NUTS"} | timed(worth, **seconds)
        rows.append(row | differences(found, truth))
    if args.collapsed:
        run = by_nuts(gpaug.collapse(model), *given)
        found, others = row_of_nuts(run[0], names, run[1], args.draws)
        rows.append(size | {"method": "collapse + NUTS"} | found)
        if others and truth:
            rows[-1] |= differences(others, truth)
    return rows


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    sizes = tuple(f"gp_logistic{n}" for n in (100, 300, 1000))
    own = "eight_schools", *sizes, "gp_student_t"
    known = [k for k in MODELS if k != "additive"]
    parser.add_argument("--data", nargs="+", default=[*own, *known, *mixed.MADE])
    parser.add_argument("--points", type=int, default=1200)
    parser.add_argument("--draws", type=int, default=1000)
    parser.add_argument("--limit", type=float, default=600.0)
    parser.add_argument("--collapsed", action="store_true")
    parser.add_argument("--pymc", help="an interpreter with PyMC; processor seconds")
    parser.add_argument("--float32", action="store_true")
    parser.add_argument("--clock", choices=CLOCKS, default="cpu")
    parser.add_argument("--json", type=Path)
    args = parser.parse_args()
    jax.config.update("jax_enable_x64", not args.float32)
    rows = []
    for name in args.data:
        with threadpool_limits(1, user_api="blas"):
            rows += rows_of(name, args)
        print_table([r for r in rows if r["data"] == name], COLUMNS)
        if args.json:
            done = json.loads(args.json.read_text()) if args.json.exists() else {}
            kept = [r for r in done.get("rows", []) if r["data"] not in args.data]
            write_report(args.json, kept + rows)


if __name__ == "__main__":
    main()
