# SPDX-License-Identifier: Apache-2.0
"""Regression with noise that varies, from a series to a picture.

One process is the mean and another the noise, with three likelihoods: the log-variance
is a process (exact expectation), the variance is a piecewise-constant function of a
process (a sum over cells), or the precision is a scaled logistic function of a process.
Constant noise is the baseline. The script scores fresh data, and draws
``heteroscedastic.png``::

    python examples/heteroscedastic.py
    python examples/heteroscedastic.py --series yuan --num 400
    python examples/heteroscedastic.py --data mine.csv

The series are standard ones with a known truth: ``goldberg`` (Goldberg, Williams and
Bishop, 1998) and ``yuan`` (Yuan and Wahba, 2004).
"""

from __future__ import annotations

import argparse
import time
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import matplotlib
import numpy as np
import numpyro
import numpyro.distributions as dist
import optax
from support.compilation import keep_compiled_programs

import numpyro_gpaug as gpaug
from numpyro_gpaug import plots

matplotlib.use("Agg")
import matplotlib.pyplot as plt  # noqa: E402

EXACT, CELLS, LOGISTIC, CONSTANT = (
    "log-variance, exact", "piecewise variance", "logistic precision", "constant noise",
)  # fmt: skip
COLOURS = {EXACT: "#d95f02", CELLS: "#1b9e77", LOGISTIC: "#7570b3", CONSTANT: "0.45"}


def goldberg(x: np.ndarray) -> tuple[np.ndarray, np.ndarray]:
    """Mean and standard deviation on [0, 1]."""
    return 2 * np.sin(2 * np.pi * x), 0.5 + x


def yuan(x: np.ndarray) -> tuple[np.ndarray, np.ndarray]:
    """Mean and standard deviation on [0, 1]."""
    mean = 2 * (np.exp(-30 * (x - 0.25) ** 2) + np.sin(np.pi * x**2)) - 2
    return mean, np.exp(np.sin(2 * np.pi * x))


SERIES = {"goldberg": goldberg, "yuan": yuan}


class Data(NamedTuple):
    """A series, standardised by its training part.

    :param truth: mean and standard deviation at the test inputs, if they are known.
    """

    x: np.ndarray
    y: np.ndarray
    x_test: np.ndarray
    y_test: np.ndarray
    truth: tuple[np.ndarray, np.ndarray] | None


class Fitted(NamedTuple):
    """One fit, the bound after every step, seconds with and without compilation."""

    posterior: gpaug.Posterior
    bound: np.ndarray
    first: float
    warm: float


def model(X, y=None, *, Z, kind):
    """A mean and a noise process; hyperparameters are learnt."""

    def process(name: str, mean: Any) -> gpaug.GaussianProcess:
        lengthscale = numpyro.sample(f"{name}.lengthscale", dist.LogNormal(-0.5, 1))
        variance = numpyro.sample(f"{name}.variance", dist.LogNormal(0, 1))
        kernel = gpaug.kernels.SquaredExponential(lengthscale, variance)
        return gpaug.GaussianProcess(name, kernel, inducing=Z, mean=mean)

    mean = process("mean", 0.0)
    level = numpyro.sample("level", dist.Normal(0, 2))
    positive = dist.constraints.positive
    if kind == LOGISTIC:
        top = numpyro.param("max_precision", 10.0, constraint=positive)
    noise = process("noise", level) if kind != CONSTANT else None
    with numpyro.plate("data", X.shape[0]):
        f = mean(X)
        if kind == CONSTANT:
            fn = dist.Normal(f, jnp.exp(0.5 * level))
        elif kind == EXACT:
            fn = gpaug.LogVarianceNormal(f, noise(X))
        elif kind == CELLS:
            link = gpaug.PiecewiseLink.from_function(jnp.exp, 60, -6.0, 4.0)
            fn = gpaug.PiecewiseHeteroscedasticNormal(f, noise(X), link)
        else:
            fn = gpaug.HeteroscedasticNormal(f, noise(X), top)
        numpyro.sample("y", fn, obs=y)


def fit(data: Data, kind: str, steps: int) -> Fitted:
    """Fit twice: the second fit shows the cost without compilation."""
    svi = gpaug.ConjugateSVI(model, gpaug.AutoSparseGP(model), optax.adam(0.05))
    Z = gpaug.inducing.kmeans(data.x, min(25, len(data.x)))
    seconds = []
    for _ in range(2):
        start = time.perf_counter()
        result = svi.run(
            jax.random.key(0), steps, data.x, data.y, Z=Z, kind=kind, progress_bar=False
        )
        seconds.append(time.perf_counter() - start)
    return Fitted(svi.posterior(result), -result.losses, *seconds)


# -- data ------------------------------------------------------------------------------


