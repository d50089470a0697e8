# SPDX-License-Identifier: Apache-2.0
"""Likelihoods with a piecewise-constant link: expectations, predictions, fits."""

import json
from functools import cache, partial
from pathlib import Path

import jax
import jax.numpy as jnp
import numpy as np
import numpyro
import numpyro.distributions as dist
import optax
import pytest
from jax import random
from numpyro.distributions import constraints
from scipy.special import logsumexp
from scipy.stats import norm, poisson

import numpyro_gpaug as gpaug
from numpyro_gpaug import PiecewiseLink
from numpyro_gpaug.likelihoods.expectations import expected_log_prob, predictive
from tests.conftest import assert_close, slow

GOLDEN = json.loads(
    (Path(__file__).parent / "golden" / "problem_piecewise.json").read_text()
)
KEY = random.key(0)
PROBABILITY = PiecewiseLink.from_function(jax.nn.sigmoid, 9, -3.0, 3.0)
RATE = PiecewiseLink.from_function(jnp.exp, 12, -2.0, 2.0)
LINE = PiecewiseLink.from_function(lambda f: f**3 / 4 + f, 10, -2.0, 2.0)


def gamma(rate, shape):
    return dist.Gamma(shape, rate)


def normal_of(loc, scale):
    return dist.Normal(loc, scale)


def cast(link: PiecewiseLink, dtype: str) -> PiecewiseLink:
    return link.with_heights(link.heights.astype(dtype))


# By name: the latents' shape, the likelihood given latents, an observation.
CASES = {
    "bernoulli": (
        lambda f, t: gpaug.PiecewiseBernoulli(f["f"], cast(PROBABILITY, t)),
        [1, 0, 1, 1],
    ),
    "poisson": (
        lambda f, t: gpaug.Linked(f["f"], cast(RATE, t), dist.Poisson),
        [0, 3, 1, 9],
    ),
    "gamma": (
        lambda f, t: gpaug.Linked(
            f["f"], cast(RATE, t), gamma, shape=jnp.array([1.0, 2.0, 3.0, 0.5], t)
        ),
        [0.3, 2.0, 1.0, 0.01],
    ),
    "scale": (
        lambda f, t: gpaug.Linked(
            f["f"], cast(RATE, t), lambda s: dist.Normal(jnp.asarray(0.2, t), s)
        ),
        [0.3, -2.0, 1.0, 0.01],
    ),
    "normal": (
        lambda f, t: gpaug.PiecewiseNormal(f["f"], cast(LINE, t), 0.4),
        [0.3, -2.0, 1.0, 0.01],
    ),
    "pair": (
        lambda f, t: gpaug.Linked(
            f["f"], (cast(LINE, t), cast(RATE, t)), normal_of
        ),
        [0.3, -2.0, 1.0, 0.01],
    ),
    "heteroscedastic": (
        lambda f, t: gpaug.PiecewiseHeteroscedasticNormal(
            f["loc"], f["f"], cast(RATE, t)
        ),
        [0.3, -2.0, 1.0, 0.01],
    ),
    "log_variance": (
        lambda f, t: gpaug.LogVarianceNormal(f["loc"], f["log_variance"]),
        [0.3, -2.0, 1.0, 0.01],
    ),
}  # fmt: skip
QUICK = ("poisson", "normal", "pair")


def marked(quick):
    return [n if n in quick else slow(n) for n in CASES]


SOME_SLOW = marked(QUICK)
LATENTS = {"heteroscedastic": ("loc", "f"), "log_variance": ("loc", "log_variance")}


def latents_of(name: str, dtype: str):
    """Means and variances by latent."""
    shape = (4, 2) if name == "pair" else (4,)
    rng, latents = np.random.default_rng(0), LATENTS.get(name, ("f",))
    means = {k: rng.normal(size=shape).astype(dtype) for k in latents}
    return means, {k: np.exp(rng.normal(size=shape)).astype(dtype) for k in latents}


def observation(name: str, dtype: str) -> np.ndarray:
    y = np.asarray(CASES[name][1])
    return y if y.dtype.kind == "i" else y.astype(dtype)


def with_heights(name, d, means, variances):
    """A normal likelihood whose heights are a latent vector too."""
    if name == "normal":
        means = {**means, "heights": d.heights}
        variances = {**variances, "heights": jnp.zeros_like(d.heights)}
    return means, variances


