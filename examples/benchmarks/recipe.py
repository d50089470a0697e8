# SPDX-License-Identifier: Apache-2.0
"""The kernel and the learning of ``classify.py`` on data that they were not tuned for,
beside logistic regression and the earlier recipe.

Two classes or several; stratified random splits, a fifth of the rows for testing;
columns standardised on the training part, pixels all by one scale; k-means inducing
inputs. The penalty of logistic regression is chosen by cross-validated NLL. The earlier
recipe had one lengthscale for all columns, no linear term, adam for 200 steps, and 100
inducing inputs. Scores are means over splits, ``worse`` is the NLL less that of
logistic regression, and ``se`` its standard error::

    GPAUG_DATA=/path/to/data python examples/benchmarks/recipe.py --json recipe.json

Further methods explain a loss beside logistic regression. ``plain`` has no temperature.
``joint`` has none either, but one posterior of all classes (``AutoLatentGaussian``), at
ten times the cost. ``plug-in`` has the probabilities at the mean of the functions.
``table`` is the package's :class:`~numpyro_gpaug.tables.TableClassifier`. ``svc`` and
``boosting`` are scikit-learn's support vector machine with Platt scaling and gradient
boosting. ``nuts`` has the exact posterior of functions and hyperparameters (800 draws,
minutes for each split). Beside data there are simulated rules (``--sets far3 null3``
and others), with 180 rows and 4000 for testing, drawn anew for each split. Sets other
than scikit-learn's are read from the folder ``GPAUG_DATA``: any ``NAME.npz`` with ``X``
and ``y``.
"""

from __future__ import annotations

import argparse
import json
import sys
import time
import warnings
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any, NamedTuple

import jax
import numpy as np
import numpyro
import numpyro.distributions as dist
import optax
from common import data_folder, machine, print_table, versions
from numpyro.infer import MCMC, NUTS, log_likelihood
from scipy.special import expit, softmax
from sklearn import datasets
from sklearn.calibration import CalibratedClassifierCV
from sklearn.ensemble import HistGradientBoostingClassifier
from sklearn.linear_model import LogisticRegressionCV
from sklearn.metrics import log_loss
from sklearn.model_selection import StratifiedShuffleSplit
from sklearn.svm import SVC

import numpyro_gpaug as gpaug
from numpyro_gpaug import tables

sys.path.append(str(Path(__file__).resolve().parents[1]))
from support.compilation import keep_compiled_programs  # noqa: E402

SHIPPED = ("breast_cancer", "digits", "iris", "wine")
OTHERS = (
    "ratsch_breast_cancer", "ratsch_diabetis", "ratsch_heart", "usps_3v5", "glass",
    "vehicle", "seitz_banana", "ratsch_waveform", "segment",
)  # fmt: skip
# Their columns.
SIMULATIONS = {
    "linear2": 8, "linear3": 13, "steep2": 8, "steep3": 13, "near3": 10, "far3": 10,
    "flip3": 10, "null2": 8, "null3": 6, "rings3": 4, "additive2": 6,
}  # fmt: skip
SIMULATED, TESTED = 180, 4000
IMAGES = ("digits", "usps", "usps_3v5")
COLUMNS = {"data": "", "method": "", "nll": ".4f", "error": ".4f", "worse": "+.4f"}
COLUMNS |= {"se": ".4f", "seconds": ".2f"}


def before(columns: int) -> Any:
    lengthscale = dist.LogNormal(0.5 * np.log(columns), 1)
    return gpaug.kernels.Matern52(
        numpyro.sample("lengthscale", lengthscale),
        numpyro.sample("variance", dist.LogNormal(1, 1)),
    )


def plain(posterior: gpaug.Posterior, X: np.ndarray, y: np.ndarray) -> Callable:
    """The posterior's probabilities as they are."""

    def probabilities(X_test: np.ndarray) -> np.ndarray:
        return of_classes(posterior.predict_y(X_test).probs)

    return probabilities


def plug_in(posterior: gpaug.Posterior, X: np.ndarray, y: np.ndarray) -> Callable:
    """Return the probabilities at the mean of the functions."""

    def probabilities(X_test: np.ndarray) -> np.ndarray:
        f = np.asarray(posterior.predict_f(X_test).mean, float)
        return of_classes(expit(f) if f.ndim == 1 else softmax(f, 1))

    return probabilities


def of_classes(p: Any) -> np.ndarray:
    """Probabilities (N, C) of two classes, too."""
    p = np.asarray(p, float)
    return np.stack([1 - p, p], 1) if p.ndim == 1 else p / p.sum(1, keepdims=True)


class Method(NamedTuple):
    """Kernel, predictions from a posterior, guide, most inducing inputs, and how it is
    learnt."""

    kernel: Callable[[int], Any]
    predict: Callable[..., Callable]
    guide: Any = gpaug.AutoSparseGP
    most: int | None = None
    options: Any = {}


