# SPDX-License-Identifier: Apache-2.0
"""Images classified by a neural network with a Gaussian measure around it.

Gaussian Wasserstein inference (Wild, Hu and Sejdinovic, 2022) fits a Gaussian measure
on functions. Its mean is a network, and its covariance belongs to a sparse Gaussian
process. The script compares it with the same network trained by cross-entropy, and with
the same Gaussian process fitted by its evidence bound, on test images and on two kinds
of foreign images: test images rotated by a quarter turn, and test images with their
pixels shuffled (in one order for all). Scores are computed on test images. The AUROC
measures how well the entropy of the predicted class identifies a foreign image. The
picture is ``function_space_images.png``::

    python examples/function_space_images.py
    python examples/function_space_images.py --data mine.npz --inducing 200

Away from the data the covariance grows to the prior's variance, but the network's mean
grows too. Where the mean grows faster, this measure is as confident as the network, and
the Gaussian process is not. (Rotated digits have ink where no digit has, and the
network extrapolates from it.) A larger ``--weight`` restrains the mean, at the data
only.

``mine.npz`` contains X, images (N, height, width), (N, height, width, channels) or, for
square images, (N, pixels), and y, labels (N,). The names X_train and y_train are read
too. If it contains X_test and y_test, these are the test set.
"""

from __future__ import annotations

import argparse
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any, NamedTuple

import equinox as eqx
import jax
import jax.numpy as jnp
import matplotlib
import numpy as np
import numpyro
import numpyro.distributions as dist
import optax
from multiclass import score
from numpyro.contrib.module import eqx_module
from numpyro.infer import SVI, Trace_ELBO
from sklearn.datasets import load_digits
from sklearn.metrics import roc_auc_score
from sklearn.model_selection import train_test_split
from support.compilation import keep_compiled_programs

import numpyro_gpaug as gpaug

matplotlib.use("Agg")
import matplotlib.pyplot as plt  # noqa: E402

LIKELIHOODS = {
    "robust-max": gpaug.RobustMax,
    "softmax": lambda f: dist.Categorical(logits=f),
}
WASSERSTEIN = "Network mean, Wasserstein"
NETWORK = "Network, cross-entropy"
SPARSE = "Sparse GP, KL"
IN, TURNED, SHUFFLED = "test images", "turned", "pixels shuffled"
COLORS = {IN: "C0", TURNED: "C1", SHUFFLED: "C3"}
BATCH_SIZE = 200


class Data(NamedTuple):
    """Images (N, height, width, channels), class numbers, and the classes' names."""

    images: np.ndarray
    y: np.ndarray
    test_images: np.ndarray
    y_test: np.ndarray
    classes: np.ndarray


# -- data ---------------------------------------------------------------------------


def load(path: str | None, seed: int) -> Data:
    """Load digits, or an .npz file; a fifth is held out unless the file has a split."""
    if path is None:
        digits = load_digits()
        found = {"X": digits.images, "y": digits.target}
    else:
        with np.load(path, allow_pickle=False) as archive:
            names = {"X_train": "X", "y_train": "y"}
            found = {names.get(k, k): archive[k] for k in archive}
        if not {"X", "y"} <= set(found):
            raise SystemExit(f"{path} holds {list(found)}; expected X and y")
    classes, y = np.unique(found["y"].ravel(), return_inverse=True)
    images = as_images(found["X"], y)
    if {"X_test", "y_test"} <= set(found):
        unknown = ~np.isin(found["y_test"], classes)
        if unknown.any():
            raise SystemExit(f"{unknown.sum()} labels of y_test do not occur in y")
        y_test = np.searchsorted(classes, found["y_test"].ravel())
        return Data(images, y, as_images(found["X_test"], y_test), y_test, classes)
    if np.bincount(y).min() < 2:
        raise SystemExit(f"of the {len(classes)} classes one occurs only once")
    images, test_images, y, y_test = train_test_split(
        images, y, test_size=0.2, stratify=y, random_state=seed
    )
    return Data(images, y, test_images, y_test, classes)


