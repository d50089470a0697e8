# SPDX-License-Identifier: Apache-2.0
"""Latent Gaussian models of the literature: one joint Gaussian by ``ConjugateSVI``
beside NUTS, a Laplace approximation and a multivariate normal by gradients.

Hyperparameters are held where NUTS finds them on average (``--hyper`` draws on the
whole model); then all methods infer the same latents. ``mean`` is the largest
difference of posterior means from NUTS in its standard deviations, ``sd`` the largest
relative difference of standard deviations; both of NUTS are noisy (``--draws`` in four
chains). The last two start at prior medians and take 2000 and 5000 steps of adam, from
.1 on a cosine to zero, on the model as it is written. ``cold`` counts everything after
imports, in a compiled-from-nothing session, ``warm`` a second run of the same shapes.
Seconds are of one process::

    GPAUG_DATA=/path/to/data python examples/benchmarks/latent.py --json latent.json

Data are read from the folder ``GPAUG_DATA`` (``lgm_*.npz``: lme4's, R-INLA's and
posteriordb's sets); ``additive`` is simulated.
"""

from __future__ import annotations

import argparse
import json
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import numpyro
import numpyro.distributions as dist
import optax
from common import data_folder, machine, print_table, versions
from numpyro.infer import MCMC, NUTS, SVI, Trace_ELBO, autoguide
from numpyro.infer.initialization import init_to_median
from numpyro.infer.reparam import LocScaleReparam

import numpyro_gpaug as gpaug

COLUMNS = {"data": "", "method": "", "latents": "d", "mean": ".3f", "sd": ".3f"}
COLUMNS |= {"cold": ".2f", "warm": ".3f"}


def normal(name: str, scale: Any, shape: tuple[int, ...] = ()) -> Any:
    return numpyro.sample(name, dist.Normal(0, scale).expand(shape).to_event())


def cbpp(y: Any, total: Any, herd: Any, period: Any) -> None:
    b = normal("b", 5.0, (4,))
    tau = numpyro.sample("tau", dist.HalfNormal(1.0))
    with numpyro.plate("herds", 15):
        a = numpyro.sample("a", dist.Normal(0, tau))
    with numpyro.plate("data", len(y)):
        law = dist.Binomial(total, logits=b[period] + a[herd])
        numpyro.sample("y", law, obs=y)


def sleepstudy(y: Any, days: Any, subject: Any) -> None:
    b = numpyro.sample("b", dist.Normal(jnp.array([250.0, 0]), 100.0).to_event(1))
    sd = numpyro.sample("sd", dist.HalfNormal(30).expand([3]).to_event(1))
    with numpyro.plate("subjects", 18):
        a = numpyro.sample("a", dist.Normal(0, sd[0]))
        c = numpyro.sample("c", dist.Normal(0, sd[1]))
    mean = b[0] + a[subject] + (b[1] + c[subject]) * days
    with numpyro.plate("data", len(y)):
        numpyro.sample("y", dist.Normal(mean, sd[2]), obs=y)


def seeds(y: Any, total: Any, x1: Any, x2: Any) -> None:
    b = normal("b", 5.0, (4,))
    tau = numpyro.sample("tau", dist.HalfNormal(1.0))
    fixed = b[0] + b[1] * x1 + b[2] * x2 + b[3] * x1 * x2
    with numpyro.plate("plates", len(y)):
        e = numpyro.sample("e", dist.Normal(0, tau))
        numpyro.sample("y", dist.Binomial(total, logits=fixed + e), obs=y)


def epil(
    y: Any, treatment: Any, base: Any, age: Any, visit4: Any, patient: Any
) -> None:
    columns = [jnp.ones_like(base), jnp.log(base / 4), treatment, jnp.log(age), visit4]
    X = jnp.stack([c - c.mean() if i else c for i, c in enumerate(columns)], 1)
    b = normal("b", 5.0, (5,))
    sd = numpyro.sample("sd", dist.HalfNormal(1.0).expand([2]).to_event(1))
    with numpyro.plate("patients", 59):
        a = numpyro.sample("a", dist.Normal(0, sd[0]))
    with numpyro.plate("data", len(y)):
        e = numpyro.sample("e", dist.Normal(0, sd[1]))
        numpyro.sample("y", dist.Poisson(jnp.exp(X @ b + a[patient] + e)), obs=y)


