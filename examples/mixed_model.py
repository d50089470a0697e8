# SPDX-License-Identifier: Apache-2.0
"""A binomial mixed model, from a table to intervals and a picture, beside NUTS.

The model has intercepts that vary between groups, and a factor with fixed effects.
``NestedVI`` integrates all effects and the standard deviation between groups, and
certifies the result. The posterior is saved, loaded again, and predicts a new group::

    python examples/mixed_model.py
    python examples/mixed_model.py --csv mine.csv --successes ill --total n --group farm

Without ``--csv``, the data are ``cbpp`` of R's lme4: new cases of a lung disease in 15
herds of cattle, in 4 periods. lme4's own estimates are printed beside ours.
"""

from __future__ import annotations

import argparse
import os
import tempfile
import time
from pathlib import Path
from typing import Any, NamedTuple

# Before jax starts: jaxlib 0.10.1 prints lines about each compiled program it reads.
os.environ.setdefault("TF_CPP_MIN_LOG_LEVEL", "3")

import jax
import jax.numpy as jnp
import matplotlib
import numpy as np
import numpyro
import numpyro.distributions as dist
import pandas as pd
from numpyro.handlers import reparam
from numpyro.infer import MCMC, NUTS
from numpyro.infer.reparam import LocScaleReparam
from support.compilation import keep_compiled_programs

import numpyro_gpaug as gpaug

matplotlib.use("Agg")
import matplotlib.pyplot as plt  # noqa: E402

CBPP = Path(__file__).parent / "data" / "cbpp.csv"
# The estimates that lme4 1.1 documents: glmer, by Laplace's approximation.
LME4 = {
    "b[0]": -1.3983,
    "b[1]": -0.9919,
    "b[2]": -1.1282,
    "b[3]": -1.5797,
    "tau": 0.6421,
}
OURS = "#d95f02"


class Data(NamedTuple):
    """Arguments of the model, and names of herds and of columns of X."""

    X: np.ndarray
    herd: np.ndarray
    total: np.ndarray
    y: np.ndarray
    herds: pd.Index
    effects: list[str]


def model(X, herd, total, y=None, *, herds):
    """A logistic regression with an intercept for each herd."""
    b = numpyro.sample("b", dist.Normal(0, 2.5).expand([X.shape[1]]).to_event(1))
    tau = numpyro.sample("tau", dist.HalfNormal(1))
    with numpyro.plate("herds", herds):
        a = numpyro.sample("a", dist.Normal(0, tau))
    logits = numpyro.deterministic("logits", X @ b + a[herd])
    with numpyro.plate("data", len(X)):
        numpyro.sample("y", dist.Binomial(total, logits=logits), obs=y)


def encode(table: pd.DataFrame, args: argparse.Namespace) -> Data:
    """Return counts, codes of the herds, and a design; raise for other data."""
    names = [args.successes, args.total, args.group, args.factor]
    if missing := [name for name in names if name not in table]:
        raise SystemExit(f"no column {missing} among {[*table]}")
    y, total = (pd.to_numeric(table[name], errors="coerce") for name in names[:2])
    whole = (y >= 0) & (y <= total) & (y % 1 == 0) & (total % 1 == 0)
    good = whole & table[names].notna().all(axis=1)
    if table.empty or not good.all():
        found = table[names][~good][:1].to_dict("records")
        raise SystemExit(f"no whole successes of a total, group and level: {found}")
    herd, herds = pd.factorize(table[args.group], sort=True)
    factor, levels = pd.factorize(table[args.factor], sort=True)
    effects = ["intercept", *(f"{args.factor} {level}" for level in levels[1:])]
    counts = (x.to_numpy(int) for x in (total, y))
    return Data(treatment(factor), herd, *counts, herds, effects)


def treatment(codes: np.ndarray) -> np.ndarray:
    """An intercept, and differences of the other levels from the first."""
    X = np.eye(codes.max() + 1, dtype=jnp.result_type(float))[codes]
    X[:, 0] = 1
    return X


