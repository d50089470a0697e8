# SPDX-License-Identifier: Apache-2.0
"""Hyperparameters integrated: ``NestedVI`` beside NUTS on the model and NUTS on the
collapsed model.

``worth`` is the smallest number of effective draws over all latents and
hyperparameters; ``to 1000`` the seconds from nothing, compilation included, until it is
1000: ``cold`` is a first run, ``warm`` a second one, of which NUTS would draw on for
half (compilation and warm-up are paid once), and ours do all again.
``mean`` and ``sd`` are the largest differences of means, in standard deviations, and of
standard deviations, relative, from the reference draws of posteriordb where there are
any (``gp_pois_regr``, ``eight_schools``), otherwise from NUTS's. NUTS runs on the
whitened model, four chains at once. Of the collapsed model only hyperparameters are
drawn, and they are those of the bound; ``--draws 0`` leaves NUTS out. ``exact`` is the
evidence by quadrature (``quadrature.py``)::

    GPAUG_DATA=/path/to/data python examples/benchmarks/nested.py --json nested.json

Data are those of ``latent.py``, and logistic regression by a Gaussian process on the
first N rows of scikit-learn's breast cancer data, of more than its 569 on those of
``ratsch_waveform``; ``gp_student_t`` and ``sparse_ard5000`` (a sparse process, 100
inducing inputs, eight lengthscales) are simulated. In double precision unless
``--float32``. Seconds are of one process: of the processor, or with ``--clock wall`` of
the clock.
"""

from __future__ import annotations

import argparse
import json
import time
from functools import partial
from pathlib import Path
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import numpyro
import numpyro.distributions as dist
from common import data_folder, load_data, machine, print_table, versions
from latent import MODELS, load, whitened
from numpyro.diagnostics import effective_sample_size
from numpyro.infer import MCMC, NUTS
from quadrature import EVIDENCE

import numpyro_gpaug as gpaug

COLUMNS = {"data": "", "method": "", "latents": "d", "hyper": "d", "worth": ".0f"}
COLUMNS |= {
    "cold": ".1f",
    "warm": ".1f",
    "to 1000": ".1f",
    "mean": ".3f",
    "sd": ".3f",
    "khat": ".2f",
}
COLUMNS |= {"evidence": ".3f", "error": ".3f", "exact": ".3f"}
CHAINS = 4
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


def gp(X: Any, y: Any, *, law: Any, white: bool = False) -> None:
    """A Gaussian process at all inputs; whitened for NUTS."""
    lengthscale = numpyro.sample("lengthscale", dist.LogNormal(jnp.log(5.0), 1.0))
    variance = numpyro.sample("variance", dist.LogNormal(1.0, 1.0))
    K = gpaug.kernels.SquaredExponential(lengthscale, variance)(X, X)
    K = K + 1e-6 * variance * jnp.eye(len(X))
    if white:
        z = numpyro.sample("z", dist.Normal(0, 1).expand([len(X)]).to_event(1))
        f = numpyro.deterministic("f", jnp.linalg.cholesky(K) @ z)
    else:
        f = numpyro.sample("f", dist.MultivariateNormal(jnp.zeros(len(X)), K))
    observed = law(f)
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


def problem(name: str) -> tuple[Any, Any, dict[str, np.ndarray]]:
    """A model, the same for NUTS, and its arguments."""
    if name.startswith("gp_logistic"):
        num = int(name.removeprefix("gp_logistic"))
        X, y = load_data("breast_cancer" if num <= 569 else "ratsch_waveform")
        X = ((X - X.mean(0)) / X.std(0))[:num]
        logistic = partial(gp, law=bernoulli)
        return logistic, partial(logistic, white=True), {"X": X, "y": y[:num]}
    if name == "gp_student_t":
        robust = partial(gp, law=student_t)
        return robust, partial(robust, white=True), simulated(name)
    if name.startswith("sparse_ard"):
        return sparse_ard, sparse_ard, simulated(name)
    if name == "eight_schools":
        with np.load(folder() / "lgm_eight_schools.npz") as file:
            data = {k: file[k] for k in ("y", "sigma")}
        return eight_schools, whitened(eight_schools, ["theta"]), data
    model, data = MODELS[name], load(name)
    trace = numpyro.handlers.trace(numpyro.handlers.seed(model, 0)).get_trace(**data)
    plain = [
        k
        for k, m in trace.items()
        if m["type"] == "sample" and not m["is_observed"] and m["cond_indep_stack"]
    ]
    return model, whitened(model, plain), data


def folder() -> Path:
    found = data_folder()
    if found is None:
        raise SystemExit("set GPAUG_DATA to the data folder")
    return found


Table = dict[str, tuple[float, float]]


