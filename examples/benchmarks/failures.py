# SPDX-License-Identifier: Apache-2.0
"""Posteriors that samplers fail on, by ``NestedVI``: k-hat of its draws, and their
distance from brute-force sums.

``funnel``: eight schools, centred, with effects a tenth of the published ones, so that
most of tau is near zero. ``binary funnel``: twelve groups with two binary data each
under Neal's prior of scales. ``two modes``: a process through seven points that is
short and precise or long and noisy. ``separable``: logistic regression on labels that a
line separates, with prior standard deviations of 100.

``khat`` and ``certified`` describe the weighted draws. ``off`` is the largest
difference of a 5%, 50% or 95% quantile of the quantity ``of``, in standard deviations.
``mcmc off`` is the same with ``correct="mcmc"`` (8000 draws of four chains), where they
are not certified::

    GPAUG_DATA=/path/to/data python examples/benchmarks/failures.py
"""

from __future__ import annotations

import argparse
import warnings
from collections.abc import Callable
from pathlib import Path
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import numpyro
import numpyro.distributions as dist
from common import print_table, write_report
from nested import eight_schools, folder
from scipy import special, stats

import numpyro_gpaug as gpaug
from numpyro_gpaug.math.importance import weighted_quantiles

LEVELS = (0.05, 0.5, 0.95)
# If chains change between modes a few times in a hundred draws, 1000 draws are worth
# a hundred: the share of a mode is then off by a tenth.
LONG = 8000
COLUMNS = {"case": "", "of": "", "latents": "d", "khat": ".2f", "certified": ""}
COLUMNS |= {"off": ".3f", "mcmc off": ".3f", "evidence": ".3f", "error": ".3f"}
COLUMNS |= {"exact": ".3f"}
# A name, its values on a grid, and log-densities there (for a positive quantity, the
# density of its logarithm).
Exact = tuple[str, np.ndarray, np.ndarray]


def schools() -> tuple[Any, tuple[Any, ...], Exact]:
    with np.load(folder() / "lgm_eight_schools.npz") as file:
        y, sigma = file["y"] / 10, file["sigma"]
    log_tau = np.linspace(-14, 7, 2001)
    logs: Any = [
        stats.multivariate_normal.logpdf(
            y, cov=np.diag(np.exp(2 * t) + np.square(sigma)) + 25.0
        )
        for t in log_tau
    ]
    prior = stats.halfcauchy(0, 5).logpdf(np.exp(log_tau)) + log_tau
    return eight_schools, (y, sigma), ("tau", np.exp(log_tau), logs + prior)


def binary(y: Any) -> None:
    v = numpyro.sample("v", dist.Normal(0, 3))
    with numpyro.plate("groups", len(y)):
        x = numpyro.sample("x", dist.Normal(0, jnp.exp(v / 2)))
        numpyro.sample("y", dist.Binomial(2, logits=x), obs=y)


def funnel() -> tuple[Any, tuple[Any, ...], Exact]:
    y = np.array([0, 0, 0, 1, 1, 1, 1, 1, 1, 2, 2, 2])
    v, white = np.linspace(-12, 14, 521), np.linspace(-8, 8, 8001)
    weights = stats.norm.logpdf(white) + np.log(white[1] - white[0])

    def given(v: float) -> float:
        p = special.expit(np.exp(v / 2) * white)
        terms = stats.binom.logpmf(np.arange(3)[:, None], 2, p)
        return special.logsumexp(terms + weights, axis=1)[y].sum()

    logs = np.array([given(x) for x in v]) + stats.norm.logpdf(v, 0, 3)
    return binary, (y,), ("v", v, logs)


X = np.array([-6.0, -4.2, -1.1, 0.2, 1.4, 3.9, 5.8])


def smooth(y: Any) -> None:
    lengthscale = numpyro.sample("lengthscale", dist.LogNormal(0.5, 1.5))
    noise = numpyro.sample("noise", dist.LogNormal(-2.0, 1.5))
    K = gpaug.kernels.SquaredExponential(lengthscale, 1.0)(X[:, None], X[:, None])
    f = numpyro.sample(
        "f", dist.MultivariateNormal(jnp.zeros(7), K + 1e-6 * jnp.eye(7))
    )
    with numpyro.plate("data", 7):
        numpyro.sample("y", dist.Normal(f, noise), obs=y)