@cache
def compiled(name: str, dtype: str):
    """Return the expectation and its slopes, the likelihood and the predictive
    distribution: one program per case, which the tests share.
    """

    @jax.jit
    def program(means, variances, y):
        def total(means, variances):
            d = CASES[name][0](means, dtype)
            moments = with_heights(name, d, means, variances)
            value = expected_log_prob(d, y, *moments)
            return value.sum(), (value, d, predictive(d, *moments))

        grad = jax.value_and_grad(total, (0, 1), has_aux=True)
        (_, found), slopes = grad(means, variances)
        return *found, slopes

    return program


@pytest.mark.parametrize("name", SOME_SLOW)
def test_expectations_against_draws(name: str) -> None:
    means, variances = latents_of(name, "float32")
    y, num = observation(name, "float32"), 200_000
    value, _, predictive, _ = compiled(name, "float32")(means, variances, y)

    @jax.jit
    def draws(key):
        f = {
            k: m + jnp.sqrt(variances[k]) * random.normal(
                random.fold_in(key, i), (num, *m.shape)
            )
            for i, (k, m) in enumerate(means.items())
        }  # fmt: skip
        density = CASES[name][0](f, "float32").log_prob(y)
        predicted = jax.nn.logsumexp(density, 0) - jnp.log(num)
        return density.mean(0), density.std(0), predicted, jnp.exp(density).std(0)

    mean, spread, predicted, noise = draws(KEY)
    assert (np.abs(value - mean) < 5 * spread / np.sqrt(num) + 2e-5).all()
    error = np.abs(np.exp(log_prob(predictive, y)) - np.exp(predicted))
    assert (error < 5 * noise / np.sqrt(num) + 1e-5).all()


@jax.jit
def log_prob(distribution, y):
    return distribution.log_prob(y)


@pytest.mark.parametrize("name", SOME_SLOW)
def test_gradients_against_differences(x64, name: str) -> None:
    given, y = latents_of(name, "float64"), observation(name, "float64")
    run = compiled(name, "float64")
    *_, slopes = run(*given, y)
    rng, step = np.random.default_rng(3), 1e-5
    for which in (0, 1):
        for k, slope in slopes[which].items():
            toward, ends = rng.normal(size=slope.shape), []
            for sign in (1, -1):
                moved = [dict(x) for x in given]
                moved[which][k] = moved[which][k] + sign * step * toward
                ends.append(np.asarray(run(*moved, y)[0]).sum())
            ours = (np.asarray(slope) * toward).sum()
            np.testing.assert_allclose(ours, (ends[0] - ends[1]) / (2 * step), 1e-6)


@jax.jit
def ways_to_the_density(d, y):
    """Through a pytree, an expansion and a batch."""
    stacked = jax.tree.map(lambda leaf: jnp.stack([leaf] * 2), d)
    mapped = jax.vmap(lambda d: d.log_prob(y))(stacked)
    return d.log_prob(y), d.expand((2, 4)).log_prob(y), mapped, d.support(y)


@jax.jit
def quantiles(distribution, q):
    x = distribution.icdf(q)
    return x, distribution.cdf(x), distribution.cdf(x - 1)


@pytest.mark.parametrize("name", marked(["poisson", "normal"]))
def test_predictions_have_the_moments_and_citizenship(x64, name: str) -> None:
    means, variances = latents_of(name, "float64")
    y = observation(name, "float64")
    _, d, distribution, _ = compiled(name, "float64")(means, variances, y)
    assert distribution.batch_shape == (4,)
    draw = jax.jit(lambda d, key: (d.sample(key, (40_000,)), d.mean, d.variance))
    draws, mean, variance = (np.asarray(x, float) for x in draw(distribution, KEY))
    error = np.abs(draws.mean(0) - mean) / np.sqrt(variance / 40_000)
    assert error.max() < 4.5
    spread = draws.var(0)
    kurtosis = ((draws - draws.mean(0)) ** 4).mean(0) / spread**2
    error = np.abs(spread / variance - 1) / np.sqrt((kurtosis - 1) / 40_000)
    assert error.max() < 4.5
    made_inside = jax.jit(lambda f, y: CASES[name][0](f, "float64").log_prob(y))(
        means, y
    )
    for x in (d, distribution):
        value, wider, mapped, supported = ways_to_the_density(x, y)
        np.testing.assert_allclose(wider, np.stack([value] * 2), rtol=1e-12)
        np.testing.assert_allclose(mapped, np.stack([value] * 2), rtol=1e-12)
        if x is d:
            np.testing.assert_allclose(value, made_inside, rtol=1e-12)
            assert supported.all()
    shape = jax.eval_shape(lambda d: d.sample(KEY, (3,)), d).shape
    assert shape == (3, 4)
    if name == "bernoulli":
        return
    q = np.array([0.05, 0.5, 0.95])[:, None]
    quantile, reached, below = quantiles(distribution, q)
    if name == "poisson":
        assert (reached >= q).all()
        assert ((below < q) | (quantile == 0)).all()
        np.testing.assert_array_equal(quantile, np.round(quantile))
    else:
        np.testing.assert_allclose(reached, q * np.ones(4), atol=1e-9)


