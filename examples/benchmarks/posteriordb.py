# SPDX-License-Identifier: Apache-2.0
"""Posteriors of posteriordb that have no reference draws: certified by ``NestedVI``.

Models whose latents are Gaussian given the hyperparameters, and whose data are in
``examples/data``. ``evidence`` is the logarithm of the marginal likelihood, with the
standard error of its estimate; ``seconds`` are of the processor, from a cold start
without imports; other columns are posterior means and standard deviations. The priors
are those of the Stan programs. ``rats_model`` has flat priors of three standard
deviations, which are uniform on (0, 100) here: the posterior hardly changes, and the
evidence exists::

    python examples/benchmarks/posteriordb.py --json posteriordb.json
"""

from __future__ import annotations

import argparse
import json
import os
from pathlib import Path
from typing import Any

os.environ.setdefault("TF_CPP_MIN_LOG_LEVEL", "3")
os.environ.setdefault("OPENBLAS_NUM_THREADS", "1")

import jax
import jax.numpy as jnp
import numpy as np
import numpyro
import numpyro.distributions as dist
import pandas as pd

import numpyro_gpaug as gpaug

DATA = Path(__file__).parents[1] / "data"


def seeds(x, total, n=None, *, centred):
    """``seeds_stanified_model``, or ``seeds_centered_model``."""
    alpha = numpyro.sample("alpha", dist.Normal(0, 1).expand([4]).to_event(1))
    sigma = numpyro.sample("sigma", dist.HalfCauchy(1.0))
    with numpyro.plate("effects", len(x)):
        b = numpyro.sample("c" if centred else "b", dist.Normal(0, sigma))
    logits = x @ alpha + (b - b.mean() if centred else b)
    with numpyro.plate("plates", len(x)):
        numpyro.sample("n", dist.Binomial(total, logits=logits), obs=n)


def vague_seeds(x, total, n=None):
    """``seeds_model``."""
    alpha = numpyro.sample("alpha", dist.Normal(0, 1000).expand([4]).to_event(1))
    tau = numpyro.sample("tau", dist.Gamma(0.001, 0.001))
    with numpyro.plate("effects", len(x)):
        b = numpyro.sample("b", dist.Normal(0, tau**-0.5))
    with numpyro.plate("plates", len(x)):
        numpyro.sample("n", dist.Binomial(total, logits=x @ alpha + b), obs=n)


def surgical(operations, deaths=None):
    """``surgical_model``."""
    mu = numpyro.sample("mu", dist.Normal(0, 1000))
    variance = numpyro.sample("sigmasq", dist.InverseGamma(0.001, 0.001))
    with numpyro.plate("hospitals", len(operations)):
        b = numpyro.sample("b", dist.Normal(mu, variance**0.5))
        numpyro.sample("deaths", dist.Binomial(operations, logits=b), obs=deaths)


def falcons(powers, count=None):
    """``GLMM_Poisson_model``."""
    beta = [numpyro.sample(f"beta{k}", dist.Uniform(-x, x))
            for k, x in enumerate([20, 10, 10, 10])]  # fmt: skip
    sigma = numpyro.sample("sigma", dist.Uniform(0, 5))
    with numpyro.plate("years", len(powers)):
        eps = numpyro.sample("eps", dist.Normal(0, sigma))
        rate = jnp.exp(powers @ jnp.stack(beta) + eps)
        numpyro.sample("count", dist.Poisson(rate), obs=count)


def lsat(student, question, right=None):
    """``lsat_model``: a Rasch model with a common slope."""
    alpha = numpyro.sample("alpha", dist.Normal(0, 100).expand([5]).to_event(1))
    beta = numpyro.sample("beta", dist.HalfNormal(100.0))
    with numpyro.plate("students", 1000):
        theta = numpyro.sample("theta", dist.Normal(0, 1))
    logits = beta * theta[student] - alpha[question]
    with numpyro.plate("answers", len(student)):
        numpyro.sample("right", dist.Bernoulli(logits=logits), obs=right)


def rats(rat, day, weight=None):
    """``rats_model``: growth curves."""
    mu = [numpyro.sample(f"mu_{k}", dist.Normal(0, 100)) for k in ("alpha", "beta")]
    sd = [numpyro.sample(f"sigma_{k}", dist.Uniform(0, 100))
          for k in ("alpha", "beta", "y")]  # fmt: skip
    with numpyro.plate("rats", 30):
        alpha = numpyro.sample("alpha", dist.Normal(mu[0], sd[0]))
        beta = numpyro.sample("beta", dist.Normal(mu[1], sd[1]))
    mean = alpha[rat] + beta[rat] * (day - 22.0)
    with numpyro.plate("weights", len(rat)):
        numpyro.sample("weight", dist.Normal(mean, sd[2]), obs=weight)


