# SPDX-License-Identifier: Apache-2.0
r"""The table of the Bayesian SVM paper: error, Brier score and time over ten folds.

Called by ``papers.py --table svm``, on the data in the folder ``GPAUG_DATA``.

Two sets of folds. ``random``: stratified and shuffled. ``contiguous``: the authors' ten
blocks of N div 10 rows, on files that are sorted by their first column, so that every
fold extrapolates. Inputs are standardised by the training rows of each fold.

``fixed``: lengthscale the root of the number of columns (5 on waveform, the one value
the paper states), variance 1. ``learnt``: both, and an offset, on the training bound,
from there. Inducing inputs as published: 20% of the training rows by k-means, 100 on
waveform.
"""

from __future__ import annotations

import statistics
import sys
import time
from collections.abc import Callable, Iterator
from itertools import islice
from typing import Any, NamedTuple

import numpy as np
from common import load_data, print_table

SETS = ("ratsch_breast_cancer", "ratsch_diabetis", "ratsch_heart", "ratsch_waveform")
# Error, Brier score and seconds of the stochastic Bayesian SVM, of SVM + Platt and of
# Gaussian process classification, as published.
PUBLISHED = {
    "ratsch_breast_cancer": ((0.26, 0.18, 0.32), (0.27, 0.19, 0.04), (0.27, 0.18, 6.7)),
    "ratsch_diabetis": ((0.22, 0.16, 3.9), (0.24, 0.16, 0.11), (0.23, 0.15, 67)),
    "ratsch_heart": ((0.16, 0.13, 0.34), (0.17, 0.12, 0.04), (0.16, 0.12, 6)),
    "ratsch_waveform": ((0.09, 0.06, 12.5), (0.10, 0.06, 2.3), (0.10, 0.06, 8691)),
}
KINDS = "random", "contiguous"
RIVALS = "published S-BSVM", "published SVM + Platt", "published GPC"
# The largest number of rows for the full process, whose cost is cubic.
LARGEST = 2000
BATCH, EPOCHS = 10, 10
COLUMNS = {
    "set": "",
    "folds": "",
    "method": "",
    "error": ".3f",
    "error_sd": ".3f",
    "brier": ".3f",
    "brier_sd": ".3f",
    "nll": ".3f",
    "seconds": ".3f",
    "first": ".2f",
}


class Fold(NamedTuple):
    """Standardised rows of one fold, its inducing inputs, and fixed hyperparameters."""

    X: np.ndarray
    y: np.ndarray
    X_test: np.ndarray
    y_test: np.ndarray
    Z: np.ndarray
    lengthscale: float


Method = Callable[[Fold], tuple[dict[str, np.ndarray], float]]


# -- folds -----------------------------------------------------------------------------