def as_images(X: np.ndarray, y: np.ndarray) -> np.ndarray:
    """(N, height, width, channels) from images with or without channels, or rows."""
    side = int(np.sqrt(X[0].size))
    if X.ndim == 2 and side * side == X.shape[1]:
        X = X.reshape(-1, side, side)
    X = X[..., None] if X.ndim == 3 else X
    if X.ndim != 4 or len(X) != len(y) or not np.isfinite(X).all():
        raise SystemExit(
            f"images of shape {X.shape} for {len(y)} labels; expected finite numbers "
            "(N, height, width), (N, height, width, channels) or (N, pixels of a "
            "square image), and labels (N,)"
        )
    return X.astype(float)


def inputs(images: np.ndarray, like: np.ndarray) -> np.ndarray:
    """Rows of pixels, on the scale of the training images: all pixels alike, for those
    that are always dark would turn to noise."""
    rows = (images - like.mean(0)).reshape(len(images), -1)
    return (rows / like.std()).astype(jnp.result_type(float))


def strangers(images: np.ndarray, seed: int) -> dict[str, np.ndarray]:
    """Images of the same pixels that are no test images."""
    order = np.random.default_rng(seed).permutation(images[0, ..., 0].size)
    flat = images.reshape(len(images), -1, images.shape[-1])
    found = {SHUFFLED: flat[:, order].reshape(images.shape)}
    if images.shape[1] == images.shape[2]:
        found = {TURNED: np.rot90(images, axes=(1, 2)), **found}
    return found


# -- fits ---------------------------------------------------------------------------


def model(X, y=None, *, Z, scale, likelihood, num_classes, batch_size=None):
    """One Gaussian process per class, all with the same kernel, which is not learnt."""
    kernel = gpaug.kernels.SquaredExponential(lengthscale=scale, variance=4.0)
    gp = gpaug.GaussianProcess("f", kernel, inducing=Z, num_latents=num_classes)
    with numpyro.plate("data", X.shape[0], subsample_size=batch_size) as index:
        f = gp(X[index])
        numpyro.sample("y", likelihood(f), obs=None if y is None else y[index])


def typical_distance(X: np.ndarray) -> float:
    """Between two training images: the scale on which functions may change."""
    rng = np.random.default_rng(0)
    first, second = rng.integers(len(X), size=(2, 2000))
    return float(np.median(np.linalg.norm(X[first] - X[second], axis=1)))


def optimiser(steps: int) -> optax.GradientTransformation:
    return optax.adam(optax.cosine_decay_schedule(3e-3, steps, alpha=0.02))


def fit_process(
    guide: Any, loss: Any, X: jax.Array, y: jax.Array, args, given: dict
) -> gpaug.Posterior:
    """The model by stock SVI, on minibatches."""
    svi = SVI(model, guide, optimiser(args.steps), loss)
    fitted = svi.run(
        jax.random.key(args.seed), args.steps, X, y, **given, progress_bar=False
    )
    params = jax.block_until_ready(fitted.params)  # or the next fit would wait for it
    return gpaug.Posterior.from_guide(model, guide, params, X, y, **given)


def fit_network(mean: Callable, X: jax.Array, y: jax.Array, args) -> Callable:
    """The same network by cross-entropy, on batches drawn likewise."""

    def classifier(X, y=None, batch_size=None):
        with numpyro.plate("data", X.shape[0], subsample_size=batch_size) as index:
            logits = mean(X[index])
            numpyro.sample("y", dist.Categorical(logits=logits), obs=y[index])

    def nothing(X, y=None, batch_size=None) -> None:
        """No latents, nothing to guide."""

    svi = SVI(classifier, nothing, optimiser(args.steps), Trace_ELBO())
    key, batch_size = jax.random.key(args.seed), min(BATCH_SIZE, len(X))
    fitted = svi.run(key, args.steps, X, y, batch_size=batch_size, progress_bar=False)
    params = jax.block_until_ready(fitted.params)
    filled = numpyro.handlers.substitute(mean, data=params)
    return lambda X: jax.nn.softmax(filled(jnp.asarray(X)))


