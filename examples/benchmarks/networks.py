# SPDX-License-Identifier: Apache-2.0
"""Learning hundreds of params that are not scales (networks, features): the default
optimiser beside ``optax.adam(0.01)``, with equal numbers of evaluations of the bound.

Six models, with data drawn from ``--seed``: regression and classification on features
of a network (deep kernels), counts with a network and random effects, random features
whose frequencies are learnt, inducing inputs that are learnt with a lengthscale for
each column, and outputs that share processes by learnt loadings. With ``--starts``
networks and features start from several draws::

    python examples/benchmarks/networks.py --steps 500 --starts 3

``bound`` is the bound at the end, ``nll`` the mean negative log density of held-out
rows, ``rmse`` the error of the predicted means, ``evaluations`` the number of
evaluations of the bound, ``cpu`` the processor seconds of a second run, without
compilation.
"""

from __future__ import annotations

import argparse
import json
import sys
import time
import warnings
from collections.abc import Callable
from pathlib import Path
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
import numpyro
import numpyro.distributions as dist
import optax
from common import machine, print_table, versions

import numpyro_gpaug as gpaug

POSITIVE = dist.constraints.positive
HELD_OUT = 400


class Task(NamedTuple):
    """A model and its data.

    :param model: NumPyro's.
    :param guide: of it.
    :param rows: arguments that have a row for each datum, observations last.
    :param others: keyword arguments.
    """

    model: Callable[..., Any]
    guide: Any
    rows: tuple[np.ndarray, ...]
    others: dict[str, Any]


def network(key: jax.Array, *widths: int) -> list[tuple[jax.Array, jax.Array]]:
    """Weights and biases of layers, at the usual random start."""
    shapes = list(zip(widths, widths[1:], strict=False))
    keys = jax.random.split(key, len(shapes))
    return [
        (jax.random.normal(k, shape) / np.sqrt(shape[0]), jnp.zeros(shape[1]))
        for k, shape in zip(keys, shapes, strict=True)
    ]


def applied(layers: list[tuple[jax.Array, jax.Array]], x: Any) -> Any:
    """The network's output."""
    for weight, bias in layers[:-1]:
        x = jnp.tanh(x @ weight + bias)
    weight, bias = layers[-1]
    return x @ weight + bias


def surface(rng: np.random.Generator, rows: int) -> tuple[np.ndarray, np.ndarray]:
    """A function of five columns that a kernel on them does not find."""
    X = rng.uniform(-1, 1, (rows, 5))
    return X, np.sin(6 * (X[:, 0] * X[:, 1] + X[:, 2]))


def deep_kernel(rng: np.random.Generator, key: jax.Array, rows: int) -> Task:
    """Regression by a kernel on the outputs of a network of the inputs."""
    X, f = surface(rng, rows + HELD_OUT)
    y = f + 0.1 * rng.normal(size=len(f))
    start = network(key, 5, 32, 2)

    def model(X: Any, y: Any = None, *, inducing: Any) -> None:
        layers = numpyro.param("network", start)
        lengthscale = numpyro.sample("lengthscale", dist.LogNormal(0, 1))
        noise = numpyro.sample("noise", dist.HalfNormal(0.5))
        kernel = gpaug.kernels.SquaredExponential(lengthscale, 1.0)
        gp = gpaug.GaussianProcess("f", kernel, applied(layers, inducing))
        with numpyro.plate("data", X.shape[0]):
            numpyro.sample("y", dist.Normal(gp(applied(layers, X)), noise), obs=y)

    Z = gpaug.inducing.kmeans(X[:rows], 60)
    return Task(model, gpaug.AutoSparseGP(model), (X, y), {"inducing": Z})


def deep_classes(rng: np.random.Generator, key: jax.Array, rows: int) -> Task:
    """Two classes by a kernel on the outputs of a deeper network of the inputs."""
    X, f = surface(rng, rows + HELD_OUT)
    y = (f + 0.3 * rng.logistic(size=len(f)) > 0).astype(int)
    start = network(key, 5, 24, 24, 2)

    def model(X: Any, y: Any = None, *, inducing: Any) -> None:
        layers = numpyro.param("network", start)
        variance = numpyro.sample("variance", dist.LogNormal(0, 1))
        kernel = gpaug.kernels.Matern52(1.0, variance)
        gp = gpaug.GaussianProcess("f", kernel, applied(layers, inducing))
        with numpyro.plate("data", X.shape[0]):
            f = gp(applied(layers, X))
            numpyro.sample("y", dist.Bernoulli(logits=f), obs=y)

    Z = gpaug.inducing.kmeans(X[:rows], 40)
    return Task(model, gpaug.AutoSparseGP(model), (X, y), {"inducing": Z})