def scotland(y: Any, expected: Any, x: Any, adjacency: Any) -> None:
    b = normal("b", 5.0, (2,))
    precision = numpyro.sample("precision", dist.Gamma(1.0, 1.0))
    adjacency = jnp.asarray(adjacency, float)
    # Three regions are islands.
    alone = jnp.eye(len(y)) * (adjacency.sum(-1) == 0)
    degrees = jnp.diag(adjacency.sum(-1)) + alone
    matrix = precision * (degrees - 0.95 * adjacency)
    law = dist.MultivariateNormal(jnp.zeros(len(y)), precision_matrix=matrix)
    region = numpyro.sample("region", law)
    rate = expected * jnp.exp(b[0] + b[1] * (x - x.mean()) / x.std() + region)
    with numpyro.plate("data", len(y)):
        numpyro.sample("y", dist.Poisson(rate), obs=y)


def tokyo(y: Any, total: Any) -> None:
    """A cyclic random walk of second order, with a wide level."""
    precision = numpyro.sample("precision", dist.LogNormal(9.0, 1.0))
    second = jnp.eye(len(y)) * 2 - jnp.roll(jnp.eye(len(y)), 1, 0)
    second = second - jnp.roll(jnp.eye(len(y)), -1, 0)
    matrix = precision * second @ second.T + 1e-3 * jnp.eye(len(y))
    law = dist.MultivariateNormal(jnp.zeros(len(y)), precision_matrix=matrix)
    f = numpyro.sample("f", law)
    with numpyro.plate("data", len(y)):
        numpyro.sample("y", dist.Binomial(total, logits=f - 1), obs=y)


def gp_pois_regr(x: Any, k: Any) -> None:
    rho = numpyro.sample("rho", dist.Gamma(25.0, 4.0))
    alpha = numpyro.sample("alpha", dist.HalfNormal(2.0))
    K = gpaug.kernels.SquaredExponential(rho, alpha**2)(x[:, None], x[:, None])
    law = dist.MultivariateNormal(jnp.zeros(len(x)), K + 1e-6 * jnp.eye(len(x)))
    f = numpyro.sample("f", law)
    with numpyro.plate("data", len(x)):
        numpyro.sample("k", dist.Poisson(jnp.exp(f)), obs=k)


def verbagg(y: Any, person: Any, item: Any, anger: Any, male: Any) -> None:
    b = normal("b", 5.0, (3,))
    sd = numpyro.sample("sd", dist.HalfNormal(1.0).expand([2]).to_event(1))
    with numpyro.plate("persons", 316):
        a = numpyro.sample("a", dist.Normal(0, sd[0]))
    with numpyro.plate("items", 24):
        c = numpyro.sample("c", dist.Normal(0, sd[1]))
    fixed = b[0] + b[1] * (anger - anger.mean()) / anger.std() + b[2] * male
    with numpyro.plate("data", len(y)):
        logits = fixed + a[person] + c[item]
        numpyro.sample("y", dist.Bernoulli(logits=logits), obs=y)


def additive(x: Any, y: Any) -> None:
    """Two smooth functions and a line, robust noise."""
    scale = numpyro.sample("scale", dist.HalfNormal(1.0))
    K = [
        gpaug.kernels.Matern52(1.0)(c[:, None], c[:, None]) + 1e-4 * jnp.eye(len(x))
        for c in x.T
    ]
    slope = numpyro.sample("slope", dist.Normal(0, 1))
    f, g = (
        numpyro.sample(name, dist.MultivariateNormal(jnp.zeros(len(x)), k))
        for name, k in zip("fg", K, strict=True)
    )
    with numpyro.plate("data", len(x)):
        numpyro.sample("y", dist.StudentT(4.0, f + g + slope * x[:, 0], scale), obs=y)


MODELS: dict[str, Callable[..., None]] = {
    f.__name__: f
    for f in (cbpp, sleepstudy, seeds, epil, scotland, tokyo, gp_pois_regr, verbagg,
              additive)
}  # fmt: skip


def load(name: str) -> dict[str, np.ndarray]:
    """A model's arguments."""
    if name == "additive":
        rng = np.random.default_rng(0)
        x = rng.uniform(-2, 2, (60, 2))
        noise = 0.3 * rng.standard_t(4, 60)
        return {"x": x, "y": np.sin(2 * x[:, 0]) + 0.5 * x[:, 1] ** 2 + noise}
    folder = data_folder()
    if folder is None:
        raise SystemExit("set GPAUG_DATA to the data folder")
    wanted = MODELS[name].__annotations__.keys() - {"return"}
    with np.load(folder / f"lgm_{name}.npz", allow_pickle=False) as file:
        return {
            k: file[k].astype(float if file[k].dtype.kind == "f" else int)
            for k in wanted
        }


Moments = dict[str, tuple[np.ndarray, np.ndarray]]


def whitened(model: Any, names: list[str]) -> Any:
    """Normals in plates and vectors without their scales, which NUTS prefers."""
    config = {name: LocScaleReparam(0) for name in names}
    return numpyro.handlers.reparam(model, config=config)


