# SPDX-License-Identifier: Apache-2.0
"""Hundreds of skewed latents, where k-hat is near its limit: what runs of ``NestedVI``
with one key after another say of a scale, beside long NUTS chains.

Groups have a few binary data each, and effects whose scale ``tau`` is integrated. A row
is a run: its k-hat, its mean of ``tau``, how many of the run's own Monte Carlo errors
(``n_eff`` of the summary) and posterior deviations (``sds``) that is from NUTS's mean,
and processor seconds, compilation included for the first of a kind::

    python examples/benchmarks/skewed.py --keys 8

The rows below have ``correct="mcmc"`` with the key whose k-hat was largest, and NUTS
itself: one chain, and ``--chains`` of them, the reference.
"""

from __future__ import annotations

import argparse
import time
import warnings
from pathlib import Path
from typing import Any

import jax
import numpy as np
import numpyro
import numpyro.distributions as dist
from common import print_table, write_report
from numpyro.diagnostics import effective_sample_size
from numpyro.infer import MCMC, NUTS
from numpyro.infer.reparam import LocScaleReparam

import numpyro_gpaug as gpaug

COLUMNS = {"way": "", "khat": ".2f", "certified": "", "tau": ".3f", "n_eff": ".0f"}
COLUMNS |= {"errors": ".1f", "sds": ".2f", "seconds": ".1f"}


def model(group: Any, y: Any = None, *, groups: int) -> None:
    level = numpyro.sample("level", dist.Normal(0, 3))
    tau = numpyro.sample("tau", dist.HalfNormal(3))
    with numpyro.plate("groups", groups):
        effect = numpyro.sample("effect", dist.Normal(0, tau))
    with numpyro.plate("data", len(group)):
        numpyro.sample("y", dist.Bernoulli(logits=level + effect[group]), obs=y)


def data(groups: int, each: int, seed: int) -> tuple[np.ndarray, np.ndarray]:
    rng = np.random.default_rng(seed)
    group = np.repeat(np.arange(groups), each)
    uniform = rng.uniform(size=len(group))
    logits = -1 + rng.normal(0, 2.5, groups)[group]
    return group, (uniform < 1 / (1 + np.exp(-logits))).astype(int)


def by_nuts(way: str, chains: int, group: Any, y: Any, groups: int) -> dict[str, Any]:
    start = time.process_time()
    config = {"effect": LocScaleReparam(0)}
    kernel = NUTS(numpyro.handlers.reparam(model, config=config))
    mcmc = MCMC(
        kernel, num_warmup=1000, num_samples=2000 if chains == 1 else 10_000,
        num_chains=chains, chain_method="sequential", progress_bar=False,
    )  # fmt: skip
    mcmc.run(jax.random.key(1), group, y, groups=groups)
    tau = np.asarray(mcmc.get_samples(group_by_chain=True)["tau"], float)
    found = {"way": way, "tau": tau.mean(), "sd": tau.std()}
    found["n_eff"] = float(effective_sample_size(tau))
    return found | {"seconds": time.process_time() - start}


def by_nested(way: str, key: int, group: Any, y: Any, **how: Any) -> dict[str, Any]:
    start = time.process_time()
    groups = how.pop("groups")
    nested = gpaug.NestedVI(model, progress_bar=False, **how)
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # the table says what it warns of
        nested.run(jax.random.key(key), group, y, groups=groups)
    row = nested.summary().loc["tau"]
    found = {"way": way, "khat": float(nested.get_extra_fields()["khat"])}
    found |= {"certified": str(nested.certified), "tau": row["mean"], "sd": row["sd"]}
    return found | {"n_eff": row["n_eff"], "seconds": time.process_time() - start}


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--groups", type=int, default=400)
    parser.add_argument("--each", type=int, default=2, help="binary data of a group")
    parser.add_argument("--keys", type=int, default=8)
    parser.add_argument("--chains", type=int, default=2)
    parser.add_argument("--seed", type=int, default=5, help="of the data")
    parser.add_argument("--json", type=Path)
    args = parser.parse_args()
    group, y = data(args.groups, args.each, args.seed)
    how = {"groups": args.groups}
    rows = [by_nested(f"key {k}", k, group, y, **how) for k in range(args.keys)]
    worst = int(np.argmax([row["khat"] for row in rows]))
    rows.append(by_nested('correct="mcmc"', worst, group, y, correct="mcmc", **how))
    rows.append(by_nuts("NUTS", 1, group, y, args.groups))
    reference = by_nuts("NUTS, long", args.chains, group, y, args.groups)
    for row in rows:
        row["sds"] = (row["tau"] - reference["tau"]) / reference["sd"]
        row["errors"] = row["sds"] * reference["sd"] / row["sd"] * row["n_eff"] ** 0.5
    rows.append(reference)
    print_table(rows, COLUMNS)
    write_report(args.json, rows)


if __name__ == "__main__":
    main()
