# SPDX-License-Identifier: Apache-2.0
"""The times on the landing page: two models of published data, everything integrated.

``vans``: the series of ``docs/index.md``. ``herds``: the mixed model of
``docs/gallery/mixed_model.md``. Processor seconds from a start without compiled
programs (imports excluded) until every latent and hyperparameter has 1000 effective
draws: ``NestedVI``, and NumPyro's NUTS on the whitened model, with as many steps of
warm-up as draws. ``again`` is the same for a second run of the same shapes. glmer of
R's lme4, where ``Rscript`` is installed, maximises the likelihood, and integrates no
hyperparameter::

    python examples/benchmarks/landing.py --json landing.json
"""

from __future__ import annotations

import argparse
import json
import os
import shutil
import subprocess
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
from numpyro.diagnostics import effective_sample_size
from numpyro.infer import MCMC, NUTS

import numpyro_gpaug as gpaug

DATA = Path(__file__).parents[1] / "data"
GLMER = """
suppressMessages(library(lme4))
d <- read.csv("{path}")
d$period <- factor(d$period)
start <- sum(proc.time()[1:2])
m <- glmer(cbind(incidence, size - incidence) ~ period + (1 | herd), d, binomial)
cat(sum(proc.time()[1:2]) - start, "\n")
"""


def vans(month, belts, killed=None, *, white=False):
    """Counts of a series: level, walk, season, and the effect of seat belts."""
    n = len(month)
    sd = numpyro.sample("sd", dist.HalfNormal(0.1))
    level = numpyro.sample("level", dist.Normal(2, 1))
    if white:
        z = numpyro.sample("z", dist.Normal(0, 1).expand([n]).to_event(1))
        walk = numpyro.deterministic("walk", sd * jnp.cumsum(z))
    else:
        walk = numpyro.sample("walk", dist.GaussianRandomWalk(sd, n))
    season = numpyro.sample("season", dist.ZeroSumNormal(0.3, (12,)))
    effect = numpyro.sample("effect", dist.Normal(0, 0.5))
    rate = jnp.exp(level + walk + season[month] + effect * belts)
    with numpyro.plate("months", n):
        numpyro.sample("killed", dist.Poisson(rate), obs=killed)


def herds(herd, period, size, sick=None, *, white=False):
    """A binomial mixed model."""
    level = numpyro.sample("level", dist.Normal(-1.5, 1.5))
    change = numpyro.sample("change", dist.Normal(0, 1.5).expand([3]).to_event(1))
    tau = numpyro.sample("tau", dist.HalfNormal(1))
    with numpyro.plate("herds", 15):
        unit = tau if not white else 1.0
        effect = numpyro.sample("z" if white else "effect", dist.Normal(0, unit))
    if white:
        effect = numpyro.deterministic("effect", tau * effect)
    logits = level + effect[herd] + jnp.append(0.0, change)[period]
    with numpyro.plate("rows", len(herd)):
        numpyro.sample("sick", dist.Binomial(size, logits=logits), obs=sick)


def data() -> dict[str, tuple[Any, tuple]]:
    """Models with their arguments."""
    v, h = (pd.read_csv(DATA / f"{name}.csv") for name in ("vandrivers", "cbpp"))
    return {
        "vans": (vans, (v.month.to_numpy() - 1, v.belts.to_numpy(),
                        v.killed.to_numpy())),
        "herds": (herds, (h.herd.to_numpy() - 1, h.period.to_numpy() - 1,
                          h["size"].to_numpy(), h.incidence.to_numpy())),
    }  # fmt: skip


def clock() -> float:
    """Processor seconds of this process."""
    return sum(os.times()[:2])


def nested(model: Any, args: tuple) -> dict[str, Any]:
    """Seconds to 1000 effective draws, the first time and again."""
    found = gpaug.NestedVI(model, progress_bar=False)
    seconds, worth = [], []
    for seed in range(2):
        start = clock()
        found.run(jax.random.key(seed), *args)
        jax.block_until_ready(found.get_samples())
        seconds.append(clock() - start)
        worth.append(found.summary()["n_eff"].min())
    (first, again), enough = seconds, 1000 / np.array(worth)
    return {
        "first": first + again * max(enough[0] - 1, 0),
        "again": again * max(enough[1], 1),
        "draws": float(worth[0]),
        "certified": bool(found.certified),
    }


def nuts(model: Any, args: tuple, draws: int) -> dict[str, Any]:
    """Return the same for NUTS; half of its steps are warm-up."""
    mcmc = MCMC(NUTS(model), num_warmup=draws, num_samples=draws, progress_bar=False)
    seconds = []
    for seed in range(2):
        start = clock()
        mcmc.run(jax.random.key(seed), *args, white=True)
        samples = {name: np.asarray(x)[None] for name, x in mcmc.get_samples().items()}
        seconds.append(clock() - start)
    worth = min(float(np.min(effective_sample_size(x))) for x in samples.values())
    more = max(1000 / worth - 1, 0) * seconds[1] / 2
    return {"first": seconds[0] + more, "again": seconds[1] + more, "draws": worth}


def glmer() -> float | None:
    """Processor seconds of lme4."""
    if shutil.which("Rscript") is None:
        return None
    code = GLMER.replace("{path}", str(DATA / "cbpp.csv"))
    done = subprocess.run(["Rscript", "-e", code], capture_output=True, text=True)
    return float(done.stdout) if done.returncode == 0 else None


def main() -> None:
    """Run and print everything."""
    parser = argparse.ArgumentParser(description=__doc__.split("\n")[0])
    parser.add_argument("--draws", type=int, default=2000, help="of NUTS")
    parser.add_argument("--json", type=Path)
    args = parser.parse_args()
    found: dict[str, Any] = {}
    for name, (model, given) in data().items():
        found[name] = {"NestedVI": nested(model, given)}
        found[name]["NUTS"] = nuts(model, given, args.draws)
        for route, row in found[name].items():
            print(
                f"{name:6} {route:9}", {k: round(float(v), 2) for k, v in row.items()}
            )
    found["glmer"] = glmer()
    print("herds  glmer    ", found["glmer"])
    if args.json:
        args.json.write_text(json.dumps(found, indent=1))


if __name__ == "__main__":
    main()
