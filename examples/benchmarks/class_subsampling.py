# SPDX-License-Identifier: Apache-2.0
"""Classes drawn at random against all classes, on scikit-learn's digits.

The logistic-softmax of ten classes is fitted by steps that use all of them
(``LogisticSoftmax``), and by steps that draw some classes and some of their rows: with
``SampledLogisticSoftmax``, and with ``LogisticNormalizer``, whose zetas (one per row)
are learnt as well. Errors and log scores are computed on held-out digits, seconds are
of a second fit, without compilation::

    python examples/benchmarks/class_subsampling.py --drawn 3 5
"""

from __future__ import annotations

import argparse
import json
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import numpyro
import numpyro.distributions as dist
import optax
from common import machine, print_table, versions
from numpyro import handlers
from sklearn.datasets import load_digits

import numpyro_gpaug as gpaug
from numpyro_gpaug.multilabel import ClassMembers

CLASSES, ROWS_PER_CLASS = 10, 10
KERNEL = gpaug.kernels.SquaredExponential(3.0, 4.0)


def process(inducing: Any) -> gpaug.GaussianProcess:
    return gpaug.GaussianProcess("f", KERNEL, inducing, num_latents=CLASSES)


def whole(X, y=None, *, inducing):
    """All classes and all rows in every step."""
    f = process(inducing)(X)
    with numpyro.plate("data", X.shape[0]):
        numpyro.sample("y", gpaug.LogisticSoftmax(f), obs=y)


def sampled(X, members, *, inducing, num_drawn):
    """Some classes, and rows of theirs."""
    batch = members.draw(num_drawn, ROWS_PER_CLASS)
    f = process(inducing)(X[batch.rows], latents=batch.classes)
    with handlers.scale(scale=batch.scale):
        d = gpaug.SampledLogisticSoftmax(f, CLASSES)
        numpyro.sample("y", d, obs=batch.own)


def normalised(X, labels, *, inducing, num_drawn):
    """Some classes and any rows for the normaliser, whose zetas are learnt; and those
    of these rows that have one of the classes, for the numerator."""
    zeta = numpyro.param(
        "zeta", jnp.full(len(X), CLASSES / 2), constraint=dist.constraints.positive
    )
    gp, num_rows = process(inducing), num_drawn * ROWS_PER_CLASS
    with numpyro.plate("classes", CLASSES, subsample_size=num_drawn) as drawn:
        pass
    with numpyro.plate("data", len(X), subsample_size=num_rows) as rows:
        f = gp(X[rows], latents=drawn)
        d = gpaug.LogisticNormalizer(f, CLASSES, zeta[rows])
        numpyro.sample("rest", d, obs=jnp.zeros(num_rows))
        own = labels[rows][:, None] == drawn
        weights = jnp.where(own, CLASSES / num_drawn, 0.0)
        with handlers.scale(scale=weights.max(-1)):
            chosen = jnp.take_along_axis(f, own.argmax(-1)[:, None], 1)[:, 0]
            numpyro.sample(
                "own", dist.Bernoulli(logits=chosen), obs=jnp.ones(num_rows, int)
            )


def digits(seed: int, num_train: int) -> tuple[Any, ...]:
    """Inputs and labels, of training and of test."""
    X, y = load_digits(return_X_y=True)
    order = np.random.default_rng(seed).permutation(len(X))
    X, y = (X / 16).astype("float32")[order], y[order].astype("int32")
    return X[:num_train], y[:num_train], X[num_train:], y[num_train:]


def fitted(
    model: Callable[..., Any],
    optim: Any,
    steps: int,
    data: tuple[Any, ...],
    **kwargs: Any,
) -> tuple[dict[str, Any], float]:
    """Params, and seconds of CPU of a fit that compiles nothing."""
    svi = gpaug.ConjugateSVI(model, gpaug.AutoSparseGP(model), optim)

    def run() -> dict[str, Any]:
        key = jax.random.key(0)
        result = svi.run(key, steps, *data, progress_bar=False, **kwargs)
        return jax.block_until_ready(result.params)

    run()
    start = time.process_time()
    return run(), time.process_time() - start


def compared(options: argparse.Namespace) -> list[dict[str, Any]]:
    """A row per way of fitting."""
    X, y, X_test, y_test = digits(options.seed, options.train)
    members, Z = ClassMembers.of(y, CLASSES), X[: options.inducing]
    reader = gpaug.ConjugateSVI(whole, gpaug.AutoSparseGP(whole))
    ways: list[tuple[Any, ...]] = [
        (whole, None, options.steps, (X, y), CLASSES),
    ]
    for num_drawn in options.drawn:
        few = options.drawn_steps
        ways.append((sampled, None, few, (X, members), num_drawn))
        ways.append((normalised, optax.adam(0.1), few, (X, y), num_drawn))
    rows = []
    for model, optim, steps, data, num_drawn in ways:
        kwargs = {} if model is whole else {"num_drawn": num_drawn}
        params, seconds = fitted(model, optim, steps, data, inducing=Z, **kwargs)
        # All fits predict by the logistic-softmax of all classes.
        posterior = reader.posterior(params, X, y, inducing=Z)
        found = np.asarray(posterior.predict_y(X_test).probs).argmax(-1)
        rows.append({
            "way": model.__name__, "classes": num_drawn, "steps": steps,
            "error": float(np.mean(found != y_test)),
            "log_score": float(posterior.log_prob(X_test, y_test).mean()),
            "seconds": seconds, "ms_per_step": 1e3 * seconds / steps,
        })  # fmt: skip
    return rows


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.split("\n")[0])
    parser.add_argument("--drawn", type=int, nargs="+", default=[3, 5], help="classes")
    parser.add_argument("--steps", type=int, default=30, help="with all classes")
    parser.add_argument("--drawn-steps", type=int, default=600)
    parser.add_argument("--train", type=int, default=1000, help="digits to fit to")
    parser.add_argument("--inducing", type=int, default=60)
    parser.add_argument("--seed", type=int, default=0, help="of the split")
    parser.add_argument("--json", type=Path, help="write every figure here")
    options = parser.parse_args()
    results = compared(options)
    columns = {"way": "", "classes": "d", "steps": "d", "error": ".3f"}
    columns |= {"log_score": ".3f", "seconds": ".2f", "ms_per_step": ".2f"}
    print_table(results, columns)
    report = {
        "machine": machine(), "versions": versions("jax", "numpyro"),
        "seconds": "CPU time", "results": results,
    }  # fmt: skip
    if options.json:
        options.json.write_text(json.dumps(report, indent=1))


if __name__ == "__main__":
    main()
