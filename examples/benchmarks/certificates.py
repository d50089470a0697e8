# SPDX-License-Identifier: Apache-2.0
"""Whether ``NestedVI`` certifies only correct results, whatever the random key: small
models of the literature, each with many keys, beside brute-force references.

``certified`` is the share of keys. ``mean``, ``sd`` and ``evidence`` are the largest
errors over keys of *certified* runs and over all latents and hyperparameters: of means
and standard deviations in posterior standard deviations, and in nats. ``least``,
``k-hat`` and ``largest`` are the smallest, middle and largest k-hat; ``points`` and
``fits`` the mean number of weighted hyperparameters and of Gaussians found. ``refused
mean`` is the largest error of runs that were *not* certified.

``by`` names the reference. ``grid``: sums over a grid of at most three hyperparameters,
given which the latents are Gaussian. ``sums``: effects of groups by sums over 161
values each, hyperparameters and coefficients by 2**15 quasi-random points of a t
distribution; it fails unless they are worth 3000 independent ones. ``long``: the same
program with 2**14 points and two keys; it fails unless their means agree within .05
standard deviations. References are kept in the file of ``--references``, if it is
given::

    python examples/benchmarks/certificates.py --keys 5 --references references.json

In single precision unless ``--float64``.
"""

from __future__ import annotations

import argparse
import json
import time
import warnings
from collections.abc import Callable
from functools import partial
from pathlib import Path
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
import numpyro
import numpyro.distributions as dist
from common import print_table, write_report
from scipy import optimize, special
from scipy.stats import qmc

import numpyro_gpaug as gpaug

COLUMNS = {"model": "", "by": "", "certified": ".2f", "mean": ".3f", "sd": ".3f"}
COLUMNS |= {"evidence": ".3f", "least": ".2f", "k-hat": ".2f", "largest": ".2f"}
COLUMNS |= {"points": ".0f", "fits": ".0f", "refused mean": ".3f", "cpu": ".2f"}
Draw = dict[str, Any]


class Problem(NamedTuple):
    """A model, its data, and how its reference is found.

    :param model: of NumPyro.
    :param data: its arguments.
    :param given: for ``grid`` the Gaussian given hyperparameters, as
        ``(y, means, variances, design, noise)``; for ``sums`` the log-density of the
        data at predictors; ``None`` for a long run.
    :param priors: of the hyperparameters, by name.
    :param coefficients: for ``sums``: name, design, prior scale.
    :param group: for ``sums``: name of the effects, group of each datum, and the
        function of the hyperparameters that is their scale.
    """

    model: Any
    data: dict[str, np.ndarray]
    given: Any = None
    priors: dict[str, Any] = {}
    coefficients: tuple[str, Any, float] | None = None
    group: tuple[str, Any, str] | None = None

    @property
    def by(self) -> str:
        """The kind of its reference."""
        if self.given is None:
            return "long"
        return "grid" if self.group is None else "sums"


# -- Normal data: sums over hyperparameters --------------------------------------------


def studies() -> Problem:
    """Six studies of known variances."""
    y = np.array([0.12, 0.35, -0.05, 0.6, 0.2, 0.41])
    v = np.array([0.02, 0.05, 0.01, 0.2, 0.03, 0.08])
    return _meta(y, np.sqrt(v), 2.0, dist.HalfCauchy(0.5))


def schools() -> Problem:
    """Eight schools."""
    y = np.array([28.0, 8.0, -3.0, 7.0, -1.0, 1.0, 18.0, 12.0])
    sigma = np.array([15.0, 10.0, 16.0, 11.0, 9.0, 11.0, 10.0, 18.0])
    return _meta(y, sigma, 5.0, dist.HalfCauchy(5.0))


