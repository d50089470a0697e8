# SPDX-License-Identifier: Apache-2.0
"""Figures of convergence, of calibration, and of agreement with MCMC."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import TYPE_CHECKING, Any

import numpy as np
from jax.typing import ArrayLike

from numpyro_gpaug.diagnostics import Calibration, convergence, reliability_curve
from numpyro_gpaug.diagnostics._sbc import EDGES
from numpyro_gpaug.plots._axes import axes_or_new, by_method, diagonal, legend_above

if TYPE_CHECKING:
    from matplotlib.axes import Axes
    from xarray import DataTree


def plot_elbo(
    losses: ArrayLike,
    *,
    tol: float = 1e-3,
    step_sizes: ArrayLike | Callable[[int], Any] | None = None,
    label: str = "bound",
    ax: Axes | None = None,
) -> Axes:
    """Plot the evidence lower bound at every step, with the verdict of
    :func:`~numpyro_gpaug.diagnostics.convergence` as the title.

    A noisy trace is drawn in a pale colour under its running mean. Steps that are not
    finite are left out; the first of them is marked.

    :param losses: minus the bound in nats, (steps,), as in ``result.losses``.
    :param tol: relative change below which the bound counts as constant.
    :param step_sizes: size of every step, (steps,), or the optax schedule, if it
        changes: a bound that is constant because the step size went to zero has not
        converged.
    :param label: label in the legend.
    :param ax: the axes; a new figure by default.

    **Example**

    >>> import numpy as np
    >>> ax = plot_elbo(50 + 20 * np.exp(-np.arange(60) / 5))
    >>> ax.get_title(), ax.get_xlabel()
    ('converged', 'step')
    """
    ax = axes_or_new(ax)
    found = convergence(losses, tol, step_sizes=step_sizes)
    bound = -np.asarray(losses, float)
    steps = np.arange(1, len(bound) + 1)
    window = max(1, len(bound) // 20)
    noisy = 3 * found.error > tol * max(1.0, abs(found.elbo))
    line = ax.plot(steps, bound, lw=2, label=label)[0]
    if noisy and window > 1:
        line.set(alpha=0.3, lw=1)
        mean = np.convolve(bound, np.full(window, 1 / window), "valid")
        smooth = f"mean of {window} steps"
        ax.plot(steps[window - 1 :], mean, color=line.get_color(), lw=2, label=smooth)
    if found.first_bad is None:
        last = found.elbo if noisy else bound[-1]
        ax.plot(steps[-1], last, "o", color=line.get_color())
        ax.annotate(
            f"{last:.1f}", (steps[-1], last), (0, -18), ha="right",
            textcoords="offset points",
            bbox={"fc": "w", "ec": "none", "alpha": 0.8, "pad": 1},
        )  # fmt: skip
    else:
        bad = found.first_bad + 1
        ax.axvline(bad, color="r", lw=1, ls="--", label="no longer finite")
    ax.set(xlabel="step", ylabel="evidence lower bound (nats)", title=found.verdict)
    if len(bound) > 1:
        ax.set_xscale("log")
        ax.xaxis.set_major_formatter("{x:.0f}")
    ax.legend(frameon=False, loc="lower right" if found.converged else "best")
    return ax


def plot_reliability(
    probs: ArrayLike | Mapping[str, ArrayLike],
    y: ArrayLike,
    *,
    num_bins: int | None = None,
    colors: Mapping[str, str] | None = None,
    ax: Axes | None = None,
) -> Axes:
    """Plot observed frequency against predicted probability, with 90% intervals.

    The size of a dot shows the number of observations in its bin. The intervals are for
    a frequency under Jeffreys' prior. Several methods are drawn side by side.

    :param probs: (N,) or (N, C), as for
        :func:`~numpyro_gpaug.diagnostics.reliability_curve`; or such arrays by method.
    :param y: labels, (N,).
    :param num_bins: number of bins; by default 5 below 500 observations, and 10
        otherwise.
    :param colors: colours by method.
    :param ax: the axes; a new figure by default.

    **Example**

    >>> ax = plot_reliability({"fit": [0.1, 0.3, 0.8, 0.9]}, [0, 1, 1, 1])
    >>> [text.get_text() for text in ax.get_legend().get_texts()]
    ['fit']
    """
    from scipy.stats import beta

    ax = axes_or_new(ax)
    methods = by_method(probs, colors)
    num_data = len(np.asarray(y))
    bins = num_bins or (5 if num_data < 500 else 10)
    diagonal(ax, zorder=0)
    middle = (len(methods) - 1) / 2
    for i, (name, p, color) in enumerate(methods):
        curve = reliability_curve(p, y, bins)
        hits = np.nan_to_num(curve.observed) * curve.counts
        ends = beta.interval(0.9, hits + 0.5, curve.counts - hits + 0.5)
        # so that methods with equal values remain visible
        x = curve.predicted + 0.012 * (i - middle)
        ax.vlines(x, *ends, color=color, lw=1.5, alpha=0.5)
        sizes = 15 + 120 * curve.counts / num_data
        ax.scatter(x, curve.observed, sizes, color, label=name, zorder=3)
    ax.set(
        xlabel="predicted probability", ylabel="observed frequency",
        xlim=(-0.04, 1.04), ylim=(-0.04, 1.04),
    )  # fmt: skip
    ax.set_title("Reliability", pad=24)
    legend = legend_above(ax, ncols=3, handletextpad=0.1, columnspacing=0.8)
    for handle in legend.legend_handles:
        handle.set_sizes([40])
    return ax


def plot_pit(
    values: ArrayLike | Mapping[str, ArrayLike],
    *,
    colors: Mapping[str, str] | None = None,
    ax: Axes | None = None,
) -> Axes:
    """Plot the share of observations below each quantile of their predictions.

    Calibrated predictions give the diagonal; the band contains 90% of the curves of
    calibrated predictions at each level. A curve that is flat in the middle means that
    predictions are too narrow, and a curve that is steep there means that they are too
    wide.

    :param values: values from :func:`~numpyro_gpaug.diagnostics.pit`, (N,); or such
        arrays by method.
    :param colors: colours by method.
    :param ax: the axes; a new figure by default.

    **Example**

    >>> import numpy as np
    >>> plot_pit(np.linspace(0, 1, 50)).get_xlabel()
    'predicted probability that y is lower'
    """
    from scipy.stats import binom

    ax = axes_or_new(ax)
    methods, levels = by_method(values, colors), np.linspace(0, 1, 101)
    for name, found, color in methods:
        u = np.sort(np.asarray(found, float))
        share = np.searchsorted(u, levels, side="right") / len(u)
        ax.plot(levels, share, color=color, label=name)
    fewest = min(len(np.asarray(found)) for _, found, _ in methods)
    ends = binom.interval(0.9, fewest, levels) / np.asarray(fewest, float)
    ax.fill_between(levels, *ends, color="0.9", lw=0, zorder=0, label="90% if right")
    diagonal(ax, zorder=1)
    ax.set(
        xlabel="predicted probability that y is lower", ylabel="share of observations",
        xlim=(0, 1), ylim=(0, 1), title="Calibration of quantiles",
    )  # fmt: skip
    ax.legend(frameon=False, loc="upper left")
    return ax


def plot_sbc(calibration: Calibration, *, ax: Axes | None = None) -> Axes:
    """Plot how far the distribution functions of the positions of true values are from
    uniform ones, with the band that contains a whole curve with a probability of 95%.

    A curve that rises first and falls below zero later means that posteriors are too
    narrow, and one that falls first that they are too wide.

    :param calibration: from :func:`~numpyro_gpaug.diagnostics.sbc`.
    :param ax: the axes; a new figure by default.

    **Example**

    >>> import numpy as np
    >>> from numpyro_gpaug.diagnostics import Calibration
    >>> positions = np.random.default_rng(0).uniform(size=(200, 3))
    >>> plot_sbc(Calibration("", {"z": positions}, {})).get_xlabel()
    'position of the true value in its posterior'
    """
    ax = axes_or_new(ax)
    ax.fill_between(
        EDGES, *calibration.band(), color="0.9", lw=0, zorder=0, label="95% if right"
    )
    for i, (name, curves) in enumerate(calibration.curves().items()):
        label = name if len(curves) == 1 else f"{name} ({len(curves)})"
        lines = ax.plot(EDGES, curves.T, color=f"C{i}", lw=1, alpha=0.7)
        lines[0].set_label(label)
    ax.axhline(0, color="0.7", lw=1, ls="--", zorder=1)
    ax.set(
        xlabel="position of the true value in its posterior",
        ylabel="share below, minus position", xlim=(0, 1),
        title="Simulation-based calibration",
    )  # fmt: skip
    ax.legend(framealpha=0.8, fontsize="small")
    return ax


def plot_vi_vs_mcmc(comparison: DataTree, *, ax: Axes | None = None) -> Axes:
    """Plot every marginal of a variational fit against MCMC: the error of its mean, and
    its relative width. Marginals that agree are at (0, 1). The shaded box marks errors
    of at most 0.2 standard deviations in means, and of at most 20% in scales.

    :param comparison: from :func:`~numpyro_gpaug.diagnostics.vi_against_mcmc`.
    :param ax: the axes; a new figure by default.

    **Example**

    >>> import numpy as np, numpyro, numpyro.distributions as dist
    >>> from numpyro_gpaug.diagnostics import vi_against_mcmc
    >>> def model(y=None):
    ...     w = numpyro.sample("w", dist.Normal())
    ...     numpyro.sample("y", dist.Normal(w, 1), obs=y)
    >>> rng = np.random.default_rng(0)
    >>> vi, mcmc = {"w": rng.normal(size=100)}, {"w": rng.normal(size=100)}
    >>> ax = plot_vi_vs_mcmc(vi_against_mcmc(model, vi, mcmc, 0.3))
    >>> ax.get_ylabel()
    'standard deviation, VI / MCMC'
    """
    from matplotlib.patches import Rectangle

    ax = axes_or_new(ax)
    near = Rectangle((-0.2, 0.8), 0.4, 0.4, color="0.92", zorder=0)
    ax.add_patch(near)
    for i, (name, found) in enumerate(comparison["posterior"].data_vars.items()):
        statistics = "mean_difference", "sd_ratio"
        x, y = (found.sel(statistic=s).values.ravel() for s in statistics)
        size = 60 if x.size == 1 else 18
        label = name if x.size == 1 else f"{name} ({x.size})"
        ax.scatter(x, y, size, f"C{i}", alpha=0.7, lw=0, label=label, zorder=3)
    ax.axvline(0, color="0.6", lw=1, ls="--", zorder=1)
    ax.axhline(1, color="0.6", lw=1, ls="--", zorder=1)
    reach = 1.1 * max(0.4, *np.abs(ax.get_xlim()))
    ax.set(
        xlabel="mean, VI - MCMC (standard deviations of MCMC)",
        ylabel="standard deviation, VI / MCMC", title="VI against MCMC",
        xlim=(-reach, reach),
        ylim=(min(0.7, ax.get_ylim()[0]), max(1.3, ax.get_ylim()[1])),
    )  # fmt: skip
    ax.legend(frameon=False)
    return ax