@pytest.mark.parametrize("dtype", ["float32", "float64"])
@pytest.mark.parametrize("name", SOME_SLOW)
def test_dtypes(x64, dtype: str, name: str) -> None:
    def everything(means, variances, y):
        value, d, distribution, slopes = compiled(name, dtype)(means, variances, y)
        assert d.is_discrete == (y.dtype.kind == "i")
        # NumPyro's densities of whole numbers are in double precision here.
        own = value, d.log_prob(y), distribution.log_prob(y)
        return (
            *(() if d.is_discrete else own),
            distribution.mean,
            distribution.variance,
            slopes,
        )

    y = observation(name, dtype)
    found = jax.eval_shape(everything, *latents_of(name, dtype), y)
    assert {x.dtype for x in jax.tree.leaves(found)} == {np.dtype(dtype)}


def test_a_cell_out_of_reach_adds_nothing(dtype: str) -> None:
    """This holds for any density in the cell: with a rate of zero, a count of three has
    none.
    """
    m, v = np.array([400.0], dtype), np.array([1e-4], dtype)

    @jax.jit
    @partial(jax.value_and_grad, argnums=(0, 1))
    def total(m, v):
        link = PiecewiseLink(np.array([0.0, 2.0], dtype), [-1.0])
        d = gpaug.Linked(m, link, dist.Poisson)
        return expected_log_prob(d, jnp.array([3]), {"f": m}, {"f": v}).sum()

    value, slopes = total(m, v)
    assert_close(value, poisson(2.0).logpmf(3))
    assert not any(np.any(x) for x in slopes)


def test_golden_heteroscedastic(x64) -> None:
    golden = GOLDEN["heteroscedastic_exp"]
    y, mf, vf, mg, vg = (np.array([golden[k]]) for k in ("y", "mf", "vf", "mg", "vg"))
    links, expected = [], []
    for case in golden["piecewise"]:
        for rule, key in (("upper", "value"), ("midpoint", "value_midpoint")):
            edges = case["K"], case["lo"], case["hi"]
            links.append(PiecewiseLink.from_function(np.exp, *edges, rule))
            expected.append(case[key])

    @jax.jit
    def everything(links):
        exact = expected_log_prob(
            gpaug.LogVarianceNormal(mf, mg), y,
            {"loc": mf, "log_variance": mg}, {"loc": vf, "log_variance": vg},
        )  # fmt: skip
        linked = [gpaug.PiecewiseHeteroscedasticNormal(mf, mg, link) for link in links]
        moments = {"loc": mf, "f": mg}, {"loc": vf, "f": vg}
        return exact, jnp.stack([expected_log_prob(d, y, *moments) for d in linked])

    exact, ours = everything(links)
    np.testing.assert_allclose(exact, golden["exact"], rtol=1e-12)
    np.testing.assert_allclose(ours[:, 0], expected, rtol=1e-10)


# -- fits ------------------------------------------------------------------------------


def golden_model(X, y=None, *, inducing, link):
    kernel = gpaug.kernels.SquaredExponential(0.9, 1.3)
    gp = gpaug.GaussianProcess("f", kernel, inducing=inducing, jitter=0.0)
    with numpyro.plate("data", X.shape[0]):
        numpyro.sample("y", gpaug.PiecewiseBernoulli(gp(X), link), obs=y)


