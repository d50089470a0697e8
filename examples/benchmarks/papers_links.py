# SPDX-License-Identifier: Apache-2.0
r"""Inverse links learnt from data, beside the tables of Seitz (2022).

Called by ``papers.py --table links``, on the data in the folder ``GPAUG_DATA``. Ten
contiguous folds; inputs (and real observations) standardised by the training part, and
scores on that scale: mean test log-likelihood, F1 or root mean squared error.

``as published``: NumPyro's ``SVI`` on the analytic bound (the process whitened, which
theirs is not), ten inducing inputs that start at the first training rows, everything
learnt by Adam at 0.05 in 350 batches of 100; a fixed link of 100 pieces on [-5, 5], a
learnt one of 20 on [-3, 3]. ``closed form``: ``ConjugateSVI`` on all rows, k-means
inducing inputs; for real observations a lengthscale per column. A figure is met if it
is at least the published one less one standard error over folds.
"""

from __future__ import annotations

import argparse
import time
from collections.abc import Iterator
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
import numpyro
import numpyro.distributions as dist
import optax
from common import data_folder, print_table
from numpyro.distributions import constraints
from sklearn.linear_model import LogisticRegression, RidgeCV
from sklearn.metrics import f1_score
from sklearn.model_selection import KFold

import numpyro_gpaug as gpaug

# Log-likelihood and score of each method, as published.
PUBLISHED = {
    "banana": {"fixed link": (-0.260, 0.876), "learnt link": (-0.258, 0.876)},
    "heart": {"fixed link": (-0.397, 0.822), "learnt link": (-0.402, 0.816)},
    "cancer": {"fixed link": (-0.093, 0.961), "learnt link": (-0.085, 0.962)},
    "boston": {"learnt link": (-0.859, 0.451), "prior on link": (-0.700, 0.471)},
}
REAL = ("boston",)
LEARNT = 20, -3.0, 3.0
FIXED = 100, -5.0, 5.0
BATCH, STEPS, RATE, FEW = 100, 350, 0.05, 10
# The paper does not state where lengthscale, inducing inputs and noise start; its code
# (github.com/SaremS/PieceWiseGP) says: at e, at the first rows, at 1.
START = float(np.e)
BETTER_STEPS = 150
COLUMNS = {
    "method": "",
    "engine": "",
    "loglik": ".4f",
    "loglik_se": ".4f",
    "score": ".4f",
    "score_se": ".4f",
    "seconds": ".2f",
    "met": "",
}


class Fold(NamedTuple):
    """Standardised training and test parts."""

    X: np.ndarray
    y: np.ndarray
    X_test: np.ndarray
    y_test: np.ndarray


def model(X, y=None, *, start, Z, link, real, batch=None):
    """A process with a piecewise link; ``start`` are its lengthscales, one or several.

    :param link: ``"fixed link"``, ``"learnt link"`` or ``"prior on link"``.
    :param real: whether observations are real; else labels 0/1.
    :param batch: rows of a minibatch, and the inducing inputs are learnt too.
    """
    positive = constraints.positive
    lengthscale = numpyro.param("lengthscale", start, constraint=positive)
    variance = numpyro.param("variance", 1.0, constraint=positive)
    inducing = Z if batch is None else numpyro.param("inducing", Z)
    kernel = gpaug.kernels.SquaredExponential(lengthscale, variance)
    gp = gpaug.GaussianProcess("f", kernel, inducing=inducing)
    if real:
        initial = gpaug.PiecewiseLink.from_function(lambda f: f, *LEARNT)
        scale = numpyro.param("scale", 1.0, constraint=positive)
    else:
        pieces = FIXED if link == "fixed link" else LEARNT
        initial = gpaug.PiecewiseLink.from_function(jax.nn.sigmoid, *pieces)
    if link == "prior on link":
        prior = dist.Normal(initial.heights, 1.0).to_event(1)
        inverse = initial.with_heights(numpyro.sample("heights", prior))
    elif link == "learnt link":
        inside = constraints.real if real else constraints.unit_interval
        inverse = gpaug.learned_link("heights", initial, inside)
    else:
        inverse = initial
    with numpyro.plate("data", X.shape[0], subsample_size=batch) as rows:
        if batch is not None:
            X, y = X[rows], None if y is None else y[rows]
        f = gp(X)
        fn = (
            gpaug.PiecewiseNormal(f, inverse, scale)
            if real
            else gpaug.PiecewiseBernoulli(f, inverse)
        )
        numpyro.sample("y", fn, obs=y)


def folds(name: str) -> Iterator[Fold]:
    """The ten contiguous folds of a data set."""
    with np.load(data_folder() / f"seitz_{name}.npz", allow_pickle=False) as file:
        X, y = file["X"].astype(float), file["y"].ravel()
    y = y.astype(float) if name in REAL else y.astype(int)
    for train, test in KFold(10).split(X):
        scaled = (X - X[train].mean(0)) / np.maximum(X[train].std(0), 1e-12)
        X32 = scaled.astype(jnp.result_type(float))
        out = y
        if name in REAL:
            out = ((y - y[train].mean()) / y[train].std()).astype(X32.dtype)
        yield Fold(X32[train], out[train], X32[test], out[test])


