# SPDX-License-Identifier: Apache-2.0
"""Many labels per row: processes shared by all labels, on sparse inputs.

Each label has a score that is linear in a few shared Gaussian processes (loadings and a
bias), with inducing inputs in a subspace of the inputs. The label is present with
probability sigmoid(score). Minibatches contain all labels that a row has, and some that
it does not have. Everything is learnt by gradients of the analytic bound. The script
prints precision at 1, 3 and 5 in percent after every epoch, and draws
``multilabel.png``::

    python examples/multilabel.py
    python examples/multilabel.py --data train.txt --test test.txt --rank 500
    python examples/multilabel.py --data bibtex.npz --epochs 60 --checkpoint bibtex

``--data`` takes the text format of the Extreme Classification repository (``.txt``),
svmlight files (``.svm``, features counted from 1), or ``.npz`` with a train and a test
split (:func:`numpyro_gpaug.multilabel.load_npz`). With ``--checkpoint`` every epoch is
saved, and a second run continues from the last one.
"""

from __future__ import annotations

import argparse
import resource
import sys
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import matplotlib
import numpy as np
import numpyro
import numpyro.distributions as dist
import optax
from matplotlib.ticker import MaxNLocator
from numpyro import handlers
from numpyro.infer import SVI
from scipy import sparse
from sklearn.decomposition import TruncatedSVD
from sklearn.preprocessing import normalize
from support.compilation import keep_compiled_programs

import numpyro_gpaug as gpaug
from numpyro_gpaug import multilabel, ranking
from numpyro_gpaug.inducing import Subspace

matplotlib.use("Agg")
import matplotlib.pyplot as plt  # noqa: E402

KERNELS = {
    "linear": lambda scale, variance: gpaug.kernels.Linear(variance),
    "se": gpaug.kernels.SquaredExponential,
}
CUTOFFS = (1, 3, 5)


class Problem(NamedTuple):
    """Training data, test data, and how inputs become dense.

    :param train: training rows.
    :param test: test rows.
    :param subspace: of the inputs; ``None`` for inducing inputs that are free.
    """

    train: multilabel.MultiLabelData
    test: multilabel.MultiLabelData
    subspace: Subspace | None

    def dense(self, X: Any) -> np.ndarray:
        """Some rows of the inputs as the model takes them."""
        return X.toarray() if self.subspace is None else self.subspace.transform(X)


def model(
    X, labels=None, y=None, weights=None, *, size=None, kernel, learn, A, loadings, bias
):  # fmt: skip
    """The model: scores of labels, linear in shared processes.

    :param X: inputs, (B, columns).
    :param labels: looked at in each row, (B, L), or (L,) for the same in all.
    :param y: whether they are present, (B, L).
    :param weights: of each, 0 for padding, (B, L).
    :param size: number of all rows, if these are a batch; ``None``: these are all.
    :param kernel: one of ``KERNELS``.
    :param learn: whether inducing inputs are params.
    :param A: first inducing inputs.
    :param loadings: first loadings.
    :param bias: first bias.
    """
    positive = dist.constraints.positive
    Z = numpyro.param("A", A) if learn else A
    Z = jnp.pad(Z, ((0, 0), (0, X.shape[1] - Z.shape[1])))
    variance = numpyro.param("variance", 1.0, constraint=positive)
    scale = 1.0
    if kernel != "linear":
        scale = numpyro.param("lengthscale", 1.0, constraint=positive)
    gp = gpaug.GaussianProcess(
        "f", KERNELS[kernel](scale, variance), Z,
        loadings=numpyro.param("loadings", loadings), bias=numpyro.param("bias", bias),
    )  # fmt: skip
    width = len(loadings) if labels is None else labels.shape[-1]
    weights = jnp.ones((1, width)) if weights is None else weights
    rows = X.shape[0] if size is None else size
    with (
        numpyro.plate("data", rows, subsample_size=X.shape[0], dim=-2),
        numpyro.plate("labels", width, dim=-1),
        handlers.mask(mask=weights > 0),
        handlers.scale(scale=jnp.where(weights > 0, weights, 1)),
    ):
        numpyro.sample("y", dist.Bernoulli(logits=gp(X, latents=labels)), obs=y)


