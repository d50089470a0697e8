# SPDX-License-Identifier: Apache-2.0
"""The expected log-likelihood of one datum: augmented bounds, exact rules, brute force.

``labels``: Bernoulli with logits f ~ N(-1, v), label 1. ``classes``: three classes,
label 0, latents with means (1, 0, -1) and variances (v, v/2, 2v). ``augmented`` is the
bound by Polya-Gamma variables; for the logistic-softmax the rate is integrated out.
``published`` is the bound of Galy-Fajou et al. (2020), with independent auxiliaries.
``exact`` is the package's deterministic rule. ``nodes`` is Gauss-Hermite quadrature
with as many nodes per latent, in double precision. ``brute`` is a sum over a grid, in
double precision. ``precision`` is what the datum adds to the precision of (the first)
f, by the augmented and by the exact rule; their ratio shows the overconfidence of a
fit::

    python examples/benchmarks/bounds.py
"""

from __future__ import annotations

import argparse
from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import numpyro.distributions as dist
from common import print_table
from scipy import special

import numpyro_gpaug as gpaug
from numpyro_gpaug.likelihoods import lookup_augmentation

VARIANCES = 0.01, 1.0, 4.0, 25.0, 100.0
MEANS, SHARES = np.array([1.0, 0.0, -1.0]), np.array([1.0, 0.5, 2.0])
Log = Callable[[np.ndarray], np.ndarray]


def log_softmax(f: np.ndarray) -> np.ndarray:
    return f[0] - special.logsumexp(f, 0)


def log_logistic_softmax(f: np.ndarray) -> np.ndarray:
    return special.log_expit(f[0]) - special.logsumexp(special.log_expit(f), 0)


def log_sigmoid(f: np.ndarray) -> np.ndarray:
    return special.log_expit(f[0])


def product_rule(
    log: Log, m: np.ndarray, v: np.ndarray, x: np.ndarray, w: np.ndarray
) -> float:
    """Nodes and weights of a standard normal variable, for each latent."""
    axes = np.meshgrid(*[x] * len(m), indexing="ij")
    f = [a + np.sqrt(b) * axis for a, b, axis in zip(m, v, axes, strict=True)]
    values = log(np.stack(f))
    for _ in m:
        values = values @ w / w.sum()
    return float(values)


def rules(num_latents: int) -> dict[str, tuple[np.ndarray, np.ndarray]]:
    """Gauss-Hermite, and a grid so fine that twice as many change nothing."""
    x, w = np.polynomial.hermite_e.hermegauss(20)
    grid = np.linspace(-9, 9, 20_001 if num_latents == 1 else 181)
    return {"nodes": (x, w), "brute": (grid, np.exp(-(grid**2) / 2))}


def line(
    name: str,
    bounds: dict[str, Any],
    exact: Any,
    log: Log,
    m: np.ndarray,
    v: np.ndarray,
) -> dict[str, Any]:
    """One datum; ``bounds`` and ``exact`` are functions of means and variances."""
    at = jnp.asarray(m), jnp.asarray(v)
    row = {"likelihood": name, "v": v[0]}
    for way, function in {**bounds, "exact": exact}.items():
        value, slopes = jax.value_and_grad(function, 1)(*at)
        row |= {way: float(value), f"{way}_precision": -2 * float(slopes[0])}
    for way, (x, w) in rules(len(m)).items():
        row[way] = product_rule(log, m, v, x, w)
    return row


def labels(v: float) -> list[dict[str, Any]]:
    augmentation, y = lookup_augmentation(dist.BernoulliLogits), jnp.array(1)

    def bound(m: Any, v: Any) -> Any:
        d = dist.Bernoulli(logits=m[0])
        return augmentation.bound(d, y, {"logits": m[0]}, {"logits": v[0]})

    def exact(m: Any, v: Any) -> Any:
        d = dist.Bernoulli(logits=m[0])
        return gpaug.expected_log_prob(d, y, {"logits": m[0]}, {"logits": v[0]})

    m, ways = np.array([-1.0]), {"augmented": bound}
    return [line("Bernoulli", ways, exact, log_sigmoid, m, np.array([v]))]


def classes(v: float) -> list[dict[str, Any]]:
    def expected(make: Any) -> Any:
        def exact(m: Any, v: Any) -> Any:
            at = {"logits": m}, {"logits": v}
            return gpaug.expected_log_prob(make(m), jnp.array(0), *at)

        return exact

    def bound(make: Any) -> Any:
        augmentation = lookup_augmentation(make)

        def value(m: Any, v: Any) -> Any:
            at = {"logits": m}, {"logits": v}
            return augmentation.bound(make(m), jnp.array(0), *at)

        return value

    logistic, published = gpaug.LogisticSoftmax, gpaug.LogisticSoftmaxMeanField
    bounds = {"published": bound(published), "augmented": bound(logistic)}
    at = MEANS, v * SHARES
    softmax = expected(lambda f: dist.Categorical(logits=f))
    return [
        line("logistic-softmax", bounds, expected(logistic), log_logistic_softmax, *at),
        line("softmax", {}, softmax, log_softmax, *at),
    ]


def main() -> None:
    """Print the table."""
    parser = argparse.ArgumentParser(description=__doc__.split("\n")[0])
    parser.add_argument("--dtype", default="float32", choices=("float32", "float64"))
    args = parser.parse_args()
    jax.config.update("jax_enable_x64", args.dtype == "float64")
    both = [(labels(v), classes(v)) for v in VARIANCES]
    lines = [line for part in zip(*both, strict=True) for rows in part for line in rows]
    lines.sort(key=lambda row: row["likelihood"])
    values = "published", "augmented", "exact", "nodes", "brute"
    columns = {"likelihood": "", "v": "g", **dict.fromkeys(values, ".5f")}
    columns |= dict.fromkeys(("augmented_precision", "exact_precision"), ".4f")
    print(args.dtype)
    print_table(lines, columns)


if __name__ == "__main__":
    main()