def _meta(y: Any, sigma: Any, wide: float, prior: Any) -> Problem:
    def model(y: Any, sigma: Any) -> None:
        mu = numpyro.sample("mu", dist.Normal(0, wide))
        tau = numpyro.sample("tau", prior)
        with numpyro.plate("studies", len(y)):
            theta = numpyro.sample("theta", dist.Normal(mu, tau))
            numpyro.sample("y", dist.Normal(theta, sigma), obs=y)

    def given(h: Draw) -> Any:
        n = len(y)
        # theta is mu and an effect.
        design = np.concatenate([np.ones((n, 1)), np.eye(n)], 1)
        return {"mu": wide**2, "effect": jnp.full(n, h["tau"] ** 2)}, design, sigma

    return Problem(model, {"y": y, "sigma": sigma}, given, {"tau": prior})


PASTES = """62.8 62.6 60.1 62.3 62.7 63.1 60.0 61.4 57.5 56.9 61.1 58.9 58.7 57.5 63.9
63.1 65.4 63.7 57.1 56.4 56.9 58.6 64.7 64.5 55.1 55.1 54.7 54.2 58.8 57.5 63.4 64.9
59.3 58.1 60.5 60.0 62.5 62.6 61.0 58.7 56.9 57.7 59.2 59.4 65.2 66.0 64.8 64.1 54.8
54.8 64.0 64.0 57.7 56.8 58.3 59.3 59.2 59.2 58.9 56.6"""


def pastes() -> Problem:
    """Casks in batches (lme4's Pastes): three scales."""
    y = np.array(PASTES.split(), float)
    batch, cask = np.arange(60) // 6, np.arange(60) // 2
    prior = dist.HalfNormal(5.0)

    def model(y: Any) -> None:
        mean = numpyro.sample("mean", dist.Normal(60, 20))
        scales = [numpyro.sample(name, prior) for name in ("batches", "casks", "noise")]
        with numpyro.plate("batch", 10):
            a = numpyro.sample("a", dist.Normal(0, scales[0]))
        with numpyro.plate("cask", 30):
            b = numpyro.sample("b", dist.Normal(0, scales[1]))
        with numpyro.plate("data", 60):
            mu = mean + a[batch] + b[cask]
            numpyro.sample("y", dist.Normal(mu, scales[2]), obs=y)

    def given(h: Draw) -> Any:
        design = np.concatenate([np.ones((60, 1)), _of(batch), _of(cask)], 1)
        scales = {"mean": 20.0**2, "a": jnp.full(10, h["batches"] ** 2)}
        scales["b"] = jnp.full(30, h["casks"] ** 2)
        return scales, design, h["noise"], y - 60

    names = "batches", "casks", "noise"
    return Problem(model, {"y": y}, given, dict.fromkeys(names, prior))


DYESTUFF = """1545 1440 1440 1520 1580 1540 1555 1490 1560 1495 1595 1550 1605 1510 1560
1445 1440 1595 1465 1545 1595 1630 1515 1635 1625 1520 1455 1450 1480 1445"""


def dyestuff() -> Problem:
    """Batches (lme4's Dyestuff), in hundreds: two scales."""
    y = np.array(DYESTUFF.split(), float) / 100 - 15
    batch = np.arange(30) // 5
    prior = dist.HalfCauchy(1.0)

    def model(y: Any) -> None:
        mean = numpyro.sample("mean", dist.Normal(0, 10))
        tau, sigma = (numpyro.sample(name, prior) for name in ("tau", "sigma"))
        with numpyro.plate("batch", 6):
            a = numpyro.sample("a", dist.Normal(0, tau))
        with numpyro.plate("data", 30):
            numpyro.sample("y", dist.Normal(mean + a[batch], sigma), obs=y)

    def given(h: Draw) -> Any:
        design = np.concatenate([np.ones((30, 1)), _of(batch)], 1)
        scales = {"mean": 100.0, "a": jnp.full(6, h["tau"] ** 2)}
        return scales, design, h["sigma"]

    return Problem(model, {"y": y}, given, dict.fromkeys(("tau", "sigma"), prior))