# -- data ------------------------------------------------------------------------------


def load(path: Path | None, test: Path | None, seed: int) -> tuple[Any, Any]:
    """Training and test data, rows scaled to length 1."""
    if path is None:
        train, held_out = synthetic(seed)
    elif path.suffix == ".npz":
        train, held_out = (multilabel.load_npz(path, k) for k in ("train", "test"))
    else:
        if test is None:
            raise SystemExit("--data with one split needs --test")
        train = _load_text(path, None)
        held_out = _load_text(test, train)
    scaled = (d._replace(X=normalize(d.X)) for d in (train, held_out))
    return tuple(scaled)


def _load_text(path: Path, like: multilabel.MultiLabelData | None) -> Any:
    if path.suffix == ".txt":
        return multilabel.load_xmc(path)
    columns, labels = (None, None) if like is None else (
        like.X.shape[1], like.Y.shape[1]
    )  # fmt: skip
    return multilabel.load_svmlight(
        path, zero_based=False, num_features=columns, num_labels=labels
    )


def synthetic(
    seed: int, size: int = 2000, columns: int = 1000, labels: int = 60, topics: int = 8
) -> tuple[multilabel.MultiLabelData, multilabel.MultiLabelData]:
    """Documents about few topics, which decide words and labels alike."""
    rng = np.random.default_rng(seed)
    words = rng.gamma(0.1, size=(topics, columns))
    kinds = rng.gamma(0.2, size=(topics, labels))
    about = rng.dirichlet(np.full(topics, 0.15), size)
    X = sparse.csr_array(rng.poisson(40 * about @ (words / words.sum(1)[:, None])))
    Y = about @ (kinds / kinds.sum(1)[:, None]) > rng.uniform(0, 0.2, (size, labels))
    whole = X.astype(np.float32), sparse.csr_array(Y.astype(np.int8))
    half = size // 2
    parts = ((x[:half], x[half:]) for x in whole)
    return tuple(multilabel.MultiLabelData(*d) for d in zip(*parts, strict=True))


# -- fit -------------------------------------------------------------------------------


def capped(args: argparse.Namespace, data: Any) -> argparse.Namespace:
    """Options, those that count something no larger than these data allow."""
    rows, num_labels = data.Y.shape
    most = {"inducing": rows, "latents": min(rows, num_labels), "batch_size": rows}
    most["negatives"] = num_labels
    lowered = {name: min(getattr(args, name), most[name]) for name in most}
    return argparse.Namespace(**{**vars(args), **lowered})


def first_values(problem: Problem, args: argparse.Namespace) -> dict[str, Any]:
    """Return the values a fit starts from: inducing inputs at cluster centres, loadings
    along directions in which labels vary together, biases at the frequencies of the
    labels.
    """
    X, Y = problem.train
    size, num_labels = Y.shape
    if problem.subspace is None:
        chosen = np.random.default_rng(args.seed).permutation(size)[
            : 20 * args.inducing
        ]
        dense = jnp.asarray(X[chosen].toarray())
        A = gpaug.inducing.kmeans(dense, args.inducing, seed=args.seed)
    else:
        A = problem.subspace.kmeans(X, args.inducing)
    svd = TruncatedSVD(args.latents, random_state=args.seed).fit(Y.astype(np.float32))
    loadings = svd.components_.T * np.sqrt(num_labels / args.latents)
    frequency = (np.bincount(Y.indices, minlength=num_labels) + 0.5) / (size + 1)
    return {
        "A": jnp.asarray(A, jnp.float32),
        "loadings": jnp.asarray(loadings, jnp.float32),
        "bias": jnp.asarray(np.log(frequency / (1 - frequency)), jnp.float32),
        "kernel": args.kernel,
        "learn": not args.fixed,
    }


