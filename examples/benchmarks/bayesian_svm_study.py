# SPDX-License-Identifier: Apache-2.0
r"""The Bayesian SVM paper's other experiments, on data in the folder ``GPAUG_DATA``.

``tuning``: the lengthscale learnt on the training bound, by a gradient step after every
closed-form step and after every ten as published, against a grid judged by
cross-validation; the time of each. ``inducing``: error against the number of inducing
inputs, for rows at random, k-means++ and Gaussian-mixture centres. ``time``: held-out
error against training time, for minibatches, full data with inducing inputs, and the
full process::

    python examples/benchmarks/bayesian_svm_study.py --json study.json --out study.png
"""

from __future__ import annotations

import argparse
import json
import time
from collections.abc import Iterator
from itertools import islice
from pathlib import Path
from typing import Any

import jax
import numpy as np
import numpyro
import numpyro.distributions as dist
import optax
from common import data_folder, machine, print_table
from papers_svm import Fold, folds, judge, model, ours

import numpyro_gpaug as gpaug

PARTS = "tuning", "inducing", "time"
SIZES = 4, 8, 16, 32, 64, 128
CHOICES = {
    "random rows": gpaug.inducing.random,
    "k-means++": gpaug.inducing.kmeans,
    "Gaussian mixture": gpaug.inducing.gmm,
}
KEY = jax.random.key(0)
QUIET = {"progress_bar": False}
FIXED = {"learn": False, "machine": True}


def seconds_of(function: Any) -> tuple[Any, float]:
    """Return the result of a function, once it is computed, and the seconds it took."""
    start = time.perf_counter()
    value = jax.block_until_ready(function())
    return value, time.perf_counter() - start


# -- learnt lengthscale against a grid -------------------------------------------------


def tunable(X, y=None, *, inducing, start):
    """The machine with one hyperparameter."""
    positive = dist.constraints.positive
    lengthscale = numpyro.param("lengthscale", start, constraint=positive)
    kernel = gpaug.kernels.SquaredExponential(lengthscale, 1.0)
    f = gpaug.GaussianProcess("f", kernel, inducing=inducing)(X)
    with numpyro.plate("data", X.shape[0]):
        numpyro.sample("y", gpaug.BayesianSVM(f), obs=y)


def learn(fold: Fold, every: int, steps: int) -> dict[str, Any]:
    """The lengthscale learnt from 1, and the seconds, with and without compilation."""
    guide = gpaug.AutoSparseGP(tunable)
    svi = gpaug.ConjugateSVI(tunable, guide, optax.adam(0.3), hyper_every=every)
    given = {"inducing": fold.Z, "start": 1.0}
    state = svi.init(KEY, fold.X, fold.y, **given)

    def run() -> Any:
        return svi.run(
            KEY, steps, fold.X, fold.y, init_state=state, **QUIET, **given
        ).params

    _, cold = seconds_of(run)
    params, warm = seconds_of(run)
    return {"lengthscale": float(params["lengthscale"]), "seconds": warm, "first": cold}


def validation(cases: list[Fold], lengthscale: float, fit: Any) -> dict[str, Any]:
    """Mean scores over folds at a fixed lengthscale, and the seconds of all fits."""
    # An array: a Python number would be compiled into the program.
    at = np.array(lengthscale, cases[0].X.dtype)
    scores, total = [], 0.0
    for fold in cases:
        probs, seconds = fit(fold._replace(lengthscale=at))
        total += seconds
        scores.append(judge(probs["probit"], fold.y_test))
    means = {key: np.mean([score[key] for score in scores]) for key in scores[0]}
    return {"lengthscale": float(lengthscale), **means, "seconds": total}


def tuning(args: argparse.Namespace) -> dict[str, Any]:
    """The learnt values, and the grid."""
    cases = list(islice(folds(args.tuning_set, "random"), args.folds))
    fit = ours(steps=30)
    fit(cases[0])
    columns = {"method": "", "lengthscale": ".3f", "error": ".4f", "brier": ".4f"}
    columns |= {"nll": ".4f", "seconds": ".2f", "first": ".2f"}
    rows = []
    for every, steps in ((1, 50), (10, 500)):
        row = learn(cases[0], every, steps)
        found = validation(cases, row["lengthscale"], fit)
        row |= {key: found[key] for key in ("error", "brier", "nll")}
        rows.append({"method": f"learnt, a gradient step in {every}", **row})
    points = np.geomspace(0.3, 30, args.grid)
    grid = [{"method": "grid", **validation(cases, at, fit)} for at in points]
    for key in ("error", "brier", "nll"):
        best = min(grid, key=lambda row: row[key])
        total = sum(row["seconds"] for row in grid)
        rows.append({**best, "method": f"grid, best {key}", "seconds": total})
    print(f"\ntuning on {args.tuning_set}, {len(cases)} folds, {args.grid} values")
    print_table(grid, columns)
    print_table(rows, columns)
    return {"rows": rows, "grid": grid}


