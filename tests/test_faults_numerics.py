# SPDX-License-Identifier: Apache-2.0
"""Numbers that went wrong in silence: at large variances, in tails, without steps."""

from functools import partial
from itertools import combinations
from types import SimpleNamespace

import jax
import jax.numpy as jnp
import numpy as np
import numpyro
import numpyro.distributions as dist
import optax
import pytest
from scipy.special import gammaln, log_expit, logsumexp, ndtr

import numpyro_gpaug as gpaug
from numpyro_gpaug.distributions.mixtures import NormalLaplace
from numpyro_gpaug.gp.projection import project, whitener
from numpyro_gpaug.likelihoods.expectations import expected_log_prob, predictive
from numpyro_gpaug.math.log_sum import (
    EXPONENTIAL,
    LOGISTIC,
    expected_log_sum,
    expected_shares,
)
from numpyro_gpaug.math.logistic import expected_log_sigmoid
from numpyro_gpaug.multilabel import ClassMembers
from tests.conftest import enable_x64, slow

KEY = jax.random.key(0)


def wide_latents(classes: int, rows: int) -> tuple[np.ndarray, np.ndarray]:
    """Means and variances of latents of standard deviations .1 to 100, side by side."""
    rng = np.random.default_rng(classes)
    scales = 10 ** rng.uniform(-1, 2, (rows, classes))
    scales[: rows // 2] = 10 ** rng.uniform(0.5, 2, (rows // 2, 1))
    means = rng.normal(size=(rows, classes)) * 10 ** rng.uniform(0, 2, (rows, 1))
    return means.astype("float32"), (scales**2).astype("float32")


def test_softmax_of_two_wide_latents(dtype: str) -> None:
    """Against the closed form of one difference: m_b - E log sigmoid(f_b - f_a)."""
    m, v = (x.astype(dtype) for x in wide_latents(2, 60))

    def closed(m, v):
        return m[..., 1] - expected_log_sigmoid(m[..., 1] - m[..., 0], v.sum(-1))

    @jax.jit
    def both(m, v):
        def each(value):
            return jax.value_and_grad(lambda m, v: value(m, v).sum(), (0, 1))(m, v)

        values = expected_log_sum(EXPONENTIAL, m, v), closed(m, v)
        slopes = each(lambda *x: expected_log_sum(EXPONENTIAL, *x))[1], each(closed)[1]
        return values, slopes

    values, slopes = jax.tree.map(np.asarray, both(m, v))
    tolerance = 1e-5 if dtype == "float32" else 2e-8
    size = np.sqrt(v.max(-1)) + np.abs(m).max(-1)
    assert np.max(np.abs(values[0] - values[1]) / size) < tolerance
    (by_mean, by_variance), (expected, curvature) = slopes
    np.testing.assert_allclose(by_mean, expected, atol=3 * tolerance)
    spread = np.sqrt(v.sum(-1, keepdims=True))
    np.testing.assert_allclose(
        spread * by_variance, spread * curvature, atol=3 * tolerance
    )


@pytest.mark.parametrize("link", [EXPONENTIAL, LOGISTIC], ids=lambda link: link.name)
def test_sums_of_wide_latents_against_draws(link) -> None:
    """The reference by NumPy: the largest latent by quadrature, the rest of the sum by
    draws.
    """
    m, v = wide_latents(7, 8)
    values = jax.jit(lambda m, v: expected_log_sum(link, m, v))(m, v)
    shares = jax.jit(lambda m, v: expected_shares(link, m, v))(m, v)
    z = np.random.default_rng(0).standard_normal((60_000, 7))
    for mean, scale, value, share in zip(m, np.sqrt(v), values, shares, strict=True):
        f = mean + scale * z
        top, low = (mean + 9 * scale).max(), (mean - 9 * scale).max()
        t = np.linspace(low, top if link == EXPONENTIAL else max(low, 0), 40_001)
        below = np.prod(ndtr((t[:, None] - mean) / scale), 1)
        largest = t[-1] - np.trapezoid(below, t)
        terms = f if link == EXPONENTIAL else log_expit(f)
        log_sum = logsumexp(terms, axis=1)
        control = f.max(1) if link == EXPONENTIAL else np.minimum(f.max(1), t[-1])
        rest = log_sum - control
        error = 5 * rest.std() / np.sqrt(len(z)) + 1e-5 * scale.max()
        assert abs(value - (largest + rest.mean())) < error
        drawn = np.exp(terms - log_sum[:, None])
        error = 5 * drawn.std(0) / np.sqrt(len(z)) + 1e-5
        assert np.all(np.abs(share - drawn.mean(0)) < error)


def test_a_schedule_that_ends_the_steps_is_no_convergence() -> None:
    """A bound that rises with every length of step: it stops where the steps do."""
    schedule = optax.cosine_decay_schedule(0.1, 400)
    sizes = np.array([schedule(i) for i in range(500)])
    stopped = 1000 - 0.5 * sizes.cumsum()
    judged = gpaug.diagnostics.convergence
    assert judged(stopped).converged
    assert judged(stopped, 1e-4, step_sizes=sizes).verdict == "still improving"
    assert judged(stopped, 1e-4, step_sizes=schedule).verdict == "still improving"
    settled = 1000 + 50 * np.exp(-sizes.cumsum())
    assert judged(settled, step_sizes=sizes).converged
    assert judged(settled, step_sizes=np.full(500, 0.3)) == judged(settled)
    assert judged(stopped, step_sizes=np.eye(500)[0]).verdict == "too short"
    with pytest.raises(ValueError, match="one per loss"):
        judged(stopped, step_sizes=sizes[1:])


ROWS = 1000


def real(rng):
    return rng.choice([-1, 1], ROWS) * 10 ** rng.uniform(-3, 3, ROWS)


def positive(rng):
    return 10 ** rng.uniform(-3, 3, ROWS)


def count(rng):
    return np.floor(10 ** rng.uniform(0, 3, ROWS)) - 1


def label(rng):
    return rng.integers(0, 2, ROWS)


def classes(rng):
    return np.stack([real(rng) for _ in range(3)], -1)


LINK = gpaug.PiecewiseLink.from_function(lambda f: f, 20, -3.0, 3.0)
DENSITIES = {
    "heteroscedastic": (gpaug.HeteroscedasticNormal, real, [real, real, positive]),
    "log-variance": (gpaug.LogVarianceNormal, real, [real, lambda r: real(r) / 20]),
    "svm": (gpaug.BayesianSVM, label, [real]),
    "poisson": (gpaug.LogisticPoisson, count, [real, positive]),
    "logistic-softmax": (gpaug.LogisticSoftmax, label, [classes]),
    "robust-max": (
        gpaug.RobustMax, label, [classes, lambda r: r.uniform(0.001, 0.999, ROWS)]
    ),
    "inverse Gaussian": (gpaug.InverseGaussian, positive, [positive, positive]),
    "generalised inverse Gaussian": (
        gpaug.GeneralizedInverseGaussian, positive,
        [lambda r: r.uniform(-5, 5, ROWS), positive, positive],
    ),
    "Polya-Gamma": (
        gpaug.PolyaGamma, lambda r: 10 ** r.uniform(-3, 1, ROWS),
        [lambda r: 10 ** r.uniform(-1, 2, ROWS), real],
    ),
    "normal + Laplace": (
        NormalLaplace, real, [real, lambda r: positive(r) ** 2, positive]
    ),
    "piecewise normal": (
        lambda f, scale: gpaug.PiecewiseNormal(f, LINK, scale), real, [real, positive]
    ),
}  # fmt: skip


@pytest.mark.parametrize("name", DENSITIES)
def test_single_precision_sees_the_tails(name: str) -> None:
    make, draw, parameters = DENSITIES[name]
    rng = np.random.default_rng(0)
    values = [np.asarray(p(rng), "float32") for p in (*parameters, draw)]
    if draw is label:
        values[-1] = values[-1].astype("int32")

    def log_prob(*values):
        return make(*values[:-1]).log_prob(values[-1])

    single = np.asarray(jax.jit(log_prob)(*values))
    with enable_x64(True):
        doubled = [v.astype(float) if v.dtype.kind == "f" else v for v in values]
        double = np.asarray(jax.jit(log_prob)(*doubled))
    assert np.isfinite(double).all()
    assert np.all(np.abs(single - double) < 1e-3 * np.maximum(1, np.abs(double)))


PREDICTED = {
    "heteroscedastic": (
        lambda f, g, s: gpaug.HeteroscedasticNormal(f, g, s), real, 2, [positive],
        ("loc", "precision_logits"),
    ),
    "log-variance": (
        lambda f, g: gpaug.LogVarianceNormal(f, g), real, 2, [],
        ("loc", "log_variance"),
    ),
    "softmax": (lambda f: dist.Categorical(logits=f), label, 1, [], ("logits",)),
    "logistic-softmax": (gpaug.LogisticSoftmax, label, 1, [], ("logits",)),
}  # fmt: skip


@pytest.mark.parametrize(
    "name",
    ["heteroscedastic", "logistic-softmax",
     *(slow(k) for k in ("log-variance", "softmax"))],
)  # fmt: skip
def test_predictions_have_no_density_of_zero(name: str) -> None:
    """They do not have infinite slopes either, and without variance they are the
    likelihood.
    """
    make, draw, number, others, latents = PREDICTED[name]
    rng = np.random.default_rng(0)
    latent = real if draw is real else classes
    means = {k: np.asarray(latent(rng), "float32") for k in latents}
    spread = {k: np.abs(latent(rng)).astype("float32") for k in latents}
    rest = [np.asarray(p(rng), "float32") for p in others]
    y = draw(rng).astype("float32" if draw is real else "int32")

    @jax.jit
    def slopes(means, spread):
        def total(means, spread):
            found = predictive(make(*means.values(), *rest), means, spread)
            log_prob = found.log_prob(y)
            return log_prob.sum(), log_prob

        return jax.grad(total, (0, 1), has_aux=True)(means, spread)

    gradients, found = slopes(means, spread)
    assert np.isfinite(found).all()
    assert all(np.isfinite(g).all() for g in jax.tree.leaves(gradients[0]))
    fixed = slopes(means, {k: np.zeros_like(v) for k, v in spread.items()})[1]
    exact = jax.jit(lambda *m: make(*m, *rest).log_prob(y))(*means.values())
    exact, fixed = np.asarray(exact), np.asarray(fixed)
    plain = np.abs(exact) < 12  # probabilities are correct to rounding of one
    np.testing.assert_allclose(fixed[plain], exact[plain], rtol=0.01, atol=1e-3)


def far_out(rng):
    """Means and variances of two latents, and observations in their tails."""
    mean, latent = (rng.normal(size=60) * 10 ** rng.uniform(-1, 1, 60) for _ in "fg")
    variances = 10 ** rng.uniform(-2, 1, (2, 60))
    y = mean + rng.choice([-1, 1], 60) * 10 ** rng.uniform(0, 2, 60)
    return [x.astype("float32") for x in (mean, latent, *variances, y)]


@pytest.mark.parametrize("name", ["log-variance", slow("heteroscedastic")])
def test_outliers_have_the_density_of_noise_beyond_the_nodes(name: str) -> None:
    """The reference is by NumPy; such noise is beyond 5.5 standard deviations of its
    latent.
    """
    make, _, _, _, names = PREDICTED[name]
    mean, latent, v, vg, y = far_out(np.random.default_rng(0))
    top = [2.0] if name == "heteroscedastic" else []

    @jax.jit
    def found():
        means, spread = (
            dict(zip(names, x, strict=True)) for x in ((mean, latent), (v, vg))
        )
        return predictive(make(*means.values(), *top), means, spread).log_prob(y)

    z = np.linspace(-60, 60, 100_001)[:, None]
    g = latent + np.sqrt(vg) * z
    total = v + np.exp(np.logaddexp(0, -g) - np.log(2.0) if top else g)
    terms = -0.5 * (np.log(2 * np.pi * total) + (y - mean) ** 2 / total + z**2)
    expected = logsumexp(terms, 0) + np.log(z[1] - z[0]) - 0.5 * np.log(2 * np.pi)
    seen = expected > -1000
    assert np.sum(seen & (expected < -30)) > 5
    np.testing.assert_allclose(found()[seen], expected[seen], rtol=1e-3, atol=1e-3)


def test_counts_far_from_their_latents() -> None:
    """The reference is by NumPy; in one case odds of a millionth have sixty events."""
    m, v = np.float32([-14, -5, 0, 30]), np.float32([1, 0.25, 0.01, 4])
    y, total = np.float32([60, 40, 90, 3]), np.int32([100, 50, 100, 70])

    @jax.jit
    def log_prob(m, v, y):
        d = dist.BinomialLogits(m, total)
        return predictive(d, {"logits": m}, {"logits": v}).log_prob(y)

    found = log_prob(m, v, y)
    z = np.linspace(-60, 60, 100_001)[:, None]
    f = m + np.sqrt(v) * z
    terms = y * log_expit(f) + (total - y) * log_expit(-f) - z**2 / 2
    expected = logsumexp(terms, 0) + np.log(z[1] - z[0]) - 0.5 * np.log(2 * np.pi)
    expected += gammaln(total + 1) - gammaln(y + 1) - gammaln(total - y + 1)
    np.testing.assert_allclose(found, expected, rtol=1e-3)


def test_logistic_softmax_of_latents_far_below_zero() -> None:
    m = jnp.array([[-100.0, -101.0, -140.0], [-30.0, -30.0, -30.0]])
    found, expected = (
        jax.jit(partial(expected_log_sum, link))(m, jnp.ones_like(m))
        for link in (LOGISTIC, EXPONENTIAL)
    )
    np.testing.assert_allclose(found, expected, rtol=1e-5)


CLASSES = 6


def test_drawn_classes_bound_the_logistic_softmax_on_average() -> None:
    """Over all subsets that hold the datum's class; and with all classes it is that."""
    rng = np.random.default_rng(0)
    f = 2 * rng.normal(size=CLASSES).astype("float32")
    others = [c for c in range(CLASSES) if c != 2]
    subsets = np.array([[2, *found] for found in combinations(others, 3)])
    d = gpaug.SampledLogisticSoftmax(f[subsets], CLASSES)
    zeros = np.zeros(len(subsets), int)

    @jax.jit
    def everything(f, d):
        whole = gpaug.LogisticSoftmax(f).log_prob(2)
        same = gpaug.SampledLogisticSoftmax(f, CLASSES).log_prob(2)
        still = {"logits": d.logits}, {"logits": jnp.zeros_like(d.logits)}
        expected = expected_log_prob(d, zeros, *still)
        return whole, same, d.log_prob(zeros).mean(), expected.mean()

    whole, same, mean, expected = everything(f, d)
    assert whole - 1 < mean < whole
    np.testing.assert_allclose(expected, mean, 1e-5)
    np.testing.assert_allclose(same, whole, rtol=1e-5)
    with pytest.raises(ValueError, match="3 or more"):
        gpaug.SampledLogisticSoftmax(f[:2], CLASSES)
    with pytest.raises(NotImplementedError, match="LogisticSoftmax"):
        d.sample(KEY)


def test_members_of_classes_stand_for_all_data() -> None:
    labels = np.array([0, 3, 3, 1, 3, 0, 3, 3])
    members = ClassMembers.of(labels, 5)
    total = np.bincount(members.rows.ravel(), members.weights.ravel(), 8)
    np.testing.assert_allclose(total, 1)

    def draw(key):
        with numpyro.handlers.seed(rng_seed=key):
            return members.draw(3, 2)

    drawn = jax.jit(jax.vmap(draw))(jax.random.split(KEY, 1000))
    batch = jax.tree.map(np.asarray, drawn)
    used = batch.scale > 0
    classes = np.take_along_axis(batch.classes, batch.own, 1)
    assert np.all(labels[batch.rows][used] == classes[used])
    scales = np.bincount(batch.rows.ravel(), batch.scale.ravel() / 1000, 8)
    np.testing.assert_allclose(scales, 1, atol=0.2)
    with pytest.raises(ValueError, match="0 .. 2"):
        ClassMembers.of(labels, 3)


# -- JAX's own checks ------------------------------------------------------------------


def logits(f):
    return dist.Bernoulli(logits=f)


@pytest.mark.parametrize(
    ("likelihood", "num_latents"),
    [
        (logits, None),
        slow(lambda f: dist.StudentT(4.0, f, 0.3), None),
        slow(gpaug.LogisticSoftmax, 3),
        slow(lambda f: gpaug.BayesianSVM(f), None),
    ],
)
def test_debug_flags_give_no_false_alarm(likelihood, num_latents) -> None:
    X = np.random.default_rng(0).normal(size=(30, 2)).astype("float32")
    y = (X.sum(1) > 0).astype("int32")

    def model(X, y=None, *, inducing):
        constraint = dist.constraints.positive
        lengthscale = numpyro.param("lengthscale", 1.0, constraint=constraint)
        kernel = gpaug.kernels.Matern52(lengthscale)
        gp = gpaug.GaussianProcess("f", kernel, inducing, num_latents=num_latents)
        with numpyro.plate("data", X.shape[0]):
            numpyro.sample("y", likelihood(gp(X)), obs=y)

    with jax.debug_nans(True), jax.debug_infs(True):
        svi = gpaug.ConjugateSVI(model, gpaug.AutoSparseGP(model))
        Z = X[:6]
        result = svi.run(jax.random.key(0), 3, X, y, inducing=Z, progress_bar=False)
        posterior = svi.posterior(result)
        assert np.isfinite(posterior.log_prob(X[:4], y[:4])).all()
        if likelihood is logits:  # the quick one
            return
        mcmc = numpyro.infer.MCMC(
            gpaug.EllipticalSlice(model), num_warmup=2, num_samples=3,
            progress_bar=False,
        )  # fmt: skip
        mcmc.run(jax.random.key(1), X, y, inducing=Z)
        assert np.isfinite(mcmc.get_samples()["f.v"]).all()


def test_slopes_of_a_projection_and_of_the_variance_that_it_leaves() -> None:
    """Beside float64, whose second derivatives are those of the formula. For the sum of
    the variances the chain rule had -.43 instead of .0006.
    """
    Z = np.linspace(-3.2, 3.2, 50)[:, None]
    X = np.random.default_rng(0).uniform(-3, 3, (400, 1))

    def moments(logs, *, formula=False):
        kernel = gpaug.kernels.Matern52(*jnp.exp(logs))
        if formula:
            across = kernel(Z, X)
            known = jnp.linalg.solve(kernel(Z, Z), across)
            mean = across.mean(1) @ known.mean(1)
            return (kernel(X) - (across * known).sum(0)).sum() + mean
        gp = SimpleNamespace(kernel=kernel, inducing=Z.astype(logs.dtype), jitter=None)
        found = project(gp, whitener(gp), X.astype(logs.dtype))
        return found.residual.sum() + jnp.square(found.projection.mean(-1)).sum()

    logs, slope = np.log([1.5, 3.0]), jax.jit(jax.grad(moments))
    single = slope(jnp.asarray(logs, jnp.float32))
    with enable_x64(True):
        double = slope(jnp.asarray(logs))
        curved, expected = (
            jax.jit(jax.hessian(partial(moments, formula=x)))(logs)
            for x in (False, True)
        )
    np.testing.assert_allclose(single, double, atol=1e-5 * len(X))
    np.testing.assert_allclose(curved, expected, rtol=1e-6)


def test_a_fit_that_rounding_stops_at_once_warns() -> None:
    """Without it, a start where the rate overflows was the result, "converged"."""

    def model(group, x, y=None):
        b = numpyro.sample("b", dist.Normal(0, 1))
        with numpyro.plate("groups", 20):
            a = numpyro.sample("a", dist.Normal(0, 1))
        with numpyro.plate("data", len(x)):
            numpyro.sample("y", dist.Poisson(jnp.exp(a[group] * b * x)), obs=y)

    rng = np.random.default_rng(1)
    data = rng.integers(0, 20, 200), rng.normal(size=200), rng.poisson(1.0, 200)
    svi = gpaug.ConjugateSVI(model, gpaug.AutoLatentGaussian(model))
    with pytest.warns(UserWarning, match="the fit may have stopped anywhere"):
        svi.run(jax.random.key(0), 5, *data, progress_bar=False)
