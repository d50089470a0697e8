# SPDX-License-Identifier: Apache-2.0
"""The Bayesian support vector machine, from a file to a picture.

The script cross-validates a nonlinear machine, whose lengthscale and variance are
learnt on the training bound, without a grid. Two rules turn its decision function into
probabilities. The script compares them with a Gaussian process with Bernoulli
likelihood, a support vector machine with Platt scaling and logistic regression, and
draws ``bayesian_svm.png``::

    python examples/bayesian_svm.py
    python examples/bayesian_svm.py --data mine.npz --inducing 200 --out mine.png

The likelihood of the machine is not normalised over labels, so neither rule is
calibrated by construction: look at the reliability before using the probabilities.
"""

from __future__ import annotations

import argparse
import time
from pathlib import Path
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import matplotlib
import numpy as np
import numpyro
import numpyro.distributions as dist
import optax
from classify import CLASSES, Split, baselines, load, report_scores
from scipy.stats import beta
from sklearn.decomposition import PCA
from sklearn.model_selection import StratifiedKFold
from sklearn.preprocessing import StandardScaler
from support.compilation import keep_compiled_programs

import numpyro_gpaug as gpaug
from numpyro_gpaug import diagnostics

matplotlib.use("Agg")
import matplotlib.pyplot as plt  # noqa: E402
from matplotlib.ticker import MaxNLocator  # noqa: E402

PROBIT, NORMALIZED, PROCESS = "BSVM, probit", "BSVM, normalised", "Gaussian process"
DRAWN = {PROBIT: "#d95f02", NORMALIZED: "#7570b3", PROCESS: "#1b9e77"}


class Trace(NamedTuple):
    """A fit for the picture.

    :param posterior: the posterior.
    :param bounds: after every step.
    :param hyperparameters: learnt, by name.
    :param Z: inducing inputs.
    """

    posterior: gpaug.Posterior
    bounds: np.ndarray
    hyperparameters: dict[str, float]
    Z: np.ndarray


def model(X, y=None, inducing=None, *, machine=True, predictive="probit"):
    """The machine, or with ``machine=False`` a process with Bernoulli observations."""
    dim = X.shape[1]
    lengthscale = numpyro.sample("lengthscale", dist.LogNormal(0.5 * np.log(dim), 1))
    variance = numpyro.sample("variance", dist.LogNormal(1, 1))
    # The process includes an unknown offset with variance 4.
    kernel = gpaug.kernels.SquaredExponential(lengthscale, variance) + 4.0
    f = gpaug.GaussianProcess("f", kernel, inducing=inducing)(X)
    if machine:
        likelihood = gpaug.BayesianSVM(f, predictive)
    else:
        likelihood = dist.Bernoulli(logits=f)
    with numpyro.plate("data", X.shape[0]):
        numpyro.sample("y", likelihood, obs=y)


# -- fits ------------------------------------------------------------------------------


def engine(*, learn: bool = True) -> gpaug.ConjugateSVI:
    """Closed-form updates; one gradient step of the hyperparameters after each."""
    guide = gpaug.AutoSparseGP(model)
    return gpaug.ConjugateSVI(model, guide, optax.adam(0.05) if learn else None)


def fit(svi: gpaug.ConjugateSVI, X, y, args, **kwargs: Any) -> Trace:
    """Fit at most ``args.steps`` steps, with inducing inputs by k-means."""
    size = min(args.inducing, len(np.unique(X, axis=0)))
    Z = gpaug.inducing.kmeans(X, size, seed=args.seed)
    key = jax.random.key(args.seed)
    result = svi.run(
        key, args.steps, X, y, inducing=Z, tol=1e-2, progress_bar=False, **kwargs
    )
    found = svi.guide.other_median(result.params)
    hyperparameters = {name: float(value) for name, value in found.items()}
    posterior = svi.posterior(result)
    return Trace(posterior, -result.losses, hyperparameters, np.asarray(Z))


