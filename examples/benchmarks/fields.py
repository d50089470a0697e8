# SPDX-License-Identifier: Apache-2.0
"""Fields with a sparse precision: maps of areas, fields on meshes, space and time.

``equality``: fields of 400 numbers beside the same model with dense matrices in
float64. ``bound`` and ``slope`` are differences of the bound of Poisson counts and of
its gradient in the hyperparameters, ``evidence`` and ``exact slope`` those of the
evidence of Normal data, which the bound is equal to, relative to the largest. Slopes of
the dense counts are differences of order eight: its updates end where bounds no longer
rise, and derivatives there have an error of 1e-7.
``mean`` and ``sd`` are the largest differences of means and deviations of predictions,
relative to the deviations, ``draws`` the largest of moments of 4000 draws, in Monte
Carlo errors; ``times`` is how often an evaluation of bound and gradient fits into one
of the dense model. ``areas``: Poisson counts with BYM2 on a planar graph, by
``NestedVI``; beside pyLGM on the same data and priors, with an interpreter that has it:
its seconds, the share of variance that is spatial (``mixing``, its own mean and ours),
the largest difference of means of areas in posterior deviations (``apart``), or why it
gave no result. ``lattice``: ICAR, and a proper autoregression, by ``ConjugateSVI``;
``log det`` is the relative error of log-determinants. ``mesh``: binomial counts and an
SPDE, hyperparameters learnt (``ConjugateSVI``) and integrated; ``matern`` is the
largest difference of covariances inside, relative to the variance. ``space-time``: an
autoregression in time of fields in space; ``evaluation`` is of the collapsed bound and
its gradient. ``coverage``: the share of true values in 90% intervals, fields and
hyperparameters, of maps and series simulated from the prior::

    python examples/benchmarks/fields.py --json fields.json --pylgm /path/to/python

Every case is a process of its own. Seconds are processor seconds: ``cold`` counts
everything after imports, ``warm`` is a second run of the same shapes. ``MiB`` is the
peak of the process. Rows of other cases that the JSON file has already are kept.
"""

from __future__ import annotations

import argparse
import json
import os
import subprocess
import tempfile
import time
from collections.abc import Callable, Iterator
from functools import partial
from pathlib import Path
from typing import Any

# One thread, since processor times are compared; set before jax starts.
os.environ.setdefault("XLA_FLAGS", "--xla_cpu_multi_thread_eigen=false")
os.environ.setdefault("OPENBLAS_NUM_THREADS", "1")

import jax
import jax.numpy as jnp
import numpy as np
import numpyro
import numpyro.distributions as dist
from common import (
    case_in_process,
    peak_memory,
    print_table,
    rows_of_cases,
    write_rows,
)
from numpyro.infer.util import log_density
from scipy import sparse, special
from scipy.spatial import Delaunay

import numpyro_gpaug as gpaug

HERE = Path(__file__).resolve()
KEY = jax.random.key(0)
COLUMNS = {
    "case": "", "rows": "d", "nodes": "d", "cold": ".1f", "warm": ".1f",
    "evaluation": ".2f", "MiB": ".0f", "khat": ".2f", "certified": "", "points": "d",
    "log det": ".0e", "matern": ".3f", "coverage": ".3f", "error": ".3f",
    "pyLGM": ".1f", "apart": ".2f", "mixing": ".3f", "mixing of pyLGM": ".3f",
    "refusal of pyLGM": "", "load": ".1f",
}  # fmt: skip
EQUAL = {
    "case": "", "dtype": "", "nodes": "d", "bound": ".0e", "slope": ".0e",
    "evidence": ".0e", "exact slope": ".0e", "mean": ".0e", "sd": ".0e",
    "draws": ".1f", "times": ".1f",
}  # fmt: skip