def test_golden_problem(x64) -> None:
    """The optimum of the bound, below the evidence of the piecewise model."""
    golden = GOLDEN["bernoulli"]
    X, Z = jnp.array(golden["X"]), jnp.array(golden["Z"])
    y = jnp.array(golden["y01"], int)
    link = PiecewiseLink(jnp.array(golden["g_k"]), GOLDEN["inner_edges"])
    guide = gpaug.AutoSparseGP(golden_model)
    svi = gpaug.ConjugateSVI(golden_model, guide)
    result = svi.run(
        KEY, 100, X, y, inducing=Z, link=link, tol=1e-12, progress_bar=False
    )
    bound = -result.losses[-1]
    np.testing.assert_allclose(bound, golden["elbo_optimum_approx_1e-8"], atol=1e-7)
    assert bound < golden["log_evidence_piecewise_MC"]
    assert (np.diff(result.losses) < 1e-9).all()
    values = svi.posterior(result).predict_f(X)
    np.testing.assert_allclose(values.mean, golden["m"], atol=1e-3)
    np.testing.assert_allclose(values.variance, golden["v"], atol=1e-3)


def test_closed_form_posterior_of_heights(x64) -> None:
    """One unit step at fixed cells is the posterior of the paper's section 3.5."""
    golden = GOLDEN["bayes_gk"]
    p = np.array(golden["P"])
    y, prior = jnp.array(golden["y"]), jnp.array(golden["prior_mean"])
    scale = golden["noise_var"] ** 0.5
    # Gaussians with these cell probabilities at edges -1 and 1.
    low, high = norm.ppf(p[:, 0]), norm.ppf(p[:, 0] + p[:, 1])
    s = jnp.array(2 / (high - low))
    m = -1 - s * jnp.array(low)

    def bound(mean, variance):
        d = gpaug.PiecewiseNormal(m, PiecewiseLink(prior, [-1.0, 1.0]), scale)
        terms = expected_log_prob(
            d, y, {"f": m, "heights": mean}, {"f": s**2, "heights": variance}
        )
        q = dist.Normal(mean, jnp.sqrt(variance))
        kl = dist.kl_divergence(q, dist.Normal(prior, 1.0))
        return terms.sum() - kl.sum()

    best = jnp.array(golden["post_mean"]), jnp.array(golden["post_var"])
    value, slopes = jax.jit(jax.value_and_grad(bound, (0, 1)))(*best)
    np.testing.assert_allclose(value, golden["value_eq24_correct"], rtol=1e-10)
    np.testing.assert_allclose(np.stack(slopes), 0, atol=1e-10)


def regression(X, y=None, *, inducing, prior_scale=None, order="free"):
    kernel = gpaug.kernels.SquaredExponential(1.0, 1.0)
    gp = gpaug.GaussianProcess("f", kernel, inducing=inducing)
    start = PiecewiseLink.from_function(lambda f: f, 12, -2.5, 2.5)
    if prior_scale is None:
        link = gpaug.learned_link("heights", start, order=order)
    else:
        prior = dist.Normal(start.heights, prior_scale).to_event(1)
        link = start.with_heights(numpyro.sample("heights", prior))
    positive = constraints.positive
    scale = numpyro.param("scale", 0.5, constraint=positive)
    with numpyro.plate("data", X.shape[0]):
        numpyro.sample("y", gpaug.PiecewiseNormal(gp(X), link, scale), obs=y)


def skewed_data(num: int = 150):
    rng = np.random.default_rng(0)
    X = rng.uniform(-3, 3, (num, 1))
    f = np.sin(1.5 * X[:, 0])
    y = np.exp(2 * f) + 0.2 * rng.normal(size=num)
    y = (y - y.mean()) / y.std()
    return X, y, np.linspace(-3, 3, 15)[:, None]


def bound_by_gradients(X, y, kwargs):
    dense = gpaug.AutoSparseGP(regression, covariance="dense").setup(X, y, **kwargs)
    stock = numpyro.infer.SVI(
        regression, dense, optax.adam(0.03), gpaug.TraceAnalytic_ELBO()
    )
    start = jax.jit(lambda: stock.init(KEY, X, y, **kwargs))()
    found = stock.run(KEY, 3000, X, y, init_state=start, progress_bar=False, **kwargs)
    # A constant learning rate leaves some noise.
    return np.min(found.losses[-200:])