def cross_validate(X, y, args) -> tuple[dict[str, np.ndarray], dict[str, float]]:
    """Held-out probabilities of every method at every row, and seconds per method."""
    folds = StratifiedKFold(args.folds, shuffle=True, random_state=args.seed)
    machine, process = engine(), engine()
    probs: dict[str, np.ndarray] = {}
    seconds = dict.fromkeys((PROBIT, PROCESS), 0.0)
    splits = list(folds.split(X, y))
    # All training sets have one size, so the steps are compiled once.
    size = min(len(train) for train, _ in splits)
    for train, test in splits:
        train = train[:size]
        scaler = StandardScaler().fit(X[train])
        dtype = jnp.result_type(float)
        inputs = [scaler.transform(X[rows]).astype(dtype) for rows in (train, test)]
        data = Split(inputs[0], y[train], inputs[1], y[test])
        found = {}
        start = time.perf_counter()
        svm = fit(machine, data.X, data.y, args).posterior
        for name, rule in ((PROBIT, "probit"), (NORMALIZED, "normalized")):
            found[name] = svm.predict_y(data.X_test, predictive=rule).probs
        middle = time.perf_counter()
        gp = fit(process, data.X, data.y, args, machine=False).posterior
        found[PROCESS] = gp.predict_y(data.X_test).probs
        seconds[PROBIT] += middle - start
        seconds[PROCESS] += time.perf_counter() - middle
        for name, rival in baselines(data, args.seed).items():
            found[name] = rival.predict_proba(data.X_test)[:, 1]
        for name, p in found.items():
            probs.setdefault(name, np.empty(len(y)))[test] = p
    return probs, seconds


# -- picture ---------------------------------------------------------------------------


def plane(X: np.ndarray) -> tuple[np.ndarray, tuple[str, str]]:
    """Two standardised coordinates of the rows, and their names."""
    X = StandardScaler().fit_transform(X)
    names = "first input", "second input"
    if X.shape[1] > 2:
        pca = PCA(2).fit(X)
        X, share = pca.transform(X), pca.explained_variance_ratio_
        order = "first", "second"
        names = tuple(
            f"{nth} principal component ({part:.0%} of variance)"
            for nth, part in zip(order, share, strict=True)
        )
    return StandardScaler().fit_transform(X).astype(jnp.result_type(float)), names


def draw(points, names, y, flat: Trace, bounds, probs, path: str) -> None:
    """Decision surface, its uncertainty, reliability, and bounds."""
    style = {"axes.spines.top": False, "axes.spines.right": False, "font.size": 10}
    with plt.rc_context(style):
        figure, axes = plt.subplots(2, 2, figsize=(12.5, 10), layout="constrained")
        figure.get_layout_engine().set(w_pad=0.12, h_pad=0.12)
        draw_plane(*axes[0], points, names, y, flat)
        draw_reliability(axes[1, 0], probs, y)
        draw_bounds(axes[1, 1], bounds)
        figure.savefig(path, dpi=140)
        plt.close(figure)


def draw_plane(left, right, points, names, y, flat: Trace) -> None:
    """The normalised probability with margins, and the spread of the function."""
    low, high = points.min(0) - 0.6, points.max(0) + 0.6
    sides = [np.linspace(a, b, 150) for a, b in zip(low, high, strict=True)]
    mesh = np.stack(np.meshgrid(*sides), -1).reshape(-1, 2).astype(points.dtype)
    p = flat.posterior.predict_y(mesh, predictive="normalized").probs
    f = flat.posterior.predict_f(mesh)
    p, mean, sd = (
        np.asarray(a).reshape(150, 150) for a in (p, f.mean, jnp.sqrt(f.variance))
    )
    shades = left.contourf(*sides, p, np.linspace(0, 1, 21), cmap="RdBu", alpha=0.75)
    styles = {"linestyles": ["--", "-", "--"], "linewidths": [1, 1.8, 1]}
    for axes in (left, right):
        axes.contour(*sides, mean, [-1, 0, 1], colors="k", **styles)
        axes.set(xlabel=names[0], ylabel=names[1])
    for label, marker in ((0, "o"), (1, "s")):
        left.scatter(
            *points[y == label].T, s=18, marker=marker, color=CLASSES[label], ec="w",
            lw=0.4, zorder=2 + (np.mean(y == label) < 0.5), label=f"class {label}",
        )  # fmt: skip
    left.legend(frameon=True, framealpha=0.9, edgecolor="none", loc="best")
    left.set_title("Decision boundary, margins (dashed) and probability of class 1")
    bar = left.figure.colorbar(shades, ax=left, ticks=[0, 0.25, 0.5, 0.75, 1])
    bar.outline.set_visible(False)
    spread = right.contourf(*sides, sd, 16, cmap="YlGnBu")
    for label, color in enumerate(CLASSES):
        right.scatter(*points[y == label].T, s=4, color=color, lw=0)
    cross = {"marker": "x", "color": "k", "s": 26, "lw": 1.1}
    right.scatter(*flat.Z.T, label="inducing inputs", **cross)
    right.legend(frameon=True, framealpha=0.9, edgecolor="none", loc="best")
    right.set_title("Standard deviation of the decision function")
    right.figure.colorbar(spread, ax=right, ticks=MaxNLocator(6)).outline.set_visible(
        False
    )