# The model of areas by pyLGM, in an interpreter that has it.
PEER = """
import json, math, sys, time
import numpy as np, pandas as pd
from pylgm import BYM2, Fixed, Hyperparameter, LGM, Poisson

class HalfNormalScale:  # of the scale, as a density of the precision
    def logpdf(self, precision):
        return -0.5 / precision - 1.5 * math.log(precision)

with np.load(sys.argv[1]) as file:
    pairs, y = file["pairs"], file["y"]
names = [f"{i:06d}" for i in range(len(y))]  # their order is alphabetical
graph = {name: [] for name in names}
for i, j in pairs:
    graph[names[i]].append(names[j])
scale = Hyperparameter("precision", 4.0, prior=HalfNormalScale())
mixing = Hyperparameter("mixing", 0.5, transform="logit")
areas = BYM2("areas", index="area", graph=graph, precision=scale, phi=mixing)
frame = pd.DataFrame({"area": names, "time": 0, "y": y})
model = LGM(
    response="y", likelihood=Poisson(), panel=("area",), time="time",
    predictor=Fixed("1", prior_precision=0.25) + areas,
)
start = time.process_time()
try:
    fit = model.fit(frame, engine="laplace", hyperparameters="integrate")
except Exception as error:
    cause = error.__cause__ or error
    print(json.dumps({"refusal": f"{type(cause).__name__}: {cause}"}))
else:
    known = {k: float(m.mean[0]) for k, m in fit.hyperparameter_marginals().items()}
    means = np.asarray(fit.latent_marginals("areas").mean)[: len(y)]
    seconds = time.process_time() - start
    print(json.dumps({"seconds": seconds, "means": means.tolist()} | known))
"""


def lattice(rows: int, columns: int) -> sparse.csr_array:
    """Neighbours on a lattice."""
    place = np.arange(rows * columns).reshape(rows, columns)
    ends = np.append(place[1:], place[:, 1:]), np.append(place[:-1], place[:, :-1])
    return graph(rows * columns, *ends)


def planar(size: int) -> sparse.csr_array:
    """Neighbours in the Delaunay triangulation of random points."""
    points = np.random.default_rng(0).uniform(size=(size, 2))
    corners = Delaunay(points).simplices
    i, j = np.concatenate(
        [corners[:, [0, 1]], corners[:, [1, 2]], corners[:, [2, 0]]]
    ).T
    pairs = np.unique(np.stack([np.minimum(i, j), np.maximum(i, j)], -1), axis=0)
    return graph(size, *pairs.T)


def graph(size: int, i: np.ndarray, j: np.ndarray) -> sparse.csr_array:
    ones = np.ones(2 * len(i))
    ends = np.append(i, j), np.append(j, i)
    return sparse.csr_array((ones, ends), shape=(size, size))


def laplacian(adjacency: sparse.csr_array) -> sparse.csr_array:
    degrees = sparse.diags_array(np.asarray(adjacency.sum(0)).ravel())
    return sparse.csr_array(degrees - adjacency)


def mesh_of(size: int) -> Any:
    """A mesh of about so many nodes around the unit square."""
    corners = np.array([[0, 0], [0, 1], [1, 0], [1, 1.0]])
    low, high = 0.002, 1.0
    for _ in range(12):
        edge = np.sqrt(low * high)
        outer = max(edge, 0.15)
        mesh = gpaug.spatial.Mesh.around(corners, max_edge=(edge, outer), offset=0.3)
        low, high = (edge, high) if mesh.size > size else (low, edge)
    return mesh


# -- models ----------------------------------------------------------------------------

# A function of two hyperparameters that returns the field at the data.
Effect = Callable[[Any, Any], Any]


def of_effect(effect: Effect, likelihood: Callable[[Any], Any]) -> Callable[..., None]:
    """A model of data with a covariate and a field."""

    def model(x: Any, y: Any = None) -> None:
        scale = numpyro.sample("scale", dist.HalfNormal(1))
        share = numpyro.sample("share", dist.Beta(1, 1))
        beta = numpyro.sample("beta", dist.Normal(0, 2).expand([2]).to_event(1))
        values = effect(scale, share)
        with numpyro.plate("data", len(x)):
            numpyro.sample("y", likelihood(beta[0] + beta[1] * x + values), obs=y)

    return model


def of_areas(field: Callable[[Any, Any], Any]) -> Callable[..., None]:
    """Poisson counts in areas."""

    def model(area: Any, y: Any = None) -> None:
        scale = numpyro.sample("scale", dist.HalfNormal(1))
        share = numpyro.sample("share", dist.Beta(1, 1))
        level = numpyro.sample("level", dist.Normal(0, 2))
        effect = numpyro.sample("effect", field(scale, share))
        with numpyro.plate("data", len(area)):
            numpyro.sample("y", dist.Poisson(jnp.exp(level + effect[area])), obs=y)

    return model


