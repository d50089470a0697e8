# SPDX-License-Identifier: Apache-2.0
"""Latent Gaussian models of the literature: one joint Gaussian by ``ConjugateSVI``
beside NUTS, a Laplace approximation and a multivariate normal by gradients.

Hyperparameters are fixed at their mean by NUTS (``--hyper`` draws on the whole model);
then all methods infer the same latents. ``mean`` is the largest difference of posterior
means from NUTS in its standard deviations, ``sd`` the largest relative difference of
standard deviations. Both have NUTS's noise (``--draws`` in each of four chains): its
own row has the largest Monte Carlo error of a mean, and the largest of hundreds of
differences may be three times that. NUTS samples whitened Gaussians; the other methods
have the model as it is written. The last two start at prior medians and take at most
2000 and 5000 steps of adam, from .1 on a cosine to zero, begun within ``--seconds``:
fewer ``steps`` mean that the time was over. ``cold`` counts everything after imports,
in a session without compiled programs, ``warm`` is the shorter of two more runs.
Seconds are of one process::

    GPAUG_DATA=/path/to/data python examples/benchmarks/latent.py --json latent.json

Data are read from the folder ``GPAUG_DATA`` (``lgm_*.npz``: lme4's, R-INLA's and
posteriordb's sets); ``additive`` is simulated.
"""

from __future__ import annotations

import argparse
import functools
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
from common import data_folder, print_table, write_report
from jax import lax
from numpyro.diagnostics import effective_sample_size
from numpyro.infer import MCMC, NUTS, SVI, Trace_ELBO, autoguide
from numpyro.infer.initialization import init_to_median
from numpyro.infer.reparam import LocScaleReparam, Reparam

import numpyro_gpaug as gpaug

COLUMNS = {"data": "", "method": "", "latents": "d", "mean": ".3f", "sd": ".3f"}
COLUMNS |= {"steps": "d", "cold": ".2f", "warm": ".3f", "stopped": ""}


def normal(name: str, scale: Any, shape: tuple[int, ...] = ()) -> Any:
    return numpyro.sample(name, dist.Normal(0, scale).expand(shape).to_event())


def cbpp(y: Any, total: Any, herd: Any, period: Any) -> None:
    b = normal("b", 5.0, (4,))
    tau = numpyro.sample("tau", dist.HalfNormal(1.0))
    with numpyro.plate("herds", 15):
        a = numpyro.sample("a", dist.Normal(0, tau))
    with numpyro.plate("data", len(y)):
        likelihood = dist.Binomial(total, logits=b[period] + a[herd])
        numpyro.sample("y", likelihood, obs=y)


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
    distribution = dist.MultivariateNormal(jnp.zeros(len(y)), precision_matrix=matrix)
    region = numpyro.sample("region", distribution)
    rate = expected * jnp.exp(b[0] + b[1] * (x - x.mean()) / x.std() + region)
    with numpyro.plate("data", len(y)):
        numpyro.sample("y", dist.Poisson(rate), obs=y)


def tokyo(y: Any, total: Any) -> None:
    """A cyclic random walk of second order about a level."""
    precision = numpyro.sample("precision", dist.LogNormal(9.0, 1.0))
    level = numpyro.sample("level", dist.Normal(-1.0, 1.65))
    tril = cyclic_walk(len(y)) / jnp.sqrt(precision)
    walk = numpyro.sample("walk", dist.MultivariateNormal(0.0, scale_tril=tril))
    with numpyro.plate("data", len(y)):
        numpyro.sample("y", dist.Binomial(total, logits=level + walk), obs=y)


def cyclic_walk(steps: int) -> np.ndarray:
    """The factor of its covariance, by NumPy: the second differences of a year have a
    condition of 2e8, which a factorisation in float32 does not stand."""
    once = np.eye(steps)
    second = 2 * once - np.roll(once, 1, 0) - np.roll(once, -1, 0)
    # Differences do not determine the level: the walk gets almost none of it.
    return np.linalg.cholesky(np.linalg.pinv(second @ second) + 1 / steps)


def gp_pois_regr(x: Any, k: Any) -> None:
    rho = numpyro.sample("rho", dist.Gamma(25.0, 4.0))
    alpha = numpyro.sample("alpha", dist.HalfNormal(2.0))
    K = gpaug.kernels.SquaredExponential(rho, alpha**2)(x[:, None], x[:, None])
    distribution = dist.MultivariateNormal(
        jnp.zeros(len(x)), K + 1e-6 * jnp.eye(len(x))
    )
    f = numpyro.sample("f", distribution)
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
# And the steps taken.
Found = tuple[Moments, int]
Method = Callable[[Any, Any, list[str], float], Callable[[], Found]]


class Factored(Reparam):
    """A multivariate normal as an affine function of standard normals."""

    def __call__(self, name: str, fn: Any, obs: Any) -> tuple[None, Any]:
        base = normal(f"{name}_base", 1.0, fn.event_shape)
        return None, fn.loc + fn.scale_tril @ base


def whitened(model: Any, data: Any) -> Any:
    """Gaussians in plates and multivariate ones as NUTS prefers them: without their
    scales. As they are written its trajectories through the processes have a thousand
    steps."""
    trace = numpyro.handlers.trace(numpyro.handlers.seed(model, 0)).get_trace(**data)
    config: dict[str, Reparam] = {}
    for name, site in trace.items():
        if site["type"] != "sample" or site["is_observed"]:
            continue
        if isinstance(site["fn"], dist.MultivariateNormal):
            config[name] = Factored()
        elif site["cond_indep_stack"]:
            config[name] = LocScaleReparam(0)
    return numpyro.handlers.reparam(model, config=config)