def draw_reliability(axes, probs: dict[str, np.ndarray], y: np.ndarray) -> None:
    """Observed against predicted with 90% Jeffreys intervals."""
    axes.plot([0, 1], [0, 1], color="0.7", lw=1, ls="--", zorder=0)
    num_bins = 5 if len(y) < 1000 else 10
    for i, (name, color) in enumerate(DRAWN.items()):
        curve = diagnostics.reliability_curve(probs[name], y, num_bins)
        hits = np.nan_to_num(curve.observed) * curve.counts
        filled = curve.counts > 0
        ends = beta.interval(0.9, hits + 0.5, curve.counts - hits + 0.5)
        x = curve.predicted + 0.012 * (
            i - 1
        )  # side by side, since the methods may agree
        low, high = (end[filled] for end in ends)
        axes.vlines(x[filled], low, high, color=color, lw=1.5, alpha=0.45)
        size = 35 + 200 * curve.counts / len(y)
        error = diagnostics.expected_calibration_error(probs[name], y, num_bins=10)
        label = f"{name} ({error:.3f})"
        axes.scatter(x, curve.observed, size, color, label=label, zorder=3, ec="w")
    legend = axes.legend(
        frameon=False, loc="upper left", title="method (calibration error)",
        bbox_to_anchor=(0.02, 0.94), alignment="left",
    )  # fmt: skip
    for handle in legend.legend_handles:
        handle.set_sizes([45])
    axes.set(xlim=(-0.04, 1.04), ylim=(-0.04, 1.04))
    axes.set(xlabel="predicted probability", ylabel="observed frequency")
    axes.set_title("Reliability on held-out folds (area: number of rows)")


def draw_bounds(axes, bounds: dict[str, np.ndarray]) -> None:
    for (name, bound), color in zip(bounds.items(), ("0.55", "#d95f02"), strict=True):
        steps = np.arange(1, len(bound) + 1)
        axes.plot(steps, bound, color=color, lw=2, label=name)
        axes.plot(steps[-1], bound[-1], "o", color=color)
        axes.annotate(
            f"{bound[-1]:.1f}", (steps[-1], bound[-1]), (0, -15), ha="right",
            textcoords="offset points", color=color,
        )  # fmt: skip
    axes.legend(frameon=False, loc="lower right", bbox_to_anchor=(1, 0.08))
    axes.set(xlabel="step", ylabel="bound on the log pseudo-evidence", xscale="log")
    axes.xaxis.set_major_formatter("{x:.0f}")
    axes.set_title("Closed-form fit of all rows, all columns")


# -- main ------------------------------------------------------------------------------


def parse(argv: list[str] | None) -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__.split("\n")[0])
    parser.add_argument("--data", help=".npz with X and y, or .csv with labels last")
    parser.add_argument("--inducing", type=int, default=100, help="inducing inputs")
    parser.add_argument("--steps", type=int, default=150, help="steps at most")
    parser.add_argument("--folds", type=int, default=5)
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--out", default="bayesian_svm.png", help="the picture")
    return parser.parse_args(argv)


def main(argv: list[str] | None = None) -> None:
    """Run the whole job."""
    args = parse(argv)
    keep_compiled_programs()
    X, y = load(args.data)
    if X.shape[1] < 2:
        raise SystemExit("the picture is of a plane: expected two columns or more")
    print(f"{len(y)} rows, {X.shape[1]} inputs, {args.folds}-fold cross-validation")
    probs, seconds = cross_validate(X, y, args)
    report_scores(probs, y)
    spent = f"{seconds[PROBIT]:.1f} s for the machine, {seconds[PROCESS]:.1f} s for the"
    print(f"\nall folds, compilation included: {spent} Gaussian process")
    whole = StandardScaler().fit_transform(X).astype(jnp.result_type(float))
    rest, learnt = (fit(engine(learn=learn), whole, y, args) for learn in (False, True))
    values = [f"{k} {v:.3g}" for k, v in learnt.hyperparameters.items()]
    print(f"learnt on all rows: {', '.join(values)} in {len(learnt.bounds)} steps")
    points, names = plane(X)
    flat = fit(engine(), points, y, args)
    bounds = {"hyperparameters at rest": rest.bounds, "learnt": learnt.bounds}
    draw(points, names, y, flat, bounds, probs, args.out)
    print(f"drew {Path(args.out).resolve()}")


if __name__ == "__main__":
    main()