METHODS = {
    "now": Method(tables.kernel, tables.tempered),
    "plain": Method(tables.kernel, plain),
    "plug-in": Method(tables.kernel, plug_in),
    "joint": Method(tables.kernel, plain, gpaug.AutoLatentGaussian),
    "before": Method(
        before, plain, most=100, options={"tol": 1e-3, "optim": optax.adam(0.1)}
    ),
}


def simulated(name: str, rng: np.random.Generator, rows: int) -> tuple[np.ndarray, ...]:
    """Draw inputs and labels by a rule: ``linear`` (slopes of one), ``steep`` (slopes
    of four or five), ``far`` (Gaussians apart), ``flip`` (the same, with a tenth of the
    labels at random), ``near``, ``null`` (labels that nothing predicts), ``rings`` or
    ``additive``; the digit is the number of classes.
    """
    X = rng.normal(size=(rows, SIMULATIONS[name]))
    kind, classes = name[:-1], int(name[-1])
    if kind in ("linear", "steep"):
        slopes = rng.normal(size=(X.shape[1], classes))
        noise = rng.gumbel(size=(rows, classes))
        return X, (X @ slopes * (1 if kind == "linear" else 4) + noise).argmax(1)
    if kind == "rings":
        return X, np.digitize((X[:, :2] ** 2).sum(1) + X[:, 2] / 3, [0.8, 2.2])
    if kind == "additive":
        f = 3 * np.sin(2 * X[:, 0]) + X[:, 1] ** 2 - 1 + X[:, 2]
        return X, (f + rng.logistic(size=rows) > 0).astype(int)
    y = rng.integers(classes, size=rows)
    if kind != "null":
        centres = rng.normal(size=(classes, X.shape[1]))
        X += centres[y] * (1 if kind == "near" else 2)
    if kind == "flip":
        y = np.where(rng.random(rows) < 0.1, rng.integers(classes, size=rows), y)
    return X, y


def load(name: str) -> tuple[np.ndarray, np.ndarray]:
    """Inputs and labels 0 .. C-1."""
    if name in SHIPPED:
        X, y = getattr(datasets, f"load_{name}")(return_X_y=True)
    else:
        folder = data_folder()
        if folder is None:
            raise SystemExit(f"no {name}.npz: set GPAUG_DATA to the data folder")
        with np.load(folder / f"{name}.npz", allow_pickle=False) as file:
            parts = ("",) if "X" in file else ("_train", "_test")
            X = np.concatenate([file[f"X{part}"] for part in parts])
            y = np.concatenate([file[f"y{part}"].ravel() for part in parts])
    return X.astype(float), np.unique(y, return_inverse=True)[1]


def cuts(name: str, num: int) -> Iterator[tuple[np.ndarray, ...]]:
    """Inputs, labels, rows for training and for testing."""
    if name in SIMULATIONS:
        for seed in range(num):
            drawn = simulated(name, np.random.default_rng(seed), SIMULATED + TESTED)
            yield *drawn, *np.split(np.arange(SIMULATED + TESTED), [SIMULATED])
        return
    X, y = load(name)
    cut = StratifiedShuffleSplit(num, test_size=0.2, random_state=0)
    for train, test in cut.split(X, y):
        yield X, y, train, test


def splits(name: str, num: int, rows: int) -> Iterator[tuple[np.ndarray, ...]]:
    """Training inputs and labels, test inputs and labels."""
    for X, y, train, test in cuts(name, num):
        chosen = train[:rows]
        scale = X[chosen].std(None if name in IMAGES else 0)
        scaled = (X - X[chosen].mean(0)) / np.where(scale > 0, scale, 1)
        scaled = scaled.astype(np.float32)
        yield scaled[chosen], y[chosen], scaled[test], y[test]


def model(X, y=None, *, Z, kernel, classes):
    """Bernoulli or softmax of one process, or of one per class."""
    several = {"num_latents": classes} if classes > 2 else {}
    shape = (classes,) if classes > 2 else ()
    prior = dist.Normal(0, 2).expand(shape).to_event(len(shape))
    mean = numpyro.sample("mean", prior)
    gp = gpaug.GaussianProcess("f", kernel(X.shape[1]), Z, mean=mean, **several)
    with numpyro.plate("data", X.shape[0]):
        f = gp(X)
        label = dist.Categorical(logits=f) if several else dist.Bernoulli(logits=f)
        numpyro.sample("y", label, obs=y)


def by_process(name: str, steps: int, inducing: int | None) -> Callable:
    """A method of ``METHODS``, as a function of the parts of a split."""
    kernel, predict, guide, most, options = METHODS[name]
    options = dict(options)
    optim = options.pop("optim", "lbfgs")
    svi = gpaug.ConjugateSVI(model, guide(model), optim)

    def probabilities(X: np.ndarray, y: np.ndarray, X_test: np.ndarray) -> np.ndarray:
        Z = gpaug.inducing.kmeans(X, tables.num_inducing(X, inducing or most))
        given = {"Z": Z, "kernel": kernel, "classes": int(y.max()) + 1}
        key = jax.random.key(0)
        fit = svi.run(key, steps, X, y, progress_bar=False, **given, **options)
        return predict(svi.posterior(fit), X, y)(X_test)

    return probabilities


