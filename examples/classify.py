# SPDX-License-Identifier: Apache-2.0
"""Binary classification with a sparse Gaussian process, from a file to a picture.

Closed-form updates fit the process, and the hyperparameters are learnt on the same
bound. If there are few columns, the kernel has a lengthscale for each and a linear
term. Labels left out choose a temperature that calibrates the probabilities. The script
compares with logistic regression and a support vector machine, checks the fit with
ArviZ, saves and loads the posterior, and draws ``classify.png``::

    python examples/classify.py
    python examples/classify.py --data mine.npz --inducing 200 --out mine.png
"""

from __future__ import annotations

import argparse
import os
import time
import warnings
from functools import partial
from pathlib import Path
from typing import Any, NamedTuple

# Before jax starts: jaxlib 0.10.1 prints lines about each compiled program it reads.
os.environ.setdefault("TF_CPP_MIN_LOG_LEVEL", "3")

import jax
import jax.numpy as jnp
import matplotlib
import numpy as np
import numpyro
import numpyro.distributions as dist
from sklearn.calibration import CalibratedClassifierCV
from sklearn.datasets import load_breast_cancer
from sklearn.linear_model import LogisticRegression
from sklearn.metrics import log_loss
from sklearn.model_selection import train_test_split
from sklearn.preprocessing import StandardScaler
from sklearn.svm import SVC
from support.compilation import keep_compiled_programs

import numpyro_gpaug as gpaug
from numpyro_gpaug import diagnostics, plots, tables

matplotlib.use("Agg")
import matplotlib.pyplot as plt  # noqa: E402

COLORS = {
    "Gaussian process": "C0",
    "Logistic regression": "C1",
    "RBF SVM + Platt": "C2",
}
CLASSES = "#b2182b", "#2166ac"


class Split(NamedTuple):
    """Standardised inputs and 0/1 labels."""

    X: np.ndarray
    y: np.ndarray
    X_test: np.ndarray
    y_test: np.ndarray


def model(X, y=None, inducing=None):
    """A Gaussian process with a learnt kernel and an unknown constant mean, of variance
    4: a part of the process, which is integrated out."""
    kernel = tables.kernel(X.shape[1]) + 4.0
    gp = gpaug.GaussianProcess("f", kernel, inducing=inducing)
    with numpyro.plate("data", X.shape[0]):
        numpyro.sample("y", dist.Bernoulli(logits=gp(X)), obs=y)


# -- data ---------------------------------------------------------------------------


def load(path: str | None) -> tuple[np.ndarray, np.ndarray]:
    """Inputs and 0/1 labels, from an .npz with X and y or a .csv with labels last."""
    if path is None:
        cancer = load_breast_cancer()
        print("data: breast cancer (scikit-learn); 0 = malignant, 1 = benign")
        return cancer.data, cancer.target
    if path.endswith(".npz"):
        with np.load(path, allow_pickle=False) as archive:
            if not {"X", "y"} <= set(archive):
                raise SystemExit(f"{path} holds {list(archive)}; expected X and y")
            X, labels = archive["X"], archive["y"]
    elif path.endswith(".csv"):
        words = np.genfromtxt(path, delimiter=",", dtype=str, ndmin=2)
        numbers = np.genfromtxt(
            path, delimiter=",", ndmin=2
        )  # NaN where a cell is not a number
        header = int(np.isnan(numbers[0, :-1]).all())
        X, labels = numbers[header:, :-1], numbers[header:, -1]
        if np.isnan(labels).any():
            labels = words[header:, -1]
    else:
        raise SystemExit(f"--data must end in .npz or .csv, got {path}")
    return X, encode(path, X, labels)


def encode(path: str, X: np.ndarray, labels: np.ndarray) -> np.ndarray:
    """Labels as 0 and 1; refuses anything that is not a binary problem."""
    if X.ndim != 2 or labels.shape != X.shape[:1] or X.dtype.kind not in "biuf":
        raise SystemExit(
            f"{path}: X is {X.dtype} of shape {X.shape}, y has shape {labels.shape}; "
            "expected numbers (N, D) and labels (N,)"
        )
    bad = ~np.isfinite(X).all(1) | np.isin(labels.astype(str), ["", "nan", "NaN", "NA"])
    if bad.any():
        raise SystemExit(
            f"{path}: {bad.sum()} of {len(X)} rows hold NaN, infinite or missing "
            f"values, the first is row {bad.argmax()}; drop or impute them"
        )
    values, counts = np.unique(labels, return_counts=True)
    if len(values) != 2 or counts.min() < 10:
        raise SystemExit(
            f"{path}: y holds {len(values)} distinct values, {values[:5]}, the rarest "
            f"{min(counts, default=0)} times; expected two, each ten times or more"
        )
    print(f"data: {path}; 0 = {values[0]}, 1 = {values[1]}")
    return (labels == values[1]).astype(int)