def of_one_scale(adjacency: sparse.csr_array) -> Callable[..., None]:
    """Poisson counts in areas, with an intrinsic field."""

    def model(area: Any, y: Any = None) -> None:
        scale = numpyro.sample("scale", dist.HalfNormal(1))
        level = numpyro.sample("level", dist.Normal(0, 2))
        effect = numpyro.sample("effect", gpaug.ICAR(adjacency, scale))
        with numpyro.plate("data", len(area)):
            numpyro.sample("y", dist.Poisson(jnp.exp(level + effect[area])), obs=y)

    return model


def places(X: Any, total: Any, y: Any = None, *, mesh: Any) -> None:
    """Binomial counts at places."""
    reach = numpyro.sample("range", dist.LogNormal(-1.0, 0.5))
    scale = numpyro.sample("scale", dist.HalfNormal(1))
    level = numpyro.sample("level", dist.Normal(0, 2))
    s = gpaug.SPDE("s", mesh, range=reach, scale=scale)
    with numpyro.plate("data", len(X)):
        numpyro.sample("y", dist.Binomial(total, logits=level + s(X)), obs=y)


def space_time(steps: int, adjacency: sparse.csr_array) -> Callable[..., None]:
    """Poisson counts in areas and steps."""

    def model(step: Any, area: Any, y: Any = None) -> None:
        phi = numpyro.sample("phi", dist.Uniform(0, 1))
        rho = numpyro.sample("rho", dist.Uniform(0, 1))
        scale = numpyro.sample("scale", dist.HalfNormal(1))
        level = numpyro.sample("level", dist.Normal(0, 2))
        field = gpaug.SpaceTime(adjacency, steps, scale, rho, phi)
        effect = numpyro.sample("effect", field)
        rate = jnp.exp(level + effect[step, area])
        with numpyro.plate("data", len(step)):
            numpyro.sample("y", dist.Poisson(rate), obs=y)

    return model


# -- equality --------------------------------------------------------------------------


def root(precision: Any) -> Any:
    """A matrix whose product with its transpose is the inverse."""
    lower, eye = jnp.linalg.cholesky(precision), jnp.eye(len(precision))
    return jax.scipy.linalg.solve_triangular(lower, eye, lower=True).T


def unit_laplacian(adjacency: sparse.csr_array) -> np.ndarray:
    """The precision of an ICAR with scale one: its constant is in its density."""
    whole = laplacian(adjacency).toarray()
    x = np.zeros(len(whole))
    x[:2] = 1, -1
    unit = gpaug.ICAR(adjacency)
    drop = float(unit.log_prob(np.zeros(len(x))) - unit.log_prob(x))
    return whole * (2 * drop / (x @ whole @ x))


def both_forms(name: str, size: int, rows: np.ndarray) -> tuple[Effect, Effect]:
    """The values of a field at data, with a sparse precision, and as a matrix times
    standard normal numbers.

    :param name: the field.
    :param size: the number of its nodes.
    :param rows: of uniform random numbers, (n, 2), that place the data.
    """
    if name == "spde":
        return both_meshes(mesh_of(size), rows)
    side = round(np.sqrt(size))
    size = side**2
    adjacency = lattice(side, side)
    area = (rows[:, 0] * size).astype(int)
    whole, eye = laplacian(adjacency), sparse.eye_array(size)
    degrees = np.diag(whole.diagonal())
    eigenvalues, vectors = np.linalg.eigh(unit_laplacian(adjacency))
    plane = vectors[:, 1:] / np.sqrt(eigenvalues[1:])
    of_neighbours, dense = degrees - whole.toarray(), whole.toarray()
    fields: dict[str, tuple[Effect, Effect]] = {
        "icar": (
            lambda scale, share: gpaug.ICAR(adjacency, scale),
            lambda scale, share: scale * plane,
        ),
        "bym2": (
            lambda scale, share: gpaug.BYM2(adjacency, scale, share),
            lambda scale, share: scale * jnp.hstack(
                [jnp.sqrt(1 - share) * eye.toarray(), jnp.sqrt(share) * plane]
            ),
        ),
        "car": (
            lambda scale, share: dist.CAR(
                0.0, share, scale**-2, adjacency, is_sparse=True
            ),
            lambda scale, share: scale * root(degrees - share * of_neighbours),
        ),
        "gmrf": (
            lambda scale, share: gpaug.GMRF(0.0, [(scale**-2, whole), (share, eye)]),
            lambda scale, share: root(scale**-2 * dense + share * eye.toarray()),
        ),
    }  # fmt: skip
    field, factor = fields[name]

    def sparsely(scale: Any, share: Any) -> Any:
        return numpyro.sample("effect", field(scale, share))[area]

    return sparsely, partial(densely, factor, lambda effect: effect[area])


