# SPDX-License-Identifier: Apache-2.0
"""What users wait for: first and later calls, data with a row more, and serving.

Small models of the literature (``herds``: lme4's cbpp, binomial; ``days``: sleepstudy,
Normal; simulated data of the same shape without ``GPAUG_DATA``) and a classifier of 200
rows (``classes``), each beside a rival: NUTS of NumPyro (``--draws`` after as many of
warm-up), scikit-learn, and lme4 and glmmTMB if ``Rscript`` has them. Crossed effects:
``answers`` (lme4's VerbAgg, binary) and ``ratings`` (its InstEval, 73,421 rows, beside
lme4 alone). ``series``: 5000 days with a level, two seasons, a holiday and Student-t
noise. ``nested`` integrates the hyperparameters; ``draws`` is the effective number of
draws of the worst hyperparameter, of NUTS and of ``nested``::

    python examples/benchmarks/felt.py --json felt.json

Seconds are processor seconds of one thread. A call fits the model and predicts ten
rows, except with NUTS and R, which only fit. ``imports``; ``first``: the first call of
a process; ``second``: the same again; ``tenth``: the tenth call after that, each with a
row more than the last; ``served``: the first prediction of many rows, and ``other`` of
another number of these; ``cached``: the first call of a process that finds all
programs in JAX's persistent cache.
"""

from __future__ import annotations

import argparse
import csv
import json
import os
import shutil
import subprocess
import tempfile
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any, cast

# One thread, since processor times are compared; set before jax starts.
# Idle threads of XLA spin while they wait: NPROC is how many it starts.
os.environ.setdefault("NPROC", "1")
os.environ.setdefault("XLA_FLAGS", "--xla_cpu_multi_thread_eigen=false")
os.environ.setdefault("OPENBLAS_NUM_THREADS", "1")

import jax
import numpy as np
import numpyro
import numpyro.distributions as dist
from common import case_in_process, data_folder, print_table, write_report
from numpyro.diagnostics import effective_sample_size

import numpyro_gpaug as gpaug

IMPORTS = time.process_time()
HERE = Path(__file__).resolve()
KEY = jax.random.key(0)
COLUMNS = {
    "case": "", "imports": ".2f", "first": ".2f", "second": ".3f", "tenth": ".3f",
    "served": ".2f", "other": ".3f", "cached": ".2f", "draws": ".0f", "load": ".1f",
}  # fmt: skip
# Arrays by name, the observations last.
Data = dict[str, np.ndarray]


# -- models and their data -------------------------------------------------------------


def herds(herd, period, total, y=None):
    beta = numpyro.sample("beta", dist.Normal(0, 5).expand([4]).to_event(1))
    tau = numpyro.sample("tau", dist.HalfNormal(1.0))
    with numpyro.plate("herds", 15):
        a = numpyro.sample("a", dist.Normal(0, tau))
    with numpyro.plate("data", len(herd)):
        logits = beta[period] + a[herd]
        numpyro.sample("y", dist.Binomial(total, logits=logits), obs=y)


def days(subject, days, y=None):
    level = numpyro.sample("level", dist.Normal(250.0, 100.0))
    slope = numpyro.sample("slope", dist.Normal(0.0, 100.0))
    sd = numpyro.sample("sd", dist.HalfNormal(30).expand([3]).to_event(1))
    with numpyro.plate("subjects", 18):
        a = numpyro.sample("a", dist.Normal(0, sd[0]))
        c = numpyro.sample("c", dist.Normal(0, sd[1]))
    mean = level + a[subject] + (slope + c[subject]) * days
    with numpyro.plate("data", len(days)):
        numpyro.sample("y", dist.Normal(mean, sd[2]), obs=y)


def classes(X, y=None, *, inducing=None):
    lengthscale = numpyro.sample("lengthscale", dist.LogNormal(0.0, 1.0))
    variance = numpyro.sample("variance", dist.LogNormal(0.0, 1.0))
    kernel = gpaug.kernels.SquaredExponential(lengthscale, variance)
    f = gpaug.GaussianProcess("f", kernel, X if inducing is None else inducing)(X)
    with numpyro.plate("data", len(X)):
        numpyro.sample("y", dist.Bernoulli(logits=f), obs=y)