def slopes() -> Problem:
    """Intercepts and slopes of twelve subjects, simulated: three scales."""
    rng = np.random.default_rng(3)
    subject, days = np.arange(60) // 5, np.arange(60) % 5 - 2.0
    own = rng.normal(size=(12, 2)) * [1.0, 0.3]
    y = 1 + 0.5 * days + own[subject, 0] + own[subject, 1] * days
    y = y + 0.8 * rng.normal(size=60)
    prior = dist.HalfNormal(2.0)

    def model(y: Any) -> None:
        level = numpyro.sample("level", dist.Normal(0, 5))
        slope = numpyro.sample("slope", dist.Normal(0, 5))
        scales = [numpyro.sample(name, prior) for name in ("levels", "slopes", "noise")]
        with numpyro.plate("subjects", 12):
            a = numpyro.sample("a", dist.Normal(0, scales[0]))
            c = numpyro.sample("c", dist.Normal(0, scales[1]))
        mean = level + a[subject] + (slope + c[subject]) * days
        with numpyro.plate("data", 60):
            numpyro.sample("y", dist.Normal(mean, scales[2]), obs=y)

    def given(h: Draw) -> Any:
        each, column = _of(subject), days[:, None]
        design = np.concatenate([np.ones((60, 1)), column, each, column * each], 1)
        scales = {"level": 25.0, "slope": 25.0}
        scales |= {"a": jnp.full(12, h["levels"] ** 2)}
        scales |= {"c": jnp.full(12, h["slopes"] ** 2)}
        return scales, design, h["noise"]

    names = "levels", "slopes", "noise"
    return Problem(model, {"y": y}, given, dict.fromkeys(names, prior))


def _of(group: np.ndarray) -> np.ndarray:
    return np.eye(group.max() + 1)[group]


# -- groups: sums over their effects ---------------------------------------------------


def years() -> Problem:
    """Counts of forty years about a cubic, an effect of each: one small scale."""
    rng = np.random.default_rng(1)
    x = (np.arange(40) - 19.5) / 20
    X = np.stack([np.ones(40), x, x**2, x**3], 1)
    eta = X @ [4.3, 1.4, -0.3, -1.0] + 0.1 * rng.normal(size=40)
    y = rng.poisson(np.exp(eta))
    return _grouped(
        _poisson, X, np.arange(40), y, dist.Uniform(0, 5), coefficients=10.0
    )


def seeds() -> Problem:
    """Seeds that germinate on 21 plates (BUGS)."""
    y = "10 23 23 26 17 5 53 55 32 46 10 8 10 8 23 0 3 22 15 32 3"
    total = "39 62 81 51 39 6 74 72 51 79 13 16 30 28 45 4 12 41 30 51 7"
    n = np.array(total.split(), int)
    x1, x2 = np.arange(21) > 10, np.isin(np.arange(21), [*range(5, 11), *range(16, 21)])
    X = np.stack([np.ones(21), x1, x2, x1 & x2], 1).astype(float)
    binomial = partial(_binomial, total=n)
    y = np.array(y.split(), int)
    return _grouped(binomial, X, np.arange(21), y, dist.HalfNormal(1.0))


def herds() -> Problem:
    """Three binary data of each of twenty herds."""
    rng = np.random.default_rng(4)
    herd = np.repeat(np.arange(20), 3)
    eta = -0.5 + 1.2 * rng.normal(size=20)[herd]
    y = rng.binomial(1, special.expit(eta))
    X = np.ones((60, 1))
    return _grouped(
        partial(_binomial, total=np.ones(60, int)), X, herd, y, dist.HalfNormal(2.0)
    )


