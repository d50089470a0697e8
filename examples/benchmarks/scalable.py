# SPDX-License-Identifier: Apache-2.0
"""Fully scalable processes: what a step costs as columns and labels grow.

A step is the bound of a minibatch and its gradient in everything, an Adam update, and
(for inducing inputs in a subspace) the projection of the batch from sparse rows. Rows
have as many nonzeros whatever the number of columns. ``KL`` is a step on one row and
one label, which is little but the divergence from the prior. Each line runs in a
process of its own::

    python examples/benchmarks/scalable.py --columns 2000 20000 200000
    python examples/benchmarks/scalable.py --labels 1000 10000 100000
    python examples/benchmarks/scalable.py --corpus --steps 200

``--corpus`` makes data of the shape of AmazonCat (1.19 million rows, 203882 columns,
13330 labels) and trains on it as ``examples/multilabel.py`` does, its basis included;
``--steps 0`` runs the epoch to its end.
"""

from __future__ import annotations

import argparse
import json
import subprocess
import sys
import time
from pathlib import Path
from typing import Any

import numpy as np
from common import machine, peak_memory, print_table, versions
from scipy import sparse

sys.path.append(str(Path(__file__).resolve().parents[1]))

NONZEROS, LABELS_A_ROW = 70, 5


def make_rows(size: int, columns: int, labels: int, seed: int = 0) -> Any:
    """Sparse rows of length 1 with labels that depend on their columns."""
    from sklearn.preprocessing import normalize

    from numpyro_gpaug.multilabel import MultiLabelData

    rng = np.random.default_rng(seed)
    # A few columns occur in many rows, most in hardly any.
    chosen = (columns * rng.random((size, NONZEROS), np.float32) ** 3).astype(np.int32)
    np.minimum(chosen, columns - 1, out=chosen)
    ends = np.arange(size + 1, dtype=np.int64) * NONZEROS
    values = rng.random(size * NONZEROS, np.float32)
    X = sparse.csr_array((values, chosen.ravel(), ends), shape=(size, columns))
    X.sum_duplicates()
    of_column = rng.integers(labels, size=columns)
    present = of_column[chosen[:, :LABELS_A_ROW]]
    rows = np.repeat(np.arange(size), LABELS_A_ROW)
    ones = np.ones(present.size, np.int8)
    Y = sparse.csr_array((ones, (rows, present.ravel())), shape=(size, labels))
    Y.data[:] = 1
    return MultiLabelData(normalize(X, copy=False), Y)


def one_step(options: argparse.Namespace, columns: int, labels: int, route: str) -> Any:
    """Times steps of the example's model on random first values."""
    import jax
    import jax.numpy as jnp
    import optax
    from multilabel import Problem, batches, model
    from numpyro.infer import SVI

    import numpyro_gpaug as gpaug
    from numpyro_gpaug.multilabel import LabelSampler

    data = make_rows(2 * options.batch, columns, labels)
    rng = np.random.default_rng(1)
    subspace, width = None, columns
    if route == "subspace":
        basis = np.linalg.qr(rng.normal(size=(columns, options.rank)))[0].T
        subspace, width = gpaug.inducing.Subspace(basis.astype("f4")), options.rank
    problem = Problem(data, data, subspace)
    sampler = LabelSampler(data.Y, options.batch, min(options.negatives, labels))
    known = {
        "A": rng.normal(size=(options.inducing, width)) / np.sqrt(width),
        "loadings": rng.normal(size=(labels, options.latents)),
        "bias": np.zeros(labels),
    }
    known = {k: jnp.asarray(v, jnp.float32) for k, v in known.items()}
    names = {"kernel": options.kernel, "learn": True, "size": len(data.X.indptr) - 1}
    guide = gpaug.AutoSparseGP(model, covariance="preconditioned")
    svi = SVI(model, guide, optax.adam(0.01), gpaug.TraceAnalytic_ELBO())

    @jax.jit
    def step(state: Any, batch: tuple, known: dict[str, Any]) -> tuple[Any, Any]:
        return svi.update(state, *batch, **known, **names)

    def prepared() -> tuple:
        return next(iter(batches(problem, sampler, 0)))

    def timed(project: bool, batch: tuple) -> tuple[float, float]:
        state = svi.init(jax.random.key(0), *batch, **known, **names)
        begin = time.perf_counter()
        state, loss = jax.block_until_ready(step(state, batch, known))
        first, seconds = time.perf_counter() - begin, []
        rows = np.arange(options.batch)
        for _ in range(options.steps):
            begin = time.perf_counter()
            if project:
                dense = jnp.asarray(problem.dense(data.X[rows]))
                batch = (dense, *batch[1:])
            state, loss = jax.block_until_ready(step(state, batch, known))
            seconds.append(time.perf_counter() - begin)
        assert np.isfinite(loss)
        return first, 1e3 * float(np.median(seconds))

    whole = prepared()
    first, per_step = timed(True, whole)
    little = (whole[0][:1], *(x[:1, :1] for x in whole[1:]))
    return {
        "columns": columns, "labels": labels, "route": route, "first_s": first,
        "ms_per_step": per_step, "kl_ms": timed(False, little)[1],
        "peak_GB": peak_memory() / 1e3,
    }  # fmt: skip