def answers(person, item, anger, male, y=None):
    b = numpyro.sample("b", dist.Normal(0, 5).expand([3]).to_event(1))
    sd = numpyro.sample("sd", dist.HalfNormal(1.0).expand([2]).to_event(1))
    with numpyro.plate("persons", 316):
        a = numpyro.sample("a", dist.Normal(0, sd[0]))
    with numpyro.plate("items", 24):
        c = numpyro.sample("c", dist.Normal(0, sd[1]))
    with numpyro.plate("data", len(person)):
        logits = b[0] + b[1] * (anger - 20) / 5 + b[2] * male + a[person] + c[item]
        numpyro.sample("y", dist.Bernoulli(logits=logits), obs=y)


def ratings(s, d, dept, service, y=None):
    sd = numpyro.sample("sd", dist.HalfNormal(1).expand([4]).to_event(1))
    b = numpyro.sample("b", dist.Normal(0, 10).expand([2]).to_event(1))
    with numpyro.plate("students", 2972):
        u = numpyro.sample("u", dist.Normal(0, sd[0]))
    with numpyro.plate("lecturers", 1128):
        v = numpyro.sample("v", dist.Normal(0, sd[1]))
    with numpyro.plate("departments", 14):
        w = numpyro.sample("w", dist.Normal(0, sd[2]))
    with numpyro.plate("data", len(s)):
        mean = b[0] + b[1] * service + u[s] + v[d] + w[dept]
        numpyro.sample("y", dist.Normal(mean, sd[3]), obs=y)


def series(year, week, holiday, y=None):
    scale = numpyro.sample("scale", dist.HalfNormal(0.1))
    sd = numpyro.sample("sd", dist.HalfNormal(1.0))
    noise = numpyro.sample("noise", dist.HalfNormal(1.0))
    b = numpyro.sample("b", dist.Normal(0, 2).expand([10]).to_event(1))
    days = numpyro.sample("days", dist.Normal(0, 1).expand([7]).to_event(1))
    level = numpyro.sample("level", dist.GaussianRandomWalk(scale, len(week)))
    with numpyro.plate("data", len(week)):
        mean = year @ b[:9] + b[9] * holiday + sd * days[week] + level
        numpyro.sample("y", dist.StudentT(4.0, mean, noise), obs=y)


