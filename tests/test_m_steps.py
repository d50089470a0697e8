# SPDX-License-Identifier: Apache-2.0
"""Params set to the closed-form maximiser of the bound."""

import json
from pathlib import Path

import jax
import jax.numpy as jnp
import numpy as np
import numpyro
import numpyro.distributions as dist
import pytest
from numpyro import handlers
from numpyro.distributions import constraints

import numpyro_gpaug as gpaug
from numpyro_gpaug.errors import NotConjugateError
from numpyro_gpaug.likelihoods.contract import lookup_m_step
from tests.conftest import slow

GOLDEN = json.loads(
    (Path(__file__).parent / "golden" / "problem_piecewise.json").read_text()
)
KEY = jax.random.key(0)
LINE = gpaug.PiecewiseLink.from_function(lambda f: f, 6, -1.5, 1.5)
CURVE = gpaug.PiecewiseLink.from_function(jax.nn.sigmoid, 6, -1.5, 1.5)


def positive(name, start):
    return numpyro.param(name, start, constraint=constraints.positive)


def heights(link, constraint=constraints.real):
    link = link.with_heights(link.heights.astype("float64"))
    return gpaug.learned_link("theta", link, constraint)


LIKELIHOODS = {
    "normal": (lambda f: dist.Normal(f, positive("theta", 3.0)), "real"),
    "factor": (lambda f: dist.Normal(f, 2 * positive("theta", 0.1)), "real"),
    "laplace": (lambda f: dist.Laplace(f, positive("theta", 3.0)), "real"),
    "poisson": (lambda f: gpaug.LogisticPoisson(f, positive("theta", 30.0)), "count"),
    "softplus": (
        lambda f: dist.Normal(
            f, numpyro.param("theta", 3.0, constraint=constraints.softplus_positive)
        ),
        "real",
    ),
    "precision": (
        lambda f: gpaug.HeteroscedasticNormal(
            f, jnp.linspace(-1, 1, len(f)), positive("theta", 0.2)
        ),
        "real",
    ),
    "piecewise": (
        lambda f: gpaug.PiecewiseNormal(f, LINE, positive("theta", 3.0)), "real"
    ),
    "heights": (lambda f: gpaug.PiecewiseNormal(f, heights(LINE), 0.3), "real"),
    "probabilities": (
        lambda f: gpaug.PiecewiseBernoulli(
            f, heights(CURVE, constraints.unit_interval)
        ),
        "label",
    ),
}  # fmt: skip
AUGMENTED = ("normal", "laplace", "poisson")


def data(kind):
    rng = np.random.default_rng(0)
    X = np.sort(rng.uniform(-2, 2, 40))[:, None]
    f = np.sin(2 * X[:, 0])
    y = {
        "real": f + 0.3 * rng.normal(size=40),
        "count": rng.poisson(8 / (1 + np.exp(-2 * f))),
        "label": (rng.random(40) < 1 / (1 + np.exp(-3 * f))).astype(int),
    }[kind]
    return X, y, np.linspace(-2, 2, 8)[:, None]


def model(X, y=None, *, inducing, name, batch_size=None, weights=None):
    kernel = gpaug.kernels.SquaredExponential(0.7, 1.5)
    gp = gpaug.GaussianProcess("f", kernel, inducing=inducing)
    make = name if callable(name) else LIKELIHOODS[name][0]
    with numpyro.plate("data", X.shape[0], subsample_size=batch_size) as rows:
        if batch_size is not None:
            X, y = X[rows], y[rows]
        fn = make(gp(X))
        if weights is not None:
            with handlers.scale(scale=weights), handlers.mask(mask=weights < 3):
                numpyro.sample("y", fn, obs=y)
        else:
            numpyro.sample("y", fn, obs=y)


def fitter(updates="auto", optim=None, m_step=("theta",)):
    return gpaug.ConjugateSVI(
        model, gpaug.AutoSparseGP(model), optim, updates, m_step=m_step
    )


CASES = [(name, "auto") for name in LIKELIHOODS]
CASES += [(name, "augmented") for name in AUGMENTED]
# Quick cases: up to a factor, and on the augmented bound.
QUICK = [("factor", "auto"), ("poisson", "augmented")]