def batches(problem: Problem, sampler: Any, epoch: int) -> Iterator[tuple]:
    """An epoch, inputs made dense a batch at a time, prepared by another thread."""

    def prepared() -> Iterator[tuple]:
        for batch in sampler.epoch(epoch):
            X = problem.dense(problem.train.X[batch.rows])
            yield tuple(
                jnp.asarray(a) for a in (X, batch.labels, batch.targets, batch.weights)
            )

    return multilabel.prefetch(prepared())


def precisions(posterior: Any, problem: Problem, rows: int = 4096) -> list[float]:
    """Precision at each cutoff, in percent, of test rows by mean score; at those the
    labels are enough for."""
    X, Y = problem.test
    cutoffs = [k for k in CUTOFFS if k <= Y.shape[1]]
    found = []
    for start in range(0, X.shape[0], rows):
        dense = jnp.asarray(problem.dense(X[start : start + rows]))

        def scores(block: slice, dense: Any = dense) -> Any:
            labels = jnp.arange(block.start, block.stop)[None]
            labels = jnp.repeat(labels, len(dense), 0)
            return posterior.predict_f(dense, labels, size=None).mean

        found.append(ranking.top_k(scores, Y.shape[1], max(cutoffs)).labels)
    top = np.concatenate(found)
    return [100 * ranking.precision_at_k(top, Y, k) for k in cutoffs]


def save(path: Path, state: Any, epoch: int) -> None:
    """The state of a fit as plain arrays; replaces the last one when complete."""
    leaves = {str(i): np.asarray(x) for i, x in enumerate(jax.tree.leaves(state))}
    partial = path.with_suffix(".partial")
    with open(partial, "wb") as file:
        np.savez(file, epoch=epoch, **leaves)
    partial.replace(path)


def resume(path: Path, like: Any) -> tuple[Any, int]:
    """Read a file of :func:`save` into the structure of a fresh state."""
    leaves, structure = jax.tree.flatten(like)
    with np.load(path, allow_pickle=False) as archive:
        saved = [jnp.asarray(archive[str(i)]) for i in range(len(leaves))]
        if [x.shape for x in saved] != [x.shape for x in leaves]:
            raise SystemExit(f"{path} is of a fit with other settings")
        return jax.tree.unflatten(structure, saved), int(archive["epoch"])


class Fitted(NamedTuple):
    """The result of :func:`fit`, with one entry per epoch that it trained.

    :param posterior: after the last one; ``None`` if there was nothing left to do.
    :param bounds: average bound of the batches.
    :param precisions: at each cutoff, in percent.
    :param seconds: of training.
    """

    posterior: gpaug.Posterior | None
    bounds: list[float]
    precisions: list[list[float]]
    seconds: list[float]


def fit(problem: Problem, args: argparse.Namespace) -> Fitted:
    """Train, and print a line per epoch."""
    args = capped(args, problem.train)
    start = first_values(problem, args)
    sampler = multilabel.LabelSampler(
        problem.train.Y, args.batch_size, args.negatives, seed=args.seed
    )
    known = {**start, "size": problem.train.X.shape[0]}
    guide = gpaug.AutoSparseGP(model, covariance="preconditioned")
    decay = optax.cosine_decay_schedule(
        args.learning_rate, args.epochs * len(sampler), 0.01
    )
    svi = SVI(model, guide, optax.adam(decay), gpaug.TraceAnalytic_ELBO())
    first = next(batches(problem, sampler, 0))
    state, done = svi.init(jax.random.key(args.seed), *first, **known), 0
    checkpoint = args.checkpoint and args.checkpoint.with_suffix(".npz")
    if checkpoint and checkpoint.exists():
        state, done = resume(checkpoint, state)
        print(f"resumed after {done} epochs")
    names = {k: v for k, v in known.items() if isinstance(v, str | bool | int)}
    arrays = {k: v for k, v in known.items() if k not in names}

    @jax.jit
    def step(state: Any, batch: tuple, arrays: dict[str, Any]) -> tuple[Any, Any]:
        return svi.update(state, *batch, **arrays, **names)

    found = Fitted(None, [], [], [])
    for epoch in range(done, args.epochs):
        begin, losses = time.perf_counter(), []
        for number, batch in enumerate(batches(problem, sampler, epoch)):
            if number == args.steps:
                break
            if number == 1 and args.steps is not None:
                jax.block_until_ready(losses)  # time compiled steps only
                begin = time.perf_counter()
            state, loss = step(state, batch, arrays)
            losses.append(loss)
        found.bounds.append(-float(jnp.mean(jnp.stack(losses))))
        found.seconds.append(time.perf_counter() - begin)
        if args.steps is not None:
            found.seconds[-1] *= len(sampler) / max(1, len(losses) - 1)
        params = svi.get_params(state)
        posterior = gpaug.Posterior.from_guide(model, guide, params, *first, **known)
        found = found._replace(posterior=posterior)
        found.precisions.append(precisions(posterior, problem))
        judged = dict(zip(CUTOFFS, found.precisions[-1], strict=False))
        scores = ", ".join(f"P@{k} {p:.1f}" for k, p in judged.items())
        peak = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
        peak /= 1024 ** (3 if sys.platform == "darwin" else 2)
        print(
            f"epoch {epoch + 1}: bound {found.bounds[-1]:.0f}, {scores}, "
            f"{found.seconds[-1]:.1f} s an epoch, peak {peak:.1f} GiB",
            flush=True,
        )
        if checkpoint:
            save(checkpoint, state, epoch + 1)
    return found