def fit_all(data: Data, args) -> tuple[dict[str, Callable], dict[str, float]]:
    """Probabilities as functions of the inputs, and seconds, by method."""
    X, num_classes = inputs(data.images, data.images), len(data.classes)
    distinct = len(np.unique(X, axis=0))
    scale = args.scale * typical_distance(X)
    given = {
        "Z": gpaug.inducing.kmeans(X, min(args.inducing, distinct), seed=args.seed),
        "scale": scale,
        "likelihood": LIKELIHOODS[args.likelihood],
        "num_classes": num_classes,
        "batch_size": min(BATCH_SIZE, len(X)),
    }
    X, y = jnp.asarray(X), jnp.asarray(data.y)
    key = jax.random.key(args.seed)
    net = eqx.nn.MLP(X.shape[1], num_classes, args.width, 2, key=key)

    def mean(X: jax.Array) -> jax.Array:
        return jax.vmap(eqx_module("net", net))(X)

    wasserstein = gpaug.TraceWasserstein_ELBO(args.weight, num_points=40)
    in_function_space = gpaug.AutoFunctionSpaceGP(model, mean)
    of_inducing_values = gpaug.AutoSparseGP(model, covariance="dense")
    bound = gpaug.TraceAnalytic_ELBO()

    def by(guide: Any, loss: Any) -> Callable:
        posterior = fit_process(guide, loss, X, y, args, given)
        return lambda X: posterior.predict_y(X).probs

    fits = {
        WASSERSTEIN: lambda: by(in_function_space, wasserstein),
        NETWORK: lambda: fit_network(mean, X, y, args),
        SPARSE: lambda: by(of_inducing_values, bound),
    }
    found, seconds = {}, {}
    for name, fit in fits.items():
        start = time.perf_counter()
        found[name] = fit()
        seconds[name] = time.perf_counter() - start
    return found, seconds


# -- scores -------------------------------------------------------------------------


def entropy(p: np.ndarray) -> np.ndarray:
    """Return the entropy of the predicted class, in nats."""
    return -np.sum(p * np.log(np.maximum(p, 1e-30)), -1)


def report(probs: dict[str, dict[str, np.ndarray]], y: np.ndarray, seconds: dict):
    """Print scores on test images, and how well the entropy separates foreign images
    from them.
    """
    others = [name for name in next(iter(probs.values())) if name != IN]
    columns = ["accuracy", "NLL", "ECE", "entropy"]
    columns += [f"{what}, {name}" for name in others for what in ("entropy", "AUROC")]
    print("\n" + " " * 28 + "  ".join(columns) + "  seconds")
    for method, by_set in probs.items():
        error, nll, _, ece = score(by_set[IN], y)
        entropies = {name: entropy(p) for name, p in by_set.items()}
        row = [1 - error, nll, ece, entropies[IN].mean()]
        for name in others:
            both = np.concatenate([entropies[IN], entropies[name]])
            is_stranger = np.arange(len(both)) >= len(y)
            row += [entropies[name].mean(), roc_auc_score(is_stranger, both)]
        cells = (f"{x:{len(c)}.3f}" for x, c in zip(row, columns, strict=True))
        print(f"{method:<28}" + "  ".join(cells) + f"{seconds[method]:9.1f}")


# -- picture ------------------------------------------------------------------------


def draw(data: Data, probs: dict, path: str) -> None:
    """The most and the least certain test images, and histograms of entropy."""
    style = {"font.size": 9, "axes.spines.top": False, "axes.spines.right": False}
    with plt.rc_context(style):
        figure = plt.figure(figsize=(14, 8), layout="constrained")
        upper, lower = figure.subfigures(2, 1, height_ratios=(1.15, 1), hspace=0.04)
        p = probs[WASSERSTEIN][IN]
        order = np.argsort(entropy(p), kind="stable")
        halves = upper.subfigures(1, 2, wspace=0.04)
        draw_images(halves[0], "Most certain test images", data, p, order[:12])
        draw_images(halves[1], "Least certain test images", data, p, order[:-13:-1])
        panels = lower.subplots(1, len(probs), sharey=True)
        for axes, (method, by_set) in zip(panels, probs.items(), strict=True):
            draw_entropies(axes, method, by_set, len(data.classes))
        panels[0].set_ylabel("share of images")
        lower.suptitle("Entropy of the predicted class", fontweight="bold")
        figure.savefig(path, dpi=130)
        plt.close(figure)