# -- number and choice of inducing inputs ----------------------------------------------


def digits() -> Iterator[Fold]:
    """Ten stratified folds of USPS, threes against fives."""
    from sklearn.model_selection import StratifiedKFold

    path = (data_folder() or Path()) / "usps_3v5.npz"
    if not path.exists():
        raise FileNotFoundError("no usps_3v5.npz: set GPAUG_DATA to the data folder")
    with np.load(path, allow_pickle=False) as file:
        X, y = (np.concatenate([file[f"{k}_train"], file[f"{k}_test"]]) for k in "Xy")
    X, y = X.astype("float32"), (y > 0).astype(int)
    for train, test in StratifiedKFold(10, shuffle=True, random_state=0).split(X, y):
        yield Fold(X[train], y[train], X[test], y[test], X[train[:1]], 10.0)


def inducing(args: argparse.Namespace) -> dict[str, Any]:
    """A row per number and choice."""
    cases = list(islice(digits(), args.folds))
    # The lengthscale is learnt once, with many inputs, and used for all.
    many = cases[0]._replace(Z=gpaug.inducing.kmeans(cases[0].X, SIZES[-1]))
    found = learn(many, 1, 60)["lengthscale"]
    at = np.array(found, "float32")
    rows = []
    for size in SIZES:
        fit = ours(steps=30)
        for label, choose in CHOICES.items():
            scores, fits, choices = [], [], []
            for fold in cases:
                begin = time.perf_counter()
                Z = np.asarray(choose(fold.X, size))
                choices.append(time.perf_counter() - begin)
                probs, seconds = fit(fold._replace(Z=Z, lengthscale=at))
                fits.append(seconds)
                scores.append(judge(probs["probit"], fold.y_test))
            errors = [score["error"] for score in scores]
            row = {"inducing": size, "choice": label, "error": np.mean(errors)}
            row |= {"error_sd": np.std(errors, ddof=1) if len(errors) > 1 else 0.0}
            row |= {"brier": np.mean([score["brier"] for score in scores])}
            row |= {"choosing": np.median(choices), "fitting": np.median(fits)}
            rows.append(row)
    columns = {"inducing": "d", "choice": "", "error": ".4f", "error_sd": ".4f"}
    columns |= {"brier": ".4f", "choosing": ".3f", "fitting": ".3f"}
    print(f"\nUSPS 3 v 5, {len(cases)} folds, lengthscale {found:.2f}, learnt")
    print_table(rows, columns)
    return {"lengthscale": found, "rows": rows}


# -- error against time ----------------------------------------------------------------


def trace(fold: Fold, batch: int | None, checkpoints: list[int]) -> list[dict]:
    """Scores and training seconds, compiled before, after so many steps."""
    svi = gpaug.ConjugateSVI(model, gpaug.AutoSparseGP(model))
    given = FIXED | {"inducing": fold.Z, "start": fold.lengthscale, "batch": batch}
    state = svi.init(KEY, fold.X, fold.y, **given)

    def advance(steps: int, state: Any) -> Any:
        return svi.run(
            KEY, steps, fold.X, fold.y, init_state=state, **QUIET, **given
        )  # fmt: skip

    advance(1, state)
    rows: list[dict[str, Any]] = []
    taken, total = 0, 0.0
    for steps in checkpoints:
        result, seconds = seconds_of(lambda: advance(steps - taken, state))  # noqa: B023
        state, taken, total = result.state, steps, total + seconds
        p = svi.posterior(result).predict_y(fold.X_test).probs
        rows.append({"steps": steps, "seconds": total})
        rows[-1] |= judge(np.asarray(p), fold.y_test)
    return rows


def against_time(args: argparse.Namespace) -> dict[str, Any]:
    """Waveform, hyperparameters fixed, as published."""
    fold = next(folds("ratsch_waveform", "random"))
    keep = slice(args.rows)
    fold = fold._replace(X=fold.X[keep], y=fold.y[keep])
    seldom = [1, 3, 10, 30, 100, 300, 1000, 3000, 10000]
    runs = {
        "batches of 10, 100 inducing": (fold, 10, seldom),
        "batches of 100, 100 inducing": (fold, 100, seldom[:7]),
        "full data, 100 inducing": (fold, None, [1, 2, 3, 5, 10, 20]),
        "full process (batch)": (fold._replace(Z=fold.X), None, [1, 2, 3, 5]),
    }
    rows = []
    for label, run in runs.items():
        rows += [{"method": label, **row} for row in trace(*run)]
    columns = {"method": "", "steps": "d", "seconds": ".3f", "error": ".4f"}
    columns |= {"brier": ".4f", "nll": ".4f"}
    print(f"\nwaveform, {len(fold.y)} training rows")
    print_table(rows, columns)
    return {"rows": rows}