@pytest.mark.parametrize(
    ("name", "updates"),
    [c if c in QUICK else slow(*c) for c in CASES],
)
def test_the_bound_is_at_rest_there(x64, name: str, updates: str) -> None:
    """Few steps are enough, without an optimiser, through weights and masks."""
    X, y, Z = data(LIKELIHOODS[name][1])
    weights = np.random.default_rng(1).uniform(0.5, 3.2, 40)
    kwargs = {"inducing": Z, "name": name, "weights": weights}
    svi = fitter(updates)
    result = svi.run(KEY, 150, X, y, tol=1e-10, progress_bar=False, **kwargs)
    assert np.diff(result.losses).max() < 1e-8
    theta = np.asarray(result.params["theta"])

    def loss(theta):
        params = {**result.params, "theta": jnp.asarray(theta)}
        state = svi.init(KEY, X, y, init_params=params, **kwargs)
        return svi.evaluate(state, X, y, **kwargs)

    base, losses = float(loss(theta)), []
    np.testing.assert_allclose(base, result.losses[-1], atol=1e-7)
    for k in range(np.size(theta)):
        for factor in (0.97, 1.03):
            moved = np.array(theta)
            moved[k if theta.ndim else ()] *= factor
            if name == "probabilities":
                moved = np.minimum(moved, 1 - 1e-9)
            losses.append(float(loss(moved)))
    assert min(losses) > base - 1e-9
    assert max(losses) > base + 1e-3


def test_golden_heights(x64) -> None:
    """Averages of the labels, weighted by the probabilities of the cells."""
    golden = GOLDEN["bernoulli"]
    m, v = ({"f": np.asarray(golden[k])} for k in "mv")
    y = np.asarray(golden["y01"], int)

    def likelihood(heights):
        link = gpaug.PiecewiseLink(heights, GOLDEN["inner_edges"])
        return gpaug.PiecewiseBernoulli(m["f"], link)

    def total(heights):
        return gpaug.expected_log_prob(likelihood(heights), y, m, v).sum()

    step = lookup_m_step(gpaug.PiecewiseBernoulli, "heights")

    @jax.jit
    def updated(start):
        mass = step.statistic(likelihood(start), y, m, v).sum(0)
        return step.maximiser(start, jax.grad(total)(start), mass)

    best = updated(np.asarray(golden["g_k"]))
    np.testing.assert_allclose(best, GOLDEN["mstep"]["bernoulli_gk"], rtol=1e-9)


@pytest.mark.parametrize(
    ("make", "message"),
    [
        (lambda f: dist.Normal(f + positive("theta", 1.0), 1.0), "no closed-form"),
        (lambda f: dist.Normal(f, 0.1 + positive("theta", 1.0)), "up to a factor"),
        (lambda f: dist.Normal(f, jnp.sqrt(positive("theta", 1.0))), "up to a factor"),
        (lambda f: dist.StudentT(positive("theta", 3.0), f, 1.0), "no closed-form"),
        (
            lambda f: dist.Normal(f * positive("theta", 1.0), positive("theta", 1.0)),
            "must be one parameter",
        ),
        (
            lambda f: gpaug.PiecewiseNormal(f, gpaug.learned_link(
                "theta", LINE, order="increasing"
            ), 1.0),
            "up to a factor",
        ),
    ],
)  # fmt: skip
def test_refusals(make, message: str) -> None:
    X, y, Z = data("real")
    with pytest.raises(NotConjugateError, match=message):
        fitter().init(KEY, X, y, inducing=Z, name=make)


def grouped(group, y=None, *, noise):
    """Random effects, whose scale is learnt by another way."""
    theta = positive("theta", 3.0)
    tau = numpyro.sample("tau", dist.HalfNormal(1))
    with numpyro.plate("groups", 8):
        effect = numpyro.sample("effect", dist.Normal(0, tau))
    with numpyro.plate("data", len(group)):
        numpyro.sample("y", noise(effect, group, theta), obs=y)


def test_beside_the_scale_of_random_effects(x64) -> None:
    _, y, _ = data("real")
    kwargs = {"noise": lambda effect, group, s: dist.Normal(effect[group], s)}
    losses = []
    for m_step in ((), "theta"):
        svi = gpaug.ConjugateSVI(
            grouped, gpaug.AutoLatentGaussian(grouped), m_step=m_step
        )
        result = svi.run(KEY, 60, np.arange(40) // 5, y, progress_bar=False, **kwargs)
        losses.append(result.losses[-1])
    np.testing.assert_allclose(*losses, atol=1e-4)


@pytest.mark.parametrize(
    ("noise", "message"),
    [
        (
            lambda effect, group, s: dist.Gumbel(effect[group], s),
            "density of 'y'.* no registered closed form.* to optim",
        ),
        (
            lambda effect, group, s: dist.Normal(s * effect[group], s),
            "must be one parameter of one likelihood",
        ),
    ],
)
def test_refusals_of_a_joint_gaussian(noise, message: str) -> None:
    svi = gpaug.ConjugateSVI(grouped, gpaug.AutoLatentGaussian(grouped), m_step="theta")
    with pytest.raises(NotConjugateError, match=message):
        svi.init(KEY, np.arange(40) // 5, data("real")[1], noise=noise)


def test_refused_options() -> None:
    X, y, Z = data("real")
    with pytest.raises(ValueError, match="needs full data"):
        fitter().init(KEY, X, y, inducing=Z, name="normal", batch_size=10)
    with pytest.raises(ValueError, match="the params are"):
        fitter(m_step=("scale",)).init(KEY, X, y, inducing=Z, name="normal")