def by_nuts(model: Any, data: Any, draws: int, key: int) -> dict[str, np.ndarray]:
    trace = numpyro.handlers.trace(numpyro.handlers.seed(model, 0)).get_trace(**data)
    plain = [
        k
        for k, m in trace.items()
        if m["type"] == "sample" and not m["is_observed"] and m["cond_indep_stack"]
    ]
    kernel = NUTS(whitened(model, plain))
    mcmc = MCMC(
        kernel, num_warmup=draws, num_samples=draws, num_chains=4,
        chain_method="vectorized", progress_bar=False,
    )  # fmt: skip
    mcmc.run(jax.random.key(key), **data)
    found = mcmc.get_samples()
    return {k: np.asarray(x) for k, x in found.items() if not k.endswith("_decentered")}


def of_draws(draws: dict[str, np.ndarray]) -> Moments:
    return {k: (x.mean(0), x.std(0)) for k, x in draws.items()}


def ours(model: Any, data: Any, names: list[str]) -> Callable[[], Moments]:
    svi = gpaug.ConjugateSVI(model, gpaug.AutoLatentGaussian(model))

    def run() -> Moments:
        fit = svi.run(jax.random.key(0), 100, **data, progress_bar=False, tol=1e-4)
        posterior = svi.posterior(fit)
        laws = {name: posterior[name] for name in names}
        return {k: (np.array(d.mean), np.sqrt(d.variance)) for k, d in laws.items()}

    return run


def by_gradients(
    kind: Any, steps: int
) -> Callable[[Any, Any, list[str]], Callable[[], Moments]]:
    """A NumPyro autoguide."""

    def of(model: Any, data: Any, names: list[str]) -> Callable[[], Moments]:
        guide = kind(model, init_loc_fn=init_to_median(num_samples=50))
        rate = optax.cosine_decay_schedule(0.1, steps)
        svi = SVI(model, guide, optax.adam(rate), Trace_ELBO())

        def run() -> Moments:
            fit = svi.run(jax.random.key(0), steps, **data, progress_bar=False)
            draws = guide.sample_posterior(
                jax.random.key(1), fit.params, sample_shape=(4000,)
            )
            return of_draws({k: np.asarray(draws[k]) for k in names})

        return run

    return of


METHODS = {
    "AutoLatentGaussian": ours,
    "Laplace": by_gradients(autoguide.AutoLaplaceApproximation, 2000),
    "multivariate normal": by_gradients(autoguide.AutoMultivariateNormal, 5000),
}


def timed(run: Callable[[], Any]) -> tuple[Any, float]:
    start = time.perf_counter()
    found = run()
    return found, time.perf_counter() - start


def rows_of(name: str, args: argparse.Namespace) -> list[dict[str, Any]]:
    model, data = MODELS[name], load(name)
    on_all = by_nuts(model, data, args.hyper, 0)
    guide = gpaug.AutoLatentGaussian(model).setup(**data)
    names = [site.name for site in guide.structure.sites]
    hyper = {k: x.mean(0) for k, x in on_all.items() if k in guide.structure.others}
    given = numpyro.handlers.condition(model, data=hyper)
    draws, seconds = timed(lambda: by_nuts(given, data, args.draws, 1))
    truth = of_draws({k: draws[k] for k in names})
    size = guide.structure.size
    rows = [{"data": name, "method": "NUTS", "latents": size, "cold": seconds}]
    for method, of in METHODS.items():
        run = of(given, data, names)
        found, cold = timed(run)
        _, warm = timed(run)
        means = [np.abs(found[k][0] - m) / s for k, (m, s) in truth.items()]
        deviations = [np.abs(found[k][1] / s - 1) for k, (_, s) in truth.items()]
        rows.append({
            "data": name, "method": method, "latents": size, "cold": cold, "warm": warm,
            "mean": max(float(x.max()) for x in means),
            "sd": max(float(x.max()) for x in deviations),
        })  # fmt: skip
    return rows


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--data", nargs="+", default=[*MODELS], choices=[*MODELS])
    parser.add_argument("--hyper", type=int, default=1000)
    parser.add_argument("--draws", type=int, default=2500)
    parser.add_argument("--json", type=Path)
    args = parser.parse_args()
    rows = []
    for name in args.data:
        rows += rows_of(name, args)
        print_table(rows[-len(METHODS) - 1 :], COLUMNS)
        if args.json:
            found = versions("jax", "numpyro", "optax")
            report = {"machine": machine(), "versions": found, "rows": rows}
            args.json.write_text(json.dumps(report, indent=1))


if __name__ == "__main__":
    main()