def corpus(options: argparse.Namespace) -> Any:
    """One epoch, or its first steps, on data of the shape of AmazonCat."""
    from multilabel import Problem, fit

    from numpyro_gpaug.inducing import Subspace
    from numpyro_gpaug.multilabel import MultiLabelData

    begin = time.perf_counter()
    train = make_rows(options.corpus_rows, 203_882, 13_330)
    test = MultiLabelData(*(part[:2000] for part in train))
    made = time.perf_counter() - begin
    begin = time.perf_counter()
    subspace = Subspace.fit(train.X, options.rank)
    basis = time.perf_counter() - begin
    print(f"data {made:.0f} s, basis {basis:.0f} s", file=sys.stderr, flush=True)
    begin = time.perf_counter()
    args = argparse.Namespace(
        kernel=options.kernel, latents=options.latents, inducing=options.inducing,
        fixed=False, batch_size=options.batch, negatives=options.negatives, epochs=1,
        learning_rate=0.02, checkpoint=None, steps=options.steps or None, seed=0,
    )  # fmt: skip
    fitted = fit(Problem(train, test, subspace), args)
    return {
        "rows": options.corpus_rows, "basis_s": basis, "bound": fitted.bounds[-1],
        "epoch_s": fitted.seconds[-1], "in_all_s": time.perf_counter() - begin,
        "peak_GB": peak_memory() / 1e3,
    }  # fmt: skip


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--columns", type=int, nargs="+", default=[])
    parser.add_argument("--labels", type=int, nargs="+", default=[])
    parser.add_argument("--corpus", action="store_true")
    parser.add_argument("--corpus-rows", type=int, default=1_186_239)
    parser.add_argument("--kernel", default="linear")
    parser.add_argument("--inducing", type=int, default=500)
    parser.add_argument("--rank", type=int, default=500)
    parser.add_argument("--latents", type=int, default=30)
    parser.add_argument("--batch", type=int, default=500)
    parser.add_argument("--negatives", type=int, default=100)
    parser.add_argument("--steps", type=int, default=10)
    parser.add_argument("--one", nargs=3, help=argparse.SUPPRESS)
    parser.add_argument("--json", type=Path, help="write every figure here")
    options = parser.parse_args()
    if options.one:
        columns, labels, route = options.one
        print(json.dumps(one_step(options, int(columns), int(labels), route)))
        return
    cases = [(c, 1000, r) for c in options.columns for r in ("subspace", "free")]
    cases += [(2000, k, "subspace") for k in options.labels]
    results = []
    for case in cases:
        command = [sys.executable, *sys.argv, "--one", *map(str, case)]
        worker = subprocess.run(command, check=True, capture_output=True, text=True)
        results.append(json.loads(worker.stdout.splitlines()[-1]))
    if results:
        forms = {"columns": "d", "labels": "d", "route": "s", "first_s": ".1f"}
        forms |= {"ms_per_step": ".0f", "kl_ms": ".0f", "peak_GB": ".2f"}
        print_table(results, forms)
    if options.corpus:
        results.append(corpus(options))
        print(json.dumps(results[-1], indent=1))
    report = {
        "machine": machine(), "versions": versions("jax", "numpyro"),
        "dtype": "float32", "seconds": "wall time", "results": results,
    }  # fmt: skip
    if options.json:
        options.json.write_text(json.dumps(report, indent=1))


if __name__ == "__main__":
    main()
