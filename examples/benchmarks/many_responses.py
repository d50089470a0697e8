# SPDX-License-Identifier: Apache-2.0
"""The same negative binomial mixed model for thousands of responses (genes), by
``ConjugateSVI.run_many``.

Each response has counts in ``--rows`` cells of ``--subjects`` subjects, whose effects,
an intercept, a slope, the standard deviation of the effects and the size of the
negative binomial are unknown. Responses share covariates and subjects, and nothing
else::

    python examples/benchmarks/many_responses.py --responses 10000 --json many.json

``seconds`` are the wall's and ``cpu`` the processor's, of a first run, which compiles,
and of a second one. ``each`` is the processor's milliseconds of one response.
``apart`` compares ``--single`` responses with runs of their own: the largest distance
of means of latents in posterior standard deviations, the largest relative difference of
these, and the median over the responses of both. ``--x64`` computes in float64, where
only the tolerance of the fits keeps them apart.
"""

from __future__ import annotations

import json
import os
import time
from argparse import ArgumentParser, Namespace, RawDescriptionHelpFormatter
from collections import Counter
from collections.abc import Callable
from pathlib import Path
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import numpyro
import numpyro.distributions as dist
from common import machine, peak_memory, versions

import numpyro_gpaug as gpaug


def model(x: Any, subject: Any, subjects: int, y: Any = None) -> None:
    """Counts of one gene."""
    size = numpyro.sample("size", dist.Gamma(2.0, 0.1))
    tau = numpyro.sample("tau", dist.Gamma(2.0, 2.0))
    slope = numpyro.sample("slope", dist.Normal(0, 3.0).expand([2]).to_event(1))
    with numpyro.plate("subjects", subjects):
        effect = numpyro.sample("effect", dist.Normal(0, tau))
    with numpyro.plate("cells", len(x)):
        mean = jnp.exp(slope[0] + slope[1] * x + effect[subject])
        numpyro.sample("y", dist.NegativeBinomial2(mean, size), obs=y)


def simulated(how: Namespace) -> tuple[np.ndarray, np.ndarray, np.ndarray]:
    """Covariate, subjects, and the counts of all responses."""
    rng = np.random.default_rng(0)
    number = how.responses
    x, subject = rng.normal(size=how.rows), np.arange(how.rows) % how.subjects
    base, slope = rng.normal(1.5, 1, number), rng.normal(0, 0.5, number)
    tau, size = rng.gamma(2, 0.3, number), 0.3 + rng.gamma(2, 2, number)
    effect = tau[:, None] * rng.normal(size=(number, how.subjects))
    mean = np.exp(base[:, None] + slope[:, None] * x + effect[:, subject])
    size = size[:, None]
    return x, subject, rng.negative_binomial(size, size / (size + mean))


def timed(function: Callable[[], Any]) -> tuple[Any, dict[str, float]]:
    """The result, and seconds of the wall and of the processor."""
    wall, before = time.perf_counter(), os.times()
    found = function()
    after = os.times()
    cpu = after.user + after.system - before.user - before.system
    return found, {"seconds": time.perf_counter() - wall, "cpu": cpu}


def compared(svi: Any, fits: Any, given: Any, how: Namespace) -> dict[str, float]:
    """Some responses beside runs of their own."""
    x, subject, y = given
    means, spreads = [], []
    chosen = np.linspace(0, len(fits) - 1, how.single).astype(int)
    for i in chosen:
        result = svi.run(
            jax.random.key(0), how.steps, x, subject, how.subjects, y[i],
            progress_bar=False,
        )  # fmt: skip
        single = svi.posterior(result)
        for site in ("slope", "effect"):
            mean, variance = single[site].mean, np.asarray(single[site].variance)
            far = (fits[site].mean[i] - mean) / np.sqrt(variance)
            means.append((i, float(np.abs(far).max())))
            ratio = np.sqrt(fits[site].variance[i] / variance)
            spreads.append((i, float(np.abs(ratio - 1).max())))

    def over(pairs: list[tuple[int, float]]) -> list[float]:
        return [max(v for j, v in pairs if j == i) for i in chosen]

    found: dict[str, float] = {}
    for name, values in (("mean", over(means)), ("sd", over(spreads))):
        found[f"{name}, largest"] = max(values)
        found[f"{name}, median"] = float(np.median(values))
    return found


def main() -> None:
    """Run and print."""
    parser = ArgumentParser(
        description=__doc__, formatter_class=RawDescriptionHelpFormatter
    )
    parser.add_argument("--responses", type=int, default=1000)
    parser.add_argument("--rows", type=int, default=200)
    parser.add_argument("--subjects", type=int, default=20)
    parser.add_argument("--steps", type=int, default=200)
    parser.add_argument("--single", type=int, default=20)
    parser.add_argument("--x64", action="store_true")
    parser.add_argument("--json", type=Path, help="write the results there")
    how = parser.parse_args()
    jax.config.update("jax_enable_x64", how.x64)
    x, subject, y = simulated(how)
    svi = gpaug.ConjugateSVI(model, gpaug.AutoLatentGaussian(model))

    def run() -> Any:
        return svi.run_many(
            jax.random.key(0), how.steps, x, subject, how.subjects, y, over="y",
            progress_bar=False,
        )  # fmt: skip

    _, first = timed(run)
    fits, second = timed(run)
    found = {
        "responses": how.responses, "rows": how.rows, "subjects": how.subjects,
        "first": first, "second": second, "each": 1e3 * second["cpu"] / how.responses,
        "steps": float(fits.steps.mean()), "MiB": peak_memory(),
        "verdicts": dict(Counter(fits.verdicts)),
    }  # fmt: skip
    if how.single:
        found["apart"] = compared(svi, fits, (x, subject, y), how)
    found |= {"machine": machine(), "versions": versions("jax", "numpyro")}
    print(json.dumps(found, indent=2))
    if how.json:
        how.json.write_text(json.dumps(found, indent=2))


if __name__ == "__main__":
    main()
