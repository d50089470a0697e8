# SPDX-License-Identifier: Apache-2.0
"""Figures of fitted functions: latents, predictions, decisions and links."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import TYPE_CHECKING

import jax.numpy as jnp
import numpy as np
from jax import random
from jax.typing import ArrayLike
from numpyro.distributions import Distribution, constraints
from scipy.special import ndtri

from numpyro_gpaug.distributions.links import PiecewiseLink
from numpyro_gpaug.plots._axes import axes_or_new, legend_above
from numpyro_gpaug.predict.posterior import Posterior

if TYPE_CHECKING:
    from matplotlib.axes import Axes

# By class; the first two are the ends of matplotlib's RdBu.
_CLASSES = ("#b2182b", "#2166ac", "#1b7837", "#762a83", "#e08214", "#4d4d4d")
_MARKERS = "osD^vP"


def plot_latent(
    posterior: Posterior,
    X: ArrayLike,
    *,
    site: str | None = None,
    data: tuple[ArrayLike, ArrayLike] | None = None,
    inducing: ArrayLike | None = None,
    levels: Sequence[float] = (0.5, 0.9),
    label: str = "posterior mean",
    color: str = "C0",
    ax: Axes | None = None,
) -> Axes:
    """Plot a Gaussian process of one input: posterior mean and central intervals.

    :param posterior: a fit.
    :param X: inputs at which to draw it, (N,) or (N, 1), in any order.
    :param site: the process, if the model has several.
    :param data: inputs (N,) or (N, 1) and observations (N,). Use
        :func:`plot_predictive` for observations that are not on the scale of the latent
        (labels, counts).

    :param inducing: inducing inputs, (M,) or (M, 1), marked along the bottom.
    :param levels: probabilities of the intervals.
    :param label: label of the mean in the legend.
    :param color: colour of mean and intervals; further latents get the next colours.
    :param ax: the axes; a new figure by default.
    :raises ValueError: for inputs with more than one column.

    **Example**

    >>> import jax, numpyro, jax.numpy as jnp, numpyro.distributions as dist
    >>> import numpyro_gpaug as gpaug
    >>> def model(X, y=None, *, Z):
    ...     gp = gpaug.GaussianProcess("f", gpaug.kernels.Matern52(), inducing=Z)
    ...     with numpyro.plate("data", X.shape[0]):
    ...         numpyro.sample("y", dist.Normal(gp(X), 0.1), obs=y)
    >>> X = jnp.linspace(-2, 2, 20)[:, None]
    >>> y = jnp.sin(3 * X[:, 0])
    >>> svi = gpaug.ConjugateSVI(model, gpaug.AutoSparseGP(model))
    >>> fit = svi.run(jax.random.key(0), 3, X, y, Z=X[::2], progress_bar=False)
    >>> posterior = svi.posterior(fit)
    >>> ax = plot_latent(posterior, X, data=(X, y), inducing=X[::2])
    >>> [text.get_text() for text in ax.get_legend().get_texts()]
    ['data', '90% interval', '50% interval', 'posterior mean', 'inducing inputs']
    """
    ax = axes_or_new(ax)
    grid = _sorted_column("X", X)
    f = posterior.predict_f(grid, site=site)
    means, sds = (np.asarray(a).reshape(len(grid), -1) for a in f)
    sds = np.sqrt(sds)
    _scatter_data(ax, data)
    for i, (mean, sd) in enumerate(zip(means.T, sds.T, strict=True)):
        shade = color if i == 0 else f"C{i}"
        name = label if means.shape[1] == 1 else f"{label}, latent {i}"
        reach = {p: -ndtri((1 - p) / 2) * sd for p in levels}
        ends = {p: (mean - r, mean + r) for p, r in reach.items()}
        _band(ax, grid[:, 0], mean, ends, shade, name)
    title = "Posterior of the latent"
    return _labelled(ax, inducing, ylabel="latent function", title=title)


def plot_predictive(
    posterior: Posterior,
    X: ArrayLike,
    *,
    site: str | None = None,
    data: tuple[ArrayLike, ArrayLike] | None = None,
    inducing: ArrayLike | None = None,
    levels: Sequence[float] = (0.9,),
    label: str = "mean",
    color: str = "C0",
    ax: Axes | None = None,
) -> Axes:
    """Plot predictions of new observations over one input: mean and central intervals.

    Intervals are quantiles from the ``icdf`` of the predictive distribution, or from
    2000 draws if it has none (counts). For labels 0/1 only the mean, their probability,
    is drawn.

    :param posterior: a fit.
    :param X: inputs at which to predict, (N,) or (N, 1), in any order.
    :param site: the observed site, if the model has several.
    :param data: inputs (N,) or (N, 1) and observations (N,).
    :param inducing: inducing inputs, (M,) or (M, 1), marked along the bottom.
    :param levels: probabilities of the intervals.
    :param label: label of the mean in the legend.
    :param color: colour of mean and intervals.
    :param ax: the axes; a new figure by default.
    :raises ValueError: for inputs with more than one column, or observations of several
        classes.
    """
    ax = axes_or_new(ax)
    grid = _sorted_column("X", X)
    prediction = posterior.predict_y(grid, site=site)
    mean = np.asarray(prediction.mean)
    # NumPyro's mean of a categorical distribution
    if mean.shape != (len(grid),) or np.isnan(mean).all():
        raise ValueError(
            f"the prediction, a {type(prediction).__name__}, has a mean of shape "
            f"{mean.shape}; expected one number per input, ({len(grid)},)"
        )
    _scatter_data(ax, data)
    binary = prediction.support is constraints.boolean
    ends = {} if binary else {p: _interval(prediction, p) for p in levels}
    _band(ax, grid[:, 0], mean, ends, color, label)
    return _labelled(ax, inducing, ylabel="y", title="Predictions")


def plot_decision(
    posterior: Posterior,
    X: ArrayLike,
    y: ArrayLike,
    *,
    site: str | None = None,
    inducing: ArrayLike | None = None,
    num: int = 120,
    ax: Axes | None = None,
) -> Axes:
    """Plot predicted classes over two inputs, with the data.

    For two classes it shows the probability of class 1, and the line where it is one
    half. For more classes it shows the most probable class, in a paler colour if it is
    less probable.

    :param posterior: a fit to labels.
    :param X: inputs, (N, 2).
    :param y: labels 0, ..., C - 1, (N,).
    :param site: the observed site, if the model has several.
    :param inducing: inducing inputs, (M, 2).
    :param num: points of the grid along each input.
    :param ax: the axes; a new figure by default.
    :raises ValueError: for inputs of another shape, or predictions that are not
        probabilities of classes.
    """
    ax = axes_or_new(ax)
    points, labels = np.asarray(X), np.asarray(y)
    if points.ndim != 2 or points.shape[1] != 2 or labels.shape != points.shape[:1]:
        raise ValueError(
            f"X has shape {points.shape} and y {labels.shape}; expected (N, 2) and (N,)"
        )
    margin = 0.08 * np.ptp(points, 0)
    sides = list(np.linspace(points.min(0) - margin, points.max(0) + margin, num).T)
    mesh = np.stack(np.meshgrid(*sides), -1).reshape(-1, 2).astype(points.dtype)
    prediction = posterior.predict_y(mesh, site=site)
    if not hasattr(prediction, "probs") or not prediction.support.is_discrete:
        raise ValueError(
            f"the predictions are {type(prediction).__name__}s, not probabilities "
            "of classes"
        )
    p = np.asarray(prediction.probs).reshape(num, num, -1)
    shade = _shade_probability if p.shape[2] == 1 else _shade_classes
    shade(ax, sides, p)
    _scatter_classes(ax, points, labels)
    if inducing is not None:
        z = np.asarray(inducing)
        ax.scatter(
            z[:, 0], z[:, 1], s=26, marker="x", color="k", lw=1.2, zorder=4,
            label="inducing inputs",
        )  # fmt: skip
    legend_above(ax, ncols=4)
    ax.set(xlabel="input 1", ylabel="input 2")
    ax.set_title("Decision surface", pad=24)
    return ax


def plot_link(
    link: PiecewiseLink,
    band: ArrayLike | None = None,
    *,
    label: str = "link",
    color: str = "C0",
    ax: Axes | None = None,
) -> Axes:
    """Plot a piecewise-constant inverse link. Its outer cells, which are unbounded, are
    drawn as wide as an inner cell.

    :param link: one link, heights (K,).
    :param band: posterior standard deviations of the heights, (K,); the band has two of
        them on either side.
    :param label: label in the legend.
    :param color: colour of link and band.
    :param ax: the axes; a new figure by default.
    :raises ValueError: for one link per datum, or a band of another shape.

    **Example**

    >>> import jax
    >>> link = PiecewiseLink.from_function(jax.nn.sigmoid, 10, -3.0, 3.0)
    >>> plot_link(link, 0.1 * link.heights).get_xlabel()
    'function value f'
    """
    heights = np.asarray(link.heights)
    spread = np.zeros_like(heights) if band is None else np.asarray(band)
    if heights.ndim != 1 or spread.shape != heights.shape:
        raise ValueError(
            f"the link has heights of shape {heights.shape} and band has shape "
            f"{spread.shape}; expected (K,) and (K,)"
        )
    ax = axes_or_new(ax)
    inner = np.asarray(link.edges)
    reach = (inner[-1] - inner[0]) / max(1, len(inner) - 1) or 1.0
    edges = np.array([inner[0] - 2 * reach, *inner, inner[-1] + 2 * reach])
    ax.stairs(heights, edges, baseline=None, color=color, lw=1.8, label=label)
    if band is not None:
        low, high = (heights + s * spread for s in (-2, 2))
        ax.fill_between(
            edges, np.append(low, low[-1]), np.append(high, high[-1]), step="post",
            color=color, alpha=0.2, lw=0, label="two standard deviations",
        )  # fmt: skip
    ax.set(xlim=(edges[0], edges[-1]), xlabel="function value f", ylabel="link(f)")
    ax.legend(frameon=False, loc="upper left")
    return ax


# -- parts -----------------------------------------------------------------------------


def _column(name: str, X: ArrayLike) -> np.ndarray:
    x = np.asarray(X)
    if x.ndim == 1:
        return x[:, None]
    if x.ndim != 2 or x.shape[1] != 1:
        raise ValueError(
            f"{name} has shape {x.shape}; expected one input, (N,) or (N, 1)"
        )
    return x


def _sorted_column(name: str, X: ArrayLike) -> np.ndarray:
    x = _column(name, X)
    return x[np.argsort(x[:, 0])]


def _scatter_data(ax: Axes, data: tuple[ArrayLike, ArrayLike] | None) -> None:
    if data is not None:
        x, y = _column("the inputs of data", data[0])[:, 0], np.asarray(data[1])
        ax.plot(x, y, ".", color="0.6", markersize=4, zorder=1, label="data")


def _labelled(ax: Axes, inducing: ArrayLike | None, **labels: str) -> Axes:
    """Mark inducing inputs, and label the axes."""
    if inducing is not None:
        z = _column("inducing", inducing)[:, 0]
        ax.plot(
            z, np.full_like(z, 0.03), "kx", markersize=5, zorder=4,
            transform=ax.get_xaxis_transform(), label="inducing inputs",
        )  # fmt: skip
    ax.set(xlabel="x", **labels)
    ax.legend(frameon=False)
    return ax


def _band(
    ax: Axes,
    x: np.ndarray,
    mean: np.ndarray,
    ends: Mapping[float, tuple[np.ndarray, np.ndarray]],
    color: str,
    label: str,
) -> None:
    """Draw the widest interval first, so that narrower ones are on top."""
    for level in sorted(ends, reverse=True):
        name = f"{level:.0%} interval"
        ax.fill_between(x, *ends[level], color=color, alpha=0.25, lw=0, label=name)
    ax.plot(x, mean, color=color, lw=1.8, label=label)


def _interval(prediction: Distribution, level: float) -> tuple[np.ndarray, np.ndarray]:
    tails = (1 - level) / 2, (1 + level) / 2
    try:
        low, high = (np.asarray(prediction.icdf(jnp.asarray(q))) for q in tails)
    except NotImplementedError:
        draws = np.asarray(prediction.sample(random.key(0), (2000,)))
        low, high = np.quantile(draws, tails, axis=0)
    return low, high


def _shade_probability(ax: Axes, sides: list[np.ndarray], p: np.ndarray) -> None:
    levels = np.linspace(0, 1, 21)
    shades = ax.contourf(*sides, p[..., 0], levels, cmap="RdBu", alpha=0.75)
    ax.contour(*sides, p[..., 0], [0.5], colors="k", linewidths=1.5)
    bar = ax.figure.colorbar(shades, ax=ax, ticks=[0, 0.25, 0.5, 0.75, 1])
    bar.set_label("predicted probability of class 1")


def _shade_classes(ax: Axes, sides: list[np.ndarray], p: np.ndarray) -> None:
    from matplotlib.colors import to_rgb

    table = np.array([to_rgb(_CLASSES[c % len(_CLASSES)]) for c in range(p.shape[2])])
    # From white at equal probabilities to the colour of a class at certainty.
    floor = 1 / p.shape[2]
    strength = 0.75 * (p.max(2, keepdims=True) - floor) / (1 - floor)
    image = 1 - strength * (1 - table[p.argmax(2)])
    x, y = sides
    extent = float(x[0]), float(x[-1]), float(y[0]), float(y[-1])
    ax.imshow(image, origin="lower", extent=extent, aspect="auto", zorder=0)


def _scatter_classes(ax: Axes, points: np.ndarray, y: np.ndarray) -> None:
    for at in np.unique(y).astype(int):
        chosen = y == at
        ax.scatter(
            points[chosen, 0], points[chosen, 1], s=18, ec="w", lw=0.4,
            label=f"class {at}",
            marker=_MARKERS[at % len(_MARKERS)], color=_CLASSES[at % len(_CLASSES)],
            zorder=2 + (chosen.mean() < 0.5),
        )  # fmt: skip