def both_meshes(mesh: Any, rows: np.ndarray) -> tuple[Effect, Effect]:
    mass, stiffness = mesh.elements.mass, mesh.elements.stiffness.toarray()
    nodes, weights = map(np.asarray, mesh.project(rows))

    def factor(scale: Any, share: Any) -> Any:
        square = 8 / share**2
        inverse = jnp.linalg.inv(square * np.diag(mass) + stiffness)
        return scale * inverse * jnp.sqrt(4 * np.pi * mass * square)

    def sparsely(scale: Any, share: Any) -> Any:
        return gpaug.SPDE("effect", mesh, range=share, scale=scale)(rows)

    return sparsely, partial(densely, factor, lambda v: (v[nodes] * weights).sum(-1))


def densely(
    factor: Effect, at_rows: Callable[[Any], Any], scale: Any, share: Any
) -> Any:
    half = factor(scale, share)
    white = numpyro.sample("z", dist.Normal().expand([half.shape[1]]).to_event(1))
    return at_rows(half @ white)


def equality(case: str, size: int, *, dense: bool) -> dict[str, Any]:
    """Compute the results of one form of a model, in the process's dtype."""
    name = case.split()[1]
    rng = np.random.default_rng(0)
    rows = rng.uniform(size=(3 * size, 2))
    x = rng.normal(size=len(rows))
    wave = np.sin(6 * rows[:, 0]) + np.cos(5 * rows[:, 1])
    y, seen = (
        rng.poisson(np.exp(0.5 + 0.3 * x + 0.5 * wave)),
        wave + rng.normal(size=len(x)),
    )
    effect = both_forms(name, size, rows)[dense]
    at = {"scale": 0.7, "share": 0.6}
    found: dict[str, Any] = {}
    model = of_effect(effect, lambda eta: dist.Poisson(jnp.exp(eta)))
    collapsed = gpaug.collapse(model)

    @jax.jit
    def bound(scale: Any, share: Any) -> Any:
        known = {"scale": scale, "share": share}
        return log_density(collapsed, (x, y), {}, known)[0]

    both = jax.jit(jax.value_and_grad(bound, (0, 1)))
    numbers = [jnp.asarray(v) for v in at.values()]
    value, slope = jax.block_until_ready(both(*numbers))
    found["evaluation"] = min(
        seconds(lambda: jax.block_until_ready(both(*numbers))) for _ in range(3)
    )
    found["bound"], found["slope"] = float(value), np.array(slope, float).tolist()
    if dense:
        found["slope"] = by_differences(bound, list(at.values()))
    normal = gpaug.collapse(of_effect(effect, lambda eta: dist.Normal(eta, 0.8)))

    def evidence(scale: Any, share: Any) -> Any:
        known = {"scale": scale, "share": share}
        return log_density(normal, (x, seen), {}, known)[0]

    value, slope = jax.jit(jax.value_and_grad(evidence, (0, 1)))(*numbers)
    found["evidence"] = float(value)
    found["exact slope"] = np.array(slope, float).tolist()
    known = numpyro.handlers.condition(model, at)
    svi = gpaug.ConjugateSVI(known, gpaug.AutoLatentGaussian(known))
    fit = svi.run(KEY, 60, x, y, progress_bar=False, tol=0.0)
    posterior = svi.posterior(fit)
    predicted = posterior.predict_y(x)
    found["mean"] = np.array(predicted.mean, float).tolist()
    found["sd"] = np.sqrt(np.array(predicted.variance, float)).tolist()
    if dense:
        return found
    site = "effect.v" if name == "spde" else "effect"
    draws = svi.guide.sample_posterior(
        jax.random.key(1), fit.params, x, sample_shape=(DRAWS,)
    )[site]
    return found | {"nodes": draws.shape[-1], "draws": farthest(draws, posterior[site])}


