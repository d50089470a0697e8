# SPDX-License-Identifier: Apache-2.0
"""Groups left out in closed form, against fits without them.

    python examples/benchmarks/left_out.py --json left_out.json

For lme4's ``cbpp`` (herds left out) and ``sleepstudy`` (subjects), and for R-INLA's
``tokyo`` (a cyclic random walk of a year; fortnights), it prints the log predictive
density of all observations, each given those of other groups, by ``leave_out`` of one
posterior, and by fits without each group. Hyperparameters are at their mode, and learnt
again without the group (``ConjugateSVI``), or integrated (``NestedVI``). ``elpd_fit``
is the density under the fit to all data. ``share`` is the relative error of the closed
form, ``|elpd - elpd_refits| / |elpd_refits|``, and ``largest`` the largest error of an
observation. Times are processor seconds, with compilation; all fits share programs.

Data are read from the folder ``GPAUG_DATA`` (``lgm_*.npz``).
"""

from __future__ import annotations

import argparse
import json
import time
from pathlib import Path
from typing import Any

import jax
import numpy as np
from latent import MODELS, load
from numpyro.primitives import Messenger

import numpyro_gpaug as gpaug

GROUPS = {"cbpp": "herd", "sleepstudy": "subject", "tokyo": None}
KEY = jax.random.key(0)


class masked(Messenger):
    """Mask the observed site of a model.

    :param keep: which observations count.
    """

    def __init__(self, keep: Any) -> None:
        self.keep = keep
        super().__init__()

    def process_message(self, msg: dict[str, Any]) -> None:
        if msg["type"] == "sample" and msg["name"] == "y":
            msg["fn"] = msg["fn"].mask(self.keep)


def problem(name: str) -> tuple[Any, dict[str, np.ndarray], np.ndarray]:
    """The model with a mask as its first argument, its data, and the groups."""

    def model(keep: Any, **data: Any) -> None:
        with masked(keep):
            MODELS[name](**data)

    data = load(name)
    if name == "tokyo":
        return model, data, np.arange(len(data["y"])) // 14
    return model, data, data[GROUPS[name]]


def fitted(route: str, model: Any) -> Any:
    """A function from arguments to the posterior."""
    if route == "NestedVI":
        nested = gpaug.NestedVI(model, progress_bar=False)

        def run(*args: Any, **kwargs: Any) -> Any:
            nested.run(KEY, *args, **kwargs)
            return nested.posterior()

        return run
    svi = gpaug.ConjugateSVI(model, gpaug.AutoLatentGaussian(model))

    def learn(*args: Any, **kwargs: Any) -> Any:
        fit = svi.run(KEY, 100, *args, **kwargs, progress_bar=False)
        return svi.posterior(fit)

    return learn


def compared(name: str, route: str) -> dict[str, float]:
    """The row of a problem and a route."""
    model, data, group = problem(name)
    fit, y = fitted(route, model), data["y"]
    everything = np.ones(len(y), bool)
    posterior = fit(everything, **data)
    inside = float(posterior.log_prob(everything, **data).sum())
    start = time.process_time()
    closed = posterior.leave_out(group, everything, **data).log_prob(y)
    middle, refits = time.process_time(), np.empty(len(y))
    for one in np.unique(group):
        left = group == one
        without = fit(~left, **data)
        refits[left] = without.log_prob(everything, **data)[left]
    end = time.process_time()
    total, expected = float(np.sum(closed)), float(refits.sum())
    return {
        "groups": len(np.unique(group)),
        "elpd_fit": inside,
        "elpd": total,
        "elpd_refits": expected,
        "share": abs(total - expected) / abs(expected),
        "largest": float(np.abs(closed - refits).max()),
        "seconds": middle - start,
        "seconds_refits": end - middle,
    }


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--parts", nargs="*", choices=[*GROUPS], default=[*GROUPS])
    parser.add_argument("--json", type=Path, help="where to write the numbers")
    routes = ["ConjugateSVI", "NestedVI"]
    parser.add_argument("--routes", nargs="*", choices=routes, default=routes)
    args = parser.parse_args()
    found: dict[str, dict[str, dict[str, float]]] = {}
    for name in args.parts:
        for route in args.routes:
            row = compared(name, route)
            found.setdefault(name, {})[route] = row
            print(name, route, *(f"{k} {x:.4g}" for k, x in row.items()), sep="  ")
            if args.json:
                args.json.write_text(json.dumps(found, indent=1))


if __name__ == "__main__":
    main()
