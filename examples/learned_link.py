# SPDX-License-Identifier: Apache-2.0
"""Inverse links learnt from data, from files to a picture.

For labels 0/1 the script learns a free link and an increasing one, and compares them
with the sigmoid. For real observations the link turns a standard process into
non-normal marginals. It is learnt free, and with a normal prior that keeps it near a
straight line, with a band of two posterior standard deviations. The picture is
``learned_link.png``::

    python examples/learned_link.py
    python examples/learned_link.py --data heart.npz boston.npz --out mine.png

Without ``--data``: scikit-learn's breast cancer (labels) and diabetes (real).
"""

from __future__ import annotations

import argparse
from pathlib import Path
from typing import Any, NamedTuple

import jax
import matplotlib
import numpy as np
import numpyro
import numpyro.distributions as dist
import optax
from numpyro.distributions import constraints
from scipy.special import expit
from sklearn.datasets import load_breast_cancer, load_diabetes
from sklearn.model_selection import train_test_split
from support.compilation import keep_compiled_programs

import numpyro_gpaug as gpaug
from numpyro_gpaug import diagnostics, plots

matplotlib.use("Agg")
import matplotlib.pyplot as plt  # noqa: E402

PIECES, LOWER, UPPER = 20, -3.0, 3.0
LINKS = {
    False: ("sigmoid", "free", "increasing"),
    True: ("straight line", "free", "prior"),
}
COLOURS = {"free": "#d95f02", "increasing": "#7570b3", "prior": "#1b9e77"}


class Data(NamedTuple):
    """Standardised data, with a test part.

    :param real: whether observations are real; else labels 0/1.
    """

    name: str
    X: np.ndarray
    y: np.ndarray
    X_test: np.ndarray
    y_test: np.ndarray
    real: bool


class Fitted(NamedTuple):
    """One fit.

    :param heights: of the link, ``None`` for a likelihood without cells.
    :param spread: their posterior standard deviations, ``None`` for points.
    """

    posterior: gpaug.Posterior
    bound: float
    heights: np.ndarray | None
    spread: np.ndarray | None


def start(real: bool) -> gpaug.PiecewiseLink:
    """The link before it is learnt: the identity, or the sigmoid."""
    function = (lambda f: f) if real else jax.nn.sigmoid
    return gpaug.PiecewiseLink.from_function(function, PIECES, LOWER, UPPER)


def model(X, y=None, *, Z, real, link):
    """One process; its values go through a link of the given kind."""
    positive = constraints.positive
    columns = X.shape[1]
    initial = np.full(columns, np.sqrt(columns), X.dtype)
    lengthscale = numpyro.param("lengthscale", initial, constraint=positive)
    # A learnt link has its own scale, so the variance is fixed at one.
    free = link in ("sigmoid", "straight line")
    variance = numpyro.param("variance", 1.0, constraint=positive) if free else 1.0
    gp = gpaug.GaussianProcess(
        "f", gpaug.kernels.SquaredExponential(lengthscale, variance), inducing=Z
    )
    if link == "prior":
        prior = dist.Normal(start(real).heights, 1.0).to_event(1)
        inverse = start(real).with_heights(numpyro.sample("heights", prior))
    elif not free:
        inside = constraints.real if real else constraints.unit_interval
        inverse = gpaug.learned_link("heights", start(real), inside, link)
    scale = numpyro.param("scale", 0.5, constraint=positive) if real else None
    with numpyro.plate("data", X.shape[0]):
        f = gp(X)
        if free:
            fn = dist.Normal(f, scale) if real else dist.Bernoulli(logits=f)
        elif real:
            fn = gpaug.PiecewiseNormal(f, inverse, scale)
        else:
            fn = gpaug.PiecewiseBernoulli(f, inverse)
        numpyro.sample("y", fn, obs=y)