def by_differences(function: Callable[..., Any], at: list[float]) -> list[float]:
    """The gradient of a function by central differences of order eight."""
    step, weights = 0.01, np.array([4 / 5, -1 / 5, 4 / 105, -1 / 280])

    def along(unit: np.ndarray) -> float:
        moves = step * np.outer(np.arange(1, 5), unit)
        rises = [float(function(*(at + m)) - function(*(at - m))) for m in moves]
        return float(weights @ rises / step)

    return [along(unit) for unit in np.eye(len(at))]


def farthest(draws: Any, exact: Any) -> float:
    """The largest difference of means and variances, in Monte Carlo errors."""
    draws = np.array(draws, float)
    mean, variance = (np.array(x, float) for x in (exact.mean, exact.variance))
    of_means = abs(draws.mean(0) - mean) / np.sqrt(variance / DRAWS)
    of_variances = abs(draws.var(0) / variance - 1) / np.sqrt(2 / DRAWS)
    return float(max(of_means.max(), of_variances.max()))


def compared(name: str, dtype: str, size: int) -> dict[str, Any]:
    """Both forms, each in a process of its own."""
    found = case_in_process(HERE, f"sparse {name}", size, dtype)
    exact = case_in_process(HERE, f"dense {name}", size, "float64")
    row = {"case": f"equality {name}", "dtype": dtype}
    failed = [x["failed"] for x in (found, exact) if "failed" in x]
    if failed:
        return row | {"failed": failed[0]}
    spread = np.array(exact["sd"])
    for key in ("bound", "slope", "evidence", "exact slope"):
        one, two = np.array(found[key]), np.array(exact[key])
        row[key] = float(abs(one - two).max() / abs(two).max())
    row["mean"] = float(abs((np.array(found["mean"]) - exact["mean"]) / spread).max())
    row["sd"] = float(abs(np.array(found["sd"]) / spread - 1).max())
    row |= {k: found[k] for k in ("nodes", "draws", "cold", "MiB")}
    return row | {"times": exact["evaluation"] / found["evaluation"]}


# -- fits ------------------------------------------------------------------------------


def seconds(function: Callable[[], Any]) -> float:
    start = time.process_time()
    function()
    return time.process_time() - start


def nested_twice(
    model: Callable[..., Any], points: int, *args: Any
) -> tuple[Any, dict[str, Any]]:
    """A run of ``NestedVI`` from nothing, and another."""
    nested = gpaug.NestedVI(model, num_points=points, progress_bar=False)

    def run() -> None:
        nested.run(KEY, *args)

    found: dict[str, Any] = {"cold": seconds(run), "MiB": peak_memory()}
    extra = nested.get_extra_fields()
    found |= {
        "khat": float(extra["khat"]), "certified": str(nested.certified),
        "points": points, "effective": float(extra["effective_size"]),
        "evidence": float(extra["log_evidence"]),
        "error": float(extra["log_evidence_error"]),
        "evaluations": int(extra["evaluations"]), "parts": extra["seconds"],
    }  # fmt: skip
    return nested, found | {"warm": seconds(run)}


def learnt_twice(model: Callable[..., Any], *args: Any) -> tuple[Any, dict[str, Any]]:
    """A fit of ``ConjugateSVI`` from nothing, and another."""
    svi = gpaug.ConjugateSVI(model, gpaug.AutoLatentGaussian(model))
    results: list[Any] = []

    def run() -> None:
        results[:] = [svi.run(KEY, 100, *args, progress_bar=False)]

    found: dict[str, Any] = {"cold": seconds(run), "MiB": peak_memory()}
    found |= {"warm": seconds(run), "steps": len(results[0].losses)}
    hyper = {
        k.removesuffix("_auto_loc"): np.asarray(x).tolist()
        for k, x in results[0].params.items() if k.endswith("_auto_loc")
    }  # fmt: skip
    found |= {"bound": -float(results[0].losses[-1]), "hyper": hyper}
    return svi.posterior(results[0]), found


