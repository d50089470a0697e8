# SPDX-License-Identifier: Apache-2.0
"""Mixed models of ``latent.py`` with everything learnt, beside statsmodels and GPBoost.

``fixed`` is the largest difference of fixed effects from NUTS (everything integrated,
the model of ``latent.py``) in its standard deviations; ``sd`` are standard deviations
of random effects (and of the noise), for NUTS their means. The packages answer
different questions: here hyperparameters are at the mode of the bound times their
priors, ``MixedLM`` maximises the restricted likelihood, GPBoost Laplace's approximation
of the likelihood, and ``BayesMixedGLM`` is a mean-field approximation under the priors
that it offers. It gets binomial data as Bernoulli rows, one for each trial. ``held``
rows have standard deviations fixed at NUTS's means, and infer the effects alone, with
their variances. ``cold`` counts everything after imports. ``warm`` is the shortest of
further runs: those of twelve seconds, seven at least and 300 at most. Packages that are
not installed are left out::

    pip install statsmodels gpboost
    GPAUG_DATA=/path/to/data python examples/benchmarks/peers_latent.py
"""

from __future__ import annotations

import argparse
import importlib.util
from collections.abc import Callable
from pathlib import Path
from typing import Any

import jax
import numpy as np
import numpyro
from common import print_table, write_report
from latent import MODELS, by_nuts, load, timed

import numpyro_gpaug as gpaug

COLUMNS = {
    "data": "", "method": "", "fixed": ".2f", "sd": "", "cold": ".2f", "warm": ".4f",
}  # fmt: skip
Answer = tuple[np.ndarray, list[float]]


BINOMIAL = "cbpp", "seeds"


def one_by_one(name: str, data: dict[str, Any]) -> dict[str, Any]:
    """Data with a row for every trial; of others as they are."""
    if name not in BINOMIAL:
        return data
    data = {**data, "plate": np.arange(len(data["y"]))}
    made = {k: np.repeat(x, data["total"]) for k, x in data.items()}
    counts = zip(data["y"], data["total"], strict=True)
    made["y"] = np.concatenate([np.arange(total) < y for y, total in counts]) * 1
    return made


def design(name: str, data: dict[str, Any]) -> np.ndarray:
    """Columns of fixed effects, as the models have them."""
    if name == "cbpp":
        return np.eye(4)[data["period"]]
    if name == "sleepstudy":
        columns = [data["days"]]
    elif name == "seeds":
        columns = [data["x1"], data["x2"], data["x1"] * data["x2"]]
    elif name == "verbagg":
        anger = data["anger"]
        columns = [(anger - anger.mean()) / anger.std(), data["male"]]
    else:
        base, age = np.log(data["base"] / 4), np.log(data["age"])
        columns = [base, data["treatment"], age, data["visit4"]]
        columns = [c - c.mean() for c in columns]
    return np.column_stack([np.ones(len(data["y"])), *columns])


def groups(name: str, data: dict[str, Any]) -> np.ndarray:
    """A column of codes for each grouping."""
    if name == "sleepstudy":
        return data["subject"][:, None]
    if name in BINOMIAL:
        return data["herd" if name == "cbpp" else "plate"][:, None]
    if name == "verbagg":
        return np.column_stack([data["person"], data["item"]])
    return np.column_stack([data["patient"], np.arange(len(data["y"]))])


def spread(name: str) -> str:
    """The site of standard deviations."""
    return "tau" if name in BINOMIAL else "sd"


Held = np.ndarray | None


def ours(name: str, data: dict[str, Any], held: Held) -> Callable[[], Answer]:
    model = MODELS[name]
    if held is not None:
        model = numpyro.handlers.condition(model, {spread(name): held})
    svi = gpaug.ConjugateSVI(model, gpaug.AutoLatentGaussian(model))
    tol = None if held is None else 1e-4
    key = jax.random.key(0)

    def run() -> Answer:
        fit = svi.run(key, 200, **data, progress_bar=False, tol=tol)
        posterior = svi.posterior(fit)
        effects = [site.name for site in svi.guide.structure.sites]
        found = {k: np.asarray(posterior[k].mean) for k in effects}
        if held is not None:
            [np.asarray(posterior[k].variance) for k in effects]
            return found["b"], list(np.atleast_1d(held))
        return found["b"], list(np.atleast_1d(fit.params[f"{spread(name)}_auto_loc"]))

    return run


def mixed_lm(name: str, data: dict[str, Any], held: Held) -> Callable[[], Answer]:
    """Independent intercepts and slopes of normal data."""
    import pandas
    from statsmodels.regression.mixed_linear_model import MixedLM

    table = pandas.DataFrame(data)
    parts = {"intercept": "1", "slope": "0 + days"}

    def run() -> Answer:
        model = MixedLM.from_formula(
            "y ~ days", table, groups="subject", re_formula="0", vc_formula=parts
        )
        fit = model.fit()
        # Sorted by name.
        return np.asarray(fit.fe_params), [*np.sqrt(fit.vcomp), np.sqrt(fit.scale)]

    return run


