# SPDX-License-Identifier: Apache-2.0
"""Simulation-based calibration of lme4's ``cbpp`` (a binomial mixed model of 15 herds),
by ``diagnostics.sbc``.

Every data set is drawn from the model: its latents from the prior (``prior``), or from
the posterior of the data, with which it is then fitted together (``data``). ``worst``
is the smallest ``p`` of all quantities, times their number; ``lost`` counts fits that
failed or did not converge; ``covered`` is the mean share of true values in 90%
intervals, over all quantities but hyperparameters and the log-likelihood, ``tau`` that
of the hyperparameter, and ``likelihood`` the ``p`` of the log-likelihood. ``svi`` are
fits by ``ConjugateSVI``, whose hyperparameter is at a point::

    GPAUG_DATA=/path/to/data python examples/benchmarks/calibration.py --sets 1000

``seconds`` are the wall's and ``cpu`` the processor's, with compilation.
"""

from __future__ import annotations

import os
import time
from argparse import ArgumentParser, Namespace, RawDescriptionHelpFormatter
from pathlib import Path
from typing import Any

import jax
from common import print_table, write_report
from latent import cbpp, load

import numpyro_gpaug as gpaug

COLUMNS = {"truth": "", "fit": "", "sets": "d", "lost": "d", "uncertified": "d"}
COLUMNS |= {"worst": ".3f", "covered": ".3f", "tau": ".3f", "likelihood": ".3f"}
COLUMNS |= {"seconds": ".0f", "cpu": ".0f"}
CASES = "prior nested", "data nested", "prior svi"


def row(case: str, how: Namespace) -> dict[str, Any]:
    """One kind of calibration."""
    truth, by = case.split()

    def fit(model: Any) -> Any:
        if by == "svi":
            return gpaug.ConjugateSVI(model, gpaug.AutoLatentGaussian(model))
        return gpaug.NestedVI(model, num_points=how.points, progress_bar=False)

    wall, before = time.perf_counter(), os.times()
    found = gpaug.diagnostics.sbc(
        cbpp, jax.random.key(0), how.sets, **load("cbpp"), fit=fit,
        given_data=truth == "data", progress_bar=how.progress,
    )  # fmt: skip
    after, table = os.times(), found.table
    others = table.drop([k for k in ("tau", "log_likelihood") if k in table.index])

    def at(label: str, column: str) -> float:
        return float(table[column].get(label, float("nan")))

    return {
        "truth": truth, "fit": by, "sets": how.sets, "lost": len(found.failures),
        "uncertified": len(found.uncertified),
        "worst": min(1.0, float(table["p"].min()) * len(table)),
        "covered": float(others["90%"].mean()), "tau": at("tau", "90%"),
        "likelihood": at("log_likelihood", "p"),
        "seconds": time.perf_counter() - wall,
        "cpu": after.user + after.system - before.user - before.system,
    }  # fmt: skip


def main() -> None:
    """Run and print."""
    parser = ArgumentParser(
        description=__doc__, formatter_class=RawDescriptionHelpFormatter
    )
    parser.add_argument("--sets", type=int, default=1000)
    parser.add_argument("--points", type=int, default=512, help="of each nested run")
    parser.add_argument("--cases", nargs="+", default=CASES, choices=CASES)
    parser.add_argument("--progress", action="store_true")
    parser.add_argument("--json", type=Path, help="write the results there")
    how = parser.parse_args()
    rows: list[dict[str, Any]] = []
    for case in how.cases:
        rows.append(row(case, how))
        # Printed one by one: the next may take minutes.
        print_table(rows, COLUMNS)
        write_report(how.json, rows)


if __name__ == "__main__":
    main()