@pytest.mark.parametrize("gradients", [False, slow(True)])
def test_heights_with_a_prior_through_both_routes(x64, gradients: bool) -> None:
    """Closed-form updates of f and of the heights reach what gradients reach."""
    X, y, Z = skewed_data(60)
    guide = gpaug.AutoSparseGP(regression)
    svi = gpaug.ConjugateSVI(regression, guide, optax.adam(0.05))
    kwargs = {"inducing": Z, "prior_scale": 1.0}
    result = svi.run(KEY, 300, X, y, progress_bar=False, **kwargs)
    assert {b.name for b in guide.structure.blocks} == {"f", "heights"}
    if gradients:
        loss = bound_by_gradients(X, y, kwargs)
        np.testing.assert_allclose(result.losses[-1], loss, atol=0.3)
    # At the optimum the heights are at their closed-form posterior given f and the
    # scale.
    values = svi.posterior(result).predict_f(X)
    start = PiecewiseLink.from_function(lambda f: f, 12, -2.5, 2.5)
    p = jax.jit(start.cell_probabilities)(values.mean, values.variance)
    noise = np.square(result.params["scale"])
    weight = np.asarray(p).sum(0) / noise
    expected = np.asarray(start.heights) + np.asarray(y) @ np.asarray(p) / noise
    kept = (result.params[f"heights_auto_{k}"] for k in ("precision", "potential"))
    mean = np.linalg.solve(*map(np.asarray, kept))
    np.testing.assert_allclose(mean, expected / (1 + weight), atol=2e-3)


@pytest.mark.parametrize(
    ("call", "message"),
    [
        (lambda f: gpaug.Linked(f, (RATE,) * 3, normal_of), "K\\^C terms"),
        (lambda f: gpaug.Linked(f, (RATE, RATE), normal_of), "two latents"),
    ],
)
def test_refused_latents(call, message: str) -> None:
    with pytest.raises(ValueError, match=message):
        call(jnp.zeros(4))


def test_a_function_is_no_link() -> None:
    with pytest.raises(TypeError, match="PiecewiseLink.from_function"):
        gpaug.Linked(jnp.zeros(3), jnp.exp, dist.Poisson)
    with pytest.raises(ValueError, match="Normal with scale=-1.0 does not accept"):
        gpaug.Linked(jnp.zeros(3), RATE, dist.Normal, scale=-1.0)


@pytest.mark.parametrize("which", ["bernoulli", "poisson", "variance"])
def test_refused_heights(which: str) -> None:
    X, y, Z = skewed_data(10)
    bad = PiecewiseLink([-0.5, 0.5, 2.0], [-1.0, 1.0])
    make, expected = {
        "bernoulli": (
            lambda f: gpaug.PiecewiseBernoulli(f, bad), "which BernoulliProbs does not"
        ),
        "poisson": (
            lambda f: gpaug.Linked(f, bad, dist.Poisson), "which Poisson does not"
        ),
        "variance": (
            lambda f: gpaug.PiecewiseHeteroscedasticNormal(0.0, f, bad),
            "which Normal with loc=0.0 does not",
        ),
    }[which]  # fmt: skip

    def model(X, y, *, inducing):
        kernel = gpaug.kernels.SquaredExponential(1.0, 1.0)
        gp = gpaug.GaussianProcess("f", kernel, inducing=inducing)
        with numpyro.plate("data", X.shape[0]):
            numpyro.sample("y", make(gp(X)), obs=y)

    svi = gpaug.ConjugateSVI(model, gpaug.AutoSparseGP(model))
    labels = jnp.asarray(y > 0, float if which == "variance" else int)
    with pytest.raises(ValueError, match=expected):
        svi.init(KEY, X, labels, inducing=Z)


def test_log_weights_of_far_cells() -> None:
    """A mixture's tails come from cells whose probabilities underflow."""
    link = PiecewiseLink.from_function(lambda f: f, 30, -30.0, 30.0)

    @jax.jit
    def predicted(link, y):
        d = gpaug.PiecewiseNormal(jnp.zeros(1), link, 0.1)
        m = {"f": jnp.zeros(1), "heights": link.heights}
        v = {"f": jnp.ones(1), "heights": jnp.zeros(30)}
        return predictive(d, m, v).log_prob(y)

    edges = np.array([-np.inf, *link.edges])
    high, low = norm.logcdf(edges[1:15]), norm.logcdf(edges[:14])
    log_p = high + np.log1p(-np.exp(low - high))
    expected = logsumexp(log_p + norm.logpdf(-25.0, np.asarray(link.heights)[:14], 0.1))
    np.testing.assert_allclose(predicted(link, -25.0)[0], expected, rtol=1e-4)