def reference(name: str) -> Table | None:
    """Means and standard deviations of posteriordb's reference draws."""
    if name not in ("eight_schools", "gp_pois_regr"):
        return None
    with np.load(folder() / f"lgm_{name}.npz") as file:
        names = [str(x) for x in file["reference_names"]]
        numbers = file["reference_mean"], file["reference_sd"]

    def from_zero(label: str) -> str:
        site, _, place = label.partition("[")
        return f"{site}[{int(place[:-1]) - 1}]" if place else site

    return {
        from_zero(label): (float(m), float(s))
        for label, m, s in zip(names, *numbers, strict=True)
    }


def by_nuts(
    model: Any, data: Any, draws: int, clock: Any
) -> tuple[Any, dict[str, float]]:
    """Draws by chain, and seconds: of a first run and of drawing, which is half of a
    second one."""
    mcmc = MCMC(
        NUTS(model), num_warmup=draws, num_samples=draws, num_chains=CHAINS,
        chain_method="vectorized", progress_bar=False,
    )  # fmt: skip
    spent = []
    for seed in (1, 0):
        start = clock()
        mcmc.run(jax.random.key(seed), **data)
        found = jax.tree.map(np.asarray, mcmc.get_samples(group_by_chain=True))
        spent.append(clock() - start)
    cold, warm = spent
    return found, {"cold": cold, "warm": warm, "drawing": warm / 2}


def of_chains(draws: dict[str, np.ndarray], names: set[str]) -> tuple[Table, float]:
    """Moments of every entry, and the smallest number of effective draws."""
    table, worth = {}, np.inf
    for name, x in draws.items():
        if name not in names:
            continue
        for place in np.ndindex(x.shape[2:]):
            label = f"{name}[{','.join(map(str, place))}]" if place else name
            each = x[(slice(None), slice(None), *place)]
            table[label] = float(each.mean()), float(each.std())
            worth = min(worth, float(effective_sample_size(each)))
    return table, worth


def differences(found: Table, truth: Table) -> dict[str, float]:
    shared = [k for k in found if k in truth and truth[k][1] > 0]
    means = [abs(found[k][0] - truth[k][0]) / truth[k][1] for k in shared]
    deviations = [abs(found[k][1] / truth[k][1] - 1) for k in shared]
    return {"mean": max(means), "sd": max(deviations)}


def timed(worth: float, cold: float, warm: float, drawing: float) -> dict[str, float]:
    to_1000 = cold + drawing * (1000 / worth - 1)
    return {"worth": worth, "cold": cold, "warm": warm, "to 1000": to_1000}


def rows_of(name: str, args: argparse.Namespace) -> list[dict[str, Any]]:
    (model, for_nuts, data), clock = problem(name), CLOCKS[args.clock]
    start = clock()
    nested = gpaug.NestedVI(model, num_points=args.points, progress_bar=False)
    nested.run(jax.random.key(0), **data)
    nested.get_samples()
    cold = clock() - start
    fields, table = nested.get_extra_fields(), nested.summary()
    names = set(nested.latents)
    size = {"data": name, "latents": nested._run.weighted.z.shape[-1]}
    size["hyper"] = nested._run.weighted.points.shape[1]
    ours: Table = {k: (r["mean"], r["sd"]) for k, r in table.iterrows()}
    worth = float(table["n_eff"].min())
    start = clock()
    nested.run(jax.random.key(1), **data)
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
    draws, seconds = by_nuts(for_nuts, data, args.draws, clock)
    theirs, worth = of_chains(draws, names)
    truth = reference(name) or theirs
    rows[0] |= differences(ours, truth)
    rows.append(size | {"method": "NUTS"} | timed(worth, **seconds))
    if truth is not theirs:
        rows[-1] |= differences(theirs, truth)
    if args.collapsed:
        draws, seconds = by_nuts(gpaug.collapse(model), data, args.draws, clock)
        collapsed, worth = of_chains(draws, names)
        rows.append(
            size
            | {"method": "collapse + NUTS"}
            | timed(worth, **seconds)
            | differences(collapsed, truth)
        )
    return rows


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    own = "eight_schools", "gp_logistic100", "gp_logistic300", "gp_student_t"
    known = [k for k in MODELS if k != "additive"]
    parser.add_argument("--data", nargs="+", default=[*own, *known])
    parser.add_argument("--points", type=int, default=512)
    parser.add_argument("--draws", type=int, default=1000)
    parser.add_argument("--collapsed", action="store_true")
    parser.add_argument("--float32", action="store_true")
    parser.add_argument("--clock", choices=CLOCKS, default="cpu")
    parser.add_argument("--json", type=Path)
    args = parser.parse_args()
    jax.config.update("jax_enable_x64", not args.float32)
    rows = []
    for name in args.data:
        rows += rows_of(name, args)
        print_table([r for r in rows if r["data"] == name], COLUMNS)
        if args.json:
            found = versions("jax", "numpyro")
            report = {"machine": machine(), "versions": found, "rows": rows}
            args.json.write_text(json.dumps(report, indent=1))


if __name__ == "__main__":
    main()