def counts() -> Problem:
    """Overdispersed counts of fifteen sites: a scale and a concentration."""
    rng = np.random.default_rng(6)
    site = np.repeat(np.arange(15), 4)
    x = rng.normal(size=60)
    rate = np.exp(1 + 0.4 * x + 0.5 * rng.normal(size=15)[site])
    y = rng.poisson(rate * rng.gamma(2.0, 0.5, 60))
    X = np.stack([np.ones(60), x], 1)
    more = {"concentration": dist.Gamma(2.0, 0.5)}
    return _grouped(_negative_binomial, X, site, y, dist.HalfNormal(1.0), more)


def kidney() -> Problem:
    """Two censored times of each of 38 patients, Weibull by ``numpyro.factor``."""
    rng = np.random.default_rng(38)
    patient, shape = np.repeat(np.arange(38), 2), 1.1
    woman, age = rng.binomial(1, 0.7, 38)[patient], rng.normal(size=38)[patient]
    X = np.stack([np.ones(76), woman, age], 1)
    eta = X @ [3.2, 1.4, -0.1] + 0.6 * rng.normal(size=38)[patient]
    time = np.exp(eta) * rng.weibull(shape, 76)
    limit = rng.uniform(50, 400, 76)
    y = np.stack([np.minimum(time, limit), time < limit], 1)
    more = {"shape": dist.Gamma(2.0, 1.0)}
    return _grouped(_weibull, X, patient, y, dist.HalfNormal(2.0), more)


def robust() -> Problem:
    """Student-t data of twelve groups, two of them far out."""
    rng = np.random.default_rng(8)
    group = np.repeat(np.arange(12), 4)
    y = 1 + rng.normal(size=12)[group] + 0.5 * rng.standard_t(3, 48)
    y[[3, 20]] += 6.0
    more = {"noise": dist.HalfNormal(1.0)}
    X = np.ones((48, 1))
    return _grouped(_student_t, X, group, y, dist.HalfNormal(2.0), more)


def _poisson(eta: Any, y: Any, h: Draw) -> Any:
    return dist.Poisson(jnp.exp(eta)).log_prob(y)


def _binomial(eta: Any, y: Any, h: Draw, *, total: Any) -> Any:
    return dist.Binomial(total, logits=eta).log_prob(y)


def _negative_binomial(eta: Any, y: Any, h: Draw) -> Any:
    return dist.NegativeBinomial2(jnp.exp(eta), h["concentration"]).log_prob(y)


def _weibull(eta: Any, y: Any, h: Draw) -> Any:
    time, seen = y[:, 0], y[:, 1]
    white = h["shape"] * (jnp.log(time) - eta)
    return seen * (jnp.log(h["shape"] / time) + white) - jnp.exp(white)


def _student_t(eta: Any, y: Any, h: Draw) -> Any:
    return dist.StudentT(4.0, eta, h["noise"]).log_prob(y)


def _grouped(
    log_prob: Any,
    X: np.ndarray,
    group: np.ndarray,
    y: np.ndarray,
    prior: Any,
    more: dict[str, Any] | None = None,
    coefficients: float = 5.0,
) -> Problem:
    """Coefficients and an effect of every group."""
    priors = {"tau": prior, **(more or {})}

    def model(y: Any) -> None:
        h = {
            name: numpyro.sample(name, distribution)
            for name, distribution in priors.items()
        }
        scale = dist.Normal(0, coefficients).expand([X.shape[1]]).to_event(1)
        b = numpyro.sample("b", scale)
        with numpyro.plate("groups", group.max() + 1):
            a = numpyro.sample("a", dist.Normal(0, h["tau"]))
        numpyro.factor("y", log_prob(jnp.asarray(X) @ b + a[group], y, h))

    return Problem(
        model, {"y": y}, log_prob, priors, ("b", X, coefficients), ("a", group, "tau")
    )


# -- processes, series, crossed effects: long runs -------------------------------------


