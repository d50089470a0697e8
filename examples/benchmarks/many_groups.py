# SPDX-License-Identifier: Apache-2.0
"""Many groups of few binary data, beside sums over everything.

A random intercept of each group, simulated with ``--spread`` and ``--labels`` of each
group; their sums and the two hyperparameters of the model make the posterior and the
evidence known by quadrature. ``apart`` rows weigh groups apart, as ``NestedVI`` does
where it can; ``at once`` rows weigh all latents by one weight, as it does elsewhere.
``tau`` is how far the mean is from the exact one, in posterior standard deviations,
``nats`` how far the evidence is, beside its standard error; ``n_eff`` is the smaller
of the two hyperparameters', and seconds are of the processor, compiling included::

    python examples/benchmarks/many_groups.py --json many_groups.json
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
from scipy.special import logsumexp

import numpyro_gpaug as gpaug
from numpyro_gpaug.infer.nested import group_draws

COLUMNS = {"groups": "d", "weighed": "", "khat": ".2f", "tau": ".2f", "nats": ".3f"}
COLUMNS |= {"error": ".3f", "n_eff": ".0f", "seconds": ".1f"}
# Prior scales of the level and of the standard deviation.
LEVEL, SPREAD = 3.0, 3.0


def model(group: Any, y: Any = None, *, groups: int) -> None:
    a = numpyro.sample("a", dist.Normal(0, LEVEL))
    tau = numpyro.sample("tau", dist.HalfNormal(SPREAD))
    with numpyro.plate("groups", groups):
        e = numpyro.sample("e", dist.Normal(0, tau))
    with numpyro.plate("data", len(group)):
        numpyro.sample("y", dist.Bernoulli(logits=a + e[group]), obs=y)


def simulated(groups: int, labels: int, spread: float, seed: int) -> Any:
    rng = np.random.default_rng(seed)
    group = np.repeat(np.arange(groups), labels)
    logits = -1 + rng.normal(0, spread, groups)[group]
    return group, (rng.random(len(group)) < 1 / (1 + np.exp(-logits))).astype(int)


def exactly(y: np.ndarray, labels: int) -> tuple[float, float, float]:
    """The evidence, and mean and standard deviation of ``tau``."""
    nodes, weights = np.polynomial.hermite_e.hermegauss(81)
    levels, taus = np.linspace(-4, 2, 241), np.linspace(0.01, 8, 320)
    logits = levels[:, None, None] + taus[None, :, None] * nodes
    total = -0.5 * (levels[:, None] / LEVEL) ** 2 - 0.5 * (taus / SPREAD) ** 2
    total -= np.log(np.pi * LEVEL * SPREAD)
    counts = np.bincount(y.reshape(-1, labels).sum(1), minlength=labels + 1)
    for ones, count in enumerate(counts):
        each = ones * logits - labels * np.logaddexp(0, logits)
        total += count * logsumexp(each, axis=-1, b=weights / weights.sum())
    cell = np.diff(levels)[0] * np.diff(taus)[0]
    evidence = logsumexp(total) + np.log(cell)
    mass = np.exp(total + np.log(cell) - evidence).sum(0)
    mean = (mass * taus).sum()
    return evidence, mean, np.sqrt((mass * (taus - mean) ** 2).sum())


def row(groups: int, weighed: str, args: argparse.Namespace) -> dict[str, Any]:
    group, y = simulated(groups, args.labels, args.spread, args.seed)
    evidence, mean, sd = exactly(y, args.labels)
    fewest, begun = group_draws.FEWEST, time.process_time()
    group_draws.FEWEST = fewest if weighed == "apart" else np.inf
    nested = gpaug.NestedVI(model, num_points=args.points, progress_bar=False)
    try:
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")  # k-hat is in the table
            nested.run(jax.random.key(args.key), group, y, groups=groups)
    finally:
        group_draws.FEWEST = fewest
    seconds = time.process_time() - begun
    fields, table = nested.get_extra_fields(), nested.summary()
    return {
        "groups": groups, "weighed": weighed, "khat": fields["khat"],
        "tau": (table.loc["tau", "mean"] - mean) / sd,
        "nats": fields["log_evidence"] - evidence,
        "error": fields["log_evidence_error"],
        "n_eff": float(table.loc[["a", "tau"], "n_eff"].min()), "seconds": seconds,
    }  # fmt: skip


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--groups", type=int, nargs="+", default=[100, 400, 4000])
    parser.add_argument("--labels", type=int, default=2)
    parser.add_argument("--spread", type=float, default=2.5)
    parser.add_argument("--points", type=int, default=512)
    parser.add_argument("--seed", type=int, default=5)
    parser.add_argument("--key", type=int, default=0)
    parser.add_argument("--json", type=Path)
    args = parser.parse_args()
    rows = [row(n, w, args) for n in args.groups for w in ("at once", "apart")]
    print_table(rows, COLUMNS)
    write_report(args.json, rows)


if __name__ == "__main__":
    main()