def folds(name: str, kind: str, num_inducing: int = 100) -> Iterator[Fold]:
    """The ten folds of a data set.

    :param name: see :func:`common.load_data`.
    :param kind: ``"random"`` or ``"contiguous"``.
    :param num_inducing: inducing inputs on waveform.
    """
    from sklearn.model_selection import StratifiedKFold

    import numpyro_gpaug as gpaug

    X, y = load_data(name)
    if kind == "random":
        splits = StratifiedKFold(10, shuffle=True, random_state=0).split(X, y)
    else:
        blocks = np.arange(len(y) // 10 * 10).reshape(10, -1)
        splits = ((np.setdiff1d(np.arange(len(y)), block), block) for block in blocks)
    waveform = name == "ratsch_waveform"
    for train, test in splits:
        scaled = ((X - X[train].mean(0)) / X[train].std(0)).astype("float32")
        size = num_inducing if waveform else len(train) // 5
        Z = np.asarray(gpaug.inducing.kmeans(scaled[train], size))
        lengthscale = 5.0 if waveform else float(np.sqrt(X.shape[1]))
        yield Fold(scaled[train], y[train], scaled[test], y[test], Z, lengthscale)


# -- methods ---------------------------------------------------------------------------


def model(
    X, y=None, *, inducing, start, machine=True, learn=False, batch=None,
    predictive="probit",
):  # fmt: skip
    """The Bayesian SVM, or with ``machine=False`` a process with Bernoulli labels.

    :param start: the lengthscale, where it starts if it is learnt.
    :param learn: whether lengthscale, variance and offset are learnt.
    :param batch: rows of a minibatch, ``None`` for all.
    :param predictive: see :class:`numpyro_gpaug.BayesianSVM`.
    """
    import numpyro
    import numpyro.distributions as dist

    import numpyro_gpaug as gpaug

    lengthscale, variance, offset = start, 1.0, 0.0
    if learn:
        positive = dist.constraints.positive
        lengthscale = numpyro.param("lengthscale", start, constraint=positive)
        variance = numpyro.param("variance", variance, constraint=positive)
        offset = numpyro.param("offset", offset)
    kernel = gpaug.kernels.SquaredExponential(lengthscale, variance)
    gp = gpaug.GaussianProcess("f", kernel, inducing=inducing, mean=offset)
    with numpyro.plate("data", X.shape[0], subsample_size=batch) as i:
        y, f = None if y is None else y[i], gp(X[i])
        likelihood = (
            gpaug.BayesianSVM(f, predictive) if machine else dist.Bernoulli(logits=f)
        )
        numpyro.sample("y", likelihood, obs=y)


def ours(
    *, machine: bool = True, learn: bool = False, batch: bool = False, steps: int = 0
) -> Method:
    """A method of this package; its steps are compiled once for folds of one size.

    :param machine: the Bayesian SVM, or the process with Bernoulli labels.
    :param learn: whether hyperparameters are learnt.
    :param batch: so many epochs of minibatches instead of ``steps``.
    :param steps: at most.
    """
    import jax
    import optax

    import numpyro_gpaug as gpaug

    optim = optax.adam(0.05) if learn else None
    svi = gpaug.ConjugateSVI(model, gpaug.AutoSparseGP(model), optim)
    key = jax.random.key(0)
    # The initial state depends on shapes only, and init compiles at every call.
    states: dict[Any, Any] = {}

    def fit(fold: Fold) -> tuple[dict[str, np.ndarray], float]:
        begin = time.perf_counter()
        given = {"inducing": fold.Z, "start": fold.lengthscale, "learn": learn}
        given |= {"machine": machine, "batch": BATCH if batch else None}
        shape = fold.X.shape, fold.Z.shape
        if shape not in states:
            states[shape] = svi.init(key, fold.X, fold.y, **given)
        result = svi.run(
            key, EPOCHS * len(fold.y) // BATCH if batch else steps, fold.X, fold.y,
            init_state=states[shape], tol=None if batch else 1e-2,
            progress_bar=False, **given,
        )  # fmt: skip
        jax.block_until_ready(result.params)
        seconds = time.perf_counter() - begin
        posterior = svi.posterior(result)
        rules = {"probit": "probit", "normalised": "normalized"}
        if not machine or batch:
            rules = {"": "probit"}
        return {
            label: np.asarray(posterior.predict_y(fold.X_test, predictive=rule).probs)
            for label, rule in rules.items()
        }, seconds

    return fit


def scikit(make: Callable[[Fold], Any]) -> Method:
    """A classifier of scikit-learn."""

    def fit(fold: Fold) -> tuple[dict[str, np.ndarray], float]:
        classifier = make(fold)
        begin = time.perf_counter()
        classifier.fit(fold.X, fold.y)
        seconds = time.perf_counter() - begin
        return {"": classifier.predict_proba(fold.X_test)[:, 1]}, seconds

    return fit


def platt(fold: Fold) -> Any:
    """The machine with the same kernel, and a cross-validated sigmoid."""
    from sklearn.calibration import CalibratedClassifierCV
    from sklearn.svm import SVC

    svm = SVC(gamma=0.5 / fold.lengthscale**2)
    return CalibratedClassifierCV(svm, method="sigmoid", ensemble=False)


def laplace(fold: Fold) -> Any:
    """The full process, by Laplace's approximation."""
    from sklearn.gaussian_process import GaussianProcessClassifier
    from sklearn.gaussian_process.kernels import RBF

    return GaussianProcessClassifier(RBF(fold.lengthscale), optimizer=None)


def methods(num_data: int, steps: int | None) -> dict[str, Method]:
    """Return the methods to run on a number of rows, and their largest numbers of
    steps.
    """
    found = {
        "BSVM fixed": ours(steps=steps or 30),
        f"BSVM fixed, batches of {BATCH}": ours(batch=True),
        "BSVM learnt": ours(learn=True, steps=steps or 200),
        "GPC fixed": ours(machine=False, steps=steps or 30),
        "GPC learnt": ours(machine=False, learn=True, steps=steps or 200),
        "SVM + Platt": scikit(platt),
    }
    if num_data <= LARGEST:
        found["GPC, full, Laplace"] = scikit(laplace)
    return found


# -- the table -------------------------------------------------------------------------


def judge(probs: np.ndarray, y: np.ndarray) -> dict[str, float]:
    """Error, Brier score and negative log-likelihood."""
    p = np.clip(probs.astype(float), 1e-12, 1 - 1e-12)
    return {
        "error": float(np.mean((p > 0.5) != (y > 0.5))),
        "brier": float(np.mean((p - y) ** 2)),
        "nll": float(-np.mean(y * np.log(p) + (1 - y) * np.log1p(-p))),
    }


def measure(name: str, kind: str, options: Any) -> list[dict[str, Any]]:
    """Measure every method on the folds of one kind, with a row per method and rule."""
    cases = list(islice(folds(name, kind, options.num_inducing), options.folds))
    rows = []
    for method, fit in methods(len(cases[0].y), options.steps).items():
        scores: dict[str, list[dict[str, float]]] = {}
        times = []
        for fold in cases:
            probs, seconds = fit(fold)
            times.append(seconds)
            for rule, p in probs.items():
                scores.setdefault(rule, []).append(judge(p, fold.y_test))
        for rule, found in scores.items():
            row = {"set": name.removeprefix("ratsch_"), "folds": kind}
            row["method"] = f"{method}, {rule}" if rule else method
            for key in ("error", "brier", "nll"):
                values = [score[key] for score in found]
                row[key] = statistics.mean(values)
                row[f"{key}_sd"] = (
                    float(np.std(values, ddof=1)) if values[1:] else np.nan
                )
            row["seconds"], row["first"] = statistics.median(times), times[0]
            rows.append(row)
        print(f"  {name} {kind} {method} done", file=sys.stderr)
    return rows


def published(name: str) -> list[dict[str, Any]]:
    """Return the paper's results for a data set."""
    short = name.removeprefix("ratsch_")
    return [
        {"set": short, "method": label, "error": e, "brier": b, "seconds": s}
        for label, (e, b, s) in zip(RIVALS, PUBLISHED[name], strict=True)
    ]


def run(options: Any) -> dict[str, Any]:
    """Print the table and return its rows.

    :param options: of ``papers.py``; ``num_inducing`` is for waveform only.
    """
    print(
        "means and standard deviations over folds; seconds: median time of a fit, "
        "compiled before; first: of the first, with compilation"
    )
    rows: list[dict[str, Any]] = []
    for name in options.datasets or SETS:
        name = name if name.startswith("ratsch_") else f"ratsch_{name}"
        if name not in SETS:
            raise SystemExit(f"unknown data set {name}; there are {', '.join(SETS)}")
        try:
            found = [r for kind in KINDS for r in measure(name, kind, options)]
        except FileNotFoundError as error:
            print(f"{name} skipped: {error}")
            continue
        found += published(name)
        print_table(found, COLUMNS)
        rows += found
    return {"rows": rows}