def smooth(size: int, rng: np.random.Generator) -> np.ndarray:
    """A random function of places in the unit square, at random places, (n, 3)."""
    X = rng.uniform(size=(size, 2))
    angles, phases = rng.normal(size=(2, 40)) * 5, rng.uniform(0, 2 * np.pi, 40)
    waves = np.sin(X @ angles + phases) @ rng.normal(size=40) / np.sqrt(20)
    return np.concatenate([X, waves[:, None]], 1)


def fit_areas(case: str, size: int) -> dict[str, Any]:
    adjacency = planar(size)
    rng = np.random.default_rng(1)
    # The planar graph's own points.
    X = np.random.default_rng(0).uniform(size=(size, 2))
    wave = np.sin(6 * X[:, 0]) + np.cos(5 * X[:, 1])
    rate = np.exp(1 + 0.5 * wave + 0.3 * rng.normal(size=size))
    model = of_areas(lambda scale, share: gpaug.BYM2(adjacency, scale, share))
    y = rng.poisson(rate)
    nested, found = nested_twice(model, 512, np.arange(size), y)
    found |= beside_pylgm(nested, adjacency, y)
    return {"rows": size, "nodes": 2 * size} | found


def beside_pylgm(nested: Any, adjacency: Any, y: np.ndarray) -> dict[str, Any]:
    """The same model by pyLGM in its own process; nothing without an interpreter."""
    python = os.environ.get("GPAUG_PYLGM")
    if python is None:
        return {}
    with tempfile.TemporaryDirectory() as folder:
        path = Path(folder, "areas.npz")
        np.savez(path, pairs=np.stack(adjacency.nonzero(), -1), y=y)
        done = subprocess.run(
            [python, "-c", PEER, str(path)], capture_output=True, text=True, check=True
        )
    told = json.loads(done.stdout.strip().splitlines()[-1])
    if "refusal" in told:
        return {"refusal of pyLGM": told["refusal"]}
    own = nested.posterior().summary().filter(like="effect[", axis=0)
    apart = np.abs(own["mean"] - told["means"]) / own["sd"]
    return {
        "pyLGM": told["seconds"], "apart": float(apart.max()),
        "mixing": float(nested.get_samples()["share"].mean()),
        "mixing of pyLGM": told["mixing"],
    }  # fmt: skip


def fit_lattice(case: str, size: int) -> dict[str, Any]:
    side = round(np.sqrt(size))
    size = side**2
    adjacency = lattice(side, side)
    rng = np.random.default_rng(1)
    i, j = np.divmod(np.arange(size), side)
    rate = np.exp(1 + 0.5 * np.sin(6 * i / side) + 0.5 * np.cos(5 * j / side))
    if case.endswith("icar"):
        model = of_one_scale(adjacency)
    else:
        model = of_areas(
            lambda scale, share: dist.CAR(
                0.0, share, scale**-2, adjacency, is_sparse=True
            )
        )
    _, found = learnt_twice(model, np.arange(size), rng.poisson(rate))
    return {"rows": size, "nodes": size} | found


def log_determinants(case: str, size: int) -> dict[str, Any]:
    """Return errors of the log-determinants of a lattice's Laplacian, restricted to
    zero sums, and of it plus a multiple of the identity. Errors are relative to the
    sums of the logarithms of the known eigenvalues.
    """
    side = round(np.sqrt(size))
    size, adjacency = side**2, lattice(side, side)
    one = 2 - 2 * np.cos(np.pi * np.arange(side) / side)
    eigenvalues = np.add.outer(one, one).ravel()
    whole = laplacian(adjacency)
    start = time.process_time()
    terms = [(1.0, whole), (0.1, sparse.eye_array(size))]
    field = gpaug.GMRF(0.0, terms)
    shifted = 2 * float(field.log_prob(np.zeros(size))) + size * np.log(2 * np.pi)
    expected = np.log(eigenvalues + 0.1).sum()
    unit = gpaug.ICAR(adjacency)
    x = np.zeros(size)
    x[:2] = 1, -1
    own = 2 * float(unit.log_prob(np.zeros(size))) + (size - 1) * np.log(2 * np.pi)
    taken = time.process_time() - start
    # The log-determinant, from the density of one vector.
    drop = 2 * float(unit.log_prob(np.zeros(size)) - unit.log_prob(100 * x)) / 1e4
    constant = drop / float(x @ (whole @ x))
    intrinsic = np.log(constant * eigenvalues[1:]).sum()
    errors = shifted / expected - 1, own / intrinsic - 1
    return {
        "rows": size, "nodes": size, "cold": taken,
        "log det": float(max(map(abs, errors))), "errors": list(map(float, errors)),
    }  # fmt: skip