def labels() -> Problem:
    """Forty labels under a process: two hyperparameters."""
    rng = np.random.default_rng(5)
    x = np.sort(rng.uniform(-3, 3, 40))
    y = rng.binomial(1, special.expit(3 * np.sin(1.5 * x)))

    def model(x: Any, y: Any) -> None:
        _process(x, lambda f: dist.Bernoulli(logits=f), y)

    return Problem(model, {"x": x, "y": y})


def events() -> Problem:
    """Counts of thirty places under a process and a level."""
    rng = np.random.default_rng(7)
    x = np.linspace(-3, 3, 30)
    y = rng.poisson(np.exp(0.5 + np.sin(2 * x)))

    def model(x: Any, y: Any) -> None:
        level = numpyro.sample("level", dist.Normal(0, 2))
        _process(x, lambda f: dist.Poisson(jnp.exp(level + f)), y)

    return Problem(model, {"x": x, "y": y})


def _process(x: Any, distribution: Any, y: Any) -> None:
    lengthscale = numpyro.sample("lengthscale", dist.LogNormal(0.0, 0.7))
    scale = numpyro.sample("scale", dist.HalfNormal(2.0))
    kernel = gpaug.kernels.Matern52(lengthscale, jnp.square(scale))
    K = kernel(x[:, None], x[:, None]) + 1e-4 * jnp.eye(len(x))
    f = numpyro.sample("f", dist.MultivariateNormal(jnp.zeros(len(x)), K))
    observed = distribution(f)
    with numpyro.plate("data", len(x)):
        numpyro.sample("y", observed, obs=y)


def walk() -> Problem:
    """Counts of fifty days whose level walks."""
    rng = np.random.default_rng(9)
    y = rng.poisson(np.exp(1 + np.cumsum(0.3 * rng.normal(size=50))))

    def model(y: Any) -> None:
        scale = numpyro.sample("scale", dist.HalfNormal(0.5))
        level = numpyro.sample("level", dist.Normal(0, 2))
        f = numpyro.sample("walk", dist.GaussianRandomWalk(scale, len(y)))
        with numpyro.plate("data", len(y)):
            numpyro.sample("y", dist.Poisson(jnp.exp(level + f)), obs=y)

    return Problem(model, {"y": y})


def crossed() -> Problem:
    """Answers of fifteen persons to ten items: two scales."""
    rng = np.random.default_rng(10)
    person, item = np.divmod(np.arange(150), 10)
    eta = 0.3 + rng.normal(size=15)[person] + 0.7 * rng.normal(size=10)[item]
    y = rng.binomial(1, special.expit(eta))

    def model(y: Any) -> None:
        level = numpyro.sample("level", dist.Normal(0, 3))
        persons = numpyro.sample("persons", dist.HalfCauchy(1.0))
        items = numpyro.sample("items", dist.HalfCauchy(1.0))
        with numpyro.plate("person", 15):
            a = numpyro.sample("a", dist.Normal(0, persons))
        with numpyro.plate("item", 10):
            c = numpyro.sample("c", dist.Normal(0, items))
        with numpyro.plate("data", len(y)):
            logits = level + a[person] + c[item]
            numpyro.sample("y", dist.Bernoulli(logits=logits), obs=y)

    return Problem(model, {"y": y})


PROBLEMS: dict[str, Callable[[], Problem]] = {
    f.__name__: f
    for f in (studies, schools, pastes, dyestuff, slopes, years, seeds, herds, counts,
              kidney, robust, labels, events, walk, crossed)
}  # fmt: skip

# -- references ------------------------------------------------------------------------

Reference = dict[str, Any]


def reference(problem: Problem) -> Reference:
    """Means and standard deviations by site, flat, and the evidence."""
    with jax.enable_x64(True):
        if problem.by == "long":
            return _long(problem)
        return _sums(problem, _grid if problem.by == "grid" else _grouped_density)


