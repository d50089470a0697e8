# SPDX-License-Identifier: Apache-2.0
"""PyMC's NUTS for ``nested.py``, which runs this file in the interpreter that holds it:
the mixed logistic model ``cbpp`` with its herds whitened, as its documentation does.

Processor seconds of this process and of the compilers that it starts; imports are not
counted."""

from __future__ import annotations

import json
import os
import sys
from importlib.metadata import version
from typing import Any

import numpy as np
import pymc

CHAINS = 4


def seconds() -> float:
    """Return the processor seconds of this process."""
    spent = os.times()
    return spent.user + spent.system + spent.children_user + spent.children_system


def main(path: str, draws: int) -> None:
    """Draw, write the draws by chain over the data, and print JSON."""
    with np.load(path) as file:
        y, total, herd, period = (file[k] for k in ("y", "total", "herd", "period"))
    start = seconds()
    with pymc.Model():
        b = pymc.Normal("b", 0.0, 5.0, shape=4)
        tau = pymc.HalfNormal("tau", 1.0)
        white = pymc.Normal("white", 0.0, 1.0, shape=15)
        a = pymc.Deterministic("a", tau * white)
        pymc.Binomial("y", n=total, logit_p=b[period] + a[herd], observed=y)

        def run(num: int) -> Any:
            return pymc.sample(
                num, tune=draws, chains=CHAINS, cores=1, progressbar=False,
                random_seed=1, compute_convergence_checks=False,
            )  # fmt: skip

        found = run(draws).posterior
        spent = [seconds() - start]
        for num in (draws, 1):
            start = seconds()
            run(num)
            spent.append(seconds() - start)
    np.savez(path, **{name: found[name].values for name in ("a", "b", "tau")})
    drawing = max(spent[1] - spent[2], 0.0)
    report = {"cold": spent[0], "warm": drawing, "drawing": drawing}
    print(json.dumps(report | {"version": version("pymc")}))


main(sys.argv[1], int(sys.argv[2]))