def fit(data: Data, args: argparse.Namespace) -> tuple[gpaug.NestedVI, list[float]]:
    """Twice, so that the second time shows the cost without compilation."""
    nested = gpaug.NestedVI(model, num_points=args.points, progress_bar=False)
    key, seconds = jax.random.key(args.seed), []
    for _ in range(2):
        start = time.perf_counter()
        nested.run(key, *data[:4], herds=len(data.herds))
        seconds.append(time.perf_counter() - start)
    print(nested)
    return nested, seconds


def sample(data: Data, args: argparse.Namespace) -> tuple[dict[str, Any], float]:
    """Draw from the same model by NUTS. Herds are in units of tau, as NUTS needs them;
    the guide whitens them itself.
    """
    kernel = NUTS(reparam(model, config={"a": LocScaleReparam(0)}))
    mcmc = MCMC(
        kernel, num_warmup=args.draws, num_samples=args.draws, progress_bar=False
    )
    start = time.perf_counter()
    mcmc.run(jax.random.key(args.seed), *data[:4], herds=len(data.herds))
    draws = {name: np.asarray(mcmc.get_samples()[name]) for name in ("b", "a", "tau")}
    return draws, time.perf_counter() - start


def report(
    data: Data, nested: gpaug.NestedVI, draws: dict | None, published: dict | None
) -> pd.DataFrame:
    """Print effects with intervals, beside NUTS and lme4, and return them."""
    sites = {"b": len(data.effects), "a": len(data.herds)}
    rows = [f"{site}[{i}]" for site, size in sites.items() for i in range(size)]
    table = nested.summary().loc[[*rows, "tau"], ["mean", "sd", "5%", "95%"]]
    if draws is not None:
        # In the order of the rows of the table.
        flat = np.column_stack([draws[name] for name in ("b", "a", "tau")])
        moments = flat.mean(0), flat.std(0), *np.quantile(flat, [0.05, 0.95], 0)
        for name, column in zip([*table], moments, strict=True):
            table[f"NUTS {name}"] = column
    if published is not None:
        table["lme4"] = pd.Series(published)
    table.index = [*data.effects, *(f"herd {name}" for name in data.herds), "tau"]
    print(table.to_string(float_format="{:.2f}".format, na_rep=""))
    if draws is not None:
        away = ((table["mean"] - table["NUTS mean"]) / table["NUTS sd"]).abs()
        print(f"largest difference of means: {away.max():.2f} of NUTS's standard "
              f"deviations, {away.idxmax()}")  # fmt: skip
    return table


def interval(distribution: Any, seed: int) -> np.ndarray:
    """Return the 90% interval of new counts, from draws: a binomial has no quantile
    function.
    """
    draws = distribution.sample(jax.random.key(seed), (4000,))
    return np.quantile(draws, [0.05, 0.95], axis=0, method="inverted_cdf")


def predict_unseen(data: Data, posterior: gpaug.Posterior, seed: int) -> None:
    """The first level of the factor in a group that was seen and in one more: a larger
    plate, whose new member is at its prior."""
    G, total = len(data.herds), np.array([20, 20])
    X = np.eye(data.X.shape[1], dtype=data.X.dtype)[[0, 0]]
    at = X, np.array([0, G]), total
    f = posterior.predict_f(*at, site="logits", herds=G + 1)
    low, high = interval(posterior.predict_y(*at, herds=G + 1), seed)
    print("\nfirst level, 20 trials  log-odds    sd  successes, 90%")
    for i, name in enumerate([f"herd {data.herds[0]}", "a new herd"]):
        sd = np.sqrt(f.variance[i])
        print(f"{name:22}  {f.mean[i]:8.2f}  {sd:4.2f}  {low[i]:.0f} to {high[i]:.0f}")


def check_saved(data: Data, posterior: gpaug.Posterior, path: Path) -> None:
    """Save, load, and compare predictions."""
    posterior.save(path)
    loaded = gpaug.Posterior.load(path, model)
    before, after = (p.predict_y(*data[:3]).mean for p in (posterior, loaded))
    np.testing.assert_array_equal(before, after)
    print("saved and loaded again: the same predictions")