def as_published(name: str, link: str):
    """The paper's settings, by gradients."""
    guide = gpaug.AutoSparseGP(model, covariance="dense")
    svi = numpyro.infer.SVI(model, guide, optax.adam(RATE), gpaug.TraceAnalytic_ELBO())
    named = {"link": link, "real": name in REAL, "batch": BATCH}

    # One compilation for all folds of one size; svi.run makes one at every call.
    @jax.jit
    def train(state, X, y, start, Z):
        def step(state, _):
            return svi.update(state, X, y, start=start, Z=Z, **named)

        return jax.lax.scan(step, state, None, length=STEPS)[0]

    def fit(fold: Fold) -> gpaug.Posterior:
        start, Z = jnp.asarray(START, fold.X.dtype), fold.X[:FEW]
        kwargs = {"start": start, "Z": Z, **named}
        state = svi.init(jax.random.key(0), fold.X, fold.y, **kwargs)
        params = svi.get_params(train(state, fold.X, fold.y, start, Z))
        return gpaug.Posterior.from_guide(
            model, guide, params, fold.X, fold.y, **kwargs
        )

    return fit


def closed_form(name: str, link: str, num_inducing: int, steps: int):
    """Closed-form steps on all rows, gradients for hyperparameters and heights."""
    optim = optax.adam(optax.cosine_decay_schedule(0.1, steps, alpha=0.05))
    svi = gpaug.ConjugateSVI(model, gpaug.AutoSparseGP(model), optim)

    def fit(fold: Fold) -> gpaug.Posterior:
        columns = fold.X.shape[1]
        # A label says too little to learn a lengthscale per column from few rows.
        shape = (columns,) if name in REAL else ()
        kwargs = {
            "start": jnp.asarray(np.full(shape, np.sqrt(columns)), fold.X.dtype),
            "Z": gpaug.inducing.kmeans(fold.X, min(num_inducing, len(fold.X) // 5)),
            "link": link, "real": name in REAL,
        }  # fmt: skip
        result = svi.run(
            jax.random.key(0), steps, fold.X, fold.y, progress_bar=False, **kwargs
        )
        return svi.posterior(result.params)

    return fit


def linear(fold: Fold, real: bool) -> tuple[float, float]:
    """Ridge regression with the variance of its residuals, or logistic regression."""
    if real:
        ridge = RidgeCV(np.logspace(-3, 3, 25)).fit(fold.X, fold.y)
        spread = np.std(fold.y - ridge.predict(fold.X))
        law = dist.Normal(ridge.predict(fold.X_test), spread)
        error = ridge.predict(fold.X_test) - fold.y_test
        return float(law.log_prob(fold.y_test).mean()), float(np.mean(error**2) ** 0.5)
    logistic = LogisticRegression(max_iter=1000).fit(fold.X, fold.y)
    log_p = logistic.predict_log_proba(fold.X_test)
    own = log_p[np.arange(len(fold.y_test)), fold.y_test]
    return float(own.mean()), float(f1_score(fold.y_test, log_p.argmax(1)))


def judged(posterior: gpaug.Posterior, fold: Fold, real: bool) -> tuple[float, float]:
    """Mean test log-likelihood, and F1 or root mean squared error."""
    law = posterior.predict_y(fold.X_test)
    loglik = float(np.mean(law.log_prob(fold.y_test)))
    if real:
        return loglik, float(np.sqrt(np.mean(np.square(law.mean - fold.y_test))))
    return loglik, float(f1_score(fold.y_test, np.asarray(law.probs) > 0.5))


def summary(scores: list[tuple[float, float]], seconds: float) -> dict[str, Any]:
    """Means and standard errors over folds."""
    loglik, score = np.mean(scores, 0)
    spread = np.std(scores, 0, ddof=1) if len(scores) > 1 else np.full(2, np.nan)
    se = spread / np.sqrt(len(scores))
    return {
        "loglik": float(loglik), "loglik_se": float(se[0]), "score": float(score),
        "score_se": float(se[1]), "seconds": seconds,
    }  # fmt: skip


def met(row: dict[str, Any], published: tuple[float, float], real: bool) -> bool:
    """At least as good as published, within one standard error."""
    sign = -1 if real else 1
    return (
        row["loglik"] >= published[0] - row["loglik_se"]
        and sign * row["score"] >= sign * published[1] - row["score_se"]
    )


def run_set(name: str, options: argparse.Namespace) -> list[dict[str, Any]]:
    """Every method on one data set."""
    real, rows = name in REAL, []
    parts = list(folds(name))[: options.folds]
    for link, published in PUBLISHED[name].items():
        engines = {
            "as published": as_published(name, link),
            "closed form": closed_form(
                name, link, options.num_inducing, options.steps or BETTER_STEPS
            ),
        }
        for engine, fit in engines.items():
            start = time.perf_counter()
            scores = [judged(fit(fold), fold, real) for fold in parts]
            seconds = (time.perf_counter() - start) / len(parts)
            row = summary(scores, seconds)
            row["met"] = "yes" if met(row, published, real) else "no"
            rows.append({"method": link, "engine": engine} | row)
        rows.append({
            "method": link, "engine": "published", "loglik": published[0],
            "score": published[1],
        })  # fmt: skip
    plain = summary([linear(fold, real) for fold in parts], float("nan"))
    rows.append({"method": "linear", "engine": "scikit-learn"} | plain)
    return rows


def run(options: argparse.Namespace) -> dict[str, Any]:
    """Runs and prints the table."""
    names = options.datasets or list(PUBLISHED)
    if unknown := set(names) - set(PUBLISHED):
        raise SystemExit(f"unknown data sets {sorted(unknown)}; {list(PUBLISHED)}")
    print(f"{options.folds} of 10 contiguous folds; means and standard errors over "
          "folds; score: F1, or root mean squared error (boston)")  # fmt: skip
    output = {}
    for name in names:
        print(f"\n{name}")
        output[name] = run_set(name, options)
        print_table(output[name], COLUMNS)
    return output
