# SPDX-License-Identifier: Apache-2.0
"""Multi-class classification with sparse Gaussian processes, from data to a picture.

The script fits softmax, logistic-softmax and robust-max likelihoods with the same model
function, beside logistic regression and a support vector machine. Everything is learnt
on the bound, inducing inputs too. The kernel and the temperature are the ones of
``classify.py``. For images the script also learns a distance over which neighbouring
pixels are averaged. Then it fits the toy problem of Galy-Fajou et al. (2020), with
class probabilities as red, green and blue, and draws ``multiclass.png``::

    python examples/multiclass.py
    python examples/multiclass.py --data mine.npz --inducing 300 --out mine.png
    python examples/multiclass.py --all-folds
"""

from __future__ import annotations

import argparse
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import matplotlib
import numpy as np
import numpyro
import numpyro.distributions as dist
from sklearn.calibration import CalibratedClassifierCV
from sklearn.datasets import load_digits
from sklearn.linear_model import LogisticRegression
from sklearn.metrics import log_loss
from sklearn.model_selection import StratifiedKFold
from sklearn.svm import SVC
from support.compilation import keep_compiled_programs

import numpyro_gpaug as gpaug
from numpyro_gpaug import diagnostics, tables

matplotlib.use("Agg")
import matplotlib.pyplot as plt  # noqa: E402
from matplotlib.ticker import LogLocator, NullLocator  # noqa: E402

FOLDS = 10
SHOWN = "lengthscale", "variance", "slopes", "blur", "epsilon"
SCORES = "error", "NLL", "Brier", "ECE", "ELBO", "seconds"


def softmax(f: jax.Array) -> dist.Distribution:
    return dist.Categorical(logits=f)


def robust_max(f: jax.Array) -> dist.Distribution:
    unit = dist.constraints.unit_interval
    return gpaug.RobustMax(f, numpyro.param("epsilon", 0.05, constraint=unit))


# Add a likelihood here: its name, the distribution, the updates.
METHODS: dict[str, tuple[Callable[[jax.Array], dist.Distribution], str]] = {
    "softmax, exact": (softmax, "auto"),
    "logistic-softmax, exact": (gpaug.LogisticSoftmax, "auto"),
    "logistic-softmax, augmented": (gpaug.LogisticSoftmax, "augmented"),
    "robust-max, exact": (robust_max, "auto"),
}
# The picture has a panel for each of these.
LIKELIHOODS = [name for name, (_, updates) in METHODS.items() if updates == "auto"]


class Data(NamedTuple):
    """Inputs, labels 0 .. C-1, names of the classes, and the side of images."""

    X: np.ndarray
    y: np.ndarray
    classes: np.ndarray
    side: int | None


class Split(NamedTuple):
    """Scaled inputs and labels, and the rows that the test part comes from."""

    X: np.ndarray
    y: np.ndarray
    X_test: np.ndarray
    y_test: np.ndarray
    rows: np.ndarray


class Fitted(NamedTuple):
    """A fit, with the seconds it took, compilation included."""

    posterior: gpaug.Posterior
    losses: np.ndarray
    learnt: dict[str, Any]
    seconds: float


# -- model --------------------------------------------------------------------------


def model(X, y=None, *, Z, likelihood, num_classes, side=None):
    """One Gaussian process per class, all with the same learnt kernel."""
    kernel = tables.kernel(X.shape[1])
    mean = dist.Normal(0, 2).expand([num_classes]).to_event(1)
    mean = numpyro.sample("mean", mean)
    Z = numpyro.param("Z", Z)
    if side is not None:
        width = numpyro.param("blur", 0.5, constraint=dist.constraints.positive)
        blurred = blur(width, side)
        X, Z = X @ blurred, Z @ blurred
    gp = gpaug.GaussianProcess("f", kernel, Z, num_latents=num_classes, mean=mean)
    with numpyro.plate("data", X.shape[0]):
        numpyro.sample("y", likelihood(gp(X)), obs=y)