def draw_herds(axes: Any, herds: pd.DataFrame) -> None:
    """Intercepts in their order: a caterpillar."""
    place, herds = np.arange(len(herds)), herds.sort_values("mean")
    sets = ("NestedVI", "", OURS, 0.13), ("NUTS", "NUTS ", "0.45", -0.13)
    for label, prefix, colour, shift in sets:
        if f"{prefix}mean" in herds:
            mean, low, high = (herds[prefix + name] for name in ("mean", "5%", "95%"))
            axes.hlines(place + shift, low, high, color=colour, linewidth=1.6)
            axes.plot(mean, place + shift, "o", color=colour, ms=4, label=label)
    axes.axvline(0, color="0.8", linewidth=1, zorder=0)
    axes.set_yticks(place, herds.index, fontsize=8)
    axes.set(title="Herds, with 90% intervals", xlabel="intercept, log-odds")
    axes.legend(fontsize=8, frameon=False, loc="lower right")


def draw_check(axes: Any, data: Data, distribution: Any, seed: int) -> None:
    """Observed counts in the intervals that are predicted for them."""
    order, rank = np.argsort(np.asarray(distribution.mean)), np.arange(len(data.y))
    y, (low, high) = data.y[order], interval(distribution, seed)[:, order]
    # A quarter more on either side, so that an interval of one count is visible.
    axes.vlines(rank, low - 0.25, high + 0.25, color=OURS, alpha=0.35, linewidth=4,
                label="90% predicted")  # fmt: skip
    axes.plot(
        rank,
        distribution.mean[order],
        color=OURS,
        linewidth=1.2,
        label="mean predicted",
    )
    axes.plot(rank, y, "ko", ms=4, label="observed")
    inside = np.sum((low <= y) & (y <= high))
    axes.set(title=f"{inside} of {len(y)} observations in their 90% intervals",
             xlabel="rows, by predicted successes", ylabel="successes")  # fmt: skip
    axes.legend(fontsize=8, frameon=False, loc="upper left")


def parse(argv: list[str] | None) -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__.split("\n")[0])
    parser.add_argument("--csv", "--data", help=".csv with a header; lme4's cbpp")
    columns = {"successes": "incidence", "total": "size", "group": "herd"}
    for name, column in {**columns, "factor": "period"}.items():
        parser.add_argument(f"--{name}", default=column, help=f"column, {column}")
    parser.add_argument("--points", type=int, default=512, help="values of tau")
    parser.add_argument("--nuts", action=argparse.BooleanOptionalAction, default=True)
    parser.add_argument(
        "--draws", type=int, default=1000, help="of NUTS, after as many to warm up"
    )
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--save", type=Path, help="keep the posterior, .npz")
    parser.add_argument("--plot", "--out", default="mixed_model.png")
    return parser.parse_args(argv)


def main(argv: list[str] | None = None) -> None:
    """Fit, report, save and draw."""
    args = parse(argv)
    keep_compiled_programs()
    data = encode(pd.read_csv(args.csv or CBPP), args)
    nested, (first, warm) = fit(data, args)
    print(f"{first:.1f} s the first time, {warm:.2f} s again")
    draws = None
    if args.nuts:
        draws, seconds = sample(data, args)
        print(f"NUTS, {args.draws} draws: {seconds:.1f} s the first time")
    effects = report(data, nested, draws, LME4 if args.csv is None else None)
    posterior = nested.posterior()
    predict_unseen(data, posterior, args.seed)
    with tempfile.TemporaryDirectory() as folder:
        check_saved(data, posterior, args.save or Path(folder) / "posterior.npz")
    with plt.rc_context({"axes.spines.top": False, "axes.spines.right": False}):
        figure, (left, right) = plt.subplots(
            1, 2, figsize=(11, 4.4), layout="constrained", width_ratios=(1, 1.4)
        )
    draw_herds(left, effects.iloc[len(data.effects) : -1])
    draw_check(right, data, posterior.predict_y(*data[:3]), args.seed)
    figure.savefig(args.plot, dpi=130)
    plt.close(figure)
    print(f"wrote {args.plot}")


if __name__ == "__main__":
    main()