def binomial(size: int) -> tuple[np.ndarray, np.ndarray, np.ndarray]:
    rng = np.random.default_rng(0)
    found = smooth(size, rng)
    total = rng.integers(1, 6, size)
    y = rng.binomial(total, special.expit(found[:, 2]))
    return found[:, :2], total, y


def fit_mesh(case: str, size: int) -> dict[str, Any]:
    mesh = mesh_of(size)
    model, given = partial(places, mesh=mesh), binomial(2 * size)
    if case.endswith("integrated"):
        _, found = nested_twice(model, 512, *given)
    else:
        _, found = learnt_twice(model, *given)
        found["matern"] = from_matern(mesh, 0.3)
    return {"rows": 2 * size, "nodes": mesh.size} | found


def from_matern(mesh: Any, reach: float) -> float:
    """The largest difference of covariances between places inside, of a field of
    variance one."""
    X = np.random.default_rng(2).uniform(0.05, 0.95, size=(200, 2))
    matern = np.linalg.norm(X[:, None] - X[None], axis=-1) * np.sqrt(8) / reach
    near = np.maximum(matern, 1e-9)
    expected = np.where(matern > 0, near * special.kv(1, near), 1)
    nodes, weights = map(np.asarray, mesh.project(X))
    mass, stiffness = mesh.elements.mass, mesh.elements.stiffness
    square = 8 / reach**2
    operator = square * sparse.diags_array(mass) + stiffness
    to_rows = np.zeros((mesh.size, len(X)))
    np.add.at(to_rows, (nodes, np.arange(len(X))[:, None]), weights)
    half = sparse.linalg.spsolve(operator.tocsc(), to_rows)
    half *= np.sqrt(4 * np.pi * square * mass)[:, None]
    return float(abs(half.T @ half - expected).max())


def fit_space_time(case: str, size: int) -> dict[str, Any]:
    steps = 50 if size > 1000 else 8
    side = round(np.sqrt(size / steps))
    size = steps * side**2
    rng = np.random.default_rng(1)
    model = space_time(steps, lattice(side, side))
    step, area = np.divmod(np.arange(size), side**2)
    wave = np.sin(6 * area / side**2) + np.cos(5 * step / steps)
    y = rng.poisson(np.exp(1 + 0.5 * wave))
    collapsed = gpaug.collapse(model)

    @jax.jit
    def both(at: Any) -> Any:
        def bound(at: Any) -> Any:
            return log_density(collapsed, (step, area, y), {}, at)[0]

        return jax.value_and_grad(bound)(at)

    at = {"phi": jnp.array(0.7), "rho": jnp.array(0.9), "scale": jnp.array(0.5)}
    cold = seconds(lambda: jax.block_until_ready(both(at)))
    times = []
    for phi in (0.71, 0.72, 0.73):
        moved = at | {"phi": jnp.array(phi)}
        times.append(seconds(lambda at=moved: jax.block_until_ready(both(at))))
    found = {"cold": cold, "evaluation": min(times), "MiB": peak_memory()}
    return {"rows": size, "nodes": size} | found


def fit_coverage(case: str, size: int) -> dict[str, Any]:
    """Problems drawn from the prior."""
    kind, problems = case.split()[1], 100 if size >= 256 else 2
    inside: list[np.ndarray] = []
    start, certified = time.process_time(), 0
    if kind == "maps":
        side = round(np.sqrt(size))
        size, adjacency = side**2, lattice(side, side)
    else:
        ends = np.arange(size - 1)
        adjacency = graph(size, ends, ends + 1)
    model = of_areas(lambda scale, share: gpaug.BYM2(adjacency, scale, share))
    if kind == "series":
        model = of_series(size)
    nested = gpaug.NestedVI(model, num_points=256, progress_bar=False)
    prior = numpyro.infer.Predictive(model, num_samples=problems)
    truth = prior(jax.random.key(7), np.arange(size))
    for k in range(problems):
        nested.run(jax.random.key(k), np.arange(size), truth["y"][k])
        certified += nested.certified
        draws = nested.get_samples()
        names = [name for name in draws if name in truth and name != "y"]
        low, high = (
            np.concatenate([
                np.quantile(np.asarray(draws[n]), q, axis=0).ravel() for n in names
            ])
            for q in (0.05, 0.95)
        )  # fmt: skip
        true = np.concatenate([np.asarray(truth[n][k]).ravel() for n in names])
        inside.append((low <= true) & (true <= high))
    shares = np.array([x.mean() for x in inside])
    return {
        "rows": size, "nodes": size, "problems": problems,
        "cold": time.process_time() - start, "coverage": float(shares.mean()),
        "error": float(shares.std() / np.sqrt(problems)),
        "certified": f"{certified}/{problems}",
    }  # fmt: skip