def blur(width: jax.Array, side: int) -> jax.Array:
    """The matrix that blurs images by a Gaussian of this width, in pixels."""
    pixels = jnp.arange(side, dtype=jnp.result_type(float))
    row = jnp.exp(-0.5 * jnp.square((pixels[:, None] - pixels) / width))
    row = row / row[side // 2].sum()
    return jnp.kron(row, row)


def fit(
    X: np.ndarray, y: np.ndarray, method: str, steps: int, most: int | None, **shape
) -> Fitted:
    """L-BFGS on the bound at its optimum over the processes, from a cold start."""
    start = time.perf_counter()
    likelihood, updates = METHODS[method]
    Z = gpaug.inducing.kmeans(X, tables.num_inducing(X, most))
    guide = gpaug.AutoSparseGP(model)
    svi = gpaug.ConjugateSVI(model, guide, updates=updates)
    given = {"Z": Z, "likelihood": likelihood, **shape}
    result = svi.run(jax.random.key(0), steps, X, y, progress_bar=False, **given)
    posterior = svi.posterior(result)
    seconds = time.perf_counter() - start
    learnt = {**result.params, **guide.other_median(result.params)}
    learnt = {k: v for k, v in learnt.items() if k in SHOWN}
    return Fitted(posterior, np.asarray(result.losses), learnt, seconds)


# -- data ---------------------------------------------------------------------------


def load(path: str | None, side: int | None) -> Data:
    """Digits, or an .npz with X and y, or a .csv with labels last."""
    if path is None:
        X, labels = load_digits(return_X_y=True)
        side = 8
    elif path.endswith(".npz"):
        with np.load(path, allow_pickle=False) as archive:
            if not {"X", "y"} <= set(archive):
                raise SystemExit(f"{path} holds {list(archive)}; expected X and y")
            X, labels = archive["X"].astype(float), archive["y"].ravel()
    elif path.endswith(".csv"):
        words = np.genfromtxt(path, delimiter=",", dtype=str, ndmin=2)
        X = np.genfromtxt(path, delimiter=",", ndmin=2)[:, :-1]
        header = int(np.isnan(X[0]).all())
        X, labels = X[header:], words[header:, -1]
    else:
        raise SystemExit(f"--data must end in .npz or .csv, got {path}")
    if X.ndim != 2 or labels.shape != X.shape[:1] or not np.isfinite(X).all():
        shapes = f"X has shape {X.shape} and y {labels.shape}"
        raise SystemExit(f"{path}: {shapes}; expected finite (N, D) and labels (N,)")
    if side is not None and side * side != X.shape[1]:
        raise SystemExit(f"--side {side} asks for {side**2} columns, not {X.shape[1]}")
    classes, y, counts = np.unique(labels, return_inverse=True, return_counts=True)
    if len(classes) < 2 or counts.min() < 2 or len(classes) > len(y) // 5:
        raise SystemExit(
            f"{path}: {len(classes)} classes in {len(y)} rows, the rarest "
            f"{counts.min()} times; expected two or more, each more than once"
        )
    return Data(X, y, classes, side)


def split(data: Data, fold: int, seed: int) -> Split:
    """A stratified fold; columns scaled by the training part, pixels all alike."""
    folds = StratifiedKFold(FOLDS, shuffle=True, random_state=seed)
    train, test = list(folds.split(data.X, data.y))[fold]
    X = data.X - data.X[train].mean(0)
    # Pixels share a unit: scaled one by one, constant dark pixels would become noise.
    scale = X[train].std(None if data.side else 0)
    X = (X / np.where(scale > 0, scale, 1)).astype(jnp.result_type(float))
    return Split(X[train], data.y[train], X[test], data.y[test], test)


def rivals() -> dict[str, Any]:
    """Platt scaling is a cross-validated sigmoid for each class."""
    platt = CalibratedClassifierCV(SVC(), method="sigmoid", ensemble=False)
    logistic = LogisticRegression(max_iter=1000)
    return {"Logistic regression": logistic, "RBF SVM + Platt": platt}


# -- scores -------------------------------------------------------------------------


def run_fold(data: Data, fold: int, args: argparse.Namespace) -> tuple[dict, ...]:
    """Test scores, test probabilities and fits, by method."""
    parts = split(data, fold, args.seed)
    shape = {"num_classes": len(data.classes), "side": data.side}
    scores, probs, fits = {}, {}, {}
    for name in METHODS:
        fitted = fit(parts.X, parts.y, name, args.steps, args.inducing, **shape)
        tempered = tables.tempered(fitted.posterior, parts.X, parts.y)
        p = probs[name] = tempered(parts.X_test)
        rest = -fitted.losses[-1], fitted.seconds
        scores[name] = (*score(p, parts.y_test), *rest)
        fits[name] = fitted
    for name, rival in rivals().items():
        start = time.perf_counter()
        p = probs[name] = rival.fit(parts.X, parts.y).predict_proba(parts.X_test)
        rest = np.nan, time.perf_counter() - start
        scores[name] = (*score(p, parts.y_test), *rest)
    return scores, probs, fits


def score(p: np.ndarray, y: np.ndarray) -> tuple[float, ...]:
    nll = log_loss(y, p, labels=range(p.shape[1]))
    ece = diagnostics.expected_calibration_error(p, y, num_bins=10)
    return float(np.mean(p.argmax(1) != y)), nll, diagnostics.brier_score(p, y), ece


def report(scores: dict[str, tuple[float, ...]], title: str) -> None:
    """Lower is better, except for the bound (ELBO)."""
    print(f"\n{title:<28}" + "".join(f"{name:>9}" for name in SCORES))
    for name, row in scores.items():
        cells = f"{name:<28}" + "".join(f"{value:9.4f}" for value in row[:4])
        print(cells + "".join(f"{value:9.1f}" for value in row[4:]))


def report_kernels(fits: dict[str, Fitted]) -> None:
    print()
    for name, fitted in fits.items():
        values = ", ".join(f"{k} {v:.3g}" for k, v in fitted.learnt.items())
        print(f"{name:<28}", values)


# -- the toy problem of the paper ---------------------------------------------------


def toy(num: int = 500, variance: float = 0.5) -> tuple[np.ndarray, np.ndarray, Any]:
    """Points of three Gaussians, and the true class probabilities as a function."""
    rng = np.random.default_rng(1)
    angle = np.pi * (0.5 + 2 / 3 * np.arange(3))
    centres = 1.2 * np.stack([np.cos(angle), np.sin(angle)], 1)
    y = rng.integers(3, size=num)
    X = centres[y] + np.sqrt(variance) * rng.normal(size=(num, 2))

    def truth(points: np.ndarray) -> np.ndarray:
        squared = np.square(points[:, None] - centres).sum(-1)
        return jax.nn.softmax(-0.5 / variance * squared)

    return X.astype(jnp.result_type(float)), y, truth


def draw_toy(axes: list, steps: int) -> None:
    """One panel for the truth, one for each likelihood."""
    X, y, truth = toy()
    ends = np.linspace(-3.6, 3.6, 160)
    mesh = np.stack(np.meshgrid(ends, ends), -1).reshape(-1, 2).astype(X.dtype)
    panels = {"true probabilities": truth}
    for name in LIKELIHOODS:
        fitted = fit(X, y, name, steps, 30, num_classes=3)
        panels[name] = lambda points, at=fitted.posterior: at.predict_y(points).probs
    for panel, (name, probabilities) in zip(axes, panels.items(), strict=True):
        p = np.asarray(probabilities(mesh)).reshape(160, 160, 3)
        where = [ends[0], ends[-1]] * 2
        panel.imshow(np.clip(p, 0, 1), origin="lower", extent=where)
        style = {"colors": "w", "linewidths": 1.2, "linestyles": ":"}
        panel.contour(ends, ends, p.max(-1), [0.9], **style)
        for label, marker in enumerate("os^"):
            tint = 0.6 + 0.4 * np.eye(3)[label]
            at = X[y == label].T
            panel.scatter(*at, 9, [tint], marker=marker, ec="k", lw=0.5)
        far = np.mean(np.sum(truth(X) * np.log(truth(X) / probabilities(X)), 1))
        title = name if probabilities is truth else f"{name} (KL {far:.3f} nats)"
        panel.set_title(title, fontsize=9.5)
        panel.set(xticks=[], yticks=[], xlim=where[:2], ylim=where[2:])
        panel.spines[:].set_visible(False)


# -- picture of the data ------------------------------------------------------------


def draw(data: Data, split_: Split, probs: dict, fits: dict, path: str, steps: int):
    """Toy panels above; bounds, the least certain test rows and reliability below."""
    style = {"font.size": 9, "axes.spines.top": False, "axes.spines.right": False}
    with plt.rc_context(style):
        figure = plt.figure(figsize=(14, 8.2), layout="constrained")
        upper, lower = figure.subfigures(2, 1, height_ratios=(1.05, 1), hspace=0.03)
        upper.suptitle(
            "500 points of three Gaussians: class probabilities as red, green, blue; "
            "dotted where the largest is 0.9 (robust-max: 1 - epsilon at most)",
            fontweight="bold",
        )
        draw_toy(list(upper.subplots(1, 1 + len(LIKELIHOODS))), min(steps, 60))
        left, middle, right = lower.subfigures(1, 3, width_ratios=(1, 2.1, 1))
        draw_bounds(left.subplots(), fits, len(split_.y))
        draw_uncertain(middle, data, split_, probs[next(iter(METHODS))])
        draw_reliability(right.subplots(), probs, split_.y_test)
        figure.savefig(path, dpi=130)
        plt.close(figure)


def draw_bounds(axes, fits: dict[str, Fitted], num_data: int) -> None:
    for name, fitted in fits.items():
        x = np.arange(1, len(fitted.losses) + 1)
        axes.plot(x, fitted.losses / num_data, lw=1.8, label=name)
    axes.set(xlabel="step", ylabel="minus the bound, nats per datum")
    axes.set(xscale="log", yscale="log")
    axes.xaxis.set_major_formatter("{x:.0f}")
    axes.yaxis.set_major_locator(LogLocator(subs=(1, 2, 3, 5)))
    axes.yaxis.set_major_formatter("{x:.2g}")
    axes.yaxis.set_minor_locator(NullLocator())
    axes.legend(frameon=False, fontsize=8)
    axes.set_title("Bound while fitting", fontweight="bold")


def draw_uncertain(figure, data: Data, split_: Split, p: np.ndarray) -> None:
    """The least certain test rows: the image if it is one, and the probabilities."""
    rows = np.argsort(p.max(1))[:10]
    title = f"Least certain test rows: {next(iter(METHODS))} (true class in blue)"
    figure.suptitle(title, fontweight="bold")
    heights = (1.35 if data.side else 0.05, 1) * 2
    grid = figure.add_gridspec(4, 5, height_ratios=heights)
    for place, row in enumerate(rows):
        above, column = 2 * (place // 5), place % 5
        truth, guess = split_.y_test[row], p[row].argmax()
        image = figure.add_subplot(grid[above, column])
        image.axis("off")
        if data.side:
            pixels = data.X[split_.rows[row]].reshape(data.side, data.side)
            image.imshow(pixels, cmap="gray_r", interpolation="nearest")
        bars = figure.add_subplot(grid[above + 1, column])
        colors = ["C0" if k == truth else "0.6" for k in range(p.shape[1])]
        bars.bar(range(p.shape[1]), p[row], color=colors)
        bars.set(ylim=(0, 1), yticks=[], xlim=(-0.6, p.shape[1] - 0.4))
        bars.spines["left"].set_visible(False)
        shown = range(p.shape[1]) if p.shape[1] <= 10 else ()
        bars.set_xticks(shown, data.classes[: len(shown)])
        bars.tick_params(length=0, labelsize=7, pad=1)
        title, color = f"{data.classes[truth]}", "k"
        if truth != guess:
            title, color = f"{title}, predicted {data.classes[guess]}", "C3"
        image.set_title(title, fontsize=8.5, color=color)


def draw_reliability(axes, probs: dict[str, np.ndarray], y: np.ndarray) -> None:
    """Right answers expected minus observed, among rows up to each confidence."""
    axes.axhline(0, color="0.7", lw=1, ls="--")
    for name, p in probs.items():
        order = np.argsort(p.max(1))
        surplus = np.cumsum((p.max(1) - (p.argmax(1) == y))[order])
        axes.plot(p.max(1)[order], surplus, lw=1.8, label=name)
    axes.set_xlabel("confidence in the predicted class")
    axes.set_ylabel("expected minus observed, in rows")
    style = {"frameon": False, "fontsize": 8, "loc": "lower left"}
    axes.legend(**style, title="above 0: overconfident")
    axes.set_title("Right answers, running total", fontweight="bold")


# -- main ---------------------------------------------------------------------------


def parse(argv: list[str] | None) -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__.split("\n")[0])
    parser.add_argument("--data", help=".npz with X and y, or .csv with labels last")
    parser.add_argument("--side", type=int, help="rows of --data are square images")
    parser.add_argument("--inducing", type=int, help="inducing inputs")
    parser.add_argument("--steps", type=int, default=50, help="steps at most")
    parser.add_argument("--fold", type=int, default=0, choices=range(FOLDS))
    parser.add_argument("--seed", type=int, default=0, help="of the folds")
    parser.add_argument("--all-folds", action="store_true", help="means; no picture")
    parser.add_argument("--out", default="multiclass.png", help="the picture")
    return parser.parse_args(argv)


def main(argv: list[str] | None = None) -> None:
    """Run the whole job."""
    args = parse(argv)
    keep_compiled_programs()
    data = load(args.data, args.side)
    rows, columns = data.X.shape
    print(f"{rows} rows, {columns} inputs, {len(data.classes)} classes; ", end="")
    size = tables.num_inducing(data.X, args.inducing)
    print(f"{size} inducing inputs, {args.steps} steps")
    if args.all_folds:
        every = []
        for fold in range(FOLDS):
            every.append(run_fold(data, fold, args)[0])
            report(every[-1], f"fold {fold}")
        means = {k: tuple(np.mean([e[k] for e in every], 0)) for k in every[0]}
        report(means, f"mean of {FOLDS} folds")
        return
    scores, probs, fits = run_fold(data, args.fold, args)
    report(scores, f"test fold {args.fold} of {FOLDS}")
    report_kernels(fits)
    parts = split(data, args.fold, args.seed)
    draw(data, parts, probs, fits, args.out, args.steps)
    print(f"drew {Path(args.out).resolve()}")


if __name__ == "__main__":
    main()
