# SPDX-License-Identifier: Apache-2.0
r"""A sum over K cells beside Monte Carlo with S draws: seconds and gradient errors.

One step is what a gradient optimiser computes: the bound of a sparse process with
labels 0/1 and its gradient in the variational parameters and the lengthscale (and,
where the link is learnt, in its heights). Both share the algebra of the process; Monte
Carlo draws S function values per datum from the marginals and differentiates through
them. Variants take turns, so that other work on the machine meets all alike::

    python examples/benchmarks/links.py
"""

from __future__ import annotations

import argparse
import json
import statistics
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import numpyro.distributions as dist
from common import machine, print_table

import numpyro_gpaug as gpaug
from numpyro_gpaug.math.logistic import expected_log_sigmoid

COLUMNS = {
    "step": "",
    "milliseconds": ".2f",
    "ratio": ".2f",
    "gradient_error": ".1e",
}
Params = dict[str, jax.Array]


def marginals(params: Params, X: jax.Array, Z: jax.Array) -> tuple[Any, ...]:
    """Mean and variance at the data, and the KL, in whitened coordinates."""
    kernel = gpaug.kernels.SquaredExponential(jnp.exp(params["log_lengthscale"]), 2.0)
    gram = kernel(Z, Z) + 1e-4 * jnp.eye(len(Z))
    factor = jnp.linalg.cholesky(gram)
    A = jax.scipy.linalg.solve_triangular(factor, kernel(Z, X), lower=True)
    L = jnp.tril(params["tril"])
    variance = kernel(X) - jnp.square(A).sum(0) + jnp.square(L.T @ A).sum(0)
    kl = 0.5 * (jnp.square(L).sum() + jnp.square(params["mean"]).sum() - len(Z))
    kl = kl - jnp.log(jnp.abs(jnp.diag(L))).sum()
    return A.T @ params["mean"], jnp.maximum(variance, 1e-6), kl


def with_cells(link: gpaug.PiecewiseLink) -> Callable:
    """The expectation as a sum over cells, of heights that are learnt if they are among
    the params."""
    fixed = link.heights

    def expected(key, m, v, y, params):
        d = gpaug.PiecewiseBernoulli(m, link.with_heights(params.get("heights", fixed)))
        return gpaug.expected_log_prob(d, y, {"f": m}, {"f": v})

    return expected


def with_draws(num: int) -> Callable:
    """The expectation by draws of the smooth model."""

    def expected(key, m, v, y, params):
        noise = jax.random.normal(key, (num, *m.shape), m.dtype)
        f = m + jnp.sqrt(v) * noise
        return dist.Bernoulli(logits=f).log_prob(y).mean(0)

    return expected


def exactly(key, m, v, y, params):
    """The expectation of the smooth model, to rounding."""
    sign = 2 * y.astype(m.dtype) - 1
    return expected_log_sigmoid(sign * m, v)


def step(expected: Callable) -> Callable:
    """The bound and its gradient, compiled."""

    def loss(params: Params, key, X, y, Z):
        m, v, kl = marginals(params, X, Z)
        return kl - expected(key, m, v, y, params).sum()

    return jax.jit(jax.value_and_grad(loss))


def shared(gradient: Params) -> np.ndarray:
    """The part of a gradient that all variants have."""
    return np.concatenate([
        np.ravel(gradient[k]) for k in ("mean", "tril", "log_lengthscale")
    ])  # fmt: skip


def run(args: argparse.Namespace) -> list[dict[str, Any]]:
    """Times the steps in turn; errors against the smooth model's exact gradient."""
    rng = np.random.default_rng(0)
    X = jnp.asarray(rng.normal(size=(args.rows, 2)), jnp.float32)
    truth = np.sin(2 * X[:, 0]) * X[:, 1]
    y = jnp.asarray(truth > 0.3 * rng.normal(size=args.rows), int)
    Z = jnp.asarray(gpaug.inducing.kmeans(X, args.inducing))
    links = {
        k: gpaug.PiecewiseLink.from_function(jax.nn.sigmoid, k, -6.0, 6.0)
        for k in args.pieces
    }
    eye = jnp.eye(args.inducing)
    base = {
        "mean": jnp.asarray(rng.normal(size=args.inducing), jnp.float32),
        "tril": 0.5 * eye,
        "log_lengthscale": jnp.asarray(0.0),
    }
    variants = {f"{k} cells": (step(with_cells(x)), None) for k, x in links.items()}
    variants |= {
        f"{k} cells, learnt": (step(with_cells(x)), x.heights) for k, x in links.items()
    }
    variants |= {f"{s} draws": (step(with_draws(s)), None) for s in args.draws}
    variants["exact (smooth link)"] = step(exactly), None
    at = {
        name: base | ({} if heights is None else {"heights": heights})
        for name, (_, heights) in variants.items()
    }
    seconds: dict[str, list[float]] = {name: [] for name in variants}
    gradients: dict[str, list[np.ndarray]] = {name: [] for name in variants}
    for i in range(args.repeats + 1):
        for name, (fn, _) in variants.items():
            key = jax.random.key(i)
            start = time.perf_counter()
            gradient = jax.block_until_ready(fn(at[name], key, X, y, Z))[1]
            if i:  # the first compiles
                seconds[name].append(time.perf_counter() - start)
            gradients[name].append(shared(gradient))
    truth = gradients["exact (smooth link)"][0]
    reference = statistics.median(seconds[f"{args.draws[0]} draws"])
    rows = []
    for name in variants:
        took = statistics.median(seconds[name])
        error = np.mean([np.square(g - truth).mean() for g in gradients[name]]) ** 0.5
        rows.append({
            "step": name, "milliseconds": 1e3 * took, "ratio": took / reference,
            "gradient_error": float(error),
        })  # fmt: skip
    return rows


def equal_error(rows: list[dict[str, Any]], pieces: int) -> None:
    """Return the number of draws that have the error of a number of cells, and their
    seconds.
    """
    by = {row["step"]: row for row in rows}
    drawn = [(int(k.split()[0]), row) for k, row in by.items() if k.endswith("draws")]
    (few, low), (many, high) = drawn[0], drawn[-1]
    cells = by[f"{pieces} cells"]
    needed = many * (high["gradient_error"] / cells["gradient_error"]) ** 2
    each = (high["milliseconds"] - low["milliseconds"]) / (many - few)
    took = low["milliseconds"] + each * (needed - few)
    print(
        f"\n{pieces} cells: {cells['milliseconds']:.2f} ms; Monte Carlo of the same "
        f"gradient error needs {needed:.0f} draws, {took:.1f} ms (extrapolated)"
    )


def main(argv: list[str] | None = None) -> None:
    """Parse, runs, prints."""
    parser = argparse.ArgumentParser(description=__doc__.split("\n")[0])
    parser.add_argument("--rows", type=int, default=5000)
    parser.add_argument("--inducing", type=int, default=50)
    parser.add_argument("--pieces", type=int, nargs="+", default=[20, 100])
    parser.add_argument("--draws", type=int, nargs="+", default=[20, 100, 400])
    parser.add_argument("--repeats", type=int, default=30)
    parser.add_argument("--json", type=Path, help="write every figure here")
    args = parser.parse_args(argv)
    about = machine()
    print(about)
    rows = run(args)
    print_table(rows, COLUMNS)
    for pieces in args.pieces:
        equal_error(rows, pieces)
    if args.json:
        args.json.write_text(json.dumps({"machine": about, "results": rows}, indent=1))


if __name__ == "__main__":
    main()