def network_mean(rng: np.random.Generator, key: jax.Array, rows: int) -> Task:
    """Counts by a network, and effects of twenty groups."""
    X, f = surface(rng, rows + HELD_OUT)
    group = rng.integers(0, 20, len(f))
    y = rng.poisson(np.exp(0.5 + f + 0.5 * rng.normal(size=20)[group]))
    start = network(key, 5, 32, 1)

    def model(X: Any, group: Any, y: Any = None) -> None:
        layers = numpyro.param("network", start)
        tau = numpyro.sample("tau", dist.HalfNormal(1))
        level = numpyro.sample("level", dist.Normal(0, 2))
        with numpyro.plate("groups", 20):
            effect = numpyro.sample("effect", dist.Normal(0, tau))
        with numpyro.plate("data", X.shape[0]):
            eta = level + effect[group] + applied(layers, X)[:, 0]
            numpyro.sample("y", dist.Poisson(jnp.exp(eta)), obs=y)

    return Task(model, gpaug.AutoLatentGaussian(model), (X, group, y), {})


def random_features(rng: np.random.Generator, key: jax.Array, rows: int) -> Task:
    """Two classes by weights of cosines whose frequencies are learnt."""
    X, f = surface(rng, rows + HELD_OUT)
    y = (f + 0.3 * rng.logistic(size=len(f)) > 0).astype(int)
    begun = jax.random.normal(key, (5, 60))

    def model(X: Any, y: Any = None) -> None:
        frequencies = numpyro.param("frequencies", begun)
        phases = numpyro.param("phases", jnp.linspace(0, 6, 60))
        scale = numpyro.sample("scale", dist.HalfNormal(2))
        with numpyro.plate("features", 60):
            weights = numpyro.sample("weights", dist.Normal(0, scale))
        with numpyro.plate("data", X.shape[0]):
            f = jnp.cos(X @ frequencies + phases) @ weights / np.sqrt(30)
            numpyro.sample("y", dist.Bernoulli(logits=f), obs=y)

    return Task(model, gpaug.AutoLatentGaussian(model), (X, y), {})


def inducing_inputs(rng: np.random.Generator, key: jax.Array, rows: int) -> Task:
    """Regression by a kernel with lengthscales, at inducing inputs that are learnt."""
    X = rng.uniform(-2, 2, (rows + HELD_OUT, 8))
    f = np.sin(3 * X[:, 0]) + X[:, 1] * X[:, 2] + 0.5 * X[:, 3]
    y = f + 0.2 * rng.normal(size=len(f))
    drawn = jax.random.choice(key, rows, (30,), replace=False)
    Z = jnp.asarray(X)[drawn]

    def model(X: Any, y: Any = None) -> None:
        Z_learnt = numpyro.param("Z", Z)
        lengthscale = numpyro.param(
            "lengthscale", jnp.full(8, 2.0), constraint=POSITIVE
        )
        variance = numpyro.param("variance", 1.0, constraint=POSITIVE)
        noise = numpyro.param("noise", 0.5, constraint=POSITIVE)
        kernel = gpaug.kernels.SquaredExponential(lengthscale, variance)
        gp = gpaug.GaussianProcess("f", kernel, Z_learnt)
        with numpyro.plate("data", X.shape[0]):
            numpyro.sample("y", dist.Normal(gp(X), noise), obs=y)

    return Task(model, gpaug.AutoSparseGP(model), (X, y), {})