def fit(data: Data, link: str, args: argparse.Namespace) -> Fitted:
    """Closed-form steps; Adam for the lengthscales, the noise and the heights."""
    num_inducing = min(args.inducing, len(data.X) // 4)
    Z = gpaug.inducing.kmeans(data.X, num_inducing, seed=args.seed)
    guide = gpaug.AutoSparseGP(model)
    optim = optax.adam(optax.cosine_decay_schedule(0.1, args.steps, alpha=0.05))
    svi = gpaug.ConjugateSVI(model, guide, optim)
    result = svi.run(
        jax.random.key(args.seed), args.steps, data.X, data.y, Z=Z, real=data.real,
        link=link, progress_bar=False,
    )  # fmt: skip
    heights, spread = result.params.get("heights"), None
    for block in guide.structure.blocks:
        if block.name == "heights":
            q = guide.gaussian(block, result.params)
            heights, spread = q.mean, np.sqrt(np.asarray(q.variance))
    if heights is not None and link == "increasing":
        heights = jax.nn.sigmoid(heights)
    return Fitted(
        svi.posterior(result), -float(result.losses[-1]),
        None if heights is None else np.asarray(heights), spread,
    )  # fmt: skip


# -- data ------------------------------------------------------------------------------


def load(path: str, seed: int) -> Data:
    """A data set of scikit-learn, or a file with ``X`` and ``y``."""
    if path == "breast_cancer":
        X, y = load_breast_cancer(return_X_y=True)
    elif path == "diabetes":
        X, y = load_diabetes(return_X_y=True)
    else:
        with np.load(path, allow_pickle=False) as file:
            if missing := {"X", "y"} - set(file):
                raise SystemExit(f"{path}: no array {sorted(missing)}")
            X, y = file["X"].astype(float), file["y"].ravel()
    values = np.unique(y)
    real = len(values) > 2
    if not real and not np.array_equal(values, [0, 1]):
        raise SystemExit(f"{path}: y takes values {values}; labels have to be 0/1")
    parts = train_test_split(
        X, y, test_size=0.2, random_state=seed, stratify=None if real else y
    )
    X, X_test, y, y_test = parts
    scale = np.maximum(X.std(0), 1e-12)
    X, X_test = (
        ((x - parts[0].mean(0)) / scale).astype("float32") for x in (X, X_test)
    )
    if real:
        centre, spread = y.mean(), y.std()
        y, y_test = (((v - centre) / spread).astype("float32") for v in (y, y_test))
    else:
        y, y_test = y.astype(int), y_test.astype(int)
    return Data(Path(path).stem, X, y, X_test, y_test, real)


def report(data: Data, fits: dict[str, Fitted]) -> None:
    """Print the bound and the mean test log-likelihood of every link."""
    print(f"\n{data.name}: {len(data.X)} training rows, {data.X.shape[1]} columns")
    print(f"{'link':>14} {'bound':>10} {'test log-lik.':>14}")
    for link, fitted in fits.items():
        loglik = fitted.posterior.log_prob(data.X_test, data.y_test).mean()
        print(f"{link:>14} {fitted.bound:10.1f} {loglik:14.4f}")


# -- picture ---------------------------------------------------------------------------


def draw_link(axes: Any, data: Data, fits: dict[str, Fitted]) -> None:
    """Draw the learnt heights of the cells, and their starting values."""
    edges = np.array([LOWER - 0.6, *start(data.real).edges, UPPER + 0.6])
    grid = np.linspace(edges[0], edges[-1], 300)
    plain = grid if data.real else expit(grid)
    name = "straight line" if data.real else "sigmoid"
    axes.plot(grid, plain, color="0.4", linewidth=1.2, linestyle="--", label=name)
    posterior = fits["prior" if data.real else "increasing"].posterior
    values = np.asarray(posterior.predict_f(data.X).mean)
    axes.plot(
        values, np.zeros_like(values), "|", color="0.2", alpha=0.25, markersize=9,
        transform=axes.get_xaxis_transform(), label="posterior means of f",
    )  # fmt: skip
    for link, fitted in fits.items():
        if fitted.heights is not None:
            plots.plot_link(
                start(data.real).with_heights(fitted.heights), fitted.spread,
                label={"prior": "learnt, with prior"}.get(link, f"learnt, {link}"),
                color=COLOURS[link], ax=axes,
            )  # fmt: skip
    axes.set(
        xlim=(edges[0], edges[-1]), xlabel="function value f", title=data.name,
        ylabel="mean of y" if data.real else "probability of y = 1",
    )  # fmt: skip
    axes.legend(fontsize=7, loc="upper left", framealpha=0.9)


def draw_marginal(axes: Any, data: Data, fits: dict[str, Fitted]) -> None:
    """Draw the share of observations below each quantile of their predictions."""
    values = {
        link: diagnostics.pit(
            fitted.posterior.predict_y(data.X_test), data.y_test, jax.random.key(0)
        )
        for link, fitted in fits.items()
    }
    plots.plot_pit(values, colors={"straight line": "0.4", **COLOURS}, ax=axes)
    axes.set(
        title=f"{data.name}: calibration of quantiles", ylabel="share of test rows"
    )
    axes.legend(fontsize=7)


def draw(sets: list[tuple[Data, dict[str, Fitted]]], path: str) -> None:
    """One panel per set of labels, two per set of real observations."""
    width = sum(2 if data.real else 1 for data, _ in sets)
    figure, axes = plt.subplots(
        1, width, figsize=(4.4 * width, 3.9), layout="constrained", squeeze=False
    )
    panels = iter(axes[0])
    for data, fits in sets:
        draw_link(next(panels), data, fits)
        if data.real:
            draw_marginal(next(panels), data, fits)
    figure.savefig(path, dpi=130)
    plt.close(figure)
    print(f"\nwrote {path}")


def parse(argv: list[str] | None) -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__.split("\n")[0])
    parser.add_argument(
        "--data", nargs="+", default=["breast_cancer", "diabetes"],
        help="files .npz with X and y, labels 0/1 or real",
    )  # fmt: skip
    parser.add_argument("--steps", type=int, default=200, help="of every fit")
    parser.add_argument("--inducing", type=int, default=50, help="at most")
    parser.add_argument("--seed", type=int, default=0, help="of split and fit")
    parser.add_argument("--out", default="learned_link.png", help="the picture")
    return parser.parse_args(argv)


def main(argv: list[str] | None = None) -> None:
    """Load, fit, report and draw every data set."""
    args = parse(argv)
    keep_compiled_programs()
    sets = []
    for path in args.data:
        data = load(path, args.seed)
        fits = {link: fit(data, link, args) for link in LINKS[data.real]}
        report(data, fits)
        sets.append((data, fits))
    draw(sets, args.out)


if __name__ == "__main__":
    main()
