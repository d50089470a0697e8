# SPDX-License-Identifier: Apache-2.0
"""Robust-max: what the expectation of one datum costs, and its error.

For each number of classes J, data whose variances are alike and data whose variances
run from 1e-8 to 1e4: the largest error of the probabilities that a latent is the
largest, by the package's rule and by Gauss-Hermite with as many nodes, against
Gauss-Legendre panels between points around every mean; and the CPU time of the
probability of one class with its derivatives, and of those of all classes::

    taskset -c 0 python examples/benchmarks/robust_max.py
"""

from __future__ import annotations

import argparse
import json
import time
from collections.abc import Callable
from pathlib import Path

import jax
import numpy as np
from common import machine, print_table, versions
from scipy.special import log_ndtr, logsumexp

PANEL = np.polynomial.legendre.leggauss(16)


def draw(num_classes: int, mixed: bool, num: int) -> tuple[np.ndarray, ...]:
    """Means, variances and classes of ``num`` data."""
    rng = np.random.default_rng(num_classes)
    shape = num, num_classes
    v = 10.0 ** rng.uniform(-8, 4, shape) if mixed else rng.uniform(0.3, 3, shape)
    m = 2 * np.sqrt(v) * rng.normal(size=shape)
    return m, v, rng.integers(num_classes, size=num)


def reference(m: np.ndarray, v: np.ndarray) -> np.ndarray:
    """Probabilities of all classes of one datum, by panels a third of the smallest
    standard deviation in reach wide."""
    s = np.sqrt(v)
    end, high = (m - 8 * s).max(), (m + 8.5 * s).max()
    ends = [end]
    while end < high:
        # A latent this far below never wins: its distribution function is one.
        end = end + s[m + 8.5 * s > end].min() / 3
        ends.append(min(end, high))
    ends = np.array(ends)
    x, w = PANEL
    middle, half = (ends[1:] + ends[:-1]) / 2, np.diff(ends) / 2
    total = np.zeros_like(m)
    for k in range(0, len(half), 20):
        part = slice(k, k + 20)
        t = (middle[part, None] + half[part, None] * x).reshape(-1, 1)
        z = (t - m) / s
        log_cdf = log_ndtr(z)
        log_mass = log_cdf.sum(1, keepdims=True) - log_cdf - 0.5 * z * z
        weights = (half[part, None] * w).ravel()
        total += weights @ np.exp(log_mass) / (s * np.sqrt(2 * np.pi))
    return total


def gauss_hermite(m: np.ndarray, v: np.ndarray, num_nodes: int) -> np.ndarray:
    """The same by nodes of its own for every class."""
    nodes, weights = np.polynomial.hermite_e.hermegauss(num_nodes)
    with np.errstate(divide="ignore"):
        log_weights = np.log(weights / weights.sum())
    s, p = np.sqrt(v), np.empty_like(m)
    for k in range(len(m)):
        log_cdf = log_ndtr((m[k] + s[k] * nodes[:, None] - m) / s)
        log_cdf[:, k] = 0
        p[k] = np.exp(logsumexp(log_weights + log_cdf.sum(1)))
    return p


def cpu_ms(function: Callable, *arguments) -> float:
    """Milliseconds of a compiled call, the least of a few."""
    jax.block_until_ready(function(*arguments))
    times = []
    for _ in range(5):
        start = time.process_time()
        jax.block_until_ready(function(*arguments))
        times.append(time.process_time() - start)
    return 1e3 * min(times)


def measure(num_classes: int, dtype: str, rows: int, num_exact: int) -> list[dict]:
    """Rows of the table at one number of classes."""
    from numpyro_gpaug.math import argmax

    @jax.jit
    def chosen(m, v, y):
        def total(m, v):
            return argmax.argmax_probability(m, v, y).sum()

        return jax.value_and_grad(total, (0, 1))(m, v)

    every = jax.jit(argmax.argmax_probabilities)
    num_nodes = {"float32": 96, "float64": 160}[dtype]
    found = []
    for mixed in (False, True):
        m, v, y = draw(num_classes, mixed, rows)
        m, v = m.astype(dtype), v.astype(dtype)
        p = np.asarray(every(m, v), float)[:num_exact]
        data = list(zip(m.astype(float), v.astype(float), strict=True))[:num_exact]
        exact = np.array([reference(*datum) for datum in data])
        plain = np.array([gauss_hermite(*datum, num_nodes) for datum in data])
        found.append(
            {
                "J": num_classes,
                "dtype": dtype,
                "variances": "1e-8..1e4" if mixed else "alike",
                "nodes": num_nodes,
                "error": np.abs(p - exact).max(),
                "error_hermite": np.abs(plain - exact).max(),
                "reference_sum": np.abs(exact.sum(1) - 1).max(),
                "ms_one_and_slopes": cpu_ms(chosen, m, v, y) / rows,
                "ms_all": cpu_ms(every, m, v) / rows,
            }
        )
    return found


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.split("\n")[0])
    parser.add_argument("--classes", type=int, nargs="+", default=[2, 10, 100, 1000])
    parser.add_argument("--rows", type=int, default=16, help="data per timed call")
    parser.add_argument("--exact", type=int, default=8, help="of them with a reference")
    parser.add_argument("--json", type=Path, help="write every figure here")
    options = parser.parse_args()
    jax.config.update("jax_enable_x64", True)
    results = []
    for dtype in ("float64", "float32"):
        for num_classes in options.classes:
            results += measure(num_classes, dtype, options.rows, options.exact)
    columns = {"J": "d", "dtype": "", "variances": "", "nodes": "d", "error": ".1e"}
    columns |= {"error_hermite": ".1e", "reference_sum": ".1e"}
    columns |= {"ms_one_and_slopes": ".3f", "ms_all": ".3f"}
    print_table(results, columns)
    report = {"machine": machine(), "versions": versions("jax", "numpyro")}
    report |= {"ms": "CPU time per datum", "results": results}
    if options.json:
        options.json.write_text(json.dumps(report, indent=1))


if __name__ == "__main__":
    main()
