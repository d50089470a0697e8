# SPDX-License-Identifier: Apache-2.0
"""Models with random effects of data sets in R's packages, for ``nested.py``; and two
of simulated data. Needs ``Rscript`` with lme4, glmmTMB, MASS, nlme and survival."""

from __future__ import annotations

import csv
import io
import shutil
import subprocess
from collections.abc import Callable
from functools import partial
from typing import Any

import jax.numpy as jnp
import numpy as np
import numpyro
import numpyro.distributions as dist

import numpyro_gpaug as gpaug

Data = dict[str, np.ndarray]


def effects(name: str, groups: Any, num: int, sd: Any) -> Any:
    """An effect of each of ``num`` groups, at the rows.

    :param groups: the group of each row, from zero.
    """
    with numpyro.plate(f"{name}_groups", num):
        return numpyro.sample(name, dist.Normal(0.0, sd))[groups]


def scales(num: int) -> Any:
    return numpyro.sample("sd", dist.HalfNormal(1.0).expand([num]).to_event(1))


def coefficients(num: int) -> Any:
    return numpyro.sample("b", dist.Normal(0.0, 5.0).expand([num]).to_event(1))


def predictor(X: Any, groups: dict[str, Any], sizes: dict[str, int]) -> Any:
    """A linear function of the columns, and an effect of each grouping.

    :param groups: the group of each row, by grouping.
    :param sizes: the numbers of groups.
    """
    sd = scales(len(groups))
    parts = [
        effects(k, groups[k], sizes[k], sd[i]) for i, k in enumerate(sorted(groups))
    ]
    return X @ coefficients(X.shape[1]) + sum(parts)


def normal(y: Any, X: Any, *, sizes: Any, **groups: Any) -> None:
    """Normal data, standardised."""
    noise = numpyro.sample("noise", dist.HalfNormal(1.0))
    mean = predictor(X, groups, sizes)
    with numpyro.plate("data", len(y)):
        numpyro.sample("y", dist.Normal(mean, noise), obs=y)


def slopes(y: Any, X: Any, x: Any, subject: Any, *, sizes: Any) -> None:
    """Normal data with a slope of ``x`` in each group."""
    noise = numpyro.sample("noise", dist.HalfNormal(1.0))
    each = numpyro.sample("slope_sd", dist.HalfNormal(1.0))
    mean = predictor(X, {"subject": subject}, sizes)
    mean = mean + x * effects("slope", subject, sizes["subject"], each)
    with numpyro.plate("data", len(y)):
        numpyro.sample("y", dist.Normal(mean, noise), obs=y)


def binary(y: Any, X: Any, *, sizes: Any, **groups: Any) -> None:
    logits = predictor(X, groups, sizes)
    with numpyro.plate("data", len(y)):
        numpyro.sample("y", dist.Bernoulli(logits=logits), obs=y)


def poisson(y: Any, X: Any, *, sizes: Any, **groups: Any) -> None:
    rate = jnp.exp(predictor(X, groups, sizes))
    with numpyro.plate("data", len(y)):
        numpyro.sample("y", dist.Poisson(rate), obs=y)


def counts(y: Any, X: Any, *, sizes: Any, **groups: Any) -> None:
    concentration = numpyro.sample("concentration", dist.LogNormal(0.0, 1.0))
    mean = jnp.exp(predictor(X, groups, sizes))
    with numpyro.plate("data", len(y)):
        numpyro.sample("y", dist.NegativeBinomial2(mean, concentration), obs=y)


def zeros(y: Any, X: Any, *, sizes: Any, **groups: Any) -> None:
    """Negative binomial counts with more zeros."""
    concentration = numpyro.sample("concentration", dist.LogNormal(0.0, 1.0))
    gate = numpyro.sample("gate", dist.Beta(1.0, 1.0))
    counted = dist.NegativeBinomial2(
        jnp.exp(predictor(X, groups, sizes)), concentration
    )
    with numpyro.plate("data", len(y)):
        inflated = dist.ZeroInflatedDistribution(counted, gate=gate)
        numpyro.sample("y", inflated, obs=y)