def split(X: np.ndarray, y: np.ndarray, seed: int) -> Split:
    """80/20, stratified; standardised by the training inputs."""
    X, X_test, y, y_test = train_test_split(
        X, y, test_size=0.2, stratify=y, random_state=seed
    )
    scaler = StandardScaler().fit(X)
    dtype = jnp.result_type(float)
    X, X_test = (scaler.transform(x).astype(dtype) for x in (X, X_test))
    return Split(X, y, X_test, y_test)


# -- fits ---------------------------------------------------------------------------


def fit(data: Split, args: argparse.Namespace) -> dict[str, Any]:
    """The Gaussian process: everything that is later checked, printed or drawn."""
    start = time.perf_counter()
    size = tables.num_inducing(data.X, args.inducing)
    Z = gpaug.inducing.kmeans(data.X, size, seed=args.seed)
    guide = gpaug.AutoSparseGP(model)
    svi = gpaug.ConjugateSVI(model, guide)
    given = (data.X, data.y), {"inducing": Z}
    key = jax.random.key(args.seed)
    # One step compiles; the run after it starts afresh and reuses the compiled step.
    svi.run(key, 1, *given[0], **given[1], progress_bar=False)
    compiled = time.perf_counter()
    result = svi.run(key, args.steps, *given[0], **given[1], progress_bar=args.progress)
    fitted = time.perf_counter()
    diagnose = partial(
        diagnostics.to_datatree, key, model, guide, result.params, *given[0],
        losses=result.losses, **given[1],
    )  # fmt: skip
    return {
        "posterior": svi.posterior(result),
        "hyperparameters": guide.other_median(result.params),
        "losses": result.losses,
        "diagnose": diagnose,
        "Z": np.asarray(Z),
        "times": (compiled - start, fitted - compiled),
    }


def baselines(data: Split, seed: int) -> dict[str, Any]:
    """Rivals with probabilities; Platt scaling is a cross-validated sigmoid."""
    svm = SVC(random_state=seed)
    platt = CalibratedClassifierCV(svm, method="sigmoid", ensemble=False)
    logistic = LogisticRegression(max_iter=1000)
    rivals = {"Logistic regression": logistic, "RBF SVM + Platt": platt}
    return {name: rival.fit(data.X, data.y) for name, rival in rivals.items()}


# -- report -------------------------------------------------------------------------


def report_scores(probs: dict[str, np.ndarray], y: np.ndarray) -> None:
    """Test scores of every method; lower is better in each."""
    print(f"\n{'test set':<22}{'error':>8}{'NLL':>8}{'Brier':>8}{'ECE':>8}")
    for name, p in probs.items():
        scores = (
            np.mean((p > 0.5) != y),
            log_loss(y, p, labels=[0, 1]),
            diagnostics.brier_score(p, y),
            diagnostics.expected_calibration_error(p, y, num_bins=10),
        )
        print(f"{name:<22}" + "".join(f"{score:8.4f}" for score in scores))


def report_fit(fitted: dict[str, Any], num_data: int) -> None:
    """Hyperparameters, bound, diagnostics, times."""
    losses, tree = fitted["losses"], fitted["diagnose"]()
    found = fitted["hyperparameters"]
    values = [f"{k} {v:.3g}" for k, v in found.items() if jnp.ndim(v) == 0]
    print("\nhyperparameters       ", ", ".join(values))
    if "relative" in found:
        order = np.argsort(found["relative"])[:5]
        print("shortest lengthscales  columns", ", ".join(map(str, order)))
    verdict = diagnostics.convergence(losses).verdict
    print(
        f"bound (ELBO)           {-losses[-1]:.2f} after {len(losses)} steps: {verdict}"
    )
    psis = diagnostics.psis_khat(tree)
    print(f"PSIS k-hat             {psis.khat:.2f} ({psis.verdict})")
    with warnings.catch_warnings():
        # ArviZ warns about large k; the line below counts them instead.
        warnings.filterwarnings("ignore", "Estimated shape parameter of Pareto")
        loo = diagnostics.loo(tree, correct=psis.khat < 0.7)
    high = int((loo.pareto_k.values > loo.good_k).sum())
    note = f"; k above {loo.good_k:.2f} at {high} of {num_data}" if high else ""
    print(f"LOO on training data   elpd {loo.elpd:.1f}, se {loo.se:.1f}{note}")
    setup, run = fitted["times"]
    print(f"time                   {setup:.1f} s set-up and compile, {run:.1f} s fit")


def check_saved(posterior: gpaug.Posterior, X: np.ndarray, path: str) -> None:
    """Save, load, and compare predictions."""
    posterior.save(path)
    loaded = gpaug.Posterior.load(path, model)
    before, after = (p.predict_y(X).probs for p in (posterior, loaded))
    worst = float(jnp.abs(before - after).max())
    print(f"saved {path}, loaded again: predictions differ by at most {worst:g}")


# -- picture ------------------------------------------------------------------------