def bayes_mixed_glm(
    name: str, data: dict[str, Any], held: Held
) -> Callable[[], Answer]:
    """Fit a mean-field Gaussian."""
    from scipy import sparse
    from statsmodels.genmod import bayes_mixed_glm as glm

    codes = groups(name, data)
    each = [sparse.csr_matrix(np.eye(c.max() + 1)[c]) for c in codes.T]
    ident = np.repeat(np.arange(len(each)), [m.shape[1] for m in each])
    counts = name == "epil"
    cls = glm.PoissonBayesMixedGLM if counts else glm.BinomialBayesMixedGLM
    X, effects = design(name, data), sparse.hstack(each).tocsr()

    def run() -> Answer:
        model = cls(data["y"], X, effects, ident, vcp_p=1.0, fe_p=5.0)
        fit = model.fit_vb()
        return np.asarray(fit.fe_mean), [*np.exp(fit.vcp_mean)]

    return run


def gpboost(name: str, data: dict[str, Any], held: Held) -> Callable[[], Answer]:
    import gpboost as gpb

    names = {"sleepstudy": "gaussian", "epil": "poisson"}
    given: dict[str, Any] = {"group_data": groups(name, data)}
    if name == "sleepstudy":
        given["group_rand_coef_data"] = data["days"][:, None].astype(float)
        given["ind_effect_group_rand_coef"] = [1]
    X, y = design(name, data), data["y"].astype(float)
    if name == "cbpp":
        X[:, 0] = 1  # It needs an intercept; the other periods are differences from it.
    options: dict[str, Any] = {}
    if held is not None:
        # The variance of the noise comes first.
        variances = np.roll(np.atleast_1d(held) ** 2, int(name == "sleepstudy"))
        fixed = {"init_cov_pars": variances}
        options = {"params": fixed | {"estimate_cov_par_index": [0] * len(variances)}}
        # Its iterative methods compute no variances of effects.
        given["matrix_inversion_method"] = "cholesky"

    def run() -> Answer:
        model = gpb.GPModel(likelihood=names.get(name, "bernoulli_logit"), **given)
        model.fit(y=y, X=X, **options)
        if held is not None:
            model.predict_training_data_random_effects(predict_var=True)
        found = np.asarray(model.get_cov_pars(format_pandas=False)).ravel()
        fixed = np.asarray(model.get_coef(format_pandas=False)).ravel()
        if name == "cbpp":
            fixed[1:] += fixed[0]
        ordered = [*found[1:], found[0]] if name == "sleepstudy" else found
        return fixed[: X.shape[1]], [float(np.sqrt(x)) for x in ordered]

    return run


ALL = "sleepstudy", "verbagg", "epil", *BINOMIAL
METHODS: dict[str, tuple[str, Any, tuple[str, ...]]] = {
    "AutoLatentGaussian": ("numpyro", ours, ALL),
    "MixedLM": ("statsmodels", mixed_lm, ("sleepstudy",)),
    "BayesMixedGLM": ("statsmodels", bayes_mixed_glm, ALL[1:]),
    "GPBoost": ("gpboost", gpboost, ALL),
    "AutoLatentGaussian, held": ("numpyro", ours, ALL),
    "GPBoost, held": ("gpboost", gpboost, ALL),
}
# The smallest and largest number of runs, and the seconds for all of them.
FEWEST, MOST, SECONDS = 7, 300, 12.0


def repeated(run: Callable[[], Answer]) -> list[float]:
    """Return the seconds of runs, one after the other."""
    found: list[float] = []
    while len(found) < FEWEST or (sum(found) < SECONDS and len(found) < MOST):
        found.append(timed(run)[1])
    return found


def rows_of(name: str, draws: int) -> list[dict[str, Any]]:
    data = load(name)
    truth, seconds = timed(lambda: by_nuts(MODELS[name], data, draws, 0))
    mean, error = truth["b"].mean(0), truth["b"].std(0)
    spreads = truth[spread(name)].mean(0)
    said = " ".join(f"{x:.3g}" for x in np.atleast_1d(spreads))
    rows = [{"data": name, "method": "NUTS", "sd": said, "cold": seconds}]
    for method, (package, of, names) in METHODS.items():
        if name not in names or importlib.util.find_spec(package) is None:
            continue
        held = spreads if method.endswith("held") else None
        run = of(name, data if package == "numpyro" else one_by_one(name, data), held)
        (fixed, deviations), cold = timed(run)
        rows.append({
            "data": name, "method": method, "cold": cold, "warm": min(repeated(run)),
            "fixed": float(np.max(np.abs(fixed - mean) / error)),
            "sd": " ".join(f"{x:.3g}" for x in deviations),
        })  # fmt: skip
    return rows


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--data", nargs="+", default=[*ALL], choices=ALL)
    parser.add_argument("--draws", type=int, default=1000)
    parser.add_argument("--json", type=Path)
    args = parser.parse_args()
    rows = []
    for name in args.data:
        found = rows_of(name, args.draws)
        rows += found
        print_table(found, COLUMNS)
        write_report(args.json, rows)


if __name__ == "__main__":
    main()
