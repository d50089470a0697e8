# SPDX-License-Identifier: Apache-2.0
"""Expectations of the logistic and of Student-t likelihoods by quadrature.

With arrays as they come, a process first, and with these made one axis, which is what
fits do (``math/blocks.py``): microseconds of a processor a call, least of several::

    python examples/benchmarks/elements.py
"""

from __future__ import annotations

import argparse
import time
from collections.abc import Callable
from functools import partial
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from common import machine, print_table

from numpyro_gpaug.likelihoods.student_t import _gap_terms, _gap_terms_by
from numpyro_gpaug.math.logistic import _terms, _terms_of, logistic_mixture

SHAPES = (500,), (1, 500), (5000,), (1, 5000), (3, 5000), (10, 5000)
COLUMNS = {"of": "", "shape": "", "as they come": ".0f", "one axis": ".0f"}
COLUMNS |= {"times": ".1f"}
FUNCTIONS: dict[str, tuple[Callable, Callable]] = {
    "logistic": (partial(_terms_of, *logistic_mixture(np.float32)), _terms),
    "Student-t": (partial(_gap_terms_by, (44, 1e-2, 17.0)), _gap_terms),
}


def microseconds(function: Callable, *args: Any, repeats: int, calls: int) -> float:
    compiled, least = jax.jit(function), np.inf
    jax.block_until_ready(compiled(*args))
    for _ in range(repeats):
        begun = time.process_time()
        for _ in range(calls):
            found = compiled(*args)
        jax.block_until_ready(found)
        least = min(least, (time.process_time() - begun) / calls)
    return 1e6 * least


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.split("\n")[0])
    parser.add_argument("--repeats", type=int, default=7)
    parser.add_argument("--calls", type=int, default=20)
    how = vars(parser.parse_args())
    print(machine())
    rows = []
    for name, (plain, ours) in FUNCTIONS.items():
        for shape in SHAPES:
            mean = jnp.asarray(np.random.default_rng(0).normal(size=shape) ** 2, "f")
            given = mean, jnp.ones_like(mean)
            row: dict[str, Any] = {"of": name, "shape": "x".join(map(str, shape))}
            row["as they come"] = microseconds(plain, *given, **how)
            row["one axis"] = microseconds(ours, *given, **how)
            row["times"] = row["as they come"] / row["one axis"]
            rows.append(row)
    print_table(rows, COLUMNS)


if __name__ == "__main__":
    main()