def load(args: argparse.Namespace) -> Data:
    """Load a known series, or the first two columns of a file; a fifth of the rows is
    held out.
    """
    rng = np.random.default_rng(args.seed)
    if args.data is None:
        series = SERIES[args.series]
        x, x_test = rng.uniform(size=args.num), np.linspace(0, 1, 500)
        y, y_test = (
            (lambda mean, sd: mean + sd * rng.normal(size=len(mean)))(*series(at))
            for at in (x, x_test)
        )
        truth = series(x_test)
    else:
        table = read(args.data)
        order = rng.permutation(len(table))
        held = np.sort(order[: len(table) // 5])
        kept = np.sort(order[len(table) // 5 :])
        (x, y), (x_test, y_test) = table[kept].T, table[held].T
        truth = None
    centre, scale = x.mean(), x.std()
    middle, spread = y.mean(), y.std()
    if truth is not None:
        truth = (truth[0] - middle) / spread, truth[1] / spread
    dtype = jnp.result_type(float)
    x, x_test = (((v - centre) / scale)[:, None].astype(dtype) for v in (x, x_test))
    y, y_test = (((v - middle) / spread).astype(dtype) for v in (y, y_test))
    return Data(x, y, x_test, y_test, truth)


def read(path: str) -> np.ndarray:
    """Inputs and observations, (N, 2), from a .csv or an .npz with x and y."""
    if path.endswith(".npz"):
        with np.load(path, allow_pickle=False) as file:
            table = np.column_stack([file["x"], file["y"]])
    else:
        table = np.genfromtxt(path, delimiter=",", ndmin=2)[:, :2]
        table = table[int(np.isnan(table[0]).all()) :]  # a header is not a number
    if len(table) < 20 or not np.isfinite(table).all():
        raise SystemExit(
            f"{path}: expected at least 20 rows of two finite numbers, got an array of "
            f"shape {table.shape} with {np.sum(~np.isfinite(table))} that are not"
        )
    return table


# -- report and picture ----------------------------------------------------------------


def report(data: Data, fits: dict[str, Fitted]) -> None:
    """Print bound, test log-likelihood, coverage, error of the noise, and seconds."""
    print(f"{len(data.x)} training points; scores on {len(data.x_test)} others")
    print(f"{'likelihood':>20} {'bound':>8} {'log-lik.':>9} {'in 90%':>7} "
          f"{'sd error':>9} {'first s':>8} {'warm s':>7}")  # fmt: skip
    for kind, fitted in fits.items():
        predicted = fitted.posterior.predict_y(data.x_test)
        loglik = np.mean(predicted.log_prob(data.y_test))
        low, high = predicted.icdf(0.05), predicted.icdf(0.95)
        inside = np.mean((low < data.y_test) & (data.y_test < high))
        error = "-"
        if data.truth is not None:
            ratio = np.log(np.sqrt(predicted.variance)) - np.log(data.truth[1])
            error = f"{np.sqrt(np.mean(ratio**2)):.3f}"
        print(f"{kind:>20} {fitted.bound[-1]:8.1f} {loglik:9.4f} {inside:7.3f} "
              f"{error:>9} {fitted.first:8.2f} {fitted.warm:7.2f}")  # fmt: skip


def draw_band(axes: Any, data: Data, fitted: Fitted, kind: str) -> None:
    """Observations, and where 90 percent of new ones are predicted."""
    plots.plot_predictive(
        fitted.posterior, data.x_test, data=(data.x, data.y), color=COLOURS[kind],
        ax=axes,
    )  # fmt: skip
    if data.truth is not None:
        order = np.argsort(data.x_test[:, 0])
        x, truth = data.x_test[order, 0], data.truth[0][order]
        axes.plot(x, truth, "k:", linewidth=1, label="truth")
    axes.set_title(kind)
    axes.legend(fontsize=7)


def draw(data: Data, fits: dict[str, Fitted], path: str) -> None:
    """Constant noise, noise that varies, and the standard deviations of all."""
    figure, axes = plt.subplots(1, 3, figsize=(13, 3.9), layout="constrained")
    for panel, kind in zip(axes, (CONSTANT, EXACT), strict=False):
        draw_band(panel, data, fits[kind], kind)
    axes[1].set_ylim(axes[0].get_ylim())
    order = np.argsort(data.x_test[:, 0])
    x = data.x_test[order]
    for kind, fitted in fits.items():
        deviation = np.sqrt(np.asarray(fitted.posterior.predict_y(x).variance))
        dashes = "--" if kind == CELLS else "-"
        axes[2].plot(x[:, 0], deviation, dashes, color=COLOURS[kind], label=kind)
    if data.truth is not None:
        axes[2].plot(x[:, 0], data.truth[1][order], "k:", label="truth")
    axes[2].set(title="standard deviation of y", xlabel="x", ylim=(0, None))
    axes[2].legend(fontsize=7)
    figure.savefig(path, dpi=130)
    plt.close(figure)
    print(f"wrote {path}")


def parse(argv: list[str] | None) -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__.split("\n")[0])
    parser.add_argument("--series", choices=SERIES, default="goldberg")
    parser.add_argument("--num", type=int, default=200, help="points of the series")
    parser.add_argument("--data", help=".csv of x, y, or .npz with x and y")
    parser.add_argument("--steps", type=int, default=300, help="of every fit")
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--out", default="heteroscedastic.png", help="the picture")
    return parser.parse_args(argv)


def main(argv: list[str] | None = None) -> None:
    """Load, fit, report and draw."""
    args = parse(argv)
    keep_compiled_programs()
    data = load(args)
    fits = {kind: fit(data, kind, args.steps) for kind in COLOURS}
    report(data, fits)
    draw(data, fits, args.out)


if __name__ == "__main__":
    main()
