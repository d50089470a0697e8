# SPDX-License-Identifier: Apache-2.0
"""Bibtex (4880 + 2515 rows, 1836 columns, 159 labels): which inducing inputs, which
kernel, and what the process adds to logistic regression.

Fits ``examples/multilabel.py``'s model with linear and squared-exponential kernels,
inducing inputs free or in a subspace, learnt or fixed; beside them a logistic
regression of the same rank with a ridge penalty, on the same subspace, and one
regression per label. Prints precision at 1, 3 and 5 in percent, negative log-likelihood
per row (the sum over its labels) and expected calibration error over all labels, and
draws the bound against epochs::

    python examples/benchmarks/bibtex.py --data xmc_bibtex.npz --out bibtex.png

Published (Panos, Dellaportas and Titsias, 2018; 30 latents, 500 inducing inputs, 400
epochs): linear, free 59.3 / 36.7 / 27.4.
"""

from __future__ import annotations

import argparse
import itertools
import json
import sys
import time
from pathlib import Path
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from common import data_folder, machine, print_table, versions

sys.path.append(str(Path(__file__).resolve().parents[1]))

# First learning rates: the better of 0.03 and 0.1 after 12 epochs.
RATES = {"linear": 0.1, "se": 0.03}
FORMS = {
    "method": "s", "P@1": ".1f", "P@3": ".1f", "P@5": ".1f", "nll": ".3f",
    "ece": ".4f", "seconds": ".0f",
}  # fmt: skip


def judged(probs: np.ndarray, Y: Any) -> dict[str, float]:
    """Scores of predicted probabilities, (N, K)."""
    from numpyro_gpaug import diagnostics, ranking

    probs = np.clip(np.asarray(probs, float), 1e-12, 1 - 1e-12)
    present = Y.toarray().astype(bool)
    top = ranking.top_k(lambda labels: probs[:, labels], probs.shape[1], 5).labels
    found = {f"P@{k}": 100 * ranking.precision_at_k(top, Y, k) for k in (1, 3, 5)}
    nll = -np.log(np.where(present, probs, 1 - probs)).sum(1).mean()
    ece = diagnostics.expected_calibration_error(probs.ravel(), present.ravel())
    return {**found, "nll": float(nll), "ece": float(ece)}


def process(problem: Any, options: argparse.Namespace, kernel: str, fixed: bool) -> Any:
    """The factor model of ``examples/multilabel.py``."""
    from multilabel import fit

    args = argparse.Namespace(
        kernel=kernel, fixed=fixed, latents=options.latents, inducing=options.inducing,
        batch_size=options.batch, negatives=10**6, epochs=options.epochs,
        learning_rate=RATES[kernel], checkpoint=None, steps=None, seed=0,
    )  # fmt: skip
    fitted = fit(problem, args)
    X, Y = problem.test
    probs = fitted.posterior.predict_y(jnp.asarray(problem.dense(X)), size=None).probs
    scores = judged(probs, Y)
    return {**scores, "seconds": sum(fitted.seconds), "bounds": fitted.bounds}


def low_rank(problem: Any, options: argparse.Namespace) -> np.ndarray:
    """Logistic regression with weights of low rank on the subspace, by L-BFGS."""
    import optax
    from sklearn.decomposition import TruncatedSVD

    X = jnp.asarray(problem.dense(problem.train.X))
    Y = jnp.asarray(problem.train.Y.toarray(), X.dtype)
    svd = TruncatedSVD(options.latents, random_state=0)
    loadings = svd.fit(problem.train.Y.astype(np.float32)).components_.T
    frequency = (Y.sum(0) + 0.5) / (len(Y) + 1)
    shape = X.shape[1], options.latents
    params = {
        "inner": 0.1 * jax.random.normal(jax.random.key(0), shape),
        "outer": jnp.asarray(loadings, X.dtype),
        "bias": jnp.log(frequency / (1 - frequency)),
    }  # fmt: skip

    def scores(params: dict[str, Any], X: Any) -> Any:
        return X @ params["inner"] @ params["outer"].T + params["bias"]

    def loss(params: dict[str, Any], X: Any, Y: Any) -> Any:
        penalty = sum((params[k] ** 2).sum() for k in ("inner", "outer"))
        f = scores(params, X)
        return (jax.nn.softplus(f) - Y * f).sum() + 0.5 * options.ridge * penalty

    optim = optax.lbfgs()

    @jax.jit
    def run(params: Any, X: Any, Y: Any) -> Any:
        def value(params: Any) -> Any:
            return loss(params, X, Y)

        def step(carry: Any, _: Any) -> Any:
            params, state = carry
            at, slope = optax.value_and_grad_from_state(value)(params, state=state)
            updates, state = optim.update(
                slope, state, params, value=at, grad=slope, value_fn=value
            )
            return (optax.apply_updates(params, updates), state), at

        return jax.lax.scan(step, (params, optim.init(params)), None, length=150)[0][0]

    found = run(params, X, Y)
    test = jnp.asarray(problem.dense(problem.test.X))
    return np.asarray(jax.nn.sigmoid(scores(found, test)))