def draw(data: Split, fitted: dict[str, Any], probs: dict, path: str) -> None:
    """Reliability diagram, bound, and decision surface (or ranked predictions)."""
    style = {"axes.spines.top": False, "axes.spines.right": False}
    style |= {"font.size": 10, "axes.titlepad": 24}
    with plt.rc_context(style):
        figure = plt.figure(figsize=(14, 4.6), layout="constrained")
        grid = figure.add_gridspec(4, 3, width_ratios=(1, 1, 1.25))
        top, bottom = figure.add_subplot(grid[:3, 0]), figure.add_subplot(grid[3, 0])
        plots.plot_reliability(probs, data.y_test, colors=COLORS, ax=top)
        top.set(title="Reliability on test data", xlabel="")
        top.tick_params(labelbottom=False)
        draw_counts(bottom, probs, data.y_test)
        bound = plots.plot_elbo(fitted["losses"], ax=figure.add_subplot(grid[:, 1]))
        bound.set_title(f"Closed-form fit: {bound.get_title()}")
        last = figure.add_subplot(grid[:, 2])
        if data.X.shape[1] == 2:
            plots.plot_decision(
                fitted["posterior"], data.X, data.y, inducing=fitted["Z"], ax=last
            )
            last.set(xlabel="input 1 (standardised)", ylabel="input 2 (standardised)")
            last.set_title("Decision surface and training data")
        else:
            draw_ranked(last, data, fitted["posterior"])
        figure.savefig(path, dpi=150)
        plt.close(figure)


def draw_counts(axes, probs: dict[str, np.ndarray], y: np.ndarray) -> None:
    """Draw the number of predictions in each bin of the reliability diagram."""
    num_bins = 5 if len(y) < 500 else 10
    width = 0.8 / num_bins / len(probs)
    for i, (name, p) in enumerate(probs.items()):
        curve = diagnostics.reliability_curve(p, y, num_bins)
        left = curve.edges[:-1] + 0.1 / num_bins + i * width
        axes.bar(left, curve.counts, width, align="edge", color=COLORS[name])
    axes.set(xlabel="predicted probability", ylabel="count", xlim=(-0.04, 1.04))


def draw_ranked(axes, data: Split, posterior: gpaug.Posterior) -> None:
    f = posterior.predict_f(data.X_test)
    order = np.argsort(np.asarray(f.mean))
    mean, y = np.asarray(f.mean)[order], data.y_test[order]
    sd, rank = np.sqrt(np.asarray(f.variance))[order], np.arange(len(y))
    for width, color in ((2, "0.9"), (1, "0.8")):
        low, high = mean - width * sd, mean + width * sd
        axes.fill_between(rank, low, high, color=color, lw=0)
    axes.axhline(0, color="0.4", lw=1, ls="--")
    for label, marker in ((0, "o"), (1, "s")):
        axes.scatter(
            rank[y == label], mean[y == label], s=18, marker=marker, ec="w", lw=0.4,
            color=CLASSES[label], zorder=2 + (np.mean(y == label) < 0.5),
            label=f"class {label}",
        )  # fmt: skip
    wrong = (mean > 0) != y
    circle = {"fc": "none", "ec": "k", "zorder": 4, "label": "misclassified"}
    axes.scatter(rank[wrong], mean[wrong], s=90, **circle)
    axes.legend(frameon=False, loc="upper left")
    axes.set(xlabel="test points, ranked", ylabel="latent function (log-odds)")
    axes.set_title("Latent mean with one and two standard deviations")


# -- main ---------------------------------------------------------------------------


def parse(argv: list[str] | None) -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__.split("\n")[0])
    parser.add_argument("--data", help=".npz with X and y, or .csv with labels last")
    parser.add_argument("--inducing", type=int, help="inducing inputs")
    parser.add_argument("--steps", type=int, default=200, help="steps at most")
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--out", default="classify.png", help="the picture")
    parser.add_argument("--save", default="classify_posterior.npz")
    parser.add_argument("--no-progress", dest="progress", action="store_false")
    return parser.parse_args(argv)


def main(argv: list[str] | None = None) -> None:
    """Run the whole job."""
    start = time.perf_counter()
    args = parse(argv)
    keep_compiled_programs()
    data = split(*load(args.data), args.seed)
    num_data, dim = data.X.shape
    print(f"{num_data} training and {len(data.y_test)} test rows, {dim} inputs")
    fitted = fit(data, args)
    posterior = fitted["posterior"]
    tempered = tables.tempered(posterior, data.X, data.y)
    probs = {"Gaussian process": tempered(data.X_test)[:, 1]}
    for name, rival in baselines(data, args.seed).items():
        probs[name] = rival.predict_proba(data.X_test)[:, 1]
    report_scores(probs, data.y_test)
    print(f"after {time.perf_counter() - start:.2f} s, imports apart")
    report_fit(fitted, num_data)
    check_saved(posterior, data.X_test, args.save)
    draw(data, fitted, probs, args.out)
    print(f"drew {Path(args.out).resolve()}")


if __name__ == "__main__":
    main()