def durations(y: Any, censored: Any, X: Any, patient: Any, *, sizes: Any) -> None:
    """Weibull durations with a frailty."""
    shape = numpyro.sample("shape", dist.LogNormal(0.0, 0.5))
    scale = jnp.exp(predictor(X, {"patient": patient}, sizes))
    with numpyro.plate("data", len(y)):
        time = dist.Weibull(scale, shape)
        numpyro.sample("y", dist.RightCensoredDistribution(time, censored), obs=y)


def ordinal(y: Any, X: Any, patient: Any, *, sizes: Any) -> None:
    """Four ordered answers."""
    first = numpyro.sample("first", dist.Normal(-2.0, 2.0))
    gaps = numpyro.sample("gaps", dist.LogNormal(0.0, 1.0).expand([2]).to_event(1))
    cuts = first + jnp.concatenate([jnp.zeros(1), jnp.cumsum(gaps)])
    eta = predictor(X, {"patient": patient}, sizes)
    with numpyro.plate("data", len(y)):
        numpyro.sample("y", dist.OrderedLogistic(eta, cuts), obs=y)


def sparse_process(y: Any, total: Any, x: Any, Z: Any) -> None:
    """Binomial counts of a process with 150 inducing inputs."""
    lengthscale = numpyro.sample("lengthscale", dist.LogNormal(-1.0, 1.0))
    variance = numpyro.sample("variance", dist.LogNormal(0.0, 1.0))
    kernel = gpaug.kernels.Matern52(lengthscale, variance)
    f = gpaug.GaussianProcess("f", kernel, Z)(x)
    with numpyro.plate("data", len(y)):
        numpyro.sample("y", dist.Binomial(total, logits=f), obs=y)


def table(package: str, name: str) -> dict[str, np.ndarray]:
    """A data frame of a package of R, by column; factors as text."""
    if shutil.which("Rscript") is None:
        raise SystemExit(
            f"{name} is a data set of {package}: install R and this package"
        )
    code = f"data({name}, package='{package}'); write.csv({name}, row.names=FALSE)"
    done = subprocess.run(
        ["Rscript", "-e", f"suppressMessages(library({package})); {code}"],
        capture_output=True, text=True, check=True,
    )  # fmt: skip
    rows = list(csv.DictReader(io.StringIO(done.stdout)))
    return {k: np.array([row[k] for row in rows]) for k in rows[0]}


def codes(column: np.ndarray) -> np.ndarray:
    return np.unique(column, return_inverse=True)[1]


def standard(column: np.ndarray) -> np.ndarray:
    x = column.astype(float)
    return (x - x.mean()) / x.std()


def columns(*own: np.ndarray) -> np.ndarray:
    """A constant, indicators of all but the first value of texts, and numbers."""
    all_ = [np.ones(len(own[0]))]
    for x in own:
        if x.dtype.kind == "U":
            all_ += [x == value for value in np.unique(x)[1:]]
        else:
            all_.append(x)
    return np.stack(all_, 1).astype(float)


def grouseticks() -> Data:
    t = table("lme4", "grouseticks")
    groups = {k.lower(): codes(t[k]) for k in ("INDEX", "BROOD", "LOCATION")}
    X = columns(t["YEAR"], standard(t["HEIGHT"]))
    return {"y": t["TICKS"].astype(int), "X": X, **groups}


def salamanders() -> Data:
    t = table("glmmTMB", "Salamanders")
    X = columns(t["spp"], t["mined"])
    return {"y": t["count"].astype(int), "X": X, "site": codes(t["site"])}


def owls() -> Data:
    t = table("glmmTMB", "Owls")
    arrival = standard(t["ArrivalTime"])
    X = columns(t["FoodTreatment"], t["SexParent"], arrival)
    return {"y": t["SiblingNegotiation"].astype(int), "X": X, "nest": codes(t["Nest"])}