def loadings(rng: np.random.Generator, key: jax.Array, rows: int) -> Task:
    """Ten outputs that share three processes."""
    X = rng.uniform(-2, 2, (rows + HELD_OUT, 2))
    h = np.stack([np.sin(2 * X[:, 0]), np.cos(2 * X[:, 1]), X[:, 0] * X[:, 1]], -1)
    f = h @ rng.normal(size=(3, 10)) - 0.5
    y = (f + rng.logistic(size=f.shape) > 0).astype(int)
    begun = 0.5 * jax.random.normal(key, (10, 3))

    def model(X: Any, y: Any = None, *, inducing: Any) -> None:
        shared = numpyro.param("loadings", begun)
        bias = numpyro.param("bias", jnp.zeros(10))
        lengthscale = numpyro.param("lengthscale", jnp.ones(2), constraint=POSITIVE)
        kernel = gpaug.kernels.SquaredExponential(lengthscale, 1.0)
        gp = gpaug.GaussianProcess("f", kernel, inducing, loadings=shared, bias=bias)
        with numpyro.plate("data", X.shape[0]):
            numpyro.sample("y", dist.Bernoulli(logits=gp(X)).to_event(1), obs=y)

    Z = gpaug.inducing.kmeans(X[:rows], 30)
    return Task(model, gpaug.AutoSparseGP(model), (X, y), {"inducing": Z})


TASKS = {
    f.__name__: f
    for f in (
        deep_kernel, deep_classes, network_mean, random_features, inducing_inputs,
        loadings,
    )
}  # fmt: skip
OPTIMISERS = {"default": "lbfgs", "adam": optax.adam(0.01)}


def fitted(task: Task, optim: Any, rows: int, steps: int, tol: Any) -> dict[str, Any]:
    """Return the end of a fit, and its cost."""
    arrays = [
        jnp.asarray(x, None if x.dtype.kind == "i" else jnp.result_type(float))
        for x in task.rows
    ]
    train, test = ([a[s] for a in arrays] for s in (slice(rows), slice(rows, None)))
    others = {k: jnp.asarray(v, jnp.result_type(float)) for k, v in task.others.items()}
    svi = gpaug.ConjugateSVI(task.model, task.guide, optim)

    def run() -> Any:
        return svi.run(
            jax.random.key(0), steps, *train, progress_bar=False, tol=tol, **others
        )

    with warnings.catch_warnings(record=True) as warned:
        warnings.simplefilter("always")
        run()
        began = time.process_time()
        result = run()
        seconds = time.process_time() - began
    posterior = svi.posterior(result)
    *inputs, y = test
    predicted = posterior.predict_y(*inputs)
    return {
        "bound": -float(result.losses[-1]),
        "nll": -float(posterior.log_prob(*inputs, y).mean()),
        "rmse": float(jnp.sqrt(jnp.mean((predicted.mean - y) ** 2))),
        "evaluations": len(result.losses),
        "cpu": seconds,
        "says": str(result).split("verdict")[1].split("\n")[0].strip(),
        "warned": sorted({str(w.message)[:90] for w in warned}),
        "losses": [float(x) for x in result.losses],
    }


def main() -> None:
    """Run the comparison."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--tasks", nargs="+", default=list(TASKS), choices=TASKS)
    parser.add_argument("--rows", type=int, default=600)
    parser.add_argument("--steps", type=int, default=500, help="at most")
    parser.add_argument("--starts", type=int, default=1, help="draws of them")
    parser.add_argument("--seed", type=int, default=0, help="of the data")
    parser.add_argument(
        "--optimisers", nargs="+", default=list(OPTIMISERS), choices=OPTIMISERS
    )
    parser.add_argument("--json")
    args = parser.parse_args()
    rows = []
    for name in args.tasks:
        for start in range(args.starts):
            rng = np.random.default_rng(args.seed)
            task = TASKS[name](rng, jax.random.key(100 + start), args.rows)
            for which in args.optimisers:
                found = fitted(task, OPTIMISERS[which], args.rows, args.steps, None)
                rows.append({"model": name, "start": start, "optimiser": which} | found)
                shown = {k: v for k, v in rows[-1].items() if k != "losses"}
                print(json.dumps(shown), file=sys.stderr, flush=True)
    columns = dict.fromkeys(("model", "start", "optimiser"), "")
    columns |= {"bound": ".1f", "nll": ".3f", "rmse": ".3f", "evaluations": ""}
    print_table(rows, columns | {"cpu": ".2f"})
    if args.json:
        info = {"machine": machine(), "versions": versions("jax", "numpyro", "optax")}
        info |= {"dtype": str(jnp.result_type(float)), "rows": rows}
        Path(args.json).write_text(json.dumps(info, indent=1))


if __name__ == "__main__":
    main()