def two_modes() -> tuple[Any, tuple[Any, ...], Exact]:
    y = np.array([-1.3, -0.2, 0.9, -0.4, 1.1, 0.5, 1.4])
    log_l, log_s = np.linspace(-5, 7, 161), np.linspace(-9, 4, 161)
    squares = np.square(X[:, None] - X)

    def given(log_l: float, log_s: float) -> float:
        K = np.exp(-0.5 * squares / np.exp(2 * log_l))
        K = K + (1e-6 + np.exp(2 * log_s)) * np.eye(7)
        return stats.multivariate_normal.logpdf(y, cov=K)

    logs = np.array([[given(a, b) for b in log_s] for a in log_l])
    logs += stats.norm.logpdf(log_l, 0.5, 1.5)[:, None]
    logs += stats.norm.logpdf(log_s, -2.0, 1.5)
    step = log_s[1] - log_s[0]
    kept = special.logsumexp(logs, axis=1) + np.log(step)
    return smooth, (y,), ("lengthscale", np.exp(log_l), kept)


def logistic(x: Any, y: Any) -> None:
    b = numpyro.sample("b", dist.Normal(0, 100).expand([2]).to_event(1))
    with numpyro.plate("data", len(x)):
        numpyro.sample("y", dist.Bernoulli(logits=b[0] + b[1] * x), obs=y)


def separable() -> tuple[Any, tuple[Any, ...], Exact]:
    x = np.linspace(-1, 1.2, 12)
    y = (x > 0).astype(int)
    b0, b1 = np.linspace(-300, 300, 1201), np.linspace(-20, 500, 1041)
    eta = b0[:, None] + b1[None, :]
    logs = np.zeros_like(eta)
    for xi, yi in zip(x, y, strict=True):
        logs -= np.logaddexp(0, np.where(yi, -1, 1) * (b0[:, None] + b1 * xi))
    logs += stats.norm.logpdf(b0, 0, 100)[:, None] + stats.norm.logpdf(b1, 0, 100)
    kept = special.logsumexp(logs, axis=0) + np.log(b0[1] - b0[0])
    return logistic, (x, y), ("b", b1, kept)


CASES: dict[str, Callable[[], tuple[Any, tuple[Any, ...], Exact]]] = {
    "funnel": schools, "binary funnel": funnel, "two modes": two_modes,
    "separable": separable,
}  # fmt: skip


def row(case: str) -> dict[str, Any]:
    model, data, (name, values, logs) = CASES[case]()
    steps = np.gradient(np.log(values) if (values > 0).all() else values)
    logs = logs + np.log(steps)
    weights = special.softmax(logs)
    truth = weighted_quantiles(values[:, None], weights, LEVELS)[:, 0]
    sd = np.sqrt(weights @ np.square(values - weights @ values))
    # A heavy tail's standard deviation is not a scale.
    sd = min(sd, truth[2] - truth[0])

    def run(correct: str | None) -> tuple[Any, float]:
        nested = gpaug.NestedVI(
            model, correct=correct, num_samples=LONG, progress_bar=False
        )
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")
            nested.run(jax.random.key(0), *data)
        corrected = correct is not None
        draws = np.asarray(nested.get_samples(weighted=not corrected)[name], float)
        draws = draws.reshape(len(draws), -1)[:, -1:]
        log_weights = nested.get_extra_fields()["log_weights"]
        own = np.ones(len(draws)) if corrected else np.exp(log_weights)
        found = weighted_quantiles(draws, own / own.sum(), LEVELS)[:, 0]
        return nested, float(np.abs(found - truth).max() / sd)

    nested, off = run(None)
    fields = nested.get_extra_fields()
    found = {"case": case, "of": name, "latents": nested._run.z.shape[-1]}
    found |= {"khat": fields["khat"], "certified": str(nested.certified), "off": off}
    found |= {"evidence": fields["log_evidence"]}
    found |= {"error": fields["log_evidence_error"], "exact": special.logsumexp(logs)}
    if not nested.certified:
        found["mcmc off"] = run("mcmc")[1]
    return found


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--cases", nargs="+", default=[*CASES], choices=CASES)
    parser.add_argument("--json", type=Path)
    args = parser.parse_args()
    jax.config.update("jax_enable_x64", True)
    rows = [row(case) for case in args.cases]
    print_table(rows, COLUMNS)
    write_report(args.json, rows)


if __name__ == "__main__":
    main()