def _long(problem: Problem) -> Reference:
    found = []
    for key in (0, 1):
        nested = gpaug.NestedVI(
            problem.model, num_points=2**14, num_draws=16, progress_bar=False
        )
        nested.run(jax.random.key(100 + key), **problem.data)
        found.append(of_run(nested))
        print("long run, k-hat", nested.get_extra_fields()["khat"], flush=True)
    off = errors(found[0], found[1])
    if not (off["mean"] < 0.05 and off["evidence"] < 0.03):
        raise SystemExit(f"long runs do not agree: {off}")
    return found[0]


def _grid(problem: Problem) -> Any:
    """Evidence and moments of the latents given hyperparameters, Normal data."""
    (y,) = (problem.data["y"],)

    def density(h: Draw, free: Any) -> Any:
        variances, design, noise, *centred = problem.given(h)
        values = jnp.asarray(centred[0] if centred else y)
        prior = jnp.concatenate([jnp.atleast_1d(v) for v in variances.values()])
        noise = jnp.broadcast_to(jnp.square(noise), values.shape)
        half = design / jnp.sqrt(noise)[:, None] * jnp.sqrt(prior)
        factor = jnp.linalg.cholesky(jnp.eye(len(prior)) + half.T @ half)
        white = half.T @ (values / jnp.sqrt(noise))
        inner = jax.scipy.linalg.solve_triangular(factor, white, lower=True)
        log = 0.5 * jnp.sum(inner**2) - 0.5 * jnp.sum(values**2 / noise)
        log -= jnp.log(jnp.diag(factor)).sum() + 0.5 * jnp.log(2 * jnp.pi * noise).sum()
        inverse = jax.scipy.linalg.solve_triangular(
            factor, jnp.eye(len(prior)), lower=True
        )
        mean = jnp.sqrt(prior) * (inverse.T @ inner)
        moment = prior * jnp.square(inverse).sum(0) + mean**2
        if "effect" in variances:  # theta is the level and an effect
            spread = jnp.sqrt(prior)
            both = spread[:, None] * (inverse.T @ inverse) * spread
            second = jnp.diag(both)[1:] + both[0, 0] + 2 * both[0, 1:]
            theta = mean[0] + mean[1:]
            return log, {"mu": (mean[:1], moment[:1]),
                         "theta": (theta, second + theta**2)}  # fmt: skip
        edges = np.cumsum([0, *(np.size(v) for v in variances.values())])
        parts = {
            k: (mean[i:j], moment[i:j])
            for k, i, j in zip(variances, edges[:-1], edges[1:], strict=True)
        }
        if centred:
            m, s = parts["mean"]
            parts["mean"] = m + 60, s + 120 * m + 3600
        return log, parts

    return density, 0


def _grouped_density(problem: Problem) -> Any:
    assert problem.coefficients is not None
    assert problem.group is not None
    (b_name, X, wide), (a_name, group, scale) = problem.coefficients, problem.group
    y, groups, white = problem.data["y"], group.max() + 1, np.linspace(-7, 7, 161)
    log_rule = jax.scipy.stats.norm.logpdf(white) + np.log(white[1] - white[0])

    def density(h: Draw, b: Any) -> Any:
        def at(z: Any) -> Any:
            terms = problem.given(X @ b + h[scale] * z, y, h)
            return jnp.zeros(groups).at[group].add(terms)

        logs = jax.vmap(at)(jnp.asarray(white)) + log_rule[:, None]
        level = jax.nn.logsumexp(logs, 0)
        shares = jnp.exp(logs - level)
        a = h[scale] * white
        moments = {b_name: (b, b**2), a_name: (a @ shares, a**2 @ shares)}
        prior = dist.Normal(0, wide).log_prob(b).sum()
        return level.sum() + prior, moments

    return density, X.shape[1]