def draw_images(figure, title: str, data: Data, p: np.ndarray, rows) -> None:
    """Images with the probabilities of their classes below, the true one in blue."""
    figure.suptitle(f"{title} (true class in blue)", fontweight="bold")
    grid = figure.add_gridspec(4, 6, height_ratios=(1.5, 1) * 2)
    for place, row in enumerate(rows):
        above, column = 2 * (place // 6), place % 6
        truth, guess = data.y_test[row], p[row].argmax()
        axes = figure.add_subplot(grid[above, column])
        image = data.test_images[row]
        low, high = data.images.min(), data.images.max()
        shown = (image - low) / (high - low)
        axes.imshow(shown if image.shape[-1] in (3, 4) else shown[..., 0], "gray_r")
        axes.axis("off")
        title, color = f"{data.classes[truth]}", "k"
        if truth != guess:
            title, color = f"{title}, predicted {data.classes[guess]}", "C3"
        axes.set_title(title, fontsize=8.5, color=color)
        bars = figure.add_subplot(grid[above + 1, column])
        colors = ["C0" if k == truth else "0.6" for k in range(p.shape[1])]
        bars.bar(range(p.shape[1]), p[row], color=colors)
        bars.set(ylim=(0, 1), yticks=[], xlim=(-0.6, p.shape[1] - 0.4))
        bars.spines["left"].set_visible(False)
        named = range(p.shape[1]) if p.shape[1] <= 10 else ()
        bars.set_xticks(named, data.classes[: len(named)])
        bars.tick_params(length=0, labelsize=7, pad=1)


def draw_entropies(axes, method: str, by_set: dict, num_classes: int) -> None:
    edges = np.linspace(0, np.log(num_classes), 24)
    for name, p in by_set.items():
        values = np.minimum(entropy(p), edges[-1])
        weights = np.full(len(values), 1 / len(values))
        style = {"histtype": "stepfilled", "alpha": 0.25, "color": COLORS[name]}
        axes.hist(values, edges, weights=weights, **style)
        style = {"histtype": "step", "lw": 1.8, "color": COLORS[name]}
        axes.hist(values, edges, weights=weights, label=name, **style)
    axes.axvline(edges[-1], color="0.6", lw=1, ls=":")
    axes.set(xlabel="nats (dotted: all classes alike)", title=method)
    axes.legend(frameon=False, loc="upper center")


# -- main ---------------------------------------------------------------------------


def parse(argv: list[str] | None) -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__.split("\n")[0])
    parser.add_argument("--data", help=".npz with images X and labels y")
    parser.add_argument("--likelihood", choices=LIKELIHOODS, default="robust-max")
    parser.add_argument("--inducing", type=int, default=100, help="inducing inputs")
    parser.add_argument("--width", type=int, default=100, help="of the two layers")
    parser.add_argument("--steps", type=int, default=800)
    parser.add_argument(
        "--weight", type=float, default=1.0, help="of the distance to the prior"
    )
    parser.add_argument(
        "--scale",
        type=float,
        default=1.0,
        help="lengthscale, in median distances between images",
    )
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument(
        "--out", default="function_space_images.png", help="the picture"
    )
    return parser.parse_args(argv)


def main(argv: list[str] | None = None) -> None:
    """Run the whole job."""
    args = parse(argv)
    keep_compiled_programs()
    data = load(args.data, args.seed)
    print(
        f"{len(data.y)} images of {data.images.shape[1:]} to learn from, "
        f"{len(data.y_test)} to test, {len(data.classes)} classes; {args.inducing} "
        f"inducing inputs, {args.steps} steps, {args.likelihood}"
    )
    sets = {IN: data.test_images, **strangers(data.test_images, args.seed)}
    sets = {name: inputs(images, data.images) for name, images in sets.items()}
    methods, seconds = fit_all(data, args)
    probs = {
        method: {name: np.asarray(at(X)) for name, X in sets.items()}
        for method, at in methods.items()
    }
    report(probs, data.y_test, seconds)
    draw(data, probs, args.out)
    print(f"\ndrew {Path(args.out).resolve()}")


if __name__ == "__main__":
    main()