def by_nuts(X: np.ndarray, y: np.ndarray, X_test: np.ndarray) -> np.ndarray:
    """The exact posterior: function values at all rows, and all hyperparameters."""
    classes = int(y.max()) + 1
    Z = np.unique(np.concatenate([X, X_test]), axis=0)
    given = {"Z": Z, "kernel": tables.kernel, "classes": classes}
    sampler = NUTS(model, max_tree_depth=8)
    mcmc = MCMC(sampler, num_warmup=400, num_samples=800, progress_bar=False)
    mcmc.run(jax.random.key(0), X, y, **given)
    drawn = {k: v for k, v in mcmc.get_samples().items() if k != "f"}
    labels = np.arange(classes)[:, None].repeat(len(X_test), 1)
    each = [log_likelihood(model, drawn, X_test, y, **given)["y"] for y in labels]
    return np.exp(np.array(each, float)).mean(1).T


def by_table(X: np.ndarray, y: np.ndarray, X_test: np.ndarray) -> np.ndarray:
    """The package's default for tables."""
    return tables.TableClassifier().fit(X, y).predict_proba(X_test)


def by_svc(X: np.ndarray, y: np.ndarray, X_test: np.ndarray) -> np.ndarray:
    """A support vector machine with Platt scaling."""
    scaled = CalibratedClassifierCV(SVC(), method="sigmoid", ensemble=False)
    return scaled.fit(X, y).predict_proba(X_test)


def by_boosting(X: np.ndarray, y: np.ndarray, X_test: np.ndarray) -> np.ndarray:
    """Gradient boosting."""
    boosting = HistGradientBoostingClassifier(random_state=0)
    return boosting.fit(X, y).predict_proba(X_test)


ALONE = {"nuts": by_nuts, "table": by_table, "svc": by_svc, "boosting": by_boosting}


def logistic(X: np.ndarray, y: np.ndarray, X_test: np.ndarray) -> np.ndarray:
    """Logistic regression."""
    estimator = LogisticRegressionCV(
        Cs=np.logspace(-4, 3, 8), cv=5, scoring="neg_log_loss", max_iter=2000
    )
    with warnings.catch_warnings():
        # Warnings of convergence at penalties that are not chosen, and of new defaults.
        warnings.simplefilter("ignore")
        return estimator.fit(X, y).predict_proba(X_test)


def compared(name: str, args: argparse.Namespace) -> list[dict[str, Any]]:
    """A row for each method; the seconds, of the last split, hold no compilation."""
    methods = {"logistic": logistic}
    # One per set: a guide keeps the shapes of its first arguments.
    for m in args.methods:
        own = ALONE.get(m) or by_process(m, args.steps, args.inducing)
        methods[m] = own
    scores: dict[str, list[tuple[float, float, float]]] = {m: [] for m in methods}
    for X, y, X_test, y_test in splits(name, args.splits, args.rows):
        for method, probabilities in methods.items():
            start = time.perf_counter()
            p = np.clip(probabilities(X, y, X_test), 1e-12, 1)
            seconds = time.perf_counter() - start
            nll = log_loss(y_test, p / p.sum(1, keepdims=True), labels=range(len(p[0])))
            scores[method].append((nll, np.mean(p.argmax(1) != y_test), seconds))
    rows = []
    for method, found in scores.items():
        nll, error, seconds = np.transpose(found)
        worse = nll - np.transpose(scores["logistic"])[0]
        se = worse.std() / np.sqrt(max(len(worse) - 1, 1))
        row = {"data": name, "method": method, "nll": nll.mean(), "error": error.mean()}
        rows.append(row | {"worse": worse.mean(), "se": se, "seconds": seconds[-1]})
    return rows


def parse(argv: list[str] | None = None) -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__.split("\n")[0])
    every = SHIPPED + (OTHERS if data_folder() else ())
    parser.add_argument("--sets", nargs="+", default=list(every))
    parser.add_argument(
        "--methods", nargs="+", choices=[*METHODS, *ALONE], default=["now", "before"]
    )
    parser.add_argument("--splits", type=int, default=4)
    parser.add_argument("--rows", type=int, default=5000, help="to train on, at most")
    parser.add_argument("--inducing", type=int, help="at most, of both recipes")
    parser.add_argument("--steps", type=int, default=200, help="at most")
    parser.add_argument("--json", help="where results are written")
    return parser.parse_args(argv)


def main(argv: list[str] | None = None) -> None:
    """Run every method on every set."""
    args = parse(argv)
    keep_compiled_programs()
    results = []
    for name in args.sets:
        rows = compared(name, args)
        print_table(rows, COLUMNS)
        results += rows
        if args.json:
            found = {"machine": machine(), "versions": versions("jax", "numpyro")}
            found |= {"options": vars(args), "results": results}
            Path(args.json).write_text(json.dumps(found, indent=1, default=float))


if __name__ == "__main__":
    main()