def of_series(size: int) -> Callable[..., None]:
    """Counts along an autoregression, as a Gaussian Markov random field."""
    inner, ones = np.r_[0, np.ones(size - 2), 0], np.ones(size - 1)
    matrices = (
        sparse.eye_array(size),
        -sparse.diags_array([ones, ones], offsets=[-1, 1]),
        sparse.diags_array(inner),
    )

    def series(scale: Any, share: Any) -> Any:
        factors = np.array(1.0), share, share**2
        by = scale**-2 / (1 - share**2)
        terms = [(by * f, m) for f, m in zip(factors, matrices, strict=True)]
        return gpaug.GMRF(0.0, terms)

    return of_areas(series)


# -- processes -------------------------------------------------------------------------

# Draws of moments, and fields that are compared with dense matrices.
DRAWS = 4000
FIELDS = ("icar", "bym2", "car", "gmrf", "spde")
CASES: dict[str, tuple[Callable[[str, int], dict[str, Any]], int, str]] = {
    "areas small": (fit_areas, 500, "float32"),
    "areas": (fit_areas, 2000, "float32"),
    "areas large": (fit_areas, 7900, "float32"),
    "lattice log det": (log_determinants, 100_000, "float64"),
    "lattice log det, float32": (log_determinants, 100_000, "float32"),
    "lattice icar": (fit_lattice, 100_000, "float32"),
    "lattice car": (fit_lattice, 100_000, "float32"),
    "mesh learnt": (fit_mesh, 10_000, "float32"),
    "mesh integrated": (fit_mesh, 10_000, "float32"),
    "space-time": (fit_space_time, 20_000, "float32"),
    "coverage maps": (fit_coverage, 289, "float32"),
    "coverage series": (fit_coverage, 300, "float32"),
}
QUICK = 300


def inside(case: str, size: int) -> dict[str, Any]:
    """A case in this process."""
    kind = case.split()[0]
    if kind in ("sparse", "dense"):
        found = equality(case, size, dense=kind == "dense")
    else:
        found = CASES[case][0](case, size)
    return {"MiB": peak_memory(), "cold": time.process_time()} | found


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--cases", nargs="+", default=["equality", *CASES])
    parser.add_argument("--quick", action="store_true", help="tiny sizes")
    parser.add_argument("--json", type=Path)
    parser.add_argument("--pylgm", help="an interpreter that has pyLGM")
    parser.add_argument("--child", help=argparse.SUPPRESS)
    parser.add_argument("--size", type=int, help=argparse.SUPPRESS)
    args = parser.parse_args()
    if args.child:
        print(json.dumps(inside(args.child, args.size)))
        return
    if args.pylgm:
        os.environ["GPAUG_PYLGM"] = args.pylgm
    known = rows_of_cases(args.json)
    for case in args.cases:
        for row in rows_of(case, quick=args.quick):
            print_table([row], EQUAL if case == "equality" else COLUMNS)
            known[row["case"], row["dtype"]] = row
            write_rows(args.json, known, "scipy")


def rows_of(case: str, *, quick: bool) -> Iterator[dict[str, Any]]:
    if case != "equality":
        _, size, dtype = CASES[case]
        yield case_in_process(HERE, case, QUICK if quick else size, dtype)
        return
    for name in FIELDS[:1] if quick else FIELDS:
        for dtype in ("float64",) if quick else ("float64", "float32"):
            yield compared(name, dtype, QUICK if quick else 400)


if __name__ == "__main__":
    main()