def data_of(case: str) -> Data:
    """The data of a case, simulated if the folder of data does not have them."""
    rng, folder = np.random.default_rng(0), data_folder()
    name = FILES.get(case, "")
    if name and folder is not None and (folder / name).exists():
        with np.load(folder / name) as file:
            found = {k: np.asarray(file[k], _dtype(file[k])) for k in ORDER[case]}
    elif case == "herds":
        found = {"herd": np.arange(56) // 4, "period": np.arange(56) % 4}
        found["total"] = rng.integers(5, 25, 56)
        logits = np.array([-1.4, -2.4, -2.5, -3.0])[found["period"]]
        logits += 0.65 * rng.normal(size=15)[found["herd"]]
        found["y"] = rng.binomial(found["total"], 1 / (1 + np.exp(-logits)))
    elif case == "days":
        found = {"subject": np.arange(180) // 10, "days": np.arange(180) % 10}
        a, c = (s * rng.normal(size=18)[found["subject"]] for s in (25, 6))
        noise = 25 * rng.normal(size=180)
        found["y"] = np.float32(251 + a + (10.5 + c) * found["days"] + noise)
    elif case == "answers":
        person, item = np.divmod(np.arange(7584), 24)
        anger, male = rng.normal(20, 5, 316)[person], (rng.random(316) < 0.23)[person]
        found = {"person": person, "item": item, "anger": np.float32(anger)}
        logits = 1.3 * rng.normal(size=316)[person] + rng.normal(size=24)[item]
        found |= {"male": male * 1, "y": (rng.logistic(size=7584) < logits) * 1}
    elif case == "ratings":
        found = {k: rng.integers(0, n, 73421) for k, n in SIZES.items()}
        effects = [
            s * rng.normal(size=n)[found[k]]
            for s, (k, n) in zip((0.3, 0.5, 0.1, 0.1), SIZES.items(), strict=True)
        ]
        found["y"] = np.float32(3.2 + sum(effects) + 1.2 * rng.normal(size=73421))
    elif case == "series":
        t = np.arange(5000)
        angle = 2 * np.pi * np.outer(t, np.arange(1, 5)) / 365.25
        year = np.concatenate([np.ones((5000, 1)), np.cos(angle), np.sin(angle)], 1)
        found = {"year": np.float32(year), "week": t % 7}
        found["holiday"] = np.float32(t % 365 == 358)
        level = np.cumsum(0.02 * rng.normal(size=5000)) + 2 * found["holiday"]
        mean = level + year @ (0.3 * rng.normal(size=9)) + (t % 7 > 4)
        found["y"] = np.float32(mean + 0.3 * rng.standard_t(4, 5000))
    else:
        X = np.float32(rng.normal(size=(200, 2)))
        found = {"X": X, "y": (X[:, 0] * X[:, 1] > 0).astype(np.int32)}
    return {k: found[k] for k in ORDER[case]}


SIZES = {"s": 2972, "d": 1128, "dept": 14, "service": 2}
FILES = {
    "herds": "lgm_cbpp.npz", "days": "lgm_sleepstudy.npz",
    "answers": "lgm_verbagg.npz", "ratings": "lgm_insteval.npz",
}  # fmt: skip
ORDER = {
    "herds": ("herd", "period", "total", "y"), "days": ("subject", "days", "y"),
    "answers": ("person", "item", "anger", "male", "y"), "ratings": (*SIZES, "y"),
    "series": ("year", "week", "holiday", "y"), "classes": ("X", "y"),
}  # fmt: skip


def _dtype(x: np.ndarray) -> Any:
    return np.int32 if np.issubdtype(x.dtype, np.integer) else np.float32


def rows(data: Data, num: int) -> Data:
    """The first rows, and then again."""
    taken = np.arange(num) % len(data["y"])
    return {k: x[taken] for k, x in data.items()}


# -- methods: a fit of data returns a prediction of rows -------------------------------

Fit = Callable[[Data], Any]


def by_package(case: str) -> Fit:
    model = MODELS[case]
    guide = gpaug.AutoSparseGP if case == "classes" else gpaug.AutoLatentGaussian
    svi = gpaug.ConjugateSVI(model, guide(model))
    # The same in every fit.
    more = {"inducing": data_of(case)["X"][:20]} if case == "classes" else {}

    def fit(data: Data) -> Callable[[Data], Any]:
        result = svi.run(KEY, 100, *data.values(), progress_bar=False, **more)
        posterior = svi.posterior(result)
        return lambda new: np.asarray(
            posterior.predict_y(*list(new.values())[:-1]).mean
        )

    return fit


def by_nuts(case: str, draws: int) -> Fit:
    kernel = numpyro.infer.NUTS(MODELS[case])
    mcmc = numpyro.infer.MCMC(
        kernel, num_warmup=draws, num_samples=draws, progress_bar=False
    )

    def fit(data: Data) -> float:
        mcmc.run(KEY, *data.values())
        found = mcmc.get_samples(group_by_chain=True)
        numbers = [
            effective_sample_size(np.asarray(found[k])).min() for k in HYPER[case]
        ]
        return float(min(numbers))

    return fit


def by_nested(case: str) -> Fit:
    nested = gpaug.NestedVI(MODELS[case], progress_bar=False)

    def fit(data: Data) -> float:
        nested.run(KEY, *data.values())
        rows = nested.summary().n_eff
        mine = rows.index.str.split("[", regex=False).str[0].isin(HYPER[case])
        return float(rows[mine].min())

    return fit


HYPER = {
    "herds": ["tau"], "days": ["sd"], "answers": ["sd"],
    "series": ["scale", "sd", "noise"],
}  # fmt: skip


def by_sklearn(case: str) -> Fit:
    from sklearn.gaussian_process import GaussianProcessClassifier
    from sklearn.gaussian_process.kernels import RBF, ConstantKernel

    def fit(data: Data) -> Callable[[Data], Any]:
        kernel = ConstantKernel(1.0) * RBF(1.0)
        fitted = GaussianProcessClassifier(kernel).fit(data["X"], data["y"])
        return lambda new: fitted.predict_proba(new["X"])

    return fit


MODELS: dict[str, Any] = {
    "herds": herds, "days": days, "classes": classes, "answers": answers,
    "ratings": ratings, "series": series,
}  # fmt: skip
# Without more rows, and without predictions.
LARGE = "answers", "ratings", "series"


def measure(case: str, method: str, draws: int, many: int) -> dict[str, float]:
    """The seconds of one method, in this process."""
    data = data_of(case)
    num = len(data["y"])
    make = {
        "here": by_package, "nuts": lambda case: by_nuts(case, draws),
        "sklearn": by_sklearn, "nested": by_nested,
    }[method]  # fmt: skip
    fit: Fit = make(case)
    predict: Any = None

    def call(rows_: int) -> float:
        nonlocal predict
        start = time.process_time()
        predict = fit(rows(data, rows_))
        if callable(predict):
            predict(rows(data, 10))
        return time.process_time() - start

    found = {"imports": IMPORTS, "first": call(num), "second": call(num)}
    if method in ("nuts", "nested"):
        return found | {"draws": cast(float, predict)}
    if case in LARGE:
        return found
    found["tenth"] = [call(num + i) for i in range(1, 11)][-1]
    for key, count in {"served": many, "other": many + many // 7}.items():
        new, start = rows(data, count), time.process_time()
        predict(new)
        found[key] = time.process_time() - start
    return found


# -- R ---------------------------------------------------------------------------------

FORMULAS = {
    "herds": {
        "lme4": "glmer(cbind(y, total - y) ~ factor(period) + (1 | herd), d, binomial)",
        "glmmTMB": "glmmTMB(cbind(y, total - y) ~ factor(period) + (1 | herd), d, "
        "binomial)",
    },
    "days": {
        "lme4": "lmer(y ~ days + (days || subject), d)",
        "glmmTMB": "glmmTMB(y ~ days + diag(days | subject), d)",
    },
    "answers": {
        "lme4": "glmer(y ~ anger + male + (1 | person) + (1 | item), d, binomial)",
        "glmmTMB": "glmmTMB(y ~ anger + male + (1 | person) + (1 | item), d, binomial)",
    },
    "ratings": {"lme4": "lmer(y ~ service + (1 | s) + (1 | d) + (1 | dept), d)"},
}


def by_r(case: str, package: str) -> dict[str, Any]:
    """The seconds of a package of R, in a process of its own."""
    with tempfile.TemporaryDirectory() as folder:
        data, path = data_of(case), Path(folder) / "data.csv"
        with path.open("w", newline="") as file:
            writer = csv.writer(file)
            writer.writerow(data)
            writer.writerows(zip(*(x.tolist() for x in data.values()), strict=True))
        spent = "sum(proc.time()[1:2])"
        fit = f"fit <- {FORMULAS[case][package]}"
        call = f"a <- {spent}; {fit}; cat({spent} - a, '\\n')"
        code = f"library({package}); d <- read.csv('{path}'); cat({spent}, '\\n');"
        done = subprocess.run(
            ["Rscript", "-e", f"{code} {call}; {call}"],
            capture_output=True, text=True, check=False,
        )  # fmt: skip
    if done.returncode:
        return {"method": package, "dtype": "", "failed": done.stderr.split("\n")[0]}
    seconds = map(float, done.stdout.split())
    return dict(zip(("imports", "first", "second"), seconds, strict=True))


RIVALS = "nested", "nuts"

# -- the benchmark ---------------------------------------------------------------------


def row(case: str, method: str, args: argparse.Namespace) -> dict[str, Any]:
    """A row of the table."""
    label = f"{case} {method}"
    if method in ("lme4", "glmmTMB"):
        return {"case": label} | by_r(case, method)
    os.environ["FELT"] = json.dumps([args.draws, args.many])
    found = case_in_process(HERE, label, 0, "float32")
    if method != "here" or "failed" in found:
        return found
    with tempfile.TemporaryDirectory() as folder:
        kept = {
            "JAX_COMPILATION_CACHE_DIR": folder,
            "JAX_PERSISTENT_CACHE_MIN_COMPILE_TIME_SECS": "0",
        }
        os.environ.update(kept)
        runs = [case_in_process(HERE, label, 0, "float32") for _ in range(2)]
        for name in kept:
            del os.environ[name]
    return found | {"cached": runs[1].get("first")}


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--cases", nargs="+", default=[*MODELS], choices=MODELS)
    parser.add_argument("--methods", nargs="+")
    parser.add_argument("--draws", type=int, default=1000, help="of NUTS")
    parser.add_argument("--many", type=int, default=10_000, help="rows that are served")
    parser.add_argument("--json", type=Path)
    parser.add_argument("--child", help=argparse.SUPPRESS)
    parser.add_argument("--size", help=argparse.SUPPRESS)
    args = parser.parse_args()
    if args.child:
        print(json.dumps(measure(*args.child.split(), *json.loads(os.environ["FELT"]))))
        return
    found = []
    for case in args.cases:
        rivals = ["sklearn"] if case == "classes" else [*RIVALS] * (case in HYPER)
        if shutil.which("Rscript"):
            rivals += FORMULAS.get(case, {})
        chosen = [x for x in ("here", *rivals) if x in (args.methods or [x])]
        found += [row(case, method, args) for method in chosen]
    print_table(found, COLUMNS)
    write_report(args.json, found)


if __name__ == "__main__":
    main()