def draw(fitted: Fitted, path: Path) -> None:
    """The bound and the precisions after every epoch of the run."""
    fig, (left, right) = plt.subplots(1, 2, figsize=(9, 3.5), layout="constrained")
    epochs = 1 + np.arange(len(fitted.bounds))
    left.plot(epochs, fitted.bounds, color="black")
    left.set(xlabel="epoch", ylabel="bound, averaged over batches (nats)")
    for cutoff, values in zip(CUTOFFS, np.transpose(fitted.precisions), strict=False):
        right.plot(epochs, values, label=f"P@{cutoff}")
    right.set(xlabel="epoch", ylabel="precision on test rows (%)", ylim=(0, None))
    right.legend(frameon=False)
    for ax in (left, right):
        ax.xaxis.set_major_locator(MaxNLocator(integer=True))
    fig.savefig(path, dpi=110)


def parse(argv: list[str] | None) -> argparse.Namespace:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--data", type=Path, help="training rows")
    parser.add_argument("--test", type=Path, help="test rows, if in another file")
    parser.add_argument("--kernel", choices=tuple(KERNELS), default="linear")
    parser.add_argument("--latents", type=int, default=8, help="shared processes")
    parser.add_argument("--inducing", type=int, default=50)
    parser.add_argument("--rank", type=int, default=50, help="of the subspace")
    parser.add_argument(
        "--free", action="store_true", help="inducing inputs outside the subspace"
    )
    parser.add_argument(
        "--fixed", action="store_true", help="leave inducing inputs where they are"
    )
    parser.add_argument("--batch-size", type=int, default=200)
    parser.add_argument("--negatives", type=int, default=1000, help="labels a row")
    parser.add_argument("--epochs", type=int, default=20)
    parser.add_argument("--learning-rate", type=float, default=0.02)
    parser.add_argument("--checkpoint", type=Path, help="saved after every epoch")
    parser.add_argument(
        "--steps", type=int, help="end each epoch early, and extrapolate its time"
    )
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--out", type=Path, default=Path("multilabel.png"))
    return parser.parse_args(argv)


def main(argv: list[str] | None = None) -> Fitted:
    """Fit, print and draw."""
    args = parse(argv)
    keep_compiled_programs()
    train, test = load(args.data, args.test, args.seed)
    begin = time.perf_counter()
    rank = min(args.rank, *train.X.shape)
    subspace = None if args.free else Subspace.fit(train.X, rank, seed=args.seed)
    print(
        f"{train.X.shape[0]} + {test.X.shape[0]} rows, {train.X.shape[1]} columns, "
        f"{train.Y.shape[1]} labels; subspace {time.perf_counter() - begin:.1f} s"
    )
    fitted = fit(Problem(train, test, subspace), args)
    if fitted.bounds:
        draw(fitted, args.out)
    return fitted


if __name__ == "__main__":
    main()