def by_nuts(model: Any, data: Any, draws: int, key: int) -> dict[str, np.ndarray]:
    """Return draws of NUTS, one chain after the other."""
    mcmc = MCMC(
        NUTS(whitened(model, data)), num_warmup=min(draws, 1000), num_samples=draws,
        num_chains=4, chain_method="vectorized", progress_bar=False,
    )  # fmt: skip
    mcmc.run(jax.random.key(key), **data)
    found = mcmc.get_samples()
    made = ("_decentered", "_base")
    return {k: np.asarray(x) for k, x in found.items() if not k.endswith(made)}


def of_draws(draws: dict[str, np.ndarray]) -> Moments:
    return {k: (x.mean(0), x.std(0)) for k, x in draws.items()}


def ours(model: Any, data: Any, names: list[str], limit: float) -> Callable[[], Found]:
    svi = gpaug.ConjugateSVI(model, gpaug.AutoLatentGaussian(model))

    def run() -> Found:
        fit = svi.run(jax.random.key(0), 100, **data, progress_bar=False, tol=1e-4)
        posterior = svi.posterior(fit)
        distributions = {name: posterior[name] for name in names}
        found = {
            k: (np.array(d.mean), np.sqrt(d.variance)) for k, d in distributions.items()
        }
        return found, len(fit.losses)

    return run


CHUNK = 250


def by_gradients(kind: Any, steps: int) -> Method:
    """A NumPyro autoguide; its steps are compiled once."""

    def of(
        model: Any, data: Any, names: list[str], limit: float
    ) -> Callable[[], Found]:
        guide = kind(model, init_loc_fn=init_to_median(num_samples=50))
        rate = optax.cosine_decay_schedule(0.1, steps)
        svi = SVI(model, guide, optax.adam(rate), Trace_ELBO())
        start = functools.cache(lambda: svi.init(jax.random.key(0), **data))

        @jax.jit
        def follow(state: Any) -> tuple[Any, Any]:
            return lax.scan(lambda s, _: svi.update(s, **data), state, length=CHUNK)

        @jax.jit
        def draw(params: Any) -> Any:
            return guide.sample_posterior(
                jax.random.key(1), params, sample_shape=(4000,)
            )

        def run() -> Found:
            began, state, done = time.perf_counter(), start(), 0
            while done < steps and time.perf_counter() - began < limit:
                state, losses = follow(state)
                done += CHUNK
                if not np.isfinite(losses[-1]):
                    raise FloatingPointError(f"its loss is {losses[-1]}")
            draws = draw(svi.get_params(state))
            return of_draws({k: np.asarray(draws[k]) for k in names}), done

        return run

    return of


METHODS: dict[str, Method] = {
    "AutoLatentGaussian": ours,
    "Laplace": by_gradients(autoguide.AutoLaplaceApproximation, 2000),
    "multivariate normal": by_gradients(autoguide.AutoMultivariateNormal, 5000),
}


def timed(run: Callable[[], Any]) -> tuple[Any, float]:
    start = time.perf_counter()
    found = run()
    return found, time.perf_counter() - start


def beside(truth: Moments, run: Callable[[], Found]) -> dict[str, Any]:
    """Return a method's row, with its error if it fails."""
    try:
        (found, steps), cold = timed(run)
        warm = min(timed(run)[1] for _ in range(2))
    except (ValueError, ArithmeticError) as error:
        return {"stopped": str(error).splitlines()[0]}
    means = [np.abs(found[k][0] - m) / s for k, (m, s) in truth.items()]
    deviations = [np.abs(found[k][1] / s - 1) for k, (_, s) in truth.items()]
    return {
        "steps": steps, "cold": cold, "warm": warm,
        "mean": max(float(x.max()) for x in means),
        "sd": max(float(x.max()) for x in deviations),
    }  # fmt: skip


def noise(draws: dict[str, np.ndarray]) -> float:
    """The largest Monte Carlo error of a mean, in its standard deviations."""
    sizes = [
        effective_sample_size(x.reshape(4, -1, *x.shape[1:])) for x in draws.values()
    ]
    return float(max(np.max(1 / np.sqrt(x)) for x in sizes))


def rows_of(name: str, args: argparse.Namespace) -> list[dict[str, Any]]:
    model, data = MODELS[name], load(name)
    on_all = by_nuts(model, data, args.hyper, 0)
    guide = gpaug.AutoLatentGaussian(model).setup(**data)
    names = [site.name for site in guide.structure.sites]
    hyper = {k: x.mean(0) for k, x in on_all.items() if k in guide.structure.others}
    given = numpyro.handlers.condition(model, data=hyper)
    draws, seconds = timed(lambda: by_nuts(given, data, args.draws, 1))
    kept = {k: draws[k] for k in names}
    about = {"data": name, "latents": guide.structure.size}
    rows = [about | {"method": "NUTS", "cold": seconds, "mean": noise(kept)}]
    for method, of in METHODS.items():
        run = of(given, data, names, args.seconds)
        rows.append(about | {"method": method} | beside(of_draws(kept), run))
    return rows


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--data", nargs="+", default=[*MODELS], choices=[*MODELS])
    parser.add_argument("--hyper", type=int, default=1000)
    parser.add_argument("--draws", type=int, default=10_000)
    parser.add_argument("--seconds", type=float, default=60.0)
    parser.add_argument("--json", type=Path)
    args = parser.parse_args()
    rows = []
    for name in args.data:
        rows += rows_of(name, args)
        print_table(rows[-len(METHODS) - 1 :], COLUMNS)
        write_report(args.json, rows, "optax")


if __name__ == "__main__":
    main()