def _sums(problem: Problem, make: Any) -> Reference:
    density, size = make(problem)
    names, d = [*problem.priors], len(problem.priors)

    def joint(point: Any) -> Any:
        total, h = 0.0, {}
        for i, (name, prior) in enumerate(problem.priors.items()):
            transform = dist.biject_to(prior.support)
            h[name] = transform(point[i])
            total += prior.log_prob(h[name])
            total += transform.log_abs_det_jacobian(point[i], h[name])
        log, moments = density(h, point[d:])
        moments |= {k: (x[None], x[None] ** 2) for k, x in h.items()}
        return log + total, moments

    def descent(x: Any) -> Any:
        return -joint(x)[0]

    ascent = jax.jit(jax.value_and_grad(descent))
    start = np.zeros(d + size)
    mode = optimize.minimize(ascent, start, jac=True, method="BFGS").x
    hessian = jax.jit(jax.hessian(descent))(mode)
    values, vectors = np.linalg.eigh(np.asarray(hessian))
    axes = vectors / np.sqrt(np.maximum(values, 0.1))
    given = jax.jit(lambda x: jax.lax.map(joint, x, batch_size=64))
    if size:
        # A second round, centred where the first found its weight.
        points, log_q = _t_points(mode, axes, 2**12)
        weights = special.softmax(np.asarray(given(jnp.asarray(points))[0]) - log_q)
        mode = weights @ points
        apart = np.sqrt(weights)[:, None] * (points - mode)
        values, vectors = np.linalg.eigh(apart.T @ apart)
        points, log_q = _t_points(mode, vectors * np.sqrt(values), 2**15)
    else:
        points, log_q = _grid_points(names)
    logs, moments = given(jnp.asarray(points))
    ratios = np.asarray(logs) - log_q
    weights = special.softmax(ratios)
    worth = 1 / np.square(weights).sum()
    if size and worth < 3000:
        raise SystemExit(f"the points of the reference are worth {worth:.0f}")
    found: Reference = {}
    for name, (m, s) in moments.items():
        mean = weights @ np.asarray(m)
        found[name] = mean, np.sqrt(weights @ np.asarray(s) - mean**2)
    found["evidence"] = float(special.logsumexp(ratios) - np.log(len(ratios)))
    return found


def _grid_points(names: list[str]) -> tuple[np.ndarray, Any]:
    """A grid over logarithms of scales, as draws of a uniform distribution."""
    num = {1: 4001, 2: 401, 3: 81}[len(names)]
    low, high = {1: (-14, 12), 2: (-10, 9), 3: (-7, 4)}[len(names)]
    axis = low + (np.arange(num) + 0.5) / num * (high - low)
    points = np.stack(np.meshgrid(*[axis] * len(names), indexing="ij"), -1)
    return points.reshape(-1, len(names)), -len(names) * np.log(high - low)


def _t_points(mode: Any, axes: Any, num: int) -> tuple[np.ndarray, np.ndarray]:
    d, freedom, wider = len(mode), 3.0, 1.5
    uniform = qmc.Sobol(d + 1, seed=0).random(num).clip(1e-12, 1 - 1e-12)
    chi = 2 * special.gammaincinv(freedom / 2, uniform[:, -1]) / freedom
    # Wider than the curvature at the mode.
    white = wider * special.ndtri(uniform[:, :d]) / np.sqrt(chi)[:, None]
    log_q = special.gammaln((freedom + d) / 2) - special.gammaln(freedom / 2)
    log_q = log_q - d / 2 * np.log(freedom * np.pi) - d * np.log(wider)
    log_q = log_q - np.linalg.slogdet(axes)[1]
    squares = np.square(white / wider).sum(1)
    log_q = log_q - (freedom + d) / 2 * np.log1p(squares / freedom)
    return mode + white @ axes.T, log_q


# -- runs ------------------------------------------------------------------------------