def bacteria() -> Data:
    t = table("MASS", "bacteria")
    X = columns(t["trt"], standard(t["week"]))
    return {"y": (t["y"] == "y").astype(int), "X": X, "patient": codes(t["ID"])}


def kidney() -> Data:
    t = table("survival", "kidney")
    y, X = t["time"].astype(float) / 100, columns(standard(t["age"]), t["sex"])
    censored = (t["status"] == "0").astype(int)
    return {"y": y, "censored": censored, "X": X, "patient": codes(t["id"])}


def orthodont() -> Data:
    t = table("nlme", "Orthodont")
    age, y = standard(t["age"]), standard(t["distance"])
    X = columns(age, t["Sex"])
    return {"y": y, "X": X, "x": age, "subject": codes(t["Subject"])}


def machines() -> Data:
    t = table("nlme", "Machines")
    pair = np.char.add(t["Worker"], t["Machine"])
    groups = {"worker": codes(t["Worker"]), "pair": codes(pair)}
    return {"y": standard(t["score"]), "X": columns(t["Machine"]), **groups}


def intercepts(name: str, response: str, *groupings: str) -> Data:
    """A data set of lme4 without covariates."""
    t = table("lme4", name)
    y = standard(t[response])
    return {"y": y, "X": columns(y)[:, :1], **{k: codes(t[k]) for k in groupings}}


def arabidopsis() -> Data:
    t = table("lme4", "Arabidopsis")
    X = columns(np.char.add("n", t["nutrient"]), t["amd"], t["status"])
    groups = {k: codes(t[k]) for k in ("gen", "popu")}
    return {"y": t["total.fruits"].astype(int), "X": X, **groups}


def answers() -> Data:
    """The shape of a study of schizophrenia: 437 patients at up to four times."""
    rng = np.random.default_rng(0)
    patient = np.arange(1600) % 437
    treated, week = (patient % 4 > 0) * 1.0, np.sqrt(np.arange(1600) // 437 * 2.0)
    eta = -0.4 * week - 0.8 * treated * week + 1.9 * rng.normal(size=437)[patient]
    noisy = eta + rng.logistic(size=1600)
    y = np.searchsorted([-5.0, -2.5, -1.0], noisy)
    return {"y": y, "X": np.stack([week, treated * week], 1), "patient": patient}


def inducing() -> Data:
    rng = np.random.default_rng(0)
    x = rng.uniform(size=(800, 2))
    f = np.sin(7 * x[:, 0]) + np.cos(9 * x[:, 1]) * x[:, 0]
    y = rng.binomial(10, 1 / (1 + np.exp(-f)))
    Z = np.asarray(gpaug.inducing.kmeans(x, 150))
    return {"y": y, "total": np.full(800, 10), "x": x, "Z": Z}


# A model, and what makes its arguments.
MADE: dict[str, tuple[Callable[..., None], Callable[[], Data]]] = {
    "grouseticks": (poisson, grouseticks),
    "salamanders": (zeros, salamanders),
    "owls": (zeros, owls),
    "bacteria": (binary, bacteria),
    "kidney": (durations, kidney),
    "orthodont": (slopes, orthodont),
    "machines": (normal, machines),
    "pastes": (normal, partial(intercepts, "Pastes", "strength", "batch", "sample")),
    "penicillin": (
        normal,
        partial(intercepts, "Penicillin", "diameter", "plate", "sample"),
    ),
    "arabidopsis": (counts, arabidopsis),
    "answers": (ordinal, answers),
    "inducing": (sparse_process, inducing),
}


def problem(name: str) -> tuple[Callable[..., None], Data]:
    """A model, which knows its numbers of groups, and its arguments."""
    model, arguments = MADE[name]
    data = arguments()
    groups = data.keys() - {"y", "X", "x", "Z", "total", "censored"}
    if not groups:
        return model, data
    return partial(model, sizes={k: int(data[k].max()) + 1 for k in groups}), data