def radon(county, floor, uranium, y=None, *, levels, slopes=None, known=False):
    """The seven models of radon in Minnesota: the level of a county has a prior of its
    own ("own"), has one that counties share ("shared"), or is the same for all ("one");
    likewise its slope on the floor. ``known``: levels depend on a county's uranium."""

    def effects(name, kind):
        wide = dist.Normal(0, 10)
        if kind == "one":
            return jnp.full(85, numpyro.sample(name, wide))
        if kind == "shared":
            mean = numpyro.sample(f"mu_{name}", wide)
            sigma = numpyro.sample(f"sigma_{name}", dist.HalfNormal(1))
            wide = dist.Normal(mean, sigma)
        with numpyro.plate(f"counties_{name}", 85):
            return numpyro.sample(name, wide)

    mean = effects("alpha", levels)[county]
    if slopes:
        mean = mean + effects("beta", slopes)[county] * floor
    if known:
        mean = mean + numpyro.sample("gamma", dist.Normal(0, 10)) * uranium
    sigma = numpyro.sample("sigma_y", dist.HalfNormal(1))
    with numpyro.plate("homes", len(county)):
        numpyro.sample("y", dist.Normal(mean, sigma), obs=y)


def posteriors() -> dict[str, tuple[Any, tuple, dict, list[str]]]:
    """Return, by name, the model, its arguments and keywords, and the sites to show."""
    s, patterns, w = (pd.read_csv(DATA / f"{k}.csv") for k in ("seeds", "lsat", "rats"))
    kind, extract = s.type.to_numpy(), s.extract.to_numpy()
    x = np.stack([np.ones(21), kind, extract, kind * extract], -1)
    germination = x, s.total.to_numpy(), s.germinated.to_numpy()
    right = np.repeat(patterns.to_numpy()[:, :5], patterns.students, axis=0)
    student, question = (i.ravel() for i in np.indices(right.shape))
    rat, time = (i.ravel() for i in np.indices(w.shape))
    growth = rat, 8.0 + 7 * time, w.to_numpy(float).ravel()
    fixed = [f"alpha[{i}]" for i in range(4)]
    hospitals, birds = (pd.read_csv(DATA / f"{k}.csv") for k in ("surgical", "falcons"))
    operated = hospitals.operations.to_numpy(), hospitals.deaths.to_numpy()
    years = (birds.year - birds.year.mean()) / birds.year.std()
    counted = np.vander(years, 4, increasing=True), birds.pairs.to_numpy()
    betas = [f"beta{k}" for k in range(4)]
    homes = pd.read_csv(DATA / "radon.csv")
    at = (
        homes.county.to_numpy() - 1,
        homes.floor.to_numpy(),
        homes.log_uranium.to_numpy(),
    )
    measured = *at, np.log(homes.radon.to_numpy())
    levels = {
        "pooled": ({"levels": "one", "slopes": "one"}, ["alpha", "beta"]),
        "county_intercept": ({"levels": "own", "slopes": "one"}, ["beta"]),
        "partially_pooled_centered": (
            {"levels": "shared"}, ["mu_alpha", "sigma_alpha"],
        ),
        "variable_intercept_centered": (
            {"levels": "shared", "slopes": "one"}, ["mu_alpha", "sigma_alpha", "beta"],
        ),
        "variable_slope_centered": (
            {"levels": "one", "slopes": "shared"}, ["alpha", "mu_beta", "sigma_beta"],
        ),
        "variable_intercept_slope_centered": (
            {"levels": "shared", "slopes": "shared"},
            ["mu_alpha", "sigma_alpha", "mu_beta", "sigma_beta"],
        ),
        "hierarchical_intercept_centered": (
            {"levels": "shared", "slopes": "one", "known": True},
            ["mu_alpha", "sigma_alpha", "gamma", "beta"],
        ),
    }  # fmt: skip
    return {
        **{
            f"radon_{k}": (radon, measured, known, [*shown, "sigma_y"])
            for k, (known, shown) in levels.items()
        },
        "seeds_stanified_model": (seeds, germination, {"centred": False}, fixed),
        "seeds_centered_model": (seeds, germination, {"centred": True}, fixed),
        "seeds_model": (vague_seeds, germination, {}, [*fixed, "tau"]),
        "surgical_model": (surgical, operated, {}, ["mu", "sigmasq"]),
        "GLMM_Poisson_model": (falcons, counted, {}, [*betas, "sigma"]),
        "lsat_model": (lsat, (student, question, right.ravel()), {}, ["beta"]),
        "rats_model": (rats, growth, {}, ["mu_alpha", "mu_beta", "sigma_y"]),
    }


def main() -> None:
    """Run and print everything."""
    parser = argparse.ArgumentParser(description=__doc__.split("\n")[0])
    parser.add_argument("--points", type=int, default=512)
    parser.add_argument("--only", nargs="+", help="names of models, all by default")
    parser.add_argument("--json", type=Path)
    args = parser.parse_args()
    jax.config.update("jax_enable_x64", True)
    found = {}
    for name, (model, given, known, shown) in posteriors().items():
        if args.only and name not in args.only:
            continue
        start = sum(os.times()[:2])
        nested = gpaug.NestedVI(model, num_points=args.points, progress_bar=False)
        nested.run(jax.random.key(0), *given, **known)
        fields, table = nested.get_extra_fields(), nested.summary()
        found[name] = {
            "certified": nested.certified,
            "khat": float(fields["khat"]),
            "evidence": float(fields["log_evidence"]),
            "seconds": sum(os.times()[:2]) - start,
            **{k: [float(table.loc[k, c]) for c in ("mean", "sd")] for k in shown},
        }
        print(name)
        print(nested)
        print(table.loc[shown, ["mean", "sd"]].round(3).to_string(), "\n", flush=True)
    if args.json:
        args.json.write_text(json.dumps(found, indent=1))


if __name__ == "__main__":
    main()