def of_run(nested: Any) -> Reference:
    """Return the results of a run in the form of a reference."""
    samples = nested.get_samples(weighted=True)
    fields = nested.get_extra_fields()
    weights = np.exp(fields["log_weights"])
    weights /= weights.sum()
    found: Reference = {"evidence": float(fields["log_evidence"])}
    for name, x in samples.items():
        flat = np.asarray(x, float).reshape(len(weights), -1)
        flat = np.where(weights[:, None] > 0, flat, 0.0)
        mean = weights @ flat
        found[name] = mean, np.sqrt(weights @ np.square(flat - mean))
    return found


def errors(found: Reference, exact: Reference) -> dict[str, float]:
    """Return the largest errors over all sites, and the error of the evidence."""
    mean = spread = 0.0
    for name, (m, s) in ((k, x) for k, x in exact.items() if k != "evidence"):
        own = found[name]
        m, s = np.asarray(m), np.asarray(s)
        mean = max(mean, float(np.abs((own[0] - m) / s).max()))
        spread = max(spread, float(np.abs(own[1] / s - 1).max()))
    evidence = abs(found["evidence"] - exact["evidence"])
    return {"mean": mean, "sd": spread, "evidence": evidence}


def row(name: str, keys: int, exact: Reference) -> tuple[dict[str, Any], list[Any]]:
    problem = PROBLEMS[name]()
    nested = gpaug.NestedVI(problem.model, progress_bar=False)
    runs = []
    for key in range(keys):
        since = time.process_time()
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")
            nested.run(jax.random.key(key), **problem.data)
        fields = nested.get_extra_fields()
        run = {"model": name, "key": key, "certified": bool(nested.certified)}
        run |= {k: float(fields[k]) for k in ("khat", "evaluations", "loss")}
        run |= {"effective": float(fields["effective_points"])}
        run |= {"standard error": float(fields["log_evidence_error"])}
        run |= {"cpu": time.process_time() - since}
        run |= {"points": len(nested._run.weighted.points)}
        runs.append(run | errors(of_run(nested), exact))
    kept = [r for r in runs if r["certified"]]
    khats = sorted(r["khat"] for r in runs)
    found = {"model": name, "by": problem.by, "certified": len(kept) / keys}
    for k in ("mean", "sd", "evidence"):
        found[k] = max((r[k] for r in kept), default=np.nan)
    found |= {"least": khats[0], "k-hat": khats[keys // 2], "largest": khats[-1]}
    found["points"] = np.mean([r["points"] for r in runs])
    found["fits"] = np.mean([r["evaluations"] for r in runs])
    # The first compiles.
    found["cpu"] = np.median([r["cpu"] for r in runs])
    refused = [r["mean"] for r in runs if not r["certified"]]
    found["refused mean"] = max(refused, default=np.nan)
    return found, runs


def known(path: Path | None, names: list[str]) -> dict[str, Reference]:
    """References, from a file if it has them."""
    kept = json.loads(path.read_text()) if path and path.exists() else {}
    for name in names:
        if name not in kept:
            found = reference(PROBLEMS[name]())
            kept[name] = jax.tree.map(lambda x: np.asarray(x).tolist(), found)
            if path:
                path.write_text(json.dumps(kept))
    return kept


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--models", nargs="+", default=[*PROBLEMS], choices=PROBLEMS)
    parser.add_argument("--keys", type=int, default=20)
    parser.add_argument("--references", type=Path)
    parser.add_argument("--float64", action="store_true")
    parser.add_argument("--json", type=Path)
    args = parser.parse_args()
    jax.config.update("jax_enable_x64", args.float64)
    exact = known(args.references, args.models)
    rows, runs = [], []
    for name in args.models:
        found, own = row(name, args.keys, exact[name])
        rows.append(found)
        runs += own
        print_table(rows[-1:], COLUMNS)
        write_report(args.json, runs)
    print_table(rows, COLUMNS)
    share = np.mean([r["certified"] for r in runs])
    print(f"certified: {share:.1%} of {len(runs)} runs")


if __name__ == "__main__":
    main()