def one_per_label(problem: Any) -> np.ndarray:
    """A logistic regression per label on all columns."""
    from sklearn.linear_model import LogisticRegression
    from sklearn.multiclass import OneVsRestClassifier

    machine = LogisticRegression(C=10.0, solver="liblinear")
    Y = problem.train.Y.toarray().astype(int)  # int8 labels come out wrong
    model = OneVsRestClassifier(machine).fit(problem.train.X, Y)
    return model.predict_proba(problem.test.X)


def draw(results: list[dict[str, Any]], path: Path) -> None:
    """The bound against epochs."""
    import matplotlib

    matplotlib.use("Agg")
    import matplotlib.pyplot as plt

    fig, ax = plt.subplots(figsize=(7, 4.5), layout="constrained")
    traced = [r for r in results if r.get("bounds")]
    for colour, result in zip(plt.cm.tab10.colors, traced, strict=False):
        style = "--" if "fixed" in result["method"] else "-"
        bounds = np.asarray(result["bounds"]) / 4880
        epochs = np.arange(1, len(bounds) + 1)
        ax.plot(epochs, bounds, style, color=colour, label=result["method"])
    ax.set(xlabel="epoch", ylabel="bound per row, averaged over batches (nats)")
    lowest = min(np.min(r["bounds"][len(r["bounds"]) // 5 :]) for r in traced) / 4880
    ax.set_ylim(bottom=lowest)
    ax.legend(frameon=False, fontsize=8)
    fig.savefig(path, dpi=120)


def main() -> None:
    from multilabel import Problem, load

    from numpyro_gpaug.inducing import Subspace

    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    folder = data_folder()
    default = folder / "xmc_bibtex.npz" if folder else None
    parser.add_argument("--data", type=Path, default=default, required=not default)
    parser.add_argument("--kernels", nargs="*", default=["linear", "se"])
    parser.add_argument("--inducing", type=int, default=200)
    parser.add_argument("--rank", type=int, default=500)
    parser.add_argument("--latents", type=int, default=30)
    parser.add_argument("--batch", type=int, default=500)
    parser.add_argument("--epochs", type=int, default=50)
    parser.add_argument("--ridge", type=float, default=4.0)
    parser.add_argument("--out", type=Path, default=Path("bibtex.png"))
    parser.add_argument("--json", type=Path, help="write every figure here")
    options = parser.parse_args()
    train, test = load(options.data, None, 0)
    subspace = Problem(train, test, Subspace.fit(train.X, options.rank))
    free = Problem(train, test, None)
    results: list[dict[str, Any]] = []

    def report(method: str, found: dict[str, Any]) -> None:
        results.append({"method": method, **found})
        print_table([results[-1]], FORMS)
        written = {"machine": machine(), "versions": versions("jax", "numpyro")}
        written |= {"dtype": "float32", "results": results}
        if options.json:
            options.json.write_text(json.dumps(written, indent=1))

    baselines = {
        f"rank {options.latents} ridge": lambda: low_rank(subspace, options),
        "one per label": lambda: one_per_label(subspace),
    }
    for name, predicted in baselines.items():
        begin = time.perf_counter()
        probs = predicted()
        seconds = time.perf_counter() - begin
        report(name, {**judged(probs, test.Y), "seconds": seconds})
    for kernel, inputs, fixed in itertools.product(
        options.kernels, ("subspace", "free"), (False, True)
    ):
        problem = subspace if inputs == "subspace" else free
        method = f"{kernel}, {inputs}, {'fixed' if fixed else 'learnt'}"
        report(method, process(problem, options, kernel, fixed))
    print()
    print_table(results, FORMS)
    if any(r.get("bounds") for r in results):
        draw(results, options.out)


if __name__ == "__main__":
    main()