# -- picture ---------------------------------------------------------------------------


def draw(output: dict[str, Any], path: Path) -> None:
    """A panel per part that was run."""
    import matplotlib

    matplotlib.use("Agg")
    import matplotlib.pyplot as plt

    drawers = {"tuning": draw_tuning, "inducing": draw_inducing, "time": draw_time}
    parts = [part for part in PARTS if part in output]
    style = {"axes.spines.top": False, "axes.spines.right": False, "font.size": 10}
    with plt.rc_context(style):
        figure, axes = plt.subplots(
            1, len(parts), figsize=(5.2 * len(parts), 4.4), layout="constrained",
            squeeze=False,
        )  # fmt: skip
        for part, panel in zip(parts, axes[0], strict=True):
            drawers[part](panel, output[part])
        figure.savefig(path, dpi=140)
        plt.close(figure)


def draw_tuning(axes: Any, found: dict[str, Any]) -> None:
    at = [row["lengthscale"] for row in found["grid"]]
    axes.plot(at, [row["nll"] for row in found["grid"]], color="C0", label="grid")
    learnt = [row for row in found["rows"] if row["method"].startswith("learnt")]
    for row, marker, color in zip(learnt, "ox", ("C3", "k"), strict=True):
        point = {"marker": marker, "color": color, "s": 60, "zorder": 3}
        axes.scatter(row["lengthscale"], row["nll"], label=row["method"], **point)
    axes.set(xscale="log", xlabel="lengthscale", ylabel="held-out NLL")
    axes.set_title("Learnt lengthscale against a grid")
    axes.legend(frameon=False)


def draw_inducing(axes: Any, found: dict[str, Any]) -> None:
    for k, label in enumerate(CHOICES):
        rows = [row for row in found["rows"] if row["choice"] == label]
        x = np.array([row["inducing"] for row in rows]) * 1.04 ** (k - 1)
        y, spread = ([row[key] for row in rows] for key in ("error", "error_sd"))
        axes.errorbar(x, y, spread, marker="o", label=label, capsize=2, lw=1.5)
    axes.set_xscale("log", base=2)
    axes.xaxis.set_major_formatter("{x:.0f}")
    axes.set(xlabel="inducing inputs", ylabel="held-out error", ylim=(0, None))
    axes.set_title("USPS 3 v 5")
    axes.legend(frameon=False)


def draw_time(axes: Any, found: dict[str, Any]) -> None:
    for label in dict.fromkeys(row["method"] for row in found["rows"]):
        rows = [row for row in found["rows"] if row["method"] == label]
        x, y = ([row[key] for row in rows] for key in ("seconds", "error"))
        axes.plot(x, y, marker="o", ms=4, label=label)
    axes.set(xscale="log", xlabel="seconds of training", ylabel="held-out error")
    axes.set_title("Waveform")
    axes.legend(frameon=False, fontsize=9)


# -- main ------------------------------------------------------------------------------


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.split("\n")[0])
    parser.add_argument("--parts", default=",".join(PARTS))
    parser.add_argument("--folds", type=int, default=10, help="the first so many")
    parser.add_argument("--grid", type=int, default=30, help="lengthscales tried")
    parser.add_argument("--tuning-set", default="ratsch_diabetis")
    parser.add_argument("--rows", type=int, help="training rows of the time part")
    parser.add_argument("--json", type=Path)
    parser.add_argument("--out", type=Path, help="a picture")
    args = parser.parse_args()
    chosen = args.parts.split(",")
    if unknown := set(chosen) - set(PARTS):
        raise SystemExit(f"unknown parts {sorted(unknown)}; there are {PARTS}")
    output: dict[str, Any] = {"machine": machine()}
    runners = {"tuning": tuning, "inducing": inducing, "time": against_time}
    for part in chosen:
        try:
            output[part] = runners[part](args)
        except FileNotFoundError as error:
            print(f"{part} skipped: {error}")
    if args.json:
        args.json.write_text(json.dumps(output, indent=1))
    if args.out and len(output) > 1:
        draw(output, args.out)


if __name__ == "__main__":
    main()
